"""Which weights of a model are to be quantized: noted while it is built, done when a rank has its part.

Plans are made for a model as it is before quantization: a frozen linear layer whose weight is quantized computes the
same product with other numbers. So inside :func:`~lightning_autotp.pretrained.meta_model.meta_model` the layers stay
``nn.Linear``, and a :class:`~lightning_autotp.quantized.formats.Format` is left on each weight that
``quantization_config`` means. The solver cuts such a weight between blocks only (``Format.units``), and each rank
quantizes what it has read, with the library itself: then its numbers and scales are those that one process has. What
the model's code computes of such a weight (the norms of DoRA) is recorded to be of the numbers that it will stand for
(:class:`Rounding`).

Of a checkpoint that is quantized already (:mod:`~lightning_autotp.quantized.files`) each rank reads its part
of the quantized numbers and of the scales, into a layer that the library makes (``Format.tensors``).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from traceback import walk_tb
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from lightning_autotp.building.checkpoint_reading import CheckpointError
from lightning_autotp.building.recipe import Recipe
from lightning_autotp.layouts.names import join_names
from lightning_autotp.private.torchao_private import casts_on_the_wire, is_float8_layer
from lightning_autotp.quantized.formats import EightBit, Format, FourBit, QuantizationError, WeightOnly, plain_linear

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_NAME = "autotp_format"
LIBRARIES = ("bitsandbytes", "torchao")
"""Which can quantize, each under its own name in transformers."""

_INSTEAD = (
    "Let each rank quantize, or read, its part: build the model in configure_model() or meta_model() by"
    " from_pretrained(..., quantization_config=...), or from a checkpoint that is quantized, and call no other function"
    " that quantizes it"
)


def format_of(parameter: Tensor) -> Format | None:
    """How a parameter is to be quantized when its values are there; ``None`` if it is not."""
    found: Format | None = vars(parameter).get(_NAME)
    return found


def note_formats(model: nn.Module, formats: dict[str, Format]) -> None:
    """Leave them on the parameters of these names, which are frozen from now on."""
    for name, found in formats.items():
        parameter = model.get_parameter(name)
        vars(parameter)[_NAME] = found
        parameter.requires_grad_(False)


class Rounding:
    """Makes a whole weight's numbers those that it stands for when it is quantized, in place."""

    def __init__(self, format: Format) -> None:
        self._format = format
        self.__name__ = "rounding"

    def __call__(self, weight: Tensor) -> Tensor:
        """Change a weight ``[out, in]``, and return it."""
        return weight.copy_(self._format.rounded(weight))


def as_loaded(recipe: Recipe) -> Recipe:
    """The recipe of a weight's values before :class:`Rounding`: each rank quantizes its part of these itself."""
    return replace(recipe, steps=tuple(step for step in recipe.steps if not isinstance(step.func, Rounding)))


def formats_asked_for(model: nn.Module, quantizer: Any, origin: str, dtype: torch.dtype | None) -> dict[str, Format]:
    """What transformers' quantizer of a model does while it is loaded, or has done, by the names of the weights.

    Layers that it has put in the place of ``nn.Linear`` are ``nn.Linear`` again afterwards, on meta.

    Args:
        model: the model, without weights.
        quantizer: transformers'.
        origin: where the model comes from.
        dtype: of the model, for weights that are quantized already.

    Raises:
        QuantizationError: if such weights cannot be cut into parts.
    """
    names = [name for name, _ in model.named_parameters() if quantizer.param_needs_quantization(model, name)]
    config = quantizer.quantization_config
    before = dtype or torch.get_default_dtype() if quantizer.pre_quantized else None
    formats = {name: _format(config, model, name, origin, before) for name in names}
    for name in names:
        path = name.rpartition(".")[0]
        layer: Any = model.get_submodule(path)
        if type(layer) is not nn.Linear:
            weight = torch.empty_like(layer.weight.data, dtype=formats[name].dtype)
            plain = plain_linear(layer.in_features, layer.out_features, weight, layer.bias)
            model.set_submodule(path, plain)
    return formats


def note_quantization(model: PreTrainedModel, config: Any) -> None:
    """Note what ``from_pretrained(..., quantization_config=config)`` would quantize of a model without weights.

    Args:
        model: whose layers stay; the weights are frozen.
        config: transformers', of bitsandbytes or torchao.

    Raises:
        QuantizationError: if these weights cannot be cut into parts.
    """
    from transformers.quantizers import AutoHfQuantizer  # which imports torchao, and that prints warnings

    quantizer = AutoHfQuantizer.from_config(config, pre_quantized=False)
    layers = dict(model.named_modules())
    quantizer.preprocess_model(model, device_map=None)
    formats = formats_asked_for(model, quantizer, type(model).__name__, None)
    for name, found in formats.items():
        path = name.rpartition(".")[0]
        model.set_submodule(path, layers[path])  # the library's layers were of torch's default dtype
        formats[name] = replace(found, dtype=model.get_parameter(name).dtype)
    note_formats(model, formats)


def refuse_quantized(model: nn.Module) -> None:
    """Refuse a model that was quantized already: its weights, or layers that quantize what they multiply.

    Raises:
        QuantizationError: naming them.
    """
    in_float8 = {name: layer for name, layer in model.named_modules() if is_float8_layer(layer)}
    gathered = [name for name, layer in in_float8.items() if casts_on_the_wire(layer)]
    if gathered:
        raise QuantizationError(
            f"{join_names(gathered)} of {type(model).__name__} are to be gathered in float8"
            " (enable_fsdp_float8_all_gather=True): their weights are tensors of another class, which cannot be"
            " sharded. Leave that out of Float8LinearConfig: data_parallel_size > 1 gathers them as they are"
        )
    values: list[tuple[str, Tensor | nn.Module]] = [*model.named_parameters(), *model.named_modules()]
    found = {name: value for name, value in values if _library(_modules(value)) and name not in in_float8}
    if found:
        kinds = sorted({type(value).__name__ for value in found.values()})
        raise QuantizationError(
            f"{join_names(list(found))} of {type(model).__name__} are quantized already ({', '.join(kinds)}), which"
            f" cannot be cut. {_INSTEAD}"
        )


@contextmanager
def translated_errors() -> Iterator[None]:
    """Within it, what a library raises that quantizes weights without values says what to do instead.

    Raises:
        QuantizationError: for an error in one of its functions.
    """
    try:
        yield
    except CheckpointError:
        raise
    except Exception as error:
        library = _library(str(frame.f_globals.get("__name__")) for frame, _ in walk_tb(error.__traceback__))
        if not library:
            raise
        raise QuantizationError(
            f"{library} cannot quantize weights that have no values yet ({type(error).__name__}: {error}). {_INSTEAD}"
        ) from error


def _format(config: Any, model: nn.Module, name: str, origin: str, dtype: torch.dtype | None) -> Format:
    path, _, attribute = name.rpartition(".")
    layer: Any = model.get_submodule(path)
    method = getattr(config.quant_method, "value", config.quant_method)
    if not isinstance(layer, nn.Linear) or attribute != "weight":
        raise _refused(
            origin, name, method, f"it is the {attribute} of a {type(layer).__name__}, not the weight of a linear layer"
        )
    if getattr(layer, "source_cls", nn.Linear) is not nn.Linear:
        source: Any = layer.source_cls
        raise _refused(origin, name, method, f"it is the weight of a {source.__name__}, not of an nn.Linear")
    dtype = dtype or layer.weight.dtype
    if method == "bitsandbytes" and config.load_in_4bit:
        kind, storage = config.bnb_4bit_quant_type, config.bnb_4bit_quant_storage
        found = FourBit(dtype, kind, config.bnb_4bit_compute_dtype, storage, config.bnb_4bit_use_double_quant)
        if layer.in_features % found.block:  # then bitsandbytes' CPU kernels are wrong in one process as well
            reason = (
                f"its rows of {layer.in_features} are not a multiple of {found.block}: name it in llm_int8_skip_modules"
            )
            raise _refused(origin, name, method, reason)
        return found
    if method == "bitsandbytes" and not config.llm_int8_has_fp16_weight:
        return EightBit(dtype, config.llm_int8_threshold)
    if method == "torchao":
        asked = config.get_apply_tensor_subclass()
        kind = type(asked).__name__
        granularity = getattr(asked, "granularity", None)
        by = type(granularity).__name__
        if kind in ("Int8WeightOnlyConfig", "Float8WeightOnlyConfig") and by == "PerRow":
            return WeightOnly(dtype, asked, None, cuts_rows=True)
        if kind == "IntxWeightOnlyConfig":
            return WeightOnly(dtype, asked, getattr(granularity, "group_size", None), cuts_rows=False)
        raise _refused(origin, name, method, f"{kind} with {by}")
    raise _refused(origin, name, method, "this method")


def _refused(origin: str, name: str, method: str, how: str) -> QuantizationError:
    return QuantizationError(
        f"{origin}: weights are quantized ({method}), and {name} cannot be quantized part by part: {how}. Use a"
        " checkpoint that is not quantized and leave quantization_config out, or use a format that docs/lora.md of"
        " lightning_autotp lists"
    )


def _library(modules: Iterable[str]) -> str:
    """The first library that these modules belong to; empty if there is none."""
    packages = (module.partition(".")[0] for module in modules)
    return next((package for package in packages if package in LIBRARIES), "")


def _modules(value: Tensor | nn.Module) -> Iterator[str]:
    """Where the classes of a tensor or a module are from."""
    return (kind.__module__ for kind in type(value).__mro__)
