"""Modules that generate text, and their prompts."""

from __future__ import annotations

import warnings
from typing import Any

import lightning as L
import torch
from tiny import tiny_config
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSeq2SeqLM
from wire import Wire

VOCAB, ROWS, NEW, BEAMS = 131, 2, 6, 3

HEAD = 16

ONE_LAYER: dict[str, Any] = {"num_hidden_layers": 1}

GPT2 = ONE_LAYER | {"n_embd": 64, "n_head": 4, "attn_pdrop": 0.0, "resid_pdrop": 0.0, "embd_pdrop": 0.0}

T5 = {"d_model": 64, "d_kv": HEAD, "d_ff": 96, "num_layers": 1, "num_heads": 4, "dropout_rate": 0.0}

BART = {
    **dict.fromkeys(("encoder_layers", "decoder_layers"), 1),
    **dict.fromkeys(("encoder_attention_heads", "decoder_attention_heads"), 4),
    **dict.fromkeys(("encoder_ffn_dim", "decoder_ffn_dim"), 96),
    **{"d_model": 64, "dropout": 0.0, "max_position_embeddings": 64, "forced_eos_token_id": None},
}

TOKENS = {"vocab_size": VOCAB, "pad_token_id": 0, "eos_token_id": 2, "decoder_start_token_id": 2}

MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", ONE_LAYER),
    "one key/value head": ("llama", ONE_LAYER | {"num_key_value_heads": 1}),
    "three units": ("llama", ONE_LAYER | {"hidden_size": 96, "num_attention_heads": 6, "num_key_value_heads": 3}),
    "fused projection": ("gpt2", GPT2),
    "experts": ("mixtral", ONE_LAYER | {"num_local_experts": 4, "intermediate_size": 96}),
    "linear attention": ("qwen3_next", {}),
    "latent attention": ("deepseek_v3", ONE_LAYER),
    "encoder-decoder": ("bart", BART | TOKENS),
    "cross-attention from a cache": ("t5", T5 | TOKENS),
}

LINEAR: dict[str, Any] = {
    "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": HEAD, "linear_value_head_dim": 8,
    "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 48, "shared_expert_intermediate_size": 48,
    "layer_types": ["linear_attention", "full_attention"],
}  # fmt: skip

LATENT: dict[str, Any] = {
    "num_key_value_heads": 4, "head_dim": 8, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": HEAD,
    "q_lora_rank": 16, "kv_lora_rank": 16, "n_routed_experts": 8, "n_group": 2, "topk_group": 1,
    "num_experts_per_tok": 2, "moe_intermediate_size": 32, "first_k_dense_replace": 0,
}  # fmt: skip

OF_FAMILY = {"qwen3_next": LINEAR, "deepseek_v3": LATENT}

WAYS: dict[str, dict[str, Any]] = {
    "greedy": {"do_sample": False},
    "static cache": {"do_sample": False, "cache_implementation": "static", "attention_mask": None},
    "no cache": {"do_sample": False, "use_cache": False},
    "sampling": {"do_sample": True, "temperature": 1.5, "top_k": 40, "top_p": 0.95},
    "beams": {"do_sample": False, "num_beams": BEAMS},
    "penalties": {"do_sample": False, "repetition_penalty": 1.4, "no_repeat_ngram_size": 2},
}


class Writer(L.LightningModule):
    """Generates in some ways, at first in every one, and keeps what came out of it."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.name = name
        self.ways = [*WAYS]
        self.seen: dict[str, Any] = {"losses": []}

    def configure_model(self) -> None:
        if hasattr(self, "model"):
            return
        family, changes = MODELS[self.name]
        if family in ("bart", "t5"):
            self.model = AutoModelForSeq2SeqLM.from_config(AutoConfig.for_model(family, **changes))
        else:
            config = tiny_config(family, **changes, **OF_FAMILY.get(family, {}))
            self.model = AutoModelForCausalLM.from_config(config)
        if family != "t5":  # away from logits that are nearly alike; T5's own weights are large
            with torch.no_grad():
                for parameter in self.model.parameters():
                    parameter.mul_(4)

    def generate(self, batch: dict[str, Tensor], **how: Any) -> Any:
        inputs = {"input_ids": batch["input_ids"], "attention_mask": batch["attention_mask"]}
        options = {"max_new_tokens": NEW, "min_new_tokens": NEW, "return_dict_in_generate": True}
        return self.model.generate(**{**inputs, **options, **how}, output_logits=True)

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        loss: Tensor = self.model(**batch).loss
        self.seen["losses"].append(loss.item())
        return loss

    def validation_step(self, batch: dict[str, Tensor], batch_idx: int) -> None:
        torch.manual_seed(9)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            for way in self.ways:
                with Wire() as wire:
                    output = self.generate(batch, **WAYS[way])
                self.seen[way] = {
                    "tokens": output.sequences.clone(),
                    "logits": torch.stack(output.logits).clone(),
                    "cache": cache_shapes(output.past_key_values),
                    "gathered": (wire.calls["all_gather"], wire.bytes["all_gather"]),
                }
        said = [str(warning.message) for warning in caught]
        self.seen["warnings"] = [text for text in said if "vocabulary" in text]

    def predict_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        tokens: Tensor = self.generate(batch).sequences
        return tokens

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.05)


def cache_shapes(cache: Any) -> list[tuple[int, ...]]:
    """Shapes of the keys and values that a rank keeps, layer by layer."""
    if cache is None:
        return []
    parts = [getattr(cache, name) for name in ("self_attention_cache", "cross_attention_cache") if hasattr(cache, name)]
    layers = [layer for part in parts or [cache] for layer in part.layers if hasattr(layer, "keys")]
    return [tuple(tensor.shape) for layer in layers for tensor in (layer.keys, layer.values)]


def rows(vocabulary: int) -> list[dict[str, Tensor]]:
    """Prompts of nine tokens, the first one padded on the left."""
    generator = torch.Generator().manual_seed(2)
    ids = torch.randint(3, vocabulary, (ROWS, 9), generator=generator)
    mask = torch.ones_like(ids)
    ids[0, :3], mask[0, :3] = 0, 0
    return [
        {"input_ids": row, "attention_mask": seen, "labels": row.masked_fill(seen == 0, -100)}
        for row, seen in zip(ids, mask, strict=True)
    ]
