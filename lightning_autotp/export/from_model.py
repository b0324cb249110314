"""Writing Hugging Face directories that plain ``from_pretrained`` loads, one whole tensor at a time.

Everything is planned before the first tensor is touched (:mod:`~lightning_autotp.export.reversal`): the files are,
name for name and byte for byte, those that transformers' own ``save_pretrained`` writes in one process. Then parameter
after parameter is made whole, on every rank since gathering is collective, and the writing rank puts what is made of it
into its places. Files are written into a hidden directory beside their places and moved when all are whole, the index
last, so that a directory never has half a model in it that loads. ``SHA256SUMS`` says what all of them were.
"""

from __future__ import annotations

import json
import logging
import os
import re
import shutil
from collections.abc import Callable, Hashable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from lightning_autotp.checkpoints.checksums import CHECKSUMS, checksums_text, sha256_of
from lightning_autotp.checkpoints.files import alone
from lightning_autotp.checkpoints.stored import original_shape
from lightning_autotp.export.reversal import ExportPlan, ReversalStep, describe_conversions, plan_export, skeleton
from lightning_autotp.export.safetensors_writer import Described, SafetensorsWriter
from lightning_autotp.layouts.names import join_names
from lightning_autotp.parameters.gathering import whole_tensor
from lightning_autotp.parameters.state import ParameterTable, is_parallel, parallel_models, parallel_state
from lightning_autotp.private.transformers_private import (
    SAFE_WEIGHTS_INDEX_NAME,
    TOKENIZER_CONFIG_FILE,
    TOKENIZER_FILES,
    PreTrainedModel,
    conversions_of,
    custom_object_save,
    set_conversions_of,
    tokenizer_class_from_name,
)
from lightning_autotp.progress import phase
from lightning_autotp.quantized.formats import QuantizationError
from lightning_autotp.ranks.agreement import raise_together

_log = logging.getLogger(__name__)

Guard = Callable[[], AbstractContextManager[None]]
"""Makes what surrounds a phase of the writing."""

ENTRY = "lightning_autotp"
"""Where in a checkpoint :func:`describe_models`' description is."""

_WEIGHTS = re.compile(r"model(-\d{5}-of-\d{5})?\.safetensors")
_STAGING = ".export.part"
_LOCK = ".export.lock"


class Exported(NamedTuple):
    """What an export wrote.

    Attributes:
        weights: the safetensors files' names.
        nbytes: the size of all tensors.
        tokenizer: the names of the tokenizer's files; empty if it has none.
    """

    weights: tuple[str, ...]
    nbytes: int
    tokenizer: tuple[str, ...]


def save_pretrained(
    model: nn.Module,
    directory: str | os.PathLike[str],
    *,
    write: bool = True,
    max_shard_size: int | str = "5GB",
    dtype: torch.dtype | None = None,
    tokenizer: Any = None,
    save_original_format: bool = True,
    every_process: bool = False,
) -> None:
    """Write a Hugging Face directory that plain ``from_pretrained`` loads.

    Collective over the model's tensor-parallel group (and over the data axis where FSDP2 has cut the model), whose rank
    0 writes: the configuration, the generation configuration, the tokenizer's files where they are known,
    safetensors files of the original shapes and names, as ``transformers.PreTrainedModel.save_pretrained`` names and
    splits them, and ``SHA256SUMS`` with the checksums of all these. No rank holds more than one tensor whole (or the
    few that transformers merges into one on the way out), besides its own part of the model.

    Args:
        model: a parallel ``transformers.PreTrainedModel``.
        directory: where to; it is made. Weights of an earlier export in it are replaced when the new ones are whole.
        write: whether rank 0 of this group writes at all (with several data-parallel groups only one should).
        max_shard_size: of a file, in bytes or like ``"5GB"``.
        dtype: in which floating-point tensors are written; as they are by default.
        tokenizer: a directory with a tokenizer's files, or a tokenizer or processor; by default the local directory
            that the model was loaded from, if it has such files.
        save_original_format: whether what transformers renamed, merged or split while it loaded the model is undone.
        every_process: whether every process calls this and not only the model's group: an error then reaches all.

    Raises:
        TypeError: if the model is not a ``PreTrainedModel``.
        RuntimeError: if it is not parallel, or has tied tensors that its class does not declare as tied.
        QuantizationError: if its weights are quantized.
        ValueError: for a tensor that safetensors files cannot hold, or a directory without a tokenizer's files.
        OSError: on the rank that writes, if it cannot.
        PeerError: on the other ranks then.
    """
    if not isinstance(model, PreTrainedModel):
        raise TypeError(
            f"save_pretrained writes a Hugging Face model, not a {type(model).__name__}: pass the PreTrainedModel"
            " itself, or save full_state_dict(model) instead"
        )
    table = ParameterTable(model)
    group = table.group
    together = None if every_process else group.process_group
    writes = write and group.rank == 0
    state = model.state_dict(keep_vars=True)

    def whole(name: str) -> Tensor | None:
        gathered = whole_tensor(state[name], table.meta(state[name]), group)
        return gathered.cpu() if writes else None

    with raise_together(together, f"planning the export to {directory}"):
        metas = (entry for _, parallel in parallel_models(model) for entry in parallel.metas.items())
        quantized = [name for name, meta in metas if meta.format is not None]
        if quantized:
            raise QuantizationError(
                f"{join_names(quantized)} of {type(model).__name__} are quantized, and its checkpoint is there: save"
                " what was trained beside them (trainer.strategy.save_pretrained(directory) or save_adapter), and merge"
                " it in one process"
            )
        tensors = _described(state, table, dtype)
        original = skeleton(type(model), model.config, tensors)
        if model.can_generate():
            original.generation_config = model.generation_config
        # What from_pretrained renamed, fused or cut on the way in is undone on the way out. (What it dequantized is
        # written as it is, with the names that transformers' own format has for the architecture.)
        if describe_conversions(model) is not None:
            set_conversions_of(original, conversions_of(model))
        if writes:
            tokenizer = tokenizer_of(tokenizer, source_of(model))
        plan = plan_export(original, tensors, max_shard_size=max_shard_size, save_original_format=save_original_format)
    guard = partial(raise_together, together, f"writing {directory}")
    exported = write_model(original, plan, directory, whole, tokenizer, writes=writes, guard=guard)
    if writes and not exported.tokenizer:
        _log.info("%s has no tokenizer: pass tokenizer=... to save_pretrained to have it written too", directory)


def write_model(
    original: Any,
    plan: ExportPlan,
    directory: str | os.PathLike[str],
    whole: Callable[[str], Tensor | None],
    tokenizer: Any = None,
    *,
    writes: bool = True,
    guard: Guard = nullcontext,
) -> Exported:
    """Write a planned directory. Collective as far as ``whole`` and ``guard`` are: by default one process writes alone.

    Args:
        original: what :func:`~lightning_autotp.export.reversal.skeleton` gave, with its generation configuration.
        plan: what to write.
        directory: where to.
        whole: gives one of the model's tensors, whole, on the CPU; ``None`` on ranks that do not write. It may be
            collective: all ranks call it for the same names in the same order.
        tokenizer: as for :func:`save_pretrained`, or a directory that may have none or not exist.
        writes: whether this rank writes.
        guard: makes what surrounds each phase, so that an error reaches all that take part.

    Raises:
        OSError: on the rank that writes, if it cannot; on the others, what ``guard`` makes of it.
    """
    copied: tuple[str, ...] = ()
    with ExitStack() as stack:
        with guard():
            if writes:
                staging = stack.enter_context(_staging(Path(directory)))
                writer = SafetensorsWriter(staging, plan.files, plan.tensors)
                _write_configuration(original, staging)
                copied = _write_tokenizer(tokenizer, staging)
        size = sum(tensor.nbytes for tensor in plan.tensors.values())
        with phase(f"exporting to {directory}", size, shown=writes) as told:

            def written(name: str) -> None:
                told(plan.tensors[name].nbytes)

            for step in plan.steps:
                _write_step(step, whole, writer if writes else None, guard, written)
        with guard():
            if writes:
                writer.finish()
                _publish(staging, Path(directory), plan, writer.checksums)
                stack.close()  # before any rank goes on
    return Exported(tuple(plan.files), size, copied)


def _write_step(
    step: ReversalStep,
    whole: Callable[[str], Tensor | None],
    writer: SafetensorsWriter | None,
    guard: Guard,
    written: Callable[[str], None],
) -> None:
    """Make a step's parameters whole and write what is made of them; they are gone afterwards."""
    wholes = {parameter.name: whole(parameter.name) for parameter in step.parameters}
    with guard():
        if writer is not None:
            values = {name: value for name, value in wholes.items() if value is not None}
            for name, pieces in step.pieces(values):
                writer.write(name, pieces)
                written(name)


def describe_models(module: nn.Module) -> dict[str, Any]:
    """What the Hugging Face models in a module are, for :mod:`~lightning_autotp.export.from_checkpoint` to know.

    Args:
        module: a LightningModule, for instance.

    Returns:
        ``{"models": {path in the module: {"class": name in transformers, "config": ..., "generation_config": ... or
        None, "source": directory or Hub id it was loaded from, or None, "conversions": what transformers converted
        then, or None}}}``: plain data.
    """
    models: dict[str, Any] = {}
    for path, model in module.named_modules():
        if isinstance(model, PreTrainedModel) and not any(path.startswith(outer and f"{outer}.") for outer in models):
            generation = model.generation_config.to_json_string(use_diff=False) if model.can_generate() else "null"
            models[path] = {
                "class": type(model).__name__.removeprefix("FSDP"),
                "config": json.loads(model.config.to_json_string(use_diff=False)),
                "generation_config": json.loads(generation),
                "source": source_of(model),
                "conversions": describe_conversions(model),
            }
    return {"models": models}


def source_of(model: PreTrainedModel) -> str | None:
    """The directory or Hub id that a model was loaded from, ``None`` if it was not."""
    source = parallel_state(model).sources.get("") if is_parallel(model) else None
    return model.config.name_or_path or None if source is None else source.origin


def _described(
    state: Mapping[str, Any], table: ParameterTable, dtype: torch.dtype | None
) -> dict[str, tuple[Described, Hashable]]:
    """What the whole tensors of a state dict are, and which: tied ones are one object."""
    other = [name for name, value in state.items() if not isinstance(value, Tensor)]
    if other:
        raise ValueError(
            f"the model's state dict has values that are not tensors, which safetensors files cannot hold:"
            f" {join_names(other)}. Save full_state_dict(model) with torch.save instead"
        )
    tensors: dict[str, tuple[Described, Hashable]] = {}
    for name, value in state.items():
        shape = original_shape(value, table.meta(value))
        tensors[name] = Described(shape, written_dtype(value.dtype, dtype)), id(value)
    return tensors


def written_dtype(own: torch.dtype, wanted: torch.dtype | None) -> torch.dtype:
    """The dtype a tensor is written in."""
    return wanted if wanted is not None and own.is_floating_point else own


@contextmanager
def _staging(directory: Path) -> Iterator[Path]:
    """A hidden directory inside ``directory`` for files that are not whole yet; nothing of it stays."""
    made = not directory.exists()
    staging = directory / _STAGING
    try:
        directory.mkdir(parents=True, exist_ok=True)
        with alone(directory, directory / _LOCK):
            shutil.rmtree(staging, ignore_errors=True)  # of an export that was killed
            staging.mkdir()
            try:
                yield staging
            finally:
                shutil.rmtree(staging, ignore_errors=True)
    finally:
        if made and directory.is_dir() and not any(directory.iterdir()):
            directory.rmdir()


def _publish(staging: Path, directory: Path, plan: ExportPlan, checksums: Mapping[str, str]) -> None:
    """Move what is whole into its place, and remove the weights of an earlier export; the index comes last."""
    index = None
    if plan.index is not None:
        index = staging / SAFE_WEIGHTS_INDEX_NAME
        index.write_text(json.dumps(plan.index, indent=2, sort_keys=True) + "\n", encoding="utf-8")
    _write_checksums(staging, checksums)
    for name in (CHECKSUMS, SAFE_WEIGHTS_INDEX_NAME):
        (directory / name).unlink(missing_ok=True)
    for file in directory.iterdir():
        if _WEIGHTS.fullmatch(file.name) and file.name not in plan.files:
            file.unlink()
    for file in staging.iterdir():
        if file.is_dir():
            shutil.copytree(file, directory / file.name, dirs_exist_ok=True)
        elif file != index:
            os.replace(file, directory / file.name)
    if index is not None:
        os.replace(index, directory / SAFE_WEIGHTS_INDEX_NAME)


def _write_checksums(staging: Path, known: Mapping[str, str]) -> None:
    files = {file.relative_to(staging).as_posix(): file for file in staging.rglob("*") if file.is_file()}
    digests = {name: known.get(name) or sha256_of(file) for name, file in files.items()}
    (staging / CHECKSUMS).write_text(checksums_text(digests), encoding="utf-8")


def _write_configuration(original: Any, staging: Path) -> None:
    """What transformers' ``save_pretrained`` writes besides the weights."""
    original.config.dtype = str(original.dtype).removeprefix("torch.")
    original.config.architectures = [type(original).__name__]
    if original.is_remote_code():
        custom_object_save(original, staging, config=original.config)
    original.config.save_pretrained(staging)
    if original.can_generate():
        original.generation_config.save_pretrained(staging)


def _write_tokenizer(tokenizer: Any, staging: Path) -> tuple[str, ...]:
    """Write a tokenizer, or copy the files of one; the files' names."""
    before = {file.name for file in staging.iterdir()}
    if hasattr(tokenizer, "save_pretrained"):
        tokenizer.save_pretrained(staging)
    elif tokenizer is not None:
        for file in tokenizer_files(Path(tokenizer)):
            if file.is_dir():
                shutil.copytree(file, staging / file.name)
            else:
                shutil.copy(file, staging / file.name)
    return tuple(sorted({file.name for file in staging.iterdir()} - before))


def tokenizer_of(tokenizer: Any, source: str | None) -> Any:
    """The tokenizer, or directory of one, that was asked for; else where the model came from, which may have none.

    Raises:
        ValueError: if a directory was asked for that has none.
    """
    if tokenizer is None:
        return source
    if not hasattr(tokenizer, "save_pretrained") and not tokenizer_files(Path(tokenizer)):
        raise ValueError(f"{tokenizer} has none of the files of a tokenizer: name the directory that has them")
    return tokenizer


def tokenizer_files(directory: Path) -> list[Path]:
    """The files and directories of a tokenizer or processor in a directory, which need not exist."""
    names = set(TOKENIZER_FILES)
    described = directory / TOKENIZER_CONFIG_FILE
    if described.is_file():
        # Vocabularies are called as the tokenizer's class says.
        kind = tokenizer_class_from_name(json.loads(described.read_text(encoding="utf-8")).get("tokenizer_class") or "")
        names |= set(getattr(kind, "vocab_files_names", {}).values())
    return [directory / name for name in sorted(names) if (directory / name).exists()]
