"""Pictures for the models that read them beside text: one per sample, in the shape that each kind of tower takes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Generator, Tensor

BATCH = 3

LENGTH = 17
"""Of a text without placeholders."""

FIRST_ORDINARY_TOKEN = 40
"""Those below it are special, or stand for what is not text."""

Inputs = dict[str, Any]
Placeholders = dict[int, int]
"""How many tokens of each id stand in a sample's text for what is not text."""
PLACE = 9
"""The token where a model's text has no token of its own for a picture."""
Maker = Callable[[Any, Generator], tuple[Inputs, Placeholders]]
"""From a config: what the model takes beside its text, and the placeholders for it."""


def picture(size: Any, generator: Generator) -> Tensor:
    """``[3, 3, height, width]``."""
    height, width = size if isinstance(size, list | tuple) else (size, size)
    return torch.randn(BATCH, 3, height, width, generator=generator)


def pictures(tokens: int, images: bool = False) -> Maker:
    """One picture per sample, ``tokens`` tokens each; with a dim of pictures per sample where ``images``."""

    def make(config: Any, generator: Generator) -> tuple[Inputs, Placeholders]:
        vision = getattr(config, "vision_config", None) or config.encoder.vision_config
        pixels = picture(vision.image_size, generator)
        return {"pixel_values": pixels.unsqueeze(1) if images else pixels}, {config.image_token_id: tokens}

    return make


def grid(config: Any, generator: Generator) -> tuple[Inputs, Placeholders]:
    """A picture of four by four flat patches per sample, all samples' in one row; two by two become one token."""
    vision = config.vision_config
    size = 3 * getattr(vision, "temporal_patch_size", 1) * vision.patch_size**2
    inputs = {
        "pixel_values": torch.randn(BATCH * 16, size, generator=generator),
        "image_grid_thw": torch.tensor([[1, 4, 4]]).expand(BATCH, 3).clone(),
    }
    return inputs, {config.image_token_id: 4}


def sized(config: Any, generator: Generator) -> tuple[Inputs, Placeholders]:
    """A picture per sample, and how large it is."""
    inputs, placeholders = pictures(4)(config, generator)
    return inputs | {"image_sizes": torch.full((BATCH, 2), config.vision_config.image_size)}, placeholders


def cropped(tokens: int) -> Maker:
    """A wide picture per sample, once scaled to a crop and once as its two crops, and how large it is."""

    def make(config: Any, generator: Generator) -> tuple[Inputs, Placeholders]:
        size = config.vision_config.image_size
        pixels = torch.stack([picture(size, generator) for _ in range(3)], dim=1)
        return {"pixel_values": pixels, "image_sizes": torch.tensor([[size, 2 * size]] * BATCH)}, {
            config.image_token_id: tokens
        }

    return make


def asked(config: Any, generator: Generator) -> tuple[Inputs, Placeholders]:
    """A picture per sample, of which queries that read the question make tokens."""
    inputs, placeholders = pictures(config.num_query_tokens)(config, generator)
    question = torch.randint(FIRST_ORDINARY_TOKEN, config.qformer_config.vocab_size, (BATCH, 5), generator=generator)
    return inputs | {"qformer_input_ids": question}, placeholders


def two_sizes(config: Any, generator: Generator) -> tuple[Inputs, Placeholders]:
    """A picture per sample, in two sizes for two towers."""
    inputs, placeholders = pictures(16)(config, generator)
    size = config.high_res_vision_config.image_size
    return inputs | {"high_res_pixel_values": picture(size, generator)}, placeholders


def captioned(config: Any, generator: Generator) -> tuple[Inputs, Placeholders]:
    """Attended to without placeholders."""
    return {"pixel_values": picture(config.vision_config.image_size, generator)}, {}


def patches(config: Any, generator: Generator) -> tuple[Inputs, Placeholders]:
    """Four flat patches per sample."""
    flat = torch.randn(BATCH, 4, 3 * config.patch_size**2, generator=generator)
    return {"pixel_values": flat}, {config.image_token_id: 4}


def packed_patches(config: Any, generator: Generator) -> tuple[Inputs, Placeholders]:
    """Four flat patches per sample, all samples' in one row."""
    inputs, placeholders = patches(config, generator)
    return {"pixel_values": inputs["pixel_values"].flatten(0, 1)}, placeholders


def regions(config: Any, generator: Generator) -> tuple[Inputs, Placeholders]:
    """Features ``[batch, regions, features]`` of regions of a picture, and where they are ``[batch, regions, 4]``."""
    regions = 5
    features = torch.randn(BATCH, regions, config.visual_feat_dim, generator=generator)
    corners = torch.rand(BATCH, regions, 2, 2, generator=generator).sort(2).values
    return {"visual_feats": features, "visual_pos": corners.flatten(2)}, {}


def coded(config: Any, generator: Generator) -> tuple[Inputs, Placeholders]:
    """A picture per sample, of which a frozen tower makes ids of the text's vocabulary: four by four of 8 pixels."""
    return {"pixel_values": picture(8, generator)}, {config.image_token_id: 16}


def coded_in_rows(config: Any, generator: Generator) -> tuple[Inputs, Placeholders]:
    """The same, each row of ids ended by one more; and how large the picture is."""
    inputs, _ = coded(config, generator)
    return inputs | {"image_sizes": torch.full((BATCH, 2), 8)}, {config.image_token_id: 4 * (4 + 1)}


def grid_of_pixels(config: Any, generator: Generator) -> tuple[Inputs, Placeholders]:
    """Like :func:`grid`, each patch ``[3, side, side]``."""
    inputs, placeholders = grid(config, generator)
    side = config.vision_config.patch_size
    return inputs | {"pixel_values": inputs["pixel_values"].unflatten(1, (3, side, side))}, placeholders


def grid_of_frames(config: Any, generator: Generator) -> tuple[Inputs, Placeholders]:
    """Like :func:`grid`, each patch of as many frames as the config's ``patch_temporal`` says."""
    inputs, placeholders = grid(config, generator)
    pixels = inputs["pixel_values"]
    return inputs | {"pixel_values": pixels.repeat(1, config.vision_config.patch_temporal)}, placeholders


def grid_in_rows(config: Any, generator: Generator) -> tuple[Inputs, Placeholders]:
    """Like :func:`grid`, where each row of tokens gets an end, and the picture a beginning and an end."""
    inputs, placeholders = grid(config, generator)
    return inputs, dict.fromkeys(placeholders, 2 * (2 + 1) + 2)


def grid_of_merged(config: Any, generator: Generator) -> tuple[Inputs, Placeholders]:
    """Two by two patches of ``[2 * side, 2 * side, 3]`` per sample, all samples' in one row; a token each."""
    side = config.vision_config.spatial_merge_size * config.vision_config.patch_size
    inputs = {
        "pixel_values": torch.randn(BATCH * 4, side, side, 3, generator=generator),
        "image_grid_thw": torch.tensor([[1, 2, 2]]).expand(BATCH, 3).clone(),
    }
    return inputs, {config.image_token_id: 4}


def grid_and_merges(config: Any, generator: Generator) -> tuple[Inputs, Placeholders]:
    """Like :func:`grid`, and over how many patches a token goes each way."""
    inputs, placeholders = grid(config, generator)
    return inputs | {"image_merge_sizes": torch.full((BATCH,), 2)}, placeholders


def strip(config: Any, generator: Generator) -> tuple[Inputs, Placeholders]:
    """Pictures of four by four patches, all in one strip ``[1, 3, side, patches * side]``, and how large each is."""
    side = config.vision_config.patch_size
    inputs = {
        "pixel_values": torch.randn(1, 3, side, BATCH * 16 * side, generator=generator),
        "target_sizes": torch.full((BATCH, 2), 4),
    }
    return inputs, {config.image_token_id: 1}


def grid_of_two(config: Any, generator: Generator) -> tuple[Inputs, Placeholders]:
    """Like :func:`grid`, where the picture is no video of one frame: its size has two numbers."""
    inputs, placeholders = grid(config, generator)
    return {"pixel_values": inputs["pixel_values"], "image_grid_hw": inputs["image_grid_thw"][:, 1:]}, placeholders


def padded_patches(config: Any, generator: Generator) -> tuple[Inputs, Placeholders]:
    """Four by four flat patches per sample, which of them are none, and how large the picture is."""
    size = 3 * config.vision_config.patch_size**2
    inputs = {
        "pixel_values": torch.randn(BATCH, 16, size, generator=generator),
        "pixel_attention_mask": torch.ones(BATCH, 16, dtype=torch.long),
        "spatial_shapes": torch.full((BATCH, 2), 4),
    }
    return inputs, {config.image_token_id: 4}


def placed_patches(merged: bool = False) -> Maker:
    """Flat patches per sample, and the column and row of each: four by four, or two by two that are as large."""

    def make(config: Any, generator: Generator) -> tuple[Inputs, Placeholders]:
        vision = config.vision_config
        rows = torch.arange(2 if merged else 4)
        side = vision.patch_size * (vision.pooling_kernel_size if merged else 1)
        places = torch.cartesian_prod(rows, rows).flip(-1)
        inputs = {
            "pixel_values": torch.rand(BATCH, len(places), 3 * side**2, generator=generator),
            "image_position_ids": places.expand(BATCH, -1, -1).clone(),
        }
        return inputs, {config.image_token_id: 4}

    return make


def numbered_patches(tokens: int) -> Maker:
    """Four by four flat patches per sample, each with its row and column before its pixels."""

    def make(config: Any, generator: Generator) -> tuple[Inputs, Placeholders]:
        size = config.vision_config.patch_embed_hidden_size
        places = torch.cartesian_prod(torch.arange(1.0, 5.0), torch.arange(1.0, 5.0)).expand(BATCH, 16, 2)
        pixels = torch.randn(BATCH, 16, size, generator=generator)
        return {"flattened_patches": torch.cat([places, pixels], dim=-1)}, {PLACE: tokens} if tokens else {}

    return make


def marked(config: Any, generator: Generator) -> tuple[Inputs, Placeholders]:
    """A picture per sample, of which queries make tokens for the places that a mask tells."""
    return {"pixel_values": picture(config.vision_config.image_size, generator)}, {PLACE: config.latent_query_num}


def tiles(config: Any, generator: Generator) -> tuple[Inputs, Placeholders]:
    """A picture of two tiles per sample, attended to without placeholders."""
    size = config.vision_config.image_size
    inputs = {
        "pixel_values": torch.randn(BATCH, 1, config.vision_config.max_num_tiles, 3, size, size, generator=generator),
        "aspect_ratio_ids": torch.full((BATCH, 1), 2),
        "aspect_ratio_mask": torch.ones(BATCH, 1, config.vision_config.max_num_tiles, dtype=torch.long),
    }
    return inputs, {}


def tiles_to_choose(config: Any, generator: Generator) -> tuple[Inputs, Placeholders]:
    """A picture of one tile per sample, and that it is one."""
    pixels = picture(config.vision_config.image_size, generator)
    inputs = {"pixel_values": pixels.unsqueeze(1), "pixel_attention_mask": torch.ones(BATCH, 1, dtype=torch.bool)}
    return inputs, {config.image_token_id: 4}


def pooled_patches(config: Any, generator: Generator) -> tuple[Inputs, Placeholders]:
    """A picture of flat patches per sample, and which four of them become a token."""
    patches = config.vision_config.num_position_embeddings
    size = 3 * config.vision_config.patch_size**2
    inputs = {
        "pixel_values": torch.randn(BATCH, patches, size, generator=generator),
        "image_token_pooling": torch.arange(BATCH * patches).view(-1, 4),
        "image_grids": torch.tensor([[2, patches // 8, 0, 0]]).expand(BATCH, 4).clone(),
        "image_num_crops": torch.ones(BATCH, dtype=torch.long),
    }
    return inputs, {config.image_token_id: patches // 4}


def cubes(config: Any, generator: Generator) -> tuple[Inputs, Placeholders]:
    """Four patches of some frames per sample, all samples' in one row ``[.., frames, side, side, 3]``."""
    vision = config.vision_config
    shape = (BATCH * 4, vision.temporal_patch_size, vision.patch_size, vision.patch_size, 3)
    return {"pixel_values": torch.randn(shape, generator=generator)}, {config.image_token_id: 4}


def one_of_many(config: Any, generator: Generator) -> tuple[Inputs, Placeholders]:
    """A picture per sample ``[batch, 1, 3, side, side]``, attended to without placeholders."""
    return {"pixel_values": picture(config.vision_config.image_size, generator).unsqueeze(1)}, {}


def asked_frames(config: Any, generator: Generator) -> tuple[Inputs, Placeholders]:
    """Two frames per sample, of each of which queries that read the question make tokens."""
    inputs, _ = captioned(config, generator)
    frames = inputs["pixel_values"].unsqueeze(1).repeat(1, 2, 1, 1, 1)
    question = torch.randint(FIRST_ORDINARY_TOKEN, config.qformer_config.vocab_size, (BATCH, 5), generator=generator)
    tokens = {config.video_token_index: 2 * config.num_query_tokens}
    return {"pixel_values": frames, "qformer_input_ids": question}, tokens


def on_a_page(config: Any, generator: Generator) -> tuple[Inputs, Placeholders]:
    """The picture of a page per sample, whose patches stand beside the tokens."""
    return {"pixel_values": picture(config.image_size, generator)}, {}


def seen_by_a_robot(config: Any, generator: Generator) -> tuple[Inputs, Placeholders]:
    """What two cameras see, the state a robot is in, and the actions that are to be learnt, with noise of some time."""
    vision = config.vlm_config.vision_config
    actions = (BATCH, config.chunk_size, config.max_action_dim)
    inputs = {
        "pixel_values": torch.randn(BATCH, 2, 3, vision.image_size, vision.image_size, generator=generator),
        "pixel_attention_mask": torch.ones(BATCH, 2, dtype=torch.bool),
        "state": torch.randn(BATCH, config.max_state_dim, generator=generator),
        "actions": torch.randn(actions, generator=generator),
        "noise": torch.randn(actions, generator=generator),
        "timestep": torch.rand(BATCH, generator=generator),
    }
    return inputs, {config.vlm_config.image_token_id: 2 * (vision.image_size // vision.patch_size) ** 2}


def chain(config: Any, generator: Generator) -> tuple[Inputs, Placeholders]:
    """Not of a picture: the amino acids of a protein per sample, attended to without placeholders."""
    acids = torch.randint(4, config.protein_encoder_config.vocab_size, (BATCH, 11), generator=generator)
    return {"protein_input_ids": acids, "protein_attention_mask": torch.ones_like(acids)}, {}


def tokens_of_towers(tokens: int) -> Maker:
    """A picture per sample for two towers, one after the other."""

    def make(config: Any, generator: Generator) -> tuple[Inputs, Placeholders]:
        pixels = picture(config.vision_config.sam_config.image_size, generator)
        return {"pixel_values": pixels}, {config.image_token_id: tokens}

    return make


def of_size(size: int, tokens: int, images: bool = False) -> Maker:
    """A picture per sample, where the config does not say how large; with a dim of pictures where ``images``."""

    def make(config: Any, generator: Generator) -> tuple[Inputs, Placeholders]:
        pixels = picture(size, generator)
        placeholders = {config.image_token_id: tokens} if tokens else {}
        return {"pixel_values": pixels.unsqueeze(1) if images else pixels}, placeholders

    return make
