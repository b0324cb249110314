"""Values in words: what a batch or a parameter is made of, checksums of tensors, and how those of several ranks differ.

Describing a batch happens at every step, so nothing here waits for a device: a tensor's checksum is a number on the
tensor's own device. It is a sum of the tensor's bits, eight bytes at a time, each times a random number that belongs to
its place, so that neither other values nor the same ones in another order give the same sum.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import fields, is_dataclass
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

ROW = 1 << 14
"""How many numbers have weights of their own. Longer tensors are summed in rows of so many."""
ROWS = 1 << 8
"""How many rows are multiplied at once, which takes memory."""
LONGEST = 100
"""Characters of a value that are shown."""

_WORDS = (torch.int64, torch.int32, torch.int16, torch.uint8)
_PLAIN = (type(None), str, bytes, bool, int, float, complex)


class DescribedItem(NamedTuple):
    """One thing inside a value.

    Attributes:
        path: where it is, such as ``batch['labels']``.
        text: what it is; a tensor's dtype and shape.
        checksum: of a tensor's values, shape ``[]``, int64, on its device.
        items: what a sequence of plain values holds.
    """

    path: str
    text: str
    checksum: Tensor | None = None
    items: tuple[Any, ...] = ()

    def in_words(self) -> Iterator[tuple[str, str]]:
        """Paths and texts that say all of it. Waits for the device."""
        if self.checksum is None:
            yield self.path, self.text
        else:
            yield self.path, f"{self.text} (checksum {int(self.checksum) % 2**64:016x})"
        for index, item in enumerate(self.items):
            yield f"{self.path}[{index}]", repr(item)


def describe(value: Any, path: str) -> Iterator[DescribedItem]:
    """What a value is made of, in the same order in every process.

    Args:
        value: any nesting of mappings, sequences, dataclasses, tensors, numpy's arrays and plain values. Other objects
            are left out.
        path: what to call it.
    """
    if isinstance(value, Tensor):
        yield DescribedItem(path, kind(value.dtype, value.shape), checksum(value))
    elif isinstance(value, Mapping):
        for key, item in sorted(value.items(), key=lambda pair: repr(pair[0])):
            yield from describe(item, f"{path}[{key!r}]")
    elif isinstance(value, list | tuple):
        plain = set(map(type, value)) <= set(_PLAIN)
        yield DescribedItem(path, f"{type(value).__name__} of {len(value)}", items=tuple(value) if plain else ())
        for index, item in enumerate(() if plain else value):
            yield from describe(item, f"{path}[{index}]")
    elif isinstance(value, _PLAIN):
        yield DescribedItem(path, repr(value))
    elif isinstance(value, np.ndarray | np.generic) and not value.dtype.hasobject:
        yield DescribedItem(path, f"{kind(value.dtype, value.shape)} (checksum {zlib.crc32(value.tobytes()):08x})")
    elif is_dataclass(value):
        for field in fields(value):
            yield from describe(getattr(value, field.name), f"{path}.{field.name}")


def difference(everyone: Mapping[int, Sequence[tuple[str, str]]]) -> str | None:
    """The first path at which ranks differ, with the texts there and the ranks that have them.

    Args:
        everyone: paths and texts, by rank.
    """
    found = {rank: _by_path(said) for rank, said in everyone.items()}
    for path in dict.fromkeys(path for said in found.values() for path in said):
        ranks: dict[str, list[str]] = {}
        for rank, said in found.items():
            ranks.setdefault(said.get(path, "absent"), []).append(str(rank))
        if len(ranks) > 1:
            texts = [
                f"{_shortened(text)} on rank{'s' * (len(those) > 1)} {', '.join(those)}"
                for text, those in ranks.items()
            ]
            return f"{path} is {' and '.join(texts)}"
    return None


def checksum(tensor: Tensor) -> Tensor:
    """A checksum of a tensor's values: shape ``[]``, int64, on its device, which is not waited for.

    (But for the places of a sparse tensor's values on an accelerator, which are put in order first.) Not of tensors on
    the meta device, which have none.

    Args:
        tensor: of any shape, dtype and layout.
    """
    sums = [_folded(_words(part)) for part in _dense_parts(tensor.detach())]
    return sums[0] if len(sums) == 1 else combined(sums)


def combined(checksums: Sequence[Tensor]) -> Tensor:
    """One checksum of several on one device, zero of none."""
    return _folded(torch.stack(list(checksums))) if checksums else torch.zeros((), dtype=torch.int64)


def kind(dtype: Any, shape: Sequence[int]) -> str:
    """A dtype and a shape, as in ``float32[4, 6]``."""
    return f"{str(dtype).removeprefix('torch.')}{list(shape)}"


def _by_path(said: Sequence[tuple[str, str]]) -> dict[str, str]:
    found: dict[str, str] = {}
    for path, text in said:
        found[path] = f"{found[path]}, {text}" if path in found else text
    return found


def _shortened(text: str) -> str:
    if len(text) <= LONGEST:
        return text
    return f"{text[:LONGEST]}... ({len(text)} characters, checksum {zlib.crc32(text.encode(errors='replace')):08x})"


def _dense_parts(tensor: Tensor) -> list[Tensor]:
    """Ordinary tensors that together say what a tensor's values are."""
    if tensor.is_meta:
        return []
    if tensor.is_nested:
        return list(tensor.unbind())
    if tensor.layout == torch.sparse_coo:
        ordered = tensor.coalesce()
        return [ordered.indices(), ordered.values()]
    if tensor.layout != torch.strided:
        return [tensor.to_dense()]
    return [tensor.int_repr() if tensor.is_quantized else tensor]


def _words(tensor: Tensor) -> Tensor:
    """The bits of an ordinary tensor: ``[words]``, int64, eight bytes in each where they divide so."""
    flat = tensor.resolve_conj().resolve_neg().reshape(-1)
    if flat.stride() != (1,) or flat.storage_offset() * flat.itemsize % 8:
        flat = flat.clone(memory_format=torch.contiguous_format)
    kind = next(kind for kind in _WORDS if flat.nbytes % kind.itemsize == 0)
    return flat.view(kind).long()


def _folded(words: Tensor, level: int = 0) -> Tensor:
    """``[words]`` to ``[]``."""
    weights = _weights(words.device, level)
    if len(words) <= ROW:
        return (words * weights[: len(words)]).sum()
    whole = len(words) // ROW * ROW
    sums = [(rows * weights).sum(1) for rows in words[:whole].view(-1, ROW).split(ROWS)]
    return _folded(torch.cat([*sums, words[whole:]]), level + 1)


@lru_cache(maxsize=64)
def _weights(device: torch.device, level: int) -> Tensor:
    """Random numbers, the same in every process; odd, so that a single other bit never gets lost."""
    draw = torch.Generator().manual_seed(level)
    return (torch.randint(-(2**63), 2**63 - 1, (ROW,), generator=draw) | 1).to(device)
