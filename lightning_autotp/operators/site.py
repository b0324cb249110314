"""What a rule sees of an operator's call, and what it says of its dims.

A rule says how the dims of an operator's inputs and outputs are tied together. From that alone follows how the operator
may run on shards, for any axis ``a`` of its dims:

* ``a`` lies in dims that are tied (or merely passed on): every operand that has ``a`` is sharded, the others are whole,
  and so is the output sharded. The ranks compute disjoint parts.
* ``a`` lies in a *contracted* dim: the operator sums over it, so the ranks' results are Partial.
* ``a`` lies in a dim *kept whole*: the operator needs all of it at once (a softmax's dim); it may not be sharded there.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from lightning_autotp.layouts.dims import ONE, Dim
from lightning_autotp.operators.axes import Axes
from lightning_autotp.operators.graph import Graph, Operator, Ref

Dims = tuple[Dim, ...]
Result = Dims | list[Dims]


@dataclass
class Relation:
    """What a rule said of one operator (dims are resolved by the solver, once all rules have run).

    Attributes:
        operator: the operator.
        inputs: dims of each tensor it reads, as this use sees them.
        outputs: dims of each tensor it makes.
        whole: dims that may not be sharded here, and why.
        contracted: dims that are summed over.
        linear: inputs that may be Partial together, the output being Partial then.
        added_after_sum: inputs added once after the sum over a contracted dim (a bias): Invariant if that dim is cut.
        needs_implementation: whether only a parallel implementation can run it with a contracted dim sharded: the plain
            operator's results on the ranks do not add up.
        draws: whether it draws random numbers for its elements: on shards each rank draws its own. ``None`` for an
            operator that never does, ``False`` for one that does not with these arguments.
        counted: dims that are as long as values say.
    """

    operator: Operator
    inputs: dict[int, Dims] = field(default_factory=dict)
    outputs: dict[int, Dims] = field(default_factory=dict)
    whole: dict[Dim, str] = field(default_factory=dict)
    contracted: list[Dim] = field(default_factory=list)
    linear: set[int] = field(default_factory=set)
    added_after_sum: set[int] = field(default_factory=set)
    needs_implementation: bool = False
    draws: bool | None = None
    counted: list[Dim] = field(default_factory=list)


def fresh_dims(tensor: int, graph: Graph, axes: Axes) -> Dims:
    """Dims of a tensor of a batch, or made from one: indices tell which are the positions of its sequences.

    Without indices, floating-point numbers ``[rows, positions, features]`` do.
    """
    info, example = graph.tensors[tensor], graph.example
    are_indices = info.dtype.startswith(("int", "uint"))
    return tuple(
        axes.new(
            size,
            positions=size in example.lengths
            and size != example.rows
            and (are_indices or (not info.is_static and len(info.shape) == 3 and at == 1)),
        )
        for at, size in enumerate(info.shape)
    )


class Site:
    """One operator of the graph, as its rule sees it."""

    def __init__(self, operator: Operator, graph: Graph, dims: dict[int, Dims], axes: Axes) -> None:
        self.operator, self.axes = operator, axes
        self._graph = graph
        self.relation = Relation(operator)
        for tensor in operator.inputs:
            info = graph.tensors[tensor]
            # A static tensor ties nothing: the same mask in every layer must not make their axes one.
            self.relation.inputs[tensor] = fresh_dims(tensor, graph, axes) if info.is_static else dims[tensor]

    def __getitem__(self, name: str) -> Any:
        """The argument's literal value."""
        return self.operator.argument(name)

    def tensor(self, name: str) -> Dims | None:
        """Dims of a tensor argument; ``None`` where it is a number or left out."""
        value = self.operator.argument(name)
        return self.relation.inputs[value.tensor] if isinstance(value, Ref) else None

    def dims(self, name: str) -> Dims:
        """Dims of an argument that is always a tensor."""
        return self.relation.inputs[self.operator.argument(name).tensor]

    def tensors(self, name: str) -> list[Dims]:
        """Dims of every tensor of a list argument."""
        return [self.relation.inputs[ref.tensor] for ref in self.operator.argument(name)]

    def dtype(self, name: str) -> str:
        """Dtype of a tensor argument, without the ``torch.`` prefix."""
        return self._graph.tensors[self.operator.argument(name).tensor].dtype

    def is_floating(self, ref: Ref) -> bool:
        """Whether a tensor's elements are floating-point numbers."""
        return self._graph.tensors[ref.tensor].is_floating

    def indices(self, name: str) -> list[tuple[Dims, bool] | None]:
        """Of a list of index tensors: each one's dims and whether it is a mask; ``None`` where a dim is not indexed."""
        return [
            None
            if ref is None
            else (self.relation.inputs[ref.tensor], self._graph.tensors[ref.tensor].dtype in ("bool", "uint8"))
            for ref in self[name]
        ]

    def index(self, name: str, ndim: int) -> int:
        """A dim argument, counted from the front."""
        return int(self[name]) % max(ndim, 1)

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the (first) output."""
        return self._graph.tensors[self.operator.outputs[0]].shape

    @property
    def shapes(self) -> list[tuple[int, ...]]:
        """Shape of every output."""
        return [self._graph.tensors[tensor].shape for tensor in self.operator.outputs]

    def new(self, size: int) -> Dim:
        """A fresh dim."""
        return self.axes.new(size)

    def tie(self, left: Dim, right: Dim) -> Dim:
        """Two dims are indexed alike; where their structures contradict each other both are kept whole."""
        if not self.axes.unify(left, right):
            parts = f"{self.axes.spelled(left)} and {self.axes.spelled(right)}"
            self.keep_whole(left, right, because=f"its operands' dims are divided differently: {parts}")
        return left

    def broadcast(self, several: Sequence[Dims]) -> Dims:
        """Tie the dims of tensors that are broadcast together, where they are not of size 1; the result's dims."""
        out: list[Dim] = [ONE] * max(map(len, several), default=0)
        for dims in several:
            for position, dim in enumerate(reversed(dims), start=1):
                if dim.size != 1:
                    out[-position] = dim if out[-position] is ONE else self.tie(out[-position], dim)
        return tuple(out)

    def keep_whole(self, *dims: Dim, because: str = "it needs the whole dim") -> None:
        """These dims may not be sharded at this operator."""
        for dim in dims:
            self.relation.whole.setdefault(dim, because)

    def contract(self, *dims: Dim) -> None:
        """The operator sums over these dims."""
        self.relation.contracted.extend(dims)

    def draws(self, when: object = True) -> bool:
        """The operator draws random numbers for every element of what it makes, independent of the others.

        On shards each rank then draws its own; what all elements of a dim have in common must be kept whole.

        Args:
            when: the arguments with which it does so; if false, it draws nothing here.

        Returns:
            Whether it draws here.
        """
        self.relation.draws = bool(when)
        return self.relation.draws

    def linear_in(self, *names: str) -> None:
        """The operator is linear in these arguments, taken together.

        Not where one of them is another argument as well (``x * x``), nor where the result is rounded to integers.
        """
        tensors: dict[bool, list[int]] = {True: [], False: []}
        for name, value in self.operator.arguments:
            refs = value if isinstance(value, tuple) else (value,)
            tensors[name in names] += [ref.tensor for ref in refs if isinstance(ref, Ref)]
        self._linear(tensors[True], tensors[False])

    def linear_in_one(self, name: str) -> None:
        """The operator is linear in any one tensor of a list, the others being fixed: the first that varies, if any."""
        tensors = [ref.tensor for ref in self[name]]
        varying = [tensor for tensor in tensors if not self._graph.tensors[tensor].is_static]
        chosen = next((tensor for tensor in varying if tensor not in self._graph.parameters), (varying or tensors)[0])
        tensors.remove(chosen)
        self._linear([chosen], tensors)

    def _linear(self, tensors: Sequence[int], others: Sequence[int]) -> None:
        is_rounded = not all(self._graph.tensors[tensor].is_floating for tensor in self.operator.outputs)
        if not is_rounded and not set(tensors) & set(others):
            self.relation.linear |= set(tensors)

    def count(self, size: int) -> Dim:
        """A fresh dim that is as long as values say, and stays whole."""
        dim = self.new(size)
        self.relation.counted.append(dim)
        self.keep_whole(dim, because="values say how long it is")
        return dim

    def give_up(self, because: str) -> list[Dims]:
        """Keep every dim of every input and output whole."""
        for dims in self.relation.inputs.values():
            self.keep_whole(*dims, because=because)
        outputs = [tuple(self.new(size) for size in shape) for shape in self.shapes]
        for dims in outputs:
            self.keep_whole(*dims, because=because)
        return outputs


Rule = Callable[[Site], Result]
