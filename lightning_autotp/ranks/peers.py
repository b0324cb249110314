"""No rank waits for one that is gone: every process watches its peers, and ends with a message when one fails or dies.

A rank that raises, or is killed, leaves the others inside a collective, where nothing wakes them before the process
group's timeout (with NCCL, not even then at once). So each process has a thread that looks, every second,

* whether a peer has reported an error (in the process group's store),
* whether the peers on the same machine are alive (by their process ids), and have not been stopped for too long,
* and, on the first rank of each machine, whether the next machine has been heard of: each one by one other, so that the
  store is asked as often as there are machines.

When something is found, all are told through the store. Each prints one line that says so, after the rank that failed
has printed its error, and gets a little time to come out of its collective by itself, as it does with gloo; then it is
ended. So are peers on the same machine that are stopped, which cannot end on their own.

Containers that do not see each other's processes count as machines of their own, whatever their host names are.
"""

from __future__ import annotations

import os
import socket
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Any, ClassVar, TypeVar

import psutil
import torch.distributed as dist

from lightning_autotp.private.distributed_private import is_lost_connection
from lightning_autotp.ranks.agreement import MissingRank, PeerError, Raised

T = TypeVar("T")

_HAS_AGENT = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
"""Whether torchrun has the store, and not rank 0."""

INTERVAL = 1.0
"""Seconds between two looks."""
GRACE = 5.0
"""Seconds that a process has to end by itself after a peer has failed."""
ANSWER = 3.0
"""Seconds that the store has to answer a rank that ends."""
PRINTING = 2.0
"""Seconds that the others leave a rank that has failed to print its error before they print theirs."""
SILENCE = 60.0
"""Seconds after which a machine that is not heard of counts as gone."""
GO_ON = "To go on, start again from the last checkpoint: trainer.fit(..., ckpt_path=...), or fabric.load(...)"


def process_status(pid: int, started: float | None = None) -> str:
    """What psutil says of a process on this machine; one that has ended counts as a zombie.

    Args:
        pid: its id.
        started: when it started, if another one may have got its id meanwhile.
    """
    try:
        process = psutil.Process(pid)
        return psutil.STATUS_ZOMBIE if started not in (None, process.create_time()) else process.status()
    except psutil.NoSuchProcess:
        return psutil.STATUS_ZOMBIE


@cache
def this_machine() -> str:
    """What is the same for processes that know each other by their ids, and for no others.

    That is the start of the system, and the ids' namespace. Host names may be the same for several containers, or
    copies of a virtual machine.
    """
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot}/{os.stat('/proc/self/ns/pid').st_ino}"
    except OSError:  # another system than Linux
        return socket.gethostname()


@dataclass(frozen=True)
class Peer:
    """One process of the job.

    Attributes:
        rank: its global rank.
        machine: its :func:`this_machine`.
        host: the machine's name, for people.
        pid: its process id.
        started: when it started.
    """

    rank: int
    machine: str
    host: str
    pid: int
    started: float

    @classmethod
    def this_process(cls, rank: int) -> Peer:
        """The caller."""
        return cls(rank, this_machine(), socket.gethostname(), os.getpid(), psutil.Process().create_time())

    def is_alive(self) -> bool:
        """Whether it runs, or is stopped; only on its own machine."""
        return self._status() != psutil.STATUS_ZOMBIE

    def is_stopped(self) -> bool:
        """Whether a signal (SIGSTOP, or Ctrl-Z in a terminal) has stopped it; only on its own machine."""
        return self._status() == psutil.STATUS_STOPPED

    def kill(self) -> None:
        """End it; only on its own machine."""
        with suppress(psutil.NoSuchProcess):
            if self.is_alive():
                psutil.Process(self.pid).kill()

    def _status(self) -> str:
        return process_status(self.pid, self.started)

    def __str__(self) -> str:
        return f"rank {self.rank} (process {self.pid} on {self.host})"


class PeerWatch:
    """Watches over the peers of this process while it is in use.

    Args:
        peers: every process of the job, in order of rank.
        rank: this one's.
        store: what all processes share; this object makes a connection of its own.
        run: a name that no earlier watch with this store has had.
        timeout: of collectives, in seconds: a peer that has been stopped for so long counts as gone.
        before_end: called before this process is ended, to end those that it started.

    Attributes:
        latest: the one that this process made last, also after its end: it knows why the process ends.
    """

    latest: ClassVar[PeerWatch | None] = None

    def __init__(
        self,
        peers: Sequence[Peer],
        rank: int,
        store: dist.Store,
        run: str,
        timeout: float,
        before_end: Callable[[], None],
    ) -> None:
        self._peers, self._own = peers, peers[rank]
        self._timeout, self._before_end = timeout, before_end
        self._stopped = Counter[int]()  # looks at which a neighbour was stopped, by rank
        self._store = dist.PrefixStore(f"autotp/{run}", store.clone())  # type: ignore[attr-defined]
        self._neighbours = [peer for peer in peers if peer.machine == self._own.machine and peer.rank != rank]
        firsts: dict[str, Peer] = {}
        for peer in peers:
            firsts.setdefault(peer.machine, peer)
        ring = [*firsts.values()]
        own = list(firsts).index(self._own.machine)
        # From the next machine on; only for the first rank of this one.
        self._others = [*ring[own + 1 :], *ring[:own]] if ring[own] == self._own else []
        self._heard: dict[str, tuple[bytes, float]] = {}
        self._reported: str | None = None  # of this rank
        self._cause: str | None = None  # of another one
        self._is_said = self._is_printed = self._has_lost_store = False
        self._ended = threading.Event()
        self._lock = threading.Lock()
        self._thread = threading.Thread(target=self._watch, name="peers", daemon=True)
        self._thread.start()
        PeerWatch.latest = self

    def report(self, error: BaseException) -> None:
        """Tell the peers that this rank has failed, unless all have; or say which did before, if that is why."""
        if self._reported is not None or self._ended.is_set() or isinstance(error, PeerError):
            return
        if (raised := Raised.how(error)) is not None and raised.everywhere:
            return
        self._reported = f"{self._own} failed: {_in_short(error)}"
        if is_lost_connection(error) and self._own != self._peers[0]:
            time.sleep(INTERVAL)  # perhaps to rank 0, which has the store and loses its connections before it is gone
        try:
            cause = self._ask(ANSWER, self._report, self._reported, error)
        except RuntimeError:  # the store is gone; the error is on its way out anyway
            cause = self._without_store()
        if cause is not None:
            self._cause = self._cause or cause
            if not self._is_same(error):  # else it is said by that rank, or where this one ends
                self._say()

    def _report(self, text: str, error: BaseException) -> str | None:
        """Tell it, unless there is something of another rank, which is returned."""
        found = self._found()
        if found is None and _may_be_of_a_collective(error):
            # A process that is killed loses its connections before it is gone; one that is stopped lets it time out.
            time.sleep(INTERVAL)
            found = self._found(stopped_for=0.0)
        if found is not None:
            return found
        first: str = self._store.compare_set("failed", "", text).decode()  # the one that counts
        if first == text and not isinstance(error, Exception):
            self._store.set("printed", "")  # nothing is, of sys.exit
        return first if first != text else None

    def explains(self, error: Exception) -> bool:
        """Whether an error that ends this process is nothing but the failure of another rank, which is printed there.

        Then it is said here, after that rank's own error. Else the other ranks are told of this one.
        """
        self.report(error)
        if self._cause is None:
            return False
        if not (isinstance(error, PeerError | MissingRank) or is_lost_connection(error) or self._is_same(error)):
            return False
        self._say()
        return self._is_printed or not self._is_same(error)

    def note_printed(self) -> None:
        """Let the others, who wait for that, say their part: this rank's error has been printed."""
        if self._reported is not None and self._cause is None:
            with suppress(RuntimeError):  # the store is gone
                self._ask(ANSWER, self._store.set, "printed", "")

    def _is_same(self, error: BaseException) -> bool:
        """Whether the rank that failed first had an error of the same words."""
        return self._cause is not None and self._cause.endswith(f" failed: {_in_short(error)}")

    def wait_for_others(self) -> None:
        """Wait until all others have stopped watching, or something has happened to one of them.

        For the rank that has the store: when it ends, no rank can say any more that all is well.
        """
        done = [f"done/{peer.rank}" for peer in self._peers if peer != self._own]
        with suppress(RuntimeError):  # the store is gone, and with it the reason to wait
            while self._cause is None and not self._store.check(done):
                time.sleep(ANSWER / 30)

    def close(self) -> None:
        """Stop watching, and being watched."""
        self._ended.set()
        # It may be waiting for the store. A thread that is in there when the interpreter ends aborts the process, so
        # where nothing has failed, a slow machine is waited for.
        patience = self._timeout if self._cause is None else ANSWER
        self._thread.join(patience)
        if self._cause is not None:
            self._kill_stopped()
        if not self._thread.is_alive():
            self._before_end = lambda: None  # keeps nothing alive
            with suppress(RuntimeError):  # without the store no rank can be told
                self._ask(patience, self._store.set, f"done/{self._own.rank}", "")

    def _watch(self) -> None:
        beat = 0
        while not self._ended.wait(INTERVAL):
            beat += 1
            try:
                found = self._ask(self._timeout, self._look, beat)
            except RuntimeError:
                found = self._without_store()
            if found is not None:
                self._cause = self._cause or found
                self._say()
                if not self._ended.wait(GRACE) and self._reported is None:
                    self._kill_stopped()
                    self._before_end()
                    sys.stderr.flush()
                    sys.stdout.flush()
                    # The main thread is inside a collective that will not return.
                    os._exit(1)
                return

    def _look(self, beat: int) -> str | None:
        if self._others:
            self._store.set(f"beat/{self._own.machine}", str(beat))
        return self._found()

    def _ask(self, seconds: float, ask: Callable[..., T], *args: Any) -> T:
        """As :func:`_within`, but not where the store is known to be gone: torch prints a page of C++ frames then."""
        keeper = self._peers[0]
        is_gone = not _HAS_AGENT and keeper in self._neighbours and not keeper.is_alive()
        if self._has_lost_store or is_gone:
            raise RuntimeError("the store is gone")
        return _within(seconds, ask, *args)

    def _without_store(self) -> str:
        """What has happened to the rank that has the store; no rank can be told."""
        self._has_lost_store = True
        keeper = self._peers[0]
        if keeper in self._neighbours and keeper.is_stopped():
            return f"{_stopped(keeper)}. {GO_ON}"
        return f"{keeper}, which keeps the job together, is gone or does not answer. {GO_ON}"

    def _kill_stopped(self) -> None:
        for peer in self._neighbours:
            if peer.is_stopped():
                peer.kill()

    def _found(self, stopped_for: float | None = None) -> str | None:
        """What has happened to a peer first, if anything; every rank is told.

        Args:
            stopped_for: seconds that a peer may be stopped, instead of the timeout of collectives.
        """
        if self._store.check(["failed"]):
            text: str = self._store.get("failed").decode()
            return text if text != self._reported else None
        for peer in self._neighbours:
            # One that has failed says so before it ends, one that has finished has stopped watching.
            if not peer.is_alive() and not self._store.check([f"done/{peer.rank}"]):
                return self._tell(f"{peer} has died")
            # In looks, not by the clock: Ctrl-Z stops all of them, this one too.
            self._stopped[peer.rank] = self._stopped[peer.rank] + 1 if peer.is_stopped() else 0
            allowed = self._timeout if stopped_for is None else stopped_for
            if self._stopped[peer.rank] * INTERVAL > allowed:
                return self._tell(_stopped(peer))
        if self._others:
            following = self._others[0]
            if not self._store.check([f"done/{following.rank}"]):
                return self._silence_of(following)
            self._others = [other for other in self._others if other != following]  # whose part is taken over
        return None

    def _silence_of(self, first: Peer) -> str | None:
        """What to say of the first rank of another machine if it has not been heard of for long."""
        key, now = f"beat/{first.machine}", time.monotonic()
        last, since = self._heard.setdefault(first.machine, (b"", now))
        beat = self._store.get(key) if self._store.check([key]) else b""
        if beat != last:
            self._heard[first.machine] = beat, now
        elif now - since > SILENCE:
            return self._tell(f"{first} and its machine have not been heard of for {SILENCE:.0f} s")
        return None

    def _tell(self, what: str) -> str | None:
        text = f"{what}. {GO_ON}"
        first: str = self._store.compare_set("failed", "", text).decode()
        if first == text:
            self._store.set("printed", "")  # there is nothing that it could print
        return first if first != self._reported else None

    def _say(self) -> None:
        """Print, once, why this rank ends: after the rank that failed has printed its error, if it does so soon."""
        with self._lock:
            if not self._is_said:
                self._is_said = True
                with suppress(RuntimeError):  # the store is gone
                    self._is_printed = self._ask(2 * PRINTING, self._wait_until_printed)
                why = f"\nlightning_autotp: rank {self._own.rank} ends, because {self._cause}"
                print(why, file=sys.stderr, flush=True)

    def _wait_until_printed(self) -> bool:
        """Whether the rank that failed has printed its error, or has none to print."""
        for _ in range(20):
            is_printed = self._store.check(["printed"])
            time.sleep(PRINTING / 20)  # also then: torch puts the rank before the lines, and prints after that was set
            if is_printed:
                return True
        return False


def _may_be_of_a_collective(error: BaseException) -> bool:
    """Whether a collective may have failed with it, because of another process: its words are the backend's own."""
    is_of_this_package = type(error).__module__.partition(".")[0] == __name__.partition(".")[0]
    return isinstance(error, MissingRank) or (isinstance(error, RuntimeError) and not is_of_this_package)


def _in_short(error: BaseException) -> str:
    """Its type, and the beginning of what it says."""
    return f"{type(error).__name__}: {(str(error).strip().splitlines() or [''])[0][:500]}"


def _stopped(peer: Peer) -> str:
    return f"{peer} is stopped (by SIGSTOP, or Ctrl-Z in a terminal) and no longer takes part"


def _within(seconds: float, ask: Callable[..., T], *args: Any) -> T:
    """What ``ask(*args)`` answers. Of a store whose process is stopped, it waits for ever.

    Raises:
        RuntimeError: if it does not answer in time, or its own error.
    """
    answers: SimpleQueue[tuple[T | None, RuntimeError | None]] = SimpleQueue()

    def run() -> None:
        try:
            answers.put((ask(*args), None))
        except RuntimeError as error:
            answers.put((None, error))

    threading.Thread(target=run, name=ask.__name__, daemon=True).start()
    try:
        answer, error = answers.get(timeout=seconds)
    except Empty:
        raise RuntimeError(f"no answer within {seconds:.0f} s") from None
    if error is not None:
        raise error
    return answer  # type: ignore[return-value]
