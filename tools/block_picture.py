"""Draws docs/block.png: the weights of one block in one process and on two ranks, and what the ranks send one another.

What is drawn is the plan that is made for a Llama with 9 query and 3 key/value heads. It is also in the picture's file,
as text that a test compares with a plan made anew. Run this when that test says that the picture is old::

    python tools/block_picture.py
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
import torch
from matplotlib import pyplot
from matplotlib.axes import Axes
from matplotlib.patches import Rectangle
from transformers import AutoConfig, AutoModelForCausalLM

from lightning_autotp import Plan, make_plan
from lightning_autotp.layouts.transitions import TRANSITIONS, Pair
from lightning_autotp.layouts.types import Shard

ROOT = Path(__file__).parents[1]
DATA = "Plan"
"""Name of the text in the picture's file that says what was drawn."""
RANKS = 2
BLOCK = "model.layers.0."
ROWS = (
    ("input_layernorm",),
    ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    ("self_attn.o_proj",),
    ("post_attention_layernorm",),
    ("mlp.gate_proj", "mlp.up_proj"),
    ("mlp.down_proj",),
)
"""Modules with weights, in the order in which they run; those of a row read the same tensor."""
SIZES = {"hidden_size": 144, "intermediate_size": 216, "num_attention_heads": 9, "num_key_value_heads": 3}
BETWEEN, BESIDE, THIN = 80.0, 30.0, 14.0
"""Distances between rows and within them, and the height of a norm's weight; a unit is one element."""
COLORS = ("tab:blue", "tab:orange")


def llama_plan() -> Plan:
    """The plan of the model that is drawn."""
    config = AutoConfig.for_model("llama", num_hidden_layers=1, vocab_size=1009, **SIZES)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    return make_plan(model, RANKS)[0]


def drawn(plan: Plan) -> dict[str, Any]:
    """What the picture says: each weight's shape and parts, and what is communicated before and after each row."""
    weights = {}
    for parameter in plan.parameters:
        module = parameter.names[0].removeprefix(BLOCK).removesuffix(".weight")
        if any(module in row for row in ROWS):
            cuts = parameter.layout.dims if isinstance(parameter.layout, Shard) else ()
            parts = [[[dim, list(owned.held[rank])] for dim, owned in cuts] for rank in range(plan.ranks)]
            weights[module] = {"shape": list(parameter.shape), "parts": parts}
    sent: dict[str, list[str]] = {}
    for change in plan.conversions:
        place = change.module.removeprefix(BLOCK)
        first = next((row for row in ROWS if row[0].startswith(f"{place}.")), None)
        if first is not None and change.side == "in":
            sent.setdefault(f"before {first[0]}", []).append(said((change.source.letter, change.target.letter)))
    for use in plan.implementations:
        module = use.module.removeprefix(BLOCK)
        if module in weights and use.output is not None:
            sent.setdefault(f"after {module}", []).append(said(use.output))
    return json.loads(json.dumps({"weights": weights, "sent": sent}))


def said(pair: Pair) -> str:
    """What a change of type sends."""
    row = TRANSITIONS[pair]
    ways = (("forward", row.forward), ("backward", row.backward))
    return ", ".join(f"{collective} ({way})" for way, collective in ways if collective)


def draw(figures: Mapping[str, Any], target: Path) -> None:
    """A column for one process and for each rank, a row for each step through the block."""
    weights, sent = figures["weights"], figures["sent"]
    widths = [sum(_size(weights[name])[0] for name in row) + BESIDE * (len(row) - 1) for row in ROWS]
    across = max(widths) + 2.5 * BESIDE
    figure, axes = pyplot.subplots(figsize=(11, 8))
    top = 0.0
    for row, width in zip(ROWS, widths, strict=True):
        if what := sent.get(f"before {row[0]}"):
            _note(axes, across, top + 0.55 * BETWEEN, what)
        for column in range(1 + RANKS):
            left = column * across + (across - width) / 2
            for name in row:
                _weight(axes, left, top, name, weights[name], column - 1)
                left += _size(weights[name])[0] + BESIDE
        top -= max(_size(weights[name])[1] for name in row)
        if row[0] == "self_attn.q_proj":
            for column in range(1 + RANKS):
                text = f"attention of {_heads(weights[row[0]], column - 1)} query heads"
                axes.text((column + 0.5) * across, top - 0.4 * BETWEEN, text, ha="center", fontsize=9)
        if what := sent.get(f"after {row[-1]}"):
            _note(axes, across, top - 0.35 * BETWEEN, what)
        top -= BETWEEN
    for column, title in enumerate(("one process", *(f"rank {rank}" for rank in range(RANKS)))):
        axes.text((column + 0.5) * across, 0.7 * BETWEEN, title, ha="center", va="center", weight="bold")
    axes.set_xlim(0, (1 + RANKS) * across)
    axes.set_ylim(top, BETWEEN)
    axes.set_aspect("equal")
    axes.axis("off")
    figure.savefig(target, dpi=90, bbox_inches="tight", metadata={DATA: json.dumps(figures)})
    pyplot.close(figure)


def _size(weight: Mapping[str, Any]) -> tuple[float, float]:
    """Width and height: a matrix is drawn as ``[in, out]``, a vector as a line."""
    shape = weight["shape"]
    return (shape[0], shape[1]) if len(shape) == 2 else (shape[0], THIN)


def _heads(queries: Mapping[str, Any], rank: int) -> int:
    """How many query heads a rank has; rank -1 is the one process."""
    features = queries["shape"][0]
    runs = [[0, features]] if rank < 0 else dict(queries["parts"][rank])[0]
    return sum(stop - start for start, stop in runs) * SIZES["num_attention_heads"] // features


def _weight(axes: Axes, left: float, top: float, name: str, weight: Mapping[str, Any], rank: int) -> None:
    """A weight's outline, filled where it is stored; rank -1 is the one process."""
    width, height = _size(weight)
    cuts = {} if rank < 0 else dict(weight["parts"][rank])
    color = "tab:gray" if not cuts else COLORS[rank]
    axes.add_patch(Rectangle((left, top - height), width, height, fill=False, ls=":", ec="tab:gray"))
    for start, stop in cuts.get(0, [(0, width)]):
        for upper, lower in cuts.get(1, [(0, height)]):
            place = (left + start, top - lower)
            axes.add_patch(Rectangle(place, stop - start, lower - upper, fc=color, ec="black", alpha=0.35))
    axes.text(left + width / 2, top + 3, name.rpartition(".")[2], ha="center", va="bottom", fontsize=7)


def _note(axes: Axes, across: float, height: float, what: list[str]) -> None:
    """What the ranks send one another, between their columns."""
    ends = (1.25 * across, (RANKS + 0.75) * across)
    axes.annotate("", (ends[0], height), (ends[1], height), arrowprops={"arrowstyle": "<->", "color": "tab:red"})
    axes.text(sum(ends) / 2, height, "\n".join(what), ha="center", va="bottom", color="tab:red", fontsize=9)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--target", type=Path, default=ROOT / "docs" / "block.png")
    draw(drawn(llama_plan()), parser.parse_args().target)
