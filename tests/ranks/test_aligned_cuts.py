"""Uneven cuts at multiples of 64 or 8 elements: training on them, resizing them, and plans with other cuts."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from distributed import run_ranks
from hypothesis import given
from hypothesis import strategies as st
from mixture_configs import MIXTURES
from tiny import tiny_model, token_batch
from torch import nn

from lightning_autotp import Plan, full_state_dict, make_plan, parallelize
from lightning_autotp.layouts import ownership
from lightning_autotp.layouts.ownership import Ownership
from lightning_autotp.layouts.types import Shard

SIZES = {"num_hidden_layers": 1, "vocab_size": 1600, "intermediate_size": 1603}


def parts(plan: Plan, name: str, dim: int = 0) -> list[int]:
    layout = next(parameter.layout for parameter in plan.parameters if name in parameter.names)
    assert isinstance(layout, Shard)
    ((cut, owned),) = layout.dims
    assert cut == dim
    return list(owned.local_sizes)


@given(st.integers(2, 200_000), st.integers(2, 64))
def test_no_rank_has_much_more_than_its_share(size: int, ranks: int) -> None:
    group = ownership.alignment(size, ranks)
    lengths = Ownership.even(size, ranks, group).local_sizes
    assert sum(lengths) == size
    if group > 1:
        assert max(lengths) <= 1.01 * size / ranks
        assert all(length % group == 0 for length in lengths[:-1])
    else:
        assert max(lengths) - min(lengths) <= 1
    assert group == 1 or size % ranks


class Head(nn.Module):
    def __init__(self, vocabulary: int) -> None:
        super().__init__()
        self.table, self.head = nn.Embedding(vocabulary, 32), nn.Linear(32, vocabulary)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.head(self.table(x))
        return out


@pytest.mark.parametrize(
    ("vocabulary", "ranks", "wanted"),
    [
        (50257, 2, [25152, 25105]),
        (50257, 3, [16768, 16768, 16721]),
        (50257, 8, [6336, 6336, *[6272] * 5, 6225]),
        (50304, 8, [6288] * 8),  # it divides: as it was
        (12802, 4, [3208, 3200, 3200, 3194]),  # at 64 one rank would have 1.9 % more
        (1030, 2, [515, 515]),
        (1031, 2, [520, 511]),
        (517, 2, [259, 258]),  # at 8 one rank would have 2 % more
    ],
)
def test_where_a_vocabulary_is_cut(vocabulary: int, ranks: int, wanted: list[int]) -> None:
    with torch.device("meta"):
        model = Head(vocabulary)
    plan, _ = make_plan(model, ranks, example_inputs=torch.zeros(3, 7, dtype=torch.long))
    assert parts(plan, "table.weight") == parts(plan, "head.weight") == parts(plan, "head.bias") == wanted


@pytest.mark.parametrize(
    ("size", "ranks", "wanted", "noted"),
    [
        (1408, 3, [472, 472, 464], False),  # 22 times 64, which would give one rank 9 % more
        (14400, 7, [2064, *[2056] * 6], False),
        (1410, 2, [705, 705], True),  # it divides: as it is, and said
        (1411, 4, [353, 353, 353, 352], True),
    ],
)
def test_where_experts_are_cut(size: int, ranks: int, wanted: list[int], noted: bool) -> None:
    """As a gated layer's features are, in both halves of what is fused; a plan says what is at no multiple of 8."""
    with torch.device("meta"):
        model = tiny_model("mixtral", **MIXTURES["mixtral"], num_hidden_layers=1, intermediate_size=size)
    plan, _ = make_plan(model, ranks, example_inputs=token_batch(0))
    assert parts(plan, "model.layers.0.mlp.experts.down_proj", 2) == wanted
    assert parts(plan, "model.layers.0.mlp.experts.gate_up_proj", 1) == [2 * part for part in wanted]
    experts = next(parameter for parameter in plan.parameters if "down_proj" in parameter.names[0])
    assert ("not at multiples of 8" in experts.local_of_whole(0)) is noted


def take_steps(model: Any, vocabulary: int) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(2):
        model(**token_batch(step, vocabulary=vocabulary)).loss.backward()
        optimizer.step()
        optimizer.zero_grad()


def train(rank: int, ranks: int, plan: Plan | None) -> tuple[Any, list[Any]]:
    """Steps before and after the vocabulary is resized, each compared with one process; the cuts then."""
    model, whole = tiny_model("llama", **SIZES), tiny_model("llama", **SIZES)
    parallelize(model, dist.group.WORLD, example_inputs=token_batch(0), plan=plan)  # type: ignore[arg-type]
    before = [parts(model.autotp.plan, name) for name in ("lm_head.weight", "model.layers.0.mlp.up_proj.weight")]
    for vocabulary in (1600, 1700):
        for each in (model, whole):
            torch.manual_seed(0)
            each.resize_token_embeddings(vocabulary, mean_resizing=False)
            take_steps(each, vocabulary)
        state = full_state_dict(model)
        for name, tensor in whole.state_dict().items():
            torch.testing.assert_close(state[name], tensor, rtol=1e-4, atol=1e-5, msg=name)
    return before, [tuple(tensor.shape) for tensor in full_state_dict(model).values()]


def test_training_on_aligned_cuts_and_on_a_plan_with_even_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(ownership, "_ALIGNMENTS", ())
        with torch.device("meta"):
            even, _ = make_plan(tiny_model("llama", **SIZES), 3, example_inputs=token_batch(0))
    assert run_ranks(train, 3, None)[0][0] == [[536, 536, 528], [536, 536, 531]]
    assert run_ranks(train, 3, Plan.from_json(even.to_json()))[0][0] == [[534, 533, 533], [535, 534, 534]]
