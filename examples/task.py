"""What is trained on what: an ordinary LightningModule and an ordinary LightningDataModule. Neither knows of ranks."""

from __future__ import annotations

from pathlib import Path
from pydoc_data.topics import topics
from typing import Any

import lightning as L
import torch
from smollm2 import NAME, model_directory
from torch import Tensor
from torch.utils.data import DataLoader
from transformers import AutoModelForCausalLM, AutoTokenizer


class Finetune(L.LightningModule):
    """Fine-tunes a causal language model on all its parameters.

    Args:
        model: Hub id or directory; ``"smollm2"`` is the SmolLM2-135M-Instruct that comes from a package.
        learning_rate: AdamW's.
    """

    def __init__(self, model: str = NAME, learning_rate: float = 1e-4) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.model: Any = None

    def configure_model(self) -> None:
        if self.model is None:  # Lightning calls this again for every fit, validate or test
            directory = model_directory(self.hparams["model"])
            self.model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).train()

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        loss: Tensor = self.model(**batch).loss
        self.log("loss", loss, prog_bar=True)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=self.hparams["learning_rate"])


class TextData(L.LightningDataModule):
    """Text, tokenized and packed into blocks of one length; the blocks' order depends on the seed alone.

    Args:
        model: whose tokenizer to use.
        text: a text file; by default the Python reference manual as the standard library carries it.
        sequence_length: tokens in a block.
        batch_size: blocks in a batch.
        seed: draws the order of the blocks.
    """

    def __init__(
        self,
        model: str = NAME,
        text: str | None = None,
        sequence_length: int = 256,
        batch_size: int = 4,
        seed: int = 0,
    ) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.blocks: list[dict[str, Tensor]] = []

    def setup(self, stage: str) -> None:
        text: str | None = self.hparams["text"]
        length: int = self.hparams["sequence_length"]
        manual = [topics[name] for name in sorted(topics)]
        documents = manual if text is None else [Path(text).read_text(encoding="utf-8")]
        tokenizer = AutoTokenizer.from_pretrained(model_directory(self.hparams["model"]))
        end = [] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id]
        tokens: list[int] = []
        for document in documents:
            tokens += tokenizer(document, add_special_tokens=False, verbose=False).input_ids + end
        count = len(tokens) // length
        if count < self.hparams["batch_size"]:
            raise ValueError(
                f"the text has {len(tokens)} tokens, which is less than one batch of {self.hparams['batch_size']} "
                f"blocks of {length}: give a longer text, a smaller batch size or a shorter sequence length"
            )
        packed = torch.tensor(tokens[: count * length]).view(count, length)
        order = torch.randperm(count, generator=torch.Generator().manual_seed(self.hparams["seed"]))
        self.blocks = [{"input_ids": block, "labels": block} for block in packed[order]]

    def train_dataloader(self) -> DataLoader[dict[str, Tensor]]:
        blocks: Any = self.blocks  # a list serves as a dataset
        return DataLoader(blocks, self.hparams["batch_size"], drop_last=True)
