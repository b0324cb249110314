"""Whole tensors on the ranks that they are assigned to: gathered from the ranks' shards, and scattered again.

Many tensors go in one all-to-all, each to the rank that it is assigned to, so that every rank has some to work on at
the same time. An element that several ranks hold is sent by one of them, by the assigned rank itself if it is one of
them, and comes back to all of them.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_autotp.layouts.blocks import Block, blocks_of, chunk, index, whole_box
from lightning_autotp.layouts.types import Layout
from lightning_autotp.ranks.group import TPGroup


@dataclass(frozen=True)
class Sharding:
    """How a whole tensor lies over the ranks of a group.

    Attributes:
        shape: the whole shape.
        blocks: those of every rank.
    """

    shape: tuple[int, ...]
    blocks: tuple[tuple[Block, ...], ...]

    @classmethod
    def of_layout(cls, shape: tuple[int, ...], layout: Layout | None, ranks: int) -> Sharding:
        """As a layout says; ``None`` for what every rank has whole."""
        return cls(shape, tuple(blocks_of(shape, layout, rank, ranks) for rank in range(ranks)))

    @classmethod
    def of_rows(cls, shape: tuple[int, ...], ranks: int) -> Sharding:
        """Cut in dim 0 as FSDP2 does."""
        box = whole_box(shape)
        parts = [Block(box, box, (rank,)).cut(0, chunk(shape[0], ranks, rank)) for rank in range(ranks)]
        return cls(shape, tuple(() if part is None else (part,) for part in parts))

    @property
    def elements(self) -> int:
        """How many elements the whole has."""
        return math.prod(self.shape)

    def outgoing(self, rank: int, assigned: int) -> Iterator[Block]:
        """What ``rank`` sends to the assigned rank, or copies if it is that one itself."""
        return (block for block in self.held(rank) if rank == (assigned if assigned in block.ranks else block.owner))

    def held(self, rank: int) -> Iterator[Block]:
        """All that ``rank`` has."""
        return (block for block in self.blocks[rank] if block.elements)


class Transfer(NamedTuple):
    """One tensor that is gathered or scattered.

    Attributes:
        assigned: the rank of the group where it is whole.
        sharding: how it lies over the ranks.
        part: this rank's part, to be sent or to be filled.
        whole: the whole tensor on the assigned rank; elsewhere, and before it is gathered, ``None``.
    """

    assigned: int
    sharding: Sharding
    part: Tensor
    whole: Tensor | None = None


def balanced(costs: Sequence[int], loads: list[int]) -> list[int]:
    """A rank for each of some things: the dearest first, each where the load is least. Adds to ``loads``, in place."""
    assigned = [0] * len(costs)
    for number in sorted(range(len(costs)), key=lambda number: -costs[number]):
        assigned[number] = loads.index(min(loads))
        loads[assigned[number]] += costs[number]
    return assigned


def gather(transfers: Sequence[Transfer], group: TPGroup) -> list[Tensor | None]:
    """Put whole tensors together, each on its assigned rank. Collective over ``group``.

    Args:
        transfers: the same ones in the same order on every rank.
        group: the ranks that have parts.

    Returns:
        For each of them the whole tensor on its assigned rank, ``None`` elsewhere.
    """
    if not transfers:
        return []
    device = transfers[0].part.device
    outgoing: list[list[Tensor]] = [[] for _ in range(group.size)]
    expected = [0] * group.size
    for assigned, sharding, part, _ in transfers:
        if assigned != group.rank:
            outgoing[assigned] += [part[index(block.local)] for block in sharding.outgoing(group.rank, assigned)]
        else:
            for rank in set(range(group.size)) - {assigned}:
                expected[rank] += _size(sharding.outgoing(rank, assigned)) * part.element_size()
    incoming = _exchange(outgoing, expected, group, device)
    wholes: list[Tensor | None] = []
    for assigned, sharding, part, _ in transfers:
        if assigned != group.rank:
            wholes.append(None)
            continue
        whole = part.new_empty(sharding.shape)
        for rank in range(group.size):
            for block in sharding.outgoing(rank, assigned):
                target = whole[index(block.original)]
                target.copy_(part[index(block.local)] if rank == assigned else incoming[rank].take(target))
        wholes.append(whole)
    return wholes


def scatter(transfers: Sequence[Transfer], group: TPGroup) -> None:
    """Send whole tensors back: every rank's part is filled. Collective over ``group``.

    Args:
        transfers: as for :func:`gather`, with the whole tensors on their assigned ranks.
        group: the ranks that have parts.
    """
    if not transfers:
        return
    device = transfers[0].part.device
    outgoing: list[list[Tensor]] = [[] for _ in range(group.size)]
    expected = [0] * group.size
    for assigned, sharding, part, whole in transfers:
        if assigned != group.rank:
            expected[assigned] += _size(sharding.held(group.rank)) * part.element_size()
            continue
        assert whole is not None
        for rank in set(range(group.size)) - {assigned}:
            outgoing[rank] += [whole[index(block.original)] for block in sharding.held(rank)]
    incoming = _exchange(outgoing, expected, group, device)
    for assigned, sharding, part, whole in transfers:
        for block in sharding.held(group.rank):
            target = part[index(block.local)]
            target.copy_(incoming[assigned].take(target) if whole is None else whole[index(block.original)])


def _size(blocks: Iterator[Block]) -> int:
    return sum(block.elements for block in blocks)


class _Bytes:
    """What came from one rank, read from its beginning to its end."""

    def __init__(self, content: Tensor) -> None:
        self._content, self._read = content, 0

    def take(self, like: Tensor) -> Tensor:
        """The next elements, as many as ``like`` has, of its dtype."""
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
