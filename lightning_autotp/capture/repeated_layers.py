"""Layers that repeat: what one of them has recorded is appended again for the others, and their code does not run.

A model of a hundred layers runs the same code a hundred times, and all but the first runs record what was recorded
before, of other tensors. So a layer, an element of an ``nn.ModuleList`` or ``nn.Sequential``, is left out where
everything that its code can see is as it was for one that ran:

* the two are :mod:`~lightning_autotp.capture.alike`, and no plain attribute that the one's code read is another;
* they are called alike: with the same values, and with tensors of the same metadata that share memory alike, and that
  hold the same wherever no parameter went into them; in the same modes of torch's;
* the one had no effect but its results: it wrote into no memory from outside, kept no tensor, drew no number in Python,
  and asked for no values but those that are the same for the other.

Code may still see what is in none of these: it may count its calls in a global variable. So two layers must really have
run, one after the other, with the same effect, before any is left out, and of layers that are alike the last one really
runs. If it records something else, the whole trace is made again, with all layers. Code that behaves like the others'
before and after may still do something else in between; that is seen where it runs (``applying/followed_code.py``).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from lightning_autotp.capture import vmap as transforms
from lightning_autotp.capture.alike import Places, Twins
from lightning_autotp.capture.attribute_reads import PLAIN
from lightning_autotp.capture.compiled_code import is_told_compiled
from lightning_autotp.capture.made_up_draws import states
from lightning_autotp.capture.noted_numbers import NotedFloat, NotedInt, plain
from lightning_autotp.capture.static_values import CHOICES
from lightning_autotp.capture.tracer import Storage, Tracer, Tracked
from lightning_autotp.layouts.places import Boundary
from lightning_autotp.operators.graph import ExpertsCall, ModuleRun, Operator, Ref, TensorInfo, TorchCall
from lightning_autotp.private.torch_private import FakeTensor, function_modes, storage_key, without_functions
from lightning_autotp.ranks.random_numbers import are_own_numbers_noted

_FEWEST = 4
"""So many layers must be alike: of fewer, all run."""
_DEEPEST = 3
"""Objects in attributes are looked into so deep for what a layer changes."""
_SETTINGS = (torch.dtype, torch.device, torch.layout, torch.memory_format)
_NOTES = "measured", "settings", "integers", "compiling", "overwritten", "value_reading"
"""What a graph notes by the paths of modules."""


class _NotAgain(Exception):
    """A layer's stretch of the graph cannot be appended again, or not for this call."""


class RepeatedLayers:
    """The repeated layers of a model that is traced.

    Args:
        model: the copy that will run, before anything of the trace is put on it.
        tracer: what it will run under.
        of_tensors: names of the attributes that every tensor of the trace has.
        each: whether each layer is to run.

    Attributes:
        told_apart: modules whose plain attributes differ from those of their twins, by path: the trace has to note
            which of these their code reads.
        differ: whether a layer did something else than those that were left out, so that the trace is to be made again.
    """

    def __init__(self, model: nn.Module, tracer: Tracer, of_tensors: frozenset[str], each: bool) -> None:
        self.tracer = tracer
        self.of_tensors = of_tensors
        self.differ = False
        self.kinds = [] if each else list(self._kinds(model, Places(model, of_tensors)))
        self.told_apart = {
            layer.paths[number]: layer.modules[number]
            for kind in self.kinds
            for number, _ in kind.differing
            for layer in kind.layers
        }

    def put_on(self) -> None:
        """Let the layers run so."""
        for kind in self.kinds:
            for layer in kind.layers:
                layer.forward = layer.module.forward
                layer.module.forward = _Forward(self, layer)

    def begin(self) -> None:
        """Before a call of the model: what ran in another one counts no more."""
        for kind in self.kinds:
            kind.tried.clear()
            kind.proved.clear()
            for layer in kind.layers:
                layer.state = _State.of(layer.modules)

    def run(self, layer: _Layer, args: Any, kwargs: Any) -> Any:
        """What a layer returns."""
        with without_functions():  # what is asked here is no call of the model's code
            call = self._described(layer, args, kwargs)
        if call is None:
            return layer.forward(*args, **kwargs)
        kind = layer.kind
        known = next((one for one in kind.proved if one.fits(layer, call)), None)
        earlier = known or next((one for one in reversed(kind.tried) if one.fits(layer, call)), None)
        expected = None if earlier is None else self._expected(earlier, layer, call)
        if known is not None and expected is not None and layer is not kind.layers[-1]:
            known.is_used = True
            with without_functions():
                return self._append(expected, layer, call)
        result, recorded = self._recorded(layer, call, args, kwargs)
        if recorded is not None and expected is not None and recorded.stretch.is_like(expected):
            if known is None:
                kind.proved.append(recorded)
        else:
            if known is not None:
                self.differ |= known.is_used
                kind.proved.remove(known)
            if recorded is not None:
                kind.tried.append(recorded)
        return result

    # -- which layers are alike --------------------------------------------------------------------------------------

    def _kinds(self, model: nn.Module, places: Places) -> Iterator[_Kind]:
        """The layers of the model that are alike, in the order of their list."""
        done = set[nn.Module]()
        for path, container in model.named_modules():
            if not isinstance(container, nn.ModuleList | nn.Sequential):
                continue
            members = [member for member in container if next(member.children(), None) is not None]
            own = [member for member in members if places.paths[member].rpartition(".")[0] == path]
            kinds = list[_Kind]()
            for member in dict.fromkeys(own):
                if member in done or not self._is_traced(places, member):
                    continue
                done.add(member)
                for kind in kinds:
                    twins = places.twins(kind.first, member)
                    if twins is not None and self._are_treated_alike(places, twins):
                        kind.add(member, places, twins)
                        break
                else:
                    kinds.append(_Kind(member, places))
            yield from (kind for kind in kinds if len(kind.layers) >= _FEWEST)

    def _is_traced(self, places: Places, module: nn.Module) -> bool:
        """Whether a module is looked into, with all in it."""
        path = places.paths[module]
        around = tuple(f"{opaque}." for opaque in self.tracer.graph.opaque)
        return not f"{path}.".startswith(around) and not any(one.startswith(f"{path}.") for one in around)

    def _are_treated_alike(self, places: Places, twins: Twins) -> bool:
        pairs = ((places.paths[one], places.paths[other]) for one, other in twins.modules)
        return all(self.tracer.kind_of(one) == self.tracer.kind_of(other) for one, other in pairs)

    # -- how a layer is called ---------------------------------------------------------------------------------------

    def _described(self, layer: _Layer, args: Any, kwargs: Any) -> _Call | None:
        """A call of a layer; ``None`` where more may matter than can be told."""
        tracer = self.tracer
        if (
            tracer.paused
            or transforms.are_active()
            or tracer.modules[-1] != layer.path
            or tracer.notes_on_sizes is not None
            or tracer.calls.current[0] >= 0
            or not layer.is_unchanged()
        ):
            return None
        types = {"cpu", tracer.device.type}
        call = _Call([(torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)) for kind in sorted(types)])
        call.tokens += [
            torch.is_autocast_cache_enabled(),
            torch.is_grad_enabled(),
            torch.is_inference_mode_enabled(),
            torch.get_default_dtype(),
            torch.get_default_device(),
            function_modes(),
            are_own_numbers_noted(),
            dict(tracer.calls.counts[-1]),
        ]
        try:
            for given in (args, kwargs):
                self._describe(given, call)
        except _NotAgain:
            return None
        return call

    def _describe(self, value: Any, call: _Call) -> None:
        kind = type(value)
        if isinstance(value, Tensor):
            self._describe_tensor(value, call)
        elif kind is tuple or kind is list:
            call.tokens.append((kind, len(value)))
            for item in value:
                self._describe(item, call)
        elif kind is dict:
            call.tokens.append((kind, list(value)))
            for item in value.values():
                self._describe(item, call)
        elif kind in PLAIN or kind in _SETTINGS:
            call.tokens.append((kind, value))
        elif kind is NotedInt or kind is NotedFloat:
            call.tokens.append((kind, plain(value), value.expression))
        else:
            raise _NotAgain
        call.leaves.append(value)

    def _describe_tensor(self, tensor: Tensor, call: _Call) -> None:
        tracer = self.tracer
        again = next((at for at, other in enumerate(call.tensors) if other is tensor), None)
        if again is not None:
            call.tokens.append(("again", again))
            return
        tracked = tracer.tracked(tensor)
        if (
            tracked is None
            or not _is_up_to_date(tracked)
            or not isinstance(tensor, FakeTensor)
            or not vars(tensor).keys() <= self.of_tensors
            or tensor.constant is not None
        ):
            raise _NotAgain
        number = tracked.value.tensor
        info = tracer.graph.tensors[number]
        begun = tracer.begun[-1]
        if number < begun:
            call.tokens.append(number)
        else:  # it was made for this call: where it is marked, say
            call.tokens.append(("new", number - begun, self._origin(number) if info.is_static else None))
        memory = storage_key(tensor)
        sharing = next((at for at, other in enumerate(call.tensors) if storage_key(other) == memory), None)
        call.tokens += [type(tensor), *_metadata(tensor), info, sharing]
        call.tensors.append(tensor)
        call.numbers.append(number)

    def _origin(self, number: int) -> int:
        """The tensor that a static one is which was marked where it enters the layer."""
        operator = next((one for one in reversed(self.tracer.graph.operators) if number in one.outputs), None)
        if operator is None or not isinstance(operator.boundary, Boundary):
            raise _NotAgain
        return operator.inputs[0]

    # -- what a layer records ----------------------------------------------------------------------------------------

    def _position(self) -> _Position:
        graph = self.tracer.graph
        return _Position(len(graph.tensors), len(graph.calls), len(graph.entered), self.tracer.calls.runs[-1])

    def _recorded(self, layer: _Layer, call: _Call, args: Any, kwargs: Any) -> tuple[Any, _Recorded | None]:
        """What a layer returns, and what it records, if that can be appended again."""
        tracer, graph = self.tracer, self.tracer.graph
        position, begun, random = self._position(), tracer.begun[-1], states()
        lists = {name: len(getattr(graph, name)) for name in _LISTS}
        written, asked = len(tracer.written), len(tracer.evaluator.asked)
        with _noting_anew(tracer) as notes:
            result = layer.forward(*args, **kwargs)
            has_drawn = graph.has_drawn
        stretch = _Stretch(notes=notes, **{name: getattr(graph, name)[first:] for name, first in lists.items()})
        recorded = _Recorded(layer, call, position, begun, stretch)
        try:
            with without_functions():
                if has_drawn or states() != random or not call.is_given(args, kwargs):
                    raise _NotAgain
                stretch.changes = layer.changes()
                made = {tensor for operator in stretch.operators for tensor in operator.outputs}
                if any(root not in made for _, root in tracer.written[written:]):
                    raise _NotAgain
                self._note_tensors(recorded)
                self._check_asked(tracer.evaluator.asked[asked:], recorded)
                stretch.counts = dict(tracer.calls.counts[-1])
                stretch.result = self._described_result(result, call, made, set())
        except _NotAgain:
            return result, None
        return result, recorded

    def _note_tensors(self, recorded: _Recorded) -> None:
        """Note which numbers the layer's tensors have, and which of those that it added have values."""
        stretch, first = recorded.stretch, recorded.position.tensors
        for at, tensor in enumerate(recorded.layer.tensors):
            tracked = self.tracer.tracked(tensor)
            if tracked is not None and not _is_unwritten(tracked):
                raise _NotAgain
            recorded.numbers.append(None if tracked is None else tracked.value.tensor)
            if tracked is not None and tracked.value.tensor >= first:
                stretch.born[tracked.value.tensor - first] = at
        free = [first + at for at in range(len(stretch.tensors)) if at not in stretch.born]
        evaluator = self.tracer.evaluator
        stretch.known = {number: evaluator.known[number] for number in free if number in evaluator.known}
        stretch.synthetic = {number: evaluator.synthetic[number] for number in free if number in evaluator.synthetic}

    def _check_asked(self, asked: Sequence[int], recorded: _Recorded) -> None:
        """Whether the values that code asks for are the same for every layer that is called alike."""
        producers = {tensor: operator for operator in recorded.stretch.operators for tensor in operator.outputs}
        first, own = recorded.position.tensors, {*recorded.numbers}
        given = {number for number in recorded.call.numbers if number >= recorded.begun}
        pending, seen = list(asked), set[int]()
        while pending:
            tensor = pending.pop()
            if tensor in seen:
                continue
            seen.add(tensor)
            producer, info = producers.get(tensor), self.tracer.graph.tensors[tensor]
            if tensor in own or (tensor in given and not info.is_static):
                raise _NotAgain
            if producer is not None and not (producer.name in CHOICES and not info.is_static):
                pending += producer.inputs
            elif producer is None and tensor >= first and tensor not in recorded.stretch.known:
                raise _NotAgain

    def _described_result(self, value: Any, call: _Call, made: set[int], memory: set[int]) -> Any:
        """How what a layer returned is made again."""
        kind = type(value)
        if kind is tuple or kind is list or kind is dict:
            inside = value.values() if kind is dict else value
            items = tuple(self._described_result(item, call, made, memory) for item in inside)
            return _Container(kind, tuple(value) if kind is dict else (), items)
        if not isinstance(value, Tensor):
            if kind not in PLAIN:
                raise _NotAgain
            return _Plain(kind, value)
        for at, tensor in enumerate(call.tensors):
            if tensor is value:
                return _Given(at)
        tracked, key = self.tracer.tracked(value), storage_key(value)
        storage = None if tracked is None else tracked.storage
        if (
            tracked is None
            or tracked.value.tensor not in made
            or not _is_up_to_date(tracked)
            or (storage is not None and (storage.pending or storage.root.tensor not in made))
            or type(value) is not FakeTensor
            or not vars(value).keys() <= self.of_tensors
            or value.constant is not None
            or value.storage_offset()
            or value.untyped_storage().nbytes() != value.numel() * value.element_size()
            or value.is_conj()
            or value.is_neg()
            or (value.requires_grad and (value.is_leaf or not torch.is_grad_enabled()))
            or (value._is_view() and not value.is_contiguous())
            or key in memory
            or key in {storage_key(tensor) for tensor in call.tensors}
        ):
            raise _NotAgain
        memory.add(key)
        kept = replace(tracked, storage=None if storage is None else replace(storage, pending=[]))
        return _Made(tuple(value.shape), value.stride(), value.dtype, value.requires_grad, value._is_view(), kept)

    # -- what is appended again --------------------------------------------------------------------------------------

    def _expected(self, known: _Recorded, layer: _Layer, call: _Call) -> _Stretch | None:
        """What a layer records in a call that is like that of one which ran; ``None`` if that is not known."""
        numbers = dict(zip(known.call.numbers, call.numbers, strict=True))
        for before, tensor in zip(known.numbers, layer.tensors, strict=True):
            tracked = self.tracer.tracked(tensor)
            if before is None:
                continue
            if before >= known.position.tensors:  # it begins in the layer
                if tracked is not None:
                    return None
            elif tracked is None or not _is_unwritten(tracked):
                return None
            else:
                numbers[before] = tracked.value.tensor
        paths = dict(zip(known.layer.paths, layer.paths, strict=True))
        try:
            return _Renaming(known, self._position(), numbers, paths).stretch(known.stretch)
        except _NotAgain:
            return None

    def _append(self, stretch: _Stretch, layer: _Layer, call: _Call) -> Any:
        """Append what a layer records to the graph, and make what it returns."""
        tracer, graph = self.tracer, self.tracer.graph
        for at, info in enumerate(stretch.tensors):
            if at in stretch.born:
                tracer.begin(layer.tensors[stretch.born[at]])
            else:
                graph.tensors.append(info)
        for name in _LISTS:
            if name != "tensors":
                getattr(graph, name).extend(getattr(stretch, name))
        stretch.notes.put_into(tracer)
        tracer.evaluator.known.update(stretch.known)
        tracer.evaluator.synthetic.update(stretch.synthetic)
        tracer.calls.counts[-1] = dict(stretch.counts)
        for number, name, value in stretch.changes:
            vars(layer.modules[number])[name] = value
        return self._made(stretch.result, call)

    def _made(self, result: Any, call: _Call) -> Any:
        if isinstance(result, _Given):
            return call.tensors[result.at]
        if isinstance(result, _Plain):
            return result.value
        if isinstance(result, _Container):
            items = [self._made(item, call) for item in result.items]
            return dict(zip(result.keys, items, strict=True)) if result.kind is dict else result.kind(items)
        with self.tracer.pause():
            device = self.tracer.device
            made = torch.empty_strided(result.shape, result.stride, dtype=result.dtype, device=device)
            if result.requires_grad:
                made = made.requires_grad_().clone()
            if result.is_view:
                made = made.view(result.shape)
        self.tracer.keep_as(made, result.tracked)
        return made


class _Forward:
    """Takes the place of a layer's forward in a trace."""

    def __init__(self, layers: RepeatedLayers, layer: _Layer) -> None:
        self.layers, self.layer = layers, layer
        self.__wrapped__ = layer.forward  # as code may ask for its signature

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """What the layer returns."""
        return self.layers.run(self.layer, args, kwargs)


class _Kind:
    """Layers that are alike.

    Attributes:
        first: the first of them.
        modules: the modules in it.
        layers: all of them, in the order of their list.
        differing: the plain attributes that are not the same in all, by the number of the module and their name.
        tried: what was recorded of those that ran, where none before had recorded the same.
        proved: what two of them have recorded.
    """

    def __init__(self, first: nn.Module, places: Places) -> None:
        self.first = first
        self.modules = tuple(first.modules())
        self.tensors: list[Tensor] = []
        self.differing = set[tuple[int, str]]()
        self.tried: list[_Recorded] = []
        self.proved: list[_Recorded] = []
        self.layers = [_Layer(self, first, self.modules, places)]

    def add(self, module: nn.Module, places: Places, twins: Twins) -> None:
        """Add a layer."""
        if not self.tensors:
            self.tensors = self.layers[0].tensors = [own for own, _ in twins.tensors]
        layer = _Layer(self, module, tuple(twin for _, twin in twins.modules), places)
        layer.tensors = [twin for _, twin in twins.tensors]
        self.differing |= twins.differing
        self.layers.append(layer)


class _State(NamedTuple):
    """What modules hold.

    Attributes:
        values: plain attributes, by the number of the module and their name.
        objects: everything else, and what is in it, in order.
    """

    values: dict[tuple[int, str], Any]
    objects: list[Any]

    @classmethod
    def of(cls, modules: Sequence[nn.Module]) -> _State:
        """What these modules hold now."""
        state, seen = cls({}, []), set[int]()
        for number, module in enumerate(modules):
            for name, value in vars(module).items():
                if type(value) in PLAIN:
                    state.values[number, name] = value
                else:
                    state.objects.append(value)
                    _look_into(value, state.objects, seen, _DEEPEST)
        return state

    def has_objects_of(self, other: _State) -> bool:
        """Whether all that is not plain is the same."""
        return len(self.objects) == len(other.objects) and all(map(_is, self.objects, other.objects))


def _is(one: object, other: object) -> bool:
    return one is other


def _look_into(value: Any, found: list[Any], seen: set[int], depth: int) -> None:
    """Find what is in a container, or an object that is none of this package's."""
    kind = type(value)
    if kind in PLAIN or not depth or id(value) in seen or isinstance(value, Tensor | nn.Module | type):
        return
    seen.add(id(value))
    if isinstance(value, dict):
        inside = [*value.values()]
    elif isinstance(value, list | tuple | set | frozenset):
        inside = [*value]
    elif callable(value) or kind.__module__.startswith("lightning_autotp."):
        return
    else:
        inside = [*getattr(value, "__dict__", {}).values()]
    found += inside
    for item in inside:
        _look_into(item, found, seen, depth - 1)


class _Layer:
    """One of the layers that are alike.

    Attributes:
        kind: all of them.
        module: the layer.
        path: where it is.
        modules: the modules in it, as their twins in the first one.
        paths: where these are.
        tensors: those of these modules, as their twins in the first one.
        forward: what runs it.
        state: what it held before the model ran.
    """

    forward: Any
    state: _State

    def __init__(self, kind: _Kind, module: nn.Module, modules: tuple[nn.Module, ...], places: Places) -> None:
        self.kind, self.module, self.modules = kind, module, modules
        self.path = places.paths[module]
        self.paths = tuple(places.paths[inner] for inner in modules)
        self.tensors: list[Tensor] = []

    def is_unchanged(self) -> bool:
        """Whether it holds what it held before the model ran."""
        now = _State.of(self.modules)
        return now.values == self.state.values and now.has_objects_of(self.state)

    def changes(self) -> list[tuple[int, str, Any]]:
        """The plain attributes that have changed since: the number of the module, name, value.

        Raises:
            _NotAgain: if anything else has.
        """
        now, missing = _State.of(self.modules), object()
        if not now.has_objects_of(self.state) or self.state.values.keys() - now.values.keys():
            raise _NotAgain
        return [
            (number, name, value)
            for (number, name), value in now.values.items()
            if self.state.values.get((number, name), missing) != value
        ]


class _Call:
    """A call of a layer.

    Attributes:
        tokens: equal for two calls that are alike.
        leaves: all that is in its arguments.
        tensors: the tensors in these, each once.
        numbers: their numbers in the graph.
    """

    def __init__(self, tokens: list[Any]) -> None:
        self.tokens = tokens
        self.leaves: list[Any] = []
        self.tensors: list[Tensor] = []
        self.numbers: list[int] = []

    def is_given(self, args: Any, kwargs: Any) -> bool:
        """Whether its arguments hold what they held before it."""
        now = [*_all_in(args), *_all_in(kwargs)]
        return len(now) == len(self.leaves) and all(map(_is, now, self.leaves))


def _all_in(value: Any) -> Iterator[Any]:
    """What is in a value, and then the value; in the order of a call's leaves."""
    if type(value) in (tuple, list, dict):
        for item in value.values() if type(value) is dict else value:
            yield from _all_in(item)
    yield value


class _Position(NamedTuple):
    """How long the graph is where a layer's forward begins: its tensors, calls and runs; and the layer's own run."""

    tensors: int
    calls: int
    entered: int
    run: int


class _Container(NamedTuple):
    """A container that a layer returns."""

    kind: Any
    keys: tuple[Any, ...]
    items: tuple[Any, ...]


class _Plain(NamedTuple):
    """A plain value that a layer returns."""

    kind: type
    value: Any


class _Given(NamedTuple):
    """A tensor that a layer is given, and returns."""

    at: int


class _Made(NamedTuple):
    """A tensor that a layer makes and returns.

    Attributes:
        shape: its shape.
        stride: its strides.
        dtype: its dtype.
        requires_grad: whether it has a gradient.
        is_view: whether it is another object for its memory than the first one.
        tracked: what the tracer knows of it.
    """

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    requires_grad: bool
    is_view: bool
    tracked: Tracked


class _Notes:
    """What a trace notes by the paths of modules."""

    def __init__(self, noted: Mapping[str, Any], number_returning: dict[str, str]) -> None:
        self.noted, self.number_returning = noted, number_returning

    def put_into(self, tracer: Tracer) -> None:
        """Add them to those of the trace."""
        for name, found in self.noted.items():
            _merge(getattr(tracer.graph, name), found)
        tracer.number_returning |= self.number_returning

    def __eq__(self, other: object) -> bool:
        return vars(self) == vars(other)


class _noting_anew:  # noqa: N801
    """Within it a trace notes things as if nothing was noted before; gives the notes."""

    def __init__(self, tracer: Tracer) -> None:
        self.tracer = tracer

    def __enter__(self) -> _Notes:
        graph, tracer = self.tracer.graph, self.tracer
        self.before = {name: getattr(graph, name) for name in _NOTES}
        self.returning, self.has_drawn = tracer.number_returning, graph.has_drawn
        for name, noted in self.before.items():
            setattr(graph, name, type(noted)())
        tracer.number_returning, graph.has_drawn = {}, False
        return _Notes({name: getattr(graph, name) for name in _NOTES}, tracer.number_returning)

    def __exit__(self, *_: object) -> None:
        graph, tracer = self.tracer.graph, self.tracer
        found = _Notes({name: getattr(graph, name) for name in _NOTES}, tracer.number_returning)
        for name, noted in self.before.items():
            setattr(graph, name, noted)
        tracer.number_returning = self.returning
        graph.has_drawn |= self.has_drawn
        found.put_into(tracer)


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
class _Stretch:
    """What a layer has added to a graph, and what it did besides.

    Attributes:
        notes: what was noted of its modules.
        born: tensors of its modules that were not seen before: at which place in :attr:`tensors`, and which.
        known: the values of some of its tensors.
        synthetic: those that are made up.
        counts: how many calls its own code has made, by where they stand.
        changes: the plain attributes that it changed.
        result: what it returned.
    """

    tensors: list[TensorInfo]
    operators: list[Operator]
    calls: list[TorchCall]
    inspections: list[TorchCall]
    entered: list[str]
    runs: list[ModuleRun]
    experts: list[ExpertsCall]
    notes: _Notes
    born: dict[int, int] = field(default_factory=dict)
    known: dict[int, Tensor] = field(default_factory=dict, compare=False)
    synthetic: dict[int, Tensor] = field(default_factory=dict, compare=False)
    counts: dict[Any, int] = field(default_factory=dict)
    changes: list[tuple[int, str, Any]] = field(default_factory=list)
    result: Any = None

    def is_like(self, other: _Stretch) -> bool:
        """Whether two layers have done the same."""
        values = zip((self.known, self.synthetic), (other.known, other.synthetic), strict=True)
        return self == other and all(_are_equal(*pair) for pair in values)


_LISTS = "tensors", "operators", "calls", "inspections", "entered", "runs", "experts"
"""What a graph has in the order in which the model runs, and a stretch a part of."""


def _are_equal(one: Mapping[int, Tensor], other: Mapping[int, Tensor]) -> bool:
    return one.keys() == other.keys() and all(
        value is other[number] or (value.dtype == other[number].dtype and _hold_the_same(value, other[number]))
        for number, value in one.items()
    )


def _hold_the_same(one: Tensor, other: Tensor) -> bool:
    with torch._C._DisableTorchDispatch():
        return torch.equal(one, other)


@dataclass
class _Recorded:
    """What a layer has recorded that really ran.

    Attributes:
        layer: the layer.
        call: how it was called.
        position: where in the graph it began.
        begun: how many tensors there were before its marks.
        stretch: what it recorded.
        numbers: the numbers of its tensors, as far as they have any.
        is_used: whether it was appended again.
    """

    layer: _Layer
    call: _Call
    position: _Position
    begun: int
    stretch: _Stretch
    numbers: list[int | None] = field(default_factory=list)
    is_used: bool = False

    def fits(self, layer: _Layer, call: _Call) -> bool:
        """Whether another layer's code sees in a call what this one's saw."""
        settings, values = self.stretch.notes.noted["settings"], self.layer.state.values
        return (
            call.tokens == self.call.tokens
            and not any(
                values.get((number, name)) != layer.state.values.get((number, name))
                for number, name in layer.kind.differing
                if name in settings.get(self.layer.paths[number], ())
            )
            and (
                not self.stretch.notes.noted["compiling"]
                or [*map(is_told_compiled, self.layer.paths)] == [*map(is_told_compiled, layer.paths)]
            )
        )


class _Renaming:
    """Renames what one layer has recorded to what another one records.

    Args:
        known: what was recorded.
        now: where in the graph it is to be appended.
        numbers: of tensors from before, by those that the recorded ones are in the place of.
        paths: of modules, alike.
    """

    def __init__(
        self, known: _Recorded, now: _Position, numbers: Mapping[int, int], paths: Mapping[str, str]
    ) -> None:
        self.first, self.now, self.begun = known.position, now, known.begun
        self.numbers, self.paths = numbers, paths
        self.refs: dict[int, Ref] = {}

    def number(self, tensor: int) -> int:
        """A tensor's number."""
        if tensor >= self.first.tensors:
            return tensor - self.first.tensors + self.now.tensors
        if (found := self.numbers.get(tensor)) is None:
            if tensor >= self.begun:  # of this very call, and yet not given to the layer
                raise _NotAgain
            return tensor
        return found

    def path(self, module: str) -> str:
        """A module's path."""
        return self.paths.get(module, module)

    def value(self, value: Any) -> Any:
        """An argument."""
        if isinstance(value, Ref):
            if (found := self.refs.get(value.tensor)) is None:
                found = self.refs[value.tensor] = Ref(self.number(value.tensor))
            return found
        return tuple(map(self.value, value)) if isinstance(value, tuple) else value

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
            one.call if one.call < self.first.calls else one.call - self.first.calls + self.now.calls,
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
            raise _NotAgain
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
        tensors = map(self.number, (one.hidden, one.index, one.weights, one.result))
        return ExpertsCall(self.path(one.module), *tensors, one.places)

    def result(self, one: Any) -> Any:
        """What a layer returns."""
        if isinstance(one, _Container):
            return one._replace(items=tuple(map(self.result, one.items)))
        if not isinstance(one, _Made):
            return one
        tracked, storage = one.tracked, one.tracked.storage
        if storage is not None:
            storage = Storage(self.value(storage.root), storage.version)
        path = tuple(map(self.operator, tracked.path))
        crossed = tuple(map(self.boundary, tracked.crossed))
        return one._replace(tracked=Tracked(self.value(tracked.value), storage, path, tracked.version, crossed))

    def notes(self, one: _Notes) -> _Notes:
        """What is noted of modules."""
        noted = dict(one.noted)
        noted["measured"] = {self.path(path): {*map(self.number, found)} for path, found in noted["measured"].items()}
        for name in ("settings", "integers"):
            noted[name] = {self.path(path): dict(found) for path, found in noted[name].items()}
        for name in ("compiling", "value_reading"):
            noted[name] = {*map(self.path, noted[name])}
        noted["overwritten"] = {*map(self.boundary, noted["overwritten"])}
        returning = {self.path(path): self.path(caller) for path, caller in one.number_returning.items()}
        return _Notes(noted, returning)

    def stretch(self, one: _Stretch) -> _Stretch:
        """What a layer records.

        Raises:
            _NotAgain: if that is not known.
        """
        return _Stretch(
            one.tensors,
            [*map(self.operator, one.operators)],
            [*map(self.call, one.calls)],
            [*map(self.call, one.inspections)],
            [*map(self.path, one.entered)],
            [*map(self.run, one.runs)],
            [*map(self.experts, one.experts)],
            self.notes(one.notes),
            one.born,
            {self.number(tensor): value for tensor, value in one.known.items()},
            {self.number(tensor): value for tensor, value in one.synthetic.items()},
            one.counts,
            one.changes,
            self.result(one.result),
        )


def _is_up_to_date(tracked: Tracked) -> bool:
    """Whether a tensor object holds what was written last into its memory."""
    return tracked.storage is None or tracked.storage.version == tracked.version


def _is_unwritten(tracked: Tracked) -> bool:
    """Whether nothing was written into the memory of a tensor object."""
    return tracked.storage is None or not tracked.storage.version


def _metadata(tensor: Tensor) -> tuple[Any, ...]:
    return (
        tensor.shape,
        tensor.stride(),
        tensor.storage_offset(),
        tensor.untyped_storage().nbytes(),
        tensor.dtype,
        tensor.device,
        tensor.layout,
        tensor.requires_grad,
        tensor.is_leaf,
        tensor.grad_fn is None,
        tensor.is_conj(),
        tensor.is_neg(),
        tensor.is_inference(),
        tensor._is_view(),
    )
