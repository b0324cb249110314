"""Training on a device that is not the host: nothing of the package waits for it, and its group sends nothing else."""

from __future__ import annotations

import atexit
import contextlib
import copy
import gc
import io
import re
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any
from unittest import mock

import lightning as L
import pytest
import second_device
import torch
import torch.distributed as dist
from held import IN_CI, SIZES, WAYS, Way, held
from lightning import Fabric
from lightning.pytorch.plugins import MixedPrecision
from mixture_configs import MIXTURES
from offloading import HALF, STEPS, with_and_without
from offloading import RUNS as OFFLOADED
from second_device import BACKEND, NAME, MostAllocated, SecondDevice, Waits
from selected import nightly, selected
from tiny import tiny_model, token_batch
from torch import Tensor, nn
from torch.utils.data import DataLoader
from trainer_ranks import run_launched
from training import error_of

from lightning_autotp import (
    AutoTPFabricStrategy,
    AutoTPStrategy,
    WholeMatrixOptimizer,
    clip_gradients_norm,
    full_gradients,
    make_plan,
    meta_model,
    parallelize,
    penalty,
)
from lightning_autotp.checkpoints.state import full_optimizer_state
from lightning_autotp.data.batches import read_once
from lightning_autotp.layouts.plan import Plan
from lightning_autotp.lightning.step_report import StepReport
from lightning_autotp.planning import checkpointing

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not second_device.HAS_COMPILER, reason="g++ compiles the device that stands in for a GPU"),
]
MIXTURE = {"family": "qwen3_moe", **MIXTURES["qwen3_moe"], "experts_implementation": "batched_mm"}
COPIES = {"tensor_parallel_size": 1, "data_parallel_size": 2}
WAITS = {"mixture": {"nonzero in parallel/experts.py: WholeExperts.__call__": 1}}
"""What is waited for all the same: how many tokens chose experts of this rank, in each layer."""


def build(family: str = "llama", layers: int = 1, **sizes: Any) -> Any:
    return tiny_model(family, **{"num_hidden_layers": layers, **sizes})


class Task(L.LightningModule):
    def __init__(self, model: dict[str, Any]) -> None:
        super().__init__()
        self.sizes = model
        self.scale = nn.Parameter(torch.ones(3))  # not the model's, so FSDP2 does not shard it

    def configure_model(self) -> None:
        self.model = build(**self.sizes)

    def training_step(self, batch: dict[str, Tensor], _: int) -> Tensor:
        return self.scale.mean() * self.model(**batch, use_cache=False).loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters())


class FromBatchToBatch(L.Callback):
    """Looks from the end of one batch to the end of a later one."""

    def __init__(self, first: int, last: int) -> None:
        self.first, self.last, self.waits = first, last, Waits()

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx == self.first:
            self.waits.__enter__()
        elif batch_idx == self.last:
            self.waits.__exit__(None, None, None)


def rows(count: int = 16, of_batch: int = 2) -> DataLoader[Any]:
    data = [{key: value[0] for key, value in token_batch(seed).items()} for seed in range(count)]
    return DataLoader(data, batch_size=of_batch)  # type: ignore[arg-type]


def in_the_trainer(model: Any = None, accumulated: int = 1, options: Any = None, **given: Any) -> Waits:
    look = FromBatchToBatch(3, 3 + accumulated)
    trainer = L.Trainer(
        accelerator=SecondDevice(), devices=2, strategy=AutoTPStrategy(**(options or {})),
        max_epochs=1, callbacks=[look], logger=False, enable_checkpointing=False, enable_progress_bar=False,
        enable_model_summary=False, accumulate_grad_batches=accumulated, **given,
    )  # fmt: skip
    trainer.fit(Task(model or {}), rows(16 * trainer.strategy.data_ranks))
    assert trainer.global_step * accumulated > look.last, "else nothing was looked at"
    return look.waits


def scaled() -> MixedPrecision:
    return MixedPrecision("16-mixed", NAME, torch.amp.GradScaler(NAME, init_scale=64.0))


def in_fabric() -> Waits:
    fabric = Fabric(accelerator=SecondDevice(), devices=2, strategy=AutoTPFabricStrategy())
    fabric.launch()
    with fabric.init_module():
        made = build()
    model = fabric.setup_module(made)
    optimizer = fabric.setup_optimizers(torch.optim.AdamW(model.parameters()))
    batches = iter(fabric.setup_dataloaders(rows()))

    def step() -> None:
        fabric.backward(model(**next(batches), use_cache=False).loss)
        fabric.clip_gradients(model, optimizer, max_norm=1.0, error_if_nonfinite=False)
        optimizer.step()
        optimizer.zero_grad()

    return third(step)


def in_a_loop(group: dist.ProcessGroup) -> Waits:
    model = parallelize(build(), group, device=torch.device(NAME, 0))
    matrices = WholeMatrixOptimizer(model, model.model.layers.parameters(), torch.optim.SGD, lr=0.1, momentum=0.9)
    batches = iter(rows())

    def step() -> None:
        batch = {name: tensor.to(NAME, non_blocking=True) for name, tensor in next(batches).items()}
        loss = model(**batch, use_cache=False).loss + 0.1 * penalty(model, lambda name, p: p.square())
        loss.backward()
        clip_gradients_norm(model, 1.0)
        matrices.step()
        model.zero_grad()

    return third(step)


def on_the_device_alone() -> dict[str, Any]:
    """With a group that takes nothing from the host, as nccl's."""
    group = dist.new_group(backend=f"{NAME}:{BACKEND}")
    torch.manual_seed(0)
    with meta_model():
        made = build()
    model = parallelize(made, group)
    optimizer = torch.optim.AdamW(model.parameters())
    batch = token_batch(0)
    loss = model(**{name: tensor.to(NAME) for name, tensor in batch.items()}).loss
    loss.backward()
    optimizer.step()
    state = full_optimizer_state(optimizer, model)
    for values in optimizer.state.values():  # put aside on the host
        values.update({name: value.cpu() for name, value in values.items()})
    aside = full_optimizer_state(optimizer, model)
    torch.testing.assert_close(aside["state"], state["state"], rtol=0, atol=0)
    everyone = read_once(lambda: batch, group, torch.device(NAME, 0), "reading")
    return {
        "devices": {parameter.device.type for parameter in model.parameters()},
        "loss": loss.item(),
        "gradients": full_gradients(model),
        "batch": everyone["input_ids"].cpu(),
    }


class AsksForTheDevice(nn.Module):
    """A block whose code is another on another device."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(16, 32), nn.Linear(32, 16)

    def forward(self, x: Tensor) -> Tensor:
        made: Tensor = self.down(self.up(x).tanh() if x.device.type == "cpu" else self.up(x).relu())
        return made


def planned_for_the_device() -> dict[str, Any]:
    x, group = torch.randn(3, 16, generator=torch.Generator().manual_seed(0)), dist.group.WORLD
    torch.manual_seed(0)
    whole = AsksForTheDevice()
    plans = {device: make_plan(whole, 2, example_inputs=x, device=device)[0] for device in ("cpu", NAME)}

    def run(plan: Plan) -> Tensor:
        there = torch.device(NAME, 0)
        model = parallelize(copy.deepcopy(whole), group, plan=plan, example_inputs=x, device=there)
        made: Tensor = model(x.to(there)).cpu()
        return made

    return {
        "traced": {device: plan.traced for device, plan in plans.items()},
        "difference": (run(plans[NAME]) - whole.down(whole.up(x).relu())).abs().max().item(),
        "other": error_of(run, plans["cpu"]),
    }


def planned_for_its_memory() -> dict[str, Plan]:
    """Plans of a strategy where the device's memory is known, and rank 1 has the least."""
    found: dict[str, Plan] = {}
    limits: dict[str, tuple[Any, float]]
    limits = {"room": ("device", 1e12), "no room": ("device", 1e3), "no limit": (None, 1e12), "limit": (3e11, 1e12)}
    for name, (given, there) in limits.items():
        with mock.patch.object(checkpointing, "memory_of", lambda _, there=there: there / (1 + dist.get_rank())):
            trainer = L.Trainer(
                accelerator=SecondDevice(), devices=2, strategy=AutoTPStrategy(memory=given), max_steps=1,
                logger=False, enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
            )  # fmt: skip
            task = Task({"family": "gpt2"})
            trainer.fit(task, rows())
            found[name] = task.model.autotp.plan
    return found


# In this order: a run that is over leaves something on the device.
REPORTED = {"in host memory": {"tensor_parallel_size": 2, "cpu_offload": True}, "copies": COPIES}


def reported(options: dict[str, Any]) -> tuple[list[str], StepReport]:
    """What the strategy says by itself after the first steps of a run, and its report."""
    gc.collect()
    with contextlib.redirect_stderr(io.StringIO()) as said, MostAllocated():
        trainer = L.Trainer(
            accelerator=SecondDevice(), devices=2, strategy=AutoTPStrategy(**options), max_steps=5, logger=False,
            enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
        )  # fmt: skip
        trainer.fit(Task({**SIZES, "num_hidden_layers": 2}), rows(5 * 16 * trainer.strategy.data_ranks, 16))
        found = trainer.strategy.report()
    return [line for line in said.getvalue().splitlines() if " predicted, " in line or "than predicted" in line], found


def third(step: Callable[[], None]) -> Waits:
    step()
    step()
    with Waits() as waits:
        step()
    return waits


RUNS: dict[str, Callable[[], Waits]] = {
    "plain": in_the_trainer,
    "mixture": partial(in_the_trainer, MIXTURE),
    "sequence parallel": partial(in_the_trainer, options={"sequence_parallel": True}),
    "clipping": partial(in_the_trainer, gradient_clip_val=1.0),
    "accumulation": partial(in_the_trainer, accumulated=2),
    "16-mixed": lambda: in_the_trainer(plugins=[scaled()]),
    "bf16-mixed": lambda: in_the_trainer(plugins=[MixedPrecision("bf16-mixed", NAME)]),
    "broadcast": partial(in_the_trainer, options={"broadcast_batches": True}),
    "broadcast, sequence parallel, accumulation, clipping": partial(
        in_the_trainer,
        accumulated=2,
        options={"broadcast_batches": True, "sequence_parallel": True},
        gradient_clip_val=1.0,
    ),
    "copies": partial(in_the_trainer, {"layers": 2}, options=COPIES),  # FSDP2 gathers one ahead of another
    "copies, bf16-mixed": lambda: in_the_trainer(
        {"layers": 2}, options=COPIES, plugins=[MixedPrecision("bf16-mixed", NAME)], gradient_clip_val=1.0
    ),
    "Fabric": in_fabric,
    "loop": lambda: in_a_loop(dist.group.WORLD),
}
"""How a step is made, in processes as Lightning begins them."""

PARTS_OF_OTHERS = {
    "plain",
    "sequence parallel",
    "clipping",
    "accumulation",
    "16-mixed",
    "bf16-mixed",
    "broadcast",
    "copies",
}
"""What other runs do, too, together with more: for nightly tests."""


def runs(directory: str, names: list[str], offloaded: list[str], ways: list[Way], reports: list[str]) -> dict[str, Any]:
    second_device.begin()
    of_steps = {name: reported(REPORTED[name]) for name in reports}  # while nothing else is on the device
    found = {name: RUNS[name]() for name in names}
    results = {
        "reported": of_steps,
        **{name: waits.own for name, waits in found.items()},
        "backend": dist.get_backend(),
        "alone": on_the_device_alone(),
        "planned": planned_for_the_device(),
        "memory": planned_for_its_memory(),
        "offloaded": with_and_without(directory, offloaded),
        "held": {way: held(way) for way in ways},
    }
    atexit._run_exitfuncs()
    return {**results, "is ended": not dist.is_initialized()}


@pytest.fixture(scope="module")
def found(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    chosen = [selected(request, argument) for argument in ("name", "offloaded", "way", "run")]
    return run_launched(runs, 2, str(tmp_path_factory.mktemp("offloaded")), *chosen)


@pytest.mark.parametrize("name", nightly(RUNS, PARTS_OF_OTHERS))
def test_a_step_waits_for_no_device(name: str, found: list[dict[str, Any]]) -> None:
    for seen in found:
        assert seen[name] == WAITS.get(name, {})


def test_what_is_on_the_host_goes_over_gloo(found: list[dict[str, Any]]) -> None:
    assert [seen["backend"] for seen in found] == 2 * [f"cpu:gloo,{NAME}:{BACKEND}"]


def test_no_process_group_is_left_to_the_end_of_the_interpreter(found: list[dict[str, Any]]) -> None:
    assert all(seen["is ended"] for seen in found)


def test_a_group_of_the_device_alone_is_given_nothing_of_the_host(found: list[dict[str, Any]]) -> None:
    torch.manual_seed(0)
    whole, batch = build(), token_batch(0)
    loss = whole(**batch).loss
    loss.backward()
    for seen in found:
        alone = seen["alone"]
        assert alone["devices"] == {NAME}
        assert alone["loss"] == pytest.approx(loss.item(), rel=1e-5)
        assert torch.equal(alone["batch"], batch["input_ids"])
        for name, parameter in whole.named_parameters():
            torch.testing.assert_close(alone["gradients"][name], parameter.grad, rtol=1e-4, atol=1e-6, msg=name)


def test_a_plan_is_of_the_code_for_its_device(found: list[dict[str, Any]]) -> None:
    for seen in found:
        planned = seen["planned"]
        assert planned["traced"] == {device: f"traced with example_inputs, as on {device}" for device in ("cpu", NAME)}
        assert planned["difference"] < 1e-6
        assert (
            "other operators than when the plan was made, which was traced as on cpu and is here as on"
            in planned["other"]
        )


def test_a_plan_is_for_the_memory_of_the_device_that_has_the_least(found: list[dict[str, Any]]) -> None:
    for seen in found:
        plans = seen["memory"]
        calls = {name: sum(one.calls for one in plan.communication) for name, plan in plans.items()}
        assert calls["room"] == calls["limit"] < calls["no room"] == calls["no limit"]
        assert plans["room"].memory_limit == 5e11
        assert "of 466 GiB of the device (predicted, with AdamW)" in plans["room"].of_memory
        assert (plans["limit"].memory_limit, plans["limit"].limit_of) == (3e11, "")
        cramped = plans["no room"]
        assert cramped.of_memory.startswith("warning: no plan fits: a training step takes about ")
        assert replace(cramped, memory_limit=0, memory_needed=0, limit_of="") == plans["no limit"]
        assert plans["no limit"].of_memory.startswith("made for no limit of memory: ")


@pytest.mark.parametrize("run", nightly(REPORTED, ["copies"]))
def test_the_first_steps_are_followed_by_what_one_takes(run: str, found: list[dict[str, Any]]) -> None:
    for rank, seen in enumerate(found):
        said, report = seen["reported"][run]
        assert 0.96 < report.memory_predicted / report.memory_measured < 1.15
        assert report.seconds_measured > 2 * report.seconds_predicted > 0  # the processor is no H100
        assert (report.machine, report.unknown) == ("H100", "")
        if rank > 0:
            assert not said
            continue
        line, warning = said
        assert re.fullmatch(
            r"lightning_autotp: memory [\d.]+ MiB predicted, [\d.]+ MiB measured \([+-]\d+%\);"
            r" step [\d,]+ ms predicted, [\d,]+ ms measured \(\+[\d,]+%\)",
            line,
        )
        assert re.match(r"lightning_autotp: warning: a step takes [\d,]+% more time than predicted for H100", warning)


RESUMED = dict.fromkeys(["resumed from a file", "resumed from a directory", "Fabric, resumed"], STEPS - HALF)
REPEATED = {*OFFLOADED, "Fabric", *RESUMED} - {"bf16-mixed", "loop"}


@pytest.mark.parametrize("offloaded", nightly([*OFFLOADED, "Fabric", *RESUMED], REPEATED))
def test_what_is_in_host_memory_is_trained_alike(offloaded: str, found: list[dict[str, Any]]) -> None:
    for seen in found:
        there, here = seen["offloaded"][offloaded]
        assert here["losses"]
        assert len(here["losses"]) == RESUMED.get(offloaded, len(here["losses"]))
        # A penalty is summed in another order.
        exact: dict[str, float] = {"rtol": 1e-6, "atol": 1e-6} if offloaded == "loop" else {"rtol": 0, "atol": 0}
        for kind in ("losses", "gradients", "weights"):
            torch.testing.assert_close(here[kind], there[kind], **exact)


@pytest.mark.parametrize("offloaded", nightly([*OFFLOADED, "Fabric", *RESUMED], REPEATED))
def test_offloaded_are_the_parameters_that_are_sharded(offloaded: str, found: list[dict[str, Any]]) -> None:
    for seen in found:
        there, here = seen["offloaded"][offloaded]
        assert here.get("computed on", {NAME}) == {NAME}
        for kind in ("parameters on", "gradients on", "states on"):
            places = here.get(kind, {})
            assert all(device == ("cpu" if is_sharded else NAME) for is_sharded, device in places.values())
            assert {device for _, device in there.get(kind, {}).values()} <= {NAME}
        assert sum(is_sharded for is_sharded, _ in here["parameters on"].values()) == 21
        assert sum(is_sharded for is_sharded, _ in here["states on"].values()) >= 3


def test_what_does_not_go_with_host_memory_is_refused(found: list[dict[str, Any]]) -> None:
    for seen in found:
        errors = seen["offloaded"]["errors"]
        assert "torch's GradScaler takes no gradients in host memory" in errors["scaled"]
        assert "give one, of a single rank for one copy" in errors["no mesh"]
        assert 'init_process_group("cpu:gloo,cuda:nccl")' in errors["device alone"]


@pytest.mark.parametrize("way", nightly(WAYS, {way for way in WAYS if way not in IN_CI}))
def test_what_is_on_the_device_and_in_host_memory_is_predicted(way: Way, found: list[dict[str, Any]]) -> None:
    for seen in found:
        (most, said), (on_host, said_of_host) = seen["held"][way]
        assert 0.96 * most < said < 1.15 * most  # rather too much than too little
        if way.cpu_offload:
            # Norms that every rank holds, and the counts of steps, are of no account.
            assert said_of_host == pytest.approx(on_host, rel=0.01)
        assert (on_host > 1000) == way.cpu_offload
