"""Lightning's weight averaging for parallel models: every rank averages what it holds.

Lightning's own callbacks copy the LightningModule before it is set up, when a model that is built without memory has no
values and is not cut yet, and put the copy's state into checkpoints as it is. Here the copy is made of this rank's
parameters once they are there, and checkpoints have the averages in the original model's names and shapes, at the
places where Lightning's have them: ``state_dict`` is the average, ``current_model_state`` what training goes on with.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer, callbacks
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel

from lightning_autotp.checkpoints.state import load_full_state_dict
from lightning_autotp.parameters.known_writes import known_writes
from lightning_autotp.parameters.local_blocks import plain, reshard
from lightning_autotp.parameters.state import parallel_models
from lightning_autotp.private import lightning_private as private
from lightning_autotp.private.torch_private import children_of, module_like
from lightning_autotp.ranks.agreement import raise_together


class _HeldAverages(AveragedModel):
    """Averages of what this process holds, which FSDP2 may have cut over the data axis."""

    def update_parameters(self, model: nn.Module) -> None:
        """Average plain tensors: functions that take lists of them refuse ``DTensor`` among others."""
        reshard(model)
        held = self.module
        self.module = _copy(held, {}, plain)
        try:
            super().update_parameters(_copy(model, {}, plain))
        finally:
            self.module = held


class _LocalAverages(private.WeightAveraging):
    """What both callbacks do otherwise than Lightning's. With other strategies they are Lightning's."""

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """The copy is made later: nothing is cut yet."""
        if not _is_parallel(trainer):
            super().setup(trainer, pl_module, stage)

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Copy this rank's parameters.

        Raises:
            ValueError: if the averages are to be on another type of device, where the ranks could not gather them.
        """
        super().on_fit_start(trainer, pl_module)
        if not _is_parallel(trainer):
            return
        reshard(pl_module)
        # By default where the parameters are, some of them perhaps in host memory.
        device = None if self.average_device is None else torch.device(self.average_device)
        if device is not None and device.type != pl_module.device.type:
            raise ValueError(
                f"{type(self).__name__}(device={str(device)!r}): the averages of a divided model are gathered over its"
                f" process group, which works on {pl_module.device.type}: leave device= out"
            )
        made: dict[int, Any] = {}
        copied = _copy(pl_module, made)
        for model, state in parallel_models(pl_module):
            made[id(model)].autotp = state.of_copy(made)
        self.average = _HeldAverages(copied, device=device, **self.average_options)

    @contextmanager
    def exchanging(self, pl_module: LightningModule) -> Iterator[None]:
        """Element by element, once what an evaluation has left gathered is this rank's part again."""
        reshard(pl_module)
        with known_writes(pl_module):
            yield

    def on_save_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        """The averages as one process would have them. Collective."""
        super().on_save_checkpoint(trainer, pl_module, checkpoint)
        if _is_parallel(trainer) and self.average is not None:
            checkpoint["state_dict"] = trainer.strategy.state_of(self.average.module)  # type: ignore[attr-defined]

    def on_load_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        """Each rank takes its part; a checkpoint without averages gives both."""
        if not _is_parallel(trainer) or self.average is None:
            super().on_load_checkpoint(trainer, pl_module, checkpoint)
            return
        has_both = "current_model_state" in checkpoint and "averaging_state" in checkpoint
        with raise_together(None, "loading the checkpoint's averaged weights"):
            load_full_state_dict(self.average.module, checkpoint["state_dict"], strict=has_both)
            if has_both:
                self.average.n_averaged.copy_(checkpoint["averaging_state"]["n_averaged"])
                load_full_state_dict(pl_module, checkpoint["current_model_state"])


class WeightAveraging(_LocalAverages):
    """``lightning.pytorch.callbacks.WeightAveraging``, which averages a parallel model as well."""


class EMAWeightAveraging(_LocalAverages, callbacks.EMAWeightAveraging):
    """``lightning.pytorch.callbacks.EMAWeightAveraging``, which averages a parallel model as well."""


def refuse_whole_copies(used: Iterable[Callback]) -> None:
    """Callbacks that copy the model before it is cut.

    Raises:
        ValueError: naming the one among ``used``, and what to use instead.
    """
    for callback in used:
        is_average = isinstance(callback, callbacks.WeightAveraging) and not isinstance(callback, _LocalAverages)
        if is_average or isinstance(callback, callbacks.StochasticWeightAveraging):
            name = type(callback).__name__ if is_average else "WeightAveraging"
            how = (
                "with the same arguments"
                if is_average
                else "with a should_update() of your own for once an epoch, and a scheduler such as"
                " torch.optim.swa_utils.SWALR for its learning rates"
            )
            raise ValueError(
                f"the callback {type(callback).__name__} copies the model before it is divided among the ranks: use"
                f" lightning_autotp.lightning.averaging.{name}, {how}"
            )


def _is_parallel(trainer: Trainer) -> bool:
    return hasattr(trainer.strategy, "state_of")


def _copy(module: nn.Module, made: dict[int, Any], of: Callable[[Tensor], Tensor] = lambda tensor: tensor) -> nn.Module:
    """A plain module tree with the same parameters and buffers, or ``of`` them, under the same names; nothing else."""

    def tensors(named: dict[str, Any]) -> dict[str, Any]:  # tied ones stay so
        return {name: None if t is None else made.setdefault(id(t), of(t)) for name, t in named.items()}

    if id(module) not in made:
        made[id(module)] = copied = module_like(module, tensors)
        for name, child in children_of(module).items():
            copied.add_module(name, None if child is None else _copy(child, made, of))
    return made[id(module)]
