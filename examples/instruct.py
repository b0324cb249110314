"""Instruction tuning: the loss counts the answers only, batches are padded to their longest example.

python examples/instruct.py --devices 2 --max_steps 20
"""

from __future__ import annotations

import json
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any

import lightning as L
import torch
from jsonargparse import auto_cli
from smollm2 import NAME, model_directory
from task import Finetune
from torch import Tensor
from torch.utils.data import DataLoader
from transformers import AutoTokenizer

import lightning_autotp  # noqa: F401  registers strategy="autotp"

IGNORED = -100
PLAIN_TEMPLATE = (
    "{% for message in messages %}{{ message.role }}: {{ message.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)
"""For a tokenizer that has no chat template."""


class Instructions(L.LightningDataModule):
    """Questions and answers, as the model's chat template writes them.

    Args:
        model: whose tokenizer to use.
        path: JSON lines with ``question`` and ``answer``; by default questions about the Python language.
        max_length: tokens of an example; longer answers are cut.
        batch_size: examples in a batch.
    """

    def __init__(self, model: str = NAME, path: str | None = None, max_length: int = 256, batch_size: int = 4) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.examples: list[dict[str, list[int]]] = []
        self.padding = 0

    def setup(self, stage: str) -> None:
        path: str | None = self.hparams["path"]
        if path is None:
            pairs = [(f"What does the Python reference say about {name}?", topics[name]) for name in sorted(topics)]
        else:
            lines = [json.loads(line) for line in Path(path).read_text(encoding="utf-8").splitlines()]
            pairs = [(line["question"], line["answer"]) for line in lines]
        tokenizer = AutoTokenizer.from_pretrained(model_directory(self.hparams["model"]))
        tokenizer.chat_template = tokenizer.chat_template or PLAIN_TEMPLATE
        self.padding = tokenizer.pad_token_id if tokenizer.pad_token_id is not None else tokenizer.eos_token_id
        self.examples = [self.example(tokenizer, question, answer) for question, answer in pairs]

    def example(self, tokenizer: Any, question: str, answer: str) -> dict[str, list[int]]:
        """Token ids, and labels that leave the question out."""
        asked = [{"role": "user", "content": question}]
        answered = [*asked, {"role": "assistant", "content": answer}]
        prompt = tokenizer.apply_chat_template(asked, add_generation_prompt=True, tokenize=False)
        whole = tokenizer.apply_chat_template(answered, tokenize=False)
        # Apart, so that no token is half question and half answer.
        asked_ids, answer_ids = (
            tokenizer(part, add_special_tokens=False).input_ids for part in (prompt, whole.removeprefix(prompt))
        )
        length: int = self.hparams["max_length"]
        return {
            "input_ids": (asked_ids + answer_ids)[:length],
            "labels": ([IGNORED] * len(asked_ids) + answer_ids)[:length],
        }

    def collate(self, examples: list[dict[str, list[int]]]) -> dict[str, Tensor]:
        """Pad on the right: ``[batch, longest]``."""
        longest = max(len(example["input_ids"]) for example in examples)

        def padded(key: str, filler: int) -> Tensor:
            return torch.tensor([example[key] + [filler] * (longest - len(example[key])) for example in examples])

        lengths = torch.tensor([len(example["input_ids"]) for example in examples])
        return {
            "input_ids": padded("input_ids", self.padding),
            "labels": padded("labels", IGNORED),
            "attention_mask": (torch.arange(longest) < lengths[:, None]).long(),
        }

    def train_dataloader(self) -> DataLoader[Any]:
        examples: Any = self.examples
        return DataLoader(examples, self.hparams["batch_size"], shuffle=True, drop_last=True, collate_fn=self.collate)


def main(
    model: str = NAME,
    path: str | None = None,
    output_dir: str = "runs/instruct",
    devices: int = 2,
    max_steps: int = 20,
    learning_rate: float = 1e-4,
    max_length: int = 256,
    batch_size: int = 4,
) -> None:
    """Teach a model to answer.

    Args:
        model: Hub id or directory; "smollm2" is the SmolLM2-135M-Instruct that comes from a package.
        path: JSON lines with "question" and "answer"; by default questions about the Python language.
        output_dir: where the Hugging Face directory goes.
        devices: number of processes.
        max_steps: optimizer steps.
        learning_rate: AdamW's.
        max_length: tokens of an example.
        batch_size: examples in a batch.
    """
    L.seed_everything(0)
    trainer = L.Trainer(
        strategy="autotp", devices=devices, max_steps=max_steps, max_epochs=-1, enable_checkpointing=False, logger=False
    )
    trainer.fit(Finetune(model, learning_rate), Instructions(model, path, max_length, batch_size))
    trainer.strategy.save_pretrained(output_dir)  # type: ignore[attr-defined]


if __name__ == "__main__":
    auto_cli(main)
