"""Constants and random numbers that take a shape from a tensor, and dropout.

What draws for single elements may do so on shards, where each rank draws its own numbers. A Partial is summed before.
"""

from __future__ import annotations

from lightning_autotp.operators.registry import Dims, Shapes, Site, operator


def _everywhere(_: Shapes, __: int) -> bool:
    """One number in every place."""
    return True


operator("aten.zeros.default", sizes=("size",), uniform=_everywhere, zeros=True)
operator(
    "aten.ones.default", "aten.full.default", "aten.empty.memory_format",
    sizes=("size",), uniform=_everywhere,
)  # fmt: skip
operator("aten.rand.default", "aten.randn.default", sizes=("size",))
operator(
    "aten.arange.default", "aten.arange.start", "aten.arange.start_step", "aten.eye.default", "aten.eye.m",
    "aten.linspace.default",
)  # fmt: skip


_LIKE = {"uniform": _everywhere, "is_elementwise": True}


@operator("aten.zeros_like.default", "aten.zero.default", **_LIKE, lends="self", zeros=True)
def zeros_like(site: Site) -> Dims:
    """Cut like the tensor whose shape it has; zeros add up to zeros."""
    site.linear_in("self")
    return site.dims("self")


@operator("aten.ones_like.default", "aten.full_like.default", "aten.fill.Scalar", **_LIKE, lends="self")
@operator("aten.empty_like.default", **_LIKE)
def full_like(site: Site) -> Dims:
    """Cut like the tensor whose shape it has."""
    return site.dims("self")


@operator("aten.fill.Tensor", **_LIKE, lends="self")
def fill(site: Site) -> Dims:
    """One number of a tensor in every place: linear in that."""
    site.linear_in("value")
    return site.dims("self")


@operator("aten.new_zeros.default", sizes=("size",), uniform=_everywhere, lends="self", zeros=True)
@operator(
    "aten.new_ones.default", "aten.new_full.default",
    sizes=("size",), uniform=_everywhere, lends="self",
)  # fmt: skip
@operator("aten.new_empty.default", sizes=("size",), uniform=_everywhere)
def new_full(site: Site) -> Dims:
    """Sizes of its own: cut as it is used. One that has the tensor's shape takes it from there, and is cut like it."""
    dims = site.dims("self")
    if tuple(dim.size for dim in dims) == site.shape:
        return dims
    return tuple(site.new(size) for size in site.shape)


_DRAWN = (
    "rand_like", "randn_like", "exponential", "uniform", "bernoulli", "log_normal", "cauchy", "geometric", "poisson",
)  # fmt: skip


@operator(*(f"aten.{name}.default" for name in _DRAWN))
@operator("aten.randint_like.default", "aten.randint_like.low_dtype")
@operator("aten.normal_functional.default", in_place="aten.normal_.default")
@operator("aten.bernoulli.p", in_place="aten.bernoulli_.float")
def random(site: Site) -> Dims:
    """A number for every element of the tensor that lends its shape (or its probabilities)."""
    site.draws()
    return site.dims("self")


@operator("aten.multinomial.default")
def multinomial(site: Site) -> list[Dims]:
    """One draw among all categories, so all stays whole."""
    return site.give_up("aten.multinomial.default draws one index among all")


@operator("aten.dropout.default", "aten.alpha_dropout.default")
def dropout(site: Site) -> Dims:
    """A mask with a number for every element; without effect it is the identity."""
    return _dropped(site)


def _dropped(site: Site) -> Dims:
    name, _ = site.operator.arguments[0]  # the in-place form calls it by another name
    if not site.draws(when=site["p"] and site["train"]):
        site.linear_in(name)
    return site.dims(name)


@operator("aten.rrelu.default")
def rrelu(site: Site) -> Dims:
    """In training a slope is drawn for every element."""
    site.draws(when=site["training"])
    return site.dims("self")


@operator("aten.feature_dropout.default", "aten.feature_alpha_dropout.default")
def feature_dropout(site: Site) -> Dims:
    """One number per sample and channel: ``[n, c, ...]``; what comes after the channels has it in common."""
    dims = _dropped(site)
    if site.relation.draws:
        site.keep_whole(*dims[2:], because="dropout draws one number for the whole of a channel")
    return dims


@operator("aten.native_dropout.default")
def native_dropout(site: Site) -> list[Dims]:
    """``(result, mask)``, both of the input's shape."""
    site.draws(when=site["p"] and site["train"] is not False)
    return [site.dims("input"), site.dims("input")]
