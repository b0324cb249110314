"""``Fabric(strategy="autotp")`` in real processes, against Fabric in one process."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from distributed import PATIENCE, SCRIPT_ENVIRONMENT
from fabric_loop import (
    CLIPS,
    HALF,
    IDS,
    STATEFUL,
    assert_close,
    assert_same,
    fabric_of,
    lightning_module,
    order_of,
    own_loss,
    run,
    runs,
    two_ranks,
    whole_matrices,
    written,
)
from failures import check_one_error
from lightning.fabric import seed_everything
from trainer_ranks import run_trainer_ranks
from training import drawn
from transformers import AutoModelForCausalLM

from lightning_autotp import (
    AutoTPFabricStrategy,
    export_checkpoint,
)
from lightning_autotp.cli import check, consolidate
from lightning_autotp.parallel.logits import VocabParallelLogits


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("fabric")


@pytest.fixture(scope="module")
def alone(folder: Path) -> dict[str, Any]:
    """Plain Fabric in this process."""
    fabric = fabric_of()
    seen = runs(fabric, folder / "half at 1.ckpt")
    seen["own"] = own_loss(fabric)
    seen["module"] = lightning_module(fabric)
    seen["with state"] = run(fabric, **STATEFUL)
    seen["order"] = order_of(fabric)
    return seen


@pytest.fixture(scope="module")
def found(alone: dict[str, Any], folder: Path) -> list[dict[str, Any]]:
    return run_trainer_ranks(two_ranks, 2, str(folder))


def copies(directory: str, tensor_ranks: int, clips: list[str]) -> dict[str, Any]:
    """Two copies of the model; gradients of the first batch of a step are not averaged before the second's."""
    fabric = fabric_of(AutoTPFabricStrategy(tensor_ranks, 2), 2 * tensor_ranks)
    fabric.launch()
    save = Path(directory) / "copies.ckpt"
    seen = {name: run(fabric, CLIPS[name], kind="SGD", save=save) for name in clips}
    seen["reduced"] = [fabric.all_reduce(torch.tensor(2.0), reduce_op=how).item() for how in ("sum", "mean")]
    seen["sampled"] = fabric.strategy.distributed_sampler_kwargs
    seen["written"] = written(fabric)
    return seen


@pytest.mark.parametrize(
    ("tensor_ranks", "clips"),
    [
        (1, ["norm"]),
        pytest.param(1, ["value"], marks=pytest.mark.nightly),  # no copy asks another for it
        pytest.param(2, [*CLIPS], marks=pytest.mark.nightly),
    ],
)
def test_copies_on_different_data(tensor_ranks: int, clips: list[str], tmp_path: Path) -> None:
    found = run_trainer_ranks(copies, 2 * tensor_ranks, str(tmp_path), tensor_ranks, clips)
    first, second = found[0], found[tensor_ranks]
    for name in clips:
        pairs = list(zip(first[name]["batches"], second[name]["batches"], strict=True))
        assert not any(torch.equal(*pair) for pair in pairs)
        data = [{"input_ids": torch.cat(pair), "labels": torch.cat(pair)} for pair in pairs]
        wanted = run(fabric_of(), CLIPS[name], kind="SGD", data=data)
        losses = torch.tensor([seen[name]["losses"] for seen in (first, second)])
        for seen in found:
            assert_same({**seen[name], "losses": losses.mean(0).tolist()}, wanted)
    assert_close(torch.load(tmp_path / "copies.ckpt")["model"], wanted["weights"])
    text = written(fabric_of())
    assert len(text[:, -4:].unique()) > 3
    for number, seen in enumerate(found):
        assert seen["reduced"] == [4, 2]
        assert seen["sampled"] == {"num_replicas": 2, "rank": number // tensor_ranks}
        assert torch.equal(seen["written"], text)


SCRIPT = """
import sys

from lightning import seed_everything
from fabric_loop import fabric_of, run
from training import drawn

seed_everything(8)
drawn()
fabric = fabric_of("autotp", 2)
fabric.launch()
print(f"then {drawn()}\\n", end="", flush=True)
found = run(fabric, steps=1)["losses"]
print(f"losses {found}\\n", end="", flush=True)  # in one piece: both ranks write to one pipe
if "fail" in sys.argv and fabric.global_rank == 1:
    raise ArithmeticError("planted")
if "fail" in sys.argv:
    fabric.barrier()
"""


@pytest.mark.nightly  # by day one of test_fabric_options.py starts its ranks, too, and ends with an error
@pytest.mark.parametrize("fails", [False, True])
def test_a_script_starts_its_ranks_and_ends_with_them(fails: bool, tmp_path: Path, alone: dict[str, Any]) -> None:
    (tmp_path / "script.py").write_text(SCRIPT)
    ended = subprocess.run(
        [sys.executable, str(tmp_path / "script.py"), *["fail"] * fails],
        env={**os.environ, **SCRIPT_ENVIRONMENT}, capture_output=True, text=True, timeout=PATIENCE, check=False,
    )  # fmt: skip
    losses = [line for line in ended.stdout.splitlines() if line.startswith("losses")]
    assert losses == [losses[0]] * 2, ended.stderr
    seed_everything(8)
    drawn()
    assert [line for line in ended.stdout.splitlines() if line.startswith("then")] == 2 * [f"then {drawn()}"]
    assert (ended.returncode == 0) is not fails, ended.stderr
    if fails:
        check_one_error(ended.stderr, 1, "failed: ArithmeticError: planted")


@pytest.mark.parametrize("case", [*CLIPS, "with state"])
def test_a_loop_is_that_of_one_process(case: str, alone: dict[str, Any], found: list[dict[str, Any]]) -> None:
    for seen in found:
        assert_same(seen[case], alone[case])
        assert all(map(torch.equal, seen[case]["batches"], alone[case]["batches"]))


def test_a_start_says_what_the_trainers_does(alone: dict[str, Any], found: list[dict[str, Any]]) -> None:
    first, other = (seen["norm"]["said"] for seen in found)
    assert alone["norm"]["said"] == other == []
    *phases, planned, divided, filled = first
    model = "LlamaForCausalLM"
    assert phases == [
        f"lightning_autotp: {what}"
        for what in (
            f"tracing {model}",
            f"choosing a plan for {model}",
            f"proving that the ranks compute what {model} does",
        )
    ]
    assert planned.startswith(
        f"lightning_autotp: planned {model} for 2 tensor-parallel ranks, and proved that together they compute what the"
        " original model does, in N, traced"
    )
    assert divided.startswith(
        f"lightning_autotp: {model} on 2 ranks: N of the FLOPs and N of the parameters are divided"
    )
    assert filled == f"lightning_autotp: each rank's part of {model}'s weights was initialized in N"


def test_clipping_does_something(alone: dict[str, Any]) -> None:
    assert min(alone["norm"]["norms"]) > 2 * CLIPS["norm"]["max_norm"]
    assert max(gradient.abs().max() for gradient in alone["value"]["gradients"][0].values()) > 1e-2


@pytest.mark.parametrize("file", ["half at 1.ckpt", "half at 2.ckpt", "half in parts"])
def test_checkpoints_load_at_any_size(
    file: str, alone: dict[str, Any], found: list[dict[str, Any]], folder: Path
) -> None:
    """One of plain Fabric, too; and plain Fabric loads the file that two ranks wrote."""
    wanted = alone["norm"]
    loaded = [seen[file] for seen in found]
    if file == "half at 2.ckpt":
        loaded.append(run(fabric_of(), load=folder / file, skip=HALF))
    if file == "half in parts":
        consolidate(folder / file, folder / "consolidated.ckpt")
        loaded.append(run(fabric_of(), load=folder / "consolidated.ckpt", skip=HALF))
    for seen in loaded:
        step, rest = seen["loaded"]
        assert step == HALF
        assert rest["notes"] == {"seed": 3}
        assert_close(seen["weights"], wanted["weights"])
        torch.testing.assert_close(
            torch.tensor(seen["losses"]), torch.tensor(wanted["losses"][2 * HALF :]), rtol=1e-5, atol=0
        )


def test_whole_states_are_loaded(found: list[dict[str, Any]], tmp_path: Path) -> None:
    wanted = whole_matrices(fabric_of(), tmp_path / "whole matrices.ckpt")
    for seen in found:
        assert_close(seen["whole matrices"], wanted)


def test_a_checkpoint_is_exported_and_checked(found: list[dict[str, Any]], folder: Path) -> None:
    for name in ("half at 2.ckpt", "half in parts"):
        check(folder / name)
        export_checkpoint(folder / name, folder / f"exported {name}")
        exported = AutoModelForCausalLM.from_pretrained(folder / f"exported {name}").state_dict()
        saved = found[0]["everything"]["model"]
        assert exported.keys() == saved.keys()
        assert all(torch.allclose(exported[key], saved[key], atol=1e-5) for key in exported)
    assert len(AutoModelForCausalLM.from_pretrained(folder / "exported").state_dict()) == len(saved)


def test_what_is_loaded_by_itself(found: list[dict[str, Any]]) -> None:
    for seen in found:
        assert seen["alike"] == (True, 2, 67)
        assert_close(seen["raw"], found[0]["plain"])
        assert seen["everything"].keys() == {"model", "optimizer", "step", "notes"}


def test_a_loss_of_logits(alone: dict[str, Any], found: list[dict[str, Any]]) -> None:
    for seen in found:
        for case in ("own", "copied"):
            assert_same(seen[case], alone["own"])
            assert set(seen[case]["kinds"]) == {VocabParallelLogits}


def test_the_model_of_a_lightning_module(alone: dict[str, Any], found: list[dict[str, Any]]) -> None:
    assert not alone["module"]["parallel"]
    for seen in found:
        assert seen["module"]["parallel"]
        assert_same(seen["module"], alone["module"])


def of_one(file: str) -> dict[str, Any]:
    return fabric_of("autotp", 1).launch(run, load=file, skip=HALF)


def test_one_rank(found: list[dict[str, Any]], alone: dict[str, Any], folder: Path) -> None:
    (seen,) = run_trainer_ranks(of_one, 1, str(folder / "half in parts"))
    assert_close(seen["weights"], alone["norm"]["weights"])


def test_data_are_read_alike(alone: dict[str, Any], found: list[dict[str, Any]]) -> None:
    first, second = found
    assert alone["order"][:12] != alone["order"][12:]
    for seen in found:
        assert seen["order"] == seen["read once"] == alone["order"]
        assert seen["reduced"] == [2, 2]
        assert seen["decisions"] == [False, True]
    assert all(map(torch.equal, first["workers"], second["workers"]))
    assert not torch.equal(first["workers"][0], IDS[:10])


def test_a_report_has_what_a_step_takes(found: list[dict[str, Any]]) -> None:
    for seen in found:
        report = seen["report"]
        assert report.memory_predicted > 0
        assert report.seconds_measured is None  # the first steps are not counted, and there were few
        assert 0 < report.seconds_predicted < 0.1
        assert (report.machine, report.unknown) == ("H100", "")
        assert seen["passes"] == 2


def test_of_several_models_those_that_are_named_are_divided(found: list[dict[str, Any]]) -> None:
    assert all(seen["chosen"] == [True, False] for seen in found)


def test_other_precisions(alone: dict[str, Any], found: list[dict[str, Any]]) -> None:
    for precision in ("bf16-mixed", "bf16-true", "16-mixed"):
        assert found[0][precision] == found[1][precision] == pytest.approx(alone["own"]["losses"], rel=1e-2)
        assert found[0][precision] != found[0]["own"]["losses"]


@pytest.mark.parametrize(
    ("case", "words"),
    [
        ("no inputs", ["CaptureError", "takes pictures", "AutoTPFabricStrategy(example_inputs=...)"]),
        ("no such model", ["models= names 'student', which ModuleDict does not have"]),
        ("twice", ["was set up already", "fabric.setup_module once"]),
        ("foreign", ["optimizer 0, Adam, has no parameter of Plain", "fabric.setup_optimizers"]),
        ("quadratic", ["LBFGS computes its update from whole tensors"]),
        ("in the place of garbage", ["LBFGS computes its update from whole tensors"]),
        ("of a copy", ["LBFGS computes its update from whole tensors"]),
        ("of a copy of the module", ["LBFGS computes its update from whole tensors"]),
        ("before", ["Adam was set up before Plain", "call fabric.setup(model, optimizer)"]),
        ("afterwards", ["that the Plain had before it was set up", "fabric.setup_module returned"]),
        ("state on meta", ["optimizer 0, Adagrad, has made its state already", "fabric.setup_optimizers"]),
        ("written outside", ["(67, 16) was written", "within fabric.init_module()"]),
        ("whole state", ["is whole", "fabric.load(path, {name: optimizer})"]),
        ("missing key", ["KeyError", "has no 'step', only 'model'", "strict=False"]),
        ("missing weight", ["missing: net.0.weight"]),
        ("no file", ["MissingFileError", "does not exist"]),
        ("url", ["s3://bucket/file", "not URLs"]),
        ("sampler", ["splits the data among all 2 ranks", "num_replicas=1 (copies of the model)"]),
        ("different batches", ["batch 0 of dataloader", "differ"]),
        ("different shapes", ["batch 0 of dataloader", "[4, 9]"]),
        ("different random numbers", ["random"]),
    ],
)
def test_what_is_refused(case: str, words: list[str], found: list[dict[str, Any]]) -> None:
    for seen in found:
        assert [word for word in words if word not in seen[case]] == [], seen[case]


def test_fabric_refuses_other_sizes_and_precisions() -> None:
    with pytest.raises(ValueError, match="tensor_parallel_size=3 times"):
        fabric_of(AutoTPFabricStrategy(tensor_parallel_size=3), 2)
    with pytest.raises(ValueError, match="does not support"):
        fabric_of("autotp", 2, precision="64-true")
