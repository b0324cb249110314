"""Hooks that a user adds to modules of a parallel model: they see whole tensors, as in the original model.

What a module takes or gives may be this rank's part of a tensor. A hook that collects it, takes a loss of it, or adds
an adapter's output to it must not know: it is given the whole tensor, and what it returns is divided again. Both ways
are differentiable. A hook that was on a module when the model was divided is part of what was traced and proved, and is
left as it is; one on all modules of the process is refused.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from itertools import chain
from typing import Any

from torch import nn

from lightning_autotp.applying.replace import BoundaryConversion
from lightning_autotp.guard.boundaries import parts_at, to_parts, to_whole
from lightning_autotp.parameters.state import parallel_state
from lightning_autotp.private.torch_private import HOOKS_OF_ALL_MODULES, ModuleHooks

_LIBRARIES = frozenset({"torch", "transformers", "peft", "lightning_autotp"})
"""Their hooks belong to the model's own code, or know of parts."""


class UserHooks:
    """The hooks that are added to modules of a parallel model from now on."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model  # not its state: a deep copy of the model has one of its own
        self.places = [(path, ModuleHooks(module)) for path, module in model.named_modules() if path]

    def wrap(self) -> None:
        """Let those that were added see whole tensors.

        Raises:
            RuntimeError: for a hook that cannot be given whole tensors.
        """
        for hook in chain.from_iterable(table.values() for table in HOOKS_OF_ALL_MODULES):
            if _package(hook) not in _LIBRARIES:
                raise RuntimeError(
                    f"a hook on all modules of the process ({_named(hook)}) would see this rank's parts of what modules"
                    " take and give: register it on the modules of the model, where it sees whole tensors (for module"
                    " in model.modules(): module.register_forward_hook(...)), and remove this one"
                )
        for path, hooks in self.places:
            self._wrap(path, hooks)

    def unwrap(self) -> None:
        """Let them see the ranks' parts again."""
        for _, hooks in self.places:
            for registered in (hooks.before, hooks.after):
                for number, hook in registered.items():
                    if isinstance(hook, _SeesWhole):
                        registered[number] = hook.hook

    def _wrap(self, path: str, hooks: ModuleHooks) -> None:
        if hooks.backward.keys() - hooks.first and any(
            part.module == path for part in parallel_state(self.model).parts
        ):
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
        taken = [
            part for part in parts_at(self.model, self.path, "in") if len(inputs) == 2 or part.key.startswith("[0]")
        ]
        both = inputs if len(inputs) == 2 else (*inputs, {})
        whole, changed = to_whole(both, taken, group)
        if self.side == "in":
            result = self.hook(module, *whole[: len(inputs)])
            if result is None:
                return None
            if len(inputs) == 2:
                return to_parts(result, changed, group)
            result = result if isinstance(result, tuple) else (result,)
            return to_parts((result, {}), changed, group)[0]
        output, changed = to_whole(values[-1], parts_at(self.model, self.path, "out"), group)
        result = self.hook(module, *whole[: len(inputs)], output)
        return None if result is None else to_parts(result, changed, group)


def _converts(hook: Any) -> bool:
    """Whether a hook is one that changes a layout."""
    return isinstance(getattr(hook, "__self__", None), BoundaryConversion)


def _package(hook: Any) -> str:
    """The package that a hook's code is in."""
    return _named(hook).partition(".")[0]


def _named(hook: Any) -> str:
    """What a hook's function or class is called."""
    while isinstance(hook, partial):
        hook = hook.func
    named = hook if hasattr(hook, "__qualname__") else type(hook)
    return f"{named.__module__}.{named.__qualname__}"
