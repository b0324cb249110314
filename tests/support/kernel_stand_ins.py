"""Packages of kernels that need a GPU, as modules of the same names and signatures that compute the same in PyTorch.

None of them runs without values: a trace that calls one fails.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn
from torch.nn import functional as F

FLASH_2, FLASH_3 = "flash_attention_2", "flash_attention_3"


def _needs_values(*tensors: Tensor) -> None:
    if any(tensor.is_meta or type(tensor) not in (Tensor, nn.Parameter) for tensor in tensors):
        raise RuntimeError("the kernel ran without values")


def _window(length: int, keys: int, causal: bool, window_size: tuple[int, int]) -> Tensor:
    """Which keys a query sees, the last query the last key."""
    distance = torch.arange(length)[:, None] + keys - length - torch.arange(keys)
    left, right = window_size
    seen = torch.ones(length, keys, dtype=torch.bool)
    if causal or right >= 0:
        seen &= distance >= -(0 if causal else right)
    return seen & (distance <= left) if left >= 0 else seen


def flash_attn_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Any:
    """``q [b, s, h, d]``, ``k [b, t, h/g, d]``, ``v [b, t, h/g, e]`` -> ``[b, s, h, e]``."""
    _needs_values(q, k, v)
    groups = q.shape[2] // k.shape[2]
    q, k, v = q.transpose(1, 2), *(x.transpose(1, 2).repeat_interleave(groups, 1) for x in (k, v))
    scores = q @ k.transpose(2, 3) * (q.shape[-1] ** -0.5 if softmax_scale is None else softmax_scale)
    if softcap:
        scores = softcap * (scores / softcap).tanh()
    length, keys = scores.shape[2:]
    if alibi_slopes is not None:
        distance = (torch.arange(length)[:, None] + keys - length - torch.arange(keys)).abs()
        scores = scores - alibi_slopes.reshape(-1, scores.shape[1], 1, 1) * distance
    scores = scores.masked_fill(~_window(length, keys, causal, window_size), -torch.inf)
    lse, p = scores.logsumexp(-1), F.dropout(scores.softmax(-1), dropout_p)
    out = (p @ v).transpose(1, 2)
    return (out, lse.float(), p) if return_attn_probs else out


def flash_attn_varlen_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    block_table: Tensor | None = None,
) -> Any:
    """``q [s, h, d]``, ``k [t, h/g, d]``, ``v [t, h/g, e]`` of sequences one after another -> ``[s, h, e]``."""
    _needs_values(q, k, v)
    queries, keys = cu_seqlens_q.diff().tolist(), cu_seqlens_k.diff().tolist()
    assert max(queries) <= max_seqlen_q
    assert max(keys) <= max_seqlen_k
    options: dict[str, Any] = {"softmax_scale": softmax_scale, "causal": causal, "window_size": window_size}
    parts = zip(q.split(queries), k.split(keys), v.split(keys), strict=True)
    return torch.cat(
        [
            flash_attn_func(a[None], b[None], c[None], dropout_p, softcap=softcap, **options).squeeze(0)
            for a, b, c in parts
        ]
    )


def flash_attn_qkvpacked_func(qkv: Tensor, dropout_p: float = 0.0, **options: Any) -> Any:
    """``qkv [b, s, 3, h, d]``."""
    return flash_attn_func(*qkv.unbind(2), dropout_p, **options)


def flash_attn_kvpacked_func(q: Tensor, kv: Tensor, dropout_p: float = 0.0, **options: Any) -> Any:
    """``kv [b, t, 2, h/g, d]``."""
    return flash_attn_func(q, *kv.unbind(2), dropout_p, **options)


def flash_attn_varlen_qkvpacked_func(
    qkv: Tensor, cu_seqlens: Tensor, max_seqlen: int, dropout_p: float = 0.0, **options: Any
) -> Any:
    """``qkv [s, 3, h, d]``."""
    ends = cu_seqlens, cu_seqlens, max_seqlen, max_seqlen
    return flash_attn_varlen_func(*qkv.unbind(1), *ends, dropout_p, **options)


def flash_attn_varlen_kvpacked_func(
    q: Tensor,
    kv: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float = 0.0,
    **options: Any,
) -> Any:
    """``kv [t, 2, h/g, d]``."""
    ends = cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k
    return flash_attn_varlen_func(q, *kv.unbind(1), *ends, dropout_p, **options)


def flash_attn_3_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    softmax_scale: float | None = None,
    causal: bool = False,
    qv: Tensor | None = None,
    q_descale: Tensor | None = None,
    k_descale: Tensor | None = None,
    v_descale: Tensor | None = None,
    window_size: tuple[int, int] = (-1, -1),
    attention_chunk: int = 0,
    softcap: float = 0.0,
    num_splits: int = 1,
    pack_gqa: bool | None = None,
    deterministic: bool = False,
    sm_margin: int = 0,
    return_attn_probs: bool = False,
) -> Any:
    """As version 2, with scales ``[b, h/g]`` of operands in float8."""
    groups = q.shape[2] // k.shape[2]

    def scaled(x: Tensor, by: Tensor | None, times: int = 1) -> Tensor:
        return x if by is None else x * by.repeat_interleave(times, 1)[:, None, :, None]

    operands = scaled(q, q_descale, groups), scaled(k, k_descale), scaled(v, v_descale)
    out, lse, _ = flash_attn_func(
        *operands, 0.0, softmax_scale, causal, window_size, softcap, None, deterministic, return_attn_probs=True
    )
    return (out, lse) if return_attn_probs else out


def flash_attn_3_qkvpacked_func(
    qkv: Tensor,
    softmax_scale: float | None = None,
    causal: bool = False,
    q_descale: Tensor | None = None,
    k_descale: Tensor | None = None,
    v_descale: Tensor | None = None,
    window_size: tuple[int, int] = (-1, -1),
    attention_chunk: int = 0,
    softcap: float = 0.0,
    deterministic: bool = False,
    num_heads_q: int | None = None,
    sm_margin: int = 0,
    return_attn_probs: bool = False,
) -> Any:
    """``qkv [b, s, 3, h, d]``."""
    scales = {"q_descale": q_descale, "k_descale": k_descale, "v_descale": v_descale}
    options = {"window_size": window_size, "softcap": softcap, "return_attn_probs": return_attn_probs}
    return flash_attn_3_func(*qkv.unbind(2), softmax_scale, causal, **scales, **options)


def flash_attn_3_varlen_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    seqused_q: Tensor | None = None,
    seqused_k: Tensor | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    qv: Tensor | None = None,
    return_attn_probs: bool = False,
) -> Any:
    """As version 2."""
    ends = cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k
    return flash_attn_varlen_func(q, k, v, *ends, softmax_scale=softmax_scale, causal=causal)


class LowerTriangularMask(Tensor):
    """xformers' causal mask: a tensor of no dims."""

    @staticmethod
    def __new__(cls) -> LowerTriangularMask:
        return Tensor._make_wrapper_subclass(cls, [])

    __torch_function__ = torch._C._disabled_torch_function_impl

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise NotImplementedError(f"{func} of a mask")


class BlockDiagonalCausalMask:
    """xformers' mask of sequences one after another, here of one row.

    Args:
        lengths: of the sequences.
        bias: numbers ``[b, h, s, t]`` that are added to the scores.
    """

    def __init__(self, lengths: list[int], bias: Tensor | None = None) -> None:
        self.lengths, self.bias = lengths, bias

    def materialize(self) -> Tensor:
        """``[s, s]``."""
        sequence = torch.arange(len(self.lengths)).repeat_interleave(torch.tensor(self.lengths))
        seen = (sequence[:, None] == sequence) & torch.ones(len(sequence), len(sequence)).tril().bool()
        made = torch.zeros(seen.shape).masked_fill(~seen, -torch.inf)
        return made if self.bias is None else made + self.bias


def memory_efficient_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_bias: Any = None,
    p: float = 0.0,
    scale: float | None = None,
    *,
    op: Any = None,
    output_dtype: Any = None,
) -> Tensor:
    """xformers: ``query [b, s, h, d]``, ``key [b, t, h, d]``, ``attn_bias [b, h, s, t]``.

    Also with groups of heads (``[b, s, m, h, d]``), and without heads.
    """
    _needs_values(query, key, value)
    causal = isinstance(attn_bias, LowerTriangularMask)
    mask = attn_bias.materialize() if isinstance(attn_bias, BlockDiagonalCausalMask) else None if causal else attn_bias
    heads = (x.movedim(1, -2) for x in (query, key, value))
    found = F.scaled_dot_product_attention(*heads, attn_mask=mask, dropout_p=p, is_causal=causal, scale=scale)
    return found.movedim(-2, 1)


def flash_attn_with_kvcache(q: Tensor, k_cache: Tensor, v_cache: Tensor) -> Tensor:
    """Not used in training."""
    raise NotImplementedError


def varlen_attn(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_seq_q: Tensor,
    cu_seq_k: Tensor | None,
    max_q: int,
    max_k: int,
    *,
    return_aux: Any = None,
    scale: float | None = None,
    window_size: tuple[int, int] = (-1, -1),
    enable_gqa: bool = False,
    seqused_k: Tensor | None = None,
    block_table: Tensor | None = None,
    num_splits: int | None = None,
) -> Tensor:
    """As ``torch.nn.attention.varlen.varlen_attn``, whose kernel needs a GPU."""
    if not enable_gqa and query.shape[1] != key.shape[1]:
        raise ValueError("Expect query and key/value to have the same number of heads")
    ends = cu_seq_q if cu_seq_k is None else cu_seq_k
    out: Tensor = flash_attn_varlen_func(
        query, key, value, cu_seq_q, ends, max_q, max_k, softmax_scale=scale, window_size=window_size
    )
    return out


def module(name: str, **functions: Any) -> ModuleType:
    """A module in ``sys.modules`` with these names."""
    made = sys.modules[name] = ModuleType(name)
    made.__spec__ = ModuleSpec(name, None)
    vars(made).update(functions)
    return made


def install_flash_attention() -> None:
    """Let transformers' FlashAttention 2 and 3 be those here, in this process."""
    from transformers import modeling_flash_attention_utils as flash

    names: dict[str, Callable[..., Any]] = {
        "flash_attn_func": flash_attn_func,
        "flash_attn_varlen_func": flash_attn_varlen_func,
        "flash_attn_with_kvcache": flash_attn_with_kvcache,
    }
    module("flash_attn", **names)
    module("flash_attn.bert_padding", pad_input=flash._pad_input, unpad_input=flash._unpad_input)
    three = {"flash_attn_func": flash_attn_3_func, "flash_attn_varlen_func": flash_attn_3_varlen_func}
    module("flash_attn_interface", **(names | three))
    flash.is_flash_attn_2_available = lambda: True


@contextmanager
def installed_flash_attention() -> Iterator[None]:
    """As :func:`install_flash_attention`, for a while."""
    from transformers import modeling_flash_attention_utils as flash

    with mock.patch.object(flash, "is_flash_attn_2_available"):
        install_flash_attention()
        try:
            yield
        finally:
            for name in ("flash_attn.bert_padding", "flash_attn", "flash_attn_interface"):
                del sys.modules[name]


@contextmanager
def installed_flex_attention() -> Iterator[None]:
    """Let FlexAttention run on a CPU without being compiled, which it cannot with gradients, for a while."""
    from torch.nn.attention import flex_attention

    with (
        mock.patch.object(flex_attention, "_validate_device"),
        torch.compiler.set_stance("force_eager"),
    ):
        yield
