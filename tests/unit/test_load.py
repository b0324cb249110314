"""Loading: only this rank's blocks are read, whatever recipe they come from, in little memory; errors are clear."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from deferred_models import CONFIGS, ties
from loading import assert_local_part, localize
from safetensors.torch import save_file
from torch import nn
from transformers import AutoModelForCausalLM

from lightning_autotp.building import checkpoint_reading
from lightning_autotp.building import weight_conversion as conversion
from lightning_autotp.building.checkpoint_reading import (
    CheckpointError,
    CheckpointSource,
    CheckpointTensor,
    DamagedFileError,
    MismatchError,
    MissingFileError,
    read_headers,
)
from lightning_autotp.building.deferred import deferred_init
from lightning_autotp.layouts.ownership import Ownership, merge_runs
from lightning_autotp.layouts.types import Layout, Shard
from lightning_autotp.loading.parameters import check_checkpoint, load_parameters
from lightning_autotp.parameters.state import parallel_state
from lightning_autotp.pretrained.meta_model import meta_model


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(11, 6)
        self.inner = nn.Sequential(nn.Linear(6, 9), nn.BatchNorm1d(9), nn.Linear(9, 6, bias=False))
        self.inner[2].weight.requires_grad_(False)
        self.head = nn.Linear(6, 11)
        self.head.weight = self.embedding.weight
        self.empty = nn.Parameter(torch.empty(0, 3))
        self.scalar = nn.Parameter(torch.randn(()))
        self.scalar.own = "attribute"


def sections(shape: tuple[int, ...], ranks: int) -> Layout:
    """A first dim of two sections, each sharded, and a last index that all hold."""
    half = shape[0] // 2
    shares = Ownership.even(half, ranks).held
    held = [[*runs, *((half + a, half + b) for a, b in runs), (2 * half, shape[0])] for runs in shares]
    return Shard(((0, Ownership(shape[0], tuple(merge_runs(runs) for runs in held))),))


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_recorded_initialization(ranks: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(conversion, "CHUNK_BYTES", 100)
    torch.manual_seed(0)
    expected = Tied()
    for rank in range(ranks):
        torch.manual_seed(0)
        with meta_model():
            model = Tied()
        localize(model, rank, ranks)
        load_parameters(model)
        assert_local_part(model, expected)
        assert ties(model) == ties(expected)
        assert model.head.weight is model.embedding.weight
        assert model.scalar.own == "attribute"
        meta = parallel_state(model).metas["head.weight"]
        assert meta.init_fn is None
        assert meta.names == ("embedding.weight", "head.weight")
        assert meta is parallel_state(model).metas["embedding.weight"]
        state = torch.get_rng_state()
        load_parameters(model)  # nothing is left to do
        assert torch.equal(torch.get_rng_state(), state)
        assert_local_part(model, expected)


def test_sections(tmp_path: Path) -> None:
    value = torch.randn(13, 4)
    save_file({"weight": value}, tmp_path / "one.safetensors")
    for rank in range(3):
        with deferred_init() as recorder:
            model = nn.Module()
            model.weight = nn.Parameter(recorder.source(read_headers([str(tmp_path / "one.safetensors")])["weight"]))
        localize(model, rank, 3, sections)
        load_parameters(model)
        ownership = parallel_state(model).metas["weight"].layout.dims[0][1]
        assert len(ownership.held[rank]) > 1
        assert torch.equal(model.weight, value[ownership.indices(rank)])


def test_any_callable_may_initialize() -> None:
    model = nn.Linear(4, 6, bias=False, device="meta")
    localize(model, 1, 2)
    parallel_state(model).metas["weight"].init_fn = lambda: torch.arange(24.0).reshape(6, 4)
    load_parameters(model)
    assert torch.equal(model.weight, torch.arange(24.0).reshape(6, 4)[3:, 2:])


def test_where_it_goes() -> None:
    with meta_model():
        model = Tied()
    localize(model, 0, 2)
    load_parameters(model, device=torch.device("cpu"))
    assert {tensor.device.type for tensor in (*model.parameters(), *model.buffers())} == {"cpu"}
    with pytest.raises(RuntimeError, match="Linear has no parallel model in it"):
        load_parameters(nn.Linear(2, 2))


def test_nothing_to_fill_from() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2, device="meta"))
    localize(model, 0, 1)
    with pytest.raises(CheckpointError, match=r"fill 2 parameters from.*1\.weight, 1\.bias\. Build the model in conf"):
        load_parameters(model)


def test_wrong_shapes_are_all_named() -> None:
    with meta_model():
        model = Tied()
    localize(model, 0, 2)
    for name in ("inner.0.weight", "inner.0.bias"):
        parallel_state(model).metas[name].rank = 1
    with pytest.raises(
        CheckpointError, match=r"inner\.0\.weight: \(5, 3\) instead of \(4, 3\)\ninner\.0\.bias: \(5,\)"
    ):
        load_parameters(model)
    with meta_model():
        model = nn.Linear(4, 4)
    localize(model, 0, 1)
    parallel_state(model).metas["weight"].init_fn = lambda: torch.zeros(3, 4)
    with pytest.raises(CheckpointError, match=r"weight is initialized as \(3, 4\) but has the shape \(4, 4\)"):
        load_parameters(model)


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    model = AutoModelForCausalLM.from_config(CONFIGS["Llama"])
    model.save_pretrained(tmp_path, max_shard_size="30KB")
    return tmp_path


def built_from(directory: Path) -> nn.Module:
    with meta_model():
        model: nn.Module = AutoModelForCausalLM.from_pretrained(directory)
    localize(model, 0, 2)
    return model


def test_check_reads_only_headers(saved: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = built_from(saved)
    monkeypatch.setattr(CheckpointTensor, "read", None)
    monkeypatch.setattr(checkpoint_reading._File, "get", None)
    check_checkpoint(model)
    assert all(parameter.is_meta for parameter in model.parameters())


def fails(error: type[CheckpointError], model: nn.Module) -> str:
    """The message with which both checking and loading fail, before anything is read."""
    with pytest.raises(error) as checked:
        check_checkpoint(model)
    with pytest.raises(error) as loaded:
        load_parameters(model)
    assert str(checked.value) == str(loaded.value)
    assert all(parameter.is_meta for parameter in model.parameters())
    return str(checked.value)


def test_file_gone_meanwhile(saved: Path) -> None:
    model = built_from(saved)
    file = max(saved.glob("*.safetensors"))
    file.unlink()
    assert f"checkpoint file {file} does not exist" in fails(MissingFileError, model)


def test_file_truncated_meanwhile(saved: Path) -> None:
    model = built_from(saved)
    file = max(saved.glob("*.safetensors"))
    os.truncate(file, file.stat().st_size - 10)
    message = fails(DamagedFileError, model)
    assert f"{file} ({file.stat().st_size} bytes) cannot be read, it may be truncated" in message


def test_file_changed_meanwhile(saved: Path) -> None:
    model = built_from(saved)
    assert not hasattr(model, "autotp_source")
    source = parallel_state(model).sources[""]
    assert isinstance(source, CheckpointSource)
    norm = source.tensors["model.norm.weight"]
    others = {name for name, tensor in source.tensors.items() if tensor.file == norm.file} - {"model.norm.weight"}
    gone = min(others)
    save_file({name: torch.zeros(source.tensors[name].shape) for name in others - {gone}} | {
        "model.norm.weight": torch.zeros(7)}, norm.file)  # fmt: skip
    message = fails(MismatchError, model)
    assert f"{norm.file}: tensor 'model.norm.weight' has the shape (7,) and dtype torch.float32" in message
    assert "it had the shape (32,)" in message
    assert f"tensor {gone!r} is not there" in message
    with pytest.raises(MismatchError, match="build the model again"):
        norm.read()


class Evil:
    def __reduce__(self) -> tuple[Callable[[str], int], tuple[str]]:
        return os.system, ("touch pwned",)


def test_nothing_pickled_is_trusted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    file = tmp_path / "pytorch_model.bin"
    torch.save({"weight": torch.ones(3), "evil": Evil()}, file)
    with pytest.raises(
        CheckpointError, match=r"pytorch_model\.bin contains more than tensors.*\.system.*save_pretrained"
    ):
        read_headers([str(file)])
    assert not (tmp_path / "pwned").exists()


def test_damaged_and_old_torch_save_files(tmp_path: Path) -> None:
    file = tmp_path / "pytorch_model.bin"
    torch.save({"weight": torch.ones(300), "step": 3}, file)
    assert list(read_headers([str(file)])) == ["weight"]
    os.truncate(file, file.stat().st_size // 2)
    with pytest.raises(DamagedFileError, match="may be truncated: download or copy the file again"):
        read_headers([str(file)])
    torch.save({"weight": torch.ones(3)}, file, _use_new_zipfile_serialization=False)
    with pytest.raises(DamagedFileError, match=r"has torch\.save's old format.*save_pretrained"):
        read_headers([str(file)])
    file.write_bytes(b"")
    with pytest.raises(DamagedFileError, match=r"\(0 bytes\) cannot be read"):
        read_headers([str(file)])
