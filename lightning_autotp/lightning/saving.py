"""Writing checkpoints, for the Trainer's strategy and for Fabric's: at once or in the background."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import torch.distributed as dist

from lightning_autotp.checkpoints.files import Background, save_directory, save_file
from lightning_autotp.ranks.agreement import raise_together


class CheckpointWriter:
    """Writes checkpoints one after the other. Everything but :meth:`after` and :meth:`close` is collective.

    Args:
        directories: whether a checkpoint is a directory to which each rank writes, instead of rank 0's file.

    Attributes:
        background: what writes later.
    """

    def __init__(self, directories: bool) -> None:
        self._directories = directories
        self.background = Background()
        self._group: dist.ProcessGroup | None = None

    def finish(self) -> None:
        """Wait for the save in the background; its error on one rank reaches all."""
        if self._group is None:
            # The background's own, and for the CPU: what is saved is there.
            self._group = dist.new_group(backend="gloo")
        with self._together("writing a checkpoint in the background"):
            self.background.wait()

    def write(self, checkpoint: dict[str, Any], path: Path) -> None:
        """Write a checkpoint now, whole or not at all; an error on one rank reaches all."""
        with self._together(f"writing the checkpoint {path}"):
            self._write(checkpoint, path)

    def write_later(self, checkpoint: dict[str, Any], path: Path) -> None:
        """Write one in the background, that nobody changes any more; an error is raised by :meth:`finish`."""
        self.background.submit(lambda: self._write(checkpoint, path))

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
        if self._directories:
            assert self._group is not None
            save_directory(checkpoint, path, self._group)
        elif dist.get_rank() == 0:
            save_file(checkpoint, path)

    def _together(self, phase: str) -> AbstractContextManager[None]:
        """One rank writes a file, and the others are told of its error. For a directory the ranks write together.

        They tell each other of errors while they do. A rank with an error of another kind must not wait for peers that
        wait for it in there: it raises at once, and they are ended.
        """
        return nullcontext() if self._directories else raise_together(None, phase)
