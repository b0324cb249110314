"""What is known of Lightning Fabric's private ways where Lightning itself is not imported."""

from __future__ import annotations

from functools import partial
from typing import Any

_LOOKS = "lightning.fabric.wrappers._backward_hook"


def only_looks(hook: Any) -> bool:
    """Whether a gradient's hook is the one that Fabric puts on whatever a model returns.

    It does nothing with the gradient: it raises if ``loss.backward()`` is called where ``fabric.backward(loss)`` should
    be. Nothing public leaves it out.
    """
    function = hook.func if isinstance(hook, partial) else hook
    return f"{getattr(function, '__module__', '')}.{getattr(function, '__qualname__', '')}" == _LOOKS
