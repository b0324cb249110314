from __future__ import annotations

import math

from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_autotp.axes import Axes, Axis, Concat, Dim, Product, concat, held_runs, leaves, product, shardable


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
