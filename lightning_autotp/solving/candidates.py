"""Candidate shardings: which axes may be sharded over the ranks, and how."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import groupby

from lightning_autotp.layouts.dims import (
    FIXED,
    Axis,
    Concat,
    Cut,
    Dim,
    Product,
    depth,
    leaves,
    numbered_ownership,
    shardable,
)
from lightning_autotp.layouts.ownership import Ownership, Run
from lightning_autotp.layouts.types import Shard
from lightning_autotp.operators import Relation
from lightning_autotp.operators.axes import Axes


@dataclass(frozen=True)
class Sharding:
    """A candidate: some axes and what each rank holds of them.

    Attributes:
        axes: ids of the axes, the outer one first.
        held: per rank, the runs of each axis.
        beside: whether each axis is cut over all ranks, as the axes lie side by side in sections of a dim.
    """

    axes: tuple[int, ...]
    held: tuple[tuple[tuple[int, tuple[Run, ...]], ...], ...]
    beside: bool = False

    def divides(self, dims: Sequence[Dim]) -> bool:
        """Whether it cuts a tensor of these resolved dims into boxes, of which each element has an owner."""
        axes = frozenset(self.axes)
        return shardable(dims, axes) and not (self.beside and depth(Product(tuple(dims)), axes) > 1)

    def ownership(self, dim: Dim) -> Ownership:
        """The map of a resolved dim."""
        return numbered_ownership(_structure(dim, self.axes, frozenset(), {}), self.runs_by_rank)

    def cut(self, dim: Dim, growing: frozenset[int]) -> Cut:
        """The same said by axis.

        Args:
            dim: a resolved dim.
            growing: ids of the axes whose sizes a batch gives.
        """
        grows = frozenset(number for number, axis in enumerate(self.axes) if axis in growing)
        return Cut(_structure(dim, self.axes, growing, {}), self.runs_by_rank, grows, self.axes)

    @cached_property
    def runs_by_rank(self) -> tuple[tuple[tuple[Run, ...], ...], ...]:
        """Per rank, the runs of each axis, in the order of :attr:`axes`."""
        return tuple(tuple(runs for _, runs in rank) for rank in self.held)


def _structure(dim: Dim, axes: tuple[int, ...], growing: frozenset[int], numbers: dict[tuple[int, ...], int]) -> Dim:
    """The dim with its axes numbered as in a :class:`Cut`: the same for the same dim of another layer."""
    if isinstance(dim, Axis):
        if dim.id in axes:
            return Axis(axes.index(dim.id), dim.size)
        return Axis(_number((dim.id,), numbers) if dim.id in growing else FIXED, dim.size)
    if isinstance(dim, Concat):
        return Concat(tuple(_structure(section, axes, growing, numbers) for section in dim.sections))
    factors: list[Dim] = []
    for is_given, run in groupby(dim.factors, key=lambda f: isinstance(f, Axis) and f.id in growing - {*axes}):
        several = list(run)
        if is_given:  # rows and tokens in one: what counts is how many there are of both
            ids = tuple(axis.id for axis in several if isinstance(axis, Axis))
            factors.append(Axis(_number(ids, numbers), math.prod(axis.size for axis in several)))
        else:
            factors += [_structure(factor, axes, growing, numbers) for factor in several]
    return factors[0] if len(factors) == 1 else Product(tuple(factors))


def _number(axes: tuple[int, ...], numbers: dict[tuple[int, ...], int]) -> int:
    """The number, below :data:`FIXED`, of axes whose sizes a batch gives."""
    return numbers.setdefault(axes, FIXED - 1 - len(numbers))


def candidates(
    tensors: Collection[tuple[Dim, ...]],
    ranks: int,
    among: Collection[int] | None = None,
    together: Mapping[int, int] | None = None,
) -> list[Sharding]:
    """Every axis of some tensors, sharded; with fewer units than ranks, together with another factor's.

    Args:
        tensors: their resolved dims.
        ranks: among so many.
        among: ids of the axes that may be sharded; all by default.
        together: by axis, how many of its units may not be separated, where there are enough of such groups.
    """
    together = together or {}
    found: dict[tuple[int, ...], Sharding] = {}
    for dims in tensors:
        for factors in (factors for dim in dims for factors in _products(dim)):
            for position, factor in enumerate(factors):
                if not isinstance(factor, Axis) or (among is not None and factor.id not in among):
                    continue
                if factor.size >= ranks:
                    found.setdefault((factor.id,), _sharding_of(factor, ranks, together.get(factor.id, 1)))
                    continue
                for other in factors[:position] + factors[position + 1 :]:
                    if isinstance(other, Axis) and other.size >= -(-ranks // factor.size):
                        found.setdefault((factor.id, other.id), _sharded_within(factor, other, ranks))
    for axes in _side_by_side(tensors):
        if len(beside := [found[axis,] for axis in axes if (axis,) in found]) > 1:
            sharding = _sharded_beside(beside)
            found.setdefault(sharding.axes, sharding)
    return list(found.values())


def squares(relations: Iterable[Relation], axes: Axes, parameters: Collection[int]) -> frozenset[int]:
    """Results of products with a matrix both of whose dims are the same axis (hidden to hidden), which cannot be cut.

    Where its result is gathered at once, what comes after need not be of that axis.
    """
    return frozenset(
        relation.operator.outputs[0]
        for relation in relations
        if relation.contracted
        for tensor in relation.operator.inputs
        if tensor in parameters and len(dims := relation.inputs[tensor]) == 2
        if {a.id for a in leaves(axes.resolve(dims[0]))} & {a.id for a in leaves(axes.resolve(dims[1]))}
    )


def inseparable(dims: Iterable[tuple[Dim, int]]) -> dict[int, int]:
    """How many units of an axis must stay together, so that dims are cut at multiples of a length only.

    What this does not tell (sections that begin elsewhere, axes inside of others) is seen from the cut.

    Args:
        dims: resolved dims, each with its length.
    """
    found: dict[int, int] = {}
    for dim, length in dims:
        for factors in _products(dim):
            inner = 1  # elements of the dim for one of the factor
            for factor in reversed(factors):
                if isinstance(factor, Axis):
                    group = length // math.gcd(length, inner)
                    found[factor.id] = math.lcm(found.get(factor.id, 1), group)
                inner *= factor.size
    return found


def is_cut_between(layout: Shard, units: Sequence[int]) -> bool:
    """Whether a layout cuts each dim at multiples of its length only."""
    return all(
        end % units[dim] == 0 or end == owned.size
        for dim, owned in layout.dims
        for runs in owned.held
        for run in runs
        for end in run
    )


def _sharding_of(axis: Axis, ranks: int, together: int) -> Sharding:
    held = Ownership.even(axis.size, ranks, together).held
    return Sharding((axis.id,), tuple(((axis.id, runs),) for runs in held))


def _sharded_within(outer: Axis, inner: Axis, ranks: int) -> Sharding:
    """Ranks outnumber the outer units: each unit has several ranks, which divide the inner ones among them."""
    held = []
    teams = Ownership.even(ranks, outer.size)
    for unit in range(outer.size):
        members = teams.local_size(unit)
        shares = Ownership.even(inner.size, members)
        held += [((outer.id, ((unit, unit + 1),)), (inner.id, shares.held[member])) for member in range(members)]
    return Sharding((outer.id, inner.id), tuple(held))


def _sharded_beside(each: Sequence[Sharding]) -> Sharding:
    """Axes that are each cut over all ranks, in sections of one dim."""
    held = tuple(tuple(runs for one in rank for runs in one) for rank in zip(*(one.held for one in each), strict=True))
    return Sharding(tuple(axis for one in each for axis in one.axes), held, beside=True)


def _side_by_side(tensors: Collection[tuple[Dim, ...]]) -> Iterator[tuple[int, ...]]:
    """The outermost axes of a concatenation's sections, where these are several: an attention's heads beside an MLP.

    Not two that are factors of one product somewhere: cut along both, it would be no box.
    """
    beside: dict[int, set[int]] = {}
    for product in (product for dims in tensors for dim in dims for product in _products(dim)):
        together = {axis.id for axis in leaves(Product(product))}
        for axis in together:
            beside.setdefault(axis, set()).update(together)
    for dim in dict.fromkeys(dim for dims in tensors for dim in dims if isinstance(dim, Concat)):
        axes: list[int] = []
        for section in dim.sections:
            outer = next(iter(section.factors), section) if isinstance(section, Product) else section
            if isinstance(outer, Axis) and beside.get(outer.id, set()).isdisjoint(axes):
                axes.append(outer.id)
        yield tuple(axes)


def _products(dim: Dim) -> Iterator[tuple[Dim, ...]]:
    """Every product in a resolved dim as its factors; an axis alone is a product of one."""
    if isinstance(dim, Axis):
        yield (dim,)
    elif isinstance(dim, Product):
        yield dim.factors
        for factor in dim.factors:
            if isinstance(factor, Concat):
                yield from _products(factor)
    else:
        for section in dim.sections:
            yield from _products(section)
