"""The process that started the others waits for them at its end, and its exit code says if one of them failed.

A shell, a scheduler or a script sees only the exit code of the process that it started. Without this, a rank that fails
after the first one has finished is a job that succeeded, and a rank that goes on is a process that is not waited for.
"""

from __future__ import annotations

import atexit
import multiprocessing
import os
import sys
import threading
import time
import traceback
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import cache
from multiprocessing.util import Finalize
from pathlib import Path
from subprocess import Popen

import psutil

from lightning_autotp.ranks.peers import process_status

LOOK = 0.1
"""Seconds between two looks."""
FINISHING = 3.0
"""Seconds that threads of this process have to finish."""
GRACE = 10.0
"""Seconds that the others have to end when this process ends with an error: more than
:data:`lightning_autotp.ranks.peers.GRACE`, so that they can say why themselves."""


@cache
def let_threads_finish_at_end() -> None:
    """Let this process, when it ends, :func:`let_threads_finish`: after all that is said to ``atexit`` from now on."""
    atexit.register(let_threads_finish)


def let_threads_finish() -> None:
    """Wait until no thread of this process has anything to do.

    A worker thread of a process group drops its references to a collective's tensors after all ranks know that it is
    done. On a busy machine the interpreter may be ending by then, and dropping a tensor takes the interpreter's lock.
    The interpreter then ends the thread, where it must not end, and so the process is aborted ("terminate called
    without an active exception"). Not for longer than :data:`FINISHING`, and for hardly any time where the system does
    not tell what threads do.
    """
    deadline = time.monotonic() + FINISHING
    idle = 0
    # More than one look: a thread that waits for the interpreter, which this one has just now, seems to be idle.
    while idle < 3 and time.monotonic() < deadline:
        time.sleep(LOOK / 100)
        idle = 0 if _are_threads_running() else idle + 1


def _are_threads_running() -> bool:
    """Whether any thread but this one runs or could."""
    own = str(threading.get_native_id())
    for status in Path("/proc/self/task").glob("*/stat"):
        with suppress(OSError):  # it has ended
            if status.parent.name != own and status.read_text().rpartition(")")[2].split()[0] == "R":
                return True
    return False


_started: list[tuple[Sequence[Popen[bytes]], float]] = []


def at_end_of_process(finish: Callable[[], None], end: Callable[[BaseException | None], None]) -> None:
    """Let something be called when this process ends; an error in it makes the exit code 1.

    Processes that ``multiprocessing`` has started end without what ``atexit`` was given.

    Args:
        finish: called first, and may raise.
        end: called with the uncaught exception that ends the process, or that of ``finish``, if there is one.
    """

    def at_end() -> None:
        error = sys.exc_info()[1] or getattr(sys, "last_value", None)
        try:
            finish()
        except Exception as failed:
            traceback.print_exception(failed)
            end(error or failed)
            for processes, patience in _started:
                wait_for(processes, patience)
            _end_with(1)
        end(error)

    if multiprocessing.parent_process() is None:
        atexit.register(at_end)
    else:
        Finalize(None, at_end, exitpriority=0)


def wait_at_end(processes: Sequence[Popen[bytes]], patience: float) -> None:
    """Let this process, when it ends, :func:`wait_for` those that it has started."""
    _started.append((processes, patience))
    atexit.register(wait_for, processes, patience)


def wait_for(started: Sequence[Popen[bytes]], patience: float) -> None:
    """Wait for processes; end this one with their exit code if one of them failed. At the end of this one.

    If this process ends with an error itself, its own exit code stands, and the others have only a little time.

    Args:
        started: the processes.
        patience: seconds that one may be stopped by a signal.
    """
    has_failed = getattr(sys, "last_value", None) is not None  # that of an uncaught exception; not of sys.exit
    deadline = time.monotonic() + GRACE
    stopped = Counter[int]()
    while running := [process for process in started if process.poll() is None]:
        time.sleep(LOOK)
        for process in running:
            is_stopped = process_status(process.pid) == psutil.STATUS_STOPPED
            stopped[process.pid] = stopped[process.pid] + 1 if is_stopped else 0
            if stopped[process.pid] * LOOK > patience:
                _say(f"process {process.pid} is stopped (by SIGSTOP, or Ctrl-Z in a terminal), and is ended")
                process.kill()
            elif has_failed and time.monotonic() > deadline:
                process.kill()
    failed = {process.pid: process.returncode for process in started if process.returncode}
    if failed and not has_failed:
        for pid, code in failed.items():
            _say(f"process {pid}, another rank of this job, ended with exit code {code}, and so the job has failed")
        _end_with(next((code for code in failed.values() if code > 0), 1))


def _end_with(code: int) -> None:
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)  # the only way at this point


def _say(text: str) -> None:
    print(f"\nlightning_autotp: {text}", file=sys.stderr, flush=True)
