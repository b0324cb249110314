"""Tensors in checkpoint files: what the headers say, and blocks of them, read without mapping more than a piece.

Every file that this package unpickles goes through :func:`load_archive`, and every name of a file that a file says
through :func:`inside`.
"""

from __future__ import annotations

import os
import pickle
import zipfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from itertools import pairwise
from math import prod
from pathlib import Path
from typing import Any, BinaryIO

import torch
from safetensors import safe_open
from torch import Tensor

from lightning_autotp.building.recorder import _trim
from lightning_autotp.building.weight_conversion import CHUNK_BYTES
from lightning_autotp.layouts.blocks import index
from lightning_autotp.layouts.names import join_names
from lightning_autotp.layouts.ownership import Run

_DTYPES = {
    "BOOL": torch.bool, "U8": torch.uint8, "I8": torch.int8, "U16": torch.uint16, "I16": torch.int16,
    "U32": torch.uint32, "I32": torch.int32, "U64": torch.uint64, "I64": torch.int64, "F16": torch.float16,
    "BF16": torch.bfloat16, "F32": torch.float32, "F64": torch.float64, "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2, "F8_E8M0": torch.float8_e8m0fnu, "C64": torch.complex64,
}  # fmt: skip


class CheckpointError(RuntimeError):
    """The weights cannot be loaded."""


class MissingFileError(CheckpointError):
    """A checkpoint file is not there."""


class DamagedFileError(CheckpointError):
    """A checkpoint file cannot be read: truncated, or not of its format."""


class MismatchError(CheckpointError):
    """Tensors of the checkpoint do not have the shapes, or are not there, that the model needs."""


def load_archive(file: str | os.PathLike[str] | BinaryIO, weights_only: bool | None = True, check: bool = False) -> Any:
    """What is in a ``torch.save`` file, on the CPU; of a path, tensors are mapped.

    Args:
        file: a path, or the bytes.
        weights_only: as for ``torch.load``: only ``False`` runs code that the file names.
        check: whether to compare the file's checksums with its contents, all of which are read.

    Raises:
        CheckpointError: if ``weights_only`` does not allow what it holds, or a class is not there of which that is.
        DamagedFileError: if the file is compressed, or its contents are not those that were written.
        Exception: whatever reading something that is no such file raises.
    """
    if not isinstance(file, str | os.PathLike):
        return torch.load(file, map_location="cpu", weights_only=weights_only)
    if check or zipfile.is_zipfile(file):
        _check_records(file, check)
    try:
        return torch.load(file, map_location="cpu", mmap=True, weights_only=weights_only)
    except pickle.UnpicklingError as error:
        named = _classes_in(file)
        if not named:
            reasons = [line for line in str(error).splitlines() if "WeightsUnpickler error" in line]
            named = (reasons or [in_short(error)])[0].strip()[:200]
        raise CheckpointError(
            f"{os.fspath(file)} contains more than tensors and plain values ({named}); nothing else is unpickled, since"
            " that runs code that the file names. If you trust who wrote it: give these classes to"
            " torch.serialization.add_safe_globals([...]) before, or weights_only=False to trainer.fit() or"
            " export_checkpoint(), for instance; --weights-only false for a command. A file of weights alone can be"
            " loaded once with transformers and saved again with save_pretrained (safetensors)"
        ) from error
    except (AttributeError, ModuleNotFoundError) as error:
        if not (named := _classes_in(file)):
            raise
        raise CheckpointError(
            f"{os.fspath(file)} contains objects of classes that Python looks up by their names ({named}), and one of"
            f" them is not there: {in_short(error)}. Read it where the module with that class can be imported, and a"
            " class of the script itself with the script that defines it"
        ) from error


def _check_records(file: str | os.PathLike[str], contents: bool) -> None:
    with zipfile.ZipFile(file) as archive:
        for record in archive.infolist():
            if record.compress_type != zipfile.ZIP_STORED:
                raise DamagedFileError(
                    f"{os.fspath(file)} was packed again with compression ({record.filename}): tensors are read from"
                    " where they lie in the file, which they no longer do. Take the original file, or unpack this one"
                    " and pack it without compression (zip -0)"
                )
        damaged = archive.testzip() if contents else None
    if damaged is not None:
        raise DamagedFileError(
            f"{os.fspath(file)} is damaged: the checksum of {damaged} in it is not that of its contents. Copy it again"
        )


def _classes_in(file: str | os.PathLike[str]) -> str:
    """The classes and functions in a file that are not allowed in one of plain values; empty if that cannot be told."""
    try:
        return join_names(sorted(torch.serialization.get_unsafe_globals_in_checkpoint(file)))
    except Exception:
        return ""


def inside(directory: str | os.PathLike[str], name: str) -> str:
    """The path of a file that another file of a directory names, such as an index.

    Links are followed. What a link in Hugging Face's cache leads to, in the same repository's folder, is inside.

    Raises:
        DamagedFileError: if it is outside the directory.
    """
    root = os.path.realpath(directory)
    above, snapshots = os.path.split(os.path.dirname(root))
    if snapshots == "snapshots" and os.path.isdir(os.path.join(above, "blobs")):
        root = above
    path = os.path.join(directory, name)
    found = os.path.realpath(path)
    if os.path.isabs(name) or ".." in Path(name).parts or os.path.commonpath([root, found]) != root:
        leads = f" (it leads to {found})" if os.path.islink(path) else ""
        raise DamagedFileError(
            f"{os.fspath(directory)} names the file {name!r}, which is outside the directory{leads}: nothing outside is"
            " read. Put the file itself into the directory, and its name into the index"
        )
    return path


def check_named(origin: str, files: Iterable[str]) -> None:
    """Check that none of a model's files, as its index names them, is outside the directory or the Hub's repository.

    Args:
        origin: the directory or Hub id that the model was asked for by.
        files: the paths that were made of the names.

    Raises:
        DamagedFileError: if one is.
    """
    for file in files:
        directory = origin if os.path.isdir(origin) else _snapshot(file)
        if directory is not None:
            inside(directory, file.removeprefix(os.path.join(directory, "")))


def _snapshot(file: str) -> str | None:
    """The directory in Hugging Face's cache that has a model's files, ``None`` for a path from elsewhere."""
    parts = Path(file).parts
    for place, (repository, snapshots) in enumerate(pairwise(parts)):
        if repository.startswith("models--") and snapshots == "snapshots":
            return os.path.join(*parts[: place + 3])
    return None


@dataclass(frozen=True)
class CheckpointTensor:
    """One tensor in a checkpoint file; a :class:`~lightning_autotp.building.recipe.Source`.

    Attributes:
        file: path of the ``.safetensors`` or (zip format) ``torch.save`` file.
        name: its name there.
        shape: its shape.
        stored: its dtype in the file.
        dtype: the dtype it is wanted in.
    """

    file: str
    name: str
    shape: tuple[int, ...]
    stored: torch.dtype
    dtype: torch.dtype

    def read(self, box: Sequence[Run] | None = None) -> Tensor:
        """The tensor, or a block of it, cast to ``dtype``: contiguous, on the CPU, not mapped.

        Raises:
            CheckpointError: if the file cannot be read or no longer has the tensor.
        """
        where = index(box) if box is not None else ...
        rows = prod(self.shape[1:]) * (box[0][1] - box[0][0] if box else self.shape[0] if self.shape else 1)
        cache = _open_files.get() or _OpenFileCache()
        with _explained(self.file), cache.open(self.file, rows * self.stored.itemsize) as tensors:
            found = tensors.entry(self.name)
            if found is None or found.shape != self.shape:
                raise MismatchError(changed_tensor(self, found))
            return tensors.get(self.name, where).to(self.dtype, copy=True, memory_format=torch.contiguous_format)


@dataclass(frozen=True)
class CheckpointSource:
    """Where a model's weights are; kept at ``model.autotp_source``.

    Attributes:
        origin: the directory or Hub id the model was asked for by.
        files: the resolved files.
        tensors: every tensor in them by its name there.
    """

    origin: str
    files: tuple[str, ...]
    tensors: Mapping[str, CheckpointTensor]

    def __deepcopy__(self, memo: dict[int, Any]) -> CheckpointSource:
        return self


class _File:
    """What safetensors and ``torch.save`` files have in common."""

    def __init__(self, path: str, tensors: Any) -> None:
        self._path = path
        self._tensors = tensors
        self.names: dict[str, None] = dict.fromkeys(tensors.keys())

    def entry(self, name: str) -> CheckpointTensor | None:
        """What the file says of a tensor, ``None`` if it has none of that name; nothing of the tensor is read."""
        if isinstance(self._tensors, dict):
            tensor = self._tensors.get(name)
            if not isinstance(tensor, Tensor):
                return None
            return CheckpointTensor(self._path, name, tuple(tensor.shape), tensor.dtype, tensor.dtype)
        if name not in self.names:
            return None
        found = self._tensors.get_slice(name)
        dtype = _DTYPES.get(found.get_dtype())
        if dtype is None:
            raise DamagedFileError(
                f"{self._path}: tensor {name!r} has the dtype {found.get_dtype()}, which cannot be loaded; "
                "save the checkpoint in a floating-point or integer dtype"
            )
        return CheckpointTensor(self._path, name, tuple(found.get_shape()), dtype, dtype)

    def get(self, name: str, where: Any) -> Tensor:
        """A tensor or part of it, in mapped memory that lives while this file or the tensor does."""
        source = self._tensors[name] if isinstance(self._tensors, dict) else self._tensors.get_slice(name)
        part: Tensor = source[where]
        return part


@contextmanager
def _open(path: str) -> Iterator[_File]:
    """Open a checkpoint file, mapped."""
    if path.endswith(".safetensors"):
        with safe_open(path, framework="pt", device="cpu") as tensors:
            yield _File(path, tensors)
    else:
        yield _File(path, load_archive(path))


@contextmanager
def _explained(path: str) -> Iterator[None]:
    """What goes wrong with a checkpoint file within becomes a :class:`CheckpointError` that names it."""
    if not os.path.isfile(path):
        raise MissingFileError(
            f"checkpoint file {path} does not exist. An index (*.index.json) or an earlier download names it: download "
            "the checkpoint again, or correct the path"
        )
    try:
        yield
    except CheckpointError:
        raise
    except Exception as error:  # what a damaged file raises is anything
        advice = "download or copy the file again"
        if "mmap can only be used" in str(error):
            advice = "it has torch.save's old format: load it once and save it again with save_pretrained (safetensors)"
        raise DamagedFileError(
            f"{path} ({os.path.getsize(path)} bytes) cannot be read, it may be truncated: {advice}. ({in_short(error)})"
        ) from error


class _OpenFileCache:
    """Opens files; one that keeps them leaves the last one open for the next read."""

    def __init__(self, keeps: bool = False) -> None:
        self._keeps = keeps
        self._path: str | None = None
        self._mapped = 0
        self._file: _File | None = None
        self._kept = ExitStack()

    @contextmanager
    def open(self, path: str, nbytes: int) -> Iterator[_File]:
        """The file, of which ``nbytes`` more bytes will be mapped."""
        if self._file is None or self._path != path or self._mapped + nbytes > CHUNK_BYTES:
            self.close()
            self._file, self._path = self._kept.enter_context(_open(path)), path
        self._mapped += nbytes
        try:
            yield self._file
        finally:
            if not self._keeps:
                self.close()

    def close(self) -> None:
        """Unmap what is mapped, and give freed pieces back before the next ones: parameters end up between them."""
        self._path, self._file, self._mapped = None, None, 0
        self._kept.close()
        _trim()


_open_files: ContextVar[_OpenFileCache | None] = ContextVar("open_files", default=None)


@contextmanager
def files_kept_open() -> Iterator[None]:
    """Within it a file is opened once for many small reads, not for each of them."""
    cache = _OpenFileCache(keeps=True)
    token = _open_files.set(cache)
    try:
        yield
    finally:
        _open_files.reset(token)
        cache.close()


def in_short(error: Exception) -> str:
    """What an error says first, for a message of one's own: 200 characters at most, or its class."""
    return (str(error).splitlines() or [type(error).__name__])[0][:200]


def changed_tensor(tensor: CheckpointTensor, found: CheckpointTensor | None) -> str:
    """What to say of a tensor that is no longer what it was when the model was built."""
    there = "is not there" if found is None else f"has the shape {found.shape} and dtype {found.stored}"
    return (
        f"{tensor.file}: tensor {tensor.name!r} {there}; when the model was built it had the shape {tensor.shape} and "
        f"dtype {tensor.stored}. The file has changed since then: build the model again"
    )


def read_headers(files: Iterable[str]) -> dict[str, CheckpointTensor]:
    """Every tensor of some checkpoint files by name, from their headers alone; a later file's wins.

    Raises:
        CheckpointError: if a file is missing or cannot be read.
    """
    tensors: dict[str, CheckpointTensor] = {}
    for file in files:
        with _explained(file), _open(file) as opened:
            entries = [opened.entry(name) for name in opened.names]
            tensors.update({entry.name: entry for entry in entries if entry is not None})
    return tensors
