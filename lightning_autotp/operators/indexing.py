"""Reading by index: look-ups, gathers, selections by tensors of indices.

The indexed dim stays whole, since an index may point anywhere in it; the index's own dims and all others pass.
"""

from __future__ import annotations

from lightning_autotp.layouts.dims import Dim
from lightning_autotp.operators.registry import Dims, Site, operator

_INDEXED = "an index may point anywhere in the dim"


@operator("aten.embedding.default")
def embedding(site: Site) -> Dims:
    """``weight [v, h]``, ``indices [...]`` -> ``[..., h]``: a rank looks up its rows, zeros for others: a sum."""
    weight = site.dims("weight")
    if site["scale_grad_by_freq"] or site["sparse"]:
        site.keep_whole(weight[0], because="an embedding with scale_grad_by_freq or sparse gradients needs all rows")
    else:
        site.contract(weight[0])
        site.relation.needs_implementation = True
    return (*site.dims("indices"), weight[1])


@operator("aten.embedding_bag.default", "aten.embedding_bag.padding_idx")
def embedding_bag(site: Site) -> list[Dims]:
    """``weight [v, h]`` -> ``[bags, h]``, the sums, means or largest of rows; and whole numbers about the bags.

    Those of the last are which rows are the largest, ``[bags, h]`` where that is asked for.
    """
    rows, features = site.dims("weight")
    site.keep_whole(rows, because=_INDEXED)
    bags, *others = site.shapes
    given = tuple(dim for name in ("indices", "offsets", "per_sample_weights") for dim in site.tensor(name) or ())
    numbers = [tuple(site.new(size) for size in shape) for shape in others]
    if site["mode"] == _LARGEST:
        numbers[-1] = (numbers[-1][0], features)
    made = site.new(bags[0])
    lengths = [dim for dims in numbers for dim in dims if dim is not features]
    site.keep_whole(*given, made, *lengths, because="bags are made of rows that follow one another")
    return [(made, features), *numbers]


_LARGEST = 2
"""The mode of bags in which the largest element is taken of each feature."""


def indexed(site: Site, dims: Dims) -> tuple[Dims, Dims] | None:
    """What ``self[indices]`` is made of: the index's (broadcast) dims and those of its result.

    The dims that are indexed stay whole. ``None`` if there is a mask: what it selects depends on its values.
    """
    several: list[Dims] = []
    places: list[int] = []
    at = 0
    for entry in site.indices("indices"):
        if entry is None:
            at += 1
            continue
        index, is_mask = entry
        if is_mask:
            return None
        several.append(index)
        places.append(at)
        site.keep_whole(dims[at], because=_INDEXED)
        at += 1
    found = site.broadcast(several)
    rest = [(position, dim) for position, dim in enumerate(dims) if position not in places]
    # Indices side by side give their dims where they stand, others give them in front.
    first = places[0] if places == list(range(places[0], places[0] + len(places))) else 0
    before = tuple(dim for position, dim in rest if position < first)
    return found, (*before, *found, *(dim for position, dim in rest if position >= first))


operator("aten.masked_select.default", takes="self")


@operator("aten.index.Tensor", "aten._unsafe_index.Tensor", takes="self")
def index_tensor(site: Site) -> Dims | list[Dims]:
    """``self[indices]`` with tensors of indices; linear in ``self``."""
    dims = site.dims("self")
    result = indexed(site, dims)
    if result is None:
        return _masked(site, dims)
    site.linear_in("self")
    return result[1]


def _masked(site: Site, dims: Dims) -> Dims | list[Dims]:
    """``self[..., mask]`` with one mask: the dims under it become one, as long as its values say."""
    entries = site.indices("indices")
    masks = [(at, entry[0]) for at, entry in enumerate(entries) if entry is not None]
    if len(masks) != 1:
        return site.give_up("how many elements a mask selects depends on its values")
    ((at, mask),) = masks
    site.keep_whole(*dims[at : at + len(mask)], *mask, because="how many elements a mask selects depends on its values")
    site.linear_in("self")
    return (*dims[:at], site.count(site.shape[at]), *dims[at + len(mask) :])


@operator("aten.nonzero.default")
def nonzero(site: Site) -> Dims:
    """``[found, dims]``: where all of it is not zero."""
    site.keep_whole(*site.dims("self"), because="where it is not zero depends on its values")
    return (site.count(site.shape[0]), site.new(site.shape[1]))


@operator("aten.where.default", "aten.nonzero_numpy.default")
def places(site: Site) -> list[Dims]:
    """As :func:`nonzero`, a tensor of indices ``[found]`` for each dim."""
    (argument, _), *_ = site.operator.arguments
    site.keep_whole(*site.dims(argument), because="where it is not zero depends on its values")
    found = site.count(site.shape[0])
    return [(found,) for _ in site.shapes]


@operator("aten.index_select.default")
def index_select(site: Site) -> Dims:
    """Some indices of a dim."""
    dims, index = site.dims("self"), site.dims("index")
    at = site.index("dim", len(dims))
    site.keep_whole(*dims[at : at + 1], because=_INDEXED)
    site.linear_in("self")
    chosen: Dim = index[0] if index else site.new(1)
    return (*dims[:at], chosen, *dims[at + 1 :]) if dims else ()


@operator("aten.gather.default")
def gather(site: Site) -> Dims:
    """Along one dim, by an index of the output's shape; other dims are indexed alike where the index is as long."""
    dims, index = site.dims("self"), site.dims("index")
    along(site, dims, index, site.index("dim", len(dims)))
    site.linear_in("self")
    return index


@operator("aten.take_along_dim.default")
def take_along_dim(site: Site) -> Dims | list[Dims]:
    """As :func:`gather`, with an index that is broadcast; without a dim it is one into all elements."""
    dims, index = site.dims("self"), site.dims("indices")
    if site["dim"] is None or len(dims) != len(index):
        return site.give_up("this index is into the flattened tensor")
    at = site.index("dim", len(dims))
    along(site, dims, index, at)
    site.linear_in("self")
    return tuple(b if p == at or a.size == 1 else a for p, (a, b) in enumerate(zip(dims, index, strict=True)))


def along(site: Site, dims: Dims, index: Dims, at: int) -> None:
    """Dims of a tensor and of an index into its dim ``at``: what is shorter in the index stays whole."""
    for position, (ours, theirs) in enumerate(zip(dims, index, strict=True)):
        if position == at:
            site.keep_whole(ours, because=_INDEXED)
        elif ours.size == theirs.size:
            site.tie(ours, theirs)
        else:
            site.keep_whole(ours, theirs, because="an index that is shorter than the dim")


@operator("aten.isin.Tensor_Tensor", "aten.bucketize.Tensor")
def among(site: Site) -> Dims:
    """Where each element is among those of another tensor, all of which are needed."""
    (name, _), (others, _), *_ = site.operator.arguments
    site.keep_whole(*(site.tensor(others) or ()), because="every element is compared with all of these")
    return site.dims(name)


@operator("aten.one_hot.default")
def one_hot(site: Site) -> Dims:
    """A new dim over the classes, which stays whole."""
    classes = site.new(site.shape[-1])
    site.keep_whole(classes)
    return (*site.dims("self"), classes)
