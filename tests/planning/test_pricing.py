"""A plan is the cheapest at the size of the step that will be trained, whatever the size of the trace."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
from tiny import meta_model
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import AutoConfig, AutoModelForCausalLM

from lightning_autotp.capture.capture import capture, step_size
from lightning_autotp.layouts.step_size import NOMINAL_TOKENS, StepSize, TokensPerStep
from lightning_autotp.layouts.transitions import TRANSITIONS
from lightning_autotp.layouts.types import Layout, Shard
from lightning_autotp.operators.graph import Graph
from lightning_autotp.parallel.implementations import IMPLEMENTATIONS
from lightning_autotp.pipeline import make_plan
from lightning_autotp.solving.call_points import open_calls
from lightning_autotp.solving.cost import Profile
from lightning_autotp.solving.pricing import NOMINAL_LENGTH
from lightning_autotp.solving.solution import Solution
from lightning_autotp.solving.solver import price, solve
from lightning_autotp.solving.tables import Tables

FEW, NOMINAL = TokensPerStep.given((5, 61)), TokensPerStep()


def ids(*shape: int) -> Tensor:
    return torch.zeros(shape, dtype=torch.long, device="meta")


def traced(model: nn.Module, rows: int, length: int, use_cache: bool = False) -> Graph:
    batch = {"input_ids": ids(rows, length), "labels": ids(rows, length), "use_cache": use_cache}
    graph = capture(model, batch)
    return open_calls(graph, IMPLEMENTATIONS)


def layouts(solution: Solution) -> dict[str, Layout]:
    return {name: solution.layouts[tensor] for tensor, name in solution.graph.parameters.items()}


def scaled(graph: Graph, tokens: TokensPerStep = NOMINAL) -> Tables:
    return Tables(graph, 2, IMPLEMENTATIONS, Profile(), {}, tokens)


# -- what a batch's size is ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("shapes", "expected"),
    [
        ([("int64", (5, 61)), ("int64", (5, 61))], StepSize(5, (61,))),
        ([("int64", (3, 17)), ("int64", (3, 19)), ("int64", (3,))], StepSize(3, (17, 19))),
        ([("bool", (2, 9)), ("float32", (2, 4, 8))], StepSize(2, (9,))),
        ([("int64", (5, 61)), ("int64", (5, 2)), ("int64", (5, 3))], StepSize(5, (61,))),
        ([("int64", (5, 2)), ("int64", (5, 3))], StepSize(5, (2, 3))),
        ([("float32", (4, 11, 8))], StepSize(4, (11,))),
        ([("float32", (4, 3, 32, 32)), ("int64", (4,))], StepSize(4)),
        ([("float32", (16, 8))], StepSize(16)),
        ([("int64", (1, 12279))], StepSize(1, (12279,))),
        ([("float32", ())], StepSize()),
        ([], StepSize()),
    ],
)
def test_the_size_of_a_batch(shapes: list[tuple[str, tuple[int, ...]]], expected: StepSize) -> None:
    assert step_size(torch.zeros(shape, dtype=getattr(torch, dtype)) for dtype, shape in shapes) == expected


@pytest.mark.parametrize("wrong", [0, -1, (2, 0), (1, 2, 3), 2.5, "16k", (), True])
def test_a_wrong_number_of_tokens_is_an_error(wrong: Any) -> None:
    with pytest.raises(ValueError, match="tokens_per_step"):
        make_plan(meta_model("llama"), 2, tokens_per_step=wrong)


def test_what_the_plan_says() -> None:
    model = meta_model("llama", num_hidden_layers=1)
    said = {
        tokens: make_plan(model, 2, tokens_per_step=tokens)[0].priced_for
        for tokens in (None, 16384, 2000, 100_000, (7, 300))
    }
    assert said[None].startswith(f"4 x {NOMINAL_LENGTH} tokens (nominal")
    assert 4 * NOMINAL_LENGTH == NOMINAL_TOKENS
    assert said[16384] == f"4 x {NOMINAL_LENGTH} tokens (as tokens_per_step says)"
    assert said[2000].startswith("1 x 2000 tokens")
    assert said[100_000].startswith(f"24 x {NOMINAL_LENGTH} tokens")
    assert said[7, 300].startswith("7 x 300 tokens")


# -- which axes grow -------------------------------------------------------------------------------------------------


def sizes_of(graph: Graph, tokens: TokensPerStep = NOMINAL) -> Counter[tuple[float, ...]]:
    tables = scaled(graph, tokens)
    return Counter(
        tables.sizes.shape(tensor, dims) for tensor, dims in tables.dims.items() if tensor not in graph.parameters
    )


def test_hidden_states_and_scores_grow() -> None:
    """4 heads, hidden size 64: hidden states grow with the tokens, eager attention's scores with the square."""
    model = meta_model("llama", num_hidden_layers=1, attn_implementation="eager")
    found = sizes_of(capture(model))
    assert found[4, 4096, 64]
    assert found[4, 4, 4096, 4096]
    assert not any(5 in shape or 61 in shape for shape in found)


def test_parameters_do_not_grow() -> None:
    """Three heads and three rows, 17 features and 17 tokens: only an axis that no parameter has can be a row's."""
    model = meta_model("llama", num_attention_heads=3, num_key_value_heads=3, hidden_size=48, intermediate_size=17)
    found = sizes_of(traced(model, 3, 17))
    assert found[4, 3, 4096, 16]
    assert found[4, 4096, 17]


class Positions(nn.Module):
    """A table of positions that is sliced: the tokens' axis is one of a parameter's."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.table = nn.Embedding(131, 64), nn.Parameter(torch.zeros(256, 64))
        self.up, self.down = nn.Linear(64, 112), nn.Linear(112, 64)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.words(tokens) + self.table[: tokens.shape[1]]
        x = x + self.down(F.gelu(self.up(x)))
        logits = x[:, :-1] @ self.words.weight.T
        return F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())


@pytest.mark.parametrize("length", [61, 256])
def test_tables_of_positions(length: int) -> None:
    graph = capture(Positions(), ids(5, length))
    tables = scaled(graph)
    table = next(tensor for tensor, name in graph.parameters.items() if name == "table")
    assert tables.sizes.bytes(table, tables.dims[table]) == 256 * 64 * 4
    # The last token, which the loss leaves out, is a section of its own; one index more or less is no matter.
    widths = {shape[-1]: shape[1] for shape in sizes_of(graph) if len(shape) == 3 and shape[0] == 4}
    assert {64, 112} <= widths.keys()
    assert all(length == pytest.approx(4096, rel=0.02) for length in widths.values())


def test_rows_grow_where_there_are_no_sequences() -> None:
    """16 positions of a picture: 1,024 pictures make 16,384 of them."""

    class Patches(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.patch = nn.Conv2d(3, 24, 8, stride=8)
            self.up, self.down = nn.Linear(24, 96), nn.Linear(96, 24)

        def forward(self, pictures: Tensor) -> Tensor:
            x = self.patch(pictures).flatten(2).transpose(1, 2)
            return self.down(F.relu(self.up(x))).mean(1)

    graph = capture(Patches(), torch.zeros(7, 3, 32, 32))
    tables = scaled(graph)
    assert tables.sizes.step == StepSize(1024)
    assert sizes_of(graph)[1024, 16, 96]
    assert scaled(graph, TokensPerStep(size=StepSize(256))).sizes.step == StepSize(256)


def test_a_single_row_stands_for_those_of_the_step() -> None:
    model = meta_model("llama", num_hidden_layers=1)
    one, several = traced(model, 1, 50), traced(model, 5, 61)
    assert scaled(one).sizes.step == StepSize(4, (NOMINAL_LENGTH,))
    assert sizes_of(one)[4, NOMINAL_LENGTH, 112] == sizes_of(several)[4, NOMINAL_LENGTH, 112] > 0
    # Each row attends to itself: the work does not grow with all tokens squared.
    assert attention_work(one) == pytest.approx(attention_work(several), rel=1e-6)


def attention_work(graph: Graph) -> float:
    tables = scaled(graph)
    relations = [r for r in tables.relations if "dot_product_attention" in r.operator.name]
    assert len(relations) == 1
    return tables.work(relations[0])[0]


# -- the same plan whatever the trace --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "family",
    [
        pytest.param(family, marks=[] if family in ("gpt2", "qwen3_moe") else pytest.mark.nightly)
        for family in ("llama", "qwen3_moe", "gpt2", "bloom")
    ],
)
def test_the_price_does_not_depend_on_the_trace(family: str) -> None:
    model = meta_model(family)
    first, second = (solve(traced(model, *size), 2, IMPLEMENTATIONS) for size in ((5, 61), (3, 157)))
    assert layouts(first) == layouts(second)
    assert second.cost == pytest.approx(first.cost, rel=1e-3)


@pytest.mark.parametrize(
    "family",
    [
        pytest.param(family, marks=[] if family in ("qwen3_moe", "bloom") else pytest.mark.nightly)
        for family in ("llama", "qwen3_moe", "gpt2", "bloom")
    ],
)
def test_the_plan_does_not_depend_on_the_trace(family: str) -> None:
    """On three ranks, which do not divide the heads: not for a single row, nor as many rows as tokens, nor a cache."""
    model = meta_model(family)
    expected = solve(traced(model, 5, 61), 3, IMPLEMENTATIONS)
    for rows, length, use_cache in ((1, 50, False), (8, 8, False), (3, 157, True)):
        found = solve(traced(model, rows, length, use_cache), 3, IMPLEMENTATIONS)
        assert layouts(found) == layouts(expected), (rows, length, use_cache)
        assert collectives(found) == collectives(expected), (rows, length, use_cache)


def test_a_parameter_much_smaller_than_a_matrix_is_held_for_nothing() -> None:
    small, larger = (Profile().memory(size, 1.0, 800.0, 1e6, 2) for size in (100, 101))
    assert small == 0 < larger


def test_small_routers_stay_whole() -> None:
    """Dividing one would sum its logits over the ranks, for next to no memory."""
    plan, _ = make_plan(meta_model("mixtral"), 2, profile=Profile(flops=Profile().flops / 64))
    routers = [parameter for parameter in plan.parameters if parameter.names[0].endswith("mlp.gate.weight")]
    assert len(routers) == 2
    assert not any(isinstance(parameter.layout, Shard) for parameter in routers)


def qwen3_235b(layers: int) -> nn.Module:
    """Qwen3-235B-A22B's layers."""
    config = AutoConfig.for_model(
        "qwen3_moe", hidden_size=4096, num_hidden_layers=layers, num_attention_heads=64, num_key_value_heads=4,
        head_dim=128, moe_intermediate_size=1536, num_experts=128, num_experts_per_tok=8, intermediate_size=12288,
        vocab_size=151936,
    )  # fmt: skip
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(config)


def deepseek_v3(layers: int) -> nn.Module:
    """DeepSeek-V3's layers: three dense ones, then mixtures."""
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(AutoConfig.for_model("deepseek_v3", num_hidden_layers=layers))


MEGATRON = {
    "qwen3_235b": {
        "embed_tokens": 0, "lm_head": 0, "q_proj": 0, "k_proj": 0, "v_proj": 0, "o_proj": 1,
        "experts.gate_up_proj": 1, "experts.down_proj": 2, "mlp.gate": None,
    },
    "deepseek_v3": {
        "embed_tokens": 0, "lm_head": 0, "q_a_proj": None, "q_b_proj": 0, "kv_a_proj_with_mqa": None, "kv_b_proj": 0,
        "o_proj": 1, "gate_proj": 0, "up_proj": 0, "mlp.down_proj": 1, "shared_experts.down_proj": 1,
        "experts.gate_up_proj": 1, "experts.down_proj": 2, "mlp.gate": None,
    },
}  # fmt: skip
"""What one writes by hand: by the end of a parameter's name, the dim it is cut along (``None``: whole)."""


def by_hand(graph: Graph, rules: dict[str, int | None]) -> dict[str, int | None]:
    pinned: dict[str, int | None] = {}
    for name in graph.parameters.values():
        ends = [end for end in rules if name.removesuffix(".weight").endswith(end)]
        if ends:
            pinned[name] = rules[max(ends, key=len)]
    return pinned


@pytest.mark.parametrize(
    ("build", "layers"), [(qwen3_235b, 2), pytest.param(deepseek_v3, 4, marks=pytest.mark.nightly)]
)
def test_the_cheapest_plan_of_large_mixtures(build: Any, layers: int) -> None:
    """Layers of the real widths on eight ranks."""
    model = build(layers)
    graph = traced(model, 5, 61)
    best = solve(graph, 8, IMPLEMENTATIONS, tokens=NOMINAL)
    assert best.step == StepSize(4, (4096,))
    assert price(best, NOMINAL, IMPLEMENTATIONS) == pytest.approx(best.cost, rel=1e-9)
    for tokens in (FEW, TokensPerStep(2048), TokensPerStep(10**6)):
        other = solve(graph, 8, IMPLEMENTATIONS, tokens=tokens)
        assert price(other, NOMINAL, IMPLEMENTATIONS) >= best.cost * (1 - 1e-9), tokens
        assert price(best, tokens, IMPLEMENTATIONS) >= other.cost * (1 - 1e-9), tokens
    hand = by_hand(graph, MEGATRON[build.__name__])
    assert len(hand) > 10
    assert solve(graph, 8, IMPLEMENTATIONS, pinned=hand).cost >= best.cost
    # Traced with 12,279 tokens, in rows or packed in one: the same plan.
    for rows, length in ((3, 4093), (1, 12279)):
        assert layouts(solve(traced(model, rows, length), 8, IMPLEMENTATIONS)) == layouts(best)


def test_key_and_value_heads_of_qwen3_235b_are_shared() -> None:
    """At 305 tokens two more all-reduces a layer looked cheaper than summing the gradients of K and V once."""
    model = qwen3_235b(2)
    graph = traced(model, 5, 61)
    few, best = solve(graph, 8, IMPLEMENTATIONS, tokens=FEW), solve(graph, 8, IMPLEMENTATIONS, tokens=NOMINAL)
    assert price(few, NOMINAL, IMPLEMENTATIONS) > best.cost
    found = layouts(best)
    for layout in (found[name] for name in found if name.endswith(("k_proj.weight", "v_proj.weight"))):
        assert isinstance(layout, Shard)
        assert [(dim, owned.is_shared) for dim, owned in layout.dims] == [(0, True)]
    # Four of hidden states, forward and backward, and the router's (128 numbers a token); K and V had more.
    of_best = collectives(best)
    assert of_best.total() < collectives(few).total()
    assert of_best[4096] == 4 * 2
    assert set(of_best) == {4096, 128}
    # Called with a cache, the model gives attention its few key heads, which meet each rank's own query heads.
    assert layouts(solve(traced(model, 3, 4093, use_cache=True), 8, IMPLEMENTATIONS)) == found


def collectives(solution: Solution) -> Counter[int]:
    """Collectives in the layers, forward and backward, by the width of what they sum."""
    shapes = [
        change.shape
        for change in solution.conversions
        if "layers." in change.boundary.module
        for _ in TRANSITIONS[change.pair].collectives
    ]
    operators = [solution.graph.operators[number] for number, use in solution.uses.items() if use.output]
    shapes += [solution.graph.tensors[op.outputs[0]].shape for op in operators if "layers." in op.module]
    return Counter(shape[-1] for shape in shapes)


class InGroups(nn.Module):
    """Each of two groups of features has a matrix of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(2, 16, 6))

    def forward(self, x: Tensor) -> Tensor:
        return torch.einsum("blgi,gio->blgo", x, self.weight)


class GroupedAttention(nn.Module):
    """Attention of four heads, of which each two are projected together."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(32, 32, bias=False) for _ in range(3))
        self.groups, self.out = InGroups(), nn.Linear(12, 32, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (one(x).unflatten(-1, (4, -1)).transpose(1, 2) for one in (self.q, self.k, self.v))
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2)
        return self.out(self.groups(attended.flatten(2).unflatten(-1, (2, -1))).flatten(2))


def test_a_part_along_two_dims_is_sent_nowhere() -> None:
    """Four ranks share two groups, each a half of a group's features: no collective gathers that."""
    graph = capture(GroupedAttention(), torch.zeros(3, 5, 32))
    tables = Tables(graph, 4, IMPLEMENTATIONS, Profile(), {})
    stays = []
    for relation in tables.relations:
        operator = relation.operator
        if operator.boundary is not None:
            ends = operator.inputs[0], operator.outputs[0]
            for kinds, _ in tables.combinations(relation):
                before, after = (tables.layout(tensor, kinds[tensor]) for tensor in ends)
                if any(isinstance(one, Shard) and len(one.dims) > 1 for one in (before, after)):
                    stays.append(before == after)
    assert stays
    assert all(stays)
