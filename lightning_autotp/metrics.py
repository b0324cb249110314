"""torchmetrics for tokens, fed with the logits of a parallel model without gathering them.

torchmetrics' own take vocabulary-sharded logits too, but gather ``[tokens, vocab]`` on every rank. Those here have the
same values and send tensors of ``[tokens]`` only:

* the loss of a token needs the largest logit, the sum of the exponentials and the target's logit, see
  :mod:`~lightning_autotp.parallel.cross_entropy`;
* a target is among the ``k`` best classes exactly if fewer than ``k`` classes come before it, and these are counted
  where they are: the target's logit goes to every rank, and every rank's count is summed.

Whole logits, of a model that is not divided or whose head stays replicated, are taken as well. With ``update`` and
``forward`` the ranks of a tensor-parallel group act together and then have the same state; so a state is to be
synchronized over the data-parallel ranks only, and the strategy sets ``process_group`` to those.
"""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.nn import functional as F

from lightning_autotp.parallel.collectives import keep_first_owned, reduce_values
from lightning_autotp.parallel.embedding import check_indices, local_positions
from lightning_autotp.parallel.logits import VocabParallelLogits, check_vocab_is_last
from lightning_autotp.private.torchmetrics_private import Metric

__all__ = ["CrossEntropy", "Perplexity", "TokenAccuracy"]

_IGNORED = -100


class _TokenMetric(Metric):
    """A mean over tokens: a sum in fp64 and a count, whatever precision the model is converted to."""

    is_differentiable = False
    full_state_update = False
    exact: ClassVar = {"total": torch.float64, "count": torch.int64}  # a long sum in bf16 means nothing
    total: Tensor
    count: Tensor

    def __init__(self, ignore_index: int | None = None, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.ignore_index = ignore_index
        self.add_state("total", torch.zeros((), dtype=torch.float64), dist_reduce_fx="sum")
        self.add_state("count", torch.zeros((), dtype=torch.int64), dist_reduce_fx="sum")

    def update(self, preds: Tensor, target: Tensor) -> None:
        """Take a batch into account. Collective over the tensor-parallel ranks if the logits are sharded.

        Args:
            preds: logits ``[batch, seq, vocab]`` or ``[tokens, vocab]``: any dims, the vocabulary last.
            target: classes ``[batch, seq]`` or ``[tokens]``, the same on every tensor-parallel rank.

        Raises:
            ValueError: if the shapes do not fit, or the vocabulary is not the last dim.
            TypeError: if the logits are not floating-point numbers, or the targets not integers.
            IndexError: for a target that is no class (on an accelerator: an assertion on the device).
        """
        _check(preds, target)
        classes = preds.shape[-1]
        preds, target = preds.reshape(-1, classes), target.reshape(-1).long()
        counted = (
            torch.ones_like(target, dtype=torch.bool) if self.ignore_index is None else target != self.ignore_index
        )
        check_indices(
            target,
            ~counted | ((target >= 0) & (target < classes)),
            f"targets must be classes of the whole vocabulary, in [0, {classes}), or ignore_index={self.ignore_index}",
        )
        self.total = self.total + self._values(preds, target, counted).sum(dtype=torch.float64)
        self.count = self.count + counted.sum()

    def _values(self, preds: Tensor, target: Tensor, counted: Tensor) -> Tensor:
        """What is summed, zero for tokens that do not count: ``[tokens, vocab], [tokens], [tokens] -> [tokens]``."""
        raise NotImplementedError


class CrossEntropy(_TokenMetric):
    """The mean loss of all tokens of all batches: ``F.cross_entropy`` on all of them at once.

    The mean of the batches' losses is something else where batches have different numbers of tokens.

    Args:
        ignore_index: targets with this value count for nothing; Hugging Face's labels use -100.
        **kwargs: of :class:`torchmetrics.Metric`.

    Example:
        >>> metric = CrossEntropy(ignore_index=-100)
        >>> metric.update(torch.zeros(2, 3, 8), torch.tensor([[1, 2, -100], [7, 0, 3]]))
        >>> metric.compute()  # log(8)
        tensor(2.0794)
    """

    higher_is_better = False

    def _values(self, preds: Tensor, target: Tensor, counted: Tensor) -> Tensor:
        logits = preds.to(torch.promote_types(preds.dtype, torch.float32))
        target = target.masked_fill(~counted, _IGNORED)
        return F.cross_entropy(logits, target, ignore_index=_IGNORED, reduction="none")

    def compute(self) -> Tensor:
        """The mean over the tokens, ``[]`` in fp32; nan without tokens."""
        return (self.total / self.count).float()


class Perplexity(CrossEntropy):
    """``torchmetrics.text.Perplexity``: e to the power of the mean loss of a token.

    Computed in fp32 from logits of any precision. Where torchmetrics' softmax underflows to zero, and its perplexity
    becomes infinite, this one is finite.

    Args:
        ignore_index: targets with this value count for nothing; Hugging Face's labels use -100.
        **kwargs: of :class:`torchmetrics.Metric`.

    Example:
        >>> metric = Perplexity(ignore_index=-100)
        >>> metric.update(torch.zeros(2, 3, 8), torch.tensor([[1, 2, -100], [7, 0, 3]]))
        >>> metric.compute()
        tensor(8.)
    """

    def compute(self) -> Tensor:
        """The perplexity, ``[]`` in fp32; nan without tokens."""
        return (self.total / self.count).exp().float()


class TokenAccuracy(_TokenMetric):
    """The share of tokens whose target is among the ``top_k`` classes with the largest logits.

    That is ``torchmetrics.classification.MulticlassAccuracy(num_classes, top_k, average="micro")``. Of equal logits the
    lower class comes first, as for ``argmax``; ``topk``, which torchmetrics uses for more than one, promises nothing. A
    logit that is nan comes before all others, and a target whose logit is nan is never right.

    Args:
        top_k: how many classes are looked at.
        ignore_index: targets with this value count for nothing; Hugging Face's labels use -100.
        **kwargs: of :class:`torchmetrics.Metric`.

    Raises:
        ValueError: if ``top_k`` is not a positive number.

    Example:
        >>> metric = TokenAccuracy(top_k=2)
        >>> metric.update(torch.tensor([[0.1, 0.7, 0.2], [0.5, 0.1, 0.4]]), torch.tensor([2, 1]))
        >>> metric.compute()
        tensor(0.5000)
    """

    higher_is_better = True

    def __init__(self, top_k: int = 1, ignore_index: int | None = None, **kwargs: Any) -> None:
        super().__init__(ignore_index, **kwargs)
        if top_k < 1:
            raise ValueError(f"top_k must be at least 1, not {top_k}")
        self.top_k = top_k

    def _values(self, preds: Tensor, target: Tensor, counted: Tensor) -> Tensor:
        return (_classes_before(preds, target.masked_fill(~counted, 0)) < self.top_k) & counted

    def compute(self) -> Tensor:
        """The share, ``[]`` in fp32; 0 without tokens, as torchmetrics has it."""
        return (self.total / self.count.clamp(min=1)).float()


def _classes_before(logits: Tensor, target: Tensor) -> Tensor:
    """How many classes have a larger logit than the target, or an equal one and a lower index.

    ``[tokens, vocab], [tokens] -> [tokens]``. Collective if the logits are sharded: two all-reduces of ``[tokens]``.
    """
    if not isinstance(logits, VocabParallelLogits):
        of_target = logits.gather(1, target.unsqueeze(1))
        return _count_before(logits, of_target, torch.arange(logits.shape[1], device=logits.device), target)
    local, ownership, group = logits.local, logits.ownership, logits.group
    positions, mine = local_positions(target, ownership, group.rank)
    exact = torch.promote_types(local.dtype, torch.float32)
    if local.shape[1]:
        found = local.gather(1, positions.unsqueeze(1)).squeeze(1).to(exact).masked_fill(~mine, 0)
    else:  # a rank without classes takes part all the same
        found = torch.zeros_like(target, dtype=exact)
    of_target = reduce_values(found, group).to(local.dtype)  # exact: the other ranks add zeros
    runs = ownership.held[group.rank] or ((0, 0),)
    classes = torch.cat([torch.arange(start, stop, device=local.device) for start, stop in runs])
    if ownership.is_shared:  # a class that several ranks hold counts on the first of them
        first = keep_first_owned(torch.ones_like(classes, dtype=torch.bool), 0, ownership, group.rank)
        local, classes = local[:, first], classes[first]
    return reduce_values(_count_before(local, of_target.unsqueeze(1), classes, target), group)


def _count_before(logits: Tensor, of_target: Tensor, classes: Tensor, target: Tensor) -> Tensor:
    """``[tokens, n], [tokens, 1], [n], [tokens] -> [tokens]``: how many of the ``n`` classes come before the target."""
    larger = ~(logits <= of_target)  # nan, too
    return (larger | ((logits == of_target) & (classes < target.unsqueeze(1)))).sum(1)


def _check(preds: Tensor, target: Tensor) -> None:
    if not preds.is_floating_point():
        raise TypeError(f"preds are logits, floating-point numbers, but these are {preds.dtype}")
    if target.is_floating_point() or target.is_complex():
        raise TypeError(f"targets are classes, integers, but these are {target.dtype}")
    if preds.dim() < 2 or tuple(preds.shape[:-1]) != tuple(target.shape):
        raise ValueError(
            f"logits of shape {tuple(preds.shape)} need targets of shape {tuple(preds.shape[:-1])}, not"
            f" {tuple(target.shape)}: the vocabulary is the last dim"
        )
    check_vocab_is_last(preds)
