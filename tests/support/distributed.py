"""Run a function on several ranks, each a real process with a gloo process group.

A test hands over one top-level function that does many checks. A start takes little, since ranks are forked from a
process that has imported everything and trained a model; making a model parallel takes a second of each rank.
"""

from __future__ import annotations

import faulthandler
import gc
import multiprocessing
import os
import pickle
import runpy
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist

ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",
    "TRANSFORMERS_VERBOSITY": "error",
    "MALLOC_MMAP_THRESHOLD_": str(2**20),  # memory that is freed is given back, so peaks are of what is held
}
SUPPORT = Path(__file__).parent
SCRIPT_ENVIRONMENT = {**ENVIRONMENT, "PYTHONPATH": f"{SUPPORT}{os.pathsep}{SUPPORT.parents[1]}"}
"""Of a script that imports the package and what tests share."""

PRELOADED = [
    "pytest",
    "jsonargparse",
    "peft",
    "lightning.pytorch",
    "torch.distributed.fsdp",
    "transformers.models.llama.modeling_llama",
    "transformers.models.auto.modeling_auto",
    "lightning_autotp.lightning.strategy",
    "lightning_autotp.lightning.fabric",
    "trained_once",
]
"""What ranks have imported already when they begin. One that fails to be imported only takes time later."""

PATIENCE = 900.0
"""Seconds after which what has not answered counts as hanging: many times what anything here takes, so that nothing
fails on a busy machine. A whole test has more (``timeout`` in pyproject.toml), so that what hangs is named first."""


def run_ranks(fn: Callable[..., Any], world_size: int, *args: Any) -> list[Any]:
    """Call ``fn(rank, world_size, *args)`` on every rank, in processes of their own.

    The default process group (gloo) is initialised before the call and destroyed after it. ``fn``, its arguments and
    its results are pickled: ``fn`` must be a top-level function, and tensors arrive as copies.

    Returns:
        What ``fn`` returned, in order of rank.

    Raises:
        RuntimeError: as soon as one rank fails, with its traceback; the other ranks are ended.
        TimeoutError: when :data:`PATIENCE` is over; every rank is ended.
    """
    return _run(_ranked, world_size, fn, args)


def run_processes(fn: Callable[..., Any], world_size: int, *args: Any) -> list[Any]:
    """As :func:`run_ranks`, but without a process group: ``fn`` may begin one."""
    return _run(_alone, world_size, fn, args)


def run_python(*arguments: str, cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
    """Run ``python ARGUMENTS`` (a file, ``-m`` and a module, or ``-c`` and code) and wait for its end.

    It is forked from what has imported everything; one that ``sys.executable`` starts imports it anew, so that is for
    tests about starting, about imports and about memory.

    Raises:
        TimeoutError: when :data:`PATIENCE` is over; the process is ended.
    """
    (done,) = _run(_forked, 1, arguments, cwd)
    return done


def _run(target: Callable[..., Any], world_size: int, *args: Any) -> list[Any]:
    """What ``target(rank, world_size, store, *args)`` returned on every rank; see :func:`run_ranks`."""
    # Forked from one process per test worker that has imported everything, which takes most of the time to start; but
    # where there is a GPU, anew: what has traced a model has begun CUDA, which no fork can use.
    context: Any = multiprocessing.get_context("spawn" if torch.cuda.is_available() else "forkserver")
    if not torch.cuda.is_available():
        context.set_forkserver_preload(PRELOADED)
    environment = {**os.environ, **ENVIRONMENT}
    results: dict[int, Any] = {}
    processes: list[multiprocessing.process.BaseProcess] = []
    readers: dict[Connection, int] = {}
    deadline = time.monotonic() + PATIENCE
    with tempfile.TemporaryDirectory() as directory:
        try:
            # The process that ranks are forked from has another path than this one: it needs what tests share.
            with mock.patch.dict(os.environ, SCRIPT_ENVIRONMENT):
                for rank in range(world_size):
                    reader, writer = context.Pipe(duplex=False)
                    process = context.Process(
                        target=_child, args=(writer, environment, target, rank, world_size, directory, args)
                    )
                    process.start()
                    writer.close()
                    processes.append(process)
                    readers[reader] = rank
            while readers:
                ready = wait(list(readers), timeout=max(0.0, deadline - time.monotonic()))
                if not ready:
                    raise TimeoutError(
                        f"ranks {sorted(readers.values())} of {world_size} gave no result within {PATIENCE:.0f} s"
                    )
                failures = {}
                for reader in ready:
                    rank = readers.pop(reader)
                    outcome, value = _receive(reader, processes[rank], _crash(directory, rank))
                    if outcome == "error":
                        failures[rank] = value
                    else:
                        results[rank] = value
                if failures:
                    raise RuntimeError(
                        "\n".join(f"rank {rank} of {world_size} failed:\n{text}" for rank, text in failures.items())
                    )
            for process in processes:
                process.join(max(0.0, deadline - time.monotonic()))
        finally:
            for process in processes:
                if process.is_alive():
                    process.kill()
                process.join()
    return [results[rank] for rank in range(world_size)]


def time_limits() -> set[timedelta]:
    """Of the collectives of all groups that this process is in."""
    groups = dist.distributed_c10d._world.pg_map
    return {group._get_backend(torch.device("cpu")).options._timeout for group in groups}


def _crash(directory: str, rank: int) -> Path:
    """Where a rank writes its threads' stacks if it crashes outside of Python."""
    return Path(directory) / f"crash-{rank}"


def _receive(reader: Connection, process: multiprocessing.process.BaseProcess, crash: Path) -> tuple[str, Any]:
    try:
        outcome, payload = reader.recv()
    except EOFError:
        process.join(10)
        stacks = crash.read_text().partition("\nExtension modules")[0] if crash.exists() else ""
        return "error", f"the process ended without a result (exit code {process.exitcode})\n{stacks}"
    finally:
        reader.close()
    return outcome, pickle.loads(payload)


def _child(
    writer: Connection,
    environment: dict[str, str],
    target: Callable[..., Any],
    rank: int,
    world_size: int,
    directory: str,
    args: tuple[Any, ...],
) -> None:
    stacks = _crash(directory, rank).open("w")
    faulthandler.enable(stacks)
    gc.freeze()  # what was imported before stays: not to be looked at each time that objects are looked for that do not
    # Workers of data loaders start as in a user's process: in the way that this one was, they would import everything.
    multiprocessing.set_start_method(None, force=True)
    try:
        os.environ.clear()
        os.environ.update(environment)
        torch.set_num_threads(1)
        payload = target(rank, world_size, str(Path(directory) / "store"), *args)
    except BaseException:
        writer.send(("error", pickle.dumps(traceback.format_exc())))
        writer.close()
        sys.stdout.flush()
        sys.stderr.flush()
        # Not through the interpreter's shutdown: the group is alive and its peers may be waiting in a collective.
        os._exit(1)
    writer.send(("result", payload))
    writer.close()


def _ranked(rank: int, world_size: int, store: str, fn: Callable[..., Any], args: tuple[Any, ...]) -> bytes:
    dist.init_process_group(
        "gloo", init_method=f"file://{store}", rank=rank, world_size=world_size, timeout=timedelta(seconds=PATIENCE)
    )
    # Pickled here, not by the pipe: the pipe would share the tensors' memory, which ends with this process.
    payload = pickle.dumps(fn(rank, world_size, *args))
    dist.destroy_process_group()
    return payload


def _alone(rank: int, world_size: int, store: str, fn: Callable[..., Any], args: tuple[Any, ...]) -> bytes:
    return pickle.dumps(fn(rank, world_size, *args))


def _forked(rank: int, world_size: int, store: str, arguments: tuple[str, ...], cwd: Path | None) -> bytes:
    return pickle.dumps(run_here(arguments, cwd))


def run_here(arguments: tuple[str, ...], cwd: Path | None) -> subprocess.CompletedProcess[str]:
    """Run ``python ARGUMENTS`` in this process, which is fit for nothing else then."""
    if cwd is not None:
        os.chdir(cwd)
    with tempfile.TemporaryFile("w+") as output, tempfile.TemporaryFile("w+") as errors:
        for stream, file in ((sys.stdout, output), (sys.stderr, errors)):
            stream.flush()
            os.dup2(file.fileno(), stream.fileno())
        code = _exit_code(arguments)
        sys.stdout.flush()
        sys.stderr.flush()
        for file in (output, errors):
            file.seek(0)
        return subprocess.CompletedProcess(arguments, code, output.read(), errors.read())


def _exit_code(arguments: tuple[str, ...]) -> int:
    try:
        if arguments[0] == "-m":
            sys.argv = list(arguments[1:])
            runpy.run_module(arguments[1], run_name="__main__", alter_sys=True)
        elif arguments[0] == "-c":
            sys.argv = ["-c", *arguments[2:]]
            exec(compile(arguments[1], "<string>", "exec"), {"__name__": "__main__"})
        else:
            sys.argv = list(arguments)
            sys.path.insert(0, str(Path(arguments[0]).resolve().parent))
            runpy.run_path(arguments[0], run_name="__main__")
    except SystemExit as end:
        if isinstance(end.code, str):
            print(end.code, file=sys.stderr)
        return end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException as error:
        sys.excepthook(type(error), error, error.__traceback__)
        return 1
    return 0
