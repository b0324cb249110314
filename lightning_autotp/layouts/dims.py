"""Dims as axes, products of axes and concatenations of them, and how the ranks shard an axis. Plain data.

:mod:`~lightning_autotp.operators.axes` finds out what the dims of a model are made of.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

from lightning_autotp.layouts.ownership import Ownership, Run, alignment, merge_runs


@dataclass(frozen=True)
class Axis:
    """An indivisible index, until an operator divides it.

    Attributes:
        id: its number in :class:`Axes`.
        size: number of units.
    """

    id: int
    size: int


@dataclass(frozen=True)
class Product:
    """Row-major product of factors, outermost first; the empty product has size 1."""

    factors: tuple[Dim, ...]

    @property
    def size(self) -> int:
        """Length of the dim."""
        return math.prod([factor.size for factor in self.factors])  # a list: Dynamo cannot trace it of a generator


@dataclass(frozen=True)
class Concat:
    """Sections one after another."""

    sections: tuple[Dim, ...]

    @property
    def size(self) -> int:
        """Length of the dim."""
        return sum(section.size for section in self.sections)


Dim = Axis | Product | Concat


ONE = Product(())


def product(factors: Sequence[Dim]) -> Dim:
    """The product in normal form: flat, without factors of size 1, and a concatenation outermost where one leads."""
    flat: list[Dim] = []
    for factor in factors:
        if factor.size != 1:
            flat.extend(factor.factors if isinstance(factor, Product) else (factor,))
    if len(flat) == 1:
        return flat[0]
    if flat and isinstance(flat[0], Concat):
        return concat([product([section, *flat[1:]]) for section in flat[0].sections])
    return Product(tuple(flat))


def concat(sections: Sequence[Dim]) -> Dim:
    """The concatenation in normal form: flat, without empty sections."""
    flat: list[Dim] = []
    for section in sections:
        if section.size:
            flat.extend(section.sections if isinstance(section, Concat) else (section,))
    return flat[0] if len(flat) == 1 else Concat(tuple(flat))


def leaves(dim: Dim) -> list[Axis]:
    """The axes a (resolved) dim is made of, repetitions included."""
    if isinstance(dim, Axis):
        return [dim]
    return [axis for part in (dim.factors if isinstance(dim, Product) else dim.sections) for axis in leaves(part)]


def touches(dims: Iterable[Dim], axes: Collection[int]) -> bool:
    """Whether one of some (resolved) dims has one of these axes."""
    for dim in dims:
        if isinstance(dim, Axis):
            if dim.id in axes:
                return True
        elif touches(dim.factors if isinstance(dim, Product) else dim.sections, axes):
            return True
    return False


def spelled(dim: Dim) -> str:
    """What a (resolved) dim is made of: ``"3 x 16"``, ``"[8 | 8]"``."""
    if isinstance(dim, Axis):
        return str(dim.size)
    if isinstance(dim, Product):
        return " x ".join(map(spelled, dim.factors)) or "1"
    return f"[{' | '.join(map(spelled, dim.sections))}]"


def shardable(dims: Sequence[Dim], axes: frozenset[int]) -> bool:
    """Whether cutting ``axes`` cuts a tensor of these dims into boxes: each axis in one dim, once in a product."""
    held = [{leaf.id for leaf in leaves(dim)} & axes for dim in dims]
    return sum(map(len, held)) == len(set().union(*held)) and not any(_repeats(dim, axes) for dim in dims)


def _repeats(dim: Dim, axes: frozenset[int]) -> bool:
    """Whether a product in a (resolved) dim has one of these axes twice."""
    if isinstance(dim, Axis):
        return False
    parts = dim.factors if isinstance(dim, Product) else dim.sections
    if any(_repeats(part, axes) for part in parts):
        return True
    if isinstance(dim, Concat):
        return False
    seen = [axis for part in parts for axis in {leaf.id for leaf in leaves(part)} & axes]
    return len(seen) != len(set(seen))


def depth(dim: Dim, axes: frozenset[int]) -> int:
    """How many of these axes are factors of one product in a (resolved) dim."""
    if isinstance(dim, Axis):
        return int(dim.id in axes)
    if isinstance(dim, Product):
        return sum(depth(factor, axes) for factor in dim.factors)
    return max(depth(section, axes) for section in dim.sections)


def held_runs(dim: Dim, held: Mapping[int, Sequence[Run]]) -> tuple[Run, ...]:
    """The indices of a (resolved) dim that a rank holds, given what it holds of some axes (all of any other)."""
    if isinstance(dim, Axis):
        return merge_runs(held.get(dim.id, ((0, dim.size),)))
    if isinstance(dim, Concat):
        runs, offset = [], 0
        for section in dim.sections:
            runs += [(offset + start, offset + stop) for start, stop in held_runs(section, held)]
            offset += section.size
        return merge_runs(runs)
    runs = [(0, 1)]
    for factor in dim.factors:
        inner = held_runs(factor, held)
        if inner == ((0, factor.size),):
            runs = [(start * factor.size, stop * factor.size) for start, stop in runs]
        else:
            runs = [
                (index * factor.size + start, index * factor.size + stop)
                for outer in runs
                for index in range(*outer)
                for start, stop in inner
            ]
    return merge_runs(runs)


def ownership(dim: Dim, held: Sequence[Mapping[int, Sequence[Run]]]) -> Ownership:
    """The ownership map of a (resolved) dim, given what each rank holds of the sharded axes."""
    return Ownership(dim.size, tuple(held_runs(dim, rank) for rank in held))


@lru_cache(maxsize=4096)
def numbered_ownership(dim: Dim, held: tuple[tuple[tuple[Run, ...], ...], ...]) -> Ownership:
    """The same for a dim whose sharded axes are numbered from 0: the dims of repeated layers are equal then."""
    return ownership(dim, [dict(enumerate(runs)) for runs in held])


class UnknownSize(ValueError):
    """The length of a dim does not tell how it is cut."""


@dataclass(frozen=True)
class Cut:
    """How a dim is cut, said by axis: an ownership map follows for whatever length a batch gives the dim.

    Attributes:
        dim: the dim, made of axes: those with a number from 0 on are sharded; the others every rank has whole.
            Among these, :data:`FIXED` is the number of all whose size the model says, and those with lower numbers
            have the size that a batch gives them: its rows, its tokens.
        held: for every rank, the runs that it has of each sharded axis, in the order of their numbers.
        grows: the numbers of sharded axes whose size a batch gives; they are sharded evenly, in order.
        axes: the numbers of the sharded axes in the model's graph.
    """

    dim: Dim
    held: tuple[tuple[tuple[Run, ...], ...], ...]
    grows: frozenset[int] = frozenset()
    axes: tuple[int, ...] = ()

    @property
    def ranks(self) -> int:
        """Number of ranks."""
        return len(self.held)

    def ownership(self) -> Ownership:
        """The map, at the length that the dim had in the trace."""
        return numbered_ownership(self.dim, self.held)

    def is_like(self, other: Cut) -> bool:
        """Whether it is the same cut, perhaps of a batch of another size."""
        return self._pattern() == other._pattern()

    def _pattern(self) -> tuple[object, ...]:
        """The cut without what a batch decides."""
        held = tuple(tuple(runs for number, runs in enumerate(rank) if number not in self.grows) for rank in self.held)
        return self._lasting(self.dim), held, self.grows

    def _lasting(self, dim: Dim) -> object:
        """What a dim is made of without factors whose sizes a batch gives."""
        if isinstance(dim, Axis):
            return dim.id if dim.id in self.grows else dim
        if isinstance(dim, Concat):
            return tuple(map(self._lasting, dim.sections))
        factors = (factor for factor in dim.factors if any(axis.id >= FIXED for axis in leaves(factor)))
        return [self._lasting(factor) for factor in factors]

    def of_size(self, size: int) -> Ownership:
        """The map where the whole dim is so long.

        Raises:
            UnknownSize: if the length does not tell it.
        """
        return self.of_units(self.units_of(size))

    def units_of(self, size: int) -> int:
        """How many units the axis has whose size the batch gives, where the whole dim is so long.

        Raises:
            UnknownSize: if the length does not tell it.
        """
        return self._solve(size, lambda units: _resized(self.dim, self._variable(), units).size)

    def of_units(self, units: int) -> Ownership:
        """The map where the axis whose size the batch gives has so many units."""
        return _grown(self, units)

    @property
    def grown_axis(self) -> int | None:
        """The number in the model's graph of the axis that is sharded and whose size the batch gives."""
        return next((self.axes[number] for number in self.grows), None)

    def of_local_size(self, rank: int, size: int) -> Ownership:
        """The map where ``rank``'s part of the dim is so long.

        Raises:
            UnknownSize: if the length does not tell it.
        """
        if not self.is_told_by_one:
            raise UnknownSize("one rank's length does not tell how much the others have")
        return _grown(self, self._solve(size, lambda units: _grown(self, units).local_size(rank)))

    def of_local_sizes(self, sizes: Sequence[int]) -> Ownership:
        """The map where the ranks' parts of the dim are so long.

        Raises:
            UnknownSize: if the lengths do not tell it.
        """
        if self.grows:  # sharded, each unit to one rank: the lengths add up
            return self.of_size(sum(sizes))
        rank = max(range(self.ranks), key=self._step)
        return _grown(self, self._solve(sizes[rank], lambda units: _grown(self, units).local_size(rank)))

    def sharded_anew(self, units: Mapping[int, int]) -> Cut:
        """The cut where the model has other numbers of units of some axes, which are sharded as in a new plan.

        Args:
            units: how many, by the axes' numbers in the model's graph; an axis that has as many stays as it is.
        """
        dim, held = self.dim, [list(runs) for runs in self.held]
        there = {axis.id: axis for axis in leaves(dim)}
        for number, axis in enumerate(self.axes):
            before = there.get(number)
            if before is None or (now := units.get(axis, before.size)) == before.size:
                continue
            dim = _resized(dim, before, now)
            for runs, even in zip(held, Ownership.even(now, self.ranks, alignment(now, self.ranks)).held, strict=True):
                runs[number] = even
        return replace(self, dim=dim, held=tuple(map(tuple, held)))

    @property
    def is_told_by_one(self) -> bool:
        """Whether every rank can tell the map from the length of its own part.

        Not where the tokens themselves are sharded, nor where a rank has nothing of every token, nor where a batch
        gives several sizes.
        """
        if not self._variables():
            return True
        return self.is_told_by_all and not self.grows and all(self._step(rank) for rank in range(self.ranks))

    def _step(self, rank: int) -> int:
        """How much a rank's part grows with every unit of the axis whose size a batch gives."""
        return _grown(self, 1).local_size(rank) - _grown(self, 0).local_size(rank)

    @property
    def is_told_by_all(self) -> bool:
        """Whether the lengths of all ranks' parts tell the map: a batch gives the size of one axis at most."""
        return len(self._variables()) <= 1

    @property
    def is_fixed(self) -> bool:
        """Whether the dim is as long in every batch."""
        return not self._variables()

    def _variable(self) -> Axis | None:
        """The one axis whose size a batch gives."""
        found = self._variables()
        if len(found) > 1:
            raise UnknownSize(f"the batch gives the sizes of {len(found)} of its axes")
        return found[0] if found else None

    def _variables(self) -> list[Axis]:
        """The axes whose sizes a batch gives."""
        return list({axis.id: axis for axis in leaves(self.dim) if axis.id < FIXED or axis.id in self.grows}.values())

    def _solve(self, size: int, length: Callable[[int], int]) -> int:
        """How many units the batch gives that axis, so that the length is ``size``: it is linear in them."""
        axis = self._variable()
        least, step = length(0), length(1) - length(0)
        if step == 0 and size == least:
            return axis.size if axis is not None else 0
        if step == 0 or (size - least) % step or size < least:
            several = f"{least} and a multiple of {step}" if step else str(least)
            raise UnknownSize(f"a length of {size} where {several} was planned")
        return (size - least) // step


@lru_cache(maxsize=1024)
def _grown(cut: Cut, units: int) -> Ownership:
    """The map where the batch gives so many units to the axis whose size it gives."""
    axis = cut._variable()
    held = [dict(enumerate(runs)) for runs in cut.held]
    if axis is not None and axis.id in cut.grows:
        even = Ownership.even(units, cut.ranks).held
        held = [{**runs, axis.id: even[rank]} for rank, runs in enumerate(held)]
    return ownership(_resized(cut.dim, axis, units), held)


FIXED = -1
"""The number, in a cut, of an axis that every rank has whole and whose size the model says."""


def _resized(dim: Dim, axis: Axis | None, units: int) -> Dim:
    """The dim with another size of one axis."""
    if isinstance(dim, Axis):
        return Axis(dim.id, units) if axis is not None and dim.id == axis.id else dim
    if isinstance(dim, Product):
        return Product(tuple(_resized(factor, axis, units) for factor in dim.factors))
    return Concat(tuple(_resized(section, axis, units) for section in dim.sections))
