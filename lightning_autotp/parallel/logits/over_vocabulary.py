"""Functions over the vocabulary that are computed from the ranks' parts: a number or two a token is sent."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from lightning_autotp.parallel.logits.tensor import VocabParallelLogits, arguments_by_name, rewrap, runs
from lightning_autotp.parallel.vocab_functions import (
    at_classes,
    largest,
    log_softmax,
    log_sum_exp,
    softmax,
    top,
    total,
)
from lightning_autotp.torch_functions import functions_of_layers

_WITH_STACK_LEVEL = (F.softmax, F.log_softmax)


def _of_vocabulary(
    args: Sequence[Any], kwargs: Mapping[str, Any], *names: str
) -> tuple[VocabParallelLogits, dict[str, Any]] | None:
    """The logits and the other arguments by name, if the call is along the vocabulary; otherwise ``None``.

    On meta nothing is computed from parts: a trace shows collectives only where the plan has them. Logits at one
    position are gathered as ever: many functions will need them whole.
    """
    given = arguments_by_name(args, kwargs, "input", *names)
    logits, dim = given.pop("input", None), given.get("dim")
    if isinstance(dim, Sequence) and len(dim) == 1:
        dim = dim[0]
    if not isinstance(logits, VocabParallelLogits) or not isinstance(dim, int) or set(given) - {*names}:
        return None
    if logits.is_traced or logits.one_position or not logits.is_floating_point():
        return None
    is_along = -logits.dim() <= dim < logits.dim() and dim % logits.dim() == logits.vocab_dim
    return (logits, given) if is_along else None


def _result_dtype(logits: VocabParallelLogits, func: Callable[..., Any], given: Mapping[str, Any]) -> torch.dtype:
    """That of ``func`` on logits, with ``dtype=`` or under autocast."""
    like = torch.zeros([1] * logits.dim(), dtype=logits.dtype, device=logits.device)
    found: Tensor = func(like, **{name: given[name] for name in ("dim", "dtype") if name in given})
    return found.dtype


def exact(logits: VocabParallelLogits, dtype: torch.dtype | None = None) -> Tensor:
    """This rank's part in the precision that torch computes in before it rounds."""
    return logits.local.to(torch.promote_types(dtype or logits.dtype, torch.float32))


@runs(*functions_of_layers("softmax log_softmax"))
def _softmax(func: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    names = ("dim", "_stacklevel", "dtype") if func in _WITH_STACK_LEVEL else ("dim", "dtype")
    if (call := _of_vocabulary(args, kwargs, *names)) is None:
        return NotImplemented
    logits, given = call
    dtype = _result_dtype(logits, func, given)
    compute = log_softmax if "log" in func.__name__ else softmax
    found = compute(exact(logits, dtype), logits.vocab_dim, logits.ownership, logits.group)
    return rewrap(logits, found.to(dtype), logits.vocab_dim)


@runs(*functions_of_layers("sum mean logsumexp"))
def _reduced(func: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """``sum``, ``mean`` and ``logsumexp`` over any dims; sharded still where the vocabulary is none of them."""
    given = arguments_by_name(args, kwargs, "input", "dim", "keepdim", "dtype")
    logits, dims = given.pop("input", None), given.get("dim")
    if not isinstance(logits, VocabParallelLogits) or logits.one_position or not logits.is_floating_point():
        return NotImplemented
    if set(given) - {"dim", "keepdim", "dtype"}:
        return NotImplemented
    dims = list(range(logits.dim())) if dims is None else list(dims) if isinstance(dims, Sequence) else [dims]
    if not dims or not all(isinstance(dim, int) and -logits.dim() <= dim < logits.dim() for dim in dims):
        return NotImplemented
    dims = sorted({dim % logits.dim() for dim in dims})
    dim = logits.vocab_dim
    if dim not in dims:
        before = 0 if given.get("keepdim") else sum(other < dim for other in dims)
        return rewrap(logits, func(logits.local, **given), dim - before)
    dtype = _result_dtype(logits, func, given)
    if logits.is_traced or not dtype.is_floating_point:
        return NotImplemented
    compute = log_sum_exp if func.__name__ == "logsumexp" else total
    found = compute(exact(logits, dtype), dim, logits.ownership, logits.group).unsqueeze(dim)
    if func.__name__ == "mean":
        found = found / logits.ownership.size
    if len(dims) > 1:
        found = func(found, dims, keepdim=True)
    return (found if given.get("keepdim") else found.squeeze(dims)).to(dtype)


@runs(*functions_of_layers("argmax max"))
def _largest(func: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """``argmax``, and ``max`` over the vocabulary."""
    if (call := _of_vocabulary(args, kwargs, "dim", "keepdim")) is None:
        return NotImplemented
    logits, given = call
    where = logits.vocab_dim, logits.ownership, logits.group
    values, classes = (x.unsqueeze(logits.vocab_dim) for x in largest(logits.local, *where))
    if func.__name__ == "max" and logits.local.requires_grad and torch.is_grad_enabled():
        values = at_classes(logits.local, where[0], classes, *where[1:])
    if not given.get("keepdim"):
        values, classes = values.squeeze(logits.vocab_dim), classes.squeeze(logits.vocab_dim)
    return torch.return_types.max((values, classes)) if func.__name__ == "max" else classes


@runs(*functions_of_layers("topk"))
def _topk(func: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    names = ("k", "dim", "largest", "sorted")
    if (call := _of_vocabulary(args, {"dim": -1, **kwargs} if len(args) < 3 else kwargs, *names)) is None:
        return NotImplemented
    logits, given = call
    where = logits.vocab_dim, logits.ownership, logits.group
    if not isinstance(k := given.get("k"), int) or not 0 < k <= where[1].size or not given.get("largest", True):
        return NotImplemented
    values, classes = top(logits.local, where[0], k, *where[1:])
    if logits.local.requires_grad and torch.is_grad_enabled():
        values = at_classes(logits.local, where[0], classes, *where[1:])
    return torch.return_types.topk((values, classes))


@runs(*functions_of_layers("gather"))
def _gather(func: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    if (call := _of_vocabulary(args, kwargs, "dim", "index")) is None:
        return NotImplemented
    logits, index = call[0], call[1].get("index")
    if not isinstance(index, Tensor) or isinstance(index, VocabParallelLogits) or index.dim() != logits.dim():
        return NotImplemented
    return at_classes(logits.local, logits.vocab_dim, index, logits.ownership, logits.group)
