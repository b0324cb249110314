"""``QuantizedWeight``: a rank's part of a linear layer's weight, of which only the quantized numbers are in memory."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from lightning_autotp.private.torch_private import TO, schema_of, tree_map_only, without_subclasses, wrapper
from lightning_autotp.quantized.formats import Format, QuantizationError


class QuantizedWeight(Tensor):
    """Looks like the weight before it was quantized, ``[out/tp, in]`` or ``[out, in/tp]``: its shape and its dtype.

    ``F.linear`` with it is the quantization library's own product. A copy of it is quantized as well. Every other
    operator gets the numbers that the quantized ones stand for, and one that writes into it is an error.

    Args:
        layer: the library's layer, which holds the quantized weight.
        format: what made it.
        like: a tensor of the shape, dtype and device of the values.

    Attributes:
        layer: see above. It moves to another device with the tensor.
        format: see above.
    """

    layer: nn.Module
    format: Format

    @staticmethod
    def __new__(cls, layer: nn.Module, format: Format, like: Tensor) -> QuantizedWeight:  # noqa: D102
        made: QuantizedWeight = wrapper(cls, list(like.shape), like)
        made.layer, made.format = layer, format
        return made

    @classmethod
    def of(cls, values: Tensor, format: Format, dtype: torch.dtype, extremes: Tensor | None = None) -> QuantizedWeight:
        """The values of a rank's part, quantized. Not collective.

        Args:
            values: of the format's dtype.
            format: how.
            dtype: that the tensor shows.
            extremes: as for :meth:`~lightning_autotp.quantized.formats.Format.layer`.
        """
        like = torch.empty((), dtype=dtype, device=values.device).expand(values.shape)
        return cls(format.layer(values, extremes), format, like)

    @classmethod
    def without_values(cls, values: Tensor, format: Format, dtype: torch.dtype) -> QuantizedWeight:
        """Like :meth:`of`, of a fake tensor. No mode of fake tensors may be on."""
        like = torch.empty((), dtype=dtype, device=values.device).expand(values.shape)
        return cls(format.layer_without_values(values), format, like)

    @property
    def in_memory(self) -> list[Tensor]:
        """The tensors that it takes memory for."""
        return self.format.in_memory(self.layer)

    def values(self) -> Tensor:
        """The numbers that the quantized ones stand for, as an ordinary tensor of its own memory."""
        return self.format.dequantized(self.layer).to(self.dtype).reshape(self.shape)

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """``F.linear`` is the library's product."""
        if func is F.linear:
            return _linear(*args, **(kwargs or {}))
        with without_subclasses():
            return func(*args, **(kwargs or {}))

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Everything else takes the numbers that it stands for.

        Raises:
            QuantizationError: if it would be written.
        """
        kwargs = kwargs or {}
        first = args[0] if args else None
        if isinstance(first, QuantizedWeight):
            if func in (torch.ops.aten.detach.default, torch.ops.aten.alias.default):
                return QuantizedWeight(first.layer, first.format, first)
            if func is torch.ops.aten.clone.default:
                return QuantizedWeight(copy.deepcopy(first.layer), first.format, first)
            if func.overloadpacket.__name__ == TO:
                return first.moved(kwargs.get("device") or first.device, kwargs.get("dtype") or first.dtype)
            if schema_of(func).is_mutable:
                raise QuantizationError(
                    f"{func} would write into a weight that is quantized, {tuple(first.shape)}: such weights cannot"
                    " be changed. Train adapters beside them"
                )
        args, kwargs = tree_map_only(QuantizedWeight, QuantizedWeight.values, (args, kwargs))
        return func(*args, **kwargs)

    def moved(self, device: torch.device | str, dtype: torch.dtype) -> Tensor:
        """It on another device, where its layer is then, too; on meta an ordinary tensor. It stays quantized."""
        if torch.device(device).type == "meta":
            return torch.empty(self.shape, dtype=dtype, device="meta")
        self.layer.to(device)
        return QuantizedWeight(self.layer, self.format, torch.empty((), dtype=dtype, device=device).expand(self.shape))

    def check(self, here: Tensor, given: Tensor, name: str) -> None:
        """Whether what is loaded into a block of it is what it stands for.

        Raises:
            QuantizationError: if not.
        """
        if not torch.equal(here, given.to(here)):
            raise QuantizationError(
                f"{name} is quantized, and what is loaded into it is not what it stands for: weights that are quantized"
                " come from the checkpoint that from_pretrained reads. Load what was saved with the same base model,"
                " quantized in the same way"
            )

    def __repr__(self) -> str:  # type: ignore[override]
        return f"QuantizedWeight({tuple(self.shape)}, {self.dtype}, {self.format})"


def _linear(input: Tensor, weight: Any, bias: Tensor | None = None) -> Tensor:
    if not isinstance(weight, QuantizedWeight):
        raise QuantizationError("a quantized weight is given to F.linear as something else than its weight")
    output: Tensor = weight.layer(input)
    return output if bias is None else output + bias.to(output.dtype)
