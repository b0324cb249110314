"""What is checked around every use of a parallel model, in one place and one order.

A plan is proved for the model that was traced, and a model is not told that a layer of it was replaced, a parameter
written, a hook added. So one :class:`Guard` stands around it: one hook before its forward and one after it, hooks of
modules in it for where they are called without it, one pair of hooks of optimizers for all guards of the process, one
pair of ``load_state_dict``, and what stands for methods that know only whole tensors.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Protocol
from weakref import WeakKeyDictionary, finalize

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from lightning_autotp.capture import vmap as transforms
from lightning_autotp.capture.capture import ExampleCall
from lightning_autotp.gradients.parts import GradientPart
from lightning_autotp.gradients.sums import hook_parameters, mark_gradients, sum_at_once_in_ddp
from lightning_autotp.guard.bypassed import Bypasses
from lightning_autotp.guard.compared import ComparedValues
from lightning_autotp.guard.first_use import first_use
from lightning_autotp.guard.gathered import GatheredForCall
from lightning_autotp.guard.given import give_back, take_given
from lightning_autotp.guard.methods import StandIns
from lightning_autotp.guard.standalone import ForwardDepth, StandaloneCall, differing_modules
from lightning_autotp.guard.state_dicts import mark_as_part, refuse_other_parts, refuse_whole_tensors
from lightning_autotp.guard.user_hooks import UserHooks
from lightning_autotp.optimizers.stepping import step_as_before, step_one_by_one, stepped_by, steps_some_of
from lightning_autotp.parallel.head_product import note_written
from lightning_autotp.parameters.forwards import forward_of
from lightning_autotp.parameters.known_writes import parts_before_use, parts_of
from lightning_autotp.parameters.snapshot import Snapshot
from lightning_autotp.parameters.state import ParameterPlace, own_modules, parallel_state
from lightning_autotp.parameters.unchanged import check_unchanged
from lightning_autotp.private.torch_private import AllowedInLists, BeforeClipping
from lightning_autotp.proving.new_calls import CallProver


class Removable(Protocol):
    """What is there until it is removed: a hook, say."""

    def remove(self) -> None:
        """End it."""


class Guard:
    """Checks, around every use of a parallel model, that it is still what was proved.

    Its attributes that are tuples say what is checked when, in the order in which it is. A copy of the model has a
    guard of its own, which has seen nothing so far.

    Args:
        model: the model, divided and proved.
        calls: proves new kinds of calls.

    Attributes:
        running: which of its forwards are under way.
        bypasses: whether weights are used without their layers.
        compared: what is compared between the ranks.
        followed: how the code goes in calls that are compared.
    """

    def __init__(self, model: nn.Module, calls: CallProver) -> None:
        # Not its state: a deep copy of the model has one of its own.
        self.model, self.calls = model, calls
        self.running = ForwardDepth(model)
        self.gathered = GatheredForCall(model)
        self._snapshot: Snapshot | None = None
        self._has_returned = False
        self._taken: list[tuple[ParameterPlace, Tensor]] = []
        self._user_hooks = UserHooks(model)
        self.bypasses, self.compared, self.followed = Bypasses(model), ComparedValues(model), calls.code
        self._handles: list[Removable] = []

        # A check gets the call. The proof may return another one, where an argument is to be in another layout. Before
        # them, and in compiled code alone: that no function transform is around the call.
        self.before_forward: tuple[Callable[[ExampleCall], ExampleCall | None], ...] = (
            self._is_unchanged,
            self._is_unwritten,
            self.calls.prove,
            self._watch,  # last: it puts hooks on
        )
        # What the model's own code returns, before anything is done with it; then what the model returns.
        self.on_return = (self.followed.returned,)
        self.after_forward = (self.compared.settle, self.bypasses.settle)
        # The optimizer; the second tuple once more after a closure that has computed gradients.
        self.before_step = (self._is_unwritten_before_step, self.mark_gradients)
        self.with_gradients = (self.bypasses.check, self.compared.before_step)
        self.after_step = (self._note_step, self.bypasses.after_step)
        # The model, the state dict, the prefix of its names and its metadata.
        self.before_loading = (refuse_whole_tensors, refuse_other_parts)

    def attach(self) -> None:
        """Begin, when the model has its weights. Not collective, but every forward is that changes something."""
        model, state = self.model, parallel_state(self.model)
        given, differing = {part.module for part in state.parts}, differing_modules(model)
        self.calls.code.attach()
        for path, module in model.named_modules():
            state.forwards[module] = forward_of(module)
            if path:
                call = StandaloneCall(self.running, self.gathered, self._user_hooks, path, path in differing)
                self._handles += [call] if call.attach(module, path in given) else []
        self._handles += [
            StandIns(model, self.calls),
            model.register_state_dict_post_hook(mark_as_part),
            model.register_load_state_dict_pre_hook(self._before_loading),
            model.register_load_state_dict_post_hook(self._after_loading),
            model.register_forward_hook(self._returned, prepend=True),
            model.register_forward_hook(self._after, always_call=True),
            model.register_forward_pre_hook(self._before, with_kwargs=True, prepend=True),  # before FSDP2's own
        ]
        state.writes.begin(parts_of(model))
        _guard_steps(self)

    def join(self, check: Callable[[ExampleCall], None], watch: Removable | None = None) -> None:
        """Check one thing more before each forward, after all others.

        Args:
            check: gets the call.
            watch: is removed with the guard.
        """
        self.before_forward += (check,)
        if watch is not None:
            self._handles.append(watch)

    def remove(self) -> None:
        """Take away what :meth:`attach` and calls since have put on the model: nothing is checked any more.

        What its parts compute is as it was, in calls that go the plan's way. Not collective.
        """
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        self._user_hooks.unwrap()
        self.bypasses.end()
        self.compared.end()
        self.calls.detach()
        _live.pop(self, None)
        _forget_steps()

    def _before(self, model: nn.Module, args: Any, kwargs: Any) -> Any:
        """Forward pre-hook of the model."""
        self.running.own += 1
        if transforms.are_active():  # in no loop: the compiler breaks its graph here, and would not go on after one
            raise _not_reached(model)
        if torch.compiler.is_compiling():
            return None
        if self.running.own == 1:
            self.gathered.begin()
        call = given = ExampleCall(args, kwargs)
        for check in self.before_forward:
            call = check(call) or call
        return None if call is given else call

    def _returned(self, model: nn.Module, args: Any, output: Any) -> None:
        """Forward hook of the model, before anything is done with what its own code returns.

        Not in :meth:`_after`, which comes last: what hooks of FSDP2 or a user give instead is not what the code gave.
        """
        if self.running.own == 1:
            for check in self.on_return:
                check(output)
            self._has_returned = True

    def _after(self, model: nn.Module, args: Any, output: Any) -> None:
        """Forward hook of the model, also after an error; nothing is checked then."""
        self.running.own = max(0, self.running.own - 1)  # a hook before this one's may have failed
        if self.running.own:
            return
        if self._taken:
            give_back(self._taken)
            self._taken = []
        self.followed.end()
        self.gathered.end()
        try:
            if self._has_returned:
                self._has_returned = False
                for check in self.after_forward:
                    check(output)
            else:
                self.calls.take_back()
        finally:
            self.compared.end()
            self.bypasses.let_go()

    def _before_loading(self, model: nn.Module, state: Any, prefix: str, metadata: Any, *_: Any) -> None:
        for check in self.before_loading:
            check(model, state, prefix, metadata)
        parallel_state(model).writes.begin_known(parts_before_use(model))

    def _after_loading(self, model: nn.Module, keys: Any) -> None:
        parallel_state(model).loads += 1
        missing = [f".{key}" for key in keys.missing_keys]
        parts = parts_before_use(model)
        given = [part for name, part in parts.items() if not any(key.endswith(f".{name}") for key in missing)]
        parallel_state(model).writes.end_known(parts, given)

    def _is_unchanged(self, call: ExampleCall) -> None:
        """Modules and parameters are those of the plan; their hooks give gradients their sums, and users whole tensors.

        All of them are looked at only where something is another than in the last snapshot.

        Raises:
            RuntimeError: naming what was changed.
        """
        sum_at_once_in_ddp(self.model)
        if self._snapshot is not None and self._snapshot.is_current():
            return
        self._snapshot = None
        places, state = check_unchanged(self.model), parallel_state(self.model)
        self._taken = take_given(places, state) or self._taken
        hook_parameters(self.model, places)
        self._user_hooks.wrap()
        seen = Snapshot(self.model, [module for _, module in own_modules(self.model)], places)
        state.writes.check()
        state.writes.watch(seen.parts)
        self._snapshot = seen if seen.is_lasting else None

    def _is_unwritten(self, call: ExampleCall) -> None:
        """Nothing was written into parts by code that is not known. Collective before the first use.

        Raises:
            RuntimeError: naming what was written before the first use, on every rank.
        """
        parallel_state(self.model).writes.check()
        first_use(self.model)

    def _watch(self, call: ExampleCall) -> None:
        """From here on it is noted which layers run, and in some calls what is to be alike on the ranks."""
        way, has_gradients = self.calls.way, torch.is_grad_enabled()
        if has_gradients:
            self.bypasses.begin()
        if way is None or self.running.own > 1:
            return
        if self.calls.is_compared:
            way = way.as_written or way
            self.followed.begin(way.paths)
            self.compared.begin(way.alike, with_compiled=self.followed.is_as_written)
        if not has_gradients:
            self.bypasses.expect(way.ran)

    def _is_unwritten_before_step(self, optimizer: Optimizer) -> None:
        """Nothing was written into parts by code that is not known. Collective if the step is the first use.

        Raises:
            RuntimeError: as before a forward.
        """
        writes = parallel_state(self.model).writes
        writes.check()
        if writes.is_before_use and steps_some_of(optimizer, self.model.parameters()):
            check_unchanged(self.model)  # parts that are gone or have moved cannot be compared
            first_use(self.model)

    def mark_gradients(self, optimizer: Optimizer | None = None) -> None:
        """Gradients that somebody has put on parts represent the whole from now on. Not collective."""
        mark_gradients(self.model.parameters() if self._snapshot is None else self._snapshot.parts.values())

    def _note_step(self, optimizer: Optimizer) -> None:
        """What an optimizer's step has written is right."""
        parallel_state(self.model).writes.note()
        note_written(x for x in stepped_by(optimizer) if x.grad is not None and not isinstance(x, DTensor))

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_snapshot": None, "_taken": []}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        _guard_steps(self)


def _not_reached(model: nn.Module) -> RuntimeError:
    return RuntimeError(
        f"the parallel {type(model).__name__} is called under a function transform (torch.func.grad, vmap, jvp), which"
        " does not reach the communication between its ranks. loss.backward() and torch.autograd.grad(loss, parameters,"
        " create_graph=True) give the gradients of one process, also of second order (MAML); call it once for each"
        " example instead of under vmap"
    )


def check_gradients(optimizer: Optimizer) -> None:
    """After a closure has computed gradients, before an optimizer steps with them. Collective where they are compared.

    Raises:
        BypassedLayer: naming layers whose weights were used without them.
        DifferentOnRanks: naming the first place at which the ranks computed different gradients.
    """
    for guard in list(_live):
        for check in guard.with_gradients:
            check(optimizer)


def guarded_models() -> list[nn.Module]:
    """The parallel models of this process that are guarded, copies too."""
    return [guard.model for guard in list(_live)]


_live: WeakKeyDictionary[Guard, None] = WeakKeyDictionary()
"""The guards of this process. Optimizers belong to no model: whatever steps, all of them are asked.

They are in the order in which they came, the same on all ranks: some of their checks are collective.
"""
_steps: list[Removable] = []
_watches: list[Callable[[Optimizer], None]] = []
"""What else is called after each step, once."""
_one_by_one: WeakKeyDictionary[Optimizer, list[dict[str, Any]]] = WeakKeyDictionary()
"""The groups of optimizers that are stepping which are taken one by one meanwhile."""


def _guard_steps(guard: Guard) -> None:
    if not _steps:
        _steps.extend((register_optimizer_step_pre_hook(_before_step), register_optimizer_step_post_hook(_after_step)))
        _steps.extend((BeforeClipping(_mark_gradients), AllowedInLists(GradientPart)))
    _live[guard] = None
    finalize(guard, _forget_steps)


def _forget_steps() -> None:
    """Leave no hook of optimizers behind when there is no guard any more."""
    if next(iter(_live), None) is None:
        while _steps:
            _steps.pop().remove()


@contextmanager
def after_steps(watch: Callable[[Optimizer], None]) -> Iterator[None]:
    """Within it this is called after each optimizer's step, as long as any guard is alive."""
    _watches.append(watch)
    try:
        yield
    finally:
        _watches.remove(watch)


def _mark_gradients() -> None:
    for guard in list(_live):
        guard.mark_gradients()


def _before_step(optimizer: Optimizer, *_: Any) -> None:
    for guard in list(_live):
        for check in (*guard.before_step, *guard.with_gradients):
            check(optimizer)
        if isinstance(guard.model, FSDPModule) and optimizer not in _one_by_one:
            _one_by_one[optimizer] = step_one_by_one(optimizer)


def _after_step(optimizer: Optimizer, *_: Any) -> None:
    if optimizer in _one_by_one:
        step_as_before(_one_by_one.pop(optimizer))
    for guard in list(_live):
        for check in guard.after_step:
            check(optimizer)
        if isinstance(guard.model, FSDPModule):
            guard.gathered.after_step(guard.model)
    for watch in list(_watches):
        watch(optimizer)
