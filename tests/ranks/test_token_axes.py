"""Axes of activations as candidates: the tokens of a residual stream, and the experts of stacked parameters."""

from __future__ import annotations

import torch
import torch.distributed as dist
from distributed import run_ranks
from torch import Tensor, nn
from torch.nn import functional as F

from lightning_autotp.applying.replace import apply_plan
from lightning_autotp.capture.capture import capture, capture_local, meta_copy
from lightning_autotp.gradients.norms import full_gradients
from lightning_autotp.gradients.sums import synchronize_gradients
from lightning_autotp.layouts.plan import Plan
from lightning_autotp.layouts.step_size import StepSize, TokensPerStep
from lightning_autotp.layouts.types import Replicate, Shard
from lightning_autotp.parallel.implementations import IMPLEMENTATIONS
from lightning_autotp.proving.compare import compare
from lightning_autotp.proving.read_plan import read_plan
from lightning_autotp.ranks.group import TPGroup
from lightning_autotp.solving.call_points import open_calls
from lightning_autotp.solving.cost import Profile
from lightning_autotp.solving.plan_from_solution import plan_from_solution
from lightning_autotp.solving.solution import Solution
from lightning_autotp.solving.solver import solve

SLOW_MEMORY = Profile(latency=0.0, memory_bandwidth=1e9)
"""Hardware on which whatever every rank does for all tokens is dear."""


class Blocks(nn.Module):
    """Norms and products of bare matrices around a residual stream ``[tokens, hidden]``."""

    def __init__(self, hidden: int = 8, inner: int = 12, layers: int = 2) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)

        def matrix(*shape: int) -> nn.Parameter:
            return nn.Parameter(torch.randn(*shape, generator=generator) / 3)

        self.up = nn.ParameterList(matrix(hidden, inner) for _ in range(layers))
        self.down = nn.ParameterList(matrix(inner, hidden) for _ in range(layers))
        self.norm = nn.ParameterList(matrix(hidden) for _ in range(layers))

    def forward(self, x: Tensor) -> Tensor:
        for up, down, norm in zip(self.up, self.down, self.norm, strict=True):
            h = F.rms_norm(x, (x.shape[-1],), norm)
            x = x + torch.matmul(F.silu(torch.matmul(h, up)), down)
        return x.square().sum()


class Experts(nn.Module):
    """Every expert for every token, weighted: the expert axis is a dim of two stacked parameters."""

    def __init__(self, experts: int = 5) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        self.router = nn.Parameter(torch.randn(6, experts, generator=generator))
        self.up = nn.Parameter(torch.randn(experts, 6, 3, generator=generator))
        self.down = nn.Parameter(torch.randn(experts, 3, 6, generator=generator))

    def forward(self, x: Tensor) -> Tensor:
        weights = torch.matmul(x, self.router).softmax(-1)
        h = torch.einsum("th,ehi->tei", x, self.up).relu()
        return torch.einsum("tei,eih,te->th", h, self.down, weights).square().sum()


def solved(model: nn.Module, batch: Tensor, ranks: int, *, shard_sequence: bool = True) -> Solution:
    """The cheapest layouts with matrices that are cut: else every rank would take its tokens through all of them."""
    graph = capture(model, batch)
    graph = open_calls(graph, IMPLEMENTATIONS)
    pins: dict[str, int | None] = {"up": 0, "down": 0}
    if isinstance(model, Blocks):
        pins = {f"{name}.{n}": dim for n in range(2) for name, dim in (("up", 1), ("down", 0), ("norm", None))}
    few = TokensPerStep(size=StepSize(7))  # for many it would gather the matrices instead
    whole = solve(graph, ranks, IMPLEMENTATIONS, SLOW_MEMORY, tokens=few, pinned=pins)
    if not shard_sequence:
        return whole
    return solve(graph, ranks, IMPLEMENTATIONS, SLOW_MEMORY, tokens=few, pinned=pins, sharded_on=whole)


def planned(model: nn.Module, solution: Solution) -> Plan:
    parameters = [((name,), tuple(p.shape), p.element_size()) for name, p in model.named_parameters()]
    return plan_from_solution(solution, type(model).__name__, parameters)


def changes(solution: Solution) -> list[str]:
    return ["".join(change.pair) for change in solution.conversions]


def test_the_tokens_of_a_residual_stream_are_sharded() -> None:
    model = Blocks()
    solution = solved(model, torch.zeros(7, 8), 2)
    pairs = changes(solution)
    assert "PS" in pairs, pairs  # reduce-scattered after the second product
    assert {"SI", "SR"} & set(pairs), pairs  # gathered before the first
    layouts = {solution.graph.parameters[t]: solution.layouts[t] for t in solution.graph.parameters}
    assert all(isinstance(layouts[f"norm.{n}"], Replicate) for n in (0, 1))  # each rank's tokens give a part of the sum
    assert all(isinstance(layouts[f"{name}.{n}"], Shard) for name in ("up", "down") for n in (0, 1))


def one_step(rank: int, ranks: int, kind: str, tokens: list[int]) -> list[tuple[float, dict[str, Tensor]]]:
    torch.set_default_dtype(torch.float64)
    model: nn.Module = {"blocks": Blocks, "experts": Experts}[kind]()
    width = 8 if kind == "blocks" else 6
    solution = solved(meta_copy(model), torch.zeros(7, width, device="meta"), ranks)
    plan = Plan.from_json(planned(model, solution).to_json())
    group = TPGroup.of(dist.group.WORLD)  # type: ignore[arg-type]
    plan, expected = read_plan(plan, solution.graph, IMPLEMENTATIONS)
    local = meta_copy(model)
    apply_plan(local, plan, group)
    assert compare(capture_local(local, torch.zeros(7, width, device="meta")), expected, rank) is None
    apply_plan(model, plan, group)
    synchronize_gradients(model)
    found = []
    for count in tokens:
        model.zero_grad()
        loss = model(torch.randn(count, width, generator=torch.Generator().manual_seed(count)))
        loss.backward()
        found.append((loss.item(), full_gradients(model)))
    return found


def whole_step(kind: str, count: int) -> tuple[float, dict[str, Tensor]]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        model: nn.Module = {"blocks": Blocks, "experts": Experts}[kind]()
        width = 8 if kind == "blocks" else 6
        loss = model(torch.randn(count, width, generator=torch.Generator().manual_seed(count)))
        loss.backward()
        return loss.item(), {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    finally:
        torch.set_default_dtype(before)


def check(kind: str, ranks: int, tokens: list[int]) -> None:
    for results in run_ranks(one_step, ranks, kind, tokens):
        for count, (loss, gradients) in zip(tokens, results, strict=True):
            wanted, theirs = whole_step(kind, count)
            assert abs(loss - wanted) <= 1e-9 * abs(wanted)
            assert gradients.keys() == theirs.keys()
            for name, gradient in gradients.items():
                torch.testing.assert_close(gradient, theirs[name], rtol=1e-9, atol=1e-9)


def test_sharded_tokens_train_like_one_process_at_any_length() -> None:
    """Fewer and more tokens than planned for, none of them a multiple of the ranks."""
    check("blocks", 3, [7, 4, 11, 2])


def test_whole_experts_train_like_one_process() -> None:
    check("experts", 2, [7, 3])


def test_whole_experts_are_sharded() -> None:
    solution = solved(Experts(), torch.zeros(7, 6), 2)
    layouts = {name: solution.layouts[tensor] for tensor, name in solution.graph.parameters.items()}
    for name in ("up", "down"):
        layout = layouts[name]
        assert isinstance(layout, Shard)
        assert [(dim, owned.local_size(0), owned.local_size(1)) for dim, owned in layout.dims] == [(0, 3, 2)]


def test_without_it_tokens_stay_whole() -> None:
    model = Blocks()
    solution = solved(model, torch.zeros(7, 8), 2, shard_sequence=False)
    tensors = solution.graph.tensors
    layouts = [layout for t, layout in solution.layouts.items() if tensors[t].shape[:1] == (7,)]
    assert any(isinstance(layout, Shard) for layout in layouts)
    assert not [layout for layout in layouts if isinstance(layout, Shard) and layout.ownership(0) is not None]
