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
    calls: list[ExampleCall],
    *,
    device: torch.device,
    opaque: frozenset[str] = frozenset(),
    only: Collection[str] | None = None,
) -> frozenset[str]:
    """The names of float32 parameters that autocast casts to ``dtype`` wherever a model uses them. Not collective.

    Args:
        dtype: bfloat16 or float16.
        make: makes the model anew, on meta.
        calls: how it is called.
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
            return capture_local(model, calls, Graph(opaque=opaque, device=str(device)), training=False)

    try:
        as_stored = traced(())
        names = {as_stored.parameters[tensor] for tensor in _only_in_products(as_stored, dtype)}
        names = names if only is None else names.intersection(only)
        lowered = traced(names) if names else as_stored
    except CaptureError:
        return frozenset()
    is_same = _dtypes(lowered, names) == _dtypes(as_stored, names) and not as_stored.failure
    return frozenset(names) if is_same else frozenset()


def _only_in_products(graph: Graph, dtype: torch.dtype) -> set[int]:
    """The float32 parameters of which nothing but products in ``dtype`` and casts to it is computed."""
    origins = _views(graph, {tensor for tensor in graph.parameters if graph.tensors[tensor].dtype == "float32"})
    right: set[int] = set()
    wrong = {origins[tensor] for tensor in graph.outputs if tensor in origins}
    for operator in graph.operators:
        used = {origins[tensor] for tensor in operator.inputs if tensor in origins}
        if not used or any(made in origins for made in operator.outputs):
            continue
        is_in = all(f"torch.{graph.tensors[made].dtype}" == str(dtype) for made in operator.outputs)
        (right if is_in and _base_name(operator.name) in _PRODUCTS | _CASTS else wrong).update(used)
    return right - wrong


def _views(graph: Graph, tensors: Collection[int]) -> dict[int, int]:
    """These tensors, and what has the elements of one of them, each with that one."""
    origins = {tensor: tensor for tensor in tensors}
    for operator in graph.operators:
        of = [tensor for tensor in operator.inputs if tensor in origins]
        if of and _base_name(operator.name) in _SAME_VALUES:
            origins.update(dict.fromkeys(operator.outputs, origins[of[0]]))
    return origins


def _dtypes(graph: Graph, names: Collection[str]) -> list[tuple[str, tuple[str, ...]]]:
    """The operators with the dtypes of what they make, but for views and casts of these parameters."""
    own = _views(graph, {tensor for tensor, name in graph.parameters.items() if name in names})
    return [
        (operator.name, tuple(graph.tensors[made].dtype for made in operator.outputs))
        for operator in graph.operators
        if own.keys().isdisjoint(operator.outputs)
        and not (_base_name(operator.name) in _CASTS and not own.keys().isdisjoint(operator.inputs))
    ]


def _base_name(name: str) -> str:
    """``linear`` of ``aten.linear.default``; what is no ATen operator has none."""
    parts = name.split(".")
    return parts[1] if parts[0] == "aten" and len(parts) > 1 else ""
