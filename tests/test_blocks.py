"""Boxes of tensors, cut and put into one another, as numpy's indexing does it."""

from __future__ import annotations

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st

from lightning_autotp.layouts.blocks import (
    Block,
    Box,
    all_of,
    blocks_of,
    chunk,
    common,
    elements,
    index,
    moved,
    rows_of,
    tile,
    within,
)
from lightning_autotp.layouts.ownership import Ownership
from lightning_autotp.layouts.types import Shard

SHAPE = (7, 5)


def runs(size: int) -> st.SearchStrategy[tuple[int, int]]:
    return st.tuples(st.integers(0, size), st.integers(0, size)).map(lambda ends: (min(ends), max(ends)))


def boxes() -> st.SearchStrategy[Box]:
    return st.tuples(*map(runs, SHAPE))


def marked(box: Box) -> np.ndarray:
    found = np.zeros(SHAPE, dtype=int)
    found[index(box)] = 1
    return found


@given(boxes(), boxes())
def test_what_two_boxes_share(one: Box, other: Box) -> None:
    shared, both = common(one, other), marked(one) * marked(other)
    assert (shared is None) == (not both.any())
    if shared is not None:
        assert (marked(shared) == both).all()
        assert elements(shared) == both.sum()
        values = np.arange(35).reshape(SHAPE)
        assert (values[index(one)][index(within(shared, one))] == values[index(shared)]).all()


@given(boxes(), boxes(), st.tuples(st.integers(0, 3), st.integers(0, 3)))
def test_a_box_moves_with_what_is_around_it(outer: Box, inner: Box, origin: tuple[int, int]) -> None:
    if (inside := common(outer, inner)) is None:
        return
    there = tuple((at, at + stop - start) for at, (start, stop) in zip(origin, outer, strict=True))
    values, target = np.arange(35).reshape(SHAPE), np.full((10, 8), -1)
    target[index(there)] = values[index(outer)]
    assert (target[index(moved(inside, outer, there))] == values[index(inside)]).all()


@given(st.integers(0, 9), st.integers(1, 5))
def test_chunks_are_those_of_torch(size: int, ranks: int) -> None:
    parts = [part.tolist() for part in torch.arange(size).chunk(ranks)]
    parts += [[]] * (ranks - len(parts))
    assert [list(range(*chunk(size, ranks, rank))) for rank in range(ranks)] == [*parts[:ranks]] if size else True
    assert sum(stop - start for start, stop in (chunk(size, ranks, rank) for rank in range(ranks))) == size


@given(st.integers(1, 4))
def test_rows_of_a_ranks_part_are_rows_of_the_whole(ranks: int) -> None:
    layout = Shard(((0, Ownership.even(7, 2)),))
    values = np.arange(35).reshape(SHAPE)
    for tensor_rank in range(2):
        blocks = blocks_of(SHAPE, layout, tensor_rank, 2)
        part = np.concatenate([values[index(block.original)] for block in blocks])
        seen = np.zeros(part.shape, dtype=int)
        for rank in range(ranks):
            run = chunk(len(part), ranks, rank)
            own = part[slice(*run)]
            for block in filter(None, (rows_of(block, run) for block in blocks)):
                assert (own[index(block.local)] == values[index(block.original)]).all()
                assert block.ranks == (tensor_rank,)
                assert block.owner == tensor_rank
                seen[slice(*run)][index(block.local)] += 1
        assert (seen == 1).all()


def test_what_every_rank_has() -> None:
    assert blocks_of(SHAPE, None, 1, 3) == (Block(all_of(SHAPE), all_of(SHAPE), (0, 1, 2)),)


@given(st.lists(boxes(), max_size=4))
def test_boxes_tile_a_shape(found: list[Box]) -> None:
    total = sum((marked(box) for box in found), np.zeros(SHAPE, dtype=int))
    assert tile(found, SHAPE) == bool((total == 1).all())


@given(st.integers(0, 7), st.integers(0, 5), st.booleans())
def test_quarters_tile_a_shape(row: int, column: int, is_whole: bool) -> None:
    halves = [((0, row), (row, 7)), ((0, column), (column, 5))]
    quarters = [(one, other) for one in halves[0] for other in halves[1]]
    solid = [box for box in quarters if elements(box)]
    assert tile(solid if is_whole else solid[1:], SHAPE) == is_whole
