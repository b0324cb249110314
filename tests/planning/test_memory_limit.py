"""Plans for a limit of memory: the fastest where there is room, the usual one where there is none."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any
from unittest import mock

import pytest
from selected import nightly
from tiny import meta_model

from lightning_autotp import Profile, make_plan
from lightning_autotp.capture.capture import language_model_inputs
from lightning_autotp.layouts.plan import Plan
from lightning_autotp.proving import feasible, local_sizes
from lightning_autotp.proving.feasible import Proofs, feasible_plan
from lightning_autotp.proving.verify import trace
from lightning_autotp.solving.options import PlanOptions

FREE = Profile(matrix_price=0.0)
FAMILIES = (
    pytest.param("llama", marks=pytest.mark.nightly),
    "gpt2",
    pytest.param("mixtral", marks=pytest.mark.nightly),
)


def layouts(plan: Plan) -> dict[str, object]:
    return {parameter.names[0]: parameter.layout for parameter in plan.parameters}


@pytest.mark.parametrize("family", FAMILIES)
def test_the_fastest_plan_is_made_where_there_is_room(family: str) -> None:
    model = meta_model(family, num_hidden_layers=1)
    usual, roomy = make_plan(model, 2)[0], make_plan(model, 2, memory=1e12)[0]
    assert layouts(roomy) == layouts(make_plan(model, 2, profile=FREE)[0])
    assert sum(one.calls for one in roomy.communication) < sum(one.calls for one in usual.communication)
    assert roomy.of_memory.startswith("made to fit: ")
    assert roomy.memory_needed == 4 * max(roomy.bytes(0), roomy.bytes(1))
    assert roomy.of_memory in "\n".join(map(str, roomy._totals()))


@pytest.mark.parametrize("family", FAMILIES)
def test_the_usual_plan_is_made_where_there_is_no_room(family: str) -> None:
    model = meta_model(family, num_hidden_layers=1)
    usual, cramped = make_plan(model, 2)[0], make_plan(model, 2, memory=1.0)[0]
    assert replace(cramped, memory_limit=0, memory_needed=0) == usual
    assert cramped.of_memory.startswith("warning: no plan fits: ")
    assert usual.of_memory.startswith("made for no limit of memory: ")
    assert usual.of_memory in usual._totals()


@pytest.mark.parametrize("sequence_parallel", nightly([False, True], [False]))
def test_layouts_that_another_limit_has_come_to_are_not_traced_again(
    sequence_parallel: bool,
) -> None:
    """What cannot be carried out is remembered, too: with sharded tokens the first layouts are not."""
    model = meta_model("gpt2", num_hidden_layers=1)
    inputs = language_model_inputs(model)
    graph = trace(model, inputs)

    def plan_for(memory: float | None, proofs: Proofs) -> Plan:
        options = PlanOptions((1, 64), memory=memory, sequence_parallel=sequence_parallel)
        return feasible_plan(model, graph, inputs, 2, options, proofs)[0]

    proofs = Proofs()
    plan_for(None, proofs)
    expected = plan_for(1.0, Proofs())
    assert expected.sizes
    assert expected.shards_sequence == sequence_parallel
    with mock.patch.object(local_sizes, "capture_local", side_effect=AssertionError("traced again")):
        assert plan_for(1.0, proofs) == expected
        with pytest.raises(AssertionError, match="traced again"):
            plan_for(1e12, proofs)  # other layouts


def test_where_no_plan_can_fit_the_usual_one_is_solved_once() -> None:
    model = meta_model("gpt2", num_hidden_layers=1)
    inputs = language_model_inputs(model)
    graph, proofs = trace(model, inputs), Proofs()
    with mock.patch.object(feasible, "solve", wraps=feasible.solve) as solved:
        for memory in (1.0, None, 2.0):
            feasible_plan(model, graph, inputs, 2, PlanOptions((1, 64), memory=memory), proofs)
        assert solved.call_count == 1
        stored = 4 * sum(parameter.numel() * parameter.element_size() for parameter in model.parameters())
        feasible_plan(model, graph, inputs, 2, PlanOptions((1, 64), memory=stored / 2), proofs)
        assert solved.call_count > 2  # which might be met


def test_less_room_is_met_with_more_communication() -> None:
    model = meta_model("gpt2")
    whole = 4 * make_plan(model, 2)[0].whole_bytes
    plans = [make_plan(model, 2, memory=share * whole)[0] for share in (1.0, 0.7, 0.52)]
    needed = [plan.memory_needed for plan in plans]
    calls = [sum(one.calls for one in plan.communication) for plan in plans]
    assert all(plan.memory_needed <= plan.memory_limit for plan in plans)
    assert needed == sorted(needed, reverse=True)
    assert len(set(needed)) == 3
    assert calls == sorted(calls)


def test_what_is_not_trained_has_no_gradients_and_states() -> None:
    model = meta_model("llama")
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("layers.0" in name)
    plan, _ = make_plan(model, 2, memory=1e12)
    stored = {parameter.names[0]: parameter.bytes(0) for parameter in plan.parameters}
    assert plan.memory_needed == sum((4 if "layers.0" in name else 1) * size for name, size in stored.items())


def test_the_limit_is_in_the_plans_file_and_older_files_are_read() -> None:
    plan, _ = make_plan(meta_model("llama"), 2, memory=1e12)
    data = json.loads(plan.to_json())
    assert Plan.from_json(plan.to_json()) == plan
    del data["memory_limit"], data["memory_needed"]
    assert Plan.from_json(json.dumps(data)) == replace(plan, memory_limit=0, memory_needed=0)


@pytest.mark.parametrize("wrong", [0, -1.0, float("nan"), "all"])
def test_a_limit_is_a_positive_number(wrong: Any) -> None:
    with pytest.raises(ValueError, match=r"memory is .*: it must be a positive number of bytes"):
        PlanOptions(memory=wrong)


def test_a_given_plan_has_its_own_limit() -> None:
    plan, _ = make_plan(meta_model("llama"), 2)
    with pytest.raises(ValueError, match=r"give keep_whole=, cut= and memory= when the plan is made"):
        PlanOptions(plan=plan, memory=1e9)
