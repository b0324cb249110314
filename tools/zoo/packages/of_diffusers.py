"""Diffusers' denoisers and an autoencoder."""

from __future__ import annotations

import torch
from diffusers import (
    AuraFlowTransformer2DModel,
    AutoencoderDC,
    AutoencoderKL,
    CogVideoXTransformer3DModel,
    DiTTransformer2DModel,
    FluxTransformer2DModel,
    HunyuanDiT2DModel,
    PixArtTransformer2DModel,
    SanaTransformer2DModel,
    SD3Transformer2DModel,
    UNet2DConditionModel,
    UNet2DModel,
    WanTransformer3DModel,
)
from torch import Generator

from zoo.packages.entry import BATCH, HEADS, LENGTH, Batch, Entry, pictures

_HEAD = 16
_CONTEXT = 48
_POOLED = 40


def _latents(generator: Generator, channels: int = 4, size: int = 8) -> Batch:
    """Latent pictures ``[3, channels, size, size]`` and a time for each."""
    return {
        "hidden_states": torch.randn(BATCH, channels, size, size, generator=generator),
        "timestep": torch.randint(1000, (BATCH,), generator=generator),
    }


def _text(generator: Generator, features: int = _CONTEXT) -> Batch:
    return {"encoder_hidden_states": torch.randn(BATCH, LENGTH, features, generator=generator)}


def _pooled(generator: Generator) -> Batch:
    return {"pooled_projections": torch.randn(BATCH, _POOLED, generator=generator)}


def _of_class(generator: Generator) -> Batch:
    return _latents(generator) | {"class_labels": torch.randint(10, (BATCH,), generator=generator)}


def _unet(generator: Generator) -> Batch:
    latents = _latents(generator, size=16)
    return {"sample": latents["hidden_states"], "timestep": latents["timestep"]}


def _flux(generator: Generator) -> Batch:
    side = 4
    rows, columns = torch.meshgrid(torch.arange(side), torch.arange(side), indexing="ij")
    places = torch.stack([torch.zeros(side, side), rows, columns], -1).flatten(0, 1)
    return {
        "hidden_states": torch.randn(BATCH, side * side, 16, generator=generator),
        "timestep": torch.rand(BATCH, generator=generator),
        "guidance": torch.full((BATCH,), 3.5),
        "img_ids": places,
        "txt_ids": torch.zeros(LENGTH, 3),
        **_text(generator),
        **_pooled(generator),
    }


def _video(generator: Generator) -> Batch:
    latents = torch.randn(BATCH, 4, 3, 8, 8, generator=generator)
    return {"hidden_states": latents, "timestep": torch.randint(1000, (BATCH,), generator=generator)}


def _frames(generator: Generator) -> Batch:
    video = _video(generator)
    return video | {"hidden_states": video["hidden_states"].transpose(1, 2).contiguous()} | _text(generator)


def _two_texts(generator: Generator) -> Batch:
    places = torch.arange(16, dtype=torch.float32)[:, None] * 10000.0 ** (-torch.arange(8) / 8)
    latents = _latents(generator)
    return {
        **latents,
        "timestep": latents["timestep"].float(),
        **_text(generator),
        "text_embedding_mask": torch.ones(BATCH, LENGTH),
        "encoder_hidden_states_t5": torch.randn(BATCH, LENGTH + 2, _POOLED, generator=generator),
        "text_embedding_mask_t5": torch.ones(BATCH, LENGTH + 2),
        "image_rotary_emb": tuple(f(places).repeat_interleave(2, 1) for f in (torch.cos, torch.sin)),
    }


MODELS = (
    Entry(
        "DiTTransformer2DModel",
        lambda: DiTTransformer2DModel(
            num_attention_heads=HEADS, attention_head_dim=_HEAD, num_layers=2, sample_size=8, num_embeds_ada_norm=10
        ),
        # a class may be left out at random for guidance without a classifier: never in evaluation, see below
        _of_class,
    ),
    Entry(
        "PixArtTransformer2DModel",
        lambda: PixArtTransformer2DModel(
            num_attention_heads=HEADS, attention_head_dim=_HEAD, num_layers=2, sample_size=8, caption_channels=_CONTEXT,
            cross_attention_dim=HEADS * _HEAD, use_additional_conditions=False,
        ),
        lambda generator: _latents(generator) | _text(generator),
    ),
    Entry(
        "SD3Transformer2DModel",
        lambda: SD3Transformer2DModel(
            sample_size=8, in_channels=4, out_channels=4, num_layers=3, attention_head_dim=_HEAD,
            num_attention_heads=HEADS, joint_attention_dim=_CONTEXT, caption_projection_dim=HEADS * _HEAD,
            pooled_projection_dim=_POOLED, pos_embed_max_size=12, dual_attention_layers=(0,), qk_norm="rms_norm",
        ),
        lambda generator: _latents(generator) | _text(generator) | _pooled(generator),
    ),
    Entry(
        "FluxTransformer2DModel",
        lambda: FluxTransformer2DModel(
            in_channels=16, num_layers=2, num_single_layers=2, attention_head_dim=_HEAD, num_attention_heads=HEADS,
            joint_attention_dim=_CONTEXT, pooled_projection_dim=_POOLED, guidance_embeds=True, axes_dims_rope=(4, 6, 6),
        ),
        _flux,
    ),
    Entry(
        "WanTransformer3DModel",
        lambda: WanTransformer3DModel(
            num_attention_heads=HEADS, attention_head_dim=_HEAD, in_channels=4, out_channels=4, text_dim=_CONTEXT,
            freq_dim=32, ffn_dim=112, num_layers=2, rope_max_seq_len=32,
        ),
        lambda generator: _video(generator) | _text(generator),
    ),
    Entry(
        "SanaTransformer2DModel",
        lambda: SanaTransformer2DModel(
            in_channels=4, out_channels=4, num_attention_heads=HEADS, attention_head_dim=_HEAD, num_layers=2,
            num_cross_attention_heads=HEADS, cross_attention_head_dim=_HEAD, cross_attention_dim=HEADS * _HEAD,
            caption_channels=_CONTEXT, sample_size=8,
        ),
        lambda generator: _latents(generator) | _text(generator),
    ),
    Entry(
        "AuraFlowTransformer2DModel",
        lambda: AuraFlowTransformer2DModel(
            sample_size=8, num_mmdit_layers=2, num_single_dit_layers=2, attention_head_dim=_HEAD,
            num_attention_heads=HEADS, joint_attention_dim=_CONTEXT, caption_projection_dim=HEADS * _HEAD,
            pos_embed_max_size=64,
        ),
        lambda generator: _latents(generator) | _text(generator),
    ),
    Entry(
        "HunyuanDiT2DModel",
        lambda: HunyuanDiT2DModel(
            num_attention_heads=HEADS, attention_head_dim=_HEAD, hidden_size=HEADS * _HEAD, in_channels=4,
            patch_size=2, sample_size=8, num_layers=2, activation_fn="gelu-approximate", cross_attention_dim=_CONTEXT,
            cross_attention_dim_t5=_POOLED, text_len=LENGTH, text_len_t5=LENGTH + 2, pooled_projection_dim=32,
            use_style_cond_and_image_meta_size=False,
        ),
        _two_texts,
    ),
    Entry(
        "CogVideoXTransformer3DModel",
        lambda: CogVideoXTransformer3DModel(
            num_attention_heads=HEADS, attention_head_dim=_HEAD, in_channels=4, out_channels=4, time_embed_dim=32,
            text_embed_dim=_CONTEXT, num_layers=2, sample_width=8, sample_height=8, sample_frames=9,
            max_text_seq_length=LENGTH,
        ),
        _frames,
    ),
    Entry(
        "UNet2DConditionModel",
        lambda: UNet2DConditionModel(
            sample_size=16, block_out_channels=(32, 64, 64), layers_per_block=1, norm_num_groups=8,
            cross_attention_dim=_CONTEXT, attention_head_dim=HEADS,
            down_block_types=("CrossAttnDownBlock2D", "CrossAttnDownBlock2D", "DownBlock2D"),
            up_block_types=("UpBlock2D", "CrossAttnUpBlock2D", "CrossAttnUpBlock2D"),
        ),
        lambda generator: _unet(generator) | _text(generator),
    ),
    Entry(
        "UNet2DModel",
        lambda: UNet2DModel(
            sample_size=16, in_channels=4, out_channels=4, block_out_channels=(32, 64), layers_per_block=1,
            norm_num_groups=8, attention_head_dim=_HEAD, down_block_types=("DownBlock2D", "AttnDownBlock2D"),
            up_block_types=("AttnUpBlock2D", "UpBlock2D"),
        ),
        _unet,
    ),
    Entry(
        "AutoencoderKL",
        lambda: AutoencoderKL(
            block_out_channels=(32, 64), norm_num_groups=8, down_block_types=("DownEncoderBlock2D",) * 2,
            up_block_types=("UpDecoderBlock2D",) * 2,
        ),
        pictures(16, "sample"),
    ),
    Entry(
        "AutoencoderDC",
        lambda: AutoencoderDC(
            latent_channels=8, attention_head_dim=8, encoder_block_types=("ResBlock", "EfficientViTBlock"),
            decoder_block_types=("ResBlock", "EfficientViTBlock"), encoder_block_out_channels=(32, 64),
            decoder_block_out_channels=(32, 64), encoder_layers_per_block=(1, 1), decoder_layers_per_block=(1, 1),
            encoder_qkv_multiscales=((), (5,)), decoder_qkv_multiscales=((), (5,)),
        ),
        pictures(16, "sample"),
    ),
)  # fmt: skip
