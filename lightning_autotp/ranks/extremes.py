"""Floating-point numbers that ranks tell each other by a reduction of integers to the largest of all ranks."""

from __future__ import annotations

import math
import struct
from collections.abc import Sequence

LOWEST = -(2**63)
"""What a rank that says nothing contributes to the largest of several numbers."""


def bounds(value: float | None) -> tuple[int, int]:
    """Two integers of 64 bits; those that are largest over the ranks are :func:`extremes` of what the ranks have.

    Args:
        value: this rank's number; ``None`` if it has none.
    """
    if value is None:
        return LOWEST, LOWEST
    value = math.inf if math.isnan(value) else value
    return _ordered(value), _ordered(-value)


def extremes(largest: Sequence[int]) -> tuple[float, float] | None:
    """The largest and the smallest number that any rank has; ``None`` if no rank has one.

    Args:
        largest: the largest of all ranks' :func:`bounds`.
    """
    above, below = largest
    return None if LOWEST in (above, below) else (_value(above), -_value(below))


def are_alike(largest: Sequence[int], relative: float, absolute: float = 0.0) -> bool:
    """Whether the ranks' numbers differ by no more than this; true if no rank has one.

    Args:
        largest: the largest of all ranks' :func:`bounds`.
        relative: a share of the number that is largest in size.
        absolute: what they may differ by besides.
    """
    found = extremes(largest)
    if found is None:
        return True
    above, below = found
    return above == below or above - below <= absolute + relative * max(abs(above), abs(below))


def _ordered(value: float) -> int:
    """A number's bits as an integer, so that a larger one is larger."""
    (bits,) = struct.unpack("<q", struct.pack("<d", value))
    return int(bits) if bits >= 0 else -int(bits & (2**63 - 1))


def _value(ordered: int) -> float:
    bits = ordered if ordered >= 0 else -ordered - 2**63
    return float(struct.unpack("<d", struct.pack("<q", bits))[0])
