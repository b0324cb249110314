"""Functions that kernels call with indices of a dim, which on a rank are those of its part."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Mapping
from functools import wraps
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from lightning_autotp.capture.recording import is_under_way
from lightning_autotp.layouts.ownership import Run

_RUNS = "autotp_whole_indices"
"""Attribute of a function that is given whole indices: by place, the runs of those that this rank has."""

_WHOLE = "autotp_whole"
"""Attribute of a rank's part of an object: the object."""


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


def part_of_object(place: int, runs: tuple[Run, ...], attribute: str, whole: Any) -> Any:
    """A rank's part of an object that a kernel is given with such a function (a ``BlockMask``).

    Its function is given whole indices. Of its tensors, which have dims like the function's indices before their own,
    it has this rank's; in a trace, where no kernel reads them, they stay as they are.

    Args:
        place: which of the function's arguments is the index, and which dim of the tensors.
        runs: the indices of the whole dim that this rank has, ascending.
        attribute: the object's attribute that is the function.
        whole: the object; ``None`` where a call leaves it out.
    """
    if whole is None:
        return None
    part = copy.copy(whole)
    setattr(part, attribute, with_whole_indices(place, runs, getattr(whole, attribute)))
    for name, tensor in vars(whole).items():
        if has_dim(tensor, place) and not is_under_way():
            setattr(part, name, torch.cat([tensor.narrow(place, start, stop - start) for start, stop in runs], place))
    vars(part)[_WHOLE] = whole_object(whole)
    return part


def has_dim(value: Any, place: int) -> bool:
    """Whether it is a tensor that is not broadcast along this dim."""
    return isinstance(value, Tensor) and value.dim() > place and value.shape[place] > 1


def whole_object(value: Any) -> Any:
    """The object that one is a rank's part of, or itself."""
    return getattr(value, "__dict__", {}).get(_WHOLE, value)


def whole_indices_of(function: Callable[..., Any]) -> tuple[Callable[..., Any], Mapping[int, tuple[Run, ...]]]:
    """The function that one is which is given whole indices, and by place which of them this rank has."""
    runs: Mapping[int, tuple[Run, ...]] = getattr(function, _RUNS, {})
    return (inspect.unwrap(function, stop=lambda one: not hasattr(one, _RUNS)) if runs else function), runs
