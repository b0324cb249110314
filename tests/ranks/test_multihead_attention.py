"""``F.multi_head_attention_forward`` is cut by heads, like code of the module that calls it."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.distributed as dist
from distributed import run_ranks
from torch import Tensor, nn

from lightning_autotp import full_gradients, make_plan, parallelize
from lightning_autotp.capture.capture import capture
from lightning_autotp.layouts.types import Shard

HIDDEN, HEADS, LENGTH = 40, 5, 7
"""Heads that neither two nor three ranks divide."""


class Layers(nn.Module):
    """Attention to itself in torch's own layer, then to a source: of the same features, and of other ones."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.TransformerEncoderLayer(HIDDEN, HEADS, 40, dropout=0.0, batch_first=True)
        self.across = nn.MultiheadAttention(HIDDEN, HEADS, bias=False)
        self.others = nn.MultiheadAttention(HIDDEN, HEADS, kdim=10, vdim=10)
        self.head = nn.Linear(HIDDEN, 5)

    def forward(self, x: Tensor, source: Tensor, padding: Tensor | None = None) -> Tensor:
        x = self.encoder(x, src_key_padding_mask=padding).transpose(0, 1)
        found, weights = self.across(x, source, source)
        narrow = source[..., :10]
        return self.head(x + found + self.others(x, narrow, narrow)[0]) + weights.mean()


def model() -> Layers:
    torch.manual_seed(0)
    return Layers()


def batch(seed: int = 1) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(2, LENGTH, HIDDEN, generator=generator), torch.randn(LENGTH, 2, HIDDEN, generator=generator)


def parity(rank: int, ranks: int) -> None:
    original = model()
    padding = torch.zeros(2, LENGTH, dtype=torch.bool)
    padding[1, -2:] = True
    masked = (*batch(), padding)
    with torch.no_grad():  # by the fused kernels, which the parallel model does not use
        evaluated = copy.deepcopy(original).eval()(*masked)
    local = parallelize(copy.deepcopy(original), dist.group.WORLD, example_inputs=(*batch(2), padding))
    switch = []
    local.across.register_forward_pre_hook(lambda *_: switch.append(torch.backends.mha.get_fastpath_enabled()))
    for arguments in (masked, batch()):
        wanted, found = original(*arguments), local(*arguments)
        wanted.square().sum().backward()
        found.square().sum().backward()
        torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-6)
        gradients = full_gradients(local)
        for name, parameter in original.named_parameters():
            assert parameter.grad is not None
            scale = float(parameter.grad.abs().max())
            torch.testing.assert_close(gradients[name], parameter.grad, rtol=0, atol=1e-5 * scale, msg=name)
        original.zero_grad(set_to_none=True)
        local.zero_grad(set_to_none=True)
    compiled = torch.compile(local, backend="aot_eager")
    torch.testing.assert_close(compiled(*masked), original(*masked), rtol=1e-5, atol=1e-6)
    with torch.no_grad():
        torch.testing.assert_close(local.eval()(*masked), evaluated, rtol=1e-5, atol=1e-6)
    assert switch
    assert not any(switch)
    assert torch.backends.mha.get_fastpath_enabled()  # for other models


@pytest.mark.parametrize("ranks", [2, pytest.param(3, marks=pytest.mark.nightly)])
def test_it_trains_and_evaluates_like_one_process(ranks: int) -> None:
    run_ranks(parity, ranks)


def test_it_is_cut_by_heads_and_summed_once() -> None:
    plan, _ = make_plan(model(), 2, example_inputs=batch())
    cut = {p.names[0]: p.layout.dims[0][0] for p in plan.parameters if isinstance(p.layout, Shard)}
    for name in ("encoder.self_attn", "across"):
        assert (cut[f"{name}.in_proj_weight"], cut[f"{name}.out_proj.weight"]) == (0, 1)
    gathered = {change.module for change in plan.conversions if isinstance(change.source, Shard)}
    assert not gathered & {"encoder.self_attn", "across"}  # no weight, for every rank to do all


def test_the_trace_sees_the_calls_inside() -> None:
    graph = capture(model(), batch())
    functions = {call.site.function for call in graph.calls if call.module == "encoder.self_attn"}
    assert {"linear", "view", "scaled_dot_product_attention"} <= functions
    assert "multi_head_attention_forward" not in functions
