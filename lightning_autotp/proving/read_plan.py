"""A plan read back on a model's graph: every tensor's layout, or the first thing that does not fit.

The plan says how parameters are cut, where layouts change and what runs in parallel; the operators' rules say whether
that goes together, and what follows for all other tensors. So a plan that was edited by hand, kept from an earlier
start, or made on another machine is proved like one that was just made.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import replace

from lightning_autotp.layouts.places import Boundary, CallPoint
from lightning_autotp.layouts.plan import ConversionPlan, DrawPlan, ImplementationPlan, IndicesPlan, Plan
from lightning_autotp.layouts.types import Shard
from lightning_autotp.operators.graph import Graph
from lightning_autotp.proving.local_sizes import made_local
from lightning_autotp.solving.candidates import is_cut_between
from lightning_autotp.solving.implementations import Implementations
from lightning_autotp.solving.plan_from_solution import changes_of, device_kind
from lightning_autotp.solving.planned import PlanMismatch, changing_places, module_digests
from lightning_autotp.solving.solution import Solution
from lightning_autotp.solving.solver import solve


def read_plan(plan: Plan, graph: Graph, implementations: Implementations) -> tuple[Plan, Solution]:
    """The layouts that a plan means.

    Args:
        plan: the plan.
        graph: what the plan's model runs, with its calls opened as for the solver.
        implementations: those that the plan may name.

    Returns:
        The plan, at the sizes of the graph's batch and on its device, which may be others than those that it was made
        with; and the layouts.

    Raises:
        PlanMismatch: if the plan is not of this model, or says what the operators' rules do not allow; it names the
            first difference.
    """
    difference = _other_parameters(plan, graph) or _other_model(plan, graph)
    if difference:
        raise PlanMismatch(f"the plan was made for another model: {difference}")
    _refuse_cut_blocks(plan, graph)
    solution = _with_local_calls(plan, solve(graph, plan.ranks, implementations, plan=plan))
    again = changes_of(solution)
    for what, theirs, ours in (
        ("changes a layout", map(_change, plan.conversions), map(_change, again.conversions)),
        ("runs a parallel implementation", map(_use, plan.implementations), map(_use, again.implementations)),
        ("draws a rank's own random numbers", map(_draw, plan.draws), map(_draw, again.draws)),
        ("gives a function the whole model's indices", map(_read, plan.indices), map(_read, again.indices)),
    ):
        difference = _first_difference(list(theirs), list(ours))
        if difference:
            raise PlanMismatch(f"where the plan {what}, {difference}")
    device = device_kind(graph.device)
    return replace(plan, conversions=again.conversions, device=device, traced_on=device), solution


def read_for_call(
    plan: Plan, graph: Graph, implementations: Implementations, fixed: Collection[Boundary | CallPoint] = ()
) -> tuple[tuple[ConversionPlan, ...], Solution]:
    """The layouts that a plan means in another call of its model than the one that it was made for.

    The call may pass other places than the plan knows, or not all of them. Where it needs a tensor in another layout
    than it comes in there, its layout changes at a module's boundary at which the plan changes none.

    Args:
        plan: the plan.
        graph: what the model runs in this call.
        implementations: those that the plan may name.
        fixed: places where no layout may change that the plan does not change.

    Returns:
        The changes of layout that this call needs and the plan does not have, and the layouts.

    Raises:
        PlanMismatch: if the operators' rules do not allow what the plan says in this call.
    """
    graph = graph.varying_after(changing_places(plan))  # inputs here that the model computes in the plan's call, too
    solved = solve(graph, plan.ranks, implementations, plan=plan, is_other_call=True, fixed=fixed)
    solution = _with_local_calls(plan, solved)
    planned = {_change(change) for change in plan.conversions}
    needed = changes_of(solution).conversions
    # At calls nothing changes that the plan does not change: what code makes for them is local already, or it differs.
    return tuple(change for change in needed if change.call is None and _change(change) not in planned), solution


def _with_local_calls(plan: Plan, solution: Solution) -> Solution:
    """The solution where the plan's calls make tensors with local sizes."""
    graph = solution.graph
    made = {(call.module, call.call) for call in plan.made_local}
    for operator in graph.operators:
        if operator.call >= 0 and (graph.calls[operator.call].module, graph.calls[operator.call].site) in made:
            solution = made_local(solution, operator) or solution
    return solution


def _refuse_cut_blocks(plan: Plan, graph: Graph) -> None:
    layouts = {name: parameter.layout for parameter in plan.parameters for name in parameter.names}
    for tensor, units in graph.units.items():
        name = graph.parameters[tensor]
        layout = layouts.get(name)
        if isinstance(layout, Shard) and not is_cut_between(layout, units):
            raise PlanMismatch(
                f"the plan cuts {name} as {layout}, inside blocks that are quantized together, or that products in"
                f" float8 take: it may be cut at multiples of {list(units)} only. Make a plan of the model with its"
                " quantization_config, or after convert_to_float8_training"
            )


def _other_parameters(plan: Plan, graph: Graph) -> str:
    """What is different about the parameters that the model uses, in numbers; empty if nothing is."""
    theirs = {name: parameter.shape for parameter in plan.parameters for name in parameter.names}
    ours = {name: graph.tensors[tensor].shape for tensor, name in graph.parameters.items()}
    used = {name for p in plan.parameters if isinstance(p.layout, Shard) for name in p.names[:1]}
    strangers = [*(used - ours.keys()), *(ours.keys() - theirs.keys())]
    resized = [name for name in ours if theirs.get(name, ours[name]) != ours[name]]
    if not strangers and not resized:
        return ""
    told = []
    lengths, here = _lengths(theirs), _lengths(ours)
    differing = [path for path in lengths if path in here and here[path] != lengths[path]]
    if strangers and differing:
        path = differing[0]
        told.append(f"{path} is of length {lengths[path]} in the plan and {here[path]} here")
    elif strangers:
        name = min(strangers)
        told.append(
            f"{name} is " + ("used here and not in the plan" if name in ours else "used in the plan and not here")
        )
    if resized:
        name = resized[0]
        more = f" (and {len(resized) - 1} more parameters)" if len(resized) > 1 else ""
        told.append(f"{name} is {list(theirs[name])} in the plan and {list(ours[name])} here{more}")
    return f"{'; '.join(told)}. Give plan= the plan of this model, or leave it out"


def _lengths(names: Iterable[str]) -> dict[str, int]:
    """How many modules the lists of modules have, by the lists' paths."""
    found: dict[str, set[str]] = {}
    for name in names:
        parts = name.split(".")
        for place, part in enumerate(parts):
            if part.isdecimal():
                found.setdefault(".".join(parts[:place]), set()).add(part)
    return {path: len(numbers) for path, numbers in found.items()}


def _other_model(plan: Plan, graph: Graph) -> str:
    """What is different about the model; empty if nothing is."""
    if not plan.modules:
        return ""
    theirs, ours = dict(plan.modules), dict(module_digests(graph))
    for module in sorted(theirs.keys() | ours.keys()):
        who = module or "the model itself"
        if module not in ours:
            return f"{who} does not run here"
        if module not in theirs:
            return f"{who} runs here, which the plan does not know"
        if theirs[module] != ours[module]:
            here = device_kind(graph.device)
            on = f", which was traced as on {plan.traced_on} and is here as on {here}" if plan.traced_on != here else ""
            return f"the code of {who} runs other operators than when the plan was made{on}"
    return ""


def _change(change: ConversionPlan) -> str:
    call = f" of the call {change.call}" if change.call else ""
    letters = "shown whole" if change.view else f"{change.source.letter} -> {change.target.letter}"
    return f"{change.module or '(root)'}.{change.side}{change.key}{call}: {letters}"


def _use(use: ImplementationPlan) -> str:
    call = f" for the call {use.call}" if use.call else ""
    changes = [f"{side} {' -> '.join(pair)}" for side, pair in (("input", use.input), ("output", use.output)) if pair]
    return f"{use.name} at {use.module or '(root)'}{call}" + (f" ({', '.join(changes)})" if changes else "")


def _draw(draw: DrawPlan) -> str:
    return f"{draw.call} in {draw.module or '(root)'}"


def _read(read: IndicesPlan) -> str:
    which = f"{read.attribute} of argument {read.leaf}" if read.attribute else f"argument {read.leaf}"
    return f"{read.call} in {read.module or '(root)'}, {which}, index {read.place} of {read.held}"


def _first_difference(theirs: list[str], ours: list[str]) -> str:
    """The first entry that only one side has."""
    extra = [entry for entry in theirs if entry not in ours]
    missing = [entry for entry in ours if entry not in theirs]
    if extra:
        return f"its entry {extra[0]} is not needed by its layouts"
    return f"it lacks {missing[0]}, which its layouts need" if missing else ""
