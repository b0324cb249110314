"""The processes of a run, for the Trainer's strategy and for Fabric's: sizes, groups, random numbers, the watch."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from subprocess import Popen
from typing import Any, Protocol

import torch
import torch.distributed as dist
from lightning.pytorch.utilities.seed import isolate_rng
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from lightning_autotp.layouts.ownership import Ownership
from lightning_autotp.layouts.types import Shard
from lightning_autotp.lightning.discovery import parallel_sizes
from lightning_autotp.lightning.starting import check_start
from lightning_autotp.lightning.tracebacks import print_errors_briefly
from lightning_autotp.parallel.collectives import all_gather_replicate
from lightning_autotp.private.distributed_private import default_store
from lightning_autotp.private.lightning_private import collect_rng_states, default_pg_timeout, set_rng_states
from lightning_autotp.ranks.agreement import Raised
from lightning_autotp.ranks.group import TPGroup, timeout_of_all
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
    def data_parallel_group(self) -> dist.ProcessGroup: ...
    @property
    def timeout(self) -> timedelta | None: ...
    @property
    def patience(self) -> float: ...
    def set_sizes(self, tensor_ranks: int, data_ranks: int) -> None: ...
    def over_copies(self, group: Any) -> dist.ProcessGroup: ...
    def broadcast(self, obj: Any, src: int = 0) -> Any: ...
    def kill_processes(self) -> None: ...


class ParallelRanks:
    """Hooks and properties that the Trainer's strategy and Fabric's have in common."""

    def before_launch(self: _Strategy) -> None:
        """Decide on the sizes; let this process end without a thread at work, and say briefly with which error."""
        let_threads_finish_at_end()
        print_errors_briefly()
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

    def over_copies(self: _Strategy, group: Any) -> dist.ProcessGroup:
        """The group of a collective that Lightning's API was given this ``group`` for.

        All processes, the default, means one rank of each copy: ranks of one copy have the same values, which count
        once. Any other group is the caller's choice.
        """
        return self.data_parallel_group if group is None or group is dist.group.WORLD else group

    def all_gather(self: _Strategy, tensor: Tensor, group: Any = None, sync_grads: bool = False) -> Tensor:
        """Gather what the copies of the model have, ``[copies, ...]``; of one copy it is the tensor itself."""
        among = self.over_copies(group)
        if among is self.data_parallel_group:
            return gather_copies(tensor, among, sync_grads)
        return super().all_gather(tensor, among, sync_grads)  # type: ignore[misc]

    def share_timeout(self: _Strategy) -> None:
        """Let the groups of the mesh wait as long as that of all processes, the only one that Lightning tells."""
        for group in self.device_mesh.get_all_groups():
            group.set_timeout(timeout_of_all())

    def reduce_boolean_decision(self: _Strategy, decision: bool, all: bool = True) -> bool:
        """Decide together over all ranks."""
        votes = torch.tensor(int(decision), device=self.root_device)
        dist.all_reduce(votes)
        return int(votes) == self.world_size if all else int(votes) > 0


@contextmanager
def same_random_state(device: torch.device) -> Iterator[None]:
    """Around what starts the processes: Lightning seeds all generators again there, as it does not with one process.

    Args:
        device: the rank's. A GPU that nothing was done on has drawn nothing.
    """
    drawn_on = [device] if device.type == "cuda" and torch.cuda.is_initialized() else []
    with isolate_rng(include_cuda=False), torch.random.fork_rng(drawn_on):
        yield


def share_random_state(broadcast: Callable[[Any], Any], device: torch.device) -> None:
    """Rank 0's random state for every rank: in one process it would have been the only one. Collective.

    Args:
        broadcast: gives every rank what rank 0 has.
        device: the rank's, whose generator counts besides the CPU's.
    """
    set_rng_states(broadcast(collect_rng_states(include_cuda=False)))
    if device.type == "cuda":
        torch.cuda.set_rng_state(broadcast(torch.cuda.get_rng_state(device)), device)


def gather_copies(tensor: Tensor, group: dist.ProcessGroup, sync_grads: bool) -> Tensor:
    """What each copy of the model has, ``[...] -> [copies, ...]``; of one copy the tensor itself. Collective.

    Lightning's own takes torch's, whose gradient is wrong under gloo for any group but that of all processes.

    Args:
        tensor: of the same shape everywhere.
        group: the data-parallel group.
        sync_grads: whether a copy's tensor gets the gradients of all copies, added up, or none.
    """
    copies = TPGroup.of(group)
    if copies.size == 1:
        return tensor
    each_one = Shard(((0, Ownership.even(copies.size, copies.size)),))
    with torch.set_grad_enabled(sync_grads and torch.is_grad_enabled()):
        return all_gather_replicate(tensor.unsqueeze(0), copies, each_one)


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


def report(watch: PeerWatch, error: BaseException) -> None:
    """Tell the other ranks of an error, unless each of them has raised one. Not collective."""
    raised = Raised.how(error)
    if raised is None or not raised.everywhere:
        watch.report(error)


def end_watch(watch: PeerWatch | None, rank: int, error: BaseException | None) -> None:
    """Stop watching, because this process ends; tell the others if it is because of an error. Not collective."""
    if watch is None:
        return
    if error is not None:
        report(watch, error)
    elif rank == 0:
        watch.wait_for_others()
    watch.close()
