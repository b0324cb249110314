"""Tensors on disk in the original model's coordinates: ``torch.distributed.checkpoint``, one file per rank.

Each rank writes the blocks it speaks for (:func:`~lightning_autotp.parameters.local_blocks.counted_blocks`) under the
original name, as boxes of the original shape. So the files do not depend on the plan that was in force: any other plan,
number of ranks or single process reads the boxes it wants, and torch's own tools read them as well.
"""

from __future__ import annotations

import io
import pickle
import zipfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from math import prod
from pathlib import Path
from typing import IO, Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadPlan, TensorWriteData, WriteItem, WriteItemType
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list

from lightning_autotp.building.checkpoint_reading import DamagedFileError, MissingFileError
from lightning_autotp.layouts.ownership import Run
from lightning_autotp.parameters.local_blocks import counted_blocks, held_blocks, index, plain
from lightning_autotp.parameters.meta import ParameterMeta
from lightning_autotp.private.distributed_private import FileSystemReader
from lightning_autotp.ranks.group import TPGroup

Box = tuple[Run, ...]

READING_ERRORS = (
    RuntimeError, ValueError, OSError, EOFError, KeyError, pickle.UnpicklingError, zipfile.BadZipFile,
)  # fmt: skip
"""What reading a damaged file may raise."""


class HeldTensor:
    """Boxes of one original tensor that are in this process's memory, in the form that DCP writes and reads.

    Attributes:
        shape: the original shape.
        dtype: of its elements.
    """

    def __init__(self, shape: tuple[int, ...], local: Tensor, boxes: Mapping[Box, Box]) -> None:
        self.shape, self.dtype = shape, local.dtype
        self._local = local
        self._boxes = boxes  # original -> local

    @classmethod
    def spoken_for(cls, value: Tensor, meta: ParameterMeta | None, group: TPGroup, *, copy: bool) -> HeldTensor:
        """What this rank writes of ``value``, which lies over the ranks as the parameter does that ``meta`` is of.

        Args:
            value: the parameter, its gradient or a moment.
            meta: the parameter's; ``None`` if every rank has all of it.
            group: the tensor-parallel group.
            copy: whether to take a copy on the CPU now, for a save that goes on while training does.
        """
        local = plain(value)
        boxes = {block.original: block.local for block in counted_blocks(value, meta, group)}
        return cls(original_shape(value, meta), local.to("cpu", copy=True) if copy else local, boxes)

    @classmethod
    def to_fill(cls, value: Tensor, meta: ParameterMeta | None, group: TPGroup) -> HeldTensor:
        """What this rank reads of ``value``, likewise."""
        boxes = {block.original: block.local for block in held_blocks(value, meta, group.size)}
        return cls(original_shape(value, meta), plain(value), boxes)

    @property
    def chunks(self) -> list[ChunkStorageMetadata]:
        """The boxes as DCP describes them."""
        return [
            ChunkStorageMetadata(
                offsets=torch.Size(start for start, _ in box), sizes=torch.Size(stop - start for start, stop in box)
            )
            for box in self._boxes
        ]

    def at(self, offset: torch.Size | None) -> Tensor:
        """The box that begins at an offset of the original tensor: a view of the memory held."""
        for original, local in self._boxes.items():
            if torch.Size(start for start, _ in original) == offset:
                return self._local[index(local)]
        raise KeyError(offset)

    def __deepcopy__(self, memo: dict[int, Any]) -> HeldTensor:
        return self

    def __create_write_items__(self, fqn: str, _: object) -> list[WriteItem]:
        properties = TensorProperties.create_from_tensor(self._local)
        return [
            WriteItem(
                MetadataIndex(fqn, chunk.offsets),
                WriteItemType.SHARD,
                tensor_data=TensorWriteData(chunk, properties, torch.Size(self.shape)),
            )
            for chunk in self.chunks
        ]


class StoredTensor:
    """One tensor of a checkpoint directory; nothing of it is read yet.

    Attributes:
        shape: its shape.
        dtype: its dtype.
    """

    def __init__(self, name: str, metadata: TensorStorageMetadata, directory: _Directory) -> None:
        self.name, self.shape, self.dtype = name, tuple(metadata.size), metadata.properties.dtype
        self._metadata, self._directory = metadata, directory

    def read(self) -> Tensor:
        """The whole tensor, on the CPU. Not collective."""
        whole = torch.empty(self.shape, dtype=self.dtype)
        box = tuple((0, size) for size in self.shape)
        self._read(HeldTensor(self.shape, whole, {box: box}))
        return whole

    def read_into(self, tensor: Tensor, meta: ParameterMeta | None, group: TPGroup) -> None:
        """Fill a parameter, or what lies over the ranks as one does, with this process's part. Not collective."""
        self._read(HeldTensor.to_fill(tensor, meta, group))

    def _read(self, held: HeldTensor) -> None:
        if prod(self.shape) == 0:
            return
        items = create_read_items_for_chunk_list(self.name, self._metadata, held.chunks)
        with self._directory.explained():
            self._directory.reader.read_data(LoadPlan(items), _Placing(held)).wait()


class _CheckedReader(FileSystemReader):
    """Compares the checksum of every stored box that is read (a ``torch.save`` archive has one) before it is used."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self._checked: set[tuple[str, int]] = set()

    def opened(self, part: IO[bytes], file: str, offset: int, length: int) -> IO[bytes]:
        """The box, checked."""
        box = io.BytesIO(part.read(length))
        if (file, offset) not in self._checked:
            check_archive(box, file)
            box.seek(0)
            self._checked.add((file, offset))
        return box


def check_archive(file: Any, name: str) -> None:
    """Compare the checksums of a ``torch.save`` archive with its contents, all of which are read.

    Args:
        file: a path or an open binary file.
        name: what to call it.

    Raises:
        ValueError: if something in it changed since it was written.
        zipfile.BadZipFile: if it is no archive, or not all of it.
    """
    with zipfile.ZipFile(file) as archive:
        damaged = archive.testzip()
    if damaged is not None:
        raise ValueError(f"the checksum of {damaged} in {name} is not that of its contents")


class _Directory:
    """An open checkpoint directory."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.reader = _CheckedReader(path)
        with self.explained():
            self.metadata: Metadata = self.reader.read_metadata()
            self.reader.set_up_storage_reader(self.metadata, is_coordinator=True)

    @contextmanager
    def explained(self) -> Iterator[None]:
        """What goes wrong with the files within becomes a CheckpointError that names the directory."""
        try:
            yield
        except FileNotFoundError as error:
            raise MissingFileError(
                f"the checkpoint {self.path} lacks the file {error.filename}: it was not copied whole, or is no"
                " checkpoint of this strategy. Copy all of the directory, of every node"
            ) from error
        except READING_ERRORS as error:
            text = (str(error).splitlines() or [type(error).__name__])[0][:200]
            raise DamagedFileError(
                f"the checkpoint {self.path} cannot be read, a file of it may be truncated or damaged: copy it again,"
                f" or resume from an earlier one. ({text})"
            ) from error


class _Placing(dcp.DefaultLoadPlanner):
    """Puts what is read where a held tensor has it."""

    def __init__(self, held: HeldTensor) -> None:
        super().__init__()
        self._held = held

    def lookup_tensor(self, index: MetadataIndex) -> Tensor:
        return self._held.at(index.offset)


class _Writing(dcp.DefaultSavePlanner):
    """Takes what is written out of held tensors."""

    def __init__(self) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)

    def lookup_object(self, index: MetadataIndex) -> Any:
        value = self.state_dict[index.fqn]
        return value.at(index.offset) if isinstance(value, HeldTensor) else value


def original_shape(tensor: Tensor, meta: ParameterMeta | None) -> tuple[int, ...]:
    """A parameter's shape in the original model; any other tensor's own."""
    return tuple(tensor.shape) if meta is None else meta.shape


def write_tensors(
    tensors: Mapping[str, HeldTensor | Tensor], directory: Path, process_group: dist.ProcessGroup | None
) -> None:
    """Write tensors into an empty directory, each rank its own. Collective over ``process_group``.

    Args:
        tensors: held tensors, and tensors that are the same on every rank (one rank writes them).
        directory: where to; the same file system for all ranks.
        process_group: all ranks that hold something.

    Raises:
        torch.distributed.checkpoint.api.CheckpointException: on every rank, if one could not write.
    """
    dcp.save(
        dict(tensors),
        storage_writer=dcp.FileSystemWriter(directory, sync_files=True),
        planner=_Writing(),
        process_group=process_group,
    )


def stored_tensors(directory: Path) -> dict[str, StoredTensor]:
    """Every tensor in a directory that :func:`write_tensors` wrote, by name. Not collective.

    Raises:
        CheckpointError: if it cannot be read.
    """
    opened = _Directory(directory)
    return {
        name: StoredTensor(name, entry, opened)
        for name, entry in opened.metadata.state_dict_metadata.items()
        if isinstance(entry, TensorStorageMetadata)
    }
