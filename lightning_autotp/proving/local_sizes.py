"""Sizes written in Python: which integer attributes of which modules must become local.

A graph shows ``view(2, 61, -1, 64)`` whether the 61 came from a tensor's shape or from a constant, so only tracing the
local model tells which sizes adapt by themselves. Where the local trace first departs from what it must be, the few
integers of that module (or of its config) that equal a sharded dim's length are tried, then the numbers in the call
itself; a change is kept if the trace then agrees further. Only a trace that agrees to its end is accepted, and that is
the proof.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from functools import cached_property, partial
from itertools import combinations, product

from torch import nn

from lightning_autotp.applying.replace import BoundaryConversion, apply_plan, hook_boundary, reset_size, set_size
from lightning_autotp.capture.capture import ExampleCall, capture_local, meta_copy
from lightning_autotp.layouts.places import Boundary, CallSite
from lightning_autotp.layouts.plan import ConversionPlan, Plan, SizePlan
from lightning_autotp.layouts.types import Shard, local_shape
from lightning_autotp.operators import Shapes, record
from lightning_autotp.operators.graph import Operator
from lightning_autotp.proving.compare import Expected, Mismatch, compare, localized
from lightning_autotp.ranks.agreement import made_together
from lightning_autotp.ranks.group import TPGroup
from lightning_autotp.solving.plan_from_solution import runs_apart, with_sizes
from lightning_autotp.solving.solution import Solution

PROVING = "proving a new kind of call"
"""What ranks do together then."""

_PATIENCE = 64
"""Traces that come no further on their rank than one before, after which the search for sizes ends."""


class Unlocalizable(Exception):
    """No choice of sizes makes the local trace agree.

    Attributes:
        mismatch: where it departs.
    """

    def __init__(self, mismatch: Mismatch) -> None:
        super().__init__(str(mismatch))
        self.mismatch = mismatch


def find_sizes(
    model: nn.Module,
    example_inputs: object,
    solution: Solution,
    plan_of: Callable[[Solution], Plan],
    known: tuple[SizePlan, ...] = (),
) -> tuple[tuple[SizePlan, ...], Solution]:
    """Every size that must be local, proven on one rank of every kind, and the solution that is carried out with them.

    Args:
        model: the original model (it is copied).
        example_inputs: the batch that the solution's graph was captured with.
        solution: the layouts.
        plan_of: gives the plan for a solution, without sizes; it is asked again for the same one.
        known: sizes that must be local in any case.

    Raises:
        Unlocalizable: if no choice of sizes gives the right trace.
    """
    made: dict[int, tuple[Solution, tuple[SizePlan, ...], nn.Module]] = {}
    written: dict[int, tuple[Solution, list[Expected]]] = {}

    def local_model(solution: Solution, sizes: tuple[SizePlan, ...], rank: int) -> nn.Module:
        """A rank's local model: that of the last trial, if only other attributes are to be local."""
        of, before, local = made.get(rank, (None, (), model))
        earlier, now = set(before), set(sizes)
        if of is solution and all(size.call is None for size in earlier ^ now):
            for size in earlier - now:
                reset_size(local, size)
            for size in now - earlier:
                set_size(local, size, size.local[rank])
        else:
            local = meta_copy(model)
            plan = with_sizes(plan_of(solution), sizes, solution.graph)
            apply_plan(local, plan, TPGroup("", rank, solution.ranks))
        made[rank] = solution, sizes, local
        return local

    def differences(solution: Solution, sizes: tuple[SizePlan, ...], rank: int) -> dict[int, Mismatch | None]:
        found = capture_local(local_model(solution, sizes, rank), example_inputs, solution.graph)
        if rank not in written or written[rank][0] is not solution:
            written[rank] = solution, list(localized(solution, rank))
        return {rank: compare(found, solution, rank, written[rank][1])}

    search = _Search(model, solution, differences, in_calls=True)
    sizes = search.find(known, _representatives(solution))
    return sizes, search.solution


def find_sizes_of_call(
    model: nn.Module,
    calls: list[ExampleCall],
    plan: Plan,
    changes: Iterable[ConversionPlan],
    solution: Solution,
    group: TPGroup,
) -> tuple[tuple[SizePlan, ...], Solution]:
    """The attributes that must be local in another call than the one that a plan was made for, beside the plan's sizes.

    Collective: each rank traces its own local model, and all follow what all have found.

    Args:
        model: the original model, in the call's modes.
        calls: the call, after the one that it goes on with.
        plan: the plan.
        changes: those of layout, at modules' boundaries, that the call needs beside the plan's.
        solution: the layouts in this call.
        group: the ranks.

    Returns:
        These sizes, and the solution that is carried out with them, proved on every rank.

    Raises:
        Unlocalizable: if no choice of sizes gives the right trace.
    """
    runs = runs_apart(plan, solution.graph)

    def difference(solution: Solution, sizes: tuple[SizePlan, ...]) -> Mismatch | None:
        local = meta_copy(model)
        apply_plan(local, replace(plan, sizes=sizes, runs=(*plan.runs, *runs)), group)
        for change in reversed(tuple(changes)):
            # Before the hooks with which the model collects outputs, as in the traces; each before the one after it.
            hook_boundary(local, BoundaryConversion(change, group), prepend=True)
        found = capture_local(local, calls, solution.graph, training=False)
        return compare(found, solution, group.rank)

    def differences(solution: Solution, sizes: tuple[SizePlan, ...], _: int) -> dict[int, Mismatch | None]:
        found = made_together(group.process_group, PROVING, partial(difference, solution, sizes))
        return dict(enumerate(found))

    search = _Search(model, solution, differences, in_calls=False)
    sizes = search.find(plan.sizes, _representatives(solution))
    return sizes[len(plan.sizes) :], search.solution


def adapted(solution: Solution, mismatch: Mismatch) -> Solution | None:
    """The solution with a static tensor that is made local right away, where that is what its code does.

    A tensor whose values do not depend on the place along a dim (zeros; something expanded) may be made with the sizes
    of a sharded tensor: it is this rank's part already, and need not be sliced. ``None`` if that is not the case.
    """
    here = mismatch.operator
    if here is None or made_local(solution, here) is None:
        return None
    for operator in solution.graph.operators:
        if operator.name == here.name and operator.source == here.source:
            solution = made_local(solution, operator) or solution
    return solution


def made_local(solution: Solution, operator: Operator) -> Solution | None:
    """As :func:`adapted`, for one operator."""
    known = record(operator.name)
    if known is None or known.uniform is None:
        return None
    (tensor,) = operator.outputs
    slices = {place: change for place, change in solution.slices.items() if place[1] == tensor}
    targets = {change.target for change in slices.values()}
    readers = sum(tensor in other.inputs for other in solution.graph.operators)
    if len(targets) != 1 or len(slices) != readers:
        return None
    (target,) = targets
    if operator.call < 0 or not isinstance(target, Shard):
        return None
    shapes = Shapes(operator.arguments, operator.outputs, lambda index: solution.graph.tensors[index].shape)
    if not all(known.uniform(shapes, dim) for dim, _ in target.dims):
        return None
    return replace(
        solution,
        layouts=solution.layouts | {tensor: target},
        slices={place: change for place, change in solution.slices.items() if place not in slices},
        made_local=solution.made_local | {operator.call},
    )


_Lengths = dict[tuple[int, tuple[int, ...]], None]
"""Lengths of sharded dims, whole and on every rank, in order of appearance."""


def _sharded_lengths(operators: Iterable[Operator], solution: Solution, *, outputs_only: bool = False) -> _Lengths:
    """Of the dims that operators handle, by a solution."""
    found: _Lengths = {}
    for operator in operators:
        for tensor in (*operator.outputs, *(() if outputs_only else operator.inputs)):
            layout = solution.layouts.get(tensor)
            if isinstance(layout, Shard) and not layout.grows:  # a number of tokens is another in each batch
                for _, owned in layout.dims:
                    found.setdefault((owned.size, owned.local_sizes))
                    for number in _counts(operator):  # of groups, that divide the dim
                        if not any(number * size % owned.size for size in owned.local_sizes):
                            found.setdefault((number, tuple(number * n // owned.size for n in owned.local_sizes)))
    return found


def _lengths_by_module(solution: Solution, *, outputs_only: bool = False) -> dict[str, _Lengths]:
    by_module: dict[str, list[Operator]] = {}
    for operator in solution.graph.operators:
        by_module.setdefault(operator.module, []).append(operator)
    return {
        module: _sharded_lengths(operators, solution, outputs_only=outputs_only)
        for module, operators in by_module.items()
    }


def local_in(sizes: Iterable[SizePlan], solution: Solution) -> tuple[SizePlan, ...]:
    """Those of some other layouts' sizes that are lengths of sharded results of their modules in these layouts, too."""
    lengths = _lengths_by_module(solution, outputs_only=True)
    return tuple(size for size in sizes if (size.whole, size.local) in lengths.get(size.module, {}))


def _representatives(solution: Solution) -> list[int]:
    """One rank for every distinct set of local shapes."""
    tensors = solution.graph.tensors
    different = {(tensors[tensor].shape, id(layout)): layout for tensor, layout in solution.layouts.items()}
    kinds: dict[tuple[tuple[int, ...], ...], int] = {}
    for rank in range(solution.ranks):
        shapes = tuple(local_shape(shape, layout, rank) for (shape, _), layout in different.items())
        kinds.setdefault(shapes, rank)
    return list(kinds.values())


class _Search:
    """A search for sizes.

    Args:
        model: the original model.
        solution: the layouts.
        differences: where the local model of a rank, with these sizes, departs from a solution, and perhaps those of
            others.
        in_calls: whether numbers in the arguments of calls may be made local, and not only attributes.
    """

    def __init__(
        self,
        model: nn.Module,
        solution: Solution,
        differences: Callable[[Solution, tuple[SizePlan, ...], int], dict[int, Mismatch | None]],
        *,
        in_calls: bool,
    ) -> None:
        self.model, self.solution, self.differences, self.in_calls = model, solution, differences, in_calls
        self.traces: dict[tuple[tuple[SizePlan, ...], int], Mismatch | None] = {}
        self.dead_ends: set[tuple[int, int, str]] = set()
        self.deepest: dict[int, float] = {}
        self.idle = 0
        self.first = solution
        self.calls: dict[tuple[str, CallSite], list[Operator]] = {}
        for operator in solution.graph.operators:
            if operator.call >= 0:
                self.calls.setdefault((operator.module, solution.graph.calls[operator.call].site), []).append(operator)

    def find(self, sizes: tuple[SizePlan, ...], ranks: list[int]) -> tuple[SizePlan, ...]:
        """Depth-first search from ``sizes`` for sizes with which every rank's trace agrees to its end.

        A change that helps one rank may be the wrong one of two that look alike there (a length that falls from 2 to 1
        on it, but not on another): then the search goes back. Where another way leads to the same difference, no change
        helps either: code that counts tokens, or a plan that cannot be carried out, is not tried in every combination.
        """
        rank, *rest = ranks
        mismatch = self._trace(sizes, rank)
        while mismatch is not None and (better := adapted(self.solution, mismatch)) is not None:
            self._solve_by(better)
            mismatch = self._trace(sizes, rank)
        if mismatch is None:
            return self.find(sizes, rest) if rest else sizes
        here = rank, mismatch.position, mismatch.message
        deepest = Unlocalizable(mismatch)
        if here in self.dead_ends:
            raise deepest
        solution = self.solution
        for change in self._candidates(mismatch, sizes):
            if self.idle > _PATIENCE:
                break
            tried = (*sizes, *change)
            after = self._trace(tried, rank)
            if after is None or after.position > mismatch.position:
                try:
                    return self.find(tried, ranks)
                except Unlocalizable as error:
                    self._solve_by(solution)
                    deepest = error if error.mismatch.position > deepest.mismatch.position else deepest
        self.dead_ends.add(here)
        raise deepest

    def _solve_by(self, solution: Solution) -> None:
        if solution is not self.solution:
            self.solution, self.traces, self.dead_ends = solution, {}, set()

    def _trace(self, sizes: tuple[SizePlan, ...], rank: int) -> Mismatch | None:
        if (sizes, rank) not in self.traces:
            found = self.differences(self.solution, sizes, rank)
            self.traces.update({(sizes, other): difference for other, difference in found.items()})
            after = found[rank]
            reached = math.inf if after is None else after.position
            self.idle += 1
            if reached > self.deepest.get(rank, -1):
                self.deepest[rank], self.idle = reached, 0
        return self.traces[sizes, rank]

    @cached_property
    def lengths(self) -> dict[str, _Lengths]:
        """Those of every module's own operators, as the search begins."""
        return _lengths_by_module(self.first)

    def _lengths(self, operators: Iterable[Operator], *, outputs_only: bool = False) -> _Lengths:
        """By the present solution."""
        return _sharded_lengths(operators, self.solution, outputs_only=outputs_only)

    def _candidates(self, mismatch: Mismatch, sizes: tuple[SizePlan, ...]) -> Iterator[tuple[SizePlan, ...]]:
        """Integers of a module there that equal a sharded length in it, made local in every module like it.

        Each is tried alone, then all together: code may use a ratio of two of them, which changing only one would
        break.
        """
        yield from self._sections(mismatch, sizes)
        first = self._lengths([mismatch.operator] if mismatch.operator is not None else [])
        for path in _running(mismatch):
            changes: dict[str, tuple[SizePlan, ...]] = {}
            for whole, local in first | self.lengths.get(path, {}):
                for change in self._attributes(path, whole, local, sizes):
                    yield change
                    changes.setdefault(change[0].attribute, change)
            if len(changes) > 1:
                yield tuple(size for change in changes.values() for size in change)
        if self.in_calls:
            yield from self._literals(mismatch, sizes)

    def _sections(self, mismatch: Mismatch, sizes: tuple[SizePlan, ...]) -> Iterator[tuple[SizePlan, ...]]:
        """The lengths of all sections of a split together: with one of them alone they do not add up."""
        operator = mismatch.operator
        if operator is None or operator.call < 0 or len(operator.outputs) < 2:
            return
        numbers = self.solution.graph.calls[operator.call].arguments
        lengths = [length for length in self._lengths([operator], outputs_only=True) if length[0] in numbers]
        if len(lengths) < 2:
            return
        choices = []
        for whole, local in lengths:
            ways: list[tuple[SizePlan, ...]] = list(self._attributes(operator.module, whole, local, sizes))
            if self.in_calls:
                leaves = [str(leaf) for leaf, value in enumerate(numbers) if value == whole]
                together = (next(self._literal(operator, leaf, whole, local, sizes), ()) for leaf in leaves)
                ways.append(tuple(size for change in together for size in change))
            choices.append(ways)
        for chosen in product(*choices):
            yield tuple(size for change in chosen for size in change)

    def _attributes(
        self, path: str, whole: int, local: tuple[int, ...], sizes: tuple[SizePlan, ...]
    ) -> Iterator[tuple[SizePlan, ...]]:
        """Integers that a module reads, each by itself, made local in every module like it; then only those as large.

        Where stages of a model have other sizes, what is local in one of them is so in the others: in modules that have
        the same path but for its numbers.
        """
        taken = {(size.module, size.attribute) for size in sizes if size.call is None}
        for attribute in self._integers(path, whole):
            change = tuple(
                SizePlan(other, attribute, *length)
                for other in self._of_same_class(path)
                if (other, attribute) not in taken
                if (value := self.solution.graph.integers.get(other, {}).get(attribute)) is not None
                if (length := _length(self.lengths.get(other, {}), value, (whole, local))) is not None
            )
            alike = tuple(size for size in change if (size.whole, size.local) == (whole, local))
            staged = tuple(size for size in change if size in alike or in_any_layer(size.module) == in_any_layer(path))
            yield from (found for found in dict.fromkeys((staged, alike)) if found)

    def _literals(self, mismatch: Mismatch, sizes: tuple[SizePlan, ...]) -> Iterator[tuple[SizePlan, ...]]:
        """Numbers in the arguments of the call itself, made local in every module like it."""
        graph = self.solution.graph
        if mismatch.operator is None or mismatch.operator.call < 0:
            return
        # A number that must be local, or one that follows another tensor's part and must stay whole.
        lengths = self._lengths([mismatch.operator])
        for tensor in mismatch.operator.outputs:
            for size in {*graph.tensors[tensor].shape} - {*graph.example.lengths}:
                lengths.setdefault((size, (size,) * self.solution.ranks))
        changes: dict[int, list[tuple[SizePlan, ...]]] = {}
        for leaf, value in enumerate(graph.calls[mismatch.operator.call].arguments):
            for whole, local in lengths:
                if value == whole:
                    more = self._literal(mismatch.operator, str(leaf), whole, local, sizes)
                    changes.setdefault(leaf, []).extend(more)
        for several in changes.values():
            yield from several
        # Of two factors of a sharded dim, code may know the one, and compute the other from it and the local length.
        for one, other in combinations(changes.values(), 2):
            yield from ((*first, *second) for first, second in product(one, other))

    def _literal(
        self, operator: Operator, leaf: str, whole: int, local: tuple[int, ...], sizes: tuple[SizePlan, ...]
    ) -> Iterator[tuple[SizePlan, ...]]:
        """One argument of an operator's call, made local in every module like it; then only in more similar ones.

        Modules of one class may have other sizes, or be given other options: of two that split a dim, one knows how
        many parts there are, and the other how long each is.
        """
        call = self.solution.graph.calls[operator.call]
        graph = self.solution.graph
        if call.module in graph.branching | graph.varying:  # the number may be another in another run
            return
        taken = {(size.module, size.attribute, size.call) for size in sizes}
        is_whole = set(local) == {whole}
        change = tuple(
            SizePlan(other, leaf, *length, call.site)
            for other in self._of_same_class(call.module)
            if (other, leaf, call.site) not in taken
            if (length := self._length_there(other, call.site, int(leaf), (whole, local), is_whole)) is not None
        )
        alike = tuple(size for size in change if (size.whole, size.local) == (whole, local))
        name = in_any_layer(call.module)
        staged = tuple(size for size in change if size in alike or in_any_layer(size.module) == name)
        fewer = tuple(size for size in alike if in_any_layer(size.module) == name)
        yield from (found for found in dict.fromkeys((staged, alike, fewer)) if found)

    def _length_there(
        self, module: str, site: CallSite, leaf: int, length: tuple[int, tuple[int, ...]], is_whole: bool
    ) -> tuple[int, tuple[int, ...]] | None:
        """What a number in a module's call is, and must be on every rank; this ``length``, if it may be that."""
        graph, operators = self.solution.graph, self.calls.get((module, site), [])
        values = {value for op in operators for value in graph.calls[op.call].arguments[leaf : leaf + 1]}
        if len(values) != 1 or type(value := values.pop()) is not int:
            return None
        if is_whole:
            handled = any(value in graph.tensors[tensor].shape for op in operators for tensor in op.outputs)
            return (value, (value,) * self.solution.ranks) if handled else None
        return _length(self._lengths(operators), value, length)

    def _of_same_class(self, path: str) -> list[str]:
        """The paths of the modules of the same class as this one."""
        kind = type(self.model.get_submodule(path))
        return [name for name, module in self.model.named_modules() if type(module) is kind]

    def _integers(self, path: str, value: int) -> list[str]:
        """Integers with this value that the module reads in its forward: its own, and those of its config."""
        reads = self.solution.graph.integers.get(path, {})
        return [attribute for attribute, found in reads.items() if found == value]


def _counts(operator: Operator) -> Iterator[int]:
    """Numbers in an operator's arguments that count parts of a dim (groups): a rank's is its share of the whole."""
    known = record(operator.name)
    for name in () if known is None else (*known.sizes, *(count for count, *_ in known.shares)):
        number = dict(operator.arguments).get(name)
        if type(number) is int and number > 1:
            yield number


def _length(
    lengths: Iterable[tuple[int, tuple[int, ...]]], whole: int, known: tuple[int, tuple[int, ...]]
) -> tuple[int, tuple[int, ...]] | None:
    """The length with this whole size: the ``known`` one, or else the only one of them."""
    found = [length for length in lengths if length[0] == whole]
    return known if known in found else found[0] if len(found) == 1 else None


def in_any_layer(module: str) -> str:
    """A module's path without the numbers of layers."""
    return re.sub(r"\d+", "*", module)


def _running(mismatch: Mismatch) -> list[str]:
    """The modules whose code may be at fault: where a module should have been entered, also the one that calls it."""
    here = mismatch.operator
    calls = here is not None and isinstance(here.boundary, Boundary) and here.boundary.side == "in" and mismatch.module
    return [mismatch.module, mismatch.module.rpartition(".")[0]] if calls else [mismatch.module]
