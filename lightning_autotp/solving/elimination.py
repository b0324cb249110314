"""Minimisation of a sum of small tables, by variable elimination (dynamic programming over the graph's frontier).

Every variable takes one of a few values; every table gives the cost of the combinations it allows. Variables are
eliminated one by one: the tables that mention one are joined and minimised over it. The result is exact. Equal tables
are kept once, and an elimination step is remembered by its tables, so that the repeated layers of a model are solved
once. For that a step's result is stored relative to its least cost, which goes straight into the total: else the cost
of all layers before would make every layer's tables new. (Dechter, *Bucket elimination*, 1999.)

Where the joined table of a variable would be too large, the variable is left. What is left in the end is solved as an
integer program (:mod:`~lightning_autotp.solving.integer_program`): exactly, or, where its time is over before, with a
cost that no assignment is below.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

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


@dataclass(frozen=True)
class _Step:
    """The result of eliminating one variable from some tables.

    Attributes:
        rest: positions of the remaining variables.
        rows: number of the interned rows over them, of which the cheapest costs 0.
        best: the variable's best value for each row.
        least: what the cheapest row costs.
    """

    rest: tuple[int, ...]
    rows: int
    best: dict[Row, int]
    least: float


class Elimination:
    """Collects tables, then finds the assignment of least total cost.

    Args:
        most_rows: rows of a joined table up to which a variable is eliminated.
    """

    def __init__(self, most_rows: int = MOST_ROWS) -> None:
        self._most_rows = most_rows
        self._rows: list[dict[Row, float]] = []
        self._numbers: dict[tuple[tuple[Row, float], ...], int] = {}
        self._steps: dict[object, _Step] = {}
        self.tables: list[Table] = []

    def add(self, scope: Sequence[int], rows: dict[Row, float]) -> None:
        """Add a table: a cost for every allowed row of values of the scope's variables."""
        self.tables.append(Table(tuple(scope), self._intern(rows)))

    def _intern(self, rows: dict[Row, float]) -> int:
        key = tuple(sorted(rows.items()))
        number = self._numbers.setdefault(key, len(self._rows))
        if number == len(self._rows):
            self._rows.append(rows)
        return number

    def rows(self, table: Table) -> Mapping[Row, float]:
        """What a table that was added says: a cost for every allowed row."""
        return self._rows[table.rows]

    def cost(self, values: Mapping[int, int]) -> float:
        """What an assignment costs; infinity where a table does not allow it."""
        return sum(
            self._rows[table.rows].get(tuple(values[variable] for variable in table.scope), math.inf)
            for table in self.tables
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

        def degree(variable: int) -> int:
            return len({other for number in holders[variable] for other in tables[number].scope})

        queue = [(degree(variable), variable) for variable in holders]
        heapq.heapify(queue)
        choices: list[tuple[int, tuple[int, ...], dict[Row, int]]] = []
        total = 0.0
        while queue:
            expected, variable = heapq.heappop(queue)
            if variable not in holders:
                continue
            if (now := degree(variable)) != expected:
                heapq.heappush(queue, (now, variable))
                continue
            numbers = sorted(holders[variable])
            try:
                scope, step = self._eliminate(variable, [tables[number] for number in numbers])
            except _TooManyRows:
                continue  # it is tried again when another one's elimination changes its tables
            del holders[variable]
            for number in numbers:
                del tables[number]
            choices.append((variable, scope, step.best))
            total += step.least
            if not scope:
                continue
            fresh = len(self.tables) + len(choices)
            tables[fresh] = Table(scope, step.rows)
            for other in scope:
                holders[other] = (holders[other] - set(numbers)) | {fresh}
                heapq.heappush(queue, (degree(other), other))
        values: dict[int, int] = {}
        bound = total
        if holders:
            try:
                values, least = least_sum([(table.scope, self.rows(table)) for table in tables.values()], seconds)
            except Contradiction as error:
                raise NoAssignment(min(holders)) from error
            bound += least
        for variable, scope, best in reversed(choices):
            values[variable] = best[tuple(values[other] for other in scope)]
        if not holders:
            return Assignment(values, total, total)
        cost = self.cost(values)
        return Assignment(values, cost, min(cost, bound))

    def _eliminate(self, variable: int, tables: list[Table]) -> tuple[tuple[int, ...], _Step]:
        """Join the tables and minimise over the variable: the remaining scope, and the step."""
        order = list(dict.fromkeys(other for table in tables for other in table.scope))
        place = {other: position for position, other in enumerate(order)}
        key = (place[variable], *((tuple(place[other] for other in table.scope), table.rows) for table in tables))
        if key not in self._steps:
            joined = _join(
                [(tuple(place[other] for other in table.scope), self._rows[table.rows]) for table in tables],
                self._most_rows,
            )
            rest = tuple(position for position in range(len(order)) if position != place[variable])
            costs: dict[Row, float] = {}
            best: dict[Row, int] = {}
            for row, cost in sorted(joined.items()):
                left = tuple(row[position] for position in rest)
                if left not in costs or cost < costs[left]:
                    costs[left], best[left] = cost, row[place[variable]]
            if not costs:
                raise NoAssignment(variable)
            least = min(costs.values())
            rows = self._intern({left: cost - least for left, cost in costs.items()})
            self._steps[key] = _Step(rest, rows, best, least)
        step = self._steps[key]
        return tuple(order[position] for position in step.rest), step


def _join(tables: Iterable[tuple[tuple[int, ...], dict[Row, float]]], most_rows: int) -> dict[Row, float]:
    """Rows over all positions 0..n-1, in order, that every table allows; costs add up."""
    scope: tuple[int, ...] = ()
    rows: dict[Row, float] = {(): 0.0}
    for other_scope, other_rows in tables:
        shared = [position for position in other_scope if position in scope]
        added = [position for position in other_scope if position not in scope]
        index: dict[Row, list[tuple[Row, float]]] = {}
        for row, cost in other_rows.items():
            by_position = dict(zip(other_scope, row, strict=True))
            entry = (tuple(by_position[position] for position in added), cost)
            index.setdefault(tuple(by_position[position] for position in shared), []).append(entry)
        where = [scope.index(position) for position in shared]
        widest = max((len(entries) for entries in index.values()), default=0)
        if (
            widest * len(rows) > most_rows
            and sum(len(index.get(tuple(row[position] for position in where), ())) for row in rows) > most_rows
        ):
            raise _TooManyRows
        rows = {
            row + extra: cost + more
            for row, cost in rows.items()
            for extra, more in index.get(tuple(row[position] for position in where), ())
        }
        scope = (*scope, *added)
    where = [scope.index(position) for position in range(len(scope))]
    return {tuple(row[position] for position in where): cost for row, cost in rows.items()}
