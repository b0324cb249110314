"""The differentiable collectives against sums and slices taken of whole tensors, forward and backward."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from distributed import run_ranks
from shards import maps, part
from torch import Tensor, nn

from lightning_autotp.layouts.ownership import Ownership
from lightning_autotp.layouts.types import Invariant, Layout, Partial, Replicate, Shard, local_shape
from lightning_autotp.parallel import TPGroup, all_reduce, convert, copy_to_tensor_parallel

INVARIANT, REPLICATE, PARTIAL = Invariant(), Replicate(), Partial()


def integers(shape: tuple[int, ...], seed: int) -> Tensor:
    """Values that add up exactly in any order."""
    return torch.randint(-50, 50, shape, generator=torch.Generator().manual_seed(seed)).float()


def placed(local: Tensor, shape: tuple[int, ...], layout: Layout, rank: int) -> Tensor:
    if not isinstance(layout, Shard):
        return local
    ((dim, ownership),) = layout.dims
    return torch.zeros(shape).index_add_(dim, torch.tensor(ownership.indices(rank), dtype=torch.long), local)


def inputs_of(layout: Layout, shape: tuple[int, ...], ranks: int) -> tuple[Tensor, list[Tensor]]:
    """A whole tensor and what each rank has of it."""
    if isinstance(layout, Partial):
        addends = [integers(shape, seed) for seed in range(ranks)]
        return torch.stack(addends).sum(0), addends
    whole = integers(shape, 0)
    return whole, [part(whole, layout, rank) for rank in range(ranks)]


def gradients_of(layout: Layout, shape: tuple[int, ...], ranks: int) -> tuple[Tensor, list[Tensor]]:
    """The gradient of a tensor of this layout: as a whole, and what each rank has of it."""
    if isinstance(layout, Invariant | Partial):
        whole = integers(shape, 100)
        return whole, [whole] * ranks
    local = [integers(local_shape(shape, layout, rank), 100 + rank) for rank in range(ranks)]
    return torch.stack([placed(g, shape, layout, rank) for rank, g in enumerate(local)]).sum(0), local


def check_pair(
    source: Layout, target: Layout, shape: tuple[int, ...], group: TPGroup, call: Callable[..., Tensor]
) -> None:
    where = f"{source} -> {target}"
    whole, locals_ = inputs_of(source, shape, group.size)
    whole_grad, grads = gradients_of(target, shape, group.size)
    x = locals_[group.rank].clone().requires_grad_()
    y = call(x, source, target, group)
    result, wanted = y.detach().clone(), whole
    if isinstance(target, Partial):
        dist.all_reduce(result)
    else:
        wanted = part(whole, target, group.rank)
    torch.testing.assert_close(result, wanted, rtol=0, atol=0, msg=lambda text: f"{where}: {text}")
    y.backward(grads[group.rank])
    assert x.grad is not None
    assert x.grad.shape == x.shape
    # What the ranks' gradients mean, taken together, by the source's type.
    meant = placed(x.grad, shape, source, group.rank)
    if isinstance(source, Replicate | Shard):
        dist.all_reduce(meant)
    assert whole_grad.abs().sum() > 0
    torch.testing.assert_close(meant, whole_grad, rtol=0, atol=0, msg=lambda text: f"gradient of {where}: {text}")


def pairs(shard: Shard) -> list[tuple[Layout, Layout]]:
    return [
        (INVARIANT, REPLICATE),
        (PARTIAL, INVARIANT),
        (PARTIAL, REPLICATE),
        (shard, INVARIANT),
        (shard, REPLICATE),
        (INVARIANT, shard),
        (REPLICATE, shard),
        (PARTIAL, shard),
        (INVARIANT, PARTIAL),
        (REPLICATE, PARTIAL),
    ]


def every_pair(rank: int, ranks: int) -> int:
    group = TPGroup.of(dist.group.WORLD)
    checked = 0
    for ownership in maps(ranks).values():
        for dim in range(3):
            shape = tuple(ownership.size if at == dim else size for at, size in enumerate((2, 3, 4)))
            for source, target in pairs(Shard(((dim, ownership),))):
                check_pair(source, target, shape, group, convert)
                checked += 1
    if ranks == 2:
        compiled(group)
    nothing_to_send(group)
    double_use(group)
    return checked


def compiled(group: TPGroup) -> None:
    """All conversions in one graph, against the same without the compiler."""
    shard = Shard(((1, maps(group.size)["shared"]),))

    def chain(x: Tensor, factor: Tensor) -> Tensor:
        for source, target in [(INVARIANT, shard), (shard, INVARIANT), (INVARIANT, REPLICATE), (REPLICATE, shard)]:
            x = convert(x, source, target, group) * 3
        x = convert(x, shard, REPLICATE, group) * factor
        reduced = (
            convert(x, PARTIAL, INVARIANT, group),
            convert(convert(x, PARTIAL, shard, group), shard, INVARIANT, group),
        )
        return convert(x, PARTIAL, REPLICATE, group) * factor + reduced[0] * 5 - reduced[1] * 2

    results = []
    for function in (chain, torch.compile(chain, fullgraph=True, backend="aot_eager")):
        x = integers((2, 6), 0).requires_grad_()
        y = function(x, integers((2, 6), 1 + group.rank))
        y.backward(integers((2, 6), 7 + group.rank))
        assert x.grad is not None
        assert x.grad.abs().sum() > 0
        results.append((y.detach(), x.grad))
    torch.testing.assert_close(results[0], results[1], rtol=0, atol=0)


def nothing_to_send(group: TPGroup) -> None:
    shard = Shard(((1, Ownership.even(7, group.size)),))
    for source, target in pairs(shard):
        x = torch.zeros(local_shape((0, 7), source, group.rank), requires_grad=True)
        y = convert(x, source, target, group)
        assert y.shape == local_shape((0, 7), target, group.rank)
        y.sum().backward()
        assert x.grad is not None
        assert x.grad.shape == x.shape


def double_use(group: TPGroup) -> None:
    """One *f* for three consumers, *f* twice on one tensor, and *g* in between, against the sum over the ranks."""

    def loss(x: Tensor, factors: list[Tensor], f: Callable[[Tensor], Tensor], g: Callable[[Tensor], Tensor]) -> Tensor:
        y = f(x)
        first = g(y * factors[0] + y * factors[1] * y)
        return (g(f(x) * factors[2]) * first + first).sum()

    factors = [[integers((4,), 10 * rank + at) for at in range(3)] for rank in range(group.size)]
    x = integers((4,), 1).requires_grad_()
    value = loss(x, factors[group.rank], lambda t: copy_to_tensor_parallel(t, group), lambda t: all_reduce(t, group))
    (gradient,) = torch.autograd.grad(value, x)
    stacked = [torch.stack([f[at] for f in factors]) for at in range(3)]
    truth = loss(x, stacked, lambda t: t, lambda t: t.sum(0))
    (expected,) = torch.autograd.grad(truth, x)
    assert expected.abs().min() > 0
    torch.testing.assert_close(value, truth, rtol=1e-6, atol=0)
    torch.testing.assert_close(gradient, expected, rtol=1e-6, atol=0)


@pytest.mark.parametrize("ranks", [pytest.param(2, marks=pytest.mark.nightly), 3])
def test_every_pair_of_types_is_right_forward_and_backward(ranks: int) -> None:
    assert run_ranks(every_pair, ranks) == [6 * 3 * 10] * ranks


def test_the_maps_are_the_ones_meant() -> None:
    for ranks in (2, 3):
        made = maps(ranks)
        assert made["shared"].is_shared
        assert not made["uneven"].is_shared
        assert made["empty"].local_size(0) == 0
        assert all(len(made["sections"].held[rank]) == 2 for rank in range(ranks))


class _Convert(nn.Module):
    def __init__(self, source: Layout, target: Layout) -> None:
        super().__init__()
        self.source, self.target = source, target
        self.scale = nn.Parameter(torch.ones((), device="meta"))

    def forward(self, x: Tensor) -> Tensor:
        return convert(x * self.scale, self.source, self.target, TPGroup("", 1, 2))


@pytest.mark.parametrize(
    ("source", "target", "name", "entering", "leaving"),
    [
        (INVARIANT, REPLICATE, "invariant_to_replicate", 7, 7),
        (PARTIAL, INVARIANT, "partial_to_invariant", 7, 7),
        (PARTIAL, REPLICATE, "partial_to_replicate", 7, 7),
        ("S", INVARIANT, "shard_to_invariant", 3, 7),
        ("S", REPLICATE, "shard_to_replicate", 3, 7),
        (INVARIANT, "S", "invariant_to_shard", 7, 3),
        (REPLICATE, "S", "replicate_to_shard", 7, 3),
        (PARTIAL, "S", "partial_to_shard", 7, 3),
    ],
)
def test_on_meta_a_conversion_is_one_node_of_the_trace(
    source: Layout | str, target: Layout | str, name: str, entering: int, leaving: int
) -> None:
    shard = Shard(((1, Ownership.even(7, 2)),))
    model = _Convert(*(shard if isinstance(layout, str) else layout for layout in (source, target)))
    x = torch.empty(2, entering, dtype=torch.bfloat16, device="meta")
    graph = torch.export.export(model, (x,), strict=False).graph
    nodes = [node for node in graph.nodes if node.op == "call_function"]
    assert [str(node.target) for node in nodes] == ["aten.mul.Tensor", "lightning_autotp.record.default"]
    maps = [shard.dims[0][1].digest] if "shard" in name else []
    assert list(nodes[1].args) == [name, [nodes[0]], [2, leaving], *maps]
    assert nodes[1].meta["val"].shape == (2, leaving)
    # Nor does the backward on meta need a group.
    x = torch.empty(2, entering, device="meta", requires_grad=True)
    model(x).sum()


def test_equal_layouts_need_no_conversion() -> None:
    x = torch.ones(3)
    shard = Shard(((0, Ownership.even(6, 2)),))
    assert convert(x, shard, Shard(((0, Ownership.even(6, 2)),)), TPGroup("", 0, 2)) is x


def test_what_cannot_be_converted_is_said() -> None:
    group = TPGroup("", 0, 2)
    even, other = Shard(((0, Ownership.even(6, 2)),)), Shard(((1, Ownership.even(6, 2)),))
    both = Shard((*even.dims, *other.dims))
    with pytest.raises(ValueError, match=r"no conversion from S\(0: 6 -> 3\) to P"):
        convert(torch.ones(3), even, PARTIAL, group)
    with pytest.raises(ValueError, match=r"no conversion from S\(0: 6 -> 3\) to S\(1: 6 -> 3\)"):
        convert(torch.ones(3, 6), even, other, group)
    with pytest.raises(ValueError, match="2 sharded dims"):
        convert(torch.ones(6, 6), INVARIANT, both, group)
    with pytest.raises(ValueError, match="for 2 ranks but the tensor-parallel group has 3"):
        convert(torch.ones(6), INVARIANT, even, TPGroup("", 0, 3))
    with pytest.raises(ValueError, match="dim 0 should have 3 elements here"):
        convert(torch.ones(4), even, INVARIANT, group)
    with pytest.raises(ValueError, match="shards dim 1 of a tensor of shape"):
        convert(torch.ones(6), INVARIANT, other, group)
