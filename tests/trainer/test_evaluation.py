"""``validate``, ``test`` and ``predict`` of a parallel model, with metrics and checkpoints: one process's numbers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import BasePredictionWriter, ModelCheckpoint
from torch import Tensor
from torch.utils.data import DataLoader
from torchmetrics import MetricCollection
from trainer_ranks import run_trainer_ranks
from training import BLOCKS, Task, tiny_config
from transformers import AutoModelForCausalLM

from lightning_autotp import AutoTPStrategy
from lightning_autotp.metrics import CrossEntropy, Perplexity, TokenAccuracy
from lightning_autotp.parallel import VocabParallelLogits

VOCABULARY = {"lm_head.weight": 0}
IGNORED = torch.rand(BLOCKS.shape, generator=torch.Generator().manual_seed(5)) < torch.linspace(0, 0.8, 40)[:, None]


def rows() -> list[dict[str, Tensor]]:
    """Rows of which different numbers of tokens count."""
    return [{"input_ids": ids, "labels": ids.masked_fill(out, -100)} for ids, out in zip(BLOCKS, IGNORED, strict=True)]


def loader(size: int = 8) -> DataLoader[Any]:
    return DataLoader(rows(), batch_size=size)  # type: ignore[arg-type]


class Evaluated(Task):
    """With metrics of the tokens, logged as objects."""

    def __init__(self, source: str) -> None:
        super().__init__(source, learning_rate=3e-3)
        metrics = {"loss": CrossEntropy(-100), "perplexity": Perplexity(-100)}
        tops = {f"top {k}": TokenAccuracy(k, -100) for k in (1, 5)}
        self.metrics = MetricCollection(metrics | tops, prefix="token ")

    def evaluate(self, batch: dict[str, Tensor]) -> None:
        output = self.model(**batch)
        if self.trainer.world_size > 1:
            assert isinstance(output.logits, VocabParallelLogits)
            place = self.trainer.strategy.distributed_sampler_kwargs  # type: ignore[attr-defined]
            gathered: Any = self.all_gather(output.logits)
            assert torch.equal(gathered[place["rank"]] if place["num_replicas"] > 1 else gathered, output.logits)
        self.metrics.update(output.logits[:, :-1], batch["labels"][:, 1:])
        self.log_dict(self.metrics, on_epoch=True)  # type: ignore[arg-type]
        self.log("mean of batches", output.loss, sync_dist=True)

    def validation_step(self, batch: dict[str, Tensor], batch_idx: int) -> None:
        self.evaluate(batch)

    def test_step(self, batch: dict[str, Tensor], batch_idx: int) -> None:
        self.evaluate(batch)

    def predict_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        logits: Tensor = self.model(input_ids=batch["input_ids"]).logits
        return logits[:, -1].clone()


class OnlyPredicts(L.LightningModule):
    """No optimizer, no labels, no training step."""

    def __init__(self, source: str) -> None:
        super().__init__()
        self.source = source

    def configure_model(self) -> None:
        from transformers import AutoModelForCausalLM

        if not hasattr(self, "model"):
            self.model = AutoModelForCausalLM.from_pretrained(self.source)

    def predict_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        tokens: Tensor = self.model(input_ids=batch).logits.argmax(-1)
        return tokens


class Files(BasePredictionWriter):
    """A file for each copy of the model, written by the first rank of its tensor-parallel group."""

    def __init__(self, directory: Path) -> None:
        super().__init__("epoch")
        self.directory = directory

    def write_on_epoch_end(
        self, trainer: L.Trainer, pl_module: L.LightningModule, predictions: Any, batch_indices: Any
    ) -> None:
        mesh = getattr(trainer.strategy, "device_mesh", None)
        if mesh is None or mesh["tensor_parallel"].get_local_rank() == 0:
            indices = [index for batch in batch_indices[0] for index in batch]
            torch.save((indices, torch.cat(list(predictions))), self.directory / f"predicted-{trainer.global_rank}.pt")


def make_trainer(strategy: Any, devices: int, **options: Any) -> L.Trainer:
    if strategy == "autotp":  # of a small batch the logits of a small vocabulary would be whole
        strategy = AutoTPStrategy(cut=VOCABULARY)
    return L.Trainer(
        accelerator="cpu", devices=devices, strategy=strategy, logger=False, enable_progress_bar=False,
        enable_model_summary=False, **{"enable_checkpointing": False, **options},
    )  # fmt: skip


def whole_run(strategy: Any, devices: int, source: str, directory: Path) -> dict[str, Any]:
    """Validate before training, train with a validation after each epoch, then test and predict from checkpoints."""
    L.seed_everything(3, verbose=False)
    task, seen = Evaluated(source), {}
    best = ModelCheckpoint(directory, filename="best", monitor="token perplexity", mode="min")
    running = make_trainer(strategy, devices, max_epochs=2, callbacks=[best], enable_checkpointing=True)
    seen["validated"] = running.validate(task, loader(), verbose=False)
    running.fit(task, loader(4), loader())
    seen["logged"] = {name: value.item() for name, value in running.callback_metrics.items()}
    seen["best score"] = best.best_model_score.item()
    running.save_checkpoint(directory / "last.ckpt")
    seen["tested"] = running.test(task, loader(), verbose=False)
    seen["tested best"] = running.test(task, loader(), ckpt_path="best", verbose=False)
    seen["predicted"] = running.predict(task, loader(), ckpt_path="best")

    fresh = make_trainer(strategy, devices, callbacks=[Files(directory)])
    task = Evaluated(source)
    seen["tested anew"] = fresh.test(task, loader(), ckpt_path=directory / "last.ckpt", verbose=False)
    seen["not returned"] = fresh.predict(task, loader(), ckpt_path=directory / "last.ckpt", return_predictions=False)
    seen["only predicted"] = make_trainer(strategy, devices).predict(
        OnlyPredicts(source),
        DataLoader(BLOCKS, batch_size=8),  # type: ignore[arg-type]
    )
    return seen


def in_half_precision(strategy: Any, devices: int, source: str) -> dict[str, Any]:
    task = Evaluated(source)
    found = make_trainer(strategy, devices, precision="bf16-true").validate(task, loader(), verbose=False)
    assert task.model.lm_head.weight.dtype == torch.bfloat16
    assert task.metrics["loss"].total.dtype == torch.float64
    return dict(found[0])


def two_ranks(directory: str) -> dict[str, Any]:
    source = f"{directory}/source"
    (folder := Path(directory) / "two").mkdir(exist_ok=True)
    seen = whole_run("autotp", 2, source, folder)
    seen["half"] = in_half_precision("autotp", 2, source)
    return seen


class SummedOver(L.Callback):
    """Notes over which ranks a metric is summed while a run is under way: afterwards it is as it was."""

    def on_test_epoch_end(self, trainer: L.Trainer, pl_module: Any) -> None:
        self.ranks = torch.distributed.get_process_group_ranks(pl_module.metrics["loss"].process_group)


def four_ranks(directory: str) -> dict[str, Any]:
    source = f"{directory}/source"
    (folder := Path(directory) / "four").mkdir(exist_ok=True)
    checkpoint = Path(directory) / "one" / "last.ckpt"
    task, summed = Evaluated(source), SummedOver()
    validating = make_trainer(AutoTPStrategy(2, 2, cut=VOCABULARY), 4, callbacks=[Files(folder), summed])
    found = validating.test(task, loader(), ckpt_path=checkpoint, verbose=False)
    predicted = validating.predict(task, loader(), ckpt_path=checkpoint)
    return {"tested": found, "predicted": predicted, "group": summed.ranks}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("evaluation")
    torch.manual_seed(11)
    config = tiny_config()
    config.num_hidden_layers = 2  # with one, the first five tokens are right as often as the first
    AutoModelForCausalLM.from_config(config).save_pretrained(directory / "source")
    return directory


@pytest.fixture(scope="module")
def alone(folder: Path) -> dict[str, Any]:
    (own := folder / "one").mkdir()
    return whole_run("auto", 1, str(folder / "source"), own)


@pytest.fixture(scope="module")
def two(folder: Path) -> list[dict[str, Any]]:
    return run_trainer_ranks(two_ranks, 2, str(folder))


@pytest.fixture(scope="module")
def four(folder: Path, alone: dict[str, Any]) -> list[dict[str, Any]]:
    return run_trainer_ranks(four_ranks, 4, str(folder))


def test_every_stage_gives_one_process_numbers(two: list[dict[str, Any]], alone: dict[str, Any]) -> None:
    assert alone["tested"][0]["token perplexity"] < 0.95 * alone["validated"][0]["token perplexity"]
    assert 0 < alone["tested"][0]["token top 1"] < alone["tested"][0]["token top 5"] < 1
    mean = alone["tested"][0]["mean of batches"]
    assert alone["tested"][0]["token loss"] != pytest.approx(mean, rel=1e-4)  # not the same number of tokens each
    for seen in two:
        for stage in ("validated", "tested", "tested best", "tested anew"):
            assert seen[stage][0] == pytest.approx(alone[stage][0], rel=1e-5), stage
        assert seen["tested anew"][0] == pytest.approx(seen["tested"][0], rel=1e-6)
        assert seen["best score"] == pytest.approx(alone["best score"], rel=1e-5)
        assert seen["logged"] == pytest.approx(alone["logged"], rel=1e-5)


def test_predictions_are_returned_on_every_rank_and_written_once(
    two: list[dict[str, Any]], alone: dict[str, Any], folder: Path
) -> None:
    wanted = torch.cat(alone["predicted"])
    assert wanted.shape == (len(BLOCKS), 67)
    for seen in two:
        torch.testing.assert_close(torch.cat(seen["predicted"]), wanted, rtol=1e-4, atol=1e-5)
        assert type(seen["predicted"][0]) is Tensor
        assert not seen["not returned"]
    assert [path.name for path in sorted((folder / "two").glob("predicted*"))] == ["predicted-0.pt"]
    indices, written = torch.load(folder / "two" / "predicted-0.pt")
    alone_indices, alone_written = torch.load(folder / "one" / "predicted-0.pt")
    assert indices == alone_indices == list(range(len(BLOCKS)))
    torch.testing.assert_close(written, alone_written, rtol=1e-4, atol=1e-5)


def test_a_model_that_only_predicts(two: list[dict[str, Any]], alone: dict[str, Any]) -> None:
    wanted = torch.cat(alone["only predicted"])
    assert wanted.shape == BLOCKS.shape
    assert len(wanted.unique()) > 10
    for seen in two:
        assert torch.equal(torch.cat(seen["only predicted"]), wanted)


def test_half_precision(two: list[dict[str, Any]], folder: Path) -> None:
    wanted = in_half_precision("auto", 1, str(folder / "source"))
    for seen in two:
        assert seen["half"] == two[0]["half"]
        assert seen["half"]["token perplexity"] == pytest.approx(wanted["token perplexity"], rel=2**-8)


def test_copies_of_the_model_share_the_data_and_sum_their_counts(
    four: list[dict[str, Any]], alone: dict[str, Any], folder: Path
) -> None:
    """Batches are other ones than in one process: the mean over all tokens is the same all the same."""
    assert [seen["group"] for seen in four] == [[0, 2], [1, 3], [0, 2], [1, 3]]
    for seen in four:
        wanted = {name: value for name, value in alone["tested anew"][0].items() if name.startswith("token")}
        assert {name: seen["tested"][0][name] for name in wanted} == pytest.approx(wanted, rel=1e-5)
        assert seen["tested"][0]["mean of batches"] == four[0]["tested"][0]["mean of batches"]
        assert len(torch.cat(seen["predicted"])) == len(BLOCKS) // 2
    assert [path.name for path in sorted((folder / "four").glob("*"))] == ["predicted-0.pt", "predicted-2.pt"]
    _, whole = torch.load(folder / "one" / "predicted-0.pt")
    found = torch.full_like(whole, float("nan"))
    for rank in (0, 2):
        indices, rows_of_rank = torch.load(folder / "four" / f"predicted-{rank}.pt")
        found[indices] = rows_of_rank
    torch.testing.assert_close(found, whole, rtol=1e-4, atol=1e-5)
