"""What watches a parallel model costs a step: Python calls, counted, which must not grow with the model."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from distributed import run_ranks
from tiny import tiny_model, token_batch
from torch import nn
from torch.optim.optimizer import _global_optimizer_post_hooks, _global_optimizer_pre_hooks

import lightning_autotp
from lightning_autotp import parallelize
from lightning_autotp.guard.guard import Guard, guard_of
from lightning_autotp.guard.standalone import StandaloneCall

PACKAGE = Path(lightning_autotp.__file__).parent
LOOKS = ("guard/guard.py", "guard/standalone.py", "guard/user_hooks.py", "parameters/snapshot.py",
         "parameters/unchanged.py", "parameters/writes.py", "parameters/state.py", "proving/new_calls.py",
         "proving/call_kinds.py", "proving/configs.py", "proving/attributes.py", "gradients/sums.py")  # fmt: skip
"""Files whose functions look at the model before it runs."""
PRIVATE_LOOKS = ("ModuleHooks.", "compiled_in_place", "hook_tables")
"""Functions of ``private/`` by which they do, as the beginnings of their names."""
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
    """Whether a module inside is looked at where it is not the whole model that runs."""
    hooks = module._forward_pre_hooks.values()
    return any(isinstance(getattr(hook, "__self__", None), StandaloneCall) for hook in hooks)


TABLES = [
    "_forward_pre_hooks", "_forward_hooks", "_forward_hooks_always_called", "_forward_hooks_with_kwargs",
    "_forward_pre_hooks_with_kwargs", "_backward_hooks", "_state_dict_hooks", "_load_state_dict_pre_hooks",
    "_load_state_dict_post_hooks",
]  # fmt: skip


def hooks_and_attributes(model: nn.Module) -> dict[str, Any]:
    """Of every module, by path; and of all optimizers."""
    found: dict[str, Any] = {
        path: (set(vars(module)), [dict(getattr(module, table)) for table in TABLES])
        for path, module in model.named_modules()
    }
    found["optimizers"] = [dict(hooks) for hooks in (_global_optimizer_pre_hooks, _global_optimizer_post_hooks)]
    return found


def counts(rank: int, size: int, layers: int) -> dict[str, Any]:
    """Of a step that is like the one before it."""
    inputs = token_batch(1) | {"use_cache": False}
    model = tiny_model("llama", num_hidden_layers=layers)
    unguarded: dict[str, Any] = {}

    def noted(guard: Guard) -> None:
        unguarded.update(hooks_and_attributes(guard.model))
        attach(guard)

    attach = Guard.attach
    with mock.patch.object(Guard, "attach", noted):
        model = parallelize(model, dist.group.WORLD, example_inputs=inputs)
    for _ in range(2):  # the first one is compared between the ranks
        model(**inputs).loss.backward()
    forward = python_calls(lambda: model(**inputs))
    found: dict[str, Any] = {
        "forward": {at: n for at, n in forward.items() if at[0] in LOOKS or at[1].startswith(PRIVATE_LOOKS)},
        "hooked modules": sum(is_hooked(module) for module in model.modules() if not isinstance(module, nn.ModuleList)),
        "marked": sum(type(parameter.grad) is not torch.Tensor for parameter in model.parameters()),
    }
    for name, made in OPTIMIZERS.items():
        for foreach in (True, False):
            optimizer = made(model.parameters(), lr=1e-3, foreach=foreach)
            optimizer.step()
            found[f"{name}, {foreach}"] = dict(python_calls(optimizer.step))
    found["clipping"] = dict(python_calls(lambda: nn.utils.clip_grad_norm_(model.parameters(), 1.0)))
    guard_of(model).remove()
    found["left behind"] = [path for path, there in hooks_and_attributes(model).items() if there != unguarded[path]]
    found["loss"] = model(**inputs).loss.item(), model.save_pretrained.__name__
    return found


@pytest.fixture(scope="module")
def small() -> Any:
    return run_ranks(counts, 2, 1)


@pytest.fixture(scope="module")
def large() -> Any:
    return run_ranks(counts, 2, 2)


def test_looks_before_a_forward_are_no_more_calls_in_a_larger_model(small: Any, large: Any) -> None:
    for few, many in zip(small, large, strict=True):
        hooked = ("guard/standalone.py", "StandaloneCall.before")
        assert few["forward"].pop(hooked) == few["hooked modules"]  # nothing but that call in each
        assert many["forward"].pop(hooked) == many["hooked modules"] > few["hooked modules"]
        looks = (
            "guard/guard.py",
            "guard/user_hooks.py",
            "parameters/snapshot.py",
            "parameters/writes.py",
            "proving/new_calls.py",
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
        looks = ["_before_step", "Guard._is_unwritten_before_step", "parallel_state", "Writes.check"]
        looks += ["ComparedValues.before_step", "_after_step", "Guard._note_step", "Writes.note", "note_written"]
        looks += ["Guard.mark_gradients", "mark_gradients", "stepped_by"]
        called["parallel_state"] -= 1  # before and after
        assert max(called.pop(name) for name in list(called) if name.startswith("Bypasses.")) == 2
        assert [called.pop(look) for look in looks] == [1] * len(looks)  # once a step, whatever the model's size
        asked = called.pop("PartOfGradient.__torch_function__")
        assert asked % found["marked"] == 0
        assert called.pop("elementwise") == called.pop("first_part") == asked
        assert called.pop("is_in_optimizer", 0) <= asked  # where a gradient is written into a state
        called.pop("Guard._note_step.<locals>.<genexpr>", None)  # while logits wait to be computed
        assert called == {}


def test_clipping_asks_each_gradient_for_what_it_counts(large: Any) -> None:
    for found in large:
        called = {name: count for (_, name), count in found["clipping"].items()}
        assert called["GradientPart.counted"] == found["marked"]
        assert "counted_elements" not in called  # no rank shares any of it


def test_a_guard_that_is_removed_leaves_nothing_behind(small: Any) -> None:
    for found in small:
        assert found["left behind"] == []
        assert found["loss"] == (small[0]["loss"][0], "save_pretrained")  # runs, and the methods are its own again
