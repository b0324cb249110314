"""Layouts and sizes that change at single calls inside a module, against one process."""

from __future__ import annotations

import copy
from functools import lru_cache

import pytest
import torch
import torch.distributed as dist
from distributed import run_ranks
from torch import Tensor, nn
from torch.nn import functional as F
from zoo.verdict import forward_collectives

from lightning_autotp import full_gradients, make_plan, parallelize
from lightning_autotp.applying.changed_calls import CallChanges, CallMismatch, LocalForward, replace_leaf
from lightning_autotp.capture.capture import capture
from lightning_autotp.layouts.places import CallPoint, CallSite
from lightning_autotp.layouts.types import Invariant, Partial, Shard
from lightning_autotp.parallel.implementations import IMPLEMENTATIONS
from lightning_autotp.solving.call_points import open_calls
from lightning_autotp.solving.repeated_modules import repeated_tensors
from lightning_autotp.solving.solution import Solution


class Transposed(nn.Module):
    """A linear with its weight the other way round, as GPT-2 has it."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.outputs = outputs
        self.weight = nn.Parameter(torch.randn(inputs, outputs) * 0.1)
        self.bias = nn.Parameter(torch.randn(outputs))

    def forward(self, x: Tensor) -> Tensor:
        flat = torch.addmm(self.bias, x.reshape(-1, x.shape[-1]), self.weight)
        return flat.view(*x.shape[:-1], self.outputs)


class Block(nn.Module):
    """Attention with a constant per head, and an MLP; every matrix is bare."""

    def __init__(self, hidden: int = 24, heads: int = 6) -> None:
        super().__init__()
        self.qkv, self.out = Transposed(hidden, 3 * hidden), Transposed(hidden, hidden)
        self.up, self.down = Transposed(hidden, 40), Transposed(40, hidden)
        self.norm = nn.LayerNorm(hidden)
        self.register_buffer("slopes", torch.linspace(0.1, 1, heads))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (part.unflatten(-1, (6, 4)).transpose(1, 2) for part in self.qkv(self.norm(x)).split(24, -1))
        distance = torch.arange(x.shape[1], device=x.device)[None, None, None, :] * self.slopes[None, :, None, None]
        attended = ((q @ k.transpose(-1, -2)) / 2 - distance).softmax(-1) @ v
        x = x + self.out(attended.transpose(1, 2).reshape(x.shape))
        return x + self.down(F.gelu(self.up(x)))


class Model(nn.Module):
    """One block twice, a square matrix in between, and sums into zeros that the code makes as large as they are."""

    def __init__(self) -> None:
        super().__init__()
        self.block, self.square, self.gate = Block(), nn.Linear(24, 24), nn.Linear(24, 48)
        self.back = nn.Linear(48, 24)

    def forward(self, x: Tensor) -> Tensor:
        x = self.block(torch.tanh(self.square(self.block(x))))
        gate = self.gate(x)
        total = torch.zeros(gate.shape[0], gate.shape[-1])
        for step in range(gate.shape[1]):
            total = total * 0.5 + gate[:, step]
        return self.back(total).square().sum()


def heads(x: Tensor, number: int) -> Tensor:
    return x.view(*x.shape[:2], number, 4).transpose(1, 2)


def repeated(x: Tensor) -> Tensor:
    return heads(x, 2).repeat_interleave(2, dim=1)


def merged(x: Tensor) -> Tensor:
    return x.transpose(1, 2).reshape(x.shape[0], x.shape[2], 16)


class Grouped(nn.Module):
    """Four query heads and two of keys and values; all these numbers are written in functions of no module."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(24, size, bias=False) for size in (16, 8, 8))
        self.out = nn.Linear(16, 24)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = heads(self.q(x), 4), repeated(self.k(x)), repeated(self.v(x))
        return x + self.out(merged(F.scaled_dot_product_attention(q, k, v, is_causal=True)))


class Mixing(nn.Module):
    """A token mixed with the one before it, by bare weights; beside a layer, or not."""

    def __init__(self, has_layer: bool) -> None:
        super().__init__()
        self.mix = nn.Parameter(torch.rand(1, 1, 24))
        self.after = nn.Linear(24, 24) if has_layer else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        return self.after(torch.mul(x, self.mix) + torch.multiply(x.roll(1, 1), 1 - self.mix))


def batch() -> Tensor:
    return torch.randn(2, 5, 24, generator=torch.Generator().manual_seed(1))


def model() -> Model:
    torch.manual_seed(0)
    return Model()


@lru_cache
def planned() -> Solution:
    return make_plan(model(), 2, example_inputs=batch())[1]


def parity(rank: int, ranks: int) -> list[str]:
    original = model()
    local = parallelize(copy.deepcopy(original), dist.group.WORLD, example_inputs=batch())
    wanted, found = original(batch()), local(batch())
    wanted.backward()
    found.backward()
    torch.testing.assert_close(found, wanted, rtol=1e-5, atol=0)
    gradients = full_gradients(local)
    for name, parameter in original.named_parameters():
        assert parameter.grad is not None
        scale = parameter.grad.abs().max()
        torch.testing.assert_close(gradients[name], parameter.grad, rtol=0, atol=1e-5 * float(scale), msg=name)
    return [p.names[0] for p in local.autotp.plan.parameters if isinstance(p.layout, Shard)]  # type: ignore[union-attr]


@pytest.mark.parametrize("ranks", [pytest.param(2, marks=pytest.mark.nightly), 3])
def test_loss_and_gradients_equal_one_process(ranks: int) -> None:
    sharded = run_ranks(parity, ranks)[0]
    assert {f"block.{part}.weight" for part in ("qkv", "out", "up", "down")} <= set(sharded)
    assert {"square.weight", "gate.weight", "back.weight"} <= set(sharded)


def test_heads_are_repeated_as_often_as_a_rank_needs() -> None:
    """With more ranks than heads of keys and values the number of repetitions becomes local, in the code itself."""
    plan, _ = make_plan(Grouped(), 4, example_inputs=batch())
    assert {(size.call.function, size.local) for size in plan.sizes if size.call is not None} == {
        ("view", (1,) * 4),
        ("repeat_interleave", (1,) * 4),
        ("reshape", (4,) * 4),
    }


def test_a_bias_after_a_sum_counts_once() -> None:
    changes = planned().conversions
    pairs = {
        (type(change.source), type(change.target))
        for change in changes
        if isinstance(change.boundary, CallPoint) and change.boundary.call.function == "addmm"
    }
    assert (Invariant, Partial) in pairs
    # It is summed at the call's result, or where it leaves the module.
    assert {c.boundary.module for c in changes if (str(c.source), str(c.target)) == ("P", "I")} >= {"block.out"}


def test_constants_of_heads_are_cut_where_they_are_used() -> None:
    slices = [change for change in planned().slices.values() if change.shape == (1, 6, 1, 5)]
    assert slices
    assert all(isinstance(change.target, Shard) and change.target.dims[0][0] == 1 for change in slices)


def test_every_run_of_a_module_is_laid_out_alike() -> None:
    solution = planned()
    pairs = list(repeated_tensors(solution.graph))
    assert any(solution.layouts[tensor] != Invariant() for _, tensor in pairs if tensor in solution.layouts)
    assert all(solution.layouts.get(later) == solution.layouts.get(tensor) for later, tensor in pairs)


@pytest.mark.parametrize("has_layer", [True, False])
def test_calls_that_read_what_parameters_alone_made_may_change_layouts(has_layer: bool) -> None:
    opened = open_calls(capture(Mixing(has_layer), batch()), IMPLEMENTATIONS)
    points = [operator.boundary for operator in opened.operators if isinstance(operator.boundary, CallPoint)]
    wanted = {"mul", "__rsub__"} | ({"multiply"} if has_layer else set())
    assert {point.call.function for point in points} == wanted


class Scaled(nn.Module):
    """Two row-parallel layers side by side, of which one's result is multiplied by a number."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.other = nn.Linear(24, 96), nn.Linear(24, 96)
        self.down, self.back = nn.Linear(96, 24), nn.Linear(96, 24)

    def forward(self, x: Tensor) -> Tensor:
        return x + (self.down(F.gelu(self.up(x))) * 0.5 + self.back(F.gelu(self.other(x))))


def test_parts_side_by_side_are_added_before_they_are_summed_also_where_a_number_scales_one() -> None:
    _, solution = make_plan(nn.Sequential(Scaled(), nn.Linear(24, 24)), 2, example_inputs=batch())
    assert forward_collectives(solution) == (1, 0)


class Choosing(nn.Module):
    def forward(self, x: Tensor, other: bool = False) -> Tensor:
        return x.mul(3) if other else x.add(2)


def test_a_planned_call_that_is_not_made_is_an_error() -> None:
    module = Choosing()
    line = Choosing.forward.__code__.co_firstlineno + 1
    changes = CallChanges(arguments=[(1, lambda number: 5)])
    module.forward = LocalForward(module, "choosing", {CallSite(__name__, line, "add", 0): changes})
    assert module(torch.ones(1)).item() == 6
    with pytest.raises(CallMismatch, match="choosing did not make the call"):
        module(torch.ones(1), other=True)


def test_a_run_like_one_of_a_trace_may_leave_calls_out() -> None:
    module = Choosing()
    line = Choosing.forward.__code__.co_firstlineno + 1
    added, multiplied = CallSite(__name__, line, "add", 0), CallSite(__name__, line, "mul", 0)
    forward = LocalForward(module, "choosing", {added: CallChanges(converts=True), multiplied: CallChanges()})
    module.forward = forward
    forward.allow([added])
    assert module(torch.ones(1)).item() == 3
    with pytest.raises(CallMismatch):
        module(torch.ones(1), other=True)
    forward.allow([multiplied])
    assert module(torch.ones(1), other=True).item() == 3


def test_calls_of_a_child_are_its_own() -> None:
    class Parent(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.child = Choosing()

        def forward(self, x: Tensor) -> Tensor:
            return self.child(x)

    module = Parent()
    line = Choosing.forward.__code__.co_firstlineno + 1
    site = CallSite(__name__, line, "add", 0)
    module.forward = LocalForward(module, "parent", {site: CallChanges()})
    with pytest.raises(CallMismatch):
        module(torch.ones(1))


def test_a_leaf_is_replaced_in_its_place() -> None:
    value = ((1, [2, slice(3, None, 4)]), {"size": torch.Size([5, 6])})
    changed = replace_leaf(value, 2, lambda leaf: leaf * 10)
    assert changed == ((1, [2, slice(30, None, 4)]), {"size": torch.Size([5, 6])})
    assert replace_leaf(value, 6, lambda leaf: leaf * 10)[1]["size"] == torch.Size([5, 60])
