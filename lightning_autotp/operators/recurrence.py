"""Recurrent layers and cells in one kernel: no rule, so they stay whole.

The kernels check that a state is as long as a gate, so no rank can run one on its part of the gates. A cell that is
written as two linear layers and ``chunk`` is divided.
"""

from __future__ import annotations

from math import prod

from lightning_autotp.operators.registry import Shapes, operator


def _recurrent_flops(shapes: Shapes) -> float:
    """``input [..., features]``: every place of the sequences meets every matrix of every layer and direction once."""
    return 2 * prod(shapes["input"][:-1]) * sum(prod(shape) for shape in shapes.each("params") if len(shape) == 2)


def _cell_flops(shapes: Shapes) -> float:
    """``input [..., features]``: every row meets both matrices, its state the second one."""
    return 2 * prod(shapes["input"][:-1]) * (prod(shapes["w_ih"]) + prod(shapes["w_hh"]))


_KINDS = ("lstm", "gru", "rnn_tanh", "rnn_relu")
operator(*(f"aten.{name}.input" for name in _KINDS), flops=_recurrent_flops)
operator(*(f"aten.{name}.data" for name in _KINDS))  # of packed sequences, whose lengths are values
operator(*(f"aten.{name}_cell.default" for name in _KINDS), flops=_cell_flops)
