"""A training run in one process, plans of models that most tests use, and trials of optimizers: what torch,
transformers, Lightning and the package find out then and keep is there in ranks that are forked afterwards.

Only the process that they are forked from imports this: see ``distributed.PRELOADED``.
"""

from __future__ import annotations

import os
import warnings
from contextlib import redirect_stderr, redirect_stdout

import tiny
import torch
from foreign_optimizers import model_of, parameter
from torch import Tensor
from training import BLOCKS, Task, fit, tiny_config
from transformers import AutoModelForCausalLM

from lightning_autotp import make_plan
from lightning_autotp.capture.capture import as_call, capture, in_small
from lightning_autotp.guard.on_parts import check_optimizer


def plan() -> None:
    """Make plans for small batches and for usual ones, and trace a model with rows of full length."""
    batch = {"input_ids": BLOCKS[:4], "labels": BLOCKS[:4]}
    models = [tiny.meta_model("llama", num_hidden_layers=1), tiny.meta_model("gpt2", num_hidden_layers=1)]
    with torch.device("meta"):
        models.append(AutoModelForCausalLM.from_config(tiny_config()))
    for model in models:
        for inputs in (None, in_small(model, as_call(batch))):
            make_plan(model, 2, example_inputs=inputs)
    capture(models[-1], batch)


def try_optimizers() -> None:
    """Find out whether the optimizers that most tests use may step parts of tensors."""
    for kind in (torch.optim.AdamW, torch.optim.Adam, torch.optim.SGD):
        optimizer = kind([parameter(2, 3), parameter(2, 3, dims=(1,)), parameter(3)], lr=1e-3)
        check_optimizer(optimizer, model_of(optimizer))


class WithoutBackward(Task):
    """Steps with gradients of zeros: a backward pass fixes the devices that there are, and a test adds one."""

    def __init__(self) -> None:
        super().__init__("config")
        self.automatic_optimization = False

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> None:  # type: ignore[override]
        """Run the model, and the optimizer."""
        self.model(**batch)
        for weight in self.parameters():
            weight.grad = torch.zeros_like(weight)
        self.optimizers().step()  # type: ignore[union-attr]


with (
    torch.random.fork_rng(),
    warnings.catch_warnings(),  # also so that what is warned of once is warned of again
    open(os.devnull, "w") as nowhere,
    redirect_stdout(nowhere),
    redirect_stderr(nowhere),
):
    plan()
    try_optimizers()
    fit("auto", 1, WithoutBackward(), max_steps=1)  # no group of processes: threads of one would not be forked
