"""Operators that rearrange elements."""

from __future__ import annotations

from typing import Any

import torch
from hypothesis import strategies as st
from rule_draws import SIZES, Draw, case


def reshaped(draw: Draw, count: int) -> list[int]:
    """Sizes of that many elements."""
    sizes = []
    while count > 1:
        sizes.append(draw.one(*(size for size in range(1, count + 1) if count % size == 0)))
        count //= sizes[-1]
    return sizes or [1]


@case("aten.view.default", "aten._unsafe_view.default", "aten.reshape.default")
def view(draw: Draw, name: str) -> Any:
    x = draw.operand(*draw.shape())
    return draw.tape.call(name, x, reshaped(draw, x.numel()))


@case("aten.view_as.default", "aten.reshape_as.default")
def view_as(draw: Draw, name: str) -> Any:
    x = draw.operand(*draw.shape())
    return draw.tape.call(name, x, draw.other(*reshaped(draw, x.numel()), like=x))


@case("aten.flatten.using_ints")
def flatten(draw: Draw, name: str) -> Any:
    shape = draw.shape()
    start = draw.one(*range(len(shape)))
    return draw.tape.call(name, draw.operand(*shape), start, draw.one(*range(start, len(shape))))


@case("aten.ravel.default", "aten.numpy_T.default", "aten.squeeze.default")
def unary_view(draw: Draw, name: str) -> Any:
    return draw.tape.call(name, draw.operand(*draw.shape()))


@case("aten.mT.default")
def matrix_transpose(draw: Draw, name: str) -> Any:
    return draw.tape.call(name, draw.operand(*draw.shape(2)))


@case("aten.t.default")
def reverse(draw: Draw, name: str) -> Any:
    return draw.tape.call(name, draw.operand(*draw.shape(1, 2)))


@case("aten.squeeze.dim", "aten.unsqueeze.default", "aten.unbind.int")
def one_dim(draw: Draw, name: str) -> Any:
    shape = draw.shape()
    return draw.tape.call(name, draw.operand(*shape), draw.dim(shape))


@case("aten.squeeze.dims")
def squeeze_dims(draw: Draw, name: str) -> Any:
    shape = draw.shape()
    return draw.tape.call(name, draw.operand(*shape), draw.dims(shape))


@case("aten.unflatten.int")
def unflatten(draw: Draw, name: str) -> Any:
    shape = draw.shape()
    dim = draw.dim(shape)
    return draw.tape.call(name, draw.operand(*shape), dim, reshaped(draw, shape[dim]))


@case("aten.transpose.int", "aten.swapaxes.default", "aten.swapdims.default", "aten.movedim.int")
def two_dims(draw: Draw, name: str) -> Any:
    shape = draw.shape()
    return draw.tape.call(name, draw.operand(*shape), draw.dim(shape), draw.dim(shape))


@case("aten.movedim.intlist")
def several_dims(draw: Draw, name: str) -> Any:
    shape = draw.shape()
    sources = draw.dims(shape)
    targets = draw.data.draw(st.permutations(range(len(shape))))[: len(sources)]
    return draw.tape.call(name, draw.operand(*shape), sources, targets)


@case("aten.permute.default")
def permute(draw: Draw, name: str) -> Any:
    shape = draw.shape()
    order = draw.data.draw(st.permutations(range(len(shape))))
    return draw.tape.call(name, draw.operand(*shape), [at - draw.one(0, len(shape)) for at in order])


@case("aten.expand.default", "aten.broadcast_to.default", "aten.expand_as.default")
def expand(draw: Draw, name: str) -> Any:
    shape = draw.shape()
    x = draw.operand(*draw.narrowed(shape))
    kept = [-1 if tuple(x.shape[::-1][at : at + 1]) == (size,) else size for at, size in enumerate(reversed(shape))][
        ::-1
    ]
    size: Any = draw.other(*shape, like=x) if name == "aten.expand_as.default" else draw.one(list(shape), kept)
    return draw.tape.call(name, x, size)


@case("aten.repeat_interleave.self_int")
def repeat_interleave(draw: Draw, name: str) -> Any:
    shape, repeats = draw.shape(), draw.one(1, 2, 3, 4)
    dim = draw.dim(shape)
    size = draw.one(None, shape[dim] * repeats)
    return draw.tape.call(name, draw.operand(*shape), repeats, dim, output_size=size)


@case("aten.repeat.default")
def repeat(draw: Draw, name: str) -> Any:
    shape = draw.shape()
    return draw.tape.call(
        name, draw.operand(*shape), [draw.one(1, 1, 2, 3) for _ in range(len(shape) + draw.one(0, 1))]
    )


@case("aten.slice.Tensor")
def slice_(draw: Draw, name: str) -> Any:
    shape = draw.shape()
    bounds = draw.one(None, 0, 1, 2, -1, -2, 9), draw.one(None, 1, 3, -1, 9, 2**63 - 1)
    return draw.tape.call(name, draw.operand(*shape), draw.dim(shape), *bounds, draw.one(1, 1, 1, 2))


@case("aten.narrow.default")
def narrow(draw: Draw, name: str) -> Any:
    shape = draw.shape()
    dim = draw.dim(shape)
    start = draw.one(*range(shape[dim] + 1))
    return draw.tape.call(name, draw.operand(*shape), dim, start, draw.one(*range(shape[dim] - start + 1)))


@case("aten.split_with_sizes.default", "aten.split.sizes")
def split_sizes(draw: Draw, name: str) -> Any:
    shape = draw.shape()
    dim = draw.dim(shape)
    sizes = [draw.one(*range(shape[dim] + 1))]
    sizes.append(draw.one(*range(shape[dim] - sizes[0] + 1)))
    return draw.tape.call(name, draw.operand(*shape), [*sizes, shape[dim] - sum(sizes)], dim)


@case("aten.split.Tensor", "aten.chunk.default")
def split(draw: Draw, name: str) -> Any:
    shape = draw.shape()
    return draw.tape.call(name, draw.operand(*shape), draw.one(1, 2, 3), draw.dim(shape))


@case("aten.cat.default", "aten.concat.default", "aten.concatenate.default", "aten.stack.default")
def join(draw: Draw, name: str) -> Any:
    shape = draw.shape()
    dim = draw.dim(shape)
    parts = [draw.operand(*shape)]
    for _ in range(draw.one(0, 1, 2)):
        size = shape[dim] if name == "aten.stack.default" else draw.one(*SIZES)
        sizes = [size if at == dim % len(shape) else length for at, length in enumerate(shape)]
        parts.append(draw.other(*sizes, like=parts[0]))
    if name != "aten.stack.default" and draw.one(False, True):  # as a cache is before its first use
        parts.insert(0, draw.tape.constant(torch.empty(0, dtype=torch.float64)))
    return draw.tape.call(name, parts, dim)


@case("aten.broadcast_tensors.default")
def broadcast_tensors(draw: Draw, name: str) -> Any:
    shape = draw.shape()
    first = draw.operand(*draw.narrowed(shape))
    return draw.tape.call(name, [first, *(draw.other(*draw.narrowed(shape)) for _ in range(draw.one(0, 1, 2)))])


@case("aten.select.int")
def select(draw: Draw, name: str) -> Any:
    shape = draw.shape()
    dim = draw.dim(shape)
    return draw.tape.call(name, draw.operand(*shape), dim, draw.one(0, -1, shape[dim] - 1))


@case("aten.pad.default", "aten.constant_pad_nd.default")
def pad(draw: Draw, name: str) -> Any:
    shape = draw.shape()
    sizes = [draw.one(0, 0, 1, 2, -1) for _ in range(2 * draw.one(1, len(shape)))]
    for position in range(len(sizes) // 2):
        if shape[-1 - position] + sum(sizes[2 * position : 2 * position + 2]) < 1:
            sizes[2 * position : 2 * position + 2] = [0, 1]
    if name == "aten.pad.default" and len(shape) > 1 and draw.one(True, False):
        return draw.tape.call(name, draw.operand(*shape), [min(shape[-1] - 1, 1), 0], draw.one("reflect", "replicate"))
    return draw.tape.call(name, draw.operand(*shape), sizes, *draw.one((), (0.5,)) if "constant" in name else ())


@case("aten.glu.default")
def glu(draw: Draw, name: str) -> Any:
    shape = list(draw.shape())
    dim = draw.dim(tuple(shape))
    shape[dim] *= 2
    return draw.tape.call(name, draw.operand(*shape), dim)


@case("aten.view_as_complex.default")
def view_as_complex(draw: Draw, name: str) -> Any:
    return draw.tape.call(name, draw.operand(*draw.shape(0, 2), 2))


@case("aten.unfold.default")
def unfold(draw: Draw, name: str) -> Any:
    shape = draw.shape()
    dim = draw.dim(shape)
    size = draw.one(*range(1, shape[dim] + 1))
    return draw.tape.call(name, draw.operand(*shape), dim, size, draw.one(size, size, 1, 2))


@case("aten.slice_scatter.default")
def slice_scatter(draw: Draw, name: str) -> Any:
    shape = draw.shape()
    dim = draw.dim(shape)
    bounds = draw.one((0, 1, 1), (1, None, 1), (-2, 9, 1), (0, None, 2), (1, None, 2), (2, 1, 1))
    sizes = list(shape)
    sizes[dim] = len(range(shape[dim])[slice(*bounds)])
    x = draw.operand(*shape)
    return draw.tape.call(name, x, draw.other(*sizes, like=x), dim, *bounds)


@case("aten.select_scatter.default")
def select_scatter(draw: Draw, name: str) -> Any:
    shape = draw.shape()
    dim = draw.dim(shape)
    sizes = [size for at, size in enumerate(shape) if at != dim % len(shape)]
    return draw.tape.call(name, draw.operand(*shape), draw.other(*sizes), dim, draw.one(0, -1))


@case("aten.rot90.default")
def rot90(draw: Draw, name: str) -> Any:
    shape = draw.shape(2)
    dims = draw.data.draw(st.permutations(range(len(shape))))[:2]
    return draw.tape.call(name, draw.operand(*shape), draw.one(0, 1, 2, 3), dims)


@case("aten.diagonal.default")
def diagonal(draw: Draw, name: str) -> Any:
    shape = draw.shape(2)
    dims = draw.data.draw(st.permutations(range(len(shape))))[:2]
    return draw.tape.call(name, draw.operand(*shape), draw.one(0, 0, 1), *dims)


@case("aten.diag_embed.default")
def diag_embed(draw: Draw, name: str) -> Any:
    shape = draw.shape()
    dims = draw.data.draw(st.permutations(range(len(shape) + 1)))[:2]
    return draw.tape.call(name, draw.operand(*shape), draw.one(0, 0, 1), *dims)
