"""Planted mistakes: what a real bug in planning or replacement would do must not get past verification."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from tiny import meta_model
from torch import nn

from lightning_autotp.applying.replace import PlanMismatch, apply_plan
from lightning_autotp.capture.capture import language_model_inputs, meta_copy
from lightning_autotp.layouts.ownership import Ownership
from lightning_autotp.layouts.plan import Plan
from lightning_autotp.layouts.types import Invariant, Shard
from lightning_autotp.parallel.linear import RowParallelLinear
from lightning_autotp.pipeline import make_plan
from lightning_autotp.proving.compare import VerificationError
from lightning_autotp.proving.feasible import regions_around
from lightning_autotp.proving.verify import verify
from lightning_autotp.ranks.group import TPGroup
from lightning_autotp.solving.solution import Solution

FAMILY_PLANS: dict[str, tuple[nn.Module, Plan, Solution]] = {}


def planned(family: str, ranks: int = 2, layers: int = 2) -> tuple[nn.Module, Plan, Solution]:
    key = f"{family} {ranks} {layers}"
    if key not in FAMILY_PLANS:
        model = meta_model(family, num_hidden_layers=layers)
        FAMILY_PLANS[key] = (model, *make_plan(model, ranks))
    return FAMILY_PLANS[key]


def check(
    family: str,
    mistake: Callable[[Plan], Plan],
    after: Callable[[nn.Module], None] = lambda model: None,
    ranks: int = 2,
    layers: int = 2,
) -> None:
    model, plan, solution = planned(family, ranks, layers)
    local = meta_copy(model)
    apply_plan(local, mistake(plan), TPGroup("", 0, ranks))
    after(local)
    verify(local, solution, 0, language_model_inputs(model))


def with_parameter(plan: Plan, end: str, layout: object) -> Plan:
    assert any(p.names[0].endswith(end) for p in plan.parameters)
    return replace(
        plan,
        parameters=tuple(replace(p, layout=layout) if p.names[0].endswith(end) else p for p in plan.parameters),  # type: ignore[arg-type]
    )


@pytest.mark.parametrize("family", ["llama", "phi3", "olmo2"])
def test_the_right_plan_passes(family: str) -> None:
    check(family, lambda plan: plan)


def test_wrong_local_size() -> None:
    shifted = Shard(((0, Ownership(32, (((0, 24),), ((24, 32),)))),))
    with pytest.raises(VerificationError, match="k_proj"):
        check("llama", lambda plan: with_parameter(plan, "layers.0.self_attn.k_proj.weight", shifted))


def test_boundary_shifted_by_one_unit() -> None:
    shifted = Shard(((0, Ownership(64, (((0, 31), (63, 64)), ((31, 63),)))),))
    with pytest.raises(VerificationError, match="q_proj"):
        check("llama", lambda plan: with_parameter(plan, "layers.1.self_attn.q_proj.weight", shifted))


def test_sections_in_the_wrong_order() -> None:
    """Halves instead of half of each section: every shape of the trace is the same."""
    halves = Shard(((0, Ownership.even(224, 2)),))
    with pytest.raises(VerificationError, match="gate_up_proj"):
        check("phi3", lambda plan: with_parameter(plan, "layers.0.mlp.gate_up_proj.weight", halves))


def test_missing_input_conversion() -> None:
    def drop(plan: Plan) -> Plan:
        return replace(plan, conversions=tuple(c for c in plan.conversions if c.module != "model.layers.0.mlp"))

    with pytest.raises(VerificationError, match="invariant_to_replicate"):
        check("llama", drop)


def test_missing_all_reduce() -> None:
    def forget(model: nn.Module) -> None:
        layer = model.get_submodule("model.layers.1.mlp.down_proj")
        assert isinstance(layer, RowParallelLinear)
        layer.reduce_output = False

    with pytest.raises(VerificationError, match=r"partial_to_invariant[\s\S]*layers\.1\.mlp\.down_proj"):
        check("llama", lambda plan: plan, forget)


def test_another_dtype() -> None:
    """Each operator is the same one, on tensors of the same shapes."""

    def more_digits(model: nn.Module) -> None:
        model.double()

    with pytest.raises(VerificationError, match=r"must give float32, it gives float64[\s\S]*module model.embed_tokens"):
        check("llama", lambda plan: plan, more_digits)


def test_collective_done_twice() -> None:
    def repeat(plan: Plan) -> Plan:
        twice = (replace(use, input=("I", "R")) if use.name == "column" else use for use in plan.implementations)
        return replace(plan, implementations=tuple(twice))

    with pytest.raises(VerificationError):
        check("llama", repeat)


def test_a_mean_of_a_part_only() -> None:
    def drop(plan: Plan) -> Plan:
        uses = tuple(u for u in plan.implementations if not u.module.endswith("0.self_attn.k_norm"))
        assert len(uses) == len(plan.implementations) - 1
        return replace(plan, implementations=uses)

    with pytest.raises(VerificationError):
        check("olmo2", drop)


def test_wrong_attribute_made_local() -> None:
    def wrong(plan: Plan) -> Plan:
        swapped = {"config.num_attention_heads": "num_key_value_heads", "num_key_value_heads": "num_key_value_groups"}
        assert {size.attribute for size in plan.sizes} == set(swapped)
        return replace(plan, sizes=tuple(s for s in plan.sizes if s.attribute != "num_key_value_heads"))

    with pytest.raises(VerificationError, match=r"slice|view|capture"):
        check("phi3", wrong)


def test_gradient_sum_dropped() -> None:
    with pytest.raises(VerificationError, match="q_norm"):
        check("qwen3", lambda plan: with_parameter(plan, "layers.0.self_attn.q_norm.weight", Invariant()))


def test_logits_not_shown_whole() -> None:
    def drop(plan: Plan) -> Plan:
        return replace(plan, conversions=tuple(c for c in plan.conversions if not c.view))

    with pytest.raises(VerificationError):
        check("llama", drop)


def test_another_activation() -> None:
    def swap(model: nn.Module) -> None:
        model.get_submodule("model.layers.0.mlp").act_fn = nn.GELU()

    with pytest.raises(VerificationError, match="silu"):
        check("llama", lambda plan: plan, swap)


DEEP = 20
LATE = "model.layers.17"


def _boundary_shifted(plan: Plan) -> Plan:
    shifted = Shard(((0, Ownership(64, (((0, 31), (63, 64)), ((31, 63),)))),))
    return with_parameter(plan, f"{LATE}.self_attn.q_proj.weight", shifted)


def _conversion_dropped(plan: Plan) -> Plan:
    kept = tuple(each for each in plan.conversions if each.module != f"{LATE}.mlp")
    assert len(kept) < len(plan.conversions)
    return replace(plan, conversions=kept)


def _left_ordinary(plan: Plan) -> Plan:
    kept = tuple(each for each in plan.implementations if each.module != f"{LATE}.mlp.down_proj")
    assert len(kept) == len(plan.implementations) - 1
    return replace(plan, implementations=kept)


def _unsummed(model: nn.Module) -> None:
    layer = model.get_submodule(f"{LATE}.self_attn.o_proj")
    assert isinstance(layer, RowParallelLinear)
    layer.reduce_output = False


def _other_activation(model: nn.Module) -> None:
    model.get_submodule(f"{LATE}.mlp").act_fn = nn.GELU()


def _other_number(model: nn.Module) -> None:
    layer: Any = model.get_submodule(f"{LATE}.self_attn")
    layer.scaling *= 2


def test_the_right_plan_of_many_layers_passes() -> None:
    check("llama", lambda plan: plan, layers=DEEP)


@pytest.mark.parametrize("mistake", [_boundary_shifted, _conversion_dropped, _left_ordinary])
def test_a_mistake_in_the_plan_of_a_late_layer(mistake: Callable[[Plan], Plan]) -> None:
    """All other layers are right, and alike."""
    with pytest.raises(VerificationError, match=r"layers\.17\."):
        check("llama", mistake, layers=DEEP)


@pytest.mark.parametrize("mistake", [_unsummed, _other_activation, _other_number])
def test_a_mistake_in_a_late_layer_alone(mistake: Callable[[nn.Module], None]) -> None:
    """The plan is right: the layer is not what it says."""
    with pytest.raises(VerificationError, match=r"layers\.17\."):
        check("llama", lambda plan: plan, mistake, layers=DEEP)


def test_plan_of_another_model() -> None:
    _, plan, _ = planned("llama")
    with pytest.raises(PlanMismatch, match="another model"):
        apply_plan(meta_model("qwen3"), plan, TPGroup("", 0, 2))
    with pytest.raises(PlanMismatch, match="ranks"):
        apply_plan(meta_model("llama"), plan, TPGroup("", 0, 3))
    with pytest.raises(PlanMismatch, match="shape"):
        apply_plan(meta_model("llama", intermediate_size=96), plan, TPGroup("", 0, 2))


def test_where_no_operator_is_at_fault_everything_stays_whole() -> None:
    """Also where the local trace has one that the original does not have: no region is searched for without an end."""
    _, _, solution = planned("llama")
    graph = solution.graph
    stranger = replace(graph.operators[0], name="aten.stranger.default", source="nowhere")
    for operator in (None, stranger):
        assert list(regions_around(graph, operator)) == [frozenset(range(len(graph.operators)))]
