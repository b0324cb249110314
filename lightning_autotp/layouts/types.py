"""How a tensor lies over the ranks of a tensor-parallel group. Plain data: no torch, no process group.

The types are the field's own (JAX's, and Meta's ``spmd_types``); a type fixes its gradient's type:

===============  ==============================================  =====================================
type             forward                                         its gradient
===============  ==============================================  =====================================
``Invariant``    same on every rank, same work                   Invariant (each rank has all of it)
``Replicate``    same on every rank, used differently            Partial (the ranks' gradients add up)
``Shard``        each rank holds its part                        Shard, the same one
``Partial``      the ranks' values add up to the tensor          Replicate
===============  ==============================================  =====================================

A shard is an **ownership map**: for every index of a dim, the rank or ranks that hold it. Sections of a fused
projection, units that may not be cut, uneven shares and units that several ranks share are all such maps. An element
that several ranks hold behaves like ``Replicate`` among them: their gradients for it add up.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import ClassVar

from lightning_autotp.layouts.dims import Cut
from lightning_autotp.layouts.ownership import Ownership


@dataclass(frozen=True)
class Invariant:
    """Same on every rank, same work; every rank computes the whole gradient."""

    letter: ClassVar[str] = "I"

    def __str__(self) -> str:
        return self.letter


@dataclass(frozen=True)
class Replicate:
    """Same on every rank, used differently; the ranks' gradients add up to the gradient."""

    letter: ClassVar[str] = "R"

    def __str__(self) -> str:
        return self.letter


@dataclass(frozen=True)
class Partial:
    """The ranks' values add up to the tensor (a pending sum)."""

    letter: ClassVar[str] = "P"

    def __str__(self) -> str:
        return self.letter


@dataclass(frozen=True)
class Shard:
    """Each rank holds a box of the tensor: per sharded dim, the indices an ownership map gives it.

    Attributes:
        dims: ``(dim, ownership)`` for every dim that not all ranks hold whole, ascending by dim.
        cuts: the same said by axis, one for each of these dims, where it is known: then the maps for other lengths of
            the dims follow. Layouts with the same maps are equal whatever they were cut along.
    """

    letter: ClassVar[str] = "S"
    dims: tuple[tuple[int, Ownership], ...]
    cuts: tuple[Cut, ...] = field(default=(), compare=False, repr=False)

    def __post_init__(self) -> None:
        if not self.dims or list(self.dims) != sorted(self.dims, key=lambda item: item[0]):
            raise ValueError("a Shard names its dims in ascending order, at least one")

    @classmethod
    def of(cls, cuts: Mapping[int, Cut]) -> Shard:
        """The layout of a tensor some of whose dims are cut so."""
        ordered = sorted(cuts.items())
        return cls(tuple((dim, cut.ownership()) for dim, cut in ordered), tuple(cut for _, cut in ordered))

    @property
    def grows(self) -> bool:
        """Whether what is sharded are rows or tokens, of which each batch has another number."""
        return any(cut.grows for cut in self.cuts)

    def ownership(self, dim: int) -> Ownership | None:
        """The map of ``dim``, or ``None`` where every rank holds it whole."""
        return dict(self.dims).get(dim)

    def __str__(self) -> str:
        return "S(" + ", ".join(f"{dim}: {ownership}" for dim, ownership in self.dims) + ")"


Layout = Invariant | Replicate | Partial | Shard


def local_shape(shape: Sequence[int], layout: Layout, rank: int) -> tuple[int, ...]:
    """Shape of ``rank``'s local tensor."""
    sizes = list(shape)
    if isinstance(layout, Shard):
        for dim, ownership in layout.dims:
            sizes[dim] = ownership.local_size(rank)
    return tuple(sizes)
