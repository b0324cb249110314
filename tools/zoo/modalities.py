"""Pictures and sound for the models that read them beside text, so that a batch trains their towers too.

Every sample gets one picture or sound, and as many placeholder tokens in its text as the tower makes of it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Generator, Tensor
from transformers import PreTrainedConfig

BATCH = 3

FIRST_ORDINARY_TOKEN = 40
"""Those below it are special, or stand for what is not text."""

Inputs = dict[str, Tensor]
Placeholders = dict[int, int]
"""How many tokens of each id stand in a sample's text for what is not text."""


def other_modalities(
    name: str, group: str, config: PreTrainedConfig, generator: Generator
) -> tuple[Inputs, Placeholders]:
    """What an architecture takes beside its text, and the placeholders for it; nothing where it takes only text."""
    make = (_PICTURES_AND_TEXT.get(name) if group == "image-text" else None) or _MAKERS.get(name)
    return make(config, generator) if make is not None else ({}, {})


def names() -> frozenset[str]:
    """The architectures that get a picture or a sound."""
    return frozenset({*_MAKERS, *_PICTURES_AND_TEXT})


def _picture(size: Any, generator: Generator) -> Tensor:
    height, width = size if isinstance(size, list | tuple) else (size, size)
    return torch.randn(BATCH, 3, height, width, generator=generator)


def _pictures(tokens: int, images: bool = False) -> Callable[[Any, Generator], tuple[Inputs, Placeholders]]:
    """One picture per sample, ``tokens`` tokens each; with a dim of pictures per sample where ``images``."""

    def make(config: Any, generator: Generator) -> tuple[Inputs, Placeholders]:
        vision = getattr(config, "vision_config", None) or config.encoder.vision_config
        pixels = _picture(vision.image_size, generator)
        return {"pixel_values": pixels.unsqueeze(1) if images else pixels}, {config.image_token_id: tokens}

    return make


def _grid(config: Any, generator: Generator) -> tuple[Inputs, Placeholders]:
    """A picture of four by four flat patches per sample, all samples' in one row; two by two become one token."""
    vision = config.vision_config
    size = 3 * getattr(vision, "temporal_patch_size", 1) * vision.patch_size**2
    inputs = {
        "pixel_values": torch.randn(BATCH * 16, size, generator=generator),
        "image_grid_thw": torch.tensor([[1, 4, 4]]).expand(BATCH, 3).clone(),
    }
    return inputs, {config.image_token_id: 4}


def _sized(config: Any, generator: Generator) -> tuple[Inputs, Placeholders]:
    """A picture per sample, and how large it is."""
    inputs, placeholders = _pictures(4)(config, generator)
    return inputs | {"image_sizes": torch.full((BATCH, 2), config.vision_config.image_size)}, placeholders


def _cropped(tokens: int) -> Callable[[Any, Generator], tuple[Inputs, Placeholders]]:
    """A wide picture per sample, once scaled to a crop and once as its two crops, and how large it is."""

    def make(config: Any, generator: Generator) -> tuple[Inputs, Placeholders]:
        size = config.vision_config.image_size
        pixels = torch.stack([_picture(size, generator) for _ in range(3)], dim=1)
        return {"pixel_values": pixels, "image_sizes": torch.tensor([[size, 2 * size]] * BATCH)}, {
            config.image_token_id: tokens
        }

    return make


def _asked(config: Any, generator: Generator) -> tuple[Inputs, Placeholders]:
    """A picture per sample, of which queries that read the question make tokens."""
    inputs, placeholders = _pictures(config.num_query_tokens)(config, generator)
    question = torch.randint(FIRST_ORDINARY_TOKEN, config.qformer_config.vocab_size, (BATCH, 5), generator=generator)
    return inputs | {"qformer_input_ids": question}, placeholders


def _two_sizes(config: Any, generator: Generator) -> tuple[Inputs, Placeholders]:
    """A picture per sample, in two sizes for two towers."""
    inputs, placeholders = _pictures(16)(config, generator)
    size = config.high_res_vision_config.image_size
    return inputs | {"high_res_pixel_values": _picture(size, generator)}, placeholders


def _captioned(config: Any, generator: Generator) -> tuple[Inputs, Placeholders]:
    """Attended to without placeholders."""
    return {"pixel_values": _picture(config.vision_config.image_size, generator)}, {}


def _patches(config: Any, generator: Generator) -> tuple[Inputs, Placeholders]:
    """Four flat patches per sample."""
    flat = torch.randn(BATCH, 4, 3 * config.patch_size**2, generator=generator)
    return {"pixel_values": flat}, {config.image_token_id: 4}


def _packed_patches(config: Any, generator: Generator) -> tuple[Inputs, Placeholders]:
    """Four flat patches per sample, all samples' in one row."""
    inputs, placeholders = _patches(config, generator)
    return {"pixel_values": inputs["pixel_values"].flatten(0, 1)}, placeholders


def _sound(
    tokens: int, mask: str | None = "input_features_mask", frames: int = 64
) -> Callable[[Any, Generator], tuple[Inputs, Placeholders]]:
    """A spectrogram ``[batch, mel, frames]``, by default as long as the table lets a tower's positions be."""

    def make(config: Any, generator: Generator) -> tuple[Inputs, Placeholders]:
        inputs = {"input_features": torch.randn(BATCH, config.audio_config.num_mel_bins, frames, generator=generator)}
        if mask is not None:
            inputs[mask] = torch.ones(BATCH, frames, dtype=torch.long)
        return inputs, {config.audio_token_id: tokens}

    return make


def _seen_and_heard(
    sound: Callable[[Any, Generator], tuple[Inputs, Placeholders]],
) -> Callable[[Any, Generator], tuple[Inputs, Placeholders]]:
    """A picture of flat patches and a sound per sample."""

    def make(config: Any, generator: Generator) -> tuple[Inputs, Placeholders]:
        seen, heard = _grid(config, generator), sound(config, generator)
        return seen[0] | heard[0], seen[1] | heard[1]

    return make


def _two_encoders(config: Any, generator: Generator) -> tuple[Inputs, Placeholders]:
    """A spectrogram ``[batch, frames, mel]``, of which an encoder makes four frames."""
    audio = config.audio_config.asr_config
    frames = 4 * audio.subsampling_factor
    features = torch.randn(BATCH, frames, audio.num_mel_bins, generator=generator)
    mask = torch.ones(BATCH, frames, dtype=torch.long)
    return {"input_features": features, "input_features_mask": mask}, {config.audio_token_id: 4}


def _wave(config: Any, generator: Generator) -> tuple[Inputs, Placeholders]:
    """A waveform ``[batch, 1, samples]``, of which two encoders make four frames."""
    samples = 4 * config.acoustic_tokenizer_encoder_config.hop_length
    return {"input_values": torch.randn(BATCH, 1, samples, generator=generator)}, {config.audio_token_id: 4}


def _windowed_sound(config: Any, generator: Generator) -> tuple[Inputs, Placeholders]:
    """One window of frames ``[batch, frames, features]``, of which the projector's queries make tokens."""
    frames = config.window_size
    features = torch.randn(BATCH, frames, config.encoder_config.input_dim, generator=generator)
    return {"input_features": features}, {config.audio_token_id: frames // config.downsample_rate}


def _picture_and_sound(config: Any, generator: Generator) -> tuple[Inputs, Placeholders]:
    """A picture, once scaled to a crop and once as its only crop, and a spectrogram ``[batch, frames, mel]``."""
    vision, audio = config.vision_config, config.audio_config
    size, side = vision.crop_size, vision.crop_size // vision.patch_size
    frames = 4 * audio.time_reduction
    inputs = {
        "image_pixel_values": torch.randn(BATCH, 2, 3, size, size, generator=generator),
        "image_sizes": torch.full((BATCH, 2), size),
        "image_attention_mask": torch.ones(BATCH, 2, side, side, dtype=torch.long),
        "audio_input_features": torch.randn(BATCH, frames, audio.input_size, generator=generator),
        "audio_embed_sizes": torch.full((BATCH,), 4),
    }
    rows = side // 2
    return inputs, {vision.image_token_id: 2 * rows * (rows + 1) + 1, audio.audio_token_id: 4}


def _regions(config: Any, generator: Generator) -> tuple[Inputs, Placeholders]:
    """Features ``[batch, regions, features]`` of regions of a picture, and where they are ``[batch, regions, 4]``."""
    regions = 5
    features = torch.randn(BATCH, regions, config.visual_feat_dim, generator=generator)
    corners = torch.rand(BATCH, regions, 2, 2, generator=generator).sort(2).values
    return {"visual_feats": features, "visual_pos": corners.flatten(2)}, {}


_MAKERS: dict[str, Callable[[Any, Generator], tuple[Inputs, Placeholders]]] = {
    "fuyu": _patches,
    "gemma3": _pictures(4),
    "git": _captioned,
    "got_ocr2": _pictures(4),
    "modernvbert": _pictures(4, images=True),
    "neomme": _packed_patches,
    "t5gemma2": _pictures(4),
    "ultravbert": _pictures(4, images=True),
    "audioflamingo3": _sound(16),
    "glmasr": _sound(8),
    "granite_speech": _windowed_sound,
    "granite_speech_plus": _windowed_sound,
    "lxmert": _regions,
    "moss_transcribe_diarize": _sound(8),
    "musicflamingo": _sound(16),
    "nemo_speechlm": _two_encoders,
    "phi4_multimodal": _picture_and_sound,
    "qwen2_audio": _sound(16, mask="feature_attention_mask"),
    "qwen3_asr": _sound(13, frames=100),
    "vibevoice_asr": _wave,
    "voxtral": _sound(8, mask=None),
}

_PICTURES_AND_TEXT: dict[str, Callable[[Any, Generator], tuple[Inputs, Placeholders]]] = {
    "aya_vision": _pictures(4),
    "blip": _captioned,
    "blip-2": _pictures(4),
    "instructblip": _asked,
    "deepseek_vl_hybrid": _two_sizes,
    "llava_next": _cropped(52),
    "llava_next_video": _cropped(52),
    "llava_onevision": _cropped(52),
    "qwen2_5_omni_thinker": _seen_and_heard(_sound(16, mask="feature_attention_mask")),
    "qwen3_omni_moe_thinker": _seen_and_heard(_sound(13, mask="feature_attention_mask", frames=100)),
    "vipllava": _pictures(16),
    "cohere2_vision": _pictures(4),
    "deepseek_vl": _pictures(16),
    "idefics2": _pictures(64, images=True),
    "idefics3": _pictures(4, images=True),
    "internvl": _pictures(4),
    "llava": _pictures(16),
    "ovis2": _pictures(16),
    "paligemma": _pictures(16),
    "pp_chart2table": _pictures(1),
    "qianfan_ocr": _pictures(4),
    "smolvlm": _pictures(4, images=True),
    "step3p7": _pictures(1),
    "video_llava": _pictures(16),
    "lighton_ocr": _sized,
    "mistral3": _sized,
    "mistral_large4": _sized,
    **dict.fromkeys(
        (
            "cosmos3_omni", "dots3_note", "exaone4_5", "glm46v", "glm4v", "glm4v_moe", "glm_ocr", "glmga",
            "hyperclovax_vision_v2", "lfm3_vl", "minimax_m3_vl", "qwen2_5_vl", "qwen2_vl",
            "qwen3_5", "qwen3_5_moe", "qwen3_vl", "qwen3_vl_moe", "qwen4_exp",
        ),
        _grid,
    ),
}  # fmt: skip
"""Those that take text alone as causal models, or are none."""
