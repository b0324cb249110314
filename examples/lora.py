"""LoRA fine-tuning with PEFT: only the adapters are trained, and only they are saved.

python examples/lora.py --devices 2 --max_steps 20
"""

from __future__ import annotations

from typing import Any

import lightning as L
import torch
from jsonargparse import auto_cli
from peft import LoraConfig, get_peft_model
from smollm2 import NAME, model_directory
from task import Finetune, TextData
from transformers import AutoModelForCausalLM

import lightning_autotp  # noqa: F401  registers strategy="autotp"


class FinetuneAdapters(Finetune):
    """As :class:`~task.Finetune`, with an adapter beside every linear layer of the frozen model."""

    def configure_model(self) -> None:
        if self.model is None:
            base: Any = AutoModelForCausalLM.from_pretrained(
                model_directory(self.hparams["model"]), dtype=torch.float32
            )
            self.model = get_peft_model(base.train(), LoraConfig(r=8, target_modules="all-linear"))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        adapters = [parameter for parameter in self.parameters() if parameter.requires_grad]
        return torch.optim.AdamW(adapters, lr=self.hparams["learning_rate"])


def main(
    model: str = NAME,
    text: str | None = None,
    output_dir: str = "runs/lora",
    devices: int = 2,
    max_steps: int = 20,
    learning_rate: float = 1e-3,
    sequence_length: int = 256,
    batch_size: int = 4,
) -> None:
    """Train adapters for a model on a text.

    Args:
        model: Hub id or directory; "smollm2" is the SmolLM2-135M-Instruct that comes from a package.
        text: a text file; by default the Python reference manual.
        output_dir: where the adapter goes, as ``PeftModel.from_pretrained(base, output_dir)`` takes it.
        devices: number of processes.
        max_steps: optimizer steps.
        learning_rate: AdamW's.
        sequence_length: tokens in a block.
        batch_size: blocks in a batch.
    """
    L.seed_everything(0)
    trainer = L.Trainer(
        strategy="autotp", devices=devices, max_steps=max_steps, max_epochs=-1, enable_checkpointing=False, logger=False
    )
    trainer.fit(FinetuneAdapters(model, learning_rate), TextData(model, text, sequence_length, batch_size))
    trainer.strategy.save_pretrained(output_dir)  # type: ignore[attr-defined]


if __name__ == "__main__":
    auto_cli(main)
