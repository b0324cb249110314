"""Losses."""

from __future__ import annotations

from lightning_autotp.rules.registry import Dims, Site, rule


@rule("aten.cross_entropy_loss.default")
def cross_entropy(site: Site) -> Dims:
    """``self [n, c, ...]``, ``target [n, ...]``: over sharded classes it sums by itself.

    Targets that are probabilities (``[n, c, ...]``) need all classes.
    """
    dims, target = site.dims("self"), site.dims("target")
    classes = 1 if len(dims) > 1 else 0
    if len(target) == len(dims):
        site.keep_whole(dims[classes], because="a loss whose targets are probabilities needs all classes")
    else:
        site.contract(dims[classes])
        site.relation.reduces = True
    tokens = [dim for index, dim in enumerate(dims) if index != classes]
    out = tuple(site.new(size) for size in site.shape)
    site.keep_whole(*tokens, *target, *(site.tensor("weight") or ()), *out, because="the loss is over all tokens")
    return out
