"""Code that runs several times (shared layers, recurrences, loops over experts): every run is laid out like the first.

One set of parameters, one Python code: what a size or a layout is in one run it is in all. Saying so makes the runs one
problem for the solver; else all of them would hang together through their parameters. A module without parameters and
without numbers in its code (the one activation of a block, between several layers) does the same to any layout: its
runs are not tied. Where values decide how often a line runs, it must be so: a run that the trace has not seen is laid
out like those that it has.
"""

from __future__ import annotations

from collections.abc import Iterator

from lightning_autotp.layouts.places import Boundary
from lightning_autotp.operators.graph import Graph, Operator


def repeated_tensors(graph: Graph) -> Iterator[tuple[int, int]]:
    """Tensors made in a later run of a module or a line, each with the tensor that the first run made in its place.

    Only of modules and lines whose runs are the same operators, on tensors of as many dims.
    """
    done: set[int] = set()
    for first, run in _later_runs(graph):
        if _alike(graph, first, run):
            for left, right in zip(first, run, strict=True):
                for tensor, later in zip(left.outputs, right.outputs, strict=True):
                    if later not in done and later != tensor and not graph.tensors[later].is_static:
                        done.add(later)
                        yield later, tensor


def _later_runs(graph: Graph) -> Iterator[tuple[list[Operator], list[Operator]]]:
    """Each later run of a line or a module, after the first one: lines, then modules from the outermost."""
    lines: dict[object, list[list[Operator]]] = {}
    last: dict[object, int] = {}
    for operator in graph.operators:
        place = operator.boundary
        if operator.module not in graph.branching or isinstance(place, Boundary):
            continue
        if place is None and operator.call < 0:
            continue
        call = graph.calls[operator.call]
        key = place or (operator.module, call.site, call.instruction)
        runs = lines.setdefault(key, [])
        if place is not None or last.get(key) != operator.call:
            runs.append([])
        last[key] = operator.call
        runs[-1].append(operator)
    for first, *later in lines.values():
        yield from ((first, run) for run in later)
    counts: dict[str, int] = {}
    for operator in graph.operators:
        if _leaves(operator, operator.module):
            counts[operator.module] = counts.get(operator.module, 0) + 1
    for module in sorted((name for name, count in counts.items() if count > 1), key=len):
        first, *later = _runs(graph, module)
        if any(_says_sizes(graph, operator) for operator in first):
            yield from ((first, run) for run in later)


def _says_sizes(graph: Graph, operator: Operator) -> bool:
    """Whether an operator reads a parameter, or its call has numbers: both are the same in every run."""
    numbers = graph.calls[operator.call].arguments if operator.call >= 0 else ()
    return any(tensor in graph.parameters for tensor in operator.inputs) or any(type(n) is int for n in numbers)


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
