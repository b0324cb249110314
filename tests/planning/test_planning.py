"""Machines, memory and time from a rehearsal, and which of all sizes is recommended."""

from __future__ import annotations

import ast
import inspect
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import yaml
from rich.console import Console
from tiny import tiny_config
from torch import nn
from transformers import AutoModelForCausalLM

from lightning_autotp import AutoTPStrategy, make_plan, recommend
from lightning_autotp.capture.capture import language_model_inputs
from lightning_autotp.layouts.plan import Plan
from lightning_autotp.planning.estimate import LAUNCH, memory, step_time
from lightning_autotp.planning.machines import Machine, known_machines
from lightning_autotp.planning.meter import Ran, Work
from lightning_autotp.planning.overview import Overview, look_over
from lightning_autotp.planning.recommend import Recommendation
from lightning_autotp.planning.rehearsal import Rehearsal, RehearsalError, local_model, one_row, rehearse
from lightning_autotp.planning.report import python_lines, reasons, table, yaml_lines

H100 = Machine.of("16xh100")
REHEARSAL = Rehearsal(
    parameters=100,
    quantized=0,
    gradients=100,
    averaged=200,
    states=200,
    activations=40,
    copies=50,
    dequantized=0,
    peak=Counter({"activations": 30, "copies": 50, "gradients": 60, "other": 7}),
    peak_without_gradients=Counter({"activations": 40, "copies": 50, "other": 9}),
    update=100,
    block=20,
    block_casts=5,
    casts=15,
    rest=10,
    work=Work(
        [
            *[Ran("aten.mm", "layers.0", 1000, 1e12)] * 3,
            *[Ran("aten.add", "", int(1.5e9))] * 2,
            *[Ran("_c10d_functional.all_reduce", "layers.0", int(3e8), collective="all_reduce")] * 2,
        ]
    ),
    forward=3,
    update_work=Work([Ran("aten._foreach_add_", "", int(6e9))]),
)


def tiny_model() -> nn.Module:
    with torch.device("meta"):
        model: nn.Module = AutoModelForCausalLM.from_config(tiny_config("llama"))
    return model


@pytest.mark.parametrize("name", known_machines())
def test_every_machine_that_comes_along_is_read(name: str) -> None:
    machine = Machine.of(f"4x{name}")
    assert (machine.name.upper(), machine.gpus) == (name, 4)
    assert Machine.of(name.lower()).gpus == machine.gpus_per_node
    assert machine.between(machine.gpus_per_node + 1).link_bandwidth < machine.profile.link_bandwidth
    assert "https://" in known_machines()[name].read_text(), "a figure has a source"


def test_a_machine_is_written_and_read(tmp_path: Path) -> None:
    file = tmp_path / "mine.yaml"
    H100.write(file)
    assert Machine.of(f"3x{file}") == replace(H100, gpus=3)
    file.write_text(file.read_text().replace("memory:", "size:"))
    with pytest.raises(ValueError, match=r"other entries than needed.*memory"):
        Machine.of(str(file))
    for wrong in ("8xABACUS", "0xH100"):
        with pytest.raises(ValueError, match=r"write how many of which, as 8xH100; known are A100-40"):
            Machine.of(wrong)


def test_memory_is_that_of_the_worst_moment() -> None:
    alone = memory(REHEARSAL)
    assert (alone.moment, alone.total) == ("optimizer step", 100 + 100 + 200 + 100)
    passing = memory(REHEARSAL, rows=10)
    assert (passing.moment, passing.total) == ("loss and backward pass", 100 + 60 + 200 + (300 + 50) + 70)
    assert memory(REHEARSAL, rows=10, accumulates=True).total == 100 + 100 + 200 + (400 + 50) + 90
    several = memory(REHEARSAL, rows=10, copies=2)
    assert several.total == 50 + 50 + 100 + (400 + 50 - 15) + 90 + (2 * 15 + 15 + 2 * 20 + 10)
    assert several.largest == "activations"
    quantized = replace(REHEARSAL, quantized=60, peak_without_gradients=Counter({"dequantized": 300, "other": 9}))
    several = memory(quantized, rows=10, copies=2)  # neither is divided, or grows
    assert (several.parameters, several.temporary) == (60 + 40 / 2, 300 + 90)


def test_time_is_counted_by_kind() -> None:
    time = step_time(REHEARSAL, H100, 2, rows=2, passes=3)
    assert time.products == pytest.approx(3 * 3 * 2 * 1e12 / (0.6 * 9.89e14))
    assert time.others == pytest.approx(3 * 2 * 3e9 / 2.9e12)
    assert time.tensor_parallel == pytest.approx(3 * 2 * (1e-5 + 0.5 * 2 * 3e8 / 3e11))
    assert time.update == pytest.approx(6e9 / 2.9e12)
    assert time.copies == 0
    assert time.largest == "products"
    many = replace(REHEARSAL, work=Work([Ran("aten.mm", "", 1, 1.0)] * 100 + [Ran("aten.add", "", 0)] * 1000))
    assert step_time(many, H100, 1).total == pytest.approx(1100 * LAUNCH + 6e9 / 2.9e12)


def test_replicas_send_sums_of_gradients_over_the_network_and_no_parameters() -> None:
    machine = replace(H100, gpus=16)
    within, over = machine.between(8), machine.between(16)
    slow = replace(REHEARSAL, parameters=10**12, averaged=10**12, block=0, block_casts=0, casts=0, rest=0)
    alone = step_time(slow, machine, 1)
    hybrid = step_time(slow, machine, 1, copies=16, replicas=2)
    sent = 2 * within.collective("all_gather", 1e12, 8) + within.collective("reduce_scatter", 1e12, 8)
    sent += over.collective("all_reduce", 1e12 / 8, 2)
    hidden = alone.total - alone.update
    assert hybrid.copies == pytest.approx(sent - hidden + within.collective("all_gather", 0, 8))
    assert hybrid.copies < step_time(slow, machine, 1, copies=16).copies
    assert hybrid.update == alone.update / 8


@pytest.mark.parametrize(
    ("gpus", "sizes"),
    [
        ("2xH100", {(1, 1, 1), (1, 2, 1), (2, 1, 1)}),
        ("16xH100", {(1, 16, 2), (1, 16, 1), (2, 8, 2), (4, 4, 2), (8, 2, 1), (1, 8, 1), (8, 1, 1)}),
    ],
)
def test_what_is_recommended_can_be_pasted(gpus: str, sizes: set[tuple[int, int, int]]) -> None:
    found = recommend(tiny_model(), gpus=gpus, tokens_per_step=512 * 16, sequence_length=512)
    seen = {(each.tensor_parallel_size, each.data_parallel_size, each.replicas) for each in found.choices}
    assert seen == sizes if gpus == "2xH100" else seen > sizes
    assert {each.checkpointing for each in found.choices} == {False, True}
    assert all(each.tokens == 512 * 16 for each in found.choices)
    assert "one GPU is enough" in "\n".join(reasons(found))
    for choice in found.choices:
        calls = [node for node in ast.walk(ast.parse(python_lines(found, choice))) if isinstance(node, ast.Call)]
        named = {ast.unparse(call.func): {keyword.arg for keyword in call.keywords} for call in calls}
        taken = set(inspect.signature(AutoTPStrategy.__init__).parameters)
        assert named.get("AutoTPStrategy", set()) <= taken
        assert ("AutoTPStrategy" in named) == (choice.gpus > 1)
        trainer = yaml.safe_load(yaml_lines(found, choice))["trainer"]
        assert set(trainer.get("strategy", {"init_args": {}})["init_args"]) == named.get("AutoTPStrategy", set())
    console = Console(width=80, record=True)
    console.print(table(found))
    assert max(len(line.rstrip()) for line in console.export_text().splitlines()) <= 80


def overview(ranks: int, **changes: float) -> Overview:
    plan = Plan("Model", ranks, ())
    needed = replace(memory(REHEARSAL), **{name: share * 1e9 for name, share in changes.items()})
    time = step_time(REHEARSAL, H100, ranks)
    return Overview(
        plan, replace(H100, memory=H100.reserved + 1e9), 1, 64, "bf16-mixed", "adamw", needed, time, REHEARSAL
    )


def test_an_overview_says_what_would_be_better() -> None:
    roomy = overview(4, parameters=0.2)
    assert roomy.fits
    assert "--tp 2 " in list(roomy.lines())[-1]
    assert "try: one GPU, or FSDP alone (" in list(overview(2, parameters=0.2).lines())[-1]
    assert "--tp" not in list(overview(1, parameters=0.2).lines())[-1]
    assert "--tp" not in list(overview(4, parameters=0.6).lines())[-1]  # half the ranks need too much
    stored, kept = overview(4, parameters=2.0), overview(4, activations=2.0)
    assert not stored.fits
    assert next(stored.lines()).startswith("does not fit: 1.86 GiB of 954 MiB")
    assert "--tp 8 " in list(stored.lines())[-1]
    assert "--sequence-parallel" not in list(stored.lines())[-1]
    assert "--sequence-parallel true" in list(kept.lines())[-1]
    assert ["fewer --tokens" in list(one.lines())[-1] for one in (stored, kept, roomy)] == [False, True, False]
    large = overview(8, **dict.fromkeys(("parameters", "gradients", "states", "activations", "temporary"), 120.0))
    assert max(map(len, list(large.lines())[:-1])) <= 80
    assert "data_parallel_size" in list(overview(8, parameters=2.0).lines())[-1]


def test_an_overview_is_of_the_rehearsed_step() -> None:
    model = tiny_model()
    plan, _ = make_plan(model, 2)
    row = one_row(model, language_model_inputs(model), 64)
    found = look_over(model, plan, row, H100, tokens=256)
    rehearsal = rehearse(local_model(model, plan), row)
    assert (found.rows, found.length) == (4, 64)
    assert found.memory == memory(rehearsal, 4)
    assert found.time == step_time(rehearsal, H100, 2, rows=4)
    said = list(found.lines())
    largest = max(found.time.products, found.time.others, found.time.tensor_parallel, found.time.update)
    assert f"{1e3 * largest:.2g} ms" in said[3].partition(",")[0]


def test_adapters_have_few_gradients() -> None:
    found = recommend(tiny_model(), gpus="1xH100", tokens_per_step=512, sequence_length=512, lora=2)
    for choice in found.choices:
        assert 0 < choice.memory.states < choice.memory.parameters / 4


def test_what_does_not_fit_says_what_would_help() -> None:
    small = replace(H100, memory=H100.reserved + 1e5)
    found = recommend(tiny_model(), gpus="1xH100", tokens_per_step=512, sequence_length=512)
    none = Recommendation(
        found.model, small, 512, found.precision, tuple(replace(c, fits=False) for c in found.choices)
    )
    assert none.best is None
    [said] = reasons(none)
    assert said.startswith("nothing fits: ")
    assert "most of it" in said


def test_what_cannot_be_rehearsed_or_is_unknown_is_said() -> None:
    class Asking(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(4, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.linear(x) * float(x.sum())

    with pytest.raises(RehearsalError, match="a step of Asking cannot be rehearsed without values"):
        rehearse(Asking(), {"x": torch.ones(2, 4)}, precision="32-true")
    for wrong in ({"optimizer": "adam"}, {"precision": "16"}, {"tokens_per_step": 0}):
        with pytest.raises(ValueError, match=next(iter(wrong))):
            recommend(tiny_model(), **wrong)  # type: ignore[arg-type]
