"""Checkpoints that were exported, and what is in their files."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from tiny import tiny_model
from torch import nn
from transformers import (
    PretrainedConfig,
    PreTrainedModel,
)

from lightning_autotp.checkpoints.checksums import CHECKSUMS

MB = 2**20


def contents(directory: Path) -> dict[str, bytes]:
    """Every file below a directory, but for the checksums of them all."""
    files = [file for file in directory.rglob("*") if file.is_file() and file.name != CHECKSUMS]
    return {str(file.relative_to(directory)): file.read_bytes() for file in files}


def assert_same_files(found: Path, wanted: Path) -> None:
    ours, theirs = contents(found), contents(wanted)
    assert ours.keys() == theirs.keys()
    for name in theirs:
        assert ours[name] == theirs[name], name


def weights(directory: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in directory.glob("*.safetensors")}


class OddConfig(PretrainedConfig):
    """Of a model with every kind of tensor."""

    model_type = "autotp-odd"


class Odd(PreTrainedModel):
    """Parameters and buffers of many dtypes, without dims, without elements, uneven."""

    config_class = OddConfig
    _keys_to_ignore_on_save = ["ignored"]  # noqa: RUF012

    def __init__(self, config: OddConfig) -> None:
        super().__init__(config)
        torch.manual_seed(3)
        self.rows = nn.Parameter(torch.randn(7, 4))
        self.columns = nn.Parameter(torch.randn(3, 5).bfloat16())
        self.scalar = nn.Parameter(torch.randn(()))
        self.empty = nn.Parameter(torch.randn(0, 3))
        self.few = nn.Parameter(torch.randn(1, 6).half())
        self.quantized = nn.Parameter(torch.randn(6, 4).to(torch.float8_e4m3fn), requires_grad=False)
        self.register_buffer("mask", torch.rand(5) > 0.5)
        self.register_buffer("steps", torch.tensor(17))
        self.register_buffer("ignored", torch.ones(2))
        self.register_buffer("cache", torch.ones(2), persistent=False)
        self.post_init()

    def _init_weights(self, module: nn.Module) -> None:
        """Nothing to do: every tensor comes from the checkpoint."""


def tiny_llama(tied: bool) -> Any:
    model = tiny_model("llama", tie_word_embeddings=tied)
    model.generation_config.max_new_tokens = 23
    return model


def message(call: Callable[..., Any], *args: Any, **kwargs: Any) -> str:
    try:
        call(*args, **kwargs)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "no error"


def write_tokenizer(directory: Path) -> None:
    """A tokenizer's files as they lie beside a model, and some that are not a tokenizer's."""
    directory.mkdir()
    letters = {chr(97 + number): number for number in range(20)} | {"<|endoftext|>": 20}
    (directory / "vocab.json").write_text(json.dumps(letters))
    (directory / "merges.txt").write_text("#version: 0.2\n")
    (directory / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "GPT2Tokenizer"}))
    (directory / "chat_template.jinja").write_text("{{ messages }}")
    (directory / "additional_chat_templates").mkdir()
    (directory / "additional_chat_templates" / "rag.jinja").write_text("{{ documents }}")
    for other in ("README.md", "pytorch_model.bin", "optimizer.pt"):
        (directory / other).write_text("not copied")


TOKENIZER = {"vocab.json", "merges.txt", "tokenizer_config.json", "chat_template.jinja", "additional_chat_templates"}
