"""Whole experts: each rank has some of a mixture's experts, and one process's numbers come out."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from distributed import run_ranks
from mixture_configs import MIXTURES, SIZES
from tiny import token_batch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from lightning_autotp import full_gradients, make_plan, parallelize
from lightning_autotp.layouts.ownership import Ownership
from lightning_autotp.layouts.plan import Plan
from lightning_autotp.layouts.types import Shard
from lightning_autotp.operators import count_flops
from lightning_autotp.operators.graph import EXPERTS
from lightning_autotp.parallel.experts import WholeExperts
from lightning_autotp.proving.experts import prove_experts, shardable_experts
from lightning_autotp.proving.verify import trace
from lightning_autotp.solving.expert_modules import with_whole_experts
from lightning_autotp.solving.planned import PlanMismatch

WHOLE = "by expert"


def config(family: str, **changes: Any) -> Any:
    return AutoConfig.for_model(family, **(SIZES | MIXTURES[family] | changes))


def mixture(family: str, experts: str, **changes: Any) -> PreTrainedModel:
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(config(family, **changes), experts_implementation=experts)


def deals(plan: Plan) -> set[str]:
    """The modules whose experts are distributed whole."""
    return {use.module for use in plan.implementations if use.name == WHOLE}


def results(model: Any, least: int) -> list[dict[str, Tensor]]:
    """Loss, its auxiliary part, and all gradients; in the second batch, of ``least`` tokens, most experts get none."""
    found = []
    for seed, (rows, length) in enumerate([(2, 17), (1, least)]):
        model.zero_grad()
        batch = token_batch(seed, rows, length, vocabulary=101)
        batch["labels"] = batch["input_ids"]
        output = model(**batch)
        (output.loss if seed == 0 else output.logits.pow(2).sum()).backward()
        if hasattr(model, "autotp"):
            gradients = full_gradients(model)
        else:
            named = model.named_parameters(remove_duplicate=False)
            gradients = {name: parameter.grad for name, parameter in named}
        found.append({"logits": output.logits.detach().clone(), **gradients})
        if seed == 0:
            found[-1]["loss"] = output.loss.detach()
    return found


Case = dict[str, Any]
CASES: dict[str, Case] = {
    "a loop": {"family": "mixtral", "experts": "eager", "output_router_logits": True, "num_hidden_layers": 1},
    "grouped products": {
        "family": "deepseek_v3", "experts": "grouped_mm", "n_routed_experts": 6, "n_group": 1, "num_hidden_layers": 1,
        "first_k_dense_replace": 0,
    },
}  # fmt: skip
MORE_CASES: dict[str, Case] = {
    "batched products": {"family": "qwen3_moe", "experts": "batched_mm"},
    "biases": {"family": "gpt_oss", "experts": "grouped_mm"},
    "a shared expert": {"family": "deepseek_v3", "experts": "eager"},
    "sequence parallel": {"family": "mixtral", "experts": "grouped_mm", "sequence_parallel": True},
    "checkpointing": {"family": "qwen3_moe", "experts": "grouped_mm", "checkpointing": True},
    "granite": {"family": "granitemoe", "experts": "eager"},
}


def parallel(rank: int, size: int, case: Case) -> list[dict[str, Tensor]]:
    options = dict(case)
    checkpointing, sharded = options.pop("checkpointing", False), options.pop("sequence_parallel", False)
    model = mixture(**options)
    if checkpointing:
        model.gradient_checkpointing_enable()
    parallelize(
        model,
        dist.group.WORLD,  # type: ignore[arg-type]
        example_inputs=token_batch(0, 5, 61, vocabulary=101),
        sequence_parallel=sharded,
    )
    assert deals(model.autotp.plan)
    assert model.autotp.plan.shards_sequence == sharded
    return results(model, tokens(case))


def tokens(case: Case) -> int:
    """The fewest that a call may have: of one, the ranks could not have parts."""
    return 2 if "sequence_parallel" in case else 1


def check(case: Case, size: int) -> None:
    options = {key: value for key, value in case.items() if key not in ("sequence_parallel", "checkpointing")}
    wanted = results(mixture(**options), tokens(case))
    for found in run_ranks(parallel, size, case):
        for ours, theirs in zip(found, wanted, strict=True):
            assert ours.keys() == theirs.keys()
            for name, value in theirs.items():
                torch.testing.assert_close(ours[name], value, rtol=1e-4, atol=2e-6, msg=lambda m, n=name: f"{n}: {m}")


@pytest.mark.parametrize("case", CASES)
def test_training_equals_one_process(case: str) -> None:
    check(CASES[case], 2)


@pytest.mark.nightly
@pytest.mark.parametrize(("case", "size"), [*((case, 2) for case in MORE_CASES), *((case, 3) for case in CASES)])
def test_more_training_equals_one_process(case: str, size: int) -> None:
    check((CASES | MORE_CASES)[case], size)


def on_meta(family: str, experts: str = "grouped_mm", **changes: Any) -> PreTrainedModel:
    with torch.device("meta"):
        return mixture(family, experts, **changes)


def test_experts_that_do_not_divide_are_sharded_unevenly() -> None:
    plan, _ = make_plan(on_meta("qwen3_moe", num_experts=7), 3)
    assert deals(plan) == {"model.layers.0.mlp.experts", "model.layers.1.mlp.experts"}
    layouts = {parameter.names[0]: parameter.layout for parameter in plan.parameters}
    layout = layouts["model.layers.0.mlp.experts.gate_up_proj"]
    assert isinstance(layout, Shard)
    assert layout.ownership(0) == Ownership.even(7, 3)
    assert {size.local for size in plan.sizes if size.module.endswith("experts")} == {(3, 2, 2)}


def test_the_cheaper_treatment_is_chosen_at_real_sizes() -> None:
    """Few wide experts are divided: an even share of each is less than the busiest rank's. Many narrow ones are not."""
    wide: dict[str, Any] = {"num_local_experts": 8, "hidden_size": 4096, "intermediate_size": 14336}
    narrow: dict[str, Any] = {
        "num_experts": 128, "num_experts_per_tok": 8, "hidden_size": 4096, "moe_intermediate_size": 1536,
    }  # fmt: skip
    heads: dict[str, Any] = {"num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128, "dtype": "bfloat16"}
    one: dict[str, Any] = {"num_hidden_layers": 1, **heads}
    assert not deals(make_plan(on_meta("mixtral", **wide, **one), 2)[0])
    assert deals(make_plan(on_meta("qwen3_moe", **narrow, **one), 8)[0])


def test_the_user_may_choose() -> None:
    model = on_meta("mixtral", num_hidden_layers=1)
    assert deals(make_plan(model, 2)[0])
    divided, _ = make_plan(model, 2, cut={"*.experts.gate_up_proj": 1})
    assert not deals(divided)
    assert not deals(make_plan(model, 2, keep_whole=["*.experts"])[0])
    heads: dict[str, Any] = {"hidden_size": 4096, "intermediate_size": 14336, "head_dim": 128, "dtype": "bfloat16"}
    assert deals(make_plan(on_meta("mixtral", num_hidden_layers=1, **heads), 2, cut={"*.experts.down_proj": 0})[0])


def products(experts: Ownership | None) -> list[int]:
    """FLOPs of forward and backward of the experts on each rank, or in one piece."""
    counted = []
    for rank in range(1 if experts is None else experts.ranks):
        whole = mixture("mixtral", "eager", num_hidden_layers=1).model.layers[0].mlp.experts
        if experts is not None:
            held = torch.tensor([i for start, stop in experts.held[rank] for i in range(start, stop)])
            for name, parameter in list(whole.named_parameters()):
                setattr(whole, name, nn.Parameter(parameter.detach()[held]))
            whole.num_experts = len(held)
            whole.forward = WholeExperts(whole, experts, rank)
        torch.manual_seed(0)
        tokens = torch.randn(64, 64, requires_grad=True)
        index = torch.stack([torch.randperm(4)[:2] for _ in range(64)])
        with FlopCounterMode(display=False) as counter:
            whole(tokens, index, torch.rand(64, 2)).sum().backward()
        counted.append(counter.get_total_flops())
    return counted


def test_flops_are_those_of_the_products_that_run() -> None:
    model = Model(Experts)
    graph = with_whole_experts(trace(model, IDS), {"experts"})
    (called,) = [operator for operator in graph.operators if operator.name == EXPERTS]
    index = torch.stack([torch.randperm(4)[:2] for _ in range(IDS.numel())])
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        model.experts(torch.randn(IDS.numel(), 16), index, torch.rand(IDS.numel(), 2))
    assert count_flops(called, lambda tensor: graph.tensors[tensor].shape) == counter.get_total_flops() > 0


def test_every_product_runs_on_one_rank() -> None:
    (whole,) = products(None)
    parts = products(Ownership.even(4, 3))
    assert sum(parts) == whole
    assert all(parts)


class Experts(nn.Module):
    """Experts of one matrix, with something that a subclass does otherwise."""

    def __init__(self, number: int = 4, width: int = 16) -> None:
        super().__init__()
        self.number = number
        self.matrices = nn.Parameter(torch.randn(number, width, width) / 4)

    def forward(self, tokens: Tensor, index: Tensor, weights: Tensor) -> Tensor:
        result = torch.zeros_like(tokens)
        for expert in range(self.number):
            token, choice = torch.where(index == expert)
            made = self.made(tokens[token], expert) * weights[token, choice, None]
            result = result.index_add(0, token, made)
        return result

    def made(self, tokens: Tensor, expert: int) -> Tensor:
        return torch.tanh(tokens @ self.matrices[expert])


class KnowsItsNumber(Experts):
    """What an expert does depends on its number, which is another one on a rank."""

    def made(self, tokens: Tensor, expert: int) -> Tensor:
        return super().made(tokens, expert) * (expert + 1)


class LooksAtAllTokens(Experts):
    def forward(self, tokens: Tensor, index: Tensor, weights: Tensor) -> Tensor:
        return super().forward(tokens - tokens.mean(0), index, weights)


class Draws(Experts):
    def made(self, tokens: Tensor, expert: int) -> Tensor:
        return F.dropout(super().made(tokens, expert), 0.5)


class AddsTheTokens(Experts):
    def forward(self, tokens: Tensor, index: Tensor, weights: Tensor) -> Tensor:
        return super().forward(tokens, index, weights) + tokens


class Model(nn.Module):
    """A layer with experts and a router with so many options."""

    def __init__(self, kind: Callable[[], nn.Module], options: int = 4) -> None:
        super().__init__()
        self.table = nn.Embedding(31, 16)
        self.router = nn.Linear(16, options)
        self.experts = kind()
        self.out = nn.Linear(16, 31)

    def forward(self, ids: Tensor) -> Tensor:
        hidden = self.table(ids).flatten(0, 1)
        weights, index = self.router(hidden).softmax(-1).topk(2)
        return self.out(hidden + self.experts(hidden, index, weights)).sum()


IDS = torch.arange(3 * 7).view(3, 7)


def test_a_model_of_any_other_origin_is_treated_alike() -> None:
    plan, _ = make_plan(Model(Experts), 2, example_inputs=IDS)
    assert deals(plan) == {"experts"}
    assert [(size.module, size.attribute, size.local) for size in plan.sizes] == [("experts", "number", (2, 2))]


@pytest.mark.parametrize("kind", [KnowsItsNumber, LooksAtAllTokens, Draws, AddsTheTokens])
def test_experts_that_are_not_the_same_in_parts_are_not_sharded_and_the_plan_says_why(kind: type[nn.Module]) -> None:
    model = Model(kind)
    plan, _ = make_plan(model, 2, example_inputs=IDS)
    assert not deals(plan)
    assert shardable_experts(model, trace(model, IDS), 2).refused["experts"].startswith("its ")
    whole, _ = make_plan(model, 2, example_inputs=IDS, keep_whole=["experts"])
    (matrices,) = [parameter for parameter in whole.parameters if parameter.names[0] == "experts.matrices"]
    assert "its experts cannot be sharded: its" in matrices.described()


def test_choices_that_are_no_experts_are_refused() -> None:
    plan, _ = make_plan(Model(Experts, options=5), 2, example_inputs=IDS, keep_whole=["experts"])
    assert not deals(plan)
    described = "\n".join(parameter.described() for parameter in plan.parameters)
    assert "tokens choose among 5, of which 4 are its experts" in described


def test_a_choice_that_is_no_expert_is_an_error() -> None:
    experts = Experts()
    experts.forward = WholeExperts(experts, Ownership.even(4, 1), 0)  # type: ignore[method-assign]
    with pytest.raises(IndexError, match=r"must be in \[0, 4\), the experts; found 4"):
        experts(torch.randn(2, 16), torch.tensor([[0, 4], [1, 2]]), torch.rand(2, 2))


def given(rank: int, size: int, plan: Plan) -> None:
    parallelize(Model(KnowsItsNumber), dist.group.WORLD, example_inputs=IDS, plan=plan)  # type: ignore[arg-type]


def test_a_given_plan_is_tried_too() -> None:
    """The trace of experts is the same whatever their code computes: only trying them tells."""
    plan, _ = make_plan(Model(Experts), 1 + 1, example_inputs=IDS)
    with pytest.raises(RuntimeError, match="shards the experts of experts whole, but its result in parts"):
        run_ranks(given, 2, plan)


def test_a_plan_of_other_sizes_is_refused() -> None:
    model = Model(Experts)
    plan, _ = make_plan(model, 2, example_inputs=IDS)
    prove_experts(model, trace(model, IDS), plan)
    with pytest.raises(PlanMismatch, match=r"number: 4 -> \[2, 2\]; the plan says none"):
        prove_experts(model, trace(model, IDS), replace(plan, sizes=()))
