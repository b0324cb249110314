"""Gradients of local models, summed, measured, clipped and put together, against one process."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from distributed import PATIENCE, run_ranks, time_limits
from expected_norms import NORMS, expected_gradients, local, loss_of, on_every_rank
from local_model import Original, cut, layouts
from torch import Tensor, nn

from lightning_autotp.gradients.norms import full_gradients, gradient_norm
from lightning_autotp.gradients.sums import synchronize_gradients
from lightning_autotp.ranks.group import TPGroup, new_group


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
