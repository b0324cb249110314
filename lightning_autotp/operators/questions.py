"""What a model's code asks of the numbers among its arguments: seen in a trace, and asked again of other numbers."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

Number = int | float

SIZE = "size "
"""Begins the place of a size that code asked a tensor for; then comes the size."""
DIM = "dim "
"""Begins the place of a size of a tensor among the arguments; then come where the tensor is, and which dim it is."""
OF_TENSOR = "size of"
"""The function of a trace's tensor and a dim of it that is the size; which is followed to what is given afterwards."""
TOLD = "pos"
"""The function of a question that asks what a size is."""
_LENGTHS: dict[str, Callable[..., int]] = {
    "sliced": lambda size, start, end, step: len(range(size)[start:end:step]),
    "counted": lambda start, end, step: len(range(start, end, step)),
}
"""How long a part of a dim is, and a range."""


@dataclass(frozen=True)
class Question:
    """What is computed from numbers of the arguments, or a comparison of them.

    Attributes:
        function: its name in ``operator``, or what a length follows by.
        operands: numbers, places of numbers in the arguments, and what is computed from these.
    """

    function: str
    operands: tuple[Question | str | Number, ...]

    def answer(self, numbers: Mapping[str, Number]) -> Number | None:
        """Its answer for other numbers, each given with its place; ``None`` where there is none."""
        try:
            return self._value(numbers)
        except (LookupError, ArithmeticError, ValueError, TypeError):
            return None

    def _value(self, numbers: Mapping[str, Number]) -> Number:
        operands: list[Number] = []
        for operand in self.operands:
            if isinstance(operand, Question):
                operands.append(operand._value(numbers))
            else:
                operands.append(numbers[operand] if isinstance(operand, str) else operand)
        function = _LENGTHS.get(self.function) or getattr(operator, self.function)
        value: Number = function(*operands)
        return value

    def places(self) -> Iterator[str]:
        """The places of the numbers that it is about."""
        for operand in self.operands:
            if isinstance(operand, Question):
                yield from operand.places()
            elif isinstance(operand, str):
                yield operand

    def where(self, origin: Callable[[int, int], Expression | None]) -> Expression | None:
        """The same with what a trace's sizes follow from in their place.

        Args:
            origin: what the size of a tensor's dim follows from; ``None`` where that is not known.

        Returns:
            A number if it follows from constants alone, and ``None`` where something of it is not known.
        """
        if self.function == OF_TENSOR:
            (tensor, dim) = self.operands
            return origin(tensor, dim)  # type: ignore[arg-type]
        operands = [one.where(origin) if isinstance(one, Question) else one for one in self.operands]
        known = tuple(one for one in operands if one is not None)
        if len(known) < len(operands):
            return None
        replaced = Question(self.function, known)
        return replaced if next(replaced.places(), None) is not None else replaced.answer({})

    @property
    def has_size(self) -> bool:
        """Whether it is about the size of a trace's tensor."""
        return self.function == OF_TENSOR or any(
            operand.has_size for operand in self.operands if isinstance(operand, Question)
        )


Expression = Question | str | Number
"""A number of the arguments by its place, what is computed from such, or a constant."""


def dim_place(place: str, dim: int) -> str:
    """The place of a size of a tensor that is given at a place."""
    return f"{DIM}{place} {dim}"
