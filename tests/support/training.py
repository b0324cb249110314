"""A small training run through the Trainer, on several ranks and in one process."""

from __future__ import annotations

import random
from typing import Any

import lightning as L
import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader
from torchmetrics import SumMetric

from lightning_autotp import full_gradients, full_state_dict

STEPS = 20

ROWS = torch.randn(12, 6, generator=torch.Generator().manual_seed(1))

BLOCKS = torch.randint(0, 67, (40, 12), generator=torch.Generator().manual_seed(0))


def blocks() -> list[dict[str, Tensor]]:
    return [{"input_ids": block, "labels": block} for block in BLOCKS]


def tiny_config() -> Any:
    from transformers import LlamaConfig

    return LlamaConfig(
        vocab_size=67, hidden_size=32, intermediate_size=48, num_hidden_layers=1, num_attention_heads=4,
        num_key_value_heads=2, tie_word_embeddings=False,
    )  # fmt: skip


class SameStart(L.LightningModule):
    """Several runs train its one model, which is divided for the first: each can begin with the same weights."""

    first: dict[str, Tensor]

    def on_fit_start(self) -> None:
        if not hasattr(self, "first"):
            self.first = {name: value.clone() for name, value in self.state_dict().items()}

    def restore(self) -> None:
        """Take the weights that the first run began with, if there was one, and no gradients."""
        if hasattr(self, "first"):
            self.load_state_dict(self.first)
            self.zero_grad()


class Task(L.LightningModule):
    """An ordinary fine-tuning task that writes down what it sees.

    Args:
        source: a directory for ``from_pretrained``, ``"config"`` for ``from_config``, or ``"init"`` to build the model
            with its weights at once.
        learning_rate: the optimizer's.
        optimizer: a class of ``torch.optim``.
    """

    seen: dict[str, Any]

    def __init__(self, source: str, learning_rate: float = 1e-3, optimizer: str = "AdamW") -> None:
        super().__init__()
        self.save_hyperparameters()
        self.begin()
        self.counted = SumMetric()
        if source == "init":
            self.model = self.build()

    def begin(self) -> None:
        """See nothing yet: a run with a model that was divided for the one before it is as another one, and cheaper."""
        self.seen = {"losses": [], "gradients": [], "batches": []}

    def build(self) -> Any:
        from transformers import AutoModelForCausalLM

        source = self.hparams["source"]
        if source in ("config", "init"):
            return AutoModelForCausalLM.from_config(tiny_config())
        return AutoModelForCausalLM.from_pretrained(source).train()

    def configure_model(self) -> None:
        if not hasattr(self, "model"):
            self.model = self.build()

    def on_train_start(self) -> None:
        self.seen["random"] = drawn()

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        loss: Tensor = self.model(**batch).loss
        self.seen["losses"].append(loss.item())
        self.seen["batches"].append(batch["input_ids"].clone())
        return loss

    def on_after_backward(self) -> None:
        if len(self.seen["gradients"]) < 2:
            parallel = any(hasattr(module, "autotp") for module in self.modules())
            alone = self.named_parameters(remove_duplicate=False)
            found = full_gradients(self) if parallel else {name: value.grad.clone() for name, value in alone}
            self.seen["gradients"].append(found)

    def validation_step(self, batch: dict[str, Tensor], batch_idx: int) -> None:
        self.counted.update(1)
        self.log("rows", self.counted, on_epoch=True)
        self.log("validation", self.model(**batch).loss, sync_dist=True)
        self.log("ranks", 1.0, sync_dist=True, reduce_fx="sum")

    def configure_optimizers(self) -> torch.optim.Optimizer:
        kind = getattr(torch.optim, self.hparams["optimizer"])
        return kind(self.parameters(), lr=self.hparams["learning_rate"])


def trainer(strategy: Any, devices: int, **options: Any) -> L.Trainer:
    return L.Trainer(
        accelerator="cpu", devices=devices, strategy=strategy, logger=False, enable_progress_bar=False,
        enable_model_summary=False,
        **{"max_steps": STEPS, "max_epochs": -1, "enable_checkpointing": False, **options},
    )  # fmt: skip


def loader(shuffle: bool = False) -> DataLoader[Any]:
    return DataLoader(blocks(), batch_size=4, shuffle=shuffle)  # type: ignore[arg-type]


def fit(
    strategy: Any,
    devices: int,
    task: Task,
    shuffle: bool = False,
    ckpt_path: Any = None,
    save: Any = None,
    data: Any = None,
    **options: Any,
) -> dict[str, Any]:
    """Train and return what was seen, with the final whole weights."""
    fitting = trainer(strategy, devices, **options)
    fitting.fit(task, loader(shuffle) if data is None else data, ckpt_path=ckpt_path)
    if save is not None:
        fitting.save_checkpoint(save)
    parallel = any(hasattr(module, "autotp") for module in task.modules())
    task.seen["weights"] = full_state_dict(task) if parallel else {k: v.clone() for k, v in task.state_dict().items()}
    return task.seen


class SavesAfter(L.Callback):
    """Saves a checkpoint after some step of a run, as Lightning's ``ModelCheckpoint`` would."""

    def __init__(self, step: int, path: Any) -> None:
        self.step, self.path = step, path

    def on_train_batch_end(self, trainer: L.Trainer, *_: Any) -> None:
        if trainer.global_step == self.step:
            trainer.save_checkpoint(self.path)


def drawn() -> tuple[float, float, float]:
    """From each of the generators that ``seed_everything`` seeds."""
    return torch.rand(()).item(), float(np.random.rand()), random.random()


def error_of(call: Any, *args: Any, **kwargs: Any) -> str:
    """The error a call raises."""
    try:
        call(*args, **kwargs)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "no error"


class Regression(L.LightningModule):
    """A plain module inside, and parts of the LightningModule's own around it."""

    example_input_array = torch.zeros(5, 6)

    def __init__(self, optimizer: str = "SGD") -> None:
        super().__init__()
        self.optimizer = optimizer
        self.losses: list[float] = []

    def configure_model(self) -> None:
        if not hasattr(self, "net"):
            self.net = nn.Sequential(nn.Linear(6, 14), nn.Tanh(), nn.Linear(14, 6))
            self.scale = nn.Parameter(torch.randn(6))

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x)

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        loss = (self.net(batch) * self.scale - batch).square().mean()
        self.losses.append(loss.item())
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return getattr(torch.optim, self.optimizer)(self.parameters(), lr=0.1)


def assert_parity(found: dict[str, Any], wanted: dict[str, Any]) -> None:
    """Losses within 1e-5 relative; gradients and weights within 1e-4."""
    torch.testing.assert_close(torch.tensor(found["losses"]), torch.tensor(wanted["losses"]), rtol=1e-5, atol=0)
    for first, second in zip(found.get("gradients", []), wanted.get("gradients", []), strict=True):
        assert first.keys() == second.keys()
        for name, gradient in second.items():
            torch.testing.assert_close(first[name], gradient, rtol=1e-4, atol=1e-6)
    assert list(found["weights"]) == list(wanted["weights"])
    for name, weight in wanted["weights"].items():
        assert found["weights"][name].dtype == weight.dtype
        torch.testing.assert_close(found["weights"][name], weight, rtol=1e-4, atol=1e-4)
