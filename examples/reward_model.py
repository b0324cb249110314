"""A reward model: it learns to give preferred answers a higher score than others.

python examples/reward_model.py --devices 2 --max_steps 20

The loss is that of Bradley and Terry 1952, as Ouyang et al. 2022 use it ("Training language models to follow
instructions with human feedback").
"""

from __future__ import annotations

from typing import Any

import lightning as L
import torch
from dpo import Pairs
from jsonargparse import auto_cli
from smollm2 import NAME, model_directory
from torch import Tensor
from torch.nn import functional as F
from transformers import AutoModelForSequenceClassification

import lightning_autotp  # noqa: F401  registers strategy="autotp"


class RewardModel(L.LightningModule):
    """A language model with one number at its last token in place of the next token's logits.

    Args:
        model: Hub id or directory of a language model; the new head begins from random weights.
        learning_rate: AdamW's.
    """

    def __init__(self, model: str = NAME, learning_rate: float = 1e-5) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.model: Any = None

    def configure_model(self) -> None:
        if self.model is None:
            directory = model_directory(self.hparams["model"])
            model = AutoModelForSequenceClassification.from_pretrained(directory, num_labels=1, dtype=torch.float32)
            model.config.pad_token_id = 0  # padding is told by the attention mask; the head looks for it here
            self.model = model.train()

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        ids = batch["input_ids"].masked_fill(batch["attention_mask"] == 0, self.model.config.pad_token_id)
        scores = self.model(input_ids=ids, attention_mask=batch["attention_mask"], use_cache=False).logits.squeeze(-1)
        preferred, other = scores.chunk(2)
        loss = -F.logsigmoid(preferred - other).mean()
        self.log("loss", loss, prog_bar=True)
        self.log("right", (preferred > other).float().mean(), prog_bar=True)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=self.hparams["learning_rate"])


def main(
    model: str = NAME,
    path: str | None = None,
    output_dir: str = "runs/reward_model",
    devices: int = 2,
    max_steps: int = 20,
    learning_rate: float = 1e-5,
    max_length: int = 256,
    batch_size: int = 2,
) -> None:
    """Teach a model to tell right answers from others.

    Args:
        model: Hub id or directory; "smollm2" is the SmolLM2-135M-Instruct that comes from a package.
        path: JSON lines with "question" and "answer"; by default questions about the Python language.
        output_dir: where the Hugging Face directory goes.
        devices: number of processes.
        max_steps: optimizer steps.
        learning_rate: AdamW's.
        max_length: tokens of a question and its answer.
        batch_size: pairs in a batch.
    """
    L.seed_everything(0)
    trainer = L.Trainer(
        strategy="autotp", devices=devices, max_steps=max_steps, max_epochs=-1, enable_checkpointing=False, logger=False
    )
    trainer.fit(RewardModel(model, learning_rate), Pairs(model, path, max_length, batch_size))
    trainer.strategy.save_pretrained(output_dir)  # type: ignore[attr-defined]
    if trainer.is_global_zero:
        print(f"loss after {trainer.global_step} steps: {trainer.callback_metrics['loss']:.6f}")


if __name__ == "__main__":
    auto_cli(main)
