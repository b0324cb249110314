"""The product of hidden states with a head's weight, left undone until its values are needed.

A loss can be computed from the hidden states a few tokens at a time
(:mod:`~lightning_autotp.parallel.linear_cross_entropy`), so that the logits of all tokens are never in memory. What
code does with logits on their way to the loss does not hinder that:

* views that leave the vocabulary whole (shifts, slices, masks, flattening) are the same views of the hidden states;
* casts, and functions of single elements with numbers (a scale, a soft cap) or a value for each class (a mask, a bias
  that is not trained), are noted as *steps* and done on each part.

Whatever else needs the values gets them from :meth:`HeadProduct.value`, as the head would have given them: with the
gradients, the autocast and the weights of the time when it ran. If these weights are gone, that is an error.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from types import FrameType
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from lightning_autotp.private.torch_private import changes, storage_key


class Autocast(NamedTuple):
    """What autocast does on one type of device.

    Attributes:
        device: the type of device.
        enabled: whether it is on.
        dtype: what it casts to.
    """

    device: str
    enabled: bool
    dtype: torch.dtype

    @classmethod
    def now(cls, device: torch.device) -> Autocast:
        """What it does at this moment."""
        kind = device.type
        return cls(kind, torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind))

    @contextmanager
    def again(self) -> Iterator[None]:
        """Within it autocast does what it did then; what it casts is not kept."""
        with torch.autocast(self.device, self.dtype, self.enabled, cache_enabled=False):
            yield


@dataclass(frozen=True)
class ElementwiseStep:
    """A function of single elements that was called on a product.

    Attributes:
        function: the function of the tensor.
        autocast: what autocast did then.
        widens: whether it is a cast that loses nothing.
    """

    function: Callable[[Tensor], Tensor]
    autocast: Autocast
    widens: bool

    def __call__(self, x: Tensor) -> Tensor:
        """``[..., vocab/tp] -> [..., vocab/tp]``, also of a part of the tokens."""
        with self.autocast.again():
            return self.function(x)


class _Source(NamedTuple):
    name: str
    tensor: Tensor
    memory: int
    changes: int


@dataclass
class _Uses:
    """What became of the logits of one run of a head, under all their views.

    Attributes:
        in_a_loss: whether a loss was computed from the hidden states.
        hooked_by: the code that has put a hook on their gradient, if any has.
        written: what they are made of and was written since, without counting it.
        before_backward: called with every gradient.
    """

    in_a_loss: bool = False
    hooked_by: str = ""
    written: str = ""
    before_backward: list[Callable[[Tensor], object]] = field(default_factory=list)

    def prepare_backward(self, grad: Tensor) -> None:
        for prepare in self.before_backward:
            prepare(grad)


@dataclass(eq=False, repr=False)
class HeadProduct:
    """``steps(features @ weight^T + bias)`` of this rank's classes, not computed yet.

    Attributes:
        features: ``[..., hidden, ...]``, of type Replicate.
        dim: where the hidden size is in them, and the classes are in the product.
        weight: ``[vocab/tp, hidden]``.
        bias: ``[vocab/tp]``.
        dtype: of the product itself.
        like: a tensor on meta with the shape, strides and dtype that it has after the steps.
        steps: what was done with it since.
        autocast: what autocast did when the head ran.
        differentiable: whether gradients were recorded, then and at every step.
    """

    features: Tensor
    dim: int
    weight: Tensor
    bias: Tensor | None
    dtype: torch.dtype
    like: Tensor
    steps: tuple[ElementwiseStep, ...]
    autocast: Autocast
    differentiable: bool
    _sources: tuple[_Source, ...]
    _uses: _Uses
    _value: Tensor | None = field(default=None, init=False)

    def __post_init__(self) -> None:
        _all.add(self)

    @classmethod
    def of(cls, features: Tensor, weight: Tensor, bias: Tensor | None) -> HeadProduct:
        """``F.linear`` of ``[..., hidden]``, ``[vocab/tp, hidden]`` and ``[vocab/tp]``."""
        differentiable = torch.is_grad_enabled()
        if not differentiable:
            features = features.clone()  # nothing would tell if code went on to change them in place
        with torch.no_grad():
            dtype = F.linear(features.new_empty(0, features.shape[-1]), weight[:0]).dtype
        like = torch.empty(*features.shape[:-1], weight.shape[0], dtype=dtype, device="meta")
        named = {"the hidden states": features, "the weight": weight, "the bias": bias}
        sources = tuple(_Source(name, x, storage_key(x), changes(x)) for name, x in named.items() if x is not None)
        autocast = Autocast.now(features.device)
        return cls(
            features, features.dim() - 1, weight, bias, dtype, like, (), autocast, differentiable, sources, _Uses()
        )

    def _after(self, features: Tensor, dim: int, like: Tensor, *steps: ElementwiseStep) -> HeadProduct:
        is_differentiable, done = self.differentiable and torch.is_grad_enabled(), (*self.steps, *steps)
        return replace(self, features=features, dim=dim, like=like, steps=done, differentiable=is_differentiable)

    def viewed(self, features: Tensor, dim: int, like: Tensor) -> HeadProduct:
        """A view that leaves the classes whole: the same view of the features, with its dim, and of :attr:`like`."""
        return self._after(features, dim, like)

    def stepped(self, function: Callable[[Tensor], Tensor], *, is_cast: bool = False) -> HeadProduct:
        """The product after a function of single elements, which is called with ``[..., vocab/tp]``."""
        with torch.no_grad():
            dtype = function(self.features.new_empty(0, self.weight.shape[0], dtype=self.like.dtype)).dtype
        widens = is_cast and torch.promote_types(self.like.dtype, dtype) == dtype
        step = ElementwiseStep(function, Autocast.now(self.features.device), widens)
        return self._after(self.features, self.dim, torch.empty_like(self.like, dtype=dtype), step)

    @property
    def is_done(self) -> bool:
        """Whether the values are there."""
        return self._value is not None

    def value(self) -> Tensor:
        """The product's values, computed once; with a gradient where it was to have one. Not collective.

        Raises:
            RuntimeError: if what it is made of has changed, or has a hook that would not see this gradient.
        """
        if self._value is None:
            self._value = self.compute()
        return self._value

    def compute(self) -> Tensor:
        """The values, computed anew.

        Raises:
            RuntimeError: as :meth:`value`.
        """
        self.check()
        with torch.inference_mode(False), torch.set_grad_enabled(self.differentiable):
            value = self._computed(self.features, self.weight, self.bias)
        self.prepare_before(value)
        return value

    def _computed(self, features: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        with self.autocast.again():
            x = F.linear(features.movedim(self.dim, -1), weight, bias)
        for step in self.steps:
            x = step(x)
        return x.movedim(-1, self.dim)

    def gradients(self, grad: Tensor, wanted: Sequence[bool]) -> list[Tensor | None]:
        """The gradients of features, weight and bias, from that of the values. Not collective.

        Args:
            grad: the gradient of the values.
            wanted: of which of the three.
        """
        self._uses.prepare_backward(grad)
        self.check()
        return gradients_of(self._computed, (self.features, self.weight, self.bias), grad, wanted)

    def check(self) -> None:
        """Raise if the values cannot be computed any more.

        Raises:
            RuntimeError: if what it is made of has changed, or has a hook that would not see this gradient.
        """
        if (problem := self.problem()) is not None:
            raise RuntimeError(problem)

    def problem(self) -> str | None:
        """Why the values cannot be computed any more, if they cannot."""
        if self.weight.untyped_storage().nbytes() == 0 < self.weight.numel():
            return (
                "these logits were not needed until now, and FSDP2 has freed the weight that they are made of, which it"
                " gathers for the model's forward and backward pass: use them before, or keep a copy (logits.detach())"
            )
        for source in self._sources:
            now = storage_key(source.tensor), changes(source.tensor)
            if now != (source.memory, source.changes) or source.name == self._uses.written:
                return (
                    f"these logits were not needed until now, and {source.name} that they are made of changed since the"
                    " model ran (in an optimizer's step, perhaps): use them before, or keep a copy (logits.detach())"
                )
        if self._uses.hooked_by and self.differentiable:
            return (
                f"{self._uses.hooked_by} added a hook to the gradient of these logits after this view of them was made,"
                " which would not see what the view adds: add the hook first. For tools that hook whatever modules"
                " return, as CommDebugMode does, keep the head whole, with keep_whole="
            )
        return None

    def forget(self, memories: Collection[int]) -> None:
        """Note that what lies in one of these memories was written."""
        written = next((source.name for source in self._sources if source.memory in memories), "")
        self._uses.written = self._uses.written or written

    def use_in_loss(self) -> None:
        """Note that a loss is computed from the hidden states. Raises what :meth:`check` does."""
        self.check()
        self._uses.in_a_loss = self._uses.in_a_loss or (self.differentiable and torch.is_grad_enabled())

    def before_backward(self, prepare: Callable[[Tensor], object]) -> None:
        """Let ``prepare`` be called with every gradient of the values or of a loss, before anything is done with it."""
        self._uses.before_backward.append(prepare)

    def prepare_before(self, result: Tensor) -> None:
        """Call what :meth:`before_backward` is given when the gradient of what was computed of this product arrives."""
        if result.requires_grad:
            result.register_hook(self._uses.prepare_backward)  # which has no tensors

    def hook(self) -> None:
        """Note that there will be a hook on the gradient of :meth:`value`.

        Raises:
            RuntimeError: if the hook would miss the gradient of a loss.
        """
        if self._uses.in_a_loss:
            raise RuntimeError(
                "the loss was computed a few tokens at a time, without these logits, so a hook on their gradient would"
                " not see it: add the hook before the loss is computed, in a forward hook of the head"
            )
        self.value()
        self._uses.hooked_by = _caller()


_PASS_HOOKS_ON = (__name__.partition(".")[0], Tensor.register_hook.__module__, "torch.autograd", "torch.overrides")


def _caller() -> str:
    """The code that adds a hook, through functions of torch and of this package."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_globals.get("__name__", "").startswith(_PASS_HOOKS_ON):
        frame = frame.f_back
    return "code" if frame is None else f"{frame.f_globals.get('__name__')}, line {frame.f_lineno}"


def gradients_of(
    function: Callable[..., Tensor], sources: Sequence[Tensor | None], grad: Tensor, wanted: Sequence[bool]
) -> list[Tensor | None]:
    """The gradients of tensors from that of what a function makes of them, computed anew; differentiable if recorded.

    Args:
        function: takes all of ``sources``; collective if it is.
        sources: these tensors.
        grad: the gradient of the result.
        wanted: of which of the tensors.
    """
    is_recorded = torch.is_grad_enabled()  # under create_graph=True
    with torch.enable_grad():
        # Under other objects: hooks on the parameters are called when these gradients arrive there, not now, too.
        views = [None if x is None else x.view_as(x) for x in sources]
        value = function(*views)
    asked = [x for x, is_wanted in zip(views, wanted, strict=True) if is_wanted and x is not None]
    found = iter(torch.autograd.grad(value, asked, grad, create_graph=is_recorded))
    return [next(found) if is_wanted else None for is_wanted in wanted]


_all: weakref.WeakSet[HeadProduct] = weakref.WeakSet()


def note_written(tensors: Iterable[Tensor]) -> None:
    """Something has written these tensors: logits that are made of their memory cannot be computed any more.

    For whoever knows of writes that a tensor does not count, such as those through ``.data``. Not collective.
    """
    if not _all:
        return
    memories = set(map(storage_key, tensors))
    for product in list(_all):
        product.forget(memories)


def compute_undone(weights: Iterable[Tensor] | None = None) -> None:
    """Compute the logits that code still refers to, because weights are about to change or to be freed. Not collective.

    Those without a reference are gone, and cost nothing.

    Args:
        weights: these; by default all that an optimizer may change.
    """
    for product in _undone(weights):
        product.value()


def are_undone(weights: Iterable[Tensor]) -> bool:
    """Whether code still refers to logits that these weights are needed for. Not collective."""
    return bool(_undone(weights))


def _undone(weights: Iterable[Tensor] | None) -> list[HeadProduct]:
    these = None if weights is None else set(map(id, weights))
    return [
        product
        for product in list(_all)
        if (product.weight.requires_grad if these is None else id(product.weight) in these)
        and not product.is_done
        and product.problem() is None
    ]
