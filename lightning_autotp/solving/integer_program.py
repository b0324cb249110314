"""The least sum of tables as an integer program, for what variable elimination cannot join; HiGHS solves it.

Every value of a variable is a 0/1 column, every row of a table a column between 0 and 1. Of a variable's values one is
taken, and of the rows of a table that have a value as much as of the value. Then whole values mean whole rows, so that
only the former must be asked to be integers. (The local polytope of Wainwright and Jordan, *Graphical models,
exponential families, and variational inference*, 2008.)
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
from scipy.optimize import Bounds, LinearConstraint, milp
from scipy.sparse import coo_array

_UNIT = 1e-6
"""Costs are seconds, of which HiGHS' tolerances would swallow the small ones: it is given microseconds."""


class NotFoundInTime(Exception):
    """No allowed assignment was found within the time."""


class Contradiction(Exception):
    """No assignment is allowed by every table."""


def least_sum(
    tables: Sequence[tuple[tuple[int, ...], Mapping[tuple[int, ...], float]]], seconds: float
) -> tuple[dict[int, int], float]:
    """An assignment of least total cost, or the best one found within the time.

    Args:
        tables: the variables of each, and a cost for every row of values that it allows.
        seconds: the most time to take.

    Returns:
        A value for every variable, and a cost that no assignment is below: that of this one, where it is the least.

    Raises:
        NotFoundInTime: if the time was over before there was any.
        Contradiction: if there is none.
    """
    columns: dict[int, dict[int, int]] = {}  # by variable and value
    for scope, rows in tables:
        for place, variable in enumerate(scope):
            for value in {row[place] for row in rows}:
                columns.setdefault(variable, {}).setdefault(value, -1)
    entries: list[tuple[int, int, float]] = []  # constraint, column, factor
    totals: list[float] = []
    wholes = 0
    for values in columns.values():
        for value in values:
            values[value] = wholes
            entries.append((len(totals), wholes, 1.0))
            wholes += 1
        totals.append(1.0)
    costs = [0.0] * wholes
    for scope, rows in tables:
        taken: list[dict[int, int]] = []  # the constraints of the table's variables, by value
        for variable in scope:
            taken.append({value: len(totals) + place for place, value in enumerate(columns[variable])})
            entries += [(taken[-1][value], column, -1.0) for value, column in columns[variable].items()]
            totals += [0.0] * len(columns[variable])
        for row, cost in rows.items():
            entries += [(taken[place][value], len(costs), 1.0) for place, value in enumerate(row)]
            costs.append(cost / _UNIT)
    constraint, column, factor = zip(*entries, strict=True)
    matrix = coo_array((factor, (constraint, column)), shape=(len(totals), len(costs))).tocsr()
    found = milp(
        np.array(costs),
        integrality=np.arange(len(costs)) < wholes,
        bounds=Bounds(0, 1),
        constraints=LinearConstraint(matrix, totals, totals),
        options={"time_limit": seconds, "mip_rel_gap": 0.0},
    )
    if found.status == 2:
        raise Contradiction
    if found.x is None:
        raise NotFoundInTime
    assignment = {
        variable: next(value for value, column in values.items() if found.x[column] > 0.5)
        for variable, values in columns.items()
    }
    return assignment, found.mip_dual_bound * _UNIT
