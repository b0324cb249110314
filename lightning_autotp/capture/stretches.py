"""What a module records in a trace while it runs: a stretch of the graph, which may be appended for another one."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lightning_autotp.capture.noted_numbers import Notes
from lightning_autotp.capture.tracer import Storage, Tracer, Tracked
from lightning_autotp.layouts.places import Boundary
from lightning_autotp.operators.graph import ExpertsCall, ModuleRun, Operator, Ref, TensorInfo, TorchCall
from lightning_autotp.operators.questions import OF_TENSOR, Expression, Question

_OF_MODULES = "measured", "settings", "integers", "compiling", "overwritten", "value_reading"
"""What a graph notes by the paths of modules."""


class NotAgain(Exception):
    """A stretch of the graph cannot be appended again, or not for this call."""


class Position(NamedTuple):
    """How long the graph is where a layer's forward begins: its tensors, calls and runs; and the layer's own run."""

    tensors: int
    calls: int
    entered: int
    run: int


class Container(NamedTuple):
    """A container that a layer returns."""

    kind: Any
    keys: tuple[Any, ...]
    items: tuple[Any, ...]


class Plain(NamedTuple):
    """A plain value that a layer returns."""

    kind: type
    value: Any


class Counted(NamedTuple):
    """A number that follows from sizes of tensors, and notes what code asks of it.

    Attributes:
        value: which one.
        expression: how it follows.
        size: of how many operands it was computed.
    """

    value: int | float
    expression: Question | str
    size: int


class Given(NamedTuple):
    """A tensor that a layer is given, and returns."""

    at: int


class Marked(NamedTuple):
    """A tensor that a layer is given, and returns after modules in it have taken and returned it.

    Attributes:
        at: which one.
        value: what it is then.
        crossed: the boundaries that it has crossed in the layer.
    """

    at: int
    value: Ref
    crossed: tuple[Boundary, ...]


class Seen(NamedTuple):
    """What a view sees of a memory.

    Attributes:
        elements: of the memory.
        offset: the first one that it sees.
    """

    elements: int
    offset: int


class Made(NamedTuple):
    """A tensor that a layer makes and returns.

    Attributes:
        shape: its shape.
        stride: its strides.
        dtype: its dtype.
        requires_grad: whether it has a gradient.
        seen: what it sees of its memory, if it is another object for it than the first one.
        said: attributes that code has given it.
        tracked: what the tracer knows of it.
    """

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    requires_grad: bool
    seen: Seen | None
    said: tuple[tuple[str, Any], ...]
    tracked: Tracked


def numbers_in(result: Any) -> Iterator[int]:
    """The numbers of the tensors that a layer makes and returns."""
    if isinstance(result, Container):
        for item in result.items:
            yield from numbers_in(item)
    elif isinstance(result, Made):
        yield result.tracked.value.tensor
    elif isinstance(result, Marked):
        yield result.value.tensor


@dataclass
class Noted:
    """What a trace notes besides what runs.

    Attributes:
        of_modules: what the graph notes by the paths of modules, by its attributes.
        number_returning: modules that return numbers, and whose code gets them.
        asked: what code asks of numbers.
        has_drawn: whether it draws some.
    """

    of_modules: dict[str, Any]
    number_returning: dict[str, str]
    asked: Notes = field(default_factory=Notes)
    has_drawn: bool = False

    def put_into(self, tracer: Tracer, notes: Notes) -> None:
        """Add it to what was noted before."""
        for name, found in self.of_modules.items():
            _merge(getattr(tracer.graph, name), found)
        tracer.number_returning |= self.number_returning
        tracer.graph.has_drawn |= self.has_drawn
        notes.add(self.asked)


@contextmanager
def noting_anew(tracer: Tracer, notes: Notes) -> Iterator[Noted]:
    """Within it a trace notes things as if nothing was noted before; gives what it notes, complete afterwards."""
    graph, returning, has_drawn = tracer.graph, tracer.number_returning, tracer.graph.has_drawn
    before, asked = {name: getattr(graph, name) for name in _OF_MODULES}, notes.take()
    for name, noted in before.items():
        setattr(graph, name, type(noted)())
    tracer.number_returning, graph.has_drawn = {}, False
    found = Noted({name: getattr(graph, name) for name in _OF_MODULES}, tracer.number_returning)
    try:
        yield found
    finally:
        found.asked, found.has_drawn = notes.take(), graph.has_drawn
        vars(graph).update(before, has_drawn=has_drawn)
        tracer.number_returning = returning
        notes.add(asked)
        found.put_into(tracer, notes)


def _merge(into: Any, found: Any) -> None:
    """Add what is noted to what was noted before, of which the first counts."""
    if isinstance(into, set):
        into |= found
        return
    for key, value in found.items():
        if isinstance(value, set | dict):
            _merge(into.setdefault(key, type(value)()), value)
        else:
            into.setdefault(key, value)


@dataclass
class Stretch:
    """What a layer has added to a graph, and what it did besides.

    Attributes:
        noted: what was noted meanwhile.
        numbers: by call, how the integers among its arguments follow that are noted.
        born: tensors of its modules that were not seen before: at which place in :attr:`tensors`, and which.
        known: the values of some of its tensors.
        synthetic: those that follow from synthetic choices.
        counts: how many calls its own code has made, by where they stand.
        changes: the plain attributes that it changed.
        put: what it has put into its slots of caches.
        result: what it returned.
    """

    tensors: list[TensorInfo]
    operators: list[Operator]
    calls: list[TorchCall]
    inspections: list[TorchCall]
    entered: list[str]
    runs: list[ModuleRun]
    experts: list[ExpertsCall]
    noted: Noted
    numbers: dict[int, dict[int, Expression | None]] = field(default_factory=dict)
    born: dict[int, int] = field(default_factory=dict)
    known: dict[int, Tensor] = field(default_factory=dict, compare=False)
    synthetic: dict[int, Tensor] = field(default_factory=dict, compare=False)
    counts: dict[Any, int] = field(default_factory=dict)
    changes: list[tuple[int, str, Any]] = field(default_factory=list)
    put: list[tuple[int, Any, Any]] = field(default_factory=list)
    result: Any = None

    @property
    def left(self) -> Iterator[int]:
        """The tensors that it makes and that are seen outside of it: that it returns, or puts into a cache."""
        yield from numbers_in(self.result)
        for *_, value in self.put:
            yield from numbers_in(value)

    def is_like(self, other: Stretch) -> bool:
        """Whether two layers have done the same; to be asked where no trace sees it."""
        values = zip((self.known, self.synthetic), (other.known, other.synthetic), strict=True)
        return self == other and all(_are_equal(*pair) for pair in values)


LISTS = "tensors", "operators", "calls", "inspections", "entered", "runs", "experts"
"""What a graph has in the order in which the model runs, and a stretch a part of."""


def _are_equal(one: Mapping[int, Tensor], other: Mapping[int, Tensor]) -> bool:
    return one.keys() == other.keys() and all(
        value is other[number] or (value.dtype == other[number].dtype and torch.equal(value, other[number]))
        for number, value in one.items()
    )


class Renaming:
    """Renames what one layer has recorded to what another one records.

    Args:
        first: where in the graph what was recorded begins.
        begun: how many tensors there were when the one's call began, before its marks.
        now: where in the graph it is to be appended.
        numbers: of tensors from before, by those that the recorded ones are in the place of.
        paths: of modules, alike.
    """

    def __init__(
        self, first: Position, begun: int, now: Position, numbers: Mapping[int, int], paths: Mapping[str, str]
    ) -> None:
        self.first, self.begun, self.now = first, begun, now
        self.numbers, self.paths = numbers, paths
        self.refs: dict[int, Ref] = {}

    def number(self, tensor: int) -> int:
        """A tensor's number."""
        if tensor >= self.first.tensors:
            return tensor - self.first.tensors + self.now.tensors
        if (found := self.numbers.get(tensor)) is None:
            if tensor >= self.begun:  # of this very call, and yet not given to the layer
                raise NotAgain
            return tensor
        return found

    def call_number(self, call: int) -> int:
        """A call's number."""
        return call if call < self.first.calls else call - self.first.calls + self.now.calls

    def path(self, module: str) -> str:
        """A module's path."""
        return self.paths.get(module, module)

    def value(self, value: Any) -> Any:
        """An argument."""
        kind = type(value)
        if kind is Ref:
            if (found := self.refs.get(value.tensor)) is None:
                found = self.refs[value.tensor] = Ref(self.number(value.tensor))
            return found
        return tuple([self.value(item) for item in value]) if kind is tuple and value else value

    def operator(self, one: Operator) -> Operator:
        """An operator."""
        return Operator(
            one.name,
            tuple([(name, self.value(value)) for name, value in one.arguments]),
            tuple(map(self.number, one.outputs)),
            self.path(one.module),
            one.source,
            one.layer,
            self.boundary(one.boundary) if isinstance(one.boundary, Boundary) else one.boundary,
            self.call_number(one.call),
            one.own_numbers,
            one.rounding,
        )

    def boundary(self, one: Boundary) -> Boundary:
        """A module's boundary."""
        return Boundary(self.path(one.module), one.side, one.key)

    def call(self, one: TorchCall) -> TorchCall:
        """A call of a torch function."""
        if one.run == self.first.run:
            run = self.now.run
        elif one.run >= self.first.entered:
            run = one.run - self.first.entered + self.now.entered
        else:
            raise NotAgain
        return TorchCall(
            self.path(one.module),
            one.site,
            self.value(one.arguments),
            self.value(one.results),
            one.groups,
            self.value(one.made),
            self.value(one.written),
            one.instruction,
            run,
            one.in_function,
        )

    def run(self, one: ModuleRun) -> ModuleRun:
        """A run of a module."""
        inputs, outputs = (
            tuple((key, self.number(before), self.number(after)) for key, before, after in places)
            for places in (one.inputs, one.outputs)
        )
        return ModuleRun(self.path(one.module), self.path(one.caller), inputs, outputs, one.constants)

    def experts(self, one: ExpertsCall) -> ExpertsCall:
        """A run of a mixture's experts."""
        hidden, index, weights, result = map(self.number, (one.hidden, one.index, one.weights, one.result))
        return ExpertsCall(self.path(one.module), hidden, index, weights, result, one.places)

    def result(self, one: Any) -> Any:
        """What a layer returns."""
        if isinstance(one, Container):
            return one._replace(items=tuple(map(self.result, one.items)))
        if isinstance(one, Counted):
            return one._replace(expression=self.expression(one.expression))  # type: ignore[arg-type]
        if isinstance(one, Marked):
            return one._replace(value=self.value(one.value), crossed=tuple(map(self.boundary, one.crossed)))
        if not isinstance(one, Made):
            return one
        tracked, storage = one.tracked, one.tracked.storage
        if storage is not None:
            storage = Storage(self.value(storage.root), storage.version)
        path = tuple(map(self.operator, tracked.path))
        crossed = tuple(map(self.boundary, tracked.crossed))
        return one._replace(tracked=Tracked(self.value(tracked.value), storage, path, tracked.version, crossed))

    def expression(self, one: Expression | None) -> Expression | None:
        """How a number follows from the sizes of tensors."""
        if not isinstance(one, Question):
            return one
        if one.function == OF_TENSOR:
            tensor, dim = one.operands
            return Question(OF_TENSOR, (self.number(tensor), dim))  # type: ignore[arg-type]
        return Question(one.function, tuple(map(self.expression, one.operands)))  # type: ignore[arg-type]

    def asked(self, one: Notes) -> Notes:
        """What code asks of numbers."""
        return replace(one, of_sizes=dict.fromkeys(map(self.expression, one.of_sizes)))  # type: ignore[arg-type]

    def noted(self, one: Noted) -> Noted:
        """What is noted besides what runs."""
        noted = dict(one.of_modules)
        noted["measured"] = {self.path(path): {*map(self.number, found)} for path, found in noted["measured"].items()}
        for name in ("settings", "integers"):
            noted[name] = {self.path(path): dict(found) for path, found in noted[name].items()}
        for name in ("compiling", "value_reading"):
            noted[name] = {*map(self.path, noted[name])}
        noted["overwritten"] = {*map(self.boundary, noted["overwritten"])}
        returning = {self.path(path): self.path(caller) for path, caller in one.number_returning.items()}
        return Noted(noted, returning, self.asked(one.asked), one.has_drawn)

    def stretch(self, one: Stretch) -> Stretch:
        """What a layer records.

        Raises:
            NotAgain: if that is not known.
        """
        return Stretch(
            one.tensors,
            [*map(self.operator, one.operators)],
            [*map(self.call, one.calls)],
            [*map(self.call, one.inspections)],
            [*map(self.path, one.entered)],
            [*map(self.run, one.runs)],
            [*map(self.experts, one.experts)],
            self.noted(one.noted),
            {
                self.call_number(call): {value: self.expression(how) for value, how in found.items()}
                for call, found in one.numbers.items()
            },
            one.born,
            {self.number(tensor): value for tensor, value in one.known.items()},
            {self.number(tensor): value for tensor, value in one.synthetic.items()},
            one.counts,
            one.changes,
            [(at, name, self.result(value)) for at, name, value in one.put],
            self.result(one.result),
        )
