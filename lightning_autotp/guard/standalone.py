"""Calls of a module in a parallel model from outside of the model, such as of its base model without the head.

A module takes and gives whole tensors then, wherever it is in the model, and the parameters of every module have the
hooks their gradients need. The same hook runs where the model calls the module, and does nothing. That is known from
the model's own call, or from the module that was called; where neither is known (a block that is the same code as in
the original model was called, and calls what is not), from the calls that are under way. Compiled code cannot ask for
those: of modules in it, only the outer ones are told from calls of the model.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
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
from lightning_autotp.guard.user_hooks import UserHooks
from lightning_autotp.layouts.plan import ConversionPlan
from lightning_autotp.layouts.types import Invariant, Shard
from lightning_autotp.parameters.snapshot import Snapshot
from lightning_autotp.parameters.state import own_modules, parallel_state
from lightning_autotp.private.torch_private import is_in_backward, modules_being_called, parameters_of


def is_outer(path: str) -> bool:
    """Whether a module may well be called without its model: its base model, embeddings or head."""
    return path.count(".") <= 1


def differing_modules(model: nn.Module) -> frozenset[str]:
    """The paths of modules whose code, or that of modules in them, is not what it is in the original model.

    Called with whole tensors, any other module does what it does there.
    """
    state = parallel_state(model)
    plan = state.plan
    changes = (plan.implementations, plan.conversions, plan.sizes, plan.draws, plan.indices)
    paths = {change.module for kind in changes for change in kind}
    paths |= {name.rpartition(".")[0] for name, meta in state.metas.items() if not isinstance(meta.layout, Invariant)}
    return frozenset(path[:at] for path in paths for at in (*_dots(path), len(path)))


def _used_by(module: nn.Module) -> Iterable[nn.Module]:
    """The modules whose parameters the code of a module may use: itself, and those right below it."""
    return module, *module.children()


def _dots(path: str) -> Iterable[int]:
    return (at for at, character in enumerate(path) if character == ".")


@dataclass
class ForwardDepth:
    """Which forwards of a parallel model are under way; of a copy of the model, none.

    Attributes:
        model: the model.
        own: how many of its own.
        alone: the path of a module in it that was called, and not by the model.
        looked_at: the same path, where all that is in that module was looked at before: not by compiled code.
    """

    model: nn.Module
    own: int = 0
    alone: str | None = None
    looked_at: str | None = None

    def has_looked_at(self, path: str) -> bool:
        """Whether the module at this path is in one that was looked at."""
        return self.looked_at is not None and path.startswith(f"{self.looked_at}.")

    def __reduce__(self) -> tuple[Any, ...]:
        return ForwardDepth, (self.model,)


class StandaloneCall:
    """Hooks of a module in a parallel model. While the model itself is running they do nothing.

    Args:
        running: whether it is.
        gathered: what FSDP2 gathers for the model.
        hooks: those that a user has added.
        path: the module.
        differs: whether its code is not that of the original model.
    """

    def __init__(
        self, running: ForwardDepth, gathered: GatheredForCall, hooks: UserHooks, path: str, differs: bool
    ) -> None:
        self.running, self.gathered, self.hooks, self.path, self.differs = running, gathered, hooks, path, differs
        self.is_outer = is_outer(path)
        self.is_whole_call = differs or isinstance(running.model, FSDPModule)
        self._handles: list[RemovableHandle] = []
        self._snapshot: Snapshot | None = None  # of the module when it was called alone last

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_snapshot": None}

    def attach(self, module: nn.Module, takes_parts: bool) -> bool:
        """Hook the module, if there is anything to do for it.

        Args:
            module: the module.
            takes_parts: whether what it takes or gives in the model is not Invariant.

        Returns:
            Whether there is.
        """
        model = self.running.model
        hooked = parallel_state(model).gradient_hooks
        uses = any(place.meta.name in hooked for place in places_at(_used_by(module), model))
        is_gathered = isinstance(model, FSDPModule) and bool(parameters_of(module))
        if not (uses or self.is_outer or is_gathered or (takes_parts and self.differs)):
            return False
        self._hook = module.register_forward_pre_hook(self.before, with_kwargs=True, prepend=True)
        if self.is_whole_call and self.is_outer:
            self._follow(module)
        return True

    def remove(self) -> None:
        """Take the hooks away."""
        for handle in (self._hook, *self._handles):
            handle.remove()

    def _follow(self, module: nn.Module) -> None:
        """Hook what the module gives, after the hooks that are there."""
        for handle in self._handles:
            handle.remove()
        self._handles = [module.register_forward_hook(self.after)]
        self._handles.append(module.register_forward_hook(self.end, always_call=True))

    def _is_inside(self, module: nn.Module) -> bool:
        """Whether the model's own code has called it, be it again in a backward pass (activation checkpointing)."""
        running = self.running
        if running.own > 0 or running.alone is not None or is_in_backward():
            return True
        if torch.compiler.is_compiling():
            return False
        path = parallel_state(running.model).path
        callers = modules_being_called(sys._getframe(2))
        # ``None`` is compiled code, of which nothing is known.
        return any(caller is None or (caller is not module and path(caller) is not None) for caller in callers)

    def before(self, module: nn.Module, args: Any, kwargs: Any) -> Any:
        """Forward pre-hook: what does not come Invariant in the model is made what it is there.

        Raises:
            RuntimeError: naming parts that were written before the first use; for a tensor that has not as many dims as
                in the model; or under sequence parallelism, for one that the module is not given there.
        """
        running = self.running
        if running.own > 0:
            return None
        is_compiling = torch.compiler.is_compiling()
        # What runs again in a backward pass was looked at when it ran, and so was what is in a module that runs alone.
        if not is_compiling and (is_in_backward() or running.has_looked_at(self.path)):
            return None
        is_alone = self.is_whole_call and (self.is_outer or not is_compiling) and not self._is_inside(module)
        if not is_compiling:
            if is_alone:
                self._look(module)
            else:
                hook_parameters(running.model, places_at(_used_by(module), running.model))
            if is_alone or self.is_outer:
                use_of_module(running.model)
        if not is_alone:
            return None
        running.alone = self.path
        if not is_compiling:
            running.looked_at = self.path
            self.gathered.begin_part(module, self.path)
        return self._as_in_model(module, args, kwargs) if self.differs else None

    def _look(self, module: nn.Module) -> None:
        """Where a module that is called alone has changed, what is in it gets the hooks that it needs."""
        if self._snapshot is not None and self._snapshot.is_current():
            return
        model, modules = self.running.model, [inner for _, inner in own_modules(module)]
        places = list(places_at(modules, model))
        hook_parameters(model, places)
        if not self.is_outer:
            self._follow(module)
        self.hooks.wrap()
        seen = Snapshot(model, modules, places)
        self._snapshot = seen if seen.is_lasting else None

    def after(self, module: nn.Module, args: Any, output: Any) -> Any:
        """Forward hook: what the module gives is made whole, and may begin a backward pass."""
        if self.running.alone != self.path or self.running.own > 0:
            return None
        model = self.running.model
        if self.differs:
            given = parts_at(model, self.path, "out")
            self._check_dims(output, given)
            output = to_whole(output, given, parallel_state(model).group)[0]
        return output if torch.compiler.is_compiling() else self.gathered.part_returned(output)

    def end(self, *_: Any) -> None:
        """Forward hook, also of a forward that failed."""
        if self.running.alone == self.path and self.running.own == 0:
            self.running.alone = self.running.looked_at = None
            self.gathered.end()

    def _as_in_model(self, module: nn.Module, args: Any, kwargs: Any) -> Any:
        model, state = self.running.model, parallel_state(self.running.model)
        if state.plan.shards_sequence:
            self._check(state.given, args, kwargs)
        changes = planned_changes(module)
        changed = {change.plan.key for change in changes}
        changed |= {"[0][0]" for use in state.plan.implementations if use.module == self.path and use.input}
        taken = [part for part in parts_at(model, self.path, "in") if part.key not in changed]
        self._check_dims((args, kwargs), taken)
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

    def _check_dims(self, value: Any, parts: Sequence[ConversionPlan]) -> None:
        planned = {part.key: len(part.shape) for part in parts if isinstance(part.source, Shard)}
        for path, tensor in leaves_of(value) if planned else ():
            dims = planned.get(path)
            if dims is not None and isinstance(tensor, Tensor) and tensor.dim() != dims:
                raise RuntimeError(
                    f"{self.path} is called on its own, and what it {f'takes at {path}' if path else 'gives'} has"
                    f" {tensor.dim()} dims, where it has {dims} in the planned model: it is not known how that is"
                    " divided. Call it with as many dims as the model does"
                    " (tensor.unsqueeze(0)), call the whole model, or keep it whole:"
                    f" keep_whole=[{f'{self.path}.*'!r}]"
                )
