"""What code that no trace shows makes of a part: the same part of the whole's result, or it is not known."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from lightning_autotp.applying.read_by_records import cut_dim
from lightning_autotp.applying.typed_tensors import OWN, UNIFORM_TYPE, Call, TensorTypes
from lightning_autotp.capture.nested import tensors_in
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
        return self.types.made_by(Call.of(func, func.__name__, args, {}))


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
        (lambda g: (Tensor.sum, g.rows, 0), None),
        (lambda g: (Tensor.sum, g.rows, 1), ShardType(((0, "one way", 4),))),
        (lambda g: (Tensor.norm, g.rows, 2, 1, True), ROWS),
        (lambda g: (Tensor.softmax, g.rows, -1), ROWS),
        (lambda g: (Tensor.softmax, g.rows, 0), None),
        (lambda g: (Tensor.cumsum, g.columns, 1), None),
        (lambda g: (Tensor.T.__get__, g.rows), ShardType(((1, "one way", 4),))),
        (lambda g: (torch.stack, [g.rows, g.more_rows]), ShardType(((1, "one way", 4),))),
        (lambda g: (torch.stack, [g.rows, g.other_rows]), None),
        (lambda g: (torch.cat, [g.rows, g.more_rows], 1), ROWS),
        (lambda g: (torch.cat, [g.rows, g.more_rows], 0), None),
        (lambda g: (torch.outer, g.bias, g.bias), None),  # of the whole's blocks a rank would have one
        (lambda g: (torch.mm, g.unknown, g.columns), None),
        (lambda g: (torch.max, g.rows, 1), None),  # the places, too
        (lambda g: (Tensor.view, g.rows, (4, 2, 3)), ShardType(((0, "one way", 4),))),
        (lambda g: (Tensor.view, g.rows, (2, 2, 6)), None),
        (lambda g: (Tensor.unsqueeze, g.rows, 0), ShardType(((1, "one way", 4),))),
        (lambda g: (Tensor.expand, g.rows, (2, 4, 6)), ShardType(((1, "one way", 4),))),
        (lambda g: (Tensor.view, g.rows, -1), None),
        (lambda g: (Tensor.__getitem__, g.rows, (None, slice(None))), ShardType(((1, "one way", 4),))),
        (lambda g: (Tensor.__getitem__, g.rows, (slice(None), 0)), ShardType(((0, "one way", 4),))),
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
    ("kind", "has_gradient", "wanted"),
    [
        ("R", True, ShardType(((1, "one way", 4),))),
        ("R", False, ShardType(((1, "one way", 4),))),
        ("I", False, ShardType(((1, "one way", 4),))),
        ("I", True, None),  # its gradient would be a share on each rank, and nothing adds them up
        (ANY, False, None),
    ],
)
def test_a_product_with_what_every_rank_has(kind: Type, has_gradient: bool, wanted: Type | None) -> None:
    given = Given()
    given.types.put(given.unknown, kind)
    given.unknown.requires_grad_(has_gradient)
    assert given.made_by(F.linear, given.unknown, given.rows) == wanted
    assert given.made_by(F.linear, given.unknown, given.columns) is None  # a share of a sum
    row = given.unknown[0]
    if kind != ANY:  # of which nothing is known
        given.types.put(row, kind)
        assert given.made_by(torch.mul, given.rows, row) == (ROWS if wanted else None)
        assert given.made_by(torch.mul, given.columns, row) is None  # a whole one that is as long as the part


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


CALLS: dict[str, tuple[Any, Callable[[Tensor], tuple[Any, ...]], int]] = {
    "sum": (Tensor.sum, lambda x: (x,), 0),
    "sum of rows": (Tensor.sum, lambda x: (x, 1), 1),
    "sum of columns": (Tensor.sum, lambda x: (x, 0), 1),
    "norms": (Tensor.norm, lambda x: (x, 2, 0, True), 1),
    "largest": (Tensor.amax, lambda x: (x, 1), 1),
    "mean": (torch.mean, lambda x: (x, 0), 1),
    "variance": (torch.var, lambda x: (x, 1), 1),
    "softmax": (Tensor.softmax, lambda x: (x, 1), 1),
    "cumulated": (Tensor.cumsum, lambda x: (x, 0), 1),
    "cumulated logarithms": (Tensor.logcumsumexp, lambda x: (x, 1), 1),
    "transposed": (Tensor.t, lambda x: (x,), 2),
    "attribute": (Tensor.T.__get__, lambda x: (x,), 2),  # type: ignore[attr-defined]
    "flipped": (torch.flip, lambda x: (x, (0,)), 1),
    "rolled": (torch.roll, lambda x: (x, 1, 1), 1),
    "repeated": (Tensor.repeat, lambda x: (x, 2, 1), 1),
    "interleaved": (torch.repeat_interleave, lambda x: (x, 2, 1), 1),
    "above the diagonal": (torch.triu, lambda x: (x,), 0),
    "the diagonal": (torch.diagonal, lambda x: (x,), 0),
    "a row": (Tensor.select, lambda x: (x, 0, 1), 1),
    "some columns": (Tensor.narrow, lambda x: (x, 1, 1, 2), 1),
    "by index": (Tensor.__getitem__, lambda x: (x, (slice(None), [2, 0])), 1),
    "stacked": (torch.stack, lambda x: ([x, 2 * x],), 2),
    "joined": (torch.cat, lambda x: ([x, 2 * x], 1), 1),
    "with itself": (torch.mm, lambda x: (x, x.t()), 0),
    "Gram": (torch.einsum, lambda x: ("ij,kj->ik", x, x), 0),
    "row by row": (torch.einsum, lambda x: ("ij,ij->i", x, x), 1),
    "more dims": (Tensor.unsqueeze, lambda x: (x, 1), 2),
    "normed": (torch.layer_norm, lambda x: (x, (x.shape[1],)), 1),
    "distances": (torch.cdist, lambda x: (x, x), 0),
    "similarity": (torch.cosine_similarity, lambda x: (x, x + 1, 1), 1),
    "as one": (Tensor.flatten, lambda x: (x,), 0),
}
"""Functions, what they are given of a matrix, and along how many of its dims they may be cut."""


@pytest.mark.parametrize("name", CALLS)
def test_records_say_of_what_whole_a_result_is_a_part(name: str) -> None:
    func, given, wanted = CALLS[name]
    whole = torch.rand(5, 7, generator=torch.Generator().manual_seed(0))
    found = 0
    for dim, rows in ((0, [3, 0, 4]), (1, [1, 6, 2])):  # any elements, in any order
        args = given(whole.index_select(dim, torch.tensor(rows)))
        cut = {id(leaf): dim for leaf in tensors_in(args)}
        if name == "with itself":
            cut[id(args[1])] = 1 - dim
        of_result = cut_dim(func, args, {}, cut, ())
        if of_result is not None:
            found += 1
            torch.testing.assert_close(func(*args), func(*given(whole)).index_select(of_result, torch.tensor(rows)))
    assert found == wanted


@pytest.mark.parametrize("func", [torch.mm, torch.matmul, torch.kron])
def test_both_dims_of_a_square_part_may_be_one(func: Any) -> None:
    square = torch.rand(3, 3)
    assert cut_dim(func, (square, square), {}, {id(square): 0}, ()) is None
    assert cut_dim(torch.trace, (square,), {}, {id(square): 0}, ()) is None
    assert cut_dim(torch.add, (square, square), {}, {id(square): 0}, ()) == 0
