"""The transformers of x-transformers: what its README combines."""

from __future__ import annotations

from typing import Any

from torch import nn
from x_transformers import (
    AutoregressiveWrapper,
    Decoder,
    Encoder,
    TransformerWrapper,
    ViTransformerWrapper,
    XTransformer,
)

from zoo.packages.entry import (
    CLASSES,
    HEADS,
    HIDDEN,
    LENGTH,
    VOCABULARY,
    Entry,
    classified,
    of_output,
    pictures,
    tokens,
)  # fmt: skip

_LAYERS: dict[str, Any] = {"dim": HIDDEN, "depth": 2, "heads": HEADS, "attn_dim_head": 16}
_SIZES: dict[str, Any] = {"num_tokens": VOCABULARY, "max_seq_len": 2 * LENGTH}


def _decoder(attn_layers: dict[str, Any], **options: Any) -> nn.Module:
    layers = Decoder(**(_LAYERS | attn_layers))
    return AutoregressiveWrapper(TransformerWrapper(**_SIZES, attn_layers=layers, **options))


def _translator() -> nn.Module:
    side = {**_SIZES, "depth": 2, "heads": HEADS, "attn_dim_head": 16}
    sides = {f"{name}_{key}": value for name in ("enc", "dec") for key, value in side.items()}
    return XTransformer(dim=HIDDEN, tie_token_emb=True, **sides)


def _pictures() -> nn.Module:
    return ViTransformerWrapper(image_size=32, patch_size=8, num_classes=CLASSES, attn_layers=Encoder(**_LAYERS))


_MODERN = {
    "rotary_pos_emb": True, "ff_glu": True, "ff_swish": True, "ff_no_bias": True, "use_rmsnorm": True,
    "attn_kv_heads": 2, "attn_qk_norm": True,
}  # fmt: skip

MODELS = (
    Entry("Decoder", lambda: _decoder({}), tokens(), of_output),
    Entry("Decoder, heads of 64 features", lambda: _decoder({"attn_dim_head": 64}), tokens(), of_output),
    Entry("Decoder, flash attention", lambda: _decoder({"attn_flash": True}), tokens(), of_output),
    Entry("Decoder, rotary, SwiGLU, RMS norms, grouped keys, QK norms", lambda: _decoder(_MODERN), tokens(), of_output),
    Entry("Decoder, ALiBi", lambda: _decoder({"alibi_pos_bias": True}), tokens(), of_output),
    Entry("Decoder, T5's relative positions", lambda: _decoder({"rel_pos_bias": True}), tokens(), of_output),
    Entry("Decoder, memory tokens", lambda: _decoder({}, num_memory_tokens=5), tokens(), of_output),
    Entry("Decoder, one KV head", lambda: _decoder({"attn_one_kv_head": True}), tokens(), of_output),
    Entry("XTransformer, cross-attention", _translator, tokens("src", "tgt"), of_output),
    Entry("ViTransformerWrapper", _pictures, pictures(32, "img"), classified),
)
