"""What Lightning's and Fabric's collectives, ranks and counts mean with several ranks to a copy, or several copies.

Each row of the table in docs/evaluation.md is asked for here, and contrastive losses over gathered embeddings have
the values and the gradients of one process.
"""

from __future__ import annotations

from itertools import pairwise
from math import prod
from typing import Any

import lightning as L
import pytest
import torch
import torch.distributed as dist
from lightning.fabric import Fabric
from lightning.pytorch.callbacks import ThroughputMonitor
from lightning.pytorch.loggers import Logger
from lightning.pytorch.utilities import rank_zero_only
from selected import nightly, selected
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, DistributedSampler
from torchmetrics import SumMetric
from trainer_ranks import run_trainer_ranks

from lightning_autotp import AutoTPFabricStrategy, AutoTPStrategy, full_state_dict
from lightning_autotp.layouts.types import Shard
from lightning_autotp.lightning.throughput import SharedThroughput
from lightning_autotp.lightning.throughput import ThroughputMonitor as FabricThroughputMonitor

Copies = int | tuple[int, int]
SIZES: tuple[tuple[int, Copies], ...] = ((2, 1), (1, 2), (2, 2))
"""Ranks to a copy, and copies."""
HYBRID: tuple[int, Copies] = (1, (2, 2))
"""Two replicas, each of which is sharded over two copies."""
ROWS = torch.randn(24, 6, generator=torch.Generator().manual_seed(1))
OF_STEP = 8
"""Rows of a step, of all copies together."""
FLOPS = 3000
"""Of a batch of one copy, in the whole model, as a user says."""
LOSSES = ("of all rows", "of a copy's rows")


class Tower(nn.Module):
    """Embeds rows, and has a metric."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Sequential(nn.Linear(6, 64), nn.Tanh(), nn.Linear(64, 5))
        self.counted = SumMetric()

    def forward(self, rows: Tensor) -> Tensor:
        return self.net(rows)


def contrastive(kind: str, gather: Any, copy: int, tower: nn.Module, rows: Tensor) -> Tensor:
    """Each row's embedding must be that of its mirror image, among all rows of all copies."""
    ours, mirrored = (F.normalize(tower(x), dim=-1) for x in (rows, rows.flip(1)))
    everyone = gather(mirrored, sync_grads=True).flatten(0, -2)
    targets = torch.arange(len(everyone))
    if kind == LOSSES[0]:
        ours = gather(ours, sync_grads=True).flatten(0, -2)
    else:
        targets = targets[copy * len(ours) :][: len(ours)]
    return F.cross_entropy(5 * ours @ everyone.T, targets)


class Contrasts(L.LightningModule):
    """Trains with such a loss, and asks for everything before."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.flops_per_batch = FLOPS
        self.found: dict[str, Any] = {"losses": []}

    def configure_model(self) -> None:
        if not hasattr(self, "tower"):
            self.tower = Tower()

    def train_dataloader(self) -> DataLoader[Any]:
        """In order: Lightning's own sampler of several copies would shuffle."""
        if self.trainer.world_size == 1:
            return DataLoader(ROWS, batch_size=OF_STEP)  # type: ignore[arg-type]
        place = self.trainer.strategy.distributed_sampler_kwargs  # type: ignore[attr-defined]
        sampler = DistributedSampler(ROWS, shuffle=False, **place)  # type: ignore[arg-type]
        return DataLoader(ROWS, batch_size=OF_STEP // place["num_replicas"], sampler=sampler)  # type: ignore[arg-type]

    @property
    def copy(self) -> int:
        alone = self.trainer.world_size == 1
        return 0 if alone else self.trainer.strategy.distributed_sampler_kwargs["rank"]  # type: ignore[attr-defined]

    def on_train_start(self) -> None:
        if self.trainer.world_size == 1:
            return
        trainer, strategy, copy = self.trainer, self.trainer.strategy, self.copy
        value = torch.tensor([1.0 + copy, 5.0])
        (counts,) = (callback for callback in trainer.callbacks if isinstance(callback, Counts))  # type: ignore[attr-defined]
        self.found |= rows_of(strategy, self, strategy.reduce, [self.tower.counted, counts.counted], value)
        self.found |= {
            "ranks": (trainer.world_size, trainer.global_rank, trainer.local_rank, trainer.is_global_zero),
            "devices": trainer.num_devices,
            "steps": (trainer.num_training_batches, trainer.estimated_stepping_batches),
            "sampler": strategy.distributed_sampler_kwargs,
        }

    def training_step(self, rows: Tensor, _: int) -> Tensor:
        loss = contrastive(self.kind, self.all_gather, self.copy, self.tower, rows)
        self.found["losses"].append(loss.item())
        for how in ("mean", "sum"):
            self.log(how, 1.0 + self.copy, sync_dist=True, reduce_fx=how, on_step=True, on_epoch=False)
            self.log(f"{how} of an epoch", 1.0 + self.copy, sync_dist=True, reduce_fx=how, on_step=False, on_epoch=True)
        return loss

    def on_train_end(self) -> None:
        self.found["logged"] = {name: float(value) for name, value in self.trainer.callback_metrics.items()}

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.3)


def rows_of(strategy: Any, api: Any, reduce: Any, metrics: list[SumMetric], value: Tensor) -> dict[str, Any]:
    """What the Trainer and Fabric both have."""
    metrics = [*metrics, SumMetric(process_group=strategy.data_parallel_group)]
    for metric in metrics:
        metric.update(value[0])
    group = dist.new_group()  # of all processes, but not the default one: what is asked for is done
    found = {
        "gathered": api.all_gather(value),
        "gathered in a dict": api.all_gather({"value": value, "number": 3.0}),
        "gathered over all processes": api.all_gather(value, group=dist.group.WORLD),
        "gathered over a group": api.all_gather(value, group=group),
        "mean": reduce(value.clone()),
        "sum": reduce(value.clone(), reduce_op="sum"),
        "sum over all processes": reduce(value.clone(), group=dist.group.WORLD, reduce_op="sum"),
        "sum over a group": reduce(value.clone(), group=group, reduce_op="sum"),
        "broadcast": strategy.broadcast({"rank": strategy.global_rank}, src=strategy.world_size - 1),
        "decisions": [strategy.reduce_boolean_decision(strategy.global_rank == 0, every) for every in (True, False)],
        "rank zero": rank_zero_only(lambda: "ran")(),
        "metrics": [float(metric.compute()) for metric in metrics],
    }  # fmt: skip
    strategy.barrier()
    return found


class Counts(L.Callback):
    """Has a metric."""

    def __init__(self) -> None:
        self.counted = SumMetric()


class Kept(Logger):
    """Keeps what is logged."""

    name = version = "kept"

    def __init__(self) -> None:
        super().__init__()
        self.rows: list[dict[str, float]] = []

    def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None:
        self.rows.append(metrics)

    def log_hyperparams(self, *_: Any, **__: Any) -> None: ...


def fit(kind: str, strategy: Any = "auto", devices: int = 1, copies: int = 1) -> dict[str, Any]:
    task, kept = Contrasts(kind), Kept()
    monitor = ThroughputMonitor(len, lambda rows: rows.numel(), window_size=2, separator="|")
    L.Trainer(
        accelerator="cpu", devices=devices, strategy=strategy, logger=kept, callbacks=[monitor, Counts()],
        log_every_n_steps=1, max_epochs=1, enable_checkpointing=False, enable_progress_bar=False,
        enable_model_summary=False,
    ).fit(task)  # fmt: skip
    measured = [
        {n[6:]: x for n, x in row.items() if n.startswith("train|")} for row in kept.rows if "train|time" in row
    ]
    return task.found | weights_of(task.tower) | {"measured": measured}


def loop(kind: str, strategy: Any = "auto", devices: int = 1, copies: int = 1) -> dict[str, Any]:
    fabric = Fabric(accelerator="cpu", strategy=strategy, devices=devices)
    early = fabric.to_device(SumMetric())  # which knows of no group yet
    fabric.launch()
    assert early.process_group is None
    copy = fabric.global_rank * copies // devices
    tower = Tower()
    model, optimizer = fabric.setup(tower, torch.optim.SGD(tower.parameters(), lr=0.3))
    found: dict[str, Any] = {"losses": [], "measured": []}
    monitor = FabricThroughputMonitor(fabric, window_size=2, separator="|")
    if devices > 1:
        value = torch.tensor([1.0 + copy, 5.0])
        metrics: Any = [tower.counted, fabric.to_device(SumMetric())]
        found |= rows_of(fabric.strategy, fabric, fabric.all_reduce, metrics, value)
        found["sampler"] = fabric.strategy.distributed_sampler_kwargs
        with fabric.rank_zero_first():
            pass
        found["ranks"] = fabric.world_size, fabric.global_rank, fabric.local_rank, fabric.is_global_zero
    for rows in fabric.setup_dataloaders(DataLoader(ROWS, batch_size=OF_STEP // copies)):  # type: ignore[arg-type]
        loss = contrastive(kind, fabric.all_gather, copy, model, rows)
        fabric.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        found["losses"].append(loss.item())
        seen = len(found["losses"])
        monitor.update(
            time=float(seen), batches=seen, samples=seen * len(rows), lengths=seen * 48 // copies, flops=FLOPS
        )
        found["measured"].append(monitor.compute())
    return found | weights_of(tower)


def weights_of(tower: Any) -> dict[str, Any]:
    if not hasattr(tower, "autotp"):
        return {"weights": {name: value.clone() for name, value in tower.state_dict().items()}}
    layouts = [meta.layout for meta in tower.autotp.metas.values()]
    return {"weights": full_state_dict(tower), "is divided": any(isinstance(layout, Shard) for layout in layouts)}


def number(copies: Copies) -> int:
    """How many copies there are, with all replicas."""
    return copies if isinstance(copies, int) else prod(copies)


def run(kind: str, api: str, tensor_ranks: int, copies: Copies) -> dict[str, Any]:
    inputs = torch.zeros(4, 6)
    made: Any = {"Trainer": AutoTPStrategy, "Fabric": AutoTPFabricStrategy}[api]
    strategy = made(tensor_ranks, copies, example_inputs=inputs)
    return {"Trainer": fit, "Fabric": loop}[api](kind, strategy, tensor_ranks * number(copies), number(copies))


APIS = ("Trainer", "Fabric")
CASES = [
    *((kind, api, *size) for kind in LOSSES for api in APIS for size in SIZES),
    *((LOSSES[0], api, *HYBRID) for api in APIS),
]


REPEATS = [(LOSSES[1], api, *size) for api in APIS for size in SIZES[:2]]
"""For nightly tests: the second loss on one axis alone."""


def ranks(devices: int, cases: list[Any]) -> dict[Any, dict[str, Any]]:
    return {case: run(*case) for case in cases if case[2] * number(case[3]) == devices}


@pytest.fixture(scope="module")
def found(request: pytest.FixtureRequest) -> dict[Any, list[dict[str, Any]]]:
    """What each rank saw, of each case and size."""
    chosen = selected(request, "case")
    cases = [case for case in CASES if case[0] == LOSSES[0] or case in chosen]
    starts = [run_trainer_ranks(ranks, devices, devices, cases) for devices in (2, 4)]
    return {case: [seen[case] for seen in start] for start in starts for case in start[0]}


@pytest.mark.parametrize("case", nightly(CASES, REPEATS))
def test_a_loss_over_gathered_embeddings_is_that_of_one_process(
    case: tuple[str, str, int, Copies], found: dict[Any, list[dict[str, Any]]]
) -> None:
    kind, api, tensor_ranks, _ = case
    wanted = {"Trainer": fit, "Fabric": loop}[api](kind)
    assert wanted["losses"][0] > wanted["losses"][-1] > 0.1
    here = found[case]
    of_copies = torch.tensor([seen["losses"] for seen in here[::tensor_ranks]])
    torch.testing.assert_close(of_copies.mean(0), torch.tensor(wanted["losses"]), rtol=1e-5, atol=0)
    for seen in here:
        assert seen["is divided"] is (tensor_ranks > 1)
        for name, value in wanted["weights"].items():
            torch.testing.assert_close(seen["weights"][name], value, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("size", [*SIZES, HYBRID])
@pytest.mark.parametrize("api", ["Trainer", "Fabric"])
def test_what_every_call_gives(api: str, size: tuple[int, Copies], found: dict[Any, list[dict[str, Any]]]) -> None:
    tensor_ranks, copies = size[0], number(size[1])
    values = torch.tensor([[1.0 + copy, 5.0] for copy in range(copies)])
    for rank, seen in enumerate(found[(LOSSES[0], api, *size)]):
        mine = values[rank // tensor_ranks]
        gathered = values if copies > 1 else mine
        total, devices = values.sum(0), tensor_ranks * copies
        assert torch.equal(seen["gathered"], gathered)
        assert torch.equal(seen["gathered in a dict"]["value"], gathered)
        assert seen["gathered in a dict"]["number"].tolist() == ([3.0] * copies if copies > 1 else 3.0)
        assert torch.equal(seen["gathered over all processes"], gathered)
        assert torch.equal(seen["gathered over a group"], values.repeat_interleave(tensor_ranks, 0))
        assert torch.equal(seen["mean"], total / copies)
        assert torch.equal(seen["sum"], total)
        assert torch.equal(seen["sum over all processes"], total)
        assert torch.equal(seen["sum over a group"], total * tensor_ranks)
        assert seen["broadcast"] == {"rank": devices - 1}
        assert seen["decisions"] == [False, True]
        assert seen["rank zero"] == ("ran" if rank == 0 else None)
        assert seen["metrics"] == [total[0], total[0], total[0]]
        assert seen["ranks"] == (devices, rank, rank, rank == 0)
        place = {"num_replicas": copies, "rank": rank // tensor_ranks}
        assert seen["sampler"] == (None if api == "Fabric" and copies == 1 else place)


@pytest.mark.parametrize("size", [*SIZES, HYBRID])
def test_what_the_trainer_counts_and_logs(size: tuple[int, Copies], found: dict[Any, list[dict[str, Any]]]) -> None:
    tensor_ranks, copies = size[0], number(size[1])
    total, steps = sum(range(1, copies + 1)), len(ROWS) // OF_STEP
    for seen in found[(LOSSES[0], "Trainer", *size)]:
        assert seen["logged"] == {
            "mean": total / copies, "sum": total, "mean of an epoch": total / copies, "sum of an epoch": total * steps,
        }  # fmt: skip
        assert seen["devices"] == tensor_ranks * copies
        assert seen["steps"] == (steps, steps)


def rates(before: dict[str, float], after: dict[str, float], copies: int, devices: int) -> dict[str, float]:
    """What is done in a second by all devices together, and by each."""
    seconds = after["time"] - before["time"]
    done = {"batches": 1, "samples": OF_STEP / copies, "items": OF_STEP * 6 / copies, "flops": FLOPS}
    found = {f"{name}_per_sec": copies * number / seconds for name, number in done.items()}
    of_each = {f"device|{name}": value / devices for name, value in found.items()}
    return of_each if devices == 1 else found | of_each


@pytest.mark.parametrize("size", [*SIZES, HYBRID])
@pytest.mark.parametrize("api", ["Trainer", "Fabric"])
def test_throughput_counts_each_batch_once(
    api: str, size: tuple[int, Copies], found: dict[Any, list[dict[str, Any]]]
) -> None:
    tensor_ranks, copies = size[0], number(size[1])
    first, *others = found[(LOSSES[0], api, *size)]
    alone = {"Trainer": fit, "Fabric": loop}[api](LOSSES[0])
    for measured, of_copies, devices in ((first["measured"], copies, tensor_ranks * copies), (alone["measured"], 1, 1)):
        assert [row["batches"] for row in measured] == [1, 2, 3]
        assert [row["samples"] for row in measured] == [number * OF_STEP / of_copies for number in (1, 2, 3)]
        for before, after in pairwise(measured):
            found_rates = {name: value for name, value in after.items() if "per_sec" in name}
            assert found_rates == pytest.approx(rates(before, after, of_copies, devices))
    assert all(not any(seen["measured"]) for seen in others)


def test_utilization_is_of_each_devices_share() -> None:
    """Two devices that share each batch, of 40 FLOPs a second each, and a batch of 20 FLOPs a second."""
    throughput = SharedThroughput(2, available_flops=40, world_size=2, window_size=2)
    for second in (1, 2):
        throughput.update(time=float(second), batches=second, samples=second, flops=20)
    assert throughput.compute()["device/mfu"] == 0.25
