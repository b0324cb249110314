"""``resize_token_embeddings`` of a parallel model: every rank has its part of what one process would have then.

The plan stays the same but for the length of the vocabulary, which is sharded anew. It is read on a trace of the
resized original, and a local model made by it is proved, both without weights, before a tensor is touched. Then the few
tensors that the model's own method replaces are gathered, the method runs on them on every rank, with the same random
numbers, and every rank cuts its part out of what it gives. The layers stay the same objects, so hooks on them do.
"""

from __future__ import annotations

import gc
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_autotp.applying.replace import apply_plan, follow_conversions
from lightning_autotp.capture.capture import CaptureError, device_of, meta_copy
from lightning_autotp.gradients.sums import synchronize_gradients
from lightning_autotp.guard.resized_copies import METHOD, Asked, Resized, set_settings
from lightning_autotp.layouts.other_lengths import with_lengths
from lightning_autotp.layouts.plan import Plan
from lightning_autotp.layouts.types import Shard
from lightning_autotp.parallel.embedding import VocabParallelEmbedding
from lightning_autotp.parallel.implementations import IMPLEMENTATIONS
from lightning_autotp.parallel.linear import ColumnParallelLinear, RowParallelLinear
from lightning_autotp.parameters.gathering import gather_parameter
from lightning_autotp.parameters.known_writes import known_writes, parts_of
from lightning_autotp.parameters.local_blocks import fill, fsdp_modules
from lightning_autotp.parameters.state import ParameterPlace, own_modules, parallel_state
from lightning_autotp.parameters.unchanged import check_unchanged
from lightning_autotp.private.torch_private import buffers_of, parameters_of, without_modes
from lightning_autotp.proving.compare import VerificationError
from lightning_autotp.proving.new_calls import CallProver
from lightning_autotp.proving.read_plan import read_plan
from lightning_autotp.proving.verify import trace, verify
from lightning_autotp.ranks.agreement import gather_objects, raise_together
from lightning_autotp.ranks.group import TPGroup
from lightning_autotp.ranks.random_numbers import share_random_state
from lightning_autotp.solving.expert_modules import constrained_by
from lightning_autotp.solving.plan_from_solution import plan_from_solution
from lightning_autotp.solving.planned import PlanMismatch
from lightning_autotp.solving.solution import Solution

_BEFORE = "Call it while the model is whole, in configure_model() or before parallelize()"


def resize_together(model: nn.Module, module: nn.Module, calls: CallProver, /, *args: Any, **kwargs: Any) -> nn.Module:
    """Resize the token embeddings, and the output head, as the model's own method does in one process.

    It stands for that method. Collective over the model's tensor-parallel group: every rank must call it, with the same
    arguments. What is drawn for new rows is drawn with the first rank's random state, with which all ranks go on. The
    matrices concerned are whole in every rank's memory meanwhile.

    Args:
        model: the parallel model.
        module: it, or the module in it whose method this stands for.
        calls: proves the model's new kinds of calls.
        *args: as for the model's own method (``new_num_tokens``, ``pad_to_multiple_of``, ``mean_resizing``).
        **kwargs: those that are given by name.

    Returns:
        The module of the input embeddings.

    Raises:
        RuntimeError: on every rank, if ranks give different arguments, if an optimizer has the parameters already, if
            FSDP2 has cut the model, or if the plan cannot be followed at the new sizes.
        PeerError: on the ranks that do not fail, if another does.
    """
    _resize(model, module, calls, args, kwargs)
    embeddings: nn.Module = module.get_input_embeddings()  # type: ignore[operator]
    return embeddings


def _resize(
    model: nn.Module, module: nn.Module, prover: CallProver, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> None:
    state = parallel_state(model)
    group = state.group
    _check_alike(model, state.path(module), args, kwargs)
    with without_modes(), raise_together(group.process_group, "planning to resize the token embeddings"):
        _refuse_cut_again(model)
        check_unchanged(model)
        prover.configs.version()  # brings what has been set in the configs to the copies
        asked = Asked.of(prover.original, state.path(module) or "", args, kwargs)
        resized = asked.of_shapes(prover.original)
        if not resized.tensors and not resized.settings:
            return
        places = [place for place in state.places(model) if place.name in resized.tensors]
        _refuse_optimized(model, places)
        plan, solution = _proved(model, prover, resized)
    modules = {path: found for found in dict(own_modules(model)).values() if (path := state.path(found)) is not None}
    given = _whole(places, group) | _buffers(modules, resized)
    device = next((tensor.device for tensor in given.values()), torch.device("cpu"))
    share_random_state(group, device)
    with without_modes(), raise_together(group.process_group, "resizing the token embeddings"):
        values = asked.of_values(prover.original, given)
    state.plan = plan
    with known_writes(model):
        _put_parameters(model, places, values)
    state.writes.watch(parts_of(model))
    for name in values.keys() - {place.name for place in places}:
        path, _, attribute = name.rpartition(".")
        buffers_of(modules[path])[attribute] = values[name]
    set_settings(modules, resized.settings)
    prover.begin(resized.model, solution)
    follow_conversions(model, plan)
    synchronize_gradients(model, only={place.meta.name for place in places})


def _check_alike(model: nn.Module, path: str | None, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
    """Every rank asks for the same. Collective.

    Raises:
        RuntimeError: on every rank, if not.
    """
    said = ", ".join([*map(repr, args), *(f"{name}={value!r}" for name, value in sorted(kwargs.items()))])
    everywhere = gather_objects((path, said), parallel_state(model).group.process_group)
    if any(other != everywhere[0] for other in everywhere):
        calls = "; ".join(f"rank {rank}: {path or ''}({said})" for rank, (path, said) in enumerate(everywhere))
        raise RuntimeError(
            f"{type(model).__name__}.{METHOD} is called differently on the ranks of one model ({calls}): call it on"
            " every rank with the same arguments"
        )


def _refuse_cut_again(model: nn.Module) -> None:
    if fsdp_modules(model):
        raise RuntimeError(
            f"{type(model).__name__}.{METHOD}: FSDP2 has sharded the parameters over several copies of the model, and"
            f" cannot be given others. {_BEFORE}"
        )


def _refuse_optimized(model: nn.Module, places: Iterable[ParameterPlace]) -> None:
    """No optimizer of this process has the parameters that are to be replaced.

    Raises:
        RuntimeError: if one has.
    """
    replaced = {id(place.parameter): place.name for place in places}
    found = _optimized(replaced)
    if found:
        gc.collect()  # one that cannot be reached any more may be left in a cycle
        found = _optimized(replaced)
    if found:
        optimizer, name = found
        raise RuntimeError(
            f"{type(model).__name__}.{METHOD} replaces {name}, which an optimizer ({optimizer}) has already: it"
            " would go on with the old one. Resize before the optimizer is made: in configure_model(), at the beginning"
            " of configure_optimizers(), or, without Lightning, before you make it"
        )


def _optimized(replaced: Mapping[int, str]) -> tuple[str, str] | None:
    """The class of an optimizer, and the name of one of these parameters that it has."""
    for found in gc.get_objects():
        if issubclass(type(found), Optimizer):  # the class itself: an object may answer for another one
            for group in getattr(found, "param_groups", ()):
                for parameter in group["params"]:
                    if id(parameter) in replaced:
                        wrapped = getattr(found, "optimizer", found)  # Lightning's wrapper is an optimizer, too
                        return type(wrapped).__name__, replaced[id(parameter)]
    return None


def _proved(model: nn.Module, prover: CallProver, resized: Resized) -> tuple[Plan, Solution]:
    """The plan at the new lengths, proved on meta, and what it means."""
    state = parallel_state(model)
    try:
        plan = with_lengths(state.plan, resized.shapes())
        graph = constrained_by(
            trace(resized.model, list(prover.examples), device=device_of(model)), plan, IMPLEMENTATIONS
        )
        plan, solution = read_plan(plan, graph, IMPLEMENTATIONS)
        local = meta_copy(resized.model)
        apply_plan(local, plan, state.group)
        verify(local, solution, state.group.rank, list(prover.examples))
    except (ValueError, CaptureError, PlanMismatch, VerificationError) as error:
        raise RuntimeError(
            f"{type(model).__name__}.{METHOD}: the model cannot be divided as it is at this size: {error}\n{_BEFORE}"
        ) from error
    parameters = [(parameter.names, parameter.shape, parameter.itemsize) for parameter in plan.parameters]
    written = plan_from_solution(solution, plan.model, parameters, plan.sizes)
    sent = tuple(replace(one, priced_bytes=0) for one in written.communication)  # as it is priced for no step
    return replace(plan, communication=sent), solution


def _whole(places: Iterable[ParameterPlace], group: TPGroup) -> dict[str, Tensor]:
    """The whole parameters by all their names, tied ones one object. Collective."""
    whole: dict[nn.Parameter, nn.Parameter] = {}
    for place in places:
        if place.parameter not in whole:
            values = gather_parameter(place.parameter, place.meta, group)
            whole[place.parameter] = nn.Parameter(values, requires_grad=place.parameter.requires_grad)
    return {place.name: whole[place.parameter] for place in places}


def _buffers(modules: Mapping[str, nn.Module], resized: Resized) -> dict[str, Tensor]:
    """The buffers that are resized, which every rank has whole."""
    found: dict[str, Tensor] = {}
    for name in resized.tensors:
        path, _, attribute = name.rpartition(".")
        buffer = buffers_of(modules[path]).get(attribute)
        if buffer is not None:
            found[name] = buffer.clone()
    return found


def _put_parameters(model: nn.Module, places: Iterable[ParameterPlace], values: Mapping[str, Tensor]) -> None:
    """Give the modules this rank's parts of the new parameters, and the state what these are."""
    state = parallel_state(model)
    layouts = {name: parameter.layout for parameter in state.plan.parameters for name in parameter.names}
    made: dict[str, nn.Parameter] = {}
    for place in places:
        old, meta, whole = place.parameter, place.meta, values[place.name]
        if meta.name not in made:
            now = replace(meta, shape=tuple(whole.shape), layout=layouts[meta.name])
            state.metas |= dict.fromkeys(meta.names, now)
            part = whole.new_empty(now.local_shape)
            fill(part, now, whole.detach(), state.group)
            made[meta.name] = nn.Parameter(part, requires_grad=whole.requires_grad)
            vars(made[meta.name]).update(vars(old))
        parameters_of(place.module)[place.attribute] = made[meta.name]
        if isinstance(place.module, ColumnParallelLinear | RowParallelLinear | VocabParallelEmbedding):
            layout = layouts[meta.name]
            if place.attribute == "weight" and isinstance(layout, Shard):
                ((_, place.module.ownership), *_) = layout.dims
