"""Reading and writing by index."""

from __future__ import annotations

from typing import Any

import torch
from rule_draws import SIZES, Draw, case
from torch import Tensor


@case("aten.embedding.default")
def embedding(draw: Draw, name: str) -> Any:
    rows, features = draw.one(2, 3, 5, 7), draw.one(*SIZES)
    ids = draw.tape.constant(torch.randint(0, rows, draw.shape(), generator=draw.tape.generator))
    options = draw.one((), (1,), (-1, False, False))
    return draw.tape.call(name, draw.operand(rows, features), ids, *options, layer=draw.one("", "Embedding"))


@case("aten.embedding_bag.default", "aten.embedding_bag.padding_idx")
def embedding_bag(draw: Draw, name: str) -> Any:
    rows, features, words = draw.one(2, 3, 5), draw.one(*SIZES), 6
    ids = draw.tape.constant(torch.randint(0, rows, (words,), generator=draw.tape.generator))
    offsets, mode = draw.tape.constant(torch.tensor(draw.one([0], [0, 2, 5], [0, 0, 3]))), draw.one(0, 1, 2)
    weights = draw.tape.parameter(words) if mode == 0 and draw.one(True, False) else None
    padding = (draw.one(None, 0),) if "padding" in name else ()
    return draw.tape.call(
        name, draw.operand(rows, features), ids, offsets, False, mode, False, weights, False, *padding
    )


def indices(draw: Draw, size: int, *shape: int) -> Tensor:
    """Indices into a dim: constant ones, or computed from a parameter."""
    if draw.one(True, False):
        return draw.tape.constant(torch.randint(0, size, shape, generator=draw.tape.generator))
    rounded = draw.tape.call("aten.to.dtype", draw.operand(*shape, positive=True), torch.int64)
    return draw.tape.call("aten.clamp.default", rounded, 0, size - 1)


def index_list(draw: Draw, shape: tuple[int, ...], *, distinct: bool) -> list[Tensor | None]:
    """Index tensors that are broadcast together, for some of the dims; distinct ones point at no place twice."""
    places = draw.dims(shape)
    common = draw.shape(1, 2)
    found: list[Tensor | None] = []
    for place, size in enumerate(shape):
        if place not in places:
            found.append(None)
        elif distinct:
            found.append(draw.tape.constant(torch.randperm(size, generator=draw.tape.generator)[: min(shape)]))
        else:
            found.append(indices(draw, size, *draw.narrowed(common)))
    while found[-1] is None:
        found.pop()
    return found


@case("aten.index.Tensor", "aten._unsafe_index.Tensor")
def index(draw: Draw, name: str) -> Any:
    shape = draw.shape()
    x = draw.operand(*shape)
    if name == "aten.index.Tensor" and draw.one(True, False, False, False):
        return draw.tape.call(name, x, [draw.tape.constant(torch.arange(shape[0]) % 2 == 0)])
    return draw.tape.call(name, x, index_list(draw, shape, distinct=False))


@case("aten.nonzero.default", "aten.nonzero_numpy.default", "aten.where.default")
def places(draw: Draw, name: str) -> Any:
    shape = draw.shape()
    found = draw.tape.call(name, indices(draw, 2, *shape))
    index = found[0] if name != "aten.nonzero.default" else draw.tape.call("aten.select.int", found, 1, 0)
    return draw.tape.call("aten.index.Tensor", draw.operand(shape[0], draw.one(*SIZES)), [index])


@case("aten.masked_select.default")
def masked_select(draw: Draw, name: str) -> Any:
    shape = draw.shape()
    return draw.tape.call(name, draw.operand(*draw.narrowed(shape)), draw.mask(*shape))


@case("aten.index_select.default")
def index_select(draw: Draw, name: str) -> Any:
    shape = draw.shape()
    dim = draw.dim(shape)
    return draw.tape.call(name, draw.operand(*shape), dim, indices(draw, shape[dim], *draw.one((), (2,), (3,))))


@case("aten.gather.default", "aten.take_along_dim.default")
def gather(draw: Draw, name: str) -> Any:
    shape = draw.shape()
    dim = draw.dim(shape)
    sizes = list(shape if "take" in name else (draw.one(size, size, 1) for size in shape))
    sizes[dim] = draw.one(*SIZES)
    x = draw.operand(*shape)
    if "take" in name:
        return draw.tape.call(name, x, indices(draw, shape[dim], *(draw.one(s, s, 1) for s in sizes)), dim)
    return draw.tape.call(name, x, dim, indices(draw, shape[dim], *sizes))


@case("aten.one_hot.default")
def one_hot(draw: Draw, name: str) -> Any:
    x = draw.tape.call("aten.to.dtype", draw.operand(*draw.shape(), positive=True), torch.int64)
    return draw.tape.call(name, x, 4)


@case("aten.index_put.default", "aten._unsafe_index_put.default")
def index_put(draw: Draw, name: str) -> Any:
    shape = draw.shape()
    x = draw.operand(*shape)
    if name == "aten.index_put.default" and draw.one(True, False, False):
        covered = draw.one(*range(1, len(shape) + 1))
        mask = draw.mask(*shape[:covered])
        count = draw.one((), (1,), (int(mask.sum()),))
        return draw.tape.call(name, x, [mask], draw.other(*((*count, *shape[covered:]) if count else shape[covered:])))
    accumulate = draw.one(True, False)
    found = index_list(draw, shape, distinct=not accumulate)
    result = x[tuple(slice(None) if item is None else item for item in found)]
    return draw.tape.call(name, x, found, draw.other(*draw.narrowed(tuple(result.shape))), accumulate)


@case("aten.index_add.default", "aten.index_copy.default")
def index_add(draw: Draw, name: str) -> Any:
    shape = draw.shape()
    dim = draw.dim(shape)
    chosen = torch.randperm(shape[dim], generator=draw.tape.generator)[: draw.one(*range(1, shape[dim] + 1))]
    sizes = list(shape)
    sizes[dim] = len(chosen)
    x = draw.operand(*shape)
    return draw.tape.call(name, x, dim, draw.tape.constant(chosen), draw.other(*sizes, like=x))


@case("aten.index_fill.int_Scalar")
def index_fill(draw: Draw, name: str) -> Any:
    shape = draw.shape()
    dim = draw.dim(shape)
    return draw.tape.call(name, draw.operand(*shape), dim, indices(draw, shape[dim], 2), draw.one(0, 3))


@case("aten.scatter_reduce.two")
def scatter_reduce(draw: Draw, name: str) -> Any:
    shape = draw.shape()
    dim = draw.dim(shape) % len(shape)
    sizes = [draw.one(size, size, 1) for size in shape]
    places, src = indices(draw, shape[dim], *sizes), draw.other(*sizes)
    how = draw.one("sum", "sum", "mean", "amax")
    return draw.tape.call(name, draw.operand(*shape), dim, places, src, how, include_self=draw.one(True, False))


@case("aten.scatter.src", "aten.scatter.value", "aten.scatter_add.default")
def scatter(draw: Draw, name: str) -> Any:
    shape = draw.shape()
    dim = draw.dim(shape) % len(shape)
    sizes = [draw.one(size, size, 1) for size in shape]
    if name == "aten.scatter.src":  # places written twice would hold whichever came last
        places = draw.tape.call("aten.argsort.default", draw.operand(*sizes), dim)
    else:
        places = indices(draw, shape[dim], *sizes)
    x = draw.operand(*shape)
    if name == "aten.scatter.value":
        return draw.tape.call(name, x, dim, places, draw.one(0, 2))
    return draw.tape.call(name, x, dim, places, draw.other(*sizes))


@case("aten.isin.Tensor_Tensor", "aten.bucketize.Tensor")
def among(draw: Draw, name: str) -> Any:
    return draw.tape.call(name, draw.operand(*draw.shape()), draw.tape.constant(torch.tensor([0.1, 0.3, 0.9])))
