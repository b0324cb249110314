"""Pretrained models in files, and rewritten ones."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from deferred_models import CONFIGS
from safetensors.torch import load_file, save_file
from transformers import (
    AutoModelForCausalLM,
)


def save(family: str, directory: Path, **changes: Any) -> Path:
    torch.manual_seed(0)
    config = copy.deepcopy(CONFIGS[family])
    for name, value in changes.items():
        setattr(config, name, value)
    model = AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.01)  # no ones and zeros
    model.save_pretrained(directory, max_shard_size="30KB")
    assert len(list(directory.glob("*.safetensors"))) > 1
    return directory


def merged(directory: Path) -> dict[str, torch.Tensor]:
    return {name: value for file in sorted(directory.glob("*.safetensors")) for name, value in load_file(file).items()}


def rewritten(directory: Path, target: Path, change: Callable[[dict[str, torch.Tensor]], Any]) -> Path:
    """A copy of a checkpoint in one file, after ``change``."""
    tensors = merged(directory)
    change(tensors)
    target.mkdir(exist_ok=True)
    save_file(tensors, target / "model.safetensors", metadata={"format": "pt"})
    (target / "config.json").write_bytes((directory / "config.json").read_bytes())
    return target
