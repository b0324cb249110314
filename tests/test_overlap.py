"""The sum of a column-parallel region's input gradient runs while the region's weight gradients are computed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from distributed import run_ranks
from tiny import tiny_model, token_batch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from lightning_autotp import full_gradients, parallelize
from lightning_autotp.layouts.ownership import Ownership
from lightning_autotp.parallel.linear import ColumnParallelLinear
from lightning_autotp.parallel.overlap import replicate
from lightning_autotp.ranks.group import TPGroup

SHORT = {"mm": "product", "all_reduce": "launch", "wait_tensor": "wait"}


class Order(TorchDispatchMode):
    """Notes matrix products and collectives in the order in which they run."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        if name in SHORT:
            self.names.append(SHORT[name])
        return func(*args, **(kwargs or {}))


def between(names: list[str]) -> list[int]:
    """How many products run while each sum is under way."""
    counts, launched = [], None
    for at, name in enumerate(names):
        if name == "launch":
            assert launched is None
            launched = at
        elif name == "wait":
            assert launched is not None
            counts.append(at - launched - 1)
            launched = None
    return counts


def order(rank: int, size: int) -> list[int]:
    model = parallelize(
        tiny_model("llama"),
        dist.group.WORLD,  # type: ignore[arg-type]
        example_inputs=token_batch(0),
        plan_cache=False,
    )
    loss = model(**token_batch(0)).loss
    with Order() as order:
        loss.backward()
    return between(order.names)


def test_weight_gradients_of_a_region_run_while_its_input_gradient_is_summed() -> None:
    for counts in run_ranks(order, 2):
        # the loss and its head, then from the last layer on: gate and up; q, k and v
        assert counts[-4:] == [2, 3, 2, 3]
        assert sum(counts[:-4]) == 0


class Region(nn.Module):
    """Two column-parallel layers with one input, as a plan makes them, and what becomes of their results."""

    def __init__(self, group: TPGroup, bias: bool, overlapped: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.group, self.overlapped = group, overlapped
        self.layers = nn.ModuleList()
        for outputs in (7, 12):
            whole = nn.Linear(5, outputs, bias, dtype=torch.float64)
            dealt = Ownership.dealt(outputs, group.size)
            self.layers.append(ColumnParallelLinear.convert(whole, dealt, group, input_is_replicated=True))

    def forward(self, x: Tensor) -> Tensor:
        x = replicate(x, self.group, self.layers if self.overlapped else ())  # type: ignore[arg-type]
        return sum(layer(x).tanh().pow(2).sum() for layer in self.layers) + self.layers[0](x).sum()  # type: ignore[no-any-return]


def plain(region: nn.Module, x: Tensor) -> list[Tensor]:
    return list(torch.autograd.grad(region(x), [x, *region.parameters()]))


def accumulated(region: nn.Module, x: Tensor) -> list[Tensor]:
    for factor in (1.0, 3.0):
        (region(x * factor) * factor).backward()
    return [x.grad, *(parameter.grad for parameter in region.parameters())]  # type: ignore[list-item]


def twice(region: nn.Module, x: Tensor) -> list[Tensor]:
    """One graph's gradients twice, at first those of its input alone."""
    loss = region(x)
    first = torch.autograd.grad(loss, [x], retain_graph=True)
    return [*first, *torch.autograd.grad(loss, [x, *region.parameters()])]


def recomputed(region: nn.Module, x: Tensor) -> list[Tensor]:
    loss = checkpoint(region, x, use_reentrant=False)
    return list(torch.autograd.grad(loss, [x, *region.parameters()]))


def penalty(region: nn.Module, x: Tensor) -> list[Tensor]:
    gradients = torch.autograd.grad(region(x), [x, *region.parameters()], create_graph=True)
    total = sum(gradient.pow(2).sum() for gradient in gradients[:1]) + region(x)
    return list(torch.autograd.grad(total, [x, *region.parameters()]))


def of_the_input_alone(region: nn.Module, x: Tensor) -> list[Tensor]:
    """Derivatives of a gradient that was computed without the weights' own."""
    loss = region(x)
    (gradient,) = torch.autograd.grad(loss, [x], create_graph=True)
    torch.autograd.grad(loss, [x], retain_graph=True)
    return list(torch.autograd.grad(gradient.pow(2).sum(), [x, *weights(region)]))


def weights(region: nn.Module) -> list[nn.Parameter]:
    return [parameter for parameter in region.parameters() if parameter.ndim == 2]


def partly_frozen(region: nn.Module, x: Tensor) -> list[Tensor]:
    region.layers[0].weight.requires_grad_(False)  # type: ignore[union-attr]
    trained = [parameter for parameter in region.parameters() if parameter.requires_grad]
    return list(torch.autograd.grad(region(x), [x, *trained]))


def low_precision(region: nn.Module, x: Tensor) -> list[Tensor]:
    with torch.autocast("cpu", torch.bfloat16):
        loss = region(x)
    return list(torch.autograd.grad(loss, [x, *region.parameters()]))


WAYS: list[Callable[[nn.Module, Tensor], list[Tensor]]] = [
    plain, accumulated, twice, recomputed, penalty, of_the_input_alone, partly_frozen, low_precision,
]  # fmt: skip


def compared(rank: int, size: int) -> dict[str, float]:
    """The largest difference between gradients with and without overlap, over the largest gradient."""
    group = TPGroup.of(dist.group.WORLD)  # type: ignore[arg-type]
    found = {}
    for way in WAYS:
        for bias in (True, False):
            results = []
            for overlapped in (True, False):
                torch.manual_seed(1)
                dtype = torch.float32 if way is low_precision else torch.float64
                x = torch.randn(3, 4, 5, dtype=dtype, requires_grad=True)
                results.append(way(Region(group, bias, overlapped).to(dtype), x))
            pairs = [(a, b) for a, b in zip(*results, strict=True) if a.numel()]
            differences = [float((a - b).abs().max() / b.abs().max()) for a, b in pairs]
            assert all(a.dtype == b.dtype for a, b in zip(*results, strict=True))
            assert all(gradient.abs().max() > 0 for gradient in results[0] if gradient.numel())
            found[f"{way.__name__}, {bias}"] = max(differences)
    return found


def test_gradients_are_those_without_overlap() -> None:
    for found in run_ranks(compared, 2):
        for way, difference in found.items():
            # Under autocast two calls share a weight's cast, and their gradients are added in bfloat16.
            assert difference <= (2**-7 if way.startswith("low_precision") else 1e-14), way


def trained(rank: int, size: int) -> dict[str, Tensor]:
    model = parallelize(
        tiny_model("llama"),
        dist.group.WORLD,  # type: ignore[arg-type]
        example_inputs=token_batch(0),
        plan_cache=False,
    )
    model(**token_batch(0)).loss.backward()
    return full_gradients(model)  # type: ignore[return-value]


def test_a_model_has_one_process_gradients() -> None:
    whole = tiny_model("llama")
    whole(**token_batch(0)).loss.backward()
    wanted = {name: parameter.grad for name, parameter in whole.named_parameters()}
    for found in run_ranks(trained, 3):
        for name, gradient in wanted.items():
            torch.testing.assert_close(found[name], gradient, rtol=1e-4, atol=1e-6)
