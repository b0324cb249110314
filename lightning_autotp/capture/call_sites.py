"""Where a call of a torch function stands in the code, seen from inside a torch-function handler."""

from __future__ import annotations

import linecache
import os
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path
from types import FrameType
from typing import Any

import torch
import torch.nn.functional as F

from lightning_autotp.private.torch_private import (
    HANDING_OVER,
    call_by_call,
    decided_while_compiling,
    traced_frames,
)

STAND_IN = "<stand-in>"
"""File of code that stands in for a function's own, and hands its calls over to handlers of torch functions."""

_ATTENTION = F.multi_head_attention_forward
_ATTENTION_BY_CALL = call_by_call(_ATTENTION)


def by_call(func: Any, kwargs: Mapping[str, Any]) -> Any:
    """The same function, of which a torch-function handler sees every call; ``None`` for one that is a single call.

    What counts as code of the module that calls it, with projections, sizes and a mask of its own, is attention. Not
    with a matrix for each projection: there it compares the matrices' shapes with those of the whole ones.
    """
    return _ATTENTION_BY_CALL if func is _ATTENTION and not kwargs.get("use_separate_proj_weight") else None


def calling_frame(func: Any, frame: FrameType) -> FrameType:
    """The frame that called ``func``, seen from a torch-function handler.

    Passed over are other handlers on the way, the functions of torch that hand over to them, and the frames of
    ``func`` itself where it is written in Python.
    """
    while frame.f_back is not None and (
        frame.f_code.co_name == "__torch_function__"
        or frame.f_code.co_filename in _HANDING_OVER
        or frame.f_code is getattr(func, "__code__", None)
    ):
        frame = frame.f_back
    return frame


def frames_from(frame: FrameType | None) -> Iterator[FrameType]:
    """A frame and those that called it, innermost first."""
    while frame is not None:
        yield frame
        frame = frame.f_back


def is_in_function(frame: FrameType) -> bool:
    """Whether code runs inside of an autograd function that is none of torch's own, as those of checkpoints are."""
    functions = (each.f_locals["cls"] for each in frames_from(frame) if each.f_code is _APPLY)
    return any(not function.__module__.startswith("torch.") for function in functions)


_APPLY = torch.autograd.Function.apply.__code__


def call_key(frame: FrameType, func: Any) -> tuple[str, int, str]:
    """File, line and function of a call, as a :class:`~lightning_autotp.layouts.places.CallSite` has them."""
    file = str(frame.f_globals.get("__name__", frame.f_code.co_filename))
    return file, frame.f_lineno, str(getattr(func, "__name__", func))


@decided_while_compiling
def key_while_compiling(func: Any) -> tuple[str, int, str]:
    """The :func:`call_key` of the call that ``torch.compile`` is tracing, seen from a torch-function handler."""
    own = getattr(func, "__code__", None)
    for code, names, line in traced_frames():
        if code.co_name != "__torch_function__" and code.co_filename not in _HANDING_OVER and code is not own:
            return str(names.get("__name__", code.co_filename)), line, str(getattr(func, "__name__", func))
    raise RuntimeError(f"{func} is not called by code that torch.compile traces")


def call_leaves(value: Any) -> list[Any]:
    """The leaves of a call's arguments or result; slices are looked into."""
    if isinstance(value, slice):
        return [value.start, value.stop, value.step]
    if isinstance(value, tuple | list):
        return [leaf for item in value for leaf in call_leaves(item)]
    if isinstance(value, dict):
        return [leaf for item in value.values() for leaf in call_leaves(item)]
    return [value]


def grouped_leaves(args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[tuple[int, ...], list[Any]]:
    """The leaves of a call's arguments, and for each of them which argument it is in."""
    leaves = [call_leaves(value) for value in (*args, *kwargs.values())]
    groups = tuple(number for number, found in enumerate(leaves) for _ in found)
    return groups, [leaf for found in leaves for leaf in found]


def source_line(frame: FrameType) -> str:
    """File, line and code of the innermost line of user code."""
    shown = next((one for one in frames_from(frame) if is_user_code(one.f_code.co_filename)), frame)
    file, line = shown.f_code.co_filename, shown.f_lineno
    return f"{file.rsplit('/', 1)[-1]}:{line}: {linecache.getline(file, line).strip()}"


@cache
def is_user_code(file: str) -> bool:
    """Whether a file belongs neither to torch nor to this package, wherever these are installed."""
    return not file.startswith((*_OWN_DIRECTORIES, "<"))


def is_this_package(file: str) -> bool:
    """Whether a file belongs to this package."""
    return file.startswith(_PACKAGE)


_HANDING_OVER = HANDING_OVER | {STAND_IN}
_PACKAGE = os.path.join(str(Path(__file__).parent.parent), "")
_OWN_DIRECTORIES = os.path.join(os.path.dirname(torch.__file__), ""), _PACKAGE
