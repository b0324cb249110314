"""``benchmarks/planner.py`` runs from end to end, on a tiny model."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest

SCRIPT = Path(__file__).parent.parent / "benchmarks" / "planner.py"


@pytest.fixture
def planner(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    spec = importlib.util.spec_from_file_location("planner", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "planner", module)  # where its dataclasses look for their types
    spec.loader.exec_module(module)
    return module


def test_every_stage_is_timed(planner: ModuleType) -> None:
    case = planner.Case("gpt2", 2, "n_layer", 2, 60.0, {"n_embd": 64, "n_head": 4, "vocab_size": 131})
    seconds = planner.measure(case, 2)
    assert list(seconds) == list(planner.STAGES)
    assert all(stage.wall > 0 for stage in seconds.values())
    assert planner.total(seconds).wall >= seconds["make_plan"].wall
