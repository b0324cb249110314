"""Where a dim ends up after a view, against PyTorch's own views."""

from __future__ import annotations

import itertools
import math
from typing import Any

import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from lightning_autotp.capture.noted_numbers import Notes
from lightning_autotp.parallel.whole_dim import after_index, after_reshape

VOCAB = 7


def factorizations(number: int, parts: int) -> list[tuple[int, ...]]:
    if parts == 1:
        return [(number,)]
    divisors = [divisor for divisor in range(1, number + 1) if number % divisor == 0]
    return [(first, *rest) for first in divisors for rest in factorizations(number // first, parts - 1)]


def test_a_reshape_keeps_the_dim_where_it_says() -> None:
    """Taking some indices of the dim before any reshape is taking them after it, at the dim that is named."""
    kept = given_up = 0
    for shape in itertools.product((1, 2, 3, 4), repeat=3):
        x = torch.arange(math.prod(shape)).view(shape)
        for sizes, dim in itertools.product(
            [sizes for parts in (1, 2, 3, 4) for sizes in factorizations(x.numel(), parts)], range(3)
        ):
            chosen = torch.tensor([shape[dim] - 1, 0])
            few = x.index_select(dim, chosen)
            found = after_reshape(shape, dim, sizes)
            inferred = [after_reshape(shape, dim, (*sizes[:at], -1, *sizes[at + 1 :])) for at in range(len(sizes))]
            assert set(inferred) == {found}
            if found is not None:
                local = few.reshape([2 if at == found else size for at, size in enumerate(sizes)])
                assert torch.equal(local, x.reshape(sizes).index_select(found, chosen))
                kept += 1
            else:
                same = [
                    shape[dim] == size and math.prod(sizes[:at]) == math.prod(shape[:dim])
                    for at, size in enumerate(sizes)
                ]
                assert not any(same)
                given_up += 1
    assert min(kept, given_up) > 1000
    assert after_reshape((2, 0, 7), 2, (0, 7)) is None
    assert after_reshape((2, 3, 7), 2, (-1, -1)) is None


@st.composite
def index_items(draw: st.DrawFn, shape: list[int]) -> tuple[Any, ...]:
    items: list[Any] = []
    at = 0
    while at < len(shape):
        kind = draw(st.sampled_from(["slice", "all", "all", "int", "none", "tensor", "mask", "ellipsis", "stop"]))
        if kind == "stop" or (kind == "ellipsis" and ... in [item for item in items if not isinstance(item, Tensor)]):
            break
        size = shape[at]
        if kind == "none":
            items.append(None)
            continue
        if kind == "ellipsis":
            items.append(...)
            at += draw(st.integers(0, len(shape) - at))
            # From here on items count from behind.
            rest = draw(st.lists(st.sampled_from([slice(None), 0, slice(0, 1)]), max_size=len(shape) - at))
            return (*items, *rest)
        items.append(
            {
                "slice": slice(draw(st.integers(-size, size)), draw(st.integers(-size, size)), draw(st.integers(1, 2))),
                "all": draw(st.sampled_from([slice(None), slice(0, size), slice(None, None, 1), slice(0, 99)])),
                "int": draw(st.integers(-size, size - 1)),
                "tensor": torch.tensor([draw(st.integers(0, size - 1)) for _ in range(2)]),
                "mask": torch.tensor([draw(st.booleans()) for _ in range(size)]),
            }[kind]
        )
        at += 1
    return tuple(items)


@given(shape=st.lists(st.integers(1, 4), min_size=1, max_size=4), data=st.data())
def test_an_index_keeps_the_dim_where_it_says(shape: list[int], data: st.DataObject) -> None:
    dim = data.draw(st.integers(0, len(shape) - 1))
    index = data.draw(index_items(shape))
    found = after_index(shape, dim, index)
    if found is None:
        return
    x = torch.arange(torch.tensor(shape).prod().item()).view(shape)
    try:
        whole = x[index]
    except IndexError:
        return
    chosen = torch.tensor(data.draw(st.lists(st.integers(0, shape[dim] - 1), min_size=1, max_size=3)))
    local = x.index_select(dim, chosen)[found.index]
    assert torch.equal(local, whole.index_select(whole.dim() - found.from_right, chosen))


def test_common_indices_keep_the_last_dim() -> None:
    tokens = torch.tensor([0, 1])
    mask = torch.ones(2, 5, dtype=torch.bool)
    of_a_trace = Notes().given("[0][1]", 1)
    for index in (
        (..., slice(None, -1), slice(None)),
        (slice(None), -1),
        (tokens, tokens),
        (mask,),
        (0, tokens),
        (),
        (of_a_trace, slice(of_a_trace, None)),
    ):
        found = after_index((2, 5, VOCAB), 2, index)
        assert found is not None
        assert found.from_right == 1
    for index in ((..., slice(5)), (..., 3), (..., tokens), (True,), ([0, 1],), (0, 0, 0, 0)):
        assert after_index((2, 5, VOCAB), 2, index) is None
