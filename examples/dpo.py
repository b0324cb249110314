"""Preference tuning (DPO): preferred answers become more probable than others, compared with a frozen reference.

python examples/dpo.py --devices 2 --max_steps 20

The loss is that of Rafailov et al. 2023, "Direct Preference Optimization".
"""

from __future__ import annotations

from typing import Any

import lightning as L
import torch
from instruct import IGNORED, Instructions
from jsonargparse import auto_cli
from smollm2 import NAME, model_directory
from torch import Tensor
from torch.nn import functional as F
from torch.utils.data import DataLoader
from transformers import AutoModelForCausalLM

import lightning_autotp  # noqa: F401  registers strategy="autotp"
from lightning_autotp.losses import token_log_probs


class Preferences(L.LightningModule):
    """A policy, and the reference that it began as: two models, which are both divided.

    Args:
        model: Hub id or directory.
        learning_rate: AdamW's.
        beta: how far the policy may go away from the reference: the smaller, the further.
    """

    def __init__(self, model: str = NAME, learning_rate: float = 1e-5, beta: float = 0.1) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.policy: Any = None
        self.reference: Any = None

    def configure_model(self) -> None:
        if self.policy is None:
            directory = model_directory(self.hparams["model"])
            self.policy = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).train()
            reference = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
            self.reference = reference.eval().requires_grad_(False)

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        with torch.no_grad():
            before = self.log_probs(self.reference, batch)
        preferred, other = (self.log_probs(self.policy, batch) - before).chunk(2)
        margin = preferred - other
        loss = -F.logsigmoid(self.hparams["beta"] * margin).mean()
        self.log("loss", loss, prog_bar=True)
        self.log("right", (margin > 0).float().mean(), prog_bar=True)
        return loss

    @staticmethod
    def log_probs(model: Any, batch: dict[str, Tensor]) -> Tensor:
        """The log-probability of each answer, ``[2 * batch]``; the logits are not gathered."""
        logits = model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"], use_cache=False).logits
        return token_log_probs(logits[:, :-1], batch["labels"][:, 1:]).sum(-1)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.policy.parameters(), lr=self.hparams["learning_rate"])


class Pairs(Instructions):
    """Every question with its own answer, which is preferred, and with the next question's; arguments as there."""

    def train_dataloader(self) -> DataLoader[Any]:
        pairs = list(zip(self.examples, [*self.examples[1:], self.examples[0]], strict=True))
        return DataLoader(pairs, self.hparams["batch_size"], drop_last=True, collate_fn=self.collate_pairs)  # type: ignore[arg-type]

    def collate_pairs(self, pairs: list[tuple[dict[str, list[int]], dict[str, list[int]]]]) -> dict[str, Tensor]:
        """First the preferred answers, then the others: ``[2 * batch, longest]``."""
        return self.collate([own for own, _ in pairs] + [self.swapped(own, other) for own, other in pairs])

    def swapped(self, asked: dict[str, list[int]], answered: dict[str, list[int]]) -> dict[str, list[int]]:
        """The question of one example with the answer of another."""
        (question, labels), (answer, found) = (example.values() for example in (asked, answered))
        before, after = labels.count(IGNORED), found.count(IGNORED)
        length: int = self.hparams["max_length"]
        return {
            "input_ids": (question[:before] + answer[after:])[:length],
            "labels": (labels[:before] + found[after:])[:length],
        }


def main(
    model: str = NAME,
    path: str | None = None,
    output_dir: str = "runs/dpo",
    devices: int = 2,
    max_steps: int = 20,
    learning_rate: float = 1e-5,
    beta: float = 0.1,
    max_length: int = 256,
    batch_size: int = 2,
) -> None:
    """Teach a model to prefer right answers.

    Args:
        model: Hub id or directory; "smollm2" is the SmolLM2-135M-Instruct that comes from a package.
        path: JSON lines with "question" and "answer"; by default questions about the Python language.
        output_dir: where the Hugging Face directory of the policy goes.
        devices: number of processes.
        max_steps: optimizer steps.
        learning_rate: AdamW's.
        beta: the smaller, the further the policy goes away from the reference.
        max_length: tokens of a question and its answer.
        batch_size: pairs in a batch.
    """
    L.seed_everything(0)
    trainer = L.Trainer(
        strategy="autotp", devices=devices, max_steps=max_steps, max_epochs=-1, enable_checkpointing=False, logger=False
    )
    task = Preferences(model, learning_rate, beta)
    trainer.fit(task, Pairs(model, path, max_length, batch_size))
    trainer.strategy.save_pretrained(output_dir, model=task.policy)  # type: ignore[attr-defined]
    if trainer.is_global_zero:
        print(f"loss after {trainer.global_step} steps: {trainer.callback_metrics['loss']:.6f}")


if __name__ == "__main__":
    auto_cli(main)
