"""Distillation: a smaller model learns the distributions of a larger one. Both are divided, and no logits are gathered.

python examples/distillation.py --devices 2 --max_steps 20
"""

from __future__ import annotations

from typing import Any

import lightning as L
import torch
from jsonargparse import auto_cli
from smollm2 import NAME, model_directory
from task import TextData
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM

import lightning_autotp  # noqa: F401  registers strategy="autotp"
from lightning_autotp.losses import kl_divergence


class Distillation(L.LightningModule):
    """A frozen teacher, and a student with the same sizes and half of its layers, which begins from random weights.

    Args:
        model: the teacher's Hub id or directory.
        learning_rate: AdamW's.
        temperature: divides the logits of both.
        top_k: so many of the teacher's likeliest words are told apart at each position; all of them by default.
    """

    def __init__(
        self, model: str = NAME, learning_rate: float = 1e-4, temperature: float = 2.0, top_k: int | None = None
    ) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.teacher: Any = None
        self.student: Any = None

    def configure_model(self) -> None:
        if self.teacher is None:
            directory = model_directory(self.hparams["model"])
            teacher = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
            self.teacher = teacher.eval().requires_grad_(False)
            config = AutoConfig.from_pretrained(directory)
            config.num_hidden_layers //= 2
            self.student = AutoModelForCausalLM.from_config(config, dtype=torch.float32).train()

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        with torch.no_grad():
            taught = self.teacher(input_ids=batch["input_ids"], use_cache=False).logits
        learned = self.student(input_ids=batch["input_ids"], use_cache=False).logits
        loss = self.divergence(learned, taught)
        self.log("loss", loss, prog_bar=True)
        return loss

    def divergence(self, learned: Tensor, taught: Tensor) -> Tensor:
        """How far the student is away, of logits ``[batch, seq, vocab]``, which are this rank's part but look whole."""
        temperature: float = self.hparams["temperature"]
        each = kl_divergence(learned / temperature, taught / temperature, top_k=self.hparams["top_k"])
        # The gradient of softened distributions is smaller by the square of the temperature (Hinton et al. 2015).
        return each.mean() * temperature**2

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.student.parameters(), lr=self.hparams["learning_rate"])


def main(
    model: str = NAME,
    text: str | None = None,
    output_dir: str = "runs/distillation",
    devices: int = 2,
    max_steps: int = 20,
    learning_rate: float = 1e-4,
    temperature: float = 2.0,
    top_k: int | None = None,
    sequence_length: int = 256,
    batch_size: int = 4,
) -> None:
    """Teach a model of half as many layers what a model knows.

    Args:
        model: the teacher's Hub id or directory; "smollm2" is the SmolLM2-135M-Instruct that comes from a package.
        text: a text file; by default the Python reference manual.
        output_dir: where the Hugging Face directory of the student goes.
        devices: number of processes.
        max_steps: optimizer steps.
        learning_rate: AdamW's.
        temperature: divides the logits of both models.
        top_k: so many of the teacher's likeliest words are told apart; all of them by default.
        sequence_length: tokens in a block.
        batch_size: blocks in a batch.
    """
    task = Distillation(model, learning_rate, temperature, top_k)
    distil(task, TextData(model, text, sequence_length, batch_size), output_dir, devices, max_steps)


def distil(task: Distillation, data: TextData, output_dir: str, devices: int, max_steps: int) -> None:
    """Train the student, and save it as a Hugging Face directory."""
    L.seed_everything(0)
    trainer = L.Trainer(
        strategy="autotp", devices=devices, max_steps=max_steps, max_epochs=-1, enable_checkpointing=False, logger=False
    )
    trainer.fit(task, data)
    trainer.strategy.save_pretrained(output_dir, model=task.student)  # type: ignore[attr-defined]
    if trainer.is_global_zero:
        print(f"loss after {trainer.global_step} steps: {trainer.callback_metrics['loss']:.6f}")


if __name__ == "__main__":
    auto_cli(main)
