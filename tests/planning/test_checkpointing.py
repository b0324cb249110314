"""Whether a training step fits, or blocks are to be computed again."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny import tiny_model, token_batch

from lightning_autotp import make_plan
from lightning_autotp.layouts.plan import Plan
from lightning_autotp.layouts.units import in_units
from lightning_autotp.planning.checkpointing import KeptActivations, choose, fitting_plan, memory_of
from lightning_autotp.planning.estimate import memory
from lightning_autotp.planning.rehearsal import RehearsalError, local_model, rehearse
from lightning_autotp.pretrained.meta_model import meta_model
from lightning_autotp.proving.verify import trace
from lightning_autotp.solving.options import PlanOptions


def test_blocks_are_computed_again_where_a_step_does_not_fit_otherwise() -> None:
    with meta_model():
        model = tiny_model("llama", num_hidden_layers=1)
    batch = token_batch(0, 8, 64)
    plan, _ = make_plan(model, 2)
    whole = memory(rehearse(local_model(model, plan), batch), copies=2).total
    fits = choose(model, plan, batch, whole, precision="bf16-mixed", copies=2)
    assert fits == KeptActivations(False, whole, whole, whole)
    assert fits.warnings == []
    tight = choose(model, plan, batch, whole - 1, precision="bf16-mixed", copies=2)
    assert tight.are_recomputed
    assert tight.needed < tight.otherwise == whole
    assert tight.warnings == []
    hopeless = choose(model, plan, batch, 1.0, precision="bf16-mixed", copies=2)
    assert (hopeless.are_recomputed, hopeless.needed) == (True, tight.needed)
    (said,) = hopeless.warnings
    assert "even if blocks are computed again" in said
    assert not any(
        hasattr(module, "gradient_checkpointing") and module.gradient_checkpointing for module in model.modules()
    )


def test_what_is_in_host_memory_leaves_room_for_what_blocks_compute() -> None:
    with meta_model():
        model = tiny_model("llama", num_hidden_layers=1)
    batch = token_batch(0, 8, 64)
    plan, _ = make_plan(model, 2)
    rehearsal = rehearse(local_model(model, plan), batch, precision="32-true")
    needed = memory(rehearsal, cpu_offload=True).total
    fits = choose(model, plan, batch, needed, precision="32-true", cpu_offload=True)
    assert fits == KeptActivations(False, needed, needed, needed)
    assert choose(model, plan, batch, needed - 1, precision="32-true", cpu_offload=True).are_recomputed
    assert choose(model, plan, batch, needed, precision="32-true").are_recomputed


def test_positional_arguments_precision_and_one_rank() -> None:
    with meta_model():
        model = tiny_model("llama", num_hidden_layers=1)
    batch = token_batch(0, 2, 16)
    named = {"input_ids": batch["input_ids"], "labels": batch["labels"]}
    in_half = choose(model, None, named, 1e12, precision="bf16-true")
    assert in_half.needed < 0.6 * choose(model, None, named, 1e12, precision="32-true").needed
    with pytest.raises(RehearsalError, match="has no loss"):
        choose(model, None, (batch["input_ids"],), 1e12, precision="32-true")  # no labels, so no loss


def test_the_memory_of_the_processor_is_not_that_of_a_gpu() -> None:
    assert memory_of(torch.device("cpu")) is None


def calls(plan: Plan) -> int:
    return sum(one.calls for one in plan.communication)


def test_the_fastest_plan_with_which_a_step_fits_is_taken() -> None:
    with meta_model():
        model = tiny_model("gpt2", num_hidden_layers=1)
    batch, small = token_batch(0, 8, 64), token_batch(0, 3, 7)
    graph = trace(model, small)

    def fitting(limit: float, example: Any = batch, **more: Any) -> Plan:
        options = PlanOptions((8, 64), plan_cache=False, **more)
        return fitting_plan(model, graph, small, 2, options, example=example, limit=limit, precision="32-true")

    def needed(plan: Plan) -> int:
        return int(memory(rehearse(local_model(model, plan), batch, precision="32-true")).total)

    roomy, usual = fitting(1e12), fitting(1e12, memory=None)
    assert calls(roomy) < calls(usual)
    assert usual.memory_limit == 0
    assert roomy.limit_of == "the device"
    assert roomy.memory_needed == needed(roomy) > needed(usual)
    sizes = f"{in_units(roomy.memory_needed)} of {in_units(10**12)}"
    assert roomy.of_memory == f"made to fit: a training step takes about {sizes} of the device (predicted, with AdamW)"
    assert Plan.from_json(roomy.to_json()) == roomy

    exactly = fitting(roomy.memory_needed)
    assert exactly == replace(roomy, memory_limit=roomy.memory_needed)
    between = fitting(roomy.memory_needed - 1)
    assert needed(usual) <= needed(between) < roomy.memory_needed
    assert calls(roomy) <= calls(between)
    for limit in (needed(usual) - 1, 1):
        cramped = fitting(limit)
        assert cramped == replace(usual, memory_limit=limit, memory_needed=needed(usual), limit_of="the device")
        assert cramped.of_memory.startswith("warning: no plan fits: a training step takes about")


def test_no_limit_is_assumed_where_it_is_not_known_what_a_step_takes() -> None:
    with meta_model():
        model = tiny_model("gpt2", num_hidden_layers=1)
    batch, small = token_batch(0, 8, 64), token_batch(0, 3, 7)
    graph = trace(model, small)

    def fitting(example: Any, **options: Any) -> Plan:
        given = PlanOptions(**{"tokens_per_step": (8, 64), "plan_cache": False, **options})
        return fitting_plan(model, graph, small, 2, given, example=example, limit=1e12, precision="32-true")

    usual = fitting(batch, memory=None)
    assert fitting(batch) != usual
    assert fitting(small) == usual, "a step is larger"
    assert fitting({"input_ids": batch["input_ids"]}) == usual, "there is no loss"
    assert fitting(batch, tokens_per_step=None).memory_limit == 0, "a step may be larger"
    assert fitting(batch, plan=usual) == usual
    assert fitting(batch, memory=1e9).limit_of == ""


def test_a_kept_plan_is_of_its_limit(tmp_path: Path) -> None:
    with meta_model():
        model = tiny_model("gpt2", num_hidden_layers=1)
    batch = token_batch(0, 8, 64)
    graph = trace(model, batch)

    def fitting(limit: float) -> Plan:
        options = PlanOptions((8, 64), plan_cache=tmp_path)
        return fitting_plan(model, graph, batch, 2, options, example=batch, limit=limit, precision="32-true")

    roomy, usual = fitting(1e12), fitting(1.0)
    kept = set(tmp_path.iterdir())
    assert calls(roomy) < calls(usual)
    assert (fitting(1e12), fitting(1.0)) == (roomy, usual)
    assert set(tmp_path.iterdir()) == kept, "nothing was planned again"
