"""A plan says whether it is the cheapest, or how much another one could save."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from rich.console import Console
from tiny import meta_model
from torch import Tensor, nn
from torch.nn import functional as F

from lightning_autotp import Plan, make_plan
from lightning_autotp.solving import elimination, tables
from lightning_autotp.solving.elimination import Elimination
from lightning_autotp.solving.integer_program import least_sum

TOKENS = {"x": torch.zeros(5, 61, dtype=torch.long)}


def printed(plan: Plan) -> str:
    console = Console(width=200)
    with console.capture() as capture:
        console.print(plan.table())
    return capture.get()


class Passed(nn.Module):
    """``act`` runs several times: a conversion where it begins would be cheaper for one run, and wrong for another."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.norm, self.act = nn.Embedding(1009, 96), nn.LayerNorm(96), nn.Tanh()
        self.up, self.down = nn.Linear(96, 384), nn.Linear(384, 96)
        self.up_again, self.down_again = nn.Linear(96, 384), nn.Linear(384, 96)
        self.head = nn.Linear(96, 1009)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.embed(x)
        hidden = self.act(hidden + self.down(self.act(self.up(self.norm(hidden)))))
        hidden = self.act(hidden + self.down_again(self.act(self.up_again(self.norm(hidden)))))
        return self.head(hidden).logsumexp(-1).sum()


class ShiftedWindows(nn.Module):
    """Attention in windows that are shifted, and padded where they do not divide, as in Swin transformers."""

    def __init__(self, shift: int) -> None:
        super().__init__()
        self.shift, self.window, self.heads = shift, 4, 6
        self.norm, self.qkv, self.proj = nn.LayerNorm(96), nn.Linear(96, 3 * 96), nn.Linear(96, 96)
        self.bias = nn.Parameter(torch.zeros(self.heads, self.window**2, self.window**2))

    def forward(self, x: Tensor) -> Tensor:
        rows, height, width, features = x.shape
        window, heads = self.window, self.heads
        hidden = F.pad(self.norm(x), (0, 0, 0, -width % window, 0, -height % window))
        _, high, wide, _ = hidden.shape
        hidden = torch.roll(hidden, (-self.shift, -self.shift), dims=(1, 2))
        hidden = hidden.view(rows, high // window, window, wide // window, window, features)
        windows = (high // window) * (wide // window)
        hidden = hidden.permute(0, 1, 3, 2, 4, 5).reshape(rows * windows, window**2, features)
        qkv = self.qkv(hidden).reshape(rows * windows, window**2, 3, heads, features // heads).permute(2, 0, 3, 1, 4)
        query, key, value = qkv[0] * features**-0.5, qkv[1], qkv[2]
        weights = (query @ key.transpose(-2, -1) + self.bias).softmax(-1)
        hidden = self.proj((weights @ value).transpose(1, 2).reshape(rows * windows, window**2, features))
        hidden = hidden.view(rows, high // window, wide // window, window, window, features)
        hidden = hidden.permute(0, 1, 3, 2, 4, 5).reshape(rows, high, wide, features)
        return x + torch.roll(hidden, (self.shift, self.shift), dims=(1, 2))[:, :height, :width].contiguous()


class Shifted(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, 96, 4, 4)
        self.layers = nn.ModuleList(ShiftedWindows(shift) for shift in (0, 2, 0, 2))
        self.head = nn.Linear(96, 1009)

    def forward(self, picture: Tensor) -> Tensor:
        hidden = self.patches(picture).permute(0, 2, 3, 1)
        for layer in self.layers:
            hidden = layer(hidden)
        return self.head(hidden.mean((1, 2))).logsumexp(-1).sum()


@pytest.mark.parametrize(
    "family", [*(pytest.param(one, marks=pytest.mark.nightly) for one in ("llama", "gemma2")), "phi3"]
)
def test_an_integer_program_finds_the_same_price(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """With tables too small for most joins, HiGHS solves a good part of a real model's problem."""
    _, eliminated = make_plan(meta_model(family), 2)
    programs: list[int] = []

    def counted(left: Any, seconds: float) -> Any:
        programs.append(len(left))
        return least_sum(left, seconds)

    monkeypatch.setattr(elimination, "least_sum", counted)
    monkeypatch.setattr(tables, "Elimination", partial(Elimination, most_rows=30))
    _, programmed = make_plan(meta_model(family), 2)
    assert max(programs) > 20
    assert programmed.cost == pytest.approx(eliminated.cost, rel=1e-9)
    assert programmed.gap == eliminated.gap == 0


def test_shifted_windows_are_divided_and_the_plan_is_exact() -> None:
    plan, _ = make_plan(Shifted(), 2, example_inputs={"picture": torch.zeros(3, 3, 72, 72)})
    assert plan.gap == 0
    assert plan.sharded_fraction > 0.9
    assert "exact: no plan is cheaper" in printed(plan)


def test_a_place_that_cannot_convert_leaves_a_gap_and_the_plan_says_so() -> None:
    plan, solution = make_plan(Passed(), 2, example_inputs=TOKENS)
    assert 0 < plan.gap < 0.1
    assert plan.gap == pytest.approx(1 - solution.bound / solution.cost)
    assert f"another plan could save {plan.gap:.1%} at most" in printed(plan)
    assert Plan.from_json(plan.to_json()) == plan
