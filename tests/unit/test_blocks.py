"""Blocks of tensors, against what numpy's and torch's own indexing gives."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lightning_autotp.layouts.blocks import (
    Block,
    Box,
    blocks_of,
    chunk,
    common,
    elements_of,
    in_units,
    index,
    owned_by,
    shape_of,
    start_of,
    tile,
    whole_box,
    within,
)
from lightning_autotp.layouts.ownership import Ownership
from lightning_autotp.layouts.types import Shard

SHAPES = st.lists(st.integers(0, 6), min_size=1, max_size=3).map(tuple)


def numbered(shape: Sequence[int]) -> np.ndarray:
    """A tensor whose elements all differ."""
    return np.arange(np.prod(shape, dtype=int)).reshape(shape)


def draw_box(data: st.DataObject, outer: Box) -> Box:
    """Any box in another one, which may be empty."""
    runs = (sorted(data.draw(st.tuples(*[st.integers(start, stop)] * 2))) for start, stop in outer)
    return tuple((start, stop) for start, stop in runs)


def draw_block(data: st.DataObject, shape: tuple[int, ...]) -> tuple[Block, np.ndarray, np.ndarray]:
    """A block, the original tensor, and a local one that has the block somewhere, among other elements (``-1``)."""
    original, whole = draw_box(data, whole_box(shape)), numbered(shape)
    around = [data.draw(st.tuples(st.integers(0, 2), st.integers(0, 2))) for _ in shape]
    sizes = shape_of(original)
    local = tuple((before, before + size) for (before, _), size in zip(around, sizes, strict=True))
    part = np.pad(whole[index(original)], around, constant_values=-1)
    return Block(local, original, (0,)), whole, part


@given(SHAPES, st.data())
def test_a_box_is_an_index(shape: tuple[int, ...], data: st.DataObject) -> None:
    whole = numbered(shape)
    box = draw_box(data, whole_box(shape))
    cut = whole[index(box)]
    assert (shape_of(box), elements_of(box)) == (cut.shape, cut.size)
    assert np.array_equal(whole[index(whole_box(shape))], whole)
    if cut.size:
        assert whole[start_of(box)] == cut.flatten()[0]


@given(SHAPES, st.data())
def test_what_two_boxes_share(shape: tuple[int, ...], data: st.DataObject) -> None:
    whole = numbered(shape)
    one, other = (draw_box(data, whole_box(shape)) for _ in range(2))
    wanted = np.intersect1d(whole[index(one)], whole[index(other)])
    shared = common(one, other)
    assert (shared is None) == (wanted.size == 0)
    if shared is not None:
        assert np.array_equal(whole[index(shared)].flatten(), wanted)
        for outer in (one, other):
            assert np.array_equal(whole[index(outer)][index(within(shared, outer))], whole[index(shared)])


@given(SHAPES, st.data())
def test_a_box_of_the_original_is_placed_in_the_local_tensor(shape: tuple[int, ...], data: st.DataObject) -> None:
    block, whole, part = draw_block(data, shape)
    assert np.array_equal(part[index(block.local)], whole[index(block.original)])
    box = draw_box(data, block.original)
    assert np.array_equal(part[index(block.place(box))], whole[index(box)])


@given(SHAPES, st.data())
def test_a_block_of_a_cut_tensor(shape: tuple[int, ...], data: st.DataObject) -> None:
    block, whole, part = draw_block(data, shape)
    dim = data.draw(st.integers(0, len(shape) - 1))
    (run,) = draw_box(data, ((0, part.shape[dim]),))
    kept_part = part.take(range(*run), axis=dim)
    cut = block.cut(dim, run)
    if cut is None:
        assert not set(range(*run)) & set(range(*block.local[dim]))
    else:
        assert np.array_equal(kept_part[index(cut.local)], whole[index(cut.original)])
        assert (kept_part >= 0).sum() == cut.elements
        assert cut.ranks == block.ranks


@given(st.integers(0, 40), st.integers(1, 9))
def test_chunks_are_those_of_torch(size: int, ranks: int) -> None:
    """``torch.chunk`` leaves out the empty ones, of ranks for which there are no rows."""
    rows = torch.arange(size)
    found = [rows[slice(*chunk(size, ranks, rank))] for rank in range(ranks)]
    given = [*torch.chunk(rows, ranks), *[rows[:0]] * ranks][:ranks]
    for one, other in zip(found, given, strict=True):
        assert torch.equal(one, other)


@given(st.integers(1, 4), st.integers(1, 5), st.data())
def test_units_of_a_dim(blocks: int, per: int, data: st.DataObject) -> None:
    """Between two units: a matrix, and one that has one number for each unit, repeated, have the same box."""
    scales = numbered((3, blocks))
    matrix = scales.repeat(per, axis=1)
    small = draw_box(data, whole_box(scales.shape))
    box = (small[0], (small[1][0] * per, small[1][1] * per))
    assert in_units(box, 1, per) == in_units(box, 1, matrix.shape[1], blocks) == small
    assert np.array_equal(matrix[index(box)], scales[index(small)].repeat(per, axis=1))


@given(SHAPES, st.data())
def test_boxes_tile_a_tensor_that_have_each_element_once(shape: tuple[int, ...], data: st.DataObject) -> None:
    boxes = [whole_box(shape)]
    for _ in range(data.draw(st.integers(0, 4))):  # cut one of them in two
        box = boxes.pop(data.draw(st.integers(0, len(boxes) - 1)))
        dim = data.draw(st.integers(0, len(shape) - 1))
        at = data.draw(st.integers(*box[dim]))
        boxes += [(*box[:dim], run, *box[dim + 1 :]) for run in ((box[dim][0], at), (at, box[dim][1]))]
    assert tile(boxes, shape)
    change = data.draw(st.sampled_from(["none", "left out", "twice", "moved"]))
    place = data.draw(st.integers(0, len(boxes) - 1))
    if change == "left out":
        del boxes[place]
    elif change == "twice":
        boxes.append(boxes[place])
    elif change == "moved":  # as many elements as before, so that some are there twice if others are left out
        sizes = shape_of(boxes[place])
        starts = [data.draw(st.integers(0, size - length)) for size, length in zip(shape, sizes, strict=True)]
        boxes[place] = tuple((start, start + length) for start, length in zip(starts, sizes, strict=True))
    times = np.zeros(shape, dtype=int)
    for box in boxes:
        times[index(box)] += 1
    assert tile(boxes, shape) == bool((times == 1).all())


@pytest.mark.parametrize("box", [((0, 4),), ((-1, 1), (0, 2)), ((0, 2), (1, 3))], ids=["dims", "before", "after"])
def test_a_box_outside_tiles_nothing(box: Box) -> None:
    assert elements_of(box) == 4
    assert not tile([box], (2, 2))


@given(st.data())
def test_every_element_has_one_owner(data: st.DataObject) -> None:
    """Also where ranks share rows, and FSDP2 has cut every rank's part again."""
    owners = data.draw(st.lists(st.sets(st.integers(0, 2), min_size=1), min_size=1, max_size=8))
    held = [tuple((i, i + 1) for i, ranks in enumerate(owners) if rank in ranks) for rank in range(3)]
    layout = data.draw(st.sampled_from([None, Shard(((0, Ownership(len(owners), tuple(held))),))]))
    shape, copies = (len(owners), 2), data.draw(st.integers(1, 3))
    times = np.zeros(shape, dtype=int)
    for rank in range(3):
        blocks = blocks_of(shape, layout, rank, 3)
        part = max((block.local[0][1] for block in blocks), default=0)
        for copy in range(copies):
            rows = chunk(part, copies, copy)
            for block in owned_by(filter(None, (block.cut(0, rows) for block in blocks)), rank):
                assert rank == min(block.ranks)
                times[index(block.original)] += 1
    assert (times == 1).all()
