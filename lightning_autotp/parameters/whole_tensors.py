"""What every rank has whole of a parallel model and of its optimizers, and that must stay the same on all of them."""

from __future__ import annotations

from collections.abc import Iterator

from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from lightning_autotp.parameters.state import dotted, own_modules, parallel_state


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
            yield place.name, _of_this_copy(parameter.detach())
    for path, module in own_modules(model):
        for name, buffer in list(module.named_buffers(recurse=False)):  # one may be added before the next is asked for
            full_name = dotted(path, name)
            if buffer.is_floating_point() and full_name not in state.plan.kept_parts:
                yield full_name, buffer


def whole_states(model: nn.Module, optimizer: Optimizer) -> Iterator[tuple[str, Tensor]]:
    """What an optimizer remembers of a model's parameters that are whole on every rank, by name.

    Only ordinary tensors of floating-point numbers: quantized states have classes of their own.

    Args:
        model: a parallel model.
        optimizer: any optimizer; other parameters in it are left out.
    """
    places = parallel_state(model).places(model)
    names = {place.parameter: place.name for place in places if not place.meta.is_parallel}
    for parameter in [parameter for group in optimizer.param_groups for parameter in group["params"]]:
        for key, value in list(optimizer.state.get(parameter, {}).items()) if parameter in names else ():
            if type(value) in (Tensor, DTensor) and value.is_floating_point():
                yield f"{key} of {names[parameter]}", _of_this_copy(value)


def _of_this_copy(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor
