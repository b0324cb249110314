"""Writes into parts of parameters by code that may take a part for the whole tensor.

After set-up a parameter looks as always, but a rank may have only a part of it. What code writes into it in place may
mean the whole: random numbers of its shape, its last rows, a row by its index. A write that does with each element the
same is right; afterwards it cannot be told which of the two it was. What is known to be right (loading, this package's
callbacks, code inside ``checked``) says so: :func:`~lightning_autotp.parameters.known_writes.known_writes`.

From set-up to the first use of the model the parts' values have checksums, so a write that is not known is an error.
Later checksums would take as long as a step, but tensors count the writes into them, and a write that is neither known
nor an optimizer's is a warning. (Writes through ``.data`` or numpy are not counted.)

Another tensor in the place of a part (``p.data = x``, a new ``nn.Parameter``) is a write, too, unless its values are
the same but for rounding (``module.to(...)``): ``torch.randn(p.shape)`` has the part's shape, but not the whole's
numbers.
"""

from __future__ import annotations

import warnings
from collections.abc import Collection, Mapping
from typing import NamedTuple

import torch
from torch import Tensor, nn

from lightning_autotp.layouts.names import join_names
from lightning_autotp.parameters.local_blocks import plain
from lightning_autotp.private.torch_private import StorageWeakRef, writes_into
from lightning_autotp.ranks.description import checksum

Parts = Mapping[str, nn.Parameter]
"""The parts of which this rank has one, by name, as they are now."""


class _Values(NamedTuple):
    """What a part was when it was looked at.

    Attributes:
        memory: what its values were in. (Not the parameter: a weak reference would keep ``module.to()`` from swapping.)
        sum: their checksum.
        some: a few of them.
        shape: of the part; another one where FSDP2 has gathered it, or given its part back.
    """

    memory: StorageWeakRef
    sum: Tensor
    some: Tensor
    shape: torch.Size

    def are_others(self, now: _Values) -> bool:
        """Whether the part has other values now; in other memory, whether they differ by more than by rounding."""
        if now.memory == self.memory:
            return int(now.sum) != int(self.sum)
        is_comparable = now.shape == self.shape
        return is_comparable and not torch.allclose(now.some, self.some, _ROUNDING, _SMALL, equal_nan=True)


_SOME = 64
"""How many values of a part are kept."""
_ROUNDING = 2.0**-6
"""By how much of itself a value may change where it is converted, to any format of 8 bits or more and back."""
_SMALL = 1e-7
"""By how much besides: float16 has no small numbers."""


class Writes:
    """Which parts of one model were written by code that is not known to be right. Of a new one, nothing is watched.

    Attributes:
        is_before_use: whether the model has not been used since :meth:`begin`. The first use ends it.
    """

    def __init__(self) -> None:
        self.is_before_use = self._is_open = False
        self._values: dict[str, _Values] = {}
        self._unknown: list[str] = []
        self._names: tuple[str, ...] = ()
        self._parts: tuple[nn.Parameter, ...] = ()
        self._versions: list[int] = []
        self._known: list[bool] = []  # for each known writer under way, whether it is code that is checked
        self._checked: set[str] = set()
        self._has_warned = False

    def begin(self, parts: Parts) -> None:
        """Set-up is over."""
        self.is_before_use = self._is_open = True
        self._record(parts)

    def close(self, parts: Parts) -> list[str]:
        """The names of parts that were written by code that is not known; values are not compared after this."""
        if not self._known:
            self._unknown += self._changed(parts)
        self._is_open = False
        self._values.clear()
        return list(dict.fromkeys(self._unknown))

    def watch(self, parts: Parts) -> None:
        """From now on these are the parts whose writes are counted; what was written until now is right."""
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
                self._checked |= changed
        elif (unknown := sorted(changed - self._checked)) and not self._has_warned:
            self._has_warned = True
            warnings.warn(
                f"{join_names(unknown)} were written in place, not by an optimizer, by code that was not checked. Each"
                " rank has only a part of them: doing the same with each element is right; rows by index and random"
                " numbers would differ from those of the whole tensor. Run that code once inside `with"
                " lightning_autotp.checked(model):`, which reports it; the Trainer's first steps run so, which"
                " AutoTPStrategy(checked_steps=...) makes more",
                stacklevel=2,
            )

    def begin_known(self, parts: Parts, is_checked: bool = False) -> None:
        """What writes from now on is known to be right.

        Args:
            parts: before the first use.
            is_checked: whether it is because the code is checked, which may run again later.
        """
        if not self._known:
            self._unknown += self._changed(parts)
        self.check()
        self._known.append(is_checked)

    def end_known(self, parts: Parts, filled: Collection[Tensor] = ()) -> None:
        """From now on it is not.

        Args:
            parts: before the first use.
            filled: what was filled anew, so that nothing is left of what was written before.
        """
        self.check()
        self._known.pop()
        ids = set(map(id, filled))
        gone = {name for name, parameter in parts.items() if id(parameter) in ids}
        self._unknown = [name for name in self._unknown if name not in gone]
        if not self._known:
            self._record(parts)

    def _record(self, parts: Parts) -> None:
        if self._is_open:
            self._values = {name: _values(parameter) for name, parameter in parts.items()}

    def _changed(self, parts: Parts) -> list[str]:
        changed = []
        for name in filter(self._values.__contains__, parts):
            if self._values[name].are_others(_values(parts[name])):
                changed.append(name)
        return changed


def _values(parameter: nn.Parameter) -> _Values:
    values = plain(parameter)
    some = values.detach().flatten()[:: max(1, values.numel() // _SOME)].to("cpu", torch.float64)
    return _Values(StorageWeakRef(values.untyped_storage()), checksum(values), some, values.shape)
