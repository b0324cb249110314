"""What this process holds of a tensor: its tensor-parallel part, which FSDP2 may have cut again over the data axis.

A parameter that FSDP2 manages is a ``DTensor`` over the data axis alone; what it is a ``DTensor`` *of* is this rank's
tensor-parallel part, cut in dim 0 over the last dim of its mesh; under hybrid sharding the dim before it is that of the
replicas, which have the same. Gradients and optimizer states are alike. Everything that asks which elements of the
original tensor are here, or how often an element counts, asks this module, with the meta of the parameter in question
(``None`` for a tensor of which every rank has all).
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from lightning_autotp.layouts.blocks import Block, blocks_of, chunk, index, owned_by
from lightning_autotp.layouts.names import join_names
from lightning_autotp.parameters.meta import ParameterMeta
from lightning_autotp.parameters.part import PartOf
from lightning_autotp.parameters.pending_gradient import PendingGradient
from lightning_autotp.private.torch_private import without_subclasses
from lightning_autotp.quantized.weight import QuantizedWeight
from lightning_autotp.ranks.group import TPGroup


def plain(tensor: Tensor) -> Tensor:
    """The elements that are in this process, as an ordinary tensor without history. Not collective.

    Of a quantized weight these are the numbers that it stands for, in memory of their own.
    """
    return _detached(tensor, DTensor.to_local)


def joined(tensor: Tensor) -> Tensor:
    """This rank's tensor-parallel part, whole over the data axis. Collective over the data axis for a ``DTensor``."""
    return _detached(tensor, DTensor.full_tensor)


def _detached(tensor: Tensor, of: Callable[[DTensor], Tensor]) -> Tensor:
    if isinstance(tensor, PendingGradient):
        tensor.settle("reading")
    # A part of a gradient that represents the whole is an ordinary tensor, too. And a DTensor cannot be detached in
    # inference mode.
    with without_subclasses(), torch.no_grad():
        detached = (of(tensor) if isinstance(tensor, DTensor) else tensor).detach()
    return detached.values() if isinstance(detached, QuantizedWeight) else detached


def refuse_cut(model: nn.Module) -> None:
    """Refuse a whole model of which something has divided parameters already.

    Raises:
        RuntimeError: naming them.
    """
    names = [name for name, parameter in model.named_parameters() if is_cut(parameter)]
    if names:
        raise RuntimeError(
            f"{join_names(names)} of {type(model).__name__} are DTensors, which parallelize_module, distribute_tensor"
            " or fully_shard has divided already: leave that out. lightning_autotp divides the whole model itself, and"
            " data_parallel_size= (or data_mesh= of parallelize) lets FSDP2 shard its copies"
        )


def is_cut(tensor: Tensor) -> bool:
    """Whether FSDP2 has cut a tensor over the data axis."""
    return isinstance(tensor, DTensor)


def is_offloaded(tensor: Tensor) -> bool:
    """Whether a tensor that FSDP2 has cut is in host memory, and gathered on another device."""
    return isinstance(tensor, DTensor) and tensor.device.type == "cpu" != tensor.device_mesh.device_type


def shard_group(*tensors: Tensor) -> dist.ProcessGroup | None:
    """The data-parallel ranks over which FSDP2 has cut one of some tensors: all of them, or those of a replica.

    ``None`` if it has cut none.
    """
    meshes = (tensor.device_mesh for tensor in tensors if isinstance(tensor, DTensor))
    return next((mesh.get_group(mesh.ndim - 1) for mesh in meshes), None)


def held_blocks(tensor: Tensor, meta: ParameterMeta | PartOf | None, ranks: int) -> tuple[Block, ...]:
    """The blocks of the original tensor that are in this process, and where they lie in :func:`plain` of it.

    Args:
        tensor: a parameter, or what lies over the ranks as one does.
        meta: the parameter's, or what the tensor is a part of.
        ranks: the tensor-parallel group's size.

    Returns:
        Blocks, each with the tensor-parallel ranks that hold it.
    """
    blocks = meta.mapping if meta is not None else blocks_of(tensor.shape, None, 0, ranks)
    if not isinstance(tensor, DTensor) or not tensor.placements[-1].is_shard(0):
        return blocks
    mesh, last = tensor.device_mesh, tensor.device_mesh.ndim - 1
    rows = chunk(tensor.shape[0], mesh.size(last), mesh.get_local_rank(last))
    return tuple(kept for block in blocks if (kept := block.cut(0, rows)) is not None)


def counted_blocks(tensor: Tensor, meta: ParameterMeta | PartOf | None, group: TPGroup) -> tuple[Block, ...]:
    """Those of :func:`held_blocks` that this rank owns: every element of the original has one owner.

    (One in each tensor-parallel group: a tensor that FSDP2 does not manage is in every copy of the model.)
    """
    return owned_by(held_blocks(tensor, meta, group.size), group.rank)


def fill(tensor: Tensor, meta: ParameterMeta | None, whole: Tensor, group: TPGroup) -> None:
    """Copy into a parameter, or what lies over the ranks as one does, this process's part of the whole tensor.

    Raises:
        QuantizationError: if the parameter is quantized, and the tensor has other numbers.
    """
    local = plain(tensor)
    for block in held_blocks(tensor, meta, group.size):
        given = whole[index(block.original)]
        if isinstance(tensor, QuantizedWeight):
            tensor.check(local[index(block.local)], given, meta.name if meta is not None else "a parameter")
        else:
            local[index(block.local)] = given


def fsdp_modules(model: nn.Module) -> list[FSDPModule]:
    """The modules whose parameters FSDP2 manages together."""
    return [module for module in model.modules() if isinstance(module, FSDPModule)]


def reshard(model: nn.Module) -> None:
    """Let FSDP2 put its parameters back in place: after a forward without backward some are still gathered.

    What is offloaded may be written afterwards: the device has taken what it was to have of it.
    """
    for module in fsdp_modules(model):
        module.reshard()
    offloaded = [each for each in model.parameters() if isinstance(each, DTensor) and is_offloaded(each)]
    for device in {each.device_mesh.device_type for each in offloaded}:
        torch.get_device_module(device).synchronize()
