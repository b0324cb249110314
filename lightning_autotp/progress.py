"""What goes on while one waits: a bar on a terminal, which is gone afterwards; in logs and pipes a line a phase.

The phases: tracing, choosing a plan, proving, rehearsing, downloading, loading and exporting.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager


@contextmanager
def phase(what: str, size: int | None = None, shown: bool = True) -> Iterator[Callable[[int], None]]:
    """A :func:`bar`; where there is no terminal, a line that says what begins."""
    if shown:
        note(what)
    with bar(what, size, shown) as told:
        yield told


def note(what: str) -> None:
    """Say in logs and pipes what begins."""
    if not sys.stderr.isatty():
        print(f"lightning_autotp: {what}", file=sys.stderr, flush=True)


@contextmanager
def bar(what: str, size: int | None = None, shown: bool = True) -> Iterator[Callable[[int], None]]:
    """A line on the error output that says what goes on and for how long already.

    Args:
        what: goes on.
        size: bytes until it is done, where that is known.
        shown: whether this process shows it; of several ranks one should.

    Yields:
        What is told how many bytes more are done.
    """
    if not (shown and sys.stderr.isatty()):
        yield lambda done: None
        return
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        DownloadColumn,
        Progress,
        SpinnerColumn,
        TextColumn,
        TimeElapsedColumn,
        TransferSpeedColumn,
    )

    of_bytes = [BarColumn(), DownloadColumn(binary_units=True), TransferSpeedColumn()] if size is not None else []
    columns = [SpinnerColumn(), TextColumn("{task.description}"), *of_bytes, TimeElapsedColumn()]
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task(what, total=size)
        yield lambda done: progress.advance(task, done)
