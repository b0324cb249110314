"""A model of one's own, without Hugging Face: a transformer that forecasts a series of numbers.

python examples/own_module.py --devices 2 --max_steps 100
"""

from __future__ import annotations

import math

import lightning as L
import torch
from jsonargparse import auto_cli
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader

import lightning_autotp  # noqa: F401  registers strategy="autotp"

LENGTH = 48


class Block(nn.Module):
    """Attention with one fused projection, then two linear layers, as one would write it.

    Args:
        width: of the model.
        heads: how many of them; they need not divide by the number of devices.
    """

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        """``[batch, length, width] -> [batch, length, width]``."""
        batch, length, _ = x.shape
        q, k, v = self.qkv(self.norm1(x)).view(batch, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class Forecaster(nn.Module):
    """The next number after each of a series.

    Args:
        width: of the model.
        heads: of each block.
        blocks: how many.
    """

    def __init__(self, width: int, heads: int, blocks: int) -> None:
        super().__init__()
        self.embed = nn.Linear(1, width)
        self.position = nn.Embedding(LENGTH, width)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(blocks))
        self.head = nn.Linear(width, 1)

    def forward(self, series: Tensor) -> Tensor:
        """``[batch, length] -> [batch, length]``."""
        x = self.embed(series[..., None]) + self.position(torch.arange(series.shape[1], device=series.device))
        for block in self.blocks:
            x = block(x)
        return self.head(x)[..., 0]


class Forecast(L.LightningModule):
    """Trains a forecaster.

    Args:
        width: of the model.
        heads: of each block.
        blocks: how many.
        learning_rate: AdamW's.
    """

    example_input_array = torch.zeros(2, LENGTH)
    """What the model is traced with; only its shape matters."""

    def __init__(self, width: int = 60, heads: int = 5, blocks: int = 3, learning_rate: float = 3e-3) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.net: Forecaster | None = None

    def configure_model(self) -> None:
        if self.net is None:
            self.net = Forecaster(self.hparams["width"], self.hparams["heads"], self.hparams["blocks"])

    def forward(self, series: Tensor) -> Tensor:
        assert self.net is not None
        found: Tensor = self.net(series)
        return found

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        loss = F.mse_loss(self(batch[:, :-1]), batch[:, 1:])
        self.log("loss", loss, prog_bar=True)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=self.hparams["learning_rate"])


def waves(count: int) -> Tensor:
    """Sums of two sines: ``[count, LENGTH + 1]``."""
    generator = torch.Generator().manual_seed(0)
    pace, phase = torch.rand(2, count, 2, 1, generator=generator)
    return torch.sin(torch.arange(LENGTH + 1) * (0.1 + 0.4 * pace) + 2 * math.pi * phase).sum(1)


def main(devices: int = 2, max_steps: int = 100, batch_size: int = 16) -> None:
    """Train a forecaster of sums of sines.

    Args:
        devices: number of processes.
        max_steps: optimizer steps.
        batch_size: series in a batch.
    """
    L.seed_everything(0)
    trainer = L.Trainer(
        strategy="autotp", devices=devices, max_steps=max_steps, max_epochs=-1, enable_checkpointing=False, logger=False
    )
    task = Forecast()
    series: DataLoader[Tensor] = DataLoader(waves(512), batch_size, shuffle=True, drop_last=True)  # type: ignore[arg-type]
    trainer.fit(task, series)
    if trainer.is_global_zero:
        print(f"loss after {trainer.global_step} steps: {trainer.callback_metrics['loss'].item():.6f}")


if __name__ == "__main__":
    auto_cli(main)
