"""A barrier before a collective that one rank's own code may begin without the others.

The others would take it for their next collective: they wait with it for ever, add up what has nothing to do with each
other, or are aborted. So the ranks first wait for each other in the store that all processes share, as torch does
before it has a group. No collective is used before all are there, and a rank that others do not follow says so.
"""

from __future__ import annotations

import json
import sys
import time
from collections import Counter
from dataclasses import asdict

import torch.distributed as dist

from lightning_autotp.private.distributed_private import default_store
from lightning_autotp.ranks.agreement import MissingRank
from lightning_autotp.ranks.group import TPGroup, timeout_of_all
from lightning_autotp.ranks.peers import Peer, this_machine

PATIENCE = 10.0
"""Seconds after which :func:`store_barrier` says what it waits for."""
LOOK = 0.001
"""Seconds between two looks for the others."""
INTERVAL = 1.0
"""Seconds between two looks whether their processes have ended."""
_entered = Counter[tuple[int, ...]]()


def register_process() -> None:
    """Tell the other ranks which process this one is, for :func:`store_barrier`. Not collective."""
    own = Peer.this_process(dist.get_rank())
    default_store().set(_process(own.rank), json.dumps(asdict(own)))


def store_barrier(group: TPGroup, why: str) -> None:
    """Wait until every rank of a group has come here. Collective.

    Args:
        group: the ranks.
        why: what is being done, as in "the gradient of norm.weight is read".

    Raises:
        MissingRank: if some have not come within the timeout of collectives, or before their process ended.
    """
    ranks = tuple(dist.get_process_group_ranks(group.process_group))
    _entered[ranks] += 1
    store, own, key = default_store(), dist.get_rank(), f"barrier/{ranks}"
    number, begin = _entered[ranks], time.monotonic()
    looked, has_said = begin, False
    try:
        come = store.add(f"{key}/{number}", 1)
        while come < group.size:
            now = time.monotonic()
            here = (
                f"{why} on rank {own}, but not on {group.size - come} of the ranks {list(ranks)}: all of them have to"
                " do it, so write that without a condition on the rank"
            )
            ended = None
            if now - looked > INTERVAL:
                looked, ended = now, _ended(store, [rank for rank in ranks if rank != own])
                come = store.add(f"{key}/{number}", 0)  # again: one may have come, and ended afterwards
            if come < group.size and (ended is not None or now - begin > timeout_of_all().total_seconds()):
                store.add(f"{key}/{number}", -1)  # as if it had not come
                _entered[ranks] -= 1
                raise MissingRank(here if ended is None else f"{here}. {ended} has ended")
            if now - begin > PATIENCE and not has_said:
                has_said = True
                print(f"lightning_autotp: {here}. It waits for them", file=sys.stderr, flush=True)
            time.sleep(LOOK)
            come = store.add(f"{key}/{number}", 0)
        store.delete_key(f"{key}/{number - 1}")  # all have left it
    except dist.DistError as error:
        raise MissingRank(
            f"{why} on rank {own}, but rank 0, which keeps the job together, has ended: all ranks have to do it, so"
            " write that without a condition on the rank"
        ) from error


def _process(rank: int) -> str:
    return f"process/{rank}"


def _ended(store: dist.Store, ranks: list[int]) -> Peer | None:
    """One of these ranks whose process has ended; of those on other machines nothing is known."""
    for key in map(_process, ranks):
        if store.check([key]):
            peer = Peer(**json.loads(store.get(key)))
            if peer.machine == this_machine() and not peer.is_alive():
                return peer
    return None
