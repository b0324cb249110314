"""What is used of ``torch.distributed`` that it does not promise to keep: process groups, collectives, FSDP2, files.

The rest of the package imports it from here, and ``tests/test_private.py`` asks each of these names for what is relied
on. Apart from :mod:`.torch_private`, for much of the package works without processes.
"""

from __future__ import annotations

import io
import os
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.filesystem import FileSystem
from torch.distributed.fsdp import fully_shard

# Which elements of a DTensor are in this process. Their number is public (to_local), where they begin is not.
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

__all__ = [
    "FileSystemWriter",
    "collectives",
    "compute_local_shape_and_global_offset",
    "default_store",
    "is_outermost",
    "process_group",
]

collectives = torch.ops._c10d_functional
"""Collectives as operators on a group's name, which torch.compile knows; ``torch.distributed``'s own write in place."""


def process_group(name: str) -> dist.ProcessGroup:
    """The process group of a registered name. ``group_name`` is public, the way back is not."""
    return dist.distributed_c10d._resolve_process_group(name)  # type: ignore[arg-type]


def default_store() -> dist.Store:
    """What all processes of the job share. A store of our own would need a port that all know."""
    return dist.distributed_c10d._get_default_store()


def is_outermost(module: nn.Module) -> None:
    """Let FSDP2 take this module for the outermost one, whichever of its parts is called first. Nothing public."""
    fully_shard.state(module)._lazy_init()  # type: ignore[attr-defined]


class FileSystemWriter(dcp.FileSystemWriter):
    """torch's, which also notes each stored tensor's checksum: ``checksum`` of what its metadata has for the place."""

    def __init__(self, path: Path) -> None:
        super().__init__(path, sync_files=True)
        self.fs = self.noted = _Checksumming()

    def write_data(self, plan: Any, planner: Any) -> Any:
        """Write this rank's tensors. Everything between two positions that torch asks for is one of them."""
        done = super().write_data(plan, planner)
        for written in done.value():
            place = written.storage_data
            place.checksum = self.noted.checksums[place.relative_path, place.offset, place.length]
        return done


class _Checksumming(FileSystem):
    """Writes files, and knows the CRC-32 of what was written by the file's name, the position and the length."""

    def __init__(self) -> None:
        super().__init__()
        self.checksums: dict[tuple[str, int, int], int] = {}

    @contextmanager
    def create_stream(self, path: str | os.PathLike[str], mode: str) -> Iterator[io.IOBase]:
        """Open a file to write, which is done from its beginning to its end."""
        with _Summed(path, self.checksums) as stream:
            yield stream


class _Summed(io.BufferedWriter):
    def __init__(self, path: str | os.PathLike[str], checksums: dict[tuple[str, int, int], int]) -> None:
        super().__init__(io.FileIO(path, "wb"))
        self.file, self.checksums = os.path.basename(path), checksums
        self.begin, self.checksum = 0, 0

    def write(self, data: Any) -> int:
        self.checksum = zlib.crc32(data, self.checksum)
        return super().write(data)

    def tell(self) -> int:
        position = super().tell()
        if position > self.begin:
            self.checksums[self.file, self.begin, position - self.begin] = self.checksum
            self.begin, self.checksum = position, 0
        return position
