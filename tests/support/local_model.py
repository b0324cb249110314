"""A model whose parameters are cut by hand in every way a layout allows, for tests of what follows the cutting."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import nn

from lightning_autotp.layouts.ownership import Ownership, Run, merge_runs
from lightning_autotp.layouts.plan import ParameterPlan, Plan
from lightning_autotp.layouts.types import Invariant, Layout, Replicate, Shard
from lightning_autotp.parameters.state import ParallelState
from lightning_autotp.ranks.group import TPGroup


def sections(sizes: list[int], ranks: int) -> Ownership:
    """A fused dim: each section sharded separately."""
    held: list[list[Run]] = [[] for _ in range(ranks)]
    offset = 0
    for size in sizes:
        for rank, runs in enumerate(Ownership.even(size, ranks).held):
            held[rank] += [(offset + start, offset + stop) for start, stop in runs]
        offset += size
    return Ownership(offset, tuple(merge_runs(runs) for runs in held))


def shared(units: int, width: int, ranks: int) -> Ownership:
    """Fewer units than ranks: rank r holds unit ``r * units // ranks``, together with its neighbours."""
    held = [((rank * units // ranks) * width, (rank * units // ranks + 1) * width) for rank in range(ranks)]
    return Ownership(units * width, tuple((run,) for run in held))


def interleaved(ranks: int) -> Ownership:
    """Ranks 0 and 1 share [0, 3) and [5, 7); between them lies what rank 1 shares with the last rank, or has alone."""
    held: list[list[Run]] = [[] for _ in range(ranks)]
    held[0] = [(0, 3), (5, 7)]
    held[1] = [(0, 7)]
    held[-1].append((3, 5))
    return Ownership(7, tuple(merge_runs(runs) for runs in held))


class Original(nn.Module):
    """Parameters of every kind, with small integers for values so that sums are exact."""

    def __init__(self) -> None:
        super().__init__()
        shapes: dict[str, tuple[int, ...]] = {
            "even": (12, 3),
            "uneven": (7,),
            "inner": (3, 7),
            "fused": (13, 2),
            "units": (4, 3),
            "crossed": (3, 7),
            "box": (4, 6),
            "few": (2,),
            "same": (3, 2),
            "used_differently": (3,),
            "scalar": (),
        }
        for index, (name, shape) in enumerate(shapes.items()):
            setattr(
                self,
                name,
                nn.Parameter(torch.randint(-9, 10, shape, generator=torch.Generator().manual_seed(index)).float()),
            )
        self.low = nn.Parameter(torch.arange(5).bfloat16())
        self.frozen = nn.Parameter(torch.arange(3.0), requires_grad=False)
        self.head = nn.Module()
        self.head.weight = self.even
        self.register_buffer("steps", torch.arange(4))
        self.register_buffer("cache", torch.zeros(2), persistent=False)


def layouts(ranks: int) -> dict[str, Layout]:
    """How each parameter of :class:`Original` lies over the ranks."""
    box: Layout = Shard(((0, Ownership.even(4, ranks)),))
    if ranks == 4:
        halves = [[((0, n // 2),), ((n // 2, n),)] for n in (4, 6)]
        box = Shard(
            (
                (0, Ownership(4, tuple(halves[0][rank // 2] for rank in range(4)))),
                (1, Ownership(6, tuple(halves[1][rank % 2] for rank in range(4)))),
            )
        )
    return {
        "even": Shard(((0, Ownership.even(12, ranks)),)),
        "uneven": Shard(((0, Ownership.even(7, ranks)),)),
        "inner": Shard(((1, Ownership.even(7, ranks)),)),
        "fused": Shard(((0, sections([6, 4, 3], ranks)),)),
        "units": Shard(((0, shared(2 if ranks > 2 else 1, 4 // (2 if ranks > 2 else 1), ranks)),)),
        "crossed": Shard(((1, interleaved(ranks)),)),
        "box": box,
        "few": Shard(((0, Ownership.even(2, ranks)),)),
        "same": Invariant(),
        "used_differently": Replicate(),
        "scalar": Replicate(),
        "low": Shard(((0, Ownership.even(5, ranks)),)),
        "frozen": Replicate(),
    }


def state_of(model: nn.Module, group: TPGroup, layout: Callable[[str, nn.Parameter], Layout]) -> ParallelState:
    """The state of a whole model that is to be cut by hand as ``layout`` says, by the parameters' (first) names."""
    names: dict[nn.Parameter, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(parameter, []).append(name)
    plans = [
        ParameterPlan(tuple(aliases), tuple(parameter.shape), parameter.element_size(), layout(aliases[0], parameter))
        for parameter, aliases in names.items()
    ]
    return ParallelState.of(model, Plan(type(model).__name__, group.size, tuple(plans)), group)


def cut(model: nn.Module, group: TPGroup, layouts: dict[str, Layout]) -> nn.Module:
    """Make ``model`` this rank's local model, in place (by indexing, not by the functions under test)."""
    state = state_of(model, group, lambda name, _: layouts[name])
    for name, parameter in model.named_parameters():
        layout, local = state.metas[name].layout, parameter.data
        if isinstance(layout, Shard):
            for dim, ownership in layout.dims:
                local = local.index_select(dim, torch.tensor(ownership.indices(group.rank), dtype=torch.long))
        parameter.data = local.clone()
    model.autotp = state  # type: ignore[assignment]
    return model


def local_model() -> tuple[nn.Module, TPGroup]:
    """This rank's part of :class:`Original`, over every process."""
    group = TPGroup.of(dist.group.WORLD)
    return cut(Original(), group, layouts(group.size)), group
