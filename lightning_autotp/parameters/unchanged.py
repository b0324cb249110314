"""A look at a parallel model before it runs: its modules and parameters are those for which the plan was proved.

Nobody tells a model that a layer of it was replaced, that its embeddings were resized or untied. So before every
forward the objects in it are compared with those that were there before the last one, which takes a few dozen
microseconds. Only where some are others is it asked whether these may be there: libraries put parameters in the places
of others (FSDP2, ``module.to(...)``, copies) and modules around others (compilers, adapters' wrappers).
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain
from operator import is_
from typing import Any

import torch
from torch import Tensor, nn

from lightning_autotp.parameters.local_blocks import fsdp_modules
from lightning_autotp.parameters.state import (
    ParallelState,
    dotted,
    misfits,
    own_modules,
    parallel_state,
    refuse_changes,
)
from lightning_autotp.private.torch_private import children_of, parameters_of

_END = object()


def check_unchanged(model: nn.Module) -> None:
    """Look at all of a parallel model. Not collective.

    Raises:
        RuntimeError: naming modules that are gone, have moved or were replaced; or parameters of which nothing is
            known, that are gone, of another shape than this rank's part, or tied otherwise than before.
    """
    state = parallel_state(model)
    refuse_changes(model, list(_other_modules(model, state)))
    places = state.places(model)
    here = {place.name for place in places}
    gone = [name for name in state.metas if name not in here and name.rpartition(".")[0] in state.modules]
    refuse_changes(model, [f"{name} is gone" for name in gone] + misfits(places))
    if fsdp_modules(model):
        given = [place.name for place in places if not isinstance(place.parameter, nn.Parameter)]
        refuse_changes(model, [f"{name} was given for one call, and FSDP2 would use its own" for name in given])


def _other_modules(model: nn.Module, state: ParallelState) -> Iterator[str]:
    """Modules that are not where they were when the model was divided. Others may have been put around them."""
    modules = dict(own_modules(model))
    before = {path: state.path(module) if module is not model else "" for path, module in modules.items()}
    places: dict[str, str] = {}  # where a module is but for what was put around it
    for path in modules:
        above, _, name = path.rpartition(".")
        places[path] = dotted(places[above], name) if path and before[above] is not None else places.get(above, "")
        was = before[path]
        if was not in (None, places[path]):
            yield f"{was} is at {path} now"
            places[path] = was
    gone = set(state.modules) - set(before.values())
    taken = {places[path]: modules[path] for path in reversed(modules) if before[path] is None}
    for path in sorted(gone):
        if path.rpartition(".")[0] not in gone:
            other = taken.get(path)
            yield f"{path} is gone" if other is None else f"{path} was replaced by another module, a {_kind(other)}"


def _kind(module: nn.Module) -> str:
    return type(module).__name__


class Unchanged:
    """Forward pre-hook of a parallel model: :func:`check_unchanged`, where something is not what it was before.

    A copy of it, on a copy of the model, has seen nothing so far.
    """

    def __init__(self) -> None:
        self._seen: _Objects | None = None

    def __call__(self, model: nn.Module, args: Any) -> None:
        """Before a forward."""
        if torch.compiler.is_compiling():
            return
        later_writes = parallel_state(model).later_writes
        if self._seen is not None and self._seen.are_there():
            later_writes.check()
            return
        self._seen = None
        check_unchanged(model)
        seen = _Objects(model)
        later_writes.watch(seen.parts)
        # What is there for one call (torch.func.functional_call) is not kept alive.
        self._seen = seen if seen.is_lasting else None

    def __reduce__(self) -> tuple[Any, ...]:
        return Unchanged, ()


class _Objects:
    """The modules and parameters in a parallel model at one time, and the sizes of those of which it has a part."""

    def __init__(self, model: nn.Module) -> None:
        state = parallel_state(model)
        modules = [module for _, module in own_modules(model)]
        tables: list[dict[str, Any]] = [table for of in modules for table in (children_of(of), parameters_of(of))]
        self._empty = [table for table in tables if not table]
        # Views: they follow what is put into the tables.
        self._live = [*(table.values() for table in tables if table), (_END,)]
        self._objects = list(chain.from_iterable(self._live))
        places = [place for place in state.places(model) if place.meta.is_parallel]
        self.parts = {place.meta.name: place.parameter for place in places}
        self._sizes = list(map(Tensor.numel, self.parts.values()))
        self.is_lasting = all(isinstance(part, nn.Module | nn.Parameter | None) for part in self._objects[:-1])

    def are_there(self) -> bool:
        """Whether they still are, and no others."""
        return (
            all(map(is_, chain.from_iterable(self._live), self._objects))
            and not any(self._empty)
            and list(map(Tensor.numel, self.parts.values())) == self._sizes
        )
