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
    loss = F.cross_entropy(
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
