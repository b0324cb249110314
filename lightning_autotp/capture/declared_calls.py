"""Declared functions in a trace: each call is one operator, and the kernel behind it does not run.

They are torch functions meanwhile (:mod:`~lightning_autotp.capture.seen_functions`), so that it is known where their
calls stand. An autograd function has another forward, too, for code that has kept its ``apply``.
"""

from __future__ import annotations

import inspect
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from traceback import walk_tb
from types import CodeType, FrameType, FunctionType
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from lightning_autotp.capture import vmap as transforms
from lightning_autotp.capture.call_sites import call_leaves
from lightning_autotp.capture.noted_numbers import plain
from lightning_autotp.capture.seen_functions import (
    DeclaredFunction,
    Function,
    forward_of,
    is_autograd_function,
)
from lightning_autotp.capture.tracer import Tracer
from lightning_autotp.capture.trials import try_declaration
from lightning_autotp.capture.whole_indices import has_dim, whole_indices_of, whole_object
from lightning_autotp.operators.declared import RETURNED, CalledFunction, Results, targets
from lightning_autotp.operators.notation import NO_INDEX
from lightning_autotp.private.torch_private import replaced

_POSITIONAL = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)


@contextmanager
def noting_declared(tracer: Tracer) -> Iterator[None]:
    """Note calls of declared functions in the graph that is traced, in place of what they run."""
    with ExitStack() as stack:
        for declared in DeclaredFunction.all():
            stack.enter_context(_noted(declared, tracer))
        yield


def codes_of_declared() -> frozenset[CodeType]:
    """The code of the declared functions that are written in Python."""
    found = (target for _, target in targets())
    functions = (each.forward if is_autograd_function(each) else each for each in found)
    return frozenset(each.__code__ for each in functions if isinstance(each, FunctionType))


def autograd_function_in(error: BaseException | None) -> type[Function] | None:
    """The class of ``torch.autograd.Function``, other than torch's own, in whose forward an error was raised."""
    forwards = {
        getattr(inspect.unwrap(kind.forward), "__code__", None): kind
        for kind in _subclasses(Function)
        if not kind.__module__.startswith(("torch.", "lightning_autotp."))
    }
    found = None
    for frame in _frames_of(error):
        found = forwards.get(frame.f_code, found)
    return found


def higher_order_operator_in(error: BaseException | None) -> Any:
    """The higher-order operator in whose call an error was raised: torch knows of none what a trace is to do."""
    for frame in _frames_of(error):
        operator = frame.f_locals.get("self") if frame.f_code.co_name == "dispatch" else None
        name = getattr(operator, "name", None)
        if callable(name) and getattr(torch.ops.higher_order, name(), None) is operator:
            return operator
    return None


def _frames_of(error: BaseException | None) -> Iterator[FrameType]:
    """The frames that an error went through, the outermost first."""
    return (frame for frame, _ in walk_tb(error.__traceback__ if error is not None else None))


def _subclasses(kind: type[Function]) -> Iterator[type[Function]]:
    for each in kind.__subclasses__():
        yield each
        yield from _subclasses(each)


@contextmanager
def _noted(declared: DeclaredFunction, tracer: Tracer) -> Iterator[None]:
    """Let calls of a function be noted."""
    calls = _Calls(declared, tracer)
    with ExitStack() as stack:
        if is_autograd_function(declared.target):  # also where code has kept its apply
            forward = staticmethod(calls.in_place_of(forward_of(declared.target)))
            stack.enter_context(replaced(declared.target, forward=forward, setup_context=Function.setup_context))
        stack.enter_context(declared.seen(calls))
        yield


class _Calls:
    """Makes the calls of a declared function in a trace.

    Args:
        declared: the function.
        tracer: what its calls are noted by.
    """

    def __init__(self, declared: DeclaredFunction, tracer: Tracer) -> None:
        self.declared, self.declaration, self.tracer = declared, declared.declaration, tracer
        self._thread = threading.get_ident()

    def __call__(self, original: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Note one operator, and give what the declaration says of the results."""
        if self._is_outside():
            return original(*args, **kwargs)
        given, loss = self.declared.by_name(args, kwargs), self.declaration.loss
        if loss is None:
            return self._noted(original, given, call_leaves((args, kwargs)))
        arguments = [*loss.arguments(given).items(), ("kernel", self.declaration.name)]
        return self._made(loss.operator, arguments, given, self._results(given))

    def in_place_of(self, forward: Callable[..., Any]) -> Callable[..., Any]:
        """The same in the place of an autograd function's forward."""

        def noted(context: Any, *args: Any) -> Any:
            if self._is_outside():
                return forward(context, *args)
            return self._noted(self.declared.target.apply, self.declared.by_name(args, {}), args)

        return noted

    def _is_outside(self) -> bool:
        return self.tracer.paused or transforms.are_active() or threading.get_ident() != self._thread

    def _noted(self, original: Callable[..., Any], given: dict[str, Any], leaves: Sequence[Any]) -> Any:
        made = self.declaration
        results = self._results(given)
        with self.tracer.pause():
            try_declaration(made, partial(self._run_by_name, original), given, self.tracer.value_if_known)
        plain = {name: value if isinstance(value, Tensor) else _plain(value) for name, value in given.items()}
        for path, dims in made.notation.functions:
            name, _, attribute = path.partition(".")
            if given.get(name) is not None:
                plain[path] = self._called(given[name], attribute, dims, leaves).argument
        declared = made.notation.results
        plain[RETURNED] = tuple(declared.index(result) for result, _ in filter(None, results))
        return self._made(made.name, [*plain.items()], given, results)

    def _called(self, given: Any, attribute: str, dims: Sequence[str], leaves: Sequence[Any]) -> CalledFunction:
        """A function that the kernel calls with indices of these dims: what it reads.

        It is called once with indices. Of one that cannot be called so, all indices count as read. The numbers that it
        computes with are part of what it is: a rank's number of heads, for the model's, would go on silently.

        Args:
            given: the function, or the object that has it.
            attribute: the object's attribute that it is.
            dims: of the indices that it is called with.
            leaves: of the call's arguments.
        """
        at = next((at for at, leaf in enumerate(leaves) if leaf is given), -1)
        original, runs = whole_indices_of(getattr(given, attribute) if attribute else given)
        own = vars(whole_object(given)).values() if attribute else ()
        with self.tracer.pause(), _Reads() as reads:
            indices = [torch.zeros(1, dtype=torch.float32 if dim == NO_INDEX else torch.long) for dim in dims]
            reads.seen.clear()
            reads.computed.clear()
            try:
                original(*indices)
            except Exception:  # whatever it raises without values
                reads.seen[:] = indices
        read = [
            (place, runs.get(place, ()))
            for place, dim in enumerate(dims)
            if dim != NO_INDEX
            and (any(leaf is indices[place] for leaf in reads.seen) or any(has_dim(value, place) for value in own))
        ]
        tensors = {id(leaf): leaf for leaf in reads.seen if self.tracer.known(leaf) is not None}
        computes = tuple(reads.computed)
        return CalledFunction(_name_of(original), at, attribute, computes, tuple(read), tuple(tensors.values()))

    def _results(self, given: Mapping[str, Any]) -> Results:
        shapes = {name: value.shape for name, value in given.items() if isinstance(value, Tensor)}
        return self.declaration.results(shapes, given.get)

    def _made(self, name: str, arguments: Sequence[tuple[str, Any]], given: Mapping[str, Any], results: Results) -> Any:
        """What a call returns that is noted as this operator."""
        tensors = iter(
            self.tracer.call(name, arguments, [(shape, result.dtype) for result, shape in filter(None, results)])
        )
        return self.declaration.pack(given.get, [None if result is None else next(tensors) for result in results])

    def _run_by_name(self, original: Callable[..., Any], **given: Any) -> Any:
        """Run the function itself."""
        positional: list[Any] = []
        for name, parameter in self.declared.signature.parameters.items():
            if parameter.kind in _POSITIONAL:
                positional.append(given.pop(name))
            elif parameter.kind is inspect.Parameter.VAR_POSITIONAL:
                positional += given.pop(name)
        return original(*positional, **given)


def _plain(value: Any) -> Any:
    """An argument that is no tensor as an operator's: equal in two traces, and with the tensors that are in it."""
    value = whole_object(value)
    if value is None or isinstance(value, bool | int | float | str | Tensor):
        return value
    if isinstance(value, tuple | list):
        return tuple(map(_plain, value))
    if isinstance(value, Mapping):
        return tuple((str(key), _plain(item)) for key, item in value.items())
    if isinstance(value, torch.dtype | torch.device):
        return str(value)
    inside = [item for item in vars(value).values() if isinstance(item, Tensor)] if hasattr(value, "__dict__") else []
    return (_name_of(value), *inside)


def _name_of(value: Any) -> str:
    named = value if hasattr(value, "__qualname__") else type(value)
    return f"{named.__module__}.{named.__qualname__}"


class _Reads(TorchFunctionMode):
    """Notes the torch functions that run: the tensors that they are given, and each with the numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[Tensor] = []
        self.computed: list[str] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        leaves = [plain(leaf) for leaf in call_leaves((args, kwargs or {}))]
        self.seen += [leaf for leaf in leaves if isinstance(leaf, Tensor)]
        numbers = (str(leaf) for leaf in leaves if isinstance(leaf, bool | int | float))
        self.computed.append(f"{getattr(func, '__name__', func)}({', '.join(numbers)})")
        return func(*args, **(kwargs or {}))
