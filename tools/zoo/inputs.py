"""One training batch for every architecture of the zoo."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedConfig

from zoo.configs import VOCABULARY
from zoo.modalities import names as with_sound
from zoo.modalities import other_modalities
from zoo.pictures import BATCH, FIRST_ORDINARY_TOKEN, LENGTH
from zoo.without_text import picture_batch, series_batch, sound_batch, video_batch

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
TYPED_PLACEHOLDERS = frozenset(("gemma3", "shieldgemma2"))
# Where on the page each token stands.
BOXES = frozenset(("bros", "udop"))
# Which kind of token each is, from which their positions in a picture follow.
KINDS_OF_TOKENS = frozenset(
    (
        "cohere_compass", "cosmos3_edge", "cosmos3_omni", "ernie4_5_vl_moe", "gemma4", "gemma4_unified", "glm46v",
        "glm4v", "glm4v_moe", "glm5_next", "glm_ocr", "glmga", "hunyuan_vl", "minicpmv4_7", "molmo2", "paddleocr_vl",
        "qwen2_5_vl", "qwen2_vl", "qwen3_5", "qwen3_5_moe", "qwen3_vl", "qwen3_vl_moe", "qwen4_exp",
    )
)  # fmt: skip
# The same for all that is said before a token is predicted.
KINDS_OF_EXPERTS = frozenset(("ernie4_5_vl_moe",))
# A mask tells where in the text what is not text stands.
MARKED_PLACES = {
    "kosmos-2": "image_embeds_position_mask", "kosmos-2.5": "image_embeds_position_mask",
    "vibevoice": "acoustic_loss_mask",
}  # fmt: skip
# Which pictures each token sees.
SEEN_PICTURES = {"idefics": "image_attention_mask"}
# They read no text.
ANSWERS_ALONE = frozenset(("pix2struct", "vision-encoder-decoder"))
# They learn something else than text.
NO_LABELS = frozenset(("pi0",))
# They answer with one of a list of answers, not with a place in the text.
ANSWERS_OF_A_LIST = frozenset(("lxmert",))
# Mentions of entities beside the tokens.
ENTITIES = frozenset(("luke",))

_IGNORED = -100


def training_batch(name: str, group: str, config: PreTrainedConfig, seed: int = 0) -> dict[str, Any]:
    """Random inputs and labels, and what else the architecture needs for its parts to train.

    Token ids are ``[3, 17]``, or longer by the placeholders of a picture or a sound; pictures are
    ``[3, 3, size, size]``; some labels of tokens are ignored.
    """
    generator = torch.Generator().manual_seed(seed)
    if group == "image":
        return picture_batch(name, config, generator)
    if group == "video":
        return video_batch(name, config, generator)
    if group == "series":
        return series_batch(name, config, generator)
    if group in ("ctc", "audio") or (group == "speech" and name not in with_sound()):
        return sound_batch(name, group, config, generator)
    text = config.get_text_config()
    length = LENGTHS.get(name, LENGTH)
    rows = BATCH * text.num_codebooks if name in CODEBOOKS else BATCH
    decoder = getattr(text, "decoder", None)
    vocabulary = int(getattr(text, "vocab_size", 0) or getattr(decoder, "vocab_size", VOCABULARY))
    ids = torch.randint(FIRST_ORDINARY_TOKEN, vocabulary, (rows, length), generator=generator)
    if group == "sequence" and config.is_encoder_decoder:
        ids[:, -1] = config.eos_token_id  # of which the class is read
    inputs, placeholders = other_modalities(name, group, config, generator)
    for token, count in placeholders.items():
        ids = torch.cat([ids[:, :2], ids.new_full((rows, count), token), ids[:, 2:]], dim=1)
    classes = int(config.num_labels or 1)
    if group == "question" and name in ANSWERS_OF_A_LIST:
        group, classes = "sequence", int(config.num_qa_labels)
    batch: dict[str, Any] = {"input_ids": ids, **_targets(group, ids, classes, generator), **inputs}
    if name in TYPED_PLACEHOLDERS:
        batch["token_type_ids"] = sum((ids == token).long() for token in placeholders)
    if name in KINDS_OF_TOKENS and placeholders:
        batch["mm_token_type_ids"] = sum((ids == token).int() for token in placeholders)
    if name in KINDS_OF_EXPERTS:
        batch["moe_mm_token_type_ids"] = batch["mm_token_type_ids"]
    if name in MARKED_PLACES:
        batch[MARKED_PLACES[name]] = torch.isin(ids, torch.tensor([*placeholders]))
    if name in SEEN_PICTURES:
        batch[SEEN_PICTURES[name]] = torch.ones(*ids.shape, 1, dtype=torch.long)
    if name in GLOBAL_ATTENTION:
        batch["global_attention_mask"] = (torch.arange(ids.shape[1]) == 0).long().expand_as(ids).clone()
    if name in ENTITIES:
        entities = torch.randint(1, config.entity_vocab_size, (BATCH, 2), generator=generator)
        batch |= {"entity_ids": entities, "entity_labels": entities.flip(0), "entity_attention_mask": entities > 0}
        batch["entity_position_ids"] = torch.tensor([[1, 2, -1], [5, 6, 7]]).expand(BATCH, 2, 3).clone()
    if name in CODEBOOKS and group == "causal":
        batch["labels"] = batch["labels"].view(BATCH, text.num_codebooks, length).transpose(1, 2).contiguous()
    if name in BOXES:
        corners = torch.randint(50, (rows, length, 2, 2), generator=generator).sort(2).values
        batch["bbox"] = corners.flatten(2) / 50
    if group == "causal" and name in CROSS_ATTENTION:
        states = torch.randn(BATCH, 11, text.hidden_size, generator=generator)
        key = CROSS_ATTENTION[name]
        batch[key] = states if key == "encoder_hidden_states" else (states,)
    for key in MORE_IDS.get(name, ()):
        batch[key] = torch.randint(FIRST_ORDINARY_TOKEN, vocabulary, (rows, length), generator=generator)
    unread = ("input_ids",) * (name in ANSWERS_ALONE) + ("labels",) * (name in NO_LABELS)
    return {key: value for key, value in batch.items() if key not in unread}


def _targets(group: str, ids: Tensor, classes: int, generator: torch.Generator) -> dict[str, Tensor]:
    """What a model of the group learns: tokens, a class of each row or token, where an answer begins and ends."""
    rows, length = ids.shape
    if group == "sequence":
        return {"labels": torch.randint(classes, (rows,), generator=generator)}
    if group == "token":
        labels = torch.randint(classes, (rows, length), generator=generator)
        return {"labels": labels.masked_fill(_labels(ids) == _IGNORED, _IGNORED)}
    if group == "question":
        places = torch.randint(length, (2, rows), generator=generator).sort(0).values
        return {"start_positions": places[0], "end_positions": places[1]}
    return {"labels": _labels(ids)} if group != "text" else {}


def _labels(ids: Tensor) -> Tensor:
    labels = ids.masked_fill(ids < FIRST_ORDINARY_TOKEN, _IGNORED)
    labels[0, : labels.shape[1] // 3] = _IGNORED
    return labels
