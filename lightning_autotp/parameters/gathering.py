"""Whole tensors of which each rank has a part. Collective."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_autotp.layouts.blocks import blocks_of, index
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
        return whole.to(tensor.device)
    for rank in range(group.size):  # one after the other: all of them at once would take the memory of another whole
        shape = local_shape(meta.shape, meta.layout, rank)
        part = own if rank == group.rank else own.new_empty(shape)
        if part.numel() == 0:
            continue
        dist.broadcast(_bytes(part), dist.get_global_rank(process_group, rank), process_group)
        for block in blocks_of(meta.shape, meta.layout, rank, group.size):
            whole[index(block.original)] = part[index(block.local)]
    return whole.to(tensor.device)


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
