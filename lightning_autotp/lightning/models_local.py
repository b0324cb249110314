"""Make the models of a LightningModule local, each proved for the call that the training step makes."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch.distributed as dist
from lightning.pytorch import Trainer
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torchmetrics import Metric

from lightning_autotp.capture.capture import CaptureError, ExampleCall, in_small
from lightning_autotp.layouts.step_size import TokensPerStep
from lightning_autotp.lightning.first_step import FirstStep, first_step
from lightning_autotp.parameters.state import is_parallel
from lightning_autotp.pipeline import FindPlan, LocalModel, make_local
from lightning_autotp.private.torch_private import uncompiled
from lightning_autotp.proving.new_calls import with_rows
from lightning_autotp.ranks.agreement import PeerError, check_same_weights, raise_together
from lightning_autotp.solving.options import PlanOptions


def make_models_local(
    trainer: Trainer,
    models: Sequence[tuple[nn.Module, Any]],
    group: dist.ProcessGroup,
    copies: DeviceMesh | None,
    options: PlanOptions,
    before: Callable[[nn.Module, Any], FindPlan],
) -> list[LocalModel]:
    """Plan for, cut and prove these models. Collective over all processes.

    A model without example inputs is traced in the call that the first training step makes of it, where that can be
    looked at; else with a synthetic batch. A plan that is given is of a synthetic batch already.

    Args:
        trainer: whose first training step counts.
        models: each with its example inputs, or ``None``.
        group: the tensor-parallel group.
        copies: the ranks that have the same part of the other copies of the models, if there are several copies.
        options: for the plans. Without a number of tokens, they are priced for the first batch.
        before: what is done with each model and its example before it is planned for; tells how to plan. Collective.

    Returns:
        The models, in the same order.

    Raises:
        PeerError: on every rank, if any rank fails.
        CaptureError: if a model cannot be traced; and whatever else :func:`~lightning_autotp.parallelize` raises.
    """
    asked = [model for model, inputs in models if inputs is None and options.plan is None]
    is_price_unknown = options.plan is None and options.tokens == TokensPerStep()
    step = FirstStep(options.tokens)
    if asked or is_price_unknown:
        with raise_together(None, "looking at the first training step"):
            found = first_step(trainer, asked) if trainer.is_global_zero else None
        step = trainer.strategy.broadcast(found) or step
        if is_price_unknown:
            options = replace(options, tokens_per_step=step.tokens)
    calls = dict(zip(asked, step.calls, strict=True))
    made = []
    for model, inputs in models:
        check_same_weights(model, None)
        find = before(model, calls.get(model, inputs))
        if model in calls:
            names = trainer.lightning_module.named_modules()
            name = next(path for path, module in names if uncompiled(module) is model)
            made.append(_make_local_for_call(name, model, calls[model], step.why, group, copies, options, find))
        else:
            made.append(make_local(model, group, inputs, options, copies, find))
    return made


def _make_local_for_call(
    name: str,
    model: nn.Module,
    call: ExampleCall | None,
    why: str,
    group: dist.ProcessGroup,
    copies: DeviceMesh | None,
    options: PlanOptions,
    find: FindPlan,
) -> LocalModel:
    """Make a model local for the training step's call; where that is not known or not traced, for a synthetic one."""
    for example, source in _examples(model, call):
        try:
            return make_local(model, group, example, replace(options, traced_with=source), copies, find)
        except (CaptureError, PeerError) as error:  # the first rank traces, and the others hear of it
            kinds = error.kinds if isinstance(error, PeerError) else {CaptureError.__name__}
            if is_parallel(model) or kinds != {CaptureError.__name__}:
                raise
            why = str(error)
    source = f"a synthetic batch ({why.splitlines()[0]})"
    try:
        return make_local(model, group, None, replace(options, traced_with=source), copies, find)
    except CaptureError as error:
        if call is not None:  # it is that call which should be traced
            raise CaptureError(f"self.{name}: {why}") from error
        raise CaptureError(
            f"self.{name}: {error} (The first training step cannot be used instead: {why}. Of several models,"
            f' AutoTPStrategy(example_inputs={{"{name}": ...}}) gives this one its batch. Layers that belong together'
            f" are divided as one model if they are in one nn.Module; if {name} need not be divided,"
            " AutoTPStrategy(models=[...]) names those that should be)"
        ) from error


def _examples(model: nn.Module, call: ExampleCall | None) -> Iterator[tuple[Any, str]]:
    """The call of the training step in forms that a trace may take, best first, each with where it comes from."""
    if call is not None:
        small = in_small(model, call)
        if small is not call:
            yield small, "the call of the first training step, its batch cut to a few short sentences"
        yield with_rows(call), "the call of the first training step"


def count_copies_once(module: nn.Module, group: dist.ProcessGroup) -> list[Metric]:
    """Let the metrics in a module, or one that is a metric, be synchronized over the copies, not over all ranks.

    Those that have a process group of their own keep it.

    Returns:
        The metrics that had none.
    """
    metrics = [each for each in module.modules() if isinstance(each, Metric)]
    for metric in metrics:
        if isinstance(vars(metric).get("reset"), _AsBeforeWhenReset):  # of an earlier run
            _over_all_ranks(metric)
    found = [metric for metric in metrics if metric.process_group is None]
    for metric in found:
        metric.process_group = group
    return found


def count_as_before(metrics: Iterable[Metric]) -> None:
    """Let metrics be synchronized over all ranks again; one that has counted something of the copies, when it is reset.

    Until then what it has counted is to be computed.
    """
    for metric in metrics:
        if metric.update_called:
            vars(metric)["reset"] = _AsBeforeWhenReset(metric)
        else:
            _over_all_ranks(metric)


class _AsBeforeWhenReset:
    """Stands for a metric's own ``reset``, once."""

    def __init__(self, metric: Metric) -> None:
        self._metric = metric

    def __call__(self) -> None:
        _over_all_ranks(self._metric)
        self._metric.reset()


def _over_all_ranks(metric: Metric) -> None:
    vars(metric).pop("reset", None)
    metric.process_group = None
