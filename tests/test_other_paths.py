"""Models whose code takes another path than in the trace: what they compute is right, or an error on every rank.

Each block asks something, and where the answer is yes takes the weight of its output layer itself, as fused code does.
"""

from __future__ import annotations

import copy
import os
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from distributed import run_ranks
from torch import Tensor, nn
from torch._subclasses.fake_tensor import is_fake
from torch.nn import functional as F
from torch.utils._python_dispatch import _get_current_dispatch_mode

from lightning_autotp import UnprovedCall, full_gradients, parallelize
from lightning_autotp.applying.seen_paths import UnseenPath

WIDTH = 16
Question = Callable[["Block", Tensor, Any], bool]


class Block(nn.Module):
    flag, calls = False, 0

    def __init__(self, question: Question) -> None:
        super().__init__()
        self.inner, self.out = nn.Linear(WIDTH, 36, bias=False), nn.Linear(36, WIDTH, bias=False)
        self.question = question

    def forward(self, x: Tensor, task: Any = None) -> Tensor:
        hidden = self.inner(x).relu()
        self.calls += 1
        if self.question(self, x, task):
            return x + F.linear(hidden, self.out.weight)
        return x + self.out(hidden)


class Net(nn.Module):
    def __init__(self, question: Question) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(Block(question) for _ in range(2))

    def forward(self, x: Tensor, task: Any = None) -> Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = block(x, task)
        return self.last(x)


SWITCH = {"on": False}


def flip(model: nn.Module) -> None:
    for module in model.modules():
        if isinstance(module, Block):
            module.flag = True


def switch(_: nn.Module) -> None:
    SWITCH["on"] = True


def export(_: nn.Module) -> None:
    os.environ["TAKE_THE_WEIGHT"] = "1"


QUESTIONS: dict[str, Question] = {
    "device of the input": lambda block, x, _: x.device.type == "cpu",
    "device of a weight": lambda block, x, _: block.out.weight.device.type == "cpu",
    "not on meta": lambda block, x, _: not x.is_meta,
    "not a fake tensor": lambda block, x, _: not is_fake(x),
    "no dispatch mode": lambda block, x, _: _get_current_dispatch_mode() is None,
    "more than 64 tokens in a row": lambda block, x, _: x.shape[1] > 64,
    "more than 100 tokens in all": lambda block, x, _: x.shape[0] * x.shape[1] > 100,
    "tokens divide by 16": lambda block, x, _: x.shape[1] % 16 == 0,
    "more than 20 rows": lambda block, x, _: len(x) > 20,
    "attribute": lambda block, x, _: block.flag,
    "global flag": lambda block, x, _: SWITCH["on"],
    "environment variable": lambda block, x, _: "TAKE_THE_WEIGHT" in os.environ,
    "counter of calls": lambda block, x, _: block.calls > 1,
    "no gradients": lambda block, x, _: not torch.is_grad_enabled(),
    "autocast": lambda block, x, _: torch.is_autocast_enabled("cpu"),
    "dtype": lambda block, x, _: x.dtype == torch.float64,
    "task": lambda block, x, task: task == 3,
    "strength": lambda block, x, task: task is not None and task > 0.5,
    "no tracing": lambda block, x, _: (
        not torch.jit.is_tracing() and not torch.compiler.is_compiling() and not is_fake(x)
    ),
    "no accelerator": lambda block, x, _: not torch.cuda.is_available(),
}
SIZES = {
    "more than 64 tokens in a row": (2, 80),
    "more than 100 tokens in all": (3, 40),
    "tokens divide by 16": (2, 32),
    "more than 20 rows": (21, 5),
}
CHANGES: dict[str, Callable[[nn.Module], None]] = {
    "attribute": flip,
    "global flag": switch,
    "environment variable": export,
}
TASKS = {"task": (2, 3), "strength": (0.1, 0.9)}


def outcomes(rank: int, size: int) -> dict[str, str]:
    return {name: outcome(name, question) for name, question in QUESTIONS.items()}


def outcome(name: str, question: Question) -> str:
    SWITCH["on"] = False
    os.environ.pop("TAKE_THE_WEIGHT", None)
    torch.manual_seed(0)
    whole = Net(question)
    local = copy.deepcopy(whole)
    first, *_ = tasks = TASKS.get(name, (None, None))
    example = (torch.zeros(3, 7, WIDTH), *([first] if name in TASKS else []))
    parallelize(local, dist.group.WORLD, example_inputs=example, plan_cache=False)
    generator = torch.Generator().manual_seed(1)
    try:
        for step, task in enumerate(tasks):
            given = (torch.randn(*((2, 7) if step == 0 else SIZES.get(name, (2, 7))), WIDTH, generator=generator),)
            given += (task,) if name in TASKS else ()
            for model in (whole, local):
                model.zero_grad()
                if step and name in CHANGES:
                    CHANGES[name](model)
            with torch.autocast("cpu", torch.bfloat16, enabled=bool(name == "autocast" and step)):
                results = [model(*given) for model in (whole, local)]
                if name == "no gradients":
                    with torch.no_grad():
                        results = [model(*given) for model in (whole, local)]
            torch.testing.assert_close(results[1], results[0], rtol=1e-4, atol=1e-4 if name != "autocast" else 3e-2)
            if results[0].requires_grad:
                for result in results:
                    result.float().square().mean().backward()
                found = full_gradients(local)
                for key, parameter in whole.named_parameters():
                    if name != "autocast":
                        torch.testing.assert_close(found[key], parameter.grad, rtol=1e-4, atol=1e-6)
    except (UnprovedCall, UnseenPath) as error:
        return str(error)
    except AssertionError as error:
        return f"WRONG {str(error)[:100]}"
    return "exact"


@pytest.mark.parametrize("ranks", [2, 3])
def test_no_path_is_silently_wrong(ranks: int) -> None:
    for found in run_ranks(outcomes, ranks):
        for name, what in found.items():
            print(name, ":", what)
        assert not [name for name, what in found.items() if what.startswith("WRONG")]
