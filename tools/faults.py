"""What happens to a job when one of its ranks fails: ``make faults`` tries it, and writes ``docs/faults-measured.md``.

A *case* is a fault, the place of a run where it happens, and the rank that it happens to. Each is a job of its own on
two processes, started as a user starts one (Lightning starts the second process), with a tiny model. Measured is how
long it takes from the fault until no process is left, what was said, and the exit code that the shell sees.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from datetime import timedelta
from importlib.metadata import version
from pathlib import Path
from typing import Any
from unittest import mock

import psutil

ROOT = Path(__file__).parent.parent
PAGE = ROOT / "docs" / "faults-measured.md"

TIMEOUT = 30.0
"""Of the process group, in seconds."""
AT_ONCE = 3
"""Jobs."""
PATIENCE = 120.0
"""Seconds after which what has not ended counts as hanging, and is ended."""


def fail() -> None:
    """Raise an error."""
    raise ValueError("planted")


def signal_all() -> None:
    """Ask every process of the job to end, as a scheduler does."""
    for process in in_session(os.getsid(0)):
        process.send_signal(signal.SIGTERM)


FAULTS: dict[str, Callable[[], None]] = {
    "raise": fail,
    "sys.exit(0)": lambda: sys.exit(0),
    "os._exit(0)": lambda: os._exit(0),
    "kill -9": lambda: os.kill(os.getpid(), signal.SIGKILL),
    "SIGTERM": lambda: os.kill(os.getpid(), signal.SIGTERM),
    "SIGTERM to all": signal_all,
    "SIGSTOP": lambda: os.kill(os.getpid(), signal.SIGSTOP),
}
"""What a rank may do, by name."""

PLACES = ("planning", "loading", "first step", "saving", "validation", "teardown")
"""Where in a run, in its order, every fault is tried."""


@dataclass(frozen=True)
class Case:
    """A fault, where, and on which rank."""

    fault: str
    place: str
    rank: int

    def __str__(self) -> str:
        return f"{self.fault}, {self.place}, {self.rank}"


CASES = [
    *(Case(fault, place, 1) for place in PLACES for fault in ("raise", "sys.exit(0)", "kill -9", "SIGTERM", "SIGSTOP")),
    *(Case(fault, "first step", 0) for fault in ("raise", "kill -9", "SIGTERM", "SIGTERM to all", "SIGSTOP")),
    *(Case(fault, "planning", 0) for fault in ("sys.exit(0)", "os._exit(0)")),
    Case("os._exit(0)", "planning", 1),
    Case("raise", "on_train_end", 1),
]
"""All that the page has."""


@dataclass(frozen=True)
class Outcome:
    """What became of a job.

    Attributes:
        seconds: from the fault until the last process ended.
        code: the exit code that a shell sees: 128 + the signal for a process that a signal ended.
        said: everything on standard output and error.
        left: processes that did not end, and were killed.
        happened: whether the fault was reached at all.
    """

    seconds: float
    code: int
    said: str
    left: int
    happened: bool

    @property
    def message(self) -> str:
        """The line that says why, with what differs from run to run replaced; empty if there is none."""
        found = re.findall(r"lightning_autotp: rank \d+ ends, because (.*?)(?:\. To go on, .*)?\n", self.said)
        found = found or re.findall(r"lightning_autotp: ((?:a )?process .*)", self.said)
        found = found or re.findall(r"(?m)^(?:\[rank\d+\]: )?((?!PeerError)[\w.]*(?:Error|Exception): .*)$", self.said)
        text = re.sub(r"process \d+ on [^)\s]+\)", "process … on …)", found[0]) if found else ""
        return text if len(text) < 160 else f"{text[:160]}..."


# --- the job ---


def job(fault: str, place: str, rank: int, folder: Path) -> None:
    """Train a tiny model on two processes, with a fault planted."""
    import lightning as L
    import torch
    from lightning.fabric.strategies.launchers.subprocess_script import _ChildProcessObserver
    from lightning.pytorch.callbacks import ModelCheckpoint
    from torch.utils.data import DataLoader
    from transformers import AutoModelForCausalLM, LlamaConfig

    from lightning_autotp import AutoTPStrategy

    own = int(os.environ.get("LOCAL_RANK", "0"))
    happened = folder / "happened"
    config = LlamaConfig(
        vocab_size=67,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        tie_word_embeddings=False,
    )

    def reach(here: str) -> None:
        if here == place and own == rank and not happened.exists():
            happened.write_text(str(time.time()))
            FAULTS[fault]()

    class Task(L.LightningModule):
        def configure_model(self) -> None:
            self.model = AutoModelForCausalLM.from_config(config)

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            loss = self.model(**batch).loss
            reach("first step")  # what is before the model's call runs once in a process of its own, ahead of time
            time.sleep(0.02)
            return loss

        def validation_step(self, batch: Any, batch_idx: int) -> None:
            reach("validation")
            time.sleep(0.02)
            self.model(**batch)

        def on_train_end(self) -> None:
            reach("on_train_end")

        def teardown(self, stage: str) -> None:
            reach("teardown")

        def configure_optimizers(self) -> Any:
            return torch.optim.AdamW(self.parameters(), lr=1e-3)

    blocks = torch.randint(0, 67, (64, 12), generator=torch.Generator().manual_seed(0))
    data: Any = [{"input_ids": block, "labels": block} for block in blocks]
    # A job that is to be interrupted must not be over by then.
    steps = 5 if place in ("on_train_end", "teardown") else 1_000_000
    trainer = L.Trainer(
        accelerator="cpu",
        devices=2,
        strategy=AutoTPStrategy(save_distributed_checkpoint=True, timeout=timedelta(seconds=TIMEOUT), plan_cache=False),
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        num_sanity_val_steps=0,
        val_check_interval=4,
        limit_val_batches=1_000_000 if place == "validation" else 2,
        max_steps=steps,
        max_epochs=-1,
        callbacks=[ModelCheckpoint(folder / "kept", every_n_train_steps=3)],
    )
    validation: Any = data * 100_000 if place == "validation" else data
    with (
        # Seconds between two looks, not 5. It would kill rank 0 before that one has said why it ends.
        mock.patch.object(_ChildProcessObserver.__init__, "__defaults__", (0.1,)),
        first(reach, "pipeline.first_makes", "planning"),
        first(reach, "pipeline.load_parameters", "loading"),
        first(reach, "checkpoints.files.write_tensors", "saving"),
    ):
        trainer.fit(Task(), DataLoader(data, batch_size=4), DataLoader(validation, batch_size=4))
    print("FINISHED", flush=True)


def first(reach: Callable[[str], None], function: str, place: str) -> Any:
    """Let a function of the package, where it is imported, come to a place before it does its work."""
    target = f"lightning_autotp.{function}"
    module, _, name = target.rpartition(".")
    work = getattr(__import__(module, fromlist=[name]), name)

    def planted(*args: Any, **kwargs: Any) -> Any:
        reach(place)
        return work(*args, **kwargs)

    return mock.patch(target, planted)


# --- watching it ---


def in_session(session: int) -> Iterator[psutil.Process]:
    """The processes of a session that have not ended."""
    for process in psutil.process_iter():
        try:
            if os.getsid(process.pid) == session and process.status() != psutil.STATUS_ZOMBIE:
                yield process
        except (ProcessLookupError, psutil.NoSuchProcess):
            continue


def attempt(case: Case) -> Outcome:
    """Run the job of a case, to its end or until patience is over."""
    environment = {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "TRANSFORMERS_VERBOSITY": "error",
        "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]),
    }
    with tempfile.TemporaryDirectory() as name, open(Path(name) / "said", "w+") as said:
        folder = Path(name)
        command = [sys.executable, __file__, "job", case.fault, case.place, str(case.rank), name]
        process = subprocess.Popen(command, env=environment, stdout=said, stderr=said, start_new_session=True)
        deadline = time.monotonic() + PATIENCE
        try:
            while process.poll() is None or any(in_session(process.pid)):
                if time.monotonic() > deadline:
                    break
                time.sleep(0.1)
            ended = time.time()
            left = list(in_session(process.pid))
        finally:
            for other in list(in_session(process.pid)):
                other.kill()
            process.wait(30)
        happened = folder / "happened"
        began = float(happened.read_text()) if happened.exists() else ended
        said.seek(0)
        code = process.returncode if process.returncode >= 0 else 128 - process.returncode
        return Outcome(ended - began, code, said.read(), len(left), happened.exists())


def attempt_until_reached(case: Case) -> Outcome:
    """Run it again where its processes did not come together in time, as happens on a busy machine."""
    for _ in range(3):
        outcome = attempt(case)
        if outcome.happened:
            break
    return outcome


# --- the page ---


def to_markdown(outcomes: dict[Case, Outcome]) -> str:
    """The page."""
    lines = [
        "# Faults, measured",
        "",
        f"Made by `make faults` with torch {version('torch')}, lightning {version('lightning')}; do not edit.",
        "",
        "Jobs of two processes, each with one fault. Rank 0 is the process that the user starts, and Lightning starts"
        f" the other. The strategy's `timeout` is {TIMEOUT:.0f} s here, and gloo connects the ranks. The seconds are"
        f" from the fault until no process of the job is left ({AT_ONCE} jobs ran at once). The exit code is what the"
        " shell sees: 128 + the signal for a process that a signal ended. Left behind are processes that had to be"
        " killed by hand. What to do about each is in [When a rank fails](faults.md).",
        "",
        "| fault | where | rank | seconds | exit code | left behind | message |",
        "| --- | --- | ---: | ---: | ---: | ---: | --- |",
    ]
    for case, outcome in outcomes.items():
        message = outcome.message.replace("|", "\\|")
        lines.append(
            f"| {case.fault} | {case.place} | {case.rank} | {outcome.seconds:.1f} | {outcome.code} | {outcome.left} |"
            f" {message} |"
        )
    return "\n".join([*lines, ""])


def main() -> None:
    """Try all cases, or those whose name (``"kill -9, saving, 1"``) has one of the words given."""
    words = sys.argv[1:]
    chosen = [case for case in CASES if not words or any(word in str(case) for word in words)]
    outcomes: dict[Case, Outcome] = {}
    missed = []
    with ThreadPoolExecutor(AT_ONCE) as threads:
        for case, outcome in zip(chosen, threads.map(attempt_until_reached, chosen), strict=True):
            if outcome.happened:
                outcomes[case] = outcome
            else:
                missed.append(str(case))
            if not words:
                PAGE.write_text(to_markdown(outcomes))
            print(
                f"{case}: {outcome.seconds:.1f} s, exit code {outcome.code}, {outcome.left} left"
                f"{'' if outcome.happened else ', NOT REACHED'}: {outcome.message}",
                flush=True,
            )
    if missed:
        sys.exit(f"no rank came to the place of {'; '.join(missed)}")


if __name__ == "__main__":
    if sys.argv[1:2] == ["job"]:
        job(sys.argv[2], sys.argv[3], int(sys.argv[4]), Path(sys.argv[5]))
    else:
        main()
