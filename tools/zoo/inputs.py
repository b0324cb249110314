"""One training batch for every architecture of the zoo."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedConfig

from zoo.modalities import BATCH, other_modalities

LENGTH = 17

# Lengths that an architecture's chunks, blocks or tables of positions ask for.
LENGTHS = {"reformer": 64, "big_bird": 52, "bigbird_pegasus": 52}
# Decoders taken out of an encoder-decoder: their cross-attention trains on an encoder's hidden states.
CROSS_ATTENTION = dict.fromkeys(
    (
        "bart", "bigbird_pegasus", "blenderbot", "blenderbot-small", "marian", "mbart", "mvp", "pegasus", "plbart",
        "prophetnet", "trocr", "musicgen", "musicgen_melody",
    ),
    "encoder_hidden_states",
) | {"whisper": "encoder_outputs"}  # fmt: skip
# One row of ids per codebook and sample.
CODEBOOKS = frozenset(("musicgen", "musicgen_melody"))
# More ids of every token.
MORE_IDS = {"roc_bert": ("input_shape_ids", "input_pronunciation_ids")}
# The first token attends to all tokens, and all to it, through weights of their own.
GLOBAL_ATTENTION = frozenset(("led", "longformer"))
# Placeholders attend to each other both ways, which their type tells.
TYPED_PLACEHOLDERS = frozenset(("gemma3",))
# Mentions of entities beside the tokens.
ENTITIES = frozenset(("luke",))

_FIRST_ORDINARY_TOKEN = 40
_IGNORED = -100


def training_batch(name: str, group: str, config: PreTrainedConfig, seed: int = 0) -> dict[str, Any]:
    """Random inputs and labels, and what else the architecture needs for its parts to train.

    Token ids are ``[3, 17]``, or longer by the placeholders of a picture or a sound; pictures are
    ``[3, 3, size, size]``; some labels of tokens are ignored.
    """
    generator = torch.Generator().manual_seed(seed)
    if group == "image":
        return _picture_batch(name, config, generator)
    text = config.get_text_config()
    length = LENGTHS.get(name, LENGTH)
    rows = BATCH * text.num_codebooks if name in CODEBOOKS else BATCH
    vocabulary = int(getattr(text, "vocab_size", 0) or text.decoder.vocab_size)
    ids = torch.randint(_FIRST_ORDINARY_TOKEN, vocabulary, (rows, length), generator=generator)
    inputs, placeholders = other_modalities(name, config, generator)
    for token, count in placeholders.items():
        ids = torch.cat([ids[:, :2], ids.new_full((rows, count), token), ids[:, 2:]], dim=1)
    batch: dict[str, Any] = {"input_ids": ids, "labels": _labels(ids), **inputs}
    if name in TYPED_PLACEHOLDERS:
        batch["token_type_ids"] = sum((ids == token).long() for token in placeholders)
    if name in GLOBAL_ATTENTION:
        batch["global_attention_mask"] = (torch.arange(ids.shape[1]) == 0).long().expand_as(ids).clone()
    if name in ENTITIES:
        entities = torch.randint(1, config.entity_vocab_size, (BATCH, 2), generator=generator)
        batch |= {"entity_ids": entities, "entity_labels": entities.flip(0), "entity_attention_mask": entities > 0}
        batch["entity_position_ids"] = torch.tensor([[1, 2, -1], [5, 6, 7]]).expand(BATCH, 2, 3).clone()
    if name in CODEBOOKS:
        batch["labels"] = batch["labels"].view(BATCH, text.num_codebooks, length).transpose(1, 2).contiguous()
    if group == "causal" and name in CROSS_ATTENTION:
        states = torch.randn(BATCH, 11, text.hidden_size, generator=generator)
        key = CROSS_ATTENTION[name]
        batch[key] = states if key == "encoder_hidden_states" else (states,)
    for key in MORE_IDS.get(name, ()):
        batch[key] = torch.randint(_FIRST_ORDINARY_TOKEN, vocabulary, (rows, length), generator=generator)
    return batch


def _picture_batch(name: str, config: PreTrainedConfig, generator: torch.Generator) -> dict[str, Any]:
    labels = torch.randint(int(config.num_labels or 1), (BATCH,), generator=generator)
    if name == "imagegpt":  # pixels are tokens
        ids = torch.randint(_FIRST_ORDINARY_TOKEN, config.vocab_size, (BATCH, LENGTH), generator=generator)
        return {"input_ids": ids, "labels": labels}
    vision = getattr(config, "vision_config", config)
    if name == "siglip2":  # pictures of any size, cut into patches
        side = math.isqrt(vision.num_patches)
        pixels = torch.randn(BATCH, vision.num_patches, 3 * vision.patch_size**2, generator=generator)
        mask, shapes = torch.ones(BATCH, vision.num_patches, dtype=torch.long), torch.full((BATCH, 2), side)
        return {"pixel_values": pixels, "pixel_attention_mask": mask, "spatial_shapes": shapes, "labels": labels}
    size = getattr(vision, "image_size", None) or 32
    height, width = size if isinstance(size, list | tuple) else (size, size)
    return {"pixel_values": torch.randn(BATCH, 3, height, width, generator=generator), "labels": labels}


def _labels(ids: Tensor) -> Tensor:
    labels = ids.masked_fill(ids < _FIRST_ORDINARY_TOKEN, _IGNORED)
    labels[0, : labels.shape[1] // 3] = _IGNORED
    return labels
