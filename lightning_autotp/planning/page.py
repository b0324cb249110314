"""A plan as one HTML page that needs nothing else: the model, a block, memory, a step in time, what stays whole.

The page's text is ``page.html.j2``; here is what it shows.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from jinja2 import Environment
from markupsafe import Markup, escape

from lightning_autotp.layouts.plan import ConversionPlan, ParameterPlan, Plan
from lightning_autotp.layouts.repeats import by_reason, rows_of
from lightning_autotp.layouts.transitions import TRANSITIONS, Pair
from lightning_autotp.layouts.types import Replicate, Shard
from lightning_autotp.layouts.units import in_units
from lightning_autotp.planning.overview import Overview, in_ms
from lightning_autotp.planning.recommend import Choice, Recommendation
from lightning_autotp.planning.report import KINDS, SHOWN, named
from lightning_autotp.planning.timeline import merged

TEMPLATE = Path(__file__).with_name("page.html.j2")
_SIDE = 130
"""Pixels of the longest dim of a block's weights."""
_LEAST = 10


@dataclass
class Node:
    """A module of the tree, or a parameter.

    Attributes:
        name: last part of its path.
        shape: a rank's part of each dim and the whole; of a parameter.
        layout: ``"sharded"``, ``"whole"`` or ``"summed"`` (whole, and its gradients are added up); of a parameter.
        layer: which parallel layer it is of.
        bytes: that the rank shown stores.
        inside: by name.
    """

    name: str
    shape: str = ""
    layout: str = ""
    layer: str = ""
    bytes: str = ""
    inside: dict[str, Node] = field(default_factory=dict)


@dataclass(frozen=True)
class Stripe:
    """A part of a weight's picture, in pixels, and the ranks that store it."""

    x: float
    y: float
    width: float
    height: float
    ranks: tuple[int, ...]


@dataclass(frozen=True)
class Picture:
    """A weight: its size in pixels and its parts."""

    name: str
    said: str
    width: float
    height: float
    stripes: tuple[Stripe, ...]


@dataclass(frozen=True)
class Card:
    """A module of the block, with what happens to layouts before and after it."""

    name: str
    layer: str
    before: tuple[str, ...]
    after: tuple[str, ...]
    pictures: tuple[Picture, ...]


def page(seen: Overview, sizes: Recommendation | None = None) -> str:
    """The page.

    Args:
        seen: a plan and what a step of it takes.
        sizes: other ways to train the model on as many GPUs.
    """
    plan, spans = seen.plan, list(merged(seen.spans))
    block = next((span.place for span in spans if span.place), "")
    end = max(spans[-1].start + spans[-1].seconds, 1e-12)
    scale = 100 / max(seen.memory.total, seen.free)
    passes = [
        {"name": name, "share": 100 * sum(span.seconds for span in several) / end}
        for name in ("forward", "backward", "update")
        if (several := [span for span in spans if span.phase == name])
    ]
    shown: dict[str, Any] = {
        "plan": plan,
        "seen": seen,
        "lines": [_marked(line) for line in seen.lines()],
        "tree": tree(plan),
        "ranks": range(plan.ranks),
        "block": block,
        "rows": list(_in_rows(cards(plan, block))),
        "memory": [(name, in_units(int(size)), scale * size) for name, size in seen.parts.items()],
        "free": scale * seen.free,
        "kinds": [
            (name, said, in_ms(seconds), 100 * seconds / end)
            for name, said in KINDS.items()
            if (seconds := getattr(seen.time, name))
        ],
        "step": in_ms(seen.time.total),
        "passes": passes,
        "spans": [(span, 100 * span.start / end, 100 * span.seconds / end, in_ms(span.seconds)) for span in spans],
        "remarks": list(plan.differences()),
        "whole": list(
            by_reason((one.names[0], "; ".join(one.reason_of_each_dim())) for one in plan.parameters if one.reasons)
        ),
        "sizes": sizes,
        "choices": list(_choices(sizes, plan)) if sizes is not None else [],
        "in_units": in_units,
        "hue": lambda rank: round(360 * rank / plan.ranks + 210) % 360,
    }
    environment = Environment(autoescape=True, trim_blocks=True, lstrip_blocks=True)
    return environment.from_string(TEMPLATE.read_text()).render(**shown)


def tree(plan: Plan, rank: int = 0) -> Node:
    """The model's modules and parameters; layers that are alike are one."""
    entries = (
        entry._replace(cells=(*entry.cells, _layout(parameter)))
        for entry, parameter in zip(plan.entries(rank), plan.parameters, strict=True)
    )
    root = Node("")
    for row in rows_of(entries):
        if not row.cells:
            continue
        first, *tied = row.name.strip().split(" = ")
        path = [*(row.layers.split(".") if row.layers else ()), *first.split(".")]
        node = root
        for part in path:
            node = node.inside.setdefault(part, Node(part))
        node.name = " = ".join((path[-1], *tied))
        node.layer, node.shape, node.layout, node.bytes = (*row.cells, row.size)
    return replace(root, name=plan.model, inside={name: _joined(node) for name, node in root.inside.items()})


def _joined(node: Node) -> Node:
    """A node whose modules with one thing inside, such as a weight, are one with it."""
    inside = {name: _joined(inner) for name, inner in node.inside.items()}
    if len(inside) == 1:
        (only,) = inside.values()
        return replace(only, name=f"{node.name}.{only.name}")
    return replace(node, inside=inside)


def cards(plan: Plan, block: str) -> Iterator[Card]:
    """The modules of a block that have weights, in the order in which they are defined."""
    weights: dict[str, list[ParameterPlan]] = {}
    for parameter in plan.parameters:
        if block and parameter.names[0].startswith(f"{block}."):
            weights.setdefault(parameter.names[0].rpartition(".")[0], []).append(parameter)
    before: dict[str, list[str]] = {module: [] for module in weights}
    after: dict[str, list[str]] = {module: [] for module in weights}
    for change in plan.conversions:
        inside = [module for module in weights if f"{module}.".startswith(f"{change.module}.")]
        if inside and change.call is None:  # before the first module in there, or after the last one
            where = before[inside[0]] if change.side == "in" else after[inside[-1]]
            where.append(_changed(change, block))
    for use in plan.implementations:
        if use.module in weights and use.call is None:
            before[use.module] += _by_itself(use.input, "input")
            after[use.module][:0] = _by_itself(use.output, "result")
    layers = plan.layers
    longest = max((size for several in weights.values() for one in several for size in one.shape), default=1)
    for module, several in weights.items():
        yield Card(
            module.removeprefix(f"{block}."),
            layers.get(module, ""),
            tuple(before[module]),
            tuple(after[module]),
            tuple(_picture(parameter, longest) for parameter in several),
        )


def _in_rows(found: Iterable[Card]) -> Iterator[list[Card]]:
    """Cards side by side, until something happens between two of them."""
    row: list[Card] = []
    for card in found:
        if row and (card.before or row[-1].after):
            yield row
            row = []
        row.append(card)
    if row:
        yield row


def _changed(change: ConversionPlan, block: str) -> str:
    name = change.module.removeprefix(block).removeprefix(".") or "the block"
    where = "what goes into" if change.side == "in" else "the result of"
    return f"{where} {name}: {_sent((change.source.letter, change.target.letter))}"


def _by_itself(pair: Pair | None, what: str) -> list[str]:
    return [] if pair is None or pair[0] == pair[1] else [f"its {what}: {_sent(pair)}"]


def _sent(pair: Pair) -> str:
    """A change of type, and what it sends."""
    row = TRANSITIONS.get(pair)
    if row is None:
        return f"{pair[0]} to {pair[1]}"
    ways = (("forward", row.forward), ("backward", row.backward))
    sent = ", ".join(f"{collective} in the {way} pass" for way, collective in ways if collective)
    return f"{pair[0]} to {pair[1]}, {sent or 'nothing is sent'}"


def _picture(parameter: ParameterPlan, longest: int) -> Picture:
    """A weight as it is stored, dim 0 downwards and the last one to the right; a vector lies down."""
    cuts = dict(parameter.layout.dims) if isinstance(parameter.layout, Shard) else {}
    dims = len(parameter.shape)
    down = next((dim for dim in cuts if 0 < dim < dims - 1), 0) if dims > 1 else None
    across = dims - 1 if dims else None
    size = {dim: parameter.shape[dim] for dim in (down, across) if dim is not None}
    pixels = {dim: max(_LEAST, _SIDE * math.sqrt(length / longest)) for dim, length in size.items()}
    width = pixels[across] if across is not None else _LEAST
    height = pixels[down] if down is not None else _LEAST
    stripes: list[Stripe] = []
    for dim, owned in cuts.items():
        if dim not in size:
            continue
        step = pixels[dim] / max(size[dim], 1)
        for start, stop, ranks in owned.owners:
            begin, length = step * start, step * (stop - start)
            lies = Stripe(begin, 0, length, height, ranks) if dim == across else Stripe(0, begin, width, length, ranks)
            stripes.append(lies)
    name = parameter.names[0].rpartition(".")[2]
    said = f"{name} [{', '.join(map(str, parameter.shape))}]"
    return Picture(name, said, width, height, tuple(stripes))


def _layout(parameter: ParameterPlan) -> str:
    if isinstance(parameter.layout, Shard):
        return "sharded"
    return "summed" if isinstance(parameter.layout, Replicate) else "whole"


def _marked(line: str) -> Markup:
    """A line in which what stands between backticks is code."""
    return Markup(re.sub(r"`(.+?)`", r"<code>\1</code>", str(escape(line))))


def _choices(sizes: Recommendation, plan: Plan) -> Iterator[tuple[bool, Sequence[str]]]:
    """The best ways to train, and the plan's in any case: whether it is the plan's, and what the table says of it."""
    for number, choice in enumerate(sizes.choices):
        is_this = _is_of(choice, plan)
        if is_this or number < SHOWN:
            yield is_this, _cells(choice)


def _is_of(choice: Choice, plan: Plan) -> bool:
    return (
        choice.tensor_parallel_size == plan.ranks
        and choice.data_parallel_size == 1
        and choice.sequence_parallel == plan.shards_sequence
        and choice.activation_checkpointing is None
        and not choice.cpu_offload
    )


def _cells(choice: Choice) -> Sequence[str]:
    return (
        named(choice),
        f"{choice.rows} x {choice.passes}",
        in_units(int(choice.memory.total)),
        "yes" if choice.fits else "no",
        in_ms(choice.time.total),
        f"{choice.tokens_per_second:,.0f}" if choice.fits else "",
    )
