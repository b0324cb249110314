"""From a Lightning checkpoint to a Hugging Face directory: one process, no GPU, one tensor in memory at a time.

The checkpoint, of the Trainer or of Fabric, may be a file or a directory (:mod:`~lightning_autotp.checkpoints.files`),
of any tensor-parallel size: its tensors have the original model's names and shapes. What the model is, the strategy has
written into it (:func:`~lightning_autotp.export.from_model.describe_models`); for any other checkpoint of such a model
one says so.
"""

from __future__ import annotations

import os
from collections.abc import Hashable, Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
import transformers
from torch import Tensor
from transformers import AutoConfig, GenerationConfig

from lightning_autotp.building.checkpoint_reading import MismatchError
from lightning_autotp.checkpoints.files import read_checkpoint, refuse_foreign
from lightning_autotp.checkpoints.stored import StoredTensor
from lightning_autotp.export.from_model import ENTRY, Exported, tokenizer_of, write_model, written_dtype
from lightning_autotp.export.reversal import plan_export, set_conversions, skeleton
from lightning_autotp.export.safetensors_writer import Described
from lightning_autotp.pretrained.hub import refuse_missing
from lightning_autotp.private.transformers_private import PreTrainedModel

MAPPED_BYTES = 64 * 2**20
"""How much of a mapped file may have been read before it is mapped anew: what was read counts as this process's."""


class _Model(NamedTuple):
    """What is to be exported: ``prefix`` of its names in an ``entry`` of the checkpoint, ``source`` of its weights."""

    kind: type[PreTrainedModel]
    config: Any
    generation_config: Any
    entry: str
    prefix: str
    source: str | None
    conversions: list[list[Any]] | None


class _State:
    """The tensors in an entry of a checkpoint that begin with a prefix, by their names without it.

    Attributes:
        tensors: what each is, in the dtype it has, and which: tied ones are the same memory.
    """

    def __init__(self, path: Path, checkpoint: Mapping[str, Any], model: _Model, weights_only: bool) -> None:
        self._path, self._entry, self._prefix, self._weights_only = path, model.entry, model.prefix, weights_only
        self._state: Mapping[str, Any] = checkpoint[model.entry]
        self._mapped = 0
        self.tensors: dict[str, tuple[Described, Hashable]] = {
            name.removeprefix(model.prefix): (Described(tuple(value.shape), value.dtype), _identity(value))
            for name, value in self._state.items()
            if name.startswith(model.prefix) and isinstance(value, Tensor | StoredTensor)
        }

    def whole(self, name: str) -> Tensor:
        """One tensor, on the CPU; of a file it is mapped memory."""
        value = self._state[self._prefix + name]
        if isinstance(value, StoredTensor):
            return value.read()
        if self._mapped and self._mapped + value.nbytes > MAPPED_BYTES:
            del value
            self._state = {}
            self._state = read_checkpoint(self._path, self._weights_only, check=False)[self._entry]
            self._mapped = 0
            value = self._state[self._prefix + name]
        self._mapped += value.nbytes
        return value


def export_checkpoint(
    checkpoint: str | os.PathLike[str],
    directory: str | os.PathLike[str],
    *,
    model: str | None = None,
    prefix: str | None = None,
    tokenizer: str | os.PathLike[str] | None = None,
    max_shard_size: int | str = "5GB",
    dtype: torch.dtype | None = None,
    weights_only: bool = True,
) -> Exported:
    """Write the Hugging Face model in a checkpoint so that plain ``from_pretrained`` loads it.

    Not collective. Besides one tensor (or the few that transformers merges into one on the way out) nothing of the
    model is in memory.

    Args:
        checkpoint: the file or directory that the Trainer or Fabric wrote.
        directory: where to; it must be empty or not exist.
        model: a directory or Hub id whose configuration is the model's; only for a checkpoint that does not say what it
            is of.
        prefix: the attribute path of the model in the LightningModule, or the key that it had in ``fabric.save``; only
            needed where there are several.
        tokenizer: a directory with a tokenizer's files; by default the local directory that the model was loaded from,
            if it is still there and has such files.
        max_shard_size: of a file, in bytes or like ``"5GB"``.
        dtype: in which floating-point tensors are written; by default as they are.
        weights_only: as for ``torch.load``: ``False`` runs code that the checkpoint names.

    Raises:
        FileExistsError: if ``directory`` is not empty.
        ValueError: if it is not clear which model to export, or ``tokenizer`` has no tokenizer's files.
        CheckpointError: if the checkpoint cannot be read or does not fit the model: a MismatchError names every tensor.
    """
    directory = Path(directory)
    if directory.exists() and (not directory.is_dir() or any(directory.iterdir())):
        raise FileExistsError(f"{directory} exists and is not an empty directory: export to another place, or empty it")
    opened = read_checkpoint(Path(checkpoint), weights_only)
    chosen = _choose(opened, Path(checkpoint), model, prefix)
    tokenizer = tokenizer_of(tokenizer, chosen.source)
    state = _State(Path(checkpoint), opened, chosen, weights_only)
    del opened
    tensors, stored_as = _matched(state.tensors, skeleton(chosen.kind, chosen.config, {}), Path(checkpoint), chosen)
    written = {
        name: (described._replace(dtype=written_dtype(described.dtype, dtype)), identity)
        for name, (described, identity) in tensors.items()
    }
    original = skeleton(chosen.kind, chosen.config, written)
    if chosen.generation_config is not None:
        original.generation_config = chosen.generation_config
    set_conversions(original, chosen.conversions)
    plan = plan_export(original, written, max_shard_size=max_shard_size, save_original_format=True)
    return write_model(
        original,
        plan,
        directory,
        lambda name: state.whole(stored_as.get(name, name)),
        tokenizer,
    )


def _choose(checkpoint: Mapping[str, Any], path: Path, model: str | None, prefix: str | None) -> _Model:
    """Which model of the checkpoint is meant, and what it is."""
    described: Mapping[str, Any] = checkpoint.get(ENTRY, {}).get("models", {})
    if not described:
        refuse_foreign(path, checkpoint)
    if model is not None:
        kind, config, generation = _of_directory(model)
        if prefix is None:
            prefix = (
                next(iter(described)) if len(described) == 1 else _guess(checkpoint["state_dict"], kind, config, path)
            )
        entry = described.get(prefix, {})
        return _Model(kind, config, generation, *_place(prefix, entry), model, entry.get("conversions"))
    if not described:
        raise ValueError(
            f"{path} does not say which model it is of: another strategy wrote it, or its LightningModule has no"
            " Hugging Face model. Pass --model with a directory or Hub id whose configuration is the model's"
        )
    if prefix is None and len(described) > 1:
        raise ValueError(
            f"{path} has {len(described)} models: choose one of them with --prefix ({', '.join(described)})"
        )
    prefix = next(iter(described)) if prefix is None else prefix.removesuffix(".")
    if prefix not in described:
        raise ValueError(f"{path} has no model {prefix!r}: --prefix must be one of {', '.join(described)}")
    entry = described[prefix]
    kind = _class(entry["class"], path)
    generation = entry["generation_config"]
    return _Model(
        kind,
        kind.config_class.from_dict(entry["config"]),  # type: ignore[union-attr]
        GenerationConfig.from_dict(generation) if generation is not None else None,
        *_place(prefix, entry),
        entry["source"],
        entry["conversions"],
    )


def _of_directory(model: str) -> tuple[type[PreTrainedModel], Any, Any]:
    """The class, configuration and generation configuration of a model's directory or Hub id."""
    refuse_missing(model)
    config = AutoConfig.from_pretrained(model)
    if not config.architectures:
        raise ValueError(
            f"the configuration of {model} does not name the model's class: write it into its config.json, as in"
            ' "architectures": ["LlamaForCausalLM"]'
        )
    kind = _class(config.architectures[0], model)
    try:
        generation = GenerationConfig.from_pretrained(model) if kind.can_generate() else None
    except OSError:  # it has none: the model's own default
        generation = None
    return kind, config, generation


def _class(name: str, where: Any) -> type[PreTrainedModel]:
    """A class of transformers; nothing else that a file names is imported."""
    kind = getattr(transformers, name, None)
    if not (isinstance(kind, type) and issubclass(kind, PreTrainedModel)):
        raise ValueError(
            f"{where} is of a {name}, which transformers {transformers.__version__} does not have: install the version"
            " it was trained with; a model with custom code is exported in the run, by strategy.save_pretrained"
        )
    return kind


def _guess(state: Iterable[str], kind: type[PreTrainedModel], config: Any, path: Path) -> str:
    """The one prefix with which the checkpoint has the model's names."""
    names = list(skeleton(kind, config, {}).state_dict())
    found = {name[: -len(names[0])] for name in state if name == names[0] or name.endswith(f".{names[0]}")}
    if len(found) != 1:
        raise ValueError(
            f"{path} has {len(found)} places where a {kind.__name__} could be"
            f" ({', '.join(sorted(found)) or 'none ends in ' + names[0]}): choose the attribute path with --prefix"
        )
    return found.pop()


def _matched(
    found: Mapping[str, tuple[Described, Hashable]], original: Any, path: Path, model: _Model
) -> tuple[dict[str, tuple[Described, Hashable]], dict[str, str]]:
    """The model's tensors in its order, and under which name those are stored that are only there under a tied one.

    Raises:
        MismatchError: naming every tensor that is missing, unknown or of another shape.
    """
    expected = original.state_dict(keep_vars=True)
    same = {id(expected[name]): name for name in found if name in expected}
    stored_as = {name: same[id(value)] for name, value in expected.items() if name not in found and id(value) in same}
    problems = [f"missing: {name}" for name in expected if name not in found and name not in stored_as]
    problems += [f"unexpected: {name}" for name in found if name not in expected]
    problems += [
        f"wrong shape: {name} is {found[name][0].shape}, the configuration gives {tuple(value.shape)}"
        for name, value in expected.items()
        if name in found and found[name][0].shape != tuple(value.shape)
    ]
    if problems:
        more = f"\n  and {len(problems) - 20} more" * (len(problems) > 20)
        raise MismatchError(
            f"{path} does not fit {model.kind.__name__} at {model.prefix or '(the top)'}"
            f" ({len(problems)} problems):\n  "
            + "\n  ".join(problems[:20])
            + more
            + "\nNames under another attribute: --prefix; another configuration: --model; adapters: merge them first"
        )
    return {name: found[stored_as.get(name, name)] for name in expected}, stored_as


def _place(name: str, described: Mapping[str, Any]) -> tuple[str, str]:
    """The entry of the checkpoint in which a model is, and the prefix of its names there.

    A Trainer's models are called by their prefix in the state dict, Fabric's by their entry and their prefix there.
    """
    return described.get("entry", "state_dict"), _dotted(described.get("prefix", name))


def _dotted(prefix: str) -> str:
    return f"{prefix.removesuffix('.')}." if prefix.removesuffix(".") else ""


def _identity(value: Tensor | StoredTensor) -> Hashable:
    """Equal for what is one tensor: a stored one, or memory with the same view of it."""
    if isinstance(value, StoredTensor) or value.numel() == 0:
        return id(value)
    return value.data_ptr(), value.dtype, tuple(value.shape), value.stride()
