"""The search for sizes that must be local: how far it goes back, by differences that are made up."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
from torch import nn

from lightning_autotp.layouts.plan import SizePlan
from lightning_autotp.proving.compare import Mismatch
from lightning_autotp.proving.local_sizes import Unlocalizable, _Search

DEPTH, CHOICES = 5, 2
Sizes = tuple[SizePlan, ...]


def chosen(sizes: Sizes) -> tuple[int, ...]:
    return tuple(size.whole for size in sizes)


class MadeUp(_Search):
    """At each of some operators one of some sizes may be made local; each goes on to the next operator."""

    def __init__(self, end: Callable[[tuple[int, ...]], Mismatch | None]) -> None:
        self.tried = list[tuple[int, ...]]()

        def differences(_: Any, sizes: Sizes, rank: int) -> dict[int, Mismatch | None]:
            self.tried.append(chosen(sizes))
            here = len(sizes)
            return {rank: Mismatch(here, None, "not local yet") if here < DEPTH else end(chosen(sizes))}

        graph = SimpleNamespace(operators=[])
        super().__init__(nn.Module(), SimpleNamespace(graph=graph), differences, in_calls=True)  # type: ignore[arg-type]

    def _candidates(self, mismatch: Mismatch, sizes: Sizes) -> Iterator[Sizes]:
        if len(sizes) < DEPTH:
            yield from ((SizePlan("", "size", choice, ()),) for choice in range(CHOICES))


def test_where_nothing_helps_however_one_comes_there_the_search_ends() -> None:
    search = MadeUp(lambda _: Mismatch(DEPTH, None, "nothing helps"))
    with pytest.raises(Unlocalizable, match="nothing helps"):
        search.find((), [0])
    # Once to the end, and from each operator once more: not each of 2 ** (DEPTH + 1) - 1 ways.
    assert len(search.tried) == (DEPTH + 1) * (DEPTH + 2) // 2


def test_what_differs_at_the_end_by_what_was_chosen_is_searched_for_everywhere() -> None:
    right = (1, 0, 1, 1, 0)
    search = MadeUp(lambda sizes: None if sizes == right else Mismatch(DEPTH, None, f"{sizes} is wrong"))
    assert chosen(search.find((), [0])) == right
