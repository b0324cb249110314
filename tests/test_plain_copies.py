"""TP x FSDP2 without Lightning: ``parallelize(..., data_mesh=...)``."""

from __future__ import annotations

from typing import Any, NamedTuple

import pytest
import torch
from distributed import run_ranks
from loading import peak_of
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule
from transformers import LlamaConfig, LlamaForCausalLM

from lightning_autotp import full_gradients, full_state_dict, parallelize
from lightning_autotp.building.deferred import deferred_init
from lightning_autotp.building.pretrained import meta_model

WIDTH, LAYERS = 2048, 10


class Found(NamedTuple):
    losses: list[float]
    gradients: list[dict[str, torch.Tensor]]
    state: dict[str, torch.Tensor]
    tied: bool
    managed: int
    peak: int


def data() -> torch.Tensor:
    return torch.randint(0, 101, (3, 4, 12), generator=torch.Generator().manual_seed(1))


def tiny() -> LlamaForCausalLM:
    torch.manual_seed(0)
    return LlamaForCausalLM(
        LlamaConfig(
            hidden_size=60, intermediate_size=90, num_hidden_layers=3, num_attention_heads=4, num_key_value_heads=1,
            head_dim=16, vocab_size=101, bos_token_id=1, eos_token_id=2, tie_word_embeddings=True,
        )
    )  # fmt: skip


def train(model: Any, gradients_of: Any, batches: torch.Tensor) -> tuple[list[float], list[dict[str, torch.Tensor]]]:
    """Losses and gradients of a few steps."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3, momentum=0.9)
    losses, gradients = [], []
    for batch in batches:
        loss = model(input_ids=batch, labels=batch).loss
        loss.backward()
        losses.append(loss.item())
        gradients.append(gradients_of(model))
        optimizer.step()
        optimizer.zero_grad()
    return losses, gradients


def two_by_two(rank: int, world_size: int) -> Found:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "tensor"))
    copy = mesh["data"].get_local_rank()
    with meta_model():
        model = tiny()
    parallelize(model, mesh["tensor"].get_group(), data_mesh=mesh["data"])
    losses, gradients = train(model, full_gradients, data()[:, 2 * copy : 2 * copy + 2])
    tied = model.lm_head.weight is model.model.embed_tokens.weight
    managed = sum(isinstance(module, FSDPModule) for module in model.modules())
    return Found(losses, gradients, full_state_dict(model), tied, managed, peak(mesh))


def peak(mesh: DeviceMesh) -> int:
    """Of the memory that a large model takes while it is made, cut both ways and filled."""
    with deferred_init():
        model = nn.Sequential(*(nn.Sequential(nn.Linear(WIDTH, WIDTH, bias=False), nn.ReLU()) for _ in range(LAYERS)))
    example = torch.zeros(1, WIDTH)

    def make() -> nn.Module:
        return parallelize(model, mesh["tensor"].get_group(), example_inputs=(example,), data_mesh=mesh["data"])

    return peak_of(make)[1]


@pytest.fixture(scope="module")
def found() -> list[Found]:
    results: list[Found] = run_ranks(two_by_two, 4)
    return results


def test_two_copies_equal_one_process(found: list[Found]) -> None:
    model = tiny()
    losses, gradients = train(
        model, lambda model: {name: value.grad.clone() for name, value in model.named_parameters()}, data()
    )
    for first, second in ((found[0], found[2]), (found[1], found[3])):
        halves = [(one + other) / 2 for one, other in zip(first.losses, second.losses, strict=True)]
        torch.testing.assert_close(halves, losses, rtol=1e-5, atol=0)
    for one in found:
        for mine, theirs in zip(one.gradients, gradients, strict=True):
            for name in theirs:
                torch.testing.assert_close(mine[name], theirs[name], rtol=1e-4, atol=1e-6)
        for name, value in model.state_dict().items():
            torch.testing.assert_close(one.state[name], value, rtol=1e-4, atol=1e-5)
        assert one.tied
        assert one.managed == 4


def test_no_rank_ever_has_its_whole_tensor_parallel_part(found: list[Found]) -> None:
    largest = 4 * WIDTH * WIDTH
    held = LAYERS * largest // 4
    assert 1.1 * (held + largest) < LAYERS * largest // 2, "else this proves nothing"
    for one in found:
        assert held <= one.peak <= 1.1 * (held + largest)
