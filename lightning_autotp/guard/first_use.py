"""The first use of a parallel model after set-up: what was written into its parts until then is known to be right.

It is a forward, or an optimizer's first step: a forward of compiled code checks nothing.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn

from lightning_autotp.layouts.names import join_names
from lightning_autotp.parameters.known_writes import parts_of
from lightning_autotp.parameters.state import parallel_state
from lightning_autotp.private.torch_private import without_modes
from lightning_autotp.ranks.agreement import gather_objects
from lightning_autotp.ranks.store_barrier import store_barrier


def first_use(model: nn.Module) -> None:
    """Before each use of a parallel model; does nothing after the first. Collective then.

    Raises:
        RuntimeError: on every rank, naming the parts that were written on any.
    """
    state = parallel_state(model)
    if not state.writes.is_before_use:
        return
    store_barrier(state.group, f"{type(model).__name__} is used, in a call or an optimizer's step, for the first time")
    with without_modes():  # the user's see what the model computes, not this
        found = gather_objects(state.writes.close(parts_of(model)), state.group.process_group)
    _refuse(model, list(dict.fromkeys(name for names in found for name in names)))
    state.writes.is_before_use = False


def use_of_module(model: nn.Module) -> None:
    """Before a module in a parallel model is called without it, perhaps on one rank alone. Not collective.

    Raises:
        RuntimeError: naming the parts that were written on this rank, if that is before the first use.
    """
    writes = parallel_state(model).writes
    if writes.is_before_use:
        _refuse(model, writes.close(parts_of(model)))


def _refuse(model: nn.Module, names: Sequence[str]) -> None:
    if names:
        raise RuntimeError(
            f"{join_names(names)} of the parallel {type(model).__name__} were written in place after it was divided,"
            " or given other values by another tensor, when each rank has only a part of them, by code that was not"
            " checked: rows by their index or random numbers would be others in the whole tensor. Write while the"
            " model is whole, in configure_model() or before parallelize(); or write into a whole tensor"
            " (lightning_autotp.full_tensor(model, name).detach().clone()) and load it with"
            " lightning_autotp.load_full_state_dict(model, {name: tensor}, strict=False). What does the same with each"
            " element is right: run it inside `with lightning_autotp.checked(model):`"
        )
