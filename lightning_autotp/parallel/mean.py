"""A mean over a dim that is cut over the ranks: of the statistics of a normalization, one number per token is summed.

A rank's own mean is that of its part, and parts may have different lengths. So each rank adds up its part, divides by
the whole length, and the ranks' results are added.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from lightning_autotp.capture import recording
from lightning_autotp.layouts.plan import ImplementationPlan
from lightning_autotp.layouts.types import Invariant, Partial, Replicate, Shard
from lightning_autotp.parallel.collectives import convert
from lightning_autotp.private.torch_private import has_values
from lightning_autotp.ranks.group import TPGroup
from lightning_autotp.solving.implementations import Implementation


def mean_of_parts(
    use: ImplementationPlan, group: TPGroup, mean: Callable[..., Tensor], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Tensor:
    """``torch.mean`` over dims of which one is cut over the ranks, ``[..., features/tp] -> [..., 1]``. Collective.

    Args:
        use: how the tensor is cut, and what the result is to be: Replicate or Invariant.
        group: the tensor-parallel group.
        mean: the function that the model calls.
        args: its arguments.
        kwargs: its keyword arguments.

    Raises:
        ValueError: if this rank's part has another length than was planned.
    """
    x = args[0] if args else kwargs["input"]
    assert isinstance(use.layout, Shard)
    ((dim, ownership),) = use.layout.dims
    planned = ownership.local_size(group.rank)
    if x.shape[dim] != planned:
        raise ValueError(
            f"the mean in {use.module} is over parts of a dim of {ownership.size} elements, of which this rank has"
            f" {planned}, but it is given {x.shape[dim]}"
        )
    if not has_values(x):
        part = recording.record(MEAN.primitive, [x], _shape(*args, **kwargs), ownership.digest)
    else:
        part = addend(mean(*args, **kwargs), x, planned / ownership.size)
    assert use.output is not None
    return convert(part, Partial(), Replicate() if use.output[1] == "R" else Invariant(), group)


def addend(mean: Tensor, part: Tensor, share: float) -> Tensor:
    """What this rank adds to a mean: the mean of its part, which is this share of the whole. Not collective."""
    return mean * share if share else torch.zeros_like(mean) + part.sum()  # of nothing the mean is nan


def _shape(input: Tensor, dim: int | Sequence[int], keepdim: bool = False) -> list[int]:
    reduced = {index % input.dim() for index in ([dim] if isinstance(dim, int) else dim)}
    return [
        1 if index in reduced else size for index, size in enumerate(input.shape) if keepdim or index not in reduced
    ]


MEAN = Implementation(
    name="mean of parts",
    operator="aten.mean.dim",
    operand="self",
    outputs=(("P", "R"), ("P", "I")),
    primitive="mean_of_parts",
    reads=("self",),
    run=mean_of_parts,
)
