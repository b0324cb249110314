"""Changes at single calls inside a module's own code: a tensor's layout, a size written as a number, random numbers.

The module's Python runs as it is; while it runs, a torch-function mode finds the planned calls by where they stand
(file, line, function, how many-th) and changes their arguments or their results. So it does where activation
checkpointing runs a part of that code again in the backward pass: transformers' layers recompute their forward without
calling the module.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from types import FrameType, MappingProxyType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils.checkpoint import checkpoint

from lightning_autotp.capture.call_sites import (
    by_call,
    call_key,
    call_leaves,
    calling_frame,
    frames_from,
    key_while_compiling,
)
from lightning_autotp.capture.seen_functions import DeclaredFunction
from lightning_autotp.layouts.places import EVERY, CallSite
from lightning_autotp.parameters.forwards import forward_of, wrapped_in
from lightning_autotp.private.torch_private import (
    FakeTensor,
    has_values,
    is_compiled_call,
    never_compile,
    recomputing,
)
from lightning_autotp.ranks.compiled_draws import draw_in_compiled_code
from lightning_autotp.ranks.group import TPGroup
from lightning_autotp.ranks.random_numbers import own_numbers
from lightning_autotp.solving.paths import Line

Change = Callable[[Any], Any]


@dataclass
class CallChanges:
    """What to change at one call: by leaf, in the order in which it is to happen.

    Attributes:
        arguments: changes before the call.
        results: changes after it.
        converts: whether one of them changes a tensor's layout, and not only a number.
        draws_in: the group in which each rank draws its own random numbers at this call.
        run: what makes the call, from its function, arguments and keyword arguments.
        update: what to do after the call with arguments whose parts it has written in place: it is given the leaves of
            the arguments, whole ones and this rank's.
    """

    arguments: list[tuple[int, Change]] = field(default_factory=list)
    results: list[tuple[int, Change]] = field(default_factory=list)
    converts: bool = False
    draws_in: TPGroup | None = None
    run: Callable[[Any, tuple[Any, ...], dict[str, Any]], Any] | None = None
    update: Callable[[list[Any], list[Any]], None] | None = None


class CallMismatch(RuntimeError):
    """A planned call has other arguments than in the trace."""


class LocalForward:
    """A module's forward with changes at some of its calls.

    Calls that other modules make meanwhile are theirs: the module's children pause it while they run.

    A planned call may be left out where the module takes a tensor from a cache instead of computing it again (the keys
    of a cross-attention): if only numbers were to be changed there, and if the module makes no call that it did not
    make in an earlier run with all planned ones, so that no other call can have come in its place.

    Args:
        module: the module.
        path: where it is.
        changes: what changes at which call.
    """

    def __init__(self, module: nn.Module, path: str, changes: Mapping[CallSite, CallChanges]) -> None:
        self.module, self.forward, self.path, self.changes = module, module.forward, path, dict(changes)
        self.lines = {(site.file, site.line, site.function) for site in changes}
        self.declared = DeclaredFunction.all({site.function for site in changes})
        is_traceable = (site.function != "__get__" and site.file != F.__name__ for site in changes)
        self.is_traceable = not self.declared and all(is_traceable)
        self.runs: tuple[frozenset[CallSite], ...] = ()  # of traced ones without all planned calls: those they make
        self.running: list[_LocalCalls] = []
        self.known: set[Line] | None = None  # calls of runs with all planned ones
        self.as_written: set[CallSite] = set()  # planned calls whose callers' own torch.compile was switched off
        for child in module.children():
            child.register_forward_pre_hook(self._pause)
            child.register_forward_hook(self._go_on)

    def allow(self, calls: Collection[CallSite]) -> None:
        """Let the module run without the other planned calls, as it did in a trace."""
        self.runs = tuple(dict.fromkeys((*self.runs, frozenset(calls))))

    @classmethod
    def of(cls, module: nn.Module) -> LocalForward | None:
        """What runs a module's forward with changes, if there are any, whatever was put around it."""
        owners = (getattr(function, "__self__", None) for function in wrapped_in(forward_of(module)))
        return next((owner for owner in owners if isinstance(owner, LocalForward)), None)

    def take_over(self) -> None:
        """Let the module run so.

        With a method, not with this object: compiled code is the same for all modules whose method is the same.
        """
        self.module.forward = self.__call__

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the module's forward with the changes.

        Raises:
            CallMismatch: if a planned call is not made, or has other arguments.
        """
        return self._run_in_whole_graphs(args, kwargs)

    def _run_in_whole_graphs(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run it as a part of the code that is being compiled; outside of it if that would break the graph here.

        Then this is called as it is, and not compiled: in pieces of compiled code the mode would see some calls only.
        """
        if self.is_traceable and torch.compiler.is_compiling():
            return self._run(args, kwargs)
        return self._run_outside_compiled_code(args, kwargs)

    def _run(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        # Whether a child is running is noted by its hooks, which are not called for a child that fails. torch's hooks
        # that are called always would do, but compiled code is not shared by modules that have such ones.
        args, kwargs = _told_apart(args, kwargs)
        mode = _LocalCalls(self)
        self.running.append(mode)
        try:
            with mode:
                result = self.forward(*args, **kwargs)
        finally:
            self.running.pop()
        if mode.paused:
            raise CallMismatch(
                f"{self.path or '(root)'} goes on after a module in it has failed, and layouts change at calls in it:"
                f" let the error pass, or keep that module whole, keep_whole=[{self.path!r}]"
            )
        missed = [
            site
            for site, changes in self.changes.items()
            if site.occurrence != EVERY and site not in mode.seen and self._is_expected(changes)
        ]
        is_compiled = torch.compiler.is_compiling()  # then nothing is noted: earlier runs would be part of the code
        if any(self._is_run(calls, missed, mode) for calls in self.runs):
            return result
        if not missed:
            if not is_compiled:
                self.known = (self.known or set()) | mode.made
        elif (
            is_compiled
            or self.known is None
            or mode.made - self.known
            or any(self._is_needed(site, mode) for site in missed)
        ):
            raise CallMismatch(
                f"{self.path or '(root)'} did not make the call {missed[0]} that it made when the model was traced, "
                "and at which a tensor changes its layout, or each rank draws its own random numbers: it must be "
                "called as in the trace (give example_inputs that are passed as your training step passes them)"
            )
        return result

    @torch.compiler.disable(
        reason="a layout changes where an attribute of a tensor is read, or in torch's attention, or at a kernel"
    )
    def _run_outside_compiled_code(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run it where nothing below is compiled on its own: the mode sees the calls, and that an attribute is read."""
        with self._noticing():
            return self._run(args, kwargs)

    @contextmanager
    def _noticing(self) -> Iterator[None]:
        """Within it the mode sees calls of declared functions, also in what runs again."""
        with ExitStack() as stack:
            for declared in self.declared:
                stack.enter_context(declared.seen())
            stack.enter_context(recomputing(self._again))
            yield

    def _again(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """What runs a part of the module's own code again with the changes, where activations are recomputed."""
        began = self.running[-1]
        if began.paused:  # a child's
            return function
        counts = dict(began.counts)

        def again(*args: Any, **kwargs: Any) -> Any:
            if self.running[-1:] == [began]:  # the forward pass itself, with use_reentrant=True
                return function(*args, **kwargs)
            mode = _LocalCalls(self, counts)
            self.running.append(mode)
            try:
                with self._noticing(), mode:
                    return function(*args, **kwargs)
            finally:
                self.running.pop()

        return again

    def _is_expected(self, changes: CallChanges) -> bool:
        """Whether a call is made in this mode: one that only draws random numbers may be left out in eval mode."""
        return bool(changes.arguments or changes.results or changes.run or self.module.training)

    def _is_needed(self, site: CallSite, mode: _LocalCalls) -> bool:
        """Whether the run is another computation without this call."""
        return self.changes[site].converts or (site.file, site.line, site.function) in mode.made

    @staticmethod
    def _is_run(calls: frozenset[CallSite], missed: list[CallSite], mode: _LocalCalls) -> bool:
        """Whether the run is like one of a trace, which made these calls."""
        return not any(site in calls for site in missed) and all(
            site in calls for site in mode.seen if site.occurrence != EVERY
        )

    def _pause(self, *_: Any) -> None:
        for mode in self.running[-1:]:
            mode.paused += 1

    def _go_on(self, *_: Any) -> None:
        for mode in self.running[-1:]:
            mode.paused -= 1


never_compile(LocalForward._run_in_whole_graphs.__code__)


class _LocalCalls(TorchFunctionMode):
    """One run of a module, or of a part of its code after calls of which there were so many before."""

    def __init__(self, owner: LocalForward, counts: Mapping[Line, int] = MappingProxyType({})) -> None:
        super().__init__()
        self.owner, self.paused = owner, 0
        self.counts = dict(counts)
        self.seen: set[CallSite] = set()
        self.made: set[Line] = set()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if self.paused:
            return func(*args, **kwargs)
        if (inside := by_call(func, kwargs)) is not None:
            with self:
                return inside(*args, **kwargs)
        if torch.compiler.is_compiling():
            key = key_while_compiling(func)
        else:
            caller = calling_frame(func, sys._getframe(1))
            key = call_key(caller, func)
            if key[0] == __name__:  # what is run again is the function itself, which torch's checkpoint called
                lines = (line for line in self.owner.lines if line[0] == checkpoint.__module__ and line[2] == key[2])
                key = next(lines, key)
            self.made.add(key)
        if key not in self.owner.lines:
            return func(*args, **kwargs)
        occurrence = self.counts[key] = self.counts.get(key, -1) + 1
        site = CallSite(*key, occurrence)
        changes = self.owner.changes.get(site)
        if changes is None:
            site = CallSite(*key, EVERY)
            changes = self.owner.changes.get(site)
        if changes is None:
            return func(*args, **kwargs)
        if not torch.compiler.is_compiling() and site not in self.owner.as_written:
            _let_run_as_written(caller)
            self.owner.as_written.add(site)
        self.seen.add(site)
        given = args, kwargs
        try:
            for leaf, change in changes.arguments:
                args, kwargs = replace_leaf((args, kwargs), leaf, change)
            if changes.draws_in is not None and torch.compiler.is_compiling():
                result = draw_in_compiled_code(func, args, kwargs, changes.draws_in)
            else:
                with _numbers(changes.draws_in, (args, kwargs)):
                    result = func(*args, **kwargs) if changes.run is None else changes.run(func, args, kwargs)
            if changes.update is not None:
                changes.update(call_leaves(given), call_leaves((args, kwargs)))
            for leaf, change in changes.results:
                result = replace_leaf(result, leaf, change)
        except _NoLeaf as error:
            who = self.owner.path or "(root)"
            raise CallMismatch(
                f"{who}: the call {site} has other arguments or results than when the model "
                f"was traced ({error}): give example_inputs that are passed as your training step passes them"
            ) from None
        return result


def _let_run_as_written(caller: FrameType) -> None:
    """Let no function be compiled apart from the module that calls it, and in which this frame's calls change.

    In such a function the mode would not see them. The trace of the local model, which runs all as it is written, comes
    before the first call.
    """
    for frame in frames_from(caller):
        if frame.f_globals is globals():
            return
        if is_compiled_call(frame.f_back):
            never_compile(frame.f_code, with_calls=True)


def _told_apart(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments with a tensor that is given several times as a view of itself from the second time on.

    So they were in the trace, where a layout may change at each of them, and code may ask whether two are the same one
    (``F.multi_head_attention_forward`` does, and then makes other calls).
    """
    given: list[Tensor] = []

    def one(value: Any) -> Any:
        if isinstance(value, Tensor):
            if any(value is other for other in given):
                return value.view(value.shape)
            given.append(value)
        return value

    return tuple([one(value) for value in args]), {name: one(value) for name, value in kwargs.items()}


@contextmanager
def _numbers(group: TPGroup | None, arguments: Any) -> Iterator[None]:
    """The rank's own random numbers, or with no group the common ones."""
    tensors = [leaf for leaf in call_leaves(arguments) if isinstance(leaf, Tensor)]
    if group is None or not tensors:
        yield
        return
    # Nothing is drawn for fake tensors, also where they pass for tensors with values.
    is_drawn = all(has_values(tensor) and not isinstance(tensor, FakeTensor) for tensor in tensors)
    with own_numbers(group, tensors[0].device if is_drawn else None):
        yield


class _NoLeaf(Exception):
    pass


def replace_leaf(value: Any, leaf: int, change: Change) -> Any:
    """``value`` with one leaf changed, counted as :func:`call_leaves` lists them."""
    position = -1

    def visit(item: Any) -> Any:
        nonlocal position
        if isinstance(item, slice):
            return slice(visit(item.start), visit(item.stop), visit(item.step))
        if isinstance(item, tuple | list):
            made = [visit(member) for member in item]
            return type(item)(*made) if hasattr(item, "_fields") else type(item)(made)
        if isinstance(item, dict):
            return {key: visit(member) for key, member in item.items()}
        position += 1
        return change(item) if position == leaf else item

    if isinstance(value, Tensor) and leaf == 0:
        return change(value)
    result = visit(value)
    if position < leaf:
        raise _NoLeaf(f"there are {position + 1} leaves, number {leaf} was planned")
    return result


def number(whole: int, local: int) -> Change:
    """Puts this rank's size in the place of a number; of a number that grows with the batch, this rank's share."""

    def change(found: Any) -> Any:
        if type(found) is not int or found * local % whole:
            raise _NoLeaf(f"{found!r} where a number was planned, {whole} or a multiple")
        if local == whole:  # it follows another tensor's part, and must stay whole
            return whole
        return found * local // whole

    return change
