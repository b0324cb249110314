"""Convolutions, pooling and resampling: channels may be cut, positions stay whole."""

from __future__ import annotations

from math import prod

from lightning_autotp.layouts.dims import product
from lightning_autotp.operators.registry import Dims, Shape, Shapes, Site, operator

_RESAMPLED = "this operator mixes positions"


def _positions(site: Site, dims: Dims) -> Dims:
    """Positions stay whole, before and after."""
    fresh = tuple(site.new(size) for size in site.shape[len(site.shape) - len(dims) :])
    site.keep_whole(*dims, *fresh, because=_RESAMPLED)
    return fresh


def _convolution_flops(shapes: Shapes) -> float:
    """Every position of the output meets the whole weight, of the input where the convolution is transposed."""
    return _weight_flops(shapes, shapes["input"] if shapes.literal("transposed") else shapes.out)


def _transposed_flops(shapes: Shapes) -> float:
    """Every position of the input meets the whole weight."""
    return _weight_flops(shapes, shapes["input"])


def _weight_flops(shapes: Shapes, at: Shape) -> float:
    """``at [..., channels, places]``, weight ``[(g o), i, kernel]``: its elements count for all groups together."""
    weight = shapes["weight"]
    places = len(weight) - 2
    return 2 * prod(at[: -places - 1]) * prod(at[-places:]) * prod(weight)


@operator(
    *(f"aten.conv{n}d.{overload}" for n in (1, 2, 3) for overload in ("default", "padding")),
    "aten.convolution.default", sizes=("groups",), flops=_convolution_flops,
)  # fmt: skip
def convolution(site: Site) -> Dims | list[Dims]:
    """``input [..., (g i), place]``, ``weight [(g o), i, kernel]``, ``bias [(g o)]`` -> ``[..., (g o), place]``."""
    return _convolved(site, dict(site.operator.arguments).get("transposed", False))


@operator(
    "aten.conv_transpose1d.default", "aten.conv_transpose2d.input", "aten.conv_transpose3d.input",
    sizes=("groups",), flops=_transposed_flops,
)  # fmt: skip
def transposed_convolution(site: Site) -> Dims | list[Dims]:
    """As a convolution, with the weight ``[(g i), o, kernel]``."""
    return _convolved(site, True)


def _convolved(site: Site, is_transposed: bool) -> Dims | list[Dims]:
    """Groups ``g`` pass, so a depthwise convolution's channels do.

    The channels ``i`` of a group are contracted and the bias comes after their sum. Positions pass a kernel of size 1.
    """
    x, weight, bias, groups = site.dims("input"), site.dims("weight"), site.tensor("bias"), site["groups"]
    *batch, channels = x[: len(x) - len(weight) + 2]
    grouped = site.axes.split(channels, groups)
    filters = site.axes.split(weight[0], groups)
    if grouped is None or filters is None:
        return site.give_up("the groups of this convolution divide a dim across its parts")
    site.tie(grouped[0], filters[0])
    read, given = (filters[1], weight[1]) if is_transposed else (weight[1], filters[1])
    site.contract(site.tie(grouped[1], read), read)
    out = product([filters[0], given]) if is_transposed else weight[0]
    if bias is None:
        site.linear_in("input")
    else:
        site.tie(out, bias[0])
        if read.size > 1:
            site.relation.added_after_sum.add(site["bias"].tensor)
    positions, kernel = x[len(x) - len(weight) + 2 :], weight[2:]
    site.keep_whole(*kernel)
    is_pointwise = (
        all(dim.size == 1 for dim in kernel) and tuple(dim.size for dim in positions) == site.shape[-len(kernel) :]
    )
    if not is_pointwise or any(step != 1 for step in site["stride"]):
        positions = _positions(site, positions)
    return (*batch, out, *positions)


_AVERAGING = (
    *(f"aten.adaptive_avg_pool{n}d.default" for n in (1, 2, 3)),
    *(f"aten.avg_pool{n}d.default" for n in (1, 2, 3)),
    *(f"aten.upsample_{kind}.vec" for kind in ("nearest1d", "nearest2d", "nearest3d", "linear1d", "bilinear2d")),
    *(f"aten.{kind}.vec" for kind in ("upsample_bicubic2d", "_upsample_bilinear2d_aa", "_upsample_bicubic2d_aa")),
)


@operator(*(f"aten.max_pool{n}d.default" for n in (1, 2, 3)))
@operator(
    *(f"aten.adaptive_max_pool{n}d.default" for n in (1, 2, 3)), "aten.max_pool2d_with_indices.default",
    "aten.max_pool3d_with_indices.default",
)  # fmt: skip
def resample(site: Site) -> list[Dims]:
    """``[..., positions]`` -> ``[..., other positions]``, every channel by itself."""
    name, _ = site.operator.arguments[0]
    dims, rank = site.dims(name), next(n for n in (1, 2, 3) if f"{n}d" in site.operator.name)
    return [(*dims[:-rank], *_positions(site, dims[-rank:]))] * len(site.shapes)


@operator(*_AVERAGING)
def average(site: Site) -> list[Dims]:
    """As :func:`resample`, and linear."""
    name, _ = site.operator.arguments[0]
    site.linear_in(name)
    return resample(site)


@operator("aten.grid_sampler.default")
def grid_sampler(site: Site) -> Dims:
    """``input [n, c, ...]``, ``grid [n, positions, axes]`` -> ``[n, c, positions]``: each channel is sampled alike."""
    rows, channels, *places = site.dims("input")
    other_rows, *asked, axes = site.dims("grid")
    site.keep_whole(*places, axes, because=_RESAMPLED)
    site.linear_in("input")
    return (site.tie(rows, other_rows), channels, *asked)


@operator("aten.max_unpool2d.default")
def max_unpool(site: Site) -> Dims:
    """``[..., h, w]``, with the places that they were taken from, alike -> ``[..., height, width]``."""
    dims, indices = site.dims("self"), site.dims("indices")
    for ours, theirs in zip(dims, indices, strict=True):
        site.tie(ours, theirs)
    site.linear_in("self")
    return (*dims[:-2], *_positions(site, dims[-2:]))


@operator("aten.pixel_shuffle.default")
def pixel_shuffle(site: Site) -> Dims | list[Dims]:
    """``[..., (c k k), h, w]`` -> ``[..., c, (h k), (w k)]``."""
    *batch, channels, height, width = site.dims("self")
    parts = site.axes.split(channels, site.shape[-3])
    if parts is None:
        return site.give_up("pixel_shuffle divides a dim across its parts")
    site.keep_whole(parts[1], because=_RESAMPLED)
    site.linear_in("self")
    return (*batch, parts[0], *_positions(site, (height, width)))


@operator("aten.pixel_unshuffle.default")
def pixel_unshuffle(site: Site) -> Dims:
    """``[..., c, (h k), (w k)]`` -> ``[..., (c k k), h, w]``."""
    *batch, channels, height, width = site.dims("self")
    inside = site.new(site["downscale_factor"] ** 2)
    site.keep_whole(inside, because=_RESAMPLED)
    site.linear_in("self")
    return (*batch, product([channels, inside]), *_positions(site, (height, width)))


@operator("aten.im2col.default")
def im2col(site: Site) -> Dims:
    """``[..., c, h, w]`` -> ``[..., (c k), blocks]``: each channel's elements under a kernel."""
    *batch, channels, height, width = site.dims("self")
    inside, blocks = site.new(site.shape[-2] // channels.size), site.new(site.shape[-1])
    site.keep_whole(height, width, inside, blocks, because=_RESAMPLED)
    site.linear_in("self")
    return (*batch, product([channels, inside]), blocks)


@operator("aten.col2im.default")
def col2im(site: Site) -> Dims | list[Dims]:
    """``[..., (c k), blocks]`` -> ``[..., c, h, w]``: the sum of what the kernels give each position."""
    *batch, columns, blocks = site.dims("self")
    parts = site.axes.split(columns, site.shape[-3])
    if parts is None:
        return site.give_up("col2im divides a dim across its parts")
    fresh = site.new(site.shape[-2]), site.new(site.shape[-1])
    site.keep_whole(parts[1], blocks, *fresh, because=_RESAMPLED)
    site.linear_in("self")
    return (*batch, parts[0], *fresh)


@operator("aten.unfold.default")
def unfold(site: Site) -> Dims:
    """Windows along a dim, as a last dim; windows side by side divide the dim, others need all of it."""
    dims = list(site.dims("self"))
    index, size = site.index("dimension", len(dims)), site["size"]
    site.linear_in("self")
    if not dims:
        return (site.new(size),)
    parts = None
    if size == site["step"] and dims[index].size % size == 0 and dims[index].size:
        parts = site.axes.split(dims[index], dims[index].size // size)
    if parts is None:
        site.keep_whole(dims[index], because="windows along the dim")
        parts = site.new(site.shape[index]), site.new(size)
        site.keep_whole(parts[0])
    site.keep_whole(parts[1])
    dims[index] = parts[0]
    return (*dims, parts[1])
