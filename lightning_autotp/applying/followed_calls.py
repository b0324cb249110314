"""A call of the running model, followed line by line by the types that its tensors had in the trace.

The proof is of a trace. Code that asks what no trace shows (whether a tensor is fake, an environment variable, a global
flag) may go another way in the run and take a rank's part of a tensor for the whole: its norm, say. The ranks may well
agree on the result. So in the first call of each kind, and at rare intervals after it, the code of the modules is
followed. A line that no trace has seen may do what it likes with tensors of which every rank has all, and may take
single elements of parts. Anything else that it does with a part is an error before it happens.

What cannot be followed (compiled modules, hooks, function transforms, classes of tensors of its own) is not, nor is
what a declared function runs, which is one operator in a trace: tensors that come from there have an unknown type, with
which every line agrees.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from functools import partial
from types import CodeType, FrameType
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils.hooks import RemovableHandle

from lightning_autotp.applying.changed_calls import LocalForward
from lightning_autotp.applying.seen_paths import PathWatch, TypedTensors, UnseenPath, types_of_parameters
from lightning_autotp.capture import vmap as transforms
from lightning_autotp.capture.call_sites import by_call, call_key, call_leaves, calling_frame, is_this_package
from lightning_autotp.capture.declared_calls import codes_of_declared
from lightning_autotp.capture.nested import leaves_of
from lightning_autotp.parameters.state import parallel_state
from lightning_autotp.private.torch_private import has_values, is_compiled_itself, is_in_backward, is_operator
from lightning_autotp.solving.paths import (
    ANY,
    STATIC,
    Given,
    ModuleTypes,
    Outcome,
    SeenPath,
    Type,
    agree,
    is_part,
    said_line,
)
from lightning_autotp.torch_functions import DESCRIBING, ELEMENTWISE, NOTING, OF_MEMORY

_ASKING = DESCRIBING | OF_MEMORY | NOTING
"""Functions that make no tensor of others."""


class FollowedCall:
    """Follows the code of a parallel model in single calls.

    Args:
        watch: compares the code of those modules of the model that go where values say: these it leaves out.

    Attributes:
        running: the modules that are running, the innermost last; ``None`` for one whose code is not followed.
    """

    def __init__(self, watch: PathWatch) -> None:
        self.model, self.watch = watch.model, watch
        self.running: list[_Followed | None] = []
        self._seen: Mapping[str, SeenPath] = {}
        self._handles: list[RemovableHandle] = []
        self._local: list[tuple[LocalForward, Any]] = []
        self._calls: _FollowedCalls | None = None
        self._declared: frozenset[CodeType] = frozenset()
        self._parameters: dict[int, tuple[nn.Parameter, Type]] = {}

    def __reduce__(self) -> tuple[Any, ...]:
        return FollowedCall, (self.watch,)  # a copy of the model has calls of its own

    def begin(self, seen: Mapping[str, SeenPath]) -> None:
        """Before a forward that is to be followed. Not collective, and the ranks' code goes the same way.

        Args:
            seen: by module, what was seen of its code; modules that are missing are not followed.
        """
        self.end()
        if "" not in seen or any(map(is_compiled_itself, self.model.modules())):
            return
        self._seen, self._declared = seen, codes_of_declared()
        self._parameters = {id(one): (one, kind) for one, kind in types_of_parameters(self.model)}
        state = parallel_state(self.model)
        parallel = {use.module for use in state.plan.implementations if use.call is None}
        for module in self.model.modules():
            path = "" if module is self.model else state.path(module)
            if path not in seen:
                continue
            is_layer = type(module).__module__.startswith("torch.nn.") and next(module.children(), None) is None
            has_own_code = not is_layer and path not in parallel and path not in self.watch.seen
            local = LocalForward.of(module) if has_own_code else None
            if local is not None:
                self._local.append((local, local.forward))
                local.forward = partial(self._inside_local, local.forward)
            begins = has_own_code and local is None
            if not path:  # its hooks cannot change now: of its arguments nothing is known
                run = next(iter(seen[""].runs.values()))
                self.running.append(_Followed(self, "", run, None, begins))
                continue
            enter, start = partial(self._enter, path), partial(self._start, begins)
            self._handles += [
                module.register_forward_pre_hook(enter, with_kwargs=True, prepend=True),
                module.register_forward_pre_hook(start, with_kwargs=True),
                module.register_forward_hook(self._stop, prepend=True),
                module.register_forward_hook(self._leave, always_call=True),
            ]
        self._calls = _FollowedCalls(self)
        self._calls.__enter__()

    def returned(self, output: Any) -> None:
        """When the model's own code has run. Not collective.

        Args:
            output: what it returns.

        Raises:
            UnseenPath: if that has a part of a tensor where it had none in the trace.
        """
        self._stop(self.model, (), output)

    def end(self) -> None:
        """Leave nothing on the model. Not collective."""
        if self._calls is not None:
            self._calls.__exit__(None, None, None)
            self._calls = None
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        for local, forward in self._local:
            local.forward = forward
        self._local.clear()
        self.running.clear()
        self._parameters.clear()

    def type_of_parameter(self, tensor: Tensor) -> Type | None:
        """A parameter's type, if it is one of the model's."""
        parameter, kind = self._parameters.get(id(tensor), (None, None))
        return kind if parameter is tensor else None

    def seen(self, path: str) -> SeenPath:
        """What was seen of a module's code."""
        return self._seen[path]

    def is_declared(self, frame: FrameType | None) -> bool:
        """Whether this is code of a declared function, or called by it."""
        while frame is not None and frame.f_code not in self._declared:
            frame = frame.f_back
        return frame is not None

    def _enter(self, path: str, module: nn.Module, args: Any, kwargs: Any) -> None:
        caller = self.running[-1] if self.running else None
        self.running.append(None)  # also if this fails: then the other hook runs all the same
        if caller is None or not caller.is_inside or is_in_backward() or transforms.are_active():
            return
        types = {place: caller.type(tensor) for place, tensor in _by_place((args, kwargs))}
        run = self._run(path, types, caller)
        if run is not None:
            self.running[-1] = _Followed(self, path, run, caller, False)

    def _run(self, path: str, types: Mapping[str, Type], caller: _Followed) -> ModuleTypes | None:
        """The way of calling the module that this is; ``None`` if that is not certain."""
        runs = self._seen[path].runs
        fitting = [run for run in runs.values() if _agree_by_place(types, dict(run.given))]
        if not fitting and any(map(is_part, types.values())):
            said = ", ".join(f"{place}: {kind}" for place, kind in types.items() if is_part(kind))
            raise self.refusal(caller.path, f"it calls {path} with ({said})")
        return fitting[0] if len(fitting) == 1 else None

    def _start(self, begins: bool, module: nn.Module, args: Any, kwargs: Any) -> None:
        here = self.running[-1]
        if here is None:
            return
        here.take(dict(here.run.inside), (args, kwargs))
        here.is_inside = begins

    def _stop(self, module: nn.Module, args: Any, output: Any) -> None:
        here = self.running[-1] if self.running else None
        if here is None or not here.is_inside:
            return
        here.is_inside = False
        types = {place: here.type(tensor) for place, tensor in _by_place(output)}
        if not _agree_by_place(types, dict(here.run.left)):
            said = ", ".join(f"{place or 'its result'}: {kind}" for place, kind in types.items())
            raise self.refusal(here.path, f"it returns ({said})")

    def _leave(self, module: nn.Module, args: Any, output: Any) -> None:
        left = self.running.pop() if self.running else None
        if left is not None and left.caller is not None:
            left.caller.take(dict(left.run.returned), output)

    def _inside_local(self, forward: Any, *args: Any, **kwargs: Any) -> Any:
        """The own code of a module at some of whose calls layouts change: what it calls is seen before that."""
        here = self.running[-1] if self.running else None
        if here is None or self._calls is None:
            return forward(*args, **kwargs)
        here.take(dict(here.run.inside), (args, kwargs))
        here.is_inside = True
        with self._calls:
            return forward(*args, **kwargs)

    def refusal(self, path: str, what: str) -> UnseenPath:
        """The error for code that no trace shows."""
        return UnseenPath(
            f"the code of {path or type(self.model).__name__} does something with a rank's part of a tensor that it did"
            f" not do when the model was traced, so it is not proved that the ranks compute what one process does:"
            f" {what}. It goes another way than in a trace (it asks for an environment variable, a global flag, or"
            f" whether a tensor is fake). Keep that module whole, keep_whole=[{path or '*'!r}], or make its code do the"
            " same in a trace"
        )


class _Followed(TypedTensors):
    """One run of a module."""

    def __init__(
        self, call: FollowedCall, path: str, run: ModuleTypes, caller: _Followed | None, is_inside: bool
    ) -> None:
        super().__init__()
        self.call, self.path, self.run, self.caller, self.is_inside = call, path, run, caller, is_inside

    def type(self, tensor: Tensor) -> Type:
        """A tensor's type; of one that comes from elsewhere it is unknown."""
        known = self.known(tensor)
        if known is None:
            known = self.call.type_of_parameter(tensor)
        return ANY if known is None else known

    def take(self, kinds: Mapping[str, Type], value: Any) -> None:
        """Note the types of what is given to a module, or returned by it."""
        for place, tensor in _by_place(value):
            self.put(tensor, kinds.get(place, ANY))

    def outcome(self, func: Any, caller: FrameType, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Outcome:
        """What a call gives.

        Raises:
            UnseenPath: if it was not seen, and does something with a part of a tensor.
        """
        line = call_key(caller, func)
        given = tuple(frozenset(self._types(value)) for value in (*args, *kwargs.values()))
        calls = self.call.seen(self.path).calls.get(line)
        if calls is not None:
            found = {outcome for wanted, outcome in calls.items() if _agree(given, wanted)}
            if len(found) == 1:
                return found.pop()
            if found:
                return Outcome((ANY,), ())
        elif self.call.is_declared(caller):
            return Outcome((ANY,), ())
        parts = {kind for group in given for kind in group if is_part(kind)}
        rest = {kind for group in given for kind in group} - parts
        if not parts:
            whole = ANY if ANY in rest else next((kind for kind in ("R", "I") if kind in rest), STATIC)
            return Outcome((whole,), ())
        if len(parts) == 1 and not rest - {STATIC} and func in ELEMENTWISE and "P" not in parts:
            return Outcome((parts.pop(),), ())
        seen = "" if calls is None else f", seen with {' or '.join(map(_said, calls))}"
        raise self.call.refusal(self.path, f"it calls {said_line(line)} with {_said(given)}{seen}")

    def note(self, outcome: Outcome, given: list[Any], result: Any) -> None:
        """Note the types of what a call gave, and of what it wrote."""
        for at, kind in outcome.written:
            self.write(given[at], kind)
        found = [leaf for leaf in call_leaves(result) if isinstance(leaf, Tensor)]
        kinds = outcome.results * len(found) if len(outcome.results) == 1 else outcome.results
        for tensor, kind in zip(found, kinds if len(kinds) == len(found) else (ANY,) * len(found), strict=True):
            self.put(tensor, kind)

    def _types(self, value: Any) -> Iterator[Type]:
        return (self.type(leaf) for leaf in call_leaves(value) if isinstance(leaf, Tensor))


class _FollowedCalls(TorchFunctionMode):
    """The calls of torch's functions in a call of the model."""

    def __init__(self, call: FollowedCall) -> None:
        super().__init__()
        self.call = call
        self.is_busy = False

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if torch.compiler.is_compiling():
            return func(*args, **kwargs)
        here = self.call.running[-1] if self.call.running else None
        if self.is_busy or here is None or not here.is_inside or is_in_backward() or transforms.are_active():
            return func(*args, **kwargs)
        if (inside := by_call(func, kwargs)) is not None:
            with self:
                return inside(*args, **kwargs)
        if func in _ASKING or _is_of_a_mode(func, sys._getframe(1)):
            return func(*args, **kwargs)
        caller = calling_frame(func, sys._getframe(1))
        given = [leaf for leaf in call_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        is_seen = not is_this_package(caller.f_code.co_filename) and all(map(has_values, given))
        outcome = here.outcome(func, caller, args, kwargs) if is_seen else None
        leaves = call_leaves([*args, *kwargs.values()])
        self.is_busy = True  # what the function calls in turn is part of this call
        try:
            result = func(*args, **kwargs)  # here, as it is told by its frames who calls it
        finally:
            self.is_busy = False
        if outcome is not None:
            here.note(outcome, leaves, result)
        return result


def _is_of_a_mode(func: Any, frame: FrameType | None) -> bool:
    """Whether a dispatch mode of the user's calls an operator that comes to it (``FlopCounterMode``, say)."""
    if not is_operator(func):
        return False
    while frame is not None and frame.f_code.co_name != "__torch_dispatch__":
        frame = frame.f_back
    return frame is not None


def _agree(given: Given, wanted: Given) -> bool:
    return len(given) == len(wanted) and all(map(agree, given, wanted))


def _agree_by_place(types: Mapping[str, Type], wanted: Mapping[str, Type]) -> bool:
    return all(agree(frozenset([kind]), frozenset([wanted.get(place, STATIC)])) for place, kind in types.items())


def _by_place(value: Any) -> Iterator[tuple[str, Tensor]]:
    return ((place, leaf) for place, leaf in leaves_of(value) if isinstance(leaf, Tensor))


def _said(given: Given) -> str:
    return f"({', '.join(' and '.join(sorted(map(str, group - {STATIC}))) or '-' for group in given)})"
