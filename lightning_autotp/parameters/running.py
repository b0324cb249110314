"""Whether a parallel model is running: what its own forward has looked at, the modules in it need not look at again."""

from __future__ import annotations

from typing import Any

from torch import nn

from lightning_autotp.private.torch_private import is_in_backward


class Running:
    """True while a model is running, perhaps again: in a backward pass activations are computed anew.

    Attributes:
        depth: how many of its forwards are under way.
    """

    def __init__(self) -> None:
        self.depth = 0

    def watch(self, model: nn.Module) -> None:
        """Hook a model, also for forwards that fail."""
        model.register_forward_pre_hook(self._begin, prepend=True)
        model.register_forward_hook(self._end, always_call=True)

    def _begin(self, *_: Any) -> None:
        self.depth += 1

    def _end(self, *_: Any) -> None:
        self.depth = max(0, self.depth - 1)  # a hook before this one's may have failed

    def __reduce__(self) -> tuple[Any, ...]:
        return Running, ()  # a copy of a model does not run

    def __bool__(self) -> bool:
        return self.depth > 0 or is_in_backward()
