"""Constants and random numbers that take a shape from a tensor, and dropout."""

from __future__ import annotations

from lightning_autotp.rules.registry import Dims, Site, rule


@rule("aten.zeros_like.default", "aten.zero.default")
def zeros_like(site: Site) -> Dims:
    """Cut like the tensor whose shape it has; zeros add up to zeros."""
    site.linear_in("self")
    return site.dims("self")


@rule("aten.ones_like.default", "aten.full_like.default", "aten.empty_like.default", "aten.fill.Scalar")
def full_like(site: Site) -> Dims:
    """Cut like the tensor whose shape it has."""
    return site.dims("self")


@rule(*(f"aten.{name}.default" for name in ("new_zeros", "new_ones", "new_full", "new_empty")), sizes=["size"])
def new_full(site: Site) -> Dims:
    """Sizes of its own: cut as it is used. One that has the tensor's shape takes it from there, and is cut like it."""
    dims = site.dims("self")
    if tuple(dim.size for dim in dims) == site.shape:
        return dims
    return tuple(site.new(size) for size in site.shape)


@rule(
    "aten.rand_like.default", "aten.randn_like.default", "aten.exponential.default", "aten.uniform.default",
    "aten.bernoulli.default", "aten.bernoulli.p", "aten.multinomial.default",
)  # fmt: skip
def random(site: Site) -> list[Dims]:
    """Every rank must draw the same numbers, so all stays whole."""
    return site.give_up(f"{site.operator.name} draws random numbers for the whole tensor")


@rule("aten.dropout.default", "aten.feature_dropout.default", "aten.alpha_dropout.default")
def dropout(site: Site) -> Dims:
    """Without effect it is the identity; else every rank must draw the same mask, so its input stays whole."""
    name, _ = site.operator.arguments[0]  # the in-place form calls it by another name
    dims = site.dims(name)
    if site["p"] and site["train"]:
        site.keep_whole(*dims, because=f"dropout (p={site['p']}) draws one random mask for the whole tensor")
    else:
        site.linear_in(name)
    return dims
