"""Calls of a parallel model that are not like the one it was proved for: each kind is proved when it first comes.

A plan is proved for one call of the model. With other arguments, in another mode, or with other settings in its config
or its modules the model may run other code. So before its forward, a cheap key tells kinds of calls apart. The first
call of a kind, and one of other sizes than were seen of it, is traced on the original model, without weights. If its
code goes a way that is known, that is all. If not, the local model is traced, too, and both are compared as they were
for the plan. Where the new code needs a tensor in another layout than it has, that is changed at the boundary of a
module, and where it reads a size that must be this rank's, the attribute is set while its module runs: in calls that go
this way only.
"""

from __future__ import annotations

import sys
import warnings
from collections import defaultdict
from collections.abc import Callable, Collection, Hashable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import compress
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from lightning_autotp.applying.followed_code import FollowedCode
from lightning_autotp.applying.lengths import Lengths
from lightning_autotp.applying.replace import BoundaryConversion, allow_runs, apply_plan, hook_boundary, set_size
from lightning_autotp.capture.capture import CaptureError, ExampleCall, device_of, keep_values, meta_copy
from lightning_autotp.capture.compiled_code import as_compiled
from lightning_autotp.capture.garbage import relaxed_gc
from lightning_autotp.capture.nested import map_tensors
from lightning_autotp.layouts.names import join_names
from lightning_autotp.layouts.places import Boundary
from lightning_autotp.layouts.plan import ConversionPlan, SizePlan
from lightning_autotp.layouts.types import Layout
from lightning_autotp.operators.graph import Graph
from lightning_autotp.operators.questions import DIM, Number, Question
from lightning_autotp.parallel.implementations import IMPLEMENTATIONS
from lightning_autotp.parallel.logits import VocabParallelLogits
from lightning_autotp.parameters.state import parallel_state
from lightning_autotp.private.torch_private import (
    compiled_in_place,
    has_values,
    is_in_backward,
    next_node,
    node_in_backward,
    tree_map_only,
    without_modes,
)
from lightning_autotp.proving.attributes import AttributeWatch
from lightning_autotp.proving.autocast import used_in
from lightning_autotp.proving.call_kinds import (
    Arguments,
    Asked,
    FewValues,
    Sizes,
    described,
    floats_of,
    full_ones_of,
    is_looked_at,
    numbers_of,
    surroundings,
    with_rows,
)
from lightning_autotp.proving.configs import ConfigWatch
from lightning_autotp.proving.continued import Begun, BegunCalls
from lightning_autotp.proving.local_sizes import PROVING, Unlocalizable, find_sizes_of_call
from lightning_autotp.proving.read_plan import read_for_call
from lightning_autotp.proving.verify import trace
from lightning_autotp.proving.ways import same_way
from lightning_autotp.ranks.agreement import first_makes, made_together, raise_together
from lightning_autotp.ranks.group import TPGroup
from lightning_autotp.ranks.store_barrier import store_barrier
from lightning_autotp.solving.expert_modules import constrained_by
from lightning_autotp.solving.paths import SeenPath, add_paths, seen_paths
from lightning_autotp.solving.plan_from_solution import (
    alike_at_modules,
    inputs_of_modules,
    parts_at_modules,
    runs_apart,
)
from lightning_autotp.solving.planned import PlanMismatch
from lightning_autotp.solving.solution import Solution

_TRAINING = attrgetter("training")
_AGAIN, _ONE_IN = 10, 100
"""The first call of a kind in a later stage is compared, too, until there were so many, and one in so many calls."""


class UnprovedCall(RuntimeError):
    """A parallel model is called in a way in which its parts would not compute what the original model does."""


@dataclass(eq=False)
class Way:
    """One way that the model's code goes, which is proved.

    Attributes:
        parts: what is not Invariant around modules then.
        alike: what every rank has alike around modules then, and whether its gradient is alike as well.
        graph: a trace that goes this way; ``None`` for what could not be traced.
        layouts: of the trace's tensors.
        paths: what was seen of the modules' code in the traces that go this way.
        inputs: changes of the layouts of the model's own arguments.
        sizes: attributes of the model itself that are this rank's meanwhile.
        is_as_planned: whether nothing else is changed on this way than the plan says.
        ran: the modules that run in every such call.
        as_written: the way that such a call goes where modules that are compiled run uncompiled; ``None`` is this one.
    """

    parts: tuple[ConversionPlan, ...]
    alike: Mapping[Boundary, bool] = field(default_factory=dict)
    graph: Graph | None = None
    layouts: Mapping[int, Layout] = field(default_factory=dict)
    paths: dict[str, SeenPath] = field(default_factory=dict)
    inputs: list[BoundaryConversion] = field(default_factory=list)
    sizes: list[_SizeOnWay] = field(default_factory=list)
    is_as_planned: bool = False
    ran: frozenset[str] = frozenset()
    as_written: Way | None = None


@dataclass(frozen=True)
class _Led:
    """What leads code a way: the answers that it got in a trace to what it asked of sizes.

    Attributes:
        answers: by question.
        way: the way.
    """

    answers: tuple[tuple[Question, Number | None], ...]
    way: Way

    def leads(self, numbers: Mapping[str, Number]) -> bool:
        """Whether it would get the same answers in a call with these numbers and sizes."""
        return all(question.answer(numbers) == answer for question, answer in self.answers)


class _Kind:
    """What is known of one kind of call: which way its code goes, by the sizes of what it is given.

    Attributes:
        calls: how many there were.
        compared: how many of them are compared with what was proved.
        stage: in which stage the last of them was.
        is_lowered: whether what FSDP2 may gather in 16 bits gives the same numbers so.

    Args:
        sizes: the sizes of calls that are known to go each way; shared with kinds that differ in numbers alone, of
            which there are many.
    """

    def __init__(self, sizes: defaultdict[Way, Sizes]) -> None:
        self.calls = self.compared = self.stage = 0
        self.is_lowered = True
        self._sizes = sizes
        self._by_sizes: dict[tuple[int, ...] | None, Way] = {}
        self._led: dict[_Led, None] = {}

    def way(self, call: ExampleCall, sizes: tuple[int, ...] | None, are_few: bool) -> Way | None:
        """The way that a call goes; ``None`` if it has to be traced.

        Args:
            call: the call.
            sizes: those of its tensors.
            are_few: whether they are some of those few that are not taken for known because they lie between others.
        """
        numbers = numbers_of(call) if any(led.answers for led in self._led) else {}
        ways = dict.fromkeys(led.way for led in self._led if led.leads(numbers))
        found = self._by_sizes.get(sizes)
        if found in ways:
            return found
        # Those may differ by sizes that are alike by chance; what runs on them is the same where all are as planned.
        if len(ways) > 1 and not all(way.is_as_planned for way in ways):
            return None
        return next((way for way in ways if sizes is None or self._sizes[way].have(sizes, are_few)), None)

    def is_compared(self, stage: int, wait: Callable[[], object]) -> bool:
        """Count a call in this stage; whether it is to be compared with what was proved.

        Args:
            stage: the number of the stage.
            wait: waits for the other ranks, where the stage alone is why: one that is new to a rank alone would let
                this one has nothing to compare with.
        """
        self.calls += 1
        is_first, self.stage = stage != self.stage, stage
        found = is_looked_at(self.calls)
        if is_first and not found and self.compared < _AGAIN + self.calls // _ONE_IN:
            found = True
            wait()
        self.compared += found
        return found

    def add(self, sizes: tuple[int, ...] | None, led: _Led) -> None:
        """Note the way that a call of these sizes goes, and what leads it there."""
        self._by_sizes[sizes] = led.way
        self._led[led] = None
        if sizes is not None:
            self._sizes[led.way].add(sizes)


class CallProver:
    """Proves each new kind of call of a parallel model. Collective where a kind is new, or its sizes are.

    Args:
        model: the local model.
        original: a copy on the meta device of the model it was before
            (:func:`~lightning_autotp.capture.capture.meta_copy`).
        solution: what its plan means in the calls that were proved for it.
        examples: these calls. Where there are several, they were traced together, and each is a new kind.
    """

    def __init__(
        self, model: nn.Module, original: nn.Module, solution: Solution, examples: tuple[ExampleCall, ...]
    ) -> None:
        # Not its state: a deep copy of the model has one of its own.
        self.model, self.group, self.examples = model, parallel_state(model).group, examples
        self.modules = list(model.modules())
        self.undescribed: set[str] = set()
        self.hooks: list[RemovableHandle] = []
        self.code = FollowedCode(model)
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
        self.detach()
        self.attributes = AttributeWatch(here, original, self.plan.sizes)
        self.led = solution.graph.value_dependent  # modules that go where values say in the examples' calls
        self.numbers: set[str] = set()  # where floats of the arguments are of which code asks what they are
        self.questions = Asked()  # what it asks of numbers
        self.asked: set[str] = set()  # where integers and flags are, in tensors, of which it asks
        self.compiling: set[str] = set()  # modules whose code asks whether it is compiled
        self.few, self.few_sizes = FewValues(), FewValues()
        self.sizes: dict[Hashable, defaultdict[Way, Sizes]] = {}
        self.known: dict[Hashable, _Kind] = {}
        self.ways: list[Way] = []
        self.called_by_all: set[Hashable] = set()
        self.looked_at: set[Hashable] = set()  # which kinds use parameters in autocast's dtype alone, but for autocast
        self.running: Way | None = None
        self.begun = BegunCalls()
        self.stage = 0
        self.stage_begun: tuple[bool, int] | None = None  # training, and how often weights were loaded
        self.way: Way | None = None  # that the call under way goes, if that is known
        self.counted: _Kind | None = None  # that has counted the call under way
        self.is_compared = False  # whether that call is compared with what was proved
        self.unknown = ""  # the class of what it is given, if nothing is known about that
        self.trained_with: ExampleCall | None = None  # the last of these calls in training, without values
        self.with_gradients: set[Way] = set()  # whose backward passes may be still to come
        self.was_backward, self.since = False, 0  # before which of autograd's nodes calls went other ways
        state.parts, state.given = parts_at_modules(solution), inputs_of_modules(solution.graph)
        self.code.follow(seen_paths(solution, self.group.rank))
        self._heed(solution.graph, self.examples)
        if len(self.examples) == 1:
            (call,) = self.examples
            arguments = Arguments(call)
            kind = self._kind(call, arguments, bytes([True] * len(self.modules)))
            way = self._way(state.parts, solution, is_as_planned=True)
            if not self._told():
                self._know(kind, self._sizes(arguments), _Led(self._answers(call), way))

    def detach(self) -> None:
        """Change nothing any more in calls that go other ways than the plan's, and follow no code. Not collective."""
        for hook in self.hooks:
            hook.remove()
        self.hooks.clear()
        self.code.detach()

    def prove(self, call: ExampleCall) -> ExampleCall:
        """Before a forward of the model.

        Returns:
            What the model is to be called with: logits that another parallel model has returned in parts are whole, and
            where calls that go this way need an argument in another layout, it is.

        Raises:
            UnprovedCall: if the parts do not compute what the model does in a call like this.
            PeerError: on ranks where they do, if they do not on another one.
        """
        self.way, self.counted, self.is_compared, self.unknown = None, None, False, ""
        state, arguments = parallel_state(self.model), Arguments(call)
        if arguments.has_logits_in_parts:
            call = ExampleCall(*map_tensors(_whole, tuple(call)))
            arguments = Arguments(call)
        is_traced = not all(map(has_values, arguments.tensors))  # another trace is under way
        begun = self.begun.of(arguments.objects) if arguments.unknown else None
        modes, sizes = bytes(map(_TRAINING, self.modules)), self._sizes(arguments)
        # Together for all numbers in the arguments: each would bring as many sizes.
        kind = self._kind(call, arguments, modes, begun)
        are_few = self.few_sizes.told(_but_for_numbers(kind), sizes) == sizes
        known = self.known.get(kind)
        way = known.way(call, sizes, are_few) if known is not None else None
        if way is None and arguments.unknown and begun is None:
            if arguments.kind not in self.called_by_all and not is_traced:
                self._wait_for_all(arguments.kind)
            self.unknown = arguments.unknown[0]
            self._say_unknown(self.unknown)
            if state.gathers is not None and not is_traced:
                state.gathers.use(False)
            return self._on(self.running, call)  # what it goes on with is likely to be of the call before it
        if way is None and not is_traced:
            self._wait_for_all((arguments.kind, modes, sizes))
            calls = [call] if begun is None else begun.with_next(call)
            # The user's modes see what the model computes, not the traces.
            with (
                without_modes(),
                relaxed_gc(),
                raise_together(self.group.process_group, PROVING),
            ):
                traced, led = self._lead([with_rows(one) for one in calls], begun)
                if not led.leads(numbers_of(calls[-1])):  # code asks whether there is a single row
                    traced, led = self._lead(calls, begun)
                way = led.way
                # Now it is known what its code asks for.
                kind = self._kind(call, arguments, modes, begun)
                is_lowered = self._is_lowered(traced, kind, way)
            known = self._know(kind, sizes, led)
            known.is_lowered &= is_lowered
        if state.gathers is not None and known is not None:
            state.gathers.use(known.is_lowered)
        self._runs(way)
        self.way = way
        if way is None:
            return call
        state.parts = way.parts
        if known is not None and not is_traced:
            self.counted = known
            self.is_compared = known.is_compared(self._stage_of(modes[0]), self._wait_in_stage)
            if self.is_compared and modes[0] and torch.is_grad_enabled():
                self.trained_with = _without_values(call)
        if begun is not None and not is_traced:
            begun.way = way
            begun.all_tokens += arguments.tokens
        elif begun is None and arguments.objects and way.graph is not None:
            self.begun.note(call, kind, arguments.sizes, arguments.objects, arguments.tokens)
        return self._on(way, call)

    def take_back(self) -> None:
        """The call under way has failed: the next one of its kind is compared in its place.

        If nothing was known about what it was given, its error tells what may have been wrong with that.
        """
        if self.counted is not None:
            self.counted.calls -= 1
            self.counted = None
        error = sys.exc_info()[1]
        if self.unknown and type(error) is RuntimeError:  # of shapes, as a rule
            error.args = (
                f"{str(error).rstrip('.')}. This call of {self._who()} was not proved, as nothing is known about the"
                f" {self.unknown} that it is given. If the model itself has not computed what that holds, such as keys"
                " and values that are learned (prefix tuning), that is whole, while a rank computes a part of the"
                " heads: learn embeddings instead (inputs_embeds), use LoRA, or keep the attention whole (keep_whole=)",
            )

    def _on(self, way: Way | None, call: ExampleCall) -> ExampleCall:
        """What the model is to be called with on a way, on which its own attributes are set."""
        if way is None:
            return call
        for change in way.inputs:
            call = ExampleCall(*change.before(self.model, *call))
        for size in way.sizes:
            size.set(self.model)
        return call

    def _lead(self, calls: list[ExampleCall], begun: Begun | None) -> tuple[list[ExampleCall], _Led]:
        """Prove calls, the last of which goes on with the others: these, and what leads that one where."""
        self.questions.of_sizes.clear()
        before = begun.way if begun is not None else None
        way = self._prove(calls) if before is None else self._prove_next(calls, before)
        return calls, _Led(self._answers(calls[-1]), way)

    def _answers(self, call: ExampleCall) -> tuple[tuple[Question, Number | None], ...]:
        """What code that was traced last asked of sizes, with the answers in its call.

        Among it is which of the tensors have a single row: what follows from a dim of size 1 cannot be told.
        """
        numbers = numbers_of(call)
        rows = [place for place in numbers if place.startswith(DIM) and place.endswith(" 0") and numbers[place] == 1]
        asked = dict.fromkeys([*self.questions.of_sizes, *(Question("eq", (place, 1)) for place in rows)])
        return tuple([(question, question.answer(numbers)) for question in asked])

    def _know(self, kind: tuple[Hashable, ...], sizes: tuple[int, ...] | None, led: _Led) -> _Kind:
        """Note the way that a call of this kind and sizes goes, and what leads it there."""
        of_all = self.sizes.setdefault(_but_for_numbers(kind), defaultdict(Sizes))
        are_many = self.few.are_many or self.questions.few.are_many
        known = self.known.setdefault(kind, _Kind(of_all if are_many else defaultdict(Sizes)))
        known.add(sizes, led)
        if sizes is not None:
            of_all[led.way].add(sizes)
        return known

    def _stage_of(self, training: int) -> int:
        """The number of the stage: another begins when the model is in another mode, or weights were loaded into it."""
        now = bool(training), parallel_state(self.model).loads
        if now != self.stage_begun:
            self.stage_begun, self.stage = now, self.stage + 1
        return self.stage

    def _kind(
        self, call: ExampleCall, arguments: Arguments, modes: bytes, begun: Begun | None = None
    ) -> tuple[Hashable, ...]:
        """What a call is known by, but for its sizes; gradients and autocast come last.

        Args:
            call: the call.
            arguments: what it is given.
            modes: of all modules, whether they are in training mode.
            begun: the call that it goes on with: then sizes that code asks for count as well.
        """
        numbers: list[tuple[str, list[Any]]] = [*arguments.integers.items(), *floats_of(call, self.numbers).items()]
        told = tuple([(place, self.few.told(place, tuple(values))) for place, values in numbers])
        goes_on: tuple[Hashable, ...] = ()
        if begun is not None:
            answers = self.questions.answers_with(call, begun.all_tokens + arguments.tokens)
            goes_on = begun.kind, self.few.told(begun.kind, answers)
        return (
            (*goes_on, *arguments.kind),
            told,
            self.questions.answers(call),
            tuple(full_ones_of(call, self.asked)),
            modes,
            self.configs.version(),
            self.attributes.changes(),
            compiled_in_place(self.modules) if self.compiling else b"",
            surroundings(device_of(self.model)),
        )

    def _sizes(self, arguments: Arguments) -> tuple[int, ...] | None:
        """The sizes of a call that are to be told from others."""
        # A trace runs modules that are opaque, on the CPU: not for each size of a real batch.
        return None if self.plan.opaque else arguments.sizes

    def _heed(self, graph: Graph, calls: Iterable[ExampleCall]) -> None:
        """Know calls by what their code asked for in this trace of some, too."""
        self.attributes.watch(graph.settings)
        self.questions.heed(graph.questions, [Arguments(call).tokens for call in calls])
        self.numbers |= graph.numbers | self.questions.untold
        self.asked |= graph.asked
        self.compiling |= graph.compiling

    def _told(self) -> list[str]:
        """The compiled modules of which, or of one in which, the code asks whether it is compiled."""
        if not self.compiling:
            return []
        paths = [path for path, _ in self.original.named_modules()]
        compiled = compress(paths, compiled_in_place(self.modules))
        return [path for path in compiled if any(not path or f"{at}.".startswith(f"{path}.") for at in self.compiling)]

    def _way(
        self, parts: tuple[ConversionPlan, ...], solution: Solution | None = None, is_as_planned: bool = False
    ) -> Way:
        """A way that is proved from now on; without a solution, one that could not be traced."""
        way = Way(parts)
        if solution is not None:
            kept = replace(solution.graph, calls=[], inspections=[], runs=[], entered=[""])
            way = Way(parts, alike_at_modules(solution), kept, solution.layouts)
            add_paths(way.paths, solution.graph, solution.layouts, self.group.rank)
            if not solution.graph.asked:  # or values of a batch may lead past a module
                way.ran = frozenset(solution.graph.entered) - solution.graph.branching
        way.is_as_planned = is_as_planned
        self.ways.append(way)
        return way

    def used_in(self, dtype: torch.dtype, device: torch.device) -> frozenset[str]:
        """The parameters that autocast casts to ``dtype`` wherever the model uses them in the examples' calls.

        Collective over the tensor-parallel group.
        """
        self.original.train()
        modes = bytes([True] * len(self.modules))
        self.looked_at = {self._kind(call, Arguments(call), modes)[:-1] for call in self.examples}
        return frozenset.intersection(*(self._used_in(dtype, device, [call]) for call in self.examples))

    def _used_in(
        self, dtype: torch.dtype, device: torch.device, calls: list[ExampleCall], only: Collection[str] | None = None
    ) -> frozenset[str]:
        def local() -> nn.Module:
            model = meta_copy(self.original)
            apply_plan(model, self.plan, self.group)
            return model

        def names() -> frozenset[str]:
            with without_modes(), relaxed_gc():
                return used_in(dtype, local, calls, device=device, opaque=frozenset(self.plan.opaque), only=only)

        return frozenset.intersection(*made_together(self.group.process_group, PROVING, names))

    def _is_lowered(self, calls: list[ExampleCall], kind: tuple[Hashable, ...], way: Way) -> bool:
        """Whether what FSDP2 may gather in 16 bits is used in these alone in a call that goes a way. Collective."""
        gathers = parallel_state(self.model).gathers
        device = device_of(self.model)
        if gathers is None or not way.is_as_planned or surroundings(device)[1] != gathers.dtype:
            return False
        if kind[:-1] in self.looked_at:  # under the same autocast
            return True
        return self._used_in(gathers.dtype, torch.device(device), calls, gathers.names) == gathers.names

    def is_running(self, way: Way) -> bool:
        """Whether a module runs in a call that goes this way, be it again in a backward pass (checkpointing).

        Raises:
            UnprovedCall: if it runs again, and calls of different kinds have been waiting for their backward passes.
        """
        if not is_in_backward():
            return self.running is way
        self.was_backward = True
        if len(self.with_gradients) > 1 or node_in_backward() < self.since:
            raise UnprovedCall(
                f"a backward pass computes activations of {self._who()} again (activation checkpointing) after calls of"
                " different kinds, between which layouts differ, and it is not known which of them it was: call"
                " backward after each of them, call it under torch.no_grad() where no gradient is needed (a reference"
                " model), call it in the same way each time, or turn activation checkpointing off"
            )
        return way in self.with_gradients

    def _runs(self, way: Way | None) -> None:
        """Note that a call begins that goes this way; ``None`` for a trace."""
        self.running = way
        # In other calls values do not say where code goes: layers are dropped in training alone.
        self.code.is_decided = way is None or way.graph is None or way.graph.is_led
        if torch.is_grad_enabled() and way is not None:
            if self.was_backward:
                if self.with_gradients != {way}:
                    self.since = next_node()  # a graph that is kept may be passed once more
                self.with_gradients, self.was_backward = set(), False
            self.with_gradients.add(way)

    def _prove_next(self, calls: list[ExampleCall], before: Way) -> Way:
        """Prove a call that goes on with several, which are traced as one: its way, or else that of the call before.

        As one they may be something else. So what cannot be proved is no error here, but the first call that goes on so
        is compared, and code that was not seen before is an error there.
        """
        try:
            way = self._prove(calls, before)
        except UnprovedCall:
            way = before
        is_proved = all(made_together(self.group.process_group, PROVING, lambda: way is not before))
        return way if is_proved else before

    def _prove(self, calls: list[ExampleCall], before: Way | None = None) -> Way:
        """Prove a call, the last one: where code asks whether it is compiled, and is, with both answers.

        For what the compiler leaves as it is written gets the other one.

        Args:
            calls: the call, after the one that it goes on with.
            before: the way that it is to be taken to go where it cannot be traced.
        """
        way = self._prove_way(calls, before)
        told = self._told()
        if not told:
            return way
        why = ""
        try:
            with as_compiled(told):
                other = self._prove_way(calls, before)
        except UnprovedCall as error:
            why = str(error.__cause__)
        else:
            if other is way or other.graph is None or (other.is_as_planned and way.is_as_planned):
                other.as_written = way if other is not way else None
                return other
            why = "it goes another way then, on which other layouts or sizes change than the plan says"
        raise UnprovedCall(
            f"code of {self._who()} asks whether it is compiled (torch.compiler.is_compiling() in"
            f" {join_names(sorted(self.compiling))}), and {join_names(told)} is. Where the answer is yes, its parts on"
            f" the ranks would not compute what the whole model does: {why}. Keep whole what is compiled,"
            f" keep_whole=[{', '.join(repr(f'{path}.*') for path in told[:2])}{', ...' if len(told) > 2 else ''}], make"
            " its code do the same with both answers, or do not compile it"
        )

    def _prove_way(self, calls: list[ExampleCall], before: Way | None) -> Way:
        """Trace the original model in a call, and the local one, too, if that goes a way that is not known; compare.

        Where it goes on with another one, both are traced, and the last one is what it is about.

        The first rank traces the original one for all. What else every rank needs is worked out on each, so that all
        come to the same.
        """
        self.attributes.bring()
        for module, copied in zip(self.modules, self.original.modules(), strict=True):
            copied.training = module.training
            keep_values(copied, module)
        graph = first_makes(self.group.process_group, PROVING, partial(self._traced, calls))
        if isinstance(graph, CaptureError) and before is not None:
            return before
        if isinstance(graph, CaptureError):
            warnings.warn(
                f"a call of {self._who()} cannot be traced, so it is not proved that its parts compute what the"
                f" model does in such a call: {described(calls[-1], self.modules[0].training)}. ({graph})",
                stacklevel=2,
            )
            return self._way(parallel_state(self.model).parts)
        self._heed(graph, calls)
        try:
            graph = constrained_by(graph, self.plan, IMPLEMENTATIONS)
        except PlanMismatch as error:
            raise self._refusal(calls[-1], error) from error
        for way in self.ways:
            pairs = same_way(way.graph, graph) if way.graph is not None else None
            if pairs is not None:
                layouts = {pairs[tensor]: layout for tensor, layout in way.layouts.items() if tensor in pairs}
                add_paths(way.paths, graph, layouts, self.group.rank)
                return way
        fixed: set[Boundary] = set()
        first: Exception | None = None
        while True:
            try:
                changes, solution = read_for_call(self.plan, graph, IMPLEMENTATIONS, fixed)
            except PlanMismatch as error:
                raise self._refusal(calls[-1], first or error) from error
            try:
                sizes, solution = find_sizes_of_call(self.original, calls, self.plan, changes, solution, self.group)
                contradiction = self.code.join(seen_paths(solution, self.group.rank))
                if contradiction:
                    raise self._refusal(calls[-1], PlanMismatch(contradiction))
                break
            except Unlocalizable as error:
                first = first or error
                if not changes:
                    raise self._refusal(calls[-1], first) from error
            # Where sizes in Python code are those of the local model, a tensor cannot be whole: perhaps further on.
            fixed |= {Boundary(change.module, change.side, change.key) for change in changes}
        # Before the hooks with which the model collects outputs, as in the traces; each before the one after it.
        lengths = Lengths()  # of axes of this call's graph
        inputs = [change for change in changes if not change.module and change.side == "in"]
        way = self._way(parts_at_modules(solution), solution, is_as_planned=not changes and not sizes)
        if len(calls) > 1:
            way.ran = frozenset()  # some of these in the first call only
        way.inputs = [BoundaryConversion(change, self.group, lengths) for change in inputs]
        for change in reversed(changes):
            if change not in inputs:
                change_here = _OnWay(change, self.group, lengths, self, way)
                self.hooks.append(hook_boundary(self.model, change_here, prepend=True))
        for size in sizes:
            size_here = _SizeOnWay(self.model, size, self, way)
            self.hooks += size_here.hook()
            if not size.module:
                way.sizes.append(size_here)
        allow_runs(self.model, runs_apart(self.plan, solution.graph))
        return way

    def _traced(self, calls: list[ExampleCall]) -> Graph | CaptureError:
        """The original model's graph in a call."""
        opened = {change.module for change in self.plan.conversions if change.call and change.side == "argument"}
        opaque, device = frozenset(self.plan.opaque), device_of(self.model)
        try:
            return trace(self.original, calls, opaque, training=False, bare=opened, device=device, led=self.led)
        except CaptureError as error:
            return error

    def _refusal(self, call: ExampleCall, why: Exception) -> UnprovedCall:
        return UnprovedCall(
            f"{self._who()} is called in another way than it was traced, and its parts on the ranks would not compute"
            f" what the whole model does then: {why}\nIt is called with"
            f" {described(call, self.modules[0].training)}. Give example_inputs that are passed in this way, so that it"
            " is planned for, or leave out what is new"
        )

    def _wait_for_all(self, kind: Hashable) -> None:
        """Wait for the other ranks before the first call of a kind: that is where one rank alone calls the model."""
        store_barrier(self.group, f"{self._who()} is called, for the first time in this way,")
        self.called_by_all.add(kind)

    def _wait_in_stage(self) -> None:
        store_barrier(
            self.group, f"{self._who()} is called, for the first time since its mode changed or weights were loaded,"
        )

    def _who(self) -> str:
        return type(self.model).__name__

    def _say_unknown(self, what: str) -> None:
        """Say once that calls with an argument of a class are not proved, if gradients are computed in them."""
        if what not in self.undescribed and torch.is_grad_enabled():
            self.undescribed.add(what)
            warnings.warn(
                f"{self._who()} is called with a {what}, about which nothing is known: it is not proved that its parts"
                " compute what the model does in such a call",
                stacklevel=3,
            )


def _but_for_numbers(kind: tuple[Hashable, ...]) -> Hashable:
    """A kind of call, whatever the numbers among its arguments are."""
    arguments, _, _, *others = kind
    return arguments, *others


def _without_values(call: ExampleCall) -> ExampleCall:
    """A call with tensors on meta."""
    with without_modes():
        args, kwargs = tree_map_only(Tensor, lambda x: torch.empty_like(x, device="meta"), (call.args, call.kwargs))
    return ExampleCall(args, kwargs)


class _OnWay(BoundaryConversion):
    """A change of layout in calls that go one way only."""

    def __init__(self, plan: ConversionPlan, group: TPGroup, lengths: Lengths, prover: CallProver, way: Way) -> None:
        super().__init__(plan, group, lengths)
        self.prover, self.way = prover, way

    def before(self, module: nn.Module, args: Any, kwargs: Any) -> Any:
        return super().before(module, args, kwargs) if self.prover.is_running(self.way) else None

    def after(self, module: nn.Module, args: Any, output: Any) -> Any:
        return super().after(module, args, output) if self.prover.is_running(self.way) else None


class _SizeOnWay:
    """An attribute of a module, or an entry of its config, that is this rank's in calls that go one way."""

    def __init__(self, model: nn.Module, size: SizePlan, prover: CallProver, way: Way) -> None:
        self.model, self.size, self.prover, self.way = model, size, prover, way
        self.attribute = size.attribute.partition(".")[0]
        self.before: list[Any] = []  # the attribute's value before each run that is under way

    def hook(self) -> list[RemovableHandle]:
        """Set it from now on, before other hooks of the module see it; of the model itself only set it back.

        Which way a call goes is known after the model's own first hooks.
        """
        module = self.model.get_submodule(self.size.module)
        after = module.register_forward_hook(self._set_back, always_call=True)
        return [after, module.register_forward_pre_hook(self._before, prepend=True)] if self.size.module else [after]

    def _before(self, module: nn.Module, args: Any) -> None:
        if self.prover.is_running(self.way):
            self.set(module)

    def set(self, module: nn.Module) -> None:
        """Set it for the call of the module that begins."""
        self.before.append(getattr(module, self.attribute))
        set_size(self.model, self.size, self.size.local[self.prover.group.rank])

    def _set_back(self, module: nn.Module, args: Any, output: Any) -> None:
        if self.before:
            setattr(module, self.attribute, self.before.pop())


def _whole(tensor: Tensor) -> Tensor:
    return tensor.full() if isinstance(tensor, VocabParallelLogits) else tensor
