"""The proof: a second capture, of the local model, must be the localized first one, operator by operator.

For every operator of the original graph the local one must have the same operator on the same tensors, with the same
scalar arguments, and every tensor must have the shape that its layout gives this rank; every conversion of the plan
must stand at its boundary, and nothing else may stand in between. A call that draws random numbers for a sharded
tensor, and no other, must draw the rank's own.
"""

from __future__ import annotations

import math
from collections.abc import Generator, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby, pairwise
from typing import Any

from lightning_autotp.layouts.ownership import Ownership
from lightning_autotp.layouts.places import Boundary, CallPoint
from lightning_autotp.layouts.transitions import TRANSITIONS
from lightning_autotp.layouts.types import Invariant, Layout, Shard, local_shape
from lightning_autotp.operators import record
from lightning_autotp.operators.declared import CalledFunction
from lightning_autotp.operators.graph import Graph, Operator, Ref, refs, renamed
from lightning_autotp.operators.registry import Record
from lightning_autotp.parameters.meta import ParameterMeta
from lightning_autotp.solving.implementations import DEFERRED_SUM, Use
from lightning_autotp.solving.solution import Conversion, Solution


class VerificationError(RuntimeError):
    """The local model does not compute what the original one does."""


@dataclass(frozen=True)
class Mismatch:
    """The first difference between the local trace and what it must be.

    Attributes:
        position: how many operators of the original agreed before it.
        operator: the original's operator there (or the local trace's, past the original's end), if it is one.
        message: what was expected and what was found.
    """

    position: int
    operator: Operator | None
    message: str

    @property
    def module(self) -> str:
        """Path of the module in which it is."""
        return self.operator.module if self.operator is not None else ""

    def __str__(self) -> str:
        if self.operator is None:
            return self.message
        return f"{self.message}\n  in module {self.module or '(root)'}\n  at {self.operator.source}"


@dataclass(frozen=True)
class Expected:
    """One operator the local trace must have next."""

    name: str
    arguments: tuple[tuple[str, Any], ...]
    outputs: tuple[tuple[Any, tuple[int, ...]], ...]
    origin: Operator
    free: frozenset[str] = frozenset()
    own_numbers: bool | None = False


def compare(local: Graph, solution: Solution, rank: int, wanted: Sequence[Expected] | None = None) -> Mismatch | None:
    """The first difference between ``rank``'s local graph and what the solution says it must be, or ``None``.

    Args:
        local: a trace of the local model.
        solution: the layouts.
        rank: whose.
        wanted: what :func:`localized` gives, where several traces are compared with it.
    """
    tensors: dict[Any, Any] = {}
    names = {name: tensor for tensor, name in local.parameters.items()}
    for tensor, name in solution.graph.parameters.items():
        if name not in names:
            return Mismatch(0, None, f"the local model does not use the parameter {name}")
        tensors[tensor] = names[name]
        if tensor not in solution.layouts:
            continue  # nothing in this call reads it
        shape = local_shape(solution.graph.tensors[tensor].shape, _layout(solution, tensor), rank)
        has = local.tensors[names[name]].shape
        if has != shape:
            return Mismatch(0, None, f"parameter {name} must have the local shape {list(shape)}, it has {list(has)}")
    tensors |= dict(zip(solution.graph.loose(), local.loose(), strict=False))
    repeated: dict[Any, _Repeated] = {}
    wanted = list(localized(solution, rank)) if wanted is None else wanted
    position = place = 0
    doubted: dict[int, Mismatch] = {}  # by places: what is left out there, or else is the operator that is at fault
    while position < len(wanted):
        expected = wanted[position]
        if not expected.name:  # a place at which nothing happens: the tensor goes on as it is
            (((_, (source,)),), ((target, _),)) = expected.arguments, expected.outputs
            tensors[target] = tensors[source.tensor]
            position += 1
            continue
        found = local.operators[place] if place < len(local.operators) else None
        difference = (
            f"the local trace ends here ({local.failure})"
            if found is None
            else _difference(expected, found, local, solution.graph, tensors, repeated)
        )
        if difference:
            end = _identity_chain(wanted, position, local, tensors)
            if end is not None:
                is_here = local.failed_at == expected.origin.source if found is None else found.name == expected.name
                if is_here:
                    doubted.setdefault(place, Mismatch(position, expected.origin, difference))
                position = end
            elif (left_out := _repeats(wanted, position, local, tensors)) is not None:
                key = ("repeated", left_out.result)
                tensors[left_out.result], repeated[key] = key, left_out
                position += len(_REPEATING)
            elif (added := _repeats(_as_found(local, place), 0, local)) is not None:
                repeated[added.result] = added
                place += len(_REPEATING)
            else:
                return doubted.get(place) or Mismatch(position, expected.origin, difference)
            continue
        position += 1
        place += 1
    if place < len(local.operators):
        extra = local.operators[place]
        return Mismatch(position, extra, f"the local trace has one more operator, {extra.name}")
    if [tensors.get(tensor) for tensor in solution.graph.outputs] != local.outputs:
        return Mismatch(position, None, "the local model returns other tensors")
    return None


def cut_differently(metas: Mapping[str, ParameterMeta], solution: Solution) -> Mismatch | None:
    """The first parameter that is not cut as the solution says (two cuts of one size look alike in a trace)."""
    for tensor, name in solution.graph.parameters.items():
        meta, layout = metas[name], _layout(solution, tensor)
        if meta.layout != layout:
            return Mismatch(
                0, None, f"parameter {name} must lie over the ranks as {layout!r}, it lies as {meta.layout!r}"
            )
    return None


def localized(solution: Solution, rank: int) -> Iterator[Expected]:
    """The operators of the original graph as this rank must run them, with the primitives in their places."""
    conversions = {change.boundary: change for change in solution.conversions}
    for crossing, members in groupby(enumerate(solution.graph.operators), key=lambda item: _crossing(item[1])):
        if crossing is not None:
            yield from _boundaries([operator for _, operator in members], conversions, solution, rank)
            continue
        for number, operator in members:
            shapes = _local_outputs(operator, solution, rank)
            use = solution.uses.get(number)
            if use is not None and use.implementation.sums:
                yield from _implemented(use, operator, shapes, solution)
            else:
                names = yield from _operands(number, operator, solution, rank)
                plain = _plain(operator, shapes, solution, rank)
                arguments = plain.arguments
                if names:
                    arguments = tuple((key, renamed(value, names)) for key, value in arguments)
                own_numbers = None if number in solution.not_drawing else operator.call in solution.drawing
                yield Expected(plain.name, arguments, plain.outputs, operator, plain.free, own_numbers)


def _operands(
    number: int, operator: Operator, solution: Solution, rank: int
) -> Generator[Expected, None, dict[int, tuple[str, int]]]:
    """The changes of the operator's static operands; returns the changed tensors by the static ones."""
    names: dict[int, tuple[str, int]] = {}
    for tensor in operator.inputs:
        change = solution.slices.get((number, tensor))
        if change is not None and tensor not in names:
            names[tensor] = ("changed", tensor)
            shape = local_shape(solution.graph.tensors[tensor].shape, change.target, rank)
            yield _conversion(change, Ref(tensor), (names[tensor], shape), operator)
    return names


def _conversion(change: Conversion, source: Any, output: tuple[Any, tuple[int, ...]], operator: Operator) -> Expected:
    name = f"record:{TRANSITIONS[change.pair].name}"
    return Expected(name, (("input", (source,)), ("detail", _maps(change.source, change.target))), (output,), operator)


def _maps(*layouts: Layout) -> str:
    """How the sharded dim is cut, as a primitive records it: two cuts of one size have equal shapes."""
    return "".join(owned.digest for layout in layouts if isinstance(layout, Shard) for _, owned in layout.dims)


def _crossing(operator: Operator) -> tuple[str, str] | None:
    """Equal for the boundaries that are crossed together: one module's inputs, or its outputs."""
    return None if operator.boundary is None else (operator.boundary.module, operator.boundary.side)


def _local_outputs(operator: Operator, solution: Solution, rank: int) -> tuple[tuple[Any, tuple[int, ...]], ...]:
    return tuple((tensor, _local_shape(solution, tensor, rank)) for tensor in operator.outputs)


def _local_shape(solution: Solution, tensor: int, rank: int) -> tuple[int, ...]:
    return local_shape(solution.graph.tensors[tensor].shape, _layout(solution, tensor), rank)


def _boundaries(
    crossed: list[Operator], conversions: Mapping[Any, Conversion], solution: Solution, rank: int
) -> Iterator[Expected]:
    """Tensors entering a module are marked, then converted; those leaving it are converted, then marked."""
    marks, changes = [], []
    if isinstance(crossed[0].boundary, CallPoint):
        for operator in crossed:  # a point without a conversion is nothing at all
            change = conversions.get(operator.boundary)
            before, target = Ref(operator.inputs[0]), operator.outputs[0]
            if change is None:
                yield Expected("", (("input", (before,)),), ((target, ()),), operator)
            else:
                yield _conversion(change, before, (target, _local_shape(solution, target, rank)), operator)
        return
    for operator in crossed:
        boundary, source, target = operator.boundary, operator.inputs[0], operator.outputs[0]
        conversion = conversions.get(boundary)
        entering, after = _local_shape(solution, source, rank), _local_shape(solution, target, rank)
        if not isinstance(boundary, Boundary) or conversion is None:
            marks.append(Expected("boundary", (("input", (Ref(source),)),), ((target, after),), operator))
            continue
        between = ("converted", target)
        if boundary.side == "in":
            marks.append(Expected("boundary", (("input", (Ref(source),)),), ((between, entering),), operator))
            changes.append(_conversion(conversion, between, (target, after), operator))
        else:
            changes.append(_conversion(conversion, Ref(source), (between, after), operator))
            marks.append(Expected("boundary", (("input", (between,)),), ((target, after),), operator))
    yield from [*marks, *changes] if crossed[0].boundary and crossed[0].boundary.side == "in" else [*changes, *marks]


def _implemented(use: Use, operator: Operator, shapes: Any, solution: Solution) -> Iterator[Expected]:
    """A parallel implementation: the operator or its primitive, what it does with the ranks' sum, its bias."""
    entry = use.implementation
    (target, shape) = shapes[0]
    added = dict(operator.arguments).get(entry.bias_operand) if entry.bias_operand else None
    total = ("total", target) if added else target
    change = None if use.output == DEFERRED_SUM else use.output
    result = ("partial", target) if change is not None else total
    if entry.primitive:
        reads = tuple(ref for name in entry.reads for ref in refs(operator.argument(name)))
        maps = _maps(_layout(solution, operator.argument(entry.operand).tensor))
        arguments: tuple[tuple[str, Any], ...] = (("input", reads), ("detail", maps))
        yield Expected(f"record:{entry.primitive}", arguments, ((result, shape),), operator)
    else:
        arguments = tuple((key, None if key == entry.bias_operand else value) for key, value in operator.arguments)
        yield Expected(operator.name, arguments, ((result, shape),), operator)
    if change is not None:
        yield Expected(f"record:{TRANSITIONS[change].name}", (("input", (result,)),), ((total, shape),), operator)
    if added:
        bias, dtype = solution.graph.tensors[added.tensor], solution.graph.tensors[target].dtype
        if use.output == DEFERRED_SUM:  # it counts once
            once, name = ("once", target), f"record:{TRANSITIONS['I', 'P'].name}"
            yield Expected(name, (("input", (added,)),), ((once, bias.shape),), operator)
            added = once
        if bias.dtype != dtype:  # under autocast
            cast = ("cast", target)
            yield Expected(
                "aten.to.dtype", (("self", added), ("dtype", f"torch.{dtype}")), ((cast, bias.shape),), operator
            )
            added = cast
        yield Expected(
            "aten.add.Tensor", (("self", total), ("other", added), ("alpha", 1)), ((target, shape),), operator
        )


def _plain(operator: Operator, shapes: Any, solution: Solution, rank: int) -> Expected:
    """The same operator; positions along a sharded dim are local, arguments that only spell shapes are free."""
    known = record(operator.name)
    if known is None:
        return Expected(operator.name, operator.arguments, shapes, operator)
    local: dict[str, Any] = {}
    shares: dict[str, int] = {}
    for name, tensor_name, dim_name in known.positions(operator):
        ref = operator.argument(tensor_name)
        layout = _layout(solution, ref.tensor)
        shape = solution.graph.tensors[ref.tensor].shape
        dim = operator.argument(dim_name) % len(shape)
        owned = layout.ownership(dim) if isinstance(layout, Shard) else None
        value = operator.argument(name)
        if owned is not None and value is not None:
            offset = min(value + shape[dim] if value < 0 else value, shape[dim])
            local[name] = sum(max(0, min(stop, offset) - start) for start, stop in owned.held[rank])
    for name, tensor_name, dim in known.shares:
        ref = operator.argument(tensor_name)
        layout = _layout(solution, ref.tensor)
        at = dim % len(solution.graph.tensors[ref.tensor].shape)
        owned = layout.ownership(at) if isinstance(layout, Shard) else None
        if owned is not None:
            shares[name] = operator.argument(name) * owned.local_size(rank) // owned.size
    reads = solution.indices(operator).items()
    functions = {name: _of_rank(operator.argument(name), owned, rank) for name, owned in reads}
    arguments = operator.arguments
    if shares or functions or local:
        arguments = tuple(
            (name, shares[name])
            if name in shares
            else (name, functions[name])
            if name in functions
            else (name, _Offset(local[name], dict(operator.arguments)[name]) if name in local else value)
            for name, value in operator.arguments
        )
    tensors = (*operator.inputs, *operator.outputs) if known.sizes else ()
    sharded = any(isinstance(_layout(solution, tensor), Shard) for tensor in tensors)
    return Expected(operator.name, arguments, shapes, operator, frozenset(known.sizes if sharded else ()))


def _of_rank(argument: Any, owned: Iterable[tuple[int, Ownership]], rank: int) -> tuple[Any, ...]:
    """A function that is given the whole model's indices where a kernel has this rank's."""
    called = CalledFunction.of(argument)
    assert called is not None
    runs = {place: ownership.held[rank] for place, ownership in owned}
    reads = tuple((place, runs.get(place, ())) for place, _ in called.reads)
    return replace(called, reads=reads).argument


@dataclass(frozen=True)
class _Offset:
    """A position along a sharded dim: the local one, or one past the end where the original is that, too."""

    local: int
    original: int

    def matches(self, found: Any, size: int) -> bool:
        if found is None or not isinstance(found, int):
            return found == self.original
        return min(found + size if found < 0 else found, size) == self.local


def _difference(
    expected: Expected,
    found: Operator,
    local: Graph,
    original: Graph,
    tensors: dict[Any, Any],
    repeated: Mapping[Any, _Repeated],
) -> str:
    """What is wrong with the operator found; empty if nothing is, and its outputs are then known."""
    if found.name != expected.name:
        return f"expected {expected.name}, found {found.name}"
    if found.boundary != (expected.origin.boundary if expected.name == "boundary" else None):
        return f"expected the boundary {expected.origin.boundary}, found {found.boundary}"
    rounding = expected.origin.rounding if expected.name == expected.origin.name else ""
    if found.rounding != rounding:
        return f"{expected.name}: it must round {rounding or 'nothing'}, it rounds {found.rounding or 'nothing'}"
    if expected.own_numbers is not None and found.own_numbers != expected.own_numbers:
        who = ("the group's common", "its own")
        return f"{expected.name}: the rank must draw {who[expected.own_numbers]} random numbers, it draws the others"
    theirs = dict(found.arguments)
    known = record(found.name)
    groups = {name: at for name, at, *_ in known.groups} if known is not None else {}
    operands = [_translated(value, tensors) for name, value in expected.arguments if name in groups]
    is_left_out = any(isinstance(ref, Ref) and not isinstance(ref.tensor, int) for ref in operands)
    for name, value in expected.arguments:
        if name in expected.free:
            continue
        if known is not None and name == known.groups_if:
            if not theirs.get(name) and _are_grouped(known, found, local, one_too=bool(value) or is_left_out):
                return f"{expected.name}: {name} must be set, it is {theirs.get(name)}"
            continue
        if isinstance(value, _Offset):
            size = local.tensors[found.inputs[0]].shape[theirs["dim"]]
            if not value.matches(theirs[name], size):
                return f"{expected.name}: {name} must be {value.local}, it is {theirs[name]}"
            continue
        wanted = _translated(value, tensors)
        if name in groups and isinstance(wanted, Ref):
            wanted, theirs[name] = (_once(ref, groups[name], repeated) for ref in (wanted, theirs[name]))
        if name not in theirs or not _same(theirs[name], wanted):
            return f"{expected.name}: {name} must be {_text(wanted)}, it is {_text(theirs.get(name))}"
    if len(found.outputs) != len(expected.outputs):
        return f"{expected.name} must have {len(expected.outputs)} outputs, it has {len(found.outputs)}"
    for (key, shape), tensor in zip(expected.outputs, found.outputs, strict=True):
        if local.tensors[tensor].shape != shape:
            return (
                f"{expected.name} must give the local shape {list(shape)}, it gives {list(local.tensors[tensor].shape)}"
            )
        if isinstance(key, int) and local.tensors[tensor].dtype != (dtype := original.tensors[key].dtype):
            return f"{expected.name} must give {dtype}, it gives {local.tensors[tensor].dtype}"
        tensors[key] = tensor
    return ""


def _translated(value: Any, tensors: dict[Any, Any]) -> Any:
    """An expected argument with the local trace's tensors."""
    if isinstance(value, Ref):
        return Ref(tensors[value.tensor])
    if isinstance(value, tuple) and len(value) == 2 and value in tensors:
        return Ref(tensors[value])
    if isinstance(value, tuple):
        return tuple(_translated(item, tensors) for item in value)
    return value


def _same(found: Any, wanted: Any) -> bool:
    return bool(found == wanted) and (isinstance(found, bool) == isinstance(wanted, bool))


def _text(value: Any) -> str:
    return "another tensor" if isinstance(value, Ref) else str(value)


def _identity_chain(wanted: Sequence[Expected], start: int, local: Graph, tensors: dict[Any, Any]) -> int | None:
    """Where a chain of reshaping operators ends that does nothing locally, and so may be left out there.

    Code that repeats key/value heads returns early where each is used once: unsqueeze, expand to no more elements, and
    reshape back to the shape before are the identity. ``None`` if there is no such chain.
    """
    first = wanted[start]
    source = first.origin.inputs[0] if first.origin.inputs else None
    if not isinstance(tensors.get(source), int) or not _reshapes(first):
        return None
    shape = local.tensors[tensors[source]].shape
    previous: Any = source
    for end in range(start, len(wanted)):
        link = wanted[end]
        if not _reshapes(link) or link.origin.inputs != (previous,):
            return None
        ((previous, now),) = link.outputs
        if math.prod(now) != math.prod(shape):
            return None
        if now == shape:
            tensors[previous] = tensors[source]
            return end + 1
    return None


@dataclass(frozen=True)
class _Repeated:
    """A tensor with every index of a dim several times in a row.

    Attributes:
        result: the tensor.
        source: the local trace's tensor that it repeats.
        dim: along which dim, counted from the end.
    """

    result: Any
    source: int
    dim: int


_REPEATING = ("aten.unsqueeze.default", "aten.expand.default", "aten.reshape.default")
"""What repeats a dim's indices: a new dim behind it, expanded, and made one with it."""


def _repeats(
    links: Sequence[Expected], start: int, local: Graph, tensors: Mapping[Any, Any] | None = None
) -> _Repeated | None:
    """What three operators repeat, if they do so: which code may leave out, or add, for a kernel that takes groups.

    transformers repeats key/value heads for FlexAttention where the number of heads is no power of two.

    Args:
        links: operators.
        start: the first one's place.
        local: the local trace.
        tensors: the local trace's tensors by those of the links, where they are others.
    """
    chain = links[start : start + len(_REPEATING)]
    if tuple(link.name for link in chain) != _REPEATING:
        return None
    source = chain[0].origin.inputs[0]
    tensor = source if tensors is None else tensors.get(source)
    if not isinstance(tensor, int) or any(
        link.origin.inputs != (before.outputs[0][0],) for before, link in pairwise(chain)
    ):
        return None
    shape = local.tensors[tensor].shape
    shapes = tuple(tuple(link.outputs[0][1]) for link in chain)
    for dim in range(len(shape)):
        *before, size = shape[: dim + 1]
        times, after = shapes[1][dim + 1], shape[dim + 1 :]
        if shapes == (
            (*before, size, 1, *after),
            (*before, size, times, *after),
            (*before, size * times, *after),
        ):
            return _Repeated(chain[-1].outputs[0][0], tensor, dim - len(shape))
    return None


def _as_found(local: Graph, place: int) -> list[Expected]:
    """The operators of the local trace from a place on that may repeat a dim's indices."""
    return [
        Expected(op.name, op.arguments, tuple((tensor, local.tensors[tensor].shape) for tensor in op.outputs), op)
        for op in local.operators[place : place + len(_REPEATING)]
    ]


def _once(ref: Any, dim: int, repeated: Mapping[Any, _Repeated]) -> Any:
    """An operand that an operator takes with groups along a dim as well: what is repeated along that dim, once."""
    known = repeated.get(ref.tensor) if isinstance(ref, Ref) else None
    return Ref(known.source) if known is not None and known.dim == dim else ref


def _are_grouped(known: Record, found: Operator, local: Graph, *, one_too: bool) -> bool:
    """Whether an operand has fewer indices than the dim that it groups; a single one may be broadcast instead."""
    for name, at, whole, dim in known.groups:
        size, of = (local.tensors[found.argument(key).tensor].shape[place] for key, place in ((name, at), (whole, dim)))
        if size != of and (one_too or size != 1):
            return True
    return False


def _reshapes(expected: Expected) -> bool:
    known = record(expected.name)
    return known is not None and known.reshapes


def _layout(solution: Solution, tensor: int) -> Layout:
    return solution.layouts.get(tensor, Invariant())
