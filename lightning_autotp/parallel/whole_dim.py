"""Where one dim of a tensor ends up, whole, after a view: index arithmetic on shapes alone."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from types import EllipsisType
from typing import Any

import torch
from torch import Tensor


def after_reshape(shape: Sequence[int], dim: int, sizes: Sequence[int]) -> int | None:
    """The output dim of a reshape from ``shape`` to ``sizes`` (one may be -1) that is all of ``dim``.

    Returns:
        ``None`` where the dim is split or merged, or cannot be told (no elements, sizes that do not fit).
    """
    elements = math.prod(shape)
    if elements == 0:
        return None
    if -1 in sizes:
        known = -math.prod(sizes)
        if known <= 0 or elements % known:
            return None
        sizes = [elements // known if size == -1 else size for size in sizes]
    # It is an output dim of its own if that has its size and as many elements before it as it had.
    before = math.prod(shape[:dim])
    return next(
        (at for at, size in enumerate(sizes) if size == shape[dim] and math.prod(sizes[:at]) == before),
        None,
    )


@dataclass(frozen=True)
class WholeIndex:
    """An index that takes all of a dim.

    Attributes:
        index: the same index without ellipsis, with ``:`` for the dim.
        from_right: where the dim is in the result, counted from behind (1 is the last).
    """

    index: tuple[Any, ...]
    from_right: int


def after_index(shape: Sequence[int], dim: int, index: tuple[Any, ...]) -> WholeIndex | None:
    """What ``tensor[index]`` does to ``dim``.

    Returns:
        ``None`` where it takes a part of the dim, or cannot be told: kinds of index other than integers, slices,
        ellipses, ``None`` and tensors before the dim.
    """
    items = list(index)
    kinds = int | slice | EllipsisType | Tensor | None  # of a trace's integers, too; but True and False are masks
    plain = all(isinstance(item, kinds) and not isinstance(item, bool) for item in items)
    ellipses = [at for at, item in enumerate(items) if isinstance(item, EllipsisType)]
    if not plain or len(ellipses) > 1:
        return None
    used = [_dims_used(item) for item in items]
    left = len(shape) - sum(used)
    if left < 0:
        return None
    at = ellipses[0] if ellipses else len(items)
    items[at : at + 1] = [slice(None)] * left
    used[at : at + 1] = [1] * left
    starts = [sum(used[:before]) for before in range(len(items))]
    at = next(at for at, start in enumerate(starts) if start <= dim < start + used[at])
    item, after = items[at], items[at + 1 :]
    if not isinstance(item, slice) or item.indices(shape[dim]) != (0, shape[dim], 1):
        return None
    # Tensors in front of the dim leave their result in front of it, so what is behind it tells where it is.
    if any(isinstance(later, Tensor) for later in after):
        return None
    items[at] = slice(None)
    return WholeIndex(tuple(items), 1 + sum(not isinstance(later, int) for later in after))


def _dims_used(item: Any) -> int:
    """How many dims of the tensor an item of an index stands for."""
    if item is None or item is ...:
        return 0
    # A mask has the dims that it masks; so have bytes, which are masks too.
    return item.dim() if isinstance(item, Tensor) and item.dtype in (torch.bool, torch.uint8) else 1
