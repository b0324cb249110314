"""The tensor that shows whole logits and holds a part of them, and what functions on it come to.

:data:`HANDLERS` says what a Python-level function does on it; the other modules of this folder fill it by :func:`runs`.
"""

from __future__ import annotations

import copy
import warnings
import weakref
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.autograd import Function
from torch.overrides import resolve_name
from torch.utils.hooks import RemovableHandle

from lightning_autotp.layouts.ownership import Ownership
from lightning_autotp.layouts.types import Invariant, Partial, Shard
from lightning_autotp.parallel.collectives import all_gather, convert, keep_first_owned, take_owned, transition_backward
from lightning_autotp.parallel.head_product import HeadProduct
from lightning_autotp.private.distributed_private import prepares_backward
from lightning_autotp.private.fabric_private import only_looks
from lightning_autotp.private.torch_private import (
    VIEW_GETTERS,
    has_values,
    schema_of,
    storage_key,
    tree_leaves,
    tree_map,
    without_subclasses,
    wrapper,
)
from lightning_autotp.ranks.group import TPGroup
from lightning_autotp.torch_functions import DESCRIBING, functions, getters, writes

Handler = Callable[[Callable[..., Any], Sequence[Any], dict[str, Any]], Any]
"""The result for a function, its arguments and its keyword arguments; ``NotImplemented`` to have logits gathered."""

HANDLERS: dict[Callable[..., Any], Handler] = {}
"""What each function does on sharded logits; any other gathers them."""

_ALIASES = {"axis": "dim", "keepdims": "keepdim", "self": "input"}


def runs(*functions: Callable[..., Any]) -> Callable[[Handler], Handler]:
    """What a handler is for.

    Raises:
        ValueError: if one of the functions has another handler.
    """

    def enter(handler: Handler) -> Handler:
        for function in functions:
            if HANDLERS.setdefault(function, handler) is not handler:
                raise ValueError(f"{function} is handled by {HANDLERS[function].__name__} and by {handler.__name__}")
        return handler

    return enter


def arguments_by_name(args: Sequence[Any], kwargs: Mapping[str, Any], *names: str) -> dict[str, Any]:
    """A call's arguments by name, of a function whose positional ones are called so."""
    return dict(zip(names, args, strict=False)) | {_ALIASES.get(name, name): value for name, value in kwargs.items()}


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
        >>> shard = Shard(((2, Ownership.even(131, group.size)),))
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
        if local.requires_grad and torch.is_grad_enabled() and has_values(local):
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
    def is_traced(self) -> bool:
        """Whether they are a trace's, which have no values."""
        return isinstance(self._source, Tensor) and not has_values(self._source)

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
        handler = HANDLERS.get(func)
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
            return NotImplemented  # their class decides
        kwargs = dict(kwargs or {})
        _refuse_mutation(func, args, kwargs)
        with without_subclasses():
            if func is Tensor.__deepcopy__:
                return copy.deepcopy(args[0].as_subclass(Tensor), args[1])  # which the memo keeps, and with it its id
            if func is Tensor.__reduce_ex__:
                return func(args[0].as_subclass(Tensor), *args[1:], **kwargs)
            result = func(*args, **kwargs)
        return _read_only(result, [x for x in tree_leaves((args, kwargs)) if isinstance(x, cls)])


def _read_only(result: Any, gathered: Sequence[Tensor]) -> Any:
    """``result``, in which what lies in the memory of gathered logits cannot be written."""
    if isinstance(result, torch.Size):  # a tuple of numbers, which would come back as an ordinary one
        return result

    def guarded(x: Any) -> Any:
        if isinstance(x, np.ndarray):
            x.flags.writeable = False  # an array from a tensor has its memory
        is_view = isinstance(x, Tensor) and x.layout == torch.strided and storage_key(x) in memory
        return x.as_subclass(GatheredLogits) if is_view else x

    with without_subclasses():
        memory = {storage_key(x) for x in gathered}
        return tree_map(guarded, result)


class _Wrap(Function):
    """Local → wrapper (S → I in types, but nothing is gathered until it is needed): backward takes the slice."""

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


def rewrap(like: VocabParallelLogits, local: Tensor, dim: int) -> VocabParallelLogits:
    """Logits of another local part, with the vocabulary in ``dim``."""
    made = VocabParallelLogits(local, Shard(((dim, like.ownership),)), like.group)
    made.one_position = like.one_position
    return made


def rewrap_product(like: VocabParallelLogits, product: HeadProduct) -> VocabParallelLogits:
    """Logits whose local part is another product, not computed yet."""
    made = VocabParallelLogits.of_product(product, like.ownership, like.group)
    made.one_position = like.one_position
    return made


# --- what concerns the tensor itself ---


@runs(Tensor.register_hook)
def _register_hook(func: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """On the local tensor, through which every gradient goes; the hook sees sharded gradients.

    A hook that does not look at the gradient does not make logits be computed: Fabric's, which the loss has too, and
    FSDP2's, which gathers parameters before the backward pass.
    """
    logits, hook = args
    if logits.product is not None and only_looks(hook):
        return RemovableHandle(OrderedDict())
    if logits.product is not None and prepares_backward(hook):
        logits.product.before_backward(hook)
        return RemovableHandle(OrderedDict())

    def on_local(grad: Tensor) -> Tensor | None:
        found = hook(rewrap(logits, grad, logits.vocab_dim))
        if found is None or isinstance(found, VocabParallelLogits):
            return None if found is None else found.local
        return take_owned(found, logits.vocab_dim, logits.ownership, logits.group.rank)

    if isinstance(source := logits._source, HeadProduct):
        source.hook()
    return logits.local.register_hook(on_local)


@runs(Tensor.retain_grad)
def _retain_grad(func: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any]) -> None:
    """Keep the whole gradient, on every rank: the backward pass is collective."""
    (logits,) = args
    kept, where = weakref.ref(logits), (logits.shape, logits.vocab_dim, logits.ownership, logits.group)

    def keep(gradient: Tensor) -> None:
        # Also where the logits are gone: that may be so on one rank only.
        whole = _summed_over_ranks(gradient, *where)
        if (kept_by := kept()) is not None:
            with without_subclasses():
                kept_by.grad = whole if kept_by.grad is None else kept_by.grad + whole

    if isinstance(source := logits._source, HeadProduct):
        source.hook()
    logits.local.register_hook(keep)


@runs(torch.autograd.grad)
def _gradients(func: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """The gradient of logits is gathered from those of the ranks' parts. Collective.

    Raises:
        RuntimeError: if these logits are not what the outputs were computed of: a loss in parts, or of another view of
            them, has no use for their values.
    """
    given = arguments_by_name(args, kwargs, "outputs", "inputs", "grad_outputs", "retain_graph", "create_graph")
    is_one = isinstance(given["inputs"], Tensor)
    asked = [given.pop("inputs")] if is_one else list(given.pop("inputs"))

    def whole(x: Any) -> Any:
        return x.full() if isinstance(x, VocabParallelLogits) else x

    given["outputs"] = tree_map(whole, given["outputs"])
    sources = [x.local if isinstance(x, VocabParallelLogits) else x for x in asked]
    found = list(func(inputs=sources, **(given | {"allow_unused": True, "materialize_grads": False})))
    for at, (x, gradient) in enumerate(zip(asked, found, strict=True)):
        if gradient is None and isinstance(x, VocabParallelLogits):
            raise RuntimeError(
                f"torch.autograd.grad: what is differentiated was not computed of {x!r}, but of the product that makes"
                " them, or of another view of them. Use whole = logits.full() for the loss, and take the gradient of"
                " whole"
            )
        if gradient is None and given.get("materialize_grads"):
            found[at] = torch.zeros_like(x)
        elif gradient is None and not given.get("allow_unused"):
            raise RuntimeError(
                "torch.autograd.grad: one of the inputs was not used; allow_unused=True gives None for it"
            )
        elif isinstance(x, VocabParallelLogits):
            found[at] = _summed_over_ranks(gradient, x.shape, x.vocab_dim, x.ownership, x.group)
    return tuple(found)


def _summed_over_ranks(
    gradient: Tensor, shape: torch.Size, vocab_dim: int, ownership: Ownership, group: TPGroup
) -> Tensor:
    """The whole gradient of logits. What several ranks have of them has parts of a sum for its gradient. Collective."""
    index = torch.tensor(ownership.indices(group.rank), dtype=torch.long, device=gradient.device)
    whole = gradient.new_zeros(shape).index_add(vocab_dim, index, gradient)
    return convert(whole, Partial(), Invariant(), group)


@runs(Tensor.is_contiguous)
def _is_contiguous(func: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any]) -> bool:
    logits: VocabParallelLogits = args[0]
    return func(logits.local if logits.product is None else logits.product.like, *args[1:], **kwargs)


@runs(Tensor.data_ptr)
def _data_ptr(func: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any]) -> int:
    """Refused: a kernel asks for an address, and what were gathered for it would be gone before it reads there."""
    raise RuntimeError(
        f"a kernel asks where the whole of vocabulary-sharded logits lies in memory ({args[0]!r}): give it the gathered"
        " tensor, logits.full(). A loss of logits that is not a kernel's (torch.nn.functional.cross_entropy,"
        " lightning_autotp.losses.token_log_probs) gathers nothing"
    )


def _record(func: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """A note in a trace (see :mod:`~lightning_autotp.capture.recording`) is about the local tensor."""
    name, inputs, shape, *detail = args
    logits = inputs[0]
    plain = [x.local if isinstance(x, VocabParallelLogits) else x for x in inputs]
    if isinstance(logits, VocabParallelLogits) and tuple(shape) == tuple(logits.shape):
        return rewrap(logits, func(name, plain, list(logits.local.shape), *detail), logits.vocab_dim)
    return func(name, plain, shape, *detail)


def _recorders() -> tuple[Any, ...]:
    operator = torch.ops.lightning_autotp.record
    return operator, operator.default


_METADATA = DESCRIBING | {*VIEW_GETTERS, *getters("grad"), *functions("__format__")}


# --- everything else ---

_NO_WRITES = frozenset((Tensor.requires_grad_, Tensor.detach_))
_said: set[str] = set()


def _refuse_mutation(func: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
    name = getattr(func, "__name__", "")
    changed = [kwargs.get("out")]
    if writes(name) or kwargs.get("inplace"):
        changed.append(args[0] if args else None)
    for x in tree_leaves(changed):
        if isinstance(x, VocabParallelLogits) or (isinstance(x, GatheredLogits) and func not in _NO_WRITES):
            raise _in_place_error(resolve_name(func) or name, x)
    if func is Tensor.register_post_accumulate_grad_hook and isinstance(args[0], VocabParallelLogits):
        raise _in_place_error(resolve_name(func) or name, args[0])


def _in_place_error(name: str, logits: VocabParallelLogits | GatheredLogits) -> RuntimeError:
    if isinstance(logits, GatheredLogits):
        return RuntimeError(
            f"{name} would change a view of shape {tuple(logits.shape)} that vocabulary-sharded logits were gathered"
            " for, and the logits would not change with it: use the form that returns a new tensor (logits ="
            " logits.masked_fill(mask, value)), or continue with the gathered tensor from the start (logits ="
            " logits.full())"
        )
    return RuntimeError(
        f"{name} would change vocabulary-sharded logits in place ({logits!r}): use the form that returns a new tensor "
        "(logits = logits * 2), or continue with the gathered tensor logits.full()"
    )


def _say_gathered(func: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
    name = resolve_name(func) or getattr(func, "__name__", str(func))
    logits = next(x for x in tree_leaves((args, kwargs)) if isinstance(x, VocabParallelLogits))
    if name not in _said and logits.group.rank == 0 and not logits.one_position:
        _said.add(name)
        warnings.warn(
            f"{name} has no form for a tensor that is divided over the ranks, as logits are: it gathers one of shape "
            f"{tuple(logits.shape)} on every rank (reported once for this function; .full() gathers without a warning)",
            stacklevel=4,
        )
