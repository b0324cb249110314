"""Caches of keys and values that a model's layers are given, in which each layer has a slot of its own.

All layers are given the same cache, with their own number in the model (``past_key_values.update(keys, values,
self.layer_idx)``). So what a layer does with it is what it does with its slot, if its code uses the number for nothing
else: that is read off the expression in which it stands.
"""

from __future__ import annotations

import ast
import linecache
from collections.abc import Iterator, Mapping
from functools import cache
from types import FrameType
from typing import Any

from lightning_autotp.private.transformers_private import slots_of_cache


def own_slot(value: Any, place: int | None) -> Any:
    """The slot in a cache of the layer at this place; ``None`` if the value is no cache, or has none for it."""
    slots = slots_of_cache(value)
    return slots[place] if slots is not None and place is not None and place < len(slots) else None


def is_handed_to_cache(frame: FrameType, name: str) -> bool:
    """Whether an attribute of this name, read in a frame just now, goes into a call or an index of a cache alone."""
    takers = _takers(frame.f_code.co_filename).get((frame.f_lineno, name), {""})
    return all(slots_of_cache(frame.f_locals.get(taker)) is not None for taker in takers)


@cache
def _takers(file: str) -> Mapping[tuple[int, str], set[str]]:
    """By line and name, into calls or indexes of which variables a file's attributes go; "" where one does not."""
    try:
        tree = ast.parse("".join(linecache.getlines(file)))
    except SyntaxError:  # such as a notebook's cell
        return {}
    variables = {id(handed): _variable(node) for node in ast.walk(tree) for handed in _handed(node)}
    found: dict[tuple[int, str], set[str]] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute):
            # Of an attribute over several lines, the last one is that of its name.
            found.setdefault((node.end_lineno or 0, node.attr), set()).add(variables.get(id(node), ""))
    return found


def _handed(node: ast.AST) -> Iterator[ast.AST]:
    """What a call or an index takes."""
    if isinstance(node, ast.Call):
        yield from (*node.args, *(keyword.value for keyword in node.keywords))
    elif isinstance(node, ast.Subscript):
        yield node.slice


def _variable(node: ast.AST) -> str:
    """The variable whose attribute, or that of what it holds, a call or an index is of; empty if it is of none."""
    while isinstance(node, ast.Attribute | ast.Subscript | ast.Call):
        node = node.func if isinstance(node, ast.Call) else node.value
    return node.id if isinstance(node, ast.Name) else ""
