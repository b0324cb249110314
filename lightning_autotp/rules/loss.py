"""Losses."""

from __future__ import annotations

from lightning_autotp.rules.registry import Dims, Site, rule


@rule("aten.cross_entropy_loss.default")
def cross_entropy(site: Site) -> Dims:
    """``self [n, c, ...]``, ``target [n, ...]``: over sharded classes it sums by itself."""
    dims = site.dims("self")
    classes = 1 if len(dims) > 1 else 0
    site.contract(dims[classes])
    site.keep_whole(*(dim for index, dim in enumerate(dims) if index != classes), because="the loss is over all tokens")
    site.relation.reduces = True
    return tuple(site.new(size) for size in site.shape)
