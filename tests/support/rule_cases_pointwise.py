"""Operators that act element by element."""

from __future__ import annotations

from typing import Any

import torch
from rule_draws import CASES, Draw, case
from rule_truth import overload
from torch import Tensor

from lightning_autotp.operators import known_operators, record

LIKE = ("empty_like", "ones_like", "zero", "zeros_like")
IDENTITIES = ("alias", "clone", "contiguous", "detach", "lift_fresh", "lift_fresh_copy")


@case(*(f"aten.{name}.default" for name in LIKE + IDENTITIES))
def unary(draw: Draw, name: str) -> Any:
    return draw.tape.call(name, draw.operand(*draw.shape()))


@case("aten.conj.default", "aten.real.default", "aten.imag.default", "aten.view_as_real.default")
def complex_unary(draw: Draw, name: str) -> Any:
    # A section of a larger tensor may begin in the middle of a pair.
    pairs = draw.tape.call("aten.clone.default", draw.operand(*draw.shape(0, 2), 2))
    return draw.tape.call(name, draw.tape.call("aten.view_as_complex.default", pairs))


NUMBERS: dict[str, tuple[Any, ...]] = {
    "aten.clamp.default": (-0.5, 0.5),
    "aten.clip.default": (-0.5, 0.5),
    "aten.fill.Scalar": (3,),
    "aten.full_like.default": (3,),
}


@case(*NUMBERS)
def with_number(draw: Draw, name: str) -> Any:
    return draw.tape.call(name, draw.operand(*draw.shape()), *NUMBERS[name])


@case("aten.add.Tensor", "aten.sub.Tensor", "aten.copy.default", "aten.div.Tensor_mode")
def binary(draw: Draw, name: str) -> Any:
    shape = draw.shape()
    positive = "div" in name
    left = draw.operand(*(shape if "copy" in name else draw.narrowed(shape)), positive=positive)
    right = draw.other(*draw.narrowed(shape), positive=positive, like=left)
    keywords = {"rounding_mode": draw.one(None, "floor")} if name.endswith("_mode") else {}
    if name in ("aten.add.Tensor", "aten.sub.Tensor"):
        keywords["alpha"] = draw.one(1, 3)
    return draw.tape.call(name, left, right, **keywords)


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


@case("aten.clamp.Tensor", "aten.clip.Tensor")
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


@case("aten.rrelu.default")
def rrelu(draw: Draw, name: str) -> Any:
    return draw.tape.call(name, draw.operand(*draw.shape()), 0.1, 0.3, draw.one(True, False))


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
            "log_normal.default",
            "cauchy.default",
            "geometric.default",
            "poisson.default",
            "randint_like.default",
            "randint_like.low_dtype",
        )
    )
)
def random(draw: Draw, name: str) -> Any:
    x = draw.tape.call("aten.sigmoid.default", draw.operand(*draw.shape(1, 2)))
    given = {"aten.bernoulli.p": (0.5,), "aten.geometric.default": (0.5,), "aten.multinomial.default": (1,)}
    numbers = {"aten.randint_like.default": (9,), "aten.randint_like.low_dtype": (2, 9)}
    return draw.tape.call(name, x, *(given | numbers).get(name, ()))


@case("aten.fill.Tensor")
def fill(draw: Draw, name: str) -> Any:
    return draw.tape.call(name, draw.operand(*draw.shape()), draw.operand())


@case(
    *(
        f"aten.{name}.default"
        for name in (
            *("mse_loss", "l1_loss", "smooth_l1_loss", "huber_loss"),
            *("binary_cross_entropy", "binary_cross_entropy_with_logits"),
        )
    )
)
def elementwise_loss(draw: Draw, name: str) -> Any:
    shape = draw.shape()
    x = draw.operand(*shape)
    reduction = draw.one(0, 0, 1, 2)
    weights = (None,) * (("entropy" in name) + ("logits" in name))
    target = draw.other(*shape, like=x)
    if "entropy.d" in name:  # of probabilities
        x, target = draw.tape.call("aten.sigmoid.default", x), draw.tape.call("aten.gt.Scalar", draw.operand(*shape), 0)
        target = draw.tape.call("aten.to.dtype", target, torch.float64)
    return draw.tape.call(name, x, target, *weights, reduction)


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


OF_INTEGERS = "bitwise", "__", "gcd", "lcm"
GIVEN = {"int": 1, "float": 0.5, "number": 2, "bool": True, "Optional[str]": "floor"}


@case(*(name for name in known_operators() if record(name).is_elementwise and name not in CASES))
def elementwise(draw: Draw, name: str) -> Any:
    """What its schema asks for, tensors that are broadcast and numbers."""
    shape = draw.shape()
    positive = draw.one(True, False) or "pow" in name
    base = name.removeprefix("aten.")
    given: list[Any] = []
    keywords: dict[str, Any] = {}
    for argument in overload(name)._schema.arguments:
        kind = str(argument.type)
        if kind == "Tensor":
            sizes = shape if "_backward" in name else draw.narrowed(shape)
            like = next((x for x in given if isinstance(x, Tensor)), None)
            is_first = like is None
            x = (
                draw.operand(*sizes, positive=positive)
                if is_first
                else draw.other(*sizes, positive=positive, like=like)
            )
            if base.startswith(OF_INTEGERS):
                x = draw.tape.call("aten.to.dtype", x, torch.int64)
            given.append(x)
        elif not argument.has_default_value():
            if argument.kwarg_only:
                keywords[argument.name] = GIVEN[kind]
            else:
                given.append(GIVEN[kind])
    return draw.tape.call(name, *given, **keywords)
