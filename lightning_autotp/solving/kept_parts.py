"""Inputs of which autograd keeps this rank's part where they were gathered: the backward pass gathers them again."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable

from lightning_autotp.operators.graph import Graph, Operator
from lightning_autotp.operators.registry import record
from lightning_autotp.solving.implementations import Implementation, operand_of


def kept_in_parts(
    graph: Graph, runs: Iterable[tuple[Operator, Implementation]], heads: Collection[str]
) -> frozenset[int]:
    """The tensors that are gathered once more in the backward pass, if they are gathered.

    Also as modules hand them on, and before they are reshaped: a gathered tensor's other views are kept as it is.

    Args:
        graph: the captured model.
        runs: operators, each with a parallel implementation that runs it.
        heads: modules whose product is left to the loss, which keeps its gradients instead of its input.
    """
    handed_on = {op.outputs[0]: op.inputs[0] for op in graph.operators if op.boundary or _only_reshapes(graph, op)}
    found: set[int] = set()
    for operator, entry in runs:
        tensor = operand_of(operator, entry.resaves_shard) if entry.resaves_shard else None
        cut = operand_of(operator, entry.operand)
        is_kept = cut is not None and graph.tensors[cut].is_differentiable  # for the gradient of a weight
        if not is_kept or operator.module in heads:
            continue
        while tensor is not None:
            found.add(tensor)
            tensor = handed_on.get(tensor)
    return frozenset(found)


def _only_reshapes(graph: Graph, operator: Operator) -> bool:
    """Whether the result is the same elements in another shape."""
    known = record(operator.name)
    if known is None or not known.reshapes:
        return False
    before, after = (math.prod(graph.tensors[tensor].shape) for tensor in (operator.inputs[0], operator.outputs[0]))
    return before == after
