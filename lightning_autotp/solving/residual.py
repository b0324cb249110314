"""The residual stream: what a layer computes is added to what it was given."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from lightning_autotp.layouts.dims import leaves
from lightning_autotp.operators.site import Relation

Producers = Mapping[int, tuple[int, Relation]]


def residual_axes(relations: Sequence[Relation]) -> frozenset[int]:
    """The axes of tensors to which something is added that was computed from them.

    Args:
        relations: what the rules say of a graph's operators, in the order in which these run, their dims resolved.
    """
    made = {tensor: (at, relation) for at, relation in enumerate(relations) for tensor in relation.outputs}
    found: set[int] = set()
    for relation in relations:
        if relation.contracted or relation.operator.boundary is not None or len(relation.linear) != 2:
            continue
        one, other = relation.linear
        if relation.inputs[one] != relation.inputs[other]:  # they are joined, or one is repeated, and not a stream
            continue
        for before, after in ((one, other), (other, one)):
            if _is_computed_from(after, _passed_on(before, made), made):
                found |= {leaf.id for dim in relation.inputs[before] for leaf in leaves(dim)}
    return frozenset(found)


def _passed_on(tensor: int, made: Producers) -> int:
    """The tensor that modules have handed on as this one."""
    while tensor in made and made[tensor][1].operator.boundary is not None:
        (tensor,) = made[tensor][1].inputs
    return tensor


def _is_computed_from(tensor: int, source: int, made: Producers) -> bool:
    first, _ = made.get(source, (-1, None))
    seen, waiting = {tensor}, [tensor]
    while waiting:
        at, relation = made.get(waiting.pop(), (-1, None))
        if relation is None or at <= first:  # it ran before the source did
            continue
        waiting += relation.inputs.keys() - seen
        seen |= relation.inputs.keys()
    return source in seen
