"""Casts and functions of single elements: they run on the local part, and the logits stay sharded."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from math import prod
from typing import Any

import torch
from torch import Tensor

from lightning_autotp.layouts.types import Shard
from lightning_autotp.parallel.collectives import copy_to_tensor_parallel, scatter
from lightning_autotp.parallel.logits.tensor import VocabParallelLogits, rewrap, rewrap_product, runs
from lightning_autotp.private.torch_private import tree_leaves, tree_map
from lightning_autotp.torch_functions import functions_of_layers

_COPIES = (Tensor.clone, torch.clone)
_SNAPSHOTS = (*_COPIES, Tensor.detach, torch.detach)
_HERE = object()


@runs(*functions_of_layers("float half bfloat16 double to type_as cuda contiguous clone detach"))
def _cast(func: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """Same shape, other arguments say only how (a dtype, a device, a tensor to take them from)."""
    logits = args[0]
    if not isinstance(logits, VocabParallelLogits):
        return NotImplemented
    if (cast := _cast_product(logits, func, args, kwargs)) is not None:
        return cast
    args, kwargs = tree_map(lambda x: x.local if isinstance(x, VocabParallelLogits) else x, (args, kwargs))
    local = func(*args, **kwargs)
    if local is logits.local:
        return logits
    if local.device != logits.device:  # the group may be unable to gather there
        return NotImplemented
    made = rewrap(logits, local, logits.vocab_dim)
    is_copy = func in _COPIES or kwargs.get("copy") or local.dtype != logits.dtype  # the same on every rank
    return made.full() if logits.one_position and is_copy else made


def _cast_product(
    logits: VocabParallelLogits, func: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]
) -> VocabParallelLogits | None:
    """A cast of logits that are not computed yet; ``None`` for a copy, on which the weights' changes have no effect."""
    product, others = logits.product, tree_leaves((args[1:], kwargs))
    if product is None or func in _SNAPSHOTS or logits.one_position or "memory_format" in kwargs:
        return None
    if any(isinstance(x, VocabParallelLogits | bool) for x in others):
        return None
    found = func(product.features.new_empty(0, dtype=product.like.dtype), *args[1:], **kwargs)
    if found.device != logits.device:
        return None
    if found.dtype != logits.dtype:
        dtype = found.dtype
        made = product.stepped(lambda x: x.to(dtype), is_cast=True)
    elif product.like.is_contiguous() or func is not Tensor.contiguous:
        return logits
    else:
        made = product.viewed(product.features, product.dim, product.like.contiguous())
    return rewrap_product(logits, made)


@runs(
    *functions_of_layers("add sub mul div true_divide pow neg abs square"),
    *functions_of_layers("__add__ __radd__ __sub__ __rsub__ __mul__ __rmul__"),
    *functions_of_layers("__truediv__ __rtruediv__ __div__ __rdiv__"),
    *functions_of_layers("__pow__ __rpow__ __neg__ __abs__ rsub"),
    *functions_of_layers("exp expm1 log log1p sqrt tanh sigmoid relu silu gelu"),
    *functions_of_layers("clamp clip nan_to_num masked_fill"),
    *functions_of_layers("lerp maximum minimum where"),
)
def pointwise(func: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """f(x)_c = f(x_c): operands are logits with the same map, scalars, and tensors that are whole or broadcast over it.

    Of a tensor with a value for each class, a bias or a mask, every rank takes those of its classes.
    """
    tensors = [x for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
    logits = next(x for x in tensors if isinstance(x, VocabParallelLogits))
    from_right, group = logits.dim() - logits.vocab_dim, logits.group
    for x in tensors:
        if isinstance(x, VocabParallelLogits):
            fits = (x.dim() - x.vocab_dim, x.ownership, x.group) == (from_right, logits.ownership, group)
        else:
            fits = _is_broadcast(x, from_right) or _are_classes(x.shape[-from_right], logits)
        if not fits:
            return NotImplemented
    if kwargs.get("inplace") or kwargs.get("out") is not None:
        return NotImplemented

    def local_operand(x: Any) -> Any:
        if not isinstance(x, Tensor) or isinstance(x, VocabParallelLogits):
            return x
        if _is_broadcast(x, from_right):
            return copy_to_tensor_parallel(x, group) if x.requires_grad else x
        if x.shape[-from_right] == logits.ownership.size:
            return scatter(x, group, Shard(((x.dim() - from_right, logits.ownership),)))
        return x  # the plan has converted it

    args, kwargs = tree_map(local_operand, (args, kwargs))
    if (noted := _noted(logits, func, args, kwargs)) is not None:
        return noted
    args, kwargs = tree_map(lambda x: x.local if isinstance(x, VocabParallelLogits) else x, (args, kwargs))
    local = func(*args, **kwargs)
    return rewrap(logits, local, local.dim() - from_right)


def _noted(
    logits: VocabParallelLogits, func: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]
) -> VocabParallelLogits | None:
    """The function of logits that are not computed yet; ``None`` where an operand is not the same for all tokens."""
    product = logits.product
    if product is None:
        return None
    others = [x for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor) and x is not logits]
    for x in others:
        if isinstance(x, VocabParallelLogits) or x.requires_grad or x.dim() > logits.dim():
            return None
        if x.numel() != prod(x.shape[-1:]) or (x.numel() > 1 and logits.vocab_dim != logits.dim() - 1):
            return None

    def operand(x: Any) -> Any:
        if x is logits:
            return _HERE
        if isinstance(x, Tensor):  # with the values of now, and for any number of tokens
            return x.flatten().clone() if x.dim() else x.clone()
        return x

    call = tree_map(operand, (args, kwargs))

    def step(x: Tensor) -> Tensor:
        args, kwargs = tree_map(lambda leaf: x if leaf is _HERE else leaf, call)
        return func(*args, **kwargs)

    return rewrap_product(logits, product.stepped(step))


def _is_broadcast(x: Tensor, from_right: int) -> bool:
    """Whether a tensor has one value for all classes, whose dim is so far from the right."""
    return x.dim() < from_right or x.shape[-from_right] == 1


def _are_classes(size: int, logits: VocabParallelLogits) -> bool:
    """Whether a dim has all classes or this rank's; neither, where one cannot tell on every rank which of the two."""
    sizes = [logits.ownership.local_size(rank) for rank in range(logits.group.size)]
    return size in (logits.ownership.size, sizes[logits.group.rank]) and logits.ownership.size not in sizes
