"""Operators that have equal tables: those of repeated layers differ in nothing but names.

A table says what the types of an operator's tensors cost together. That depends on what the operator is, on how its
tensors' dims go together, on the candidates that cut them, and on some facts of each tensor; not on whose layer it is.
So all of this is written down, with tensors, axes and candidates numbered in the order in which the operator has them.
Where two of these descriptions are equal, so are the tables, and one is made.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence

from lightning_autotp.layouts.dims import Axis, Dim, Product
from lightning_autotp.operators import Dims, Relation
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
        self._touching, self._of_axis = touching, of_axis
        numbers: dict[Hashable, int] = {}
        ways = [numbers.setdefault((one.runs_by_rank, one.beside), len(numbers)) for one in shardings]
        self._candidates = [(one.axes, way) for one, way in zip(shardings, ways, strict=True)]
        self._axes: dict[int, Hashable] = {}
        self._structures: dict[Hashable, int] = {}
        self._made_of: dict[int, tuple[int, list[int]]] = {}  # by the id of what the relations keep

    def of(self, relation: Relation, of_tensor: Callable[[int], Hashable], around: Hashable) -> Hashable:
        """What a relation's table depends on.

        Args:
            relation: an operator with its (resolved) dims.
            of_tensor: what else counts of one of its tensors.
            around: what counts of the place in the model's code.
        """
        operator = relation.operator
        tensors: dict[int, int] = {}
        axes: dict[int, int] = {}
        dims: list[Hashable] = [len(relation.inputs)]
        for each in (relation.inputs, relation.outputs):
            for tensor, found in each.items():
                structure, there = self._known(found)
                dims += (tensors.setdefault(tensor, len(tensors)), structure)
                dims += [axes.setdefault(axis, len(axes)) for axis in there]

        def numbered(dim: Dim) -> Hashable:
            structure, there = self._structure((dim,))
            return structure, *[axes.setdefault(axis, len(axes)) for axis in there]

        whole = frozenset(map(numbered, relation.whole))
        contracted = tuple(map(numbered, relation.contracted))
        numbers: dict[int, int] = {}
        cut: list[Hashable] = []
        for tensor in tensors:
            touching = self._touching.get(tensor, ())
            cut += (len(touching), *[numbers.setdefault(number, len(numbers)) for number in touching])
        names = {tensor: ("tensor", at) for tensor, at in tensors.items()}
        return (
            operator.name,
            operator.layer,
            bool(operator.rounding),
            around,
            tuple([(name, renamed(value, names)) for name, value in operator.arguments]),
            tuple(dims),
            tuple(map(of_tensor, tensors)),
            whole,
            contracted,
            frozenset([tensors[tensor] for tensor in relation.linear]),
            frozenset([tensors[tensor] for tensor in relation.added_after_sum]),
            relation.needs_implementation,
            relation.draws,
            tuple(cut),
            tuple([self._candidate(number, axes) for number in numbers]),
            tuple([self._axis(axis) for axis in axes]),
        )

    def of_tensor(self, tensor: int, dims: Dims) -> Hashable:
        """What the layouts depend on that candidates give a tensor, in their order."""
        structure, there = self._known(dims)
        axes: dict[int, int] = {}
        order = [axes.setdefault(axis, len(axes)) for axis in there]
        candidates = [self._candidate(number, axes) for number in self._touching[tensor]]
        return structure, tuple(order), tuple(candidates), tuple([self._axis(axis) for axis in axes])

    def _known(self, dims: Dims) -> tuple[int, list[int]]:
        """The :meth:`_structure` of a tensor's dims, which are the same object in all relations of the tensor."""
        found = self._made_of.get(id(dims))
        if found is None:
            found = self._made_of[id(dims)] = self._structure(dims)
        return found

    def _structure(self, dims: Dims) -> tuple[int, list[int]]:
        """What dims are made of, as a number, and the axes that they are made of, in order."""
        axes: list[int] = []
        spelled = tuple([_spelled(dim, axes) for dim in dims])
        return self._structures.setdefault(spelled, len(self._structures)), axes

    def _candidate(self, number: int, axes: Mapping[int, int]) -> Hashable:
        there, way = self._candidates[number]
        return way, *[axes[axis] if axis in axes else self._axis(axis) for axis in there]

    def _axis(self, axis: int) -> Hashable:
        if axis not in self._axes:
            self._axes[axis] = self._of_axis(axis)
        return self._axes[axis]


def _spelled(dim: Dim, axes: list[int]) -> Hashable:
    """What a (resolved) dim is made of, but for which axes these are: those are added to ``axes``."""
    if isinstance(dim, Axis):
        axes.append(dim.id)
        return dim.size
    parts = dim.factors if isinstance(dim, Product) else dim.sections
    return type(dim), *[_spelled(part, axes) for part in parts]
