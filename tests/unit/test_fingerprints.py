"""Numbers by which ranks compare tensors that each should have alike: rounding passes, and little else."""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

from lightning_autotp.ranks import fingerprints
from lightning_autotp.ranks.extremes import LOWEST, bounds, extremes
from lightning_autotp.ranks.fingerprints import Difference, Fingerprints

DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16]


def compared(*ranks: dict[str, Tensor] | list[tuple[str, Tensor]]) -> Difference | None:
    """What is found where ranks have noted these tensors."""
    noted = []
    for tensors in ranks:
        of_rank = Fingerprints()
        for place, tensor in tensors.items() if isinstance(tensors, dict) else tensors:
            of_rank.note(place, tensor)
        noted.append(of_rank)
    with mock.patch.object(fingerprints, "gather_objects", return_value=[one._told() for one in noted]):
        group: Any = None
        return Fingerprints().compare(group)


def drawn(dtype: torch.dtype, *shape: int) -> Tensor:
    return torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(0)).to(dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(3, 7, 64), (1000, 300), (1,), (0, 4), ()])
def test_rounding_passes(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    x = drawn(dtype, *shape)
    other = x + x * (torch.rand(shape) - 0.5) * 2 * torch.finfo(dtype).eps
    assert compared({"x": x}, {"x": other}, {"x": x.clone()}) is None


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", [64, 10_000, 1_000_000])
def test_parts_of_a_sum_differ(dtype: torch.dtype, size: int) -> None:
    found = compared({"x": drawn(dtype, 2, size)[0]}, {"x": drawn(dtype, 2, size)[1]})
    assert found is not None
    assert found.place == "x"
    assert len(found.norms) == 2


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_few_elements_that_differ_are_found_by_the_sum(dtype: torch.dtype) -> None:
    x = drawn(dtype, 100, 1000)
    other = x.clone()
    other[37, 1:500] += 1  # none of those that are compared one by one
    assert compared({"x": x}, {"x": other}) is not None


def test_what_is_not_finite_must_be_so_on_every_rank() -> None:
    x = drawn(torch.float32, 50)
    broken = x.clone()
    broken[0] = torch.nan
    assert compared({"x": broken}, {"x": broken.clone()}) is None
    assert compared({"x": x}, {"x": broken}) is not None


def test_the_first_place_in_order_and_other_shapes() -> None:
    a, b, c = (drawn(torch.float32, 4) + at for at in range(3))
    found = compared({"a": a, "b": b, "c": c}, {"a": a, "b": c, "c": b})
    assert (found and found.place, found and found.before) == ("b", "a")
    found = compared({"a": a, "b": b}, {"a": a, "b": torch.cat([b, b])})
    assert found is not None
    assert found.norms[1] != found.norms[1]  # not a number


def test_places_that_not_every_rank_has_come_to_are_left_out() -> None:
    a, b = drawn(torch.float32, 4), drawn(torch.float32, 4) + 1
    assert compared({"a": a, "b": b}, {"a": a}) is None
    assert compared([("a", a), ("a", b)], [("a", a), ("a", b)]) is None
    found = compared([("a", a), ("a", b)], [("a", a), ("a", a)])  # the second visit
    assert found is not None
    assert found.before == "a"


def test_extremes_of_floating_point_numbers_by_integers() -> None:
    values = [-torch.inf, -3.5, -1e-300, 0.0, 1e-300, 2.0, torch.inf]
    for some in (values, values[1:3], values[-2:], [values[3]]):
        largest = [max(pair) for pair in zip(*map(bounds, some), strict=True)]
        assert extremes(largest) == (max(some), min(some))
    assert bounds(None) == (LOWEST, LOWEST)
    assert extremes(bounds(None)) is None
    assert extremes(bounds(float("nan"))) == (torch.inf, torch.inf)
