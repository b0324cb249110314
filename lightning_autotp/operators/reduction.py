"""Reductions, and operators along a dim that needs to be whole."""

from __future__ import annotations

from collections.abc import Sequence

from lightning_autotp.operators.registry import ONE, Dims, Site, operator


def _reduced(site: Site, ndim: int) -> set[int]:
    names = dict(site.operator.arguments)
    dim = names.get("dim")
    if dim is None or dim == () or ndim == 0:
        return set(range(ndim))
    return {index % ndim for index in (dim if isinstance(dim, tuple) else (dim,))}


def _without(dims: Dims, reduced: set[int], keepdim: bool) -> Dims:
    return tuple(ONE if index in reduced else dim for index, dim in enumerate(dims) if keepdim or index not in reduced)


@operator("aten.sum.default", "aten.sum.dim_IntList")
def sum_(site: Site) -> Dims:
    """A sum over a sharded dim is Partial."""
    dims = site.dims("self")
    reduced = _reduced(site, len(dims))
    site.contract(*(dims[index] for index in reduced))
    site.linear_in("self")
    return _without(dims, reduced, bool(dict(site.operator.arguments).get("keepdim")))


@operator("aten.mean.default", "aten.mean.dim")
def mean(site: Site) -> Dims:
    """A mean divides by the dim's length, which only an implementation knows on a rank; a Partial passes."""
    dims = site.dims("self")
    reduced = _reduced(site, len(dims))
    if dict(site.operator.arguments).get("dtype") is None:
        site.contract(*(dims[index] for index in reduced))
        site.relation.needs_implementation = True
    else:
        site.keep_whole(*(dims[index] for index in reduced), because="a mean in another dtype needs the whole dim")
    site.linear_in("self")
    return _without(dims, reduced, bool(dict(site.operator.arguments).get("keepdim")))


@operator(
    *(f"aten.{name}.{overload}" for name in ("max", "min") for overload in ("default", "dim")),
    *(f"aten.{name}.{overload}" for name in ("any", "all") for overload in ("default", "dim", "dims")),
    *(f"aten.{name}.{overload}" for name in ("var", "std") for overload in ("dim", "correction")),
    "aten.amax.default", "aten.amin.default", "aten.argmax.default", "aten.argmin.default", "aten.logsumexp.default",
    "aten.linalg_vector_norm.default", "aten.linalg_norm.default", "aten.prod.dim_int", "aten.prod.default",
    *(f"aten.norm.{overload}" for overload in ("Scalar", "ScalarOpt_dim", "ScalarOpt_dtype", "ScalarOpt_dim_dtype")),
    *(f"aten.{name}.{overload}" for name in ("median", "nanmedian") for overload in ("default", "dim")),
    "aten.nansum.default", "aten.count_nonzero.default", "aten.count_nonzero.dim_IntList", "aten.aminmax.default",
    "aten.var_mean.correction", "aten.std_mean.correction", "aten.kthvalue.default", "aten.mode.default",
)  # fmt: skip
def whole_reduction(site: Site) -> list[Dims]:
    """Reductions that are not linear keep the dim whole."""
    dims = site.dims("self")
    reduced = _reduced(site, len(dims))
    site.keep_whole(*(dims[index] for index in reduced), because="a reduction that is not a sum needs the whole dim")
    return [_without(dims, reduced, bool(dict(site.operator.arguments).get("keepdim")))] * len(site.shapes)


@operator(
    "aten.softmax.int", "aten._softmax.default", "aten.log_softmax.int", "aten.sort.default", "aten.sort.stable",
    "aten.argsort.default", "aten.argsort.stable", "aten.topk.default", "aten.cumprod.default",
    "aten.logcumsumexp.default", "aten.cummax.default", "aten.cummin.default",
)  # fmt: skip
def along_dim(site: Site) -> list[Dims]:
    """Operators that need one dim or several whole and leave the others alone.

    Where a list names none they need all: ``roll`` then moves elements in row-major order.
    """
    names = dict(site.operator.arguments)
    named = names.get("dims", names.get("dim"))
    along = named if isinstance(named, tuple) else (named,) if named is not None else ()
    return _along(site, along or range(len(site.dims("self"))))


@operator("aten.cumsum.default", "aten.roll.default", *(f"aten.fft_{name}.default" for name in (
    "fft", "ifft", "fftn", "ifftn", "fft2", "ifft2", "rfft", "irfft", "rfft2", "irfft2", "rfftn", "irfftn",
)))  # fmt: skip
def linear_along_dim(site: Site) -> list[Dims]:
    """As :func:`along_dim`, and linear."""
    site.linear_in("self")
    return along_dim(site)


@operator("aten.flip.default")
def flip(site: Site) -> list[Dims]:
    """Some dims backwards, perhaps none."""
    site.linear_in("self")
    return _along(site, site["dims"])


def _along(site: Site, along: Sequence[int]) -> list[Dims]:
    dims = site.dims("self")
    whole = {index % len(dims) for index in along} if dims else set()
    site.keep_whole(*(dims[index] for index in whole))
    outputs = [
        tuple(d if d.size == s else site.new(s) for d, s in zip(dims, shape, strict=True)) for shape in site.shapes
    ]
    site.keep_whole(*(dim for out in outputs for dim, old in zip(out, dims, strict=True) if dim is not old))
    return outputs


@operator("aten.linalg_cross.default")
def cross(site: Site) -> Dims:
    """Vectors of three elements along a dim; linear in each."""
    dims = site.broadcast([site.dims("self"), site.dims("other")])
    for vectors in (site.dims("self"), site.dims("other"), dims):
        site.keep_whole(vectors[site["dim"]])
    site.linear_in("self")
    return dims


@operator("aten.renorm.default")
def renorm(site: Site) -> Dims:
    """Each index of a dim has a norm over all others of at most so much."""
    dims = site.dims("self")
    at = site.index("dim", len(dims))
    site.keep_whole(*dims[:at], *dims[at + 1 :], because="a norm needs the whole dim")
    return dims


@operator("aten.histc.default", "aten.bincount.default")
def count(site: Site) -> list[Dims]:
    """Counts of values over all elements."""
    return site.give_up("a histogram counts over the whole tensor")


@operator("aten.tril.default", "aten.triu.default")
def triangle(site: Site) -> Dims:
    """The two dims of every matrix stay whole."""
    dims = site.dims("self")
    site.keep_whole(*dims[-2:], because="a triangle of a matrix needs the whole matrix")
    site.linear_in("self")
    return dims
