"""Whether two modules are alike: whether their code finds the same in both, but for the tensors that are theirs."""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Mapping, Set
from dataclasses import dataclass, fields, is_dataclass
from functools import partial
from types import FunctionType, MethodType
from typing import Any

from torch import Tensor, nn

from lightning_autotp.capture.attribute_reads import OF_EVERY_MODULE, PLAIN
from lightning_autotp.layouts.dims import Cut
from lightning_autotp.private.torch_private import buffers_of, children_of, parameters_of

_MOST = 50_000
"""So many values of two modules are compared: where there are more, they are large, and not known to be alike."""
_HELD_BY_EVERY_ONE = vars(nn.Module()).keys()
_CONTAINERS = tuple, list, dict, OrderedDict
"""Containers that hold nothing but what is in them."""


@dataclass(frozen=True)
class Counterparts:
    """Two modules that are alike.

    Attributes:
        modules: the modules in the one, each with its counterpart in the other; itself where both have the same one.
        tensors: the tensors of these modules, alike.
        differing: the plain attributes that are others, by the number of the module and their name.
    """

    modules: tuple[tuple[nn.Module, nn.Module], ...]
    tensors: tuple[tuple[Tensor, Tensor], ...]
    differing: frozenset[tuple[int, str]]


class Places:
    """Where the modules and tensors of a model are.

    Args:
        model: the model.
        of_tensors: names of the attributes that every tensor has.

    Attributes:
        paths: of its modules, each one's first.
    """

    def __init__(self, model: nn.Module, of_tensors: Set[str]) -> None:
        self.of_tensors = of_tensors
        self._shared: dict[nn.Module, set[int]] = {}
        self._inside: dict[nn.Module, dict[str, nn.Module]] = {}
        self.paths = {module: path for path, module in model.named_modules()}
        self._uses = _uses(model)

    def shared(self, module: nn.Module) -> set[int]:
        """The ids of the modules and tensors in a module that are elsewhere in the model, too."""
        if module not in self._shared:
            self._shared[module] = {here for here, count in _uses(module).items() if self._uses[here] != count}
        return self._shared[module]

    def inside(self, module: nn.Module) -> dict[str, nn.Module]:
        """The modules in a module, by all their paths in it."""
        if module not in self._inside:
            self._inside[module] = dict(module.named_modules(remove_duplicate=False))
        return self._inside[module]

    def counterparts(self, one: nn.Module, other: nn.Module) -> Counterparts | None:
        """What belongs together in two modules; ``None`` if they are not alike."""
        try:
            comparison = _Comparison(self, one, other)
            comparison.modules()
        except _Differ:
            return None
        return Counterparts(
            tuple(comparison.pairs), tuple(comparison.tensors.values()), frozenset(comparison.differing)
        )


def _uses(model: nn.Module) -> Counter[int]:
    """How often modules and tensors are attributes of modules, by id."""
    held = (parameters_of, buffers_of, children_of)
    found = (value for module in model.modules() for of in held for value in of(module).values())
    return Counter(id(value) for value in found if value is not None)


class _Differ(Exception):
    """They are not alike."""


class _Comparison:
    """A comparison of two modules."""

    def __init__(self, places: Places, one: nn.Module, other: nn.Module) -> None:
        self.places = places
        self.one, self.other = places.paths[one], places.paths[other]
        self.shared = places.shared(one) | places.shared(other)
        here, there = places.inside(one), places.inside(other)
        _check(here.keys() == there.keys())
        self.counterparts: dict[int, nn.Module] = {}
        for path, module in here.items():
            _check(self.counterparts.setdefault(id(module), there[path]) is there[path])
        self.pairs = [(module, self.counterparts[id(module)]) for module in one.modules()]
        _check(len({id(theirs) for _, theirs in self.pairs}) == len(self.pairs))
        for own, theirs in self.pairs:
            _check(own is theirs or not self.shared & {id(own), id(theirs)})
        self.tensors: dict[int, tuple[Tensor, Tensor]] = {}
        self.differing: set[tuple[int, str]] = set()
        self._seen: set[tuple[int, int]] = set()

    def modules(self) -> None:
        """Compare everything that the modules have.

        Raises:
            _Differ: if they differ.
        """
        for number, (one, other) in enumerate(self.pairs):
            if one is other:
                continue
            here, there = vars(one), vars(other)
            _check(type(one) is type(other) and here.keys() == there.keys())
            tables = [id(of(one)) for of in (parameters_of, buffers_of, children_of)]
            for name, value in here.items():
                theirs = there[name]
                if name not in _HELD_BY_EVERY_ONE:
                    if type(value) in PLAIN and type(theirs) in PLAIN and name not in OF_EVERY_MODULE:
                        if type(value) is not type(theirs) or value != theirs:
                            self.differing.add((number, name))
                    else:
                        self._same(value, theirs)
                elif id(value) in tables:
                    self._same(value, theirs)
                elif type(value) in PLAIN or isinstance(value, set):
                    _check(value == theirs)
                elif value or theirs:
                    self._same(_ranked(value, here), _ranked(theirs, there))
        for tensor, counterpart in self.tensors.values():
            _check(tensor is counterpart or not self.shared & {id(tensor), id(counterpart)})
        _check(len({id(counterpart) for _, counterpart in self.tensors.values()}) == len(self.tensors))

    def _same(self, one: Any, other: Any, is_ours: bool = False) -> None:
        """Compare two values; objects of this package know where they are in the model."""
        if one is other and not isinstance(one, Tensor):
            return
        kind = type(one)
        _check(kind is type(other) and len(self._seen) < _MOST)
        if kind in PLAIN:
            _check(one == other or (is_ours and kind is str and self._there(one) == other))
            return
        if (id(one), id(other)) in self._seen:
            return
        self._seen.add((id(one), id(other)))
        if isinstance(one, nn.Module):
            _check(self.counterparts.get(id(one)) is other)
        elif isinstance(one, Tensor):
            self._tensor(one, other)
        elif isinstance(one, tuple | list | dict):
            if isinstance(one, dict):
                _check(_are_equal(list(one), list(other)))
                self._each(list(one.values()), list(other.values()), is_ours)
            else:
                self._each(one, other, is_ours)
            if kind not in _CONTAINERS and hasattr(one, "__dict__"):
                self._same(vars(one), vars(other), is_ours)
        elif kind is FunctionType:
            _check(one.__code__ is other.__code__ and one.__globals__ is other.__globals__)
            for here, there in zip(*map(_held, (one, other)), strict=True):
                self._same(here, there, is_ours)
        elif kind is MethodType:
            self._same(one.__func__, other.__func__)
            self._same(one.__self__, other.__self__)
        elif kind is partial:
            self._each((one.func, one.args, one.keywords), (other.func, other.args, other.keywords), is_ours)
        elif isinstance(one, set | frozenset) or not hasattr(one, "__dict__"):
            _check(_are_equal(one, other))
        else:
            # What is not among its attributes: of a class that is also a number or a text, say, or has slots.
            _check(getattr(kind, "__new__", None) is object.__new__ or _are_equal(one, other))
            _check(not any(vars(base).get("__slots__") for base in kind.__mro__))
            is_ours = kind.__module__.startswith("lightning_autotp.")
            if kind is Cut:  # each layer is cut along axes of its own; a forward uses only those of the batch
                _check(one.is_like(other) and one.grown_axis == other.grown_axis)
            elif is_ours and is_dataclass(one):  # what it has computed of its fields may be kept in it
                for field in fields(one):
                    self._same(getattr(one, field.name), getattr(other, field.name), is_ours)
            else:
                self._same(vars(one), vars(other), is_ours)

    def _each(self, one: Any, other: Any, is_ours: bool) -> None:
        _check(len(one) == len(other))
        for here, there in zip(one, other, strict=True):
            self._same(here, there, is_ours)

    def _there(self, path: str) -> str:
        """A path in the one as a path in the other."""
        is_inside = f"{path}.".startswith(f"{self.one}.")
        return self.other + path[len(self.one) :] if is_inside else path

    def _tensor(self, one: Tensor, other: Tensor) -> None:
        kind = one.shape, one.stride(), one.dtype, one.device, one.layout, one.requires_grad
        _check(kind == (other.shape, other.stride(), other.dtype, other.device, other.layout, other.requires_grad))
        here, there = vars(one), vars(other)
        own = here.keys() - self.places.of_tensors
        _check(own == there.keys() - self.places.of_tensors)
        for name in own:
            value = here[name]
            if type(value).__module__.startswith("lightning_autotp."):  # how it is made, say, which no forward asks
                _check(type(value) is type(there[name]))
            else:
                self._same(value, there[name])
        self.tensors.setdefault(id(one), (one, other))
        _check(self.tensors[id(one)][1] is other)


def _check(is_so: bool) -> None:
    if not is_so:
        raise _Differ


def _are_equal(one: Any, other: Any) -> bool:
    """Whether two values say so; arrays, of which each element does, do not."""
    try:
        return bool(one == other)
    except Exception:  # whatever their own code raises
        return False


def _held(function: FunctionType) -> list[Any]:
    """What a function has besides its code.

    Raises:
        _Differ: if a variable that it uses from around it has no value yet.
    """
    try:
        variables = [cell.cell_contents for cell in function.__closure__ or ()]
    except ValueError:
        raise _Differ from None
    return [variables, function.__defaults__, function.__kwdefaults__, vars(function)]


def _ranked(table: Mapping[Any, Any], attributes: Mapping[str, Any]) -> list[tuple[Any, Any]]:
    """The hooks of one of a module's tables, each with its number among all hooks of the module."""
    tables = (value for name, value in attributes.items() if name in _HELD_BY_EVERY_ONE and isinstance(value, dict))
    numbers = sorted({key for one in tables for key in one if type(key) is int})
    return [(numbers.index(key) if type(key) is int else key, hook) for key, hook in table.items()]
