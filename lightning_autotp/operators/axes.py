"""What the dims of a model's tensors are made of: axes, their products and their concatenations.

A dim that a ``view`` splits into heads and features is a *product* of two axes; a dim that joins projections is a
*concatenation* of sections. Following every operator, :class:`Axes` refines dims and unites those that
the computation ties together, so that an attention block ends with one axis of key/value heads which runs through the
rows of three projections, the heads of every intermediate tensor, and the columns of the output projection. Units,
sections and their order are read off this structure, and need not be declared.

(Shardy and AutoParallel describe one operator by such factors; here they are united over the whole graph.)
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from lightning_autotp.layouts.dims import ONE, Axis, Concat, Dim, Product, concat, leaves, product, spelled
from lightning_autotp.operators.graph import Operator


class Axes:
    """All axes of a graph, and what has been learnt about them (union-find with structure).

    Attributes:
        operator: the one whose rule runs; ``None`` before the first and after the last.
    """

    def __init__(self) -> None:
        self._count = 0
        self._bindings: dict[int, Dim] = {}
        self.operator: Operator | None = None
        self._makers: dict[int, Operator] = {}
        self._positions: set[int] = set()
        self._blocks: list[tuple[Dim, ...]] = []

    def new(self, size: int, *, positions: bool = False) -> Dim:
        """A fresh dim of which nothing is known.

        Args:
            size: its length.
            positions: whether it is the positions of a sequence. These have no parts: into which blocks and sections
                they divide changes with the length of a batch, and is nothing that a model is made of.
        """
        if size == 1:
            return ONE
        self._count += 1
        if positions:
            self._positions.add(self._count)
        if self.operator is not None:
            self._makers[self._count] = self.operator
        return Axis(self._count, size)

    def are_positions(self, dim: Dim) -> bool:
        """Whether a dim is the positions of a sequence, or some of them."""
        dim = self.resolve(dim)
        return isinstance(dim, Axis) and dim.id in self._positions

    def divide_positions(self, sizes: Sequence[int]) -> tuple[Dim, ...]:
        """Fresh dims for positions in blocks: of blocks there are the more, the longer the sequence is."""
        outer = next((at for at, size in enumerate(sizes) if size > 1), None)
        blocks = tuple(self.new(size, positions=at == outer) for at, size in enumerate(sizes))
        self._blocks.append(blocks)
        return blocks

    def are_blocks(self, dims: Sequence[Dim]) -> bool:
        """Whether dims are what positions were divided into: merged, they are positions again."""
        found = [self.resolve(dim) for dim in dims]
        return any(found == [self.resolve(dim) for dim in blocks] for blocks in self._blocks)

    @property
    def positions(self) -> frozenset[int]:
        """The ids of all axes that are positions of a sequence, or some of them."""
        return frozenset(self._positions)

    def divided_by(self, dim: Dim) -> Operator | None:
        """The operator that made the parts which a dim consists of, where it has parts."""
        dim = self.resolve(dim)
        makers = () if isinstance(dim, Axis) else (self._makers.get(axis.id) for axis in leaves(dim))
        return next((maker for maker in makers if maker is not None), None)

    def spelled(self, dim: Dim) -> str:
        """What a dim is made of, and by which operator."""
        dim = self.resolve(dim)
        maker = self.divided_by(dim)
        return spelled(dim) + (f" by {maker}" if maker is not None else "")

    def resolve(self, dim: Dim) -> Dim:
        """The dim in terms of axes that are not divided further."""
        if isinstance(dim, Axis):
            bound = self._bindings.get(dim.id)
            if bound is None:
                return dim
            resolved = self.resolve(bound)
            self._bindings[dim.id] = resolved
            return resolved
        if isinstance(dim, Product):
            return product([self.resolve(factor) for factor in dim.factors]) if dim.factors else dim
        return concat([self.resolve(section) for section in dim.sections])

    def unify(self, left: Dim, right: Dim) -> bool:
        """Learn that two dims are indexed alike. False if their structures contradict each other."""
        left, right = self.resolve(left), self.resolve(right)
        if left == right:
            return True
        if left.size != right.size:
            return False
        if isinstance(left, Axis) or isinstance(right, Axis):
            if any(leaf == left for leaf in leaves(right)) or any(leaf == right for leaf in leaves(left)):
                return False
            if isinstance(left, Axis):
                return self._bind(left, right)
            return isinstance(right, Axis) and self._bind(right, left)
        if isinstance(left, Product) and isinstance(right, Product):
            return self._unify_products(left, right)
        if isinstance(left, Product):
            left, right = right, left
        return self._unify_sections(left, right)

    def _bind(self, axis: Axis, found: Dim) -> bool:
        if axis.id in self._positions:
            if not isinstance(found, Axis):
                return False
            self._positions.add(found.id)
        self._bindings[axis.id] = found
        return True

    def _unify_products(self, left: Product, right: Product) -> bool:
        ours, theirs = list(left.factors), list(right.factors)
        while ours and theirs:
            a, b = ours.pop(0), theirs.pop(0)
            if a.size != b.size:
                large, small = (a, b) if a.size > b.size else (b, a)
                parts = self.split(large, small.size)
                if parts is None:
                    return False
                large = parts[0]
                (ours if a.size > b.size else theirs).insert(0, parts[1])
                a, b = large, small
            if not self.unify(a, b):
                return False
        return True

    def _unify_sections(self, left: Dim, right: Dim) -> bool:
        rest = right
        for section in left.sections if isinstance(left, Concat) else ():
            if section.size == rest.size:
                return self.unify(section, rest)
            parts = self.cut(rest, section.size)
            if parts is None or not self.unify(section, parts[0]):
                return False
            rest = self.resolve(parts[1])
        return False

    def split(self, dim: Dim, outer: int) -> tuple[Dim, Dim] | None:
        """Divide a dim into a product of an outer factor of the given size and the rest; ``None`` if it cannot be."""
        dim = self.resolve(dim)
        if dim.size % outer:
            return None
        inner = dim.size // outer
        if outer == 1:
            return ONE, dim
        if inner == 1:
            return dim, ONE
        if isinstance(dim, Axis):
            if dim.id in self._positions:
                return None
            parts = self.new(outer), self.new(inner)
            self._bindings[dim.id] = product(parts)
            return parts
        if isinstance(dim, Product):
            return self._split_product(dim, outer)
        return self._split_sections(dim, inner)

    def _split_product(self, dim: Product, outer: int) -> tuple[Dim, Dim] | None:
        taken: list[Dim] = []
        for position, factor in enumerate(dim.factors):
            have = math.prod(part.size for part in taken)
            if have == outer:
                return product(taken), product(dim.factors[position:])
            if outer % (have * factor.size) == 0:
                taken.append(factor)
                continue
            parts = self.split(factor, outer // have) if outer % have == 0 else None
            if parts is None:
                return None
            return product([*taken, parts[0]]), product([parts[1], *dim.factors[position + 1 :]])
        return product(taken), ONE

    def _split_sections(self, dim: Concat, inner: int) -> tuple[Dim, Dim] | None:
        if any(section.size % inner for section in dim.sections):
            return None
        outers: list[Dim] = []
        shared: Dim | None = None
        for section in dim.sections:
            parts = self.split(section, section.size // inner)
            if parts is None or (shared is not None and not self.unify(shared, parts[1])):
                return None
            outers.append(parts[0])
            shared = parts[1]
        return concat(outers), shared if shared is not None else ONE

    def cut(self, dim: Dim, offset: int) -> tuple[Dim, Dim] | None:
        """Divide a dim into the section before ``offset`` and the one after; ``None`` if it cannot be."""
        dim = self.resolve(dim)
        if offset <= 0 or offset >= dim.size:
            return None
        if isinstance(dim, Axis):
            if dim.id in self._positions:
                return None
            parts = self.new(offset), self.new(dim.size - offset)
            self._bindings[dim.id] = concat(parts)
            return parts
        if isinstance(dim, Product):
            inner = dim.size // dim.factors[0].size
            outer = self.cut(dim.factors[0], offset // inner) if offset % inner == 0 else None
            return outer and (product([outer[0], *dim.factors[1:]]), product([outer[1], *dim.factors[1:]]))
        before: list[Dim] = []
        for position, section in enumerate(dim.sections):
            if offset == 0:
                return concat(before), concat(dim.sections[position:])
            if section.size > offset:
                halves = self.cut(section, offset)
                return halves and (concat([*before, halves[0]]), concat([halves[1], *dim.sections[position + 1 :]]))
            before.append(section)
            offset -= section.size
        return None

    def regroup(self, dims: Sequence[Dim], sizes: Sequence[int]) -> tuple[Dim, ...] | None:
        """The same row-major elements under another shape (``view``); ``None`` if the dims do not divide so."""
        if 0 in sizes:
            return None
        queue = [self.resolve(dim) for dim in dims]
        result: list[Dim] = []
        for size in sizes:
            taken: list[Dim] = []
            have = 1
            while have < size:
                while queue and queue[0].size == 1:
                    queue.pop(0)
                if not queue:
                    return None
                factor = queue.pop(0)
                if size % (have * factor.size) == 0:
                    taken.append(factor)
                    have *= factor.size
                    continue
                parts = self.split(factor, size // have) if size % have == 0 else None
                if parts is None:
                    return None
                taken.append(parts[0])
                queue.insert(0, parts[1])
                have = size
            result.append(product(taken))
        return tuple(result)
