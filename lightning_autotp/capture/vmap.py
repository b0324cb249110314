"""Operators under ``torch.vmap``: recorded on the tensors that those of the function only wrap.

A model's code may map a function over dims (transformers builds some attention masks so). The operators in it work on
wrappers with a dim less than the tensors they stand for. The graph gets the tensors inside, under names that no rule
knows: what goes through such an operator stays whole, and whether it follows from the batch alone is still known.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from lightning_autotp.capture.static_values import NoValue
from lightning_autotp.private.torch_private import (
    TransformType,
    custom_function_call,
    dispatch_functorch,
    get_interpreter_stack,
    get_unwrapped,
    is_functorch_wrapped_tensor,
    tree_map_only,
)


def are_active() -> bool:
    """Whether a function transform runs."""
    return bool(get_interpreter_stack())


def is_wrapper(tensor: Tensor) -> bool:
    """Whether a tensor only wraps another one."""
    return is_functorch_wrapped_tensor(tensor)


def unwrapped(values: Any) -> Any:
    """Arguments or results, with the tensors that wrappers stand for."""

    def one(tensor: Tensor) -> Tensor:
        while is_functorch_wrapped_tensor(tensor):
            tensor = get_unwrapped(tensor)
        return tensor

    return tree_map_only(Tensor, one, values)


def check() -> None:
    """Refuse transforms that cannot be followed.

    Raises:
        NoValue: if one computes derivatives: what its backward reads is not in a trace.
    """
    if any(transform.key() != TransformType.Vmap for transform in get_interpreter_stack() or ()):
        raise NoValue("torch.func's derivatives cannot be traced")


def follow_custom_functions(mode: Any) -> None:
    """Let a class of modes see into autograd functions that run under a transform: by default they are refused."""

    def run(tracer: Any, function: Any, *operands: Any) -> Any:
        with tracer:
            return dispatch_functorch(custom_function_call, (function, *operands), {})

    custom_function_call.py_impl(mode)(run)
