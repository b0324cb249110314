"""The sum of a column-parallel region's input gradient runs while the region's weight gradients are computed.

Autograd runs of the nodes that are ready the one first that the forward made last. So the order in which a forward
makes nodes decides what overlaps. A region whose input ``x`` goes into products with ``W_1 .. W_n`` makes them in this
order:

======================  ==========================  ==================================================
node                    forward                     backward
======================  ==========================  ==================================================
:class:`_Wait`          ``x``                       waits until ``dx`` has been summed
:class:`_Later`, n of   ``W_i``                     ``dW_i = dy_i^T x``, from what the product left
:class:`_Launch`        ``x``                       starts the all-reduce of ``dx``
:class:`_Product`, n    ``y_i = x W_i^T (+ b_i)``   ``dx_i = dy_i W_i``; leaves ``dy_i`` and ``x`` to ``_Later``
======================  ==========================  ==================================================

In the backward pass the products run, then what they give for ``x`` is added up and its sum over the ranks launched,
then the weight gradients are computed, and then the sum is waited for. Each weight's gradient comes to its parameter as
ever, so hooks, accumulation and FSDP see nothing of it. (Megatron-LM launches the sum between the two products of one
layer's backward, ``LinearWithGradAccumulationAndAsyncCommunication``; here it is one sum for all layers of a region.)
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import Function
from torch.nn import functional as F

from lightning_autotp.layouts.types import Invariant, Replicate
from lightning_autotp.parallel.collectives import convert, transition_backward
from lightning_autotp.private.distributed_private import collectives
from lightning_autotp.private.torch_private import backward_pass
from lightning_autotp.ranks.group import TPGroup

_NAME = "autotp_weights"


class _Left:
    """What a product leaves in a backward pass for its weight's gradient, until that is computed in the same pass."""

    def __init__(self) -> None:
        self._left: tuple[int, Tensor, Tensor, Tensor] | None = None

    def leave(self, grad: Tensor, x: Tensor, weight: Tensor) -> Tensor:
        """Leave the gradient of the result and the input; gives a tensor like the weight, without values."""
        instead = grad.new_zeros(()).expand(weight.shape)
        self._left = backward_pass(), grad, x, instead
        return instead

    def gradient(self, given: Tensor) -> Tensor:
        """The weight's gradient, where autograd gives this: what was returned instead of it, or more."""
        left, self._left = self._left, None
        if left is None or left[0] != backward_pass():  # the weight's part in a derivative of the input's gradient
            return given
        _, grad, x, instead = left
        own = grad.flatten(0, -2).t() @ x.flatten(0, -2)
        return own if given.data_ptr() == instead.data_ptr() else own + given


class _Wait(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad if torch.is_grad_enabled() or not grad.numel() else collectives.wait_tensor(grad)


class _Launch(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: TPGroup) -> Tensor:
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        if torch.is_grad_enabled() or not grad.numel():  # under create_graph=True: summed at once
            return transition_backward(grad, ("I", "R"), ctx.group, 0, None), None
        return collectives.all_reduce(grad.contiguous(), "sum", ctx.group.name), None


class _Later(Function):
    @staticmethod
    def forward(ctx: Any, weight: Tensor, left: _Left) -> Tensor:
        ctx.left = left
        return weight.view_as(weight)

    @staticmethod
    def backward(ctx: Any, given: Tensor) -> tuple[Tensor, None]:
        return ctx.left.gradient(given), None


class _Product(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, left: _Left) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.left, ctx.has_bias = left, bias is not None
        return F.linear(x, weight, bias)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, Tensor | None, None]:
        x, weight = ctx.saved_tensors
        instead = ctx.left.leave(grad, x, weight)
        return grad @ weight, instead, grad.flatten(0, -2).sum(0) if ctx.has_bias else None, None


def replicate(x: Tensor, group: TPGroup, layers: Iterable[nn.Linear]) -> Tensor:
    """I → R for a tensor that is the input of column-parallel layers. The backward pass is collective.

    Its sum over the ranks overlaps with the weight gradients of those of the layers that are called with it by
    :func:`product`. In compiled code, without gradients, and under double backward, nothing overlaps.

    Args:
        x: ``[batch, ..., in]``.
        group: the tensor-parallel group.
        layers: column-parallel layers, ``[out/tp, in]``.
    """
    if not x.requires_grad or not torch.is_grad_enabled() or x.is_meta or torch.compiler.is_compiling():
        return convert(x, Invariant(), Replicate(), group)
    trained = [layer for layer in layers if type(layer.weight) is nn.Parameter and layer.weight.requires_grad]
    x = _Wait.apply(x)
    weights: dict[nn.Module, tuple[Tensor, _Left]] = {}
    for layer in trained:
        left = _Left()
        weights[layer] = _Later.apply(_cast(layer.weight), left), left
    x = _Launch.apply(x, group)
    setattr(x, _NAME, weights)
    return x


def product(x: Tensor, layer: nn.Linear) -> Tensor:
    """The layer's product, ``[batch, ..., in] -> [batch, ..., out/tp]``. Not collective."""
    weights: dict[nn.Module, tuple[Tensor, _Left]] = getattr(x, _NAME, {})
    weight, left = weights.pop(layer, (None, None))  # a second call has a gradient of its own
    if weight is None:
        return F.linear(x, layer.weight, layer.bias)
    bias = None if layer.bias is None else _cast(layer.bias)
    return _Product.apply(_cast(x), weight, bias, left)


def _cast(tensor: Tensor) -> Tensor:
    """The tensor as autocast gives it to a product."""
    kind = tensor.device.type
    return tensor.to(torch.get_autocast_dtype(kind)) if torch.is_autocast_enabled(kind) else tensor
