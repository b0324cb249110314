"""What a forward writes into buffers and attributes is on every rank what it is in one process."""

from __future__ import annotations

import copy
import io

import pytest
import torch
import torch.distributed as dist
from distributed import run_ranks
from rich.console import Console
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from lightning_autotp import Plan, full_state_dict, make_plan, parallelize
from lightning_autotp.layouts.types import Invariant, Shard
from lightning_autotp.operators.graph import KEPT


class Convolutions(nn.Module):
    """A norm with running statistics between two convolutions, which are cut along its channels."""

    def __init__(self, norm: nn.Module, channels: int = 32, *, twice: bool = False, recompute: bool = False) -> None:
        super().__init__()
        self.up, self.norm, self.down = nn.Conv2d(3, channels, 3), norm, nn.Conv2d(channels, 3, 3, padding=2)
        self.twice, self.recompute = twice, recompute

    def forward(self, x: Tensor) -> Tensor:
        x = checkpoint(self._block, x, use_reentrant=False) if self.recompute else self._block(x)
        return (self._block(x) if self.twice else x).square().mean()

    def _block(self, x: Tensor) -> Tensor:
        return self.down(self.norm(self.up(x)).relu())


class OwnNorm(nn.Module):
    """Calls the function itself, and with the batch's statistics in eval mode, too."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(channels))
        self.register_buffer("spread", torch.ones(channels))

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.batch_norm(x, self.mean, self.spread, training=True, momentum=0.2)


class Moving(nn.Module):
    """A moving mean of activations, written by the module's own code."""

    def __init__(self, how: str, hidden: int = 32) -> None:
        super().__init__()
        self.up, self.down, self.how = nn.Linear(8, hidden), nn.Linear(hidden, 8), how
        self.register_buffer("mean", torch.zeros(hidden))
        self.last: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        h = self.up(x)
        now = h.detach().mean((0, 1))
        if self.how == "in place":
            self.mean.mul_(0.9).add_(now, alpha=0.1)
        elif self.how == "some of it":
            self.mean[2:7] = now[2:7]
        elif self.how == "new tensor":
            self.mean = 0.9 * self.mean + 0.1 * now
        elif self.how == "state":
            self.last = h.detach()
        else:
            self.last = h.square().mean()
        return self.down((h - self.mean).relu()).square().mean()


NORMS = {
    "batch norm": lambda: Convolutions(nn.BatchNorm2d(32)),
    "uneven channels": lambda: Convolutions(nn.BatchNorm2d(33), 33),
    "cumulative mean": lambda: Convolutions(nn.BatchNorm2d(32, momentum=None, affine=False)),
    "no statistics": lambda: Convolutions(nn.BatchNorm2d(32, track_running_stats=False)),
    "instance norm": lambda: Convolutions(nn.InstanceNorm2d(32, affine=True, track_running_stats=True)),
    "called twice": lambda: Convolutions(nn.BatchNorm2d(32), twice=True),
    "recomputed": lambda: Convolutions(nn.BatchNorm2d(32), recompute=True),
    "own call": lambda: Convolutions(OwnNorm(32)),
}
COMPILED = "batch norm"
"""The case that is compiled: others have such a norm, too, and are not."""
MOVING = ("in place", "some of it", "new tensor", "loss")


def divided(plan: Plan) -> set[str]:
    return {parameter.names[0] for parameter in plan.parameters if isinstance(parameter.layout, Shard)}


@pytest.mark.parametrize("case", NORMS)
def test_channels_with_running_statistics_are_cut(case: str) -> None:
    plan, _ = make_plan(NORMS[case](), 2, example_inputs=torch.zeros(4, 3, 7, 7))
    assert {"up.weight", "down.weight"} <= divided(plan)
    written = [change for change in plan.conversions if change.updated]
    assert len(written) == (0 if case == "no statistics" else 2)
    # A collective for each call that writes statistics, whatever their number.
    gathers = sum(each.calls for each in plan.communication if each.kind == "all_gather")
    assert gathers == {"no statistics": 0, "called twice": 2}.get(case, 1)
    assert Plan.from_json(plan.to_json()) == plan


def test_an_attribute_is_no_part_of_a_sum() -> None:
    plan, solution = make_plan(Moving("loss"), 2, example_inputs=torch.zeros(4, 5, 8))
    [kept] = [operator for operator in solution.graph.operators if operator.name == KEPT]
    assert isinstance(solution.layouts[kept.inputs[0]], Invariant)
    assert plan.kept_parts == ()


def test_plan_says_which_attributes_are_parts() -> None:
    plan, _ = make_plan(Moving("state"), 2, example_inputs=torch.zeros(4, 5, 8))
    assert "up.weight" in divided(plan)
    assert plan.kept_parts == ("last",)
    assert Plan.from_json(plan.to_json()) == plan
    console = Console(width=200, file=io.StringIO())
    console.print(plan.table())
    assert "after a forward each rank has its part of the attribute last" in console.file.getvalue()


def _train(model: nn.Module, batches: list[Tensor], steps: int) -> list[Tensor]:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses = []
    for step in range(steps):
        loss = model(batches[step % len(batches)])
        buffers = [buffer for buffer in model.buffers() if buffer.is_floating_point() and buffer.ndim]
        losses.append(loss + sum(buffer.square().mean() for buffer in buffers))
        losses[-1].backward()
        optimizer.step()
        optimizer.zero_grad()
        for buffer in buffers if step == 1 else ():
            buffer[1:2] *= 0.5
    return [loss.detach() for loss in losses]


def _same(model: nn.Module, batch: Tensor, name: str, backend: str = "") -> None:
    """Train, evaluate and train on, with buffers in the loss and rows of them written: all is as in one process."""
    local = copy.deepcopy(model)
    parallelize(local, dist.group.WORLD, example_inputs=batch)
    batches = [batch, batch.flip(0) + 0.5]
    found = []
    for one in (model, torch.compile(local, backend=backend) if backend else local):
        losses = _train(one, batches, 4)
        one.eval()
        with torch.no_grad():
            losses.append(one(batch))
        one.train()
        found.append(losses + _train(one, batches, 2))
    close = {"rtol": 1e-5, "atol": 1e-6}
    torch.testing.assert_close(found[1], found[0], **close, msg=lambda text: f"{name}: {text}")
    for (buffer, here), whole in zip(local.named_buffers(), model.buffers(), strict=True):
        torch.testing.assert_close(here, whole, **close, msg=lambda text, buffer=buffer: f"{name}: {buffer}: {text}")
    if isinstance(model, Moving) and model.how == "loss":
        torch.testing.assert_close(local.last, model.last, **close)
    saved = full_state_dict(local)
    for key, value in model.state_dict().items():
        torch.testing.assert_close(saved[key], value, **close, msg=lambda text, key=key: f"{name}: {key}: {text}")


def _all_the_same(rank: int, ranks: int) -> None:
    torch.manual_seed(1)
    for name, make in NORMS.items():
        _same(make(), torch.rand(4, 3, 7, 7), name, "aot_eager" if name == COMPILED else "")
    for how in MOVING:
        _same(Moving(how), torch.rand(4, 5, 8), how)


def test_training_and_evaluation_are_those_of_one_process() -> None:
    run_ranks(_all_the_same, 2)
