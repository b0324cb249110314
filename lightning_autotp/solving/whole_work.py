"""How much of a step's work is divided, and what every rank computes whole."""

from __future__ import annotations

import math
import re
from collections import Counter, defaultdict
from collections.abc import Mapping

from lightning_autotp.layouts.plan import WholeWork
from lightning_autotp.layouts.types import Layout, Shard
from lightning_autotp.operators import Relation, record
from lightning_autotp.operators.graph import ASKED, MAPPED, OPAQUE, WRITTEN_THROUGH
from lightning_autotp.solving.tables import Tables


def whole_work(tables: Tables, layouts: Mapping[int, Layout]) -> tuple[float, tuple[WholeWork, ...]]:
    """The share of the forward's FLOPs that is divided, and the operators of which every rank computes all.

    Of these, the ones with FLOPs and those that have no rule; the share is negative where no operator has FLOPs.

    Args:
        tables: the operators, and their work in the priced step.
        layouts: of every tensor.
    """
    total = divided = 0.0
    flops, seconds = (defaultdict[tuple[str, str], float](float) for _ in range(2))
    calls, why = Counter[tuple[str, str]](), dict[tuple[str, str], str]()
    unknown: set[tuple[str, str]] = set()
    for relation in tables.relations:
        operator = relation.operator
        if operator.boundary is not None:
            continue
        work, touched, _ = tables.work(relation)
        total += work
        is_unknown = _is_unknown(relation)
        share = min(_share(layouts.get(tensor)) for tensor in (*operator.inputs, *operator.outputs))
        divided += work * (1 - share) / (1 - 1 / tables.ranks) if tables.ranks > 1 else 0.0
        if share < 1 or not (work or is_unknown):
            continue
        key = operator.name, re.sub(r"\d+", "*", operator.module)
        flops[key] += work
        seconds[key] += tables.profile.compute(work, touched, 1.0)
        calls[key] += 1
        if key not in why:
            why[key] = _why_whole(tables, relation)
        if is_unknown:
            unknown.add(key)
    found = [
        WholeWork(*key, count, flops[key] / total if total else 0.0, why[key], key in unknown, seconds[key])
        for key, count in calls.items()
    ]
    return divided / total if total else -1.0, tuple(sorted(found, key=lambda work: (not work.is_unknown, -work.share)))


def _why_whole(tables: Tables, relation: Relation) -> str:
    """What stands against dividing an operator along any dim; where nothing does along one, it was the price."""
    costs_more = "to cut it would cost more"
    candidates = {
        number for tensor in (*relation.inputs, *relation.outputs) for number in tables.touching.get(tensor, ())
    }
    found = [tables.sharded(relation, number) for number in sorted(candidates)]
    refusals = [each for each in found if isinstance(each, str)]
    return costs_more if len(refusals) < len(found) else next(iter((*relation.whole.values(), *refusals)), costs_more)


def _share(layout: Layout | None) -> float:
    """The share of a tensor that a rank has, on average: what several ranks have counts for each."""
    if not isinstance(layout, Shard):
        return 1.0
    return math.prod(sum(owned.local_sizes) / len(owned.local_sizes) / owned.size for _, owned in layout.dims)


def _is_unknown(relation: Relation) -> bool:
    """Whether it is a kernel that is not declared, or a module that could not be traced."""
    name = relation.operator.name
    is_torchs = name == ASKED or name.startswith((MAPPED, "aten.", "record:", WRITTEN_THROUGH))
    return name == OPAQUE or (record(name) is None and not is_torchs)
