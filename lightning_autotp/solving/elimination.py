"""Minimisation of a sum of small tables, by variable elimination (dynamic programming over the graph's frontier).

Every variable takes one of a few values; every table gives the cost of the combinations it allows. Variables are
eliminated one by one: the tables that mention one are joined and minimised over it. The result is exact. Equal tables
are kept once, and an elimination step is remembered by its tables, so that the repeated layers of a model are solved
once. For that a step's result is stored relative to its least cost, which goes straight into the total: else the cost
of all layers before would make every layer's tables new. (Dechter, *Bucket elimination*, 1999.)

Rows are kept as arrays: joining some thousands of them one by one in Python would be most of the time of planning.

Where the joined table of a variable would be too large, the variable is left. What is left in the end is solved as an
integer program (:mod:`~lightning_autotp.solving.integer_program`): exactly, or, where its time is over before, with a
cost that no assignment is below.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from lightning_autotp.solving.integer_program import Contradiction, least_sum

Row = tuple[int, ...]


class NoAssignment(Exception):
    """No combination of values is allowed by every table."""

    def __init__(self, variable: int) -> None:
        super().__init__(f"no value of variable {variable} is allowed")
        self.variable = variable


MOST_ROWS = 20_000
"""Rows of a joined table up to which a variable is eliminated."""

MOST_SECONDS = 120.0
"""The most that the integer program of what is left may take."""


_LARGEST = 2**62  # up to which numbers of rows are multiplied


class _TooManyRows(Exception):
    """A joined table would be too large to go through."""


@dataclass(frozen=True)
class Assignment:
    """What was found.

    Attributes:
        values: of every variable.
        cost: what they cost.
        bound: what every assignment costs at least: ``cost``, where this one is known to be the cheapest.
    """

    values: dict[int, int]
    cost: float
    bound: float


@dataclass(frozen=True)
class Table:
    """Costs of the allowed combinations of some variables.

    Attributes:
        scope: the variables.
        rows: number of the interned rows.
    """

    scope: tuple[int, ...]
    rows: int


@dataclass(frozen=True, eq=False)
class _Rows:
    """The rows of a table.

    Attributes:
        values: a row each, in ascending order.
        costs: what each costs.
    """

    values: NDArray[np.int32]
    costs: NDArray[np.float64]

    @classmethod
    def of(cls, ordered: Sequence[tuple[Row, float]], width: int) -> _Rows:
        """Rows of so many values in ascending order, each with its cost."""
        values = np.array([row for row, _ in ordered], np.int32).reshape(len(ordered), width)
        return cls(values, np.array([cost for _, cost in ordered], np.float64))

    @cached_property
    def by_row(self) -> dict[Row, float]:
        """Costs by row."""
        return dict(zip(map(tuple, self.values.tolist()), self.costs.tolist(), strict=True))

    def place(self, row: Row) -> int:
        """Which of the rows this one is."""
        first, last = 0, len(self.values)
        for column, value in enumerate(row):
            part = self.values[first:last, column]
            first, last = (first + int(np.searchsorted(part, value, side)) for side in ("left", "right"))
        return first


@dataclass(frozen=True, eq=False)
class _Elimination:
    """The result of eliminating one variable from some tables.

    Attributes:
        rest: positions of the remaining variables.
        rows: number of the interned rows over them, of which the cheapest costs 0.
        best: the variable's best value for each of these rows.
        least: what the cheapest row costs.
    """

    rest: tuple[int, ...]
    rows: int
    best: NDArray[np.int32]
    least: float


class Elimination:
    """Collects tables, then finds the assignment of least total cost.

    Args:
        most_rows: rows of a joined table up to which a variable is eliminated.
    """

    def __init__(self, most_rows: int = MOST_ROWS) -> None:
        self._most_rows = most_rows
        self._rows: list[_Rows] = []
        self._numbers: dict[tuple[int, bytes, bytes], int] = {}
        self._added: dict[tuple[int, tuple[tuple[Row, float], ...]], int] = {}
        self._steps: dict[object, _Elimination] = {}
        self.tables: list[Table] = []

    def add(self, scope: Sequence[int], rows: dict[Row, float]) -> None:
        """Add a table: a cost for every allowed row of values of the scope's variables."""
        key = len(scope), tuple(sorted(rows.items()))
        number = self._added.get(key)
        if number is None:
            number = self._added[key] = self._intern(_Rows.of(key[1], len(scope)))
        self.tables.append(Table(tuple(scope), number))

    def repeat(self, table: Table, scope: Sequence[int]) -> None:
        """Add a table that says of these variables what another one, which was added, says of its own."""
        self.tables.append(Table(tuple(scope), table.rows))

    def _intern(self, rows: _Rows) -> int:
        key = (rows.values.shape[1], rows.values.tobytes(), rows.costs.tobytes())
        number = self._numbers.setdefault(key, len(self._rows))
        if number == len(self._rows):
            self._rows.append(rows)
        return number

    def rows(self, table: Table) -> Mapping[Row, float]:
        """What a table that was added says: a cost for every allowed row."""
        return self._rows[table.rows].by_row

    def cost(self, values: Mapping[int, int]) -> float:
        """What an assignment costs; infinity where a table does not allow it."""
        return sum(
            self.rows(table).get(tuple(values[variable] for variable in table.scope), math.inf) for table in self.tables
        )

    def solve(self, seconds: float = MOST_SECONDS) -> Assignment:
        """The assignment of least cost.

        Args:
            seconds: the most that the integer program of what is left may take.

        Raises:
            NoAssignment: if the tables contradict each other.
            NotFoundInTime: if too many variables hang together, and nothing was found in the time for them.
        """
        holders: dict[int, set[int]] = {}
        tables = dict(enumerate(self.tables))
        for number, table in tables.items():
            for variable in table.scope:
                holders.setdefault(variable, set()).add(number)
        around: dict[int, set[int]] = {variable: set() for variable in holders}  # variables in a table together
        for table in self.tables:
            for variable in table.scope:
                around[variable].update(table.scope)
        waiting = {variable: len(others) for variable, others in around.items()}
        queue = [(degree, variable) for variable, degree in waiting.items()]
        heapq.heapify(queue)
        choices: list[tuple[int, tuple[int, ...], _Elimination]] = []
        total = 0.0
        while queue:
            degree, variable = heapq.heappop(queue)
            if waiting.get(variable) != degree:
                continue  # it is gone, or was queued again with what its degree is by now
            del waiting[variable]
            numbers = sorted(holders[variable])
            try:
                scope, step = self._eliminate(variable, [tables[number] for number in numbers])
            except _TooManyRows:
                continue  # it is tried again when another one's elimination changes its tables
            del holders[variable]
            for number in numbers:
                del tables[number]
            choices.append((variable, scope, step))
            total += step.least
            if not scope:
                continue
            fresh = len(self.tables) + len(choices)
            tables[fresh] = Table(scope, step.rows)
            for other in scope:
                holders[other].difference_update(numbers)
                holders[other].add(fresh)
                around[other].update(scope)
                around[other].remove(variable)
                if waiting.get(other) != (degree := len(around[other])):
                    waiting[other] = degree
                    heapq.heappush(queue, (degree, other))
        values: dict[int, int] = {}
        bound = total
        if holders:
            try:
                values, least = least_sum([(table.scope, self.rows(table)) for table in tables.values()], seconds)
            except Contradiction as error:
                raise NoAssignment(min(holders)) from error
            bound += least
        best: dict[tuple[int, Row], int] = {}  # of alike layers it is looked up once
        for variable, scope, step in reversed(choices):
            row = tuple([values[other] for other in scope])
            if (id(step), row) not in best:
                best[id(step), row] = int(step.best[self._rows[step.rows].place(row)])
            values[variable] = best[id(step), row]
        if not holders:
            return Assignment(values, total, total)
        cost = self.cost(values)
        return Assignment(values, cost, min(cost, bound))

    def _eliminate(self, variable: int, tables: list[Table]) -> tuple[tuple[int, ...], _Elimination]:
        """Join the tables and minimise over the variable: the remaining scope, and the step."""
        place: dict[int, int] = {}
        placed = [(table.rows, *[place.setdefault(one, len(place)) for one in table.scope]) for table in tables]
        order, own = list(place), place[variable]
        key = (own, *placed)
        step = self._steps.get(key)
        if step is None:
            joined = _join([(scope, self._rows[rows]) for rows, *scope in placed], self._most_rows)
            if not len(joined.values):
                raise NoAssignment(variable)
            rest = tuple(position for position in range(len(order)) if position != own)
            left, values = joined.values[:, rest], joined.values[:, own]
            codes = _codes(left)
            cheapest = np.lexsort((values, joined.costs, codes))
            codes = codes[cheapest]
            first = cheapest[np.flatnonzero(np.append(True, codes[1:] != codes[:-1]))]
            costs = joined.costs[first]
            least = float(costs.min())
            rows = self._intern(_Rows(np.ascontiguousarray(left[first]), costs - least))
            step = self._steps[key] = _Elimination(rest, rows, values[first], least)
        return tuple([order[position] for position in step.rest]), step


def _codes(values: NDArray[np.int32]) -> NDArray[np.int64]:
    """A number for every row, in the same order as the rows: equal ones have the same."""
    codes = np.zeros(len(values), np.int64)
    for column in values.T:
        base = int(column.max(initial=0)) + 1
        if int(codes.max(initial=0)) > _LARGEST // base:
            codes = np.unique(codes, return_inverse=True)[1]
        codes = codes * base + column
    return codes


def _join(tables: Iterable[tuple[Sequence[int], _Rows]], most_rows: int) -> _Rows:
    """Rows over all positions 0..n-1, in this order of positions, that every table allows; costs add up."""
    scope: tuple[int, ...] = ()
    values, costs = np.zeros((1, 0), np.int32), np.zeros(1)
    for other_scope, other in tables:
        shared = [position for position in other_scope if position in scope]
        added = [position for position in other_scope if position not in scope]
        ours = values[:, [scope.index(position) for position in shared]]
        theirs = other.values[:, [other_scope.index(position) for position in shared]]
        codes = _codes(np.concatenate([ours, theirs]))
        ours_codes, theirs_codes = codes[: len(ours)], codes[len(ours) :]
        by_code = np.argsort(theirs_codes, kind="stable")
        starts, stops = (np.searchsorted(theirs_codes[by_code], ours_codes, side) for side in ("left", "right"))
        counts = stops - starts
        total = int(counts.sum())
        if total > most_rows:
            raise _TooManyRows
        left = np.repeat(np.arange(len(values)), counts)
        right = by_code[np.arange(total) + np.repeat(starts - (np.cumsum(counts) - counts), counts)]
        fresh = other.values[right][:, [other_scope.index(position) for position in added]]
        values, costs = np.concatenate([values[left], fresh], 1), costs[left] + other.costs[right]
        scope = (*scope, *added)
    return _Rows(values[:, [scope.index(position) for position in range(len(scope))]], costs)
