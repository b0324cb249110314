"""What trains a combination of options, with the Trainer or with Fabric, on its ranks and in one process."""

from __future__ import annotations

import os
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import lightning as L
import torch
from combination_task import (
    EPOCHS,
    STEPS_OF_EPOCH,
    adapted_model,
    batches,
    compile_in_place,
    is_parallel,
    kernels,
    loss_of,
    make_noisy,
    nothing_seen,
    optimizer_of,
    schedule_of,
    whole_gradients,
    whole_state,
    written,
)
from combinations import Combination
from lightning.fabric import Fabric
from lightning.fabric.plugins import MixedPrecision as FabricMixedPrecision
from lightning.pytorch import callbacks
from lightning.pytorch.plugins import MixedPrecision
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_autotp import AutoTPFabricStrategy, AutoTPStrategy, export_checkpoint, save_pretrained
from lightning_autotp.export.adapters import save_adapter
from lightning_autotp.lightning.averaging import EMAWeightAveraging

ALONE = "auto"
"""The strategy of one process."""


class Run:
    """A run of either driver.

    Args:
        combination: what is trained.
        strategy: of its ranks, or :data:`ALONE`.
        data: of an epoch.
        folder: with the directory of the model, and for what is exported.
        start: a checkpoint to go on from.
        save: where one is written after each epoch.
        epochs: how many.
        noise: as for :func:`one_process`.
    """

    def __init__(
        self,
        combination: Combination,
        strategy: Any,
        data: list[Any],
        folder: Path,
        *,
        start: Path | None = None,
        save: Path | None = None,
        epochs: int = EPOCHS,
        noise: int = 0,
    ) -> None:
        self.combination, self.strategy, self.data, self.folder = combination, strategy, data, folder
        self.start, self.save, self.epochs, self.noise = start, save, epochs, noise
        self.alone = strategy == ALONE
        self.seen = nothing_seen()

    def done(self) -> dict[str, Any]:
        """What it saw."""
        L.seed_everything(3, verbose=False)
        with kernels(self.combination):
            (with_fabric if self.combination.driver == "fabric" else with_trainer)(self)
        return self.seen

    @property
    def devices(self) -> int:
        return 1 if self.alone else self.combination.ranks

    def model(self) -> Any:
        model = adapted_model(self.combination, self.folder)
        if self.noise:
            make_noisy(self.combination, model, self.noise)
        if not self.alone:
            compile_in_place(self.combination, model)
        return model

    def precision(self, mixed: Any) -> dict[str, Any]:
        """Options for the driver, whose class of mixed precision is given."""
        if self.combination.precision == "float64":
            return {}
        if self.combination.precision == "16-mixed":
            return {"plugins": [mixed("16-mixed", "cpu", torch.amp.GradScaler("cpu", init_scale=2.0**8))]}
        return {"precision": self.combination.precision}

    def see_gradients(self, module: nn.Module) -> None:
        if len(self.seen["gradients"]) < STEPS_OF_EPOCH:  # later steps are made without
            self.seen["gradients"].append(whole_gradients(module))

    def see_writing(self, model: Any, batch: list[Any]) -> None:
        if self.combination.generates:
            self.seen["written"].append([written(model, part) for part in batch])

    @property
    def exported(self) -> Path:
        return self.folder / "exported"

    @property
    def checkpoint(self) -> Path:
        """From which is exported."""
        return self.folder / "trained.ckpt"

    @property
    def exports(self) -> str:
        """How this run does: only the last one, on the ranks."""
        is_last = self.epochs == EPOCHS or self.combination.resume == "to-one-process"
        return "none" if self.alone or not is_last else self.combination.export


# --- the Trainer ---


def with_trainer(run: Run) -> None:
    combination = run.combination
    task = Combined(run)
    used: list[Any] = []
    if combination.averaging:
        used.append((callbacks.EMAWeightAveraging if run.alone else EMAWeightAveraging)(decay=0.5))
    if run.save is not None:
        used.append(callbacks.ModelCheckpoint(run.save.parent, filename=run.save.stem, every_n_epochs=1))
    options = run.precision(MixedPrecision)
    if combination.clip != "none":
        options["gradient_clip_algorithm"] = combination.clip
        options["gradient_clip_val"] = CLIPS[combination.clip]
    if combination.evaluation == "batch":
        options["val_check_interval"] = 1
    trainer = L.Trainer(
        accelerator="cpu", devices=run.devices, strategy=run.strategy, logger=False, enable_progress_bar=False,
        enable_model_summary=False, enable_checkpointing=run.save is not None, callbacks=used, max_epochs=run.epochs,
        accumulate_grad_batches=combination.accumulate, use_distributed_sampler=False, **options,
    )  # fmt: skip
    loaders: list[Any] = [DataLoader(run.data, batch_size=None)]
    if combination.evaluation != "none":
        loaders.append(DataLoader(run.data[:1], batch_size=None))
    trainer.fit(task, *loaders, ckpt_path=run.start, weights_only=False)
    run.seen["after"] = whole_state(combination, task)
    if run.exports == "run":
        trainer.strategy.save_pretrained(run.exported)
    elif run.exports == "checkpoint":
        trainer.save_checkpoint(run.checkpoint)
        _export_checkpoint(run, trainer.is_global_zero)


CLIPS = {"norm": 0.2, "value": 2e-3}


class Combined(L.LightningModule):
    """A task as the options say, that writes down what is compared."""

    def __init__(self, run: Run) -> None:
        super().__init__()
        self.run, self.combination, self.seen = run, run.combination, run.seen
        if self.combination.source == "ready":
            self.model = self._built()

    def _built(self) -> Any:
        dtype = torch.get_default_dtype()
        if self.combination.averaging:
            # In one process Lightning's callback builds the model, before the precision's dtype is set, and numbers
            # that are drawn in another dtype are others.
            torch.set_default_dtype(torch.float32)
        try:
            return self.run.model()
        finally:
            torch.set_default_dtype(dtype)

    def configure_model(self) -> None:
        if not hasattr(self, "model"):
            self.model = self._built()

    def on_fit_start(self) -> None:
        if not is_parallel(self):
            self.seen["before"] = whole_state(self.combination, self)

    def training_step(self, batch: list[dict[str, Any]], batch_idx: int) -> Tensor:
        loss = loss_of(self.combination, self.model, batch)
        self.seen["losses"].append(loss.item())
        return loss

    def validation_step(self, batch: list[dict[str, Any]], batch_idx: int) -> None:
        self.log("evaluated", loss_of(self.combination, self.model, batch), sync_dist=True)
        if not self.trainer.sanity_checking:
            self.run.see_writing(self.model, batch)

    def on_validation_epoch_end(self) -> None:
        if not self.trainer.sanity_checking:
            self.seen["evaluated"].append(float(self.trainer.callback_metrics["evaluated"]))

    def on_before_optimizer_step(self, optimizer: torch.optim.Optimizer) -> None:
        self.run.see_gradients(self)

    def configure_optimizers(self) -> Any:
        optimizer = optimizer_of(self.combination, self, self.model)
        if not self.combination.schedule:
            return optimizer
        return {
            "optimizer": optimizer,
            "lr_scheduler": {"scheduler": schedule_of(optimizer), "interval": "step"},
        }


# --- Fabric ---


def with_fabric(run: Run) -> None:
    combination = run.combination
    fabric = Fabric(
        accelerator="cpu", devices=run.devices, strategy=run.strategy, **run.precision(FabricMixedPrecision)
    )
    fabric.launch()
    with nullcontext() if combination.source == "ready" else fabric.init_module():
        made = run.model()
    if run.alone:
        run.seen["before"] = whole_state(combination, made)
    if combination.optimizer.startswith("whole-"):
        model = fabric.setup_module(made)
        optimizer = fabric.setup_optimizers(optimizer_of(combination, made, made))
    else:
        model, optimizer = fabric.setup(made, optimizer_of(combination, made, made))
    state: dict[str, Any] = {"model": model, "optimizer": optimizer, "epoch": 0}
    if combination.schedule:
        state["schedule"] = schedule_of(optimizer)
    if combination.generates:
        model.mark_forward_method("generate")
    if run.start is not None:
        fabric.load(run.start, state)
    loader = fabric.setup_dataloaders(DataLoader(run.data, batch_size=None), use_distributed_sampler=False)  # type: ignore[arg-type]
    evaluated = fabric.setup_dataloaders(DataLoader(run.data[:1], batch_size=None), use_distributed_sampler=False)  # type: ignore[arg-type]
    while state["epoch"] < run.epochs:
        for number, batch in enumerate(loader):
            is_last = (number + 1) % combination.accumulate == 0
            with fabric.no_backward_sync(model, enabled=not is_last):
                loss = loss_of(combination, model, batch)
                fabric.backward(loss / combination.accumulate)
            run.seen["losses"].append(loss.item())
            if is_last:
                _step(run, fabric, model, optimizer, state.get("schedule"))
            if combination.evaluation == "batch":
                _evaluate(run, fabric, model, evaluated)
        state["epoch"] += 1
        if combination.evaluation == "epoch":
            _evaluate(run, fabric, model, evaluated)
    if run.save is not None:
        fabric.save(run.save, state)
    run.seen["after"] = whole_state(combination, made)
    if run.exports == "run":
        write = save_pretrained if combination.adapter == "none" else save_adapter
        write(made, run.exported, write=fabric.global_rank == 0, every_process=True)
    elif run.exports == "checkpoint":
        fabric.save(run.checkpoint, {"model": model})
        _export_checkpoint(run, fabric.is_global_zero)


def _step(run: Run, fabric: Fabric, model: Any, optimizer: Any, schedule: Any) -> None:
    run.see_gradients(model.module)
    clip = run.combination.clip
    if clip != "none":
        fabric.clip_gradients(model, optimizer, **{{"norm": "max_norm", "value": "clip_val"}[clip]: CLIPS[clip]})
    optimizer.step()
    optimizer.zero_grad()
    if schedule is not None:
        schedule.step()


def _evaluate(run: Run, fabric: Fabric, model: Any, loader: Any) -> None:
    model.eval()
    for batch in loader:
        with torch.no_grad():
            loss = loss_of(run.combination, model, batch)
            run.seen["evaluated"].append(float(fabric.all_reduce(loss, reduce_op="mean")))
            with fabric.autocast():
                run.see_writing(model, batch)
    model.train()


# --- runs ---


def _export_checkpoint(run: Run, writes: bool) -> None:
    if writes:
        export_checkpoint(run.checkpoint, run.exported)


def two_halves(first: dict[str, Any], second: dict[str, Any]) -> dict[str, Any]:
    """Two halves of a run as one."""
    joined = {key: first[key] + second[key] for key in nothing_seen()}
    return {**joined, "before": first.get("before"), "after": second["after"]}


def one_process(combination: Combination, folder: Path, noise: int = 0) -> dict[str, Any]:
    """What one process sees.

    Args:
        combination: what is trained.
        folder: for its checkpoints; the directory of the model is beside it.
        noise: number of a run whose weights are off by what they are rounded to; 0 for the one with the weights.
    """
    data, source = batches(combination), folder.parent
    if combination.resume == "none":
        return Run(combination, ALONE, data, source, noise=noise).done()
    half = folder / "half.ckpt"
    first = Run(combination, ALONE, data, source, save=half, epochs=EPOCHS // 2, noise=noise).done()
    return two_halves(first, Run(combination, ALONE, data, source, start=half, noise=noise).done())


def on_ranks(combination: Combination, folder: Path, data: list[list[dict[str, Any]]]) -> dict[str, Any]:
    rank = int(os.environ["RANK"])
    mine = [[each[rank // combination.tensor_ranks]] for each in data]
    torch.manual_seed(rank)  # the strategy sees to it that ranks draw alike

    def run(**options: Any) -> dict[str, Any]:
        return Run(combination, strategy_of(combination, mine), mine, folder, **options).done()

    if combination.resume == "none":
        return run()
    half = folder / "ranks" / "half.ckpt"
    if combination.resume == "from-one-process":
        return run(start=folder / "alone" / "half.ckpt")
    first = run(save=half, epochs=EPOCHS // 2)
    return first if combination.resume == "to-one-process" else two_halves(first, run(start=half))


def strategy_of(combination: Combination, data: list[list[dict[str, Any]]]) -> Any:
    tokens: Any = {"no": False, "yes": True, "auto": "auto"}[combination.sequence_parallel]
    kept: Any = combination.checkpointing if combination.checkpointing in ("blocks", "offload", "auto") else None
    options: dict[str, Any] = {
        "sequence_parallel": tokens,
        "activation_checkpointing": kept,
        "cpu_offload": combination.offload,
        "broadcast_batches": combination.broadcast,
        "save_distributed_checkpoint": combination.resume == "directory",
    }
    if kept == "auto":
        options["memory"] = 1.0  # so that blocks are computed again
    sizes = combination.tensor_ranks, (combination.copies, 1) if combination.replicated else combination.copies
    if combination.driver == "trainer":
        return AutoTPStrategy(*sizes, **options)
    if combination.adapter != "none" or combination.group not in ("causal", "masked", "token", "sequence"):
        # There is no synthetic batch for it.
        options["example_inputs"] = data[0][0]
    return AutoTPFabricStrategy(*sizes, **options)


def on_to_one_process(combination: Combination, folder: Path, first: dict[str, Any]) -> dict[str, Any]:
    """What ranks saw in their half of a run, and one process in the other one."""
    start = folder / "ranks" / "half.ckpt"
    return two_halves(first, Run(combination, ALONE, batches(combination), folder, start=start).done())
