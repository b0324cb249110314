"""The losses of a run: collected step by step, kept in a CSV file, drawn as a picture."""

from __future__ import annotations

import csv
import time
from pathlib import Path
from typing import Any

import lightning as L
import matplotlib
from lightning.pytorch.callbacks import Callback
from rich.console import Console
from torch import Tensor

matplotlib.use("Agg")


class History(Callback):
    """Every step's loss and tokens per second; the progress bar shows the latter too.

    Args:
        console: where to print a line for every step when it is not a terminal that could draw a progress bar.
    """

    def __init__(self, console: Console) -> None:
        self.losses: list[float] = []
        self.tokens_per_second: list[float] = []
        self._console = console
        self._started = 0.0

    def on_train_batch_start(self, *_: Any) -> None:
        self._started = time.perf_counter()

    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: L.LightningModule, outputs: Any, batch: dict[str, Tensor], batch_idx: int
    ) -> None:
        loss = float(trainer.strategy.reduce(outputs["loss"].detach(), reduce_op="mean"))  # waits for the device
        replicas = (trainer.distributed_sampler_kwargs or {}).get("num_replicas", 1)
        speed = batch["input_ids"].numel() * replicas / (time.perf_counter() - self._started)
        self.losses.append(loss)
        self.tokens_per_second.append(speed)
        pl_module.log("tokens/s", speed, prog_bar=True)
        if trainer.is_global_zero and not self._console.is_terminal:
            step = f"step {trainer.global_step:>3}/{trainer.max_steps}"
            self._console.print(f"{step}  loss {loss:.4f}  {speed:,.0f} tokens/s", highlight=False)

    def write(self, file: Path) -> None:
        """Write one row per step; ``repr`` keeps every bit of the losses."""
        with file.open("w", newline="") as stream:
            writer = csv.writer(stream)
            writer.writerow(["step", "loss", "tokens_per_second"])
            for step, (loss, speed) in enumerate(zip(self.losses, self.tokens_per_second, strict=True), start=1):
                writer.writerow([step, repr(loss), f"{speed:.1f}"])


def read_losses(file: Path) -> list[float]:
    """The losses of a run from its CSV file."""
    with file.open(newline="") as stream:
        return [float(row["loss"]) for row in csv.DictReader(stream)]


def largest_difference(losses: list[float], reference: list[float]) -> float:
    """The largest difference between two runs at a step, relative to the reference."""
    return max(abs(loss - other) / abs(other) for loss, other in zip(losses, reference, strict=True))


def draw(file: Path, label: str, losses: list[float], reference: list[float] | None) -> None:
    """Draw training loss against step, a single process's curve under it where there is one."""
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(7, 4), dpi=150, layout="constrained")
    steps = range(1, len(losses) + 1)
    if reference is not None:
        axes.plot(steps, reference, color="tab:orange", linewidth=5, alpha=0.5, label="one process")
    axes.plot(steps, losses, color="tab:blue", marker="o", markersize=3, linewidth=1.2, label=label)
    axes.set(xlabel="step", ylabel="training loss")
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(file)
    plt.close(figure)
