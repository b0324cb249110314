"""A model whose checkpoint has other names and shapes than its parameters, with every operation of a conversion."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import PretrainedConfig, PreTrainedModel, core_model_loading
from transformers.core_model_loading import (
    Chunk,
    Concatenate,
    Conv3dToLinear,
    ErnieFuseAndSplitTextVisionExperts,
    Interleave,
    MergeModulelist,
    PermuteForRope,
    Transpose,
    WeightConverter,
    WeightRenaming,
    WeightTransform,
)

all_operations = pytest.mark.skipif(
    not hasattr(core_model_loading, "Split"), reason="the operations are those of transformers 5.20 and later"
)


class ConvertedConfig(PretrainedConfig):
    """Of a model whose checkpoints are converted in every way."""

    model_type = "autotp-converted"

    def __init__(self, num_attention_heads: int = 2, parts: int = 3, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.num_attention_heads = num_attention_heads
        self.parts = parts


class Converted(PreTrainedModel):
    """Parameters by the operations that make them from the checkpoint's tensors."""

    config_class = ConvertedConfig

    def __init__(self, config: ConvertedConfig) -> None:
        super().__init__(config)
        shapes: dict[str, tuple[int, ...]] = {
            "experts_in": (4, 12, 8), "experts_out": (4, 8, 6), "last": (6, 8, 4), "gate": (6, 8), "up": (6, 8),
            "q_proj": (12, 8), "k_proj": (12, 8), "v_proj": (12, 8), "turned": (3, 4, 5),
            "as_it_is": (3, 5, 4), "table": (7, 4), "long": (9, 4), "short": (3, 4), "patches": (6, 16),
            "text": (2, 6, 8), "vision": (2, 6, 8),
            "rotary": (12,), "embedding": (11, 4),
        }  # fmt: skip
        for name, shape in shapes.items():
            self.register_parameter(name, nn.Parameter(torch.randn(shape)))
        self.post_init()

    def _init_weights(self, module: nn.Module) -> None:
        """Nothing to do: every tensor comes from the checkpoint."""


def conversions() -> list[WeightTransform]:
    return [
        WeightRenaming("old_embedding", "embedding"),
        WeightConverter(["experts.*.w1", "experts.*.w3"], "experts_in", [MergeModulelist(dim=0), Concatenate(dim=1)]),
        WeightConverter("experts.*.w2", "experts_out", [MergeModulelist(dim=0)]),
        WeightConverter("layers.*.w", "last", [MergeModulelist(dim=2)]),
        WeightConverter("fused", ["gate", "up"], [Interleave(dim=0), Chunk(dim=0)]),
        WeightConverter(
            "qkv",
            ["q_proj", "k_proj", "v_proj"],
            [Chunk(dim=0), PermuteForRope(permute_layer_names=["q_proj", "k_proj"])],
        ),
        WeightConverter("flipped", "turned", [Transpose(1, 2, check_dims=True)]),
        WeightConverter("straight", "as_it_is", [Transpose(1, 2, check_dims=True)]),
        WeightConverter("shard_*.w", "table", [Concatenate(dim=0, num_shards_attribute="parts")]),
        WeightConverter("joined", ["long", "short"], [core_model_loading.Split(dim=0)]),
        WeightConverter("kernel", "patches", [Conv3dToLinear(in_channels=2, kernel_size=(2, 2, 2))]),
        WeightConverter(["mixed.*.a", "mixed.*.b"], ["text", "vision"], [ErnieFuseAndSplitTextVisionExperts()]),
        WeightConverter("bias", "rotary", [PermuteForRope()]),
    ]


def original_tensors() -> dict[str, Tensor]:
    shapes: dict[str, tuple[int, ...]] = {
        **{f"experts.{expert}.{w}": (6, 8) for expert in range(4) for w in ("w1", "w3")},
        **{f"experts.{expert}.w2": (8, 6) for expert in range(4)},
        **{f"layers.{layer}.w": (6, 8) for layer in range(4)},
        **{f"mixed.{expert}.{part}": (3, 8) for expert in range(4) for part in "ab"},
        "fused": (12, 8), "qkv": (36, 8), "flipped": (3, 5, 4), "straight": (3, 5, 4), "joined": (12, 4),
        "kernel": (6, 2, 2, 2, 2), "bias": (12,), "old_embedding": (11, 4),
        "shard_0.w": (3, 4), "shard_1.w": (3, 4), "shard_2.w": (1, 4),
    }  # fmt: skip
    generator = torch.Generator().manual_seed(0)
    return {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}
