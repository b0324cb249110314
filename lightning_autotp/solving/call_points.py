"""More places where a layout may change: the arguments and results of single calls inside a module.

Boundaries of modules suffice where a model is made of the usual layers. A module that keeps bare parameters (experts, a
transposed linear, an attention in one piece) is opened: before every call in its own code that reads a parameter, and
after it, the solver may convert a tensor.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection
from dataclasses import replace

from lightning_autotp.layouts.places import CallPoint
from lightning_autotp.operators.graph import Graph, Operator, Ref, renamed
from lightning_autotp.solving.implementations import Implementations


def bare_modules(graph: Graph, implementations: Implementations) -> frozenset[str]:
    """Modules that use a matrix in other ways than those layers do that have a parallel implementation."""
    return frozenset(
        operator.module
        for operator in graph.operators
        if operator.boundary is None and not implementations.is_layer(operator)
        for tensor in operator.inputs
        if tensor in graph.parameters and len(graph.tensors[tensor].shape) > 1
    )


def open_modules(graph: Graph, modules: Collection[str]) -> Graph:
    """The graph with points at the arguments and results of those calls in these modules that read a parameter.

    A point is an operator called ``boundary``; a tensor has the same index after it as before in ``graph`` where it is
    a result, and a new one where it is an argument.
    """
    if not modules:
        return graph
    opened = Graph(
        list(graph.tensors),
        [],
        dict(graph.parameters),
        list(graph.outputs),
        list(graph.calls),
        graph.opaque,
        example=graph.example,
        integers=graph.integers,
    )
    of_call: dict[int, list[Operator]] = {}
    for operator in graph.operators:
        if operator.call >= 0 and operator.module in modules:
            of_call.setdefault(operator.call, []).append(operator)
    of_call = {
        call: mine
        for call, mine in of_call.items()
        if any(tensor in graph.parameters for operator in mine for tensor in operator.inputs)
    }
    argument_names: dict[int, dict[int, Ref]] = {}
    for operator in graph.operators:
        mine = of_call.get(operator.call, [])
        if mine and operator is mine[0]:
            argument_names[operator.call] = _argument_points(opened, operator, mine)
        if not mine:
            opened.operators.append(operator)
            continue
        results = _results(graph, operator, mine)
        fresh = {tensor: _like(opened, tensor) for tensor in results}
        names = argument_names[operator.call]
        opened.operators.append(
            replace(
                operator,
                arguments=tuple((key, renamed(value, names)) for key, value in operator.arguments),
                outputs=tuple(fresh.get(tensor, tensor) for tensor in operator.outputs),
            )
        )
        for tensor, leaf in results.items():
            point = CallPoint(operator.module, graph.calls[operator.call].site, "result", leaf)
            opened.operators.append(_point(operator, fresh[tensor], tensor, point))
    opened.static_on_demand()
    return opened


def _argument_points(opened: Graph, first: Operator, mine: list[Operator]) -> dict[int, Ref]:
    """Points for the call's arguments that exactly one of its operators reads; their new names."""
    call = opened.calls[first.call]
    names: dict[int, Ref] = {}
    for leaf, value in enumerate(call.arguments):
        if not isinstance(value, Ref) or call.arguments.count(value) > 1 or opened.tensors[value.tensor].is_static:
            continue
        if sum(value.tensor in operator.inputs for operator in mine) != 1:
            continue
        target = _like(opened, value.tensor)
        names[value.tensor] = Ref(target)
        point = CallPoint(first.module, call.site, "argument", leaf)
        opened.operators.append(_point(first, value.tensor, target, point))
    return names


def _results(graph: Graph, operator: Operator, mine: list[Operator]) -> dict[int, int]:
    """Outputs of the operator that its call returns and none of the call's operators reads, by leaf."""
    call = graph.calls[operator.call]
    read = {tensor for other in mine for tensor in other.inputs}
    return {
        value.tensor: leaf
        for leaf, value in enumerate(call.results)
        if isinstance(value, Ref)
        and value.tensor in operator.outputs
        and value.tensor not in read
        and call.results.count(value) == 1
        and graph.tensors[value.tensor].is_differentiable
    }


def _like(graph: Graph, tensor: int) -> int:
    graph.tensors.append(graph.tensors[tensor])
    return len(graph.tensors) - 1


def _point(operator: Operator, source: int, target: int, point: CallPoint) -> Operator:
    return Operator(
        "boundary", (("input", (Ref(source),)),), (target,), operator.module, operator.source, boundary=point
    )


def static_operands(graph: Graph, implementations: Implementations) -> dict[tuple[int, int], CallPoint]:
    """Static operands that can be changed at their call: one operator's only, and one argument's."""
    operators: dict[int, int] = {}
    for operator in graph.operators:
        if operator.boundary is None:
            operators[operator.call] = operators.get(operator.call, 0) + 1
    found: dict[tuple[int, int], CallPoint] = {}
    for position, operator in enumerate(graph.operators):
        if operator.call < 0 or operators[operator.call] > 1 or implementations.is_layer(operator):
            continue  # a parallel layer makes other calls
        call = graph.calls[operator.call]
        for leaf, value in enumerate(call.arguments):
            if isinstance(value, Ref) and graph.tensors[value.tensor].is_static and call.arguments.count(value) == 1:
                found[position, value.tensor] = CallPoint(call.module, call.site, "argument", leaf)
    return found


def private_draws(graph: Graph, drawing: Collection[Operator]) -> frozenset[int]:
    """Positions of those operators that alone draw random numbers in the call that runs them.

    A whole call draws the group's common numbers, or the rank's own: two operators of one call may need one each.
    """
    counts = Counter(operator.call for operator in drawing)
    alone = {id(operator) for operator in drawing if operator.call >= 0 and counts[operator.call] == 1}
    return frozenset(position for position, operator in enumerate(graph.operators) if id(operator) in alone)
