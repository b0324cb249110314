"""Writing checkpoints, for the Trainer's strategy and for Fabric's: at once or in the background."""

from __future__ import annotations

import copy
from collections.abc import Callable, Collection
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer

from lightning_autotp.checkpoints.files import Background, save_directory, save_file
from lightning_autotp.checkpoints.state import (
    full_optimizer_state,
    full_state_dict,
    held_optimizer_state,
    held_state,
)
from lightning_autotp.ranks.agreement import raise_together
from lightning_autotp.ranks.group import new_group


class CheckpointWriter:
    """Writes checkpoints one after the other. Everything but :meth:`after` and :meth:`close` is collective.

    Args:
        directories: whether a checkpoint is a directory to which each rank writes, instead of rank 0's file.
        in_background: whether training goes on while one is written.

    Attributes:
        directories: see above.
        background: what writes later.
    """

    def __init__(self, directories: bool, in_background: bool) -> None:
        self.directories, self._in_background = directories, in_background
        self.background = Background()
        self._group: dist.ProcessGroup | None = None

    def state_of(self, module: nn.Module) -> dict[str, Any]:
        """The state to write of a module with parallel models: whole on rank 0 and empty elsewhere, or held tensors."""
        if self.directories:
            return held_state(module, copy=self._in_background)
        return full_state_dict(module, keep=dist.get_rank() == 0)

    def state_of_optimizer(self, optimizer: Optimizer, module: nn.Module) -> dict[str, Any]:
        """The state to write of an optimizer of the module's parameters: whole on rank 0, or held tensors."""
        if self.directories:
            return held_optimizer_state(optimizer, module, copy=self._in_background)
        return full_optimizer_state(optimizer, module, keep=dist.get_rank() == 0)

    def begin(self) -> None:
        """Make the group in which directories are written: now, so that what is amiss with it does not end a long run.

        It is the background's own, and for the CPU: what is saved is there.
        """
        if self.directories and self._group is None:
            self._group = new_group(None, "gloo")

    def finish(self) -> None:
        """Wait for the save in the background; its error on one rank reaches all."""
        with self._together("writing a checkpoint in the background"):
            self.background.wait()

    def write(self, checkpoint: dict[str, Any], path: Path, states: Collection[str], may_wait: bool = True) -> None:
        """Write a checkpoint, whole or not at all, now or in the background.

        An error on one rank reaches all, in the background in :meth:`finish`.

        Args:
            checkpoint: what to write.
            path: where to.
            states: its entries that :meth:`state_of` and :meth:`state_of_optimizer` gave; the others may change.
            may_wait: whether it may be written in the background.
        """
        if self._in_background and may_wait:
            rest = copy.deepcopy({key: value for key, value in checkpoint.items() if key not in states})
            kept = {key: rest.get(key, value) for key, value in checkpoint.items()}
            self.background.submit(lambda: self._write(kept, path))
            return
        with self._together(f"writing the checkpoint {path}"):
            self._write(checkpoint, path)

    def after(self, job: Callable[[], None]) -> bool:
        """Do something when what is being written is finished; ``False`` if nothing is, and nothing was done."""
        if self.background.is_busy:
            self.background.submit(job)
            return True
        return False

    def close(self) -> None:
        """Finish, and end the background.

        Raises:
            Exception: the first error in it.
        """
        self.background.close()

    def _write(self, checkpoint: dict[str, Any], path: Path) -> None:
        if self.directories:
            assert self._group is not None
            save_directory(checkpoint, path, self._group)
        elif dist.get_rank() == 0:
            save_file(checkpoint, path)

    def _together(self, phase: str) -> AbstractContextManager[None]:
        """One rank writes a file, and the others are told of its error. For a directory the ranks write together.

        They tell each other of errors while they do. A rank with an error of another kind must not wait for peers that
        wait for it in there: it raises at once, and they are ended.
        """
        return nullcontext() if self.directories else raise_together(None, phase)
