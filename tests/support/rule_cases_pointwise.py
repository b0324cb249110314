"""Operators that act element by element."""

from __future__ import annotations

from typing import Any

import torch
from rule_draws import Draw, case

UNARY = (
    "abs", "acos", "alias", "angle", "asin", "atan", "ceil", "celu", "clone", "contiguous", "cos", "cosh", "detach",
    "elu", "empty_like", "erf", "erfc", "exp", "exp2", "expm1", "floor", "gelu", "hardsigmoid", "hardswish", "hardtanh",
    "isfinite", "isinf", "isnan", "leaky_relu", "lift_fresh", "lift_fresh_copy", "log", "log10", "log1p", "log2",
    "log_sigmoid", "logical_not", "mish", "nan_to_num", "neg", "ones_like", "positive", "reciprocal", "relu",
    "relu6", "round", "rsqrt", "selu", "sigmoid", "sign", "silu", "sin", "sinh", "softplus", "sqrt", "square", "tan",
    "tanh", "trunc", "zero", "zeros_like",
)  # fmt: skip


@case(*(f"aten.{name}.default" for name in UNARY))
def unary(draw: Draw, name: str) -> Any:
    return draw.tape.call(name, draw.operand(*draw.shape(), positive="log" in name or "sqrt" in name))


@case("aten.conj.default", "aten.real.default", "aten.imag.default", "aten.view_as_real.default")
def complex_unary(draw: Draw, name: str) -> Any:
    # A section of a larger tensor may begin in the middle of a pair.
    pairs = draw.tape.call("aten.clone.default", draw.operand(*draw.shape(0, 2), 2))
    return draw.tape.call(name, draw.tape.call("aten.view_as_complex.default", pairs))


@case("aten.bitwise_not.default")
def boolean_unary(draw: Draw, name: str) -> Any:
    return draw.tape.call(name, draw.tape.call("aten.gt.Scalar", draw.operand(*draw.shape()), 0))


SCALARS: dict[str, tuple[Any, ...]] = {
    "aten.add.Scalar": (2,),
    "aten.clamp.default": (-0.5, 0.5),
    "aten.clamp_max.default": (0.5,),
    "aten.clamp_min.default": (0.5,),
    "aten.div.Scalar": (3,),
    "aten.full_like.default": (3,),
    "aten.mul.Scalar": (3,),
    "aten.pow.Tensor_Scalar": (3,),
    "aten.fill.Scalar": (3,),
    "aten.remainder.Scalar": (3,),
    "aten.threshold.default": (0.5, 2),
    "aten.rsub.Scalar": (3,),
    "aten.sub.Scalar": (3,),
} | {f"aten.{name}.Scalar": (0.5,) for name in ("eq", "ne", "lt", "le", "gt", "ge")}


@case(*SCALARS)
def with_number(draw: Draw, name: str) -> Any:
    return draw.tape.call(name, draw.operand(*draw.shape()), *SCALARS[name])


@case("aten.pow.Scalar")
def number_first(draw: Draw, name: str) -> Any:
    return draw.tape.call(name, 2, draw.operand(*draw.shape()))


@case(
    *(f"aten.{name}.Tensor" for name in [
        "add", "clamp_max", "clamp_min", "div", "eq", "fmod", "ge", "gt", "le", "lt", "mul", "multiply", "ne",
        "remainder", "sub", "true_divide",
    ]),
    *(f"aten.{name}.default" for name in [
        "atan2", "complex", "copy", "logical_and", "logical_or", "logical_xor", "maximum", "minimum", "polar",
    ]),
    "aten.max.other", "aten.min.other", "aten.pow.Tensor_Tensor", "aten.div.Tensor_mode",
)  # fmt: skip
def binary(draw: Draw, name: str) -> Any:
    shape = draw.shape()
    positive = "pow" in name or "div" in name
    left = draw.operand(*(shape if "copy" in name else draw.narrowed(shape)), positive=positive)
    right = draw.other(*draw.narrowed(shape), positive=positive, like=left)
    keywords = {"rounding_mode": draw.one(None, "floor")} if name.endswith("_mode") else {}
    if name in ("aten.add.Tensor", "aten.sub.Tensor"):
        keywords["alpha"] = draw.one(1, 3)
    return draw.tape.call(name, left, right, **keywords)


@case("aten.__and__.Tensor", "aten.__or__.Tensor", "aten.bitwise_and.Tensor", "aten.bitwise_or.Tensor")
def boolean(draw: Draw, name: str) -> Any:
    shape = draw.shape()
    left = draw.tape.call("aten.gt.Scalar", draw.operand(*draw.narrowed(shape)), 0)
    return draw.tape.call(name, left, draw.mask(*draw.narrowed(shape)))


@case("aten.floor_divide.default", "aten.floor_divide.Scalar")
def floor_divide(draw: Draw, name: str) -> Any:
    shape = draw.shape()
    x = draw.tape.call("aten.to.dtype", draw.operand(*draw.narrowed(shape)), torch.int64)
    return draw.tape.call(
        name,
        x,
        draw.one(2, draw.tape.constant(torch.tensor([1, 2, 3])))
        if x.shape[-1:] == (3,) and name.endswith("default")
        else 2,
    )


@case("aten.lerp.Scalar", "aten.addcmul.default", "aten.addcdiv.default")
def combination(draw: Draw, name: str) -> Any:
    shape = draw.shape()
    x, y = draw.operand(*draw.narrowed(shape)), draw.other(*draw.narrowed(shape))
    third: Any = 0.3 if "lerp" in name else draw.other(*draw.narrowed(shape), positive=True, like=x)
    return draw.tape.call(name, x, y, third)


@case("aten.clamp.Tensor")
def clamp(draw: Draw, name: str) -> Any:
    x = draw.operand(*(shape := draw.shape()))
    return draw.tape.call(name, x, draw.other(*draw.narrowed(shape)), draw.one(None, draw.operand(*shape)))


@case("aten.masked_fill.Scalar", "aten.masked_fill.Tensor")
def masked_fill(draw: Draw, name: str) -> Any:
    shape = draw.shape()
    x = draw.operand(*shape)
    return draw.tape.call(
        name, x, draw.mask(*draw.narrowed(shape)), draw.one(0, 0.5) if name.endswith("Scalar") else draw.operand()
    )


@case("aten.where.self", "aten.where.ScalarOther", "aten.where.ScalarSelf", "aten.where.Scalar")
def where(draw: Draw, name: str) -> Any:
    shape = draw.shape()
    condition = (
        draw.tape.call("aten.gt.Scalar", draw.operand(*shape), 0) if draw.one(True, False) else draw.mask(*shape)
    )
    x: Any = draw.operand(*draw.narrowed(shape)) if name in ("aten.where.self", "aten.where.ScalarOther") else 1.0
    y: Any = (
        draw.other(*draw.narrowed(shape))
        if name in ("aten.where.self", "aten.where.ScalarSelf")
        else draw.one(0.0, 2.0)
    )
    return draw.tape.call(name, condition, x, y)


TO = (torch.float32, torch.bfloat16, torch.int64, torch.bool, torch.float64)


@case(
    "aten.to.dtype",
    "aten.to.dtype_layout",
    "aten._to_copy.default",
    "aten.to.device",
    "aten.type_as.default",
    "aten.to.other",
)
def cast(draw: Draw, name: str) -> Any:
    x = draw.coarse().operand(*draw.shape())
    dtype = draw.one(*TO)
    if name in ("aten.type_as.default", "aten.to.other"):
        other = draw.tape.parameter(*draw.shape(), dtype=torch.float32)
        return draw.tape.call(name, x, draw.one(other, draw.tape.constant(torch.zeros(2, dtype=dtype))))
    if name == "aten.to.device":
        return draw.tape.call(name, x, torch.device("cpu"), dtype)
    return draw.tape.call(name, x, dtype) if name == "aten.to.dtype" else draw.tape.call(name, x, dtype=dtype)


@case(
    *(
        f"aten.{name}.default"
        for name in ("dropout", "alpha_dropout", "feature_dropout", "feature_alpha_dropout", "native_dropout")
    )
)
def dropout(draw: Draw, name: str) -> Any:
    p, train = draw.one((0.0, True), (0.5, False), (0.5, True), (0.5, True))
    return draw.tape.call(name, draw.operand(*draw.shape(2)), p, train)


@case(*(f"aten.{name}.default" for name in ("new_zeros", "new_ones", "new_full", "new_empty")))
def new_tensor(draw: Draw, name: str) -> Any:
    x = draw.operand(*draw.shape())
    shape = draw.one(list(x.shape), list(draw.shape()))
    return draw.tape.call(name, x, shape, *((3,) if "full" in name else ()))


@case(
    *(
        f"aten.{name}"
        for name in ("zeros.default", "ones.default", "empty.memory_format", "rand.default", "randn.default")
    )
)
def of_a_shape(draw: Draw, name: str) -> Any:
    return draw.tape.call(name, list(draw.shape()))


FACTORIES: dict[str, tuple[Any, ...]] = {
    "aten.full.default": ([2, 3], 5),
    "aten.arange.default": (4,),
    "aten.arange.start": (2, 6),
    "aten.arange.start_step": (2, 9, 3),
    "aten.eye.default": (3,),
    "aten.eye.m": (3, 2),
    "aten.linspace.default": (0, 1, 4),
}


@case(*FACTORIES)
def factory(draw: Draw, name: str) -> Any:
    return draw.tape.call(name, *FACTORIES[name])


@case(
    *(
        f"aten.{name}"
        for name in (
            "rand_like.default",
            "randn_like.default",
            "exponential.default",
            "uniform.default",
            "normal_functional.default",
            "bernoulli.default",
            "bernoulli.p",
            "multinomial.default",
        )
    )
)
def random(draw: Draw, name: str) -> Any:
    x = draw.tape.call("aten.sigmoid.default", draw.operand(*draw.shape(1, 2)))
    return draw.tape.call(name, x, *((0.5,) if name.endswith(".p") else (1,) if "multinomial" in name else ()))


@case(
    *(
        f"aten.{name}.default"
        for name in ("mse_loss", "l1_loss", "smooth_l1_loss", "huber_loss", "binary_cross_entropy_with_logits")
    )
)
def elementwise_loss(draw: Draw, name: str) -> Any:
    shape = draw.shape()
    x = draw.operand(*shape)
    reduction = draw.one(0, 0, 1, 2)
    arguments = (None, None, reduction) if "entropy" in name else (reduction,)
    return draw.tape.call(name, x, draw.other(*shape, like=x), *arguments)


@case("aten.nll_loss_nd.default", "aten.nll_loss.default", "aten.nll_loss2d.default")
def picked_loss(draw: Draw, name: str) -> Any:
    shape = (2, 3, 2, 2) if "2d" in name else (4, 3)
    target = torch.randint(0, 3, (shape[0], *shape[2:]), generator=draw.tape.generator)
    return draw.tape.call(name, draw.operand(*shape), draw.tape.constant(target))


@case("aten.ctc_loss.IntList", "aten.ctc_loss.Tensor")
def alignment_loss(draw: Draw, name: str) -> Any:
    frames, rows, classes = 6, 3, 4
    lengths = [draw.one(1, 2, 3) for _ in range(rows)]
    targets = torch.randint(1, classes, (sum(lengths),), generator=draw.tape.generator)
    counts: list[Any] = [[frames] * rows, lengths]
    if name.endswith("Tensor"):
        counts = [draw.tape.constant(torch.tensor(count)) for count in counts]
    log_probs = draw.tape.call("aten._log_softmax.default", draw.operand(frames, rows, classes), 2, False)
    reduction = draw.one(0, 1, 2)
    return draw.tape.call(name, log_probs, draw.tape.constant(targets), *counts, 0, reduction)


@case(*(f"aten.{name}_backward.default" for name in ("leaky_relu", "sigmoid", "tanh", "threshold")))
def pointwise_backward(draw: Draw, name: str) -> Any:
    shape = draw.shape()
    gradient = draw.operand(*shape)
    rest = {"leaky_relu": [0.1, False], "threshold": [0.0]}.get(name.split(".")[1].removesuffix("_backward"), [])
    return draw.tape.call(name, gradient, draw.other(*shape, like=gradient), *rest)
