"""Writes into parts between set-up and the first forward: nobody but this package knows how to write into a part.

After set-up a parameter looks as always, but a rank may have only a part of it. What code writes into it in place may
mean the whole: random numbers of its shape, its last rows, a row by its index. A write that does with each element the
same is right; afterwards nobody can tell which of the two it was. So the values of parts have checksums from set-up to
the first use of the model, and what was written by code that nobody looked at is an error. Loading, this package's
callbacks and code inside ``checked`` are known. The first use is a forward, or an optimizer's first step: a forward of
compiled code does not look. Later only the number of writes is looked at
(:mod:`~lightning_autotp.parameters.later_writes`).
"""

from __future__ import annotations

import weakref
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.optimizer import Optimizer, register_optimizer_step_pre_hook
from torch.utils.hooks import RemovableHandle

from lightning_autotp.layouts.listing import listed
from lightning_autotp.layouts.types import Shard
from lightning_autotp.parameters.state import parallel_models, parallel_state
from lightning_autotp.parameters.unchanged import check_unchanged
from lightning_autotp.parameters.written import Written
from lightning_autotp.private.torch_private import without_modes
from lightning_autotp.ranks.agreement import gather_objects
from lightning_autotp.ranks.meeting import meet

OUTER = 2
"""Modules so deep in a model may be called by themselves: its base model, embeddings and head."""


@contextmanager
def known_writes(module: nn.Module, filled: Collection[Tensor] = (), *, is_looked_at: bool = False) -> Iterator[None]:
    """Within it what writes into parts of the parallel models in a module is known to be right. Not collective.

    Args:
        module: the module.
        filled: parameters that are filled anew within; may be said until the end.
        is_looked_at: whether it is because code is looked at, which may run again later.
    """
    watched = list(parallel_models(module))
    for model, state in watched:
        if state.written is not None:
            state.written.begin_known(_parts(model))
        state.later_writes.begin_known(is_looked_at)
    try:
        yield
    finally:
        for model, state in watched:
            if state.written is not None:
                state.written.end_known(_parts(model), filled)
            state.later_writes.end_known()


def watch_writes(model: nn.Module) -> None:
    """Find writes into the parts of a parallel model from now on until it is used for the first time. Not collective.

    That use is collective over its tensor-parallel group.
    """
    state = parallel_state(model)
    state.written = Written(_parts(model))
    first = _FirstUse(model)
    first.handles = [
        model.register_forward_pre_hook(first.of_model, prepend=True),
    ]
    model.register_load_state_dict_pre_hook(_before_loading)
    model.register_load_state_dict_post_hook(_after_loading)
    for path, module in model.named_modules():
        if path and len(path.split(".")) <= OUTER:
            first.handles.append(module.register_forward_pre_hook(first.of_module, prepend=True))
    own = weakref.ref(first)  # which lives as long as its hooks of modules

    def of_step(optimizer: Optimizer, *_: Any) -> None:
        if (first := own()) is not None:
            first.of_step(optimizer)

    weakref.finalize(model, register_optimizer_step_pre_hook(of_step).remove)


class _FirstUse:
    """Hooks of a parallel model and of modules in it, until it has run. Those of a copy do nothing."""

    def __init__(self, model: nn.Module | None = None) -> None:
        self.model = model
        self.handles: list[RemovableHandle] = []

    def of_model(self, model: nn.Module, args: Any) -> None:
        """Before a forward. Collective.

        Raises:
            RuntimeError: on every rank, naming the parts that were written on any.
        """
        if torch.compiler.is_compiling():
            return
        state = parallel_state(model)
        written = state.written
        if written is not None:
            meet(state.group, f"{type(model).__name__} is used, in a call or an optimizer's step, for the first time")
            with without_modes():  # the user's see what the model computes, not this
                found = gather_objects(written.close(_parts(model)), state.group.process_group)
            _refuse(model, list(dict.fromkeys(name for names in found for name in names)))
        state.written = None
        for handle in self.handles:
            handle.remove()

    def of_step(self, optimizer: Optimizer) -> None:
        """Before an optimizer's step. Collective, if it steps parameters of the model.

        Raises:
            RuntimeError: as :meth:`of_model`, or for another module or parameter in the model.
        """
        if self.model is None:
            return
        own = set(map(id, self.model.parameters()))
        if any(id(parameter) in own for group in optimizer.param_groups for parameter in group["params"]):
            check_unchanged(self.model)  # parts that are gone or have moved cannot be compared
            self.of_model(self.model, ())

    def of_module(self, module: nn.Module, args: Any) -> None:
        """Before a forward of a module in it that is called by itself, perhaps on one rank alone. Not collective."""
        if self.model is None or torch.compiler.is_compiling():
            return
        written = parallel_state(self.model).written
        if written is not None:
            _refuse(self.model, written.close(_parts(self.model)))

    def __reduce__(self) -> tuple[Any, ...]:
        return _FirstUse, ()


def _before_loading(model: nn.Module, *_: Any) -> None:
    state = parallel_state(model)
    if state.written is not None:
        state.written.begin_known(_parts(model))
    state.later_writes.check()


def _after_loading(model: nn.Module, keys: Any) -> None:
    state = parallel_state(model)
    if state.written is not None:
        missing = [f".{key}" for key in keys.missing_keys]
        parts = _parts(model)
        given = [part for name, part in parts.items() if not any(key.endswith(f".{name}") for key in missing)]
        state.written.end_known(parts, given)
    state.later_writes.note()


def _refuse(model: nn.Module, names: Sequence[str]) -> None:
    if names:
        raise RuntimeError(
            f"{listed(names)} of the parallel"
            f" {type(model).__name__} were written in place after it was divided, when each rank has only a part of"
            " them, by code that nobody has looked at: rows by their index or random numbers would be others in the"
            " whole tensor. Write while the model is whole, in configure_model() or before parallelize(); or write into"
            " a whole tensor (lightning_autotp.full_tensor(model, name).detach().clone()) and load it with"
            " lightning_autotp.load_full_state_dict(model, {name: tensor}, strict=False). What does the same with each"
            " element is right: run it inside `with lightning_autotp.checked(model):`"
        )


def _parts(model: nn.Module) -> dict[str, nn.Parameter]:
    places = parallel_state(model).places(model)
    return {place.meta.name: place.parameter for place in places if isinstance(place.meta.layout, Shard)}
