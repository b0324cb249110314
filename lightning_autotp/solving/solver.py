"""Layouts of least cost for every tensor of a graph.

Every tensor takes one *type*: Invariant, Replicate, Partial, or sharded by a candidate **sharding** (one of the axes
its parameters are made of, dealt out to the ranks). Each operator's rule allows some combinations of types; a module
boundary also allows conversions. All of it is tables of allowed combinations with costs, minimised exactly by
:mod:`~lightning_autotp.solving.elimination`.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from lightning_autotp.layouts.dims import Dim, leaves, shardable
from lightning_autotp.layouts.places import Boundary, CallPoint
from lightning_autotp.layouts.types import Invariant, Layout, Partial, Replicate, Shard
from lightning_autotp.operators import Dims, Relation, count_flops, relate
from lightning_autotp.operators.axes import Axes
from lightning_autotp.operators.graph import OPAQUE, Graph, Operator
from lightning_autotp.solving.call_points import private_draws, static_operands
from lightning_autotp.solving.candidates import candidates, squares
from lightning_autotp.solving.cost import CONVERSIONS, Profile, typical_matrix
from lightning_autotp.solving.elimination import Elimination, NoAssignment, TooManyCombinations
from lightning_autotp.solving.repeated_modules import twins

I, R, P = "I", "R", "P"  # noqa: E741 (the field's own names for the types)
_TYPES: dict[str, Layout] = {I: Invariant(), R: Replicate(), P: Partial()}
# Among placements of equal cost, one inside a parallel layer is preferred to one at another module.
_ELSEWHERE = 1e-9


class NothingToShard(RuntimeError):
    """No tensor of the model can be divided among so many ranks."""


@dataclass(frozen=True)
class Conversion:
    """A tensor changes its layout at a module boundary, or at a call inside a module."""

    boundary: Boundary | CallPoint
    source: Layout
    target: Layout
    shape: tuple[int, ...]


@dataclass
class Solution:
    """The layouts found.

    Attributes:
        graph: the captured graph.
        ranks: number of ranks.
        layouts: of every tensor that depends on a parameter.
        conversions: where layouts change.
        slices: by operator (its position) and static tensor: how that operand becomes what the operator needs there.
        reduced: operators whose layer sums their Partial result (row-parallel linears, vocabulary-parallel look-ups).
        drawing: calls, by number, that draw random numbers for a sharded tensor: each rank its own.
        global_views: boundaries where a sharded tensor leaves the modules and must look whole to the user's code
            (logits).
        whole: why parameters are left whole, by name.
        cost: seconds by the profile.
    """

    graph: Graph
    ranks: int
    layouts: dict[int, Layout]
    conversions: list[Conversion] = field(default_factory=list)
    slices: dict[tuple[int, int], Conversion] = field(default_factory=dict)
    reduced: set[int] = field(default_factory=set)
    drawing: set[int] = field(default_factory=set)
    global_views: list[Conversion] = field(default_factory=list)
    whole: dict[str, str] = field(default_factory=dict)
    cost: float = 0.0


def solve(
    graph: Graph, ranks: int, profile: Profile | None = None, blocked: Mapping[int, str] | None = None
) -> Solution:
    """Find the layouts of least cost.

    Args:
        graph: the captured model.
        ranks: size of the tensor-parallel group.
        profile: the hardware; a default one is used otherwise.
        blocked: positions of operators at which nothing may be sharded, and why.

    Raises:
        NothingToShard: if no parameter can be divided.
    """
    solver = _Solver(graph, ranks, profile or Profile(), blocked or {})
    while True:
        try:
            solution = solver.solve()
        except TooManyCombinations:
            solver.keep_the_largest_half()
            continue
        varying = _converted_differently(solution)
        if not varying:
            return solution
        solver.fixed |= varying


class _Solver:
    def __init__(self, graph: Graph, ranks: int, profile: Profile, blocked: Mapping[int, str]) -> None:
        self.graph, self.ranks, self.profile = graph, ranks, profile
        self.fixed: set[Boundary | CallPoint] = set()
        relations, self.axes = relate(graph)
        untied = squares(relations, self.axes, graph.parameters)
        if untied:
            relations, self.axes = relate(graph, untied)
        self.first = self._first_runs(relations)
        self.position = {id(operator): number for number, operator in enumerate(graph.operators)}
        drawing = private_draws(graph, [relation.operator for relation in relations if relation.draws])
        for relation in relations:
            because = blocked.get(self.position[id(relation.operator)])
            if because is None and relation.draws and self.position[id(relation.operator)] not in drawing:
                because = "it draws random numbers in a call that draws others, too"
            if because is not None:
                everything = [*relation.inputs.values(), *relation.outputs.values()]
                relation.whole, relation.reason = [dim for dims in everything for dim in dims], because
        self.relations = [_resolved(relation, self.axes) for relation in relations]
        self.dims: dict[int, Dims] = {}
        for relation in self.relations:
            for tensor, dims in (*relation.inputs.items(), *relation.outputs.items()):
                if not graph.tensors[tensor].is_static:
                    self.dims.setdefault(tensor, dims)
        self.producer = {tensor: relation for relation in self.relations for tensor in relation.outputs}
        self.calls: dict[Boundary | CallPoint, int] = {}
        for operator in graph.operators:
            if operator.boundary is not None:
                self.calls[operator.boundary] = self.calls.get(operator.boundary, 0) + 1
        self.leaves = static_operands(graph)
        self._layouts: dict[tuple[Dims, int], Layout] = {}
        tensors = graph.tensors
        crossing = [tensors[op.outputs[0]].bytes for op in graph.operators if op.boundary is not None]
        # What stays whole in any case does not say what is large.
        opaque = {tensor for operator in graph.operators if operator.name == OPAQUE for tensor in operator.inputs}
        divisible = [tensors[tensor] for tensor in graph.parameters if tensor not in opaque]
        self.matrix = typical_matrix([(tensor.shape, tensor.bytes) for tensor in divisible])
        self.hidden = statistics.median(crossing or [1])
        self.shardings = candidates([self.dims[tensor] for tensor in graph.parameters if tensor in self.dims], ranks)
        self.cutting: dict[int, list[int]] = {}
        for number, sharding in enumerate(self.shardings):
            for axis in sharding.axes:
                self.cutting.setdefault(axis, []).append(number)
        self.touching = {tensor: self._touching(dims) for tensor, dims in self.dims.items()}

    def _first_runs(self, relations: list[Relation]) -> dict[int, int]:
        """For tensors of a module's later runs the one that stands for them: their dims are the same axes."""
        dims = {tensor: found for relation in relations for tensor, found in relation.outputs.items()}
        first: dict[int, int] = {}
        for twin, tensor in twins(self.graph):
            if twin in dims and all(self.axes.unify(a, b) for a, b in zip(dims[twin], dims[tensor], strict=True)):
                first[twin] = first.get(tensor, tensor)
        return first

    def _touching(self, dims: Dims) -> tuple[int, ...]:
        """Candidates that cut a tensor of these dims into boxes."""
        numbers = sorted({number for dim in dims for axis in leaves(dim) for number in self.cutting.get(axis.id, ())})
        return tuple(number for number in numbers if shardable(dims, frozenset(self.shardings[number].axes)))

    def keep_the_largest_half(self) -> None:
        """Forget the candidates that would cut the fewest bytes of parameters: the problem is too large for all."""
        sizes = dict.fromkeys(range(len(self.shardings)), 0)
        for tensor in self.graph.parameters:
            for number in self.touching.get(tensor, ()):
                sizes[number] += self.graph.tensors[tensor].bytes
        left = sorted((number for number in sizes if sizes[number]), key=lambda number: (-sizes[number], number))
        kept = set(left[: len(left) // 2])
        self.touching = {tensor: tuple(n for n in numbers if n in kept) for tensor, numbers in self.touching.items()}

    # -- tables ------------------------------------------------------------------------------------------------------

    def solve(self) -> Solution:
        if not any(self.touching[tensor] for tensor in self.graph.parameters if tensor in self.touching):
            raise NothingToShard(self._nothing())
        problem = Elimination()
        domains: dict[int, tuple[str | int, ...]] = {t: (I, R, P, *self.touching[t]) for t in self.dims}
        codes = {tensor: {kind: code for code, kind in enumerate(domain)} for tensor, domain in domains.items()}
        for tensor in self.graph.parameters:
            if tensor in self.dims:
                problem.add((tensor,), {(codes[tensor][kind],): cost for kind, cost in self._parameter(tensor)})
        for tensor in set(self.graph.outputs) & self.dims.keys():
            allowed: list[str | int] = [I, *(self.touching[tensor] if self._view_boundary(tensor) else ())]
            problem.add((self.first.get(tensor, tensor),), {(codes[tensor][kind],): 0.0 for kind in allowed})
        for relation in self.relations:
            tensors = [t for t in (*relation.inputs, *relation.outputs) if t in self.dims]
            scope = tuple(dict.fromkeys(self.first.get(t, t) for t in tensors))
            rows: dict[tuple[int, ...], float] = {}
            for kinds, cost in self._combinations(relation):
                named = {self.first.get(tensor, tensor): kinds[tensor] for tensor in tensors}
                if all(named[self.first.get(tensor, tensor)] == kinds[tensor] for tensor in tensors):
                    row = tuple(codes[tensor][named[tensor]] for tensor in scope)
                    rows[row] = min(cost, rows.get(row, math.inf))
            problem.add(scope, rows)
        try:
            values, cost = problem.solve()
        except NoAssignment as error:
            producer = self.producer.get(error.variable)
            where = producer.operator.source if producer else "a parameter"
            raise RuntimeError(
                f"no layout satisfies every operator around {where}; please report this model"
            ) from error
        kinds = {tensor: domains[tensor][code] for tensor, code in values.items()}
        return self._solution(kinds | {twin: kinds[tensor] for twin, tensor in self.first.items()}, cost)

    def _parameter(self, tensor: int) -> Iterator[tuple[str | int, float]]:
        size = self.graph.tensors[tensor].bytes
        whole = self._memory(size, 1.0)
        sync = self.profile.collective("all_reduce", size, self.ranks)
        yield I, whole
        yield R, whole + sync
        for number in self.touching[tensor]:
            layout = self._layout(tensor, number)
            if isinstance(layout, Shard):
                shared = any(owned.is_shared for _, owned in layout.dims)
                yield number, self._memory(size, 1 / self.ranks) + (sync if shared else 0.0)

    def _memory(self, size: int, share: float) -> float:
        return self.profile.memory(size, share, self.matrix, self.hidden, self.ranks)

    def _shares(self, layout: Shard) -> list[float]:
        return [
            math.prod(owned.local_size(rank) / owned.size for _, owned in layout.dims) for rank in range(self.ranks)
        ]

    def _largest_share(self, tensor: int, number: int) -> float:
        """The fullest rank's share of a tensor."""
        layout = self._layout(tensor, number)
        return max(self._shares(layout)) if isinstance(layout, Shard) else 1.0

    def _is_shared(self, tensor: int, number: int) -> bool:
        """Whether several ranks hold an element that not all of them hold."""
        layout = self._layout(tensor, number)
        return isinstance(layout, Shard) and sum(self._shares(layout)) > 1 + 1e-6

    def _combinations(self, relation: Relation) -> Iterator[tuple[dict[int, str | int], float]]:
        """Every combination of types the operator may run at, with its cost."""
        inputs = [tensor for tensor in relation.inputs if tensor in self.dims]
        outputs = list(relation.outputs)
        for kind in (I, R):
            same: dict[int, str | int] = dict.fromkeys((*inputs, *outputs), kind)
            yield same, self._compute(relation, None)
        linear = relation.linear
        if linear and all(tensor in self.dims or self._convertible(relation, tensor) for tensor in linear):
            kinds: dict[int, str | int] = {tensor: P if tensor in linear else R for tensor in inputs}
            yield kinds | dict.fromkeys(outputs, P), self._compute(relation, None)
        numbers = dict.fromkeys(n for tensor in (*inputs, *outputs) for n in self.touching[tensor])
        for number in numbers:
            combination = self._sharded(relation, inputs, outputs, number)
            if combination is not None:
                yield combination
        if relation.operator.boundary is not None:
            yield from self._conversions(relation.operator, inputs[0], outputs[0])

    def _sharded(
        self, relation: Relation, inputs: list[int], outputs: list[int], number: int
    ) -> tuple[dict[int, str | int], float] | None:
        """The operator on shards of one candidate, if its rule allows that."""
        axes = set(self.shardings[number].axes)
        if _touches(relation.whole, axes):
            return None
        contracted = _touches(relation.contracted, axes)
        kinds: dict[int, str | int] = {}
        for tensor, dims in (*relation.inputs.items(), *relation.outputs.items()):
            if not _touches(dims, axes):
                if tensor in self.dims:
                    kinds[tensor] = R
            elif tensor not in self.dims:  # static: every rank takes its part
                if not (self._convertible(relation, tensor) and shardable(dims, frozenset(axes))):
                    return None
            elif number not in self.touching[tensor]:
                return None
            else:
                kinds[tensor] = number
        if relation.draws and any(self._is_shared(tensor, number) for tensor in outputs):
            return None  # what several ranks hold must be the same on all of them
        cost = self._compute(relation, number)
        if contracted:
            summed = [dim for dim in relation.contracted if _touches([dim], axes)]
            if any(self.shardings[number].ownership(dim).is_shared for dim in summed):
                return None  # what several ranks hold would count several times
            if any(kinds[tensor] == number for tensor in outputs):
                return None
            inside = relation.reduces or relation.operator.layer != ""
            if relation.reduces and not self._view_boundary(relation.operator.inputs[0]):
                return None
            added = relation.added_last
            if not inside and not all(tensor in self.dims or self._convertible(relation, tensor) for tensor in added):
                return None
            result = I if inside else P
            kinds |= dict.fromkeys([*outputs, *(added & set(inputs))], result)
            if inside:
                size = sum(self.graph.tensors[tensor].bytes for tensor in outputs)
                cost += self.profile.collective("all_reduce", size, self.ranks)
        return kinds, cost

    def _convertible(self, relation: Relation, tensor: int) -> bool:
        """Whether a static operand can be sliced, or made Partial, at the operator's call."""
        return (self.position[id(relation.operator)], tensor) in self.leaves

    def _compute(self, relation: Relation, number: int | None) -> float:
        tensors = self.graph.tensors
        if relation.operator.boundary is not None:
            return 0.0
        flops = count_flops(relation.operator, lambda tensor: tensors[tensor].shape)
        everything = {tensor: tensors[tensor].bytes for tensor in (*relation.inputs, *relation.outputs)}
        share = 1.0
        if number is not None:
            shares = [
                self._largest_share(t, number) for t in everything if t in self.dims and number in self.touching[t]
            ]
            share = max(shares, default=1.0)
        return self.profile.compute(flops, sum(everything.values()), share)

    def _conversions(
        self, operator: Operator, source: int, target: int
    ) -> Iterator[tuple[dict[int, str | int], float]]:
        if operator.boundary is None or operator.boundary in self.fixed:
            return
        info = self.graph.tensors[source]
        for (before, after), (forward, backward) in CONVERSIONS.items():
            cost = sum(self.profile.collective(kind, info.bytes, self.ranks) for kind in (*forward, *backward))
            if not operator.layer:  # a gather launches kernels of its own, unless a layer does it
                cost += self.profile.latency if before == "S" else _ELSEWHERE
            befores = self.touching[source] if before == "S" else (before,)
            afters = self.touching[target] if after == "S" else (after,)
            for left in befores:
                for right in afters:
                    yield {source: left, target: right}, cost

    # -- result ------------------------------------------------------------------------------------------------------

    def _layout(self, tensor: int, kind: str | int) -> Layout:
        if isinstance(kind, str):
            return _TYPES[kind]
        dims = self.dims[tensor]
        if (dims, kind) not in self._layouts:
            self._layouts[dims, kind] = self._shard(dims, kind)
        return self._layouts[dims, kind]

    def _shard(self, dims: Dims, number: int) -> Layout:
        sharding = self.shardings[number]
        maps = [(index, sharding.ownership(dim)) for index, dim in enumerate(dims)]
        cut = tuple((index, owned) for index, owned in maps if not owned.is_whole)
        return Shard(cut) if cut else Replicate()

    def _view_boundary(self, tensor: int) -> Operator | None:
        """Where a sharded tensor that user code will see leaves the module that made it (``None``: nowhere)."""
        boundary: Operator | None = None
        while (relation := self.producer.get(tensor)) is not None:
            operator = relation.operator
            crossing = operator.boundary
            if isinstance(crossing, Boundary) and crossing.side == "out" and self.calls[crossing] == 1:
                boundary = operator
            varying = [t for t in relation.inputs if t in self.dims]
            if len(varying) != 1 or any(t in self.graph.parameters for t in varying):
                return boundary
            tensor = varying[0]
        return boundary

    def _solution(self, kinds: dict[int, str | int], cost: float) -> Solution:
        layouts = {tensor: self._layout(tensor, kind) for tensor, kind in kinds.items()}
        solution = Solution(self.graph, self.ranks, layouts, cost=cost)
        seen: set[Boundary | CallPoint] = set()
        for relation in self.relations:
            operator = relation.operator
            if operator.boundary is not None:
                source, target = operator.inputs[0], operator.outputs[0]
                if layouts[source] != layouts[target]:
                    shape = self.graph.tensors[source].shape
                    solution.conversions.append(Conversion(operator.boundary, layouts[source], layouts[target], shape))
            elif operator.layer and _sums(operator, layouts):
                solution.reduced.add(self.position[id(operator)])
            if relation.draws and any(isinstance(layouts[tensor], Shard) for tensor in operator.outputs):
                solution.drawing.add(operator.call)
            self._add_slices(solution, relation, kinds)
            if relation.reduces:
                self._add_view(solution, operator.inputs[0], seen)
        for tensor in self.graph.outputs:
            if tensor in layouts:
                self._add_view(solution, tensor, seen)
        solution.whole = self._reasons(layouts)
        return solution

    def _add_slices(self, solution: Solution, relation: Relation, kinds: Mapping[int, str | int]) -> None:
        """What the operator's static operands become where the others are sharded, or Partial."""
        static = [tensor for tensor in relation.inputs if tensor not in self.dims]
        if not static:
            return
        here = [kinds[tensor] for tensor in (*relation.inputs, *relation.outputs) if tensor in self.dims]
        number = next((kind for kind in here if isinstance(kind, int)), None)
        for tensor in static:
            target: Layout = Invariant()
            if number is not None:
                maps = [self.shardings[number].ownership(dim) for dim in relation.inputs[tensor]]
                cut = tuple((index, owned) for index, owned in enumerate(maps) if not owned.is_whole)
                target = Shard(cut) if cut else target
            is_sum = kinds[relation.operator.outputs[0]] == P
            if is_sum and tensor in (relation.added_last if number is not None else relation.linear):
                target = Partial()
            if not isinstance(target, Invariant):
                position = self.position[id(relation.operator)]
                shape = self.graph.tensors[tensor].shape
                change = Conversion(self.leaves[position, tensor], Invariant(), target, shape)
                solution.slices[position, tensor] = change

    def _add_view(self, solution: Solution, tensor: int, seen: set[Boundary | CallPoint]) -> None:
        operator = self._view_boundary(tensor)
        if operator is None or operator.boundary is None or operator.boundary in seen:
            return
        source = operator.inputs[0]
        layout = solution.layouts[operator.outputs[0]]
        if isinstance(layout, Shard):
            seen.add(operator.boundary)
            shape = self.graph.tensors[source].shape
            solution.global_views.append(Conversion(operator.boundary, layout, layout, shape))

    # -- reasons -----------------------------------------------------------------------------------------------------

    def _reasons(self, layouts: dict[int, Layout]) -> dict[str, str]:
        """Why each parameter with more than one dim was left whole."""
        reasons: dict[str, str] = {}
        for tensor, name in self.graph.parameters.items():
            if tensor not in layouts:
                reasons[name] = "not used in the traced forward"
            elif not isinstance(layouts[tensor], Shard) and len(self.graph.tensors[tensor].shape) > 1:
                reasons[name] = self._reason(tensor)
        return reasons

    def _reason(self, tensor: int) -> str:
        axes = [axis for dim in self.dims[tensor] for axis in leaves(dim)]
        if not self.touching[tensor]:
            sizes = " x ".join(str(axis.size) for axis in axes)
            return f"no unit of it ({sizes}) divides among {self.ranks} ranks"
        ids = {axis.id for axis in axes}
        for relation in self.relations:
            blocked = {axis.id for dim in relation.whole for axis in leaves(dim)} & ids
            if (
                blocked
                and relation.reason
                and any(set(self.shardings[n].axes) & blocked for n in self.touching[tensor])
            ):
                where = relation.operator
                return f"{where.name} in {where.module or 'the model'} ({where.source}): {relation.reason}"
        return "keeping it whole costs less than communicating"

    def _nothing(self) -> str:
        sizes = sorted({axis.size for dims in self.dims.values() for dim in dims for axis in leaves(dim)}, reverse=True)
        largest = f"the most units of any of its dims are {sizes[0]}" if sizes else "its forward uses no parameters"
        return (
            f"nothing in this model can be divided among {self.ranks} ranks: {largest}. "
            "Use a smaller tensor_parallel_size."
        )


def _converted_differently(solution: Solution) -> set[Boundary | CallPoint]:
    """Places that are passed several times, and not with the same conversion each time."""
    seen: dict[Boundary | CallPoint, set[tuple[Layout, Layout] | None]] = {}
    for operator in solution.graph.operators:
        if operator.boundary is not None and operator.outputs[0] in solution.layouts:
            pair = (solution.layouts[operator.inputs[0]], solution.layouts[operator.outputs[0]])
            seen.setdefault(operator.boundary, set()).add(pair if pair[0] != pair[1] else None)
    return {place for place, pairs in seen.items() if len(pairs) > 1}


def _sums(operator: Operator, layouts: Mapping[int, Layout]) -> bool:
    """Whether a layer works on shards and hands on their sum."""
    sharded = any(isinstance(layouts.get(tensor), Shard) for tensor in operator.inputs)
    return sharded and all(isinstance(layouts[tensor], Invariant) for tensor in operator.outputs)


def _touches(dims: Dims | list[Dim], axes: set[int]) -> bool:
    return any(axis.id in axes for dim in dims for axis in leaves(dim))


def _resolved(relation: Relation, axes: Axes) -> Relation:
    """The relation with every dim in terms of its final axes."""
    return Relation(
        operator=relation.operator,
        inputs={tensor: tuple(map(axes.resolve, dims)) for tensor, dims in relation.inputs.items()},
        outputs={tensor: tuple(map(axes.resolve, dims)) for tensor, dims in relation.outputs.items()},
        whole=[axes.resolve(dim) for dim in relation.whole],
        contracted=[axes.resolve(dim) for dim in relation.contracted],
        linear=relation.linear,
        added_last=relation.added_last,
        reduces=relation.reduces,
        draws=relation.draws,
        reason=relation.reason,
    )
