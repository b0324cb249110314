"""Gradients of a parallel model are summed over the ranks in every backward pass.

A parameter's layout says what its local gradients mean. An element that several ranks hold and use differently (a
``Replicate`` parameter, a unit that ranks share) has on each of them only a part of its gradient: the parts are
summed, those of whole parameters in buckets at the end of the backward pass
(:mod:`~lightning_autotp.gradients.buckets`), the others by a hook during it. After that every rank's gradient is the
true one for the elements it holds, and only quantities *over* a parameter, such as a norm, must count each element of
the original model once (:mod:`~lightning_autotp.gradients.norms`).

A hook is on a parameter object. Where another one takes its place, or the model is copied, the new one gets the hook
before it is used (:mod:`~lightning_autotp.guard.guard`).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from itertools import product

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils.hooks import RemovableHandle

from lightning_autotp.gradients.buckets import BucketedSum, GradientBuckets, as_summed
from lightning_autotp.gradients.linear_maps import linear, same
from lightning_autotp.gradients.parts import Mark, marked_like
from lightning_autotp.layouts.blocks import index
from lightning_autotp.layouts.types import Shard
from lightning_autotp.parameters.local_blocks import is_cut
from lightning_autotp.parameters.meta import ParameterMeta
from lightning_autotp.parameters.part import PartOf
from lightning_autotp.parameters.state import (
    Hook,
    ParallelState,
    ParameterPlace,
    dotted,
    parallel_models,
    parallel_state,
)
from lightning_autotp.private.torch_private import (
    accumulated_hooks,
    gradient_hooks,
    hook_tables,
    parameters_of,
    running_data_parallel,
)
from lightning_autotp.ranks.agreement import gather_objects
from lightning_autotp.ranks.group import TPGroup, new_group

Blocks = tuple[tuple[slice, ...], ...]
"""Index expressions of blocks of a local tensor."""


@dataclass(frozen=True)
class GradientSum:
    """Adds up blocks of a parameter's gradient, each over the ranks that share it; a tensor hook, and plain data.

    Attributes:
        parts: blocks, and the group that sums them, in the order in which all ranks do it.
        is_replicated: whether all ranks hold the whole parameter. What is computed from the sum is then the same on
            every rank (Invariant); otherwise it is of a part (Shard), and the parts of owners add up once more.
        name: the parameter's first name.
        buckets: where the gradient of a parameter that all ranks hold waits until it is summed with others'.
    """

    parts: tuple[tuple[Blocks, TPGroup], ...]
    is_replicated: bool
    name: str
    buckets: GradientBuckets = field(compare=False)

    def of(self, parameter: Tensor) -> Hook:
        """This sum as the hook of one parameter: at the end of a pass where that is possible."""
        if not self.is_replicated or not parameter.is_leaf:
            return self
        ((_, group),) = self.parts
        return BucketedSum(parameter, self.name, group, self, self.buckets, (_Average,))

    def __call__(self, gradient: Tensor) -> Tensor:
        """What the ranks' gradients add up to. Collective."""
        return linear(gradient, self._sum, same if self.is_replicated else self._sum)

    def _sum(self, gradient: Tensor) -> Tensor:
        total = as_summed(gradient.clone(memory_format=torch.contiguous_format))
        for blocks, group in self.parts:
            views = [total[block] for block in blocks]
            if len(views) == 1 and views[0].is_contiguous():
                dist.all_reduce(views[0], group=group.process_group)
                continue
            buffer = torch.cat([view.reshape(-1) for view in views])
            dist.all_reduce(buffer, group=group.process_group)
            for view, part in zip(views, buffer.split([view.numel() for view in views]), strict=True):
                view.copy_(part.view_as(view))
        return total.to(gradient.dtype)


def synchronize_gradients(model: nn.Module, only: Collection[str] | None = None) -> list[RemovableHandle]:
    """Sum, in every backward pass, the gradients of elements that several ranks hold over exactly those ranks.

    Collective over the model's group, and so is every backward pass afterwards. Where some ranks, not all, share a
    unit, a process group is made for them: then every process of the job must make this call at the same time,
    whichever tensor-parallel group it is in. Call it once on a model that carries its state.

    Only what a backward pass contributes is summed, so accumulation over several passes stays right, and a tied
    parameter, whose uses autograd adds up before the hook, is summed once. A frozen parameter gets its hook too, for
    when it is thawed. ``model.autotp.gradient_sums`` keeps the sums by the parameters' names: where FSDP2 has cut a
    parameter, :func:`~lightning_autotp.gradients.data_parallel.hook_gathered` hooks what it gathers.

    Every rank runs the same model, hence the hooks in the same order; within a parameter the sets of ranks come in
    ascending order, and each of a set's buffers lists its elements in the original tensor's order. So no two ranks
    wait for each other in different collectives.

    Args:
        model: a parallel model.
        only: the first names of parameters that have become others since the call for all of them; only these get new
            hooks then.

    Returns:
        The hooks' handles.
    """
    state = parallel_state(model)
    places = state.places(model)
    if only is not None:
        places = [place for place in places if place.meta.name in only]
        for name in only:
            state.gradient_sums.pop(name, None)
            state.gradient_hooks.pop(name, None)
    groups = _subgroups([place.meta for place in places], state.group)
    buckets = next(iter(_buckets(state)), GradientBuckets())
    hooks: dict[str, GradientHooks] = {}
    for meta in {place.meta.name: place.meta for place in places}.values():
        shared = _shared_elements(meta)
        if shared:
            parts = tuple((blocks, groups[ranks]) for ranks, blocks in sorted(shared.items()))
            state.gradient_sums[meta.name] = GradientSum(parts, not isinstance(meta.layout, Shard), meta.name, buckets)
        if shared or meta.is_parallel:
            mark = _mark(meta, state.group) if meta.is_parallel else None
            hooks[meta.name] = GradientHooks(state.gradient_sums.get(meta.name), mark)
    handles: list[RemovableHandle] = []
    for parameter, meta in {place.parameter: place.meta for place in places}.items():  # tied ones once
        if is_cut(parameter):
            handles.append(_hook_accumulated(parameter, _mark(meta, state.group).accumulated))
        elif meta.name in hooks:
            state.gradient_hooks[meta.name] = hooks[meta.name]
            handles += hooks[meta.name](parameter)
    return handles


def _mark(meta: ParameterMeta, group: TPGroup) -> Mark:
    return Mark(PartOf.of(meta, group))


@contextmanager
def postponed_sums(module: nn.Module) -> Iterator[None]:
    """Within it, backward passes leave the gradients of parameters that every rank holds unsummed. Not collective.

    The first backward pass after it sums them, with all that was accumulated, or code that reads one of them before.
    For the passes of a gradient accumulation but the last one.

    Args:
        module: a parallel model, or a module that holds some.
    """
    with ExitStack() as stack:
        for buckets in {found for _, state in parallel_models(module) for found in _buckets(state)}:
            stack.enter_context(buckets.postponed())
        yield


def _buckets(state: ParallelState) -> set[GradientBuckets]:
    """Where gradients of a model wait."""
    return {found.buckets for found in state.gradient_sums.values() if isinstance(found, GradientSum)}


def average_gradients(
    model: nn.Module, group: dist.ProcessGroup, besides: Collection[Tensor] = ()
) -> list[RemovableHandle]:
    """Average, in every backward pass, the gradients over the ranks that train on different data.

    Every backward pass is collective over ``group`` afterwards. What accumulates is the average of each pass.
    Parameters that FSDP2 has cut are left out: it averages them itself.

    Args:
        model: what has the parameters; the ranks of ``group`` hold the same part of it.
        group: the data-parallel group.
        besides: parameters whose gradients are averaged already.

    Returns:
        The hooks' handles.
    """
    size = dist.get_world_size(group)
    if size == 1:
        return []

    average = _Average(group, size)
    parameters = [parameter for parameter in model.parameters() if not is_cut(parameter)]
    return [hook_gradient(parameter, average) for parameter in parameters if parameter not in besides]


class _Average:
    """Tensor hook: the mean over the ranks that train on different data. Linear, of a term of a sum as of the sum."""

    def __init__(self, group: dist.ProcessGroup, size: int) -> None:
        self._group, self._size = group, size

    def __call__(self, gradient: Tensor) -> Tensor:
        return marked_like(linear(gradient.as_subclass(Tensor), self._mean, self._mean), gradient)

    def _mean(self, gradient: Tensor) -> Tensor:
        mean = as_summed(gradient.clone(memory_format=torch.contiguous_format)).div_(self._size)
        dist.all_reduce(mean, group=self._group)
        return mean.to(gradient.dtype)


@dataclass(frozen=True)
class GradientHooks:
    """What is done to a parameter's gradients in every backward pass; plain data.

    Attributes:
        total: sums what several ranks hold, if they do.
        mark: makes a part represent the whole.
    """

    total: Hook | None
    mark: Mark | None

    def __call__(self, parameter: Tensor) -> list[RemovableHandle]:
        """Put those hooks on a parameter that it does not have yet."""
        is_parameter = isinstance(parameter, nn.Parameter)  # torch.func.functional_call may be given any tensor
        if not is_parameter and not parameter.requires_grad:
            return []
        total = self.total.of(parameter) if isinstance(self.total, GradientSum) else self.total
        wanted: list[Hook] = [total] if total else []
        afterwards: list[Callable[[Tensor], None]] = []
        if isinstance(total, BucketedSum):
            afterwards.append(total.buckets.accumulated)
        if self.mark is not None and is_parameter:
            wanted.append(self.mark.contribution)
            afterwards.append(self.mark.accumulated)
        there, there_afterwards = gradient_hooks(parameter), accumulated_hooks(parameter)
        handles = [hook_gradient(parameter, hook) for hook in wanted if hook not in there]
        handles += [_hook_accumulated(parameter, hook) for hook in afterwards if hook not in there_afterwards]
        return handles


def hook_gradient(parameter: Tensor, hook: Hook) -> RemovableHandle:
    """Apply ``hook`` in every backward pass; also for a parameter that is frozen now."""
    with _trainable(parameter):
        return parameter.register_hook(hook)


def _hook_accumulated(parameter: Tensor, hook: Callable[[Tensor], None]) -> RemovableHandle:
    with _trainable(parameter):
        handle: RemovableHandle = parameter.register_post_accumulate_grad_hook(hook)
        return handle


@contextmanager
def _trainable(parameter: Tensor) -> Iterator[None]:
    """A frozen tensor takes no hook, but keeps one it has."""
    trainable = parameter.requires_grad
    parameter.requires_grad_(True)
    try:
        yield
    finally:
        parameter.requires_grad_(trainable)


def keep_hooked(parameter: Tensor, hook: Hook | None) -> None:
    """See to it that a parameter, which may not be the one of before, has its hook, if there is one."""
    GradientHooks(hook, None)(parameter)


def mark_gradients(parameters: Iterable[Tensor]) -> None:
    """Let gradients that code has put on parameters represent the whole, as those of backward passes do."""
    for parameter in parameters:
        if type(parameter.grad) in (Tensor, DTensor):
            _, after = hook_tables([parameter])
            for mark in (getattr(hook, "__self__", None) for hook in (after or {}).values()):
                if isinstance(mark, Mark):
                    mark.given(parameter)


def hook_parameters(model: nn.Module, places: Iterable[ParameterPlace]) -> None:
    """Put the hooks that their gradients need on a model's parameters, also on those that took others' places."""
    state = parallel_state(model)
    for place in places:
        if (hooks := state.gradient_hooks.get(place.meta.name)) is not None:
            hooks(place.parameter)


def places_at(owners: Iterable[nn.Module], model: nn.Module) -> Iterator[ParameterPlace]:
    """The parameters that modules in a parallel model have themselves."""
    state = parallel_state(model)
    for owner in owners:
        path = state.path(owner)
        for attribute, parameter in parameters_of(owner).items():
            name = "" if path is None or parameter is None else dotted(path, attribute)
            if name in state.metas:
                yield ParameterPlace(name, owner, attribute, state.metas[name])


def sum_at_once_in_ddp(model: nn.Module) -> None:
    """Under DistributedDataParallel, whose own sums come when a gradient is there, no gradient waits for others.

    Raises:
        RuntimeError: if it averages the gradients of ranks that have different parts of the model.
    """
    around = running_data_parallel()
    if around is None:
        return
    state = parallel_state(model)
    copies = dist.get_process_group_ranks(around.process_group)
    if len({*copies} & {*dist.get_process_group_ranks(state.group.process_group)}) > 1:
        raise RuntimeError(
            f"the parallel {type(model).__name__} is inside a DistributedDataParallel over ranks {copies}, which"
            " have different parts of it: that copies rank 0's part to all of them and averages gradients of different"
            " tensors. transformers' Trainer, TRL's trainers and accelerate wrap a model like this when several"
            " processes run. For a Trainer of transformers or TRL, derive a class from"
            " lightning_autotp.AutoTPTrainerMixin and the Trainer; elsewhere train it with"
            ' strategy="autotp" of Lightning\'s Trainer or of Fabric, or in a loop of your own. For several copies of'
            " the model: AutoTPStrategy(data_parallel_size=...), parallelize(data_mesh=...), or a process_group= of"
            " DistributedDataParallel whose ranks have the same part"
        )
    for buckets in _buckets(state):
        buckets.at_once = True


def _shared_elements(meta: ParameterMeta) -> dict[tuple[int, ...], Blocks]:
    """For every set of several ranks, the blocks of this rank's tensor that exactly these ranks hold and must sum."""
    shared: dict[tuple[int, ...], Blocks] = {}
    for block in meta.grad_sync:
        shared[block.ranks] = (*shared.get(block.ranks, ()), index(block.local))
    return shared


def _subgroups(metas: Iterable[ParameterMeta], group: TPGroup) -> dict[tuple[int, ...], TPGroup]:
    """A group for every set of several ranks that share some element, whether or not this rank is among them.

    All processes make all groups in the same order, as ``torch.distributed.new_group`` demands. (Its local
    synchronization, where only a group's members take part, names a group by the number of groups a process has:
    members of different numbers of groups wait for each other under different names.)
    """
    sets = {ranks for meta in metas for ranks in _sets(meta)}
    parts = sorted(ranks for ranks in sets if len(ranks) < group.size)
    members = dist.get_process_group_ranks(group.process_group)
    groups = {tuple(range(group.size)): group}
    if not parts:
        return groups
    wanted = [tuple(sorted(members[rank] for rank in ranks)) for ranks in parts]
    if group.size < dist.get_world_size():
        everyone = gather_objects(wanted, None)
        made = {ranks: new_group(ranks) for ranks in sorted({ranks for theirs in everyone for ranks in theirs})}
    else:
        made = {ranks: new_group(ranks) for ranks in wanted}
    own = [(ranks, made[world]) for ranks, world in zip(parts, wanted, strict=True) if group.rank in ranks]
    return groups | {ranks: TPGroup.of(process_group) for ranks, process_group in own}


def _sets(meta: ParameterMeta) -> set[tuple[int, ...]]:
    """Every set of several ranks that share some element of a sharded parameter."""
    if not isinstance(meta.layout, Shard):
        return set()
    owners = [[frozenset(ranks) for _, _, ranks in ownership.owners] for _, ownership in meta.layout.dims]
    sets = {frozenset.intersection(*combination) for combination in product(*owners)}
    return {tuple(sorted(ranks)) for ranks in sets if len(ranks) > 1}
