"""Batches of models that read no text: pictures, videos, sound and series."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Generator
from transformers import PreTrainedConfig

from zoo.pictures import BATCH, FIRST_ORDINARY_TOKEN

Batch = dict[str, Any]

WITHOUT_TEXT = frozenset(("image", "video", "series", "ctc", "audio"))
"""Groups in which a model's stages, and not its layers, tell how deep it is."""

SAMPLES = 4000
"""Of a waveform: encoders that make a frame of 320 of them make 12."""

FRAMES = 64
"""Of a spectrogram."""

WORDS = 5
"""That were said."""


def picture_batch(name: str, config: PreTrainedConfig, generator: Generator) -> Batch:
    """Pictures ``[3, 3, size, size]`` and a class of each."""
    labels = torch.randint(int(config.num_labels or 1), (BATCH,), generator=generator)
    if name == "imagegpt":  # pixels are tokens
        ids = torch.randint(FIRST_ORDINARY_TOKEN, config.vocab_size, (BATCH, 17), generator=generator)
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


def video_batch(name: str, config: Any, generator: Generator) -> Batch:
    """Videos ``[3, frames, 3, size, size]`` and a class of each."""
    frames = getattr(config, "num_frames", None) or config.frames_per_clip
    size = getattr(config, "image_size", None) or config.crop_size
    key = "pixel_values_videos" if name in ("videoprism_vision_model", "vjepa2") else "pixel_values"
    pixels = torch.randn(BATCH, frames, 3, size, size, generator=generator)
    return {key: pixels, "labels": torch.randint(config.num_labels, (BATCH,), generator=generator)}


def _wave(config: Any, generator: Generator) -> Batch:
    return {"input_values": torch.randn(BATCH, SAMPLES, generator=generator)}


def _spectrogram(
    bins: Callable[[Any], int], mask: str = "", key: str = "input_features", upright: bool = False
) -> Callable[[Any, Generator], Batch]:
    """``[3, frames, bins]``, or ``[3, bins, frames]`` where it stands ``upright``."""

    def make(config: Any, generator: Generator) -> Batch:
        shape = (bins(config), FRAMES) if upright else (FRAMES, bins(config))
        batch = {key: torch.randn(BATCH, *shape, generator=generator)}
        if mask:
            batch[mask] = torch.ones(BATCH, FRAMES, dtype=torch.long)
        return batch

    return make


_SOUNDS: dict[str, Callable[[Any, Generator], Batch]] = {
    "audio-spectrogram-transformer": _spectrogram(lambda config: int(config.num_mel_bins), key="input_values"),
    "canary": _spectrogram(lambda config: int(config.encoder_config.num_mel_bins), "attention_mask"),
    "cohere_asr": _spectrogram(lambda config: int(config.encoder_config.num_mel_bins), "attention_mask"),
    "granite_speech5_ctc": _spectrogram(lambda config: 4 * int(config.encoder_config.num_mel_bins), "attention_mask"),
    "lasr_ctc": _spectrogram(lambda config: int(config.encoder_config.num_mel_bins), "attention_mask"),
    "parakeet_ctc": _spectrogram(lambda config: int(config.encoder_config.num_mel_bins), "attention_mask"),
    "pop2piano": _spectrogram(lambda config: int(config.d_model), "attention_mask"),
    "seamless_m4t": _spectrogram(lambda config: int(config.feature_projection_input_dim), "attention_mask"),
    "seamless_m4t_v2": _spectrogram(lambda config: int(config.feature_projection_input_dim), "attention_mask"),
    "speech_to_text": _spectrogram(lambda config: int(config.input_feat_per_channel), "attention_mask"),
    "wav2vec2-bert": _spectrogram(lambda config: int(config.feature_projection_input_dim), "attention_mask"),
    "whisper": _spectrogram(lambda config: int(config.num_mel_bins), upright=True),
}
"""Those that take no waveform."""


def sound_batch(name: str, group: str, config: Any, generator: Generator) -> Batch:
    """Sounds, and a class of each, or what was said."""
    batch = _SOUNDS.get(name, _wave)(config, generator)
    if group == "audio":
        return batch | {"labels": torch.randint(config.num_labels, (BATCH,), generator=generator)}
    vocabulary = int(config.get_text_config(decoder=True).vocab_size)
    return batch | {"labels": torch.randint(FIRST_ORDINARY_TOKEN, vocabulary, (BATCH, WORDS), generator=generator)}


def series_batch(name: str, config: Any, generator: Generator) -> Batch:
    """Series ``[3, past]`` and how they go on, ``[3, horizon]``."""
    past = [torch.randn(config.context_length, generator=generator) for _ in range(BATCH)]
    batch: Batch = {
        "past_values": past,
        "future_values": torch.randn(BATCH, config.horizon_length, generator=generator),
    }
    return batch | ({"freq": [0, 1, 2]} if name == "timesfm" else {})
