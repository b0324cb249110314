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
    copied, asked = copy.deepcopy(model), []

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
    info, _ = load(model=copied, state_dict=state, load_config=settings)
    assert len(asked) == len(state)
    assert info.mismatched_keys == set()
    assert {name for name, value in copied.named_parameters() if value.is_meta} == set(state)


@canary("transformers.PreTrainedModel._weight_conversions", "transformers.core_model_loading.revert_weight_conversion")
def _(_: Any) -> None:
    """What from_pretrained leaves on a model is undone, and that can be other conversions."""
    from transformers.core_model_loading import WeightRenaming, revert_weight_conversion

    model, _ = loaded()
    assert model._weight_conversions is not None
    assert getattr(tiny(), "_weight_conversions", None) is None
    copied = copy.deepcopy(model)
    copied._weight_conversions = [WeightRenaming("before", "norm")]
    assert set(revert_weight_conversion(copied, {"norm.weight": torch.ones(1)})) == {"before.weight"}


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


@cache
def trained() -> tuple[list[str], list[Any]]:
    """The names of a Trainer's steps as a run and one that goes on call them, and the optimizer's states it loaded."""
    from types import SimpleNamespace

    from transformers import Trainer, TrainingArguments

    called, given, state = [], [], {"whole": torch.ones(1)}

    class Steps(Trainer):
        def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
            called.append("_save_optimizer_and_scheduler")
            own = self.optimizer
            self.optimizer = SimpleNamespace(state_dict=lambda: state)
            super()._save_optimizer_and_scheduler(output_dir)
            self.optimizer = own

        def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
            called.append("_load_optimizer_and_scheduler")
            own = self.optimizer
            self.optimizer = SimpleNamespace(load_state_dict=given.append)
            super()._load_optimizer_and_scheduler(checkpoint)
            self.optimizer = own

        def _save_rng_state(self, output_dir: str) -> None:
            called.append("_save_rng_state")
            super()._save_rng_state(output_dir)
            assert (Path(output_dir) / "rng_state.pth").is_file()

        def _load_from_checkpoint(self, resume_from_checkpoint: str, model: Any = None) -> None:
            called.append("_load_from_checkpoint")

        def _load_best_model(self) -> None:
            assert Path(str(self.state.best_model_checkpoint)).is_dir()
            called.append("_load_best_model")

    tokens = {"input_ids": torch.ones(3, dtype=torch.int64), "labels": torch.ones(3, dtype=torch.int64)}
    with tempfile.TemporaryDirectory() as folder:
        for steps, resumed in ((1, None), (2, f"{folder}/checkpoint-1")):
            arguments = TrainingArguments(
                folder, max_steps=steps, save_steps=1, eval_steps=1, eval_strategy="steps", use_cpu=True, report_to=[],
                load_best_model_at_end=True, metric_for_best_model="loss", disable_tqdm=True,
            )  # fmt: skip
            model = copy.deepcopy(tiny())
            Steps(model, arguments, train_dataset=[tokens], eval_dataset=[tokens]).train(resume_from_checkpoint=resumed)
    return called, given


@canary(
    "transformers.Trainer",
    "transformers.Trainer._save_optimizer_and_scheduler",
    "transformers.Trainer._load_optimizer_and_scheduler",
    "transformers.Trainer._save_rng_state",
    "transformers.Trainer._load_from_checkpoint",
    "transformers.Trainer._load_best_model",
)
def _(_: Any) -> None:
    """Its steps come one by one, and write and load what stands for the optimizer gives and gets."""
    called, [state] = trained()
    saved = ["_save_optimizer_and_scheduler", "_save_rng_state"]
    steps = [name for name in called if name != "_load_optimizer_and_scheduler"]
    assert steps == [*saved, "_load_best_model", "_load_from_checkpoint", *saved, "_load_best_model"]
    assert state["whole"] == 1


@canary("transformers.cache_utils.DynamicCache")
def _(cache_class: Any) -> None:
    """What one layer does with a cache changes its own part alone; an empty part holds plain values."""
    made = cache_class(config=tiny().config.__class__(num_hidden_layers=3))
    assert (made.offloading, made.layer_class_to_replicate) == (False, None)
    before = [dict(vars(slot)) for slot in made.layers]
    assert all(type(value) in (bool, int, type(None)) for slot in before for value in slot.values())
    states = torch.ones(1, 1, 2, 4)
    made.update(states, states, 1)
    assert [dict(vars(slot)) == held for slot, held in zip(made.layers, before, strict=True)] == [True, False, True]
    assert cache_class().layer_class_to_replicate is not None
