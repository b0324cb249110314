"""Every rule against the truth: what it lets the solver do is done with real operators, and compared.

A case draws shapes and arguments for one operator and calls it on the tape; operands are parameters whose dims may be
products, concatenations or sections of other parameters' dims. See :mod:`rule_truth` for what is compared.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any, TypeVar

import pytest
import torch
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from rule_truth import Tape, Untrue, forced
from torch import Tensor, nn

from lightning_autotp.capture import capture
from lightning_autotp.graph import Graph, Ref
from lightning_autotp.layout import Shard
from lightning_autotp.rules import known_operators, relate, rule

Value = TypeVar("Value")
SIZES = (1, 2, 2, 3, 4, 5, 6)
EXAMPLES = 10

# Registered, but without a case of its own here.
ELSEWHERE = {
    "boundary": "the identity; its conversions are collectives with tests of their own",
    "aten.cross_entropy_loss.default": "over sharded classes another loss runs; its relation is tested below",
}
# Every dim stays whole here.
WHOLE = {f"aten.{name}.default" for name in ("mean", "max", "min", "any", "all", "squeeze")}
# Over a sharded dim these give a Partial.
CONTRACTING = {"aten.sum.default", "aten.sum.dim_IntList", "aten.linear.default", "aten.matmul.default"} | {
    "aten.bmm.default",
    "aten.embedding.default",
}


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


# -- element by element ------------------------------------------------------------------------------------------------


@case(
    *(
        f"aten.{name}.default"
        for name in [
            "abs",
            "acos",
            "ceil",
            "clone",
            "cos",
            "cosh",
            "detach",
            "elu",
            "erf",
            "exp",
            "exp2",
            "expm1",
            "floor",
            "gelu",
            "hardsigmoid",
            "hardswish",
            "hardtanh",
            "isfinite",
            "isinf",
            "isnan",
            "leaky_relu",
            "log",
            "log10",
            "log1p",
            "log2",
            "log_sigmoid",
            "logical_not",
            "mish",
            "neg",
            "ones_like",
            "positive",
            "reciprocal",
            "relu",
            "relu6",
            "round",
            "rsqrt",
            "selu",
            "sigmoid",
            "sign",
            "silu",
            "sin",
            "sinh",
            "softplus",
            "sqrt",
            "square",
            "tan",
            "tanh",
            "zeros_like",
        ]
    )
)
def unary(draw: Draw, name: str) -> Any:
    return draw.tape.call(name, draw.operand(*draw.shape(), positive="log" in name or "sqrt" in name))


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
        "add", "div", "eq", "ge", "gt", "le", "lt", "mul", "multiply", "ne", "sub", "true_divide",
    ]),
    *(f"aten.{name}.default" for name in [
        "atan2", "logical_and", "logical_or", "logical_xor", "maximum", "minimum",
    ]),
    "aten.max.other", "aten.min.other", "aten.pow.Tensor_Tensor", "aten.div.Tensor_mode",
)  # fmt: skip
def binary(draw: Draw, name: str) -> Any:
    shape = draw.shape()
    positive = "pow" in name or "div" in name
    left = draw.operand(*draw.narrowed(shape), positive=positive)
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


@case("aten.floor_divide.default")
def floor_divide(draw: Draw, name: str) -> Any:
    shape = draw.shape()
    x = draw.tape.call("aten.to.dtype", draw.operand(*draw.narrowed(shape)), torch.int64)
    return draw.tape.call(
        name, x, draw.one(2, draw.tape.constant(torch.tensor([1, 2, 3]))) if x.shape[-1:] == (3,) else 2
    )


@case("aten.clamp.Tensor")
def clamp(draw: Draw, name: str) -> Any:
    x = draw.operand(*(shape := draw.shape()))
    return draw.tape.call(name, x, draw.other(*draw.narrowed(shape)), draw.one(None, draw.operand(*shape)))


@case("aten.masked_fill.Scalar", "aten.masked_fill.Tensor")
def masked_fill(draw: Draw, name: str) -> Any:
    shape = draw.shape()
    x = draw.operand(*shape)
    return draw.tape.call(name, x, draw.mask(*draw.narrowed(shape)), 0.5 if name.endswith("Scalar") else draw.operand())


@case("aten.where.self", "aten.where.ScalarOther", "aten.where.ScalarSelf", "aten.where.Scalar")
def where(draw: Draw, name: str) -> Any:
    shape = draw.shape()
    condition = (
        draw.tape.call("aten.gt.Scalar", draw.operand(*shape), 0) if draw.one(True, False) else draw.mask(*shape)
    )
    x: Any = draw.operand(*draw.narrowed(shape)) if name in ("aten.where.self", "aten.where.ScalarOther") else 1.0
    y: Any = draw.other(*draw.narrowed(shape)) if name in ("aten.where.self", "aten.where.ScalarSelf") else 2.0
    return draw.tape.call(name, condition, x, y)


TO = (torch.float32, torch.bfloat16, torch.int64, torch.bool)


@case("aten.to.dtype", "aten.to.dtype_layout", "aten._to_copy.default", "aten.to.device", "aten.type_as.default")
def cast(draw: Draw, name: str) -> Any:
    x = draw.coarse().operand(*draw.shape())
    dtype = draw.one(*TO)
    if name == "aten.type_as.default":
        other = draw.tape.parameter(*draw.shape(), dtype=torch.float32)
        return draw.tape.call(name, x, draw.one(other, draw.tape.constant(torch.zeros(2, dtype=dtype))))
    if name == "aten.to.device":
        return draw.tape.call(name, x, torch.device("cpu"), dtype)
    return draw.tape.call(name, x, dtype) if name == "aten.to.dtype" else draw.tape.call(name, x, dtype=dtype)


@case("aten.dropout.default")
def dropout_without_effect(draw: Draw, name: str) -> Any:
    p, train = draw.one((0.0, True), (0.5, False))
    return draw.tape.call(name, draw.operand(*draw.shape()), p, train)


# -- views -------------------------------------------------------------------------------------------------------------


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


@case("aten.transpose.int", "aten.swapaxes.default")
def two_dims(draw: Draw, name: str) -> Any:
    shape = draw.shape()
    return draw.tape.call(name, draw.operand(*shape), draw.dim(shape), draw.dim(shape))


@case("aten.permute.default")
def permute(draw: Draw, name: str) -> Any:
    shape = draw.shape()
    order = draw.data.draw(st.permutations(range(len(shape))))
    return draw.tape.call(name, draw.operand(*shape), [at - draw.one(0, len(shape)) for at in order])


@case("aten.expand.default", "aten.expand_as.default")
def expand(draw: Draw, name: str) -> Any:
    shape = draw.shape()
    x = draw.operand(*draw.narrowed(shape))
    kept = [-1 if tuple(x.shape[::-1][at : at + 1]) == (size,) else size for at, size in enumerate(reversed(shape))][
        ::-1
    ]
    size: Any = draw.one(list(shape), kept) if name == "aten.expand.default" else draw.other(*shape, like=x)
    return draw.tape.call(name, x, size)


@case("aten.repeat_interleave.self_int")
def repeat_interleave(draw: Draw, name: str) -> Any:
    shape = draw.shape()
    return draw.tape.call(name, draw.operand(*shape), draw.one(1, 2, 3, 4), draw.dim(shape))


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
    return draw.tape.call(name, parts, dim)


@case("aten.select.int")
def select(draw: Draw, name: str) -> Any:
    shape = draw.shape()
    dim = draw.dim(shape)
    return draw.tape.call(name, draw.operand(*shape), dim, draw.one(0, -1, shape[dim] - 1))


@case("aten.pad.default", "aten.constant_pad_nd.default")
def pad(draw: Draw, name: str) -> Any:
    shape = draw.shape()
    return draw.tape.call(
        name, draw.operand(*shape), [draw.one(0, 0, 1, 2) for _ in range(2 * draw.one(1, len(shape)))]
    )


# -- reductions, softmaxes, normalisations -----------------------------------------------------------------------------


@case(
    *(f"aten.{name}.default" for name in ["sum", "mean", "max", "min", "any", "all"]),
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
)
def reduction(draw: Draw, name: str) -> Any:
    shape = draw.shape()
    return draw.tape.call(name, draw.operand(*shape), draw.dims(shape), draw.one(False, True))


@case("aten.var.dim", "aten.std.dim", "aten.linalg_vector_norm.default", "aten.norm.ScalarOpt_dim")
def deviation(draw: Draw, name: str) -> Any:
    shape = tuple(size + 1 for size in draw.shape())
    first = False if name.endswith(".dim") else 2
    return (
        draw.tape.call(name, draw.operand(*shape), first, draw.dims(shape))
        if "norm" in name
        else draw.tape.call(name, draw.operand(*shape), draw.dims(shape), first)
    )


@case(
    *(f"aten.{name}.dim" for name in ["max", "min", "any", "all"]),
    *("aten.argmax.default", "aten.argmin.default", "aten.prod.dim_int"),
)
def one_dim_reduction(draw: Draw, name: str) -> Any:
    shape = draw.shape()
    return draw.tape.call(name, draw.operand(*shape), draw.dim(shape), draw.one(False, True))


@case("aten.var.correction", "aten.std.correction")
def corrected_deviation(draw: Draw, name: str) -> Any:
    shape = tuple(size + 1 for size in draw.shape())
    return draw.tape.call(name, draw.operand(*shape), draw.dims(shape), correction=0, keepdim=draw.one(False, True))


@case("aten.softmax.int", "aten.log_softmax.int", "aten.cumsum.default", "aten.sort.default")
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


# -- products, attention, look-ups -------------------------------------------------------------------------------------


@case("aten.linear.default")
def linear(draw: Draw, name: str) -> Any:
    *batch, k, n = draw.shape(2, 4)
    x, weight = draw.operand(*batch, k), draw.operand(n, k)
    bias = draw.one(None, draw.tape.parameter(n))
    return draw.tape.call(name, x, weight, bias, layer=draw.one("", "linear"))


@case("aten.matmul.default", "aten.bmm.default")
def matmul(draw: Draw, name: str) -> Any:
    *batch, m, k, n = draw.shape(4, 4) if "bmm" in name else draw.shape(3, 5)
    left = draw.operand(*(batch if "bmm" in name else draw.narrowed(tuple(batch))), m, k)
    right = left if m == k == n and len(batch) == left.ndim - 2 else draw.other(*batch, k, n)
    return draw.tape.call(name, left, right)


@case("aten.addmm.default")
def addmm(draw: Draw, name: str) -> Any:
    m, k, n = draw.shape(3, 3)
    bias = draw.operand(*draw.one((n,), (n,), (1,), (m, n)))
    return draw.tape.call(name, bias, draw.operand(m, k), draw.operand(k, n), alpha=draw.one(1, 2))


@case("aten.baddbmm.default")
def baddbmm(draw: Draw, name: str) -> Any:
    b, m, k, n = draw.shape(4, 4)
    bias = draw.other(*draw.narrowed((b, m, n)))
    return draw.tape.call(name, bias, draw.operand(b, m, k), draw.operand(b, k, n), beta=draw.one(0, 1), alpha=2)


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
        shape = *draw.narrowed((batch, heads)), queries, keys
        mask = draw.operand(*shape) if mask == "operand" else draw.tape.constant(draw.tape.draw(*shape))
    return draw.tape.call(name, query, key, value, mask, 0.0, causal, enable_gqa=groups > 1)


@case("aten.embedding.default")
def embedding(draw: Draw, name: str) -> Any:
    rows, features = draw.one(2, 3, 5, 7), draw.one(*SIZES)
    ids = draw.tape.constant(torch.randint(0, rows, draw.shape(), generator=draw.tape.generator))
    options = draw.one((), (1,), (-1, False, False))
    return draw.tape.call(name, draw.operand(rows, features), ids, *options, layer=draw.one("", "embedding"))


# -- the proofs --------------------------------------------------------------------------------------------------------


def prove(name: str, examples: int = EXAMPLES) -> Counter[str]:
    """Run an operator's case on a few examples; how many combinations of each kind were proven."""
    seen: Counter[str] = Counter()

    @settings(
        max_examples=examples,
        derandomize=True,
        deadline=None,
        database=None,
        phases=(Phase.generate,),
        suppress_health_check=list(HealthCheck),
    )
    @given(st.data())
    def example(data: st.DataObject) -> None:
        draw = Draw(data)
        result = CASES[name](draw)
        # What it gives meets other parameters, so that dims which the operator itself makes are candidates, too.
        for output in [result] if isinstance(result, Tensor) else result:
            draw.tape.call("aten.mul.Tensor", output, draw.tape.parameter(*output.shape))
        seen.update(draw.tape.prove(name, draw.ranks))

    example()
    return seen


@pytest.mark.parametrize("name", known_operators())
def test_rule(name: str) -> None:
    if name in ELSEWHERE:
        return
    seen = prove(name)
    assert (seen["sharded"] + seen["contracted"] > 0) is (name not in WHOLE), seen
    assert (seen["contracted"] > 0) is (name in CONTRACTING), seen


def test_every_operator_has_a_case() -> None:
    assert set(known_operators()) == CASES.keys() | ELSEWHERE.keys()


NEEDED: list[tuple[str, tuple[Any, ...]]] = [
    *((f"aten.{name}.int", (1,)) for name in ("softmax", "log_softmax", "unbind")),
    *((f"aten.{name}.default", (1,)) for name in ("cumsum", "sort", "argmax")),
    *((f"aten.{name}.default", ([1],)) for name in ("amax", "logsumexp", "flip")),
    *((f"aten.{name}.dim", ([1],)) for name in ("mean", "var", "std")),
    ("aten.max.dim", (1,)),
    ("aten.select.int", (1, 0)),
    ("aten.slice.Tensor", (1, 0, 6, 2)),
    ("aten.roll.default", ([1], [1])),
    ("aten.tril.default", ()),
    ("aten.linalg_vector_norm.default", (2, [1])),
    ("aten.constant_pad_nd.default", ([0, 1],)),
    ("aten.layer_norm.default", ([6],)),
    ("aten.rms_norm.default", ([6],)),
]


@pytest.mark.parametrize(("name", "arguments"), NEEDED)
def test_what_is_kept_whole_may_not_be_cut(name: str, arguments: tuple[Any, ...]) -> None:
    """The proof can fail: cutting the dim that such an operator needs is found out."""
    tape = Tape()
    operand = tape.parameter(4, 6)
    tape.call(name, operand, *arguments)
    with pytest.raises(Untrue):
        tape.play(forced(tape, name, operand, 1, 2), 2)


def test_what_ranks_share_is_not_summed() -> None:
    """Four ranks share two heads: they divide each one's features, but a value per head would count twice."""
    tape = Tape()
    features, scales = tape.parameter(6), tape.parameter(2, 1)
    heads = tape.call("aten.view.default", features, [2, 3])
    tape.call("aten.mul.Tensor", heads, scales)
    shared = [c for c in tape.combinations("aten.mul.Tensor", 4) if c.kind == "sharded"]
    assert any(
        layout.dims[0][1].is_shared for c in shared for layout in c.layouts.values() if isinstance(layout, Shard)
    )
    tape.call("aten.sum.default", scales)
    assert tape.prove("aten.sum.default", 4)["contracted"] == 0
    tape.call("aten.sum.dim_IntList", features, [0])
    assert tape.prove("aten.sum.dim_IntList", 4)["contracted"] > 0


@pytest.mark.parametrize("p", [0.0, 0.5])
def test_random_masks_are_drawn_whole(p: float) -> None:
    tape = Tape()
    tape.call("aten.dropout.default", tape.parameter(4, 4), p, True)
    query, key, value = (tape.parameter(2, 4, 3, 5) for _ in range(3))
    tape.call("aten.scaled_dot_product_attention.default", query, key, value, None, p)
    for name in ("aten.dropout.default", "aten.scaled_dot_product_attention.default"):
        kinds = {combination.kind for combination in tape.combinations(name, 2)}
        assert ("sharded" in kinds) is (p == 0.0)


@pytest.mark.parametrize("reduction", [0, 1, 2])
def test_cross_entropy_may_have_sharded_classes_only(reduction: int) -> None:
    tape = Tape()
    logits, target = tape.parameter(6, 8), tape.constant(torch.tensor([0, 7, 3, 1, 1, 5]))
    tape.call("aten.cross_entropy_loss.default", logits, target, None, reduction)
    tape.call("aten.cross_entropy_loss.default", logits, tape.constant(torch.rand(6, 8).double()), None, reduction)
    (by_index, by_probability), _ = relate(tape.graph)
    tokens, classes = by_index.inputs[tape.number(logits)]
    assert by_index.contracted == [classes]
    assert by_index.reduces
    assert {tokens, *by_index.outputs[by_index.operator.outputs[0]]} <= set(by_index.whole)
    assert classes not in by_index.whole
    assert {tokens, classes} <= set(by_probability.whole)
    assert not by_probability.contracted
    assert not by_probability.reduces


UNUSUAL: list[tuple[str, Callable[[Tape], tuple[Any, ...]]]] = [
    ("aten.sum.dim_IntList", lambda tape: (tape.parameter(), [-1])),
    ("aten.mean.dim", lambda tape: (tape.parameter(), [0])),
    ("aten.amax.default", lambda tape: (tape.parameter(), [0])),
    ("aten.softmax.int", lambda tape: (tape.parameter(), -1)),
    ("aten.cumsum.default", lambda tape: (tape.parameter(), 0)),
    ("aten.squeeze.dim", lambda tape: (tape.parameter(), 0)),
    ("aten.flip.default", lambda tape: (tape.parameter(4), [])),
    ("aten.roll.default", lambda tape: (tape.parameter(4, 4), [3])),
    ("aten.slice.Tensor", lambda tape: (tape.parameter(6), 0, 4, 2)),
    ("aten.view.default", lambda tape: (tape.parameter(0, 4), [2, 0])),
    ("aten.cat.default", lambda tape: ([tape.parameter(0), tape.parameter(4, 4)], 1)),
    ("aten.linear.default", lambda tape: (tape.parameter(4, 4), tape.parameter(4))),
    ("aten.matmul.default", lambda tape: (tape.parameter(4, 4), tape.parameter(4))),
    ("aten.scaled_dot_product_attention.default", lambda tape: tuple(tape.parameter(4, 4) for _ in range(3))),
]


@pytest.mark.parametrize(("name", "arguments"), UNUSUAL)
def test_unusual_arguments(name: str, arguments: Callable[[Tape], tuple[Any, ...]]) -> None:
    tape = Tape()
    tape.call(name, *arguments(tape))
    assert tape.prove(name, 2)["whole"] > 0


@pytest.mark.parametrize("option", ["scale_grad_by_freq", "sparse"])
def test_an_embedding_with_such_gradients_keeps_its_rows(option: str) -> None:
    tape = Tape()
    ids = tape.constant(torch.tensor([0, 3, 1]))
    tape.call("aten.embedding.default", tape.parameter(4, 6), ids, layer="embedding")
    assert tape.prove("aten.embedding.default", 2)["contracted"] == 1
    tape = Tape()
    tape.call("aten.embedding.default", tape.parameter(4, 6), tape.constant(ids), layer="embedding", **{option: True})
    assert all(combination.kind != "contracted" for combination in tape.combinations("aten.embedding.default", 2))


class Mixed(nn.Module):
    """Operators with defaults, lists, dtypes and several results."""

    def __init__(self) -> None:
        super().__init__()
        self.x = nn.Parameter(torch.zeros(3, 8))
        self.weight = nn.Parameter(torch.zeros(12, 8))

    def forward(self) -> Tensor:
        y = nn.functional.linear(self.x, self.weight).view(3, 2, 6).transpose(0, 1)
        first, second = y.softmax(-1).chunk(2, dim=2)
        return torch.cat([first, second.to(torch.float64)], 1).sum(dim=(0, 2))


def test_a_tape_is_what_a_capture_gives() -> None:
    tape = Tape()
    x, weight = (tape.parameter(*shape, dtype=torch.float32) for shape in ((3, 8), (12, 8)))
    y = tape.call("aten.linear.default", x, weight)
    y = tape.call("aten.transpose.int", tape.call("aten.view.default", y, [3, 2, 6]), 0, 1)
    first, second = tape.call("aten.chunk.default", tape.call("aten.softmax.int", y, -1), 2, 2)
    second = tape.call("aten.to.dtype", second, torch.float64)
    tape.call("aten.sum.dim_IntList", tape.call("aten.cat.default", [first, second], 1), [0, 2])

    def described(graph: Graph) -> list[Any]:
        def plain(value: Any) -> Any:
            if isinstance(value, tuple):
                return tuple(map(plain, value))
            return graph.tensors[value.tensor] if isinstance(value, Ref) else value

        operators = [operator for operator in graph.operators if operator.boundary is None]
        return [(op.name, [(name, plain(value)) for name, value in op.arguments]) for op in operators]

    assert described(tape.graph) == described(capture(Mixed(), ()))


def test_a_rule_is_registered_once() -> None:
    with pytest.raises(ValueError, match=r"aten\.neg\.default already has a rule"):
        rule("aten.neg.default")(lambda site: ())
