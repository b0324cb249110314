"""What a plan says a step communicates is what goes over the wire: every collective of one step is counted, in bytes.

A dispatch mode counts the collectives as PyTorch sees them, below everything of ours. For each the plan's unit is the
whole tensor: an all-reduce's tensor, an all-gather's result, a reduce-scatter's input. Where a dim does not divide, the
ranks' parts are padded to the largest one, so a gathered or scattered tensor of ``size`` rows travels as ``ranks *
largest`` rows; the plan counts the rows that mean something.
"""

from __future__ import annotations

import math
from collections import Counter
from functools import lru_cache
from typing import Any

import pytest
import torch
import torch.distributed as dist
from distributed import run_ranks
from tiny import tiny_config
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import AutoModelForCausalLM
from wire import Wire

from lightning_autotp import parallelize
from lightning_autotp.layouts.plan import Plan
from lightning_autotp.layouts.transitions import TRANSITIONS
from lightning_autotp.layouts.types import Layout, Replicate, Shard
from lightning_autotp.pipeline import make_plan
from lightning_autotp.solving.plan_from_solution import gathered_again
from lightning_autotp.solving.solution import Solution

BATCH, LENGTH = 3, 17


class Wide(nn.Module):
    """A linear whose output must be whole after it, and one that takes its part of a whole input."""

    def __init__(self, inner: int) -> None:
        super().__init__()
        self.table = nn.Embedding(64, 16)
        self.up, self.norm, self.down = nn.Linear(16, inner), nn.LayerNorm(inner), nn.Linear(inner, 16)

    def forward(self, ids: Tensor) -> Tensor:
        return self.down(self.norm(self.up(self.table(ids)))).square().mean()


class Features(nn.Module):
    """A model of features: its input has no gradient, so nothing is reduced for one."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(16, 48), nn.Linear(48, 16)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.gelu(self.up(x))).square().mean()


GPT2 = {"n_embd": 64, "n_head": 4, "n_layer": 1, "resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
SHARED_EXPERT = {
    "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 48, "shared_expert_intermediate_size": 96
}  # fmt: skip
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {"num_hidden_layers": 2}),
    "one key/value head": ("llama", {"num_key_value_heads": 1}),
    "norms of heads": ("qwen3", {}),
    "fused projections": ("phi3", {}),
    "gpt2": ("gpt2", GPT2 | {"vocab_size": 131}),
    "mixtral": ("mixtral", {"num_local_experts": 4, "intermediate_size": 96}),
    "normed projections": ("olmo2", {}),
    "gathered column": ("wide", {"inner": 6}),
    "gathered uneven column": ("wide", {"inner": 7}),
    "input without gradient": ("features", {}),
    "sequence parallel": ("llama", {}),
    "sequence parallel mixture": ("mixtral", {"num_local_experts": 4, "intermediate_size": 96}),
    "sequence parallel shared expert": ("qwen2_moe", SHARED_EXPERT),
}

ON_THREE = ("llama", "one key/value head", "gathered uneven column", "sequence parallel")
"""Cases with uneven and shared parts on three ranks."""
ON_TWO = (
    "norms of heads", "mixtral", "gathered column", "input without gradient", "sequence parallel shared expert"
)  # fmt: skip
DAILY = (*((2, case) for case in ON_TWO), *((3, case) for case in ON_THREE))
"""All others run nightly."""


def build(case: str) -> tuple[nn.Module, dict[str, Tensor]]:
    family, changes = CASES[case]
    torch.manual_seed(0)
    ids = torch.randint(3, 60, (BATCH, LENGTH))
    if family == "features":
        return Features(), {"x": torch.randn(BATCH, LENGTH, 16)}
    if family == "wide":
        return Wide(**changes), {"ids": ids}
    model = AutoModelForCausalLM.from_config(tiny_config(family, **{"num_hidden_layers": 1, **changes}))
    return model, {"input_ids": ids, "labels": ids, "use_cache": False}


def one_step(rank: int, world_size: int, cases: tuple[str, ...]) -> dict[str, tuple[Plan, Counter[str], Counter[str]]]:
    found = {}
    for case in cases:
        model, batch = build(case)
        options = {"sequence_parallel": case.startswith("sequence parallel")}
        local = parallelize(model.train(), dist.group.WORLD, example_inputs=batch, **options)
        wire = Wire()
        with wire:
            output = local(**batch)
            (output if isinstance(output, Tensor) else output.loss).backward()
        found[case] = (local.autotp.plan, wire.calls, wire.bytes)
    return found


@lru_cache
def started(ranks: int, cases: tuple[str, ...]) -> list[dict[str, Any]]:
    return run_ranks(one_step, ranks, cases)


def steps(ranks: int, case: str) -> list[Any]:
    """What a step of this case was on every rank."""
    together = tuple(each for each in CASES if ((ranks, each) in DAILY) == ((ranks, case) in DAILY))
    return [seen[case] for seen in started(ranks, together)]


def on_the_wire(plan: Plan, solution: Solution, rank: int) -> dict[str, tuple[int, int]]:
    """What the plan's numbers come to on one rank, with padding, and with shared elements counted where they are.

    * gathers and scatters: ``ranks * largest / size`` of the plan's bytes;
    * gradient sums: one call for all parameters that every rank has whole; for each other one a call for every set of
      ranks that this rank shares elements of it with, of exactly these elements.
    """
    planned = {c.kind: (c.calls, c.bytes) for c in plan.communication if c.kind != "gradient sum"}
    for change in solution.conversions:
        shard = change.source if isinstance(change.source, Shard) else change.target
        again = ["all_gather"] * (change.boundary in gathered_again(solution))
        for kind in (kind for kind in (*TRANSITIONS[change.pair].collectives, *again) if kind != "all_reduce"):
            assert isinstance(shard, Shard)
            ((_, owned),) = shard.dims
            size = math.prod(change.shape) * 4
            padded = size * plan.ranks * max(owned.local_size(r) for r in range(plan.ranks)) // owned.size
            planned[kind] = (planned[kind][0], planned[kind][1] + padded - size)
    whole = [math.prod(p.shape) for p in plan.parameters if isinstance(p.layout, Replicate)]
    sums = [elements for p in plan.parameters for elements in shared_elements(p.shape, p.layout, rank).values()]
    sums += [sum(whole)] if whole else []
    if sums:
        planned["gradient sum"] = (len(sums), 4 * sum(sums))
    return planned


def shared_elements(shape: tuple[int, ...], layout: Layout, rank: int) -> dict[tuple[int, ...], int]:
    """How many of its elements of a parameter a rank shares, by the ranks it shares them with."""
    found: dict[tuple[int, ...], int] = {}
    if isinstance(layout, Shard):
        ((dim, owned),) = layout.dims
        for start, stop, ranks in owned.owners:
            if rank in ranks and len(ranks) > 1:
                found[ranks] = found.get(ranks, 0) + (stop - start) * math.prod(shape) // shape[dim]
    return found


def is_even(plan: Plan, solution: Solution) -> bool:
    """Whether every gathered dim divides, and no rank shares a part of a parameter with some others."""
    layouts = [layout for change in solution.conversions for layout in (change.source, change.target)]
    shards = [layout for layout in layouts if isinstance(layout, Shard)]
    own = [p.layout for p in plan.parameters if isinstance(p.layout, Shard)]
    return all(
        owned.local_size(rank) * owned.ranks == owned.size
        for shard in shards for _, owned in shard.dims for rank in range(owned.ranks)
    ) and not any(owned.is_shared for shard in own for _, owned in shard.dims)  # fmt: skip


@pytest.mark.parametrize(
    ("ranks", "case"),
    [
        pytest.param(ranks, case, marks=[] if (ranks, case) in DAILY else pytest.mark.nightly)
        for ranks in (2, 3)
        for case in CASES
    ],
)
def test_calls_and_bytes(ranks: int, case: str) -> None:
    model, batch = build(case)
    plan, solution = make_plan(
        model, ranks, example_inputs=batch, sequence_parallel=case.startswith("sequence parallel")
    )
    for rank, (used, calls, size) in enumerate(steps(ranks, case)):
        assert used == plan
        measured = {kind: (calls[kind], size[kind]) for kind in calls}
        assert measured == on_the_wire(plan, solution, rank)
        if is_even(plan, solution):
            assert measured == {c.kind: (c.calls, c.bytes) for c in plan.communication}
    assert calls["all_reduce"] > 0


def test_the_cases_show_every_kind() -> None:
    """Even and uneven dims, gathers, sums of whole and of shared gradients, a loss on the vocabulary's parts."""
    plans = {(ranks, case): steps(ranks, case)[0][0] for ranks, case in DAILY}
    kinds = {c.kind for plan in plans.values() for c in plan.communication}
    assert {"all_reduce", "all_gather", "gradient sum"} <= kinds
    shards = [p.layout for plan in plans.values() for p in plan.parameters if isinstance(p.layout, Shard)]
    assert any(owned.is_shared for shard in shards for _, owned in shard.dims)
    assert any(change.view for change in plans[3, "llama"].conversions)
    assert any(use.output == ("S", "I") for use in plans[2, "gathered column"].implementations)
