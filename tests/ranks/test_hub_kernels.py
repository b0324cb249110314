"""Layers of kernels from the Hub and Liger's losses in a parallel model: what one process computes, or an error."""

from __future__ import annotations

import copy
from collections.abc import Callable
from types import MethodType
from typing import Any
from unittest import mock

import hub_kernels as hub
import pytest
import torch
import torch.distributed as dist
from distributed import run_ranks
from tiny import tiny_model, token_batch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers.modeling_outputs import CausalLMOutput

from lightning_autotp import full_gradients, parallelize
from lightning_autotp.parallel import VocabParallelLogits

EXACT = 1e-6
SIZES = {
    "num_hidden_layers": 1, "hidden_size": 96, "num_attention_heads": 6, "num_key_value_heads": 3,
    "intermediate_size": 113,
}  # fmt: skip
"""Two ranks share a key head, and have parts of the MLP of two sizes."""


def llama() -> Any:
    model = tiny_model("llama", **SIZES)
    hub.note_functions(model)
    return model


def divided(model: Any) -> tuple[Any, float]:
    """One process's model beside the parallel one, and how far the gradients of a step are from it."""
    whole, batch = copy.deepcopy(model), token_batch(0)
    parallelize(model, dist.group.WORLD, example_inputs=batch)  # type: ignore[arg-type]
    losses = []
    for one in (whole, model):
        losses.append(one(**batch).loss)
        losses[-1].backward()
    assert abs(float(losses[0] - losses[1])) < EXACT * float(losses[0])
    gradients = full_gradients(model)
    wanted = {name: p.grad for name, p in whole.named_parameters() if p.grad is not None}
    assert wanted.keys() <= gradients.keys()
    return whole, max(float((gradients[name] - gradient).abs().max()) for name, gradient in wanted.items())


def message(call: Callable[[], Any]) -> str:
    with pytest.raises(RuntimeError) as error:
        call()
    return str(error.value)


# -- each a model, trained and compared --------------------------------------------------------------------------------


def kernels_for_training() -> dict[str, Any]:
    """Norms, rotary embedding and MLP by kernels while it trains; the model keeps them when it is evaluated."""
    model = llama().train()
    model.set_use_kernels(True)
    model.use_kernels = False
    whole, far = divided(model)
    assert model.autotp.plan.opaque == ()
    assert "LigerRMSNorm" in str(model.model.norm.forward)
    for one in (whole.eval(), model.eval()):
        assert "LigerSwiGLUMLP" in str(one.model.layers[0].mlp.forward)
    batch = token_batch(1)
    with torch.no_grad():
        evaluated = float((whole(**batch).logits - model(**batch).logits.full()).abs().max())
    return {"far": far, "evaluated": evaluated, "communication": model.autotp.plan.communication}


def kernels_changed_later() -> dict[str, Any]:
    """By transformers when the mode changes."""
    model = llama().train()
    model.set_use_kernels(True)
    _, far = divided(model)
    model.eval()  # there is no kernel for the MLP in evaluation
    by_mode = message(lambda: model(**token_batch(0)))
    model.train()
    model(**token_batch(0))  # as it was proved
    return {"far": far, "by mode": by_mode}


class MegaBlocksMLP(nn.Module):
    """A layer whose kernel nobody declared reads the parameters of the modules in it."""

    def forward(self, x: Tensor) -> Any:
        return GatedMLPFunction.apply(x, self.gate_proj.weight, self.up_proj.weight, self.down_proj.weight)


def gated_mlp(x: Tensor, gate: Tensor, up: Tensor, down: Tensor) -> Tensor:
    return F.linear(F.silu(F.linear(x, gate)) * F.linear(x, up), down)


GatedMLPFunction = hub.autograd_function("GatedMLPFunction", gated_mlp)


def undeclared_kernel() -> dict[str, Any]:
    hub.hub_module("kernels-community/megablocks", GatedMLPFunction=GatedMLPFunction)
    model = llama()
    mlp = model.model.layers[0].mlp
    mlp.forward = MethodType(MegaBlocksMLP.forward, mlp)
    _, far = divided(model)
    assert model.autotp.plan.opaque == ("model.layers.0.mlp",)
    return {"far": far}


class TiledFunction(torch.autograd.Function):
    """As Liger's tiled MLP: layers of the model run in parts, and again in the backward pass."""

    @staticmethod
    def forward(ctx: Any, run: Any, module: Any, x: Tensor, tiles: int, *parameters: Tensor) -> Tensor:
        ctx.run, ctx.module, ctx.tiles, ctx.parameters = run, module, tiles, parameters
        ctx.save_for_backward(x)
        with torch.no_grad():
            return torch.cat([run(module, part) for part in x.chunk(tiles, -2)], -2)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        (x,) = ctx.saved_tensors
        found, sums = [], None
        with torch.enable_grad():
            for part, given in zip(x.chunk(ctx.tiles, -2), gradient.chunk(ctx.tiles, -2), strict=True):
                own = part.detach().requires_grad_()
                of_part, *others = torch.autograd.grad(ctx.run(ctx.module, own), [own, *ctx.parameters], given)
                found.append(of_part)
                sums = others if sums is None else [a + b for a, b in zip(sums, others, strict=True)]
        return None, None, torch.cat(found, -2), None, *(sums or ())


class TiledMLP(nn.Module):
    def forward(self, x: Tensor) -> Any:
        def run(module: Any, part: Tensor) -> Any:
            return module.down_proj(F.silu(module.gate_proj(part)) * module.up_proj(part))

        return TiledFunction.apply(run, self, x, 3, *self.parameters())


def tiled_layers() -> dict[str, Any]:
    model = llama()
    mlp = model.model.layers[0].mlp
    mlp.forward = MethodType(TiledMLP.forward, mlp)
    _, far = divided(model)
    assert model.autotp.plan.opaque == ()
    assert model.model.layers[0].mlp.up_proj.weight.shape[0] < model.config.intermediate_size
    return {"far": far}


def with_liger_loss(fused: bool, vocabulary: int, *options: Any, **changes: Any) -> Any:
    """A Llama with a loss of Liger's in training, with options from ``ignore_index`` on, and weights of the classes."""

    def forward(self: Any, input_ids: Tensor, labels: Tensor | None = None) -> CausalLMOutput:
        hidden = self.model(input_ids=input_ids)[0]
        if labels is None:
            return CausalLMOutput(logits=self.lm_head(hidden))
        targets = F.pad(labels, (0, 1), value=-100)[:, 1:].flatten()
        targets = targets.masked_fill(targets == -100, options[0])
        if fused:
            given = hidden.flatten(0, 1), self.lm_head.weight, targets, self.lm_head.bias, self.class_weights
            loss = hub.LigerFusedLinearCrossEntropyFunction.apply(*given, *options)[0]
            return CausalLMOutput(loss=loss.sum())
        logits = self.lm_head(hidden)
        loss = hub.LigerCrossEntropyFunction.apply(logits.flatten(0, 1), targets, self.class_weights, *options)[0]
        return CausalLMOutput(loss=loss.sum(), logits=logits)

    model = tiny_model("llama", num_hidden_layers=1, vocab_size=vocabulary, **changes).train()
    if not model.config.tie_word_embeddings:
        model.lm_head = nn.Linear(model.config.hidden_size, vocabulary)
    model.register_buffer("class_weights", torch.linspace(0.5, 1.5, vocabulary))
    model.forward = MethodType(forward, model)
    return model


def liger_losses() -> dict[str, Any]:
    """Of logits and of hidden states, with a bias and tied: ours run in their place, in training.

    Not where the vocabulary is so small that gathering the head for it costs less.
    """
    hub.install_liger()
    far, remarks = 0.0, []
    for fused, tied, vocabulary, *options in (
        (True, False, 4001, -100, 0.0, 0.1, "mean"),
        (True, True, 4001, 7, 0.0, 0.0, "none", 0.5),
        (False, False, 4001, 7, 0.0, 0.1, "sum", 0.5),
        (True, True, 131, -100, 0.0, 0.0, "mean"),
    ):
        model = with_liger_loss(fused, vocabulary, *options, tie_word_embeddings=tied)
        whole, found = divided(model)
        far = max(far, found / (1.0 if options[3] == "mean" else 30.0))
        assert model.autotp.plan.opaque == ()
        assert model.lm_head.weight.shape[0] < vocabulary
        assert "apply" not in vars(hub.LigerCrossEntropyFunction) | vars(hub.LigerFusedLinearCrossEntropyFunction)
        remarks.append("\n".join(model.autotp.plan.remarks()))
        batch = {"input_ids": token_batch(1)["input_ids"]}
        with torch.no_grad():  # another call, which needs the logits
            logits = model.eval()(**batch).logits
            logits = logits.full() if isinstance(logits, VocabParallelLogits) else logits
            far = max(far, float((whole.eval()(**batch).logits - logits).abs().max()))
    return {"far": far, "remarks": remarks}


def liger_in_torch() -> dict[str, Any]:
    """As Liger has it for transformers' models that compute their logits: in the place of ``F.cross_entropy``."""
    hub.install_liger()
    with mock.patch.object(F, "cross_entropy", hub.liger_cross_entropy):
        model = tiny_model("llama", num_hidden_layers=1, vocab_size=4001)
        _, far = divided(model)
    assert model.lm_head.weight.shape[0] < 4001
    return {"far": far, "remarks": "\n".join(model.autotp.plan.remarks())}


class ReadsMemory(torch.autograd.Function):
    """A kernel on the logits that a model returned: Triton asks every tensor for its address."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor) -> Tensor:
        logits.data_ptr()
        return logits.new_zeros(())

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> None:
        return None


def without_kernels() -> dict[str, Any]:
    """Until one is called with the logits, and the user puts others into the model."""
    model = llama().train()
    _, far = divided(model)
    logits = model(**token_batch(0)).logits
    ReadsMemory.apply(logits.full())
    refused = message(lambda: ReadsMemory.apply(logits))
    model.set_use_kernels(True)
    by_user = message(lambda: model(**token_batch(0)))
    return {"far": far, "refused": refused, "by user": by_user, "communication": model.autotp.plan.communication}


CASES = {
    case.__name__: case
    for case in (
        kernels_for_training, kernels_changed_later, undeclared_kernel, tiled_layers, liger_losses, liger_in_torch,
        without_kernels,
    )
}  # fmt: skip


def run_all(rank: int, size: int) -> dict[str, dict[str, Any]]:
    hub.install()
    hub.MAPPING |= {
        (hub.TRAINING, "RMSNorm"): hub.LigerRMSNorm,
        (hub.INFERENCE, "RMSNorm"): hub.LigerRMSNorm,
        (hub.TRAINING, "rotary_pos_emb"): hub.LigerRotary,
        (hub.TRAINING, "SwiGLUMLP"): hub.LigerSwiGLUMLP,
    }
    return {name: case() for name, case in CASES.items()}


@pytest.mark.parametrize("ranks", [2, pytest.param(3, marks=pytest.mark.nightly)])
def test_kernels_that_transformers_switches_on(ranks: int) -> None:
    for found in run_ranks(run_all, ranks):
        assert {name: case["far"] for name, case in found.items() if case["far"] > EXACT} == {}
        assert found["kernels_for_training"]["evaluated"] < EXACT
        assert found["kernels_for_training"]["communication"] == found["without_kernels"]["communication"]
        by_mode, by_user = found["kernels_changed_later"]["by mode"], found["without_kernels"]["by user"]
        assert "the forward of model.layers.0.mlp was replaced by LlamaMLP.forward" in by_mode
        assert "the forward of model.norm was replaced by LigerRMSNorm.forward" in by_user
        for said in (by_mode, by_user):
            assert "model.use_kernels = False before it is divided" in said
        of_hidden_states, tied, of_logits, small = found["liger_losses"]["remarks"]
        for said in (of_hidden_states, tied):
            assert "vocab linear cross-entropy runs in the place of test_hub_kernels:" in said
            assert " LigerFusedLinearCrossEntropyFunction in the model" in said
        assert "in the place of" not in small
        for said in (of_logits, found["liger_in_torch"]["remarks"]):
            assert "vocab cross-entropy of a kernel runs in the place of " in said
            assert "lm_head: its loss is computed a few tokens at a time" in said
        assert "give it the gathered tensor, logits.full()" in found["without_kernels"]["refused"]
