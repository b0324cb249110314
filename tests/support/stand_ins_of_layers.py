"""Fused norms, activations, rotary embeddings and losses in plain PyTorch, with the signatures of the packages."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F


def rms_norm(
    X: Tensor,
    W: Tensor,
    eps: float,
    offset: float = 0.0,
    casting_mode: str = "llama",
    in_place: bool = True,
    row_mode: Any = None,
) -> Tensor:
    """``X [..., d]``, ``W [d]``."""
    return F.rms_norm(X, W.shape, W + offset, eps)


def fused_add_rms_norm(
    X: Tensor,
    R: Tensor,
    W: Tensor,
    eps: float,
    offset: float = 0.0,
    casting_mode: str = "llama",
    in_place: bool = False,
) -> tuple[Tensor, Tensor]:
    """The norm of a sum, and the sum."""
    total = X + R
    return F.rms_norm(total, W.shape, W + offset, eps), total


def layer_norm(X: Tensor, W: Tensor, B: Tensor, eps: float) -> Tensor:
    """``X [..., d]``, ``W, B [d]``."""
    return F.layer_norm(X, W.shape, W, B, eps)


def silu_mul(a: Tensor, b: Tensor, gate_multiplier: float = 1.0, down_multiplier: float = 1.0) -> Tensor:
    """SwiGLU."""
    return F.silu(a * gate_multiplier) * b * down_multiplier


def gelu_mul(a: Tensor, b: Tensor) -> Tensor:
    """GeGLU."""
    return F.gelu(a, approximate="tanh") * b


def relu_squared(X: Tensor) -> Tensor:
    """As Nemotron's."""
    return F.relu(X).square()


def fused_moe(x: Tensor, gate_up_proj: Tensor, down_proj: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
    """``x [n, h]``, ``gate_up_proj [e, 2 i, h]``, ``down_proj [e, h, i]``, ``top_k_index, top_k_weights [n, k]``."""
    gate, up = torch.einsum("nh,nkih->nki", x, gate_up_proj[top_k_index]).chunk(2, -1)
    each = torch.einsum("nki,nkhi->nkh", F.silu(gate) * up, down_proj[top_k_index])
    return (each * top_k_weights[..., None]).sum(1)


def softmax(input_: Tensor) -> Tensor:
    """Over the last dim."""
    return input_.softmax(-1)


def _turned(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    first, second = x.chunk(2, -1)
    return x * cos + torch.cat([-second, first], -1) * sin


def rope(
    q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, position_ids: Tensor | None = None, unsqueeze_dim: int = 1
) -> tuple[Tensor, Tensor]:
    """``q [b, h, s, d]``, ``k [b, m, s, d]``, ``cos, sin [1 or b, s, d]``."""
    cos, sin = cos.unsqueeze(unsqueeze_dim), sin.unsqueeze(unsqueeze_dim)
    return _turned(q, cos, sin), _turned(k, cos, sin)


def mrope(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, mrope_section: Any, unsqueeze_dim: int = 1) -> Any:
    """``q [b, h, s, d]``, ``k [b, m, s, d]``, ``cos, sin [3, b, s, d]``: features in turn take one of the three."""
    cos, sin = (
        torch.cat([part[at % 3] for at, part in enumerate(table.split(mrope_section * 2, -1))], -1)
        for table in (cos, sin)
    )
    return rope(q, k, cos, sin, None, unsqueeze_dim)


def gated_norm(
    x: Tensor,
    g: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    activation: str,
    residual: Tensor | None = None,
    eps: float = 1e-6,
    prenorm: bool = False,
    residual_in_fp32: bool = False,
    is_rms_norm: bool = False,
) -> Any:
    """flash-linear-attention's: ``x, g [..., d]``, ``weight [d]``."""
    total = x if residual is None else x + residual
    normed = F.rms_norm(total, weight.shape, weight, eps) if is_rms_norm else F.layer_norm(total, weight.shape, weight)
    out = (normed if bias is None else normed + bias) * F.silu(g)
    return (out, total) if prenorm else out


def hub_rms_norm(hidden_states: Tensor, weight: Tensor, variance_epsilon: float) -> Tensor:
    """``hidden_states [..., d]``."""
    return F.rms_norm(hidden_states, weight.shape, weight, variance_epsilon)


def deformable_attention(
    value: Tensor,
    value_spatial_shapes: Tensor,
    value_level_start_index: Tensor,
    sampling_locations: Tensor,
    attention_weights: Tensor,
    im2col_step: int,
) -> Tensor:
    """``value [b, s, h, d]``, ``sampling_locations [b, q, h, l, p, 2]``, ``attention_weights [b, q, h, l, p]``."""
    rows, _, heads, width = value.shape
    queries, found = sampling_locations.shape[1], []
    for level, (height, breadth) in enumerate(value_spatial_shapes.tolist()):
        begin = int(value_level_start_index[level])
        picture = value[:, begin : begin + height * breadth].permute(0, 2, 3, 1).reshape(-1, width, height, breadth)
        grid = 2 * sampling_locations[:, :, :, level].transpose(1, 2).flatten(0, 1) - 1
        found.append(F.grid_sample(picture, grid, align_corners=False).unflatten(0, (rows, heads)))
    each = torch.stack(found, -2)  # [b, h, d, q, l, p]
    return torch.einsum("bhdqlp,bqhlp->bqhd", each, attention_weights).reshape(rows, queries, -1)


def rotary(
    x: Tensor,
    cos: Tensor,
    sin: Tensor,
    interleaved: bool = False,
    inplace: bool = False,
    seqlen_offsets: Any = 0,
    cu_seqlens: Tensor | None = None,
    max_seqlen: int | None = None,
) -> Tensor:
    """``x [b, s, h, d]``, or ``[s, h, d]`` of sequences one after another; ``cos, sin [s, d / 2]``."""
    cos, sin = torch.cat([cos, cos], -1), torch.cat([sin, sin], -1)
    if cu_seqlens is not None:
        positions = torch.cat([torch.arange(int(length)) for length in cu_seqlens.diff()])
        cos, sin = cos[positions], sin[positions]
    return _turned(x, cos[:, None], sin[:, None])


_cross_entropy = F.cross_entropy  # Liger's may take its place in torch


def cross_entropy(
    _input: Tensor,
    target: Tensor,
    weight: Tensor | None = None,
    ignore_index: int = -100,
    lse_square_scale: float = 0.0,
    label_smoothing: float = 0.0,
    reduction: str = "mean",
    softcap: float | None = None,
    return_z_loss: bool = False,
    return_token_accuracy: bool = False,
    return_predicted_tokens: bool = False,
) -> Any:
    """``_input [n, v]``, ``target [n]``."""
    if softcap is not None:
        _input = softcap * torch.tanh(_input / softcap)
    loss = _cross_entropy(
        _input, target, weight, ignore_index=ignore_index, label_smoothing=label_smoothing, reduction=reduction
    )
    return (
        loss,
        lse_square_scale * _input.logsumexp(-1).square().mean() if return_z_loss else None,
        (_input.argmax(-1) == target).float().mean() if return_token_accuracy else None,
        _input.argmax(-1) if return_predicted_tokens else None,
    )


def fused_linear_cross_entropy(
    _input: Tensor,
    weight: Tensor,
    target: Tensor,
    bias: Tensor | None = None,
    ce_weight: Tensor | None = None,
    ignore_index: int = -100,
    lse_square_scale: float = 0.0,
    label_smoothing: float = 0.0,
    reduction: str = "mean",
    softcap: float | None = None,
    return_z_loss: bool = False,
    accum_dtype: Any = None,
    use_token_scaling: bool = False,
    return_token_accuracy: bool = False,
    return_predicted_tokens: bool = False,
) -> Any:
    """``_input [n, h]``, ``weight [v, h]``."""
    logits = F.linear(_input, weight, bias)
    others = return_z_loss, return_token_accuracy, return_predicted_tokens
    return cross_entropy(
        logits, target, ce_weight, ignore_index, lse_square_scale, label_smoothing, reduction, softcap, *others
    )


def apex_rms_norm(
    input: Tensor, weight: Tensor, normalized_shape: Any, eps: float, memory_efficient: bool = False
) -> Tensor:
    """``input [..., d]``."""
    return F.rms_norm(input, weight.shape, weight, eps)


def apex_layer_norm(
    input: Tensor, weight: Tensor, bias: Tensor, normalized_shape: Any, eps: float, memory_efficient: bool = False
) -> Tensor:
    """``input [..., d]``."""
    return F.layer_norm(input, weight.shape, weight, bias, eps)
