"""Layouts of least cost for every tensor of a graph.

The :mod:`~lightning_autotp.solving.tables` of what every operator may run at are minimised by
:mod:`~lightning_autotp.solving.elimination`, exactly or with a bound on what a better solution could save.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping

from lightning_autotp.layouts.names import join_names
from lightning_autotp.layouts.places import Boundary, CallPoint
from lightning_autotp.layouts.plan import Plan
from lightning_autotp.layouts.step_size import TokensPerStep
from lightning_autotp.layouts.types import Layout
from lightning_autotp.operators.graph import Graph
from lightning_autotp.solving.candidates import candidates
from lightning_autotp.solving.cost import Profile
from lightning_autotp.solving.elimination import MOST_SECONDS, Elimination, NoAssignment
from lightning_autotp.solving.implementations import Implementations
from lightning_autotp.solving.integer_program import NotFoundInTime
from lightning_autotp.solving.planned import Kind, PlanMismatch
from lightning_autotp.solving.reasons import Reasons
from lightning_autotp.solving.solution import Solution, read_solution
from lightning_autotp.solving.tables import Tables
from lightning_autotp.solving.whole_work import whole_work


class NothingToShard(RuntimeError):
    """No tensor of the model can be divided among so many ranks."""


def solve(
    graph: Graph,
    ranks: int,
    implementations: Implementations,
    profile: Profile | None = None,
    blocked: Mapping[int, str] | None = None,
    tokens: TokensPerStep | None = None,
    pinned: Mapping[str, int | None] | None = None,
    plan: Plan | None = None,
    sharded_on: Solution | None = None,
    unsharded: Collection[int] = (),
    is_other_call: bool = False,
    fixed: Collection[Boundary | CallPoint] = (),
) -> Solution:
    """Find the layouts of least cost.

    Args:
        graph: the captured model.
        ranks: size of the tensor-parallel group.
        implementations: what operators may run as, besides themselves.
        profile: the hardware; a default one is used otherwise.
        blocked: positions of operators at which nothing may be sharded, and why.
        tokens: the step to price for.
        pinned: parameters, by name, that are to be cut along this dim, or, with ``None``, to be left whole.
        plan: a plan to be followed: then the layouts are those that it means.
        sharded_on: a solution with whole tokens: activations are divided as there, or their tokens are sharded.
        unsharded: tensors whose tokens may not be.
        is_other_call: whether the graph is of another call than the one that the plan was made for: it may leave out
            places of the plan, and change layouts at boundaries of modules where the plan changes none.
        fixed: places where no layout may change.

    Raises:
        NothingToShard: if no parameter can be divided.
        ValueError: if a parameter cannot be as it is pinned.
        PlanMismatch: if the operators' rules do not allow what the plan says.
        RuntimeError: if too many layouts hang together, and no solution was found in the time for them.
    """
    shard_sequence = sharded_on is not None or (plan is not None and plan.shards_sequence)
    tables = Tables(graph, ranks, implementations, profile or Profile(), blocked or {}, tokens, shard_sequence)
    if sharded_on is not None:
        tables.shard_tokens_beside(sharded_on.kinds, unsharded)
    if plan is not None:
        tables.follow(plan, is_other_call)
    tables.fixed |= set(fixed)
    bound = 0.0
    kept: dict[int, Kind] = {}
    while True:
        solution = _solve_once(tables, pinned or {}, kept)
        bound = bound or solution.bound  # the first's: that of the problem without anything fixed
        varying = _converted_differently(solution)
        if not varying:
            solution.bound = min(bound, solution.cost)
            return solution
        whole = {} if sharded_on is None else sharded_on.kinds
        there = tables.passing(varying) & whole.keys() - kept.keys()
        if there:  # as with whole tokens, which is the same each time
            kept |= {tensor: whole[tensor] for tensor in there}
        else:  # which may cost more than a conversion that is the same each time: the bound says so
            tables.fixed |= varying


def price(
    solution: Solution,
    tokens: TokensPerStep,
    implementations: Implementations,
    profile: Profile | None = None,
    blocked: Mapping[int, str] | None = None,
) -> float:
    """What the layouts of a solution cost at a step of another size, in seconds."""
    return Tables(solution.graph, solution.ranks, implementations, profile or Profile(), blocked or {}, tokens).price(
        solution.kinds
    )


def _solve_once(tables: Tables, pinned: Mapping[str, int | None], kept: Mapping[int, Kind]) -> Solution:
    is_divisible = any(tables.touching[tensor] for tensor in tables.graph.parameters if tensor in tables.touching)
    if not is_divisible and tables.planned is None:  # a plan may leave everything whole
        raise NothingToShard(_nothing(tables))
    problem, domains = tables.problem()
    for tensor, allowed in _pinned(tables, pinned, problem, domains):
        problem.add((tensor,), {(code,): 0.0 for code in allowed})
    for tensor, kind in kept.items():
        if tensor in domains:
            problem.add((tables.first.get(tensor, tensor),), {(domains[tensor].index(kind),): 0.0})
    try:
        found = problem.solve()
    except NotFoundInTime as error:
        raise RuntimeError(
            f"no plan was found within {MOST_SECONDS:.0f} s: too many layouts of this model hang together. Leave"
            " modules whole that need not be divided: keep_whole=[...]"
        ) from error
    except NoAssignment as error:
        if tables.planned is not None:
            raise PlanMismatch(_not_as_planned(tables, error.variable)) from error
        if pinned:
            reasons = Reasons(tables, problem, domains, pinned)
            for name, dim in pinned.items():
                if dim is not None and (obstacle := reasons.obstacle(name, dim)) is not None:
                    raise ValueError(_impossible(name, dim, obstacle)) from error
            raise ValueError(
                f"keep_whole= and cut= cannot all be followed, the operators between these parameters do not allow"
                f" it: {_listed(pinned)}"
            ) from error
        producer = tables.producer.get(error.variable)
        where = producer.operator.source if producer else "a parameter"
        raise RuntimeError(f"no layout satisfies every operator around {where}; please report this model") from error
    kinds = {tensor: domains[tensor][code] for tensor, code in found.values.items()}
    solution = read_solution(tables, kinds | {later: kinds[tensor] for later, tensor in tables.first.items()}, found)
    if tables.planned is None:
        solution.reasons = Reasons(tables, problem, domains, pinned, found.cost)
        solution.divided_work, solution.whole_work = whole_work(tables, solution.layouts)
    return solution


def _pinned(
    tables: Tables, pinned: Mapping[str, int | None], problem: Elimination, domains: Mapping[int, tuple[Kind, ...]]
) -> Iterator[tuple[int, list[int]]]:
    """The codes of the kinds that a user allows pinned parameters."""
    tensors = {name: tensor for tensor, name in tables.graph.parameters.items()}
    for name, dim in pinned.items():
        tensor = tensors.get(name, -1)
        allowed = [code for code, kind in enumerate(domains.get(tensor, ())) if tables.cut(tensor, kind) == dim]
        if allowed:
            yield tensor, allowed
        elif dim is not None:
            raise ValueError(_impossible(name, dim, Reasons(tables, problem, domains, pinned).obstacle(name, dim)))


def _not_as_planned(tables: Tables, tensor: int) -> str:
    """Where the operators' rules contradict the plan that is followed."""
    nearby = [relation.operator for relation in tables.relations if tensor in (*relation.inputs, *relation.outputs)]
    places = [str(operator) for operator in nearby if operator.boundary is None]
    where = " and ".join(dict.fromkeys(places)) or str(nearby[0].boundary if nearby else "a parameter")
    return f"the plan gives layouts that do not go together: no types of its operands let {where} run as planned"


def _nothing(tables: Tables) -> str:
    dims = [tables.dims[tensor] for tensor in tables.graph.parameters if tensor in tables.dims]
    most = next((ranks for ranks in range(tables.ranks - 1, 1, -1) if candidates(dims, ranks)), None)
    if most is not None:
        what = f"but among {most} or fewer: use tensor_parallel_size={most}, or less"
    elif dims:
        what = "or fewer: its operators leave no dim of its parameters to be divided. Use tensor_parallel_size=1"
    else:
        what = "or fewer: its forward uses no parameters. Use tensor_parallel_size=1"
    return f"nothing in this model can be divided among {tables.ranks} ranks, {what}"


def _converted_differently(solution: Solution) -> set[Boundary | CallPoint]:
    """Places that are passed several times, and not with the same conversion each time."""
    seen: dict[Boundary | CallPoint, set[tuple[Layout, Layout] | None]] = {}
    for operator in solution.graph.operators:
        if operator.boundary is not None and solution.layouts.keys() >= {operator.inputs[0], operator.outputs[0]}:
            pair = (solution.layouts[operator.inputs[0]], solution.layouts[operator.outputs[0]])
            seen.setdefault(operator.boundary, set()).add(pair if pair[0] != pair[1] else None)
    return {place for place, pairs in seen.items() if len(pairs) > 1}


def _impossible(name: str, dim: int, obstacle: object) -> str:
    return f"{name} cannot be cut along dim {dim}: {obstacle}"


def _listed(pinned: Mapping[str, int | None]) -> str:
    shown = [f"{name} {'whole' if dim is None else f'along dim {dim}'}" for name, dim in pinned.items()]
    return join_names(shown)
