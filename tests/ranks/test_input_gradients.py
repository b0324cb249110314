"""Gradients with respect to what a parallel model is given, by parameters outside of it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from distributed import run_ranks
from selected import nightly
from tiny import tiny_model, token_batch
from torch import Tensor, nn

from lightning_autotp import full_gradients, parallelize


def gradients(model: Any, outside: nn.Linear) -> dict[str, Tensor]:
    """Of a projection before the model, and of the model."""
    torch.manual_seed(1)
    features = torch.randn(2, 17, 5)
    labels = token_batch(0)["labels"]
    model(inputs_embeds=outside(features), labels=labels).loss.backward()
    if hasattr(model, "autotp"):
        inside = full_gradients(model)
    else:
        inside = {name: parameter.grad for name, parameter in model.named_parameters()}
    found = {name: gradient for name, gradient in inside.items() if gradient is not None}
    return found | {f"outside.{name}": parameter.grad for name, parameter in outside.named_parameters()}  # type: ignore[dict-item]


def projection() -> nn.Linear:
    torch.manual_seed(2)
    return nn.Linear(5, 64)


EXAMPLES = ("needs a gradient", "needs none", "token ids")
"""What the plan is made for: the model is called with embeddings that need a gradient."""


def parallel(rank: int, size: int, example: str, sequence_parallel: bool) -> dict[str, Tensor]:
    batch = token_batch(0)
    if example != "token ids":
        embeds = torch.randn(2, 17, 64, requires_grad=example == "needs a gradient")
        batch = {"inputs_embeds": embeds, "labels": batch["labels"]}
    model = parallelize(
        tiny_model("llama", num_hidden_layers=1),
        dist.group.WORLD,  # type: ignore[arg-type]
        example_inputs=batch,
        sequence_parallel=sequence_parallel,
    )
    return gradients(model, projection())


CASES = [
    (example, sharded)
    for example in EXAMPLES
    for sharded in (False, True)
    if (example, sharded) != ("needs none", True)
]


DAILY = [("needs a gradient", True), ("needs none", False), ("token ids", True)]


@pytest.mark.parametrize("case", nightly(CASES, [case for case in CASES if case not in DAILY]))
def test_gradients_equal_one_process(case: tuple[str, bool]) -> None:
    wanted = gradients(tiny_model("llama", num_hidden_layers=1), projection())
    for found in run_ranks(parallel, 2, *case):
        for name, value in wanted.items():
            torch.testing.assert_close(found[name], value, rtol=1e-4, atol=1e-6, msg=lambda m, n=name: f"{n}: {m}")


def test_tokens_that_were_sharded_without_gradients_are_refused() -> None:
    with pytest.raises(RuntimeError, match="called in another way than it was traced"):
        run_ranks(parallel, 2, "needs none", True)


def perceptron() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 1))


def of_inputs(model: nn.Module) -> list[Tensor]:
    """Gradients of inputs, in calls between which there are others whose inputs need none."""
    torch.manual_seed(1)
    found = []
    for _ in range(3):
        x = torch.randn(5, 16, requires_grad=True)
        model(x).pow(2).sum().backward()
        model(x.detach()).sum().backward()
        assert x.grad is not None
        found.append(x.grad)
    return found


def critic(rank: int, size: int) -> list[Tensor]:
    model = parallelize(
        perceptron(),
        dist.group.WORLD,  # type: ignore[arg-type]
        example_inputs=torch.zeros(5, 16),
    )
    return of_inputs(model)


def test_the_input_of_the_outermost_module_changes_its_layout_in_some_calls() -> None:
    wanted = of_inputs(perceptron())
    for found in run_ranks(critic, 2):
        torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-6)
