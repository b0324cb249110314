"""Kernels that transformers switches on: how they are found, and what is said where they cannot be divided."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Iterator
from types import MethodType
from typing import Any
from unittest import mock

import hub_kernels as hub
import kernel_stand_ins as kernels
import pytest
import stand_ins_of_layers as layers
import torch
from tiny import meta_model, tiny_config, token_batch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import AutoModelForCausalLM
from transformers.modeling_outputs import CausalLMOutput
from transformers.models.llama import modeling_llama

from lightning_autotp import make_plan
from lightning_autotp.capture.capture import CaptureError
from lightning_autotp.capture.fingerprint import fingerprint
from lightning_autotp.layouts.plan import Plan
from lightning_autotp.operators import count_flops
from lightning_autotp.operators.declared import declarable_name, targets
from lightning_autotp.operators.graph import KERNEL_LINEAR_LOSS
from lightning_autotp.pretrained.meta_model import meta_model as without_weights

NORM = "kernels-community/liger-kernels:LigerRMSNormFunction"


@pytest.fixture(autouse=True)
def modules() -> Iterator[None]:
    """What a test imports is gone after it."""
    with mock.patch.dict(sys.modules):
        kernels.module("kernels")
        yield


def found(target: str) -> Any:
    return next((function for made, function in targets() if made.target == target), None)


def reasons(plan: Plan, name: str) -> str:
    """Why a parameter is whole."""
    return "\n".join(reason.why for one in plan.parameters if name in one.names for reason in one.reasons)


@pytest.mark.parametrize("kind", ["kernels", "models"])
def test_functions_are_found_in_the_cache_of_the_hub(kind: str) -> None:
    """Kernels have directories of their own there since huggingface_hub has repositories of this kind."""
    made = hub.hub_module("kernels-community/liger-kernels", LigerRMSNormFunction=hub.LigerRMSNormFunction)
    made.__file__ = str(made.__file__).replace("/kernels--", f"/{kind}--")
    assert found(NORM) is hub.LigerRMSNormFunction
    assert declarable_name(hub.LigerRMSNormFunction) == NORM
    assert found("kernels-community/rmsnorm:RMSNormFunction") is None
    del sys.modules["kernels"]
    assert found(NORM) is None


def test_a_layer_of_a_function_s_name_is_not_the_function() -> None:
    """The layers of ``kernels-community/mamba-ssm`` have the names of what they call."""
    target = "kernels-community/mamba-ssm:selective_scan_fn"
    hub.hub_module("kernels-community/mamba-ssm", selective_scan_fn=type("selective_scan_fn", (nn.Module,), {}))
    assert found(target) is None
    made = hub.hub_module("kernels-community/mamba-ssm", selective_scan_fn=lambda: None)
    assert found(target) is made.selective_scan_fn


# -- what cannot be traced ---------------------------------------------------------------------------------------------


class Net(nn.Module):
    """Two layers around one."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.up, self.inner, self.down = nn.Linear(16, 32), inner, nn.Linear(32, 16)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.inner(self.up(x)))  # type: ignore[no-any-return]


class Norm(nn.Module):
    """A norm that calls a kernel."""

    def __init__(self, kernel: Any) -> None:
        super().__init__()
        self.kernel, self.weight = kernel, nn.Parameter(torch.ones(32))

    def forward(self, x: Tensor) -> Any:
        return self.kernel.apply(x, self.weight, 1e-5)


def test_a_kernel_that_cannot_be_traced_is_named() -> None:
    """So that it can be declared; a layer around it stays whole, as what it was decorated with does not hide it."""
    kernel = hub.autograd_function("OddNormFunction", layers.hub_rms_norm)
    hub.hub_module("someone/odd-kernels", OddNormFunction=kernel)
    plan, _ = make_plan(Net(Norm(kernel)), 2, example_inputs=torch.zeros(3, 16))
    assert plan.opaque == ("inner",)
    why = reasons(plan, "inner.weight")
    assert "its code cannot be traced (RuntimeError: the kernel ran without values)" in why
    assert 'lightning_autotp.declare("someone/odd-kernels:OddNormFunction", ...)' in why


class OnCuda(nn.Module):
    """A layer of Transformer Engine, as far as it comes without CUDA."""

    def __init__(self, is_checked_by: Any = None) -> None:
        super().__init__()
        self.weight, self.check = nn.Parameter(torch.zeros(32, 32)), is_checked_by

    def forward(self, x: Tensor) -> Tensor:
        if self.check is not None:
            return self.check.apply(x, self.weight)  # type: ignore[no-any-return]
        raise RuntimeError("TransformerEngine needs CUDA.")


def needs_cuda(x: Tensor, weight: Tensor) -> Tensor:
    raise RuntimeError("TransformerEngine needs CUDA.")


@pytest.mark.parametrize("in_kernel", [False, True], ids=["in its own code", "in its kernel"])
@pytest.mark.parametrize("layer", ["Linear", "RMSNorm", "LayerNorm"])
def test_layers_of_transformer_engine_are_named_with_what_to_write(layer: str, in_kernel: bool) -> None:
    name = f"transformer_engine.pytorch.module.{layer.lower()}"
    kernel = hub.autograd_function(f"_{layer}", needs_cuda)
    kind = type(layer, (OnCuda,), {"__module__": name})
    kernels.module(name, **{layer: kind, f"_{layer}": kernel})
    kernel.__module__ = name
    with pytest.raises(CaptureError) as error:
        make_plan(Net(kind(kernel if in_kernel else None)), 2, example_inputs=torch.zeros(3, 16))
    said = str(error.value)
    assert "in module  -> inner\n" in said
    assert f"{name}.{'_' * in_kernel}{layer}: use torch.nn's layers (Linear, RMSNorm, LayerNorm)" in said
    assert "convert_to_float8_training" in said
    assert ".item()" not in said


def test_attention_for_a_cache_of_pages_says_what_to_use() -> None:
    model = meta_model("llama")
    model.set_attn_implementation("paged|eager")
    with pytest.raises(CaptureError, match=r"(?s)Use `eager` for a standard forward.*in module .*layers.0.self_attn"):
        make_plan(model, 2, example_inputs=token_batch(0))


# -- losses of Liger ---------------------------------------------------------------------------------------------------


def with_liger(forward: Callable[..., Any], **changes: Any) -> Any:
    """The plan of a Llama whose forward Liger has replaced."""
    hub.install_liger()
    model = meta_model("llama", vocab_size=4001, **changes)
    model.forward = MethodType(forward, model)
    return make_plan(model, 2, example_inputs=token_batch(0))[0]


def fused_loss(apply: Callable[..., Any] | None = None, **options: Any) -> Callable[..., Any]:
    def forward(self: Any, input_ids: Tensor, labels: Tensor) -> CausalLMOutput:
        hidden = self.model(input_ids=input_ids)[0].flatten(0, 1)
        given = inspect.signature(layers.fused_linear_cross_entropy).bind(
            hidden, self.lm_head.weight, labels.flatten(), **options
        )
        given.apply_defaults()
        run = apply or hub.LigerFusedLinearCrossEntropyFunction.apply
        return CausalLMOutput(loss=run(*given.args)[0])

    return forward


def loss_of_logits(self: Any, input_ids: Tensor, labels: Tensor) -> CausalLMOutput:
    logits = self.lm_head(self.model(input_ids=input_ids)[0])
    made = hub.LigerCrossEntropyFunction.apply(logits.flatten(0, 1), labels.flatten(), None, -100, 1e-4)
    return CausalLMOutput(loss=made[0], logits=logits)


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({"lse_square_scale": 1e-4}, "with lse_square_scale"),
        ({"return_z_loss": True, "return_token_accuracy": True}, "with return_z_loss, return_token_accuracy"),
        ({"return_predicted_tokens": True, "softcap": 30.0}, "with return_predicted_tokens"),
        ({"use_token_scaling": True, "accum_dtype": torch.float32}, "with use_token_scaling"),
        ({"apply": hub.LigerFusedLinearCrossEntropyFunction.apply}, "where code keeps its apply instead of"),
    ],
)
def test_what_liger_s_loss_computes_itself_keeps_the_head_whole(options: dict[str, Any], why: str) -> None:
    plan = with_liger(fused_loss(**options))
    assert {name for one in plan.parameters if one.reasons for name in one.names if "norm" not in name} == {
        "lm_head.weight"
    }
    assert f"LigerFusedLinearCrossEntropyFunction needs it whole {why}" in reasons(plan, "lm_head.weight")
    assert all(use.call is None for use in plan.implementations)


def test_the_plan_says_that_liger_s_loss_is_computed_on_every_rank() -> None:
    plan = with_liger(loss_of_logits)
    (work,) = [work for work in plan.whole_work if "LigerCrossEntropyFunction" in work.operator]
    assert "LigerCrossEntropyFunction needs it whole with lse_square_scale" in work.why


def test_a_head_that_is_to_stay_whole_has_liger_s_loss() -> None:
    hub.install_liger()
    model = meta_model("llama", vocab_size=4001)
    model.forward = MethodType(fused_loss(), model)
    plan, solution = make_plan(model, 2, example_inputs=token_batch(0), keep_whole=["lm_head"])
    assert "keep_whole" in reasons(plan, "lm_head.weight")
    assert all(use.call is None for use in plan.implementations)
    (loss,) = [operator for operator in solution.graph.operators if operator.name == KERNEL_LINEAR_LOSS]
    tensors = solution.graph.tensors
    (tokens,) = tensors[loss.argument("target").tensor].shape
    assert count_flops(loss, lambda tensor: tensors[tensor].shape) == 2 * tokens * 64 * 4001


# -- kernels on a model without weights --------------------------------------------------------------------------------


def test_use_kernels_on_a_model_that_is_on_no_device_says_what_to_write() -> None:
    with without_weights():
        model = AutoModelForCausalLM.from_config(tiny_config("llama"))
        model.set_use_kernels(False)
        with pytest.raises(
            ValueError, match=r'(?s)that the LlamaForCausalLM is on, .*kernelize\(model, .*device="cuda"\)'
        ):
            model.set_use_kernels(True)
    with pytest.raises(ValueError, match="Kernels are not available"):  # transformers' own says it elsewhere
        model.set_use_kernels(True)


# -- plans that are kept -----------------------------------------------------------------------------------------------


def test_a_kept_plan_is_one_for_the_code_that_runs() -> None:
    """Kernels are put on a model's modules, on its classes, in the globals of its code, and in torch."""
    model, batch = meta_model("llama"), token_batch(0)
    before = fingerprint(model, batch)
    norm = model.model.norm
    puts = [
        mock.patch.object(norm, "forward", MethodType(hub.LigerRMSNorm.forward, norm), create=True),
        mock.patch.object(type(model), "forward", fused_loss),
        mock.patch.object(modeling_llama, "apply_rotary_pos_emb", layers.rope),
        mock.patch.object(F, "cross_entropy", layers.cross_entropy),
    ]
    seen = {before}
    for put in puts:
        with put:
            seen.add(fingerprint(model, batch))
    assert len(seen) == 1 + len(puts)
    assert fingerprint(model, batch) == before


# -- code that communicates --------------------------------------------------------------------------------------------


def test_code_that_communicates_is_named() -> None:
    """As tiled MLPs from the Hub do, to run as many tiles as others: one process alone would wait for them."""

    class Tiled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(32))

        def forward(self, x: Tensor) -> Tensor:
            tiles = torch.ones(1)
            torch.ops._c10d_functional.all_reduce(tiles, "max", "nobody")
            return F.relu(x) * self.weight

    with pytest.raises(
        CaptureError, match=r"communicates with other processes \(_c10d_functional.all_reduce.default\)"
    ):
        make_plan(Net(Tiled()), 2, example_inputs=torch.zeros(3, 16))
