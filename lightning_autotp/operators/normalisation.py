"""Normalisations: what they average over stays whole."""

from __future__ import annotations

from lightning_autotp.operators.registry import Dims, Site, operator

_STATISTICS = ("running_mean", "running_var")


@operator("aten.layer_norm.default", "aten.rms_norm.default")
def layer_norm(site: Site) -> Dims:
    """The normalized dims stay whole; weight and bias are indexed by them."""
    dims = site.dims("input")
    normalized = dims[-len(site["normalized_shape"]) :]
    site.keep_whole(*normalized, because="a normalisation needs the whole dim")
    for name, _ in site.operator.arguments:
        if name in ("weight", "bias") and (parameter := site.tensor(name)) is not None:
            for left, right in zip(normalized, parameter, strict=True):
                site.tie(left, right)
    return dims


@operator("aten._weight_norm.default")
def weight_norm(site: Site) -> Dims:
    """``v [..., n, ...]`` with norms taken over all dims but the one that is named, and ``g [1, ..., n, ..., 1]``."""
    dims = site.dims("v")
    at = site["dim"] % len(dims)
    if len(site.dims("g")) == len(dims):
        site.tie(dims[at], site.dims("g")[at])
    else:
        site.keep_whole(dims[at], because="a norm needs the whole dim")
    site.keep_whole(*dims[:at], *dims[at + 1 :], because="a norm needs the whole dim")
    site.linear_in("g")
    return dims


def _per_channel(site: Site, channels: Dims, names: tuple[str, ...]) -> None:
    for name in names:
        if (found := site.tensor(name)) is not None:
            site.tie(channels[0], found[0])


@operator("aten.batch_norm.default", updates=_STATISTICS, updates_if="training")
def batch_norm(site: Site) -> Dims:
    """``input [n, c, ...]``, everything else ``[c]``: channels by themselves; in training all else is averaged over."""
    dims = site.dims("input")
    _per_channel(site, dims[1:2], ("weight", "bias", *_STATISTICS))
    if site["training"]:
        site.keep_whole(dims[0], *dims[2:], because="a batch's statistics need all of it")
    return dims


@operator("aten.instance_norm.default", updates=_STATISTICS, updates_if="use_input_stats")
def instance_norm(site: Site) -> Dims:
    """``input [n, c, ...]``, everything else ``[c]``: channels by themselves, positions stay whole."""
    dims = site.dims("input")
    _per_channel(site, dims[1:2], ("weight", "bias", *_STATISTICS))
    site.keep_whole(dims[0], *dims[2:], because="a normalisation needs all positions")
    return dims


@operator("aten.group_norm.default", shares=(("num_groups", "input", 1),))
def group_norm(site: Site) -> Dims | list[Dims]:
    """``input [n, (g c), ...]``, weight and bias ``[(g c)]``: whole groups are sharded, their number with them."""
    dims = site.dims("input")
    parts = site.axes.split(dims[1], site["num_groups"])
    if parts is None:
        return site.give_up("the groups of this normalisation divide a dim across its parts")
    _per_channel(site, dims[1:2], ("weight", "bias"))
    site.keep_whole(parts[1], *dims[2:], because="a normalisation needs the whole group")
    return dims
