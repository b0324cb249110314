"""Gradients of local models, summed, measured, clipped and put together, against one process."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from distributed import PATIENCE, run_ranks, time_limits
from local_model import Original, cut, layouts, local_model
from torch import Tensor, nn

from lightning_autotp.gradients.norms import clip_gradients_norm, full_gradients, gradient_norm
from lightning_autotp.gradients.sums import average_gradients, synchronize_gradients
from lightning_autotp.layouts.types import Layout, Shard
from lightning_autotp.parameters.state import parallel_state
from lightning_autotp.ranks.group import TPGroup, new_group

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


@pytest.fixture(scope="module", params=[3, 4])
def ranks(request: pytest.FixtureRequest) -> list[dict[str, Any]]:
    """What each rank saw."""
    return run_ranks(on_every_rank, request.param)


def assert_same(found: dict[str, Tensor], wanted: dict[str, Tensor], **tolerance: float) -> None:
    assert found.keys() == wanted.keys()
    for name, value in wanted.items():
        torch.testing.assert_close(
            found[name], value, **(tolerance or {"rtol": 0, "atol": 0}), msg=lambda m, n=name: f"{n}: {m}"
        )


def test_shared_elements_get_the_sum_of_exactly_their_owners(ranks: list[dict[str, Any]]) -> None:
    for seen in ranks:
        assert_same(seen["first"], expected_gradients(len(ranks), 1))


def test_accumulation_sums_each_backward_once(ranks: list[dict[str, Any]]) -> None:
    for seen in ranks:
        assert_same(seen["accumulated"], expected_gradients(len(ranks), 2))


def test_every_owner_has_the_whole_gradient_of_what_it_holds(ranks: list[dict[str, Any]]) -> None:
    wanted = expected_gradients(len(ranks), 2)
    for rank, seen in enumerate(ranks):
        for name, gradient in seen["local"].items():
            assert torch.equal(gradient, local(wanted[name], layouts(len(ranks))[name], rank)), name


def test_the_sums_are_needed(ranks: list[dict[str, Any]]) -> None:
    assert all(torch.equal(seen["without hooks"], torch.ones(3)) for seen in ranks)


def single_process(ranks: int) -> list[nn.Parameter]:
    """The model's parameters with their gradients, in fp32 (torch rounds the norm of a bf16 tensor to bf16)."""
    wanted = expected_gradients(ranks, 2)
    parameters = []
    for name, parameter in Original().named_parameters():
        if name in wanted:
            parameters.append(nn.Parameter(parameter.detach().float()))
            parameters[-1].grad = wanted[name].float()
    return parameters


def test_norms_count_every_element_once(ranks: list[dict[str, Any]]) -> None:
    for position, norm_type in enumerate(NORMS):
        wanted = torch.nn.utils.get_total_norm([p.grad for p in single_process(len(ranks))], norm_type)
        for seen in ranks:
            torch.testing.assert_close(seen["norms"][position], wanted, rtol=1e-6, atol=0)
            assert torch.equal(seen["norms"][position], ranks[0]["norms"][position])


def test_clipping_equals_torch(ranks: list[dict[str, Any]]) -> None:
    parameters = single_process(len(ranks))
    unclipped = [parameter.grad.clone() for parameter in parameters]
    norm = torch.nn.utils.clip_grad_norm_(parameters, 7.5)
    names = [name for name, parameter in Original().named_parameters() if parameter.requires_grad]
    wanted = dict(zip(names, [parameter.grad for parameter in parameters], strict=True))
    wanted["head.weight"] = wanted["even"]
    assert norm > 75  # clipping changes something
    for seen in ranks:
        torch.testing.assert_close(seen["clip norm"], norm, rtol=1e-6, atol=0)
        torch.testing.assert_close(seen["clipped norm"], torch.tensor(7.5), rtol=1e-3, atol=0)
        torch.testing.assert_close(seen["clipped"].pop("low").float(), wanted["low"], rtol=2**-8, atol=0)
        assert_same(seen["clipped"], {n: v for n, v in wanted.items() if n != "low"}, rtol=1e-5, atol=0)
        found = {n: seen["not clipped"][n].float() for n in names}
        assert_same(found, dict(zip(names, unclipped, strict=True)))


def test_a_nan_on_one_rank_is_seen_by_all(ranks: list[dict[str, Any]]) -> None:
    for seen in ranks:
        assert all(norm.isnan() for norm in seen["nan"])
        assert "is nan: they cannot be clipped" in seen["nan error"]


def test_a_parameter_thawed_later_is_summed_too(ranks: list[dict[str, Any]]) -> None:
    total = sum(range(1, len(ranks) + 1))
    for seen in ranks:
        assert_same(seen["thawed"], {"frozen": torch.full((3,), float(total))})


def test_a_gradient_that_only_one_rank_has_is_no_hang(ranks: list[dict[str, Any]]) -> None:
    for seen in ranks:
        assert seen["on one rank only"].keys() == {"uneven"}
        assert 0 < seen["on one rank only"]["uneven"].sum() < 7


@pytest.mark.parametrize("norm_type", [0.0, -1.0, float("nan")])
def test_a_norm_must_be_positive(norm_type: float) -> None:
    with pytest.raises(ValueError, match="positive one or infinity"):
        gradient_norm(cut(Original(), TPGroup("", 0, 2), layouts(2)), norm_type)


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


def three_in_a_pair_of_threes(rank: int, world_size: int) -> dict[str, Tensor]:
    """Two groups of three side by side: their subgroups are made without each other, and wait as long as all ranks."""
    trios = [new_group([0, 1, 2]), new_group([3, 4, 5])]
    group = TPGroup.of(trios[rank // 3])
    model = cut(Original(), group, layouts(3))
    synchronize_gradients(model)
    loss_of(model, rank % 3, rank // 3, parts=True).backward()
    assert len(dist.distributed_c10d._world.pg_map) > 2
    assert time_limits() == {timedelta(seconds=PATIENCE)}
    return full_gradients(model)


@pytest.mark.parametrize("ranks", [4], indirect=True)
def test_data_parallel_groups_average(ranks: list[dict[str, Any]]) -> None:
    wanted = {name: gradient / 2 for name, gradient in expected_gradients(2, 4).items()}
    for seen in ranks:
        assert_same(seen["two by two"], wanted)


def test_groups_side_by_side_do_not_mix() -> None:
    found = run_ranks(three_in_a_pair_of_threes, 6)
    both = expected_gradients(3, 2)
    for first, second in zip(found[:3], found[3:], strict=True):
        assert_same(first, expected_gradients(3, 1))
        assert_same({name: first[name] + second[name] for name in first}, both)
