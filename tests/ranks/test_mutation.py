"""Mutation testing of the proof: whatever mistake is planted in a plan, verification or numeric parity finds it.

For every architecture each planted mistake meets, in this order: building the local model, the comparison of the cuts,
the comparison of the traces (on every rank), the trial of a mixture's experts, and where all of these are content, a
training step on real processes whose loss and gradients are compared with one process's. A mistake that all of them
pass would be one that changes nothing: then it is *equivalent*, and which those are is asserted, too.

Each one that can be built meets the first training step as well, alone: nothing is proved before it.
"""

from __future__ import annotations

import copy
import math
from collections import Counter
from datetime import timedelta
from functools import lru_cache
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from distributed import PATIENCE, run_ranks
from mutations import PLAN, SOLUTION, Mutation, planted
from torch import nn
from zoo.parity import prepare

from lightning_autotp.applying.changed_calls import CallMismatch
from lightning_autotp.applying.followed_code import UnseenPath
from lightning_autotp.applying.replace import PlanMismatch, apply_plan
from lightning_autotp.capture.capture import as_calls, capture_local, meta_copy
from lightning_autotp.gradients.sums import synchronize_gradients
from lightning_autotp.guard.bypassed import BypassedLayer
from lightning_autotp.guard.compared import DifferentOnRanks
from lightning_autotp.guard.guard import Guard
from lightning_autotp.layouts.plan import Plan
from lightning_autotp.parameters.local_blocks import plain
from lightning_autotp.parameters.state import parallel_state
from lightning_autotp.pipeline import make_plan
from lightning_autotp.proving.compare import compare, cut_differently
from lightning_autotp.proving.experts import prove_experts
from lightning_autotp.proving.new_calls import CallProver
from lightning_autotp.ranks.group import TPGroup
from lightning_autotp.solving.solution import Solution

RANKS = 2
ARCHITECTURES = {
    "llama": "causal",
    "gpt2": "causal",
    "qwen3": "causal",
    "phi3": "causal",
    "olmo2": "causal",
    "mixtral": "causal",
    "gpt_oss": "causal",
    "deepseek_v3": "causal",
    "falcon": "causal",
    "bloom": "causal",
    "bamba": "causal",
    "codegen": "causal",
    "t5": "seq2seq",
    "mistral": "causal",
}
IN_CI = ("gpt2", "mistral")
SEQUENCE_PARALLEL = ("mistral",)
OUTCOMES = "building", "cuts", "trace", "trial", "parity", "equivalent"
BUILDING, CUTS, TRACE, TRIAL, PARITY, EQUIVALENT = OUTCOMES
ALONE = STEP, FAILS = "first step alone", "torch alone"
DIFFERING = {
    "Invariant to Replicate dropped",
    "Partial to Invariant dropped",
    "all-reduce of a layer's input gradient dropped",
    "column layer left ordinary",
    "gradient sum dropped",
    "layer's all-reduce dropped",
    "row layer left ordinary",
    "vocab layer left ordinary",
}
"""Mistakes after which the ranks have other values in tensors that should be the same on all of them."""
PAGE = Path(__file__).parents[2] / "docs" / "planted-mistakes.md"
LOSS_TOLERANCE, GRADIENT_TOLERANCE, ROUNDING = 1e-5, 1e-4, 1e-7


@lru_cache
def planned(name: str) -> tuple[nn.Module, dict[str, Any], Plan, Solution, list[Mutation]]:
    model, batch = prepare(name, ARCHITECTURES[name])
    plan, solution = make_plan(model, RANKS, example_inputs=batch, sequence_parallel=name in SEQUENCE_PARALLEL)
    return model, batch, plan, solution, list(planted(plan, solution, solution.graph.integers))


def verified(name: str, plan: Plan, solution: Solution, mutation: Mutation | None = None) -> str:
    """What notices the mistake before anything runs; nothing for a right plan."""
    model, batch, _, right, _ = planned(name)
    # One rank shows what the trace can see of a mistake that plan and solution share; the parity check sees both.
    for rank in range(1 if mutation is not None and mutation.stage == SOLUTION else RANKS):
        local = meta_copy(model)
        try:
            apply_plan(local, plan, TPGroup("", rank, RANKS))
        except (PlanMismatch, CallMismatch, ValueError):
            return BUILDING
        if cut_differently(parallel_state(local).metas, solution) is not None:
            return CUTS
        if compare(capture_local(local, batch), solution, rank) is not None:
            return TRACE
    try:
        prove_experts(model, right.graph, plan)
    except PlanMismatch:
        return TRIAL
    return ""


@lru_cache
def outcomes(name: str, with_all: bool = True) -> tuple[tuple[Mutation, str], ...]:
    """Every planted mistake, or the first of each kind, and what notices it before anything runs."""
    mutations = planned(name)[-1]
    first = {(mutation.kind, mutation.stage): mutation for mutation in reversed(mutations)}
    return tuple(
        (mutation, verified(name, mutation.plan, mutation.solution, mutation))
        for mutation in (mutations if with_all else first.values())
    )


def errors(rank: int, world_size: int, escaped: dict[str, list[Plan]]) -> dict[str, list[float]]:
    """By architecture: how far loss and gradients are off with each plan, in tolerances."""
    group = TPGroup.of(dist.group.WORLD)
    found: dict[str, list[float]] = {}
    for name, plans in escaped.items():
        model, batch = prepare(name, ARCHITECTURES[name])
        original = copy.deepcopy(model)
        torch.manual_seed(0)
        loss = model(**batch).loss
        loss.backward()
        found[name] = []
        for plan in plans:
            local = copy.deepcopy(original)
            apply_plan(local, plan, group)
            synchronize_gradients(local)
            torch.manual_seed(0)
            try:
                ours = local(**batch).loss
                ours.backward()
            except (RuntimeError, ValueError, IndexError):
                found[name].append(math.inf)
                continue
            off = abs(ours.item() - loss.item()) / abs(loss.item()) / LOSS_TOLERANCE
            found[name].append(max(off, _gradients_off(local, model)))
    return found


def steps(rank: int, world_size: int, name: str) -> list[str]:
    """What a first training step says of the right plan and of each mistake, if nothing is proved before it."""
    model, batch, plan, solution, mutations = planned(name)
    found = []
    for wrong in [(plan, solution), *((mutation.plan, mutation.solution) for mutation in mutations)]:
        dist.barrier()
        group = dist.new_group(timeout=timedelta(seconds=PATIENCE))
        try:
            _step(copy.deepcopy(model), batch, *wrong, group)
        except (PlanMismatch, CallMismatch):
            found.append(BUILDING)
        except (UnseenPath, DifferentOnRanks, BypassedLayer):
            found.append(STEP)
        except Exception:  # whatever torch says of shapes, and the model's code of sizes
            found.append(FAILS)
        else:
            found.append("")
        dist.destroy_process_group(group)
    return found


def _step(model: nn.Module, batch: dict[str, Any], plan: Plan, solution: Solution, group: Any) -> None:
    original = meta_copy(model)
    apply_plan(model, plan, TPGroup.of(group))
    synchronize_gradients(model)
    guard = parallel_state(model).guard = Guard(model, CallProver(model, original, solution, as_calls(batch)))
    guard.attach()
    try:
        torch.manual_seed(0)
        model(**batch).loss.backward()
        torch.optim.SGD(model.parameters(), lr=1e-3).step()
    finally:
        guard.remove()


@lru_cache
def alone(name: str) -> list[str]:
    """By mistake, what notices it in a first training step before which nothing is proved; nothing if that is right."""
    right, *found = [set(said) for said in zip(*run_ranks(steps, RANKS, name), strict=True)]
    assert right == {""}
    return [next((by for by in (BUILDING, *ALONE) if by in said), "") for said in found]


def _gradients_off(local: nn.Module, model: nn.Module) -> float:
    """The largest difference of a gradient's own part, in tolerances."""
    wanted = {n: p.grad for n, p in model.named_parameters(remove_duplicate=False) if p.grad is not None}
    largest = max(float(gradient.abs().max()) for gradient in wanted.values())
    off = 0.0
    for name, parameter in local.named_parameters():
        meta = parallel_state(local).metas[name]
        whole = wanted.get(meta.name)
        if whole is None or parameter.grad is None:
            continue
        for block in meta.mapping:
            here, there = (
                tensor[tuple(slice(*run) for run in runs)]
                for tensor, runs in ((plain(parameter.grad), block.local), (whole, block.original))
            )
            difference = float((here - there).abs().max()) if here.numel() else 0.0
            if difference > ROUNDING * largest:
                off = max(off, difference / float(whole.abs().max().clamp_min(1e-30)) / GRADIENT_TOLERANCE)
    return off


@lru_cache
def judged() -> dict[str, list[tuple[Mutation, str]]]:
    """Every planted mistake and what notices it."""
    escaped = {name: [planned(name)[2]] + [m.plan for m, by in outcomes(name) if not by] for name in ARCHITECTURES}
    off = run_ranks(errors, RANKS, escaped)
    found: dict[str, list[tuple[Mutation, str]]] = {}
    for name in ARCHITECTURES:
        right, *worst = [max(pair) for pair in zip(*(rank[name] for rank in off), strict=True)]
        assert right <= 1, f"the right plan of {name} is off by {right} tolerances"
        remaining = iter(worst)
        found[name] = [(m, by or (PARITY if not next(remaining) <= 1 else EQUIVALENT)) for m, by in outcomes(name)]
    return found


def table(found: dict[str, list[tuple[Mutation, str]]]) -> str:
    """How many mistakes of each kind each check noticed, in Markdown."""
    columns = (*OUTCOMES, *ALONE)
    counted = Counter(((m.kind, m.stage), by) for rows in found.values() for m, by in rows)
    counted += Counter(
        ((m.kind, m.stage), by)
        for name, rows in found.items()
        for (m, _), by in zip(rows, alone(name), strict=True)
        if by in ALONE
    )
    lines = [f"| mistake | wrong in | {' | '.join(columns)} |", "| --- | --- |" + " ---: |" * len(columns)]
    for kind, stage in sorted({row for row, _ in counted}):
        cells = [str(counted[(kind, stage), by] or "") for by in columns]
        lines.append(f"| {kind} | {stage} | {' | '.join(cells)} |")
    total = [str(sum(n for (_, one), n in counted.items() if one == by)) for by in columns]
    return "\n".join([*lines, f"| all | | {' | '.join(total)} |"])


def is_explained(name: str, mutation: Mutation) -> str:
    """Why a mistake changes nothing that a training step could show; nothing where there is no such reason."""
    _, _, plan, *_ = planned(name)
    unchanging = {use.module for use in plan.implementations if use.input is None and use.output is None}
    if mutation.kind == "column layer left ordinary" and mutation.where in unchanging:
        return "a column-parallel layer that changes no layout does what an ordinary one does with its part"
    lookups = {f"{use.module}.weight" for use in plan.implementations if use.name == "vocab"}
    untied = {p.names[0] for p in plan.parameters if len(p.names) == 1}
    if mutation.stage == SOLUTION and mutation.where in lookups & untied:
        return "the ranks' look-ups add up however the rows are sharded"
    read_only = ("sliding_window", "q_lora_rank")  # by these attentions, which then do nothing with it
    if mutation.kind == "size made local that stays whole" and mutation.where.split(":")[1].endswith(read_only):
        return "the module reads the number and does not compute with it"
    if mutation.kind == "Replicate to Invariant dropped" and mutation.where.endswith("experts.argument1"):
        return "numbers of experts have no gradient"
    if mutation.kind == "Invariant to Shard cut elsewhere" and "EncDecAttention" in mutation.where:
        return "the position bias of cross-attention is the same for every head: zeros"
    return ""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "with_all"),
    [
        *((name, False) for name in IN_CI),
        *(pytest.param(name, True, marks=pytest.mark.nightly) for name in ARCHITECTURES),
    ],
)
def test_verification_finds_mistakes_of_the_execution(name: str, with_all: bool) -> None:
    """All of them, or one of each kind, before anything runs."""
    _, _, plan, solution, mutations = planned(name)
    assert verified(name, plan, solution) == ""
    assert len({mutation.kind for mutation in mutations}) >= 12
    escaped = [m for m, by in outcomes(name, with_all) if not by and m.stage == PLAN]
    assert not [str(m) for m in escaped if not is_explained(name, m)]


@pytest.mark.slow
@pytest.mark.nightly
@pytest.mark.parametrize("name", ARCHITECTURES)
def test_a_first_step_alone_finds_what_makes_ranks_differ(name: str) -> None:
    """Sums that are left out, of activations and of gradients; layers that were left as they are."""
    mutations = planned(name)[-1]
    missed = [m for m, by in zip(mutations, alone(name), strict=True) if not by]
    assert not [str(m) for m in missed if m.kind in DIFFERING and not is_explained(name, m)]
    assert {m.kind for m in mutations} & DIFFERING


@pytest.mark.slow
@pytest.mark.nightly
def test_parity_finds_all_others() -> None:
    found = judged()
    assert table(found) in PAGE.read_text(), f"the page's table is to be:\n{table(found)}"
    equivalent = [(name, m) for name, rows in found.items() for m, by in rows if by == EQUIVALENT]
    assert not [f"{name}: {m}" for name, m in equivalent if not is_explained(name, m)]
    assert any(m.where == "model.embed_tokens.weight" for name, m in equivalent if name == "llama")
    caught = {by for rows in found.values() for _, by in rows}
    assert {CUTS, TRACE, PARITY} <= caught


WITH_ALL_KINDS = ("gpt2", "qwen3", "mixtral", "falcon", "codegen", "deepseek_v3")


def test_every_kind_of_mistake_is_planted() -> None:
    """What the table of kinds promises is there to be found somewhere among the architectures."""
    kinds = {m.kind for name in WITH_ALL_KINDS for m in planned(name)[-1]}
    assert kinds >= {
        "gradient sum dropped",
        "gradient summed once too often",
        "sections joined",
        "section given to the other rank",
        "boundary shifted, sizes kept",
        "boundary shifted, sizes changed",
        "ranks exchanged",
        "layer's all-reduce dropped",
        "all-reduce of a layer's input gradient dropped",
        "all-reduce of an input gradient done twice",
        "Partial to Invariant dropped",
        "Partial to Invariant with the other backward",
        "Invariant to Replicate dropped",
        "Invariant to Partial dropped",
        "Replicate to Shard cut elsewhere",
        "view of logits dropped",
        "view of logits cut elsewhere",
        "size not made local",
        "size made local wrongly",
        "another attribute made local",
        "size made local that stays whole",
        "number in a call not made local",
    }
