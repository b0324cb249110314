"""Whether this machine can train, asked before a job is: what ``lightning-autotp doctor`` prints.

:func:`gather` looks at the machine. Each check is a function of these facts, and says in a line what is there, what
would go wrong, and what to do.
"""

from __future__ import annotations

import os
import platform
import resource
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from importlib import metadata
from itertools import permutations
from pathlib import Path
from typing import Literal

from packaging.requirements import Requirement

HANDSHAKE_SECONDS = 60
_GIB = 2**30
_HANDSHAKE = """
import sys, datetime, torch, torch.distributed as dist
backend, rank, seconds, rendezvous = sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), sys.argv[4]
if backend == "nccl":
    torch.cuda.set_device(rank)
limit = datetime.timedelta(seconds=seconds)
dist.init_process_group(backend, init_method="file://" + rendezvous, rank=rank, world_size=2, timeout=limit)
number = torch.full((1,), rank + 1.0, device="cuda" if backend == "nccl" else "cpu")
dist.all_reduce(number)
assert number.item() == 3, f"1 + 2 became {number.item()}"
dist.destroy_process_group()
"""


@dataclass(frozen=True)
class Device:
    """One GPU: its memory in bytes, its CUDA compute capability, and the GPUs whose memory it reaches directly."""

    name: str
    memory: int
    capability: tuple[int, int]
    reaches: frozenset[int]


@dataclass(frozen=True)
class Facts:
    """What the checks know of this machine; sizes in bytes, and ``None`` for what is not there.

    Attributes:
        requirements: what the package declares, with the lowest versions.
        versions: of what is installed, by the names in ``requirements``.
        cuda_build: the CUDA that torch was built for.
        has_driver: whether NVIDIA's driver is installed.
        backends: those of torch.distributed that this torch has.
        handshakes: for each backend that two processes tried, how that failed, ``None`` where it did not.
        shared_memory: the size of /dev/shm.
        host: this machine's name.
        addresses: what the name resolves to, none where it does not.
        disks: free space by what is written there.
        open_files: the limit for one process.
        omp_threads: OMP_NUM_THREADS.
        cores: that this process may use.
    """

    requirements: tuple[Requirement, ...]
    versions: Mapping[str, str | None]
    cuda_build: str | None
    has_driver: bool
    devices: tuple[Device, ...]
    backends: frozenset[str]
    handshakes: Mapping[str, str | None]
    shared_memory: int | None
    host: str
    addresses: frozenset[str]
    disks: Mapping[str, int]
    open_files: int
    omp_threads: str | None
    cores: int


@dataclass(frozen=True)
class Finding:
    """What one check says: one line."""

    check: str
    level: Literal["ok", "warning", "error"]
    text: str

    def __str__(self) -> str:
        return f"{self.level:9}{self.check}: {self.text}"


def check_versions(facts: Facts) -> Finding:
    """Whether what the package needs is installed, in versions that it was tested with or newer ones."""
    named = {need.name: facts.versions[need.name] for need in facts.requirements}
    wrong = [
        f"{need} is needed, {f'{version} is' if (version := named[need.name]) else 'none is'} installed"
        for need in facts.requirements
        if not (version := named[need.name]) or not need.specifier.contains(version, prereleases=True)
    ]
    if wrong:
        return Finding("versions", "error", f"{'; '.join(wrong)}. Run pip install --upgrade lightning_autotp")
    shown = ", ".join(f"{name} {named[name]}" for name in ("torch", "lightning", "transformers"))
    return Finding("versions", "ok", f"Python {platform.python_version()}, {shown}")


def check_devices(facts: Facts) -> Finding:
    """Whether torch sees the GPUs, and whether they are of one model that computes in bfloat16."""
    if not facts.devices:
        if facts.has_driver and facts.cuda_build is None:
            return Finding(
                "devices",
                "error",
                "NVIDIA's driver is here, but this torch is built without CUDA: install a build for it",
            )
        if facts.has_driver:
            advice = "look at nvidia-smi and CUDA_VISIBLE_DEVICES; an old driver has to be updated"
            return Finding("devices", "error", f"torch for CUDA {facts.cuda_build} sees no GPU: {advice}")
        return Finding(
            "devices", "warning", "no GPU: ranks compute on the CPU, which is slow but enough to try a program"
        )
    counted = {
        (device.name, device.memory, device.capability): sum(device.name == other.name for other in facts.devices)
        for device in facts.devices
    }
    shown = ", ".join(
        f"{count} x {name} ({memory / _GIB:.0f} GiB, capability {major}.{minor})"
        for (name, memory, (major, minor)), count in counted.items()
    )
    if len(counted) > 1:
        return Finding(
            "devices", "warning", f"{shown}: every step waits for the slowest. Use one model for a job's ranks"
        )
    if facts.devices[0].capability < (8, 0):
        return Finding("devices", "warning", f'{shown}: no bfloat16. Use precision="16-mixed"')
    return Finding("devices", "ok", shown)


def check_links(facts: Facts) -> Finding:
    """Whether each GPU reaches the memory of each other one."""
    apart = [
        pair for pair in permutations(range(len(facts.devices)), 2) if pair[1] not in facts.devices[pair[0]].reaches
    ]
    if apart:
        text = f"GPU {apart[0][0]} does not reach GPU {apart[0][1]} directly ({len(apart)} such pairs)"
        advice = "the all-reduces of each layer go through the host's memory. Keep tensor-parallel ranks on linked GPUs"
        return Finding("links", "warning", f"{text}: {advice} (nvidia-smi topo -m)")
    return Finding("links", "ok", "all GPUs reach each other" if len(facts.devices) > 1 else "there are no two GPUs")


def check_backends(facts: Facts) -> Finding:
    """Whether torch.distributed has the backends that a job here uses."""
    missing = ({"gloo", "nccl"} if facts.devices else {"gloo"}) - facts.backends
    if missing:
        text = (
            f"this torch has no {' and no '.join(sorted(missing))}: install a build that has, such as PyPI's for Linux"
        )
        return Finding("backends", "error", text)
    return Finding("backends", "ok", ", ".join(sorted(facts.backends)))


def check_handshakes(facts: Facts) -> Finding:
    """Whether two processes of this machine can add two numbers, over each backend."""
    failed = {backend: error for backend, error in facts.handshakes.items() if error}
    if failed:
        text = "; ".join(f"two processes do not meet over {backend} ({error})" for backend, error in failed.items())
        advice = "name a network interface that works in GLOO_SOCKET_IFNAME or NCCL_SOCKET_IFNAME (lo for one machine)"
        return Finding("handshake", "error", f"{text}: no job with several ranks would start. First {advice}")
    return Finding("handshake", "ok", f"two processes meet over {' and '.join(facts.handshakes) or 'nothing'}")


def check_shared_memory(facts: Facts) -> Finding:
    """Whether /dev/shm has room for NCCL and for the workers of loaders."""
    if facts.shared_memory is None:
        return Finding("shared memory", "ok", "no /dev/shm on this system")
    shown = f"/dev/shm has {facts.shared_memory / _GIB:.2f} GiB"
    if facts.shared_memory < _GIB:
        advice = (
            "loaders' workers and NCCL end with a bus error when it is full. In a container: docker run --shm-size 8g"
        )
        return Finding("shared memory", "warning", f"{shown}: {advice}")
    return Finding("shared memory", "ok", shown)


def check_host(facts: Facts) -> Finding:
    """Whether other machines could be told this one's name."""
    if not facts.addresses:
        text = (
            f"{facts.host} resolves to no address: gloo uses the loopback interface, which other machines cannot reach"
        )
        return Finding("host name", "warning", f"{text}. Add it to /etc/hosts")
    loopback = all(address.startswith("127.") or address == "::1" for address in facts.addresses)
    note = ", which is right for jobs of one machine only" if loopback else ""
    return Finding("host name", "ok", f"{facts.host} is {', '.join(sorted(facts.addresses))}{note}")


def check_disks(facts: Facts) -> Finding:
    """Whether there is room for downloads and checkpoints."""
    shown = ", ".join(f"{what} {free / _GIB:.0f} GiB free" for what, free in facts.disks.items())
    if min(facts.disks.values()) < 10 * _GIB:
        text = f"{shown}: a model of 7B parameters is 14 GiB, and its checkpoint with Adam's states 80"
        return Finding("disk", "warning", f"{text}. Set HF_HOME or default_root_dir to a larger disk")
    return Finding("disk", "ok", shown)


def check_open_files(facts: Facts) -> Finding:
    """Whether a process may open as many files as loaders with workers do."""
    if facts.open_files < 4096:
        text = f"a process may open {facts.open_files} files: loaders with many workers end with 'Too many open files'"
        return Finding("open files", "warning", f"{text}. Run ulimit -n 65536 before")
    return Finding("open files", "ok", f"a process may open {facts.open_files}")


def check_threads(facts: Facts) -> Finding:
    """Whether ranks that compute on CPUs would have more threads than there are cores."""
    threads = facts.omp_threads
    if threads is None:
        return Finding(
            "threads", "ok", f"OMP_NUM_THREADS is not set, so Lightning or torchrun sets it; {facts.cores} cores"
        )
    if not threads.isdecimal() or not 0 < int(threads) <= facts.cores:
        text = (
            f"OMP_NUM_THREADS={threads} on {facts.cores} cores: each rank takes that many, and they wait for each other"
        )
        return Finding("threads", "warning", f"{text}. Set it to the cores of a rank, or leave it out")
    return Finding("threads", "ok", f"OMP_NUM_THREADS={threads} for each rank, on {facts.cores} cores")


CHECKS: tuple[Callable[[Facts], Finding], ...] = (
    check_versions,
    check_devices,
    check_links,
    check_backends,
    check_handshakes,
    check_shared_memory,
    check_host,
    check_disks,
    check_open_files,
    check_threads,
)


def gather() -> Facts:
    """Look at this machine: starts two processes for each backend, for ``HANDSHAKE_SECONDS`` at most."""
    import torch
    import torch.distributed as dist
    from huggingface_hub.constants import HF_HUB_CACHE

    needs = [Requirement(line) for line in metadata.requires("lightning_autotp") or ()]
    requirements = tuple(need for need in needs if need.marker is None or need.marker.evaluate({"extra": ""}))
    count = torch.cuda.device_count()
    backends = {"gloo": dist.is_gloo_available(), "nccl": dist.is_nccl_available()}
    tried = [name for name, there in backends.items() if there and (name == "gloo" or count > 1)]
    return Facts(
        requirements=requirements,
        versions={need.name: _version(need.name) for need in requirements},
        cuda_build=torch.version.cuda,
        has_driver=shutil.which("nvidia-smi") is not None,
        devices=tuple(_device(index, count) for index in range(count)),
        backends=frozenset(name for name, there in backends.items() if there),
        handshakes={name: _handshake(name) for name in tried},
        shared_memory=shutil.disk_usage("/dev/shm").total if Path("/dev/shm").is_dir() else None,
        host=socket.gethostname(),
        addresses=_addresses(socket.gethostname()),
        disks={"the Hub's cache": _free(Path(HF_HUB_CACHE)), "this directory": _free(Path.cwd())},
        open_files=resource.getrlimit(resource.RLIMIT_NOFILE)[0],
        omp_threads=os.environ.get("OMP_NUM_THREADS"),
        cores=len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1,
    )


def _version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def _device(index: int, count: int) -> Device:
    import torch

    properties = torch.cuda.get_device_properties(index)
    reached = {other for other in range(count) if other != index and torch.cuda.can_device_access_peer(index, other)}
    return Device(properties.name, properties.total_memory, (properties.major, properties.minor), frozenset(reached))


def _addresses(host: str) -> frozenset[str]:
    try:
        return frozenset(str(info[4][0]) for info in socket.getaddrinfo(host, None))
    except OSError:
        return frozenset()


def _free(path: Path) -> int:
    """Free bytes where a directory is, or would be made."""
    return shutil.disk_usage(next(place for place in (path, *path.parents) if place.exists())).free


def _handshake(backend: str) -> str | None:
    """Let two processes add two numbers; how that failed, if it did."""
    with tempfile.TemporaryDirectory() as folder, ExitStack() as ended:
        processes, outputs = [], []
        for rank in range(2):
            output = ended.enter_context(open(f"{folder}/{rank}", "w+"))
            arguments = [backend, str(rank), str(HANDSHAKE_SECONDS), f"{folder}/rendezvous"]
            process = subprocess.Popen(
                [sys.executable, "-c", _HANDSHAKE, *arguments], stdout=subprocess.DEVNULL, stderr=output
            )
            ended.callback(process.wait)
            ended.callback(process.kill)
            processes.append(process)
            outputs.append(output)
        deadline = time.monotonic() + HANDSHAKE_SECONDS
        while any(process.poll() is None for process in processes) and time.monotonic() < deadline:
            if any(process.poll() for process in processes):  # the other one waits for it in vain
                break
            time.sleep(0.05)
        for process, output in zip(processes, outputs, strict=True):
            if process.poll():
                output.seek(0)
                return (output.read().strip().splitlines() or [f"exit code {process.returncode}"])[-1]
        late = any(process.poll() is None for process in processes)
        return f"no answer in {HANDSHAKE_SECONDS} s" if late else None
