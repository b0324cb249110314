"""Whole tensors at home: each is put together from the ranks' parts on one rank, and dealt out from there again.

Many tensors travel in one all-to-all, each to its own home, so that every rank has some to work on at the same time.
An element that several ranks hold is sent by one of them, by the home itself if it is one of them, and comes back to
all of them.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_autotp.layouts.ownership import Run
from lightning_autotp.layouts.types import Layout, Shard, owned_boxes
from lightning_autotp.parameters.local_blocks import index
from lightning_autotp.ranks.group import TPGroup

Box = tuple[Run, ...]


class Piece(NamedTuple):
    """A block of a whole tensor on one rank.

    Attributes:
        local: where it lies in the rank's tensor.
        whole: where it lies in the whole one.
        ranks: which ranks have it, ascending.
    """

    local: Box
    whole: Box
    ranks: tuple[int, ...]

    @property
    def elements(self) -> int:
        """How many elements it has."""
        return math.prod(stop - start for start, stop in self.whole)

    def sender(self, home: int) -> int:
        """The rank that sends it to the home; the home itself if it has it."""
        return home if home in self.ranks else self.ranks[0]


@dataclass(frozen=True)
class Spread:
    """How a whole tensor lies over the ranks of a group.

    Attributes:
        shape: the whole shape.
        pieces: those of every rank.
    """

    shape: tuple[int, ...]
    pieces: tuple[tuple[Piece, ...], ...]

    @classmethod
    def everywhere(cls, shape: tuple[int, ...], ranks: int) -> Spread:
        """Every rank has all of it."""
        whole = tuple((0, size) for size in shape)
        return cls(shape, ((Piece(whole, whole, tuple(range(ranks))),),) * ranks)

    @classmethod
    def of_layout(cls, shape: tuple[int, ...], layout: Layout | None, ranks: int) -> Spread:
        """As a layout says; ``None`` for what every rank has whole."""
        if not isinstance(layout, Shard):
            return cls.everywhere(shape, ranks)
        pieces = [[Piece(*box) for box in owned_boxes(shape, layout, rank)] for rank in range(ranks)]
        return cls(shape, tuple(map(tuple, pieces)))

    @classmethod
    def of_rows(cls, shape: tuple[int, ...], ranks: int) -> Spread:
        """Cut in dim 0 as FSDP2 does: into chunks of one size, of which the last ones may be smaller or empty."""
        chunk = -(-shape[0] // ranks)
        rest = tuple((0, size) for size in shape[1:])
        pieces = []
        for rank in range(ranks):
            start, stop = min(rank * chunk, shape[0]), min((rank + 1) * chunk, shape[0])
            pieces.append((Piece(((0, stop - start), *rest), ((start, stop), *rest), (rank,)),))
        return cls(shape, tuple(pieces))

    @property
    def elements(self) -> int:
        """How many elements the whole has."""
        return math.prod(self.shape)

    def outgoing(self, rank: int, home: int) -> Iterator[Piece]:
        """What ``rank`` sends to the home, or copies there if it is the home itself."""
        return (piece for piece in self.pieces[rank] if piece.elements and piece.sender(home) == rank)

    def held(self, rank: int) -> Iterator[Piece]:
        """All that ``rank`` has."""
        return (piece for piece in self.pieces[rank] if piece.elements)


class Traveller(NamedTuple):
    """One tensor on its way.

    Attributes:
        home: the rank of the group where it is whole.
        spread: how it lies over the ranks.
        part: this rank's part, to be sent or to be filled.
        whole: the whole tensor at home; elsewhere, and before it is there, ``None``.
    """

    home: int
    spread: Spread
    part: Tensor
    whole: Tensor | None = None


def balanced(costs: Sequence[int], loads: list[int]) -> list[int]:
    """A home for each of some things: the dearest first, each where the load is least. Adds to ``loads``, in place."""
    homes = [0] * len(costs)
    for number in sorted(range(len(costs)), key=lambda number: -costs[number]):
        homes[number] = loads.index(min(loads))
        loads[homes[number]] += costs[number]
    return homes


def to_homes(travellers: Sequence[Traveller], group: TPGroup) -> list[Tensor | None]:
    """Put whole tensors together, each on its home. Collective over ``group``.

    Args:
        travellers: the same ones in the same order on every rank.
        group: the ranks that have parts.

    Returns:
        For each of them the whole tensor at its home, ``None`` elsewhere.
    """
    if not travellers:
        return []
    device = travellers[0].part.device
    outgoing: list[list[Tensor]] = [[] for _ in range(group.size)]
    expected = [0] * group.size
    for home, spread, part, _ in travellers:
        if home != group.rank:
            outgoing[home] += [part[index(piece.local)] for piece in spread.outgoing(group.rank, home)]
        else:
            for rank in set(range(group.size)) - {home}:
                expected[rank] += _size(spread.outgoing(rank, home)) * part.element_size()
    incoming = _exchange(outgoing, expected, group, device)
    wholes: list[Tensor | None] = []
    for home, spread, part, _ in travellers:
        if home != group.rank:
            wholes.append(None)
            continue
        whole = part.new_empty(spread.shape)
        for rank in range(group.size):
            for piece in spread.outgoing(rank, home):
                target = whole[index(piece.whole)]
                target.copy_(part[index(piece.local)] if rank == home else incoming[rank].take(target))
        wholes.append(whole)
    return wholes


def from_homes(travellers: Sequence[Traveller], group: TPGroup) -> None:
    """Deal whole tensors out: every rank's part is filled. Collective over ``group``.

    Args:
        travellers: as for :func:`to_homes`, with the whole tensors at home.
        group: the ranks that have parts.
    """
    if not travellers:
        return
    device = travellers[0].part.device
    outgoing: list[list[Tensor]] = [[] for _ in range(group.size)]
    expected = [0] * group.size
    for home, spread, part, whole in travellers:
        if home != group.rank:
            expected[home] += _size(spread.held(group.rank)) * part.element_size()
            continue
        assert whole is not None
        for rank in set(range(group.size)) - {home}:
            outgoing[rank] += [whole[index(piece.whole)] for piece in spread.held(rank)]
    incoming = _exchange(outgoing, expected, group, device)
    for home, spread, part, whole in travellers:
        for piece in spread.held(group.rank):
            target = part[index(piece.local)]
            target.copy_(incoming[home].take(target) if whole is None else whole[index(piece.whole)])


def _size(pieces: Iterator[Piece]) -> int:
    return sum(piece.elements for piece in pieces)


class _Bytes:
    """What came from one rank, read from its beginning to its end."""

    def __init__(self, content: Tensor) -> None:
        self._content, self._read = content, 0

    def take(self, like: Tensor) -> Tensor:
        """The next elements, as many and of such a kind as ``like`` has."""
        begin, self._read = self._read, self._read + like.numel() * like.element_size()
        # A copy: a view of another dtype must begin at a multiple of its size.
        return self._content[begin : self._read].clone().view(like.dtype).view(like.shape)


def _exchange(outgoing: list[list[Tensor]], expected: list[int], group: TPGroup, device: torch.device) -> list[_Bytes]:
    """Send tensors to each rank, as bytes; what came from each. Collective."""
    if group.size == 1:
        return [_Bytes(torch.empty(0, dtype=torch.uint8, device=device))]
    sent = [[x.contiguous().view(-1).view(torch.uint8) for x in tensors] for tensors in outgoing]
    sizes = [sum(map(len, tensors)) for tensors in sent]
    flat = [x for tensors in sent for x in tensors]
    buffer = torch.cat(flat) if flat else torch.empty(0, dtype=torch.uint8, device=device)
    received = buffer.new_empty(sum(expected))
    dist.all_to_all_single(received, buffer, expected, sizes, group=group.process_group)
    return list(map(_Bytes, received.split(expected)))
