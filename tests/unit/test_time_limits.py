"""No test judges by the clock: a busy machine fails none."""

from __future__ import annotations

import ast
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from distributed import PATIENCE
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

TESTS = sorted(Path(__file__).parents[1].rglob("*.py"))
OF_THE_SUITE = {"deadline", "derandomize", "database"}
ALLOWED = {"PATIENCE", "timedelta(seconds=PATIENCE)", "max(0.0, deadline - time.monotonic())"}
"""Time limits that a call may have: this one, or what is left of it."""


def test_the_profile_is_in_force() -> None:
    assert settings.default is not None
    assert settings.default.deadline is None
    assert settings.default.database is None
    assert settings.default.derandomize
    assert HealthCheck.too_slow in settings.default.suppress_health_check


@given(st.just(0.3))
def test_an_example_may_take_longer_than_hypothesis_allows(seconds: float) -> None:
    time.sleep(seconds)


def calls(path: Path) -> Iterator[ast.Call]:
    return (node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Call))


@pytest.mark.parametrize("path", TESTS, ids=lambda path: path.stem)
def test_no_test_has_limits_of_its_own(path: Path) -> None:
    for call in calls(path):
        given_here = {keyword.arg: keyword.value for keyword in call.keywords}
        if isinstance(call.func, ast.Name) and call.func.id == "settings":
            own = OF_THE_SUITE & given_here.keys()
            assert not own, f"{path.name}:{call.lineno} sets {sorted(own)}: conftest.py does for all"
        limit = ast.unparse(given_here["timeout"]) if "timeout" in given_here else "PATIENCE"
        assert limit in ALLOWED, (
            f"{path.name}:{call.lineno} waits for {limit}: distributed.PATIENCE is the limit of all"
        )


def test_what_hangs_is_named_before_the_test_is_ended(pytestconfig: pytest.Config) -> None:
    assert float(pytestconfig.getini("timeout")) > PATIENCE
