"""Copies of the model that are cut over the data axis too (TP x FSDP2), and checkpoints between all sizes."""

from __future__ import annotations

import os
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from distributed import PATIENCE, time_limits
from lightning.pytorch.plugins import MixedPrecision
from test_strategy import Task, assert_parity, blocks, fit
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.utils.data import DataLoader
from trainer_ranks import run_trainer_ranks

from lightning_autotp import AutoTPStrategy
from lightning_autotp.gradients.data_parallel import repeated_blocks

STEPS = 8


class OneKeyHead(Task):
    """One key/value head, so that the ranks of a group share it; tied embeddings; a scalar and a layer outside."""

    def build(self) -> Any:
        from transformers import AutoModelForCausalLM, LlamaConfig

        config = LlamaConfig(
            vocab_size=67, hidden_size=32, intermediate_size=50, num_hidden_layers=3, num_attention_heads=4,
            num_key_value_heads=1, tie_word_embeddings=True,
        )  # fmt: skip
        self.temperature = nn.Parameter(torch.tensor(1.5))
        self.shift = nn.Parameter(torch.tensor([0.5, 0.25, 0.125]))
        return AutoModelForCausalLM.from_config(config)

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        return super().training_step(batch, batch_idx) * self.temperature * self.shift.sum()

    def on_fit_end(self) -> None:
        self.seen["parameters"] = {
            name: (isinstance(parameter, DTensor), tuple(parameter.shape), _elements(parameter))
            for name, parameter in self.named_parameters()
        }
        self.seen["managed"] = [name for name, module in self.named_modules() if isinstance(module, FSDPModule)]


def _elements(parameter: Tensor) -> int:
    return (parameter.to_local() if isinstance(parameter, DTensor) else parameter).numel()


def trained(strategy: Any, devices: int, kind: type[Task] = OneKeyHead, data: Any = None, **options: Any) -> Any:
    L.seed_everything(3, verbose=False)
    task = kind("config", options.pop("learning_rate", 1e-3), options.pop("optimizer", "AdamW"))
    data = DataLoader(blocks(), batch_size=5) if data is None else data  # type: ignore[arg-type]
    return fit(strategy, devices, task, data=data, **{"max_steps": STEPS, **options})


class InTurn:
    """A loader of one epoch that goes on where it stopped, whatever the Trainer takes for the beginning of an epoch."""

    def __init__(self, batches: list[Any]) -> None:
        self.batches, self.rest = batches, iter(batches)

    def __iter__(self) -> Iterator[Any]:
        return self.rest

    def __len__(self) -> int:
        return len(self.batches)


def alone(four: list[dict[str, Any]], case: str, strategy: Any = "auto", devices: int = 1, **options: Any) -> Any:
    """One process's run on the batches that the two copies saw, put together."""
    pairs = zip(four[0][case]["batches"], four[2][case]["batches"], strict=True)
    batches = [{"input_ids": torch.cat(pair), "labels": torch.cat(pair)} for pair in pairs]
    return trained(strategy, devices, data=InTurn(batches), **options)


CLIPPED = {
    "optimizer": "SGD", "learning_rate": 0.3, "gradient_clip_val": 0.2, "accumulate_grad_batches": 2, "max_steps": 4,
}  # fmt: skip
BY_VALUE = {**CLIPPED, "gradient_clip_val": 1e-3, "gradient_clip_algorithm": "value", "accumulate_grad_batches": 1}


def scaling() -> MixedPrecision:
    return MixedPrecision("16-mixed", "cpu", torch.amp.GradScaler("cpu", init_scale=2.0**8, growth_interval=3))


class Overflow(OneKeyHead):
    """In the third step a gradient overflows, on the last rank only."""

    def on_after_backward(self) -> None:
        rank = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
        gradient = self.model.model.layers[1].mlp.up_proj.weight.grad
        if self.trainer.global_step == 2 and not self.seen.get("planted") and rank[0] == rank[1] - 1:
            (gradient.to_local() if isinstance(gradient, DTensor) else gradient)[0, 0] = torch.inf
        self.seen["planted"] = self.trainer.global_step >= 2

    def on_train_batch_end(self, *_: Any) -> None:
        scale = self.trainer.precision_plugin.scaler.get_scale()
        steps = {int(state["step"]) for state in self.trainer.optimizers[0].state.values()}
        self.seen.setdefault("scales", []).append((scale, steps))


FORMATS: dict[str, dict[str, Any]] = {"file": {}, "directory": {"save_distributed_checkpoint": True}}
HALF = STEPS // 2


def four_ranks(directory: str) -> dict[str, Any]:
    folder, seen = Path(directory), {}
    seen["parity"] = trained(AutoTPStrategy(2, 2), 4)
    seen["sequence parallel"] = trained(AutoTPStrategy(2, 2, sequence_parallel=True), 4)
    seen["clipped"] = trained(AutoTPStrategy(2, 2), 4, **CLIPPED)
    seen["by value"] = trained(AutoTPStrategy(2, 2), 4, **BY_VALUE)
    for name, options in FORMATS.items():
        trained(AutoTPStrategy(2, 2, **options), 4, max_steps=HALF, save=folder / f"2x2 {name}.ckpt")
        seen[f"resumed {name}"] = trained(AutoTPStrategy(2, 2), 4, ckpt_path=folder / f"2x2 {name}.ckpt")
    scaled = scaling()
    seen["scaled"] = trained(AutoTPStrategy(2, 2), 4, Overflow, plugins=[scaled])
    seen["scaler afterwards"] = type(scaled.scaler), scaled.scaler.get_scale()  # type: ignore[union-attr]
    seen["time limits"] = time_limits()
    return seen


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("data_parallel")


@pytest.fixture(scope="module")
def four(folder: Path) -> list[dict[str, Any]]:
    """Two copies on two ranks each."""
    return run_trainer_ranks(four_ranks, 4, str(folder))


def assert_copies(found: list[dict[str, Any]], wanted: dict[str, Any]) -> None:
    """The copies' losses average to those of one process; gradients and weights are its."""
    losses = torch.tensor([seen["losses"] for seen in found])
    assert torch.equal(losses[0], losses[1])
    assert torch.equal(losses[2], losses[3])
    assert not torch.equal(losses[0], losses[2])
    for seen in found:
        assert_parity({**seen, "losses": losses.mean(0).tolist()}, wanted)


@pytest.mark.parametrize("case", ["parity", "sequence parallel"])
def test_two_copies_on_two_ranks_equal_one_process(four: list[dict[str, Any]], case: str) -> None:
    assert_copies([seen[case] for seen in four], alone(four, case))


@pytest.mark.parametrize(("case", "options"), [("clipped", CLIPPED), ("by value", BY_VALUE)])
def test_clipping_goes_over_both_axes(four: list[dict[str, Any]], case: str, options: dict[str, Any]) -> None:
    wanted = alone(four, case, **options)
    unclipped = alone(four, case, **{**options, "gradient_clip_val": None})
    assert max((wanted["weights"][n] - unclipped["weights"][n]).abs().max() for n in wanted["weights"]) > 1e-3
    assert_copies([seen[case] for seen in four], wanted)


def test_parameters_are_cut_over_both_axes(four: list[dict[str, Any]]) -> None:
    assert four[0]["parity"]["managed"] == ["model", *(f"model.model.layers.{number}" for number in range(3))]
    held = [seen["parity"]["parameters"] for seen in four]
    for name, (is_cut, shape, elements) in held[0].items():
        copies = [held[rank][name][2] for rank in (0, 2)]
        if is_cut:
            assert sum(copies) == torch.Size(shape).numel()
            assert elements < torch.Size(shape).numel()
        else:  # outside the model
            assert name in ("temperature", "shift")
            assert copies == [torch.Size(shape).numel()] * 2


@pytest.mark.parametrize("name", FORMATS)
def test_a_run_goes_on_from_its_checkpoint(four: list[dict[str, Any]], folder: Path, name: str) -> None:
    case = f"resumed {name}"
    assert len(four[0][case]["losses"]) == STEPS - HALF
    assert_copies([seen[case] for seen in four], alone(four, case, ckpt_path=folder / "2x2 file.ckpt"))


@pytest.mark.parametrize("ranks", [1, 3, 4])
def test_other_sizes_go_on_from_the_checkpoints(four: list[dict[str, Any]], folder: Path, ranks: int) -> None:
    """From (data, tensor) = (2, 2) to (1, 1), (1, 3) and (1, 4), which go on as one process does from either format."""
    path = folder / "2x2 file.ckpt"
    wanted = trained("auto", 1, ckpt_path=path)
    assert len(wanted["losses"]) == STEPS - HALF
    found = run_trainer_ranks(go_on, ranks, ranks, [str(folder / f"2x2 {name}.ckpt") for name in FORMATS], None)
    for seen in found:
        for run in seen:
            assert_parity(run, wanted)


def test_two_ranks_go_on_from_the_checkpoints_of_other_sizes(folder: Path) -> None:
    trained("auto", 1, max_steps=HALF, save=folder / "alone.ckpt")
    wanted = trained("auto", 1, ckpt_path=folder / "alone.ckpt")
    paths = [str(folder / "alone.ckpt")]
    for ranks in (1, 3, 4):
        paths.append(str(folder / f"{ranks}.ckpt"))
        run_trainer_ranks(go_on, ranks, ranks, [], paths[-1])
    for seen in run_trainer_ranks(go_on, 2, 2, paths, None):
        for run in seen:
            assert_parity(run, wanted)


def go_on(ranks: int, paths: list[str], save: str | None) -> list[dict[str, Any]]:
    """Resume from checkpoints, and write one of the first half."""
    if save is not None:
        trained(AutoTPStrategy(ranks, 1, **FORMATS["directory"]), ranks, max_steps=HALF, save=save)
    return [trained(AutoTPStrategy(ranks, 1), ranks, ckpt_path=path) for path in paths]


def test_all_ranks_skip_the_step_in_which_one_overflows(four: list[dict[str, Any]]) -> None:
    scales = four[0]["scaled"]["scales"]
    assert scales[:4] == [(256.0, {1}), (256.0, {2}), (128.0, {2}), (128.0, {3})]
    assert scales[5] == (256.0, {5})
    for seen in four:
        assert seen["scaled"]["scales"] == scales
        assert seen["scaler afterwards"] == (torch.amp.GradScaler, scales[-1][0])  # the plugin's own, as if it had been
    wanted = alone(four, "scaled", kind=Overflow, plugins=[scaling()])
    assert wanted["scales"] == scales
    # In half precision.
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
    assert list(repeated_blocks(model)) == [model.layers[0], model.layers[1]]
