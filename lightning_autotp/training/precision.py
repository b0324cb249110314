"""Loss scaling that all ranks agree on."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_autotp.parameters.local_blocks import plain
from lightning_autotp.private.torch_private import GradScaler


class AgreedGradScaler(GradScaler):
    """A gradient scaler that skips a step on every rank if a gradient is not finite on any of them.

    A rank has only its part of the gradients: left to itself it would skip steps that its peers take. Unscaling is
    collective over all processes. (torch's sharded scaler for FSDP does the same.)

    Args:
        scaler: whose device, scale and growth to go on with.
    """

    def unscale_gradients(self, optimizer: Any, *args: Any) -> dict[torch.device, Tensor]:
        """Divide this rank's gradients by the scale. Collective over all processes."""
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
        found = super().unscale_gradients(local, *args)
        for found_infinite in found.values():
            dist.all_reduce(found_infinite, op=dist.ReduceOp.MAX)
        return found
