"""Batches and random numbers that ranks must have in common: what differs is an error on every rank, at any step."""

from __future__ import annotations

import collections
import re
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import lightning as L
import numpy as np
import pytest
import torch
import torch.distributed as dist
from distributed import run_ranks
from lightning.pytorch.plugins import MixedPrecision
from lightning.pytorch.utilities import CombinedLoader
from outcomes import outcome
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.data import DataLoader, Dataset, IterableDataset
from trainer_ranks import run_trainer_ranks
from training import SameStart, error_of, trainer

from lightning_autotp import AutoTPStrategy, full_state_dict
from lightning_autotp.parameters.local_blocks import fill
from lightning_autotp.ranks.agreement import Raised, largest_of_all
from lightning_autotp.ranks.consistency import ReplicaConsistency
from lightning_autotp.ranks.description import LONGEST, ROW, ROWS, checksum, describe, difference
from lightning_autotp.ranks.drift import Drift
from lightning_autotp.ranks.group import TPGroup
from lightning_autotp.ranks.losses import Losses
from lightning_autotp.ranks.random_numbers import own_numbers

WIDTH = 6
TABLE = torch.randn(40, WIDTH, generator=torch.Generator().manual_seed(1))
STEPS = 12

# --- checksums and descriptions, in one process ---

DTYPES = (torch.float32, torch.bfloat16, torch.float64, torch.int64, torch.int16, torch.uint8, torch.bool, torch.cfloat)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", [1, 7, 64, ROW * 9 + 5, ROW * ROWS + 3])
def test_a_checksum_is_of_values_and_places_not_of_memory(dtype: torch.dtype, size: int) -> None:
    draw = torch.Generator().manual_seed(2)
    values = torch.randint(0, 2, (size,), generator=draw).to(dtype)
    values[-1] = 1
    wanted = checksum(values)
    assert wanted.shape == ()
    assert wanted.dtype == torch.int64
    assert checksum(torch.stack([values, values], 1)[:, 1]) == wanted
    assert checksum(torch.cat([values[:1], values])[1:]) == wanted  # in memory it begins in the middle of a word
    for place in {0, size // 2, size - 1}:
        other = values.clone()
        other[place] = 1 - other[place].to(torch.int64)
        assert checksum(other) != wanted
    if size > 1:
        swapped = torch.cat([values[-1:], values[1:-1], values[:1]])
        assert (checksum(swapped) == wanted) == torch.equal(swapped, values)


def test_a_checksum_of_rows_in_another_order_is_another() -> None:
    rows = torch.eye(300, 3 * ROW // 2)
    assert checksum(rows) != checksum(rows[torch.randperm(300, generator=torch.Generator().manual_seed(0))])


def test_checksums_of_tensors_of_other_kinds() -> None:
    one = torch.tensor([[0.0, 1.0], [2.0, 0.0]])
    other = torch.tensor([[0.0, 2.0], [1.0, 0.0]])
    kinds = {
        "sparse": Tensor.to_sparse,
        "rows": Tensor.to_sparse_csr,
        "nested": lambda tensor: torch.nested.as_nested_tensor(list(tensor), layout=torch.jagged),
        "quantized": lambda tensor: torch.quantize_per_tensor(tensor, 0.5, 0, torch.quint8),
        "gradient": lambda tensor: tensor.clone().requires_grad_(),
        "negative": lambda tensor: torch.complex(one, tensor).conj().imag,
        "empty": lambda tensor: tensor[:0],
        "scalar": lambda tensor: tensor[0, 1],
        "meta": lambda tensor: tensor.to("meta"),
    }
    for kind, made in kinds.items():
        assert checksum(made(one)) == checksum(made(one.clone()))
        assert (checksum(made(one)) == checksum(made(other))) == (kind in ("empty", "meta"))


@dataclass
class Sample:
    """A batch of a user's own type."""

    tokens: Tensor
    source: str


def test_a_description_has_all_that_is_plain_in_an_order_that_is_the_same_everywhere() -> None:
    one = {"b": [1, "x"], "a": (torch.zeros(2), None), "sample": Sample(torch.ones(1), "file"), "other": object()}
    two = {name: one[name] for name in ("sample", "a", "other", "b")}
    words = [[words for part in describe(batch, "batch") for words in part.in_words()] for batch in (one, two)]
    assert words[0] == words[1]
    assert [path for path, _ in words[0]] == [
        "batch['a']", "batch['a'][0]", "batch['a'][1]", "batch['b']", "batch['b'][0]", "batch['b'][1]",
        "batch['sample'].tokens", "batch['sample'].source",
    ]  # fmt: skip
    assert ("batch['b'][1]", "'x'") in words[0]
    assert difference({3: words[0], 4: words[1]}) is None
    assert difference({0: [("a", "1")], 1: [("a", "1"), ("b", "2")]}) == "b is absent on rank 0 and 2 on rank 1"
    assert difference({5: [("a", "1")], 6: [("a", "2")], 7: [("a", "1")]}) == "a is 1 on ranks 5, 7 and 2 on rank 6"
    long = difference({0: [("a", "x" * 500 + "y")], 1: [("a", "x" * 500 + "z")]})
    assert long is not None
    assert len(long) < 3 * LONGEST + 60
    assert long.count("501 characters, checksum") == 2


# --- the comparison, on three ranks ---


def compared(rank: int, world_size: int) -> dict[str, Any]:
    group, cpu = dist.group.WORLD, torch.device("cpu")
    assert group is not None
    seen: dict[str, Any] = {}

    def compare(name: str, *batches: Any, where: str = "batch 7") -> None:
        torch.manual_seed(4)
        common = ReplicaConsistency(group, cpu)
        for batch in batches:
            common.note(batch, where)
        seen[name] = outcome(common.compare)

    tokens = torch.arange(12).view(3, 4)
    other = tokens.clone()
    other[2, 3] = 99
    same = {"input_ids": tokens, "mask": [torch.ones(3, dtype=torch.bool), None], "name": "a", "empty": torch.empty(0)}
    compare("same", same)
    compare("same mapping type", collections.UserDict(same))
    compare("another order", same if rank else dict(reversed(same.items())))
    compare("objects are not compared", {"made": object(), "set": {rank}})
    compare("nothing")
    compare("content", {**same, "input_ids": other if rank == world_size - 1 else tokens})
    compare("the first of two", other if rank == 1 else tokens, tokens)
    compare("shape", tokens if rank else tokens.view(4, 3))
    compare("dtype", tokens.int() if rank == 1 else tokens)
    compare("nested", {"a": [tokens, (other if rank == 1 else tokens,)]})
    compare("bfloat16", torch.full((2,), 1.0 + rank).bfloat16())
    compare("missing key", {"labels": tokens} if rank == 0 else {})
    compare("length", [tokens] * (rank + 1))
    compare("dataclass", Sample(tokens, f"file {rank}"))
    compare("numbers", {"weights": [0.5, 1.0, 1.0 + (rank == 2)]})
    compare("array", {"image": np.arange(4) + (rank == 0)})
    compare("another batch", tokens, where=f"batch {7 + (rank == 2)}")
    compare("no batch", *([] if rank == 1 else [tokens]))

    torch.manual_seed(4)
    common = ReplicaConsistency(group, cpu)
    for number, drawn in enumerate([3, 3 + rank]):
        common.note(tokens, f"batch {number}")
        common.compare()
        torch.rand(drawn)
    seen["drawn otherwise"] = outcome(common.compare)
    torch.manual_seed(rank)
    common = ReplicaConsistency(group, cpu)
    common.note(tokens + rank, "batch 9")
    seen["both"] = outcome(common.compare)

    many = {f"tensor {number}": torch.full((3,), 1.0 + number) for number in range(40)}
    many["tensor 20"] = torch.ones(2**20)  # as many elements as are compared at once
    changes: dict[str, Callable[[Tensor], object]] = {
        "drift of nothing": lambda tensor: None,
        "drift of a size": lambda tensor: tensor.mul_(1.01),
        "drift of a value": lambda tensor: tensor[1].neg_(),
        "drift to zeros": Tensor.zero_,
        "drift to no number": lambda tensor: tensor.fill_(torch.nan),
    }
    for name, change in changes.items():
        values = {key: tensor.clone() for key, tensor in many.items()}
        if rank == 2:
            change(values["tensor 37"])
        seen[name] = [outcome(comparison) for comparison in drifts(values)]

    common.note(tokens + rank, "batch 10")
    losses = Losses()
    losses.note(tokens.float().sum() + rank, "batch 10")
    losses.settle(largest_of_all(losses.bounds(), group), group)  # from the next comparison on
    last = drifts({"a": torch.ones(3) + rank})
    seen["raised"] = [
        raised(common.compare),
        raised(lambda: losses.settle(largest_of_all(losses.bounds(), group), group)),
        raised(lambda: [comparison() for comparison in last]),
    ]
    return seen


def raised(compare: Callable[[], object]) -> Raised | None:
    """How the error was raised that a comparison ends with."""
    with pytest.raises(RuntimeError) as error:
        compare()
    return Raised.how(error.value)


def drifts(values: dict[str, Tensor]) -> Iterator[Callable[[], None]]:
    """So many comparisons that all tensors have their turn, and the first of the next turn."""
    drift = Drift(lambda: lambda: iter(values.items()), dist.group.WORLD)  # type: ignore[arg-type]

    def compare() -> None:
        drift.note()
        drift.settle(largest_of_all(drift.bounds(), dist.group.WORLD), dist.group.WORLD)

    return iter([compare] * 4)


@lru_cache
def three() -> list[dict[str, Any]]:
    """What each of three ranks saw."""
    return run_ranks(compared, 3)


def test_an_error_that_all_ranks_raise_is_told_to_none_and_printed_by_the_first() -> None:
    assert [seen["raised"] for seen in three()] == [[Raised(0, rank == 0, True)] * 3 for rank in range(3)]


@pytest.mark.parametrize("case", ["same", "same mapping type", "another order", "objects are not compared", "nothing"])
def test_what_is_alike_passes(case: str) -> None:
    assert [seen[case] for seen in three()] == [None] * 3


@pytest.mark.parametrize(
    ("case", "expected"),
    [
        ("content", "batch 7 differs between the ranks of a tensor-parallel group: batch['input_ids'] is int64[3, 4]"),
        ("the first of two", "batch 7 differs between the ranks of a tensor-parallel group: batch is int64[3, 4]"),
        ("shape", "batch is int64[4, 3]"),
        ("dtype", "and int32[3, 4]"),
        ("nested", "batch['a'][1][0] is int64[3, 4]"),
        ("bfloat16", "batch is bfloat16[2]"),
        ("missing key", "batch['labels'] is int64[3, 4]"),
        ("length", "batch is list of 1 on rank 0 and list of 2 on rank 1 and list of 3 on rank 2"),
        ("dataclass", "batch.source is 'file 0' on rank 0 and 'file 1' on rank 1 and"),
        ("numbers", "batch['weights'][2] is 1.0 on ranks 0, 1 and 2.0 on rank 2."),
        ("array", "batch['image'] is int64[4] (checksum "),
    ],
)
def test_a_batch_that_differs_is_named_on_every_rank_alike(case: str, expected: str) -> None:
    [message] = {seen[case] for seen in three()}
    assert expected in message
    assert "on rank 0 and" in message or "on ranks 0" in message
    assert "What to do:" in message
    assert "use_distributed_sampler" in message
    assert "have diverged" not in message


@pytest.mark.parametrize(
    ("case", "expected"),
    [
        ("another batch", "the last one is batch 7 on ranks 0, 1 and batch 8 on rank 2."),
        ("no batch", "the last one is batch 7 on ranks 0, 2 and none on rank 1."),
    ],
)
def test_ranks_that_are_not_at_the_same_batch(case: str, expected: str) -> None:
    [message] = {seen[case] for seen in three()}
    assert message.startswith("the ranks of a tensor-parallel group are not at the same batch: " + expected)
    assert "differs between" not in message


@pytest.mark.parametrize(
    ("case", "last"),
    [
        ("drift of a size", "of norm 66.47611 and sum 115.14"),
        ("drift of a value", "of norm 65.81793 and sum 38"),
        ("drift to zeros", "of norm 0 and sum 0"),
        ("drift to no number", "of norm nan and sum nan"),
    ],
)
def test_of_many_tensors_the_one_that_has_drifted_apart_is_named(case: str, last: str) -> None:
    for seen in three():
        first, second, third, fourth = seen[case]
        assert first == third == seen["drift of nothing"][0]
        assert "tensor 37, of norm 65.81793 and sum 114\n  rank 1: tensor 37" in second
        assert f"rank 2: tensor 37, {last}\n" in second
        assert fourth == second


def test_tensors_that_are_alike_have_not_drifted_apart() -> None:
    assert {said for seen in three() for said in seen["drift of nothing"]} == {None}


def test_streams_that_have_come_apart_are_named() -> None:
    [drawn] = {seen["drawn otherwise"] for seen in three()}
    assert "have diverged after batch 1: the state of the CPU's generator is " in drawn
    assert drawn.count(" on rank ") == 3
    assert "differs between" not in drawn
    [both] = {seen["both"] for seen in three()}
    assert both.startswith("batch 9 differs between the ranks")
    assert "have diverged at batch 9: the state" in both


# --- in a run ---


class Rows(Dataset[Any]):
    """Rows that are other ones on one rank, from one of them on."""

    def __init__(self, what: str = "", start: int = 0, end: int = 10**6, rank: int = -1) -> None:
        self.what, self.start, self.end, self.rank = what, start, end, rank

    def __len__(self) -> int:
        return len(TABLE)

    def __getitem__(self, index: int) -> dict[str, Any]:
        row, name = TABLE[index], f"row {index}"
        if dist.is_initialized() and dist.get_rank() == self.rank and self.start <= index < self.end:
            row, name = (row + 1 if self.what == "row" else row), (name + "!" if self.what == "name" else name)
            if self.what == "draws":
                torch.rand(1)
        return {"row": row, "name": name}


class Stream(IterableDataset[Any]):
    """The same without a length."""

    def __init__(self, rows: Rows) -> None:
        self.rows = rows

    def __iter__(self) -> Iterator[Any]:
        return (self.rows[index] for index in range(len(self.rows)))


class Net(L.LightningModule):
    """Drops from what is whole and from what is divided, unevenly."""

    example_input_array = torch.zeros(5, WIDTH)

    def __init__(self, noise: str = "") -> None:
        super().__init__()
        self.noise, self.losses, self.validated = noise, list[float](), 0

    def configure_model(self) -> None:
        if not hasattr(self, "net"):
            layers = nn.Linear(WIDTH, 17), nn.Tanh(), nn.Dropout(0.3), nn.Linear(17, WIDTH), nn.Dropout(0.3)
            self.net = nn.Sequential(*layers)

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x)

    def loss(self, batch: Any) -> Tensor:
        return (self.net(batch["row"]) - batch["row"]).square().mean()

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = self.loss(batch if "row" in batch else batch["a"])
        self.losses.append(loss.item())
        return loss

    def on_after_backward(self) -> None:
        if self.trainer.global_step != 4:
            return
        for parameter in self.parameters():
            assert parameter.grad is not None
            if self.noise == "local":
                parameter.grad.as_subclass(Tensor).add_(torch.randn_like(parameter))
            if self.noise == "one rank" and self.trainer.global_rank == 1:
                torch.rand(3)

    def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        self.validated += 1
        self.log("validation", self.loss(batch), sync_dist=True)

    def predict_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.net(batch["row"])

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.01)


class Again(SameStart, Net):
    """Makes one run after the other."""

    def anew(self, noise: str = "") -> Again:
        self.noise, self.losses, self.validated = noise, [], 0
        self.restore()
        return self


class Reads(Again):
    """Reads its batches itself."""

    def training_step(self, dataloader_iter: Any) -> Tensor:  # type: ignore[override]
        batch, batch_idx, _ = next(dataloader_iter)
        return super().training_step(batch, batch_idx)


class Manual(Net):
    """Takes its steps itself."""

    automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> None:  # type: ignore[override]
        optimizer: Any = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(super().training_step(batch, batch_idx))
        optimizer.step()


class OwnLoss(Again):
    """Computes something else on one rank."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        return loss * 1.01 if batch_idx == 6 and self.trainer.global_rank == 1 else loss


class Drifting(Net):
    """Writes into what every rank has whole, on one rank, where no loss shows it."""

    def configure_model(self) -> None:
        super().configure_model()
        self.net.register_buffer("batches", torch.zeros(3))

    def on_train_batch_end(self, *_: Any) -> None:
        self.net.batches += 1 + 0.01 * (self.trainer.global_rank == 1 and self.trainer.global_step > 5)


class DriftingState(Net):
    """Writes into what an optimizer remembers of a whole bias, on one rank. No parameter shows it."""

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.parameters(), lr=0.0)

    def on_train_batch_end(self, *_: Any) -> None:
        if self.trainer.global_rank == 1 and self.trainer.global_step > 5:
            self.trainer.optimizers[0].state[self.net[3].bias]["exp_avg"].add_(1.0)


class Counting(TorchDispatchMode):
    """Counts collectives, as PyTorch sees them."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = Counter[str]()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace in ("c10d", "_c10d_functional") and "wait_tensor" not in str(func):
            self.calls[str(func.overloadpacket)] += 1
        return func(*args, **(kwargs or {}))


class BetweenBatches(L.Callback):
    """How many collectives there are from the beginning of one batch to that of the next."""

    def __init__(self, counting: Counting) -> None:
        self.counting, self.counts = counting, list[Counter[str]]()

    def on_train_batch_start(self, *_: Any) -> None:
        self.counts.append(self.counting.calls)
        self.counting.calls = Counter()


def loader(rows: Any = None, size: int = 2, **options: Any) -> DataLoader[Any]:
    return DataLoader(rows or Rows(), batch_size=size, **options)


def fit(
    net: Net, data: Any, validation: Any = None, strategy: Any = None, ckpt_path: Any = None, **options: Any
) -> Any:
    """What a run says at its end, its steps, and how often the model was called."""
    L.seed_everything(3, verbose=False)
    strategy = strategy or AutoTPStrategy()
    options = {"max_steps": STEPS, "num_sanity_val_steps": 0, **options}
    fitting = trainer(strategy, dist.get_world_size(), **options)
    error = error_of(fitting.fit, net, data, validation, ckpt_path=ckpt_path)
    return error, fitting.global_step, len(net.losses), net.validated


def alike(folder: str, net: Again, reads: Reads) -> dict[str, Any]:
    """Runs of all kinds in which nothing differs."""
    found: dict[str, Any] = {}
    scaled = [MixedPrecision("16-mixed", "cpu", torch.amp.GradScaler("cpu", init_scale=64.0))]
    found["dropout"] = fit(net.anew(), loader(shuffle=True))
    found["validation"] = fit(
        net.anew(), loader(size=1), [loader(), loader(Stream(Rows()))], accumulate_grad_batches=3,
        val_check_interval=0.25, num_sanity_val_steps=2,
    )  # fmt: skip
    found["scaler"] = fit(Net(), loader(), plugins=scaled, gradient_clip_val=1.0)
    found["stream"] = fit(net.anew(), loader(Stream(Rows())))
    both = CombinedLoader({"a": loader(shuffle=True), "b": loader(Stream(Rows()))}, "max_size_cycle")  # type: ignore
    found["combined"] = fit(net.anew(), both)
    found["manual"] = fit(Manual(), loader())
    found["reads"] = fit(reads.anew(), loader(Stream(Rows())))
    found["broadcast"] = fit(net.anew(), loader(shuffle=True), loader(), AutoTPStrategy(broadcast_batches=True))
    L.seed_everything(3, verbose=False)
    half = trainer(AutoTPStrategy(), dist.get_world_size(), max_steps=5)
    half.fit(net.anew(), loader())
    half.save_checkpoint(f"{folder}/half.ckpt")
    found["resumed"] = fit(net.anew(), loader(), ckpt_path=f"{folder}/half.ckpt")
    predicting = trainer(AutoTPStrategy(), dist.get_world_size())
    found["predicted"] = error_of(predicting.predict, net.anew(), loader()), 0, 0, 0
    return found


def unlike(folder: str) -> dict[str, Any]:
    """Runs in which something differs, sooner or later, on the last rank."""
    last, net, reads, own = dist.get_world_size() - 1, Again(), Reads(), OwnLoss()
    found = alike(folder, net, reads)

    def rows(what: str, batch: int, end: int = 10**6) -> Rows:
        return Rows(what, 2 * batch, 2 * end, last)

    found["local draws"] = fit(net.anew("local"), loader(), strategy=AutoTPStrategy(checked_steps=0))
    found["drift"] = fit(Drifting(), loader())
    found["drift of a state"] = fit(DriftingState(), loader())
    found["own loss"] = fit(own.anew(), loader())
    found["own loss, accumulated"] = fit(own.anew(), loader(), accumulate_grad_batches=4)
    found["draws on one rank"] = fit(net.anew("one rank"), loader())
    found["batch 7"] = fit(net.anew(), loader(rows("row", 7, 8)))
    found["batch 7, before"] = fit(net.anew(), loader(rows("row", 7)), strategy=AutoTPStrategy(checked_batches=100))
    found["batch 0"] = fit(net.anew(), loader(rows("row", 0)))
    found["the last batch"] = fit(net.anew(), loader(rows("row", STEPS - 1)))
    found["a name"] = fit(net.anew(), loader(rows("name", 5)))
    found["reading draws"] = fit(net.anew(), loader(rows("draws", 6, 7)))
    found["a stream"] = fit(net.anew(), loader(Stream(rows("row", 7))))
    found["read by the step"] = fit(reads.anew(), loader(rows("row", 7)))
    found["accumulated"] = fit(net.anew(), loader(rows("row", 7)), accumulate_grad_batches=4)
    found["validation 3"] = fit(net.anew(), loader(), [loader(), loader(rows("row", 3))], val_check_interval=4)
    found["resumed, batch 7"] = fit(net.anew(), loader(rows("row", 2)), ckpt_path=f"{folder}/half.ckpt")
    predicting = trainer(AutoTPStrategy(), dist.get_world_size())
    found["prediction 4"] = error_of(predicting.predict, net.anew(), loader(rows("row", 4))), 0, 0, 0

    with Counting() as counting:
        between = BetweenBatches(counting)
        found["counted"] = fit(net.anew(), loader(), callbacks=[between])
    found["collectives"] = between.counts[3:]
    return found


@lru_cache
def ranks(world_size: int, folder: Any) -> list[dict[str, Any]]:
    return run_trainer_ranks(unlike, world_size, str(folder))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return tmp_path_factory.mktemp("in_common")


SIZES = [2, pytest.param(3, marks=pytest.mark.nightly)]
QUIET = {
    "dropout": (STEPS, STEPS, 0), "validation": (STEPS, 3 * STEPS, 4 + 3 * 40), "scaler": (STEPS, STEPS, 0),
    "stream": (STEPS, STEPS, 0), "combined": (STEPS, STEPS, 0), "manual": (STEPS, STEPS, 0),
    "reads": (STEPS, STEPS, 0), "broadcast": (STEPS, STEPS, 0), "resumed": (STEPS, STEPS - 5, 0),
    "predicted": (0, 0, 0),
}  # fmt: skip


@pytest.mark.parametrize("world_size", SIZES)
@pytest.mark.parametrize("case", QUIET)
def test_runs_in_which_nothing_differs(world_size: int, case: str, folder: Any) -> None:
    for seen in ranks(world_size, folder):
        assert seen[case] == ("no error", *QUIET[case])


BATCH = "batch {} differs between the ranks of a tensor-parallel group: batch['row'] is float32[2, 6] (checksum "
TRAINED = "{} of the train data (dataloader 0, epoch 0, step {})"
STREAM = "the random numbers of the ranks of a tensor-parallel group have diverged at batch {}; at batch {} they were"


@pytest.mark.parametrize("world_size", SIZES)
@pytest.mark.parametrize(
    ("case", "expected", "steps", "batches"),
    [
        ("local draws", STREAM.format(TRAINED.format(4, 4), TRAINED.format(3, 3)), 5, 5),
        ("draws on one rank", STREAM.format(TRAINED.format(4, 4), TRAINED.format(3, 3)), 5, 5),
        ("batch 7", BATCH.format(TRAINED.format(7, 7)), 8, 8),
        ("batch 7, before", BATCH.format(TRAINED.format(7, 7)), 7, 7),
        ("batch 0", BATCH.format(TRAINED.format(0, 0)), 0, 0),
        ("the last batch", BATCH.format(TRAINED.format(STEPS - 1, STEPS - 1)), STEPS, STEPS),
        ("a name", f"batch {TRAINED.format(5, 5)} differs", 6, 6),
        ("reading draws", STREAM.format(TRAINED.format(6, 6), TRAINED.format(5, 5)), 7, 7),
        ("a stream", BATCH.format(TRAINED.format(7, 7)), 8, 8),
        ("read by the step", BATCH.format(TRAINED.format(7, 7)), 8, 8),
        ("accumulated", BATCH.format(TRAINED.format(7, 1)), 2, 8),
        ("validation 3", BATCH.format("3 of the validate data (dataloader 1, epoch 0, step 4)"), 4, 4),
        ("resumed, batch 7", BATCH.format(TRAINED.format(7, 7).replace("epoch 0", "epoch 1")), 8, 3),
        ("prediction 4", BATCH.format("4 of the predict data (dataloader 0, epoch 0, step 0)"), 0, 0),
    ],
)
def test_what_differs_in_a_run_is_an_error_on_every_rank(
    world_size: int, case: str, expected: str, steps: int, batches: int, folder: Any
) -> None:
    [(error, *progress)] = {seen[case] for seen in ranks(world_size, folder)}
    assert error.startswith(f"RuntimeError: {expected}"), error
    assert progress[:2] == [steps, batches]
    if case not in ("local draws", "draws on one rank"):
        assert f"on rank {world_size - 1}. " in error
    if case == "a name":
        others = "rank 0" if world_size == 2 else "ranks 0, 1"
        assert f"batch['name'][0] is 'row 10' on {others} and 'row 10!' on rank {world_size - 1}" in error
    if case == "validation 3":
        assert progress[2] == 20 + 3


@pytest.mark.parametrize("world_size", SIZES)
@pytest.mark.parametrize(("case", "steps"), [("own loss", 8), ("own loss, accumulated", 2)])
def test_a_loss_that_differs_is_an_error_on_every_rank(world_size: int, case: str, steps: int, folder: Any) -> None:
    """It is compared when the batch after its own is: nobody waits for it."""
    [(error, *progress)] = {seen[case] for seen in ranks(world_size, folder)}
    assert error.startswith("RuntimeError: the ranks of a tensor-parallel group have different losses"), error
    said = [float(value) for value in re.findall(r"rank \d: ([\d.]+) \(of batch 6 of the train data", error)]
    assert said == pytest.approx([said[0], 1.01 * said[0], *[said[0]] * (world_size - 2)], rel=1e-4)
    assert progress[:2] == [steps, 8]


@pytest.mark.parametrize("world_size", SIZES)
def test_a_whole_tensor_that_differs_is_an_error_on_every_rank(world_size: int, folder: Any) -> None:
    [(error, *progress)] = {seen["drift"] for seen in ranks(world_size, folder)}
    assert error.startswith("RuntimeError: a tensor that every rank of a tensor-parallel group has whole has become")
    sums = [float(value) for value in re.findall(r"rank \d: batches, of norm .* and sum ([\d.]+)", error)]
    assert len(sums) == world_size
    assert sums[1] > sums[0]
    assert progress[:2] in ([7, 7], [8, 8])


@pytest.mark.parametrize("world_size", SIZES)
def test_an_optimizer_state_of_a_whole_tensor_that_differs_is_an_error_on_every_rank(
    world_size: int, folder: Any
) -> None:
    [(error, *progress)] = {seen["drift of a state"] for seen in ranks(world_size, folder)}
    assert error.startswith("RuntimeError: a tensor that every rank of a tensor-parallel group has whole has become")
    sums = [float(value) for value in re.findall(r"rank \d: exp_avg of 3.bias, of norm .* and sum (-?[\d.]+)", error)]
    assert len(sums) == world_size
    assert sums[1] > sums[0] + 1
    assert progress[0] in (7, 8, 9)


@pytest.mark.parametrize("world_size", SIZES)
def test_a_step_has_one_exchange_and_the_models_own_collectives(world_size: int, folder: Any) -> None:
    for seen in ranks(world_size, folder):
        assert seen["counted"] == ("no error", STEPS, STEPS, 0)
        # The model's own is that of its row-parallel layer. The exchange is in place, as sums of gradients would be.
        assert seen["collectives"] == (STEPS - 3) * [{"_c10d_functional.all_reduce": 1, "c10d.allreduce_": 1}]


# --- two copies ---


def two_copies() -> dict[str, Any]:
    found: dict[str, Any] = {}

    def strategy(**options: Any) -> AutoTPStrategy:
        return AutoTPStrategy(2, 2, **options)

    net = Again()
    found["alike"] = fit(net, loader(shuffle=True), loader(), strategy=strategy())
    found["streams by copy"] = fit(ByCopy(), loader(shuffle=True), strategy=strategy())
    predicting = trainer(strategy(), 4)
    found["predicted"] = error_of(predicting.predict, net, loader(Odd()))
    # Of a batch of both copies each has two rows: batch 3 begins with row 12.
    found["batch 3"] = fit(net.anew(), loader(Rows("row", 12, 16, rank=3)), strategy=strategy())
    found["local draws"] = fit(net.anew("one rank"), loader(), strategy=strategy())
    return found


class Odd(Rows):
    """The copies of the model have different numbers of batches of it."""

    def __len__(self) -> int:
        return 5


class ByCopy(Net):
    """Each copy draws its own numbers."""

    def on_train_start(self) -> None:
        torch.manual_seed(self.trainer.strategy.distributed_sampler_kwargs["rank"])  # type: ignore[attr-defined]


@lru_cache
def four() -> list[dict[str, Any]]:
    return run_trainer_ranks(two_copies, 4)


def test_copies_of_the_model_may_differ() -> None:
    for seen in four():
        assert seen["alike"] == ("no error", STEPS, STEPS, 10)
        assert seen["streams by copy"] == ("no error", STEPS, STEPS, 0)
        assert seen["predicted"] == "no error"


def test_a_difference_in_one_copy_is_an_error_in_all_of_them() -> None:
    [(error, steps, _, _)] = {seen["batch 3"] for seen in four()}
    assert error.startswith("RuntimeError: batch 3 of the train data (dataloader 0, epoch 0, step 3) differs")
    assert "on rank 2 and float32[2, 6]" in error
    assert "on rank 3. " in error
    assert steps == 4
    [(error, steps, _, _)] = {seen["local draws"] for seen in four()}
    assert "have diverged at batch 4 of the train data (dataloader 0, epoch 0, step 4); at batch 3 of" in error
    assert "on rank 0 and " in error
    assert steps == 5


# --- numbers of one's own ---


def drawn(rank: int, world_size: int) -> str | None:
    """Draws that leave the common stream in common."""
    world = dist.group.WORLD
    assert world is not None
    torch.manual_seed(0)
    common = ReplicaConsistency(world, torch.device("cpu"))
    with own_numbers(TPGroup.of(world), torch.device("cpu")):
        torch.rand(3 + rank)
    torch.rand(5, generator=torch.Generator().manual_seed(rank))
    return outcome(common.compare)


def test_own_numbers_leave_the_streams_in_common() -> None:
    assert run_ranks(drawn, 3) == [None] * 3


class Whole(Net):
    """Noise as docs/randomness.md says: drawn for whole gradients, of which each rank takes its part."""

    def configure_model(self) -> None:
        if not hasattr(self, "net"):
            self.net = nn.Sequential(nn.Linear(WIDTH, 17), nn.Tanh(), nn.Linear(17, WIDTH)).double()

    def loss(self, batch: Any) -> Tensor:
        return super().loss({"row": batch["row"].double()})

    def on_after_backward(self) -> None:
        for name, parameter in self.net.named_parameters():
            assert parameter.grad is not None
            if dist.is_initialized():
                state: Any = self.net.autotp
                noise = torch.empty_like(parameter.grad)
                fill(noise, state.metas[name], torch.randn(state.metas[name].shape, dtype=noise.dtype), state.group)
                parameter.grad.add_(noise)
            else:
                parameter.grad.add_(torch.randn_like(parameter.grad))


def noisy(devices: int) -> tuple[Any, dict[str, Tensor]]:
    net = Whole()
    net.example_input_array = net.example_input_array.double()
    L.seed_everything(3, verbose=False)
    trainer("autotp" if devices > 1 else "auto", devices, max_steps=5).fit(net, loader())
    return torch.rand(1).item(), full_state_dict(net) if devices > 1 else net.state_dict()


def test_noise_that_is_drawn_whole_equals_one_process() -> None:
    drawn, weights = noisy(1)
    for seen, found in run_trainer_ranks(noisy, 2, 2):
        assert seen == drawn
        for name, weight in weights.items():
            torch.testing.assert_close(found[name], weight, rtol=1e-9, atol=1e-9)
