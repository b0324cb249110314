"""The running code of modules that go where values say, compared step by step with what was seen of it in the trace.

See :mod:`~lightning_autotp.solving.paths` for why this is enough. A step that was not seen is an error before anything
is communicated at it. The values that decide are the same on every rank, so it is one on every rank.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Iterable, Iterator, Mapping
from types import FrameType
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils.hooks import RemovableHandle

from lightning_autotp.applying.changed_calls import LocalForward
from lightning_autotp.capture.call_sites import (
    by_call,
    call_key,
    call_leaves,
    calling_frame,
    grouped_leaves,
    is_user_code,
)
from lightning_autotp.capture.nested import constants_in, leaves_of, tensors_in
from lightning_autotp.parameters.state import parallel_state
from lightning_autotp.private.torch_private import has_values
from lightning_autotp.solving.paths import (
    STATIC,
    UNSEEN,
    ZEROS,
    Given,
    Line,
    ModuleTypes,
    Outcome,
    SeenPath,
    ShardType,
    Type,
    all_fit,
    fits,
    said_line,
    type_of,
)
from lightning_autotp.torch_functions import writes

_UNKNOWN = "unknown"
_NEUTRAL = (STATIC, ZEROS)
_DEVICE = Tensor.device.__get__
_NUMBERS = Tensor.tolist, Tensor.numpy
_WHOLE = ("I", "R", *_NEUTRAL)


class UnseenPath(RuntimeError):
    """Values lead a module's code another way than any that was seen in the trace that its plan was proved for."""


class PathWatch:
    """Compares the code of some modules of a parallel model with what was seen of it.

    Args:
        model: the local model.
    """

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.seen: dict[str, SeenPath] = {}
        self.handles: list[RemovableHandle] = []
        self.parameters: dict[int, tuple[weakref.ref[nn.Parameter], Type]] = {}
        self.running: list[_Running | None] = []  # None: a module whose code is not compared

    def follow(self, seen: Mapping[str, SeenPath], original: nn.Module) -> None:
        """Compare from now on with this, and with nothing else.

        Args:
            seen: by module, what was seen of its code.
            original: the model before it became local.
        """
        for handle in self.handles:
            handle.remove()
        self.handles.clear()
        for module in self.model.modules():
            holder = _holder(module)
            if isinstance(forward := vars(holder).get("forward"), _SeenForward):
                holder.forward = forward.forward
        self.seen = dict(seen)
        parallel = {use.module for use in parallel_state(self.model).plan.implementations if use.call is None}
        for path in self.seen:
            module = self.model.get_submodule(path)
            self.handles.append(module.register_forward_pre_hook(_Enter(self, path), with_kwargs=True, prepend=True))
            self.handles.append(module.register_forward_hook(_Leave(self), always_call=True))
            own = original.get_submodule(path)
            is_layer = type(own).__module__.startswith("torch.nn.") and next(own.children(), None) is None
            if path not in parallel and not is_layer:
                holder = _holder(module)
                holder.forward = _SeenForward(self, path, holder.forward)

    def join(self, seen: Mapping[str, SeenPath]) -> str:
        """Add what was seen in another kind of call; returns where the two contradict each other, if they do."""
        for path, found in seen.items():
            if path not in self.seen:
                return f"{path or 'the model'}: in other calls its code does not depend on values"
            contradiction = self.seen[path].join(found)
            if contradiction:
                return f"{path or 'the model'}: {contradiction}"
        return ""

    def type_of_parameter(self, parameter: nn.Parameter) -> Type | None:
        """A parameter's type, if it is one of the model's."""
        for _ in range(2):
            found = self.parameters.get(id(parameter))
            if found is not None and found[0]() is parameter:
                return found[1]
            self.parameters = {id(one): (weakref.ref(one), kind) for one, kind in types_of_parameters(self.model)}
        return None

    def refusal(self, path: str, what: str) -> UnseenPath:
        """The error for a step that was not seen."""
        return UnseenPath(
            f"{type(self.model).__name__}: values of this batch lead the code of {path or 'the model'} a way that it"
            " did not go when the model was traced, and it is not proved that the ranks' parts compute the same"
            f" there: {what}. Keep that module whole, keep_whole=[{path!r}], or give example_inputs with which it goes"
            " this way"
        )


def types_of_parameters(model: nn.Module) -> Iterator[tuple[nn.Parameter, Type]]:
    """The parameters of a parallel model, and their types."""
    metas = parallel_state(model).metas
    for name, parameter in model.named_parameters(remove_duplicate=False):
        if name in metas:
            yield parameter, type_of(metas[name].layout, metas[name].rank)


def _holder(module: nn.Module) -> Any:
    """What has the forward that is the module's own code."""
    return LocalForward.of(module) or module


class TypedTensors:
    """The types of tensors that a module's code has."""

    def __init__(self) -> None:
        self.types: dict[int, tuple[weakref.ref[Tensor], Type]] = {}
        self.neutral: list[weakref.ref[Tensor]] = []

    def put(self, tensor: Tensor, kind: Type) -> None:
        """Note a tensor's type."""
        reference = weakref.ref(tensor)
        self.types[id(tensor)] = reference, kind
        if kind in _NEUTRAL:
            self.neutral.append(reference)

    def known(self, tensor: Tensor) -> Type | None:
        """The type that was noted of a tensor."""
        found = self.types.get(id(tensor))
        return found[1] if found is not None and found[0]() is tensor else None

    def write(self, tensor: Tensor, kind: Type) -> None:
        """Note that a tensor was written in place, and what it is now: all that share its memory, too."""
        if kind not in _NEUTRAL:
            memory = tensor.untyped_storage().data_ptr()
            alive = [other for reference in self.neutral if (other := reference()) is not None]
            sharing = [other for other in alive if other.untyped_storage().data_ptr() == memory]
            for other in sharing:
                self.types[id(other)] = weakref.ref(other), kind
            self.neutral = [weakref.ref(other) for other in alive if self.types[id(other)][1] in _NEUTRAL]
        self.put(tensor, kind)


class _Running(TypedTensors):
    """One run of a module whose code is compared."""

    def __init__(self, watch: PathWatch, path: str, run: ModuleTypes, caller: _Running | None) -> None:
        super().__init__()
        self.watch, self.path, self.run, self.caller = watch, path, run, caller
        self.is_compared = True

    def type(self, tensor: Tensor) -> Type:
        """A tensor's type; one of which nothing is known is static, if no gradient flows through it."""
        kind = self.known(tensor)
        if kind is None and isinstance(tensor, nn.Parameter):
            kind = self.watch.type_of_parameter(tensor)
        if kind is None:
            return _UNKNOWN if tensor.requires_grad else STATIC
        return kind

    def given(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Given:
        """The types in each argument of a call."""
        groups = []
        for value in (*args, *kwargs.values()):
            types = {self.type(leaf) for leaf in call_leaves(value) if isinstance(leaf, Tensor)}
            groups.append(frozenset(types - {STATIC}))
        return tuple(groups)

    def outcome(self, line: Line, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Outcome:
        """What a call gives.

        Raises:
            UnseenPath: if it was not seen with such tensors.
        """
        calls = self.watch.seen[self.path].calls.get(line)
        if calls is None and self._only_tells(line, args, kwargs):
            return Outcome((UNSEEN,), ())
        if calls is None:
            raise self.watch.refusal(self.path, f"it calls {said_line(line)}")
        given = self.given(args, kwargs)
        if given in calls:
            return calls[given]
        for wanted, outcome in calls.items():
            if len(wanted) == len(given) and all(map(fits, given, wanted)):
                return outcome
        raise self.watch.refusal(
            self.path, f"it calls {said_line(line)} with {_said(given)}, seen with {' or '.join(map(_said, calls))}"
        )

    def _only_tells(self, line: Line, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
        """Whether a call can do no more than tell the way: its result is not one that any line was seen with.

        It writes nothing, and takes static tensors, which are the same on all ranks, but no number that may be a size.
        """
        leaves = call_leaves((args, dict(kwargs)))
        tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
        return (
            bool(tensors)
            and all(self.type(tensor) in (STATIC, UNSEEN) for tensor in tensors)
            and not any(type(leaf) is int and leaf > 1 for leaf in leaves)
            and not writes(line[2])
            and "out" not in kwargs
        )

    def returns(self, line: Line, outcome: Outcome, given: list[Any], result: Any) -> None:
        """Note what a call gave."""
        found = [leaf for leaf in call_leaves(result) if isinstance(leaf, Tensor)]
        kinds = outcome.results * len(found) if len(outcome.results) == 1 else outcome.results
        if len(kinds) != len(found):
            raise self.watch.refusal(self.path, f"{said_line(line)} gives {len(found)} tensors, not {len(kinds)}")
        for at, kind in outcome.written:
            self.write(given[at], kind)
        for tensor, kind in zip(found, kinds, strict=True):
            if isinstance(kind, ShardType) and not _has_length(tensor, kind):
                raise self.watch.refusal(
                    self.path, f"{said_line(line)} gives a part of shape {list(tensor.shape)}, of another length"
                )
            self.put(tensor, kind)


def _has_length(tensor: Tensor, kind: ShardType) -> bool:
    return all(dim < tensor.dim() and (length is None or tensor.shape[dim] == length) for dim, _, length in kind.dims)


def _said(given: Given) -> str:
    return f"({', '.join(' and '.join(sorted(map(str, group))) or '-' for group in given)})"


def _by_place(value: Any) -> Iterable[tuple[str, Tensor]]:
    return ((place, leaf) for place, leaf in leaves_of(value) if isinstance(leaf, Tensor))


class _Enter:
    """Forward pre-hook, before all others, of a module whose code, or whose caller's, is compared."""

    def __init__(self, watch: PathWatch, path: str) -> None:
        self.watch, self.path = watch, path

    def __call__(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        running = self.watch.running
        caller = running[-1] if running else None
        caller = caller if caller is not None and caller.is_compared else None
        running.append(None)  # also if this fails: then the other hook runs all the same
        follows = caller is None and self.watch.seen[self.path].constants  # a way that is the same again
        if not follows and all(map(has_values, tensors_in((args, kwargs)))):
            running[-1] = _Running(self.watch, self.path, self._run((args, kwargs), caller), caller)

    def _run(self, given: Any, caller: _Running | None) -> ModuleTypes:
        """The way of calling the module that this is."""
        runs = self.watch.seen[self.path].runs
        if caller is None:  # its caller's code goes the same way as in the trace
            places = {place for place, _ in _by_place(given)}
            fitting = [run for run in runs.values() if places >= dict(run.given).keys()]
            if len(fitting) != 1:
                raise self.watch.refusal(self.path, f"it is called with tensors at {', '.join(sorted(places))}")
            return fitting[0]
        types = {place: caller.type(tensor) for place, tensor in _by_place(given)}
        found = {place: kind for place, kind in types.items() if kind != STATIC}
        for run in runs.values():
            if all_fit(found, dict(run.given)):
                return run
        said = ", ".join(f"{place}: {kind}" for place, kind in found.items())
        raise self.watch.refusal(caller.path, f"it calls {self.path} with ({said})")


class _Leave:
    """Forward hook of such a module, after those that change layouts."""

    def __init__(self, watch: PathWatch) -> None:
        self.watch = watch

    def __call__(self, module: nn.Module, args: Any, output: Any) -> None:
        left = self.watch.running.pop()
        if left is None or left.caller is None:
            return
        kinds = dict(left.run.returned)
        for place, tensor in _by_place(output):
            if place in kinds:
                left.caller.put(tensor, kinds[place])


class _SeenForward:
    """A module's own code, compared while it runs."""

    def __init__(self, watch: PathWatch, path: str, forward: Any) -> None:
        self.watch, self.path, self.forward = watch, path, forward

    @torch.compiler.disable
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run it.

        Raises:
            UnseenPath: if it goes a way that was not seen.
        """
        here = self.watch.running[-1] if self.watch.running else None
        if here is None or here.path != self.path:  # a trace, or a call of the forward itself
            return self.forward(*args, **kwargs)
        kinds = dict(here.run.inside)
        for place, tensor in _by_place((args, kwargs)):
            if place in kinds:
                here.put(tensor, kinds[place])
        if constants_in((args, kwargs)) in self.watch.seen[self.path].constants:
            here.is_compared = False  # its code decides nothing: it goes the same way again
            return self.forward(*args, **kwargs)
        with _SeenCalls(here):
            result = self.forward(*args, **kwargs)
        wanted = dict(here.run.left)
        types = {place: here.type(tensor) for place, tensor in _by_place(result)}
        if not all_fit({place: kind for place, kind in types.items() if kind != STATIC}, wanted):
            said = ", ".join(f"{place or 'its result'}: {kind}" for place, kind in types.items())
            raise self.watch.refusal(self.path, f"it returns ({said})")
        return result


class _SeenCalls(TorchFunctionMode):
    """One run."""

    def __init__(self, here: _Running) -> None:
        super().__init__()
        self.here = here

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if (inside := by_call(func, kwargs)) is not None:
            with self:
                return inside(*args, **kwargs)
        caller = calling_frame(func, sys._getframe(1))
        if self.here.watch.running[-1] is not self.here or _is_hook(caller):
            return func(*args, **kwargs)
        line = call_key(caller, func)
        _, given = grouped_leaves(args, kwargs)
        if func == _DEVICE or (func in _NUMBERS and self.here.type(args[0]) in _WHOLE):
            return func(*args, **kwargs)  # these are other calls in a trace
        if not is_user_code(caller.f_code.co_filename) and not any(isinstance(leaf, Tensor) for leaf in given):
            return func(*args, **kwargs)  # torch's own, for its modes
        outcome = self.here.outcome(line, args, kwargs)
        result = func(*args, **kwargs)
        self.here.returns(line, outcome, given, result)
        return result


def _is_hook(frame: FrameType | None) -> bool:
    """Whether code runs in a module's hook, not in its forward."""
    while frame is not None and frame.f_code is not _SeenForward.__call__.__wrapped__.__code__:
        if frame.f_code is _CALL:
            return True
        frame = frame.f_back
    return False


_CALL = nn.Module.__call__.__code__
