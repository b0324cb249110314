"""From the solver's layouts to the plan: parallel layers, conversions at boundaries, what it communicates."""

from __future__ import annotations

import math
from collections.abc import Sequence

from lightning_autotp.layouts.places import Boundary, CallPoint
from lightning_autotp.layouts.plan import (
    Communication,
    ConversionPlan,
    DrawPlan,
    LayerPlan,
    ParameterPlan,
    Plan,
    SizePlan,
)
from lightning_autotp.layouts.types import Invariant, Layout, Partial, Replicate, Shard
from lightning_autotp.operators.graph import Ref
from lightning_autotp.solving.cost import CONVERSIONS
from lightning_autotp.solving.solver import Conversion, Solution

_OWN_INPUT = "[0][0]"
_OWN_OUTPUT = ""


def annotate(
    solution: Solution,
    model: str,
    parameters: Sequence[tuple[tuple[str, ...], tuple[int, ...], int]],
    sizes: tuple[SizePlan, ...] = (),
) -> Plan:
    """Write the solution down as a plan.

    Args:
        solution: the layouts.
        model: the model's class name.
        parameters: for every parameter its names, whole shape and bytes per element.
        sizes: sizes in Python that must be local.
    """
    layouts = {name: solution.layouts.get(tensor, Invariant()) for tensor, name in solution.graph.parameters.items()}
    layers = _layers(solution)
    kinds = {layer.module: layer.kind for layer in layers}
    return Plan(
        model=model,
        ranks=solution.ranks,
        parameters=tuple(
            ParameterPlan(names, shape, itemsize, layouts.get(names[0], Invariant()), solution.whole.get(names[0], ""))
            for names, shape, itemsize in parameters
        ),
        layers=layers,
        conversions=tuple(
            dict.fromkeys(  # a module that is called several times converts alike
                [
                    *(_planned(change) for change in solution.conversions if not _is_layers_own(change, kinds)),
                    *(_planned(change) for change in solution.slices.values()),
                    *(_planned(change, view=True) for change in solution.global_views),
                ]
            )
        ),
        sizes=sizes,
        draws=tuple(dict.fromkeys(_draw(solution, number) for number in sorted(solution.drawing))),
        communication=_communication(solution),
        priced_for=f"{solution.step} ({solution.step_source})",
    )


def _draw(solution: Solution, number: int) -> DrawPlan:
    call = solution.graph.calls[number]
    return DrawPlan(call.module, call.site)


def _planned(change: Conversion, view: bool = False) -> ConversionPlan:
    place = change.boundary
    if isinstance(place, CallPoint):
        key, call = str(place.leaf), place.call
    else:
        key, call = place.key, None
    return ConversionPlan(place.module, place.side, key, change.source, change.target, change.shape, view, call)


def _layers(solution: Solution) -> tuple[LayerPlan, ...]:
    """Linears and embeddings whose weight is sharded along the dim that their parallel version knows."""
    at = {
        (c.boundary.module, c.boundary.side, c.boundary.key): c
        for c in solution.conversions
        if isinstance(c.boundary, Boundary)
    }
    layers: dict[str, LayerPlan] = {}
    for operator in solution.graph.operators:
        if operator.name not in ("aten.linear.default", "aten.embedding.default") or not operator.layer:
            continue
        weight = operator.argument("weight")
        layout = solution.layouts.get(weight.tensor) if isinstance(weight, Ref) else None
        if not isinstance(layout, Shard) or weight.tensor not in solution.graph.parameters:
            continue
        module, dims = operator.module, [dim for dim, _ in layout.dims]
        before, after = at.get((module, "in", _OWN_INPUT)), at.get((module, "out", _OWN_OUTPUT))
        if operator.layer == "embedding" and dims == [0]:
            layers[module] = LayerPlan(module, "vocab")
        elif operator.layer == "linear" and dims == [0]:
            converts = before is not None and _pair(before) == ("I", "R")
            gathers = after is not None and _pair(after) == ("S", "I")
            layers[module] = LayerPlan(module, "column", input_is_replicated=not converts, gather_output=gathers)
        elif operator.layer == "linear" and dims == [1]:
            slices = before is not None and _pair(before) == ("I", "S")
            layers[module] = LayerPlan(module, "row", input_is_parallel=not slices)
    return tuple(layers.values())


def _is_layers_own(conversion: Conversion, kinds: dict[str, str]) -> bool:
    """Whether the conversion happens inside a parallel layer (so that no hook is needed for it)."""
    boundary, pair = conversion.boundary, _pair(conversion)
    if isinstance(boundary, CallPoint):
        return False
    kind = kinds.get(boundary.module)
    if boundary.side == "in" and boundary.key == _OWN_INPUT:
        return (kind, pair) in (("column", ("I", "R")), ("row", ("I", "S")))
    return boundary.side == "out" and boundary.key == _OWN_OUTPUT and (kind, pair) == ("column", ("S", "I"))


def _pair(conversion: Conversion) -> tuple[str, str]:
    return _letter(conversion.source), _letter(conversion.target)


def _letter(layout: Layout) -> str:
    return {Invariant: "I", Replicate: "R", Partial: "P", Shard: "S"}[type(layout)]


def _communication(solution: Solution) -> tuple[Communication, ...]:
    """Collectives of one step of the traced batch."""
    moved: dict[str, list[int]] = {}
    tensors = solution.graph.tensors
    itemsizes = {
        op.boundary: tensors[op.outputs[0]].itemsize for op in reversed(solution.graph.operators) if op.boundary
    }
    for conversion in solution.conversions:
        forward, backward = CONVERSIONS[_pair(conversion)]
        for kind in (*forward, *backward):
            moved.setdefault(kind, []).append(math.prod(conversion.shape) * itemsizes[conversion.boundary])
    for number in solution.reduced:
        moved.setdefault("all_reduce", []).append(tensors[solution.graph.operators[number].outputs[0]].bytes)
    for operator in solution.graph.operators:
        if operator.name == "aten.cross_entropy_loss.default":
            logits, target = operator.argument("self").tensor, operator.argument("target").tensor
            if isinstance(solution.layouts.get(logits), Shard):  # the largest logit; then two sums, in fp32
                tokens = math.prod(tensors[target].shape)
                moved.setdefault("all_reduce", []).extend((4 * tokens, 8 * tokens))
    for tensor in solution.graph.parameters:
        layout = solution.layouts.get(tensor, Invariant())
        shared = isinstance(layout, Shard) and any(owned.is_shared for _, owned in layout.dims)
        if isinstance(layout, Replicate) or shared:
            moved.setdefault("gradient sum", []).append(tensors[tensor].bytes)
    return tuple(Communication(kind, len(sizes), sum(sizes)) for kind, sizes in sorted(moved.items()))
