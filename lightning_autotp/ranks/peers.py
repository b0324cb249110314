"""No rank waits for one that is gone: every process watches its peers, and ends with a message when one fails or dies.

A rank that raises, or is killed, leaves the others inside a collective, where nothing wakes them before the process
group's timeout (with NCCL, not even then at once). So each process has a thread that looks, every second,

* whether a peer has reported an error (in the process group's store),
* whether the peers on the same host are alive (by their process ids),
* and, on the first rank of each host, whether the other hosts have been heard of.

When something is found, it is printed with the rank's number, and the process gets a little time to come out of its
collective by itself, as it does with gloo; then it is ended.
"""

from __future__ import annotations

import os
import socket
import sys
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass

import psutil
import torch.distributed as dist

from lightning_autotp.ranks.agreement import PeerError

INTERVAL = 1.0
"""Seconds between two looks."""
GRACE = 10.0
"""Seconds that a process has to end by itself after a peer has failed."""
SILENCE = 60.0
"""Seconds after which a host that is not heard of counts as gone."""


@dataclass(frozen=True)
class Peer:
    """One process of the job."""

    rank: int
    host: str
    pid: int
    started: float

    @classmethod
    def this_process(cls, rank: int) -> Peer:
        """The caller."""
        return cls(rank, socket.gethostname(), os.getpid(), psutil.Process().create_time())

    def is_alive(self) -> bool:
        """Whether it runs; only on its own host."""
        try:
            process = psutil.Process(self.pid)
            return process.create_time() == self.started and process.status() != psutil.STATUS_ZOMBIE
        except psutil.NoSuchProcess:
            return False

    def __str__(self) -> str:
        return f"rank {self.rank} (process {self.pid} on {self.host})"


class PeerWatch:
    """Watches over the peers of this process while it is in use.

    Args:
        peers: every process of the job, in order of rank.
        rank: this one's.
        store: what all processes share; this object makes a connection of its own.
        run: a name that no earlier watch with this store has had.
    """

    def __init__(self, peers: Sequence[Peer], rank: int, store: dist.Store, run: str) -> None:
        self._peers, self._own = peers, peers[rank]
        self._store = dist.PrefixStore(f"autotp/{run}", store.clone())  # type: ignore[attr-defined]
        self._neighbours = [peer for peer in peers if peer.host == self._own.host and peer.rank != rank]
        firsts: dict[str, Peer] = {}
        for peer in peers:
            firsts.setdefault(peer.host, peer)
        self._is_first = firsts[self._own.host] == self._own
        self._others = [first for first in firsts.values() if first.host != self._own.host]
        self._heard = {first.host: (b"", time.monotonic()) for first in self._others}
        self._reported: str | None = None
        self._said: str | None = None
        self._ended = threading.Event()
        self._lock = threading.Lock()
        self._thread = threading.Thread(target=self._watch, name="peers", daemon=True)
        self._thread.start()

    def report(self, error: BaseException) -> None:
        """Tell the peers that this rank has failed; or say which of them did before, if that is why."""
        if self._reported is not None or self._ended.is_set() or isinstance(error, PeerError):
            return
        text = (str(error).strip().splitlines() or [""])[0][:500]
        self._reported = f"{self._own} failed: {type(error).__name__}: {text}"
        try:
            found = self._found()
            if found is None and isinstance(error, RuntimeError):
                # Perhaps a collective's: a process that is killed loses its connections before it is gone.
                time.sleep(INTERVAL)
                found = self._found()
            if found is None:
                self._store.compare_set("failed", "", self._reported)  # the first failure is the one that counts
        except RuntimeError:  # the store is gone; the error is on its way out anyway
            self._say(f"{self._peers[0]}, which keeps the job together, is gone")

    def close(self) -> None:
        """Stop watching, and being watched."""
        self._ended.set()
        self._thread.join()
        with suppress(RuntimeError):  # without the store there is nobody to tell
            self._store.set(f"done/{self._own.rank}", "")

    def _watch(self) -> None:
        beat = 0
        while not self._ended.wait(INTERVAL):
            beat += 1
            try:
                if self._is_first and self._others:
                    self._store.set(f"beat/{self._own.host}", str(beat))
                found = self._found()
            except RuntimeError:
                found = f"{self._peers[0]}, which keeps the job together, is gone"
            if found is not None:
                self._say(found)
                if not self._ended.wait(GRACE) and self._reported is None:
                    sys.stderr.flush()
                    sys.stdout.flush()
                    # The main thread is inside a collective that will not return.
                    os._exit(1)
                return

    def _found(self) -> str | None:
        """What has happened to a peer, if anything; every rank is told."""
        if self._store.check(["failed"]):
            text: str = self._store.get("failed").decode()
            if text == self._reported:
                return None
            self._say(text)
            return text
        for peer in self._neighbours:
            # One that has failed says so before it ends, one that has finished has stopped watching.
            if not peer.is_alive() and not self._store.check([f"done/{peer.rank}"]):
                return self._tell(f"{peer} has died")
        now = time.monotonic()
        for first in self._others if self._is_first else ():
            key = f"beat/{first.host}"
            last, since = self._heard[first.host]
            beat = self._store.get(key) if self._store.check([key]) else b""
            if beat != last:
                self._heard[first.host] = beat, now
            elif now - since > SILENCE and not self._store.check([f"done/{first.rank}"]):
                return self._tell(f"{first} and its host have not been heard of for {SILENCE:.0f} s")
        return None

    def _tell(self, text: str) -> str:
        self._store.compare_set("failed", "", text)
        self._say(text)
        return text

    def _say(self, text: str) -> None:
        with self._lock:
            if self._said is not None:
                return
            self._said = text
        print(
            f"\nlightning_autotp: {text}. Rank {self._own.rank} cannot go on without it and ends too. To go on, start"
            " again from the last checkpoint: trainer.fit(..., ckpt_path=...)",
            file=sys.stderr,
            flush=True,
        )
