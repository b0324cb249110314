"""A model on two ranks, compared with itself in one process: the loss and every gradient."""

from __future__ import annotations

import copy
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lightning_autotp import full_gradients, parallelize


def assert_same_training(
    model: nn.Module,
    batch: Any,
    loss_of: Any = torch.mean,
    *,
    call: Any = None,
    example: Any = None,
    local: nn.Module | None = None,
    **options: Any,
) -> nn.Module:
    """Divide a copy of ``model`` over all processes; loss and gradients of ``batch`` must be the whole model's.

    Args:
        model: real weights, the same on every rank.
        batch: positional arguments, or keyword arguments.
        loss_of: makes the loss of what the model returns.
        call: makes the model's result of the model and the batch.
        example: the example inputs, if it is not the batch.
        local: the copy, if the model cannot be copied.
        **options: for :func:`~lightning_autotp.parallelize`.

    Returns:
        The local model.
    """
    run = call or (lambda one, given: one(**given) if isinstance(given, dict) else one(*given))
    local = copy.deepcopy(model) if local is None else local
    parallelize(local, dist.group.WORLD, example_inputs=batch if example is None else example, **options)
    losses: list[Tensor] = []
    for one in (model, local):
        losses.append(loss_of(run(one, batch)))
        losses[-1].backward()
    torch.testing.assert_close(losses[1], losses[0], rtol=1e-5, atol=1e-6)
    found = full_gradients(local)
    for name, parameter in model.named_parameters():
        if parameter.grad is not None:
            torch.testing.assert_close(found[name], parameter.grad, rtol=1e-4, atol=1e-6, msg=name)
    return local
