"""The tensor-parallel group as plain data that layers can keep, copy and pickle; and groups that are made later."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta

import torch.distributed as dist

from lightning_autotp.private.distributed_private import default_store, process_group


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


def new_group(ranks: Sequence[int] | None, backend: str | None = None) -> dist.ProcessGroup:
    """A group of these ranks, or of all. Collective over all processes.

    Its collectives wait as long as those of the group of all processes: torch's own would wait for its default.
    """
    return dist.new_group(ranks, timeout_of_all(), backend)


def timeout_of_all() -> timedelta:
    """How long collectives of all processes wait: what was said when they came together. Not collective."""
    timeout: timedelta = default_store().timeout  # type: ignore[attr-defined]
    return timeout


def end_processes() -> None:
    """End all process groups, if there are any: a device's own must not be left to the end of the interpreter."""
    if dist.is_initialized():
        dist.destroy_process_group()
