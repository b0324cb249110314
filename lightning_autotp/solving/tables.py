"""What every operator may run at, and what it costs: the tables that the solver minimises.

Every tensor takes one *type*: Invariant, Replicate, Partial, or sharded by a candidate **sharding** (one of the axes
its parameters are made of, sharded over the ranks). Each operator's rule allows some combinations of types; a module
boundary also allows conversions. Each gives a table of the combinations allowed, with their prices.
"""

from __future__ import annotations

import math
import statistics
from collections import Counter
from collections.abc import Collection, Hashable, Iterator, Mapping
from functools import cached_property, partial

from lightning_autotp.layouts.dims import Dim, leaves, touches
from lightning_autotp.layouts.ownership import alignment
from lightning_autotp.layouts.places import Boundary, CallPoint
from lightning_autotp.layouts.plan import Plan
from lightning_autotp.layouts.step_size import TokensPerStep
from lightning_autotp.layouts.transitions import TRANSITIONS, Pair
from lightning_autotp.layouts.types import Invariant, Layout, Partial, Replicate, Shard
from lightning_autotp.operators import Dims, Relation, count_flops, count_touched, record, relate, updated
from lightning_autotp.operators.axes import Axes
from lightning_autotp.operators.graph import OPAQUE, Graph, Operator, Ref
from lightning_autotp.solving.alike_relations import Descriptions
from lightning_autotp.solving.call_points import private_draws, static_operands
from lightning_autotp.solving.candidates import candidates, inseparable, is_cut_between, squares
from lightning_autotp.solving.cost import Profile, typical_matrix
from lightning_autotp.solving.elimination import Elimination, Table
from lightning_autotp.solving.implementations import DEFERRED_SUM, Implementation, Implementations, Use, operand_of
from lightning_autotp.solving.kept_parts import kept_in_parts
from lightning_autotp.solving.planned import Kind, PlanConstraints
from lightning_autotp.solving.pricing import ScaledSizes
from lightning_autotp.solving.repeated_modules import repeated_tensors
from lightning_autotp.solving.residual import residual_axes

I, R, P = "I", "R", "P"  # noqa: E741 (the field's own names for the types)
_TYPES: dict[str, Layout] = {I: Invariant(), R: Replicate(), P: Partial()}
# Among placements of equal cost, one inside a parallel layer is preferred to one where another module is entered, that
# to one where it is left, and that to one at a call; and a sum is taken early.
_JOINS = ("aten.cat.default", "aten.stack.default")
_ELSEWHERE = 1e-9


class Tables:
    """The tables of a graph.

    Args:
        graph: the captured model.
        ranks: size of the tensor-parallel group.
        implementations: what operators may run as, besides themselves.
        profile: the hardware.
        blocked: positions of operators at which nothing may be sharded, and why.
        tokens: the step to price for.
        shard_sequence: whether the tokens of sequences may be sharded, too.

    Attributes:
        axes: every axis of the graph's tensors.
        relations: every operator with its dims in terms of them.
        tables: of every relation, once :meth:`problem` has made them.
        dims: of every tensor that depends on a parameter.
        shardings: the candidates.
        touching: by tensor, the numbers of the candidates that cut it.
        first: for tensors of a module's later runs the one that stands for them.
        producer: what makes a tensor.
        leaves: by operator (its position) and static tensor: where that operand may change its layout.
        position: of every operator (its ``id``) in the graph.
        fixed: places where no layout may change.
        planned: the plan that is followed, if one is.
        sizes: the tensors' sizes at the priced step.
    """

    def __init__(
        self,
        graph: Graph,
        ranks: int,
        implementations: Implementations,
        profile: Profile,
        blocked: Mapping[int, str],
        tokens: TokensPerStep | None = None,
        shard_sequence: bool = False,
    ) -> None:
        self.graph, self.ranks, self.implementations, self.profile = graph, ranks, implementations, profile
        self.fixed: set[Boundary | CallPoint] = set()
        self.with_constants: set[Boundary | CallPoint] = set()
        relations, self.axes = relate(graph)
        untied = squares(relations, self.axes, graph.parameters)
        if untied:
            relations, self.axes = relate(graph, untied)
        self._module_of = {tensor: operator.module for operator in graph.operators for tensor in operator.outputs}
        self.first = self._first_runs(relations)
        self.position = {id(operator): number for number, operator in enumerate(graph.operators)}
        drawing = private_draws(graph, [relation.operator for relation in relations if relation.draws])
        for relation in relations:
            because = blocked.get(self.position[id(relation.operator)])
            if because is not None and isinstance(relation.operator.boundary, CallPoint):
                self.fixed.add(relation.operator.boundary)  # nothing is gathered at a call there, either
            if because is None and relation.draws and self.position[id(relation.operator)] not in drawing:
                because = "it draws random numbers of a generator of its own, or in a call that draws others, too"
            if because is not None:
                everything = [*relation.inputs.values(), *relation.outputs.values()]
                relation.whole |= {dim: because for dims in everything for dim in dims if dim not in relation.whole}
        resolved: dict[int, Dims] = {}
        self.relations = [_resolved(relation, self.axes, resolved) for relation in relations]
        self.dims: dict[int, Dims] = {}
        for relation in self.relations:
            for tensor, dims in (*relation.inputs.items(), *relation.outputs.items()):
                if not graph.tensors[tensor].is_static:
                    self.dims.setdefault(tensor, dims)
        self.producer = {tensor: relation for relation in self.relations for tensor in relation.outputs}
        for operator in graph.operators:
            if isinstance(operator.boundary, Boundary) and graph.tensors[operator.inputs[0]].is_static:
                self.with_constants.add(operator.boundary)
        self.leaves = static_operands(graph, implementations)
        self.layers = {operator.module for operator in graph.operators if implementations.is_layer(operator)}
        alike: dict[Dims, int] = {}
        every = {id(dims): dims for dims in self.dims.values()}  # many tensors' dims are the same object
        numbered = {one: alike.setdefault(dims, len(alike)) for one, dims in every.items()}
        self._alike = {tensor: numbered[id(dims)] for tensor, dims in self.dims.items()}
        self._layouts: dict[tuple[int, int], Layout] = {}
        self._fullest: dict[tuple[int, int], float] = {}
        self._may_be_changed: dict[tuple[int, int], bool] = {}
        self._told_apart: dict[int, Hashable] = {}
        self.planned: PlanConstraints | None = None
        self.tables: list[Table] = []
        self._works: dict[int, tuple[float, float, float]] = {}
        self._sent: dict[float, list[tuple[Pair, float]]] = {}
        self.tokens = tokens or TokensPerStep()
        self.sizes = ScaledSizes(graph, self.relations, self.tokens, self.axes.positions)
        of_parameters = [dim for tensor in graph.parameters for dim in self.dims.get(tensor, ())]
        self.shard_sequence = shard_sequence
        self.growing = self.sizes.growing - {axis.id for dim in of_parameters for axis in leaves(dim)}
        blocks = {tensor: units for tensor, units in graph.units.items() if tensor in self.dims}
        together = inseparable(pair for t, units in blocks.items() for pair in zip(self.dims[t], units, strict=True))
        of_each = [self.dims[tensor] for tensor in graph.parameters if tensor in self.dims]
        aligned = {axis.id: alignment(axis.size, ranks) for dim in of_parameters for axis in leaves(dim)}
        self.shardings = candidates(of_each, ranks, together=aligned | together)
        if shard_sequence:
            self.shardings += candidates(self.dims.values(), ranks, self.growing & self.sizes.sequence)
        # A plan that is followed may be from a time, or of a size, at which these cuts were others.
        known = set(self.shardings)
        others = [one for one in candidates(of_each, ranks, together=together) if one not in known]
        unaligned = range(len(self.shardings), len(self.shardings) + len(others))
        self.shardings += others
        self.cutting: dict[int, list[int]] = {}
        for number, sharding in enumerate(self.shardings):
            for axis in sharding.axes:
                self.cutting.setdefault(axis, []).append(number)
        cutting = {number: self._touching(dims) for dims, number in alike.items()}
        self.touching = {tensor: cutting[number] for tensor, number in self._alike.items()}
        for tensor in blocks:
            self.touching[tensor] = tuple(n for n in self.touching[tensor] if self._is_cut_between(tensor, n))
        for tensor in self._with_all_tokens() & self.touching.keys():
            numbers = self.touching[tensor]
            self.touching[tensor] = tuple(n for n in numbers if not self.growing.intersection(self.shardings[n].axes))
        self._touching_in_plans = self.touching
        self.touching = {t: tuple(n for n in numbers if n not in unaligned) for t, numbers in self.touching.items()}

    def _is_cut_between(self, tensor: int, number: int) -> bool:
        layout = self.layout(tensor, number)
        return isinstance(layout, Shard) and is_cut_between(layout, self.graph.units[tensor])

    def _first_runs(self, relations: list[Relation]) -> dict[int, int]:
        """For tensors of a module's later runs the one that stands for them: their dims are the same axes."""
        dims = {tensor: found for relation in relations for tensor, found in relation.outputs.items()}
        first: dict[int, int] = {}
        for later, tensor in repeated_tensors(self.graph):
            # Where values say how long a dim is, it may be another in each run.
            varies = self._module_of.get(later) in self.graph.branching
            if later in dims and all(
                (varies and a.size != b.size) or self.axes.unify(a, b)
                for a, b in zip(dims[later], dims[tensor], strict=True)
            ):
                first[later] = first.get(tensor, tensor)
        return first

    def _with_all_tokens(self) -> set[int]:
        """Tensors of code that runs as values say, which must be the same on every rank."""
        found: set[int] = set()
        for operator in self.graph.operators:
            if operator.module in self.graph.branching:
                place = operator.boundary
                enters = isinstance(place, Boundary) and place.side == "in"
                leaves_it = isinstance(place, Boundary) and place.side == "out"
                found.update(() if enters else operator.inputs, () if leaves_it else operator.outputs)
        return found

    def _touching(self, dims: Dims) -> tuple[int, ...]:
        """Candidates that cut a tensor of these dims into boxes."""
        numbers = sorted({number for dim in dims for axis in leaves(dim) for number in self.cutting.get(axis.id, ())})
        return tuple(number for number in numbers if self.shardings[number].divides(dims))

    def follow(self, plan: Plan, is_other_call: bool = False) -> None:
        """Allow only what a plan says; in another call than its own also changes of layout where it has none."""
        there = self._touching_in_plans
        self.planned = PlanConstraints(
            plan, self.graph, self.shardings, there, self.layout, self.implementations, is_other_call
        )
        used = self.planned.numbers
        self.touching = {tensor: tuple(n for n in numbers if n in used) for tensor, numbers in there.items()}

    def shard_tokens_beside(self, divided: Mapping[int, Kind], unsharded: Collection[int]) -> None:
        """Allow only tokens to be sharded besides what is divided already.

        Args:
            divided: the tensors' kinds where every rank has all tokens.
            unsharded: tensors whose tokens may not be sharded, because the model's code asks how many there are.
        """
        for tensor, numbers in self.touching.items():
            sharded = [
                n for n in numbers if self.growing.intersection(self.shardings[n].axes) and tensor not in unsharded
            ]
            self.touching[tensor] = tuple(n for n in numbers if n == divided.get(tensor) or n in sharded)

    def passing(self, places: Collection[Boundary | CallPoint]) -> set[int]:
        """The tensors before and after these places."""
        there = [operator for operator in self.graph.operators if operator.boundary in places]
        return {tensor for operator in there for tensor in (*operator.inputs, *operator.outputs)}

    def price(self, kinds: Mapping[int, Kind]) -> float:
        """What these layouts cost."""
        problem, domains = self.problem()
        return problem.cost({tensor: domain.index(kinds[tensor]) for tensor, domain in domains.items()})

    def cut(self, tensor: int, kind: Kind) -> int | None:
        """The dim along which a parameter of this kind is cut."""
        layout = self.layout(tensor, kind)
        return layout.dims[0][0] if isinstance(layout, Shard) else None

    def problem(self) -> tuple[Elimination, dict[int, tuple[Kind, ...]]]:
        """Every table, and the kinds that the numbers in it stand for."""
        problem = Elimination()
        domains: dict[int, tuple[Kind, ...]] = {t: (I, R, P, *self.touching[t]) for t in self.dims}
        descriptions = Descriptions(self.shardings, self.touching, self._of_axis)
        self._add_parameters(problem, domains, descriptions)
        for tensor in self.dims.keys() - self.producer.keys() - self.graph.parameters.keys():
            problem.add((tensor,), {(domains[tensor].index(I),): 0.0})  # an input: what the caller gives is whole
        for tensor in set(self.graph.outputs) & self.dims.keys():
            shown = self.view_boundaries(tensor)
            is_planned = self.planned is None or all(self.planned.shows(operator.boundary) for operator in shown)
            allowed: list[Kind] = [I, *(self.touching[tensor] if shown and is_planned else ())]
            problem.add((self.first.get(tensor, tensor),), {(domains[tensor].index(kind),): 0.0 for kind in allowed})
        if self.profile.activation_price and self.planned is None:
            for tensor in self._kept & self.producer.keys() - self.first.keys():
                # What a boundary gives is what it was given, whose price that is, unless no sum was taken yet.
                priced = domains[tensor] if self.producer[tensor].operator.boundary is None else (P,)
                held = [self._held(tensor, kind) if kind in priced else 0.0 for kind in domains[tensor]]
                problem.add((tensor,), {(code,): cost for code, cost in enumerate(held)})
        self.tables = []
        alike: dict[Hashable, tuple[Relation, Table]] = {}
        for relation in self.relations:
            tensors = [t for t in dict.fromkeys((*relation.inputs, *relation.outputs)) if t in self.dims]
            scope = tuple(dict.fromkeys([self.first.get(t, t) for t in tensors]))
            repeated = [(t, self.first[t]) for t in tensors if t in self.first]
            description = None if repeated else self._description(relation, descriptions)
            known = None if description is None else alike.get(description)
            if known is not None:
                other, table = known
                problem.repeat(table, scope)
                self._share_work(other, relation)
            else:
                coded = [(one, {kind: code for code, kind in enumerate(domains[one])}) for one in scope]
                rows: dict[tuple[int, ...], float] = {}
                for kinds, cost in self.combinations(relation):
                    named = {self.first.get(t, t): kinds[t] for t in tensors} if repeated else kinds
                    row = tuple([code.get(named[one], -1) for one, code in coded])
                    if -1 not in row and (not repeated or all(named[one] == kinds[t] for t, one in repeated)):
                        before = rows.get(row)
                        rows[row] = cost if before is None else min(cost, before)
                problem.add(scope, rows)
                if description is not None:
                    alike[description] = relation, problem.tables[-1]
            self.tables.append(problem.tables[-1])
        return problem, domains

    def _add_parameters(
        self, problem: Elimination, domains: Mapping[int, tuple[Kind, ...]], descriptions: Descriptions
    ) -> None:
        """Add what every parameter may be, and costs: for those of alike layers the same."""
        alike: dict[Hashable, Table] = {}
        for tensor in self.graph.parameters:
            if tensor not in self.dims:
                continue
            if self.planned is not None:
                problem.add((tensor,), {(domains[tensor].index(self.planned.parameters[tensor]),): 0.0})
                continue
            key = self.graph.tensors[tensor].bytes, descriptions.of_tensor(tensor, self.dims[tensor])
            if key in alike:
                problem.repeat(alike[key], (tensor,))
                continue
            problem.add((tensor,), {(domains[tensor].index(kind),): cost for kind, cost in self._parameter(tensor)})
            alike[key] = problem.tables[-1]

    # -- what tables depend on, besides an operator's dims -----------------------------------------------------------

    def _description(self, relation: Relation, descriptions: Descriptions) -> Hashable | None:
        """What a relation's table depends on; ``None`` if also on where in the model it stands, or its result goes."""
        operator = relation.operator
        if any(entry.shown for entry in self.implementations.of(operator)):
            return None
        planned = self._of_plan(relation) if self.planned is not None else ()
        if planned is None:
            return None
        return descriptions.of(relation, partial(self._of_tensor, relation), (self._of_place(operator), planned))

    def _of_plan(self, relation: Relation) -> Hashable | None:
        """What the plan that is followed says of an operator; ``None`` if it cuts one of its static operands."""
        assert self.planned is not None
        operator, planned = relation.operator, self.planned
        if operator.boundary is not None:
            change, tensors = planned.changes.get(operator.boundary), (operator.inputs[0], operator.outputs[0])
            if change is None:
                return planned.is_free_at(operator.boundary)
            return tuple(map(self._kind_in_order, tensors, change))
        places = {tensor: self.leaves.get((self.position[id(operator)], tensor)) for tensor in relation.inputs}
        if any(place in planned.slices for place in places.values()):
            return None
        made_local = tuple([place is not None and self._is_made_local(tensor) for tensor, place in places.items()])
        run = self._planned_run(operator)
        return planned.may_replace(operator.module), planned.sums.get(operator.module), run, made_local

    def _kind_in_order(self, tensor: int, kind: Kind) -> Kind:
        """A kind, with the number of a candidate as the place it has among those that cut the tensor."""
        return self.touching[tensor].index(kind) if isinstance(kind, int) else kind

    def _of_axis(self, axis: int) -> Hashable:
        return self.sizes.kind(axis), axis in self.growing, axis in self._residual

    def _of_tensor(self, relation: Relation, tensor: int) -> Hashable:
        if tensor not in self.dims:  # which may be another thing to each operator that reads it
            at_call = self._convertible(relation, tensor), self._is_zero(tensor)
            return self._facts(tensor, relation.inputs[tensor]), at_call
        found = self._told_apart.get(tensor)
        if found is None:
            found = self._told_apart[tensor] = self._facts(tensor, self.dims[tensor])
        return found

    def _facts(self, tensor: int, dims: Dims) -> Hashable:
        info = self.graph.tensors[tensor]
        return (
            info.shape,
            info.itemsize,
            tensor in self.graph.parameters,
            self.sizes.copies(tensor, dims),
            tensor in self._read_again,
            tensor in self._kept,
            tensor in self._kept_in_parts,
        )

    def _of_place(self, operator: Operator) -> Hashable:
        place = operator.boundary
        if place is None:
            return operator.call >= 0 and self._operators_of_calls[operator.call] == 1
        is_layer = operator.module in self.layers
        return type(place), place.side, place in self.fixed, place in self.with_constants, is_layer

    def _share_work(self, one: Relation, other: Relation) -> None:
        """The same operator on tensors of the same sizes is the same work."""
        known = self._works.get(self.position[id(one.operator)])
        if known is not None:
            self._works[self.position[id(other.operator)]] = known

    @cached_property
    def _read_again(self) -> set[int]:
        """Activations that the backward pass of an operator reads: those of one that is not linear in all it reads."""
        kept: set[int] = set()
        for relation in self.relations:
            read = self.dims.keys() & relation.inputs.keys()
            if relation.operator.boundary is None and not read <= relation.linear:
                kept |= {tensor for tensor in read if self.graph.tensors[tensor].is_differentiable}
        return kept

    @cached_property
    def _kept(self) -> set[int]:
        """Activations that are kept for the backward pass, also as they were before a boundary."""
        kept = set(self._read_again)
        for relation in reversed(self.relations):
            if relation.operator.boundary is not None and kept.intersection(relation.outputs):
                kept |= self.dims.keys() & relation.inputs.keys()
        return kept

    def _parameter(self, tensor: int) -> Iterator[tuple[Kind, float]]:
        size = self.graph.tensors[tensor].bytes
        whole = self._memory(size, 1.0)
        sync = self.profile.collective("all_reduce", size, self.ranks)
        yield I, whole
        yield R, whole + sync
        for number in self.touching[tensor]:
            layout = self.layout(tensor, number)
            if isinstance(layout, Shard):
                shared = any(owned.is_shared for _, owned in layout.dims)
                yield number, self._memory(size, 1 / self.ranks) + (sync if shared else 0.0)

    def _held(self, tensor: int, kind: Kind) -> float:
        """The price of the memory of an activation that is kept.

        Parts of a sum count where an operator reads them. Elsewhere the sum is taken before, and counts instead.
        """
        kept = self._read_again if kind == P else self._kept
        if not self.profile.activation_price or self.planned is not None or tensor not in kept:
            return 0.0
        share = self._largest_share(tensor, kind) if isinstance(kind, int) else 1.0
        return self.profile.activation(self._bytes(tensor), share, self.ranks)

    def _memory(self, size: int, share: float) -> float:
        return self.profile.memory(size, share, self._matrix, self._hidden, self.ranks)

    def _bytes(self, tensor: int) -> float:
        """The bytes of a tensor that depends on a parameter, at the priced step."""
        return self.sizes.bytes(tensor, self.dims[tensor])

    @cached_property
    def _matrix(self) -> float:
        """The bytes of a typical matrix, as one that is cut."""
        # What stays whole in any case does not say what is large.
        opaque = {tensor for operator in self.graph.operators if operator.name == OPAQUE for tensor in operator.inputs}
        divisible = [self.graph.tensors[tensor] for tensor in self.graph.parameters if tensor not in opaque]
        return typical_matrix([(tensor.shape, tensor.bytes) for tensor in divisible])

    @cached_property
    def _hidden(self) -> float:
        """The bytes of a typical tensor that goes from module to module."""
        # Inside of experts there are boundaries only where these are divided along their features.
        inside = tuple({f"{call.module}." for call in self.graph.experts})
        crossing = [
            self._bytes(op.outputs[0]) if op.outputs[0] in self.dims else self.graph.tensors[op.outputs[0]].bytes
            for op in self.graph.operators
            if (isinstance(op.boundary, Boundary) and not op.module.startswith(inside))
            or (isinstance(op.boundary, CallPoint) and not f"{op.module}.".startswith(inside))
        ]
        return statistics.median(crossing or [1])

    def _shares(self, layout: Shard) -> list[float]:
        return [
            math.prod(owned.local_size(rank) / owned.size for _, owned in layout.dims) for rank in range(self.ranks)
        ]

    def _largest_share(self, tensor: int, number: int) -> float:
        """The fullest rank's share of a tensor."""
        key = self._alike[tensor], number
        found = self._fullest.get(key)
        if found is None:
            layout = self.layout(tensor, number)
            found = self._fullest[key] = max(self._shares(layout)) if isinstance(layout, Shard) else 1.0
        return found

    def _mean_share(self, tensor: int, number: int) -> float:
        """The ranks' mean share of a tensor."""
        layout = self.layout(tensor, number)
        return sum(self._shares(layout)) / self.ranks if isinstance(layout, Shard) else 1.0

    def _is_shared(self, tensor: int, number: int) -> bool:
        """Whether several ranks hold an element that not all of them hold."""
        return (1 + 1e-6) / self.ranks < self._mean_share(tensor, number) < 1

    def combinations(self, relation: Relation) -> Iterator[tuple[dict[int, Kind], float]]:
        """Every combination of types the operator may run at, with its cost; those of the plan that is followed."""
        operator = relation.operator
        if self.planned is None:
            yield from self._allowed(relation)
        elif operator.boundary is not None:
            may_change = self.planned.changes_at(operator.boundary)
            for kinds, cost in self._allowed(relation):
                if may_change((kinds[operator.inputs[0]], kinds[operator.outputs[0]])):
                    yield kinds, cost
        else:
            for kinds, cost in self._allowed(relation):
                if self._is_planned(relation, kinds):
                    yield kinds, cost

    def _is_planned(self, relation: Relation, kinds: Mapping[int, Kind]) -> bool:
        """Whether an operator runs as in the plan where its operands are of these types."""
        assert self.planned is not None
        operator, use = relation.operator, self.use(relation, kinds)
        sums = use is not None and use.implementation.layer and use.implementation.sums
        if use is not None and sums and use.output != self.planned.sums.get(operator.module):
            return False
        if operator.call >= 0 and self._operators_of_calls[operator.call] == 1:
            run = (use.implementation.name, use.output) if use is not None and use.implementation.run else None
            if run != self._planned_run(operator):
                return False
        targets = self.static_targets(relation, kinds)
        for tensor in relation.inputs:
            place = self.leaves.get((self.position[id(operator)], tensor))
            if (
                place is not None
                and not self._is_made_local(tensor)
                and not self.planned.allows(place, targets.get(tensor))
            ):
                return False
        return True

    def _planned_run(self, operator: Operator) -> tuple[str, Pair | None] | None:
        """What makes the call of an operator in the plan that is followed, and what that does with its result."""
        assert self.planned is not None
        if operator.call < 0:
            return None
        call = self.graph.calls[operator.call]
        return self.planned.runs.get((call.module, call.site))

    def _is_made_local(self, tensor: int) -> bool:
        """Whether the model's own code makes a static tensor with local sizes, by the plan that is followed.

        In another call than the plan's that may be: of what it does the trace of the local model tells.
        """
        assert self.planned is not None
        maker = self._static_makers.get(tensor)
        if maker is None or maker.call < 0:
            return False
        call, known = self.graph.calls[maker.call], record(maker.name)
        may_be = self.planned.is_free and known is not None and known.uniform is not None
        return may_be or (call.module, call.site) in self.planned.made_local

    @cached_property
    def _static_makers(self) -> dict[int, Operator]:
        tensors = self.graph.tensors
        return {tensor: op for op in self.graph.operators for tensor in op.outputs if tensors[tensor].is_static}

    def _allowed(self, relation: Relation) -> Iterator[tuple[dict[int, Kind], float]]:
        """Every combination of types the operator may run at, with its cost."""
        inputs = [tensor for tensor in relation.inputs if tensor in self.dims]
        outputs = list(relation.outputs)
        rounds = bool(relation.operator.rounding)
        computed = self._compute(relation, None)
        for kind in (I,) if rounds else (I, R):
            same: dict[int, Kind] = dict.fromkeys((*inputs, *outputs), kind)
            yield same, computed
        linear = relation.linear
        known = record(relation.operator.name)
        if known is not None and known.zeros:  # of whatever type what lends the shape is: nothing flows back
            for source in (I, R, P):
                for target in (I, R, P):
                    made: dict[int, Kind] = {**dict.fromkeys(inputs, source), **dict.fromkeys(outputs, target)}
                    yield made, 0.0
        if linear and not rounds and all(self._may_be_partial(relation, tensor) for tensor in linear):
            kinds: dict[int, Kind] = {tensor: P if tensor in linear else R for tensor in inputs}
            yield kinds | dict.fromkeys(outputs, P), computed + _ELSEWHERE
        numbers = dict.fromkeys(n for tensor in (*inputs, *outputs) for n in self.touching[tensor])
        for number in numbers:
            found = self.sharded(relation, number)
            if not isinstance(found, str):
                yield from found
        if relation.operator.boundary is not None:
            yield from self._conversions(relation.operator, inputs[0], outputs[0])

    def sharded(self, relation: Relation, number: int) -> list[tuple[dict[int, Kind], float]] | str:
        """The operator on shards of one candidate, or why it may not run so."""
        axes = set(self.shardings[number].axes)
        for dim, because in relation.whole.items():
            if touches([dim], axes):
                return because
        inputs, outputs = [tensor for tensor in relation.inputs if tensor in self.dims], list(relation.outputs)
        contracted = touches(relation.contracted, axes)
        kinds: dict[int, Kind] = {}
        for tensor, dims in (*relation.inputs.items(), *relation.outputs.items()):
            if not touches(dims, axes):
                if tensor in self.dims:
                    kinds[tensor] = R
            elif tensor not in self.dims:  # static: every rank takes its part
                if not (self._convertible(relation, tensor) and self.shardings[number].divides(dims)):
                    return f"an operand {_shape(dims)} that no parameter went into cannot be cut at this call"
            elif number not in self.touching[tensor]:
                return f"a tensor {_shape(dims)} of it has the axis twice"
            else:
                kinds[tensor] = number
        if relation.draws and any(self._is_shared(tensor, number) for tensor in outputs):
            return "it would draw different numbers on ranks that hold the same"
        if relation.operator.rounding and any(self._is_shared(tensor, number) for tensor in outputs):
            return "it rounds the gradient of its result, of which ranks that hold the same have parts of a sum"
        cost = self._compute(relation, number) + self._updating(relation, axes)
        if not contracted:
            return [(kinds, cost)]
        summed = [dim for dim in relation.contracted if touches([dim], axes)]
        if any(self.shardings[number].ownership(dim).is_shared for dim in summed):
            return "it sums over the dim, and what several ranks hold would count several times"
        if any(kinds[tensor] == number for tensor in outputs):
            return "it sums over the dim, and has it in its result, too"
        found: list[tuple[dict[int, Kind], float]] = []
        added = relation.added_after_sum
        summing = [entry for entry in self._implementations(relation.operator, kinds) if entry.sums]
        for entry in summing:
            for after in entry.results(self.shard_sequence):
                sent = entry.sent(after, self._bytes(outputs[0]), self._shapes(relation))
                extra = sum(self.profile.collective(kind, size, self.ranks) for kind, size in sent)
                extra += _ELSEWHERE * (after == DEFERRED_SUM)
                result: Kind = after[1] if after else I
                last: Kind = I if after == DEFERRED_SUM else result
                types = dict.fromkeys(outputs, result) | dict.fromkeys(added & set(inputs), last)
                found.append((kinds | types, cost + extra))
        plain = not summing and not relation.needs_implementation
        if plain and all(self._may_be_partial(relation, tensor) for tensor in added):
            found.append((kinds | dict.fromkeys([*outputs, *(added & set(inputs))], P), cost))
        return found or self._unsummed(relation, kinds)

    def _unsummed(self, relation: Relation, kinds: Mapping[int, Kind]) -> str:
        """Why the ranks' parts of an operator's sum do not give its result."""
        if not relation.needs_implementation:
            return "what it adds to the sum over the dim must count once, which cannot be arranged at this call"
        for entry in self.implementations.of(relation.operator):
            tensor = operand_of(relation.operator, entry.operand)
            if entry.run is not None and tensor is not None and tensor in kinds:
                obstacle = self._obstacle(relation.operator, self.layout(tensor, kinds[tensor]))
                if obstacle:
                    return obstacle
        declared = ", ".join(entry.name for entry in self.implementations.of(relation.operator))
        fitting = f"none of those declared ({declared}) fits here" if declared else "none is declared"
        return f"only a parallel implementation can run it on parts of the dim, and {fitting}"

    def _implementations(self, operator: Operator, kinds: Mapping[int, Kind]) -> Iterator[Implementation]:
        """The parallel implementations that may run the operator where its inputs are of these types."""
        for entry in self.implementations.of(operator):
            tensor = operand_of(operator, entry.operand)
            if tensor is None or tensor not in kinds or not entry.fits(self.layout(tensor, kinds[tensor])):
                continue
            if entry.layer and tensor not in self.graph.parameters:
                continue  # computed from others, so that the layer has nothing to cut
            if entry.layer and self.planned is not None and not self.planned.may_replace(operator.module):
                continue
            if entry.run is not None and self._obstacle(operator, self.layout(tensor, kinds[tensor])):
                continue
            if not entry.shown or self.view_boundaries(tensor):
                yield entry

    def _obstacle(self, operator: Operator, layout: Layout) -> str:
        """Why a call cannot be made in another way; empty if it can.

        Features of the residual stream could be reduced, too, but every layer would gather them again: what sequence
        parallelism saves, with more collectives.
        """
        if not isinstance(layout, Shard) or not all(cut.is_fixed for cut in layout.cuts):
            return "it reduces the dim, which must be as long in every batch to be reduced in parts"
        if self._residual.intersection(axis for cut in layout.cuts for axis in cut.axes):
            return "it reduces the features of the residual stream, which every layer would have to gather again"
        if operator.call < 0 or self._operators_of_calls[operator.call] != 1:
            return "it reduces the dim in a call that runs other operators, too"
        return ""

    @cached_property
    def _residual(self) -> frozenset[int]:
        return residual_axes(self.relations)

    @cached_property
    def _operators_of_calls(self) -> Counter[int]:
        return Counter(operator.call for operator in self.graph.operators if operator.boundary is None)

    def _convertible(self, relation: Relation, tensor: int) -> bool:
        """Whether a static operand can be sliced, or made Partial, at the operator's call."""
        return (self.position[id(relation.operator)], tensor) in self.leaves

    def _may_be_partial(self, relation: Relation, tensor: int) -> bool:
        """Whether an operand can be the ranks' parts of a sum."""
        return tensor in self.dims or self._convertible(relation, tensor) or self._is_zero(tensor)

    def _is_zero(self, tensor: int) -> bool:
        """Whether a static tensor is all zeros, which are the ranks' parts of a sum of zeros, too."""
        maker = self._static_makers.get(tensor)
        known = record(maker.name) if maker is not None else None
        if maker is None or known is None:
            return False
        return known.zeros or (known.is_view and bool(maker.inputs) and self._is_zero(maker.inputs[0]))

    def _compute(self, relation: Relation, number: int | None) -> float:
        if relation.operator.boundary is not None or self.planned is not None:  # nothing is left to choose by price
            return 0.0
        (flops, touched, scores), share = self.work(relation), 1.0
        if number is not None:
            dims = relation.inputs | relation.outputs
            cut = [tensor for tensor in dims if tensor in self.dims and number in self.touching[tensor]]
            # A key head that several ranks hold meets each one's own query heads.
            share = min((self._largest_share(tensor, number) for tensor in cut), default=1.0)
            known = record(relation.operator.name)
            if known is not None and known.is_by_choice:
                share = self.profile.busiest(share)
            elif flops:  # a part of the values does not divide the scores
                flops = self._flops(relation, number) / share
            if scores and cut:  # a kernel has none: those in memory are no reason to share heads more evenly
                touched -= scores * (1 - min(self._mean_share(tensor, number) for tensor in cut) / share)
        return self.profile.compute(flops, touched, share)

    def _updating(self, relation: Relation, axes: Collection[int]) -> float:
        """The price of gathering what the operator writes into its static operands, a part of them on each rank."""
        cut = [tensor for tensor in updated(relation.operator) if touches(relation.inputs[tensor], axes)]
        size = sum(self.graph.tensors[tensor].bytes for tensor in cut)
        return self.profile.collective("all_gather", size, self.ranks) if cut else 0.0

    def _shapes(self, relation: Relation) -> dict[str, tuple[float, ...]]:
        """The operands' shapes at the priced step, by argument."""
        arguments = relation.operator.arguments
        tensors = {name: value.tensor for name, value in arguments if isinstance(value, Ref)}
        return {name: self.sizes.shape(tensor, relation.inputs[tensor]) for name, tensor in tensors.items()}

    def work(self, relation: Relation) -> tuple[float, float, float]:
        """Floating-point operations of an operator and the bytes it touches on whole tensors, and those of scores."""
        position = self.position[id(relation.operator)]
        if position not in self._works:
            dims, sizes = relation.inputs | relation.outputs, self.sizes

            def shape(tensor: int) -> tuple[float, ...]:
                return sizes.shape(tensor, dims[tensor])

            def without_scores(tensor: int) -> tuple[float, ...]:
                return (0,) if sizes.is_of_pairs(dims[tensor]) else shape(tensor)

            touched, rest = (count_touched(relation.operator, of, self.graph) for of in (shape, without_scores))
            self._works[position] = self._flops(relation), touched, touched - rest
        return self._works[position]

    def _flops(self, relation: Relation, number: int | None = None) -> float:
        """Floating-point operations of an operator on whole tensors; on shards, those of the rank with the most."""
        dims = relation.inputs | relation.outputs
        flops = count_flops(relation.operator, lambda tensor: self.sizes.shape_in_row(tensor, dims[tensor]))
        if flops and number is not None:
            shapes = {tensor: self.sizes.shape_in_row(tensor, found) for tensor, found in dims.items()}
            parts = {t: self.layout(t, number) if t in self.dims else self._shard(dims[t], number) for t in dims}
            cut = [(t, dim, owned) for t, part in parts.items() if isinstance(part, Shard) for dim, owned in part.dims]
            flops = 0.0
            for lengths in {tuple(owned.local_size(rank) for *_, owned in cut) for rank in range(self.ranks)}:
                local = {tensor: list(shape) for tensor, shape in shapes.items()}
                for (tensor, dim, owned), length in zip(cut, lengths, strict=True):
                    local[tensor][dim] = length * (local[tensor][dim] / owned.size)  # what grows does so in parts, too
                flops = max(flops, count_flops(relation.operator, local.__getitem__))
        # Each row attends to itself.
        return flops and flops * max(self.sizes.rows(tensor, found) for tensor, found in dims.items())

    def _conversions(self, operator: Operator, source: int, target: int) -> Iterator[tuple[dict[int, Kind], float]]:
        if operator.boundary is None or operator.boundary in self.fixed:
            return
        for (before, after), cost in self._sending(self._bytes(source)):
            if operator.boundary in self.with_constants and not {before, after} <= {"I", "R"}:
                continue  # the constant would be cut, gathered or summed with what another call gives
            if operator.module not in self.layers:  # a gather launches kernels of its own, unless a layer does it
                cost += self.profile.latency if before == "S" else _ELSEWHERE
                cost += _ELSEWHERE * (operator.boundary.side == "out")
            if isinstance(operator.boundary, CallPoint):
                cost += _ELSEWHERE
            befores = self._changeable(source) if before == "S" else (before,)
            afters = self._changeable(target) if after == "S" else (after,)
            for left in befores:
                for right in afters:
                    kept = self._held(target, right) if before == "P" else 0.0
                    if isinstance(left, int) and target in self._kept_in_parts and self._shards_tokens(source, left):
                        kept += self.profile.collective("all_gather", self._bytes(source), self.ranks)
                    yield {source: left, target: right}, cost + kept

    def _sending(self, size: float) -> list[tuple[Pair, float]]:
        """What every change of a tensor of so many bytes costs to send."""
        if size not in self._sent:
            self._sent[size] = [
                (pair, sum(self.profile.collective(kind, size, self.ranks) for kind in change.collectives))
                for pair, change in TRANSITIONS.items()
            ]
        return self._sent[size]

    @cached_property
    def _kept_in_parts(self) -> frozenset[int]:
        shown = [operator for tensor in self.graph.outputs for operator in self.view_boundaries(tensor)]
        runs = ((op, entry) for op in self.graph.operators for entry in self.implementations.of(op))
        return kept_in_parts(self.graph, runs, {operator.module for operator in shown})

    def _shards_tokens(self, tensor: int, number: int) -> bool:
        """Whether this candidate shards the tensor's tokens."""
        layout = self.layout(tensor, number)
        return isinstance(layout, Shard) and bool(layout.grows)

    def _changeable(self, tensor: int) -> tuple[int, ...]:
        """The candidates that a tensor can be brought to, and from, in a batch of any size."""
        return tuple([number for number in self.touching[tensor] if self._may_change(tensor, number)])

    def _may_change(self, tensor: int, number: int) -> bool:
        """Whether one collective brings a tensor there, and the parts' lengths tell how a batch of another size is cut.

        They do not for a part of the tokens where rows and tokens are one dim: how many there are of each is not told.
        """
        key = self._alike[tensor], number
        found = self._may_be_changed.get(key)
        if found is None:
            layout = self.layout(tensor, number)
            is_told = (
                not isinstance(layout, Shard) or not layout.grows or all(cut.is_told_by_all for cut in layout.cuts)
            )
            is_one_dim = not isinstance(layout, Shard) or len(layout.dims) == 1
            found = self._may_be_changed[key] = is_one_dim and is_told
        return found

    def layout(self, tensor: int, kind: Kind) -> Layout:
        """The layout of a tensor of this kind."""
        if isinstance(kind, str):
            return _TYPES[kind]
        key = self._alike[tensor], kind
        found = self._layouts.get(key)
        if found is None:
            found = self._layouts[key] = self._shard(self.dims[tensor], kind)
        return found

    def _shard(self, dims: Dims, number: int) -> Layout:
        sharding = self.shardings[number]
        cut = {at: sharding.cut(dim, self.growing) for at, dim in enumerate(dims) if touches([dim], sharding.axes)}
        cuts = {at: found for at, found in cut.items() if not found.ownership().is_whole}
        return Shard.of(cuts) if cuts else Replicate()

    def view_boundaries(self, tensor: int) -> tuple[Operator, ...]:
        """Where a sharded tensor that user code will see leaves the modules that made it; empty: nowhere.

        Several modules make it where their results are joined (a head for each codebook).
        """
        boundary, often = tuple[Operator, ...](), self.graph.run_again
        while (relation := self.producer.get(tensor)) is not None:
            operator = relation.operator
            crossing = operator.boundary
            if isinstance(crossing, Boundary) and crossing.side == "out" and crossing.module not in often:
                boundary = (operator,)
            varying = [t for t in relation.inputs if t in self.dims]
            if len(varying) > 1 and operator.name in _JOINS:
                found = [self.view_boundaries(t) for t in varying]
                makers = tuple({id(maker): maker for makers in found for maker in makers}.values())
                return makers if all(found) and len(makers) > 1 else boundary
            if len(varying) != 1 or any(t in self.graph.parameters for t in varying):
                return boundary
            tensor = varying[0]
        return boundary

    def use(self, relation: Relation, kinds: Mapping[int, Kind]) -> Use | None:
        """What runs the operator, where that is not the operator itself."""
        operator = relation.operator
        result = kinds[operator.outputs[0]] if operator.outputs else I
        for entry in self._implementations(operator, kinds):
            if not entry.sums:
                return Use(entry)
            for after in entry.results(self.shard_sequence):
                if result == (after[1] if after else I):
                    return Use(entry, after)
        return None

    def static_targets(self, relation: Relation, kinds: Mapping[int, Kind]) -> dict[int, Layout]:
        """The layouts that static operands must take where the others are sharded, or Partial; not those that stay."""
        static = [tensor for tensor in relation.inputs if tensor not in self.dims]
        if not static:
            return {}
        here = [kinds[tensor] for tensor in (*relation.inputs, *relation.outputs) if tensor in self.dims]
        number = next((kind for kind in here if isinstance(kind, int)), None)
        is_sum = kinds[relation.operator.outputs[0]] == P
        targets: dict[int, Layout] = {}
        for tensor in static:
            if number is not None:
                layout = self._shard(relation.inputs[tensor], number)
                if isinstance(layout, Shard):
                    targets[tensor] = layout
            linear = relation.added_after_sum if number is not None else relation.linear
            if is_sum and tensor in linear and not self._is_zero(tensor):
                targets[tensor] = Partial()
        return targets


def _shape(dims: Dims) -> str:
    return f"of shape {[dim.size for dim in dims]}"


def _resolved(relation: Relation, axes: Axes, known: dict[int, Dims]) -> Relation:
    """The relation with every dim in terms of its final axes.

    Args:
        relation: as its rule left it.
        axes: the axes.
        known: the dims of tensors that are resolved already, by the ``id`` of what they were before: what several
            relations share is resolved once, and is the same object in all of them.
    """

    def resolved(dims: Dims) -> Dims:
        found = known.get(id(dims))
        if found is None:
            found = known[id(dims)] = tuple(map(axes.resolve, dims))
        return found

    whole: dict[Dim, str] = {}
    for dim, because in relation.whole.items():
        whole.setdefault(axes.resolve(dim), because)
    return Relation(
        operator=relation.operator,
        inputs={tensor: resolved(dims) for tensor, dims in relation.inputs.items()},
        outputs={tensor: resolved(dims) for tensor, dims in relation.outputs.items()},
        whole=whole,
        contracted=[axes.resolve(dim) for dim in relation.contracted],
        linear=relation.linear,
        added_after_sum=relation.added_after_sum,
        needs_implementation=relation.needs_implementation,
        draws=relation.draws,
        counted=[axes.resolve(dim) for dim in relation.counted],
    )
