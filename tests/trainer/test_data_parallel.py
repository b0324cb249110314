"""Copies of the model that are cut over the data axis too (TP x FSDP2), and checkpoints between all sizes."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from copies import (
    CLIPPED,
    CLIPPING,
    FORMATS,
    HALF,
    HYBRID,
    NORM,
    SCALED,
    STEPS,
    Biased,
    OneKeyHead,
    Overflow,
    alone,
    assert_copies,
    four_ranks,
    scaling,
    trained,
    trained_on,
)
from distributed import PATIENCE
from selected import nightly, selected
from torch import nn
from trainer_ranks import run_trainer_ranks
from training import assert_parity

from lightning_autotp import AutoTPStrategy
from lightning_autotp.building.repeated_blocks import blocks_of_their_own


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("data_parallel")


@pytest.fixture(scope="module")
def four(request: pytest.FixtureRequest, folder: Path) -> list[dict[str, Any]]:
    """Two copies on two ranks each."""
    return run_trainer_ranks(four_ranks, 4, str(folder), [*selected(request, "case"), *selected(request, "name")])


@pytest.mark.parametrize("case", ["parity", "sequence parallel"])
def test_two_copies_on_two_ranks_equal_one_process(four: list[dict[str, Any]], case: str) -> None:
    assert_copies([seen[case] for seen in four], alone(four, case))


def test_biases_that_are_summed_stay_in_float32_beside_matrices_in_bfloat16(four: list[dict[str, Any]]) -> None:
    wanted = alone(four, "biases", kind=Biased, precision="bf16-mixed", max_steps=HALF)
    losses = torch.tensor([seen["biases"]["losses"] for seen in four]).mean(0)
    torch.testing.assert_close(losses, torch.tensor(wanted["losses"]), rtol=2**-8, atol=0)
    for seen in four:
        inside = {name: found for name, found in seen["biases"]["parameters"].items() if name.startswith("model.")}
        assert [name for name, (is_cut, _, _) in inside.items() if not is_cut] == []


@pytest.mark.parametrize("case", nightly(CLIPPING, ["by value"]))
def test_clipping_goes_over_both_axes(four: list[dict[str, Any]], case: str) -> None:
    _, options = CLIPPING[case]
    wanted = alone(four, case, **options)
    unclipped = alone(four, case, **{**options, "gradient_clip_val": None})
    assert max((wanted["weights"][n] - unclipped["weights"][n]).abs().max() for n in wanted["weights"]) > 1e-3
    assert_copies([seen[case] for seen in four], wanted)


def test_replicas_are_sharded_by_themselves(four: list[dict[str, Any]], folder: Path) -> None:
    wanted = alone(four, "hybrid", ckpt_path=folder / "2x2 file.ckpt", **NORM)
    assert len(wanted["losses"]) == STEPS - HALF
    losses = torch.tensor([seen["hybrid"]["losses"] for seen in four])
    assert len(losses.unique()) == losses.numel()  # each copy has data of its own
    held = [seen["hybrid"]["parameters"] for seen in four]
    for seen in four:
        assert_parity({**seen["hybrid"], "losses": losses.mean(0).tolist()}, wanted)
    for name, (is_cut, shape, elements) in held[0].items():
        assert [each[name][2] for each in held[2:]] == [each[name][2] for each in held[:2]]
        assert elements + held[1][name][2] == (1 if is_cut else 2) * torch.Size(shape).numel()
    assert_copies([seen["replicas"] for seen in four], alone(four, "replicas", **CLIPPED))


def test_parameters_are_cut_over_both_axes(four: list[dict[str, Any]]) -> None:
    assert four[0]["parity"]["managed"] == ["model", *(f"model.model.layers.{number}" for number in range(2))]
    held = [seen["parity"]["parameters"] for seen in four]
    for name, (is_cut, shape, elements) in held[0].items():
        copies = [held[rank][name][2] for rank in (0, 2)]
        if is_cut:
            assert sum(copies) == torch.Size(shape).numel()
            assert elements < torch.Size(shape).numel()
        else:  # outside the model
            assert name in ("temperature", "shift")
            assert copies == [torch.Size(shape).numel()] * 2


@pytest.mark.parametrize("name", nightly(FORMATS, ["file"]))
def test_a_run_goes_on_from_its_checkpoint(four: list[dict[str, Any]], folder: Path, name: str) -> None:
    case = f"resumed {name}"
    assert len(four[0][case]["losses"]) == STEPS - HALF
    assert_copies([seen[case] for seen in four], alone(four, case, ckpt_path=folder / "2x2 file.ckpt"))


def go_on(ranks: int, paths: list[str], save: str | None) -> list[dict[str, Any]]:
    """Resume from checkpoints, all but the first with a model that has weights already.

    One that writes a checkpoint of its own first half before has them from the beginning.
    """
    task = OneKeyHead("config")
    if save is not None:
        trained_on(task, AutoTPStrategy(ranks, 1, **FORMATS["directory"]), ranks, max_steps=HALF, save=save)
    return [trained_on(task, AutoTPStrategy(ranks, 1), ranks, ckpt_path=path) for path in paths]


@pytest.fixture(scope="module")
def other_sizes(four: list[dict[str, Any]], folder: Path) -> Callable[[int], list[list[dict[str, Any]]]]:
    """What a number of ranks sees from both formats on; it leaves a checkpoint of its own first half."""
    paths = [*(str(folder / f"2x2 {name}.ckpt") for name in reversed(FORMATS)), str(folder / HYBRID)]
    return cache(lambda ranks: run_trainer_ranks(go_on, ranks, ranks, paths, str(folder / f"{ranks}.ckpt")))


@pytest.mark.parametrize("ranks", nightly([1, 3, 4], [1, 4]))
def test_other_sizes_go_on_from_the_checkpoints(
    other_sizes: Callable[[int], list[list[dict[str, Any]]]], folder: Path, ranks: int
) -> None:
    """From (data, tensor) = (2, 2) to (1, 1), (1, 3) and (1, 4), which go on as one process does from either format.

    The same state was saved by replicas that had loaded it.
    """
    found = other_sizes(ranks)
    wanted = trained("auto", 1, ckpt_path=folder / "2x2 file.ckpt")
    assert len(wanted["losses"]) == STEPS - HALF
    for seen in found:
        for run in seen:
            assert_parity(run, wanted)


@pytest.mark.parametrize("sizes", nightly([(3,), (1, 4)], [(1, 4)]))
def test_two_ranks_go_on_from_the_checkpoints_of_other_sizes(
    other_sizes: Callable[[int], list[list[dict[str, Any]]]], folder: Path, sizes: tuple[int, ...]
) -> None:
    trained("auto", 1, max_steps=HALF, save=folder / "alone.ckpt")
    wanted = trained("auto", 1, ckpt_path=folder / "alone.ckpt")
    for size in sizes:
        other_sizes(size)
    paths = [str(folder / f"{name}.ckpt") for name in (*sizes, "alone")]  # a new model's are parts of a directory
    for seen in run_trainer_ranks(go_on, 2, 2, paths, None):
        for run in seen:
            assert_parity(run, wanted)


def test_all_ranks_skip_the_step_in_which_one_overflows(four: list[dict[str, Any]]) -> None:
    scales = four[0]["scaled"]["scales"]
    assert scales[:4] == [(256.0, {1}), (256.0, {2}), (128.0, {2}), (128.0, {3})]
    assert scales[5] == (256.0, {5})
    for seen in four:
        assert seen["scaled"]["scales"] == scales
        assert seen["scaler afterwards"] == (torch.amp.GradScaler, scales[-1][0])  # the plugin's own, as if it had been
    wanted = alone(four, "scaled", kind=Overflow, plugins=[scaling()], max_steps=SCALED)
    assert wanted["scales"] == scales
    # In half precision, in which FSDP2 gathers the blocks' matrices.
    dtype, names = four[0]["scaled"]["gathers"]
    assert dtype == torch.float16
    assert len(names) == 2 * 7
    torch.testing.assert_close(
        torch.tensor([four[0]["scaled"]["losses"], four[2]["scaled"]["losses"]]).mean(0),
        torch.tensor(wanted["losses"]), rtol=2e-3, atol=0,
    )  # fmt: skip


def test_all_groups_wait_equally_long(four: list[dict[str, Any]]) -> None:
    assert [seen["time limits"] for seen in four] == [{timedelta(seconds=PATIENCE)}] * 4


class Shared(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(2, 2)) for _ in range(3))
        self.layers[2][0].weight = nn.Parameter(torch.zeros(2, 2))
        self.head = nn.Linear(2, 2)
        self.head.weight = self.layers[2][0].weight
        self.few = nn.ModuleList([nn.Sequential(nn.Linear(2, 2))])
        self.leaves = nn.ModuleList(nn.Linear(2, 2) for _ in range(3))


def test_blocks_that_share_parameters_with_others_are_not_managed_alone() -> None:
    model = Shared()
    assert list(blocks_of_their_own(model)) == [model.layers[0], model.layers[1]]
