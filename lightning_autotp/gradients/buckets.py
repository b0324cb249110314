"""Gradients of whole parameters that are partial sums on the ranks: summed in few buckets at a backward pass's end.

A parameter that every rank holds and uses differently (a norm under sequence parallelism, a norm over sharded heads)
has on each rank one term of its gradient. A model has many such parameters, and they are small. So a backward pass
does not sum each of them where it comes up:

1. :class:`BucketedSum`, a tensor hook, notes that this parameter's gradient is to come. What ``.grad`` has summed
   already (an earlier pass before the same step) is put aside, so that it is not summed again.
2. Autograd accumulates. ``.grad`` is an :class:`PendingGradient` from then on, which cannot be taken for the sum.
3. At the end of the pass all of them are laid into one flat tensor for each dtype and device (several, if they are
   large: :func:`~lightning_autotp.layouts.buckets.in_buckets`), summed over the ranks, and put back; what was put aside
   is added.

Within :meth:`GradientBuckets.postponed` step 3 is left to the first pass outside of it, or to code that reads one of
the gradients before: under gradient accumulation there is one sum for an optimizer step, and what is read is what one
process would have accumulated so far.

A parameter's gradient is summed where it comes up if other code sees it before the pass is over
(other hooks on the parameter, ``DistributedDataParallel``, FSDP2), if it is not accumulated (``torch.autograd.grad``),
and under ``create_graph=True``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any
from weakref import WeakValueDictionary

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_autotp.layouts.buckets import in_buckets
from lightning_autotp.parameters.pending_gradient import PendingGradient
from lightning_autotp.private.torch_private import (
    after_backward,
    backward_pass,
    hook_tables,
    will_accumulate,
    without_subclasses,
)
from lightning_autotp.ranks.group import TPGroup
from lightning_autotp.ranks.store_barrier import store_barrier


class GradientBuckets:
    """The gradients of a model that wait to be summed; copies of the model share it.

    Attributes:
        at_once: whether nothing waits, since other code sees the gradients while a pass runs.
    """

    def __init__(self) -> None:
        self.at_once = False
        self._postponed = 0
        self._waiting: dict[Tensor, BucketedSum] = {}
        # A pass is alive as long as autograd has its callback: not after a failure.
        self._passes: WeakValueDictionary[int, _Pass] = WeakValueDictionary()

    @contextmanager
    def postponed(self) -> Iterator[None]:
        """Leave the sums of backward passes within to the first one outside, or to code that reads. Not collective."""
        self._postponed += 1
        try:
            yield
        finally:
            self._postponed -= 1

    def expect(self, hook: BucketedSum) -> None:
        """The gradient of this parameter is accumulated next in the running pass."""
        running = self._passes.get(backward_pass())
        if running is None:
            running = self._passes[backward_pass()] = _Pass()
            after_backward(partial(self.end, running))
        parameter = hook.parameter
        before = None
        if isinstance(parameter.grad, PendingGradient):
            parameter.grad.sum_all = None
        elif parameter.grad is not None:
            before, parameter.grad = parameter.grad, None
        running[parameter] = hook, before

    def accumulated(self, parameter: Tensor) -> None:
        """A hook for when a parameter's gradient has been accumulated."""
        running = self._passes.get(backward_pass())
        if running is not None and parameter in running:
            self._mark(parameter, *running.pop(parameter))

    def _mark(self, parameter: Tensor, hook: BucketedSum, before: Tensor | None) -> None:
        self._waiting[parameter] = hook
        if parameter.grad is None:
            parameter.grad = before
        elif type(parameter.grad) is not PendingGradient:
            pending = parameter.grad.as_subclass(PendingGradient)
            pending.before, pending.origin, pending.sum_all = before, hook.name, None
            parameter.grad = pending

    def end(self, running: _Pass) -> None:
        """A pass is over: sum what waits, if that is not postponed. Collective then."""
        for parameter, (hook, before) in running.items():  # accumulated without a call of the hook
            self._mark(parameter, hook, before)
        if not self._postponed:
            self._sum_waiting()
        for parameter in self._waiting:
            if isinstance(parameter.grad, PendingGradient):
                parameter.grad.sum_all = self.read

    def read(self, name: str) -> None:
        """The gradient of this name is read: sum all that wait. Collective.

        Raises:
            RuntimeError: if other ranks do not read.
        """
        for group in dict.fromkeys(hook.group for hook in self._waiting.values()):  # on all ranks in the same order
            store_barrier(group, f"the gradient of {name} is read, and with that summed over the ranks")
        self._sum_waiting()

    def _sum_waiting(self) -> None:
        hooks, self._waiting = self._waiting, {}
        sum_gradients(hooks.values())

    def __deepcopy__(self, memo: dict[int, Any]) -> GradientBuckets:
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        return GradientBuckets, ()


class _Pass(dict[Tensor, "tuple[BucketedSum, Tensor | None]"]):
    """A backward pass that is running: the parameters whose gradients come next, with what had been summed before."""


@dataclass(eq=False)
class BucketedSum:
    """Tensor hook of one parameter that every rank holds: its gradient is summed with the others' at the pass's end.

    Equal to another one for the same parameter.

    Attributes:
        parameter: the parameter, a leaf.
        name: its name in the original model, which orders the buckets.
        group: the ranks that sum.
        at_once: sums what a pass contributes, where it cannot wait. Collective.
        buckets: where it waits.
        allowed: classes of other hooks on the parameter that may see a term of the sum, because they are linear.
    """

    parameter: Tensor
    name: str
    group: TPGroup
    at_once: Callable[[Tensor], Tensor]
    buckets: GradientBuckets
    allowed: tuple[type, ...]

    def __call__(self, gradient: Tensor) -> Tensor:
        """What the pass contributes: this rank's term of it, or the sum where that cannot wait. Collective then."""
        if self._waits():
            self.buckets.expect(self)
            return gradient
        if type(self.parameter.grad) is PendingGradient:  # of postponed passes
            sum_gradients([self])
        return self.at_once(gradient)

    def _waits(self) -> bool:
        if torch.is_grad_enabled() or torch.compiler.is_compiling() or self.buckets.at_once:
            return False
        during, after = hook_tables([self.parameter])
        return (
            all(hook is self or isinstance(hook, self.allowed) for hook in (during or {}).values())
            and any(hook is self for hook in (during or {}).values())
            and list((after or {}).values()) == [self.buckets.accumulated]
            and will_accumulate(self.parameter)
        )

    def __eq__(self, other: object) -> bool:
        return isinstance(other, BucketedSum) and other.parameter is self.parameter

    def __hash__(self) -> int:
        return id(self.parameter)


@torch.no_grad()
def sum_gradients(hooks: Iterable[BucketedSum]) -> None:
    """Sum those of these parameters' gradients that are unsummed, in buckets. Collective over their groups."""
    waiting = [hook for hook in hooks if type(hook.parameter.grad) is PendingGradient]
    kinds: dict[tuple[str, torch.dtype, torch.device], list[BucketedSum]] = {}
    for hook in sorted(waiting, key=lambda hook: hook.name):  # in the same order on every rank
        gradient = hook.parameter.grad
        assert gradient is not None
        kinds.setdefault((hook.group.name, gradient.dtype, gradient.device), []).append(hook)
    launched = [_launch(bucket) for kind in kinds.values() for bucket in _buckets(kind)]
    for bucket, flat, work in launched:
        work.wait()
        for hook, total in zip(bucket, flat.split([hook.parameter.numel() for hook in bucket]), strict=True):
            pending = hook.parameter.grad
            assert isinstance(pending, PendingGradient)
            gradient = pending.become(pending.before)
            if gradient is pending:
                gradient.copy_(total.view_as(gradient))
            else:
                gradient.add_(total.view_as(gradient))
            hook.parameter.grad = gradient


def _launch(bucket: list[BucketedSum]) -> tuple[list[BucketedSum], Tensor, Any]:
    flat = as_summed(torch.cat([_plain(hook.parameter.grad).reshape(-1) for hook in bucket]))
    return bucket, flat, dist.all_reduce(flat, group=bucket[0].group.process_group, async_op=True)


def as_summed(gradient: Tensor) -> Tensor:
    """A gradient as it is summed over the ranks: at least in float32, so that it is rounded once."""
    return gradient.to(torch.promote_types(gradient.dtype, torch.float32))


def _buckets(hooks: list[BucketedSum]) -> Iterator[list[BucketedSum]]:
    sizes = [hook.parameter.numel() * hook.parameter.element_size() for hook in hooks]
    return (hooks[bucket] for bucket in in_buckets(sizes))


def _plain(gradient: Any) -> Tensor:
    with without_subclasses():
        return gradient.as_subclass(Tensor)
