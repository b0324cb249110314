"""Parts of losses, computed from the logits of a parallel model without gathering them."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from lightning_autotp.layouts.types import Invariant, Shard
from lightning_autotp.parallel.collectives import convert, copy_to_tensor_parallel
from lightning_autotp.parallel.logits import VocabParallelLogits, check_vocab_is_last
from lightning_autotp.parallel.vocab_functions import at_classes, log_sum_exp, log_sum_exp_without, top, total
from lightning_autotp.ranks.group import TPGroup

__all__ = ["kl_divergence", "token_log_probs"]

_PADDING = -100


def token_log_probs(logits: Tensor, tokens: Tensor) -> Tensor:
    """The log-probability that the logits give to one token at each position.

    That is ``logits.log_softmax(-1).gather(-1, tokens.unsqueeze(-1)).squeeze(-1)``, which losses of preferences and
    policies (DPO, PPO, GRPO, distillation on samples) begin with, of vocabulary-sharded logits as of ordinary ones. The
    former are not gathered: three numbers a token are all-reduced, see
    :mod:`~lightning_autotp.parallel.cross_entropy`. Differentiable any number of times. Collective if the logits are
    sharded; the backward pass is not, but for second derivatives.

    Args:
        logits: ``[batch, seq, vocab]``: any dims, the vocabulary last. Shift them and the tokens against each other
            before: slices stay sharded.
        tokens: ids of the whole vocabulary, ``[batch, seq]``, integers, the same on every rank. Those that are -100, as
            labels have it for padding and prompts, get 0.0 and no gradient.

    Returns:
        ``[batch, seq]``, float32 or wider whatever the logits are, the same on every rank.

    Raises:
        ValueError: if the shapes do not fit, or the logits are sharded in another dim than the last.
        TypeError: if the logits are not floating-point numbers, or the tokens not integers.
        IndexError: for an id that is not in the vocabulary and not -100, on every rank (on an accelerator: an assertion
            on the device).

    Example:
        >>> token_log_probs(torch.zeros(1, 3, 8), torch.tensor([[5, 0, -100]]))  # -log(8)
        tensor([[-2.0794, -2.0794,  0.0000]])
    """
    _check(logits, tokens)
    exact = logits.to(torch.promote_types(logits.dtype, torch.float32))
    losses = F.cross_entropy(
        exact.reshape(-1, logits.shape[-1]),
        tokens.reshape(-1).long(),
        ignore_index=_PADDING,
        reduction="none",
    )
    return 0 - losses.view(tokens.shape)  # and so not -0.0 for padding


def kl_divergence(student: Tensor, teacher: Tensor, *, top_k: int | None = None) -> Tensor:
    """How far a student's distribution of the next token is from a teacher's, at each position.

    That is ``(p * (p.log() - q.log())).sum(-1)`` with ``p = teacher.softmax(-1)`` and ``q = student.softmax(-1)``, of
    vocabulary-sharded logits as of ordinary ones: distillation from a teacher that is divided, too. The former are not
    gathered: five numbers a token are all-reduced in the forward pass, and one in the backward pass if the teacher
    needs a gradient. Differentiable any number of times. Collective if the logits of either are sharded, the backward
    pass as well. Words that the teacher rules out, with logits of -inf, count nothing.

    Args:
        student: ``[..., vocab]``.
        teacher: of the same shape; divided alike, or whole and the same on every rank.
        top_k: tell apart only so many words at each position, those that the teacher finds most likely, and take all
            others for one: the divergence of the two distributions over ``top_k + 1`` outcomes, which is at most that
            over all words. ``top_k`` numbers and words of each rank are gathered then.

    Returns:
        ``[...]``, float32 or wider whatever the logits are, the same on every rank.

    Raises:
        ValueError: if the shapes differ, the two are divided differently, or in another dim than the last; or if
            ``top_k`` is no number of words.
        TypeError: if they are not floating-point numbers.

    Example:
        >>> kl_divergence(torch.zeros(1, 3, 8), torch.zeros(1, 3, 8))
        tensor([[0., 0., 0.]])
    """
    for logits in (student, teacher):
        _check_floating(logits)
        check_vocab_is_last(logits)
    if student.shape != teacher.shape or not student.dim():
        raise ValueError(
            f"the student's logits have the shape {tuple(student.shape)}, the teacher's {tuple(teacher.shape)}: they"
            " must be of the same tokens and the same vocabulary"
        )
    if top_k is not None and not 0 < top_k <= student.shape[-1]:
        raise ValueError(f"top_k={top_k}: it must be a number of words, from 1 to {student.shape[-1]}")
    sharded = next((one for one in (student, teacher) if isinstance(one, VocabParallelLogits)), None)
    if sharded is None:
        p, q = (one.to(torch.promote_types(one.dtype, torch.float32)).log_softmax(-1) for one in (teacher, student))
        if top_k is not None and top_k < p.shape[-1]:
            words = p.topk(top_k, -1).indices
            p, q = (torch.cat([x.gather(-1, words), _others(x, words)], -1) for x in (p, q))
        return (p.exp() * _difference(p, q)).sum(-1)
    group, shard = sharded.group, sharded.shard
    ((dim, ownership),) = shard.dims
    ours, theirs = (_part(one, shard, group) for one in (student, teacher))
    if top_k is not None and top_k < ownership.size:
        _, words = top(theirs, dim, top_k, ownership, group)
        several = []
        for part in (theirs, ours):
            chosen = at_classes(part, dim, words, ownership, group)
            others = log_sum_exp_without(part, dim, words, ownership, group).unsqueeze(dim)
            several.append(torch.cat([chosen, others], dim).log_softmax(dim))
        p, q = several
        return (p.exp() * _difference(p, q)).sum(dim)
    partition = log_sum_exp(theirs, dim, ownership, group)
    p = (theirs - copy_to_tensor_parallel(partition, group).unsqueeze(-1)).exp()
    mean = total(p * _difference(theirs, ours), dim, ownership, group)
    return mean - partition + log_sum_exp(ours, dim, ownership, group)


def _difference(theirs: Tensor, ours: Tensor) -> Tensor:
    """The teacher's minus the student's, and zero where the teacher rules a word out: its probability is zero there."""
    is_out = theirs == -torch.inf
    return theirs.masked_fill(is_out, 0.0) - ours.masked_fill(is_out, 0.0)


def _others(log_probs: Tensor, words: Tensor) -> Tensor:
    """The logarithm of the probability of all words but some: ``[..., vocab], [..., k] -> [..., 1]``."""
    found = log_probs.scatter(-1, words, -torch.inf).logsumexp(-1, keepdim=True)
    return found


def _part(logits: Tensor, shard: Shard, group: TPGroup) -> Tensor:
    """This rank's part, ``[..., vocab/tp]``."""
    if not isinstance(logits, VocabParallelLogits):
        part = convert(logits, Invariant(), shard, group)
    elif logits.shard == shard:
        part = logits.local
    else:
        raise ValueError(
            f"the student's and the teacher's logits are divided differently, as {shard} and {logits.shard}: give both"
            ' the same plan for their heads, as with cut={"lm_head.weight": 0}'
        )
    return part.to(torch.promote_types(part.dtype, torch.float32))


def _check_floating(logits: Tensor) -> None:
    if not logits.is_floating_point():
        raise TypeError(f"logits are floating-point numbers, but these are {logits.dtype}")


def _check(logits: Tensor, tokens: Tensor) -> None:
    _check_floating(logits)
    if tokens.is_floating_point() or tokens.is_complex() or tokens.dtype == torch.bool:
        raise TypeError(f"tokens are ids, integers, but these are {tokens.dtype}")
    if logits.dim() < 1 or tuple(logits.shape[:-1]) != tuple(tokens.shape):
        raise ValueError(
            f"logits of shape {tuple(logits.shape)} need tokens of shape {tuple(logits.shape[:-1])}, one id for each"
            f" position, not {tuple(tokens.shape)}: the vocabulary is the last dim"
        )
    check_vocab_is_last(logits)
