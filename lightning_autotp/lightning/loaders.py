"""Dataloaders under Fabric: ranks of one copy of the model read alike, and batches are compared before they are used.

Nothing here is collective while data are read, for a loop may read on one rank only. Batches are noted, and compared
when a model is called, where all ranks of a copy take part anyway.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from lightning.fabric.utilities.seed import pl_worker_init_function
from torch import Tensor, nn

from lightning_autotp.capture.capture import ExampleCall
from lightning_autotp.private.torch_private import LoaderOfLoader
from lightning_autotp.ranks.consistency import ReplicaConsistency
from lightning_autotp.ranks.drift import Drift

MOST = 256
"""Batches that are noted between two comparisons: those of a long evaluation would add up."""


class CountedNotes:
    """Notes batches up to a number, and compares them over a tensor-parallel group.

    Args:
        group: the tensor-parallel group.
        device: the rank's.
        checked: how many batches of a pass over a loader are compared before a model in training is given them.
    """

    def __init__(self, group: dist.ProcessGroup, device: torch.device, checked: int) -> None:
        self._consistency = ReplicaConsistency(group, device)
        self._checked = checked
        self._noted = 0
        self._number = 0
        self._calls = 0  # without a batch that was noted
        self._is_left = False

    @property
    def is_waiting(self) -> bool:
        """Whether something is left to be compared: batches, or the random generators after a call."""
        return self._noted > 0 or self._is_left

    def note(self, batch: Any, number: int, where: str) -> None:
        """Note a batch, which is this one of a pass over its loader. Not collective."""
        self._noted, self._number = self._noted + 1, number
        if self._noted <= MOST:
            self._consistency.note(batch, where)

    def note_loss(self, loss: Tensor) -> None:
        """Note a loss, which is compared with what is compared after the next batch. Not collective."""
        self._consistency.note_loss(loss)

    def called(self, in_training: bool) -> None:
        """A model is about to be called: compare, or leave that to the optimizer's step. Collective over the group.

        Without training only where something was read, for a generation of texts calls the model for every token.

        Raises:
            RuntimeError: on every rank, if any two ranks differ.
        """
        number = self._number
        if not self._noted:
            number, self._calls = self._calls, self._calls + in_training
        is_now = not 0 <= self._checked <= number or self._noted > MOST
        if is_now if in_training else self._noted:
            self.compare()
        else:
            self._is_left |= in_training

    def compare(self, drifts: Sequence[Drift] = ()) -> None:
        """Compare what was noted since the last time, and the random generators. Collective over the group.

        Args:
            drifts: what else is noted now, to be compared the next time.

        Raises:
            RuntimeError: on every rank, if any two ranks differ.
        """
        self._noted, self._is_left = 0, False
        self._consistency.compare()
        self._consistency.note_whole(drifts)


class ComparedFirst:
    """Before a forward of a parallel model: what was read is compared. A copy of the model does not compare.

    Args:
        notes: what was read.
    """

    def __init__(self, notes: CountedNotes | None) -> None:
        self._notes = notes

    def before(self, model: nn.Module, call: ExampleCall) -> None:
        """Compare, where it is time. Collective over the tensor-parallel group then.

        Raises:
            RuntimeError: on every rank, if any two ranks differ.
        """
        if self._notes is not None:
            self._notes.called(model.training and torch.is_grad_enabled())

    def __reduce__(self) -> tuple[Any, ...]:
        return ComparedFirst, (None,)


class NotedLoader(LoaderOfLoader):
    """Stands for a loader whose batches are noted. Any other attribute is the loader's.

    Args:
        loader: the loader.
        notes: where they are noted.
        name: the loader's, the same on all ranks.
        shown: whose attributes it shows: Fabric's own wrapper copies them.
    """

    def __init__(self, loader: Any, notes: CountedNotes, name: str, shown: Any) -> None:
        vars(self).update(vars(shown))
        self.loader = loader
        self._notes, self._name = notes, name
        self._epoch = 0

    def __len__(self) -> int:
        return len(self.loader)

    def __iter__(self) -> Iterator[Any]:
        epoch, self._epoch = self._epoch, self._epoch + 1
        for number, batch in enumerate(self.loader):
            self._notes.note(batch, number, f"batch {number} of {self._name} (pass {epoch + 1})")
            yield batch


def seed_workers_by(loader: Any, copy: int) -> None:
    """Seed a loader's workers by the copy of the model, where Fabric has seeded them by rank: ranks augment alike."""
    seeds = getattr(loader, "worker_init_fn", None)
    if isinstance(seeds, partial) and seeds.func is pl_worker_init_function:
        loader.worker_init_fn = partial(pl_worker_init_function, rank=copy)
