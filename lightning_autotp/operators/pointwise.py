"""Operators that act on every element by itself, with broadcasting.

Under broadcasting, dims of the output's size are indexed alike; dims of size 1 are the same for every index. A Partial
input passes where the operator is linear: ``-(A1 + A2) = -A1 + -A2``, ``c (A1 + A2) = c A1 + c A2``, and
``(A1 + A2) + (B1 + B2) = (A1 + B1) + (A2 + B2)``, but not ``A + c`` (every rank would add ``c``).
"""

from __future__ import annotations

from lightning_autotp.operators.graph import Ref
from lightning_autotp.operators.registry import Dims, Site, operator

_UNARY = (
    "abs", "acos", "angle", "asin", "atan", "bitwise_not", "ceil", "celu", "cos", "cosh", "elu", "erf", "erfc", "exp",
    "exp2", "expm1", "floor", "gelu", "hardsigmoid", "hardswish", "hardtanh", "isfinite", "isinf", "isnan",
    "leaky_relu", "log", "log10", "log1p", "log2", "log_sigmoid", "logical_not", "mish", "nan_to_num", "reciprocal",
    "relu", "relu6", "round", "rsqrt", "selu", "sigmoid", "sign", "silu", "sin", "sinh", "softplus", "sqrt", "square",
    "tan", "tanh", "threshold", "trunc",
)  # fmt: skip
_LINEAR_UNARY = ("clone", "conj", "detach", "imag", "neg", "positive", "real")
_IDENTITIES = ("alias", "contiguous", "lift_fresh", "lift_fresh_copy")
_CASTS = ("aten.to.dtype", "aten.to.dtype_layout", "aten.to.device", "aten._to_copy.default")
_OTHER_UNARY = (
    "aten.pow.Scalar", "aten.clamp.default", "aten.clamp_min.default",
    "aten.clamp_max.default", "aten.clamp.Tensor", "aten.rsub.Scalar", "aten.add.Scalar", "aten.sub.Scalar",
    "aten.remainder.Scalar", "aten.floor_divide.Scalar",
    *(f"aten.{name}.Scalar" for name in ("eq", "ne", "lt", "le", "gt", "ge")),
)  # fmt: skip
_BINARY = (
    *(f"aten.{name}.Tensor" for name in ("eq", "ne", "lt", "le", "gt", "ge")),
    *(f"aten.{name}.Tensor" for name in ("__and__", "__or__", "bitwise_and", "bitwise_or", "remainder", "fmod")),
    "aten.logical_and.default", "aten.logical_or.default", "aten.logical_xor.default", "aten.maximum.default",
    "aten.minimum.default", "aten.max.other", "aten.min.other", "aten.div.Tensor_mode",
    "aten.atan2.default", "aten.where.ScalarSelf", "aten.where.Scalar",
    "aten.masked_fill.Tensor", "aten.clamp_min.Tensor", "aten.clamp_max.Tensor", "aten.addcmul.default",
    "aten.addcdiv.default", "aten.polar.default",
)  # fmt: skip


def broadcast(site: Site) -> Dims:
    """Tie all operands' dims where they are not broadcast; the output's dims."""
    return site.broadcast(list(site.relation.inputs.values()))


@operator(*(f"aten.{name}.default" for name in _UNARY), *_OTHER_UNARY, *_BINARY)
@operator("aten.pow.Tensor_Scalar", in_place="aten.pow_.Scalar")
@operator("aten.pow.Tensor_Tensor", in_place="aten.pow_.Tensor")
@operator("aten.floor_divide.default", in_place="aten.floor_divide_.Tensor")
def pointwise(site: Site) -> Dims:
    """Anything element by element."""
    return broadcast(site)


@operator(*(f"aten.{name}.default" for name in _LINEAR_UNARY), "boundary")
@operator(*(f"aten.{name}.default" for name in _IDENTITIES), identity="always")
@operator(*_CASTS, identity="same dtype")
def linear_unary(site: Site) -> Dims:
    """One tensor in, linear, so that a Partial passes; a module boundary is the identity."""
    name, value = site.operator.arguments[0]
    site.linear_in(name)
    return site.relation.inputs[(value if isinstance(value, Ref) else value[0]).tensor]


@operator("aten.type_as.default", "aten.to.other", identity="same dtype", lends="other")
def type_as(site: Site) -> Dims:
    """A cast; ``other`` lends only its dtype."""
    site.linear_in("self")
    return site.dims("self")


@operator("aten.add.Tensor", "aten.sub.Tensor")
def additive(site: Site) -> Dims:
    """A sum of two tensors is linear in both together; adding a number is not linear."""
    if isinstance(site["other"], Ref):
        site.linear_in("self", "other")
    return broadcast(site)


@operator("aten.complex.default", "aten.lerp.Scalar")
def combine(site: Site) -> Dims:
    """A linear combination of the operands with fixed coefficients."""
    site.linear_in(*(name for name, value in site.operator.arguments if isinstance(value, Ref)))
    return broadcast(site)


@operator("aten.mul.Tensor", "aten.multiply.Tensor", "aten.mul.Scalar")
def multiply(site: Site) -> Dims:
    """Linear in one factor, while the other is not Partial: in the one that is not broadcast, the first of two."""
    left, right = site.dims("self"), site.tensor("other")
    is_broadcast = len(left) < len(site.shape) or any(a.size != b for a, b in zip(left, site.shape, strict=True))
    site.linear_in("other" if right is not None and is_broadcast else "self")
    return broadcast(site)


@operator("aten.div.Tensor", "aten.div.Scalar", "aten.true_divide.Tensor")
def divide(site: Site) -> Dims:
    """Linear in the numerator."""
    site.linear_in("self")
    return broadcast(site)


@operator(*(f"aten.{name}_backward.default" for name in ("leaky_relu", "sigmoid", "tanh", "threshold")))
def pointwise_backward(site: Site) -> Dims:
    """The derivative of a function of every element: linear in the gradient that it is given."""
    site.linear_in("grad_output")
    return broadcast(site)


@operator("aten.where.self")
def where(site: Site) -> Dims:
    """Linear in both choices together."""
    site.linear_in("self", "other")
    return broadcast(site)


@operator("aten.where.ScalarOther", "aten.masked_fill.Scalar")
def mask_out(site: Site) -> Dims:
    """Linear where what is put in is zero."""
    if dict(site.operator.arguments).get("value", dict(site.operator.arguments).get("other")) == 0:
        site.linear_in("self")
    return broadcast(site)
