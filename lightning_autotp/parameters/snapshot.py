"""What a parallel model, or a module in one, consists of at one time, to find before each call if anything has changed.

Modules, parameters and their hooks are compared by identity, in a few calls of C whatever the size of the model. Only
where something is another than before is it asked, module by module, what may be there. What tells kinds of calls of an
unchanged model apart, such as training flags and settings, is no part of it
(:mod:`~lightning_autotp.proving.new_calls`), nor are the values of parameters
(:mod:`~lightning_autotp.parameters.writes`), which every step changes.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain
from operator import attrgetter, is_, methodcaller
from typing import Any

from torch import Tensor, nn

from lightning_autotp.parameters.state import ParameterPlace, parallel_state, parts_among
from lightning_autotp.private.torch_private import (
    HOOKS_OF_ALL_MODULES,
    children_of,
    hook_tables,
    module_hook_tables,
    parameters_of,
)

_ATTRIBUTES = attrgetter("__dict__")
_FORWARD = methodcaller("get", "forward")
_END = object()


class Snapshot:
    """Modules, their forwards and hooks, their parameters, the sizes of parts, and parameters' hooks.

    Args:
        model: a parallel model.
        modules: the modules in it that are compared.
        places: where their parameters are now.

    Attributes:
        parts: the parameters of which this rank has a part, by name.
        is_lasting: whether it may be kept: not what is there for one call (``torch.func.functional_call``).
    """

    def __init__(self, model: nn.Module, modules: Sequence[nn.Module], places: Sequence[ParameterPlace]) -> None:
        state = parallel_state(model)
        tables: list[dict[str, Any]] = [table for of in modules for table in (children_of(of), parameters_of(of))]
        self._empty = [table for table in tables if not table]
        # Views: they follow what is put into the tables.
        self._live = [*(table.values() for table in tables if table), (_END,)]
        self._objects = list(chain.from_iterable(self._live))
        self.parts = parts_among(places)
        self._sizes = list(map(Tensor.numel, self.parts.values()))
        # Another forward may be put on an object.
        self._dicts = list(map(vars, modules))
        self._forwards = list(map(_FORWARD, self._dicts))
        self._module_hooks = [*HOOKS_OF_ALL_MODULES, *chain.from_iterable(map(module_hook_tables, modules))]
        self._numbers = list(chain.from_iterable(self._module_hooks))
        self._hooked = [place.parameter for place in places if place.meta.name in state.gradient_hooks]
        # Where the contents of two tensors are swapped, so are the dicts of their attributes.
        self._attributes = list(map(_ATTRIBUTES, self._hooked))
        self._hooks = hook_tables(self._hooked)
        self._lengths = list(map(len, filter(None, self._hooks)))
        self.is_lasting = all(isinstance(part, nn.Module | nn.Parameter | None) for part in self._objects[:-1])

    def is_current(self) -> bool:
        """Whether all of that is there still, and nothing else."""
        return (
            all(map(is_, chain.from_iterable(self._live), self._objects))
            and not any(self._empty)
            and list(map(Tensor.numel, self.parts.values())) == self._sizes
            and all(map(is_, map(_FORWARD, self._dicts), self._forwards))
            and list(chain.from_iterable(self._module_hooks)) == self._numbers
            and all(map(is_, map(_ATTRIBUTES, self._hooked), self._attributes))
            and all(map(is_, hook_tables(self._hooked), self._hooks))
            and list(map(len, filter(None, self._hooks))) == self._lengths
        )
