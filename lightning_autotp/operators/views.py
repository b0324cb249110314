"""Operators that only rearrange elements: index arithmetic on dims (split, merge, cut, join, repeat, move)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from lightning_autotp.layouts.dims import Dim, concat, product
from lightning_autotp.operators.registry import ONE, Dims, Shapes, Site, operator

_ACROSS = "a dim is cut across its parts"


def _regroup(site: Site, name: str) -> Dims:
    """The same elements under the output's shape; where dims do not divide so, these stay whole and the others pass."""
    dims, shape = site.dims(name), site.shape
    site.linear_in(name)
    result: list[Dim] = []
    for ours, theirs in _stretches([dim.size for dim in dims], shape):
        are_merged = len(shape[theirs]) == 1 and site.axes.are_blocks(dims[ours])
        part = None if are_merged else site.axes.regroup(dims[ours], shape[theirs])
        result += (
            _whole(site, dims[ours], shape[theirs], "this view divides a dim across its parts")
            if part is None
            else part
        )
    return tuple(result)


def _stretches(before: Sequence[int], after: Sequence[int]) -> Iterator[tuple[slice, slice]]:
    """The shortest stretches of two shapes with equal numbers of elements: each can be regrouped by itself."""
    if 0 in before:
        yield slice(0, len(before)), slice(0, len(after))
        return
    i = j = 0
    while i < len(before) or j < len(after):
        first, second, ours, theirs = i, j, 1, 1
        while (i, j) == (first, second) or ours != theirs:
            if i < len(before) and (ours <= theirs or j == len(after)):
                ours *= before[i]
                i += 1
            else:
                theirs *= after[j]
                j += 1
        yield slice(first, i), slice(second, j)


def _whole(site: Site, dims: Dims, sizes: Sequence[int], because: str) -> Dims:
    """New dims of these sizes in place of the old ones, all of which stay whole."""
    axes = site.axes
    if len(sizes) == 1:  # some of a sequence's positions are positions, too
        are_positions = axes.are_blocks(dims) or (len(dims) == 1 and axes.are_positions(dims[0]))
        fresh: Dims = (axes.new(sizes[0], positions=are_positions),)
    elif len(dims) == 1 and axes.are_positions(dims[0]):
        fresh = axes.divide_positions(sizes)
    else:
        fresh = tuple(site.new(size) for size in sizes)
    site.keep_whole(*dims, *fresh, because=because)
    return fresh


@operator("aten.view.default", "aten._unsafe_view.default", sizes=("size",), reshapes=True, is_view=True)
@operator("aten.reshape.default", sizes=("shape",), reshapes=True, is_view=True)
@operator("aten.flatten.using_ints", "aten.ravel.default", reshapes=True, is_view=True)
@operator("aten.unflatten.int", sizes=("sizes",), reshapes=True, is_view=True)
def view(site: Site) -> Dims:
    """Row-major regrouping: dims are merged into products and split into factors."""
    return _regroup(site, "self")


@operator("aten.unsqueeze.default", reshapes=True, is_view=True)
def unsqueeze(site: Site) -> Dims:
    """A new dim of size 1."""
    dims = site.dims("self")
    index = site.index("dim", len(dims) + 1)
    site.linear_in("self")
    return (*dims[:index], ONE, *dims[index:])


@operator("aten.view_as.default", "aten.reshape_as.default", reshapes=True, lends="other", is_view=True)
def view_as(site: Site) -> Dims:
    """A view whose sizes are another tensor's, which must be cut alike for its local shape to be the right one."""
    return tuple(site.tie(*pair) for pair in zip(_regroup(site, "self"), site.dims("other"), strict=True))


@operator("aten.squeeze.dim", "aten.squeeze.dims", "aten.squeeze.default", reshapes=True, is_view=True)
def squeeze(site: Site) -> Dims:
    """Dims of size 1 vanish. One that stays must stay on every rank, also where a part of it would have size 1."""
    dims = site.dims("self")
    named = dict(site.operator.arguments).get("dim", tuple(range(len(dims))))
    squeezed = (named if isinstance(named, tuple) else (named,)) if dims else ()
    site.keep_whole(*(dims[index] for index in squeezed), because="a squeezed dim's part could have size 1")
    return _regroup(site, "self")


@operator("aten.transpose.int", in_place="aten.transpose_.default", is_view=True)
@operator("aten.swapaxes.default", "aten.swapdims.default", "aten.mT.default", is_view=True)
def transpose(site: Site) -> Dims:
    """Two dims change places, the last two where none are named."""
    dims = list(site.dims("self"))
    first, second = [value for _, value in site.operator.arguments[1:]] or (-2, -1)
    if dims:
        dims[first], dims[second] = dims[second], dims[first]
    site.linear_in("self")
    return tuple(dims)


@operator("aten.permute.default", is_view=True)
def permute(site: Site) -> Dims:
    """The dims in another order."""
    dims = site.dims("self")
    site.linear_in("self")
    return tuple(dims[index % len(dims)] for index in site["dims"])


@operator("aten.movedim.int", "aten.movedim.intlist", is_view=True)
def movedim(site: Site) -> Dims:
    """Some dims at other places, the rest in order."""
    dims = site.dims("self")
    sources, targets = (
        [index % max(len(dims), 1) for index in (value if isinstance(value, tuple) else (value,))]
        for value in (site["source"], site["destination"])
    )
    moved = dict(zip(targets, sources, strict=True))
    rest = iter([index for index in range(len(dims)) if index not in sources])
    site.linear_in("self")
    return tuple(dims[moved[place] if place in moved else next(rest)] for place in range(len(dims)))


@operator("aten.t.default", "aten.numpy_T.default", is_view=True)
def reverse_dims(site: Site) -> Dims:
    """The dims in reverse order (a matrix transposed)."""
    site.linear_in("self")
    return tuple(reversed(site.dims("self")))


def _is_expanded(shapes: Shapes, dim: int) -> bool:
    """Whether a dim of the result is one that the input does not have, or has with size 1."""
    source, *_ = shapes.inputs
    place = dim - (len(shapes.out) - len(source))
    return place < 0 or source[place] == 1


@operator("aten.expand_as.default", reshapes=True, uniform=_is_expanded, lends="other", is_view=True)
def expand_as(site: Site) -> Dims:
    """Like expand, but what is expanded is indexed like the other tensor, which must be cut alike."""
    dims, other = site.dims("self"), site.dims("other")
    padded = (ONE,) * (len(other) - len(dims)) + dims
    site.linear_in("self")
    pairs = zip(padded, other, strict=True)
    return tuple(site.tie(theirs, ours) if ours.size != 1 else theirs for ours, theirs in pairs)


@operator(
    "aten.expand.default",
    "aten.broadcast_to.default",
    sizes=("size",),
    reshapes=True,
    uniform=_is_expanded,
    is_view=True,
)
def expand(site: Site) -> Dims:
    """Dims of size 1, or none, become new dims whose indices all hold the same element."""
    dims = site.dims("self")
    padded = (ONE,) * (len(site.shape) - len(dims)) + dims
    site.linear_in("self")
    return tuple(dim if dim.size == size else site.new(size) for dim, size in zip(padded, site.shape, strict=True))


@operator("aten.repeat_interleave.self_int", sizes=("repeats", "output_size"), reshapes=True)
def repeat_interleave(site: Site) -> Dims | list[Dims]:
    """Every index followed by its copies: the dim is the outer factor, the copies the inner one."""
    dims = list(site.dims("self"))
    if site["dim"] is None:
        return site.give_up("repeat_interleave without a dim flattens its input")
    index = site.index("dim", len(dims))
    dims[index] = product([dims[index], site.new(site["repeats"])])
    site.linear_in("self")
    return tuple(dims)


@operator("aten.repeat.default", sizes=("repeats",), reshapes=True)
def repeat(site: Site) -> Dims:
    """The whole dim again and again: the copies are the outer factor."""
    dims = site.dims("self")
    repeats = site["repeats"]
    padded = (ONE,) * (len(repeats) - len(dims)) + dims
    site.linear_in("self")
    return tuple(product([site.new(count), dim]) for count, dim in zip(repeats, padded, strict=True))


@operator(
    "aten.slice.Tensor",
    offsets=(("start", "self", "dim"), ("end", "self", "dim")),
    scatter="aten.slice_scatter.default",
    is_view=True,
)
def slice_(site: Site) -> Dims:
    """A contiguous range of a dim cuts it into sections; with a step over all of it, it is a factor of the dim."""
    dims = list(site.dims("self"))
    index = site.index("dim", len(dims))
    site.linear_in("self")
    dims[index] = sliced(site, dims[index], site.shape[index])
    return tuple(dims)


def sliced(site: Site, dim: Dim, length: int) -> Dim:
    """The part of a dim that ``start``, ``end`` and ``step`` select, of known length."""
    start, stop, step = slice(site["start"], site["end"], site["step"]).indices(dim.size)
    if step == 1:
        sections = _sections(site, dim, [start, max(start, stop) - start, dim.size - max(start, stop)])
        return sections[1] if sections else _whole(site, (dim,), [length], _ACROSS)[0]
    # Every step-th index of the whole dim: the outer factor of (outer, step), at one inner index.
    if length * step == dim.size and start < step and (site["start"] or 0) >= 0:
        parts = site.axes.split(dim, length)
        if parts is not None:
            site.keep_whole(parts[1], because="a slice with a step needs whole steps")
            return parts[0]
    return _whole(site, (dim,), [length], "a slice with a step")[0]


@operator("aten.narrow.default", sizes=("length",), offsets=(("start", "self", "dim"),), is_view=True)
def narrow(site: Site) -> Dims:
    """A contiguous range of a dim, by its start and length."""
    dims = list(site.dims("self"))
    index, length = site.index("dim", len(dims)), site["length"]
    start = site["start"] + (dims[index].size if site["start"] < 0 else 0)
    sections = _sections(site, dims[index], [start, length, dims[index].size - start - length])
    site.linear_in("self")
    dims[index] = sections[1] if sections else _whole(site, (dims[index],), [length], _ACROSS)[0]
    return tuple(dims)


def _sections(site: Site, dim: Dim, sizes: list[int]) -> list[Dim] | None:
    """Cut a dim into sections of the given sizes (0 allowed); ``None`` if its structure does not allow it."""
    parts: list[Dim] = []
    for size in sizes[:-1]:
        if size in (0, dim.size):
            parts.append(concat([]) if size == 0 else dim)
            dim = dim if size == 0 else concat([])
            continue
        halves = site.axes.cut(dim, size)
        if halves is None:
            return None
        parts.append(halves[0])
        dim = halves[1]
    return [*parts, dim]


def _split(site: Site, *, evenly: bool) -> list[Dims]:
    dims = list(site.dims("self"))
    index = site.index("dim", len(dims))
    lengths = [shape[index] for shape in site.shapes]
    site.linear_in("self")
    sections = None if evenly and len(set(lengths)) > 1 else _sections(site, dims[index], lengths)
    if sections is None:
        sections = list(_whole(site, (dims[index],), lengths, _ACROSS))
    for other in sections[1:] if evenly and len(set(lengths)) == 1 else ():
        site.tie(sections[0], other)
    return [(*dims[:index], section, *dims[index + 1 :]) for section in sections]


@operator("aten.split_with_sizes.default", sizes=("split_sizes",), is_view=True)
@operator("aten.split.sizes", sizes=("split_size",), is_view=True)
def split(site: Site) -> list[Dims]:
    """One dim cut into sections."""
    return _split(site, evenly=False)


@operator("aten.split.Tensor", sizes=("split_size",), is_view=True)
@operator("aten.chunk.default", is_view=True)
def split_evenly(site: Site) -> list[Dims]:
    """One dim cut into sections of one size, which must be cut alike to stay of one size."""
    return _split(site, evenly=True)


@operator("aten.cat.default", "aten.concat.default", "aten.concatenate.default")
def cat(site: Site) -> Dims:
    """Dims joined into sections; the other dims are indexed alike. An empty vector (a new cache) is left out."""
    given = site.tensors("tensors")
    parts = [dims for dims in given if [dim.size for dim in dims] != [0]] or given
    index = site.index("dim", len(parts[0]))
    for other in parts[1:]:
        for position, dim in enumerate(other):
            if position != index:
                site.tie(parts[0][position], dim)
    site.linear_in("tensors")
    return (*parts[0][:index], concat([dims[index] for dims in parts]), *parts[0][index + 1 :])


@operator("aten.broadcast_tensors.default", is_view=True)
def broadcast_tensors(site: Site) -> list[Dims]:
    """Every tensor with the dims that all of them have together."""
    dims = site.broadcast(site.tensors("tensors"))
    site.linear_in("tensors")
    return [dims] * len(site.shapes)


@operator("aten.stack.default")
def stack(site: Site) -> Dims:
    """A new dim over the tensors; it stays whole."""
    parts = site.tensors("tensors")
    for other in parts[1:]:
        for left, right in zip(parts[0], other, strict=True):
            site.tie(left, right)
    index = site.index("dim", len(site.shape))
    fresh = site.new(len(parts))
    site.keep_whole(fresh, because="a new dim over several tensors")
    site.linear_in("tensors")
    return (*parts[0][:index], fresh, *parts[0][index:])


@operator("aten.select.int", scatter="aten.select_scatter.default", is_view=True)
def select(site: Site) -> Dims:
    """One index of a dim that stays whole."""
    dims = site.dims("self")
    index = site.index("dim", len(dims))
    site.keep_whole(dims[index], because="one index of a dim is selected")
    site.linear_in("self")
    return (*dims[:index], *dims[index + 1 :])


@operator("aten.unbind.int", is_view=True)
def unbind(site: Site) -> list[Dims]:
    """Every index of a dim that stays whole."""
    dims = site.dims("self")
    index = site.index("dim", len(dims))
    site.keep_whole(dims[index], because="a dim is taken apart index by index")
    site.linear_in("self")
    return [(*dims[:index], *dims[index + 1 :])] * len(site.shapes)


@operator("aten.glu.default")
def glu(site: Site) -> Dims:
    """One half times the sigmoid of the other; both halves are cut alike."""
    dims = list(site.dims("self"))
    index = site.index("dim", len(dims))
    halves = site.axes.cut(dims[index], dims[index].size // 2)
    dims[index] = site.tie(*halves) if halves else _whole(site, (dims[index],), [site.shape[index]], _ACROSS)[0]
    return tuple(dims)


@operator("aten.rot90.default")
def rot90(site: Site) -> Dims:
    """Two dims change places and are turned back, and stay whole."""
    dims = list(site.dims("self"))
    first, second = site["dims"]
    site.keep_whole(dims[first], dims[second], because="a dim is turned back")
    if site["k"] % 2:
        dims[first], dims[second] = dims[second], dims[first]
    site.linear_in("self")
    return tuple(dims)


@operator("aten.diagonal.default", is_view=True)
def diagonal(site: Site) -> Dims:
    """Two dims become one, the last: ``[..., n, m]`` -> ``[..., k]``."""
    dims = site.dims("self")
    taken = {site.index(name, len(dims)) for name in ("dim1", "dim2")}
    return _diagonal(site, [dims[at] for at in taken], [dim for at, dim in enumerate(dims) if at not in taken], [-1])


@operator("aten.diag_embed.default")
def diag_embed(site: Site) -> Dims:
    """The last dim becomes two, which may stand anywhere: ``[..., k]`` -> ``[..., n, n]``."""
    *rest, last = site.dims("self")
    return _diagonal(site, [last], rest, [site["dim1"], site["dim2"]])


def _diagonal(site: Site, taken: Sequence[Dim], rest: Sequence[Dim], places: Sequence[int]) -> Dims:
    """The rest with new dims at these places; these and those that are taken stay whole."""
    new = {place % len(site.shape): site.new(site.shape[place]) for place in places}
    site.keep_whole(*taken, *new.values(), because="a diagonal is counted along both dims")
    site.linear_in("self")
    others = iter(rest)
    return tuple(new[place] if place in new else next(others) for place in range(len(site.shape)))


@operator("aten.pad.default", "aten.constant_pad_nd.default")
def pad(site: Site) -> Dims:
    """Padding with a constant is a section of its own, before and after; any other kind needs the whole dim."""
    dims = list(site.dims("self"))
    is_constant = dict(site.operator.arguments).get("mode", "constant") == "constant"
    for position, (before, after) in enumerate(zip(site["pad"][::2], site["pad"][1::2], strict=True), start=1):
        if not before and not after:
            continue
        dim = dims[-position]
        kept = _sections(site, dim, [max(-before, 0), dim.size + min(before, 0) + min(after, 0), max(-after, 0)])
        if is_constant and kept is not None:
            ends = site.new(max(before, 0)), site.new(max(after, 0))
            site.keep_whole(*ends, because="padding stands at the ends of the whole dim")
            dims[-position] = concat([ends[0], kept[1], ends[1]])
        else:
            dims[-position] = site.new(site.shape[-position])
            site.keep_whole(dim, dims[-position], because="this dim is padded with its own elements")
    if not is_constant or not site["value"]:
        site.linear_in("self")
    return tuple(dims)


@operator("aten.view_as_complex.default", is_view=True)
def view_as_complex(site: Site) -> Dims:
    """``[..., 2]`` -> ``[...]``."""
    *dims, parts = site.dims("self")
    site.keep_whole(parts, because="real and imaginary parts")
    site.linear_in("self")
    return tuple(dims)


@operator("aten.view_as_real.default", is_view=True)
def view_as_real(site: Site) -> Dims:
    """``[...]`` -> ``[..., 2]``."""
    parts = site.new(2)
    site.keep_whole(parts, because="real and imaginary parts")
    site.linear_in("self")
    return (*site.dims("self"), parts)
