from __future__ import annotations

import math
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_autotp.layouts.blocks import blocks_of
from lightning_autotp.layouts.dims import FIXED, Axis, Concat, Cut, Dim, Product, UnknownSize
from lightning_autotp.layouts.ownership import Ownership, merge_runs
from lightning_autotp.layouts.types import Invariant, Replicate, Shard, local_shape

RANKS = st.integers(1, 4)


@st.composite
def ownerships(draw: st.DrawFn, ranks: int | None = None) -> Ownership:
    """Any map: every index has one or more owners."""
    ranks, size = ranks or draw(RANKS), draw(st.integers(1, 9))
    owners = [draw(st.sets(st.integers(0, ranks - 1), min_size=1)) for _ in range(size)]
    held = [[(i, i + 1) for i in range(size) if rank in owners[i]] for rank in range(ranks)]
    return Ownership(size, tuple(merge_runs(runs) for runs in held))


@given(st.integers(0, 40), RANKS)
def test_shared_evenly_in_order(units: int, ranks: int) -> None:
    sharded = Ownership.even(units, ranks)
    sizes = [sharded.local_size(rank) for rank in range(ranks)]
    assert [index for rank in range(ranks) for index in sharded.indices(rank)] == list(range(units))
    assert max(sizes) - min(sizes) <= 1
    assert sizes == sorted(sizes, reverse=True)


@given(ownerships())
def test_owners_are_the_map(owned: Ownership) -> None:
    found = {i: ranks for start, stop, ranks in owned.owners for i in range(start, stop)}
    wanted = {i: tuple(r for r in range(owned.ranks) if i in owned.indices(r)) for i in range(owned.size)}
    assert found == wanted
    assert owned.is_shared == any(len(ranks) > 1 for ranks in wanted.values())
    assert owned.is_whole == all(len(ranks) == owned.ranks for ranks in wanted.values())


@given(ownerships())
@settings(max_examples=50)
def test_boxes_and_blocks_cover_the_local_tensor(owned: Ownership) -> None:
    layout = Shard(((1, owned),))
    shape = (2, owned.size)
    for rank in range(owned.ranks):
        pairs = [
            (here, there)
            for local, whole, _ in blocks_of(shape, layout, rank, owned.ranks)
            for here, there in zip(range(*local[1]), range(*whole[1]), strict=True)
        ]
        assert [there for _, there in sorted(pairs)] == owned.indices(rank)
        assert local_shape(shape, layout, rank) == (2, owned.local_size(rank))
        at = owned.indices(rank)
        owners = {i: ranks for start, stop, ranks in owned.owners for i in range(start, stop)}
        blocks = {
            here: (there, ranks)
            for local, whole, ranks in blocks_of(shape, layout, rank, owned.ranks)
            for here, there in zip(range(*local[1]), range(*whole[1]), strict=True)
        }
        assert blocks == {position: (index, owners[index]) for position, index in enumerate(at)}


@given(st.lists(ownerships(ranks=3), min_size=2, max_size=2), st.integers(1, 3))
@settings(max_examples=50)
def test_several_dims_are_cut_at_once(maps: list[Ownership], length: int) -> None:
    """Against numpy: a local tensor is the whole one at its indices, block by block, and each block has its owners."""
    layout = Shard(((0, maps[0]), (2, maps[1])))
    shape = (maps[0].size, length, maps[1].size)
    whole = np.arange(math.prod(shape)).reshape(shape)
    locals_ = [whole[np.ix_(maps[0].indices(r), range(length), maps[1].indices(r))] for r in range(3)]
    for rank, local in enumerate(locals_):
        assert local.shape == local_shape(shape, layout, rank)
        filled = np.full(local.shape, -1)
        for here, there, _ in blocks_of(shape, layout, rank, 3):
            filled[tuple(slice(*run) for run in here)] = whole[tuple(slice(*run) for run in there)]
        assert np.array_equal(filled, local)
        seen = np.zeros(local.shape, dtype=int)
        for here, there, owners in blocks_of(shape, layout, rank, 3):
            block = tuple(slice(*run) for run in here)
            assert np.array_equal(local[block], whole[tuple(slice(*run) for run in there)])
            seen[block] += 1
            for element in local[block].flatten():
                assert owners == tuple(other for other in range(3) if element in locals_[other])
        assert (seen == 1).all()


@given(st.lists(st.tuples(st.integers(0, 12), st.integers(0, 12))))
def test_merged_runs_hold_the_same_indices(runs: list[tuple[int, int]]) -> None:
    merged = merge_runs(runs)
    assert {i for run in merged for i in range(*run)} == {i for run in runs for i in range(*run)}
    assert all(start < stop for start, stop in merged)
    assert all(one[1] < other[0] for one, other in pairwise(merged))


def test_what_is_not_sharded_is_whole() -> None:
    assert local_shape((3, 2), Replicate(), 0) == (3, 2)
    assert blocks_of((3, 2), Invariant(), 1, 2) == ((((0, 3), (0, 2)), ((0, 3), (0, 2)), (0, 1)),)


def test_every_index_needs_an_owner() -> None:
    with pytest.raises(ValueError, match="every index needs an owner"):
        Ownership(4, (((0, 1),), ((2, 4),)))
    with pytest.raises(ValueError, match="every index needs an owner"):
        Ownership(4, (((0, 3),), ((2, 5),)))
    with pytest.raises(ValueError, match="ascending order, at least one"):
        Shard(())


TOKENS = FIXED - 1


@given(st.integers(1, 7), st.integers(0, 6), st.integers(0, 6), st.integers(1, 3), st.booleans())
def test_a_cut_by_axis_tells_the_map_at_any_length(
    units: int, before: int, planned: int, ranks: int, shared: bool
) -> None:
    """Heads of every token, two numbers each, after some fixed elements: for more or fewer tokens than planned."""
    heads = Ownership.even(units, ranks).held
    if shared:  # everybody has the first unit
        heads = tuple(merge_runs([(0, 1), *runs]) for runs in heads)

    def dim(tokens: int) -> Dim:
        return Concat((Axis(FIXED, before), Product((Axis(TOKENS, tokens), Axis(0, units), Axis(FIXED, 2)))))

    def wanted(tokens: int) -> Ownership:
        """Element by element, without any arithmetic of runs."""
        held = []
        for runs in heads:
            own = [head for start, stop in runs for head in range(start, stop)]
            places = [
                before + (token * units + head) * 2 + half for token in range(tokens) for head in own for half in (0, 1)
            ]
            held.append(merge_runs([(0, before), *((place, place + 1) for place in places)]))
        return Ownership(before + tokens * units * 2, tuple(held))

    cut = Cut(dim(planned), tuple((runs,) for runs in heads))
    assert cut.ownership() == wanted(planned)
    for now in range(6):
        sizes = [wanted(now).local_size(rank) for rank in range(ranks)]
        assert cut.of_size(wanted(now).size) == wanted(now) == cut.of_local_sizes(sizes)
        for rank in range(ranks):
            if cut.is_told_by_one:
                assert cut.of_local_size(rank, sizes[rank]) == wanted(now)
    assert cut.is_told_by_one == all(heads)
    with pytest.raises(UnknownSize, match=r"planned"):
        cut.of_size(before + 2 * units + 1)


@given(st.integers(0, 40), st.integers(1, 4))
def test_a_sharded_axis_of_tokens_is_even_at_any_length(now: int, ranks: int) -> None:
    cut = Cut(
        Product((Axis(0, 12), Axis(FIXED, 3))),
        tuple((runs,) for runs in Ownership.even(12, ranks).held),
        frozenset([0]),
    )
    wanted = [3 * Ownership.even(now, ranks).local_size(rank) for rank in range(ranks)]
    found = cut.of_size(3 * now)
    assert [found.local_size(rank) for rank in range(ranks)] == wanted
    assert cut.of_local_sizes(wanted) == found
    with pytest.raises(UnknownSize, match="one rank"):
        cut.of_local_size(0, wanted[0])


def test_two_sizes_that_a_batch_gives_cannot_be_told_apart() -> None:
    dim = Product((Axis(TOKENS, 3), Axis(0, 2), Axis(TOKENS - 1, 5)))
    cut = Cut(dim, (((0, 1),),) * 2)
    assert not cut.is_told_by_one
    with pytest.raises(UnknownSize, match="2 of its axes"):
        cut.of_size(60)
