"""Records what a model's Python runs: every operator as the code calls it, before autograd takes it apart.

Operators are seen at PyTorch's pre-dispatch key, where ``linear`` is still ``linear``; fake tensors carry the shapes.
An operator that writes in place is recorded under its functional name, and whoever reads another view of what it wrote
reads the written values: the graph has no aliases.
"""

from __future__ import annotations

import contextlib
import inspect
import itertools
import math
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import FrameType
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from lightning_autotp.capture import vmap as transforms
from lightning_autotp.capture.call_sites import (
    by_call,
    call_key,
    call_leaves,
    calling_frame,
    grouped_leaves,
    is_in_function,
    is_user_code,
    source_line,
)
from lightning_autotp.capture.kept_outside import KeptOutside
from lightning_autotp.capture.noted_numbers import NotedInt, Notes, plain
from lightning_autotp.capture.recording import RECORD
from lightning_autotp.capture.schemas import name_of, named_arguments, written_arguments, written_through
from lightning_autotp.capture.static_values import NoValue, StaticEvaluator
from lightning_autotp.capture.synthetic_draws import states, synthetic_draws
from lightning_autotp.capture.trials import found_declaration, try_declaration
from lightning_autotp.layouts.places import Boundary, CallSite
from lightning_autotp.operators import Shapes, functional, record
from lightning_autotp.operators.declared import add, declaration_of, is_to_be_found
from lightning_autotp.operators.graph import (
    ASKED,
    KEPT,
    MAPPED,
    Graph,
    Operator,
    Ref,
    TensorInfo,
    TorchCall,
    read_by,
    refs,
)
from lightning_autotp.operators.questions import OF_TENSOR, Expression, Question
from lightning_autotp.private.distributed_private import communicates
from lightning_autotp.private.torch_private import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    PreDispatchMode,
    beneath_modes,
    is_made_of_others,
    schema_of,
    storage_key,
    tree_leaves,
    tree_map_only,
    unset_fake_temporarily,
    without_functions,
    without_python_dispatcher,
)
from lightning_autotp.quantized.float8 import float8_of
from lightning_autotp.ranks.random_numbers import are_own_numbers_noted
from lightning_autotp.torch_functions import functions

_COUNTING = frozenset(functions("numel nelement"))
_MEASURING = _COUNTING | {Tensor.shape.__get__, Tensor.size, Tensor.__len__}  # type: ignore[attr-defined]
"""Functions that tell a tensor's shape, or something of it."""

_INDEXING = frozenset([Tensor.__getitem__, Tensor.__setitem__])
_BUILT_IN = ("aten", "prims", "prim", "lightning_autotp")
_SAME = "aten.alias.default"
_INDEX = "aten.index.Tensor"
_LINEAR = "aten.linear.default"
_CONSTANTS = {torch.tensor, torch.as_tensor, torch.asarray}


@dataclass
class Tracked:
    """A tensor object: its value in the graph, which part of its storage it is, and which boundaries it has crossed."""

    value: Ref
    storage: Storage | None = None
    path: tuple[Operator, ...] = ()
    version: int = 0
    crossed: tuple[Boundary, ...] = ()


@dataclass
class Storage:
    """Memory that several tensor objects look at: its first one, and writes through others that it has not seen yet."""

    root: Ref
    version: int = 0
    pending: list[tuple[tuple[Operator, ...], Ref]] = field(default_factory=list)


class Tracer(PreDispatchMode):
    """A dispatch mode that appends every operator to :attr:`graph`.

    Args:
        model: the copy that will run; parameters are known by its names.
        real: values of its inputs and buffers, by the id of the tensor that stands for them.
        places: where in the arguments tensors are, by the id of the one that stands for them.
        device: where its tensors seem to be.
    """

    def __init__(
        self, model: nn.Module, real: Mapping[int, Tensor], places: Mapping[int, str], device: torch.device
    ) -> None:
        super().__init__()
        self.graph = Graph(device=str(device))
        self.modules: list[str] = [""]
        self.begun = [0]  # of each module that runs: how many tensors there were when it began
        self.calls = Calls(self)
        self.outside = KeptOutside()
        self.paused = False
        self.notes_on_sizes: Notes | None = None
        self.given: dict[int, str] = {}  # where in the arguments a tensor of the graph is
        self.buffers: set[int] = set()
        self.noted: dict[int, dict[int, Expression | None]] = {}  # by call, of the noted integers among its arguments
        self.evaluator = StaticEvaluator(self.graph)
        self.real, self.places = real, places
        self.device = device
        self.number_returning: dict[str, str] = {}  # modules that return numbers, and whose code gets them
        self.overwritten: dict[Any, Ref] = {}  # by place, what a call under way has written into
        self.written: list[tuple[Storage, int]] = []  # memory that was written in place, and what it held before
        self._tensors: dict[int, Tracked] = {}
        self._places: dict[Any, Tensor] = {}
        self._alive: list[Tensor] = []  # an id must not be used again while it is in the tables
        self._infos: dict[tuple[torch.Size, torch.dtype, bool], TensorInfo] = {}  # one for all tensors that are alike
        self._layers = {path: torch_layer(module) for path, module in model.named_modules()}
        found = {path: float8_of(module) for path, module in model.named_modules()}
        self._rounding = {path: str(how) for path, how in found.items() if how is not None}
        for name, parameter in model.named_parameters():  # a tied parameter under its first name
            tracked = self._track(parameter, static=False)
            self.graph.parameters[tracked.value.tensor] = name

    # -- what is recorded --------------------------------------------------------------------------------------------

    def see(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Run the operator and note it."""
        if communicates(func):  # also where a module that is not traced is run
            raise RuntimeError(
                f"the model's own code communicates with other processes ({func}), but one process alone traces it:"
                " give that code what it asks the others for, or leave it out"
            )
        if self.paused:
            return func(*args, **kwargs)
        if transforms.are_active():
            return self._transformed(func, args, kwargs)
        name = name_of(func)
        arguments = named_arguments(func, args, kwargs)
        reads = tuple((key, self._read(value)) for key, value in arguments)
        if name == _INDEX:
            name, reads = self._with_numbers(reads)
        known = record(name)
        if known is None and is_made_of_others(func) and record(functional(name)) is None:
            with self:
                return func.decompose(*args, **kwargs)
        if (declaration := declaration_of(name)) is not None:
            with self.pause():
                try_declaration(declaration, func, dict(arguments), self.value_if_known)
        try:
            if known and known.results:
                result = self._results(known.results, reads)
            else:
                with without_python_dispatcher():
                    result = func(*args, **kwargs)
        except (DataDependentOutputException, DynamicOutputShapeException):
            result = self._by_value(func, reads)
            if result is NotImplemented:  # it asks for a value inside, and does something else with what has none
                with self:
                    result = func.decompose(*args, **kwargs)
                if result is NotImplemented:
                    raise
                return result
        written = _written(func, arguments)
        if written:
            self._write(functional(name), reads, written, result)
            return result
        if not _results_of(result):  # a check, or a size
            return result
        inputs = _tensors_given(arguments)
        if known and (known.identity == "always" or (known.identity and inputs[0].dtype == result.dtype)):
            if id(result) not in self._tensors:
                self._alias(result, inputs[0])
            return result
        if known is None and func.namespace not in _BUILT_IN:
            with self.pause():
                found = found_declaration(schema_of(func).name, func, dict(arguments), result, self.value_if_known)
            if found is not None and is_to_be_found(name):
                add(found)
            elif found is not None:
                self.graph.found[name] = found.code
        self._note(name, reads, result, inputs)
        return result

    def boundary(self, module: str, side: str, key: str, tensor: Tensor) -> Tensor:
        """Note that ``tensor`` enters or leaves a module; what goes on from there is the tensor returned."""
        if type(tensor) is FakeTensor:
            with beneath_modes():
                marked: Tensor = tensor.view(tensor.shape)
        else:
            with self.pause():
                marked = tensor.view(tensor.shape)
        with without_functions():  # what the tracer asks of tensors is no call of the model's code
            # Logits that only look whole are known by what this rank holds of them.
            inside, outside = inside_of(tensor), inside_of(marked)
            source = self._read(inside)
            value = self._new(outside, self.graph.tensors[source.tensor].is_static)
            crossing = Boundary(module, side, key)
            layer = self._layers.get(module, "")
            operator = Operator("boundary", (("input", (source,)),), (value.tensor,), module, "", layer, crossing)
            self.graph.operators.append(operator)
            crossed = (*self._tracked(inside).crossed, crossing)
            self._keep(outside, Tracked(value, *self._place(inside), crossed))
        return marked

    def take_back(self, path: str, marks: range) -> None:
        """Let no layout change at those of these marks that are of a container, at ``path``, or in it.

        The module changed the container, so what it was given is the very one that its caller has.
        """
        for at in marks:
            operator = self.graph.operators[at]
            if isinstance(operator.boundary, Boundary) and operator.boundary.key.startswith(path):
                arguments = (("self", Ref(operator.inputs[0])),)
                self.graph.operators[at] = replace(operator, name=_SAME, arguments=arguments, boundary=None)
        # These first: where others of the marks change the layout, that comes after all of them.
        marked = self.graph.operators[marks.start : marks.stop]
        self.graph.operators[marks.start : marks.stop] = sorted(marked, key=lambda mark: mark.boundary is not None)

    @contextlib.contextmanager
    def pause(self) -> Iterator[None]:
        """Let operators run without being recorded."""
        before, self.paused = self.paused, True
        try:
            yield
        finally:
            self.paused = before

    @contextlib.contextmanager
    def drawing(self, draws: int) -> Iterator[None]:
        """Let code that draws random numbers in Python get these, and note whether it does."""
        self.evaluator.draws = draws
        with synthetic_draws(draws):
            begun = states()
            yield
            self.graph.has_drawn |= states() != begun

    def enter(self, module: str) -> None:
        """A module's forward begins."""
        self.modules.append(module)
        self.begun.append(len(self.graph.tensors))
        self.calls.counts.append({})
        self.calls.runs.append(len(self.graph.entered))
        self.calls.in_function.append(self.calls.in_function[-1] or is_in_function(sys._getframe(1)))
        self.graph.entered.append(module)

    def leave(self) -> None:
        """The innermost module's forward ends."""
        self.modules.pop()
        self.begun.pop()
        self.calls.counts.pop()
        self.calls.runs.pop()
        self.calls.in_function.pop()

    def value(self, tensor: Tensor) -> Tensor:
        """The value of a tensor, on the CPU.

        Raises:
            NoValue: if it does not follow from the batch alone.
        """
        return self.evaluator.value(self._read(tensor).tensor)

    def value_if_known(self, tensor: Tensor) -> Tensor | None:
        """The same, or ``None``."""
        try:
            return self.value(tensor) if self.graph.tensors[self._read(tensor).tensor].is_static else None
        except NoValue:
            return None

    def array(self, tensor: Tensor) -> Any:
        """An array of numpy's with the value of a tensor, which may follow from synthetic choices.

        Raises:
            NoValue: if it depends on a parameter otherwise.
        """
        ref = self._read(tensor)
        with self.pause(), unset_fake_temporarily():
            made = self.evaluator.value(ref.tensor, or_synthetic=True).clone().numpy()
        if not self.graph.tensors[ref.tensor].is_static:
            self._asks([ref])
        return made

    def kind_of(self, module: str) -> tuple[str, str]:
        """Which layer of ``torch.nn`` a module is, and how its product rounds."""
        return self._layers.get(module, ""), self._rounding.get(module, "")

    def tracked(self, tensor: Tensor) -> Tracked | None:
        """What is known of a tensor object, if it was seen before."""
        return self._tensors.get(id(tensor))

    def keep_as(self, tensor: Tensor, tracked: Tracked) -> None:
        """Know a tensor object as this."""
        self._keep(tensor, tracked)

    def begin(self, tensor: Tensor) -> None:
        """Add a tensor that no operator makes."""
        self._track(tensor, static=not tensor.requires_grad)

    def number_of(self, tensor: Tensor) -> int:
        """The number of a tensor's present value in the graph."""
        return self._read(tensor).tensor

    def note(self, name: str, inputs: Sequence[Tensor], result: Any) -> None:
        """Add an operator of this name to the graph."""
        self._note(name, (("input", tuple(self._read(tensor) for tensor in inputs)),), result, [])

    def call(
        self, name: str, arguments: Sequence[tuple[str, Any]], results: Sequence[tuple[Sequence[int], str]]
    ) -> list[Tensor]:
        """Add a call of a function that is declared: its results, of these shapes and dtypes (empty: its first's)."""
        reads = tuple((key, self._read(value)) for key, value in arguments)
        made = [self.result(shape, dtype, reads) for shape, dtype in results]
        outer = self.calls.current
        if outer[0] < 0:  # no handler of torch functions has seen the call
            self.calls.current = (-1, source_line(sys._getframe(1)))
        try:
            self._note(name, reads, made, [])
        finally:
            self.calls.current = outer
        return made

    def keep(self, module: str, name: str, is_buffer: bool, tensor: Tensor) -> None:
        """Note that a module has a tensor as an attribute after the forward, unless no parameter went into it."""
        known = self.known(tensor)
        if known is not None and not self.graph.tensors[known.tensor].is_static:
            arguments = (("input", known), ("name", name), ("is_buffer", is_buffer))
            self.graph.operators.append(Operator(KEPT, arguments, (), module, f"kept as {name}"))

    def outputs(self, tensors: Sequence[Tensor]) -> None:
        """Say which tensors the model returns."""
        self.graph.outputs = [self._read(inside_of(tensor)).tensor for tensor in tensors]

    def _transformed(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Run an operator under a function transform, and note it on the tensors inside."""
        transforms.check()
        arguments = named_arguments(func, *transforms.unwrapped((args, kwargs)))
        reads = tuple((key, self._read(value)) for key, value in arguments)
        written = _written(func, arguments)
        if written and not all(self.graph.tensors[ref.tensor].is_static for _, value in reads for ref in refs(value)):
            raise NoValue(f"{func} writes in place under torch.vmap")  # what else looks at the memory is not known
        result = func(*args, **kwargs)
        if written:
            self._write(f"{MAPPED}{func}", reads, written, transforms.unwrapped(result))
        elif _results_of(result):
            inputs = _tensors_given(arguments)
            self._note(f"{MAPPED}{func}", reads, transforms.unwrapped(result), inputs)
        return result

    def _with_numbers(self, reads: tuple[tuple[str, Any], ...]) -> tuple[str, tuple[tuple[str, Any], ...]]:
        """An index that Python's code gives as a list of consecutive numbers (``x[..., [-2], :]``), as the slice it is.

        The result has memory of its own all the same.
        """
        named = dict(reads)
        dims = [dim for dim, index in enumerate(named["indices"]) if index is not None]
        numbers = self.calls.numbers
        if not numbers or len(dims) != 1:
            return _INDEX, reads
        size = self.graph.tensors[named["self"].tensor].shape[dims[0]]
        places = [number + size if number < 0 else number for number in numbers]
        first = places[0]
        if places != list(range(first, first + len(places))) or not 0 <= first <= size - len(places):
            return _INDEX, reads
        run = (("dim", dims[0]), ("start", first), ("end", first + len(places)), ("step", 1))
        return "aten.slice.Tensor", (("self", named["self"]), *run)

    def _by_value(self, func: Any, reads: tuple[tuple[str, Any], ...]) -> Any:
        """What an operator gives whose result hangs on values; ``NotImplemented`` if they are not the batch's alone."""
        known = record(str(func))

        asked: list[Ref] = []

        def value(name: str, leaf: Any) -> Any:
            if isinstance(leaf, tuple):
                return [value(name, item) for item in leaf]
            if not isinstance(leaf, Ref):
                return leaf
            if known and name == known.takes:
                return self.evaluator.empty(leaf)
            if not self.graph.tensors[leaf.tensor].is_static:
                asked.append(leaf)
            return self.evaluator.value(leaf.tensor, or_synthetic=True)

        with self.pause():
            with unset_fake_temporarily(), torch.no_grad():
                try:
                    values = {name: value(name, leaf) for name, leaf in reads}
                except NoValue:
                    return NotImplemented
                positional = [values.pop(a.name) for a in schema_of(func).arguments if not a.kwarg_only]
                result = func(*positional, **values)
            self._asks(asked)
            if not isinstance(result, Tensor):
                sources = {
                    source for _, leaf in reads for ref in refs(leaf) for source in self.evaluator.sources(ref.tensor)
                }
                are_numbers = (not self.graph.tensors[source].is_floating for source in sources)
                told = itertools.compress(sources, are_numbers)
                self.graph.asked |= {self.given[source] for source in told if source in self.given}
            return tree_map_only(Tensor, self.without_values, result)

    def without_values(self, real: Tensor, device: torch.device | str | None = None) -> Tensor:
        """A tensor of the trace in the place of one with values, on its device if no other is said."""
        return torch.empty(real.shape, dtype=real.dtype, device=device or self.device)

    def constant(self, real: Tensor, device: torch.device | str) -> Tensor:
        """A tensor of the trace for one that Python's numbers make, in the graph as torch makes it: it detaches one."""
        with self.pause():
            first, made = self.without_values(real, device), self.without_values(real, device)
        ref = self._read(first)
        self.evaluator.known[ref.tensor] = real
        self._note("aten.detach.default", (("self", ref),), made, [])
        return made

    def _asks(self, asked: Sequence[Ref]) -> None:
        """Note that the running module's code asks for the values of these tensors, and whether any are synthetic."""
        if asked:
            self._append(ASKED, (("input", tuple(dict.fromkeys(asked))),), [])
        if any(leaf.tensor in self.evaluator.synthetic for leaf in asked):
            self.graph.value_reading.add(self.modules[-1])

    def number_if_given(self, tensor: Tensor) -> int | None:
        """The same for one that has a number, and for any argument: its shape may be asked for before it is used."""
        return self.number_of(tensor) if id(tensor) in self.places else self.known_number(tensor)

    def known_number(self, tensor: Tensor) -> int | None:
        """The number of a tensor's present value in the graph, if it has one."""
        tracked = self._tensors.get(id(tensor))
        return None if tracked is None else self._present(tracked).tensor

    def known(self, tensor: Tensor) -> Ref | None:
        """A tensor's present value, if it, or another object for it, was seen before."""
        tensor = inside_of(tensor)  # of logits that only look whole
        found = self._tensors.get(id(tensor))
        is_plain = not transforms.is_wrapper(tensor)
        if found is None and is_plain and (same := self._places.get(_place_key(tensor))) is not None:
            found = self._tensors[id(same)]
        return None if found is None else self._present(found)

    def _note(self, name: str, reads: Any, result: Any, inputs: list[Tensor]) -> Operator:
        outputs = _results_of(result)
        operator = self._append(name, reads, outputs)
        for number, (output, tensor) in enumerate(zip(outputs, operator.outputs, strict=True)):
            tracked, memory = Tracked(Ref(tensor)), storage_key(output)
            base = next((other for other in inputs if storage_key(other) == memory), None)
            if base is not None:
                storage, path, version = self._place(base)
                crossed = self._tracked(base).crossed
                tracked = Tracked(Ref(tensor), storage, (*path, _output(operator, number)), version, crossed)
            self._keep(output, tracked)
        return operator

    def _append(self, name: str, reads: Any, outputs: list[Tensor]) -> Operator:
        module = self.modules[-1]
        if name == RECORD:
            named = dict(reads)
            name, reads = f"record:{named['name']}", (("input", named["inputs"]), ("detail", named["detail"]))
        call, source = self.calls.current
        if transforms.are_active():
            call = -1  # what is wrapped cannot be converted
        layer = self._layers.get(module, "")
        rounding = self._rounding.get(module, "") if name == _LINEAR else ""
        static = all(self.graph.tensors[tensor].is_static for tensor in read_by(reads))
        values = tuple([self._new(output, static).tensor for output in outputs])
        own = are_own_numbers_noted()
        operator = Operator(name, reads, values, module, source, layer, call=call, own_numbers=own, rounding=rounding)
        self.graph.operators.append(operator)
        return operator

    def _new(self, tensor: Tensor, static: bool) -> Ref:
        kind = tensor.shape, tensor.dtype, static
        info = self._infos.get(kind)
        if info is None:
            info = self._infos[kind] = TensorInfo(
                shape=tuple(int(size) for size in tensor.shape),
                dtype=str(tensor.dtype).removeprefix("torch."),
                itemsize=tensor.element_size(),
                is_static=static,
                is_differentiable=not static and (tensor.is_floating_point() or tensor.is_complex()),
            )
        self.graph.tensors.append(info)
        return Ref(len(self.graph.tensors) - 1)

    def _results(self, results: Callable[[Shapes], Any], reads: tuple[tuple[str, Any], ...]) -> Any:
        """Results of the shapes and dtypes that a record says."""
        tensors = self.graph.tensors
        shapes = Shapes(reads, (), lambda tensor: tensors[tensor].shape)
        made = [self.result(shape, dtype, reads) for shape, dtype in results(shapes)]
        return made[0] if len(made) == 1 else tuple(made)

    def result(self, shape: Sequence[float], dtype: str, reads: tuple[tuple[str, Any], ...]) -> Tensor:
        """A tensor of the trace that an operator makes, by default of its first operand's dtype."""
        given = [self.graph.tensors[ref.tensor] for _, value in reads for ref in refs(value)]
        with self.pause():
            sizes = [int(size) for size in shape]
            made = torch.empty(sizes, dtype=getattr(torch, dtype or given[0].dtype), device=self.device)
            if made.is_floating_point() and torch.is_grad_enabled() and any(info.is_differentiable for info in given):
                made = made.requires_grad_().clone()  # code may ask, and may write into it
        return made

    # -- values and aliases ------------------------------------------------------------------------------------------

    def _read(self, value: Any) -> Any:
        """An argument as the graph knows it: tensors as references to their present values."""
        if isinstance(value, Tensor):
            return self._present(self._tracked(value))
        return tuple(self._read(item) for item in value) if isinstance(value, tuple) else plain(value)

    def _tracked(self, tensor: Tensor) -> Tracked:
        found = self._tensors.get(id(tensor))
        if found is not None:
            return found
        same = self._places.get(_place_key(tensor))
        if same is not None:  # autograd gave the same tensor another object
            self._alias(tensor, same)
            return self._tensors[id(tensor)]
        return self._track(tensor, static=not tensor.requires_grad)  # an input may have a gradient, of what is outside

    def _track(self, tensor: Tensor, static: bool) -> Tracked:
        tracked = self._keep(tensor, Tracked(self._new(tensor, static)))
        real = self.real.get(id(tensor), getattr(tensor, "constant", None))
        if static and real is None and not isinstance(tensor, FakeTensor) and not tensor.is_meta:
            with self.pause(), unset_fake_temporarily():  # made by code that the trace does not see
                real = tensor.detach().clone()
        if static and real is not None:
            self.evaluator.known[tracked.value.tensor] = real
        if id(tensor) in self.places:
            self.given[tracked.value.tensor] = self.places[id(tensor)]
        elif id(tensor) in self.real:
            self.buffers.add(tracked.value.tensor)
        return tracked

    def _keep(self, tensor: Tensor, tracked: Tracked) -> Tracked:
        self._tensors[id(tensor)] = tracked
        self._places[_place_key(tensor)] = tensor
        self._alive.append(tensor)
        return tracked

    def _alias(self, tensor: Tensor, of: Tensor) -> None:
        """A second object for the same value."""
        tracked = self._tracked(of)
        self._keep(tensor, Tracked(self._present(tracked), *self._place(of), tracked.crossed))

    def _place(self, tensor: Tensor) -> tuple[Storage, tuple[Operator, ...], int]:
        """Which part of which storage a tensor is."""
        tracked = self._tracked(tensor)
        if tracked.storage is None:
            tracked.storage = Storage(tracked.value)
        return tracked.storage, tracked.path, tracked.version

    def _present(self, tracked: Tracked) -> Ref:
        """The value of a tensor object now, after what was written through other objects that share its memory."""
        storage = tracked.storage
        if storage is None or tracked.version == storage.version:
            return tracked.value
        if storage.pending and storage.pending[-1][0] == tracked.path:
            value = storage.pending[-1][1]
        else:
            for path, written in storage.pending:
                storage.root = self._scatter(storage.root, path, written)
            storage.pending.clear()
            value = storage.root
            for view in tracked.path:
                value = self._again(view, value)
        tracked.value, tracked.version = value, storage.version
        return value

    def _write(self, name: str, reads: Any, written: list[Tensor], result: Any) -> None:
        """An operator that writes in place: what it returns, under this name, is the written tensor from now on."""
        for tensor in written:
            self.overwritten.setdefault(_place_key(tensor), self._read(tensor))
        operator = self._append(name, reads, written)
        for tensor, value in zip(written, operator.outputs, strict=True):
            storage, path, _ = self._place(tensor)
            self.written.append((storage, storage.root.tensor))
            storage.version += 1
            if path:
                storage.pending.append((path, Ref(value)))
            else:
                storage.root, storage.pending = Ref(value), []
            tracked = self._tracked(tensor)
            tracked.value, tracked.version = Ref(value), storage.version
            self.graph.overwritten |= set(tracked.crossed)
        for leaf in _results_of(result):
            if id(leaf) not in self._tensors:
                self._alias(leaf, written[0])

    def _scatter(self, root: Ref, path: tuple[Operator, ...], value: Ref) -> Ref:
        """The root with ``value`` written at the end of a path of views."""
        view, *rest = path
        if rest:
            value = self._scatter(self._again(view, root), tuple(rest), value)
        name, arguments = written_through(view)
        return self._add(name, (("self", root), ("src", value), *arguments), view, root)

    def _again(self, view: Operator, source: Ref) -> Ref:
        """The same view of another value."""
        arguments = tuple((key, source if isinstance(value, Ref) else value) for key, value in view.arguments)
        return self._add(view.name, arguments, view, Ref(view.outputs[0]))

    def _add(self, name: str, arguments: Any, view: Operator, like: Ref) -> Ref:
        """Add an operator that the code did not call, at the place of ``view``."""
        sources = [value.tensor for _, value in arguments if isinstance(value, Ref)]
        static = all(self.graph.tensors[tensor].is_static for tensor in sources)
        differentiable = any(self.graph.tensors[tensor].is_differentiable for tensor in sources)
        info = self.graph.tensors[like.tensor]
        self.graph.tensors.append(
            TensorInfo(info.shape, info.dtype, info.itemsize, is_static=static, is_differentiable=differentiable)
        )
        value = Ref(len(self.graph.tensors) - 1)
        self.graph.operators.append(Operator(name, arguments, (value.tensor,), view.module, view.source))
        return value


transforms.follow_custom_functions(Tracer)


class Calls(TorchFunctionMode):
    """Knows which Python call is running, so that an operator can be found again in the running model.

    Attributes:
        current: index of the call under way (-1: none) and the user's source line.
        numbers: the list of numbers that the call under way takes a tensor's elements by, if it is such a call.
    """

    def __init__(self, tracer: Tracer) -> None:
        super().__init__()
        self.tracer = tracer
        self.current: tuple[int, str] = (-1, "")
        self.numbers: Sequence[int] = ()
        self.counts: list[dict[Any, int]] = [{}]
        self.runs = [0]
        self.in_function = [False]
        self._sources: dict[tuple[str, int], str] = {}

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        self.tracer.outside.look(sys._getframe(1))
        if self.tracer.paused:
            return func(*args, **kwargs)
        if (inside := by_call(func, kwargs)) is not None:
            with self:
                return inside(*args, **kwargs)
        caller = calling_frame(func, sys._getframe(1))
        key = call_key(caller, func)
        occurrence = self.counts[-1][key] = self.counts[-1].get(key, -1) + 1
        site = CallSite(*key, occurrence)
        calls = self.tracer.graph.calls
        number = len(calls)
        groups, given = grouped_leaves(args, kwargs)
        leaves = [self._leaf(leaf) for leaf in given]
        if any(type(leaf) is NotedInt for leaf in given):
            self.tracer.noted[number] = _expressions(given)
        module, instruction, run = self.tracer.modules[-1], caller.f_lasti, self.runs[-1]
        calls.append(TorchCall(module, site, tuple(leaves), (), groups, instruction=instruction, run=run))
        outer, self.current = (self.current, self.numbers), (number, self._source(caller))
        self.numbers = _numbers(args[1]) if func is Tensor.__getitem__ else ()
        recorded = len(self.tracer.graph.operators)
        self.tracer.overwritten.clear()
        if func in _INDEXING:
            if self.tracer.notes_on_sizes is not None and is_user_code(caller.f_code.co_filename):
                self._ask_ends(args[0], args[1], self.tracer.notes_on_sizes)
            args = (args[0], self._with_tensors(args[1]), *args[2:])
        try:
            if func is Tensor.numpy:
                result: Any = self.tracer.array(args[0])
            elif func in _CONSTANTS:
                result = self._constant(func, args, kwargs)
            else:
                result = func(*args, **kwargs)
        except Exception:
            self.tracer.graph.failed_at = self.current[1]
            raise
        finally:
            self.current, self.numbers = outer
        if len(self.tracer.graph.operators) == recorded:  # it looked at a shape
            if func in _MEASURING and isinstance(leaves[0], Ref) and is_user_code(caller.f_code.co_filename):
                self.tracer.graph.measured.setdefault(self.tracer.modules[-1], set()).add(leaves[0].tensor)
            made = self._made(result)
            inspection = TorchCall(module, site, tuple(leaves), (), groups, made, instruction=instruction, run=run)
            self.tracer.graph.inspections.append(inspection)
            del calls[number:]
            self.tracer.noted.pop(number, None)
            if (
                self.tracer.notes_on_sizes is not None
                and func in _MEASURING
                and is_user_code(caller.f_code.co_filename)
            ):
                return self._sized(func, given[0], leaves[1:], result, self.tracer.notes_on_sizes)
            return result
        arguments, written = leaves, list[tuple[int, Ref]]()
        for at, leaf in enumerate(given):
            if isinstance(leaf, Tensor):
                now, old = self._leaf(leaf), self._overwritten(leaf)
                if old is not None and isinstance(now, Ref):
                    written.append((at, now))
                if leaves[at] is None:  # it is recorded where it is read first, as what Python's numbers alone make
                    arguments[at] = now if old is None else old
        results = tuple(self._leaf(leaf) for leaf in call_leaves(result))
        made = self._made(result)
        given_to, overwritten = tuple(arguments), tuple(written)
        calls[number] = TorchCall(
            module, site, given_to, results, groups, made, overwritten, instruction, run, self.in_function[-1]
        )
        return result

    def _sized(self, func: Any, tensor: Any, dims: Sequence[Any], told: Any, notes: Notes) -> Any:
        """What a tensor says of its shape, noted."""
        number = self.tracer.number_if_given(tensor)
        if number is None or number in self.tracer.graph.parameters:
            return told
        shape = notes.sized(number, self.tracer.graph.tensors[number].shape)
        if func is Tensor.__len__:  # of which Python makes an ordinary integer
            notes.tell(Question(OF_TENSOR, (number, 0)))
            return told
        if func in _COUNTING:
            return math.prod(shape)
        if type(told) is int:
            return shape[dims[0] if dims else 0]
        return shape

    def _ask_ends(self, tensor: Tensor, index: Any, notes: Notes) -> None:
        """Note that slices reach beyond a tensor's ends: then all of a dim is taken, and no operator runs."""
        number = self.tracer.number_if_given(tensor)
        if number is None:
            return
        shape, dim = notes.sized(number, self.tracer.graph.tensors[number].shape), 0
        parts = index if isinstance(index, tuple) else (index,)
        lengths = [_dims_of(part) for part in parts]
        for part, length in zip(parts, lengths, strict=True):
            if part is Ellipsis:
                dim = max(len(shape) - sum(lengths), 0) + dim
            elif isinstance(part, slice) and dim < len(shape):
                for end in (part.start, part.stop):
                    if isinstance(end, int) and abs(plain(end)) >= plain(shape[dim]):
                        notes.ask("ge", (abs(end), shape[dim]))
            dim += length

    def _source(self, caller: FrameType) -> str:
        """The :func:`source_line` of a call, which is read once for each line that calls from user code."""
        if not is_user_code(caller.f_code.co_filename):
            return source_line(caller)
        place = caller.f_code.co_filename, caller.f_lineno
        if place not in self._sources:
            self._sources[place] = source_line(caller)
        return self._sources[place]

    def _constant(self, func: Any, args: Any, kwargs: Any) -> Tensor:
        """A tensor made of Python's numbers, whose value is noted; in a list with them may be tensors."""
        try:
            real = self._made_of(func, args, kwargs)
        except NoValue:
            return func(*args, **kwargs)
        given = (*args, *kwargs.values())
        device = kwargs.get("device") or torch.get_default_device()
        if not _tensors(given) and not kwargs.get("requires_grad"):
            return self.tracer.constant(real, device)
        in_list = bool(_tensors(given)) and not any(isinstance(value, Tensor) for value in given)
        made: Tensor = self.tracer.without_values(real, device) if in_list else func(*args, **kwargs)
        self.tracer.evaluator.known.setdefault(self.tracer._read(made).tensor, real)
        return made

    def _made_of(self, func: Any, args: Any, kwargs: Any) -> Tensor:
        """What a function makes of numbers, and of tensors whose values are known, on the CPU."""
        with self.tracer.pause(), unset_fake_temporarily():
            args, kwargs = tree_map_only(Tensor, self.tracer.value, (args, kwargs))
            made: Tensor = func(*args, **{**kwargs, "device": torch.device("cpu")})
            return made.detach()

    def _with_tensors(self, index: Any) -> Any:
        """An index with tensors of known values for its lists: those that torch makes of lists have none."""
        if isinstance(index, tuple):
            return tuple(self._tensor_of(part) if isinstance(part, (list, tuple, range)) else part for part in index)
        # A list of tensors or slices is one index for each dim.
        is_one = isinstance(index, list) and all(isinstance(part, int) for part in index)
        return self._tensor_of(index) if is_one else index

    def _tensor_of(self, numbers: Sequence[Any]) -> Any:
        try:
            return self._made_of(torch.tensor, (list(numbers),), {} if numbers else {"dtype": torch.long})
        except (NoValue, RuntimeError, TypeError, ValueError):  # torch says what is wrong with such an index
            return numbers

    def _made(self, result: Any) -> tuple[Ref, ...]:
        """The tensors that a call returned; not those that Python's numbers alone made, until they are read."""
        found = [self._leaf(leaf) or self.tracer.known(leaf) for leaf in _tensors(result)]
        return tuple(ref for ref in found if ref is not None)

    def _overwritten(self, leaf: Any) -> Ref | None:
        """What a tensor was before the call under way wrote into it; ``None`` if it did not."""
        overwritten = self.tracer.overwritten
        if not overwritten or not isinstance(leaf, Tensor) or transforms.is_wrapper(leaf):
            return None
        return overwritten.get(_place_key(inside_of(leaf)))

    def _leaf(self, leaf: Any) -> Any:
        if isinstance(leaf, Tensor):
            tracked = self.tracer._tensors.get(id(leaf))
            return None if tracked is None else self.tracer._present(tracked)
        number = plain(leaf)
        return number if type(number) is int else None


def inside_of(tensor: Tensor) -> Tensor:
    """What a rank has of logits that only look whole; any other tensor itself."""
    local: Tensor = getattr(tensor, "local", tensor)
    return local


def torch_layer(module: nn.Module) -> str:
    """Which layer of ``torch.nn`` a module is, or is a subclass of whose forward calls that layer's.

    Empty for other modules, and those of modules. A forward that computes the layer's function by itself
    (``F.linear(x, self.weight)``), or that was put on the object, would not go through the forward of a parallel layer.
    """
    replaced = vars(module).get("forward")
    if replaced is not None and not str(replaced.__module__).startswith("lightning_autotp."):
        return ""
    kinds = [kind for kind in type(module).__mro__ if kind.__module__.startswith("torch.nn.modules.")]
    names = [kind.__name__ for kind in kinds if kind is not nn.Module and not kind.__name__.startswith("_")]
    if not names or next(module.children(), None) is not None:
        return ""
    own = next(kind for kind in type(module).__mro__ if "forward" in vars(kind))
    is_known = own in kinds or own.__module__.startswith("lightning_autotp.parallel.")
    code = getattr(inspect.unwrap(vars(own)["forward"]), "__code__", None)
    return names[-1] if is_known or code is None or "forward" in code.co_names else ""


def _dims_of(part: Any) -> int:
    """How many of a tensor's dims a part of an index is for."""
    if part is None or part is Ellipsis:
        return 0
    return part.ndim if isinstance(part, Tensor) and part.dtype == torch.bool else 1


def _expressions(leaves: Sequence[Any]) -> dict[int, Expression | None]:
    """By its value, how a noted integer among a call's arguments follows; ``None`` where others have the same value."""
    found: dict[int, Expression | None] = {}
    for leaf in leaves:
        if type(leaf) is int or type(leaf) is NotedInt:
            expression = leaf.expression if type(leaf) is NotedInt else leaf
            value = plain(leaf)
            found[value] = expression if found.get(value, expression) == expression else None
    return found


def _numbers(index: Any) -> list[int]:
    """The one list of numbers in an index; empty if there is none, or more than one."""
    lists = [part for part in (index if isinstance(index, tuple) else (index,)) if isinstance(part, list)]
    numbers = [plain(number) for number in lists[0]] if len(lists) == 1 else []
    return numbers if all(type(number) is int for number in numbers) else []


def _written(func: Any, arguments: Sequence[tuple[str, Any]]) -> list[Tensor]:
    """The tensors that an operator writes in place."""
    return [leaf for number in written_arguments(func) for leaf in _tensors(arguments[number][1])]


def _tensors_given(arguments: Sequence[tuple[str, Any]]) -> list[Tensor]:
    """The tensors that an operator is given."""
    found: list[Tensor] = []
    for _, value in arguments:
        if isinstance(value, Tensor):
            found.append(value)
        elif isinstance(value, tuple):
            found += _tensors(value)
    return found


def _results_of(result: Any) -> list[Tensor]:
    """The tensors that an operator gives."""
    if isinstance(result, Tensor):
        return [result]
    return [leaf for leaf in tree_leaves(result) if isinstance(leaf, Tensor)]


def _tensors(value: Any) -> list[Tensor]:
    return [leaf for leaf in call_leaves(value) if isinstance(leaf, Tensor)]


def _place_key(tensor: Tensor) -> Any:
    """Equal for two objects that are the same tensor."""
    return storage_key(tensor), tensor.storage_offset(), tensor.shape, tensor.stride(), tensor.dtype


def _output(operator: Operator, number: int) -> Operator:
    """A view with several outputs (a split), as the one that gives this output."""
    return Operator(
        operator.name,
        (*operator.arguments, *((("output", number),) if len(operator.outputs) > 1 else ())),
        (operator.outputs[number],),
        operator.module,
        operator.source,
    )
