"""The layouts found for a graph, and all that follows from them: where layouts change, and what runs in parallel."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from lightning_autotp.layouts.ownership import Ownership
from lightning_autotp.layouts.places import Boundary, CallPoint
from lightning_autotp.layouts.plan import WholeWork
from lightning_autotp.layouts.step_size import StepSize
from lightning_autotp.layouts.transitions import Pair
from lightning_autotp.layouts.types import Invariant, Layout, Shard
from lightning_autotp.operators import Relation, record
from lightning_autotp.operators.declared import CalledFunction
from lightning_autotp.operators.graph import Graph, Operator
from lightning_autotp.solving.elimination import Assignment
from lightning_autotp.solving.implementations import Use, operand_of
from lightning_autotp.solving.planned import Kind
from lightning_autotp.solving.reasons import Reasons
from lightning_autotp.solving.tables import Tables


@dataclass(frozen=True)
class Conversion:
    """A tensor changes its layout at a module boundary, or at a call inside a module."""

    boundary: Boundary | CallPoint
    source: Layout
    target: Layout
    shape: tuple[int, ...]

    @property
    def pair(self) -> Pair:
        """Its key in the table of transitions."""
        return self.source.letter, self.target.letter


@dataclass
class Solution:
    """The layouts found. Two are equal if they are carried out in the same way, whatever they cost.

    Attributes:
        graph: the captured graph.
        ranks: number of ranks.
        layouts: of every tensor that depends on a parameter.
        conversions: where layouts change.
        slices: by operator (its position) and static tensor: how that operand becomes what the operator needs there.
        uses: operators (their positions) that a parallel implementation runs.
        drawing: calls, by number, that draw random numbers for a sharded tensor: each rank its own.
        not_drawing: operators (their positions) that could draw random numbers, but do not with their arguments.
        made_local: calls, by number, whose static tensors the model's own code makes with local sizes.
        global_views: boundaries where a sharded tensor leaves the modules and must look whole to the user's code
            (logits).
        reasons: tells why parameters are left whole; ``None`` where a plan was followed.
        cost: seconds by the profile.
        bound: seconds that every solution takes at least; ``cost``, where this one is known to be the cheapest.
        step: the size of the step that they are priced for.
        step_source: who said so.
        priced: the shapes in that step of tensors at boundaries where layouts change and of operators that parallel
            implementations run.
        kinds: the layouts as the solver knows them: types, and numbers of candidates.
        divided_work: the share of the forward's floating-point operations that is divided; negative without any, and
            where a plan was followed: the plan has it.
        whole_work: the operators of which every rank computes all; none where a plan was followed.
    """

    graph: Graph
    ranks: int
    layouts: dict[int, Layout]
    conversions: list[Conversion] = field(default_factory=list)
    slices: dict[tuple[int, int], Conversion] = field(default_factory=dict)
    uses: dict[int, Use] = field(default_factory=dict)
    drawing: set[int] = field(default_factory=set)
    not_drawing: set[int] = field(default_factory=set)
    made_local: set[int] = field(default_factory=set)
    global_views: list[Conversion] = field(default_factory=list)
    reasons: Reasons | None = field(default=None, repr=False, compare=False)
    cost: float = field(default=0.0, compare=False)
    bound: float = field(default=0.0, compare=False)
    step: StepSize = field(default_factory=StepSize, compare=False)
    step_source: str = field(default="", compare=False)
    priced: dict[int, tuple[float, ...]] = field(default_factory=dict, repr=False, compare=False)
    kinds: dict[int, Kind] = field(default_factory=dict, compare=False)
    divided_work: float = field(default=-1.0, compare=False)
    whole_work: tuple[WholeWork, ...] = field(default=(), compare=False)

    def indices(self, operator: Operator) -> dict[str, tuple[tuple[int, Ownership], ...]]:
        """Functions among an operator's arguments that read indices of sharded dims: at which places, and of which."""
        known, found = record(operator.name), dict[str, tuple[tuple[int, Ownership], ...]]()
        if known is None or not known.indices:
            return found
        arguments = dict(operator.arguments)
        for name, place, tensor_name, dim in known.indices:
            called = CalledFunction.of(arguments.get(name))
            if called is not None and place in dict(called.reads):
                tensor = operator.argument(tensor_name).tensor
                layout = self.layouts.get(tensor)
                at = dim % len(self.graph.tensors[tensor].shape)
                owned = layout.ownership(at) if isinstance(layout, Shard) else None
                if owned is not None:
                    found[name] = (*found.get(name, ()), (place, owned))
        return found

    @property
    def gap(self) -> float:
        """The share of its cost that another solution could save at most; 0 where this one is the cheapest."""
        saved = self.cost - self.bound
        return saved / self.cost if saved > 1e-9 * self.cost else 0.0


def read_solution(tables: Tables, kinds: dict[int, Kind], found: Assignment) -> Solution:
    """What an assignment of the tables means; ``kinds`` are those of every tensor, later runs of a module included."""
    layouts = {tensor: tables.layout(tensor, kind) for tensor, kind in kinds.items()}
    solution = Solution(tables.graph, tables.ranks, layouts, cost=found.cost, bound=found.bound, kinds=kinds)
    solution.step, solution.step_source = tables.sizes.step, tables.tokens.source
    seen: set[Boundary | CallPoint] = set()
    for relation in tables.relations:
        operator = relation.operator
        if operator.boundary is not None:
            source, target = operator.inputs[0], operator.outputs[0]
            if layouts[source] != layouts[target]:
                shape = tables.graph.tensors[source].shape
                solution.conversions.append(Conversion(operator.boundary, layouts[source], layouts[target], shape))
                _add_priced(tables, solution, relation)
        elif (use := tables.use(relation, kinds)) is not None:
            solution.uses[tables.position[id(operator)]] = use
            _add_priced(tables, solution, relation)
            shown = operand_of(operator, use.implementation.shown)
            if shown is not None:
                _add_view(tables, solution, shown, seen)
        if relation.draws and any(isinstance(layouts[tensor], Shard) for tensor in operator.outputs):
            solution.drawing.add(operator.call)
        if relation.draws is False:
            solution.not_drawing.add(tables.position[id(operator)])
        _add_slices(tables, solution, relation, kinds)
    for tensor in tables.graph.outputs:
        if isinstance(layouts.get(tensor), Shard):  # and not one that is whole further on
            _add_view(tables, solution, tensor, seen)
    return solution


def _add_priced(tables: Tables, solution: Solution, relation: Relation) -> None:
    """How large an operator's tensors are in the priced step."""
    for tensor, dims in (*relation.inputs.items(), *relation.outputs.items()):
        solution.priced[tensor] = tables.sizes.shape(tensor, dims)


def _add_slices(tables: Tables, solution: Solution, relation: Relation, kinds: Mapping[int, Kind]) -> None:
    """What the operator's static operands become at its call."""
    position = tables.position[id(relation.operator)]
    for tensor, target in tables.static_targets(relation, kinds).items():
        shape = tables.graph.tensors[tensor].shape
        solution.slices[position, tensor] = Conversion(tables.leaves[position, tensor], Invariant(), target, shape)


def _add_view(tables: Tables, solution: Solution, tensor: int, seen: set[Boundary | CallPoint]) -> None:
    for operator in tables.view_boundaries(tensor):
        layout = solution.layouts[operator.outputs[0]]
        if operator.boundary is not None and operator.boundary not in seen and isinstance(layout, Shard):
            seen.add(operator.boundary)
            shape = tables.graph.tensors[operator.inputs[0]].shape
            solution.global_views.append(Conversion(operator.boundary, layout, layout, shape))
