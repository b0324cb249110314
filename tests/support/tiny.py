"""Tiny models that tests share: Hugging Face architectures from small configs, and plain modules."""

from __future__ import annotations

import random
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

FAMILIES = (
    "llama",
    "qwen2",
    "qwen3",
    "mistral",
    "gemma2",
    "gemma3_text",
    "olmo2",
    "phi3",
    "smollm3",
    "granite",
    "gpt_neox",
)


def tiny_config(family: str, **changes: Any) -> Any:
    """A config of two small layers: 4 query and 2 key/value heads of 16, a prime vocabulary."""
    sizes: dict[str, Any] = {
        "hidden_size": 64,
        "intermediate_size": 112,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "vocab_size": 131,
        "pad_token_id": 0,
        "bos_token_id": 1,
        "eos_token_id": 2,
    }
    return AutoConfig.for_model(family, **(sizes | changes))


def tiny_model(family: str, seed: int = 0, **changes: Any) -> PreTrainedModel:
    """A real model with the weights that this seed gives."""
    torch.manual_seed(seed)
    return AutoModelForCausalLM.from_config(tiny_config(family, **changes))


def meta_model(family: str, **changes: Any) -> PreTrainedModel:
    """The model without weights."""
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(tiny_config(family, **changes))


def token_batch(seed: int, batch: int = 2, length: int = 17, vocabulary: int = 131) -> dict[str, Tensor]:
    """Random ids and labels, some of them ignored."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(3, vocabulary, (batch, length), generator=generator)
    labels = ids.clone()
    labels[0, : length // 3] = -100
    return {"input_ids": ids, "labels": labels}


ROLES = ("q", "k", "v", "o", "gate", "up", "down")


class Decoder(nn.Module):
    """A plain decoder whose layers may carry any names; returns the loss."""

    def __init__(
        self, names: dict[str, str] | None = None, heads: int = 4, width: int = 8, vocabulary: int = 61
    ) -> None:
        super().__init__()
        self.names = names or {role: role for role in ROLES}
        self.heads, hidden, inner = heads, heads * width, 48
        self.table = nn.Embedding(vocabulary, hidden)
        shapes = dict.fromkeys("qkvo", (hidden, hidden)) | {
            "gate": (hidden, inner),
            "up": (hidden, inner),
            "down": (inner, hidden),
        }
        for role, (inputs, outputs) in shapes.items():
            self.add_module(self.names[role], nn.Linear(inputs, outputs, bias=False))
        self.norm = nn.LayerNorm(hidden)
        self.second_norm = nn.LayerNorm(hidden)
        self.classes = nn.Linear(hidden, vocabulary, bias=False)

    def layer(self, role: str) -> nn.Module:
        return self.get_submodule(self.names[role])

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        x = self.table(ids)
        h = self.norm(x)
        q, k, v = (self.layer(role)(h).unflatten(-1, (-1, 8)).transpose(1, 2) for role in "qkv")
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)
        x = x + self.layer("o")(attended)
        h = self.second_norm(x)
        x = x + self.layer("down")(F.silu(self.layer("gate")(h)) * self.layer("up")(h))
        return F.cross_entropy(self.classes(x).flatten(0, 1), labels.flatten())


def shuffled_names(seed: int) -> dict[str, str]:
    """Every role under another role's name."""
    names = list(ROLES)
    random.Random(seed).shuffle(names)
    return dict(zip(ROLES, names, strict=True))


def decoder_batch() -> tuple[Tensor, Tensor]:
    return torch.zeros(3, 7, dtype=torch.long), torch.zeros(3, 7, dtype=torch.long)


class AttentionBesideMLP(nn.Module):
    """Attention and an MLP of one input, from one matrix, as in PaLM (Chowdhery et al. 2022).

    Args:
        keys: number of key heads, for four query heads.
    """

    def __init__(self, keys: int = 1) -> None:
        super().__init__()
        self.keys = keys
        self.fused = nn.Linear(64, 64 + 2 * 16 * keys + 256, bias=False)
        self.attended, self.down = nn.Linear(64, 64, bias=False), nn.Linear(256, 64, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v, inner = self.fused(x).split((64, 16 * self.keys, 16 * self.keys, 256), -1)
        q, k, v = (part.unflatten(-1, (-1, 16)).transpose(1, 2) for part in (q, k, v))
        if self.keys == 1:
            k, v = k.expand(-1, 4, -1, -1), v.expand(-1, 4, -1, -1)
        attended = F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)
        return x + self.attended(attended) + self.down(inner.relu())
