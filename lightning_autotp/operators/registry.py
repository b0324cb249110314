"""One record for every operator: all that the package knows of it, declared in one place.

Capture reads what an operator computes, the axes how it ties dims together, the solver its FLOPs, the proof which of
its arguments are local on a rank. An operator without a record is never treated wrongly: every dim of it stays whole,
so nothing sharded may reach it.
"""

from __future__ import annotations

import sys
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import Any, Literal, TypeVar

from lightning_autotp.layouts.dims import ONE
from lightning_autotp.operators.axes import Axes
from lightning_autotp.operators.graph import ASKED, MAPPED, OPAQUE, Graph, Operator, refs
from lightning_autotp.operators.shapes import Shape, Shapes
from lightning_autotp.operators.site import Dims, Relation, Result, Rule, Site, fresh_dims


@dataclass(frozen=True)
class Record:
    """What is known of one operator.

    Attributes:
        name: its full name, such as ``aten.view.default``.
        place: file and line of its declaration.
        rule: how its dims are tied together; without one every dim stays whole.
        flops: floating-point operations of its forward, if it is a product: 2 for each multiplication and addition. In
            products and sums of sizes, which may be fractions.
        touched: how many elements its forward moves through memory, if these are not its inputs and its results.
        is_view: whether its result shares its input's memory, so that it moves nothing.
        is_elementwise: whether its result at an index follows from its tensors there alone, with broadcasting.
        is_by_choice: whether values decide how much of its work falls to which index of a cut dim, so that the ranks'
            shares are unequal.
        results: the shape and the dtype of each of its results (empty for its first input's), where PyTorch's own
            shape function refuses arguments that the kernel takes, or there is none.
        sizes: arguments that only spell the outputs' shapes; they are local wherever the shapes are.
        offsets: ``(argument, tensor argument, dim argument)``: positions along a dim; local wherever the dim is.
        shares: ``(argument, tensor argument, dim)``: counts that shrink with a dim: a rank's count is the same share
            of the whole count as its part is of that dim.
        indices: ``(argument, place, tensor argument, dim)``: functions among its arguments that it calls with an index
            of that dim at that place: a rank's index is turned into the whole model's.
        groups: ``(argument, dim, whole argument, dim)``: operands each of whose indices along a dim may serve several
            consecutive ones of another's (key/value heads). That code repeats them before makes no difference.
        groups_if: the flag with which they may, and which changes nothing else.
        identity: when it gives its first input as it is: ``"always"``, where that has the ``"same dtype"``, or never.
        reshapes: whether the result has the elements of the input in their row-major order, as long as these are as
            many.
        uniform: whether the result is the same at every index of one of its dims.
        zeros: whether the result is zeros, which are the ranks' parts of a sum of zeros, too.
        lends: an argument of which only shape and dtype matter.
        takes: an argument whose elements the result is made of, and whose values do not tell how many.
        in_place: the operator that writes this one's result into its first argument, where it is not named as usual
            (``aten.add_.Tensor`` for ``aten.add.Tensor``).
        scatter: the operator that writes through this one, as a view: ``(self, src, ...)`` to ``self`` with ``src`` in
            the place of the view.
        updates: arguments that it writes in place although its schema does not say so (running statistics).
        updates_if: the flag among its arguments with which it does.
    """

    name: str
    place: str
    rule: Rule | None = None
    flops: Callable[[Shapes], float] | None = None
    touched: Callable[[Shapes], float] | None = None
    is_view: bool = False
    is_elementwise: bool = False
    is_by_choice: bool = False
    results: Callable[[Shapes], Sequence[tuple[Shape, str]]] | None = None
    sizes: tuple[str, ...] = ()
    offsets: tuple[tuple[str, str, str], ...] = ()
    shares: tuple[tuple[str, str, int], ...] = ()
    indices: tuple[tuple[str, int, str, int], ...] = ()
    groups: tuple[tuple[str, int, str, int], ...] = ()
    groups_if: str = ""
    identity: Literal["", "always", "same dtype"] = ""
    reshapes: bool = False
    uniform: Callable[[Shapes, int], bool] | None = None
    zeros: bool = False
    lends: str = ""
    takes: str = ""
    in_place: str = ""
    scatter: str = ""
    updates: tuple[str, ...] = ()
    updates_if: str = ""

    def positions(self, operator: Operator) -> tuple[tuple[str, str, str], ...]:
        """The offsets of one call: where it has a step, the start is a phase, which is the same on every rank."""
        is_strided = dict(operator.arguments).get("step", 1) != 1
        return tuple(offset for offset in self.offsets if not (is_strided and offset[0] == "start"))


AnyRule = TypeVar("AnyRule", bound=Rule)

_RECORDS: dict[str, Record] = {}
_DECLARED: dict[str, Record] = {}


def operator(*names: str, **facts: Any) -> Callable[[AnyRule], AnyRule]:
    """Declare operators that are alike: ``@operator("aten.view.default", sizes=("size",))`` above their rule.

    Without a function below it, it declares operators that have no rule, or one among their facts.

    Args:
        names: their full names.
        facts: further attributes of their :class:`Record`.

    Raises:
        ValueError: if an operator is declared already.
    """
    caller = sys._getframe(1)
    place = f"{caller.f_code.co_filename}:{caller.f_lineno}"
    for name in names:
        if name in _RECORDS:
            raise ValueError(f"{name} is declared twice: at {_RECORDS[name].place} and at {place}")
        _RECORDS[name] = Record(name, place, **facts)

    def with_rule(rule: AnyRule) -> AnyRule:
        for name in names:
            _RECORDS[name] = replace(_RECORDS[name], rule=rule)
        return rule

    return with_rule


def declare_record(made: Record) -> None:
    """Add the record of a function that a text declares, in place of one that it had before."""
    _DECLARED[made.name] = made


def record(name: str) -> Record | None:
    """The operator's record, if it has one."""
    return _RECORDS.get(name) or _DECLARED.get(name)


def records() -> Iterator[Record]:
    """Every record that has a rule of its own."""
    return iter(_RECORDS.values())


def known_operators() -> tuple[str, ...]:
    """Every operator whose record has a rule of its own, sorted."""
    return tuple(sorted(_RECORDS))


def elementwise_bases() -> set[str]:
    """The names, without space and overload, of operators of torch all of whose overloads are elementwise."""
    kinds: dict[str, set[bool]] = defaultdict(set)
    for known in records():
        if known.name.startswith("aten."):
            kinds[known.name.split(".")[1]].add(known.is_elementwise)
    return {base for base, found in kinds.items() if found == {True}}


def functional(name: str) -> str:
    """The operator that returns what this one writes in place: the record's that names it, else by PyTorch's naming."""
    named = next((known.name for known in records() if known.in_place == name), None)
    if named is not None:
        return named
    packet, _, overload = name.rpartition(".")
    space, _, base = packet.rpartition(".")
    if base.startswith("__i") and base.endswith("__"):
        return f"{space}.__{base[3:]}.{overload}"
    return f"{packet.removesuffix('_')}.{overload}"


def updated(called: Operator) -> tuple[int, ...]:
    """The tensors that an operator's call writes in place although its schema does not say so."""
    known = record(called.name)
    if known is None or not known.updates or (known.updates_if and not called.argument(known.updates_if)):
        return ()
    return tuple(ref.tensor for name in known.updates for ref in refs(called.argument(name)))


def count_flops(called: Operator, shape_of: Callable[[int], Shape]) -> float:
    """Floating-point operations of a product's forward, for tensors of these shapes; 0 for any other operator."""
    known = record(called.name)
    if known is None or known.flops is None:
        return 0.0
    return float(known.flops(Shapes(called.arguments, called.outputs, shape_of)))


def count_touched(called: Operator, shape_of: Callable[[int], Shape], graph: Graph) -> float:
    """Bytes that an operator's forward moves through memory, for tensors of these shapes."""
    known = record(called.name)
    if known is not None and known.is_view:
        return 0.0
    tensors = graph.tensors
    if known is not None and known.touched is not None:
        elements = known.touched(Shapes(called.arguments, called.outputs, shape_of))
        return float(elements) * tensors[called.outputs[0]].itemsize
    moved = dict.fromkeys((*called.inputs, *called.outputs))
    return float(sum(tensors[tensor].itemsize * prod(shape_of(tensor)) for tensor in moved))


def relate(graph: Graph, untied: frozenset[int] = frozenset()) -> tuple[list[Relation], Axes]:
    """Run the rules over a whole graph.

    Args:
        graph: the captured model.
        untied: tensors whose dims are others after the next boundary: a shard of one cannot pass there unconverted.

    Returns:
        One relation per operator whose outputs depend on parameters, and the axes they speak of.
    """
    axes = Axes()
    dims: dict[int, Dims] = {
        tensor: tuple(axes.new(size) for size in graph.tensors[tensor].shape) for tensor in graph.parameters
    }
    relations: list[Relation] = []
    for called in graph.operators:
        if all(graph.tensors[tensor].is_static for tensor in called.inputs):
            continue
        axes.operator = called
        for tensor in called.inputs:
            if tensor not in dims and not graph.tensors[tensor].is_static:  # an input that varies
                dims[tensor] = fresh_dims(tensor, graph, axes)
        site = Site(called, graph, dims, axes)
        known = record(called.name)
        if known is not None and known.rule is not None:
            result = known.rule(site)
        else:
            why = graph.untraced.get(called.module, "its code depends on values")
            told = {OPAQUE: why, ASKED: "its code asks for this value"}
            found = graph.found.get(called.name)
            advice = f"; a trial of its kernel suggests {found}" if found else _advice(called.name)
            unknown = "torch.vmap maps it" if called.name.startswith(MAPPED) else f"{called.name} has no rule{advice}"
            result = site.give_up(told.get(called.name, unknown))
        if called.boundary is not None and called.inputs[0] in untied:
            result = tuple(axes.new(size) for size in site.shape)
            both = (*site.relation.inputs[called.inputs[0]], *result)
            site.keep_whole(*both, because="the matrix before it has the same axis on both sides")
        outputs = result if isinstance(result, list) else [result]
        for tensor, out, shape in zip(called.outputs, outputs, site.shapes, strict=True):
            if tuple(dim.size for dim in out) != shape:
                raise RuntimeError(f"rule of {called.name} gave dims {out} for an output of shape {shape}")
            dims[tensor] = site.relation.outputs[tensor] = out
        relations.append(site.relation)
    axes.operator = None
    return relations, axes


def _advice(name: str) -> str:
    return "" if name.startswith("aten.") else "; lightning_autotp.declare says how it may be divided"


__all__ = [
    "ONE",
    "Dims",
    "Relation",
    "Result",
    "Rule",
    "Shape",
    "Shapes",
    "Site",
]
