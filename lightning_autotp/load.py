"""Filling this rank's parameters, one at a time, reading no more than this rank's part of them.

Every parameter of a model built without memory has a :class:`~lightning_autotp.recipe.Recipe`: recorded
initialization, tensors that are already there, or tensors in checkpoint files, perhaps converted on the way (cast,
stacked, concatenated, cut, transposed). :func:`load_parameters` takes the blocks of ``ParameterMeta.mapping`` from it.
A block of a file's tensor is read as that block, in chunks of :data:`CHUNK_BYTES`; conversions that only rearrange are
done per block. What a recipe computes otherwise is made whole, one tensor at a time, and cut. So host memory stays
under this rank's parameters plus the largest tensor.

Files are opened anew for every chunk: pages of a mapped file count as this process's memory until it is unmapped.
"""

from __future__ import annotations

import os
import pickle
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from lightning_autotp.layout import Run
from lightning_autotp.meta import ParameterMeta, parameter_meta
from lightning_autotp.recipe import Recipe, Source, Step, View

CHUNK_BYTES = 16 * 2**20
"""Bytes of the original tensor that are mapped at a time."""

_DTYPES = {
    "BOOL": torch.bool, "U8": torch.uint8, "I8": torch.int8, "U16": torch.uint16, "I16": torch.int16,
    "U32": torch.uint32, "I32": torch.int32, "U64": torch.uint64, "I64": torch.int64, "F16": torch.float16,
    "BF16": torch.bfloat16, "F32": torch.float32, "F64": torch.float64, "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2, "C64": torch.complex64,
}  # fmt: skip

Box = tuple[Run, ...]


class CheckpointError(RuntimeError):
    """The weights cannot be loaded."""


class MissingFileError(CheckpointError):
    """A checkpoint file is not there."""


class DamagedFileError(CheckpointError):
    """A checkpoint file cannot be read: truncated, not of its format, or holding more than tensors."""


class MismatchError(CheckpointError):
    """Tensors of the checkpoint do not have the shapes, or are not there, that the model needs."""


@dataclass(frozen=True)
class CheckpointTensor:
    """One tensor in a checkpoint file; a :class:`~lightning_autotp.recipe.Source`.

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
        where = tuple(slice(start, stop) for start, stop in box) if box is not None else ...
        with _open(self.file) as tensors:
            found = tensors.entry(self.name)
            if found is None or found.shape != self.shape:
                raise MismatchError(_changed(self, found))
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
        self.names: list[str] = list(tensors.keys())

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
    """Open a checkpoint file, mapped; what goes wrong within becomes a :class:`CheckpointError` that names it."""
    if not os.path.isfile(path):
        raise MissingFileError(
            f"checkpoint file {path} does not exist. An index (*.index.json) or an earlier download names it: download "
            "the checkpoint again, or correct the path"
        )
    try:
        if path.endswith(".safetensors"):
            with safe_open(path, framework="pt", device="cpu") as tensors:
                yield _File(path, tensors)
        else:
            yield _File(path, torch.load(path, map_location="cpu", mmap=True, weights_only=True))
    except pickle.UnpicklingError as error:
        raise DamagedFileError(
            f"{path} is not a file of tensors only, or is damaged; nothing else is unpickled. If you trust it, load it "
            f"once with transformers and save it again with save_pretrained (safetensors). ({_first_line(error)})"
        ) from error
    except CheckpointError:
        raise
    except (SafetensorError, RuntimeError, OSError, EOFError, ValueError) as error:
        advice = "download or copy the file again"
        if "mmap can only be used" in str(error):
            advice = "it has torch.save's old format: load it once and save it again with save_pretrained (safetensors)"
        raise DamagedFileError(
            f"{path} ({os.path.getsize(path)} bytes) cannot be read, it may be truncated: {advice}. "
            f"({_first_line(error)})"
        ) from error


def _first_line(error: Exception) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0][:200]


def _changed(tensor: CheckpointTensor, found: CheckpointTensor | None) -> str:
    there = "is not there" if found is None else f"has the shape {found.shape} and dtype {found.stored}"
    return (
        f"{tensor.file}: tensor {tensor.name!r} {there}; when the model was built it had the shape {tensor.shape} and "
        f"dtype {tensor.stored}. The file was changed meanwhile: build the model again"
    )


def read_headers(files: Iterable[str]) -> dict[str, CheckpointTensor]:
    """Every tensor of some checkpoint files by name, from their headers alone; a later file's wins.

    Raises:
        CheckpointError: if a file is missing or cannot be read.
    """
    tensors: dict[str, CheckpointTensor] = {}
    for file in files:
        with _open(file) as opened:
            entries = [opened.entry(name) for name in opened.names]
            tensors.update({entry.name: entry for entry in entries if entry is not None})
    return tensors


def check_checkpoint(model: nn.Module) -> None:
    """Check, reading only headers, that the files a model was built from are whole and what they were.

    Raises:
        CheckpointError: otherwise; a :class:`MismatchError` names every tensor that changed.
    """
    for module in model.modules():
        source = module.__dict__.get("autotp_source")
        if not isinstance(source, CheckpointSource):
            continue
        now = read_headers(source.files)
        wrong = [_changed(tensor, now.get(name)) for name, tensor in source.tensors.items() if now.get(name) != tensor]
        if wrong:
            raise MismatchError("\n".join(wrong))


def blocks_of(recipe: Recipe, boxes: Sequence[Box]) -> Iterator[tuple[Box, Tensor]]:
    """The parts of a recipe's tensor within some boxes, in pieces: ``(half-open range per dim, tensor)``.

    From files no more is read than the boxes, at most :data:`CHUNK_BYTES` of the original tensor at a time. A piece may
    be the memory of a tensor that others hold: copy it before changing it.
    """
    whole: Tensor | None = None
    for box in boxes:
        for piece in _chunks(box, recipe.target):
            part = _part(recipe, recipe.target, piece) if whole is None else None
            if part is None:
                whole = recipe() if whole is None else whole
                part = whole[tuple(slice(start, stop) for start, stop in piece)]
            yield piece, part


def _chunks(box: Box, target: View) -> Iterator[Box]:
    """``box`` cut along its first dim, so that :data:`CHUNK_BYTES` of whole rows hold each piece."""
    if not box:
        yield box
        return
    (start, stop), *rest = box
    row = target.dtype.itemsize
    for size in target.size[1:]:
        row *= size
    rows = max(1, CHUNK_BYTES // max(1, row))
    for first in range(start, stop, rows):
        yield ((first, min(first + rows, stop)), *rest)


def _part(recipe: Recipe, view: View, box: Box) -> Tensor | None:
    """The block ``box`` of ``view``, made from blocks only, or ``None`` where that takes the whole tensor.

    Operators that copy, cast or join are done per block, as is any view of their result that cuts or permutes dims.
    """
    makers = [step for step in recipe.steps if view.storage in step.writes]
    source: Source | None = None
    if view.storage is None or view.conj or view.neg or len(makers) > 1:
        return None
    if not makers:
        value = recipe.leaves[view.storage].value
        if value is None:
            return None
        if isinstance(value, Tensor):
            tensor = view.on(recipe.leaves[view.storage].storage())
            return tensor[tuple(slice(start, stop) for start, stop in box)]
        source = value
        base = View(view.storage, value.dtype, value.shape, _contiguous(value.shape), 0)
    else:
        output = next((out for out in makers[0].outputs if out is not None and out.storage == view.storage), None)
        if output is None:
            return None
        base = output
    found = _within(view, base, box)
    if found is None:
        return None
    inner, order = found
    part = source.read(inner) if source is not None else _step_part(recipe, makers[0], inner)
    if part is None:
        return None
    return part.permute(order).reshape([stop - start for start, stop in box])


def _step_part(recipe: Recipe, step: Step, box: Box) -> Tensor | None:
    """The block ``box`` of the result of ``step``, or ``None`` if its operator does not just copy, cast or join."""
    name = step.name
    if name in ("clone", "_to_copy"):
        if step.kwargs.get("device") not in (None, torch.device("cpu")):
            return None
        part = _part(recipe, step.args[0], box)
        return part if part is None else part.to(step.kwargs.get("dtype") or part.dtype)
    if name not in ("cat", "stack"):
        return None
    views: list[View] = step.args[0]
    dim = step.args[1] if len(step.args) > 1 else 0
    dim %= len(box)
    pieces: list[Tensor] = []
    start, stop = box[dim]
    offset = 0
    for view in views:
        if view.dtype != views[0].dtype or (name == "cat" and len(view.size) != len(box)):
            return None
        length = view.size[dim] if name == "cat" else 1
        low, high = max(start - offset, 0), min(stop - offset, length)
        offset += length
        if low >= high:
            continue
        part = _part(recipe, view, (*box[:dim], *(((low, high),) if name == "cat" else ()), *box[dim + 1 :]))
        if part is None:
            return None
        pieces.append(part)
    return pieces[0] if name == "cat" and len(pieces) == 1 else getattr(torch, name)(pieces, dim=dim)


def _contiguous(shape: Sequence[int]) -> tuple[int, ...]:
    strides = [1]
    for size in reversed(shape[1:]):
        strides.append(strides[-1] * max(size, 1))
    return tuple(reversed(strides)) if shape else ()


def _within(view: View, base: View, box: Box) -> tuple[Box, list[int]] | None:
    """Where the block ``box`` of ``view`` lies in ``base``, a window into the same storage.

    Returns:
        The block of ``base``, and the order of its dims that gives ``view``'s (dims of length one apart), or ``None``
        where ``view`` is not made by cutting and permuting the dims of ``base``.
    """
    if view.dtype != base.dtype or 0 in base.size or 0 in view.size:
        return None
    offset = view.offset - base.offset
    starts = [0] * len(base.size)
    by_stride = sorted((dim for dim, size in enumerate(base.size) if size > 1), key=lambda dim: -base.stride[dim])
    for dim in by_stride:
        starts[dim], offset = divmod(offset, base.stride[dim]) if base.stride[dim] else (0, offset)
    if offset:
        return None
    inner = [(start, start + 1) for start in starts]
    order: list[int] = []
    for size, stride, (low, high) in zip(view.size, view.stride, box, strict=True):
        if size == 1:
            continue
        of_base = [dim for dim in by_stride if base.stride[dim] == stride and dim not in order]
        if not of_base or starts[of_base[0]] + size > base.size[of_base[0]]:
            return None
        inner[of_base[0]] = (starts[of_base[0]] + low, starts[of_base[0]] + high)
        order.append(of_base[0])
    if any(not 0 <= start < size for start, size in zip(starts, base.size, strict=True)):
        return None
    return tuple(inner), order + [dim for dim in range(len(base.size)) if dim not in order]


def same_values(one: Recipe, other: Recipe) -> bool:
    """Whether two recipes make equal tensors, in chunks where they come from files."""
    if (one.target.size, one.target.dtype) != (other.target.size, other.target.dtype):
        return False
    everything = [tuple((0, size) for size in one.target.size)]
    pieces = zip(blocks_of(one, everything), blocks_of(other, everything), strict=True)
    return all(torch.equal(here, there) for (_, here), (_, there) in pieces)


def load_parameters(model: nn.Module, device: torch.device | str | None = None) -> None:
    """Fill this rank's parameters, one at a time. Not collective.

    Each parameter that ``ParameterMeta.need_initialize`` marks is replaced by a real one of its local shape (tied ones
    by one), which keeps its attributes. Call it after :func:`~lightning_autotp.meta.initialize_parameter_meta`.

    Args:
        model: a model whose parameters have their ``ParameterMeta``: layout, rank, and how to make the whole tensor.
        device: where the model goes; by default parameters on meta go to the CPU and all else stays where it is.

    Raises:
        CheckpointError: if files are missing, damaged or changed (checked before anything is read), or a parameter has
            nothing to be filled from.
    """
    names = {parameter: name for name, parameter in model.named_parameters()}
    metas = {parameter: parameter_meta(parameter) for parameter in names}
    wanted = {parameter: meta for parameter, meta in metas.items() if meta.need_initialize}
    empty = [names[parameter] for parameter, meta in wanted.items() if meta.init_fn is None]
    if empty:
        raise CheckpointError(
            f"nothing is known to fill {len(empty)} parameters from, which were made on the meta device elsewhere: "
            f"{', '.join(empty[:10])}{', ...' * (len(empty) > 10)}. Build the model in configure_model()"
        )
    wrong = [
        f"{names[parameter]}: {tuple(parameter.shape)} instead of {meta.local_shape}"
        for parameter, meta in wanted.items()
        if tuple(parameter.shape) != meta.local_shape
    ]
    if wrong:
        raise CheckpointError("local parameters do not have the shapes that their layouts give:\n" + "\n".join(wrong))
    check_checkpoint(model)
    filled: dict[nn.Parameter, nn.Parameter] = {}
    for module in model.modules():
        for name, parameter in module._parameters.items():
            if parameter is None or parameter not in wanted:
                continue
            if parameter not in filled:
                filled[parameter] = _fill(parameter, wanted[parameter], torch.device(device or "cpu"))
            module._parameters[name] = filled[parameter]
    if device is not None:
        model.to(device)


def _fill(parameter: nn.Parameter, meta: ParameterMeta, device: torch.device) -> nn.Parameter:
    """A real parameter for a meta one, with this rank's values."""
    values = torch.empty(meta.local_shape, dtype=parameter.dtype, device=device)
    recipe = meta.init_fn if isinstance(meta.init_fn, Recipe) else Recipe.given(meta.init_fn())  # type: ignore[misc]
    if recipe.target.size != meta.shape:
        raise CheckpointError(f"{meta.name} is initialized as {recipe.target.size} but has the shape {meta.shape}")
    with torch.no_grad():
        for block in meta.mapping:
            for piece, part in blocks_of(recipe, [block.original]):
                where = zip(piece, block.original, block.local, strict=True)
                here = tuple(
                    slice(local[0] + low - start, local[0] + high - start)
                    for (low, high), (start, _), local in where
                )  # fmt: skip
                values[here].copy_(part)
    filled = nn.Parameter(values, requires_grad=parameter.requires_grad)
    filled.__dict__.update(parameter.__dict__)
    meta.init_fn = None
    meta.need_initialize = False
    return filled
