"""torch's own attention layers run layer by layer in a parallel model, also in evaluation.

There one kernel would read the layers' weights, which are this rank's parts, and run none of them.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

_FUSED = (nn.MultiheadAttention, nn.TransformerEncoderLayer, nn.TransformerEncoder)


def run_layers_of_attention(model: nn.Module) -> None:
    """Turn torch's switch for these kernels off while such modules of a parallel model run; others keep them."""
    for module in model.modules():
        if isinstance(module, _FUSED):
            switch = _Switch()
            module.register_forward_pre_hook(switch.off, prepend=True)
            module.register_forward_hook(switch.as_before, always_call=True)


class _Switch:
    """Hooks of one module."""

    def __init__(self) -> None:
        self._before: list[bool] = []  # of each run that is under way

    def off(self, *_: Any) -> None:
        """Before a forward."""
        self._before.append(torch.backends.mha.get_fastpath_enabled())
        torch.backends.mha.set_fastpath_enabled(False)

    def as_before(self, *_: Any) -> None:
        """After it, also if it failed."""
        if self._before:
            torch.backends.mha.set_fastpath_enabled(self._before.pop())
