"""Pre-training a small Llama from scratch, on bytes: no tokenizer, no weights, nothing to download.

python examples/pretrain.py --devices 2 --max_steps 200
"""

from __future__ import annotations

from pathlib import Path
from pydoc_data.topics import topics
from typing import Any

import lightning as L
import torch
from jsonargparse import auto_cli
from lightning.pytorch.callbacks import LearningRateMonitor, ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger
from torch import Tensor
from torch.utils.data import DataLoader
from transformers import AutoModelForCausalLM, LlamaConfig, get_cosine_schedule_with_warmup

import lightning_autotp  # noqa: F401  registers strategy="autotp"
from lightning_autotp.metrics import Perplexity

BYTES = 256


class Pretrain(L.LightningModule):
    """A Llama with random weights, the same that one process would draw.

    Args:
        hidden_size: of the model; a head has 32 elements, two query heads share a key/value head.
        layers: decoder layers.
        learning_rate: AdamW's, after the warm-up.
        max_steps: of the schedule.
    """

    def __init__(
        self, hidden_size: int = 256, layers: int = 6, learning_rate: float = 1e-3, max_steps: int = 200
    ) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.model: Any = None
        self.perplexity = Perplexity()

    def configure_model(self) -> None:
        if self.model is None:
            heads = self.hparams["hidden_size"] // 32
            config = LlamaConfig(
                vocab_size=BYTES,
                hidden_size=self.hparams["hidden_size"],
                intermediate_size=3 * self.hparams["hidden_size"],
                num_hidden_layers=self.hparams["layers"],
                num_attention_heads=heads,
                num_key_value_heads=max(1, heads // 2),
                bos_token_id=None,
                eos_token_id=None,
            )
            self.model = AutoModelForCausalLM.from_config(config)

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        loss: Tensor = self.model(input_ids=batch, labels=batch).loss
        self.log("loss", loss, prog_bar=True)
        return loss

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        logits = self.model(input_ids=batch).logits  # sharded over the vocabulary, and they stay so
        self.perplexity.update(logits[:, :-1], batch[:, 1:])
        self.log("perplexity", self.perplexity, prog_bar=True)

    def configure_optimizers(self) -> Any:
        matrices = [parameter for parameter in self.parameters() if parameter.dim() > 1]
        others = [parameter for parameter in self.parameters() if parameter.dim() <= 1]
        groups = [{"params": matrices, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]
        optimizer = torch.optim.AdamW(groups, lr=self.hparams["learning_rate"])
        steps: int = self.hparams["max_steps"]
        schedule = get_cosine_schedule_with_warmup(optimizer, steps // 10, steps)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


def loaders(text: str | None, length: int, batch_size: int) -> tuple[DataLoader[Tensor], DataLoader[Tensor]]:
    """Blocks of bytes to train on, and the last tenth of them to validate on."""
    written = "\n".join(topics[name] for name in sorted(topics)) if text is None else Path(text).read_text("utf-8")
    raw = torch.tensor(list(written.encode()))
    blocks: Any = raw[: len(raw) // length * length].view(-1, length)
    held_out = max(1, len(blocks) // 10)
    return (
        DataLoader(blocks[:-held_out], batch_size, shuffle=True, drop_last=True),
        DataLoader(blocks[-held_out:], batch_size),
    )


def main(
    text: str | None = None,
    output_dir: str = "runs/pretrain",
    devices: int = 2,
    max_steps: int = 200,
    hidden_size: int = 256,
    layers: int = 6,
    learning_rate: float = 1e-3,
    sequence_length: int = 256,
    batch_size: int = 8,
    ckpt_path: str | None = None,
) -> None:
    """Train a Llama on the bytes of a text.

    Args:
        text: a text file; by default the Python reference manual.
        output_dir: where checkpoints, losses and the Hugging Face directory go.
        devices: number of processes.
        max_steps: optimizer steps.
        hidden_size: of the model, a multiple of 32.
        layers: decoder layers.
        learning_rate: AdamW's.
        sequence_length: bytes in a block.
        batch_size: blocks in a batch.
        ckpt_path: a checkpoint to go on from, or "last".
    """
    L.seed_everything(0)
    trainer = L.Trainer(
        strategy="autotp",
        devices=devices,
        max_steps=max_steps,
        max_epochs=-1,
        gradient_clip_val=1.0,
        val_check_interval=max(1, max_steps // 4),
        check_val_every_n_epoch=None,
        log_every_n_steps=1,
        logger=CSVLogger(output_dir, name=None, version=""),
        callbacks=[ModelCheckpoint(output_dir, save_last=True), LearningRateMonitor("step")],
    )
    train, validate = loaders(text, sequence_length, batch_size)
    trainer.fit(Pretrain(hidden_size, layers, learning_rate, max_steps), train, validate, ckpt_path=ckpt_path)
    trainer.strategy.save_pretrained(f"{output_dir}/model")  # type: ignore[attr-defined]


if __name__ == "__main__":
    auto_cli(main)
