"""A bar is for people at a terminal, where nothing of it stays; a log has a line for each phase, and nothing else."""

from __future__ import annotations

import io
import os
import sys
from typing import Any

import pytest

from lightning_autotp.progress import bar, phase


@pytest.mark.parametrize("size", [None, 2**31])
def test_a_terminal_shows_what_goes_on(size: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    ours, theirs = os.openpty()
    monkeypatch.setenv("COLUMNS", "120")
    with os.fdopen(ours, "rb", 0) as screen, os.fdopen(theirs, "w") as terminal, monkeypatch.context() as patched:
        patched.setattr(sys, "stderr", terminal)
        with phase("reading weights", size) as told:
            told(2**30)
        with bar("another rank's", size, shown=False) as told:
            told(2**30)
        os.set_blocking(ours, False)
        terminal.flush()
        seen = everything(screen).decode()
    assert "reading weights" in seen
    assert "lightning_autotp: " not in seen, "that is for logs"
    assert "another rank's" not in seen
    assert ("1.0/2.0 GiB" in seen) == (size is not None)
    assert "\x1b[2K" in seen.rpartition("reading weights")[2], "the line is erased"


def everything(screen: Any) -> bytes:
    """A terminal gives what was written in several pieces."""
    found = b""
    while piece := screen.read(2**16):
        found += piece
    return found


def test_a_log_does_not(monkeypatch: pytest.MonkeyPatch) -> None:
    log = io.StringIO()
    monkeypatch.setattr(sys, "stderr", log)
    with bar("reading weights", 100) as told:
        told(50)
    assert not log.getvalue()
    with phase("exporting to there", 100) as told:
        told(50)
    with phase("exporting to there", 100, shown=False) as told:
        told(50)
    assert log.getvalue() == "lightning_autotp: exporting to there\n"
