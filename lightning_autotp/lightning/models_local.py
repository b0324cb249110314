"""Make the models of a LightningModule local, each proved for the call that the training step makes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch.distributed as dist
from lightning.pytorch import Trainer
from torch import nn

from lightning_autotp.capture.capture import Call, CaptureError, in_small
from lightning_autotp.layouts.step_size import TokensPerStep
from lightning_autotp.lightning.first_step import FirstStep, first_step
from lightning_autotp.parameters.state import is_parallel
from lightning_autotp.pipeline import make_local
from lightning_autotp.proving.new_calls import with_rows
from lightning_autotp.ranks.agreement import check_same_weights, raise_together
from lightning_autotp.solving.options import PlanOptions


def make_models_local(
    trainer: Trainer, models: Sequence[tuple[nn.Module, Any]], group: dist.ProcessGroup, options: PlanOptions
) -> None:
    """Plan for, cut and prove these models. Collective over all processes.

    A model without example inputs is traced in the call that the first training step makes of it, where that can be
    looked at; else with a made-up batch. A plan that is given is of a made-up batch already.

    Args:
        trainer: whose first training step counts.
        models: each with its example inputs, or ``None``.
        group: the tensor-parallel group.
        options: for the plans. Without a number of tokens, they are priced for the first batch.

    Raises:
        PeerError: on every rank, if any rank fails.
        CaptureError: if a model cannot be traced; and whatever else :func:`~lightning_autotp.parallelize` raises.
    """
    asked = [model for model, inputs in models if inputs is None and options.plan is None]
    step = FirstStep(options.tokens)
    if asked or options.tokens == TokensPerStep():
        with raise_together(None, "looking at the first training step"):
            found = first_step(trainer, asked) if trainer.is_global_zero else None
        step = trainer.strategy.broadcast(found) or step
        if options.tokens == TokensPerStep():
            options = replace(options, tokens=step.tokens)
    calls = dict(zip(asked, step.calls, strict=True))
    for model, inputs in models:
        check_same_weights(model, None)
        if model not in calls:
            make_local(model, group, inputs, options)
            continue
        why = step.why
        examples = list(_examples(model, calls[model]))
        for last, (example, source) in zip([False] * (len(examples) - 1) + [True], examples, strict=True):
            try:
                made_up = f"a made-up batch, as the first training step is not known: {why}"
                make_local(model, group, example, replace(options, traced_with=source or made_up))
                break
            except CaptureError as error:
                if is_parallel(model):
                    raise
                if last:
                    raise CaptureError(f"{error} (The first training step does not serve instead: {why})") from error
                why = str(error)


def _examples(model: nn.Module, call: Call | None) -> Iterator[tuple[Any, str]]:
    """What to trace a model with, best first, and where that comes from; at last a batch that is made up."""
    if call is not None:
        small = in_small(model, call)
        if small is not call:
            yield small, "the call of the first training step, its batch cut to a few short sentences"
        yield with_rows(call), "the call of the first training step"
    yield None, ""
