"""What a column-parallel region's input sends runs while products are computed; of a gathered one only a part is kept.

Autograd runs of the nodes that are ready the one first that the forward made last. So the order in which a forward
makes nodes decides what overlaps. A region whose input ``x`` goes into products with ``W_1 .. W_n`` makes them in this
order:

======================  ==========================  ==================================================
node                    forward                     backward
======================  ==========================  ==================================================
:class:`_Wait`          ``x_r``                     waits until ``dx`` has been summed
:class:`_Later`, n of   ``W_i``                     ``dW_i = dy_i^T x``, from what the product left
:class:`_Launch`        ``x`` from ``x_r``          starts the sum of ``dx``
:class:`_Product`, n    ``y_i = x W_i^T (+ b_i)``   starts to gather ``x`` again, ``dx_i = dy_i W_i``
======================  ==========================  ==================================================

``x_r`` is ``x`` itself, and the sum an all-reduce; or it is this rank's part, which is gathered (sequence parallelism),
and the sum a reduce-scatter. In the backward pass the products run, then what they give for ``x`` is added up and its
sum over the ranks launched, then the weight gradients are computed, and then the sum is waited for. Each weight's
gradient comes to its parameter as ever, so hooks, accumulation and FSDP see nothing of it. (Megatron-LM launches the
sum between the two products of one layer's backward, ``LinearWithGradAccumulationAndAsyncCommunication``; here it is
one sum for all layers of a region.)

The weight gradients need the whole ``x``. A gathered one is not kept for them, but gathered again, once for all the
products of a region, while they compute ``dx_i``: after *Reducing Activation Recomputation in Large Transformer Models*
(Korthikanti et al., https://arxiv.org/abs/2205.05198).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import Function
from torch.nn import functional as F

from lightning_autotp.layouts.types import Invariant, Replicate, Shard
from lightning_autotp.parallel.collectives import begin_backward, begin_gather, convert, transition_backward, wait
from lightning_autotp.parallel.float8 import local_product
from lightning_autotp.private.torch_private import (
    FakeTensor,
    after_backward,
    backward_pass,
    base_of,
    has_values,
    is_in_backward,
    own_shape,
)
from lightning_autotp.quantized.float8 import float8_of
from lightning_autotp.ranks.group import TPGroup

_WHOLE = Invariant()
_NOTE = "autotp_region"


class _Left:
    """What a product leaves in a backward pass for its weight's gradient, until that is computed in the same pass.

    Attributes:
        values: the number of the pass, the gradient of the result, and what gives the input.
    """

    values: tuple[int, Tensor, Callable[[], Tensor]] | None = None


class _Gathering:
    """A gather that is under way in a backward pass.

    Args:
        finish: gives the whole tensor.
        users: how many will ask for it.
    """

    def __init__(self, finish: Callable[[], Tensor], users: int) -> None:
        self._finish: Callable[[], Tensor] | None = finish
        self._users = users
        self._whole: Tensor | None = None

    def end(self) -> None:
        """Wait for what was not asked for, so that nothing writes into memory that is used again."""
        if self._finish is not None:
            self._finish()

    def whole(self) -> Tensor:
        """The whole tensor, which is kept until the last user has it."""
        whole = self._whole if self._finish is None else self._finish()
        assert whole is not None  # as often as there are users
        self._finish = None  # the memory is its own, too
        self._users -= 1
        self._whole = whole if self._users > 0 else None
        return whole


class _Gathered:
    """How an input was gathered: in a backward pass that is done again, once for all products that need it.

    Nodes keep it until all of the graph is gone, so it keeps no tensor: each product saves this rank's part.

    Args:
        source: the layout of the part.
        group: the tensor-parallel group.

    Attributes:
        users: how many products of each dtype keep the part.
    """

    def __init__(self, source: Shard, group: TPGroup) -> None:
        self.source, self.group = source, group
        self.users = Counter[torch.dtype]()
        self._is_of_backward = is_in_backward()
        self._under_way: dict[torch.dtype, _Gathering] = {}

    def used(self, dtype: torch.dtype) -> None:
        """Note a product that keeps the part; not one that a backward pass computes again, which is counted already."""
        self.users[dtype] += is_in_backward() == self._is_of_backward

    def again(self, part: Tensor, dtype: torch.dtype) -> Callable[[], Tensor]:
        """Begin to gather; what this returns gives the whole tensor, to be called once. Collective."""
        if torch.is_grad_enabled():  # under create_graph=True
            whole = convert(part.to(dtype), self.source, Replicate(), self.group)
            return lambda: whole
        if not self._under_way:
            after_backward(self._end)
        if dtype not in self._under_way:
            ((dim, ownership),) = self.source.dims
            gather = begin_gather(part.to(dtype), self.group, dim, ownership)
            self._under_way[dtype] = _Gathering(gather, self.users[dtype])
        return self._under_way[dtype].whole

    def _end(self) -> None:
        """At the end of a pass: one that computes no weight gradients asks for nothing that was begun."""
        for gathering in self._under_way.values():
            gathering.end()
        self._under_way.clear()


class _Note:
    """What is noted on a tensor that column-parallel layers may take.

    Args:
        gathered: how it was gathered, and this rank's part of it, if it was.

    Attributes:
        weights: of each layer that is to take it, ``W_i`` and what the product leaves in; ``None`` once it has.
    """

    def __init__(self, gathered: tuple[_Gathered, Tensor] | None) -> None:
        self.gathered = gathered
        self.weights: dict[nn.Module, tuple[Tensor, _Left] | None] = {}


class _Wait(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad if torch.is_grad_enabled() else wait(grad)


class _Launch(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, source: Invariant | Shard, group: TPGroup) -> Tensor:
        if isinstance(source, Invariant):
            ctx.where = ("I", "R"), group, 0, None
            return x.view_as(x)
        ((dim, ownership),) = source.dims
        ctx.where = ("S", "R"), group, dim, ownership
        return convert(x, source, Replicate(), group)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        # At once under create_graph=True, and where anomaly mode looks at what this returns.
        is_at_once = torch.is_grad_enabled() or torch.is_anomaly_enabled()
        begin = transition_backward if is_at_once else begin_backward
        return begin(grad, *ctx.where), None, None


class _Later(Function):
    @staticmethod
    def forward(ctx: Any, weight: Tensor, left: _Left) -> Tensor:
        ctx.set_materialize_grads(False)
        ctx.left = left
        return weight.view_as(weight)

    @staticmethod
    def backward(ctx: Any, given: Tensor | None) -> tuple[Tensor | None, None]:
        left, ctx.left.values = ctx.left.values, None
        if left is None or left[0] != backward_pass():  # the weight's part in a derivative of the input's gradient
            return given, None
        _, grad, x = left
        own = _weight_gradient(grad, x())
        return own if given is None else own + given, None  # what else depends on the weight


class _Product(Function):
    """``x W^T (+ b)``, of which the backward pass leaves the weight's gradient for later where it can."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        part: Tensor | None,
        weight: Tensor,
        bias: Tensor | None,
        left: _Left | None,
        gathered: _Gathered | None,
    ) -> Tensor:
        ctx.save_for_backward(x if part is None else part, weight)
        ctx.left, ctx.gathered, ctx.has_bias = left, gathered, bias is not None
        y = F.linear(x, weight, bias)
        return own_shape(y, y.shape)  # which may be a view inside, and code may change it in place

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, None, Tensor | None, Tensor | None, None, None]:
        kept, weight = ctx.saved_tensors
        x = (lambda: kept) if ctx.gathered is None else ctx.gathered.again(kept, weight.dtype)
        of_x = grad @ weight if ctx.needs_input_grad[0] else None
        of_weight = None
        if ctx.left is None:
            of_weight = _weight_gradient(grad, x())
        else:
            ctx.left.values = backward_pass(), grad, x
        return of_x, None, of_weight, grad.flatten(0, -2).sum(0) if ctx.has_bias else None, None, None


def _weight_gradient(grad: Tensor, x: Tensor) -> Tensor:
    """``[..., out]``, ``[..., in] -> [out, in]``; ``x`` may have other dims before the last one, in the same order."""
    grad = grad.flatten(0, -2)
    return grad.t() @ x.reshape(-1, x.shape[-1])


def replicate(x: Tensor, group: TPGroup, layers: Iterable[nn.Linear], source: Invariant | Shard = _WHOLE) -> Tensor:
    """I → R or S → R for a tensor that is the input of column-parallel layers. The backward pass is collective.

    Its sum over the ranks overlaps with the weight gradients of those of the layers that are called with it by
    :func:`product`. In compiled code, without gradients, under double backward, and in anomaly mode, nothing overlaps.

    Args:
        x: ``[batch, ..., in]``, or this rank's part of it.
        group: the tensor-parallel group.
        layers: column-parallel layers, ``[out/tp, in]``, none of them in float8.
        source: the tensor's layout.
    """
    if not x.requires_grad or not _is_recorded(x):
        return convert(x, source, Replicate(), group)
    note, is_cast = _Note(_gathered(x)), torch.is_autocast_enabled(x.device.type)
    x = _Wait.apply(x)
    for layer in layers:
        weight = layer.weight
        if weight.requires_grad and type(weight) in _SPLIT:
            left = _Left()
            note.weights[layer] = _Later.apply(_cast(weight) if is_cast else weight, left), left
    x = _Launch.apply(x, source, group)
    setattr(x, _NOTE, note)
    return x


def note_gathered(whole: Tensor, part: Tensor, source: Shard, group: TPGroup) -> None:
    """Note on a gathered tensor how to gather it again: then :func:`product` keeps the part. Not collective."""
    if _is_recorded(whole):
        gathered, note = (_Gathered(source, group), part), getattr(whole, _NOTE, None)
        if note is None:
            setattr(whole, _NOTE, _Note(gathered))
        else:
            note.gathered = gathered


def product(x: Tensor, layer: nn.Linear, group: TPGroup) -> Tensor:
    """The layer's product, ``[batch, ..., in] -> [batch, ..., out/tp]``.

    Not collective, but where the layer computes in float8; the backward pass is, if the input was gathered.
    """
    weight: Tensor = layer.weight
    bias: Tensor | None = layer.bias
    left: _Left | None = None
    note: _Note | None = getattr(x, _NOTE, None) if torch.is_grad_enabled() else None
    if note is not None and layer in note.weights:
        how = None if note.gathered is None or torch.compiler.is_compiling() else note.gathered
        # A second call has a gradient of its own. It is the same node, for it may be the first one computed again
        # (checkpointing), which must keep the same tensors.
        noted, note.weights[layer] = note.weights[layer], None
        if noted is not None:
            weight, left = noted
    else:
        how = _gathered(x) if _is_recorded(x) and weight.requires_grad else None
        if how is None or type(weight) not in _SPLIT or float8_of(layer) is not None:
            return local_product(x, layer, ("out",), group, bias)
    if torch.is_autocast_enabled(x.device.type):
        x, weight, bias = _cast(x), _cast(weight), None if bias is None else _cast(bias)
    gathered, part = how or (None, None)
    if gathered is not None:
        gathered.used(weight.dtype)
    return _Product.apply(x, part, weight, bias, left, gathered)


_SPLIT = Tensor, nn.Parameter, FakeTensor
"""Types of weights whose gradient may be computed apart from the rest of a backward pass."""


def _is_recorded(x: Tensor) -> bool:
    return torch.is_grad_enabled() and has_values(x) and not torch.compiler.is_compiling()


def _gathered(x: Tensor) -> tuple[_Gathered, Tensor] | None:
    """What was noted on a tensor, or on the one that it is a reshaped view of: how it was gathered, and the part."""
    note: _Note | None = getattr(x, _NOTE, None)
    base = base_of(x)
    if base is not None and (note is None or note.gathered is None):
        note = getattr(base, _NOTE, None) if base.numel() == x.numel() and x.is_contiguous() else None
    return None if note is None else note.gathered


def _cast(tensor: Tensor) -> Tensor:
    """The tensor as autocast gives it to a product."""
    return tensor.to(torch.get_autocast_dtype(tensor.device.type))
