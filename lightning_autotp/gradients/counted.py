"""Quantities over whole tensors of which each rank has a part: every element of the original counts once."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from lightning_autotp.layouts.blocks import Block, index
from lightning_autotp.layouts.ownership import Ownership
from lightning_autotp.layouts.types import Shard
from lightning_autotp.parallel.collectives import all_gather
from lightning_autotp.private.torch_private import foreach_norm
from lightning_autotp.ranks.group import TPGroup


def counted_elements(local: Tensor, blocks: Sequence[Block]) -> Tensor:
    """The elements of this rank's tensor that it owns, in any shape; a copy only where it does not own some.

    Args:
        local: this rank's part of a tensor.
        blocks: what :func:`~lightning_autotp.parameters.local_blocks.counted_blocks` says of it.
    """
    counted = [local[index(block.local)].reshape(-1) for block in blocks]
    if sum(elements.numel() for elements in counted) == local.numel():
        return local
    # What is none of it belongs to its autograd graph all the same, whose backward pass is collective.
    return torch.cat(counted) if counted else local.reshape(-1)[:0]


def from_every_rank(value: Tensor, group: TPGroup) -> Tensor:
    """Every rank's ``value``, the same on every rank: ``[...] -> [ranks, ...]``. Collective, differentiable."""
    if value.dtype == torch.bool:  # not every backend sends these
        return from_every_rank(value.int(), group).bool()
    return all_gather(value.unsqueeze(0), group, Shard(((0, Ownership.even(group.size, group.size)),)))


def whole_norms(elements: Sequence[Tensor], norm_type: float, dtype: torch.dtype, groups: Sequence[TPGroup]) -> Tensor:
    """The norms of whole tensors: ``[tensors]``, the same bits on every rank. One collective for each group.

    Args:
        elements: those of every tensor that this rank owns. The norms are where the first one's are.
        norm_type: any positive number, or infinity.
        dtype: in which the norms are computed.
        groups: the ranks that share the tensors, and perhaps others that share theirs.

    Raises:
        ValueError: if ``norm_type`` is not positive.
    """
    if not norm_type > 0:
        raise ValueError(f"norm_type is {norm_type}; a gradient norm needs a positive one or infinity")
    some = [x for x in elements if x.numel()]
    found = iter(foreach_norm(some, norm_type, dtype=dtype) if some else ())
    each = [next(found) if x.numel() else x.sum(dtype=dtype) for x in elements]
    norms = torch.stack([norm.to(each[0].device) for norm in each]) if each else torch.zeros(0, dtype=dtype)
    # The ranks' norms are gathered, not reduced: every rank computes the same bits, and a NaN stays one.
    for group in groups:
        norms = torch.linalg.vector_norm(from_every_rank(norms, group), norm_type, dim=0)
    return norms
