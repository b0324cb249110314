"""Times what a machine does, in processes of its own: products, memory, and collectives between the processes."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable
from typing import Any, Literal

import psutil
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor

from lightning_autotp.planning.machines import Machine

_ROUNDS = 7
_MEBIBYTES = 2**20
_KEPT = 32
"""Results that are there at the same time."""


def measure(processes: int, device: Literal["auto", "cpu", "cuda"] = "auto") -> Machine:
    """The machine that this program runs on, by what its processes reach together. Starts processes.

    Products count as reached in full, so that no share is taken off a peak. What a network between machines does is not
    measured: its entries are those of the links, for the reader to change.

    Raises:
        ValueError: for fewer than two processes, or more than there are GPUs.
    """
    kind = ("cuda" if torch.cuda.is_available() else "cpu") if device == "auto" else device
    there = torch.cuda.device_count() if kind == "cuda" else processes
    if not 2 <= processes <= there:
        raise ValueError(
            f"{processes} processes cannot be measured: there must be two or more, on {there} {kind} devices"
        )
    with tempfile.TemporaryDirectory() as directory:
        results = mp.get_context("spawn").SimpleQueue()
        mp.spawn(_rank, (processes, kind, directory, results), nprocs=processes)
        figures: dict[str, float] = results.get()
    memory = (
        torch.cuda.get_device_properties(0).total_memory
        if kind == "cuda"
        else psutil.virtual_memory().total / processes
    )
    return Machine(
        name=torch.cuda.get_device_name(0).replace(" ", "-") if kind == "cuda" else "CPU",
        gpus_per_node=processes,
        memory=float(memory),
        reserved=float(2e9 if kind == "cuda" else 0.5e9),
        reached=1.0,
        network_bandwidth=figures["link_bandwidth"],
        network_latency=figures["latency"],
        host_memory=float(psutil.virtual_memory().total),
        gpus=processes,
        **figures,
    )


def _rank(rank: int, ranks: int, kind: str, directory: str, results: Any) -> None:
    if kind == "cuda":
        torch.cuda.set_device(rank)
    torch.set_num_threads(max(1, (psutil.cpu_count(logical=False) or 1) // ranks))
    backend = "nccl" if kind == "cuda" else "gloo"
    dist.init_process_group(backend, init_method=f"file://{directory}/store", rank=rank, world_size=ranks)
    try:
        figures = _figures(kind, ranks)
    finally:
        dist.destroy_process_group()
    if rank == 0:
        results.put(figures)


def _figures(kind: str, ranks: int) -> dict[str, float]:
    """What this process reaches while the others do the same. Collective."""
    width = 8192 if kind == "cuda" else 1024

    def rate(dtype: torch.dtype) -> float:
        """Of products one after the other, whose results are kept, as in a step: a single one may be faster."""
        x = torch.randn(width, width, device=kind, dtype=dtype)
        return _KEPT * 2 * width**3 / _seconds(lambda: [x @ x for _ in range(_KEPT)], kind)

    part = torch.ones((256 if kind == "cuda" else 8) * _MEBIBYTES // 4 // ranks, device=kind)
    moved = part.repeat(ranks)
    small = torch.ones(8, device=kind)
    latency = _seconds(lambda: dist.all_reduce(small), kind)
    gathered = _seconds(lambda: dist.all_gather_into_tensor(moved, part), kind)
    scattered = _seconds(lambda: dist.reduce_scatter_tensor(part, moved), kind)
    reduced = _seconds(lambda: dist.all_reduce(moved), kind)
    # A byte crosses a link once to be gathered and once to be scattered, but for the share that a rank has already.
    sent = (ranks - 1) / ranks * moved.nbytes
    link = 2 * sent / max(gathered + scattered - 2 * latency, 1e-9)
    return {
        "peak_bf16": rate(torch.bfloat16),
        "peak_fp32": rate(torch.float32),
        "memory_bandwidth": _memory_bandwidth(kind),
        "link_bandwidth": link,
        "latency": latency,
        "all_reduce_passes": max(reduced - latency, 1e-9) * link / sent,
        **(_host(moved) if kind == "cuda" else {}),
    }


def _memory_bandwidth(kind: str) -> float:
    """Bytes per second that an operator moves whose result is kept, as most of a forward pass are.

    On a GPU that is memory which torch has already. A processor's comes page by page from the operating system, in each
    step anew, which takes longer than to compute what is written there.
    """
    x = torch.ones((128 if kind == "cuda" else 8) * _MEBIBYTES // 4, device=kind)

    def forward() -> list[Tensor]:
        return [x * x for _ in range(_KEPT)]

    return _KEPT * 2 * x.nbytes / _seconds(forward, kind)


def _host(on_device: Tensor) -> dict[str, float]:
    """What the host's memory reaches for all processes together, and what its link to this one's GPU."""
    there, beside = (torch.ones(on_device.shape, pin_memory=True) for _ in range(2))
    copied = 2 * there.nbytes * dist.get_world_size()
    return {
        "host_memory_bandwidth": copied / _seconds(lambda: beside.copy_(there), "cuda"),
        "host_link_bandwidth": there.nbytes / _seconds(lambda: there.copy_(on_device), "cuda"),
    }


def _seconds(call: Callable[[], Any], kind: str) -> float:
    """Seconds of the fastest of several calls, after a first one; all processes begin together. Collective.

    Whatever else the machine does makes the others slower.
    """
    found = []
    for _ in range(_ROUNDS + 1):
        dist.barrier()
        _wait(kind)
        began = time.perf_counter()
        call()
        _wait(kind)
        found.append(time.perf_counter() - began)
    return min(found[1:])


def _wait(kind: str) -> None:
    if kind == "cuda":
        torch.cuda.synchronize()
