"""Whether a training step fits, or blocks are to be computed again."""

from __future__ import annotations

import pytest
import torch
from tiny import tiny_model, token_batch

from lightning_autotp import make_plan
from lightning_autotp.building.pretrained import meta_model
from lightning_autotp.planning.checkpointing import KeptActivations, choose, memory_of
from lightning_autotp.planning.estimate import memory
from lightning_autotp.planning.rehearsal import local_model, rehearse


def test_blocks_are_computed_again_where_a_step_does_not_fit_otherwise() -> None:
    with meta_model():
        model = tiny_model("llama")
    batch = token_batch(0, 8, 64)
    plan, _ = make_plan(model, 2)
    whole = memory(rehearse(local_model(model, plan), batch), copies=2).total
    fits = choose(model, plan, batch, whole, precision="bf16-mixed", copies=2)
    assert fits == KeptActivations(False, whole, whole, whole)
    assert fits.warnings == []
    tight = choose(model, plan, batch, whole - 1, precision="bf16-mixed", copies=2)
    assert tight.are_recomputed
    assert tight.needed < tight.otherwise == whole
    assert tight.warnings == []
    hopeless = choose(model, plan, batch, 1.0, precision="bf16-mixed", copies=2)
    assert (hopeless.are_recomputed, hopeless.needed) == (True, tight.needed)
    (said,) = hopeless.warnings
    assert "even if blocks are computed again" in said
    assert not any(
        hasattr(module, "gradient_checkpointing") and module.gradient_checkpointing for module in model.modules()
    )


def test_positional_arguments_precision_and_one_rank() -> None:
    with meta_model():
        model = tiny_model("llama")
    batch = token_batch(0, 2, 16)
    named = {"input_ids": batch["input_ids"], "labels": batch["labels"]}
    in_half = choose(model, None, named, 1e12, precision="bf16-true")
    assert in_half.needed < 0.6 * choose(model, None, named, 1e12, precision="32-true").needed
    with pytest.raises(Exception, match="cannot be rehearsed"):
        choose(model, None, (batch["input_ids"],), 1e12, precision="32-true")  # no labels, so no loss


def test_the_memory_of_the_processor_is_not_that_of_a_gpu() -> None:
    assert memory_of(torch.device("cpu")) is None
