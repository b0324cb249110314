"""This rank's part of a gradient that represents the whole one, so that user code and torch's own read it rightly.

A sharded parameter's ``.grad`` has the elements that this rank holds. Read like any tensor it would silently mislead:
its norm is another on every rank, its first rows are not the first rows. :class:`GradientPart` is that same tensor,
the same memory and local shape, and Python functions on it (``__torch_function__``) fall in these groups:

* **elementwise functions**, and those of lists of tensors that optimizers use, run on the plain tensor. What they give
  is again a part of a whole, so ``p.grad.abs().norm()`` is right, too. So is a plain tensor that they write, such as
  one's own buffer (``buffer.add_(p.grad)``), but no parameter. Of other operands that have the whole shape (a mask)
  this rank's part is taken;
* **quantities over the whole tensor**, norms, sums, ``isnan(...).any()``, count every element of the whole once. They
  are collective, and differentiable where second derivatives are wanted;
* **random numbers** are drawn for the whole tensor, of which this rank takes its part;
* **indices** are those of the whole tensor: ``p.grad[:100] = 0`` writes what this rank has of the first 100 rows;
* **everything else is refused**, because a function that is not listed must not be silently wrong.

Nothing is intercepted below Python: autograd adds into the plain memory, and keeps the object. Sizes
(``p.grad.shape``, ``numel()``) are those of the part, as the parameter's own are.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from lightning_autotp.gradients.counted import counted_elements, from_every_rank
from lightning_autotp.gradients.cut_parts import CutGradientPart
from lightning_autotp.gradients.elementwise import EACH_ELEMENT, become_part, elementwise
from lightning_autotp.gradients.whole_quantities import (
    QUANTITIES,
    PartOfGradient,
    first_part,
    misleading,
)
from lightning_autotp.parallel.collectives import copy_to_tensor_parallel
from lightning_autotp.parameters.part import PartOf
from lightning_autotp.ranks.group import TPGroup
from lightning_autotp.torch_functions import DRAWN_INTO, DRAWN_LIKE, functions


class GradientPart(PartOfGradient):
    """This rank's part of a gradient, or of what was computed from one elementwise; made by :func:`marked`."""

    plain = Tensor

    @property
    def said(self) -> str:
        """In words, what this is a part of."""
        part = self.part
        return f"the gradient of {part.name} ({list(part.local_shape)} of {list(part.shape)}, {part.layout})"

    @property
    def sharing(self) -> tuple[TPGroup, ...]:
        """The tensor-parallel group."""
        return (self.part.group,)

    def counted(self) -> Tensor:
        """The elements that this rank owns."""
        return self if self.part.counts_all else counted_elements(self, self.part.counted)

    def like(self, tensor: Tensor) -> Tensor:
        """The same tensor, marked as a part of the same whole."""
        return marked(tensor, self.part)

    def operand(self, x: Tensor) -> Tensor:
        """What goes with this part: a plain tensor of its shape, or of the whole shape, or broadcast to these."""
        return _operand(x, self.part)


def marked(tensor: Tensor, part: PartOf) -> GradientPart:
    """The same tensor as one that represents the whole."""
    found = tensor.as_subclass(GradientPart)
    found.part = part
    return found


def marked_like(tensor: Tensor, other: Tensor) -> Tensor:
    """The same tensor, marked if ``other`` is."""
    return marked(tensor, other.part) if isinstance(other, GradientPart) else tensor


@dataclass(frozen=True)
class Mark:
    """Hooks that mark a parameter's gradients; plain data."""

    part: PartOf

    def contribution(self, gradient: Tensor) -> Tensor:
        """A tensor hook: for what a backward pass contributes, which the user's own hooks see after this one."""
        return marked(gradient, self.part)

    def accumulated(self, parameter: Tensor) -> None:
        """A hook for when it has been accumulated: autograd keeps the object it adds to, but not the first one."""
        if type(parameter.grad) is DTensor:
            self.given(parameter)
        elif parameter.grad is not None and not isinstance(parameter.grad, PartOfGradient):
            parameter.grad = marked(parameter.grad, self.part)

    def given(self, parameter: Tensor) -> None:
        """Mark a plain tensor that code has put there, whatever other names it has."""
        gradient = parameter.grad
        for kind in (GradientPart, CutGradientPart):
            if gradient is not None and type(gradient) is kind.plain:
                become_part(gradient, kind, self.part)


# --- handlers: (function, its arguments) -> its result. Subclasses are not asked while they run. ---
def _operand(x: Tensor, part: PartOf) -> Tensor:
    if type(x) is GradientPart or (x.dim() == 0 and not x.requires_grad):
        return x
    if x.requires_grad and torch.is_grad_enabled():
        sizes = x.shape[max(0, x.dim() - len(part.shape)) :]
        before = len(part.shape) - len(sizes)
        is_part = all(dim >= before and sizes[dim - before] == part.local_shape[dim] for dim, _ in part.dims)
        if not is_part:
            x = copy_to_tensor_parallel(x, part.group)  # every rank has all of it
    return part.take(x)


def _all_equal(func: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """``torch.equal``, ``torch.allclose``: whether they are everywhere."""
    gradient = first_part(args, kwargs)
    here = func(*(_operand(x, gradient.part) if type(x) is Tensor else x for x in args), **kwargs)
    vote = torch.tensor(here, dtype=torch.int32, device=gradient.device)
    return bool(from_every_rank(vote, gradient.part.group).all())


def _draw_like(func: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Tensor:
    gradient = first_part(args, kwargs)
    if args[:1] != (gradient,) and kwargs.get("input") is not gradient:
        raise misleading(func, gradient)
    options = {name: x for name, x in kwargs.items() if name != "input"}
    drawn = func(_whole_like(gradient), *args[1:], **options)
    return marked(gradient.part.take(drawn), gradient.part)


def _draw_into(func: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Tensor:
    gradient, *others = args
    if not isinstance(gradient, GradientPart) or any(isinstance(x, Tensor) for x in (*others, *kwargs.values())):
        raise misleading(func, first_part(args, kwargs))
    return gradient.copy_(gradient.part.take(func(_whole_like(gradient), *others, **kwargs)))


def _whole_like(gradient: GradientPart) -> Tensor:
    """An empty tensor of the whole shape, with the part's order in memory, in which random numbers are drawn."""
    order = sorted(range(gradient.dim()), key=gradient.stride, reverse=True)
    return torch.empty_permuted(gradient.part.shape, order, dtype=gradient.dtype, device=gradient.device)


def _get_window(func: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Tensor:
    gradient, index = args
    found = _window(gradient, _items(func, gradient, index)) if isinstance(gradient, GradientPart) else None
    if found is None:
        raise misleading(func, first_part(args, kwargs), f", with {_said(index)}")
    return found


def _set_window(func: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
    gradient, index, value = args
    if not isinstance(gradient, GradientPart):
        raise misleading(func, first_part(args, kwargs), ", written to a part of another tensor")
    if isinstance(index, Tensor) and index.dtype == torch.bool and (index.dim() > 1 or isinstance(index, GradientPart)):
        elementwise(Tensor.copy_, (gradient, torch.where(_operand(index, gradient.part), value, gradient)), {})
        return
    items = _items(func, gradient, index)
    window = _window(gradient, items)
    if window is not None:
        if isinstance(value, Tensor):
            elementwise(Tensor.copy_, (window, value), {})
        else:
            window.fill_(value)
        return
    chosen = [dim for dim, item in enumerate(items) if not isinstance(item, slice) or item != slice(None)]
    if len(chosen) != 1 or (isinstance(value, Tensor) and value.dim()):
        raise misleading(func, gradient, f", with {_said(index)}")
    # A single index, a step, a list or a mask, along one sharded dim: those of its elements that are here.
    (dim,) = chosen
    if gradient.part.ownership(dim) is None:
        func(gradient, (*[slice(None)] * dim, items[dim]), value)
        return
    selected = torch.zeros(gradient.part.shape[dim], dtype=torch.bool, device=gradient.device)
    selected[items[dim]] = True
    here = selected[gradient.part.indices(dim, gradient.device)]
    func(gradient, (*[slice(None)] * dim, here), value)


def _items(func: Callable[..., Any], gradient: GradientPart, index: Any) -> list[Any]:
    """An index expression as items for the first dims, without an ellipsis."""
    items = list(index) if isinstance(index, tuple) else [index]
    ellipses = [place for place, item in enumerate(items) if item is Ellipsis]
    if ellipses:
        missing = gradient.dim() - len(items) + 1
        items[ellipses[0] : ellipses[0] + 1] = [slice(None)] * missing
    one_dim = all(
        isinstance(item, int | slice | list) or (isinstance(item, Tensor) and item.dim() <= 1) for item in items
    )
    if (
        len(items) > gradient.dim()
        or not one_dim
        or any(item is Ellipsis or item is True or item is False for item in items)
    ):
        raise misleading(func, gradient, f", with {_said(index)}")
    return items


def _window(gradient: GradientPart, items: Sequence[Any]) -> GradientPart | None:
    found = gradient.part.window(items) if all(isinstance(item, int | slice) for item in items) else None
    if found is None:
        return None
    local, part = found
    return marked(Tensor.__getitem__(gradient, local), part)


def _said(index: Any) -> str:
    return f"a tensor {tuple(index.shape)} as the index" if isinstance(index, Tensor) else f"the index {index!r}"


def _communicate(func: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Sums over, or copies to, ranks that hold the same part."""
    gradient = first_part(args, kwargs)
    place = {dist.all_reduce: 2, dist.broadcast: 2}[func]
    group = kwargs.get("group") if len(args) <= place else args[place]
    peers = set(dist.get_process_group_ranks(gradient.part.group.process_group)) - {dist.get_rank()}
    if peers & set(dist.get_process_group_ranks(group)):
        raise misleading(func, gradient, ", over ranks that have other parts of it")
    return func(*args, **kwargs)


def _copy(func: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    gradient, memo = args
    # Not by the function itself: copy.deepcopy lets the memo keep what it copies, whose id would else come again.
    return marked(copy.deepcopy(gradient.as_subclass(Tensor), memo), gradient.part)


def _pickle(func: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    return func(args[0].as_subclass(Tensor), *args[1:], **kwargs)


def _write(func: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> str:
    gradient = args[0]
    text = func(gradient.as_subclass(Tensor), *args[1:], **kwargs)
    return f"this rank's part of {gradient.said}: {text}" if isinstance(gradient, GradientPart) else text


# --- which functions are handled how ---

GradientPart.handlers = {
    **QUANTITIES,
    **EACH_ELEMENT,
    **dict.fromkeys(functions("equal allclose"), _all_equal),
    **dict.fromkeys(DRAWN_LIKE, _draw_like),
    **dict.fromkeys(DRAWN_INTO, _draw_into),
    **dict.fromkeys((dist.all_reduce, dist.broadcast), _communicate),
    Tensor.__getitem__: _get_window,
    Tensor.__setitem__: _set_window,
    Tensor.__deepcopy__: _copy,
    Tensor.__reduce_ex__: _pickle,
    Tensor.__repr__: _write,
    Tensor.__format__: _write,
}
