"""Recurrent layers in one kernel: no rule, so they stay whole."""

from __future__ import annotations

from math import prod

from lightning_autotp.operators.registry import Shapes, operator


def _recurrent_flops(shapes: Shapes) -> float:
    """``input [..., features]``: every place of the sequences meets every matrix of every layer and direction once."""
    return 2 * prod(shapes["input"][:-1]) * sum(prod(shape) for shape in shapes.each("params") if len(shape) == 2)


operator(*(f"aten.{name}.input" for name in ("lstm", "gru", "rnn_tanh", "rnn_relu")), flops=_recurrent_flops)
