"""Which tensors an exported model has, in which files they go, and from which parameters each is made.

transformers renames, merges and splits tensors while it loads a checkpoint, and undoes it while it saves, with the
whole state dict at hand. Here its own code does that (ties, reversal, the split into files) with stand-ins that have no
values, and the operations are recorded as for loading (:mod:`~lightning_autotp.building.recorder`). So every tensor to
be written has a recipe that says which parameters feed it, and
:class:`~lightning_autotp.building.weight_conversion.RecipeReader` makes it piece by piece once those are there.
Parameters that feed one tensor together form a :class:`ReversalStep` with all that they make; nearly every step is one
parameter, also where its experts become hundreds of tensors.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from huggingface_hub import split_state_dict_into_shards_factory
from torch import Tensor, nn

from lightning_autotp.building.deferred import deferred_init
from lightning_autotp.building.recipe import Recipe
from lightning_autotp.building.recorder import Recorder
from lightning_autotp.building.weight_conversion import RecipeReader
from lightning_autotp.export.safetensors_writer import Described
from lightning_autotp.layouts.blocks import index, whole_box
from lightning_autotp.private.torch_private import parameters_of, storage_key
from lightning_autotp.private.transformers_private import (
    PreTrainedModel,
    conversion_key,
    conversions_of,
    get_model_conversion_mapping,
    names_not_saved,
    remove_tied_weights_from_state_dict,
    revert_weight_conversion,
    set_conversions_of,
)


@dataclass
class Parameter:
    """A tensor of the model's state dict, here while ``value`` is set.

    It is a :class:`~lightning_autotp.building.recipe.Source`.

    Attributes:
        name: its name in the model.
        shape: its whole shape.
        dtype: the dtype it is to be written in.
        value: the whole tensor, on the CPU, in any dtype.
    """

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    value: Tensor | None = None

    def read(self, box: Sequence[tuple[int, int]] | None = None) -> Tensor:
        """The tensor, or a block of it, which may be part of ``value``, in ``dtype``.

        Raises:
            RuntimeError: if it is not there.
        """
        if self.value is None:
            raise RuntimeError(f"{self.name} is not here while what is made of it is written")
        if box is None:
            return self.value.to(self.dtype, copy=True, memory_format=torch.contiguous_format)
        return self.value[index(box)].to(self.dtype)


@dataclass(frozen=True)
class ReversalStep:
    """Parameters that are needed at the same time, and what is made of them.

    Attributes:
        parameters: by their order in the model; nearly always one.
        outputs: recipes by the name in the file.
    """

    parameters: tuple[Parameter, ...]
    outputs: Mapping[str, Recipe]

    def pieces(self, wholes: Mapping[str, Tensor]) -> Iterator[tuple[str, Iterator[Tensor]]]:
        """Every tensor to write, as its elements in their order, in small pieces.

        Args:
            wholes: the step's parameters by name, each whole, on the CPU.
        """
        try:
            for parameter in self.parameters:
                parameter.value = wholes[parameter.name]
            for name, recipe in self.outputs.items():
                everything = whole_box(recipe.target.size)
                yield name, (part for _, _, part in RecipeReader(recipe).pieces([everything]))
        finally:
            for parameter in self.parameters:
                parameter.value = None


@dataclass(frozen=True)
class ExportPlan:
    """What an export writes.

    Attributes:
        files: names of tensors by file name.
        tensors: what each of them is.
        steps: how they are made, in an order that is the same on every rank.
        index: the contents of the index file, ``None`` for a single file.
    """

    files: Mapping[str, Sequence[str]]
    tensors: Mapping[str, Described]
    steps: tuple[ReversalStep, ...]
    index: dict[str, Any] | None


def skeleton(kind: type[PreTrainedModel], config: Any, tensors: Mapping[str, tuple[Described, Hashable]]) -> Any:
    """The model that one process would have, on the meta device: an original of the model to export.

    Its shapes, dtypes and ties are those of ``tensors``, which may not be those of its configuration.

    Args:
        kind: the model's class.
        config: its configuration, which is copied.
        tensors: what each tensor is, and which it is: tied names have equal ones. Names the class does not have are
            left out.
    """
    with torch.device("meta"):
        model = kind(copy.deepcopy(config))
    modules = dict(model.named_modules())
    wholes: dict[Hashable, nn.Parameter] = {}
    for name, (described, identity) in tensors.items():
        path, _, leaf = name.rpartition(".")
        if path in modules and leaf in parameters_of(modules[path]):
            if identity not in wholes:
                empty = torch.empty(described.shape, dtype=described.dtype, device="meta")
                wholes[identity] = nn.Parameter(empty, requires_grad=False)
            parameters_of(modules[path])[leaf] = wholes[identity]
    return model


def describe_conversions(model: Any) -> list[list[Any]] | None:
    """Which of transformers' conversions a model's checkpoint went through, as plain data for :func:`set_conversions`.

    ``None`` where it was not loaded, or was dequantized: it is then written as transformers' own format has it.
    """
    conversions = conversions_of(model)
    operations = [operation for entry in conversions or () for operation in getattr(entry, "operations", ())]
    if conversions is None or any(getattr(operation, "hf_quantizer", None) for operation in operations):
        return None
    return [conversion_key(conversion) for conversion in conversions]


def set_conversions(original: Any, described: list[list[Any]] | None) -> None:
    """Let an export undo the conversions that :func:`describe_conversions` named.

    If one of them is unknown here (the user's own, another version of transformers), it undoes the architecture's.
    """
    if described is not None:
        known = {
            json.dumps(conversion_key(conversion)): conversion for conversion in get_model_conversion_mapping(original)
        }
        found = [known.get(json.dumps(key)) for key in described]
        if None not in found:
            set_conversions_of(original, found)


def plan_export(
    original: Any,
    tensors: Mapping[str, tuple[Described, Hashable]],
    *,
    max_shard_size: int | str,
    save_original_format: bool,
) -> ExportPlan:
    """Decide what is written where. Nothing of any tensor is read.

    Args:
        original: what :func:`skeleton` gives.
        tensors: the state dict's tensors in its order: what each is, and which it is.
        max_shard_size: as for transformers, in bytes or like ``"5GB"``.
        save_original_format: whether transformers' conversions are undone.

    Raises:
        RuntimeError: if tensors are tied that the model's class does not declare as tied.
        ValueError: if ``max_shard_size`` cannot be understood.
    """
    ignored = names_not_saved(original)
    # Ties are found by memory: one element each stands for a tensor.
    memory = {identity: torch.empty(1) for _, identity in tensors.values()}
    untied = remove_tied_weights_from_state_dict(
        {name: memory[identity] for name, (_, identity) in tensors.items() if name not in ignored}, original
    )
    parameters = [Parameter(name, *tensors[name][0]) for name in untied]
    with deferred_init() as recorder:
        recipes, split = _recorded(recorder, original, parameters, save_original_format, max_shard_size)
    index = None
    if split.is_sharded:
        metadata = {"total_parameters": original.num_parameters(), **split.metadata}
        index = {"metadata": metadata, "weight_map": split.tensor_to_filename}
    described = {name: Described(recipe.target.size, recipe.target.dtype) for name, recipe in recipes.items()}
    return ExportPlan(split.filename_to_tensors, described, tuple(_steps(recipes)), index)


def _recorded(
    recorder: Recorder,
    original: Any,
    parameters: Iterable[Parameter],
    save_original_format: bool,
    max_shard_size: int | str,
) -> tuple[dict[str, Recipe], Any]:
    """Undo the conversions on stand-ins and split the result into files. No stand-in outlives this."""
    state = {parameter.name: recorder.source(parameter) for parameter in parameters}
    if save_original_format:
        state = revert_weight_conversion(original, state)
    split = split_state_dict_into_shards_factory(
        state or {},
        get_storage_size=lambda tensor: tensor.untyped_storage().nbytes(),
        # What shares memory goes into one file; all memory of no bytes is one address.
        get_storage_id=lambda tensor: tensor.untyped_storage().nbytes() and storage_key(tensor),
        filename_pattern="model{suffix}.safetensors",
        max_shard_size=max_shard_size,
    )
    return {name: recorder.recipe_of(tensor) for name, tensor in state.items()}, split


def _steps(recipes: Mapping[str, Recipe]) -> Iterator[ReversalStep]:
    """Outputs that share a parameter go into one step."""
    groups: dict[int, tuple[dict[str, Parameter], dict[str, Recipe]]] = {}
    group_of: dict[str, int] = {}
    for number, (name, recipe) in enumerate(recipes.items()):
        sources = [leaf.value for leaf in recipe.leaves.values() if isinstance(leaf.value, Parameter)]
        shared = sorted({group_of[source.name] for source in sources if source.name in group_of})
        target = shared[0] if shared else number
        parameters, outputs = groups.setdefault(target, ({}, {}))
        for other in shared[1:]:
            more_parameters, more_outputs = groups.pop(other)
            parameters |= more_parameters
            outputs |= more_outputs
        parameters.update({source.name: source for source in sources})
        outputs[name] = recipe
        group_of.update(dict.fromkeys(parameters, target))
    for parameters, outputs in groups.values():
        yield ReversalStep(tuple(parameters.values()), outputs)
