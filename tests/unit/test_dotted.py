"""Names in narrow tables."""

from __future__ import annotations

from io import StringIO

import pytest
from rich.console import Console
from rich.table import Table

from lightning_autotp.layouts.dotted import DottedName


def printed(name: str, width: int) -> list[str]:
    table = Table(box=None, padding=0, show_header=False)
    table.add_column()
    table.add_column(no_wrap=True)
    table.add_row(DottedName(name), "|")
    console = Console(width=width, file=StringIO(), record=True)
    console.print(table)
    return [line.rstrip("| ") for line in console.export_text().splitlines()]


@pytest.mark.parametrize("width", [20, 25, 60])
@pytest.mark.parametrize("name", ["  mlp.shared_expert.gate_proj.weight", "model.layers.0-7 (8x)", "a = b.weight", "x"])
def test_names_are_divided_after_dots_and_spaces_only(name: str, width: int) -> None:
    lines = printed(name, width)
    assert all(line[-1:] in ".=0123456789" or line == lines[-1] for line in lines)
    assert "".join(line.strip() for line in lines).replace(" ", "") == name.replace(" ", "")
    assert len(lines) == 1 or max(map(len, lines)) < width
    assert (len(lines) == 1) == (len(name) < width)
