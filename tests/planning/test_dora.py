"""DoRA's layers are given parts, and in another call a constant: no layout changes where both enter."""

from __future__ import annotations

from pathlib import Path

from combination_task import adapted_model, batches
from combinations import Combination

from lightning_autotp import make_plan
from lightning_autotp.layouts.types import Shard


def test_a_model_with_dora_is_divided(tmp_path: Path) -> None:
    combination = Combination("llama", adapter="dora")
    model = adapted_model(combination, tmp_path)
    plan, _ = make_plan(model, 2, example_inputs=batches(combination)[0][0])
    layouts = {parameter.names[0]: parameter.layout for parameter in plan.parameters}
    base = [name for name in layouts if name.endswith("proj.base_layer.weight")]
    assert len(base) == 14
    assert [name for name in base if not isinstance(layouts[name], Shard)] == []
