"""Dataloaders under Fabric: ranks of one copy of the model read alike, and batches are compared before they are used.

Nothing here is collective while data are read, for a loop may read on one rank only. Batches are noted, and compared
when a model is called, where all ranks of a copy take part anyway.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from lightning.fabric.utilities.seed import pl_worker_init_function
from torch import nn

from lightning_autotp.private.torch_private import LoaderOfLoader
from lightning_autotp.ranks.in_common import InCommon

MOST = 256
"""Batches that are noted between two comparisons: those of a long evaluation would add up."""


class CountedNotes:
    """Notes batches up to a number, and compares them over a tensor-parallel group.

    Args:
        group: the tensor-parallel group.
        device: the rank's.
    """

    def __init__(self, group: dist.ProcessGroup, device: torch.device) -> None:
        self._in_common = InCommon(group, device)
        self._noted = 0

    @property
    def is_waiting(self) -> bool:
        """Whether something was noted since the last comparison."""
        return self._noted > 0

    def note(self, batch: Any, where: str) -> None:
        """Note a batch. Not collective."""
        self._noted += 1
        if self._noted <= MOST:
            self._in_common.note(batch, where)

    def compare(self) -> None:
        """Compare what was noted since the last time, and the random generators. Collective over the group.

        Raises:
            RuntimeError: on every rank, if any two ranks differ.
        """
        self._noted = 0
        self._in_common.compare()


class ComparedFirst:
    """Forward pre-hook of a parallel model: what was read is compared before the model is given it.

    In training before every call; else only where something was read, for a generation of texts calls the model for
    every token. Not in a compiled model. A copy of the model does not compare.

    Args:
        notes: what was read.
    """

    def __init__(self, notes: CountedNotes | None) -> None:
        self._notes = notes

    def __call__(self, model: nn.Module, args: Any) -> None:
        """Compare. Collective over the tensor-parallel group.

        Raises:
            RuntimeError: on every rank, if any two ranks differ.
        """
        if self._notes is None or torch.compiler.is_compiling():
            return
        if self._notes.is_waiting or (model.training and torch.is_grad_enabled()):
            self._notes.compare()

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

    def __getattr__(self, name: str) -> Any:
        if name == "loader":  # an object that is being copied has none yet
            raise AttributeError(name)
        return getattr(self.loader, name)

    def __len__(self) -> int:
        return len(self.loader)

    def __iter__(self) -> Iterator[Any]:
        epoch, self._epoch = self._epoch, self._epoch + 1
        for number, batch in enumerate(self.loader):
            self._notes.note(batch, f"batch {number} of {self._name} (read for the {epoch + 1}. time)")
            yield batch


def seed_workers_by(loader: Any, copy: int) -> None:
    """Seed a loader's workers by the copy of the model, where Fabric has seeded them by rank: ranks augment alike."""
    seeds = getattr(loader, "worker_init_fn", None)
    if isinstance(seeds, partial) and seeds.func is pl_worker_init_function:
        loader.worker_init_fn = partial(pl_worker_init_function, rank=copy)
