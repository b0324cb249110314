"""After a run nothing of the strategy is left in what the user keeps: the precision plugin and the Trainer."""

from __future__ import annotations

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.plugins import MixedPrecision
from lightning.pytorch.strategies import Strategy
from torch import Tensor, nn
from torch.utils.data import DataLoader
from trainer_ranks import run_trainer_ranks

from lightning_autotp.lightning.strategy import AutoTPStrategy
from lightning_autotp.private.lightning_private import use_distributed_sampler


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


def trainer(strategy: Strategy | str, precision: MixedPrecision) -> Trainer:
    return Trainer(
        accelerator="cpu",
        devices=1,
        strategy=strategy,
        plugins=[precision],
        max_steps=2,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )


def two_runs() -> dict[str, object]:
    scaler = torch.amp.GradScaler("cpu", init_scale=64.0, growth_interval=1)
    precision = MixedPrecision("16-mixed", "cpu", scaler=scaler)
    data = DataLoader(torch.randn(8, 8), batch_size=4)
    first = trainer(AutoTPStrategy(), precision)
    first.fit(Small(), data)
    seen: dict[str, object] = {
        "scaler": precision.scaler is scaler,
        "scale": scaler.get_scale(),
        "sampler": use_distributed_sampler(first, True),
    }
    trainer("auto", precision).fit(Small(), data)
    return {**seen, "second scaler": precision.scaler is scaler, "second scale": scaler.get_scale()}


def test_the_scaler_and_the_sampler_are_the_users_again() -> None:
    (seen,) = run_trainer_ranks(two_runs, 1)
    assert seen["scaler"]
    assert seen["scale"] == 64.0 * 2**2, "it has not gone on with the scale of the run"
    assert seen["sampler"], "of the Trainer it was left off"
    assert seen["second scaler"]
    assert seen["second scale"] == 64.0 * 2**4
