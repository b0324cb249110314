"""What was gathered for a product is gathered again in the backward pass, and only this rank's part is kept until then.

After *Reducing Activation Recomputation in Large Transformer Models* (Korthikanti et al.,
https://arxiv.org/abs/2205.05198): the weight gradient of a column-parallel layer needs its whole input, which every
rank would hold from the forward on. That input may be another view of what was gathered, with the same elements:
``hidden.view(-1, width)``.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from lightning_autotp.private.torch_private import base_of

_NAME = "autotp_gathered"


class _Gathered:
    """A gathered tensor that autograd keeps several times, also as other views, and once as this rank's part.

    Args:
        part: this rank's part, ``[..., seq/tp, ...]``.
        gather: gives the whole tensor, without gradients. Collective.
    """

    def __init__(self, part: Tensor, gather: Callable[[Tensor], Tensor]) -> None:
        self.part, self.gather = part.detach(), gather
        self.kept = self.asked = 0
        self.again: Tensor | None = None

    def whole(self) -> Tensor:
        """The whole tensor, gathered once for all that keep it."""
        whole = self.again if self.again is not None else self.gather(self.part)
        self.asked += 1
        self.again = whole if self.asked % self.kept else None
        return whole


def keep_part(whole: Tensor, part: Tensor, gather: Callable[[Tensor], Tensor]) -> Tensor:
    """Note on a gathered tensor how to gather it again. Not collective."""
    if torch.is_grad_enabled() and not whole.is_meta and not torch.compiler.is_compiling():
        setattr(whole, _NAME, _Gathered(part, gather))
    return whole


def saving_part(whole: Tensor) -> AbstractContextManager[Any]:
    """Within it autograd keeps this rank's part instead of a tensor that was gathered.

    The backward pass is collective then.

    Args:
        whole: what was gathered, or a reshaped view of it.
    """
    if torch.compiler.is_compiling():
        return nullcontext()
    base = base_of(whole)
    if base is not None and (base.numel() != whole.numel() or not whole.is_contiguous()):
        return nullcontext()
    gathered: _Gathered | None = getattr(whole if base is None else base, _NAME, None)
    if gathered is None:
        return nullcontext()
    memory, dtype = whole.untyped_storage().data_ptr(), gathered.part.dtype

    def pack(tensor: Tensor) -> Any:
        if tensor.untyped_storage().data_ptr() != memory or tensor.dtype != dtype:
            return tensor
        gathered.kept += 1
        return tensor.size(), tensor.stride(), tensor.storage_offset()

    def unpack(kept: Any) -> Tensor:
        return kept if isinstance(kept, Tensor) else gathered.whole().as_strided(*kept)

    return saved_tensors_hooks(pack, unpack)
