"""Turning a module into a parallel one in place: the same object, with smaller parameters and a parallel class.

In place, because other objects may hold the module (hooks, a parent's attributes, adapters). Its class changes by
``__class__`` assignment, so that a subclass keeps what it adds: in the method resolution order the parallel class
comes *after* the module's own, and a scaled embedding's ``super().forward(ids) * scale`` reaches the parallel lookup.
"""

from __future__ import annotations

from functools import cache
from typing import Any, TypeVar, cast

import torch
from torch import nn

from lightning_autotp.layouts.ownership import Ownership
from lightning_autotp.layouts.types import Shard
from lightning_autotp.parallel.collectives import take_owned
from lightning_autotp.parameters.subclassing import subclass
from lightning_autotp.private.torch_private import parameters_of
from lightning_autotp.ranks.group import TPGroup

_Parallel = TypeVar("_Parallel", bound=nn.Module)

LocalParameters = dict[nn.Parameter, tuple[nn.Parameter, Shard]]
"""Local parameters and how they were cut, by the original ones, which it keeps alive."""


def localize_parameter(
    module: nn.Module,
    name: str,
    dim: int,
    ownership: Ownership,
    group: TPGroup,
    local: LocalParameters | None = None,
) -> None:
    """Replace ``module``'s parameter by this rank's part of it, on the same device. Not collective.

    The new parameter keeps what attributes the user has put on the old one.

    Args:
        module: the module that holds the parameter.
        name: the parameter's name in the module.
        dim: the sharded dim.
        ownership: who holds what of it.
        group: the tensor-parallel group.
        local: the local parameters made so far; share one over the modules of a model, so that tied parameters become
            one local parameter.

    Raises:
        ValueError: if the module has no such plain parameter, if its size is not the map's, or if a tied parameter was
            already given another layout.
    """
    old = parameters_of(module).get(name)
    if old is None:
        raise ValueError(
            f"{type(module).__name__} has no parameter '{name}' of its own (it may be parametrized or quantized): "
            "leave it replicated, or remove the parametrization before parallelizing"
        )
    if old.shape[dim] != ownership.size or ownership.ranks != group.size:
        raise ValueError(
            f"{type(module).__name__}.{name} of shape {tuple(old.shape)} does not fit the map of dim {dim}: "
            f"{ownership} for {ownership.ranks} ranks, in a group of {group.size}"
        )
    layout = Shard(((dim, ownership),))
    made = {} if local is None else local
    if old not in made:
        new = nn.Parameter(take_owned(old.detach(), dim, ownership, group.rank), requires_grad=old.requires_grad)
        vars(new).update(vars(old))
        made[old] = new, layout
    new, cut = made[old]
    if cut != layout:
        raise ValueError(
            f"{type(module).__name__}.{name} is tied to a parameter that was already sharded differently "
            f"({cut}, wanted {layout}): tied parameters need one layout"
        )
    setattr(module, name, new)


def take_parts(module: nn.Module, whole: nn.Module, dim: int, ownership: Ownership, group: TPGroup) -> None:
    """Copy this rank's parts of a whole module's parameters, cut along a dim, into a parallel one. Not collective."""
    with torch.no_grad():
        for name, own in module.named_parameters(recurse=False):
            values = parameters_of(whole)[name]
            assert values is not None
            own.copy_(values if values.shape == own.shape else take_owned(values, dim, ownership, group.rank))


def become(module: nn.Module, parallel: type[_Parallel], base: type[nn.Module]) -> _Parallel:
    """Make ``module``, an instance of ``base`` or of a subclass that calls ``super().forward``, a ``parallel`` one.

    Returns:
        ``module`` itself.

    Raises:
        TypeError: if the module is no ``base``, is already parallel, or has a ``forward`` of its own set on the object,
            which would go on calling the old one.
    """
    original = type(module)
    if not isinstance(module, base) or isinstance(module, parallel):
        raise TypeError(f"{parallel.__name__} takes the place of a {base.__name__}, not of a {original.__name__}")
    if "forward" in vars(module):
        raise TypeError(
            f"the forward of this {original.__name__} was replaced on the object itself (by accelerate, for instance), "
            f"so it would bypass {parallel.__name__}: remove that hook before parallelizing"
        )
    module.__class__ = parallel if original is base else _combined(cast(Any, original), cast(Any, parallel))
    return cast(_Parallel, module)


@cache
def _combined(original: Any, parallel: Any) -> Any:
    def reduce(self: nn.Module) -> tuple[Any, ...]:
        return _blank, (original, parallel), self.__dict__

    # The class has no name that pickle could look up, so its instances say how to make it again.
    return subclass(f"{parallel.__name__}[{original.__name__}]", (original, parallel), {"__reduce__": reduce})


def _blank(original: Any, parallel: Any) -> Any:
    combined = _combined(original, parallel)
    return combined.__new__(combined)
