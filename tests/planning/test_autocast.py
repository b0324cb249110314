"""Which parameters a model uses in 16 bits only, under autocast; and that local models have the original's dtypes."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from tiny import tiny_model
from torch import Tensor, nn
from torch.nn import functional as F

from lightning_autotp.applying.replace import apply_plan
from lightning_autotp.capture.capture import ExampleCall, capture, capture_local, language_model_inputs, meta_copy
from lightning_autotp.operators.graph import Graph
from lightning_autotp.parallel.implementations import IMPLEMENTATIONS
from lightning_autotp.pretrained.meta_model import meta_model
from lightning_autotp.proving.autocast import used_in
from lightning_autotp.proving.compare import compare
from lightning_autotp.proving.feasible import feasible_plan
from lightning_autotp.proving.read_plan import read_for_call
from lightning_autotp.proving.verify import trace
from lightning_autotp.ranks.group import TPGroup
from lightning_autotp.solving.expert_modules import constrained_by
from lightning_autotp.solving.options import PlanOptions

WIDTH = 8


class Block(nn.Module):
    """Two layers, and what code does with the weight of the first one."""

    def __init__(self, use: Callable[[Block, Tensor], Tensor]) -> None:
        super().__init__()
        self.use = use
        self.first, self.second, self.norm = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH)
        self.kernel = nn.Parameter(torch.zeros(2, WIDTH, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.norm(self.use(self, x)))


def under_no_autocast(block: Block, x: Tensor) -> Tensor:
    with torch.autocast("cpu", enabled=False):
        return block.first(x)


CASES: dict[str, tuple[Callable[[Block, Tensor], Tensor], set[str]]] = {
    "called": (lambda block, x: block.first(x), {"first.weight", "first.bias"}),
    "taken": (lambda block, x: F.linear(x, block.first.weight), {"first.weight"}),
    "a view": (lambda block, x: block.first(x) @ block.kernel[0].t(), {"first.weight", "first.bias", "kernel"}),
    "a cast": (lambda block, x: x.bfloat16() @ block.kernel[1].to(torch.bfloat16), {"kernel"}),
    "its values, too": (lambda block, x: block.first(x) * block.first.weight.mean(), {"first.bias"}),
    "another cast": (lambda block, x: block.first(x) + x * block.first.bias.half(), {"first.weight"}),
    "without autocast": (under_no_autocast, set()),
    "returned": (lambda block, x: block.first(x) + block.kernel[0], {"first.weight", "first.bias"}),
}
SECOND = {"second.weight", "second.bias"}


def found(block: Block, only: set[str] | None = None) -> frozenset[str]:
    call, device = ExampleCall((torch.zeros(WIDTH, WIDTH),), {}), torch.device("cpu")
    return used_in(torch.bfloat16, lambda: meta_copy(block), call, device=device, only=only)


@pytest.mark.parametrize("case", CASES)
def test_parameters_that_are_operands_of_products_alone(case: str) -> None:
    use, wanted = CASES[case]
    assert found(Block(use)) == wanted | SECOND
    assert found(Block(use), only=SECOND) == SECOND


def test_code_that_asks_for_a_dtype() -> None:
    """With the parameter in 16 bits it would go on in them: none is lowered then."""
    block = Block(lambda block, x: block.first(x) + x.to(block.first.weight.dtype))
    assert found(block) == set()


DAILY = (("gpt2", True), ("gpt_oss", True), ("mamba", False))
"""Biases that calls add, with and without their tokens sharded; experts; a state."""


def dtypes(graph: Graph) -> list[tuple[str, str]]:
    """Of what enters and leaves modules, in order."""
    crossings = [operator for operator in graph.operators if operator.boundary is not None]
    return sorted((str(crossing.boundary), graph.tensors[crossing.outputs[0]].dtype) for crossing in crossings)


@pytest.mark.parametrize(
    ("family", "sequence_parallel"),
    [
        pytest.param(family, sharded, marks=[] if (family, sharded) in DAILY else pytest.mark.nightly)
        for family in ("llama", "gpt2", "opt", "gpt_neox", "gpt_oss", "qwen3_moe", "mamba")
        for sharded in (False, True)
    ],
)
def test_a_local_model_has_the_dtypes_of_the_original_under_autocast(family: str, sequence_parallel: bool) -> None:
    """A bias that is added to a sum of the ranks, say, must not widen it."""
    with meta_model():
        model = tiny_model(family, num_hidden_layers=1)
    inputs = language_model_inputs(model)
    graph = trace(model, inputs)
    options = PlanOptions(plan_cache=False, sequence_parallel=sequence_parallel)
    plan, _ = feasible_plan(model, graph, inputs, 2, options)
    local = meta_copy(model)
    apply_plan(local, plan, TPGroup("", 0, 2))
    with torch.autocast("cpu", torch.bfloat16):
        here, there, graph = capture_local(local, inputs), capture(model, inputs), trace(model, inputs)
    assert {dtype for _, dtype in dtypes(there)} >= {"bfloat16", "float32"}
    assert dtypes(here) == dtypes(there)
    changes, solution = read_for_call(plan, constrained_by(graph, plan, IMPLEMENTATIONS), IMPLEMENTATIONS)
    assert changes == ()
    assert compare(here, solution, 0) is None
