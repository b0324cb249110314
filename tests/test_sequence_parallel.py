"""Sequence parallelism: tokens are dealt out between sharded regions, and one process's numbers come out."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
import torch.distributed as dist
from distributed import run_ranks
from tiny import meta_model, tiny_model, token_batch
from torch import Tensor

from lightning_autotp import full_gradients, make_plan, parallelize
from lightning_autotp.layouts.types import Replicate

FAMILIES = ("llama", "gemma2", "olmo2", "phi3", "gpt_neox")
BATCHES = ((2, 17), (1, 16), (3, 5), (2, 64))


def test_the_solver_finds_megatrons_pattern() -> None:
    """Row-parallel products are reduce-scattered, column-parallel ones gather; norms are on each rank's tokens."""
    plan, _ = make_plan(meta_model("llama"), 2, sequence_parallel=True)
    changes = Counter(change.source.letter + change.target.letter for change in plan.conversions)
    assert changes == {"PS": 5, "SR": 5}
    layouts = {name: parameter.layout for parameter in plan.parameters for name in parameter.names}
    assert all(isinstance(layout, Replicate) for name, layout in layouts.items() if "norm" in name)


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


def parallel(rank: int, size: int, family: str) -> Any:
    torch.set_default_dtype(torch.float64)
    model = parallelize(
        tiny_model(family),
        dist.group.WORLD,  # type: ignore[arg-type]
        example_inputs=token_batch(0, 5, 61),
        sequence_parallel=True,
        plan_cache=False,
    )
    assert model.autotp.plan.deals_tokens
    return results(model)


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("family", FAMILIES)
def test_training_equals_one_process(family: str, size: int) -> None:
    torch.set_default_dtype(torch.float64)
    try:
        wanted = results(tiny_model(family))
    finally:
        torch.set_default_dtype(torch.float32)
    for found in run_ranks(parallel, size, family):
        for ours, theirs in zip(found, wanted, strict=True):
            assert ours.keys() == theirs.keys()
            for name, value in theirs.items():
                torch.testing.assert_close(ours[name], value, rtol=1e-4, atol=1e-6, msg=lambda m, n=name: f"{n}: {m}")
