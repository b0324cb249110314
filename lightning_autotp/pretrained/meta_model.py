"""``from_pretrained`` without reading weights: the transformers side of building a model without its memory.

Inside :func:`meta_model`, ``from_pretrained`` runs as it is: configuration, dtype, file resolution, construction, key
renaming, conversions, ties, newly initialized parameters, its load report. Only one of its steps is replaced, the one
that reads: transformers' own conversion code gets, instead of each tensor in the files, a deferred tensor that stands
for it. What it does with those is recorded like everything else, so a parameter's recipe says which file's tensors feed
it and how. Only transformers' loading code is imported here; no model is known by name.
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor
from transformers.utils.logging import set_tqdm_hook

from lightning_autotp.building.checkpoint_reading import (
    CheckpointError,
    CheckpointSource,
    CheckpointTensor,
    MismatchError,
    check_named,
    read_headers,
)
from lightning_autotp.building.deferred import deferred_init
from lightning_autotp.building.recorder import Recorder
from lightning_autotp.building.weight_conversion import same_values
from lightning_autotp.pretrained.hub import cached_files_once
from lightning_autotp.private.torch_private import replaced
from lightning_autotp.private.transformers_private import (
    PreTrainedModel,
    convert_and_load_state_dict_in_model,
    with_loading_step,
)
from lightning_autotp.quantized.files import KeptWeights
from lightning_autotp.quantized.formats import Format, QuantizationError
from lightning_autotp.quantized.noted import (
    LIBRARIES,
    Rounding,
    formats_asked_for,
    note_formats,
    translated_errors,
)

_log = logging.getLogger(__name__)


@contextmanager
def meta_model() -> Iterator[None]:
    """Within it, ordinary code builds a model whose parameters take no memory, with or without pretrained weights.

    ``from_pretrained`` records which tensors of which files feed each parameter (``model.autotp_source`` has the
    files), anything else is recorded by :func:`~lightning_autotp.building.deferred.deferred_init`. Class,
    configuration, dtype, ties, buffers and the random generator's state are those that the same code gives outside.
    torch and transformers are as before afterwards, also after an exception. Nestable.

    Weights that are not read from files as tensors (``state_dict=``, GGUF) are loaded as usual and kept as they are
    until the parameters are filled from them. A quantized checkpoint is read like any other if it is dequantized on the
    way (``quantization_config=...(dequantize=True)``). With the ``quantization_config`` of bitsandbytes or torchao each
    rank quantizes its part of the linear layers' weights when it is read; of a checkpoint that these have quantized it
    reads its part of the quantized numbers.

    In a process group, files from the Hub are fetched by one process of each machine, as
    :func:`~lightning_autotp.pretrained.hub.cached_files_once` has it.

    Raises:
        FetchError: from ``from_pretrained``, if files cannot be fetched from the Hub.
        CheckpointError: from ``from_pretrained``, if a file is missing or damaged or does not fit the configuration, or
            if the weights would stay quantized; a :class:`~lightning_autotp.quantized.formats.QuantizationError` if
            they cannot be quantized part by part.
        ValueError: from ``from_pretrained(use_kernels=True)``, with what to write instead.
    """
    with (
        translated_errors(),
        deferred_init() as recorder,
        with_loading_step(partial(_recording, recorder)),
        _refusing_kernels(),
        cached_files_once(),
    ):
        yield


def _recording(recorder: Recorder, load: Callable[..., tuple[Any, Any]]) -> Callable[..., tuple[Any, Any]]:
    """The step of ``from_pretrained`` that reads, without reading."""

    def record(
        model: PreTrainedModel, state_dict: Any, checkpoint_files: list[str] | None, load_config: Any, **kwargs: Any
    ) -> tuple[Any, Any]:
        formats: dict[str, Format] = {}
        kept: KeptWeights | None = None
        origin = str(load_config.pretrained_model_name_or_path)
        if state_dict is None and load_config.is_quantized and not _is_dequantized(load_config):
            quantizer = load_config.hf_quantizer
            formats = formats_asked_for(model, quantizer, origin, load_config.dtype)
            if quantizer.pre_quantized:
                shapes = {name: tuple(model.get_parameter(name).shape) for name in formats}
                kept = KeptWeights(recorder, quantizer, formats, shapes)
                kept.take_over(load_config.weight_mapping or ())
            else:
                load_config = dataclasses.replace(load_config, hf_quantizer=None)
        if state_dict is not None or not checkpoint_files:
            return load(model, state_dict, checkpoint_files, load_config, **kwargs)
        info = _record_checkpoint(recorder, model, checkpoint_files, load_config)
        note_formats(model, formats if kept is None else kept.formats(origin))
        if kept is None:
            for name, format in formats.items():
                recorder.changed_by(Rounding(format), model.get_parameter(name))
        return info, None

    return record


@contextmanager
def _refusing_kernels() -> Iterator[None]:
    """``use_kernels=True`` takes the kernels for the device of a model, which seems to be the CPU here."""
    set_use_kernels = PreTrainedModel.set_use_kernels

    def refuse(model: PreTrainedModel, use_kernels: bool, *args: Any, **kwargs: Any) -> None:
        if use_kernels:
            raise ValueError(
                f"use_kernels=True takes kernels for the device that the {type(model).__name__} is on, and it has none"
                " yet: leave it out, and name the device in the next lines:\n"
                "  from kernels import Mode, kernelize\n"
                "  transformers.integrations.hub_kernels.register_kernel_mapping_transformers()\n"
                '  kernelize(model, mode=Mode.TRAINING, device="cuda")'
            )
        set_use_kernels(model, use_kernels, *args, **kwargs)

    with replaced(PreTrainedModel, set_use_kernels=refuse):
        yield


@dataclasses.dataclass(frozen=True)
class _Unread:
    """Stands for a tensor in a file where transformers would slice it, then cast it (maybe in a thread of its own)."""

    recorder: Recorder
    tensor: CheckpointTensor

    def __getitem__(self, where: Any) -> _Unread:
        return self

    def is_floating_point(self) -> bool:
        """By which a quantizer tells what to cast."""
        return self.tensor.dtype.is_floating_point

    def to(self, device: Any = None, dtype: torch.dtype | None = None) -> Tensor:
        """A deferred tensor of the wanted dtype; where it will lie is the strategy's business."""
        return self.recorder.source(dataclasses.replace(self.tensor, dtype=dtype or self.tensor.dtype))


def _record_checkpoint(recorder: Recorder, model: PreTrainedModel, files: list[str], load_config: Any) -> Any:
    """What ``_load_pretrained_model`` does, on deferred tensors.

    Returns:
        transformers' ``LoadStateDictInfo``, from which it goes on to initialize, tie and report.
    """
    devices = sorted(set(map(str, (load_config.device_map or {}).values())))
    if len(devices) > 1:
        raise CheckpointError(
            f"from_pretrained(device_map=...) spreads the model over {devices}, but here the strategy decides where "
            "each part of a parameter goes: leave device_map out"
        )
    origin = str(load_config.pretrained_model_name_or_path)
    check_named(origin, files)
    with recorder.paused():
        tensors = read_headers(files)
    with _without_progress_bars():
        info, _ = convert_and_load_state_dict_in_model(
            model=model,
            state_dict={name: _Unread(recorder, tensor) for name, tensor in tensors.items()},
            load_config=dataclasses.replace(load_config, device_map={"": "meta"}),
        )
    if info.conversion_errors:
        raise MismatchError(
            f"{origin}: {len(info.conversion_errors)} tensors could not be converted to what the model needs:\n"
            + "\n".join(f"  {name}: {error.splitlines()[-1]}" for name, error in sorted(info.conversion_errors.items()))
            + "\nThe configuration (config.json) may belong to other weights: use theirs"
        )
    if info.mismatched_keys and not load_config.ignore_mismatched_sizes:
        raise MismatchError(_mismatch(origin, info, tensors))
    with recorder.paused():
        _settle_ties(recorder, model, info)
    model.__dict__["autotp_source"] = CheckpointSource(origin, tuple(files), tensors)
    return info


@contextmanager
def _without_progress_bars() -> Iterator[None]:
    """Transformers would show how weights are loaded, on every rank, where none are."""
    before = set_tqdm_hook(lambda bar, args, kwargs: bar(*args, **(kwargs | {"disable": True})))
    try:
        yield
    finally:
        set_tqdm_hook(before)


def _is_dequantized(load_config: Any) -> bool:
    """Whether weights in files that are quantized are dequantized on the way, and then like any others.

    Raises:
        QuantizationError: if they are not, and no format of the library's is known.
    """
    quantizer = load_config.hf_quantizer
    config = quantizer.quantization_config
    method = getattr(config.quant_method, "value", config.quant_method)
    if not quantizer.pre_quantized or method in LIBRARIES:
        return False
    if getattr(config, "dequantize", False):
        return True
    origin = load_config.pretrained_model_name_or_path
    advice = "Load it once with transformers, call model.dequantize() and model.save_pretrained(...), and use that copy"
    if hasattr(config, "dequantize"):
        name = type(config).__name__
        advice = f"Pass quantization_config={name}(dequantize=True) to from_pretrained: each rank dequantizes its part"
    raise QuantizationError(
        f"{origin}: the checkpoint is quantized ({method}); such weights cannot be cut into parts and trained. {advice}"
    )


def _mismatch(origin: str, info: Any, tensors: dict[str, CheckpointTensor]) -> str:
    rows = []
    for name, found, expected in sorted(info.mismatched_keys):
        file = f" in {tensors[name].file}" if name in tensors else ""
        rows.append(f"  size mismatch for {name}: {tuple(found)}{file}, but the model's is {tuple(expected)}")
    return (
        f"{origin}: {len(rows)} tensors of the checkpoint do not have the shapes of the model's parameters:\n"
        + "\n".join(rows)
        + "\nThe configuration (config.json, or arguments that change it) belongs to other weights: use theirs, or "
        "pass ignore_mismatched_sizes=True to from_pretrained to initialize these parameters again"
    )


def _settle_ties(recorder: Recorder, model: PreTrainedModel, info: Any) -> None:
    """Decide on ties whose two tensors are both in the checkpoint, as ``tie_weights`` would if it saw their values."""
    absent = info.missing_and_mismatched()
    for target, source in list(model.all_tied_weights_keys.items()):
        if target in absent or source in absent:
            continue
        one, other = (recorder.recipe_of(model.get_parameter_or_buffer(name)) for name in (source, target))
        if same_values(one, other):
            info.missing_keys.add(target)  # tie_weights() then ties it to the other one
        else:
            model.all_tied_weights_keys.pop(target)
            _log.warning(
                "%s and %s are tied by the model's configuration, but the checkpoint has different values for them: "
                "they are NOT tied. Set tie_word_embeddings=False in the configuration to silence this warning",
                source,
                target,
            )
