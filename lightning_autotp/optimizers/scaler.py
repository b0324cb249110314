"""Loss scaling that all ranks agree on."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_autotp.optimizers.stepping import stepped_by
from lightning_autotp.parameters.local_blocks import plain
from lightning_autotp.private.torch_private import GradScaler, replaced


class AgreedGradScaler(GradScaler):
    """A gradient scaler that skips a step on every rank if a gradient is not finite on any of them.

    A rank has only its part of the gradients: left to itself it would skip steps that its peers take. Unscaling is
    collective over all processes. (torch's sharded scaler for FSDP does the same.)

    Args:
        scaler: whose state it has, all of it: what one of the two is told, the other one knows.
    """

    def unscale_gradients(
        self, optimizer: Any, inverse_scale: Tensor, found_infinite: Tensor, *args: Any
    ) -> dict[torch.device, Tensor]:
        """Divide this rank's gradients by the scale. Collective over all processes, also where there are none."""
        gradients = [plain(parameter.grad) for parameter in stepped_by(optimizer) if parameter.grad is not None]
        # FSDP2's gradients and others cannot be unscaled together, what they are made of can: each is the gradient of
        # a stand-in, and not of a view of itself, for nothing would ever free such a pair.
        stand_ins = [gradient.detach() for gradient in gradients]
        for stand_in, gradient in zip(stand_ins, gradients, strict=True):
            stand_in.grad = gradient
        local = SimpleNamespace(param_groups=[{"params": stand_ins}])
        found = super().unscale_gradients(local, inverse_scale, found_infinite, *args)
        # Of the ranks' gradients: whether one is not finite, and whether there is one at all.
        agreed = torch.zeros(2, device=found_infinite.device)
        for infinite in found.values():
            agreed = torch.maximum(agreed, torch.stack([infinite.to(agreed.device), torch.ones_like(found_infinite)]))
        dist.all_reduce(agreed, op=dist.ReduceOp.MAX)
        return {agreed.device: agreed[0]} if found or agreed[1] else {}


def agreed_scaling(plugin: Any) -> AbstractContextManager[None]:
    """Within it all ranks skip the same steps, where this precision plugin of Lightning's scales losses.

    The scale is that of its own scaler, also afterwards.
    """
    scaler = getattr(plugin, "scaler", None)
    return nullcontext() if scaler is None else replaced(plugin, scaler=AgreedGradScaler(scaler))
