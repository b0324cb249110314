"""A graph in which a mixture's experts are one operator each, so that they can be distributed whole."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace

from lightning_autotp.layouts.places import Boundary
from lightning_autotp.layouts.plan import Plan
from lightning_autotp.operators.graph import EXPERTS, ExpertsCall, Graph, Operator, Ref
from lightning_autotp.solving.implementations import Implementations
from lightning_autotp.solving.planned import PlanMismatch


def with_whole_experts(graph: Graph, modules: Collection[str]) -> Graph:
    """The graph where each run of these modules is one operator, whatever their code runs.

    Args:
        graph: a graph whose calls are opened.
        modules: paths of modules in :attr:`Graph.experts`.
    """
    if not modules:
        return graph
    results = {call.result: call for call in graph.experts if call.module in modules}
    inside = tuple(f"{module}." for module in modules)
    operators: list[Operator] = []
    for operator in graph.operators:
        is_mark = isinstance(operator.boundary, Boundary) and operator.module in modules
        if is_mark or not f"{operator.module}.".startswith(inside):
            operators.append(operator)
        else:
            operators += [_operator(graph, results[made], operator) for made in operator.outputs if made in results]
    opaque = frozenset(path for path in graph.opaque if not f"{path}.".startswith(inside))
    branching = frozenset(path for path in graph.branching if not f"{path}.".startswith(inside))
    collapsed = replace(graph, operators=operators, opaque=opaque, branching=branching)
    collapsed.static_on_demand()
    return collapsed


def _operator(graph: Graph, call: ExpertsCall, last: Operator) -> Operator:
    """One run of the experts, where their code's last operator was."""
    inside = f"{call.module}."
    named = {name.removeprefix(inside): at for at, name in graph.parameters.items() if name.startswith(inside)}
    first, *stacked = [at for name, at in sorted(named.items()) if "." not in name]
    arguments = (
        ("hidden_states", Ref(call.hidden)),
        ("index", Ref(call.index)),
        ("weights", Ref(call.weights)),
        ("weight", Ref(first)),
        ("stacked", tuple(map(Ref, stacked))),
        ("others", tuple(Ref(at) for name, at in sorted(named.items()) if "." in name)),
    )
    return replace(last, name=EXPERTS, arguments=arguments, outputs=(call.result,), module=call.module, call=-1)


def constrained_by(graph: Graph, plan: Plan, implementations: Implementations) -> Graph:
    """A model's graph as a plan of it was made on: where it shards whole experts, these are one operator each.

    Raises:
        PlanMismatch: if a module whose experts the plan shards whole does not run here, or is given something else
            than tokens, the experts that they choose, and weights.
    """
    names = {entry.name for entry in implementations if entry.is_module}
    modules = {use.module for use in plan.implementations if use.name in names}
    running = {operator.module for operator in graph.operators}  # a call need not run all of them
    missing = sorted((modules & running) - {call.module for call in graph.experts})
    if missing:
        raise PlanMismatch(
            f"the plan shards the experts of {missing[0]} whole, but here it is not given tokens [tokens, hidden],"
            " the experts that they choose [tokens, choices], and weights like these, or does not return tokens"
        )
    return with_whole_experts(graph, modules)
