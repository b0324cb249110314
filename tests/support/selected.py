"""Which cases of a module run daily, and which are about to run: a fixture that runs many at once runs only those."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Any

import pytest


def nightly(cases: Iterable[Any], repeats: Collection[Any]) -> list[Any]:
    """Cases for ``pytest.mark.parametrize``, of which those that repeat what others test are for nightly tests."""
    return [pytest.param(case, marks=pytest.mark.nightly) if case in repeats else case for case in cases]


def selected(request: pytest.FixtureRequest, argument: str) -> list[Any]:
    """The values that an argument has in this module's tests that are to run, in order.

    Where ``-m`` or ``-k`` leaves tests out, their values are left out.
    """
    params = [item.callspec.params for item in request.session.items if is_here(item, request)]
    return list(dict.fromkeys(found[argument] for found in params if argument in found))


def is_here(item: pytest.Item, request: pytest.FixtureRequest) -> bool:
    """Whether a test is of the module that a fixture is made for, and has parameters."""
    return isinstance(item, pytest.Function) and item.path == request.path and hasattr(item, "callspec")
