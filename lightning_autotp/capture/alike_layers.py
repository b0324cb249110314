"""The layers of a model that are alike: which there are, and whether one is as it was before the model ran."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from torch import Tensor, nn

from lightning_autotp.capture.alike import Counterparts, Places
from lightning_autotp.capture.attribute_reads import PLAIN
from lightning_autotp.capture.stretches import NotAgain
from lightning_autotp.capture.tracer import Tracer

_FEWEST = 4
"""So many layers must be alike: of fewer, all run."""
_CONTAINERS = frozenset((dict, OrderedDict, set, list, tuple))
_DEEPEST = 3
"""Objects in attributes are looked into so deep for what a layer changes."""


def alike_layers(model: nn.Module, places: Places, tracer: Tracer) -> Iterator[AlikeLayers]:
    """The layers of the model that are alike, in the order of their list."""
    done = set[nn.Module]()
    for path, container in model.named_modules():
        if not isinstance(container, nn.ModuleList | nn.Sequential):
            continue
        modules = (member for member in container if member is not None)  # a list may have None in it
        members = [member for member in modules if next(member.children(), None) is not None]
        own = [member for member in members if places.paths[member].rpartition(".")[0] == path]
        kinds = list[AlikeLayers]()
        for member in dict.fromkeys(own):
            if member in done or not _is_traced(tracer, places, member):
                continue
            done.add(member)
            for kind in kinds:
                counterparts = places.counterparts(kind.first, member)
                if counterparts is not None and _are_treated_alike(tracer, places, counterparts):
                    kind.add(member, places, counterparts)
                    break
            else:
                kinds.append(AlikeLayers(member, places))
        yield from (kind for kind in kinds if len(kind.layers) >= _FEWEST)


def _is_traced(tracer: Tracer, places: Places, module: nn.Module) -> bool:
    """Whether a module is looked into, with all in it."""
    path = places.paths[module]
    around = tuple(f"{opaque}." for opaque in tracer.graph.opaque)
    return not f"{path}.".startswith(around) and not any(one.startswith(f"{path}.") for one in around)


def _are_treated_alike(tracer: Tracer, places: Places, counterparts: Counterparts) -> bool:
    pairs = ((places.paths[one], places.paths[other]) for one, other in counterparts.modules)
    return all(tracer.kind_of(one) == tracer.kind_of(other) for one, other in pairs)


class AlikeLayers:
    """Layers that are alike.

    Attributes:
        first: the first of them.
        layers: all of them, in the order of their list.
        differing: the plain attributes that are not the same in all, by the number of the module and their name.
    """

    def __init__(self, first: nn.Module, places: Places) -> None:
        self.first = first
        self.differing = set[tuple[int, str]]()
        self.layers = [Layer(self, first, tuple(first.modules()), places)]

    def add(self, module: nn.Module, places: Places, counterparts: Counterparts) -> None:
        """Add a layer."""
        if not self.layers[0].tensors:
            self.layers[0].tensors = [own for own, _ in counterparts.tensors]
        layer = Layer(self, module, tuple(other for _, other in counterparts.modules), places)
        layer.tensors = [other for _, other in counterparts.tensors]
        self.differing |= counterparts.differing
        self.layers.append(layer)


class Layer:
    """One of the layers that are alike.

    Attributes:
        kind: all of them.
        module: the layer.
        path: where it is.
        place: its number in its list.
        modules: the modules in it, as their counterparts in the first one.
        paths: where these are.
        tensors: those of these modules, as their counterparts in the first one.
        forward: what runs it.
        state: what it held before the model ran.
    """

    forward: Any
    state: State

    def __init__(self, kind: AlikeLayers, module: nn.Module, modules: tuple[nn.Module, ...], places: Places) -> None:
        self.kind, self.module, self.modules = kind, module, modules
        self.path = places.paths[module]
        self.place = int(number) if (number := self.path.rpartition(".")[2]).isdecimal() else None
        self.paths = tuple(places.paths[inner] for inner in modules)
        self.tensors: list[Tensor] = []

    def is_unchanged(self) -> bool:
        """Whether it holds what it held before the model ran."""
        now = State.of(self.modules)
        return now.values == self.state.values and now.has_objects_of(self.state)

    def changes(self) -> list[tuple[int, str, Any]]:
        """The plain attributes that have changed since: the number of the module, name, value.

        Raises:
            NotAgain: if anything else has.
        """
        now = State.of(self.modules)
        if not now.has_objects_of(self.state) or self.state.values.keys() - now.values.keys():
            raise NotAgain
        return [
            (number, name, value)
            for (number, name), (kind, value) in now.values.items()
            if self.state.values.get((number, name)) != (kind, value)
        ]


class State(NamedTuple):
    """What modules hold.

    Attributes:
        values: plain attributes with their classes, by the number of the module and their name.
        objects: everything else, and what is in it, in order.
    """

    values: dict[tuple[int, str], tuple[type, Any]]
    objects: list[Any]

    @classmethod
    def of(cls, modules: Sequence[nn.Module]) -> State:
        """What these modules hold now."""
        state, seen = cls({}, []), set[int]()
        for number, module in enumerate(modules):
            for name, value in vars(module).items():
                if type(value) in PLAIN:
                    state.values[number, name] = type(value), value
                    continue
                state.objects.append(value)
                if type(value) not in _CONTAINERS or value:
                    _look_into(value, state.objects, seen, _DEEPEST)
        return state

    def has_objects_of(self, other: State) -> bool:
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
