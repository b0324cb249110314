"""What code that no trace shows makes of a part: the same part of the whole's result, or it is not known."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from lightning_autotp.applying.typed_tensors import OWN, UNIFORM_TYPE, VIEWED, Call, TensorTypes
from lightning_autotp.capture.call_sites import call_leaves
from lightning_autotp.solving.paths import ANY, STATIC, ShardType, Type

ROWS, OTHER_ROWS = (ShardType(((0, cut, 4),)) for cut in ("one way", "another"))
COLUMNS = ShardType(((1, "one way", 6),))


class Given:
    """Tensors ``[4, 6]`` of some types, a part of a vector of columns, and a drawn number for each row."""

    def __init__(self) -> None:
        self.types = TensorTypes(lambda _: ANY, beside=(ANY,), of_nothing=ANY)
        self.rows, self.more_rows, self.other_rows, self.columns = (torch.ones(4, 6) for _ in range(4))
        self.alike, self.static, self.unknown = (torch.ones(4, 6) for _ in range(3))
        self.bias, self.drawn = torch.ones(6), torch.ones(4, 1)
        for tensor, kind in {
            self.rows: ROWS, self.more_rows: ROWS, self.other_rows: OTHER_ROWS, self.columns: COLUMNS,
            self.bias: ShardType(((0, "one way", 6),)), self.drawn: OWN, self.alike: UNIFORM_TYPE, self.static: STATIC,
        }.items():  # fmt: skip
            self.types.put(tensor, kind)

    def made_by(self, func: Any, *args: Any) -> Type | None:
        return self.types.made_by(Call(func, func.__name__, [call_leaves(value) for value in args], {}))


@pytest.mark.parametrize(
    ("call", "wanted"),
    [
        (lambda g: (torch.add, g.rows, g.more_rows), ROWS),
        (lambda g: (torch.add, g.rows, 1.0), ROWS),
        (lambda g: (torch.add, g.rows, g.unknown), ROWS),
        (lambda g: (torch.add, g.rows, g.alike), ROWS),
        (lambda g: (torch.add, g.columns, g.drawn), COLUMNS),  # the same numbers in every column
        (lambda g: (torch.add, g.columns, g.bias), COLUMNS),  # which is cut where they are
        (lambda g: (torch.add, g.rows, g.other_rows), None),
        (lambda g: (torch.add, g.rows, g.columns), None),
        (lambda g: (torch.add, g.rows, g.drawn), None),
        (lambda g: (torch.add, g.rows, g.static), None),
        (lambda g: (Tensor.sum, g.rows), None),
        (lambda g: (Tensor.T.__get__, g.rows), None),
        (lambda g: (Tensor.view, g.rows, (2, 4, 3)), VIEWED),
        (lambda g: (Tensor.__getitem__, g.rows, (None, slice(None))), VIEWED),
        (lambda g: (Tensor.__getitem__, g.rows, slice(2)), None),
        (lambda g: (Tensor.__setitem__, g.rows, ..., g.more_rows), ROWS),
        (lambda g: (Tensor.__setitem__, g.rows, 0, 1.0), None),
        (lambda g: (Tensor.__setitem__, g.alike, 0, 0.0), OWN),
        (lambda g: (torch.where, g.rows), None),
        (lambda g: (torch.where, g.rows, g.more_rows, 0.0), ROWS),
        (lambda g: (torch.randn, 4, 6), OWN),
        (lambda g: (torch.randn_like, g.unknown), OWN),
        (lambda g: (torch.randn_like, g.rows), None),
        (lambda g: (torch.tensor, [1.0, 2.0]), OWN),
        (lambda g: (torch.as_tensor, g.unknown), ANY),
        (lambda g: (torch.zeros, 4, 6), UNIFORM_TYPE),
        (lambda g: (Tensor.__getitem__, g.alike, 0), UNIFORM_TYPE),
        (lambda g: (Tensor.add, g.alike, g.alike), UNIFORM_TYPE),
        (lambda g: (Tensor.add, g.alike, g.drawn), OWN),
        (lambda g: (Tensor.sum, g.alike), STATIC),
        (lambda g: (torch.empty, 4), ANY),
    ],
)
def test_what_a_function_makes(call: Callable[[Given], tuple[Any, ...]], wanted: Type | None) -> None:
    given = Given()
    assert given.made_by(*call(given)) == wanted


@pytest.mark.parametrize(
    ("view", "wanted"),
    [
        (lambda x: x.unsqueeze(0), ShardType(((1, "one way", 4),))),
        (lambda x: x.expand(2, 4, 6), ShardType(((1, "one way", 4),))),
        (lambda x: x.view(24), None),
        (lambda x: x.view(6, 4), None),
    ],
)
def test_what_a_view_is_a_part_of(view: Callable[[Tensor], Tensor], wanted: Type | None) -> None:
    given = Given()
    call = Call(Tensor.view, "view", [[given.rows]], {})
    assert given.types.of_view(call, view(given.rows)) == wanted


def test_what_is_written_is_what_all_tensors_of_its_memory_are() -> None:
    given = Given()
    row = given.alike[0]
    given.types.put(row, UNIFORM_TYPE)
    given.types.write(row, OWN)
    assert given.types.of(given.alike) == OWN
    given.types.write(given.static, ROWS)
    assert given.types.of(given.static) == ROWS
    assert given.types.of(given.unknown) == ANY


def test_a_tensor_that_has_the_number_of_one_that_is_gone_is_not_taken_for_it() -> None:
    types = TensorTypes(lambda _: ANY)
    for _ in range(100):
        tensor = torch.empty(3)
        assert types.of(tensor) == ANY
        types.put(tensor, ROWS)
