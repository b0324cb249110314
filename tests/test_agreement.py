"""Errors reach every rank, and different inputs or weights are found, without a hang."""

from __future__ import annotations

import collections
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.distributed as dist
from distributed import run_ranks
from torch import nn

from lightning_autotp.ranks.agreement import PeerError, check_same_batch, check_same_weights, raise_together


@dataclass
class Sample:
    """A batch of a user's own type."""

    tokens: torch.Tensor
    source: str


def outcome(check: Any, *args: Any) -> str | None:
    """What a check says, or ``None`` if it is content."""
    try:
        check(*args)
    except RuntimeError as error:
        return str(error)
    return None


def guard(rank: int, failing: tuple[int, ...], error: type[Exception]) -> tuple[str, str] | None:
    try:
        with raise_together(None, "reading the checkpoint"):
            if rank in failing:
                raise error(f"no such file, says {rank}")
    except (OSError, ValueError, PeerError) as caught:
        return type(caught).__name__, str(caught)
    return None


def on_every_rank(rank: int, world_size: int) -> dict[str, Any]:
    seen: dict[str, Any] = {}
    seen["one fails"] = guard(rank, (1,), FileNotFoundError)
    seen["two fail"] = guard(rank, (0, 2), ValueError)
    seen["none fails"] = guard(rank, (), ValueError)

    group = dist.group.WORLD
    tokens = torch.arange(12).view(3, 4)
    other = tokens.clone()
    other[2, 3] = 99
    same = {"input_ids": tokens, "mask": [torch.ones(3, dtype=torch.bool), None], "name": "a", "empty": torch.empty(0)}
    last = world_size - 1
    seen["same"] = outcome(check_same_batch, same, group)
    seen["same mapping type"] = outcome(check_same_batch, collections.UserDict(same), group)
    seen["content"] = outcome(
        check_same_batch, {**same, "input_ids": other if rank == last else tokens}, group, "batch 7"
    )
    seen["shape"] = outcome(check_same_batch, tokens if rank else tokens.view(4, 3), group)
    seen["dtype"] = outcome(check_same_batch, tokens.int() if rank == 1 else tokens, group)
    seen["nested"] = outcome(check_same_batch, {"a": [tokens, (other if rank == 1 else tokens,)]}, group)
    seen["bfloat16"] = outcome(check_same_batch, torch.full((2,), 1.0 + rank).bfloat16(), group)
    seen["missing key"] = outcome(check_same_batch, {"labels": tokens} if rank == 0 else {}, group)
    seen["length"] = outcome(check_same_batch, [tokens] * (rank + 1), group)
    seen["dataclass"] = outcome(check_same_batch, Sample(tokens, f"file {rank}"), group)

    torch.manual_seed(0)
    model = nn.Linear(100, 100)
    seen["same weights"] = outcome(check_same_weights, model, None)
    if rank == 2:
        torch.manual_seed(rank)
        model = nn.Linear(100, 100)
    seen["weights"] = outcome(check_same_weights, model, None)
    seen["meta weights"] = outcome(check_same_weights, nn.Linear(3, 3 + rank, device="meta"), None)
    return seen


@pytest.fixture(scope="module")
def ranks() -> list[dict[str, Any]]:
    """What each of three ranks saw."""
    return run_ranks(on_every_rank, 3)


def test_the_failing_rank_raises_its_own_error_and_the_others_hear_of_it(ranks: list[dict[str, Any]]) -> None:
    peer = ("PeerError", "rank 1 of 3 failed while reading the checkpoint: FileNotFoundError: no such file, says 1")
    own = ("FileNotFoundError", "no such file, says 1")
    assert [seen["one fails"] for seen in ranks] == [peer, own, peer]


def test_every_failing_rank_is_named(ranks: list[dict[str, Any]]) -> None:
    assert [seen["two fail"][0] for seen in ranks] == ["ValueError", "PeerError", "ValueError"]
    assert ranks[1]["two fail"][1].splitlines() == [
        "rank 0 of 3 failed while reading the checkpoint: ValueError: no such file, says 0",
        "rank 2 of 3 failed while reading the checkpoint: ValueError: no such file, says 2",
    ]


def test_a_phase_that_succeeds_everywhere_is_quiet(ranks: list[dict[str, Any]]) -> None:
    assert [seen["none fails"] for seen in ranks] == [None] * 3


def test_a_guard_in_one_process_needs_no_process_group() -> None:
    with raise_together(None, "nothing"):
        pass
    with pytest.raises(KeyError), raise_together(None, "something"):
        raise KeyError("x")
    assert issubclass(PeerError, RuntimeError)


@pytest.mark.parametrize("case", ["same", "same mapping type", "same weights", "meta weights"])
def test_what_agrees_passes(ranks: list[dict[str, Any]], case: str) -> None:
    assert [seen[case] for seen in ranks] == [None] * 3


@pytest.mark.parametrize(
    ("case", "expected"),
    [
        ("content", "batch 7 differs between the ranks of a tensor-parallel group: batch['input_ids'] is int64[3, 4]"),
        ("shape", "batch is int64[4, 3]"),
        ("dtype", "and int32[3, 4]"),
        ("nested", "batch['a'][1][0] is int64[3, 4]"),
        ("bfloat16", "batch is bfloat16[2]"),
        ("missing key", "batch['labels'] is int64[3, 4]"),
        ("length", "batch is list of 1 on rank 0 and list of 2 on rank 1"),
        ("dataclass", "batch.source is 'file 0' on rank 0 and 'file 1' on rank 1"),
        ("weights", "the ranks built different weights: weight is float32[100, 100]"),
    ],
)
def test_what_differs_is_named_on_every_rank_alike(ranks: list[dict[str, Any]], case: str, expected: str) -> None:
    messages = {seen[case] for seen in ranks}
    assert len(messages) == 1
    message = messages.pop()
    assert message is not None
    assert expected in message
    assert "on rank 0 and" in message
    assert "What to do:" in message
    assert ("seed_everything" if case == "weights" else "use_distributed_sampler") in message
