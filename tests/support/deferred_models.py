"""Models to be built without memory, and how their parameters are tied."""

from __future__ import annotations

import os
from typing import Any

from distributed import SCRIPT_ENVIRONMENT
from torch import nn
from transformers import (
    Gemma2Config,
    Gemma3TextConfig,
    GPT2Config,
    GPTNeoXConfig,
    GraniteConfig,
    LlamaConfig,
    Mamba2Config,
    MixtralConfig,
    Olmo2Config,
    Phi3Config,
    PretrainedConfig,
    Qwen3Config,
    SmolLM3Config,
)

ENV = {**os.environ, **SCRIPT_ENVIRONMENT}

SIZES: dict[str, Any] = {
    "vocab_size": 101, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 64, "bos_token_id": 1, "eos_token_id": 2,
    "pad_token_id": 0,
}  # fmt: skip

CONFIGS: dict[str, PretrainedConfig] = {
    config.__name__.removesuffix("Config"): config(**SIZES)
    for config in (
        LlamaConfig, Qwen3Config, Gemma2Config, Gemma3TextConfig, Phi3Config, GPTNeoXConfig, Olmo2Config, SmolLM3Config,
        GraniteConfig, MixtralConfig,
    )
}  # fmt: skip

CONFIGS["GPT2"] = GPT2Config(vocab_size=101, n_embd=32, n_layer=2, n_head=4, bos_token_id=1, eos_token_id=2)

CONFIGS["Mamba2"] = Mamba2Config(
    vocab_size=101, hidden_size=32, num_hidden_layers=2, num_heads=4, head_dim=16, n_groups=1, pad_token_id=0,
    bos_token_id=1, eos_token_id=2,
)  # fmt: skip


def named(model: nn.Module) -> dict[str, nn.Parameter]:
    return dict(model.named_parameters(remove_duplicate=False))


def ties(model: nn.Module) -> set[tuple[str, ...]]:
    parameters = named(model)
    return {tuple(name for name in parameters if parameters[name] is one) for one in parameters.values()}
