"""``Trainer(strategy="autotp")`` in real processes, against one process."""

from __future__ import annotations

import importlib
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
import torch.distributed as dist
from distributed import PATIENCE, SCRIPT_ENVIRONMENT
from lightning.pytorch.strategies import StrategyRegistry
from torch import nn
from torch.utils.data import DataLoader
from trainer_ranks import run_trainer_ranks
from training import (
    BLOCKS,
    ROWS,
    STEPS,
    Regression,
    SavesAfter,
    Task,
    assert_parity,
    blocks,
    drawn,
    error_of,
    fit,
    loader,
    trainer,
)

import lightning_autotp
from lightning_autotp import AutoTPStrategy, full_state_dict


def seeded(strategy: Any, devices: int, source: str, **options: Any) -> dict[str, Any]:
    """With a seed after which something is drawn, as a script draws its data."""
    L.seed_everything(3, verbose=False)
    drawn()
    return fit(strategy, devices, Task(source), **options)


def clipped(strategy: Any, devices: int, clips: bool = True) -> dict[str, dict[str, Any]]:
    """A model in each way, one after the other. With SGD: Adam would hide most of what clipping does."""
    L.seed_everything(3, verbose=False)
    seen, task = {}, Task("init", 0.5, "SGD")
    for case, options in CLIPPED.items():
        task.begin()
        seen[case] = fit(strategy, devices, task, **{**options, **({} if clips else {"gradient_clip_val": None})})
    return seen


class WithoutLabels(Task):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return self.model(input_ids=batch["input_ids"]).loss


class FailsOnOneRank(Task):
    def build(self) -> Any:
        if dist.get_rank() == 1:
            raise FileNotFoundError("weights are not on this node")
        return super().build()


class Empty(Task):
    def build(self) -> Any:
        return nn.Identity()


class Pair(Task):
    def build(self) -> Any:
        self.other = nn.Linear(2, 2)
        return nn.Linear(2, 2)


def regression(strategy: Any, devices: int) -> dict[str, Any]:
    L.seed_everything(5, verbose=False)
    task = Regression()
    rows: Any = DataLoader(ROWS, batch_size=4)
    trainer(strategy, devices, max_steps=6).fit(task, rows)
    trainer(strategy, devices, max_steps=1).fit(Regression(), rows)
    weights = full_state_dict(task) if devices > 1 else task.state_dict()
    return {"losses": task.losses, "weights": weights, "random": drawn()}


CLIPPED: dict[str, dict[str, Any]] = {
    "clipped": {"max_steps": 5, "accumulate_grad_batches": 2, "gradient_clip_val": 0.5},
    "by value": {"max_steps": 5, "gradient_clip_val": 1e-3, "gradient_clip_algorithm": "value"},
}


def two_ranks(directory: str) -> dict[str, Any]:
    folder, seen = Path(directory), {}
    source = str(folder / "source")
    rank = int(os.environ["RANK"])
    half = SavesAfter(STEPS // 2, folder / "half.ckpt")
    seen["parity"] = seeded("autotp", 2, source, save=folder / "end.ckpt", callbacks=[half])
    strategy = AutoTPStrategy(2, 1)
    seen["before"] = error_of(strategy.report)
    seen["resumed"] = seeded(strategy, 2, source, ckpt_path=folder / "half.ckpt")
    seen["report"], seen["report for"] = strategy.report(), strategy.report("2xH100")
    seen["stored"] = sum(part.nbytes for part in strategy.model.model.parameters())
    seen["config"] = seeded("autotp", 2, "config", max_steps=2, shuffle=True)
    seen |= clipped("autotp", 2)
    seen["regression"] = regression("autotp", 2)

    task = Task(source)
    validating = trainer("autotp", 2)
    seen["validated"] = validating.validate(task, loader(), verbose=False)
    seen["validated again"] = validating.validate(task, loader(), ckpt_path=str(folder / "end.ckpt"), verbose=False)
    validating.strategy.save_pretrained(folder / "exported")
    seen["votes"] = [
        validating.strategy.reduce_boolean_decision(vote, all=every)
        for vote in (rank == 0, True, False)
        for every in (True, False)
    ]

    def attempt(task: Any, rows: Any = ROWS, **options: Any) -> str:
        return error_of(trainer("autotp", 2, max_steps=2).fit, task, DataLoader(rows, batch_size=4), **options)

    small = Regression()
    seen["different batches"] = attempt(small, ROWS + rank)
    seen["no checkpoint"] = attempt(small, ckpt_path=str(folder / "none"))
    saving = trainer("autotp", 2, max_steps=2)
    saving.fit(small, DataLoader(ROWS, batch_size=4))  # type: ignore[arg-type]
    saving.save_checkpoint(folder / "small.ckpt")
    if rank == 0:
        (folder / "cut.ckpt").write_bytes((folder / "small.ckpt").read_bytes()[:3000])
    seen["not writable"] = error_of(saving.save_checkpoint, folder / "small.ckpt" / "another.ckpt")
    seen["cut"] = attempt(small, ckpt_path=str(folder / "cut.ckpt"))
    seen["another model"] = attempt(small, ckpt_path=str(folder / "end.ckpt"))
    seen["quadratic"] = attempt(Regression("LBFGS"))
    seen["no loss"] = attempt(WithoutLabels(source), blocks())
    seen["one rank fails"] = attempt(FailsOnOneRank(source))
    seen["nothing there"] = attempt(Empty(source))
    seen["two there"] = attempt(Pair(source))
    torch.manual_seed(rank)
    seen["different weights"] = attempt(Task("init"))
    return seen


def four_ranks(directory: str) -> dict[str, Any]:
    folder, seen = Path(directory), {}
    source = str(folder / "source")
    seen["resumed"] = seeded("autotp", 4, source, ckpt_path=folder / "half.ckpt")
    seen["copies"] = seeded(AutoTPStrategy(2, 2), 4, source, max_steps=6, save=folder / "copies.ckpt")
    validating = trainer(AutoTPStrategy(data_parallel_size=2), 4)
    seen["validated"] = validating.validate(
        Task(source), loader(), ckpt_path=str(folder / "copies.ckpt"), verbose=False
    )
    return seen


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """With the tiny model's weights in ``source``."""
    directory = tmp_path_factory.mktemp("strategy")
    torch.manual_seed(11)
    Task("init").model.save_pretrained(directory / "source")
    return directory


@pytest.fixture(scope="module")
def reference(folder: Path) -> dict[str, Any]:
    """The uninterrupted run of one process, with a checkpoint of its first half."""
    half = SavesAfter(STEPS // 2, folder / "alone.ckpt")
    return seeded("auto", 1, str(folder / "source"), callbacks=[half])


@pytest.fixture(scope="module")
def two(folder: Path) -> list[dict[str, Any]]:
    """What two ranks saw."""
    return run_trainer_ranks(two_ranks, 2, str(folder))


@pytest.fixture(scope="module")
def four(folder: Path, two: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """What four ranks saw; they take up what two ranks wrote."""
    return run_trainer_ranks(four_ranks, 4, str(folder))


def test_twenty_steps_equal_one_process(two: list[dict[str, Any]], reference: dict[str, Any], folder: Path) -> None:
    assert len(reference["losses"]) == STEPS
    task = Task(str(folder / "source"))
    task.configure_model()
    for name, weight in task.state_dict().items():  # training changed more than the tolerance lets pass
        assert (reference["weights"][name] - weight).abs().max() > 1e-3
    for seen in two:
        assert_parity(seen["parity"], reference)


def test_ranks_draw_the_numbers_one_process_draws(two: list[dict[str, Any]], reference: dict[str, Any]) -> None:
    for seen in two:
        for run in ("parity", "resumed"):
            assert seen[run]["random"] == reference["random"]


def test_from_config_and_shuffling_equal_one_process(two: list[dict[str, Any]]) -> None:
    wanted = seeded("auto", 1, "config", max_steps=2, shuffle=True)
    assert not torch.equal(wanted["batches"][0], BLOCKS[:4])
    for seen in two:
        assert torch.equal(torch.stack(seen["config"]["batches"]), torch.stack(wanted["batches"]))
        assert_parity(seen["config"], wanted)


def test_clipping_and_accumulation_equal_one_process(two: list[dict[str, Any]]) -> None:
    wanted, unclipped = clipped("auto", 1), clipped("auto", 1, clips=False)
    for case in CLIPPED:
        weights, others = wanted[case]["weights"], unclipped[case]["weights"]
        assert max((weights[name] - others[name]).abs().max() for name in weights) > 1e-3
        for seen in two:
            assert_parity(seen[case], wanted[case])


def test_a_plain_module_with_parts_of_the_lightning_module_around_it(two: list[dict[str, Any]]) -> None:
    wanted = regression("auto", 1)
    for seen in two:
        assert_parity(seen["regression"], wanted)
        assert seen["regression"]["random"] == wanted["random"]  # after another run, with no seed of its own


@pytest.fixture(scope="module")
def resumed(reference: dict[str, Any], folder: Path) -> dict[str, Any]:
    """One process's second half of the run."""
    found = seeded("auto", 1, str(folder / "source"), ckpt_path=folder / "alone.ckpt")
    assert len(found["losses"]) == STEPS // 2 < len(reference["losses"])
    return found


def test_two_ranks_checkpoint_resumes_on_one_and_two_as_if_one_process_had_written_it(
    two: list[dict[str, Any]], resumed: dict[str, Any], folder: Path
) -> None:
    in_one_process = seeded("auto", 1, str(folder / "source"), ckpt_path=folder / "half.ckpt")
    for seen in (two[0]["resumed"], two[1]["resumed"], in_one_process):
        assert_parity(seen, resumed)


@pytest.mark.nightly  # by day test_data_parallel.py goes on at other sizes
def test_two_ranks_checkpoint_resumes_on_four(four: list[dict[str, Any]], resumed: dict[str, Any]) -> None:
    for seen in (four[0], four[3]):
        assert_parity(seen["resumed"], resumed)


def test_the_checkpoint_is_an_ordinary_one(two: list[dict[str, Any]], folder: Path) -> None:
    task = Task.load_from_checkpoint(folder / "end.ckpt")
    for name, weight in two[0]["parity"]["weights"].items():
        assert torch.equal(task.state_dict()[name], weight)
    saved = torch.load(folder / "end.ckpt", weights_only=True)
    assert saved["hyper_parameters"] == {"source": str(folder / "source"), "learning_rate": 1e-3, "optimizer": "AdamW"}
    assert saved["optimizer_states"][0]["param_groups"][0]["param_names"] == [n for n, _ in task.named_parameters()]
    assert not list(folder.glob(".*"))


def test_the_exported_directory_has_the_checkpoint_weights(two: list[dict[str, Any]], folder: Path) -> None:
    from transformers import AutoModelForCausalLM

    loaded = AutoModelForCausalLM.from_pretrained(folder / "exported")
    for name, weight in two[0]["parity"]["weights"].items():
        assert torch.equal(loaded.state_dict()[name.removeprefix("model.")], weight)


def test_a_report_has_what_a_step_takes(two: list[dict[str, Any]]) -> None:
    for seen in two:
        assert "strategy.report() is of a run that trains one model" in seen["before"]
        on_this, on_h100 = seen["report"], seen["report for"]
        assert on_this.memory_predicted == on_h100.memory_predicted > 3 * seen["stored"]  # with AdamW's two states
        assert on_this.memory_measured is None
        assert on_this.seconds_measured > 0
        assert on_this.seconds_predicted is None
        assert on_this.unknown == "the machine is not known"
        assert 0 < on_h100.seconds_predicted < 0.1
        assert (on_h100.machine, on_h100.unknown) == ("H100", "")


def test_logged_values_count_every_batch_once(two: list[dict[str, Any]], folder: Path) -> None:
    wanted = trainer("auto", 1).validate(Task(str(folder / "source")), loader(), verbose=False)
    for seen in two:
        assert seen["validated"][0] == pytest.approx(wanted[0], rel=1e-5)
        assert seen["validated"][0]["rows"] == 10
        assert seen["validated"][0]["ranks"] == 10
        assert seen["validated again"][0]["validation"] < wanted[0]["validation"]


@pytest.mark.nightly  # by day copies count in test_evaluation.py
def test_copies_log_every_batch_once(four: list[dict[str, Any]]) -> None:
    for seen in four:
        assert seen["validated"] == four[0]["validated"]
        assert seen["validated"][0]["rows"] == 10
        assert seen["validated"][0]["ranks"] == 10


def test_decisions_are_taken_by_all_ranks(two: list[dict[str, Any]]) -> None:
    for seen in two:
        assert seen["votes"] == [False, True, True, True, False, False]


@pytest.mark.nightly  # by day copies train in test_data_parallel.py
def test_copies_of_the_model_average_their_gradients(four: list[dict[str, Any]], folder: Path) -> None:
    first, peer, second, _ = (seen["copies"] for seen in four)
    assert torch.equal(torch.stack(first["batches"]), torch.stack(peer["batches"]))
    assert not torch.equal(first["batches"][0], second["batches"][0])
    task = Task(str(folder / "source"))
    task.configure_model()
    optimizer = task.configure_optimizers()
    losses: list[list[float]] = [[], []]
    for batches in zip(first["batches"], second["batches"], strict=True):
        both = [task.model(input_ids=batch, labels=batch).loss for batch in batches]
        losses[0].append(both[0].item())
        losses[1].append(both[1].item())
        optimizer.zero_grad()
        (sum(both) / 2).backward()
        optimizer.step()
    weights = task.state_dict()
    for number, seen in enumerate(four):
        assert_parity({**seen["copies"], "gradients": []}, {"losses": losses[number // 2], "weights": weights})


def test_ranks_that_see_different_batches_are_told_what_to_do(two: list[dict[str, Any]]) -> None:
    assert two[0]["different batches"] == two[1]["different batches"]
    message = two[0]["different batches"]
    assert "differs between the ranks of a tensor-parallel group: batch is float32[4, 6]" in message
    assert "distributed_sampler_kwargs" in message


@pytest.mark.parametrize(
    ("case", "expected"),
    [
        ("quadratic", "LBFGS computes its update from whole tensors"),
        (
            "no loss",
            "RuntimeError: WithoutLabels.training_step returned no loss, and several processes cannot skip a step",
        ),
        ("no loss", 'where its batch has labels: {"input_ids": ids, "labels": ids}'),
        ("one rank fails", "FileNotFoundError: weights are not on this node"),
        ("nothing there", "it has no Hugging Face model and no child with parameters"),
        ("two there", "AutoTPStrategy(models=[...]) names those that should be"),
        ("different weights", "the ranks built different weights: model.embed_tokens.weight"),
        ("no checkpoint", "none does not exist"),
        ("cut", "cut.ckpt (3000 bytes) cannot be read"),
        ("another model", "missing: net.0.weight\n"),
        ("not writable", "writing the checkpoint"),
    ],
)
def test_an_error_reaches_every_rank(two: list[dict[str, Any]], case: str, expected: str) -> None:
    if case == "not writable":
        assert "Error: " in two[0][case]
        assert expected in two[1][case]
        return
    for seen in two:
        assert expected in seen[case]


@pytest.mark.parametrize(
    ("devices", "sizes", "expected"),
    [
        (2, {"tensor_parallel_size": 3}, "tensor_parallel_size=3 times data_parallel_size=1 is 3, but .* 2 devices"),
        (4, {"tensor_parallel_size": 2}, "tensor_parallel_size=2 times data_parallel_size=1 is 2, but .* 4 devices"),
        (3, {"data_parallel_size": 2}, "tensor_parallel_size=1 times data_parallel_size=2 is 2, but .* 3 devices"),
        (2, {"tensor_parallel_size": 0}, "tensor_parallel_size is 0: it must be a positive number"),
        (2, {"data_parallel_size": "all"}, "data_parallel_size is 'all': it must be a positive number"),
        (4, {"data_parallel_size": (2, 0)}, r"data_parallel_size is \(2, 0\): it must .* or two positive numbers"),
        (4, {"data_parallel_size": (3, 2)}, "tensor_parallel_size=1 times data_parallel_size=6 is 6, but .* 4 devices"),
    ],
)
def test_sizes_that_do_not_fit_are_refused_at_once(devices: int, sizes: dict[str, Any], expected: str) -> None:
    with pytest.raises(ValueError, match=expected):
        trainer(AutoTPStrategy(**sizes), devices)


def test_auto_sizes() -> None:
    strategies = [AutoTPStrategy(), AutoTPStrategy(data_parallel_size=2), AutoTPStrategy(4, 1)]
    strategies.append(AutoTPStrategy(data_parallel_size=(2, 1)))
    found = [trainer(strategy, 4).strategy for strategy in strategies]
    assert [(s._tensor_parallel_size, s._data_parallel_size) for s in found] == [(4, 1), (2, 2), (4, 1), (2, 2)]


def test_importing_again_registers_again() -> None:
    StrategyRegistry.remove("autotp")
    importlib.reload(lightning_autotp)
    assert isinstance(StrategyRegistry.get("autotp"), AutoTPStrategy)


SCRIPT = """
import lightning_autotp
from training import Task, loader, trainer

class Failing(Task):
    def configure_model(self):
        if self.trainer.global_rank == 1:
            raise ValueError("planted on rank 1")
        super().configure_model()

trainer("autotp", 2, max_steps=2).fit(Failing("config"), loader())
"""


@pytest.mark.nightly
def test_an_error_in_a_script_whose_ranks_lightning_starts_is_said_briefly(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    environment = {**os.environ, **SCRIPT_ENVIRONMENT}
    command = [sys.executable, str(script)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=PATIENCE, check=False)
    assert done.returncode != 0
    lines = done.stderr.splitlines()
    [peer], failed = ([line for line in lines if line.startswith(f"[rank{rank}]: ")] for rank in range(2))
    assert peer.endswith(
        ": rank 1 of 2 failed while building the model in configure_model(): ValueError: planted on rank 1"
    )
    assert failed[0] == "[rank1]: ValueError: planted on rank 1"
    assert any(re.search(r"   \.\.\. \d+ frames in lightning, lightning_autotp", line) for line in failed)
    assert any(line.endswith("in configure_model") for line in failed)
    assert len(failed) < 12
    assert "cannot go on" not in done.stderr
