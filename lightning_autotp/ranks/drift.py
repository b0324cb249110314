"""Whether tensors that every rank has whole stay the same on all ranks, told by numbers that an exchange takes along.

Each rank steps its own copy, with the same gradients. What one rank alone does to its own (a write, a gradient
clipped by its part's norm, other random numbers) stays unseen otherwise, and so does what kernels that are not
deterministic add up to. One tensor is compared at a time, so that a step pays for one only.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import torch.distributed as dist
from torch import Tensor

from lightning_autotp.ranks.agreement import gather_objects
from lightning_autotp.ranks.extremes import LOWEST, are_alike, bounds
from lightning_autotp.ranks.fingerprints import sum_and_norm
from lightning_autotp.ranks.host_copy import HostCopy

_DIFFERENCE = 1e-3
"""How far norms and normalized sums may be apart: rounding that has added up is far less."""


class Drift:
    """Notes one tensor after another, and compares it with that of the other ranks.

    Args:
        tensors: gives the tensors of the moment, by name: on every rank the same, in the same order.
    """

    def __init__(self, tensors: Callable[[], Iterator[tuple[str, Tensor]]]) -> None:
        self._tensors = tensors
        self._left: Iterator[tuple[str, Tensor]] = iter(())
        self._noted: tuple[str, HostCopy] | None = None

    def note(self) -> None:
        """Note the next tensor as it is now. Not collective, and no device is waited for."""
        found = next(self._left, None)
        if found is None:
            self._left = self._tensors()
            found = next(self._left, None)
        if found is not None:
            name, tensor = found
            self._noted = name, HostCopy(sum_and_norm(tensor.detach(), 2))

    def bounds(self) -> tuple[int, int, int, int]:
        """Four numbers of 64 bits, whose largest over the ranks tell the extremes of norm and normalized sum."""
        if self._noted is None:
            return LOWEST, LOWEST, LOWEST, LOWEST
        total, norm = self._noted[1].read().tolist()
        return *bounds(norm), *bounds(total / norm if norm else 0.0)

    def settle(self, largest: Sequence[int], everyone: dist.ProcessGroup | None) -> None:
        """Go on if the tensor is the same on all ranks. Collective over ``everyone`` if it is not.

        Args:
            largest: the largest of all ranks' :meth:`bounds`, for one or several groups after one another.
            everyone: the ranks that have these numbers; ``None`` is every process.

        Raises:
            RuntimeError: on all of these ranks, if it differs within any one group.
        """
        noted, self._noted = self._noted, None
        if all(
            are_alike(largest[at : at + 2], _DIFFERENCE)
            and are_alike(largest[at + 2 : at + 4], _DIFFERENCE, _DIFFERENCE)
            for at in range(0, len(largest), 4)
        ):
            return
        own = ("none", [0.0, 0.0]) if noted is None else (noted[0], noted[1].read().tolist())
        said = gather_objects(own, everyone)
        numbers = dist.get_process_group_ranks(everyone)
        found = [
            f"  rank {rank}: {name}, of norm {norm:.7g} and sum {total:.7g}"
            for rank, (name, (total, norm)) in zip(numbers, said, strict=True)
        ]
        raise RuntimeError(
            "a tensor that every rank of a tensor-parallel group has whole has become a different one on each:\n"
            + "\n".join(found)
            + "\nEach rank steps its own copy. Look for what does something else on one rank: a write on rank 0, a"
            " gradient that is clipped or scaled by a number of this rank's part, random numbers that are not the"
            " group's; or start again from a checkpoint, if nondeterministic kernels have caused it"
        )
