"""Attention through kernels: the plan of ``scaled_dot_product_attention``, and what one process computes."""

from __future__ import annotations

import copy
from functools import lru_cache
from typing import Any

import pytest
import torch
import torch.distributed as dist
from distributed import run_ranks
from hub_kernels import install_flash_attention_of_the_hub
from kernel_stand_ins import FLASH_2, install_flash_attention, varlen_attn
from tiny import tiny_model, token_batch
from torch import Tensor
from torch.nn.attention import flex_attention
from transformers import AttentionInterface, AttentionMaskInterface

from lightning_autotp import full_gradients, parallelize

FAMILIES = (
    "llama", "qwen3", "mistral", "gemma3_text", "olmo2", "phi3", "smollm3", "granite", "gpt_neox", "mixtral", "cohere",
    "stablelm",
)  # fmt: skip
KERNELS = ("eager", FLASH_2, "flex_attention", "varlen")
HUB_FLASH = "kernels-community/flash-attn2"
OTHER_NAMES = ("paged|sdpa", HUB_FLASH)
"""For caches of pages, which there are none of in training; and as transformers loads it from the Hub."""
VARLEN = "torch.nn.attention.varlen.varlen_attn"


def attend_in_one_sequence(
    module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Any, scaling: float, **_: Any
) -> tuple[Tensor, None]:
    """An attention function for transformers that calls ``varlen_attn`` with the rows as sequences."""
    rows, _, length, _ = query.shape
    ends = torch.arange(rows + 1, dtype=torch.int32, device=query.device) * length
    packed = [x.transpose(1, 2).flatten(0, 1) for x in (query, key, value)]
    out = torch.nn.attention.varlen.varlen_attn(  # type: ignore[attr-defined]
        *packed, ends, ends, length, length, scale=scaling, window_size=(-1, 0),
        enable_gqa=query.shape[1] != key.shape[1],
    )  # fmt: skip
    return out.unflatten(0, (rows, length)), None


def with_kernels() -> None:
    """Make every kernel runnable on a CPU, in this process."""
    from torch.nn.attention import varlen

    torch.compiler.set_stance("force_eager")
    install_flash_attention()
    install_flash_attention_of_the_hub()
    flex_attention._validate_device = lambda *_: None  # type: ignore[attr-defined]
    varlen.varlen_attn.__code__ = varlen_attn.__code__
    vars(varlen)["flash_attn_varlen_func"] = varlen_attn.__globals__["flash_attn_varlen_func"]
    AttentionInterface.register("varlen", attend_in_one_sequence)
    AttentionMaskInterface.register("varlen", lambda *_, **__: None)


@lru_cache
def batches() -> dict[str, dict[str, Tensor]]:
    """Rows of one length; two sequences in one row; a row that ends early."""
    plain = token_batch(0)
    ids = plain["input_ids"]
    positions = torch.cat([torch.arange(6), torch.arange(11)])[None]
    mask = torch.ones_like(ids)
    mask[0, 10:] = 0
    labels = plain["labels"].masked_fill(mask == 0, -100)
    return {
        "plain": plain,
        "packed": {"input_ids": ids[:1], "labels": plain["labels"][:1], "position_ids": positions},
        "padded": {"input_ids": ids, "labels": labels, "attention_mask": mask},
    }


def trained(family: str, attention: str, batch: dict[str, Tensor]) -> tuple[Any, float]:
    """What is communicated in a step, and how far its gradients are from one process's."""
    model = tiny_model(family)
    if attention == HUB_FLASH:
        model.set_attn_implementation(f"paged|{attention}")
        assert model.config._attn_implementation == attention
    else:
        model.config._attn_implementation = attention
    whole = copy.deepcopy(model)
    parallelize(model, dist.group.WORLD, example_inputs=batch)  # type: ignore[arg-type]
    for one in (whole, model):
        one(**batch).loss.backward()
    gradients = full_gradients(model)
    wanted = {name: p.grad for name, p in whole.named_parameters() if p.grad is not None}
    assert wanted.keys() <= gradients.keys()
    far = max(float((gradients[name] - gradient).abs().max()) for name, gradient in wanted.items())
    return model.autotp.plan.communication, far


def train_families(rank: int, size: int, families: tuple[str, ...]) -> dict[tuple[str, str, str], tuple[Any, float]]:
    with_kernels()
    found = {}
    for family in families:
        for attention in ("sdpa", *KERNELS, *(OTHER_NAMES if family == "llama" else ())):
            found[family, attention, "plain"] = trained(family, attention, batches()["plain"])
    for kind in ("packed", "padded"):
        for attention in ("sdpa", *KERNELS[:-1]):
            found["llama", attention, kind] = trained("llama", attention, batches()[kind])
    return found


NIGHTLY = pytest.mark.nightly


@pytest.mark.parametrize(
    ("ranks", "families"),
    [
        pytest.param(3, ("llama", "gemma3_text"), id="3"),
        pytest.param(2, FAMILIES, id="2-all", marks=NIGHTLY),
        pytest.param(3, FAMILIES, id="3-all", marks=NIGHTLY),
    ],
)
def test_every_kernel_is_divided_as_plain_attention_is(ranks: int, families: tuple[str, ...]) -> None:
    for found in run_ranks(train_families, ranks, families):
        for (family, attention, batch), (communication, far) in found.items():
            assert far < 1e-6, (family, attention, batch)
            assert communication == found[family, "sdpa", batch][0], (family, attention, batch)
