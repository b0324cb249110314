"""Printing about a model whose layers repeat: what is alike but for the number of its layer is one line."""

from __future__ import annotations

import re
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from itertools import groupby
from typing import NamedTuple, TypeVar

from lightning_autotp.layouts.units import in_units

Item = TypeVar("Item")
Key = TypeVar("Key", bound=Hashable)


class Entry(NamedTuple):
    """A parameter in a table.

    Attributes:
        names: all its names.
        like: what else parameters of one row have in common.
        cells: what the row says of it.
        size: its bytes.
    """

    names: tuple[str, ...]
    like: Hashable
    cells: tuple[str, ...]
    size: int


class Row(NamedTuple):
    """A row of a table.

    Attributes:
        name: of the parameters.
        layers: in which layers, as in ``model.layers.0-7 (8x)``; empty for a parameter of none.
        cells: what it says of them.
        size: their bytes.
    """

    name: str
    layers: str
    cells: tuple[str, ...]
    size: str


def rows_of(entries: Iterable[Entry]) -> Iterator[Row]:
    """The rows of a table: one for those of repeated layers that are alike; a row of its own says which layers."""
    by_layers: dict[str, list[Row]] = {}
    for _, alike in _by(entries, lambda entry: (_numberless(entry.names[0]), entry.like)):
        first, size = alike[0], in_units(sum(entry.size for entry in alike))
        name, layers = " = ".join(first.names), ""
        if len(alike) > 1:
            before, _, name = _split(first.names[0])
            numbers = sorted({int(_split(entry.names[0])[1]) for entry in alike})
            layers = f"{before}{ranges(numbers)} ({len(numbers)}x)"
            name = _numberless(name) + (f" ({len(alike) // len(numbers)}x)" if len(alike) > len(numbers) else "")
        row = Row(name, layers, first.cells, size) if name else Row(layers, "", first.cells, size)
        by_layers.setdefault(row.layers or row.name, []).append(row)
    for layers, rows in groupby((row for several in by_layers.values() for row in several), key=lambda row: row.layers):
        if layers:
            yield Row(layers, layers, (), "")
        for row in rows:
            yield row._replace(name="  " + row.name) if layers else row


def counted(lines: Iterable[str]) -> Iterator[str]:
    """Lines that are the same but for the numbers of layers as one, with how many they are."""
    for alike, several in _by(lines, in_any_layer):
        yield several[0] if len(several) == 1 else f"{alike} ({len(several)}x)"


def by_reason(said: Iterable[tuple[str, str]]) -> Iterator[tuple[str, str]]:
    """Of pairs of a name and a reason one pair for each reason, with all the names.

    Where several names have a reason, the numbers of layers are left out of it.
    """
    for reason, alike in _by(said, lambda pair: in_any_layer(pair[1])):
        yield ", ".join(counted(name for name, _ in alike)), alike[0][1] if len(alike) == 1 else reason


def in_any_layer(text: str) -> str:
    """A text in which the names of modules and parameters have no numbers of layers: ``model.layers.*.mlp``."""
    return re.sub(r"[A-Za-z_]\w*(?:\.\w+)+", lambda found: _numberless(found[0]), text)


def ranges(numbers: Sequence[int]) -> str:
    """Numbers in ascending order, as in ``0-2,5``."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and runs[-1][-1] == number - 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    return ",".join(f"{run[0]}-{run[-1]}" if len(run) > 1 else str(run[0]) for run in runs)


def by_rank(of_ranks: Sequence[str]) -> str:
    """What is said of every rank, as in ``3 MiB on ranks 0-2, 4 MiB on rank 3``."""
    said = []
    for text, ranks in _by(range(len(of_ranks)), of_ranks.__getitem__):
        which = "each rank" if len(ranks) == len(of_ranks) else f"rank{'s' * (len(ranks) > 1)} {ranges(ranks)}"
        said.append(f"{text} on {which}")
    return ", ".join(said)


def _numberless(name: str) -> str:
    return ".".join("*" if part.isdigit() else part for part in name.split("."))


def _split(name: str) -> tuple[str, str, str]:
    """A name before its first number, the number, and what comes after it."""
    parts = name.split(".")
    at = next(at for at, part in enumerate(parts) if part.isdigit())
    return "".join(f"{part}." for part in parts[:at]), parts[at], ".".join(parts[at + 1 :])


def _by(items: Iterable[Item], key: Callable[[Item], Key]) -> Iterable[tuple[Key, list[Item]]]:
    """Items with the same key together, in the order of the first of them."""
    found: dict[Key, list[Item]] = {}
    for item in items:
        found.setdefault(key(item), []).append(item)
    return found.items()
