"""Means over dims that are cut over the ranks, also unevenly, and where a rank has nothing of the dim."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from distributed import run_ranks
from tiny import meta_model
from torch import Tensor

from lightning_autotp import make_plan
from lightning_autotp.layouts.ownership import Ownership
from lightning_autotp.layouts.places import CallSite
from lightning_autotp.layouts.plan import ImplementationPlan
from lightning_autotp.layouts.transitions import Pair
from lightning_autotp.layouts.types import Shard
from lightning_autotp.parallel.collectives import take_owned
from lightning_autotp.parallel.mean import MEAN, mean_of_parts
from lightning_autotp.ranks.group import TPGroup

LENGTHS = (8, 5, 2)


def whole(length: int) -> Tensor:
    return torch.randn(3, 4, length, generator=torch.Generator().manual_seed(length), dtype=torch.float64)


def use_of(length: int, size: int, output: Pair) -> ImplementationPlan:
    layout = Shard(((2, Ownership.even(length, size)),))
    return ImplementationPlan("norm", MEAN.name, output=output, call=CallSite("file", 1, "mean", 0), layout=layout)


def means(rank: int, size: int) -> dict[int, tuple[Tensor, Tensor, Tensor]]:
    """By length of the dim: the mean, an Invariant one over two dims, and the gradient of this rank's part."""
    group = TPGroup.of(dist.group.WORLD)
    found = {}
    for length in LENGTHS:
        part = take_owned(whole(length), 2, Ownership.even(length, size), rank).requires_grad_()
        mean = mean_of_parts(use_of(length, size, ("P", "R")), group, Tensor.mean, (part, -1), {"keepdim": True})
        (part * mean.exp()).sum().backward()
        total = mean_of_parts(use_of(length, size, ("P", "I")), group, torch.mean, (part,), {"dim": (1, 2)})
        assert part.grad is not None
        found[length] = mean.detach(), total.detach(), part.grad
    return found


@pytest.mark.parametrize("size", [2, 3])
def test_a_mean_of_parts_is_the_mean(size: int) -> None:
    for rank, found in enumerate(run_ranks(means, size)):
        for length, (mean, total, gradient) in found.items():
            x = whole(length).requires_grad_()
            wanted = x.mean(-1, keepdim=True)
            (x * wanted.exp()).sum().backward()
            assert x.grad is not None
            torch.testing.assert_close(mean, wanted.detach())
            torch.testing.assert_close(total, x.detach().mean((1, 2)))
            torch.testing.assert_close(gradient, take_owned(x.grad, 2, Ownership.even(length, size), rank))


def test_a_part_of_another_length_is_an_error() -> None:
    group = TPGroup(name="", rank=0, size=2)
    with pytest.raises(ValueError, match=r"the mean in norm is over parts of a dim of 8 elements, .* 4, but .* 3"):
        mean_of_parts(use_of(8, 2, ("P", "R")), group, torch.mean, (torch.zeros(3, 4, 3), -1), {})


def test_a_norm_over_all_heads_sums_one_number_a_token() -> None:
    """OLMo 2 normalizes queries and keys over all heads: nothing is gathered for that."""
    plan, _ = make_plan(meta_model("olmo2"), 2)
    norms = {use.module for use in plan.implementations if use.name == MEAN.name}
    assert norms == {f"model.layers.{n}.self_attn.{which}_norm" for n in range(2) for which in "qk"}
    assert not [count for count in plan.communication if count.kind == "all_gather"]
