"""Look-ups."""

from __future__ import annotations

from lightning_autotp.rules.registry import Dims, Site, rule


@rule("aten.embedding.default")
def embedding(site: Site) -> Dims:
    """``weight [v, h]``, ``indices [...]`` -> ``[..., h]``: a rank looks up its rows, zeros for others: a sum."""
    weight = site.dims("weight")
    if site.operator.layer != "embedding":
        site.keep_whole(weight[0], because="only an embedding layer can look up a part of the rows")
    elif site["scale_grad_by_freq"] or site["sparse"]:
        site.keep_whole(weight[0], because="an embedding with scale_grad_by_freq or sparse gradients needs all rows")
    else:
        site.contract(weight[0])
    return (*site.dims("indices"), weight[1])
