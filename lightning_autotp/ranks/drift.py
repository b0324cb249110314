"""Whether tensors that every rank has whole stay the same on all ranks, told by numbers that an exchange takes along.

Each rank steps its own copy, with the same gradients. What one rank alone does to its own (a write, a gradient
clipped by its part's norm, other random numbers) stays unseen otherwise, and so does what kernels that are not
deterministic add up to. Most models have few elements that every rank has whole (norms, biases, a router): all are
compared each time. Of more, some are at a time, so that what a step pays does not grow with the model; where they are
is looked up now and then, for that takes longest.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterator, Sequence
from itertools import zip_longest
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_autotp.ranks.agreement import gather_objects, raised_by_all
from lightning_autotp.ranks.extremes import LOWEST, are_alike, bounds
from lightning_autotp.ranks.fingerprints import sum_and_norm
from lightning_autotp.ranks.host_copy import HostCopy

_ELEMENTS = 2**20
"""How many elements are compared at once, but for those of the last tensor."""
_TURNS = 16
"""After how many turns of all tensors it is looked up again where there are any."""
_DIFFERENCE = 1e-3
"""How far norms and normalized sums may be apart: rounding that has added up is far less."""


class _Seen(NamedTuple):
    """A tensor as a rank has it."""

    name: str
    norm: float
    total: float

    @property
    def normalized(self) -> float:
        """Its sum, whatever its size."""
        return _known(self.total / self.norm) if self.norm else 0.0

    @property
    def size(self) -> float:
        """The logarithm of its norm, so that in a sum of several each counts by its relative change."""
        return math.log(max(_known(self.norm), sys.float_info.min))


def _known(value: float) -> float:
    return math.inf if math.isnan(value) else value


Tensors = Callable[[], Iterator[tuple[str, Tensor]]]
"""Gives the tensors of the moment, by name: on every rank the same, in the same order."""


class Drift:
    """Notes some tensors after others, in turn, and compares them with those of the other ranks.

    Args:
        look: looks up where they are, and returns what gives them.
        group: the tensor-parallel group.
    """

    def __init__(self, look: Callable[[], Tensors], group: dist.ProcessGroup) -> None:
        self._look, self._ranks = look, tuple(dist.get_process_group_ranks(group))
        self._turns = 0
        self._left: Iterator[tuple[str, Tensor]] = iter(())
        self._noted: list[tuple[list[str], HostCopy]] = []

    def note(self) -> None:
        """Note the next tensors as they are now. Not collective, and no device is waited for."""
        tensors = list(self._next())
        if not tensors:
            if self._turns % _TURNS == 0:
                self._tensors = self._look()
            self._turns += 1
            self._left = self._tensors()
            tensors = list(self._next())
        self._noted = list(_noted(tensors))

    def _next(self) -> Iterator[tuple[str, Tensor]]:
        elements = 0
        for name, tensor in self._left:
            yield name, tensor.detach()
            elements += tensor.numel()
            if elements >= _ELEMENTS:
                return

    def bounds(self) -> tuple[int, int, int, int]:
        """Four numbers of 64 bits, whose largest over the ranks tell the extremes of sizes and normalized sums."""
        if not self._noted:
            return LOWEST, LOWEST, LOWEST, LOWEST
        seen = _read(self._noted)
        return *bounds(sum(one.size for one in seen)), *bounds(sum(one.normalized for one in seen))

    def settle(self, largest: Sequence[int], everyone: dist.ProcessGroup | None) -> None:
        """Go on if the tensors are the same on all ranks. Collective over ``everyone`` if they are not.

        Args:
            largest: the largest of all ranks' :meth:`bounds`, for one or several groups after one another.
            everyone: the ranks that have these numbers; ``None`` is every process.

        Raises:
            RuntimeError: on all of these ranks, if one differs within any one group.
        """
        noted, self._noted = self._noted, []
        share = _DIFFERENCE / max(1, sum(len(names) for names, _ in noted))  # as of the sum of a single one
        if all(
            are_alike(largest[at : at + 2], 0.0, _DIFFERENCE)
            and are_alike(largest[at + 2 : at + 4], share, _DIFFERENCE)
            for at in range(0, len(largest), 4)
        ):
            return
        of_groups: dict[tuple[int, ...], list[list[_Seen]]] = {}
        for ranks, seen in gather_objects((self._ranks, _read(noted)), everyone):
            of_groups.setdefault(ranks, []).append(seen)
        ranks, worst = max(
            (
                (ranks, of_all)
                for ranks, group in sorted(of_groups.items())
                for of_all in zip_longest(*group, fillvalue=_Seen("none", 0.0, 0.0))
            ),
            key=lambda one: _spread(one[1]),
        )
        found = [
            f"  rank {rank}: {one.name}, of norm {one.norm:.7g} and sum {one.total:.7g}"
            for rank, one in zip(ranks, worst, strict=True)
        ]
        error = RuntimeError(
            "a tensor that every rank of a tensor-parallel group has whole has become a different one on each:\n"
            + "\n".join(found)
            + "\nEach rank steps its own copy. Look for what does something else on one rank: a write on rank 0, a"
            " gradient that is clipped or scaled by a number of this rank's part, random numbers that are not the"
            " group's; or start again from a checkpoint, if nondeterministic kernels have caused it"
        )
        raise raised_by_all(error, everyone)


def _noted(tensors: Sequence[tuple[str, Tensor]]) -> Iterator[tuple[list[str], HostCopy]]:
    """The numbers of tensors on their way to the host, from each device together."""
    alike: dict[torch.device, dict[tuple[torch.dtype, int], list[tuple[str, Tensor]]]] = {}
    for name, tensor in tensors:
        kinds = alike.setdefault(tensor.device, {})
        kinds.setdefault((tensor.dtype, tensor.numel()), []).append((name, tensor))
    for kinds in alike.values():
        names = [name for kind in kinds.values() for name, _ in kind]
        yield names, HostCopy(torch.cat([_numbers([tensor for _, tensor in kind]) for kind in kinds.values()]))


def _numbers(alike: Sequence[Tensor]) -> Tensor:
    """Sum and norm of each of some tensors of one size, ``[n, 2]``, in a few kernels."""
    if len(alike) == 1:
        return sum_and_norm(alike[0], 2).unsqueeze(0)
    return sum_and_norm(torch.stack([tensor.reshape(-1) for tensor in alike]), 2, 1)


def _read(noted: Sequence[tuple[list[str], HostCopy]]) -> list[_Seen]:
    found = [(names, copied.read().tolist()) for names, copied in noted]
    return [_Seen(n, norm, total) for names, rows in found for n, (total, norm) in zip(names, rows, strict=True)]


def _spread(of_all: Sequence[_Seen]) -> float:
    """How far a group's ranks are apart in a tensor."""
    numbers = [one.size for one in of_all], [one.normalized for one in of_all]
    return max(0.0 if len(set(found)) == 1 else max(found) - min(found) for found in numbers)
