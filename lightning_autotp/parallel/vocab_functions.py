"""Functions over the whole vocabulary, on this rank's part of it: softmax, log-sum-exp, sums, the largest class.

Each takes ``[..., vocab/tp, ...]`` with the vocabulary in ``dim``, of type Shard, and communicates one or two numbers a
token instead of gathering. A class that several ranks hold counts once. All are collective, also in the backward pass
where one is said to be, and differentiable any number of times.
"""

from __future__ import annotations

import torch
from torch import Tensor

from lightning_autotp.layouts.ownership import Ownership
from lightning_autotp.parallel.collectives import (
    all_reduce,
    all_reduce_replicate,
    gather_values,
    keep_first_owned,
    reduce_values,
)
from lightning_autotp.parallel.cross_entropy import one_owner_each
from lightning_autotp.parallel.embedding import check_indices, local_positions
from lightning_autotp.ranks.group import TPGroup


def log_softmax(x: Tensor, dim: int, ownership: Ownership, group: TPGroup) -> Tensor:
    """This rank's part of ``x.log_softmax(dim)``. The backward is collective."""
    largest = _largest_value(x, dim, group)
    shifted = x - largest.unsqueeze(dim)
    total = all_reduce_replicate(keep_first_owned(shifted.exp(), dim, ownership, group.rank).sum(dim), group)
    return shifted - total.log().unsqueeze(dim)


def softmax(x: Tensor, dim: int, ownership: Ownership, group: TPGroup) -> Tensor:
    """This rank's part of ``x.softmax(dim)``. The backward is collective."""
    powers = (x - _largest_value(x, dim, group).unsqueeze(dim)).exp()
    total = all_reduce_replicate(keep_first_owned(powers, dim, ownership, group.rank).sum(dim), group)
    return powers / total.unsqueeze(dim)


def log_sum_exp(x: Tensor, dim: int, ownership: Ownership, group: TPGroup) -> Tensor:
    """``x.logsumexp(dim)`` of the whole vocabulary, ``[...]``, Invariant."""
    largest = _largest_value(x, dim, group)
    largest = largest.masked_fill(largest.isinf(), 0)  # exp(inf - inf) would be nan
    powers = keep_first_owned((x - largest.unsqueeze(dim)).exp(), dim, ownership, group.rank)
    return all_reduce(powers.sum(dim), group).log() + largest


def total(x: Tensor, dim: int, ownership: Ownership, group: TPGroup) -> Tensor:
    """``x.sum(dim)`` over the whole vocabulary, ``[...]``, Invariant."""
    return all_reduce(keep_first_owned(x, dim, ownership, group.rank).sum(dim), group)


def at_classes(x: Tensor, dim: int, classes: Tensor, ownership: Ownership, group: TPGroup) -> Tensor:
    """``x.gather(dim, classes)``, Invariant.

    Args:
        x: this rank's part.
        dim: where the vocabulary is.
        classes: classes of the whole vocabulary, any number in ``dim``, the same on every rank.
        ownership: which classes each rank has.
        group: the tensor-parallel group.

    Raises:
        IndexError: for a class that does not exist, on every rank (on an accelerator: an assertion on the device).
    """
    check_indices(
        classes,
        (classes >= 0) & (classes < ownership.size),
        f"index must be of the whole vocabulary, in [0, {ownership.size})",
    )
    part, ownership = one_owner_each(x, dim, ownership, group.rank)
    positions, mine = local_positions(classes, ownership, group.rank)
    if not part.shape[dim]:  # a rank without classes takes part all the same
        return all_reduce(x.new_zeros(classes.shape), group)
    return all_reduce(part.gather(dim, positions).masked_fill(~mine, 0), group)


def largest(x: Tensor, dim: int, ownership: Ownership, group: TPGroup) -> tuple[Tensor, Tensor]:
    """``x.max(dim)``, the values without a gradient: ``[...]`` each, the same on every rank.

    Of equal values that of the lowest class is taken, and nan is larger than all numbers, as for ``torch.argmax``.
    """
    x = x.detach()
    held = torch.tensor(ownership.indices(group.rank), device=x.device)
    if x.shape[dim]:
        value, position = x.max(dim)
        of_rank = held[position]
    else:  # comes after everything: no class is that high
        value = x.new_full([size for at, size in enumerate(x.shape) if at != dim], -torch.inf)
        of_rank = torch.full_like(value, ownership.size, dtype=torch.long)
    values, classes = gather_values(value, group), gather_values(of_rank, group)
    most = values.amax(0)
    is_most = (values == most) | (values.isnan() & most.isnan())
    return most, classes.masked_fill(~is_most, ownership.size).amin(0)


def _largest_value(x: Tensor, dim: int, group: TPGroup) -> Tensor:
    """The largest element along the vocabulary, a constant: ``[...]``. It cancels out wherever it is used."""
    x = x.detach()
    shape = [size for at, size in enumerate(x.shape) if at != dim]
    return reduce_values(x.amax(dim) if x.shape[dim] else x.new_full(shape, -torch.inf), group, "max")
