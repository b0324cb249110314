"""Every process makes the same plan, whatever the order of its sets of strings."""

from __future__ import annotations

import os
import subprocess
import sys

from distributed import PATIENCE

_PLANS = """
from tiny import meta_model
from lightning_autotp import make_plan
kinds = {"layer_types": ["sliding_attention", "full_attention"]}
for family, sizes in (("gemma3_text", kinds), ("gpt_neox", {"num_hidden_layers": 1})):
    plan, _ = make_plan(meta_model(family, **sizes), 2, sequence_parallel=True)
    print(plan.to_json())
"""


def test_same_plan_in_every_process() -> None:
    """Each process has its own order of sets of strings, by which transformers' Gemma makes its masks, too."""
    command, path = [sys.executable, "-c", _PLANS], os.pathsep.join(sys.path)
    processes = [
        subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env={**os.environ, "PYTHONPATH": path, **seed})
        for seed in ({"PYTHONHASHSEED": "1"}, {"PYTHONHASHSEED": "2"})  # orders in which that set differs
    ]
    first, second = (process.communicate(timeout=PATIENCE)[0].splitlines() for process in processes)
    assert '   "module": "gpt_neox.layers.0.mlp.dense_4h_to_h",' in first
    assert first == second
