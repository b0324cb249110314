"""Models with parameters in several dtypes, as Hugging Face keeps some in float32 beside bfloat16."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from lightning_autotp import full_gradients, parallelize

WIDTH, ROWS = 16, 4


class Block(nn.Module):
    """Beside layers in float32 a layer, parameters of its own, and some that only a list holds, in float64."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH, dtype=torch.float64)
        self.scales = nn.ParameterList([nn.Parameter(torch.rand(WIDTH, dtype=torch.float64))])
        self.shift = nn.Parameter(torch.rand(WIDTH, dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        return x + (self.down(self.up(x).relu().double()) * self.scales[0] + self.shift).float()


class Mixed(nn.Module):
    """Such blocks, and a scalar."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Block(), Block()])
        self.temperature = nn.Parameter(torch.tensor(1.5))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return (x * self.temperature).square().mean()


class Half(nn.Module):
    """One layer in bfloat16 in two blocks of a single layer."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([nn.Sequential(nn.Linear(WIDTH, WIDTH)), nn.Sequential(nn.Linear(WIDTH, WIDTH))])
        self.bfloat16()

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x.float().square().mean()


def made(kind: Callable[[], nn.Module]) -> Any:
    torch.manual_seed(4)
    return kind()


def rows(dtype: torch.dtype) -> Tensor:
    """``[4, width]``."""
    return torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(2)).to(dtype)


def mixed_gradients(mesh: DeviceMesh) -> dict[str, Tensor]:
    """Those of :class:`Mixed` on two copies, after two backward passes."""
    model, x = made(Mixed), rows(torch.float32)
    mine = x.chunk(2)[mesh["data"].get_local_rank()]
    parallelize(model, mesh["tensor"].get_group(), example_inputs=(x,), data_mesh=mesh["data"], plan_cache=False)
    for _ in range(2):
        model(mine).backward()
    return full_gradients(model)


def half_gradients() -> dict[str, Tensor]:
    """Those of :class:`Half`, averaged over four copies of a row each."""
    mesh = init_device_mesh("cpu", (4, 1), mesh_dim_names=("data", "tensor"))
    model, x = made(Half), rows(torch.bfloat16)
    mine = x[mesh["data"].get_local_rank()][None]
    parallelize(model, mesh["tensor"].get_group(), example_inputs=(mine,), data_mesh=mesh["data"], plan_cache=False)
    model(mine).backward()
    return full_gradients(model)
