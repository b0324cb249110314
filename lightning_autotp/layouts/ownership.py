"""Ownership maps: for every index of a dim, the rank or ranks that hold it. Plain data, no torch."""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from itertools import pairwise

Run = tuple[int, int]


"""Half-open range of indices ``(start, stop)``."""


def owner_of(ranks: Sequence[int]) -> int:
    """Of the ranks that hold an element, ascending, its owner: where each element counts once, its copy does."""
    return ranks[0]


def merge_runs(runs: Iterable[Run]) -> tuple[Run, ...]:
    """Sort runs, drop empty ones and join those that touch."""
    merged: list[Run] = []
    for start, stop in sorted(runs):
        if start >= stop:
            continue
        if merged and start <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(stop, merged[-1][1]))
        else:
            merged.append((start, stop))
    return tuple(merged)


@dataclass(frozen=True)
class Ownership:
    """Which indices of one dim each rank holds.

    A rank's local tensor has the indices it holds in ascending order.

    Attributes:
        size: the dim's length in the whole tensor.
        held: for every rank, the runs of indices it holds (ascending, disjoint).
        local_sizes: for every rank, the length of the dim in its local tensor.
        is_even: whether the ranks hold equally long runs, one each, in order of rank: then the ranks' tensors one after
            the other are the whole dim.
    """

    size: int
    held: tuple[tuple[Run, ...], ...]
    local_sizes: tuple[int, ...] = field(init=False, compare=False, repr=False)
    is_even: bool = field(init=False, compare=False, repr=False)

    def __post_init__(self) -> None:
        sizes = tuple(sum(stop - start for start, stop in runs) for runs in self.held)
        each = self.size // len(self.held) if self.held else 0
        is_even = self.held == tuple(((rank * each, (rank + 1) * each),) for rank in range(len(self.held)))
        object.__setattr__(self, "local_sizes", sizes)
        object.__setattr__(self, "is_even", is_even and each * len(self.held) == self.size)
        covered = merge_runs(run for runs in self.held for run in runs)
        if covered != (((0, self.size),) if self.size else ()):
            raise ValueError(
                f"ownership map covers {covered} of a dim of length {self.size}: every index needs an owner"
            )

    @classmethod
    def whole(cls, size: int, ranks: int) -> Ownership:
        """Every rank holds every index."""
        return cls(size, (merge_runs([(0, size)]),) * ranks)

    @classmethod
    def even(cls, units: int, ranks: int, together: int = 1) -> Ownership:
        """Units sharded in order, as evenly as they go: 3 units on 2 ranks are 2 and 1.

        Args:
            units: how many.
            ranks: among so many.
            together: how many stay together, where there are enough of such groups.
        """
        return _even(units, ranks, together)

    @property
    def ranks(self) -> int:
        """Number of ranks."""
        return len(self.held)

    def local_size(self, rank: int) -> int:
        """Length of the dim in ``rank``'s local tensor."""
        return self.local_sizes[rank]

    def indices(self, rank: int) -> list[int]:
        """The global indices of ``rank``'s local tensor, in its order."""
        return [index for start, stop in self.held[rank] for index in range(start, stop)]

    @cached_property
    def digest(self) -> str:
        """A short name of the map: equal maps have equal ones, in every process."""
        return f"{zlib.crc32(repr((self.size, self.held)).encode()):08x}"

    @cached_property
    def owners(self) -> tuple[tuple[int, int, tuple[int, ...]], ...]:
        """The map itself: ``(start, stop, ranks that hold these indices)``, ascending, without gaps."""
        events = sorted(
            (bound, kind, rank)
            for rank, runs in enumerate(self.held)
            for run in runs
            for bound, kind in ((run[0], True), (run[1], False))
        )
        rows: list[tuple[int, int, tuple[int, ...]]] = []
        here: set[int] = set()
        start = 0
        for bound, begins, rank in events:
            if bound > start:
                ranks = tuple(sorted(here))
                if rows and rows[-1][2] == ranks:
                    rows[-1] = (rows[-1][0], bound, ranks)
                else:
                    rows.append((start, bound, ranks))
                start = bound
            if begins:
                here.add(rank)
            else:
                here.discard(rank)
        return tuple(rows)

    @property
    def is_whole(self) -> bool:
        """Whether every rank holds everything."""
        return all(size == self.size for size in self.local_sizes)

    @property
    def is_shared(self) -> bool:
        """Whether some index has more than one owner."""
        return sum(self.local_sizes) > self.size

    @property
    def in_common(self) -> int:
        """How many indices every rank holds."""
        return sum(stop - start for start, stop, ranks in self.owners if len(ranks) == self.ranks)

    @property
    def notes(self) -> list[str]:
        """What is special about it, in words; nothing about an even cut in one piece."""
        notes, sizes = list[str](), self.local_sizes
        if (sections := max(len(runs) for runs in self.held)) > 1:
            notes.append(f"{sections} sections")
        if self.is_shared:
            notes.append("shared")
        if len(set(sizes)) > 1:
            notes.append(f"uneven {list(sizes)}")
        if self.size >= _LARGE and any(size % 8 for size in sizes[:-1]):
            notes.append("not at multiples of 8")
        if self.in_common:
            notes.append(f"{self.in_common} of {self.size} on every rank")
        return notes

    def __str__(self) -> str:
        sizes = list(self.local_sizes)
        return f"{self.size} -> {sizes[0] if len(set(sizes)) == 1 else sizes}"


@lru_cache(maxsize=1024)
def _even(units: int, ranks: int, together: int) -> Ownership:
    """:meth:`Ownership.even`, once for all layers."""
    groups = -(-units // together)
    if groups < ranks:
        groups, together = units, 1
    bounds = [rank * (groups // ranks) + min(rank, groups % ranks) for rank in range(ranks + 1)]
    ends = [min(bound * together, units) for bound in bounds]
    return Ownership(units, tuple(merge_runs([run]) for run in pairwise(ends)))


@lru_cache(maxsize=1024)
def alignment(units: int, ranks: int) -> int:
    """How many units stay together where they do not divide, so that products of a GPU like the parts.

    64 elements, else 8, which are 16 bytes of bfloat16, where no rank has 1 % more than its share; else 1.
    (Megatron-LM pads a vocabulary for the same reason.)
    """
    if units % ranks == 0:
        return 1
    return next((size for size in _ALIGNMENTS if -(-units // (size * ranks)) * size * ranks <= units * _LARGEST), 1)


_LARGE = 1024
"""Elements of a dim from which on it counts where a product's matrix is cut."""
_ALIGNMENTS = (64, 8)
_LARGEST = 1.01
"""The largest part, as a multiple of what each rank has if all have the same."""
