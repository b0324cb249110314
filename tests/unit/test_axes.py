from __future__ import annotations

import math

from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_autotp.layouts.dims import (
    Axis,
    Concat,
    Dim,
    Product,
    concat,
    held_runs,
    leaves,
    ownership,
    product,
    shardable,
)
from lightning_autotp.operators.axes import Axes
from lightning_autotp.solving.candidates import candidates


def labels(dim: Dim, axis: int) -> list[int | None]:
    """For every index of a dim: the index of the axis there, or ``None`` where the dim does not have it."""
    if isinstance(dim, Axis):
        return list(range(dim.size)) if dim.id == axis else [None] * dim.size
    if isinstance(dim, Concat):
        return [label for section in dim.sections for label in labels(section, axis)]
    result: list[int | None] = [None]
    for factor in dim.factors:
        inner = labels(factor, axis)
        result = [own if own is not None else outer for outer in result for own in inner]
    return result


def structure(draw: st.DrawFn, axes: Axes, depth: int = 2) -> Dim:
    kind = draw(st.sampled_from(["axis", "product", "concat"] if depth else ["axis"]))
    if kind == "axis":
        return axes.new(draw(st.integers(2, 4)))
    parts = [structure(draw, axes, depth - 1) for _ in range(draw(st.integers(2, 3)))]
    return product(parts) if kind == "product" else concat(parts)


@given(st.data())
def test_held_runs_are_the_indices(data: st.DataObject) -> None:
    dim = data.draw(st.composite(lambda draw: structure(draw, Axes()))())
    axis = data.draw(st.sampled_from(list(leaves(dim))))
    held = data.draw(st.sets(st.integers(0, axis.size - 1), min_size=1))
    runs = held_runs(dim, {axis.id: [(index, index + 1) for index in sorted(held)]})
    found = [index for start, stop in runs for index in range(start, stop)]
    assert found == [i for i, label in enumerate(labels(dim, axis.id)) if label is None or label in held]


@given(st.lists(st.sampled_from([1, 2, 3, 4, 6]), min_size=1, max_size=4), st.data())
@settings(max_examples=60)
def test_regroup_keeps_every_element_in_place(sizes: list[int], data: st.DataObject) -> None:
    axes = Axes()
    dims = [axes.new(size) for size in sizes]
    total, shape = math.prod(sizes), []
    while total > 1:
        shape.append(data.draw(st.sampled_from([d for d in range(2, total + 1) if total % d == 0])))
        total //= shape[-1]
    result = axes.regroup(dims, shape)
    if result is None:
        return
    assert [dim.size for dim in result] == shape
    before, after = product([axes.resolve(dim) for dim in dims]), product([axes.resolve(dim) for dim in result])
    for axis in leaves(before):
        assert labels(before, axis.id) == labels(after, axis.id)


def points(dim: Dim) -> list[tuple[tuple[int, int], ...]]:
    """What every index of a dim is: its position along each axis that it runs through, outermost first."""
    if isinstance(dim, Axis):
        return [((dim.id, position),) for position in range(dim.size)]
    if isinstance(dim, Concat):
        return [point for section in dim.sections for point in points(section)]
    result: list[tuple[tuple[int, int], ...]] = [()]
    for factor in dim.factors:
        result = [outer + inner for outer in result for inner in points(factor)]
    return result


@given(st.data())
@settings(max_examples=200)
def test_whatever_is_learnt_dims_stay_what_they_were(data: st.DataObject) -> None:
    """Dims are only ever refined: an index is still where it was, in terms of what its axes are made of by then."""
    axes = Axes()
    dims = [data.draw(st.composite(lambda draw: structure(draw, axes))()) for _ in range(4)]
    before = [points(dim) for dim in dims]
    for _ in range(4):
        dim, other = data.draw(st.sampled_from(dims)), data.draw(st.sampled_from(dims))
        match data.draw(st.sampled_from(["split", "cut", "unify", "regroup"])):
            case "split":
                parts = axes.split(dim, data.draw(st.sampled_from([2, 3, 4])))
                joined = parts and product(parts)
            case "cut":
                parts = axes.cut(dim, data.draw(st.integers(1, dim.size)))
                joined = parts and concat(parts)
            case "regroup":
                outer = data.draw(st.sampled_from([d for d in range(1, dim.size + 1) if dim.size % d == 0]))
                regrouped = axes.regroup([dim], [outer, dim.size // outer])
                assert regrouped is None or [part.size for part in regrouped] == [outer, dim.size // outer]
                joined = regrouped and product(regrouped)
            case _:
                joined = other if axes.unify(dim, other) else None
        if joined is not None:
            assert points(axes.resolve(joined)) == points(axes.resolve(dim))
    for dim, old in zip(dims, before, strict=True):
        assert axes.resolve(dim).size == dim.size
        made = {axis: points(axes.resolve(axis)) for axis in leaves(dim)}
        by_number = {axis.id: refined for axis, refined in made.items()}
        refined = [sum((by_number[number][position] for number, position in point), ()) for point in old]
        assert points(axes.resolve(dim)) == refined


@given(st.data())
@settings(max_examples=100)
def test_what_may_be_cut_gives_boxes_that_cover_the_tensor(data: st.DataObject) -> None:
    """If an axis may be cut, an element is held by the ranks that hold its position along the axis, no others."""
    axes = Axes()
    axis = axes.new(3)
    dims = [data.draw(st.composite(lambda draw: structure(draw, axes))()) for _ in range(2)]
    place = data.draw(st.sampled_from(["one dim", "both dims", "twice in a product", "in two sections"]))
    inside = {"twice in a product": product, "in two sections": concat}.get(place)
    dims[0] = inside([axis, dims[0], axis]) if inside else product([axis, dims[0]])
    dims[1] = product([dims[1], axis]) if place == "both dims" else dims[1]
    assert isinstance(axis, Axis)
    cuts = [ownership(dim, [{axis.id: [(0, 2)]}, {axis.id: [(2, 3)]}]) if _covered(dim, axis) else None for dim in dims]
    assert shardable(dims, frozenset([axis.id])) is (place in ("one dim", "in two sections"))
    if shardable(dims, frozenset([axis.id])):
        for dim, cut in zip(dims, cuts, strict=True):
            assert cut is not None
            for rank, held in enumerate([{0, 1}, {2}]):
                wanted = [i for i, label in enumerate(labels(dim, axis.id)) if label is None or label in held]
                assert cut.indices(rank) == wanted


def _covered(dim: Dim, axis: Axis) -> bool:
    """Whether the parts cover the dim (they do not where the axis meets itself)."""
    return all(len({position for number, position in point if number == axis.id}) <= 1 for point in points(dim))


def test_heads_and_features_are_united() -> None:
    """Rows of a projection, split into heads, meet the repeated heads of another."""
    axes = Axes()
    query, key = axes.new(12), axes.new(6)
    heads, features = axes.regroup([query], [4, 3]) or ()
    key_heads, key_features = axes.regroup([key], [2, 3]) or ()
    assert axes.unify(heads, product([key_heads, axes.new(2)]))
    assert axes.unify(features, key_features)
    resolved = axes.resolve(query)
    assert isinstance(resolved, Product)
    assert [factor.size for factor in resolved.factors] == [2, 2, 3]
    assert axes.resolve(key) == product([resolved.factors[0], resolved.factors[2]])


def test_sections_are_united_one_by_one() -> None:
    axes = Axes()
    fused = axes.new(10)
    left, right = axes.cut(fused, 6) or ()
    other = concat([axes.new(6), axes.new(4)])
    assert axes.unify(fused, other)
    assert axes.resolve(left) == axes.resolve(other.sections[0])  # type: ignore[union-attr]
    assert axes.resolve(right) == axes.resolve(other.sections[1])  # type: ignore[union-attr]


def test_contradictions_are_told() -> None:
    axes = Axes()
    assert not axes.unify(axes.new(4), axes.new(6))
    assert not axes.unify(product([axes.new(2), axes.new(3)]), product([axes.new(3), axes.new(2)]))
    axis = axes.new(4)
    assert not axes.unify(axis, concat([axes.new(0), axis, axes.new(0)])) or axes.resolve(axis) == axis
    assert axes.cut(product([axes.new(4), axes.new(3)]), 5) is None
    assert axes.split(axes.new(6), 4) is None
    assert axes.regroup([axes.new(4), axes.new(9)], [6, 6]) is None


def test_an_axis_in_two_dims_cannot_be_cut() -> None:
    axes = Axes()
    axis, other = axes.new(4), axes.new(3)
    assert isinstance(axis, Axis)
    cut = frozenset([axis.id])
    assert shardable([axis, other], cut)
    assert shardable([concat([axis, product([axis, other])])], cut)
    assert not shardable([axis, product([axis, other])], cut)
    assert not shardable([product([axis, other, axis])], cut)


def test_axes_side_by_side_are_cut_together_in_sections_alone() -> None:
    axes = Axes()
    heads, features, inner = axes.new(4), axes.new(3), axes.new(6)
    fused = concat([product([heads, features]), product([heads, features]), inner])
    [both] = [found for found in candidates([(fused,)], 2) if len(found.axes) > 1]
    assert both.divides([fused])
    assert both.divides([axes.new(5), product([heads, features])])
    assert both.ownership(fused).local_sizes == (15, 15)
    assert not both.divides([heads, inner])  # no rank would have the first heads' second half
    assert not both.divides([product([heads, inner])])
    # Where they are factors of one product, or one is inside of another, they are not cut together.
    assert all(len(found.axes) == 1 for found in candidates([(fused,), (product([heads, inner]),)], 2))
    assert all(len(found.axes) == 1 for found in candidates([(concat([product([heads, features]), features]),)], 2))


def test_positions_of_a_sequence_have_no_parts() -> None:
    axes = Axes()
    positions = axes.new(12, positions=True)
    assert axes.split(positions, 3) is None
    assert axes.cut(positions, 8) is None
    assert axes.regroup([positions], [3, 4]) is None
    assert not axes.unify(positions, product([axes.new(3), axes.new(4)]))
    assert not axes.unify(concat([axes.new(8), axes.new(4)]), positions)
    same = axes.new(12)
    assert axes.unify(same, positions)
    assert axes.unify(axes.new(12), same)
    assert axes.are_positions(same)
    assert axes.split(same, 3) is None
    batch = product([axes.new(3), axes.new(12, positions=True)])
    assert [dim.size for dim in axes.regroup([batch], [3, 12]) or ()] == [3, 12]


def test_blocks_of_positions_are_positions_again_when_merged() -> None:
    axes = Axes()
    blocks = axes.divide_positions([1, 4, 3])
    assert [dim.size for dim in blocks] == [1, 4, 3]
    assert axes.are_positions(blocks[1])
    assert not axes.are_positions(blocks[2])
    moved = axes.new(4)
    assert axes.unify(moved, blocks[1])
    assert axes.are_blocks([blocks[0], moved, blocks[2]])
    assert not axes.are_blocks(blocks[1:])
    assert not axes.are_blocks([axes.new(4), blocks[2]])
