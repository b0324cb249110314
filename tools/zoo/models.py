"""Builds every architecture from the table of tiny sizes."""

from __future__ import annotations

import copy
import re
from collections.abc import Mapping
from dataclasses import MISSING, fields
from typing import Any

import torch
import transformers
from torch import nn
from transformers import CONFIG_MAPPING, PreTrainedConfig, PreTrainedModel
from transformers.models.auto import modeling_auto

from zoo.configs import LATENT_SIZES, LAYERS, OVERRIDES, SIZES, VOCABULARY

GROUPS: dict[str, Mapping[str, Any]] = {
    "causal": modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    "seq2seq": modeling_auto.MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES,
    "masked": modeling_auto.MODEL_FOR_MASKED_LM_MAPPING_NAMES,
    "image": modeling_auto.MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING_NAMES,
    "sequence": modeling_auto.MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES,
    "token": modeling_auto.MODEL_FOR_TOKEN_CLASSIFICATION_MAPPING_NAMES,
    "question": modeling_auto.MODEL_FOR_QUESTION_ANSWERING_MAPPING_NAMES,
    "image-text": modeling_auto.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
    "text": modeling_auto.MODEL_FOR_TEXT_ENCODING_MAPPING_NAMES,
    "ctc": modeling_auto.MODEL_FOR_CTC_MAPPING_NAMES,
    "audio": modeling_auto.MODEL_FOR_AUDIO_CLASSIFICATION_MAPPING_NAMES,
    "speech": modeling_auto.MODEL_FOR_SPEECH_SEQ_2_SEQ_MAPPING_NAMES,
    "video": modeling_auto.MODEL_FOR_VIDEO_CLASSIFICATION_MAPPING_NAMES,
    "series": modeling_auto.MODEL_FOR_TIME_SERIES_PREDICTION_MAPPING_NAMES,
}
# Fields that give every layer its kind; a tiny model has one layer of each kind at least.
_KINDS = ("layer_types", "mlp_layer_types", "layers_block_type")
_RANDOM = re.compile(r"drop|jitter|mask_(time|feature)_prob")
_SPECIAL_TOKEN = re.compile(r"_(token_id|token_index|index)$")
_FIRST_SPECIAL_TOKEN = 8
_STIR = 0.02


def architectures(group: str) -> tuple[str, ...]:
    """Every ``model_type`` of a group, in transformers' order."""
    return tuple(GROUPS[group])


def tiny_config(name: str, group: str = "causal", **changes: Any) -> PreTrainedConfig:
    """The architecture's config with tiny sizes and nothing random in it."""
    cls = CONFIG_MAPPING[name]
    role: dict[str, Any] = {"is_decoder": True} if group == "causal" and "is_decoder" in _defaults(cls) else {}
    if group == "question":  # where an answer begins and where it ends
        role["num_labels"] = 2
    if group == "token":  # heads drop out by a tenth where a config does not say
        role["classifier_dropout"] = 0.0
    # A copy: code may change what it is given.
    override = copy.deepcopy(OVERRIDES.get(f"{group}:{name}", OVERRIDES.get(name, {})))
    return _tiny(cls, role | override | changes)


def build(name: str, group: str = "causal", **changes: Any) -> PreTrainedModel:
    """The architecture's model of its tiny config, with some changes; random weights from torch's generator."""
    names = GROUPS[group][name]
    cls = getattr(transformers, names if isinstance(names, str) else names[0])
    config = tiny_config(name, group, **changes)
    if not isinstance(config, cls.config_class):  # the mapping names a part of a larger model
        parts = [getattr(config, key) for key in config.sub_configs]
        config = next((part for part in parts if isinstance(part, cls.config_class)), config)
    return cls._from_config(config)


def stir(model: nn.Module, seed: int = 0) -> None:
    """Move every weight a little: the zeros and ones of an initialization would hide mistakes."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=generator) * _STIR)


def layer_count(config: PreTrainedConfig) -> int:
    """Number of layers, encoder and decoder together, or of all towers."""
    text = config.get_text_config()
    if config.is_encoder_decoder:
        return sum(int(getattr(text, f"{part}_layers", 0) or 0) for part in ("encoder", "decoder")) or 2 * LAYERS
    layers = getattr(text, "num_hidden_layers", 0) or LAYERS
    return sum(layers.values()) if isinstance(layers, Mapping) else int(layers)


def _defaults(cls: type[PreTrainedConfig]) -> dict[str, Any]:
    """The fields of a config class with their defaults."""
    values: dict[str, Any] = {}
    for field in fields(cls):
        if field.default is not MISSING:
            values[field.name] = field.default
        else:
            values[field.name] = None if field.default_factory is MISSING else field.default_factory()
    return values


def _tiny(cls: type[PreTrainedConfig], override: Mapping[str, Any]) -> PreTrainedConfig:
    defaults = _defaults(cls)
    sizes = SIZES | LATENT_SIZES if "kv_lora_rank" in defaults else SIZES
    chosen: dict[str, Any] = {}
    for name, value in sizes.items():
        actual = name if name in defaults else cls.attribute_map.get(name, name)
        if actual in defaults or name == "num_labels":
            chosen[actual] = value
    special = _FIRST_SPECIAL_TOKEN
    for name, value in defaults.items():
        if not isinstance(value, float | int) or isinstance(value, bool):
            continue
        if _RANDOM.search(name):
            chosen[name] = type(value)(0)
        elif _SPECIAL_TOKEN.search(name) and value >= VOCABULARY and name not in chosen:
            chosen[name], special = special, special + 1
    parts = cls.sub_configs_defaults
    plain = {key: value for key, value in override.items() if key not in parts or value is None}
    if "num_hidden_layers" not in plain:
        chosen |= _one_of_each_kind(cls, defaults.keys() - plain.keys())
    for key, specification in parts.items():
        if key not in plain and key != "backbone_config":
            part = getattr(specification, "config_class", specification)
            if not (isinstance(part, type) and issubclass(part, PreTrainedConfig)):
                part = CONFIG_MAPPING[specification.model_type]
            chosen[key] = _tiny(part, override.get(key, {}))
    return cls(**(chosen | plain))


def _one_of_each_kind(cls: type[PreTrainedConfig], names: set[str]) -> dict[str, Any]:
    """Fields that make a stack in which every kind of layer of the default config appears."""
    try:
        default = cls()
    except Exception:  # a config without working defaults tells no kinds
        return {}
    kinds: dict[str, list[str]] = {}
    for name in _KINDS:
        value = getattr(default, name, None)
        if name in names and isinstance(value, list):
            kinds[name] = list(dict.fromkeys(value))
    if not kinds:
        return {}
    layers = max(LAYERS, *map(len, kinds.values()))
    lists = {name: [values[index % len(values)] for index in range(layers)] for name, values in kinds.items()}
    return {cls.attribute_map.get("num_hidden_layers", "num_hidden_layers"): layers} | lists
