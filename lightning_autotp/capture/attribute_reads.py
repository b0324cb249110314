"""Which plain attributes the code of each module reads: single values, and lists and the like of them.

An integer may be a size that must become local, and any of them may decide which way the code goes.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import partial
from types import FrameType
from typing import Any

from torch import nn

from lightning_autotp.capture.noted_numbers import plain
from lightning_autotp.operators.graph import Graph
from lightning_autotp.parameters.subclassing import subclass

PLAIN = frozenset((int, bool, float, str, type(None)))
"""Classes of attributes that hold a single value."""
OTHER = object()
"""Stands for attributes that are not plain."""
_SEVERAL = frozenset((list, tuple, set, dict))
OF_EVERY_MODULE = {*dir(nn.Module), *vars(nn.Module())}
"""Names of which it is not noted that they are read."""
_NOTED = "autotp_notes_reads"


def told(value: Any) -> Any:
    """What tells a plain attribute from another: the single value that it is, or those that it holds now."""
    kind = type(value)
    if kind in PLAIN:
        return value
    if kind not in _SEVERAL:
        return OTHER
    held = (*value, *value.values()) if kind is dict else tuple(value)
    return held if PLAIN.issuperset(map(type, held)) else OTHER


Reader = Callable[[str, str, FrameType], object]
"""Is told of a module's path and the name of a plain attribute of it that code reads, in this frame."""


def note_attributes(model: nn.Module, graph: Graph, running: Callable[[], str], reader: Reader) -> None:
    """Have a model note which plain attributes its code reads; it is a copy, and is not used for anything else.

    Args:
        model: the module tree, whose modules and configs get classes that note what is read of them.
        graph: gets, by module, the integers that were read (attributes of its own, and as ``config.NAME`` those of its
            config), and the names of all plain attributes, also those that are lists and the like.
        running: tells the path of the module that runs.
        reader: is told of what is read of modules.
    """
    modules = dict(model.named_modules())
    configs = {path: vars(module).get("config") for path, module in modules.items()}

    def watch_config(config: object) -> None:
        names = getattr(config, "attribute_map", {})

        def note(name: str, value: Any) -> None:
            path = running()
            if configs.get(path) is config and name in vars(config):
                _note_integer(graph, path, f"config.{names.get(name, name)}", value)

        _watch(config, note)

    for config in {id(config): config for config in configs.values() if config is not None}.values():
        watch_config(config)
    note_own_attributes(modules, graph, reader)


def note_own_attributes(modules: Mapping[str, nn.Module], graph: Graph, reader: Reader) -> None:
    """The same for what these modules' code reads of the modules themselves, by their paths."""
    for path, module in modules.items():
        _watch(module, partial(_note_own, graph, reader, path, module))


def _note_own(graph: Graph, reader: Reader, path: str, module: nn.Module, name: str, value: Any) -> None:
    reader(path, name, sys._getframe(2))
    if name in vars(module):
        _note_integer(graph, path, name, value)
    graph.settings.setdefault(path, {})[name] = None


def _note_integer(graph: Graph, path: str, name: str, value: Any) -> None:
    if type(value) is int:
        graph.integers.setdefault(path, {}).setdefault(name, value)


def is_noted(target: object) -> bool:
    """Whether it is noted which plain attributes of an object are read."""
    return getattr(type(target), _NOTED, False)


def _watch(target: object, note: Callable[[str, Any], object]) -> None:
    """Report every plain attribute read of ``target`` (the object itself, not its class)."""
    kind = type(target)
    get = kind.__getattribute__

    def read(self: object, name: str) -> object:
        value = get(self, name)
        if name in OF_EVERY_MODULE or told(known := plain(value)) is OTHER:
            return value
        # A list that a property gives is made of attributes, which are noted as it reads them.
        if type(known) in PLAIN or not isinstance(getattr(kind, name, None), property):
            note(name, known)
        return value

    known_as = {"__module__": kind.__module__, "__qualname__": kind.__qualname__}  # its code may look itself up by name
    watched = subclass(kind.__name__, (kind,), {"__getattribute__": read, _NOTED: True, **known_as})
    with suppress(TypeError):  # a dict, say, whose class cannot be changed: it has no attributes either
        target.__class__ = watched
