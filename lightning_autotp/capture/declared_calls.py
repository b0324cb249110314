"""Declared functions in a trace: each call is one operator, and the kernel behind it does not run.

They are torch functions meanwhile: handlers see their calls, and so a trace knows where they stand. In the running
model they are so again where something changes at such a call.

They are taken by identity, under whatever name code has imported them: for that time, a function written in Python has
other code, and a subclass of ``torch.autograd.Function`` another ``apply`` (and in a trace another forward, for code
that has kept its ``apply``). Any other callable (a kernel's binding) is replaced where modules have it as a global.
"""

from __future__ import annotations

import inspect
import sys
import threading
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import cache, partial, wraps
from itertools import pairwise
from types import CodeType, FunctionType, ModuleType
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode, handle_torch_function, has_torch_function

from lightning_autotp.capture import vmap as transforms
from lightning_autotp.capture.call_sites import STAND_IN, call_leaves
from lightning_autotp.capture.tracer import Tracer
from lightning_autotp.capture.trials import try_declaration
from lightning_autotp.layouts.ownership import Run
from lightning_autotp.operators.declared import RETURNED, CalledFunction, Declaration, Results, targets
from lightning_autotp.operators.notation import NO_INDEX
from lightning_autotp.private.torch_private import never_compile, set_compiler

Function = torch.autograd.Function
MakeCall = Callable[[Callable[..., Any], tuple[Any, ...], dict[str, Any]], Any]
"""Makes a call, from a function and its arguments."""

_POSITIONAL = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)


_RUNS = "autotp_whole_indices"
"""Attribute of a function that is given whole indices: by place, the runs of those that this rank has."""


def with_whole_indices(place: int, runs: tuple[Run, ...], function: Callable[..., Any] | None) -> Any:
    """A function that is called with indices of this rank's part of a dim, and reads those of the whole dim.

    Args:
        place: which of its arguments is the index.
        runs: the indices of the whole dim that this rank has, ascending.
        function: the function; ``None`` where a call leaves it out.
    """
    if function is None:
        return None

    @wraps(function)
    def called(*given: Any) -> Any:
        index, begin, end = given[place], runs[0][0], 0
        whole = index + begin
        for (_, stop), (start, _) in pairwise(runs):  # by arithmetic alone, which kernels are compiled from
            end += stop - begin
            begin = start
            whole = whole + (index >= end) * (start - stop)
        return function(*given[:place], whole, *given[place + 1 :])

    vars(called)[_RUNS] = {**vars(called).get(_RUNS, {}), place: runs}
    return called


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
    functions = (each.forward if inspect.isclass(each) and issubclass(each, Function) else each for each in found)
    return frozenset(each.__code__ for each in functions if isinstance(each, FunctionType))


def autograd_function_in(error: BaseException | None) -> type[Function] | None:
    """The class of ``torch.autograd.Function``, other than torch's own, in whose forward an error was raised."""
    forwards = {
        getattr(inspect.unwrap(kind.forward), "__code__", None): kind
        for kind in _subclasses(Function)
        if not kind.__module__.startswith(("torch.", "lightning_autotp."))
    }
    found, traceback = None, error.__traceback__ if error is not None else None
    while traceback is not None:
        found = forwards.get(traceback.tb_frame.f_code, found)
        traceback = traceback.tb_next
    return found


def _subclasses(kind: type[Function]) -> Iterator[type[Function]]:
    for each in kind.__subclasses__():
        yield each
        yield from _subclasses(each)


@contextmanager
def _noted(declared: DeclaredFunction, tracer: Tracer) -> Iterator[None]:
    """Let calls of a function be noted."""
    calls = _Calls(declared, tracer)
    with ExitStack() as stack:
        if declared.is_autograd_function:  # also where code has kept its apply
            forward = staticmethod(calls.in_place_of(_forward_of(declared.target)))
            stack.enter_context(_patched(declared.target, forward=forward, setup_context=Function.setup_context))
        stack.enter_context(declared.seen(calls))
        yield


_CALLING = """
def made({names}):
    def answer(*__args, **__kwargs):
        if False:
            return {names}
        __calls = "calls"
        return __calls(*__args, **__kwargs)
    return answer
"""


@cache
def _calling(names: tuple[str, ...]) -> CodeType:
    """Code of a function with these free variables that passes its arguments on to its constant ``"calls"``."""
    namespace: dict[str, Any] = {}
    exec(compile(_CALLING.format(names=", ".join(names)), STAND_IN, "exec"), namespace)
    code: CodeType = namespace["made"](*names).__code__
    return code


def _code_calling(calls: Callable[..., Any], code: CodeType) -> CodeType:
    """Code that passes its arguments on, for a function that has other code.

    It is compiled as a closure over the same variables: Python reads them from a frame without asking whether the code
    has copied them there (``frame.f_locals``).
    """
    answer = _calling(code.co_freevars)
    answer = answer.replace(co_consts=tuple(calls if value == "calls" else value for value in answer.co_consts))
    never_compile(answer)
    return answer


def _is_combined(function: type[Function]) -> bool:
    """Whether the function's forward is given the context, instead of a ``setup_context`` after it."""
    return function.setup_context is Function.setup_context


def _signature_of(function: type[Function]) -> inspect.Signature:
    """The arguments of an autograd function, without the context."""
    signature = inspect.signature(function.forward)
    given = list(signature.parameters.values())
    return signature.replace(parameters=given[1:] if _is_combined(function) else given)


def _forward_of(function: type[Function]) -> Callable[..., Any]:
    """What an autograd function runs with a context and its arguments."""
    forward, set_up = function.forward, function.setup_context
    if _is_combined(function):
        return forward

    def both(context: Any, *args: Any) -> Any:
        result = forward(*args)
        set_up(context, args, result)
        return result

    return both


@contextmanager
def _patched(target: type[Function], **attributes: Any) -> Iterator[None]:
    with ExitStack() as stack:
        for name, value in attributes.items():
            stack.callback(_put_back, target, name, vars(target).get(name))
            setattr(target, name, value)
        yield


def _put_back(target: type, name: str, value: Any) -> None:
    if value is None:  # it is inherited
        delattr(target, name)
    else:
        setattr(target, name, value)


@dataclass(frozen=True)
class DeclaredFunction:
    """A declared function.

    Attributes:
        target: the function, or the subclass of ``torch.autograd.Function``.
        declaration: what is declared of it.
        signature: its arguments.
        globals: where modules have it, if it is neither written in Python nor an autograd function: module and name.
    """

    target: Any
    declaration: Declaration
    signature: inspect.Signature
    globals: tuple[tuple[ModuleType, str], ...] = ()

    @classmethod
    def all(cls, names: Collection[str] | None = None) -> tuple[DeclaredFunction, ...]:
        """Those whose modules are imported, by default of any name."""
        found = {id(target): (made, target) for made, target in reversed([*targets(names)])}
        return tuple(cls._of(target, made) for made, target in reversed(found.values()))

    @classmethod
    def _of(cls, target: Any, made: Declaration) -> DeclaredFunction:
        if _is_autograd_function(target):
            return cls(target, made, _signature_of(target))
        if isinstance(target, FunctionType):
            return cls(target, made, inspect.signature(target))
        having = ((module, name) for module in list(sys.modules.values()) for name in _names_of(target, module))
        return cls(target, made, inspect.signature(target), tuple(having))

    @property
    def is_autograd_function(self) -> bool:
        """Whether it is a subclass of ``torch.autograd.Function``."""
        return _is_autograd_function(self.target)

    @contextmanager
    def seen(self, run: MakeCall | None = None) -> Iterator[None]:
        """Within it, handlers of torch functions see its calls (a loss's, unless they are of another loss).

        Args:
            run: what makes a call if they do nothing else, from the function itself and its arguments.
        """
        target = self.target
        with ExitStack() as stack:
            if self.is_autograd_function:
                stack.enter_context(_patched(target, apply=SeenFunction(self, target.apply, run)))
            elif isinstance(target, FunctionType):
                code, defaults, closure = target.__code__, target.__defaults__, target.__closure__
                original = FunctionType(code, target.__globals__, target.__name__, defaults, closure)
                original.__kwdefaults__ = target.__kwdefaults__
                stack.callback(setattr, target, "__code__", code)
                target.__code__ = _code_calling(SeenFunction(self, original, run), code)
                if "__signature__" not in vars(target):  # code may ask which arguments it takes
                    stack.callback(delattr, target, "__signature__")
                    vars(target)["__signature__"] = self.signature
            for module, name in self.globals:
                before = getattr(module, name)
                stack.callback(setattr, module, name, before)
                setattr(module, name, SeenFunction(self, before, run))
            yield

    def by_name(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
        """A call's arguments by name."""
        bound = self.signature.bind(*args, **kwargs)
        bound.apply_defaults()
        named = dict(bound.arguments)
        for name, parameter in self.signature.parameters.items():
            if parameter.kind is inspect.Parameter.VAR_KEYWORD:
                named |= named.pop(name)
        return named

    def loss_arguments(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
        """The arguments of a loss's call, by the names that the loss's operator has for them."""
        assert self.declaration.loss is not None
        return self.declaration.loss.arguments(self.by_name(args, kwargs))

    def returned(self, loss: Tensor, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """What a call of a loss returns of the loss."""
        given = self.by_name(args, kwargs)
        results = self.declaration.notation.returned(given.get)
        return self.declaration.pack(given.get, [None if result is None else loss for result in results])


class SeenFunction:
    """A declared function as a torch function.

    Args:
        declared: the function.
        original: what it is.
        run: what makes a call where no handler is left, from what it is and its arguments.
    """

    def __init__(self, declared: DeclaredFunction, original: Callable[..., Any], run: MakeCall | None = None) -> None:
        self.declared, self.original, self.run = declared, original, run
        self.compiler: Any = None
        self.__name__ = declared.declaration.own_name
        self.__code__ = type(self).__call__.__code__  # by which its frames are told from its caller's

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Hand the call over to the handlers that there are, and make it when none is left.

        Where code calls it compiled (``torch.compile(flex_attention)``), what it is is compiled, and no handler.
        """
        compiler, before = set_compiler(None), self.compiler
        self.compiler = before if compiler is None else compiler
        try:
            loss = self.declared.declaration.loss
            if loss is not None and loss.unknown(self.declared.by_name(args, kwargs)):
                return self._original(*args, **kwargs)
            tensors = [leaf for leaf in call_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
            if has_torch_function(tensors):
                return handle_torch_function(self, tensors, *args, **kwargs)
            return self._original(*args, **kwargs) if self.run is None else self.run(self._original, args, kwargs)
        finally:
            self.compiler = before
            set_compiler(compiler)

    def _original(self, *args: Any, **kwargs: Any) -> Any:
        set_compiler(self.compiler)
        try:
            return self.original(*args, **kwargs)
        finally:
            set_compiler(None)


never_compile(SeenFunction.__call__.__code__)


def _is_autograd_function(target: Any) -> bool:
    return inspect.isclass(target) and issubclass(target, Function)


def _names_of(target: Any, module: ModuleType) -> list[str]:
    return [name for name, value in vars(module).items() if value is target]


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
            function = _at(given, path)
            if function is not None:
                plain[path] = self._called(function, dims, leaves).argument
        declared = made.notation.results
        plain[RETURNED] = tuple(declared.index(result) for result, _ in filter(None, results))
        return self._made(made.name, [*plain.items()], given, results)

    def _called(self, function: Callable[..., Any], dims: Sequence[str], leaves: Sequence[Any]) -> CalledFunction:
        """A function that the kernel calls with indices of these dims: what it reads.

        It is called once with indices. Of one that cannot be called so, all indices count as read.
        """
        leaf = next((at for at, leaf in enumerate(leaves) if leaf is function), -1)
        runs: dict[int, tuple[Run, ...]] = vars(function).get(_RUNS, {}) if hasattr(function, "__dict__") else {}
        original = inspect.unwrap(function, stop=lambda one: _RUNS not in vars(one)) if runs else function
        places = tuple(at for at, dim in enumerate(dims) if dim != NO_INDEX)
        with self.tracer.pause(), _Reads() as reads:
            indices = [torch.zeros(1, dtype=torch.float32 if dim == NO_INDEX else torch.long) for dim in dims]
            reads.seen.clear()
            try:
                original(*indices)
            except Exception:  # whatever it raises without values
                reads.seen[:] = indices
        places = tuple(at for at in places if any(leaf is indices[at] for leaf in reads.seen))
        tensors = {id(leaf): leaf for leaf in reads.seen if self.tracer.known(leaf) is not None}
        read = tuple((place, runs.get(place, ())) for place in places)
        return CalledFunction(_name_of(original), leaf, read, tuple(tensors.values()))

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


def _at(given: Mapping[str, Any], path: str) -> Any:
    name, *attributes = path.split(".")
    value = given.get(name)
    for attribute in attributes:
        value = getattr(value, attribute, None)
    return value


def _plain(value: Any) -> Any:
    """An argument that is no tensor as an operator's: equal in two traces, and with the tensors that are in it."""
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
    """Notes the tensors that torch functions are given."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[Tensor] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen += [leaf for leaf in call_leaves((args, kwargs or {})) if isinstance(leaf, Tensor)]
        return func(*args, **(kwargs or {}))
