"""The models and batches that everything is measured on."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from transformers import AutoConfig, PreTrainedConfig


@dataclass(frozen=True)
class Case:
    """A model and a batch.

    Attributes:
        family: its model type.
        sizes: the fields of its config.
        rows: sequences in a batch.
        length: tokens in each.
    """

    family: str
    sizes: Mapping[str, Any] = field(default_factory=dict)
    rows: int = 4
    length: int = 256

    def config(self) -> PreTrainedConfig:
        """The model's config, without dropout and with the attention of torch."""
        return AutoConfig.for_model(self.family, attn_implementation="sdpa", use_cache=False, **self.sizes)

    def tokens(self, device: torch.device) -> Tensor:
        """The batch, ``[rows, length]``, the same on every rank."""
        generator = torch.Generator().manual_seed(1)
        return torch.randint(3, self.sizes["vocab_size"], (self.rows, self.length), generator=generator).to(device)


WIDTH = {
    "hidden_size": 512,
    "intermediate_size": 1536,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 64,
    "vocab_size": 8192,
}
TINY = "a tiny Llama"
"""The case that measures nothing, but shows whether everything runs."""
EXPERTS = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 384}
CASES = {
    TINY: Case(
        "llama",
        {**WIDTH, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 1, "vocab_size": 512},
        2,
        16,
    ),
    "Llama, 4 layers of width 512": Case("llama", WIDTH),
    "the same with 128,256 words": Case("llama", {**WIDTH, "vocab_size": 128_256}),
    "Mixtral, 4 layers, 8 experts": Case(
        "mixtral", {**WIDTH, "intermediate_size": 384, "num_local_experts": 8, "num_experts_per_tok": 2}
    ),
    "Qwen3-Next, 4 layers, 8 experts": Case(
        "qwen3_next",
        {
            **WIDTH,
            **EXPERTS,
            "shared_expert_intermediate_size": 384,
            "linear_num_key_heads": 4,
            "linear_num_value_heads": 8,
            "linear_key_head_dim": 64,
            "linear_value_head_dim": 64,
        },
    ),
}
