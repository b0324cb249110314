"""What modules' code may do where values decide which way it goes: what a trace with synthetic values has seen of it.

A loop over a mixture's experts runs once for each expert that some token chooses, and skips the others. A trace shows
one way through such code. Every other way is the same computation on the ranks if each of its steps was seen in the
trace: the same line calls the same function on tensors of the same types, so the same layouts change there and its
result is of the type that it had there. Types of whole models follow step by step. This module lists these steps, and
:mod:`~lightning_autotp.applying.followed_code` compares the running code with them.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from lightning_autotp.layouts.types import Layout, Shard
from lightning_autotp.operators import record
from lightning_autotp.operators.graph import Constant, Graph, ModuleRun, Operator, Ref, TorchCall
from lightning_autotp.solving.solution import Solution

Line = tuple[str, int, str]
"""File, line and function of a call."""

STATIC, ZEROS = "static", "zeros"
"""Types of tensors that no parameter went into: any, and all zeros, which are parts of a sum of zeros as well."""

UNSEEN = "unseen"
"""Type of what a line that was not seen makes of static tensors: it may tell which way the code goes, nothing else."""


ANY = "any"
"""Type of tensors of which nothing is known."""


@dataclass(frozen=True)
class ShardType:
    """The type of a tensor of which each rank has a part.

    Attributes:
        dims: each sharded dim, how it is cut, and this rank's length of it, where no batch changes that.
        of: what it is a part of, where that is one parameter.
    """

    dims: tuple[tuple[int, str, int | None], ...]
    of: Any = field(default=None, compare=False)

    def __str__(self) -> str:
        return f"S({', '.join(str(dim) for dim, *_ in self.dims)})"

    def behind(self, more: int) -> ShardType:
        """The type of such a part behind so many more dims."""
        return replace(self, dims=tuple((dim + more, cut, length) for dim, cut, length in self.dims))


Type = str | ShardType
"""``I``, ``R``, ``P``, a part, or one of tensors that no parameter went into."""

Given = tuple[frozenset[Type], ...]
"""For each argument of a call, the types of the tensors in it that are not static."""


@dataclass(frozen=True)
class Outcome:
    """What a call gives.

    Attributes:
        results: the types of the tensors that it returns; a single one, where they are all of it.
        written: leaves of its arguments that it writes in place, and their types after that.
    """

    results: tuple[Type, ...]
    written: tuple[tuple[int, Type], ...]


@dataclass(frozen=True)
class ModuleTypes:
    """One way in which a module is called.

    Attributes:
        given: by place, the types of the tensors that it is given, outside of it; not of those that are static.
        inside: by place, the types that these have inside of it.
        left: by place, the types of the tensors that it returns, inside of it; not of those that are static.
        returned: by place, the types that these have outside of it.
    """

    given: tuple[tuple[str, Type], ...]
    inside: tuple[tuple[str, Type], ...]
    left: tuple[tuple[str, Type], ...]
    returned: tuple[tuple[str, Type], ...]


@dataclass
class SeenPath:
    """What has been seen of one module's own code.

    Attributes:
        calls: by line, and by the types that are given, what calls give.
        runs: the ways in which it is called.
        constants: the numbers, texts and flags with which it is called, where its code goes the same way with them.
    """

    calls: dict[Line, dict[Given, Outcome]] = field(default_factory=dict)
    runs: dict[tuple[tuple[str, Type], ...], ModuleTypes] = field(default_factory=dict)
    constants: set[tuple[tuple[str, Constant], ...]] = field(default_factory=set)

    def join(self, other: SeenPath) -> str:
        """Add what was seen elsewhere; returns the line at which the two contradict each other, if they do."""
        for line, found in other.calls.items():
            mine = self.calls.setdefault(line, {})
            for given, outcome in found.items():
                if mine.setdefault(given, outcome) != outcome:
                    return said_line(line)
        for run in other.runs.values():
            if not self.add(run):
                return "its entry"
        self.constants |= other.constants
        return ""

    def add(self, run: ModuleTypes) -> bool:
        """Add a way in which the module is called; whether it agrees with one that is given the same types.

        Beside these it may be given other tensors that no parameter went into.
        """
        same = self.runs.setdefault(run.given, run)
        inside, returned = dict(run.inside), dict(run.returned)
        left, before = dict(run.left), dict(same.left)
        self.runs[run.given] = replace(
            same,
            inside=tuple({**inside, **dict(same.inside)}.items()),
            left=tuple({**left, **before}.items()),
            returned=tuple({**returned, **dict(same.returned), **dict(without_static(run.returned))}.items()),
        )
        return (
            all(inside.get(at, kind) == kind for at, kind in same.inside)
            and all(_may_be_one(before.get(at, STATIC), left.get(at, STATIC)) for at in {**left, **before})
            and all(_may_be_one(returned.get(at, kind), kind) for at, kind in same.returned)
        )


def _may_be_one(kind: Type, other: Type) -> bool:
    """Whether a tensor may be of these types in turn: one that no parameter went into is whole, and has no gradient."""
    return kind == other or (STATIC in (kind, other) and {kind, other} <= {STATIC, "I", "R"})


class Ambiguous(Exception):
    """Code gives tensors of different types at the same line, for operands of the same types.

    Attributes:
        module: path of the outermost module whose code goes where values say, and which has that code.
    """

    def __init__(self, module: str, line: str) -> None:
        super().__init__(f"{module or 'the model'}: {line} gives tensors of different types for operands of the same")
        self.module = module


def said_line(line: Line) -> str:
    """A line in words."""
    file, number, function = line
    return f"{function} at {file}:{number}"


def fits(found: frozenset[Type], wanted: frozenset[Type]) -> bool:
    """Whether an argument with tensors of these types may stand where others were seen."""
    rest = found - wanted
    if rest and rest != {ZEROS}:
        return False
    return bool(rest) or all(kind in found or kind in ("I", "R") for kind in wanted)


def is_part(kind: Type) -> bool:
    """Whether a rank has a part of such a tensor, or of its sum."""
    return isinstance(kind, ShardType) or kind == "P"


def agree(found: frozenset[Type], wanted: frozenset[Type]) -> bool:
    """Whether an argument has parts of tensors, and sums, of the types with which it was seen, as far as is known."""
    if ANY in wanted:
        return True
    ours, theirs = frozenset(filter(is_part, found)), frozenset(filter(is_part, wanted))
    return ours <= theirs if ANY in found or ZEROS in found else ours == theirs


def all_agree(found: Mapping[str, Type], wanted: Mapping[str, Type]) -> bool:
    """Whether tensors of these types agree with those that were seen, by place, as far as is known."""
    return all(agree(frozenset([kind]), frozenset([wanted.get(place, STATIC)])) for place, kind in found.items())


def all_fit(found: Mapping[str, Type], wanted: Mapping[str, Type]) -> bool:
    """Whether tensors of these types may be where others were seen, by place."""
    nothing = frozenset[Type]()
    return found.keys() <= wanted.keys() and all(
        fits(frozenset([found[place]]) if place in found else nothing, frozenset([kind]))
        for place, kind in wanted.items()
    )


def seen_paths(solution: Solution, rank: int) -> dict[str, SeenPath]:
    """What was seen of every module's code that goes where values say and in which something is not whole.

    Args:
        solution: the layouts of the traced graph.
        rank: whose parts are meant.

    Raises:
        Ambiguous: if types do not follow from the lines of the code and the types before.
    """
    graph = solution.graph
    types = _Types(graph, solution.layouts, rank)
    seen = {path: SeenPath() for path in graph.branching}
    tops = _outermost(graph)
    for call in (*graph.calls, *graph.inspections):  # also calls on whose operators no result depends
        if call.module not in graph.branching:
            continue
        line = (call.site.file, call.site.line, call.site.function)
        outcome = types.outcome(call)
        if seen[call.module].calls.setdefault(line, {}).setdefault(types.given(call), outcome) != outcome:
            raise Ambiguous(next(top for top in tops if _is_in(call.module, top)), said_line(line))
    for run in graph.runs:
        if run.module not in graph.branching:
            continue
        found = types.run(run)
        if not seen[run.module].add(found):
            where = run.module or "the model"
            raise Ambiguous(next(top for top in tops if _is_in(run.module, top)), f"the code of {where}")
        if run.module not in graph.value_dependent:
            seen[run.module].constants.add(run.constants)
    divided = {top for top in tops if any(not _is_whole(path) for at, path in seen.items() if _is_in(at, top))}
    return {path: found for path, found in seen.items() if any(_is_in(path, top) for top in divided)}


def add_paths(seen: dict[str, SeenPath], graph: Graph, layouts: Mapping[int, Layout], rank: int) -> None:
    """Add what a trace shows of all modules' code, whether it goes where values say or not.

    Where tensors of different types are made at the same line of operands of the same, the type is :data:`ANY`.

    Args:
        seen: what other traces have shown, by module.
        graph: the trace.
        layouts: of its tensors; one that depends on a parameter and has none is of :data:`ANY` type.
        rank: whose parts are meant.
    """
    types = _Types(graph, layouts, rank, unknown=ANY)
    for run in graph.runs:
        if run.module not in graph.opaque:
            found = types.run(run)
            runs = seen.setdefault(run.module, SeenPath()).runs
            runs[found.given] = _in_common(runs.get(found.given, found), found)
    for call in (*graph.calls, *graph.inspections):
        if call.module in seen:
            calls = seen[call.module].calls.setdefault((call.site.file, call.site.line, call.site.function), {})
            given, outcome = types.given(call), types.outcome(call)
            if calls.setdefault(given, outcome) != outcome:
                calls[given] = Outcome((ANY,), tuple((leaf, ANY) for leaf, _ in outcome.written))


def _in_common(one: ModuleTypes, other: ModuleTypes) -> ModuleTypes:
    """What holds for two runs that are given the same types: where they differ, the type is :data:`ANY`."""

    def common(here: tuple[tuple[str, Type], ...], there: tuple[tuple[str, Type], ...]) -> tuple[tuple[str, Type], ...]:
        left, right = dict(here), dict(there)
        places = dict.fromkeys((*left, *right))
        return tuple((at, left[at] if at in left and left[at] == right.get(at) else ANY) for at in places)

    return ModuleTypes(
        one.given, common(one.inside, other.inside), common(one.left, other.left), common(one.returned, other.returned)
    )


def _outermost(graph: Graph) -> list[str]:
    tops: list[str] = []
    for path in sorted(graph.branching):
        if not any(_is_in(path, top) for top in tops):
            tops.append(path)
    return tops


def _is_in(path: str, top: str) -> bool:
    return not top or path == top or path.startswith(f"{top}.")


def _is_whole(path: SeenPath) -> bool:
    """Whether all tensors are whole, so that it does not matter which way the code goes."""
    whole = {"I", STATIC, ZEROS}
    of_calls = (
        {*outcome.results, *(kind for _, kind in outcome.written), *(kind for group in given for kind in group)}
        for found in path.calls.values()
        for given, outcome in found.items()
    )
    of_runs = ({kind for _, kind in (*run.given, *run.inside, *run.left, *run.returned)} for run in path.runs.values())
    return all(types <= whole for types in (*of_calls, *of_runs))


_EXPAND = "aten.expand"


class _Types:
    """The types of a graph's tensors on one rank."""

    def __init__(self, graph: Graph, layouts: Mapping[int, Layout], rank: int, unknown: Type = STATIC) -> None:
        self.graph, self.layouts, self.rank, self.unknown = graph, layouts, rank, unknown
        self.producers = self.graph.producers()

    def of(self, tensor: int) -> Type:
        layout = self.layouts.get(tensor)
        if layout is not None:
            is_known = self.unknown != ANY or not isinstance(layout, Shard) or not self._is_repeated(tensor)
            return type_of(layout, self.rank) if is_known else ANY
        if self._is_zero(tensor):
            return ZEROS
        return STATIC if self.graph.tensors[tensor].is_static else self.unknown

    def _is_repeated(self, tensor: int) -> bool:
        """Whether this is a view of a tensor with its elements repeated.

        A rank that repeats nothing, as its part of the repetitions is one, may leave the line out (``repeat_kv``).
        """
        maker = self.producers.get(tensor)
        known = record(maker.name) if maker is not None else None
        if maker is None or known is None or not known.is_view or not maker.inputs:
            return False
        return maker.name.startswith(_EXPAND) or self._is_repeated(maker.inputs[0])

    def _is_zero(self, tensor: int) -> bool:
        maker: Operator | None = self.producers.get(tensor)
        known = record(maker.name) if maker is not None else None
        if maker is None or known is None:
            return False
        return known.zeros or (known.is_view and bool(maker.inputs) and self._is_zero(maker.inputs[0]))

    def given(self, call: TorchCall) -> Given:
        groups: list[set[Type]] = [set() for _ in range(max(call.groups, default=-1) + 1)]
        for group, value in zip(call.groups, call.arguments, strict=True):
            if isinstance(value, Ref):
                groups[group].add(self.of(value.tensor))
        return tuple(frozenset(group - {STATIC}) for group in groups)

    def outcome(self, call: TorchCall) -> Outcome:
        results = tuple(self.of(value.tensor) for value in call.made) or (STATIC,)
        results = results[:1] if len(set(results)) == 1 else results
        return Outcome(results, tuple((leaf, self.of(ref.tensor)) for leaf, ref in call.written))

    def run(self, run: ModuleRun) -> ModuleTypes:
        return ModuleTypes(
            without_static((place, self.of(outside)) for place, outside, _ in run.inputs),
            tuple((place, self.of(inside)) for place, _, inside in run.inputs),
            without_static((place, self.of(inside)) for place, inside, _ in run.outputs),
            tuple((place, self.of(outside)) for place, _, outside in run.outputs),
        )


def without_static(types: Iterable[tuple[str, Type]]) -> tuple[tuple[str, Type], ...]:
    """The types of those tensors that are not static, by place."""
    return tuple((place, kind) for place, kind in types if kind != STATIC)


def type_of(layout: Layout, rank: int) -> Type:
    """The type of a tensor with this layout."""
    if not isinstance(layout, Shard):
        return layout.letter
    fixed = {dim: cut.is_fixed for (dim, _), cut in zip(layout.dims, layout.cuts, strict=False)}
    return ShardType(
        tuple(
            (dim, owned.digest, owned.local_size(rank) if fixed.get(dim, True) else None) for dim, owned in layout.dims
        )
    )
