"""Values of static tensors, where a model's code asks for one while it is traced.

What depends on the batch alone (lengths, masks, positions) can be computed for the example batch: its operators are run
again on real tensors. What depends on a parameter has no value in a trace.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from lightning_autotp.operators import record
from lightning_autotp.operators.graph import Graph, Operator, Ref, refs
from lightning_autotp.private.torch_private import schema_of


class NoValue(Exception):
    """A tensor whose value a trace does not know."""


class Concrete:
    """Computes static tensors of a graph under way.

    Args:
        graph: the graph; it may go on growing.
    """

    def __init__(self, graph: Graph) -> None:
        self.graph = graph
        self.known: dict[int, Tensor] = {}
        self._producers: dict[int, Operator] = {}
        self._read = 0

    def value(self, tensor: int) -> Tensor:
        """The value of a static tensor, on the CPU.

        Raises:
            NoValue: if it depends on a parameter, or on something that is not known.
        """
        for operator in self.graph.operators[self._read :]:
            self._producers.update(dict.fromkeys(operator.outputs, operator))
        self._read = len(self.graph.operators)
        pending = [tensor]
        while pending:
            last = pending[-1]
            if last in self.known:
                pending.pop()
                continue
            producer = self._producers.get(last)
            lender = _lender(producer)
            if producer is None or not (self.graph.tensors[last].is_static or lender):
                raise NoValue
            needed = [ref.tensor for name, value in producer.arguments if name != lender for ref in refs(value)]
            missing = [source for source in needed if source not in self.known]
            if missing:
                pending += missing
                continue
            self.known |= dict(zip(producer.outputs, self._run(producer), strict=True))
        return self.known[tensor]

    def _run(self, operator: Operator) -> list[Tensor]:
        if operator.name == "boundary":
            return [self.known[operator.inputs[0]]]
        space, _, rest = operator.name.partition(".")
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
            positional = [values.pop(a.name) for a in schema_of(function).arguments if not a.kwarg_only]
            with torch.no_grad():
                result = function(*positional, **values)
        except (AttributeError, RuntimeError, TypeError) as error:
            raise NoValue from error
        return [result] if isinstance(result, Tensor) else list(result)

    def empty(self, ref: Ref) -> Tensor:
        """A tensor on the CPU in the place of one of which only shape and dtype matter."""
        info = self.graph.tensors[ref.tensor]
        return torch.empty(info.shape, dtype=getattr(torch, info.dtype))

    def _argument(self, value: Any) -> Any:
        if isinstance(value, Ref):
            return self.known[value.tensor]
        if isinstance(value, tuple):
            return [self._argument(item) for item in value]
        if isinstance(value, str) and value.startswith("torch."):
            return getattr(torch, value.removeprefix("torch."))
        return value


def _lender(operator: Operator | None) -> str:
    """The argument of which an operator takes shape and dtype alone, if there is one."""
    known = record(operator.name) if operator is not None else None
    return known.lends if known is not None else ""
