"""Numbers that note whether code asks what they are, or only computes with them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

_COMPUTING = (
    "__add__", "__radd__", "__sub__", "__rsub__", "__mul__", "__rmul__", "__truediv__", "__rtruediv__", "__floordiv__",
    "__rfloordiv__", "__mod__", "__rmod__", "__pow__", "__rpow__", "__neg__", "__pos__", "__abs__",
)  # fmt: skip
_ASKING = (
    "__eq__", "__ne__", "__lt__", "__le__", "__gt__", "__ge__", "__bool__", "__hash__", "__int__", "__float__",
    "__round__", "__trunc__", "__floor__", "__ceil__", "__str__", "__repr__", "__format__", "is_integer",
)  # fmt: skip


class NotedFloat(float):
    """A float, and each that is computed from it, which says so when Python code asks for its value.

    To functions written in C, as all of torch's are, it is the float.

    Args:
        value: the number.
        note: called when it is compared, hashed, rounded or written out.
    """

    note: Callable[[], object]

    def __new__(cls, value: float, note: Callable[[], object]) -> NotedFloat:
        """The same number."""
        made = super().__new__(cls, value)
        made.note = note
        return made

    def __reduce__(self) -> tuple[Any, ...]:
        return float, (float.__float__(self),)


def _computing(name: str) -> Callable[..., Any]:
    plain = getattr(float, name)

    def compute(self: NotedFloat, *others: Any) -> Any:
        result = plain(self, *others)
        return NotedFloat(result, self.note) if type(result) is float else result

    return compute


def _asking(name: str) -> Callable[..., Any]:
    plain = getattr(float, name)

    def ask(self: NotedFloat, *others: Any) -> Any:
        self.note()
        return plain(self, *others)

    return ask


for _name in _COMPUTING:
    setattr(NotedFloat, _name, _computing(_name))
for _name in _ASKING:
    setattr(NotedFloat, _name, _asking(_name))
