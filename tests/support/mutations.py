"""Mistakes that a bug in planning or in its execution would make, planted in any model's plan.

Two kinds of bug are told apart. One is made on the way from the solver's solution to the local model: then only the
plan is corrupted (``stage == "plan"``). The other is in the analysis itself: then plan and solution agree in what is
wrong (``stage == "solution"``), and a proof that measures the local model against the solution may well pass.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace

from lightning_autotp.layouts.ownership import Ownership, merge_runs
from lightning_autotp.layouts.plan import ConversionPlan, ImplementationPlan, ParameterPlan, Plan, SizePlan
from lightning_autotp.layouts.types import Invariant, Layout, Partial, Replicate, Shard
from lightning_autotp.solving.implementations import DEFERRED_SUM
from lightning_autotp.solving.solution import Conversion, Solution

PLAN, SOLUTION = "plan", "solution"


@dataclass(frozen=True)
class Mutation:
    """One planted mistake.

    Attributes:
        kind: what a bug would have done.
        stage: whether only the plan is wrong, or the solution behind it, too.
        where: the parameter, module or call.
        plan: the corrupted plan.
        solution: what the local model is verified against.
    """

    kind: str
    stage: str
    where: str
    plan: Plan
    solution: Solution

    def __str__(self) -> str:
        return f"{self.kind} ({self.stage}) at {self.where}"


def planted(plan: Plan, solution: Solution, reads: Mapping[str, Mapping[str, int]]) -> Iterator[Mutation]:
    """Every kind of mistake that this plan has room for.

    Args:
        plan: the right plan.
        solution: the right solution.
        reads: by module, the integers that its forward reads.
    """
    yield from _of_parameters(plan, solution)
    yield from _of_layers(plan, solution)
    yield from _of_conversions(plan, solution)
    yield from _of_sizes(plan, solution, reads)


# --- how parameters are cut ---


def _of_parameters(plan: Plan, solution: Solution) -> Iterator[Mutation]:
    used = set(solution.graph.parameters.values())
    parameters = [p for p in plan.parameters if p.names[0] in used]
    changes: list[tuple[str, Callable[[Layout], Layout | None]]] = [
        ("gradient sum dropped", lambda layout: Invariant() if isinstance(layout, Replicate) else None),
        ("gradient summed once too often", lambda layout: Replicate() if isinstance(layout, Invariant) else None),
        ("sections joined", _mapped(sections_joined)),
        ("section given to the other rank", _mapped(section_exchanged)),
        ("boundary shifted, sizes kept", _mapped(boundary_shifted)),
        ("boundary shifted, sizes changed", _mapped(boundary_moved)),
        ("ranks exchanged", _mapped(ranks_exchanged)),
    ]
    for kind, change in changes:
        found = [(p, layout) for p in parameters if (layout := change(p.layout)) is not None]
        # The first of them and one matrix from the middle.
        for parameter, layout in {p.names[0]: (p, layout) for p, layout in _ends(found)}.values():
            name = parameter.names[0]
            corrupted = replace(plan, parameters=tuple(_relaid(p, name, layout) for p in plan.parameters))
            yield Mutation(kind, PLAN, name, corrupted, solution)
            tensor = next(t for t, known in solution.graph.parameters.items() if known in parameter.names)
            agreeing = replace(solution, layouts=solution.layouts | {tensor: layout})
            yield Mutation(kind, SOLUTION, name, corrupted, agreeing)


def _ends(found: list[tuple[ParameterPlan, Layout]]) -> list[tuple[ParameterPlan, Layout]]:
    matrices = [item for item in found if len(item[0].shape) > 1] or found
    return [*found[:1], *matrices[len(matrices) // 2 :][:1]]


def _relaid(parameter: ParameterPlan, name: str, layout: Layout) -> ParameterPlan:
    return replace(parameter, layout=layout) if parameter.names[0] == name else parameter


def _mapped(change: Callable[[Ownership], Ownership | None]) -> Callable[[Layout], Layout | None]:
    """A change of the ownership map of a shard's first dim."""

    def changed(layout: Layout) -> Layout | None:
        if not isinstance(layout, Shard):
            return None
        (dim, owned), *rest = layout.dims
        other = change(owned)
        return None if other is None or other == owned else Shard(((dim, other), *rest))

    return changed


def sections_joined(owned: Ownership) -> Ownership | None:
    """The dim sharded as one piece instead of section by section: every local size is the same."""
    sizes = [owned.local_size(rank) for rank in range(owned.ranks)]
    if max(map(len, owned.held)) < 2 or owned.is_shared:
        return None
    starts = [sum(sizes[:rank]) for rank in range(owned.ranks)]
    return Ownership(owned.size, tuple(((a, a + n),) for a, n in zip(starts, sizes, strict=True)))


def section_exchanged(owned: Ownership) -> Ownership | None:
    """Two ranks exchange their parts of the last section only."""
    first, second, *rest = owned.held
    if min(len(first), len(second)) < 2 or owned.is_shared:
        return None
    if first[-1][1] - first[-1][0] != second[-1][1] - second[-1][0]:
        return None
    return Ownership(owned.size, (merge_runs([*first[:-1], second[-1]]), merge_runs([*second[:-1], first[-1]]), *rest))


def boundary_shifted(owned: Ownership) -> Ownership | None:
    """The first rank gives its last index away, and gets the other's last one for it."""
    first, second, *rest = owned.held
    if owned.is_shared or not first or not second or second[-1][1] - second[-1][0] < 2:
        return None
    mine, theirs = first[-1][1] - 1, second[-1][1] - 1
    return Ownership(
        owned.size,
        (
            merge_runs([*_without(first, mine), (theirs, theirs + 1)]),
            merge_runs([*_without(second, theirs), (mine, mine + 1)]),
            *rest,
        ),
    )


def boundary_moved(owned: Ownership) -> Ownership | None:
    """The first rank gives its last index away: uneven shares."""
    first, second, *rest = owned.held
    if owned.is_shared or not first or not second or owned.local_size(0) < 2:
        return None
    mine = first[-1][1] - 1
    return Ownership(owned.size, (_without(first, mine), merge_runs([*second, (mine, mine + 1)]), *rest))


def ranks_exchanged(owned: Ownership) -> Ownership | None:
    """Two ranks hold each other's part."""
    first, second, *rest = owned.held
    return Ownership(owned.size, (second, first, *rest)) if owned.local_size(0) == owned.local_size(1) else None


def _without(runs: tuple[tuple[int, int], ...], index: int) -> tuple[tuple[int, int], ...]:
    cut = [piece for start, stop in runs for piece in ((start, min(stop, index)), (max(start, index + 1), stop))]
    return merge_runs(cut)


# --- parallel layers ---


def _of_layers(plan: Plan, solution: Solution) -> Iterator[Mutation]:
    layers = [use for use in plan.implementations if use.call is None]

    def changed(layer: ImplementationPlan, *to: ImplementationPlan) -> Plan:
        uses = tuple(new for old in plan.implementations for new in (to if old is layer else (old,)))
        return replace(plan, implementations=uses)

    for kind in ("row", "vocab"):
        for layer in [x for x in layers if x.name == kind and x.output == ("P", "I")][:1]:
            left = changed(layer, replace(layer, output=DEFERRED_SUM))
            yield Mutation("layer's all-reduce dropped", PLAN, layer.module, left, solution)
        for layer in [x for x in layers if x.name == kind and x.output == DEFERRED_SUM][:1]:
            taken = changed(layer, replace(layer, output=("P", "I")))
            yield Mutation("layer's sum taken that is left", PLAN, layer.module, taken, solution)
    for layer in [x for x in layers if x.name == "column" and x.input is not None][:1]:
        without = changed(layer, replace(layer, input=None))
        kind = "all-reduce of a layer's input gradient dropped"
        yield Mutation(kind, PLAN, layer.module, without, solution)
        rest = [c for c in solution.conversions if (c.boundary.module, c.boundary.side) != (layer.module, "in")]
        yield Mutation(kind, SOLUTION, layer.module, without, replace(solution, conversions=rest))
    for layer in [x for x in layers if x.name == "column" and x.input is None][:1]:
        twice = changed(layer, replace(layer, input=("I", "R")))
        yield Mutation("all-reduce of an input gradient done twice", PLAN, layer.module, twice, solution)
    for layer in [x for x in layers if x.name == "column" and x.output is not None][:1]:
        ungathered = changed(layer, replace(layer, output=None))
        yield Mutation("layer's gather dropped", PLAN, layer.module, ungathered, solution)
    for kind in ("row", "vocab", "column"):
        # A row-parallel layer that leaves its sum does what an ordinary one does with its part.
        for layer in [x for x in layers if x.name == kind and (kind, x.output) != ("row", DEFERRED_SUM)][-1:]:
            yield Mutation(f"{kind} layer left ordinary", PLAN, layer.module, changed(layer), solution)


# --- conversions ---


def _of_conversions(plan: Plan, solution: Solution) -> Iterator[Mutation]:
    seen: set[tuple[str, ...]] = set()
    for at, conversion in enumerate(plan.conversions):
        pair = (type(conversion.source).__name__, type(conversion.target).__name__)
        key = (*pair, str(conversion.view), str(conversion.call is not None))
        if key in seen:
            continue
        seen.add(key)
        what = "view of logits" if conversion.view else f"{pair[0]} to {pair[1]}"
        where = f"{conversion.module}.{conversion.side}{conversion.key}"
        for kind, new in [(f"{what} dropped", None), *_other_conversions(conversion, what)]:
            conversions = [*plan.conversions[:at], *([new] if new is not None else []), *plan.conversions[at + 1 :]]
            corrupted = replace(plan, conversions=tuple(conversions))
            yield Mutation(kind, PLAN, where, corrupted, solution)
            agreeing = _agreeing(solution, conversion, new)
            if agreeing is not None:
                yield Mutation(kind, SOLUTION, where, corrupted, agreeing)


def _other_conversions(conversion: ConversionPlan, what: str) -> Iterator[tuple[str, ConversionPlan]]:
    source, target = conversion.source, conversion.target
    if conversion.view:
        exchanged = _mapped(ranks_exchanged)(target) or _mapped(boundary_shifted)(target)
        if exchanged is not None:
            yield f"{what} cut elsewhere", replace(conversion, source=exchanged, target=exchanged)
        return
    if isinstance(source, Partial | Shard) and isinstance(target, Invariant | Replicate):
        other = Replicate() if isinstance(target, Invariant) else Invariant()
        yield f"{what} with the other backward", replace(conversion, target=other)
    for side in ("source", "target"):
        for change in (ranks_exchanged, boundary_shifted):
            new = _mapped(change)(getattr(conversion, side))
            if new is not None:
                yield f"{what} cut elsewhere", replace(conversion, **{side: new})
                break


def _agreeing(solution: Solution, old: ConversionPlan, new: ConversionPlan | None) -> Solution | None:
    """The solution with the same mistake; ``None`` for views, which a solution derives from the logits' layout."""

    def same(change: Conversion) -> bool:
        place = change.boundary
        key = getattr(place, "key", None) or (str(place.leaf) if hasattr(place, "leaf") else "")
        call = getattr(place, "call", None)
        return (place.module, place.side, key, call, change.source, change.target) == (
            old.module, old.side, old.key, old.call, old.source, old.target,
        )  # fmt: skip

    def corrupted(change: Conversion) -> Conversion | None:
        if not same(change):
            return change
        return None if new is None else replace(change, source=new.source, target=new.target)

    if old.view:
        return None
    conversions = [other for change in solution.conversions if (other := corrupted(change)) is not None]
    slices = {key: other for key, change in solution.slices.items() if (other := corrupted(change)) is not None}
    return replace(solution, conversions=conversions, slices=slices)


# --- sizes in Python ---


def _of_sizes(plan: Plan, solution: Solution, reads: Mapping[str, Mapping[str, int]]) -> Iterator[Mutation]:
    def changed(size: SizePlan, *to: SizePlan) -> Plan:
        return replace(plan, sizes=tuple(new for old in plan.sizes for new in (to if old is size else (old,))))

    kinds: set[tuple[bool, str]] = set()
    for size in plan.sizes:
        where = f"{size.module}: {size.attribute}" + (f" of {size.call}" if size.call is not None else "")
        kind = (size.call is not None, size.attribute)
        if kind in kinds or len(kinds) > 3:
            continue
        kinds.add(kind)
        name = "number in a call" if size.call is not None else "size"
        yield Mutation(f"{name} not made local", PLAN, where, changed(size), solution)
        wrong = replace(size, local=tuple(local + 1 for local in size.local))
        yield Mutation(f"{name} made local wrongly", PLAN, where, changed(size, wrong), solution)
        others = [] if size.call is not None else _others(size, plan, reads)
        for other in others[:2]:
            mistaken = f"{where} -> {other.attribute}"
            yield Mutation("another attribute made local", PLAN, mistaken, changed(size, other), solution)
    taken = {(size.module, size.attribute) for size in plan.sizes}
    spare = [
        SizePlan(module, attribute, whole, (whole // plan.ranks,) * plan.ranks)
        for module, found in reads.items()
        for attribute, whole in found.items()
        if (module, attribute) not in taken and whole > 1 and whole % plan.ranks == 0
    ]
    alike = {(re.sub(r"\d+", "*", size.module), size.attribute): size for size in spare}
    for extra in alike.values():
        corrupted = replace(plan, sizes=(*plan.sizes, extra))
        yield Mutation("size made local that stays whole", PLAN, str(extra), corrupted, solution)


def _others(size: SizePlan, plan: Plan, reads: Mapping[str, Mapping[str, int]]) -> list[SizePlan]:
    """Other integers that the module reads, made local in the place of this one."""
    taken = {other.attribute for other in plan.sizes if other.module == size.module}
    return [
        SizePlan(size.module, attribute, whole, (max(1, whole // plan.ranks),) * plan.ranks)
        for attribute, whole in reads.get(size.module, {}).items()
        if attribute not in taken and whole > 1
    ]
