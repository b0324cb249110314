"""What code keeps outside of the model that it belongs to: tables in caches and in global variables.

A trace must leave no tensor there. One without values is of no use to a later run, and another trace must find what
this one has found. So what the code that runs in a trace reaches by its global names is put back after it.
"""

from __future__ import annotations

import gc
import inspect
from collections.abc import Callable, Iterable, Mapping
from functools import lru_cache, partial
from types import FrameType
from typing import Any

from torch import Tensor, nn

from lightning_autotp.capture.call_sites import is_user_code

_Cache = type(lru_cache(lambda: None))
_LARGEST = 10_000
"""Entries of a container that is looked into: larger ones are data, not caches of tables."""
_DEEPEST = 3
"""Containers inside each other that are looked into."""
_RESUMED = inspect.CO_GENERATOR | inspect.CO_COROUTINE | inspect.CO_ASYNC_GENERATOR
"""Of code whose frame may go on under another caller."""


class KeptOutside:
    """Takes away tensors that were kept since code was first seen to run, or puts back what was there.

    That is in global variables, attributes of a module's classes and objects, dicts and lists in these, and functions
    with a ``functools.lru_cache``.
    """

    def __init__(self) -> None:
        self._seen: dict[int, Any] = {}  # by id, and so alive
        self._undo: list[Callable[[], None]] = []
        self._around = 0  # id of the frame that the trace began in
        self._stack: list[FrameType] = []  # the frames that were looked at last, innermost last, and so alive
        self._depths: dict[int, int] = {}  # by id, where in it they are

    def begin(self, frame: FrameType) -> None:
        """Note what the code around the trace can reach, whose innermost frame this is: it runs all the time."""
        self.look(frame)
        self._around = id(frame)

    def look(self, frame: FrameType | None) -> None:
        """Note what all code that is running can reach."""
        seen, depths, new = self._seen, self._depths, list[FrameType]()
        while frame is not None and id(frame) != self._around:
            if id(frame) in depths and not frame.f_code.co_flags & _RESUMED:
                break  # since it runs, what called it has run
            names = frame.f_globals
            if id(names) not in seen:
                if is_user_code(frame.f_code.co_filename):
                    self._keep(names, 0)
                    self._keep_attributes(names)
                seen[id(names)] = names
            new.append(frame)
            frame = frame.f_back
        depth = depths.get(id(frame), -1) + 1  # those further out were looked at with it
        for gone in self._stack[depth:]:
            del depths[id(gone)]
        self._stack[depth:] = reversed(new)
        for at in range(depth, len(self._stack)):
            depths[id(self._stack[at])] = at

    def put_back(self) -> None:
        """Let everything be as it was."""
        for undo in self._undo:
            undo()

    def _keep_attributes(self, names: dict[str, Any]) -> None:
        """Note the attributes of the classes and objects that a Python module has made."""
        for value in list(names.values()):
            kind = value if isinstance(value, type) else type(value)
            if kind.__module__ == names.get("__name__") and not isinstance(value, nn.Module):
                before = dict(getattr(value, "__dict__", {}))
                self._undo.append(partial(_put_back_attributes, value, before))
                for attribute in before.values():
                    self._keep(attribute, 1)

    def _keep(self, value: Any, depth: int) -> None:
        """Note what is in a value, if it is a cache or a container."""
        value = value.__func__ if isinstance(value, staticmethod | classmethod) else value
        if not isinstance(value, dict | list | _Cache) or id(value) in self._seen or depth > _DEEPEST:
            return
        self._seen[id(value)] = value
        if isinstance(value, _Cache):
            self._undo.append(partial(_clear, value, value.cache_info().misses))
        elif len(value) <= _LARGEST:
            before = _entries(value)
            self._undo.append(partial(_put_back_entries, value, before))
            for entry in before.values():
                self._keep(entry, depth + 1)


def _entries(container: dict[Any, Any] | list[Any]) -> dict[Any, Any]:
    """What is in a container; a subclass of ``dict`` may do more than to give it."""
    return dict(dict.items(container) if isinstance(container, dict) else enumerate(container))


def _put_back_entries(container: Any, before: dict[Any, Any]) -> None:
    changed = _new_tensors(_entries(container), before)
    if changed and isinstance(container, list):
        container[:] = before.values()
    elif changed:
        for key in changed:
            if key in before:
                container[key] = before[key]
            else:
                del container[key]


def _put_back_attributes(owner: Any, before: dict[str, Any]) -> None:
    for name in _new_tensors(getattr(owner, "__dict__", {}), before):
        if name in before:
            setattr(owner, name, before[name])
        else:
            delattr(owner, name)


def _clear(cache: Any, misses: int) -> None:
    if cache.cache_info().misses != misses and _holds_tensor(gc.get_referents(cache), 0):
        cache.cache_clear()


def _new_tensors(now: Mapping[Any, Any], before: dict[Any, Any]) -> list[Any]:
    """The keys of entries that are new, or others than before, and hold tensors."""
    new = [key for key, value in now.items() if key not in before or value is not before[key]]
    return [key for key in new if _holds_tensor(now[key], 0)]


def _holds_tensor(value: Any, depth: int) -> bool:
    """Whether a value is a tensor, or a container or object with one."""
    if isinstance(value, Tensor | type) or depth > _DEEPEST:
        return isinstance(value, Tensor)
    if isinstance(value, dict):
        inside: Iterable[Any] = _entries(value).values()
    elif isinstance(value, list | tuple | set | frozenset):
        inside = value
    else:
        inside = list(getattr(value, "__dict__", {}).values())
    return any(_holds_tensor(item, depth + 1) for item in inside)
