"""What optimizers remember of parameters that every rank has whole, and that must stay the same on all of them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from functools import partial
from itertools import chain

import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from lightning_autotp.parameters.local_blocks import plain
from lightning_autotp.parameters.state import parallel_models
from lightning_autotp.parameters.whole_tensors import WholePlace, places_of_whole_tensors, whole_at
from lightning_autotp.ranks.drift import Drift, Tensors
from lightning_autotp.whole_matrices.optimizer import WholeMatrixOptimizer


def whole_states(model: nn.Module, optimizer: Optimizer) -> Iterator[tuple[str, Tensor]]:
    """The states of parameters that are whole on every rank, by name.

    Only ordinary tensors of floating-point numbers: quantized states have classes of their own. None of an optimizer
    that steps whole matrices: each of its states is on one rank.

    Args:
        model: a parallel model.
        optimizer: any optimizer; other parameters in it are left out.
    """
    return states_at(places_of_whole_tensors(model), optimizer)


def states_at(places: Iterable[WholePlace], optimizer: Optimizer) -> Iterator[tuple[str, Tensor]]:
    """The same of parameters at these places."""
    if isinstance(optimizer, WholeMatrixOptimizer):
        return
    for place in places:
        parameter = place.tensor
        state = None if parameter is None else optimizer.state.get(parameter)
        for key, value in list(state.items()) if state else ():
            if type(value) in (Tensor, DTensor) and value.is_floating_point():
                yield f"{key} of {place.name}", plain(value)


def drifts_of(
    module: Callable[[], nn.Module | None],
    optimizers: Callable[[], Iterable[Optimizer | None]],
    group: dist.ProcessGroup,
) -> tuple[Drift, Drift]:
    """What compares whole tensors of parallel models over a tensor-parallel group, and states of their optimizers.

    Args:
        module: gives what holds the models. Nothing of one that was changed: its own look says how.
        optimizers: gives the optimizers.
        group: the tensor-parallel group.
    """

    def places() -> list[WholePlace]:
        holding, found = module(), list[WholePlace]()
        for model, _ in parallel_models(holding) if holding is not None else ():
            with suppress(RuntimeError):
                found += places_of_whole_tensors(model)
        return found

    def tensors() -> Tensors:
        return partial(whole_at, places())

    def states() -> Tensors:
        here = places()
        return lambda: chain.from_iterable(states_at(here, one) for one in optimizers() if one is not None)

    return Drift(tensors, group), Drift(states, group)
