"""How the sizes of a trace's tensors follow from those of its arguments.

Code asks for the sizes of activations. What it decided from them can be asked of another call before it runs only in
terms of what that call is given. So for the sizes that were asked for, and for these alone, the operators are followed
back: their rules say which dims of what they read a dim of theirs is, or is made of, and some lengths follow from
numbers (a slice's, a convolution's). What cannot be followed (what is as long as values say, say) has no origin.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from functools import reduce
from typing import Any

from lightning_autotp.layouts.dims import Concat, Dim, Product
from lightning_autotp.operators import record
from lightning_autotp.operators.axes import Axes
from lightning_autotp.operators.graph import Graph, Operator
from lightning_autotp.operators.questions import OF_TENSOR, Expression, Question, dim_place
from lightning_autotp.operators.site import Site, fresh_dims

_LARGEST = 64
"""Of so many operands an origin is made at most."""
_UNFLATTEN = "aten.unflatten.int"
_END = sys.maxsize
"""Where a slice without an end ends."""

_Size = tuple[int, int]
"""A tensor and a dim of it."""


class SizeOrigins:
    """Follows sizes back to what a traced call is given.

    Args:
        graph: the trace, as it was recorded.
        given: where in the arguments tensors of the graph are.
        buffers: tensors of the graph that are the model's.
        noted: by call, how the integers follow that it is given, by their values.
        are_known: whether integers that were not noted are constants, as no code asked what some size is.
    """

    def __init__(
        self,
        graph: Graph,
        given: Mapping[int, str],
        buffers: Collection[int],
        noted: Mapping[int, Mapping[int, Expression | None]],
        are_known: bool,
    ) -> None:
        self._graph, self._given, self._noted, self._are_known = graph, given, noted, are_known
        self._fixed = {*buffers, *graph.parameters}
        self._producers = graph.producers()
        self._dims: dict[int, tuple[Axes, Mapping[Dim, _Size], Mapping[int, Sequence[Dim]]] | None] = {}
        self._origins: dict[_Size, Expression | None] = {}
        self._sizes = {
            dim_place(place, dim): size
            for tensor, place in given.items()
            for dim, size in enumerate(graph.tensors[tensor].shape)
        }

    def of(self, question: Question) -> Expression | None:
        """What is asked of sizes in the graph as asked of those of the arguments: :meth:`Question.where`."""
        pending = _sizes_in(question)
        steps: dict[_Size, Expression | None] = {}
        while pending:
            size = pending[-1]
            if size in self._origins:
                pending.pop()
                continue
            if size not in steps:
                steps[size] = self._step(*size)
            missing = [one for one in _sizes_in(steps[size]) if one not in self._origins]
            if missing:
                pending += missing
                continue
            step = steps[size]
            origin = step.where(self._origin) if isinstance(step, Question) else step
            self._origins[size] = self._checked(origin, size)
            pending.pop()
        return question.where(self._origin)

    def _origin(self, tensor: int, dim: int) -> Expression | None:
        return self._origins[tensor, dim]

    def _checked(self, origin: Expression | None, size: _Size) -> Expression | None:
        """An origin that is right for the sizes of the trace, and short."""
        tensor, dim = size
        if isinstance(origin, Question) and len([*origin.places()]) > _LARGEST:
            return None
        known = origin
        if isinstance(origin, Question):
            known = origin.answer(self._sizes)
        elif isinstance(origin, str):
            known = self._sizes.get(origin)
        return origin if known is None or known == self._graph.tensors[tensor].shape[dim] else None

    def _step(self, tensor: int, dim: int) -> Expression | None:
        """A size by those of the tensors that its operator reads."""
        size = self._graph.tensors[tensor].shape[dim]
        if tensor in self._given:
            return dim_place(self._given[tensor], dim)
        if tensor in self._fixed:
            return size
        operator = self._producers.get(tensor)
        if operator is None:
            return None
        exact = _LENGTHS.get(operator.name)
        found = exact(self, operator, tensor, dim) if exact is not None else None
        if found is not None:
            return found
        found = self._by_dims(operator, tensor, dim)
        return self._by_numbers(operator, tensor, dim) if found is None else found

    def _by_dims(self, operator: Operator, tensor: int, dim: int) -> Expression | None:
        """As the operator's rule ties its dims together."""
        if id(operator) not in self._dims:
            self._dims[id(operator)] = self._tied(operator)
        tied = self._dims[id(operator)]
        if tied is None:
            return None
        axes, read, made = tied
        return self._spelled(axes.resolve(made[tensor][dim]), operator, read)

    def _spelled(self, of: Dim, operator: Operator, read: Mapping[Dim, _Size]) -> Expression | None:
        """A dim of an operator by those that it reads."""
        if of in read:
            return _size(*read[of])
        if isinstance(of, Product):
            return _all("mul", [self._spelled(one, operator, read) for one in of.factors]) if of.factors else 1
        if isinstance(of, Concat):
            return _all("add", [self._spelled(one, operator, read) for one in of.sections]) if of.sections else 0
        return self._number(operator, of.size)

    def _tied(self, operator: Operator) -> tuple[Axes, Mapping[Dim, _Size], Mapping[int, Sequence[Dim]]] | None:
        known = record(operator.name)
        if known is None or known.rule is None:
            return None
        axes = Axes()
        site = Site(operator, self._graph, {one: fresh_dims(one, self._graph, axes) for one in operator.inputs}, axes)
        result = known.rule(site)
        made = result if isinstance(result, list) else [result]
        read: dict[Dim, _Size] = {}
        # Those of parameters first: they are known.
        for tensor in sorted(operator.inputs, key=lambda one: one not in self._fixed):
            for dim, of in enumerate(site.relation.inputs[tensor]):
                if of.size != 1:
                    read.setdefault(axes.resolve(of), (tensor, dim))
        return axes, read, dict(zip(operator.outputs, made, strict=True))

    def _by_numbers(self, operator: Operator, tensor: int, dim: int) -> Expression | None:
        """As the argument says that spells the shape; -1 is what the others leave."""
        known, shape = record(operator.name), self._graph.tensors[tensor].shape
        named = dict(operator.arguments)
        first = named["dim"] % (len(shape) or 1) if operator.name == _UNFLATTEN else 0
        for name in known.sizes if known is not None else ():
            sizes = named.get(name)
            if not isinstance(sizes, tuple) or not 0 <= dim - first < len(sizes):
                continue
            if operator.name != _UNFLATTEN and len(sizes) != len(shape):
                continue
            if sizes[dim - first] != -1:
                return self._number(operator, sizes[dim - first])
            if known is not None and known.is_view and known.uniform is None and 0 not in shape:
                (read, *_) = operator.inputs
                every = [_size(read, at) for at in range(len(self._graph.tensors[read].shape))]
                others = [_size(tensor, at) for at in range(len(shape)) if at != dim]
                return Question("floordiv", (_all("mul", every) or 1, _all("mul", others) or 1))
        return None

    def _number(self, operator: Operator, value: Any, default: int | None = None) -> Expression | None:
        """How an integer follows that an operator is given, or that a dim of its own is long.

        Args:
            operator: the operator.
            value: the integer.
            default: the one that PyTorch puts in where the code says nothing.
        """
        noted = self._noted.get(operator.call, {})
        if operator.call < 0 or value not in noted:
            is_given = operator.call >= 0 and value in self._graph.calls[operator.call].arguments
            is_constant = value == default or (is_given and self._are_known)
            return int(value) if is_constant else None
        expression = noted[value]
        return expression if self._are_known or not isinstance(expression, int) else None

    def sliced(self, operator: Operator, tensor: int, dim: int) -> Expression | None:
        """``x[start:end:step]``: the dim's own length, where it is all of it."""
        named = dict(operator.arguments)
        if dim != named["dim"] % len(self._graph.tensors[tensor].shape):
            return None
        source, step = _size(named["self"].tensor, dim), named.get("step", 1)
        start, end = named.get("start") or 0, _END if named.get("end") is None else min(named["end"], _END)
        first, last = self._number(operator, start, 0), self._number(operator, end, _END)
        if (first, last, step) == (0, _END, 1):
            return source
        return None if first is None or last is None else Question("sliced", (source, first, last, step))

    def counted(self, operator: Operator, tensor: int, dim: int) -> Expression | None:
        """``arange(start, end, step)``."""
        named = dict(operator.arguments)
        start = self._number(operator, named["start"]) if "start" in named else 0
        found = start, self._number(operator, named["end"]), self._number(operator, named.get("step", 1), 1)
        known = tuple(one for one in found if one is not None)
        return Question("counted", known) if len(known) == len(found) else None

    def part(self, operator: Operator, tensor: int, dim: int) -> Expression | None:
        """One of the parts of a dim, of a size or as many as are wanted."""
        named = dict(operator.arguments)
        if dim != named["dim"] % len(self._graph.tensors[tensor].shape):
            return None
        source, at = _size(named["self"].tensor, dim), operator.outputs.index(tensor)
        length = self._number(operator, named.get("split_size", named.get("chunks")))
        if length is None:
            return None
        if "chunks" in named:  # the quotient, rounded up
            length = Question("neg", (Question("floordiv", (Question("neg", (source,)), length)),))
        start, end = (Question("mul", (length, number)) for number in (at, at + 1))
        return Question("sliced", (source, start, end, 1))

    def windows(self, operator: Operator, tensor: int, dim: int) -> Expression | None:
        """Of a convolution or pooling: ``(size + 2 padding - dilation (kernel - 1) - 1) // stride + 1``."""
        named = dict(operator.arguments)
        source = next(value.tensor for name, value in operator.arguments if name in ("input", "self"))
        kernel = named.get("kernel_size") or self._graph.tensors[named["weight"].tensor].shape[2:]
        rank = next(rank for rank in (1, 2, 3) if f"{rank}d" in operator.name)
        at = dim - len(self._graph.tensors[tensor].shape) + rank
        if at < 0 or named.get("ceil_mode") or isinstance(named.get("padding"), str):
            return None

        def of(name: str, default: Any) -> int:
            value = named.get(name) or default
            value = (value,) if isinstance(value, int) else value
            return int(value[at % len(value)])

        width = of("kernel_size", kernel)
        left = 2 * of("padding", 0) - of("dilation", 1) * (width - 1) - 1
        inside = Question("add", (_size(source, dim), left))
        stride = of("stride", kernel if "kernel_size" in named else 1)
        return Question("add", (Question("floordiv", (inside, stride)), 1))

    def stacked(self, operator: Operator, tensor: int, dim: int) -> Expression | None:
        """A dim over several tensors."""
        named = dict(operator.arguments)
        is_new = dim == named["dim"] % len(self._graph.tensors[tensor].shape)
        return len(named["tensors"]) if is_new else None


_LENGTHS: Mapping[str, Callable[[SizeOrigins, Operator, int, int], Expression | None]] = {
    "aten.slice.Tensor": SizeOrigins.sliced,
    **dict.fromkeys((f"aten.arange.{of}" for of in ("default", "start", "start_step")), SizeOrigins.counted),
    **dict.fromkeys(("aten.split.Tensor", "aten.chunk.default"), SizeOrigins.part),
    **dict.fromkeys((f"aten.conv{rank}d.default" for rank in (1, 2, 3)), SizeOrigins.windows),
    **dict.fromkeys((f"aten.max_pool{rank}d.default" for rank in (1, 2, 3)), SizeOrigins.windows),
    **dict.fromkeys((f"aten.avg_pool{rank}d.default" for rank in (1, 2, 3)), SizeOrigins.windows),
    "aten.stack.default": SizeOrigins.stacked,
}
"""Operators whose lengths follow by numbers."""


def _size(tensor: int, dim: int) -> Question:
    return Question(OF_TENSOR, (tensor, dim))


def _all(function: str, operands: Iterable[Expression | None]) -> Expression | None:
    """A product or a sum; ``None`` where one of the operands is not known, or there is none."""
    given = [*operands]
    known = [one for one in given if one is not None]
    if not known or len(known) < len(given):
        return None
    return reduce(lambda left, right: Question(function, (left, right)), known)


def _sizes_in(expression: Expression | None) -> list[_Size]:
    """The sizes of a graph's tensors that something is computed from."""
    if not isinstance(expression, Question):
        return []
    if expression.function == OF_TENSOR:
        tensor, dim = expression.operands
        return [(tensor, dim)]  # type: ignore[list-item]
    return [size for operand in expression.operands for size in _sizes_in(operand)]
