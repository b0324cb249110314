"""Checkpoints of mixture models, whose experts are merged while loading: every layout, in and out, quantized too."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from distributed import run_ranks
from expert_parts import DEQUANTIZED, fused_rows, grid, load_part, load_whole
from loading import assert_local_part, localize
from mixture_configs import MIXTURES, SIZES
from reading import run
from safetensors.torch import load_file, save_file
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    BertConfig,
    BertForMaskedLM,
    FineGrainedFP8Config,
)
from transformers.quantizers.quantizer_finegrained_fp8 import FineGrainedFP8HfQuantizer

from lightning_autotp import parallelize
from lightning_autotp.building.checkpoint_reading import CheckpointError
from lightning_autotp.building.recipe import Recipe
from lightning_autotp.checkpoints.checksums import CHECKSUMS
from lightning_autotp.export.from_model import save_pretrained
from lightning_autotp.layouts.ownership import Ownership
from lightning_autotp.layouts.types import Invariant, Layout, Shard
from lightning_autotp.loading.parameters import load_parameters
from lightning_autotp.pretrained.meta_model import meta_model
from lightning_autotp.ranks.group import TPGroup

UNTIED = "llama"
"""Tied by its configuration, with two different tensors in its checkpoint."""
BATCH = torch.arange(3, 20).repeat(2, 1)
"""Token ids."""


def whole_experts(shape: tuple[int, ...], ranks: int) -> Layout:
    """Experts sharded, matrices by row."""
    return Shard(((0, Ownership.even(shape[0], ranks)),)) if len(shape) > 1 else Invariant()


def last_dim(shape: tuple[int, ...], ranks: int) -> Layout:
    """The last dim sharded, of vectors too."""
    return Shard(((len(shape) - 1, Ownership.even(shape[-1], ranks)),)) if shape else Invariant()


LAYOUTS: list[tuple[Callable[[tuple[int, ...], int], Layout], int, int]] = [
    (whole_experts, 1, 2), (whole_experts, 2, 3), (fused_rows, 0, 2), (fused_rows, 2, 3), (last_dim, 1, 2),
    (grid, 1, 4), (grid, 2, 4),
]  # fmt: skip


def rewrite(directory: Path, change: Callable[[dict[str, torch.Tensor]], None], **config: Any) -> None:
    tensors = load_file(directory / "model.safetensors")
    change(tensors)
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    described = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps(described | config))


def as_mxfp4(tensors: dict[str, torch.Tensor]) -> None:
    for name in [name for name in tensors if name.endswith(("gate_up_proj", "down_proj"))]:
        experts, rows, columns = tensors.pop(name).shape
        packed = torch.randint(0, 256, (experts, columns, rows // 32, 16), dtype=torch.uint8)
        tensors[f"{name}_blocks"] = packed
        tensors[f"{name}_scales"] = torch.randint(118, 130, packed.shape[:-1], dtype=torch.uint8)


def as_fp8(tensors: dict[str, torch.Tensor]) -> None:
    for name in [name for name in tensors if name.endswith("proj.weight")]:
        rows, columns = tensors[name].shape
        tensors[name] = (tensors[name] * 30).to(torch.float8_e4m3fn)
        tensors[f"{name}_scale_inv"] = torch.rand(rows // 8, columns // 8)


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory as ``save_pretrained`` writes it for each mixture, and quantized ones."""
    root = tmp_path_factory.mktemp("mixtures")
    for name, changes in MIXTURES.items():
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(name, **(SIZES | changes)))
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(torch.randn_like(parameter) * 0.01)  # no ones and zeros
        model.save_pretrained(root / name)
        if name in ("gpt_oss", "qwen3_moe"):
            change, method = (as_mxfp4, "mxfp4") if name == "gpt_oss" else (as_fp8, "fp8")
            model.bfloat16().save_pretrained(root / f"{name} {method}")
            described: dict[str, Any] = {"quant_method": method}
            if method == "fp8":
                described |= {"weight_block_size": [8, 8], "activation_scheme": "dynamic"}
            else:
                kept = ["self_attn", "mlp.router"]
                described["modules_to_not_convert"] = [f"model.layers.*.{part}" for part in kept] + ["lm_head"]
            rewrite(root / f"{name} {method}", change, quantization_config=described)
    AutoModelForCausalLM.from_config(AutoConfig.for_model("llama", **SIZES, tie_word_embeddings=True)).save_pretrained(
        root / "llama"
    )
    rewrite(root / "llama", lambda tensors: tensors.update({"lm_head.weight": torch.randn(101, 64)}))
    return root


@pytest.mark.parametrize("name", [*MIXTURES, *DEQUANTIZED])
def test_every_layout_of_the_experts(checkpoints: Path, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = load_whole(checkpoints / name)
    assert any(parameter.dim() == 3 for parameter in expected.parameters())
    made: list[tuple[int, ...]] = []
    make = Recipe.__call__
    monkeypatch.setattr(Recipe, "__call__", lambda recipe: made.append(recipe.target.size) or make(recipe))
    for layout, rank, ranks in LAYOUTS:
        assert_local_part(load_part(checkpoints / name, rank, ranks, layout), expected)
    if name != "gpt_oss mxfp4":  # where the operator that looks up the values takes whole tensors
        assert all(len(size) == 1 for size in made), "a whole matrix was made"


def export(rank: int, world_size: int, root: str) -> None:
    """Write every checkpoint again from hand-made parts."""
    for name in [*MIXTURES, *DEQUANTIZED, UNTIED]:
        model = load_part(Path(root) / name, rank, world_size, grid)
        model.autotp.group = TPGroup.of(dist.group.WORLD)
        save_pretrained(model, Path(root) / "ours" / name, max_shard_size="80KB")


@pytest.fixture(scope="module")
def exported(checkpoints: Path) -> None:
    """When the ranks have written their directories."""
    run_ranks(export, 4, str(checkpoints))


@pytest.mark.usefixtures("exported")
@pytest.mark.parametrize("name", [*MIXTURES, UNTIED])
def test_the_export_is_what_one_process_writes(checkpoints: Path, name: str) -> None:
    """File by file, byte by byte: what was renamed, split, merged or transposed on the way in is undone."""
    check_files(checkpoints / "ours" / name, load_whole(checkpoints / name), checkpoints / "theirs" / name)


def check_files(ours: Path, model: Any, theirs: Path) -> None:
    """Ours are those that one process writes of the model."""
    model.save_pretrained(theirs, max_shard_size="80KB")
    wanted = {file.name: file.read_bytes() for file in theirs.iterdir()}
    assert len(wanted) > 4
    found = {file.name: file.read_bytes() for file in ours.iterdir()}
    assert found.keys() == {*wanted, CHECKSUMS}
    for file, written in wanted.items():
        assert found[file] == written, ours / file


@pytest.mark.usefixtures("exported")
@pytest.mark.parametrize("name", [*MIXTURES, *DEQUANTIZED])
def test_the_export_is_an_ordinary_checkpoint(checkpoints: Path, name: str) -> None:
    again, report = AutoModelForCausalLM.from_pretrained(checkpoints / "ours" / name, output_loading_info=True)
    assert not any(report.values())
    state = load_whole(checkpoints / name).state_dict()
    assert again.state_dict().keys() == state.keys()
    for key, value in again.state_dict().items():
        assert value.dtype == state[key].dtype
        assert torch.equal(value, state[key]), key


def planned(rank: int, world_size: int, source: Path, written: Path) -> float:
    """The loss of what the planner makes of a checkpoint, which is written again."""
    with meta_model():
        model = load_whole(source)
    model = parallelize(model, dist.group.WORLD)
    save_pretrained(model, written, max_shard_size="80KB")
    loss: float = model(input_ids=BATCH, labels=BATCH).loss.item()
    return loss


@pytest.mark.parametrize("name", [pytest.param("mixtral", marks=pytest.mark.nightly), "deepseek_v3"])
def test_a_mixture_from_its_checkpoint_to_its_loss_and_back(checkpoints: Path, name: str, tmp_path: Path) -> None:
    losses = run_ranks(planned, 3, checkpoints / name, tmp_path / "ours")
    model = load_whole(checkpoints / name)
    assert losses == pytest.approx([model(input_ids=BATCH, labels=BATCH).loss.item()] * 3, rel=1e-5)
    check_files(tmp_path / "ours", model, tmp_path / "theirs")


@pytest.fixture
def with_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a machine with kernels for these weights: elsewhere transformers dequantizes by itself."""
    monkeypatch.setattr(FineGrainedFP8HfQuantizer, "validate_environment", lambda *args, **kwargs: None)


@pytest.mark.usefixtures("with_kernels")
@pytest.mark.parametrize(
    ("name", "arguments", "message"),
    [
        (
            "qwen3_moe fp8",
            {},
            r"the checkpoint is quantized \(fp8\); such weights cannot be cut into parts and trained\. "
            r"Pass quantization_config=FineGrainedFP8Config\(dequantize=True\) to from_pretrained",
        ),
        (
            "mixtral",
            {"quantization_config": FineGrainedFP8Config()},
            r"weights are quantized \(fp8\), and .* part by part: .*\. Use .* leave quantization_config out",
        ),
    ],
)
def test_weights_that_would_be_quantized_are_refused(
    checkpoints: Path, name: str, arguments: dict[str, Any], message: str
) -> None:
    with pytest.raises(CheckpointError, match=f"{checkpoints / name}: .*{message}"), meta_model():
        AutoModelForCausalLM.from_pretrained(checkpoints / name, **arguments)


def test_old_layer_norm_names(tmp_path: Path) -> None:
    sizes = {key: value for key, value in SIZES.items() if key not in ("num_key_value_heads", "head_dim")}
    model = BertForMaskedLM(BertConfig(**sizes))
    model.save_pretrained(tmp_path)

    def rename(tensors: dict[str, torch.Tensor]) -> None:
        for name in [name for name in tensors if "LayerNorm" in name]:
            renamed = name.replace("LayerNorm.weight", "LayerNorm.gamma").replace("LayerNorm.bias", "LayerNorm.beta")
            tensors[renamed] = torch.randn_like(tensors.pop(name))

    rewrite(tmp_path, rename)
    assert "bert.encoder.layer.0.output.LayerNorm.gamma" in load_file(tmp_path / "model.safetensors")
    expected = BertForMaskedLM.from_pretrained(tmp_path)
    for rank in range(2):
        with meta_model():
            ours, report = BertForMaskedLM.from_pretrained(tmp_path, output_loading_info=True)
        assert not any(report.values()), report
        localize(ours, rank, 2, last_dim)
        load_parameters(ours)
        assert_local_part(ours, expected)


MAKE = """
import sys
from transformers import MixtralConfig, MixtralForCausalLM
for directory, hidden in ((sys.argv[1], 1024), (sys.argv[2], 16)):
    config = MixtralConfig(hidden_size=hidden, intermediate_size=2 * hidden, num_hidden_layers=2, num_local_experts=8,
                           num_attention_heads=8, num_key_value_heads=4, vocab_size=256)
    MixtralForCausalLM(config).save_pretrained(directory, max_shard_size="100MB")
"""
PEAK = """
import sys, torch
from loading import peak_of
from expert_parts import fused_rows, grid, load_part
from pathlib import Path
large, tiny, layout, rank, ranks = *map(Path, sys.argv[1:3]), globals()[sys.argv[3]], int(sys.argv[4]), int(sys.argv[5])
load_part(tiny, rank, ranks, layout)
model, peak = peak_of(lambda: load_part(large, rank, ranks, layout))
largest = max(torch.Size(meta.shape).numel() * meta.dtype.itemsize for meta in model.autotp.metas.values())
print(peak, sum(parameter.nbytes for parameter in model.parameters()), largest)
"""


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A checkpoint of 420 MB whose merged experts are 128 MB each, and the same in tiny."""
    directory = tmp_path_factory.mktemp("large")
    run(MAKE, directory / "large", directory / "tiny")
    return directory / "large", directory / "tiny"


@pytest.mark.nightly
@pytest.mark.parametrize(("layout", "rank", "ranks"), [("fused_rows", 1, 2), ("grid", 2, 4)])
def test_memory_while_merging_experts(large: tuple[Path, Path], layout: str, rank: int, ranks: int) -> None:
    peak, shard, largest = run(PEAK, *large, layout, rank, ranks)
    assert largest > 125e6
    assert peak >= shard
    assert peak <= shard + largest
