"""Matrix products: ``"...k,nk->...n"`` and its kin; the shared index is contracted."""

from __future__ import annotations

from lightning_autotp.graph import Ref
from lightning_autotp.rules.registry import ONE, Dims, Site, rule


@rule("aten.linear.default")
def linear(site: Site) -> Dims | list[Dims]:
    """``input [..., k]``, ``weight [n, k]``, ``bias [n]`` -> ``[..., n]``; the bias comes after the sum over k."""
    x, weight, bias = site.dims("input"), site.dims("weight"), site.tensor("bias")
    if len(weight) != 2:
        return site.give_up("a product with a vector")
    site.contract(site.tie(x[-1], weight[1]), weight[1])
    if bias is not None:
        site.tie(weight[0], bias[0])
        site.relation.added_last.add(site["bias"].tensor)
    else:
        site.linear_in("input")
    return (*x[:-1], weight[0])


@rule("aten.matmul.default", "aten.bmm.default")
def matmul(site: Site) -> Dims | list[Dims]:
    """``[..., m, k] @ [..., k, n] -> [..., m, n]`` with broadcast batch dims."""
    left, right = (
        site.relation.inputs[value.tensor] for _, value in site.operator.arguments[:2] if isinstance(value, Ref)
    )
    if len(left) < 2 or len(right) < 2:
        return site.give_up("a product with a vector")
    site.contract(site.tie(left[-1], right[-2]), right[-2])
    site.linear_in("self")
    return (*_batch(site, left[:-2], right[:-2]), left[-2], right[-1])


@rule("aten.addmm.default")
def addmm(site: Site) -> Dims | list[Dims]:
    """``self [n] + mat1 [m, k] @ mat2 [k, n] -> [m, n]``; ``self`` is added once, after the sum over k."""
    bias, left, right = site.dims("self"), site.dims("mat1"), site.dims("mat2")
    if len(bias) != 1:
        return site.give_up("addmm with a matrix to add")
    site.contract(site.tie(left[1], right[0]), right[0])
    site.tie(right[1], bias[0])
    site.relation.added_last.add(site["self"].tensor)
    return (left[0], right[1])


@rule("aten.baddbmm.default")
def baddbmm(site: Site) -> Dims:
    """``self [b, m, n] (broadcast) + batch1 [b, m, k] @ batch2 [b, k, n]``; ``self`` is added once."""
    add, left, right = site.dims("self"), site.dims("batch1"), site.dims("batch2")
    site.contract(site.tie(left[2], right[1]), right[1])
    out = (*_batch(site, left[:1], right[:1]), left[1], right[2])
    for dim, other in zip(reversed(out), reversed(add), strict=False):
        if other.size != 1:
            site.tie(dim, other)
    site.relation.added_last.add(site["self"].tensor)
    return out


def _batch(site: Site, left: Dims, right: Dims) -> Dims:
    rank = max(len(left), len(right))
    left, right = (ONE,) * (rank - len(left)) + left, (ONE,) * (rank - len(right)) + right
    return tuple(b if a.size == 1 else a if b.size == 1 else site.tie(a, b) for a, b in zip(left, right, strict=True))
