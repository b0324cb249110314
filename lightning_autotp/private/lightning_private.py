"""What is used of Lightning that it does not promise to keep.

:mod:`lightning_autotp.lightning` imports it from here, and ``tests/test_private.py`` asks each of these names for what
is relied on. The classes are Lightning's own, with public names for what a class derived from them needs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import torch
from lightning.fabric.plugins.collectives.torch_collective import default_pg_timeout

# Seeds a loader's workers by the rank that reads it.
from lightning.fabric.utilities.data import _auto_add_worker_init_fn as add_worker_init_fn

# Puts optimizers' states where their parameters are.
from lightning.fabric.utilities.optimizer import _optimizers_to_device as optimizers_to_device

# The random states that all ranks begin with: of Python, numpy and torch. isolate_rng is public and only restores them.
from lightning.fabric.utilities.seed import _collect_rng_states as collect_rng_states
from lightning.fabric.utilities.seed import _set_rng_states as set_rng_states
from lightning.pytorch import LightningModule, Trainer, callbacks, strategies
from lightning.pytorch.utilities import model_summary

# How a summary writes numbers, and a cell without one.
from lightning.pytorch.utilities.model_summary.model_summary import NOT_APPLICABLE, get_human_readable_count
from torch import nn
from torch.optim.swa_utils import AveragedModel

__all__ = [
    "NOT_APPLICABLE",
    "ModelParallelStrategy",
    "ModelSummary",
    "WeightAveraging",
    "add_worker_init_fn",
    "collect_rng_states",
    "default_pg_timeout",
    "get_human_readable_count",
    "optimizers_to_device",
    "set_rng_states",
    "summarize_as_before",
    "summarize_with",
    "training_data",
    "use_distributed_sampler",
]


class ModelParallelStrategy(strategies.ModelParallelStrategy):
    """Lightning's, with its sizes and what it asks for when it is told of the devices."""

    @property
    def tensor_ranks(self) -> int | str:
        """How many ranks share a copy of the model. Lightning has it only as an argument."""
        return self._tensor_parallel_size

    @property
    def data_ranks(self) -> int | str:
        """How many copies there are."""
        return self._data_parallel_size

    def set_sizes(self, tensor_ranks: int, data_ranks: int) -> None:
        """Decide on both, before there are processes."""
        self._tensor_parallel_size, self._data_parallel_size = tensor_ranks, data_ranks

    @property
    def writes_directories(self) -> bool:
        """Whether a checkpoint is a directory, to which each rank writes. Lightning has it only as an argument."""
        return self._save_distributed_checkpoint

    def before_launch(self) -> None:
        """Called when the number of devices is known, before processes start. No public hook is."""

    def _configure_launcher(self) -> None:
        self.before_launch()
        super()._configure_launcher()


def use_distributed_sampler(trainer: Trainer, use: bool) -> None:
    """Whether dataloaders that are made from now on get a distributed sampler. Publicly an argument of the Trainer."""
    trainer._accelerator_connector.use_distributed_sampler = use


def training_data(trainer: Trainer) -> tuple[Any, str]:
    """What ``trainer.fit`` was given to train on, or ``None`` and the hook that will be asked for it.

    ``trainer.train_dataloader`` is public, but is there only when training has begun.
    """
    source = trainer.fit_loop._data_source
    return (None, source.name) if source.is_module() else (source.instance, "")


# --- averages ---


class WeightAveraging(callbacks.WeightAveraging):
    """Lightning's, with the average, what it is made of, and a word before it is copied from or to the model."""

    @property
    def average(self) -> AveragedModel | None:
        """The averaged model, if there is one yet."""
        return self._average_model

    @average.setter
    def average(self, made: AveragedModel) -> None:
        self._average_model = made

    @property
    def average_device(self) -> torch.device | str | int | None:
        """Where the average is to be; ``None``: where the model is."""
        return self._device

    @property
    def average_options(self) -> dict[str, Any]:
        """What an ``AveragedModel`` is to be made with, besides the model and the device."""
        return {"use_buffers": self._use_buffers, **self._kwargs}

    def before_exchange(self, pl_module: LightningModule) -> None:
        """Called before the average and the model are exchanged, or one copied to the other. No public hook is."""

    def _swap_models(self, pl_module: LightningModule) -> None:
        self.before_exchange(pl_module)
        super()._swap_models(pl_module)

    def _copy_average_to_current(self, pl_module: LightningModule) -> None:
        self.before_exchange(pl_module)
        super()._copy_average_to_current(pl_module)


# --- the summary ---


class ModelSummary(model_summary.ModelSummary):
    """Lightning's, with what it is of, and its columns, which may be changed. Publicly it is text."""

    @property
    def summarized(self) -> LightningModule:
        """What it is of."""
        return self._model

    @property
    def listed(self) -> list[nn.Module]:
        """The modules that have a row."""
        return [layer._module for layer in self._layer_summary.values()]

    def columns(self, usual: list[tuple[str, list[str]]]) -> list[tuple[str, list[str]]]:
        """The columns to show, each with its cells, given those that Lightning shows."""
        return usual

    def _get_summary_data(self) -> list[tuple[str, list[str]]]:
        return self.columns(super()._get_summary_data())


def summarize_with(make: Callable[..., model_summary.ModelSummary], used: Iterable[Any]) -> None:
    """Let the ModelSummary callbacks among ``used`` (Lightning adds one) show ``make(module, max_depth=...)``.

    Publicly a callback of one's own class would have to be given to the Trainer.
    """
    for callback in used:
        if isinstance(callback, callbacks.ModelSummary):
            callback._summary = partial(_summary, make, callback._max_depth)  # type: ignore[method-assign]


def _summary(make: Callable[..., Any], depth: int, trainer: Trainer, module: LightningModule) -> Any:
    return make(module, max_depth=depth)


def summarize_as_before(used: Iterable[Any]) -> None:
    """Undo :func:`summarize_with`."""
    for callback in used:
        if isinstance(callback, callbacks.ModelSummary):
            vars(callback).pop("_summary", None)
