"""Drawing the arguments of an operator for a proof of its rule, and the table of what is drawn for which operator."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from typing import Any, TypeVar

import pytest
import torch
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from rule_truth import Tape
from torch import Tensor

Value = TypeVar("Value")
SIZES = (1, 2, 2, 3, 4, 5, 6)
EXAMPLES = 10


class Draw:
    """Draws for one example, and the tape it goes to."""

    def __init__(self, data: st.DataObject) -> None:
        self.data = data
        self.tape = Tape(seed=data.draw(st.integers(0, 3)))
        self.ranks: int = data.draw(st.integers(2, 4))

    def one(self, *values: Value) -> Value:
        return self.data.draw(st.sampled_from(values))

    def shape(self, least: int = 1, most: int = 3) -> tuple[int, ...]:
        return tuple(self.one(*SIZES) for _ in range(self.one(*range(least, most + 1))))

    def dim(self, shape: tuple[int, ...]) -> int:
        return self.one(*range(-len(shape), len(shape)))

    def dims(self, shape: tuple[int, ...]) -> list[int]:
        return self.data.draw(st.lists(st.sampled_from(range(len(shape))), min_size=1, unique=True))

    def coarse(self) -> Draw:
        self.tape.coarse = True
        return self

    def operand(self, *shape: int, positive: bool = False, dtype: torch.dtype = torch.float64) -> Tensor:
        """A tensor of this shape that depends on a parameter: one itself, or made of other parameters' dims."""

        def parameter(*sizes: int) -> Tensor:
            return self.tape.parameter(*sizes, positive=positive, dtype=dtype)

        dim = self.one(*range(len(shape))) if shape else 0
        size = shape[dim] if shape else 1
        before, after = shape[:dim], shape[dim + 1 :]
        kind = self.one("plain", "plain", "merged", "factored", "joined", "section")
        if kind == "merged" and after:
            return self.tape.call("aten.view.default", parameter(*before, size * after[0], *after[1:]), list(shape))
        factors = [factor for factor in range(2, size) if size % factor == 0]
        if kind == "factored" and factors:
            factor = self.one(*factors)
            return self.tape.call("aten.view.default", parameter(*before, factor, size // factor, *after), list(shape))
        if kind == "joined" and size > 1:
            first = self.one(*range(1, size))
            return self.tape.call(
                "aten.cat.default", [parameter(*before, first, *after), parameter(*before, size - first, *after)], dim
            )
        if kind == "section" and shape:
            start, rest = self.one(0, 1, 3), self.one(0, 2)
            fused = parameter(*before, start + size + rest, *after)
            return self.tape.call("aten.slice.Tensor", fused, dim, start, start + size)
        return parameter(*shape)

    def other(self, *shape: int, positive: bool = False, like: Tensor | None = None) -> Tensor:
        """A second operand: perhaps constant, perhaps the first one again."""
        kind = self.one("operand", "operand", "constant", "same")
        if kind == "same" and like is not None and tuple(like.shape) == shape:
            return like
        if kind == "constant":
            return self.tape.constant(self.tape.draw(*shape, positive=positive))
        return self.operand(*shape, positive=positive)

    def narrowed(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """A shape that broadcasts to the given one."""
        sizes = tuple(self.one(size, size, 1) for size in shape)
        return sizes[self.one(*range(len(shape) + 1)) if self.one(False, True) else 0 :]

    def mask(self, *shape: int) -> Tensor:
        """Booleans that depend on a parameter, or constant ones."""
        if self.one(True, False):
            return self.tape.call("aten.gt.Scalar", self.operand(*shape), 0)
        return self.tape.constant(self.tape.draw(*shape) > 0)


Case = Callable[[Draw], Any]
CASES: dict[str, Case] = {}


def case(*names: str) -> Callable[[Callable[[Draw, str], Any]], Callable[[Draw, str], Any]]:
    """Make a function of ``(draw, operator's name)`` the case of these operators."""

    def decorate(function: Callable[[Draw, str], Any]) -> Callable[[Draw, str], Any]:
        for name in names:
            assert name not in CASES
            CASES[name] = lambda draw, name=name: function(draw, name)
        return function

    return decorate


def rare_at_night(names: Iterable[str]) -> list[Any]:
    """The operators' names, those of special functions marked: they are elementwise as a hundred others are."""
    return [pytest.param(name, marks=pytest.mark.nightly) if ".special_" in name else name for name in names]


def for_examples(name: str, check: Callable[[Draw, Any], None], examples: int = EXAMPLES) -> None:
    """Run an operator's case on a few examples, each time followed by a check of what it gave."""

    @settings(max_examples=examples, phases=(Phase.generate,))
    @given(st.data())
    def example(data: st.DataObject) -> None:
        draw = Draw(data)
        check(draw, CASES[name](draw))

    example()


def prove(name: str, examples: int = EXAMPLES) -> Counter[str]:
    """Run an operator's case on a few examples; how many combinations of each kind were proven."""
    seen: Counter[str] = Counter()

    def check(draw: Draw, result: Any) -> None:
        # What it gives meets other parameters, so that dims which the operator itself makes are candidates, too.
        for output in [result] if isinstance(result, Tensor) else result:
            draw.tape.call("aten.mul.Tensor", output, draw.tape.parameter(*output.shape))
        seen.update(draw.tape.prove(name, draw.ranks))

    for_examples(name, check, examples)
    return seen
