"""Dims as axes, products of axes and concatenations of them. Plain data: :mod:`operators.axes` finds them out."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from lightning_autotp.layouts.ownership import Ownership, Run, merge_runs


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
        return math.prod(factor.size for factor in self.factors)


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


def leaves(dim: Dim) -> Iterator[Axis]:
    """The axes a (resolved) dim is made of, repetitions included."""
    if isinstance(dim, Axis):
        yield dim
    else:
        for part in dim.factors if isinstance(dim, Product) else dim.sections:
            yield from leaves(part)


def shardable(dims: Sequence[Dim], axes: frozenset[int]) -> bool:
    """Whether cutting ``axes`` cuts a tensor of these dims into boxes: each axis in one dim, once in a product."""

    def repeats(dim: Dim) -> bool:
        if isinstance(dim, Axis):
            return False
        parts = dim.factors if isinstance(dim, Product) else dim.sections
        if any(repeats(part) for part in parts):
            return True
        if isinstance(dim, Concat):
            return False
        seen = [axis for part in parts for axis in {leaf.id for leaf in leaves(part)} & axes]
        return len(seen) != len(set(seen))

    held = [{leaf.id for leaf in leaves(dim)} & axes for dim in dims]
    return not any(repeats(dim) for dim in dims) and sum(map(len, held)) == len(set().union(*held))


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
