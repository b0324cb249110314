"""Blocks of tensors: where a part of a tensor lies in the whole of it. Plain integers: no torch, no process group.

A **box** is one half-open range per dim. A **block** is a box of a rank's local tensor, the box of the original tensor
that it holds, and the ranks that hold the same. Loading, checkpoints, scales of quantized weights, norms, penalties and
optimizers of whole matrices all move elements by blocks, as index expressions of boxes: ``whole[index(block.original)]
= part[index(block.local)]``.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from math import prod
from typing import NamedTuple

from lightning_autotp.layouts.ownership import Ownership, Run, owner_of
from lightning_autotp.layouts.types import Layout, Shard

Box = tuple[Run, ...]
"""A half-open range for each dim."""


def whole_box(shape: Sequence[int]) -> Box:
    """All of a tensor."""
    return tuple((0, size) for size in shape)


def shape_of(box: Sequence[Run]) -> tuple[int, ...]:
    """The shape of what lies in a box."""
    return tuple(stop - start for start, stop in box)


def start_of(box: Box) -> tuple[int, ...]:
    """The index of a box's first element."""
    return tuple(start for start, _ in box)


def elements_of(box: Box) -> int:
    """How many elements lie in a box."""
    return prod(shape_of(box))


def index(box: Sequence[Run]) -> tuple[slice, ...]:
    """A box as an index expression."""
    return tuple(slice(start, stop) for start, stop in box)


def common(one: Box, other: Box) -> Box | None:
    """What two boxes share, ``None`` if they share nothing."""
    shared = tuple((max(a[0], b[0]), min(a[1], b[1])) for a, b in zip(one, other, strict=True))
    return shared if all(start < stop for start, stop in shared) else None


def within(box: Box, outer: Box) -> Box:
    """A box as seen from the beginning of one around it."""
    return tuple((start - origin, stop - origin) for (start, stop), (origin, _) in zip(box, outer, strict=True))


def in_units(box: Box, dim: int, per: int, units: int = 1) -> Box:
    """A box of a tensor as one of a smaller tensor that has ``units`` indices for each ``per`` indices of ``dim``."""
    start, stop = box[dim]
    return (*box[:dim], (start * units // per, stop * units // per), *box[dim + 1 :])


def tile(boxes: Iterable[Box], shape: tuple[int, ...]) -> bool:
    """Whether boxes have every element of a shape once."""
    solid = [box for box in boxes if all(start < stop for start, stop in box)]
    if any(
        len(box) != len(shape) or any(start < 0 or stop > size for (start, stop), size in zip(box, shape, strict=True))
        for box in solid
    ):
        return False
    if sum(map(elements_of, solid)) != prod(shape):
        return False
    if len(solid) < 2:
        return True
    # As many elements as there are: all are there unless two boxes share some. Only neighbours along the dim that is
    # cut most often need to be compared.
    dim = max(range(len(shape)), key=lambda dim: len({box[dim] for box in solid}))
    solid.sort(key=lambda box: box[dim])
    open_boxes: list[Box] = []
    for box in solid:
        open_boxes = [other for other in open_boxes if other[dim][1] > box[dim][0]]
        if any(common(box, other) is not None for other in open_boxes):
            return False
        open_boxes.append(box)
    return True


def chunk(size: int, ranks: int, rank: int) -> Run:
    """The rows of a rank where FSDP2 cuts dim 0: chunks of one size, of which the last ones may be smaller or empty."""
    length = -(-size // ranks)
    return min(rank * length, size), min((rank + 1) * length, size)


class Block(NamedTuple):
    """One contiguous block: where it lies in the local tensor and where in the original one.

    Attributes:
        local: the box of this rank's tensor.
        original: the box of the original tensor.
        ranks: the ranks that hold this block, ascending.
    """

    local: Box
    original: Box
    ranks: tuple[int, ...]

    @property
    def owner(self) -> int:
        """The rank that owns it: of those that hold it, the one whose copy counts."""
        return owner_of(self.ranks)

    @property
    def elements(self) -> int:
        """How many elements it has."""
        return elements_of(self.original)

    def place(self, box: Box) -> Box:
        """Where in the local tensor a box of the original one lies that is within the block."""
        moved = zip(within(box, self.original), self.local, strict=True)
        return tuple((origin + start, origin + stop) for (start, stop), (origin, _) in moved)

    def cut(self, dim: int, run: Run) -> Block | None:
        """What is left of it where only a range of a dim of the local tensor is kept; ``None`` if nothing is."""
        (start, stop), origin = self.local[dim], self.original[dim][0] - self.local[dim][0]
        low, high = max(start, run[0]), min(stop, run[1])
        if low >= high:
            return None
        return Block(
            (*self.local[:dim], (low - run[0], high - run[0]), *self.local[dim + 1 :]),
            (*self.original[:dim], (origin + low, origin + high), *self.original[dim + 1 :]),
            self.ranks,
        )


def blocks_of(shape: Sequence[int], layout: Layout | None, rank: int, ranks: int) -> tuple[Block, ...]:
    """``rank``'s local tensor cut wherever its owners change; one block of what every rank has whole.

    Every owner of a block has the same block, in the same order among those of its owners.

    Args:
        shape: the original shape.
        layout: how it lies over the ranks; ``None`` for what every rank has whole.
        rank: one of them.
        ranks: how many there are.
    """
    if not isinstance(layout, Shard):
        return (Block(whole_box(shape), whole_box(shape), tuple(range(ranks))),)
    blocks: list[tuple[Box, Box, frozenset[int]]] = [((), (), frozenset(range(layout.dims[0][1].ranks)))]
    for dim, size in enumerate(shape):
        ownership = layout.ownership(dim) or Ownership.whole(size, layout.dims[0][1].ranks)
        pieces: list[tuple[Run, Run, frozenset[int]]] = []
        offset = 0
        for start, stop, owners in ownership.owners:
            if rank in owners:
                pieces.append(((offset, offset + stop - start), (start, stop), frozenset(owners)))
                offset += stop - start
        blocks = [
            ((*here, local), (*there, run), owners & others)
            for here, there, owners in blocks
            for local, run, others in pieces
        ]
    return tuple(Block(here, there, tuple(sorted(owners))) for here, there, owners in blocks)


def owned_by(blocks: Iterable[Block], rank: int) -> tuple[Block, ...]:
    """Those of blocks that ``rank`` owns: every element of the original tensor has one owner."""
    return tuple(block for block in blocks if block.owner == rank)
