"""A captured model as plain data: tensors and the operators between them, in the order they run."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

from lightning_autotp.layouts.places import Boundary, CallPoint, CallSite, said_of
from lightning_autotp.layouts.step_size import StepSize
from lightning_autotp.operators.questions import Question

OPAQUE = "opaque module"
"""Name of the one operator that a module is whose code cannot be traced."""

EXPERTS = "experts"
"""Name of the one operator that a mixture's stacked experts are where each rank is to have some of them whole."""

KERNEL_LOSS, KERNEL_LINEAR_LOSS = "kernel's cross-entropy", "kernel's linear cross-entropy"
"""Names of the operators that declared functions are which compute a cross-entropy: of logits, or of hidden states."""

ASKED = "value asked for"
"""Name of the operator that stands where code asks for a value that a parameter went into: the trace made one up."""

MAPPED = "transformed."
"""Before the name of an operator that ran under ``torch.vmap``: ``transformed.aten.add.Tensor``."""

WRITTEN_THROUGH = "write through "
"""Before the name of a view's operator, the one that puts its second input where that view of its first one lies."""

KEPT = "value kept"
"""Name of the operator that stands, after the forward, for a module's new buffer or other attribute ``name``."""


@dataclass(frozen=True)
class Ref:
    """An operator's argument that is a tensor: its index in :attr:`Graph.tensors`."""

    tensor: int


@dataclass(frozen=True)
class TorchCall:
    """One call of a torch function in a model's code; it may run several operators.

    Attributes:
        module: path of the module whose ``forward`` made it.
        site: where it stands.
        arguments: the leaves of its arguments: tensors as :class:`Ref`, integers as they are, anything else ``None``.
        results: the leaves of what it returned, alike.
        made: every tensor that it returned.
        groups: for each leaf of its arguments, which argument it is in.
        written: leaves of its arguments that it writes in place, each with what it is then.
        instruction: the instruction of the code that makes it, which tells calls on one line apart.
        run: the run of the module that makes it: its index in :attr:`Graph.entered`.
        in_function: whether the module runs inside of an autograd function, whose backward pass may run its code again
            in another way, which no trace shows (Reformer's reversible layers).
    """

    module: str
    site: CallSite
    arguments: tuple[Ref | int | None, ...]
    results: tuple[Ref | int | None, ...]
    groups: tuple[int, ...] = ()
    made: tuple[Ref, ...] = ()
    written: tuple[tuple[int, Ref], ...] = ()
    instruction: int = -1
    run: int = 0
    in_function: bool = False


Constant = float | str | None
"""What a module may be given beside tensors: a number (a flag is one), a text or nothing."""


@dataclass(frozen=True)
class ModuleRun:
    """One run of a module.

    Attributes:
        module: its path.
        caller: path of the module whose code calls it.
        inputs: of each tensor that it is given: where it is, what it is outside and inside of the module.
        outputs: of each tensor that it returns: where it is, what it is inside and outside of the module.
        constants: the numbers, texts, flags and ``None`` that it is given, each with where it is.
    """

    module: str
    caller: str
    inputs: tuple[tuple[str, int, int], ...]
    outputs: tuple[tuple[str, int, int], ...]
    constants: tuple[tuple[str, Constant], ...] = ()


@dataclass(frozen=True)
class ExpertsCall:
    """One run of a module that holds a mixture's experts, stacked along the first dim of its parameters.

    Attributes:
        module: its path.
        hidden: the tensor of tokens that it is given, ``[tokens, hidden]``.
        index: the one that says which experts each token chooses, ``[tokens, choices]``.
        weights: the one that says how much each choice counts, ``[tokens, choices]``.
        result: what it gives, ``[tokens, hidden]``.
        places: positions, or names, of these three arguments.
    """

    module: str
    hidden: int
    index: int
    weights: int
    result: int
    places: tuple[int | str, int | str, int | str]


@dataclass(frozen=True)
class TensorInfo:
    """What is known of one tensor.

    Attributes:
        shape: its whole shape.
        dtype: its dtype without the ``torch.`` prefix.
        itemsize: bytes of one element.
        is_static: whether no parameter went into it, so that it is the same on every rank and needs no gradient.
        is_differentiable: whether a gradient flows through it.
    """

    shape: tuple[int, ...]
    dtype: str
    itemsize: int
    is_static: bool
    is_differentiable: bool

    @property
    def bytes(self) -> int:
        """Size of the whole tensor."""
        count = self.itemsize
        for size in self.shape:
            count *= size
        return count

    @property
    def is_floating(self) -> bool:
        """Whether its elements are floating-point or complex numbers, which gradients can flow through."""
        return self.dtype.startswith(("float", "bfloat", "complex"))


@dataclass(frozen=True)
class Operator:
    """One ATen (or recorded) operator.

    Attributes:
        name: such as ``aten.linear.default``; ``boundary`` for a module boundary, ``record:NAME`` for a recorded
            primitive.
        arguments: by the schema's names, defaults included; tensors are :class:`Ref`, lists stay lists (as tuples).
        outputs: the tensors it makes.
        module: path of the module whose ``forward`` called it.
        source: file, line and code of the call.
        layer: which layer of ``torch.nn`` the calling module is (``"Linear"``), also as a subclass; else empty.
        boundary: for an operator called ``boundary``, which computes nothing: where it is.
        call: index in :attr:`Graph.calls` of the call that ran it; -1 if none did.
        own_numbers: in a local trace: whether the random numbers it may draw are the rank's own.
        rounding: how it rounds its operands, and its result's gradient, so that none of these may be a part of a sum;
            empty if it does not.
    """

    name: str
    arguments: tuple[tuple[str, Any], ...]
    outputs: tuple[int, ...]
    module: str
    source: str
    layer: str = ""
    boundary: Boundary | CallPoint | None = None
    call: int = -1
    own_numbers: bool = False
    rounding: str = ""

    def argument(self, name: str) -> Any:
        """The argument's value."""
        return dict(self.arguments)[name]

    def __str__(self) -> str:
        return said_of(self.name, self.module, self.source)

    @cached_property
    def inputs(self) -> tuple[int, ...]:
        """Every tensor it reads, in the order of its arguments."""
        return read_by(self.arguments)


def read_by(arguments: Iterable[tuple[str, Any]]) -> tuple[int, ...]:
    """The tensors in an operator's arguments, in their order."""
    found: list[int] = []
    for _, value in arguments:
        if isinstance(value, Ref):
            found.append(value.tensor)
        elif isinstance(value, tuple):
            found += [ref.tensor for ref in refs(value)]
    return tuple(found)


def refs(value: Any) -> Iterator[Ref]:
    """The tensors in an argument."""
    if isinstance(value, Ref):
        yield value
    elif isinstance(value, tuple):
        for item in value:
            yield from refs(item)


def renamed(value: Any, names: Mapping[int, Any]) -> Any:
    """An argument with other names for some of its tensors."""
    if isinstance(value, Ref):
        return names.get(value.tensor, value)
    return tuple(renamed(item, names) for item in value) if isinstance(value, tuple) else value


@dataclass
class Graph:
    """The operators of one training step's forward.

    Attributes:
        tensors: every tensor.
        operators: in execution order, but for static ones: each stands before the first that needs it, and one that
            nothing needs is left out.
        parameters: name of the parameter (its first name, where tied) by tensor.
        outputs: the floating-point tensors the model returns.
        calls: the calls in the model's code that ran the operators.
        opaque: modules whose code depends on values that a trace does not have, or cannot be traced for another reason:
            one operator each.
        untraced: of those of which more is known than that their code depends on values: why they are not looked into.
        failure: what the model's code raised, where it did not come to its end.
        failed_at: the source line of the last call that raised something.
        example: rows and tokens of the batch that was traced.
        integers: by module, the integers that its code read: its own attributes, and as ``config.NAME`` its config's.
        settings: by module, the names of its own attributes that its code read: plain values, or lists and the like.
        numbers: where in the arguments those floats are of which code asked what they are.
        questions: the comparisons that code made of integers and floats of the arguments.
        asked: where in the arguments those integers and flags are, in tensors, from which an answer follows that code
            asked for.
        compiling: modules whose code asked whether it is compiled.
        measured: by module, the tensors whose shapes its code asked for.
        experts: the runs of modules that hold a mixture's stacked experts.
        overwritten: where tensors enter or leave modules whose memory code goes on to change in place.
        units: of parameters that may be cut along each dim at multiples of a length only: these lengths.
        value_reading: modules whose code asks for synthetic values.
        value_dependent: the ``value_reading`` ones, those that get numbers from them, and those that do something else
            with other random numbers.
        branching: modules whose code may run otherwise with other values than the synthetic ones: the
            ``value_dependent`` ones and, as what they are given may be other than it was, all inside of these.
        draws: for each time that the model ran in the trace, which numbers its code got that draws some in Python.
        has_drawn: whether it does.
        varying: modules in whose calls integers follow from such numbers.
        runs: the runs of all modules.
        inspections: calls in the model's code that ran no operator: they asked for a shape, say.
        entered: the module of every run, in the order in which they begin; the first is what calls the model.
        device: where tensors seemed to be.
        found: by operator that is neither built in nor declared: its declaration as code, found by trying it.
    """

    tensors: list[TensorInfo] = field(default_factory=list)
    operators: list[Operator] = field(default_factory=list)
    parameters: dict[int, str] = field(default_factory=dict)
    outputs: list[int] = field(default_factory=list)
    calls: list[TorchCall] = field(default_factory=list)
    opaque: frozenset[str] = frozenset()
    failure: str = ""
    failed_at: str = ""
    example: StepSize = field(default_factory=StepSize)
    integers: dict[str, dict[str, int]] = field(default_factory=dict)
    settings: dict[str, dict[str, None]] = field(default_factory=dict)
    numbers: set[str] = field(default_factory=set)
    questions: dict[Question, None] = field(default_factory=dict)
    asked: set[str] = field(default_factory=set)
    compiling: set[str] = field(default_factory=set)
    measured: dict[str, set[int]] = field(default_factory=dict)
    experts: list[ExpertsCall] = field(default_factory=list)
    untraced: Mapping[str, str] = field(default_factory=dict)
    overwritten: set[Boundary] = field(default_factory=set)
    units: Mapping[int, tuple[int, ...]] = field(default_factory=dict)
    value_reading: set[str] = field(default_factory=set)
    value_dependent: frozenset[str] = frozenset()
    branching: frozenset[str] = frozenset()
    draws: tuple[int, ...] = ()
    has_drawn: bool = False
    varying: frozenset[str] = frozenset()
    runs: list[ModuleRun] = field(default_factory=list)
    inspections: list[TorchCall] = field(default_factory=list)
    entered: list[str] = field(default_factory=lambda: [""])
    device: str = "cpu"
    found: dict[str, str] = field(default_factory=dict)

    @property
    def is_led(self) -> bool:
        """Whether values, or random numbers, say where code goes in this call."""
        return bool(self.value_reading) or len(self.draws) > 1

    @cached_property
    def run_again(self) -> frozenset[str]:
        """Modules that run more than once in a call of the model."""
        found, ran = set[str](), set[str]()
        for run in self.runs:  # in the order in which they end, the model's own last
            if not run.module:
                ran.clear()
            elif run.module in ran:
                found.add(run.module)
            ran.add(run.module)
        return frozenset(found)

    def loose(self) -> list[int]:
        """Tensors that no operator makes and that are no parameters (inputs, buffers, constants), as they are used."""
        made = {tensor for operator in self.operators for tensor in operator.outputs}
        used = (tensor for operator in self.operators for tensor in operator.inputs)
        return [tensor for tensor in dict.fromkeys(used) if tensor not in made and tensor not in self.parameters]

    def static_on_demand(self) -> None:
        """Bring the static operators into an order that depends on the others alone.

        Code may compute masks and tables in any order (it may loop over a set): a second trace must not differ by that.
        """
        producers = self.producers()
        placed: dict[int, Operator] = {}

        def place(operator: Operator) -> None:
            pending = [operator]
            while pending:
                last = pending[-1]
                missing = [
                    producer
                    for tensor in last.inputs
                    if (producer := producers.get(tensor)) is not None and id(producer) not in placed
                ]
                if missing:
                    pending.append(missing[0])
                else:
                    placed.setdefault(id(last), last)
                    pending.pop()

        for operator in self.operators:
            made = operator.outputs or operator.inputs
            if not all(self.tensors[tensor].is_static for tensor in made):
                place(operator)
        for tensor in self.outputs:
            if tensor in producers:
                place(producers[tensor])
        self.operators = list(placed.values())

    def varying_after(self, places: Collection[Boundary]) -> Graph:
        """This graph where what passes these places is not static, nor what is computed from it.

        Left out are places that others pass, too: constants may go through a layer beside its activations.
        """
        crossings = [operator for operator in self.operators if operator.boundary is not None]
        passed = {crossed.boundary for crossed in crossings if not self.tensors[crossed.inputs[0]].is_static}
        begin, varying = set(places) - passed, set[int]()
        for operator in self.operators:
            is_there = operator.boundary in begin
            if is_there or not varying.isdisjoint(operator.inputs):
                tensors = (*operator.inputs, *operator.outputs) if is_there else operator.outputs
                varying.update(tensor for tensor in tensors if self.tensors[tensor].is_static)
        infos = list(self.tensors)
        for tensor in varying:
            infos[tensor] = replace(infos[tensor], is_static=False, is_differentiable=infos[tensor].is_floating)
        return replace(self, tensors=infos)

    def producers(self) -> dict[int, Operator]:
        """The operator that makes each tensor."""
        return {tensor: operator for operator in self.operators for tensor in operator.outputs}
