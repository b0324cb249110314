"""How the weight of a linear layer is quantized: what a rank does with its part of one, by the library that does it.

A :class:`Format` says at multiples of what a weight may be cut, makes the library's own layer of a part, and reads one
of a checkpoint that is quantized already (:mod:`~lightning_autotp.quantized.files`). The libraries are
imported only by who uses them.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from importlib import import_module
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn

from lightning_autotp.building.checkpoint_reading import CheckpointError
from lightning_autotp.building.recipe import Recipe
from lightning_autotp.layouts.names import join_names

AsStored = tuple["Format", Mapping[str, Tensor]]
"""A weight's format as a checkpoint has it, and deferred tensors ``[out, n]`` by the names in :attr:`Format.stored`."""


class QuantizationError(CheckpointError):
    """A model is quantized in a way in which it cannot be cut into parts; the message says what can be done instead."""


@dataclass(frozen=True)
class Format(ABC):
    """How a linear layer's weight ``[out, in]`` is quantized.

    Attributes:
        dtype: of the weight before; what a part is when it is quantized.
        stored: of a weight that is quantized already, how its tensors are read, each ``[out, n]``: a row of it is for a
            row of the weight, and an element for one, for several in a row, or (``n == 1``) for all of it.
    """

    dtype: torch.dtype
    stored: Mapping[str, Recipe] | None = field(default=None, kw_only=True, repr=False, compare=False)

    @abstractmethod
    def units(self, shape: tuple[int, ...]) -> tuple[int, int]:
        """A weight may be cut along each dim at multiples of this: no block has elements on both sides then.

        Args:
            shape: ``(out, in)``.
        """

    @abstractmethod
    def layer(self, values: Tensor, extremes: Tensor | None = None) -> nn.Module:
        """The library's own linear layer without bias, its weight quantized from these values. Not collective.

        Args:
            values: a rank's part, ``[out/tp, in]`` or ``[out, in/tp]``, on the device where the layer is to be.
            extremes: where rows are cut and share a scale, the least and the largest element of each whole row,
                ``[out, 2]``.
        """

    def layer_without_values(self, values: Tensor) -> nn.Module:
        """Like :meth:`layer` for a fake tensor, of which a library's class of parameters may refuse to be made."""
        return self.layer(values)

    @abstractmethod
    def dequantized(self, layer: nn.Module) -> Tensor:
        """The weight of :meth:`layer` as the numbers that it stands for, of the shape of ``values``."""

    def rounded(self, values: Tensor) -> Tensor:
        """The numbers that a whole weight of these values stands for in one process."""
        return self.dequantized(self.layer(values))

    @abstractmethod
    def tensors(self, layer: nn.Module) -> dict[str, Tensor]:
        """What a layer's weight consists of, in its memory: tensors ``[out/tp, n]`` by the names in :attr:`stored`."""

    def in_memory(self, layer: nn.Module) -> list[Tensor]:
        """All that a layer's weight takes memory for."""
        return list(self.tensors(layer).values())

    @abstractmethod
    def as_stored(self, parts: Mapping[str, Tensor], shape: tuple[int, ...], described: Mapping[str, Any]) -> AsStored:
        """What a checkpoint has of a weight of this format.

        Args:
            parts: the deferred tensors of the checkpoint, by their names after the layer's.
            shape: ``(out, in)``.
            described: what else the checkpoint says of it.

        Raises:
            QuantizationError: if that is another weight, or format, than this; it says what is different.
        """

    @property
    def shares_rows(self) -> bool:
        """Whether a row that is cut has one scale, for which its extremes must be known."""
        return False


@dataclass(frozen=True)
class FourBit(Format):
    """NF4 or FP4 of bitsandbytes: of each 64 elements, counted along the rows, the largest is the scale.

    Attributes:
        kind: ``nf4`` or ``fp4``.
        compute_dtype: of the product.
        storage: of the packed numbers.
        is_double: whether the scales are quantized again, which takes those of the whole weight
            (:func:`~lightning_autotp.loading.shared_scales.quantize_scales`).
    """

    kind: str
    compute_dtype: torch.dtype
    storage: torch.dtype
    is_double: bool
    block: int = 64

    def units(self, shape: tuple[int, ...]) -> tuple[int, int]:
        """Whole blocks: a row is a multiple of one."""
        return 1, self.block

    def layer(self, values: Tensor, extremes: Tensor | None = None) -> nn.Module:
        """A ``Linear4bit``, its scales not quantized."""
        made = self._empty(values)
        weight = library_of("bitsandbytes").nn.Params4bit(
            values, requires_grad=False, blocksize=self.block, module=made, **self._options
        )
        made.weight = weight.to(values.device)
        return made

    def layer_without_values(self, values: Tensor) -> nn.Module:
        """A ``Linear4bit`` with an ordinary parameter."""
        made = self._empty(values)
        numbers, state = library_of("bitsandbytes").functional.quantize_4bit(
            values, blocksize=self.block, **self._options
        )
        weight: Any = nn.Parameter(numbers, requires_grad=False)
        weight.quant_state = state
        made.weight = weight
        return made

    @property
    def _options(self) -> dict[str, Any]:
        return {"compress_statistics": False, "quant_type": self.kind, "quant_storage": self.storage}

    def _empty(self, values: Tensor) -> nn.Module:
        rows, columns = values.shape
        library: Any = library_of("bitsandbytes").nn
        made: nn.Module = library.Linear4bit(columns, rows, False, self.compute_dtype, device="meta", **self._options)
        return made

    def dequantized(self, layer: nn.Module) -> Tensor:
        """By bitsandbytes."""
        weight: Any = layer.weight
        found: Tensor = library_of("bitsandbytes").functional.dequantize_4bit(weight.data, weight.quant_state)
        return found

    def rounded(self, values: Tensor) -> Tensor:
        """And of scales that are quantized again."""
        functional: Any = library_of("bitsandbytes").functional
        options = {**self._options, "compress_statistics": self.is_double}
        found: Tensor = functional.dequantize_4bit(*functional.quantize_4bit(values, blocksize=self.block, **options))
        return found

    def tensors(self, layer: nn.Module) -> dict[str, Tensor]:
        """The packed numbers, row by row, and their scales."""
        weight: Any = layer.weight
        rows = weight.quant_state.shape[0]
        return {"numbers": weight.data.view(rows, -1), "scales": weight.quant_state.absmax.view(rows, -1)}

    def in_memory(self, layer: nn.Module) -> list[Tensor]:
        """And the 16 numbers that the packed ones stand for."""
        weight: Any = layer.weight
        return [*super().in_memory(layer), weight.quant_state.code]

    def as_stored(self, parts: Mapping[str, Tensor], shape: tuple[int, ...], described: Mapping[str, Any]) -> AsStored:
        """Scales that are quantized again are not any more: bitsandbytes makes them of all of a matrix."""
        functional: Any = library_of("bitsandbytes").functional
        numbers, scales, code = (_part(parts, name) for name in ("weight", "weight.absmax", "weight.quant_map"))
        found = (tuple(described.get("shape", ())), described.get("quant_type"), numbers.dtype)
        if found != (shape, self.kind, self.storage):
            raise QuantizationError(f"it is of {found}, and {(shape, self.kind, self.storage)} was expected")
        if not torch.equal(code.clone(), functional.get_4bit_type(self.kind, device="cpu")):
            raise QuantizationError(f"its numbers stand for others than those of {self.kind}")
        block = described["blocksize"]
        if shape[1] % block:
            raise QuantizationError(f"its rows of {shape[1]} are not a multiple of its blocks of {block}")
        if "weight.nested_absmax" in parts:
            of_scales = _part(parts, "weight.nested_absmax"), _part(parts, "weight.nested_quant_map")
            scales = functional.dequantize_blockwise(
                scales, absmax=of_scales[0], code=of_scales[1], blocksize=described["nested_blocksize"]
            )
            scales = scales + torch.tensor(described["nested_offset"])
        grids = {"numbers": numbers.reshape(shape[0], -1), "scales": scales.reshape(shape[0], -1)}
        dtype = getattr(torch, described["dtype"])
        return replace(self, dtype=dtype, block=block, is_double=False), grids


@dataclass(frozen=True)
class EightBit(Format):
    """LLM.int8 of bitsandbytes: a row's largest element is its scale.

    The product quantizes its input as well, by the largest feature of each token: both need whole rows.

    Attributes:
        threshold: features of the input above it are not quantized.
    """

    threshold: float

    def units(self, shape: tuple[int, ...]) -> tuple[int, int]:
        """Rows."""
        return 1, shape[1]

    def layer(self, values: Tensor, extremes: Tensor | None = None) -> nn.Module:
        """A ``Linear8bitLt``."""
        made = self._empty(values)
        # Quantized on the way from the CPU, as transformers has it.
        made.weight = (
            library_of("bitsandbytes")
            .nn.Int8Params(values.cpu(), requires_grad=False, has_fp16_weights=False)
            .to(values.device)
        )
        made.init_8bit_state()
        return made

    def layer_without_values(self, values: Tensor) -> nn.Module:
        """A ``Linear8bitLt`` with an ordinary parameter."""
        made = self._empty(values)
        numbers, scales, _ = library_of("bitsandbytes").functional.int8_vectorwise_quant(values.half())
        weight: Any = nn.Parameter(numbers, requires_grad=False)
        weight.CB, weight.SCB = numbers, scales
        made.weight = weight
        made.init_8bit_state()
        return made

    def _empty(self, values: Tensor) -> Any:
        rows, columns = values.shape
        return library_of("bitsandbytes").nn.Linear8bitLt(
            columns, rows, False, has_fp16_weights=False, threshold=self.threshold, device="meta"
        )

    def dequantized(self, layer: nn.Module) -> Tensor:
        """By bitsandbytes."""
        state: Any = layer.state
        found: Tensor = library_of("bitsandbytes").functional.int8_vectorwise_dequant(state.CB, state.SCB)
        return found.to(self.dtype)

    def tensors(self, layer: nn.Module) -> dict[str, Tensor]:
        """The numbers and the rows' scales."""
        state: Any = layer.state
        return {"numbers": state.CB, "scales": state.SCB.view(-1, 1)}

    def as_stored(self, parts: Mapping[str, Tensor], shape: tuple[int, ...], described: Mapping[str, Any]) -> AsStored:
        """As they are."""
        numbers, scales = _part(parts, "weight"), _part(parts, "SCB")
        if (numbers.shape, numbers.dtype) != (shape, torch.int8):
            raise QuantizationError(f"it is {tuple(numbers.shape)} of {numbers.dtype}")
        return self, {"numbers": numbers, "scales": scales.reshape(-1, 1)}


@dataclass(frozen=True)
class WeightOnly(Format):
    """Weights that torchao has quantized in groups along a row; the product is one of ordinary numbers.

    Attributes:
        config: torchao's.
        group: elements that share a scale, ``None`` for a row.
        cuts_rows: whether torchao can leave out some of a row that was quantized.
    """

    config: Any
    group: int | None
    cuts_rows: bool

    def units(self, shape: tuple[int, ...]) -> tuple[int, int]:
        """Whole groups; a row's scale is made known to all ranks that have some of the row."""
        return 1, self.group or (1 if self.cuts_rows else shape[1])

    @property
    def shares_rows(self) -> bool:
        """Rows, not groups, of a weight that is not quantized yet."""
        return self.group is None and self.stored is None

    def layer(self, values: Tensor, extremes: Tensor | None = None) -> nn.Module:
        """A linear layer whose weight is one of torchao's tensors.

        A row's scale follows from its extremes, which are quantized with it and then left out.
        """
        columns = values.shape[1]
        if extremes is not None:
            values = torch.cat([values, extremes.to(values)], 1)
        made = plain_linear(columns, values.shape[0], values, None)
        library_of("torchao.quantization").quantize_(made, self.config)
        if extremes is not None:
            made.weight = nn.Parameter(made.weight.detach()[:, :columns], requires_grad=False)
        return made

    def dequantized(self, layer: nn.Module) -> Tensor:
        """By torchao."""
        weight: Any = layer.weight
        found: Tensor = weight.dequantize()
        return found.to(self.dtype)

    def tensors(self, layer: nn.Module) -> dict[str, Tensor]:
        """Those that torchao's tensor consists of, by its own names."""
        weight: Any = layer.weight
        names, _ = weight.__tensor_flatten__()
        return {name: getattr(weight, name) for name in names}

    def as_stored(self, parts: Mapping[str, Tensor], shape: tuple[int, ...], described: Mapping[str, Any]) -> AsStored:
        """As they are."""
        prefix = "_weight_"
        found = {name.removeprefix(prefix): tensor for name, tensor in parts.items()}
        wanted, data = described.get("_tensor_data_names", ()), described.get("_data", {})
        if sorted(found) != sorted(wanted) or found["qdata"].shape != shape:
            raise QuantizationError(f"it consists of {join_names(sorted(parts))}, for a weight {shape}")
        if any(tensor.shape[0] != shape[0] for tensor in found.values()):
            raise QuantizationError("its scales are not of rows or of groups in a row")
        return replace(self, dtype=getattr(torch, data["dtype"]["_data"])), found


def library_of(name: str) -> ModuleType:
    """A library that is not installed with this package.

    Raises:
        QuantizationError: if it is missing.
    """
    try:
        return import_module(name)
    except ImportError as error:
        package = name.partition(".")[0]
        raise QuantizationError(
            f"weights are to be quantized by {package}, which is missing: pip install {package}"
        ) from error


def plain_linear(columns: int, rows: int, values: Tensor, bias: Tensor | None) -> nn.Linear:
    """A frozen linear layer with these values, which are not drawn first."""
    layer = nn.Linear.__new__(nn.Linear)
    nn.Module.__init__(layer)
    layer.in_features, layer.out_features = columns, rows
    layer.weight = nn.Parameter(values.as_subclass(Tensor), requires_grad=False)
    layer.bias = None if bias is None else nn.Parameter(bias.detach(), requires_grad=False)  # type: ignore[assignment]
    return layer


def _part(parts: Mapping[str, Tensor], name: str) -> Tensor:
    if name not in parts:
        raise QuantizationError(f"there is no {name} of it")
    return parts[name]
