"""Several models in one LightningModule, none of them Hugging Face's."""

from __future__ import annotations

from typing import Any

import lightning as L
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader
from trainer_ranks import run_trainer_ranks

from lightning_autotp import AutoTPStrategy, full_state_dict
from lightning_autotp.lightning.discovery import find_models
from lightning_autotp.parameters.state import is_parallel


def perceptron(inputs: int, outputs: int) -> nn.Module:
    return nn.Sequential(nn.Linear(inputs, 64), nn.ReLU(), nn.Linear(64, outputs))


class Recording(L.LightningModule):
    """Makes its models with :meth:`build`, and keeps its losses."""

    def __init__(self) -> None:
        super().__init__()
        self.losses: list[float] = []

    def configure_model(self) -> None:
        if not list(self.children()):
            torch.manual_seed(0)
            self.build()

    def build(self) -> None:
        raise NotImplementedError

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


class Distilling(Recording):
    def build(self) -> None:
        self.teacher, self.student = perceptron(16, 8).requires_grad_(False), perceptron(16, 8)

    def training_step(self, batch: Any, _: int) -> Tensor:
        with torch.no_grad():
            taught = self.teacher(batch)
        loss = F.mse_loss(self.student(batch), taught)
        self.losses.append(loss.item())
        return loss

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.student.parameters(), lr=0.1)


class Adversarial(Recording):
    """Two halves, each with an optimizer of its own, in a dict."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def build(self) -> None:
        self.nets = nn.ModuleDict({"generator": perceptron(4, 16), "critic": perceptron(16, 1)})

    def training_step(self, batch: Tensor, _: int) -> None:
        first, second = self.optimizers()
        self.toggle_optimizer(second)
        made = self.nets["generator"](batch[:, :4]).detach()
        loss = self.nets["critic"](made).mean() - self.nets["critic"](batch).mean()
        second.zero_grad()
        self.manual_backward(loss)
        second.step()
        self.untoggle_optimizer(second)
        loss = loss.detach() - self.nets["critic"](self.nets["generator"](batch[:, :4])).mean()
        first.zero_grad()
        self.manual_backward(loss)
        first.step()
        self.losses.append(loss.item())

    def configure_optimizers(self) -> Any:
        return [torch.optim.SGD(net.parameters(), lr=0.1) for net in self.nets.values()]


class Pool(nn.Module):
    """Weighs 16 tokens, and takes what is left of all their features."""

    def __init__(self) -> None:
        super().__init__()
        self.weights = nn.Parameter(torch.linspace(-1, 1, 16))

    def forward(self, x: Tensor) -> Tensor:
        return (x * self.weights[:, None]).square().mean(-1)


class Layers(Recording):
    """Layers that are the LightningModule's own: what one returns in parts is given to another."""

    def build(self) -> None:
        self.embedding, self.pool = nn.Embedding(101, 32), Pool()
        self.mix, self.head = nn.Conv1d(32, 32, 3, padding=1), nn.Linear(16, 4)

    def training_step(self, batch: Tensor, _: int) -> Tensor:
        embedded = self.embedding((batch * 10).long() % 101)
        mixed = self.mix(embedded.transpose(1, 2)).transpose(1, 2)
        loss = self.head(self.pool(embedded) + self.pool(mixed)).square().mean()
        self.losses.append(loss.item())
        return loss


class OfOneLength(nn.Module):
    """Takes rows of 16 tokens only, so it cannot be traced with a batch that is cut to other lengths."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.positions = nn.Embedding(101, 32), nn.Parameter(torch.ones(16, 32))
        self.up, self.down = nn.Linear(32, 64), nn.Linear(64, 32)

    def forward(self, ids: Tensor) -> Tensor:
        down: Tensor = self.down(F.relu(self.up(self.embedding(ids) + self.positions)))
        return down


class FixedLength(Recording):
    def build(self) -> None:
        self.net = OfOneLength()

    def training_step(self, batch: Tensor, _: int) -> Tensor:
        loss = self.net((batch * 10).long() % 101).square().mean()
        self.losses.append(loss.item())
        return loss


def trained(kind: type[Any], ranks: int, **options: Any) -> tuple[list[float], dict[str, Tensor], list[str]]:
    """Losses and weights after three steps, and which modules are parallel."""
    task = kind()
    trainer = L.Trainer(
        accelerator="cpu", devices=ranks, max_steps=6 if kind is Adversarial else 3, logger=False,
        enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
        strategy=AutoTPStrategy(ranks, **options) if ranks > 1 else "auto",
    )  # fmt: skip
    rows = torch.randn(15, 16, generator=torch.Generator().manual_seed(1))
    trainer.fit(task, DataLoader(list(rows), batch_size=5))
    state = full_state_dict(task) if ranks > 1 else task.state_dict()
    return task.losses, dict(state), [name for name, module in task.named_modules() if is_parallel(module)]


RUNS: list[tuple[type[Any], dict[str, Any], list[str]]] = [
    (Distilling, {}, ["teacher", "student"]),
    (Adversarial, {}, ["nets.generator", "nets.critic"]),
    (Distilling, {"models": ["student"]}, ["student"]),
    (
        Distilling,
        {"example_inputs": {"student": torch.zeros(2, 16), "teacher": (torch.zeros(3, 16),)}},
        ["teacher", "student"],
    ),
    (Layers, {}, ["embedding", "pool", "mix", "head"]),
    (FixedLength, {}, ["net"]),
]


def all_trained() -> list[tuple[list[float], dict[str, Tensor], list[str]]]:
    return [trained(kind, 2, **options) for kind, options, _ in RUNS]


def test_each_model_is_divided_and_trains_as_in_one_process() -> None:
    found, _ = run_trainer_ranks(all_trained, 2)
    for (kind, _, names), (losses, weights, parallel) in zip(RUNS, found, strict=True):
        expected_losses, expected_weights, _ = trained(kind, 1)
        assert parallel == names
        assert losses == pytest.approx(expected_losses, rel=1e-5)
        assert len(losses) == 3
        for name, weight in expected_weights.items():
            torch.testing.assert_close(weights[name], weight, rtol=1e-4, atol=1e-6, msg=name)


def test_models_are_found_by_name() -> None:
    task = Distilling()
    task.configure_model()
    one, other = torch.zeros(1), torch.zeros(2)
    assert find_models(task, {"student": one}) == [(task.teacher, None), (task.student, one)]
    assert find_models(task, {"student": one}, ["student"]) == [(task.student, one)]
    assert find_models(task, {"x": other}, ["student"]) == [(task.student, {"x": other})]
    assert [inputs for _, inputs in find_models(task, lambda: one)] == [one, one]


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"names": ["pupil"]}, "models= names 'pupil', which Distilling does not .*children are teacher, student"),
        ({"names": ["student", "student.0"]}, "'student.0', which is inside 'student'"),
        ({"example_inputs": {"student": 1, "pupil": 2}}, "are for student, and also for pupil"),
    ],
)  # fmt: skip
def test_names_that_are_none_are_errors(options: dict[str, Any], said: str) -> None:
    task = Distilling()
    task.configure_model()
    with pytest.raises(ValueError, match=said):
        find_models(task, **options)
