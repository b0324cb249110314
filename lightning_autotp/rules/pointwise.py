"""Operators that act on every element by itself, with broadcasting.

Under broadcasting, dims of the output's size are indexed alike; dims of size 1 are the same for every index. A Partial
input passes where the operator is linear: ``-(A1 + A2) = -A1 + -A2``, ``c (A1 + A2) = c A1 + c A2``, and
``(A1 + A2) + (B1 + B2) = (A1 + B1) + (A2 + B2)``, but not ``A + c`` (every rank would add ``c``).
"""

from __future__ import annotations

from lightning_autotp.axes import Dim
from lightning_autotp.graph import Ref
from lightning_autotp.rules.registry import ONE, Dims, Site, rule

_UNARY = (
    "abs", "acos", "bitwise_not", "ceil", "cos", "cosh", "elu", "erf", "exp", "exp2", "expm1", "floor", "full_like",
    "gelu", "hardsigmoid", "hardswish", "hardtanh", "isfinite", "isinf", "isnan", "leaky_relu", "log", "log10", "log1p",
    "log2", "log_sigmoid", "logical_not", "mish", "ones_like", "reciprocal", "relu", "relu6", "round", "rsqrt", "selu",
    "sigmoid", "sign", "silu", "sin", "sinh", "softplus", "sqrt", "square", "tan", "tanh", "zeros_like",
)  # fmt: skip
_LINEAR_UNARY = ("clone", "detach", "neg", "positive")
_CASTS = ("aten.to.dtype", "aten.to.dtype_layout", "aten.to.device", "aten._to_copy.default")
_OTHER_UNARY = (
    "aten.pow.Tensor_Scalar", "aten.pow.Scalar", "aten.clamp.default", "aten.clamp_min.default",
    "aten.clamp_max.default", "aten.clamp.Tensor", "aten.rsub.Scalar", "aten.add.Scalar", "aten.sub.Scalar",
    *(f"aten.{name}.Scalar" for name in ("eq", "ne", "lt", "le", "gt", "ge")),
)  # fmt: skip
_BINARY = (
    *(f"aten.{name}.Tensor" for name in ("eq", "ne", "lt", "le", "gt", "ge")),
    *(f"aten.{name}.Tensor" for name in ("__and__", "__or__", "bitwise_and", "bitwise_or")),
    "aten.logical_and.default", "aten.logical_or.default", "aten.logical_xor.default", "aten.maximum.default",
    "aten.minimum.default", "aten.max.other", "aten.min.other", "aten.floor_divide.default", "aten.div.Tensor_mode",
    "aten.atan2.default", "aten.pow.Tensor_Tensor", "aten.masked_fill.Scalar", "aten.masked_fill.Tensor",
    "aten.where.self", "aten.where.ScalarOther", "aten.where.ScalarSelf", "aten.where.Scalar",
)  # fmt: skip


def broadcast(site: Site) -> Dims:
    """Tie the operands' dims where they are not broadcast; the output's dims."""
    shape = site.shape
    out: list[Dim] = [ONE] * len(shape)
    for dims in site.relation.inputs.values():
        for position, dim in enumerate(reversed(dims), start=1):
            if dim.size != 1:
                out[-position] = dim if out[-position] is ONE else site.tie(out[-position], dim)
    return tuple(out)


@rule(*(f"aten.{name}.default" for name in _UNARY), *_OTHER_UNARY, *_BINARY)
def pointwise(site: Site) -> Dims:
    """Anything element by element."""
    return broadcast(site)


@rule(*(f"aten.{name}.default" for name in _LINEAR_UNARY), *_CASTS, "boundary")
def linear_unary(site: Site) -> Dims:
    """One tensor in, linear, so that a Partial passes; a module boundary is the identity."""
    name, value = site.operator.arguments[0]
    site.linear_in(name)
    return site.relation.inputs[(value if isinstance(value, Ref) else value[0]).tensor]


@rule("aten.type_as.default")
def type_as(site: Site) -> Dims:
    """A cast; ``other`` lends only its dtype."""
    site.linear_in("self")
    return site.dims("self")


@rule("aten.add.Tensor", "aten.sub.Tensor")
def additive(site: Site) -> Dims:
    """A sum of two tensors is linear in both together; adding a number is not linear."""
    if isinstance(site["other"], Ref):
        site.linear_in("self", "other")
    return broadcast(site)


@rule("aten.mul.Tensor", "aten.multiply.Tensor", "aten.mul.Scalar")
def multiply(site: Site) -> Dims:
    """Linear in one factor, while the other is not Partial."""
    site.linear_in("self")
    return broadcast(site)


@rule("aten.div.Tensor", "aten.div.Scalar", "aten.true_divide.Tensor")
def divide(site: Site) -> Dims:
    """Linear in the numerator."""
    site.linear_in("self")
    return broadcast(site)


@rule("aten.dropout.default")
def dropout(site: Site) -> Dims:
    """Without effect it is the identity; else every rank must draw the same mask, so its input stays whole."""
    dims = site.dims("input")
    if site["p"] and site["train"]:
        site.keep_whole(*dims, because=f"dropout (p={site['p']}) draws one random mask for the whole tensor")
    else:
        site.linear_in("input")
    return dims
