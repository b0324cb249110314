"""The tensors of a parallel model that every rank has whole, and that must stay the same on all of them."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from lightning_autotp.parameters.local_blocks import plain
from lightning_autotp.parameters.state import dotted, own_modules, parallel_state


def whole_gradients(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """The gradients of the same parameters, which are summed where they have to be, by name; none that are sparse."""
    for place in parallel_state(model).places(model):
        gradient = None if place.meta.is_parallel else place.parameter.grad
        if isinstance(gradient, DTensor):
            gradient = gradient.to_local()
        if type(gradient) is Tensor and gradient.layout == torch.strided:
            yield place.name, gradient


def whole_tensors(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Parameters and floating-point buffers that are whole on every rank, by name.

    Of one that FSDP2 has cut, what this copy of the model stores: the ranks of a copy store the same of it.

    Args:
        model: a parallel model.
    """
    state = parallel_state(model)
    for place in state.places(model):
        parameter = place.parameter
        if not place.meta.is_parallel and parameter.is_floating_point():
            yield place.name, plain(parameter)
    for path, module in own_modules(model):
        for name, buffer in list(module.named_buffers(recurse=False)):  # one may be added before the next is asked for
            full_name = dotted(path, name)
            if buffer.is_floating_point() and full_name not in state.plan.kept_parts:
                yield full_name, buffer
