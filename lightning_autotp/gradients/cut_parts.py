"""Gradients that FSDP2 has cut again over the data axis, and that represent the whole gradient.

Such a gradient is a ``DTensor`` over the data axis alone: its own norm is that of the tensor-parallel part, another one
for every tensor-parallel rank. :class:`CutGradientPart` is the same object as one of a subclass, with the same rules as
:class:`~lightning_autotp.gradients.parts.GradientPart`, but for those that need the whole's indices: rows,
masks of the whole shape and random numbers are refused.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from lightning_autotp.gradients.counted import counted_elements
from lightning_autotp.gradients.elementwise import EACH_ELEMENT, become_part
from lightning_autotp.gradients.whole_quantities import QUANTITIES, PartOfGradient
from lightning_autotp.parameters.local_blocks import counted_blocks, plain, shard_group
from lightning_autotp.ranks.group import TPGroup


class CutGradientPart(PartOfGradient, DTensor):
    """This process's part of a gradient, or of what was computed from one elementwise."""

    plain = DTensor

    @property
    def said(self) -> str:
        """In words, what this is a part of."""
        shapes = f"{list(self.shape)} of {list(self.part.shape)}"
        return f"the gradient of {self.part.name} ({shapes}, sharded again by FSDP2)"

    @property
    def sharing(self) -> tuple[TPGroup, ...]:
        """The tensor-parallel group, and the data-parallel one."""
        over_data = shard_group(self)
        assert over_data is not None
        return self.part.group, TPGroup.of(over_data)

    def counted(self) -> Tensor:
        """The elements that this process owns."""
        return counted_elements(plain(self), counted_blocks(self, self.part, self.part.group))

    def like(self, tensor: Tensor) -> Tensor:
        """The same object, marked as a part of the same whole; not a parameter, which ``type_as`` gives as it is."""
        if not isinstance(tensor, nn.Parameter):
            become_part(tensor, CutGradientPart, self.part)
        return tensor


def _as_dtensor(func: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    return func(args[0].detach(), *args[1:], **kwargs)


def _copy(func: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    gradient, memo = args
    return copy.deepcopy(gradient.detach(), memo)  # which keeps it in the memo, or its id would come again


CutGradientPart.handlers = {
    **QUANTITIES,
    **EACH_ELEMENT,
    Tensor.__deepcopy__: _copy,
    Tensor.__reduce_ex__: _as_dtensor,
}
