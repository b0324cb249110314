"""Blocks of a tensor: where a part lies in a rank's tensor and in the original one, cut and put into one another.

A box is a half-open range for each dim. Loading, checkpoints, gradients, quantized scales and whole matrices all move
boxes between a rank's tensor and the original one; what FSDP2 has cut again over the data axis is a box as well.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import NamedTuple

from lightning_autotp.layouts.ownership import Run
from lightning_autotp.layouts.types import Layout, Shard, owned_boxes

Box = tuple[Run, ...]
"""Per dim, a half-open range."""


class Block(NamedTuple):
    """One contiguous block of a tensor that a rank has.

    Attributes:
        local: where it lies in the rank's tensor.
        original: where it lies in the original one.
        ranks: the ranks that have it, ascending.
    """

    local: Box
    original: Box
    ranks: tuple[int, ...]

    @property
    def owner(self) -> int:
        """The rank that counts the block where every element is to count once, and that sends it where one is to."""
        return self.ranks[0]

    @property
    def elements(self) -> int:
        """How many elements it has."""
        return elements(self.original)


def blocks_of(shape: Sequence[int], layout: Layout | None, rank: int, ranks: int) -> tuple[Block, ...]:
    """The blocks of a tensor that a rank has.

    Args:
        shape: the original shape.
        layout: how it lies over the ranks; ``None`` for what every rank has whole.
        rank: the rank.
        ranks: how many there are.
    """
    if isinstance(layout, Shard):
        return tuple(Block(*owned) for owned in owned_boxes(shape, layout, rank))
    return (Block(all_of(shape), all_of(shape), tuple(range(ranks))),)


def rows_of(block: Block, run: Run) -> Block | None:
    """What of a block is in some rows of the rank's tensor, which are a tensor of their own; ``None`` if nothing is."""
    box = common(block.local, (run, *block.local[1:]))
    if box is None:
        return None
    (start, stop), origin = box[0], run[0]
    local = ((start - origin, stop - origin), *block.local[1:])
    return Block(local, moved(box, block.local, block.original), block.ranks)


def chunk(size: int, ranks: int, rank: int) -> Run:
    """A rank's rows of a tensor that FSDP2 has cut: chunks of one size; the last ones may be smaller, or empty."""
    length = -(-size // ranks)
    return min(rank * length, size), min((rank + 1) * length, size)


def all_of(shape: Sequence[int]) -> Box:
    """The box of a whole tensor."""
    return tuple((0, size) for size in shape)


def elements(box: Box) -> int:
    """How many elements a box has."""
    return prod(stop - start for start, stop in box)


def common(one: Box, other: Box) -> Box | None:
    """What two boxes share, ``None`` if they share nothing."""
    shared = tuple((max(a[0], b[0]), min(a[1], b[1])) for a, b in zip(one, other, strict=True))
    return shared if all(start < stop for start, stop in shared) else None


def within(box: Box, outer: Box) -> Box:
    """A box as seen from the beginning of one around it."""
    return moved(box, outer, tuple((0, stop - start) for start, stop in outer))


def moved(box: Box, here: Box, there: Box) -> Box:
    """A box in ``here`` as it lies in another tensor, where all of ``here`` is ``there``."""
    return tuple(
        (start - origin + at, stop - origin + at)
        for (start, stop), (origin, _), (at, _) in zip(box, here, there, strict=True)
    )


def index(box: Box) -> tuple[slice, ...]:
    """A box as an index expression."""
    return tuple(slice(start, stop) for start, stop in box)


def tile(boxes: Sequence[Box], shape: tuple[int, ...]) -> bool:
    """Whether boxes have every element of a shape once."""
    solid = [box for box in boxes if all(start < stop for start, stop in box)]
    if any(
        len(box) != len(shape) or any(start < 0 or stop > size for (start, stop), size in zip(box, shape, strict=True))
        for box in solid
    ):
        return False
    if sum(elements(box) for box in solid) != prod(shape):
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
