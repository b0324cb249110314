"""The benchmarks run from end to end, tiny and on the processor, so that none is broken when someone needs it."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import calibrated
import planner
import published
import pytest
from distributed import SCRIPT_ENVIRONMENT, run_python

from lightning_autotp.planning.estimate import StepTime
from lightning_autotp.planning.machines import Machine

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


def run(script: str, *options: str | Path) -> str:
    command = [sys.executable, script, *map(str, options)]
    environment = {**os.environ, **SCRIPT_ENVIRONMENT}
    return subprocess.run(
        command, cwd=BENCHMARKS, check=True, env=environment, text=True, stdout=subprocess.PIPE
    ).stdout


@pytest.mark.nightly
def test_steps_on_a_device(tmp_path: Path) -> None:
    page = tmp_path / "gpu.md"
    run("gpu.py", "--page", page, "--device", "cpu", "--tiny", "--rounds", "2")
    text = page.read_text()
    assert "failed" not in text
    steps = [line for line in text.splitlines() if " ms |" in line]
    assert len(steps) == 3 * 2 + 2 + 3  # three systems, eager and compiled; two of them as predicted; and three losses


@pytest.mark.nightly
def test_steps_beside_the_peers(tmp_path: Path) -> None:
    page = tmp_path / "benchmarks.md"
    run("compare.py", "--page", page, "--tiny", "true", "--rounds", "2")
    text = page.read_text()
    assert "a tiny Llama" in text
    assert len([line for line in text.splitlines() if line.endswith(" s |")]) == 9  # every system was timed
    assert page.with_suffix(".png").stat().st_size > 10_000


@pytest.mark.nightly
def test_steps_predicted_of_a_measured_machine(tmp_path: Path) -> None:
    page = tmp_path / "calibrated-times.md"
    run("calibrated.py", "--page", page, "--tiny", "true", "--rounds", "2")
    text = page.read_text()
    assert (
        len([line for line in text.splitlines() if "%" in line and " ms |" in line]) == 5
    )  # every system of this project
    assert " of 5 predictions are within 15% " in text


def test_which_systems_are_ranked_wrong() -> None:
    """What is predicted to be sooner may be later; a machine that was measured twice has the mean of each figure."""

    def row(system: str, predicted: float, *measured: float) -> calibrated.Row:
        return calibrated.Row(system, StepTime(predicted, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0), measured)

    # The machine is twice as slow in the second round, and again in the third.
    rows = [row("one process", 4.0, *[2.1, 4.2, 8.4] * 3), row("plain", 2.0, *[1.0, 2.0, 4.0] * 3)]
    rows.append(row("sequence parallel", 2.2, *[0.8, 1.6, 3.2] * 2, 0.8, 1.6, 4.4))
    rows.append(row(calibrated.COMPILED, 2.0, *[9.0] * 9))  # not ranked
    wrong = "plain before sequence parallel, which was 25.0% faster"
    assert list(calibrated.compared(rows)) == [(wrong, True)]
    near, rank = calibrated.verdict({"a model": rows})
    assert near == "2 of 4 predictions are within 15% of what was measured."
    assert rank == f"a model: ranked wrong: {wrong}."
    rows[2] = row("sequence parallel", 2.2, *[0.8, 1.6, 4.4] * 3)
    rank = calibrated.verdict({"a model": rows})[1]
    said = "a model: ranked right; not told apart by these steps: plain and sequence parallel (6 of 9 steps longer)."
    assert rank == said
    machine = replace(Machine.of("2xH100"), operator_rates_fp32=(("aten.exp", 2e12),))
    slower = {"peak_fp32": machine.peak_fp32 / 2, "link_bandwidth": machine.link_bandwidth / 2}
    machine = replace(machine, operator_overhead=1e-5)
    busy = replace(machine, latency=2 * machine.latency, operator_rates_fp32=(("aten.exp", 1e12),), **slower)
    busy = replace(busy, operator_overhead=3e-5)
    typical = calibrated.typical([busy, machine])
    assert typical.operator_overhead == pytest.approx(2e-5)
    assert typical.latency == pytest.approx(1.5 * machine.latency)
    assert typical.link_bandwidth == pytest.approx(0.75 * machine.link_bandwidth)
    assert typical.operator_rates_fp32 == (("aten.exp", pytest.approx(1.5e12)),)
    figures = ("latency", "peak_fp32", "link_bandwidth", "operator_rates_fp32", "operator_overhead")
    assert replace(typical, **{name: getattr(machine, name) for name in figures}) == machine


@pytest.mark.nightly
def test_the_page_of_published_times(tmp_path: Path) -> None:
    page = tmp_path / "published-times.md"
    run("published.py", "--page", page, "--only", "[GPT 7.1B]")
    (row,) = [line for line in page.read_text().splitlines() if line.startswith("| GPT")]
    assert "(http" in row


def test_published_times() -> None:
    """The rows of one model and both of its ways, of a small layer."""
    small = {"n_embd": 64, "num_hidden_layers": 1, "n_head": 8, "n_positions": 32, "vocab_size": 64}
    rows = [
        replace(row, sizes={**row.sizes, **small}, ranks=2, length=32)
        for row in published.ROWS
        if row.name == "GPT 22B"
    ]
    found = [(row, published.Planner().predict(row)) for row in rows]
    lines = [line for line in published.to_markdown(found).splitlines() if line.startswith("| GPT")]
    assert len(lines) == 2
    assert all("(http" in line and " s |" in line and "%" in line for line in lines)
    assert [" to " in line for line in lines] == [False, True]  # where only some operators are computed again
    assert 0 < found[1][1][0].total < found[1][1][1].total


@pytest.mark.nightly
def test_memory_of_the_loss_with_copies() -> None:
    lines = run("loss_memory.py", "--tokens", "64", "--words", "512", "--hidden", "64").splitlines()
    assert [line.partition(":")[0] for line in lines[-3:-1]] == ["1 x 2 ranks", "2 x 2 ranks"]
    assert 0.1 < float(lines[-1].removeprefix("with copies ").partition(" ")[0]) < 10
    assert lines[-1].endswith(f"a rank's logits would be {4 * 64 * 512 / 2 / 2**20:,.0f} MiB")


def test_what_a_layer_sends(tmp_path: Path) -> None:
    page = tmp_path / "real-sizes.md"
    done = run_python("real_sizes.py", "--page", str(page), "--only", "[Llama]", cwd=BENCHMARKS)
    assert done.returncode == 0, done.stderr
    rows = [line for line in page.read_text().splitlines() if line.startswith("| Llama")]
    assert len(rows) == 3  # without and with sequence parallelism, and with room for everything
    assert [row.count("| 4 all-reduces |") for row in rows] == [2, 0, 2], "planned and by hand"


def test_stages_of_planning() -> None:
    case = planner.Case("gpt2", 2, "n_layer", 2, {"n_embd": 64, "n_head": 4, "vocab_size": 131})
    seconds = planner.fastest(case, 2, 2)
    assert list(seconds) == list(planner.STAGES)
    assert all(stage.wall > 0 for stage in seconds.values())
    assert planner.total(seconds).wall >= seconds["make_plan"].wall
    page = planner.to_markdown(("model", "all"), [["gpt2", "1.00 (1.50)"]], planner.recommending(1, "2xH100"), 2)
    assert "| gpt2 | 1.00 (1.50) |" in page
