"""What a job of two ranks prints when one of them fails."""

from __future__ import annotations

import re


def check_one_error(said: str, failed: int, error: str = "") -> None:
    """The rank that failed prints its error and the way there, if it can; then the other one prints a line, no more.

    Args:
        said: what both have printed.
        failed: the rank that failed.
        error: what is said of it; empty of one that was killed.
    """
    lines = said.splitlines()
    ends = [number for number, line in enumerate(lines) if "ends, because" in line]
    assert len(ends) == 1, said
    assert f"rank {1 - failed} ends, because rank {failed} (process " in lines[ends[0]], said
    assert error in lines[ends[0]], said
    frames = [number for number, line in enumerate(lines) if re.match(r'(\[rank\d\]: )?  File "', line)]
    assert bool(frames) is bool(error), said
    for number in frames:
        assert lines[number].startswith(f"[rank{failed}]: "), said
        assert number < ends[0], said
    assert not re.search("gloo/transport|TCPStore", said), said
