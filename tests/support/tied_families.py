"""Models of several families whose layers are tied or resized, for tests of changes after dividing."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tiny import tiny_model, token_batch
from torch import Tensor
from torch.nn import functional as F

from lightning_autotp import full_gradients

FAMILIES: dict[str, dict[str, Any]] = {
    # Its norms compute in fp32 whatever their weights are.
    "llama": {"num_attention_heads": 6, "num_key_value_heads": 3, "hidden_size": 96},
    "gpt2": {"n_embd": 48, "n_head": 6, "n_layer": 2, "resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0},
    # The ranks share its one key/value head, and sum the gradients of the norms over their heads.
    "phi": {
        "num_attention_heads": 6, "num_key_value_heads": 1, "hidden_size": 96, "tie_word_embeddings": True,
        "qk_layernorm": True, "head_dim": 16,
    },
}  # fmt: skip

CLOSE = {"llama": 1e-5, "gpt2": 1e-10, "phi": 1e-10}

IDS = token_batch(3)["input_ids"]


def model_of(family: str) -> Any:
    return tiny_model(family, seed=5, **FAMILIES[family]).double().train()


def loss_of(model: Any, call: Callable[..., Any] | None = None) -> Tensor:
    # A model's own loss is of fp32 logits.
    logits = (call or model)(input_ids=IDS, use_cache=False).logits
    return F.cross_entropy(logits.flatten(0, 1), IDS.flatten())


def layers(model: Any) -> Any:
    return model.transformer.h if hasattr(model, "transformer") else model.model.layers


def up(model: Any) -> Any:
    """A layer whose matrix is cut."""
    mlp = layers(model)[0].mlp
    return next(getattr(mlp, name) for name in ("up_proj", "fc1", "c_fc") if hasattr(mlp, name))


def gradients_of(model: Any, parallel: bool) -> dict[str, Tensor]:
    if parallel:
        return full_gradients(model)
    named = model.named_parameters(remove_duplicate=False)
    return {name: parameter.grad.clone() for name, parameter in named if parameter.grad is not None}
