"""How a value is walked that modules take or return: containers in containers, down to their leaves.

This is the only place that says so: the trace names the tensors at a module's boundary by these walks, and the running
model finds them again by the same names. A place is named by the steps that lead to it:

================================  ===================================  =================================
container                         a step to a child                    how another one is made of it
================================  ===================================  =================================
tuple, list                       ``[0]``                              of the same class
namedtuple                        ``.field``                           of the same class
dict, any mutable mapping         ``['key']``                          a shallow copy with other entries
dataclass                         ``.field``                           a shallow copy with other fields
dataclass that is a dict, too     ``['key']``                          as ``dataclasses.replace`` makes it
class that torch's pytrees know   the key that it was registered       as it was registered
                                  with; without keys ``['key']`` if
                                  it is a mapping, else ``[0]``
================================  ===================================  =================================

Everything else is a leaf, and so is a container inside itself. Where no leaf changes, the container stays the same
object.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping, Sequence
from dataclasses import FrozenInstanceError, fields, is_dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from lightning_autotp.capture.noted_numbers import plain
from lightning_autotp.operators.graph import Constant
from lightning_autotp.private.torch_private import registered_children


class Opened(NamedTuple):
    """One level of a value.

    Attributes:
        steps: to each of its children.
        children: what is there.
        rebuilt: makes another container of other children, in the same order.
    """

    steps: list[str]
    children: list[Any]
    rebuilt: Callable[[Sequence[Any]], Any]


def opened(value: Any) -> Opened | None:
    """A value's children; ``None`` for a leaf. ``torch.compile`` can trace it for Python's own containers."""
    if isinstance(value, Tensor | torch.Size | str) or value is None:
        return None
    kind = type(value)
    if kind is tuple or kind is list:
        return Opened([f"[{at}]" for at in range(len(value))], list(value), kind)
    if kind is dict:
        keys = [f"[{key!r}]" for key in value]
        return Opened(keys, list(value.values()), lambda new: dict(zip(value, new, strict=True)))
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return Opened([f".{name}" for name in value._fields], list(value), lambda new: kind(*new))
    is_record = is_dataclass(value) and not isinstance(value, type | nn.Module)
    if is_record and isinstance(value, dict):  # each entry is a field, too
        return Opened([f"[{key!r}]" for key in value], list(value.values()), lambda new: _like_record(value, new))
    if (found := registered_children(value)) is not None:
        steps, children, rebuilt = found
        if steps is None or not all(re.fullmatch(_STEP, step) for step in steps):
            steps = _unnamed(value, children)
        return Opened(steps, children, rebuilt)
    if isinstance(value, MutableMapping):
        return Opened([f"[{key!r}]" for key in value], list(value.values()), lambda new: _like_mapping(value, new))
    if isinstance(value, list):
        return Opened([f"[{at}]" for at in range(len(value))], list(value), lambda new: _like_list(value, new))
    if is_record:
        names = [field.name for field in fields(value) if hasattr(value, field.name)]
        return Opened([f".{name}" for name in names], [getattr(value, name) for name in names], _Fields(value, names))
    return None


_DEEPEST = 8
"""So many levels of an object are looked into."""


def is_unused(value: Any, depth: int = 0) -> bool:
    """Whether a leaf holds nothing that was computed, but plain values and counts: a cache before its use."""
    if value is None or isinstance(value, bool | int | float | str | torch.dtype | torch.device | type):
        return True
    if isinstance(value, Tensor):
        return not (value.is_floating_point() or value.is_complex())
    if type(value) in (list, tuple, dict):
        inside: Iterable[Any] = value.values() if type(value) is dict else value
    elif getattr(type(value), "__new__", None) is object.__new__ and hasattr(value, "__dict__") and not callable(value):
        inside = vars(value).values()  # all of its state: it is of no built-in class
    else:
        return False
    return depth < _DEEPEST and all(is_unused(item, depth + 1) for item in inside)


def _unnamed(value: Any, children: list[Any]) -> list[str]:
    """Steps where a class says none: a mapping's keys, where the children are its values; else numbers."""
    values = list(value.values()) if isinstance(value, Mapping) else []
    if len(values) == len(children) and all(child is item for child, item in zip(children, values, strict=True)):
        return [f"[{key!r}]" for key in value]
    return [f"[{at}]" for at in range(len(children))]


def _like_record(value: Any, new: Sequence[Any]) -> Any:
    return replace(value, **{key: item for key, item in zip(value, new, strict=True) if value[key] is not item})


def _like_mapping(value: MutableMapping[Any, Any], new: Sequence[Any]) -> Any:
    made: Any = copy.copy(value)
    for key, item in zip(list(value), new, strict=True):
        if value[key] is not item:
            made[key] = item
    return made


def _like_list(value: list[Any], new: Sequence[Any]) -> Any:
    made = copy.copy(value)
    made[:] = new
    return made


class _Fields:
    """Makes a dataclass with other values in some fields; its ``__init__`` does not run again."""

    def __init__(self, value: Any, names: list[str]) -> None:
        self.value, self.names = value, names

    def __call__(self, new: Sequence[Any]) -> Any:
        made = copy.copy(self.value)
        for name, item in zip(self.names, new, strict=True):
            if getattr(self.value, name) is not item:
                _set_field(made, name, item)
        return made


def _set_field(value: Any, name: str, item: Any) -> None:
    try:
        setattr(value, name, item)
    except FrozenInstanceError:
        object.__setattr__(value, name, item)


def map_leaves(change: Callable[[str, Any], Any], value: Any) -> Any:
    """The value with each leaf as ``change(path, leaf)`` gives it; paths are steps, one after the other."""
    return _mapped(change, value, "", ())


def _mapped(change: Callable[[str, Any], Any], value: Any, path: str, around: tuple[int, ...]) -> Any:
    level = None if id(value) in around else opened(value)
    if level is None:
        return change(path, value)
    around = (*around, id(value))
    new = [_mapped(change, child, path + step, around) for step, child in zip(level.steps, level.children, strict=True)]
    if all(child is before for child, before in zip(new, level.children, strict=True)):
        return value
    return level.rebuilt(new)


def map_tensors(change: Callable[[Tensor], Any], value: Any) -> Any:
    """The value with each tensor in it changed."""
    return map_leaves(lambda _, leaf: change(leaf) if isinstance(leaf, Tensor) else leaf, value)


def leaves_of(value: Any) -> Iterator[tuple[str, Any]]:
    """Every leaf, with its path."""
    return _leaves(value, "", ())


def _leaves(value: Any, path: str, around: tuple[int, ...]) -> Iterator[tuple[str, Any]]:
    level = None if id(value) in around else opened(value)
    if level is None:
        yield path, value
        return
    for step, child in zip(level.steps, level.children, strict=True):
        yield from _leaves(child, path + step, (*around, id(value)))


def tensors_in(value: Any) -> list[Tensor]:
    """Every tensor in a value, as often as it is there."""
    return [leaf for _, leaf in leaves_of(value) if isinstance(leaf, Tensor)]


def constants_among(leaves: Iterable[tuple[str, Any]]) -> tuple[tuple[str, Constant], ...]:
    """Every number, text, flag and ``None`` among the :func:`leaves_of` a value."""
    # Plain numbers: those of a trace note that they are asked for when they are compared.
    found = ((path, leaf) for path, leaf in leaves if leaf is None or isinstance(leaf, int | float | str))
    return tuple((path, plain(leaf)) for path, leaf in found)


def steps_of(path: str) -> tuple[str, ...]:
    """The steps of a path such as ``[1]['hidden_states']`` or ``.last_hidden_state[0]``."""
    return tuple(re.findall(_STEP, path))


_STEP = r"""\[(?:'(?:[^'\\]|\\.)*'|"(?:[^"\\]|\\.)*"|[^\]]*)\]|\.\w+"""


class Copied(NamedTuple):
    """A container that can be changed in place, and its copy with other leaves, as it was when it was made.

    Attributes:
        path: where it is.
        original: the container.
        copy: what is used in its place.
        level: what was in the copy then.
    """

    path: str
    original: Any
    copy: Any
    level: Opened

    def is_changed(self) -> bool:
        """Whether the copy holds something else by now."""
        now = opened(self.copy)
        return (
            now is None
            or now.steps != self.level.steps
            or any(child is not before for child, before in zip(now.children, self.level.children, strict=True))
        )

    def put_back(self) -> None:
        """Let the original hold what the copy holds."""
        if isinstance(self.original, list):
            self.original[:] = self.copy
        elif isinstance(self.original, MutableMapping):
            self.original.clear()
            self.original.update(self.copy)
        else:
            vars(self.original).update(vars(self.copy))


def copied(original: Any, new: Any, path: str = "") -> Iterator[Copied]:
    """The containers of a value of which :func:`map_leaves` made copies, if they can be changed in place."""
    before, level = opened(original), opened(new)
    if original is new or before is None or level is None:
        return
    if isinstance(new, list | MutableMapping) or (not isinstance(new, tuple) and hasattr(new, "__dict__")):
        yield Copied(path, original, new, level)
    for step, old, child in zip(level.steps, before.children, level.children, strict=True):
        yield from copied(old, child, path + step)


class NoSuchPlace(LookupError):
    """A value has nothing at a path."""


def replaced_at(value: Any, steps: Sequence[str], change: Callable[[Any], Any]) -> Any:
    """The value with what is at the end of the steps changed; containers on the way are rebuilt.

    Raises:
        NoSuchPlace: if a step leads nowhere.
    """
    levels = []
    for step in steps:
        level = opened(value)
        if level is None or step not in level.steps:
            raise NoSuchPlace(f"cannot find {step} in a {type(value).__name__}")
        at = level.steps.index(step)
        levels.append((level, at))
        value = level.children[at]
    value = change(value)
    for level, at in reversed(levels):
        value = level.rebuilt([*level.children[:at], value, *level.children[at + 1 :]])
    return value
