"""Two ways to treat a model's layers are compared on few of them, which cost what a model with so many layers costs."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from mixture_configs import MIXTURES, SIZES
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM

from lightning_autotp.capture.capture import language_model_inputs
from lightning_autotp.operators.graph import Graph
from lightning_autotp.parallel.implementations import IMPLEMENTATIONS
from lightning_autotp.proving import feasible
from lightning_autotp.proving.verify import trace
from lightning_autotp.solving.cost import Profile
from lightning_autotp.solving.few_layers import with_few_layers
from lightning_autotp.solving.options import PlanOptions
from lightning_autotp.solving.solution import Solution
from lightning_autotp.solving.solver import solve

# A matrix held whole is priced by the median of all: of a model with fewer layers it is another.
BY_BYTES = Profile(matrix_price=0.0)


def mixture(family: str, **changes: Any) -> nn.Module:
    config = AutoConfig.for_model(family, **(SIZES | MIXTURES[family] | changes))
    with torch.device("meta"):
        model: nn.Module = AutoModelForCausalLM.from_config(config)
    return model


def graph_of(model: nn.Module) -> Graph:
    return trace(model, language_model_inputs(model))


def layers(graph: Graph) -> set[str]:
    """The layers whose operators are in a graph."""
    paths = (operator.module.split(".") for operator in graph.operators)
    return {".".join(path[:3]) for path in paths if path[:2] == ["model", "layers"] and len(path) > 2}


def some(*numbers: int) -> set[str]:
    return {f"model.layers.{number}" for number in numbers}


@pytest.mark.parametrize(
    ("family", "many", "few"),
    [
        ("qwen3_moe", {"num_hidden_layers": 5}, {"num_hidden_layers": 2}),
        (
            "deepseek_v3",
            {"num_hidden_layers": 7, "first_k_dense_replace": 3},
            {"num_hidden_layers": 4, "first_k_dense_replace": 2},
        ),
    ],
)
def test_few_layers_cost_what_a_model_of_so_many_does(family: str, many: dict[str, Any], few: dict[str, Any]) -> None:
    shortened, small = with_few_layers(graph_of(mixture(family, **many)), ()), graph_of(mixture(family, **few))
    assert len(shortened.operators) == len(small.operators)
    costs = [solve(graph, 2, IMPLEMENTATIONS, BY_BYTES).cost for graph in (shortened, small)]
    assert costs[0] == pytest.approx(costs[1], rel=1e-9)


def test_two_layers_of_every_kind_stay() -> None:
    """Kinds may alternate; a mixture in every second layer makes two of them."""
    graph = graph_of(mixture("qwen3_moe", num_hidden_layers=6, decoder_sparse_step=2))
    few = with_few_layers(graph, ())
    assert layers(few) == some(0, 1, 2, 3)
    assert [call.module for call in few.experts] == [f"model.layers.{number}.mlp.experts" for number in (1, 3)]
    made = {tensor for operator in few.operators for tensor in operator.outputs}
    loose = {tensor for operator in few.operators for tensor in operator.inputs} - made
    assert loose <= {*graph.loose(), *graph.parameters}  # nothing reads what a layer that is left out had made
    assert made.issuperset(few.outputs)


def test_layers_that_a_user_pins_stay() -> None:
    graph = graph_of(mixture("qwen3_moe", num_hidden_layers=5))
    few = with_few_layers(graph, ["model.layers.3.mlp.experts.down_proj", "lm_head.weight"])
    assert layers(few) == some(0, 1, 3)


def test_what_repeats_nothing_stays_as_it_is() -> None:
    graph = graph_of(mixture("qwen3_moe", num_hidden_layers=2))
    assert with_few_layers(graph, ()) is graph


def test_only_the_cheaper_treatment_is_solved_for_all_layers(monkeypatch: pytest.MonkeyPatch) -> None:
    solved: list[int] = []

    def noting(graph: Graph, *options: Any, **more: Any) -> Solution:
        solved.append(len(layers(graph)))
        return solve(graph, *options, **more)

    monkeypatch.setattr(feasible, "solve", noting)
    model = mixture("qwen3_moe", num_hidden_layers=5)
    inputs = language_model_inputs(model)
    feasible.feasible_plan(model, trace(model, inputs), inputs, 2, PlanOptions(memory=None))
    assert solved == [2, 2, 5]
