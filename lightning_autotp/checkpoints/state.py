"""State of a parallel model in the coordinates of the original one: state dicts and optimizer states.

Whatever leaves the ranks has the names and shapes that one process would have given it, so a checkpoint written at one
tensor-parallel size loads at any other, or without this package at all. Which part of a tensor a rank holds is read
from the :class:`~lightning_autotp.parameters.meta.ParameterMeta` of its parameter; a tensor without one is the same on
every rank.

There are two ways out. *Full* states are whole tensors: they travel as bytes, one at a time, and besides the result a
rank holds its own part and one other rank's. *Held* states are what each rank has, for it to write by itself. Both come
back the same way, from whole tensors or from :class:`~lightning_autotp.checkpoints.stored.StoredTensor`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from lightning_autotp.checkpoints.stored import HeldTensor, StoredTensor, original_shape
from lightning_autotp.layouts.types import local_shape
from lightning_autotp.parameters.gathering import each_once, gather_to_cpu
from lightning_autotp.parameters.known_writes import known_writes
from lightning_autotp.parameters.local_blocks import fill, is_cut
from lightning_autotp.parameters.meta import ParameterMeta
from lightning_autotp.parameters.state import ParameterTable, parallel_models
from lightning_autotp.ranks.agreement import raise_together
from lightning_autotp.ranks.group import TPGroup
from lightning_autotp.whole_matrices.optimizer import WholeMatrixOptimizer

Whole = (Tensor, StoredTensor)
"""What a tensor of the original model is loaded from."""


class IncompatibleKeys(NamedTuple):
    """Names that :func:`load_full_state_dict` did not find, or did not know.

    Attributes:
        missing: names of the model that the state lacks.
        unexpected: names of the state that the model lacks.
    """

    missing: list[str]
    unexpected: list[str]


def full_state_dict(model: nn.Module, *, keep: bool = True) -> dict[str, Any]:
    """The state dict the original model would have.

    Collective over the model's tensor-parallel group, and over the data axis where FSDP2 has cut the model; every rank
    gets the result.

    Args:
        model: a parallel model, or a module that holds one.
        keep: whether this rank wants the result; without it the rank only sends its parts.

    Returns:
        Every persistent tensor under every name it has in ``model.state_dict()``, whole, on the CPU. Tied parameters
        share their memory. Empty without ``keep``.

    Raises:
        RuntimeError: if no parallel model is found.
    """
    table = ParameterTable(model)
    named = model.state_dict(keep_vars=True).items()
    state = each_once(named, lambda value: gather_to_cpu(value, table.meta(value), table.group, keep))
    return state if keep else {}


def load_full_state_dict(model: nn.Module, state: Mapping[str, Any], strict: bool = True) -> IncompatibleKeys:
    """Load a state dict of the original model: each rank reads its part of every tensor. Not collective.

    Args:
        model: a parallel model, or a module that holds one.
        state: names and whole tensors as :func:`full_state_dict` gives them, or stored ones. Of a memory-mapped file
            or a checkpoint directory only this rank's part is read.
        strict: whether missing and unexpected names are an error.

    Returns:
        The names that did not match.

    Raises:
        RuntimeError: naming every tensor of a wrong shape and, under ``strict``, every missing and unexpected name.
            Nothing is loaded then.
    """
    table = ParameterTable(model)
    own = model.state_dict(keep_vars=True)
    missing = [name for name in own if name not in state]
    unexpected = [name for name in state if name not in own]
    problems, are_parts = [], False
    if strict:
        problems += [f"missing: {name}" for name in missing] + [f"unexpected: {name}" for name in unexpected]
    for name in own:
        if name in state and isinstance(own[name], Tensor):
            expected = original_shape(own[name], table.meta(own[name]))
            found = tuple(state[name].shape) if isinstance(state[name], Whole) else type(state[name]).__name__
            if found != expected:
                problems.append(f"wrong shape: {name} is {found}, the model has {expected}")
                meta = table.meta(own[name])
                are_parts |= meta is not None and any(
                    found == local_shape(meta.shape, meta.layout, rank) for rank in range(meta.ranks)
                )
    if problems:
        raise RuntimeError(
            f"the state dict does not fit {type(model).__name__} ({len(problems)} problems):\n  "
            + "\n  ".join(sorted(problems))
            + "\nIt has the shapes of one rank's part, as model.state_dict() of a parallel model gives it: write"
            " lightning_autotp.full_state_dict(model) to files instead" * are_parts
        )
    loaded: dict[int, Tensor] = {}
    with torch.no_grad(), known_writes(model, loaded.values()):
        for name, value in own.items():
            if name not in state or id(value) in loaded:
                continue
            if isinstance(value, Tensor):
                _take(value, table.meta(value), state[name], table.group)
                loaded[id(value)] = value
            else:
                model.get_submodule(name.rpartition(".")[0]).set_extra_state(state[name])
    for _, parallel in parallel_models(model):
        parallel.loads += 1
    return IncompatibleKeys(missing, unexpected)


def full_optimizer_state(optimizer: torch.optim.Optimizer, model: nn.Module, *, keep: bool = True) -> dict[str, Any]:
    """The optimizer's state dict as one process would have it, plus the parameters' names.

    Collective over the model's tensor-parallel group; every rank gets the result.

    Args:
        optimizer: an optimizer over parameters of ``model``.
        model: a parallel model, or a module that holds one.
        keep: whether this rank wants the tensors; without it the result has only the parameter groups.

    Returns:
        ``{"state": ..., "param_groups": ...}`` in torch's own format with whole tensors on the CPU; each group also has
        ``"param_names"``.

    Raises:
        ValueError: for a state tensor that is neither a scalar nor shaped like its sharded parameter (a factored
            or blockwise-quantized moment): it has no meaning in the original coordinates. On ranks whose own tensors
            look alright: PeerError.
    """
    table = ParameterTable(model)

    def whole(entry: _Entry) -> Any:
        value = entry.value
        if isinstance(value, Tensor) and isinstance(optimizer, WholeMatrixOptimizer):
            value = optimizer.from_assigned(entry.number, value)
        return gather_to_cpu(value, entry.meta, table.group, keep)

    state = _optimizer_state(optimizer, model, table, whole)
    return state if keep else {**state, "state": {}}


def held_state(model: nn.Module, *, copy: bool = False) -> dict[str, Any]:
    """What this rank has of the state dict the original model would have, to be written by itself. Not collective.

    Args:
        model: a parallel model, or a module that holds one.
        copy: whether to copy everything to the CPU now.

    Returns:
        Held tensors under every name in ``model.state_dict()``, one object for tied ones; other values as they are.
    """
    table = ParameterTable(model)

    def hold(value: Any) -> Any:
        if not isinstance(value, Tensor):
            return value
        return HeldTensor.spoken_for(value, table.meta(value), table.group, copy=copy)

    return each_once(model.state_dict(keep_vars=True).items(), hold)


def held_optimizer_state(optimizer: torch.optim.Optimizer, model: nn.Module, *, copy: bool = False) -> dict[str, Any]:
    """What this rank has of :func:`full_optimizer_state`, to be written by itself. Collective as that is.

    Args:
        optimizer: an optimizer over parameters of ``model``.
        model: a parallel model, or a module that holds one.
        copy: whether to copy everything to the CPU now.

    Returns:
        As :func:`full_optimizer_state`, with held tensors.
    """
    table = ParameterTable(model)

    def hold(entry: _Entry) -> Any:
        if not isinstance(entry.value, Tensor):
            return entry.value
        if isinstance(optimizer, WholeMatrixOptimizer):
            return HeldTensor.all_or_nothing(entry.value, copy=copy)
        return HeldTensor.spoken_for(entry.value, entry.meta, table.group, copy=copy)

    return _optimizer_state(optimizer, model, table, hold)


def load_full_optimizer_state(optimizer: torch.optim.Optimizer, state: Mapping[str, Any], model: nn.Module) -> None:
    """Load what :func:`full_optimizer_state` or one process's ``optimizer.state_dict()`` gave. Not collective.

    Parameters are matched by name where the state has names, else by position.

    Args:
        optimizer: an optimizer over parameters of ``model``, with the same groups as the saved one.
        state: the state in original coordinates.
        model: a parallel model, or a module that holds one.

    Raises:
        ValueError: if the groups do not match, or a state tensor does not have its parameter's original shape.
    """
    table = ParameterTable(model)
    saved_groups = state["param_groups"]
    ours = _group_names(optimizer, model)
    theirs = [group.get("param_names") or own for group, own in zip(saved_groups, ours, strict=False)]
    if [len(group["params"]) for group in saved_groups] != [len(group) for group in ours] or [
        sorted(group) for group in theirs
    ] != [sorted(group) for group in ours]:
        raise ValueError(
            f"the saved optimizer state has groups of {[len(group['params']) for group in saved_groups]} parameters,"
            f" {type(optimizer).__name__} has {[len(group) for group in ours]}"
            f" (only saved: {sorted(_flat(theirs) - _flat(ours))}, only here: {sorted(_flat(ours) - _flat(theirs))}):"
            " configure_optimizers() must build the same groups as when the checkpoint was written"
        )
    groups, local_state = [], {}
    for saved, saved_names, own_names, own in zip(saved_groups, theirs, ours, optimizer.param_groups, strict=True):
        numbers = dict(zip(saved_names, saved["params"], strict=True))
        kept = {key: value for key, value in saved.items() if key != "param_names" or key in own}
        groups.append({**kept, "params": [numbers[name] for name in own_names]})
        if "param_names" in own:
            groups[-1]["param_names"] = own["param_names"]
        for name, parameter in zip(own_names, own["params"], strict=True):
            values = state["state"].get(numbers[name])
            if values is None:
                continue
            if not isinstance(optimizer, WholeMatrixOptimizer):
                local_state[numbers[name]] = {
                    key: _local_value(key, name, value, parameter, table) for key, value in values.items()
                }
            elif optimizer.is_assigned_here(parameter):
                local_state[numbers[name]] = {key: _whole_value(value) for key, value in values.items()}
    optimizer.load_state_dict({"state": local_state, "param_groups": groups})


def _group_names(optimizer: torch.optim.Optimizer, model: nn.Module) -> list[list[str]]:
    """The names of each group's parameters; a parameter from outside the model is called by its place."""
    names = {parameter: name for name, parameter in model.named_parameters()}
    return [
        [names.get(parameter, f"(group {index}, parameter {place})") for place, parameter in enumerate(group["params"])]
        for index, group in enumerate(optimizer.param_groups)
    ]


def _flat(groups: list[list[str]]) -> set[str]:
    return {name for group in groups for name in group}


class _Entry(NamedTuple):
    """One value of an optimizer's state; ``meta``: of the parameter as which it lies over the ranks, if it does."""

    number: int
    key: str
    value: Any
    meta: ParameterMeta | None


def _optimizer_state(
    optimizer: torch.optim.Optimizer, model: nn.Module, table: ParameterTable, make: Callable[[_Entry], Any]
) -> dict[str, Any]:
    """What ``make`` gives for each value of an optimizer's state, and its groups with their names. Collective."""
    local = optimizer.state_dict()
    on_one_rank = optimizer.described_state() if isinstance(optimizer, WholeMatrixOptimizer) else None
    entries: list[_Entry] = []
    groups = []
    # Shapes may fit on one rank by chance and not on another: agree before the first tensor travels.
    with raise_together(table.group.process_group, "collecting the optimizer's state"):
        for own, described, names in zip(
            optimizer.param_groups, local["param_groups"], _group_names(optimizer, model), strict=True
        ):
            groups.append({**described, "param_names": names})
            for parameter, number, name in zip(own["params"], described["params"], names, strict=True):
                if on_one_rank is not None:
                    entries += [_Entry(number, key, value, None) for key, value in on_one_rank.get(number, {}).items()]
                    continue
                meta, shape = table.meta(parameter), tuple(parameter.shape)
                for key, value in local["state"].get(number, {}).items():
                    is_shaped = _is_shaped(key, name, value, shape, meta, is_cut(parameter))
                    entries.append(_Entry(number, key, value, meta if is_shaped else None))
    state: dict[int, dict[str, Any]] = {}
    for entry in entries:
        state.setdefault(entry.number, {})[entry.key] = make(entry)
    return {"state": state, "param_groups": groups}


def _whole_value(value: Any) -> Any:
    if isinstance(value, StoredTensor):
        return value.read()
    return value.clone() if isinstance(value, Tensor) else value


def _local_value(key: str, name: str, value: Any, parameter: Tensor, table: ParameterTable) -> Any:
    if not isinstance(value, Whole):
        return value
    meta = table.meta(parameter)
    if not _is_shaped(key, name, value, original_shape(parameter, meta), meta, is_cut(parameter)):
        return _whole_value(value)
    local = torch.empty_like(parameter, dtype=value.dtype, requires_grad=False)
    _take(local, meta, value, table.group)
    return local


def _take(tensor: Tensor, meta: ParameterMeta | None, whole: Tensor | StoredTensor, group: TPGroup) -> None:
    if isinstance(whole, StoredTensor):
        whole.read_into(tensor, meta, group)
    else:
        fill(tensor, meta, whole, group)


def _is_shaped(key: str, name: str, value: Any, shape: tuple[int, ...], meta: ParameterMeta | None, cut: bool) -> bool:
    """Whether a value of the optimizer's state is shared out as its parameter is, which has this shape."""
    if not isinstance(value, Whole) or len(value.shape) == 0:
        return False
    if tuple(value.shape) == shape:
        return True
    if not (cut or (meta is not None and meta.is_parallel)):
        return False
    raise ValueError(
        f"the optimizer's state {key!r} of {name} has shape {tuple(value.shape)}, the parameter {shape}:"
        " only scalars and states with one element per element of the parameter can be brought to another"
        " tensor-parallel size. Use an optimizer with such states (SGD, Adam, AdamW, Lion, ...) or save with"
        " ModelCheckpoint(save_weights_only=True)"
    )
