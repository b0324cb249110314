"""Checkpoints on disk: one file, or a directory with a file per rank; at once or in the background.

A *file* is ``torch.save`` of everything, with whole tensors. A *directory* has ``meta.pt`` (everything but the tensors)
beside the files of :mod:`~lightning_autotp.checkpoints.stored`; tensors are named as in the file, joined by dots, and
tied ones are there once.

A ``torch.save`` archive has checksums of what is in it. ``meta.pt`` is one, and in it are the checksums of every box of
every tensor and of torch's table of contents: so it says of every byte in the directory what it was when it was saved.

Either is written beside its place and then renamed into it, so a process killed at any moment leaves the checkpoint
that was there before: in its place, or for the instant between two renames beside it, where
:func:`open_checkpoint` finds it. Meanwhile a lock beside it, which ends with the
process at the latest, keeps other runs out.
"""

from __future__ import annotations

import errno
import fcntl
import os
import shutil
import warnings
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from lightning_autotp.building.checkpoint_reading import (
    CheckpointError,
    DamagedFileError,
    MissingFileError,
    in_short,
    inside,
    load_archive,
)
from lightning_autotp.checkpoints.stored import HeldTensor, StoredTensor, explained, stored_tensors, write_tensors
from lightning_autotp.private.torch_private import writing
from lightning_autotp.ranks.agreement import raise_together

META = "meta.pt"
"""What of a checkpoint directory is not tensors (the name is Lightning's)."""

_STORED = "stored"
"""Where in it is what it says of the tensors."""


def save_file(checkpoint: dict[str, Any], path: Path) -> None:
    """Write one file. Not collective: one rank calls it.

    Raises:
        FileExistsError: if another run is saving there.
        OSError: if it could not be written.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = _beside(path, "part")
    with alone(path, _beside(path, "lock")):
        _remove(partial)
        try:
            _write(checkpoint, partial)
            _publish(partial, path)
        finally:
            _remove(partial)


def save_directory(checkpoint: dict[str, Any], path: Path, process_group: dist.ProcessGroup) -> None:
    """Write a directory, each rank its own tensors. Collective over ``process_group``.

    Args:
        checkpoint: as Lightning makes it; ``"state_dict"`` and ``"optimizer_states"`` have held tensors, or whatever
            else at the top is a dict, or an optimizer's state dict.
        path: the directory, on a file system that all ranks share.
        process_group: all ranks that hold something; its first rank writes what is not tensors.

    Raises:
        OSError: on the rank that could not write, as for :func:`save_file`.
        PeerError: on the others.
    """
    tensors, rest, places = _split(checkpoint)
    partial = _beside(path, "part")
    is_first = dist.get_rank(process_group) == 0
    with ExitStack() as stack:
        with raise_together(process_group, f"making the checkpoint directory {path}"):
            if is_first:
                path.parent.mkdir(parents=True, exist_ok=True)
                stack.enter_context(alone(path, _beside(path, "lock")))
                _remove(partial)
                stack.callback(_remove, partial)
                partial.mkdir()
        described = write_tensors(tensors, partial, process_group)
        with raise_together(process_group, f"writing the checkpoint {path}"):
            if is_first:
                _write({**rest, _STORED: {"places": places, "tensors": described}}, partial / META)
                _publish(partial, path)
                stack.close()  # before any rank goes on


def open_checkpoint(path: Path, weights_only: bool | None = None, *, check: bool = True) -> dict[str, Any]:
    """A Trainer's checkpoint of either kind, as :func:`read_checkpoint` gives it.

    Raises:
        CheckpointError: as there; or if a file is none of a Trainer's.
    """
    checkpoint = read_checkpoint(path, weights_only, check=check)
    refuse_foreign(path, checkpoint)
    return checkpoint


def refuse_foreign(path: Path, checkpoint: Mapping[str, Any]) -> None:
    """Refuse what is no Trainer's checkpoint.

    Raises:
        DamagedFileError: if it has no state dict.
    """
    if "state_dict" not in checkpoint:
        raise DamagedFileError(
            f"{path} is not a Lightning checkpoint: it has no 'state_dict'. A bare state dict is loaded with"
            " load_full_state_dict(model, state)"
        )


def read_checkpoint(path: Path, weights_only: bool | None = None, *, check: bool = True) -> dict[str, Any]:
    """A checkpoint of either kind; tensors are mapped, or stored ones of which nothing is read yet. Not collective.

    Args:
        path: the file or directory.
        weights_only: as for ``torch.load``: only ``False`` runs code that the checkpoint names.
        check: whether to compare the checksums in a file with its contents, for which all of it is read. (Those of a
            directory's tensors are compared when one is read, all others here.)

    Raises:
        CheckpointError: if it is not there, was never finished, is damaged, is something else, or holds what
            ``weights_only`` does not allow.
    """
    found = path if path.exists() else _beside(path, "previous")
    if not found.exists():
        raise MissingFileError(f"the checkpoint {path} does not exist")
    if found.is_dir():
        return _open_directory(found, weights_only)
    checkpoint = _read(found, weights_only, check)
    if not isinstance(checkpoint, dict):
        raise DamagedFileError(f"{found} is not a Lightning checkpoint: it contains a {type(checkpoint).__name__}")
    return checkpoint


def _open_directory(directory: Path, weights_only: bool | None) -> dict[str, Any]:
    if not (directory / META).is_file():
        raise MissingFileError(
            f"{directory} is not a checkpoint, or an incomplete one: it has no {META}. Resume from a directory that"
            " Trainer.save_checkpoint or ModelCheckpoint made, copied whole"
        )
    rest = _read(Path(inside(directory, META)), weights_only, True)
    if not isinstance(rest, dict) or _STORED not in rest:
        raise DamagedFileError(
            f"the checkpoint directory {directory} was written by another strategy: consolidate it into one file with"
            " that one's tools first (python -m lightning.pytorch.utilities.consolidate_checkpoint)"
        )
    with explained(directory, META):
        stored = rest.pop(_STORED)
        return _join(rest, stored["places"], stored_tensors(directory, stored["tensors"]))


def consolidate(path: Path, target: Path, weights_only: bool = True) -> None:
    """Make one file of a checkpoint directory: what ``load_from_checkpoint`` takes. Not collective.

    All of the checkpoint is in memory meanwhile.

    Args:
        path: the directory.
        target: the file.
        weights_only: as for :func:`open_checkpoint`.

    Raises:
        CheckpointError: if it cannot be read.
    """
    checkpoint = read_checkpoint(path, weights_only)
    read_stored(checkpoint)
    save_file(checkpoint, target)


def read_stored(checkpoint: dict[str, Any]) -> None:
    """Put whole tensors in the place of stored ones in a checkpoint. Not collective.

    Raises:
        CheckpointError: if one cannot be read.
    """
    whole: dict[int, Any] = {}

    def read(value: Any) -> Any:
        if not isinstance(value, StoredTensor):
            return value
        if id(value) not in whole:
            whole[id(value)] = value.read()
        return whole[id(value)]

    for table in _tables(checkpoint):
        table |= {key: read(value) for key, value in table.items()}


def _tables(checkpoint: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """What tensors are in, by their keys: state dicts, and what optimizers have of each parameter."""
    for values in checkpoint.values():
        for state in values if isinstance(values, list) else [values]:
            if is_optimizer_state(state):
                yield from state["state"].values()
            elif state is values and isinstance(state, dict):
                yield state


def check_checkpoint(path: Path, weights_only: bool = True) -> int:
    """Read all of a checkpoint of either kind and compare all checksums in it. Not collective.

    Args:
        path: the file or directory.
        weights_only: as for :func:`open_checkpoint`.

    Returns:
        How many tensors of a directory were compared, 0 for a file, of which all is.

    Raises:
        CheckpointError: if it is not what was saved.
    """
    values = (value for table in _tables(read_checkpoint(path, weights_only)) for value in table.values())
    stored = {id(value): value for value in values if isinstance(value, StoredTensor)}
    for value in stored.values():
        value.check()
    return len(stored)


class Background:
    """Does jobs one after the other in one thread; a job's error is raised at the next :meth:`wait`."""

    def __init__(self) -> None:
        self._thread: ThreadPoolExecutor | None = None
        self._jobs: list[Future[None]] = []

    def submit(self, job: Callable[[], None]) -> None:
        """Do a job after those before it; not if one of them failed."""
        before = list(self._jobs)

        def run() -> None:
            if all(done.exception() is None for done in before):
                job()

        self._thread = self._thread or ThreadPoolExecutor(1, thread_name_prefix="checkpoint")
        self._jobs.append(self._thread.submit(run))

    @property
    def is_busy(self) -> bool:
        """Whether a job is not done."""
        return any(not job.done() for job in self._jobs)

    def wait(self) -> None:
        """Wait for all jobs.

        Raises:
            Exception: the first error of a job.
        """
        jobs, self._jobs = self._jobs, []
        errors = [error for job in jobs if (error := job.exception()) is not None]
        if errors:
            raise errors[0]

    def close(self) -> None:
        """Wait for all jobs and end the thread."""
        try:
            self.wait()
        finally:
            if self._thread is not None:
                self._thread.shutdown()
                self._thread = None


def _split(checkpoint: dict[str, Any]) -> tuple[dict[str, HeldTensor], dict[str, Any], dict[str, Any]]:
    """The held tensors of a checkpoint's states by their names on disk, the rest, and where in it they belong."""
    tensors: dict[str, HeldTensor] = {}
    stored: dict[int, str] = {}

    def take(values: dict[str, Any], prefix: str) -> tuple[dict[str, Any], dict[str, str]]:
        """The values that are not tensors, and the names on disk of those that are."""
        others, names = {}, {}
        for key, value in values.items():
            if isinstance(value, HeldTensor):
                names[key] = stored.setdefault(id(value), f"{prefix}.{key}")
                tensors[names[key]] = value
            else:
                others[key] = value
        return others, names

    def take_optimizer(state: dict[str, Any], prefix: str) -> tuple[dict[str, Any], dict[int, dict[str, str]]]:
        names = {
            key: name
            for group in state["param_groups"]
            for key, name in zip(group["params"], group["param_names"], strict=True)
        }
        taken = {key: take(values, f"{prefix}.{names[key]}") for key, values in state["state"].items()}
        others = {**state, "state": {key: rest for key, (rest, _) in taken.items()}}
        return others, {key: named for key, (_, named) in taken.items()}

    rest = dict(checkpoint)
    where: dict[str, Any] = {}
    for name, values in checkpoint.items():
        if is_optimizer_state(values) and all("param_names" in group for group in values["param_groups"]):
            rest[name], where[name] = take_optimizer(values, name)
        elif isinstance(values, dict) and any(isinstance(value, HeldTensor) for value in values.values()):
            rest[name], where[name] = take(values, name)
    if "optimizer_states" in rest:
        rest["optimizer_states"], where["optimizer_states"] = [], []
        for number, state in enumerate(checkpoint["optimizer_states"]):
            others, named = take_optimizer(state, f"optimizer_states.{number}")
            rest["optimizer_states"].append(others)
            where["optimizer_states"].append(named)
    return tensors, rest, where


def _join(rest: dict[str, Any], where: dict[str, Any], tensors: dict[str, StoredTensor]) -> dict[str, Any]:
    """The inverse of :func:`_split`: a checkpoint with stored tensors."""

    def put(values: Any, places: Any) -> None:
        if isinstance(places, list):
            for state, of_state in zip(values, places, strict=True):
                put(state, of_state)
        elif is_optimizer_state(values):
            for number, names in places.items():
                put(values["state"][number], names)
        else:
            values |= {key: tensors[stored] for key, stored in places.items()}

    for name, places in where.items():
        put(rest[name], places)
    return rest


def is_optimizer_state(value: Any) -> bool:
    """Whether a value is an optimizer's state dict."""
    return isinstance(value, dict) and value.keys() >= {"state", "param_groups"}


def _beside(path: Path, what: str) -> Path:
    return path.with_name(f".{path.name}.{what}")


@contextmanager
def alone(path: Path, lock: Path) -> Iterator[None]:
    """Within it no other process writes to a place; one that is killed keeps no other out.

    Args:
        path: the place, for the message.
        lock: the file that is there meanwhile.

    Raises:
        FileExistsError: if another process does.
    """
    while True:
        held = os.open(lock, os.O_RDWR | os.O_CREAT, 0o644)
        try:
            _lock(held, path)
            if _is_there(held, lock):
                break
        except BaseException:
            os.close(held)
            raise
        os.close(held)  # whoever had it removed it meanwhile
    try:
        yield
    finally:
        lock.unlink(missing_ok=True)
        with suppress(OSError):  # explicitly, for a process that was forked meanwhile has it open
            fcntl.flock(held, fcntl.LOCK_UN)
        os.close(held)


def _lock(held: int, path: Path) -> None:
    try:
        fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise FileExistsError(
            f"another run is saving into {path} at this moment: what is there and what that run saves stay as they"
            " are, and nothing of this run was written. Give each run its own directory: for checkpoints by"
            " ModelCheckpoint(dirpath=...) or Trainer(default_root_dir=...)"
        ) from None
    except OSError as error:
        if error.errno not in (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP):
            raise
        warnings.warn(
            f"the file system of {path} has no locks: it will not be noticed if another run saves there at the same"
            " time. Give each run its own directory",
            stacklevel=2,
        )


def _is_there(held: int, lock: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(held), os.stat(lock))
    except FileNotFoundError:
        return False


def _write(value: Any, path: Path) -> None:
    with writing(path), open(path, "wb") as file:
        torch.save(value, file)
        file.flush()
        os.fsync(file.fileno())


def _publish(partial: Path, path: Path) -> None:
    """Put what is finished in its place."""
    if partial.is_file() and not path.is_dir():
        os.replace(partial, path)
        return
    previous = _beside(path, "previous")
    if path.exists():
        _remove(previous)
        os.rename(path, previous)
    os.rename(partial, path)
    _remove(previous)


def _remove(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def _read(path: Path, weights_only: bool | None, check: bool) -> Any:
    try:
        return load_archive(path, weights_only, check)
    except CheckpointError:
        raise
    except Exception as error:  # what a damaged file raises is anything
        raise DamagedFileError(
            f"the checkpoint file {path} ({path.stat().st_size} bytes) cannot be read, it may be damaged or be"
            f" something else: copy it again, or resume from an earlier one. ({in_short(error)})"
        ) from error
