"""``PartOf``: which part of a whole tensor a rank's local tensor is, for tensors that carry it with them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from lightning_autotp.layouts.blocks import Block, blocks_of, owned_by
from lightning_autotp.layouts.ownership import Ownership, merge_runs
from lightning_autotp.layouts.types import Layout, Shard, local_shape
from lightning_autotp.parameters.meta import ParameterMeta
from lightning_autotp.ranks.group import TPGroup


@dataclass(frozen=True)
class PartOf:
    """What a rank's tensor is a part of.

    Attributes:
        name: the parameter that the whole tensor belongs to.
        shape: the whole shape.
        layout: how it lies over the ranks.
        group: these ranks.
    """

    name: str
    shape: tuple[int, ...]
    layout: Layout
    group: TPGroup

    @classmethod
    def of(cls, meta: ParameterMeta, group: TPGroup) -> PartOf:
        """What this rank's parameter is a part of."""
        return cls(meta.name, meta.shape, meta.layout, group)

    @property
    def dims(self) -> tuple[tuple[int, Ownership], ...]:
        """The sharded dims, and which indices of each the ranks have."""
        return self.layout.dims if isinstance(self.layout, Shard) else ()

    def ownership(self, dim: int) -> Ownership | None:
        """Which indices of a dim the ranks have; ``None`` where each has all."""
        return self.layout.ownership(dim) if isinstance(self.layout, Shard) else None

    @cached_property
    def local_shape(self) -> tuple[int, ...]:
        """The shape of this rank's part."""
        return local_shape(self.shape, self.layout, self.group.rank)

    @cached_property
    def mapping(self) -> tuple[Block, ...]:
        """The blocks of this rank's part, where they lie in the whole tensor, and who holds them."""
        return blocks_of(self.shape, self.layout, self.group.rank, self.group.size)

    @cached_property
    def counted(self) -> tuple[Block, ...]:
        """The blocks of this rank's part that it owns: every element has one owner."""
        return owned_by(self.mapping, self.group.rank)

    @cached_property
    def counts_all(self) -> bool:
        """Whether this rank owns all of its part."""
        return sum(block.elements for block in self.counted) == math.prod(self.local_shape)

    def is_laid_out_as(self, other: PartOf) -> bool:
        """Whether a rank's elements are at the same places in both whole tensors."""
        return self is other or (self.shape, self.layout, self.group) == (other.shape, other.layout, other.group)

    def take(self, whole: Tensor) -> Tensor:
        """This rank's part of a tensor that may be broadcast to the whole shape, cut along dims in which it is whole.

        A dim in which it has this rank's size already is left as it is.
        """
        for dim, ownership in self.dims:
            at = dim + whole.dim() - len(self.shape)
            if at >= 0 and whole.shape[at] == ownership.size != self.local_shape[dim]:
                whole = whole.index_select(at, self.indices(dim, whole.device))
        return whole

    def indices(self, dim: int, device: torch.device) -> Tensor:
        """The indices of a sharded dim that this rank has, in its order: ``[local size]``."""
        ownership = self.ownership(dim)
        assert ownership is not None
        return torch.tensor(ownership.indices(self.group.rank), dtype=torch.long, device=device)

    def window(self, items: Sequence[int | slice]) -> tuple[tuple[int | slice, ...], PartOf] | None:
        """Where ``whole[items]`` lies in the local tensor, and what of it that is: a part of a smaller whole tensor.

        Args:
            items: at most one for each dim.

        Returns:
            The index expression, and what it gives; ``None`` where that is no part of such kind: a single index, or a
            step, along a sharded dim.
        """
        local: list[int | slice] = []
        shape: list[int] = []
        dims: list[tuple[int, Ownership]] = []
        rank = self.group.rank
        for dim, size in enumerate(self.shape):
            item = items[dim] if dim < len(items) else slice(None)
            ownership = self.ownership(dim)
            if ownership is None:
                local.append(item)
                if isinstance(item, slice):
                    shape.append(len(range(*item.indices(size))))
                continue
            if not isinstance(item, slice) or item.indices(size)[2] != 1:
                return None
            start, stop, _ = item.indices(size)
            inside = _between(ownership, start, max(start, stop))
            before = _between(ownership, 0, start).local_size(rank)
            local.append(slice(before, before + inside.local_size(rank)))
            dims.append((len(shape), inside))
            shape.append(inside.size)
        return tuple(local), PartOf(self.name, tuple(shape), Shard(tuple(dims)), self.group)


def _between(ownership: Ownership, start: int, stop: int) -> Ownership:
    """The map of ``[start, stop)`` alone."""
    held = (merge_runs((max(a, start) - start, min(b, stop) - start) for a, b in runs) for runs in ownership.held)
    return Ownership(stop - start, tuple(held))
