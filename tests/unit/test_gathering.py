"""Whole tensors of parts of any cut: one collective each, the same to the bit, in pieces where they are large."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from lightning_autotp.layouts.ownership import Ownership
from lightning_autotp.layouts.types import Shard
from lightning_autotp.parameters import gathering
from lightning_autotp.parameters.meta import ParameterMeta

EVEN, UNEVEN = Ownership.even(6, 3), Ownership.even(7, 3)
SECTIONS = Ownership(7, (((0, 1), (4, 5)), ((1, 2), (5, 6)), ((2, 4), (6, 7))))
SHARED = Ownership(7, (((0, 3),), ((0, 3),), ((3, 7),)))
NONE_FOR_SOME = Ownership(7, (((0, 7),), (), ()))
CUTS: dict[str, tuple[tuple[int, Ownership], ...]] = {
    "even, of the first dim": ((0, EVEN),),
    "uneven": ((0, UNEVEN),),
    "another dim": ((1, EVEN),),
    "another dim, uneven": ((1, UNEVEN),),
    "sections": ((0, SECTIONS),),
    "sections of another dim": ((2, SECTIONS),),
    "shared": ((1, SHARED),),
    "nothing for some": ((0, NONE_FOR_SOME),),
}


def part_of(whole: Tensor, layout: Shard, rank: int) -> Tensor:
    for dim, owned in layout.dims:
        whole = whole.index_select(dim, torch.tensor(owned.indices(rank), dtype=torch.long))
    return whole


def on_three_ranks(gather: Callable[[int], Tensor], monkeypatch: pytest.MonkeyPatch) -> tuple[list[Tensor], int]:
    """What it gives on every rank, and in how many collectives. They run in turn, first to see what each sends."""
    sent: list[list[Tensor]] = []
    calls: list[Tensor] = []

    def all_gather(received: Tensor, own: Tensor, group: Any) -> None:
        calls.append(own.clone())
        if len(sent) == 3:
            received.copy_(torch.cat([one[len(calls) - 1] for one in sent]))

    monkeypatch.setattr(gathering.dist, "all_gather_single", all_gather)
    monkeypatch.setattr(gathering, "device_to_send", lambda device, _: device)
    for rank in range(3):
        calls.clear()
        gather(rank)
        sent.append([*calls])
    found = []
    for rank in range(3):
        calls.clear()
        found.append(gather(rank))
    return found, len(calls)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64, torch.bool])
@pytest.mark.parametrize("how", CUTS)
def test_any_cut_is_gathered_in_one_collective(how: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    layout = Shard(CUTS[how])
    shape = [5, 4, 3]
    for dim, owned in layout.dims:
        shape[dim] = owned.size
    whole = torch.randint(0, 2 if dtype is torch.bool else 200, shape, generator=torch.Generator().manual_seed(0)).to(
        dtype
    )

    def gather(rank: int) -> Tensor:
        meta = ParameterMeta(("weight",), tuple(shape), dtype, layout, rank, 3)
        group: Any = SimpleNamespace(rank=rank, size=3, process_group=None)
        return gathering.gather_parameter(part_of(whole, layout, rank), meta, group)

    found, calls = on_three_ranks(gather, monkeypatch)
    assert calls == 1
    assert all(torch.equal(one, whole) for one in found)
    monkeypatch.setattr(gathering, "_TOGETHER", 3 * 16 * whole.element_size())  # so that pieces hold few rows
    in_pieces, several = on_three_ranks(gather, monkeypatch)
    assert (several > 1) is (how != "even, of the first dim")
    assert all(torch.equal(one, whole) for one in in_pieces)
