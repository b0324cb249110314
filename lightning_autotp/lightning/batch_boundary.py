"""The exchange between batches: one small all-reduce of what all ranks must agree on.

It says whether any rank has got a signal, and whether the ranks of each copy of the model still have in common what
they must (:mod:`lightning_autotp.ranks.consistency`), have computed the same losses
(:mod:`lightning_autotp.ranks.losses`) and still have the same in tensors that each has whole
(:mod:`lightning_autotp.ranks.drift`). Before a batch of validation, test or prediction is used, so is
known whether it is the same one everywhere. In training the exchange comes before a batch is read, as signals want it,
so that a batch is compared before the next one; the first batches are compared on their own before they are used, for
a sampler or a padding that is wrong at all is wrong from the beginning.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch import Trainer
from torch import Tensor

from lightning_autotp.guard.whole_states import drifts_of
from lightning_autotp.ranks.agreement import largest_of_all
from lightning_autotp.ranks.consistency import ReplicaConsistency
from lightning_autotp.ranks.extremes import LOWEST


class BatchBoundarySync:
    """Called between batches, and told of every batch.

    Args:
        trainer: who is at which batch.
        group: the tensor-parallel group.
        copies: the data-parallel group.
        device: the rank's.
        checked: how many training batches of an epoch are compared before they are used, and not with the next one.
    """

    def __init__(
        self, trainer: Trainer, group: dist.ProcessGroup, copies: dist.ProcessGroup, device: torch.device, checked: int
    ) -> None:
        self._trainer, self._group = trainer, group
        self._drifts = drifts_of(lambda: trainer.lightning_module, lambda: trainer.optimizers, group)
        self._consistency = ReplicaConsistency(group, device) if group.size() > 1 else None
        self._copies, self._copy, self._checked = copies.size(), copies.rank(), checked
        self._loop: tuple[Any, ...] = ()
        self._seen = Counter[int]()  # by dataloader

    def __call__(self, asked: Sequence[bool] = (), everyone: bool = True) -> list[bool]:
        """Which of several questions any rank answers with yes. Collective, over every rank or one copy's.

        Args:
            asked: what this rank answers.
            everyone: whether all ranks take part, or only those of this rank's copy.

        Raises:
            RuntimeError: on every rank that takes part, if the ranks of a copy have not in common what they must, or
                have computed other losses, or have another tensor each where all should have the same.
        """
        group = None if everyone else self._group
        numbers = [int(answer) for answer in asked]
        if self._consistency is not None:
            copies, copy = (self._copies, self._copy) if everyone else (1, 0)
            own = self._consistency.numbers()
            numbers += [*len(own) * copy * [LOWEST], *own, *len(own) * (copies - copy - 1) * [LOWEST]]
        largest = largest_of_all(numbers, group)
        if self._consistency is not None:
            self._consistency.settle(largest[len(asked) :], group)
            self._consistency.note_whole(self._drifts)
        return [bool(answer) for answer in largest[: len(asked)]]

    def note(self, batch: Any, dataloader_idx: int) -> None:
        """Note a batch that is about to be used. Collective over all ranks for the first ones of training.

        Raises:
            RuntimeError: on every rank, if one of these differs between the ranks of a copy.
        """
        if self._consistency is None:
            return
        trainer = self._trainer
        loop = trainer.state.stage, trainer.current_epoch
        if loop != self._loop:
            self._loop = loop
            self._seen.clear()
        seen = self._seen[dataloader_idx]
        self._seen[dataloader_idx] += 1
        number = trainer.fit_loop.batch_idx + 1 if trainer.training else seen
        self._note(batch, number, dataloader_idx)
        if trainer.training and seen < self._checked:
            self()

    def note_loss(self, loss: Tensor) -> None:
        """Note a loss of which gradients are about to be computed. Not collective."""
        if self._consistency is not None:
            self._consistency.note_loss(loss)

    def noting(self, arguments: tuple[Any, ...]) -> tuple[Any, ...]:
        """A step's arguments, where what it reads from an iterator (``training_step(dataloader_iter)``) is noted."""
        if self._consistency is None or not arguments or not isinstance(arguments[0], Iterator):
            return arguments
        return _Noting(arguments[0], self._note), *arguments[1:]

    def _note(self, batch: Any, number: int, dataloader_idx: int) -> None:
        assert self._consistency is not None
        trainer = self._trainer
        assert trainer.state.stage is not None
        self._consistency.note(
            batch,
            f"batch {number} of the {trainer.state.stage.value} data (dataloader {dataloader_idx}, epoch"
            f" {trainer.current_epoch}, step {trainer.global_step})",
        )


class _Noting(Iterator[Any]):
    """Stands for an iterator over batches with their numbers and dataloaders."""

    def __init__(self, batches: Iterator[Any], note: Callable[[Any, int, int], None]) -> None:
        self._batches, self._note = batches, note

    def __next__(self) -> Any:
        batch, number, dataloader_idx = item = next(self._batches)
        self._note(batch, number, dataloader_idx)
        return item

    def __getattr__(self, name: str) -> Any:
        return getattr(self._batches, name)
