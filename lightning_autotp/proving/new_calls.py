"""Calls of a parallel model that are not like the one it was proved for: each kind is proved when it first comes.

A plan is proved for one call of the model. With other arguments, in another mode, or with other settings in its config
the model may run other code. So before its forward, a cheap key tells kinds of calls apart. The first call of a kind is
traced, on the original model and on the local one, both without weights, and compared as they were for the plan. Where
the new code needs a tensor in another layout than it has, that is changed at the boundary of a module, and where it
reads a size that must be this rank's, the attribute is set while its module runs: in calls of this kind only.
"""

from __future__ import annotations

import warnings
from collections.abc import Hashable, Mapping
from dataclasses import fields, is_dataclass
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from lightning_autotp.applying.lengths import Lengths
from lightning_autotp.applying.replace import BoundaryConversion, allow_runs, hook_boundary, set_size
from lightning_autotp.applying.seen_paths import FirstRun, PathWatch
from lightning_autotp.capture.capture import Call, CaptureError, keep_values
from lightning_autotp.capture.nested import map_tensors, opened, tensors_in
from lightning_autotp.layouts.places import Boundary
from lightning_autotp.layouts.plan import ConversionPlan, SizePlan
from lightning_autotp.parallel.implementations import IMPLEMENTATIONS
from lightning_autotp.parameters.state import parallel_state
from lightning_autotp.private.torch_private import has_values, is_in_backward, without_modes
from lightning_autotp.proving.configs import ConfigWatch
from lightning_autotp.proving.local_sizes import Unlocalizable, find_sizes_of_call
from lightning_autotp.proving.read_plan import read_for_call
from lightning_autotp.proving.verify import trace
from lightning_autotp.ranks.agreement import raise_together
from lightning_autotp.ranks.group import TPGroup
from lightning_autotp.ranks.meeting import meet
from lightning_autotp.solving.annotate import inputs_of_modules, parts_at_modules, runs_apart
from lightning_autotp.solving.expert_modules import as_planned
from lightning_autotp.solving.paths import seen_everywhere, seen_paths
from lightning_autotp.solving.planned import PlanMismatch
from lightning_autotp.solving.solution import Solution

_TRAINING = attrgetter("training")


class UnprovedCall(RuntimeError):
    """A parallel model is called in a way in which its parts would not compute what the original model does."""


class CallProver:
    """Proves each new kind of call of a parallel model. Collective where a kind is new.

    Args:
        model: the local model.
        original: a copy on the meta device of the model it was before
            (:func:`~lightning_autotp.capture.capture.meta_copy`).
        solution: what its plan means in the calls that were proved for it.
        examples: these calls. Where there are several, they were traced together, and each is a new kind.
    """

    def __init__(self, model: nn.Module, original: nn.Module, solution: Solution, examples: tuple[Call, ...]) -> None:
        # Not its state: a deep copy of the model has one of its own.
        self.model, self.group, self.examples = model, parallel_state(model).group, examples
        self.modules = list(model.modules())
        self.undescribed: set[str] = set()
        self.hooks: list[RemovableHandle] = []
        self.watch, self.first_run = PathWatch(model), FirstRun(model)
        self.begin(original, solution)

    def begin(self, original: nn.Module, solution: Solution) -> None:
        """Forget what was proved of other kinds of calls: only a single example's is, of this model.

        Args:
            original: a copy of the original model on the meta device.
            solution: what the plan means in the examples' calls.
        """
        state = parallel_state(self.model)
        self.plan, self.original = state.plan, original
        here = dict(zip((path for path, _ in original.named_modules()), self.modules, strict=True))
        self.configs = ConfigWatch(here, original, self.plan.sizes)
        for hook in self.hooks:
            hook.remove()
        self.hooks.clear()
        kinds = [(kind_of(call), bytes([True] * len(self.modules)), self.configs.version()) for call in self.examples]
        state.parts, state.given = parts_at_modules(solution), inputs_of_modules(solution.graph)
        self.watch.follow(seen_paths(solution, self.group.rank), original)
        self.proved: dict[Hashable, tuple[ConversionPlan, ...]] = {}
        self.to_run: dict[Hashable, Solution] = {}  # of kinds of which no call has run
        if len(kinds) == 1:
            self.proved[kinds[0]], self.to_run[kinds[0]] = state.parts, solution
        self.at_inputs: dict[Hashable, list[BoundaryConversion]] = {}  # what hooks of other modules cannot do
        self.met: set[Hashable] = set()
        self.running: Hashable = None
        self.with_gradients: set[Hashable] = set()  # kinds whose backward passes may be still to come
        self.was_backward = False

    def prove(self, args: Any, kwargs: Any) -> Any:
        """Before a forward of the model.

        Returns:
            The model's arguments, where calls of this kind need them in another layout; else ``None``.

        Raises:
            UnprovedCall: if the parts do not compute what the model does in a call like this.
            PeerError: on ranks where they do, if they do not on another one.
        """
        call = Call(args, kwargs)
        unknown: list[str] = []
        arguments = kind_of(call, unknown)
        if unknown:
            if arguments not in self.met and not _is_traced(call):
                self._meet(arguments)
            self._say_unknown(unknown[0])
            return None
        kind = arguments, bytes(map(_TRAINING, self.modules)), self.configs.version()
        if kind not in self.proved and not _is_traced(call):
            self._meet(kind)
            # The user's modes see what the model computes, not the traces.
            with without_modes(), raise_together(self.group.process_group, "proving a new kind of call"):
                self.proved[kind] = self._prove(kind, with_rows(call))
        self._runs(kind)
        if kind in self.proved:
            parallel_state(self.model).parts = self.proved[kind]
        changes = self.at_inputs.get(kind, [])
        for change in changes:
            args, kwargs = change.before(self.model, args, kwargs)
        solution = self.to_run.pop(kind, None)
        if solution is not None:
            self.first_run.begin(seen_everywhere(solution, self.group.rank), self.original, (args, kwargs))
        return (args, kwargs) if changes else None

    def end(self) -> None:
        """After a forward of the model, also one that failed."""
        self.first_run.end()

    def is_running(self, kind: Hashable) -> bool:
        """Whether a module runs in a call of this kind, be it again in a backward pass (activation checkpointing).

        Raises:
            UnprovedCall: if it runs again, and calls of different kinds have been waiting for their backward passes.
        """
        if not is_in_backward():
            return self.running == kind
        self.was_backward = True
        if len(self.with_gradients) > 1:
            raise UnprovedCall(
                f"a backward pass computes activations of {self._who()} again (activation checkpointing) after calls of"
                " different kinds, between which layouts differ, and which of them it was is not known: call backward"
                " after each of them, call it in the same way each time, or turn activation checkpointing off"
            )
        return kind in self.with_gradients

    def _runs(self, kind: Hashable) -> None:
        """Note that a call of this kind begins."""
        self.running = kind
        if torch.is_grad_enabled():
            if self.was_backward:
                self.with_gradients, self.was_backward = set(), False
            self.with_gradients.add(kind)

    def _prove(self, kind: Hashable, call: Call) -> tuple[ConversionPlan, ...]:
        """Trace both models in a call of this kind, and compare; returns what is not Invariant around modules then.

        What every rank needs is worked out on each, so that all come to the same.
        """
        for module, copied in zip(self.modules, self.original.modules(), strict=True):
            copied.training = module.training
            keep_values(copied, module)
        try:
            bare = {change.module for change in self.plan.conversions if change.call and change.side == "argument"}
            graph = trace(self.original, call, frozenset(self.plan.opaque), training=False, bare=bare)
        except CaptureError as error:
            warnings.warn(
                f"a call of {self._who()} cannot be traced, and so nobody has proved that its parts compute what the"
                f" model does when it is called so: {described(call, self.modules[0].training)}. ({error})",
                stacklevel=2,
            )
            return parallel_state(self.model).parts
        fixed: set[Boundary] = set()
        first: Exception | None = None
        while True:
            try:
                graph = as_planned(graph, self.plan, IMPLEMENTATIONS)
                changes, solution = read_for_call(self.plan, graph, IMPLEMENTATIONS, fixed)
            except PlanMismatch as error:
                raise self._refusal(call, first or error) from error
            try:
                sizes, solution = find_sizes_of_call(self.original, call, self.plan, changes, solution)
                contradiction = self.watch.join(seen_paths(solution, self.group.rank))
                if contradiction:
                    raise self._refusal(call, PlanMismatch(contradiction))
                break
            except Unlocalizable as error:
                first = first or error
                if not changes:
                    raise self._refusal(call, first) from error
            # Where sizes in Python code are those of the local model, a tensor cannot be whole: perhaps further on.
            fixed |= {Boundary(change.module, change.side, change.key) for change in changes}
        # Before the hooks with which the model collects outputs, as in the traces; each before the one after it.
        lengths = Lengths()  # of axes of this call's graph
        inputs = [change for change in changes if not change.module and change.side == "in"]
        self.at_inputs[kind] = [BoundaryConversion(change, self.group, lengths) for change in inputs]
        for change in reversed(changes):
            if change not in inputs:
                change_here = _InKind(change, self.group, lengths, self, kind)
                self.hooks.append(hook_boundary(self.model, change_here, prepend=True))
        for size in sizes:
            self.hooks += _SizeInKind(self.model, size, self, kind).hook()
        allow_runs(self.model, runs_apart(self.plan, solution.graph))
        self.to_run[kind] = solution
        return parts_at_modules(solution)

    def _refusal(self, call: Call, why: Exception) -> UnprovedCall:
        return UnprovedCall(
            f"{self._who()} is called in another way than it was traced, and its parts on the ranks would not compute"
            f" what the whole model does then: {why}\nIt is called with"
            f" {described(call, self.modules[0].training)}. Give example_inputs that are passed in this way, so that it"
            " is planned for, or leave out what is new"
        )

    def _meet(self, kind: Hashable) -> None:
        """Wait for the other ranks before the first call of a kind: that is where one rank alone calls the model."""
        meet(self.group, f"{self._who()} is called, for the first time in this way,")
        self.met.add(kind)

    def _who(self) -> str:
        return type(self.model).__name__

    def _say_unknown(self, what: str) -> None:
        """Say once that calls with an argument of a class are not proved, if gradients are computed in them."""
        if what not in self.undescribed and torch.is_grad_enabled():
            self.undescribed.add(what)
            warnings.warn(
                f"{self._who()} is called with a {what}, about which nothing is known: nobody has proved that its parts"
                " compute what the model does in such a call",
                stacklevel=3,
            )


class _InKind(BoundaryConversion):
    """A change of layout in calls of one kind only."""

    def __init__(
        self, plan: ConversionPlan, group: TPGroup, lengths: Lengths, prover: CallProver, kind: Hashable
    ) -> None:
        super().__init__(plan, group, lengths)
        self.prover, self.kind = prover, kind

    def before(self, module: nn.Module, args: Any, kwargs: Any) -> Any:
        return super().before(module, args, kwargs) if self.prover.is_running(self.kind) else None

    def after(self, module: nn.Module, args: Any, output: Any) -> Any:
        return super().after(module, args, output) if self.prover.is_running(self.kind) else None


class _SizeInKind:
    """An attribute of a module, or an entry of its config, that is this rank's while it runs in calls of one kind."""

    def __init__(self, model: nn.Module, size: SizePlan, prover: CallProver, kind: Hashable) -> None:
        self.model, self.size, self.prover, self.kind = model, size, prover, kind
        self.attribute = size.attribute.partition(".")[0]
        self.before: list[Any] = []  # the attribute's value before each run that is under way

    def hook(self) -> list[RemovableHandle]:
        """Set it from now on; before other hooks of the module see it."""
        module = self.model.get_submodule(self.size.module)
        before = module.register_forward_pre_hook(self._set, prepend=True)
        return [before, module.register_forward_hook(self._set_back, always_call=True)]

    def _set(self, module: nn.Module, args: Any) -> None:
        if self.prover.is_running(self.kind):
            self.before.append(getattr(module, self.attribute))
            set_size(self.model, self.size, self.size.local[self.prover.group.rank])

    def _set_back(self, module: nn.Module, args: Any, output: Any) -> None:
        if self.before:
            setattr(module, self.attribute, self.before.pop())


def kind_of(value: Any, unknown: list[str] | None = None) -> Hashable:
    """What of a call's arguments may decide which code runs: not values of tensors, nor their sizes but 1.

    The number of rows, a tensor's first dim, may be 1 as well as any other: see :func:`with_rows`.

    Args:
        value: the arguments.
        unknown: gets the classes of objects of whose contents nothing is known.
    """
    kind = type(value)
    if value is None or kind is bool or kind is str or isinstance(value, torch.dtype | torch.device):
        return value
    if isinstance(value, Tensor):
        return value.dtype, value.requires_grad, value.ndim, tuple([size == 1 for size in value.shape[1:]])
    if kind is int:
        return "int", min(max(value, -1), 2)
    if kind is float:
        return "float"
    if isinstance(value, Mapping):
        return tuple([(key, kind_of(item, unknown)) for key, item in value.items()])
    if isinstance(value, list | tuple):
        return (kind.__name__, *[kind_of(item, unknown) for item in value])
    if is_dataclass(value):
        return tuple([(field.name, kind_of(getattr(value, field.name), unknown)) for field in fields(value)])
    if (level := opened(value)) is not None:
        return (kind.__name__, *[(step, kind_of(item, unknown)) for step, item in zip(*level[:2], strict=True)])
    if unknown is not None:
        unknown.append(kind.__name__)
    return kind.__name__


def with_rows(call: Call) -> Call:
    """A call with a single row as one with two of it: a dim of size 1 could be any dim, or none."""
    sizes = {leaf.shape[0] for leaf in tensors_in(tuple(call)) if leaf.ndim}
    if sizes != {1}:
        return call
    args, kwargs = map_tensors(lambda leaf: torch.cat([leaf, leaf]) if leaf.ndim else leaf, tuple(call))
    return Call(args, kwargs)


def _is_traced(call: Call) -> bool:
    """Whether it has no values: another trace is under way."""
    return any(not has_values(leaf) for leaf in tensors_in(tuple(call)))


def described(call: Call, training: bool) -> str:
    """A call in words."""
    said = [_said(value) for value in call.args] + [f"{name}={_said(value)}" for name, value in call.kwargs.items()]
    return f"({', '.join(said)}), in {'training' if training else 'evaluation'} mode"


def _said(value: Any) -> str:
    if isinstance(value, Tensor):
        return f"{str(value.dtype).removeprefix('torch.')}{list(value.shape)}"
    return repr(value) if value is None or isinstance(value, bool | int | float | str) else type(value).__name__
