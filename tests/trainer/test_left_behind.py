"""After a run nothing of the strategy is left in what the user keeps: the precision plugin, callbacks, the Trainer."""

from __future__ import annotations

from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.plugins import MixedPrecision
from lightning.pytorch.strategies import Strategy
from torch import Tensor, nn
from torch.utils.data import DataLoader
from torchmetrics import SumMetric
from trainer_ranks import run_trainer_ranks

from lightning_autotp.lightning.strategy import AutoTPStrategy


class Small(LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 8))
        self.example_input_array = torch.randn(4, 8)

    def training_step(self, batch: Tensor, _: int) -> Tensor:
        loss: Tensor = self.model(batch).square().mean()
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.01)


class Rows(Callback):
    """Counts the rows of an epoch, and keeps another metric that is never computed."""

    def __init__(self) -> None:
        self.rows, self.all_rows = SumMetric(), SumMetric()
        self.counted: list[float] = []

    def on_train_batch_end(self, trainer: Trainer, module: LightningModule, output: Any, batch: Tensor, _: int) -> None:
        self.rows.update(len(batch))
        self.all_rows.update(len(batch))

    def on_train_epoch_end(self, trainer: Trainer, module: LightningModule) -> None:
        self.counted.append(self.rows.compute().item())
        self.rows.reset()


def trainer(strategy: Strategy | str, *callbacks: Callback, devices: int = 1, **options: Any) -> Trainer:
    return Trainer(
        accelerator="cpu",
        devices=devices,
        strategy=strategy,
        callbacks=list(callbacks),
        max_epochs=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        **options,
    )


def two_runs() -> dict[str, object]:
    scaler = torch.amp.GradScaler("cpu", init_scale=64.0, growth_interval=1)
    precision = MixedPrecision("16-mixed", "cpu", scaler=scaler)
    data = DataLoader(torch.randn(8, 8), batch_size=4)
    first = trainer(AutoTPStrategy(), plugins=[precision])
    first.fit(Small(), data)
    seen: dict[str, object] = {
        "scaler": precision.scaler is scaler,
        "scale": scaler.get_scale(),
        "sampler": first._accelerator_connector.use_distributed_sampler,
    }
    trainer("auto", plugins=[precision]).fit(Small(), data)
    return {**seen, "second scaler": precision.scaler is scaler, "second scale": scaler.get_scale()}


def test_the_scaler_and_the_sampler_are_the_users_again() -> None:
    (seen,) = run_trainer_ranks(two_runs, 1)
    assert seen["scaler"]
    assert seen["scale"] == 64.0 * 2**2, "it has not gone on with the scale of the run"
    assert seen["sampler"], "of the Trainer it was left off"
    assert seen["second scaler"]
    assert seen["second scale"] == 64.0 * 2**4


def with_one_callback() -> tuple[list[float], float]:
    data, rows = DataLoader(torch.randn(8, 8), batch_size=2), Rows()
    for strategy in (AutoTPStrategy(tensor_parallel_size=2), "ddp"):
        trainer(strategy, rows, devices=2).fit(Small(), data)
        if strategy != "ddp":
            all_rows = rows.all_rows.compute().item()
    return rows.counted, all_rows


def test_metrics_of_callbacks_count_all_ranks_again() -> None:
    """With another strategy; what is still to be computed counts each row once."""
    for counted, all_rows in run_trainer_ranks(with_one_callback, 2):
        assert counted == [8.0, 8.0], "two ranks read 8 rows together, by autotp and by ddp"
        assert all_rows == 8.0
