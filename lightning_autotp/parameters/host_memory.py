"""What of a model is in host memory while it is trained on another device (FSDP2's ``CPUOffloadPolicy``)."""

from __future__ import annotations

from collections.abc import Callable, Iterable, MutableMapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.overrides import TorchFunctionMode

from lightning_autotp.parameters.local_blocks import is_cut, reshard
from lightning_autotp.parameters.state import parallel_models
from lightning_autotp.private.torch_private import tree_map_only


def offloaded(module: nn.Module) -> list[nn.Parameter]:
    """The parameters that FSDP2 wants in host memory, and brings to the device to gather them."""
    reshard(module)  # else some of them are gathered ones
    models = [model for model, state in parallel_models(module) if state.cpu_offload]
    return [parameter for model in models for parameter in model.parameters() if is_cut(parameter)]


def to_device(module: nn.Module, device: torch.device | str) -> None:
    """``module.to(device)``, but for what is offloaded."""
    with _Staying(offloaded(module)):
        module.to(device)


class _Staying(TorchFunctionMode):
    """Within it, ``.to`` leaves these tensors where they are."""

    def __init__(self, tensors: Iterable[Tensor]) -> None:
        super().__init__()
        self._ids = {id(tensor) for tensor in tensors}

    def __torch_function__(
        self, func: Callable[..., Any], types: Sequence[type], args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        return args[0] if func is Tensor.to and id(args[0]) in self._ids else func(*args, **(kwargs or {}))


def states_to_parameters(optimizers: Iterable[Optimizer], device: torch.device) -> None:
    """Bring optimizers' states to where their parameters are, and what is of no parameter to ``device``.

    A ``"step"`` stays: optimizers of torch want it on the host.
    """
    for optimizer in optimizers:
        for parameter, state in optimizer.state.items():
            there = parameter.device if isinstance(parameter, Tensor) else device

            def moved(value: Tensor, there: torch.device = there) -> Tensor:
                return value.to(there)

            if isinstance(state, MutableMapping):
                state.update({k: tree_map_only(Tensor, moved, v) for k, v in state.items() if k != "step"})
            else:
                optimizer.state[parameter] = tree_map_only(Tensor, moved, state)
