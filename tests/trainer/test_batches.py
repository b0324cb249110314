"""Batches and samplers: what each rank reads, and what it gets, against one process."""

from __future__ import annotations

import os
import random
from collections import namedtuple
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import lightning as L
import numpy as np
import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import BasePredictionWriter
from lightning.pytorch.utilities import CombinedLoader
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence, pack_sequence
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    DistributedSampler,
    IterableDataset,
    Sampler,
    get_worker_info,
)
from trainer_ranks import run_trainer_ranks
from training import error_of, trainer
from transformers import BatchEncoding

from lightning_autotp import AutoTPStrategy
from lightning_autotp.data.batches import LARGE, read_once

WIDTH = 6
ROWS = torch.randn(22, WIDTH, generator=torch.Generator().manual_seed(1))


class Rows(Dataset[Tensor]):
    """Numbered rows that counts what is read; with ``noise``, drawn anew each time from every generator."""

    def __init__(self, noise: float = 0.0, broken: int | None = None) -> None:
        self.noise, self.broken, self.reads = noise, broken, 0

    def __len__(self) -> int:
        return len(ROWS)

    def __getitem__(self, index: int) -> dict[str, Any]:
        self.reads += 1
        if index == self.broken:
            raise ValueError(f"row {index} is damaged")
        noise = self.noise * (torch.rand(WIDTH) + random.random() + np.random.rand()) if self.noise else 0
        return {"row": ROWS[index] + noise, "index": index}


class Stream(IterableDataset[Any]):
    """A stream without a length, split between the workers of one place among several."""

    def __init__(self, replicas: int = 1, rank: int = 0) -> None:
        self.replicas, self.rank, self.reads = replicas, rank, 0

    def __iter__(self) -> Iterator[dict[str, Any]]:
        worker = get_worker_info()
        workers, number = (worker.num_workers, worker.id) if worker is not None else (1, 0)
        for index in range(self.rank * workers + number, 20, self.replicas * workers):
            self.reads += 1
            yield {"row": ROWS[index], "index": index}


class Blocks:
    """Batches without a ``DataLoader``."""

    def __len__(self) -> int:
        return 5

    def __iter__(self) -> Iterator[dict[str, Tensor]]:
        return ({"row": ROWS[place : place + 4], "index": torch.arange(place, place + 4)} for place in range(0, 20, 4))


class ReadByFirst(Rows):
    """May be read by the workers of the first rank only."""

    def __getitem__(self, index: int) -> dict[str, Any]:
        if os.environ.get("RANK", "0") != "0":
            raise RuntimeError("read on another rank than the first")
        return super().__getitem__(index)


class ByEpoch(Sampler[int]):
    """Another part of the data in every epoch."""

    epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[int]:
        return iter(range(4 * self.epoch, 4 * self.epoch + 8))

    def __len__(self) -> int:
        return 8


class Backwards(BatchSampler):
    """A batch sampler of the user's own."""

    def __iter__(self) -> Iterator[list[int]]:
        return iter([batch[::-1] for batch in super().__iter__()])


class Resumable(DataLoader[Any]):
    """A loader whose position goes into the checkpoint."""

    position = 0

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]
        for number, batch in enumerate(super().__iter__()):
            if number >= self.position:
                self.position = number + 1
                yield batch
        self.position = 0

    def state_dict(self) -> dict[str, int]:
        return {"position": self.position}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.position = state["position"]


class Net(L.LightningModule):
    """Writes down the indices it sees in every stage, and its losses."""

    example_input_array = torch.zeros(5, WIDTH)

    def __init__(self) -> None:
        super().__init__()
        self.dropout = nn.Dropout(0.2)
        self.begin()

    def begin(self) -> None:
        self.losses: list[float] = []
        self.seen: dict[str, list[Any]] = {"train": [], "validation": []}

    def configure_model(self) -> None:
        if not hasattr(self, "net"):
            self.net = nn.Sequential(nn.Linear(WIDTH, 14), nn.Tanh(), nn.Linear(14, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x)

    def loss(self, batch: Any) -> Tensor:
        rows = [batch] if "row" in batch else [part for part in batch.values() if part is not None]
        return sum((self.dropout(self.net(part["row"])) - part["row"]).square().mean() for part in rows)  # type: ignore

    def indices(self, batch: Any) -> Any:
        if "index" in batch:
            return batch["index"].tolist()
        return {name: part and part["index"].tolist() for name, part in batch.items()}

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = self.loss(batch)
        self.losses.append(loss.item())
        self.seen["train"].append(self.indices(batch))
        return loss

    def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        self.seen["validation"].append((dataloader_idx, batch_idx, self.indices(batch)))
        self.log("validation", self.loss(batch), sync_dist=True)

    def predict_step(self, batch: Any, batch_idx: int) -> list[int]:
        return batch["index"].tolist()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


class Indices(BasePredictionWriter):
    """Collects the indices that Lightning hands to a prediction writer."""

    def __init__(self) -> None:
        super().__init__("epoch")
        self.batch_indices: Any = None

    def write_on_epoch_end(self, trainer: Any, module: Any, predictions: Any, batch_indices: Any) -> None:
        self.batch_indices = batch_indices


def loader(dataset: Any, **options: Any) -> DataLoader[Any]:
    return DataLoader(dataset, **{"batch_size": 4, **options})


def fit(
    task: Net, strategy: Any, devices: int, loaders: Any, validation: Any = None, ckpt_path: Any = None, **options: Any
) -> Net:
    """Train a task, which may have been trained before: its layers are divided once."""
    L.seed_everything(3, verbose=False)
    task.begin()
    options = {"max_steps": -1, "max_epochs": 2, "num_sanity_val_steps": 0, **options}
    fitting = trainer(strategy, devices, **options)
    fitting.fit(task, loaders, validation, ckpt_path=ckpt_path)
    task.trainer = fitting
    return task


def everything(strategy: Any, devices: int, folder: Path) -> dict[str, Any]:
    """Every way to give data to a Trainer; what was seen, and how many rows this rank read."""
    found: dict[str, Any] = {}
    task = Net()

    def note(name: str, task: Net, *datasets: Any) -> None:
        reads = [dataset.reads for dataset in datasets]
        found[name] = {"seen": task.seen, "losses": task.losses, "reads": reads, "state": torch.rand(2).tolist()}

    rows = Rows(noise=0.1)
    note("shuffled, noisy", fit(task, strategy(), devices, loader(rows, shuffle=True)), rows)
    rows, other = Rows(), Rows()
    note(
        "limits", fit(task, strategy(), devices, loader(rows, drop_last=True), loader(other), limit_train_batches=0.5,
        limit_val_batches=2), rows, other,
    )  # fmt: skip
    stream = Stream()
    note("stream", fit(task, strategy(), devices, loader(stream)), stream)
    note("workers", fit(task, strategy(), devices, loader(ReadByFirst(), num_workers=1, persistent_workers=True)))
    note("epochs", fit(task, strategy(), devices, loader(Rows(), sampler=ByEpoch()), max_epochs=3))
    note(
        "batch sampler",
        fit(task, strategy(), devices, loader(Rows(), batch_size=1, batch_sampler=Backwards(range(22), 4, True))),
    )
    note("rebuilt", fit(task, strategy(), devices, loader(Rows(), shuffle=True), reload_dataloaders_every_n_epochs=1))
    note("plain iterable", fit(task, strategy(), devices, Blocks()))
    for mode in ("max_size_cycle", "min_size", "max_size"):
        rows, stream = Rows(), Stream()
        both = CombinedLoader({"a": loader(rows, shuffle=True), "b": loader(stream)}, mode)  # type: ignore[arg-type]
        note(mode, fit(task, strategy(), devices, both), rows, stream)
    rows, other = Rows(), Rows()
    note(
        "two validations",
        fit(task, strategy(), devices, loader(Rows()), [loader(rows), loader(other, batch_size=8)]),
        rows,
        other,
    )

    half = fit(task, strategy(), devices, Resumable(Rows(), batch_size=4), max_epochs=-1, max_steps=3)
    half.trainer.save_checkpoint(folder / f"half-{devices}.ckpt")
    resumed = fit(
        task, strategy(), devices, Resumable(Rows(), batch_size=4), ckpt_path=folder / f"half-{devices}.ckpt",
        max_epochs=-1, max_steps=8,
    )  # fmt: skip
    note("resumed", resumed)

    rows, writer = Rows(), Indices()
    predicting = trainer(strategy(), devices, callbacks=[writer])
    predicted = predicting.predict(task, loader(rows, shuffle=False), return_predictions=True)
    found["predicted"] = {"seen": predicted, "indices": writer.batch_indices, "reads": [rows.reads]}
    return found


Pair = namedtuple("Pair", ["left", "right"])


@dataclass
class Example:
    ids: Tensor
    text: str
    more: Any = None


def values() -> dict[str, Any]:
    """What a batch may hold."""
    base = torch.arange(24, dtype=torch.float32).view(2, 3, 4)
    shared = torch.ones(3)
    return {
        "encoding": BatchEncoding({"input_ids": torch.arange(6).view(2, 3)}),
        "example": Example(base.bfloat16(), "text", [None, 1.5, b"x", Pair(base.bool(), {"a": (1, True)})]),
        "packed": pack_sequence([torch.ones(3, 2), torch.ones(2, 2)]),
        "sparse": torch.eye(3).to_sparse(),
        "odd": [base.transpose(0, 2), base[:, ::2], shared[:1].expand(4), torch.tensor(7), torch.empty(0, 5)],
        "image": torch.randn(2, 3, 4, 4).contiguous(memory_format=torch.channels_last),
        "complex": torch.randn(3, dtype=torch.complex64).conj(),
        "grad": torch.ones(2, requires_grad=True),
        "half": torch.ones(3, dtype=torch.float16),
        "large": torch.arange(2 * LARGE, dtype=torch.uint8),
        "large view": torch.randn(3, LARGE)[:, ::2],
        "shared": (shared, shared),
        "set": {1, 2},
        "array": np.arange(4),
    }


def messages(rank: int) -> dict[str, Any]:
    """What :func:`read_once` makes of values, errors and random numbers."""
    group, cpu = dist.group.WORLD, torch.device("cpu")
    assert group is not None
    found: dict[str, Any] = {}
    torch.manual_seed(rank)
    found["values"] = (
        read_once(values, group, cpu, "reading") if rank == 0 else read_once(_never, group, cpu, "reading")
    )
    found["error"] = error_of(read_once, _fails if rank == 0 else _never, group, cpu, "reading")
    found["unpicklable"] = error_of(
        read_once, (lambda: {"a": lambda: 0}) if rank == 0 else _never, group, cpu, "reading"
    )
    random.seed(rank)
    np.random.seed(rank)
    read_once(lambda: None, group, cpu, "reading")
    found["untouched"] = random.random()
    read_once(_draws, group, cpu, "reading")
    found["drawn"] = torch.rand(1).item(), random.random(), np.random.rand()
    return found


def _never() -> None:
    raise AssertionError("read on a rank that should only receive")


def _fails() -> None:
    torch.rand(5)
    raise KeyError("no such row")


def _draws() -> None:
    torch.rand(1), random.random(), np.random.rand()


def two_ranks(folder: str) -> dict[str, Any]:
    rank = int(os.environ["RANK"])
    found: dict[str, Any] = {"messages": messages(rank)}

    def broadcasting(**options: Any) -> AutoTPStrategy:
        return AutoTPStrategy(2, 1, broadcast_batches=True, **options)

    found["everything"] = everything(broadcasting, 2, Path(folder))
    task = Net()
    found["damaged"] = error_of(fit, task, broadcasting(), 2, loader(Rows(broken=9)))
    found["damaged in a worker"] = error_of(fit, task, broadcasting(), 2, loader(Rows(broken=9), num_workers=1))
    found["not iterable"] = error_of(fit, task, broadcasting(), 2, _Refuses())
    sampler = DistributedSampler(range(22), dist.get_world_size(), dist.get_rank())  # type: ignore[arg-type]
    found["split among all"] = error_of(fit, task, AutoTPStrategy(2, 1), 2, loader(Rows(), sampler=sampler))
    return found


class _Refuses:
    def __iter__(self) -> Any:
        if dist.get_rank() == 0 and hasattr(self, "asked"):
            raise OSError("the disk is gone")
        self.asked = True  # Lightning tries it out once
        return iter([ROWS])


class Data(L.LightningDataModule):
    def train_dataloader(self) -> Any:
        return loader(Rows(), shuffle=True)

    def val_dataloader(self) -> Any:
        assert self.trainer is not None
        return loader(Stream(**_place(self.trainer)), num_workers=2)


def _place(fitting: L.Trainer) -> dict[str, int]:
    place = fitting.strategy.distributed_sampler_kwargs  # type: ignore[attr-defined]
    return {"replicas": place["num_replicas"], "rank": place["rank"]}


def four_ranks() -> dict[str, Any]:
    found: dict[str, Any] = {}
    task = Net()

    def seen(name: str, loaders: Any, validation: Any = None, broadcast: bool = False, **options: Any) -> None:
        strategy = AutoTPStrategy(2, 2, broadcast_batches=broadcast)
        found[name] = fit(task, strategy, 4, loaders, validation, **options).seen

    seen("shuffled", loader(Rows(), shuffle=True), loader(Rows()))
    seen("broadcast", loader(Rows(), shuffle=True), broadcast=True)
    seen("batch sampler", loader(Rows(), batch_size=1, batch_sampler=Backwards(range(22), 4, False)))
    seen("DataModule", Data())
    seen("DataModule, broadcast", Data(), broadcast=True)
    # The groups have formed: a user's own sampler knows its place only now.
    place = {"num_replicas": 2, "rank": dist.get_rank() // 2}
    sampler: Any = DistributedSampler(range(22), **place, shuffle=True, seed=7)  # type: ignore[arg-type]
    seen("own sampler", loader(Rows(), sampler=sampler), use_distributed_sampler=False)
    return found


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("batches")


@pytest.fixture(scope="module")
def two(folder: Path) -> list[dict[str, Any]]:
    return run_trainer_ranks(two_ranks, 2, str(folder))


@pytest.fixture(scope="module")
def alone(folder: Path) -> dict[str, Any]:
    return everything(lambda: "auto", 1, folder)


@pytest.fixture(scope="module")
def four() -> list[dict[str, Any]]:
    return run_trainer_ranks(four_ranks, 4)


CASES = (
    "shuffled, noisy", "limits", "stream", "workers", "epochs", "batch sampler", "rebuilt", "plain iterable",
    "max_size_cycle", "min_size", "max_size", "two validations", "resumed",
)  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_one_reading_rank_gives_all_what_one_process_sees(
    two: list[dict[str, Any]], alone: dict[str, Any], case: str
) -> None:
    wanted = alone[case]
    assert len(wanted["losses"]) > 1
    for rank, found in enumerate(seen["everything"][case] for seen in two):
        assert found["seen"] == wanted["seen"]
        torch.testing.assert_close(torch.tensor(found["losses"]), torch.tensor(wanted["losses"]), rtol=1e-5, atol=0)
        assert found["state"] == wanted["state"]
        assert found["reads"] == (wanted["reads"] if rank == 0 else [0] * len(wanted["reads"]))


def test_cases_are_what_they_say(alone: dict[str, Any]) -> None:
    assert set(CASES) == alone.keys() - {"predicted"}
    assert alone["shuffled, noisy"]["seen"]["train"][0] != [0, 1, 2, 3]
    assert alone["shuffled, noisy"]["reads"] == [44]
    assert alone["epochs"]["seen"]["train"][2] == [4, 5, 6, 7]
    assert len(alone["limits"]["seen"]["validation"]) == 4
    assert alone["max_size"]["seen"]["train"][5]["b"] is None
    assert alone["two validations"]["seen"]["validation"][-1] == (1, 2, [16, 17, 18, 19, 20, 21])
    assert alone["resumed"]["seen"]["train"][0] == [12, 13, 14, 15]


def test_predictions_and_their_indices(two: list[dict[str, Any]], alone: dict[str, Any]) -> None:
    wanted = alone["predicted"]
    assert wanted["indices"] == [wanted["seen"]]
    assert wanted["seen"][-1] == [20, 21]
    for rank, seen in enumerate(two):
        found = seen["everything"]["predicted"]
        assert found == {**wanted, "reads": wanted["reads"] if rank == 0 else [0]}


def assert_same(found: Any, wanted: Any) -> None:
    """Equal values of equal kinds, tensors in equal form."""
    assert type(found) is type(wanted)
    if isinstance(wanted, PackedSequence):
        found, wanted = tuple(found), tuple(wanted)
    if isinstance(wanted, Tensor):
        assert (found.dtype, found.layout, found.requires_grad) == (wanted.dtype, wanted.layout, wanted.requires_grad)
        assert torch.equal(found.to_dense(), wanted.to_dense())
    elif isinstance(wanted, dict | BatchEncoding):
        assert list(found) == list(wanted)
        for key in wanted:
            assert_same(found[key], wanted[key])
    elif isinstance(wanted, list | tuple):
        assert len(found) == len(wanted)
        for one, other in zip(found, wanted, strict=True):
            assert_same(one, other)
    elif isinstance(wanted, Example):
        assert_same(vars(found), vars(wanted))
    elif isinstance(wanted, np.ndarray):
        assert np.array_equal(found, wanted)
    else:
        assert found == wanted


def test_any_batch_arrives(two: list[dict[str, Any]]) -> None:
    torch.manual_seed(0)
    wanted = values()
    for seen in two:
        found = seen["messages"]["values"]
        assert_same(found, wanted)
        assert found["image"].stride() == wanted["image"].stride()
        assert found["odd"][0].stride() == wanted["odd"][0].stride()
        assert found["shared"][0] is found["shared"][1]


def test_random_states_follow_the_reading_rank_where_it_drew(two: list[dict[str, Any]]) -> None:
    first, second = (seen["messages"] for seen in two)
    assert first["untouched"] != second["untouched"]
    assert first["drawn"] == second["drawn"]


@pytest.mark.parametrize(
    ("case", "expected"),
    [
        ("damaged", "row 9 is damaged"),
        ("damaged in a worker", "row 9 is damaged"),
        ("not iterable", "the disk is gone"),
    ],
)
def test_an_error_while_reading_reaches_every_rank(two: list[dict[str, Any]], case: str, expected: str) -> None:
    assert expected in two[0][case]
    assert "rank 0 of 2 failed while" not in two[0][case]
    assert two[1][case].startswith("PeerError: rank 0 of 2 failed while ")
    assert expected in two[1][case]


def test_errors_of_messages(two: list[dict[str, Any]]) -> None:
    first, second = (seen["messages"] for seen in two)
    assert first["error"] == "KeyError: 'no such row'"
    assert second["error"] == "PeerError: rank 0 of 2 failed while reading: KeyError: 'no such row'"
    for seen in (first, second):
        assert "a batch cannot be sent to the other ranks" in seen["unpicklable"]


def test_a_sampler_over_all_ranks_is_refused(two: list[dict[str, Any]]) -> None:
    for seen in two:
        assert "splits the data among all 2 ranks, but there are 1 copies of the model" in seen["split among all"]


def flat(batches: list[list[int]]) -> list[int]:
    return [index for batch in batches for index in batch]


@pytest.mark.parametrize(
    "case", ["shuffled", "broadcast", "batch sampler", "DataModule", "DataModule, broadcast", "own sampler"]
)
def test_copies_share_an_epoch_and_the_ranks_of_a_copy_their_part(four: list[dict[str, Any]], case: str) -> None:
    ranks = [seen[case] for seen in four]
    assert ranks[0] == ranks[1]
    assert ranks[2] == ranks[3]
    first, second = (rank["train"] for rank in (ranks[0], ranks[2]))
    assert len(first) == len(second) > 2
    half = len(first) // 2
    for epoch in (slice(0, half), slice(half, None)):
        mine, theirs = flat(first[epoch]), flat(second[epoch])
        assert not set(mine) & set(theirs)
        assert set(mine) | set(theirs) == set(range(22))
    assert first[:half] != first[half:]


def test_validation_stays_in_order(four: list[dict[str, Any]]) -> None:
    for rank, seen in enumerate(four):
        indices = flat([batch for _, _, batch in seen["shuffled"]["validation"]])
        assert indices == 2 * list(range(rank // 2, 22, 2))


@pytest.mark.parametrize("case", ["DataModule", "DataModule, broadcast"])
def test_a_stream_is_split_by_copy_and_by_worker(four: list[dict[str, Any]], case: str) -> None:
    parts = []
    for rank in (0, 2):
        batches = [indices for _, _, indices in four[rank][case]["validation"]]
        parts.append(flat(batches[: len(batches) // 2]))
    assert len(parts[0]) == len(parts[1]) == 10
    assert sorted(parts[0] + parts[1]) == list(range(20))
