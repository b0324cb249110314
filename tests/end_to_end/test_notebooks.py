"""The notebooks: one is run from top to bottom, of the other the code compiles."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from distributed import PATIENCE
from example_runs import ROOT

FILE, SHELL = "%%writefile ", "!"
"""What a cell of a notebook may begin with: code of a file, a command. Others are Python."""


def cells(name: str) -> list[str]:
    """The code of a notebook's cells but of those that install something."""
    notebook = json.loads((ROOT / "examples" / f"{name}.ipynb").read_text())
    code = [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]
    assert not any(cell["outputs"] for cell in code)
    return ["".join(cell["source"]) for cell in code if "install" not in cell["metadata"].get("tags", [])]


def command(line: str, folder: Path) -> str:
    """Run a command of a cell, by this Python and its scripts."""
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    environment = os.environ | {"PATH": path, "PYTHONPATH": str(ROOT), "MASTER_PORT": os.environ["STANDALONE_PORT"]}
    done = subprocess.run(
        line, shell=True, cwd=folder, env=environment, capture_output=True, text=True, timeout=PATIENCE, check=False
    )
    assert done.returncode == 0, f"{line}:\n{done.stdout}{done.stderr}"
    return done.stdout


@pytest.mark.nightly
def test_the_notebook_runs_from_top_to_bottom(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {}
    printed = []
    for cell in cells("quickstart"):
        if cell.startswith(FILE):
            head, _, content = cell.partition("\n")
            (tmp_path / head.removeprefix(FILE)).write_text(content)
        elif cell.startswith(SHELL):
            printed.append(command(cell.removeprefix(SHELL), tmp_path))
        else:
            exec(compile(cell, "cell", "exec"), names)
    plan, two, one = printed
    assert "self_attn.k_proj.weight" in plan
    assert two.count("loss ") == one.count("loss ") == 5
    assert names["difference"] < 1e-5
    assert "5 losses" in capsys.readouterr().out


@pytest.mark.parametrize("name", ["quickstart", "quickstart_two_gpus"])
def test_the_code_compiles(name: str) -> None:
    for cell in cells(name):
        if not cell.startswith(SHELL):
            compile(cell.partition("\n")[2] if cell.startswith(FILE) else cell, name, "exec")
