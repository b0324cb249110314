"""Matrix products: ``"...k,nk->...n"`` and its kin; the shared index is contracted."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any

from lightning_autotp.layouts.dims import Dim
from lightning_autotp.operators.equations import Equation, equation, fitting
from lightning_autotp.operators.graph import Ref
from lightning_autotp.operators.registry import ONE, Dims, Shape, Shapes, Site, operator


def _contract(site: Site, product: Equation, operands: Sequence[Dims]) -> Dims:
    """Tie the dims of one label, where they are not broadcast; those that the result does not have are summed over."""
    found: dict[str, Dim] = {}
    for labels, dims in zip(product.terms, operands, strict=True):
        for label, dim in zip(labels, dims, strict=True):
            known = found.get(label, ONE)
            found[label] = dim if known.size == 1 else known if dim.size == 1 else site.tie(known, dim)
    for labels, dims in zip(product.terms, operands, strict=True):
        site.contract(*(dim for label, dim in zip(labels, dims, strict=True) if label not in product.out))
    return tuple(found[label] for label in product.out)


def product(*by: str, added: str = "", path: Sequence[int] = ()) -> dict[str, Any]:
    """Rule and FLOPs of a product of an operator's tensors, linear in the first, for its record.

    Args:
        by: equations, of which the first that fits the operands' numbers of dims holds.
        added: an argument that may be added to the product, after the sum.
        path: in which order they are multiplied, as in :meth:`Equation.flops`.
    """

    def flops(shapes: Shapes) -> float:
        operands = [shape for name, shape in shapes.named() if name != added]
        return fitting(by, tuple(map(len, operands))).flops(operands, path)

    def rule(site: Site) -> Dims:
        operands = [name for name, value in site.operator.arguments if isinstance(value, Ref) and name != added]
        dims = [site.dims(name) for name in operands]
        out = _contract(site, fitting(by, tuple(map(len, dims))), dims)
        addend = site.tensor(added) if added else None
        if addend is None:
            site.linear_in(operands[0])
        else:
            site.broadcast([out, addend])
            site.relation.added_after_sum.add(site[added].tensor)
        return out

    return {"rule": rule, "flops": flops}


operator("aten.linear.default", **product("...k,nk->...n", "...k,k->...", added="bias"))
operator("aten.matmul.default", **product("...mk,...kn->...mn", "k,k->", "...mk,k->...m", "k,...kn->...n"))
operator("aten.mm.default", **product("mk,kn->mn"))
operator("aten.bmm.default", **product("bmk,bkn->bmn"))
operator("aten.mv.default", **product("mk,k->m"))
operator("aten.dot.default", "aten.vdot.default", **product("k,k->"))
operator("aten.outer.default", **product("m,n->mn"))
operator("aten.addmm.default", **product("mk,kn->mn", added="self"))
operator("aten.addmv.default", **product("mk,k->m", added="self"))
operator("aten.baddbmm.default", **product("bmk,bkn->bmn", added="self"))
operator("aten.addbmm.default", **product("bmk,bkn->mn", added="self"))
operator("aten.bilinear.default", **product("...i,...j,oij->...o", added="bias", path=(0, 2, 0, 1)))


def _einsum_flops(shapes: Shapes) -> float:
    operands = shapes.each("tensors")
    by = equation(shapes.literal("equation"), *(len(shape) for shape in operands))
    return by.flops(operands, shapes.literal("path") or ())


@operator("aten.einsum.default", flops=_einsum_flops)
def einsum(site: Site) -> Dims | list[Dims]:
    """By its equation: letters of the output pass, the others are contracted; linear in one operand."""
    operands = site.tensors("tensors")
    by = equation(site["equation"], *map(len, operands))
    if any(len(set(labels)) < len(labels) for labels in by.terms):
        return site.give_up("an einsum along a diagonal")
    site.linear_in_one("tensors")
    return _contract(site, by, operands)


def _grouped_results(shapes: Shapes) -> list[tuple[Shape, str]]:
    """Rows or columns of several matrices may follow one another in one; each row then meets one of them."""
    left, right, *_ = shapes.inputs
    if len(left) == 3:
        return [((left[0], left[1], right[2]) if len(right) == 3 else (left[1], right[1]), "")]
    return [((left[0], right[2]) if len(right) == 3 else (shapes["offs"][0], left[0], right[1]), "")]


def _grouped_flops(shapes: Shapes) -> float:
    left, right, *_ = shapes.inputs
    return 2 * prod(left[-2:]) * right[-1] * (left[0] if len(left) == len(right) == 3 else 1)


@operator("transformers.grouped_mm_fallback.default", flops=_grouped_flops)
@operator("aten._grouped_mm.default", flops=_grouped_flops, results=_grouped_results)
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


def _solve_flops(shapes: Shapes) -> float:
    """Substitution: each of n unknowns takes a product and a difference for each one before it, and a quotient."""
    return prod(shapes.out) * shapes["self"][-1]


@operator("aten.linalg_solve_triangular.default", flops=_solve_flops)
def solve_triangular(site: Site) -> Dims:
    """``self [..., n, n]``, ``B [..., n, k]`` (``[..., k, n]`` from the right) -> as ``B``, linear in it; k passes."""
    matrix, given = site.dims("self"), site.dims("B")
    site.keep_whole(
        *matrix[-2:], given[-2 if site["left"] else -1], because="a system of equations is solved as a whole"
    )
    batch = site.broadcast([matrix[:-2], given[:-2]])
    site.linear_in("B")
    return (*batch, *given[-2:])
