"""Operators that have equal tables: those of repeated layers differ in nothing but names.

A table says what the types of an operator's tensors cost together. That depends on what the operator is, on how its
tensors' dims go together, on the candidates that cut them, and on some facts of each tensor; not on whose layer it is.
So all of this is written down, with tensors, axes and candidates numbered in the order in which the operator has them.
Where two of these descriptions are equal, so are the tables, and one is made.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence

from lightning_autotp.layouts.dims import Axis, Dim, Product
from lightning_autotp.operators import Relation
from lightning_autotp.operators.graph import renamed
from lightning_autotp.solving.candidates import Sharding


class Descriptions:
    """Describes relations so that those are equal that have equal tables.

    Args:
        shardings: the candidates.
        touching: by tensor, the numbers of the candidates that cut it.
        of_axis: what else counts of an axis.
    """

    def __init__(
        self,
        shardings: Sequence[Sharding],
        touching: Mapping[int, tuple[int, ...]],
        of_axis: Callable[[int], Hashable],
    ) -> None:
        self._shardings, self._touching, self._of_axis = shardings, touching, of_axis
        numbers: dict[Hashable, int] = {}
        self._runs = [numbers.setdefault(one.runs_by_rank, len(numbers)) for one in shardings]
        self._axes: dict[int, Hashable] = {}

    def of(self, relation: Relation, of_tensor: Callable[[int], Hashable], around: Hashable) -> Hashable:
        """What a relation's table depends on.

        Args:
            relation: an operator with its (resolved) dims.
            of_tensor: what else counts of one of its tensors.
            around: what counts of the place in the model's code.
        """
        operator = relation.operator
        tensors = {tensor: at for at, tensor in enumerate(dict.fromkeys((*relation.inputs, *relation.outputs)))}
        axes: dict[int, int] = {}

        def numbered(dim: Dim) -> Hashable:
            if isinstance(dim, Axis):
                return axes.setdefault(dim.id, len(axes)), dim.size
            parts = dim.factors if isinstance(dim, Product) else dim.sections
            return type(dim), *map(numbered, parts)

        dims = tuple(
            tuple((tensors[tensor], *map(numbered, found)) for tensor, found in each.items())
            for each in (relation.inputs, relation.outputs)
        )
        numbers: dict[int, int] = {}
        cut = tuple(
            tuple(numbers.setdefault(number, len(numbers)) for number in self._touching.get(tensor, ()))
            for tensor in tensors
        )
        names = {tensor: ("tensor", at) for tensor, at in tensors.items()}
        return (
            operator.name,
            operator.layer,
            bool(operator.rounding),
            around,
            tuple((name, renamed(value, names)) for name, value in operator.arguments),
            dims,
            tuple(map(of_tensor, tensors)),
            frozenset(map(numbered, relation.whole)),
            tuple(map(numbered, relation.contracted)),
            frozenset(tensors[tensor] for tensor in relation.linear),
            frozenset(tensors[tensor] for tensor in relation.added_after_sum),
            relation.needs_implementation,
            relation.draws,
            cut,
            tuple(self._candidate(number, axes) for number in numbers),
            tuple(map(self._axis, axes)),
        )

    def _candidate(self, number: int, axes: Mapping[int, int]) -> Hashable:
        one = self._shardings[number]
        there = tuple((axes.get(axis, -1), self._axis(axis)) for axis in one.axes)
        return there, self._runs[number], one.beside

    def _axis(self, axis: int) -> Hashable:
        if axis not in self._axes:
            self._axes[axis] = self._of_axis(axis)
        return self._axes[axis]
