"""Reading blocks of a tensor that is converted on the way from the checkpoint to the model.

A parameter's :class:`~lightning_autotp.building.recipe.Recipe` says which tensors of the checkpoint feed it, through
which operators: per-expert matrices stacked into one parameter, gate and up projections joined, a fused projection cut,
a transpose, rotary halves interleaved, a quantized matrix times its scales. :class:`RecipeReader` translates a box of
the parameter *backwards* through them, to boxes of the tensors in the files, for any number of sharded dims:

==============================  =======================================================================
operator                        a box of its result needs
==============================  =======================================================================
copy, cast                      the same box of its input
join (``cat``, ``stack``)       of each input that the box meets, the part within
``+ - * /``, broadcast          the same box of each operand; of a dim of length one, that one
views: cut, permute, split or   boxes of the base, by arithmetic on strides: a dim of the view is a list of *atoms*,
merge dims, every n-th, expand  each a walk along one dim of the base; an interval is a few boxes over its atoms
anything else                   that operator's whole result, made once, cut, and dropped when the blocks leave it
==============================  =======================================================================

So what cannot be done per block costs one intermediate tensor (one expert's, say) rather than the whole parameter.
Only operators whose value at an element does not depend on how many elements there are may be added to the table: the
result must be bit for bit that of one process.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import pairwise, product
from math import prod
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lightning_autotp.building.recipe import Recipe, Source, View
from lightning_autotp.layouts.blocks import Box, elements_of, index, shape_of, whole_box, within
from lightning_autotp.layouts.ownership import Run
from lightning_autotp.private.torch_private import TO

CHUNK_BYTES = 16 * 2**20
"""Bytes of the converted tensor that are made at a time."""

_COPIES = ("clone", TO)
_JOINS = ("cat", "stack")
_ARITHMETIC = ("add", "sub", "mul", "div")


class RecipeReader:
    """Blocks of what a recipe makes. From files no more is read than they need, up to what an every-n-th view skips."""

    def __init__(self, recipe: Recipe) -> None:
        self._recipe = recipe
        self._writers: dict[int, list[int]] = {}
        for at, step in enumerate(recipe.steps):
            for storage in step.writes:
                self._writers.setdefault(storage, []).append(at)
        self._whole: dict[tuple[View, int], Tensor] = {}
        self._used: set[tuple[View, int]] = set()

    def pieces(self, boxes: Sequence[Box]) -> Iterator[tuple[int, Box, Tensor]]:
        """The parts of the tensor within some boxes, cut so that :data:`CHUNK_BYTES` of whole rows hold each.

        Yields:
            ``(number of the box, half-open range per dim, tensor)``, ascending by the first dim whatever box they
            belong to, so that what must be made whole is made once. A piece may be the memory of a tensor that others
            hold: copy it before changing it.
        """
        target = self._recipe.target
        pieces = [(piece, number) for number, box in enumerate(boxes) for piece in _chunks(box, target)]
        for piece, number in sorted(pieces, key=lambda entry: entry[0][:1]):
            self._used.clear()
            yield number, piece, self._block(target, piece, len(self._recipe.steps))
            self._whole = {key: value for key, value in self._whole.items() if key in self._used}

    def _block(self, view: View, box: Box, before: int) -> Tensor:
        """The block ``box`` of ``view`` as it is before the step of number ``before``."""
        makers = self._writes(view, before)
        if view.storage is None or view.conj or view.neg or len(makers) > 1:
            return self._cut_from_whole(view, box, before)
        base: View | None
        source: Source | None = None
        if makers:
            outputs = self._recipe.steps[makers[0]].outputs
            base = next((out for out in outputs if out is not None and out.storage == view.storage), None)
        else:
            value = self._recipe.leaves[view.storage].value
            if value is None or isinstance(value, Tensor):
                return self._cut_from_whole(view, box, before)
            source = value
            base = View(view.storage, value.dtype, value.shape, _contiguous(value.shape), 0)
        walks = _walks(view, base) if base is not None else None
        if base is None or walks is None:
            return self._cut_from_whole(view, box, before)
        parts = []
        for where, inner, size, steps in _boxes_within(walks, box):
            part = source.read(inner) if source is not None else self._made(makers[0], base, inner)
            stride = [step * part.stride(dim) for dim, step in steps]
            found = part.as_strided(size, stride, part.storage_offset())
            parts.append((where, found.reshape(shape_of(where))))
        if len(parts) == 1:
            return parts[0][1]
        joined = parts[0][1].new_empty(shape_of(box))
        for where, part in parts:
            joined[index(within(where, box))] = part
        return joined

    def _writes(self, view: View, before: int) -> list[int]:
        """The numbers of the steps before one that wrote the storage of ``view``."""
        return [at for at in self._writers.get(view.storage, ()) if at < before] if view.storage is not None else []

    def _made(self, at: int, base: View, box: Box) -> Tensor:
        """The block ``box`` of ``base``, which the step of number ``at`` makes."""
        step = self._recipe.steps[at]
        if step.name in _COPIES and step.kwargs.get("device") in (None, torch.device("cpu")):
            part = self._block(step.args[0], box, at)
            return part.to(step.kwargs.get("dtype") or part.dtype)
        if step.name in _JOINS and len({view.dtype for view in step.args[0]}) == 1:
            dim = (step.args[1] if len(step.args) > 1 else 0) % len(box)
            inputs = [view for view in step.args[0] if step.name == "stack" or view.size != (0,)]
            return self._joined(step.name, inputs, dim, box, at)
        dtypes = {operand.dtype for operand in step.args if isinstance(operand, View)}
        if step.name in _ARITHMETIC and len(step.args) == 2 and not step.kwargs and dtypes == {base.dtype}:
            operands = [self._operand(operand, box, at) for operand in step.args]
            result: Tensor = getattr(torch, step.name)(*operands)
            return result
        return self._cut_from_whole(base, box, at + 1)

    def _joined(self, name: str, inputs: list[View], dim: int, box: Box, at: int) -> Tensor:
        pieces: list[Tensor] = []
        start, stop = box[dim]
        offset = 0
        for view in inputs:
            length = view.size[dim] if name == "cat" else 1
            low, high = max(start - offset, 0), min(stop - offset, length)
            offset += length
            if low < high:
                within = ((low, high),) if name == "cat" else ()
                pieces.append(self._block(view, (*box[:dim], *within, *box[dim + 1 :]), at))
        joined: Tensor = pieces[0] if name == "cat" and len(pieces) == 1 else getattr(torch, name)(pieces, dim=dim)
        return joined

    def _operand(self, operand: Any, box: Box, at: int) -> Any:
        """What a box of an elementwise result needs of an operand."""
        if not isinstance(operand, View):
            return operand
        aligned = zip(operand.size, box[len(box) - len(operand.size) :], strict=True)
        return self._block(operand, tuple((0, 1) if size == 1 else run for size, run in aligned), at)

    def _cut_from_whole(self, view: View, box: Box, before: int) -> Tensor:
        """The block ``box`` of ``view``, cut from the whole of it; kept while the pieces go on needing it."""
        key = (view, max(self._writes(view, before), default=-1))
        self._used.add(key)
        if key not in self._whole:
            self._whole[key] = _until(self._recipe, view, before)()
        return self._whole[key][index(box)]


def same_values(one: Recipe, other: Recipe) -> bool:
    """Whether two recipes make equal tensors, in chunks where they come from files."""
    if (one.target.size, one.target.dtype) != (other.target.size, other.target.dtype):
        return False
    everything = [whole_box(one.target.size)]
    pieces = zip(RecipeReader(one).pieces(everything), RecipeReader(other).pieces(everything), strict=True)
    return all(torch.equal(here, there) for (_, _, here), (_, _, there) in pieces)


def _until(recipe: Recipe, view: View, before: int) -> Recipe:
    """The recipe of ``view`` as it is before a step: only what it depends on."""
    needed = {view.storage}
    steps = []
    for step in reversed(recipe.steps[:before]):
        if step.writes & needed:
            steps.append(step)
            needed = (needed - step.overwrites) | step.reads
    return replace(recipe, target=view, steps=tuple(reversed(steps)))


def _chunks(box: Box, target: View) -> Iterator[Box]:
    """``box`` cut along its first dims, so that :data:`CHUNK_BYTES` of whole rows hold each piece."""
    if not elements_of(box):
        return
    outer = 0
    row = target.dtype.itemsize * prod(target.size[1:])
    while outer < len(box) - 1 and row > CHUNK_BYTES:
        outer += 1
        row //= target.size[outer]
    if not box:
        yield box
        return
    rows = max(1, CHUNK_BYTES // max(1, row))
    start, stop = box[outer]
    for place in product(*(range(*run) for run in box[:outer])):
        for first in range(start, stop, rows):
            yield (*((at, at + 1) for at in place), (first, min(first + rows, stop)), *box[outer + 1 :])


def _contiguous(shape: Sequence[int]) -> tuple[int, ...]:
    strides = [1]
    for size in reversed(shape[1:]):
        strides.append(strides[-1] * max(size, 1))
    return tuple(reversed(strides)) if shape else ()


class _Atom(NamedTuple):
    """A walk along one dim of the base: ``length`` indices, ``step`` apart. A step of 0 stays where it is."""

    dim: int
    step: int
    length: int


class _Walks(NamedTuple):
    """A view in terms of its base: the base's index of its first element, and per dim its atoms, outermost first."""

    starts: tuple[int, ...]
    atoms: tuple[tuple[_Atom, ...], ...]


def _walks(view: View, base: View) -> _Walks | None:
    """How the dims of ``view`` walk along those of ``base``, a window without overlap into the same storage.

    ``None`` where they do not: another dtype, or a dim that leaves the base's dims at no boundary of theirs.
    """
    if view.dtype != base.dtype or 0 in base.size or 0 in view.size:
        return None
    dims = sorted((dim for dim, size in enumerate(base.size) if size > 1), key=lambda dim: -base.stride[dim])
    nested = all(base.stride[one] >= base.stride[other] * base.size[other] for one, other in pairwise(dims))
    if not nested or (dims and base.stride[dims[-1]] == 0):
        return None
    offset = view.offset - base.offset
    starts = [0] * len(base.size)
    for dim in dims:
        starts[dim], offset = divmod(offset, base.stride[dim])
    if offset:
        return None
    reached = list(starts)
    walks: list[tuple[_Atom, ...]] = []
    for size, stride in zip(view.size, view.stride, strict=True):
        atoms = _walk(size, stride, base, dims)
        if atoms is None:
            return None
        for atom in atoms:
            reached[atom.dim] += (atom.length - 1) * atom.step
        walks.append(atoms)
    # Within the base's dims nothing is carried over, so the strides' arithmetic is that of the indices.
    if any(not 0 <= last < size for last, size in zip(reached, base.size, strict=True)):
        return None
    return _Walks(tuple(starts), tuple(walks))


def _walk(size: int, stride: int, base: View, dims: list[int]) -> tuple[_Atom, ...] | None:
    """The atoms of one dim of a view."""
    if size > 1 and stride == 0:
        return (_Atom(0, 0, size),) if base.size else None
    atoms: list[_Atom] = []
    while size > 1:
        dim = next((dim for dim in dims if base.stride[dim] <= stride), None)
        if dim is None or stride % base.stride[dim]:
            return None
        step = stride // base.stride[dim]
        count = size
        if (size - 1) * step >= base.size[dim]:  # it goes on along the next dim
            count = base.size[dim] // step
            if count < 2 or base.size[dim] % step or size % count:
                return None
        atoms.insert(0, _Atom(dim, step, count))
        size //= count
        stride *= count
    return tuple(atoms)


def _boxes_within(walks: _Walks, box: Box) -> Iterator[tuple[Box, Box, list[int], list[tuple[int, int]]]]:
    """The boxes of the base that hold a block of the view.

    Yields:
        Which part of the block, the box of the base, and how to walk it: the atoms' lengths, and their dims and steps.
    """
    per_dim = [
        list(_intervals(low, high, [atom.length for atom in atoms]))
        for (low, high), atoms in zip(box, walks.atoms, strict=True)
    ]
    atoms = [atom for atoms in walks.atoms for atom in atoms]
    steps = [(atom.dim, atom.step) for atom in atoms]
    for choice in product(*per_dim):
        runs = [run for _, runs in choice for run in runs]
        inner = [[start, start + 1] for start in walks.starts]
        for atom, (low, high) in zip(atoms, runs, strict=True):
            inner[atom.dim][0] += low * atom.step
            inner[atom.dim][1] += (high - 1) * atom.step
        where = tuple(part for part, _ in choice)
        yield where, tuple((low, high) for low, high in inner), [high - low for low, high in runs], steps


def _intervals(low: int, high: int, counts: list[int]) -> Iterator[tuple[Run, tuple[Run, ...]]]:
    """The interval of a dim that is several atoms, as boxes over them: ``(interval, run per atom)``, in order."""
    inner = prod(counts[1:])
    if len(counts) < 2:
        yield (low, high), ((low, high),) * len(counts)
        return
    while low < high:
        first, within = divmod(low, inner)
        if within == 0 and high - low >= inner:
            last = high // inner
            yield (low, last * inner), ((first, last), *((0, count) for count in counts[1:]))
            low = last * inner
            continue
        stop = min(high, (first + 1) * inner)
        start = first * inner
        for (begin, end), runs in _intervals(within, stop - start, counts[1:]):
            yield (start + begin, start + end), ((first, first + 1), *runs)
        low = stop
