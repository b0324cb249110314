"""Losses of sharded logits, or log-probabilities."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from lightning_autotp.parallel.cross_entropy import vocab_parallel_cross_entropy
from lightning_autotp.parallel.linear_cross_entropy import vocab_parallel_linear_cross_entropy
from lightning_autotp.parallel.logits.elementwise import pointwise
from lightning_autotp.parallel.logits.over_vocabulary import exact
from lightning_autotp.parallel.logits.tensor import VocabParallelLogits, runs
from lightning_autotp.parallel.vocab_functions import at_classes

_CROSS_ENTROPY = inspect.signature(F.cross_entropy)
_NLL_LOSS = inspect.signature(F.nll_loss)
_KL_DIV = inspect.signature(F.kl_div)


@runs(F.cross_entropy)
def _cross_entropy(func: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    call = _CROSS_ENTROPY.bind(*args, **kwargs)
    call.apply_defaults()
    logits, target, weight = (call.arguments[name] for name in ("input", "target", "weight"))
    stays = (
        isinstance(logits, VocabParallelLogits)
        and logits.vocab_dim == min(1, logits.dim() - 1)
        and not isinstance(target, VocabParallelLogits)
        and not target.is_floating_point()
        and (weight is None or not weight.requires_grad)
        and call.arguments["size_average"] is None
        and call.arguments["reduce"] is None
    )
    if not stays:
        return NotImplemented
    options = {name: call.arguments[name] for name in ("ignore_index", "reduction", "label_smoothing")}
    return cross_entropy(logits, target, weight, **options)


def cross_entropy(logits: VocabParallelLogits, target: Tensor, weight: Tensor | None, **options: Any) -> Tensor:
    """``F.cross_entropy`` of logits ``[tokens, vocab, ...]`` and class indices, in parts where it can. Collective."""
    product = logits.product
    if product is None or logits.ownership.is_shared or torch.compiler.is_compiling():
        return vocab_parallel_cross_entropy(logits.local, target, logits.ownership, logits.group, weight, **options)
    return vocab_parallel_linear_cross_entropy(product, target, logits.ownership, logits.group, weight, **options)


@runs(F.nll_loss)
def _nll_loss(func: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """``F.nll_loss`` of sharded log-probabilities ``[tokens, vocab, ...]``."""
    call = _NLL_LOSS.bind(*args, **kwargs)
    call.apply_defaults()
    logits, target, weight = (call.arguments[name] for name in ("input", "target", "weight"))
    if not isinstance(logits, VocabParallelLogits) or isinstance(target, VocabParallelLogits):
        return NotImplemented
    dim = min(1, logits.dim() - 1)
    is_plain = call.arguments["size_average"] is None and call.arguments["reduce"] is None
    if logits.vocab_dim != dim or logits.is_traced or not is_plain or (weight is not None and weight.requires_grad):
        return NotImplemented
    ignored = target == call.arguments["ignore_index"]
    classes = target.masked_fill(ignored, 0)
    found = at_classes(exact(logits), dim, classes.unsqueeze(dim), logits.ownership, logits.group).squeeze(dim)
    each = torch.ones_like(found) if weight is None else weight.to(found.dtype)[classes]
    each = each.masked_fill(ignored, 0)
    losses = (-found * each).masked_fill(ignored, 0)
    if call.arguments["reduction"] == "none":
        return losses.to(logits.dtype)
    if call.arguments["reduction"] not in ("mean", "sum"):
        return NotImplemented
    summed = losses.sum()
    return (summed / each.sum() if call.arguments["reduction"] == "mean" else summed).to(logits.dtype)


@runs(F.kl_div)
def _kl_div(func: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """``F.kl_div`` of log-probabilities that are sharded alike."""
    call = _KL_DIV.bind(*args, **kwargs)
    call.apply_defaults()
    found, wanted, reduction = (call.arguments[name] for name in ("input", "target", "reduction"))
    if call.arguments["size_average"] is not None or call.arguments["reduce"] is not None:
        return NotImplemented
    options = {"reduction": "none", "log_target": call.arguments["log_target"]}
    each = pointwise(func, (found, wanted), options)
    if each is NotImplemented or reduction == "none":
        return each
    if reduction not in ("sum", "batchmean") or each.is_traced:
        return NotImplemented
    return each.sum() / each.shape[0] if reduction == "batchmean" else each.sum()
