"""What is used of torchao that it does not promise to keep: how its float8 layers compute.

The rest of the package imports it from here, and ``tests/private`` asks each of these names for what is relied
on. Public is how a model is told to train in float8; layers take their scales from what is in one process then.

torchao is not installed with this package: a function here imports it when it is called.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn


def is_float8_layer(module: nn.Module) -> bool:
    """Whether ``convert_to_float8_training`` has made a module, which is no subclass of what that makes."""
    if not type(module).__module__.startswith("torchao."):
        return False
    from torchao.float8.float8_linear import Float8Linear

    return type(module) is Float8Linear


def make_plain(layer: Any) -> tuple[Any, Any]:
    """Make a layer the ``nn.Linear`` that it was, in place.

    Returns:
        Its ``Float8LinearConfig``, and how its three products run.
    """
    layer.__class__ = nn.Linear
    return vars(layer).pop("config"), vars(layer).pop("linear_mm_config")


def casts_on_the_wire(layer: Any) -> bool:
    """Whether a layer's weight is a tensor of another class, which FSDP2 gathers in float8."""
    return bool(layer.config.enable_fsdp_float8_all_gather)


def largest(x: Tensor, cast: Any, dim: int) -> Tensor:
    """The largest element of what has one scale: of a matrix, or along a dim of it.

    ``[rows, columns] -> []``, ``[rows, 1]`` or ``[1, columns]``.

    Args:
        x: ``[rows, columns]``.
        cast: its ``CastConfig``.
        dim: along which a scale goes, where it is not the whole matrix's.
    """
    from torchao.float8.float8_scaling_utils import get_maybe_axiswise_dim
    from torchao.float8.float8_utils import tensor_to_amax

    granularity = cast.scaling_granularity
    return tensor_to_amax(x, scaling_granularity=granularity, axiswise_dim=get_maybe_axiswise_dim(dim, granularity))


def to_float8(x: Tensor, largest: Tensor, cast: Any, dim: int, role: str, config: Any, products: Any) -> Tensor:
    """A matrix in float8, of which the product with another one is the library's.

    Args:
        x: ``[rows, columns]``.
        largest: as :func:`largest` gives it.
        cast: its ``CastConfig``.
        dim: as for :func:`largest`.
        role: ``"input"``, ``"weight"`` or ``"grad_output"``.
        config: as :func:`make_plain` gives it.
        products: how the three products run, as :func:`make_plain` gives it.
    """
    from torchao.float8 import GemmInputRole
    from torchao.float8.float8_scaling_utils import get_maybe_axiswise_dim
    from torchao.float8.float8_training_tensor import hp_tensor_and_scale_to_float8
    from torchao.float8.float8_utils import amax_to_scale

    scale = amax_to_scale(largest, cast.target_dtype, config.round_scales_to_power_of_2)
    along = get_maybe_axiswise_dim(dim, cast.scaling_granularity)
    cast_to: torch.dtype = cast.target_dtype
    return hp_tensor_and_scale_to_float8(x, scale, cast_to, products, GemmInputRole(role), along)
