"""Tensors that are in the places of a parallel model's parameters for one call (``torch.func.functional_call``).

They are of this rank's shapes. What was computed of parameters and their gradients (``p - lr * g``, the inner step of
MAML) is a part that represents the whole, as a gradient is: the model's layers take the same memory as a plain tensor.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from lightning_autotp.gradients.linear_maps import is_linear_map, nodes_before
from lightning_autotp.gradients.parts import GradientPart, Mark
from lightning_autotp.parameters.state import ParallelState, ParameterPlace
from lightning_autotp.private.torch_private import gradient_hooks, parameters_of

_SUMMED = "autotp: what has a hook that sums its gradient"
"""In the metadata of a node of autograd's graph: the name of the parameter in whose place its result was given."""


def take_given(places: Iterable[ParameterPlace], state: ParallelState) -> list[tuple[ParameterPlace, Tensor]]:
    """Make what is given in the places of parameters what the layers of the model can use. Not collective.

    Returns:
        What has another tensor in its place until the call is over, and where: for :func:`give_back`.

    Raises:
        RuntimeError: if a gradient would be summed over the ranks twice: for what is given, and for the parameter that
            it was computed of.
    """
    plain: dict[int, Tensor] = {}  # tied ones once
    taken: list[tuple[ParameterPlace, Tensor]] = []
    for place in places:
        given: Any = place.parameter
        if isinstance(given, nn.Parameter):
            continue
        is_summed = place.meta.name in state.gradient_sums and given.requires_grad and torch.is_grad_enabled()
        if is_summed and _is_made_of(given, place.meta.name):
            raise RuntimeError(
                f"{place.name} was given for one call, and was computed of {place.meta.name} itself, or of what was"
                " given for it in an earlier call. Its gradient would be summed over the ranks twice, for what is given"
                " and for what that was computed of. Compute it of"
                f" lightning_autotp.full_tensor(model, {place.meta.name!r}), once, if that has the shape"
                f" {list(given.shape)}; of a leaf (detach().clone().requires_grad_()); or leave it out of what is given"
            )
        if is_summed and given.grad_fn is not None:
            given.grad_fn.metadata[_SUMMED] = place.meta.name
        if isinstance(given, GradientPart):
            if id(given) not in plain:
                plain[id(given)] = given.as_subclass(Tensor)
                _mark_gradient(given)
            _put(place, plain[id(given)])
            taken.append((place, given))
    return taken


def give_back(taken: Iterable[tuple[ParameterPlace, Tensor]]) -> None:
    """Put what was given back where it was: ``functional_call`` hands it to its caller from there."""
    for place, given in taken:
        _put(place, given)


def _put(place: ParameterPlace, tensor: Tensor) -> None:
    parameters_of(place.module)[place.attribute] = tensor  # type: ignore[assignment]


def _mark_gradient(given: GradientPart) -> None:
    """Its gradient is a part, too, as a parameter's is."""
    mark = Mark(given.part).contribution
    if given.requires_grad and mark not in gradient_hooks(given):
        given.register_hook(mark)


def _is_made_of(given: Tensor, name: str) -> bool:
    """Whether a parameter of this name, whose gradient is summed over the ranks, went into a tensor as it is.

    Not as ``full_tensor`` gives it, nor by way of its own gradient: there the ranks' terms are told from the sum.
    """
    for node in nodes_before(given.grad_fn, is_linear_map):
        if node is not given.grad_fn and node.metadata.get(_SUMMED) == name:
            return True
        leaf = getattr(node, "variable", None)
        if isinstance(leaf, Tensor) and any(getattr(hook, "name", None) == name for hook in gradient_hooks(leaf)):
            return True
    return False
