"""Sequence parallelism: tokens are sharded between tensor-parallel regions, and one process's numbers come out."""

from __future__ import annotations

import copy
import io
import re
import weakref
from dataclasses import replace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from distributed import run_ranks
from rich.console import Console
from tiny import meta_model, tiny_model, token_batch
from torch import Tensor
from zoo.models import build

from lightning_autotp import full_gradients, make_plan, parallelize
from lightning_autotp.layouts.plan import Plan
from lightning_autotp.layouts.types import Replicate
from lightning_autotp.parallel import overlap
from lightning_autotp.parallel.linear import ColumnParallelLinear
from lightning_autotp.parallel.logits import VocabParallelLogits
from lightning_autotp.proving.new_calls import UnprovedCall
from lightning_autotp.solving.cost import Profile

FAMILIES = ("llama", "gemma2", "olmo2", "phi3", "gpt_neox")
DAILY = (("olmo2", 2), ("gpt_neox", 2))
"""Norms of projections; biases, and attention beside the MLP. In ``test_overlap.py`` there is Llama on three ranks."""
BATCHES = ((2, 17), (1, 16), (3, 5), (2, 64))
BLOCKWISE = {
    "layer_types": ["linear_attention", "full_attention"],
    "linear_num_key_heads": 4,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 32,
    "experts_implementation": "eager",  # grouped products have no fp64
}
"""A Qwen3-Next, whose linear attention takes 64 tokens at a time."""


ENCODED = ((0, 17), (1, 17), (2, 12))
"""Seeds and lengths of the batches of an encoder-decoder; the first one is planned for."""

WIDE = Profile(flops=Profile().flops / 64)
"""Products are as dear as those of a model 4,096 wide."""


def changes_in_a_layer(family: str, **sizes: Any) -> tuple[dict[str, str], Plan]:
    """Where the second layer changes layouts, with the letters of both types; and the plan."""
    plan, _ = make_plan(meta_model(family, **sizes), 2, sequence_parallel=True, profile=WIDE)
    layer = "model.layers.1."
    return {
        f"{change.module.removeprefix(layer)}.{change.side}": change.source.letter + change.target.letter
        for change in plan.conversions
        if change.module.startswith(layer)
    }, plan


def test_the_solver_finds_megatrons_pattern() -> None:
    """Row-parallel products are reduce-scattered, column-parallel ones gather; norms are on each rank's tokens."""
    changes, plan = changes_in_a_layer("llama")
    assert changes == {
        "self_attn.in": "SR",
        "self_attn.o_proj.out": "PS",
        "mlp.in": "SR",
        "mlp.down_proj.out": "PS",
    }
    layouts = {name: parameter.layout for parameter in plan.parameters for name in parameter.names}
    assert all(isinstance(layout, Replicate) for name, layout in layouts.items() if "norm" in name)


def test_a_mixture_communicates_where_a_dense_block_does() -> None:
    """Its router reads what was gathered for the experts: no sum of its own in either direction."""
    changes, _ = changes_in_a_layer("mixtral", num_local_experts=4)
    assert changes == {
        "self_attn.in": "SR",
        "self_attn.o_proj.out": "PS",
        "mlp.in": "SR",
        "mlp.out": "PS",
    }


def results(model: Any) -> list[dict[str, Tensor]]:
    found = []
    for seed, (rows, length) in enumerate(BATCHES):
        model.zero_grad()
        batch = token_batch(seed, rows, length)
        batch["labels"][0, 0] = batch["input_ids"][0, 0]
        output = model(**batch)
        output.loss.backward()
        if hasattr(model, "autotp"):
            gradients = full_gradients(model)
        else:
            named = model.named_parameters(remove_duplicate=False)
            gradients = {name: parameter.grad for name, parameter in named}
        found.append({"loss": output.loss.detach(), "logits": output.logits.detach().clone(), **gradients})
    return found


def parallel(rank: int, size: int, family: str, length: int = 61, changes: dict[str, Any] | None = None) -> Any:
    torch.set_default_dtype(torch.float64)
    model = parallelize(
        tiny_model(family, **(changes or {})),
        dist.group.WORLD,  # type: ignore[arg-type]
        example_inputs=token_batch(0, 5, length),
        profile=WIDE,
        sequence_parallel=True,
    )
    assert model.autotp.plan.shards_sequence
    return results(model)


@pytest.mark.parametrize(
    ("family", "size"),
    [
        pytest.param(family, size, marks=[] if (family, size) in DAILY else pytest.mark.nightly)
        for family in FAMILIES
        for size in (2, 3)
    ],
)
def test_training_equals_one_process(family: str, size: int) -> None:
    """Of one layer daily; those on three ranks have two."""
    check(family, size, 61, {"num_hidden_layers": 1} if (family, size) in DAILY else {})


@pytest.mark.nightly
@pytest.mark.parametrize("length", [128, 61])
def test_tokens_taken_in_blocks_are_sharded_at_any_length(length: int) -> None:
    """Planned where the tokens divide into blocks, and run where they do not; and the other way round."""
    check("qwen3_next", 2, length, BLOCKWISE)


def check(family: str, size: int, *planned_for: Any) -> None:
    torch.set_default_dtype(torch.float64)
    try:
        wanted = results(tiny_model(family, **(planned_for[1] if planned_for else {})))
    finally:
        torch.set_default_dtype(torch.float32)
    for found in run_ranks(parallel, size, family, *planned_for):
        for ours, theirs in zip(found, wanted, strict=True):
            assert ours.keys() == theirs.keys()
            for name, value in theirs.items():
                torch.testing.assert_close(ours[name], value, rtol=1e-5, atol=1e-7, msg=lambda m, n=name: f"{n}: {m}")


def kept(model: Any) -> dict[str, Any]:
    """What of the gathered inputs is alive after a forward, and how often each is gathered again in the backward."""
    inputs, handles = token_batch(0, 2, 32), []
    alive = []

    def look(module: Any, args: Any) -> None:
        alive.append(weakref.ref(args[0].untyped_storage()))

    for module in model.modules():
        if isinstance(module, ColumnParallelLinear) and module.out_features != 131:
            handles.append(module.register_forward_pre_hook(look))
    loss = model(**inputs).loss
    found: dict[str, Any] = {"seen": len(alive), "alive": sum(ref() is not None for ref in alive)}
    with mock.patch.object(overlap, "begin_gather", wraps=overlap.begin_gather) as gather:
        loss.backward()
    for handle in handles:
        handle.remove()
    model.zero_grad()
    return {
        **found,
        "gathers": gather.call_count,
        "gathered": len({id(call.args[0]) for call in gather.call_args_list}),
    }


def called_alone(model: Any) -> Tensor:
    """A loss that calls the base model, the embeddings, the head and modules further inside by themselves."""
    batch = token_batch(0, 2, 17)
    ids = batch["input_ids"]
    hidden = model.model(input_ids=ids, use_cache=False).last_hidden_state
    logits = model.lm_head(hidden)
    loss = torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())
    layer = model.model.layers[1]
    loss = loss + layer.mlp(layer.post_attention_layernorm(hidden)).pow(3).mean() + layer.mlp.up_proj(hidden).sum()
    return loss + hidden.pow(2).mean() + model.get_input_embeddings()(ids).pow(3).mean()


def alone(rank: int, size: int) -> dict[str, Any]:
    torch.set_default_dtype(torch.float64)
    reference, model = tiny_model("llama"), tiny_model("llama")
    parallelize(model, dist.group.WORLD, example_inputs=token_batch(0, 5, 61), sequence_parallel=True)  # type: ignore[arg-type]
    found_kept = kept(model)
    losses = []
    for each in (model, reference):
        loss = called_alone(each)
        loss.backward()
        losses.append(loss.detach())
    assert torch.allclose(*losses)
    for name, gradient in full_gradients(model).items():
        assert torch.allclose(gradient, reference.get_parameter(name).grad), name
    embeds = model.get_input_embeddings()(token_batch(0, 2, 17)["input_ids"])
    with pytest.raises(RuntimeError, match=r"model is called on its own with a tensor at \[1\]\['inputs_embeds'\]"):
        model.model(inputs_embeds=embeds)
    ids = token_batch(0, 2, 17)["input_ids"]
    given = model(inputs_embeds=embeds, labels=ids).loss, reference(input_ids=ids, labels=ids).loss
    assert torch.allclose(*given)
    with pytest.raises(UnprovedCall, match="called in another way than it was traced"):
        model(inputs_embeds=embeds.detach())
    with pytest.raises(UnprovedCall, match=r"it is \[2, 1, \d+\] here, .* one token in each row, give two or more"):
        model(input_ids=ids[:, :1], use_cache=False)
    all_hidden = [each(input_ids=ids, output_hidden_states=True).hidden_states for each in (model, reference)]
    for found, wanted in zip(*all_hidden, strict=True):
        assert torch.allclose(found, wanted)
    with pytest.raises(RuntimeError, match="generate needs all tokens on every rank"):
        model.generate(ids, max_new_tokens=2)
    return found_kept


def test_modules_called_by_themselves_take_and_give_all_tokens_and_gathered_inputs_are_not_kept() -> None:
    for found in run_ranks(alone, 2):
        assert found["seen"] == 10  # q, k, v, gate and up of two layers
        assert found["alive"] == 0
        assert found["gathers"] == found["gathered"] == 4  # one for attention and one for the MLP of each


def encoded(rank: int, size: int) -> None:
    """An encoder-decoder gives its encoder's last state back, shown whole: in batches of any length, in both modes."""
    torch.set_default_dtype(torch.float64)
    reference = build("bart", "seq2seq", encoder_layers=1, decoder_layers=1)
    example, *batches = (token_batch(seed, 3, length) for seed, length in ENCODED)
    model = copy.deepcopy(reference)
    parallelize(model, dist.group.WORLD, example_inputs=example, sequence_parallel=True)  # type: ignore[arg-type]
    for batch in batches:
        for training in (True, False):
            found, wanted = (each.train(training)(**batch) for each in (model, reference))
            torch.testing.assert_close(found.loss, wanted.loss)
            state = found.encoder_last_hidden_state
            assert isinstance(state, VocabParallelLogits)
            torch.testing.assert_close(state.full(), wanted.encoder_last_hidden_state)


def test_outputs_with_sharded_tokens_are_as_long_as_the_batch() -> None:
    run_ranks(encoded, 2)


def test_auto_with_whole_tokens_is_the_plan_without_the_option() -> None:
    """Two embeddings are added, the sums of which only sharded tokens let be put off."""
    model = meta_model("gpt_bigcode", n_embd=64, n_head=4, n_layer=2, n_positions=64)
    options = {"example_inputs": {"input_ids": torch.zeros(2, 14, dtype=torch.long)}, "tokens_per_step": (2, 14)}
    plan, _ = make_plan(model, 2, sequence_parallel="auto", **options)
    without, _ = make_plan(model, 2, **options)
    assert plan.whole_tokens == ("sharding them costs more than it saves",)
    assert replace(plan, whole_tokens=()) == without


@pytest.mark.parametrize("asked", [True, "auto"])
def test_one_rank_has_all_tokens(asked: Any) -> None:
    """A script that runs at several sizes also runs at one."""
    plans = [make_plan(meta_model("llama"), 1, sequence_parallel=choice)[0] for choice in (False, asked)]
    assert plans[0] == plans[1]


def test_auto_shards_tokens_where_that_costs_no_time() -> None:
    """In a ring an all-reduce is a gather and a reduce-scatter, so norms cost less; a switch does it in one."""
    model = meta_model("llama", hidden_size=1024, intermediate_size=2816, num_attention_heads=16, head_dim=64)
    for profile, sharded in ((Profile(all_reduce_passes=2.0), True), (Profile(), False)):
        plan, solution = make_plan(model, 8, sequence_parallel="auto", profile=profile)
        _, without = make_plan(model, 8, profile=profile)
        assert plan.shards_sequence == sharded
        assert bool(plan.whole_tokens) != sharded
        assert solution.cost < without.cost if sharded else solution.cost == pytest.approx(without.cost)


def test_where_tokens_stay_whole_is_said_calmly() -> None:
    plan, _ = make_plan(meta_model("gpt2", num_hidden_layers=1), 2, sequence_parallel=True)
    assert plan.shards_sequence
    console = Console(width=500, record=True, file=io.StringIO())
    console.print(plan.table())
    text = console.export_text()
    assert "every rank has all tokens in transformer, whose code uses their number\n" in re.sub(" +\n", "\n", text)
    assert not re.search("Error|local trace", text)
