"""Layers of kernels from the Hub and Liger's losses in a parallel model: what one process computes, or an error."""

from __future__ import annotations

import copy
from collections.abc import Callable
from types import MethodType
from typing import Any

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

EXACT = 1e-6


def llama() -> Any:
    model = tiny_model("llama", num_hidden_layers=1)
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
    plain = llama()
    divided(plain)
    model = llama().train()
    model.set_use_kernels(True)
    model.use_kernels = False
    whole, far = divided(model)
    assert model.autotp.plan.communication == plain.autotp.plan.communication
    assert model.autotp.plan.opaque == ()
    assert "LigerRMSNorm" in str(model.model.norm.forward)
    for one in (whole.eval(), model.eval()):
        assert "LigerSwiGLUMLP" in str(one.model.layers[0].mlp.forward)
    batch = token_batch(1)
    with torch.no_grad():
        evaluated = float((whole(**batch).logits - model(**batch).logits.full()).abs().max())
    return {"far": far, "evaluated": evaluated}


def kernels_changed_later() -> dict[str, Any]:
    """By transformers when the mode changes, and by the user."""
    model = llama().train()
    model.set_use_kernels(True)
    _, far = divided(model)
    model.eval()  # there is no kernel for the MLP in evaluation
    by_mode = message(lambda: model(**token_batch(0)))
    model.train()
    model(**token_batch(0))  # as it was proved
    other = llama().train()
    divided(other)
    other.set_use_kernels(True)
    return {"far": far, "by mode": by_mode, "by user": message(lambda: other(**token_batch(0)))}


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


def liger_loss(fused: bool, reduction: str, smoothing: float) -> Callable[..., Any]:
    """The forward of a causal language model with a loss of Liger's."""

    def forward(self: Any, input_ids: Tensor, labels: Tensor) -> CausalLMOutput:
        hidden = self.model(input_ids=input_ids)[0]
        targets = F.pad(labels, (0, 1), value=-100)[:, 1:].flatten()
        if fused:
            options = None, None, -100, 0.0, smoothing, reduction
            given = hidden.flatten(0, 1), self.lm_head.weight, targets, *options
            return CausalLMOutput(loss=hub.LigerFusedLinearCrossEntropyFunction.apply(*given)[0].sum())
        logits = self.lm_head(hidden)
        options = None, -100, 0.0, smoothing, reduction
        loss = hub.LigerCrossEntropyFunction.apply(logits.flatten(0, 1), targets, *options)[0]
        return CausalLMOutput(loss=loss.sum(), logits=logits)

    return forward


def liger_losses() -> dict[str, Any]:
    hub.install_liger()
    far = 0.0
    for fused, reduction, smoothing in ((True, "mean", 0.1), (True, "none", 0.0), (False, "sum", 0.1)):
        model = llama()
        model.forward = MethodType(liger_loss(fused, reduction, smoothing), model)
        scale = 1.0 if reduction == "mean" else 30.0
        far = max(far, divided(model)[1] / scale)
        assert model.autotp.plan.opaque == ()
    return {"far": far}


class ReadsMemory(torch.autograd.Function):
    """A kernel on the logits that a model returned: Triton asks every tensor for its address."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor) -> Tensor:
        logits.data_ptr()
        return logits.new_zeros(())

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> None:
        return None


def kernel_on_logits() -> dict[str, Any]:
    model = llama()
    _, far = divided(model)
    logits = model(**token_batch(0)).logits
    ReadsMemory.apply(logits.full())
    return {"far": far, "refused": message(lambda: ReadsMemory.apply(logits))}


CASES = {
    case.__name__: case
    for case in (
        kernels_for_training, kernels_changed_later, undeclared_kernel, tiled_layers, liger_losses, kernel_on_logits
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


@pytest.mark.parametrize("ranks", [2, 3])
def test_kernels_that_transformers_switches_on(ranks: int) -> None:
    for found in run_ranks(run_all, ranks):
        assert {name: case["far"] for name, case in found.items() if case["far"] > EXACT} == {}
        assert found["kernels_for_training"]["evaluated"] < EXACT
        changed = found["kernels_changed_later"]
        assert "the forward of model.layers.0.mlp was replaced by LlamaMLP.forward" in changed["by mode"]
        assert "the forward of model.norm was replaced by LigerRMSNorm.forward" in changed["by user"]
        for said in (changed["by mode"], changed["by user"]):
            assert "model.use_kernels = False before it is divided" in said
        assert "give it the gathered tensor, logits.full()" in found["kernel_on_logits"]["refused"]
