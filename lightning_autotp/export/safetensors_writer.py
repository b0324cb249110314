"""Writing safetensors files tensor by tensor, for models that do not fit into memory.

The library's own writer wants all tensors of a file at once. But a file begins with a header that needs only their
names, dtypes and shapes, so it can be written before a single value is known; then each tensor has its place. The
header is the library's: it is asked for one with empty tensors, which fixes the order, the names of the dtypes and the
padding, so that the files are, byte for byte, those that ``safetensors.torch.save_file`` writes.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from math import prod
from pathlib import Path
from typing import NamedTuple

import torch
from safetensors.torch import save
from torch import Tensor

from lightning_autotp.checkpoints.checksums import sha256_of
from lightning_autotp.layouts.names import join_names
from lightning_autotp.private.torch_private import writing


class Described(NamedTuple):
    """What is known of a tensor beforehand.

    Attributes:
        shape: its shape.
        dtype: its dtype.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def nbytes(self) -> int:
        """Its size in a file."""
        return prod(self.shape) * self.dtype.itemsize


class _FilePlace(NamedTuple):
    path: Path
    offset: int
    nbytes: int


class SafetensorsWriter:
    """Several safetensors files in one directory, whose tensors arrive one at a time and in any order.

    The files are there from the beginning, in their final size; they are whole once :meth:`finish` says so.

    Attributes:
        checksums: the SHA-256 of each file that is whole, by its name.

    Args:
        directory: where to; it must exist.
        files: the tensors' names by file name.
        tensors: every tensor by name.

    Raises:
        ValueError: for a dtype that safetensors does not know.
        OSError: if a file cannot be written.
    """

    def __init__(self, directory: Path, files: Mapping[str, Sequence[str]], tensors: Mapping[str, Described]) -> None:
        self.checksums: dict[str, str] = {}
        self._places: dict[str, _FilePlace] = {}
        self._missing = {name: set(held) for name, held in files.items()}
        for name, held in files.items():
            header, offsets = _header({tensor: tensors[tensor] for tensor in held})
            for tensor, offset in offsets.items():
                self._places[tensor] = _FilePlace(directory / name, offset, tensors[tensor].nbytes)
            with writing(directory / name), open(directory / name, "wb") as file:
                file.write(header)
                file.truncate(len(header) + sum(tensors[tensor].nbytes for tensor in held))

    def write(self, name: str, pieces: Iterable[Tensor]) -> None:
        """Write one tensor.

        Args:
            name: its name.
            pieces: its elements in their order, on the CPU, in any number of tensors of the described dtype.

        Raises:
            RuntimeError: if the pieces have another size than was described.
            OSError: if the disk is full, for instance.
        """
        place = self._places[name]
        written = 0
        with writing(place.path), open(place.path, "r+b") as file:
            file.seek(place.offset)
            for piece in pieces:
                written += piece.nbytes
                if written <= place.nbytes:
                    file.write(_bytes(piece))
        if written != place.nbytes:
            raise RuntimeError(f"{name} is {place.nbytes} bytes long, but {written} bytes were given")
        missing = self._missing[place.path.name]
        missing.discard(name)
        if not missing:  # read back while the system still has it in memory
            self.checksums[place.path.name] = sha256_of(place.path)

    def finish(self) -> None:
        """Check that nothing is missing.

        Raises:
            RuntimeError: if a tensor was not written.
        """
        missing = sorted(name for names in self._missing.values() for name in names)
        if missing:
            raise RuntimeError(f"{len(missing)} tensors were not written: {join_names(missing)}")


def _header(tensors: Mapping[str, Described]) -> tuple[bytes, dict[str, int]]:
    """The beginning of a file, and where in the file each tensor's bytes begin."""
    unknown = {name: tensor.dtype for name, tensor in tensors.items() if not _is_known(tensor.dtype)}
    if unknown:
        raise ValueError(
            "safetensors files cannot hold tensors of "
            + join_names([f"{dtype} ({name})" for name, dtype in sorted(unknown.items())])
            + ": convert them to another dtype, or save the state dict with torch.save"
        )
    # A leading dim of no elements: the library says of the others how it writes them.
    empty = {name: torch.empty((0, *tensor.shape), dtype=tensor.dtype) for name, tensor in tensors.items()}
    written = save(empty, metadata={"format": "pt"})
    entries = json.loads(written[8 : 8 + int.from_bytes(written[:8], "little")])
    end = 0
    offsets = {}
    for name, entry in entries.items():
        if name == "__metadata__":
            continue
        offsets[name] = end
        end += tensors[name].nbytes
        entry["shape"] = entry["shape"][1:]
        entry["data_offsets"] = [offsets[name], end]
    text = json.dumps(entries, ensure_ascii=False, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    begin = 8 + len(text)
    return len(text).to_bytes(8, "little") + text, {name: begin + offset for name, offset in offsets.items()}


def _is_known(dtype: torch.dtype) -> bool:
    try:
        save({"tensor": torch.empty(0, dtype=dtype)})
    except (KeyError, RuntimeError, NotImplementedError):
        return False
    return True


def _bytes(tensor: Tensor) -> memoryview:
    """A tensor's elements in their order; its own memory where it is contiguous."""
    plain = tensor.detach().resolve_conj().resolve_neg().contiguous().reshape(-1)
    return memoryview(plain.view(torch.uint8).numpy())  # type: ignore[arg-type]
