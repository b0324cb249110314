"""The Hub is asked once per machine: one process fetches a model's files, the others wait and take what it got.

Everything that transformers' ``from_pretrained`` wants of the Hub goes through three functions: which commit a revision
is, whether a repository has a file, and the files themselves. Inside :func:`cached_files_once` a call of one of these,
which all ranks make with the same arguments, is made by one process of each machine, with huggingface_hub's own
progress bar, retries and resumed downloads. What it returned or raised goes to the others through the process group's
store: no collective is needed, so a call that only some ranks make does not wait. The others send nothing over the
network: an unreachable Hub is one process's error, and then every rank's.

All machines use the commit that the first one of them got for a revision, so that a repository that changes while a
job starts does not give them different weights. Versions of transformers that do not ask for a revision's commit by
itself cannot be told so: there each machine takes the commit that it gets.
"""

from __future__ import annotations

import hashlib
import inspect
import json
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from functools import wraps
from typing import TYPE_CHECKING, Any

import torch.distributed as dist
from huggingface_hub import is_offline_mode

from lightning_autotp.private.distributed_private import default_store
from lightning_autotp.private.transformers_private import asks_hub_by_own_functions, with_hub_functions
from lightning_autotp.progress import note
from lightning_autotp.ranks.agreement import PeerError
from lightning_autotp.ranks.peers import Peer

if TYPE_CHECKING:
    from huggingface_hub import ResolvedRevision  # older versions have none

LOOK = 0.05
"""Seconds between two looks for what another process has fetched."""
PRECEDENCE = 5.0
"""Seconds that the other processes of a machine leave a call to its first one, whose output a user sees."""


class FetchError(OSError):
    """Files could not be fetched from the Hub; the message has why, and what to do. The same on every rank."""


@contextmanager
def cached_files_once() -> Iterator[None]:
    """Within it, what transformers fetches from the Hub is fetched by one process of each machine.

    Not collective: ranks that make the same calls share them, whenever they make them. With a single process, nothing
    changes, nor for local directories, ``local_files_only`` and ``HF_HUB_OFFLINE``, where nothing is fetched. All
    processes of a machine must see the same cache directory. Nestable; transformers is as before afterwards.

    Raises:
        FileNotFoundError: from ``from_pretrained`` with a path where there is nothing.
        FetchError: from ``from_pretrained``, on every rank of the machine whose process could not fetch.
        PeerError: if the process that fetches dies.
    """
    if not asks_hub_by_own_functions():
        yield
    elif not dist.is_initialized() or dist.get_world_size() == 1:
        with with_hub_functions(lambda fetch: _checked(_said(fetch)), _checked, _checked):
            yield
    else:
        calls = _Calls()
        with with_hub_functions(calls.files, calls.has_file, calls.commit):
            yield


def refuse_missing(model: str) -> None:
    """Refuse the path of a directory that does not exist: it is no id, so the Hub need not be asked for it.

    Raises:
        FileNotFoundError: if it is one.
    """
    is_path = model.startswith((".", "/", "~")) or model.endswith("/") or model.count("/") > 1
    if is_path and "://" not in model and not os.path.exists(model):
        raise FileNotFoundError(
            f"{model} does not exist: as seen from {os.getcwd()} there is no such file or directory, and an id of the"
            " Hub is NAME or OWNER/NAME. Correct the path, or make it absolute"
        )


class _Calls:
    """Calls that the processes of one machine make once. What it knows of other processes is in the store."""

    def __init__(self) -> None:
        self._own = Peer.this_process(dist.get_rank())
        self._job = dist.PrefixStore("autotp/hub", default_store())
        self._machine = dist.PrefixStore(self._own.machine, self._job)
        local_rank = os.environ.get("LOCAL_RANK", os.environ.get("SLURM_LOCALID", "0"))
        self._patience = 0.0 if local_rank == "0" else PRECEDENCE

    def files(self, fetch: Callable[..., list[str] | None]) -> Callable[..., list[str] | None]:
        """What stands for the function that fetches files into the cache: it does so once per machine."""
        return self._shared(_said(fetch), "fetching {filenames} of {path_or_repo_id}")

    def has_file(self, ask: Callable[..., bool]) -> Callable[..., bool]:
        """What stands for the function that asks whether a repository has a file."""
        return self._shared(ask, "asking whether {path_or_repo} has {filename}")

    def _shared(self, function: Callable[..., Any], doing: str) -> Callable[..., Any]:
        """A function of a repository, its first argument, called once per machine; ``doing`` has its arguments."""

        def once(*args: Any, **kwargs: Any) -> Any:
            given = _named(function, args, kwargs)
            if _is_local(str(next(iter(given.values()))), given):
                return function(*args, **kwargs)
            texts = {name: ", ".join(value) if isinstance(value, list) else value for name, value in given.items()}
            return self._once(doing.format(**texts), function, args, kwargs)[0]

        return once

    def commit(self, ask: Callable[..., ResolvedRevision]) -> Callable[..., ResolvedRevision]:
        """What stands for the method that asks which commit a revision is: the same one on every machine."""
        from huggingface_hub import ResolvedRevision

        def once(*args: Any, **kwargs: Any) -> ResolvedRevision:
            given = _named(ask, args, kwargs)
            repository, kind, revision = given["repo_id"], given.get("repo_type"), given.get("revision")
            if _is_local(repository, given) or isinstance(revision, ResolvedRevision):
                return ask(*args, **kwargs)

            def resolved(*args: Any, **kwargs: Any) -> str:
                return ask(*args, **kwargs).resolved

            found, call = self._once(f"asking for revision {revision} of {repository}", resolved, args, kwargs)
            agreed = self._job.compare_set(f"{call}/commit", "", found).decode()
            return ResolvedRevision(agreed, revision, repository, kind or "model")

        return once

    def _once(self, doing: str, function: Callable[..., Any], args: Any, kwargs: Any) -> tuple[Any, str]:
        """What the call gives on this machine, and the call's name in the store."""
        call = f"{doing} {args!r} {sorted(kwargs.items(), key=lambda item: item[0])!r}"
        call = hashlib.blake2b(call.encode(), digest_size=16).hexdigest()  # a token is among the arguments
        call = f"{call}/{self._job.add(f'{call}/{self._own.rank}', 1)}"  # how often this rank has made it
        result = self._fetched(call, doing, function, args, kwargs)
        if "error" in result:
            raise FetchError(result["error"])
        return result["value"], call

    def _fetched(self, call: str, doing: str, function: Callable[..., Any], args: Any, kwargs: Any) -> dict[str, Any]:
        store, began = self._machine, time.monotonic()
        while not store.check([f"{call}/by"]) and time.monotonic() - began < self._patience:
            time.sleep(LOOK)
        fetching = Peer(**json.loads(store.compare_set(f"{call}/by", "", json.dumps(asdict(self._own)))))
        if fetching == self._own:
            return self._fetch(call, doing, function, args, kwargs)
        while not store.check([f"{call}/result"]):
            # Looked at again: it may have answered and ended in between.
            if not fetching.is_alive() and not store.check([f"{call}/result"]):
                raise PeerError(
                    f"{fetching} died while {doing} for all processes of this machine. Start again: files that"
                    " arrived whole are kept"
                )
            time.sleep(LOOK)
        answer: dict[str, Any] = json.loads(store.get(f"{call}/result"))
        return answer

    def _fetch(self, call: str, doing: str, function: Callable[..., Any], args: Any, kwargs: Any) -> dict[str, Any]:
        result = {"error": f"{self._own} was interrupted while {doing} for all processes of this machine"}
        try:
            result = {"value": function(*args, **kwargs)}
        except OSError as error:
            result = {"error": str(error)}  # transformers' own, which say what to do
            raise FetchError(result["error"]) from error
        except Exception as error:
            result = {
                "error": f"{doing} failed: {type(error).__name__}: {error}. Files that arrived whole are kept: start"
                " again, and only the others are fetched. With HF_HUB_OFFLINE=1 nothing but the cache is used; behind a"
                " proxy or mirror, set HTTPS_PROXY or HF_ENDPOINT"
            }
            raise FetchError(result["error"]) from error
        finally:
            self._machine.set(f"{call}/result", json.dumps(result))
        return result


def _named(function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    return inspect.signature(function).bind(*args, **kwargs).arguments


def _said(fetch: Callable[..., Any]) -> Callable[..., Any]:
    """The function that fetches files, which says in logs when these are weights: a terminal has the Hub's own bars."""

    @wraps(fetch)
    def said(*args: Any, **kwargs: Any) -> Any:
        repository, names, *_ = _named(fetch, args, kwargs).values()
        weights = [name for name in names if name.endswith((".safetensors", ".bin"))]
        if weights and not os.path.isdir(str(repository)):
            note(f"downloading {len(weights)} file(s) of {repository}'s weights, but for what is in the cache")
        return fetch(*args, **kwargs)

    return said


def _checked(ask: Callable[..., Any]) -> Callable[..., Any]:
    """One of the functions, which does not ask for what is no id."""

    @wraps(ask)  # where contexts are nested, it is one itself
    def checked(*args: Any, **kwargs: Any) -> Any:
        repository, *_ = _named(ask, args, kwargs).values()
        refuse_missing(str(repository))
        return ask(*args, **kwargs)

    return checked


def _is_local(repository: str, given: dict[str, Any]) -> bool:
    refuse_missing(repository)
    return os.path.isdir(repository) or bool(given.get("local_files_only")) or is_offline_mode()
