"""Each shipped declaration is tried with a stand-in of the kernel's signature: whole and in parts, with its options."""

from __future__ import annotations

import dataclasses
import functools
import inspect
import re
import sys
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import kernel_stand_ins as attention
import pytest
import stand_ins_of_layers as layers
import stand_ins_of_sequences as sequences
import torch
from torch import Tensor, nn
from torch.nn.attention import flex_attention as flex

from lightning_autotp import DeclarationError, make_plan
from lightning_autotp.capture.trials import _Trial
from lightning_autotp.layouts.types import Shard
from lightning_autotp.operators.declared import _DECLARED, Declaration

B, S, T, H, G, D, E = 2, 6, 7, 4, 2, 8, 3
"""Rows, queries, keys, heads, heads of a group, features of keys and of values."""

Calls = Iterator[dict[str, Any]]
Case = tuple[Callable[..., Any], Callable[[], Calls]]


def random(*shape: int) -> Tensor:
    return torch.zeros(*shape)  # of floating-point numbers only shapes count: trials make them up


def ends(*lengths: int) -> Tensor:
    return torch.tensor([0, *lengths], dtype=torch.int32).cumsum(0).to(torch.int32)


def heads(**more: Any) -> dict[str, Any]:
    return {"q": random(B, S, H, D), "k": random(B, T, H // G, D), "v": random(B, T, H // G, E), **more}


def packed(**more: Any) -> dict[str, Any]:
    """Two sequences in one row."""
    tensors = {"q": random(S, H, D), "k": random(T, H // G, D), "v": random(T, H // G, D)}
    lengths = {"cu_seqlens_q": ends(4, 2), "cu_seqlens_k": ends(5, 2), "max_seqlen_q": 4, "max_seqlen_k": 5}
    return tensors | lengths | more


def flash() -> Calls:
    yield heads(causal=True)
    yield heads(window_size=(2, 0), softcap=5.0, alibi_slopes=random(H))
    yield heads(alibi_slopes=random(B, H), return_attn_probs=True)
    yield {name: random(B, S, H, D) for name in "qkv"}


def flash_packed_in_one() -> Calls:
    yield {"qkv": random(B, S, 3, H, D)}
    yield {"qkv": random(B, S, 3, H, D), "return_attn_probs": True, "alibi_slopes": random(H)}


def flash_packed_in_two() -> Calls:
    yield {"q": random(B, S, H, D), "kv": random(B, T, 2, H // G, D), "causal": True}


def varlen() -> Calls:
    yield packed(causal=True)
    yield packed(window_size=(1, 0))


def varlen_in_one() -> Calls:
    yield {"qkv": random(S, 3, H, D), "cu_seqlens": ends(4, 2), "max_seqlen": 4}


def varlen_in_two() -> Calls:
    given = packed()
    del given["k"], given["v"]
    yield given | {"kv": random(T, 2, H // G, D)}


def flash_3() -> Calls:
    yield heads(causal=True, return_attn_probs=True)
    yield heads(**{f"{name}_descale": random(B, H // G) for name in "qkv"})


def flash_3_packed_in_one() -> Calls:
    yield {"qkv": random(B, S, 3, H, D), "causal": True}
    scales = {f"{name}_descale": random(B, H) for name in "qkv"}
    yield {"qkv": random(B, S, 3, H, D), "return_attn_probs": True, "softcap": 5.0, **scales}


def varlen_3() -> Calls:
    yield packed(causal=True)


def torch_varlen() -> Calls:
    given = packed()
    names = {"q": "query", "k": "key", "v": "value", "cu_seqlens_q": "cu_seq_q", "cu_seqlens_k": "cu_seq_k"}
    names |= {"max_seqlen_q": "max_q", "max_seqlen_k": "max_k"}
    yield {names[name]: value for name, value in given.items()} | {"enable_gqa": True}


def flex_calls() -> Calls:
    query = {"query": random(B, H, S, D), "key": random(B, H, T, D), "value": random(B, H, T, D)}
    yield query
    yield query | {"return_lse": True}
    grouped = {"key": random(B, H // G, T, D), "value": random(B, H // G, T, D)}
    yield query | grouped | {"enable_gqa": True}


def rotary() -> Calls:
    table = {"cos": random(S, D // 2), "sin": random(S, D // 2)}
    yield {"x": random(B, S, H, D), **table}
    yield {"x": random(S, H, D), "cu_seqlens": ends(4, 2), "max_seqlen": 4, **table}


def efficient() -> Calls:
    """With heads, with groups of them, and without."""
    for independent in ((H,), (H // G, G), ()):
        shapes = {"query": (S, D), "key": (T, D), "value": (T, E)}
        given = {name: random(B, length, *independent, size) for name, (length, size) in shapes.items()}
        yield given
        yield given | {"attn_bias": random(B, *independent, S, T)}


def norm(**more: Any) -> Callable[[], Calls]:
    def calls() -> Calls:
        for shape in ((B, S, D), (S, D)):
            yield {name: random(*shape) if value is None else value for name, value in more.items()}

    return calls


def turned() -> Calls:
    for rows in (1, B):
        table = {"cos": random(rows, S, D), "sin": random(rows, S, D)}
        yield {"q": random(B, H, S, D), "k": random(B, H // G, S, D), **table}


def turned_in_three() -> Calls:
    table = {"cos": random(3, B, S, D), "sin": random(3, B, S, D)}
    yield {"q": random(B, H, S, D), "k": random(B, H // G, S, D), "mrope_section": [1, 1, 2], **table}


def experts() -> Calls:
    """5 tokens, each with 2 of 3 experts."""
    chosen = torch.tensor([[0, 1], [1, 2], [2, 0], [0, 2], [1, 0]])
    weights = {"gate_up_proj": random(3, 2 * H, D), "down_proj": random(3, D, H)}
    yield {"x": random(5, D), **weights, "top_k_index": chosen, "top_k_weights": random(5, 2)}


def gated_norms() -> Calls:
    given = {"g": random(B, S, H, D), "weight": random(D), "bias": None, "activation": "swish", "is_rms_norm": True}
    yield given | {"x": random(B, S, H, D)}
    yield given | {"x": random(B, S, H, D), "bias": random(D), "residual": random(B, S, H, D), "prenorm": True}


def levels() -> Calls:
    """Pictures of two sizes, one after the other; 3 points of each."""
    yield {
        "value": random(B, 4 * 3 + 2 * 2, H, D), "value_spatial_shapes": torch.tensor([[4, 3], [2, 2]]),
        "value_level_start_index": torch.tensor([0, 12]), "sampling_locations": random(B, S, H, 2, 3, 2),
        "attention_weights": random(B, S, H, 2, 3), "im2col_step": 64,
    }  # fmt: skip


def losses(**more: Any) -> Callable[[], Calls]:
    def calls() -> Calls:
        target = torch.arange(S) % E
        for reduction in ("mean", "sum", "none"):
            yield {**more, "target": target, "reduction": reduction}
        yield {**more, "target": target} | dict.fromkeys(
            ("return_z_loss", "return_token_accuracy", "return_predicted_tokens"), True
        )

    return calls


def convolution() -> Calls:
    yield {"x": random(B, D, S), "weight": random(D, 3), "activation": "silu"}
    yield {"x": random(B, D, S), "weight": random(D, 3), "bias": random(D), "initial_states": random(B, D, 2)}


def selective() -> Calls:
    given = {"u": random(B, D, S), "delta": random(B, D, S), "A": random(D, E), "delta_softplus": True}
    yield given | {"B": random(B, E, S), "C": random(B, E, S), "D": random(D), "z": random(B, D, S)}
    yield given | {"B": random(D, E), "C": random(B, G, E, S), "delta_bias": random(D), "return_last_state": True}
    yield given | {"B": random(B, G, E, S), "C": random(B, G, E, S)}


def inner() -> Calls:
    yield {
        "xz": random(B, 2 * D, S), "conv1d_weight": random(D, 1, 3), "conv1d_bias": random(D),
        "x_proj_weight": random(2 + 2 * E, D), "delta_proj_weight": random(D, 2), "out_proj_weight": random(7, D),
        "out_proj_bias": None, "A": random(D, E), "D": random(D), "delta_bias": random(D),
    }  # fmt: skip


def chunks() -> Calls:
    states = {"B": random(B, S, G, E), "C": random(B, S, G, E)}
    given = {"x": random(B, S, H, D), "dt": random(B, S, H), "A": random(H), "chunk_size": 4, "dt_softplus": True}
    yield given | states | {"D": random(H), "dt_bias": random(H), "z": random(B, S, H, D)}
    yield given | states | {"D": random(H, D), "return_final_states": True, "initial_states": random(B, H, D, E)}
    yield given | {name: random(B, S, 1, E) for name in "BC"}


def split() -> Calls:
    width, mixed = H * D, H * D + 2 * G * E
    given = {
        "zxbcdt": random(B, S, width + mixed + H), "conv1d_weight": random(mixed, 3), "conv1d_bias": random(mixed),
        "dt_bias": random(H), "A": random(H), "chunk_size": 4, "ngroups": G, "rmsnorm_weight": random(width),
    }  # fmt: skip
    yield given | {"D": random(H, D)}
    yield given | {"D": random(H), "headdim": D, "outproj_weight": random(7, width)}


def recurrent(*optional: dict[str, tuple[int, ...]], keys: int = H, **always: tuple[int, ...]) -> Callable[[], Calls]:
    def calls() -> Calls:
        given = {"q": (B, S, keys, D), "k": (B, S, keys, D), "v": (B, S, H, E), **always}
        for more in ({}, *optional):
            yield {name: random(*shape) for name, shape in (given | more).items()}
        tensors = {name: random(*shape) for name, shape in given.items()}
        yield tensors | {"initial_state": random(B, H, D, E), "output_final_state": True}

    return calls


def receptance(**always: tuple[int, ...]) -> Callable[[], Calls]:
    def calls() -> Calls:
        for given in recurrent(**always)():
            yield {"r" if name == "q" else name: value for name, value in given.items()}

    return calls


def gated(calls: Callable[[], Calls], *bias: int) -> Callable[[], Calls]:
    """With the gate computed in the kernel, too."""

    def both() -> Calls:
        yield from calls()
        yield next(calls()) | {"use_gate_in_kernel": True, "A_log": random(H), "dt_bias": random(*bias)}

    return both


def features() -> Calls:
    yield {"x": random(B, S, D), "g": random(B, S, D)}
    yield {"x": random(B, S, D), "g": random(B, S, D), "initial_state": random(B, D), "output_final_state": True}


EACH, ALL = (B, S, H), (B, S, H, D)
DELTA = gated(recurrent({"beta": EACH}, keys=H // G, g=EACH, beta=EACH), H)
LIGER, FLA, MAMBA = "liger_kernel.ops", "fla.ops", "mamba_ssm.ops"
HUB = "kernels-community"
FLASH = ("flash_attn.", "flash_attn.flash_attn_interface.", "kernels-community/flash-attn2:")
FLASH_3 = ("flash_attn_interface.", "kernels-community/flash-attn3:", "kernels-community/vllm-flash-attn3:")
CASES: dict[str, Case] = {
    "torch.nn.attention.flex_attention.flex_attention": (flex.flex_attention, flex_calls),
    "torch.nn.attention.varlen.varlen_attn": (attention.varlen_attn, torch_varlen),
    "flash_attn.layers.rotary.ApplyRotaryEmb": (layers.rotary, rotary),
    "xformers.ops.memory_efficient_attention": (attention.memory_efficient_attention, efficient),
    f"{LIGER}.rms_norm.LigerRMSNormFunction": (layers.rms_norm, norm(X=None, W=random(D), eps=1e-5)),
    f"{LIGER}.fused_add_rms_norm.LigerFusedAddRMSNormFunction": (
        layers.fused_add_rms_norm, norm(X=None, R=None, W=random(D), eps=1e-5)
    ),
    f"{LIGER}.layer_norm.LigerLayerNormFunction": (
        layers.layer_norm, norm(X=None, W=random(D), B=random(D), eps=1e-5)
    ),
    f"{LIGER}.swiglu.LigerSiLUMulFunction": (layers.silu_mul, norm(a=None, b=None)),
    f"{LIGER}.geglu.LigerGELUMulFunction": (layers.gelu_mul, norm(a=None, b=None)),
    f"{LIGER}.relu_squared.LigerReLUSquaredFunction": (layers.relu_squared, norm(X=None)),
    f"{LIGER}.qwen2vl_mrope.LigerQwen2VLMRopeFunction": (layers.mrope, turned_in_three),
    f"{LIGER}.fused_moe.LigerFusedMoEFunction": (layers.fused_moe, experts),
    f"{LIGER}.softmax.LigerSoftmaxFunction": (layers.softmax, norm(input_=None)),
    f"{LIGER}.rope.LigerRopeFunction": (layers.rope, turned),
    f"{LIGER}.cross_entropy.LigerCrossEntropyFunction": (layers.cross_entropy, losses(_input=random(S, E))),
    f"{LIGER}.fused_linear_cross_entropy.LigerFusedLinearCrossEntropyFunction": (
        layers.fused_linear_cross_entropy, losses(_input=random(S, D), weight=random(E, D))
    ),
    f"{MAMBA}.selective_scan_interface.selective_scan_fn": (sequences.selective_scan_fn, selective),
    f"{MAMBA}.selective_scan_interface.mamba_inner_fn": (sequences.mamba_inner_fn, inner),
    f"{MAMBA}.triton.ssd_combined.mamba_chunk_scan_combined": (sequences.mamba_chunk_scan_combined, chunks),
    f"{MAMBA}.triton.ssd_combined.mamba_split_conv1d_scan_combined": (
        sequences.mamba_split_conv1d_scan_combined, split
    ),
    f"{FLA}.gla.chunk_gla": (sequences.gla, recurrent(g=ALL)),
    f"{FLA}.gla.fused_recurrent_gla": (sequences.recurrent_gla, recurrent({"gk": ALL})),
    f"{FLA}.gated_delta_rule.fused_recurrent_gated_delta_rule": (
        sequences.gated_delta_rule, recurrent({"gk": ALL}, keys=H // G, g=EACH, beta=EACH)
    ),
    "fla.modules.fused_norm_gate.LayerNormGatedFunction": (layers.gated_norm, gated_norms),
    f"{HUB}/rmsnorm:RMSNormFunction": (
        layers.hub_rms_norm, norm(hidden_states=None, weight=random(D), variance_epsilon=1e-5)
    ),
    f"{HUB}/deformable-detr:MultiScaleDeformableAttentionFunction": (layers.deformable_attention, levels),
    "apex.normalization.fused_layer_norm.FusedRMSNormAffineFunction": (
        layers.apex_rms_norm, norm(input=None, weight=random(D), normalized_shape=(D,), eps=1e-5)
    ),
    "apex.normalization.fused_layer_norm.FusedLayerNormAffineFunction": (
        layers.apex_layer_norm, norm(input=None, weight=random(D), bias=random(D), normalized_shape=(D,), eps=1e-5)
    ),
}  # fmt: skip
CASES |= {
    f"{package}{name}": case
    for package in FLASH
    for name, case in {
        "flash_attn_func": (attention.flash_attn_func, flash),
        "flash_attn_qkvpacked_func": (attention.flash_attn_qkvpacked_func, flash_packed_in_one),
        "flash_attn_kvpacked_func": (attention.flash_attn_kvpacked_func, flash_packed_in_two),
        "flash_attn_varlen_func": (attention.flash_attn_varlen_func, varlen),
        "flash_attn_varlen_qkvpacked_func": (attention.flash_attn_varlen_qkvpacked_func, varlen_in_one),
        "flash_attn_varlen_kvpacked_func": (attention.flash_attn_varlen_kvpacked_func, varlen_in_two),
    }.items()
}
CASES |= {f"{package}flash_attn_func": (attention.flash_attn_3_func, flash_3) for package in FLASH_3}
CASES |= {
    f"{package}flash_attn_qkvpacked_func": (attention.flash_attn_3_qkvpacked_func, flash_3_packed_in_one)
    for package in FLASH_3[:2]
}
CASES |= {f"{package}flash_attn_varlen_func": (attention.flash_attn_3_varlen_func, varlen_3) for package in FLASH_3}
CASES |= {
    f"{package}.causal_conv1d_fn": (sequences.causal_conv1d_fn, convolution)
    for package in ("causal_conv1d", "causal_conv1d.causal_conv1d_interface")
}
for names, case in {
    "gated_delta_rule.chunk_gated_delta_rule": (sequences.gated_delta_rule, DELTA),
    "kda.chunk_kda kda.fused_recurrent_kda": (
        sequences.kda, gated(recurrent(keys=H // G, g=ALL, beta=EACH), H * D)
    ),
    "delta_rule.chunk_delta_rule delta_rule.fused_recurrent_delta_rule": (sequences.delta_rule, recurrent(beta=EACH)),
    "simple_gla.chunk_simple_gla simple_gla.fused_recurrent_simple_gla": (
        sequences.simple_gla, recurrent({"g": EACH}, {"g_gamma": (H,)})
    ),
    "linear_attn.chunk_linear_attn linear_attn.fused_recurrent_linear_attn": (sequences.linear_attention, recurrent()),
    "retention.chunk_retention retention.fused_recurrent_retention"
    " lightning_attn.chunk_lightning_attn lightning_attn.fused_recurrent_lightning_attn": (
        sequences.retention, recurrent()
    ),
    "rwkv6.chunk_rwkv6 rwkv6.fused_recurrent_rwkv6": (sequences.rwkv6, receptance(w=ALL, u=(H, D))),
    "rwkv7.chunk_rwkv7 rwkv7.fused_recurrent_rwkv7": (sequences.rwkv7, receptance(w=ALL, a=ALL, b=ALL)),
    "hgrn.chunk_hgrn hgrn.fused_recurrent_hgrn": (sequences.hgrn, features),
}.items():  # fmt: skip
    CASES |= {f"{FLA}.{name}": case for name in names.split()}
HOMES = {LIGER: "liger-kernels", "fla": "fla", "mamba_ssm": "mamba-ssm", "causal_conv1d": "mamba-ssm causal-conv1d"}
"""Repositories of the Hub that have a package's functions."""
ALSO_AT = {
    f"{HUB}/{repository}:{target.rpartition('.')[2]}": target
    for package, repositories in HOMES.items()
    for target in CASES
    if target.startswith(f"{package}.")
    for repository in repositories.split()
}

SHIPPED = {made.target: made for made in _DECLARED.values() if made.is_shipped}
NOTHING_IS_DIVIDED = {target for target in CASES if "CrossEntropy" in target}


def trial(declaration: Declaration, function: Callable[..., Any], call: dict[str, Any]) -> tuple[str, _Trial]:
    """What is wrong in a call with all of the function's arguments, and the trial."""
    signature = inspect.signature(function)
    bound = signature.bind(**call)
    bound.apply_defaults()
    given = dict(bound.arguments)
    for name, parameter in signature.parameters.items():
        if parameter.kind is inspect.Parameter.VAR_KEYWORD:
            given |= given.pop(name)
    tensors = {name: value for name, value in given.items() if isinstance(value, Tensor)}
    others = {name: value for name, value in given.items() if name not in tensors}
    made = _Trial(declaration, function, tensors, others)
    return made.wrong(lambda tensor: None if tensor.is_floating_point() else tensor), made


def test_every_declaration_has_a_stand_in() -> None:
    assert CASES.keys() | ALSO_AT.keys() == SHIPPED.keys()


@pytest.mark.parametrize("target", ALSO_AT)
def test_functions_from_the_hub_are_declared_as_in_their_packages(target: str) -> None:
    same = {"target": target, "place": SHIPPED[target].place}
    assert SHIPPED[target] == dataclasses.replace(SHIPPED[ALSO_AT[target]], **same)


@pytest.mark.parametrize("target", CASES)
def test_parts_are_parts_of_the_whole(target: str) -> None:
    function, calls = CASES[target]
    with mock.patch.object(flex, "_validate_device"):
        for call in calls():
            wrong, made = trial(SHIPPED[target], function, call)
            assert wrong == "", call.keys()
            assert made.is_tried == (target not in NOTHING_IS_DIVIDED), call.keys()


def test_heads_of_queries_keys_and_values_in_one_dim_are_refused() -> None:
    """FlashAttention 3 takes them side by side, too: a rank's part of that dim would be other ones."""
    declared = SHIPPED["flash_attn_interface.flash_attn_qkvpacked_func"]
    with pytest.raises(DeclarationError, match=r"qkv has 4 dims where qkv\[b s 3 h d\] is declared"):
        declared.results({"qkv": (B, S, H + H // G + H // G, D)}, {"num_heads_q": H}.get)


@pytest.mark.parametrize("target", sorted(NOTHING_IS_DIVIDED))
def test_shapes_where_nothing_is_divided(target: str) -> None:
    function, calls = CASES[target]
    for call in calls():
        shapes = {name: value.shape for name, value in call.items() if isinstance(value, Tensor)}
        declared = SHIPPED[target].results(shapes, call.get)
        returned = function(**call)
        assert [None if one is None else tuple(one[1]) for one in declared] == [
            None if tensor is None else tuple(tensor.shape) for tensor in returned
        ]


# -- in a model ------------------------------------------------------------------------------------------------------


def without_meta(function: Callable[..., Any]) -> Any:
    """A kernel as packages have it: it does not run without values."""

    @functools.wraps(function)
    def kernel(*args: Any, **kwargs: Any) -> Any:
        attention._needs_values(*(value for value in (*args, *kwargs.values()) if isinstance(value, Tensor)))
        return function(*args, **kwargs)

    return kernel


class LigerSiLUMulFunction(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, a: Tensor, b: Tensor, gate_multiplier: float = 1.0, down_multiplier: float = 1.0) -> Tensor:
        attention._needs_values(a, b)
        ctx.save_for_backward(a, b)
        return layers.silu_mul(a, b)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        with torch.enable_grad():
            saved = [tensor.detach().requires_grad_() for tensor in ctx.saved_tensors]
            return *torch.autograd.grad(layers.silu_mul(*saved), saved, gradient), None, None


class GatedMLP(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate, self.up, self.down = nn.Linear(16, 48), nn.Linear(16, 48), nn.Linear(48, 16)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.down(LigerSiLUMulFunction.apply(self.gate(x), self.up(x)))
        return out


class Mixer(nn.Module):
    """Mamba 2 without its norm: a convolution of channels, then a scan of heads of 8, in two groups."""

    def __init__(self) -> None:
        super().__init__()
        self.x, self.b, self.c, self.dt = (nn.Linear(16, size, bias=False) for size in (32, 6, 6, 4))
        self.conv, self.out = nn.Conv1d(32, 32, 3, groups=32), nn.Linear(32, 16, bias=False)
        self.A, self.D, self.dt_bias = (nn.Parameter(torch.zeros(4)) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        from causal_conv1d import causal_conv1d_fn
        from mamba_ssm.ops.triton.ssd_combined import mamba_chunk_scan_combined

        weight = self.conv.weight.squeeze(1)
        mixed = causal_conv1d_fn(self.x(x).transpose(1, 2), weight, self.conv.bias, activation="silu").transpose(1, 2)
        states = [layer(x).unflatten(-1, (2, 3)) for layer in (self.b, self.c)]
        scanned = mamba_chunk_scan_combined(
            mixed.unflatten(-1, (-1, 8)), self.dt(x), self.A, *states, 4, D=self.D, dt_bias=self.dt_bias,
            dt_softplus=True,
        )  # fmt: skip
        out: Tensor = self.out(scanned.flatten(2))
        return out


class DeltaNet(nn.Module):
    """4 value heads of 8 for 2 key heads of 4."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(16, size, bias=False) for size in (8, 8, 32))
        self.g, self.beta, self.out = nn.Linear(16, 4), nn.Linear(16, 4), nn.Linear(32, 16)

    def forward(self, x: Tensor) -> Tensor:
        from fla.ops.gated_delta_rule import chunk_gated_delta_rule

        q, k = (layer(x).unflatten(-1, (-1, 4)) for layer in (self.q, self.k))
        v = self.v(x).unflatten(-1, (-1, 8))
        scanned, _ = chunk_gated_delta_rule(q, k, v, -self.g(x).exp(), self.beta(x).sigmoid())
        out: Tensor = self.out(scanned.flatten(2))
        return out


class Efficient(nn.Module):
    """8 query heads and 4 key/value heads of 4, in groups, through xformers.

    Args:
        bias: of the scores, or what makes it.
    """

    def __init__(self, bias: Any) -> None:
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(16, size, bias=False) for size in (32, 16, 16))
        self.out, self.bias = nn.Linear(32, 16, bias=False), bias

    def forward(self, x: Tensor) -> Tensor:
        from xformers.ops import memory_efficient_attention

        q = self.q(x).unflatten(-1, (-1, 2, 4))
        k, v = (layer(x).unflatten(-1, (-1, 1, 4)).expand(*q.shape) for layer in (self.k, self.v))
        bias = self.bias() if callable(self.bias) else self.bias
        out: Tensor = self.out(memory_efficient_attention(q, k, v, attn_bias=bias).flatten(2))
        return out


@pytest.mark.parametrize("bias", [None, "causal", "blocks", "numbers"])
def test_masks_of_xformers_and_heads_in_groups(bias: str | None) -> None:
    """A mask without numbers leaves heads divided; one that holds numbers of the heads is whole, as all around it."""
    masks: dict[str | None, Any] = {
        None: None,
        "causal": attention.LowerTriangularMask,
        "blocks": attention.BlockDiagonalCausalMask([3, 4]),
        "numbers": attention.BlockDiagonalCausalMask([3, 4], torch.randn(3, 4, 2, 7, 7)),
    }
    with mock.patch.dict(sys.modules):
        attention.module("xformers.ops", memory_efficient_attention=attention.memory_efficient_attention)
        plan, _ = make_plan(Efficient(masks[bias]), 2, example_inputs=torch.zeros(3, 7, 16))
    cuts = {parameter.names[0]: str(parameter.layout) for parameter in plan.parameters}
    by_heads = {"q.weight": "S(0: 32 -> 16)", "out.weight": "S(1: 32 -> 16)"}
    by_heads |= dict.fromkeys(("k.weight", "v.weight"), "S(0: 16 -> 8)")
    assert (cuts == by_heads) is (bias != "numbers")
    said = "\n".join(plan.remarks())
    assert ("is not declared to divide the tensors in attn_bias" in said) is (bias == "numbers")


@pytest.mark.parametrize("kind", [GatedMLP, Mixer, DeltaNet])
def test_layers_around_kernels_are_column_and_row_parallel(kind: type[nn.Module]) -> None:
    """Parameters that heads or channels belong to are cut by them, and one all-reduce follows."""
    made = {
        "liger_kernel.ops.swiglu": {"LigerSiLUMulFunction": LigerSiLUMulFunction},
        "causal_conv1d": {"causal_conv1d_fn": without_meta(sequences.causal_conv1d_fn)},
        "mamba_ssm.ops.triton.ssd_combined": {
            "mamba_chunk_scan_combined": without_meta(sequences.mamba_chunk_scan_combined)
        },
        "fla.ops.gated_delta_rule": {"chunk_gated_delta_rule": without_meta(sequences.gated_delta_rule)},
    }
    with mock.patch.dict(sys.modules):
        for name, functions in made.items():
            attention.module(name, **functions)
        plan, _ = make_plan(kind(), 2, example_inputs=torch.zeros(3, 7, 16))
    for parameter in plan.parameters:
        name, cut = parameter.names[0], str(parameter.layout)
        wanted = ("S(1", "I") if name.startswith(("out", "down")) else ("S(0",)
        assert cut.startswith(wanted), (name, cut)
    assert [(sent.kind, sent.calls) for sent in plan.communication] == [("all_reduce", 1)]


class WholeMixer(nn.Module):
    """Mamba 1 as its package has it: one kernel from the input projection's result on, output projection included."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.conv = nn.Linear(16, 16, bias=False), nn.Conv1d(8, 8, 3, groups=8)
        self.x, self.dt, self.out = (nn.Linear(*sizes, bias=False) for sizes in ((8, 8), (2, 8), (8, 16)))
        self.A, self.D = nn.Parameter(torch.zeros(8, 3)), nn.Parameter(torch.ones(8))
        self.mlp = nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 16))

    def forward(self, x: Tensor) -> Tensor:
        from mamba_ssm.ops.selective_scan_interface import mamba_inner_fn

        weights = self.conv.weight, self.conv.bias, self.x.weight, self.dt.weight, self.out.weight, None
        mixed = mamba_inner_fn(self.up(x).transpose(1, 2), *weights, self.A, D=self.D)
        out: Tensor = self.mlp(mixed)
        return out


def test_a_kernel_that_computes_an_output_projection_too_gets_it_whole() -> None:
    """Not silently a part of it: every rank runs all of the kernel, of gathered parameters, and the plan says so."""
    name = "mamba_ssm.ops.selective_scan_interface"
    with mock.patch.dict(sys.modules):
        attention.module(name, mamba_inner_fn=without_meta(sequences.mamba_inner_fn))
        plan, solution = make_plan(WholeMixer(), 2, example_inputs=torch.zeros(3, 7, 16))
    (kernel,) = [one for one in solution.graph.operators if one.name == f"{name}.mamba_inner_fn"]
    assert not any(isinstance(solution.layouts.get(tensor), Shard) for tensor in kernel.outputs)
    (warning,) = plan.warnings
    assert re.match(
        rf"{kernel.name} in the model, .*% of the FLOPs, .*: {kernel.name} (needs|is not declared)", warning
    )
    cuts = {parameter.names[0]: str(parameter.layout) for parameter in plan.parameters}
    assert (cuts["mlp.0.weight"], cuts["mlp.2.weight"]) == ("S(0: 64 -> 32)", "S(1: 64 -> 32)")


@pytest.mark.parametrize(
    ("target", "function", "found"),
    [
        (f"{FLA}.simple_gla.chunk_simple_gla", sequences.retention, "half of h each"),
        (f"{LIGER}.swiglu.LigerSiLUMulFunction", lambda a, b: (a * b).softmax(-1), r"half of f each"),
        (f"{LIGER}.swiglu.LigerSiLUMulFunction", lambda a, b: a * b / len(a), r"half of \.\.\.\d each"),
        ("causal_conv1d.causal_conv1d_fn", lambda x, weight: x * weight.mean(), "half of c each"),
    ],
)
def test_another_function_than_the_declared_one_is_found_out(
    target: str, function: Callable[..., Any], found: str
) -> None:
    names = inspect.signature(function).parameters
    call = {name: value for name, value in next(CASES[target][1]()).items() if name in names}
    wrong, _ = trial(SHIPPED[target], function, call)
    assert re.search(found, wrong), wrong
