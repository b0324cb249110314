"""Elementwise functions of parts of gradients: what they give, and what they write, are parts of such wholes, too."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from torch import Tensor, nn

from lightning_autotp.gradients.whole_quantities import (
    Handler,
    PartOfGradient,
    first_part,
    is_in_optimizer,
    misleading,
)
from lightning_autotp.parameters.part import PartOf
from lightning_autotp.private.torch_private import LIST_UPDATES, base_of
from lightning_autotp.torch_functions import ELEMENTWISE, IN_PLACE


def become_part(tensor: Tensor, kind: type[PartOfGradient], part: PartOf) -> None:
    """Let a plain tensor, the same object, represent the whole."""
    tensor.__class__ = kind
    assert isinstance(tensor, PartOfGradient)
    tensor.part = part


def elementwise(func: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """The handler of an elementwise function."""
    gradient = first_part(args, kwargs)
    part, shape, kind = gradient.part, gradient.shape, type(gradient)
    written = args[0] if func in IN_PLACE else kwargs.get("out")
    as_they_are = True
    for x in (*args, *kwargs.values()) if kwargs else args:
        if type(x) is kind:
            if x.part is not part and not x.part.is_laid_out_as(part):
                raise misleading(func, gradient, f", with one of the gradient of {x.part.name}, which lies differently")
        elif type(x) is not float and x is not written and isinstance(x, Tensor) and x.shape != shape:
            as_they_are = False
    if not as_they_are:
        args = [gradient.operand(x) if isinstance(x, Tensor) and x is not written else x for x in args]
        kwargs = {name: gradient.operand(x) if isinstance(x, Tensor) else x for name, x in kwargs.items()}
    becoming = () if type(written) is not kind.plain or is_in_optimizer() else _becoming(func, written, gradient)
    found = func(*args, **kwargs)
    for tensor in becoming:
        become_part(tensor, kind, part)
    if not isinstance(found, Tensor):  # such as the places where a condition holds
        raise misleading(func, gradient)
    if found is written or type(found) is not kind.plain:
        return found
    if found.shape != shape:
        raise misleading(func, gradient, f", with a tensor that is broadcast with it to {tuple(found.shape)}")
    return gradient.like(found)


def of_lists(func: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """The handler of an elementwise function of lists of tensors, some of them parts."""
    lists = [x for x in args if isinstance(x, list | tuple)]
    becoming: list[tuple[Tensor, PartOfGradient]] = []
    if _WRITES_FIRST.fullmatch(func.__name__) and not is_in_optimizer():
        for into, *operands in zip(*lists, strict=False):
            if (one := _first(operands)) is not None and type(into) is one.plain:
                becoming += [(tensor, one) for tensor in _becoming(func, into, one)]
    found = func(*args, **kwargs)
    for tensor, one in becoming:
        become_part(tensor, type(one), one.part)
    if found is None or found is args[0]:
        return found
    of = [_first(tensors) for tensors in zip(*lists, strict=False)]
    return tuple(x if one is None else one.like(x) for x, one in zip(found, of, strict=True))


def _becoming(func: Callable[..., Any], into: Any, gradient: PartOfGradient) -> tuple[Tensor, ...]:
    """The plain tensors that are parts, too, when a function of a part has written one: it, and what it is a view of.

    Parameters, and what else has a gradient of its own, stay what they are: the weights that a step is made from.

    Raises:
        RuntimeError: if more than that part would be in what is written.
    """
    if into.requires_grad or isinstance(into, nn.Parameter):
        return ()
    base = base_of(into)
    if base is not None and (base.requires_grad or type(base) is not gradient.plain):
        base = None
    if (into.numel() and into.shape != gradient.shape) or (base is not None and base.shape != into.shape):
        detail = f", to be written into a tensor {tuple(into.shape)}"
        if base is not None:
            detail += f", a view of one {tuple(base.shape)}"
        detail += ", which could not represent the whole: give it a tensor of its own, with its shape"
        raise misleading(func, gradient, detail)
    return (into,) if base is None else (into, base)


def _first(tensors: Iterable[Any]) -> PartOfGradient | None:
    return next((one for one in tensors if isinstance(one, PartOfGradient)), None)


_WRITES_FIRST = re.compile("_foreach_.*_")
"""Functions of lists that write the tensors of the first one; an optimizer's fused step writes more, and is its own."""

EACH_ELEMENT: dict[Callable[..., Any], Handler] = {
    **dict.fromkeys(ELEMENTWISE, elementwise),
    **dict.fromkeys(LIST_UPDATES, of_lists),
}
"""What elementwise functions give of any part of a gradient."""
