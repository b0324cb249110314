"""Sizes of tensors at the step that will be trained.

The trace is small: five synthetic sentences of 61 tokens, or one batch that the user gave. In a plan priced for it,
summing a parameter's gradient once would look dear and communicating activations in every layer cheap. So what grows
with the tokens is scaled to the tokens of a real step, and everything is priced at that size.

Which axes grow is read off the trace. An axis is one of

* the **rows** of the batch, if it is as long as the example's batch;
* the **tokens** of a sequence, if it is as long as one of the example's sequences, or a multiple of the longest;
* **both**, if it is as long as a multiple of rows times tokens (a flattened batch; the tokens of a mixture's experts).

An axis of positions, which indices have, and some of its positions (all tokens but the last) are **tokens** whatever
their number. A tensor has one axis of rows, its first. What values count (the tokens that choose an expert) grows with
both. Only axes that occur in no parameter count: a model may have as many heads as the batch has rows. The exception
are axes of indices (token ids, positions), which are never features: a table of positions is a parameter that has an
axis of tokens. (The synthetic batch's sizes are primes that equal no size of the model.) Where an example has as many
rows as tokens, its own tensors tell which axis is which.

An example with a single row has no axis of rows to be seen: every tensor computed from it is there once for each row of
the step.

Where only a number of tokens is known, the sequences are :data:`NOMINAL_LENGTH` long at most, so that the price, which
grows with their length squared, does not depend on how long those of the trace are. A model without sequences gets as
many rows as make that many positions of its median hidden state (patches of a picture).
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Collection, Mapping, Sequence

from lightning_autotp.layouts.dims import ONE, Axis, Concat, Dim, Product, leaves
from lightning_autotp.layouts.step_size import StepSize, TokensPerStep
from lightning_autotp.operators import Dims, Relation
from lightning_autotp.operators.graph import Graph

NOMINAL_LENGTH = 4_096
"""Longest sequence that is assumed where only the number of tokens is known."""

_ROWS, _TOKENS, _BOTH = "rows", "tokens", "rows and tokens"
_OF_TOKENS = frozenset({_TOKENS, _BOTH})


class ScaledSizes:
    """Shapes and bytes at the priced step.

    Args:
        graph: the captured graph, which knows its example's size.
        relations: its relations, with resolved dims.
        tokens: what to price for.
        positions: ids of axes that are positions of a sequence, or some of them.

    Attributes:
        step: the size of the priced step.
    """

    def __init__(
        self, graph: Graph, relations: Sequence[Relation], tokens: TokensPerStep, positions: Collection[int]
    ) -> None:
        self._graph = graph
        self._example = graph.example
        self._in_parameters: set[int] = set()
        self._kinds: dict[int, str] = {}
        for relation in relations:
            for tensor, dims in relation.inputs.items():
                if tensor in graph.parameters:
                    self._in_parameters |= {axis.id for dim in dims for axis in leaves(dim)}
        if self._example.rows in self._example.lengths:
            self._tell_apart(relations, positions)
        for relation in relations:
            for tensor, dims in relation.inputs.items():
                info = graph.tensors[tensor]
                if info.is_static and info.dtype.startswith(("int", "uint")):
                    for dim in dims:
                        self._recognise(dim, everywhere=True)
        # Relations that share a tensor share its dims, too: each is looked at once.
        every = {
            id(dims): dims
            for relation in relations
            for tensor, dims in (*relation.inputs.items(), *relation.outputs.items())
            if tensor not in graph.parameters
        }
        for dim in dict.fromkeys(dim for dims in every.values() for dim in dims):
            self._recognise(dim)
        known = self._kinds.keys() | self._in_parameters
        self._kinds |= {axis: _TOKENS for axis in positions if axis not in known}
        for relation in relations:
            for dim in relation.counted:
                self._kinds |= {axis.id: _BOTH for axis in leaves(dim) if axis.id not in self._in_parameters}
        self.step = self._step(relations, tokens)
        rows, length = 1.0, 1.0
        if self._example.lengths and self.step.lengths:
            length = self.step.longest / self._example.longest
        if self._example.rows > 1:
            rows = self.step.rows / self._example.rows
        self._growth = {_ROWS: rows, _TOKENS: length, _BOTH: rows * length}
        each = 1 / max(self._example.rows, 1)
        self._growth_in_row = {_ROWS: each, _TOKENS: length, _BOTH: each * length}
        self._copies = self.step.rows if self._example.rows == 1 else 1
        self._of_a_row = self._computed_from_the_row() if self._copies > 1 else set()

    @property
    def growing(self) -> frozenset[int]:
        """The ids of the axes whose sizes the batch gives."""
        return frozenset(self._kinds)

    @property
    def sequence(self) -> frozenset[int]:
        """The ids of the axes of tokens; of rows, where the model takes no sequences."""
        kinds = (_TOKENS, _BOTH) if self._example.lengths else (_ROWS, _TOKENS, _BOTH)
        return frozenset(axis for axis, kind in self._kinds.items() if kind in kinds)

    def shape(self, tensor: int, dims: Dims) -> tuple[float, ...]:
        """The tensor's shape, from its resolved dims."""
        times, shape = self.copies(tensor, dims), self._shape(tensor, dims, self._growth)
        return (times * shape[0], *shape[1:]) if shape else shape

    def shape_in_row(self, tensor: int, dims: Dims) -> tuple[float, ...]:
        """The shape of what a single row of the step has of the tensor."""
        return self._shape(tensor, dims, self._growth_in_row)

    def rows(self, tensor: int, dims: Dims) -> int:
        """How many rows of the step have something of their own of the tensor; 1 if it is the same for all."""
        kinds = {self._kinds.get(axis.id) for dim in dims for axis in leaves(dim)}
        return self.step.rows if kinds & {_ROWS, _BOTH} else self.copies(tensor, dims)

    def kind(self, axis: int) -> str | None:
        """With what an axis grows; ``None`` if it does not."""
        return self._kinds.get(axis)

    def is_of_pairs(self, dims: Dims) -> bool:
        """Whether a tensor has an element for every pair of positions, as attention's scores have."""
        kinds = self._kinds
        return sum(any(kinds.get(axis.id) in _OF_TOKENS for axis in leaves(dim)) for dim in dims) > 1

    def bytes(self, tensor: int, dims: Dims) -> float:
        """The tensor's bytes, from its resolved dims."""
        return self._graph.tensors[tensor].itemsize * math.prod(self.shape(tensor, dims))

    def copies(self, tensor: int, dims: Dims) -> int:
        """How many copies of the tensor there are, one after the other along its first dim."""
        return self._copies if dims and tensor in self._of_a_row else 1

    def _shape(self, tensor: int, dims: Dims, growth: Mapping[str, float]) -> tuple[float, ...]:
        """The shape of one of the tensor's copies, with axes that grow so much."""
        if tensor in self._graph.parameters:
            return self._graph.tensors[tensor].shape
        sizes, has_rows = [], False
        for dim in dims:
            size, has_rows = self._size(dim, has_rows, growth)
            sizes.append(size)
        return tuple(sizes)

    def _size(self, dim: Dim, has_rows: bool, growth: Mapping[str, float]) -> tuple[float, bool]:
        """A dim's length, and whether the tensor has had its rows by now: other axes as long as they do not grow."""
        if isinstance(dim, Axis):
            kind = self._kinds.get(dim.id)
            if kind is None or (kind == _ROWS and has_rows):
                return dim.size, has_rows
            return dim.size * growth[kind], has_rows or kind != _TOKENS
        if isinstance(dim, Product):
            size = 1.0
            for factor in dim.factors:
                part, has_rows = self._size(factor, has_rows, growth)
                size *= part
            return size, has_rows
        sections = [self._size(section, has_rows, growth) for section in dim.sections]
        return sum(size for size, _ in sections), any(rows for _, rows in sections)

    # -- which axes grow ---------------------------------------------------------------------------------------------

    def _kind(self, size: int) -> str | None:
        rows, longest = self._example.rows, self._example.longest
        if rows > 1 and size == rows:
            return _ROWS
        if size in self._example.lengths:
            return _TOKENS
        if longest > 1 and size and size % longest == 0:
            return _BOTH if rows > 1 and size % (rows * longest) == 0 else _TOKENS
        return None

    def _computed_from_the_row(self) -> set[int]:
        """Tensors that are others for each row of a batch, where the example has one."""
        lengths, tensors = self._example.lengths, self._graph.tensors
        shapes = ((tensor, tensors[tensor].shape) for tensor in self._graph.loose())
        found = {t for t, shape in shapes if shape[:1] == (1,) and (not lengths or {*shape[1:]} & {*lengths})}
        for operator in self._graph.operators:
            if not found.isdisjoint(operator.inputs):
                found.update(operator.outputs)
        return found

    def _tell_apart(self, relations: Sequence[Relation], positions: Collection[int]) -> None:
        """Note which axes are rows and which are tokens, where there are as many: by the dims of what is given."""
        self._kinds |= dict.fromkeys(positions, _TOKENS)
        square = (self._example.rows, self._example.rows)
        for relation in relations:
            for tensor, dims in relation.inputs.items():
                info = self._graph.tensors[tensor]
                is_given = info.is_static and (len(dims) == 3 if info.is_floating else info.dtype.startswith("int"))
                if is_given and info.shape[:2] == square:
                    self._kinds |= {axis.id: _ROWS for axis in leaves(dims[0])}
                    self._kinds |= {axis.id: _TOKENS for axis in leaves(dims[1])}

    def _recognise(self, dim: Dim, everywhere: bool = False) -> None:
        """Note which axes of a dim grow; ``everywhere``: also such as occur in parameters."""
        if isinstance(dim, Product):
            for factor in dim.factors:
                self._recognise(factor, everywhere)
            return
        self._note(dim.size, [dim] if isinstance(dim, Axis) else list(dim.sections), everywhere)
        if isinstance(dim, Concat):
            self._recognise_cut_product(dim, everywhere)
            for section in dim.sections:
                self._recognise(section, everywhere)

    def _recognise_cut_product(self, dim: Concat, everywhere: bool) -> None:
        """``[a x rest | b x rest]`` is a cut dim of size ``a + b``, times the rest."""
        cuts = [
            section.factors if isinstance(section, Product) and section.factors else (section,)
            for section in dim.sections
        ]
        rest = max((math.prod(factor.size for factor in factors[1:]) for factors in cuts), default=1)
        outer = [
            ONE if section.size == rest else factors[0] if factors[0].size * rest == section.size else section
            for section, factors in zip(dim.sections, cuts, strict=True)
        ]
        if rest > 1 and sum(part.size for part in outer) * rest == dim.size:
            self._note(dim.size // rest, outer, everywhere)

    def _note(self, size: int, parts: Sequence[Dim], everywhere: bool) -> None:
        """Note what the parts of a dim of this size are, unless they are divided further."""
        kind = self._kind(size)
        if kind is None or not all(isinstance(part, Axis) or part.size == 1 for part in parts):
            return
        for part in parts:
            if isinstance(part, Axis) and (everywhere or part.id not in self._in_parameters):
                self._kinds.setdefault(part.id, kind)

    # -- the step ----------------------------------------------------------------------------------------------------

    def _step(self, relations: Sequence[Relation], tokens: TokensPerStep) -> StepSize:
        example = self._example
        if tokens.size is not None:
            return tokens.size
        if not example.lengths:
            return StepSize(max(1, round(tokens.number / self._positions(relations))))
        length = min(tokens.number, NOMINAL_LENGTH)
        return StepSize(max(1, round(tokens.number / length)), (length,))

    def _positions(self, relations: Sequence[Relation]) -> float:
        """Positions in a row of the median hidden state: what is neither its rows nor its features."""
        features = {
            axis.id
            for relation in relations
            if any(tensor in self._graph.parameters for tensor in relation.inputs)
            for dim in relation.contracted
            for axis in leaves(dim)
        }
        found = []
        for relation in relations:
            if relation.operator.boundary is None:
                continue
            (dims,) = relation.outputs.values()
            factors = [f for dim in dims for f in (dim.factors if isinstance(dim, Product) else (dim,))]
            found.append(
                math.prod(
                    factor.size
                    for factor in factors
                    if not any(axis.id in features or self._kinds.get(axis.id) == _ROWS for axis in leaves(factor))
                )
            )
        return max(1.0, statistics.median(found or [1]))
