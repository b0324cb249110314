"""Pictures and sound for the models that read them beside text, so that a batch trains their towers too.

Every sample gets one picture or sound, and as many placeholder tokens in its text as the tower makes of it.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Generator, Tensor
from transformers import PreTrainedConfig

from zoo import pictures
from zoo.pictures import BATCH, LENGTH, Inputs, Maker, Placeholders


def other_modalities(
    name: str, group: str, config: PreTrainedConfig, generator: Generator
) -> tuple[Inputs, Placeholders]:
    """What an architecture takes beside its text, and the placeholders for it; nothing where it takes only text."""
    make = (_PICTURES_AND_TEXT.get(name) if group == "image-text" else None) or _MAKERS.get(name)
    return make(config, generator) if make is not None else ({}, {})


def names() -> frozenset[str]:
    """The architectures that get a picture or a sound."""
    return frozenset({*_MAKERS, *_PICTURES_AND_TEXT})


def _sound(tokens: int, mask: str | None = "input_features_mask", frames: int = 64) -> Maker:
    """A spectrogram ``[batch, mel, frames]``, by default as long as the table lets a tower's positions be."""

    def make(config: Any, generator: Generator) -> tuple[Inputs, Placeholders]:
        inputs = {"input_features": torch.randn(BATCH, config.audio_config.num_mel_bins, frames, generator=generator)}
        if mask is not None:
            inputs[mask] = torch.ones(BATCH, frames, dtype=torch.long)
        return inputs, {config.audio_token_id: tokens}

    return make


def _seen_and_heard(sound: Maker) -> Maker:
    """A picture of flat patches and a sound per sample."""

    def make(config: Any, generator: Generator) -> tuple[Inputs, Placeholders]:
        seen, heard = pictures.grid(config, generator), sound(config, generator)
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


def _stacked_sound(config: Any, generator: Generator) -> tuple[Inputs, Placeholders]:
    """Frames ``[batch, frames, features]`` of which each becomes a token."""
    features = config.audio_config.num_mel_bins * config.audio_config.num_stacked_frames
    inputs = {
        "input_features": torch.randn(BATCH, 8, features, generator=generator),
        "input_features_mask": torch.ones(BATCH, 8, dtype=torch.long),
    }
    return inputs, {config.audio_token_id: 8}


def _sound_in_step(config: Any, generator: Generator) -> tuple[Inputs, Placeholders]:
    """A spectrogram ``[batch, mel, frames]`` of as many frames as belong to a sample's tokens, which stand for it."""
    frames = config.audio_length_per_tok * LENGTH
    return {"input_features": torch.randn(BATCH, config.audio_config.num_mel_bins, frames, generator=generator)}, {}


def _codes(config: Any, generator: Generator) -> tuple[Inputs, Placeholders]:
    """The codes of a sound beside each token ``[batch, tokens, 1 + codebooks]``, instead of ids alone."""
    shape = (BATCH, LENGTH, 1 + config.num_codebooks)
    return {"input_ids": torch.randint(3, config.codebook_vocab_size, shape, generator=generator)}, {}


def _spoken_codes(config: Any, generator: Generator) -> tuple[Inputs, Placeholders]:
    """What is to be said as codes ``[batch, frames, codebooks]``; each row of labels is one codebook's."""
    decoder = config.decoder_config
    codes = torch.randint(3, decoder.vocab_size, (BATCH, 7, decoder.num_channels), generator=generator)
    return {"decoder_input_ids": codes[:, :-1], "labels": codes[:, 1:].transpose(1, 2).flatten(0, 1)}, {}


class _Noise:
    """How much of a sound and of noise is left at each of ten steps of diffusion."""

    def __init__(self) -> None:
        self.alpha_t = torch.linspace(0.95, 0.05, 10).sqrt()
        self.sigma_t = (1 - self.alpha_t**2).sqrt()

    def add_noise(self, x: Tensor, noise: Tensor, steps: Tensor) -> Tensor:
        """``x`` and ``noise`` ``[frames, features]``, each at its step ``[frames]``."""
        return self.alpha_t.to(x)[steps, None] * x + self.sigma_t.to(x)[steps, None] * noise


def _voice(config: Any, generator: Generator) -> tuple[Inputs, Placeholders]:
    """A waveform ``[batch, 1, samples]``, of which a frozen encoder makes four frames that are to be said."""
    samples = 4 * config.audio_config.hop_length
    inputs = {
        "input_values": torch.randn(BATCH, 1, samples, generator=generator),
        "padding_mask": torch.ones(BATCH, samples, dtype=torch.long),
        "noise_scheduler": _Noise(),
    }
    return inputs, {config.audio_token_id: 4}


def _cubes_and_codes(config: Any, generator: Generator) -> tuple[Inputs, Placeholders]:
    """A picture of four patches per sample, and a sound as codes ``[batch, frames, codebooks]``."""
    inputs, placeholders = pictures.cubes(config, generator)
    audio = config.audio_config
    codes = torch.randint(audio.mel_vocab_size, (BATCH, 5, audio.n_mel_bins), generator=generator)
    return inputs | {"audio_input_ids": codes}, placeholders | {config.audio_token_id: 5}


def _frames_and_wave(config: Any, generator: Generator) -> tuple[Inputs, Placeholders]:
    """A picture of flat patches per sample, and a waveform ``[batch, samples]``."""
    inputs, placeholders = pictures.grid_of_frames(config, generator)
    samples = 5 * config.audio_config.samples_per_token
    inputs |= {
        "input_values": torch.randn(BATCH, samples, generator=generator),
        "input_values_mask": torch.ones(BATCH, samples, dtype=torch.long),
    }
    return inputs, placeholders | {config.audio_token_id: 5}


_MAKERS: dict[str, Maker] = {
    "fuyu": pictures.patches,
    "gemma3": pictures.pictures(4),
    "git": pictures.captioned,
    "got_ocr2": pictures.pictures(4),
    "modernvbert": pictures.pictures(4, images=True),
    "neomme": pictures.packed_patches,
    "t5gemma2": pictures.pictures(4),
    "ultravbert": pictures.pictures(4, images=True),
    "audioflamingo3": _sound(16),
    "dia": _spoken_codes,
    "fun_asr_nano": _stacked_sound,
    "glmasr": _sound(8),
    "granite_speech": _windowed_sound,
    "granite_speech_plus": _windowed_sound,
    "kyutai_speech_to_text": _codes,
    "lxmert": pictures.regions,
    "moss_transcribe_diarize": _sound(8),
    "musicflamingo": _sound(16),
    "nemo_speechlm": _two_encoders,
    "phi4_multimodal": _picture_and_sound,
    "qwen2_audio": _sound(16, mask="feature_attention_mask"),
    "qwen3_asr": _sound(13, frames=100),
    "vibevoice": _voice,
    "vibevoice_asr": _wave,
    "voxtral": _sound(8, mask=None),
    "voxtral_realtime": _sound_in_step,
}

_PICTURES_AND_TEXT: dict[str, Maker] = {
    "aya_vision": pictures.pictures(4),
    "blip": pictures.captioned,
    "blip-2": pictures.pictures(4),
    "instructblip": pictures.asked,
    "deepseek_vl_hybrid": pictures.two_sizes,
    "llava_next": pictures.cropped(52),
    "llava_next_video": pictures.cropped(52),
    "llava_onevision": pictures.cropped(52),
    "qwen2_5_omni_thinker": _seen_and_heard(_sound(16, mask="feature_attention_mask")),
    "qwen3_omni_moe_thinker": _seen_and_heard(_sound(13, mask="feature_attention_mask", frames=100)),
    "vipllava": pictures.pictures(16),
    "cohere2_vision": pictures.pictures(4),
    "deepseek_vl": pictures.pictures(16),
    "idefics2": pictures.pictures(64, images=True),
    "idefics3": pictures.pictures(4, images=True),
    "internvl": pictures.pictures(4),
    "llava": pictures.pictures(16),
    "ovis2": pictures.pictures(16),
    "paligemma": pictures.pictures(16),
    "pp_chart2table": pictures.pictures(1),
    "qianfan_ocr": pictures.pictures(4),
    "smolvlm": pictures.pictures(4, images=True),
    "step3p7": pictures.pictures(1),
    "video_llava": pictures.pictures(16),
    "aria": pictures.pictures(4),
    "chameleon": pictures.coded,
    "deepseek_ocr2": pictures.tokens_of_towers(144 + 1),
    "emu3": pictures.coded_in_rows,
    "evolla": pictures.chain,
    "florence2": pictures.of_size(64, 5),
    "gemma4": pictures.placed_patches(),
    "gemma4_unified": pictures.placed_patches(merged=True),
    "granite4_vision": pictures.cropped(14),
    "granite_docling": pictures.tiles_to_choose,
    "hunyuan_vl": pictures.grid_in_rows,
    "idefics": pictures.one_of_many,
    "inkling2": pictures.grid_of_merged,
    "inkling_mm_model": _cubes_and_codes,
    "instructblipvideo": pictures.asked_frames,
    "janus": pictures.pictures(16),
    "kosmos-2": pictures.marked,
    "kosmos-2.5": pictures.numbered_patches(4),
    "lfm2_vl": pictures.padded_patches,
    "llama4": pictures.pictures(4),
    "minicpm_ocr": pictures.strip,
    "minicpmv4_6": pictures.strip,
    "minicpmv4_7": pictures.strip,
    "mllama": pictures.tiles,
    "molmo2": pictures.pooled_patches,
    "paddleocr_vl": pictures.grid_of_pixels,
    "kimi_k25": pictures.grid_of_pixels,
    "pi0": pictures.seen_by_a_robot,
    "pix2struct": pictures.numbered_patches(0),
    "pp_formulanet": pictures.captioned,
    "shieldgemma2": pictures.pictures(4),
    "udop": pictures.on_a_page,
    "unlimited_ocr": pictures.tokens_of_towers(7),
    "video_llama_3": pictures.grid_and_merges,
    "vision-encoder-decoder": pictures.of_size(32, 0),
    "fast_vlm": pictures.of_size(128, 4),
    "gemma3n": pictures.of_size(64, 4),
    "perception_lm": pictures.of_size(32, 16, images=True),
    "muse_glimmer": pictures.grid_of_frames,
    "muse_spark": _frames_and_wave,
    "nemotron_h_omni": pictures.grid_of_two,
    "lighton_ocr": pictures.sized,
    "mistral3": pictures.sized,
    "mistral_large4": pictures.sized,
    **dict.fromkeys(
        (
            "cohere_compass", "cosmos3_edge", "cosmos3_omni", "dots3_note", "ernie4_5_vl_moe", "exaone4_5", "glm46v",
            "glm4v", "glm4v_moe", "glm5_next", "glm_ocr", "glmga",
            "hyperclovax_vision_v2", "lfm3_vl", "minimax_m3_vl", "qwen2_5_vl", "qwen2_vl",
            "qwen3_5", "qwen3_5_moe", "qwen3_vl", "qwen3_vl_moe", "qwen4_exp",
        ),
        pictures.grid,
    ),
}  # fmt: skip
"""Those that take text alone as causal models, or are none."""
