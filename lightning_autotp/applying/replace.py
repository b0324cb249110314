"""Executes a plan: the model becomes this rank's smaller model. Decides nothing."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from lightning_autotp.applying.changed_calls import CallChanges, CallMismatch, LocalForward, number
from lightning_autotp.applying.lengths import Lengths
from lightning_autotp.capture.nested import NoSuchPlace, replaced_at, steps_of
from lightning_autotp.capture.tracer import torch_layer
from lightning_autotp.capture.whole_indices import part_of_object, with_whole_indices
from lightning_autotp.layouts.dims import UnknownSize
from lightning_autotp.layouts.names import join_names
from lightning_autotp.layouts.places import CallSite, member
from lightning_autotp.layouts.plan import ConversionPlan, ImplementationPlan, Plan, RunPlan, SizePlan
from lightning_autotp.layouts.types import Invariant, Layout, Replicate, Shard, local_shape
from lightning_autotp.parallel.collectives import convert, gather_lengths
from lightning_autotp.parallel.float8 import Float8Linear
from lightning_autotp.parallel.head import VocabParallelHead, compute_when_needed
from lightning_autotp.parallel.implementations import IMPLEMENTATIONS
from lightning_autotp.parallel.linear import ColumnParallelLinear
from lightning_autotp.parallel.local_parameters import LocalParameters, localize_parameter
from lightning_autotp.parallel.logits import VocabParallelLogits
from lightning_autotp.parallel.overlap import note_gathered, replicate
from lightning_autotp.parameters.state import ParallelState
from lightning_autotp.private.torch_private import ModuleHooks, has_values, parameters_of
from lightning_autotp.quantized.float8 import float8_of, note_float8
from lightning_autotp.ranks.group import TPGroup
from lightning_autotp.solving.implementations import Implementation
from lightning_autotp.solving.planned import PlanMismatch


def apply_plan(model: nn.Module, plan: Plan, group: TPGroup) -> ParallelState:
    """Make ``model`` the local model of rank ``group.rank``, in place: it carries its state. No communication.

    Parameters on the meta device stay there with their local shape; real ones are sliced.

    Returns:
        The state, ``model.autotp`` from now on.

    Raises:
        PlanMismatch: if the plan does not fit the model or the group.
        ValueError: if another model that was made local has a parameter of this one.
    """
    if plan.ranks != group.size:
        raise PlanMismatch(f"the plan is for {plan.ranks} tensor-parallel ranks, the group has {group.size}")
    _check_parameters(model, plan)
    _own_parameters(model)
    note_float8(model)
    state = ParallelState.of(model, plan, group)
    layouts = {name: meta.layout for name, meta in state.metas.items()}
    local: LocalParameters = {}
    for use in plan.implementations:
        if use.call is None:
            _make_parallel(model, use, layouts, group, local)
    for name, _ in list(model.named_parameters(remove_duplicate=False)):
        meta = state.metas[name]
        path, _, attribute = name.rpartition(".")
        parameter = parameters_of(model.get_submodule(path))[attribute]  # local already, if its module has two paths
        if isinstance(meta.layout, Shard) and parameter is not None and tuple(parameter.shape) != meta.local_shape:
            (dim, ownership), *_ = meta.layout.dims
            localize_parameter(model.get_submodule(path), attribute, dim, ownership, group, local)
    for module in model.modules():
        if type(module) is nn.Linear and float8_of(module) is not None:
            Float8Linear.convert(module, group)
    for size in plan.sizes:
        if size.call is None:
            set_size(model, size, size.local[group.rank])
    lengths = Lengths()
    _change_calls(model, plan, group, lengths)
    for conversion in plan.conversions:
        if conversion.call is None:
            if conversion.view and conversion.side == "out" and not conversion.key:
                _show_whole(model.get_submodule(conversion.module), conversion)
            change = BoundaryConversion(conversion, group, lengths)
            hook_boundary(model, change)
            if conversion.side == "in":
                change.layers = tuple(_column_layers(model.get_submodule(conversion.module)))
    model.autotp = state  # type: ignore[assignment]
    return state


def _column_layers(module: nn.Module) -> Iterator[ColumnParallelLinear]:
    """The layers in a module that may take its input, and whose weights' gradients may be computed after its own."""
    layers = (inner for inner in module.modules() if isinstance(inner, ColumnParallelLinear))
    return (layer for layer in layers if layer.input_is_replicated and float8_of(layer) is None)


def hook_boundary(model: nn.Module, conversion: BoundaryConversion, *, prepend: bool = False) -> RemovableHandle:
    """Let a tensor change its layout where it enters or leaves a module; ``prepend``: before other hooks see it."""
    module = model.get_submodule(conversion.plan.module)
    if conversion.plan.side == "in":
        return module.register_forward_pre_hook(conversion.before, with_kwargs=True, prepend=prepend)
    return module.register_forward_hook(conversion.after, prepend=prepend)


def follow_conversions(model: nn.Module, plan: Plan) -> None:
    """Let the conversions in a local model be those of another plan, which changes layouts at the same places."""
    planned = {_place(conversion): conversion for conversion in plan.conversions}
    for module in model.modules():
        hooks = ModuleHooks(module)
        changes: list[Any] = [*hooks.before.values(), *hooks.after.values()]
        if (forward := LocalForward.of(module)) is not None:
            changes += [change for at in forward.changes.values() for _, change in (*at.arguments, *at.results)]
        for change in changes:
            conversion = getattr(change, "__self__", None)
            if isinstance(conversion, BoundaryConversion):
                conversion.plan = planned[_place(conversion.plan)]


def _place(conversion: ConversionPlan) -> tuple[Any, ...]:
    return conversion.module, conversion.side, conversion.key, conversion.call, conversion.view


def _change_calls(model: nn.Module, plan: Plan, group: TPGroup, lengths: Lengths) -> None:
    """Conversions, sizes and random numbers at calls inside modules."""
    changes: dict[str, dict[CallSite, CallChanges]] = {}

    def at(module: str, call: CallSite) -> CallChanges:
        return changes.setdefault(module, {}).setdefault(call, CallChanges())

    for conversion in plan.conversions:
        if conversion.call is not None:
            here = at(conversion.module, conversion.call)
            here.converts = True
            places = here.arguments if conversion.side == "argument" else here.results
            places.append((int(conversion.key), BoundaryConversion(conversion, group, lengths).convert))
    for size in plan.sizes:
        if size.call is not None:
            local = number(size.whole, size.local[group.rank])
            at(size.module, size.call).arguments.append((int(size.attribute), local))
    for draw in plan.draws:
        at(draw.module, draw.call).draws_in = group
    for read in plan.indices:
        here, runs = at(read.module, read.call), read.held[group.rank]
        if read.attribute:
            here.arguments.append((read.leaf, partial(part_of_object, read.place, runs, read.attribute)))
        else:
            here.arguments.append((read.leaf, partial(with_whole_indices, read.place, runs)))
    for use in plan.implementations:
        if use.call is not None and (run := _implementation(use).run) is not None:
            here = at(use.module, use.call)
            here.converts, here.run = True, partial(run, use, group)
    updated: dict[tuple[str, CallSite], list[ConversionPlan]] = {}
    for conversion in plan.conversions:
        if conversion.call is not None and conversion.updated:
            updated.setdefault((conversion.module, conversion.call), []).append(conversion)
    for (path, call), conversions in updated.items():
        at(path, call).update = UpdatedArguments(conversions, model.get_submodule(path), group).gather
    for path, calls in changes.items():
        module = model.get_submodule(path)
        LocalForward(module, path, calls).take_over()
    allow_runs(model, plan.runs)


def allow_runs(model: nn.Module, runs: Iterable[RunPlan]) -> None:
    """Let modules of a local model make such runs, too: they have been traced."""
    for run in runs:
        forward = LocalForward.of(model.get_submodule(run.module))
        if forward is not None:
            forward.allow(run.sites)


def _check_parameters(model: nn.Module, plan: Plan) -> None:
    """Compare the model's parameters with the plan's."""
    found = {name: tuple(parameter.shape) for name, parameter in model.named_parameters(remove_duplicate=False)}
    shapes = {name: parameter.shape for parameter in plan.parameters for name in parameter.names}
    strangers = sorted(found.keys() ^ shapes.keys())
    if strangers:
        raise PlanMismatch(f"the plan was made for another model: they differ in {join_names(strangers)}")
    for name, shape in found.items():
        if shape != shapes[name]:
            raise PlanMismatch(f"{name} has shape {list(shape)}, the plan says {list(shapes[name])}")


def _own_parameters(model: nn.Module) -> None:
    """Note on the original parameters which model they went into, and refuse those that went into another one."""
    for name, parameter in model.named_parameters():
        if (owner := vars(parameter).get("autotp_owner")) is not None:
            raise ValueError(
                f"{name} of this {type(model).__name__} is also a parameter of the {owner} that was made parallel"
                " before, which has a part of it now: they would not be tied any more. Make one module that holds both"
                " models parallel, or give each a parameter of its own (copy.deepcopy)"
            )
    for parameter in model.parameters():
        vars(parameter)["autotp_owner"] = type(model).__name__


def _make_parallel(
    model: nn.Module,
    use: ImplementationPlan,
    layouts: Mapping[str, Layout],
    group: TPGroup,
    local: LocalParameters,
) -> None:
    """Turn a layer into its parallel implementation."""
    module = model.get_submodule(use.module)
    entry = _implementation(use)
    layout = use.layout if entry.is_module else layouts.get(member(use.module, entry.operand))
    if not entry.fits(layout) or entry.build is None:
        raise PlanMismatch(
            f"{use.module} is planned as {use.name}-parallel, but its {entry.operand} lies over the ranks as {layout}"
        )
    if entry.layer and torch_layer(module) != entry.layer:
        raise PlanMismatch(f"{use.module} is a {type(module).__name__}: it cannot become {use.name}-parallel")
    entry.build(module, use, layout, group, local)


def _implementation(use: ImplementationPlan) -> Implementation:
    try:
        return IMPLEMENTATIONS[use.name]
    except KeyError as error:
        raise PlanMismatch(f"{use.module}: {error.args[0]}") from None


def set_size(model: nn.Module, size: SizePlan, value: int) -> None:
    """Set a module's integer attribute, or the entry of its own copy of its config.

    Raises:
        PlanMismatch: if the attribute is missing or has another value than the plan was made for.
    """
    module = model.get_submodule(size.module)
    if head := size.attribute.rpartition(".")[0]:
        setattr(module, head, copy.copy(getattr(module, head)))
    owner, name = _owner(module, size)
    if getattr(owner, name, None) != size.whole:
        raise PlanMismatch(
            f"{size.module}.{size.attribute} is {getattr(owner, name, None)}, the plan says {size.whole}"
        )
    setattr(owner, name, value)


def reset_size(model: nn.Module, size: SizePlan) -> None:
    """Undo :func:`set_size`."""
    owner, name = _owner(model.get_submodule(size.module), size)
    setattr(owner, name, size.whole)


def _owner(module: nn.Module, size: SizePlan) -> tuple[Any, str]:
    """What has the integer, the module or its config, and its name there."""
    head, _, name = size.attribute.rpartition(".")
    return getattr(module, head) if head else module, name


def _show_whole(module: nn.Module, conversion: ConversionPlan) -> None:
    """Let the layer whose output is shown whole leave it uncomputed if it can; it shows what its weight is."""
    compute_when_needed(module)
    shown = [owned for _, owned in conversion.target.dims] if isinstance(conversion.target, Shard) else []
    if isinstance(module, VocabParallelHead) and shown != [module.ownership]:
        raise PlanMismatch(
            f"{conversion.module} is planned to show {conversion.target}, but the vocabulary of its weight lies over"
            f" the ranks as {module.ownership}"
        )


class UpdatedArguments:
    """Whole arguments of a call, such as running statistics, of which the call writes this rank's parts in place.

    Args:
        conversions: of the whole arguments to the parts.
        module: whose code makes the call.
        group: the ranks.
    """

    def __init__(self, conversions: Iterable[ConversionPlan], module: nn.Module, group: TPGroup) -> None:
        self.leaves: dict[Shard, list[int]] = {}  # by the layout of several such tensors, stacked
        for conversion in conversions:
            assert isinstance(conversion.target, Shard)
            stacked = Shard(tuple((dim + 1, owned) for dim, owned in conversion.target.dims))
            self.leaves.setdefault(stacked, []).append(int(conversion.key))
        self.module, self.group = module, group
        self.only_in_training = torch_layer(module) != ""  # torch's own layers leave them as they are in eval mode

    @torch.no_grad()
    def gather(self, whole: Sequence[Any], parts: Sequence[Any]) -> None:
        """Bring what the ranks' calls have written into the whole tensors. Collective.

        Args:
            whole: the leaves of the call's arguments as the module's code gave them.
            parts: the same with this rank's parts, after the call.
        """
        if self.only_in_training and not self.module.training:
            return
        for stacked, leaves in self.leaves.items():
            written = [leaf for leaf in leaves if whole[leaf] is not None and has_values(whole[leaf])]
            if not written:
                continue
            together = convert(torch.stack([parts[leaf] for leaf in written]), stacked, Invariant(), self.group)
            for leaf, gathered in zip(written, together.unbind(), strict=True):
                whole[leaf].copy_(gathered)


class BoundaryConversion:
    """A hook that changes one tensor's layout where it enters or leaves a module. Collective.

    Args:
        plan: the change.
        group: the ranks.
        lengths: of the axes that this one and others in the same call shard and gather; none are known by default.

    Attributes:
        layers: column-parallel layers that may take the tensor, if it becomes Replicate: the sum of its gradient
            overlaps with their weights' gradients.
    """

    def __init__(self, plan: ConversionPlan, group: TPGroup, lengths: Lengths | None = None) -> None:
        self.plan, self.group, self.lengths = plan, group, lengths or Lengths()
        self.steps = steps_of(plan.key)
        self.layers: tuple[ColumnParallelLinear, ...] = ()

    def convert(self, tensor: Any) -> Any:
        """The tensor in its new layout, or shown as if whole; ``None`` where a call leaves it out (a mask)."""
        if tensor is None and self.plan.call is not None:
            return None
        if not isinstance(tensor, Tensor):
            raise PlanMismatch(
                f"{self} expects a tensor at {self.plan.key or 'its output'}, found {type(tensor).__name__}"
            )
        if isinstance(tensor, VocabParallelLogits):  # of a head, which shows them so itself
            if self.plan.view:
                return tensor
            tensor = tensor.local
        if self.plan.view and isinstance(self.plan.target, Shard):
            # Of tokens this batch may have more or fewer than the planned one.
            shown = self._for_this_batch(tensor)[0] if self.plan.target.grows else self.plan.target
            assert isinstance(shown, Shard)
            return VocabParallelLogits(tensor, shown, self.group)
        if not tensor.requires_grad and not has_values(tensor) and self._is_local(tensor):
            return tensor  # in a trace that looks for sizes: the comparison tells that nothing was converted here
        source, target = self._for_this_batch(tensor)
        if isinstance(source, Invariant | Shard) and isinstance(target, Replicate):
            result = replicate(tensor, self.group, self.layers, source)
        else:
            result = convert(tensor, source, target, self.group)
        shards_tokens = isinstance(self.plan.source, Shard) and self.plan.source.grows
        if shards_tokens and isinstance(source, Shard) and (self.layers or self.plan.side != "in"):
            note_gathered(result, tensor, source, self.group)
        # In memory of its own, where code changes it in place: autograd refuses that for another's view.
        return result.clone() if self.plan.overwritten and has_values(result) else result

    def _for_this_batch(self, tensor: Tensor) -> tuple[Layout, Layout]:
        """The planned layouts, where the sharded dim (heads of every token, say) is as long as this batch makes it."""
        source, target = self.plan.source, self.plan.target
        is_sharded = isinstance(source, Shard)  # already: what is shown whole is the same before and after
        shard = source if is_sharded else target
        if not isinstance(shard, Shard) or tensor.dim() <= shard.dims[0][0]:
            return source, target
        (dim, ownership), rank = shard.dims[0], self.group.rank
        found = tensor.shape[dim]
        planned = ownership.local_size(rank) if is_sharded else ownership.size
        axis = shard.cuts[0].grown_axis if len(shard.cuts) == 1 else None
        if len(shard.cuts) != 1 or (
            axis is None and found == planned and (not has_values(tensor) or shard.cuts[0].is_told_by_one)
        ):
            return source, target
        try:
            cut = shard.cuts[0]
            if not is_sharded:
                units = cut.units_of(found)
                now = cut.of_units(units)
                if axis is not None:
                    self.lengths.note(axis, units)
            elif axis is not None and (whole := self.lengths.whole(axis)) is not None:
                now = cut.of_units(whole)
            elif not has_values(tensor) and found == planned and self.plan.side == "out":
                now = ownership  # in a trace of the very call that this change is planned for
            elif cut.is_told_by_one or not has_values(tensor):
                now = cut.of_local_size(rank, found)
            else:
                now = cut.of_local_sizes(gather_lengths(found, self.group))
        except UnknownSize as error:
            raise CallMismatch(
                f"{self}: dim {dim} of a tensor of shape {list(tensor.shape)}: {error}; give example_inputs that are "
                "passed as your training step passes them"
            ) from None
        here = Shard(((dim, now),))
        return (here, target) if is_sharded else (source, here)

    def _is_local(self, tensor: Tensor) -> bool:
        """Whether a tensor that is to be cut has the shape of this rank's part already, in a trace."""
        target = self.plan.target
        if not (isinstance(self.plan.source, Invariant) and isinstance(target, Shard)):
            return False
        if tensor.shape != local_shape(self.plan.shape, target, self.group.rank):
            return False
        axis = target.cuts[0].grown_axis if len(target.cuts) == 1 else None
        if axis is None:
            return True
        # Of other calls a whole tensor may be as long. Before anything is sharded in a call, everything is whole.
        whole = self.lengths.whole(axis)
        return whole is not None and target.cuts[0].of_units(whole).size != tensor.shape[target.dims[0][0]]

    def before(self, module: nn.Module, args: Any, kwargs: Any) -> Any:
        """Forward pre-hook with keyword arguments."""
        return self.replaced((args, kwargs), self.convert)

    def after(self, module: nn.Module, args: Any, output: Any) -> Any:
        """Forward hook."""
        return self.replaced(output, self.convert)

    def replaced(self, value: Any, change: Callable[[Any], Any]) -> Any:
        """``value`` with what is at this place changed."""
        try:
            return replaced_at(value, self.steps, change)
        except NoSuchPlace as error:
            raise PlanMismatch(
                f"{self}: the module was called with other arguments than in the trace ({error}); "
                "give example_inputs that are passed as your training step passes them"
            ) from error

    def __repr__(self) -> str:
        change = f"shown whole: {self.plan.target}" if self.plan.view else f"{self.plan.source} -> {self.plan.target}"
        where = f" of {self.plan.call}" if self.plan.call else ""
        return f"{self.plan.module or '(root)'}.{self.plan.side}{self.plan.key}{where}: {change}"
