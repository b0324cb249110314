"""A rehearsal that leaves out blocks says to the byte, and operator by operator, what one of all blocks says; likewise
an optimizer's step of flat parameters."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn
from transformers import AutoConfig

from lightning_autotp import make_plan
from lightning_autotp.building.repeated_blocks import checkpoint_blocks, offload_blocks
from lightning_autotp.capture.capture import language_model_inputs
from lightning_autotp.planning import rehearsal as rehearsals
from lightning_autotp.planning.meter import Meter
from lightning_autotp.planning.rehearsal import (
    OPTIMIZERS,
    Optimizer,
    Precision,
    Rehearsal,
    local_model,
    one_row,
    rehearse,
    with_adapters,
)

HEADS = {"hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16}
MODELS: dict[str, tuple[str, dict[str, Any], int]] = {
    "llama": ("llama", HEADS | {"vocab_size": 128, "num_hidden_layers": 6}, 2),
    "tied": ("llama", HEADS | {"vocab_size": 128, "num_hidden_layers": 5, "tie_word_embeddings": True}, 1),
    "many words": ("llama", HEADS | {"vocab_size": 9000, "num_hidden_layers": 5}, 1),
    "experts": (
        "qwen3_moe",
        HEADS | {"vocab_size": 128, "num_hidden_layers": 6, "num_experts": 4, "num_experts_per_tok": 2,
                 "moe_intermediate_size": 32},
        2,
    ),
    "experts after dense layers": (
        "deepseek_v3",
        {"hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4, "num_key_value_heads": 4,
         "vocab_size": 128, "num_hidden_layers": 6, "first_k_dense_replace": 1, "n_routed_experts": 8, "n_group": 2,
         "topk_group": 1, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "q_lora_rank": 32,
         "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 16, "v_head_dim": 16},
        1,
    ),
    "two kinds of attention": (
        "qwen3_next",
        HEADS | {"vocab_size": 128, "num_hidden_layers": 11, "num_experts": 4, "num_experts_per_tok": 2,
                 "moe_intermediate_size": 32, "shared_expert_intermediate_size": 32, "linear_num_key_heads": 2,
                 "linear_num_value_heads": 4, "linear_key_head_dim": 8, "linear_value_head_dim": 8,
                 "layer_types": [*["linear_attention", "full_attention"] * 5, "linear_attention"]},
        2,
    ),
    "encoder and decoder": (
        "t5",
        {"d_model": 64, "d_kv": 16, "d_ff": 96, "num_layers": 6, "num_heads": 4, "vocab_size": 128, "dropout_rate": 0.0,
         "decoder_start_token_id": 0, "pad_token_id": 0, "is_encoder_decoder": True},
        2,
    ),
}  # fmt: skip
"""Model type, sizes, and how many blocks are left out."""


def built(name: str) -> nn.Module:
    family, sizes, _ = MODELS[name]
    kind = "AutoModelForSeq2SeqLM" if family == "t5" else "AutoModelForCausalLM"
    with torch.device("meta"):
        model: nn.Module = getattr(transformers, kind).from_config(AutoConfig.for_model(family, **sizes))
    return model


def compare(local: nn.Module, row: dict[str, Any], precision: Precision, monkeypatch: pytest.MonkeyPatch) -> Rehearsal:
    """Rehearse with few blocks and with all, and compare all that is said; the first of them."""
    found = rehearse(local, row, precision=precision)
    monkeypatch.setattr(rehearsals, "repeats_of", lambda model: [])
    whole = rehearse(local, row, precision=precision)
    assert whole.left_out == 0
    for field in fields(Rehearsal):
        if field.name != "left_out":
            assert getattr(found, field.name) == getattr(whole, field.name), field.name
    return found


def row_of(model: nn.Module) -> dict[str, Any]:
    return one_row(model, language_model_inputs(model), 48)


@pytest.mark.parametrize(
    ("name", "kept", "ranks", "sequence_parallel", "precision"),
    [
        pytest.param(*("llama", None, 1, False, "bf16-mixed"), marks=pytest.mark.nightly),
        pytest.param(*("llama", "blocks", 1, False, "bf16-mixed"), marks=pytest.mark.nightly),
        pytest.param(*("llama", "offload", 1, False, "bf16-mixed"), marks=pytest.mark.nightly),
        pytest.param(*("llama", None, 2, True, "bf16-mixed"), marks=pytest.mark.nightly),
        pytest.param(*("llama", "blocks", 2, True, "bf16-true"), marks=pytest.mark.nightly),
        pytest.param(*("llama", "offload", 2, False, "32-true"), marks=pytest.mark.nightly),
        ("llama", "offload", 2, True, "bf16-mixed"),
        ("tied", None, 2, False, "bf16-mixed"),
        ("many words", None, 2, False, "bf16-mixed"),
        pytest.param(*("experts", None, 2, True, "bf16-mixed"), marks=pytest.mark.nightly),
        pytest.param(*("experts", "blocks", 1, False, "bf16-mixed"), marks=pytest.mark.nightly),
        ("experts after dense layers", None, 2, False, "bf16-mixed"),
        pytest.param(*("experts after dense layers", "blocks", 1, False, "bf16-true"), marks=pytest.mark.nightly),
        pytest.param(*("two kinds of attention", None, 1, False, "bf16-mixed"), marks=pytest.mark.nightly),
        ("two kinds of attention", "blocks", 1, False, "32-true"),
        ("encoder and decoder", None, 2, False, "bf16-mixed"),
        pytest.param(*("encoder and decoder", None, 1, False, "bf16-mixed"), marks=pytest.mark.nightly),
        pytest.param(*("encoder and decoder", "blocks", 1, False, "32-true"), marks=pytest.mark.nightly),
    ],
)
def test_blocks_that_are_alike_are_left_out(
    name: str,
    kept: str | None,
    ranks: int,
    sequence_parallel: bool,
    precision: Precision,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = rehearsals.as_trained(built(name), precision)
    plan = make_plan(model, ranks, sequence_parallel=sequence_parallel)[0] if ranks > 1 else None
    local = local_model(model, plan)
    if kept is not None:
        {"blocks": checkpoint_blocks, "offload": offload_blocks}[kept](local)
    left_out = MODELS[name][2]
    if name == "encoder and decoder" and ranks > 1:  # products of what the encoder gives begin outside of the blocks
        left_out = 0
    known = rehearse(local, row_of(model), precision=precision, are_alike=True) if left_out else None
    found = compare(local, row_of(model), precision, monkeypatch)
    assert found.left_out == left_out
    assert known in (None, found), "also if it is known that they are alike"


def test_adapters_are_left_out_with_their_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    model = built("llama")
    local = local_model(with_adapters(model, "bf16-true", 4), None)
    assert compare(local, row_of(model), "bf16-true", monkeypatch).left_out == 2


class Block(nn.Module):
    """One of several, which does something of its own."""

    def __init__(self, number: int, odd: int, how: str) -> None:
        super().__init__()
        self.linear, self.number, self.odd, self.how = nn.Linear(8, 8), number, odd, how

    def forward(self, x: Tensor, seen: list[Tensor]) -> Tensor:
        """``[batch, 8]``, twice."""
        y: Tensor = self.linear(x)
        if self.how == "all are used later":
            seen.append(y)
        if self.number != self.odd:
            return x + y.relu()
        if self.how == "one more operator":
            return x + y.exp().relu()
        return x + (y.detach() if self.how == "another gradient" else y).relu()


class Output:
    """What has a loss."""

    def __init__(self, loss: Tensor) -> None:
        self.loss = loss


class Stack(nn.Module):
    """Ten blocks that look alike."""

    def __init__(self, odd: int, how: str) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(number, odd, how) for number in range(10))
        self.how = how

    def forward(self, x: Tensor) -> Output:
        """``[batch, 8]``."""
        seen: list[Tensor] = []
        for block in self.blocks:
            x = block(x, seen)
            if self.how == "something between":
                x = x * 2
        if self.how == "one runs twice":
            x = self.blocks[5](x, seen)
        return Output(x.sum() + sum(y.mean() for y in seen))


@pytest.mark.parametrize("odd", [1, 2, 3, 6, 9])
@pytest.mark.parametrize("how", ["one more operator", "another gradient"])
def test_one_that_is_not_alike_is_seen(how: str, odd: int, monkeypatch: pytest.MonkeyPatch) -> None:
    left_out = compare(Stack(odd, how), {"x": torch.ones(2, 8)}, "32-true", monkeypatch).left_out
    assert left_out == (6 if (how, odd) == ("one more operator", 9) else 0)  # the last one runs


@pytest.mark.parametrize("how", ["all are used later", "something between", "one runs twice"])
def test_where_blocks_are_not_one_after_the_other_all_run(how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert compare(Stack(-1, how), {"x": torch.ones(2, 8)}, "32-true", monkeypatch).left_out == 0


def test_of_blocks_that_are_alike_six_are_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    assert compare(Stack(-1, "alike"), {"x": torch.ones(2, 8)}, "32-true", monkeypatch).left_out == 6


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_the_optimizer_s_step_is_that_of_all_parameters(optimizer: Optimizer) -> None:
    """It is rehearsed with one flat parameter of each dtype."""
    shapes, dtypes = [(3, 4), (5,), (2, 3, 2), (7,)], [torch.float32, torch.bfloat16, torch.bfloat16, torch.float32]
    several = [nn.Parameter(torch.zeros(*pair[0], dtype=pair[1])) for pair in zip(shapes, dtypes, strict=True)]

    class Summed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.parts = nn.ParameterList(several)

        def forward(self, x: Tensor) -> Tensor:
            """A number."""
            return x.sum() * torch.stack([part.float().sum() for part in self.parts]).sum()

    said = rehearse(Summed(), {"x": torch.ones(2)}, precision="32-true", optimizer=optimizer)
    for parameter in several:
        parameter.grad = torch.ones_like(parameter)
    meter = Meter(nn.ParameterList(several))
    meter.label([parameter.grad for parameter in several if parameter.grad is not None], "gradients")
    stepping = OPTIMIZERS[optimizer](several)
    with meter:
        stepping.step()
    states = [leaf for state in stepping.state.values() for leaf in state.values() if isinstance(leaf, Tensor)]
    assert said.states == sum(state.numel() * state.itemsize for state in states)
    most = meter.held.peak_without_gradients
    counted = sum(state.numel() * state.itemsize for state in states if state.dim())  # numbers of steps are not
    assert said.update == most["other"] + most["copies"] - counted
    assert said.update_work.others.bytes == pytest.approx(meter.work.others.bytes, abs=100)
