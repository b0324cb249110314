"""Lightning's callbacks, loggers, profilers, tuner and flags at tensor-parallel size > 1, against one process."""

from __future__ import annotations

import csv
import io
import os
from contextlib import redirect_stdout
from functools import cache
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch import callbacks
from lightning.pytorch.cli import LightningCLI
from lightning.pytorch.loggers import CSVLogger, TensorBoardLogger
from lightning.pytorch.tuner import Tuner
from torch import Tensor
from torch.utils.data import DataLoader
from trainer_ranks import run_trainer_ranks
from training import ROWS, Regression, Task, assert_parity, blocks, error_of, tiny_config
from transformers import AutoModelForCausalLM

from lightning_autotp import AutoTPStrategy, full_state_dict, recommend
from lightning_autotp.lightning.averaging import EMAWeightAveraging, WeightAveraging
from lightning_autotp.lightning.summary import ParallelSummary
from lightning_autotp.planning.recommend import Choice, Recommendation
from lightning_autotp.planning.report import yaml_lines

QUIET = {"accelerator": "cpu", "enable_progress_bar": False}


def make_trainer(devices: int, **options: Any) -> L.Trainer:
    quiet = {"logger": False, "enable_checkpointing": False, "enable_model_summary": False}
    strategy = "autotp" if devices > 1 else "auto"
    return L.Trainer(devices=devices, **{"strategy": strategy, **QUIET, **quiet, "max_epochs": 2, **options})


def batches(count: int = 4, size: int = 4) -> Any:
    return DataLoader(blocks()[: count * size], batch_size=size)  # type: ignore[arg-type]


class Logged(Task):
    """Logs, and has a scheduler and a loader of its own, as the tuner wants it."""

    def __init__(self, learning_rate: float = 0.05, batch_size: int = 2) -> None:
        super().__init__("config", learning_rate, "SGD")
        self.save_hyperparameters()
        self.learning_rate, self.batch_size = learning_rate, batch_size
        self.steps = 0

    def build(self) -> Any:
        return AutoModelForCausalLM.from_config(tiny_config())

    def on_after_backward(self) -> None:
        """No gradients are looked at."""

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        self.steps += 1
        loss = super().training_step(batch, batch_idx)
        self.log("loss", loss, on_step=True, prog_bar=True)
        return loss

    def test_step(self, batch: dict[str, Tensor], batch_idx: int) -> None:
        self.log("tested", self.model(**batch).loss)

    def predict_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        return self.model(**batch).loss

    def train_dataloader(self) -> Any:
        return batches(size=self.batch_size)

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=self.learning_rate)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)]


def whole(task: Any, devices: int) -> dict[str, Tensor]:
    return full_state_dict(task) if devices > 1 else {name: value.clone() for name, value in task.state_dict().items()}


def watched(devices: int, folder: Path) -> dict[str, Any]:
    """A run with the usual callbacks, two loggers and a profiler."""
    L.seed_everything(3, verbose=False)
    task = Logged()
    best = callbacks.ModelCheckpoint(folder / "best", monitor="validation", save_top_k=1, save_last=True)
    stopping = callbacks.EarlyStopping("validation", min_delta=100.0, patience=2)
    trainer = make_trainer(
        devices, max_epochs=5, val_check_interval=2, num_sanity_val_steps=1, log_every_n_steps=1, profiler="simple",
        enable_checkpointing=True,
        logger=[CSVLogger(folder / "logs", version=0), TensorBoardLogger(folder / "boards", version=0)],
        callbacks=[
            best, stopping, callbacks.LearningRateMonitor("step"), callbacks.DeviceStatsMonitor(cpu_stats=False),
            callbacks.GradientAccumulationScheduler({0: 1, 1: 2}), callbacks.Timer(),
        ],
    )  # fmt: skip
    trainer.fit(task, batches(), batches(2))
    return {
        "losses": task.seen["losses"],
        "weights": whole(task, devices),
        "stopped": (stopping.stopped_epoch, trainer.global_step, trainer.should_stop),
        "best": (Path(best.best_model_path).name, float(best.best_model_score)),
        "metrics": {name: float(value) for name, value in trainer.callback_metrics.items()},
    }


def averaged(devices: int, folder: Path) -> dict[str, Any]:
    """An exponential moving average, a checkpoint half-way, and a run that goes on from it."""
    seen = {}
    for name, start in (("averaged", None), ("resumed", folder / "ema" / "epoch.ckpt")):
        L.seed_everything(3, verbose=False)
        task = Logged()
        saving = callbacks.ModelCheckpoint(folder / "ema", filename="epoch", every_n_epochs=1, save_top_k=1)
        kind = EMAWeightAveraging if devices > 1 else callbacks.EMAWeightAveraging
        options: dict[str, Any] = {"enable_checkpointing": True} if start is None else {"max_epochs": 3}
        used: list[Any] = [kind(decay=0.5), *([saving] if start is None else [])]
        trainer = make_trainer(devices, callbacks=used, **options)
        trainer.fit(task, batches(), batches(2), ckpt_path=start, weights_only=False)
        seen[name] = {
            "losses": task.seen["losses"],
            "weights": whole(task, devices),
            "metrics": {key: float(value) for key, value in trainer.callback_metrics.items()},
        }
    return seen


class OnceAnEpoch(WeightAveraging):
    def should_update(self, step_idx: int | None = None, epoch_idx: int | None = None) -> bool:
        return epoch_idx is not None


def flags(devices: int, folder: Path, task: Logged) -> dict[str, Any]:
    """Steps that were made, by flag, one after the other with one model."""
    seen = {}
    for name, options in {
        "fast": {"fast_dev_run": 2},
        "limited": {"limit_train_batches": 3, "limit_val_batches": 1, "max_epochs": 1},
        "share": {"limit_train_batches": 0.5, "max_epochs": 1, "profiler": "pytorch"},
        "overfit": {"overfit_batches": 1, "max_epochs": 3},
        "every second": {"check_val_every_n_epoch": 2, "reload_dataloaders_every_n_epochs": 1},
    }.items():
        L.seed_everything(3, verbose=False)
        task.begin()
        trainer = make_trainer(devices, default_root_dir=folder, **options)
        trainer.fit(task, batches(), batches(2))
        seen[name] = {"losses": task.seen["losses"], "weights": whole(task, devices)}
    trainer = make_trainer(devices, limit_test_batches=1, limit_predict_batches=1)
    seen["tested"] = trainer.test(task, batches(2), verbose=False)
    seen["predicted"] = trainer.predict(task, batches(2))
    return seen


def tuned(devices: int, folder: Path, task: Logged) -> dict[str, Any]:
    """What the tuner finds; the model is afterwards as it was."""
    L.seed_everything(3, verbose=False)
    tuner = Tuner(make_trainer(devices, max_epochs=1, default_root_dir=folder))
    found = tuner.lr_find(task, min_lr=1e-3, max_lr=1.0, num_training=12, early_stop_threshold=None, update_attr=False)
    seen = {"lr": found.results["lr"], "loss": found.results["loss"]}
    if devices > 1:  # Lightning's own answer
        seen["size"] = error_of(tuner.scale_batch_size, task, max_trials=2)
    return seen


def tuned_first(devices: int, folder: Path) -> dict[str, dict[str, Any]]:
    """What the tuner finds for a new model, with which the runs by flag begin then."""
    task = Logged()
    return {"tuned": tuned(devices, folder, task), "flags": flags(devices, folder, task)}


def summaries(devices: int, task: Logged) -> dict[str, str]:
    """What is printed."""
    seen = {}
    for name, summary in (("rich", callbacks.RichModelSummary(2)), ("plain", callbacks.ModelSummary(2))):
        printed = io.StringIO()
        with redirect_stdout(printed):
            make_trainer(devices, fast_dev_run=1, enable_model_summary=True, callbacks=[summary]).fit(task, batches())
        seen[name] = printed.getvalue()
        assert "_summary" not in vars(summary)
    seen["text"] = str(ParallelSummary(task))
    small = Regression()
    make_trainer(devices, fast_dev_run=1, enable_model_summary=True).fit(small, DataLoader(ROWS, batch_size=4))  # type: ignore[arg-type]
    seen["with inputs"] = str(ParallelSummary(small))
    return seen


class Configured(Logged):
    """Brings every loader along."""

    def val_dataloader(self) -> Any:
        return batches(2)

    test_dataloader = predict_dataloader = val_dataloader


CONFIG = """
seed_everything: 3
trainer:
  accelerator: cpu
  devices: {devices}
  strategy: {strategy}
  max_epochs: 1
  logger: false
  enable_progress_bar: false
  enable_model_summary: false
  default_root_dir: {folder}
model:
  learning_rate: 0.1
"""
BY_CLASS = "\n    class_path: lightning_autotp.AutoTPStrategy\n    init_args:\n      tensor_parallel_size: 2"


def written(name: str, text: str, folder: Path) -> str:
    """A YAML file of this rank."""
    path = folder / f"{name}-{os.environ.get('RANK', 0)}.yaml"
    path.write_text(text)
    return str(path)


def with_cli(*arguments: str) -> Any:
    return LightningCLI(Configured, save_config_callback=None, auto_configure_optimizers=False, args=list(arguments))


def recommended() -> Choice:
    """Of what fits, two ranks that share a copy, have parts of the tokens, and compute blocks again."""
    return next(
        choice
        for choice in recommendation().choices
        if choice.fits and choice.sequence_parallel and choice.activation_checkpointing == "blocks"
    )


@cache
def recommendation() -> Recommendation:
    batch = next(iter(batches()))["input_ids"]
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(tiny_config())
    return recommend(
        model, gpus="2xRTX4090", tokens_per_step=2 * batch.numel(), sequence_length=batch.shape[1], precision="32-true"
    )


def pasted(lines: str, folder: Path) -> tuple[tuple[int, int, int], dict[str, float]]:
    """Trained as a recommendation says, by its own lines; everything else is in a file before them."""
    own = written("own", CONFIG.format(devices="auto", strategy="auto", folder=folder / "pasted"), folder)
    cli = with_cli("fit", "--config", own, "--config", written("pasted", lines, folder))
    given = cli.trainer.strategy
    sizes = given.tensor_ranks, given.data_ranks, cli.trainer.accumulate_grad_batches
    return sizes, {name: float(value) for name, value in cli.trainer.callback_metrics.items()}


def configured(devices: int, folder: Path) -> dict[str, Any]:
    """LightningCLI's subcommands from a YAML file; the later ones take up what the first trained."""
    text = CONFIG.format(devices=devices, strategy=BY_CLASS if devices > 1 else "auto", folder=folder)
    config = written(f"config-{devices}", text, folder)
    seen: dict[str, Any] = {}
    checkpoint: list[str] = []
    for command in ("fit", "validate", "test", "predict"):
        cli = with_cli(command, "--config", config, *checkpoint)
        seen[command] = {name: float(value) for name, value in cli.trainer.callback_metrics.items()}
        if command == "fit":
            checkpoint = [f"--ckpt_path={cli.trainer.checkpoint_callback.best_model_path}", "--weights_only=false"]
    return seen


def ranks(directory: str, lines: str) -> dict[str, Any]:
    folder = Path(directory)
    seen: dict[str, Any] = {"watched": watched(2, folder), **averaged(2, folder)}
    task = Logged()
    seen |= {**tuned_first(2, folder), "summaries": summaries(2, task)}
    seen["configured"] = configured(2, folder)
    seen["pasted"] = pasted(lines, folder)
    once = make_trainer(2, callbacks=[OnceAnEpoch()])
    once.fit(task, batches())
    seen["once an epoch"] = whole(task, 2)
    for name, callback in {
        "swa": callbacks.StochasticWeightAveraging(0.1),
        "ema": callbacks.EMAWeightAveraging(),
    }.items():
        seen[name] = error_of(make_trainer(2, callbacks=[callback]).fit, Logged(), batches())
    elsewhere = make_trainer(2, callbacks=[EMAWeightAveraging(device="meta")])
    seen["elsewhere"] = error_of(elsewhere.fit, task, batches())
    copies = make_trainer(2, strategy=AutoTPStrategy(data_parallel_size=2), sync_batchnorm=True)
    seen["synced"] = error_of(copies.fit, Logged(), batches())
    return seen


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("callbacks")


@pytest.fixture(scope="module")
def two(folder: Path) -> list[dict[str, Any]]:
    return run_trainer_ranks(ranks, 2, str(folder), yaml_lines(recommendation(), recommended()))


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    """One process's tuner, and its runs by flag."""
    return tuned_first(1, tmp_path_factory.mktemp("alone"))


def assert_same(found: Any, wanted: Any) -> None:
    """Numbers within 1e-5, weights within 1e-4."""
    assert found.keys() == wanted.keys()
    for name, value in wanted.items():
        if name == "weights":
            assert_parity({"losses": [], "weights": found[name]}, {"losses": [], "weights": value})
        else:
            assert found[name] == pytest.approx(value, rel=1e-5), name


def test_callbacks_decide_as_in_one_process(two: list[dict[str, Any]], tmp_path: Path) -> None:
    wanted = watched(1, tmp_path)
    assert wanted["stopped"][2]
    for seen in two:
        assert seen["watched"].pop("stopped") == wanted["stopped"]
        name, score = seen["watched"].pop("best")
        assert (name, score) == (wanted["best"][0], pytest.approx(wanted["best"][1], rel=1e-5))
        assert_same(seen["watched"], {key: wanted[key] for key in ("losses", "weights", "metrics")})


def test_one_rank_writes_logs_and_checkpoints(two: list[dict[str, Any]], folder: Path) -> None:
    assert [path.name for path in (folder / "logs/lightning_logs").iterdir()] == ["version_0"]
    assert len(list((folder / "boards").rglob("events.out.tfevents.*"))) == 1
    with (folder / "logs/lightning_logs/version_0/metrics.csv").open() as file:
        rows = list(csv.DictReader(file))
    losses = [float(row["loss"]) for row in rows if row["loss"]]
    # Of the second epoch's batches two make a step, and have one row.
    assert losses[:4] == pytest.approx(two[0]["watched"]["losses"][:4], rel=1e-5)
    assert len(losses) == 5
    assert next(float(row["lr-SGD"]) for row in rows if row["lr-SGD"]) == 0.05
    assert len(list((folder / "best").iterdir())) == 2


def test_averages_are_those_of_one_process(two: list[dict[str, Any]], folder: Path, tmp_path: Path) -> None:
    wanted = averaged(1, tmp_path)
    for seen in two:
        for run in ("averaged", "resumed"):
            assert_same(seen[run], wanted[run])
    ours, theirs = (torch.load(path / "ema" / "epoch.ckpt", weights_only=False) for path in (folder, tmp_path))
    assert ours["averaging_state"] == theirs["averaging_state"]
    for key in ("state_dict", "current_model_state"):
        assert_parity({"losses": [], "weights": ours[key]}, {"losses": [], "weights": theirs[key]})
    assert not torch.allclose(
        ours["state_dict"]["model.lm_head.weight"], ours["current_model_state"]["model.lm_head.weight"], atol=1e-4
    )


def test_flags_of_the_trainer(two: list[dict[str, Any]], alone: dict[str, dict[str, Any]]) -> None:
    wanted = alone["flags"]
    for seen in two:
        found = seen["flags"]
        assert found.pop("tested")[0] == pytest.approx(wanted["tested"][0], rel=1e-5)
        assert len(found["predicted"]) == 1
        torch.testing.assert_close(found.pop("predicted"), wanted["predicted"], rtol=1e-5, atol=0)
        for name, run in found.items():
            assert_same(run, wanted[name])
    assert [len(wanted[name]["losses"]) for name in ("fast", "limited", "share", "overfit")] == [2, 3, 2, 3]


def test_the_tuner_finds_the_same(two: list[dict[str, Any]], alone: dict[str, dict[str, Any]]) -> None:
    wanted = alone["tuned"]
    for seen in two:
        assert seen["tuned"]["lr"] == pytest.approx(wanted["lr"])
        assert seen["tuned"]["loss"] == pytest.approx(wanted["loss"], rel=1e-4)
        assert "not supported with distributed strategies" in seen["tuned"]["size"]


def test_summaries_show_the_whole_model_and_this_ranks_part(two: list[dict[str, Any]]) -> None:
    task = Logged()
    task.configure_model()
    total = f"{sum(parameter.numel() for parameter in task.parameters()) / 1000:.1f} K"
    for seen in two:
        text = seen["summaries"]["text"]
        assert f"{total}    Total params" in text
        assert "Params per Device" in text
    head = next(line for line in two[0]["summaries"]["rich"].splitlines() if "model.lm_head" in line)
    assert "2.1 K" in head  # 67 x 32
    assert "1.1 K" in head  # 34 x 32
    assert total in two[0]["summaries"]["rich"]
    assert two[1]["summaries"]["rich"] == ""
    assert "[5, 6]" in two[0]["summaries"]["with inputs"]


def test_the_cli_fits_validates_tests_and_predicts(two: list[dict[str, Any]], tmp_path: Path) -> None:
    wanted = configured(1, tmp_path)
    assert {"validation", "loss"} <= wanted["fit"].keys()
    assert wanted["validate"]["validation"] == pytest.approx(wanted["fit"]["validation"])
    assert "tested" in wanted["test"]
    for seen in two:
        for command, metrics in wanted.items():
            assert seen["configured"][command] == pytest.approx(metrics, rel=1e-5), command


def test_the_lines_of_a_recommendation_train(two: list[dict[str, Any]], tmp_path: Path) -> None:
    choice = recommended()
    sizes = choice.tensor_parallel_size, choice.data_parallel_size, choice.passes
    assert sizes == (2, 1, 1)
    own = written("own", CONFIG.format(devices=1, strategy="auto", folder=tmp_path), tmp_path)
    wanted = with_cli("fit", "--config", own).trainer.callback_metrics
    for seen in two:
        made, found = seen["pasted"]
        assert made == sizes
        assert found == pytest.approx({name: float(value) for name, value in wanted.items()}, rel=1e-5)


def test_averages_once_an_epoch(two: list[dict[str, Any]]) -> None:
    assert all(torch.isfinite(value).all() for value in two[0]["once an epoch"].values())


@pytest.mark.parametrize(
    ("case", "use"), [("swa", "averaging.WeightAveraging"), ("ema", "averaging.EMAWeightAveraging")]
)
def test_callbacks_that_copy_whole_models_are_refused(case: str, use: str, two: list[dict[str, Any]]) -> None:
    for seen in two:
        assert "copies the model before it is divided" in seen[case]
        assert use in seen[case]


def test_batch_statistics_over_copies_are_refused(two: list[dict[str, Any]]) -> None:
    for seen in two:
        assert "sync_batchnorm=True: batch statistics over several copies" in seen["synced"]


def test_averages_elsewhere_are_refused(two: list[dict[str, Any]]) -> None:
    for seen in two:
        assert "EMAWeightAveraging(device='meta'): the averages of a divided model are gathered" in seen["elsewhere"]
