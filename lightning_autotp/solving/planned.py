"""A plan as the solver reads it: which kinds it gives parameters, and where it changes layouts.

A plan names parameters' layouts, the changes at boundaries and calls, and which implementations run. The layouts of all
other tensors follow from the operators' rules: the solver finds them, with no more freedom than the plan leaves.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence

from lightning_autotp.layouts.places import Boundary, CallPoint, member
from lightning_autotp.layouts.plan import ConversionPlan, ImplementationPlan, Plan
from lightning_autotp.layouts.transitions import Pair
from lightning_autotp.layouts.types import Layout, Shard
from lightning_autotp.operators import record
from lightning_autotp.operators.graph import Graph
from lightning_autotp.solving.candidates import Sharding
from lightning_autotp.solving.implementations import Implementations

Kind = str | int
"""The type of a tensor: ``I``, ``R``, ``P``, or the number of the candidate that cuts it."""
Change = tuple[Kind, Kind]
"""The kinds before and after."""


class PlanMismatch(RuntimeError):
    """The plan was made for another model, or another number of ranks."""


def module_digests(graph: Graph) -> tuple[tuple[str, str], ...]:
    """A short hash of what every module's own code runs, by the module's path: equal ones run the same operators.

    Sizes do not count, which change with the batch (a model's own are those of its parameters), nor do dtypes.
    """
    sums: dict[str, int] = {}
    for operator in graph.operators:
        tensors = [graph.tensors[tensor] for tensor in operator.outputs]
        known = record(operator.name)
        if all(tensor.is_static for tensor in tensors) or (known is not None and known.identity):
            continue
        parameters = [graph.parameters[t] for t in operator.inputs if t in graph.parameters]
        dims = [len(tensor.shape) for tensor in tensors]
        said = repr((operator.name, str(operator.boundary or ""), len(operator.inputs), parameters, dims))
        sums[operator.module] = zlib.crc32(said.encode(), sums.get(operator.module, 0))
    return tuple((module, f"{value:08x}") for module, value in sorted(sums.items()))


def changing_places(plan: Plan) -> set[Boundary]:
    """Where tensors that enter or leave modules change their layout, at boundaries or in parallel layers."""
    places = [_place(change) for change in plan.conversions if not change.view]
    layers = [place for use in plan.implementations if use.call is None for place, _ in _layer_changes(use)]
    return {place for place in (*places, *layers) if isinstance(place, Boundary)}


class PlanConstraints:
    """What a plan allows.

    Args:
        plan: the plan.
        graph: the model's graph, with its calls opened.
        shardings: the solver's candidates, by number.
        touching: numbers of the candidates that cut a tensor.
        layout_of: the layout that a tensor has under a kind.
        implementations: those that the plan may name.
        is_other_call: whether the graph is of another call than the plan's.

    Raises:
        PlanMismatch: if a layout of the plan is none that the model's dims can have.
    """

    def __init__(
        self,
        plan: Plan,
        graph: Graph,
        shardings: Sequence[Sharding],
        touching: Mapping[int, tuple[int, ...]],
        layout_of: Callable[[int, Kind], Layout],
        implementations: Implementations,
        is_other_call: bool,
    ) -> None:
        self._plan, self._touching, self._layout_of = plan, touching, layout_of
        self._tensors = graph.tensors
        self.is_free = is_other_call
        self._layers = {use.module for use in plan.implementations if use.call is None}
        self._numbers = {(sharding.axes, sharding.runs_by_rank): number for number, sharding in enumerate(shardings)}
        layouts = {name: parameter.layout for parameter in plan.parameters for name in parameter.names}
        self.parameters = {
            tensor: self._kind(tensor, layouts[name], f"the parameter {name}")
            for tensor, name in graph.parameters.items()
            if tensor in touching
        }
        self.changes: dict[Boundary | CallPoint, Change] = {}
        self.slices: dict[CallPoint, Layout] = {}
        self._shown: set[Boundary | CallPoint] = set()
        self.runs = {(x.module, x.call): (x.name, x.output) for x in plan.implementations if x.layout is not None}
        self.sums = {x.module: x.output for x in plan.implementations if x.output is not None and x.output[0] == "P"}
        self.made_local = {(made.module, made.call) for made in plan.made_local}
        crossed = {operator.boundary: operator for operator in graph.operators if operator.boundary is not None}
        for change in plan.conversions:
            place = _place(change)
            operator = crossed.get(place)
            if change.view:
                self._shown.add(place)
                continue
            if operator is not None:
                self.changes[place] = (
                    self._kind(operator.inputs[0], change.source, str(place)),
                    self._kind(operator.outputs[0], change.target, str(place)),
                )
            elif isinstance(place, CallPoint):
                self.slices[place] = change.target
            elif not is_other_call:
                raise PlanMismatch(f"the plan changes a layout at {place}, where the model passes no tensor")
        aliases = {name: parameter.names[0] for parameter in plan.parameters for name in parameter.names}
        tensors = {aliases[name]: tensor for tensor, name in graph.parameters.items()}
        for use in plan.implementations:
            if use.call is not None:
                continue
            try:
                entry = implementations[use.name]
            except KeyError as error:
                raise PlanMismatch(f"{use.module}: {error.args[0]}") from None
            operand = tensors.get(aliases.get(member(use.module, entry.operand), ""))
            for place, pair in _layer_changes(use):
                if operand is not None and place in crossed:
                    before, after = (self.parameters[operand] if letter == "S" else letter for letter in pair)
                    self.changes[place] = (before, after)

    @property
    def numbers(self) -> frozenset[int]:
        """The candidates that the plan uses."""
        kinds = (*self.parameters.values(), *(kind for change in self.changes.values() for kind in change))
        return frozenset(kind for kind in kinds if isinstance(kind, int))

    def changes_at(self, place: Boundary | CallPoint) -> Callable[[Change], bool]:
        """Tells whether a tensor's kinds before and after a place are what the plan makes of them there."""
        planned = self.changes.get(place)
        if planned is not None:
            return lambda change: change == planned
        is_free = self.is_free_at(place)
        return lambda change: is_free or change[0] == change[1]

    def is_free_at(self, place: Boundary | CallPoint) -> bool:
        """Whether a tensor's layout may change at a place in any way where the plan changes none.

        Parallel layers change layouts themselves, always alike: a sum that one leaves is taken further on.
        """
        return self.is_free and isinstance(place, Boundary) and place.module not in self._layers

    def may_replace(self, module: str) -> bool:
        """Whether a module may be a parallel layer: in another call of the model those that are none stay none."""
        return not self.is_free or module in self._layers

    def shows(self, place: Boundary | CallPoint | None) -> bool:
        """Whether a sharded tensor is shown as if it were whole to the code after a place."""
        return place in self._shown

    def allows(self, place: CallPoint, target: Layout | None) -> bool:
        """Whether the plan makes a static operand this at its call; ``None``: leaves it as it is."""
        return _is_like(self.slices.get(place), target)

    def _kind(self, tensor: int, layout: Layout, what: str) -> Kind:
        """The kind that a layout is of a tensor."""
        if not isinstance(layout, Shard):
            return layout.letter
        numbers: Sequence[int] = self._touching.get(tensor, ())
        if layout.cuts:
            # The plan's own axes first. In another call's graph other axes may have their numbers.
            planned = self._numbers.get((layout.cuts[0].axes, layout.cuts[0].held))
            numbers = sorted(numbers, key=lambda number: number != planned)
        for number in numbers:
            if _is_like(self._layout_of(tensor, number), layout):
                return number
        shape, why = self._tensors[tensor].shape, ""
        if any(dim < len(shape) and shape[dim] == 1 for dim, _ in layout.dims):
            why = (
                f": it is {list(shape)} here, and a dim of one element cannot be told from no dim. If that is one token"
                " in each row, give two or more, or a cache, or plan without sequence_parallel"
            )
        raise PlanMismatch(f"{what} is planned as {layout}, but the model's code allows no such cut of it{why}")


def _is_like(layout: Layout | None, other: Layout | None) -> bool:
    """Whether two layouts are the same, perhaps of batches of different sizes."""
    if layout == other:  # be the dims spelled otherwise in another call
        return True
    if not isinstance(layout, Shard) or not isinstance(other, Shard) or not (layout.cuts and other.cuts):
        return False
    if [dim for dim, _ in layout.dims] != [dim for dim, _ in other.dims]:
        return False
    return all(cut.is_like(theirs) for cut, theirs in zip(layout.cuts, other.cuts, strict=True))


def _layer_changes(use: ImplementationPlan) -> Iterator[tuple[Boundary, Pair]]:
    """Where a parallel layer changes layouts itself, and how; the sum of its results is a part of its product."""
    if use.input is not None:
        yield Boundary(use.module, "in", "[0][0]"), use.input
    if use.output is not None and use.output[0] != "P":
        yield Boundary(use.module, "out", ""), use.output


def _place(change: ConversionPlan) -> Boundary | CallPoint:
    if change.call is None:
        return Boundary(change.module, change.side, change.key)
    return CallPoint(change.module, change.call, change.side, int(change.key))
