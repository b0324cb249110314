"""Modules that run several times (shared layers, recurrences): every run is laid out like the first.

One set of parameters, one Python code: what a size or a layout is in one run it is in all. Saying so makes the runs one
problem for the solver; else all of them would hang together through their parameters.
"""

from __future__ import annotations

from collections.abc import Iterator

from lightning_autotp.layouts.places import Boundary
from lightning_autotp.operators.graph import Graph, Operator


def twins(graph: Graph) -> Iterator[tuple[int, int]]:
    """Tensors made in a later run of a module, each with the tensor that the first run made in its place.

    Only of modules whose runs are the same operators, on tensors of as many dims.
    """
    counts: dict[str, int] = {}
    for operator in graph.operators:
        if _leaves(operator, operator.module):
            counts[operator.module] = counts.get(operator.module, 0) + 1
    done: set[int] = set()
    for module in sorted((name for name, count in counts.items() if count > 1), key=len):
        first, *later = _runs(graph, module)
        for run in later:
            if not _alike(graph, first, run):
                continue
            for left, right in zip(first, run, strict=True):
                for tensor, twin in zip(left.outputs, right.outputs, strict=True):
                    if twin not in done and not graph.tensors[twin].is_static:
                        done.add(twin)
                        yield twin, tensor


def _runs(graph: Graph, module: str) -> list[list[Operator]]:
    """The module's own operators and those of its submodules, run by run."""
    runs: list[list[Operator]] = [[]]
    for operator in graph.operators:
        if operator.module == module or operator.module.startswith(f"{module}.") or not module:
            runs[-1].append(operator)
            if _leaves(operator, module):
                runs.append([])
    return [run for run in runs if run]


def _leaves(operator: Operator, module: str) -> bool:
    """Whether the module's (first) result leaves it here."""
    place = operator.boundary
    return isinstance(place, Boundary) and place.module == module and place.side == "out" and place.key in _FIRST


_FIRST = ("", "[0]")


def _alike(graph: Graph, first: list[Operator], run: list[Operator]) -> bool:
    return len(first) == len(run) and all(
        left.name == right.name
        and left.module == right.module
        and left.boundary == right.boundary
        and [len(graph.tensors[t].shape) for t in left.outputs] == [len(graph.tensors[t].shape) for t in right.outputs]
        and [graph.tensors[t].is_static for t in left.outputs] == [graph.tensors[t].is_static for t in right.outputs]
        for left, right in zip(first, run, strict=True)
    )
