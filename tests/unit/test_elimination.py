from __future__ import annotations

import itertools
import time
from random import Random

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from lightning_autotp.solving.elimination import MOST_ROWS, Elimination, NoAssignment
from lightning_autotp.solving.integer_program import NotFoundInTime

Problem = list[tuple[tuple[int, ...], dict[tuple[int, ...], float]]]


@st.composite
def problems(draw: st.DrawFn) -> tuple[int, Problem]:
    """Up to five variables of up to three values, each in some table."""
    count = draw(st.integers(1, 5))
    scopes = [(variable,) for variable in range(count)]
    scopes += draw(st.lists(st.permutations(range(count)).map(lambda p: tuple(p[:3])), max_size=4))
    tables: Problem = []
    for scope in scopes:
        rows = list(itertools.product(range(3), repeat=len(scope)))
        chosen = draw(st.lists(st.sampled_from(rows), min_size=1, unique=True))
        tables.append((scope, {row: float(draw(st.integers(0, 20))) for row in chosen}))
    return count, tables


@pytest.mark.parametrize("most_rows", [MOST_ROWS, 4, 0])
@given(problem=problems())
@settings(max_examples=100, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_the_optimum_is_that_of_exhaustive_search(problem: tuple[int, Problem], most_rows: int) -> None:
    """Of elimination, of an integer program of everything, and of one of what elimination left."""
    count, tables = problem

    def total(values: tuple[int, ...]) -> float | None:
        costs = [rows.get(tuple(values[v] for v in scope)) for scope, rows in tables]
        return None if None in costs else sum(cost for cost in costs if cost is not None)

    costs = [cost for values in itertools.product(range(3), repeat=count) if (cost := total(values)) is not None]
    elimination = Elimination(most_rows)
    for scope, rows in tables:
        elimination.add(scope, rows)
    if not costs:
        with pytest.raises(NoAssignment):
            elimination.solve()
        return
    found = elimination.solve()
    assert found == elimination.solve()
    assert found.cost == min(costs)
    assert found.bound == pytest.approx(found.cost, rel=1e-12, abs=1e-12)
    assert total(tuple(found.values[variable] for variable in range(count))) == found.cost


def grid(side: int, values: int, seed: int, most_rows: int = MOST_ROWS) -> Elimination:
    """A square of variables with random costs between neighbours: no small set of them divides it in two."""
    random = Random(seed)
    elimination = Elimination(most_rows)
    pairs = [(side * y + x, side * y + x + 1) for y in range(side) for x in range(side - 1)]
    pairs += [(side * y + x, side * y + x + side) for y in range(side - 1) for x in range(side)]
    for pair in pairs:
        rows = itertools.product(range(values), repeat=2)
        elimination.add(pair, {row: random.random() * 1e-3 for row in rows})
    return elimination


def test_what_hangs_together_too_much_is_solved_exactly_all_the_same() -> None:
    exact = grid(6, 3, seed=1).solve()
    programmed = grid(6, 3, seed=1, most_rows=50).solve()
    assert programmed.values == exact.values
    assert programmed.cost == pytest.approx(exact.cost, rel=1e-12)
    assert programmed.bound == pytest.approx(exact.cost, rel=1e-9)


def test_what_is_found_when_the_time_is_over_has_a_bound() -> None:
    """Neither the bound nor the cost is on the wrong side of the optimum."""
    optimum = grid(8, 3, seed=2, most_rows=1_000_000).solve().cost
    gaps = []
    for seconds in (0.0, 0.02, 0.1, 0.5, 2.0):
        try:
            found = grid(8, 3, seed=2, most_rows=50).solve(seconds)
        except NotFoundInTime:
            continue
        assert found.bound <= optimum * (1 + 1e-9)
        assert found.cost >= optimum * (1 - 1e-9)
        gaps.append(found.cost - found.bound)
    assert gaps
    with pytest.raises(NotFoundInTime):
        grid(8, 3, seed=2, most_rows=50).solve(0.0)


def test_repeated_blocks_are_solved_once() -> None:
    """A chain far longer than Python's recursion limit needs a handful of distinct steps."""
    elimination = Elimination()
    for variable in range(3000):
        elimination.add((variable,), {(0,): 1.0, (1,): 2.0})
        elimination.add((variable, variable + 1), {(0, 0): 3.0, (0, 1): 0.0, (1, 0): 0.0, (1, 1): 3.0})
    elimination.add((3000,), {(0,): 0.0, (1,): 0.0})
    values = elimination.solve().values
    assert all(values[variable] != values[variable + 1] for variable in range(3000))
    assert len(elimination._steps) < 20


def test_joining_rows_takes_less_than_going_through_them_twice_in_python() -> None:
    """A loop of cells has a thousand joins of some thousand rows each, all different."""
    random, values, joins = Random(4), range(18), 60
    elimination = Elimination()
    for first in range(joins):
        for scope in ((first, first + 1), (first, first + 2)):
            elimination.add(scope, {row: random.random() for row in itertools.product(values, repeat=2)})
    start = time.process_time()
    elimination.solve()
    joined = time.process_time()
    for _ in range(2 * joins):  # two passes over the rows of each
        least: dict[tuple[int, ...], float] = {}
        for row in itertools.product(values, repeat=3):
            least[row[1:]] = min(0.0, least.get(row[1:], 1.0))
    assert joined - start < time.process_time() - joined
