"""Layers that repeat are traced as if each of them had run."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import fields
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from selected import nightly
from tiny import meta_model
from torch import Tensor, nn
from transformers import (
    AutoConfig,
    AutoModelForMaskedLM,
    AutoModelForSeq2SeqLM,
    AutoModelForSpeechSeq2Seq,
    DynamicCache,
    EncoderDecoderCache,
    LlamaConfig,
    MistralConfig,
    Qwen3NextConfig,
)

from lightning_autotp.applying.replace import apply_plan
from lightning_autotp.capture import alike_layers, repeated_layers
from lightning_autotp.capture.alike import Places
from lightning_autotp.capture.capture import capture, capture_local, language_model_inputs, meta_copy
from lightning_autotp.capture.size_origins import SizeOrigins
from lightning_autotp.layouts.plan import Plan
from lightning_autotp.layouts.types import Shard
from lightning_autotp.operators.graph import Graph
from lightning_autotp.operators.questions import Expression, Question
from lightning_autotp.parallel.implementations import IMPLEMENTATIONS
from lightning_autotp.pipeline import make_plan
from lightning_autotp.private.torch_private import tree_leaves
from lightning_autotp.proving.compare import compare
from lightning_autotp.ranks.group import TPGroup
from lightning_autotp.solving.alike_relations import Descriptions
from lightning_autotp.solving.cost import Profile
from lightning_autotp.solving.solution import Solution
from lightning_autotp.solving.tables import Tables

WIDTH = 8


@pytest.fixture(scope="module", autouse=True)
def _what_torch_does_once_is_done() -> None:
    model = meta_model("llama", num_hidden_layers=1)
    capture(model, {**language_model_inputs(model), "use_cache": True})


class Traces:
    """Makes traces, and notes what their sizes are followed by, and the layers that did not run in the last one."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.monkeypatch, self.left_out = monkeypatch, list[str]()
        followed = self.followed = list[Any]()

        class Origins(SizeOrigins):
            def __init__(self, graph: Graph, *others: Any) -> None:
                super().__init__(graph, *others)
                followed.append(others)

            def of(self, question: Question) -> Expression | None:
                followed.append(question)
                return super().of(question)

        monkeypatch.setattr("lightning_autotp.capture.capture.SizeOrigins", Origins)
        append = repeated_layers.RepeatedLayers._append

        def noted(layers: Any, stretch: Any, layer: Any, call: Any) -> Any:
            self.left_out.append(layer.path)
            return append(layers, stretch, layer, call)

        monkeypatch.setattr(repeated_layers.RepeatedLayers, "_append", noted)

    def of_each_layer(self, make: Callable[[], Graph]) -> Graph:
        with self.monkeypatch.context() as patch:
            patch.setattr(alike_layers, "_FEWEST", 10**9)
            return make()

    def check(self, make: Callable[[], Graph]) -> list[str]:
        """Compare a graph with that of a trace in which each layer runs; returns the layers that were left out."""
        self.followed.clear()
        whole = self.of_each_layer(make)
        of_each, self.followed[:] = list(self.followed), []
        assert not self.left_out
        found = make()
        assert self.followed[-len(of_each) :] == of_each  # behind those of a trace that was made again
        for field in fields(Graph):
            assert getattr(found, field.name) == getattr(whole, field.name), field.name
        for name in ("settings", "integers", "measured", "questions"):  # in the same order, too
            assert list(getattr(found, name)) == list(getattr(whole, name)), name
        return self.left_out


@pytest.fixture
def traces(monkeypatch: pytest.MonkeyPatch) -> Iterator[Traces]:
    return Traces(monkeypatch)


SIZES = {"hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 8, "vocab_size": 131}
EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 32}
WHISPER = {
    "d_model": 64, "encoder_layers": 5, "decoder_layers": 5, "encoder_attention_heads": 4,
    "decoder_attention_heads": 4, "encoder_ffn_dim": 96, "decoder_ffn_dim": 96, "vocab_size": 131, "num_mel_bins": 8,
    "max_source_positions": 40, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 1,
}  # fmt: skip
LATENT = {
    "q_lora_rank": 16, "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 8,
    "n_routed_experts": 8, "n_group": 2, "topk_group": 1, "first_k_dense_replace": 1, "num_key_value_heads": 8,
    "head_dim": 8,
}  # fmt: skip
MIXER = {"mamba_n_heads": 16, "mamba_d_head": 8, "mamba_d_state": 8, "mamba_n_groups": 1, "attn_layer_indices": [2]}
MODELS: dict[str, tuple[dict[str, Any], int]] = {
    "llama": ({"num_hidden_layers": 5}, 2),
    "mistral": ({"num_hidden_layers": 5, "sliding_window": 16}, 2),
    "gpt2": ({"n_embd": 64, "n_head": 4, "num_hidden_layers": 5, "vocab_size": 131, "n_positions": 80}, 2),
    "qwen3_moe": ({**EXPERTS, "num_hidden_layers": 5, "num_experts": 4}, 2),
    "deepseek_v3": ({**SIZES, **EXPERTS, **LATENT, "num_hidden_layers": 6}, 2),
    "gemma2": ({"num_hidden_layers": 10, "sliding_window": 16}, 5),  # two kinds of layers in turn
    "bert": ({**SIZES, "num_hidden_layers": 5}, 2),
    "t5": ({"d_model": 64, "d_kv": 8, "d_ff": 96, "num_layers": 6, "num_heads": 8, "vocab_size": 131,
            "decoder_start_token_id": 0}, 4),  # the first layer computes what the others are given
    "bamba": ({**SIZES, **MIXER, "num_hidden_layers": 6}, 2),  # one layer is of another kind
    "whisper": (WHISPER, 4),
}  # fmt: skip
CLASSES = {"bert": AutoModelForMaskedLM, "t5": AutoModelForSeq2SeqLM, "whisper": AutoModelForSpeechSeq2Seq}


def model_of(family: str) -> tuple[nn.Module, Any]:
    sizes = MODELS[family][0]
    if family not in CLASSES:
        return meta_model(family, **sizes), None
    with torch.device("meta"):
        model = CLASSES[family].from_config(AutoConfig.for_model(family, **sizes))
    sounds = {"input_features": torch.zeros(2, 8, 80), "decoder_input_ids": torch.zeros(2, 7, dtype=torch.long)}
    return model, {**sounds, "use_cache": False} if family == "whisper" else None


@pytest.mark.parametrize("family", nightly(MODELS, ("llama", "gpt2", "qwen3_moe", "t5")))
def test_a_graph_is_that_of_a_trace_in_which_each_layer_runs(family: str, traces: Traces) -> None:
    model, batch = model_of(family)
    assert len(traces.check(lambda: capture(model, batch))) == MODELS[family][1]


WITH_CACHE = {
    "llama": 2, "gpt2": 2, "mistral": 2, "qwen3_moe": 2, "deepseek_v3": 2, "gemma2": 5, "bamba": 2, "t5": 4,
    "whisper": 4,
}  # fmt: skip
"""How many layers are left out of a call with a cache."""


@pytest.mark.parametrize("family", nightly(WITH_CACHE, ("llama", "mistral", "bamba", "t5")))
def test_layers_that_use_their_own_part_of_a_cache_are_left_out(family: str, traces: Traces) -> None:
    model, batch = model_of(family)
    batch = {**(batch or language_model_inputs(model)), "use_cache": True}
    assert len(traces.check(lambda: capture(model, batch))) == WITH_CACHE[family]


def planned(**options: Any) -> tuple[nn.Module, dict[str, Any], Plan, Solution]:
    model = meta_model("mistral", num_hidden_layers=6)
    batch = language_model_inputs(model)
    plan, solution = make_plan(model, 2, example_inputs=batch, **options)
    return model, batch, plan, solution


def local_model(model: nn.Module, plan: Plan, rank: int = 0) -> nn.Module:
    local = meta_copy(model)
    apply_plan(local, plan, TPGroup("", rank, 2))
    return local


@pytest.mark.parametrize("sequence_parallel", nightly([False, True], [False]))
def test_a_local_graph_is_that_of_a_trace_in_which_each_layer_runs(sequence_parallel: bool, traces: Traces) -> None:
    model, batch, plan, solution = planned(sequence_parallel=sequence_parallel)
    local = local_model(model, plan)
    traces.left_out.clear()
    found = traces.check(lambda: capture_local(local, batch, solution.graph))
    first = 3 if sequence_parallel else 2  # the first layer is given tokens that are cut in another way
    assert found == [f"model.layers.{number}" for number in range(first, 5)]


def test_layers_are_alike_that_are_cut_along_axes_of_their_own(traces: Traces) -> None:
    model, _ = model_of("deepseek_v3")
    batch = language_model_inputs(model)
    plan, solution = make_plan(model, 2, example_inputs=batch, cut={"*.q_a_proj": 0, "*.q_b_proj": 1})
    cuts = [change.target for change in plan.conversions if change.module.endswith("q_b_proj")]
    assert len({cut.cuts[0].axes for cut in cuts if isinstance(cut, Shard)}) == 6  # in each layer another axis
    local = local_model(model, plan)
    traces.left_out.clear()
    assert len(traces.check(lambda: capture_local(local, batch, solution.graph))) == 2


def without_conversion(local: Any) -> None:
    for module in local.model.layers[3].modules():
        for hooks in (module._forward_hooks, module._forward_pre_hooks):
            if hooks:
                hooks.popitem()
                return


def without_sum(local: Any) -> None:
    local.model.layers[3].mlp.down_proj.reduce_output = False


def another_function(local: Any) -> None:
    local.model.layers[3].mlp.act_fn = nn.GELU()


def another_number(local: Any) -> None:
    local.model.layers[3].input_layernorm.variance_epsilon = 0.5


def a_hook(local: Any) -> None:
    local.model.layers[3].mlp.register_forward_hook(lambda module, args, output: output * 2)


def another_forward(local: Any) -> None:
    attention = local.model.layers[3].self_attn
    forward = attention.forward

    def doubled(*args: Any, **kwargs: Any) -> Any:
        output, weights = forward(*args, **kwargs)
        return output * 2, weights

    attention.forward = doubled


def in_other_modes(local: Any) -> None:
    forward = local.model.layers[3].forward

    def rounded(*args: Any, **kwargs: Any) -> Any:
        with torch.autocast("cpu", torch.bfloat16):
            return forward(*args, **kwargs)

    local.model.layers[3].forward = rounded


def another_parameter(local: Any) -> None:
    local.model.layers[3].mlp.down_proj.weight = local.model.layers[2].mlp.down_proj.weight


MISTAKES = (
    without_conversion, without_sum, another_function, another_number, a_hook, another_forward, in_other_modes,
    another_parameter,
)  # fmt: skip


def test_a_mistake_in_a_layer_between_others_is_found(traces: Traces) -> None:
    model, batch, plan, solution = planned()
    assert compare(capture_local(local_model(model, plan), batch, solution.graph), solution, 0) is None
    for plant in MISTAKES:
        local = local_model(model, plan)
        plant(local)
        traces.left_out.clear()
        found = compare(capture_local(local, batch, solution.graph), solution, 0)
        assert found is not None, plant.__name__
        assert "model.layers.3" in str(found), (plant.__name__, str(found))
        assert traces.left_out, plant.__name__  # the layers without the mistake
        assert "model.layers.3" not in traces.left_out, plant.__name__


Code = Callable[["Block", Tensor], Tensor]


class Block(nn.Module):
    """One of several; ``code`` runs between its layers."""

    def __init__(self, code: Code, number: int, shared: Any) -> None:
        super().__init__()
        self.norm, self.inner, self.out = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 12), nn.Linear(12, WIDTH)
        self.register_buffer("table", torch.full((12,), float(number)))
        self.code, self.number, self.shared = code, number, shared
        self.factor = 1.0 if number == 4 else 1

    def forward(self, x: Tensor) -> Tensor:
        hidden: Tensor = self.code(self, self.inner(self.norm(x)))
        return x + self.out(hidden)


class Net(nn.Module):
    def __init__(self, code: Code) -> None:
        super().__init__()
        shared = {"runs": 0, "seen": []}
        self.blocks = nn.ModuleList([Block(code, number, shared) for number in range(7)])

    def forward(self, x: Tensor) -> Tensor:
        RUNS[0], SIZE_OF_BATCH[0] = 0, x.shape[1]
        KEPT.clear()
        for block in self.blocks:
            x = block(x)
        return x + torch.stack(KEPT).mean() if KEPT else x


RUNS = [0]
KEPT: list[Tensor] = []


def ordinary(block: Block, x: Tensor) -> Tensor:
    return F.relu(x, inplace=True) * block.table


def by_number(block: Block, x: Tensor) -> Tensor:
    return x.sin() if block.number == 4 else x.cos()


def by_a_count_kept_in_common(block: Block, x: Tensor) -> Tensor:
    block.shared["runs"] += 1
    return x.sin() if block.shared["runs"] == 4 else x.cos()


def by_a_count_kept_globally_at_the_end(block: Block, x: Tensor) -> Tensor:
    RUNS[0] += 1
    return x.sin() if RUNS[0] > 2 else x.cos()


def in_turn(block: Block, x: Tensor) -> Tensor:
    RUNS[0] += 1
    return x.sin() if RUNS[0] % 2 else x.cos()


def by_value(block: Block, x: Tensor) -> Tensor:
    return x.sin() if (block.table == 4).all() else x.cos()


def by_random_number(block: Block, x: Tensor) -> Tensor:
    return x * (1 + int(random.random() * 4))


def kept(block: Block, x: Tensor) -> Tensor:
    block.last = x.sin()  # type: ignore[assignment]
    return x


def kept_in_common(block: Block, x: Tensor) -> Tensor:
    block.shared["seen"] = [*block.shared["seen"][:2], x]
    return x + len(block.shared["seen"])


def kept_globally(block: Block, x: Tensor) -> Tensor:
    KEPT.append(x.sin())
    return x


def by_the_class_of_a_number(block: Block, x: Tensor) -> Tensor:
    return x * (torch.ones(3, dtype=torch.long) * block.factor).sum()


def written_from_outside(block: Block, x: Tensor) -> Tensor:
    block.table += 1
    return x * block.table


def counted_in_itself(block: Block, x: Tensor) -> Tensor:
    block.runs = getattr(block, "runs", 0) + 1  # type: ignore[assignment]
    return x * block.runs


def by_sizes(block: Block, x: Tensor) -> Tensor:
    rows, tokens, width = x.shape
    if tokens > 64 or rows * tokens % 16 == 0:
        x = x.sin()
    heads = x.view(rows, tokens, 3, width // 3).transpose(1, 2)
    kept = heads[:, :, : heads.shape[2] - 1]
    if kept.size(2) == 37 or kept.numel() > 10_000:
        x = x.cos()
    return x + kept.mean((1, 2)).repeat_interleave(3, -1)[:, None]


def by_the_value_of_a_size(block: Block, x: Tensor) -> Tensor:
    return x[:, -int(x.shape[1] / 2) :].mean(1, keepdim=True) + x


def by_a_size_of_the_batch(block: Block, x: Tensor) -> Tensor:
    return x.sin() if SIZE_OF_BATCH[0] > 64 else x.cos()


def by_a_size_of_its_own(block: Block, x: Tensor) -> Tensor:
    return x.sin() if block.number == 4 and x.shape[1] > 64 else x.cos()


def by_a_size_kept_in_it(block: Block, x: Tensor) -> Tensor:
    block.tokens = x.shape[1]  # type: ignore[assignment]
    return x


def by_sizes_from_the_fourth_on(block: Block, x: Tensor) -> Tensor:
    RUNS[0] += 1
    return x.sin() if RUNS[0] > 3 and x.shape[1] > 64 else x.cos()


SIZE_OF_BATCH = [0]
LEFT_OUT = {  # the first one is given what needs no gradient
    ordinary: 3, counted_in_itself: 3, by_sizes: 3, by_the_value_of_a_size: 3, by_a_size_of_the_batch: 3,
    by_the_class_of_a_number: 2,
}  # fmt: skip
TRACED_AGAIN = by_a_count_kept_globally_at_the_end, by_sizes_from_the_fourth_on, kept_globally
"""Of which something shows that the layers that were left out are not like those that ran."""


@pytest.mark.parametrize(
    "code",
    [
        ordinary, by_number, by_a_count_kept_in_common, by_a_count_kept_globally_at_the_end, in_turn, by_value,
        by_random_number, kept, kept_in_common, written_from_outside, counted_in_itself, by_sizes,
        by_the_value_of_a_size, by_a_size_of_the_batch, by_a_size_of_its_own, by_a_size_kept_in_it,
        by_sizes_from_the_fourth_on, kept_globally, by_the_class_of_a_number,
    ],
)  # fmt: skip
def test_a_layer_whose_code_sees_something_else_runs(code: Code, traces: Traces) -> None:
    model = Net(code)
    left_out = traces.check(lambda: capture(model, torch.randn(3, 5, WIDTH)))
    if code not in TRACED_AGAIN:
        assert len(left_out) == LEFT_OUT.get(code, 0)


class Caching(nn.Module):
    """One of several layers, which are given a cache; ``code`` uses it."""

    def __init__(self, code: Callable[[Any, Tensor, Any], Tensor], number: int) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(WIDTH, WIDTH))
        self.code, self.number, self.next_one = code, number, (number + 1) % 7

    def forward(self, x: Tensor, cache: Any) -> Tensor:
        return self.code(self, self.inner(x), cache)


class WithCache(nn.Module):
    def __init__(self, code: Callable[[Any, Tensor, Any], Tensor], **options: Any) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Caching(code, number) for number in range(7)])
        self.options = options

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        cache = self.cache()
        for block in self.blocks:
            x = block(x, cache)
        held = [value for slot in cache.layers for value in tree_leaves(vars(slot))]
        return x, *(value for value in held if isinstance(value, Tensor) and value.dim())

    def cache(self) -> Any:
        return DynamicCache(**self.options)


class WithBothCaches(WithCache):
    """As a decoder, with a cache of an encoder's states, too."""

    def cache(self) -> Any:
        cache = EncoderDecoderCache(DynamicCache(**self.options), DynamicCache(**self.options))
        cache.layers = [*cache.self_attention_cache.layers, *cache.cross_attention_cache.layers]
        cache.is_updated[4] = True
        return cache


def into_its_own(block: Any, x: Tensor, cache: Any) -> Tensor:
    keys, _ = cache.update(x[:, None], x[:, None], layer_idx=block.number)
    return keys[:, 0] + cache.layers[block.number].values[:, 0]


def into_its_own_alone(block: Any, x: Tensor, cache: Any) -> Tensor:
    return cache.update(x[:, None], x[:, None], block.number)[0][:, 0].sin()


def and_out_of_the_layer(block: Any, x: Tensor, cache: Any) -> Tensor:
    x = x if x.dim() == 4 else x[:, None]
    keys: Tensor = cache.update(x, x, block.number)[0]
    return keys


def and_a_tensor_of_it(block: Any, x: Tensor, cache: Any) -> Tensor:
    x = cache.update(x[:, None], x[:, None], block.number)[0][:, 0]
    return x * cache.layers[block.number]._sliding_window_tensor


def and_a_value_of_it(block: Any, x: Tensor, cache: Any) -> Tensor:
    x = cache.update(x[:, None], x[:, None], block.number)[0][:, 0]
    return x.sin() if cache.layers[block.number]._sliding_window_tensor > 32 else x.cos()


def and_how_many_it_has(block: Any, x: Tensor, cache: Any) -> Tensor:
    x = cache.update(x[:, None], x[:, None], block.number)[0][:, 0]
    return x.sin() if cache.get_seq_length(block.number) > 3 else x.cos()


def into_its_states(block: Any, x: Tensor, cache: Any) -> Tensor:
    seen = cache.update_conv_state(x.mT, block.number).mT
    return seen.sin() + cache.update_recurrent_state(x.exp(), block.number).sum()


def and_out_of_the_states(block: Any, x: Tensor, cache: Any) -> Tensor:
    state: Tensor = cache.update_recurrent_state(x, block.number)
    return state


def into_the_states_of_another(block: Any, x: Tensor, cache: Any) -> Tensor:
    state: Tensor = cache.update_recurrent_state(x, block.next_one)
    return state.sin()


def and_something_else(block: Any, x: Tensor, cache: Any) -> Tensor:
    cache.layers[block.number].conv_states[1] = [x]
    return x.sin()


def and_less(block: Any, x: Tensor, cache: Any) -> Tensor:
    cache.layers[block.number].conv_states.popitem()
    return x.sin()


def into_another(block: Any, x: Tensor, cache: Any) -> Tensor:
    return cache.update(x[:, None], x[:, None], block.next_one)[0][:, 0]


def into_one_of_a_variable(block: Any, x: Tensor, cache: Any) -> Tensor:
    number = block.number
    return cache.update(x[:, None], x[:, None], number)[0][:, 0]


def and_into_a_list(block: Any, x: Tensor, cache: Any) -> Tensor:
    x = cache.update(x[:, None], x[:, None], block.number)[0][:, 0]
    return x.sin() if FOURTH[block.number] else x.cos()


def and_into_a_list_on_the_same_line(block: Any, x: Tensor, cache: Any) -> Tensor:
    x, is_fourth = cache.update(x[:, None], x[:, None], block.number)[0][:, 0], FOURTH[block.number]
    return x.sin() if is_fourth else x.cos()


def and_into_a_product(block: Any, x: Tensor, cache: Any) -> Tensor:
    return block.number * cache.update(x[:, None], x[:, None], block.number)[0][:, 0]


def into_one_it_asks_for(block: Any, x: Tensor, cache: Any) -> Tensor:
    return cache.update(x[:, None], x[:, None], getattr(block, "number"))[0][:, 0]  # noqa: B009


FOURTH = [number == 4 for number in range(7)]
CONFIG = {"config": LlamaConfig(num_hidden_layers=7)}
SLIDING = {"config": MistralConfig(num_hidden_layers=7, sliding_window=64)}
LINEAR = {"config": Qwen3NextConfig(num_hidden_layers=7, layer_types=["linear_attention"] * 7)}
SHORT = {"config": MistralConfig(num_hidden_layers=7, sliding_window=4)}


@pytest.mark.parametrize(
    ("code", "options", "left_out"),
    [
        (into_its_own, CONFIG, 4), (into_its_own, SLIDING, 4), (into_its_own_alone, SLIDING, 4),
        (into_its_own_alone, SHORT, 4),  # which keeps a part of what it is given
        (and_a_tensor_of_it, SLIDING, 4), (and_a_value_of_it, SLIDING, 4), (and_how_many_it_has, SLIDING, 4),
        (into_its_own, {}, 0),  # whose parts are made one after the other
        (and_out_of_the_layer, CONFIG, 0),  # then two share one memory
        (into_its_states, LINEAR, 4), (and_out_of_the_states, LINEAR, 0), (into_the_states_of_another, LINEAR, 0),
        (and_something_else, LINEAR, 4), (and_less, LINEAR, 0),
        (into_another, CONFIG, 0), (into_one_of_a_variable, CONFIG, 0), (and_into_a_list, CONFIG, 0),
        (and_into_a_list_on_the_same_line, CONFIG, 0), (and_into_a_product, CONFIG, 0),
        (into_one_it_asks_for, CONFIG, 0),
    ],
)  # fmt: skip
def test_a_number_that_says_more_than_which_part_of_a_cache_tells_layers_apart(
    code: Callable[[Any, Tensor, Any], Tensor], options: dict[str, Any], left_out: int, traces: Traces
) -> None:
    model = WithCache(code, **options)
    x = torch.randn(3, 5, WIDTH, requires_grad=True)
    assert len(traces.check(lambda: capture(model, x))) == left_out


def into_both(block: Any, x: Tensor, cache: Any) -> Tensor:
    own, states = cache.self_attention_cache, cache.cross_attention_cache
    x = own.update(x[:, None], x[:, None], block.number)[0][:, 0]
    x = states.update(x[:, None].exp(), x[:, None].sin(), block.number)[0][:, 0]
    cache.is_updated[block.number] = False
    return x.sin()


def and_whether_it_was_there(block: Any, x: Tensor, cache: Any) -> Tensor:
    x = x.sin() if cache.is_updated.get(block.number) else x.cos()
    cache.is_updated[block.number] = True
    return x


def and_forgets_it(block: Any, x: Tensor, cache: Any) -> Tensor:
    del cache.is_updated[block.number]
    return x.sin()


def and_says_it_of_another(block: Any, x: Tensor, cache: Any) -> Tensor:
    cache.is_updated[block.next_one] = True
    return x.sin()


@pytest.mark.parametrize(
    ("code", "left_out"),
    [
        (into_both, 3),  # the fifth is given another cache than the others, whatever it makes of that
        (and_whether_it_was_there, 3), (and_forgets_it, 0), (and_says_it_of_another, 0),
    ],
)  # fmt: skip
def test_a_cache_of_an_encoder_s_states_has_a_part_for_each_layer(
    code: Callable[[Any, Tensor, Any], Tensor], left_out: int, traces: Traces
) -> None:
    model = WithBothCaches(code, **CONFIG)
    x = torch.randn(3, 5, WIDTH, requires_grad=True)
    assert len(traces.check(lambda: capture(model, x))) == left_out


class HandingOn(nn.Module):
    """Takes a tensor that no parameter went into, and returns it, as decoder layers do with positions' biases."""

    def __init__(self, number: int) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(WIDTH, WIDTH))

    def forward(self, x: Tensor, static: Tensor) -> tuple[Tensor, Tensor]:
        return self.inner(x) * static, static


@pytest.mark.parametrize(
    ("between", "left_out"),
    [(lambda static: static, 3), (lambda static: static.add_(1), 0), (lambda static: static + 1, 0)],
    ids=["as it is", "written", "another"],
)
def test_a_static_tensor_that_is_handed_on_is_the_same_one(
    between: Callable[[Tensor], Tensor], left_out: int, traces: Traces
) -> None:
    class Handed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.ModuleList(map(HandingOn, range(7)))

        def forward(self, x: Tensor) -> Tensor:
            static = torch.ones(WIDTH)
            for block in self.blocks:
                x, static = block(x, static)
                static = between(static)
            return x

    assert len(traces.check(lambda: capture(Handed(), torch.randn(3, 5, WIDTH)))) == left_out


class Counted(Net):
    def forward(self, x: Tensor, calls: Any = None) -> Tensor:
        calls.number += 1
        return super().forward(x)


def test_sizes_in_calls_that_go_on_are_noted_for_layers_that_do_not_run(traces: Traces) -> None:
    calls = [(torch.randn(3, tokens, WIDTH), SimpleNamespace(number=0)) for tokens in (5, 6)]
    assert len(traces.check(lambda: capture(Counted(by_sizes), calls))) == 6


def test_layers_run_of_whose_insides_something_is_collected(traces: Traces) -> None:
    model, _ = model_of("qwen3_moe")
    batch = {**language_model_inputs(model), "output_router_logits": True}
    traces.check(lambda: capture(model, [batch, batch]))  # in the second call the hooks are there that collect it


def test_a_list_may_have_none_among_its_layers(traces: Traces) -> None:
    class Sparse(Net):
        def forward(self, x: Tensor) -> Tensor:
            for block in self.blocks:
                x = x if block is None else block(x)
            return x

    model = Sparse(ordinary)
    model.blocks[2] = None  # type: ignore[assignment]
    assert len(traces.check(lambda: capture(model, torch.randn(3, 5, WIDTH)))) > 0


class Scale(float):
    pass


@pytest.mark.parametrize("shard_sequence", nightly([False, True], [False]))
@pytest.mark.parametrize("family", nightly(MODELS, MODELS.keys() - {"gpt2", "deepseek_v3", "t5"}))
def test_operators_that_are_alike_have_the_tables_that_each_would_have(
    family: str, shard_sequence: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, batch = model_of(family)
    tables = Tables(capture(model, batch), 3, IMPLEMENTATIONS, Profile(activation_price=1.0), {}, None, shard_sequence)
    found, domains = tables.problem()
    for description in ("of", "of_tensor"):
        monkeypatch.setattr(Descriptions, description, lambda *_: object())
    each, of_each = tables.problem()
    assert domains == of_each
    assert [table.scope for table in found.tables] == [table.scope for table in each.tables]
    assert [*map(found.rows, found.tables)] == [*map(each.rows, each.tables)]


class Slots:
    __slots__ = ("value",)


class Slotted(Slots):
    def __init__(self, value: int) -> None:
        self.value = value


def function_with(number: int) -> Callable[[], int]:
    def function() -> int:
        return 0

    function.number = number  # type: ignore[attr-defined]
    return function


def unfinished(number: int) -> Callable[[], int]:
    def function() -> int:
        return later

    if number < 0:
        later = number
    return function


class Entries(dict[str, int]):
    def __init__(self, number: int) -> None:
        super().__init__(one=1)
        self.number = number


@pytest.mark.parametrize(
    "make", [Scale, Slotted, function_with, unfinished, Entries, lambda number: np.array([number, number])]
)
def test_modules_that_hold_something_else_are_not_alike(make: Callable[[int], Any]) -> None:
    model = Net(ordinary)
    for block in model.blocks:
        block.held = 3  # type: ignore[assignment]
    one, other, *_ = model.blocks
    assert Places(model, frozenset()).counterparts(one, other) is not None
    one.held, other.held = make(1), make(2)  # type: ignore[assignment]
    assert Places(model, frozenset()).counterparts(one, other) is None
