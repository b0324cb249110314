"""From the solver's layouts to the plan: parallel layers, conversions at boundaries, what it communicates."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from lightning_autotp.layouts.buckets import in_buckets
from lightning_autotp.layouts.places import EVERY, Boundary, CallPoint, CallSite, member
from lightning_autotp.layouts.plan import (
    Communication,
    ConversionPlan,
    DrawPlan,
    ImplementationPlan,
    IndicesPlan,
    MadeLocalPlan,
    ParameterPlan,
    Plan,
    RunPlan,
    SizePlan,
)
from lightning_autotp.layouts.transitions import TRANSITIONS
from lightning_autotp.layouts.types import Invariant, Replicate, Shard
from lightning_autotp.operators import updated
from lightning_autotp.operators.declared import CalledFunction
from lightning_autotp.operators.graph import KEPT, Graph, Operator, Ref
from lightning_autotp.solving.implementations import operand_of
from lightning_autotp.solving.kept_parts import kept_in_parts
from lightning_autotp.solving.planned import module_digests
from lightning_autotp.solving.solution import Conversion, Solution

_OWN_INPUT = "in", "[0][0]"
_OWN_OUTPUT = "out", ""


def plan_from_solution(
    solution: Solution,
    model: str,
    parameters: Sequence[tuple[tuple[str, ...], tuple[int, ...], int]],
    sizes: tuple[SizePlan, ...] = (),
    traced_with: str = "",
    device: str = "",
) -> Plan:
    """Write the solution down as a plan.

    Args:
        solution: the layouts.
        model: the model's class name.
        parameters: for every parameter its names, whole shape and bytes per element.
        sizes: sizes in Python that must be local.
        traced_with: where the call that was traced comes from.
        device: what the model is to run on, where that is not what it was traced on.
    """
    traced_on = device_kind(solution.graph.device)
    layouts = {name: solution.layouts.get(tensor, Invariant()) for tensor, name in solution.graph.parameters.items()}
    changes = changes_of(solution)
    plan = Plan(
        model=model,
        ranks=solution.ranks,
        parameters=tuple(
            ParameterPlan(names, shape, itemsize, layouts.get(names[0], Invariant()))
            for names, shape, itemsize in parameters
        ),
        implementations=changes.implementations,
        conversions=changes.conversions,
        draws=changes.draws,
        indices=changes.indices,
        made_local=tuple(dict.fromkeys(_made_local(solution, number) for number in sorted(solution.made_local))),
        opaque=tuple(sorted(solution.graph.opaque)),
        modules=module_digests(solution.graph),
        communication=_communication(solution),
        priced_for=f"{solution.step} ({solution.step_source})",
        gap=solution.gap,
        traced_with=traced_with,
        device=device_kind(device) or traced_on,
        traced_on=traced_on,
        kept_parts=tuple(_kept_parts(solution)),
        divided_work=solution.divided_work,
        whole_work=solution.whole_work,
    )
    return with_sizes(plan, sizes, solution.graph)


@dataclass(frozen=True)
class Changes:
    """What a parallel model does otherwise than the original one; a plan's fields of these names."""

    implementations: tuple[ImplementationPlan, ...]
    conversions: tuple[ConversionPlan, ...]
    draws: tuple[DrawPlan, ...]
    indices: tuple[IndicesPlan, ...]


def changes_of(solution: Solution) -> Changes:
    """What has to be done otherwise for these layouts."""
    graph, implementations = solution.graph, _implementations(solution)
    own = {(use.module, *side) for use in implementations for side in _own_changes(use)}
    conversions = [
        *(
            _planned(change, overwritten=change.boundary in graph.overwritten)
            for change in solution.conversions
            if _place(change) not in own
        ),
        *(
            _planned(change, updated=tensor in updated(graph.operators[position]))
            for (position, tensor), change in solution.slices.items()
        ),
        *(_planned(change, view=True) for change in solution.global_views),
    ]
    return Changes(
        implementations,
        _of_each_place(conversions),
        tuple(dict.fromkeys(_draw(solution, number) for number in sorted(solution.drawing))),
        tuple(dict.fromkeys(_indices(solution))),
    )


def with_sizes(plan: Plan, sizes: tuple[SizePlan, ...], graph: Graph) -> Plan:
    """The plan with these sizes that must be local, in place of its own.

    Args:
        plan: the plan.
        sizes: the sizes.
        graph: what it was made for.
    """
    sized = replace(plan, sizes=sizes)
    return replace(sized, runs=runs_apart(sized, graph))


def device_kind(device: str) -> str:
    """A device without its number."""
    return device.partition(":")[0]


def runs_apart(plan: Plan, graph: Graph) -> tuple[RunPlan, ...]:
    """Of the modules that do not make all calls at which the plan changes something in every run: what each run makes.

    Calls that stand for all from their line are left out: values say how many of them are made.
    """
    changed: dict[str, set[CallSite]] = {}
    changes: tuple[ConversionPlan | SizePlan | ImplementationPlan | DrawPlan | IndicesPlan, ...]
    changes = *plan.conversions, *plan.sizes, *plan.implementations, *plan.draws, *plan.indices
    for change in changes:
        if change.call is not None and change.call.occurrence != EVERY:
            changed.setdefault(change.module, set()).add(change.call)
    made: dict[int, set[CallSite]] = {
        run: set() for run, module in enumerate(graph.entered) if run and module in changed
    }
    for call in graph.calls:
        if call.run in made and call.site in changed[call.module]:
            made[call.run].add(call.site)
    apart = {graph.entered[run] for run, calls in made.items() if calls != changed[graph.entered[run]]}
    found = (RunPlan(graph.entered[run], tuple(sorted(calls, key=str))) for run, calls in made.items())
    return tuple(dict.fromkeys(run for run in found if run.module in apart))


def _of_each_place(changes: Iterable[ConversionPlan]) -> tuple[ConversionPlan, ...]:
    """One change of every place: a module that is called several times converts alike, tensors of other shapes too."""
    found: dict[ConversionPlan, ConversionPlan] = {}
    for change in changes:
        found.setdefault(replace(change, shape=()), change)
    return tuple(found.values())


def parts_at_modules(solution: Solution) -> tuple[ConversionPlan, ...]:
    """What modules take and give that is not Invariant, each as the change of layout that would make it so."""
    found: dict[ConversionPlan, None] = {}
    for operator in solution.graph.operators:
        if isinstance(operator.boundary, Boundary):
            tensor = operator.outputs[0]
            layout, shape = solution.layouts.get(tensor, Invariant()), solution.graph.tensors[tensor].shape
            if not isinstance(layout, Invariant):
                found[_planned(Conversion(operator.boundary, layout, Invariant(), shape))] = None
    return tuple(found)


def alike_at_modules(solution: Solution) -> dict[Boundary, bool]:
    """What modules take and give that every rank has alike, and whether its gradient is alike as well.

    Only what parameters went into: the code makes other tensors as it needs them on each rank.
    """
    own = {(use.module, *side) for use in _implementations(solution) for side in _own_changes(use)}
    found: dict[Boundary, bool] = {}
    differing: set[Boundary] = set()
    for operator in solution.graph.operators:
        place = operator.boundary
        if not isinstance(place, Boundary):
            continue
        is_changed_inside = place.side == "in" and (place.module, place.side, place.key) in own
        tensor = operator.inputs[0] if is_changed_inside else operator.outputs[0]
        info, layout = solution.graph.tensors[tensor], solution.layouts.get(tensor, Invariant())
        if info.is_static or not info.is_floating or not isinstance(layout, Invariant | Replicate):
            differing.add(place)
        else:
            found[place] = found.get(place, True) and isinstance(layout, Invariant)
    return {place: with_gradient for place, with_gradient in found.items() if place not in differing}


def inputs_of_modules(graph: Graph) -> frozenset[tuple[str, str]]:
    """Which tensors modules are given: ``(module, key)``, with the key of a :class:`Boundary`."""
    boundaries = [operator.boundary for operator in graph.operators]
    return frozenset((at.module, at.key) for at in boundaries if isinstance(at, Boundary) and at.side == "in")


def explain(plan: Plan, solution: Solution) -> Plan:
    """The plan with the reasons why parameters are left whole."""
    found = {} if solution.reasons is None else solution.reasons.of_whole(solution.layouts)
    return replace(plan, parameters=tuple(replace(p, reasons=found.get(p.names[0], ())) for p in plan.parameters))


def _kept_parts(solution: Solution) -> Iterator[str]:
    """Attributes that hold parts after a forward."""
    for operator in solution.graph.operators:
        if operator.name == KEPT and isinstance(solution.layouts.get(operator.inputs[0]), Shard):
            yield member(operator.module, operator.argument("name"))


def _indices(solution: Solution) -> Iterator[IndicesPlan]:
    for operator in solution.graph.operators:
        for name, places in solution.indices(operator).items():
            call, called = solution.graph.calls[operator.call], CalledFunction.of(operator.argument(name))
            assert called is not None
            for place, owned in places:
                yield IndicesPlan(call.module, call.site, called.leaf, called.attribute, place, owned.held)


def _draw(solution: Solution, number: int) -> DrawPlan:
    call = solution.graph.calls[number]
    return DrawPlan(call.module, call.site)


def _made_local(solution: Solution, number: int) -> MadeLocalPlan:
    call = solution.graph.calls[number]
    return MadeLocalPlan(call.module, call.site)


def _planned(
    change: Conversion, view: bool = False, overwritten: bool = False, updated: bool = False
) -> ConversionPlan:
    place = change.boundary
    if isinstance(place, CallPoint):
        key, call = str(place.leaf), place.call
    else:
        key, call = place.key, None
    is_same = {*change.pair} <= {"I", "R"}  # any other change makes new memory
    return ConversionPlan(
        place.module,
        place.side,
        key,
        change.source,
        change.target,
        change.shape,
        view,
        call,
        overwritten and is_same,
        updated,
    )


def _implementations(solution: Solution) -> tuple[ImplementationPlan, ...]:
    """The operators that parallel implementations run, with the changes of type that happen inside of these."""
    at = {_place(change): change for change in solution.conversions}
    found: dict[ImplementationPlan, None] = {}
    for position, use in sorted(solution.uses.items()):
        entry, operator = use.implementation, solution.graph.operators[position]
        if entry.is_module:
            cut = solution.layouts[operator.argument(entry.operand).tensor]
            found[ImplementationPlan(operator.module, entry.name, output=use.output, layout=cut)] = None
            continue
        if not entry.layer:
            site = solution.graph.calls[operator.call].site if operator.call >= 0 else None
            operand = operand_of(operator, entry.operand) if entry.run is not None else None
            layout = None if operand is None else solution.layouts[operand]
            found[ImplementationPlan(operator.module, entry.name, output=use.output, call=site, layout=layout)] = None
            continue
        before, after = at.get((operator.module, *_OWN_INPUT)), at.get((operator.module, *_OWN_OUTPUT))
        taken = before.pair if before is not None and before.pair in entry.inputs else None
        given = after.pair if after is not None and after.pair in entry.outputs else None
        found[ImplementationPlan(operator.module, entry.name, taken, use.output or given)] = None
    return tuple(found)


def _own_changes(use: ImplementationPlan) -> Iterator[tuple[str, str]]:
    """The sides of a layer at which it makes the change of type itself, so that no hook is needed for it."""
    if use.call is None and use.input is not None:
        yield _OWN_INPUT
    if use.call is None and use.output is not None and use.output[0] != "P":
        yield _OWN_OUTPUT


def _place(change: Conversion) -> tuple[str, str, str] | None:
    boundary = change.boundary
    return (boundary.module, boundary.side, boundary.key) if isinstance(boundary, Boundary) else None


def _communication(solution: Solution) -> tuple[Communication, ...]:
    """Collectives of one step of the traced batch, and how much they are in the priced step."""
    moved: dict[str, list[tuple[int, int]]] = {}
    priced = collectives(solution, solution.priced)
    for (kind, size, _), (_, larger, _) in zip(collectives(solution), priced, strict=True):
        moved.setdefault(kind, []).append((size, larger))
    return tuple(Communication(kind, len(of), *map(sum, zip(*of, strict=True))) for kind, of in sorted(moved.items()))


def gathered_again(solution: Solution) -> frozenset[Boundary | CallPoint]:
    """Where tokens are gathered whose parts are kept for the backward pass, which gathers them again."""
    graph = solution.graph
    runs = ((graph.operators[position], use.implementation) for position, use in solution.uses.items())
    kept = kept_in_parts(graph, runs, {change.boundary.module for change in solution.global_views})
    places = {operator.boundary for operator in graph.operators if kept.intersection(operator.outputs)}
    changes = [change for change in solution.conversions if isinstance(change.source, Shard) and change.source.grows]
    return frozenset(change.boundary for change in changes if change.boundary in places)


def collectives(
    solution: Solution, shapes: Mapping[int, tuple[float, ...]] | None = None
) -> Iterator[tuple[str, int, Operator | None]]:
    """Every collective of one step: its kind, its whole bytes, and the operator it belongs to.

    The sum of parameters' gradients, which is no operator's, is a ``"gradient sum"``: whole parameters are summed
    together, a bucket of each dtype at a time.

    Args:
        solution: the layouts.
        shapes: of tensors that are not as large as in the traced batch.
    """
    graph, tensors = solution.graph, solution.graph.tensors
    larger = shapes or {}

    def shape(tensor: int) -> tuple[float, ...]:
        return larger.get(tensor, tensors[tensor].shape)

    crossings = {operator.boundary: operator for operator in reversed(graph.operators) if operator.boundary}
    again = gathered_again(solution)
    for change in solution.conversions:
        operator = crossings[change.boundary]
        size = int(math.prod(shape(operator.inputs[0])) * tensors[operator.outputs[0]].itemsize)
        for kind in TRANSITIONS[change.pair].collectives:
            yield kind, size, operator
        if change.boundary in again:
            yield "all_gather", size, operator
    for position, use in solution.uses.items():
        operator = graph.operators[position]
        given = {name: shape(value.tensor) for name, value in operator.arguments if isinstance(value, Ref)}
        result = math.prod(shape(operator.outputs[0])) * tensors[operator.outputs[0]].itemsize
        for kind, sent in use.implementation.sent(use.output, result, given):
            yield kind, int(sent), operator
    statistics: dict[int, int] = {}
    for position, tensor in solution.slices:
        if tensor in updated(graph.operators[position]):
            statistics[position] = statistics.get(position, 0) + tensors[tensor].bytes
    for position, size in statistics.items():
        yield "all_gather", size, graph.operators[position]
    whole: dict[str, list[int]] = {}
    for tensor in sorted(graph.parameters, key=graph.parameters.__getitem__):
        layout = solution.layouts.get(tensor, Invariant())
        if isinstance(layout, Replicate):
            whole.setdefault(tensors[tensor].dtype, []).append(tensors[tensor].bytes)
        elif isinstance(layout, Shard) and any(owned.is_shared for _, owned in layout.dims):
            yield "gradient sum", tensors[tensor].bytes, None
    for sizes in whole.values():
        for bucket in in_buckets(sizes):
            yield "gradient sum", sum(sizes[bucket]), None
