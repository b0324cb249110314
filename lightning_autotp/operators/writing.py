"""Writing into a part of a tensor: the functional form of assignments such as ``x[:, 2:4] = y``.

The result is ``self`` with some elements taken from another tensor, so it is linear in both together.
"""

from __future__ import annotations

from lightning_autotp.operators.graph import KEPT
from lightning_autotp.operators.indexing import along, indexed
from lightning_autotp.operators.registry import Dims, Site, operator
from lightning_autotp.operators.views import sliced


@operator("aten.copy.default", lends="self", is_elementwise=True)
def copy(site: Site) -> Dims:
    """``src`` broadcast to the shape and cast to the dtype of ``self``, of which nothing else is left."""
    site.linear_in("src")
    return site.broadcast([site.dims("self"), site.dims("src")])


@operator("aten.slice_scatter.default", offsets=(("start", "self", "dim"), ("end", "self", "dim")))
def slice_scatter(site: Site) -> Dims:
    """``self`` with a range of a dim replaced; the range is cut like what is written there."""
    dims, src = site.dims("self"), site.dims("src")
    index = site.index("dim", len(dims))
    written = sliced(site, dims[index], src[index].size)
    for position, (ours, theirs) in enumerate(zip(dims, src, strict=True)):
        site.tie(written if position == index else ours, theirs)
    site.linear_in("self", "src")
    return dims


@operator("aten.select_scatter.default")
def select_scatter(site: Site) -> Dims:
    """``self`` with one index of a dim replaced; that dim stays whole."""
    dims, src = site.dims("self"), site.dims("src")
    index = site.index("dim", len(dims))
    site.keep_whole(dims[index], because="one index of a dim is written")
    for ours, theirs in zip((*dims[:index], *dims[index + 1 :]), src, strict=True):
        site.tie(ours, theirs)
    site.linear_in("self", "src")
    return dims


@operator("aten.index_put.default", "aten._unsafe_index_put.default")
def index_put(site: Site) -> Dims | list[Dims]:
    """``self[indices] = values`` (or ``+=``): the indices and the dims they point into stay whole."""
    dims, values = site.dims("self"), site.dims("values")
    result = indexed(site, dims)
    if result is None:
        return _masked_put(site, dims, values)
    found, written = result
    site.keep_whole(*found, because="every index must be written on every rank")
    site.broadcast([written, values])
    site.linear_in("self", "values")
    return dims


def _masked_put(site: Site, dims: Dims, values: Dims) -> Dims | list[Dims]:
    """``self[mask] = values`` with one mask, over the first dims."""
    entries = site.indices("indices")
    if len(entries) != 1 or entries[0] is None:
        return site.give_up("a mask among other indices")
    mask, _ = entries[0]
    for ours, theirs in zip(dims, mask, strict=False):
        site.tie(ours, theirs)
    rest = dims[len(mask) :]
    single = len(values) <= len(rest) or values[0].size == 1
    if not single:  # the values follow one another over the whole mask
        site.keep_whole(*mask, values[0], because="values for a mask are counted over all of it")
    site.broadcast([rest, values[len(values) - len(rest) :] if len(values) > len(rest) else values])
    site.linear_in("self", "values")
    return dims


@operator("aten.index_add.default", "aten.index_copy.default")
def index_add(site: Site) -> Dims | list[Dims]:
    """Slices of ``source`` put to, or added at, some indices of a dim, which stays whole."""
    dims, source = site.dims("self"), site.dims("source")
    if len(dims) != len(source) or not dims:
        return site.give_up("a scalar is written by index")
    at = site.index("dim", len(dims))
    site.keep_whole(dims[at], source[at], *site.dims("index"), because="every index must be written on every rank")
    for position, (ours, theirs) in enumerate(zip(dims, source, strict=True)):
        if position != at:
            site.tie(ours, theirs)
    site.linear_in("self", "source")
    return dims


@operator("aten.index_fill.int_Scalar")
def index_fill(site: Site) -> Dims:
    """Some indices of a dim, which stays whole, are filled with a number."""
    dims = site.dims("self")
    at = site.index("dim", len(dims))
    site.keep_whole(*dims[at : at + 1], *site.dims("index"), because="every index must be written on every rank")
    if not site["value"]:
        site.linear_in("self")
    return dims


@operator("aten.scatter.src", "aten.scatter.value", "aten.scatter_add.default", "aten.scatter_reduce.two")
def scatter(site: Site) -> Dims:
    """By an index along one dim, which stays whole; the other dims are indexed alike where the index is as long."""
    dims, index = site.dims("self"), site.dims("index")
    at = site.index("dim", len(dims))
    along(site, dims, index, at)
    site.keep_whole(*index[at : at + 1])
    src = site.tensor("src") if "src" in dict(site.operator.arguments) else None
    if src is None:
        if not site["value"]:
            site.linear_in("self")
        return dims
    along(site, src, index, at)
    if dict(site.operator.arguments).get("reduce", "sum") in ("sum", "mean"):
        site.linear_in("self", "src")
    return dims


@operator(KEPT)
def kept(site: Site) -> list[Dims]:
    """Nothing is made. A buffer is whole on every rank; another attribute may be a part, but not a part of a sum."""
    return site.give_up("it becomes a buffer, which every rank holds whole") if site["is_buffer"] else []
