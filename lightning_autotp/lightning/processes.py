"""The processes of a run, for the Trainer's strategy and for Fabric's: sizes, groups, random numbers, the watch."""

from __future__ import annotations

import uuid
from collections.abc import Callable
from datetime import timedelta
from subprocess import Popen
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from lightning_autotp.lightning.discovery import parallel_sizes
from lightning_autotp.lightning.starting import check_start
from lightning_autotp.private.distributed_private import default_store
from lightning_autotp.private.lightning_private import collect_rng_states, default_pg_timeout, set_rng_states
from lightning_autotp.ranks.group import timeout_of_all
from lightning_autotp.ranks.peers import Peer, PeerWatch
from lightning_autotp.ranks.started import let_threads_finish_at_end, wait_at_end


class _Strategy(Protocol):
    """What a strategy of Lightning's has."""

    @property
    def num_nodes(self) -> int: ...
    @property
    def num_processes(self) -> int: ...
    @property
    def world_size(self) -> int: ...
    @property
    def global_rank(self) -> int: ...
    @property
    def root_device(self) -> torch.device: ...
    @property
    def device_mesh(self) -> DeviceMesh: ...
    @property
    def tensor_ranks(self) -> int | str: ...
    @property
    def data_ranks(self) -> int | str: ...
    @property
    def timeout(self) -> timedelta | None: ...
    @property
    def patience(self) -> float: ...
    def set_sizes(self, tensor_ranks: int, data_ranks: int) -> None: ...
    def broadcast(self, obj: Any, src: int = 0) -> Any: ...
    def kill_processes(self) -> None: ...


class ParallelRanks:
    """Hooks and properties that the Trainer's strategy and Fabric's have in common."""

    def before_launch(self: _Strategy) -> None:
        """Decide on the sizes; and let this process end without a thread at work, when all else has ended."""
        let_threads_finish_at_end()
        devices = self.num_nodes * self.num_processes
        self.set_sizes(*parallel_sizes(devices, self.tensor_ranks, self.data_ranks))

    def before_start(self: _Strategy) -> None:
        """Refuse where processes cannot be started, or other machines not be found."""
        check_start(self.num_processes, self.num_nodes)

    def after_start(self: _Strategy, processes: list[Popen[bytes]]) -> None:
        """This process ends when those it started have ended, and says if one failed."""
        wait_at_end(processes, self.patience)

    @property
    def patience(self: _Strategy) -> float:
        """Seconds that a rank waits for one that is stopped."""
        return (self.timeout or default_pg_timeout).total_seconds()

    @property
    def tensor_parallel_group(self: _Strategy) -> dist.ProcessGroup:
        """The ranks that share this rank's copy of the model."""
        return self.device_mesh["tensor_parallel"].get_group()

    @property
    def data_parallel_group(self: _Strategy) -> dist.ProcessGroup:
        """The ranks that hold the same part of the other copies."""
        return self.device_mesh["data_parallel"].get_group()

    def share_timeout(self: _Strategy) -> None:
        """Let the groups of the mesh wait as long as that of all processes, the only one that Lightning tells."""
        for group in self.device_mesh.get_all_groups():
            group.set_timeout(timeout_of_all())

    def reduce_boolean_decision(self: _Strategy, decision: bool, all: bool = True) -> bool:
        """Decide together over all ranks."""
        votes = torch.tensor(int(decision), device=self.root_device)
        dist.all_reduce(votes)
        return int(votes) == self.world_size if all else int(votes) > 0


def share_random_state(broadcast: Callable[[Any], Any], device: torch.device) -> None:
    """Rank 0's random state for every rank: in one process it would have been the only one. Collective.

    Args:
        broadcast: gives every rank what rank 0 has.
        device: the rank's, whose generator counts besides the CPU's.
    """
    set_rng_states(broadcast(collect_rng_states(include_cuda=False)))
    if device.type == "cuda":
        torch.cuda.set_rng_state(broadcast(torch.cuda.get_rng_state(device)), device)


def watch_peers(strategy: _Strategy, before: PeerWatch | None) -> PeerWatch | None:
    """A watch over the other processes, in place of an earlier one; ``None`` where there are none. Collective."""
    if before is not None:
        before.close()
    if strategy.world_size == 1:
        return None
    peers: list[Any] = [None] * strategy.world_size
    dist.all_gather_object(peers, Peer.this_process(strategy.global_rank))
    run = strategy.broadcast(uuid.uuid4().hex)
    return PeerWatch(peers, strategy.global_rank, default_store(), run, strategy.patience, strategy.kill_processes)


def end_watch(watch: PeerWatch | None, rank: int, error: BaseException | None) -> None:
    """Stop watching, because this process ends; tell the others if it is because of an error. Not collective."""
    if watch is None:
        return
    if error is not None:
        watch.report(error)
    elif rank == 0:
        watch.wait_for_others()
    watch.close()
