"""The documentation's code compiles, names what exists, and its links resolve."""

from __future__ import annotations

import ast
import importlib
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md")])


def blocks(page: Path) -> list[str]:
    return re.findall(r"^```python\n(.*?)^```", page.read_text(), re.MULTILINE | re.DOTALL)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_code_compiles_and_its_imports_exist(page: Path) -> None:
    for block in blocks(page):
        for node in ast.walk(ast.parse(block)):
            if isinstance(node, ast.ImportFrom) and node.module:
                module = importlib.import_module(node.module)
                assert all(hasattr(module, alias.name) for alias in node.names), node.module
            elif isinstance(node, ast.Import):
                for alias in node.names:
                    importlib.import_module(alias.name)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_resolve(page: Path) -> None:
    for target in re.findall(r"\]\((?!http)([^)#]+)", page.read_text()):
        assert (page.parent / target).exists(), target


def test_example_rules_register_and_work() -> None:
    import torch
    from torch import Tensor, nn

    from lightning_autotp.capture import capture
    from lightning_autotp.rules import registry, relate

    class Moves(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.zeros(5, 3, 7))

        def forward(self, x: Tensor) -> Tensor:
            return torch.logaddexp(torch.movedim(self.weight, 0, 2), x)

    before = dict(registry._RULES)
    try:
        for block in blocks(ROOT / "docs" / "adding-a-rule.md"):
            exec(compile(block, "adding-a-rule.md", "exec"), {})
        assert {"aten.logaddexp.default", "aten.movedim.int"} <= registry._RULES.keys() - before.keys()
        relations, _ = relate(capture(Moves(), torch.zeros(3, 7, 5)))
        assert not any("no rule" in relation.reason for relation in relations)
    finally:
        registry._RULES.clear()
        registry._RULES.update(before)
