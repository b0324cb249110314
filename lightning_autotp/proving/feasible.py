"""The cheapest plan that can be carried out: sizes in Python code can be made local, and the local trace agrees."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from typing import Any

from torch import nn

from lightning_autotp.layouts.plan import ParameterPlan, Plan, Reason, SizePlan
from lightning_autotp.layouts.types import Layout, Shard
from lightning_autotp.operators.graph import Graph, Operator
from lightning_autotp.parallel.implementations import IMPLEMENTATIONS
from lightning_autotp.proving.compare import Mismatch, VerificationError
from lightning_autotp.proving.experts import ShardableExperts, shardable_experts
from lightning_autotp.proving.local_sizes import Unlocalizable, find_sizes, in_any_layer, local_in
from lightning_autotp.proving.verify import trace
from lightning_autotp.solving.cost import Profile
from lightning_autotp.solving.expert_modules import with_whole_experts
from lightning_autotp.solving.few_layers import with_few_layers
from lightning_autotp.solving.memory_limit import least_stored, profiles, stored_bytes
from lightning_autotp.solving.options import PlanOptions
from lightning_autotp.solving.paths import Ambiguous, seen_paths
from lightning_autotp.solving.pins import kept_draws, pinned
from lightning_autotp.solving.plan_from_solution import explain, plan_from_solution, with_sizes
from lightning_autotp.solving.solution import Solution
from lightning_autotp.solving.solver import NothingToShard, solve

SEQUENCE_PARALLEL_PRICE = 8.0
"""All-reduces that an activation which is whole on every rank may cost where sequence parallelism is asked for: more
than sharding it costs beside what is communicated anyway."""


_Sizes = tuple[SizePlan, ...]


@dataclass(frozen=True)
class _Proof:
    """What came of tracing the local models of some layouts.

    Attributes:
        layouts: these.
        known: sizes that must be local in any case.
        proved: all sizes that must be, and the layouts as they are carried out; or why they cannot be.
    """

    layouts: Solution
    known: _Sizes
    proved: tuple[_Sizes, Solution] | Unlocalizable


@dataclass(frozen=True)
class Proofs:
    """Proofs of one model's layouts with one batch: a search that comes to the same layouts does not trace them again.

    Give the same one to searches that differ in prices: in tokens, in limits of memory. Of those that differ in a limit
    alone, what was solved for the one is not solved again.
    """

    _found: list[_Proof] = field(default_factory=list)
    _searches: list[tuple[Graph, int, PlanOptions, _Search]] = field(default_factory=list)

    def search(self, graph: Graph, ranks: int, options: PlanOptions, make: Callable[[], _Search]) -> _Search:
        """The search of this graph's plans with these options, which ``make`` gives if there was none."""
        for known, its_ranks, its_options, search in self._searches:
            if known is graph and (its_ranks, its_options) == (ranks, options):
                return search
        made = make()
        self._searches.append((graph, ranks, options, made))
        return made

    def of(
        self, layouts: Solution, known: _Sizes, prove: Callable[[], tuple[_Sizes, Solution]]
    ) -> tuple[_Sizes, Solution]:
        """What ``prove`` gives for these layouts: sizes that must be local, and the layouts that are carried out.

        Raises:
            Unlocalizable: if that does.
        """
        for one in self._found:
            if one.layouts.graph is layouts.graph and one.known == known and one.layouts == layouts:
                if isinstance(one.proved, Unlocalizable):
                    raise one.proved
                sizes, run = one.proved
                return sizes, replace(layouts, layouts=run.layouts, slices=run.slices, made_local=run.made_local)
        try:
            proved = prove()
        except Unlocalizable as error:
            self._found.append(_Proof(layouts, known, error))
            raise
        self._found.append(_Proof(layouts, known, proved))
        return proved


def feasible_plan(
    model: nn.Module, graph: Graph, inputs: Any, ranks: int, options: PlanOptions, proofs: Proofs | None = None
) -> tuple[Plan, Solution]:
    """The cheapest plan that can be carried out, and the solver's solution behind it.

    As the last one of :func:`feasible_plans`.
    """
    return _feasible(model, graph, inputs, ranks, options, proofs or Proofs(), are_all_wanted=False)[-1]


def feasible_plans(
    model: nn.Module, graph: Graph, inputs: Any, ranks: int, options: PlanOptions, proofs: Proofs | None = None
) -> list[tuple[Plan, Solution]]:
    """The cheapest plan that can be carried out with whole tokens and, if the options ask for it, with sharded ones.

    Each with the solver's solution behind it.

    Args:
        model: the model.
        graph: what it runs with ``inputs``, from :func:`~lightning_autotp.proving.verify.trace`.
        inputs: the batch that was traced.
        ranks: size of the tensor-parallel group.
        options: what the plan is made for.
        proofs: of searches before this one.

    Raises:
        NothingToShard: if no parameter can be divided.
        ValueError: if parameters cannot be cut as the options say, or there is no rank.
        VerificationError: if no plan can be carried out.
    """
    return _feasible(model, graph, inputs, ranks, options, proofs or Proofs(), are_all_wanted=True)


def _feasible(
    model: nn.Module,
    graph: Graph,
    inputs: Any,
    ranks: int,
    options: PlanOptions,
    proofs: Proofs,
    *,
    are_all_wanted: bool,
) -> list[tuple[Plan, Solution]]:
    if ranks < 1:
        raise ValueError(f"{ranks} tensor-parallel ranks: there must be one or more")
    while True:
        found = _carried_out(model, graph, inputs, ranks, options, proofs)
        try:
            for _, solution in found if are_all_wanted else found[-1:]:
                seen_paths(solution, 0)
        except Ambiguous as error:
            if not error.module:
                raise VerificationError(
                    f"{error}: it goes where values say, and which type a tensor has does not follow from its lines."
                    " Put what values decide into a module of its own, which is left whole then"
                ) from error
            kind = type(model.get_submodule(error.module))
            alike = {path for path, module in model.named_modules() if type(module) is kind}
            graph = trace(model, inputs, graph.opaque | alike, device=graph.device)
        else:
            return found


def _carried_out(
    model: nn.Module, graph: Graph, inputs: Any, ranks: int, options: PlanOptions, proofs: Proofs
) -> list[tuple[Plan, Solution]]:
    """As :func:`feasible_plans`; where values say which way code goes, its types may not follow from its lines."""
    found = shardable_experts(model, graph, ranks)
    whole = with_whole_experts(graph, found.sizes) if found.sizes else graph

    def search_with(profile: Profile) -> _Search:
        priced = replace(options, profile=profile, memory=None)

        def made() -> _Search:
            search = _Search(model, graph, inputs, ranks, priced, proofs)
            if not found.sizes:
                return search
            return _cheaper(search, _Search(model, whole, inputs, ranks, priced, proofs, found.sizes))

        return proofs.search(graph, ranks, priced, made)

    limit = options.limit
    sizes = (
        (parameter.numel() * parameter.element_size(), parameter.requires_grad) for parameter in model.parameters()
    )
    if limit is None or least_stored(sizes, ranks) > limit:
        search = search_with(options.hardware)
    else:
        searches = (search_with(profile) for profile in profiles(options.hardware))
        fitting = next((search for search in searches if search.stored() <= limit), None)
        search = fitting or search_with(options.hardware)
    plan, solution = search.with_whole_tokens()
    plans = [(_with_refused(plan, found), solution)]
    if options.sequence_parallel and ranks > 1:  # one rank has no other to share tokens with
        plans.append(search.with_sharded_tokens(*plans[0]))
    return [(_with_limit(plan, search, options), solution) for plan, solution in plans]


def _with_limit(plan: Plan, search: _Search, options: PlanOptions) -> Plan:
    """The plan, which says of a limit of memory what it takes of it."""
    if options.limit is None:
        return plan
    layouts = {parameter.names[0]: parameter.layout for parameter in plan.parameters}
    return replace(plan, memory_limit=int(options.limit), memory_needed=search.stored(layouts))


def _cheaper(divided: _Search, whole: _Search) -> _Search:
    """The search of the cheaper plans: experts are divided along their features, or distributed whole.

    All mixtures of a model are treated alike, so that few of its layers tell which is cheaper. Experts whose code
    cannot be traced cannot be divided; and a user may ask for one or the other, by pins.
    """
    names = {name for name in divided.pins if name.rpartition(".")[0] in whole.experts}
    if any(divided.pins[name] is None for name in names):
        return divided
    try:
        found = whole.of_few_layers.first
    except ValueError:  # pinned along another dim
        return divided
    uses = (use.implementation for use in found.uses.values())
    if sum(entry.is_module for entry in uses) < len(whole.of_few_layers.graph.experts):
        return divided
    if divided.graph.opaque - whole.graph.opaque or any(divided.pins[name] == 0 for name in names):
        return whole
    try:
        return whole if found.cost < divided.of_few_layers.first.cost else divided
    except NothingToShard:
        return whole


def _with_refused(plan: Plan, found: ShardableExperts) -> Plan:
    """The plan, which says of experts that are whole on every rank why they are not sharded."""

    def said(parameter: ParameterPlan) -> ParameterPlan:
        why = found.refused.get(parameter.names[0].rpartition(".")[0])
        if why is None or isinstance(parameter.layout, Shard) or len(parameter.shape) < 2:
            return parameter
        reason = Reason(0, parameter.shape[0], f"its experts cannot be sharded: {why}")
        return replace(parameter, reasons=(reason, *(known for known in parameter.reasons if known.dim != 0)))

    return replace(plan, parameters=tuple(map(said, plan.parameters)))


class _Search:
    """Plans of one model; those that cannot be carried out say what the next one must leave whole.

    Args:
        model: the model.
        graph: its graph.
        inputs: the batch that was traced.
        ranks: size of the tensor-parallel group.
        options: what the plan is made for.
        proofs: those so far.
        experts: modules that are one operator each in the graph, and sizes in their code that must be local.
    """

    def __init__(
        self,
        model: nn.Module,
        graph: Graph,
        inputs: Any,
        ranks: int,
        options: PlanOptions,
        proofs: Proofs,
        experts: Mapping[str, tuple[SizePlan, ...]] | None = None,
    ) -> None:
        self.model, self.graph, self.inputs, self.ranks, self.options = model, graph, inputs, ranks, options
        self.proofs = proofs
        self.experts = experts or {}
        names: dict[nn.Parameter, list[str]] = {}
        for name, parameter in model.named_parameters(remove_duplicate=False):
            names.setdefault(parameter, []).append(name)
        self.parameters = [(tuple(aliases), tuple(p.shape), p.element_size()) for p, aliases in names.items()]
        self.trained = {aliases[0] for parameter, aliases in names.items() if parameter.requires_grad}
        paths = [path for path, _ in model.named_modules()]
        self.pins = pinned(list(names.values()), options.keep_whole, options.cut, paths)
        self.blocked = kept_draws(graph, tuple(options.keep_whole))

    @cached_property
    def first(self) -> Solution:
        """The cheapest layouts, whether or not they can be carried out."""
        return self._solved(self.pins, self.options.hardware)

    @cached_property
    def of_few_layers(self) -> _Search:
        """The search of plans of a model with few of this one's layers."""
        graph = with_few_layers(self.graph, self.pins)
        if graph is self.graph:
            return self
        return _Search(self.model, graph, self.inputs, self.ranks, self.options, self.proofs, self.experts)

    def stored(self, layouts: Mapping[str, Layout] | None = None) -> int:
        """Bytes that the fullest rank stores with these layouts, by parameters' names; with the cheapest ones, else."""
        if layouts is None:
            found = self.first.layouts
            layouts = {name: found[at] for at, name in self.graph.parameters.items() if at in found}
        return stored_bytes(self.parameters, layouts, self.trained, self.ranks)

    def with_whole_tokens(self) -> tuple[Plan, Solution]:
        """The plan where every rank has all tokens. Where sizes cannot be made local, nothing is divided."""
        while True:
            solution = self._solved(self.pins, self.options.hardware) if self.blocked else self.first
            try:
                plan, solution = self._carried_out(solution)
                return explain(plan, solution), solution
            except Unlocalizable as error:
                mismatch = error.mismatch
                regions = regions_around(self.graph, mismatch.operator)
                found = next((found for found in regions if found - self.blocked.keys()), None)
                if found is None:
                    raise VerificationError(str(error)) from error
                positions = found - self.blocked.keys()
                self.blocked |= {at: _unlocalizable(self.graph.operators[at], mismatch) for at in positions}

    def with_sharded_tokens(self, plan: Plan, solution: Solution) -> tuple[Plan, Solution]:
        """The plan where each rank has a part of the tokens between sharded regions.

        Parameters stay cut as they are without: the memory of activations is not to be paid for with theirs. So most
        sizes that are local without are so here. Where sharded tokens cannot be carried out, because code asks how many
        there are, every rank has them all.

        Args:
            plan: the plan with whole tokens.
            solution: the solution behind it.
        """
        profile = self.options.hardware
        if self.options.sequence_parallel is True:
            profile = replace(profile, activation_price=SEQUENCE_PARALLEL_PRICE, all_reduce_passes=2.0)
        cuts = self.pins | {name: _cut(solution.layouts.get(at)) for at, name in self.graph.parameters.items()}
        unsharded: dict[int, str] = {}
        messages: dict[str, str] = {}
        while True:
            tried = self._solved(cuts, profile, sharded_on=solution, unsharded=unsharded)
            try:
                found, tried = self._carried_out(tried, local_in(plan.sizes, tried))
                break
            except Unlocalizable as error:
                mismatch = error.mismatch
                regions = (region & _with_sharded_tokens(tried) for region in _tensors_near(self.graph, mismatch))
                more = next((region for region in regions if region - unsharded.keys()), None)
                if more is None:
                    return replace(plan, whole_tokens=(str(mismatch),)), solution
                why = f"{mismatch.module or 'the model'}, whose code uses their number"
                unsharded |= dict.fromkeys(more, why)
                messages.setdefault(why, mismatch.message)
        if not found.shards_sequence:  # it may put off sums, as only plans with sharded tokens do
            failed = tuple(f"{why} ({message})" for why, message in messages.items())
            return replace(plan, whole_tokens=failed or ("sharding them costs more than it saves",)), solution
        reasons = {parameter.names: parameter.reasons for parameter in plan.parameters}
        parameters = tuple(replace(parameter, reasons=reasons[parameter.names]) for parameter in found.parameters)
        return replace(found, parameters=parameters, whole_tokens=tuple(messages)), tried

    def _solved(self, pins: Mapping[str, int | None], profile: Profile, **tokens_as: Any) -> Solution:
        tokens = self.options.tokens
        return solve(self.graph, self.ranks, IMPLEMENTATIONS, profile, self.blocked, tokens, pins, **tokens_as)

    def _carried_out(self, solution: Solution, sizes: _Sizes = ()) -> tuple[Plan, Solution]:
        """The plan with these layouts, for which these sizes are local."""
        written: list[tuple[Solution, Plan]] = []

        def plan_of(solution: Solution) -> Plan:
            if not written or written[-1][0] is not solution:
                name, options = type(self.model).__name__, self.options
                plan = plan_from_solution(
                    solution, name, self.parameters, traced_with=options.traced_with, device=options.device
                )
                written.append((solution, plan))
            return written[-1][1]

        of_experts = (size for sizes in self.experts.values() for size in sizes)
        known = tuple(dict.fromkeys((*of_experts, *sizes)))
        find = partial(find_sizes, self.model, self.inputs, solution, plan_of, known)
        sizes, carried_out = self.proofs.of(solution, known, find)
        return with_sizes(plan_of(carried_out), sizes, carried_out.graph), carried_out


def _cut(layout: Layout | None) -> int | None:
    """The dim along which a parameter is cut."""
    return layout.dims[0][0] if isinstance(layout, Shard) else None


def _unlocalizable(operator: Operator, mismatch: Mismatch) -> str:
    """Why nothing is sharded at an operator."""
    there = mismatch.operator
    place = "" if there is None or str(operator) == str(there) else f" ({there})"
    return f"a size in the Python code could not be made local{place}: {mismatch.message}"


def _with_sharded_tokens(solution: Solution) -> set[int]:
    """The tensors of which each rank has a part of the tokens."""
    return {at for at, layout in solution.layouts.items() if isinstance(layout, Shard) and layout.grows}


def _tensors_near(graph: Graph, mismatch: Mismatch) -> Iterator[set[int]]:
    """Tensors that may be why code went another way: those whose shapes it asks for; then those of growing regions.

    In all layers alike, so that not each of them is found for itself.
    """
    here = in_any_layer(mismatch.module)
    yield {at for path, measured in graph.measured.items() if in_any_layer(path) == here for at in measured}
    for positions in regions_around(graph, mismatch.operator):
        found = [graph.operators[position] for position in positions]
        yield {tensor for operator in found for tensor in (*operator.inputs, *operator.outputs)}
    yield set(range(len(graph.tensors)))


def regions_around(graph: Graph, operator: Operator | None) -> Iterator[frozenset[int]]:
    """Positions of operators, in growing regions: those that one line of code runs, its module's own, modules around.

    Modules with the same line are alike, and so each region takes them all. Where no operator is at fault that the
    graph has, the one region is everything.
    """
    alike = [
        (position, other)
        for position, other in enumerate(graph.operators)
        if operator is not None
        and (
            other is operator
            or (other.name == operator.name and other.boundary is None and other.source == operator.source != "")
        )
    ]
    if not alike:
        yield frozenset(range(len(graph.operators)))
        return
    yield frozenset(position for position, _ in alike)
    paths = {other.module for _, other in alike}
    yield frozenset(position for position, other in enumerate(graph.operators) if other.module in paths)
    while True:
        yield frozenset(
            position
            for position, other in enumerate(graph.operators)
            if any(other.module == path or other.module.startswith(f"{path}.") or not path for path in paths)
        )
        if paths == {""}:
            return
        paths = {path.rpartition(".")[0] for path in paths}
