from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
from tiny import FAMILIES, ROLES, Decoder, decoder_batch, meta_model, shuffled_names
from torch import nn

from lightning_autotp.capture.capture import capture
from lightning_autotp.layouts.plan import Plan
from lightning_autotp.layouts.types import Invariant, Replicate, Shard
from lightning_autotp.parallel.implementations import IMPLEMENTATIONS
from lightning_autotp.pipeline import make_plan
from lightning_autotp.solving.implementations import DEFERRED_SUM
from lightning_autotp.solving.solution import Solution
from lightning_autotp.solving.solver import NothingToShard, solve

COLUMN, ROW, VOCAB = ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj"), ("o_proj", "down_proj"), ("embed_tokens",)


def kinds(plan: Plan) -> dict[str, str]:
    return {use.module: use.name for use in plan.implementations if use.call is None}


def sizes(plan: Plan, name: str) -> list[int]:
    layout = next(parameter.layout for parameter in plan.parameters if name in parameter.names)
    assert isinstance(layout, Shard)
    return [layout.dims[0][1].local_size(rank) for rank in range(plan.ranks)]


def pattern(solution: Solution) -> dict[str, str]:
    return {name: str(solution.layouts[tensor]) for tensor, name in solution.graph.parameters.items()}


@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_megatron_pattern_on_llama(ranks: int) -> None:
    layers = 2
    model = meta_model(
        "llama",
        num_hidden_layers=layers,
        num_attention_heads=16,
        num_key_value_heads=8,
        hidden_size=256,
        vocab_size=1024,
    )
    plan, solution = make_plan(model, ranks)
    for module, kind in kinds(plan).items():
        name = module.rpartition(".")[2]
        assert kind == ("column" if name in (*COLUMN, "lm_head") else "row" if name in ROW else "vocab"), module
    assert len(plan.implementations) == 7 * layers + 2 + 1  # and the loss
    assert {use.output for use in plan.implementations} == {None, ("P", "I")}  # nothing is gathered
    assert {use.input for use in plan.implementations if use.name == "row"} == {None}
    # Forward: attention, MLP and embedding. Backward: attention's and MLP's input, and the head's. And the loss.
    changes = Counter((str(c.source), str(c.target)) for c in solution.conversions)
    assert changes == {("I", "R"): 2 * layers + 1}
    reduced = [
        solution.graph.operators[number].module.rpartition(".")[2]
        for number in sorted(solution.uses)
        if solution.uses[number].output
    ]
    assert reduced == ["embed_tokens", *["o_proj", "down_proj"] * layers]
    assert [(c.boundary.module, str(c.source)) for c in solution.global_views] == [
        ("lm_head", str(solution.global_views[0].target))
    ]
    assert all(isinstance(p.layout, Invariant) for p in plan.parameters if "norm" in p.names[0])
    assert plan.sharded_fraction > 0.99


@pytest.mark.parametrize("seed", range(4))
def test_names_do_not_matter(seed: int) -> None:
    names = shuffled_names(seed)
    plain = pattern(solve(capture(Decoder(), decoder_batch()), 2, IMPLEMENTATIONS))
    shuffled = pattern(solve(capture(Decoder(names), decoder_batch()), 2, IMPLEMENTATIONS))
    for role in ROLES:
        assert shuffled[f"{names[role]}.weight"] == plain[f"{role}.weight"]
    assert plain["o.weight"].startswith("S(1")
    assert plain["down.weight"].startswith("S(1")
    assert all(plain[f"{role}.weight"].startswith("S(0") for role in ("q", "k", "v", "gate", "up"))


def test_uneven_heads() -> None:
    """SmolLM2's proportions: 9 query and 3 key/value heads on two ranks are 2 units and 1."""
    model = meta_model("llama", num_attention_heads=9, num_key_value_heads=3, hidden_size=144)
    plan, _ = make_plan(model, 2)
    assert sizes(plan, "model.layers.0.self_attn.q_proj.weight") == [96, 48]
    assert sizes(plan, "model.layers.0.self_attn.k_proj.weight") == [32, 16]
    assert sizes(plan, "model.layers.1.self_attn.o_proj.weight") == [96, 48]
    assert sizes(plan, "model.layers.1.mlp.up_proj.weight") == [56, 56]
    assert plan.sizes == ()


@pytest.mark.parametrize(("attention", "changed"), [("eager", {"num_key_value_groups": (4, 3) * 4}), ("sdpa", {})])
def test_ranks_share_key_value_heads(attention: str, changed: dict[str, Any]) -> None:
    """28 query and 4 key/value heads on 8 ranks (Qwen2-7B's): two ranks a key/value head, each 4 or 3 queries'.

    Code that repeats the heads by itself has to be told how often; the kernel sees it.
    """
    sizes_of = {"num_attention_heads": 28, "num_key_value_heads": 4, "hidden_size": 448, "num_hidden_layers": 1}
    model = meta_model("qwen2", attn_implementation=attention, **sizes_of)
    plan, _ = make_plan(model, 8)
    assert sizes(plan, "model.layers.0.self_attn.q_proj.weight") == [64, 48] * 4
    assert sizes(plan, "model.layers.0.self_attn.k_proj.weight") == [16] * 8
    layout = next(p.layout for p in plan.parameters if p.names == ("model.layers.0.self_attn.k_proj.weight",))
    assert isinstance(layout, Shard)
    assert [ranks for _, _, ranks in layout.dims[0][1].owners] == [(0, 1), (2, 3), (4, 5), (6, 7)]
    assert {size.attribute: size.local for size in plan.sizes} == changed


def test_one_key_value_head() -> None:
    model = meta_model("llama", num_key_value_heads=1)
    plan, _ = make_plan(model, 2, tokens_per_step=(5, 61))
    layouts = {p.names[0]: p.layout for p in plan.parameters}
    assert isinstance(layouts["model.layers.0.self_attn.k_proj.weight"], Replicate)
    assert sizes(plan, "model.layers.0.self_attn.q_proj.weight") == [32, 32]
    # With many tokens, computing it on every rank costs more than summing its few features.
    plan, _ = make_plan(model, 2)
    assert kinds(plan)["model.layers.0.self_attn.k_proj"] == "row"
    assert sizes(plan, "model.layers.0.self_attn.q_proj.weight") == [32, 32]


def test_fused_projections_have_sections() -> None:
    plan, _ = make_plan(meta_model("phi3"), 2)
    layout = next(p.layout for p in plan.parameters if p.names[0].endswith("layers.0.self_attn.qkv_proj.weight"))
    assert isinstance(layout, Shard)
    # 4 query heads, 2 key heads, 2 value heads, of 16 rows each
    assert layout.dims[0][1].held == (((0, 32), (64, 80), (96, 112)), ((32, 64), (80, 96), (112, 128)))
    gate_up = next(p.layout for p in plan.parameters if p.names[0].endswith("layers.0.mlp.gate_up_proj.weight"))
    assert isinstance(gate_up, Shard)
    assert gate_up.dims[0][1].held[0] == ((0, 56), (112, 168))


def test_interleaved_heads_are_cut_between_heads() -> None:
    plan, _ = make_plan(meta_model("gpt_neox"), 4)
    assert sizes(plan, "gpt_neox.layers.0.attention.query_key_value.weight") == [48] * 4


@pytest.mark.parametrize("family", FAMILIES)
def test_every_matrix_of_the_families_is_sharded(family: str) -> None:
    plan, _ = make_plan(meta_model(family), 2)
    whole = [p.names[0] for p in plan.parameters if len(p.shape) > 1 and not isinstance(p.layout, Shard)]
    assert whole == []


@pytest.mark.parametrize("family", ["cohere", "phi"])
def test_attention_and_mlp_side_by_side_are_summed_once(family: str) -> None:
    """One all-reduce in a block's forward, and one in its backward."""
    plan, _ = make_plan(meta_model(family), 2)
    changes = [change.source.letter + change.target.letter for change in plan.conversions if ".1" in change.module]
    assert sorted(change for change in changes if change != "IP") == ["IR", "PI"]
    uses = [use for use in plan.implementations if ".layers.1." in use.module]
    assert {(use.input, use.output) for use in uses} == {(None, None), (None, DEFERRED_SUM)}


def test_norm_over_sharded_heads_sums_its_gradient() -> None:
    plan, _ = make_plan(meta_model("qwen3"), 2)
    layouts = {p.names[0]: p.layout for p in plan.parameters}
    assert isinstance(layouts["model.layers.0.self_attn.q_norm.weight"], Replicate)
    assert isinstance(layouts["model.layers.0.input_layernorm.weight"], Invariant)


def test_same_answer_every_time() -> None:
    graph = capture(meta_model("gemma2"))
    assert solve(graph, 4, IMPLEMENTATIONS).layouts == solve(graph, 4, IMPLEMENTATIONS).layouts


def test_too_many_ranks_is_an_error() -> None:
    batch = decoder_batch()[0].float()[:, :3]
    with pytest.raises(
        NothingToShard, match=r"among 7 ranks, but among 5 or fewer: use tensor_parallel_size=5, or less$"
    ):
        make_plan(nn.Sequential(nn.Linear(3, 5)), 7, example_inputs=batch)
    make_plan(nn.Sequential(nn.Linear(3, 5)), 5, example_inputs=batch)
    with pytest.raises(NothingToShard, match=r"or fewer: its forward uses no parameters\. Use tensor_parallel_size=1$"):
        make_plan(nn.ReLU(), 2, example_inputs=batch)


def test_whole_parameters_say_why() -> None:
    class Cumulative(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.mixing = nn.Linear(8, 8)
            self.mlp = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 8))

        def forward(self, x):  # type: ignore[no-untyped-def]
            return self.mlp(x + self.mixing(x).sort(-1).values.cumsum(-1) * x.mean(-1, keepdim=True).sinh())

    plan, _ = make_plan(Cumulative(), 2, example_inputs=decoder_batch()[0].float()[:, :1].expand(3, 8))
    kept = {p.names[0]: p.reason for p in plan.parameters if p.reason}
    assert set(kept) <= {"mixing.weight"}
    assert kinds(plan)["mlp.0"] == "column"
    assert kinds(plan)["mlp.2"] == "row"
