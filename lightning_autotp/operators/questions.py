"""What a model's code asks of the numbers among its arguments: seen in a trace, and asked again of other numbers."""

from __future__ import annotations

import operator
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

Number = int | float

SIZE = "size "
"""Begins the place of a size that code asked a tensor for; then comes the size."""


@dataclass(frozen=True)
class Question:
    """What is computed from numbers of the arguments, or a comparison of them.

    Attributes:
        function: its name in ``operator``.
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
        value: Number = getattr(operator, self.function)(*operands)
        return value

    def places(self) -> Iterator[str]:
        """The places of the numbers that it is about."""
        for operand in self.operands:
            if isinstance(operand, Question):
                yield from operand.places()
            elif isinstance(operand, str):
                yield operand
