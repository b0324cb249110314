"""How a call of an operator is written into a graph: its arguments by the schema's names, writes through views."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

from torch import Generator, Tensor

from lightning_autotp.operators import record
from lightning_autotp.operators.graph import WRITTEN_THROUGH, Operator, Ref
from lightning_autotp.private.torch_private import schema_of


def written_through(view: Operator) -> tuple[str, tuple[tuple[str, Any], ...]]:
    """The operator that writes through a view into the tensor that it looks at, and its arguments after these two."""
    known = record(view.name)
    rest = tuple((name, value) for name, value in view.arguments if name != "self")
    return known.scatter if known and known.scatter else WRITTEN_THROUGH + view.name, rest


def named_arguments(func: Any, args: Any, kwargs: Any) -> tuple[tuple[str, Any], ...]:
    """Arguments by the schema's names with its defaults; lists become tuples, dtypes and devices become text."""
    named = []
    for position, (name, is_keyword, default) in enumerate(_declared(func)):
        if position < len(args) and not is_keyword:
            named.append((name, _plain(args[position])))
        else:
            named.append((name, _plain(kwargs[name]) if name in kwargs else default))
    return tuple(named)


@lru_cache(maxsize=1024)
def name_of(func: Any) -> str:
    """An operator's name as a graph has it."""
    return str(func)


@lru_cache(maxsize=1024)
def _declared(func: Any) -> tuple[tuple[str, bool, Any], ...]:
    """Of each argument of an operator its name, whether it is given by it only, and its default as a graph has it."""
    arguments = schema_of(func).arguments
    return tuple((argument.name, argument.kwarg_only, _plain(argument.default_value)) for argument in arguments)


@lru_cache(maxsize=1024)
def written_arguments(func: Any) -> tuple[int, ...]:
    """The numbers of the arguments that an operator writes in place."""
    return tuple(number for number, argument in enumerate(schema_of(func).arguments) if argument.is_write)


def _plain(value: Any) -> Any:
    if isinstance(value, tuple | list):
        return tuple(_plain(item) for item in value)
    if value is None or isinstance(value, Tensor | Ref | bool | int | float | str):
        return value
    if isinstance(value, Generator):  # another trace has another one, made in the same way
        return f"generator with seed {value.initial_seed()}"
    return str(value)
