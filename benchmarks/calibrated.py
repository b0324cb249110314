"""Predict this project's steps of compare.py on this machine, as measure-machine finds it, and measure them.

    python benchmarks/calibrated.py                           # all models, and docs/calibrated-times.md
    python benchmarks/calibrated.py --case '[Mixtral]' --page null  # one

The machine is measured before and after each model, since its speed changes; no step that is predicted is used for
that. Steps and the machine's figures are medians of several.
"""

from __future__ import annotations

import os
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import combinations
from pathlib import Path
from typing import Any

import torch
from jsonargparse import auto_cli
from peers.cases import CASES, TINY
from peers.run import measure as measure_steps
from peers.systems import ONE, OURS
from rich.console import Console
from rich.table import Table
from scipy.stats import binomtest
from torch import Tensor
from transformers import AutoModelForCausalLM

from lightning_autotp import make_plan
from lightning_autotp.planning.estimate import StepTime, step_time
from lightning_autotp.planning.machines import Machine
from lightning_autotp.planning.measure import measure as measure_machine
from lightning_autotp.planning.rehearsal import Rehearsal, fullest_rank, local_model, rehearse

PAGE = Path(__file__).parent.parent / "docs" / "calibrated-times.md"
REACH = 0.15
"""How far off a prediction may be."""
COMPILED = "lightning_autotp, compiled"
KEEP_MEMORY = {"MALLOC_MMAP_MAX_": "0", "MALLOC_TRIM_THRESHOLD_": str(2**40)}
"""Environment in which the C library keeps memory that is freed, as PyTorch's allocator does on a GPU."""
ON_MEMORY = (
    "All processes keep memory that is freed (`"
    + " ".join(f"{name}={value}" for name, value in KEEP_MEMORY.items())
    + "`), as PyTorch's allocator does on a GPU. By default the C library asks the operating system anew for each"
    " result of more than 32 MiB, and a processor writes such memory several times as slowly."
)
HEADER = (
    "system",
    "products",
    "other operators",
    "sent",
    "predicted",
    "measured",
    "off",
    "of one process",
    "measured ",
)


@dataclass(frozen=True)
class Row:
    """A system's step of one model.

    Attributes:
        system: its name.
        predicted: what it is to take.
        seconds: of each step, in turn with those of the other systems.
    """

    system: str
    predicted: StepTime
    seconds: Sequence[float]

    @property
    def measured(self) -> float:
        """Median seconds."""
        return statistics.median(self.seconds)

    @property
    def off(self) -> float:
        """By which share of what is measured the prediction is more."""
        return self.predicted.total / self.measured - 1


def typical(found: Sequence[Machine]) -> Machine:
    """A machine that was measured several times: of each figure the mean."""
    names = (
        "peak_bf16",
        "peak_fp32",
        "memory_bandwidth",
        "operator_overhead",
        "link_bandwidth",
        "latency",
        "all_reduce_passes",
        "overlap",
    )
    mean: dict[str, Any] = {name: statistics.fmean(getattr(machine, name) for machine in found) for name in names}
    for name in ("product_rates_bf16", "product_rates_fp32", "operator_rates_bf16", "operator_rates_fp32"):
        of_each = zip(*[getattr(machine, name) for machine in found], strict=True)
        mean[name] = tuple((pairs[0][0], statistics.fmean(rate for _, rate in pairs)) for pairs in of_each)
    return replace(found[0], **mean)


def _reading(output: Any, _: Any) -> Tensor:
    """The loss, after code has asked the logits for the best word."""
    output.logits.argmax(-1)
    loss: Tensor = output.loss
    return loss


def rehearsals(name: str, ranks: int) -> dict[str, Rehearsal]:
    """A step of each system of this project, without values. A compiled one's is that of the same code."""
    case = CASES[name]
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(case.config()).train()
        tokens = torch.empty(case.rows, case.length, dtype=torch.long)
    batch = {"input_ids": tokens, "labels": tokens, "use_cache": False}

    def step(size: int, sequence_parallel: bool = False, loss: Callable[[Any, Any], Tensor] | None = None) -> Rehearsal:
        plan = None
        if size > 1:
            plan, _ = make_plan(
                model,
                size,
                example_inputs=batch,
                tokens_per_step=(case.rows, case.length),
                sequence_parallel=sequence_parallel,
            )
        local = local_model(model, plan, 0 if plan is None else fullest_rank(plan))
        return rehearse(local, batch, precision="32-true", optimizer="none", loss=loss)

    eager = step(ranks)
    ours = (eager, step(ranks, sequence_parallel=True), eager, step(ranks, loss=_reading))
    return {ONE: step(1), **dict(zip(OURS, ours, strict=True))}


def predicted(
    rehearsed: Mapping[str, Rehearsal], seconds: Mapping[str, Sequence[float]], machine: Machine, ranks: int
) -> list[Row]:
    """Each system's step."""
    return [
        Row(name, step_time(rehearsed[name], machine, 1 if name == ONE else ranks, in_bf16=False), took)
        for name, took in seconds.items()
    ]


def compared(rows: Sequence[Row]) -> Iterator[tuple[str, bool]]:
    """Which of two systems is not the faster one that is predicted to be; and whether the steps tell.

    Each step is compared with that of the same round, since the machine's speed changes between rounds. They tell where
    so many rounds agree as would by chance in less than one case of twenty (sign test).
    """
    for pair in combinations([row for row in rows if row.system != COMPILED], 2):
        sooner, later = sorted(pair, key=lambda row: row.predicted.total)
        ratios = [a / b for a, b in zip(sooner.seconds, later.seconds, strict=True)]
        slower = sum(ratio > 1 for ratio in ratios)
        is_told = binomtest(slower, len(ratios)).pvalue < 0.05
        if is_told and 2 * slower > len(ratios):
            faster = statistics.median(ratios) - 1
            yield f"{sooner.system} before {later.system}, which was {faster:.1%} faster", True
        elif not is_told:
            yield f"{sooner.system} and {later.system} ({slower} of {len(ratios)} steps longer)", False


def cells(row: Row, one: Row) -> tuple[str, ...]:
    """A row of the table."""
    time = row.predicted
    parts = (time.products, time.others, time.tensor_parallel, time.total, row.measured)
    shares = (time.total / one.predicted.total, row.measured / one.measured)
    return row.system, *(f"{1e3 * part:,.0f} ms" for part in parts), f"{row.off:+.0%}", *(f"{x:.2f}" for x in shares)


def verdict(found: Mapping[str, Sequence[Row]]) -> list[str]:
    """How many predictions are near enough, and which ranks are wrong."""
    every = [row for rows in found.values() for row in rows]
    near = sum(abs(row.off) <= REACH for row in every)
    lines = [f"{near} of {len(every)} predictions are within {REACH:.0%} of what was measured."]
    for case, rows in found.items():
        pairs = list(compared(rows))
        wrong, untold = ("; ".join(pair for pair, is_told in pairs if is_told is told) for told in (True, False))
        line = f"{case}: ranked {f'wrong: {wrong}' if wrong else 'right'}"
        lines.append(line + (f"; not told apart by these steps: {untold}." if untold else "."))
    return lines


def figures(machine: Machine) -> tuple[str, ...]:
    """What counts of a machine here."""
    small, large = (rate / 1e9 for _, rate in (machine.product_rates_fp32[0], machine.product_rates_fp32[-1]))
    reduced = machine.link_bandwidth / machine.all_reduce_passes
    sent = (f"{rate / 1e9:.2f} GB/s" for rate in (machine.link_bandwidth, reduced))
    memory = f"{machine.memory_bandwidth / 1e9:.1f} GB/s"
    latency, hidden = f"{1e6 * machine.latency:.0f} us", f"{machine.overlap:.0%}"
    return f"{small:.0f} to {large:.0f} GFLOP/s", memory, *sent, latency, hidden


def to_markdown(
    found: Mapping[str, Sequence[Row]], machines: Mapping[str, Machine], ranks: int, rounds: int, load: float
) -> str:
    """The page."""
    in_all, *by_model = verdict(found)
    lines = [
        "# Step times, calibrated and measured",
        "",
        f"What `lightning-autotp measure-machine` finds of this machine, {ranks} processes on {os.cpu_count()} cores,"
        " predicts the steps of this project that [benchmarks](benchmarks.md) times (forward and backward, fp32)."
        " Nothing is fitted to these steps. Written by `python benchmarks/calibrated.py`.",
        "",
        f"The machine is not this program's alone (a load of {load:.1f}), and its speed changes from one quarter of an"
        f" hour to the next. So each step is the median of {rounds}, and each figure of the machine the mean of two"
        " calibrations, before and after the model's steps, which are medians, too. One of two systems is the"
        " faster one if its step is in nearly all rounds (a sign test, 5 %).",
        "",
        "| model | products in fp32 | memory | between processes | of an all-reduce | latency | hidden |",
        "| --- | ---: | ---: | ---: | ---: | ---: | ---: |",
        *(f"| {' | '.join((name, *figures(machine)))} |" for name, machine in machines.items()),
        "",
        in_all,
        "",
        *(f"* {line}" for line in by_model),
        "",
        "*compiled* is predicted as the same code without a compiler, and not ranked: it is not known what one fuses."
        " *of one process* is the share of one process's step, predicted and measured. *sent* is what does not hide"
        " behind products that are computed meanwhile, in the backward pass; *hidden* the share of an all-reduce that"
        " does.",
        "",
        ON_MEMORY,
    ]
    if missing := [name for name in CASES if name != TINY and name not in found]:
        lines += ["", f"Not measured in this run: {'; '.join(missing)}."]
    for case, rows in found.items():
        lines += ["", f"## {case}", "", f"| {' | '.join(name.strip() for name in HEADER)} |"]
        lines += ["| --- |" + " ---: |" * (len(HEADER) - 1)]
        lines += [f"| {' | '.join(cells(row, rows[0]))} |" for row in rows]
    return "\n".join(lines) + "\n"


def main(
    ranks: int = 2, rounds: int = 9, case: list[str] | None = None, page: Path | None = PAGE, tiny: bool = False
) -> None:
    """Predict and measure.

    Args:
        ranks: processes.
        rounds: steps of each system that are timed, in turn.
        case: names of the models, or parts of them, in the order in which they are measured; all by default.
        page: where to write the page, after each model; ``null`` to print only.
        tiny: take a tiny model instead, to see that everything runs.
    """
    names = [TINY] if tiny else [name for name in CASES if name != TINY]
    wanted = names if case is None else [name for part in case for name in names if part in name]
    machines: dict[str, Machine] = {}
    found: dict[str, list[Row]] = {}
    loads: list[float] = []
    console = Console(width=120)
    os.environ |= KEEP_MEMORY  # of the processes that are started
    before = measure_machine(ranks, "cpu")
    for name in wanted:
        steps = measure_steps(name, ranks, rounds, list(OURS), 0)
        loads.append(os.getloadavg()[0])
        after = measure_machine(ranks, "cpu")
        machines[name], before = typical([before, after]), after
        seconds = {each.system: each.seconds for each in steps}
        found[name] = predicted(rehearsals(name, ranks), seconds, machines[name], ranks)
        table = Table(*HEADER, title=name)
        for row in found[name]:
            table.add_row(*cells(row, found[name][0]))
        console.print(table, *verdict(found), sep="\n")
        if page is not None:  # one of some models is better than none
            page.write_text(to_markdown(found, machines, ranks, rounds, sum(loads) / len(loads)))


if __name__ == "__main__":
    auto_cli(main)
