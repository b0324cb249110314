"""``benchmarks/gpu.py`` runs from end to end, tiny and on the processor."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from distributed import SCRIPT_ENVIRONMENT

BENCHMARKS = Path(__file__).parent.parent / "benchmarks"


def test_the_page_is_written_and_nothing_failed(tmp_path: Path) -> None:
    page = tmp_path / "gpu.md"
    command = [sys.executable, "gpu.py", "--page", str(page), "--device", "cpu", "--tiny", "--rounds", "2"]
    subprocess.run(command, cwd=BENCHMARKS, check=True, env={**os.environ, **SCRIPT_ENVIRONMENT})
    text = page.read_text()
    assert "failed" not in text
    steps = [line for line in text.splitlines() if " ms |" in line]
    assert len(steps) == 3 * 2 + 3  # three systems, eager and compiled; and three losses
