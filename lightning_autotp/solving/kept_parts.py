"""Inputs of which autograd keeps this rank's part where they were gathered: the backward pass gathers them again."""

from __future__ import annotations

from collections.abc import Collection, Iterable

from lightning_autotp.operators.graph import Graph, Operator
from lightning_autotp.solving.implementations import Implementation, operand_of


def kept_in_parts(
    graph: Graph, runs: Iterable[tuple[Operator, Implementation]], heads: Collection[str]
) -> frozenset[int]:
    """The tensors that are gathered once more in the backward pass, if they are gathered; also as modules hand them on.

    Args:
        graph: the captured model.
        runs: operators, each with a parallel implementation that runs it.
        heads: modules whose product is left to the loss, which keeps its gradients instead of its input.
    """
    handed_on = {operator.outputs[0]: operator.inputs[0] for operator in graph.operators if operator.boundary}
    found: set[int] = set()
    for operator, entry in runs:
        tensor = operand_of(operator, entry.keeps_part) if entry.keeps_part else None
        cut = operand_of(operator, entry.operand)
        is_kept = cut is not None and graph.tensors[cut].is_differentiable  # for the gradient of a weight
        if not is_kept or operator.module in heads:
            continue
        while tensor is not None:
            found.add(tensor)
            tensor = handed_on.get(tensor)
    return frozenset(found)
