"""The sum of a column-parallel region's input gradient runs while the region's weight gradients are computed."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from distributed import run_ranks
from tiny import tiny_model, token_batch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from lightning_autotp import full_gradients, parallelize
from lightning_autotp.layouts.ownership import Ownership
from lightning_autotp.layouts.types import Shard
from lightning_autotp.parallel.collectives import scatter
from lightning_autotp.parallel.linear import ColumnParallelLinear
from lightning_autotp.parallel.overlap import note_gathered, replicate
from lightning_autotp.ranks.group import TPGroup

SHORT = {
    "mm": "product",
    "all_reduce": "sum",
    "all_gather_into_tensor": "gather",
    "reduce_scatter_tensor": "part of a sum",
    "wait_tensor": "wait",
}


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


Orders = dict[tuple[bool, bool], list[str]]
"""By whether tokens are sharded, and whether torch looks for anomalies."""


def order(rank: int, size: int) -> Orders:
    found = {}
    for sequence_parallel in (False, True):
        model = parallelize(
            tiny_model("llama"),
            dist.group.WORLD,  # type: ignore[arg-type]
            example_inputs=token_batch(0, length=16),
            sequence_parallel=sequence_parallel,
        )
        for looks_for_anomalies in (False, True):
            with torch.autograd.set_detect_anomaly(looks_for_anomalies):
                loss = model(**token_batch(0, length=16)).loss
                with Order() as order:
                    loss.backward()
            found[sequence_parallel, looks_for_anomalies] = order.names
    return found


@pytest.fixture(scope="module")
def orders() -> list[Orders]:
    return run_ranks(order, 2)


def test_weight_gradients_of_a_region_run_while_its_input_gradient_is_summed(orders: list[Orders]) -> None:
    """Products for the input, the launch of their sum, products for the weights, the wait."""
    for found in orders:
        names = ", ".join(found[False, False])
        assert names.count("sum") == 5  # the loss's; gate's and up's; that of q, k and v
        for products in (2, 3):
            of_a_region = ["product"] * products
            assert names.count(", ".join([*of_a_region, "sum", *of_a_region, "wait"])) == 2


def test_what_was_gathered_is_gathered_again_while_the_input_gradient_is_computed(orders: list[Orders]) -> None:
    for found in orders:
        names = ", ".join(found[True, False])
        for products in (2, 3):
            of_a_region = ["product"] * products
            wanted = ["gather", *of_a_region, "part of a sum", "wait", *of_a_region, "wait"]
            assert names.count(", ".join(wanted)) == 2


def test_what_anomaly_mode_looks_at_has_been_waited_for(orders: list[Orders]) -> None:
    for found in orders:
        names = [*found[False, True], *found[True, True]]
        sums = [number for number, name in enumerate(names) if name in ("sum", "part of a sum")]
        assert len(sums) > 8
        assert {names[number + 1] for number in sums} == {"wait"}


class Region(nn.Module):
    """Two column-parallel layers with one input, as a plan makes them, and what becomes of their results."""

    def __init__(self, group: TPGroup, bias: bool, source: Shard | None, overlapped: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.group, self.source, self.overlapped = group, source, overlapped
        self.computes_products_again = False
        self.layers = nn.ModuleList()
        for outputs in (7, 12):
            whole = nn.Linear(5, outputs, bias, dtype=torch.float64)
            sharded = Ownership.even(outputs, group.size)
            self.layers.append(ColumnParallelLinear.convert(whole, sharded, group, input_is_replicated=True))

    def forward(self, x: Tensor) -> Tensor:
        layers: Any = self.layers if self.overlapped else ()
        if self.source is None:
            x = replicate(x, self.group, layers)
        else:
            part = scatter(x, self.group, self.source)
            x = replicate(part, self.group, layers, self.source)
            if self.overlapped:
                note_gathered(x, part, self.source, self.group)
        return checkpoint(self.products, x, use_reentrant=False) if self.computes_products_again else self.products(x)

    def products(self, x: Tensor) -> Tensor:
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


def products_recomputed(region: nn.Module, x: Tensor) -> list[Tensor]:
    """As by a decoder's blocks, of which each reads the encoder's states."""
    region.computes_products_again = True
    return plain(region, x)


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
    plain, accumulated, twice, recomputed, products_recomputed, penalty, of_the_input_alone, partly_frozen,
    low_precision,
]  # fmt: skip


def compared(rank: int, size: int) -> dict[str, float]:
    """The largest difference between gradients with and without overlap, over the largest gradient."""
    group = TPGroup.of(dist.group.WORLD)  # type: ignore[arg-type]
    found = {}
    evenly, unevenly = (Shard(((dim, Ownership.even((3, 4)[dim], size)),)) for dim in (1, 0))
    for way, bias, source in itertools.product(WAYS, (True, False), (None, evenly, unevenly)):
        results = []
        for overlapped in (True, False):
            torch.manual_seed(1)
            dtype = torch.float32 if way is low_precision else torch.float64
            x = torch.randn(3, 4, 5, dtype=dtype, requires_grad=True)
            results.append(way(Region(group, bias, source, overlapped).to(dtype), x))
        pairs = [(a, b) for a, b in zip(*results, strict=True) if a.numel()]
        differences = [float((a - b).abs().max() / b.abs().max()) for a, b in pairs]
        assert all(a.dtype == b.dtype for a, b in zip(*results, strict=True))
        assert all(gradient.abs().max() > 0 for gradient in results[0] if gradient.numel())
        found[f"{way.__name__}, {bias}, {source}"] = max(differences)
    return found


def test_gradients_are_those_without_overlap() -> None:
    for found in run_ranks(compared, 2):
        for way, difference in found.items():
            # Under autocast two calls share a weight's cast, and their gradients are added in bfloat16.
            assert difference <= (2**-7 if way.startswith("low_precision") else 1e-14), way


def trained(rank: int, size: int, sequence_parallel: bool) -> dict[str, Tensor]:
    model = parallelize(
        tiny_model("llama", num_hidden_layers=1),
        dist.group.WORLD,  # type: ignore[arg-type]
        example_inputs=token_batch(0),
        sequence_parallel=sequence_parallel,
    )
    model(**token_batch(0)).loss.backward()
    return full_gradients(model)  # type: ignore[return-value]


@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_a_model_has_one_process_gradients(sequence_parallel: bool) -> None:
    whole = tiny_model("llama", num_hidden_layers=1)
    whole(**token_batch(0)).loss.backward()
    wanted = {name: parameter.grad for name, parameter in whole.named_parameters()}
    for found in run_ranks(trained, 3, sequence_parallel):
        for name, gradient in wanted.items():
            torch.testing.assert_close(found[name], gradient, rtol=1e-4, atol=1e-6)
