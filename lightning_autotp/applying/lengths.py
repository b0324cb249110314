"""How long the axes are that are sharded over the ranks and whose length the batch gives: the tokens of a sequence.

A rank's part of an unevenly sharded sequence does not tell how long it is. Where it was sharded the whole was there, so
its length is noted, and what gathers it later in that forward reads it, instead of asking the other ranks.
"""

from __future__ import annotations

from lightning_autotp.private.torch_private import is_in_backward


class Lengths:
    """The lengths of sharded axes in a model's last forward; the same on every rank."""

    def __init__(self) -> None:
        self._last: dict[int, int] = {}
        self._several: set[int] = set()

    def note(self, axis: int, units: int) -> None:
        """An axis was sharded that had so many units."""
        if self._last.setdefault(axis, units) != units:
            self._several.add(axis)
            self._last[axis] = units

    def whole(self, axis: int) -> int | None:
        """How many units an axis has.

        ``None`` if that is not known: a backward pass computes activations again, and there were forwards of several
        lengths.
        """
        return None if axis in self._several and is_in_backward() else self._last.get(axis)
