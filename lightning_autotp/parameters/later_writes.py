"""Writes into parts after the first use of a parallel model that are no optimizer's: a warning, once.

Then checksums would take as long as a step, but tensors count the writes into them. Before each forward and before each
optimizer's step the counters are compared with those after the last one. What was written between them by code that
nobody has looked at may mean the whole tensor (rows by their index, random numbers); what does the same with each
element is right, so it is no error. Writes through ``.data`` or numpy are not counted.
"""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Mapping
from typing import Any

from torch import nn
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from lightning_autotp.layouts.listing import listed
from lightning_autotp.private.torch_private import writes_into


class LaterWrites:
    """Compares the counters of a model's parts. A copy, on a copy of the model, has seen nothing so far."""

    def __init__(self) -> None:
        self._names: tuple[str, ...] = ()
        self._parts: tuple[nn.Parameter, ...] = ()
        self._versions: list[int] = []
        self._known: list[bool] = []  # for each known writer under way, whether it is code that is looked at
        self._looked_at: set[str] = set()
        self._has_warned = False
        own = weakref.ref(self)

        def before_step(*_: Any) -> None:
            if (writes := own()) is not None:
                writes.check()

        def after_step(*_: Any) -> None:
            if (writes := own()) is not None:
                writes.note()

        for handle in (register_optimizer_step_pre_hook(before_step), register_optimizer_step_post_hook(after_step)):
            weakref.finalize(self, handle.remove)

    def watch(self, parts: Mapping[str, nn.Parameter]) -> None:
        """From now on these are the parts, by name."""
        self._names, self._parts = tuple(parts), tuple(parts.values())
        self.note()

    def note(self) -> None:
        """What was written until now is right."""
        self._versions = list(map(writes_into, self._parts))

    def check(self) -> None:
        """Warn if parts were written since the last look, unless a known writer is under way."""
        versions = list(map(writes_into, self._parts))
        if versions == self._versions:
            return
        changed = {name for name, old, new in zip(self._names, self._versions, versions, strict=True) if old != new}
        self._versions = versions
        if self._known:
            if self._known[-1]:
                self._looked_at |= changed
        elif (unknown := sorted(changed - self._looked_at)) and not self._has_warned:
            self._has_warned = True
            warnings.warn(
                f"{listed(unknown)} were written in"
                " place, not by an optimizer, by code that nobody has looked at. Each rank has only a part of them:"
                " what does the same with each element is right; rows by their index or random numbers would be others"
                " in the whole tensor. Run that code once inside `with lightning_autotp.checked(model):`, which tells",
                stacklevel=2,
            )

    def begin_known(self, is_looked_at: bool) -> None:
        """What writes from now on is known to be right."""
        self.check()
        self._known.append(is_looked_at)

    def end_known(self) -> None:
        """From now on it is not."""
        self.check()
        self._known.pop()

    def __reduce__(self) -> tuple[Any, ...]:
        return LaterWrites, ()
