"""Which linear layers of a model compute in float8: noted on the layers, which are ``nn.Linear`` otherwise.

``convert_to_float8_training`` of torchao puts a layer of its own in the place of each ``nn.Linear``, with the same
parameters. Plans are made, and local models proved, for the ``nn.Linear``: it multiplies the same tensors. What is
different is that each operand is rounded, by a scale that follows from its largest element, and so is the gradient of
the result. So none of these may be a part of a sum, which the tables of the solver respect
(:attr:`~lightning_autotp.operators.graph.Operator.rounding`), and where an operand is cut the ranks agree on what its
largest element is (:mod:`~lightning_autotp.parallel.float8`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import nn

from lightning_autotp.private.torchao_private import is_float8_layer, make_plain

_NAME = "autotp_float8"
_BLOCK = 16


@dataclass(frozen=True)
class Float8:
    """How a linear layer computes in float8.

    Attributes:
        config: torchao's ``Float8LinearConfig``.
        products: how its products run, as torchao's layer has it.
    """

    config: Any
    products: Any

    @staticmethod
    def units(shape: tuple[int, ...]) -> tuple[int, ...]:
        """A weight of this shape may be cut along each dim at multiples of this: kernels take sizes that are these."""
        return tuple(1 if size % _BLOCK else _BLOCK for size in shape)

    def __str__(self) -> str:
        casts = (self.config.cast_config_input, self.config.cast_config_input_for_grad_weight,
                 self.config.cast_config_weight, self.config.cast_config_weight_for_grad_input,
                 self.config.cast_config_grad_output, self.config.cast_config_grad_output_for_grad_weight)  # fmt: skip
        powers = ", scales are powers of two" if self.config.round_scales_to_power_of_2 else ""
        return f"to float8 ({', '.join(cast.short_str() for cast in casts)}{powers})"


def float8_of(module: nn.Module) -> Float8 | None:
    """How a layer computes in float8; ``None`` if it does not."""
    found: Float8 | None = vars(module).get(_NAME)
    return found


def note_float8(model: nn.Module) -> None:
    """Make torchao's layers for training in float8 ``nn.Linear`` again, in place, each with a note of what it was."""
    for module in model.modules():
        if is_float8_layer(module):
            vars(module)[_NAME] = Float8(*make_plain(module))
