"""What one training step holds in memory and sends, as PyTorch's dispatcher sees it."""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

_SENT = ("_c10d_functional", "c10d")
_NOT_SENT = ("wait_tensor", "barrier", "monitored_barrier_")


class Meter(TorchDispatchMode):
    """Counts, while it is on, the collectives and the bytes of what is allocated and not freed.

    Attributes:
        calls: collectives.
        sent: bytes that a rank sends in them where they go in rings, which all-reduced ones do twice.
        peak: the most bytes that were held at once of what was allocated meanwhile.
    """

    def __init__(self, ranks: int) -> None:
        super().__init__()
        self.ranks = ranks
        self.calls = self.held = self.peak = 0
        self.sent = 0.0
        self._known: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(not issubclass(kind, Tensor) or kind not in (Tensor, torch.nn.Parameter) for kind in types):
            return NotImplemented  # a subclass takes it apart, and the parts come here
        result = func(*args, **(kwargs or {}))
        if func.namespace in _SENT and func.overloadpacket.__name__ not in _NOT_SENT:
            tensors = [leaf.nbytes for leaf in tree_leaves((args, kwargs, result)) if isinstance(leaf, Tensor)]
            passes = 2 if "reduce" in str(func) and "scatter" not in str(func) else 1
            self.calls += 1
            self.sent += passes * (self.ranks - 1) * max(tensors) / self.ranks
        for leaf in tree_leaves(result):
            if isinstance(leaf, Tensor) and leaf.layout is torch.strided and not leaf.is_meta:
                self._see(leaf.untyped_storage())
        return result

    def _see(self, storage: torch.UntypedStorage) -> None:
        key = storage._cdata
        if key in self._known:
            return
        self._known.add(key)
        size = storage.nbytes()
        self.held += size
        self.peak = max(self.peak, self.held)
        weakref.finalize(storage, self._gone, key, size)

    def _gone(self, key: int, size: int) -> None:
        self._known.discard(key)
        self.held -= size
