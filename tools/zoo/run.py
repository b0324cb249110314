"""The zoo over processes: long-lived ranks that go through the architectures, restarted when one leaves them in doubt.

One rank failing alone, or no rank answering in time, may leave its peers inside a collective; such ranks are ended and
new ones started, so that no architecture spoils the next one's verdict.
"""

from __future__ import annotations

import multiprocessing
import os
import tempfile
import time
import warnings
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from zoo import through_the_host
from zoo.parity import plan_one, run_one
from zoo.verdict import Verdict

_GRACE = 10.0
"""Seconds that the other ranks get once one has failed."""


class Ranks:
    """Gloo processes on this machine that compare one architecture after the other; a context manager.

    Args:
        ranks: number of tensor-parallel ranks.
        limit: seconds that one architecture may take.
        plan_only: only plan, in one process, and run nothing.
        sequence_parallel: shard the tokens between tensor-parallel regions.
        device: of the models and batches; ranks of one GPU send through the host.
    """

    def __init__(
        self,
        ranks: int,
        limit: float = 120.0,
        plan_only: bool = False,
        sequence_parallel: bool = False,
        device: str = "cpu",
    ) -> None:
        self.ranks, self.limit, self.plan_only, self.sequence_parallel = ranks, limit, plan_only, sequence_parallel
        self.device = device
        self.size = 1 if plan_only else ranks
        self._processes: list[multiprocessing.process.BaseProcess] = []
        self._pipes: list[Connection] = []

    def __enter__(self) -> Ranks:
        return self

    def __exit__(self, *exception: object) -> None:
        self.end()

    def verdict(self, name: str, group: str) -> Verdict:
        """Run one architecture on all ranks."""
        if not self._processes:
            self._start()
        for pipe in self._pipes:
            pipe.send((name, group, self.sequence_parallel))
        answers: dict[int, dict[str, Any]] = {}
        deadline = time.monotonic() + self.limit
        while len(answers) < self.size:
            waiting = {self._pipes[rank]: rank for rank in range(self.size) if rank not in answers}
            ready = wait(list(waiting), timeout=max(0.0, deadline - time.monotonic()))
            if not ready:
                break
            for rank in [rank for pipe, rank in waiting.items() if pipe in ready]:
                try:
                    answers[rank] = self._pipes[rank].recv()
                except (EOFError, OSError):
                    answers[rank] = {"error": "the process ended", "ended": True}
                if "error" in answers[rank]:
                    deadline = min(deadline, time.monotonic() + _GRACE)
        verdict = self._judge(name, group, answers)
        if len(answers) < self.size or any("ended" in answer for answer in answers.values()):
            self.end()
        return verdict

    def _judge(self, name: str, group: str, answers: dict[int, dict[str, Any]]) -> Verdict:
        verdict: Verdict = answers.get(0, {}).get("verdict") or Verdict(name, group, self.ranks)
        failed = [answer["error"] for _, answer in sorted(answers.items()) if "error" in answer]
        first = next((text for text in failed if not text.startswith("PeerError")), failed[0] if failed else "")
        if verdict.outcome == "left out":
            return verdict
        if failed or len(answers) < self.size:
            silent = [rank for rank in range(self.size) if rank not in answers]
            verdict.outcome = "error"
            verdict.reason = first or f"no answer from ranks {silent} within {self.limit:.0f} s"
            return verdict
        if self.plan_only:
            return verdict
        worst = max(answers.values(), key=lambda answer: (bool(answer["wrong"]), answer["gradient_error"]))
        verdict.loss_error = max(answer["loss_error"] for answer in answers.values())
        verdict.buffer_error = max(answer["buffer_error"] for answer in answers.values())
        verdict.no_eval = worst["no_eval"]
        verdict.gradient_error, verdict.worst = worst["gradient_error"], worst["worst"]
        verdict.unused, verdict.precision = worst["unused"], worst["precision"]
        verdict.compared = worst["compared"]
        verdict.counted = worst["counted"]
        verdict.outcome, verdict.reason = ("wrong", worst["wrong"]) if worst["wrong"] else ("parity", "")
        return verdict

    def _start(self) -> None:
        # Forked from a process that has imported everything; what uses CUDA cannot be forked from.
        context: Any = multiprocessing.get_context("forkserver" if self.device == "cpu" else "spawn")
        context.set_forkserver_preload([__name__])
        self._directory = tempfile.TemporaryDirectory()
        store = Path(self._directory.name) / "store"
        with _environment(OMP_NUM_THREADS="1", TRANSFORMERS_VERBOSITY="error", TOKENIZERS_PARALLELISM="false"):
            for rank in range(self.size):
                here, there = context.Pipe()
                process = context.Process(
                    target=_rank, args=(there, rank, self.ranks, str(store), self.plan_only, self.device), daemon=True
                )
                process.start()
                there.close()
                self._processes.append(process)
                self._pipes.append(here)
        for pipe in self._pipes:  # importing everything is no architecture's time
            pipe.recv()

    def end(self) -> None:
        """End the processes; the next architecture starts new ones."""
        for pipe in self._pipes:
            pipe.close()
        for process in self._processes:
            process.kill()
            process.join()
        if self._processes:
            self._directory.cleanup()
        self._processes, self._pipes = [], []


def run(
    architectures: Iterable[tuple[str, str]],
    ranks: int,
    limit: float = 120.0,
    plan_only: bool = False,
    sequence_parallel: bool = False,
    device: str = "cpu",
) -> Iterator[Verdict]:
    """The verdict on each ``(group, name)``, in order, as it comes."""
    with Ranks(ranks, limit, plan_only, sequence_parallel, device) as workers:
        for group, name in architectures:
            yield workers.verdict(name, group)


def _rank(pipe: Connection, rank: int, ranks: int, store: str, plan_only: bool, device: str) -> None:
    """A rank's life: names in, findings out, until the other end closes."""
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore")
    group = None if plan_only else _join(rank, ranks, store, device)
    try:
        pipe.send("ready")
        while True:
            name, mapping, sequence_parallel = pipe.recv()
            pipe.send(_findings(name, mapping, rank, ranks, group, sequence_parallel, device))
    except (EOFError, BrokenPipeError):
        return


def _join(rank: int, ranks: int, store: str, device: str) -> dist.ProcessGroup:
    # No time limit of its own: the parent process watches the time.
    limit = timedelta(days=1)
    backend = "gloo"
    if device != "cpu":
        torch.backends.cudnn.allow_tf32 = False  # convolutions in fp32, as products are
        through_the_host.begin()
        backend = through_the_host.BACKEND
    dist.init_process_group(backend, init_method=f"file://{store}", rank=rank, world_size=ranks, timeout=limit)
    assert dist.group.WORLD is not None
    return dist.group.WORLD


def _findings(
    name: str,
    mapping: str,
    rank: int,
    ranks: int,
    group: dist.ProcessGroup | None,
    sequence_parallel: bool,
    device: str,
) -> dict[str, Any]:
    """The first rank's verdict on the plan; then, where there is a group, what each rank's run found."""
    verdict = plan_one(name, mapping, ranks, sequence_parallel) if rank == 0 else None
    outcome = [verdict.outcome if verdict is not None else None]
    if group is not None:
        dist.broadcast_object_list(outcome, src=0, group=group)
    findings: dict[str, Any] = {"verdict": verdict}
    if outcome[0] == "error":
        findings["error"] = verdict.reason if verdict is not None else "PeerError"
    elif outcome[0] == "planned" and group is not None:
        try:
            findings |= run_one(name, mapping, group, sequence_parallel=sequence_parallel, device=device)
        except Exception as error:  # whatever goes wrong with one architecture is its verdict
            findings["error"] = f"{type(error).__name__}: {error}"
    return findings


@contextmanager
def _environment(**variables: str) -> Iterator[None]:
    before = {name: os.environ.get(name) for name in variables}
    os.environ.update(variables)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value
