"""A model's trace, on which plans are made and read, and the proof that a local model computes the same."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from torch import nn

from lightning_autotp.capture.capture import capture, capture_local
from lightning_autotp.operators.graph import Graph
from lightning_autotp.parallel.implementations import IMPLEMENTATIONS
from lightning_autotp.parameters.state import parallel_state
from lightning_autotp.proving.compare import VerificationError, compare, cut_differently
from lightning_autotp.solving.call_points import open_calls
from lightning_autotp.solving.solution import Solution


def trace(
    model: nn.Module,
    example_inputs: Any,
    opaque: frozenset[str] = frozenset(),
    *,
    training: bool = True,
    bare: Collection[str] = (),
    device: str = "",
    led: frozenset[str] = frozenset(),
) -> Graph:
    """The model's graph, with every place in it where a layout may change; arguments are those of ``capture``.

    ``bare``, as for ``open_calls``: modules of a plan's that another trace has opened.
    """
    graph = capture(model, example_inputs, opaque, training=training, device=device, led=led)
    return open_calls(graph, IMPLEMENTATIONS, bare)


def verify(model: nn.Module, solution: Solution, rank: int, example_inputs: Any) -> None:
    """Prove that a local model computes what the original one does.

    Its parameters must be cut as the solution says, and the second capture must be the localized first one.

    Raises:
        VerificationError: naming the first parameter, or operator, module and source line that differ.
    """
    difference = cut_differently(parallel_state(model).metas, solution) or compare(
        capture_local(model, example_inputs, solution.graph), solution, rank
    )
    if difference is not None:
        raise VerificationError(f"the local model of rank {rank} is not the same computation: {difference}")
