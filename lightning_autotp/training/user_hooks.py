"""Hooks that a user adds to modules of a parallel model: they see whole tensors, as in the original model.

What a module takes or gives may be this rank's part of a tensor. A hook that collects it, takes a loss of it, or adds
an adapter's output to it must not know: it is given the whole tensor, and what it returns is divided again. Both ways
are differentiable. A hook that was there when the model was divided is part of what was traced and proved, and is left
as it is.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from lightning_autotp.applying.replace import BoundaryConversion
from lightning_autotp.capture.nested import leaves_of
from lightning_autotp.layouts.plan import ConversionPlan
from lightning_autotp.layouts.types import Invariant
from lightning_autotp.parallel.logits import VocabParallelLogits
from lightning_autotp.parameters.first_use import OUTER
from lightning_autotp.parameters.running import Running
from lightning_autotp.parameters.state import parallel_state
from lightning_autotp.private.torch_private import ModuleHooks, hooks_given
from lightning_autotp.ranks.group import TPGroup

_LIBRARIES = frozenset({"torch", "transformers", "peft", "lightning_autotp"})
"""Their hooks belong to the model's own code, or know of parts."""


def show_whole_tensors(model: nn.Module) -> None:
    """Let code around a parallel model see whole tensors from now on.

    That are hooks which are added to its modules, and code that calls the outer ones of its modules by themselves, such
    as the model without its head. These calls are collective where their tensors are divided.
    """
    model.register_forward_pre_hook(_NewHooks(model))
    state, by_itself = parallel_state(model), Running()
    for path in {part.module for part in state.parts}:
        if path and len(path.split(".")) <= OUTER:
            alone = _CalledAlone(path, model, by_itself)
            module = model.get_submodule(path)
            by_itself.watch(module)
            module.register_forward_pre_hook(alone.before, with_kwargs=True, prepend=True)
            module.register_forward_hook(alone.after)
            state.outer |= {path}


class _CalledAlone:
    """Hooks of a module that take and give whole tensors where it is called from outside of its model.

    Args:
        path: the module.
        model: its model.
        by_itself: whether a module that has such hooks is running: those in it are not called from outside.
    """

    def __init__(self, path: str, model: nn.Module, by_itself: Running) -> None:
        self.path, self.model, self.by_itself = path, model, by_itself

    @property
    def _is_inside(self) -> bool:
        return bool(parallel_state(self.model).running or self.by_itself.depth > 0)

    def before(self, module: nn.Module, args: Any, kwargs: Any) -> Any:
        """Forward pre-hook: what does not come Invariant in the model is made what it is there.

        Raises:
            RuntimeError: where tokens are dealt out, for a tensor that the module is not given in the model.
        """
        if self._is_inside:
            return None
        state = parallel_state(self.model)
        if state.plan.deals_tokens:
            self._check(state.given, args, kwargs)
        changes = _planned_changes(module)
        changed = {change.plan.key for change in changes}
        changed |= {"[0][0]" for use in state.plan.implementations if use.module == self.path and use.input}
        taken = [part for part in _parts(self.model, self.path, "in") if part.key not in changed]
        value = _divided((args, kwargs), taken, state.group)
        for change in changes:
            if not isinstance(change.plan.source, Invariant):
                given = replace(change.plan, source=Invariant(), target=change.plan.source)
                value = change.replaced(value, BoundaryConversion(given, state.group, change.lengths).convert)
        return value

    def _check(self, given: frozenset[tuple[str, str]], args: Any, kwargs: Any) -> None:
        for path, value in leaves_of((args, kwargs)):
            has_tokens = isinstance(value, Tensor) and value.is_floating_point()
            if has_tokens and (self.path, path) not in given:
                raise RuntimeError(
                    f"{self.path} is called by itself with a tensor at {path}, where the model that was planned gives"
                    " it none: how its tokens are to lie over the ranks is not known. Call it with the arguments that"
                    " the model calls it with, call the whole model, or plan with sequence_parallel=False"
                )

    def after(self, module: nn.Module, args: Any, output: Any) -> Any:
        """Forward hook."""
        if self._is_inside:
            return None
        return _whole(output, _parts(self.model, self.path, "out"), parallel_state(self.model).group)[0]


class _NewHooks:
    """Forward pre-hook of a parallel model: looks for hooks that have been added to its modules, and wraps them."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model  # not its state: a deep copy of the model has one of its own
        self.places = [(path, module, ModuleHooks(module)) for path, module in model.named_modules() if path]
        self.known = [hooks.numbers() for _, _, hooks in self.places]
        self.tables = [table for _, _, hooks in self.places for table in hooks.tables()]
        self.given, self.count = -1, 0

    def __call__(self, model: nn.Module, args: Any) -> None:
        """Before the model's forward.

        Raises:
            RuntimeError: for a hook that cannot be given whole tensors.
        """
        if torch.compiler.is_compiling():
            return
        # Nobody has added a hook anywhere, and here there are as many as before.
        given, count = hooks_given(), sum(map(len, self.tables))
        if (given, count) == (self.given, self.count):
            return
        for index, (path, _, hooks) in enumerate(self.places):
            if hooks.numbers() != self.known[index]:
                self._wrap(path, hooks)
                self.known[index] = hooks.numbers()
        self.given, self.count = given, count

    def _wrap(self, path: str, hooks: ModuleHooks) -> None:
        if hooks.backward and any(part.module == path for part in parallel_state(self.model).parts):
            raise RuntimeError(
                f"{path} has a backward hook, which would see this rank's part of a gradient. Hook the tensor instead,"
                " in a forward hook (tensor.register_hook), or a module whose tensors are whole"
            )
        for side, registered in (("in", hooks.before), ("out", hooks.after)):
            converted = max((at for at, hook in enumerate(registered.values()) if _converts(hook)), default=-1)
            for at, (number, hook) in enumerate(list(registered.items())):
                if _package(hook) in _LIBRARIES or number in hooks.first:
                    continue
                if at < converted:
                    raise RuntimeError(
                        f"a hook of {path} was registered with prepend=True, before what changes layouts there, and"
                        " would see this rank's part of a tensor: register it without prepend"
                    )
                registered[number] = _SeesWhole(hook, path, side, self.model)


class _SeesWhole:
    """A user's forward hook or forward pre-hook, called with whole tensors. Collective where they are divided."""

    def __init__(self, hook: Callable[..., Any], path: str, side: str, model: nn.Module) -> None:
        self.hook, self.path, self.side, self.model = hook, path, side, model

    def __call__(self, module: nn.Module, *values: Any) -> Any:
        """As torch calls it: ``(args[, kwargs])`` before a forward, ``(args[, kwargs], output)`` after it."""
        group = parallel_state(self.model).group
        inputs = values if self.side == "in" else values[:-1]
        taken = [part for part in _parts(self.model, self.path, "in") if len(inputs) == 2 or part.key.startswith("[0]")]
        both = inputs if len(inputs) == 2 else (*inputs, {})
        whole, changed = _whole(both, taken, group)
        if self.side == "in":
            result = self.hook(module, *whole[: len(inputs)])
            if result is None:
                return None
            if len(inputs) == 2:
                return _divided(result, changed, group)
            result = result if isinstance(result, tuple) else (result,)
            return _divided((result, {}), changed, group)[0]
        output, changed = _whole(values[-1], _parts(self.model, self.path, "out"), group)
        result = self.hook(module, *whole[: len(inputs)], output)
        return None if result is None else _divided(result, changed, group)


def _parts(model: nn.Module, path: str, side: str) -> list[ConversionPlan]:
    """What is not Invariant at one side of a module, in the kind of call that is under way."""
    return [part for part in parallel_state(model).parts if (part.module, part.side) == (path, side)]


def _whole(value: Any, parts: Sequence[ConversionPlan], group: TPGroup) -> tuple[Any, list[ConversionPlan]]:
    """The values with these parts whole, and those that were not shown as whole already."""
    changed: list[ConversionPlan] = []
    for part in parts:
        conversion = BoundaryConversion(part, group)

        def change(tensor: Any, part: ConversionPlan = part, convert: Any = conversion.convert) -> Any:
            if isinstance(tensor, VocabParallelLogits) or not isinstance(tensor, Tensor):
                return tensor
            changed.append(part)
            return convert(tensor)

        value = conversion.replaced(value, change)
    return value, changed


def _divided(value: Any, parts: Sequence[ConversionPlan], group: TPGroup) -> Any:
    """The values with these parts as they are in the model."""
    for part in parts:
        conversion = BoundaryConversion(replace(part, source=part.target, target=part.source), group)
        value = conversion.replaced(value, conversion.convert)
    return value


def _converts(hook: Any) -> bool:
    """Whether a hook is one that changes a layout."""
    return isinstance(getattr(hook, "__self__", None), BoundaryConversion)


def _planned_changes(module: nn.Module) -> list[BoundaryConversion]:
    """The plan's changes of layout where tensors enter a module; not those for some kinds of calls only."""
    owners = [getattr(hook, "__self__", None) for hook in ModuleHooks(module).before.values()]
    return [owner for owner in owners if type(owner) is BoundaryConversion]


def _package(hook: Any) -> str:
    """The package that a hook's code is in."""
    while isinstance(hook, partial):
        hook = hook.func
    named = hook if hasattr(hook, "__qualname__") else type(hook)
    return str(named.__module__).partition(".")[0]
