"""Models whose code takes another path than in the trace: what they compute is right, or an error on every rank.

Each block asks something, and where the answer is yes takes the weight of its output layer itself, as fused code does.
"""

from __future__ import annotations

import contextlib
import copy
import itertools
import os
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.overrides
from adapted import LINEARS
from distributed import run_ranks
from peft import LoraConfig, get_peft_model
from tiny import tiny_model, token_batch
from torch import Tensor, nn
from torch._dynamo.utils import counters
from torch._subclasses.fake_tensor import is_fake
from torch.distributed.device_mesh import init_device_mesh
from torch.nn import functional as F
from torch.utils._python_dispatch import _get_current_dispatch_mode
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoModelForCausalLM, BitsAndBytesConfig

from lightning_autotp import (
    UnprovedCall,
    UnseenPath,
    declare,
    full_gradients,
    full_state_dict,
    load_full_state_dict,
    meta_model,
    parallelize,
)
from lightning_autotp.guard.bypassed import BypassedLayer
from lightning_autotp.guard.compared import DifferentOnRanks

WIDTH = 16
SWITCH = {"on": False}
Question = Callable[["Block", Tensor, Any], bool]


class Block(nn.Module):
    flag = False

    def __init__(self, question: Question) -> None:
        super().__init__()
        self.inner, self.out = nn.Linear(WIDTH, 36, bias=False), nn.Linear(36, WIDTH, bias=False)
        self.question, self.calls = question, 0
        self.has_gpu, self.is_on_gpu = torch.cuda.is_available(), self.out.weight.is_cuda
        self.flags, self.options = ["first"], {"flag": False}

    def forward(self, x: Tensor, task: Any = None) -> Tensor:
        hidden = self.inner(x).relu()
        if self.question(self, x, task):
            return x + F.linear(hidden, self.out.weight)
        return x + self.out(hidden)

    def count(self) -> int:
        self.calls += 1
        return self.calls


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

    def flip(self) -> None:
        for block in self.blocks:
            block.flag = block.options["flag"] = True
            block.flags.append("second")


TRACED: dict[str, Question] = {
    "device of the input": lambda block, x, _: x.device.type == "cpu",
    "device of a weight": lambda block, x, _: block.out.weight.device.type == "cpu",
    "not on meta": lambda block, x, _: not x.is_meta,
    "no accelerator": lambda block, x, _: not torch.cuda.is_available(),
    "no accelerator as it was made": lambda block, x, _: not block.has_gpu,
    "input on no GPU": lambda block, x, _: not x.is_cuda,
    "weight on no GPU": lambda block, x, _: not block.out.weight.is_cuda,
    "weight on no GPU as it was made": lambda block, x, _: not block.is_on_gpu,
    "dtype": lambda block, x, _: x.dtype == torch.float64,
}
"""In a trace the answer is that of the run."""

TOGETHER: dict[str, Question] = {
    "all of these": lambda block, x, task: all(
        asked(block, x, task) is (name != "dtype") for name, asked in TRACED.items()
    ),
}
"""All of them in one model."""

KINDS: dict[str, Question] = {
    "more than 64 tokens in a row": lambda block, x, _: x.shape[1] > 64,
    "more than 100 tokens in all": lambda block, x, _: x.shape[0] * x.shape[1] > 100,
    "tokens divide by 16": lambda block, x, _: x.shape[1] % 16 == 0,
    "more than 20 rows": lambda block, x, _: len(x) > 20,
    "attribute": lambda block, x, _: block.flag,
    "attribute that is a list": lambda block, x, _: "second" in block.flags,
    "attribute that is a mapping": lambda block, x, _: block.options["flag"],
    "counter of calls": lambda block, x, _: block.count() > 1,
    "no gradients": lambda block, x, _: not torch.is_grad_enabled(),
    "autocast": lambda block, x, _: torch.is_autocast_enabled("cpu"),
    "a length between others": lambda block, x, _: x.shape[1] == 37,
    "a length that leaves a rest": lambda block, x, _: x.shape[1] % 7 == 6,
    "late: a length": lambda block, x, _: x.shape[1] == 37,
    "late: a length of what is computed": lambda block, x, _: block.inner(x)[:, 1:].flatten(0, 1).shape[0] == 74,
    "late: elements that leave a rest": lambda block, x, _: x.numel() // WIDTH % 21 == 8,
    "late: rows": lambda block, x, _: len(block.inner(x).split(8)[0]) == 4,
    "a single row": lambda block, x, _: x.shape[0] == 1,
    "task": lambda block, x, task: task == 3,
    "task in a mapping": lambda block, x, task: task["task"] == 3,
    "task in a list": lambda block, x, task: task[0] == 3,
    "task in a structure": lambda block, x, task: task.task == 3,
    "task that is computed with": lambda block, x, task: task // 2 + 1 == 15,
    "task of many": lambda block, x, task: task == 29,
    "strength": lambda block, x, task: task > 0.5,
    "strength of many": lambda block, x, task: 1 - task < 0.5,
}
"""The last call is of another kind, or its sizes are: it is traced."""

FOLLOWED: dict[str, Question] = {
    "not a fake tensor": lambda block, x, _: not is_fake(x),
    "no dispatch mode": lambda block, x, _: _get_current_dispatch_mode() is None,
    "not traced": lambda block, x, _: not (is_fake(x) or torch.jit.is_tracing() or torch.compiler.is_compiling()),
}
"""No trace shows that the first call goes another way, but it is followed."""

UNSEEN: dict[str, Question] = {
    "global flag": lambda block, x, _: SWITCH["on"],
    "environment variable": lambda block, x, _: "TAKE_THE_WEIGHT" in os.environ,
}
"""No trace shows that the second call goes another way."""

WITHOUT_GRADIENTS: dict[str, Question] = {f"{name}, without gradients": asked for name, asked in UNSEEN.items()}
"""The same where no gradient shows that a weight was used."""

COMPILED: dict[str, Question] = {
    "compiled": lambda block, x, _: torch.compiler.is_compiling(),
    "compiled later": lambda block, x, _: torch.compiler.is_compiling(),
}
"""The compiler answers otherwise than a trace, which is told so."""

COMPILED_ALIKE: dict[str, Question] = {
    "compiled, of no consequence": lambda block, x, _: torch.compiler.is_compiling() and block.flag,
}
"""With both answers the code goes the same way."""


ASKED = TRACED | TOGETHER | KINDS | FOLLOWED | UNSEEN | WITHOUT_GRADIENTS | COMPILED | COMPILED_ALIKE
REPEATS = {
    *TRACED, "late: a length", "late: elements that leave a rest", "late: rows", "task of many", "not traced",
    "environment variable", "global flag, without gradients",
}  # fmt: skip
"""What others ask in the same way."""


@dataclass
class Options:
    task: int


LATE = [
    (2, 7),
    (2, 80),
    (5, 64),
    *[(rows, 2 * tokens) for tokens in (8, *range(11, 19), 20, 22) for rows in (5, 2)] * 2,
]
"""Calls of more sizes than are traced one by one, and the first of them again."""
LATE += LATE[: 49 - len(LATE)]

SHAPES: dict[str, list[tuple[int, int]]] = {
    "more than 64 tokens in a row": [(2, 7), (2, 80)],
    "more than 100 tokens in all": [(2, 7), (3, 40)],
    "tokens divide by 16": [(2, 7), (2, 32)],
    "more than 20 rows": [(2, 7), (21, 5)],
    "a length between others": [(2, 7), (2, 80), (2, 37)],
    "a length that leaves a rest": [(2, 7), (2, 80), (2, 36), (2, 41)],
    "late: a length": [*LATE, (2, 37)],
    "late: a length of what is computed": [*LATE, (2, 38)],
    "late: elements that leave a rest": [*LATE, (2, 46)],
    "late: rows": [*LATE, (4, 20)],
    "a single row": [(2, 7), (1, 7)],
}
"""Rows and tokens of each call; two of them where nothing is said."""

TASKS: dict[str, list[Any]] = {
    "task": [2, 3],
    "task in a mapping": [{"task": 2}, {"task": 3}],
    "task in a list": [[2], [3]],
    "task in a structure": [Options(2), Options(3)],
    "task that is computed with": [*range(1, 29)],
    "task of many": [*range(1, 30)],
    "strength": [0.1, 0.9],
    "strength of many": [0.02 * number for number in range(27)],
}
"""What each call is given besides."""


def number_of_steps(name: str) -> int:
    return len(TASKS.get(name) or SHAPES.get(name) or range(2))


def steps(name: str, question: Question) -> Iterator[None]:
    """Steps of training, compared with one process; what is asked for changes before the last."""
    SWITCH["on"] = False
    os.environ.pop("TAKE_THE_WEIGHT", None)
    torch.manual_seed(0)
    whole = Net(question)
    local = copy.deepcopy(whole)
    tasks, shapes = TASKS.get(name, []), SHAPES.get(name, [])
    if name in COMPILED_ALIKE or name == "compiled":
        compile_blocks(whole, local)
    parallelize(
        local,
        dist.group.WORLD,  # type: ignore[arg-type]
        example_inputs=(torch.zeros(3, 7, WIDTH), *tasks[:1]),
    )
    if name == "compiled later":
        compile_blocks(whole, local)
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.1) for model in (whole, local)]
    generator = torch.Generator().manual_seed(1)
    for step in range(number_of_steps(name)):
        shape = shapes[step] if shapes else (2, 7)
        given = torch.randn(*shape, WIDTH, generator=generator), *tasks[step : step + 1]
        if step and name.startswith("attribute"):
            whole.flip()
            local.flip()
        if step and name.startswith("global flag"):
            SWITCH["on"] = True
        if step and name.startswith("environment variable"):
            os.environ["TAKE_THE_WEIGHT"] = "1"
        with torch.autocast("cpu", torch.bfloat16, enabled=bool(step and name == "autocast")):
            is_without = name in WITHOUT_GRADIENTS or (step and name == "no gradients")
            with torch.set_grad_enabled(not is_without):
                expected, found = whole(*given), local(*given)
            if not found.requires_grad:
                torch.testing.assert_close(found, expected)
                yield
                continue
            values = found.clone()  # they may be computed late
            for result in (expected, found):
                result.float().square().mean().backward()
        for optimizer in optimizers[::-1]:
            optimizer.step()
        torch.testing.assert_close(values, expected, rtol=1e-4, atol=1e-5)
        gradients = full_gradients(local)
        for key, parameter in whole.named_parameters():
            torch.testing.assert_close(gradients[key], parameter.grad, rtol=1e-4, atol=1e-6)
        for optimizer in optimizers:
            optimizer.zero_grad()
        yield


def compile_blocks(*models: Net) -> None:
    for model in models:
        for block in model.blocks:
            block.compile(backend="eager")


def outcomes(rank: int, size: int, names: list[str]) -> dict[str, tuple[int, str]]:
    """By question, how many steps were right, and the error that ended them."""
    found = {}
    for name in names:
        right, error = 0, ""
        try:
            for _ in steps(name, ASKED[name]):
                right += 1
        except (UnprovedCall, UnseenPath, BypassedLayer, DifferentOnRanks) as caught:
            error = f"{type(caught).__name__}: {caught}"
        found[name] = right, error
    return found


@pytest.mark.parametrize(
    ("ranks", "repeats"), [(2, REPEATS), *(pytest.param(ranks, set(), marks=pytest.mark.nightly) for ranks in (2, 3))]
)
def test_no_path_is_silently_wrong(ranks: int, repeats: set[str]) -> None:
    def asked(questions: dict[str, Question]) -> list[str]:
        return [name for name in questions if name not in repeats]

    for found in run_ranks(outcomes, ranks, asked(ASKED)):
        for name in asked(TRACED | TOGETHER | COMPILED_ALIKE):
            assert found[name] == (2, ""), name
        for name in asked(KINDS):
            right, error = found[name]
            assert right == number_of_steps(name) - 1, name
            assert error.startswith("UnprovedCall: Net is called in another way than it was traced"), name
            assert "blocks.0" in error, name
        for name in asked(FOLLOWED):
            right, error = found[name]
            assert right == 0, name
            assert error.startswith("UnseenPath: the code of blocks.0 does something with a rank's part"), error
            assert "it calls linear at test_other_paths:" in error
        for name in asked(UNSEEN):
            right, error = found[name]
            assert right == 1, name
            assert error.startswith("BypassedLayer: blocks.0.out, blocks.1.out of the parallel Net did not run"), error
            assert "keep_whole=['blocks.0.out', 'blocks.1.out']" in error
        for name in asked(WITHOUT_GRADIENTS):
            right, error = found[name]
            assert right == 1, name
            said = "blocks.0.out, blocks.1.out of the parallel Net did not run in a call without gradients"
            assert error.startswith(f"BypassedLayer: {said}"), error
        for name in asked(COMPILED):
            right, error = found[name]
            assert right == 0, name
            assert error.startswith("UnprovedCall: code of Net asks whether it is compiled"), error
            assert "is_compiling() in blocks.0, blocks.1), and blocks.0, blocks.1 is" in error, error
            assert "in blocks.0 (test_other_paths.py:" in error, error


class NormedBlock(nn.Module):
    """Its tokens are whole between the layers; ``use`` takes weights where the code is not traced.

    Args:
        is_kernel: whether it does so where no torch function is seen, as a kernel does.
        kernel: what runs between the layers before it.
        reentrant: how its activations are computed again, if they are.
    """

    def __init__(
        self,
        use: Callable[[NormedBlock, Tensor, Tensor], Tensor],
        is_kernel: bool = False,
        kernel: Callable[[Tensor], Tensor] = Tensor.sin,
        reentrant: bool | None = None,
    ) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.inner, self.out = nn.Linear(WIDTH, 36, bias=False), nn.Linear(36, WIDTH, bias=False)
        self.use, self.is_kernel, self.kernel, self.reentrant = use, is_kernel, kernel, reentrant

    def forward(self, x: Tensor) -> Tensor:
        if self.reentrant is None:
            return self.run(x)
        again: Tensor = checkpoint(self.run, x, use_reentrant=self.reentrant)
        return again

    def run(self, x: Tensor) -> Tensor:
        normed = self.norm(x)
        hidden = self.kernel(self.inner(normed))
        if is_fake(x) or torch.compiler.is_compiling():
            return x + self.out(hidden.relu())
        with torch._C.DisableTorchFunction() if self.is_kernel else contextlib.nullcontext():
            used = self.use(self, normed, hidden)
        return x + used


def without_sum(block: NormedBlock, normed: Tensor, hidden: Tensor) -> Tensor:
    return F.linear(hidden.relu(), block.out.weight)


def twice(block: NormedBlock, normed: Tensor, hidden: Tensor) -> Tensor:
    """Its layers run, and the weight of one of them is used as well."""
    out: Tensor = block.out((hidden + F.linear(normed, block.inner.weight)).relu())
    return out


def as_traced(block: NormedBlock, normed: Tensor, hidden: Tensor) -> Tensor:
    out: Tensor = block.out(hidden.relu())
    return out


def norm_of_a_part(block: NormedBlock, normed: Tensor, hidden: Tensor) -> Tensor:
    """What it gives is alike on the ranks, after the sum, and wrong."""
    out: Tensor = block.out(hidden.relu() / hidden.norm())
    return out


class Relu(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        y = x.relu()
        ctx.save_for_backward(y)
        return y

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        (y,) = ctx.saved_tensors
        return grad * (y > 0)


def under_a_mode(block: NormedBlock, normed: Tensor, hidden: Tensor) -> Tensor:
    """A mode that sees operators calls them itself, and those of autograd's own."""
    with FlopCounterMode(display=False):
        out: Tensor = block.out(Relu.apply(hidden))
    return out


def switched(block: NormedBlock, normed: Tensor, hidden: Tensor) -> Tensor:
    """As it was traced, until a global flag is set."""
    return (norm_of_a_part if SWITCH["on"] else as_traced)(block, normed, hidden)


USES = as_traced, under_a_mode, without_sum, twice, norm_of_a_part
WAYS = list(itertools.product(USES, (False, True), (False, True)))
"""A use, whether as a kernel, and whether with gradients."""
SOME_WAYS = [
    (as_traced, False, False), (as_traced, True, True), (under_a_mode, False, True), (under_a_mode, True, False),
    (without_sum, False, False), (without_sum, True, True),
    (twice, False, True), (twice, True, False), (twice, True, True), (norm_of_a_part, False, True),
]  # fmt: skip
"""Each use in the ways that differ for it."""


def times(factors: Callable[[Tensor], Tensor]) -> Callable[[NormedBlock, Tensor, Tensor], Tensor]:
    """A use in which the elements of a part are multiplied by others."""

    def use(block: NormedBlock, normed: Tensor, hidden: Tensor) -> Tensor:
        out: Tensor = block.out(hidden.relu() * factors(hidden))
        return out

    return use


def ones_written_by_position(hidden: Tensor) -> Tensor:
    factors = torch.ones(hidden.shape)
    factors[..., :3] = 0.0
    return factors


def ones_written_through_a_view(hidden: Tensor) -> Tensor:
    factors = torch.ones(hidden.shape)
    factors[..., :3].zero_()
    return factors


def norm_among_more(hidden: Tensor) -> Tensor:
    """The part has another number of dims, and is cut along another one of them."""
    return 1.0 / (hidden + torch.zeros(3, 1, 1, 1)).norm()


PLACED: dict[str, Callable[[Tensor], Tensor]] = {
    "positions": lambda hidden: torch.arange(hidden.shape[-1]),
    "positions in its dtype": lambda hidden: torch.arange(hidden.shape[-1]).to(hidden),
    "random numbers": lambda hidden: torch.rand(hidden.shape),
    "a choice by position": lambda hidden: torch.where(torch.arange(hidden.shape[-1]) > 3, hidden, 0.0),
    "ones written by position": ones_written_by_position,
    "ones written through a view": ones_written_through_a_view,
    "a norm among more": norm_among_more,
    "features in pairs": lambda hidden: 1 + 0 * hidden.reshape(*hidden.shape[:2], -1, 2),
    "features in another order": lambda hidden: hidden[..., list(range(hidden.shape[-1]))[::-1]],
}
"""Elementwise with a part, but each rank takes its own positions, random numbers or elements."""


def alike(hidden: Tensor) -> Tensor:
    """The same factor for all elements along the dim that is cut, or the part's own elements."""
    number, one = torch.tensor(2).to(hidden), torch.tensor([2.0])
    twos = (torch.ones(hidden.shape) + torch.full(hidden.shape[-1:], 1.0)).type_as(hidden)
    repeated = torch.tensor(2.0).expand(hidden.shape)
    rows = torch.arange(hidden.shape[1])[:, None]
    own = torch.zeros(hidden.shape).copy_(hidden)
    return own * number * one * twos * repeated * rows


def repeated(block: NormedBlock, normed: Tensor, hidden: Tensor) -> Tensor:
    """Rows are repeated, as code repeats heads, and their mean is taken afterwards."""
    rows, length, width = hidden.shape
    several = hidden[:, None, :, :].expand(rows, 3, length, width).reshape(rows * 3, length, width)
    out: Tensor = block.out(several.relu()).view(rows, 3, length, -1).mean(1)
    return out


RUNS = {"number": 0}


class CountedBlock(nn.Module):
    """Its code counts in a global variable how often it runs, and the fifth time does something else."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.inner, self.out = nn.Linear(WIDTH, 36, bias=False), nn.Linear(36, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        RUNS["number"] += 1
        hidden = self.inner(self.norm(x))
        if RUNS["number"] == 5:
            hidden = hidden / hidden.norm()
        return x + self.out(hidden.relu())


class CountedBlocks(nn.Module):
    """Blocks of which a trace runs the first ones and the last one: it does not see what the fifth one does."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(CountedBlock() for _ in range(7))

    def forward(self, x: Tensor) -> Tensor:
        RUNS["number"] = 0
        for block in self.blocks:
            x = block(x)
        return x


def outcome_of(
    make: Callable[[], nn.Module],
    around: Callable[[], Any] = contextlib.nullcontext,
    prepare: Callable[[nn.Module], Any] = lambda model: None,
    **options: Any,
) -> str:
    """What is said of two such blocks in a model without gradients; without a word they are like in one process.

    Args:
        make: makes a block.
        around: what the model is called within.
        prepare: what is done with the model when it is divided.
        **options: those of ``parallelize``.
    """
    torch.manual_seed(0)
    local = nn.Sequential(nn.Linear(WIDTH, WIDTH), make(), make(), nn.LayerNorm(WIDTH))
    whole, x = copy.deepcopy(local), torch.randn(2, 12, WIDTH)
    parallelize(local, dist.group.WORLD, example_inputs=x, plan_cache=False, **options)  # type: ignore[arg-type]
    prepare(local)
    with around():
        try:
            found = local(x)
        except UnseenPath as error:
            return str(error)
        torch.testing.assert_close(found, whole(x))
    return ""


def declared_kernel(x: Tensor) -> Tensor:
    return x.sin()


def tuned(is_quantized: bool) -> str:
    """What is said of an adapted model whose activation takes the norm of its part."""
    group = dist.group.WORLD
    with tempfile.TemporaryDirectory() as own:
        tiny_model("llama", num_hidden_layers=1, intermediate_size=128).save_pretrained(own)  # on one rank
        folders: list[Any] = [own]
        dist.broadcast_object_list(folders, group=group)
        (folder,) = folders
        options: dict[str, Any] = {}
        if is_quantized:
            options["quantization_config"] = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4")
        with meta_model():
            base = AutoModelForCausalLM.from_pretrained(folder, **options)
            (layer,) = base.model.layers
            layer.mlp.act_fn = NormOfAPart()
            model = get_peft_model(base, LoraConfig(r=4, target_modules=LINEARS, task_type="CAUSAL_LM"))
        parallelize(model, group, plan_cache=False)  # type: ignore[arg-type]
        try:
            model(**token_batch(0))
        except UnseenPath as error:
            return str(error)
    return ""


class Flagged(NormedBlock):
    """What it does is the same whether it is compiled or not, and another thing where a flag is set."""

    def run(self, x: Tensor) -> Tensor:
        normed = self.norm(x)
        hidden = self.inner(normed).sin()
        return x + (norm_of_a_part if SWITCH["on"] else as_traced)(self, normed, hidden)


class Again(nn.Module):
    """Computes what a block does again in the backward pass."""

    def __init__(self, block: nn.Module) -> None:
        super().__init__()
        self.block = block

    def forward(self, x: Tensor) -> Tensor:
        again: Tensor = checkpoint(self.block, x, use_reentrant=False)
        return again


def compile_flagged(model: nn.Module, is_set: bool = True) -> None:
    for block in model.modules():
        if isinstance(block, Flagged):
            block.compile(backend="aot_eager")
    SWITCH["on"] = is_set


def said_of_compiled_blocks() -> str:
    """What is said of the norm of a part. Where there is none, all that is computed is right, and later compiled."""
    SWITCH["on"] = False
    blocks = (Again(Flagged(as_traced)) for _ in range(2))
    local = nn.Sequential(nn.Linear(WIDTH, WIDTH), *blocks, nn.LayerNorm(WIDTH))
    whole, x = copy.deepcopy(local), torch.randn(2, 12, WIDTH)
    parallelize(local, dist.group.WORLD, example_inputs=x, plan_cache=False)  # type: ignore[arg-type]
    compile_flagged(local, False)
    counters.clear()
    for turn in range(2):
        for model in local, whole:
            model.zero_grad()
            (model(x) * x).sum().backward()
        gradients = full_gradients(local)
        for name, parameter in whole.named_parameters():
            torch.testing.assert_close(gradients[name], parameter.grad, rtol=1e-4, atol=1e-6)
        assert bool(counters["stats"]["unique_graphs"]) == (turn == 1)
    said = outcome_of(lambda: Flagged(as_traced), prepare=compile_flagged)
    SWITCH["on"] = False
    return said


class NormOfAPart(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.sin() if is_fake(x) else x.sin() / x.norm()


def said_around(rank: int, size: int) -> dict[str, str]:
    """What is said of the norm of a part, whatever is around it."""
    mesh = init_device_mesh("cpu", (1, size), mesh_dim_names=("data", "tensor"))
    declare(declared_kernel, "x[... d] -> y[... d]")
    said = {
        "nothing": outcome_of(lambda: NormedBlock(norm_of_a_part)),
        "autocast": outcome_of(lambda: NormedBlock(norm_of_a_part), lambda: torch.autocast("cpu", torch.bfloat16)),
        "sequence parallelism": outcome_of(lambda: NormedBlock(norm_of_a_part), sequence_parallel=True),
        "FSDP2": outcome_of(lambda: NormedBlock(norm_of_a_part), data_mesh=mesh["data"]),
        "a declared kernel": outcome_of(lambda: NormedBlock(norm_of_a_part, kernel=declared_kernel)),
        "adapters, of a quantized base where it can be": tuned(is_quantized=find_spec("bitsandbytes") is not None),
        "compiled blocks": said_of_compiled_blocks(),
    }
    for reentrant in (False, True):
        block = partial(NormedBlock, norm_of_a_part, reentrant=reentrant)
        said[f"checkpoints, reentrant={reentrant}"] = outcome_of(block)
    assert outcome_of(lambda: NormedBlock(as_traced, kernel=declared_kernel)) == ""
    return said


def said_of_a_write(rank: int, of: str) -> str:
    """What is said of an optimizer's state of a whole parameter, or its gradient, that ranks have written otherwise."""
    model = nn.Sequential(nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(3 * WIDTH, WIDTH))
    x = torch.randn(2, 7, WIDTH)
    parallelize(model, dist.group.WORLD, example_inputs=x, plan_cache=False)  # type: ignore[arg-type]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    bias = model[1].bias
    if of == "a state":
        optimizer.state[bias]["momentum_buffer"] = torch.full_like(bias.detach(), float(rank))
    (model(x) * x).sum().backward()
    if of == "a gradient":
        bias.grad.mul_(1 + rank)
    try:
        optimizer.step()
    except DifferentOnRanks as error:
        return str(error)
    return ""


def evaluated(model: nn.Module, x: Tensor) -> None:
    model.eval()
    with torch.no_grad():
        model(x)
    model.train()


BETWEEN: dict[str, Callable[[nn.Module, Tensor], object]] = {
    "nothing": lambda model, x: None,
    "an evaluation": evaluated,
    "the state dict of a rank's part": lambda model, x: model.load_state_dict(model.state_dict()),
    "the whole model's": lambda model, x: load_full_state_dict(model, full_state_dict(model)),
}
"""What may come between two steps of training; all but the first begin another stage."""


def said_in_stages(rank: int) -> dict[str, str]:
    """What is said of a global flag that is set between two steps, by what else was in between."""
    said = {}
    for between, run in BETWEEN.items():
        SWITCH["on"] = False
        model = nn.Sequential(nn.Linear(WIDTH, WIDTH), NormedBlock(switched, False))
        x = torch.randn(2, 7, WIDTH)
        parallelize(model, dist.group.WORLD, example_inputs=x)  # type: ignore[arg-type]
        if between == "an evaluation":
            # Compared: ten calls of each kind, and the hundredth of a hundred.
            with mock.patch.object(model.autotp.guard.compared, "begin") as begin:
                for _ in range(100):
                    model(x)
                    evaluated(model, x)
            assert begin.call_count == 22
            model = nn.Sequential(nn.Linear(WIDTH, WIDTH), NormedBlock(switched, False))
            parallelize(model, dist.group.WORLD, example_inputs=x)  # type: ignore[arg-type]
        model(x)
        run(model, x)
        SWITCH["on"] = True
        try:
            model(x)
            said[between] = ""
        except UnseenPath as error:
            said[between] = str(error)
    return said


def put_on(model: nn.Module) -> list[Any]:
    """The hooks of its modules, and the forwards that were put on them."""
    return [
        (vars(module).get("forward"), len(module._forward_hooks), len(module._forward_pre_hooks))
        for module in model.modules()
    ]


Way = tuple[Callable[[NormedBlock, Tensor, Tensor], Tensor], bool, bool]


def said_of(rank: int, size: int, ways: list[Way]) -> dict[tuple[str, bool, bool], str]:
    """What is said of each way to use the weights: as a kernel or not, with gradients or not."""
    said = {}
    for use, is_kernel, with_gradients in ways:
        torch.manual_seed(0)
        blocks = (NormedBlock(use, is_kernel) for _ in range(2))
        model = nn.Sequential(nn.Linear(WIDTH, WIDTH), *blocks, nn.LayerNorm(WIDTH))
        x = torch.randn(2, 7, WIDTH)
        parallelize(model, dist.group.WORLD, example_inputs=x, plan_cache=False)  # type: ignore[arg-type]
        before = put_on(model)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        found = ""
        try:
            with torch.set_grad_enabled(with_gradients):
                loss = (model(x) * x).sum()
            if with_gradients:
                loss.backward()
            optimizer.step()
        except (UnseenPath, DifferentOnRanks) as error:
            found = f"{type(error).__name__}: {error}"
        said[use.__name__, is_kernel, with_gradients] = found
        assert put_on(model) == before
        assert not torch.overrides._get_current_function_mode_stack()
    said |= {(of, True, True): said_of_a_write(rank, of) for of in ("a state", "a gradient")}
    said |= {(between, True, True): found for between, found in said_in_stages(rank).items()}
    for name, factors in PLACED.items():
        said[name, False, False] = outcome_of(partial(NormedBlock, times(factors)))
    said["counted", False, False] = outcome_of(CountedBlocks)
    for transform in (torch.func.grad, torch.func.vmap):
        with pytest.raises(RuntimeError, match=r"is called under a function transform .* create_graph=True"):
            transform(lambda x: model(x[None]).sum())(x)
    for use in times(alike), repeated:
        assert outcome_of(partial(NormedBlock, use)) == ""
    if size == 2:
        said |= {(f"around: {name}", False, False): error for name, error in said_around(rank, size).items()}
    return said


@pytest.mark.parametrize(
    ("ranks", "ways"), [(2, SOME_WAYS), *(pytest.param(ranks, WAYS, marks=pytest.mark.nightly) for ranks in (2, 3))]
)
def test_code_that_no_trace_shows_is_followed_or_compared(ranks: int, ways: list[Way]) -> None:
    functions = {"without_sum": "relu", "twice": "linear", "norm_of_a_part": "norm"}
    for said in run_ranks(said_of, ranks, ways):
        for function, is_kernel, with_gradients in ways:
            use, found = function.__name__, said[function.__name__, is_kernel, with_gradients]
            # Without gradients, a part of a product needs no sum.
            if use in ("as_traced", "under_a_mode") or (use == "twice" and not with_gradients):
                assert found == "", use
            elif not is_kernel:
                assert found.startswith("UnseenPath: the code of 1 does something with a rank's part of a tensor"), use
                assert f"it calls {functions[use]} at test_other_paths:" in found or use == "without_sum", found
            elif use == "without_sum":  # a sum is missing in the forward
                assert "The first is the output of 1 (an input of 1.inner is still alike)" in found
        for name in PLACED:
            assert said[name, False, False].startswith("the code of 1 does something with a rank's part"), name
            assert "it calls" in said[name, False, False], name
            assert "at test_other_paths:" in said[name, False, False], name
        found = said["counted", False, False]
        assert found.startswith("the code of 1.blocks.4 does something with a rank's part of a tensor"), found
        assert "it calls norm at test_other_paths:" in found
        for name, error in said.items():
            if name[0].startswith("around"):
                assert "does something with a rank's part of a tensor that it did not" in error, name
                assert "it calls norm at test_other_paths:" in error, name
        assert "The first is momentum_buffer of 1.bias" in said["a state", True, True]
        assert "The first is the gradient of 1.bias" in said["a gradient", True, True]
        for between in BETWEEN:
            found = said[between, True, True]
            assert ("it calls norm at test_other_paths:" in found) == (between != "nothing"), between
        assert (
            "The first is the gradient of the output of 2.norm (the gradient of the output of 2.out is still"
            in said["twice", True, True]
        )
