"""Checkpoint files and directories: what is read is what was written, whatever happens while it is written."""

from __future__ import annotations

import errno
import fcntl
import multiprocessing
import os
import resource
import shutil
import sys
import threading
from pathlib import Path
from typing import Any
from unittest import mock

import lightning as L
import pytest
import torch
import torch.distributed as dist
from distributed import PATIENCE, run_ranks
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor
from trainer_ranks import run_trainer_ranks
from training import BLOCKS, SameStart, Task, error_of, fit

from lightning_autotp import AutoTPStrategy
from lightning_autotp.building.checkpoint_reading import DamagedFileError, MissingFileError
from lightning_autotp.checkpoints import files
from lightning_autotp.checkpoints.files import META, Background, consolidate, open_checkpoint, save_directory, save_file
from lightning_autotp.checkpoints.stored import HeldTensor, StoredTensor
from lightning_autotp.layouts.blocks import Block, blocks_of
from lightning_autotp.lightning.averaging import EMAWeightAveraging
from lightning_autotp.ranks.agreement import raise_together

STEPS = 6


class Stepwise(SameStart, Task):
    """Takes its rows by the step it is at: a loader need not go on where it was."""

    def begin(self) -> None:
        super().begin()
        self.restore()

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        rows = BLOCKS[[(5 * self.trainer.global_step + row) % len(BLOCKS) for row in range(4)]]
        return super().training_step({"input_ids": rows, "labels": rows}, batch_idx)


def trained(strategy: Any, devices: int, task: Stepwise | None = None, **options: Any) -> dict[str, Any]:
    """Train a new task, or one whose model is divided already."""
    L.seed_everything(3, verbose=False)
    if task is None:
        task = Stepwise("config")
    task.begin()
    return fit(strategy, devices, task, **{"max_steps": STEPS, **options})


def every_step(folder: Path, **options: Any) -> dict[str, Any]:
    saving = ModelCheckpoint(folder, "{step}", every_n_train_steps=1, **options)
    return {"callbacks": [saving], "enable_checkpointing": True}


class Slow(Background):
    """Does nothing before it is told to."""

    def __init__(self) -> None:
        super().__init__()
        self.may_write = threading.Event()

    def submit(self, job: Any) -> None:
        super().submit(lambda: (self.may_write.wait(PATIENCE), job())[1])


class Groups(L.Callback):
    """Counts the process groups before there are any checkpoints, when training begins, and when it ends."""

    def __init__(self) -> None:
        self.counts = [self.count()]

    def count(self) -> int:
        return len(dist.distributed_c10d._world.pg_map)

    def on_train_start(self, *_: Any) -> None:
        self.counts.append(self.count())

    def on_train_end(self, *_: Any) -> None:
        self.counts.append(self.count())


def two_ranks(directory: str) -> dict[str, Any]:
    folder, seen = Path(directory), {}
    rank = int(os.environ["RANK"])
    task = Stepwise("config")
    seen["uninterrupted"] = trained("autotp", 2, task)
    kinds: dict[str, dict[str, Any]] = {
        "directory": {"save_distributed_checkpoint": True},
        "async": {"save_distributed_checkpoint": True, "save_async": True},
        "async file": {"save_async": True},
    }
    for name, options in kinds.items():
        groups, saving = Groups(), every_step(folder / name, save_last=True)
        saving["callbacks"].append(groups)
        trained(AutoTPStrategy(**options), 2, task, max_steps=3, **saving)
        seen[f"groups of {name}"] = groups.counts
        seen[f"left by {name}"] = sorted(path.name for path in (folder / name).iterdir())
        last = str(folder / name / "last.ckpt")
        resumed = task if "save_async" in options else None  # a new model, or one that has weights already
        seen[f"resumed {name}"] = trained(AutoTPStrategy(**options), 2, resumed, ckpt_path=last)

    # What a callback adds to a checkpoint may be cut as well.
    averaged = every_step(folder / "averaged", save_last=True)
    averaged["callbacks"].append(EMAWeightAveraging(decay=0.5))
    strategy = AutoTPStrategy(save_distributed_checkpoint=True, save_async=True)
    trained(strategy, 2, task, max_steps=3, **averaged)
    again = {"callbacks": [EMAWeightAveraging(decay=0.5)], "ckpt_path": str(folder / "averaged" / "last.ckpt")}
    seen["resumed averaged"] = trained("autotp", 2, task, **again)

    # While one is being written in the background, training goes on and the one before it stays.
    strategy = AutoTPStrategy(save_async=True, save_distributed_checkpoint=True)
    strategy.saving.background = slow = Slow()
    seen["meanwhile"] = []

    class Meanwhile(L.Callback):
        def on_train_batch_end(self, trainer: L.Trainer, *_: Any) -> None:
            there = sorted(path.name for path in (folder / "slow").glob("*")) if rank == 0 else []
            seen["meanwhile"].append((trainer.global_step, there))
            if trainer.global_step == 2:
                slow.may_write.set()

    options = every_step(folder / "slow")
    options["callbacks"].insert(0, Meanwhile())
    trained(strategy, 2, task, max_steps=2, **options)
    seen["slow"] = sorted(path.name for path in (folder / "slow").iterdir())

    # Errors in the background come out on both ranks.
    if rank == 0:
        (folder / "in the way").write_text("a file")
    options = every_step(folder / "in the way" / "deeper")
    seen["cannot write"] = error_of(trained, AutoTPStrategy(save_async=True), 2, task, max_steps=3, **options)

    directory_ = folder / "directory" / "last.ckpt"
    if rank == 0:
        names = ("cut", "lacking", "unfinished", "flipped")
        broken = {name: shutil.copytree(directory_, folder / f"{name}.ckpt") for name in names}
        cut = broken["cut"] / "__1_0.distcp"
        cut.write_bytes(cut.read_bytes()[:-2000])
        flip(broken["flipped"] / "__1_0.distcp")
        flip(Path(shutil.copy(folder / "async file" / "last.ckpt", folder / "flipped file.ckpt")))
        (broken["lacking"] / "__0_0.distcp").unlink()
        (broken["unfinished"] / "meta.pt").unlink()
        torch.save({"weights": torch.zeros(3)}, folder / "foreign.ckpt")
        (folder / "garbage.ckpt").write_bytes(b"not a checkpoint" * 100)
    dist.barrier()
    for name in ("cut", "lacking", "unfinished", "flipped", "flipped file", "foreign", "garbage"):
        seen[name] = error_of(trained, "autotp", 2, task, ckpt_path=str(folder / f"{name}.ckpt"))
    return seen


def flip(path: Path) -> None:
    """Change one bit of a tensor's numbers, near the middle; what lies between two tensors may be padding."""
    content = bytearray(path.read_bytes())
    at = len(content) // 2
    while len(set(content[at - 64 : at + 64])) < 60:  # names and padding repeat few bytes
        at += 64
    content[at] ^= 1
    path.write_bytes(content)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("checkpoint_files")


@pytest.fixture(scope="module")
def two(folder: Path) -> list[dict[str, Any]]:
    return run_trainer_ranks(two_ranks, 2, str(folder))


@pytest.mark.parametrize("kind", ["directory", "async", "async file"])
def test_resuming_is_as_if_nothing_had_happened(two: list[dict[str, Any]], kind: str) -> None:
    for seen in two:
        # The older ones are gone, and so is everything half done.
        assert seen[f"left by {kind}"] == ["last.ckpt", "step=3.ckpt"]
        assert seen[f"resumed {kind}"]["losses"] == seen["uninterrupted"]["losses"][3:]
        for name, weight in seen["uninterrupted"]["weights"].items():
            assert torch.equal(seen[f"resumed {kind}"]["weights"][name], weight)


def test_groups_for_checkpoints_are_made_before_training_and_for_directories_only(two: list[dict[str, Any]]) -> None:
    for seen in two:
        counts = {kind: seen[f"groups of {kind}"] for kind in ("directory", "async", "async file")}
        assert all(begun == ended for _, begun, ended in counts.values())
        made = {kind: begun - before for kind, (before, begun, _) in counts.items()}
        assert made["directory"] == made["async"] == made["async file"] + 1


def test_averages_are_cut_as_the_weights_are(two: list[dict[str, Any]], folder: Path) -> None:
    found = open_checkpoint(folder / "averaged" / "last.ckpt")
    weights = open_checkpoint(folder / "directory" / "last.ckpt")["state_dict"]
    for name, weight in weights.items():
        assert torch.equal(found["current_model_state"][name].read(), weight.read())
        assert not torch.equal(found["state_dict"][name].read(), weight.read())
    for seen in two:
        assert seen["resumed averaged"]["losses"] == seen["uninterrupted"]["losses"][3:]


def test_a_save_in_the_background_removes_nothing_before_it_is_done(two: list[dict[str, Any]]) -> None:
    assert two[0]["meanwhile"] == [(1, []), (2, [])]
    assert two[0]["slow"] == ["step=2.ckpt"]


def test_an_error_in_the_background_reaches_both_ranks(two: list[dict[str, Any]]) -> None:
    assert "NotADirectoryError" in two[0]["cannot write"]
    assert "rank 0 of 2 failed while writing a checkpoint in the background" in two[1]["cannot write"]


@pytest.mark.parametrize(
    ("case", "expected"),
    [
        ("cut", "cut.ckpt cannot be read: its file __1_0.distcp is damaged, truncated or from another save (it has"),
        ("lacking", "lacking.ckpt lacks the file __0_0.distcp"),
        ("unfinished", "unfinished.ckpt is not a checkpoint, or an incomplete one: it has no meta.pt"),
        (
            "flipped",
            "flipped.ckpt cannot be read: its file __1_0.distcp is damaged, truncated or from another save (the",
        ),
        ("flipped file", "flipped file.ckpt is damaged: the checksum of"),
        ("foreign", "foreign.ckpt is not a Lightning checkpoint: it has no 'state_dict'"),
        ("garbage", "garbage.ckpt (1600 bytes) cannot be read"),
    ],
)
def test_what_is_not_a_whole_checkpoint_is_refused_on_both_ranks(
    two: list[dict[str, Any]], case: str, expected: str
) -> None:
    for seen in two:
        assert expected in seen[case]


def test_a_directory_becomes_a_file_that_lightning_loads(two: list[dict[str, Any]], folder: Path) -> None:
    source = folder / "directory" / "last.ckpt"
    stored = open_checkpoint(source)
    assert all(isinstance(value, StoredTensor) for value in stored["state_dict"].values())
    consolidate(source, folder / "whole.ckpt")
    task = Task.load_from_checkpoint(folder / "whole.ckpt")
    saved = torch.load(folder / "whole.ckpt", weights_only=True)
    assert saved["global_step"] == 3
    for name, weight in task.state_dict().items():
        assert torch.equal(weight, stored["state_dict"][name].read())
    optimizer = task.configure_optimizers()
    optimizer.load_state_dict(saved["optimizer_states"][0])
    assert {int(state["step"]) for state in optimizer.state.values()} == {3}


def save(kind: str, path: Path, number: float, dies_at: int | None) -> None:
    """Save a number, in a process of its own, which ends just before a certain thing it does with files."""
    done = 0

    def watch(event: str, details: tuple[Any, ...]) -> None:
        nonlocal done
        writes = event in ("os.rename", "os.remove", "os.mkdir", "os.rmdir") or (
            event == "open" and isinstance(details[1], str) and set(details[1]) & set("wax+")
        )
        if writes and str(path.parent) in str(details[0]):
            done += 1
            if done == dies_at:
                os._exit(9)

    if kind == "directory":
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    sys.addaudithook(watch)
    weight = torch.full((3, 2), float(number))
    if kind == "file":
        save_file({"state_dict": {"weight": weight}}, path)
    else:
        held = HeldTensor((3, 2), weight, blocks_of((3, 2), None, 0, 1))
        save_directory({"state_dict": {"weight": held}}, path, dist.group.WORLD)
    os._exit(0)


def saved(path: Path) -> float:
    weight = open_checkpoint(path)["state_dict"]["weight"]
    return float((weight.read() if isinstance(weight, StoredTensor) else weight).mean())


@pytest.mark.parametrize("kind", ["file", "directory"])
def test_a_save_killed_at_any_moment_leaves_the_checkpoint_before_it(tmp_path: Path, kind: str) -> None:
    path = tmp_path / "last.ckpt"

    def attempt(number: float, dies_at: int | None) -> int | None:
        process = multiprocessing.get_context("fork").Process(target=save, args=(kind, path, number, dies_at))
        process.start()
        process.join(PATIENCE)
        return process.exitcode

    assert attempt(1, None) == 0
    found = []
    for moment in range(1, 60):
        outcome = attempt(2, moment)
        found.append(saved(path))
        if outcome == 0:
            break
        assert outcome == 9
        assert attempt(1, None) == 0  # over whatever is left
        assert saved(path) == 1
    assert len(found) > 3
    assert sorted(found) == found  # the old one up to some moment, the new one from then on
    assert set(found) == {1, 2}
    assert [entry.name for entry in tmp_path.iterdir()] == ["last.ckpt"]


def two_runs(rank: int, world_size: int, root: str) -> dict[str, str]:
    """Two runs of two ranks each; the second tries to save while the first does, and again afterwards."""
    groups = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    run, seen = rank // 2, {}
    rows = ((3 * (rank % 2), 3 * (rank % 2) + 3), (0, 2))
    held = HeldTensor((6, 2), torch.full((3, 2), float(run)), [Block(((0, 3), (0, 2)), rows, (0,))])

    def save(kind: str) -> None:
        path = Path(root) / f"{kind}.ckpt"
        if kind == "directory":
            save_directory({"state_dict": {"weight": held}}, path, groups[run])
        else:
            with raise_together(groups[run], f"writing {path}"):
                if rank % 2 == 0:
                    save_file({"state_dict": {"weight": torch.full((6, 2), float(run))}}, path)

    publish = files._publish

    def after_the_other(partial: Path, path: Path) -> None:
        dist.barrier()  # the other one begins
        dist.barrier()  # and has failed
        publish(partial, path)

    for kind in ("directory", "file"):
        with mock.patch.object(files, "_publish", after_the_other if rank == 0 else publish):
            if rank != 0:
                if run == 1:
                    dist.barrier()
                    seen[kind] = error_of(save, kind)
                    dist.barrier()
                else:
                    waiting = threading.Thread(target=lambda: (dist.barrier(), dist.barrier()))
                    waiting.start()
                    save(kind)
                    waiting.join()
            else:
                save(kind)
        dist.barrier()
        path = Path(root) / f"{kind}.ckpt"
        seen[f"first {kind}"] = str(saved(path))
        dist.barrier()
        if run == 1:
            save(kind)
        dist.barrier()
        seen[f"second {kind}"] = str(saved(path))
    if run == 1:
        for kind in ("directory", "file"):
            path = Path(root) / f"full {kind}.ckpt"
            seen[path.name] = without_room(rank % 2, path, groups[1], kind)
            seen[f"left in {path.name}"] = str(saved(path))
    return seen


def without_room(rank: int, path: Path, group: dist.ProcessGroup, kind: str) -> str:
    """What a rank says after a save for which there is no room on the last rank that writes, in place of another."""

    def save(value: float, length: int) -> None:
        if kind == "directory":
            box = ((rank, rank + 1), (0, length))
            held = HeldTensor((2, length), torch.full((1, length), value), [Block(((0, 1), (0, length)), box, (0,))])
            save_directory({"state_dict": {"weight": held}}, path, group)
            return
        with raise_together(group, f"writing {path}"):
            if rank == 0:
                save_file({"state_dict": {"weight": torch.full((2, length), value)}}, path)

    save(1.0, 4)
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    if rank == (1 if kind == "directory" else 0):
        resource.setrlimit(resource.RLIMIT_FSIZE, (2**18, before[1]))  # the system refuses to write more to a file
    try:
        return error_of(save, 2.0, 2**17)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[dict[str, str]]]:
    folder = tmp_path_factory.mktemp("two_runs")
    return folder, run_ranks(two_runs, 4, str(folder))


def test_two_runs_cannot_save_into_one_place_at_once(runs: tuple[Path, list[dict[str, str]]]) -> None:
    folder, everyone = runs
    for kind in ("directory", "file"):
        assert everyone[2][kind].startswith(f"FileExistsError: another run is saving into {folder}/{kind}.ckpt at")
        assert everyone[3][kind].startswith("PeerError: rank 0 of 2 failed while")
        assert f"another run is saving into {folder}/{kind}.ckpt at" in everyone[3][kind]
        for seen in everyone:
            assert (seen[f"first {kind}"], seen[f"second {kind}"]) == ("0.0", "1.0")
    left = ["directory.ckpt", "file.ckpt", "full directory.ckpt", "full file.ckpt"]
    assert sorted(path.name for path in folder.iterdir()) == left


@pytest.mark.parametrize(("kind", "file"), [("directory", "/__1_0.distcp"), ("file", "")])
def test_a_file_without_room_is_named_and_the_checkpoint_before_it_stays(
    runs: tuple[Path, list[dict[str, str]]], kind: str, file: str
) -> None:
    folder, everyone = runs
    name = f"full {kind}.ckpt"
    said = [seen[name] for seen in everyone[2:]]
    if kind == "directory":
        said.reverse()
    assert said[0] == f"OSError: [Errno 27] File too large: '{folder}/.{name}.part{file}'"
    assert said[1].startswith(f"PeerError: rank {1 if file else 0} of 2 failed while writing")
    assert said[1].endswith(said[0])
    assert {seen[f"left in {name}"] for seen in everyone[2:]} == {"1.0"}


def test_a_file_system_without_locks_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any) -> None:
        raise OSError(errno.ENOLCK, "no locks")

    monkeypatch.setattr(fcntl, "flock", refuse)
    with pytest.warns(UserWarning, match=r"last\.ckpt has no locks"):
        save_file({"state_dict": {"weight": torch.ones(2)}}, tmp_path / "last.ckpt")
    assert saved(tmp_path / "last.ckpt") == 1
    assert [path.name for path in tmp_path.iterdir()] == ["last.ckpt"]


def test_what_is_not_there_is_said() -> None:
    with pytest.raises(MissingFileError, match=r"nowhere.ckpt does not exist"):
        open_checkpoint(Path("/nowhere.ckpt"))


def test_a_directory_of_another_strategy_is_refused(tmp_path: Path) -> None:
    torch.save({"epoch": 1}, tmp_path / META)
    with pytest.raises(DamagedFileError, match="written by another strategy"):
        open_checkpoint(tmp_path)


def test_jobs_run_in_order_and_not_after_a_failure() -> None:
    done: list[int] = []
    background = Background()
    background.submit(lambda: done.append(1))
    background.submit(lambda: [].pop())
    background.submit(lambda: done.append(2))
    with pytest.raises(IndexError):
        background.wait()
    background.submit(lambda: done.append(3))
    background.close()
    assert done == [1, 3]
