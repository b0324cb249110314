"""What the time of a step goes to, by PyTorch's profiler."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from torch.profiler import ProfilerActivity, profile

KINDS = ("products", "attention", "other operators", "the rest")
"""Matrix products; attention kernels; all other operators; and what is no operator: waiting for other ranks, Python."""

_PRODUCTS = ("aten::mm", "aten::addmm", "aten::bmm", "aten::baddbmm", "aten::_grouped_mm", "aten::addmm_")


def profiled(step: Callable[[], Any]) -> dict[str, float]:
    """Seconds of each of :data:`KINDS` in one step on this rank's processor. The profiler itself takes time, too."""
    began = time.perf_counter()
    with profile(activities=[ProfilerActivity.CPU]) as found:
        began = time.perf_counter()
        step()
        took = time.perf_counter() - began
    seconds = dict.fromkeys(KINDS, 0.0)
    for event in found.key_averages():
        if kind := _kind(event.key):
            seconds[kind] += event.self_cpu_time_total / 1e6
    seconds["the rest"] = took - sum(seconds.values())
    return seconds


def _kind(name: str) -> str | None:
    if name in _PRODUCTS or name.startswith(("aten::mkldnn_linear", "aten::linear")):
        return "products"
    if "attention" in name:
        return "attention"
    # What waits is told from what computes by leaving collectives out: they run in threads of their own.
    return "other operators" if name.startswith("aten::") else None
