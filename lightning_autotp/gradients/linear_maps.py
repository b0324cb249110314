"""Linear maps over the ranks that autograd goes through, any number of times."""

from __future__ import annotations

from collections.abc import Callable, Iterator
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


def nodes_before(node: Any, is_end: Callable[[Any], bool]) -> Iterator[Any]:
    """A node of autograd's graph and those before it, each once; none before one for which ``is_end`` says so."""
    waiting, seen = [node], set()
    while waiting:
        node = waiting.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        yield node
        if not is_end(node):
            waiting += [before for before, _ in node.next_functions]


class _Linear(Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, forward: Map, backward: Map) -> Tensor:
        ctx.maps = backward, forward
        return forward(tensor)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        return linear(gradient, *ctx.maps), None, None
