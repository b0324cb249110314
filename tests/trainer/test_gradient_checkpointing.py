"""Activation checkpointing, by the model's own code and by the strategy, against one process without it."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, partial
from typing import Any, NamedTuple
from unittest import mock

import lightning as L
import pytest
import torch
from selected import nightly, selected
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader
from trainer_ranks import run_trainer_ranks
from training import ROWS, Regression, Task, assert_parity, error_of, loader, tiny_config, trainer
from transformers import AutoModelForCausalLM, GPT2Config

from lightning_autotp import AutoTPStrategy, full_state_dict, make_plan, meta_model
from lightning_autotp.building import repeated_blocks
from lightning_autotp.building.repeated_blocks import offload_blocks

STEPS = 2
KINDS: dict[str, dict[str, Any] | None] = {
    "none": None,
    "reentrant": {"use_reentrant": True},
    "not reentrant": {"use_reentrant": False},
    "by the strategy": None,
    "offloaded": None,
    "auto, with room": None,
    "auto, without": None,
    "auto, parameters in host memory": None,
}
OPTIONS: dict[str, Any] = {
    "by the strategy": {"activation_checkpointing": "blocks"},
    "offloaded": {"activation_checkpointing": "offload"},
    "auto, with room": {"activation_checkpointing": "auto", "memory": 1e12},
    "auto, without": {"activation_checkpointing": "auto", "memory": 1.0},
    "auto, parameters in host memory": {"activation_checkpointing": "auto", "memory": 1.0, "cpu_offload": True},
}
RUN_ONCE = "none", "offloaded", "auto, with room"


FAMILIES: dict[str, tuple[str, list[str]]] = {
    "llama": ("model.layers.0.mlp", list(KINDS)),
    "gpt2": ("transformer.h.0.mlp", list(KINDS)[:5]),
    "written by hand": ("layers.0.up", ["none", *list(OPTIONS)[:2]]),
    "branches": ("layers.0.last.1.0", list(KINDS)[:4]),
}
"""A module that runs once in a block, and the ways to checkpoint the model."""

WITHOUT = [(family, "none") for family in FAMILIES]
CASES = [(family, kind) for family, (_, kinds) in FAMILIES.items() for kind in kinds[1:]]
REPEATS = {
    *(("gpt2", kind) for kind in ("reentrant", "by the strategy", "offloaded")),
    ("written by hand", "offloaded"), ("branches", "reentrant"), ("branches", "by the strategy"),
    ("llama", "not reentrant"), ("llama", "auto, without"), ("gpt2", "none"), ("gpt2", "not reentrant"),
}  # fmt: skip
"""For nightly tests: another model in a way in which one or two others are trained daily (a GPT-2 with its dropout, see
test_dropout.py), and no room for what is recomputed without parameters in host memory, as with them."""


class Output(NamedTuple):
    loss: Tensor


class ByHand(nn.Module):
    """A residual network over words, none of Hugging Face's."""

    def __init__(self, block: Callable[[], nn.Module]) -> None:
        super().__init__()
        self.table = nn.Embedding(67, 32)
        self.layers = nn.ModuleList(block() for _ in range(3))
        self.head = nn.Linear(32, 67)

    def forward(self, input_ids: Tensor, labels: Tensor) -> Output:
        x = self.table(input_ids)
        for layer in self.layers:
            x = layer(x, scale=0.5)
        return Output(F.cross_entropy(self.head(x).flatten(0, 1), labels.flatten()))


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(32), nn.Linear(32, 256), nn.Linear(256, 32)

    def forward(self, x: Tensor, scale: float) -> Tensor:
        return x + scale * F.dropout(self.down(F.gelu(self.up(self.norm(x)))), 0.2, self.training)


class Branches(nn.Module):
    """Two branches side by side, whose sum over the ranks is taken once, in code that goes on after it."""

    def __init__(self, checkpointing: dict[str, Any] | None) -> None:
        super().__init__()
        self.checkpointing = checkpointing
        self.norm = nn.LayerNorm(32)
        self.left, self.right, self.last = (nn.ModuleList(perceptron() for _ in range(2)) for _ in range(3))

    def forward(self, x: Tensor, scale: float) -> Tensor:
        for number in range(2):
            if self.checkpointing is None:
                x = self.both(x, scale, number)
            else:
                x = checkpoint(self.both, x, scale, number, **self.checkpointing)
        return x

    def both(self, x: Tensor, scale: float, number: int) -> Tensor:
        y = self.norm(x)
        x = x + (self.left[number](y) + self.right[number](y))
        return x + scale * self.last[number](x.tanh())


def perceptron() -> nn.Module:
    return nn.Sequential(nn.Linear(32, 256), nn.GELU(), nn.Linear(256, 32))


def config(family: str) -> Any:
    """A Llama, and a GPT-2, in which layouts change at calls inside modules."""
    if family == "llama":
        two_layers = tiny_config()
        two_layers.num_hidden_layers = 2
        return two_layers
    return GPT2Config(
        vocab_size=67, n_embd=48, n_head=6, n_layer=2, n_positions=16, attn_pdrop=0.0, resid_pdrop=0.0, embd_pdrop=0.0,
        bos_token_id=1, eos_token_id=2, tie_word_embeddings=False,
    )  # fmt: skip


class Checkpointed(Task):
    """Counts the bytes that the forward pass saves for the backward pass, and how often blocks run."""

    def __init__(self, family: str, kind: str) -> None:
        super().__init__("none", 0.1, "SGD")
        self.family, self.kind = family, kind
        self.seen |= {"saved": 0, "runs": 0}

    def build(self) -> Any:
        if self.family == "written by hand":
            return ByHand(Block)
        if self.family == "branches":
            return ByHand(partial(Branches, KINDS[self.kind]))
        model = AutoModelForCausalLM.from_config(config(self.family))
        if KINDS[self.kind] is not None:
            model.gradient_checkpointing_enable(gradient_checkpointing_kwargs=KINDS[self.kind])
        return model

    def on_train_start(self) -> None:
        super().on_train_start()
        block = self.model.get_submodule(FAMILIES[self.family][0])
        block.register_forward_pre_hook(self.count)  # running again stops before the end

    def count(self, *_: Any) -> None:
        self.seen["runs"] += 1

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        storages: dict[int, int] = {}

        def pack(tensor: Tensor) -> Tensor:
            if not isinstance(tensor, torch.nn.Parameter) and tensor._base is None:
                storages[tensor.data_ptr()] = tensor.nbytes
            return tensor

        with saved_tensors_hooks(pack, lambda tensor: tensor):
            loss = super().training_step(batch, batch_idx)
        self.seen["saved"] = sum(storages.values())
        return loss


def train(family: str, kind: str, devices: int) -> dict[str, Any]:
    L.seed_everything(3, verbose=False)
    task = Checkpointed(family, kind)
    strategy: Any = AutoTPStrategy(**OPTIONS[kind]) if kind in OPTIONS else "autotp"
    trainer(strategy if devices > 1 else "auto", devices, max_steps=STEPS).fit(task, loader())
    task.seen["weights"] = full_state_dict(task) if devices > 1 else task.state_dict()
    return task.seen


def ranks(cases: list[tuple[str, str]]) -> dict[tuple[str, str], Any]:
    seen: dict[tuple[str, str], Any] = {(family, kind): train(family, kind, 2) for family, kind in cases}
    flat = Regression()
    strategy = AutoTPStrategy(activation_checkpointing="blocks", example_inputs=(torch.zeros(2, 6),))
    seen["flat", "by the strategy"] = error_of(trainer(strategy, 2).fit, flat, DataLoader(ROWS, batch_size=4))
    strategy = AutoTPStrategy(activation_checkpointing="auto")
    seen["no limit", "auto"] = error_of(trainer(strategy, 2).fit, Checkpointed("llama", "none"), loader())
    return seen


@pytest.fixture(scope="module")
def two(request: pytest.FixtureRequest) -> list[dict[tuple[str, str], Any]]:
    cases = selected(request, "case")
    without = [(family, "none") for family, _ in cases]
    return run_trainer_ranks(ranks, 2, list(dict.fromkeys([*without, *cases])))


@cache
def alone(family: str) -> dict[str, Any]:
    return train(family, "none", 1)


@pytest.mark.parametrize("case", nightly([*WITHOUT, *CASES], REPEATS))
def test_two_ranks_equal_one_process(case: tuple[str, str], two: list[dict[tuple[str, str], Any]]) -> None:
    family, _ = case
    for seen in two:
        assert_parity(seen[case], alone(family))


@pytest.mark.parametrize("case", nightly(CASES, REPEATS))
def test_blocks_run_again_and_save_less(case: tuple[str, str], two: list[dict[tuple[str, str], Any]]) -> None:
    family, kind = case
    for seen in two:
        plain, checkpointed = seen[family, "none"], seen[family, kind]
        assert plain["runs"] == STEPS
        assert checkpointed["runs"] == (1 if kind in RUN_ONCE else 2) * STEPS
        if kind == "auto, with room":
            assert checkpointed["saved"] >= plain["saved"]  # with memory to spare, more is whole
        else:
            assert 0 < checkpointed["saved"] < plain["saved"] / 2


def test_a_model_without_blocks_is_refused(two: list[dict[tuple[str, str], Any]]) -> None:
    for seen in two:
        said = seen["flat", "by the strategy"]
        assert 'activation_checkpointing="blocks"' in said
        assert "has no list of modules" in said
    with pytest.raises(ValueError, match='must be "blocks", "offload", "auto" or None'):
        AutoTPStrategy(activation_checkpointing="everything")  # type: ignore[arg-type]


def test_a_limit_of_memory_must_be_known(two: list[dict[tuple[str, str], Any]]) -> None:
    for seen in two:
        assert "it is not known how much memory a training step may take (give memory=" in seen["no limit", "auto"]


def test_what_is_offloaded_are_no_parameters() -> None:
    model, packed = ByHand(Block), []

    class Noting(torch.autograd.graph.save_on_cpu):
        def __init__(self, pin_memory: bool) -> None:
            super().__init__(pin_memory)
            pack = self.pack_hook
            self.pack_hook = lambda tensor: packed.append(tensor.data_ptr()) or pack(tensor)

    offload_blocks(model)
    tokens = torch.arange(24).view(2, 12)
    with mock.patch.object(repeated_blocks, "save_on_cpu", Noting):
        model(tokens, tokens).loss.backward()
        count = len(packed)
        model.eval()(tokens, tokens).loss.backward()
    assert count > 3 * 4  # blocks, with an activation for each of their functions
    assert not {parameter.data_ptr() for parameter in model.parameters()} & set(packed)
    assert len(packed) == count


@pytest.mark.parametrize("family", nightly(["llama", "gpt2"], ["llama"]))
def test_planning_sees_through_it(family: str) -> None:
    plans = []
    for options in (KINDS["none"], KINDS["reentrant"], KINDS["not reentrant"]):
        with meta_model():
            model = AutoModelForCausalLM.from_config(config(family))
            if options is not None:
                model.gradient_checkpointing_enable(gradient_checkpointing_kwargs=options)
        plans.append(make_plan(model, 2)[0])
    assert plans[0] == plans[1] == plans[2]
