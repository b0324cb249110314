"""Trying an optimizer on small random tensors: whether it updates a tensor alike in two ways.

Whether an optimizer may step something else than one process's whole tensors, one and all, depends on what its step
computes, and no list of classes tells that. So it is tried: made twice, on the same values and with the same gradients,
and both times asked for the update.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from typing import Any, TypeVar

import torch
from torch import Tensor

from lightning_autotp.optimizers.stepping import plain_step

Found = TypeVar("Found")


class Unknown(Exception):
    """An optimizer cannot be tried; says why."""


def first_that_runs(ways: Iterable[Callable[[], Found]], device: torch.device) -> Found:
    """What the first of several ways to try an optimizer gives, of those that raise nothing.

    They warn of nothing, run as written what is compiled, and leave the device's and the host's random state as it was.

    Raises:
        Unknown: if none runs; says what the first one raised.
    """
    first: Exception | None = None
    for way in ways:
        try:
            with ExitStack() as context:
                context.enter_context(warnings.catch_warnings())
                warnings.simplefilter("ignore")
                context.enter_context(torch.compiler.set_stance("force_eager"))
                context.enter_context(torch.random.fork_rng([device] if device.type == "cuda" else []))
                return way()
        except Exception as error:  # of code of any kind
            first = first or error
    raise Unknown(str(first) if isinstance(first, Unknown) else f"on random tensors, {type(first).__name__}: {first}")


def updates(
    optimizer: Any, tensors: Sequence[Tensor], gradients: Sequence[Tensor], with_closure: bool = False
) -> list[Tensor]:
    """How far steps move an optimizer's tensors.

    Args:
        optimizer: has these tensors; also one that wraps others.
        tensors: of any shapes.
        gradients: of each tensor, ``[steps, *shape]``.
        with_closure: whether a step is given a closure.

    Returns:
        Of each tensor what it is afterwards, less what it was.
    """
    starts = [tensor.detach().clone() for tensor in tensors]
    train = getattr(optimizer, "train", None)  # schedule-free optimizers have two modes
    if callable(train):
        train()
    step = plain_step(optimizer)
    for at_once in zip(*gradients, strict=True):
        pairs = list(zip(tensors, at_once, strict=True))

        def backward(pairs: list[tuple[Tensor, Tensor]] = pairs) -> None:
            for tensor, gradient in pairs:
                tensor.grad = gradient.clone(memory_format=torch.contiguous_format)

        def closure(pairs: list[tuple[Tensor, Tensor]] = pairs) -> Tensor:
            backward(pairs)
            return torch.stack([(tensor.detach() * gradient).sum() for tensor, gradient in pairs]).sum()

        if with_closure:
            step(optimizer, closure)
        else:
            backward()
            step(optimizer)
    return [tensor.detach() - start for tensor, start in zip(tensors, starts, strict=True)]


def difference(update: Tensor, other: Tensor) -> float:
    """The greatest difference between two updates of a tensor, relative to the greatest of the second; may be NaN.

    Raises:
        Unknown: if the second one is nothing, or not finite.
    """
    greatest = other.abs().max().item()
    if not 0 < greatest < float("inf"):
        raise Unknown("on random tensors it makes no update that could be compared")
    return (update - other).abs().max().item() / greatest


def moving(options: Mapping[str, Any]) -> dict[str, Any]:
    """A parameter group's options with a learning rate that is not zero, as it is where a warm-up begins."""
    rate = options.get("lr")
    if rate is None or float(rate):
        return dict(options)
    return {**options, "lr": rate + (float(options.get("initial_lr", 0)) or 1e-3)}
