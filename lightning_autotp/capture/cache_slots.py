"""Caches of keys and values that a model's layers are given, in which each layer has a slot of its own.

All layers are given the same cache, with their own number in the model (``past_key_values.update(keys, values,
self.layer_idx)``). So what a layer does with it is what it does with its slot, if its code uses the number for nothing
else: that is read off the expression in which it stands.
"""

from __future__ import annotations

import ast
import linecache
from collections.abc import Iterator, Mapping, MutableMapping
from functools import cache
from types import FrameType
from typing import Any

from lightning_autotp.private.transformers_private import said_of_slots, slots_of_cache


class Entry(MutableMapping[str, Any]):
    """One entry of a dict that has one for each layer: empty, or with the one item :attr:`NAME`."""

    NAME = "own"

    def __init__(self, of_layers: dict[int, Any], place: int) -> None:
        self.of_layers, self.place = of_layers, place

    def __getitem__(self, name: str) -> Any:
        return self.of_layers[self._place(name)]

    def __setitem__(self, name: str, value: Any) -> None:
        self.of_layers[self._place(name)] = value

    def __delitem__(self, name: str) -> None:
        del self.of_layers[self._place(name)]

    def __iter__(self) -> Iterator[str]:
        return iter([self.NAME] if self.place in self.of_layers else [])

    def __len__(self) -> int:
        return int(self.place in self.of_layers)

    def _place(self, name: str) -> int:
        if name != self.NAME:
            raise KeyError(name)
        return self.place


def own_tables(value: Any, place: int | None) -> list[tuple[type, MutableMapping[Any, Any]]] | None:
    """What a cache keeps for the layer at this place; ``None`` if the value is no cache, or has nothing for it.

    Returns:
        The attributes of its slots, those of them that are dicts, and its entry in what the cache says of the slots;
        each with the class that tells what it is.
    """
    slots = slots_of_cache(value)
    if slots is None or place is None or place >= len(slots):
        return None
    found: list[tuple[type, MutableMapping[Any, Any]]] = []
    for slot in slots[place]:
        found.append((type(slot), vars(slot)))
        found += [(dict, inside) for inside in vars(slot).values() if type(inside) is dict]
    return [*found, (Entry, Entry(said_of_slots(value), place))]


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
