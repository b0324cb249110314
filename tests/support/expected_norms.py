"""Gradients and norms of the model that is cut by hand, from the whole one."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from local_model import Original, cut, layouts, local_model
from torch import Tensor, nn

from lightning_autotp.gradients.norms import clip_gradients_norm, full_gradients, gradient_norm
from lightning_autotp.gradients.sums import average_gradients, synchronize_gradients
from lightning_autotp.layouts.types import Layout, Shard
from lightning_autotp.parameters.state import parallel_state
from lightning_autotp.ranks.group import TPGroup

NORMS = [1.0, 2.0, 3.5, float("inf")]


def factors(name: str, shape: tuple[int, ...], rank: int, step: int) -> Tensor:
    """What ``rank`` multiplies the whole parameter by: small integers, so that sums are exact."""
    seed = sum(map(ord, name)) * 100 + rank * 10 + step
    return torch.randint(-8, 9, shape, generator=torch.Generator().manual_seed(seed)).float()


def local(whole: Tensor, layout: Layout, rank: int) -> Tensor:
    for dim, ownership in layout.dims if isinstance(layout, Shard) else ():
        whole = whole.index_select(dim, torch.tensor(ownership.indices(rank), dtype=torch.long))
    return whole


def loss_of(model: nn.Module, rank: int, step: int, parts: bool) -> Tensor:
    """A loss whose gradient is known: rank by rank different where elements are shared, the same where not."""
    total = torch.zeros(())
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            meta = parallel_state(model).metas[name]
            varies = parts and name != "same"
            whole = factors(name, meta.shape, rank if varies else 0, step)
            total = total + (parameter * local(whole, meta.layout, rank)).float().sum()
            if name == "even":
                total = total + (model.head.weight * local(whole, meta.layout, rank)).sum()  # type: ignore[operator]
    return total


def expected_gradients(ranks: int, steps: int) -> dict[str, Tensor]:
    """By the definition: an element's gradient is the sum of those of the ranks that hold it."""
    wanted: dict[str, Tensor] = {}
    plans = layouts(ranks)
    for name, parameter in Original().named_parameters():
        if not parameter.requires_grad:
            continue
        gradient = torch.zeros(parameter.shape)
        for step in range(steps):
            for rank in range(ranks):
                if name == "same" and rank > 0:
                    continue
                held = torch.ones(parameter.shape)
                layout = plans[name]
                for dim, ownership in layout.dims if isinstance(layout, Shard) else ():
                    mask = torch.zeros(ownership.size)
                    mask[ownership.indices(rank)] = 1
                    held = held * mask.view([-1 if d == dim else 1 for d in range(parameter.dim())])
                gradient += factors(name, tuple(parameter.shape), rank, step) * held * (2 if name == "even" else 1)
        wanted[name] = gradient.to(parameter.dtype)
    wanted["head.weight"] = wanted["even"]
    return wanted


def on_every_rank(rank: int, world_size: int) -> dict[str, Any]:
    model, _ = local_model()
    handles = synchronize_gradients(model)
    seen: dict[str, Any] = {}
    loss_of(model, rank, 0, parts=True).backward()
    seen["first"] = full_gradients(model)
    loss_of(model, rank, 1, parts=True).backward()
    seen["accumulated"] = full_gradients(model)
    seen["local"] = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    seen["norms"] = [gradient_norm(model, norm) for norm in NORMS]

    before = [p.grad.clone() for p in model.parameters() if p.grad is not None]
    seen["clip norm"] = clip_gradients_norm(model, 7.5)
    seen["clipped"] = full_gradients(model)
    seen["clipped norm"] = gradient_norm(model)
    for parameter, gradient in zip([p for p in model.parameters() if p.grad is not None], before, strict=True):
        parameter.grad = gradient
    clip_gradients_norm(model, 1e9)
    seen["not clipped"] = full_gradients(model)
    model.uneven.grad = model.uneven.grad * float("nan") if rank == 0 else model.uneven.grad
    seen["nan"] = [gradient_norm(model, norm) for norm in NORMS]
    try:
        clip_gradients_norm(model, 1.0, error_if_nonfinite=True)
    except RuntimeError as error:
        seen["nan error"] = str(error)

    model.zero_grad()
    model.frozen.requires_grad_(True)
    (model.frozen * (rank + 1)).sum().backward()
    seen["thawed"] = full_gradients(model)

    model.zero_grad()
    if rank == 0:
        model.uneven.sum().backward()
    seen["on one rank only"] = full_gradients(model)

    for handle in handles:
        handle.remove()
    model.zero_grad()
    model.used_differently.sum().backward()
    seen["without hooks"] = full_gradients(model)["used_differently"]
    if world_size == 4:
        seen["two by two"] = two_by_two(rank)
    return seen


def two_by_two(rank: int) -> dict[str, Tensor]:
    """Two tensor-parallel pairs that train on different data; shared units make subgroups inside each pair."""
    pairs = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    columns = [dist.new_group([0, 2]), dist.new_group([1, 3])]
    group = TPGroup.of(pairs[rank // 2])
    model = cut(Original(), group, layouts(2))
    synchronize_gradients(model)
    assert len(average_gradients(model, columns[rank % 2])) == len(list(model.parameters()))
    assert average_gradients(model, dist.new_group([rank], use_local_synchronization=True)) == []
    for step in range(2):
        loss_of(model, rank % 2, 2 * step + rank // 2, parts=True).backward()
    return full_gradients(model)
