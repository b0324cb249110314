"""Draws docs/memory.png: what a rank stores in a training step, alone, with tensor and with sequence parallelism.

The figures are the measured ones of docs/memory-measured.md. What was drawn is also in the file, as text that a test
compares with that page. Run it when that test says that the picture is old::

    python tools/memory_picture.py
"""

from __future__ import annotations

import argparse
import json
import re
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot

ROOT = Path(__file__).parents[1]
DATA = "Figures"
"""Name of the text in the picture's file that says what was drawn."""
BARS = {
    "Llama, TP=1": "one process",
    "Llama, TP=2": "two ranks",
    "Llama, sequence parallel": "two ranks,\nsequence\nparallelism",
    "Llama, checkpointing": "two ranks,\nactivation\ncheckpointing",
    "Llama, TP=4": "four ranks",
}
"""Rows of the page, and what a bar is called."""
PARTS = {
    "parameters": "tab:blue",
    "optimizer states": "tab:cyan",
    "activations kept for the backward pass": "tab:orange",
    "gradients and what an operator needs for a moment": "tab:gray",
}


def figures() -> dict[str, list[float]]:
    """MiB of each part at a step's peak, by the rows of the page."""
    page = (ROOT / "docs" / "memory-measured.md").read_text()
    heights = {}
    for row in BARS:
        [line] = re.findall(rf"^\| {re.escape(row)} \|(.*)\|$", page, re.MULTILINE)
        parameters, _, states, kept, peak, _ = (float(cell.split()[0]) for cell in line.split("|"))
        heights[row] = [parameters, states, kept, peak - kept]
    return heights


def draw(heights: dict[str, list[float]], target: Path) -> None:
    """A bar for each row, its parts one upon the other."""
    figure, axes = pyplot.subplots(figsize=(9, 4.5))
    bottoms = [0.0] * len(heights)
    for number, (part, color) in enumerate(PARTS.items()):
        sizes = [parts[number] for parts in heights.values()]
        axes.bar([BARS[row] for row in heights], sizes, bottom=bottoms, color=color, label=part)
        bottoms = [bottom + size for bottom, size in zip(bottoms, sizes, strict=True)]
    for place, total in enumerate(bottoms):
        axes.text(place, total, f"{total:.0f}", ha="center", va="bottom")
    axes.set_ylabel("MiB on a rank")
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False)
    figure.savefig(target, dpi=90, bbox_inches="tight", metadata={DATA: json.dumps(heights)})
    pyplot.close(figure)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--target", type=Path, default=ROOT / "docs" / "memory.png")
    draw(figures(), parser.parse_args().target)
