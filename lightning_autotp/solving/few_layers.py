"""A graph of a model with few of its layers, on which two ways to treat all of them can be compared.

Layers of one kind run the same operators on tensors of the same shapes, so that each costs the same. What is cheaper
for two layers of every kind is cheaper for all of them, and found in a fraction of the time.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Hashable
from dataclasses import replace
from functools import cache

from lightning_autotp.operators.graph import Graph, Operator, Ref, renamed

_OF_A_KIND = 2
"""So many layers of a kind are one after the other, and between what is before and after all of them."""


def with_few_layers(graph: Graph, pinned: Collection[str]) -> Graph:
    """The graph without what repeats its layers; the same one, where none is left out.

    What reads a result of a layer that is left out reads that of the last one of its kind.

    Args:
        graph: a graph.
        pinned: parameters whose layers are not left out.
    """
    layers: dict[str, list[Operator]] = {}
    for operator in graph.operators:
        if path := _layer(operator.module):
            layers.setdefault(path, []).append(operator)
    tensors, apart = graph.tensors, set(map(_layer, pinned))
    kinds: dict[Hashable, list[list[Operator]]] = {}
    left_out: set[str] = set()
    names: dict[int, int] = {}
    for path, operators in layers.items():
        runs = [(op.name, op.module[len(path) :], *[tensors[made].shape for made in op.outputs]) for op in operators]
        kept = kinds.setdefault(tuple(runs), [])
        if len(kept) < _OF_A_KIND or path in apart:
            kept.append(operators)
            continue
        left_out.add(path)
        for one, other in zip(operators, kept[-1], strict=True):
            names.update(zip(one.outputs, other.outputs, strict=True))
    return graph if not left_out else _without(graph, left_out, names)


def _without(graph: Graph, layers: Collection[str], names: dict[int, int]) -> Graph:
    """The graph without some layers, others' results in the places of theirs."""
    operators = [operator for operator in graph.operators if _layer(operator.module) not in layers]
    for at, operator in enumerate(operators):
        if not names.keys().isdisjoint(operator.inputs):
            read = {tensor: Ref(names[tensor]) for tensor in operator.inputs if tensor in names}
            arguments = tuple((name, renamed(value, read)) for name, value in operator.arguments)
            operators[at] = replace(operator, arguments=arguments)
    experts = [call for call in graph.experts if _layer(call.module) not in layers]
    outputs = [names.get(tensor, tensor) for tensor in graph.outputs]
    return replace(graph, operators=operators, experts=experts, outputs=outputs)


@cache
def _layer(path: str) -> str:
    """The layer that a module is, or is in: its path until the first number; empty if it is in none."""
    found = re.match(r"(.*?\.)?\d+(?=\.|$)", path)
    return found[0] if found else ""
