"""Parameters that FSDP2 gathers in the 16 bits to which autocast would cast them, and calls in which it must not.

Which parameters these are, and in which calls they may be, is found out by :mod:`lightning_autotp.proving.autocast`.
"""

from __future__ import annotations

import torch
from torch import nn

from lightning_autotp.private.distributed_private import GatherDtype


class LoweredGathers:
    """In which dtype a model's parameters are gathered now.

    Args:
        model: what FSDP2 has cut.
        names: the parameters that are gathered in 16 bits.
        dtype: these 16 bits.
    """

    def __init__(self, model: nn.Module, names: frozenset[str], dtype: torch.dtype) -> None:
        self.names, self.dtype = names, dtype
        self._model = type(model).__name__
        self._now = GatherDtype(model)
        self._for_backward: bool | None = None  # what a backward pass that is to come was computed with
        self._is_held = False

    def use(self, is_lowered: bool) -> None:
        """Before a call of the model: gather so from now on. Not collective.

        Raises:
            RuntimeError: if the backward pass of a call in which it was otherwise may be still to come.
        """
        if torch.is_grad_enabled():
            if self._for_backward not in (None, is_lowered):
                raise RuntimeError(
                    f"{self._model} is called with gradients under autocast and without it, and there was no backward"
                    " pass between: FSDP2 gathers its parameters for both in one dtype. Call it under the same"
                    " autocast, call backward first, or use torch.no_grad() where no gradients are needed"
                )
            self._for_backward = is_lowered
        if not self._is_held:  # in float32, which serves for all
            self._now.use(is_lowered)

    def returned(self) -> None:
        """After a call of the model."""
        if self._for_backward is not None and not self._is_held:
            self._now.use(self._for_backward)

    def was_backward(self) -> None:
        """After a backward pass."""
        self._for_backward = None

    def hold(self, is_held: bool) -> None:
        """Gather in float32, whatever calls there are, while everything stays gathered."""
        self._is_held = is_held
        if is_held:
            self._now.use(False)
        self.returned()
