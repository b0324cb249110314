"""Whole tensors of which each rank has a part. Collective."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator, Sequence
from math import prod
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_autotp.layouts.blocks import blocks_of, index
from lightning_autotp.layouts.ownership import Run
from lightning_autotp.layouts.types import Shard, local_shape
from lightning_autotp.parameters.local_blocks import joined
from lightning_autotp.parameters.meta import ParameterMeta
from lightning_autotp.private.distributed_private import device_to_send
from lightning_autotp.ranks.group import TPGroup


def gather_parameter(tensor: Tensor, meta: ParameterMeta, group: TPGroup) -> Tensor:
    """The whole tensor from every rank's part of it.

    Collective over ``group``, and over the data axis for what FSDP2 has cut. Works for whatever has the parameter's
    layout: the parameter, its gradient, its moments.

    Args:
        tensor: this rank's part, of shape ``meta.local_shape``.
        meta: what the parts are.
        group: the tensor-parallel group.

    Returns:
        A new tensor of shape ``meta.shape``, on ``tensor``'s device, the same on every rank.
    """
    tensor = joined(tensor)
    if not isinstance(meta.layout, Shard):
        return tensor.clone()
    process_group = group.process_group
    there = device_to_send(tensor.device, process_group)
    own = tensor.detach().to(there).contiguous()
    whole = torch.empty(meta.shape, dtype=tensor.dtype, device=there)
    dims = meta.layout.dims
    # As bytes: not every backend knows every dtype.
    if whole.numel() and len(dims) == 1 and dims[0][0] == 0 and dims[0][1].is_even:
        dist.all_gather_single(_bytes(whole), _bytes(own), process_group)
    else:
        shapes = [local_shape(meta.shape, meta.layout, rank) for rank in range(group.size)]
        for rows in _rows_together(shapes, own.element_size()):
            _gather_rows(whole, own, rows, shapes, meta, group)
    return whole.to(tensor.device)


_TOGETHER = 2**24
"""Bytes up to which the ranks' parts are gathered at once: they are there beside the whole until they are copied."""


def _rows_together(shapes: Sequence[Sequence[int]], itemsize: int) -> Iterator[Run]:
    """The indices of the parts' first dim that are gathered at once; for most tensors, all of them."""
    longest, row = max(shape[0] for shape in shapes), max(prod(shape[1:]) for shape in shapes)
    step = max(_TOGETHER // max(row * itemsize * len(shapes), 1), 1)
    yield from ((start, start + step) for start in range(0, longest if row else 0, step))


def _gather_rows(
    whole: Tensor, own: Tensor, rows: Run, shapes: Sequence[Sequence[int]], meta: ParameterMeta, group: TPGroup
) -> None:
    """Write what all parts, of these shapes, have at some indices of their first dim.

    One collective, of pieces of one length.
    """
    pieces = [(len(range(shape[0])[slice(*rows)]), *shape[1:]) for shape in shapes]
    width = max(map(prod, pieces))
    sent, received = own.new_empty(width), own.new_empty(group.size * width)
    sent[: prod(pieces[group.rank])] = own[slice(*rows)].flatten()
    dist.all_gather_single(_bytes(received), _bytes(sent), group.process_group)
    for rank, shape in enumerate(pieces):
        piece = received[rank * width :][: prod(shape)].view(shape)
        for block in blocks_of(meta.shape, meta.layout, rank, group.size):
            if (part := block.cut(0, (rows[0], rows[0] + shape[0]))) is not None:
                whole[index(part.original)] = piece[index(part.local)]


def _bytes(tensor: Tensor) -> Tensor:
    return tensor.reshape(-1).view(torch.uint8)


def whole_tensor(tensor: Tensor, meta: ParameterMeta | None, group: TPGroup) -> Tensor:
    """As :func:`gather_parameter`; a tensor of which every rank has all comes back as it is."""
    return gather_parameter(tensor, meta, group) if meta is not None and meta.is_parallel else joined(tensor)


def gather_to_cpu(value: Any, meta: ParameterMeta | None, group: TPGroup, keep: bool = True) -> Any:
    """The whole of one value on the CPU, in memory of its own; ``None`` without ``keep``. Collective as the above."""
    if isinstance(value, Tensor):
        is_new = meta is not None and meta.is_parallel
        value = whole_tensor(value, meta, group)
        return value.to("cpu", copy=not is_new) if keep else None
    return copy.deepcopy(value) if keep else None


def each_once(named: Iterable[tuple[str, Any]], make: Callable[[Any], Any]) -> dict[str, Any]:
    """What ``make`` gives for values, by their names; it is called once for those that are one object (tied ones)."""
    made: dict[int, Any] = {}
    found: dict[str, Any] = {}
    for name, value in named:
        if id(value) not in made:
            made[id(value)] = make(value)
        found[name] = made[id(value)]
    return found
