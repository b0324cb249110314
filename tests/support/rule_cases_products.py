"""Matrix products, attention, convolutions."""

from __future__ import annotations

from typing import Any

import torch
import transformers.integrations.moe  # noqa: F401 (registers the grouped product)
from rule_draws import SIZES, Draw, case


@case("aten.linear.default")
def linear(draw: Draw, name: str) -> Any:
    *batch, k, n = draw.shape(2, 4)
    if draw.one(True, False, False, False):  # a weight that is a vector
        return draw.tape.call(name, draw.operand(*batch, k), draw.operand(k))
    x, weight = draw.operand(*batch, k), draw.operand(n, k)
    bias = draw.one(None, draw.tape.parameter(n))
    return draw.tape.call(name, x, weight, bias, layer=draw.one("", "Linear"))


@case("aten.matmul.default", "aten.bmm.default", "aten.mm.default")
def matmul(draw: Draw, name: str) -> Any:
    *batch, m, k, n = draw.shape(*{"bmm": (4, 4), "mm": (3, 3)}.get(name.split(".")[1], (3, 5)))
    if "matmul" in name and draw.one(True, False):  # one of them is a vector
        left, right = draw.one(((k,), (k,)), ((*batch, m, k), (k,)), ((k,), (*batch, k, n)))
        return draw.tape.call(name, draw.operand(*left), draw.other(*right))
    left = draw.operand(*(draw.narrowed(tuple(batch)) if "matmul" in name else batch), m, k)
    right = left if m == k == n and len(batch) == left.ndim - 2 else draw.other(*batch, k, n)
    return draw.tape.call(name, left, right)


@case("aten.mv.default", "aten.dot.default", "aten.vdot.default", "aten.outer.default")
def with_vector(draw: Draw, name: str) -> Any:
    m, k = draw.shape(2, 2)
    left, right = {"mv": ((m, k), k), "outer": ((m,), k)}.get(name.split(".")[1], ((k,), k))
    x = draw.operand(*left)
    return draw.tape.call(name, x, draw.other(right, like=x))


@case("aten.addmm.default", "aten.addmv.default")
def addmm(draw: Draw, name: str) -> Any:
    m, k, n = draw.shape(3, 3)
    out = (m, n) if "mm" in name else (m,)
    bias = draw.operand(*draw.one(out[-1:], out[-1:], (1,), out))
    return draw.tape.call(name, bias, draw.operand(m, k), draw.operand(k, *out[1:]), alpha=draw.one(1, 2))


@case("aten.baddbmm.default", "aten.addbmm.default")
def baddbmm(draw: Draw, name: str) -> Any:
    b, m, k, n = draw.shape(4, 4)
    bias = draw.other(*draw.narrowed((b, m, n) if "baddbmm" in name else (m, n)))
    return draw.tape.call(name, bias, draw.operand(b, m, k), draw.operand(b, k, n), beta=draw.one(0, 1), alpha=2)


@case("aten.bilinear.default")
def bilinear(draw: Draw, name: str) -> Any:
    *batch, i, j, o = draw.shape(3, 5)
    x, y = draw.operand(*batch, i), draw.other(*batch, j)
    return draw.tape.call(name, x, y, draw.operand(o, i, j), draw.one(None, draw.tape.parameter(o)))


@case("aten.scaled_dot_product_attention.default")
def attention(draw: Draw, name: str) -> Any:
    batch, kv_heads, groups = draw.one(1, 2), draw.one(1, 2, 3, 4), draw.one(1, 2, 3)
    queries, keys, features, out = draw.one(2, 3), draw.one(2, 3), draw.one(2, 4), draw.one(3, 4)
    heads = kv_heads * groups
    query = draw.operand(batch, heads, queries, features)
    key, value = draw.operand(batch, kv_heads, keys, features), draw.operand(batch, kv_heads, keys, out)
    mask = draw.one(None, "operand", "constant")
    causal = mask is None and draw.one(False, True)
    if mask is not None:
        shape = *draw.narrowed((batch, heads)), draw.one(queries, 1), keys
        mask = draw.operand(*shape) if mask == "operand" else draw.tape.constant(draw.tape.draw(*shape))
    return draw.tape.call(name, query, key, value, mask, draw.one(0.0, 0.5), causal, enable_gqa=groups > 1)


@case(*(f"aten._scaled_dot_product_{kind}_attention.default" for kind in ("flash", "efficient", "cudnn")))
def variant_of_attention(draw: Draw, name: str) -> Any:
    batch, heads = draw.one(1, 2), draw.one(1, 2, 3, 4, 6)
    queries, keys, features = draw.one(2, 3), draw.one(2, 3), draw.one(2, 4)
    out = features if "flash" in name else draw.one(3, 4)
    query = draw.operand(batch, heads, queries, features)
    tensors = [query, draw.operand(batch, heads, keys, features), draw.operand(batch, heads, keys, out)]
    p, causal = draw.one(0.0, 0.5), draw.one(False, True)
    if "flash" in name:
        return draw.tape.call(name, *tensors, p, causal)
    shape = *draw.narrowed((batch, heads)), draw.one(queries, 1), keys
    bias = draw.one(None, draw.operand(*shape), draw.tape.constant(draw.tape.draw(*shape)))
    return draw.tape.call(name, *tensors, None if causal else bias, True, p, causal)


@case("transformers.grouped_mm_fallback.default", "aten._grouped_mm.default")
def grouped(draw: Draw, name: str) -> Any:
    ends = draw.one([2, 5], [0, 5], [5], [1, 2, 5])
    offsets = draw.tape.constant(torch.tensor(ends, dtype=torch.int32))
    if "aten" in name:  # rows of 16 bytes, on every rank
        draw.coarse().ranks = 2
        shapes = (5, 16), (len(ends), 16, 16)
        rows, experts = (draw.tape.parameter(*shape, dtype=torch.float32) for shape in shapes)
    else:
        k, n = draw.one(2, 4, 6), draw.one(*SIZES)
        rows, experts = draw.operand(5, k), draw.operand(len(ends), k, n)
    return draw.tape.call(name, rows, experts, offsets)


@case("aten.linalg_solve_triangular.default")
def solve_triangular(draw: Draw, name: str) -> Any:
    *batch, n, k = draw.shape(2, 4)
    left = draw.one(True, False)
    ones = draw.tape.call("aten.exp.default", draw.operand(*draw.narrowed(tuple(batch)), n, n))
    given = draw.operand(*batch, *((n, k) if left else (k, n)))
    return draw.tape.call(
        name, ones, given, upper=draw.one(True, False), left=left, unitriangular=draw.one(True, False)
    )


@case("aten.einsum.default")
def einsum(draw: Draw, name: str) -> Any:
    equation = draw.one(
        "ij,jk->ik", "ij,jk", "ib h,hnd->ibnd", "...i,oi->...o", "i,j->ij", "bij,bjk->bik", "ij->ji", "ij->i",
        "bnd,bnd->bn", "ij,jk,kl->il", "a...b,...b->a...", "ii->i", "ij,ij->", "ijk,jl->l",
    )  # fmt: skip
    lengths = {letter: draw.one(*SIZES) for letter in sorted({c for c in equation if c.isalpha()})}
    spare = draw.shape(0, 2)
    operands: list[Any] = []
    for term in equation.replace(" ", "").split("->")[0].split(","):
        before, dots, after = term.partition("...")
        shape = [*(lengths[c] for c in before), *(spare if dots else ()), *(lengths[c] for c in after)]
        operands.append(draw.other(*shape) if operands else draw.operand(*shape))
    return draw.tape.call(name, equation, operands, path=draw.one(None, [1, 2, 0, 1]) if len(operands) > 2 else None)


@case(*(f"aten.{name}.{packed}" for name in ("lstm", "gru", "rnn_tanh", "rnn_relu") for packed in ("input", "data")))
def recurrent(draw: Draw, name: str) -> Any:
    features, hidden, layers, directions = draw.one(1, 2, 3), draw.one(2, 3), draw.one(1, 2), draw.one(1, 2)
    gates = {"lstm": 4, "gru": 3}.get(name.split(".")[1], 1)
    states = [draw.operand(layers * directions, 2, hidden) for _ in range(2 if "lstm" in name else 1)]
    matrices = []
    for layer in range(layers):
        read = hidden * directions if layer else features
        for _ in range(directions):
            matrices += [draw.operand(gates * hidden, read), draw.operand(gates * hidden, hidden)]
            matrices += [draw.operand(gates * hidden) for _ in range(2)]
    start, options = states if "lstm" in name else states[0], (True, layers, 0.0, True, directions == 2)
    if name.endswith("data"):
        lengths = draw.tape.constant(torch.tensor([2, 2, 1]))
        return draw.tape.call(name, draw.operand(5, features), lengths, start, matrices, *options)
    return draw.tape.call(name, draw.operand(4, 2, features), start, matrices, *options, False)


@case(*(f"aten.{name}_cell.default" for name in ("lstm", "gru", "rnn_tanh", "rnn_relu")))
def recurrent_cell(draw: Draw, name: str) -> Any:
    features, hidden = draw.one(1, 2, 3), draw.one(2, 3)
    gates = {"lstm_cell": 4, "gru_cell": 3}.get(name.split(".")[1], 1)
    states = [draw.operand(4, hidden) for _ in range(2 if "lstm" in name else 1)]
    matrices = [draw.operand(gates * hidden, features), draw.operand(gates * hidden, hidden)]
    biases = [draw.operand(gates * hidden) for _ in range(2)]
    return draw.tape.call(name, draw.operand(4, features), states if "lstm" in name else states[0], *matrices, *biases)


@case(
    *(f"aten.conv{n}d.default" for n in (1, 2, 3)), *(f"aten.conv{n}d.padding" for n in (1, 2, 3)),
    "aten.convolution.default", "aten.conv_transpose1d.default", *(f"aten.conv_transpose{n}d.input" for n in (2, 3)),
)  # fmt: skip
def convolution(draw: Draw, name: str) -> Any:
    rank = next((n for n in (1, 2, 3) if f"{n}d" in name), 2)
    groups, read, given = draw.one(1, 1, 2, 4), draw.one(1, 2, 4, 4), draw.one(1, 2, 3)
    kernel, stride = draw.one(1, 2, 3), draw.one(1, 1, 2)
    is_transposed = "transpose" in name or (name == "aten.convolution.default" and draw.one(True, False))
    batch = (2,) if name == "aten.convolution.default" else draw.one((2,), ())
    x = draw.operand(*batch, groups * read, *(3,) * rank)
    first, second = (read, given) if is_transposed else (given, read)
    weight = draw.operand(groups * first, second, *(kernel,) * rank)
    bias = draw.one(None, draw.tape.parameter(groups * given))
    if name.endswith("padding"):
        padding = "same" if stride == 1 else "valid"
        return draw.tape.call(name, x, weight, bias, [stride], padding, [1], groups)
    pads = draw.one(0, 1) if kernel > 1 else 0
    if name == "aten.convolution.default":
        sizes = [[number] * rank for number in (stride, pads, 1)]
        return draw.tape.call(name, x, weight, bias, *sizes, is_transposed, [0] * rank, groups)
    if is_transposed:
        return draw.tape.call(name, x, weight, bias, [stride], [pads], [0], groups)
    return draw.tape.call(name, x, weight, bias, [stride], [pads], [1], groups)


@case(
    *(f"aten.{kind}_pool{n}d.default" for kind in ("max", "avg") for n in (1, 2, 3)),
    *(f"aten.adaptive_{kind}_pool{n}d.default" for kind in ("max", "avg") for n in (1, 2, 3)),
    "aten.max_pool2d_with_indices.default",
    "aten.max_pool3d_with_indices.default",
)
def pool(draw: Draw, name: str) -> Any:
    rank = next(n for n in (1, 2, 3) if f"{n}d" in name)
    x = draw.operand(*draw.one((2,), ()), draw.one(2, 3, 4), *(4,) * rank)
    return draw.tape.call(name, x, [draw.one(1, 2)] * rank)


@case(
    *(
        f"aten.upsample_{kind}.vec"
        for kind in ("nearest1d", "nearest2d", "nearest3d", "linear1d", "bilinear2d", "bicubic2d")
    ),
    "aten._upsample_bilinear2d_aa.vec",
    "aten._upsample_bicubic2d_aa.vec",
)
def upsample(draw: Draw, name: str) -> Any:
    rank = next(n for n in (1, 2, 3) if f"{n}d" in name)
    x = draw.operand(2, draw.one(2, 3, 4), *(3,) * rank)
    corners = () if "nearest" in name else (False,)
    return draw.tape.call(name, x, [draw.one(2, 5)] * rank, *corners, None)


@case("aten.im2col.default", "aten.col2im.default")
def columns(draw: Draw, name: str) -> Any:
    batch, channels = draw.one((2,), ()), draw.one(2, 3, 4)
    rest = [2, 2], [1, 1], [0, 0], [1, 1]
    if "im2col" in name:
        return draw.tape.call(name, draw.operand(*batch, channels, 3, 3), *rest)
    return draw.tape.call(name, draw.operand(*batch, channels * 4, 4), [3, 3], *rest)


@case("aten.grid_sampler.default")
def grid_sampler(draw: Draw, name: str) -> Any:
    rank = draw.one(2, 3)
    x = draw.operand(draw.one(1, 2), draw.one(2, 3, 4), *(3,) * rank)
    grid = draw.operand(x.shape[0], *(2,) * rank, rank)
    return draw.tape.call(name, x, grid, 0, draw.one(0, 1), draw.one(False, True))


@case("aten.max_unpool2d.default")
def unpool(draw: Draw, name: str) -> Any:
    x = draw.operand(2, draw.one(2, 3, 4), 4, 4)
    values, places = draw.tape.call("aten.max_pool2d_with_indices.default", x, [2, 2])
    return draw.tape.call(name, values, places, [4, 4])


@case("aten.pixel_shuffle.default")
def pixel_shuffle(draw: Draw, name: str) -> Any:
    factor = draw.one(1, 2, 2)
    return draw.tape.call(name, draw.operand(draw.one(1, 2), draw.one(1, 2, 4) * factor**2, 2, 3), factor)


@case("aten.pixel_unshuffle.default")
def pixel_unshuffle(draw: Draw, name: str) -> Any:
    factor = draw.one(1, 2, 2)
    return draw.tape.call(name, draw.operand(draw.one(1, 2), draw.one(1, 2, 4), 2 * factor, factor), factor)
