"""Why parameters are whole: for every dim of one, the first operator that refuses its axis.

Say that a parameter were cut along a dim: then an operator that reads it must run on shards, and so what it reads and
makes besides must lie in certain ways, and so on with the operators around it. This is followed from the parameter,
the nearest operators first, until one has no types left that it may run at: that is the operator which refuses. It may
be far from the parameter (a softmax over heads), and on another path than the parameter's own (a partner that cannot
be cut).

It is followed twice. With the places where a layout may change, it tells whether the cut is possible at all. Where it
is, the price decided, and what is said besides is what the axis itself runs into: nothing is gathered on the way then.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import takewhile

from lightning_autotp.layouts.dims import leaves, spelled, touches
from lightning_autotp.layouts.plan import Reason
from lightning_autotp.layouts.types import Layout, Shard
from lightning_autotp.operators import Dims
from lightning_autotp.operators.graph import Operator
from lightning_autotp.solving.elimination import Elimination, NoAssignment, Row
from lightning_autotp.solving.integer_program import NotFoundInTime
from lightning_autotp.solving.planned import Kind
from lightning_autotp.solving.tables import Tables

_PRICED = 4
"""Cuts of whole matrices whose price is worked out, the largest matrices first: each is solved for once more."""

_SECONDS = 5.0
"""The most that an integer program may take for each of these."""


@dataclass(frozen=True)
class _Obstacle:
    """What stands against a cut: in words, and the operator, if it is one."""

    why: str
    operator: Operator | None = None


@dataclass(frozen=True)
class _Along:
    """What there is to say of one dim: what stands against cutting it, and whether it could be cut all the same."""

    dim: int
    length: int
    obstacle: _Obstacle | None
    is_possible: bool


class Reasons:
    """Tells why parameters of a solved graph are whole.

    Args:
        tables: the tables that it was solved by.
        problem: all of its tables, and those of what the user pinned.
        domains: the kinds of every tensor that the numbers in the tables stand for.
        pinned: what the user pinned: by name of a parameter the dim, or ``None`` for whole.
        least: what the solution costs.
    """

    def __init__(
        self,
        tables: Tables,
        problem: Elimination,
        domains: Mapping[int, tuple[Kind, ...]],
        pinned: Mapping[str, int | None],
        least: float = math.inf,
    ) -> None:
        self._tables, self._problem, self._domains, self._pinned, self._least = tables, problem, domains, pinned, least
        self._found: dict[bool, list[dict[tuple[int, ...], tuple[int, ...]]]] = {}

    def of_whole(self, layouts: Mapping[int, Layout]) -> dict[str, tuple[Reason, ...]]:
        """Why each parameter is whole: by its name a reason for every dim, the most telling first.

        The narrower the module that holds all parameters with a dim's axis, the more its reason tells: the hidden size
        runs through the whole model, and a norm refuses it always; heads, features and experts stay in one block. Of
        axes that reach as far as each other the longer dim's tells more. After all these come dims that the operator
        refuses which reads the parameter itself (a kernel's positions), and those of length 1.
        """
        parameters = self._tables.graph.parameters
        whole = [tensor for tensor in parameters if not isinstance(layouts.get(tensor), Shard)]
        prices_left = _PRICED
        found: dict[str, tuple[Reason, ...]] = {}
        for tensor in sorted(whole, key=lambda tensor: -self._tables.graph.tensors[tensor].bytes):
            reasons = []
            for along in sorted(self._of(tensor), key=lambda along: self._telling(tensor, along)):
                cost = None
                if along.is_possible and len(self._shape(tensor)) > 1 and prices_left:
                    cost = self._price(tensor, along.dim)
                    prices_left -= 1
                reasons.append(self._reason(along, cost))
            found[parameters[tensor]] = tuple(reasons)
        return found

    def obstacle(self, name: str, dim: int) -> Reason | None:
        """Why a parameter cannot be cut along a dim; ``None`` where nothing is found that stands against it."""
        tensor = next((tensor for tensor, known in self._tables.graph.parameters.items() if known == name), None)
        if tensor is None:
            return Reason(dim, 0, _UNUSED)
        shape = self._shape(tensor)
        if not 0 <= dim < len(shape):
            return Reason(dim, 0, f"it has the shape {list(shape)}; dims are counted from 0")
        along = self._along(tensor, dim)
        return None if along.is_possible else self._reason(along, None)

    def _price(self, tensor: int, dim: int) -> float | None:
        """What it costs at least to cut a parameter along a dim; infinite where that turns out to be impossible."""
        cut = [code for code, kind in enumerate(self._domains[tensor]) if self._tables.cut(tensor, kind) == dim]
        self._problem.add((tensor,), {(code,): 0.0 for code in cut})
        try:
            return self._problem.solve(_SECONDS).bound
        except NoAssignment:
            return math.inf
        except NotFoundInTime:
            return None
        finally:
            self._problem.tables.pop()

    def _shape(self, tensor: int) -> tuple[int, ...]:
        return self._tables.graph.tensors[tensor].shape

    def _of(self, tensor: int) -> list[_Along]:
        name, shape = self._tables.graph.parameters[tensor], self._shape(tensor)
        if name in self._pinned and self._pinned[name] is None:
            pinned = _Obstacle("keep_whole= says that it stays whole")
            return [_Along(dim, length, pinned, False) for dim, length in enumerate(shape)]
        return [self._along(tensor, dim) for dim in range(len(shape))]

    def _telling(self, tensor: int, along: _Along) -> tuple[bool, bool, int, int, int]:
        """The lower, the more the reason of this dim tells."""
        dims = self._tables.dims.get(tensor)
        reach = [len(self._reach[axis.id]) for axis in leaves(dims[along.dim])] if dims else []
        refusing = along.obstacle.operator if along.obstacle is not None else None
        reads = refusing is not None and any(self._tables.dims.get(read) == dims for read in refusing.inputs)
        return along.length == 1, reads, -min(reach, default=0), -along.length, along.dim

    @cached_property
    def _reach(self) -> dict[int, tuple[str, ...]]:
        """Of every axis the path of the module that holds all parameters with it: at least a layer's whole block."""
        graph = self._tables.graph
        owners = {tensor: tuple(name.split(".")[:-1]) for tensor, name in graph.parameters.items()}
        inner = {owner[:end] for owner in owners.values() for end in range(len(owner))}
        found: dict[int, tuple[str, ...]] = {}
        for tensor, owner in owners.items():
            block = owner if owner in inner else owner[:-1]
            for axis in {axis.id for dim in self._tables.dims.get(tensor, ()) for axis in leaves(dim)}:
                both = zip(found.get(axis, block), block, strict=False)
                found[axis] = tuple(ours for ours, _ in takewhile(lambda pair: pair[0] == pair[1], both))
        return found

    def _reason(self, along: _Along, cost: float | None) -> Reason:
        why = along.obstacle.why if along.obstacle is not None else ""
        if along.is_possible and cost == math.inf:
            why = why or "no layouts of the tensors around it go together with this cut"
        elif along.is_possible:
            more = "costs more than leaving it whole" if cost is None else _compared(cost, self._least)
            why = f"{why}; cutting it only up to there {more}" if why else f"could be cut, but that {more}"
        operator = along.obstacle.operator if along.obstacle is not None else None
        if operator is None:
            return Reason(along.dim, along.length, why)
        name = operator.name if operator.boundary is None else f"boundary {operator.boundary}"
        return Reason(along.dim, along.length, why, name, operator.module, operator.source)

    # -- one dim -----------------------------------------------------------------------------------------------------

    def _along(self, tensor: int, dim: int) -> _Along:
        length = self._shape(tensor)[dim]
        if tensor not in self._tables.dims:
            return _Along(dim, length, _Obstacle(_UNUSED), False)
        dims = self._tables.dims[tensor]
        place = {axis.id: position for position, axis in enumerate(leaves(dims[dim]))}

        def outermost(number: int) -> int:
            return min(place.get(axis, len(place)) for axis in self._tables.shardings[number].axes)

        numbers = [number for number in self._tables.touching[tensor] if self._tables.cut(tensor, number) == dim]
        numbers.sort(key=outermost)  # what is sharded is the outer factor, if it can be
        if not numbers:
            return _Along(dim, length, self._indivisible(dims, dim), False)
        obstacle = self._refused(tensor, numbers[0], converting=True)
        is_possible = obstacle is None or any(
            self._refused(tensor, number, converting=True) is None for number in numbers[1:]
        )
        if is_possible and self._is_whole_around(tensor, numbers[0]):
            obstacle = None
        elif is_possible:
            obstacle = self._refused(tensor, numbers[0], converting=False)
        return _Along(dim, length, obstacle, is_possible)

    def _indivisible(self, dims: Dims, dim: int) -> _Obstacle:
        """Why no candidate cuts a parameter along a dim."""
        axes = {axis.id for axis in leaves(dims[dim])}
        if not axes:
            return _Obstacle("a dim of length 1")
        candidates = [sharding for sharding in self._tables.shardings if axes.intersection(sharding.axes)]
        if any(candidate.divides(dims) for candidate in candidates):
            return _Obstacle("it can be cut only together with another dim")
        if candidates:
            others = [at for at, other in enumerate(dims) if at != dim and touches([other], candidates[0].axes)]
            twice = f"dim {others[0]} has the same axis, and both would be cut" if others else "it has the axis twice"
            return _Obstacle(twice)
        units = f"no unit of it ({spelled(dims[dim])}) divides among {self._tables.ranks} ranks"
        return _Obstacle(units, self._tables.axes.divided_by(dims[dim]))

    # -- following an axis -------------------------------------------------------------------------------------------

    def _refused(self, tensor: int, number: int, *, converting: bool) -> _Obstacle | None:
        """The first operator that a parameter cut by a candidate leaves no types to run at; ``None`` if all have some.

        Args:
            tensor: the parameter.
            number: the candidate.
            converting: whether shards may be made of other types, and others of shards, where a layout may change.
        """
        left, narrowed = {tensor: self._only(tensor, number)}, dict[int, int]()
        found = self._followed((tensor,), left, self._alone, converting, narrowed)
        return None if found is None else self._conflict(found[0], tensor, number, found[1], converting, narrowed)

    def _is_whole_around(self, tensor: int, number: int) -> bool:
        """Whether a parameter can be cut by a candidate, nothing being gathered, with all whole that it does not cut.

        Where it can, nothing refuses it, which :meth:`_refused` would know only after it has followed what is whole
        through the whole model, for the parameters of each layer.
        """
        if not self._all_whole:
            return False
        near = self._around[number]
        left = {variable: self._alone[variable] for variable in near} | {tensor: self._only(tensor, number)}
        starts: tuple[Sequence[int], ...] = (tensor,), near
        return all(self._followed(start, left, self._all_whole, False, {}) is None for start in starts)

    def _followed(
        self,
        start: Sequence[int],
        left: dict[int, int],
        others: Mapping[int, int],
        converting: bool,
        narrowed: dict[int, int],
    ) -> tuple[int, tuple[frozenset[int], ...]] | None:
        """The first operator that has no types left to run at, and the types of its variables; ``None`` if all have.

        Args:
            start: the variables around which operators are asked first.
            left: the types of some variables, which are narrowed.
            others: the types of all others.
            converting: as for :meth:`_refused`.
            narrowed: takes for each variable that is narrowed by which operator.
        """
        tables, readers = self._tables.tables, self._readers
        queue = deque(dict.fromkeys(at for variable in start for at in readers[variable]))
        waiting = {*queue}
        known = self._known(converting)
        while queue:
            at = queue.popleft()
            waiting.remove(at)
            scope = tables[at].scope
            types = tuple([left.get(variable) or others[variable] for variable in scope])
            kept = known[at].get(types)
            if kept is None:
                kept = known[at][types] = self._kept(at, converting, types)
            if kept == types:
                continue
            if not kept:
                return at, tuple(map(_codes, types))
            for variable, before, after in zip(scope, types, kept, strict=True):
                if after != before:
                    left[variable], narrowed[variable] = after, at
                    for reader in readers[variable]:
                        if reader not in waiting and reader != at:
                            waiting.add(reader)
                            queue.append(reader)
        return None

    def _conflict(
        self,
        at: int,
        tensor: int,
        number: int,
        codes: tuple[frozenset[int], ...],
        converting: bool,
        narrowed: Mapping[int, int],
    ) -> _Obstacle:
        """Why an operator has no types left to run at, its variables having only these."""
        relation, scope = self._tables.relations[at], self._tables.tables[at].scope
        forced = [self._domains[v][code] for v, few in zip(scope, codes, strict=True) if len(few) == 1 for code in few]
        for kind in dict.fromkeys((number, *forced)):
            if isinstance(kind, int) and kind in forced:
                found = self._tables.sharded(relation, kind)
                if isinstance(found, str):
                    return _Obstacle(found, relation.operator)
        for position, variable in enumerate(scope):
            others = [self._any(variable) if place == position else few for place, few in enumerate(codes)]
            if variable != tensor and variable in self._because and _within(self._rows(at, converting), others):
                return _Obstacle(self._because[variable], relation.operator)
        if "P" in forced:
            return _Obstacle("it is given the ranks' parts of a sum, and is not linear in them", relation.operator)
        # It only passes on what others need: which of them needs the whole dim?
        queue, seen = deque((at,)), {at}
        while queue:
            here = queue.popleft()
            found = self._tables.sharded(self._tables.relations[here], number)
            if isinstance(found, str):
                return _Obstacle(found, self._tables.relations[here].operator)
            for variable in self._tables.tables[here].scope:
                before = narrowed.get(variable, at)
                if before not in seen:
                    seen.add(before)
                    queue.append(before)
        # Or what reads the tensor that a boundary passes on?
        passed = deque([relation] if relation.operator.boundary is not None else [])
        while passed:
            for output in passed.popleft().outputs:
                for reader in (self._tables.relations[position] for position in self._readers.get(output, ())):
                    found = self._tables.sharded(reader, number)
                    if isinstance(found, str):
                        return _Obstacle(found, reader.operator)
                    if reader.operator.boundary is not None and output in reader.operator.inputs:
                        passed.append(reader)
        return _Obstacle("the types that its operands would have do not go together", relation.operator)

    @cached_property
    def _readers(self) -> dict[int, list[int]]:
        """The positions, among the relations, of those with a variable."""
        found: dict[int, list[int]] = {}
        for at, table in enumerate(self._tables.tables):
            for variable in table.scope:
                found.setdefault(variable, []).append(at)
        return found

    def _kept(self, at: int, converting: bool, types: tuple[int, ...]) -> tuple[int, ...]:
        """Of these types of its variables, those at which an operator may run: of each variable; empty if none are.

        Types are bits: following an axis through a deep model asks this for every operator.
        """
        rows = _within(self._rows(at, converting), tuple(map(_codes, types)))
        return tuple(map(_types, zip(*rows, strict=True)))

    def _known(self, converting: bool) -> list[dict[tuple[int, ...], tuple[int, ...]]]:
        """For every operator what :meth:`_kept` has found: one for those of alike layers, which have the same table."""
        if converting not in self._found:
            alike: dict[tuple[int, int | None], dict[tuple[int, ...], tuple[int, ...]]] = {}
            self._found[converting] = [
                alike.setdefault((table.rows, None if converting else self._told_apart(at)), {})
                for at, table in enumerate(self._tables.tables)
            ]
        return self._found[converting]

    def _told_apart(self, at: int) -> int | None:
        """What tells an operator from others with its table, where nothing may be converted: which kinds are the same.

        At a boundary whose tensors may be of the same kinds, the numbers of these say it; else it is like no other.
        """
        if self._tables.relations[at].operator.boundary is None:
            return None
        first, *rest = [self._domains[variable] for variable in self._tables.tables[at].scope]
        return _SAME_KINDS if all(domain == first for domain in rest) else at

    def _rows(self, at: int, converting: bool) -> Collection[Row]:
        """The combinations of types at which an operator may run."""
        rows = self._problem.rows(self._tables.tables[at])
        operator = self._tables.relations[at].operator
        if converting or operator.boundary is None:
            return rows.keys()
        domains = [self._domains[variable] for variable in self._tables.tables[at].scope]
        kinds = {row: [domain[code] for domain, code in zip(domains, row, strict=True)] for row in rows}
        return [row for row, (a, *rest) in kinds.items() if rest in ([], [a]) or {str} == {*map(type, (a, *rest))}]

    def _only(self, tensor: int, number: int) -> int:
        """That a tensor is cut by this candidate, as bits."""
        return 1 << self._domains[tensor].index(number)

    def _any(self, variable: int) -> frozenset[int]:
        return frozenset(range(len(self._domains[variable])))

    @cached_property
    def _alone(self) -> dict[int, int]:
        """The types that each variable may have by itself, as bits."""
        return {variable: _types(self._restricted.get(variable) or self._any(variable)) for variable in self._domains}

    @cached_property
    def _all_whole(self) -> dict[int, int]:
        """The types that each variable may have where nothing is cut, as bits; none if that cannot be."""
        left = {variable: types & _WHOLE for variable, types in self._alone.items()}
        possible = all(left.values()) and self._followed([*self._readers], left, {}, False, {}) is None
        return left if possible else {}

    @cached_property
    def _around(self) -> dict[int, list[int]]:
        """The variables that each candidate cuts."""
        found: dict[int, list[int]] = {}
        for variable in self._readers:
            for number in self._tables.touching[variable]:
                found.setdefault(number, []).append(variable)
        return found

    @cached_property
    def _restricted(self) -> dict[int, frozenset[int]]:
        """Of parameters, returned tensors and what is pinned."""
        found: dict[int, frozenset[int]] = {}
        for table in self._problem.tables:
            if len(table.scope) == 1:
                (variable,) = table.scope
                codes = frozenset(code for (code,) in self._problem.rows(table))
                found[variable] = found.get(variable, codes) & codes
        return found

    @cached_property
    def _because(self) -> dict[int, str]:
        """Why variables may have few types by themselves."""
        first = self._tables.first
        found = {first.get(tensor, tensor): "the model returns its result" for tensor in self._tables.graph.outputs}
        for tensor, name in self._tables.graph.parameters.items():
            if name in self._pinned:
                dim = self._pinned[name]
                how = "whole, as keep_whole= says" if dim is None else f"cut along dim {dim}, as cut= says"
                found[tensor] = f"its operand {name} is {how}"
        return found


_SAME_KINDS = -1

_WHOLE = 0b11
"""Invariant and Replicate, the first types of every variable, as bits."""

_UNUSED = "not used in the traced forward"


def _types(codes: Iterable[int]) -> int:
    """Types as bits."""
    return sum(1 << code for code in set(codes))


def _codes(types: int) -> frozenset[int]:
    """The types that are set."""
    return frozenset(code for code in range(types.bit_length()) if types >> code & 1)


def _within(rows: Collection[Row], codes: Sequence[frozenset[int]]) -> list[Row]:
    """The rows in which every variable has one of its types."""
    return [row for row in rows if all(code in few for code, few in zip(row, codes, strict=True))]


def _compared(cost: float, least: float) -> str:
    """Two prices, with as many decimals as tell them apart."""
    for decimals in range(4):
        ours, theirs = (f"{seconds * 1e6:,.{decimals}f}" for seconds in (cost, least))
        if ours != theirs and cost > least:
            return f"costs more ({ours} us instead of {theirs} us a step)"
    return "costs as much as leaving it whole"
