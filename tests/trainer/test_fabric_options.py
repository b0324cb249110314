"""``AutoTPFabricStrategy``: saving in the background, what is checked in a loop, and ``torch.compile``."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from distributed import PATIENCE, SCRIPT_ENVIRONMENT
from fabric_loop import IDS, Plain, assert_same, fabric_of, two, whole
from selected import nightly, selected
from torch import Tensor
from torch._dynamo.utils import counters
from torch.overrides import TorchFunctionMode, _len_torch_function_stack
from torch.utils.data import DataLoader
from trainer_ranks import run_trainer_ranks
from training import error_of, tiny_config
from transformers import AutoModelForCausalLM

from lightning_autotp import AutoTPFabricStrategy, full_gradients, full_state_dict
from lightning_autotp.cli import check
from lightning_autotp.lightning import saving
from lightning_autotp.ranks.consistency import ReplicaConsistency

# --- torch.compile ---

WAYS = ("wrapped",)
REPEATS = ("not", "wrapper kept", "in place", "blocks before", "blocks after", "wrapped with tokens")
"""For nightly tests: ``test_compile.py`` has the like of them under the Trainer, ``test_fabric.py`` the first one."""
LOADED_IN_PLACE = ("wrapped", "blocks before", "blocks after")
"""What is loaded into the same model: another one would be compiled anew."""


def compiled(fabric: Any, way: str, folder: Path) -> dict[str, Any]:
    """Two steps of a model that is compiled in some way, and two of what has loaded its checkpoint, or another one."""
    torch._dynamo.reset()
    counters.clear()

    def set_up() -> Any:
        fabric.seed_everything(3, verbose=False)
        with fabric.init_module():
            made: Any = AutoModelForCausalLM.from_config(tiny_config()).train()
        if way == "in place":
            made.compile(backend="aot_eager")
        if way == "blocks before":
            compile_blocks(made)
        optimizer = torch.optim.SGD(made.parameters(), lr=0.1, momentum=0.9)
        module = torch.compile(made, backend="aot_eager") if way.startswith("wrapp") else made
        model, optimizer = fabric.setup(module, optimizer, _reapply_compile=way != "wrapper kept")
        if way == "blocks after":
            compile_blocks(made)
        return made, model, optimizer

    made, model, optimizer = set_up()
    seen: dict[str, Any] = {"losses": [], "norms": [], "gradients": []}
    loader = fabric.setup_dataloaders(DataLoader(IDS, batch_size=2))
    path = folder / f"{way} on {fabric.world_size}.ckpt"
    for number, ids in zip(range(4), loader, strict=False):
        loss = model(input_ids=ids, labels=ids, use_cache=False).loss
        fabric.backward(loss)
        seen["losses"].append(loss.item())
        named = made.named_parameters()
        parallel = hasattr(made, "autotp")
        seen["gradients"].append(full_gradients(made) if parallel else {n: p.grad.clone() for n, p in named})
        seen["norms"].append(fabric.clip_gradients(model, optimizer, max_norm=0.5).item())
        optimizer.step()
        optimizer.zero_grad()
        if number == 1:
            fabric.save(path, {"model": model, "optimizer": optimizer})
            if way not in LOADED_IN_PLACE:
                made, model, optimizer = set_up()
            fabric.load(path, {"model": model, "optimizer": optimizer})
    state = full_state_dict(made) if hasattr(made, "autotp") else made.state_dict()
    seen["weights"] = {name: value.clone() for name, value in state.items()}
    seen["graphs"] = counters["stats"]["unique_graphs"]
    seen["names"] = list(fabric.load(path)["model"])
    return seen


def compile_blocks(model: Any) -> None:
    for block in model.model.layers:
        block.compile(backend="aot_eager")


# --- saving in the background ---


def saved(folder: Path, directories: bool) -> dict[str, Any]:
    """What is saved is what was there at the call, though it is written when training has gone on."""
    fabric = two(AutoTPFabricStrategy(save_async=True, save_distributed_checkpoint=directories))
    fabric.seed_everything(5, verbose=False)
    model = fabric.setup_module(Plain())
    optimizer = fabric.setup_optimizers(torch.optim.Adam(model.parameters(), lr=0.1))

    def step() -> None:
        fabric.backward(model(IDS[:4]).float().square().mean())
        optimizer.step()
        optimizer.zero_grad()

    step()
    go_on = threading.Event()
    name = "save_directory" if directories else "save_file"
    write = getattr(saving, name)

    def when_told(*args: Any) -> None:
        assert go_on.wait(PATIENCE)
        write(*args)

    seen: dict[str, Any] = {"wanted": whole(model)}
    path = folder / f"in background {directories}"
    state = {"model": model, "optimizer": optimizer, "notes": ["first"], "tensor": torch.ones(2)}
    with mock.patch.object(saving, name, when_told):
        fabric.save(path, state)
        state["notes"].append("second")  # type: ignore[attr-defined]
        state["tensor"].zero_()  # type: ignore[attr-defined]
        step()
        seen["too early"] = path.exists()
        fabric.barrier()
        go_on.set()
        other = fabric.setup_module(Plain())
        rest = fabric.load(path, {"model": other})
    seen["loaded"], seen["rest"] = whole(other), {key: rest[key] for key in ("notes", "tensor")}
    seen["optimizer"] = {key: len(value) for key, value in rest["optimizer"].items()}
    (folder / "file").touch()
    fabric.save(folder / "file" / "nothing", state)
    seen["error"] = error_of(fabric.save, folder / "another", state)
    seen["after"] = error_of(fabric.save, folder / f"afterwards {directories}", state)
    fabric.barrier()
    return seen


# --- what is checked ---


class Looks(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


def batches(rank: int, checked_batches: int) -> tuple[int, str]:
    """How often the ranks compare, and what they say of a batch that differs; nothing is changed then."""
    fabric = two(AutoTPFabricStrategy(checked_batches=checked_batches))
    model = fabric.setup_module(Plain())
    optimizer = fabric.setup_optimizers(torch.optim.SGD(model.parameters(), lr=0.1))

    def train(rows: Tensor) -> None:
        for number, ids in enumerate(fabric.setup_dataloaders(DataLoader(rows, batch_size=2))):  # type: ignore[arg-type]
            fabric.backward(model(ids).float().square().mean())
            if number % 3 == 2:
                optimizer.step()

    with mock.patch.object(
        ReplicaConsistency, "compare", autospec=True, side_effect=ReplicaConsistency.compare
    ) as compare:
        train(IDS[:12])
    different = IDS[:12].clone()
    different[8:] = (different[8:] + rank) % 67
    before = whole(model)
    optimizer.zero_grad()
    error = error_of(train, different[6:])
    assert all(map(torch.equal, whole(model).values(), before.values()))
    return compare.call_count, error


def misused(at: int, checked_steps: int, around: Callable[[], Any], compiled: bool = False) -> str:
    """A loop that uses this rank's part of a parameter for the whole one before it calls the model in some turn."""
    fabric = two(AutoTPFabricStrategy(checked_steps=checked_steps))
    made = Plain()
    if compiled:
        torch._dynamo.reset()
        made.net[1].compile(backend="eager")
    model = fabric.setup_module(made)
    optimizer = fabric.setup_optimizers(torch.optim.SGD(model.parameters(), lr=0.1))
    for number in range(4):
        with around():
            penalty = model.head.weight.square().sum() if number == at else 0.0
            loss = model(IDS[:4]).float().square().mean() + penalty
        with torch.no_grad():
            model(IDS[:2])
        fabric.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
    return "no error"


def drifting(of: str) -> None:
    """A loop that writes into what every rank has whole, or into what the optimizer remembers of it, on one rank."""
    fabric = two()
    fabric.seed_everything(5, verbose=False)
    model = fabric.setup_module(Plain())
    optimizer = fabric.setup_optimizers(torch.optim.Adam(model.parameters(), lr=0.0))
    bias = model.net[3].bias
    for number in range(6):
        fabric.backward(model(IDS[:4]).float().square().mean())
        optimizer.step()
        optimizer.zero_grad()
        if number == 2 and fabric.global_rank == 1:
            with torch.no_grad():
                (bias if of == "parameter" else optimizer.optimizer.state[bias]["exp_avg_sq"]).add_(1.0)


def left_before_a_step() -> None:
    """A loop that ends, as one with an error does, while its gradients are accumulated."""
    model = two().setup_module(Plain())
    model(IDS[:4]).float().square().mean().backward()


@contextmanager
def default_device() -> Iterator[None]:
    torch.set_default_device("cpu")
    try:
        yield
    finally:
        torch.set_default_device(None)


AROUND: dict[str, Callable[[], Any]] = {
    "nothing": nullcontext,
    "a mode": Looks,
    "a device": lambda: torch.device("cpu"),
    "a default device": default_device,
}
LOOPS: dict[str, tuple[Any, ...]] = {
    **{f"within {name}": (1, 1, around) for name, around in AROUND.items()},
    "after another": (1, 1, nullcontext),
    "later": (2, 1, nullcontext),
    "always": (2, -1, nullcontext),
    "never": (1, 0, nullcontext),
    "compiled": (1, 1, nullcontext, True),
}


def repeats(directory: str) -> dict[str, Any]:
    return {
        way: compiled(two(AutoTPFabricStrategy(sequence_parallel="tokens" in way)), way, Path(directory))
        for way in REPEATS
    }


def two_ranks(directory: str, loops: list[str]) -> dict[str, Any]:
    folder, rank = Path(directory), int(os.environ["RANK"])
    seen: dict[str, Any] = {way: compiled(two(), way, folder) for way in WAYS}
    for directories in (False, True):
        seen[f"saved {directories}"] = saved(folder, directories)
    for number in (2, 0, -1):
        seen[f"batches {number}"] = batches(rank, number)
    for of in ("parameter", "state"):
        seen[f"drift of a {of}"] = error_of(drifting, of)
    for name in loops:
        if name == "after another":
            left_before_a_step()
        seen[name] = error_of(misused, *LOOPS[name]), _len_torch_function_stack()
        fabric_of().seed_everything(0, verbose=False)
    return seen


@pytest.fixture(scope="module")
def found(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return run_trainer_ranks(two_ranks, 2, str(tmp_path_factory.mktemp("options")), selected(request, "loop"))


@pytest.fixture(scope="module")
def repeated(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return run_trainer_ranks(repeats, 2, str(tmp_path_factory.mktemp("repeats")))


@pytest.fixture(scope="module")
def wanted(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return compiled(fabric_of(), "not", tmp_path_factory.mktemp("one process"))


def assert_compiled(way: str, found: list[dict[str, Any]], wanted: dict[str, Any]) -> None:
    for seen in found:
        assert_same(seen[way], wanted)
        assert (seen[way]["graphs"] > 0) == (way != "not")
        assert seen[way]["names"] == wanted["names"]


@pytest.mark.parametrize("way", WAYS)
def test_a_compiled_model_is_that_of_one_process(way: str, found: list[dict[str, Any]], wanted: dict[str, Any]) -> None:
    assert_compiled(way, found, wanted)


@pytest.mark.nightly
@pytest.mark.parametrize("way", REPEATS)
def test_a_model_that_is_compiled_otherwise_is(
    way: str, repeated: list[dict[str, Any]], wanted: dict[str, Any]
) -> None:
    assert_compiled(way, repeated, wanted)


@pytest.mark.parametrize("directories", [False, True])
def test_what_is_saved_in_the_background(directories: bool, found: list[dict[str, Any]]) -> None:
    for seen in (ranks[f"saved {directories}"] for ranks in found):
        assert not seen["too early"]
        assert seen["loaded"].keys() == seen["wanted"].keys()
        assert all(map(torch.equal, seen["loaded"].values(), seen["wanted"].values()))
        assert seen["rest"]["notes"] == ["first"]
        assert torch.equal(seen["rest"]["tensor"], torch.ones(2))
        assert seen["optimizer"] == {"state": 7, "param_groups": 1}
        assert "FileExistsError" in seen["error"], seen["error"]  # of the save before
        assert seen["after"] == "no error"


def test_batches_are_compared_before_the_model_or_before_the_step(found: list[dict[str, Any]]) -> None:
    for seen in found:
        # Six batches, three a step: two before the model is called and two in the steps, none and two, or all.
        assert [seen[f"batches {number}"][0] for number in (2, 0, -1)] == [4, 2, 6]
        for number in (2, 0, -1):
            assert "batch 1 of dataloader 1 " in seen[f"batches {number}"][1]


@pytest.mark.parametrize(("of", "name"), [("parameter", "net.3.bias"), ("state", "exp_avg_sq of net.3.bias")])
def test_what_every_rank_has_whole_is_compared_in_every_step(of: str, name: str, found: list[dict[str, Any]]) -> None:
    [error] = {seen[f"drift of a {of}"] for seen in found}
    assert error.startswith("RuntimeError: a tensor that every rank of a tensor-parallel group has whole has become")
    assert f"rank 1: {name}, of norm" in error


@pytest.mark.parametrize("loop", nightly(LOOPS, ["within a device", "within a default device", "always"]))
def test_a_loop_is_checked_for_one_turn(loop: str, found: list[dict[str, Any]]) -> None:
    for seen in found:
        said, modes = seen[loop]
        if loop in ("later", "never", "compiled"):  # the watch is over: what tells is the loss, a step later
            assert said.startswith("RuntimeError: the ranks of a tensor-parallel group have different losses"), said
            assert not modes
        else:
            assert modes  # the one that is on ends with the next call of any model
            assert "UnsoundUse: square on head.weight" in said or "sum on head.weight" in said
            assert "penalty = model.head.weight" in said or loop == "within a mode"  # which makes the call


SCRIPT = """
import sys
import torch
from lightning.fabric import Fabric
from lightning_autotp import AutoTPFabricStrategy

folder = sys.argv[1]
fabric = Fabric(accelerator="cpu", devices=int(sys.argv[2]), strategy=AutoTPFabricStrategy(save_async=True))
fabric.launch()
fabric.save(f"{folder}/good.ckpt", {"ones": torch.ones(3)})
fabric.save(f"{folder}/good.ckpt/bad.ckpt", {"ones": torch.ones(3)})
print("DONE", flush=True)
"""


@pytest.mark.parametrize("devices", nightly([1, 2], [2]))
def test_the_end_of_a_process_waits_for_what_is_saved_and_fails_with_it(tmp_path: Path, devices: int) -> None:
    (tmp_path / "script.py").write_text(SCRIPT)
    ended = subprocess.run(
        [sys.executable, str(tmp_path / "script.py"), str(tmp_path), str(devices)],
        env={**os.environ, **SCRIPT_ENVIRONMENT}, capture_output=True, text=True, timeout=PATIENCE, check=False,
    )  # fmt: skip
    assert ended.stdout.count("DONE") == devices, ended.stderr
    assert ended.returncode == 1, ended.stderr
    assert "FileExistsError" in ended.stderr
    check(tmp_path / "good.ckpt")
