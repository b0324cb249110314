"""What tells calls of a model apart before they run: what they are given, and under which settings.

Values of tensors do not count, and of sizes only whether they are 1: other sizes may lead code another way, too, so
:class:`Sizes` says when they are to be looked at.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping
from dataclasses import fields, is_dataclass
from typing import Any

import torch
from torch import Tensor

from lightning_autotp.capture.capture import ExampleCall
from lightning_autotp.capture.nested import leaves_of, map_tensors, opened, tensors_in
from lightning_autotp.private.torch_private import has_values

_MOST_VALUES = 16
"""So many values of one number are looked at, each when it comes; then the 32nd, the 64th and so on."""
_POWER = 64
"""Up to this power of two it is looked at how often a size divides by two: code pads and cuts into blocks by that."""


def kind_of(value: Any, unknown: list[str] | None = None) -> Hashable:
    """What of a call's arguments may decide which code runs: not values of tensors, nor their sizes but 1.

    The number of rows, a tensor's first dim, may be 1 as well as any other: see :func:`with_rows`.

    Args:
        value: the arguments.
        unknown: gets the classes of objects of whose contents nothing is known.
    """
    kind = type(value)
    if value is None or kind is bool or kind is str or isinstance(value, torch.dtype | torch.device):
        return value
    if isinstance(value, Tensor):
        return value.dtype, value.requires_grad, value.ndim, tuple([size == 1 for size in value.shape[1:]])
    if kind is int:
        return "int", min(max(value, -1), 2)
    if kind is float:
        return "float"
    if isinstance(value, Mapping):
        return tuple([(key, kind_of(item, unknown)) for key, item in value.items()])
    if isinstance(value, list | tuple):
        return (kind.__name__, *[kind_of(item, unknown) for item in value])
    if is_dataclass(value):
        return tuple([(field.name, kind_of(getattr(value, field.name), unknown)) for field in fields(value)])
    if (level := opened(value)) is not None:
        return (kind.__name__, *[(step, kind_of(item, unknown)) for step, item in zip(*level[:2], strict=True)])
    if unknown is not None:
        unknown.append(kind.__name__)
    return kind.__name__


def surroundings(device: str) -> tuple[bool, torch.dtype | None]:
    """Whether gradients are recorded, and in which precision autocast computes on a device; ``None`` if it is off."""
    kind = device.partition(":")[0]
    dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else None
    return torch.is_grad_enabled(), dtype


def integers_of(call: ExampleCall) -> Iterable[tuple[str, int]]:
    """The integers among a call's arguments, each with where it is; not those in structures, where a cache counts."""
    named = (*((f"[{at}]", value) for at, value in enumerate(call.args)), *call.kwargs.items())
    return [(place, value) for place, value in named if type(value) is int]


def floats_of(call: ExampleCall, places: set[str]) -> Iterable[tuple[str, float]]:
    """The floats of a call at these places."""
    return [(place, leaf) for place, leaf in leaves_of(tuple(call)) if place in places] if places else []


def full_ones_of(call: ExampleCall, places: set[str]) -> Iterable[tuple[str, bool]]:
    """Of the tensors of a call at these places, whether no element is zero or false: a mask that masks nothing."""
    found = [(place, leaf) for place, leaf in leaves_of(tuple(call)) if place in places] if places else []
    return [(place, bool(leaf.all())) for place, leaf in found if isinstance(leaf, Tensor) and has_values(leaf)]


class FewValues:
    """Numbers of which each new value is to be looked at, but of a number that is another in each call few are."""

    def __init__(self) -> None:
        self._seen: dict[Hashable, set[Any]] = {}
        self._last: dict[Hashable, Any] = {}
        self._count: dict[Hashable, int] = {}

    def told(self, place: Hashable, value: Any) -> Any:
        """The value, or the one at this place that was looked at last, if this one is not to be."""
        seen = self._seen.setdefault(place, set())
        if value not in seen:
            count = self._count[place] = self._count.get(place, 0) + 1
            if count > _MOST_VALUES and count & (count - 1):
                return self._last[place]
            seen.add(value)
        self._last[place] = value
        return value


def sizes_of(call: ExampleCall) -> tuple[int, ...] | None:
    """Lengths of the dims of a call's tensors, and how many positions each has; ``None`` with a cache, which grows."""
    sizes: list[int] = []

    def note(value: Any) -> bool:
        if isinstance(value, Tensor):
            sizes.extend(value.shape)
            sizes.append(value.shape[:2].numel())
            return True
        if isinstance(value, Mapping):
            return all(map(note, value.values()))
        if isinstance(value, list | tuple):
            return all(map(note, value))
        return opened(value) is None

    return tuple(sizes) if note(tuple(call)) else None


class Sizes:
    """The sizes of calls that are known to run the same code: their extremes, and how they divide."""

    def __init__(self) -> None:
        self._least: tuple[int, ...] = ()
        self._most: tuple[int, ...] = ()
        self._powers: set[tuple[int, int]] = set()

    def have(self, sizes: tuple[int, ...]) -> bool:
        """Whether each size lies between ones that are known, and divides by powers of two as one of them does."""
        return (
            len(sizes) == len(self._least)
            and all(map(int.__le__, self._least, sizes))
            and all(map(int.__le__, sizes, self._most))
            and self._powers.issuperset(_powers(sizes))
        )

    def add(self, sizes: tuple[int, ...]) -> None:
        """Know these, too."""
        is_first = len(sizes) != len(self._least)
        self._least = sizes if is_first else tuple(map(min, self._least, sizes))
        self._most = sizes if is_first else tuple(map(max, self._most, sizes))
        self._powers.update(_powers(sizes))


def _powers(sizes: tuple[int, ...]) -> list[tuple[int, int]]:
    return [(at, min(size & -size, _POWER)) for at, size in enumerate(sizes)]


def with_rows(call: ExampleCall) -> ExampleCall:
    """A call with a single row as one with two of it: a dim of size 1 could be any dim, or none."""
    sizes = {leaf.shape[0] for leaf in tensors_in(tuple(call)) if leaf.ndim}
    if sizes != {1}:
        return call
    args, kwargs = map_tensors(lambda leaf: torch.cat([leaf, leaf]) if leaf.ndim else leaf, tuple(call))
    return ExampleCall(args, kwargs)


def described(call: ExampleCall, training: bool) -> str:
    """A call in words."""
    said = [_said(value) for value in call.args] + [f"{name}={_said(value)}" for name, value in call.kwargs.items()]
    return f"({', '.join(said)}), in {'training' if training else 'evaluation'} mode"


def _said(value: Any) -> str:
    if isinstance(value, Tensor):
        return f"{str(value.dtype).removeprefix('torch.')}{list(value.shape)}"
    return repr(value) if value is None or isinstance(value, bool | int | float | str) else type(value).__name__
