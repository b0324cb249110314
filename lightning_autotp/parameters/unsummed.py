"""A gradient whose sum over the ranks is still to come: nothing reads it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NoReturn

from torch import Tensor

from lightning_autotp.private.torch_private import is_in_backward, is_operator, without_subclasses


class UnsummedGradient(Tensor):
    """What a rank has of a gradient until the ranks' are summed: the same memory, which nothing reads.

    Attributes:
        before: what had been summed before, to which the sum is to be added.
        origin: the parameter's name in the original model.
    """

    before: Tensor | None
    origin: str

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Tell sizes and the like, and let it be zeroed; refuse everything else.

        Raises:
            RuntimeError: for what would read or change values.
        """
        if func in _TELLING_NO_VALUES or (is_in_backward() and is_operator(func)):  # autograd adds to it, under a mode
            with without_subclasses():
                if func is Tensor.zero_ and args[0].before is not None:
                    args[0].before.zero_()
                return func(*args, **(kwargs or {}))
        lists = (each for each in args if isinstance(each, list | tuple))
        found = (*args, *(kwargs or {}).values(), *(one for each in lists for one in each))
        next(each for each in found if isinstance(each, cls)).refuse(getattr(func, "__name__", str(func)))

    def refuse(self, what: str) -> NoReturn:
        """Say that its values are not there yet.

        Raises:
            RuntimeError: always.
        """
        raise RuntimeError(
            f"{what}: the gradient of {self.origin} is not summed over the ranks yet,"
            " because the sum was postponed to the last backward pass before the optimizer's step (gradient"
            " accumulation), or the backward pass failed. Read gradients after the last batch of an accumulation (in"
            " on_before_optimizer_step), or call zero_grad() after a backward pass that failed"
        )


_PROPERTIES = (
    "shape", "dtype", "device", "layout", "ndim", "grad_fn", "is_leaf", "requires_grad", "is_sparse", "is_cuda",
)  # fmt: skip
_TELLING_NO_VALUES = frozenset(
    (
        *(Tensor.zero_, Tensor.detach_, Tensor.requires_grad_, Tensor.size, Tensor.dim, Tensor.numel),
        *(getattr(Tensor, name).__get__ for name in _PROPERTIES),
    )
)
