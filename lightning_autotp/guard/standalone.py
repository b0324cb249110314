"""Calls of a module in a parallel model from outside of the model, such as of its base model without the head.

The modules right below the model take and give whole tensors then. (Deeper ones give their parts: a call of one is an
error where the code around the model is checked.) The parameters of every module have the hooks their gradients need.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.utils.hooks import RemovableHandle

from lightning_autotp.applying.replace import BoundaryConversion
from lightning_autotp.capture.nested import leaves_of
from lightning_autotp.gradients.sums import hook_parameters, places_at
from lightning_autotp.guard.boundaries import parts_at, planned_changes, to_parts, to_whole
from lightning_autotp.guard.first_use import use_of_module
from lightning_autotp.guard.gathered import GatheredForCall
from lightning_autotp.layouts.types import Invariant
from lightning_autotp.parameters.state import parallel_state
from lightning_autotp.private.torch_private import is_in_backward


def is_outer(path: str) -> bool:
    """Whether a module may well be called without its model: its base model, embeddings or head."""
    return path.count(".") <= 1


@dataclass
class ForwardDepth:
    """Which forwards of a parallel model are under way; of a copy of the model, none.

    Attributes:
        model: the model.
        own: how many of its own.
        standalone: how many of modules in it that it has not called.
    """

    model: nn.Module
    own: int = 0
    standalone: int = 0

    def __reduce__(self) -> tuple[Any, ...]:
        return ForwardDepth, (self.model,)


class StandaloneCall:
    """Hooks of a module in a parallel model. While the model itself is running they do nothing.

    Args:
        running: whether it is.
        gathered: what FSDP2 gathers for the model.
        path: the module.
    """

    def __init__(self, running: ForwardDepth, gathered: GatheredForCall, path: str) -> None:
        self.running, self.gathered, self.path = running, gathered, path
        self.is_outer = is_outer(path)
        self.shows_whole = path in parallel_state(running.model).outer
        self.is_whole_call = self.shows_whole or (self.is_outer and isinstance(running.model, FSDPModule))

    def attach(self, module: nn.Module) -> list[RemovableHandle]:
        """Hook the module, if there is anything to do for it."""
        model = self.running.model
        hooked = parallel_state(model).gradient_hooks
        if not self.is_outer and not any(place.meta.name in hooked for place in places_at(module, model)):
            return []
        handles = [module.register_forward_pre_hook(self.before, with_kwargs=True, prepend=True)]
        if self.is_whole_call:
            handles.append(module.register_forward_hook(self.end, always_call=True))
            handles.append(module.register_forward_hook(self.after))
        return handles

    @property
    def _is_inside(self) -> bool:
        """Whether the model's own code has called it, be it again in a backward pass (activation checkpointing)."""
        return self.running.own > 0 or self.running.standalone > 0 or is_in_backward()

    def before(self, module: nn.Module, args: Any, kwargs: Any) -> Any:
        """Forward pre-hook: what does not come Invariant in the model is made what it is there.

        Raises:
            RuntimeError: naming parts that were written before the first use; or under sequence parallelism, for a
                tensor that the module is not given in the model.
        """
        running = self.running
        if running.own > 0:
            return None
        if not torch.compiler.is_compiling():
            hook_parameters(running.model, places_at(module, running.model))
            if self.is_outer:
                use_of_module(running.model)
        if not self.is_whole_call:
            return None
        is_inside = self._is_inside
        running.standalone += 1
        if is_inside:
            return None
        if not torch.compiler.is_compiling():
            self.gathered.begin_part()
        return self._as_in_model(module, args, kwargs) if self.shows_whole else None

    def end(self, *_: Any) -> None:
        """Forward hook, also of a forward that failed."""
        if self.running.own == 0:
            self.running.standalone = max(0, self.running.standalone - 1)
            if not self._is_inside:
                self.gathered.end()

    def after(self, module: nn.Module, args: Any, output: Any) -> Any:
        """Forward hook: what the module gives is made whole, and may begin a backward pass."""
        if self._is_inside:
            return None
        model = self.running.model
        if self.shows_whole:
            output = to_whole(output, parts_at(model, self.path, "out"), parallel_state(model).group)[0]
        return output if torch.compiler.is_compiling() else self.gathered.part_returned(output)

    def _as_in_model(self, module: nn.Module, args: Any, kwargs: Any) -> Any:
        model, state = self.running.model, parallel_state(self.running.model)
        if state.plan.shards_sequence:
            self._check(state.given, args, kwargs)
        changes = planned_changes(module)
        changed = {change.plan.key for change in changes}
        changed |= {"[0][0]" for use in state.plan.implementations if use.module == self.path and use.input}
        taken = [part for part in parts_at(model, self.path, "in") if part.key not in changed]
        value = to_parts((args, kwargs), taken, state.group)
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
                    f"{self.path} is called on its own with a tensor at {path}, where the planned model gives"
                    " it none: it is not known how its tokens are sharded. Call it with the arguments that"
                    " the model calls it with, call the whole model, or plan with sequence_parallel=False"
                )
