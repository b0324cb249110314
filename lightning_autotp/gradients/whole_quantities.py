"""Tensors that are a rank's part of a gradient, and what of the whole gradient Python functions give of them.

:class:`PartOfGradient` is the base of those; its functions (``__torch_function__``) are explicit tables, one for each
class, and what is in none of them is refused. Here are the functions that give quantities over all elements, norms,
sums, whether any is not a number: they count every element of the whole once, and are collective.
"""

from __future__ import annotations

import math
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from types import FrameType
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.autograd.graph import get_gradient_edge
from torch.overrides import resolve_name

from lightning_autotp.gradients.counted import from_every_rank, whole_norms
from lightning_autotp.parameters.local_blocks import plain
from lightning_autotp.parameters.part import PartOf
from lightning_autotp.parameters.pending_gradient import PendingGradient
from lightning_autotp.private.torch_private import (
    check_and_unscale,
    foreach_norm,
    is_operator,
    moves_alike,
    without_subclasses,
)
from lightning_autotp.ranks.group import TPGroup
from lightning_autotp.torch_functions import NOT_READING, functions, getters

Handler = Callable[[Callable[..., Any], Sequence[Any], Mapping[str, Any]], Any]
"""Takes a function and its arguments, and gives its result. Subclasses of tensors are not asked while it runs."""


class PartOfGradient(Tensor):
    """This rank's part of a gradient, or of what was computed from one elementwise.

    Attributes:
        handlers: what functions give of it.
        plain: the class that it would be of, if it were no part.
        part: what it is a part of.

    Raises:
        RuntimeError: by functions that would give another answer than of the whole gradient.
    """

    # Optimizers ask each gradient in each step, and a plain attribute takes no call. It is never true: a parameter with
    # sparse gradients stays whole.
    is_sparse = False
    handlers: ClassVar[Mapping[Callable[..., Any], Handler]]
    plain: ClassVar[type[Tensor]]
    part: PartOf

    @property
    def said(self) -> str:
        """In words, what this is a part of."""
        raise NotImplementedError

    @property
    def sharing(self) -> tuple[TPGroup, ...]:
        """The ranks that share the whole one, and perhaps others that share theirs."""
        raise NotImplementedError

    def counted(self) -> Tensor:
        """The elements that this rank owns, in any shape: every element of the whole has one owner."""
        raise NotImplementedError

    def like(self, tensor: Tensor) -> Tensor:
        """A plain tensor as a part of the same whole."""
        raise NotImplementedError

    def operand(self, x: Tensor) -> Tensor:
        """What an elementwise function of this takes in the place of a tensor of another shape."""
        return x

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        if PendingGradient in types:  # in a list with this; torch asks the first one's class
            return PendingGradient.__torch_function__(func, types, args, dict(kwargs or {}))
        if func is torch.autograd.grad:  # which calls hooks, whose code asks subclasses
            return _differentiated(*args, **(kwargs or {}))
        handler = cls.handlers.get(func) or _unlisted(func)
        with without_subclasses():
            return handler(func, args, kwargs or {})


def _unlisted(func: Callable[..., Any]) -> Handler:
    if is_operator(func):
        return as_it_is  # a mode that sees operators runs them
    return _attribute if getattr(func, "__name__", "") in ("__get__", "__set__") else refuse


def first_part(args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """The part of a gradient among the arguments that says what a whole is."""
    for x in args:
        if isinstance(x, PartOfGradient):
            return x
    for x in (*args, *kwargs.values()):
        for one in x if isinstance(x, list | tuple) else (x,):
            if isinstance(one, PartOfGradient):
                return one
    raise AssertionError("called for a part of a gradient")


def refuse(func: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """The handler of everything that is not listed."""
    raise misleading(func, first_part(args, kwargs))


def misleading(func: Callable[..., Any], gradient: PartOfGradient, detail: str = "") -> RuntimeError:
    """The error where a function would not give what it gives of the whole gradient."""
    name = resolve_name(func) or getattr(func, "__name__", str(func))
    return RuntimeError(
        f"{name} was called on this rank's part of {gradient.said}{detail}: that is not what it would be on the whole"
        f" gradient. lightning_autotp.full_gradients(model)[{gradient.part.name!r}] is the whole one (for histograms,"
        " too: TensorBoard's add_histogram, wandb.watch),"
        " lightning_autotp.clip_gradients_norm(model, max_norm) clips. Elementwise functions, norms, sums and variances"
        " over all elements are right as they are, and, unless FSDP2 has sharded the model, masks of the whole shape,"
        " slices of rows or columns, randn_like and rand_like. What is meant for this rank's part alone takes it as a"
        " plain tensor: gradient.as_subclass(torch.Tensor). An optimizer whose step calls it is one process's in a"
        " lightning_autotp.WholeMatrixOptimizer(module, parameters, kind, lr=...), which gives it whole tensors"
    )


def is_in_optimizer() -> bool:
    """Whether an optimizer of torch calls a function, seen from its handler: the states that it writes stay plain.

    No other code reads them, and in each step a subclass would take a call for each function of each of them. Compiled
    code is taken for one: who calls cannot be seen there.
    """
    if torch.compiler.is_compiling():
        return True
    frame: FrameType | None = sys._getframe(2)
    while frame is not None and frame.f_code.co_name == "__torch_function__":
        frame = frame.f_back
    return frame is not None and frame.f_code.co_filename.startswith(_OPTIMIZERS)


def as_it_is(func: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """The handler of what is the same for the part."""
    return func(*args, **kwargs)


def _differentiated(outputs: Any, inputs: Any, *others: Any, **options: Any) -> Any:
    """``torch.autograd.grad`` of what is no part, with respect to what was computed of parts."""
    if (part := next((x for x in _several(outputs) if isinstance(x, PartOfGradient)), None)) is not None:
        raise misleading(torch.autograd.grad, part)
    edges = [get_gradient_edge(x) if isinstance(x, PartOfGradient) else x for x in _several(inputs)]
    return torch.autograd.grad(outputs, edges, *others, **options)


def _several(given: Any) -> Sequence[Any]:
    return given if isinstance(given, list | tuple) else [given]


def _attribute(func: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """An attribute that is no tensor, such as its device."""
    found = func(*args, **kwargs)
    return refuse(func, args, kwargs) if isinstance(found, Tensor) else found


def _list_norms(func: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[Tensor, ...]:
    """The norms of a list of tensors; those of parts with one collective."""
    given = {"ord": 2, "dtype": None} | dict(zip(("self", "ord", "dtype"), args, strict=False)) | dict(kwargs)
    tensors, ord_, dtype = given["self"], given["ord"], given["dtype"]
    parts = [x for x in tensors if isinstance(x, PartOfGradient)]
    whole = [x for x in tensors if not isinstance(x, PartOfGradient)]
    of_whole = iter(func(whole, ord_, dtype=dtype) if whole else ())
    of_parts = iter(_norms(func, parts, float(ord_), dtype))
    return tuple(next(of_parts) if isinstance(x, PartOfGradient) else next(of_whole) for x in tensors)


def _norms(
    func: Callable[..., Any], gradients: Sequence[PartOfGradient], norm_type: float, dtype: torch.dtype | None
) -> list[Tensor]:
    sharing = {gradient.sharing for gradient in gradients}
    if len(sharing) > 1:
        raise misleading(func, gradients[0], ", together with those of another model")
    if not norm_type > 0:
        raise misleading(func, gradients[0], f", with the order {norm_type}")
    given = [dtype or gradient.dtype for gradient in gradients]
    computed = torch.float32
    for each in given:
        computed = torch.promote_types(computed, each)
    norms = whole_norms([gradient.counted() for gradient in gradients], norm_type, computed, *sharing)
    return [norm.to(each) for norm, each in zip(norms, given, strict=True)]


def _norm(func: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Tensor:
    gradient = first_part(args, kwargs)
    order = "p" if func in _P_NORMS else "ord"
    kwargs = {"self" if name in ("input", "A", "x") else name: x for name, x in kwargs.items()}
    names = ["self", order, "dim", "keepdim", *(("out", "dtype") if func is torch.norm else ("dtype", "out"))]
    defaults = {order: None, "dim": None, "keepdim": False, "dtype": None, "out": None}
    given = defaults | dict(zip(names, args, strict=False)) | kwargs
    norm_type = given[order]
    if norm_type in (None, "fro"):
        norm_type = 2.0
    elif isinstance(norm_type, str) or (func is torch.linalg.norm and gradient.dim() != 1):
        raise misleading(func, gradient, f", with the order {norm_type!r}")
    if any(given[name] not in (None, False) for name in ("dim", "keepdim", "out")):
        raise misleading(func, gradient, ", along some dims or into another tensor")
    return _norms(func, [gradient], float(norm_type), given["dtype"])[0]


def _over_all(of_part: Callable[[Tensor], Tensor], of_ranks: Callable[[Tensor], Tensor]) -> Handler:
    """A quantity over all elements, from that of each rank's and then over the ranks'."""

    def handler(func: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Tensor:
        gradient = first_part(args, kwargs)
        if len(args) > 1 or kwargs:
            raise misleading(func, gradient, ", along some dims or with options")
        found = of_part(gradient.counted())
        for group in gradient.sharing:
            found = of_ranks(from_every_rank(found, group))
        return found

    return handler


def _mean(func: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Tensor:
    total: Tensor = _SUM(func, args, kwargs)
    return total / math.prod(first_part(args, kwargs).part.shape)


def _variance(func: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Tensor:
    """In two passes, as torch does: the mean first, then the squares of what differs from it."""
    gradient = first_part(args, kwargs)
    given: dict[str, Any] = {"unbiased": True} | dict(zip(("input", "unbiased"), args, strict=False)) | dict(kwargs)
    unbiased = given["unbiased"]
    correction = given.pop("correction", None)
    if len(args) > 2 or not isinstance(unbiased, bool) or given.keys() - {"input", "unbiased"}:
        raise misleading(func, gradient, ", along some dims or with options")
    computed, count = torch.promote_types(gradient.dtype, torch.float32), math.prod(gradient.part.shape)

    def total(of_part: Callable[[Tensor], Tensor]) -> Tensor:
        return _over_all(lambda x: of_part(x.to(computed)).sum(), lambda x: x.sum(0))(func, [gradient], {})

    mean = total(lambda x: x) / count
    squares = total(lambda x: (x - mean).square())
    return (squares / max(0, count - (unbiased if correction is None else correction))).to(gradient.dtype)


def _extreme(largest: bool) -> Handler:
    sign = 1 if largest else -1
    over_all = _over_all(
        lambda x: (sign * x).amax() if x.numel() else x.sum() - math.inf, lambda x: x.amax(0)
    )  # of nothing it is less than of anything

    def handler(func: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Tensor:
        if not first_part(args, kwargs).is_floating_point():
            refuse(func, args, kwargs)
        found: Tensor = sign * over_all(func, args, kwargs)
        return found

    return handler


def _check_and_unscale(func: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
    """Of ``torch.amp.GradScaler``: all ranks learn of what is not finite on one, and skip the same steps."""
    gradients, found_inf, inverse_scale = args
    func([plain(gradient) for gradient in gradients], found_inf, inverse_scale)
    for group in first_part(args, kwargs).sharing:
        found_inf.copy_(from_every_rank(found_inf, group).amax(0))


_OPTIMIZERS = os.path.join(os.path.dirname(torch.optim.__file__), "")
_P_NORMS = frozenset(functions("norm"))
_SUM = _over_all(lambda x: x.sum(), lambda x: x.sum(0))

QUANTITIES: dict[Callable[..., Any], Handler] = {
    **dict.fromkeys((*NOT_READING, *getters("grad"), *functions("as_subclass")), as_it_is),
    moves_alike(): as_it_is,
    **dict.fromkeys((*_P_NORMS, torch.linalg.norm, torch.linalg.vector_norm), _norm),
    **dict.fromkeys(functions("sum"), _SUM),
    **dict.fromkeys(functions("mean"), _mean),
    **dict.fromkeys(functions("var"), _variance),
    **dict.fromkeys(functions("std"), lambda *call: _variance(*call).sqrt()),
    **dict.fromkeys(functions("max amax"), _extreme(largest=True)),
    **dict.fromkeys(functions("min amin"), _extreme(largest=False)),
    **dict.fromkeys(functions("any"), _over_all(lambda x: x.any(), lambda x: x.any(0))),
    **dict.fromkeys(functions("all"), _over_all(lambda x: x.all(), lambda x: x.all(0))),
    **dict.fromkeys(functions("count_nonzero"), _over_all(lambda x: x.count_nonzero(), lambda x: x.sum(0))),
    foreach_norm: _list_norms,
    check_and_unscale: _check_and_unscale,
}
"""What any part of a gradient gives: sizes that are the part's, and quantities over all elements."""
