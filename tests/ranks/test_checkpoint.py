"""State leaves the ranks, and comes back to any number of them, as one process would have it."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from distributed import run_ranks
from local_model import Original, cut, layouts, local_model
from torch import Tensor, nn

from lightning_autotp.checkpoints.files import save_file
from lightning_autotp.checkpoints.state import (
    full_optimizer_state,
    full_state_dict,
    load_full_optimizer_state,
    load_full_state_dict,
)
from lightning_autotp.layouts.types import Shard
from lightning_autotp.parameters.state import ParameterTable, model_group, parallel_models
from lightning_autotp.ranks.group import TPGroup

STEPS = 3


class Holder(nn.Module):
    """A module that has the parallel model inside and parameters of its own."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model
        self.extra = nn.Parameter(torch.tensor([4.0, 5.0]))

    def get_extra_state(self) -> dict[str, int]:
        return {"seen": 17}

    def set_extra_state(self, state: dict[str, int]) -> None:
        self.restored = state


def optimizer_of(model: nn.Module) -> torch.optim.AdamW:
    """Two groups, so that the order of the groups' parameters is not the model's."""
    trainable = [
        parameter for parameter in model.parameters() if parameter.requires_grad and parameter.dtype.is_floating_point
    ]
    vectors = [parameter for parameter in trainable if parameter.dim() < 2]
    matrices = [parameter for parameter in trainable if parameter.dim() >= 2]
    return torch.optim.AdamW([{"params": vectors, "lr": 0.5}, {"params": matrices, "weight_decay": 0.25}], lr=0.125)


def train(model: nn.Module, optimizer: torch.optim.Optimizer, first: int, steps: int) -> None:
    """Elementwise training: each element of the original model gets its own gradient, wherever it is held."""
    table = ParameterTable(model) if parallel_models(model) else None
    for step in range(first, first + steps):
        for name, parameter in model.named_parameters():
            if parameter.requires_grad:
                meta = None if table is None else table.meta(parameter)
                shape = tuple(parameter.shape) if meta is None else meta.shape
                seed = sum(map(ord, name)) + 1000 * step
                whole = torch.randn(shape, generator=torch.Generator().manual_seed(seed))
                for dim, ownership in meta.layout.dims if meta is not None and isinstance(meta.layout, Shard) else ():
                    whole = whole.index_select(dim, torch.tensor(ownership.indices(meta.rank), dtype=torch.long))
                parameter.grad = whole.to(parameter.dtype)
        optimizer.step()


def single_process(steps: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    model = Holder(Original())
    optimizer = optimizer_of(model)
    train(model, optimizer, 0, steps)
    return model, optimizer


def held() -> tuple[Holder, nn.Module, TPGroup]:
    model, group = local_model()
    return Holder(model), model, group


def message(call: Any, *args: Any) -> str:
    """The error a call raises."""
    try:
        call(*args)
    except (RuntimeError, ValueError, TypeError) as error:
        return f"{type(error).__name__}: {error}"
    return "no error"


def on_every_rank(rank: int, world_size: int, directory: str) -> dict[str, Any]:
    seen: dict[str, Any] = {}
    holder, model, group = held()
    seen["inner"] = full_state_dict(model)
    optimizer = optimizer_of(holder)
    train(holder, optimizer, 0, STEPS)
    seen["state"] = full_state_dict(holder)
    seen["tied"] = seen["state"]["model.even"].data_ptr() == seen["state"]["model.head.weight"].data_ptr()
    seen["optimizer"] = full_optimizer_state(optimizer, holder)
    seen["not kept"] = [
        full_state_dict(holder, keep=rank == 0),
        full_optimizer_state(optimizer, holder, keep=rank == 0),
    ]

    # Into a fresh model, through a memory-mapped file: goes on as if nothing had happened.
    if rank == 0:
        save_file({"state": seen["state"], "optimizer": seen["optimizer"]}, Path(directory) / str(world_size) / "c.pt")
    dist.barrier()
    saved = torch.load(Path(directory) / str(world_size) / "c.pt", mmap=True, weights_only=True)
    fresh = Holder(cut(Original(), group, layouts(world_size)))
    for parameter in fresh.parameters():
        parameter.data.zero_()
    seen["keys"] = load_full_state_dict(fresh, saved["state"])
    seen["extra state"] = fresh.restored
    restored = optimizer_of(fresh)
    load_full_optimizer_state(restored, saved["optimizer"], fresh)
    train(fresh, restored, STEPS, STEPS)
    seen["resumed"] = full_state_dict(fresh)
    seen["local shapes"] = {name: tuple(parameter.shape) for name, parameter in fresh.named_parameters()}

    # From one process, whose optimizer state has no names.
    reference, its_optimizer = single_process(STEPS)
    load_full_state_dict(fresh, reference.state_dict())
    load_full_optimizer_state(restored, copy.deepcopy(its_optimizer.state_dict()), fresh)
    train(fresh, restored, STEPS, STEPS)
    seen["from one process"] = full_state_dict(fresh)

    seen["named"] = reordered(fresh, saved["optimizer"])
    before = full_state_dict(fresh)
    wrong = {**saved["state"], "model.uneven": torch.zeros(8), "stranger": torch.zeros(1), "model.low": "text"}
    del wrong["extra"], wrong["model.head.weight"]
    seen["misfit"] = message(load_full_state_dict, fresh, wrong)
    seen["lenient misfit"] = message(load_full_state_dict, fresh, wrong, False)
    seen["unchanged"] = all(
        torch.equal(before[name], value) for name, value in full_state_dict(fresh).items() if isinstance(value, Tensor)
    )
    lenient = {"model.scalar": torch.tensor(3.0), "stranger": torch.zeros(1)}
    seen["lenient"] = load_full_state_dict(fresh, lenient, strict=False), full_state_dict(fresh)["model.scalar"]
    one_group = torch.optim.AdamW(fresh.parameters())
    seen["other groups"] = message(load_full_optimizer_state, one_group, saved["optimizer"], fresh)
    bad = copy.deepcopy(seen["optimizer"])
    named_state(bad)["model.uneven"]["exp_avg"] = torch.zeros(8)
    seen["bad moment"] = message(load_full_optimizer_state, optimizer_of(fresh), bad, fresh)
    factored = torch.optim.Adafactor([fresh.model.inner])
    fresh.model.inner.grad = torch.ones_like(fresh.model.inner)
    factored.step()
    seen["factored"] = message(full_optimizer_state, factored, fresh)
    return seen


def reordered(model: nn.Module, state: dict[str, Any]) -> bool:
    """Whether a state with names finds its parameters when the groups list them in another order."""
    optimizer = optimizer_of(model)
    for group in optimizer.param_groups:
        group["params"].reverse()
    load_full_optimizer_state(optimizer, state, model)
    again = full_optimizer_state(optimizer, model)
    theirs = named_state(state)
    ours = named_state(again)
    return all(torch.equal(values["exp_avg"], theirs[name]["exp_avg"]) for name, values in ours.items())


def named_state(state: dict[str, Any]) -> dict[str, dict[str, Tensor]]:
    """Optimizer state by parameter name."""
    numbers = {
        number: name
        for group in state["param_groups"]
        for number, name in zip(group["params"], group["param_names"], strict=True)
    }
    return {numbers[number]: values for number, values in state["state"].items()}


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the ranks write."""
    return tmp_path_factory.mktemp("checkpoints")


@pytest.fixture(scope="module", params=[4])
def ranks(request: pytest.FixtureRequest, directory: Path) -> list[dict[str, Any]]:
    """What each rank saw."""
    return run_ranks(on_every_rank, request.param, str(directory))


def assert_same_state(found: dict[str, Any], wanted: dict[str, Any], exactly: bool = True) -> None:
    assert list(found) == list(wanted)
    for name, value in wanted.items():
        if not isinstance(value, Tensor):
            assert found[name] == value
        elif exactly:
            assert found[name].dtype == value.dtype, name
            assert torch.equal(found[name], value), name
        else:
            torch.testing.assert_close(found[name], value, rtol=1e-6, atol=1e-6)


def test_the_whole_state_is_the_original_one(ranks: list[dict[str, Any]]) -> None:
    for seen in ranks:
        assert_same_state(seen["inner"], Original().state_dict())
        assert "cache" not in seen["inner"]
        assert seen["tied"]


def test_training_the_parts_trains_the_whole(ranks: list[dict[str, Any]]) -> None:
    model, optimizer = single_process(STEPS)
    for seen in ranks:
        assert_same_state(seen["state"], model.state_dict())
        assert seen["optimizer"].keys() == optimizer.state_dict().keys()
        wanted = optimizer.state_dict()
        assert seen["optimizer"]["state"].keys() == wanted["state"].keys()
        for number, values in wanted["state"].items():
            assert_same_state(seen["optimizer"]["state"][number], values)
        for group, other in zip(seen["optimizer"]["param_groups"], wanted["param_groups"], strict=True):
            names = group.pop("param_names")
            assert group == other
            assert len(names) == len(group["params"])
            group["param_names"] = names


def test_one_process_loads_what_the_ranks_saved(ranks: list[dict[str, Any]]) -> None:
    model = Holder(Original())
    model.load_state_dict(ranks[0]["state"])
    optimizer = optimizer_of(model)
    optimizer.load_state_dict(ranks[0]["optimizer"])
    train(model, optimizer, STEPS, STEPS)
    assert_same_state(model.state_dict(), single_process(2 * STEPS)[0].state_dict())


def test_a_resumed_run_goes_on_as_if_never_stopped(ranks: list[dict[str, Any]]) -> None:
    wanted = single_process(2 * STEPS)[0].state_dict()
    for seen in ranks:
        assert_same_state(seen["resumed"], wanted)
        assert_same_state(seen["from one process"], wanted)
        assert seen["keys"] == ([], [])
        assert seen["extra state"] == {"seen": 17}
        assert seen["named"]


def test_the_ranks_hold_parts_only(ranks: list[dict[str, Any]]) -> None:
    rows = [seen["local shapes"]["model.even"][0] for seen in ranks]
    assert sum(rows) == 12
    assert [seen["local shapes"]["model.few"] for seen in ranks][2:] == [(0,)] * (len(ranks) - 2)


def test_only_who_keeps_the_result_has_it(ranks: list[dict[str, Any]]) -> None:
    assert_same_state(ranks[0]["not kept"][0], ranks[0]["state"])
    for seen in ranks[1:]:
        assert seen["not kept"][0] == {}
        assert seen["not kept"][1]["state"] == {}


def other_size(rank: int, world_size: int, path: str) -> dict[str, Tensor]:
    saved = torch.load(path, mmap=True, weights_only=True)
    holder, _, _ = held()
    load_full_state_dict(holder, saved["state"])
    optimizer = optimizer_of(holder)
    load_full_optimizer_state(optimizer, saved["optimizer"], holder)
    train(holder, optimizer, STEPS, STEPS)
    return full_state_dict(holder)


@pytest.mark.usefixtures("ranks")
def test_a_checkpoint_of_one_size_loads_at_another(directory: Path) -> None:
    wanted = single_process(2 * STEPS)[0].state_dict()
    for found in run_ranks(other_size, 3, str(directory / "4" / "c.pt")):
        assert_same_state(found, wanted)


def test_a_misfit_names_everything_and_loads_nothing(ranks: list[dict[str, Any]]) -> None:
    for seen in ranks:
        assert seen["misfit"].splitlines() == [
            "RuntimeError: the state dict does not fit Holder (5 problems):",
            "  missing: extra",
            "  missing: model.head.weight",
            "  unexpected: stranger",
            "  wrong shape: model.low is str, the model has (5,)",
            "  wrong shape: model.uneven is (8,), the model has (7,)",
        ]
        assert "(2 problems)" in seen["lenient misfit"]
        assert seen["unchanged"]


def test_a_lenient_load_says_what_it_skipped(ranks: list[dict[str, Any]]) -> None:
    for seen in ranks:
        keys, scalar = seen["lenient"]
        assert keys.unexpected == ["stranger"]
        assert "model.even" in keys.missing
        assert "model.scalar" not in keys.missing
        assert scalar == 3


def test_optimizer_states_that_do_not_fit_are_refused(ranks: list[dict[str, Any]]) -> None:
    for seen in ranks:
        assert "configure_optimizers() must build the same groups" in seen["other groups"]
        assert (
            "the optimizer's state 'exp_avg' of model.uneven has shape (8,), the parameter (7,)" in seen["bad moment"]
        )
        assert "of model.inner has shape" in seen["factored"]
        assert "save_weights_only=True" in seen["factored"]


def test_a_model_that_is_not_parallel_is_named() -> None:
    with pytest.raises(RuntimeError, match="Linear has no parallel model in it"):
        model_group(nn.Linear(2, 2))
