"""The tensor-parallel group as plain data that layers can keep, copy and pickle."""

from __future__ import annotations

from dataclasses import dataclass

import torch.distributed as dist

from lightning_autotp.private.distributed_private import process_group


@dataclass(frozen=True)
class TPGroup:
    """A process group by name, with this process's place in it.

    Attributes:
        name: the process group's registered name; empty for a group that exists only on the meta device (planning).
        rank: this process's rank within the group.
        size: number of ranks in the group.
    """

    name: str
    rank: int
    size: int

    @classmethod
    def of(cls, process_group: dist.ProcessGroup) -> TPGroup:
        """The description of a real process group."""
        return cls(process_group.group_name, dist.get_rank(process_group), dist.get_world_size(process_group))

    @property
    def process_group(self) -> dist.ProcessGroup:
        """The process group itself."""
        return process_group(self.name)
