"""How a call of an operator is written into a graph: its arguments by the schema's names, writes through views."""

from __future__ import annotations

from typing import Any

from torch import Generator, Tensor

from lightning_autotp.operators import record
from lightning_autotp.operators.graph import Operator, Ref
from lightning_autotp.private.torch_private import schema_of


def written_through(view: Operator) -> tuple[str, tuple[tuple[str, Any], ...]]:
    """The operator that writes through a view into the tensor that it looks at, and its arguments after these two."""
    known = record(view.name)
    rest = tuple((name, value) for name, value in view.arguments if name != "self")
    return known.scatter if known and known.scatter else f"write through {view.name.split('.')[1]}", rest


def named_arguments(func: Any, args: Any, kwargs: Any) -> tuple[tuple[str, Any], ...]:
    """Arguments by the schema's names with its defaults; lists become tuples, dtypes and devices become text."""
    named = []
    for position, argument in enumerate(schema_of(func).arguments):
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
    if isinstance(value, Generator):  # another trace has another one, made in the same way
        return f"generator with seed {value.initial_seed()}"
    return str(value)
