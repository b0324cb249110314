"""Machines, memory and time from a rehearsal, and which of all sizes is recommended."""

from __future__ import annotations

import ast
import re
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import yaml
from rich.console import Console
from tiny import tiny_config
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoModelForCausalLM

from lightning_autotp import make_plan, recommend
from lightning_autotp.building.repeated_blocks import checkpoint_blocks
from lightning_autotp.capture.capture import language_model_inputs
from lightning_autotp.layouts.plan import Plan
from lightning_autotp.layouts.units import in_units
from lightning_autotp.planning.estimate import LAUNCH, Memory, StepTime, host_memory, memory, product_time, step_time
from lightning_autotp.planning.machines import Machine, known_machines
from lightning_autotp.planning.meter import Meter, Ran, Work
from lightning_autotp.planning.overview import Overview, look_over
from lightning_autotp.planning.recommend import Choice, Recommendation
from lightning_autotp.planning.rehearsal import Rehearsal, RehearsalError, local_model, one_row, rehearse
from lightning_autotp.planning.report import legend, python_lines, reasons, table, yaml_lines
from lightning_autotp.planning.timeline import timeline
from lightning_autotp.private.fake_tensors_private import RememberingFakeTensorMode
from lightning_autotp.solving.options import PlanOptions

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
    peak_in_blocks=Counter({"activations": 38, "copies": 20, "gradients": 3, "other": 2}),
    update=100,
    block=20,
    block_casts=5,
    casts=15,
    rest=10,
    looked_up=0,
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


KEPT_ON_HOST = replace(
    REHEARSAL,
    work=Work(
        [
            Ran("aten.copy_", "layers.0", 64, is_host_copy=True),
            Ran("aten.copy_", "layers.0", 8, fixed=8, is_host_copy=True),
            Ran("aten.mm", "layers.0", 1000, 1e12),
            Ran("aten.copy_", "layers.0", 64, is_host_copy=True),
            Ran("aten.copy_", "layers.0", 8, fixed=8, is_host_copy=True),
        ]
    ),
)


def tiny_model(layers: int = 2) -> nn.Module:
    with torch.device("meta"):
        model: nn.Module = AutoModelForCausalLM.from_config(tiny_config("llama", num_hidden_layers=layers))
    return model


@pytest.mark.parametrize("name", known_machines())
def test_every_machine_that_comes_along_is_read(name: str) -> None:
    machine = Machine.of(f"4x{name}")
    assert (machine.name.upper(), machine.gpus) == (name, 4)
    assert Machine.of(name.lower()).gpus == machine.gpus_per_node
    assert machine.between(machine.gpus_per_node + 1).link_bandwidth < machine.profile.link_bandwidth


FIGURES = [
    (name, line)
    for name, file in known_machines().items()
    for line in file.read_text().splitlines()
    if not line.startswith(("#", "name:"))
]


@pytest.mark.parametrize(("name", "line"), FIGURES, ids=[f"{name} {line.split(':')[0]}" for name, line in FIGURES])
def test_each_figure_of_a_machine_says_where_it_is_from(name: str, line: str) -> None:
    """An address, a measurement, or that it is an assumption, and of what."""
    figure, has_source, source = line.partition("  # ")
    assert float(figure.split()[1]) > 0
    assert has_source
    is_assumed = source.startswith("assumption: ") and len(source) > 20
    assert is_assumed or source.startswith("measured: ") or re.search(r"https://[\w.-]+/\S+", source), source


def test_a_product_reaches_what_was_measured_of_those_like_it() -> None:
    measured = replace(H100, product_rates_bf16=((50.0, 1e14), (150.0, 3e14)))
    flops = 1e13
    for intensity, rate in ((10, 1e14), (50, 1e14), (100, 2e14), (150, 3e14), (1e3, 3e14)):
        product = Ran("aten.mm", "", round(flops / intensity), flops)
        assert product_time(measured, product, 1, in_bf16=True) == pytest.approx(
            max(flops / rate, flops / intensity / H100.memory_bandwidth)
        )
        assert product_time(measured, product, 1, in_bf16=False) == product_time(H100, product, 1, in_bf16=False)


@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"])
def test_of_more_rows_products_touch_more_but_for_parameters_and_their_gradients(precision: str) -> None:
    class Scores(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.into, self.out = nn.Linear(6, 8), nn.Linear(8, 4, bias=False)

        def forward(self, x: Tensor) -> Tensor:
            hidden = self.into(x).relu()
            return self.out(hidden @ (hidden.mT @ hidden)).float().mean()

    def products(rows: int) -> list[Ran]:
        work = rehearse(Scores(), {"x": torch.empty(rows, 5, 6)}, precision=precision, optimizer="none").work
        return [one for one in work.ran if one.flops is not None]

    one, several = products(1), products(3)
    assert len(one) == 11
    for small, large in zip(one, several, strict=True):
        assert (small.bytes_of(3), 3 * small.flops) == (large.bytes, large.flops)


@pytest.mark.parametrize(
    "layer",
    [nn.Conv1d(8, 12, 4, padding=3), nn.Conv1d(8, 8, 4, groups=8), nn.ConvTranspose1d(8, 4, 3, groups=2)],
    ids=["of all channels", "of each channel", "transposed"],
)
def test_gradients_of_a_convolution_take_twice_what_it_takes(layer: nn.Module) -> None:
    class Summed(nn.Sequential):
        def forward(self, x: Tensor) -> Tensor:
            total: Tensor = super().forward(x).sum()
            return total

    batch = {"x": torch.empty(2, 8, 20, requires_grad=True)}
    work = rehearse(Summed(layer), batch, precision="32-true", optimizer="none").work
    forward, backward = (one.flops for one in work.ran if one.flops is not None)
    assert backward == 2 * forward
    with FlopCounterMode(display=False) as counter:
        layer(torch.empty(2, 8, 20))
    assert forward == counter.get_total_flops()


def test_an_operator_reaches_what_was_measured_of_it() -> None:
    measured = replace(H100, operator_rates_bf16=(("aten.attention", 1e14), ("aten._softmax", 1e12)))
    ran = [Ran("aten.attention", "", 1, 1e13), Ran("aten.mm", "", 1, 1e13), Ran("aten._softmax", "", 10**9)]
    ran += [Ran("aten._softmax", "", 10**9, fixed=10**9), Ran("aten.add", "", 10**9)]
    rehearsal = replace(REHEARSAL, work=Work(ran), forward=2)
    time = step_time(rehearsal, measured, 1, rows=3)
    assert time.products == pytest.approx(3 * (1e13 / 1e14 + 1e13 / (0.6 * 9.89e14)))
    assert time.others == pytest.approx((3 + 1) * 1e9 / 1e12 + 3 * 1e9 / 2.9e12)
    spans = timeline(rehearsal, measured, 1, rows=3)
    for kind, seconds in (("products", time.products), ("others", time.others)):
        assert sum(span.seconds for span in spans if span.kind == kind) == pytest.approx(seconds)
    assert step_time(rehearsal, measured, 1, in_bf16=False) == step_time(rehearsal, H100, 1, in_bf16=False)


def test_starting_operators_takes_time_beside_what_a_gpu_computes() -> None:
    ran = [Ran("aten.mm", "", 1, 1e13), Ran("aten.add", "", 10**9)]
    rehearsal = replace(REHEARSAL, work=Work(ran))
    computed = step_time(rehearsal, H100, 1)
    products, others = computed.products, computed.others
    overhead = products  # of each of the two operators
    bound = step_time(rehearsal, replace(H100, operator_overhead=overhead), 1)
    assert (bound.products, bound.products + bound.others) == (products, pytest.approx(2 * overhead))
    assert step_time(rehearsal, replace(H100, operator_overhead=overhead / 100), 1) == computed
    here = step_time(rehearsal, replace(H100, operator_overhead=overhead, device="cpu"), 1)
    assert (here.products, here.others) == (products, pytest.approx(others + 2 * overhead))


def test_a_machine_is_written_and_read(tmp_path: Path) -> None:
    file = tmp_path / "mine.yaml"
    rates: dict[str, Any] = {"operator_rates_bf16": (("aten._softmax", 1e12), ("aten.exp", 2e12))}
    with_rates = replace(H100, product_rates_fp32=((50.0, 1e14), (150.0, 3e14)), **rates)
    measured = replace(H100, operator_overhead=1e-5, device="cpu")
    for machine in (H100, with_rates, measured):
        machine.write(file)
        assert Machine.of(f"3x{file}") == replace(machine, gpus=3)
    for wrong in ("3.0", "[[1.0, 0.0]]", "[[2.0, 1.0], [1.0, 1.0]]", "[[1.0]]"):
        H100.write(file)
        file.write_text(f"{file.read_text()}product_rates_fp32: {wrong}\n")
        with pytest.raises(ValueError, match="product_rates_fp32 must be pairs of positive numbers"):
            Machine.read(file)
    for wrong in ("3.0", "[[1.0, 2.0]]", "{1: 2.0}", "{aten.exp: 0.0}"):
        H100.write(file)
        file.write_text(f"{file.read_text()}operator_rates_bf16: {wrong}\n")
        with pytest.raises(ValueError, match="operator_rates_bf16 must give positive numbers by names of operators"):
            Machine.read(file)
    for wrong in ("1.5", "-0.1", "all"):
        H100.write(file)
        file.write_text(file.read_text().replace("overlap: 0.81", f"overlap: {wrong}"))
        with pytest.raises(ValueError, match="overlap must be from 0 to 1"):
            Machine.read(file)
    H100.write(file)
    file.write_text(file.read_text().replace("overlap: 0.81", "overlap: 0"))
    assert Machine.read(file).overlap == 0
    H100.write(file)
    file.write_text(file.read_text().replace("device: cuda", "device: tpu"))
    with pytest.raises(ValueError, match="device must be cuda or cpu, not 'tpu'"):
        Machine.read(file)
    H100.write(file)
    file.write_text(re.sub(r"(?m)^memory:", "size:", file.read_text()))
    with pytest.raises(ValueError, match=r"other entries than needed: memory is missing, size is no entry"):
        Machine.of(str(file))
    for key, wrong, why in (
        ("peak_bf16", "", "peak_bf16 must be positive"),
        ("gpus_per_node", "2.5", "gpus_per_node must be whole"),
        ("reached", "1.7", "reached must be at most 1, and reserved less than memory"),
        ("reserved", "1.0e+12", "reached must be at most 1, and reserved less than memory"),
    ):
        H100.write(file)
        file.write_text(re.sub(rf"(?m)^{key}:.*$", f"{key}: {wrong}", file.read_text()))
        with pytest.raises(ValueError, match=why):
            Machine.of(str(file))
    file.write_bytes(bytes(range(256)))
    with pytest.raises(ValueError, match=r"the machine .*mine.yaml' cannot be read"):
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
    peaks = {"peak_without_gradients": Counter({"dequantized": 300, "other": 9}), "peak_in_blocks": Counter()}
    quantized = replace(REHEARSAL, quantized=60, **peaks)  # type: ignore[arg-type]
    several = memory(quantized, rows=10, copies=2)  # neither is divided, or grows
    assert (several.parameters, several.temporary) == (60 + 40 / 2, 300 + 90)


LOSS = (400 + 50 - 15) + 90
IN_A_BLOCK = (
    (380 + 20 - 15) + 20 + (3 + 10 + 15 + 15)
)  # gradients so far, what is in no block, the block, its gradients
"""With ten rows, without the next block and what is on its way."""


@pytest.mark.parametrize("cpu_offload", [False, True])
def test_copies_gather_blocks_and_what_is_in_none(cpu_offload: bool) -> None:
    stored = 0 if cpu_offload else 50 + 100
    several = memory(REHEARSAL, rows=10, copies=2, cpu_offload=cpu_offload)
    assert (several.moment, several.total) == ("loss", stored + LOSS + 10 + 15)
    assert several.largest == "activations"
    before = memory(REHEARSAL, rows=10, copies=2, accumulates=True, cpu_offload=cpu_offload)
    assert before.total == several.total + (0 if cpu_offload else 50)
    short = replace(REHEARSAL, peak_without_gradients=REHEARSAL.peak_in_blocks)
    within = memory(short, rows=10, copies=2, cpu_offload=cpu_offload)
    sent = 2 * 20  # in float32
    assert (within.moment, within.total) == ("backward pass of a block", stored + IN_A_BLOCK + 15 + 1.5 * sent)
    wide = replace(short, rest=80, block=10, block_casts=0, peak_in_blocks=Counter(), peak_without_gradients=Counter())
    last = memory(wide, copies=2, cpu_offload=cpu_offload)
    gradients = 0 if cpu_offload else 50 * (1 - 80 / 100)
    if cpu_offload:
        assert (last.moment, last.total) == ("end of the backward pass", 80 + 80 + 2 * 10 + 10)
    assert last.total >= stored + gradients + 80 + 80 + 2 * 10 + 10
    # What is looked up is there while it is; its gradient goes last.
    apart = memory(replace(REHEARSAL, rest=60, looked_up=50), rows=10, copies=2, cpu_offload=cpu_offload)
    assert apart.total == several.total
    apart = memory(replace(wide, looked_up=50), copies=2, cpu_offload=cpu_offload)
    assert apart.total == last.total - (80 - 50)


def test_what_is_in_host_memory_is_not_on_the_device() -> None:
    alone = memory(REHEARSAL, rows=10, cpu_offload=True)
    assert (alone.parameters, alone.gradients, alone.states) == (0, 0, 0)
    assert alone.total == LOSS + 10  # a copy of its own fetches no block ahead
    assert memory(replace(REHEARSAL, quantized=60), rows=10, cpu_offload=True).parameters == 60
    assert host_memory(REHEARSAL, cpu_offload=True) == 100 + 100 + 200
    assert host_memory(REHEARSAL, copies=2, cpu_offload=True) == 50 + 50 + 100
    assert host_memory(REHEARSAL) == 0
    assert host_memory(KEPT_ON_HOST, rows=3) == 3 * 64 + 8
    assert host_memory(KEPT_ON_HOST, rows=3, copies=2) == 3 * 64  # FSDP2 gathers what autocast would cast


def test_time_is_counted_by_kind() -> None:
    time = step_time(REHEARSAL, H100, 2, rows=2, passes=3)
    assert time.products == pytest.approx(3 * 3 * 2 * 1e12 / (0.6 * 9.89e14))
    assert time.others == pytest.approx(3 * 2 * 3e9 / 2.9e12)
    assert time.tensor_parallel == pytest.approx(3 * 2 * (1e-5 + 0.5 * 2 * 3e8 / 3e11))
    assert time.update == pytest.approx(6e9 / 2.9e12)
    assert time.copies == time.network == 0
    assert time.largest == "products"
    many = replace(REHEARSAL, work=Work([Ran("aten.mm", "", 1, 1.0)] * 100 + [Ran("aten.add", "", 0)] * 1000))
    assert step_time(many, H100, 1).total == pytest.approx(1100 * LAUNCH + 6e9 / 2.9e12)


def test_gathered_parameters_are_sent_once_whatever_the_rows() -> None:
    sends = torch.ops._c10d_functional
    with RememberingFakeTensorMode():
        local = nn.Linear(8, 6, bias=False)
        with Meter(local) as meter, torch.no_grad():
            hidden = sends.all_gather_into_tensor(torch.empty(3, 8), 2, "")
            whole = sends.all_gather_into_tensor(local.weight.to(torch.bfloat16), 2, "")
            sends.reduce_scatter_tensor(torch.empty_like(whole), "sum", 2, "")
            sends.reduce_scatter_tensor(torch.empty_like(hidden), "sum", 2, "")
    assert [one.fixed == one.bytes for one in meter.work.ran if one.collective] == [False, True, True, False]
    time = step_time(replace(REHEARSAL, work=meter.work), H100, 2, rows=5).tensor_parallel
    of_rows, fixed = 5 * 6 * 8 * 4, 12 * 8 * 2
    sent = [H100.profile.collective("all_gather", size, 2) for size in (of_rows, fixed)]
    assert time == pytest.approx(2 * sum(sent), rel=1e-9)


def test_products_hide_what_is_sent_meanwhile_as_far_as_a_machine_can() -> None:
    sends = torch.ops._c10d_functional
    with RememberingFakeTensorMode():
        local = nn.Linear(1024, 1024, bias=False)
        rows = torch.empty(16384, 1024)
        with Meter(local) as meter, torch.no_grad():
            sent = sends.all_reduce(rows, "sum", "")
            _ = local(rows) + 1
            assert sends.wait_tensor(sent) is sent
            _ = sends.wait_tensor(sends.all_reduce(local(rows), "sum", ""))
    assert [one.name for one in meter.work.ran][:2] == ["_c10d_functional.all_reduce", "aten.mm"]
    assert not any(one.name.endswith("wait_tensor") for one in meter.work.ran), "waiting moves no memory"
    (first, alone), (second, more) = meter.work.collectives.items()
    assert (alone, more) == (1, 1)
    assert ([one.name for one in first.beside], second.beside) == (["aten.mm"], ())
    taken = H100.profile.collective("all_reduce", first.ran.bytes, 2)
    product = product_time(H100, first.beside[0], 1, in_bf16=True)
    assert product < taken, "more is sent than hides behind one product"
    for overlap in (0.0, 0.81, 1.0):
        machine = replace(H100, overlap=overlap)
        time = step_time(replace(REHEARSAL, work=meter.work), machine, 2).tensor_parallel
        assert time == pytest.approx(2 * taken - overlap * product)
    slow = replace(H100, peak_bf16=1e12)
    assert step_time(replace(REHEARSAL, work=meter.work), slow, 2).tensor_parallel == pytest.approx(1.19 * taken)


@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_in_the_backward_pass_products_are_computed_before_collectives_are_waited_for(sequence_parallel: bool) -> None:
    model, batch = tiny_model(), {"input_ids": torch.ones(2, 16, dtype=torch.long, device="meta")}
    batch["labels"] = batch["input_ids"]
    plan, _ = make_plan(model, 2, example_inputs=batch, sequence_parallel=sequence_parallel)
    ran = rehearse(local_model(model, plan), batch, precision="32-true")
    numbers = [number for number, one in enumerate(ran.work.ran) if one.collective and one.place]
    sent = {"forward": [ran.work.sent(number) for number in numbers if number < ran.forward]}
    sent["backward"] = [ran.work.sent(number) for number in numbers if number >= ran.forward]
    assert {len(one.beside) for one in sent["forward"]} == {0}
    # Of attention's three layers and of the MLP's two: the inputs' gradients before the weights'.
    products = [(one.ran.collective, len(one.beside)) for one in sent["backward"]]
    of_layer = [(kind, number) for number in (2, 3) for kind in ("all_gather", "reduce_scatter")]
    expected = of_layer if sequence_parallel else [("all_reduce", 2), ("all_reduce", 3)]
    assert [one for one in products if one[1]] == 2 * expected


def test_what_goes_to_the_host_and_back_takes_time() -> None:
    machine = replace(H100, host_link_bandwidth=1e10, host_memory_bandwidth=1e11)
    kept = step_time(KEPT_ON_HOST, machine, 1, rows=3, passes=2)
    assert kept.host == pytest.approx(2 * 2 * (3 * 64 + 8) / 1e10)
    assert kept.others == pytest.approx(step_time(REHEARSAL, machine, 1, passes=0).others)
    large = replace(
        REHEARSAL, parameters=10**11, gradients=10**11, averaged=0, block=0, block_casts=0, casts=0, rest=10**10
    )
    alone = step_time(large, machine, 2, cpu_offload=True, passes=2)
    fetched = (2 * 9e10 + 1e10) / 1e10  # blocks twice, the rest once
    adding = 3 * 1e11 * 2 / 1e11  # of both ranks, which share the host's memory
    assert alone.host == pytest.approx(2 * (fetched + 10) + adding)
    assert alone.update == pytest.approx(6e9 * 2 / 1e11)
    assert alone.copies == 0
    several = step_time(large, machine, 1, cpu_offload=True, copies=2)
    room = several.products + several.others - 2 * machine.between(2).collective("all_gather", 1e11, 2)
    assert several.host == pytest.approx(fetched / 2 - max(0.0, room) + 10 / 2)
    with pytest.raises(ValueError, match="H100: its file does not say host_memory_bandwidth"):
        step_time(large, replace(machine, host_memory_bandwidth=None), 1, cpu_offload=True)


def test_replicas_send_sums_of_gradients_over_the_network_and_no_parameters() -> None:
    machine = replace(H100, gpus=16)
    within, over = machine.between(8), machine.between(16)
    slow = replace(REHEARSAL, parameters=10**12, averaged=10**12, block=0, block_casts=0, casts=0, rest=0)
    single = step_time(slow, machine, 1)
    hybrid = step_time(slow, machine, 1, copies=16, replicas=2)
    sent = 2 * within.collective("all_gather", 1e12, 8) + within.collective("reduce_scatter", 1e12, 8)
    sent += over.collective("all_reduce", 1e12 / 8, 2)
    hidden = 0.81 * (single.total - single.update)
    assert hybrid.copies + hybrid.network == pytest.approx(sent - hidden + within.collective("all_gather", 0, 8))
    sums = over.collective("all_reduce", 1e12 / 8, 2)
    assert hybrid.network == pytest.approx((sent - hidden) * sums / sent), "of both links what their collectives take"
    alone = step_time(slow, machine, 1, copies=16)
    assert (alone.copies, alone.network > hybrid.copies + hybrid.network) == (0, True)
    assert hybrid.update == single.update / 8


@lru_cache
def recommended(gpus: str) -> Recommendation:
    return recommend(tiny_model(1), gpus=gpus, tokens_per_step=512 * 16, sequence_length=512)


def check_lines(found: Recommendation, choice: Choice) -> None:
    """The lines run, and make a strategy with exactly the options that were rated."""
    lines = python_lines(found, choice)
    with mock.patch("lightning.Trainer") as made:  # a real one asks for the GPUs
        exec(lines, {})
    given = made.call_args.kwargs
    strategy = given.pop("strategy", None)
    trainer = yaml.safe_load(yaml_lines(found, choice))["trainer"]
    assert given == {name: value for name, value in trainer.items() if name != "strategy"}
    assert given["devices"] * given["num_nodes"] == choice.gpus
    assert (given["accumulate_grad_batches"], given["precision"]) == (choice.passes, found.precision)
    is_plain = choice.gpus == 1 and choice.activation_checkpointing is None and not choice.cpu_offload
    assert (strategy is None) == is_plain == ("strategy" not in trainer)
    if strategy is None:
        return
    calls = [node for node in ast.walk(ast.parse(lines)) if isinstance(node, ast.Call)]
    keywords = next(call.keywords for call in calls if ast.unparse(call.func) == "AutoTPStrategy")
    options = {str(each.arg): ast.literal_eval(each.value) for each in keywords}
    pasted = trainer["strategy"]["init_args"]
    assert {name: list(one) if isinstance(one, tuple) else one for name, one in options.items()} == pasted
    assert strategy.tensor_ranks == choice.tensor_parallel_size
    assert (strategy.data_ranks, strategy._replicas) == (choice.data_parallel_size, choice.replicas)
    assert strategy.activation_checkpointing == choice.activation_checkpointing
    assert strategy.cpu_offload == choice.cpu_offload
    planned = PlanOptions(
        (choice.rows, found.length), memory=found.limit or "device", sequence_parallel=choice.sequence_parallel
    )
    assert strategy.plan_options == planned


@pytest.mark.parametrize(
    ("gpus", "sizes"),
    [
        ("2xH100", {(1, 1, 1), (1, 2, 1), (2, 1, 1)}),
        ("16xH100", {(1, 16, 2), (1, 16, 1), (2, 8, 2), (4, 4, 2), (8, 2, 1), (1, 8, 1), (8, 1, 1)}),
    ],
)
def test_what_is_recommended_can_be_pasted(gpus: str, sizes: set[tuple[int, int, int]]) -> None:
    found = recommended(gpus)
    seen = {(each.tensor_parallel_size, each.data_parallel_size, each.replicas) for each in found.choices}
    assert seen == sizes if gpus == "2xH100" else seen > sizes
    assert {each.activation_checkpointing for each in found.choices} == {None, "blocks"}
    assert not any(each.uses_host for each in found.choices)
    assert all(each.tokens == 512 * 16 for each in found.choices)
    assert "one GPU is enough" in "\n".join(reasons(found))
    for choice in found.choices:
        check_lines(found, choice)
    console = Console(width=80, record=True)
    console.print(table(found))
    assert max(len(line.rstrip()) for line in console.export_text().splitlines()) <= 80


@pytest.mark.parametrize(
    ("gpus", "rows", "sizes"),
    [
        ("8xH100", 12, {(1, 6, 1), (2, 4, 1), (4, 2, 1), (8, 1, 1)}),
        ("24xH100", 48, {(1, 24, 3), (1, 24, 1), (2, 12, 3), (8, 3, 1)}),
        ("12xH100", 24, {(1, 12, 2), (2, 6, 2), (4, 2, 1)}),  # two nodes of six
        ("3xA100-80", 6, {(1, 3, 1), (3, 1, 1)}),
    ],
)
def test_all_gpus_are_used_for_a_step_of_as_many_tokens_as_asked_for(
    gpus: str, rows: int, sizes: set[tuple[int, int, int]]
) -> None:
    found = recommend(tiny_model(1), gpus=gpus, tokens_per_step=512 * rows, sequence_length=512)
    seen = {(each.tensor_parallel_size, each.data_parallel_size, each.replicas) for each in found.choices}
    assert seen > sizes
    assert {each.tokens for each in found.choices} == {512 * rows}
    for each in found.choices:
        of_node, rest = divmod(each.gpus, each.nodes)
        assert (rest, of_node % each.tensor_parallel_size) == (0, 0)
        assert of_node <= found.machine.gpus_per_node
        check_lines(found, each)
    speeds = [each.tokens_per_second for each in found.choices if each.fits]
    assert speeds == sorted(speeds, reverse=True)


def test_copies_that_do_not_divide_a_step_make_it_a_little_larger_and_it_is_said() -> None:
    asked = 512 * 61 + 17
    found = recommend(tiny_model(1), gpus="2xH100", tokens_per_step=asked, sequence_length=512)
    assert {each.tokens // 512 for each in found.choices if each.data_parallel_size == 2} <= {62, 64}
    assert {each.tokens // 512 for each in found.choices if each.data_parallel_size == 1} <= {61, 62, 63, 64}
    assert found.best is not None
    said = f"a step has {found.best.tokens:,} tokens instead of {asked:,}: rows of 512"
    assert said in "\n".join(reasons(found))
    one = next(each for each in found.choices if each.data_parallel_size == 1 and each.tensor_parallel_size == 2)
    assert "2 of 4 GPUs are used" in "\n".join(
        reasons(replace(found, machine=replace(found.machine, gpus=4), choices=(one,)))
    )


def test_rows_are_not_longer_than_the_model_has_positions_for() -> None:
    model: Any = tiny_model(1)
    longest = model.config.max_position_embeddings
    assert recommend(model, gpus="1xH100", tokens_per_step=2 * longest).length == min(longest, 4096)
    with pytest.raises(ValueError, match=rf"sequence_length={longest + 1}: the model has {longest} positions"):
        recommend(model, gpus="1xH100", sequence_length=longest + 1)


def test_a_ranking_has_80_columns_and_the_best_way_all_kinds_of_memory_and_links() -> None:
    found = recommended("16xH100")
    (first, *_) = found.choices
    kept = Memory(70e9, 0.1e9, 70e9, 12e9, 3e9, 2e9, "loss")
    time = StepTime(20.0, 3.0, 2.0, 1.5, 1.25, 0.5, 1.0)
    sizes = {"tensor_parallel_size": 4, "data_parallel_size": 64, "replicas": 8, "rows": 16, "passes": 16}
    wide = replace(
        first, **sizes, sequence_parallel=True, activation_checkpointing="blocks", cpu_offload=True, memory=kept,
        time=time, tokens=10**7,
    )  # fmt: skip
    ranked = replace(found, choices=(wide, replace(first, fits=False)))
    for of in (found, ranked):
        console = Console(width=80, record=True)
        console.print(table(of))
        text = console.export_text()
        assert max(map(len, map(str.rstrip, text.splitlines()))) <= 80
        assert "…" not in text
    assert "4x8x8 sp ck po 16x16  65  0.1  65  11 2.8 1.9 146   20 4.0  5.2  342k" in text
    assert legend(ranked).count(" 2.79 GiB are reserved. s of an optimizer step") == 1
    said = "\n".join(reasons(ranked))
    assert "optimizer states 65.19, activations 11.18, the loss 2.79, gathered by FSDP2 1.86, reserved (" in said
    assert (
        "time in s: matrix products 20, other operators 3.0, the optimizer's step 1.0, tensor parallelism (in a" in said
    )
    assert "node) 2.0, FSDP2 (in a node) 1.5, FSDP2 (between nodes) 1.2, host memory (its link) 0.5, of 29" in said


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
    found = recommend(tiny_model(1), gpus="1xH100", tokens_per_step=512, sequence_length=512, lora=2)
    for choice in found.choices:
        assert 0 < choice.memory.states < choice.memory.parameters / 4


def test_what_does_not_fit_says_what_would_help() -> None:
    small = replace(H100, gpus=1, memory=H100.reserved + 1e5)
    found = recommend(tiny_model(), gpus=small, tokens_per_step=512, sequence_length=512)
    assert found.best is None
    said, of_host = reasons(found)
    tried = "not even with checkpointed blocks, activations in host memory, parameters in host memory"
    assert said.startswith(f"nothing fits, {tried}: ")
    assert "most of it" in said
    assert of_host.startswith("host memory: ")
    unknown = recommend(
        tiny_model(), gpus=replace(small, host_link_bandwidth=None), tokens_per_step=512, sequence_length=512
    )
    said, left_out = reasons(unknown)
    assert said.startswith("nothing fits, not even with checkpointed blocks: ")
    assert left_out == "left out: in host memory: the file of H100 does not say host_link_bandwidth"


def least(found: Recommendation, ranks: int, uses_host: bool) -> float:
    """Bytes that the smallest such way needs, of those with one row."""
    return min(
        choice.memory.total
        for choice in found.choices
        if choice.tensor_parallel_size == ranks and choice.uses_host == uses_host
    )


@pytest.fixture(scope="module")
def nothing_fits() -> Recommendation:
    small = replace(Machine.of("2xRTX4090"), memory=1.5e9 + 1.0, reserved=1.5e9)
    return recommend(tiny_model(), gpus=small, tokens_per_step=2 * 64, sequence_length=64, precision="32-true")


def test_host_memory_is_used_where_nothing_fits_without(nothing_fits: Recommendation) -> None:
    ways = {(kept, offload) for kept in (None, "blocks", "offload") for offload in (False, True)}
    assert {(each.activation_checkpointing, each.cpu_offload) for each in nothing_fits.choices} == ways
    room = 0.99 * min(least(nothing_fits, ranks, False) for ranks in (1, 2))
    assert room > min(least(nothing_fits, ranks, True) for ranks in (1, 2))
    small = replace(nothing_fits.machine, memory=nothing_fits.machine.reserved + room, host_memory=1e12)
    found = recommend(tiny_model(), gpus=small, tokens_per_step=2 * 64, sequence_length=64, precision="32-true")
    best = found.best
    assert best is not None
    assert best.uses_host
    said = "\n".join(reasons(found))
    assert "nothing fits without host memory: " in said
    assert f"host memory: {in_units(best.host_memory)} of 931 GiB of a node" in said
    unknown = replace(found, machine=replace(small, host_memory=None))
    assert " of a node; how much it has is not known" in "\n".join(reasons(unknown))
    for choice in found.choices:
        check_lines(found, choice)
    console = Console(width=80, record=True)
    console.print(table(found))
    assert max(len(line.rstrip()) for line in console.export_text().splitlines()) <= 80


def test_a_node_s_memory_is_enough_or_it_does_not_fit() -> None:
    machine = replace(Machine.of("1xH100"), memory=H100.reserved + 1.5e6)
    options = {"tokens_per_step": 64, "sequence_length": 64, "precision": "32-true"}
    roomy = recommend(tiny_model(), gpus=machine, **options)  # type: ignore[arg-type]
    assert roomy.best is not None
    assert roomy.best.uses_host
    cramped = recommend(tiny_model(), gpus=replace(machine, host_memory=1.0), **options)  # type: ignore[arg-type]
    assert cramped.best is None
    assert "but more host memory than a node has" in next(reasons(cramped))


def test_a_limit_of_memory_is_kept_and_planned_for() -> None:
    options = {"gpus": "2xH100", "tokens_per_step": 64 * 64, "sequence_length": 64}
    usual = recommend(tiny_model(1), **options)  # type: ignore[arg-type]
    limit = 1.01 * min(choice.memory.total for choice in usual.choices)
    found = recommend(tiny_model(1), **options, memory=limit)  # type: ignore[arg-type]
    assert found.best is not None
    assert found.best.memory.total <= limit == found.room
    assert found.best.tokens_per_second < usual.best.tokens_per_second  # type: ignore[union-attr]
    assert all(choice.fits == (choice.memory.total <= limit) for choice in found.choices)
    for choice in found.choices:
        check_lines(found, choice)
        assert f"memory={limit!r}" in python_lines(found, choice) or choice.gpus == 1
    with pytest.raises(ValueError, match=r"memory=100000000000.0: .*tensors may take 7.7e\+10 of a GPU \(H100\)"):
        recommend(tiny_model(), **options, memory=1e11)  # type: ignore[arg-type]


def test_what_is_recommended_is_what_the_strategy_makes(nothing_fits: Recommendation) -> None:
    room = 1.01 * least(nothing_fits, 2, False)
    assert room < least(nothing_fits, 1, False)
    # Its slow links would be another reason not to divide: the strategy does not know of them.
    slow = replace(nothing_fits.machine, memory=nothing_fits.machine.reserved + room)
    found = recommend(tiny_model(), gpus=slow, tokens_per_step=64, sequence_length=64, precision="32-true")
    best, model = found.best, tiny_model()
    assert best is not None
    assert best.tensor_parallel_size == 2
    options = {"tokens_per_step": (best.rows, 64), "sequence_parallel": best.sequence_parallel}
    plan, _ = make_plan(model, 2, **options)  # type: ignore[arg-type]
    local = local_model(model, plan)
    if best.activation_checkpointing == "blocks":
        checkpoint_blocks(local)
    row = one_row(model, language_model_inputs(model), 64)
    assert best.memory == memory(rehearse(local, row, precision="32-true"), best.rows)


class Reader(nn.Module):
    """Returns logits, as most modules do that somebody wrote by hand; its loss is the training step's."""

    def __init__(self, wrapped: Callable[[torch.Tensor], Any] = lambda logits: logits) -> None:
        super().__init__()
        self.embedding, self.head, self.wrapped = nn.Embedding(96, 32), nn.Linear(32, 96), wrapped

    def forward(self, words: torch.Tensor) -> Any:
        return self.wrapped(self.head(self.embedding(words)))


def next_word(output: torch.Tensor, row: dict[str, Any]) -> torch.Tensor:
    return nn.functional.cross_entropy(output[:, :-1].flatten(0, 1), row["words"][:, 1:].flatten())


def test_any_module_is_asked_about_whose_loss_is_the_training_step_s() -> None:
    asked = {"gpus": "2xH100", "tokens_per_step": 4 * 64, "precision": "32-true"}
    batch = {"words": torch.zeros(1, 64, dtype=torch.long)}
    logits = recommend(Reader(), batch, loss=next_word, **asked)  # type: ignore[arg-type]
    assert {(each.tensor_parallel_size, each.data_parallel_size) for each in logits.choices} == {(1, 1), (1, 2), (2, 1)}
    alone = next(each for each in logits.choices if each.gpus == 1)
    several = {"words": torch.zeros(7, 64, dtype=torch.long)}
    assert recommend(Reader(), several, loss=next_word, **asked).choices == logits.choices  # type: ignore[arg-type]
    elements = 96 * 32 + 32 * 96 + 96
    assert (alone.memory.parameters, alone.memory.states, alone.tokens) == (4 * elements, 8 * elements + 3 * 4, 4 * 64)
    wraps: dict[str, Callable[[torch.Tensor], Any]] = {
        "a number": lambda logits: logits.mean(),
        "a tuple": lambda logits: (logits.mean(), logits),
        "a mapping": lambda logits: {"loss": logits.mean()},
    }
    for kind, wrapped in wraps.items():
        by_itself = recommend(Reader(wrapped), batch, **asked)  # type: ignore[arg-type]
        assert [each.gpus for each in by_itself.choices], kind
    with pytest.raises(
        RehearsalError, match=r"returns \(a tensor of shape \[1, 64, 96\]\) has no loss: say how it is computed"
    ):
        recommend(Reader(), batch, **asked)  # type: ignore[arg-type]


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
