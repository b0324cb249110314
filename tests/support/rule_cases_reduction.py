"""Reductions, softmaxes, normalisations."""

from __future__ import annotations

from typing import Any

import torch
from rule_draws import Draw, case


@case(
    *(f"aten.{name}.default" for name in ["sum", "mean", "max", "min", "any", "all"]),
    *(f"aten.{name}.default" for name in ["prod", "median", "nanmedian", "count_nonzero"]),
    "aten.norm.Scalar",
)
def full_reduction(draw: Draw, name: str) -> Any:
    return draw.tape.call(name, draw.operand(*draw.shape()))


@case(
    "aten.sum.dim_IntList",
    "aten.mean.dim",
    "aten.amax.default",
    "aten.amin.default",
    "aten.logsumexp.default",
    "aten.any.dims",
    "aten.all.dims",
    "aten.nansum.default",
)
def reduction(draw: Draw, name: str) -> Any:
    shape = draw.shape()
    return draw.tape.call(name, draw.operand(*shape), draw.dims(shape), draw.one(False, True))


@case("aten.count_nonzero.dim_IntList", "aten.aminmax.default", "aten.kthvalue.default", "aten.mode.default")
def other_reduction(draw: Draw, name: str) -> Any:
    shape = draw.shape()
    x, keeps = draw.operand(*shape), draw.one(False, True)
    if "count" in name:
        return draw.tape.call(name, x, draw.dims(shape))
    if "aminmax" in name:
        return draw.tape.call(name, x, dim=draw.one(None, draw.dim(shape)), keepdim=keeps)
    return draw.tape.call(name, x, *((1,) if "kth" in name else ()), draw.dim(shape), keeps)


@case("aten.norm.ScalarOpt_dtype", "aten.norm.ScalarOpt_dim_dtype")
def norm_in_another_dtype(draw: Draw, name: str) -> Any:
    shape = draw.shape()
    along = (draw.dims(shape), draw.one(False, True)) if "dim" in name else ()
    return draw.tape.call(name, draw.operand(*shape, dtype=torch.float32), 2, *along, dtype=torch.float64)


@case("aten.renorm.default")
def renorm(draw: Draw, name: str) -> Any:
    shape = draw.shape(2)
    return draw.tape.call(name, draw.operand(*shape), 2, draw.dim(shape), 0.5)


@case("aten.linalg_cross.default")
def cross(draw: Draw, name: str) -> Any:
    *rest, dim = draw.shape(1, 2), 0
    shape = (3, *rest[0])
    x = draw.operand(*shape)
    return draw.tape.call(name, x, draw.other(*shape, like=x), dim=dim)


@case(
    *("aten.var.dim", "aten.std.dim"),
    *("aten.linalg_vector_norm.default", "aten.linalg_norm.default", "aten.norm.ScalarOpt_dim"),
)
def deviation(draw: Draw, name: str) -> Any:
    shape = tuple(size + 1 for size in draw.shape())
    first = False if name.endswith(".dim") else None if name == "aten.linalg_norm.default" else 2
    return (
        draw.tape.call(name, draw.operand(*shape), first, draw.dims(shape)[:2])
        if "norm" in name
        else draw.tape.call(name, draw.operand(*shape), draw.dims(shape), first)
    )


@case(
    *(f"aten.{name}.dim" for name in ["max", "min", "any", "all", "median", "nanmedian"]),
    *("aten.argmax.default", "aten.argmin.default", "aten.prod.dim_int"),
)
def one_dim_reduction(draw: Draw, name: str) -> Any:
    shape = draw.shape()
    return draw.tape.call(name, draw.operand(*shape), draw.dim(shape), draw.one(False, True))


@case(*(f"aten.{name}.correction" for name in ("var", "std", "var_mean", "std_mean")))
def corrected_deviation(draw: Draw, name: str) -> Any:
    shape = tuple(size + 1 for size in draw.shape())
    return draw.tape.call(name, draw.operand(*shape), draw.dims(shape), correction=0, keepdim=draw.one(False, True))


@case(
    "aten.softmax.int",
    "aten.log_softmax.int",
    *(f"aten.{name}.default" for name in ("cumsum", "cumprod", "logcumsumexp", "sort", "argsort", "cummax", "cummin")),
)
def along_dim(draw: Draw, name: str) -> Any:
    shape = draw.shape()
    return draw.tape.call(name, draw.operand(*shape), draw.dim(shape))


@case("aten._softmax.default")
def raw_softmax(draw: Draw, name: str) -> Any:
    shape = draw.shape()
    return draw.tape.call(name, draw.operand(*shape), draw.dim(shape), False)


@case("aten.flip.default", "aten.roll.default")
def moved(draw: Draw, name: str) -> Any:
    shape = draw.shape()
    dims = draw.dims(shape)
    return draw.tape.call(name, draw.operand(*shape), *(([1] * len(dims),) if "roll" in name else ()), dims)


@case("aten.tril.default", "aten.triu.default")
def triangle(draw: Draw, name: str) -> Any:
    return draw.tape.call(name, draw.operand(*draw.shape(2)), draw.one(-1, 0, 1))


@case("aten.topk.default")
def topk(draw: Draw, name: str) -> Any:
    shape = draw.shape()
    dim = draw.dim(shape)
    return draw.tape.call(name, draw.operand(*shape), draw.one(*range(1, shape[dim] + 1)), dim)


@case("aten.layer_norm.default", "aten.rms_norm.default")
def normalisation(draw: Draw, name: str) -> Any:
    shape = draw.shape(2)
    normalized = list(shape[draw.one(*range(1, len(shape))) :])
    x = draw.operand(*shape)
    affine = [draw.one(None, draw.operand(*normalized)) for _ in range(2 if "layer" in name else 1)]
    return draw.tape.call(name, x, normalized, *affine)


@case("aten.sort.stable", "aten.argsort.stable")
def stable_sort(draw: Draw, name: str) -> Any:
    shape = draw.shape()
    return draw.tape.call(name, draw.operand(*shape), stable=True, dim=draw.dim(shape))


@case("aten.histc.default", "aten.bincount.default")
def histogram(draw: Draw, name: str) -> Any:
    if "histc" in name:
        return draw.tape.call(name, draw.operand(*draw.shape()), 3)
    positive = draw.tape.call("aten.to.dtype", draw.operand(*draw.shape(1, 1), positive=True), torch.int64)
    return draw.tape.call(name, positive)


@case(
    *(
        f"aten.fft_{name}.default"
        for name in (
            "fft",
            "ifft",
            "fftn",
            "ifftn",
            "fft2",
            "ifft2",
            "rfft",
            "irfft",
            "rfft2",
            "irfft2",
            "rfftn",
            "irfftn",
        )
    )
)
def fourier(draw: Draw, name: str) -> Any:
    shape = tuple(size + 1 for size in draw.shape(2))
    x = draw.operand(*shape)
    if "irfft" in name:
        x = draw.tape.call("aten.complex.default", x, draw.operand(*shape))
    if name.endswith("n.default"):
        return draw.tape.call(name, x, None, draw.one(None, draw.dims(shape)))
    return draw.tape.call(name, x, None, [-1, draw.one(*range(len(shape) - 1))] if "2" in name else draw.dim(shape))


@case("aten._weight_norm.default")
def weight_norm(draw: Draw, name: str) -> Any:
    shape = draw.shape(2)
    dim = draw.one(0, len(shape) - 1)
    norms = [size if at == dim else 1 for at, size in enumerate(shape)]
    return draw.tape.call(name, draw.operand(*shape), draw.operand(*norms), dim)


@case("aten.batch_norm.default", "aten.instance_norm.default")
def per_channel(draw: Draw, name: str) -> Any:
    n, c, *rest = draw.one(2, 3), draw.one(2, 3, 4, 6), draw.one(2, 3), draw.one(2, 3)
    training = "instance" in name or draw.one(True, False)
    x = draw.operand(n, c, *rest[: draw.one(1, 2)])
    affine = [draw.one(None, draw.operand(c)) for _ in range(2)]
    is_tracked = not training or draw.one(True, False)
    statistics = [draw.tape.constant(draw.tape.draw(c, positive=True)) if is_tracked else None for _ in range(2)]
    return draw.tape.call(name, x, *affine, *statistics, training, 0.1, 1e-5, False)


@case("aten.group_norm.default")
def group_norm(draw: Draw, name: str) -> Any:
    groups, inside = draw.one(1, 2, 3, 4), draw.one(1, 2, 3)
    x = draw.operand(2, groups * inside, *draw.one((), (2,), (2, 3)))
    return draw.tape.call(name, x, groups, *draw.one((), [draw.operand(groups * inside) for _ in range(2)]))
