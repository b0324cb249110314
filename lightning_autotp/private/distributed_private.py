"""What is used of ``torch.distributed`` that it does not promise to keep: process groups, collectives, FSDP2, files.

The rest of the package imports it from here, and ``tests/test_private.py`` asks each of these names for what is relied
on. Apart from :mod:`.torch_private`, for much of the package works without processes.
"""

from __future__ import annotations

from pathlib import Path
from typing import IO, Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.fsdp import fully_shard

# Which elements of a DTensor are in this process. Their number is public (to_local), where they begin is not.
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

__all__ = [
    "FileSystemReader",
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


class FileSystemReader(dcp.FileSystemReader):
    """torch's, of which :meth:`opened` may be overridden: the only place that has a stored tensor's bytes."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)

    def opened(self, part: IO[bytes], file: str, offset: int, length: int) -> IO[bytes]:
        """What to read of a stored tensor, given its place in a file."""
        return part

    def _slice_file(self, file: Any, sinfo: Any) -> IO[bytes]:
        part = super()._slice_file(file, sinfo)
        return self.opened(part, sinfo.relative_path, sinfo.offset, sinfo.length)
