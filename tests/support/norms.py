"""Norms that a run logged."""

from __future__ import annotations

import pytest


def assert_same_norms(found: list[dict[str, float]], wanted: list[dict[str, float]]) -> None:
    assert len(found) == len(wanted) > 0
    for mine, theirs in zip(found, wanted, strict=True):
        assert list(mine) == list(theirs)
        assert mine == pytest.approx(theirs, rel=1e-4, abs=1e-7)
