"""Building and loading in processes of their own: the memory that it takes, and that nothing stays patched."""

from __future__ import annotations

from pathlib import Path

import pytest
from distributed import run_python
from reading import run
from selected import selected

LOADING = """
import os, sys, torch
from transformers import AutoModelForCausalLM, LlamaConfig
from lightning_autotp.loading.parameters import load_parameters
from lightning_autotp.pretrained.meta_model import meta_model
from loading import localize, peak_of
directory, tiny, rank, ranks, dtype = *sys.argv[1:3], int(sys.argv[3]), int(sys.argv[4]), getattr(torch, sys.argv[5])
def work(directory):
    with meta_model():
        model = AutoModelForCausalLM.from_pretrained(directory, dtype=dtype)
    localize(model, rank, ranks)
    load_parameters(model)
    return model
work(tiny)
model, peak = peak_of(lambda: work(directory))
largest = max(torch.Size(meta.shape).numel() * meta.dtype.itemsize for meta in model.autotp.metas.values())
print(peak, sum(parameter.nbytes for parameter in model.parameters()), largest)
"""
MAKE = """
import sys, torch
from transformers import LlamaConfig, LlamaForCausalLM
kinds = sys.argv[3:]
for directory, hidden, vocabulary in ((sys.argv[1], 1024, 16384), (sys.argv[2], 16, 32)):
    config = LlamaConfig(hidden_size=hidden, intermediate_size=3 * hidden, num_hidden_layers=4, num_attention_heads=8,
                         num_key_value_heads=4, vocab_size=vocabulary, bos_token_id=1, eos_token_id=2)
    model = LlamaForCausalLM(config)
    if "safe" in kinds:
        model.save_pretrained(f"{directory}/safe", max_shard_size="100MB")
    if "bin" in kinds:
        config.save_pretrained(f"{directory}/bin")
        torch.save(model.state_dict(), f"{directory}/bin/pytorch_model.bin")
"""


@pytest.fixture(scope="module")
def large(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("large")
    kinds = selected(request, "kind")
    run(MAKE, directory / "large", directory / "tiny", *kinds)
    for kind in kinds:
        assert sum(file.stat().st_size for file in (directory / "large" / kind).iterdir()) > 300e6
    return directory


@pytest.mark.parametrize(
    ("kind", "rank", "ranks", "dtype"),
    [
        pytest.param("safe", 0, 1, "float32", marks=pytest.mark.nightly),
        ("safe", 1, 4, "bfloat16"),
        pytest.param("bin", 0, 2, "float32", marks=pytest.mark.nightly),
    ],
)
def test_memory_while_loading(large: Path, kind: str, rank: int, ranks: int, dtype: str) -> None:
    """Building, checking and loading together; pages of mapped files count."""
    peak, shard, largest = run(LOADING, large / "large" / kind, large / "tiny" / kind, rank, ranks, dtype)
    assert peak >= shard
    assert peak <= 1.1 * (shard + largest)


BUILDING = """
import torch
from torch import nn
from lightning_autotp.building.deferred import deferred_init
from loading import peak_of
class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4096, 4096, bias=False) for _ in range(6))
        self.large = nn.Embedding(16384, 2048)
class Many(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.ModuleList(nn.Linear(900, 1000) for _ in range(40))
        self.drawn = nn.ParameterList([nn.Parameter(torch.randn(900, 1000) * 0.02) for _ in range(40)])
def build(kind):
    with deferred_init():
        return kind()
def make():
    for parameter in model.parameters():
        parameter.autotp_recipe()
with deferred_init():
    nn.Linear(8, 8)
model, many = peak_of(lambda: build(Many))
print(many, max(p.nbytes for p in model.parameters()))
model, built = peak_of(lambda: build(Model))
_, made = peak_of(make)
print(built, made, max(p.nbytes for p in model.parameters()), sum(p.nbytes for p in model.parameters()))
"""


def test_memory_stays_at_one_tensor() -> None:
    many, one, built, made, largest, size = run(BUILDING)
    assert many <= 6 * one  # of 80: what the code itself holds at a time, and the recording
    assert size >= 4 * largest
    assert 0.5 * largest <= built <= 1.1 * largest
    assert 0.5 * largest <= made <= 1.1 * largest


PATCHES = """
import torch
from torch import nn
from transformers.modeling_utils import PreTrainedModel
from transformers import LlamaConfig, LlamaForCausalLM
from lightning_autotp.building.deferred import deferred_init
from lightning_autotp.pretrained.meta_model import meta_model
def state():
    classes = [nn.Parameter, nn.Module, nn.Linear, torch.Tensor, PreTrainedModel, LlamaForCausalLM]
    return [dict(vars(owner)) for owner in (*classes, torch, nn.init)]
LlamaForCausalLM(LlamaConfig(hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=2))
before = state()
for context in (deferred_init, meta_model):
    with context():
        with context():
            one = nn.Linear(2, 2)
        two = nn.Linear(2, 2)
        assert state() != before
    assert one.weight.is_meta and two.weight.is_meta
    assert state() == before
    try:
        with context():
            nn.Linear(2, 2)
            raise KeyError
    except KeyError:
        pass
    assert state() == before
    assert not nn.Linear(2, 2).weight.is_meta
"""


def test_nothing_stays_patched() -> None:
    done = run_python("-c", PATCHES)
    assert done.returncode == 0, done.stderr
