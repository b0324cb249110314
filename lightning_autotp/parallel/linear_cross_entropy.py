"""Cross entropy of a head's logits without the logits: from hidden states and this rank's rows of the head.

Tokens are taken a part at a time. With hidden states ``h [n, hidden]``, the rows ``W [vocab/tp, hidden]`` and ``f`` for
what is done with the logits on their way to the loss, a part is::

    x  = f(h W^T)                   [n, vocab/tp], of this part only
    dx = dloss/dx                   in the place of x, see parallel/cross_entropy.py
    dh = f'(dx) W                   of type Partial: summed over the ranks where the hidden states went to the ranks
    dW += f'(dx)^T h                in fp32, or the weight's dtype if that is more precise

A loss that is summed (or a mean, which is that divided by a number) has the same gradient for every token but for a
factor that the backward pass brings. So ``dh`` and ``dW`` are made in the forward pass, where ``x`` is, and the
backward multiplies them in their place. With ``reduction="none"`` every token has a factor of its own; then the
backward makes ``x`` again, which is one more product, and so does a second backward pass of a retained graph. Second
derivatives (``create_graph=True``) are taken of all logits at once, as without this module.

Each part needs the same two all-reduces that :mod:`~lightning_autotp.parallel.cross_entropy` does once.

That gradients can be made in the forward is the idea of Liger (https://arxiv.org/abs/2410.10989), after what ``apex``
did for the loss alone. ``torch.nn.functional.linear_cross_entropy`` (2.13) does that, too; it knows neither a cut
vocabulary nor label smoothing, nor what a model does between the head and the loss.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import wraps
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function
from torch.nn import functional as F

from lightning_autotp.layouts.ownership import Ownership
from lightning_autotp.parallel.cross_entropy import Targets, check, prepared, reduced, token_losses
from lightning_autotp.parallel.head_product import ElementwiseStep, HeadProduct, gradients_of
from lightning_autotp.ranks.group import TPGroup

PART_TOKENS = 1024
"""Tokens of a part, at least: with fewer, adding to the weight's gradient takes longer than the products."""

PART_LOGITS = 2**26
"""Logits of a part, where it has more tokens: 256 MiB in fp32."""


SUM_CLASSES = 8192
"""Rows of the weight's gradient that a product in a lower precision is added to at once."""


def vocab_parallel_linear_cross_entropy(
    product: HeadProduct,
    target: Tensor,
    ownership: Ownership,
    group: TPGroup,
    weight: Tensor | None = None,
    ignore_index: int = -100,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
) -> Tensor:
    """``F.cross_entropy`` of a head's product, of which only some tokens' logits are in memory at once.

    The forward is collective, the backward is not.

    Args:
        product: of hidden states ``[tokens, hidden]``, ``[tokens, hidden, d1, ...]`` or ``[hidden]``.
        target: class indices of the whole vocabulary, ``[tokens]``, ``[tokens, d1, ...]`` or ``[]``, Invariant.
        ownership: which classes each rank has; each has one owner.
        group: the tensor-parallel group.
        weight: ``[vocab]``, a weight for every class of the whole vocabulary; no gradient flows to it.
        ignore_index: targets with this value count for nothing.
        reduction: ``"mean"``, ``"sum"`` or ``"none"``.
        label_smoothing: how much of the target is spread over all classes, in [0, 1].

    Returns:
        The loss as :func:`~lightning_autotp.parallel.cross_entropy.vocab_parallel_cross_entropy` returns it.

    Raises:
        IndexError: for a target that is no class, on every rank (on an accelerator: an assertion on the device).
        ValueError: for shapes or options that do not fit.
        RuntimeError: if what the product is made of has changed.
    """
    check(product.like, target, ownership, group, weight, reduction, label_smoothing)
    product.use_in_loss()
    like = product.like.new_empty(0, 0)
    targets = prepared(like, target.reshape(-1), ownership, group, weight, ignore_index, label_smoothing)
    features = product.features.movedim(product.dim, -1).reshape(-1, product.weight.shape[1])
    sources = (features, product.weight, product.bias)
    wanted = tuple(
        torch.is_grad_enabled() and product.differentiable and x is not None and x.requires_grad for x in sources
    )
    work = _Work(product.dtype, product.steps, targets, wanted)
    with torch.set_grad_enabled(any(wanted)):
        function = _TokenLosses if reduction == "none" else _SummedLoss
        loss: Tensor = function.apply(*sources, work)
    product.prepare_before(loss)
    return reduced(loss.view(target.shape) if reduction == "none" else loss, targets, reduction, like)


@dataclass(frozen=True)
class _Work:
    """What is to be done, and all that it needs but hidden states and parameters.

    Attributes:
        dtype: of the head's product.
        steps: what is done with it before the loss.
        targets: what the loss needs besides.
        wanted: of hidden states, weight and bias, which need a gradient.
    """

    dtype: torch.dtype
    steps: tuple[ElementwiseStep, ...]
    targets: Targets
    wanted: tuple[bool, ...]

    @property
    def precision(self) -> torch.dtype:
        """In which the loss is computed."""
        return self.targets.weight.dtype

    def logits(self, features: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """``[n, hidden] -> [n, vocab/tp]``: all of them at once, after all steps."""
        bias = None if bias is None else bias.to(self.dtype)
        return self.after_steps(F.linear(features.to(self.dtype), weight.to(self.dtype), bias))

    def after_steps(self, x: Tensor) -> Tensor:
        """``[n, vocab/tp] -> [n, vocab/tp]``: the product after all steps."""
        for step in self.steps:
            x = step(x)
        return x

    def spans(self) -> Iterator[slice]:
        """The tokens of each part: the same on every rank."""
        tokens = len(self.targets.classes)
        most = max(PART_TOKENS, PART_LOGITS // max(1, *self.targets.ownership.local_sizes))
        count = -(-tokens // most)
        for part in range(count):
            yield slice(part * tokens // count, (part + 1) * tokens // count)


class _TokenChunk:
    """The logits of some tokens, in memory of their own, with the way back from them to the product's gradient.

    Attributes:
        span: which tokens.
        features: their hidden states ``[n, hidden]``.
        weight: ``[vocab/tp, hidden]``.
        targets: what the loss of these tokens needs besides.
        x: the logits ``[n, vocab/tp]``, to be overwritten.
    """

    def __init__(self, work: _Work, span: slice, features: Tensor, weight: Tensor, bias: Tensor | None) -> None:
        self.span, self.features, self.weight = span, features, weight
        self.targets = work.targets.rows(span.start, span.stop)
        product = F.linear(features, weight, bias)
        # What only widens has the same gradient, rounded.
        self._steps: tuple[Tensor, Tensor] | None = None
        if any(work.wanted) and not all(step.widens for step in work.steps):
            with torch.enable_grad():
                logits = work.after_steps(product.requires_grad_())
            self._steps = logits, product
            self.x = logits.detach().to(work.precision, copy=True)
        else:
            self.x = work.after_steps(product).to(work.precision)

    def gradient(self, log_sum: Tensor, grad: Tensor) -> Tensor:
        """The gradient of the product ``[n, vocab/tp]``, from that of the losses; :attr:`x` is gone then.

        Args:
            log_sum: the logarithms of the sums over all classes of :attr:`x`, which is ``exp(logits - largest)`` now.
            grad: the gradient of the losses ``[n]``.
        """
        gradient = self.targets.gradient_(self.x, log_sum.neg().exp_(), grad)
        steps, self._steps = self._steps, None
        del self.x
        if steps is None:
            return gradient.to(self.features.dtype)
        logits, product = steps
        (gradient,) = torch.autograd.grad(logits, product, gradient.to(logits.dtype))
        return gradient


def _parts(work: _Work, features: Tensor, weight: Tensor, bias: Tensor | None) -> Iterator[_TokenChunk]:
    """One part after the other; each has to be freed by the caller before the next is made."""
    weight, bias = weight.to(work.dtype), None if bias is None else bias.to(work.dtype)
    for span in work.spans():
        yield _TokenChunk(work, span, features[span].to(work.dtype), weight, bias)


class _Gradients:
    """The gradients of hidden states, weight and bias, added up part by part."""

    def __init__(self, work: _Work, features: Tensor, weight: Tensor, bias: Tensor | None) -> None:
        of_features, of_weight, of_bias = work.wanted
        precision = torch.promote_types(work.dtype, torch.float32)
        self.features = torch.empty_like(features, dtype=work.dtype) if of_features else None
        # The first part is written, and not added.
        empty = torch.empty_like if len(features) else torch.zeros_like
        self.weight = empty(weight, dtype=precision) if of_weight else None
        self.bias = torch.zeros_like(bias, dtype=precision) if of_bias and bias is not None else None

    def add(self, part: _TokenChunk, log_sum: Tensor, grad: Tensor) -> None:
        """What a part adds; see :meth:`_TokenChunk.gradient`."""
        gradient, is_first = part.gradient(log_sum, grad), part.span.start == 0
        if self.features is not None:
            torch.mm(gradient, part.weight, out=self.features[part.span])
        if self.weight is not None:
            if self.weight.dtype == gradient.dtype:
                self.weight.addmm_(gradient.T, part.features, beta=0 if is_first else 1)  # with 0 nothing is read
            else:
                rows = zip(self.weight.split(SUM_CLASSES), gradient.T.split(SUM_CLASSES), strict=True)
                for total, of_rows in rows:
                    product = of_rows @ part.features
                    _ = total.copy_(product) if is_first else total.add_(product)
        if self.bias is not None:
            self.bias.add_(gradient.sum(0, dtype=self.bias.dtype))

    def all(self) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        """Those that are wanted."""
        return self.features, self.weight, self.bias


def _without_autocast(function: Callable[..., Any]) -> Callable[..., Any]:
    """The products have their dtype already, whatever autocast does where the loss is computed, or its gradient."""

    @wraps(function)
    def run(ctx: Any, tensor: Tensor, *others: Any) -> Any:
        with torch.autocast(tensor.device.type, enabled=False):
            return function(ctx, tensor, *others)

    return run


class _SummedLoss(Function):
    """``[tokens, hidden], [vocab/tp, hidden], [vocab/tp] -> []``; the gradients are made in the forward. Collective."""

    @staticmethod
    @_without_autocast
    def forward(ctx: Any, features: Tensor, weight: Tensor, bias: Tensor | None, work: _Work) -> Tensor:
        gradients = _Gradients(work, features, weight, bias)
        losses, largest, log_sum = _of_tokens(work)
        for part in _parts(work, features, weight, bias):
            span = part.span
            losses[span], largest[span], log_sum[span] = part.targets.losses(part.x, 1)
            if any(work.wanted):
                gradients.add(part, log_sum[span], torch.ones_like(log_sum[span]))
            del part
        ctx.save_for_backward(features, weight, bias, largest, log_sum)
        ctx.work, ctx.gradients = work, gradients.all()
        return losses.sum()

    @staticmethod
    @_without_autocast
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        features, weight, bias, largest, log_sum = ctx.saved_tensors
        work: _Work = ctx.work
        if torch.is_grad_enabled():  # under create_graph=True
            return *_differentiable(work, features, weight, bias, grad, is_summed=True), None
        # The mean over no tokens is nan, but has a gradient of zeros.
        grad = grad.masked_fill(work.targets.ignored.all(), 0)
        gradients, ctx.gradients = ctx.gradients, None
        if gradients is None:  # another backward pass of a graph that was retained: the first one took them
            gradients = _made_again(work, features, weight, bias, largest, log_sum, torch.ones_like(log_sum))
        both = zip(gradients, (features, weight, bias), strict=True)
        return *(_scaled_(x, grad, of.dtype) if x is not None else None for x, of in both), None


class _TokenLosses(Function):
    """``[tokens, hidden], [vocab/tp, hidden], [vocab/tp] -> [tokens]``. The forward is collective."""

    @staticmethod
    @_without_autocast
    def forward(ctx: Any, features: Tensor, weight: Tensor, bias: Tensor | None, work: _Work) -> Tensor:
        losses, largest, log_sum = _of_tokens(work)
        for part in _parts(work, features, weight, bias):
            span = part.span
            losses[span], largest[span], log_sum[span] = part.targets.losses(part.x, 1)
            del part
        ctx.save_for_backward(features, weight, bias, largest, log_sum)
        ctx.work = work
        return losses

    @staticmethod
    @_without_autocast
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        features, weight, bias, largest, log_sum = ctx.saved_tensors
        work: _Work = ctx.work
        if torch.is_grad_enabled():  # under create_graph=True
            return *_differentiable(work, features, weight, bias, grad, is_summed=False), None
        gradients = _made_again(work, features, weight, bias, largest, log_sum, grad)
        both = zip(gradients, (features, weight, bias), strict=True)
        return *(x.to(of.dtype) if x is not None else None for x, of in both), None


def _of_tokens(work: _Work) -> tuple[Tensor, Tensor, Tensor]:
    """Room for what :meth:`Targets.losses` finds."""
    losses, largest, log_sum = (torch.empty_like(work.targets.weight) for _ in range(3))
    return losses, largest, log_sum


def _made_again(
    work: _Work,
    features: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    largest: Tensor,
    log_sum: Tensor,
    grad: Tensor,
) -> tuple[Tensor | None, ...]:
    """The gradients, from those of the losses ``[tokens]``, with one more product. Not collective.

    Args:
        work: what was done in the forward.
        features: ``[tokens, hidden]``.
        weight: ``[vocab/tp, hidden]``.
        bias: ``[vocab/tp]``.
        largest: the largest logits ``[tokens]``, of all classes.
        log_sum: the logarithms of the sums of ``exp(logits - largest)``.
        grad: the gradient of the losses.
    """
    gradients = _Gradients(work, features, weight, bias)
    for part in _parts(work, features, weight, bias):
        part.x.sub_(largest[part.span].unsqueeze(1)).exp_()
        gradients.add(part, log_sum[part.span], grad[part.span])
        del part
    return gradients.all()


def _scaled_(x: Tensor, factor: Tensor, dtype: torch.dtype) -> Tensor:
    """``x * factor`` in a dtype, multiplied in the factor's; in the place of ``x``, if that has the dtype."""
    result = x if x.dtype == dtype else torch.empty_like(x, dtype=dtype)
    for piece, into in zip(x.split(PART_TOKENS), result.split(PART_TOKENS), strict=True):
        into.copy_(piece.to(factor.dtype) * factor)
    return result


def _differentiable(
    work: _Work, features: Tensor, weight: Tensor, bias: Tensor | None, grad: Tensor, *, is_summed: bool
) -> Sequence[Tensor | None]:
    """The gradients as differentiable functions of everything, from all logits at once. Collective."""

    def loss(features: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        losses = token_losses(work.logits(features, weight, bias), 1, work.targets)
        return losses.sum() if is_summed else losses

    return gradients_of(loss, (features, weight, bias), grad, work.wanted)
