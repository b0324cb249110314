"""Declared functions as torch functions: handlers see their calls.

A trace knows so where they stand, and in the running model they are so while code runs at whose calls of them something
changes: an argument, a result, which random numbers they draw, or what runs in their place.

They are taken by identity, under whatever name code has imported them: for that time, a function written in Python has
other code, and a subclass of ``torch.autograd.Function`` another ``apply``. Any other callable (a kernel's binding) is
replaced where modules have it as a global.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import cache
from types import CodeType, FunctionType, ModuleType
from typing import Any

import torch
from torch import Tensor
from torch.overrides import handle_torch_function, has_torch_function

from lightning_autotp.capture.call_sites import STAND_IN, call_leaves
from lightning_autotp.operators.declared import Declaration, targets
from lightning_autotp.private.torch_private import never_compile, replaced, set_compiler

Function = torch.autograd.Function
MakeCall = Callable[[Callable[..., Any], tuple[Any, ...], dict[str, Any]], Any]
"""Makes a call, from a function and its arguments."""


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
        found: dict[int, DeclaredFunction] = {}
        for made, target in targets(names):
            if id(target) not in found:  # it may be declared under several names
                found[id(target)] = cls._of(target, made)
        return tuple(found.values())

    @classmethod
    def _of(cls, target: Any, made: Declaration) -> DeclaredFunction:
        if is_autograd_function(target):
            return cls(target, made, _signature_of(target))
        if isinstance(target, FunctionType):
            return cls(target, made, inspect.signature(target))
        having = ((module, name) for module in list(sys.modules.values()) for name in _names_of(target, module))
        return cls(target, made, inspect.signature(target), tuple(having))

    def __deepcopy__(self, memo: object) -> DeclaredFunction:
        """A copy of a model calls the same function."""
        return self

    @contextmanager
    def seen(self, run: MakeCall | None = None) -> Iterator[None]:
        """Within it, handlers of torch functions see its calls (a loss's, unless they are of another loss).

        Args:
            run: what makes a call if they do nothing else, from the function itself and its arguments.
        """
        target = self.target
        with ExitStack() as stack:
            if is_autograd_function(target):
                stack.enter_context(replaced(target, apply=SeenFunction(self, target.apply, run)))
            elif isinstance(target, FunctionType):
                code, defaults, closure = target.__code__, target.__defaults__, target.__closure__
                original = FunctionType(code, target.__globals__, target.__name__, defaults, closure)
                original.__kwdefaults__ = target.__kwdefaults__
                stack.callback(setattr, target, "__code__", code)
                target.__code__ = code_calling(SeenFunction(self, original, run), code)
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

        Where code calls it compiled (``torch.compile(flex_attention)``), the function is compiled, and no handler is.
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


def is_autograd_function(target: Any) -> bool:
    """Whether it is a subclass of ``torch.autograd.Function``."""
    return inspect.isclass(target) and issubclass(target, Function)


def _names_of(target: Any, module: ModuleType) -> list[str]:
    return [name for name, value in vars(module).items() if value is target]


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


def code_calling(calls: Callable[..., Any], code: CodeType) -> CodeType:
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


def forward_of(function: type[Function]) -> Callable[..., Any]:
    """What an autograd function runs with a context and its arguments."""
    forward, set_up = function.forward, function.setup_context
    if _is_combined(function):
        return forward

    def both(context: Any, *args: Any) -> Any:
        result = forward(*args)
        set_up(context, args, result)
        return result

    return both
