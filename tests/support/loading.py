"""What the tests of building and loading share: memory peaks, and local models without a solver."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import torch
from local_model import state_of
from torch import nn

from lightning_autotp.layouts.ownership import Ownership
from lightning_autotp.layouts.types import Invariant, Layout, Shard
from lightning_autotp.parameters.state import parallel_state
from lightning_autotp.ranks.group import TPGroup

T = TypeVar("T")


def _status(field: str) -> int:
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(f"{field}:"))
    return int(line.split()[1]) * 1024


def peak_of(work: Callable[[], T]) -> tuple[T, int]:
    """What ``work`` returns, and by how much resident memory (mapped files included) grew at its peak."""
    before = _status("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # the peak starts over from here
    result = work()
    return result, _status("VmHWM") - before


def sharded(shape: tuple[int, ...], ranks: int) -> Layout:
    """The first two dims that are long enough are sharded, unevenly where they do not divide."""
    dims = [(dim, Ownership.even(size, ranks)) for dim, size in enumerate(shape) if size >= ranks]
    return Shard(tuple(dims[:2])) if dims and ranks > 1 else Invariant()


def localize(
    model: nn.Module, rank: int, ranks: int, layout: Callable[[tuple[int, ...], int], Layout] = sharded
) -> None:
    """Give a meta model the local shapes of ``rank``, as replacing its layers would."""
    group = TPGroup("", rank, ranks)
    state = state_of(model, group, lambda _, parameter: layout(tuple(parameter.shape), ranks))
    local: dict[nn.Parameter, nn.Parameter] = {}
    for place in state.places(model):
        parameter = place.parameter
        if parameter not in local:
            empty = torch.empty(place.meta.local_shape, dtype=parameter.dtype, device="meta")
            local[parameter] = nn.Parameter(empty, requires_grad=parameter.requires_grad)
            local[parameter].__dict__.update(parameter.__dict__)
        place.module._parameters[place.attribute] = local[parameter]
    model.autotp = state  # type: ignore[assignment]


def assert_local_part(model: nn.Module, whole: nn.Module) -> None:
    """Every parameter of ``model`` is, bit for bit, its blocks of the parameter of ``whole``."""
    values = dict(whole.named_parameters(remove_duplicate=False))
    local = dict(model.named_parameters(remove_duplicate=False))
    assert local.keys() == values.keys()
    for name, parameter in local.items():
        value, meta = values[name], parallel_state(model).metas[name]
        assert (parameter.dtype, parameter.requires_grad) == (value.dtype, value.requires_grad), name
        assert not parameter.is_meta, name
        assert not meta.need_initialize, name
        assert tuple(parameter.shape) == meta.local_shape, name
        for block in meta.mapping:
            here = parameter[tuple(slice(*run) for run in block.local)]
            assert torch.equal(here, value[tuple(slice(*run) for run in block.original)]), name
