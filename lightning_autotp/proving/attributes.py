"""Plain attributes of modules that a model's code reads: a flag that is set later may lead it another way."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping
from copy import copy
from functools import partial
from itertools import compress
from operator import is_not
from types import FunctionType
from typing import Any

from torch import nn

from lightning_autotp.capture.attribute_reads import OTHER, PLAIN, told
from lightning_autotp.layouts.plan import SizePlan
from lightning_autotp.proving.call_kinds import FewValues


class AttributeWatch:
    """The attributes of a parallel model that its code was seen to read.

    Args:
        here: the local model's modules, by the paths that they have in the original one.
        original: a copy of the original model.
        sizes: the plan's sizes: what a rank has of these is its own.
    """

    def __init__(self, here: Mapping[str, nn.Module], original: nn.Module, sizes: Iterable[SizePlan]) -> None:
        self._here = here
        self._there: dict[str, nn.Module] = dict(original.named_modules())
        self._had = {path: vars(module).keys() - vars(self._there[path]).keys() for path, module in here.items()}
        self._own = {(size.module, size.attribute) for size in sizes}
        self._watched: dict[tuple[str, str], tuple[nn.Module, str, Any]] = {}
        self._few = FewValues()

    def watch(self, read: Mapping[str, Iterable[str]]) -> None:
        """Watch these, too.

        Args:
            read: by module, the names of attributes.
        """
        for path, names in read.items():
            for name in names:
                module, place = self._here.get(path), (path, name)
                if module is not None and place not in self._own and place not in self._watched:
                    value = getattr(module, name, None)
                    found = told(value)
                    self._watched[place] = module, name, value if found is OTHER else found

    def changes(self) -> Hashable:
        """What is another than when it was watched first: places and values. Takes a few microseconds for a layer."""
        modules, names, values = zip(*self._watched.values(), strict=True) if self._watched else ((), (), ())
        now = list(map(getattr, modules, names, values))
        changed = []
        for place, value, one in compress(zip(self._watched, values, now, strict=True), map(is_not, now, values)):
            found = told(one)
            if found is not OTHER and found != value:
                changed.append((place, self._few.told(place, found)))
        return tuple(changed)

    def bring(self) -> None:
        """Let the original model have the values that the local one has now, and functions that it was given later."""
        for (path, _), (module, name, value) in self._watched.items():
            there, now = self._there[path], getattr(module, name, value)
            before, found = getattr(there, name, value), told(now)
            if before is not now and (found is OTHER or found != told(before)):  # of a property's value others follow
                setattr(there, name, now if found is OTHER else copy(now))
        for path, module in self._here.items():
            for name in vars(module).keys() - vars(self._there[path]).keys() - self._had[path]:
                value, there = getattr(module, name), self._there[path]
                # What stands for a method is for the local model alone.
                if _is_plain_function(value) and not hasattr(type(there), name):
                    setattr(there, name, value)


def _is_plain_function(value: Any) -> bool:
    """Whether it is a function, perhaps with some arguments, that belongs to no model."""
    if isinstance(value, partial):
        return _is_plain_function(value.func) and all(
            type(one) in PLAIN for one in (*value.args, *value.keywords.values())
        )
    return isinstance(value, FunctionType)
