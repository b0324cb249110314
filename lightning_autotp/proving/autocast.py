"""Parameters that a model uses in 16 bits only, because autocast casts them wherever it does.

Autocast casts the operands of products. A parameter that is nothing else may as well arrive in 16 bits: FSDP2 gathers
it in half the bytes then, and the numbers are the same. Code may also ask for a parameter's dtype, and go another way:
so the model is traced with these parameters in 16 bits, too, and everything else must have the dtype that it had.
"""

from __future__ import annotations

from collections.abc import Callable, Collection

import torch
from torch import nn

from lightning_autotp.capture.capture import CaptureError, ExampleCall, capture_local
from lightning_autotp.operators.graph import Graph

_PRODUCTS = {
    "addmm", "baddbmm", "bmm", "conv1d", "conv2d", "conv3d", "convolution", "linear", "matmul", "mm",
}  # fmt: skip
"""Operators that autocast computes in 16 bits on every device: each casts all its operands."""
_CASTS = {"to"}
_SAME_VALUES = {
    "chunk", "expand", "flatten", "permute", "reshape", "select", "slice", "split", "squeeze", "t", "transpose",
    "unbind", "unflatten", "unsqueeze", "view",
}  # fmt: skip
"""Operators whose results have elements of their operand, and which leave the dtype."""


def used_in(
    dtype: torch.dtype,
    make: Callable[[], nn.Module],
    call: ExampleCall,
    *,
    device: torch.device,
    opaque: frozenset[str] = frozenset(),
    only: Collection[str] | None = None,
) -> frozenset[str]:
    """The names of float32 parameters that autocast casts to ``dtype`` wherever a model uses them. Not collective.

    Args:
        dtype: bfloat16 or float16.
        make: makes the model anew, on meta.
        call: how it is called.
        device: the type of device on which it runs.
        opaque: modules that are not looked into; their parameters are not among the result.
        only: parameters that matter; by default all.

    Returns:
        None of them, if the model would compute otherwise with them in ``dtype``.
    """

    def traced(names: Collection[str]) -> Graph:
        model = make()
        for name, parameter in model.named_parameters():
            if name in names:
                parameter.data = parameter.data.to(dtype)
        with torch.autocast(device.type, dtype):
            return capture_local(model, call, opaque, training=False, device=str(device))

    try:
        as_stored = traced(())
        names = {
            name
            for tensor, name in as_stored.parameters.items()
            if (only is None or name in only) and _is_only_in_products(tensor, as_stored, str(dtype))
        }
        lowered = traced(names) if names else as_stored
    except CaptureError:
        return frozenset()
    is_same = _dtypes(lowered, names) == _dtypes(as_stored, names) and not as_stored.failure
    return frozenset(names) if is_same else frozenset()


def _is_only_in_products(parameter: int, graph: Graph, dtype: str) -> bool:
    """Whether products in ``dtype``, and casts to it, are all that a parameter, or a view of it, is an operand of."""
    same = _views({parameter}, graph)
    uses = [operator for operator in graph.operators if not same.isdisjoint(operator.inputs)]
    ends = [operator for operator in uses if same.isdisjoint(operator.outputs)]
    return (
        graph.tensors[parameter].dtype == "float32"
        and bool(ends)
        and all(
            _base_name(operator.name) in _PRODUCTS | _CASTS
            and all(f"torch.{graph.tensors[made].dtype}" == dtype for made in operator.outputs)
            for operator in ends
        )
        and same.isdisjoint(graph.outputs)
    )


def _views(tensors: Collection[int], graph: Graph) -> set[int]:
    """These tensors, and what has the same elements of them."""
    same = set(tensors)
    for operator in graph.operators:
        if _base_name(operator.name) in _SAME_VALUES and not same.isdisjoint(operator.inputs):
            same.update(operator.outputs)
    return same


def _dtypes(graph: Graph, names: Collection[str]) -> list[tuple[str, tuple[str, ...]]]:
    """The operators with the dtypes of what they make, but for views and casts of these parameters."""
    own = _views({tensor for tensor, name in graph.parameters.items() if name in names}, graph)
    return [
        (operator.name, tuple(graph.tensors[made].dtype for made in operator.outputs))
        for operator in graph.operators
        if own.isdisjoint(operator.outputs)
        and not (_base_name(operator.name) in _CASTS and not own.isdisjoint(operator.inputs))
    ]


def _base_name(name: str) -> str:
    """``linear`` of ``aten.linear.default``; what is no ATen operator has none."""
    parts = name.split(".")
    return parts[1] if parts[0] == "aten" and len(parts) > 1 else ""
