"""Canaries of torchao: how its float8 layers compute."""

from __future__ import annotations

from typing import Any

import torch
from canaries import canary


def layer() -> Any:
    from torch import nn
    from torchao.float8 import Float8LinearConfig, convert_to_float8_training

    return convert_to_float8_training(nn.Sequential(nn.Linear(16, 32)), config=Float8LinearConfig(emulate=True))[0]


@canary("torchao.float8.float8_linear.Float8Linear")
def _(kind: Any) -> None:
    made = layer()
    assert type(made) is kind
    assert made.config.emulate
    assert not made.config.enable_fsdp_float8_all_gather
    assert made.linear_mm_config.output.emulate
    assert issubclass(kind, torch.nn.Linear)


@canary("torchao.float8.GemmInputRole")
def _(kind: Any) -> None:
    assert {role.value for role in kind} == {"input", "weight", "grad_output"}


@canary("torchao.float8.float8_utils.tensor_to_amax")
def _(largest: Any) -> None:
    from torchao.float8 import ScalingGranularity

    x = torch.tensor([[1.0, -3.0], [2.0, 0.0]])
    assert largest(x, scaling_granularity=ScalingGranularity.TENSORWISE, axiswise_dim=None).tolist() == 3
    by_row = largest(x, scaling_granularity=ScalingGranularity.AXISWISE, axiswise_dim=-1)
    assert by_row.tolist() == [[3], [2]]


@canary("torchao.float8.float8_utils.amax_to_scale")
def _(scale: Any) -> None:
    assert scale(torch.tensor(3.5), torch.float8_e4m3fn, False) == 128
    assert scale(torch.tensor(4.0), torch.float8_e4m3fn, True) == 64


@canary("torchao.float8.float8_scaling_utils.get_maybe_axiswise_dim")
def _(along: Any) -> None:
    from torchao.float8 import ScalingGranularity

    assert (along(0, ScalingGranularity.AXISWISE), along(0, ScalingGranularity.TENSORWISE)) == (0, None)


@canary("torchao.float8.float8_training_tensor.hp_tensor_and_scale_to_float8")
def _(cast: Any) -> None:
    """What two such tensors give is the product of the numbers that they were rounded to."""
    from torchao.float8 import GemmInputRole

    products, one = layer().linear_mm_config, torch.tensor(1.0)
    left, right = torch.tensor([[1.0, 1.06]]), torch.tensor([[2.0], [2.0]])
    rounded = [
        cast(x, one, torch.float8_e4m3fn, products, role, None)
        for x, role in ((left, GemmInputRole("input")), (right, GemmInputRole("weight")))
    ]
    assert torch.mm(*rounded).tolist() == [[4.0]]  # 1.06 is 1 with three bits after the point
