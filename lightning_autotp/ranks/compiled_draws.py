"""A call that draws a rank's own random numbers, as one operator that ``torch.compile`` takes into its graph.

Compiled code cannot change generators for one call: its random operators are moved, united and drawn in another order.
So the common stream gives the seeds, by an operator like any other, and what depends on a rank's own seed happens
inside one operator. The backward pass runs the call again with the seed, so nothing that was drawn is kept.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from inspect import signature
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor
from torch.overrides import resolve_name

from lightning_autotp.private.torch_private import decided_while_compiling, with_autograd
from lightning_autotp.ranks.group import TPGroup
from lightning_autotp.ranks.random_numbers import own_seed, seeded

_TENSOR = "tensor"
_CHANCES = ("p", "dropout_p")


def draw_in_compiled_code(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], group: TPGroup) -> Any:
    """``func(*args, **kwargs)`` with this rank's own numbers, where it is being compiled. Not collective.

    Every rank of the group must come here alike. Numbers and results are those of :func:`own_numbers`, in a graph that
    runs torch's own operators.

    Args:
        func: a torch function that returns one tensor.
        args: its arguments, of which tensors are not nested in others.
        kwargs: its keyword arguments, likewise.
        group: the ranks that draw independently of each other.
    """
    tensors = [value for value in (*args, *kwargs.values()) if isinstance(value, Tensor)]
    given = tuple(_TENSOR if isinstance(value, Tensor) else value for value in args)
    named = tuple((name, _TENSOR if isinstance(value, Tensor) else value) for name, value in kwargs.items())
    kind = tensors[0].device.type
    autocast = str(torch.get_autocast_dtype(kind)) if torch.is_autocast_enabled(kind) else ""
    call = _written(func, given, named, autocast)
    return func(*args, **kwargs) if not call else torch.ops.lightning_autotp.drawn(call, own_seed(group), tensors)


@decided_while_compiling
def _written(func: Any, args: tuple[Any, ...], kwargs: tuple[tuple[str, Any], ...], autocast: str) -> str:
    """A call without its tensors, as text; empty if it draws nothing.

    Raises:
        NotImplementedError: for a call that changes its argument.
    """
    named = dict(kwargs)
    name = resolve_name(func)
    try:
        said = signature(func).bind(*args, **named)
        said.apply_defaults()
        known = said.arguments
    except ValueError:  # a function that is not written in Python
        known = named
    if name is None or name.endswith("_") or known.get("inplace"):
        raise NotImplementedError(
            f"{name or func} draws a rank's own random numbers and changes its argument in place: no compiled code can"
            " do that. Set inplace=False, or compile without that module"
        )
    if known.get("training") is False or any(known.get(chance) == 0 for chance in _CHANCES):
        return ""
    return json.dumps([name, args, named, autocast])


def _run(call: str, tensors: Sequence[Tensor]) -> Tensor:
    name, args, kwargs, autocast = json.loads(call)
    left = iter(tensors)
    args = [next(left) if value == _TENSOR else value for value in args]
    kwargs = {key: next(left) if value == _TENSOR else value for key, value in kwargs.items()}
    kind, dtype = tensors[0].device.type, attrgetter(autocast.removeprefix("torch."))(torch) if autocast else None
    with torch.autocast(kind, dtype, enabled=bool(autocast)):
        result: Tensor = attrgetter(name.removeprefix("torch."))(torch)(*args, **kwargs)
    return result


@torch.library.custom_op("lightning_autotp::drawn", mutates_args=())
def _drawn(call: str, seed: Tensor, tensors: Sequence[Tensor]) -> Tensor:
    with seeded(int(seed), tensors[0].device):
        return _run(call, tensors).clone()


@_drawn.register_fake
def _(call: str, seed: Tensor, tensors: Sequence[Tensor]) -> Tensor:
    return _run(call, tensors).clone()


@torch.library.custom_op("lightning_autotp::drawn_backward", mutates_args=())
def _drawn_backward(call: str, seed: Tensor, tensors: Sequence[Tensor], grad: Tensor) -> list[Tensor]:
    with seeded(int(seed), grad.device), with_autograd():
        again = [tensor.detach().requires_grad_(tensor.is_floating_point()) for tensor in tensors]
        asked = [tensor for tensor in again if tensor.requires_grad]
        found = torch.autograd.grad(_run(call, again), asked, grad, materialize_grads=True)
    return [gradient.clone(memory_format=torch.contiguous_format) for gradient in found]


@_drawn_backward.register_fake
def _(call: str, seed: Tensor, tensors: Sequence[Tensor], grad: Tensor) -> list[Tensor]:
    return [torch.empty_like(x, memory_format=torch.contiguous_format) for x in tensors if x.is_floating_point()]


def _keep(ctx: Any, inputs: Any, output: Tensor) -> None:
    ctx.call, seed, tensors = inputs
    ctx.save_for_backward(seed, *tensors)


def _differentiate(ctx: Any, grad: Tensor) -> Any:
    seed, *tensors = ctx.saved_tensors
    found = iter(torch.ops.lightning_autotp.drawn_backward(ctx.call, seed, tensors, grad))
    return None, None, [next(found) if tensor.is_floating_point() else None for tensor in tensors]


_drawn.register_autograd(_differentiate, setup_context=_keep)
