"""Where a call of a torch function stands in the code, seen from inside a torch-function handler."""

from __future__ import annotations

import linecache
from types import FrameType
from typing import Any


def calling_frame(func: Any, frame: FrameType) -> FrameType:
    """The frame that called ``func``, seen from a torch-function handler.

    A function written in Python hands over to its handler by itself: its own frames are passed over.
    """
    while frame.f_back is not None and (
        frame.f_code.co_filename.endswith(_PASSED_OVER) or frame.f_code is getattr(func, "__code__", None)
    ):
        frame = frame.f_back
    return frame


_PASSED_OVER = (
    "/lightning_autotp/calls.py",
    "/torch/overrides.py",
    "/torch/_tensor.py",
    "/torch/_jit_internal.py",
    "/torch/_ops.py",
)


def call_key(frame: FrameType, func: Any) -> tuple[str, int, str]:
    """File, line and function of a call, as a :class:`~lightning_autotp.graph.CallSite` has them."""
    file = str(frame.f_globals.get("__name__", frame.f_code.co_filename))
    return file, frame.f_lineno, str(getattr(func, "__name__", func))


def call_leaves(value: Any) -> list[Any]:
    """The leaves of a call's arguments or result; slices are looked into."""
    if isinstance(value, slice):
        return [value.start, value.stop, value.step]
    if isinstance(value, tuple | list):
        return [leaf for item in value for leaf in call_leaves(item)]
    if isinstance(value, dict):
        return [leaf for item in value.values() for leaf in call_leaves(item)]
    return [value]


def source_line(frame: FrameType) -> str:
    """File, line and code of the innermost line of user code."""
    found: FrameType | None = frame
    while found is not None and any(part in found.f_code.co_filename for part in ("/torch/", "/lightning_autotp/")):
        found = found.f_back
    shown = found or frame
    file, line = shown.f_code.co_filename, shown.f_lineno
    return f"{file.rsplit('/', 1)[-1]}:{line}: {linecache.getline(file, line).strip()}"
