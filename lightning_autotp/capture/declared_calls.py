"""Declared functions in a trace: each call is one operator, and the kernel behind it does not run.

They are taken by identity, under whatever name code has imported them: while a model is traced, a function written in
Python has other code, and a subclass of ``torch.autograd.Function`` another forward. Any other callable (a kernel's
binding) is replaced where modules have it as a global.

Those that are losses are torch functions meanwhile: handlers see their calls, and so a trace knows where they stand,
and in the running model another loss takes their place there. For that their ``apply`` is replaced, too.
"""

from __future__ import annotations

import inspect
import sys
import threading
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from types import CodeType, FunctionType
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode, handle_torch_function, has_torch_function

from lightning_autotp.capture import vmap as transforms
from lightning_autotp.capture.call_sites import call_leaves
from lightning_autotp.capture.tracer import Tracer
from lightning_autotp.capture.trials import try_declaration
from lightning_autotp.operators.declared import RETURNED, Declaration, Loss, Results, targets

Function = torch.autograd.Function
_POSITIONAL = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)


@contextmanager
def noting_declared(tracer: Tracer) -> Iterator[None]:
    """Note calls of declared functions in the graph that is traced, in place of what they run."""
    taken: set[int] = set()
    with ExitStack() as stack:
        for declaration, target in targets():
            if id(target) not in taken:
                taken.add(id(target))
                stack.enter_context(_replaced(target, declaration, tracer))
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
def _replaced(target: Any, declaration: Declaration, tracer: Tracer) -> Iterator[None]:
    """Let calls of a function be noted."""
    with ExitStack() as stack:
        if isinstance(target, FunctionType):
            code, signature = target.__code__, inspect.signature(target)
            original = FunctionType(code, target.__globals__, target.__name__, target.__defaults__, target.__closure__)
            original.__kwdefaults__ = target.__kwdefaults__
            stack.callback(setattr, target, "__code__", code)
            target.__code__ = _code_calling(_Calls(declaration, tracer, original, signature), code)
            if "__signature__" not in vars(target):  # code may ask which arguments it takes
                stack.callback(delattr, target, "__signature__")
                vars(target)["__signature__"] = signature
        elif inspect.isclass(target) and issubclass(target, Function):
            calls = _Calls(declaration, tracer, _forward_of(target), _signature_of(target), target.apply)
            with_context = staticmethod(calls.with_context)
            stack.enter_context(_patched(target, forward=with_context, setup_context=Function.setup_context))
            if declaration.loss is not None:
                loss = DeclaredLoss(target, declaration, declaration.loss, calls.signature)
                stack.enter_context(loss.seen(calls.of_loss))
        else:
            calls = _Calls(declaration, tracer, target, inspect.signature(target))
            for module in list(sys.modules.values()):
                for name in [name for name, value in vars(module).items() if value is target]:
                    stack.callback(setattr, module, name, target)
                    setattr(module, name, calls)
        yield


_STAND_IN = """
def made({names}):
    def answer(*__args, **__kwargs):
        if False:
            return {names}
        __calls = "calls"
        return __calls(*__args, **__kwargs)
    return answer
"""


def _code_calling(calls: Callable[..., Any], code: CodeType) -> CodeType:
    """Code that passes its arguments on, for a function that has other code.

    It is compiled as a closure over the same variables: Python reads them from a frame without asking whether the code
    has copied them there (``frame.f_locals``).
    """
    namespace: dict[str, Any] = {}
    exec(_STAND_IN.format(names=", ".join(code.co_freevars)), namespace)
    answer = namespace["made"](*code.co_freevars).__code__
    return answer.replace(co_consts=tuple(calls if value == "calls" else value for value in answer.co_consts))


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
class DeclaredLoss:
    """An autograd function that is declared to be a loss.

    Attributes:
        function: the function.
        declaration: what is declared of it.
        loss: which loss it is.
        signature: its arguments.
    """

    function: type[Function]
    declaration: Declaration
    loss: Loss
    signature: inspect.Signature

    @classmethod
    def called(cls, names: Collection[str]) -> tuple[DeclaredLoss, ...]:
        """Those that are called so. Not while a model is traced."""
        found = targets(losses=names)
        return tuple(cls(target, made, made.loss, _signature_of(target)) for made, target in found if made.loss)

    def seen(self, run: Callable[..., Any] | None = None) -> AbstractContextManager[None]:
        """Within it, handlers of torch functions see its calls, unless they are of another loss.

        Args:
            run: what it runs if they do nothing else; by default what it is.
        """
        return _patched(self.function, apply=LossFunction(self, self.function.apply, run or self.function.apply))

    def arguments(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
        """A call's arguments, by the names that the loss's operator has for them."""
        return self.loss.arguments(_by_name(self.signature, args, kwargs))

    def returned(self, loss: Tensor, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """What such a call returns of the loss."""
        given = _by_name(self.signature, args, kwargs)
        results = self.declaration.notation.returned(given.get)
        return self.declaration.pack(given.get, [None if result is None else loss for result in results])


class LossFunction:
    """The ``apply`` of a declared loss, as a torch function.

    Args:
        declared: the loss.
        original: what it is.
        run: what it runs as the loss that it is declared to be.
    """

    def __init__(self, declared: DeclaredLoss, original: Callable[..., Any], run: Callable[..., Any]) -> None:
        self.declared, self.original, self.run = declared, original, run
        self.__name__ = declared.function.__name__
        self.__code__ = type(self).__call__.__code__  # by which its frames are told from its caller's

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Hand the call over to the handlers that there are, and make it when none is left."""
        if self.declared.loss.unknown(_by_name(self.declared.signature, args, kwargs)):
            return self.original(*args, **kwargs)
        tensors = [leaf for leaf in call_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        if has_torch_function(tensors):
            return handle_torch_function(self, tensors, *args, **kwargs)
        return self.run(*args, **kwargs)


class _Calls:
    """Takes the place of a declared function.

    Args:
        declaration: what is declared of it.
        tracer: what its calls are noted by.
        original: what it runs; of an autograd function, with the context before the arguments.
        signature: its arguments.
        run: runs it; by default what it runs.
    """

    def __init__(
        self,
        declaration: Declaration,
        tracer: Tracer,
        original: Callable[..., Any],
        signature: inspect.Signature,
        run: Callable[..., Any] | None = None,
    ) -> None:
        self.declaration, self.tracer, self.original, self.signature = declaration, tracer, original, signature
        self.run = run or original
        self._thread = threading.get_ident()

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Note one operator, and give what the declaration says of the results."""
        return self.original(*args, **kwargs) if self._is_outside() else self._noted(args, kwargs)

    def with_context(self, context: Any, *args: Any) -> Any:
        """The same for an autograd function."""
        return self.original(context, *args) if self._is_outside() else self._noted(args, {})

    def _is_outside(self) -> bool:
        return self.tracer.paused or transforms.are_active() or threading.get_ident() != self._thread

    def of_loss(self, *args: Any, **kwargs: Any) -> Any:
        """Note a loss as the operator that it is."""
        made, given = self.declaration, _by_name(self.signature, args, kwargs)
        if self._is_outside() or made.loss is None:
            return self.run(*args, **kwargs)
        arguments = [*made.loss.arguments(given).items(), ("kernel", made.name)]
        return self._made(made.loss.operator, arguments, given, self._results(given))

    def _noted(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        made = self.declaration
        given = _by_name(self.signature, args, kwargs)
        results = self._results(given)
        with self.tracer.pause():
            try_declaration(made, self._run_by_name, given, self.tracer.value_if_known)
        functions = dict(made.notation.functions)
        plain = [(name, value if isinstance(value, Tensor) else _plain(value)) for name, value in given.items()]
        for path, dims in functions.items():
            function = _at(given, path)
            if function is not None:
                plain = [item for item in plain if item[0] != path]
                plain.append((path, _read_by(function, dims, self.tracer)))
        declared = made.notation.results
        plain.append((RETURNED, tuple(declared.index(result) for result, _ in filter(None, results))))
        return self._made(made.name, plain, given, results)

    def _results(self, given: Mapping[str, Any]) -> Results:
        shapes = {name: value.shape for name, value in given.items() if isinstance(value, Tensor)}
        return self.declaration.results(shapes, given.get)

    def _made(self, name: str, arguments: Sequence[tuple[str, Any]], given: Mapping[str, Any], results: Results) -> Any:
        """What a call returns that is noted as this operator."""
        tensors = iter(
            self.tracer.call(name, arguments, [(shape, result.dtype) for result, shape in filter(None, results)])
        )
        return self.declaration.pack(given.get, [None if result is None else next(tensors) for result in results])

    def _run_by_name(self, **given: Any) -> Any:
        """Run the function itself."""
        positional: list[Any] = []
        for name, parameter in self.signature.parameters.items():
            if parameter.kind in _POSITIONAL:
                positional.append(given.pop(name))
            elif parameter.kind is inspect.Parameter.VAR_POSITIONAL:
                positional += given.pop(name)
        return self.run(*positional, **given)


def _by_name(signature: inspect.Signature, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """A call's arguments by name."""
    bound = signature.bind(*args, **kwargs)
    bound.apply_defaults()
    named = dict(bound.arguments)
    for name, parameter in signature.parameters.items():
        if parameter.kind is inspect.Parameter.VAR_KEYWORD:
            named |= named.pop(name)
    return named


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


def _read_by(function: Callable[..., Any], dims: Sequence[str], tracer: Tracer) -> tuple[Any, ...]:
    """A function's name, at which places it reads the index that it is called with, and the tensors that it reads.

    It is called once with indices. Of one that cannot be called so, all indices count as read.
    """
    places = tuple(at for at, dim in enumerate(dims) if dim != "-")
    with tracer.pause(), _Reads() as reads:
        given = [torch.zeros(1, dtype=torch.float32 if dim == "-" else torch.long) for dim in dims]
        reads.seen.clear()
        try:
            function(*given)
        except Exception:  # whatever it raises without values
            return _name_of(function), places
    read = tuple(at for at in places if any(leaf is given[at] for leaf in reads.seen))
    tensors = {id(leaf): leaf for leaf in reads.seen if tracer.known(leaf) is not None}
    return _name_of(function), read, *tensors.values()


class _Reads(TorchFunctionMode):
    """Notes the tensors that torch functions are given."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[Tensor] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen += [leaf for leaf in call_leaves((args, kwargs or {})) if isinstance(leaf, Tensor)]
        return func(*args, **(kwargs or {}))
