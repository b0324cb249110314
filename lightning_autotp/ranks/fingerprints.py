"""Tensors that every rank should have alike, compared by some numbers of each: elements, their sum, and a norm.

Kernels that are not deterministic round differently on every rank, so the numbers may differ by rounding; what was
computed from one rank's part alone differs by far more.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_autotp.ranks.agreement import gather_objects

_ELEMENTS = 16
_SUMMED = 1e-6
"""By which share of the norm sums in single precision may differ."""


class Difference(NamedTuple):
    """Where ranks have different values.

    Attributes:
        place: the first such place, in the order in which they were noted.
        before: the last one before it that is alike; empty if there is none.
        norms: the mean of the absolute values there, by rank; ``nan`` where a rank has another shape.
    """

    place: str
    before: str
    norms: tuple[float, ...]


class _Noted(NamedTuple):
    """What this rank has at one place; the last value of ``numbers`` is the L1 norm, the one before it the sum."""

    place: str
    shape: tuple[int, ...]
    eps: float
    numbers: Tensor


class _Told(NamedTuple):
    """What a rank tells the others: plain numbers, as each tensor that is pickled takes its whole memory along.

    Attributes:
        numbers: of all places, one after the other.
        places: each with its shape and ``eps``, and how many of the numbers are its.
    """

    numbers: list[float]
    places: list[tuple[str, tuple[int, ...], float, int]]


class Fingerprints:
    """Notes tensors that every rank should have alike, and compares them."""

    def __init__(self) -> None:
        self._noted: list[_Noted] = []

    @torch.no_grad()
    def note(self, place: str, tensor: Tensor) -> None:
        """Note some numbers of a tensor. Not collective, and no device is waited for.

        Args:
            place: where it is, in words.
            tensor: of any shape and floating-point dtype.
        """
        x = tensor.detach()
        if x.is_complex():
            x = torch.view_as_real(x.resolve_conj())
        if x.itemsize == 1:  # few functions take float8
            x = x.float()
        flat = x.reshape(-1)
        totals = sum_and_norm(flat, 1)
        elements = flat[:: max(1, flat.numel() // _ELEMENTS)][:_ELEMENTS].to(totals.dtype)
        numbers = torch.cat([elements, totals])
        self._noted.append(_Noted(place, tuple(x.shape), _eps(x), numbers))

    def compare(self, group: dist.ProcessGroup) -> Difference | None:
        """Compare what was noted with the other ranks, and forget it. Collective; the device is waited for.

        A place that some rank has not come to is left out.
        """
        told, self._noted = self._told(), []
        gathered = gather_objects(told, group)
        if all(of_rank == gathered[0] for of_rank in gathered):  # as nearly always
            return None
        everyone = [_by_visit(_noted_of(of_rank)) for of_rank in gathered]
        before = ""
        for visit in everyone[0]:
            if not all(visit in of_rank for of_rank in everyone):
                continue
            found = [of_rank[visit] for of_rank in everyone]
            if _differ(found):
                shape = found[0].shape
                norms = (_mean(one) if one.shape == shape else math.nan for one in found)
                return Difference(found[0].place, before, tuple(norms))
            before = found[0].place
        return None

    def _told(self) -> _Told:
        """What was noted, for other ranks."""
        noted = self._noted
        # Parameters may be on the host, and what is computed of them on the device.
        where = next((one.numbers.device for one in noted if one.numbers.device.type != "cpu"), torch.device("cpu"))
        numbers = [one.numbers.double().to(where, non_blocking=True) for one in noted]
        places = [(one.place, one.shape, one.eps, len(one.numbers)) for one in noted]
        return _Told(torch.cat(numbers).tolist() if noted else [], places)


def sum_and_norm(tensor: Tensor, order: float, dim: int | None = None) -> Tensor:
    """A tensor's sum and its norm of this order, in single precision at least; the tensor is not copied.

    Returns:
        ``[2]``, or with a dim, along which both are taken, ``[..., 2]``.
    """
    x = tensor.float() if tensor.itemsize == 1 else tensor  # few functions take float8
    dtype = torch.promote_types(x.dtype, torch.float32)
    return torch.stack([x.sum(dim, dtype=dtype), torch.linalg.vector_norm(x, order, dim, dtype=dtype)], -1)


def _eps(tensor: Tensor) -> float:
    """How far apart numbers are with which a tensor was computed, relative to their size."""
    kind = tensor.device.type
    dtypes = [tensor.dtype, *([torch.get_autocast_dtype(kind)] if torch.is_autocast_enabled(kind) else [])]
    return max(torch.finfo(dtype).eps for dtype in dtypes)


def _noted_of(told: _Told) -> list[_Noted]:
    """What a rank has noted."""
    counts = [count for *_, count in told.places]
    parts = torch.tensor(told.numbers, dtype=torch.float64).split(counts)
    return [_Noted(place, shape, eps, part) for (place, shape, eps, _), part in zip(told.places, parts, strict=True)]


def _by_visit(noted: list[_Noted]) -> dict[tuple[str, int], _Noted]:
    """What was noted, by its place and how often that was noted before."""
    found: dict[tuple[str, int], _Noted] = {}
    visits: dict[str, int] = {}
    for one in noted:
        visits[one.place] = visits.get(one.place, -1) + 1
        found[one.place, visits[one.place]] = one
    return found


def _mean(noted: _Noted) -> float:
    return float(noted.numbers[-1]) / max(1, math.prod(noted.shape))


def _differ(found: list[_Noted]) -> bool:
    """Whether the numbers of several ranks differ by more than rounding."""
    if len({one.shape for one in found}) > 1:
        return True
    numbers = torch.stack([one.numbers for one in found])
    finite = numbers.isfinite()
    if not bool((finite == finite[0]).all()):
        return True
    numbers = numbers.where(finite, 0.0)
    count, eps = max(1, math.prod(found[0].shape)), max(one.eps for one in found)
    spread, norm = numbers.amax(0) - numbers.amin(0), float(numbers[:, -1].amax())
    rounding = math.sqrt(eps)
    of_elements = rounding * (numbers.abs().amax(0) + norm / count)
    of_sums = 4 * rounding * norm / math.sqrt(count) + _SUMMED * norm
    return bool((spread[:-2] > of_elements[:-2]).any() or (spread[-2:] > of_sums).any())
