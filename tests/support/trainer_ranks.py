"""Run a function that makes a Trainer on several ranks, or a script, started as torchrun would."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

from distributed import run_here, run_processes, run_ranks


def run_trainer_ranks(fn: Callable[..., Any], world_size: int, *args: Any) -> list[Any]:
    """Call ``fn(*args)`` on every rank, in an environment in which Lightning finds itself launched already.

    Returns:
        What ``fn`` returned, in order of rank.

    Raises:
        RuntimeError: as soon as one rank fails, with its traceback.
        TimeoutError: when they have not answered for long.
    """
    return run_ranks(_launched, world_size, fn, args)


def run_launched(fn: Callable[..., Any], world_size: int, *args: Any) -> list[Any]:
    """As :func:`run_trainer_ranks`, but Lightning begins the process group."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    return run_processes(_launched_at, world_size, port, fn, args)


def run_script(*arguments: str, ranks: int, cwd: Path) -> str:
    """Run ``python ARGUMENTS`` on every rank, as torchrun would; what they printed, rank 0 first.

    Raises:
        RuntimeError: as soon as one rank ends with another exit code than 0, with what it printed.
        TimeoutError: when they have not answered for long.
    """
    return "".join(run_trainer_ranks(_script, ranks, arguments, cwd))


def _script(arguments: tuple[str, ...], cwd: Path) -> str:
    done = run_here(arguments, cwd)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout + done.stderr


def _launched(rank: int, world_size: int, fn: Callable[..., Any], args: tuple[Any, ...]) -> Any:
    os.environ.update(
        RANK=str(rank),
        LOCAL_RANK=str(rank),
        GROUP_RANK="0",
        WORLD_SIZE=str(world_size),
        LOCAL_WORLD_SIZE=str(world_size),
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT="0",  # never opened: the process group exists already
        TORCHELASTIC_RUN_ID="test",
    )
    return fn(*args)


def _launched_at(rank: int, world_size: int, port: int, fn: Callable[..., Any], args: tuple[Any, ...]) -> Any:
    return _launched(rank, world_size, _at, (port, fn, args))


def _at(port: int, fn: Callable[..., Any], args: tuple[Any, ...]) -> Any:
    os.environ["MASTER_PORT"] = str(port)
    return fn(*args)
