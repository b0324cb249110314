"""A watch over the code around a parallel model: what it does with parameters must be what one process would do.

A parameter of a parallel model looks like any other, but a rank may have only a part of it, or its gradient may be
summed over the ranks. Inside the model that is proved to be right. Code outside of it, such as a penalty in the
training step, knows nothing of it. While the watch is on, every torch function that such code calls on a parameter, or
on what was made of one, is looked at: what gives the original model's values goes on, everything else is an error that
names the line and what to write instead.
"""

from __future__ import annotations

import os
import sys
from collections import Counter
from collections.abc import Hashable, Iterable, Sequence
from contextlib import ExitStack
from dataclasses import replace
from itertools import product
from types import TracebackType
from typing import Any, ClassVar
from weakref import ref

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer
from torch.overrides import TorchFunctionMode

from lightning_autotp.applying.typed_tensors import OWN, Call, TensorTypes
from lightning_autotp.capture.call_sites import call_leaves, calling_frame, frames_from, is_user_code, source_line
from lightning_autotp.capture.capture import ExampleCall
from lightning_autotp.gradients.parts import GradientPart
from lightning_autotp.gradients.whole_quantities import PartOfGradient
from lightning_autotp.guard.guard import after_steps
from lightning_autotp.layouts.blocks import common, index
from lightning_autotp.layouts.types import Invariant, Replicate, Shard
from lightning_autotp.parallel.head_product import note_written
from lightning_autotp.parameters.known_writes import known_writes
from lightning_autotp.parameters.local_blocks import held_blocks, plain
from lightning_autotp.parameters.part import PartOf
from lightning_autotp.parameters.state import parallel_models
from lightning_autotp.parameters.unchanged import check_unchanged
from lightning_autotp.private.torch_private import (
    LIST_UPDATES,
    WeakIdKeyDictionary,
    is_compiled,
    is_in_backward,
    put_below,
    set_data_of,
    take_out,
)
from lightning_autotp.proving.call_kinds import Arguments, is_looked_at
from lightning_autotp.solving.paths import ANY, STATIC, ZEROS, ShardType, Type, type_of
from lightning_autotp.torch_functions import NOT_READING, functions, getters, setters


class UnsoundUse(RuntimeError):
    """Code outside of a parallel model uses a part of it as if it were whole."""


_HARMLESS = NOT_READING.union(
    functions("backward requires_grad_ share_memory_ is_tensor __format__ __repr__"),
    (torch.autograd.backward, torch.autograd.grad),
)
"""Functions that make nothing of elements, but for gradients, which represent the whole."""
_TAKEN = frozenset(getters("data real imag T mT H mH"))
_SET = frozenset(setters("data grad"))
"""Of all attributes, those that give elements, and those that are set to some."""

_STEPPING = str(sys.modules["torch.optim.optimizer"].__file__)
"""Where torch's code is that calls the step of every optimizer, whoever wrote it."""
_TORCH = os.path.join(os.path.dirname(str(torch.__file__)), "")
_FOR_PARTS = tuple(
    os.path.join(_TORCH, *path)
    for path in [
        ("_dynamo", ""), ("_functorch", ""), ("_inductor", ""), ("amp", ""), ("distributed", ""),
        ("multiprocessing", ""), ("serialization.py",), ("storage.py",), ("utils", "checkpoint.py"),
    ]
)  # fmt: skip
"""Where torch's code is that does with parts what it is meant to do, or hands on what it is given, whatever that is.

All other code of torch does for its caller what it is told (a loss, a distribution, a logger's histogram), as any other
library's does.
"""


class checked(TorchFunctionMode):
    """Within it, code that uses parameters of a parallel model otherwise than through the model is checked.

    What the model itself does, optimizers' steps and the functions of this package are not looked at. Not collective.

    Example::

        model = lightning_autotp.parallelize(model, group)
        with lightning_autotp.checked(model):
            loss = model(**batch).loss + 0.1 * model.lm_head.weight.square().sum()  # UnsoundUse
        loss = model(**batch).loss + 0.1 * lightning_autotp.penalty(
            model, lambda name, p: p.square(), parameters=[model.lm_head.weight]
        )

    Args:
        module: a parallel model, or a module that holds some.

    Raises:
        RuntimeError: on entering, if the model was changed after it was divided.
        UnsoundUse: where the rank's part of a parameter would be taken for the whole, or its gradient be counted once
            for each rank.
    """

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self._module = module
        self._paused = 0
        self._calling_hooks = ""
        self._hooks = ExitStack()
        self.is_complete = False  # whether the next call ends it: an optimizer has stepped since it began
        # Of parts: parameters, their optimizers' states, and what was made of them element by element; and of own
        # tensors that have another number at each place, of whatever shape they were asked for. All others may be used
        # beside parts, as what the user has is of a part's shape only where it is meant for the part.
        self._types = TensorTypes(lambda _: ANY, beside=(ZEROS, ANY), of_nothing=ANY)
        # Which every rank has, and whose gradients are summed over the ranks.
        self._summed = WeakIdKeyDictionary()

    def __enter__(self) -> checked:
        self._look()
        super().__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        super().__exit__(kind, error, traceback)
        self._hooks.close()

    def begin(self, in_call: bool = False, hooks: str = "") -> None:
        """Begin below other modes, which may end first, until :meth:`end`.

        Args:
            in_call: whether a forward pre-hook of a model calls this: its forward is not looked at.
            hooks: the file of what calls a user's hooks: they are looked at, although an optimizer's step runs them.

        Raises:
            RuntimeError: if the model was changed after it was divided.
        """
        self._look()
        self._calling_hooks = hooks
        if in_call:
            self._pause()  # the hook after this call goes on
        put_below(self)

    def end(self) -> None:
        """End what was begun so."""
        take_out(self)
        self._hooks.close()

    def covers(self, model: nn.Module) -> bool:
        """Whether code that uses this model is checked."""
        return any(module is model for module in self._module.modules())

    def __reduce__(self) -> tuple[Any, ...]:
        """In the hooks of a copy of a model: one that is never on."""
        return checked, (nn.ModuleList(),), {"_paused": 1}

    def _look(self) -> None:
        for model, state in parallel_models(self._module):
            check_unchanged(model)
            for place in state.places(model):
                of = PartOf.of(place.meta, state.group)
                if isinstance(of.layout, Replicate):
                    self._summed[place.parameter] = of
                elif not isinstance(of.layout, Invariant):
                    self._types.put(place.parameter, _type(of))
            for module in model.modules():
                self._hooks.callback(module.register_forward_pre_hook(self._pause, prepend=True).remove)
                self._hooks.callback(module.register_forward_hook(self._go_on, always_call=True).remove)
        self._hooks.enter_context(after_steps(self._stepped))
        self._hooks.enter_context(known_writes(self._module, is_checked=True))

    def _stepped(self, optimizer: Optimizer, *_: Any) -> None:
        """After an optimizer's step: the states of a part are parts, too."""
        self.is_complete = True
        for parameter, state in optimizer.state.items():
            of = self._part(parameter)
            if of is not None and isinstance(state, dict):
                for value in state.values():
                    if isinstance(value, Tensor) and tuple(value.shape) == of.local_shape:
                        self._types.put(value, _type(of))

    def _part(self, tensor: Tensor) -> PartOf | None:
        """What a tensor is a part of; parts of gradients represent the whole."""
        kind = self._types.of(tensor)
        return kind.of if isinstance(kind, ShardType) and not isinstance(tensor, PartOfGradient) else None

    def _pause(self, *_: Any) -> None:
        self._paused += 1

    def _go_on(self, *_: Any) -> None:
        self._paused -= 1

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if self._paused or torch.compiler.is_compiling() or is_in_backward():
            return func(*args, **kwargs)
        name = _name(func)
        call = Call.of(func, name, args, kwargs).of_elements()
        tensors = call.tensors
        why = _NOT_OF_CUT.get(func)
        if why is not None and any(isinstance(x, DTensor) for x in tensors) and self._is_users(func):
            raise UnsoundUse(f"{why}\n  at {source_line(sys._getframe(1))}")
        if not _takes_elements(func):
            return func(*args, **kwargs)
        calls = call.of_each() if func in LIST_UPDATES else [call]
        gradients = [
            (x, _type(x.part)) for x in tensors if isinstance(x, GradientPart) and isinstance(x.part.layout, Shard)
        ]
        of = next(filter(None, map(self._part, tensors)), None)
        summed = next((tensor for tensor in tensors if tensor in self._summed), None)
        is_by_place = any(self._types.is_by_place(one, STATIC, OWN, parts=gradients) for one in calls)
        if is_by_place and self._is_users(func):
            raise self._refusal(name, of or gradients[0][1].of, _BY_PLACE_TOO, _WHOLE_SHAPE)
        if of is not None or summed is not None:
            if not self._is_users(func):
                return func(*args, **kwargs)
            is_used = torch.is_grad_enabled() and name not in ("detach", "__set__")
            if summed is not None and summed.requires_grad and is_used:
                raise self._refusal(name, self._summed[summed], _SUMMED)
            if of is None:
                return func(*args, **kwargs)
        made = [self._types.made_by(one) for one in calls]
        if of is not None and None in made and not (name == "equal" and self._tells_of_wholes(tensors)):
            raise self._refusal(name, of, _PART)
        result = func(*args, **kwargs)
        if call.written is not None:
            note_written(leaf for leaf in call.groups[0] if self._part(leaf) is not None)
        # A tuple: such as the mantissas and exponents of elements.
        if of is not None and isinstance(result, tuple) and func not in LIST_UPDATES:
            raise self._refusal(name, of, _PART)
        self._note(calls, made, result)
        return result

    def _note(self, calls: Sequence[Call], made: Sequence[Type | None], result: Any) -> None:
        """Note the types of what calls gave and wrote."""
        found = [leaf for leaf in call_leaves(result) if isinstance(leaf, Tensor)]
        for at, (call, kind) in enumerate(zip(calls, made, strict=True)):
            if kind is None:
                continue
            for tensor in found[at :: len(calls)]:
                if not isinstance(tensor, PartOfGradient) and self._types.of(tensor) != kind:
                    self._types.put(tensor, kind)
            if call.written is not None:
                self._types.write(call.written, kind)

    def _tells_of_wholes(self, tensors: Sequence[Tensor]) -> bool:
        """Whether ``torch.equal`` of these two, parts at least one of them, gives the answer for the whole tensors.

        A tensor is equal to itself, and wholes differ where what this rank has of both does: Lightning's
        ``BaseFinetuning`` looks so for a parameter among an optimizer's.
        """
        if len(set(map(id, tensors))) == 1 or any(isinstance(tensor, PartOfGradient) for tensor in tensors):
            return True
        parts = [self._part(tensor) for tensor in tensors]
        ranks = next(part.group.size for part in parts if part is not None)
        here = [plain(tensor) for tensor in tensors]
        shapes = {tuple(x.shape) if part is None else part.shape for x, part in zip(tensors, parts, strict=True)}
        blocks = [held_blocks(tensor, part, ranks) for tensor, part in zip(tensors, parts, strict=True)]
        differ = len(shapes) > 1 or any(
            not torch.equal(here[0][index(one.place(shared))], here[1][index(other.place(shared))])
            for one, other in product(*blocks)
            if (shared := common(one.original, other.original)) is not None
        )
        return differ and not torch.equal(*here)

    def _is_users(self, func: Any) -> bool:
        """Whether the function is called for code of a user's: by it, or by a library that it has called.

        Not for this package, for an optimizer's step, or for what torch does with parts.
        """
        frames = list(frames_from(calling_frame(func, sys._getframe(2))))
        files = [frame.f_code.co_filename for frame in frames]
        caller = next((file for file in files if not file.startswith(_TORCH) or file.startswith(_FOR_PARTS)), None)
        if caller is None or not is_user_code(caller):
            return False
        return next((file for file in files if file in (_STEPPING, self._calling_hooks)), None) != _STEPPING

    def _refusal(self, name: str, of: PartOf, why: str, instead: str = "") -> UnsoundUse:
        return UnsoundUse(
            f"{name} on {of.name}, or on what was made of it, outside of the model: {why.format(of.layout)}"
            f"\n  at {source_line(sys._getframe(2))}\n{(instead or _WHOLE).format(of.name, list(of.shape))}"
        )


class FirstSteps:
    """Tells which steps of a kind are watched: the first ones, the 10th, the 100th, the 1,000th and every 1,000th.

    Args:
        number: how many of the first ones; a negative number: all of them; 0: none, not the later ones either.
    """

    def __init__(self, number: int) -> None:
        self._number = number
        self._seen = Counter[Hashable]()

    def has_one(self, kind: Hashable) -> bool:
        """Whether the step that begins, with this kind of batch and of what comes after it, is one."""
        self._seen[kind] += 1
        seen = self._seen[kind]
        return self._number < 0 or seen <= self._number or (self._number > 0 and is_looked_at(seen))


class CheckedCalls:
    """In a loop of the user's own: from the first calls of models to the next one code is checked.

    So the whole of a loop is looked at, also what it does before it calls a model in its second turn. Where gradients
    are accumulated, that is the call after an optimizer's step. Not collective.
    Models that are compiled are not checked, nor are copies of a model.

    Args:
        number: how many calls of each model with each kind of arguments, in training and without gradients.
        models: all of them.
    """

    _running: ClassVar[checked | None] = None
    """The watch that is on: one in a process, for a loop that was left leaves it on until another model is called."""

    def __init__(self, number: int, models: Iterable[nn.Module] = ()) -> None:
        self._first = FirstSteps(number)
        self._models = models

    def remove(self) -> None:
        """End the watch that is on."""
        if CheckedCalls._running is not None:
            CheckedCalls._running.end()
            CheckedCalls._running = None

    def before(self, model: nn.Module, call: ExampleCall) -> None:
        """Before a forward of a model: end an earlier watch, and begin one if this call is among the first.

        Raises:
            RuntimeError: if a model was changed after it was divided.
        """
        running = CheckedCalls._running
        if running is not None and (running.is_complete or not running.covers(model)):
            self.remove()
        arguments = Arguments(call).kind
        kind = ref(model), model.training, torch.is_grad_enabled(), arguments
        is_first = self._first.has_one(kind)
        if is_first and CheckedCalls._running is None and not any(map(is_compiled, self._models)):
            watch = checked(nn.ModuleList(self._models))
            watch.begin(in_call=True)
            watch.is_complete = not (model.training and torch.is_grad_enabled())
            CheckedCalls._running = watch

    def __reduce__(self) -> tuple[Any, ...]:
        return CheckedCalls, (0,)


_NOT_OF_CUT: dict[Any, str] = {
    set_data_of: (
        "another tensor is put in the place of a parameter's data, where FSDP2 has cut the parameter over the copies of"
        " the model: torch ignores that. Write its elements: parameter.data.copy_(tensor)"
    ),
    torch.autograd.grad: (
        "torch.autograd.grad is asked for the gradient of a parameter that FSDP2 has cut over the copies of the model:"
        " what the model computes with is another tensor, which FSDP2 gathers. Take loss.backward() and parameter.grad,"
        " or train with one copy of the model (data_parallel_size=1, no data_mesh)"
    ),
}
"""What does nothing for a parameter that FSDP2 has cut, and what to do instead."""
_PART = "this rank has a part of it only ({})"
_BY_PLACE_TOO = (
    "this rank has a part of it only ({}), and what is beside it was drawn, or counted, in the part's shape: the whole"
    " would have other numbers there"
)
_SUMMED = "its gradient is summed over the ranks, so what all of them add here would count several times"

_WHOLE = (
    "Take lightning_autotp.full_tensor(model, {0!r}) for the whole parameter with its gradient;"
    " lightning_autotp.penalty for a sum over elements; lightning_autotp.full_gradients for gradients"
)
_WHOLE_SHAPE = (
    "Make it in the whole shape, {1}: a gradient takes its part of that (and torch.randn_like(p.grad) draws the whole's"
    " numbers); of a parameter, write lightning_autotp.full_tensor(model, {0!r}) and load it with"
    " lightning_autotp.load_full_state_dict(model, {{{0!r}: whole}}, strict=False)"
)


def _type(of: PartOf) -> ShardType:
    """The type of a part of a parameter."""
    kind = type_of(of.layout, of.group.rank)
    assert isinstance(kind, ShardType)
    return replace(kind, of=of)


def _takes_elements(func: Any) -> bool:
    """Whether a function makes something of a tensor's elements, or puts others in their place."""
    name = getattr(func, "__name__", "")
    if name == "__get__":
        return func in _TAKEN
    return func in _SET if name == "__set__" else name != "__delete__" and func not in _HARMLESS


def _name(func: Any) -> str:
    """The function's name, also of the getter of ``data``, which gives the elements under another object."""
    name = str(getattr(func, "__name__", func))
    return "detach" if name == "__get__" and getattr(func.__self__, "__name__", "") == "data" else name
