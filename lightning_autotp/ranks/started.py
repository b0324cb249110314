"""The process that started the others waits for them at its end, and its exit code says if one of them failed.

A shell, a scheduler or a script sees only the exit code of the process that it started. Without this, a rank that fails
after the first one has finished is a job that succeeded, and a rank that goes on is a process that nobody waits for.
"""

from __future__ import annotations

import atexit
import multiprocessing
import os
import sys
import time
from collections import Counter
from collections.abc import Callable, Sequence
from multiprocessing.util import Finalize
from subprocess import Popen

import psutil

from lightning_autotp.ranks.peers import process_status

LOOK = 0.1
"""Seconds between two looks."""
GRACE = 10.0
"""Seconds that the others have to end when this process ends with an error: more than
:data:`lightning_autotp.ranks.peers.GRACE`, so that they can say why themselves."""


def at_end_of_process(call: Callable[[BaseException | None], None]) -> None:
    """Let something be called when this process ends, with the uncaught exception that ends it, if one does.

    Processes that ``multiprocessing`` has started end without what ``atexit`` was given.
    """

    def end() -> None:
        call(sys.exc_info()[1] or getattr(sys, "last_value", None))

    if multiprocessing.parent_process() is None:
        atexit.register(end)
    else:
        Finalize(None, end, exitpriority=0)


def wait_for(started: Sequence[Popen[bytes]], patience: float) -> None:
    """Wait for processes; end this one with their exit code if one of them failed. For ``atexit``.

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
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(next((code for code in failed.values() if code > 0), 1))  # the only way at this point


def _say(text: str) -> None:
    print(f"\nlightning_autotp: {text}", file=sys.stderr, flush=True)
