"""``block.compile(fullgraph=True)``: a block of a local model is one graph, also where layouts change at calls."""

from __future__ import annotations

import inspect
from functools import lru_cache, partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from distributed import run_ranks
from tiny import token_batch
from torch import Tensor, nn
from torch._dynamo.utils import counters
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint
from transformers import AutoConfig, AutoModelForCausalLM

from lightning_autotp import full_gradients, parallelize
from lightning_autotp.applying.changed_calls import CallChanges, CallMismatch, LocalForward
from lightning_autotp.layouts.places import CallSite
from lightning_autotp.ranks.group import TPGroup

GROUPED = {"num_key_value_heads": 2, "intermediate_size": 80}
EXPERTS = {"num_experts_per_tok": 2, "experts_implementation": "grouped_mm"}
NO_DROPOUT = {"hidden_dropout": 0.0, "attention_dropout": 0.0}
SHAPES: dict[str, dict[str, Any]] = {
    "gpt2": {"attn_pdrop": 0.0, "resid_pdrop": 0.0, "embd_pdrop": 0.0},
    "gpt_neox": {**NO_DROPOUT, "intermediate_size": 80},
    "falcon": {"new_decoder_architecture": False, "multi_query": True, "alibi": False},
    "bloom": NO_DROPOUT,
    "opt": {"ffn_dim": 80, "dropout": 0.0, "word_embed_proj_dim": 48},
    "mistral": GROUPED,
    "qwen3": {**GROUPED, "head_dim": 8},
    "gemma2": {**GROUPED, "head_dim": 8},
    "phi": {"intermediate_size": 80},
    "olmo2": GROUPED,
    "cohere": GROUPED,
    "mixtral": {**GROUPED, **EXPERTS, "num_local_experts": 4},
}
CHANGED = {"gpt2", "gpt_neox", "falcon", "bloom", "phi", "olmo2", "cohere"}
"""Those with layouts that change at calls inside a module."""

DAILY = {"falcon"}
"""One with such layouts; blocks without them are compiled in ``tests/trainer/test_compile.py`` every day."""


def model(family: str, dropout: float = 0.0, attention: str | None = None, layers: int = 2) -> nn.Module:
    torch.manual_seed(0)
    shape = {name: dropout if name.endswith("_pdrop") else size for name, size in SHAPES[family].items()}
    config = AutoConfig.for_model(
        family, hidden_size=48, num_hidden_layers=layers, num_attention_heads=6, vocab_size=67,
        max_position_embeddings=32, pad_token_id=0, bos_token_id=1, eos_token_id=2, use_cache=False, **shape,
    )  # fmt: skip
    return AutoModelForCausalLM.from_config(config, attn_implementation=attention)  # type: ignore[no-any-return]


def blocks(model: nn.Module) -> dict[str, nn.Module]:
    (layers,) = [(path, module) for path, module in model.named_modules() if isinstance(module, nn.ModuleList)][:1]
    return {f"{layers[0]}.{name}": block for name, block in layers[1].named_children()}


def step(model: nn.Module) -> dict[str, Tensor]:
    model.zero_grad()
    loss = model(**token_batch(1, vocabulary=67)).loss
    loss.backward()
    if hasattr(model, "autotp"):
        gradients = full_gradients(model)
    else:
        gradients = {name: parameter.grad for name, parameter in model.named_parameters(remove_duplicate=False)}
    return {"loss": loss.detach(), **{name: gradient.clone() for name, gradient in gradients.items()}}


def compiled(rank: int, size: int, families: list[str]) -> dict[str, dict[str, Any]]:
    found = {}
    for family in families:
        torch._dynamo.reset()
        counters.clear()
        local = parallelize(model(family), dist.group.WORLD)  # type: ignore[arg-type]
        for block in blocks(local).values():
            block.compile(fullgraph=True, backend="aot_eager")
        first = step(local)
        assert not counters["stats"]["unique_graphs"]  # it is followed line by line
        found[family] = {
            "first": first,
            "result": step(local),
            "graphs": counters["stats"]["unique_graphs"],
            "breaks": dict(counters["graph_break"]),
            "changed": [path for path, module in local.named_modules() if LocalForward.of(module) is not None],
            "hooked": len([
                conversion for conversion in local.autotp.plan.conversions
                if conversion.module in blocks(local) and conversion.call is None
            ]),
        }  # fmt: skip
    return found


@lru_cache
def two(daily: bool) -> list[dict[str, dict[str, Any]]]:
    return run_ranks(compiled, 2, [family for family in SHAPES if (family in DAILY) == daily])


@pytest.mark.parametrize(
    "family", [pytest.param(family, marks=[] if family in DAILY else pytest.mark.nightly) for family in SHAPES]
)
def test_blocks_are_one_graph_with_one_process_s_numbers(family: str) -> None:
    wanted = step(model(family))
    for ranks in two(family in DAILY):
        seen = ranks[family]
        assert seen["breaks"] == {}
        # All blocks run the same code. A hook of a block itself is called around it, and a graph of its own.
        assert seen["graphs"] == 1 + seen["hooked"]
        assert bool(seen["changed"]) == (family in CHANGED), seen["changed"]
        assert seen["result"].keys() == wanted.keys()
        for name, value in wanted.items():
            exact = {"rtol": 1e-5, "atol": 0.0} if name == "loss" else {"rtol": 1e-4, "atol": 1e-6}
            torch.testing.assert_close(seen["result"][name], value, **exact)
            torch.testing.assert_close(seen["first"][name], value, **exact)


def dropping(rank: int, size: int, attention: str) -> list[Any]:
    """GPT-2 with dropout, of which every rank drops its own heads' attention weights: compiled and not."""
    local = parallelize(model("gpt2", 0.2, attention, 1), dist.group.WORLD)  # type: ignore[arg-type]
    found = [local.autotp.plan.draws]
    for compiled in (False, True):
        if compiled:
            for block in blocks(local).values():
                block.compile(fullgraph=True, backend="aot_eager")
        for training in (True, False):
            local.train(training)
            step(local)  # the first one after the mode changed is not compiled
            torch.manual_seed(5)
            found.append({**step(local), "after": torch.get_rng_state()})
    return [*found, dict(counters["graph_break"])]


@pytest.mark.nightly
@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_compiled_blocks_draw_the_numbers_that_uncompiled_ones_draw(attention: str) -> None:
    first, second = run_ranks(dropping, 2, attention)
    for draws, drawn, still, compiled, compiled_still, breaks in (first, second):
        assert draws
        assert breaks == {}
        assert torch.equal(still["after"], compiled_still["after"])
        for wanted, found in ((drawn, compiled), (still, compiled_still)):
            for name, value in wanted.items():
                torch.testing.assert_close(found[name], value, rtol=1e-5, atol=1e-7)
    assert not torch.allclose(first[1]["loss"], first[2]["loss"])
    assert torch.equal(first[3]["after"], second[3]["after"])


def test_compiled_code_does_not_draw_in_place() -> None:
    module, line = Dropping(), Dropping.forward.__code__.co_firstlineno + 1
    site = CallSite(__name__, line, "dropout", 0)
    LocalForward(module, "", {site: CallChanges(draws_in=TPGroup("", 0, 2))}).take_over()
    with pytest.raises(Exception, match="Set inplace=False"):
        torch.compile(module, backend="eager", fullgraph=True)(torch.ones(3))


class Dropping(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return F.dropout(x, 0.5, True, True)


class Calling(nn.Module):
    """Makes calls of all kinds: methods, operators from both sides and in place, functions, several on a line."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Identity()

    def forward(self, x: Tensor, without: bool = False) -> Tensor:
        y = self.inner(x + 1) + x.mul(2) + x.mul(3)
        y = y if without else 5 - y
        y /= 4
        y = F.softmax(y @ x, -1)[1:]
        return y.transpose(0, 1) * 2


CALLS = ((1, "add", 1), (1, "mul", 1), (2, "__rsub__", 0), (3, "div_", 0), (4, "matmul", 0), (4, "softmax", 0))
"""Line of the forward, function, and how many-th."""


def changed(*calls: tuple[int, str, int], change: Any = lambda x: x * 1.5) -> nn.Module:
    """The module with changed results of calls."""
    module, first = Calling(), Calling.forward.__code__.co_firstlineno
    sites = {CallSite(__name__, first + line, name, at): CallChanges(results=[(0, change)]) for line, name, at in calls}
    LocalForward(module, "calling", sites).take_over()
    return module


def test_compiled_code_finds_the_calls_that_python_finds() -> None:
    x = torch.arange(9.0).view(3, 3) / 7
    plain = Calling()(x)
    for calls in (*((call,) for call in CALLS), CALLS):
        wanted = changed(*calls)(x)
        assert not torch.allclose(wanted, plain)
        found = torch.compile(changed(*calls), backend="eager", fullgraph=True)(x)
        assert torch.equal(found, wanted)


def test_a_planned_call_that_compiled_code_does_not_make_is_an_error() -> None:
    module = changed(*CALLS)
    x = torch.ones(3, 3)
    with pytest.raises(Exception, match="calling did not make the call"):
        torch.compile(module, backend="eager", fullgraph=True)(x, without=True)
    with pytest.raises(CallMismatch, match="calling did not make the call"):
        torch.compile(module, backend="eager")(x, without=True)


@partial(torch.compile, backend="eager")
def squared(x: Tensor) -> Tensor:
    return (x + 1).square()


class Helped(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = squared(x)
        return y


def test_a_function_that_is_compiled_by_itself_runs_as_it_is_written_where_its_calls_change() -> None:
    module, x = Helped(), torch.ones(3)
    line = inspect.unwrap(squared).__code__.co_firstlineno + 2
    site = CallSite(__name__, line, "square", 0)
    LocalForward(module, "helped", {site: CallChanges(results=[(0, lambda y: y * 3)])}).take_over()
    with torch.compiler.set_stance("force_eager"):  # as the trace of a local model
        assert torch.equal(module(x), 12 * x)
    assert torch.equal(module(x), 12 * x)


class Transposed(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x @ x.T


def test_a_layout_that_changes_at_an_attribute_breaks_the_graph() -> None:
    module, line = Transposed(), Transposed.forward.__code__.co_firstlineno + 1
    site = CallSite(__name__, line, "__get__", 0)
    LocalForward(module, "", {site: CallChanges(results=[(0, lambda transposed: transposed * 3)])}).take_over()
    x = torch.arange(4.0).view(2, 2)

    def block(x: Tensor) -> Tensor:
        result: Tensor = module(x) + 1
        return result

    with pytest.raises(Exception, match="an attribute of a tensor is read"):
        torch.compile(block, backend="eager", fullgraph=True)(x)
    assert torch.equal(torch.compile(block, backend="eager")(x), 3 * x @ x.T + 1)


class Breaking(nn.Module):
    """Breaks the graph in a part of its code that the backward pass runs again."""

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(self.body, x.mul(2), use_reentrant=False)

    def body(self, x: Tensor) -> Tensor:
        x = x.mul(3)
        torch._dynamo.graph_break()
        return x.exp() * x.shape[0]


def test_code_that_breaks_the_graph_runs_outside_of_it() -> None:
    first, sites = Breaking.forward.__code__.co_firstlineno, ((1, "mul"), (4, "mul"), (6, "exp"))

    def step(compiled: bool) -> list[Tensor]:
        module, x = Breaking(), torch.arange(4.0).div(7).requires_grad_()
        changes = CallChanges(results=[(0, lambda result: result * 1.5)])
        at = {CallSite(__name__, first + line, name, 0): changes for line, name in sites}
        LocalForward(module, "", at).take_over()
        for _ in range(2):
            result = (torch.compile(module, backend="eager") if compiled else module)(x)
            result.sum().backward()
        assert x.grad is not None
        return [result, x.grad]

    wanted = step(compiled=False)
    assert torch.equal(wanted[0], 1.5 * 4 * torch.exp(1.5 * 3 * (1.5 * 2 * torch.arange(4.0).div(7))))
    for value, found in zip(wanted, step(compiled=True), strict=True):
        assert torch.equal(value, found)


class Catching(Calling):
    def forward(self, x: Tensor) -> Tensor:
        try:
            x = self.inner(x, x, wrong=x).undefined
        except AttributeError:
            x = x + 1
        return x + 2


def test_code_that_goes_on_after_a_child_has_failed_is_an_error() -> None:
    module = Catching()
    LocalForward(module, "catching", {}).take_over()
    module.inner.forward = lambda *_, **__: torch.ones(1).undefined  # type: ignore[attr-defined,method-assign]
    with pytest.raises(CallMismatch, match=r"catching goes on after a module in it has failed.*keep_whole"):
        module(torch.ones(1))
