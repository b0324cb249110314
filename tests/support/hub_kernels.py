"""The ``kernels`` package and kernels from the Hub, as far as transformers uses them, in plain PyTorch.

As the package does, :func:`kernelize` puts the forward of a kernel's layer on modules whose class has a name for it, or
their own class's again, and a function with such a name is a module that belongs to no model. The layers call autograd
functions that do not run without values.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from types import FunctionType, MethodType, ModuleType, SimpleNamespace
from typing import Any

import kernel_stand_ins
import stand_ins_of_layers as layers
import torch
from torch import Tensor, nn

TRAINING, INFERENCE = "training", "inference"
MAPPING: dict[tuple[str, str], type[nn.Module]] = {}
"""By mode and name, the layer of a kernel."""


def autograd_function(name: str, function: Callable[..., Any]) -> type[torch.autograd.Function]:
    """A kernel of this name, with a backward of its own, that computes what a function does."""

    def forward(ctx: Any, *args: Any) -> Any:
        kernel_stand_ins._needs_values(*(value for value in args if isinstance(value, Tensor)))
        ctx.args = args
        return function(*args)

    def backward(ctx: Any, *gradients: Tensor) -> Any:
        with torch.enable_grad():
            args = [value.detach() if isinstance(value, Tensor) else value for value in ctx.args]
            asked = [
                value.requires_grad_() for value, is_asked in zip(args, ctx.needs_input_grad, strict=True) if is_asked
            ]
            made = function(*args)
            results = [result for result in (made if isinstance(made, tuple) else (made,)) if result is not None]
            given = [gradient for gradient in gradients if gradient is not None][: len(results)]
            found = iter(torch.autograd.grad(results[: len(given)], asked, given, allow_unused=True))
        return tuple(next(found) if is_asked else None for is_asked in ctx.needs_input_grad)

    context = inspect.Parameter("ctx", inspect.Parameter.POSITIONAL_OR_KEYWORD)
    signature = inspect.signature(function)
    forward.__signature__ = signature.replace(parameters=[context, *signature.parameters.values()])  # type: ignore[attr-defined]
    return type(
        name, (torch.autograd.Function,), {"forward": staticmethod(forward), "backward": staticmethod(backward)}
    )


def hub_module(repository: str, **functions: Any) -> ModuleType:
    """A module of a kernel as the package loads it: under a name of its own, from the Hub's cache."""
    package = repository.rpartition("/")[2].replace("-", "_")
    made = kernel_stand_ins.module(f"_{package}_cuda_0a1b2c3", **functions)
    snapshot = f"/cache/hub/kernels--{repository.replace('/', '--')}/snapshots/0a1b2c3"
    made.__file__ = f"{snapshot}/build/torch-cuda/{package}/__init__.py"
    for function in functions.values():
        function.__module__ = made.__name__
    return made


LigerRMSNormFunction = autograd_function("LigerRMSNormFunction", layers.rms_norm)
LigerRopeFunction = autograd_function("LigerRopeFunction", layers.rope)
LigerSiLUMulFunction = autograd_function("LigerSiLUMulFunction", layers.silu_mul)
LigerCrossEntropyFunction = autograd_function("LigerCrossEntropyFunction", layers.cross_entropy)
LigerFusedLinearCrossEntropyFunction = autograd_function(
    "LigerFusedLinearCrossEntropyFunction", layers.fused_linear_cross_entropy
)


def liger_cross_entropy(
    input: Tensor,
    target: Tensor,
    weight: Tensor | None = None,
    size_average: bool | None = None,
    ignore_index: int = -100,
    reduce: bool | None = None,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
    lse_square_scale: float = 0.0,
    softcap: float | None = None,
) -> Tensor:
    """What Liger puts into the place of ``F.cross_entropy``."""
    options = ignore_index, lse_square_scale, label_smoothing, reduction, softcap
    loss: Tensor = LigerCrossEntropyFunction.apply(input, target, weight, *options)[0]
    return loss


class LigerRMSNorm(nn.Module):
    """As the layer of ``kernels-community/liger-kernels``, for norms that call their number ``variance_epsilon``."""

    def forward(self, hidden_states: Tensor) -> Any:
        return LigerRMSNormFunction.apply(hidden_states, self.weight, self.variance_epsilon, 0, "llama", True, None)


class LigerRotary(nn.Module):
    """For ``apply_rotary_pos_emb``."""

    def forward(self, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, unsqueeze_dim: int = 1) -> Any:
        return LigerRopeFunction.apply(q, k, cos, sin, None, unsqueeze_dim)


class LigerSwiGLUMLP(nn.Module):
    """For a gated MLP."""

    def forward(self, x: Tensor) -> Any:
        return self.down_proj(LigerSiLUMulFunction.apply(self.gate_proj(x), self.up_proj(x)))  # type: ignore[operator]


def kernelize(model: nn.Module, *, device: str, mode: str, use_fallback: Any) -> None:
    """Put the layers of kernels on a model, and the model's own where there is none for this mode."""
    if device not in ("cpu", "cuda"):
        raise ValueError(f"Unsupported device type '{device}'.")
    for module in model.modules():
        for one in (*vars(module).get("_kernel_funcs", {}).values(), module):
            if (name := getattr(type(one), "kernel_layer_name", None)) is not None:
                one.forward = MethodType(MAPPING.get((mode, name), type(one)).forward, one)


def as_module(function: Callable[..., Any], name: str) -> nn.Module:
    """A function that a kernel may take the place of."""

    class Func(nn.Module):
        kernel_layer_name = name

        def forward(self, *args: Any, **kwargs: Any) -> Any:
            return function(*args, **kwargs)

    return Func()


def install_liger() -> None:
    """Let there be Liger's package with its losses."""
    for file, function in {
        "cross_entropy": LigerCrossEntropyFunction,
        "fused_linear_cross_entropy": LigerFusedLinearCrossEntropyFunction,
    }.items():
        kernel_stand_ins.module(f"liger_kernel.ops.{file}", **{function.__name__: function})


def install_flash_attention_of_the_hub() -> None:
    """Let transformers load ``kernels-community/flash-attn2``, in this process."""
    from transformers.integrations import hub_kernels

    functions = (kernel_stand_ins.flash_attn_func, kernel_stand_ins.flash_attn_varlen_func)
    copies = {one.__name__: FunctionType(one.__code__, one.__globals__, argdefs=one.__defaults__) for one in functions}
    made = hub_module("kernels-community/flash-attn2", **copies)
    kernel_stand_ins.module("kernels")
    vars(hub_kernels).update(is_kernels_available=lambda: True, get_kernel=lambda name, **_: made)


def install() -> None:
    """Let transformers have the package, in this process: for Llama's norms, rotary embedding and MLP."""
    from transformers import modeling_utils
    from transformers.integrations import hub_kernels
    from transformers.models.llama import modeling_llama

    kernel_stand_ins.module("kernels")
    hub_module(
        "kernels-community/liger-kernels",
        LigerRMSNormFunction=LigerRMSNormFunction,
        LigerRopeFunction=LigerRopeFunction,
        LigerSiLUMulFunction=LigerSiLUMulFunction,
    )
    vars(hub_kernels).update(
        is_kernels_available=lambda: True,
        Mode=SimpleNamespace(TRAINING=TRAINING, INFERENCE=INFERENCE),
        KernelizeFallback=SimpleNamespace(ALL=True),
        _kernels_kernelize=kernelize,
        register_kernel_mapping_transformers=lambda: None,
    )
    vars(modeling_utils).update(is_kernels_available=lambda: True)
    modeling_llama.LlamaRMSNorm.kernel_layer_name = "RMSNorm"
    modeling_llama.LlamaMLP.kernel_layer_name = "SwiGLUMLP"
    modeling_llama.apply_rotary_pos_emb = as_module(modeling_llama.apply_rotary_pos_emb, "rotary_pos_emb")


def note_functions(model: nn.Module) -> None:
    """Let the functions that a model's modules call be found, as the package's decorator of their classes does."""
    from transformers.models.llama import modeling_llama

    for module in model.modules():
        if isinstance(module, modeling_llama.LlamaAttention):
            vars(module)["_kernel_funcs"] = {"apply_rotary_pos_emb": modeling_llama.apply_rotary_pos_emb}
