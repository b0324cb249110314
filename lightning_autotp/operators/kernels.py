"""The kernels that people use, as declarations; what each was tried against stands in ``docs/kernels.md``.

Shapes are those that the packages document: b rows, s and t positions of queries and keys, h heads, d and e features;
``h/g`` key/value heads.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import Any

from lightning_autotp.operators.declared import Declaration, Loss, Pack, add, advise, tensor_or_tuple
from lightning_autotp.operators.graph import KERNEL_LINEAR_LOSS, KERNEL_LOSS

_SCORES = "2 b h s t (d + e)"
"""FLOPs of attention: the scores, then their product with the values."""


def _shipped(
    target: str,
    text: str,
    whole: str,
    flops: str = "",
    *,
    summed: str = "",
    linear: str = "",
    draws: str = "",
    without: str = "",
    groups_if: str = "",
    loss: Loss | None = None,
    pack: Pack = tensor_or_tuple,
) -> None:
    caller = sys._getframe(1)
    made = Declaration(
        target,
        text,
        frozenset(whole.split()),
        frozenset(summed.split()),
        linear=tuple(linear.split()),
        draws=draws,
        flops=flops,
        without=tuple(without.split()),
        groups_if=groups_if,
        loss=loss,
        pack=pack,
        place=f"{caller.f_code.co_filename}:{caller.f_lineno}",
        is_shipped=True,
    )
    add(made)


# -- PyTorch ---------------------------------------------------------------------------------------------------------


def _with_auxiliary(value_of: Callable[[str], Any], results: Sequence[Any]) -> Any:
    """What ``flex_attention`` returns: with ``return_aux``, a tuple of torch's own class beside the result."""
    out, lse, largest = results
    if value_of("return_aux") is not None:
        from torch.nn.attention.flex_attention import AuxOutput

        return out, AuxOutput(lse=lse, max_scores=largest)
    return (out, lse) if value_of("return_lse") else out


_shipped(
    "torch.nn.attention.flex_attention.flex_attention",
    "query[b h s d], key[b h/g t d], value[b h/g t e], score_mod(- b h s t), block_mask.mask_mod(b h s t)"
    " -> out[b h s e], lse[b h s]:float32 if return_lse or return_aux.lse else None,"
    " max_scores[b h s]:float32 if return_aux.max_scores else None",
    "s t d e",
    _SCORES,
    linear="value",
    groups_if="enable_gqa",
    pack=_with_auxiliary,
)
_shipped(
    "torch.nn.attention.varlen.varlen_attn",
    "query[s h d], key[t h/g d], value[t h/g e] -> out[s h e], lse[h s]:float32 if return_aux.lse",
    "s t d e",
    "2 h s t (d + e)",
    linear="value",
    without="block_table",
    groups_if="enable_gqa",
)

# -- FlashAttention 2 and 3 ------------------------------------------------------------------------------------------
# FLOPs of packed sequences are those of one sequence of all their tokens; a plan is priced with a sequence in each row.

_PROBABILITIES = "lse[b h s]:float32 if return_attn_probs, p[b h s t] if return_attn_probs"
_PACKED = "lse[h s]:float32 if return_attn_probs, p[h s t] if return_attn_probs"

for _package in ("flash_attn.", "flash_attn.flash_attn_interface.", "kernels-community/flash-attn2:"):
    _shipped(
        f"{_package}flash_attn_func",
        f"q[b s h d], k[b t h/g d], v[b t h/g e], alibi_slopes[h], alibi_slopes[b h] -> out[b s h e], {_PROBABILITIES}",
        "s t d e",
        _SCORES,
        draws="dropout_p",
    )
    _shipped(
        f"{_package}flash_attn_qkvpacked_func",
        "qkv[b s 3 h d], alibi_slopes[h], alibi_slopes[b h]"
        " -> out[b s h d], lse[b h s]:float32 if return_attn_probs, p[b h s s] if return_attn_probs",
        "s d",
        "4 b h s s d",
        draws="dropout_p",
    )
    _shipped(
        f"{_package}flash_attn_kvpacked_func",
        f"q[b s h d], kv[b t 2 h/g d], alibi_slopes[h], alibi_slopes[b h] -> out[b s h d], {_PROBABILITIES}",
        "s t d",
        "4 b h s t d",
        draws="dropout_p",
    )
    _shipped(
        f"{_package}flash_attn_varlen_func",
        f"q[s h d], k[t h/g d], v[t h/g e], alibi_slopes[h], alibi_slopes[b h] -> out[s h e], {_PACKED}",
        "s t d e b",
        "2 h s t (d + e)",
        draws="dropout_p",
        without="block_table",
    )
    _shipped(
        f"{_package}flash_attn_varlen_qkvpacked_func",
        "qkv[s 3 h d], alibi_slopes[h], alibi_slopes[b h]"
        " -> out[s h d], lse[h s]:float32 if return_attn_probs, p[h s s] if return_attn_probs",
        "s d b",
        "4 h s s d",
        draws="dropout_p",
    )
    _shipped(
        f"{_package}flash_attn_varlen_kvpacked_func",
        f"q[s h d], kv[t 2 h/g d], alibi_slopes[h], alibi_slopes[b h] -> out[s h d], {_PACKED}",
        "s t d b",
        "4 h s t d",
        draws="dropout_p",
    )
for _package in ("flash_attn_interface.", "kernels-community/flash-attn3:", "kernels-community/vllm-flash-attn3:"):
    _shipped(
        f"{_package}flash_attn_func",
        "q[b s h d], k[b t h/g d], v[b t h/g e], qv[b s h e], q_descale[b h/g], k_descale[b h/g], v_descale[b h/g],"
        " s_aux[h] -> out[b s h e], lse[b h s]:float32 if return_attn_probs",
        "s t d e",
        _SCORES,
    )
    _shipped(
        f"{_package}flash_attn_varlen_func",
        "q[s h d], k[t h/g d], v[t h/g e], qv[s h e], q_descale[b h/g], k_descale[b h/g], v_descale[b h/g], s_aux[h]"
        " -> out[s h e], lse[h s]:float32 if return_attn_probs",
        "s t d e b",
        "2 h s t (d + e)",
    )
for _package in ("flash_attn_interface.", "kernels-community/flash-attn3:"):  # not with all heads in one dim
    _shipped(
        f"{_package}flash_attn_qkvpacked_func",
        "qkv[b s 3 h d], q_descale[b h], k_descale[b h], v_descale[b h]"
        " -> out[b s h d], lse[b h s]:float32 if return_attn_probs",
        "s d",
        "4 b h s s d",
    )
_shipped(
    "flash_attn.layers.rotary.ApplyRotaryEmb",
    "x[b s h d], x[s h d] -> out[b s h d] if not cu_seqlens, out[s h d] if cu_seqlens",
    "s d",
    without="inplace",
)

# -- xformers --------------------------------------------------------------------------------------------------------
# Masks of its own are objects, or tensors of no dims; one that holds a tensor is a tensor of that one's dims, or stays
# whole. In the form of five dims heads stand in groups, for key/value heads.

_shipped(
    "xformers.ops.memory_efficient_attention",
    "query[b s h d], key[b t h d], value[b t h e], attn_bias[b h s t],"
    " query[b s m h d], key[b t m h d], value[b t m h e], attn_bias[b m h s t],"
    " query[b s d], key[b t d], value[b t e], attn_bias[b s t], attn_bias[]"
    " -> out[b s h e] if query.ndim=4, out[b s m h e] if query.ndim=5, out[b s e] if query.ndim=3",
    "s t d e",
    "2 b m h s t (d + e)",
    draws="p",
)

# -- Liger -----------------------------------------------------------------------------------------------------------
# Its losses need the whole vocabulary: where that is divided, those of parallel/kernel_losses.py run for them.

_LOSSES = (
    "loss[n] if reduction=none, loss[] if not reduction=none, z_loss[] if return_z_loss else None,"
    " token_accuracy[]:float32 if return_token_accuracy else None,"
    " predicted_tokens[n]:int64 if return_predicted_tokens else None"
)
_OPTIONS = tuple((name, name) for name in ("target", "ignore_index", "label_smoothing", "reduction", "softcap"))


def _liger(name: str, text: str, whole: str, flops: str = "", summed: str = "", loss: Loss | None = None) -> None:
    """A function of Liger, and the same one in ``kernels-community/liger-kernels``."""
    for target in (f"liger_kernel.ops.{name}", f"kernels-community/liger-kernels:{name.partition('.')[2]}"):
        _shipped(target, text, whole, flops, summed=summed, loss=loss)


_liger("rms_norm.LigerRMSNormFunction", "X[... d], W[d] -> Y[... d]", "d")
_liger("fused_add_rms_norm.LigerFusedAddRMSNormFunction", "X[... d], R[... d], W[d] -> Y[... d], S[... d]", "d")
_liger("layer_norm.LigerLayerNormFunction", "X[... d], W[d], B[d] -> Y[... d]", "d")
_liger("swiglu.LigerSiLUMulFunction", "a[... f], b[... f] -> c[... f]", "")
_liger("geglu.LigerGELUMulFunction", "a[... f], b[... f] -> c[... f]", "")
_liger("relu_squared.LigerReLUSquaredFunction", "X[... f] -> Y[... f]", "")
_liger("softmax.LigerSoftmaxFunction", "input_[... d] -> y[... d]", "d")
_liger(
    "rope.LigerRopeFunction",
    "q[b h s d], k[b m s d], cos[b s d], sin[b s d] -> qr[b h s d], kr[b m s d]",
    "s d",
)
_liger(
    "qwen2vl_mrope.LigerQwen2VLMRopeFunction",
    "q[b h s d], k[b m s d], cos[3 b s d], sin[3 b s d] -> qr[b h s d], kr[b m s d]",
    "s d",
)
_liger(
    "fused_moe.LigerFusedMoEFunction",
    "x[n h], gate_up_proj[e (2 i) h], down_proj[e o i], top_k_index[n k], top_k_weights[n k] -> out[n o]",
    "h e k",
    "2 n k i (2 h + o)",
    summed="i",
)
_liger(
    "cross_entropy.LigerCrossEntropyFunction",
    f"_input[n v], target[n], weight[v] -> {_LOSSES}",
    "n v",
    "5 n v",
    loss=Loss(KERNEL_LOSS, (("self", "_input"), ("weight", "weight"), *_OPTIONS)),
)
_liger(
    "fused_linear_cross_entropy.LigerFusedLinearCrossEntropyFunction",
    f"_input[n h], weight[v h], target[n], bias[v], ce_weight[v] -> {_LOSSES}",
    "n h v",
    "2 n h v",
    loss=Loss(
        KERNEL_LINEAR_LOSS,
        (
            ("input", "_input"),
            ("linear_weight", "weight"),
            ("linear_bias", "bias"),
            ("weight", "ce_weight"),
            *_OPTIONS,
        ),
        free=("accum_dtype",),
    ),
)

# -- State-space models: causal-conv1d and mamba-ssm ------------------------------------------------------------------
# Two compute a whole layer, output projection included: nothing in them is divided.

_HUB_MAMBA = ("kernels-community/mamba-ssm:", "kernels-community/causal-conv1d:")

for _package in ("causal_conv1d.", "causal_conv1d.causal_conv1d_interface.", *_HUB_MAMBA):
    _shipped(
        f"{_package}causal_conv1d_fn",
        "x[b c l], weight[c w], bias[c], initial_states[b c j] -> out[b c l]",
        "l w j",
        without="return_final_states",
    )
for _package in ("mamba_ssm.ops.selective_scan_interface.", _HUB_MAMBA[0]):
    _shipped(
        f"{_package}selective_scan_fn",
        "u[b d l], delta[b d l], A[d n], B[d n], B[b n l], B[b d/g n l], C[d n], C[b n l], C[b d/g n l],"
        " D[d], z[b d l], delta_bias[d] -> out[b d l], last_state[b d n]:float32 if return_last_state",
        "l n",
    )
    _shipped(
        f"{_package}mamba_inner_fn",
        "xz[b w l], conv1d_weight[i 1 k], x_proj_weight[m i], delta_proj_weight[i r], out_proj_weight[o i], A[i n]"
        " -> out[b l o]",
        "w l i k m r o n",
        "2 b l i (k + m + r + 2 n + o)",
    )
for _package in ("mamba_ssm.ops.triton.ssd_combined.", _HUB_MAMBA[0]):
    _shipped(
        f"{_package}mamba_chunk_scan_combined",
        "x[b l h p], dt[b l h], A[h], B[b l h/g n], C[b l h/g n], D[h p], D[h], z[b l h p], dt_bias[h],"
        " initial_states[b h p n] -> out[b l h p], states[b h p n] if return_final_states",
        "l n p",
        "4 b l h p n",
        without="return_varlen_states",
    )
    _shipped(
        f"{_package}mamba_split_conv1d_scan_combined",
        "zxbcdt[b l w], conv1d_weight[c k], A[h], headdim=p, D[h p], D[h], rmsnorm_weight[(h p)],"
        " outproj_weight[o (h p)]"
        " -> out[b l o] if outproj_weight, out[b l (h p)] if not outproj_weight",
        "w l c k h p o",
        "2 b l (c k + h p o)",
        without="return_final_states",
    )

# -- flash-linear-attention ------------------------------------------------------------------------------------------
# Retention and lightning attention compute a head's decay from its number, so heads stay whole there.

_HUB_FLA = "kernels-community/fla:"
_STATE = "final_state[b h k e]:float32 if output_final_state else None"


def _linear_attention(names: str, text: str, whole: str = "t k e") -> None:
    for name in names.split():
        for target in (f"fla.ops.{name}", f"{_HUB_FLA}{name.partition('.')[2]}"):
            _shipped(target, f"{text} -> o[b t h e], {_STATE}", whole, "4 b t h k e", without="state_v_first")


_QKV = "q[b t h k], k[b t h k], v[b t h e], initial_state[b h k e]"
_GROUPED = "q[b t h/g k], k[b t h/g k], v[b t h e], beta[b t h], A_log[h], initial_state[b h k e]"
_linear_attention(
    "gated_delta_rule.chunk_gated_delta_rule gated_delta_rule.fused_recurrent_gated_delta_rule",
    f"{_GROUPED}, g[b t h], gk[b t h k], gv[b t h e], dt_bias[h]",
)
_linear_attention("kda.chunk_kda kda.fused_recurrent_kda", f"{_GROUPED}, g[b t h k], dt_bias[(h k)]")
_linear_attention("delta_rule.chunk_delta_rule delta_rule.fused_recurrent_delta_rule", f"{_QKV}, beta[b t h]")
_linear_attention("gla.chunk_gla", f"{_QKV}, g[b t h k]")
_linear_attention("gla.fused_recurrent_gla", f"{_QKV}, gk[b t h k], gv[b t h e]")
_linear_attention(
    "simple_gla.chunk_simple_gla simple_gla.fused_recurrent_simple_gla", f"{_QKV}, g[b t h], g_gamma[h]", "t k e"
)
_linear_attention("linear_attn.chunk_linear_attn linear_attn.fused_recurrent_linear_attn", f"{_QKV}")
_linear_attention(
    "retention.chunk_retention retention.fused_recurrent_retention"
    " lightning_attn.chunk_lightning_attn lightning_attn.fused_recurrent_lightning_attn",
    _QKV,
    "t k e h",
)
_linear_attention(
    "rwkv6.chunk_rwkv6 rwkv6.fused_recurrent_rwkv6",
    "r[b t h k], k[b t h k], v[b t h e], w[b t h k], u[h k], initial_state[b h k e]",
)
_linear_attention(
    "rwkv7.chunk_rwkv7 rwkv7.fused_recurrent_rwkv7",
    "r[b t h k], w[b t h k], k[b t h k], v[b t h e], a[b t h k], b[b t h k], initial_state[b h k e]",
)
for _name in ("chunk_hgrn", "fused_recurrent_hgrn"):
    for _package in ("fla.ops.hgrn.", _HUB_FLA):
        _shipped(
            f"{_package}{_name}",
            "x[b t d], g[b t d], initial_state[b d]"
            " -> o[b t d], final_state[b d]:float32 if output_final_state else None",
            "t",
        )
for _package in ("fla.modules.fused_norm_gate.", _HUB_FLA):
    _shipped(
        f"{_package}LayerNormGatedFunction",
        "x[... d], g[... d], weight[d], bias[d], residual[... d] -> y[... d], total[... d] if prenorm",
        "d",
        without="residual_in_fp32",
    )

# -- Apex ------------------------------------------------------------------------------------------------------------

_APEX = "apex.normalization.fused_layer_norm"
_shipped(f"{_APEX}.FusedRMSNormAffineFunction", "input[... d], weight[d] -> out[... d]", "d")
_shipped(f"{_APEX}.FusedLayerNormAffineFunction", "input[... d], weight[d], bias[d] -> out[... d]", "d")

# -- Other kernels from the Hub that transformers switches on --------------------------------------------------------

_shipped("kernels-community/rmsnorm:RMSNormFunction", "hidden_states[... d], weight[d] -> out[... d]", "d")
_shipped(
    "kernels-community/deformable-detr:MultiScaleDeformableAttentionFunction",
    "value[b s h d], value_spatial_shapes[l 2], value_level_start_index[l], sampling_locations[b q h l p 2],"
    " attention_weights[b q h l p] -> out[b q (h d)]",
    "s d l p",
    "8 b q h l p d",
)

# -- Transformer Engine ----------------------------------------------------------------------------------------------
# What its functions are called with changes from version to version, and its float8 scales by what a rank has.

advise(
    "transformer_engine",
    "use torch.nn's layers (Linear, RMSNorm, LayerNorm), which are divided, and for float8 torchao's"
    " convert_to_float8_training",
)
