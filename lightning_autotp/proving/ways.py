"""Whether a model's code goes the same way in two calls, told by two traces of the whole model.

It does where both traces have the same operators on the same tensors, and every size that differs follows from one that
differs at its place in the other trace. Then what was proved of one call holds for the other.
"""

from __future__ import annotations

from operator import attrgetter
from typing import Any

from lightning_autotp.operators.graph import Graph, Operator, Ref

_SIZES = frozenset({
    "size", "sizes", "shape", "length", "start", "end", "step", "split_size", "split_sizes", "sections", "indices",
    "repeats", "output_size", "num_samples", "n", "m", "window_size", "pad", "shifts",
})  # fmt: skip
"""Arguments of operators that are, or follow from, sizes of tensors."""


def same_way(one: Graph, other: Graph) -> dict[int, int] | None:
    """Whether code went the same way in two traces of a model, but for the sizes of what it was given.

    Returns:
        The tensors of the one that depend on parameters, each with the other's that stands for it; ``None`` if the code
        went another way.
    """
    left, right = _steps(one), _steps(other)
    pairs = _Pairs(one, other)
    if (
        one.opaque == other.opaque
        and len(left) == len(right)
        and all(pairs.are_same(a, b) for a, b in zip(left, right, strict=True))
        and pairs.tensors_match(one.outputs, other.outputs)
    ):
        return {mine: theirs for mine, theirs in pairs.tensors.items() if theirs is not None}
    return None


def _steps(graph: Graph) -> list[Operator]:
    """The operators through which parameters go; what is computed from a batch alone is the same on every rank."""
    return [
        operator
        for operator in graph.operators
        if not all(graph.tensors[tensor].is_static for tensor in operator.outputs or operator.inputs)
    ]


class _Pairs:
    """Which tensors and sizes of one graph stand for which of the other's, as far as they were compared."""

    def __init__(self, one: Graph, other: Graph) -> None:
        self.one, self.other = one, other
        named = {name: tensor for tensor, name in other.parameters.items()}
        self.tensors: dict[int, int | None] = {tensor: named.get(name) for tensor, name in one.parameters.items()}
        self.sizes: dict[int, int] = {}

    def are_same(self, one: Operator, other: Operator) -> bool:
        """Whether two operators compute the same of the same tensors; notes which of their results are alike."""
        what = attrgetter("name", "module", "boundary", "rounding")
        if what(one) != what(other) or len(one.outputs) != len(other.outputs):
            return False
        theirs = dict(other.arguments)
        if [name for name, _ in one.arguments] != list(theirs):
            return False
        if not all(self._alike(value, theirs[name], name in _SIZES) for name, value in one.arguments):
            return False
        self.tensors.update(zip(one.outputs, other.outputs, strict=True))
        return all(map(self._same_shape, one.outputs, other.outputs))

    def tensors_match(self, one: list[int], other: list[int]) -> bool:
        """Whether these are the same tensors."""
        return len(one) == len(other) and all(map(self._same_tensor, one, other))

    def _alike(self, one: Any, other: Any, are_sizes: bool) -> bool:
        if isinstance(one, Ref) and isinstance(other, Ref):
            return self._same_tensor(one.tensor, other.tensor)
        if isinstance(one, tuple) and isinstance(other, tuple):
            return len(one) == len(other) and all(self._alike(a, b, are_sizes) for a, b in zip(one, other, strict=True))
        if type(one) is not type(other):
            return False
        if type(one) is int and are_sizes:
            return self._same_size(one, other)
        return type(one) is float or bool(one == other)  # another number is computed with alike

    def _same_tensor(self, one: int, other: int) -> bool:
        static = self.one.tensors[one].is_static
        if static or self.other.tensors[other].is_static:
            return static and self.other.tensors[other].is_static and self._same_shape(one, other)
        return self.tensors.get(one) == other

    def _same_shape(self, one: int, other: int) -> bool:
        left, right = self.one.tensors[one], self.other.tensors[other]
        return (
            left.is_floating == right.is_floating  # autocast computes in others
            and len(left.shape) == len(right.shape)
            and all(map(self._same_size, left.shape, right.shape))
        )

    def _same_size(self, one: int, other: int) -> bool:
        """Whether one size may stand for the other: everywhere the same one does."""
        if one in (0, 1) or other in (0, 1):
            return one == other
        if one < 0 or other < 0:
            return (one < 0) == (other < 0) and (one == other or self._same_size(-one, -other))
        return self.sizes.setdefault(one, other) == other
