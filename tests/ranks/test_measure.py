"""A machine that is measured: what is timed, and what its file says of it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch.distributed as dist
from distributed import run_ranks

from lightning_autotp.cli import measure_machine
from lightning_autotp.planning import measure as measuring
from lightning_autotp.planning.machines import Machine
from lightning_autotp.planning.measure import measure

LATENCY, LINK, PASSES, OVERLAP = 1e-3, 2e9, 1.5, 0.75


def figures_of_synthetic_times(rank: int, size: int) -> tuple[dict[str, float], set[str]]:
    timed: list[tuple[str, int]] = []

    def noted(name: str) -> Callable[..., Any]:
        send = getattr(dist, name)

        def call(*tensors: Any, async_op: bool = False) -> Any:
            timed.append((f"begun {name}" if async_op else name, max(tensor.nbytes for tensor in tensors)))
            return send(*tensors, async_op=async_op)

        return call

    def seconds(call: Callable[[], Any], kind: str) -> float:
        timed.append(("other", 0))
        call()
        name, bytes_of = timed[-1]
        beside = (1 - OVERLAP) * LATENCY if name.startswith("begun ") else 0.0  # what is computed takes LATENCY alone
        name = name.removeprefix("begun ")
        crossed = {"all_reduce": PASSES, "all_gather_into_tensor": 0.5, "reduce_scatter_tensor": 1.5}.get(name, 0.0)
        return LATENCY + beside + (crossed * (size - 1) / size * bytes_of / LINK if bytes_of > 1024 else 0.0)

    names = ("all_reduce", "all_gather_into_tensor", "reduce_scatter_tensor")
    collectives = mock.patch.multiple(dist, **{name: noted(name) for name in names})
    sizes = mock.patch.dict(measuring._WIDTHS, cpu=(64, 128))
    with collectives, sizes, mock.patch.object(measuring, "_seconds", seconds):
        return measuring._figures("cpu", size), {name for name, _ in timed}


def test_links_are_what_gathers_and_scatters_reach_and_an_all_reduce_takes_so_many_passes() -> None:
    for figures, timed in run_ranks(figures_of_synthetic_times, 3):
        assert timed == {"all_reduce", "begun all_reduce", "all_gather_into_tensor", "reduce_scatter_tensor", "other"}
        assert figures["latency"] == LATENCY
        assert figures["link_bandwidth"] == pytest.approx(LINK, rel=1e-4)
        assert figures["all_reduce_passes"] == pytest.approx(PASSES, rel=1e-4)
        assert figures["overlap"] == pytest.approx(OVERLAP)


def check_planned_for(file: Path, printed: str) -> Machine:
    assert printed == file.read_text()
    machine = Machine.of(f"4x{file}")
    assert (machine.gpus, machine.gpus_per_node, machine.reached) == (4, 2, 1.0)
    assert machine.network_bandwidth == machine.link_bandwidth
    return machine


def test_what_is_measured_can_be_planned_for(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    figures, _ = run_ranks(figures_of_synthetic_times, 2)[0]

    def spawn(rank: Any, given: tuple[Any, ...], nprocs: int) -> None:
        assert (given[0], nprocs) == (2, 2)
        given[-1].put(figures)

    with mock.patch.object(measuring.mp, "spawn", spawn):
        measure_machine(tmp_path / "mine.yaml", 2, "cpu")
    machine = check_planned_for(tmp_path / "mine.yaml", capsys.readouterr().out)
    assert machine.link_bandwidth == pytest.approx(LINK, rel=1e-4)
    assert len(machine.product_rates_bf16) == len(machine.product_rates_fp32) == 4  # two of many small matrices
    assert machine.device == "cpu"
    assert machine.operator_overhead is not None
    assert 0 < machine.operator_overhead < LATENCY  # a call of several operators takes that long here
    for rates in (machine.operator_rates_bf16, machine.operator_rates_fp32):
        assert {"aten._softmax", "aten._log_softmax_backward_data", "aten.exp"} < dict(rates).keys()
        assert sum("attention" in name for name, _ in rates) == 2  # forward and backward


@pytest.mark.nightly  # daily, with synthetic times
def test_two_processes_measure_a_machine_that_can_be_planned_for(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "mine.yaml"
    measure_machine(file, 2, "cpu")
    machine = check_planned_for(file, capsys.readouterr().out)
    # A gather takes longer than a small all-reduce, and products more than none, whatever else the processor does.
    assert 1e6 < machine.link_bandwidth < 1e12
    assert 0.1 < machine.all_reduce_passes < 100
    assert 0 <= machine.overlap <= 1
    assert machine.profile.collective("all_gather", 2**26, 2) > machine.latency > 0


@pytest.mark.parametrize("processes", [0, 1])
def test_one_process_has_nothing_to_send(processes: int) -> None:
    with pytest.raises(ValueError, match="two or more"):
        measure(processes, "cpu")
