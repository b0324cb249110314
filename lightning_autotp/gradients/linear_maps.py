"""Linear maps over the ranks that autograd goes through, any number of times."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

Map = Callable[[Tensor], Tensor]
"""A linear function of a tensor, which may communicate."""


def linear(tensor: Tensor, forward: Map, backward: Map) -> Tensor:
    """``forward(tensor)``, whose gradient goes through ``backward``, and the gradient of that through ``forward``.

    Collective where ``forward`` is, and so is the backward pass where ``backward`` is.
    """
    return _Linear.apply(tensor, forward, backward) if torch.is_grad_enabled() else forward(tensor)


def same(tensor: Tensor) -> Tensor:
    """The map that changes nothing: what a sum over ranks has for a backward, where all of them use it alike."""
    return tensor.view_as(tensor)


def is_linear_map(node: Any) -> bool:
    """Whether a node of autograd's graph is one of :func:`linear`."""
    return bool(node.name() == f"{_Linear.__name__}Backward")


class _Linear(Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, forward: Map, backward: Map) -> Tensor:
        ctx.maps = backward, forward
        return forward(tensor)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        return linear(gradient, *ctx.maps), None, None
