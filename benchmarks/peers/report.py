"""The table and the picture of what was measured."""

from __future__ import annotations

import os
import platform
from collections.abc import Mapping, Sequence
from pathlib import Path

import matplotlib
import torch
import transformers
from rich.console import Console
from rich.table import Table

from peers.cases import CASES
from peers.profile import KINDS
from peers.run import LOOKS, Measured
from peers.systems import OF_LLAMA, ONE, PEER

HEADER = ("system", "step", "of one process", "tokens/s", "peak", "collectives", "sent", "set-up")
MEGATRON = list(OF_LLAMA)[-1]


def rows(case: str, found: Sequence[Measured]) -> list[tuple[str, ...]]:
    """The table of one case, as text."""
    one = next(measured for measured in found if measured.system == ONE)
    tokens = CASES[case].rows * CASES[case].length
    return [
        (
            measured.system,
            f"{1e3 * measured.median:.0f} ms",
            f"{measured.beside(one):.2f}",
            f"{tokens / measured.median:,.0f}",
            f"{measured.held / 2**20:,.0f} MiB",
            str(measured.calls),
            f"{measured.sent:,.1f} MB",
            f"{measured.setup:.1f} s",
        )
        for measured in found
        if not measured.error
    ]


def spent(found: Sequence[Measured]) -> list[tuple[str, ...]]:
    """What the time of a step goes to, as text."""
    return [
        (measured.system, *(f"{1e3 * measured.spent[kind]:.0f} ms" for kind in KINDS))
        for measured in found
        if measured.spent
    ]


def ratios(found: Sequence[Measured]) -> list[str]:
    """This project's step beside the better of its peers, and beside Megatron's pattern by hand."""
    systems = {measured.system: measured for measured in found if not measured.error}
    ours = systems.get("lightning_autotp")
    peers = [measured for name, measured in systems.items() if name == PEER or name.startswith("torch")]
    lines = []
    if ours is not None and peers:
        best = min(peers, key=lambda measured: measured.median)
        lines.append(f"{ours.beside(best):.2f} of the time of {best.system}, the fastest peer")
        if ours.spent and best.spent:
            lines.append(
                f"{_beside_products(ours) / _beside_products(best):.2f} of that peer's time for all but products and"
                f" attention; these alone are {1 - _beside_products(best) / sum(best.spent.values()):.2f} of its step"
            )
    if ours is not None and MEGATRON in systems:
        lines.append(f"{ours.beside(systems[MEGATRON]):.2f} of the time of {MEGATRON}")
    return lines


def _beside_products(measured: Measured) -> float:
    """Seconds, under the profiler, of what a system can save: all but the products and attention that each must do."""
    return sum(seconds for kind, seconds in measured.spent.items() if kind not in ("products", "attention"))


def print_table(case: str, found: Sequence[Measured]) -> None:
    """Print one case."""
    table = Table(*HEADER, title=case)
    for row in rows(case, found):
        table.add_row(*row)
    console = Console(width=120)
    console.print(table)
    table = Table("system", *KINDS)
    for row in spent(found):
        table.add_row(*row)
    console.print(table)
    for line in ratios(found):
        console.print(f"lightning_autotp takes {line}")
    for measured in found:
        if measured.error:
            console.print(f"{measured.system} was not measured: {measured.error}", markup=False)


def to_markdown(found: Mapping[str, Sequence[Measured]], ranks: int, rounds: int, image: str) -> str:
    """The page."""
    where = (
        f"{ranks} GPUs ({torch.cuda.get_device_name()}, NCCL)"
        if torch.cuda.device_count() >= ranks
        else (f"{ranks} processes on {os.cpu_count()} cores ({platform.processor() or platform.machine()}, gloo)")
    )
    lines = [
        "# Benchmarks",
        "",
        "A training step (forward and backward, fp32) of the same model and batch on the same ranks. Everything runs in"
        f" the same processes, a step of each system in turn, in {rounds} rounds, each of which begins with another"
        " system: times are medians, and ratios are medians of the rounds' ratios, so that what else the machine does"
        " is shared. A system whose loss is not that of one process is not timed. Written by"
        f" `python benchmarks/compare.py` on {where}, with torch {torch.__version__.partition('+')[0]} and transformers"
        f" {transformers.__version__}.",
        "",
        f"![Times of a step]({image})",
        "",
        "- *peak*: parameters, and the most that a step holds besides, of the rank that holds most.",
        "- *collectives*, *sent*: of a step, by each rank, with collectives in rings.",
        "- *set-up*: from the model to one that is ready to be trained; here that is planning and proving, too.",
        f"- The second table says what a step of the first rank went to, medians of {LOOKS} more steps under PyTorch's"
        " profiler, which slows them down: matrix products, attention kernels, all other operators, and the rest"
        " (waiting for the other ranks, and Python). Every system computes the same products and attention, so no step"
        " can be a smaller part of a peer's than these are.",
    ]
    for case, measured in found.items():
        lines += [
            "",
            f"## {case}",
            "",
            " | ".join(("", *HEADER, "")).strip(),
            "| --- |" + " ---: |" * (len(HEADER) - 1),
        ]
        lines += ["| " + " | ".join(row) + " |" for row in rows(case, measured)]
        lines += ["", *(f"lightning_autotp takes {line}.  " for line in ratios(measured))]
        lines += ["", " | ".join(("", "system", *KINDS, "")).strip(), "| --- |" + " ---: |" * len(KINDS)]
        lines += ["| " + " | ".join(row) + " |" for row in spent(measured)]
        lines += [f"\n{each.system} does not train this model here." for each in measured if each.error]
    return "\n".join(lines).rstrip() + "\n"


def picture(found: Mapping[str, Sequence[Measured]], path: Path) -> None:
    """Draw the times of a step, of one process's, a panel for each case."""
    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, panels = pyplot.subplots(1, len(found), figsize=(4 * len(found), 3.6), squeeze=False)
    for panel, (case, measured) in zip(panels[0], found.items(), strict=True):
        good = [each for each in measured if not each.error][::-1]
        colors = ["tab:blue" if each.system.startswith("lightning") else "tab:gray" for each in good]
        panel.barh([each.system for each in good], [1e3 * each.median for each in good], color=colors)
        panel.set_title(case, fontsize=9)
        panel.set_xlabel("milliseconds a step")
        panel.tick_params(labelsize=7)
    figure.tight_layout()
    figure.savefig(path, dpi=110)
    pyplot.close(figure)
