"""Loss scaling that all ranks agree on."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_autotp.parameters.local_blocks import plain


class AgreedGradScaler(torch.amp.GradScaler):
    """A gradient scaler that skips a step on every rank if a gradient is not finite on any of them.

    A rank has only its part of the gradients: left to itself it would skip steps that its peers take. Unscaling is
    collective over all processes. (torch's sharded scaler for FSDP does the same.)

    Args:
        scaler: whose device, scale and growth to go on with.
    """

    def __init__(self, scaler: torch.amp.GradScaler) -> None:
        super().__init__(scaler._device, enabled=scaler.is_enabled())
        if scaler.is_enabled():
            self.load_state_dict(scaler.state_dict())

    def _unscale_grads_(self, optimizer: Any, *args: Any) -> dict[torch.device, Tensor]:
        gradients = [
            plain(parameter.grad)
            for group in optimizer.param_groups
            for parameter in group["params"]
            if parameter.grad is not None
        ]
        for gradient in gradients:
            gradient.grad = gradient.view_as(gradient)
        # FSDP2's gradients and others cannot be unscaled together, what they are made of can.
        local = SimpleNamespace(param_groups=[{"params": gradients}])
        found = super()._unscale_grads_(local, *args)  # type: ignore[arg-type]
        for found_infinite in found.values():
            dist.all_reduce(found_infinite, op=dist.ReduceOp.MAX)
        return found
