"""Checkpoints whose weights are quantized already: what their files have of each weight is kept as it is.

transformers gathers the tensors of a quantized weight (numbers, scales, what describes them) and gives them to an
operation of its quantizer, which makes the library's weight of them. Here another operation takes its place: it keeps
the deferred tensors, and gives the layer a weight that stands for them. So names and conversions on the way are
transformers' own, and :mod:`~lightning_autotp.loading.parameters` reads of each tensor what belongs into a process.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from lightning_autotp.building.recorder import Recorder
from lightning_autotp.quantized.formats import Format, QuantizationError


@dataclass(frozen=True)
class _Absent:
    """Stands for the numbers of a weight of which only quantized ones are in a file."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype

    def read(self, box: Sequence[tuple[int, int]] | None = None) -> Tensor:
        raise QuantizationError(
            f"{self.name} is quantized in the checkpoint, and code that builds the model reads it as ordinary numbers:"
            " start from a checkpoint that is not quantized, with quantization_config"
        )


class KeptWeights:
    """Takes the place of the operation that makes a quantizer's weights.

    Args:
        recorder: what is being recorded.
        quantizer: transformers'.
        formats: of the weights that are quantized.
        shapes: of these weights.
    """

    def __init__(
        self, recorder: Recorder, quantizer: Any, formats: Mapping[str, Format], shapes: Mapping[str, tuple[int, ...]]
    ) -> None:
        self.hf_quantizer = quantizer  # by which transformers knows that nothing is to be cast before
        self._recorder, self._formats, self._shapes = recorder, formats, shapes
        self._found: dict[str, dict[str, Tensor]] = {}

    def __deepcopy__(self, memo: dict[int, Any]) -> KeptWeights:
        return self

    def take_over(self, conversions: Sequence[Any]) -> None:
        """Be in the place of the quantizer's operation in transformers' conversions."""
        theirs = {type(each) for own in self.hf_quantizer.get_weight_conversions() for each in own.operations}
        for conversion in conversions:
            operations = getattr(conversion, "operations", None)  # a conversion that only renames has none
            if operations is not None:
                conversion.operations = [self if type(each) in theirs else each for each in operations]

    def convert(self, input_dict: dict[str, Any], full_layer_name: str, **others: Any) -> dict[str, Any]:
        """What transformers calls with the tensors of one weight."""
        if full_layer_name not in self._formats:
            return input_dict
        parts = {name: value[0] if isinstance(value, list) else value for name, value in input_dict.items()}
        self._found[full_layer_name] = parts
        shape, dtype = self._shapes[full_layer_name], self._formats[full_layer_name].dtype
        return {full_layer_name: self._recorder.source(_Absent(full_layer_name, shape, dtype))}

    def formats(self, origin: str) -> dict[str, Format]:
        """The formats of all weights, with how their parts are read. To be called once.

        Raises:
            QuantizationError: if a weight is not there, or there in another way.
        """
        found = {name: self._stored(name, format, origin) for name, format in self._formats.items()}
        self._found.clear()  # the model keeps its conversions, and what is deferred and alive would be read in the end
        return found

    def _stored(self, name: str, format: Format, origin: str) -> Format:
        parts = self._found.get(name, {})
        try:
            as_kept, tensors = format.as_stored(parts, self._shapes[name], self._described(name, parts))
        except QuantizationError as error:
            raise QuantizationError(
                f"{origin}: the checkpoint is quantized, and {name} cannot be read part by part: {error}. Quantize a"
                " checkpoint that is not quantized while it is loaded (quantization_config), or save this one again"
                " with transformers"
            ) from error
        recipes = {part: self._recorder.recipe_of(tensor) for part, tensor in tensors.items()}
        return replace(as_kept, stored=recipes)

    def _described(self, name: str, parts: Mapping[str, Tensor]) -> Mapping[str, Any]:
        """What the files say of a weight in words: in a tensor, or in a header."""
        texts = [self._recorder.values(tensor) for part, tensor in parts.items() if ".quant_state." in part]
        if texts:
            return dict(json.loads(bytes(texts[0].tolist())))
        return dict(json.loads(getattr(self.hf_quantizer, "metadata", {}).get(name, "{}")))
