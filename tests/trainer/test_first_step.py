"""The size of the first batch is known before training, and looking at it leaves no trace."""

from __future__ import annotations

import os
import random
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import lightning as L
import numpy as np
import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.plugins import HalfPrecision, MixedPrecision
from tiny import tiny_model
from torch import Tensor, nn
from torch.utils.data import BatchSampler, DataLoader, Dataset, IterableDataset, RandomSampler, SequentialSampler
from trainer_ranks import run_trainer_ranks

from lightning_autotp import AutoTPStrategy
from lightning_autotp.layouts.step_size import NOMINAL_TOKENS, StepSize, TokensPerStep
from lightning_autotp.lightning import first_step
from lightning_autotp.lightning.first_step import first_step_with
from lightning_autotp.parameters.state import is_parallel


class Sentences(Dataset[dict[str, Tensor]]):
    """Sentences of growing length, with everything that reading may change."""

    def __init__(self) -> None:
        self.read = 0
        self.own = np.random.default_rng(0)
        self.opened: Any = None

    def __len__(self) -> int:
        return 100

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        self.read += 1
        self.opened = self.opened or os.open(os.devnull, os.O_RDONLY)
        torch.rand(1), np.random.rand(), random.random(), self.own.random()
        print("a line that nobody should see")
        return {"input_ids": torch.arange(10 + index)}


def padded(samples: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    ids = torch.nn.utils.rnn.pad_sequence([sample["input_ids"] for sample in samples], batch_first=True)
    return {"input_ids": ids, "labels": ids}


def states() -> Any:
    return torch.get_rng_state().tolist(), np.random.get_state(legacy=True)[1].tolist(), random.getstate()


def batch_size_of(loader: Any) -> TokensPerStep:
    return first_step_with(lambda: loader, L.LightningModule()).tokens


def test_looking_changes_nothing(capfd: pytest.CaptureFixture[str]) -> None:
    class Counted(RandomSampler):
        asked = 0

        def __iter__(self) -> Iterator[int]:
            Counted.asked += 1
            return super().__iter__()

    data = Sentences()
    loader = DataLoader(data, batch_size=6, sampler=Counted(data), collate_fn=padded)
    before = states(), data.own.bit_generator.state
    tokens = batch_size_of(loader)
    assert tokens.size == StepSize(6, (15,))
    assert tokens.source == "as the first batch of the training data"
    assert (states(), data.own.bit_generator.state) == before
    assert (data.read, data.opened, Counted.asked, loader._iterator) == (0, None, 0, None)
    assert capfd.readouterr() == ("", "")


@dataclass(frozen=True)
class Batch:
    pixels: Tensor
    names: list[str]


class Items(Dataset[Any]):
    def __init__(self, item: Callable[[], Any]) -> None:
        self.item = item

    def __len__(self) -> int:
        return 50

    def __getitem__(self, index: int) -> Any:
        return self.item()


@pytest.mark.parametrize(
    ("item", "options", "expected"),
    [
        (lambda: (torch.zeros(3, 8, 8), 1), {"batch_size": 5}, StepSize(5)),
        (lambda: torch.zeros(12, dtype=torch.long), {"batch_size": 80, "drop_last": True}, StepSize(50, (12,))),
        (lambda: {"input_ids": torch.zeros(4, 30, dtype=torch.int)}, {"batch_size": None}, StepSize(4, (30,))),
        (lambda: 0, {"batch_size": 2, "collate_fn": lambda _: Batch(torch.zeros(7, 3, 8, 8), ["a"])}, StepSize(7)),
    ],
)
def test_batches_of_all_kinds(item: Any, options: dict[str, Any], expected: StepSize) -> None:
    assert batch_size_of(DataLoader(Items(item), **options)).size == expected


def test_many_samples_at_once() -> None:
    class Together(Items):
        def __getitems__(self, indices: list[int]) -> list[Any]:
            return [torch.zeros(3 + len(indices), dtype=torch.long)] * len(indices)

    assert batch_size_of(DataLoader(Together(dict), batch_size=4)).size == StepSize(4, (7,))


class Stream(IterableDataset[Tensor]):
    def __iter__(self) -> Iterator[Tensor]:
        raise AssertionError("a stream must not be read")


class OwnBatches(BatchSampler):
    pass


def fails() -> Any:
    raise KeyError("no such sample")


def dies() -> Any:
    os._exit(3)


@pytest.mark.parametrize(
    ("loader", "why"),
    [
        (DataLoader(Stream(), batch_size=2), "a stream cannot be inspected"),
        ([torch.zeros(2, 3)], "a list cannot be inspected"),
        (
            DataLoader(Items(dict), batch_sampler=OwnBatches(SequentialSampler(Items(dict)), 2, False)),
            "a OwnBatches of your own",
        ),
        (DataLoader(Items(fails), batch_size=2), "raised KeyError: 'no such sample'"),
        (
            DataLoader(Items(dies), batch_size=2),
            "the process that looked at the first step ended (reading the first batch)",
        ),
        (DataLoader(Items(lambda: time.sleep(60)), batch_size=2), "took more than 1 s"),
        (DataLoader(Items(lambda: "text"), batch_size=2), "no tensors"),
    ],
)
def test_what_is_not_known(loader: Any, why: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(first_step, "SECONDS", 1.0 if "1 s" in why else 20.0)
    tokens = batch_size_of(loader)
    assert tokens.size is None
    assert tokens.number == NOMINAL_TOKENS
    assert tokens.source.startswith("nominal: ")
    assert why in tokens.source


class Task(L.LightningModule):
    """Made of its parts, so that the loader may come from the hook or from outside."""

    def __init__(self, loader: Any = None) -> None:
        super().__init__()
        self.loader = loader
        self.asked = 0

    def configure_model(self) -> None:
        if not hasattr(self, "model"):
            self.model = tiny_model("llama", num_hidden_layers=1)

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        loss: Tensor = self.model(**batch).loss
        return loss

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.0)

    def train_dataloader(self) -> Any:
        self.asked += 1
        return self.loader() if callable(self.loader) else self.loader


def plans() -> dict[str, str]:
    """What the plan is said to be priced for, by where the data come from."""
    data = Sentences()
    loader = DataLoader(data, batch_size=3, collate_fn=padded)

    def talks_to_others() -> Any:
        dist.barrier()
        return loader

    def fit(given: Any, hook: Any, **options: Any) -> str:
        task = Task(hook)
        trainer = L.Trainer(
            accelerator="cpu", devices=2, max_steps=1, logger=False, enable_checkpointing=False,
            enable_progress_bar=False, enable_model_summary=False, strategy=AutoTPStrategy(2, **options),
        )  # fmt: skip
        trainer.fit(task, given)
        assert task.asked == (hook is not None)
        return str(task.model.autotp.plan.priced_for)

    return {
        "hook": fit(None, loader),
        "hook that talks": fit(None, talks_to_others),
        "said": fit(loader, None, tokens_per_step=2048),
        "both said": fit(loader, None, tokens_per_step=(2, 300)),
    }


def test_the_strategy_prices_for_the_first_batch(two: list[dict[str, Any]]) -> None:
    first, second = (seen["plans"] for seen in two)
    assert first == second
    ((_, _, given),) = two[0]["trained"]["by position"][1]
    assert given == "3 x 12 tokens (as the first batch of the training data)"
    assert first["hook"] == "3 x 12 tokens (as the first batch of the training data)"
    assert first["hook that talks"].startswith(
        "4 x 4096 tokens (nominal: train_dataloader(), called ahead of time, raised"
    )
    assert first["said"] == "1 x 2048 tokens (as tokens_per_step says)"
    assert first["both said"] == "2 x 300 tokens (as tokens_per_step says)"


class Pictures(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(48, 64), nn.Linear(64, 10)

    def forward(self, pictures: Tensor, *, scale: float) -> Tensor:
        result: Tensor = self.down(torch.relu(self.up(pictures.flatten(1) * scale)))
        return result


class Steps(L.LightningModule):
    """Trains with any step, and keeps each step's loss."""

    def __init__(self, make: Callable[[], dict[str, nn.Module]], step: Callable[[Any, Any], Tensor]) -> None:
        super().__init__()
        self.make, self.step = make, step
        self.losses: list[float] = []
        self.steps = 0

    def configure_model(self) -> None:
        if not list(self.children()):
            torch.manual_seed(0)
            for name, model in self.make().items():
                self.add_module(name, model)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.steps += 1
        self.log("steps", self.steps)
        loss = self.step(self, batch)
        self.losses.append(loss.item())
        return loss

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def llama() -> dict[str, nn.Module]:
    return {"model": tiny_model("llama", num_hidden_layers=1)}


def by_position(module: Any, batch: Any) -> Tensor:
    logits = module.model(batch["input_ids"], torch.ones_like(batch["labels"])).logits
    return nn.functional.cross_entropy(logits.flatten(0, 1), batch["labels"].flatten())


def pictures(module: Any, batch: Any) -> Tensor:
    return nn.functional.cross_entropy(module.model(batch[0], scale=2.0), batch[1])


def distilled(module: Any, batch: Any) -> Tensor:
    with torch.no_grad():
        taught = module.teacher(batch["input_ids"]).logits
    loss: Tensor = module.student(**batch).loss
    return loss + nn.functional.mse_loss(module.student(batch["input_ids"]).logits, taught)


def penalized(module: Any, batch: Any) -> Tensor:
    """Each critic is first called where a gradient is taken, of what was read and of what is half synthetic."""
    read = batch[0].flatten(1).requires_grad_()
    (slope,) = torch.autograd.grad(module.first(read).sum(), read, create_graph=True)
    loss: Tensor = slope.square().sum(1).mean() - module.first(read).mean()
    made = module.generator(torch.linspace(-1, 1, 40).view(5, 8))
    mixed = (0.5 * read + 0.5 * made.detach()).requires_grad_()
    (slope,) = torch.autograd.grad(module.second(mixed).sum(), mixed, create_graph=True)
    return loss + 10 * (slope.norm(2, 1) - 1).square().mean() - module.second(made).mean()


def layers(*sizes: int) -> nn.Module:
    return nn.Sequential(nn.Linear(sizes[0], sizes[1]), nn.SiLU(), nn.Linear(sizes[1], sizes[2]))


def talks_first(module: Any, batch: Any) -> Tensor:
    """Asks the other ranks before it calls the model: not possible ahead of time, and not in the parent's name."""
    asked = torch.ones(1)
    if module.trainer.world_size > 1:
        dist.all_reduce(asked)
    loss: Tensor = module.model(**batch).loss
    return loss * asked / asked


def needs_more(module: Any, batch: Any) -> Tensor:
    loss: Tensor = module.model(**batch).loss * module.trainer.optimizers[0].param_groups[0]["lr"]
    return loss


STEPS: dict[str, tuple[Any, Any, Any, str]] = {
    "by position": (llama, by_position, "sentences", "its batch cut to a few short sentences"),
    "pictures": (lambda: {"model": Pictures()}, pictures, "pictures", "the call of the first training step"),
    "distilled": (
        lambda: {"teacher": llama()["model"], "student": llama()["model"]}, distilled, "sentences",
        "its batch cut to a few short sentences",
    ),
    "penalized": (
        lambda: {"generator": layers(8, 32, 48), "first": layers(48, 32, 1), "second": layers(48, 32, 1)}, penalized,
        "pictures", "the call of the first training step",
    ),
    "talks first": (llama, talks_first, "sentences", "a synthetic batch (training_step, run ahead of time, raised"),
    "needs more": (llama, needs_more, "sentences", "its batch cut to a few short sentences"),
}  # fmt: skip


class Modes(nn.Module):
    """Is told what is on where it is called, and where its batch was read."""

    def forward(self, x: Tensor, **modes: Any) -> Tensor:
        return x


def modes() -> dict[str, Any]:
    kinds = ("cpu", "cuda")
    return {kind: torch.is_autocast_enabled(kind) for kind in kinds} | {"dtype": str(torch.get_default_dtype())}


def called_with_modes(module: Any, batch: Any) -> Tensor:
    called: Tensor = module.model(batch["x"], **batch["read"], **{f"called_{name}": on for name, on in modes().items()})
    return called


@pytest.mark.parametrize("precision", ["bf16-mixed", "16-mixed", "bf16-true"])
def test_the_process_that_looks_calls_nothing_of_cuda(precision: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """CUDA is in use before it is forked, and must not be used in it."""
    parent = os.getpid()

    def cuda(found: Any) -> Callable[..., Any]:
        def call(*_: Any, **__: Any) -> Any:
            if os.getpid() != parent:
                raise RuntimeError("Cannot re-initialize CUDA in forked subprocess")
            return found

        return call

    answers = {
        "_lazy_init": None, "is_available": True, "is_initialized": True, "current_device": 0, "device_count": 1,
        "is_bf16_supported": True, "get_device_capability": (9, 0), "get_rng_state": torch.get_rng_state(),
    }  # fmt: skip
    for name, found in answers.items():
        monkeypatch.setattr(torch.cuda, name, cuda(found))
    plugin: Any = {
        "bf16-mixed": lambda: MixedPrecision("bf16-mixed", "cuda"),
        "16-mixed": lambda: MixedPrecision("16-mixed", "cuda", torch.amp.GradScaler("cpu")),
        "bf16-true": lambda: HalfPrecision("bf16-true"),
    }[precision]()
    module = Steps(lambda: {"model": Modes()}, called_with_modes)
    module.trainer = L.Trainer(accelerator="cpu", logger=False, enable_checkpointing=False, plugins=[plugin])
    module.configure_model()
    data = DataLoader([0, 1], batch_size=2, collate_fn=lambda _: {"x": torch.ones(2, 3), "read": modes()})
    found = first_step_with(lambda: data, module, [module.model])
    (call,) = found.calls
    assert call is not None, found.why
    outside = {"cpu": False, "cuda": False, "dtype": "torch.float32"}
    within = outside | ({"dtype": "torch.bfloat16"} if precision == "bf16-true" else {"cuda": True})
    read = outside | {"cuda": within["cuda"]}  # which concerns nothing that is read
    assert call.kwargs == read | {f"called_{name}": value for name, value in within.items()}
    assert modes() == outside


def test_why_a_model_is_not_called() -> None:
    def asks(module: Any, batch: Any) -> Any:
        return module.second(module.first(batch) * float(module.first(batch).mean()))

    for step, why in ((asks, "raised RuntimeError: Tensor.item()"), (lambda m, x: m.first(x), "not call it")):
        module = Steps(lambda: {"first": layers(3, 4, 3), "second": layers(3, 4, 3)}, step)
        module.trainer = L.Trainer(accelerator="cpu", logger=False, enable_checkpointing=False)
        module.configure_model()
        vars(module)["training_step"] = partial(step, module)
        found = first_step_with(lambda: DataLoader(torch.ones(4, 3)), module, [module.first, module.second])
        assert [call is None for call in found.calls] == [False, True]
        assert why in found.why


def trained(name: str, ranks: int) -> tuple[list[float], list[tuple[str, int, str]], int]:
    """The losses of two steps, and their number.

    For each model: where its traced call is from, how many kinds of calls were proved, and what its plan is priced for.
    """
    make, step, data, _ = STEPS[name]
    if data == "pictures":
        items: Any = [(torch.full((3, 4, 4), float(i)), i) for i in range(10)]
        loader: Any = DataLoader(items, batch_size=5)
    else:
        loader = DataLoader(Sentences(), batch_size=3, collate_fn=padded)
    task = Steps(make, step)
    trainer = L.Trainer(
        accelerator="cpu", devices=ranks, max_steps=2, logger=False, enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False, strategy=AutoTPStrategy(ranks) if ranks > 1 else "auto",
    )  # fmt: skip
    trainer.fit(task, loader)
    states = [model.autotp for model in task.children() if is_parallel(model)]
    proved = [(s.plan.traced_with, len(s.guard.calls.ways), str(s.plan.priced_for)) for s in states]
    return task.losses, proved, task.steps


def two_ranks() -> dict[str, Any]:
    return {"plans": plans(), "trained": {name: trained(name, 2) for name in STEPS}}


@pytest.fixture(scope="module")
def two() -> list[dict[str, Any]]:
    return run_trainer_ranks(two_ranks, 2)


def test_the_call_of_the_first_step_is_the_planned_one(two: list[dict[str, Any]]) -> None:
    """So the first step proves no other kind of call, and nothing of the look ahead remains."""
    first, second = (seen["trained"] for seen in two)
    assert first == second
    for name, (_, _, _, source) in STEPS.items():
        losses, proved, steps = first[name]
        assert losses == pytest.approx(trained(name, 1)[0], rel=1e-5), name
        assert steps == 2, name
        kinds = {"distilled": [1, 2], "penalized": [1, 1, 1], "talks first": [2]}.get(name, [1])
        assert [kinds for _, kinds, _ in proved] == kinds, name
        assert all(source in said for said, _, _ in proved), (name, proved)
