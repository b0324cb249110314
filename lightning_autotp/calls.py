"""Changes at single calls inside a module's own code: a tensor's layout, a size written as a number.

The module's Python runs as it is; while it runs, a torch-function mode finds the planned calls by where they stand
(file, line, function, how many-th) and changes their arguments or their results.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from lightning_autotp.callsites import call_key, calling_frame
from lightning_autotp.graph import CallSite

Change = Callable[[Any], Any]


@dataclass
class CallChanges:
    """What to change at one call: by leaf, in the order in which it is to happen."""

    arguments: list[tuple[int, Change]] = field(default_factory=list)
    results: list[tuple[int, Change]] = field(default_factory=list)


class CallMismatch(RuntimeError):
    """A planned call has other arguments than in the trace."""


class LocalForward:
    """A module's forward with changes at some of its calls.

    Calls that other modules make meanwhile are theirs: the module's children pause it while they run.
    """

    def __init__(self, module: nn.Module, path: str, changes: Mapping[CallSite, CallChanges]) -> None:
        self.forward, self.path, self.changes = module.forward, path, dict(changes)
        self.lines = {(site.file, site.line, site.function) for site in changes}
        self.running: list[_LocalCalls] = []
        for child in module.children():
            child.register_forward_pre_hook(self._pause)
            child.register_forward_hook(self._go_on, always_call=True)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the module's forward with the changes.

        Raises:
            CallMismatch: if a planned call is not made, or has other arguments.
        """
        mode = _LocalCalls(self)
        self.running.append(mode)
        try:
            with mode:
                result = self.forward(*args, **kwargs)
        finally:
            self.running.pop()
        missed = [site for site in self.changes if site not in mode.seen]
        if missed:
            raise CallMismatch(
                f"{self.path or '(root)'} did not make the call {missed[0]} that it made when the model was traced, "
                "and at which a tensor changes its layout: it must be called as in the trace (give example_inputs that "
                "are passed as your training step passes them)"
            )
        return result

    def _pause(self, *_: Any) -> None:
        for mode in self.running[-1:]:
            mode.paused += 1

    def _go_on(self, *_: Any) -> None:
        for mode in self.running[-1:]:
            mode.paused -= 1


class _LocalCalls(TorchFunctionMode):
    """One run of a module."""

    def __init__(self, owner: LocalForward) -> None:
        super().__init__()
        self.owner, self.paused = owner, 0
        self.counts: dict[tuple[str, int, str], int] = {}
        self.seen: set[CallSite] = set()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if self.paused:
            return func(*args, **kwargs)
        key = call_key(calling_frame(func, sys._getframe(1)), func)
        if key not in self.owner.lines:
            return func(*args, **kwargs)
        occurrence = self.counts[key] = self.counts.get(key, -1) + 1
        site = CallSite(*key, occurrence)
        changes = self.owner.changes.get(site)
        if changes is None:
            return func(*args, **kwargs)
        self.seen.add(site)
        try:
            for leaf, change in changes.arguments:
                args, kwargs = replace_leaf((args, kwargs), leaf, change)
            result = func(*args, **kwargs)
            for leaf, change in changes.results:
                result = replace_leaf(result, leaf, change)
        except _NoLeaf as error:
            who = self.owner.path or "(root)"
            raise CallMismatch(
                f"{who}: the call {site} has other arguments or results than when the model "
                f"was traced ({error}): give example_inputs that are passed as your training step passes them"
            ) from None
        return result


class _NoLeaf(Exception):
    pass


def replace_leaf(value: Any, leaf: int, change: Change) -> Any:
    """``value`` with one leaf changed, counted as :func:`~lightning_autotp.callsites.call_leaves` lists them."""
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


def number(local: int) -> Change:
    """Puts this rank's size in the place of a number."""

    def change(found: Any) -> Any:
        if type(found) is not int:
            raise _NoLeaf(f"{found!r} where a number was planned")
        return local

    return change
