"""Whether the ranks of a copy of the model compute the same losses, told by numbers that an exchange takes along.

They work on the same batches, and what each makes of its parts is summed: if their losses differ, some code took a part
for the whole, or goes another way on one rank. Nothing need be known of that code.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_autotp.ranks.agreement import gather_objects, raised_by_all
from lightning_autotp.ranks.extremes import are_alike, bounds
from lightning_autotp.ranks.host_copy import HostCopy

_DIFFERENCE = 1e-3
"""How far losses may be apart: kernels that are not deterministic round differently, and by far less in float32."""
_MOST = 256
"""How many losses are compared at once: the last ones of a loop that makes no step."""
_ROUNDINGS = 4
"""How many units in the last place, where that is more."""


class _Loss(NamedTuple):
    where: str
    value: HostCopy
    tolerance: float


class Losses:
    """Notes this rank's losses, and compares them with those of the other ranks of its group.

    No device is waited for: a loss is compared in the comparison after the next one, and a step later.
    """

    def __init__(self) -> None:
        self._noted: deque[_Loss] = deque(maxlen=_MOST)
        self._due: deque[_Loss] = deque()

    def note(self, loss: Tensor, where: str) -> None:
        """Remember a loss, of which gradients are about to be computed. Not collective."""
        tolerance = max(_DIFFERENCE, _ROUNDINGS * torch.finfo(loss.dtype).eps)
        self._noted.append(_Loss(where, HostCopy(loss.detach().float().sum()), tolerance))

    def bounds(self) -> tuple[int, int]:
        """Two numbers of 64 bits, whose largest over the ranks tell the largest and the smallest loss."""
        return bounds(self._total() if self._due else None)

    def settle(self, largest: Sequence[int], everyone: dist.ProcessGroup | None) -> None:
        """Go on if the losses are alike: those since then are compared next. Collective over ``everyone`` if not.

        Args:
            largest: the largest of all ranks' :meth:`bounds`, for one or several groups after one another.
            everyone: the ranks that have these numbers; ``None`` is every process.

        Raises:
            RuntimeError: on all of these ranks, if those of any one group differ.
        """
        tolerance = max((loss.tolerance for loss in self._due), default=_DIFFERENCE)
        pairs = list(zip(largest[::2], largest[1::2], strict=True))
        if all(are_alike(pair, tolerance) for pair in pairs):
            self._due, self._noted = self._noted, deque(maxlen=_MOST)
            return
        where = ", ".join(dict.fromkeys(loss.where for loss in self._due)) or "none"
        said = gather_objects((where, self._total()), everyone)
        numbers = dist.get_process_group_ranks(everyone)
        found = [f"  rank {rank}: {total:.7g} (of {place})" for rank, (place, total) in zip(numbers, said, strict=True)]
        error = RuntimeError(
            "the ranks of a tensor-parallel group have different losses, although they work on the same batches:\n"
            + "\n".join(found)
            + "\nSomething in the step depends on what only one rank has (a part of a parameter or of an"
            " activation, its number, a file, an environment variable), or takes another path on one rank."
            " AutoTPStrategy(checked_steps=-1) checks every step's use of parameters"
        )
        raise raised_by_all(error, everyone)

    def _total(self) -> float:
        return sum(float(loss.value.read()) for loss in self._due)
