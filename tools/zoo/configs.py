"""The one table of tiny sizes: what every architecture's config gets, and what single ones need on top.

Sizes only. How anything is parallelized is never said here, and nothing else in the package reads this.
"""

from __future__ import annotations

from importlib.util import find_spec
from typing import Any

VOCABULARY = 250
"""Token ids; no multiple of four, so that four ranks hold unequal parts of it."""

LAYERS = 2

# Set on every config, and every config nested in it, that has a field of the name (or maps the name to one).
SIZES: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 112,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": VOCABULARY,
    "max_position_embeddings": 96,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "sep_token_id": 3,
    "decoder_start_token_id": 1,
    "type_vocab_size": 2,
    "embedding_size": 64,
    "use_cache": False,
    "sliding_window": 8,
    "sliding_window_size": 8,
    "swa_num_attention_heads": 4,
    "swa_num_key_value_heads": 2,
    "swa_head_dim": 16,
    "rel_extent": 16,
    # encoders and decoders
    "encoder_layers": LAYERS,
    "decoder_layers": LAYERS,
    "num_decoder_layers": LAYERS,
    "num_encoder_layers": LAYERS,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "num_encoder_attention_heads": 4,
    "num_decoder_attention_heads": 4,
    "encoder_ffn_dim": 112,
    "decoder_ffn_dim": 112,
    "ffn_dim": 112,
    "ffn_hidden_size": 112,
    "d_ff": 112,
    "d_kv": 16,
    "max_source_positions": 32,
    # mixtures of experts
    "num_experts": 4,
    "num_local_experts": 4,
    "n_routed_experts": 4,
    "moe_num_experts": 4,
    "num_experts_per_tok": 2,
    "num_experts_per_token": 2,
    "moe_topk": 2,
    "moe_k": 2,
    "n_shared_experts": 1,
    "num_shared_experts": 1,
    "n_group": 1,
    "num_expert_group": 1,
    "topk_group": 1,
    "moe_intermediate_size": 48,
    "shared_expert_intermediate_size": 48,
    "moe_shared_expert_intermediate_size": 48,
    "shared_intermediate_size": 48,
    "shared_experts_intermediate_size": 48,
    "first_k_dense_replace": 1,
    "num_dense_layers": 1,
    "num_nextn_predict_layers": 0,
    # latent attention
    "q_lora_rank": 24,
    "kv_lora_rank": 32,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 16,
    "index_head_dim": 16,
    "index_n_heads": 4,
    "index_topk": 8,
    # state spaces and linear attention
    "state_size": 16,
    "ssm_state_size": 16,
    "mamba_d_state": 16,
    "mamba_n_heads": 8,
    "mamba_num_heads": 8,
    "mamba_d_head": 16,
    "mamba_head_dim": 16,
    "mamba_n_groups": 2,
    "mamba_chunk_size": 16,
    "mamba_dt_rank": 8,
    "time_step_rank": 8,
    "n_groups": 2,
    "chunk_size": 16,
    "linear_num_key_heads": 4,
    "linear_num_value_heads": 8,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "linear_head_dim": 16,
    "linear_num_heads": 4,
    # pictures
    "image_size": 32,
    "patch_size": 8,
    "depth": LAYERS,
    "out_hidden_size": 64,
    "num_labels": 10,
}

# Latent attention makes keys for every head.
LATENT_SIZES: dict[str, Any] = {"num_key_value_heads": 4}

# fmt: off
_SLIDING_LATENT: dict[str, Any] = {
    "swa_num_attention_heads": 4, "swa_num_key_value_heads": 4, "swa_head_dim": 24, "swa_q_lora_rank": 24,
    "swa_kv_lora_rank": 32, "swa_qk_nope_head_dim": 16, "swa_v_head_dim": 16, "swa_qk_rope_head_dim": 8,
}
_PER_LAYER: dict[str, Any] = {
    "global_head_dim": 32, "vocab_size_per_layer_input": VOCABULARY, "hidden_size_per_layer_input": 16,
}
_INDEXED: dict[str, Any] = {
    "indexer_n_heads": 4, "indexer_kv_heads": 1, "indexer_head_dim": 16, "indexer_budget": 8,
    "indexer_compress_ratio": 2, "hc_lowrank": 16, "ple_layer_ids": [1], "ngram_vocab_size_base": 50,
    "make_ngram_vocab_size_divisible_by": 8, "split_ngram_parts": 1, "heads_per_ngram": 2,
}
_THREE_POSITIONS: dict[str, Any] = {
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 3, 3]},
}
_FOUR_STAGES: dict[str, Any] = {"hidden_sizes": [16, 32, 48, 64], "depths": [1, 1, 2, 1]}
_WINDOWS: dict[str, Any] = {"embed_dim": 16, "depths": [1, 2], "num_heads": [2, 4], "window_size": 4, "patch_size": 4}
_WAVE: dict[str, Any] = {
    "conv_dim": [32] * 7, "num_conv_pos_embeddings": 16, "num_conv_pos_embedding_groups": 4, "classifier_proj_size": 32,
}
_LONG_WAVE: dict[str, Any] = {**_WAVE, "conv_dim": [32] * 13}
_SEAMLESS: dict[str, Any] = {
    "speech_encoder_layers": LAYERS, "speech_encoder_attention_heads": 4, "speech_encoder_intermediate_size": 112,
    "num_conv_pos_embeddings": 16, "num_conv_pos_embedding_groups": 4, "t2u_encoder_layers": 1, "t2u_decoder_layers": 1,
}
_PYRAMID: dict[str, Any] = {
    "depths": [1, 1, 1, 1], "hidden_sizes": [16, 32, 48, 64], "num_attention_heads": [1, 2, 4, 4],
    "decoder_hidden_size": 32,
}
_CODES: dict[str, Any] = {  # groups of normalization ask for 32 channels at least
    "embed_dim": 4, "latent_channels": 4, "base_channels": 32, "channel_multiplier": [1, 1],
    "num_res_blocks": 1,
}
_SHARED_KEYS: dict[str, Any] = {
    "num_hidden_layers": 4, "num_kv_shared_layers": 2, "vocab_size_per_layer_input": VOCABULARY, "laurel_rank": 8,
    "hidden_size_per_layer_input": 16, "layer_types": ["sliding_attention", "full_attention"] * 2,
    "activation_sparsity_pattern": [0.95, 0.95, 0.0, 0.0],
}
_MOBILE: dict[str, Any] = {"out_chs": 16, "act_layer": None, "noskip": False}
_MOBILE_FIRST: dict[str, Any] = {
    "block_type": "er", "stride": 2, "exp_kernel_size": 3, "pw_kernel_size": 1, "exp_ratio": 4.0, "force_in_chs": 0,
    "se_ratio": 0.0, **_MOBILE,
}
_MOBILE_INVERTED: dict[str, Any] = {
    "block_type": "uir", "stride": 2, "dw_kernel_size_start": 3, "dw_kernel_size_mid": 5, "dw_kernel_size_end": 0,
    "exp_ratio": 6.0, "se_ratio": 0.0, **_MOBILE,
}
_MOBILE_ATTENTION: dict[str, Any] = {
    "block_type": "mqa", "stride": 1, "dw_kernel_size": 3, "num_heads": 4, "key_dim": 16, "value_dim": 16,
    "kv_stride": 2, **_MOBILE,
}
_MOBILE_BLOCKS = [  # as timm writes them: of every kind, over four stages
    [_MOBILE_FIRST],
    [{**_MOBILE_INVERTED}],
    [{**_MOBILE_INVERTED}, _MOBILE_ATTENTION, {**_MOBILE_INVERTED, "stride": 1}],
    [{**_MOBILE_INVERTED}],
]
_GRID_OF_POSITIONS: dict[str, Any] = {"num_position_embeddings": 16, "deepstack_visual_indexes": [0]}
_MUSE: dict[str, Any] = {
    "vision_config": {"pos_emb_height": 4, "pos_emb_width": 4, "max_position_embeddings": 16},
    "projector_hidden_size": 112, "out_hidden_size": 256,
}
_SAM: dict[str, Any] = {
    "mlp_dim": 112, "output_channels": 16, "downsample_channels": [32, 64], "patch_size": 4, "window_size": 4,
    "global_attn_indexes": [1],
}
_TWO_KINDS_OF_ROPE: dict[str, Any] = {
    "layer_types": ["sliding_attention", "full_attention"],
    "rope_parameters": {
        "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 3, 3]},
        "full_attention": None,
    },
}

# On top of SIZES; "group:name" where an architecture needs other sizes in another group.
OVERRIDES: dict[str, dict[str, Any]] = {
    "layoutlmv3": {"coordinate_size": 8, "shape_size": 16},
    "lilt": {"hidden_size": 96},
    "audioflamingo3": {"audio_config": {"max_source_positions": 32}},
    "big_bird": {"block_size": 4, "num_random_blocks": 1},
    "bigbird_pegasus": {"block_size": 4, "num_random_blocks": 1},
    **{name: {"image_token_index": 9, "num_query_tokens": 4} for name in ("blip-2", "instructblip")},
    **{
        name: {"image_grid_pinpoints": [[32, 64], [64, 32]]}
        for name in ("llava_next", "llava_next_video", "llava_onevision")
    },
    "deepseek_vl_hybrid": {
        "high_res_vision_config": {
            "mlp_dim": 112, "output_channels": 64, "patch_size": 4, "window_size": 4, "global_attn_indexes": [1],
        },
    },
    "vipllava": {"vision_feature_layers": [-1, -2]},
    "blt": {
        "cross_attn_k": 2, "encoder_hash_byte_group_vocab": 96, "patcher_config": {"cross_attn_k": 2},
        "encoder_config": {"cross_attn_k": 2, "hidden_size_global": 128},
        "decoder_config": {"cross_attn_k": 2, "hidden_size_global": 128},
        "global_config": {"hidden_size": 128, "head_dim": 32},
    },
    "codegen": {"rotary_dim": 8},
    "cohere_compass_text": _TWO_KINDS_OF_ROPE,
    "cpmant": {
        "dim_ff": 112, "dim_head": 16, "position_bias_num_buckets": 32, "prompt_types": 4, "segment_types": 4,
        "prompt_length": 4,
    },
    "ctrl": {"dff": 112},
    "dbrx": {
        "ffn_config": {"moe_top_k": 2, "moe_num_experts": 4, "ffn_hidden_size": 112},
        "attn_config": {"kv_n_heads": 2, "rope_theta": 10000.0, "clip_qkv": 8.0},
    },
    "deepseek_v4": {"o_lora_rank": 16, "o_groups": 2},
    "distilbert": {"hidden_dim": 112},
    "dots3_note": {
        "text_config": _SLIDING_LATENT,
        "audio_config": {
            "adapter_in_dim": 64, "adapter_input_size": 64, "adapter_out_dim": 64, "downsample_hidden_size": 16,
        },
        "vision_config": {"adapter_in_dim": 64, "adapter_out_dim": 64},
    },
    "dots3_note_text": _SLIDING_LATENT,
    "encoder-decoder": {"decoder": {"is_decoder": True, "add_cross_attention": True}},
    "esmc": {"num_key_value_heads": 4},
    "falcon_h1": {"mamba_d_ssm": 128},
    "fsmt": {"src_vocab_size": VOCABULARY, "tgt_vocab_size": VOCABULARY},
    "funnel": {"block_sizes": [1, 1], "n_head": 4, "d_head": 16, "d_inner": 112},
    "gemma3n": {
        "text_config": _SHARED_KEYS, "vision_soft_tokens_per_image": 4,
        "vision_config": {
            "model_args": {"block_args": _MOBILE_BLOCKS, "msfa_output_resolution": 2}, "hidden_size": 2048,
            "vocab_offset": 230, "vocab_size": 10,
        },
        "audio_config": {
            "vocab_offset": 240, "vocab_size": 10, "conf_num_attention_heads": 4, "conf_num_hidden_layers": 1,
        },
    },
    "gemma3n_text": _SHARED_KEYS,
    "gemma4": {"text_config": _PER_LAYER, "vision_config": None, "audio_config": None},
    "gemma4_text": _PER_LAYER,
    "gemma4_unified": {"text_config": {"global_head_dim": 32}, "vision_config": None, "audio_config": None},
    "gemma4_unified_text": {"global_head_dim": 32},
    "gemma3": {"mm_tokens_per_image": 4, "vision_config": {"vision_use_head": False}},
    "glmasr": {"audio_config": {"intermediate_size": 256, "max_source_positions": 32}},
    "got_ocr2": {
        "vision_config": {
            "mlp_dim": 112, "output_channels": 16, "patch_size": 4, "window_size": 4, "global_attn_indexes": [1],
        },
    },
    "gpt_neo": {"attention_types": [[["global", "local"], 1]], "window_size": 8},
    "gptj": {"rotary_dim": 8},
    "granite_speech": {
        "encoder_config": {"hidden_dim": 64, "num_layers": 2, "num_heads": 4, "context_size": 20, "max_pos_emb": 32},
        "projector_config": {"encoder_hidden_size": 64},
    },
    "granite_speech_plus": {
        "encoder_config": {"hidden_dim": 64, "num_layers": 2, "num_heads": 4, "context_size": 20, "max_pos_emb": 32},
        "projector_config": {"encoder_hidden_size": 64},
    },
    "layoutlm": {"max_2d_position_embeddings": 64},
    "longt5": {"decoder_start_token_id": 0},
    "switch_transformers": {"decoder_start_token_id": 0},
    "t5": {"decoder_start_token_id": 0},
    "text:t5gemma": {"is_encoder_decoder": False},
    "t5gemma2": {"encoder": {"mm_tokens_per_image": 4, "vision_config": {"vision_use_head": False}}},
    "nemo_speechlm": {
        "audio_config": {
            "asr_config": {"num_key_value_heads": 4},
            "diarization_config": {
                "audio_config": {"num_key_value_heads": 4}, "head_config": {"audio_hidden_size": 64},
            },
        },
    },
    "vibevoice_asr": {
        "acoustic_tokenizer_encoder_config": {
            "num_filters": 4, "depths": [1, 1], "downsampling_ratios": [2], "vae_std": 0.0,  # of noise on its outputs
        },
        "semantic_tokenizer_encoder_config": {"num_filters": 4, "depths": [1, 1], "downsampling_ratios": [2]},
    },
    "led": {"attention_window": 4, "max_encoder_position_embeddings": 96, "max_decoder_position_embeddings": 96},
    "lfm2_moe": {"layer_types": ["conv", "full_attention", "conv"], "num_hidden_layers": 3},
    "longcat_flash": {"num_layers": 2, "head_dim": 8, "zero_expert_num": 2},
    "longformer": {"attention_window": 4},
    "luke": {"entity_vocab_size": 50, "entity_emb_size": 32},
    "mamba2": {"num_heads": 8, "head_dim": 16},
    "mobilebert": {"embedding_size": 32, "intra_bottleneck_size": 32, "true_hidden_size": 32},
    "modernvbert": {"pixel_shuffle_factor": 2, "vision_config": {"vision_use_head": False}},
    "neomme": {"embedding_size": 64},
    "perceiver": {
        "num_latents": 16, "d_latents": 64, "d_model": 64, "num_self_attends_per_block": 2,
        "num_self_attention_heads": 4, "num_cross_attention_heads": 4, "max_position_embeddings": 17,
    },
    "image:perceiver": {
        "num_latents": 16, "d_latents": 64, "d_model": 64, "num_self_attends_per_block": 2,
        "num_self_attention_heads": 4, "num_cross_attention_heads": 1,
    },
    "phi4_multimodal": {
        "vision_config": {"num_hidden_layers": 3, "crop_size": 32},
        "audio_config": {
            "audio_token_id": 9, "num_blocks": 2, "nemo_conv_channels": 16, "ext_pw_out_channel": 64,
            "depthwise_separable_out_channel": 64, "chunk_size": 16,  # longer than a sound: nothing left to chance
        },
    },
    "qwen3_asr": {"audio_config": {"downsample_hidden_size": 16, "output_dim": 64, "d_model": 64}},
    "qwen4_exp": {"text_config": _INDEXED},
    "qwen4_exp_text": _INDEXED,
    "reformer": {
        "axial_pos_shape": [4, 16], "axial_pos_embds_dim": [16, 48], "feed_forward_size": 112,
        "local_attn_chunk_length": 8, "lsh_attn_chunk_length": 8, "num_buckets": 4, "max_position_embeddings": 64,
        "attention_head_size": 16, "attn_layers": ["local", "lsh"], "hash_seed": 0,
    },
    "paligemma": {"projection_dim": 64, "vision_config": {"projection_dim": 64, "vision_use_head": False}},
    **{
        name: {"text_config": _THREE_POSITIONS}
        for name in ("glm46v", "glm4v", "glm_ocr", "glmga", "qwen2_5_omni_thinker", "qwen2_5_vl")
    },
    "glm4v_moe": {
        "text_config": {
            "rope_parameters": {**_THREE_POSITIONS["rope_parameters"], "mrope_section": [1, 1, 2]},
        },
    },
    **{
        name: {"vision_config": {"deepstack_visual_indexes": [0]}}
        for name in ("cosmos3_omni", "qwen3_vl", "qwen3_vl_moe")
    },
    "qwen2_vl": {"text_config": _THREE_POSITIONS, "vision_config": {"embed_dim": 64, "num_heads": 4}},
    "rembert": {"input_embedding_size": 48, "output_embedding_size": 80},
    "roc_bert": {
        "pronunciation_vocab_size": VOCABULARY, "pronunciation_embed_dim": 64, "shape_vocab_size": VOCABULARY,
        "shape_embed_dim": 64,
    },
    "ultrabert": {"prediction_head_size": 64},
    "ultravbert": {"pixel_shuffle_factor": 2, "vision_config": {"vision_use_head": False}},
    "voxtral": {"audio_token_id": 8, "audio_config": {"intermediate_size": 256}},
    "xlnet": {"d_inner": 112},
    "xmod": {"default_language": "en_XX", "languages": ["en_XX"]},
    "zamba": {
        "num_hidden_layers": 6,
        "layers_block_type": [
            "linear_attention", "linear_attention", "hybrid", "linear_attention", "hybrid", "linear_attention",
        ],
    },
    "zaya": {"num_experts_per_tok": 1, "router_hidden_size": 32},
    # sound
    **dict.fromkeys(("hubert", "unispeech", "unispeech-sat", "wav2vec2", "wav2vec2-conformer", "wavlm"), _WAVE),
    "data2vec-audio": {"conv_dim": [32] * 7, "num_conv_pos_embedding_groups": 4, "classifier_proj_size": 32},
    "granite_speech5_ctc": {"encoder_config": {"context_size": 16, "num_key_value_heads": 4}},
    "moonshine": {
        "encoder_num_hidden_layers": 2, "decoder_num_hidden_layers": 2, "encoder_num_attention_heads": 4,
        "decoder_num_attention_heads": 4,
    },
    **dict.fromkeys(("seamless_m4t", "seamless_m4t_v2"), _SEAMLESS),
    "speech-encoder-decoder": {
        "encoder": _WAVE, "decoder": {"is_decoder": True, "add_cross_attention": True}, "pad_token_id": 0,
        "decoder_start_token_id": 1,
    },
    "pop2piano": {"decoder_start_token_id": 0},
    "speecht5": _WAVE,
    "moonshine_streaming": {"num_key_value_heads": 4},
    "sew": _LONG_WAVE,
    "sew-d": _LONG_WAVE,
    "audio-spectrogram-transformer": {"max_length": 64, "num_mel_bins": 32},
    # pictures beside text
    "aria": {"projector_patch_to_query_dict": {16: 4}},
    "chameleon": {
        "vocabulary_map": {"<image>": 9, **{f"IMGIMG{letter}Z": 30 + code for code, letter in enumerate("ABCDEFGH")}},
        "vq_config": {**_CODES, "num_embeddings": 8, "resolution": 8}, "intermediate_size": 2048,
    },
    "cohere_compass": {"text_config": _TWO_KINDS_OF_ROPE, "vision_config": _GRID_OF_POSITIONS},
    "cosmos3_edge": {
        "text_config": _THREE_POSITIONS, "vision_config": {"num_patches": 16}, "projector_hidden_size": 112,
    },
    "deepseek_ocr2": {
        "text_config": {"mlp_layer_types": ["dense", "sparse"]}, "vision_config": {"sam_config": _SAM},
    },
    "emu3": {
        "vocabulary_map": {
            "<image>": 9, "<|extra_200|>": 10, **{f"<|visual token {code:06d}|>": 30 + code for code in range(8)},
        },
        "vq_config": {**_CODES, "codebook_size": 8, "hidden_size": 32}, "text_config": {"intermediate_size": 4096},
    },
    "ernie4_5_vl_moe": {
        "text_config": {
            "moe_intermediate_size": [48, 32],
            "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 2, 4]},
        },
    },
    "evolla": {
        "aligner_num_add_layers": 1, "resampler_depth": 1, "resampler_dim_head": 16, "resampler_heads": 4,
        "resampler_num_latents": 4,
        "protein_encoder_config": {
            "vocab_size": 60, "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
            "intermediate_size": 112, "max_position_embeddings": 96, "hidden_dropout_prob": 0.0,
            "attention_probs_dropout_prob": 0.0,
        },
    },
    "florence2": {
        "vision_config": {
            "depths": [1, 1, 1, 1], "embed_dim": [16, 32, 48, 64], "num_heads": [2, 2, 4, 4],
            "num_groups": [2, 2, 4, 4], "patch_size": [7, 3, 3, 3], "window_size": 4, "projection_dim": 64,
            "max_temporal_embeddings": 8, "max_position_embeddings": 8,
        },
    },
    "image-text:gemma4": {
        "text_config": _PER_LAYER, "vision_config": {"pooling_kernel_size": 2, "position_embedding_size": 16},
        "audio_config": None,
    },
    "image-text:gemma4_unified": {
        "text_config": {"global_head_dim": 32},
        "vision_config": {
            "pooling_kernel_size": 2, "mm_embed_dim": 64, "mm_posemb_size": 16, "output_proj_dims": 64,
        },
        "audio_config": None,
    },
    "glm5_next": {
        "text_config": {"index_kpool": 4, "qk_rope_head_dim": 0},
        "vision_config": {"projection_intermediate_size": 112},
    },
    "hunyuan_vl": {"text_config": _THREE_POSITIONS, "vision_config": {"max_image_size": 64}},
    "granite4_vision": {
        "image_grid_pinpoints": [[32, 64], [64, 32]], "downsample_rate": "1/2", "deepstack_layer_map": [[-1, 0]],
        "spatial_target_layers": [1, 2, 3, 4], "text_config": {"num_hidden_layers": 5},
        "vision_config": {"hidden_size": 128},
    },
    "granite_docling": {"vision_config": {"scale_factor": 2, "deepstack_visual_indexes": [0], "use_fine_route": False}},
    "idefics": {"freeze_text_layers": False, "freeze_vision_layers": False, "vision_config": {"embed_dim": 64}},
    "inkling2": {"vision_config": {"posemb_grid_size": 4, "projection_hidden_dim": 112, "text_hidden_size": 64}},
    "inkling_mm_model": {"audio_config": {"n_mel_bins": 4, "mel_vocab_size": 20}},
    "instructblipvideo": {"video_token_index": 9, "num_query_tokens": 4},
    "janus": {
        "text_config": {"intermediate_size": 8192}, "vision_config": {"projection_dim": 64},
        "vq_config": {**_CODES, "num_embeddings": 8, "projection_dim": 64, "image_token_embed_dim": 64},
    },
    "kimi_k25": {
        "vision_config": {"pos_emb_height": 4, "pos_emb_width": 4}, "projection_hidden_size": 64,
    },
    "kosmos-2": {"latent_query_num": 4},
    "kosmos-2.5": {"latent_query_num": 4, "vision_config": {"patch_embed_hidden_size": 192, "max_num_patches": 16}},
    "lfm2_vl": {"projector_hidden_size": 112, "vision_config": {"num_patches": 16, "vision_use_head": False}},
    "llama4": {
        "text_config": {"intermediate_size_mlp": 112, "attention_chunk_size": 8},
        "vision_config": {
            "vision_output_dim": 64, "projector_input_dim": 64, "projector_output_dim": 64, "intermediate_size": 256,
        },
    },
    **{
        name: {"image_token_id": 9, "video_token_id": 10, "insert_layer_id": 0, "downsample_mode": "16x"}
        for name in ("minicpm_ocr", "minicpmv4_6", "minicpmv4_7")
    },
    "mllama": {
        "text_config": {"cross_attention_layers": [1]},
        "vision_config": {
            "max_num_tiles": 2, "num_global_layers": 1, "intermediate_layers_indices": [0, 1], "vision_output_dim": 192,
            "supported_aspect_ratios": [[1, 1], [1, 2]],
        },
    },
    "molmo2": {
        "image_patch_id": 9, "vision_config": {"image_size": [32, 32]},
        "adapter_config": {"vision_feature_layer": [1, 0], "text_hidden_size": 64},
    },
    "muse_glimmer": _MUSE,
    "muse_spark": {
        **_MUSE,
        "text_config": {"moe_hidden_size": 64},
        "audio_config": {"patch_sizes": [4, 4], "hidden_sizes": [32, 64], "depths": [1, 1], "out_hidden_size": 64},
    },
    "nemotron_h_omni": {
        "vision_config": {"video_temporal_patch_size": 2, "max_img_size": 32}, "projector_hidden_size": 112,
        "vision_hidden_size": 64, "image_token_id": 9, "audio_token_id": 10, "audio_config": None,
    },
    "paddleocr_vl": {"text_config": _THREE_POSITIONS},
    "pi0": {
        "chunk_size": 7, "max_state_dim": 8, "max_action_dim": 8,
        "vlm_config": {"projection_dim": 64, "vision_config": {"projection_dim": 64, "vision_use_head": False}},
    },
    "pix2struct": {"vision_config": {"patch_embed_hidden_size": 192, "seq_len": 16}},
    "pp_formulanet": {
        "vision_config": {
            **_SAM, "image_size": 32, "post_conv_in_channels": 16, "post_conv_mid_channels": 32,
            "post_conv_out_channels": 64, "decoder_hidden_size": 64,
        },
    },
    "shieldgemma2": {"mm_tokens_per_image": 4, "vision_config": {"vision_use_head": False}},
    "udop": {"max_2d_position_embeddings": 64, "decoder_start_token_id": 0},
    "unlimited_ocr": {"vision_config": {"sam_config": _SAM}},
    "vision-encoder-decoder": {
        "decoder": {"is_decoder": True, "add_cross_attention": True}, "pad_token_id": 0, "decoder_start_token_id": 1,
    },
    "fast_vlm": {
        "vision_config": {
            "architecture": "fastvit_mci3", "hidden_size": 128,
            "model_args": {
                "inference_mode": True, "layers": [1, 1, 1, 1, 1], "embed_dims": [16, 16, 32, 32, 64],
            },
        },
    },
    "perception_lm": {
        "vision_config": {
            "architecture": "vit_pe_core_tiny_patch16_384",
            "model_args": {
                "embed_dim": 64, "depth": 2, "num_heads": 4, "img_size": [32, 32], "patch_size": 8, "global_pool": "",
                "ref_feat_shape": [4, 4], "use_post_transformer_norm": False,
            },
        },
    },
    "timm_wrapper": {
        "architecture": "vit_tiny_patch16_224",
        "model_args": {"embed_dim": 64, "depth": 2, "num_heads": 4, "img_size": 32, "patch_size": 8},
    },
    # speech beside text
    "dia": {
        "decoder_config": {
            "cross_num_attention_heads": 4, "cross_head_dim": 16, "cross_num_key_value_heads": 4,
            "cross_hidden_size": 64, "num_channels": 3, "bos_token_id": 2, "eos_token_id": 1, "pad_token_id": 0,
        },
        "delay_pattern": [0, 1, 2],
    },
    "fun_asr_nano": {
        "audio_config": {"num_timestamp_prediction_layers": 1},
        "adaptor_config": {"hidden_size": 64, "intermediate_size": 16},
    },
    "kyutai_speech_to_text": {
        "num_codebooks": 3, "codebook_vocab_size": 50, "audio_bos_token_id": 49, "audio_pad_token_id": 399,
        "ffn_dim": 2048,
        "codec_config": {
            "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "head_dim": 4, "num_filters": 4,
            "codebook_size": 64, "codebook_dim": 16, "vector_quantization_hidden_dimension": 16, "num_quantizers": 3,
            "upsample_groups": 16, "upsampling_ratios": [2, 2],
        },
    },
    "vibevoice": {
        "audio_config": {
            "num_filters": 4, "depths": [1, 1], "downsampling_ratios": [2], "vae_std": 0.0, "hidden_size": 16,
        },
        "semantic_model_config": {"num_filters": 4, "depths": [1, 1], "downsampling_ratios": [2], "hidden_size": 16},
        "diffusion_head_config": {"frequency_embedding_size": 16},
    },
    # videos and series
    "timesformer": {"num_frames": 4},
    "videomae": {"num_frames": 4},
    "videoprism_vision_model": {"num_frames": 4, "num_spatial_layers": 2, "num_temporal_layers": 2},
    "vivit": {"num_frames": 4, "tubelet_size": [2, 8, 8]},
    "vjepa2": {
        "frames_per_clip": 4, "crop_size": 32, "num_pooler_layers": 2, "pred_hidden_size": 64,
        "pred_num_attention_heads": 4, "pred_num_hidden_layers": 2,
    },
    "timesfm": {"context_length": 128},
    "timesfm2_5": {"context_length": 128},
    # pictures
    "bit": {**_FOUR_STAGES, "embedding_size": 16, "num_groups": 4},
    "convnext": {**_FOUR_STAGES, "num_stages": 4, "patch_size": 4},
    "convnextv2": {**_FOUR_STAGES, "num_stages": 4, "patch_size": 4},
    "cvt": {"embed_dim": [16, 32, 64], "num_heads": [1, 2, 4], "depth": [1, 2, 3], "drop_path_rate": [0.0, 0.0, 0.0]},
    "donut-swin": _WINDOWS,
    "efficientnet": {"width_coefficient": 0.25, "depth_coefficient": 0.25, "hidden_dim": 320},
    "focalnet": {
        "embed_dim": 16, "hidden_sizes": [16, 32], "depths": [1, 2], "focal_levels": [2, 2], "focal_windows": [3, 3],
        "patch_size": 4,
    },
    "hgnet_v2": {
        **_FOUR_STAGES, "embedding_size": 16, "stem_channels": [3, 8, 16], "stage_in_channels": [16, 16, 32, 48],
        "stage_mid_channels": [8, 8, 16, 16], "stage_out_channels": [16, 32, 48, 64], "stage_num_blocks": [1, 1, 1, 1],
        "stage_numb_of_layers": [2, 2, 2, 2],
    },
    "dinat": {"embed_dim": 16, "depths": [1, 2], "num_heads": [2, 4], "kernel_size": 3},
    "hiera": {
        "embed_dim": 16, "image_size": [32, 32], "depths": [1, 1, 1, 1], "num_heads": [1, 2, 4, 8],
        "masked_unit_size": [8, 8], "patch_size": [7, 7],
    },
    "imagegpt": {"n_positions": 96},
    "levit": {
        "hidden_sizes": [32, 48, 64], "num_attention_heads": [2, 3, 4], "depths": [1, 1, 1], "key_dim": [8, 8, 8],
        "image_size": 64, "patch_size": 16,
    },
    "siglip2": {"vision_config": {"num_patches": 16}},
    "mobilenet_v1": {"depth_multiplier": 0.25},
    "mobilenet_v2": {"depth_multiplier": 0.25},
    "mobilevit": {
        "hidden_sizes": [32, 48, 64], "neck_hidden_sizes": [8, 8, 16, 16, 32, 32, 64], "aspp_out_channels": 16,
        "patch_size": 2, "image_size": 64,
    },
    "mobilevitv2": {
        "width_multiplier": 0.25, "patch_size": 2, "image_size": 64, "base_attn_unit_dims": [128, 192, 256],
        "n_attn_blocks": [1, 1, 1],
    },
    "poolformer": {**_FOUR_STAGES},
    "pp_lcnet": {"scale": 0.25, "class_expand": 64},
    "pvt": {**_PYRAMID, "image_size": 64},
    "pvt_v2": {**_PYRAMID, "image_size": 64},
    "regnet": {**_FOUR_STAGES, "embedding_size": 16, "groups_width": 8},
    "resnet": {**_FOUR_STAGES, "embedding_size": 16},
    "segformer": {**_PYRAMID},
    "swiftformer": {"embed_dims": [16, 24, 32, 48], "depths": [1, 1, 1, 1], "image_size": 64},
    "swin": _WINDOWS,
    "swinv2": _WINDOWS,
    "textnet": {"image_size": [32, 32], "hidden_sizes": [16, 16, 24, 32, 48], "stem_out_channels": 16},
}

# What cannot be trained alone with what is installed, or has no batch here yet, and why.
LEFT_OUT: dict[tuple[str, str], str] = {
    **{(group, "layoutlmv2"): "it needs the package detectron2" for group in ("sequence", "token", "question")},
    ("image", "dinat"): "its attention is natten's kernels; the package natten is not installed",
    ("image", "pp_lcnet"): "it has no loss",
    ("image", "shieldgemma2"): "it has no loss, and takes a picture and text together",
    ("image-text", "diffusion_gemma"): "it has no loss",
    ("causal", "gemma4_assistant"): "it has no loss, and reads another model's keys and values",
    ("causal", "gemma4_unified_assistant"): "it has no loss, and reads another model's keys and values",
}
# fmt: on

TIMM = frozenset(
    {
        ("image-text", "fast_vlm"),
        ("image-text", "gemma3n"),
        ("image-text", "perception_lm"),
        ("image", "timm_wrapper"),
        ("causal", "gemma3n"),
    }
)
"""What has a vision tower of timm, or is one."""


def why_left_out(group: str, name: str) -> str:
    """The reason, or nothing if it can be tried."""
    if (group, name) in TIMM and find_spec("timm") is None:
        return "its vision tower is a timm model; the package timm is not installed (make zoo-others installs it)"
    return LEFT_OUT.get((group, name), "")


# The fewest all-reduces per layer in forward that are known where every product is divided: one for each part that ends
# in a row-parallel product (attention, cross-attention, a state-space mixer, an MLP or mixture), one for parts side by
# side, and one for whatever a part needs of all ranks on its way. Two where not said.
LEAST_ALL_REDUCES: dict[str, float] = {
    **dict.fromkeys(("codegen", "cohere", "cohere2", "cohere2_moe", "falcon", "gpt_neox", "gptj", "phi"), 1.0),
    **dict.fromkeys(("mamba2", "nemotron_h"), 1.0),
    **dict.fromkeys(("bart", "bigbird_pegasus", "blenderbot", "blenderbot-small", "marian", "mbart", "mvp"), 3.0),
    **dict.fromkeys(("pegasus", "plbart", "prophetnet", "trocr", "whisper", "musicgen"), 3.0),
    # Mamba's x_proj makes what all channels share of the channels that the ranks divide; jamba and zamba have other
    # parts beside. Half of zamba2's layers are a mixer with a norm over all channels, the others that, attention, an
    # MLP with an adapter, and a product after them.
    **dict.fromkeys(("mamba", "falcon_mamba"), 2.0),
    **dict.fromkeys(("jamba", "zamba"), 3.0),
    "zamba2": 4.0,
    # Norms over all heads, or over a whole row-parallel input: a statistic of [tokens, 1] each; in half of minimax's
    # layers, one of two parts of olmo_hybrid's.
    **dict.fromkeys(("bitnet", "flex_olmo", "minimax_m2", "olmo2", "olmo3", "olmoe"), 4.0),
    "minimax": 2.5,
    "olmo_hybrid": 3.0,
    # The latents of queries and of keys and values: each is normalized and read by all heads. (Megatron-LM computes
    # them on every rank instead.)
    **dict.fromkeys(("axk1", "deepseek_v2", "deepseek_v3", "glm4_moe_lite", "kimi_linear", "longcat_flash"), 4.0),
    **dict.fromkeys(("minicpm3", "youtu"), 4.0),
    "bailing_hybrid": 2.5,
    # Three parts: a gate over the values of all heads, an input of each layer's own, an adapter.
    **dict.fromkeys(("doge", "gemma4", "gemma4_text", "xmod"), 3.0),
}
