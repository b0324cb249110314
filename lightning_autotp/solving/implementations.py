"""What an operator may run as, besides itself, where its operands are sharded.

An :class:`Implementation` is one declaration, made beside the module or function that runs
(:mod:`~lightning_autotp.parallel.implementations` has the list). The solver picks among them like among layouts, the
plan names the one picked, replacement builds it, and the proof looks for it in the trace. One place more knows one by
name: :attr:`~lightning_autotp.layouts.plan.Plan.losses_in_parts`, ``"column"``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from lightning_autotp.layouts.transitions import TRANSITIONS, Pair
from lightning_autotp.layouts.types import Layout, Shard
from lightning_autotp.operators.graph import Operator, Ref

Shape = tuple[float, ...]
DEFERRED_SUM: Pair = ("P", "P")
"""The sum of the ranks' products is left to what comes after: the result is Partial."""

Communicates = Callable[[Mapping[str, Shape]], tuple[tuple[str, float], ...]]


@dataclass(frozen=True)
class Implementation:
    """A parallel implementation of one operator.

    Attributes:
        name: what plans and tables call it, such as ``"column"``.
        operator: the operator it stands for.
        layer: the class in ``torch.nn`` whose forward must run the operator; empty for a call anywhere.
        is_module: whether the operator stands for all that a module runs, which is made another one as a whole.
        operand: the argument whose cut picks this implementation.
        dims: in one of which that argument must be cut, and in no other; empty for any one.
        inputs: changes of type that it makes on the module's first input by itself.
        outputs: changes of type that it makes on its result by itself: of a result that lies like its operands
            (``S -> I``), or of the ranks' products (``P -> I``), of which one must happen: :data:`DEFERRED_SUM` leaves
            their sum to what comes after.
        bypassable_result: whether callers may give its result to the model themselves (``inputs_embeds``), which is not
            a sum to be taken: so its own is left only where tokens are sharded for it.
        resaves_shard: an argument of which it keeps this rank's part for the backward pass where its tokens were
            gathered; the backward gathers it again.
        bias_operand: an argument that it adds after such a sum (a bias); it has the type of the result, or is Invariant
            where the sum is left: then it counts once.
        primitive: the primitive that it is in a trace of the local model, where it is not the operator itself.
        reads: the arguments that the primitive reads.
        shown: an argument that reaches it through the user's code as a tensor that looks whole (logits).
        communicates: what it sends besides: ``(collective, bytes)`` of one training step, from its tensor
            arguments' whole shapes.
        build: makes a module this implementation: ``(module, plan of the layer, layout of the operand, group,
            parameters that are local already)``; ``None`` where nothing has to be replaced.
        run: makes a call in another way than the model does: ``(plan of the call, group, function, arguments, keyword
            arguments)``.
    """

    name: str
    operator: str
    operand: str
    dims: tuple[int, ...] = ()
    layer: str = ""
    is_module: bool = False
    inputs: tuple[Pair, ...] = ()
    outputs: tuple[Pair, ...] = ()
    bypassable_result: bool = False
    resaves_shard: str = ""
    bias_operand: str = ""
    primitive: str = ""
    reads: tuple[str, ...] = ()
    shown: str = ""
    communicates: Communicates | None = None
    build: Callable[..., None] | None = None
    run: Callable[..., Any] | None = None

    @property
    def sums(self) -> bool:
        """Whether it makes something else of the ranks' sum than a Partial result."""
        return bool(self.primitive) or any(source == "P" for source, _ in self.outputs)

    def fits(self, layout: Layout | None) -> bool:
        """Whether the operand may lie so."""
        if not isinstance(layout, Shard) or len(layout.dims) != 1:
            return False
        return not self.dims or layout.dims[0][0] in self.dims

    def results(self, shard_sequence: bool) -> tuple[Pair | None, ...]:
        """The changes of type that may end the sum of its products; ``None`` where the result is Invariant at once.

        Args:
            shard_sequence: whether the tokens of sequences may be sharded.
        """
        may_leave = shard_sequence or not self.bypassable_result
        after = tuple(pair for pair in self.outputs if pair[0] == "P" and (may_leave or pair != DEFERRED_SUM))
        return after or (None,)

    def sent(self, after: Pair | None, result: float, shapes: Mapping[str, Shape]) -> Iterator[tuple[str, float]]:
        """``(collective, whole bytes)`` of one training step inside of it.

        Args:
            after: the change of type on its result.
            result: bytes of the whole result.
            shapes: whole shapes of its tensor arguments, by name.
        """
        if after is not None and after != DEFERRED_SUM:
            yield from ((kind, result) for kind in TRANSITIONS[after].collectives)
        if self.communicates is not None:
            yield from self.communicates(shapes)


class Implementations:
    """The parallel implementations that a solver may use.

    Args:
        *entries: the implementations; each name may occur once.

    Raises:
        ValueError: if two have the same name.
    """

    def __init__(self, *entries: Implementation) -> None:
        self._by_name: dict[str, Implementation] = {}
        self._by_operator: dict[tuple[str, str], list[Implementation]] = {}
        for entry in entries:
            if entry.name in self._by_name:
                raise ValueError(
                    f"there are two parallel implementations called {entry.name!r}, of"
                    f" {self._by_name[entry.name].operator} and of {entry.operator}: give one another name"
                )
            self._by_name[entry.name] = entry
            self._by_operator.setdefault((entry.operator, entry.layer), []).append(entry)
        self._of: dict[tuple[str, str], tuple[Implementation, ...]] = {}

    def __iter__(self) -> Iterator[Implementation]:
        return iter(self._by_name.values())

    def __getitem__(self, name: str) -> Implementation:
        """The implementation of this name.

        Raises:
            KeyError: if there is none, naming those that there are.
        """
        if name not in self._by_name:
            raise KeyError(f"no parallel implementation is called {name!r}: there are {', '.join(self._by_name)}")
        return self._by_name[name]

    def of(self, operator: Operator) -> tuple[Implementation, ...]:
        """Those that may run an operator: its layer's, or those for a call anywhere."""
        key = operator.name, operator.layer
        if key not in self._of:
            in_layer = self._by_operator.get(key, []) if operator.layer else []
            self._of[key] = (*in_layer, *self._by_operator.get((operator.name, ""), []))
        return self._of[key]

    def is_layer(self, operator: Operator) -> bool:
        """Whether the operator is one that a layer runs which can be replaced as a whole."""
        return any(entry.layer for entry in self.of(operator))


@dataclass(frozen=True)
class Use:
    """One operator run by an implementation.

    Attributes:
        implementation: which.
        output: the change of type that it makes on its result by itself.
    """

    implementation: Implementation
    output: Pair | None = None


def operand_of(operator: Operator, name: str) -> int | None:
    """The tensor that an operator's argument is; ``None`` where it is none."""
    value: Any = dict(operator.arguments).get(name)
    return value.tensor if isinstance(value, Ref) else None
