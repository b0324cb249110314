"""Functions that kernels call with indices of a dim, which on a rank are those of its part."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from functools import wraps
from itertools import pairwise
from typing import Any

from lightning_autotp.layouts.ownership import Run

_RUNS = "autotp_whole_indices"
"""Attribute of a function that is given whole indices: by place, the runs of those that this rank has."""


def with_whole_indices(place: int, runs: tuple[Run, ...], function: Callable[..., Any] | None) -> Any:
    """A function that is called with indices of this rank's part of a dim, and reads those of the whole dim.

    Args:
        place: which of its arguments is the index.
        runs: the indices of the whole dim that this rank has, ascending.
        function: the function; ``None`` where a call leaves it out.
    """
    if function is None:
        return None

    @wraps(function)
    def called(*given: Any) -> Any:
        index, begin, end = given[place], runs[0][0], 0
        whole = index + begin
        for (_, stop), (start, _) in pairwise(runs):  # by arithmetic alone, which kernels are compiled from
            end += stop - begin
            begin = start
            whole = whole + (index >= end) * (start - stop)
        return function(*given[:place], whole, *given[place + 1 :])

    vars(called)[_RUNS] = {**vars(called).get(_RUNS, {}), place: runs}
    return called


def whole_indices_of(function: Callable[..., Any]) -> tuple[Callable[..., Any], Mapping[int, tuple[Run, ...]]]:
    """The function that one is which is given whole indices, and by place which of them this rank has."""
    runs: Mapping[int, tuple[Run, ...]] = getattr(function, _RUNS, {})
    return (inspect.unwrap(function, stop=lambda one: not hasattr(one, _RUNS)) if runs else function), runs
