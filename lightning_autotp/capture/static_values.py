"""Values of static tensors, where a model's code asks for one while it is traced.

What depends on the batch alone (lengths, masks, positions) can be computed for the example batch: its operators are run
again on real tensors. What depends on a parameter has no value in a trace. But which of several a model chooses (the
experts of a token) can be synthetic: numbers in turn, so that each is chosen about as often as the others. What code
computes from them (counts, masks, rows) are then the values that it would compute from such a choice.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from lightning_autotp.capture.synthetic_draws import HIGH, extreme
from lightning_autotp.operators import record
from lightning_autotp.operators.graph import WRITTEN_THROUGH, Graph, Operator, Ref, refs
from lightning_autotp.private.torch_private import schema_of


class NoValue(Exception):
    """A tensor whose value a trace does not know."""


class StaticEvaluator:
    """Computes static tensors of a graph under way.

    Args:
        graph: the graph; it may go on growing.

    Attributes:
        draws: which numbers operators draw.
        asked: the tensors whose values were asked for.
    """

    def __init__(self, graph: Graph) -> None:
        self.graph = graph
        self.draws = HIGH
        self.asked: list[int] = []
        self.known: dict[int, Tensor] = {}
        self.synthetic: dict[int, Tensor] = {}
        self._producers: dict[int, Operator] = {}
        self._read = 0

    def value(self, tensor: int, or_synthetic: bool = False) -> Tensor:
        """The value of a tensor, on the CPU.

        Args:
            tensor: a static tensor.
            or_synthetic: whether it may also follow from synthetic choices.

        Raises:
            NoValue: if it depends on a parameter, or on something that is not known.
        """
        for operator in self.graph.operators[self._read :]:
            self._producers.update(dict.fromkeys(operator.outputs, operator))
        self._read = len(self.graph.operators)
        pending = [tensor]
        while pending:
            last = pending[-1]
            if last in self.known or (or_synthetic and last in self.synthetic):
                pending.pop()
                continue
            producer = self._producers.get(last)
            lender = _lender(producer)
            is_static = self.graph.tensors[last].is_static
            if producer is None or not (is_static or lender or or_synthetic):
                raise NoValue
            if not is_static and or_synthetic and producer.name in CHOICES:
                self.synthetic[last] = self._choice(producer, last)
                continue
            needed = [ref.tensor for name, value in producer.arguments if name != lender for ref in refs(value)]
            missing = [source for source in needed if source not in self.known and source not in self.synthetic]
            if missing:
                pending += missing
                continue
            found = self.synthetic if any(source in self.synthetic for source in needed) else self.known
            found.update(zip(producer.outputs, self._run(producer), strict=True))
        self.asked.append(tensor)
        return self._now(tensor)

    def sources(self, tensor: int) -> set[int]:
        """The tensors that no operator made, and from which the value of a static one follows."""
        found, pending, seen = set[int](), [tensor], set[int]()
        while pending:
            last = pending.pop()
            if last in seen:
                continue
            seen.add(last)
            producer = self._producers.get(last)
            if producer is None:
                found.add(last)
            else:
                pending += [ref.tensor for _, value in producer.arguments for ref in refs(value)]
        return found

    def _choice(self, operator: Operator, tensor: int) -> Tensor:
        """Synthetic indices along a dim: each in turn, so that those side by side are different ones.

        After every round they shift by one, so that each index is once the first choice, once the second, and so on.

        Raises:
            NoValue: for what is not an index.
        """
        info, dim = self.graph.tensors[tensor], operator.argument("dim")
        source = self.graph.tensors[operator.inputs[0]].shape
        if not info.dtype.startswith("int") or dim is None or not source:
            raise NoValue
        is_one = len(info.shape) < len(source)  # index for the whole dim
        numbers = torch.arange(math.prod(info.shape), dtype=getattr(torch, info.dtype))
        rounds = numbers // math.lcm(source[dim], 1 if is_one else info.shape[dim])
        indices = (numbers + rounds) % source[dim]
        if is_one:
            return indices.reshape(info.shape)
        others = [size for at, size in enumerate(info.shape) if at != dim % len(source)]
        return indices.reshape(*others, info.shape[dim]).movedim(-1, dim)

    def _run(self, operator: Operator) -> list[Tensor]:
        if operator.name == "boundary":
            return [self._now(operator.inputs[0])]
        space, _, rest = operator.name.removeprefix(WRITTEN_THROUGH).partition(".")
        packet, _, overload = rest.partition(".")
        try:
            function = getattr(getattr(getattr(torch.ops, space), packet), overload)
            lender = _lender(operator)
            values = {
                name: self.empty(value) if name == lender else self._argument(value)
                for name, value in operator.arguments
            }
            if "device" in values:
                values["device"] = torch.device("cpu")
            written = values.pop("src") if operator.name.startswith(WRITTEN_THROUGH) else None
            positional = [values.pop(a.name) for a in schema_of(function).arguments if not a.kwarg_only]

            def run() -> list[Tensor]:
                if written is not None:
                    base = positional[0].clone()
                    function(base, *positional[1:], **values).copy_(written)
                    return [base]
                result = function(*positional, **values)
                return [result] if isinstance(result, Tensor) else list(result)

            with torch.no_grad():
                if torch.Tag.nondeterministic_seeded not in function.tags:
                    return run()
                self.graph.has_drawn = True
                return extreme(self.draws, run)
        except (AttributeError, RuntimeError, TypeError) as error:
            raise NoValue from error

    def _now(self, tensor: int) -> Tensor:
        return self.known[tensor] if tensor in self.known else self.synthetic[tensor]

    def empty(self, ref: Ref) -> Tensor:
        """A tensor on the CPU in the place of one of which only shape and dtype matter."""
        info = self.graph.tensors[ref.tensor]
        return torch.empty(info.shape, dtype=getattr(torch, info.dtype))

    def _argument(self, value: Any) -> Any:
        if isinstance(value, Ref):
            return self._now(value.tensor)
        if isinstance(value, tuple):
            return [self._argument(item) for item in value]
        if isinstance(value, str) and value.startswith("torch."):
            return getattr(torch, value.removeprefix("torch."))
        return value


CHOICES = {
    f"aten.{name}"
    for name in (
        "topk.default", "sort.default", "sort.stable", "argsort.default", "argsort.stable", "argmax.default",
        "argmin.default", "max.dim", "min.dim",
    )
}  # fmt: skip
"""Operators that choose among the indices of a dim, by numbers that a parameter went into."""


def _lender(operator: Operator | None) -> str:
    """The argument of which an operator takes shape and dtype alone, if there is one."""
    known = record(operator.name) if operator is not None else None
    return known.lends if known is not None else ""
