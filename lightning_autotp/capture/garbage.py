"""Garbage collection while models are traced and planned for."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def relaxed_gc() -> Iterator[None]:
    """Traces and plans are many small objects that live long: looking for dead ones takes a quarter of the time."""
    before = gc.get_threshold()
    gc.set_threshold(100_000, 50, 100)
    try:
        yield
    finally:
        gc.set_threshold(*before)
