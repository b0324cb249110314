"""A training run in one process, and a plan for its model: what torch, transformers, Lightning and the package find out
then and keep is there in ranks that are forked afterwards.

Only the process that they are forked from imports this: see ``distributed.PRELOADED``.
"""

from __future__ import annotations

import gc
import os
import tempfile
import warnings
from contextlib import redirect_stderr, redirect_stdout
from unittest import mock

import torch
import torch.distributed as dist
from trainer_ranks import launched
from training import BLOCKS, Task, fit, tiny_config
from transformers import AutoModelForCausalLM

from lightning_autotp import AutoTPStrategy, make_plan
from lightning_autotp.capture.capture import as_call, capture, in_small


def plan() -> None:
    """Make a plan, and trace the model with rows of full length."""
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(tiny_config())
    batch = {"input_ids": BLOCKS[:4], "labels": BLOCKS[:4]}
    make_plan(model, 2, example_inputs=in_small(model, as_call(batch)))
    capture(model, batch)


def train() -> None:
    """Make a step with the strategy. Of its group no thread may be left: a fork has one thread alone."""
    with tempfile.TemporaryDirectory() as directory, mock.patch.dict(os.environ, launched(0, 1)):
        dist.init_process_group("gloo", init_method=f"file://{directory}/store", rank=0, world_size=1)
        fit(AutoTPStrategy(), 1, Task("config"), max_steps=1)
        dist.destroy_process_group()
    gc.collect()
    assert len(os.listdir("/proc/self/task")) == 1


with (
    torch.random.fork_rng(),
    warnings.catch_warnings(),  # also so that what is warned of once is warned of again
    open(os.devnull, "w") as nowhere,
    redirect_stdout(nowhere),
    redirect_stderr(nowhere),
):
    plan()
    train()
