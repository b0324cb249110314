"""What goes over the wire: a mode that counts the bytes of collectives."""

from __future__ import annotations

from collections import Counter
from typing import Any

from torch.utils._python_dispatch import TorchDispatchMode

_COUNTED = {
    "_c10d_functional.all_reduce": "all_reduce",
    "_c10d_functional.all_gather_into_tensor": "all_gather",
    "_c10d_functional.reduce_scatter_tensor": "reduce_scatter",
    "c10d.allreduce_": "gradient sum",
}

_NO_TRANSFER = {"_c10d_functional.wait_tensor"}


class Wire(TorchDispatchMode):
    """Counts collectives: calls, and bytes of the whole tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: Counter[str] = Counter()
        self.bytes: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        name = str(func.overloadpacket)
        if "c10d" in name and name not in _NO_TRANSFER:
            kind = _COUNTED[name]
            moved = result if kind == "all_gather" else args[0][0] if name == "c10d.allreduce_" else args[0]
            self.calls[kind] += 1
            self.bytes[kind] += moved.nbytes
        return result
