"""Tensors on disk in the original model's coordinates: ``torch.distributed.checkpoint``, one file per rank.

Each rank writes the blocks it owns (:func:`~lightning_autotp.parameters.local_blocks.counted_blocks`) under the
original name, as boxes of the original shape. So the files do not depend on the plan that was in force: any other plan,
number of ranks or single process reads the boxes it wants, and torch's own tools read them as well.

Where every box is and what its checksum is, :func:`write_tensors` returns as text, to be kept in a file that has
checksums of its own; :func:`stored_tensors` reads by that. torch's own table of contents, ``.metadata``, is written for
torch's tools and never read here: to unpickle it is to run what it says.
"""

from __future__ import annotations

import io
import json
import zlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, Metadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType

from lightning_autotp.building.checkpoint_reading import (
    CheckpointError,
    DamagedFileError,
    MissingFileError,
    in_short,
    inside,
    load_archive,
)
from lightning_autotp.checkpoints.checksums import sha256_of
from lightning_autotp.layouts.blocks import (
    Block,
    Box,
    blocks_of,
    common,
    elements_of,
    index,
    shape_of,
    start_of,
    tile,
    within,
)
from lightning_autotp.parameters.local_blocks import counted_blocks, held_blocks, plain
from lightning_autotp.parameters.meta import ParameterMeta
from lightning_autotp.private.distributed_private import FileSystemWriter
from lightning_autotp.ranks.agreement import in_words, peer_error
from lightning_autotp.ranks.group import TPGroup

TORCHS_TABLE = ".metadata"
"""torch's table of contents (the name is torch's)."""


class HeldTensor:
    """Blocks of one original tensor that are in this process's memory, in the form that DCP writes and reads.

    Attributes:
        shape: the original shape.
        dtype: of its elements.
    """

    def __init__(self, shape: tuple[int, ...], local: Tensor, blocks: Sequence[Block]) -> None:
        self.shape, self.dtype = shape, local.dtype
        self._local = local
        self._blocks = blocks

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
        blocks = counted_blocks(value, meta, group)
        return cls(original_shape(value, meta), local.to("cpu", copy=True) if copy else local, blocks)

    @classmethod
    def all_or_nothing(cls, value: Tensor, *, copy: bool) -> HeldTensor:
        """What this rank writes of a tensor that one rank has whole; on the other ranks it is on meta.

        Args:
            value: the tensor.
            copy: as for :meth:`spoken_for`.
        """
        if value.is_meta:
            return cls(tuple(value.shape), value.new_empty(0, device="cpu"), ())
        local = value.detach()
        blocks = blocks_of(value.shape, None, 0, 1)
        return cls(tuple(value.shape), local.to("cpu", copy=True) if copy else local, blocks)

    @classmethod
    def to_fill(cls, value: Tensor, meta: ParameterMeta | None, group: TPGroup) -> HeldTensor:
        """Where this rank's part of ``value`` is read to, with every block of it, whichever rank counts it."""
        return cls(original_shape(value, meta), plain(value), held_blocks(value, meta, group.size))

    def meets(self, box: Box) -> bool:
        """Whether something is held of a box of the original tensor."""
        return any(common(block.original, box) is not None for block in self._blocks)

    def fill(self, box: Box, values: Tensor) -> None:
        """Take what is held of a box of the original tensor from its values."""
        for block in self._blocks:
            if (shared := common(block.original, box)) is not None:
                self._local[index(block.place(shared))].copy_(values[index(within(shared, box))])

    def at(self, offset: torch.Size | None) -> Tensor:
        """The box that begins at an offset of the original tensor: a view of the memory held."""
        for block in self._blocks:
            if start_of(block.original) == offset:
                return self._local[index(block.local)]
        raise KeyError(offset)

    def __deepcopy__(self, memo: dict[int, Any]) -> HeldTensor:
        return self

    def __create_write_items__(self, fqn: str, _: object) -> list[WriteItem]:
        properties = TensorProperties.create_from_tensor(self._local)
        chunks = [
            ChunkStorageMetadata(torch.Size(start_of(block.original)), torch.Size(shape_of(block.original)))
            for block in self._blocks
        ]
        return [
            WriteItem(
                MetadataIndex(fqn, chunk.offsets),
                WriteItemType.SHARD,
                tensor_data=TensorWriteData(chunk, properties, torch.Size(self.shape)),
            )
            for chunk in chunks
        ]


class _Stored(NamedTuple):
    """A box on disk: the bytes of a ``torch.save`` archive in a file, and their CRC-32."""

    box: Box
    file: str
    offset: int
    length: int
    checksum: int


class StoredTensor:
    """One tensor of a checkpoint directory; nothing of it is read yet.

    Attributes:
        name: its name on disk.
        shape: its shape.
        dtype: its dtype.
    """

    def __init__(
        self, name: str, shape: tuple[int, ...], dtype: torch.dtype, boxes: Sequence[_Stored], directory: Path
    ) -> None:
        self.name, self.shape, self.dtype = name, shape, dtype
        self._boxes, self._directory = boxes, directory

    def read(self) -> Tensor:
        """The whole tensor, on the CPU. Not collective."""
        whole = torch.empty(self.shape, dtype=self.dtype)
        self._fill(HeldTensor(self.shape, whole, blocks_of(self.shape, None, 0, 1)))
        return whole

    def read_into(self, tensor: Tensor, meta: ParameterMeta | None, group: TPGroup) -> None:
        """Fill a parameter, or what lies over the ranks as one does, with this process's part. Not collective."""
        self._fill(HeldTensor.to_fill(tensor, meta, group))

    def check(self) -> None:
        """Compare the checksums of all of it with what is on disk.

        Raises:
            CheckpointError: if they differ, or a file cannot be read.
        """
        for stored in self._boxes:
            self._bytes(stored)

    def _fill(self, held: HeldTensor) -> None:
        for stored in self._boxes:
            if held.meets(stored.box):
                held.fill(stored.box, self._values(stored))

    def _values(self, stored: _Stored) -> Tensor:
        content = self._bytes(stored)
        with explained(self._directory, stored.file):
            values: Tensor = load_archive(io.BytesIO(content))
            shape = shape_of(stored.box)
            if tuple(values.shape) != shape or values.dtype != self.dtype:
                raise ValueError(f"{self.name} is {values.dtype}{[*values.shape]} there, not {self.dtype}{[*shape]}")
        return values

    def _bytes(self, stored: _Stored) -> bytes:
        with explained(self._directory, stored.file), open(inside(self._directory, stored.file), "rb") as file:
            file.seek(stored.offset)
            content = file.read(stored.length)
            if zlib.crc32(content) != stored.checksum:
                raise ValueError(f"the checksum of {self.name} is not that of what was saved")
        return content


@contextmanager
def explained(directory: Path, file: str) -> Iterator[None]:
    """What goes wrong with a file of a checkpoint directory within becomes a :class:`CheckpointError` that names it."""
    try:
        yield
    except FileNotFoundError as error:
        raise MissingFileError(
            f"the checkpoint {directory} lacks the file {file}: it was not copied whole. Copy all of the directory, of"
            " every node"
        ) from error
    except CheckpointError:
        raise
    except Exception as error:  # what a damaged file raises is anything
        raise DamagedFileError(
            f"the checkpoint {directory} cannot be read: its file {file} is damaged, truncated or from another save"
            f" ({in_short(error)}). Copy the directory again, or resume from an earlier one"
        ) from error


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


def write_tensors(tensors: Mapping[str, HeldTensor], directory: Path, process_group: dist.ProcessGroup | None) -> str:
    """Write tensors into an empty directory, each rank its own. Collective over ``process_group``.

    Args:
        tensors: what this rank holds of each.
        directory: where to; the same file system for all ranks.
        process_group: all ranks that hold something.

    Returns:
        What :func:`stored_tensors` reads by: text that is to be kept.

    Raises:
        OSError: on a rank that could not write.
        PeerError: on the others.
    """
    writer, rank = FileSystemWriter(directory), dist.get_rank(process_group)
    try:
        metadata: Metadata = dcp.save(
            dict(tensors), storage_writer=writer, planner=_Writing(), process_group=process_group
        )
    except dcp.CheckpointException as error:  # on every rank, with the errors of all
        failures = {failed: failure for failed, (failure, _) in error.failures.items()}
        if rank in failures:
            raise failures[rank] from error
        texts = {failed: in_words(failure) for failed, failure in failures.items()}
        raise peer_error(texts, dist.get_world_size(process_group), f"writing to {directory}") from error
    return _describe(metadata, directory) if rank == 0 else ""


def stored_tensors(directory: Path, described: str) -> dict[str, StoredTensor]:
    """Every tensor in a directory that :func:`write_tensors` wrote, by name. Not collective.

    No tensor is read, but everything else that shows that the directory is one save's, and whole: torch's table of
    contents, which has that save's id, and the sizes of all files.

    Args:
        directory: where the files are.
        described: what :func:`write_tensors` returned.

    Raises:
        CheckpointError: if a file is missing, damaged or from another save.
    """
    entries = json.loads(described)
    for file, size in entries["files"].items():
        with explained(directory, file):
            found = Path(inside(directory, file)).stat().st_size
            if found != size:
                raise ValueError(f"it has {found} bytes, {size} were written")
    with explained(directory, TORCHS_TABLE):
        if _digest(directory) != entries["table"]:
            raise ValueError("its checksum is not that of what was saved")
    return {
        name: _stored_tensor(name, entry, entries["files"], directory) for name, entry in entries["tensors"].items()
    }


def _describe(metadata: Metadata, directory: Path) -> str:
    """What was written, where, as JSON."""
    tensors: dict[str, dict[str, Any]] = {}
    for name, entry in metadata.state_dict_metadata.items():
        boxes = []
        for chunk in entry.chunks:  # type: ignore[union-attr]
            place = metadata.storage_data[MetadataIndex(name, chunk.offsets)]
            box = [(start, start + size) for start, size in zip(chunk.offsets, chunk.sizes, strict=True)]
            boxes.append((box, place.relative_path, place.offset, place.length, place.checksum))
        tensors[name] = {
            "dtype": str(entry.properties.dtype).removeprefix("torch."),  # type: ignore[union-attr]
            "shape": list(entry.size),  # type: ignore[union-attr]
            "boxes": boxes,
        }
    files = sorted({box[1] for entry in tensors.values() for box in entry["boxes"]})
    sizes = {file: (directory / file).stat().st_size for file in files}
    return json.dumps({"files": sizes, "table": _digest(directory), "tensors": tensors})


def _digest(directory: Path) -> str:
    return sha256_of(Path(inside(directory, TORCHS_TABLE)))


def _stored_tensor(name: str, entry: dict[str, Any], files: Mapping[str, int], directory: Path) -> StoredTensor:
    dtype = getattr(torch, entry["dtype"])
    if not isinstance(dtype, torch.dtype):
        raise TypeError(f"{entry['dtype']} is no dtype")
    shape = tuple(entry["shape"])
    boxes = [_Stored(tuple((start, stop) for start, stop in box), *place) for box, *place in entry["boxes"]]
    for stored in boxes:
        # What memory is made for must be there.
        nbytes = elements_of(stored.box) * dtype.itemsize
        if not nbytes < stored.length <= files[stored.file] - stored.offset:
            raise ValueError(f"{name} does not fit into {stored.file}")
    if not tile([stored.box for stored in boxes], shape):
        raise ValueError(f"the parts of {name} on disk are not all of it, or overlap")
    return StoredTensor(name, shape, dtype, boxes, directory)
