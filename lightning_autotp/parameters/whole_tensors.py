"""The tensors of a parallel model that every rank has whole, and that must stay the same on all of them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import NamedTuple
from weakref import ref

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from lightning_autotp.parameters.local_blocks import plain
from lightning_autotp.parameters.state import dotted, own_modules, parallel_state
from lightning_autotp.private.torch_private import buffers_of, parameters_of


class WholePlace(NamedTuple):
    """Where a tensor is that every rank has whole. It keeps neither the tensor nor the module.

    Attributes:
        name: its name.
        module: the module that has it, if that is still there.
        tensors: gives the module's tensors of its kind.
        attribute: its name there.
    """

    name: str
    module: ref[nn.Module]
    tensors: Callable[[nn.Module], Mapping[str, Tensor | None]]
    attribute: str

    @property
    def tensor(self) -> Tensor | None:
        """The floating-point tensor that is there now."""
        module = self.module()
        tensor = None if module is None else self.tensors(module).get(self.attribute)
        return tensor if tensor is not None and tensor.is_floating_point() else None


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
    return whole_at(places_of_whole_tensors(model))


def places_of_whole_tensors(model: nn.Module) -> list[WholePlace]:
    """Where they are: a look at all modules. Which tensors are there may change."""
    state = parallel_state(model)
    found = [
        WholePlace(place.name, ref(place.module), parameters_of, place.attribute)
        for place in state.places(model)
        if not place.meta.is_parallel
    ]
    for path, module in own_modules(model):
        for attribute in buffers_of(module):
            if (name := dotted(path, attribute)) not in state.plan.kept_parts:
                found.append(WholePlace(name, ref(module), buffers_of, attribute))
    return found


def whole_at(places: Iterable[WholePlace]) -> Iterator[tuple[str, Tensor]]:
    """The floating-point tensors that are at these places now, by name."""
    for place in places:
        if (tensor := place.tensor) is not None:
            yield place.name, plain(tensor)
