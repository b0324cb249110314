"""What watches a parallel model costs a step: Python calls, counted, which must not grow with the model."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from distributed import run_ranks
from tiny import tiny_model, token_batch
from torch import nn

import lightning_autotp
from lightning_autotp import parallelize

PACKAGE = Path(lightning_autotp.__file__).parent
LOOKS = ("parameters/unchanged.py", "proving/new_calls.py", "proving/configs.py", "training/user_hooks.py",
         "parameters/running.py", "training/gradients.py", "parameters/state.py",
         "parameters/later_writes.py")  # fmt: skip
"""Files whose functions look at the model before it runs."""
OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "AdamW": torch.optim.AdamW,
    "SGD": lambda parameters, **options: torch.optim.SGD(parameters, momentum=0.9, **options),
}


def python_calls(run: Callable[[], Any]) -> Counter[tuple[str, str]]:
    """How often each function of the package is called, by file and name."""
    found: Counter[tuple[str, str]] = Counter()

    def seen(frame: Any, event: str, argument: Any) -> None:
        file = Path(frame.f_code.co_filename)
        if event == "call" and file.is_relative_to(PACKAGE):
            found[file.relative_to(PACKAGE).as_posix(), frame.f_code.co_qualname] += 1

    sys.setprofile(seen)
    try:
        run()
    finally:
        sys.setprofile(None)
    return found


def is_hooked(module: nn.Module) -> bool:
    """Whether a module inside looks at its parameters where it is not the whole model that runs."""
    return any(type(hook).__name__ == "_Hooked" for hook in module._forward_pre_hooks.values())


def counts(rank: int, size: int, layers: int) -> dict[str, Any]:
    """Of a step that is like the one before it."""
    inputs = token_batch(1) | {"use_cache": False}
    model = tiny_model("llama", num_hidden_layers=layers)
    model = parallelize(model, dist.group.WORLD, example_inputs=inputs, plan_cache=False)
    model(**inputs).loss.backward()
    forward = python_calls(lambda: model(**inputs))
    found: dict[str, Any] = {
        "forward": {at: count for at, count in forward.items() if at[0] in LOOKS},
        "hooked modules": sum(
            type(hook).__name__ == "_Hooked"
            for module in model.modules()
            for hook in module._forward_pre_hooks.values()
        ),
        "marked": sum(type(parameter.grad) is not torch.Tensor for parameter in model.parameters()),
    }
    for name, made in OPTIMIZERS.items():
        for foreach in (True, False):
            optimizer = made(model.parameters(), lr=1e-3, foreach=foreach)
            optimizer.step()
            found[f"{name}, {foreach}"] = dict(python_calls(optimizer.step))
    found["clipping"] = dict(python_calls(lambda: nn.utils.clip_grad_norm_(model.parameters(), 1.0)))
    return found


@pytest.fixture(scope="module")
def small() -> Any:
    return run_ranks(counts, 2, 1)


@pytest.fixture(scope="module")
def large() -> Any:
    return run_ranks(counts, 2, 3)


def test_looks_before_a_forward_are_no_more_calls_in_a_larger_model(small: Any, large: Any) -> None:
    for few, many in zip(small, large, strict=True):
        hooked = ("training/gradients.py", "_Hooked.__call__")
        assert few["forward"].pop(hooked) == few["hooked modules"]  # nothing but that call in each
        assert many["forward"].pop(hooked) == many["hooked modules"] > few["hooked modules"]
        looks = (
            "parameters/later_writes.py",
            "parameters/unchanged.py",
            "proving/new_calls.py",
            "training/user_hooks.py",
            "training/gradients.py",
        )
        assert {file for file, _ in few["forward"]} >= set(looks)
        assert few["forward"] == many["forward"]


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_optimizers_on_lists_of_gradients_ask_no_single_one(small: Any, large: Any, optimizer: str) -> None:
    for few, many in zip(small, large, strict=True):
        assert many["marked"] > few["marked"] > 0
        assert few[f"{optimizer}, True"] == many[f"{optimizer}, True"] != {}


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_a_function_of_a_marked_gradient_takes_no_more_than_its_handler(large: Any, optimizer: str) -> None:
    for found in large:
        called = {name: count for (_, name), count in found[f"{optimizer}, False"].items()}
        hooks = ("before_step", "after_step")
        looks = [*(f"LaterWrites.__init__.<locals>.{hook}" for hook in hooks), "LaterWrites.check", "LaterWrites.note"]
        looks.append("watch_writes.<locals>.of_step")  # which has nothing to do any more
        assert [called.pop(look) for look in looks] == [1] * len(looks)  # once a step, whatever the model's size
        asked = called.pop("PartOfGradient.__torch_function__")
        assert asked % found["marked"] == 0
        assert called.pop("_elementwise") == called.pop("first_part") == asked
        assert called == {}


def test_clipping_asks_each_gradient_for_what_it_counts(large: Any) -> None:
    for found in large:
        called = {name: count for (_, name), count in found["clipping"].items()}
        assert called["GradientPart.counted"] == found["marked"]
        assert "counted_elements" not in called  # no rank shares any of it
