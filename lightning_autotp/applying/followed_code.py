"""The running code of a parallel model's modules, followed line by line by the types that its tensors had in the trace.

The proof is of a trace. Running code may go another way for one of two reasons, and is followed accordingly:

* **Values decide**, say which experts a mixture runs, or random numbers, which layers. Modules of which the trace
  knows this, and all in them, are followed in every run. It is proved that each of their steps was seen:
  :mod:`~lightning_autotp.solving.paths` says why this is enough. A line that was not seen may look at what no
  parameter went into, and so tell the way, but no more.
* **It asks what no trace shows**: whether a tensor is fake, an environment variable, a global flag. That may be any
  module, so all others are followed in the first call of each kind, and at rare intervals after it. A line that was not
  seen may do what it likes with tensors of which every rank has all, and with parts what gives parts again
  (:mod:`~lightning_autotp.applying.typed_tensors`), as code repeats heads for a kernel that takes no groups. Ranks that
  took a part for the whole (its norm, say) might well agree on the result.

Any other step is an error before it happens, so before anything is communicated at it, on every rank: the values that
decide are the same on all, and so is the code.

Modules on which ``compile()`` was called run uncompiled in a single call that is followed. Their code may ask whether
it is compiled: it is proved with both answers.

Where no values decide, what cannot be followed (other compiled code, hooks, function transforms, classes of tensors of
its own) is not: tensors that come from there have an unknown type, with which every line agrees. Nor is what a declared
function runs, but its calls are seen, and what it gives is of the type that it had in the trace.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from itertools import zip_longest
from types import CodeType, FrameType
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from lightning_autotp.applying.changed_calls import LocalForward
from lightning_autotp.applying.typed_tensors import MADE, NEUTRAL, OWN, Call, TensorTypes
from lightning_autotp.capture import vmap as transforms
from lightning_autotp.capture.call_sites import (
    by_call,
    call_key,
    call_leaves,
    calling_frame,
    frames_from,
    is_this_package,
    is_user_code,
)
from lightning_autotp.capture.declared_calls import codes_of_declared
from lightning_autotp.capture.nested import constants_among, leaves_of, tensors_in
from lightning_autotp.capture.seen_functions import DeclaredFunction
from lightning_autotp.parameters.state import parallel_state
from lightning_autotp.private.torch_private import (
    WeakIdKeyDictionary,
    compiled_in_place,
    has_values,
    is_compiled_itself,
    is_in_backward,
    is_operator,
    recomputing,
    run_as_written,
    uncompiled,
)
from lightning_autotp.solving.paths import (
    ANY,
    STATIC,
    UNSEEN,
    Given,
    Line,
    ModuleTypes,
    Outcome,
    SeenPath,
    ShardType,
    Type,
    agree,
    all_agree,
    all_fit,
    fits,
    said_line,
    type_of,
    without_static,
)
from lightning_autotp.torch_functions import NOT_READING

_UNKNOWN = "unknown"
_DEVICE = Tensor.device.__get__
_NUMBERS = Tensor.tolist, Tensor.numpy
_WHOLE = ("I", "R", *NEUTRAL)

Undo = Callable[[], None]


class UnseenPath(RuntimeError):
    """A module's code goes a way that was not seen in the trace that its plan was proved for."""


class FollowedCode:
    """Follows the code of a parallel model: where values decide in every run, the rest in single calls.

    Args:
        model: the local model.

    Attributes:
        decided: what was seen of the modules that go where values say in some kinds of calls.
        is_decided: whether they do in the call under way.
        others: in a call that is followed, what was seen of all modules in calls that go its way.
        declared: the code of declared functions.
        is_as_written: whether what is compiled runs uncompiled meanwhile.
        running: the modules that are running, the innermost last; ``None`` for one of which nothing is known.
    """

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.decided: dict[str, SeenPath] = {}
        self.is_decided = True
        self.others: Mapping[str, SeenPath] = {}
        self.declared: frozenset[CodeType] = frozenset()
        self.is_as_written = False
        self.running: list[_Run | None] = []
        self._always: list[Undo] = []
        self._now: list[Undo] = []
        self._root: _Calls | None = None
        self._parameters: WeakIdKeyDictionary | None = None

    def __getstate__(self) -> dict[str, Any]:  # a copy of the model has calls of its own
        return {**vars(FollowedCode(self.model)), "decided": self.decided, "_always": self._always}

    def follow(self, decided: Mapping[str, SeenPath]) -> None:
        """Follow these modules from now on in every run, and no others.

        Args:
            decided: by module, what was seen of its code.
        """
        _undo(self._always)
        self.decided = {}
        self.join(decided)

    def attach(self) -> None:
        """Follow them before all hooks that were put on since: those of FSDP2 give a module other tensors."""
        self.follow(self.decided)

    def detach(self) -> None:
        """Leave nothing on the model: its code is not followed any more. Not collective."""
        self.end()
        _undo(self._always)

    def join(self, decided: Mapping[str, SeenPath]) -> str:
        """Add what was seen in another kind of call; returns where the two contradict each other, if they do."""
        more = {path: seen for path, seen in decided.items() if path not in self.decided}
        for path in decided.keys() & self.decided.keys():
            contradiction = self.decided[path].join(decided[path])
            if contradiction:
                return f"{path or 'the model'}: {contradiction}"
        self.decided |= more
        self._always += self._put_on({path: self.model.get_submodule(path) for path in more})
        return ""

    def begin(self, others: Mapping[str, SeenPath]) -> None:
        """Before a forward that is to be followed. Not collective, and the ranks' code goes the same way.

        Args:
            others: by module, what was seen of its code; modules that are missing are not followed.
        """
        self.end()
        if "" not in others or "" in self.decided or self._is_compiled_around():
            return
        self.is_as_written = any(compiled_in_place(self.model.modules()))
        if self.is_as_written:
            as_written = ExitStack()
            as_written.enter_context(run_as_written(self.model.modules()))
            as_written.enter_context(recomputing(self._again))
            self._now.append(as_written.close)
        self.others, self.declared = others, codes_of_declared()
        self._now.append(_calls_of_declared({line[2] for seen in others.values() for line in seen.calls}))
        paths = {parallel_state(self.model).path(module): module for module in self.model.modules()}
        followed = others.keys() - self.decided.keys() - {""}
        self._now += self._put_on({path: module for path, module in paths.items() if path in followed})
        # The root's own forward and hooks cannot change now: of its arguments nothing is known.
        root = _Run(self, "", others[""], next(iter(others[""].runs.values())), None)
        self.running.append(root)
        if (local := LocalForward.of(self.model)) is not None:
            self._now.append(self._put_around(local, ""))
        else:
            root.is_inside = True
            self._root = _Calls(root)
            self._root.__enter__()

    def _is_compiled_around(self) -> bool:
        """Whether modules are compiled that cannot run as they are written for one call."""
        return is_compiled_itself(self.model) or any(
            uncompiled(module) is not module for module in self.model.modules()
        )

    def _again(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """What runs as written where the backward pass computes activations again, as it did in the forward pass."""

        def again(*args: Any, **kwargs: Any) -> Any:
            with run_as_written(self.model.modules()):
                return function(*args, **kwargs)

        return again

    def returned(self, output: Any) -> None:
        """When the model's own code has run. Not collective.

        Args:
            output: what it returns.

        Raises:
            UnseenPath: if that has a part of a tensor where it had none in the trace.
        """
        if self._root is not None:
            self._root.run.leave(output)

    def end(self) -> None:
        """Leave nothing on the model of a call that was followed. Not collective."""
        if self._root is not None:
            self._root.__exit__(None, None, None)
            self._root = None
        _undo(self._now)
        self.is_as_written = False
        self.running.clear()
        self.others = {}
        if not self.decided:  # weak references: a parameter with any cannot be swapped
            self._parameters = None

    def type_of_parameter(self, parameter: nn.Parameter) -> Type | None:
        """A parameter's type, if it is one of the model's."""
        if self._parameters is None or parameter not in self._parameters:
            self._parameters = WeakIdKeyDictionary()
            metas = parallel_state(self.model).metas
            for name, one in self.model.named_parameters(remove_duplicate=False):
                if name in metas:
                    self._parameters[one] = type_of(metas[name].layout, metas[name].rank)
        return self._parameters.get(parameter)

    def _put_on(self, modules: Mapping[str, nn.Module]) -> Iterator[Undo]:
        """Follow runs of modules: before their other hooks, after them, and around their own code."""
        parallel = {use.module for use in parallel_state(self.model).plan.implementations if use.call is None}
        for path, module in modules.items():
            enter = partial(self._enter, path)
            yield module.register_forward_pre_hook(enter, with_kwargs=True, prepend=True).remove
            yield module.register_forward_hook(self._leave, always_call=True).remove
            is_layer = type(module).__module__.startswith("torch.nn.") and next(module.children(), None) is None
            if path not in parallel and not is_layer:
                # Inside of the changes at calls: what the code calls is seen before these.
                yield self._put_around(LocalForward.of(module) or module, path)

    def _put_around(self, holder: Any, path: str) -> Undo:
        """Follow what runs as the forward of a module, or of its changes at calls."""
        before = vars(holder).get("forward")
        holder.forward = _Forward(self, path, holder.forward)
        return partial(_put_back, holder, before)

    def _enter(self, path: str, module: nn.Module, args: Any, kwargs: Any) -> None:
        """Forward pre-hook, before all others."""
        caller = self.running[-1] if self.running else None
        self.running.append(None)  # also if this fails: then the other hook runs all the same
        if all(map(has_values, tensors_in((args, kwargs)))):
            self.running[-1] = self._run(path, (args, kwargs), caller if caller and caller.is_inside else None)

    def _run(self, path: str, given: Any, caller: _Run | None) -> _Run | None:
        """The run that begins; ``None`` if it is not certain which of those that were seen it is like."""
        is_step = isinstance(caller, _DecidedRun)
        seen = self.decided.get(path) if self.is_decided else None
        kind: type[_Run] = _DecidedRun
        if seen is None or (seen.constants and not is_step):  # or its code goes the same way again
            seen, kind = self.others.get(path), _Run
        if seen is None or (caller is None and kind is _Run):
            return None
        runs = seen.runs.values()
        fitting = list(runs) if caller is None else caller.like(path, given, runs)
        if kind is _DecidedRun and not is_step:  # the code that calls it goes the same way as in the trace
            places = {place for place, _ in _tensors(given)}
            fitting = [run for run in fitting if places >= dict(run.given).keys()]
            if len(fitting) != 1:
                raise kind.refusal(self.model, path, f"it is called with tensors at {', '.join(sorted(places))}")
        return kind(self, path, seen, fitting[0], caller) if is_step or len(fitting) == 1 else None

    def _leave(self, module: nn.Module, args: Any, output: Any) -> None:
        """Forward hook, after those that change layouts."""
        left = self.running.pop() if self.running else None
        if left is not None and left.caller is not None:
            left.caller.take(left.types.returned, output)


def _calls_of_declared(names: Collection[str]) -> Undo:
    """Let modes see calls of the declared functions of these names, as they do in a trace."""
    with ExitStack() as stack:
        for declared in DeclaredFunction.all(names):
            stack.enter_context(declared.seen())
        return stack.pop_all().close


def _put_back(holder: Any, forward: Any) -> None:
    if forward is None:
        del holder.forward
    else:
        holder.forward = forward


def _undo(done: list[Undo]) -> None:
    while done:
        done.pop()()


class _Forward:
    """A module's own code, followed while it runs."""

    def __init__(self, code: FollowedCode, path: str, forward: Any) -> None:
        self.code, self.path = code, path
        self.__wrapped__ = forward  # as code may ask for its signature

    @torch.compiler.disable
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run it.

        Raises:
            UnseenPath: if it goes a way that was not seen.
        """
        here = self.code.running[-1] if self.code.running else None
        if here is None or here.path != self.path or here.is_inside:  # or a call of the forward itself
            return self.__wrapped__(*args, **kwargs)
        return here.follow(self.__wrapped__, args, kwargs)


@dataclass(slots=True, eq=False)
class _Call(Call):
    """One call of a torch function.

    Attributes:
        line: where it stands.
        caller: the frame that calls it.
    """

    line: Line
    caller: FrameType


class _Run:
    """One run of a module, and the types of the tensors that its code has.

    Args:
        code: what follows it.
        path: where the module is.
        seen: what was seen of its code.
        types: the way in which it is called.
        caller: the run that it is called in; ``None`` if that is not followed.

    Attributes:
        is_inside: whether the module's own code runs, and is followed.
    """

    def __init__(self, code: FollowedCode, path: str, seen: SeenPath, types: ModuleTypes, caller: _Run | None) -> None:
        self.code, self.path, self.seen, self.types, self.caller = code, path, seen, types, caller
        self.is_inside = False
        self.tensors = TensorTypes(self._type_at_first)

    def follow(self, forward: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run the module's own code."""
        self.take(self.types.inside, (args, kwargs))
        if self.seen.constants and constants_among(leaves_of((args, kwargs))) in self.seen.constants:
            return forward(*args, **kwargs)  # it decides nothing: it goes the same way again
        self.is_inside = True
        with _Calls(self):
            result = forward(*args, **kwargs)
        self.leave(result)
        return result

    def leave(self, result: Any) -> None:
        """When the module's own code has run.

        Raises:
            UnseenPath: if it returns tensors of other types than were seen.
        """
        self.is_inside = False
        types = self._by_place(result)
        if not self._may_be(types, self.types.left):
            raise self.refusal(self.code.model, self.path, f"it returns ({_listed(types)})")

    def like(self, path: str, given: Any, runs: Iterable[ModuleTypes]) -> list[ModuleTypes]:
        """Those of a module's runs that were given what this one's code gives it now.

        Raises:
            UnseenPath: if there is none.
        """
        types = self._by_place(given)
        found = [run for run in runs if self._may_be(types, run.given)]
        if not found:
            raise self.refusal(self.code.model, self.path, f"it calls {path} with ({_listed(types)})")
        return found

    def outcome(self, call: _Call) -> Outcome | None:
        """What a call gives; ``None`` if it is none of the module's own code.

        Raises:
            UnseenPath: if it was not seen with such tensors, and that may matter.
        """
        if _is_of_a_mode(call) or self._is_elsewhere(call):
            return None
        types = ({self.tensors.of(leaf) for leaf in group if isinstance(leaf, Tensor)} for group in call.groups)
        given = tuple(frozenset(found - MADE) for found in types)
        calls = self.seen.calls.get(call.line, {})
        is_by_place = self.tensors.is_by_place(call, OWN)
        found = None if is_by_place else self._seen_alike(calls, given) or self._unseen(call, given)
        if found is None:
            seen = f", seen with {' or '.join(map(_said, calls))}" if calls else ""
            raise self.refusal(self.code.model, self.path, f"it calls {said_line(call.line)} with {_said(given)}{seen}")
        return found

    def note(self, call: _Call, outcome: Outcome, result: Any) -> None:
        """Note the types of what a call gave, and of what it wrote."""
        found = [leaf for leaf in call_leaves(result) if isinstance(leaf, Tensor)]
        kinds = outcome.results * len(found) if len(outcome.results) == 1 else outcome.results
        if len(kinds) != len(found) or not all(map(_has_length, found, kinds)):
            kinds = self._otherwise(call, found)
        if any(self.tensors.of(tensor) == OWN for tensor in call.tensors):
            kinds = tuple(OWN if kind == STATIC else kind for kind in kinds)
        if outcome.written:
            leaves = call.leaves
            for at, kind in outcome.written:
                self.tensors.write(leaves[at], kind)
        for tensor, kind in zip(found, kinds, strict=True):
            self.tensors.put(tensor, kind)

    def take(self, kinds: Iterable[tuple[str, Type]], value: Any) -> None:
        """Note the types of what the module is given, or of what one that it calls returns."""
        by_place = dict(kinds)
        for place, tensor in _tensors(value):
            if place in by_place:
                self.tensors.put(tensor, by_place[place])

    def _type_at_first(self, tensor: Tensor) -> Type:
        """The type of a tensor of which the module's code has made nothing."""
        kind = self.code.type_of_parameter(tensor) if isinstance(tensor, nn.Parameter) else None
        return self._unknown(tensor) if kind is None else kind

    @staticmethod
    def refusal(model: nn.Module, path: str, what: str) -> UnseenPath:
        """The error for code that no trace shows."""
        return UnseenPath(
            f"the code of {path or type(model).__name__} does something with a rank's part of a tensor that it did not"
            f" do when the model was traced, so it is not proved that the ranks compute what one process does: {what}."
            " It goes another way than in a trace (it asks for an environment variable, a global flag, or whether a"
            f" tensor is fake). Keep that module whole, keep_whole=[{path or '*'!r}], or make its code do the same in a"
            " trace"
        )

    def _unknown(self, tensor: Tensor) -> Type:
        """The type of a tensor of which nothing is known."""
        return ANY

    def _may_be(self, found: Mapping[str, Type], wanted: Iterable[tuple[str, Type]]) -> bool:
        """Whether tensors of these types, by place, may be where others were seen."""
        return all_agree(found, dict(wanted))

    def _seen_alike(self, calls: Mapping[Given, Outcome], given: Given) -> Outcome | None:
        """What a line gives that was seen with types in whose place these may stand."""
        found = {calls[wanted] for wanted in calls if _each(agree, given, wanted)}
        return found.pop() if len(found) == 1 else Outcome((ANY,), ()) if found else None

    def _is_elsewhere(self, call: _Call) -> bool:
        """Whether a call is none of the module's own code, or another one in a trace."""
        return (
            call.func in NOT_READING
            or is_in_backward()
            or transforms.are_active()
            or is_this_package(call.caller.f_code.co_filename)
            or not all(map(has_values, call.tensors))
        )

    def _unseen(self, call: _Call, given: Given) -> Outcome | None:
        """What a call gives that was not seen with these types; ``None`` if it may matter that it was not."""
        if call.line not in self.seen.calls and any(map(self.code.declared.__contains__, _codes(call.caller))):
            return Outcome((ANY,), ())
        made = self.tensors.made_by(call)
        if made is None:
            return None
        return Outcome((made,), () if call.written is None else ((0, made),))

    def _otherwise(self, call: _Call, found: list[Tensor]) -> tuple[Type, ...]:
        """The types of results that are others than a call was seen to give."""
        return (ANY,) * len(found)

    def _by_place(self, value: Any) -> dict[str, Type]:
        return {place: self.tensors.of(tensor) for place, tensor in _tensors(value)}


class _DecidedRun(_Run):
    """One run of a module that goes where values say: it is proved that each of its steps was seen."""

    @staticmethod
    def refusal(model: nn.Module, path: str, what: str) -> UnseenPath:
        """The error for a step that was not seen."""
        return UnseenPath(
            f"{type(model).__name__}: values of this batch, or random numbers, lead the code of {path or 'the model'} a"
            " way that it did not go when the model was traced, and it is not proved that the ranks' parts compute the"
            f" same there: {what}. Keep that module whole, keep_whole=[{path!r}], or give example_inputs with which it"
            " goes this way"
        )

    def _unknown(self, tensor: Tensor) -> Type:
        return _UNKNOWN if tensor.requires_grad else STATIC

    def _may_be(self, found: Mapping[str, Type], wanted: Iterable[tuple[str, Type]]) -> bool:
        return all_fit(dict(without_static(found.items())), dict(wanted))

    def _seen_alike(self, calls: Mapping[Given, Outcome], given: Given) -> Outcome | None:
        return calls.get(given) or next((calls[wanted] for wanted in calls if _each(fits, given, wanted)), None)

    def _is_elsewhere(self, call: _Call) -> bool:
        return (
            call.func == _DEVICE
            or (call.func in _NUMBERS and self.tensors.of(call.leaves[0]) in _WHOLE)
            or not (is_user_code(call.caller.f_code.co_filename) or call.tensors)  # torch's own, for its modes
            # In the hook of a module that is called, not in the module's own code.
            or next(code for code in _codes(call.caller) if code in _OF_RUNS) is _CALL
        )

    def _unseen(self, call: _Call, given: Given) -> Outcome | None:
        """A new line can do no more than tell the way, if what it makes is of a type that no line was seen with.

        It writes nothing, and takes static tensors, which are the same on all ranks, but no number that may be a size.
        """
        if (
            call.line not in self.seen.calls
            and call.tensors
            and all(group <= {UNSEEN} for group in given)
            and not any(type(leaf) is int and leaf > 1 for leaf in call.leaves)
            and not call.is_writing
        ):
            return Outcome((UNSEEN,), ())
        return None

    def _otherwise(self, call: _Call, found: list[Tensor]) -> tuple[Type, ...]:
        shapes = ", ".join(str(list(tensor.shape)) for tensor in found)
        raise self.refusal(
            self.code.model,
            self.path,
            f"{said_line(call.line)} gives tensors of shapes {shapes}: not as many, or of other lengths",
        )


_CALL = nn.Module.__call__.__code__
_OF_RUNS = _Run.follow.__code__, _CALL


class _Calls(TorchFunctionMode):
    """The calls of torch's functions in one run."""

    def __init__(self, run: _Run) -> None:
        super().__init__()
        self.run = run

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        run = self.run
        if torch.compiler.is_compiling() or not run.is_inside or run.code.running[-1] is not run:
            return func(*args, **kwargs)
        if (inside := by_call(func, kwargs)) is not None:
            with self:
                return inside(*args, **kwargs)
        caller = calling_frame(func, sys._getframe(1))
        line = call_key(caller, func)
        groups = [call_leaves(value) for value in (*args, *kwargs.values())]
        call = _Call(func, line[2], args, kwargs, groups, line, caller)
        outcome = run.outcome(call)
        result = func(*args, **kwargs)  # here, as it is told by its frames who calls it
        if outcome is not None:
            run.note(call, outcome, result)
        return result


def _is_of_a_mode(call: _Call) -> bool:
    """Whether a dispatch mode of the user's calls an operator that comes to it (``FlopCounterMode``, say)."""
    return is_operator(call.func) and any(code.co_name == "__torch_dispatch__" for code in _codes(call.caller))


def _codes(frame: FrameType | None) -> Iterator[CodeType]:
    """The code of a frame and of those that called it."""
    return (one.f_code for one in frames_from(frame))


def _has_length(tensor: Tensor, kind: Type) -> bool:
    """Whether a tensor is as long as a part of this type."""
    return not isinstance(kind, ShardType) or all(
        dim < tensor.dim() and (length is None or tensor.shape[dim] == length) for dim, _, length in kind.dims
    )


def _each(alike: Callable[[frozenset[Type], frozenset[Type]], bool], given: Given, wanted: Given) -> bool:
    """Whether it is so of each argument; one that is left out has no tensors.

    With a number of its own a rank may leave one out: ``enable_gqa`` where it has as many heads of keys as of queries.
    """
    nothing = frozenset[Type]()
    return all(alike(one, other) for one, other in zip_longest(given, wanted, fillvalue=nothing))


def _tensors(value: Any) -> Iterable[tuple[str, Tensor]]:
    return ((place, leaf) for place, leaf in leaves_of(value) if isinstance(leaf, Tensor))


def _listed(types: Mapping[str, Type]) -> str:
    return ", ".join(f"{place or 'its result'}: {kind}" for place, kind in types.items() if kind != STATIC)


def _said(given: Given) -> str:
    return f"({', '.join(' and '.join(sorted(map(str, group))) or '-' for group in given)})"
