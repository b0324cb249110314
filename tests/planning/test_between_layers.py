"""What may stand between two layers that are divided as if it were not there."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from lightning_autotp import make_plan
from lightning_autotp.layouts.types import Shard


def heads_by_number(h: Tensor) -> Tensor:
    """Sizes that stand in the code, in a view that is taken back at once."""
    apart = h.view(-1, 4, 64)
    return apart.flatten(-2)


def numbers_assigned(h: Tensor) -> Tensor:
    copy = h.clone()
    copy[0] = 0.5
    copy[1:3] = 0
    return copy


BETWEEN: dict[str, Callable[[Tensor], Tensor]] = {
    "tagged": lambda h: torch.hypot(torch.atanh(h.tanh() / 2), torch.fmod(h, 1.5)),
    "with a tensor": lambda h: torch.lerp(h, -h, h.sigmoid()).fmax(torch.logaddexp(h, h)),
    "rounded": lambda h: h + torch.round(h, decimals=2) + torch.frac(h),
    "an activation": lambda h: F.softshrink(F.hardshrink(F.rrelu(h, training=True))),
    "another name": lambda h: h.subtract(1).divide(3).clip(-1, 1) * h.greater(0),
    "made of others": lambda h: F.prelu(h, torch.full((1,), 0.1)) + torch.special.expit(h),
    "in place": lambda h: h.clone().subtract_(1).clip_(-1, 1).hypot_(h),
    "heads by number": heads_by_number,
    "numbers are assigned": numbers_assigned,
    "over rows": lambda h: h - h.median(0, keepdim=True).values + torch.var_mean(h, 0)[0] + h.cummax(0).values,
    "integers": lambda h: h * (h.int() << 1).bitwise_xor(1),
}


class Between(nn.Module):
    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(64, 256), nn.Linear(256, 64)
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.function(self.up(x))).square().mean()


@pytest.mark.parametrize("name", BETWEEN)
def test_the_layers_around_it_are_column_and_row_parallel(name: str) -> None:
    plan, _ = make_plan(Between(BETWEEN[name]), 2, example_inputs=torch.zeros(16, 64))
    assert [(item.calls, item.kind) for item in plan.communication] == [(1, "all_reduce")]
    assert {str(p.layout) for p in plan.parameters if p.names[0].endswith("weight")} == {
        "S(0: 256 -> 128)", "S(1: 256 -> 128)",
    }  # fmt: skip


class BiasedHead(nn.Module):
    """A head whose logits get a bias that is not trained, as BART's, or a mask of classes."""

    bias: Tensor

    def __init__(self, is_mask: bool) -> None:
        super().__init__()
        self.is_mask = is_mask
        self.embedding, self.head = nn.Embedding(1001, 64), nn.Linear(64, 1001, bias=False)
        self.register_buffer("bias", torch.arange(1001) % 3 > 0 if is_mask else torch.zeros(1, 1001))

    def forward(self, tokens: Tensor) -> Tensor:
        logits = self.head(self.embedding(tokens))
        logits = logits.masked_fill(self.bias, -1e4) if self.is_mask else logits + self.bias
        return F.cross_entropy(logits.view(-1, 1001), tokens.view(-1))


@pytest.mark.parametrize("is_mask", [False, True])
def test_logits_stay_sharded_when_they_meet_a_value_for_each_class(is_mask: bool) -> None:
    plan, _ = make_plan(BiasedHead(is_mask), 2, example_inputs=torch.zeros(2, 16, dtype=torch.long))
    (head,) = (parameter.layout for parameter in plan.parameters if parameter.names[0] == "head.weight")
    assert isinstance(head, Shard)
    assert head.dims[0][0] == 0, "the logits are summed over the ranks"
