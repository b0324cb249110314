"""Sizes as people read them."""

from __future__ import annotations

GIB = 1024**3
"""In what sizes of GPUs are printed. Their makers, and the files of machines, count in powers of ten."""


def in_units(size: float) -> str:
    """Bytes with three digits: ``9.53 MiB``."""
    unit, factor = unit_of(size)
    return f"{size:.0f} bytes" if factor == 1 else f"{size / factor:#.3g} {unit}".replace(". ", " ")


def unit_of(size: float) -> tuple[str, int]:
    """The unit in which so many bytes have at most three digits before the point, and its own bytes."""
    unit, factor = "bytes", 1
    for larger in ("KiB", "MiB", "GiB", "TiB"):
        if size / factor < 1000:
            break
        unit, factor = larger, 1024 * factor
    return unit, factor
