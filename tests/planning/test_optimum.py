"""The solver's layouts are the cheapest there are: compared with a search through all of them.

The search knows nothing of tables or elimination. It goes through the operators in order and tries, for each, every
combination of types its rule allows; it turns back only where types contradict or where what is spent, and what the
rest costs at the very least, is no less than the best found.
"""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from lightning_autotp.capture.capture import capture
from lightning_autotp.layouts.types import Shard
from lightning_autotp.parallel.implementations import IMPLEMENTATIONS
from lightning_autotp.solving import solver
from lightning_autotp.solving.call_points import open_calls
from lightning_autotp.solving.cost import Profile
from lightning_autotp.solving.tables import Tables

HIDDEN, INNER, VOCABULARY = 8, 12, 10
SLOW_LINKS = Profile(link_bandwidth=1e6)
DEAR_MEMORY = Profile(matrix_price=1e4)
CHEAP_MEMORY = Profile(matrix_price=1e-3)


class Pair(nn.Module):
    """Two linears, a residual, a norm."""

    def __init__(self, residual: bool = True, norm: bool = True, bias: bool = False) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(HIDDEN) if norm else nn.Identity()
        self.up, self.down = nn.Linear(HIDDEN, INNER, bias=bias), nn.Linear(INNER, HIDDEN, bias=bias)
        self.residual = residual

    def forward(self, x: Tensor) -> Tensor:
        y = self.down(F.gelu(self.up(self.norm(x))))
        return x + y if self.residual else y


class Gated(nn.Module):
    """Three linears around a product."""

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.up = nn.Linear(HIDDEN, INNER, bias=False), nn.Linear(HIDDEN, INNER, bias=False)
        self.down = nn.Linear(INNER, HIDDEN)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.silu(self.gate(x)) * self.up(x))


class Four(nn.Module):
    """A chain of four linears: column and row twice over, or anything else."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(nn.Linear(a, b, bias=False) for a, b in ((8, 12), (12, 8), (8, 6), (6, 8))))

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x)


class Tied(nn.Module):
    """An embedding whose table is the head's, too, and the loss."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.norm = nn.Embedding(VOCABULARY, HIDDEN), nn.RMSNorm(HIDDEN)
        self.head = nn.Linear(HIDDEN, VOCABULARY, bias=False)
        self.head.weight = self.table.weight

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        return F.cross_entropy(self.head(self.norm(self.table(ids))).flatten(0, 1), labels.flatten())


class Bare(nn.Module):
    """Parameters in matrix products of the module's own."""

    def __init__(self) -> None:
        super().__init__()
        self.into, self.out = nn.Parameter(torch.empty(HIDDEN, INNER)), nn.Parameter(torch.empty(INNER, HIDDEN))

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.matmul(torch.relu(torch.matmul(x, self.into)), self.out)


class Experts(nn.Module):
    """Batched matrices, one per expert."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Parameter(torch.empty(3, HIDDEN, INNER)), nn.Parameter(torch.empty(3, INNER, HIDDEN))

    def forward(self, x: Tensor) -> Tensor:
        copies = x.flatten(0, 1).unsqueeze(0).expand(3, -1, -1)
        return x + torch.bmm(F.silu(torch.bmm(copies, self.up)), self.down).sum(0).view_as(x)


class Twice(nn.Module):
    """One block that runs two times."""

    def __init__(self) -> None:
        super().__init__()
        self.block = Pair(norm=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.block(self.block(x))


class Heads(nn.Module):
    """Two heads of attention: with three ranks there are fewer units than ranks."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(HIDDEN, 3 * HIDDEN, bias=False), nn.Linear(HIDDEN, HIDDEN, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (part.unflatten(-1, (2, -1)).transpose(1, 2) for part in self.qkv(x).chunk(3, -1))
        return x + self.out(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))


class Search:
    """All assignments of types that the tables allow."""

    def __init__(self, tables: Tables) -> None:
        self.tables = tables
        self.first = tables.first
        self.choices: list[list[tuple[dict[int, Any], float]]] = []
        self._single({t: dict(tables._parameter(t)) for t in tables.graph.parameters if t in tables.dims})
        outputs = [t for t in dict.fromkeys(tables.graph.outputs) if t in tables.dims]
        ends = {t: ["I", *(tables.touching[t] if tables.view_boundaries(t) else ())] for t in outputs}
        inner = [list(tables.combinations(relation)) for relation in tables.relations]
        own = [[t for t in (*r.inputs, *r.outputs) if t in tables.dims] for r in tables.relations]
        for tensors, combinations in zip(own, inner, strict=True):
            rows = []
            for kinds, cost in combinations:
                row: dict[int, Any] = {}
                fits = all(row.setdefault(self.first.get(t, t), kinds[t]) == kinds[t] for t in tensors)
                if fits:
                    rows.append((row, cost))
            self.choices.append(sorted(rows, key=lambda item: item[1]))
        self._single({t: dict.fromkeys(kinds, 0.0) for t, kinds in ends.items()})
        self.choices = self._as_they_meet(self.choices)
        least = [min(cost for _, cost in rows) for rows in self.choices]
        self.rest = [math.fsum(least[at:]) for at in range(len(least) + 1)]
        self.best = math.inf

    def _single(self, costs: dict[int, dict[Any, float]]) -> None:
        for tensor, kinds in costs.items():
            self.choices.append([({self.first.get(tensor, tensor): kind}, cost) for kind, cost in kinds.items()])

    @staticmethod
    def _as_they_meet(choices: list[Any]) -> list[Any]:
        """In an order in which each next one shares as many tensors as it can with those before."""
        left, order, known = list(choices), [], set()
        while left:
            following = max(left, key=lambda rows: (len(rows[0][0].keys() & known) / len(rows[0][0]), -len(rows)))
            left.remove(following)
            order.append(following)
            known |= following[0][0].keys()
        return order

    def run(self) -> float:
        self._visit(0, {}, 0.0)
        return self.best

    def _visit(self, at: int, kinds: dict[int, Any], spent: float) -> None:
        if spent + self.rest[at] >= self.best * (1 - 1e-12):
            return
        if at == len(self.choices):
            self.best = spent
            return
        for row, cost in self.choices[at]:
            if all(kinds.get(tensor, kind) == kind for tensor, kind in row.items()):
                self._visit(at + 1, kinds | row, spent + cost)


MODELS: dict[str, tuple[type[nn.Module], dict[str, Any]]] = {
    "two linears": (Pair, {"residual": False, "norm": False}),
    "residual and norm": (Pair, {}),
    "biases": (Pair, {"bias": True}),
    "gated": (Gated, {}),
    "four linears": (Four, {}),
    "tied head": (Tied, {}),
    "bare matrices": (Bare, {}),
    "experts": (Experts, {}),
    "called twice": (Twice, {}),
    "fused heads": (Heads, {}),
}


def solved_rounds(monkeypatch: pytest.MonkeyPatch, name: str, ranks: int, profile: Profile) -> list[tuple[float, Any]]:
    """What each round of the solver found, and what a search through everything finds."""
    rounds: list[tuple[float, Any]] = []
    solve_once = solver._solve_once

    def solve_and_search(tables: Tables, *options: Any) -> Any:
        solution = solve_once(tables, *options)
        rounds.append((Search(tables).run(), solution))
        return solution

    monkeypatch.setattr(solver, "_solve_once", solve_and_search)
    make, options = MODELS[name]
    with torch.device("meta"):
        model = make(**options)
    tokens = torch.zeros(2, 5, dtype=torch.long, device="meta")
    states = torch.empty(2, 5, HIDDEN, device="meta")
    graph = capture(model, (tokens, tokens) if make is Tied else (states,))
    solver.solve(open_calls(graph, IMPLEMENTATIONS), ranks, IMPLEMENTATIONS, profile)
    return rounds


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("ranks", [2, 3])
def test_nothing_is_cheaper(monkeypatch: pytest.MonkeyPatch, name: str, ranks: int) -> None:
    for profile in (Profile(), SLOW_LINKS, DEAR_MEMORY, CHEAP_MEMORY):
        rounds = solved_rounds(monkeypatch, name, ranks, profile)
        monkeypatch.undo()
        for cheapest, solution in rounds:
            assert solution.cost == pytest.approx(cheapest, rel=1e-9)


def test_prices_change_the_optimum(monkeypatch: pytest.MonkeyPatch) -> None:
    """The comparison above is of different plans: where memory is dear all is cut, where links are slow nothing is."""

    def cut(profile: Profile) -> int:
        _, solution = solved_rounds(monkeypatch, "residual and norm", 2, profile)[-1]
        monkeypatch.undo()
        return sum(isinstance(solution.layouts[t], Shard) for t in solution.graph.parameters)

    assert cut(DEAR_MEMORY) >= 2
    assert cut(Profile(link_bandwidth=1e3, matrix_price=0.0)) == 0
