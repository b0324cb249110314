"""Lists of names in messages."""

from __future__ import annotations

from collections.abc import Collection
from itertools import islice

MOST = 5


def join_names(names: Collection[str]) -> str:
    """The first few of these names, and how many others there are.

    >>> join_names(["a", "b"]), join_names("abcdefg")
    ('a, b', 'a, b, c, d, e and 2 more')
    """
    shown = ", ".join(islice(names, MOST))
    return f"{shown} and {len(names) - MOST} more" if len(names) > MOST else shown
