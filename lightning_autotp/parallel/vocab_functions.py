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
    total = all_reduce(powers.sum(dim), group)
    is_none = total == 0  # all are -inf, where the logarithm has no derivative
    return (total.masked_fill(is_none, 1).log() + largest).masked_fill(is_none, -torch.inf)


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
    if not part.shape[dim]:  # a rank without classes takes part all the same, in derivatives of derivatives as well
        return all_reduce(part.new_zeros(classes.shape) + part.sum(), group)
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


def top(x: Tensor, dim: int, k: int, ownership: Ownership, group: TPGroup) -> tuple[Tensor, Tensor]:
    """``x.topk(k, dim)``, the values without a gradient: ``[..., k, ...]`` each, the same on every rank.

    ``k`` numbers and classes of each rank are gathered. Of equal values any may be taken, as torch has it.
    """
    part, alone = one_owner_each(x.detach(), dim, ownership, group.rank)
    held = torch.tensor(alone.indices(group.rank), device=x.device, dtype=torch.long)
    values, positions = part.topk(min(k, part.shape[dim]), dim)
    missing = list(values.shape)
    missing[dim] = min(k, max(alone.local_sizes)) - values.shape[dim]  # of a rank with few classes
    values = torch.cat([values, x.new_full(missing, -torch.inf)], dim)
    classes = torch.cat([held[positions], positions.new_zeros(missing)], dim)
    values, at = torch.cat(gather_values(values, group).unbind(), dim).topk(k, dim)
    return values, torch.cat(gather_values(classes, group).unbind(), dim).gather(dim, at)


def log_sum_exp_without(x: Tensor, dim: int, classes: Tensor, ownership: Ownership, group: TPGroup) -> Tensor:
    """``logsumexp`` over all classes but some, which are others at each position: ``[...]``, Invariant.

    Args:
        x: this rank's part.
        dim: where the vocabulary is.
        classes: those that do not count, any number in ``dim``, the same on every rank.
        ownership: which classes each rank has.
        group: the tensor-parallel group.
    """
    part, alone = one_owner_each(x, dim, ownership, group.rank)
    size = part.shape[dim]
    positions, mine = local_positions(classes, alone, group.rank)
    shape = [length + (at == dim) for at, length in enumerate(part.shape)]  # one more, for those of other ranks
    left_out = torch.zeros(shape, dtype=torch.bool, device=x.device)
    left_out = left_out.scatter(dim, positions.masked_fill(~mine, size), True).narrow(dim, 0, size)
    return log_sum_exp(part.masked_fill(left_out, -torch.inf), dim, alone, group)


def _largest_value(x: Tensor, dim: int, group: TPGroup) -> Tensor:
    """The largest element along the vocabulary, a constant: ``[...]``. It cancels out wherever it is used."""
    x = x.detach()
    shape = [size for at, size in enumerate(x.shape) if at != dim]
    return reduce_values(x.amax(dim) if x.shape[dim] else x.new_full(shape, -torch.inf), group, "max")
