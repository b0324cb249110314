"""The model and the batch that a command is asked about.

No code of a repository is run: a model must be one of transformers' own.
"""

from __future__ import annotations

import inspect
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from pickle import UnpicklingError
from typing import Any, NamedTuple

import torch
import transformers
from torch import nn
from transformers import AutoConfig

from lightning_autotp.capture.capture import CaptureError, first_line, language_model_inputs, step_size
from lightning_autotp.capture.nested import tensors_in
from lightning_autotp.pipeline import SYNTHETIC
from lightning_autotp.planning.rehearsal import first_row, one_row, rows_of
from lightning_autotp.pretrained.hub import refuse_missing
from lightning_autotp.private.transformers_private import PreTrainedModel
from lightning_autotp.quantized.noted import LIBRARIES, note_quantization
from lightning_autotp.solving.pricing import NOMINAL_LENGTH


def model_of(name: str, auto_class: str | None = None) -> nn.Module:
    """The model without weights; where its checkpoint is quantized by bitsandbytes or torchao, as one that is.

    Args:
        name: a Hugging Face Hub id, a directory with a ``config.json``, or such a file.
        auto_class: the class of transformers that builds it, such as ``AutoModelForSequenceClassification``; by default
            the one that its configuration names, or else ``AutoModelForCausalLM``.

    Raises:
        OSError: if there is no such model.
        ValueError: if it needs code of its repository, or the class is none of transformers or is of other models.
        QuantizationError: if its weights are quantized in a way in which they cannot be cut into parts.
    """
    refuse_missing(name)
    if Path(name).is_file() and Path(name).name == "config.json":
        name = str(Path(name).parent)  # as from_pretrained takes it
    try:
        return _built(name, AutoConfig.from_pretrained(name, trust_remote_code=False), auto_class)
    except (OSError, ValueError):
        raise
    except Exception as error:  # what a configuration is made of, and what a model makes of it, may raise any
        kind = type(error).__name__
        raise ValueError(f"transformers cannot build {name} from its configuration ({kind}: {error})") from error


def _built(name: str, config: Any, auto_class: str | None) -> nn.Module:
    named = [auto_class] if auto_class is not None else [*(config.architectures or ()), "AutoModelForCausalLM"]
    kind = next((found for found in map(_builder, named) if found is not None), None)
    if kind is None:
        raise ValueError(
            f"auto_class={auto_class!r}: transformers {transformers.__version__} has no model class of that name, such"
            " as AutoModelForCausalLM, AutoModelForSequenceClassification or BertForMaskedLM"
        )
    with torch.device("meta"):
        if isinstance(kind, type) and issubclass(kind, PreTrainedModel):
            made: Any = kind(config)
            return _as_stored(made.to(dtype=getattr(config, "dtype", None) or torch.float32))
        try:
            built: Any = kind.from_config(config, trust_remote_code=False)
        except ValueError as error:  # lists all the configurations that it knows
            if "Unrecognized configuration class" not in str(error):
                raise
            raise ValueError(
                f"{kind.__name__} has no model for {name}, which is of the type {config.model_type}: name another"
                " class with --auto-class"
            ) from error
    return _as_stored(built)


def _as_stored(model: PreTrainedModel) -> nn.Module:
    if _stored_by(model) in LIBRARIES:
        note_quantization(model, model.config.quantization_config)
    return model


def _stored_by(model: nn.Module) -> str | None:
    """The method by which the weights of its checkpoint are quantized, if they are."""
    described: Any = getattr(getattr(model, "config", None), "quantization_config", None)
    return None if described is None else str(described.get("quant_method"))


def weight_warnings(model: nn.Module) -> Iterator[str]:
    """What is to be known of a checkpoint whose weights are quantized in a way in which they cannot be trained."""
    method = _stored_by(model)
    if method is not None and method not in LIBRARIES:
        yield (
            f"the checkpoint is quantized ({method}); all figures are of its weights once they are dequantized, as they"
            " must be to train them"
        )


def _builder(name: str) -> Any:
    """A class of transformers that makes models; ``None`` if it is none."""
    kind = getattr(transformers, name, None)
    is_model = isinstance(kind, type) and (issubclass(kind, PreTrainedModel) or hasattr(kind, "from_config"))
    return kind if is_model and kind is not AutoConfig else None


class Batch(NamedTuple):
    """What a training step passes to the model, by the names of the arguments of its ``forward``.

    Attributes:
        inputs: all of it.
        row: one row of it.
        rows: how many it has.
        source: where it comes from, as a plan says it.
    """

    inputs: dict[str, Any]
    row: dict[str, Any]
    rows: int
    source: str

    @property
    def has_sequences(self) -> bool:
        """Whether a row has tokens, or other positions."""
        return bool(step_size(tensors_in(self.row)).lengths)


def batch_of(example: Path | None, model: nn.Module, length: int = NOMINAL_LENGTH) -> Batch:
    """The batch of a file, or a synthetic one.

    Args:
        example: a file that ``torch.save`` has written (``.pt``), of tensors alone, or a JSON file, whose lists are
            tensors; without one, the batch is synthetic.
        model: the model.
        length: tokens of a synthetic row.

    Raises:
        ValueError: if the file has no batch for this model.
        CaptureError: if none can be made.
    """
    if example is None:
        try:
            made = language_model_inputs(model)
        except CaptureError as error:
            raise CaptureError(f"{error} For a command write that batch to a file: --example batch.pt") from error
        return Batch(made, one_row(model, made, length), len(made["input_ids"]), SYNTHETIC)
    batch = _named(_read(example), model, example)
    rows = rows_of(batch)
    if rows is None:
        raise ValueError(f"example={str(example)!r} has no tensor with rows")
    return Batch(batch, first_row(batch), rows, "example_inputs")


def _read(file: Path) -> Any:
    try:
        if file.suffix == ".json":
            return {
                name: torch.tensor(value) if isinstance(value, list) else value
                for name, value in json.loads(file.read_text()).items()
            }
        return torch.load(file, map_location="cpu", weights_only=True)
    except Exception as error:  # a file that torch.save has not written may raise any
        is_foreign = isinstance(error, UnpicklingError | KeyError)
        why = "torch.save has not written it, or has written more than tensors" if is_foreign else first_line(error)
        raise ValueError(
            f"example={str(file)!r} cannot be read ({why}): write the batch with"
            " torch.save({'input_ids': ..., 'labels': ...}, 'batch.pt'), or as JSON"
        ) from error


def _named(batch: Any, model: nn.Module, file: Path) -> dict[str, Any]:
    """The batch as keyword arguments."""
    signature = inspect.signature(model.forward)
    try:
        if isinstance(batch, Mapping):
            signature.bind_partial(**batch)
            return dict(batch)
        given = batch if isinstance(batch, tuple | list) else (batch,)
        return dict(signature.bind_partial(*given).arguments)
    except TypeError as error:
        raise ValueError(
            f"example={str(file)!r} is no batch for {type(model).__name__}.forward ({error}), which takes"
            f" {', '.join(signature.parameters)}"
        ) from error
