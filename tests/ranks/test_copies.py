"""Every operator that copies in one step of a tiny Llama, at TP=2 and in one process: exact counts.

Left out is what is no larger than one token's hidden state: labels, positions, norms' gradients. Even shards, along the
first dim that is longer than 1, go through a collective without a copy: that is batch 1 here, where tokens
``[1, 16, 64]`` are sharded.
"""

from __future__ import annotations

import sys
from collections import Counter
from functools import lru_cache
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from distributed import run_ranks
from tiny import tiny_model, token_batch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import lightning_autotp
from lightning_autotp import parallelize

LENGTH, HIDDEN = 16, 64
COPYING = {"cat", "clone", "constant_pad_nd", "copy_", "index_select", "repeat", "stack", "_to_copy"}
"""Below autograd ``contiguous`` and ``reshape`` are ``clone``, ``pad`` is ``constant_pad_nd``, ``to`` ``_to_copy``."""
PACKAGE = f"{Path(lightning_autotp.__file__).parent}/"
Counts = dict[tuple[str, str], int]


class Copies(TorchDispatchMode):
    """Counts copies by the file of this package that makes them, ``"model"`` for the model's code and autograd."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[tuple[str, str]] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name, result = func.overloadpacket.__name__, func(*args, **(kwargs or {}))
        if name in COPYING and result.numel() > HIDDEN:
            self.counts[_who(), name] += 1
        return result


def _who() -> str:
    """The file that calls: of this package if it does so before a model's own code does."""
    frame = sys._getframe(2)
    while frame is not None:
        name = frame.f_code.co_filename
        if name.startswith(PACKAGE):
            return name.removeprefix(PACKAGE).removesuffix(".py")
        if "/transformers/models/" in name:
            break
        frame = frame.f_back  # type: ignore[assignment]
    return "model"


def step(model: nn.Module, rows: int) -> Counts:
    """The copies of a forward and a backward."""
    batch = {**token_batch(0, rows, LENGTH), "use_cache": False}
    with Copies() as copies:
        model(**batch).loss.backward()
    return dict(copies.counts)


def steps(rank: int, size: int) -> dict[tuple[bool, int], Counts]:
    found = {}
    for sequence_parallel in (False, True):
        model: Any = parallelize(
            tiny_model("llama"),
            dist.group.WORLD,  # type: ignore[arg-type]
            example_inputs={**token_batch(0, 2, LENGTH), "use_cache": False},
            sequence_parallel=sequence_parallel,
        )
        for rows in (1, 2):
            model.zero_grad()
            step(model, rows)  # what is made once, is
            model.zero_grad()
            found[sequence_parallel, rows] = step(model, rows)
    return found


@lru_cache
def two_ranks() -> list[dict[tuple[bool, int], Counts]]:
    return run_ranks(steps, 2)


IN_THE_MODEL = {("model", "cat"): 5}  # the rotary table, and the turned halves of Q and K of two layers
IN_THE_LOSS = {
    # The fused head and loss: the gradients of the hidden states and of the head's weight that it made in forward,
    # times the gradient of the loss.
    ("parallel/linear_cross_entropy", "copy_"): 2,
}


def expected(sequence_parallel: bool, rows: int) -> Counts:
    # In the backward pass gradients with heads before tokens are made contiguous for the linear layers: one a layer.
    found: Counts = {**IN_THE_MODEL, **IN_THE_LOSS, ("model", "clone"): 2}
    if sequence_parallel:
        found["gradients/buckets", "cat"] = 1  # the norms' gradients, to be summed all at once
    if sequence_parallel and rows > 1:
        # Tokens are the second dim, so the ranks' parts of it alternate in memory, but a collective takes and gives
        # them one after the other. One copy for each of 10 gathers (5 in forward, and the backward of 5
        # reduce-scatters) and of the 4 that are made again in the backward pass, ...
        # ... and one for each of 5 reduce-scatters, and of 5 that are the backward of a gather.
        found["parallel/collectives", "cat"] = 14 + 10
    return found


@pytest.mark.parametrize("rows", [1, 2])
@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_only_these_copies_are_made(sequence_parallel: bool, rows: int) -> None:
    for found in two_ranks():
        assert found[sequence_parallel, rows] == expected(sequence_parallel, rows)


@pytest.mark.parametrize("rows", [1, 2])
def test_one_process_copies_as_the_model_does(rows: int) -> None:
    """As on a rank, but for the loss, and for the gradients of keys: their one head of a rank needs no order."""
    assert step(tiny_model("llama"), rows) == {**IN_THE_MODEL, ("model", "clone"): 4}


def test_what_copies_is_seen() -> None:
    """The names are those that a dispatch mode sees."""
    x = torch.ones(4, HIDDEN)
    with Copies() as copies:
        torch.cat([x, x])
        x.t().contiguous()
        nn.functional.pad(x, (0, 1))
        x.clone().copy_(x)
        x.index_select(0, torch.tensor([0, 1]))
        x.double()
        x.t().reshape(-1)
    assert {name for _, name in copies.counts} == COPYING - {"stack", "repeat"}
    assert copies.counts["model", "clone"] >= 2
