"""Which parts of parameters were written in place: their values have checksums.

Another tensor in the place of a part (``p.data = x``, ``module.to(...)``, a new ``nn.Parameter``) is no write: it must
have the part's shape, so who made it knows what it is.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import NamedTuple

from torch import Tensor, nn

from lightning_autotp.parameters.local_blocks import plain
from lightning_autotp.private.torch_private import StorageWeakRef
from lightning_autotp.ranks.description import checksum

Parts = Mapping[str, nn.Parameter]


class _Values(NamedTuple):
    """What a part held when it was looked at.

    Attributes:
        memory: what its values were in. (Not the parameter: a weak reference would keep ``module.to()`` from swapping.)
        sum: their checksum.
    """

    memory: StorageWeakRef
    sum: Tensor


class Written:
    """Which parts of a model were written by code that nobody knows.

    Args:
        parts: the parts of which this rank has one, by name, here and in each call as they are then.
    """

    def __init__(self, parts: Parts) -> None:
        self._known_depth = 0
        self._is_open = True
        self._unknown: list[str] = []
        self._values: dict[str, _Values] = {}
        self._record(parts)

    def begin_known(self, parts: Parts) -> None:
        """From now on what writes is known."""
        if self._known_depth == 0:
            self._unknown += self._changed(parts)
        self._known_depth += 1

    def end_known(self, parts: Parts, filled: Collection[Tensor]) -> None:
        """From now on it is not; some tensors were filled anew, so that nothing is left of what was written before."""
        ids = set(map(id, filled))
        gone = {name for name, parameter in parts.items() if id(parameter) in ids} if ids else set()
        self._unknown = [name for name in self._unknown if name not in gone]
        self._known_depth -= 1
        if self._known_depth == 0:
            self._record(parts)

    def close(self, parts: Parts) -> list[str]:
        """The names of parts that were written by code that is not known; later writes do not count."""
        if self._known_depth == 0:
            self._unknown += self._changed(parts)
        self._values.clear()
        self._is_open = False
        return list(dict.fromkeys(self._unknown))

    def _record(self, parts: Parts) -> None:
        if self._is_open:
            self._values = {name: _values(parameter) for name, parameter in parts.items()}

    def _changed(self, parts: Parts) -> list[str]:
        if not self._values:
            return []
        changed = []
        for name, parameter in parts.items():
            before = self._values.get(name)
            if before is None:
                continue
            now = _values(parameter)
            if now.memory == before.memory and int(now.sum) != int(before.sum):
                changed.append(name)
        return changed


def _values(parameter: nn.Parameter) -> _Values:
    held = plain(parameter)
    return _Values(StorageWeakRef(held.untyped_storage()), checksum(held))
