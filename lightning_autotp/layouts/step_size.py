"""How much data a step of training is given, and how much a plan is to be priced for. Plain data."""

from __future__ import annotations

from dataclasses import dataclass

NOMINAL_TOKENS = 16_384
"""Tokens of a step of which nothing is said."""


@dataclass(frozen=True)
class StepSize:
    """What one forward and backward pass of one copy of the model is given.

    Attributes:
        rows: sequences, or samples of whatever else the model takes.
        lengths: tokens of a sequence, one number for every kind of sequence (an encoder's and a decoder's); none where
            the model takes no sequences.
    """

    rows: int = 1
    lengths: tuple[int, ...] = ()

    @property
    def longest(self) -> int:
        """Tokens of the longest sequence; 0 without any."""
        return max(self.lengths, default=0)

    def __str__(self) -> str:
        return f"{self.rows} x {self.longest} tokens" if self.lengths else f"{self.rows} rows"


@dataclass(frozen=True)
class TokensPerStep:
    """What a plan is to be priced for.

    Attributes:
        number: tokens of a step, where no more is known.
        size: its rows and their length, where they are known.
        source: who said so, for the report.
    """

    number: int = NOMINAL_TOKENS
    size: StepSize | None = None
    source: str = "nominal: tokens_per_step says it"

    @classmethod
    def given(cls, value: int | tuple[int, int] | TokensPerStep | None) -> TokensPerStep:
        """What a user said: a number of tokens, ``(sequences, tokens of each)``, or nothing.

        Raises:
            ValueError: if these are no positive numbers.
        """
        if value is None:
            return cls()
        if isinstance(value, TokensPerStep):
            return value
        numbers = value if isinstance(value, tuple | list) else (value,)
        if len(numbers) not in (1, 2) or not all(type(number) is int and number > 0 for number in numbers):
            raise ValueError(
                f"tokens_per_step is {value!r}: it must be a positive number of tokens, or (sequences, tokens of each)"
            )
        size = StepSize(numbers[0], (numbers[1],)) if len(numbers) == 2 else None
        return cls(numbers[0], size, "as tokens_per_step says")
