"""Sizes as people read them."""

from __future__ import annotations


def in_units(size: int) -> str:
    """Bytes with three digits: ``9.53 MiB``."""
    amount, unit = float(size), "bytes"
    for larger in ("KiB", "MiB", "GiB", "TiB"):
        if amount < 1000:
            break
        amount, unit = amount / 1024, larger
    return f"{size} bytes" if unit == "bytes" else f"{amount:#.3g} {unit}".replace(". ", " ")
