"""A parameter's group and meta, and the whole of what the ranks share out. Collective where it says so."""

from __future__ import annotations

import copy
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lightning_autotp.layouts.types import Shard, boxes, local_shape
from lightning_autotp.parameters.local_blocks import index, joined
from lightning_autotp.parameters.meta import ParameterMeta
from lightning_autotp.ranks.group import TPGroup


def model_group(model: nn.Module) -> TPGroup:
    """The tensor-parallel group of a parallel model, or of a module that has one somewhere inside.

    Raises:
        RuntimeError: if there is none.
    """
    for module in model.modules():
        group = getattr(module, "autotp_group", None)
        if isinstance(group, TPGroup):
            return group
    raise RuntimeError(
        f"{type(model).__name__} has no parallel model in it: pass it (or the module that holds the parallel model)"
        " after lightning_autotp.parallelize"
    )


def tensor_meta(tensor: Any) -> ParameterMeta | None:
    """The meta of a tensor that the ranks share out, or ``None`` if every rank has all of it."""
    meta = getattr(tensor, "meta", None)
    return meta if isinstance(meta, ParameterMeta) and meta.is_parallel else None


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
    whole = tensor.new_empty(meta.shape)
    process_group = group.process_group
    for rank in range(group.size):
        shape = local_shape(meta.shape, meta.layout, rank)
        part = tensor.contiguous() if rank == group.rank else tensor.new_empty(shape)
        if part.numel() == 0:
            continue
        # As bytes: not every backend knows every dtype.
        dist.broadcast(part.reshape(-1).view(torch.uint8), dist.get_global_rank(process_group, rank), process_group)
        for local, original in boxes(meta.shape, meta.layout, rank):
            whole[index(original)] = part[index(local)]
    return whole


def whole_tensor(tensor: Tensor, meta: ParameterMeta | None, group: TPGroup) -> Tensor:
    """As :func:`gather_parameter`; a tensor that every rank has (``meta`` is ``None``) comes back as it is."""
    return joined(tensor) if meta is None else gather_parameter(tensor, meta, group)


def gather_to_cpu(value: Any, meta: ParameterMeta | None, group: TPGroup, keep: bool = True) -> Any:
    """The whole of one value on the CPU, in memory of its own; ``None`` without ``keep``. Collective as the above."""
    if isinstance(value, Tensor):
        value = whole_tensor(value, meta, group)
        return value.to("cpu", copy=meta is None) if keep else None
    return copy.deepcopy(value) if keep else None
