"""Which gradients of whole parameters are summed over the ranks together."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

BUCKET_BYTES = 25 * 2**20
"""A bucket is closed when it has at least this size."""


def in_buckets(sizes: Sequence[int]) -> Iterator[slice]:
    """Slices of a list of gradients of one dtype, by their sizes in bytes, in order; each is one all-reduce."""
    start = total = 0
    for place, size in enumerate(sizes, 1):
        total += size
        if total >= BUCKET_BYTES or place == len(sizes):
            yield slice(start, place)
            start, total = place, 0
