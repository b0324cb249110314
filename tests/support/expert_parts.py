"""Parts of models with merged experts, cut by hand, and read from files."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from loading import localize
from local_model import sections, shared
from transformers import (
    AutoModelForCausalLM,
    FineGrainedFP8Config,
    Mxfp4Config,
    PreTrainedModel,
)

from lightning_autotp.layouts.ownership import Ownership
from lightning_autotp.layouts.types import Invariant, Layout, Shard
from lightning_autotp.loading.parameters import load_parameters
from lightning_autotp.pretrained.meta_model import meta_model

DEQUANTIZED: dict[str, dict[str, Any]] = {
    "gpt_oss mxfp4": {"quantization_config": Mxfp4Config(dequantize=True)},
    "qwen3_moe fp8": {"quantization_config": FineGrainedFP8Config(dequantize=True, weight_block_size=(8, 8))},
}


def fused_rows(shape: tuple[int, ...], ranks: int) -> Layout:
    """The next-to-last dim in two sections, each sharded unevenly."""
    dim = len(shape) - 2
    if dim < 0:
        return Invariant()
    return Shard(((dim, sections([shape[dim] // 2, shape[dim] - shape[dim] // 2], ranks)),))


def grid(shape: tuple[int, ...], ranks: int) -> Layout:
    """Two sharded dims: pairs of neighbours share their half of the first one, and divide the last one."""
    if len(shape) < 2 or shape[0] % 2 or ranks % 2:
        return Invariant()
    halves = Ownership.even(shape[-1], 2).held
    rows = shared(2, shape[0] // 2, ranks)
    return Shard(((0, rows), (len(shape) - 1, Ownership(shape[-1], tuple(halves[rank % 2] for rank in range(ranks))))))


def load_whole(directory: Path) -> PreTrainedModel:
    return AutoModelForCausalLM.from_pretrained(directory, **DEQUANTIZED.get(directory.name, {}))


def load_part(directory: Path, rank: int, ranks: int, layout: Callable[[tuple[int, ...], int], Layout]) -> Any:
    with meta_model():
        model = load_whole(directory)
    localize(model, rank, ranks, layout)
    load_parameters(model)
    return model
