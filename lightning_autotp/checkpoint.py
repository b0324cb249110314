"""State of a parallel model in the coordinates of the original one: state dicts, optimizer states, export.

Whatever leaves the ranks has the names and shapes that one process would have given it, so a checkpoint written at one
tensor-parallel size loads at any other, or without this package at all. Which part of a tensor a rank holds is read
from its :class:`~lightning_autotp.meta.ParameterMeta`; a tensor without one is the same on every rank.

Tensors travel as bytes, one at a time: besides the result, a rank holds its own part and one other rank's.
"""

from __future__ import annotations

import copy
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lightning_autotp.agreement import raise_together
from lightning_autotp.layers.group import TPGroup
from lightning_autotp.layout import Run, Shard, boxes, local_shape
from lightning_autotp.meta import ParameterMeta


class IncompatibleKeys(NamedTuple):
    """Names that :func:`load_full_state_dict` did not find, or did not know.

    Attributes:
        missing: names of the model that the state lacks.
        unexpected: names of the state that the model lacks.
    """

    missing: list[str]
    unexpected: list[str]


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

    Collective over ``group``. Works for whatever has the parameter's layout: the parameter, its gradient, its moments.

    Args:
        tensor: this rank's part, of shape ``meta.local_shape``.
        meta: what the parts are.
        group: the tensor-parallel group.

    Returns:
        A new tensor of shape ``meta.shape``, on ``tensor``'s device, the same on every rank.
    """
    tensor = tensor.detach()
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
            whole[_index(original)] = part[_index(local)]
    return whole


def slice_parameter(whole: Tensor, meta: ParameterMeta) -> Tensor:
    """This rank's part of a whole tensor: the inverse of :func:`gather_parameter`, without communication.

    Args:
        whole: a tensor of shape ``meta.shape``.
        meta: which part is wanted.

    Returns:
        A new tensor of shape ``meta.local_shape``; only the bytes of that part are read.
    """
    part = whole.new_empty(meta.local_shape)
    for block in meta.mapping:
        part[_index(block.local)] = whole[_index(block.original)]
    return part


def full_state_dict(model: nn.Module, *, keep: bool = True) -> dict[str, Any]:
    """The state dict the original model would have.

    Collective over the model's tensor-parallel group; every rank gets the result.

    Args:
        model: a parallel model, or a module that holds one.
        keep: whether this rank wants the result; without it the rank only sends its parts.

    Returns:
        Every persistent tensor under every name it has in ``model.state_dict()``, whole, on the CPU. Tied parameters
        share their memory. Empty without ``keep``.

    Raises:
        RuntimeError: if no parallel model is found.
    """
    group = model_group(model)
    gathered: dict[int, Any] = {}
    state: dict[str, Any] = {}
    for name, value in model.state_dict(keep_vars=True).items():
        if id(value) not in gathered:
            gathered[id(value)] = _gather_to_cpu(value, tensor_meta(value), group, keep)
        if keep:
            state[name] = gathered[id(value)]
    return state


def load_full_state_dict(model: nn.Module, state: Mapping[str, Any], strict: bool = True) -> IncompatibleKeys:
    """Load a state dict of the original model: each rank reads its part of every tensor. Not collective.

    Args:
        model: a parallel model, or a module that holds one.
        state: names and whole tensors as :func:`full_state_dict` gives them. Tensors of a memory-mapped file are read
            only where this rank's part is.
        strict: whether missing and unexpected names are an error.

    Returns:
        The names that did not match.

    Raises:
        RuntimeError: naming every tensor of a wrong shape and, under ``strict``, every missing and unexpected name.
            Nothing is loaded then.
    """
    own = model.state_dict(keep_vars=True)
    missing = [name for name in own if name not in state]
    unexpected = [name for name in state if name not in own]
    problems = []
    if strict:
        problems += [f"missing: {name}" for name in missing] + [f"unexpected: {name}" for name in unexpected]
    for name in own.keys() & state.keys():
        if isinstance(own[name], Tensor):
            meta = tensor_meta(own[name])
            expected = tuple(own[name].shape) if meta is None else tuple(meta.shape)
            found = tuple(state[name].shape) if isinstance(state[name], Tensor) else type(state[name]).__name__
            if found != expected:
                problems.append(f"wrong shape: {name} is {found}, the model has {expected}")
    if problems:
        raise RuntimeError(
            f"the state dict does not fit {type(model).__name__} ({len(problems)} problems):\n  "
            + "\n  ".join(sorted(problems))
        )
    loaded: set[int] = set()
    with torch.no_grad():
        for name, value in own.items():
            if name not in state or id(value) in loaded:
                continue
            if isinstance(value, Tensor):
                meta = tensor_meta(value)
                value.copy_(state[name] if meta is None else slice_parameter(state[name], meta))
                loaded.add(id(value))
            else:
                model.get_submodule(name.rpartition(".")[0]).set_extra_state(state[name])
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
    group = model_group(model)
    local = optimizer.state_dict()
    groups = []
    metas: dict[tuple[int, str], ParameterMeta | None] = {}
    # Shapes may fit on one rank by chance and not on another: agree before the first tensor travels.
    with raise_together(group.process_group, "collecting the optimizer's state"):
        for own, described, names in zip(
            optimizer.param_groups, local["param_groups"], _group_names(optimizer, model), strict=True
        ):
            groups.append({**described, "param_names": names})
            for parameter, number, name in zip(own["params"], described["params"], names, strict=True):
                for key, value in local["state"].get(number, {}).items():
                    metas[number, key] = _state_meta(key, name, value, parameter, parameter.shape)
    state: dict[int, dict[str, Any]] = {}
    for (number, key), meta in metas.items():
        state.setdefault(number, {})[key] = _gather_to_cpu(local["state"][number][key], meta, group, keep)
    return {"state": state if keep else {}, "param_groups": groups}


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
            if values is not None:
                local_state[numbers[name]] = {
                    key: _local_value(key, name, value, parameter) for key, value in values.items()
                }
    optimizer.load_state_dict({"state": local_state, "param_groups": groups})


def write_atomically(state: Any, path: str | os.PathLike[str]) -> None:
    """``torch.save`` that leaves either the old file or the whole new one, without a copy of it in memory.

    Args:
        state: anything ``torch.save`` takes.
        path: a local path; its directory is made.
    """
    target = Path(path)
    target.parent.mkdir(parents=True, exist_ok=True)
    partial = target.with_name(f".{target.name}.{os.getpid()}.part")
    try:
        torch.save(state, partial)
        os.replace(partial, target)
    finally:
        partial.unlink(missing_ok=True)


def save_pretrained(model: nn.Module, directory: str | os.PathLike[str], *, write: bool = True, **kwargs: Any) -> None:
    """Write a Hugging Face directory that plain ``from_pretrained`` loads.

    Collective over the model's tensor-parallel group, whose rank 0 writes: the configuration, the generation
    configuration and safetensors files of the original shapes and names (transformers' own
    ``save_pretrained`` does it, on a meta copy of the original model with the gathered state dict).

    Args:
        model: a parallel ``transformers.PreTrainedModel``.
        directory: where to; it is made.
        write: whether rank 0 of this group writes at all (with several data-parallel groups only one should).
        **kwargs: for ``transformers.PreTrainedModel.save_pretrained``, such as ``max_shard_size``.

    Raises:
        TypeError: if the model is not a ``PreTrainedModel``.
        PeerError: if rank 0 could not write, on the other ranks.
    """
    from transformers import PreTrainedModel

    if not isinstance(model, PreTrainedModel):
        raise TypeError(
            f"save_pretrained writes a Hugging Face model, not a {type(model).__name__}: pass the PreTrainedModel"
            " itself, or save full_state_dict(model) instead"
        )
    group = model_group(model)
    writes = write and group.rank == 0
    state = full_state_dict(model, keep=writes)
    with raise_together(group.process_group, f"writing {directory}"):
        if writes:
            original = _original(model)
            original.save_pretrained(directory, state_dict=state, **kwargs)


def _original(model: Any) -> Any:
    """The model that one process would have, on the meta device, for transformers to write."""
    with torch.device("meta"):
        original = type(model)(copy.deepcopy(model.config))
    # Shapes, dtypes and ties are the model's, which may not be those of its configuration.
    whole: dict[nn.Parameter, nn.Parameter] = {}
    modules = dict(original.named_modules())
    for name, parameter in model.named_parameters(remove_duplicate=False):
        path, _, leaf = name.rpartition(".")
        if parameter not in whole:
            shape = getattr(parameter, "meta", parameter).shape
            whole[parameter] = nn.Parameter(torch.empty(shape, dtype=parameter.dtype, device="meta"), False)
        if path in modules and leaf in modules[path]._parameters:
            modules[path]._parameters[leaf] = whole[parameter]
    if model.can_generate():
        original.generation_config = copy.deepcopy(model.generation_config)
    # What from_pretrained renamed, fused or cut on the way in is undone on the way out. (What it dequantized is written
    # as it is, with the names that transformers' own format has for the architecture.)
    conversions = getattr(model, "_weight_conversions", None)
    operations = [operation for entry in conversions or () for operation in getattr(entry, "operations", ())]
    if conversions is not None and not any(getattr(operation, "hf_quantizer", None) for operation in operations):
        original._weight_conversions = conversions
    return original


def _index(runs: tuple[Run, ...]) -> tuple[slice, ...]:
    return tuple(slice(start, stop) for start, stop in runs)


def _gather_to_cpu(value: Any, meta: ParameterMeta | None, group: TPGroup, keep: bool) -> Any:
    """The whole of one value on the CPU, in memory of its own; ``None`` without ``keep``."""
    if isinstance(value, Tensor):
        if meta is not None:
            value = gather_parameter(value, meta, group)
            return value.cpu() if keep else None
        return value.detach().to("cpu", copy=True) if keep else None
    return copy.deepcopy(value) if keep else None


def _group_names(optimizer: torch.optim.Optimizer, model: nn.Module) -> list[list[str]]:
    """The names of each group's parameters; a parameter from outside the model is called by its place."""
    names = {parameter: name for name, parameter in model.named_parameters()}
    return [
        [names.get(parameter, f"(group {index}, parameter {place})") for place, parameter in enumerate(group["params"])]
        for index, group in enumerate(optimizer.param_groups)
    ]


def _flat(groups: list[list[str]]) -> set[str]:
    return {name for group in groups for name in group}


def _local_value(key: str, name: str, value: Any, parameter: nn.Parameter) -> Any:
    if not isinstance(value, Tensor):
        return value
    whole = getattr(parameter, "meta", parameter).shape
    meta = _state_meta(key, name, value, parameter, whole)
    return value.clone() if meta is None else slice_parameter(value, meta)


def _state_meta(key: str, name: str, value: Any, parameter: nn.Parameter, shape: Sequence[int]) -> ParameterMeta | None:
    """The meta by which a value of the optimizer's state is shared out, or ``None`` if every rank has all of it."""
    meta = tensor_meta(parameter)
    if meta is None or not isinstance(value, Tensor) or value.dim() == 0:
        return None
    if tuple(value.shape) != tuple(shape):
        raise ValueError(
            f"the optimizer's state {key!r} of {name} has shape {tuple(value.shape)}, the parameter {tuple(shape)}:"
            " only scalars and states with one element per element of the parameter can be brought to another"
            " tensor-parallel size. Use an optimizer with such states (SGD, Adam, AdamW, Lion, ...) or save with"
            " ModelCheckpoint(save_weights_only=True)"
        )
    return meta
