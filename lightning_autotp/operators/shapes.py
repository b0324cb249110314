"""The shapes in one call of an operator: all that its FLOPs, its uniformity or its result's shape follow from."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from lightning_autotp.operators.graph import Ref, refs

Shape = Sequence[float]
"""Sizes of a tensor's dims. They are fractions where a plan is priced for another number of tokens than was traced."""


class Shapes:
    """The shapes of the tensors that a call reads and makes, and its literal arguments, by the schema's names.

    Args:
        arguments: the operator's arguments, tensors as :class:`~lightning_autotp.operators.graph.Ref`.
        outputs: the tensors it makes.
        shape_of: the shape of a tensor.
    """

    def __init__(
        self, arguments: Sequence[tuple[str, Any]], outputs: Sequence[int], shape_of: Callable[[int], Shape]
    ) -> None:
        self._arguments, self._outputs, self._shape_of = dict(arguments), outputs, shape_of

    def __getitem__(self, name: str) -> Shape:
        """The shape of a tensor argument."""
        return self._shape_of(self._arguments[name].tensor)

    def each(self, name: str) -> list[Shape]:
        """The shapes of the tensors of a list argument."""
        return [self._shape_of(ref.tensor) for ref in self._arguments[name]]

    def literal(self, name: str) -> Any:
        """An argument that is no tensor; ``None`` where the operator has none of this name."""
        value = self._arguments.get(name)
        return None if isinstance(value, Ref) else value

    def named(self) -> list[tuple[str, Shape]]:
        """Every argument that is a tensor, with its shape."""
        return [
            (name, self._shape_of(value.tensor)) for name, value in self._arguments.items() if isinstance(value, Ref)
        ]

    @property
    def inputs(self) -> list[Shape]:
        """The shape of every tensor that is read, in the order of the arguments."""
        return [self._shape_of(ref.tensor) for value in self._arguments.values() for ref in refs(value)]

    @property
    def out(self) -> Shape:
        """The shape of the (first) output."""
        return self._shape_of(self._outputs[0])
