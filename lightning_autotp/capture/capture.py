"""From a model to its :class:`~lightning_autotp.operators.graph.Graph`: one trace without values, in training mode.

The model's Python runs once on fake tensors, and :mod:`~lightning_autotp.capture.tracer` records its operators. The
trace works on a copy (a forward may leave tensors in caches and attributes); every tensor that crosses a module
boundary is marked, so that the flat graph still knows the module tree.
"""

from __future__ import annotations

import contextlib
import copy
import inspect
import os
import sys
import types
import warnings
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import torch
import transformers.utils
from torch import Tensor, nn

from lightning_autotp.capture import vmap as transforms
from lightning_autotp.capture.attribute_reads import note_attributes, note_own_attributes
from lightning_autotp.capture.call_sites import is_user_code
from lightning_autotp.capture.compiled_code import noting_questions
from lightning_autotp.capture.declared_calls import autograd_function_in, higher_order_operator_in, noting_declared
from lightning_autotp.capture.experts import noting_experts
from lightning_autotp.capture.nested import (
    Copied,
    constants_among,
    copied,
    is_unused,
    map_leaves,
    map_tensors,
    tensors_in,
)
from lightning_autotp.capture.noted_numbers import Notes
from lightning_autotp.capture.opaque import LARGEST, NotRun, OpaqueForward
from lightning_autotp.capture.recording import RECORD, under_way
from lightning_autotp.capture.repeated_layers import RepeatedLayers
from lightning_autotp.capture.size_origins import SizeOrigins
from lightning_autotp.capture.static_values import NoValue
from lightning_autotp.capture.synthetic_draws import HIGH, LOW, led_by_draws
from lightning_autotp.capture.tracer import Tracer, inside_of
from lightning_autotp.layouts.places import EVERY, Boundary
from lightning_autotp.layouts.step_size import StepSize
from lightning_autotp.operators.declared import advice_on, declarable_name, has_advice
from lightning_autotp.operators.graph import Constant, Graph, ModuleRun
from lightning_autotp.operators.notation import DeclarationError
from lightning_autotp.operators.questions import SIZE, Question
from lightning_autotp.private.fake_tensors_private import RememberingFakeTensorMode
from lightning_autotp.private.torch_private import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensorMode,
    buffers_of,
    enable_python_dispatcher,
    fake_like,
    has_values,
    parameters_of,
    quiet_fake_tensors,
    without_functions,
)
from lightning_autotp.private.transformers_private import fake_tensors_as_ordinary
from lightning_autotp.quantized.float8 import float8_of, note_float8
from lightning_autotp.quantized.noted import format_of

_BATCH_PRIMES = (3, 5, 7, 11, 13)
_SEQUENCE_PRIMES = (61, 67, 71, 73, 79, 83, 89, 97, 101, 103, 107, 109, 113, 127, 131, 137, 139)
_SEEDS = 8
"""With so many seeds it is tried to run what the highest and the lowest random numbers do not run."""
_MOST_SIZES = 3
"""How many numbers say how large something is: frames, height and width."""


class CaptureError(RuntimeError):
    """The model could not be traced; the message names the module and the line."""


def refuse_scripted(model: nn.Module) -> None:
    """Refuse a model with modules of TorchScript, which run no Python.

    Raises:
        CaptureError: naming the first one.
    """
    for path, module in model.named_modules():
        if isinstance(module, torch.jit.ScriptModule):
            raise CaptureError(
                f"{path or 'the model'} ({type(module).__name__}) was made by torch.jit.script, trace or load, so its"
                " code can neither be traced nor run on parts of its weights: use the module that it was made of, or,"
                " if it is another model beside the one that trains, leave it out: AutoTPStrategy(models=[...])"
            )


class ExampleCall(NamedTuple):
    """Example inputs that are both positional and keyword arguments."""

    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]


def capture_local(
    model: nn.Module,
    example_inputs: Any,
    first: Graph | None = None,
    *,
    training: bool = True,
) -> Graph:
    """Like :func:`capture`, but where the model's forward raises, the graph of what ran until then.

    For a model that may have been localized wrongly: the comparison then tells where it goes wrong. What was opaque to
    the ``first`` trace is so to this one, on the same device, and its code draws the same numbers.
    """
    first = first or Graph(device="")
    draws = first.draws or (HIGH,)
    return _capture(model, example_inputs, first.opaque, training, first.device, draws, until_failure=True)


def capture(
    model: nn.Module,
    example_inputs: Any = None,
    opaque: frozenset[str] = frozenset(),
    *,
    training: bool = True,
    device: str = "",
    led: frozenset[str] = frozenset(),
) -> Graph:
    """Trace one forward of ``model``, without values.

    Args:
        model: any module; it is neither changed nor run. Its parameters may be on any device, also on meta.
        example_inputs: one batch: a tensor, a tuple of positional arguments, a mapping of keyword arguments, or a
            :class:`ExampleCall`; or a list of such tuples, mappings and calls, which run one after the other. May be
            left out for a language model that takes ``input_ids`` and ``labels``.
        opaque: modules that are not looked into; more are found where a module's code depends on values and, in
            training mode, where it cannot be traced for another reason.
        training: whether all modules run in training mode; otherwise each in the mode that it is in.
        device: where tensors seem to be, for code that asks; by default where the parameters are, and the CPU for
            those on meta. Also the CPU, where this build of torch has no such devices: :attr:`Graph.device` says it.
        led: modules that go where values say in other calls.

    Returns:
        The graph, with module boundaries marked and operators that compute nothing left out.

    Raises:
        CaptureError: if the model's own forward cannot be traced, or a module in it neither traced nor run by itself,
            naming the module and the source line.
    """
    inputs = language_model_inputs(model) if example_inputs is None else example_inputs
    failures: dict[str, _Untraceable] = {}  # of each opaque module that was found: why it is
    while True:
        untraced = {path: failure.why for path, failure in failures.items() if failure.why}
        try:
            with_draws = partial(_capture, model, inputs, opaque, training, device)
            graph = with_draws((HIGH,))
            if graph.has_drawn:
                graph = _with_other_draws(model, graph, with_draws)
            if training:
                _see_all_choices(model, graph)
        except _Untraceable as failure:
            failure.look_back(failures)
            if not (failure.needs_value or training):
                raise failure.error from failure.error.__cause__
            path = failure.module  # or, where that is opaque already and cannot even be run, what is around it
            while path and _modules_like(model, path) <= opaque:
                failure.note_size(path, _size(model.get_submodule(path)))
                path = path.rpartition(".")[0]
            if not path:
                raise failure.error from failure.error.__cause__
            failures |= dict.fromkeys(_modules_like(model, path) - opaque, failure)
            opaque |= _modules_like(model, path)
        else:
            if led:
                _note_branching(model, graph, graph.value_dependent | led)
            graph.untraced = untraced
            return graph


def _with_other_draws(model: nn.Module, high: Graph, with_draws: Callable[[tuple[int, ...]], Graph]) -> Graph:
    """A trace in which the model runs with other random numbers, too, if its code goes another way with these.

    Args:
        model: the model.
        high: its trace with the highest numbers.
        with_draws: makes one with others.
    """
    draws: tuple[int, ...] = HIGH, LOW
    try:
        low = with_draws((LOW,))
    except _Untraceable:  # it divides by the number that it draws, say
        draws = HIGH, 0
        low = with_draws((0,))
    led, varying = led_by_draws(high, low)
    graph, read = high, _read(high) | _read(low)
    if led:
        inside = tuple(f"{path}." if path else "" for path in led)
        wanted = {name for name, _ in model.named_parameters() if name.startswith(inside)}
        for seed in range(_SEEDS):
            if read >= wanted:
                break
            if more := _read(with_draws((seed,))) - read:
                draws, read = (*draws, seed), read | more
        graph = with_draws(draws)
        _note_branching(model, graph, graph.value_dependent | led)
    graph.varying = frozenset(varying)
    return graph


def _read(graph: Graph) -> set[str]:
    """The parameters that a trace reads."""
    return {graph.parameters[at] for operator in graph.operators for at in operator.inputs if at in graph.parameters}


def _see_all_choices(model: nn.Module, graph: Graph) -> None:
    """Refuse a trace in which a module did not use all its parameters, because of synthetic values.

    Raises:
        _Untraceable: for the first such module.
    """
    read = _read(graph)
    for path in sorted(graph.value_reading):
        inside = f"{path}." if path else ""
        unread = [name for name, _ in model.named_parameters() if name.startswith(inside) and name not in read]
        if unread:
            cause = NoValue(
                f"with synthetic choices its code does not use {unread[0]} (example_inputs with more rows may)"
            )
            error = CaptureError(f"{path}: {cause}")
            error.__cause__ = cause
            raise _Untraceable(path, error, True)


class _Untraceable(Exception):
    """A module's code asked for a value that a trace does not have, or raised something else.

    Args:
        module: where.
        error: for the user.
        needs_value: whether it asked for a value.
        kernel: the kernel that raised, or the layer that is known to run none that can be traced.
    """

    def __init__(self, module: str, error: CaptureError, needs_value: bool, kernel: str = "") -> None:
        super().__init__(module)
        self.module, self.error, self.needs_value, self.kernel = module, error, needs_value, kernel

    @property
    def why(self) -> str:
        """What the plan says of such a module, where it is more than that its code depends on values."""
        cause = self.error.__cause__
        if self.needs_value:
            return str(cause) if type(cause) is NoValue else ""
        raised = f"its code cannot be traced ({type(cause).__name__}: {first_line(cause)})"
        return f"{raised} in {self.kernel}: {advice_on(self.kernel)}" if self.kernel else raised

    def look_back(self, failures: Mapping[str, _Untraceable]) -> None:
        """Where an opaque module could not be run for its shapes, what counts is why it became opaque."""
        cause = self.error.__cause__
        before = failures.get(self.module)
        if not isinstance(cause, NotRun):
            return
        real = cause.__cause__
        said = (
            f"Run on its own with random numbers, {self.module or 'the model'} raises, too: {type(real).__name__}:"
            f" {first_line(real)}\n  at {_user_line(real)}"
        )
        first = self.error if before is None else before.error
        self.error = CaptureError(f"{first}\n{said}" if said not in str(first) else str(first))
        self.error.__cause__ = real if before is None else first.__cause__
        self.needs_value = self.needs_value if before is None else before.needs_value

    def note_size(self, path: str, size: int) -> None:
        """Say of a module that is too large to become opaque that it is."""
        if size > LARGEST:
            cause = self.error.__cause__
            self.error = CaptureError(
                f"{self.error}\nIt would stay whole as part of {path}, but that is too large to be run once for the"
                f" shapes of what it returns: {size / 2**30:.1f} GiB of parameters, at most {LARGEST / 2**30:.0f} GiB"
            )
            self.error.__cause__ = cause


def _size(module: nn.Module) -> int:
    """Bytes of its parameters."""
    return sum(parameter.nbytes for parameter in module.parameters())


def first_line(error: BaseException | None) -> str:
    """The first line of what an error says."""
    return (str(error).strip() or "(no message)").splitlines()[0]


def _modules_like(model: nn.Module, path: str) -> frozenset[str]:
    """The modules of the same class, if each is small enough to be run once; never the model itself."""
    module = model.get_submodule(path)
    runs = not isinstance(module, nn.ModuleList | nn.ModuleDict)
    alike = (name for name, other in model.named_modules() if type(other) is type(module))
    return frozenset(alike) if path and runs and _size(module) <= LARGEST else frozenset()


def _capture(
    model: nn.Module,
    example_inputs: Any,
    opaque: frozenset[str],
    training: bool,
    device: str,
    draws: tuple[int, ...],
    *,
    until_failure: bool = False,
    each_layer: bool = False,
) -> Graph:
    fake, seeming = RememberingFakeTensorMode(functional=(RECORD,)), torch.device(device or device_of(model))
    there = torch.accelerator.current_accelerator()  # of the build, whether or not there is one in this machine
    if there is None or seeming.type != there.type:
        seeming = torch.device("cpu")  # autograd ends the process for tensors of a device that it was not built for
    real: dict[int, Tensor] = {}
    stand_ins: list[Tensor] = []  # alive as long as their ids are in a table: code may put others in their places

    def stand_in(value: Tensor) -> Tensor:
        """A fake tensor in the place of an input, a buffer or a parameter."""
        made = fake_like(value, fake, seeming)
        if isinstance(value, nn.Parameter):
            return made
        stand_ins.append(made)
        known = value_of(value)
        real[id(made)] = torch.zeros(value.shape, dtype=value.dtype) if known is None else known.cpu()
        return made

    notes = Notes()  # what code asks of numbers
    places: dict[int, str] = {}  # of tensors
    copies: dict[int, Any] = {}  # of objects that code may write into, such as caches

    examples = as_calls(example_inputs)
    is_only, goes_on = len(examples) == 1 and not until_failure, len(examples) > 1 and not until_failure

    def given(place: str, leaf: Any) -> Any:
        """A leaf of the arguments as the model gets it."""
        if type(leaf) is int or type(leaf) is float:
            return notes.given(place, leaf)
        if not isinstance(leaf, Tensor):
            made = copy.deepcopy(leaf, copies) if is_unused(leaf) else leaf
            return notes.counting(made) if goes_on and made is not leaf else made
        made = stand_in(leaf)
        places[id(made)] = place
        return made

    calls = list[tuple[int, ExampleCall]]()
    for one in draws:
        copies.clear()
        calls += [(one, ExampleCall(*map_leaves(given, tuple(call)))) for call in examples]
    traced = meta_copy(model, stand_in)
    note_float8(traced)
    if training:
        traced.train()
    tracer = Tracer(traced, real, places, seeming)
    tracer.graph.opaque, tracer.graph.draws = opaque, draws
    tracer.graph.example = _size_of_all([step_size(tensors_in(tuple(call))) for _, call in calls])
    for path in opaque:
        module = traced.get_submodule(path)
        module.forward = OpaqueForward(module, tracer)
    if is_only or (copies and goes_on):  # with what is in these objects
        tracer.notes_on_sizes = notes
    of_tensors = frozenset(vars(fake_like(torch.empty(0), fake, seeming)))
    layers = RepeatedLayers(traced, tracer, notes, of_tensors, each_layer)
    if until_failure:
        note_own_attributes(layers.told_apart, tracer.graph, layers.note_read)
    else:
        note_attributes(traced, tracer.graph, lambda: tracer.modules[-1], layers.note_read)
    try:
        _run(traced, calls, tracer, fake, layers, goes_on, until_failure)
        is_made = not layers.differ() and not (layers.used and tracer.graph.failure)
    except _Untraceable:
        if not layers.used:
            raise
        is_made = False
    if not is_made:  # they are not alike after all, or that may be why it has failed
        again = partial(_capture, model, example_inputs, opaque, training, device, draws)
        return again(until_failure=until_failure, each_layer=True)
    if until_failure:  # that was noted to tell layers apart
        tracer.graph.settings, tracer.graph.integers = {}, {}
    # Copies: such numbers may live on, and other ranks have what was asked until now.
    tracer.graph.numbers, tracer.graph.questions = set(notes.told), notes.questions | _of_sizes(notes, tracer, is_only)
    tracer.graph.static_on_demand()
    in_float8 = {layer.weight: how for layer in traced.modules() if (how := float8_of(layer)) is not None}
    parameters = dict(traced.named_parameters())
    tracer.graph.units = {
        tensor: found.units(tuple(parameter.shape))
        for tensor, name in tracer.graph.parameters.items()
        if (found := format_of(parameter := parameters[name]) or in_float8.get(parameter)) is not None
    }
    _find_branching(traced, tracer)
    return tracer.graph


def _of_sizes(notes: Notes, tracer: Tracer, is_only: bool) -> dict[Question, None]:
    """What code asked of sizes: of those of the arguments or, in a call that goes on with another, of any that grow."""
    tensors = tracer.graph.tensors
    if is_only:
        origins = SizeOrigins(tracer.graph, tracer.given, tracer.buffers, tracer.noted, not notes.are_sizes_told)
        found = [origins.of(question) for question in notes.of_sizes]
    else:
        found = [question.where(lambda of, dim: f"{SIZE}{tensors[of].shape[dim]}") for question in notes.of_sizes]
    return {question: None for question in found if isinstance(question, Question)}


def device_of(model: nn.Module) -> str:
    """Where a model runs: where its first parameter is, and on the CPU if that is on meta."""
    device = next((parameter.device for parameter in model.parameters()), None)
    return "cpu" if device is None or device.type == "meta" else str(device)


def _find_branching(model: nn.Module, tracer: Tracer) -> None:
    """Note which modules' code may run otherwise with other values than the synthetic ones."""
    found = set(tracer.graph.value_reading)
    pending = list(found)
    while pending:
        caller = tracer.number_returning.get(pending.pop())
        if caller is not None and caller not in found:
            found.add(caller)
            pending.append(caller)
    _note_branching(model, tracer.graph, frozenset(found))


def _note_branching(model: nn.Module, graph: Graph, found: frozenset[str]) -> None:
    """Note whose code may run otherwise, and all inside of that; their calls are known by where they stand alone."""
    inside = tuple(f"{path}." if path else "" for path in found)
    branching = frozenset(path for path, _ in model.named_modules() if found and f"{path}.".startswith(inside))
    graph.value_dependent, graph.branching = found, branching
    for number, call in enumerate(graph.calls):
        if call.module in branching:
            graph.calls[number] = replace(call, site=replace(call.site, occurrence=EVERY))


def _run(
    traced: nn.Module,
    calls: Sequence[tuple[int, ExampleCall]],
    tracer: Tracer,
    fake: FakeTensorMode,
    layers: RepeatedLayers,
    goes_on: bool,
    until_failure: bool,
) -> None:
    """Run the model under the tracer, in one call after the other, each with the random numbers that code gets."""
    with contextlib.ExitStack() as context:
        context.enter_context(warnings.catch_warnings())
        warnings.simplefilter("ignore")
        # A scripted function runs as it is written, not as torch makes it faster after some calls.
        context.enter_context(torch.jit.optimized_execution(False))
        # Experts are noted by what they are given after the marks, and what they return before them.
        marks = (noting_experts(traced, tracer), _marked_boundaries(traced, tracer))
        tracer.outside.begin(sys._getframe())
        context.callback(tracer.outside.put_back)
        quiet = quiet_fake_tensors(), fake_tensors_as_ordinary(), under_way()
        as_written = torch.compiler.set_stance("force_eager")  # also what code compiles while it is traced
        seen = noting_declared(tracer), noting_questions(tracer)
        for mode in (*quiet, *marks, *seen, as_written, enable_python_dispatcher()):
            context.enter_context(mode)
        for layer in (fake, tracer, tracer.calls):
            context.enter_context(layer)
        before = {id(tensor): tensor for *_, tensor in _tensors_of_modules(traced)}
        layers.put_on()
        result: list[Any] = []
        try:
            for one, call in calls:
                if tracer.notes_on_sizes is not None and goes_on:
                    tracer.notes_on_sizes.of_sizes.clear()
                layers.begin()
                with tracer.drawing(one):
                    result.append(traced(*call.args, **call.kwargs))
        except Exception as error:
            if until_failure:
                tracer.graph.failure = f"{type(error).__name__}: {first_line(error)}"
                return
            if isinstance(error, DeclarationError):
                raise DeclarationError(f"{error}\n  at {_user_line(error)}") from error
            where = " -> ".join(tracer.modules[1:]) or "(root)"
            which = f" with number {len(result) + 1} of example_inputs" if len(calls) > 1 else ""
            kernel = _kernel_behind(error, traced.get_submodule(tracer.modules[-1]))
            needs_value = isinstance(error, DataDependentOutputException | DynamicOutputShapeException | NoValue)
            failure = CaptureError(
                f"{type(traced).__name__} cannot be captured{which}: {type(error).__name__}: {first_line(error)}\n"
                f"  in module {where}\n  at {_user_line(error)}\n"
                + (f"{kernel}: {advice_on(kernel)}" if kernel else _advice(type(traced).__name__, needs_value))
            )
            failure.__cause__ = error
            raise _Untraceable(tracer.modules[-1], failure, needs_value, kernel) from error
        _note_kept(traced, before, tracer)
        with tracer.pause():
            returned = [leaf for leaf in tensors_in(result) if leaf.is_floating_point()]
        tracer.outputs(returned)


def _kernel_behind(error: Exception, module: nn.Module) -> str:
    """The name of the kernel that raised, or of the layer in whose code it was, if there is advice on such layers."""
    kernel = autograd_function_in(error) or higher_order_operator_in(error)
    if kernel is not None:
        return declarable_name(kernel)
    layer = declarable_name(type(module))
    return layer if has_advice(layer) else ""


def _tensors_of_modules(model: nn.Module) -> Iterator[tuple[str, str, bool, Tensor]]:
    """Tensors that are attributes of modules: path of the module, name, whether it is a buffer, tensor."""
    for path, module in model.named_modules():
        for holder in (buffers_of(module), vars(module)):
            for name, value in holder.items():
                if isinstance(value, Tensor):
                    yield path, name, holder is not vars(module), value


def _note_kept(traced: nn.Module, before: Mapping[int, Tensor], tracer: Tracer) -> None:
    """Note the tensors that modules have as attributes since the forward: code outside may read them.

    Args:
        traced: the model that ran.
        before: every tensor that its modules had before, by its ``id``, which no other one has while it is here.
        tracer: what it ran under.
    """
    for path, name, is_buffer, tensor in _tensors_of_modules(traced):
        if id(tensor) not in before:
            tracer.keep(path, name, is_buffer, tensor)


def step_size(tensors: Iterable[Tensor]) -> StepSize:
    """Rows of a batch, and the lengths of its sequences, from its tensors.

    Integers ``[rows, tokens]`` tell both; without any, floating-point numbers ``[rows, tokens, features]`` do. What has
    neither has rows only. Two or three numbers a row beside more are no tokens, but how large something is (a picture's
    height and width).
    """
    given = [tensor for tensor in tensors if tensor.ndim]
    ids = [tensor for tensor in given if tensor.ndim == 2 and not tensor.is_floating_point()]
    sequences = ids or [tensor for tensor in given if tensor.ndim == 3]
    if not given:
        return StepSize()
    rows = (sequences or given)[0].shape[0]
    lengths = dict.fromkeys(tensor.shape[1] for tensor in sequences if tensor.shape[0] == rows and tensor.shape[1] > 1)
    tokens = [length for length in lengths if length > _MOST_SIZES or max(lengths) <= _MOST_SIZES]
    return StepSize(rows, tuple(tokens))


def _size_of_all(sizes: Sequence[StepSize]) -> StepSize:
    """The size of several calls: the rows of the first, and the lengths of all."""
    return StepSize(sizes[0].rows, tuple(dict.fromkeys(length for size in sizes for length in size.lengths)))


def language_model_inputs(model: nn.Module) -> dict[str, Any]:
    """A batch for a model that takes ``input_ids`` and ``labels``, of sizes that collide with none of the model's.

    Raises:
        CaptureError: if the model's ``forward`` takes no such inputs.
    """
    names = inspect.signature(model.forward).parameters
    if "input_ids" not in names:
        raise CaptureError(
            f"{type(model).__name__}.forward takes {', '.join(names) or 'nothing'}: give example_inputs (one batch as "
            "your training step passes it), or set the LightningModule's example_input_array."
        )
    batch, sequence = _sizes_apart(model)
    ids = torch.zeros(batch, sequence, dtype=torch.long, device="meta")
    inputs: dict[str, Any] = {"input_ids": ids}
    if "labels" in names:
        inputs["labels"] = torch.zeros_like(ids)
    if "use_cache" in names:
        inputs["use_cache"] = False
    if "labels" in names and _has_other_head(model):
        inputs["labels"] = _labels_of(model, inputs)
    return inputs


def _has_other_head(model: nn.Module) -> bool:
    """Whether its config tells of labels, and it has no logits of a vocabulary."""
    head = getattr(model, "get_output_embeddings", None)
    return (
        isinstance(getattr(getattr(model, "config", None), "num_labels", None), int)
        and head is not None
        and head() is None
    )


def _labels_of(model: nn.Module, inputs: dict[str, Any]) -> Tensor:
    """Labels of tokens or, where its logits are one row for each sentence, of the config's problem.

    Of a model that does not run without labels, nothing is known but that it takes them.
    """
    labels: Tensor = inputs["labels"]
    config: Any = model.config
    count: int = config.num_labels
    try:
        graph = capture(model, {key: value for key, value in inputs.items() if key != "labels"})
    except CaptureError:  # tracing with labels says the same
        return labels
    shape = (labels.shape[0], count)
    if shape not in [graph.tensors[output].shape for output in graph.outputs]:
        return labels
    problem = getattr(config, "problem_type", None) or ("regression" if count == 1 else "")
    if problem == "regression":
        return torch.zeros(shape[:1] if count == 1 else shape, device="meta")
    return torch.zeros(shape, device="meta") if problem.startswith("multi") else labels[:, 0]


def in_small(model: nn.Module, call: ExampleCall) -> ExampleCall:
    """A call with a batch of sentences as one with few short ones, of sizes that collide with none of the model's.

    Only where all tensors are integers ``[rows, tokens]`` or ``[rows]``, which mean the same for any number of both;
    any other call is given back. Values are cut off or repeated.
    """
    tensors = tensors_in(tuple(call))
    longest = max((tensor.shape for tensor in tensors), key=len, default=torch.Size())
    if len(longest) != 2 or any(t.is_floating_point() or t.shape != longest[: t.ndim] or not t.ndim for t in tensors):
        return call
    numbers = [torch.arange(size) for size in _sizes_apart(model)]

    def one(value: Tensor) -> Tensor:
        for dim in range(value.ndim):
            value = value.index_select(dim, (numbers[dim] % value.shape[dim]).to(value.device))
        return value

    return ExampleCall(*map_tensors(one, tuple(call)))


def _sizes_apart(model: nn.Module) -> tuple[int, int]:
    """A number of rows and of tokens that is no size of the model's."""
    taken = {size for parameter in model.parameters() for size in parameter.shape}
    config = getattr(model, "config", None)
    if config is not None:
        taken |= {value for value in vars(config).values() if isinstance(value, int)}
    rows = next((size for size in _BATCH_PRIMES if size not in taken), _BATCH_PRIMES[-1])
    tokens = next((size for size in _SEQUENCE_PRIMES if size not in taken), _SEQUENCE_PRIMES[-1])
    return rows, tokens


def on_meta(value: Tensor) -> Tensor:
    """A tensor, or parameter, like this one on the meta device; of one that is no parameter :func:`value_of` tells."""
    meta = value.detach().to("meta")
    if isinstance(value, nn.Parameter):
        return nn.Parameter(meta, requires_grad=value.requires_grad)
    vars(meta)["autotp_value"] = value_of(value)
    return meta


def value_of(value: Tensor) -> Tensor | None:
    """The value of a buffer or an input, or of the one for which :func:`on_meta` made this; ``None`` if it has none."""
    return vars(value).get("autotp_value") if value.is_meta else value.detach()


def keep_values(copied: nn.Module, module: nn.Module) -> None:
    """Let the buffers of a module's copy on meta have the values that those of the module have now, if it has them."""
    here = buffers_of(module)
    for name, buffer in buffers_of(copied).items():
        now = here.get(name)
        if buffer is not None and now is not None and now.shape == buffer.shape:
            vars(buffer)["autotp_value"] = value_of(now)


def meta_copy(model: nn.Module, stand_in: Callable[[Tensor], Tensor] = on_meta) -> nn.Module:
    """A deep copy of ``model`` with every tensor on the meta device; the original's tensors are not copied.

    Code may ask what its buffers hold (``if not self.is_initialized``), so the copies know whose they are.

    ``stand_in`` makes the tensor, or parameter, that takes the place of one of the model's.
    """
    memo: dict[int, Any] = {}
    for module in model.modules():
        for holder in (parameters_of(module), buffers_of(module), vars(module)):
            for value in holder.values():
                if not isinstance(value, Tensor) or id(value) in memo:
                    continue
                memo[id(value)] = stand_in(value)
                if isinstance(value, nn.Parameter):
                    memo[id(value)].__dict__.update(value.__dict__)
        for value in vars(module).values():  # every module has some ten that are empty, which deepcopy is slow to make
            if type(value) in (OrderedDict, set) and not value:
                memo[id(value)] = type(value)()
    modules = list(model.modules())
    own_way = {kind for kind in {*map(type, modules)} if _is_copied_by_itself(kind)}
    # As deepcopy copies them, but for all that it asks about each of the values that it hands on as they are.
    ordinary = [each for each in modules if type(each) not in own_way and "__deepcopy__" not in vars(each)]
    memo |= {id(module): type(module).__new__(type(module)) for module in ordinary}
    for module in ordinary:
        held = module.__getstate__().items()
        here = {name: one if type(one) in _HANDED_ON else copy.deepcopy(one, memo) for name, one in held}
        memo[id(module)].__setstate__(here)
    copied = copy.deepcopy(model, memo)
    for module in modules:
        if type(module) in own_way:
            here = vars(memo[id(module)])
            here.update({key: copy.deepcopy(vars(module)[key], memo) for key in _OF_EVERY_MODULE & vars(module).keys()})
    return copied


_HANDED_ON = frozenset((bool, int, float, complex, str, bytes, type, type(None), types.FunctionType))
"""Types whose values are their own copies."""

_OF_EVERY_MODULE = vars(nn.Module()).keys() | {"forward"}
"""What a module holds whatever its class is: hooks, the mode, a forward that was put in the place of the class's."""


def _is_copied_by_itself(kind: type[nn.Module]) -> bool:
    """Whether a module's class says how it is copied: by making it anew from its options, say, without its hooks."""
    ways = ("__deepcopy__", "__getstate__", "__reduce__", "__reduce_ex__", "__getnewargs__", "__getnewargs_ex__")
    return any(getattr(kind, way, None) is not getattr(nn.Module, way, None) for way in ways)


def as_calls(inputs: Any) -> tuple[ExampleCall, ...]:
    """The calls that example inputs are: a list of tuples, mappings and calls is several, anything else is one."""
    if isinstance(inputs, list) and inputs and all(isinstance(batch, tuple | Mapping) for batch in inputs):
        return tuple(map(as_call, inputs))
    return (as_call(inputs),)


def as_call(inputs: Any) -> ExampleCall:
    """The arguments that one batch is."""
    if isinstance(inputs, ExampleCall):
        return inputs
    if isinstance(inputs, Mapping):
        return ExampleCall((), dict(inputs))
    if isinstance(inputs, tuple | list):
        return ExampleCall(tuple(inputs), {})
    return ExampleCall((inputs,), {})


def _advice(model: str, needs_value: bool) -> str:
    """What to do about a line that a trace does not get past."""
    module = (
        f"move it with the layers that belong to it to an nn.Module of its own inside {model}, which then stays whole"
        " while the rest is divided"
    )
    if needs_value:
        return (
            "The model is traced once, without values: remove what needs a tensor's value (`.item()`, `if tensor:`,"
            f" pack_padded_sequence) from this line, or {module}."
        )
    return (
        "If the model does not take these example_inputs in one process either, give it others. If it does, this line"
        f" needs what is not there when the model is traced, once and without tensors' values: {module}."
    )


@contextlib.contextmanager
def _marked_boundaries(model: nn.Module, tracer: Tracer) -> Iterator[None]:
    """Mark every floating-point tensor that enters or leaves a module, and keep the tracer's stack of running ones.

    What runs under a function transform counts as code of the module that transforms: no layout can change in there.
    """
    given: list[tuple[range, list[Copied]]] = []  # of each module that runs: its marks, and containers made for them
    inputs: list[tuple[tuple[str, int, int], ...]] = []
    constants: list[tuple[tuple[str, Constant], ...]] = []

    def numbered(leaves: Iterable[tuple[str, Any]], marks: range) -> tuple[tuple[str, int, int], ...]:
        """The tensors among a value's leaves, before and after they were marked, by where they are."""
        places = [tracer.graph.operators[at] for at in marks]
        found = {op.boundary.key: (op.inputs[0], op.outputs[0]) for op in places if isinstance(op.boundary, Boundary)}
        for key, leaf in leaves:
            if isinstance(leaf, Tensor) and key not in found and (number := tracer.known_number(leaf)) is not None:
                found[key] = number, number
        return tuple((key, before, after) for key, (before, after) in found.items())

    def mark(path: str, side: str, values: Any) -> tuple[Any, range, list[tuple[str, Any]]]:
        """A value with its tensors marked, the marks, and the leaves as they were."""
        first, leaves = len(tracer.graph.operators), list[tuple[str, Any]]()

        def one(key: str, leaf: Any) -> Any:
            leaves.append((key, leaf))
            return tracer.boundary(path, side, key, leaf) if _is_marked(leaf) else leaf

        marked = map_leaves(one, values)
        return marked, range(first, len(tracer.graph.operators)), leaves

    def before(path: str) -> Callable[..., Any]:
        def hook(_: nn.Module, args: Any, kwargs: Any) -> Any:
            if transforms.are_active():
                return None
            tracer.enter(path)
            marked, marks, leaves = mark(path, "in", (args, kwargs))
            inputs.append(numbered(leaves, marks))
            constants.append(constants_among(leaves))
            given.append((marks, list(copied((args, kwargs), marked))))
            return marked

        return hook

    def after(path: str) -> Callable[..., Any]:
        def hook(_: nn.Module, __: Any, output: Any) -> Any:
            if transforms.are_active():
                return None
            tracer.leave()
            marks, containers = given.pop()
            for container in containers:
                if container.is_changed():  # who gave it sees that
                    container.put_back()
                    tracer.take_back(container.path, marks)
            marked, marks, leaves = mark(path, "out", output)
            run = ModuleRun(path, tracer.modules[-1], inputs.pop(), numbered(leaves, marks), constants.pop())
            tracer.graph.runs.append(run)
            if any(isinstance(leaf, int | float) for _, leaf in leaves):
                tracer.number_returning[path] = run.caller
            return marked

        return hook

    handles = []
    try:
        for path, module in model.named_modules():
            # The mark of an input comes before the module's own conversions, the mark of an output after them.
            handles.append(module.register_forward_pre_hook(before(path), with_kwargs=True, prepend=True))
            handles.append(module.register_forward_hook(after(path)))
        yield
    finally:
        for handle in handles:
            handle.remove()


def _is_marked(leaf: Any) -> bool:
    """Whether a layout may change where this leaf enters or leaves a module."""
    with without_functions():  # what is asked here is no call of the model's code
        return isinstance(leaf, Tensor) and leaf.is_floating_point() and not has_values(inside_of(leaf))


def _user_line(error: BaseException | None) -> str:
    """The innermost line outside torch, transformers' helpers and this package that led to ``error``."""
    traceback = error.__traceback__ if error is not None else None
    lines = []
    while traceback is not None:
        code = traceback.tb_frame.f_code
        if is_user_code(code.co_filename) and not code.co_filename.startswith(_HELPERS):
            file = code.co_filename.rpartition("/site-packages/")[2]
            lines.append(f"{file}:{traceback.tb_lineno} in {code.co_name}")
        traceback = traceback.tb_next
    return lines[-1] if lines else "an unknown line"


_HELPERS = os.path.join(os.path.dirname(transformers.utils.__file__), "")
