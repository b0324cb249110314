"""``ParameterMeta``: what a parameter of a parallel model is in the original model's terms."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from lightning_autotp.layouts.blocks import Block, blocks_of
from lightning_autotp.layouts.types import Invariant, Layout, Shard, local_shape
from lightning_autotp.quantized.formats import Format


@dataclass
class ParameterMeta:
    """One truth about a parameter, used for loading, checkpoints, export, gradient sums and gradient norms.

    Attributes:
        names: every name of the parameter in the original model; tied parameters have several, the first is *the* name.
        shape: the original shape.
        dtype: the original dtype.
        layout: how the parameter lies over the ranks.
        rank: this process's rank in the tensor-parallel group.
        ranks: the group's size.
        init_fn: makes the whole original tensor with the values one process would have given it, or ``None``.
        need_initialize: whether the local values are still to be filled in.
        format: how the local values are quantized when they are filled in; ``None`` if they are not.
    """

    names: tuple[str, ...]
    shape: tuple[int, ...]
    dtype: torch.dtype
    layout: Layout = field(default_factory=Invariant)
    rank: int = 0
    ranks: int = 1
    init_fn: Callable[[], Tensor] | None = None
    need_initialize: bool = True
    format: Format | None = None

    @property
    def name(self) -> str:
        """The parameter's name in the original model."""
        return self.names[0]

    @property
    def is_parallel(self) -> bool:
        """Whether this rank may hold less than the whole parameter."""
        return isinstance(self.layout, Shard)

    @property
    def local_shape(self) -> tuple[int, ...]:
        """Shape of this rank's parameter."""
        return local_shape(self.shape, self.layout, self.rank)

    @property
    def mapping(self) -> tuple[Block, ...]:
        """Blocks of the local tensor, where they lie in the original one, and who holds them."""
        return blocks_of(self.shape, self.layout, self.rank, self.ranks)

    @property
    def grad_sync(self) -> tuple[Block, ...]:
        """The blocks whose local gradient must be summed with that of the other ranks that hold them."""
        if isinstance(self.layout, Invariant):  # every rank computes all of the gradient
            return ()
        return tuple(block for block in self.mapping if len(block.ranks) > 1)
