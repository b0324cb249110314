"""Draws docs/folders.png: the folders of the package in order, what each imports, and the way from a model to files.

Everything but the way is read from the code. What was drawn is also in the file, as text that a test compares with the
imports as they are. Run it when that test says that the picture is old::

    python tools/folders.py
"""

from __future__ import annotations

import argparse
import ast
import json
import re
from itertools import pairwise
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot
from matplotlib.patches import FancyArrowPatch, FancyBboxPatch

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "lightning_autotp"
DATA = "Imports"
"""Name of the text in the picture's file that says what was drawn."""
WAY = (
    ("building", "model on meta"),
    ("capture", "graph"),
    ("operators", "relations, axes"),
    ("solving", "solution, plan"),
    ("applying", "local model"),
    ("proving", "proved model"),
    ("loading", "this rank's weights"),
    ("gradients", "training"),
    ("checkpoints", "files"),
)
"""The folders through which a model goes, and what comes out of each."""


def imports() -> dict[str, list[str]]:
    """Which other folders each folder imports from, in the order of the table in docs/architecture.md."""
    page = (ROOT / "docs" / "architecture.md").read_text()
    order = re.findall(r"^\| `(\w+)/` \|", page, re.MULTILINE)
    found = {name: _imported(PACKAGE / name) - {name} for name in order}
    return {name: [other for other in order if other in found[name]] for name in order}


def _imported(folder: Path) -> set[str]:
    """The folders that a folder's files import from, in functions too."""
    names: set[str] = set()
    for file in folder.rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.Import):
                names |= {alias.name for alias in node.names}
            elif isinstance(node, ast.ImportFrom):
                names |= {f"{node.module}.{alias.name}" for alias in node.names}
    return {name.split(".")[1] for name in names if name.startswith("lightning_autotp.")}


def draw(edges: dict[str, list[str]], target: Path) -> None:
    """Draw the folders from top to bottom, imports as arcs on the right, the way of the data on the left."""
    figure, axes = pyplot.subplots(figsize=(9, 10))
    height = {name: -float(number) for number, name in enumerate(edges)}
    colors = pyplot.get_cmap("tab20")
    for number, (name, others) in enumerate(edges.items()):
        box = FancyBboxPatch((-1.1, height[name] - 0.28), 2.2, 0.56, boxstyle="round,pad=0.05", fc="white", ec="black")
        axes.add_patch(box)
        axes.text(0, height[name], f"{name}/", ha="center", va="center", fontsize=11)
        for other in others:
            arc = FancyArrowPatch(
                (1.15, height[name]), (1.15, height[other]), connectionstyle="arc3,rad=0.55", arrowstyle="-|>",
                mutation_scale=7, color=colors(number % 20), lw=0.8, alpha=0.8,
            )  # fmt: skip
            axes.add_patch(arc)
    for (name, _), (after, _) in pairwise(WAY):
        bend = 0.5 if height[name] > height[after] else -0.9
        arrow = FancyArrowPatch(
            (-1.15, height[name]), (-1.15, height[after]), connectionstyle=f"arc3,rad={bend}", arrowstyle="-|>",
            mutation_scale=16, color="tab:blue", lw=2.5,
        )  # fmt: skip
        axes.add_patch(arrow)
    for number, (name, made) in enumerate(WAY, 1):
        axes.text(-2.9, height[name], f"{number}. {made}", ha="right", va="center", fontsize=11, color="tab:blue")
    axes.text(-2.9, 1, "what comes out", ha="right", fontsize=11, color="tab:blue")
    axes.text(1.2, 1, "imports from", fontsize=11, color="dimgray")
    axes.set(xlim=(-5.5, 6), ylim=(-len(edges) + 0.3, 1.6))
    axes.axis("off")
    figure.savefig(target, dpi=90, bbox_inches="tight", metadata={DATA: json.dumps(edges)})
    pyplot.close(figure)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--target", type=Path, default=ROOT / "docs" / "folders.png")
    draw(imports(), parser.parse_args().target)
