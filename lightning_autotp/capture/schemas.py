"""What a tracer must know of single operators: their arguments by name, functional twins, inverses of views, shapes."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from lightning_autotp.operators.graph import Operator, Ref


def functional(name: str) -> str:
    """The functional twin of an operator that writes in place."""
    space, _, base = name.rpartition(".")
    if base.startswith("__i") and base.endswith("__"):
        return f"{space}.__{base[3:]}"
    return name.removesuffix("_")


def grouped_product(left: Tensor, right: Tensor, offs: Tensor | None = None, *_: Any, **__: Any) -> Tensor:
    """The shape of a grouped product: PyTorch's own shape function refuses dtypes that its kernels take."""
    if left.dim() == 3:
        shape = (left.shape[0], left.shape[1], right.shape[2]) if right.dim() == 3 else (left.shape[1], right.shape[1])
    elif right.dim() == 3:
        shape = (left.shape[0], right.shape[2])
    else:
        shape = (0 if offs is None else offs.shape[0], left.shape[0], right.shape[1])
    return left.new_empty(shape)


def inverse(view: Operator, shape: tuple[int, ...]) -> tuple[str, tuple[tuple[str, Any], ...]]:
    """The operator that writes through a view into the tensor of ``shape`` that it looks at."""
    name = view.name.split(".")[1]
    named = dict(view.arguments)
    named.pop("self", None)
    if name in ("slice", "select"):
        return f"aten.{name}_scatter.default", tuple(named.items())
    return f"write through {name}", tuple(named.items())


def named_arguments(func: Any, args: Any, kwargs: Any) -> tuple[tuple[str, Any], ...]:
    """Arguments by the schema's names with its defaults; lists become tuples, dtypes and devices become text."""
    named = []
    for position, argument in enumerate(func._schema.arguments):
        if position < len(args) and not argument.kwarg_only:
            value = args[position]
        else:
            value = kwargs.get(argument.name, argument.default_value)
        named.append((argument.name, _plain(value)))
    return tuple(named)


def _plain(value: Any) -> Any:
    if isinstance(value, tuple | list):
        return tuple(_plain(item) for item in value)
    if value is None or isinstance(value, Tensor | Ref | bool | int | float | str):
        return value
    return str(value)
