"""The fastest plan that fits into the memory of a GPU: what is stored there, and what a stored byte is charged.

Nothing is charged at first, which gives the fastest plan. Where that takes too much, the price of
:func:`~lightning_autotp.solving.cost.Profile.memory` is raised until the plan fits: it is the Lagrange multiplier of
the limit, of which a few values are tried (Everett 1963, "Generalized Lagrange multiplier method"). Between two values
there may be a faster plan that fits, too.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import replace

from lightning_autotp.layouts.types import Invariant, Layout, local_shape
from lightning_autotp.solving.cost import Profile

_FACTORS = (0.0, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0)
_TIMES_STORED = 4
"""A parameter that is trained, its gradient and AdamW's two states, all of the parameter's dtype."""


def profiles(profile: Profile) -> Iterator[Profile]:
    """The profile with rising prices of memory, from none at all."""
    for factor in _FACTORS:
        yield replace(profile, matrix_price=factor * profile.matrix_price)


def least_stored(parameters: Iterable[tuple[int, bool]], ranks: int) -> float:
    """Bytes that the rank that stores the most has in any plan: its share of all.

    Args:
        parameters: the bytes of each, and whether it is trained.
        ranks: size of the group.
    """
    return sum(size * (_TIMES_STORED if is_trained else 1) for size, is_trained in parameters) / ranks


def stored_bytes(
    parameters: Iterable[tuple[tuple[str, ...], tuple[int, ...], int]],
    layouts: Mapping[str, Layout],
    trained: Collection[str],
    ranks: int,
) -> int:
    """Bytes that parameters, gradients and optimizer states take on the rank that stores the most.

    Args:
        parameters: for every parameter its names, whole shape and bytes per element.
        layouts: by a parameter's first name; whole where there is none.
        trained: first names of the parameters that have gradients.
        ranks: size of the group.
    """
    of_ranks = [0] * ranks
    for (name, *_), shape, itemsize in parameters:
        times = itemsize * (_TIMES_STORED if name in trained else 1)
        layout = layouts.get(name, Invariant())
        for rank in range(ranks):
            of_ranks[rank] += times * math.prod(local_shape(shape, layout, rank))
    return max(of_ranks)
