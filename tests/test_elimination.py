from __future__ import annotations

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_autotp.solving.elimination import Elimination, NoAssignment

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


@given(problems())
@settings(max_examples=150)
def test_the_optimum_is_that_of_exhaustive_search(problem: tuple[int, Problem]) -> None:
    count, tables = problem

    def total(values: tuple[int, ...]) -> float | None:
        costs = [rows.get(tuple(values[v] for v in scope)) for scope, rows in tables]
        return None if None in costs else sum(cost for cost in costs if cost is not None)

    costs = [cost for values in itertools.product(range(3), repeat=count) if (cost := total(values)) is not None]
    elimination = Elimination()
    for scope, rows in tables:
        elimination.add(scope, rows)
    if not costs:
        with pytest.raises(NoAssignment):
            elimination.solve()
        return
    values, cost = elimination.solve()
    assert (values, cost) == elimination.solve()
    assert cost == min(costs)
    assert total(tuple(values[variable] for variable in range(count))) == cost


def test_repeated_blocks_are_solved_once() -> None:
    """A chain far longer than Python's recursion limit needs a handful of distinct steps."""
    elimination = Elimination()
    for variable in range(3000):
        elimination.add((variable,), {(0,): 1.0, (1,): 2.0})
        elimination.add((variable, variable + 1), {(0, 0): 3.0, (0, 1): 0.0, (1, 0): 0.0, (1, 1): 3.0})
    elimination.add((3000,), {(0,): 0.0, (1,): 0.0})
    values, _ = elimination.solve()
    assert all(values[variable] != values[variable + 1] for variable in range(3000))
    assert len(elimination._steps) < 20
