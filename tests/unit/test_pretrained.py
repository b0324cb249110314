"""``from_pretrained`` without reading: whatever it does, the model and its values must be those it gives outside."""

from __future__ import annotations

import copy
import json
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from deferred_models import CONFIGS, ties
from loading import assert_local_part, localize
from safetensors import safe_open
from saved_models import merged, rewritten, save
from torch import nn
from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForImageClassification,
    AutoModelForSequenceClassification,
    LlamaForCausalLM,
    PreTrainedModel,
    ResNetConfig,
    T5Config,
    T5ForConditionalGeneration,
)
from transformers.modeling_utils import PreTrainedModel as PatchedModel

from lightning_autotp.building.checkpoint_reading import (
    CheckpointError,
    CheckpointSource,
    DamagedFileError,
    MismatchError,
    MissingFileError,
)
from lightning_autotp.building.recipe import Recipe
from lightning_autotp.loading.parameters import load_parameters
from lightning_autotp.pretrained.meta_model import meta_model


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save("Llama", tmp_path_factory.mktemp("llama"))


def build_both(build: Callable[[], Any], rank: int = 1, ranks: int = 2) -> tuple[Any, Any]:
    """Run ``build`` outside and inside, compare everything, load one rank's part, and compare that."""
    torch.manual_seed(5)
    expected = build()
    state = torch.get_rng_state()
    torch.manual_seed(5)
    with meta_model():
        model = build()
    assert torch.equal(torch.get_rng_state(), state)
    if isinstance(model, tuple):
        assert model[1] == expected[1], "not the same loading report"
        model, expected = model[0], expected[0]
    assert type(model) is type(expected)
    assert model.training == expected.training
    assert model.config.to_dict() == expected.config.to_dict()
    assert model.state_dict().keys() == expected.state_dict().keys()
    assert ties(model) == ties(expected)
    assert model.all_tied_weights_keys == expected.all_tied_weights_keys
    if model.can_generate():
        assert model.generation_config.to_dict() == expected.generation_config.to_dict()
    assert all(parameter.is_meta for parameter in model.parameters())
    buffers = dict(expected.named_buffers())
    for name, buffer in model.named_buffers():
        assert not buffer.is_meta, name
        assert buffer.dtype == buffers[name].dtype, name
        assert torch.equal(buffer, buffers[name]), name
    copy.deepcopy(model)
    localize(model, rank, ranks)
    load_parameters(model)
    assert ties(model) == ties(expected)
    assert_local_part(model, expected)
    return expected, model


@pytest.mark.parametrize("family", CONFIGS)
def test_families(family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    directory = save(family, tmp_path)
    with monkeypatch.context() as only_blocks:

        def whole(recipe: Recipe) -> None:
            raise AssertionError(f"a whole tensor of {recipe.target.size} was made")

        only_blocks.setattr(Recipe, "__call__", whole)
        build_both(lambda: AutoModelForCausalLM.from_pretrained(directory))
    build_both(lambda: AutoModelForCausalLM.from_pretrained(directory, dtype=torch.bfloat16), rank=0, ranks=3)


def test_experts_are_converted_per_block(tmp_path: Path) -> None:
    directory = save("Mixtral", tmp_path)
    assert any("experts.1.w3" in name or "experts.1.up_proj" in name for name in merged(directory))
    expected, _ = build_both(lambda: AutoModelForCausalLM.from_pretrained(directory), rank=2, ranks=3)
    assert any(parameter.dim() == 3 for parameter in expected.parameters())


@pytest.mark.parametrize("dtype", ["auto", None, "float16", torch.float64])
@pytest.mark.parametrize("stored", [torch.bfloat16, torch.float32])
def test_dtypes(llama: Path, tmp_path: Path, dtype: Any, stored: torch.dtype) -> None:
    directory = rewritten(llama, tmp_path, lambda t: t.update({name: value.to(stored) for name, value in t.items()}))
    config = json.loads((directory / "config.json").read_text())
    del config["dtype"]
    (directory / "config.json").write_text(json.dumps(config))
    build_both(lambda: AutoModelForCausalLM.from_pretrained(directory, dtype=dtype))


def test_modules_kept_in_fp32(tmp_path: Path) -> None:
    config = T5Config(vocab_size=64, d_model=16, d_kv=8, d_ff=24, num_layers=1, num_heads=2, decoder_start_token_id=0)
    T5ForConditionalGeneration(config).save_pretrained(tmp_path)
    expected, _ = build_both(lambda: T5ForConditionalGeneration.from_pretrained(tmp_path, dtype=torch.float16))
    assert {parameter.dtype for parameter in expected.parameters()} == {torch.float16, torch.float32}


def test_buffers_of_the_checkpoint_are_read(tmp_path: Path) -> None:
    config = ResNetConfig(embedding_size=4, hidden_sizes=[4, 8], depths=[1, 1], num_labels=3)
    model = AutoModelForImageClassification.from_config(config)
    for buffer in model.buffers():
        buffer.copy_(torch.rand(buffer.shape) * 9)
    model.save_pretrained(tmp_path)
    expected, _ = build_both(lambda: AutoModelForImageClassification.from_pretrained(tmp_path))
    assert any(name.endswith("running_var") for name, _ in expected.named_buffers())


@pytest.mark.parametrize("sharded", [False, True])
def test_torch_save_files(llama: Path, tmp_path: Path, sharded: bool) -> None:
    tensors = merged(llama)
    (tmp_path / "config.json").write_bytes((llama / "config.json").read_bytes())
    if sharded:
        names = sorted(tensors)
        files = {name: f"pytorch_model-0000{1 + at % 2}-of-00002.bin" for at, name in enumerate(names)}
        for file in set(files.values()):
            torch.save({name: tensors[name] for name in names if files[name] == file}, tmp_path / file)
        index = {"metadata": {"total_size": 1}, "weight_map": files}
        (tmp_path / "pytorch_model.bin.index.json").write_text(json.dumps(index))
    else:
        torch.save(tensors, tmp_path / "pytorch_model.bin")
    _, model = build_both(lambda: AutoModelForCausalLM.from_pretrained(tmp_path))
    assert all(file.endswith(".bin") for file in model.autotp.sources[""].files)


@pytest.mark.parametrize("equal", [True, False])
def test_both_ends_of_a_tie_in_the_checkpoint(tmp_path: Path, caplog: pytest.LogCaptureFixture, equal: bool) -> None:
    directory = save("Llama", tmp_path / "tied", tie_word_embeddings=True)

    def add_other_end(tensors: dict[str, torch.Tensor]) -> None:
        assert "lm_head.weight" not in tensors
        tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
        tensors["lm_head.weight"][-1, -1] += 0 if equal else 1

    rewritten(directory, tmp_path / "both", add_other_end)
    with caplog.at_level(logging.WARNING, "lightning_autotp"):
        expected, _ = build_both(lambda: AutoModelForCausalLM.from_pretrained(tmp_path / "both"))
    assert (expected.lm_head.weight is expected.model.embed_tokens.weight) == equal
    assert ("NOT tied" in caplog.text) == (not equal)
    assert ("model.embed_tokens.weight and lm_head.weight" in caplog.text) == (not equal)


def test_tied_to_what_is_there(tmp_path: Path) -> None:
    directory = save("Llama", tmp_path / "tied", tie_word_embeddings=True)
    rewritten(directory, tmp_path / "head", lambda t: t.update({"lm_head.weight": t.pop("model.embed_tokens.weight")}))
    build_both(lambda: AutoModelForCausalLM.from_pretrained(tmp_path / "head", output_loading_info=True))


def test_missing_and_unexpected_keys(llama: Path, tmp_path: Path) -> None:
    def change(tensors: dict[str, torch.Tensor]) -> None:
        for name in ("lm_head.weight", "model.layers.1.mlp.up_proj.weight", "model.layers.0.input_layernorm.weight"):
            del tensors[name]
        tensors["model.layers.7.mlp.up_proj.weight"] = torch.zeros(3)
        tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.zeros(4)

    rewritten(llama, tmp_path, change)
    torch.manual_seed(5)
    _, info = AutoModelForCausalLM.from_pretrained(tmp_path, output_loading_info=True)
    assert len(info["missing_keys"]) == 3
    assert info["unexpected_keys"] == {"model.layers.7.mlp.up_proj.weight"}
    build_both(lambda: AutoModelForCausalLM.from_pretrained(tmp_path, output_loading_info=True))


def test_missing_keys_are_reported_once(llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rewritten(llama, tmp_path, lambda tensors: tensors.pop("lm_head.weight"))
    reports: list[str] = []
    logger = logging.getLogger("transformers.modeling_utils")
    monkeypatch.setattr(logger, "warning", lambda message, *_: reports.append(message))
    with meta_model():
        model = AutoModelForCausalLM.from_pretrained(tmp_path)
    localize(model, 0, 2)
    load_parameters(model)
    assert len(reports) == 1
    assert "lm_head.weight" in reports[0]
    assert "MISSING" in reports[0]


def test_other_heads_and_base_models(llama: Path, tmp_path: Path) -> None:
    build_both(lambda: AutoModel.from_pretrained(llama, output_loading_info=True))
    AutoModel.from_pretrained(llama).save_pretrained(tmp_path)
    assert "norm.weight" in merged(tmp_path)
    build_both(lambda: AutoModelForCausalLM.from_pretrained(tmp_path, output_loading_info=True))
    build_both(
        lambda: AutoModelForSequenceClassification.from_pretrained(tmp_path, num_labels=3, output_loading_info=True)
    )


def test_key_mapping(llama: Path, tmp_path: Path) -> None:
    def rename(tensors: dict[str, torch.Tensor]) -> None:
        for name in list(tensors):
            tensors[name.replace("model.layers", "old.blocks")] = tensors.pop(name)

    rewritten(llama, tmp_path, rename)
    mapping = {r"^old\.blocks": "model.layers"}
    _, model = build_both(
        lambda: AutoModelForCausalLM.from_pretrained(tmp_path, key_mapping=mapping, output_loading_info=True)
    )
    assert "old.blocks.0.mlp.up_proj.weight" in model.autotp.sources[""].tensors


def test_subfolder_variant_and_other_arguments(llama: Path, tmp_path: Path) -> None:
    (tmp_path / "inner").mkdir()
    directory = rewritten(llama, tmp_path / "inner", lambda tensors: None)
    (directory / "model.safetensors").rename(directory / "model.fp32.safetensors")
    arguments = {"subfolder": "inner", "variant": "fp32", "attn_implementation": "eager", "use_cache": False}
    expected, model = build_both(lambda: LlamaForCausalLM.from_pretrained(tmp_path, **arguments))
    assert model.config._attn_implementation == expected.config._attn_implementation == "eager"
    assert model.autotp.sources[""] == CheckpointSource(
        str(tmp_path), (str(directory / "model.fp32.safetensors"),), model.autotp.sources[""].tensors
    )
    assert model.autotp.sources[""].tensors.keys() == merged(llama).keys()


def test_hub_cache(llama: Path, tmp_path: Path) -> None:
    revision = "0123456789abcdef0123456789abcdef01234567"
    repository = tmp_path / "models--someone--something"
    snapshot = repository / "snapshots" / revision
    snapshot.mkdir(parents=True)
    rewritten(llama, snapshot, lambda tensors: None)
    (repository / "refs").mkdir()
    (repository / "refs" / "v1").write_text(revision)
    _, model = build_both(
        lambda: AutoModelForCausalLM.from_pretrained(
            "someone/something", revision="v1", cache_dir=tmp_path, local_files_only=True
        )
    )
    assert model.autotp.sources[""].origin == "someone/something"
    assert model.autotp.sources[""].files == (str(snapshot / "model.safetensors"),)


def test_resizing_after_loading(llama: Path) -> None:
    def build() -> nn.Module:
        model: nn.Module = AutoModelForCausalLM.from_pretrained(llama)
        model.resize_token_embeddings(107)
        return model

    expected, _ = build_both(build)
    assert expected.get_parameter("lm_head.weight").shape[0] == 107


def test_changes_after_loading(llama: Path) -> None:
    def build() -> nn.Module:
        model: nn.Module = AutoModelForCausalLM.from_pretrained(llama)
        model.requires_grad_(False)
        model.get_parameter("lm_head.weight").requires_grad_(True).data.mul_(2)
        model.extra = nn.Linear(4, 4)
        return model.to(torch.bfloat16).train()

    build_both(build)


def test_state_dict_instead_of_files(llama: Path) -> None:
    config = AutoConfig.from_pretrained(llama)
    tensors = merged(llama)
    build_both(lambda: LlamaForCausalLM.from_pretrained(None, config=config, state_dict=dict(tensors)))


def test_device_maps(llama: Path) -> None:
    build_both(lambda: AutoModelForCausalLM.from_pretrained(llama, device_map="cpu"))
    split = {"model": "cpu", "lm_head": "disk"}
    with (
        pytest.raises(CheckpointError, match=r"spreads the model over \['cpu', 'disk'\].*leave device_map out"),
        meta_model(),
    ):
        AutoModelForCausalLM.from_pretrained(llama, device_map=split, offload_folder="unused")


def refused(error: type[CheckpointError], directory: Path, **arguments: Any) -> str:
    """The message of the error that ``from_pretrained`` gives inside; nothing must stay patched after it."""
    before = [dict(vars(owner)) for owner in (PatchedModel, torch.Tensor, nn.Parameter)]
    with pytest.raises(error) as caught, meta_model():
        AutoModelForCausalLM.from_pretrained(directory, **arguments)
    assert [dict(vars(owner)) for owner in (PatchedModel, torch.Tensor, nn.Parameter)] == before
    return str(caught.value)


def test_config_of_other_weights(llama: Path, tmp_path: Path) -> None:
    rewritten(llama, tmp_path, lambda tensors: None)
    config = AutoConfig.from_pretrained(llama)
    config.intermediate_size = 56
    config.save_pretrained(tmp_path)
    message = refused(MismatchError, tmp_path)
    assert f"{tmp_path}: 6 tensors of the checkpoint do not have the shapes" in message
    assert "size mismatch for model.layers.1.mlp.down_proj.weight: (32, 48)" in message
    assert f"in {tmp_path / 'model.safetensors'}, but the model's is (32, 56)" in message
    assert "ignore_mismatched_sizes=True" in message
    build_both(
        lambda: AutoModelForCausalLM.from_pretrained(tmp_path, ignore_mismatched_sizes=True, output_loading_info=True)
    )


def test_shard_named_by_the_index_is_missing(tmp_path: Path) -> None:
    directory = save("Llama", tmp_path)
    gone = max(directory.glob("*.safetensors"))
    gone.unlink()
    message = refused(MissingFileError, directory)
    assert str(gone) in message
    assert "does not exist" in message
    assert "download the checkpoint again" in message


def test_truncated_file(tmp_path: Path) -> None:
    directory = save("Llama", tmp_path)
    file = max(directory.glob("*.safetensors"))
    file.write_bytes(file.read_bytes()[:-100])
    message = refused(DamagedFileError, directory)
    assert str(file) in message
    assert "may be truncated: download or copy the file again" in message


def test_unconvertible_tensors(tmp_path: Path) -> None:
    directory = save("Mixtral", tmp_path / "whole")

    def change(tensors: dict[str, torch.Tensor]) -> None:
        name = next(name for name in tensors if "experts.1." in name)
        tensors[name] = tensors[name][:-1].contiguous()

    message = refused(MismatchError, rewritten(directory, tmp_path / "changed", change))
    assert "could not be converted" in message
    assert "mlp.experts" in message


def test_several_models_and_a_plain_module(llama: Path) -> None:
    def build() -> nn.Module:
        whole = nn.Module()
        whole.first = AutoModelForCausalLM.from_pretrained(llama)
        whole.between = nn.Linear(3, 5)
        whole.second = LlamaForCausalLM(AutoConfig.from_pretrained(llama))
        return whole

    torch.manual_seed(1)
    expected = build()
    torch.manual_seed(1)
    with meta_model():
        model = build()
    localize(model, 1, 2)
    load_parameters(model)
    assert_local_part(model, expected)
    assert isinstance(model.first, PreTrainedModel)


def test_a_file_that_transformers_prefers(llama: Path, tmp_path: Path) -> None:
    rewritten(llama, tmp_path, lambda tensors: None)
    torch.save({name: torch.zeros_like(value) for name, value in merged(llama).items()}, tmp_path / "pytorch_model.bin")
    _, model = build_both(lambda: AutoModelForCausalLM.from_pretrained(tmp_path))
    with safe_open(tmp_path / "model.safetensors", "pt") as file:
        assert torch.equal(model.get_parameter("model.norm.weight"), file.get_tensor("model.norm.weight")[16:])
