"""Measure the systems beside each other: on the same ranks, a step of each in turn, many times."""

from __future__ import annotations

import gc
import os
import statistics
import tempfile
import time
import traceback
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from transformers import AutoModelForCausalLM

from peers.cases import CASES, Case
from peers.meter import Meter
from peers.profile import KINDS, profiled
from peers.systems import ONE, Prepared, Source, systems

TOLERANCE = 1e-4
"""How far a system's loss may be from one process's: what is wrong is not timed."""

LOOKS = 5
"""Steps of each system under the profiler."""


@dataclass
class Measured:
    """One system on one case.

    Attributes:
        system: its name.
        seconds: of each step: forward and backward, the slowest rank's.
        setup: seconds until it was ready.
        held: bytes of parameters and of all else at its peak, of the rank that holds most.
        calls: collectives in a step.
        sent: megabytes that a rank sends in them.
        looks: what the seconds of steps under the profiler went to on the first rank, by :data:`~peers.profile.KINDS`.
        error: why it was not measured, or empty.
    """

    system: str
    seconds: list[float]
    setup: float = 0.0
    held: int = 0
    calls: int = 0
    sent: float = 0.0
    looks: list[dict[str, float]] = field(default_factory=list)
    error: str = ""

    @property
    def median(self) -> float:
        """Seconds of a step."""
        return statistics.median(self.seconds)

    @property
    def spent(self) -> dict[str, float]:
        """What these seconds go to; empty where that was not measured."""
        return {kind: statistics.median(look[kind] for look in self.looks) for kind in KINDS if self.looks}

    def beside(self, other: Measured) -> float:
        """This system's seconds of another's, each step beside that of the same round."""
        return statistics.median(own / its for own, its in zip(self.seconds, other.seconds, strict=True))


def measure(case: str, ranks: int, rounds: int, only: Sequence[str] = (), looks: int = LOOKS) -> list[Measured]:
    """Measure a case in processes of its own: NCCL where there are as many GPUs, else gloo.

    Args:
        case: its name in :data:`~peers.cases.CASES`.
        ranks: how many processes.
        rounds: how many steps of each system are timed.
        only: the systems to measure; all by default.
        looks: steps of each under the profiler.
    """
    with tempfile.TemporaryDirectory() as directory:
        results = mp.get_context("spawn").SimpleQueue()
        mp.spawn(_rank, (ranks, case, (rounds, looks), tuple(only), directory, results), nprocs=ranks)
        return results.get()


def _rank(
    rank: int, ranks: int, case: str, steps: tuple[int, int], only: tuple[str, ...], directory: str, results: Any
) -> None:
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(ranks)}
    on_gpu = torch.cuda.device_count() >= ranks
    device = torch.device("cuda", rank) if on_gpu else torch.device("cpu")
    if on_gpu:
        torch.cuda.set_device(device)
    else:
        torch.set_num_threads(max(1, (os.cpu_count() or 1) // ranks))
    dist.init_process_group(
        "nccl" if on_gpu else "gloo",
        init_method=f"file://{directory}/store",
        rank=rank,
        world_size=ranks,
        timeout=timedelta(minutes=10),
    )
    try:
        found = _compare(CASES[case], *steps, only, Path(directory), device)
    finally:
        dist.destroy_process_group()
    if rank == 0:
        results.put(found)


def _compare(
    case: Case, rounds: int, looks: int, only: tuple[str, ...], directory: Path, device: torch.device
) -> list[Measured]:
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(case.config()).to(device).train()
    if dist.get_rank() == 0:
        model.save_pretrained(directory / "model")
    dist.barrier()
    source = Source(model, directory / "model", case.tokens(device), device)
    found: list[Measured] = []
    ready: dict[str, Prepared | None] = {}
    for name, make in systems(case.family).items():
        if only and name not in (ONE, *only):
            continue
        measured = Measured(name, [])
        found.append(measured)
        began = time.perf_counter()
        try:
            ready[name] = make(source)
        except Exception:
            measured.error = traceback.format_exc(limit=-2)
        if _anywhere(measured.error):
            measured.error = measured.error or "it failed on another rank"
            ready.pop(name, None)
            continue
        measured.setup = _slowest(time.perf_counter() - began)
    wanted = _look(ready, found, source)
    for name, prepared in ready.items():
        loss = _first(prepared.step(source.tokens) if prepared is not None else 0.0)
        if abs(loss - wanted) > TOLERANCE * abs(wanted):
            raise RuntimeError(f"the loss of {name} is {loss}, that of one process {wanted}")
    good = [measured for measured in found if not measured.error]
    for turn in range(rounds):
        first = turn % len(good)  # a step is slower or faster after another's: each comes after each
        for measured in (*good[first:], *good[:first]):
            measured.seconds.append(_timed(ready[measured.system], source))
    for _ in range(looks):
        for measured in good:
            prepared = ready[measured.system]
            dist.barrier()
            if prepared is not None:
                measured.looks.append(profiled(partial(prepared.step, source.tokens)))
    return found


def _look(ready: dict[str, Prepared | None], found: list[Measured], source: Source) -> float:
    """One step of each system with the meter on; the loss of one process."""
    wanted = 0.0
    for measured in found:
        if measured.error:
            continue
        prepared = ready[measured.system]
        meter = Meter(dist.get_world_size())
        held = 0
        loss = 0.0
        if prepared is not None:
            prepared.step(source.tokens)  # what is made once, is
            for parameter in prepared.model.parameters():
                parameter.grad = None
            gc.collect()
            held = sum(_local(parameter).nbytes for parameter in prepared.model.parameters())
            with meter:
                loss = prepared.step(source.tokens)
        measured.held = int(_slowest(float(held + meter.peak)))
        measured.calls, measured.sent = meter.calls, meter.sent / 1e6
        if measured.system == ONE:
            wanted = _first(loss)
    return wanted


def _timed(prepared: Prepared | None, source: Source) -> float:
    """Seconds of a step of the slowest rank."""
    dist.barrier()
    began = time.perf_counter()
    if prepared is not None:
        prepared.step(source.tokens)
    if source.device.type == "cuda":
        torch.cuda.synchronize()
    return _slowest(time.perf_counter() - began)


def _local(parameter: Any) -> torch.Tensor:
    return parameter.to_local() if hasattr(parameter, "to_local") else parameter


def _slowest(value: float) -> float:
    return max(_gathered(value))


def _first(value: float) -> float:
    return float(_gathered(value)[0])


def _anywhere(error: str) -> bool:
    return any(_gathered(error))


def _gathered(value: Any) -> list[Any]:
    values: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values
