"""FLOPs of an operator, by PyTorch's own counter and by counting what a definition computes."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable
from itertools import pairwise
from typing import Any, ClassVar

import numpy as np
import rule_cases  # noqa: F401 (the cases register themselves)
import torch
from hypothesis import assume
from rule_draws import Draw, for_examples
from rule_truth import overload
from torch import Tensor
from torch.utils._pytree import tree_map_only
from torch.utils.flop_counter import FlopCounterMode

from lightning_autotp.operators import count_flops


class Number:
    """A number that counts what is done with it."""

    done: ClassVar[Counter[str]] = Counter()

    def _counted(self, kind: str) -> Number:
        Number.done[kind] += 1
        return self

    def __mul__(self, other: Number) -> Number:
        return self._counted("product")

    def __add__(self, other: Number) -> Number:
        return self._counted("sum")

    def __sub__(self, other: Number) -> Number:
        return self._counted("sum")

    def __truediv__(self, other: Number) -> Number:
        return self._counted("quotient")

    def conjugate(self) -> Number:
        return self


def numbers(value: Tensor) -> Any:
    """An array of that shape."""
    array = np.empty(tuple(value.shape), dtype=object)
    array.fill(Number())
    return array


def grouped(rows: Any, experts: Any, offsets: Tensor) -> None:
    starts = [0, *offsets.tolist()]
    for expert, (start, stop) in enumerate(pairwise(starts)):
        rows[start:stop] @ experts[expert]


def bilinear(x: Any, y: Any, weight: Any) -> None:
    for place in np.ndindex(x.shape[:-1]):
        (x[place] @ weight) @ y[place]


def substitute(matrix: Any, given: Any, left: bool) -> None:
    """Forward substitution; from the right the transposed system is solved."""
    columns = given if left else np.swapaxes(given, -1, -2)
    for place in np.ndindex(columns.shape[:-2]):
        for column in columns[place].T:
            for row in range(len(column)):
                for before in range(row):
                    column[row] - matrix[..., row, before].flat[0] * column[before]
                column[row] / matrix[..., row, row].flat[0]


# How a definition computes these. A product and the sum it goes to are 2, also for the first, which is added to zero.
BY_HAND: dict[str, Callable[[dict[str, Any]], object]] = {
    "aten.linear.default": lambda a: a["input"] @ a["weight"].T,
    "aten.matmul.default": lambda a: a["self"] @ a["other"],
    "aten.mv.default": lambda a: a["self"] @ a["vec"],
    "aten.dot.default": lambda a: a["self"] @ a["tensor"],
    "aten.vdot.default": lambda a: a["self"] @ a["other"],
    "aten.addmv.default": lambda a: a["mat"] @ a["vec"],
    "aten.addr.default": lambda a: a["vec1"][:, None] * a["vec2"],  # of docs/adding-an-operator.md
    "aten.addbmm.default": lambda a: a["batch1"] @ a["batch2"],
    "aten.bilinear.default": lambda a: bilinear(a["input1"], a["input2"], a["weight"]),
    "aten._grouped_mm.default": lambda a: grouped(a["self"], a["mat2"], a["offs"]),
    "transformers.grouped_mm_fallback.default": lambda a: grouped(a["input"], a["weight"], a["offs"]),
}
# Here every operation counts.
SUBSTITUTION = "aten.linalg_solve_triangular.default"


def counted_by_hand(name: str, arguments: dict[str, Any]) -> int | None:
    """Operations of the definition; ``None`` where there is none here."""
    if name not in (*BY_HAND, SUBSTITUTION):
        return None
    Number.done.clear()
    arrays = {
        key: numbers(value) if isinstance(value, Tensor) and value.is_floating_point() else value
        for key, value in arguments.items()
    }
    if name == SUBSTITUTION:
        substitute(arrays["self"], arrays["B"], arrays["left"])
        return sum(Number.done.values())
    BY_HAND[name](arrays)
    return 2 * Number.done["product"]


# PyTorch's counter knows no product with a vector: one for each element of the other operand.
WITH_VECTORS = {
    packet: lambda left, right, **_: 2 * math.prod(left)
    for packet in (torch.ops.aten.mv, torch.ops.aten.dot, torch.ops.aten.vdot)
}


def counted_by_torch(name: str, arguments: dict[str, Any]) -> int:
    """What PyTorch counts of the operators that this one is made of, on meta; 0 where it knows none of them."""
    given = tree_map_only(Tensor, lambda value: value.to("meta"), arguments)
    schema = overload(name)._schema.arguments
    with FlopCounterMode(display=False, custom_mapping=WITH_VECTORS) as counter:
        overload(name)(
            *(given[argument.name] for argument in schema if not argument.kwarg_only),
            **{argument.name: given[argument.name] for argument in schema if argument.kwarg_only},
        )
    return counter.get_total_flops()


# PyTorch's counter does not know grouped products, and their meta kernel refuses fp32.
UNKNOWN_TO_TORCH = {"aten._grouped_mm.default", "transformers.grouped_mm_fallback.default"}


def prove_flops(name: str, examples: int) -> None:
    """What a record counts must be what PyTorch's counter counts, or a count of what a definition computes."""
    by: Counter[str] = Counter()

    def check(draw: Draw, _: Any) -> None:
        called = draw.tape.last(name)
        arguments = draw.tape.arguments(called)
        if name == "aten.einsum.default":  # a sum over one element is none there
            assume(all(size > 1 for tensor in called.inputs for size in draw.tape.shape(tensor)))
        flops = count_flops(called, draw.tape.shape)
        assert count_flops(called, lambda tensor: tuple(map(float, draw.tape.shape(tensor)))) == flops
        by_torch = 0 if name in UNKNOWN_TO_TORCH else counted_by_torch(name, arguments)
        by_hand = counted_by_hand(name, arguments)
        if by_hand is not None:
            assert flops == by_hand
        if by_torch or by_hand is None:
            assert flops == by_torch
        by["torch"] += by_torch > 0
        by["hand"] += by_hand is not None

    for_examples(name, check, examples)
    assert by["torch"] or by["hand"] or name == "aten.outer.default", "nothing counted this product"
