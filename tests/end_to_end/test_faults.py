"""Ranks that die, fail or are interrupted: the job ends soon, says who it was, and goes on from its last checkpoint."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import faults
import lightning as L
import psutil
import pytest
import torch
import torch.distributed as dist
from distributed import PATIENCE, SCRIPT_ENVIRONMENT, run_python
from failures import check_one_error
from lightning.pytorch.callbacks import OnExceptionCheckpoint
from lightning.pytorch.utilities.exceptions import SIGTERMException
from trainer_ranks import run_trainer_ranks
from training import Task, loader, trainer

from lightning_autotp import AutoTPStrategy
from lightning_autotp.guard.checked import UnsoundUse
from lightning_autotp.private.lightning_private import DeferredSignals
from lightning_autotp.ranks import peers, started
from lightning_autotp.ranks.agreement import MissingRank, PeerError
from lightning_autotp.ranks.peers import Peer, PeerWatch

ENDS_WITHIN = 300.0
"""Seconds; nearly all of them are for a machine that does other things too. Whoever waits for the process group waits
half an hour."""

SCRIPT = """
import json, os, sys, time
import lightning as L
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from training import BLOCKS, Task
from lightning_autotp import AutoTPStrategy
from lightning_autotp.private.lightning_private import DeferredSignals

folder, how, devices, steps = sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4])

class Watched(Task):
    def training_step(self, batch, batch_idx):
        step, rank = self.trainer.global_step, self.trainer.global_rank
        if how == "fails" and step == 3 and rank == 1:
            raise ValueError("planted on rank 1")
        if how == "hangs" and step == 3 and rank == 1:
            time.sleep(3600)
        rows = BLOCKS[[(3 * step + row) % len(BLOCKS) for row in range(4)]]
        loss = super().training_step({"input_ids": rows, "labels": rows}, batch_idx)
        if rank == 0:
            with open(f"{folder}/losses", "a") as file:
                file.write(json.dumps([step, loss.item()]) + "\\n")
        with open(f"{folder}/pid-{rank}", "w") as file:
            file.write(str(os.getpid()))
        time.sleep(0.02)
        return loss

L.seed_everything(3, verbose=False)
strategy = AutoTPStrategy(save_distributed_checkpoint=True, save_async=True) if devices > 1 else "auto"
trainer = L.Trainer(
    accelerator="cpu", devices=devices, strategy=strategy, logger=False, enable_progress_bar=False,
    enable_model_summary=False, max_steps=steps, max_epochs=-1,
    callbacks=[ModelCheckpoint(f"{folder}/kept", "{step}", every_n_train_steps=3, save_top_k=1, save_last=True)],
)
trainer.fit(Watched("config"), torch.utils.data.DataLoader(range(1000)), ckpt_path="last")
print("FINISHED" if trainer.global_step == steps else "STOPPED", flush=True)
"""


class Job:
    """A script on several ranks, started as a user would, in a session of its own."""

    def __init__(self, folder: Path, how: str = "trains", steps: int = 240) -> None:
        script = folder / "script.py"
        script.write_text(SCRIPT)
        for old in folder.glob("pid-*"):
            old.unlink()
        self.folder = folder
        self.errors = open(folder / "stderr", "w+")  # noqa: SIM115
        self.process = subprocess.Popen(
            [sys.executable, str(script), str(folder), how, "2", str(steps)],
            env={**os.environ, **SCRIPT_ENVIRONMENT}, stdout=self.errors, stderr=self.errors, start_new_session=True,
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # what runs in the background ignores it
        )  # fmt: skip

    def wait_for_training(self, ranks: int = 2) -> list[int]:
        """The ranks' process ids, once all are in the middle of it."""
        deadline = time.monotonic() + PATIENCE
        while time.monotonic() < deadline:
            files = [self.folder / f"pid-{rank}" for rank in range(ranks)]
            if all(file.exists() and file.read_text() for file in files):
                return [int(file.read_text()) for file in files]
            if self.process.poll() is not None:
                break
            time.sleep(0.05)
        raise AssertionError(f"the ranks did not start training:\n{self.said()}")

    def wait_for_steps(self, count: int) -> None:
        """Return after so many steps more."""
        wanted = len(losses(self.folder)) + count
        deadline = time.monotonic() + PATIENCE
        while len(losses(self.folder)) < wanted and self.process.poll() is None:
            assert time.monotonic() < deadline, self.said()
            time.sleep(0.01)

    def end(self, pids: list[int]) -> str:
        """Wait until no process is left; what they said."""
        deadline = time.monotonic() + ENDS_WITHIN
        try:
            while time.monotonic() < deadline:
                self.process.poll()
                if not any(running(pid) for pid in (self.process.pid, *pids)):
                    return self.said()
                time.sleep(0.1)
            raise AssertionError(f"processes are left after {ENDS_WITHIN} s:\n{self.said()}")
        finally:
            for pid in (self.process.pid, *pids):
                if running(pid):
                    os.kill(pid, signal.SIGKILL)
            self.process.wait(PATIENCE)

    def said(self) -> str:
        self.errors.flush()
        return (self.folder / "stderr").read_text()


def running(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def losses(folder: Path) -> list[tuple[int, float]]:
    """The steps and losses that were written; of a line that is being written nothing yet."""
    lines = (folder / "losses").read_text().splitlines(keepends=True)
    return [tuple(json.loads(line)) for line in lines if line.endswith("\n")]


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.nightly
@pytest.mark.parametrize("kills", [1, 20])
def test_a_run_killed_many_times_has_the_losses_of_one_that_was_not(tmp_path: Path, kills: int) -> None:
    draw = random.Random(0)
    steps = 12 * kills + 80  # so many that none of those that are killed comes to the end
    killed = tmp_path / "killed"
    killed.mkdir()
    for _ in range(kills):
        job = Job(killed, steps=steps)
        pids = job.wait_for_training()
        job.wait_for_steps(draw.randrange(12))
        time.sleep(draw.uniform(0, 0.05))
        rank = draw.randrange(2)
        os.kill(pids[rank], signal.SIGKILL)
        said = job.end(pids)
        assert f"rank {rank} (process {pids[rank]} on " in said, said
        assert "has died" in said or "is gone" in said
        check_one_error(said, rank)
        assert "FINISHED" not in said
    job = Job(killed, steps=steps)
    assert job.process.wait(PATIENCE) == 0, job.said()
    assert "FINISHED" in job.said()

    alone = tmp_path / "alone"
    alone.mkdir()
    done = run_python(str(killed / "script.py"), str(alone), "trains", "1", str(steps))
    assert done.returncode == 0, done.stderr
    wanted = dict(losses(alone))
    assert sorted(wanted) == list(range(steps))
    found = losses(killed)
    assert {step for step, _ in found} == set(wanted)
    assert len(found) > steps  # some steps were taken again
    for step, loss in found:
        assert loss == pytest.approx(wanted[step], rel=1e-5)


@pytest.mark.nightly  # the daily fault below ends a job, too
@pytest.mark.parametrize("how", ["fails", "interrupted"])
def test_nobody_waits_for_a_rank_that_has_gone(tmp_path: Path, how: str) -> None:
    job = Job(tmp_path, how, steps=100_000)
    pids = job.wait_for_training()
    if how == "interrupted":
        os.killpg(job.process.pid, signal.SIGINT)
    said = job.end(pids)
    assert "FINISHED" not in said
    if how == "interrupted":  # Lightning says so, and there is nothing to add
        assert "Detected KeyboardInterrupt" in said
        assert not any(word in said for word in ("failed", "ended with exit code", "Traceback"))
    if how == "fails":
        assert job.process.returncode != 0
        assert f"rank 1 (process {pids[1]} on " in said
        check_one_error(said, 1, "failed: ValueError: planted on rank 1")


# --- faults, as users meet them ---

IN_CI = [
    ("raise, saving, 1", 1, "rank 1 (process … on …) failed: ValueError: planted"),
]
NIGHTLY = [
    ("SIGTERM, first step, 1", 128 + signal.SIGTERM, "a process of the job got SIGTERM, and all of them end here"),
    ("raise, on_train_end, 1", 1, "rank 1 (process … on …) failed: ValueError: planted"),
    ("kill -9, planning, 1", 1, "rank 1 (process … on …) has died"),
    ("sys.exit(0), planning, 0", 1, "rank 0 (process … on …) failed: SystemExit: 0"),
    ("kill -9, teardown, 1", 1, "rank 1 (process … on …) has died"),
    ("kill -9, first step, 0", 128 + signal.SIGKILL, "rank 0 (process … on …), which keeps the job together, is gone"),
    (
        "SIGTERM to all, first step, 0",
        128 + signal.SIGTERM,
        "a process of the job got SIGTERM, and all of them end here",
    ),
    ("SIGSTOP, first step, 0", 128 + signal.SIGKILL, "rank 0 (process … on …) is stopped"),
    ("SIGSTOP, first step, 1", 1, "rank 1 (process … on …) is stopped"),
]


@pytest.mark.parametrize(
    ("name", "code", "message"), [*IN_CI, *(pytest.param(*one, marks=pytest.mark.nightly) for one in NIGHTLY)]
)
def test_a_fault_ends_the_job_and_its_exit_code_says_so(
    name: str, code: int, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(faults, "PATIENCE", ENDS_WITHIN)
    [case] = [case for case in faults.CASES if str(case) == name]
    outcome = faults.attempt(case)
    assert outcome.happened, outcome.said
    assert outcome.left == 0, outcome.said
    assert outcome.message.startswith(message), outcome.said
    assert outcome.code == code, outcome.said
    if case.fault in ("raise", "kill -9") or (case.fault, case.rank) == ("SIGSTOP", 1):
        check_one_error(outcome.said, case.rank, "ValueError: planted" if case.fault == "raise" else "")
    assert ("Timed out" in outcome.said) <= (case.fault == "SIGSTOP"), outcome.said  # else nobody waited for so long


def end_on_signal(folder: str, where: str) -> dict[str, Any]:
    """Train, validate or predict until rank 1 gets SIGTERM, with a callback that saves then."""

    class Interrupted(Task):
        def interrupted(self, batch_idx: int, here: str) -> None:
            if (here, batch_idx, self.trainer.global_rank) == (where, 2, 1):
                os.kill(os.getpid(), signal.SIGTERM)

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            self.interrupted(batch_idx, "fit")
            return super().training_step(batch, batch_idx)

        def predict_step(self, batch: Any, batch_idx: int) -> Any:
            self.interrupted(batch_idx, "predict")
            return self.model(**batch).loss

    callbacks = [OnExceptionCheckpoint(folder)]
    fitting = trainer(AutoTPStrategy(), 2, max_steps=1_000, callbacks=callbacks, enable_checkpointing=True)
    task = Interrupted("config")
    before = signal.getsignal(signal.SIGTERM)
    with pytest.raises(SystemExit) as raised:
        getattr(fitting, where)(task, loader())
    assert signal.getsignal(signal.SIGTERM) is before
    return {"code": raised.value.code, "received": fitting.received_sigterm, "step": fitting.global_step}


@pytest.mark.parametrize("where", ["fit", pytest.param("predict", marks=pytest.mark.nightly)])
def test_a_rank_that_gets_sigterm_ends_all_at_the_same_batch(tmp_path: Path, where: str) -> None:
    found = run_trainer_ranks(end_on_signal, 2, str(tmp_path), where)
    assert found == 2 * [{"code": 143, "received": True, "step": 3 if where == "fit" else 0}]
    if where == "fit":  # callbacks were called on all ranks, and could save
        saved = torch.load(tmp_path / "on_exception.ckpt", weights_only=False)
        assert saved["global_step"] == 3
        assert saved["state_dict"]["model.lm_head.weight"].shape == (67, 32)


# --- the process that starts the others ---


@pytest.mark.parametrize(
    ("others", "code"),
    [
        (["pass"], None),
        (["pass", "import sys; sys.exit(3)"], 3),
        (["import os, signal; os.kill(os.getpid(), signal.SIGKILL)"], 1),
        (["import os, signal; os.kill(os.getpid(), signal.SIGSTOP)"], 1),
    ],
)
def test_the_exit_code_says_if_another_failed(
    others: list[str], code: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    codes: list[int] = []
    monkeypatch.setattr(started.os, "_exit", codes.append)
    processes = [subprocess.Popen([sys.executable, "-c", other]) for other in others]
    try:
        started.wait_for(processes, 1.0)
        assert [process.poll() for process in processes].count(None) == 0
    finally:
        for process in processes:
            process.kill()
            process.wait()
    assert codes == ([] if code is None else [code])


def test_a_signal_that_comes_during_an_exchange_is_for_the_next_one() -> None:
    asked: list[list[bool]] = []

    def alone(answers: list[bool], everyone: bool) -> list[bool]:
        asked.append(answers)
        if len(asked) == 1:
            signals.note_end(signal.SIGTERM, None)
        return answers

    fitting = L.Trainer(accelerator="cpu", devices=1, logger=False, enable_checkpointing=False)
    signals = DeferredSignals(fitting, alone)
    signals.between_batches()
    with pytest.raises(SIGTERMException):
        signals.between_batches()
    assert asked == [[False, False], [True, False]]
    assert signals.agreed is not None


ENDING = """
import os, sys
import torch
import torch.distributed as dist
from lightning_autotp.ranks.started import let_threads_finish_at_end

for number in range(4):  # one after the other, each with an end of its own
    if os.fork() == 0:
        break
    _, status = os.wait()
    if status != 0:
        sys.exit(f"process {number} ended with {os.waitstatus_to_exitcode(status)}")
else:
    sys.exit(0)
let_threads_finish_at_end()
dist.init_process_group("gloo", init_method=f"file://{sys.argv[1]} {number}", rank=0, world_size=1)
tensors = [torch.ones(1) for _ in range(20_000)]
dist.all_reduce_coalesced(tensors)  # a worker frees them, which takes long, when this process ends already
del tensors
"""


def test_a_process_that_ends_does_not_abort_its_threads(tmp_path: Path) -> None:
    command = [sys.executable, "-c", ENDING, str(tmp_path / "store")]
    ended = subprocess.run(command, env={**os.environ, **SCRIPT_ENVIRONMENT}, capture_output=True, check=False)
    assert ended.returncode == 0, ended.stderr


def test_an_error_of_its_own_ends_the_others_soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(started.os, "_exit", lambda _: pytest.fail("its own exit code stands"))
    monkeypatch.setattr(started, "GRACE", 0.3)
    monkeypatch.setattr(sys, "last_value", ValueError("uncaught"), raising=False)
    process = subprocess.Popen([sys.executable, "-c", "import sys; sys.stdin.read()"], stdin=subprocess.PIPE)
    try:
        started.wait_for([process], PATIENCE)
        assert process.poll() == -signal.SIGKILL
    finally:
        process.kill()
        process.communicate()


# --- the watch itself ---


@contextmanager
def watch(
    others: list[Peer], monkeypatch: pytest.MonkeyPatch, allowed: float = PATIENCE, store: dist.Store | None = None
) -> Iterator[tuple[PeerWatch, Any, threading.Event]]:
    """Rank 0 with other peers; the event is set when the process would be ended."""
    ended = threading.Event()
    monkeypatch.setattr(peers, "INTERVAL", 0.05)
    monkeypatch.setattr(peers, "GRACE", 0.3)
    monkeypatch.setattr(peers, "PRINTING", 0.2)
    monkeypatch.setattr(PeerWatch, "latest", None)
    monkeypatch.setattr(peers.os, "_exit", lambda _: ended.set())
    store = store or dist.HashStore()
    found = PeerWatch([Peer.this_process(0), *others], 0, store, "test", allowed, lambda: None)
    try:
        yield found, dist.PrefixStore("autotp/test", store), ended
    finally:
        found.close()


def wait_until(condition: Callable[[], bool]) -> None:
    until = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < until
        time.sleep(0.01)


Start = Callable[..., tuple[Peer, subprocess.Popen[bytes]]]


@pytest.fixture
def other() -> Iterator[Start]:
    """Starts other peers, which live until the test ends."""
    started: list[subprocess.Popen[bytes]] = []

    def start(rank: int, machine: str | None = None) -> tuple[Peer, subprocess.Popen[bytes]]:
        process = subprocess.Popen([sys.executable, "-c", "import sys; sys.stdin.read()"], stdin=subprocess.PIPE)
        started.append(process)
        own = Peer.this_process(0)
        created = psutil.Process(process.pid).create_time()
        return Peer(rank, machine or own.machine, own.host, process.pid, created), process

    yield start
    for process in started:
        process.kill()
        process.communicate()


def test_a_dead_neighbour_is_named_to_everyone(
    other: Start, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    peer, process = other(1)
    with watch([peer], monkeypatch) as (_, store, ended):
        assert not ended.wait(0.5)
        process.kill()  # a zombie until somebody waits for it
        assert ended.wait(PATIENCE)
        assert store.get("failed").decode() == f"{peer} has died. {peers.GO_ON}"
    assert f"lightning_autotp: rank 0 ends, because {peer} has died. To go on, " in capsys.readouterr().err


def test_one_that_has_finished_is_not_missed(other: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    peer, process = other(1)
    with watch([peer], monkeypatch) as (_, store, ended):
        store.set("done/1", "")
        process.kill()
        process.wait()
        assert not ended.wait(1)


def test_a_failure_elsewhere_ends_this_process_after_some_time(other: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    peer, _ = other(1)
    with watch([peer], monkeypatch) as (_, store, ended):
        store.set("failed", "rank 1 failed: ValueError: no")
        assert ended.wait(PATIENCE)


def test_the_first_to_fail_is_the_one_that_is_named(
    other: Start, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    peer, _ = other(1)
    reported, look = threading.Event(), PeerWatch._found

    def look_afterwards(self: PeerWatch, **how: Any) -> str | None:
        if threading.current_thread().name != "_report":
            reported.wait(PATIENCE)
        return look(self, **how)

    monkeypatch.setattr(PeerWatch, "_found", look_afterwards)
    with watch([peer], monkeypatch) as (found, store, ended):
        store.set("failed", "rank 1 failed: ValueError: no")
        found.report(RuntimeError("Connection closed by peer"))
        reported.set()
        assert store.get("failed").decode() == "rank 1 failed: ValueError: no"
        assert not ended.wait(1)  # it is on its way out by itself
    assert "rank 1 failed: ValueError: no" in capsys.readouterr().err


LOST = "[/a/gloo/transport/tcp/pair.cc:553] Connection closed by peer [127.0.0.1]:944. GLHF!"
ERRORS = [  # and whether they are only what another rank's "ValueError: planted" led to
    (RuntimeError(LOST), True),
    (dist.DistNetworkError("failed to recv, got 0 bytes"), True),
    (MissingRank("the model is called on rank 0, but not on 1 of the ranks [0, 1]"), True),
    (PeerError("rank 1 of 2 failed while saving: ValueError: planted"), True),
    (ValueError("planted\nin two lines"), True),
    (ValueError("another"), False),
    (TypeError("planted"), False),
    (RuntimeError(f"what my code says of {LOST}"), False),
    (
        RuntimeError("[enforce fail at /a/gloo/transport/tcp/pair.cc:456] op.preamble.length <= op.nbytes. 8 vs 4"),
        False,
    ),
]


@pytest.mark.parametrize("is_printed", [True, False])
def test_what_another_failure_led_to_is_told_from_what_did_not(
    is_printed: bool, other: Start, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    peer, _ = other(1)
    monkeypatch.setattr(PeerWatch, "_watch", lambda _: None)  # nobody else looks
    with watch([peer], monkeypatch) as (found, store, _):
        if is_printed:
            store.set("printed", "")
        store.set("failed", f"{peer} failed: ValueError: planted")
        for error, follows in ERRORS:
            # One of the same words has no lines of its own only where the first has them.
            wanted = follows and (is_printed or not isinstance(error, ValueError))
            assert found.explains(error) is wanted, error
    printed = capsys.readouterr().err
    assert printed == f"\nlightning_autotp: rank 0 ends, because {peer} failed: ValueError: planted\n"


@pytest.mark.parametrize("error", [error for error, _ in ERRORS if not isinstance(error, PeerError)])
def test_an_error_without_another_failure_is_its_own_cause(
    error: Exception, other: Start, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    peer, _ = other(1)
    with watch([peer], monkeypatch) as (found, store, _):
        assert not found.explains(error)
        assert store.get("failed").decode().startswith(f"{found._own} failed: {type(error).__name__}: ")
        assert not store.check(["printed"])
        found.note_printed()
        assert store.check(["printed"])
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize(
    ("error", "waits"), [(RuntimeError(LOST), True), (MissingRank("no"), True), (UnsoundUse("no"), False)]
)
def test_only_after_what_a_collective_may_have_raised_others_are_waited_for(
    error: Exception, waits: bool, other: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They may be about to die, and that is the cause then."""
    peer, process = other(1)
    monkeypatch.setattr(PeerWatch, "_watch", lambda _: None)  # nobody else looks

    def dies_meanwhile(_: float) -> None:
        process.kill()
        process.wait()

    with watch([peer], monkeypatch) as (found, store, _), mock.patch.object(peers.time, "sleep", dies_meanwhile):
        found.report(error)
        assert store.get("failed").decode().startswith(f"{peer if waits else found._own} ")


def test_of_a_process_that_is_gone_nobody_asks_for_its_store(
    other: Start, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    keeper, process = other(0)
    process.kill()
    process.wait()
    monkeypatch.setattr(PeerWatch, "latest", None)
    monkeypatch.setattr(PeerWatch, "_watch", lambda _: None)
    found = PeerWatch([keeper, Peer.this_process(1)], 1, dist.HashStore(), "test", PATIENCE, lambda: None)
    with mock.patch.object(found, "_store") as store:
        assert found.explains(RuntimeError(LOST))
        found.close()
    assert store.method_calls == []
    assert f"rank 1 ends, because {keeper}, which keeps the job together, is gone" in capsys.readouterr().err


def test_a_stopped_neighbour_is_named_and_ended(other: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    peer, process = other(1)
    with watch([peer], monkeypatch, allowed=2.0) as (found, store, ended):
        process.send_signal(signal.SIGSTOP)
        wait_until(lambda: found._stopped[1] > 0)
        process.send_signal(signal.SIGCONT)  # it goes on
        wait_until(lambda: found._stopped[1] == 0)
        assert not ended.is_set()
        process.send_signal(signal.SIGSTOP)
        assert ended.wait(PATIENCE)
        assert store.get("failed").decode().startswith(f"{peer} is stopped (by SIGSTOP")
        assert process.wait(PATIENCE) == -signal.SIGKILL


def test_a_store_that_does_not_answer_ends_this_process(
    other: Start, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    peer, _ = other(1)
    over = threading.Event()
    monkeypatch.setattr(PeerWatch, "_look", lambda *_: over.wait(PATIENCE))
    with watch([peer], monkeypatch, allowed=1.0) as (_, _, ended):
        assert ended.wait(PATIENCE)
    over.set()
    assert ", which keeps the job together, is gone or does not answer. To go on, " in capsys.readouterr().err


def test_a_machine_of_the_same_name_has_processes_of_its_own(other: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    peer, process = other(1, "a container")
    process.kill()
    process.wait()
    with watch([peer], monkeypatch) as (found, _, ended):
        assert found._neighbours == []
        assert not ended.wait(0.5)
    namespace = os.readlink("/proc/self/ns/pid")
    assert peers.this_machine().partition("/")[2] == namespace.strip("pid:[]")


def test_a_silent_machine_is_named(other: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    next_one, _ = other(1, "next")
    further, _ = other(2, "further")
    clock = [0.0]
    monkeypatch.setattr(peers, "time", SimpleNamespace(monotonic=lambda: clock[0], sleep=time.sleep))
    with watch([next_one, further], monkeypatch) as (found, store, ended):

        def hear(machine: str) -> None:
            for beat in range(3):  # longer than a silence, together
                store.set(f"beat/{machine}", str(beat))
                wait_until(lambda: found._heard.get(machine) == (str(beat).encode(), clock[0]))  # noqa: B023
                clock[0] += 0.9 * peers.SILENCE
                assert not ended.wait(0.1)

        hear("next")
        store.set("done/1", "")  # the other one has not been heard of yet
        hear("further")
        clock[0] += 0.2 * peers.SILENCE
        assert ended.wait(PATIENCE)
        said = store.get("failed").decode()
        assert said == f"{further} and its machine have not been heard of for 60 s. {peers.GO_ON}"


@pytest.mark.parametrize("machines", [2, 50])
def test_what_a_rank_asks_does_not_grow_with_the_machines(machines: int, monkeypatch: pytest.MonkeyPatch) -> None:
    own = Peer.this_process(0)
    others = [replace(own, rank=rank, machine=f"machine {rank}") for rank in range(1, machines)]
    monkeypatch.setattr(PeerWatch, "_watch", lambda _: None)  # nobody else asks
    with watch(others, monkeypatch) as (found, store, _):
        asked = mock.Mock(wraps=store)
        with mock.patch.object(found, "_store", asked):
            for beat in range(3):
                store.set("beat/machine 1", str(beat))
                assert found._look(beat) is None
    # It says that it is there, and asks: has one failed? is the next one done, has it said something, and what?
    assert len(asked.method_calls) == 3 * 5
