"""Layers that repeat: what one of them has recorded is appended again for the others, and their code does not run.

A model of a hundred layers runs the same code a hundred times, and all but the first runs record what was recorded
before, of other tensors. So a layer, an element of an ``nn.ModuleList`` or ``nn.Sequential``, is left out where
everything that its code can see is as it was for one that ran:

* the two are :mod:`~lightning_autotp.capture.alike`, and no plain attribute that the one's code read is another, but
  for its number in the model, where that says which slot of a cache it uses;
* they are called alike: with the same values, and with tensors of the same metadata that share memory alike, and that
  hold the same wherever no parameter went into them; in the same modes of torch's;
* the one had no effect but its results, and what it put into its slot of a cache: it wrote into no memory from outside,
  kept no tensor, drew no number in Python, and asked for no values but those that are the same for the other.

Code may still see what is in none of these: it may count its calls in a global variable. So two layers must really have
run, one after the other, with the same effect, before any is left out, and of layers that are alike the last one really
runs. The whole trace is made again, with all layers, if the last one records something else, if code around a layer
uses a tensor from inside of it (kept in a global list, say), or if the model raises an error. Code that behaves like
the others' before and after may still do something else in between; that is seen where it runs
(``applying/followed_code.py``).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from types import FrameType
from typing import Any

from torch import nn

from lightning_autotp.capture import vmap as transforms
from lightning_autotp.capture.alike import Places
from lightning_autotp.capture.alike_layers import AlikeLayers, Layer, State, alike_layers
from lightning_autotp.capture.attribute_reads import is_noted
from lightning_autotp.capture.cache_slots import is_handed_to_cache
from lightning_autotp.capture.compiled_code import is_told_compiled
from lightning_autotp.capture.layer_calls import Call
from lightning_autotp.capture.noted_numbers import Notes
from lightning_autotp.capture.static_values import CHOICES
from lightning_autotp.capture.stretches import LISTS, NotAgain, Position, Renaming, Stretch, noting_anew
from lightning_autotp.capture.synthetic_draws import states
from lightning_autotp.capture.tracer import Tracer, Tracked
from lightning_autotp.layouts.places import Boundary
from lightning_autotp.operators.graph import refs
from lightning_autotp.private.torch_private import HOOKS_OF_ALL_MODULES, unset_fake_temporarily, without_functions


class RepeatedLayers:
    """The repeated layers of a model that is traced.

    Args:
        model: the copy that will run, before anything of the trace is put on it.
        tracer: what it will run under.
        notes: what its code asks of numbers.
        of_tensors: names of the attributes that every tensor of the trace has.
        each: whether each layer is to run.

    Attributes:
        used: what was recorded, and appended again.
        told_apart: modules whose plain attributes differ from those of their counterparts, by path: the trace has to
            note which of these their code reads.
    """

    def __init__(self, model: nn.Module, tracer: Tracer, notes: Notes, of_tensors: frozenset[str], each: bool) -> None:
        self.tracer, self.notes = tracer, notes
        self.of_tensors = of_tensors
        self.used: list[_Recorded] = []
        self._tried: dict[AlikeLayers, list[_Recorded]] = {}  # where none before had recorded the same
        self._proved: dict[AlikeLayers, list[_Recorded]] = {}  # what two of them have recorded
        self._differ = False
        self._read = set[tuple[str, str]]()  # by the layer that runs, as it is recorded
        each = each or any(HOOKS_OF_ALL_MODULES)  # which may do something else for each module
        self.kinds = [] if each else list(alike_layers(model, Places(model, of_tensors), tracer))
        self.told_apart = {
            layer.paths[number]: layer.modules[number]
            for kind in self.kinds
            for number, _ in kind.differing
            for layer in kind.layers
        }
        self._differing = {name for kind in self.kinds for _, name in kind.differing}

    def put_on(self) -> None:
        """Let the layers run so."""
        for kind in self.kinds:
            for layer in kind.layers:
                layer.forward = layer.module.forward
                layer.module.forward = _Forward(self, layer)

    def note_read(self, path: str, name: str, frame: FrameType) -> None:
        """Code reads a plain attribute, in this frame; one that differs, for something else than a cache."""
        if name in self._differing and not is_handed_to_cache(frame, name):
            self._read.add((path, name))

    def begin(self) -> None:
        """Before a call of the model: what ran in another one counts no more."""
        for kind in self.kinds:
            self._tried[kind], self._proved[kind] = [], []
            for layer in kind.layers:
                layer.state = State.of(layer.modules)

    def run(self, layer: Layer, args: Any, kwargs: Any) -> Any:
        """What a layer returns."""
        with without_functions():  # what is asked here is no call of the model's code
            call = self._described(layer, args, kwargs)
        if call is None:
            return layer.forward(*args, **kwargs)
        tried, proved = self._tried[layer.kind], self._proved[layer.kind]
        known = next((one for one in proved if one.fits(layer, call)), None)
        earlier = known or next((one for one in reversed(tried) if one.fits(layer, call)), None)
        expected = None if earlier is None else self._expected(earlier, layer, call)
        if known is not None and expected is not None and layer is not layer.kind.layers[-1]:
            if not known.is_used:
                known.is_used = True
                self.used.append(known)
            with without_functions():
                return self._append(expected, layer, call)
        result, recorded = self._recorded(layer, call, args, kwargs)
        if recorded is not None and expected is not None and self._are_like(recorded.stretch, expected):
            if known is None:
                proved.append(recorded)
        else:
            if known is not None:
                self._differ |= known.is_used
                proved.remove(known)
            if recorded is not None:
                tried.append(recorded)
        return result

    def differ(self) -> bool:
        """Whether a layer did something else than was appended, so that the trace is to be made again with each layer.

        Also if code around a layer has used a tensor of its inside, which must have been kept: those of the layers that
        were left out are missing there.
        """
        owners = {tensor: one.layer.path for one in self.used for tensor in self._inside(one)}
        return self._differ or any(
            not f"{module}.".startswith(f"{owners[tensor]}.")
            for module, tensors in (self._reads() if owners else ())
            for tensor in tensors
            if tensor in owners
        )

    def _inside(self, one: _Recorded) -> set[int]:
        """The tensors that a layer has made, but for those that it gives to what is around it.

        It gives them as they are behind the marks; without a mark as they are.
        """
        made = {tensor for operator in one.stretch.operators for tensor in operator.outputs}
        marked = {
            operator.inputs[0]
            for operator in self.tracer.graph.operators
            if isinstance(mark := operator.boundary, Boundary) and (mark.module, mark.side) == (one.layer.path, "out")
        }
        return made - (set(one.stretch.left) - marked)

    def _reads(self) -> Iterator[tuple[str, Iterable[int]]]:
        """Which tensors the trace uses, with the module whose code does."""
        graph = self.tracer.graph
        for operator in graph.operators:
            yield operator.module, operator.inputs
        for call in graph.inspections:
            yield call.module, (ref.tensor for ref in refs(call.arguments))
        for run in graph.runs:
            yield run.module, (tensor for _, *tensors in (*run.inputs, *run.outputs) for tensor in tensors)
        yield "", graph.outputs

    def _are_like(self, one: Stretch, other: Stretch) -> bool:
        with self.tracer.pause(), unset_fake_temporarily(), without_functions():
            return one.is_like(other)

    # -- how a layer is called ---------------------------------------------------------------------------------------

    def _described(self, layer: Layer, args: Any, kwargs: Any) -> Call | None:
        """A call of a layer; ``None`` where more may matter than can be told."""
        tracer = self.tracer
        if (
            tracer.paused
            or transforms.are_active()
            or tracer.modules[-1] != layer.path
            or tracer.calls.current[0] >= 0
            or not layer.is_unchanged()
        ):
            return None
        try:
            return Call(tracer, self.notes, self.of_tensors, args, kwargs, layer.place)
        except NotAgain:
            return None

    # -- what a layer records ----------------------------------------------------------------------------------------

    def _position(self) -> Position:
        graph = self.tracer.graph
        return Position(len(graph.tensors), len(graph.calls), len(graph.entered), self.tracer.calls.runs[-1])

    def _recorded(self, layer: Layer, call: Call, args: Any, kwargs: Any) -> tuple[Any, _Recorded | None]:
        """What a layer returns, and what it records, if that can be appended again."""
        tracer, graph = self.tracer, self.tracer.graph
        position, begun, random = self._position(), tracer.begun[-1], states()
        lists = {name: len(getattr(graph, name)) for name in LISTS}
        written, asked = len(tracer.written), len(tracer.evaluator.asked)
        read_before, self._read = self._read, set()
        with noting_anew(tracer, self.notes) as noted:
            result = layer.forward(*args, **kwargs)
        stretch = Stretch(noted=noted, **{name: getattr(graph, name)[first:] for name, first in lists.items()})
        calls = range(position.calls, len(graph.calls))
        stretch.numbers = {number: tracer.noted[number] for number in calls if number in tracer.noted}
        recorded = _Recorded(layer, call, position, begun, stretch, self._read)
        self._read = read_before | self._read
        try:
            with without_functions():
                if noted.has_drawn or states() != random or not call.is_given(args, kwargs):
                    raise NotAgain
                stretch.changes = layer.changes()
                made = {tensor for operator in stretch.operators for tensor in operator.outputs}
                if any(root not in made for _, root in tracer.written[written:]):
                    raise NotAgain
                self._note_tensors(recorded)
                self._check_asked(tracer.evaluator.asked[asked:], recorded)
                stretch.counts = dict(tracer.calls.counts[-1])
                stretch.put, stretch.result = call.described(result, made)
        except NotAgain:
            return result, None
        return result, recorded

    def _note_tensors(self, recorded: _Recorded) -> None:
        """Note which numbers the layer's tensors have, and which of those that it added have values."""
        stretch, first = recorded.stretch, recorded.position.tensors
        for at, tensor in enumerate(recorded.layer.tensors):
            tracked = self.tracer.tracked(tensor)
            if tracked is not None and not _is_unwritten(tracked):
                raise NotAgain
            recorded.numbers.append(None if tracked is None else tracked.value.tensor)
            if tracked is not None and tracked.value.tensor >= first:
                stretch.born[tracked.value.tensor - first] = at
        free = [first + at for at in range(len(stretch.tensors)) if at not in stretch.born]
        if not self.tracer.given.keys().isdisjoint(free) or not self.tracer.buffers.isdisjoint(free):
            raise NotAgain  # it begins in this layer, and is none of its own
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
                raise NotAgain
            if producer is not None and not (producer.name in CHOICES and not info.is_static):
                pending += producer.inputs
            elif producer is None and tensor >= first and tensor not in recorded.stretch.known:
                raise NotAgain

    # -- what is appended again --------------------------------------------------------------------------------------

    def _expected(self, known: _Recorded, layer: Layer, call: Call) -> Stretch | None:
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
            renaming = Renaming(known.position, known.begun, self._position(), numbers, paths)
            expected = renaming.stretch(known.stretch)
        except NotAgain:
            return None
        for number, name in layer.kind.differing:  # the number of each in the model is its own
            read = expected.noted.of_modules["integers"].get(layer.paths[number], {})
            if name in read:
                read[name] = layer.state.values[number, name][1]
        return expected

    def _append(self, stretch: Stretch, layer: Layer, call: Call) -> Any:
        """Append what a layer records to the graph, and make what it returns."""
        tracer, graph = self.tracer, self.tracer.graph
        for at, info in enumerate(stretch.tensors):
            if at in stretch.born:
                tracer.begin(layer.tensors[stretch.born[at]])
            else:
                graph.tensors.append(info)
        for name in LISTS:
            if name != "tensors":
                getattr(graph, name).extend(getattr(stretch, name))
        stretch.noted.put_into(tracer, self.notes)
        tracer.noted.update(stretch.numbers)
        tracer.evaluator.known.update(stretch.known)
        tracer.evaluator.synthetic.update(stretch.synthetic)
        tracer.calls.counts[-1] = dict(stretch.counts)
        for number, name, value in stretch.changes:
            vars(layer.modules[number])[name] = value
        call.put_again(stretch.put)
        return call.made(stretch.result)


class _Forward:
    """Takes the place of a layer's forward in a trace."""

    def __init__(self, layers: RepeatedLayers, layer: Layer) -> None:
        self.layers, self.layer = layers, layer
        self.__wrapped__ = layer.forward  # as code may ask for its signature

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """What the layer returns."""
        return self.layers.run(self.layer, args, kwargs)


def _is_unwritten(tracked: Tracked) -> bool:
    """Whether nothing was written into the memory of a tensor object."""
    return tracked.storage is None or not tracked.storage.version


@dataclass
class _Recorded:
    """What a layer has recorded that really ran.

    Attributes:
        layer: the layer.
        call: how it was called.
        position: where in the graph it began.
        begun: how many tensors there were before its marks.
        stretch: what it recorded.
        read: the plain attributes that differ from layer to layer and that its code reads for something else than a
            cache, by the module's path and their name.
        numbers: the numbers of its tensors, as far as they have any.
        is_used: whether it was appended again.
    """

    layer: Layer
    call: Call
    position: Position
    begun: int
    stretch: Stretch
    read: set[tuple[str, str]]
    numbers: list[int | None] = field(default_factory=list)
    is_used: bool = False

    def fits(self, layer: Layer, call: Call) -> bool:
        """Whether another layer's code sees in a call what this one's saw."""
        return (
            call.tokens == self.call.tokens
            and not any(self._tells_apart(layer, number, name) for number, name in layer.kind.differing)
            and (
                not self.stretch.noted.of_modules["compiling"]
                or [*map(is_told_compiled, self.layer.paths)] == [*map(is_told_compiled, layer.paths)]
            )
        )

    def _tells_apart(self, layer: Layer, number: int, name: str) -> bool:
        """Whether this one's code would have seen another value of a plain attribute in another layer."""
        here, there = (one.state.values.get((number, name)) for one in (self.layer, layer))
        if here == there:
            return False
        if not is_noted(self.layer.modules[number]):
            return True
        path = self.layer.paths[number]
        if name not in self.stretch.noted.of_modules["settings"].get(path, ()):
            return False
        are_places = here == (int, self.layer.place) and there == (int, layer.place)
        return not are_places or (path, name) in self.read
