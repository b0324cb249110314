"""Cross entropy on logits whose classes (the vocabulary) are cut over the ranks, without ever gathering them.

For a token with logits ``x_c``, target ``y``, class weights ``w`` and label smoothing ``e`` over ``C`` classes,
``F.cross_entropy`` is, with ``m = max_c x_c`` and ``lse = log sum_c exp(x_c - m)``::

    loss = (1 - e) w_y (lse - (x_y - m)) + e/C (lse sum_c w_c - sum_c w_c (x_c - m))
    dloss/dx_c = ((1 - e) w_y + e/C sum_k w_k) softmax_c - (1 - e) w_y [c = y] - e/C w_c

and ``"mean"`` divides the sum over the tokens by the sum of their ``w_y``. Of these only ``m`` and the three sums over
classes (``sum exp``, ``x_y``, ``sum w x``) need the other ranks: two all-reduces of one and two (three when smoothing)
numbers a token. The gradient of this rank's logits needs nothing more, so the backward does not communicate (but for
second derivatives, for which ``lse`` is summed again). Everything
is computed in fp32 (or the logits' own precision if higher), and what is kept for the backward are the logits
themselves, not their softmax.

The loss is of type Invariant: every rank has the same one. (Megatron-LM's has label smoothing that differs between the
ranks; here every number that mixes classes is reduced first.)
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import Function

from lightning_autotp.capture import recording
from lightning_autotp.layouts.ownership import Ownership, merge_runs, owner_of
from lightning_autotp.parallel.collectives import (
    all_reduce_replicate,
    copy_to_tensor_parallel,
    owner_rows,
    reduce_values,
    take_owned,
)
from lightning_autotp.parallel.embedding import check_indices, local_positions
from lightning_autotp.private.torch_private import has_values
from lightning_autotp.ranks.group import TPGroup
from lightning_autotp.solving.implementations import Implementation


@dataclass(frozen=True)
class Targets:
    """What a loss is computed from besides the logits. Every class has one owner.

    Attributes:
        classes: a class everywhere, ``[N, ...]``.
        ignored: where the class counts for nothing.
        weight: the class's weight, zero where ignored, in the dtype of the computation.
        class_weight: the weights of this rank's classes, along the logits' class dim.
        total_weight: the sum of all classes' weights.
        label_smoothing: how much of the target is spread over all classes.
        ownership: which classes each rank has.
        group: the tensor-parallel group.
    """

    classes: Tensor
    ignored: Tensor
    weight: Tensor
    class_weight: Tensor | None
    total_weight: Tensor | float
    label_smoothing: float
    ownership: Ownership
    group: TPGroup

    def rows(self, start: int, stop: int) -> Targets:
        """Those of some tokens."""
        part = slice(start, stop)
        return replace(self, classes=self.classes[part], ignored=self.ignored[part], weight=self.weight[part])

    def losses(self, x: Tensor, dim: int) -> tuple[Tensor, Tensor, Tensor]:
        """The losses from logits ``x``, which become ``exp(x - max)``. Collective.

        Args:
            x: ``[N, C/tp, ...]``, in the dtype of the computation.
            dim: where its classes are.

        Returns:
            The losses ``[N, ...]``, zero where ignored; the largest logits; the logarithms of ``sum exp(x - max)``.
        """
        positions, mine = local_positions(self.classes, self.ownership, self.group.rank)
        # A rank without classes still takes part in the reductions.
        largest = x.amax(dim) if x.shape[dim] else torch.full_like(self.weight, float("-inf"))
        largest = reduce_values(largest, self.group, "max")
        x.sub_(largest.unsqueeze(dim))
        if x.shape[dim]:
            target_logit = x.gather(dim, positions.unsqueeze(dim)).squeeze(dim).masked_fill(~mine, 0)
        else:
            target_logit = torch.zeros_like(self.weight)
        smoothed = (
            [(x if self.class_weight is None else x * self.class_weight).sum(dim)] if self.label_smoothing else []
        )
        sums = [x.exp_().sum(dim), target_logit, *smoothed]
        sums = list(reduce_values(torch.stack(sums), self.group).unbind(0))
        log_sum = sums[0].log()
        loss = (1 - self.label_smoothing) * self.weight * (log_sum - sums[1])
        if self.label_smoothing:
            loss = loss + self.label_smoothing / self.ownership.size * (log_sum * self.total_weight - sums[2])
        return loss.masked_fill(self.ignored, 0), largest, log_sum

    def gradient_factors(self, grad: Tensor) -> tuple[Tensor, Tensor]:
        """For a gradient of the losses: the factors of ``-[c = y]`` and of ``-w_c`` in that of the logits."""
        grad = grad.masked_fill(self.ignored, 0)
        return (1 - self.label_smoothing) * self.weight * grad, self.label_smoothing / self.ownership.size * grad

    def gradient_(self, x: Tensor, scale: Tensor, grad: Tensor) -> Tensor:
        """The gradient of the logits ``[N, C/tp]``, in the place of ``x``, of which ``scale * x`` is the softmax."""
        on_target, on_all = self.gradient_factors(grad)
        result = x.mul_((scale * (on_target + on_all * self.total_weight)).unsqueeze(1))
        if self.label_smoothing:
            result.sub_(on_all.unsqueeze(1) * (1 if self.class_weight is None else self.class_weight))
        if result.shape[1]:
            positions, mine = local_positions(self.classes, self.ownership, self.group.rank)
            result.scatter_add_(1, positions.unsqueeze(1), on_target.masked_fill(~mine, 0).neg().unsqueeze(1))
        return result


class _TokenLoss(Function):
    """Per-token loss ``[N, C/tp, ...] -> [N, ...]`` in the targets' dtype, zero where ignored. Collective."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, dim: int, targets: Targets) -> Tensor:
        loss, largest, log_sum = targets.losses(logits.to(targets.weight.dtype, copy=True), dim)
        ctx.save_for_backward(logits, largest + log_sum)
        ctx.targets, ctx.dim = targets, dim
        return loss

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        logits, log_sum = ctx.saved_tensors
        targets, dim = ctx.targets, ctx.dim
        if torch.is_grad_enabled():  # under create_graph=True
            grad = copy_to_tensor_parallel(grad, targets.group)
            log_sum = _log_sum(logits.to(targets.weight.dtype), log_sum, dim, targets.group)
        on_target, on_all = targets.gradient_factors(grad)
        softmax = (logits.to(targets.weight.dtype) - log_sum.unsqueeze(dim)).exp()
        result = softmax * (on_target + on_all * targets.total_weight).unsqueeze(dim)
        if targets.label_smoothing:
            result = result - on_all.unsqueeze(dim) * (1 if targets.class_weight is None else targets.class_weight)
        if result.shape[dim]:
            positions, mine = local_positions(targets.classes, targets.ownership, targets.group.rank)
            result = result.scatter_add(
                dim, positions.unsqueeze(dim), on_target.masked_fill(~mine, 0).neg().unsqueeze(dim)
            )
        return result.to(logits.dtype), None, None


def token_losses(logits: Tensor, dim: int, targets: Targets) -> Tensor:
    """The losses of logits ``[N, C/tp, ...]`` with their classes in ``dim``: ``[N, ...]``, Invariant. Collective."""
    losses: Tensor = _TokenLoss.apply(logits, dim, targets)
    return losses


def _log_sum(x: Tensor, log_sum: Tensor, dim: int, group: TPGroup) -> Tensor:
    """``log_sum``, Replicate, as a differentiable function of the logits. Collective."""
    total = all_reduce_replicate((x - log_sum.unsqueeze(dim)).exp().sum(dim), group)  # ones, but for rounding
    return log_sum + total.log()


def vocab_parallel_cross_entropy(
    logits: Tensor,
    target: Tensor,
    ownership: Ownership,
    group: TPGroup,
    weight: Tensor | None = None,
    ignore_index: int = -100,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
) -> Tensor:
    """``F.cross_entropy`` on this rank's classes. The forward is collective, the backward is not.

    Args:
        logits: ``[tokens, vocab/tp]``, ``[tokens, vocab/tp, d1, ...]`` or ``[vocab/tp]``, of type Shard.
        target: class indices of the whole vocabulary, ``[tokens]``, ``[tokens, d1, ...]`` or ``[]``, Invariant.
        ownership: which classes each rank has.
        group: the tensor-parallel group.
        weight: ``[vocab]``, a weight for every class of the whole vocabulary; no gradient flows to it.
        ignore_index: targets with this value count for nothing.
        reduction: ``"mean"``, ``"sum"`` or ``"none"``.
        label_smoothing: how much of the target is spread over all classes, in [0, 1].

    Returns:
        The loss, Invariant, of the logits' dtype (fp32 under autocast), as ``F.cross_entropy``'s. The mean over no
        tokens is nan, as there.

    Raises:
        IndexError: for a target that is no class, on every rank (on an accelerator: an assertion on the device).
        ValueError: for shapes or options that do not fit.
    """
    dim = 0 if logits.dim() == 1 else 1
    check(logits, target, ownership, group, weight, reduction, label_smoothing)
    if not has_values(logits):
        inputs = [logits, target] if weight is None else [logits, target, weight]
        shape = target.shape if reduction == "none" else ()
        return recording.record(VOCAB_CROSS_ENTROPY.primitive, inputs, shape, ownership.digest)

    logits, ownership = one_owner_each(logits, dim, ownership, group.rank)
    targets = prepared(logits, target, ownership, group, weight, ignore_index, label_smoothing)
    loss = token_losses(logits, dim, targets)
    if reduction != "none":
        loss = loss.sum()
    return reduced(loss, targets, reduction, logits)


def prepared(
    logits: Tensor,
    target: Tensor,
    ownership: Ownership,
    group: TPGroup,
    weight: Tensor | None,
    ignore_index: int,
    label_smoothing: float,
) -> Targets:
    """The targets of a loss on logits with this dtype and number of dims, checked. Not collective.

    Raises:
        IndexError: for a target that is no class, on every rank (on an accelerator: an assertion on the device).
    """
    dim = 0 if logits.dim() == 1 else 1
    ignored = target == ignore_index
    check_indices(
        target,
        ignored | ((target >= 0) & (target < ownership.size)),
        f"targets must be classes of the whole vocabulary, in [0, {ownership.size}), or ignore_index={ignore_index}",
    )
    target = target.long().masked_fill(ignored, 0)
    precision = torch.promote_types(logits.dtype, torch.float32)
    class_weight: Tensor | None = None
    total_weight: Tensor | float = float(ownership.size)
    if weight is None:
        target_weight = (~ignored).to(precision)
    else:
        weight = weight.to(precision)
        target_weight = weight[target].masked_fill(ignored, 0)
        class_weight = take_owned(weight, 0, ownership, group.rank).view(-1, *[1] * (logits.dim() - dim - 1))
        total_weight = weight.sum()
    return Targets(target, ignored, target_weight, class_weight, total_weight, label_smoothing, ownership, group)


def reduced(loss: Tensor, targets: Targets, reduction: str, logits: Tensor) -> Tensor:
    """The loss that ``F.cross_entropy`` would return on logits of this dtype, from the losses or their sum."""
    if reduction == "mean":
        loss = loss / targets.weight.sum()
    return loss if torch.is_autocast_enabled(targets.classes.device.type) else loss.to(logits.dtype)


class VocabParallelCrossEntropyLoss(nn.CrossEntropyLoss):
    """``nn.CrossEntropyLoss`` on logits ``[tokens, vocab/tp, ...]``. The forward is collective.

    Args:
        ownership: which classes each rank has.
        group: the tensor-parallel group.
        weight: see :func:`vocab_parallel_cross_entropy`.
        ignore_index: see there.
        reduction: see there.
        label_smoothing: see there.
    """

    def __init__(
        self,
        ownership: Ownership,
        group: TPGroup,
        weight: Tensor | None = None,
        *,
        ignore_index: int = -100,
        reduction: str = "mean",
        label_smoothing: float = 0.0,
    ) -> None:
        super().__init__(weight, ignore_index=ignore_index, reduction=reduction, label_smoothing=label_smoothing)
        self.ownership, self.group = ownership, group

    def forward(self, input: Tensor, target: Tensor) -> Tensor:
        """``[tokens, vocab/tp, ...], [tokens, ...] -> []``, or ``[tokens, ...]`` without reduction. Collective."""
        return vocab_parallel_cross_entropy(
            input,
            target,
            self.ownership,
            self.group,
            self.weight,
            self.ignore_index,
            self.reduction,
            self.label_smoothing,
        )

    def extra_repr(self) -> str:
        """What ``repr`` shows: whole and local number of classes, and the options."""
        return (
            f"{self.ownership.size} -> {self.ownership.local_size(self.group.rank)}, ignore_index={self.ignore_index}, "
            f"reduction={self.reduction!r}, label_smoothing={self.label_smoothing}"
        )


def one_owner_each(logits: Tensor, dim: int, ownership: Ownership, rank: int) -> tuple[Tensor, Ownership]:
    """The classes that this rank is the first owner of, so that a shared class counts once."""
    rows = owner_rows(ownership)
    if all(len(ranks) == 1 for _, _, ranks in rows):
        return logits, ownership
    pieces = [logits.narrow(dim, 0, 0)]
    offset = 0
    for start, stop, ranks in rows:
        if rank == owner_of(ranks):
            pieces.append(logits.narrow(dim, offset, stop - start))
        if rank in ranks:
            offset += stop - start
    held = tuple(
        merge_runs([(start, stop) for start, stop, ranks in rows if owner_of(ranks) == owner])
        for owner in range(ownership.ranks)
    )
    return torch.cat(pieces, dim), Ownership(ownership.size, held)


def check(
    logits: Tensor,
    target: Tensor,
    ownership: Ownership,
    group: TPGroup,
    weight: Tensor | None,
    reduction: str,
    label_smoothing: float,
) -> None:
    """Raise a ValueError for shapes or options of a loss that do not fit."""
    dim = 0 if logits.dim() == 1 else 1
    local = ownership.local_size(group.rank)
    if logits.dim() == 0 or logits.shape[dim] != local:
        raise ValueError(
            f"logits of shape {tuple(logits.shape)} should have this rank's {local} of {ownership.size} classes "
            f"in dim {dim}"
        )
    if target.is_floating_point():
        raise ValueError("targets that are probabilities need whole logits: gather them and call F.cross_entropy")
    expected = (*logits.shape[:dim], *logits.shape[dim + 1 :])
    if tuple(target.shape) != expected:
        raise ValueError(
            f"target has shape {tuple(target.shape)}, but logits of shape {tuple(logits.shape)} need {expected}"
        )
    if weight is not None and weight.shape != (ownership.size,):
        raise ValueError(
            f"weight has shape {tuple(weight.shape)}: it needs one weight for each of {ownership.size} classes"
        )
    if weight is not None and weight.requires_grad:
        raise ValueError("class weights are constants here, but these require a gradient: detach them")
    if reduction not in ("mean", "sum", "none"):
        raise ValueError(f"reduction is 'mean', 'sum' or 'none', not {reduction!r}")
    if not 0 <= label_smoothing <= 1:
        raise ValueError(f"label_smoothing must be in [0, 1], not {label_smoothing}")


def _communicates(shapes: Mapping[str, Sequence[float]]) -> tuple[tuple[str, float], ...]:
    """The largest logit of every token; then two sums, in fp32."""
    tokens = math.prod(shapes["target"])
    return ("all_reduce", 4 * tokens), ("all_reduce", 8 * tokens)


VOCAB_CROSS_ENTROPY = Implementation(
    name="vocab cross-entropy",
    operator="aten.cross_entropy_loss.default",
    operand="self",
    dims=(0, 1),
    primitive="vocab_parallel_cross_entropy",
    reads=("self", "target", "weight"),
    shown="self",
    communicates=_communicates,
)
