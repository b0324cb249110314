"""Operators that act on every element by itself, with broadcasting.

Under broadcasting, dims of the output's size are indexed alike; dims of size 1 are the same for every index. A Partial
input passes where the operator is linear: ``-(A1 + A2) = -A1 + -A2``, ``c (A1 + A2) = c A1 + c A2``, and
``(A1 + A2) + (B1 + B2) = (A1 + B1) + (A2 + B2)``, but not ``A + c`` (every rank would add ``c``).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from lightning_autotp.operators.graph import Ref
from lightning_autotp.operators.registry import AnyRule, Dims, Site, known_operators, operator

_LINEAR_UNARY = ("clone", "conj", "detach", "imag", "neg", "positive", "real")
_IDENTITIES = ("alias", "contiguous", "lift_fresh", "lift_fresh_copy")
_CASTS = ("aten.to.dtype", "aten.to.dtype_layout", "aten.to.device", "aten._to_copy.default")
_NOT_TAGGED = (
    "aten.__and__.Tensor", "aten.__or__.Tensor", "aten._prelu_kernel.default", "aten.floor_divide.Scalar",
    "aten.hardswish.default", "aten.log_sigmoid.default", "aten.masked_fill.Tensor", "aten.polar.default",
    "aten.isin.Tensor_Scalar", "aten.where.Scalar", "aten.where.ScalarSelf",
)  # fmt: skip
"""Operators of this family that torch does not tag as such; those that it does are declared by their tag."""


def elementwise(*names: str, **facts: Any) -> Callable[[AnyRule], AnyRule]:
    """Declare operators of this family."""
    return operator(*names, is_elementwise=True, **facts)


def broadcast(site: Site) -> Dims:
    """Tie all operands' dims where they are not broadcast; the output's dims."""
    return site.broadcast(list(site.relation.inputs.values()))


@elementwise(*_NOT_TAGGED)
@elementwise("aten.pow.Tensor_Scalar", in_place="aten.pow_.Scalar")
@elementwise("aten.pow.Tensor_Tensor", in_place="aten.pow_.Tensor")
@elementwise("aten.float_power.Tensor_Scalar", in_place="aten.float_power_.Scalar")
@elementwise("aten.float_power.Tensor_Tensor", in_place="aten.float_power_.Tensor")
@elementwise("aten.floor_divide.default", in_place="aten.floor_divide_.Tensor")
def pointwise(site: Site) -> list[Dims]:
    """Anything element by element."""
    return [broadcast(site)] * len(site.shapes)


@operator("boundary")
@elementwise(*(f"aten.{name}.default" for name in _LINEAR_UNARY))
@elementwise(*(f"aten.{name}.default" for name in _IDENTITIES), identity="always")
@elementwise(*_CASTS, identity="same dtype")
def linear_unary(site: Site) -> Dims:
    """One tensor in, linear, so that a Partial passes; a module boundary is the identity."""
    name, value = site.operator.arguments[0]
    site.linear_in(name)
    return site.relation.inputs[(value if isinstance(value, Ref) else value[0]).tensor]


@elementwise("aten.type_as.default", "aten.to.other", identity="same dtype", lends="other")
def type_as(site: Site) -> Dims:
    """A cast; ``other`` lends only its dtype."""
    site.linear_in("self")
    return site.dims("self")


@elementwise("aten.add.Tensor", "aten.sub.Tensor", "aten.rsub.Tensor")
def additive(site: Site) -> Dims:
    """A sum of two tensors is linear in both together; adding a number is not linear."""
    if isinstance(site["other"], Ref):
        site.linear_in("self", "other")
    return broadcast(site)


@elementwise("aten.complex.default", "aten.lerp.Scalar")
def combine(site: Site) -> Dims:
    """A linear combination of the operands with fixed coefficients."""
    site.linear_in(*(name for name, value in site.operator.arguments if isinstance(value, Ref)))
    return broadcast(site)


@elementwise("aten.mul.Tensor", "aten.multiply.Tensor", "aten.mul.Scalar")
def multiply(site: Site) -> Dims:
    """Linear in one factor, while the other is not Partial: in the one that is not broadcast, the first of two."""
    left, right = site.dims("self"), site.tensor("other")
    is_broadcast = len(left) < len(site.shape) or any(a.size != b for a, b in zip(left, site.shape, strict=True))
    site.linear_in("other" if right is not None and is_broadcast else "self")
    return broadcast(site)


@elementwise("aten.div.Tensor", "aten.div.Scalar", "aten.true_divide.Tensor")
def divide(site: Site) -> Dims:
    """Linear in the numerator."""
    site.linear_in("self")
    return broadcast(site)


@elementwise("aten.where.self")
def where(site: Site) -> Dims:
    """Linear in both choices together."""
    site.linear_in("self", "other")
    return broadcast(site)


@elementwise("aten.where.ScalarOther", "aten.masked_fill.Scalar")
def mask_out(site: Site) -> Dims:
    """Linear where what is put in is zero."""
    if dict(site.operator.arguments).get("value", dict(site.operator.arguments).get("other")) == 0:
        site.linear_in("self")
    return broadcast(site)


@elementwise("aten.leaky_relu_backward.default")
def pointwise_backward(site: Site) -> Dims:
    """The derivative of a function of every element: linear in the gradient that it is given."""
    site.linear_in("grad_output")
    return broadcast(site)


def declare_elementwise(names: Iterable[str]) -> None:
    """Declare those of these elementwise operators that have no record yet."""
    for name in sorted(set(names) - set(known_operators())):
        elementwise(name)(pointwise_backward if "_backward." in name else pointwise)
