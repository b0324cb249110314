"""An independent witness: Meta's ``spmd_types`` checks the types of the local models' programs, forward by forward.

Its checker knows nothing of our plans. It is told the type of every parameter and of the batch, and for each of our
collectives which types it converts (its own vocabulary: R, I, V, P; a shard is V); everything in between it infers from
the operators that the local model really runs, and what cannot be right for the gradients it refuses: an Invariant
tensor that meets a Varying one, a pending sum that is used before it was reduced, a sum of what is no sum.

It checks local types: that a tensor is sharded, not along which dim. (Its global types, which know dims, refuse the
view that makes heads of a sharded projection.) In local types the product of two shards is a shard, of which the
all-reduce says that it was a pending sum; so what we call Partial is V to it. What the cross entropy does inside is
declared, not inferred; the vocabulary-parallel look-up is inferred.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest
import spmd_types as spmd
import torch
import torch.distributed as dist
from mutations import PLAN, planted
from spmd_types import I, P, R, SpmdTypeError, V, rules
from spmd_types.checker import typecheck
from tiny import tiny_model
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn import functional as F

from lightning_autotp.applying.replace import apply_plan
from lightning_autotp.layouts.plan import Plan
from lightning_autotp.layouts.types import Invariant, Layout, Partial, Replicate, Shard
from lightning_autotp.parallel import collectives, cross_entropy, overlap
from lightning_autotp.parameters.state import parallel_state
from lightning_autotp.pipeline import make_plan
from lightning_autotp.ranks.group import TPGroup
from lightning_autotp.solving.solution import Solution

GPT2 = {"n_embd": 64, "n_head": 4, "n_layer": 2, "resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {},
    "gpt2": GPT2,
    "mixtral": {"num_local_experts": 4},
    "qwen3": {},
    "phi3": {},
}
VOCABULARY, BATCH, LENGTH, RANKS = 250, 3, 17, 2
# Mistakes in the types; where a dim is cut is nothing that local types could tell.
TYPE_MISTAKES = {
    "gradient sum dropped",
    "gradient summed once too often",
    "layer's all-reduce dropped",
    "all-reduce of a layer's input gradient dropped",
    "all-reduce of an input gradient done twice",
    "row layer left ordinary",
    "vocab layer left ordinary",
    "Invariant to Replicate dropped",
    "Invariant to Partial dropped",
    "Partial to Invariant dropped",
    "Partial to Invariant with the other backward",
}
_LETTERS: dict[type, Any] = {Invariant: I, Replicate: R, Partial: V, Shard: V}


@contextmanager
def one_rank(rank: int) -> Iterator[tuple[Any, TPGroup]]:
    """This process as one rank of a group whose collectives do nothing."""
    dist.init_process_group(backend="fake", rank=rank, world_size=RANKS)
    try:
        mesh = init_device_mesh("cpu", (RANKS,), mesh_dim_names=("tp",))
        yield mesh, TPGroup.of(mesh.get_group("tp"))
    finally:
        dist.destroy_process_group()


def declared(group: dist.ProcessGroup) -> dict[Any, Callable[..., Any]]:
    """The types that our collectives convert between, as the checker's rules: by pair, and the loss's."""

    def converts(source: type, target: type) -> Callable[..., Any]:
        def rule(output: Any, *, x: Any, pair: Any, group: Any, dim: Any, ownership: Any) -> None:
            spmd.assert_type(x, {axis: _LETTERS[source]})
            spmd.assert_type(output, {axis: _LETTERS[target]})

        return rule

    def token_loss(output: Any, *, logits: Any, targets: cross_entropy.Targets) -> None:
        spmd.assert_type(logits, {axis: V})
        rules.ignore(targets.classes, targets.ignored, targets.weight)
        spmd.assert_type(output, {axis: I})

    def waits(output: Any, *, x: Any) -> None:
        spmd.assert_type(x, {axis: I})
        spmd.assert_type(output, {axis: I})

    def later(output: Any, *, weight: Any, left: Any) -> None:
        spmd.assert_type(weight, {axis: V})
        spmd.assert_type(output, {axis: V})

    def product(output: Any, *, x: Any, weight: Any, bias: Any, left: Any) -> None:
        spmd.assert_type(x, {axis: R})
        for part in (weight, output) if bias is None else (weight, bias, output):
            spmd.assert_type(part, {axis: V})

    axis = group
    return {
        overlap._Wait: waits,
        overlap._Later: later,
        overlap._Launch: lambda *, x, group: rules.reinterpret(x, axis, src=I, dst=R),
        overlap._Product: product,
        ("I", "R"): lambda *, x, pair, group, dim, ownership: rules.reinterpret(x, axis, src=I, dst=R),
        ("P", "I"): lambda *, x, pair, group, dim, ownership: rules.all_reduce(x, axis, src=V, dst=I),
        ("P", "R"): lambda *, x, pair, group, dim, ownership: rules.all_reduce(x, axis, src=V, dst=R),
        ("S", "I"): converts(Shard, Invariant),
        ("S", "R"): converts(Shard, Replicate),
        ("I", "S"): converts(Invariant, Shard),
        ("R", "S"): converts(Replicate, Shard),
        ("I", "P"): converts(Invariant, Partial),
        ("R", "P"): converts(Replicate, Partial),
        cross_entropy._TokenLoss: token_loss,
    }


def declare_functions(patch: pytest.MonkeyPatch, declared: dict[Any, Callable[..., Any]]) -> None:
    """Let the checker know the rules of functions that are no transitions."""
    for function, rule in declared.items():
        if not isinstance(function, tuple):
            patch.setattr(function, "spmd_typecheck", staticmethod(rule), raising=False)


class Checked:
    """In the place of the one function that makes every transition: one for each pair, with the checker's rule."""

    def __init__(self, declared: dict[Any, Callable[..., Any]]) -> None:
        self.functions = {
            pair: type("".join(pair), (collectives._Transition,), {"spmd_typecheck": staticmethod(rule)})
            for pair, rule in declared.items()
            if isinstance(pair, tuple)
        }

    def apply(self, x: torch.Tensor, pair: Any, *rest: Any) -> torch.Tensor:
        return self.functions[pair].apply(x, pair, *rest)  # type: ignore[attr-defined]


def planned(family: str) -> tuple[nn.Module, dict[str, Any], Plan, Solution]:
    model = tiny_model(family, vocab_size=VOCABULARY, **FAMILIES[family]).train()
    ids = torch.arange(3, 3 + BATCH * LENGTH).view(BATCH, LENGTH)
    batch = {"input_ids": ids, "labels": ids, "use_cache": False}
    return model, batch, *make_plan(model, RANKS, example_inputs=batch)


def check(family: str, plan: Plan, rank: int) -> dict[str, Layout]:
    """Run one step of a rank's local model under the checker; the layouts of its parameters.

    Raises:
        SpmdTypeError: if the program is wrong in its types.
    """
    model = tiny_model(family, vocab_size=VOCABULARY, **FAMILIES[family]).train()
    ids = torch.arange(3, 3 + BATCH * LENGTH).view(BATCH, LENGTH)
    targets = ids[:, 1:].flatten()
    # To the checker the wrapper that makes logits look whole would hide the shard behind it.
    views = [conversion.target for conversion in plan.conversions if conversion.view]
    plan = replace(plan, conversions=tuple(c for c in plan.conversions if not c.view))
    with one_rank(rank) as (mesh, group), pytest.MonkeyPatch.context() as patch:
        axis = mesh.get_group("tp")
        rules_of_ours = declared(axis)
        patch.setattr(collectives, "_Transition", Checked(rules_of_ours))
        declare_functions(patch, rules_of_ours)
        apply_plan(model, plan, group)
        layouts = {name: meta.layout for name, meta in parallel_state(model).metas.items()}
        with spmd.set_current_mesh(mesh), typecheck(strict_mode="strict"):
            for name, parameter in model.named_parameters():
                spmd.assert_type(parameter, {axis: _LETTERS[type(layouts[name])]})
            for tensor in (*model.buffers(), ids, targets):
                spmd.assert_type(tensor, {axis: R})
            logits = model(input_ids=ids, use_cache=False).logits[:, :-1].flatten(0, 1)
            if views:
                ((_, owned),) = views[0].dims
                loss = cross_entropy.vocab_parallel_cross_entropy(logits, targets, owned, group)
            else:
                loss = F.cross_entropy(logits, targets)
            spmd.assert_type(loss, {axis: I})
            loss.backward()
    return layouts


@pytest.mark.parametrize("family", FAMILIES)
def test_the_local_models_are_well_typed(family: str) -> None:
    *_, plan, _ = planned(family)
    for rank in range(RANKS):
        layouts = check(family, plan, rank)
        assert {Shard, Invariant} <= {type(layout) for layout in layouts.values()}
        if family == "qwen3":  # norms over sharded heads
            assert Replicate in {type(layout) for layout in layouts.values()}


@pytest.mark.parametrize("family", FAMILIES)
def test_programs_with_a_mistake_are_not(family: str) -> None:
    *_, plan, solution = planned(family)
    mistakes = [m for m in planted(plan, solution, {}) if m.stage == PLAN and m.kind in TYPE_MISTAKES]
    assert len({m.kind for m in mistakes}) >= 4
    accepted = []
    for mutation in mistakes:
        try:
            check(family, mutation.plan, 0)
        except SpmdTypeError:
            continue
        accepted.append(str(mutation))
    assert not accepted


def test_the_checker_tells_pending_sums_from_values() -> None:
    """The rules above are refused where they must be: the witness is not made to nod."""
    with one_rank(0) as (mesh, group), pytest.MonkeyPatch.context() as patch:
        axis = mesh.get_group("tp")
        rules_of_ours = declared(axis)
        patch.setattr(collectives, "_Transition", Checked(rules_of_ours))
        declare_functions(patch, rules_of_ours)
        shard, same, used = (torch.ones(4, requires_grad=True) for _ in range(3))
        with spmd.set_current_mesh(mesh), typecheck():
            for tensor, letter in ((shard, V), (same, I), (used, R)):
                spmd.assert_type(tensor, {axis: letter})
            total = collectives.all_reduce(shard * used, group)
            spmd.assert_type(total + same, {axis: I})
            for wrong in (
                lambda: shard * same,
                lambda: collectives.all_reduce(same, group),
                lambda: collectives.all_reduce(used, group),
                lambda: collectives.copy_to_tensor_parallel(shard, group),
                lambda: collectives.copy_to_tensor_parallel(used, group),
                lambda: (shard * used).sum().backward(),
                lambda: spmd.assert_type(total, {axis: P}),
            ):
                with pytest.raises(SpmdTypeError):
                    wrong()
