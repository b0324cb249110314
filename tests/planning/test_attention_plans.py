"""A model's plan does not depend on what computes its attention: the same cuts, the same collectives."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from kernel_stand_ins import FLASH_2, installed_flash_attention, installed_flex_attention
from selected import nightly
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForMaskedLM

from lightning_autotp import make_plan

HEADS = (
    (4, 4), (4, 2), (4, 1), (5, 5), (5, 1), (6, 3), (6, 2), (7, 7), (8, 4), (8, 2), (8, 1), (9, 3), (10, 2), (12, 12),
    (12, 4), (14, 2), (16, 8),
)  # fmt: skip
"""Of queries and of keys and values, also numbers that nobody divides evenly."""

NO_DROPOUT = {
    "gpt2": {"attn_pdrop": 0.0, "resid_pdrop": 0.0, "embd_pdrop": 0.0},
    "bert": {"attention_probs_dropout_prob": 0.0, "hidden_dropout_prob": 0.0},
}

CASES = [
    *(("llama", *heads, ranks) for heads in HEADS for ranks in (2, 3, 4)),
    *((family, heads, heads, ranks) for family in ("gpt2", "bert") for heads in (4, 12) for ranks in (2, 3)),
]
DAILY = (
    ("llama", 6, 3, 2),  # FlexAttention gets six heads repeated, and a rank's four in groups
    ("llama", 5, 1, 2),  # heads are repeated on one rank, not on the other
    ("llama", 8, 1, 3),  # only ranks repeat heads
    ("llama", 6, 2, 4),  # heads, not features of values, which SDPA could divide, too
    ("gpt2", 4, 4, 2),
    ("bert", 4, 4, 3),
)


@pytest.fixture(scope="module", autouse=True)
def kernels() -> Iterator[None]:
    with installed_flash_attention(), installed_flex_attention():
        yield


def model_of(family: str, queries: int, keys: int) -> Any:
    """A layer with heads of 16 features."""
    config = AutoConfig.for_model(family, vocab_size=131, num_hidden_layers=1, **NO_DROPOUT.get(family, {}))
    config.num_attention_heads, config.hidden_size = queries, 16 * queries
    if family != "gpt2":
        config.intermediate_size = 64 * queries
    if family == "llama":
        config.num_key_value_heads, config.head_dim = keys, 16
    with torch.device("meta"):
        return (AutoModelForMaskedLM if family == "bert" else AutoModelForCausalLM).from_config(config)


def planned(attention: str, family: str, queries: int, keys: int, ranks: int) -> Any:
    """The cuts of parameters, and what is communicated."""
    model = model_of(family, queries, keys).bfloat16()  # GPT-2 calls FlashAttention only so
    model.config._attn_implementation = attention
    ids = torch.zeros(2, 11, dtype=torch.long)
    plan, _ = make_plan(model, ranks, example_inputs={"input_ids": ids, "labels": ids})
    return {parameter.names[0]: str(parameter.layout) for parameter in plan.parameters}, plan.communication


@pytest.mark.parametrize("case", nightly(CASES, [case for case in CASES if case not in DAILY]))
def test_every_attention_has_the_same_plan(case: tuple[str, int, int, int]) -> None:
    found = {attention: planned(attention, *case) for attention in ("sdpa", "eager", "flex_attention", FLASH_2)}
    for attention, (cuts, communication) in found.items():
        assert cuts == found["sdpa"][0], attention
        assert communication == found["sdpa"][1], attention
    assert any(layout.startswith("S(") for name, layout in found["sdpa"][0].items() if "att" in name)
