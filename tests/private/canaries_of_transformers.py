"""Canaries of transformers: how it loads and saves weights."""

from __future__ import annotations

import copy
import inspect
import tempfile
from functools import cache
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from canaries import canary
from torch import Tensor, nn


@cache
def tiny() -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=8, hidden_size=4, intermediate_size=4, num_hidden_layers=1, num_attention_heads=1,
            tie_word_embeddings=True,
        )
    )  # fmt: skip


@cache
def loaded() -> tuple[Any, list[Any]]:
    """A model that was loaded, and the calls of the step that reads: its arguments and what it gave."""
    from transformers import PreTrainedModel

    calls = []
    before = PreTrainedModel.__dict__["_load_pretrained_model"]
    assert isinstance(before, staticmethod)

    def step(model: Any, state_dict: Any, checkpoint_files: Any, load_config: Any, **kwargs: Any) -> Any:
        result = before.__func__(model, state_dict, checkpoint_files, load_config, **kwargs)
        calls.append((model, state_dict, checkpoint_files, load_config, result))
        return result

    with tempfile.TemporaryDirectory() as folder:
        tiny().save_pretrained(folder)
        PreTrainedModel._load_pretrained_model = staticmethod(step)
        try:
            model = type(tiny()).from_pretrained(folder)
        finally:
            PreTrainedModel._load_pretrained_model = before
    return model, calls


@canary("transformers.PreTrainedModel._load_pretrained_model")
def _(_: Any) -> None:
    model, [(given, state_dict, files, _, (_, _))] = loaded()
    assert given is model
    assert state_dict is None
    assert [Path(file).name for file in files] == ["model.safetensors"]


@canary("transformers.modeling_utils.LoadStateDictConfig")
def _(kind: Any) -> None:
    _, [(*_, config, _)] = loaded()
    assert isinstance(config, kind)
    assert not config.is_quantized
    assert (config.hf_quantizer, config.ignore_mismatched_sizes, config.device_map or None) == (None, False, None)
    assert Path(config.pretrained_model_name_or_path).is_absolute()


@canary("transformers.utils.loading_report.LoadStateDictInfo")
def _(kind: Any) -> None:
    _, [(*_, (info, _))] = loaded()
    assert isinstance(info, kind)
    assert (info.conversion_errors, info.mismatched_keys) == ({}, set())
    assert info.missing_and_mismatched() == set()
    info.missing_keys.add("a")
    assert info.missing_and_mismatched() == {"a"}
    info.missing_keys.remove("a")


@canary("transformers.core_model_loading.convert_and_load_state_dict_in_model")
def _(load: Any) -> None:
    """Tensors are asked for through slicing and ``to``: what stands for them may be anything that has these."""
    import dataclasses

    model, [(*_, config, _)] = loaded()
    twin, asked = copy.deepcopy(model), []

    class Unread:
        def __init__(self, tensor: Tensor) -> None:
            self.tensor = tensor

        def __getitem__(self, where: Any) -> Unread:
            return self

        def to(self, device: Any = None, dtype: Any = None) -> Tensor:
            asked.append(device)
            return torch.ones(self.tensor.shape, device="meta")

    state = {name: Unread(value) for name, value in model.state_dict().items() if name != "lm_head.weight"}
    settings = dataclasses.replace(config, device_map={"": "meta"})
    info, _ = load(model=twin, state_dict=state, load_config=settings)
    assert len(asked) == len(state)
    assert info.mismatched_keys == set()
    assert {name for name, value in twin.named_parameters() if value.is_meta} == set(state)


@canary("transformers.PreTrainedModel._weight_conversions", "transformers.core_model_loading.revert_weight_conversion")
def _(_: Any) -> None:
    """What from_pretrained leaves on a model is undone, and that can be other conversions."""
    from transformers.core_model_loading import WeightRenaming, revert_weight_conversion

    model, _ = loaded()
    assert model._weight_conversions is not None
    assert getattr(tiny(), "_weight_conversions", None) is None
    twin = copy.deepcopy(model)
    twin._weight_conversions = [WeightRenaming("before", "norm")]
    assert set(revert_weight_conversion(twin, {"norm.weight": torch.ones(1)})) == {"before.weight"}


@canary("transformers.conversion_mapping.get_model_conversion_mapping")
def _(mapping: Any) -> None:
    from transformers import MixtralConfig, MixtralForCausalLM

    with torch.device("meta"):
        config = MixtralConfig(
            vocab_size=8, hidden_size=4, intermediate_size=4, num_hidden_layers=1, num_attention_heads=1,
            num_key_value_heads=1, num_local_experts=2,
        )  # fmt: skip
        model = MixtralForCausalLM(config)
    assert any(getattr(conversion, "operations", ()) for conversion in mapping(model))


@canary(
    "transformers.core_model_loading.WeightRenaming._original_source_patterns",
    "transformers.core_model_loading.WeightRenaming._original_target_patterns",
    "transformers.core_model_loading.WeightRenaming.scope_prefix",
)
def _(_: Any) -> None:
    from transformers.core_model_loading import WeightRenaming

    one = WeightRenaming("^a", "b")
    assert (list(one._original_source_patterns), list(one._original_target_patterns)) == (["^a"], ["b"])
    assert one.scope_prefix is None


@canary("transformers.PreTrainedModel._keys_to_ignore_on_save")
def _(_: Any) -> None:
    model = copy.deepcopy(tiny())
    assert not model._keys_to_ignore_on_save
    model._keys_to_ignore_on_save = ["model.norm.weight"]
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        from safetensors import safe_open

        with safe_open(Path(folder) / "model.safetensors", "pt") as file:
            assert "model.norm.weight" not in file.keys()  # noqa: SIM118


@canary("transformers.modeling_utils.remove_tied_weights_from_state_dict")
def _(remove: Any) -> None:
    """Ties are found by memory: tensors of one element can stand for weights."""
    one = torch.empty(1)
    state = {"model.embed_tokens.weight": one, "lm_head.weight": one, "model.norm.weight": torch.empty(1)}
    assert set(remove(state, tiny())) == {"model.embed_tokens.weight", "model.norm.weight"}


@canary("transformers.PreTrainedModel.all_tied_weights_keys", "transformers.PreTrainedModel.get_parameter_or_buffer")
def _(_: Any) -> None:
    model = tiny()
    assert model.all_tied_weights_keys == {"lm_head.weight": "model.embed_tokens.weight"}
    assert model.get_parameter_or_buffer("lm_head.weight") is model.lm_head.weight


@canary("transformers.dynamic_module_utils.custom_object_save")
def _(save: Any) -> None:
    assert list(inspect.signature(save).parameters) == ["obj", "folder", "config"]


@canary("transformers.models.auto.tokenization_auto.tokenizer_class_from_name")
def _(class_of: Any) -> None:
    assert "vocab_file" in class_of("BertTokenizer").vocab_files_names
    assert class_of("") is None


@canary(
    "transformers.tokenization_utils_base.ADDED_TOKENS_FILE",
    "transformers.tokenization_utils_base.FULL_TOKENIZER_FILE",
    "transformers.tokenization_utils_base.SPECIAL_TOKENS_MAP_FILE",
    "transformers.tokenization_utils_base.TOKENIZER_CONFIG_FILE",
    "transformers.utils.FEATURE_EXTRACTOR_NAME",
    "transformers.utils.PROCESSOR_NAME",
    "transformers.utils.SAFE_WEIGHTS_INDEX_NAME",
    "transformers.utils.VIDEO_PROCESSOR_NAME",
    "transformers.utils.hub.CHAT_TEMPLATE_FILE",
    "transformers.utils.hub.LEGACY_PROCESSOR_CHAT_TEMPLATE_FILE",
)
def _(name: Any) -> None:
    assert Path(name).name == name
    assert Path(name).suffix in (".json", ".jinja")


@canary("transformers.utils.hub.CHAT_TEMPLATE_DIR")
def _(name: Any) -> None:
    assert Path(name).name == name
    assert not Path(name).suffix


@canary("transformers.utils.hub.cached_files")
def _(function: Any) -> None:
    from transformers import AutoConfig
    from transformers.utils import hub

    names = ["path_or_repo_id", "filenames", "local_files_only"]
    assert set(names) <= set(inspect.signature(function).parameters)
    assert function.__module__ == hub.__name__
    asked: list[str] = []

    def files(path_or_repo_id: str, filenames: list[str], **kwargs: Any) -> list[str]:
        asked.extend(filenames)
        tiny().config.save_pretrained(folder)
        return [str(Path(folder) / name) for name in filenames]

    with tempfile.TemporaryDirectory() as folder, mock.patch.object(hub, "cached_files", files):
        config = AutoConfig.from_pretrained("nobody/nothing", local_files_only=True)
    assert set(asked) == {"config.json"}
    assert config.hidden_size == tiny().config.hidden_size


@canary("transformers.modeling_utils.has_file")
def _(function: Any) -> None:
    from transformers.utils import hub

    assert function is hub.has_file
    assert {"path_or_repo", "filename", "local_files_only"} <= set(inspect.signature(function).parameters)


@canary("transformers.utils.hub.hf_api")
def _(hf_api: Any) -> None:
    from transformers.utils import hub

    if not hasattr(hf_api(), "resolve_revision"):  # older versions of huggingface_hub, with which none is replaced
        assert not hasattr(hub, "resolve_revision")
        return
    from huggingface_hub import ResolvedRevision

    assert {"repo_id", "repo_type", "revision"} <= set(inspect.signature(hf_api().resolve_revision).parameters)
    hf_api().resolve_revision = lambda *args, **kwargs: ResolvedRevision("0" * 40, "main", args[0], "model")
    try:
        assert hub.resolve_revision("nobody/nothing", "main").resolved == "0" * 40
    finally:
        del hf_api().resolve_revision


@canary("transformers.PreTrainedModel._is_fsdp_managed_module")
def _(_: Any) -> None:
    from transformers.distributed.fsdp import is_fsdp_managed_module

    module = nn.Identity()
    assert not is_fsdp_managed_module(module)
    module._is_fsdp_managed_module = True
    assert is_fsdp_managed_module(module)


@canary("transformers.utils.import_utils.is_fake_tensor")
def _(_: Any) -> None:
    from torch._subclasses.fake_tensor import FakeTensorMode
    from transformers.utils import import_utils

    with FakeTensorMode():
        fake = torch.empty(1)
    assert import_utils.is_tracing(fake)
    with mock.patch.object(import_utils, "is_fake_tensor", return_value=False):
        assert not import_utils.is_tracing(fake)


@canary("transformers.PreTrainedModel._init_weights")
def _(_: Any) -> None:
    model, initialized = copy.deepcopy(tiny()), []
    for module in model.modules():
        vars(module).pop("_is_hf_initialized", None)
        if hasattr(module, "_init_weights"):
            vars(module)["_init_weights"] = initialized.append
    model.init_weights()
    assert set(initialized) == set(model.modules())
