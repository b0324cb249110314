"""Optimizers of a user's own."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_autotp.layouts.ownership import Ownership
from lightning_autotp.layouts.plan import Plan
from lightning_autotp.layouts.types import Invariant, Shard
from lightning_autotp.parameters.meta import ParameterMeta
from lightning_autotp.parameters.state import ParallelState
from lightning_autotp.ranks.group import TPGroup


def parameter(*shape: int, dims: tuple[int, ...] = (0,), name: str = "weight") -> nn.Parameter:
    """The first rank's half of a tensor that is cut along some dims, or all of it."""
    whole = [size * 2 if dim in dims else size for dim, size in enumerate(shape)]
    layout = Shard(tuple((dim, Ownership.even(whole[dim], 2)) for dim in dims)) if dims else Invariant()
    made = nn.Parameter(torch.randn(shape))
    made.cut = ParameterMeta((name,), tuple(whole), torch.float32, layout, 0, 2)  # type: ignore[attr-defined]
    return made


def model_of(optimizer: Optimizer) -> nn.Module:
    """A module around the model that has the optimizer's cut parameters."""
    parameters = [p for group in optimizer.param_groups for p in group["params"] if hasattr(p, "cut")]
    around = nn.ModuleDict({"model": nn.ParameterList(parameters)})
    metas = {str(at): replace(p.cut, names=(p.cut.name + " " * at,)) for at, p in enumerate(parameters)}  # no two tied
    around["model"].autotp = ParallelState(Plan("List", 2, ()), TPGroup("", 0, 2), metas)  # type: ignore[assignment]
    return around


class Simple(Optimizer):
    """An optimizer that a test describes by the update of one parameter.

    Args:
        params: the parameters.
        options: the defaults.
    """

    def __init__(self, params: Any, **options: Any) -> None:
        super().__init__(params, {"lr": 0.01, **options})

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    p.sub_(group["lr"] * self.update(p, p.grad, group, self.state[p]))

    def update(self, p: Tensor, gradient: Tensor, group: dict[str, Any], state: dict[str, Any]) -> Tensor:
        raise NotImplementedError


class Lamb(Simple):
    def update(self, p: Tensor, gradient: Tensor, group: dict[str, Any], state: dict[str, Any]) -> Tensor:
        square = state.setdefault("square", torch.zeros_like(p))
        square.lerp_(gradient.square(), 0.01)
        update = gradient / (square.sqrt() + 1e-8)
        return update * (p.norm() / update.norm()) if group.get("trust", True) else update


class Clipping(Simple):
    """Clips by the norm of all it has, itself."""

    def step(self, closure: Any = None) -> Any:  # type: ignore[override]
        torch.nn.utils.clip_grad_norm_([p for group in self.param_groups for p in group["params"]], 1.0)
        return super().step()

    def update(self, p: Tensor, gradient: Tensor, group: dict[str, Any], state: dict[str, Any]) -> Tensor:
        return gradient


class Noisy(Simple):
    """Draws random numbers from everywhere."""

    def update(self, p: Tensor, gradient: Tensor, group: dict[str, Any], state: dict[str, Any]) -> Tensor:
        return gradient + torch.randn_like(p)


class NeedsCurvature(Simple):
    """Cannot be run on gradients alone."""

    def update(self, p: Tensor, gradient: Tensor, group: dict[str, Any], state: dict[str, Any]) -> Tensor:
        raise RuntimeError("backward(create_graph=True) is needed")
