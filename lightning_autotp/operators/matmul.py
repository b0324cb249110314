"""Matrix products: ``"...k,nk->...n"`` and its kin; the shared index is contracted."""

from __future__ import annotations

from lightning_autotp.layouts.dims import Dim
from lightning_autotp.operators.graph import Ref
from lightning_autotp.operators.registry import ONE, Dims, Site, rule


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


@rule("transformers.grouped_mm_fallback.default", "aten._grouped_mm.default")
def grouped(site: Site) -> Dims | list[Dims]:
    """``input [s, k]``, ``weight [e, k, n]``, ``offs [e]`` -> ``[s, n]``: one matrix for the rows up to each offset."""
    (name, _), (second, _) = site.operator.arguments[:2]
    rows, experts = site.dims(name), site.dims(second)
    bias = dict(site.operator.arguments).get("bias")
    if len(rows) != 2 or len(experts) != 3 or bias is not None:
        return site.give_up("a grouped product of other than rows and experts")
    _align(site, experts[1])
    _align(site, experts[2])
    site.contract(site.tie(rows[1], experts[1]), experts[1])
    site.keep_whole(rows[0], experts[0], *site.dims("offs"), because="the rows of all experts follow one another")
    site.linear_in(name)
    return (rows[0], experts[2])


def _align(site: Site, dim: Dim) -> None:
    """Cut a matrix's dim only where its kernel can: in rows of whole 16 bytes, 8 numbers of the smallest dtype."""
    parts = site.axes.split(dim, dim.size // 8) if dim.size % 8 == 0 else None
    if parts is not None:
        site.keep_whole(parts[1], because="a grouped product takes rows of whole 16 bytes")


@rule("aten.linalg_solve_triangular.default")
def solve_triangular(site: Site) -> Dims:
    """``self [..., n, n]``, ``B [..., n, k]`` (``[..., k, n]`` from the right) -> as ``B``, linear in it; k passes."""
    matrix, given = site.dims("self"), site.dims("B")
    site.keep_whole(
        *matrix[-2:], given[-2 if site["left"] else -1], because="a system of equations is solved as a whole"
    )
    batch = _batch(site, matrix[:-2], given[:-2])
    site.linear_in("B")
    return (*batch, *given[-2:])


@rule("aten.einsum.default")
def einsum(site: Site) -> Dims | list[Dims]:
    """By its equation: letters of the output pass, the others are contracted; linear in one operand."""
    operands = site.tensors("tensors")
    left, arrow, right = site["equation"].replace(" ", "").partition("->")
    terms = left.split(",")
    spare = [len(dims) - len(term.replace("...", "")) for term, dims in zip(terms, operands, strict=True)]
    labels = [_labels(term, count) for term, count in zip(terms, spare, strict=True)]
    if any(len(set(names)) < len(names) for names in labels):
        return site.give_up("an einsum along a diagonal")
    found: dict[str, Dim] = {}
    for names, dims in zip(labels, operands, strict=True):
        for label, dim in zip(names, dims, strict=True):
            known = found.get(label, ONE)
            found[label] = dim if known.size == 1 else known if dim.size == 1 else site.tie(known, dim)
    if arrow:
        out = _labels(right, max(spare))
    else:
        once = [label for label in found if len(label) == 1 and sum(names.count(label) for names in labels) == 1]
        out = [*_labels("..." if "..." in left else "", max(spare)), *sorted(once)]
    for names, dims in zip(labels, operands, strict=True):
        site.contract(*(dim for label, dim in zip(names, dims, strict=True) if label not in out))
    site.linear_in_one("tensors")
    return tuple(found[label] for label in out)


def _labels(term: str, spare: int) -> list[str]:
    """The labels of a term; the dims under an ellipsis are named by their place from its end."""
    before, dots, after = term.partition("...")
    return [*before, *(f"...{place}" for place in range(spare, 0, -1) if dots), *after]


def _batch(site: Site, left: Dims, right: Dims) -> Dims:
    rank = max(len(left), len(right))
    left, right = (ONE,) * (rank - len(left)) + left, (ONE,) * (rank - len(right)) + right
    return tuple(b if a.size == 1 else a if b.size == 1 else site.tie(a, b) for a, b in zip(left, right, strict=True))
