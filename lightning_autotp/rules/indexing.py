"""Look-ups."""

from __future__ import annotations

from lightning_autotp.rules.registry import Dims, Site, rule


@rule("aten.embedding.default")
def embedding(site: Site) -> Dims:
    """``weight [v, h]``, ``indices [...]`` -> ``[..., h]``: a rank looks up its rows, zeros for others: a sum."""
    weight = site.dims("weight")
    if site.operator.layer == "embedding":
        site.contract(weight[0])
    else:
        site.keep_whole(weight[0], because="only an embedding layer can look up a part of the rows")
    return (*site.dims("indices"), weight[1])
