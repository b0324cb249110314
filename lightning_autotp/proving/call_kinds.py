"""What tells calls of a model apart before they run: what they are given, and under which settings.

Values of tensors do not count, and of sizes only whether they are 1: other sizes may lead code another way, too, so
:class:`Sizes` says when they are to be looked at.
"""

from __future__ import annotations

import re
from collections.abc import Hashable, Iterable, Mapping
from dataclasses import fields, is_dataclass
from typing import Any

import torch
from torch import Tensor

from lightning_autotp.capture.capture import ExampleCall
from lightning_autotp.capture.nested import leaves_of, map_tensors, opened, steps_of, tensors_in
from lightning_autotp.operators.questions import Question
from lightning_autotp.private.torch_private import has_values

_MOST_VALUES = 16
"""So many values of one number are looked at, each when it comes; then the 32nd, the 64th and so on. Sizes likewise."""
_MOST_QUESTIONS = 32
"""So many comparisons of one number, or of the numbers of one list, tell calls apart."""
_SHORT = 4
"""Of a list of no more integers than these it counts which of them are 0 or 1."""
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
        if len(value) > _SHORT and all(type(item) is int for item in value):  # lengths, say: too many to tell them so
            return kind.__name__, "int", len(value)
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


def integers_of(call: ExampleCall) -> list[tuple[str, tuple[int, ...]]]:
    """The integers among a call's arguments, with where they are; those in a list, at whatever depth, are one value.

    Without gradients not those in other structures than mappings, lists and tuples: a cache counts there.
    """
    found: dict[str, list[int]] = {}
    takes_structures = torch.is_grad_enabled()

    def note(place: str, value: Any, is_in_list: bool = False) -> None:
        items: Iterable[tuple[str, Any]] = ()
        if type(value) is int:
            found.setdefault(place, []).append(value)
        elif isinstance(value, Mapping):
            items = [(f"[{key!r}]", item) for key, item in value.items()]
        elif isinstance(value, list | tuple):
            is_in_list, items = True, [("", item) for item in value]
        elif takes_structures and (level := opened(value)) is not None:
            items = zip(level.steps, level.children, strict=True)
        for step, item in items:
            note(place if is_in_list else place + step, item, is_in_list)

    for step, value in (*((f"[{at}]", value) for at, value in enumerate(call.args)), *call.kwargs.items()):
        note(step, value)
    return [(place, tuple(numbers)) for place, numbers in found.items()]


def floats_of(call: ExampleCall, places: set[str]) -> list[tuple[str, tuple[float, ...]]]:
    """The floats of a call at these places; those in a list are one value."""
    found: dict[str, list[float]] = {}
    for place, leaf in leaves_of(tuple(call)) if places else ():
        if place in places and type(leaf) is float:
            found.setdefault(_number_or_list(place), []).append(leaf)
    return [(place, tuple(numbers)) for place, numbers in found.items()]


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
        self.are_many = False
        """Whether there are so many values at some place that not all are looked at."""

    def told(self, place: Hashable, value: Any) -> Any:
        """The value, or the one at this place that was looked at last, if this one is not to be."""
        seen = self._seen.setdefault(place, set())
        if value not in seen:
            count = self._count[place] = self._count.get(place, 0) + 1
            self.are_many |= count > _MOST_VALUES
            if count > _MOST_VALUES and count & (count - 1):
                return self._last[place]
            seen.add(value)
        self._last[place] = value
        return value


class Asked:
    """The comparisons that code was seen to make of a call's numbers: those with the same answers lead it the same way.

    Attributes:
        untold: where floats are of which code makes too many comparisons.
    """

    def __init__(self) -> None:
        self.untold: set[str] = set()
        self._groups: dict[tuple[str, ...], list[Question]] = {}
        self.few = FewValues()

    def heed(self, questions: Iterable[Question]) -> None:
        """Tell calls apart by these, too."""
        for question in questions:
            places = set(question.places())
            group = self._groups.setdefault(tuple(sorted(set(map(_number_or_list, places)))), [])
            if question not in group and len(group) < _MOST_QUESTIONS:
                group.append(question)
            elif question not in group:
                self.untold |= places

    def answers(self, call: ExampleCall) -> Hashable:
        """What follows from them of a call: exactly for a single number, and few answers for lists, whose are many."""
        if not self._groups:
            return ()
        numbers = {place: leaf for place, leaf in leaves_of(tuple(call)) if type(leaf) is int or type(leaf) is float}
        answers = {
            places: tuple([question.answer(numbers) for question in questions])
            for places, questions in self._groups.items()
        }
        return tuple(
            [
                found if len(places) == 1 and places[0] in numbers else self.few.told(places, found)
                for places, found in answers.items()
            ]
        )


def _number_or_list(place: str) -> str:
    """Of a number in a list, at whatever depth, where the list is."""
    argument, name, *inside = steps_of(place)
    until = next((at for at, step in enumerate(inside) if re.fullmatch(r"\[\d+\]", step)), len(inside))
    return "".join((argument, name, *inside[:until]))


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
        self._added: set[tuple[int, ...]] = set()

    def have(self, sizes: tuple[int, ...], are_few: bool) -> bool:
        """Whether each size lies between ones that are known, and divides by powers of two as one of them does.

        Args:
            sizes: those of a call.
            are_few: whether these have to be known just so.
        """
        return sizes in self._added or (
            not are_few
            and len(sizes) == len(self._least)
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
        self._added.add(sizes)


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
