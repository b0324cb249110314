"""Gradients that FSDP2 has cut again over the data axis, and that answer for the whole gradient.

Such a gradient is a ``DTensor`` over the data axis alone: its own norm is that of the tensor-parallel part, another one
for every tensor-parallel rank. :class:`CutGradientPart` is the same object as one of a subclass, with the same rules as
:class:`~lightning_autotp.gradients.parts.GradientPart`, but for those that need the whole's indices: rows,
masks of the whole shape and random numbers are refused.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from lightning_autotp.gradients.counted import counted_elements
from lightning_autotp.gradients.whole_quantities import (
    QUANTITIES,
    PartOfGradient,
    as_it_is,
    first_part,
    is_in_optimizer,
)
from lightning_autotp.parameters.local_blocks import counted_blocks, plain, shard_group
from lightning_autotp.parameters.meta import ParameterMeta
from lightning_autotp.private.torch_private import LIST_UPDATES
from lightning_autotp.ranks.group import TPGroup
from lightning_autotp.torch_functions import ELEMENTWISE, IN_PLACE


class CutGradientPart(PartOfGradient, DTensor):
    """This process's part of a gradient, or of what was computed from one elementwise.

    Attributes:
        meta: what the parameter is.
        group: the tensor-parallel group.
    """

    meta: ParameterMeta
    group: TPGroup

    @property
    def origin(self) -> str:
        """The name of the parameter."""
        return self.meta.name

    @property
    def whole_shape(self) -> tuple[int, ...]:
        """The shape of the whole gradient."""
        return self.meta.shape

    @property
    def said(self) -> str:
        """In words, what this is a part of."""
        shapes = f"{list(self.shape)} of {list(self.meta.shape)}"
        return f"the gradient of {self.meta.name} ({shapes}, sharded again by FSDP2)"

    @property
    def sharing(self) -> tuple[TPGroup, ...]:
        """The tensor-parallel group, and the data-parallel one."""
        over_data = shard_group(self)
        assert over_data is not None
        return self.group, TPGroup.of(over_data)

    def counted(self) -> Tensor:
        """The elements that this process owns."""
        return counted_elements(plain(self), counted_blocks(self, self.meta, self.group))


@dataclass(frozen=True)
class CutMark:
    """A hook that marks the gradient of a parameter that FSDP2 has cut, whenever it has been made; plain data."""

    meta: ParameterMeta
    group: TPGroup

    def accumulated(self, parameter: Tensor) -> None:
        """Mark what the parameter has; FSDP2 adds later ones to the same object."""
        if type(parameter.grad) is DTensor:
            _mark(parameter.grad, self.meta, self.group)

    given = accumulated
    """Mark what somebody has put there."""


def _mark(tensor: DTensor, meta: ParameterMeta, group: TPGroup) -> CutGradientPart:
    tensor.__class__ = CutGradientPart
    assert isinstance(tensor, CutGradientPart)
    tensor.meta, tensor.group = meta, group
    return tensor


def _elementwise(func: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    gradient = first_part(args, kwargs)
    found = func(*args, **kwargs)
    written = args[0] if func in IN_PLACE else kwargs.get("out")
    # One's own buffer is a part, too, once a part was written into it; weights and states stay what they are.
    is_weight = isinstance(written, Tensor) and (isinstance(written, nn.Parameter) or written.requires_grad)
    if type(found) is not DTensor or (found is written and (is_weight or is_in_optimizer())):
        return found
    return _mark(found, gradient.meta, gradient.group)


def _as_dtensor(func: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    return func(args[0].detach(), *args[1:], **kwargs)


def _copy(func: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    gradient, memo = args
    return copy.deepcopy(gradient.detach(), memo)  # which keeps it in the memo, or its id would come again


CutGradientPart.handlers = {
    **QUANTITIES,
    **dict.fromkeys(ELEMENTWISE, _elementwise),
    **dict.fromkeys(LIST_UPDATES, as_it_is),
    Tensor.__deepcopy__: _copy,
    Tensor.__reduce_ex__: _as_dtensor,
}
