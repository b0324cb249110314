"""Models that are called in other ways than they were planned for."""

from __future__ import annotations

from typing import Any

import torch
from mixture_configs import MIXTURES, SIZES
from tiny import tiny_config
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from lightning_autotp import full_gradients

OTHER_MIXTURES: dict[str, dict[str, Any]] = {
    "olmoe": {"num_experts": 4, "num_experts_per_tok": 2},
    "qwen2_moe": {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24},
}

NO_DROPOUT = {"resid_pdrop": 0, "embd_pdrop": 0, "attn_pdrop": 0}


def made(family: str, layers: int = 1) -> PreTrainedModel:
    """A small model; attention maps can be returned."""
    torch.manual_seed(0)
    sizes = {"num_hidden_layers": layers}
    if family in MIXTURES | OTHER_MIXTURES:
        config = AutoConfig.for_model(family, **(SIZES | (MIXTURES | OTHER_MIXTURES)[family] | sizes))
    else:
        config = tiny_config(family, **sizes, **(NO_DROPOUT if family == "gpt2" else {}))
    return AutoModelForCausalLM.from_config(config, attn_implementation="eager")  # type: ignore[no-any-return]


IDS = torch.randint(3, 100, (2, 9), generator=torch.Generator().manual_seed(1))


def worst(model: nn.Module, reference: nn.Module) -> float:
    """The largest relative difference of a gradient."""
    ours = full_gradients(model)
    return max(
        float((ours[name] - p.grad).norm() / (p.grad.norm() + 1e-6))
        for name, p in reference.named_parameters()
        if p.grad is not None
    )
