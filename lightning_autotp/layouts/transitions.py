"""Every change of a tensor's type over the ranks, as one table.

A row per pair of types says what the change is called in a trace, and what goes over the wire in forward and in
backward. The solver prices it, the plan counts it, the proof looks for it, and
:mod:`~lightning_autotp.parallel.collectives` has the two functions that do it, under the same pair.
"""

from __future__ import annotations

from dataclasses import dataclass

from lightning_autotp.layouts.types import Layout

Pair = tuple[str, str]
"""The letters of two types, such as ``("P", "I")``."""


@dataclass(frozen=True)
class Transition:
    """A change of type.

    Attributes:
        source: letter of the type before.
        target: letter of the type after.
        forward: the collective that the forward pass needs (``"all_reduce"``, ``"all_gather"``,
            ``"reduce_scatter"``), or empty.
        backward: the one that the backward pass needs, or empty.
    """

    source: str
    target: str
    forward: str = ""
    backward: str = ""

    @property
    def pair(self) -> Pair:
        """Its key in :data:`TRANSITIONS`."""
        return self.source, self.target

    @property
    def name(self) -> str:
        """What it is called in a trace, such as ``partial_to_invariant``."""
        return f"{_WORDS[self.source]}_to_{_WORDS[self.target]}"

    @property
    def collectives(self) -> tuple[str, ...]:
        """What goes over the wire in one training step: forward, then backward."""
        return tuple(kind for kind in (self.forward, self.backward) if kind)

    def __str__(self) -> str:
        return f"{self.source} -> {self.target}"


_WORDS = {"I": "invariant", "R": "replicate", "P": "partial", "S": "shard"}

TRANSITIONS: dict[Pair, Transition] = {
    row.pair: row
    for row in (
        #           from  to   forward           backward
        Transition("I", "R", "",               "all_reduce"),  # Megatron's f
        Transition("P", "I", "all_reduce",     ""),  # Megatron's g
        Transition("P", "R", "all_reduce",     "all_reduce"),
        Transition("S", "I", "all_gather",     ""),
        Transition("S", "R", "all_gather",     "reduce_scatter"),
        Transition("I", "S", "",               "all_gather"),
        Transition("R", "S", "",               ""),
        Transition("I", "P", "",               ""),
        Transition("R", "P", "",               ""),
        Transition("R", "I", "",               ""),
        Transition("P", "S", "reduce_scatter", "all_gather"),
    )
}  # fmt: skip


def transition(source: Layout, target: Layout) -> Transition:
    """The row for a change between two layouts.

    Raises:
        ValueError: if there is none; between two shards one converts in two steps.
    """
    found = TRANSITIONS.get((source.letter, target.letter))
    if found is None:
        known = ", ".join(f"{a}->{b}" for a, b in sorted(TRANSITIONS))
        raise ValueError(
            f"no conversion from {source} to {target}: there are {known}; convert in two steps, for instance by"
            " gathering to I first"
        )
    return found
