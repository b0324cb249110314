"""Layouts over the ranks to try, and a rank's part of a tensor in them."""

from __future__ import annotations

import torch
from torch import Tensor

from lightning_autotp.layouts.ownership import Ownership
from lightning_autotp.layouts.types import Layout, Shard


def maps(ranks: int) -> dict[str, Ownership]:
    """Ownership maps of every kind: even, uneven, of several runs, shared, and with a rank that holds nothing."""
    sections = tuple(
        tuple((start + rank * 2, start + rank * 2 + 2) for start in (0, ranks * 2)) for rank in range(ranks)
    )
    return {
        "even": Ownership.even(2 * ranks, ranks),
        "uneven": Ownership.even(7, ranks),
        "sections": Ownership(4 * ranks, sections),
        "shared": Ownership(6, (((0, 4),), ((1, 2), (3, 6)), ((0, 1), (2, 5)))[:ranks]),
        "empty": Ownership(5, (*(() for _ in range(ranks - 1)), ((0, 5),))),
        "whole": Ownership.whole(3, ranks),
    }


def part(whole: Tensor, layout: Layout, rank: int) -> Tensor:
    if not isinstance(layout, Shard):
        return whole.clone()
    for dim, ownership in layout.dims:
        whole = whole.index_select(dim, torch.tensor(ownership.indices(rank), dtype=torch.long))
    return whole
