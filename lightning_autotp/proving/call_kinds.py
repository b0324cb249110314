"""What tells calls of a model apart before they run: what they are given, and under which settings.

Values of tensors do not count, and of sizes only whether they are 1, and those of which code asks what they are. What
it compares with them is asked once the kind is known. Other sizes may lead code another way without its asking (how
often a loop runs), so :class:`Sizes` says when they are to be looked at all the same.
"""

from __future__ import annotations

import re
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import fields, is_dataclass
from typing import Any

import torch
from torch import Tensor, nn

from lightning_autotp.capture.capture import ExampleCall
from lightning_autotp.capture.nested import is_unused, leaves_of, map_tensors, opened, steps_of, tensors_in
from lightning_autotp.operators.questions import DIM, SIZE, TOLD, Number, Question, dim_place
from lightning_autotp.parallel.logits import VocabParallelLogits
from lightning_autotp.private.torch_private import has_values

_MOST_VALUES = 16
"""So many values of one number are looked at, each when it comes; then the 32nd, the 64th and so on. Sizes likewise."""
_MOST_QUESTIONS = 32
"""So many comparisons of one number, or of the numbers of one list, tell calls apart."""
_SHORT = 4
"""Of a list of no more integers than these it counts which of them are 0 or 1."""
_POWER = 64
"""Up to this power of two it is looked at how often a size divides by two: code pads and cuts into blocks by that."""


class Arguments:
    """What one walk through the arguments of a call finds.

    Args:
        call: the positional arguments, and those by name.

    Attributes:
        kind: what may decide which code runs: not values of tensors, nor their sizes but 1. The number of rows, a
            tensor's first dim, may be 1 as well as any other: see :func:`with_rows`.
        tensors: those that are given.
        has_logits_in_parts: whether one of them is what another parallel model has returned in parts.
        integers: those that are given, by where they are; those in a list, at whatever depth, are one value. Without
            gradients not those in other structures than mappings, lists and tuples: a cache counts there.
        objects: those that are no structures of arguments, such as caches, and objects in them.
        unknown: the classes of those that hold more than settings and counts: what earlier calls have computed. Others
            are told apart like structures.
    """

    def __init__(self, call: ExampleCall) -> None:
        self.tensors: list[Tensor] = []
        self.has_logits_in_parts = False
        self.integers: dict[str, list[int]] = {}
        self.objects: list[Any] = []
        self.unknown: list[str] = []
        self._takes_structures = torch.is_grad_enabled()
        self._has_structures = False
        args, kwargs = call
        self.kind = (
            *[self._kind(value, f"[{at}]") for at, value in enumerate(args)],
            *[(name, self._kind(value, name)) for name, value in kwargs.items()],
        )

    @property
    def tokens(self) -> int:
        """How many tokens of each row are given, as far as second dims tell; a mask may have more, or heads there."""
        return min([tensor.shape[1] for tensor in self.tensors if tensor.ndim in (2, 3)], default=1)

    @property
    def sizes(self) -> tuple[int, ...] | None:
        """Lengths of the dims of the tensors, and how many positions each has; ``None`` with a cache that has grown."""
        if self._has_structures:
            return None
        return tuple([size for tensor in self.tensors for size in (*tensor.shape, tensor.shape[:2].numel())])

    def _kind(self, value: Any, place: str | None, is_in_list: bool = False) -> Hashable:
        """What may decide which code runs.

        Args:
            value: what is given.
            place: where it is, or the list that it is in; ``None`` where integers are not noted.
            is_in_list: whether it is in a list.
        """
        kind = type(value)
        if value is None or kind is bool or kind is str or isinstance(value, torch.dtype | torch.device | type):
            return value
        if isinstance(value, Tensor):
            self.tensors.append(value)
            self.has_logits_in_parts |= isinstance(value, VocabParallelLogits)
            return value.dtype, value.requires_grad, value.ndim, tuple([size == 1 for size in value.shape[1:]])
        if kind is int:
            if place is not None:
                self.integers.setdefault(place, []).append(value)
            return "int", min(max(value, -1), 2)
        if kind is float:
            return "float"
        items: Iterable[tuple[Hashable, str, Any]]
        if isinstance(value, Mapping):
            items = [(key, f"[{key!r}]", item) for key, item in value.items()]
        elif isinstance(value, list | tuple):
            if len(value) > _SHORT and all(type(item) is int for item in value):  # lengths, say: too many to tell so
                if place is not None:
                    self.integers.setdefault(place, []).extend(value)
                return kind.__name__, "int", len(value)
            return (kind.__name__, *[self._kind(item, place, True) for item in value])
        else:
            if is_dataclass(value) and not isinstance(value, type | nn.Module):
                self._has_structures = True
                items = [(field.name, f".{field.name}", getattr(value, field.name)) for field in fields(value)]
            elif (level := opened(value)) is not None:
                self._has_structures = True
                items = zip(level.steps, level.steps, level.children, strict=True)
            else:
                self.objects.append(value)
                if not is_unused(value):
                    self._has_structures = True
                    self.unknown.append(kind.__name__)
                    return kind.__name__
                items = [(name, f".{name}", item) for name, item in vars(value).items()]
            place = place if self._takes_structures else None
        keeps_place = is_in_list or place is None
        return (
            kind.__name__,
            *[
                (key, self._kind(item, place if keeps_place else f"{place}{step}", is_in_list))
                for key, step, item in items
            ],
        )


def is_looked_at(number: int) -> bool:
    """Whether a call of a kind is looked at, by its number: the 1st, 10th, 100th, 1,000th and every 1,000th."""
    return number in (1, 10, 100) or number % 1000 == 0


def surroundings(device: str) -> tuple[bool, torch.dtype | None]:
    """Whether gradients are recorded, and in which precision autocast computes on a device; ``None`` if it is off."""
    kind = device.partition(":")[0]
    dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else None
    return torch.is_grad_enabled(), dtype


def floats_of(call: ExampleCall, places: set[str]) -> dict[str, list[float]]:
    """The floats of a call at these places; those in a list are one value."""
    found: dict[str, list[float]] = {}
    for place, leaf in leaves_of(tuple(call)) if places else ():
        if place in places and type(leaf) is float:
            found.setdefault(_number_or_list(place), []).append(leaf)
    return found


def numbers_of(call: ExampleCall) -> dict[str, Number]:
    """The integers and floats of a call, and the sizes of its tensors, by their places."""
    found: dict[str, Number] = {}
    for place, leaf in leaves_of(tuple(call)):
        if isinstance(leaf, Tensor):
            found.update((dim_place(place, dim), size) for dim, size in enumerate(leaf.shape))
        elif type(leaf) is int or type(leaf) is float:
            found[place] = leaf
    return found


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
        of_sizes: those of what was heeded last that are about sizes, but for those of which the answers are few.
    """

    def __init__(self) -> None:
        self.untold: set[str] = set()
        self._groups: dict[tuple[str, ...], list[Question]] = {}
        self._growing: dict[tuple[Question, int, int], None] = {}
        self.of_sizes: dict[Question, None] = {}
        self._told: dict[Question, None] = {}
        self.few = FewValues()

    def heed(self, questions: Iterable[Question], tokens: Sequence[int]) -> None:
        """Tell calls apart by these, too.

        Args:
            questions: those of a trace.
            tokens: how many were in each of its calls.
        """
        for question in questions:
            places = set(question.places())
            if any(place.startswith(SIZE) for place in places):
                self._growing[question, sum(tokens), tokens[-1]] = None
                continue
            if question.function == TOLD:
                self._told[question] = None
                continue
            of = tuple(sorted({place if place.startswith(DIM) else _number_or_list(place) for place in places}))
            if places.issuperset(of) and any(place.startswith(DIM) for place in places):
                self.of_sizes[question] = None
                continue
            group = self._groups.setdefault(of, [])
            if question not in group and len(group) < _MOST_QUESTIONS:
                group.append(question)
            elif question not in group:
                self.untold |= places

    def answers_with(self, call: ExampleCall, tokens: int) -> Hashable:
        """What follows from those about sizes where calls go on until there were so many tokens.

        Which of these sizes grow with the tokens is not known: all of them do, or a single one. But none that is not
        larger than the tokens of the traced call alone.
        """
        numbers = numbers_of(call)
        found: list[Number | None] = []
        for question, before, last in self._growing:
            sizes = {place: int(place.removeprefix(SIZE)) for place in question.places() if place.startswith(SIZE)}
            grown = {place: size + tokens - before for place, size in sizes.items() if not 0 < size <= last}
            for one in (grown, *({place: size} for place, size in grown.items() if len(grown) > 1)):
                found.append(question.answer({**numbers, **sizes, **one}))
        return tuple(found)

    def answers(self, call: ExampleCall) -> Hashable:
        """What follows from them of a call: exactly for a single number, and few answers where there are many.

        Those are the answers about lists, and sizes of which code asks what they are.
        """
        if not self._groups and not self._told:
            return ()
        numbers = numbers_of(call)
        answers = {
            places: tuple([question.answer(numbers) for question in questions])
            for places, questions in self._groups.items()
        }
        return (
            *[
                found if len(places) == 1 and places[0] in numbers else self.few.told(places, found)
                for places, found in answers.items()
            ],
            *[self.few.told(question, question.answer(numbers)) for question in self._told],
        )


def _number_or_list(place: str) -> str:
    """Of a number in a list, at whatever depth, where the list is."""
    argument, name, *inside = steps_of(place)
    until = next((at for at, step in enumerate(inside) if re.fullmatch(r"\[\d+\]", step)), len(inside))
    return "".join((argument, name, *inside[:until]))


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
