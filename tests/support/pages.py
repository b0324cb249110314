"""The pages of the documentation and the code blocks in them."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]

DOCS = sorted((ROOT / "docs").glob("*.md"))

PAGES = [*sorted(ROOT.glob("*.md")), *DOCS]

OPERATORS_PAGE = ROOT / "docs" / "adding-an-operator.md"


def blocks(page: Path, kind: str) -> list[str]:
    return re.findall(rf"^```{kind}\n(.*?)^```", page.read_text(), re.MULTILINE | re.DOTALL)
