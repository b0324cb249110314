"""A gradient whose sum over the ranks is still to come: code that reads it gets the sum, which is made then."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor

from lightning_autotp.private.torch_private import is_in_backward, is_operator, without_subclasses
from lightning_autotp.torch_functions import DESCRIBING


class PendingGradient(Tensor):
    """What a rank has of a gradient until the ranks' are summed. Then this object is the sum, an ordinary tensor.

    Attributes:
        before: what had been summed before, to which the sum is to be added.
        origin: the parameter's name in the original model.
        sum_all: sums it with all others that wait, because code reads the one of this name. Collective. ``None``
            while its backward pass runs, and after one that failed.
    """

    before: Tensor | None
    origin: str
    sum_all: Callable[[str], None] | None

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Tell sizes and the like, and let it be zeroed or written as text; before everything else it is summed.

        Raises:
            RuntimeError: for what would read or change values that cannot be summed.
        """
        kwargs = kwargs or {}
        if func in _TELLING_NO_VALUES or (is_in_backward() and is_operator(func)):  # autograd adds to it, under a mode
            with without_subclasses():
                if func is Tensor.zero_ and args[0].before is not None:
                    args[0].before.zero_()
                return func(*args, **kwargs)
        if func in _WRITING:  # a debugger does that on one rank
            with without_subclasses():
                text = func(args[0].as_subclass(Tensor), *args[1:], **kwargs)
                return f"this rank's term of the gradient of {args[0].origin}: {text}"
        lists = (given for given in args if isinstance(given, list | tuple))
        for given in (*args, *kwargs.values(), *(one for several in lists for one in several)):
            if isinstance(given, cls):
                given.settle(getattr(func, "__name__", str(func)))
        return func(*args, **kwargs)

    def settle(self, what: str) -> None:
        """Become the sum over the ranks. Collective.

        Raises:
            RuntimeError: if the backward pass that it is of is running or has failed, or it is no parameter's gradient
                any more; if the other ranks do not read.
        """
        if self.sum_all is not None:
            self.sum_all(self.origin)
        if isinstance(self, PendingGradient):
            raise RuntimeError(
                f"{what}: the gradient of {self.origin} is not summed over the ranks, because its backward pass is"
                " still running or failed, or because it was taken from the parameter (zero_grad) before it was summed."
                " Read gradients when backward() is over; call zero_grad() after a backward pass that failed"
            )

    def become(self, gradient: Tensor | None) -> Tensor:
        """The sum: ``gradient``, whose memory this object shares from now on, or what is in this one's memory."""
        del self.before, self.origin, self.sum_all
        with without_subclasses():
            if gradient is not None:
                self.data = gradient
            self.__class__ = Tensor  # type: ignore[assignment]
        return self if gradient is None else gradient


_TELLING_NO_VALUES = DESCRIBING | {Tensor.zero_, Tensor.detach_, Tensor.requires_grad_}
_WRITING = frozenset((Tensor.__repr__, Tensor.__format__))
