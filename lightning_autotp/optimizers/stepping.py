"""How to call an optimizer's step from within another one's, or on trial."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any


def plain_step(optimizer: Any) -> Callable[..., Any]:
    """The step of an optimizer's class, which takes the optimizer, without the hooks that users register for all."""
    step: Callable[..., Any] = type(optimizer).step
    if hasattr(step, "hooked"):
        step = step.__wrapped__  # type: ignore[attr-defined]
    return step


def needs_closure(optimizer: Any) -> bool:
    """Whether a step cannot be made without a closure."""
    closure = inspect.signature(type(optimizer).step).parameters.get("closure")
    return closure is not None and closure.default is closure.empty
