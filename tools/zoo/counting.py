"""FLOPs that really run, counted by torch while a model's forward and backward do."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch.utils.flop_counter import FlopCounterMode, sdpa_backward_flop_count, sdpa_flop_count


def _attention(q: Sequence[int], k: Sequence[int], v: Sequence[int], *_: Any, **__: Any) -> int:
    return int(sdpa_flop_count(q, k, v))


def _attention_backward(
    grad: Sequence[int], q: Sequence[int], k: Sequence[int], v: Sequence[int], *_: Any, **__: Any
) -> int:
    return int(sdpa_backward_flop_count(grad, q, k, v))


def _added_to(total: Sequence[int], x: Sequence[int], y: Sequence[int], *_: Any, **__: Any) -> int:
    """A product that is added to a tensor in place."""
    return 2 * math.prod(x) * y[-1]


def _grouped(x: Sequence[int], weight: Sequence[int], *_: Any, **__: Any) -> int:
    """``[rows, in] x [experts, in, out]``, each row by one expert's matrix; or ``[in, rows] x [rows, out]``."""
    return 2 * x[-2] * x[-1] * weight[-1]


def _grouped_backward(grad: Sequence[int], x: Sequence[int], weight: Sequence[int], *_: Any, **__: Any) -> int:
    return 2 * _grouped(x, weight)


def _convolution_backward(
    grad: Sequence[int], x: Sequence[int], weight: Sequence[int], *arguments: Any, **_kwargs: Any
) -> int:
    """Torch's own formula takes every channel's gradient for one of all channels, where a convolution has groups."""
    *_others, transposed, _padding, _groups, wanted = arguments
    return 2 * math.prod(x if transposed else grad) * math.prod(weight[1:]) * sum(wanted[:2])


_aten = torch.ops.aten
_MORE = {
    _aten._scaled_dot_product_flash_attention_for_cpu: _attention,
    _aten._scaled_dot_product_flash_attention_for_cpu_backward: _attention_backward,
    _aten.convolution_backward: _convolution_backward,
    _aten.addmm_: _added_to,
    _aten.baddbmm_: _added_to,
    _aten._grouped_mm: _grouped,
    torch.ops.transformers.grouped_mm_fallback: _grouped,
    torch.ops.transformers.grouped_mm_fallback_backward: _grouped_backward,
}
"""Products that torch's counter does not know, or not exactly."""


class _NoModules(nullcontext[None]):
    """In place of the counter's own record of modules under way, which fails in code with a backward of its own."""

    parents = frozenset({"Global"})


def counted(run: Callable[[], Any]) -> int:
    """The FLOPs of the matrix products and convolutions that ``run`` runs."""
    counter = FlopCounterMode(display=False, custom_mapping=_MORE)
    counter.mod_tracker = _NoModules()  # type: ignore[assignment]
    with counter:
        run()
    return int(counter.get_total_flops())


def divided(whole: int, everywhere: int, ranks: int) -> float:
    """The share of FLOPs that the ranks divide among them: the rest every rank computes whole.

    Args:
        whole: the FLOPs of one process.
        everywhere: those of all ranks together.
        ranks: how many there are.
    """
    return (ranks - everywhere / whole) / (ranks - 1) if whole else 0.0
