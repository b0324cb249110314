"""Reductions, softmaxes and normalisations."""

from __future__ import annotations

from lightning_autotp.rules.registry import ONE, Dims, Site, rule


def _reduced(site: Site, ndim: int) -> set[int]:
    names = dict(site.operator.arguments)
    dim = names.get("dim")
    if dim is None or dim == () or ndim == 0:
        return set(range(ndim))
    return {index % ndim for index in (dim if isinstance(dim, tuple) else (dim,))}


def _without(dims: Dims, reduced: set[int], keepdim: bool) -> Dims:
    return tuple(ONE if index in reduced else dim for index, dim in enumerate(dims) if keepdim or index not in reduced)


@rule("aten.sum.default", "aten.sum.dim_IntList")
def sum_(site: Site) -> Dims:
    """A sum over a sharded dim is Partial."""
    dims = site.dims("self")
    reduced = _reduced(site, len(dims))
    site.contract(*(dims[index] for index in reduced))
    site.linear_in("self")
    return _without(dims, reduced, bool(dict(site.operator.arguments).get("keepdim")))


@rule("aten.mean.default", "aten.mean.dim")
def mean(site: Site) -> Dims:
    """A mean divides by the dim's length, so the dim stays whole; a Partial passes."""
    dims = site.dims("self")
    reduced = _reduced(site, len(dims))
    site.keep_whole(*(dims[index] for index in reduced), because="a mean over the dim needs all of it")
    site.linear_in("self")
    return _without(dims, reduced, bool(dict(site.operator.arguments).get("keepdim")))


@rule(
    *(f"aten.{name}.{overload}" for name in ("max", "min") for overload in ("default", "dim")),
    *(f"aten.{name}.{overload}" for name in ("any", "all") for overload in ("default", "dim", "dims")),
    *(f"aten.{name}.{overload}" for name in ("var", "std") for overload in ("dim", "correction")),
    "aten.amax.default", "aten.amin.default", "aten.argmax.default", "aten.argmin.default", "aten.logsumexp.default",
    "aten.linalg_vector_norm.default", "aten.norm.ScalarOpt_dim", "aten.prod.dim_int",
)  # fmt: skip
def whole_reduction(site: Site) -> list[Dims]:
    """Reductions that are not linear keep the dim whole."""
    dims = site.dims("self")
    reduced = _reduced(site, len(dims))
    site.keep_whole(*(dims[index] for index in reduced), because="a reduction that is not a sum needs the whole dim")
    return [_without(dims, reduced, bool(dict(site.operator.arguments).get("keepdim")))] * len(site.shapes)


@rule(
    "aten.softmax.int", "aten._softmax.default", "aten.log_softmax.int", "aten.cumsum.default", "aten.flip.default",
    "aten.sort.default", "aten.topk.default",
)  # fmt: skip
def along_dim(site: Site) -> Dims | list[Dims]:
    """Operators that need a whole dim and leave the others alone."""
    dims = site.dims("self")
    names = dict(site.operator.arguments)
    for index in (names["dims"] if "dims" in names else (names["dim"],)) if dims else ():
        site.keep_whole(dims[index], because=f"{site.operator.name} needs the whole dim")
    if len(site.shapes) == 1:
        return dims
    outputs = [
        tuple(d if d.size == s else site.new(s) for d, s in zip(dims, shape, strict=True)) for shape in site.shapes
    ]
    site.keep_whole(*(dim for out in outputs for dim, old in zip(out, dims, strict=True) if dim is not old))
    return outputs


@rule("aten.roll.default")
def roll(site: Site) -> Dims:
    """Dims that are rolled stay whole; where none is named, all of them: the elements are rolled in row-major order."""
    dims = site.dims("self")
    site.keep_whole(*([dims[index] for index in site["dims"]] or dims), because="this dim is rolled")
    return dims


@rule("aten.tril.default", "aten.triu.default")
def triangle(site: Site) -> Dims:
    """The two dims of every matrix stay whole."""
    dims = site.dims("self")
    site.keep_whole(*dims[-2:], because="a triangle of a matrix needs the whole matrix")
    return dims


@rule("aten.layer_norm.default", "aten.rms_norm.default")
def normalisation(site: Site) -> Dims:
    """The normalized dims stay whole; weight and bias are indexed by them."""
    dims = site.dims("input")
    normalized = dims[-len(site["normalized_shape"]) :]
    site.keep_whole(*normalized, because="a normalisation needs the whole dim")
    for name, _ in site.operator.arguments:
        if name in ("weight", "bias") and (parameter := site.tensor(name)) is not None:
            for left, right in zip(normalized, parameter, strict=True):
                site.tie(left, right)
    return dims
