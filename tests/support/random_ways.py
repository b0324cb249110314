"""Models whose code goes where random numbers say, and pruned ones, in small training runs."""

from __future__ import annotations

import random
from typing import Any

import lightning as L
import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils import prune
from training import ROWS, drawn, trainer

from lightning_autotp import full_state_dict
from lightning_autotp.parameters.state import parallel_state


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(8), nn.Linear(8, 12), nn.Linear(12, 8)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.down(F.gelu(self.up(self.norm(x))))
        return y


class Front(nn.Module):
    """Skips layers of the model's input, and gives that back where it skips all."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(6, 12), nn.ReLU(), nn.Linear(12, 6)) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            if self.training and torch.rand(()) < 0.5:
                continue
            x = x + layer(x)
        return x


class Dropped(nn.Module):
    """Skips layers by torch's, Python's and numpy's random numbers, in one or the other direction."""

    def __init__(self) -> None:
        super().__init__()
        self.front, self.first, self.last = Front(), nn.Linear(6, 8), nn.Linear(8, 6)
        self.blocks = nn.ModuleList(Block() for _ in range(5))
        self.probability = 0.5

    def skips(self, at: int) -> bool:
        kept = 1 - self.probability
        return bool(
            (
                lambda: torch.rand(1).item() < self.probability,
                lambda: torch.rand([]) < self.probability,
                lambda: random.random() < self.probability,
                lambda: np.random.uniform(0, 1) < self.probability,
                lambda: not torch.bernoulli(torch.tensor(kept)),
            )[at]()
        )

    def forward(self, x: Tensor) -> Tensor:
        h = self.first(self.front(x))
        for at, block in enumerate(self.blocks):
            if self.training and self.skips(at):
                continue
            h = h + block(h)
        if not self.training:
            h = h * 1.5
        y: Tensor = self.last(h)
        return y


class Chosen(Dropped):
    """Runs some layers of several, and with each something that random numbers choose."""

    def forward(self, x: Tensor) -> Tensor:
        h = self.first(self.front(x))
        for at in range(2):
            block = self.blocks[int(torch.randint(0, 5, (1,)))] if self.training else self.blocks[at]
            h = h + 0.5 * block(h).flip(1) if random.random() < 0.5 and self.training else h - block(h)
        y: Tensor = self.last(h)
        return y


def pruned() -> nn.Module:
    model = nn.Sequential(nn.Linear(6, 32), nn.ReLU(), nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 6))
    first, second, last = (layer for layer in model if isinstance(layer, nn.Linear))
    prune.ln_structured(first, "weight", 0.3, n=2, dim=0)
    prune.l1_unstructured(second, "weight", 0.2)
    prune.custom_from_mask(last, "weight", (torch.rand(6, 32) > 0.3).float())
    prune.random_unstructured(last, "bias", 0.2)
    prune.global_unstructured([(first, "weight"), (second, "weight")], pruning_method=prune.L1Unstructured, amount=0.4)
    return model


def decoder() -> nn.Module:
    """OPT, which skips layers by its ``layerdrop``; the embeddings go on to any of the layers."""
    from transformers import OPTConfig, OPTForCausalLM

    return OPTForCausalLM(
        OPTConfig(
            vocab_size=67, hidden_size=32, ffn_dim=64, num_hidden_layers=3, num_attention_heads=4, layerdrop=0.5,
            max_position_embeddings=32, word_embed_proj_dim=32, dropout=0.0, tie_word_embeddings=False,
        )
    )  # fmt: skip


BUILT = {"dropped": Dropped, "chosen": Chosen, "pruned": pruned, "opt": decoder}
IDS = torch.randint(0, 67, (12, 9), generator=torch.Generator().manual_seed(2))


class Training(L.LightningModule):
    """Trains one of these models.

    Args:
        name: which.
    """

    def __init__(self, name: str) -> None:
        super().__init__()
        self.name, self.losses = name, list[float]()
        self.ways = set[tuple[str, ...]]()

    def configure_model(self) -> None:
        if not hasattr(self, "model"):
            self.model = BUILT[self.name]()

    def loss(self, batch: Tensor) -> Tensor:
        loss: Tensor = (
            self.model(input_ids=batch, labels=batch).loss
            if self.name == "opt"
            else F.mse_loss(self.model(batch), batch.flip(1))
        )
        self.losses.append(loss.item())
        return loss

    def training_step(self, batch: Tensor) -> Tensor:
        return self.loss(batch)

    def on_after_backward(self) -> None:
        self.ways.add(tuple(name for name, parameter in self.named_parameters() if parameter.grad is None))

    def validation_step(self, batch: Tensor) -> None:
        self.loss(batch)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def train(name: str, devices: int) -> dict[str, Any]:
    """What a run of eight steps with validation between has seen."""
    L.seed_everything(3, verbose=False)
    task = Training(name)
    loader = torch.utils.data.DataLoader(IDS if name == "opt" else ROWS, batch_size=3)  # type: ignore[arg-type, var-annotated]
    options = {"max_steps": 8, "val_check_interval": 2, "limit_val_batches": 1, "num_sanity_val_steps": 0}
    fitting = trainer("autotp" if devices > 1 else "auto", devices, **options)
    fitting.fit(task, loader, loader)
    seen = {"losses": task.losses, "ways": task.ways, "drawn": drawn()}
    if devices > 1:
        calls = parallel_state(task.model).guard.calls  # type: ignore[union-attr]
        seen |= {"kinds": len(calls.known), "weights": full_state_dict(task)}
        seen["divided"] = parallel_state(task.model).plan.sharded_fraction
    else:
        seen["weights"] = {name: value.clone() for name, value in task.state_dict().items()}
    return seen
