"""LitGPT's kinds of GPT."""

from __future__ import annotations

from typing import Any

from litgpt.config import Config
from litgpt.model import GPT
from torch import nn

from zoo.packages.entry import HEADS, HIDDEN, VOCABULARY, Entry, next_token, tokens


def _gpt(**kind: Any) -> nn.Module:
    sizes = {"block_size": 64, "n_layer": 2, "n_embd": HIDDEN, "n_head": HEADS, "padded_vocab_size": VOCABULARY}
    return GPT(Config(**(sizes | kind)))


_LLAMA: dict[str, Any] = {
    "n_query_groups": 2, "rotary_percentage": 1.0, "parallel_residual": False, "bias": False,
    "norm_class_name": "RMSNorm", "mlp_class_name": "LLaMAMLP", "intermediate_size": 112,
}  # fmt: skip
_GEMMA: dict[str, Any] = _LLAMA | {
    "mlp_class_name": "GemmaMLP", "gelu_approximate": "tanh", "scale_embeddings": True, "head_size": 16,
    "attention_scores_scalar": 16, "attention_logit_softcapping": 50.0, "final_logit_softcapping": 30.0,
    "post_attention_norm": True, "post_mlp_norm": True, "sliding_window_size": 8, "sliding_window_indices": [1, 0],
}  # fmt: skip
_MOE: dict[str, Any] = _LLAMA | {"mlp_class_name": "LLaMAMoE", "n_expert": 4, "n_expert_per_token": 2}

MODELS = (
    Entry("GPT-NeoX", _gpt, tokens("idx"), next_token),
    Entry("Llama", lambda: _gpt(**_LLAMA), tokens("idx"), next_token),
    Entry("Qwen3", lambda: _gpt(**_LLAMA, norm_qk=True, head_size=32), tokens("idx"), next_token),
    Entry("Gemma 2", lambda: _gpt(**_GEMMA), tokens("idx"), next_token),
    Entry("Mixtral", lambda: _gpt(**_MOE), tokens("idx"), next_token),
)
