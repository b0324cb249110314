"""A model's output projection whose logits are not computed before something needs them."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from lightning_autotp.parallel.head_product import HeadProduct
from lightning_autotp.parallel.linear import ColumnParallelLinear
from lightning_autotp.parallel.logits import VocabParallelLogits
from lightning_autotp.parallel.overlap import replicate
from lightning_autotp.private.torch_private import ModuleHooks, has_values
from lightning_autotp.quantized.float8 import float8_of


class VocabParallelHead(ColumnParallelLinear):
    """A column-parallel linear layer over the vocabulary, whose output looks whole and may never be computed.

    Shapes, types, and what is collective are the base class's. On meta and in code that ``torch.compile`` traces, its
    output is the base class's as well.
    """

    def forward(self, input: Tensor) -> Tensor:
        """``[batch, ..., in] -> [batch, ..., out]``, shown whole. Collective in the backward pass."""
        if not has_values(input) or torch.compiler.is_compiling():
            return super().forward(input)
        self.note_run()
        # No gradient of the weight is left for later: the loss computes it with the logits.
        hidden = input if self.input_is_replicated else replicate(input, self.group, ())
        product = HeadProduct.of(hidden, self.weight, self.bias)
        return VocabParallelLogits.of_product(product, self.ownership, self.group)

    def compute_at_once(self) -> None:
        """Become a layer that computes its output where it runs, for weights that are there only meanwhile."""
        self.__class__ = ColumnParallelLinear  # type: ignore[assignment]


def compute_when_needed(module: nn.Module) -> None:
    """Let a layer whose output is shown whole leave it uncomputed, in place, if it can.

    It can if it is a column-parallel layer as it is, and not in float8: what a subclass's code or a hook does with the
    output was written for a tensor that is there.
    """
    is_plain = type(module) is ColumnParallelLinear and float8_of(module) is None
    if is_plain and not module.gather_output and not ModuleHooks(module).after:
        module.__class__ = VocabParallelHead
