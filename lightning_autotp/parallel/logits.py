"""Logits that are cut over the vocabulary but look whole, so that user code and losses work unchanged.

:class:`VocabParallelLogits` is a tensor that shows the whole shape and holds this rank's part. Python-level functions
on it (``__torch_function__``) fall in six groups, each an explicit table below:

* what the wrapper itself knows: shape, dtype, ...;
* casts, pointwise functions and views run on the local part and stay sharded; the sizes that a view is given for the
  vocabulary are localized by index arithmetic, and a view that would split or merge the vocabulary is none of these;
* a softmax over the vocabulary, sums over other dims, and what is joined of logits stay sharded, too; a sum, a mean, a
  log-sum-exp, the largest class and the values at given classes are computed from the parts
  (:mod:`~lightning_autotp.parallel.vocab_functions`);
* a *copy* of the logits at one position (``logits[:, -1].clone()``) that is made without gradients is gathered, without
  a word: the next token will be sampled from it, by many functions that need it whole;
* ``F.cross_entropy`` with class indices becomes
  :func:`~lightning_autotp.parallel.cross_entropy.vocab_parallel_cross_entropy`, or
  :func:`~lightning_autotp.parallel.linear_cross_entropy.vocab_parallel_linear_cross_entropy` where nothing has needed
  the local part so far;
* **everything else first gathers** the logits into an ordinary tensor (and says so, once per function), because a
  function that nobody looked at must not be silently wrong.

In-place changes are refused, because they would change only what was gathered for them. So are those of a view that
needed the logits gathered (``logits[..., 100:]``), which in one process would change the logits: it is a
:class:`GatheredLogits`, which can be read like any tensor.

Why not a ``DTensor`` with a ``TorchFunctionMode`` around the user's step: a mode is global state that an exception, a
thread or a generator can leak, a DTensor dispatches every operator below autograd, and it knows only even
shards. This is one subclass, alive where the logits are, for any ownership map.

A plain operand that requires a gradient (a learned temperature) is Invariant and meets a shard, so it goes through *f*
first. Code that bypasses ``__torch_function__`` (a custom ``autograd.Function``) is still right: the wrapper is a node
of the autograd graph whose backward takes this rank's slice, and operators on it below Python gather.

The local part itself may not be computed yet (:class:`~lightning_autotp.parallel.head_product.HeadProduct`): views,
casts and functions of single elements with numbers leave it so, and so does the loss. Everything else computes it.

All functions that gather, and the loss, are collective.
"""

from __future__ import annotations

import inspect
import itertools
import math
import re
import warnings
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.autograd import Function
from torch.nn import functional as F
from torch.overrides import resolve_name
from torch.utils.hooks import RemovableHandle

from lightning_autotp.layouts.ownership import Ownership
from lightning_autotp.layouts.types import Shard
from lightning_autotp.parallel.collectives import (
    all_gather,
    copy_to_tensor_parallel,
    keep_first_owned,
    take_owned,
    transition_backward,
)
from lightning_autotp.parallel.cross_entropy import vocab_parallel_cross_entropy
from lightning_autotp.parallel.head_product import HeadProduct
from lightning_autotp.parallel.linear_cross_entropy import vocab_parallel_linear_cross_entropy
from lightning_autotp.parallel.vocab_functions import (
    at_classes,
    largest,
    log_softmax,
    log_sum_exp,
    softmax,
    top,
    total,
)
from lightning_autotp.parallel.whole_dim import after_index, after_reshape
from lightning_autotp.private.fabric_private import only_looks
from lightning_autotp.private.torch_private import (
    VIEW_GETTERS,
    schema_of,
    storage_key,
    tree_leaves,
    tree_map,
    without_subclasses,
    wrapper,
)
from lightning_autotp.ranks.group import TPGroup


class VocabParallelLogits(Tensor):
    """A tensor of the whole logits' shape that holds this rank's part of them.

    Args:
        local: this rank's part, ``[..., vocab/tp]``.
        shard: the layout, with one sharded dim (as a rule the last).
        group: the tensor-parallel group.

    Attributes:
        local: the plain local tensor; computed when it is first asked for, if it was not yet.
        shard: the layout.
        group: the tensor-parallel group.
        one_position: whether these are the logits at a single position, taken without gradients.

    Raises:
        ValueError: if ``local`` does not fit the layout.

    Example:
        >>> group = TPGroup(name="", rank=0, size=2)  # without a process group: on meta only
        >>> shard = Shard(((2, Ownership.dealt(131, group.size)),))
        >>> logits = VocabParallelLogits(torch.empty(2, 5, 66, device="meta"), shard, group)
        >>> logits[..., :-1, :].float().reshape(-1, 131)
        VocabParallelLogits(shape=(8, 131), local=(8, 66), S(1: 131 -> [66, 65]), rank 0 of 2, torch.float32, meta)
    """

    shard: Shard
    group: TPGroup
    one_position: bool
    _source: Tensor | HeadProduct

    @staticmethod
    def __new__(cls, local: Tensor, shard: Shard, group: TPGroup) -> VocabParallelLogits:
        """Wrap ``local``, as a node of its autograd graph."""
        if len(shard.dims) != 1:
            raise ValueError(f"logits are sharded over one dim, not as {shard}")
        dim, ownership = shard.dims[0]
        if ownership.ranks != group.size or not 0 <= dim < local.dim():
            raise ValueError(
                f"{shard} does not fit a local tensor {tuple(local.shape)} in a group of {group.size} ranks"
            )
        if local.shape[dim] != ownership.local_size(group.rank):
            raise ValueError(
                f"rank {group.rank} has {ownership.local_size(group.rank)} of the vocabulary as {shard}, "
                f"but its logits are {tuple(local.shape)}"
            )
        if local.requires_grad and torch.is_grad_enabled() and not local.is_meta:
            return _Wrap.apply(local, dim, ownership, group)
        return _make(local, dim, ownership, group)

    def __init__(self, local: Tensor, shard: Shard, group: TPGroup) -> None:
        super().__init__()

    @classmethod
    def of_product(cls, product: HeadProduct, ownership: Ownership, group: TPGroup) -> VocabParallelLogits:
        """Logits whose local part is computed when something needs it.

        Args:
            product: this rank's part.
            ownership: which part of the vocabulary each rank has.
            group: the tensor-parallel group.
        """
        sources = (product.features, product.weight, product.bias)
        if product.differentiable and any(x is not None and x.requires_grad for x in sources):
            return _WrapProduct.apply(*sources, product, ownership, group)
        return _make(product, product.dim, ownership, group)

    @property
    def local(self) -> Tensor:
        """This rank's part, a plain tensor. Not collective."""
        return self._source.value() if isinstance(self._source, HeadProduct) else self._source

    @property
    def product(self) -> HeadProduct | None:
        """What the local part is to be computed from, if it was not yet."""
        return self._source if isinstance(self._source, HeadProduct) and not self._source.is_done else None

    @property
    def vocab_dim(self) -> int:
        """The sharded dim."""
        return self.shard.dims[0][0]

    @property
    def ownership(self) -> Ownership:
        """Which part of the vocabulary each rank has."""
        return self.shard.dims[0][1]

    def full(self) -> Tensor:
        """The whole logits as a plain tensor, Invariant and differentiable. Collective (an all-gather)."""
        return all_gather(self.local, self.group, self.shard)

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        local = self.local if self.product is None else self.product.like
        return (
            f"{type(self).__name__}(shape={tuple(self.shape)}, local={tuple(local.shape)}, {self.shard}, "
            f"rank {self.group.rank} of {self.group.size}, {self.dtype}, {self.device})"
        )

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        kwargs = dict(kwargs or {})
        if func in _METADATA:
            with without_subclasses():
                return func(*args, **kwargs)
        handler = _HANDLERS.get(func)
        if handler is None and func in _recorders():
            handler = _record
        # A handler answers NotImplemented where its function does not stay sharded.
        result = NotImplemented if handler is None else handler(func, args, kwargs)
        if result is NotImplemented:
            _refuse_mutation(func, args, kwargs)
            _say_gathered(func, args, kwargs)
            gathered: list[Tensor] = []

            def whole(x: Any) -> Any:
                if isinstance(x, VocabParallelLogits):
                    gathered.append(x.full())
                    return gathered[-1]
                return x

            args, kwargs = tree_map(whole, (args, kwargs))
            return _read_only(func(*args, **kwargs), gathered)
        return result

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        # Only what bypasses __torch_function__ arrives here, below autograd, which has recorded it on the wrapper.
        kwargs = dict(kwargs or {})
        if schema_of(func).is_mutable:
            raise _in_place_error(str(func), next(x for x in tree_leaves((args, kwargs)) if isinstance(x, cls)))
        _say_gathered(func, args, kwargs)

        def whole(x: Any) -> Any:
            if not isinstance(x, cls):
                return x
            # Here no gradients are recorded, so values that are computed now are for this function only.
            return all_gather(x.local if x.product is None else x.product.compute(), x.group, x.shard)

        args, kwargs = tree_map(whole, (args, kwargs))
        return func(*args, **kwargs)


def check_vocab_is_last(logits: Tensor) -> None:
    """Refuse logits that are sharded in another dim than the last.

    Raises:
        ValueError: if they are.
    """
    if isinstance(logits, VocabParallelLogits) and logits.vocab_dim != logits.dim() - 1:
        raise ValueError(f"{logits!r} are sharded in dim {logits.vocab_dim}, but the vocabulary must be the last dim")


class GatheredLogits(Tensor):
    """A view of logits that were gathered for it: an ordinary tensor to read, but not to write.

    In one process, writing to a view writes to the logits. Here it would write to what was gathered for this one view,
    and be lost. Views of it are read-only, too; whatever computes gives ordinary tensors, and so do copies
    (``clone()``, ``copy.deepcopy``, pickling).
    """

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        if VocabParallelLogits in types:
            return NotImplemented  # theirs is the say
        kwargs = dict(kwargs or {})
        _refuse_mutation(func, args, kwargs)
        with without_subclasses():
            if func in _SERIALIZERS:
                return func(args[0].as_subclass(Tensor), *args[1:], **kwargs)
            result = func(*args, **kwargs)
        return _read_only(result, [x for x in tree_leaves((args, kwargs)) if isinstance(x, cls)])


def _read_only(result: Any, gathered: Sequence[Tensor]) -> Any:
    """``result``, in which what lies in the memory of gathered logits cannot be written."""

    def guarded(x: Any) -> Any:
        if isinstance(x, np.ndarray):
            x.flags.writeable = False  # an array from a tensor has its memory
        is_view = isinstance(x, Tensor) and x.layout == torch.strided and storage_key(x) in memory
        return x.as_subclass(GatheredLogits) if is_view else x

    with without_subclasses():
        memory = {storage_key(x) for x in gathered}
        return tree_map(guarded, result)


class _Wrap(Function):
    """Local → wrapper (S → I in types, but nothing is gathered until somebody asks): backward takes the slice."""

    @staticmethod
    def forward(ctx: Any, local: Tensor, dim: int, ownership: Ownership, group: TPGroup) -> VocabParallelLogits:
        ctx.where = group, dim, ownership
        return _make(local, dim, ownership, group)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        group, dim, ownership = ctx.where
        return _local_gradient(grad, dim, ownership, group), None, None, None


class _WrapProduct(Function):
    """As :class:`_Wrap`, of a product: who uses the wrapper below Python has its gradient go through the product."""

    @staticmethod
    def forward(
        ctx: Any,
        features: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        product: HeadProduct,
        ownership: Ownership,
        group: TPGroup,
    ) -> VocabParallelLogits:
        ctx.where = product, ownership, group
        return _make(product, product.dim, ownership, group)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        product, ownership, group = ctx.where
        local = _local_gradient(grad, product.dim, ownership, group)
        return *product.gradients(local, ctx.needs_input_grad[:3]), None, None, None


def _local_gradient(grad: Tensor, dim: int, ownership: Ownership, group: TPGroup) -> Tensor:
    """This rank's part of a wrapper's gradient."""
    # A backward written in Python on the wrapper's values may return sharded ones; a slice of those would gather.
    if isinstance(grad, VocabParallelLogits):
        if (grad.vocab_dim, grad.ownership) == (dim, ownership):
            return keep_first_owned(grad.local, dim, ownership, group.rank)
        grad = grad.full()
    return transition_backward(grad, ("S", "I"), group, dim, ownership)


def _make(source: Tensor | HeadProduct, dim: int, ownership: Ownership, group: TPGroup) -> VocabParallelLogits:
    if isinstance(source, HeadProduct):
        like, local = source.like, source.features.new_empty(0, dtype=source.like.dtype)
    else:
        like = local = source
    shape = [ownership.size if at == dim else size for at, size in enumerate(like.shape)]
    made: VocabParallelLogits = wrapper(VocabParallelLogits, shape, local)
    made._source, made.shard, made.group = source, Shard(((dim, ownership),)), group
    made.one_position = False
    return made


# --- functions that stay sharded. Each handler answers NotImplemented to have the logits gathered. ---


def _view(logits: VocabParallelLogits, view: Callable[[Tensor], Tensor], dim: int) -> VocabParallelLogits:
    """A view that leaves the vocabulary whole, in ``dim`` afterwards, and means the same for any number of classes."""
    if (product := logits.product) is not None:
        return _rewrap_product(logits, product.viewed(view(product.features), dim, view(product.like)))
    return _rewrap(logits, view(logits.local), dim)


def _rewrap_product(like: VocabParallelLogits, product: HeadProduct) -> VocabParallelLogits:
    made = VocabParallelLogits.of_product(product, like.ownership, like.group)
    made.one_position = like.one_position
    return made


def _rewrap(like: VocabParallelLogits, local: Tensor, dim: int) -> VocabParallelLogits:
    made = VocabParallelLogits(local, Shard(((dim, like.ownership),)), like.group)
    made.one_position = like.one_position
    return made


def _cast(func: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """Same shape, other arguments say only how (a dtype, a device, a tensor to take them from)."""
    logits = args[0]
    if not isinstance(logits, VocabParallelLogits):
        return NotImplemented
    if logits.product is not None and (cast := _cast_product(logits, logits.product, func, args, kwargs)) is not None:
        return cast
    args, kwargs = tree_map(lambda x: x.local if isinstance(x, VocabParallelLogits) else x, (args, kwargs))
    local = func(*args, **kwargs)
    if local is logits.local:
        return logits
    if local.device != logits.device:  # the group may be unable to gather there
        return NotImplemented
    made = _rewrap(logits, local, logits.vocab_dim)
    is_copy = func in _COPIES or kwargs.get("copy") or local.dtype != logits.dtype  # the same on every rank
    return made.full() if logits.one_position and is_copy else made


def _cast_product(
    logits: VocabParallelLogits,
    product: HeadProduct,
    func: Callable[..., Any],
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
) -> VocabParallelLogits | None:
    """A cast of logits that are not computed yet; ``None`` for a copy, on which the weights' changes have no effect."""
    others = tree_leaves((args[1:], kwargs))
    if func in _SNAPSHOTS or logits.one_position or any(isinstance(x, VocabParallelLogits | bool) for x in others):
        return None
    if "memory_format" in kwargs:
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
    return _rewrap_product(logits, made)


def _pointwise(func: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """f(x)_c = f(x_c): operands are logits with the same map, scalars, and tensors that are broadcast over it."""
    tensors = [x for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
    logits = next(x for x in tensors if isinstance(x, VocabParallelLogits))
    from_right = logits.dim() - logits.vocab_dim
    for x in tensors:
        if isinstance(x, VocabParallelLogits):
            fits = (x.dim() - x.vocab_dim, x.ownership, x.group) == (from_right, logits.ownership, logits.group)
        else:
            fits = x.dim() < from_right or x.shape[-from_right] == 1
        if not fits:
            return NotImplemented
    if kwargs.get("inplace") or kwargs.get("out") is not None:
        return NotImplemented

    if logits.product is not None and len(tensors) == 1:
        call = tree_map(lambda leaf: _HERE if leaf is logits else leaf, (args, kwargs))

        def step(x: Tensor) -> Tensor:
            args, kwargs = tree_map(lambda leaf: x if leaf is _HERE else leaf, call)
            return func(*args, **kwargs)

        return _rewrap_product(logits, logits.product.stepped(step))

    def local_operand(x: Any) -> Any:
        if isinstance(x, VocabParallelLogits):
            return x.local
        if isinstance(x, Tensor) and x.requires_grad:
            return copy_to_tensor_parallel(x, logits.group)
        return x

    args, kwargs = tree_map(local_operand, (args, kwargs))
    local = func(*args, **kwargs)
    return _rewrap(logits, local, local.dim() - from_right)


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
        return _rewrap_product(logits, product.viewed(features, dim, func(product.like, sized(product.like))))
    return _rewrap(logits, func(logits.local, sized(logits.local)), dim)


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


def _permute(func: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    logits, *dims = args
    if len(dims) == 1 and isinstance(dims[0], Sequence):
        dims = list(dims[0])
    if kwargs or len(dims) != logits.dim():
        return NotImplemented
    order = [dim % logits.dim() for dim in dims]
    return _view(logits, lambda x: func(x, dims), order.index(logits.vocab_dim))


def _transpose(func: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    if kwargs or len(args) != 3:
        return NotImplemented
    logits = args[0]
    first, second = (dim % logits.dim() for dim in args[1:])
    moved = {first: second, second: first}.get(logits.vocab_dim, logits.vocab_dim)
    return _view(logits, lambda x: func(x, *args[1:]), moved)


def _unsqueeze(func: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    if kwargs or len(args) != 2:
        return NotImplemented
    logits, dim = args
    at = dim % (logits.dim() + 1)
    return _view(logits, lambda x: func(x, dim), logits.vocab_dim + (at <= logits.vocab_dim))


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


def _register_hook(func: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """On the local tensor, through which every gradient goes; the hook sees sharded gradients.

    A hook that only looks whether there is a backward pass does not make logits be computed: the loss has it too.
    """
    logits, hook = args
    if logits.product is not None and only_looks(hook):
        return RemovableHandle(OrderedDict())

    def on_local(grad: Tensor) -> Tensor | None:
        found = hook(_rewrap(logits, grad, logits.vocab_dim))
        if found is None or isinstance(found, VocabParallelLogits):
            return None if found is None else found.local
        return take_owned(found, logits.vocab_dim, logits.ownership, logits.group.rank)

    if isinstance(source := logits._source, HeadProduct):
        source.hook()
    return logits.local.register_hook(on_local)


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
        part = _rewrap_product(logits, product.viewed(features, dim, like))
    else:
        local = func(logits.local, found.index)
        part = _rewrap(logits, local, local.dim() - found.from_right)
    is_last_dim = logits.vocab_dim == logits.dim() - 1
    if is_last_dim and len(found.index) > 1 and type(found.index[-2]) is int and not torch.is_grad_enabled():
        part.one_position = True
    return part


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
    product = logits.product
    if product is None or logits.ownership.is_shared or torch.compiler.is_compiling():
        return vocab_parallel_cross_entropy(logits.local, target, logits.ownership, logits.group, weight, **options)
    return vocab_parallel_linear_cross_entropy(product, target, logits.ownership, logits.group, weight, **options)


def _given(args: Sequence[Any], kwargs: Mapping[str, Any], *names: str) -> dict[str, Any]:
    """A call's arguments by name, of a function whose positional ones are called so."""
    return dict(zip(names, args, strict=False)) | {_ALIASES.get(name, name): value for name, value in kwargs.items()}


def _of_vocabulary(
    args: Sequence[Any], kwargs: Mapping[str, Any], *names: str
) -> tuple[VocabParallelLogits, dict[str, Any]] | None:
    """The logits and the other arguments by name, if the call is along the vocabulary; otherwise ``None``.

    On meta nothing is computed from parts: a trace shows collectives only where the plan has them. Logits at one
    position are gathered as ever: many functions will need them whole.
    """
    given = _given(args, kwargs, "input", *names)
    logits, dim = given.pop("input", None), given.get("dim")
    if isinstance(dim, Sequence) and len(dim) == 1:
        dim = dim[0]
    if not isinstance(logits, VocabParallelLogits) or not isinstance(dim, int) or set(given) - {*names}:
        return None
    if logits.is_meta or logits.one_position or not logits.is_floating_point():
        return None
    is_along = -logits.dim() <= dim < logits.dim() and dim % logits.dim() == logits.vocab_dim
    return (logits, given) if is_along else None


def _result_dtype(logits: VocabParallelLogits, func: Callable[..., Any], given: Mapping[str, Any]) -> torch.dtype:
    """That of ``func`` on logits, with ``dtype=`` or under autocast."""
    like = torch.zeros([1] * logits.dim(), dtype=logits.dtype, device=logits.device)
    found: Tensor = func(like, **{name: given[name] for name in ("dim", "dtype") if name in given})
    return found.dtype


def _exact(logits: VocabParallelLogits, dtype: torch.dtype | None = None) -> Tensor:
    """This rank's part in the precision that torch computes in before it rounds."""
    return logits.local.to(torch.promote_types(dtype or logits.dtype, torch.float32))


def _softmax(func: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    names = ("dim", "_stacklevel", "dtype") if func in _WITH_STACK_LEVEL else ("dim", "dtype")
    if (call := _of_vocabulary(args, kwargs, *names)) is None:
        return NotImplemented
    logits, given = call
    dtype = _result_dtype(logits, func, given)
    compute = log_softmax if "log" in func.__name__ else softmax
    found = compute(_exact(logits, dtype), logits.vocab_dim, logits.ownership, logits.group)
    return _rewrap(logits, found.to(dtype), logits.vocab_dim)


def _reduced(func: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """``sum``, ``mean`` and ``logsumexp`` over any dims; sharded still where the vocabulary is none of them."""
    given = _given(args, kwargs, "input", "dim", "keepdim", "dtype")
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
        return _rewrap(logits, func(logits.local, **given), dim - before)
    dtype = _result_dtype(logits, func, given)
    if logits.is_meta or not dtype.is_floating_point:
        return NotImplemented
    compute = log_sum_exp if func.__name__ == "logsumexp" else total
    found = compute(_exact(logits, dtype), dim, logits.ownership, logits.group).unsqueeze(dim)
    if func.__name__ == "mean":
        found = found / logits.ownership.size
    if len(dims) > 1:
        found = func(found, dims, keepdim=True)
    return (found if given.get("keepdim") else found.squeeze(dims)).to(dtype)


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


def _gather(func: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    if (call := _of_vocabulary(args, kwargs, "dim", "index")) is None:
        return NotImplemented
    logits, index = call[0], call[1].get("index")
    if not isinstance(index, Tensor) or isinstance(index, VocabParallelLogits) or index.dim() != logits.dim():
        return NotImplemented
    return at_classes(logits.local, logits.vocab_dim, index, logits.ownership, logits.group)


def _nll_loss(func: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """``F.nll_loss`` of sharded log-probabilities ``[tokens, vocab, ...]``."""
    call = _NLL_LOSS.bind(*args, **kwargs)
    call.apply_defaults()
    logits, target, weight = (call.arguments[name] for name in ("input", "target", "weight"))
    if not isinstance(logits, VocabParallelLogits) or isinstance(target, VocabParallelLogits):
        return NotImplemented
    dim = min(1, logits.dim() - 1)
    is_plain = call.arguments["size_average"] is None and call.arguments["reduce"] is None
    if logits.vocab_dim != dim or logits.is_meta or not is_plain or (weight is not None and weight.requires_grad):
        return NotImplemented
    ignored = target == call.arguments["ignore_index"]
    classes = target.masked_fill(ignored, 0)
    found = at_classes(_exact(logits), dim, classes.unsqueeze(dim), logits.ownership, logits.group).squeeze(dim)
    each = torch.ones_like(found) if weight is None else weight.to(found.dtype)[classes]
    each = each.masked_fill(ignored, 0)
    losses = (-found * each).masked_fill(ignored, 0)
    if call.arguments["reduction"] == "none":
        return losses.to(logits.dtype)
    if call.arguments["reduction"] not in ("mean", "sum"):
        return NotImplemented
    summed = losses.sum()
    return (summed / each.sum() if call.arguments["reduction"] == "mean" else summed).to(logits.dtype)


def _kl_div(func: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """``F.kl_div`` of log-probabilities that are sharded alike."""
    call = _KL_DIV.bind(*args, **kwargs)
    call.apply_defaults()
    found, wanted, reduction = (call.arguments[name] for name in ("input", "target", "reduction"))
    if call.arguments["size_average"] is not None or call.arguments["reduce"] is not None:
        return NotImplemented
    options = {"reduction": "none", "log_target": call.arguments["log_target"]}
    each = _pointwise(func, (found, wanted), options)
    if each is NotImplemented or reduction == "none":
        return each
    if reduction not in ("sum", "batchmean") or each.is_meta:
        return NotImplemented
    return each.sum() / each.shape[0] if reduction == "batchmean" else each.sum()


def _joined(func: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """``cat`` and ``stack`` of logits that are sharded alike, along another dim than the vocabulary."""
    given = _given(args, kwargs, "tensors", "dim")
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
    return _rewrap(first, func([x.local for x in tensors], dim), first.vocab_dim + (is_stack and at <= first.vocab_dim))


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


def _is_contiguous(func: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any]) -> bool:
    logits: VocabParallelLogits = args[0]
    return func(logits.local if logits.product is None else logits.product.like, *args[1:], **kwargs)


def _record(func: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """A note in a trace (see :mod:`~lightning_autotp.capture.recording`) is about the local tensor."""
    name, inputs, shape, *detail = args
    logits = inputs[0]
    plain = [x.local if isinstance(x, VocabParallelLogits) else x for x in inputs]
    if isinstance(logits, VocabParallelLogits) and tuple(shape) == tuple(logits.shape):
        return _rewrap(logits, func(name, plain, list(logits.local.shape), *detail), logits.vocab_dim)
    return func(name, plain, shape, *detail)


_CROSS_ENTROPY = inspect.signature(F.cross_entropy)
_NLL_LOSS = inspect.signature(F.nll_loss)
_KL_DIV = inspect.signature(F.kl_div)
_WITH_STACK_LEVEL = (F.softmax, F.log_softmax)
_ALIASES = {"axis": "dim", "keepdims": "keepdim", "self": "input"}
_COPIES = (Tensor.clone, torch.clone)
_SNAPSHOTS = (*_COPIES, Tensor.detach, torch.detach)
_HERE = object()


def _recorders() -> tuple[Any, ...]:
    operator = torch.ops.lightning_autotp.record
    return operator, operator.default


def _everywhere(*names: str) -> list[Callable[..., Any]]:
    """The functions of these names in ``torch.Tensor``, ``torch`` and ``torch.nn.functional``."""
    return [getattr(home, name) for name in names for home in (Tensor, torch, F) if callable(getattr(home, name, None))]


def _getters(*names: str) -> list[Callable[..., Any]]:
    return [getattr(Tensor, name).__get__ for name in names]


_METADATA = frozenset(
    _everywhere("size", "dim", "ndimension", "numel", "nelement", "element_size", "get_device")
    + _everywhere("is_floating_point", "is_complex", "__len__", "__hash__", "__format__")
    + _getters(
        "shape", "ndim", "dtype", "device", "layout", "itemsize", "nbytes", "requires_grad", "grad_fn", "is_leaf"
    )
    + _everywhere("is_conj", "is_neg", "is_inference")
    + VIEW_GETTERS
    + _getters("grad", "is_cuda", "is_cpu", "is_meta", "is_sparse", "is_quantized", "is_nested")
)

_HANDLERS: dict[Callable[..., Any], Callable[[Callable[..., Any], Sequence[Any], dict[str, Any]], Any]] = {
    **dict.fromkeys(_everywhere("float", "half", "bfloat16", "double", "to", "type_as", "cuda"), _cast),
    **dict.fromkeys(_everywhere("contiguous", "clone", "detach"), _cast),
    **dict.fromkeys(_everywhere("add", "sub", "mul", "div", "true_divide", "pow", "neg", "abs", "square"), _pointwise),
    **dict.fromkeys(_everywhere("__add__", "__radd__", "__sub__", "__rsub__", "__mul__", "__rmul__"), _pointwise),
    **dict.fromkeys(_everywhere("__truediv__", "__rtruediv__", "__div__", "__rdiv__"), _pointwise),
    **dict.fromkeys(_everywhere("__pow__", "__rpow__", "__neg__", "__abs__", "rsub"), _pointwise),
    **dict.fromkeys(
        _everywhere("exp", "expm1", "log", "log1p", "sqrt", "tanh", "sigmoid", "relu", "silu", "gelu"), _pointwise
    ),
    **dict.fromkeys(_everywhere("clamp", "clip", "nan_to_num", "masked_fill"), _pointwise),
    **dict.fromkeys(_everywhere("lerp", "maximum", "minimum", "where"), _pointwise),
    **dict.fromkeys(_everywhere("view", "reshape"), _reshape),
    **dict.fromkeys(_everywhere("flatten"), _flatten),
    **dict.fromkeys(_everywhere("permute"), _permute),
    **dict.fromkeys(_everywhere("transpose", "swapaxes"), _transpose),
    **dict.fromkeys(_everywhere("unsqueeze"), _unsqueeze),
    **dict.fromkeys(_everywhere("squeeze"), _squeeze),
    **dict.fromkeys(_everywhere("softmax", "log_softmax"), _softmax),
    **dict.fromkeys(_everywhere("sum", "mean", "logsumexp"), _reduced),
    **dict.fromkeys(_everywhere("argmax", "max"), _largest),
    **dict.fromkeys(_everywhere("topk"), _topk),
    **dict.fromkeys(_everywhere("gather"), _gather),
    **dict.fromkeys(_everywhere("chunk", "split", "unbind", "__iter__"), _pieces),
    Tensor.__getitem__: _getitem,
    Tensor.is_contiguous: _is_contiguous,
    Tensor.register_hook: _register_hook,
    F.cross_entropy: _cross_entropy,
    F.nll_loss: _nll_loss,
    F.kl_div: _kl_div,
    **dict.fromkeys((torch.cat, torch.concat, torch.concatenate, torch.stack), _joined),
}


# --- everything else ---

_IN_PLACE = re.compile(
    r"__(set|delete|setitem|i(add|sub|mul|div|truediv|floordiv|mod|pow|matmul|and|or|xor|lshift|rshift))__"
    r"|.*[^_]_"
)
_NO_WRITES = frozenset((Tensor.requires_grad_, Tensor.detach_))
_SERIALIZERS = frozenset((Tensor.__deepcopy__, Tensor.__reduce_ex__))
_GRADIENT_KEEPERS = frozenset((Tensor.retain_grad, Tensor.register_post_accumulate_grad_hook))
_said: set[str] = set()


def _refuse_mutation(func: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
    name = getattr(func, "__name__", "")
    changed = [kwargs.get("out")]
    if _IN_PLACE.fullmatch(name) or kwargs.get("inplace"):
        changed.append(args[0] if args else None)
    for x in tree_leaves(changed):
        if isinstance(x, VocabParallelLogits) or (isinstance(x, GatheredLogits) and func not in _NO_WRITES):
            raise _in_place_error(resolve_name(func) or name, x)
    if func in _GRADIENT_KEEPERS and isinstance(args[0], VocabParallelLogits):
        raise _in_place_error(resolve_name(func) or name, args[0])


def _in_place_error(name: str, logits: VocabParallelLogits | GatheredLogits) -> RuntimeError:
    if isinstance(logits, GatheredLogits):
        return RuntimeError(
            f"{name} would change a view of shape {tuple(logits.shape)} that vocabulary-sharded logits were gathered"
            " for, and the logits would not change with it: use the form that returns a new tensor (logits ="
            " logits.masked_fill(mask, value)), or go on with the gathered tensor from the start (logits ="
            " logits.full())"
        )
    return RuntimeError(
        f"{name} would change vocabulary-sharded logits in place ({logits!r}): use the form that returns a new tensor "
        "(logits = logits * 2), or go on with the gathered tensor logits.full()"
    )


def _say_gathered(func: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
    name = resolve_name(func) or getattr(func, "__name__", str(func))
    logits = next(x for x in tree_leaves((args, kwargs)) if isinstance(x, VocabParallelLogits))
    if name not in _said and logits.group.rank == 0 and not logits.one_position:
        _said.add(name)
        warnings.warn(
            f"{name} has no vocabulary-sharded form: it gathers logits of shape {tuple(logits.shape)} on every rank "
            "(said once for this function; logits.full() gathers without a word)",
            stacklevel=4,
        )
