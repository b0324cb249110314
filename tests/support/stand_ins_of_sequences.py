"""Causal convolutions, state spaces and linear attention in plain PyTorch, with the signatures of the packages.

Each takes the recurrence step by step, as the packages' own references define it.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F


def causal_conv1d_fn(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    seq_idx: Tensor | None = None,
    initial_states: Tensor | None = None,
    return_final_states: bool = False,
    final_states_out: Tensor | None = None,
    activation: str | None = None,
) -> Tensor:
    """``x [b, c, l]``, ``weight [c, w]`` -> ``[b, c, l]``."""
    width = weight.shape[1]
    before = x.new_zeros(*x.shape[:2], width - 1) if initial_states is None else initial_states
    out = F.conv1d(torch.cat([before, x], 2), weight[:, None], bias, groups=len(weight))
    return out if activation is None else F.silu(out)


def selective_scan_fn(
    u: Tensor,
    delta: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor | None = None,
    z: Tensor | None = None,
    delta_bias: Tensor | None = None,
    delta_softplus: bool = False,
    return_last_state: bool = False,
) -> Any:
    """``u [b, d, l]``, ``A [d, n]``, ``B [d, n]`` or ``[b, n, l]`` or ``[b, g, n, l]`` -> ``[b, d, l]``."""
    delta = delta if delta_bias is None else delta + delta_bias[:, None]
    delta = F.softplus(delta) if delta_softplus else delta
    rows, width, length = u.shape

    def spread(x: Tensor) -> Tensor:
        """As ``[b, d, n, l]``."""
        if x.ndim == 2:
            return x[None, :, :, None].expand(rows, -1, -1, length)
        x = x[:, None] if x.ndim == 3 else x
        return x.repeat_interleave(width // x.shape[1], 1)

    inputs, outputs = spread(B), spread(C)
    state, found = u.new_zeros(rows, width, A.shape[1]), []
    for at in range(length):
        step = delta[:, :, at, None]
        state = state * (step * A).exp() + step * inputs[..., at] * u[:, :, at, None]
        found.append((state * outputs[..., at]).sum(-1))
    out = torch.stack(found, -1)
    out = out if D is None else out + D[:, None] * u
    out = out if z is None else out * F.silu(z)
    return (out, state) if return_last_state else out


def mamba_inner_fn(
    xz: Tensor,
    conv1d_weight: Tensor,
    conv1d_bias: Tensor | None,
    x_proj_weight: Tensor,
    delta_proj_weight: Tensor,
    out_proj_weight: Tensor,
    out_proj_bias: Tensor | None,
    A: Tensor,
    B: Tensor | None = None,
    C: Tensor | None = None,
    D: Tensor | None = None,
    delta_bias: Tensor | None = None,
    B_proj_bias: Tensor | None = None,
    C_proj_bias: Tensor | None = None,
    delta_softplus: bool = True,
    checkpoint_lvl: int = 1,
    b_rms_weight: Tensor | None = None,
    c_rms_weight: Tensor | None = None,
    dt_rms_weight: Tensor | None = None,
    b_c_dt_rms_eps: float = 1e-6,
) -> Tensor:
    """``xz [b, 2 i, l]``: a whole mixer, output projection included -> ``[b, l, o]``."""
    x, z = xz.chunk(2, 1)
    x = causal_conv1d_fn(x, conv1d_weight[:, 0], conv1d_bias, activation="silu")
    projected = F.linear(x.transpose(1, 2), x_proj_weight)
    rank, states = delta_proj_weight.shape[1], A.shape[1]
    low, inputs, outputs = projected.split([rank, states, states], -1)
    delta = F.linear(low, delta_proj_weight).transpose(1, 2)
    y = selective_scan_fn(
        x, delta, A, inputs.transpose(1, 2), outputs.transpose(1, 2), D, z, delta_bias, delta_softplus
    )
    return F.linear(y.transpose(1, 2), out_proj_weight, out_proj_bias)


def mamba_chunk_scan_combined(
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    chunk_size: int,
    D: Tensor | None = None,
    z: Tensor | None = None,
    dt_bias: Tensor | None = None,
    initial_states: Tensor | None = None,
    seq_idx: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    dt_softplus: bool = False,
    dt_limit: tuple[float, float] = (0.0, float("inf")),
    return_final_states: bool = False,
    return_varlen_states: bool = False,
    state_dtype: Any = None,
) -> Any:
    """``x [b, l, h, p]``, ``dt [b, l, h]``, ``A [h]``, ``B [b, l, g, n]`` -> ``[b, l, h, p]``."""
    dt = dt if dt_bias is None else dt + dt_bias
    dt = F.softplus(dt) if dt_softplus else dt
    heads = x.shape[2]
    inputs, outputs = (part.repeat_interleave(heads // part.shape[2], 2) for part in (B, C))
    state = x.new_zeros(x.shape[0], heads, x.shape[3], B.shape[3]) if initial_states is None else initial_states
    found = []
    for at in range(x.shape[1]):
        step = dt[:, at, :, None, None]
        state = state * (step * A[:, None, None]).exp() + step * x[:, at, ..., None] * inputs[:, at, :, None]
        found.append((state * outputs[:, at, :, None]).sum(-1))
    out = torch.stack(found, 1)
    if D is not None:
        out = out + x * (D if D.ndim == 2 else D[:, None])
    out = out if z is None else out * F.silu(z)
    return (out, state) if return_final_states else out


def mamba_split_conv1d_scan_combined(
    zxbcdt: Tensor,
    conv1d_weight: Tensor,
    conv1d_bias: Tensor | None,
    dt_bias: Tensor,
    A: Tensor,
    D: Tensor,
    chunk_size: int,
    initial_states: Tensor | None = None,
    seq_idx: Tensor | None = None,
    dt_limit: tuple[float, float] = (0.0, float("inf")),
    return_final_states: bool = False,
    activation: str = "silu",
    rmsnorm_weight: Tensor | None = None,
    rmsnorm_eps: float = 1e-6,
    outproj_weight: Tensor | None = None,
    outproj_bias: Tensor | None = None,
    headdim: int | None = None,
    ngroups: int = 1,
    norm_before_gate: bool = True,
    state_dtype: Any = None,
) -> Tensor:
    """``zxbcdt [b, l, 2 d + 2 g n + h]``: a whole mixer but its first projection -> ``[b, l, d]`` or ``[b, l, o]``."""
    heads = len(A)
    size = D.shape[1] if D.ndim == 2 else headdim or 0
    width = heads * size
    gate, mixed, dt = zxbcdt.split([width, len(conv1d_weight), heads], -1)
    mixed = causal_conv1d_fn(mixed.transpose(1, 2), conv1d_weight, conv1d_bias, activation=activation).transpose(1, 2)
    states = (len(conv1d_weight) - width) // 2
    x, inputs, outputs = mixed.split([width, states, states], -1)
    groups = [part.unflatten(-1, (ngroups, -1)) for part in (inputs, outputs)]
    y = mamba_chunk_scan_combined(
        x.unflatten(-1, (heads, size)), dt, A, *groups, chunk_size, D, dt_bias=dt_bias, dt_softplus=True
    ).flatten(2)
    if rmsnorm_weight is None:
        y = y * F.silu(gate)
    else:
        y = F.rms_norm(y, y.shape[-1:], rmsnorm_weight, rmsnorm_eps) * F.silu(gate)
    return y if outproj_weight is None else F.linear(y, outproj_weight, outproj_bias)


def _recurrence(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    decay: Tensor | None,
    beta: Tensor | None = None,
    state: Tensor | None = None,
    scale: float | None = None,
    bonus: Tensor | None = None,
    update: tuple[Tensor, Tensor] | None = None,
) -> tuple[Tensor, Tensor]:
    """Linear attention in log-space decays ``[b, t, h, k or 1]``, optionally with the delta rule.

    Args:
        bonus: of RWKV 6, ``[h, k]``: how much a position's own value counts before it is in the state.
        update: of RWKV 7: the state is also multiplied by the product of these two vectors.
    """
    heads = v.shape[2]
    q, k = (part.repeat_interleave(heads // part.shape[2], 2) for part in (q, k))
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    now = q.new_zeros(q.shape[0], heads, q.shape[3], v.shape[3]) if state is None else state
    found = []
    for at in range(q.shape[1]):
        key, value = k[:, at, :, :, None], v[:, at, :, None]
        if bonus is not None:
            found.append(((now + bonus[..., None] * key * value) * q[:, at, :, :, None] * scale).sum(2))
        decayed = now if decay is None else now * decay[:, at, :, :, None].exp()
        if update is not None:
            a, b = (vector[:, at, :, :, None] for vector in update)
            decayed = decayed + b * (a * now).sum(2, keepdim=True)
        if beta is not None:
            value = (value - (decayed * key).sum(2, keepdim=True)) * beta[:, at, :, None, None]
        now = decayed + key * value
        if bonus is None:
            found.append((now * q[:, at, :, :, None] * scale).sum(2))
    return torch.stack(found, 1), now


def _returned(result: tuple[Tensor, Tensor], output_final_state: bool) -> tuple[Tensor, Tensor | None]:
    return result[0], result[1] if output_final_state else None


def gated_delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor | None = None,
    beta: Tensor | None = None,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    *,
    gk: Tensor | None = None,
    gv: Tensor | None = None,
    A_log: Tensor | None = None,
    dt_bias: Tensor | None = None,
    use_gate_in_kernel: bool = False,
    state_v_first: bool = False,
    cu_seqlens: Tensor | None = None,
) -> Any:
    """``q, k [b, t, h/g, k]``, ``v [b, t, h, e]``, ``g, beta [b, t, h]``."""
    decay = None if g is None else g[..., None]
    if use_gate_in_kernel and g is not None and A_log is not None and dt_bias is not None:
        decay = (-A_log.exp() * F.softplus(g + dt_bias))[..., None]
    if gk is not None:
        decay = gk if decay is None else decay + gk
    return _returned(_recurrence(q, k, v, decay, beta, initial_state, scale), output_final_state)


def kda(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    *,
    A_log: Tensor | None = None,
    dt_bias: Tensor | None = None,
    use_gate_in_kernel: bool = False,
    state_v_first: bool = False,
) -> Any:
    """``g [b, t, h, k]``: a decay for each feature."""
    if use_gate_in_kernel and A_log is not None and dt_bias is not None:
        g = -A_log[:, None].exp() * F.softplus(g + dt_bias.unflatten(0, g.shape[2:]))
    return _returned(_recurrence(q, k, v, g, beta, initial_state, scale), output_final_state)


def delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    beta: Tensor,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    state_v_first: bool = False,
) -> Any:
    """``beta [b, t, h]``."""
    return _returned(_recurrence(q, k, v, None, beta, initial_state, scale), output_final_state)


def gla(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    state_v_first: bool = False,
) -> Any:
    """``g [b, t, h, k]``."""
    return _returned(_recurrence(q, k, v, g, None, initial_state, scale), output_final_state)


def recurrent_gla(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    gk: Tensor | None = None,
    gv: Tensor | None = None,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    state_v_first: bool = False,
) -> Any:
    """``gk [b, t, h, k]``."""
    return _returned(_recurrence(q, k, v, gk, None, initial_state, scale), output_final_state)


def simple_gla(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor | None = None,
    g_gamma: Tensor | None = None,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    state_v_first: bool = False,
) -> Any:
    """``g [b, t, h]``, ``g_gamma [h]``."""
    decay = None if g is None else g[..., None]
    if g_gamma is not None:
        fixed = g_gamma[None, None, :, None].expand(*q.shape[:2], -1, 1)
        decay = fixed if decay is None else decay + fixed
    return _returned(_recurrence(q, k, v, decay, None, initial_state, scale), output_final_state)


def linear_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    state_v_first: bool = False,
) -> Any:
    """No decay."""
    return _returned(_recurrence(q, k, v, None, None, initial_state, scale), output_final_state)


def retention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    state_v_first: bool = False,
) -> Any:
    """A head's decay follows from its number."""
    gamma = (1 - 2.0 ** (-5.0 - torch.arange(q.shape[2]))).log()
    return simple_gla(q, k, v, None, gamma, scale, initial_state, output_final_state)


def rwkv6(
    r: Tensor,
    k: Tensor,
    v: Tensor,
    w: Tensor,
    u: Tensor,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    state_v_first: bool = False,
) -> Any:
    """``w [b, t, h, k]``, ``u [h, k]``."""
    return _returned(_recurrence(r, k, v, w, None, initial_state, scale, bonus=u), output_final_state)


def rwkv7(
    r: Tensor,
    w: Tensor,
    k: Tensor,
    v: Tensor,
    a: Tensor,
    b: Tensor,
    scale: float = 1.0,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    state_v_first: bool = False,
) -> Any:
    """``a, b [b, t, h, k]``."""
    return _returned(_recurrence(r, k, v, w, None, initial_state, scale, update=(a, b)), output_final_state)


def hgrn(x: Tensor, g: Tensor, initial_state: Tensor | None = None, output_final_state: bool = False) -> Any:
    """``x, g [b, t, d]``."""
    state = x.new_zeros(x.shape[0], x.shape[2]) if initial_state is None else initial_state
    found = []
    for at in range(x.shape[1]):
        state = state * g[:, at].exp() + x[:, at]
        found.append(state)
    return torch.stack(found, 1), state if output_final_state else None
