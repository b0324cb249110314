"""``ParameterMeta``: what every parameter of a parallel model knows about itself in the original model's terms."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from lightning_autotp.layouts.ownership import Run
from lightning_autotp.layouts.types import Invariant, Layout, Shard, local_shape, owned_boxes


@dataclass(frozen=True)
class Slices:
    """One contiguous block: where it lies in the local tensor and where in the original one.

    Attributes:
        local: per dim, the half-open range in this rank's tensor.
        source: name of the tensor in the original model.
        original: per dim, the half-open range in the original tensor.
        ranks: the ranks that hold this block, ascending.
    """

    local: tuple[Run, ...]
    source: str
    original: tuple[Run, ...]
    ranks: tuple[int, ...]


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
    """

    names: tuple[str, ...]
    shape: tuple[int, ...]
    dtype: torch.dtype
    layout: Layout = field(default_factory=Invariant)
    rank: int = 0
    ranks: int = 1
    init_fn: Callable[[], Tensor] | None = None
    need_initialize: bool = True

    @property
    def name(self) -> str:
        """The parameter's name in the original model."""
        return self.names[0]

    @property
    def is_tied(self) -> bool:
        """Whether several modules share this parameter."""
        return len(self.names) > 1

    @property
    def is_parallel(self) -> bool:
        """Whether this rank may hold less than the whole parameter."""
        return isinstance(self.layout, Shard)

    @property
    def dim(self) -> int | None:
        """The (first) dim that is sharded."""
        return self.layout.dims[0][0] if isinstance(self.layout, Shard) else None

    @property
    def local_shape(self) -> tuple[int, ...]:
        """Shape of this rank's parameter."""
        return local_shape(self.shape, self.layout, self.rank)

    @property
    def mapping(self) -> tuple[Slices, ...]:
        """Blocks of the local tensor, where they lie in the original one, and who holds them."""
        if isinstance(self.layout, Shard):
            owned = owned_boxes(self.shape, self.layout, self.rank)
            return tuple(Slices(here, self.name, there, ranks) for here, there, ranks in owned)
        whole = tuple((0, size) for size in self.shape)
        return (Slices(whole, self.name, whole, tuple(range(self.ranks))),)

    @property
    def grad_sync(self) -> tuple[Slices, ...]:
        """The blocks whose local gradient must be summed with that of the other ranks that hold them."""
        if isinstance(self.layout, Invariant):  # every rank computes all of the gradient
            return ()
        return tuple(block for block in self.mapping if len(block.ranks) > 1)


def parameter_meta(parameter: nn.Parameter) -> ParameterMeta:
    """The parameter's :class:`ParameterMeta`.

    Raises:
        RuntimeError: if the parameter's model was never given to ``initialize_parameter_meta``.
    """
    meta = getattr(parameter, "meta", None)
    if not isinstance(meta, ParameterMeta):
        raise RuntimeError(
            "this parameter has no ParameterMeta: pass its model through lightning_autotp.parallelize first"
        )
    return meta


def initialize_parameter_meta(model: nn.Module) -> dict[str, ParameterMeta]:
    """Give every parameter its meta; tied parameters, found by identity, share one.

    Metas that exist (from a deferred construction) keep their ``init_fn``.

    Returns:
        The metas by every name of their parameter.
    """
    names: dict[nn.Parameter, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(parameter, []).append(name)
    metas: dict[str, ParameterMeta] = {}
    for parameter, aliases in names.items():
        before = getattr(parameter, "meta", None)
        meta = ParameterMeta(
            names=tuple(aliases),
            shape=tuple(parameter.shape),
            dtype=parameter.dtype,
            init_fn=before.init_fn if before is not None else None,
            need_initialize=parameter.is_meta,
        )
        parameter.meta = meta  # type: ignore[attr-defined]
        metas |= dict.fromkeys(aliases, meta)
    return metas
