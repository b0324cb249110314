"""Gradients of a parallel model: sums between ranks, norms, clipping, and the original model's gradients.

A parameter's layout says what its local gradients mean. An element that several ranks hold and use differently (a
``Replicate`` parameter, a unit that ranks share) has on each of them only a part of its gradient: the parts are
summed by a hook during the backward pass. After that every rank's gradient is the true one for the elements it holds,
and only quantities *over* a parameter, such as a norm, must count each element of the original model once.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from itertools import product
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from lightning_autotp.checkpoint import gather_parameter, model_group, tensor_meta
from lightning_autotp.layers.group import TPGroup
from lightning_autotp.layout import Replicate, Shard
from lightning_autotp.meta import ParameterMeta

Blocks = tuple[tuple[slice, ...], ...]
"""Index expressions of blocks of a local tensor."""


def synchronize_gradients(model: nn.Module, group: TPGroup) -> list[RemovableHandle]:
    """Sum, in every backward pass, the gradients of elements that several ranks hold over exactly those ranks.

    Collective over ``group``, and so is every backward pass afterwards. Where some ranks, not all, share a unit, a
    process group is made for them: then every process of the job must make this call at the same time, whichever
    tensor-parallel group it is in. Call it once on a model whose parameters have their metas.

    The sum is a tensor hook: it acts on what each backward pass contributes, so accumulation over several passes stays
    right, and a tied parameter, whose uses autograd adds up before the hook, is summed once. A frozen parameter gets
    its hook too, for when it is thawed.

    Every rank runs the same model, hence the hooks in the same order; within a parameter the sets of ranks come in
    ascending order, and each of a set's buffers lists its elements in the original tensor's order. So no two ranks
    wait for each other in different collectives.

    Returns:
        The hooks' handles.
    """
    groups = _subgroups(model, group)
    handles = []
    for parameter in model.parameters():
        shared = _shared_elements(parameter)
        if shared:
            sums = [(blocks, groups[ranks]) for ranks, blocks in sorted(shared.items())]
            handles.append(_register(parameter, functools.partial(_sum_blocks, sums)))
    return handles


def average_gradients(model: nn.Module, group: dist.ProcessGroup) -> list[RemovableHandle]:
    """Average, in every backward pass, all gradients over the ranks that train on different data.

    Every backward pass is collective over ``group`` afterwards. What accumulates is the average of each pass.

    Args:
        model: the model; the ranks of ``group`` hold the same part of it.
        group: the data-parallel group.

    Returns:
        The hooks' handles.
    """
    size = dist.get_world_size(group)
    if size == 1:
        return []

    def average(gradient: Tensor) -> Tensor:
        mean = gradient.clone(memory_format=torch.contiguous_format).div_(size)
        dist.all_reduce(mean, group=group)
        return mean

    return [_register(parameter, average) for parameter in model.parameters()]


def gradient_norm(parameters: Tensor | Iterable[Tensor], group: TPGroup, norm_type: float = 2.0) -> Tensor:
    """The norm of the original model's gradient: every element counted once, whatever number of ranks hold it.

    Collective over ``group``.

    Args:
        parameters: local parameters; those without a gradient are left out.
        group: the tensor-parallel group.
        norm_type: any positive number, or infinity.

    Returns:
        A scalar, float32 or wider, the same on every rank.

    Raises:
        ValueError: if ``norm_type`` is not positive.
    """
    if not norm_type > 0:
        raise ValueError(f"norm_type is {norm_type}; a gradient norm needs a positive one or infinity")
    parameters = [parameters] if isinstance(parameters, Tensor) else list(parameters)
    device = parameters[0].device if parameters else torch.device("cpu")
    dtype = functools.reduce(torch.promote_types, (parameter.dtype for parameter in parameters), torch.float32)
    norms = [
        torch.linalg.vector_norm(parameter.grad[block], norm_type, dtype=dtype).to(device)
        for parameter in parameters
        if parameter.grad is not None
        for block in _counted_blocks(parameter, group)
        if parameter.grad[block].numel()
    ]
    own = (
        torch.linalg.vector_norm(torch.stack(norms), norm_type)
        if norms
        else torch.zeros((), dtype=dtype, device=device)
    )
    # The ranks' norms are gathered, not reduced: every rank computes the same bits, and a NaN stays one.
    everyone = [torch.empty_like(own) for _ in range(group.size)]
    dist.all_gather(everyone, own, group=group.process_group)
    return torch.linalg.vector_norm(torch.stack(everyone), norm_type)


def clip_gradients_norm(
    parameters: Tensor | Iterable[Tensor],
    group: TPGroup,
    max_norm: float,
    norm_type: float = 2.0,
    error_if_nonfinite: bool = False,
) -> Tensor:
    """Scale the gradients so that the norm of the original model's gradient is at most ``max_norm``.

    Collective over ``group``. Same as ``torch.nn.utils.clip_grad_norm_`` in one process. (Clipping by value acts on
    each element by itself: ``torch.nn.utils.clip_grad_value_`` is right as it is.)

    Returns:
        The norm before clipping, a scalar.

    Raises:
        ValueError: if ``norm_type`` is not positive.
        RuntimeError: under ``error_if_nonfinite``, on every rank, if the norm is not finite.
    """
    parameters = [parameters] if isinstance(parameters, Tensor) else list(parameters)
    norm = gradient_norm(parameters, group, norm_type)
    if error_if_nonfinite and not torch.isfinite(norm):
        raise RuntimeError(f"the gradients' norm of order {norm_type} is {norm.item()}: they cannot be clipped")
    scale = torch.clamp(max_norm / (norm + 1e-6), max=1.0)
    for parameter in parameters:
        if parameter.grad is not None:
            parameter.grad.mul_(scale.to(parameter.grad.device))
    return norm


def full_gradients(model: nn.Module) -> dict[str, Tensor]:
    """The gradients of the original model.

    Collective over the model's tensor-parallel group; every rank gets the result.

    Args:
        model: a parallel model after a backward pass, or a module that holds one.

    Returns:
        Whole gradients on the CPU under every name of their parameter; parameters without a gradient are absent.

    Raises:
        RuntimeError: if no parallel model is found.
    """
    group = model_group(model)
    parameters = dict(model.named_parameters(remove_duplicate=False))
    present: list[list[str]] = [[] for _ in range(group.size)]
    dist.all_gather_object(present, [n for n, p in parameters.items() if p.grad is not None], group=group.process_group)
    wanted = {name for names in present for name in names}
    gathered: dict[int, Tensor] = {}
    gradients: dict[str, Tensor] = {}
    for name, parameter in parameters.items():
        if name not in wanted:
            continue
        if id(parameter) not in gathered:
            gradient = parameter.grad if parameter.grad is not None else torch.zeros_like(parameter)
            meta = tensor_meta(parameter)
            whole = gradient.detach().clone() if meta is None else gather_parameter(gradient, meta, group)
            gathered[id(parameter)] = whole.cpu()
        gradients[name] = gathered[id(parameter)]
    return gradients


def _register(parameter: Tensor, hook: Callable[[Tensor], Tensor]) -> RemovableHandle:
    # A frozen tensor takes no hook, but keeps one it has.
    trainable = parameter.requires_grad
    parameter.requires_grad_(True)
    try:
        return parameter.register_hook(hook)
    finally:
        parameter.requires_grad_(trainable)


def _shared_elements(parameter: Tensor) -> dict[tuple[int, ...], Blocks]:
    """For every set of several ranks, the blocks of this rank's tensor that exactly these ranks hold."""
    meta = getattr(parameter, "meta", None)
    if not isinstance(meta, ParameterMeta):
        return {}
    if isinstance(meta.layout, Replicate):
        return {tuple(range(meta.ranks)): (tuple(slice(None) for _ in meta.shape),)} if meta.ranks > 1 else {}
    return {ranks: blocks for ranks, blocks in _blocks_by_owners(meta).items() if len(ranks) > 1}


def _blocks_by_owners(meta: ParameterMeta) -> dict[tuple[int, ...], Blocks]:
    """A sharded local tensor cut at every bound of its ownership maps, so that all owners of a block see the same one.

    (``ParameterMeta.blocks`` joins blocks that are neighbours in the local tensor; two owners with different tensors
    would join differently and their elements would not line up.)
    """
    if not isinstance(meta.layout, Shard):
        return {}
    pieces: list[list[tuple[slice, frozenset[int]]]] = []
    for dim, size in enumerate(meta.shape):
        ownership = meta.layout.ownership(dim)
        if ownership is None:
            pieces.append([(slice(0, size), frozenset(range(meta.ranks)))])
            continue
        rows: list[tuple[slice, frozenset[int]]] = []
        offset = 0
        for start, stop, ranks in ownership.owners:
            if meta.rank in ranks:
                rows.append((slice(offset, offset + stop - start), frozenset(ranks)))
                offset += stop - start
        pieces.append(rows)
    blocks: dict[tuple[int, ...], list[tuple[slice, ...]]] = {}
    for combination in product(*pieces):
        owners = frozenset.intersection(*(ranks for _, ranks in combination))
        blocks.setdefault(tuple(sorted(owners)), []).append(tuple(piece for piece, _ in combination))
    return {ranks: tuple(found) for ranks, found in blocks.items()}


def _counted_blocks(parameter: Tensor, group: TPGroup) -> Blocks:
    """The blocks of a local tensor that this rank counts: those of which it is the first owner."""
    meta = tensor_meta(parameter)
    if meta is None:
        return (tuple(slice(None) for _ in parameter.shape),) if group.rank == 0 else ()
    return tuple(
        block for ranks, blocks in _blocks_by_owners(meta).items() if ranks[0] == meta.rank for block in blocks
    )


def _subgroups(model: nn.Module, group: TPGroup) -> dict[tuple[int, ...], dist.ProcessGroup]:
    """A process group for every set of several ranks that share some element, whether or not this rank is among them.

    All processes make all groups in the same order, as ``torch.distributed.new_group`` demands. (Its local
    synchronization, where only a group's members take part, names a group by the number of groups a process has:
    members of different numbers of groups wait for each other under different names.)
    """
    metas = [meta for parameter in model.parameters() if (meta := tensor_meta(parameter)) is not None]
    sets = {ranks for meta in metas for ranks in _sets(meta)}
    parts = sorted(ranks for ranks in sets if len(ranks) < group.size)
    members = dist.get_process_group_ranks(group.process_group)
    groups = {tuple(range(group.size)): group.process_group}
    if not parts:
        return groups
    wanted = [tuple(sorted(members[rank] for rank in ranks)) for ranks in parts]
    if group.size < dist.get_world_size():
        everyone: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(everyone, wanted)
        made = {
            ranks: dist.new_group(list(ranks)) for ranks in sorted({ranks for theirs in everyone for ranks in theirs})
        }
    else:
        made = {ranks: dist.new_group(list(ranks)) for ranks in wanted}
    return groups | {ranks: made[world] for ranks, world in zip(parts, wanted, strict=True)}


def _sets(meta: ParameterMeta) -> set[tuple[int, ...]]:
    """Every set of several ranks that share some element of a sharded parameter."""
    dims = meta.layout.dims if isinstance(meta.layout, Shard) else ()
    owners = [[frozenset(ranks) for _, _, ranks in ownership.owners] for _, ownership in dims]
    sets = {frozenset.intersection(*combination) for combination in product(*owners)}
    return {tuple(sorted(ranks)) for ranks in sets if len(ranks) > 1}


def _sum_blocks(sums: list[tuple[Blocks, dist.ProcessGroup]], gradient: Tensor) -> Tensor:
    total = gradient.clone(memory_format=torch.contiguous_format)
    for blocks, process_group in sums:
        views = [total[block] for block in blocks]
        if len(views) == 1 and views[0].is_contiguous():
            dist.all_reduce(views[0], group=process_group)
            continue
        buffer = torch.cat([view.reshape(-1) for view in views])
        dist.all_reduce(buffer, group=process_group)
        for view, part in zip(views, buffer.split([view.numel() for view in views]), strict=True):
            view.copy_(part.view_as(view))
    return total
