"""The parallel layers against the layers of one process: outputs, every gradient, and what a trace shows of them."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
import torch.distributed as dist
from distributed import run_ranks
from shards import maps, part
from torch import Tensor, nn
from torch.nn import functional as F

from lightning_autotp.layouts.ownership import Ownership
from lightning_autotp.layouts.types import Shard
from lightning_autotp.parallel import (
    ColumnParallelLinear,
    RowParallelLinear,
    TPGroup,
    VocabParallelEmbedding,
    all_gather,
    all_reduce,
    copy_to_tensor_parallel,
    reduce_scatter,
    scatter,
    vocab_parallel_lookup,
)
from lightning_autotp.parallel.local_parameters import LocalParameters
from lightning_autotp.parallel.overlap import note_gathered, replicate


class ScaledEmbedding(nn.Embedding):
    """A subclass whose forward adds to its parent's."""

    def __init__(self, *args: int, scale: float) -> None:
        super().__init__(*args)
        self.scale = scale

    def forward(self, input: Tensor) -> Tensor:
        return super().forward(input) * self.scale


class DoubledLinear(nn.Linear):
    def forward(self, input: Tensor) -> Tensor:
        return super().forward(input) * 2


def assert_near(actual: Tensor, expected: Tensor, what: str) -> None:
    assert expected.numel() == 0 or expected.abs().sum() > 0, f"{what}: nothing to compare"
    scale = max(1.0, expected.abs().max().item()) if expected.numel() else 1.0
    torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-6 * scale, msg=lambda text: f"{what}: {text}")


def assert_gradient(local: nn.Parameter, whole: nn.Parameter, dim: int, ownership: Ownership, what: str) -> None:
    """The ranks' gradients of a parameter, put in place and added, are the whole one's."""
    assert local.grad is not None
    assert whole.grad is not None
    assert local.grad.shape == part(whole, Shard(((dim, ownership),)), dist.get_rank()).shape
    index = torch.tensor(ownership.indices(dist.get_rank()), dtype=torch.long)
    total = torch.zeros_like(whole).index_add_(dim, index, local.grad)
    dist.all_reduce(total)
    assert_near(total, whole.grad, what)


def check_column(group: TPGroup, name: str, ownership: Ownership, whole: nn.Linear) -> None:
    shard = Shard(((2, ownership),))
    x = torch.randn(2, 3 * group.size, whole.in_features, generator=torch.Generator().manual_seed(1))
    truth_input = x.clone().requires_grad_()
    truth = whole(truth_input)
    upstream = torch.randn(truth.shape, generator=torch.Generator().manual_seed(2))
    truth.backward(upstream)
    for flags in (
        {},
        {"gather_output": True},
        {"input_is_replicated": True},
    ):
        what = f"column {name} {flags}"
        layer = ColumnParallelLinear.convert(copy.deepcopy(whole), ownership, group, **flags)
        layer.zero_grad()
        mine = x.clone().requires_grad_()
        entering: Tensor = mine
        if flags.get("input_is_replicated"):
            entering = copy_to_tensor_parallel(mine, group)
        y = layer(entering)
        if flags.get("gather_output"):
            assert_near(y, truth, what)
            y.backward(upstream)
        else:
            assert_near(y, part(truth, shard, group.rank), what)
            # A shared output has one gradient, and its owners' add up to it.
            all_gather(y, group, shard).backward(upstream)
        assert mine.grad is not None
        assert truth_input.grad is not None
        assert_near(mine.grad, truth_input.grad, f"input gradient of {what}")
        assert_gradient(layer.weight, whole.weight, 0, ownership, f"weight gradient of {what}")
        assert_gradient(layer.bias, whole.bias, 0, ownership, f"bias gradient of {what}")


def check_row(group: TPGroup, name: str, ownership: Ownership, whole: nn.Linear) -> None:
    shard = Shard(((2, ownership),))
    x = torch.randn(2, 3 * group.size, whole.in_features, generator=torch.Generator().manual_seed(1))
    truth_input = x.clone().requires_grad_()
    truth = whole(truth_input)
    upstream = torch.randn(truth.shape, generator=torch.Generator().manual_seed(2))
    truth.backward(upstream)
    for flags in ({}, {"input_is_parallel": False}, {"reduce_output": False}):
        what = f"row {name} {flags}"
        layer = RowParallelLinear.convert(copy.deepcopy(whole), ownership, group, **flags)
        layer.zero_grad()
        mine = x.clone().requires_grad_()
        y = layer(mine if flags.get("input_is_parallel") is False else scatter(mine, group, shard))
        if flags.get("reduce_output") is False:
            y = all_reduce(y, group)
        assert_near(y, truth, what)
        y.backward(upstream)
        assert mine.grad is not None
        assert truth_input.grad is not None
        assert_near(mine.grad, truth_input.grad, f"input gradient of {what}")
        assert_gradient(layer.weight, whole.weight, 1, ownership, f"weight gradient of {what}")
        assert layer.bias.grad is not None
        assert whole.bias.grad is not None
        # Invariant: every rank has all of it.
        assert_near(layer.bias.grad, whole.bias.grad, f"bias gradient of {what}")


def check_embedding(group: TPGroup, name: str, ownership: Ownership) -> None:
    torch.manual_seed(0)
    whole = ScaledEmbedding(ownership.size, 4, 1, scale=3.0)
    ids = torch.randint(0, ownership.size, (2, 9), generator=torch.Generator().manual_seed(1))
    ids[0, 0] = 1
    truth = whole(ids)
    upstream = torch.randn(truth.shape, generator=torch.Generator().manual_seed(2))
    truth.backward(upstream)
    assert whole.weight.grad is not None
    assert whole.weight.grad[1].abs().sum() == 0
    for dtype in (torch.long, torch.int32):
        layer = VocabParallelEmbedding.convert(copy.deepcopy(whole), ownership, group)
        layer.zero_grad()
        y = layer(ids.to(dtype))
        # All ranks but one add zeros, so not a bit is lost.
        torch.testing.assert_close(y, truth, rtol=0, atol=0)
        y.backward(upstream)
        assert_gradient(layer.weight, whole.weight, 0, ownership, f"weight gradient of embedding {name}")
    addend = vocab_parallel_lookup(ids, layer.weight, ownership, group.rank)
    parts = [part(addend, Shard(((0, Ownership.whole(2, 1)),)), 0)]
    dist.all_reduce(parts[0])
    torch.testing.assert_close(parts[0] * 3, truth, rtol=0, atol=0)
    for bad in (-1, ownership.size):
        # On every rank, whoever would own it: the others would wait in the all-reduce.
        with pytest.raises(IndexError, match=rf"in \[0, {ownership.size}\), the embedding's vocabulary; found {bad}"):
            layer(torch.tensor([0, bad]))


class Block(nn.Module):
    """Embedding, column, row: one of each, with sequence parallelism when asked."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(7, 6)
        self.up = nn.Linear(6, 7)
        self.down = nn.Linear(7, 6)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embedding(ids)
        return self.down(F.gelu(self.up(x))) + x


def check_block(group: TPGroup) -> None:
    """A whole block, eager and compiled in one graph, and *f* shared by two layers."""
    torch.manual_seed(0)
    whole = Block()
    seven = Ownership.even(7, group.size)
    parallel = copy.deepcopy(whole)
    seen = []
    parallel.up.register_forward_hook(lambda module, args, output: seen.append(tuple(output.shape)))
    VocabParallelEmbedding.convert(parallel.embedding, seven, group)
    ColumnParallelLinear.convert(parallel.up, seven, group)
    RowParallelLinear.convert(parallel.down, seven, group)
    ids = torch.tensor([[0, 6, 3], [2, 2, 5]])
    whole(ids).square().sum().backward()
    compiled = torch.compile(parallel, fullgraph=True, backend="aot_eager")
    for function in (parallel, compiled) if group.size == 2 else (parallel,):
        parallel.zero_grad()
        y = function(ids)
        assert_near(y, whole(ids), "block")
        y.square().sum().backward()
        for name, dim in (("embedding.weight", 0), ("up.weight", 0), ("up.bias", 0), ("down.weight", 1)):
            assert_gradient(parallel.get_parameter(name), whole.get_parameter(name), dim, seven, f"block's {name}")
        assert_near(parallel.down.bias.grad, whole.down.bias.grad, "block's down.bias")
    assert seen[0] == (2, 3, seven.local_size(group.rank))


def check_sharded_tokens(group: TPGroup) -> None:
    """column → row with only this rank's tokens around them, unevenly sharded; gathered inputs are not kept."""
    torch.manual_seed(0)
    up, down = nn.Linear(6, 7), nn.Linear(7, 6)
    seven = Ownership.even(7, group.size)
    local_up = ColumnParallelLinear.convert(copy.deepcopy(up), seven, group, input_is_replicated=True)
    local_down = RowParallelLinear.convert(copy.deepcopy(down), seven, group, reduce_output=False)
    sequence = Shard(((1, Ownership.even(2 * group.size + 1, group.size)),))
    x = torch.randn(3, 2 * group.size + 1, 6, requires_grad=True)
    mine = scatter(x, group, sequence)
    whole = replicate(mine, group, [local_up], sequence)
    note_gathered(whole, mine, sequence, group)
    y = all_gather(reduce_scatter(local_down(local_up(whole).tanh()), group, sequence), group, sequence)
    truth = down(up(x).tanh())
    assert_near(y, truth, "sharded tokens")
    gradients = torch.autograd.grad(y.square().sum(), [x, local_up.weight, local_down.bias])
    expected = torch.autograd.grad(truth.square().sum(), [x, up.weight, down.bias])
    assert_near(gradients[0], expected[0], "input gradient with sharded tokens")
    assert_near(
        gradients[1], part(expected[1], Shard(((0, seven),)), group.rank), "weight gradient with sharded tokens"
    )
    assert_near(gradients[2], expected[2], "bias gradient with sharded tokens")


def check_initialization(group: TPGroup) -> None:
    """Drawing this rank's values gives what one process draws with the same seed."""
    seven, five = Ownership.even(7, group.size), maps(group.size)["empty"]
    for layer, whole, dim, ownership in (
        (ColumnParallelLinear(4, 7, seven, group), nn.Linear, 0, seven),
        (RowParallelLinear(7, 4, seven, group), nn.Linear, 1, seven),
        (VocabParallelEmbedding(5, 3, five, group), nn.Embedding, 0, five),
    ):
        torch.manual_seed(5)
        layer.reset_parameters()
        torch.manual_seed(5)
        truth = whole(*((5, 3) if whole is nn.Embedding else (layer.in_features, layer.out_features)))
        torch.testing.assert_close(
            layer.weight, part(truth.weight, Shard(((dim, ownership),)), group.rank), rtol=0, atol=0
        )


def every_layer(rank: int, ranks: int) -> int:
    group = TPGroup.of(dist.group.WORLD)
    for name, ownership in maps(ranks).items():
        torch.manual_seed(0)
        check_column(group, name, ownership, nn.Linear(5, ownership.size))
        check_column(group, name, ownership, DoubledLinear(5, ownership.size))
        if not ownership.is_shared:
            check_row(group, name, ownership, nn.Linear(ownership.size, 5))
        check_embedding(group, name, ownership)
    check_block(group)
    check_sharded_tokens(group)
    check_initialization(group)
    return rank


@pytest.mark.parametrize("ranks", [pytest.param(2, marks=pytest.mark.nightly), 3])
def test_layers_equal_those_of_one_process(ranks: int) -> None:
    assert run_ranks(every_layer, ranks) == list(range(ranks))


GROUP = TPGroup("", 0, 2)
SEVEN = Ownership.even(7, 2)


def nodes_of(layer: nn.Module, x: Tensor) -> list[str]:
    graph = torch.export.export(layer, (x,), strict=False).graph
    calls = [node for node in graph.nodes if node.op == "call_function"]
    return [node.args[0] if "record" in str(node.target) else str(node.target) for node in calls]


@pytest.mark.parametrize(
    ("layer", "shape", "expected"),
    [
        (
            lambda: ColumnParallelLinear(6, 7, SEVEN, GROUP, device="meta"),
            (2, 3, 6),
            ["invariant_to_replicate", "linear"],
        ),
        (
            lambda: ColumnParallelLinear(
                6, 7, SEVEN, GROUP, False, gather_output=True, input_is_replicated=True, device="meta"
            ),
            (2, 3, 6),
            ["linear", "shard_to_invariant"],
        ),
        (
            lambda: RowParallelLinear(7, 6, SEVEN, GROUP, device="meta"),
            (2, 3, 4),
            ["linear", "partial_to_invariant", "add.Tensor"],
        ),
        (
            lambda: RowParallelLinear(7, 6, SEVEN, GROUP, False, input_is_parallel=False, device="meta"),
            (2, 3, 7),
            ["invariant_to_shard", "linear", "partial_to_invariant"],
        ),
        (
            lambda: RowParallelLinear(7, 6, SEVEN, GROUP, False, reduce_output=False, device="meta"),
            (2, 3, 4),
            ["linear"],
        ),
        (
            lambda: RowParallelLinear(7, 6, SEVEN, GROUP, reduce_output=False, device="meta"),
            (2, 3, 4),
            ["linear", "invariant_to_partial", "add.Tensor"],
        ),
        (
            lambda: VocabParallelEmbedding(7, 6, SEVEN, GROUP, device="meta"),
            (2, 3),
            ["vocab_parallel_lookup", "partial_to_invariant"],
        ),
        (
            lambda: VocabParallelEmbedding.convert(ScaledEmbedding(7, 6, scale=2.0).to("meta"), SEVEN, GROUP),
            (2, 3),
            ["vocab_parallel_lookup", "partial_to_invariant", "mul.Tensor"],
        ),
    ],
)
def test_a_trace_shows_exactly_these_nodes(layer: object, shape: tuple[int, ...], expected: list[str]) -> None:
    module = layer()  # type: ignore[operator]
    x = torch.empty(shape, device="meta", dtype=torch.long if isinstance(module, nn.Embedding) else torch.float32)
    found = nodes_of(module, x)
    assert [name.removeprefix("aten.").removesuffix(".default") for name in found] == expected


def test_parallel_layers_read_well() -> None:
    column = ColumnParallelLinear(64, 112, Ownership.even(112, 2), GROUP, False, device="meta")
    assert (
        repr(column) == "ColumnParallelLinear(in_features=64, out_features=112 -> 56, bias=False, gather_output=False)"
    )
    row = RowParallelLinear(7, 6, SEVEN, GROUP, False, reduce_output=False, device="meta")
    assert repr(row).endswith(
        "in_features=7 -> 4, out_features=6, bias=False, input_is_parallel=True, reduce_output=False)"
    )
    embedding = VocabParallelEmbedding.convert(ScaledEmbedding(7, 6, 1, scale=2.0), SEVEN, GROUP)
    assert repr(embedding) == "VocabParallelEmbedding[ScaledEmbedding](7 -> 4, 6, padding_idx=1)"
    assert isinstance(column, nn.Linear)
    assert isinstance(row, nn.Linear)
    assert isinstance(embedding, ScaledEmbedding)


def test_converting_keeps_the_object_its_ties_and_the_users_attributes() -> None:
    for device in ("cpu", "meta"):
        model = nn.Module()
        model.embedding = nn.Embedding(7, 6)
        model.head = nn.Linear(6, 7, bias=False)
        model.head.weight = model.embedding.weight
        model.embedding.weight.requires_grad_(False)
        model.to(device)
        model.head.weight = model.embedding.weight
        model.embedding.weight.own = "attribute"
        before, local = dict(model.named_modules()), {}
        assert VocabParallelEmbedding.convert(model.embedding, SEVEN, GROUP, local=local) is before["embedding"]
        assert ColumnParallelLinear.convert(model.head, SEVEN, GROUP, local=local) is before["head"]
        assert model.head.weight is model.embedding.weight
        assert model.head.weight.shape == (4, 6)
        assert model.head.weight.device.type == device
        assert not model.head.weight.requires_grad
        assert model.head.weight.own == "attribute"
        assert [made for made, _ in local.values()] == [model.head.weight]


def test_tied_parameters_cannot_have_two_layouts() -> None:
    model = nn.Module()
    model.first, model.second = nn.Linear(7, 7, bias=False), nn.Linear(7, 7, bias=False)
    model.second.weight = model.first.weight
    local: LocalParameters = {}
    ColumnParallelLinear.convert(model.first, SEVEN, GROUP, local=local)
    with pytest.raises(ValueError, match="tied parameters need one layout"):
        RowParallelLinear.convert(model.second, SEVEN, GROUP, local=local)


def test_a_converted_subclass_can_be_copied_and_pickled() -> None:
    layer = VocabParallelEmbedding.convert(ScaledEmbedding(7, 6, scale=2.0), SEVEN, GROUP)
    for copied in (copy.deepcopy(layer), pickle.loads(pickle.dumps(layer))):
        assert type(copied) is type(layer)
        assert copied.scale == 2.0
        assert copied.ownership == SEVEN
        assert torch.equal(copied.weight, layer.weight)
        assert copied.weight is not layer.weight


def test_what_cannot_be_made_parallel_is_said() -> None:
    shared = Ownership(7, (((0, 4),), ((3, 7),)))
    with pytest.raises(ValueError, match="one owner for every input feature"):
        RowParallelLinear(7, 6, shared, GROUP)
    with pytest.raises(ValueError, match=r"weight of shape \(8, 6\) does not fit the map of dim 0"):
        ColumnParallelLinear(6, 8, SEVEN, GROUP)
    with pytest.raises(ValueError, match=r"weight of shape \(8, 6\) does not fit the map of dim 0"):
        VocabParallelEmbedding(8, 6, SEVEN, GROUP)
    with pytest.raises(ValueError, match="does not fit the map of dim 0"):
        ColumnParallelLinear.convert(nn.Linear(7, 6), SEVEN, GROUP)
    for options in ({"max_norm": 1.0}, {"scale_grad_by_freq": True}, {"sparse": True}):
        with pytest.raises(ValueError, match=f"an embedding with {next(iter(options))} cannot"):
            VocabParallelEmbedding.convert(nn.Embedding(7, 6, **options), SEVEN, GROUP)
    with pytest.raises(TypeError, match="takes the place of a Linear, not of a Embedding"):
        ColumnParallelLinear.convert(nn.Embedding(7, 6), SEVEN, GROUP)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="not of a ColumnParallelLinear"):
        ColumnParallelLinear.convert(ColumnParallelLinear(6, 7, SEVEN, GROUP), SEVEN, GROUP)
    hooked = nn.Linear(6, 7)
    hooked.forward = hooked.forward  # type: ignore[method-assign]
    with pytest.raises(TypeError, match="was replaced on the object itself"):
        ColumnParallelLinear.convert(hooked, SEVEN, GROUP)
    normed = nn.utils.parametrizations.weight_norm(nn.Linear(6, 7))
    with pytest.raises(ValueError, match="no parameter 'weight' of its own"):
        ColumnParallelLinear.convert(normed, SEVEN, GROUP)
