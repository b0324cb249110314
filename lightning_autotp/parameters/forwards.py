"""What runs a module: the ``forward`` of its class, what was put on the object, and wrappers around either."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from types import MethodType
from typing import Any

from torch import nn

from lightning_autotp.parameters.state import ParallelState


def forward_of(module: nn.Module) -> Any:
    """The function of its class, or what was put on the object."""
    return vars(module).get("forward", type(module).forward)


def wrapped_in(function: Any) -> Iterator[Any]:
    """A function and those in it, through methods, ``functools.partial``, ``functools.wraps`` and ``torch.compile``."""
    while function is not None:
        yield function
        if isinstance(function, MethodType):
            function = function.__func__
        else:
            function = function.func if isinstance(function, partial) else getattr(function, "__wrapped__", None)


def other_forwards(model: nn.Module, modules: dict[str, nn.Module], state: ParallelState) -> Iterator[str]:
    """Modules of a parallel model that run by something else than when it was divided, and not by a wrapper of that."""
    is_replaced = False
    for path, module in modules.items():
        was, now = state.forwards.get(module), forward_of(module)
        # Lightning's own redirects a single call to another method of the model, and is gone before that runs.
        if was is None or was in wrapped_in(now) or str(getattr(now, "__module__", "")).startswith("lightning."):
            continue
        name = getattr(now, "__qualname__", type(now).__name__)
        is_replaced = True
        yield f"the forward of {path or type(model).__name__} was replaced by {name}"
    if is_replaced and any(getattr(module, "use_kernels", False) for module in model.modules()):
        yield (
            "use_kernels=True: transformers puts other kernels on the model in every train() and eval(); write"
            " model.train() and then model.use_kernels = False before it is divided: it keeps those for training"
        )
