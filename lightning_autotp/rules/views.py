"""Operators that only rearrange elements: index arithmetic on dims (split, merge, cut, join, repeat, move)."""

from __future__ import annotations

from lightning_autotp.axes import concat, product
from lightning_autotp.rules.registry import ONE, Dims, Site, rule


def _regroup(site: Site, name: str) -> Dims | list[Dims]:
    dims = site.dims(name)
    result = site.axes.regroup(dims, site.shape)
    if result is None:
        return site.give_up("this view divides a dim across its parts")
    site.linear_in(name)
    return result


@rule("aten.view.default", "aten._unsafe_view.default", sizes=["size"])
@rule("aten.reshape.default", sizes=["shape"])
@rule("aten.flatten.using_ints", "aten.ravel.default", "aten.unsqueeze.default")
@rule("aten.unflatten.int", sizes=["sizes"])
def view(site: Site) -> Dims | list[Dims]:
    """Row-major regrouping: dims are merged into products and split into factors."""
    return _regroup(site, "self")


@rule("aten.view_as.default", "aten.reshape_as.default")
def view_as(site: Site) -> Dims | list[Dims]:
    """A view whose sizes are another tensor's, which must be cut alike for its local shape to be the right one."""
    result = _regroup(site, "self")
    if isinstance(result, tuple):
        for ours, theirs in zip(result, site.dims("other"), strict=True):
            site.tie(ours, theirs)
    return result


@rule("aten.squeeze.dim", "aten.squeeze.dims", "aten.squeeze.default")
def squeeze(site: Site) -> Dims | list[Dims]:
    """Dims of size 1 vanish. One that stays must stay on every rank, also where a part of it would have size 1."""
    dims = site.dims("self")
    named = dict(site.operator.arguments).get("dim", tuple(range(len(dims))))
    squeezed = (named if isinstance(named, tuple) else (named,)) if dims else ()
    site.keep_whole(*(dims[index] for index in squeezed), because="a squeezed dim's part could have size 1")
    return _regroup(site, "self")


@rule("aten.transpose.int", "aten.swapaxes.default", "aten.mT.default")
def transpose(site: Site) -> Dims:
    """Two dims change places, the last two where none are named."""
    dims = list(site.dims("self"))
    first, second = [value for _, value in site.operator.arguments[1:]] or (-2, -1)
    if dims:
        dims[first], dims[second] = dims[second], dims[first]
    site.linear_in("self")
    return tuple(dims)


@rule("aten.permute.default")
def permute(site: Site) -> Dims:
    """The dims in another order."""
    dims = site.dims("self")
    site.linear_in("self")
    return tuple(dims[index % len(dims)] for index in site["dims"])


@rule("aten.t.default", "aten.numpy_T.default")
def reverse_dims(site: Site) -> Dims:
    """The dims in reverse order (a matrix transposed)."""
    site.linear_in("self")
    return tuple(reversed(site.dims("self")))


@rule("aten.expand_as.default")
def expand_as(site: Site) -> Dims:
    """Like expand, but what is expanded is indexed like the other tensor, which must be cut alike."""
    dims, other = site.dims("self"), site.dims("other")
    padded = (ONE,) * (len(other) - len(dims)) + dims
    site.linear_in("self")
    pairs = zip(padded, other, strict=True)
    return tuple(site.tie(theirs, ours) if ours.size != 1 else theirs for ours, theirs in pairs)


@rule("aten.expand.default", sizes=["size"])
def expand(site: Site) -> Dims:
    """Dims of size 1, or none, become new dims whose indices all hold the same element."""
    dims = site.dims("self")
    padded = (ONE,) * (len(site.shape) - len(dims)) + dims
    site.linear_in("self")
    return tuple(dim if dim.size == size else site.new(size) for dim, size in zip(padded, site.shape, strict=True))


@rule("aten.repeat_interleave.self_int", sizes=["repeats"])
def repeat_interleave(site: Site) -> Dims | list[Dims]:
    """Every index followed by its copies: the dim is the outer factor, the copies the inner one."""
    dims = list(site.dims("self"))
    if site["dim"] is None:
        return site.give_up("repeat_interleave without a dim flattens its input")
    index = site.index("dim", len(dims))
    dims[index] = product([dims[index], site.new(site["repeats"])])
    site.linear_in("self")
    return tuple(dims)


@rule("aten.repeat.default", sizes=["repeats"])
def repeat(site: Site) -> Dims:
    """The whole dim again and again: the copies are the outer factor."""
    dims = site.dims("self")
    repeats = site["repeats"]
    padded = (ONE,) * (len(repeats) - len(dims)) + dims
    site.linear_in("self")
    return tuple(product([site.new(count), dim]) for count, dim in zip(repeats, padded, strict=True))


@rule("aten.slice.Tensor", offsets=[("start", "self", "dim"), ("end", "self", "dim")])
def slice_(site: Site) -> Dims | list[Dims]:
    """A contiguous range of a dim cuts it into sections; with a step the dim stays whole."""
    dims = list(site.dims("self"))
    index = site.index("dim", len(dims))
    dim = dims[index]
    start, stop, step = slice(site["start"], site["end"], site["step"]).indices(dim.size)
    stop = max(start, stop)
    site.linear_in("self")
    if step != 1:
        site.keep_whole(dim, because="a slice with a step")
        dims[index] = site.new(site.shape[index])
        site.keep_whole(dims[index])
        return tuple(dims)
    sections = _sections(site, dim, [start, stop - start, dim.size - stop])
    if sections is None:
        return site.give_up("this slice cuts a dim across its parts")
    dims[index] = sections[1]
    return tuple(dims)


@rule("aten.narrow.default", sizes=["length"], offsets=[("start", "self", "dim")])
def narrow(site: Site) -> Dims | list[Dims]:
    """A contiguous range of a dim, by its start and length."""
    dims = list(site.dims("self"))
    index, length = site.index("dim", len(dims)), site["length"]
    start = site["start"] + (dims[index].size if site["start"] < 0 else 0)
    sections = _sections(site, dims[index], [start, length, dims[index].size - start - length])
    if sections is None:
        return site.give_up("this range cuts a dim across its parts")
    site.linear_in("self")
    dims[index] = sections[1]
    return tuple(dims)


def _sections(site: Site, dim, sizes: list[int]):  # type: ignore[no-untyped-def]
    """Cut a dim into sections of the given sizes (0 allowed); ``None`` if its structure does not allow it."""
    parts = []
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


def _split(site: Site) -> list[Dims]:
    dims = list(site.dims("self"))
    index = site.index("dim", len(dims))
    sections = _sections(site, dims[index], [shape[index] for shape in site.shapes])
    if sections is None:
        return site.give_up("this split cuts a dim across its parts")
    site.linear_in("self")
    return [(*dims[:index], section, *dims[index + 1 :]) for section in sections]


@rule("aten.split_with_sizes.default", sizes=["split_sizes"])
@rule("aten.split.sizes", sizes=["split_size"])
def split(site: Site) -> list[Dims]:
    """One dim cut into sections."""
    return _split(site)


@rule("aten.split.Tensor", sizes=["split_size"])
@rule("aten.chunk.default")
def split_evenly(site: Site) -> list[Dims]:
    """One dim cut into sections of one size, which must be cut alike to stay of one size."""
    index = site.index("dim", len(site.dims("self")))
    if len({shape[index] for shape in site.shapes}) > 1:
        return site.give_up("a dim is split into equal parts and a smaller last one")
    outputs = _split(site)
    for other in outputs[1:]:
        site.tie(outputs[0][index], other[index])
    return outputs


@rule("aten.cat.default", "aten.concat.default", "aten.concatenate.default")
def cat(site: Site) -> Dims | list[Dims]:
    """Dims joined into sections; the other dims are indexed alike."""
    parts = site.tensors("tensors")
    if len({len(dims) for dims in parts}) > 1:
        return site.give_up("an empty tensor with another number of dims is joined")
    index = site.index("dim", len(parts[0]))
    for other in parts[1:]:
        for position, dim in enumerate(other):
            if position != index:
                site.tie(parts[0][position], dim)
    site.linear_in("tensors")
    return (*parts[0][:index], concat([dims[index] for dims in parts]), *parts[0][index + 1 :])


@rule("aten.stack.default")
def stack(site: Site) -> Dims:
    """A new dim over the tensors; it stays whole."""
    parts = site.tensors("tensors")
    for other in parts[1:]:
        for left, right in zip(parts[0], other, strict=True):
            site.tie(left, right)
    index = site.index("dim", len(site.shape))
    fresh = site.new(len(parts))
    site.keep_whole(fresh)
    site.linear_in("tensors")
    return (*parts[0][:index], fresh, *parts[0][index:])


@rule("aten.select.int")
def select(site: Site) -> Dims:
    """One index of a dim that stays whole."""
    dims = site.dims("self")
    index = site.index("dim", len(dims))
    site.keep_whole(dims[index], because="one index of a dim is selected")
    site.linear_in("self")
    return (*dims[:index], *dims[index + 1 :])


@rule("aten.unbind.int")
def unbind(site: Site) -> list[Dims]:
    """Every index of a dim that stays whole."""
    dims = site.dims("self")
    index = site.index("dim", len(dims))
    site.keep_whole(dims[index], because="a dim is taken apart index by index")
    site.linear_in("self")
    return [(*dims[:index], *dims[index + 1 :])] * len(site.shapes)


@rule("aten.pad.default", "aten.constant_pad_nd.default")
def pad(site: Site) -> Dims:
    """Dims that are padded stay whole; the others pass."""
    dims = list(site.dims("self"))
    for position, (before, after) in enumerate(zip(site["pad"][::2], site["pad"][1::2], strict=True), start=1):
        if before or after:
            site.keep_whole(dims[-position], because="this dim is padded")
            dims[-position] = site.new(site.shape[-position])
            site.keep_whole(dims[-position])
    return tuple(dims)
