"""What is used of torchmetrics, which Lightning trains with, that it does not promise to keep.

:mod:`lightning_autotp.metrics` imports it from here, and ``tests/private/test_private.py`` asks for what is relied on.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import torch
import torchmetrics
from torch import Tensor


class Metric(torchmetrics.Metric):
    """A metric whose states named in :attr:`exact` keep their dtype, whatever a model is converted to.

    ``set_dtype`` is public, but ``Module.to(dtype)`` of what holds a metric converts its states all the same.
    """

    exact: ClassVar[dict[str, torch.dtype]] = {}

    def _apply(self, fn: Callable[[Tensor], Tensor], exclude_state: Sequence[str] = "") -> Any:
        this = super()._apply(fn, exclude_state)
        for state, dtype in self.exact.items():
            default = self._defaults[state]
            assert isinstance(default, Tensor)
            self._defaults[state] = default.to(dtype)
            setattr(self, state, getattr(self, state).to(dtype))
        return this
