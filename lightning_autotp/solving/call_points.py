"""More places where a layout may change: the arguments and results of single calls inside a module.

Boundaries of modules suffice where a model is made of the usual layers, one after the other. Elsewhere the solver may
convert a tensor before and after single calls in a module's own code:

* calls that read a parameter, in modules that keep bare ones (experts, a transposed linear, an attention in one piece),
  and where these have layers as well, those that read what they make of their own parameters (``1 - mix``);
* additions of what several modules inside gave (attention and MLP side by side, as in GPT-J; embeddings of words and of
  positions), so that the ranks' parts are added first and summed over the ranks once.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection
from dataclasses import replace

from lightning_autotp.layouts.places import Boundary, CallPoint
from lightning_autotp.operators import record
from lightning_autotp.operators.graph import Graph, Operator, Ref, renamed
from lightning_autotp.solving.implementations import Implementations


def open_calls(graph: Graph, implementations: Implementations, bare: Collection[str] = ()) -> Graph:
    """The graph with points at the arguments and results of calls at which layouts may change.

    A point is an operator called ``boundary``; a tensor has the same index after it as before in ``graph`` where it is
    a result, and a new one where it is an argument.

    Args:
        graph: the captured graph.
        implementations: what layers may become.
        bare: modules of which another graph has shown that they use a matrix otherwise than such layers do.
    """
    found = _reading_bare_matrices(graph, implementations, bare) | _adding_results(graph)
    calls = {call for call in found if call < 0 or not graph.calls[call].in_function}
    if not calls:
        return graph
    opened = replace(
        graph,
        tensors=list(graph.tensors),
        operators=[],
        parameters=dict(graph.parameters),
        outputs=list(graph.outputs),
        calls=list(graph.calls),
    )
    of_call: dict[int, list[Operator]] = {}
    for operator in graph.operators:
        if operator.call in calls:
            of_call.setdefault(operator.call, []).append(operator)
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


def _reading_bare_matrices(graph: Graph, implementations: Implementations, known: Collection[str]) -> set[int]:
    """Calls that read a parameter, in modules that use a matrix otherwise than layers with an implementation do.

    In those that have layers as well, calls that read what was made of parameters alone count, too.
    """
    made = _made_of_parameters(graph)
    reading = [
        (operator, tensor)
        for operator in graph.operators
        if operator.boundary is None
        for tensor in operator.inputs
        if tensor in graph.parameters or tensor in made
    ]
    bare = {*known} | {
        operator.module
        for operator, tensor in reading
        if tensor in graph.parameters
        and not implementations.is_layer(operator)
        and len(graph.tensors[tensor].shape) > 1
    }
    layers = {name.rpartition(".")[0] for name in graph.parameters.values()} - {""}
    with_layers = {path.rpartition(".")[0] for path in layers}
    return {
        operator.call
        for operator, tensor in reading
        if operator.call >= 0
        and operator.module in bare
        and (tensor in graph.parameters or operator.module in with_layers)
    }


def _made_of_parameters(graph: Graph) -> set[int]:
    """Tensors that a module makes of its own parameters and numbers alone; not the parameters themselves.

    Of a layer's weights (a convolution's, say) other code may read others, where a cache is given.
    """
    owners = {tensor: name.rpartition(".")[0] for tensor, name in graph.parameters.items()}
    made: set[int] = set()
    for operator in graph.operators:
        inputs = operator.inputs
        if operator.boundary is None and inputs and all(owners.get(t) == operator.module or t in made for t in inputs):
            made.update(operator.outputs)
    return made


def _adding_results(graph: Graph) -> set[int]:
    """Calls in a module's own code that add what at least two modules inside of it gave, and nothing else reads."""
    readers = Counter(tensor for operator in graph.operators for tensor in operator.inputs)
    readers.update(graph.outputs)
    producers = graph.producers()

    def added(tensor: int, module: str) -> tuple[list[int], int]:
        """The additions of the module's that a tensor is made by, and how many results of modules go into them."""
        operator = producers.get(tensor)
        if operator is None or readers[tensor] > 1:
            return [], 0
        if isinstance(operator.boundary, Boundary):
            return [], operator.boundary.side == "out"
        is_scaled = operator.name == _MUL and len(operator.inputs) == 1  # by a number
        if operator.module != module or not (is_scaled or operator.name in (_ADD, _DROPOUT)):
            return [], 0
        found = [added(t, module) for t in operator.inputs if not graph.tensors[t].is_static]
        calls = [call for calls, _ in found for call in calls]
        return calls + [operator.call] * (operator.name == _ADD), sum(results for _, results in found)

    opened: set[int] = set()
    for operator in graph.operators:
        if operator.name == _ADD:
            found = [added(tensor, operator.module) for tensor in operator.inputs]
            if sum(results for _, results in found) > 1:
                opened.update([operator.call, *(call for calls, _ in found for call in calls)])
    return opened


_ADD, _MUL, _DROPOUT = "aten.add.Tensor", "aten.mul.Tensor", "aten.dropout.default"


def _argument_points(opened: Graph, first: Operator, mine: list[Operator]) -> dict[int, Ref]:
    """Points for the call's arguments that exactly one of its operators reads; their new names.

    Not for one that the call writes in place: that would be the converted tensor, and not the one that others read.
    """
    call = opened.calls[first.call]
    names: dict[int, Ref] = {}
    for leaf, value in enumerate(call.arguments):
        if not isinstance(value, Ref) or call.arguments.count(value) > 1 or opened.tensors[value.tensor].is_static:
            continue
        if leaf in dict(call.written) or sum(value.tensor in operator.inputs for operator in mine) != 1:
            continue
        target = _like(opened, value.tensor)
        names[value.tensor] = Ref(target)
        point = CallPoint(first.module, call.site, "argument", leaf)
        opened.operators.append(_point(first, value.tensor, target, point))
    return names


def _results(graph: Graph, operator: Operator, mine: list[Operator]) -> dict[int, int]:
    """Outputs of the operator that its call returns and none of the call's operators reads, by leaf.

    Not what the call has written in place, which others read as well.
    """
    call = graph.calls[operator.call]
    read = {tensor for other in mine for tensor in other.inputs} | {ref.tensor for _, ref in call.written}
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
    """Static operands that can be changed at their call: one operator's only, and one argument's.

    One that the call writes into cannot: what else looks at it would not see that. But where it is alike at every index
    (zeros that rows are put into), code may make it with local sizes, which the trace of the local model tells.
    """
    operators: dict[int, int] = {}
    producers = graph.producers()
    for operator in graph.operators:
        if operator.boundary is None:
            operators[operator.call] = operators.get(operator.call, 0) + 1
    found: dict[tuple[int, int], CallPoint] = {}
    for position, operator in enumerate(graph.operators):
        if operator.call < 0 or operators[operator.call] > 1 or implementations.is_layer(operator):
            continue  # a parallel layer makes other calls
        call = graph.calls[operator.call]
        if call.in_function:
            continue
        for leaf, value in enumerate(call.arguments):
            if not isinstance(value, Ref) or not graph.tensors[value.tensor].is_static:
                continue
            maker = producers.get(value.tensor)
            known = record(maker.name) if maker is not None else None
            may_change = leaf not in dict(call.written) or (known is not None and known.uniform is not None)
            if call.arguments.count(value) == 1 and may_change:
                found[position, value.tensor] = CallPoint(call.module, call.site, "argument", leaf)
    return found


def private_draws(graph: Graph, drawing: Collection[Operator]) -> frozenset[int]:
    """Positions of those operators that alone draw random numbers in the call that runs them, for each rank others.

    A whole call draws the group's common numbers, or the rank's own: two operators of one call may need one each. A
    generator that the code gives draws the same on every rank.
    """
    counts = Counter(operator.call for operator in drawing)
    common = (operator for operator in drawing if dict(operator.arguments).get("generator") is None)
    of_calls = (operator for operator in common if operator.call >= 0 and not graph.calls[operator.call].in_function)
    alone = {id(operator) for operator in of_calls if counts[operator.call] == 1}
    return frozenset(position for position, operator in enumerate(graph.operators) if id(operator) in alone)
