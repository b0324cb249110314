"""Gradients of a parallel model: sums between ranks, norms, clipping, and the original model's gradients.

A parameter's layout says what its local gradients mean. An element that several ranks hold and use differently (a
``Replicate`` parameter, a unit that ranks share) has on each of them only a part of its gradient: the parts are
summed by a hook during the backward pass. After that every rank's gradient is the true one for the elements it holds,
and only quantities *over* a parameter, such as a norm, must count each element of the original model once.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Sequence
from itertools import product
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from lightning_autotp.layouts.types import Shard
from lightning_autotp.parameters.gathering import gather_to_cpu, model_group, tensor_meta
from lightning_autotp.parameters.local_blocks import counted_blocks, data_group, index, is_cut, plain
from lightning_autotp.parameters.meta import ParameterMeta
from lightning_autotp.ranks.group import TPGroup

Blocks = tuple[tuple[slice, ...], ...]
"""Index expressions of blocks of a local tensor."""


Hook = Callable[[Tensor], Tensor]
"""Takes what a backward pass contributes to a gradient, and returns what is to be added instead."""


def synchronize_gradients(model: nn.Module, group: TPGroup) -> list[RemovableHandle]:
    """Sum, in every backward pass, the gradients of elements that several ranks hold over exactly those ranks.

    Collective over ``group``, and so is every backward pass afterwards. Where some ranks, not all, share a unit, a
    process group is made for them: then every process of the job must make this call at the same time, whichever
    tensor-parallel group it is in. Call it once on a model whose parameters have their metas.

    The sum is a tensor hook: it acts on what each backward pass contributes, so accumulation over several passes stays
    right, and a tied parameter, whose uses autograd adds up before the hook, is summed once. A frozen parameter gets
    its hook too, for when it is thawed. ``model.autotp_gradient_sums`` keeps the hooks by the parameters' names: where
    FSDP2 has cut a parameter, :func:`~lightning_autotp.training.data_parallel.hook_gathered` hooks what it gathers.

    Every rank runs the same model, hence the hooks in the same order; within a parameter the sets of ranks come in
    ascending order, and each of a set's buffers lists its elements in the original tensor's order. So no two ranks
    wait for each other in different collectives.

    Returns:
        The hooks' handles.
    """
    groups = _subgroups(model, group)
    sums: dict[str, Hook] = {}
    handles: list[RemovableHandle] = []
    for name, parameter in model.named_parameters():
        shared = _shared_elements(parameter)
        if shared:
            parts = [(blocks, groups[ranks]) for ranks, blocks in sorted(shared.items())]
            sums[name] = functools.partial(_sum_blocks, parts)
            if not is_cut(parameter):
                handles.append(hook_gradient(parameter, sums[name]))
    model.autotp_gradient_sums = sums  # type: ignore[assignment]
    return handles


def average_gradients(model: nn.Module, group: dist.ProcessGroup) -> list[RemovableHandle]:
    """Average, in every backward pass, the gradients over the ranks that train on different data.

    Every backward pass is collective over ``group`` afterwards. What accumulates is the average of each pass.
    Parameters that FSDP2 has cut are left out: it averages them itself.

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

    return [hook_gradient(parameter, average) for parameter in model.parameters() if not is_cut(parameter)]


def gradient_norm(parameters: Tensor | Iterable[Tensor], group: TPGroup, norm_type: float = 2.0) -> Tensor:
    """The norm of the original model's gradient: every element counted once, whatever number of ranks hold it.

    Collective over ``group``, and over the data axis where FSDP2 has cut the parameters.

    Args:
        parameters: local parameters; those without a gradient are left out.
        group: the tensor-parallel group.
        norm_type: any positive number, or infinity.

    Returns:
        A scalar, float32 or wider, the same on every rank.

    Raises:
        ValueError: if ``norm_type`` is not positive.
    """
    parameters = [parameters] if isinstance(parameters, Tensor) else list(parameters)
    return torch.linalg.vector_norm(_norms(parameters, group, norm_type), norm_type)


def grad_norms(module: nn.Module, norm_type: float | int | str = 2.0, group_separator: str = "/") -> dict[str, Tensor]:
    """The norm of every parameter's gradient in the original model, and of all together.

    Collective over the model's tensor-parallel group, and over the data axis where FSDP2 has cut the parameters. In
    one process it is ``lightning.pytorch.utilities.grad_norm``, with the same names: made to be logged, on every rank,
    in ``on_before_optimizer_step``.

    Args:
        module: a parallel model after a backward pass, or a module that holds one.
        norm_type: any positive number, or infinity.
        group_separator: stands between the kind of norm and the parameter's name.

    Returns:
        Scalars, float32 or wider, the same on every rank. Parameters without a gradient are absent.

    Raises:
        ValueError: if ``norm_type`` is not positive.
        RuntimeError: if no parallel model is found.
    """
    norm_type = float(norm_type)
    names, parameters = zip(*module.named_parameters(), strict=True)
    norms = _norms(parameters, model_group(module), norm_type)
    found = {
        f"grad_{norm_type}_norm{group_separator}{name}": norm
        for name, parameter, norm in zip(names, parameters, norms, strict=True)
        if parameter.grad is not None
    }
    if found:
        found[f"grad_{norm_type}_norm_total"] = torch.linalg.vector_norm(norms, norm_type)
    return found


def clip_gradients_norm(
    parameters: Tensor | Iterable[Tensor],
    group: TPGroup,
    max_norm: float,
    norm_type: float = 2.0,
    error_if_nonfinite: bool = False,
) -> Tensor:
    """Scale the gradients so that the norm of the original model's gradient is at most ``max_norm``.

    Collective over ``group``. Same as ``torch.nn.utils.clip_grad_norm_`` in one process.

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
            plain(parameter.grad).mul_(scale.to(parameter.grad.device))
    return norm


def clip_gradients_value(parameters: Tensor | Iterable[Tensor], clip_value: float) -> None:
    """Clamp every element of the gradients to ``[-clip_value, clip_value]``. Not collective.

    Same as ``torch.nn.utils.clip_grad_value_``, also where FSDP2 has cut some of the parameters and not others.
    """
    for parameter in [parameters] if isinstance(parameters, Tensor) else parameters:
        if parameter.grad is not None:
            plain(parameter.grad).clamp_(-clip_value, clip_value)


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
            gathered[id(parameter)] = gather_to_cpu(gradient, tensor_meta(parameter), group)
        gradients[name] = gathered[id(parameter)]
    return gradients


def _norms(parameters: Sequence[Tensor], group: TPGroup, norm_type: float) -> Tensor:
    """The norms of the original model's gradients, ``[parameters]``, zero for those without one. Collective."""
    if not norm_type > 0:
        raise ValueError(f"norm_type is {norm_type}; a gradient norm needs a positive one or infinity")
    device = parameters[0].device if parameters else torch.device("cpu")
    dtype = functools.reduce(torch.promote_types, (parameter.dtype for parameter in parameters), torch.float32)
    spread = next((found for parameter in parameters if (found := data_group(parameter)) is not None), None)
    # What FSDP2 does not manage is in every copy of the model: the first one counts it.
    is_first_copy = spread is None or dist.get_rank(spread) == 0
    norms = torch.zeros(len(parameters), dtype=dtype, device=device)
    for place, parameter in enumerate(parameters):
        if parameter.grad is None or not (is_first_copy or is_cut(parameter)):
            continue
        gradient = plain(parameter.grad)
        blocks = [gradient[index(block.local)] for block in counted_blocks(parameter, group)]
        parts = [torch.linalg.vector_norm(block, norm_type, dtype=dtype) for block in blocks if block.numel()]
        if parts:
            norms[place] = torch.linalg.vector_norm(torch.stack(parts), norm_type)
    # The ranks' norms are gathered, not reduced: every rank computes the same bits, and a NaN stays one.
    for process_group in (group.process_group, spread):
        if process_group is not None:
            everyone = [torch.empty_like(norms) for _ in range(dist.get_world_size(process_group))]
            dist.all_gather(everyone, norms, group=process_group)
            norms = torch.linalg.vector_norm(torch.stack(everyone), norm_type, dim=0)
    return norms


def hook_gradient(parameter: Tensor, hook: Hook) -> RemovableHandle:
    """Apply ``hook`` in every backward pass; also for a parameter that is frozen now."""
    # A frozen tensor takes no hook, but keeps one it has.
    trainable = parameter.requires_grad
    parameter.requires_grad_(True)
    try:
        return parameter.register_hook(hook)
    finally:
        parameter.requires_grad_(trainable)


def _shared_elements(parameter: Tensor) -> dict[tuple[int, ...], Blocks]:
    """For every set of several ranks, the blocks of this rank's tensor that exactly these ranks hold and must sum."""
    meta = getattr(parameter, "meta", None)
    shared: dict[tuple[int, ...], Blocks] = {}
    for block in meta.grad_sync if isinstance(meta, ParameterMeta) else ():
        shared[block.ranks] = (*shared.get(block.ranks, ()), index(block.local))
    return shared


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
