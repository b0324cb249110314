"""What a function makes of a rank's parts, by the records of the operators that it runs.

A record says of every dim of an operator whether its elements go through independently of each other (then the operator
makes the same part of the result of a part), are summed, or are needed all at once. So a call is traced with tensors of
the parts' shapes, and its operators are related as those of a model are.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from types import BuiltinFunctionType, MethodDescriptorType, MethodWrapperType, WrapperDescriptorType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from lightning_autotp.capture.capture import CaptureError, capture
from lightning_autotp.capture.garbage import relaxed_gc
from lightning_autotp.capture.nested import map_leaves, tensors_in
from lightning_autotp.layouts.dims import Axis, leaves
from lightning_autotp.operators import Dims, relate
from lightning_autotp.operators.graph import Graph
from lightning_autotp.private.torch_private import without_modes

_COMPILED = (BuiltinFunctionType, MethodDescriptorType, MethodWrapperType, WrapperDescriptorType)
"""Functions without code of Python's, which might compute with the size that a dim has here."""
_IN_PYTHON = frozenset((Tensor.norm, torch.norm, torch.einsum, F.embedding))
"""Functions with such code, which does not."""


class _Operand:
    """Stands for a tensor among the arguments of a call.

    Attributes:
        name: of the parameter that is it.
    """

    def __init__(self, name: str) -> None:
        self.name = name


class _OneCall(nn.Module):
    """A call of a function, whose tensors are parameters: it depends on nothing else.

    Attributes:
        names: of the parameters, by the ``id`` of the tensors.
        returned: of each call, how many tensors it gave; also of a copy's.
    """

    def __init__(self, func: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        super().__init__()
        self.names: dict[int, str] = {}
        self.returned = returned = list[int]()
        self.given = map_leaves(self._without, (tuple(args), dict(kwargs)))

        def run(args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
            result = func(*args, **kwargs)
            returned.append(len(list(tensors_in(result))))
            return result

        self.run = run  # copies have the same

    def forward(self) -> Any:
        """What the function gives."""
        return self.run(*map_leaves(self._with, self.given))

    def _without(self, _: str, leaf: Any) -> Any:
        if not isinstance(leaf, Tensor):
            return leaf
        name = self.names.setdefault(id(leaf), f"x{len(self.names)}")
        empty = torch.empty(leaf.shape, dtype=leaf.dtype, device="meta")
        self.register_parameter(name, nn.Parameter(empty, requires_grad=leaf.is_floating_point()))
        return _Operand(name)

    def _with(self, _: str, leaf: Any) -> Any:
        return getattr(self, leaf.name) if isinstance(leaf, _Operand) else leaf


def cut_dim(
    func: Callable[..., Any],
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    cut: Mapping[int, int],
    free: Collection[int],
) -> int | None:
    """Along which dim the results of a call with parts are cut; ``None`` if it is not known that they are parts.

    Args:
        func: the function.
        args: its arguments.
        kwargs: those by name.
        cut: by the ``id`` of each part, the dim along which it is cut; all of them in the same way.
        free: the ``id`` of other tensors, which may have any numbers along that dim.
    """
    if not (isinstance(func, _COMPILED) or func in _IN_PYTHON):
        return None
    with without_modes(), relaxed_gc(), torch.enable_grad():
        call = _OneCall(func, args, kwargs)
        try:
            graph = capture(call, ())
        except CaptureError:
            return None
    if call.returned[-1] != len(graph.outputs):  # there are others than floating-point numbers
        return None
    tensors = {name: tensor for tensor, name in graph.parameters.items()}
    operands = {tensors[name]: one for one, name in call.names.items()}
    return _read(
        graph, {at: cut.get(one) for at, one in operands.items()}, {at for at, one in operands.items() if one in free}
    )


def _read(graph: Graph, cut: Mapping[int, int | None], free: Collection[int]) -> int | None:
    """As :func:`cut_dim`, of a traced call.

    Args:
        graph: the trace.
        cut: by operand, the dim along which it is cut, if it is.
        free: the operands that may have any numbers along that dim.
    """
    relations, axes = relate(graph)

    def resolved(of: Mapping[int, Dims]) -> dict[int, Dims]:
        return {tensor: tuple(map(axes.resolve, dims)) for tensor, dims in of.items()}

    given = {tensor: dims for relation in reversed(relations) for tensor, dims in resolved(relation.inputs).items()}
    along = {given[at][dim] for at, dim in cut.items() if dim is not None and at in given}
    axis = along.pop() if len(along) == 1 else None
    if not isinstance(axis, Axis):  # else it is made of pieces, whose places in the whole are others, or of one element
        return None

    def places(dims: Dims) -> list[int]:
        return [at for at, dim in enumerate(dims) if axis in leaves(dim)]

    for at, dim in cut.items():
        if at in given and at not in free and places(given[at]) != ([] if dim is None else [dim]):
            return None
    for relation in relations:
        read = resolved(relation.inputs)
        if not any(map(places, read.values())):
            continue
        is_counted = any(graph.tensors[tensor].is_static and places(dims) for tensor, dims in read.items())
        needed = tuple(axes.resolve(dim) for dim in (*relation.whole, *relation.contracted))
        if is_counted or relation.draws or places(needed):
            return None
        if any([dims[at] for at in places(dims)] != [axis] for dims in resolved(relation.outputs).values()):
            return None
    made = {tensor: dims for relation in relations for tensor, dims in resolved(relation.outputs).items()}
    found = {tuple(places(made[tensor])) if tensor in made else () for tensor in graph.outputs}
    return next(iter(found))[0] if len(found) == 1 and all(found) else None
