"""Views that leave the vocabulary whole: the same view of the local part, or of the hidden states."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from lightning_autotp.parallel.logits.tensor import (
    VocabParallelLogits,
    arguments_by_name,
    rewrap,
    rewrap_product,
    runs,
)
from lightning_autotp.parallel.whole_dim import after_index, after_reshape
from lightning_autotp.torch_functions import functions_of_layers


def _view(logits: VocabParallelLogits, view: Callable[[Tensor], Tensor], dim: int) -> VocabParallelLogits:
    """A view that leaves the vocabulary whole, in ``dim`` afterwards, and means the same for any number of classes."""
    if (product := logits.product) is not None:
        return rewrap_product(logits, product.viewed(view(product.features), dim, view(product.like)))
    return rewrap(logits, view(logits.local), dim)


@runs(*functions_of_layers("view reshape"))
def _reshape(func: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """``view`` and ``reshape`` to sizes among which the vocabulary is whole."""
    logits, *sizes = args
    if len(sizes) == 1 and isinstance(sizes[0], Sequence):
        sizes = list(sizes[0])
    if kwargs or not sizes or not all(isinstance(size, int) for size in sizes):
        return NotImplemented
    dim = after_reshape(logits.shape, logits.vocab_dim, sizes)
    if dim is None:
        return NotImplemented

    def sized(x: Tensor) -> list[int]:
        own = x.shape[logits.vocab_dim]
        # Among no elements (of a rank without classes) no size can be inferred.
        found = sizes if own else [size if size != -1 else -logits.numel() // math.prod(sizes) for size in sizes]
        return [own if at == dim and size != -1 else size for at, size in enumerate(found)]

    if (product := logits.product) is not None:
        # Hidden states may lie otherwise in memory than the logits would.
        features = product.features.reshape(sized(product.features))
        return rewrap_product(logits, product.viewed(features, dim, func(product.like, sized(product.like))))
    return rewrap(logits, func(logits.local, sized(logits.local)), dim)


@runs(*functions_of_layers("flatten"))
def _flatten(func: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    bound = dict(zip(("self", "start_dim", "end_dim"), args, strict=False)) | kwargs
    logits = bound.pop("self", None)
    if not isinstance(logits, VocabParallelLogits) or not logits.dim() or set(bound) - {"start_dim", "end_dim"}:
        return NotImplemented
    start, end = bound.get("start_dim", 0) % logits.dim(), bound.get("end_dim", -1) % logits.dim()
    shape = list(logits.shape)
    sizes = [*shape[:start], math.prod(shape[start : end + 1]), *shape[end + 1 :]]
    dim = after_reshape(shape, logits.vocab_dim, sizes)
    return NotImplemented if dim is None else _view(logits, lambda x: x.flatten(start, end), dim)


@runs(*functions_of_layers("permute"))
def _permute(func: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    logits, *dims = args
    if len(dims) == 1 and isinstance(dims[0], Sequence):
        dims = list(dims[0])
    if kwargs or len(dims) != logits.dim():
        return NotImplemented
    order = [dim % logits.dim() for dim in dims]
    return _view(logits, lambda x: func(x, dims), order.index(logits.vocab_dim))


@runs(*functions_of_layers("transpose swapaxes"))
def _transpose(func: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    if kwargs or len(args) != 3:
        return NotImplemented
    logits = args[0]
    first, second = (dim % logits.dim() for dim in args[1:])
    moved = {first: second, second: first}.get(logits.vocab_dim, logits.vocab_dim)
    return _view(logits, lambda x: func(x, *args[1:]), moved)


@runs(*functions_of_layers("unsqueeze"))
def _unsqueeze(func: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    if kwargs or len(args) != 2:
        return NotImplemented
    logits, dim = args
    at = dim % (logits.dim() + 1)
    return _view(logits, lambda x: func(x, dim), logits.vocab_dim + (at <= logits.vocab_dim))


@runs(*functions_of_layers("squeeze"))
def _squeeze(func: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    if kwargs or len(args) > 2:
        return NotImplemented
    logits = args[0]
    asked = range(logits.dim()) if len(args) == 1 else args[1] if isinstance(args[1], Sequence) else [args[1]]
    dims = sorted({dim % logits.dim() for dim in asked if logits.shape[dim] == 1})
    if logits.vocab_dim in dims:
        return NotImplemented
    # Named dims, because a rank's part of the vocabulary may have one element where the whole has more.
    before = sum(dim < logits.vocab_dim for dim in dims)
    return _view(logits, lambda x: x.squeeze(tuple(dims)), logits.vocab_dim - before)


@runs(Tensor.__getitem__)
def _getitem(func: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """Indexing that leaves the vocabulary whole: ``[..., :-1, :]``, ``[:, -k:]``, ``[mask]``, ``[batch, position]``."""
    logits, index = args
    if not isinstance(logits, VocabParallelLogits):
        return NotImplemented
    found = after_index(logits.shape, logits.vocab_dim, index if isinstance(index, tuple) else (index,))
    if found is None or any(isinstance(item, VocabParallelLogits) for item in found.index):
        return NotImplemented
    if (product := logits.product) is not None:
        features = func(product.features, found.index)
        dim = features.dim() - found.from_right
        sizes = [product.like.shape[product.dim] if at == dim else size for at, size in enumerate(features.shape)]
        picks = any(isinstance(item, Tensor) for item in found.index)  # as many as its values say: not on meta
        like = product.like.new_empty(sizes) if picks else func(product.like, found.index)
        part = rewrap_product(logits, product.viewed(features, dim, like))
    else:
        local = func(logits.local, found.index)
        part = rewrap(logits, local, local.dim() - found.from_right)
    is_last_dim = logits.vocab_dim == logits.dim() - 1
    if is_last_dim and len(found.index) > 1 and isinstance(found.index[-2], int) and not torch.is_grad_enabled():
        part.one_position = True
    return part


@runs(*functions_of_layers("chunk split unbind __iter__"))
def _pieces(func: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """``chunk``, ``split``, ``unbind`` and iteration along another dim than the vocabulary."""
    logits, *rest = args
    if not isinstance(logits, VocabParallelLogits) or not logits.dim():
        return NotImplemented
    name = "unbind" if func.__name__ == "__iter__" else func.__name__
    given = dict(zip(("dim",) if name == "unbind" else ("sizes", "dim"), rest, strict=False)) | {
        "sizes" if key in ("chunks", "split_size", "split_size_or_sections") else key: value
        for key, value in kwargs.items()
    }
    dim = given.get("dim", 0) % logits.dim()
    if dim == logits.vocab_dim or set(given) - {"sizes", "dim"}:
        return NotImplemented
    positions = torch.empty(logits.shape[dim], device="meta")
    lengths = [1] * len(positions) if name == "unbind" else [len(x) for x in func(positions, given["sizes"])]
    stops = list(itertools.accumulate(lengths))
    before = (slice(None),) * dim
    wanted = [
        (*before, stop - 1 if name == "unbind" else slice(stop - length, stop))
        for length, stop in zip(lengths, stops, strict=True)
    ]
    pieces = tuple(logits[index] for index in wanted)
    return iter(pieces) if func.__name__ == "__iter__" else pieces


@runs(torch.cat, torch.concat, torch.concatenate, torch.stack)
def _joined(func: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """``cat`` and ``stack`` of logits that are sharded alike, along another dim than the vocabulary."""
    given = arguments_by_name(args, kwargs, "tensors", "dim")
    tensors, dim = given.get("tensors"), given.get("dim", 0)
    if set(given) - {"tensors", "dim"} or not isinstance(tensors, Sequence):
        return NotImplemented
    first = next(x for x in tensors if isinstance(x, VocabParallelLogits))
    if any(not isinstance(x, VocabParallelLogits) or (x.shard, x.group) != (first.shard, first.group) for x in tensors):
        return NotImplemented
    is_stack = func is torch.stack
    if not -first.dim() - is_stack <= dim < first.dim() + is_stack:
        return NotImplemented
    at = dim % (first.dim() + is_stack)
    if not is_stack and at == first.vocab_dim:
        return NotImplemented
    return rewrap(first, func([x.local for x in tensors], dim), first.vocab_dim + (is_stack and at <= first.vocab_dim))
