"""Writes into parts between set-up and the first forward: nobody but this package knows how to write into a part.

After set-up a parameter looks as always, but a rank may have only a part of it. What code writes into it in place may
mean the whole: random numbers of its shape, its last rows, a row by its index. A write that does with each element the
same is right; afterwards nobody can tell which of the two it was. So the values of parts have checksums from set-up to
the first use of the model, and what was written by code that nobody looked at is an error. Loading, this package's
callbacks and code inside ``checked`` are known; later writes are an optimizer's, too, and not looked at here.

Another tensor in the place of a part (``p.data = x``, ``module.to(...)``, a new ``nn.Parameter``) is no write: it must
have the part's shape, so who made it knows what it is.
"""

from __future__ import annotations

import weakref
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from lightning_autotp.layouts.types import Shard
from lightning_autotp.parameters.local_blocks import plain
from lightning_autotp.parameters.state import parallel_models, parallel_state
from lightning_autotp.private.torch_private import StorageWeakRef
from lightning_autotp.ranks.agreement import gather_objects
from lightning_autotp.ranks.description import checksum

OUTER = 2
"""Modules so deep in a model may be called by themselves: its base model, embeddings and head."""


class _Values(NamedTuple):
    """What a part held when it was looked at.

    Attributes:
        parameter: the object.
        memory: what its values were in.
        sum: their checksum.
    """

    parameter: weakref.ref[nn.Parameter]
    memory: StorageWeakRef
    sum: Tensor


class Written:
    """The parts of a parallel model, and which of them were written by code that nobody knows.

    A deep copy of the model is not watched.
    """

    def __init__(self, model: nn.Module) -> None:
        self._known_depth = 0
        self._is_open = True
        self._unknown: list[str] = []
        self._values: dict[str, _Values] = {}
        self._record(model)

    def begin_known(self, model: nn.Module) -> None:
        """From now on what writes is known."""
        if self._known_depth == 0:
            self._unknown += self._changed(model)
        self._known_depth += 1

    def end_known(self, model: nn.Module, filled: Collection[Tensor]) -> None:
        """From now on it is not; some tensors were filled anew, so that nothing is left of what was written before."""
        ids = set(map(id, filled))
        gone = {name for name, parameter in _parts(model).items() if id(parameter) in ids} if ids else set()
        self._unknown = [name for name in self._unknown if name not in gone]
        self._known_depth -= 1
        if self._known_depth == 0:
            self._record(model)

    def close(self, model: nn.Module) -> list[str]:
        """The names of parts that were written by code that is not known; later writes do not count."""
        if self._known_depth == 0:
            self._unknown += self._changed(model)
        self._values.clear()
        self._is_open = False
        return list(dict.fromkeys(self._unknown))

    def _record(self, model: nn.Module) -> None:
        if self._is_open:
            self._values = {name: _values(parameter) for name, parameter in _parts(model).items()}

    def _changed(self, model: nn.Module) -> list[str]:
        if not self._values:
            return []
        changed = []
        for name, parameter in _parts(model).items():
            before = self._values.get(name)
            if before is None or before.parameter() is not parameter:
                continue
            now = _values(parameter)
            if now.memory == before.memory and int(now.sum) != int(before.sum):
                changed.append(name)
        return changed


def _parts(model: nn.Module) -> dict[str, nn.Parameter]:
    places = parallel_state(model).places(model)
    return {place.meta.name: place.parameter for place in places if isinstance(place.meta.layout, Shard)}


def _values(parameter: nn.Parameter) -> _Values:
    held = plain(parameter)
    return _Values(weakref.ref(parameter), StorageWeakRef(held.untyped_storage()), checksum(held))


@contextmanager
def known_writes(module: nn.Module, filled: Collection[Tensor] = ()) -> Iterator[None]:
    """Within it what writes into parts of the parallel models in a module is known to be right. Not collective.

    Args:
        module: the module.
        filled: parameters that are filled anew within; may be said until the end.
    """
    watched = [(model, state.written) for model, state in parallel_models(module) if state.written is not None]
    for model, written in watched:
        written.begin_known(model)
    try:
        yield
    finally:
        for model, written in watched:
            written.end_known(model, filled)


def watch_writes(model: nn.Module) -> None:
    """Find writes into the parts of a parallel model from now on until it is used for the first time. Not collective.

    That use is collective over its tensor-parallel group.
    """
    state = parallel_state(model)
    state.written = Written(model)
    first = _FirstUse(model)
    first.handles = [
        model.register_forward_pre_hook(first.of_model, prepend=True),
        model.register_load_state_dict_pre_hook(_begin_known),
        model.register_load_state_dict_post_hook(_end_known),
    ]
    for path, module in model.named_modules():
        if path and len(path.split(".")) <= OUTER:
            first.handles.append(module.register_forward_pre_hook(first.of_module, prepend=True))


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
            found = gather_objects(written.close(model), state.group.process_group)
            _refuse(model, list(dict.fromkeys(name for names in found for name in names)))
        state.written = None
        for handle in self.handles:
            handle.remove()

    def of_module(self, module: nn.Module, args: Any) -> None:
        """Before a forward of a module in it that is called by itself, perhaps on one rank alone. Not collective."""
        if self.model is None or torch.compiler.is_compiling():
            return
        written = parallel_state(self.model).written
        if written is not None:
            _refuse(self.model, written.close(self.model))

    def __reduce__(self) -> tuple[Any, ...]:
        return _FirstUse, ()


def _begin_known(model: nn.Module, *_: Any) -> None:
    if (written := parallel_state(model).written) is not None:
        written.begin_known(model)


def _end_known(model: nn.Module, keys: Any) -> None:
    if (written := parallel_state(model).written) is not None:
        missing = [f".{key}" for key in keys.missing_keys]
        parts = _parts(model).items()
        written.end_known(model, [part for name, part in parts if not any(key.endswith(f".{name}") for key in missing)])


def _refuse(model: nn.Module, names: Sequence[str]) -> None:
    if names:
        raise RuntimeError(
            f"{', '.join(names[:5])}{f' and {len(names) - 5} others' * (len(names) > 5)} of the parallel"
            f" {type(model).__name__} were written in place after it was divided, when each rank has only a part of"
            " them, by code that nobody has looked at: rows by their index or random numbers would be others in the"
            " whole tensor. Write while the model is whole, in configure_model() or before parallelize(); or write into"
            " a whole tensor (lightning_autotp.full_tensor(model, name).detach().clone()) and load it with"
            " lightning_autotp.load_full_state_dict(model, {name: tensor}, strict=False). What does the same with each"
            " element is right: run it inside `with lightning_autotp.checked(model):`"
        )
