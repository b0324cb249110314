"""Functions and operators whose dims a line of text declares: kernels that run no operator which has a record.

``declare("flash_attn.flash_attn_func", "q[b s h d], k[b t h/g d], v[b t h/g e] -> o[b s h e]", whole="s t d e")`` is
all that a kernel needs: the rule, the shapes of its results in a trace (in which it never runs) and its FLOPs follow.
A declared function is one operator in the trace.
"""

from __future__ import annotations

import os
import re
import sys
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from inspect import isclass
from types import ModuleType
from typing import Any

from lightning_autotp.layouts.dims import ONE, Dim, product
from lightning_autotp.layouts.ownership import Run
from lightning_autotp.operators.graph import Ref, refs
from lightning_autotp.operators.notation import (
    ELLIPSIS,
    NO_INDEX,
    DeclarationError,
    Notation,
    Tensors,
    formula,
    notation,
    size_of,
)
from lightning_autotp.operators.registry import Record, declare_record, record
from lightning_autotp.operators.shapes import Shapes
from lightning_autotp.operators.site import Dims, Site

Pack = Callable[[Callable[[str], Any], Sequence[Any]], Any]
"""Makes what a function returns of its arguments, by name, and of its results."""


Results = list[tuple[Tensors, list[int]] | None]
"""The results of a call, each with its shape, or ``None`` for one that is ``None``."""


def tensor_or_tuple(_: Callable[[str], Any], results: Sequence[Any]) -> Any:
    """One result as it is, several as a tuple."""
    return results[0] if len(results) == 1 else tuple(results)


@dataclass(frozen=True)
class Loss:
    """That an autograd function is a cross-entropy, so that another may run for it on parts of the vocabulary.

    Attributes:
        operator: what it is in a graph: of logits, or of hidden states and a head's weight.
        names: the names of the operator's arguments, each with the one that the function has for it.
        free: arguments that make no other loss of it.
    """

    operator: str
    names: tuple[tuple[str, str], ...]
    free: tuple[str, ...] = ()

    def arguments(self, given: Mapping[str, Any]) -> dict[str, Any]:
        """The operator's arguments, from the function's, by name."""
        return {ours: given.get(theirs) for ours, theirs in self.names}

    def unknown(self, given: Mapping[str, Any]) -> list[str]:
        """Arguments with which it is none that another could run for."""
        known = {*self.free, *(name for _, name in self.names)}
        return [name for name, value in given.items() if name not in known and not _is_off(value)]


@dataclass(frozen=True)
class Declaration:
    """What is declared of one function.

    Attributes:
        target: its dotted name, an operator's as ``torch.library`` has it (``mylib::attention``), or a function's in a
            kernel from the Hub (``owner/name:function``).
        text: how its dims belong together.
        whole: dims that it needs whole.
        summed: dims that it sums over.
        linear: arguments in which, taken together, it is linear.
        draws: an argument with which, if it is not zero, it draws random numbers for every element.
        flops: the floating-point operations of its forward, as a formula of the dims.
        without: arguments that may not be given: with them it is another function.
        groups_if: the flag with which dims may be grouped, and which changes nothing else (``enable_gqa``).
        loss: which loss it is, if it is one.
        pack: what it returns.
        place: file and line of the declaration.
        is_shipped: whether it is one of this package's.
    """

    target: str
    text: str
    whole: frozenset[str] = frozenset()
    summed: frozenset[str] = frozenset()
    linear: tuple[str, ...] = ()
    draws: str = ""
    flops: str = ""
    without: tuple[str, ...] = ()
    groups_if: str = ""
    loss: Loss | None = None
    pack: Pack = tensor_or_tuple
    place: str = ""
    is_shipped: bool = False

    def __post_init__(self) -> None:
        dims, arguments = self.notation.dims, {tensors.name for tensors in self.notation.inputs}
        for what, names, known in (
            ("whole", self.whole, dims),
            ("sum", self.summed, dims),
            ("linear", self.linear, arguments),
        ):
            if unknown := set(names) - known:
                raise DeclarationError(f"{self.target}: {what}={' '.join(sorted(unknown))!r} is not in {self.text!r}")
        if both := self.whole & self.summed:
            raise DeclarationError(f"{self.target}: {' '.join(sorted(both))} is both whole and summed")
        if open_dims := self.notation.missing - self.whole - self.summed:
            raise DeclarationError(
                f"{self.target}: no result has {' '.join(sorted(open_dims))}: say whether it is summed over (sum=) or"
                " needed whole (whole=)"
            )
        self.count({})

    @cached_property
    def notation(self) -> Notation:
        """What its text says."""
        return notation(self.text)

    @property
    def is_operator(self) -> bool:
        """Whether it is an operator of ``torch.library``, which a trace sees without help."""
        return "::" in self.target

    @cached_property
    def own_name(self) -> str:
        """The function's name, without that of its module."""
        return re.split(r"[.:]", self.target)[-1]

    @property
    def name(self) -> str:
        """Its operator's name in a graph."""
        return _operator_name(self.target) if self.is_operator else self.target

    def count(self, sizes: Mapping[str, float]) -> float:
        """Floating-point operations with dims of these sizes; one that no tensor has counts as one index."""
        dims = self.notation.dims
        return formula(self.flops, dims)({**dict.fromkeys(dims, 1.0), **sizes}) if self.flops else 0.0

    def results(self, shapes: Mapping[str, Any], value_of: Callable[[str], Any]) -> Results:
        """The results of a call, each with its shape, or ``None`` for one that is ``None``.

        Args:
            shapes: of the tensors that are given, by the arguments' names.
            value_of: an argument's value, by name.

        Raises:
            DeclarationError: if the call does not fit the declaration.
        """
        sizes = self.sizes(shapes, value_of)
        odd = next((name for name, size in sizes.items() if size != int(size)), None)
        if odd is not None:
            raise DeclarationError(f"{self.described}: {odd} would have {sizes[odd]:g} indices")
        found = next((name for name in self.without if value_of(name) is not None and value_of(name)), None)
        if found is not None:
            raise DeclarationError(f"{self.described}, but not with {found}")
        results = self.notation.returned(value_of)
        return [
            None if result is None else (result, [int(size) for size in self.notation.shape(result, sizes)])
            for result in results
        ]

    def sizes(self, shapes: Mapping[str, Any], value_of: Callable[[str], Any]) -> dict[str, float]:
        """The size of every dim in a call."""
        try:
            return self.notation.sizes(shapes, {name: value_of(name) for name, _ in self.notation.counts})
        except DeclarationError as error:
            raise DeclarationError(f"{self.described}: {error}") from None

    @property
    def code(self) -> str:
        """The call of :func:`declare` that makes it."""
        options = {"whole": sorted(self.whole), "sum": sorted(self.summed), "linear": self.linear}
        given = [f', {key}="{" ".join(names)}"' for key, names in options.items() if names]
        return f'lightning_autotp.declare("{self.target}", "{self.text}"{"".join(given)})'

    @property
    def described(self) -> str:
        """What it declares of what, and where, for messages."""
        return f"{self.target} is declared as {self.text!r} at {self.place}"


def declare(
    target: str | Callable[..., Any],
    text: str,
    *,
    whole: str = "",
    sum: str = "",
    linear: str = "",
    draws: str = "",
    flops: str = "",
) -> None:
    """Declare how a kernel may be divided over the ranks: the dims of its arguments and results, in a line of text.

    .. code-block:: python

        declare(
            "flash_attn.flash_attn_func",
            "q[b s h d], k[b t h/g d], v[b t h/g e] -> o[b s h e]",
            whole="s t d e",
            flops="2 b h s t (d + e)",
        )

    The kernel itself does not run where a model is traced. A dim that is not ``whole`` may be cut over the ranks: each
    then calls the kernel with its part of all the tensors that have it, and whole tensors else. Tensor arguments that
    the text does not name are kept whole. To be called on every rank, before the model is planned.

    Args:
        target: the function's dotted name (the module need not be imported yet), the function itself, a subclass of
            ``torch.autograd.Function``, which is declared by the arguments of its forward, an operator of
            ``torch.library`` as ``"mylib::attention"``, a higher-order operator (``torch.ops.higher_order.NAME``), or a
            function of a kernel from the Hub as ``"kernels-community/flash-attn2:flash_attn_func"``.
        text: how the dims belong together; see :mod:`lightning_autotp.operators.notation`. ``"found"``, for an
            operator of ``torch.library`` whose kernel runs where the model is planned, takes what a trial of it shows.
        whole: dims that it needs whole, such as those of a softmax.
        sum: dims that it sums over, so that on parts of them the ranks' results are parts of a sum.
        linear: arguments in which, taken together, it is linear.
        draws: an argument with which it draws random numbers, as a dropout's probability.
        flops: the floating-point operations of its forward, as a formula of the dims: ``"2 b h s t (d + e)"``.

    Raises:
        DeclarationError: if the text is not understood, says nothing of a dim that no result has, or if the function
            was declared otherwise before.
    """
    if text == _FOUND:
        _TO_FIND.add(_operator_name(target if isinstance(target, str) else _name(target)))
        return
    caller = sys._getframe(1)
    made = Declaration(
        target if isinstance(target, str) else _name(target),
        text,
        frozenset(whole.split()),
        frozenset(sum.split()),
        tuple(linear.split()),
        draws,
        flops,
        place=f"{caller.f_code.co_filename}:{caller.f_lineno}",
    )
    add(made, None if isinstance(target, str) else target)


def add(made: Declaration, target: Any = None) -> None:
    """Add a declaration to those that there are; one of the user's takes the place of a shipped one.

    Raises:
        DeclarationError: if the function was declared otherwise before.
    """
    before = _DECLARED.get(made.name)
    if before is not None and not before.is_shipped and _facts(before) != _facts(made):
        raise DeclarationError(f"{made.target} is declared at {before.place} and otherwise at {made.place}")
    known = record(made.name)
    if before is None and known is not None:
        raise DeclarationError(f"{made.target} has a record already, at {known.place}")
    _DECLARED[made.name] = made
    if target is not None:
        _TARGETS[made.name] = target
    declare_record(
        Record(
            made.name,
            made.place,
            rule=lambda site: _rule(made, site),
            flops=(lambda shapes: made.count(_sizes(made, shapes))) if made.flops else None,
            results=lambda shapes: [
                (shape, result.dtype)
                for result, shape in filter(None, made.results(dict(shapes.named()), shapes.literal))
            ],
            shares=tuple((name, *_holder(made, dim)) for name, dim in made.notation.counts),
            indices=tuple(
                (name, place, *_holder(made, dim))
                for name, dims in made.notation.functions
                for place, dim in enumerate(dims)
                if dim != NO_INDEX
            ),
            groups=tuple(_groups(made)),
            groups_if=made.groups_if,
        )
    )


def is_to_be_found(name: str) -> bool:
    """Whether the user takes what a trial of this operator shows."""
    return name in _TO_FIND


def declared_by_user() -> list[str]:
    """What is declared beside what is shipped, as text: a plan follows from it, too."""
    return sorted(made.code for made in _DECLARED.values() if not made.is_shipped) + sorted(_TO_FIND)


def declaration_of(name: str) -> Declaration | None:
    """The declaration of an operator in a graph, if it has one."""
    return _DECLARED.get(name)


def targets(names: Collection[str] | None = None) -> Iterator[tuple[Declaration, Any]]:
    """The functions and classes that are declared and whose modules are imported, each with its declaration.

    Args:
        names: their own names, by default any.
    """
    declared = (made for made in _DECLARED.values() if not made.is_operator)
    wanted = [made for made in declared if names is None or made.own_name in names]
    hub = _hub_modules() if wanted else {}
    for made in wanted:
        target = _target_of(made, hub)
        if target is not None:
            yield made, target


def _target_of(made: Declaration, hub: Mapping[str, Sequence[ModuleType]]) -> Any:
    if made.name in _TARGETS:
        return _TARGETS[made.name]
    repository, _, function = made.target.partition(":")
    if function:
        found = (vars(module).get(function) for module in hub.get(repository, ()))
        return next((one for one in found if one is not None and not _is_layer(one)), None)
    names = made.target.split(".")
    for cut in range(len(names) - 1, 0, -1):
        module = sys.modules.get(".".join(names[:cut]))
        if module is not None:
            at: Any = module
            for name in names[cut:]:
                at = vars(at).get(name) if isclass(at) else getattr(at, name, None)
            return getattr(at, "__func__", at)
    return None


def advise(package: str, what: str) -> None:
    """Say what to do where a package's kernels or layers cannot be traced and are not to be declared.

    Args:
        package: its name.
        what: what to write instead.
    """
    _ADVICE[f"{package}."] = what


def has_advice(name: str) -> bool:
    """Whether a function or class is of a package on which there is advice."""
    return name.startswith(tuple(_ADVICE))


def advice_on(name: str) -> str:
    """What to do about a kernel that cannot be traced."""
    known = next((what for package, what in _ADVICE.items() if name.startswith(package)), "")
    return known or f'lightning_autotp.declare("{name}", ...) says how it may be divided'


def declarable_name(function: Any) -> str:
    """The name by which a function or class can be declared."""
    repository = _repository_of(sys.modules.get(getattr(function, "__module__", "")))
    return f"{repository}:{function.__qualname__}" if repository else _name(function)


@dataclass(frozen=True)
class CalledFunction:
    """A function among the arguments of a call, which the kernel calls with indices.

    Attributes:
        name: its name.
        leaf: which leaf of the call's arguments it is, or the object that has it; negative if none of them.
        attribute: the object's attribute that it is; empty if it is among the arguments itself.
        computes: the functions of torch that it runs, and the numbers that it gives them: of the whole model on a rank.
        reads: the places of indices that it reads, or along which the object's tensors are not broadcast, and which
            indices of the whole model those of a rank are there, as runs; without runs they are what they are.
        tensors: the tensors that it reads.
    """

    name: str
    leaf: int
    attribute: str
    computes: tuple[str, ...]
    reads: tuple[tuple[int, tuple[Run, ...]], ...]
    tensors: tuple[Any, ...]

    @classmethod
    def of(cls, argument: Any) -> CalledFunction | None:
        """What an operator's argument says of it."""
        if not isinstance(argument, tuple):
            return None
        name, leaf, attribute, computes, reads, *tensors = argument
        return cls(name, leaf, attribute, computes, reads, tuple(tensors))

    @property
    def argument(self) -> tuple[Any, ...]:
        """It as an operator's argument."""
        return self.name, self.leaf, self.attribute, self.computes, self.reads, *self.tensors


RETURNED = "->"
"""Name of the argument, in a graph, that tells which of its declared results a function returned."""


def _hub_modules() -> Mapping[str, Sequence[ModuleType]]:
    """The modules that the ``kernels`` package has loaded, by repository of the Hub: they have names of its own."""
    found = defaultdict[str, list[ModuleType]](list)
    if "kernels" in sys.modules:
        for module in list(sys.modules.values()):
            found[_repository_of(module)].append(module)
    return found


def _repository_of(module: ModuleType | None) -> str:
    """The repository of the Hub that a module comes from: a kernel's, or in older caches a model's. Else empty."""
    file = str(getattr(module, "__file__", "")).replace(os.sep, "/")
    found = _IN_CACHE.search(file) if "--" in file else None
    return f"{found[1]}/{found[2]}" if found else ""


def _is_layer(one: Any) -> bool:
    """Whether it is a module's class: a kernel's layers may have the names of the functions that they call."""
    return isclass(one) and hasattr(one, "register_module")


_IN_CACHE = re.compile(r"/(?:kernels|models)--([^/]+?)--([^/]+)/")
_ADVICE: dict[str, str] = {}
_FOUND = "found"
_TO_FIND: set[str] = set()
_DECLARED: dict[str, Declaration] = {}
_TARGETS: dict[str, Any] = {}


def _name(target: Any) -> str:
    if hasattr(target, "overloadpacket"):  # an operator of torch.library
        return str(target.name())
    if not hasattr(target, "__qualname__"):  # a higher-order operator
        return f"torch.ops.higher_order.{target.name()}"
    return f"{target.__module__}.{target.__qualname__}"


def _operator_name(target: str) -> str:
    """The name in a graph of an operator of ``torch.library``."""
    if "::" not in target:
        raise DeclarationError(f'{target!r}: only an operator of torch.library ("mylib::name") can be tried unseen')
    space, _, rest = target.partition("::")
    return f"{space}.{rest}" if "." in rest else f"{space}.{rest}.default"


def _facts(made: Declaration) -> tuple[Any, ...]:
    return made.text, made.whole, made.summed, made.linear, made.draws, made.flops


def _holder(made: Declaration, dim: str) -> tuple[str, int]:
    """The first tensor argument that has a dim, and where, counted from its end."""
    for tensors in made.notation.inputs:
        for at, term in enumerate(tensors.terms):
            if dim in term.factors:
                return tensors.name, at - len(tensors.terms)
    raise DeclarationError(f"{made.target}: no tensor has the dim {dim}, of which an argument is the size")


def _sizes(made: Declaration, shapes: Shapes) -> dict[str, float]:
    return made.sizes(dict(shapes.named()), shapes.literal)


def _groups(made: Declaration) -> Iterator[tuple[str, int, str, int]]:
    """The arguments with a dim that is grouped, and where the dim is that they group."""
    for group, name in made.notation.groups.items():
        for tensors in made.notation.inputs:
            for at, term in enumerate(tensors.terms):
                if term.factors == (f"{name}/{group}",):
                    yield tensors.name, at - len(tensors.terms), *_holder(made, name)


def _rule(made: Declaration, site: Site) -> list[Dims]:
    """Tie the dims of one name, in all tensors; tensors that are not named stay whole."""
    arguments = dict(site.operator.arguments)
    given = {name: site.dims(name) for name, value in arguments.items() if isinstance(value, Ref)}
    sizes = made.sizes({name: [dim.size for dim in dims] for name, dims in given.items()}, arguments.get)
    dims = _NamedDims(site, sizes)
    named = {tensors.name for tensors in made.notation.inputs} & given.keys()  # not an object with tensors in it
    for tensors in made.notation.given({name: len(several) for name, several in given.items()}):
        if not dims.read(tensors, given[tensors.name]):
            return site.give_up(f"{tensors} of {made.target} is cut across the parts of its dims")
    functions = {name for name, _ in made.notation.functions}
    for name, value in arguments.items():
        for ref in refs(value) if name not in named else ():
            if not isinstance(value, Ref) and name not in functions and site.is_floating(ref):
                return site.give_up(f"{made.target} is not declared to divide the tensors in {name}")
            site.keep_whole(*site.relation.inputs[ref.tensor], because=f"{made.target} is not declared to divide it")
    dims.tie_groups(made.notation.groups)
    dims.keep_whole(made.whole, f"{made.target} needs it whole{_why_itself(made, arguments)}")
    for name, indices in made.notation.functions:
        called = CalledFunction.of(arguments.get(name))
        if called is not None and (called.leaf < 0 or site.operator.call < 0):  # it is not seen in the running model
            dims.keep_whole([indices[place] for place, _ in called.reads], f"{name} reads its index")
    site.contract(*(dim for name in sorted(made.summed) for dim in dims.every[name]))
    site.linear_in(*made.linear)
    if made.draws:
        site.draws(when=arguments.get(made.draws))
    return [dims.made(made.notation.results[at]) for at in arguments.get(RETURNED, range(len(site.shapes)))]


def _is_off(value: Any) -> bool:
    return value is None or (isinstance(value, bool | int | float) and not value)


def _why_itself(made: Declaration, arguments: Mapping[str, Any]) -> str:
    """Why a loss is computed by the function itself."""
    if made.loss is None:
        return ""
    unknown = [name for name in made.loss.unknown(arguments) if name != RETURNED]
    return f" with {', '.join(unknown)}" if unknown else " where code keeps its apply instead of looking it up"


class _NamedDims:
    """The dims of one call, by their names in the declaration."""

    def __init__(self, site: Site, sizes: Mapping[str, float]) -> None:
        self.site, self.sizes = site, sizes
        self.every: dict[str, list[Dim]] = defaultdict(list)
        self._tied: dict[str, Dim] = {}

    def read(self, tensors: Tensors, dims: Dims) -> bool:
        """Tie an argument's dims to those of the same names; false if what it is made of does not allow that."""
        for term, dim in zip(tensors.spelled_out(len(dims)), dims, strict=True):
            parts, rest = [], dim
            for factor in term.factors[:-1]:
                halves = self.site.axes.split(rest, int(size_of(factor, self.sizes)))
                if halves is None:
                    return False
                parts.append(halves[0])
                rest = halves[1]
            for factor, part in zip(term.factors, (*parts, rest), strict=True):
                self._tie(factor, part)
        return True

    def _tie(self, name: str, dim: Dim) -> None:
        if name.isdigit():
            if dim.size > 1:
                self.site.keep_whole(dim, because=f"a dim of {name}")
            return
        self.every[name].append(dim)
        known = self._tied.get(name, ONE)
        self._tied[name] = dim if known.size == 1 else known if dim.size == 1 else self.site.tie(known, dim)

    def tie_groups(self, groups: Mapping[str, str]) -> None:
        """Tie ``h`` to ``h/g`` times ``g``, for every group ``g`` of an ``h``."""
        for group, name in groups.items():
            whole, outer = self._tied.get(name, ONE), self._tied.get(f"{name}/{group}", ONE)
            if whole.size == outer.size:
                self.site.tie(whole, outer)
            elif outer.size > 1:
                inner = self.site.new(whole.size // outer.size)
                self.every[group].append(inner)
                self.site.tie(whole, product([outer, inner]))

    def keep_whole(self, names: Iterable[str], because: str) -> None:
        """The dims of these names may not be cut."""
        for name in names:
            self.site.keep_whole(*self.every[name], because=because)

    def made(self, result: Tensors) -> Dims:
        """A result's dims."""
        leading = sum(name.startswith(ELLIPSIS) for name in self._tied)
        return tuple(
            product([self._result(factor) for factor in term.factors])
            for term in result.spelled_out(leading + len(result.terms) - 1)
        )

    def _result(self, name: str) -> Dim:
        if not name.isdigit():
            return self._tied[name]
        dim = self.site.new(int(name))
        self.site.keep_whole(dim, because=f"a dim of {name}")
        return dim
