"""Who may import whom: a folder imports folders before it, directly and through others; analysis needs no torch."""

from __future__ import annotations

import ast
import json
import re
import subprocess
import sys
from functools import cache
from pathlib import Path

import folders
import pytest
from distributed import PATIENCE
from PIL import Image

PACKAGE = Path(__file__).parents[2] / "lightning_autotp"
ORDER = [
    "private",
    "progress",
    "layouts",
    "operators",
    "torch_functions",
    "ranks",
    "building",
    "quantized",
    "pretrained",
    "parameters",
    "capture",
    "solving",
    "parallel",
    "applying",
    "proving",
    "gradients",
    "optimizers",
    "whole_matrices",
    "loading",
    "data",
    "guard",
    "checkpoints",
    "export",
    "start_report",
    "pipeline",
    "planning",
    "lightning",
]
"""The folders and the modules that put them together, each of which imports only from those before it."""

ON_TOP = ["losses", "metrics", "hf_trainer", "doctor", "cli", "__init__"]
"""What lies beside them, for the user."""


def name_of(path: Path) -> str:
    parts = path.relative_to(PACKAGE.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


FILES = {name_of(path): path for path in sorted(PACKAGE.rglob("*.py"))}


@cache
def imports(module: str) -> frozenset[str]:
    """What a module's file imports anywhere in it, in functions too."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(FILES[module].read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            assert node.level == 0, f"{module} imports relatively"
            names |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
    return frozenset(names)


@cache
def imported(module: str) -> frozenset[str]:
    """The modules of the package that importing ``module`` runs, followed through to the end."""
    done: set[str] = set()
    pending = [module]
    while pending:
        for other in imports(pending.pop()) & FILES.keys():
            if other not in done and other != "lightning_autotp":
                done.add(other)
                pending.append(other)
                parent = other.rpartition(".")[0]  # a package runs before its modules
                pending += [parent] if parent in FILES and parent != "lightning_autotp" else []
    return frozenset(done)


def folder(module: str) -> str:
    return module.split(".")[1]


def test_every_folder_has_its_place() -> None:
    folders = {path.parent.name for path in PACKAGE.glob("*/__init__.py")}
    assert folders | {path.stem for path in PACKAGE.glob("*.py")} == {*ORDER, *ON_TOP}


@pytest.mark.parametrize("name", ORDER)
def test_a_folder_imports_only_folders_before_it(name: str) -> None:
    allowed = set(ORDER[: ORDER.index(name) + 1])
    modules = [module for module in FILES if module.startswith(f"lightning_autotp.{name}")]
    assert modules
    for module in modules:
        wrong = {other for other in imported(module) if folder(other) not in allowed}
        assert not wrong, f"{module} reaches {sorted(wrong)}"


def test_no_circles() -> None:
    done: set[str] = set()

    def visit(module: str, trail: tuple[str, ...]) -> None:
        assert module not in trail, f"circle: {' -> '.join((*trail, module))}"
        if module not in done:
            for other in sorted(imports(module) & FILES.keys() - {module, "lightning_autotp"}):
                visit(other, (*trail, module))
            done.add(module)

    for module in FILES:
        visit(module, ())
    assert len(done) > 60


def test_no_test_imports_another() -> None:
    """What tests share is in ``tests/support``."""
    tests = {path.stem: path for path in Path(__file__).parents[1].rglob("test_*.py")}
    named = {
        name: re.findall(r"^\s*(?:from|import) (\w+)", path.read_text(), re.MULTILINE) for name, path in tests.items()
    }
    assert "folders" in named["test_walls"]
    assert {name: wrong for name, found in named.items() if (wrong := tests.keys() & found)} == {}


def test_the_picture_shows_these_imports(tmp_path: Path) -> None:
    """If not: ``python tools/folders.py`` draws it again."""
    names = [name for name in ORDER if (PACKAGE / name).is_dir()]
    named = {name: {each for file in FILES if folder(f"{file}.") == name for each in imports(file)} for name in names}
    reached = {
        name: {folder(each) for each in found if each.startswith("lightning_autotp.")} for name, found in named.items()
    }
    wanted = {name: [other for other in names if other in reached[name] - {name}] for name in names}
    folders.draw(folders.imports(), tmp_path / "now.png")
    for picture in (tmp_path / "now.png", PACKAGE.parent / "docs" / "folders.png"):
        drawn = json.loads(Image.open(picture).text[folders.DATA])
        assert list(drawn.items()) == list(wanted.items()), picture
    assert {name for name, _ in folders.WAY} <= drawn.keys()


@pytest.mark.parametrize("name", ["layouts", "operators", "solving"])
def test_analysis_needs_no_torch(name: str) -> None:
    """Run, not read: an import hidden anywhere on the way would be found."""
    modules = [module for module in FILES if folder(f"{module}.") == name]
    script = (
        "import importlib, pathlib, sys, types\n"
        f"package = types.ModuleType('lightning_autotp'); package.__path__ = [{str(PACKAGE)!r}]\n"
        "sys.modules['lightning_autotp'] = package\n"  # without running its __init__, which imports everything
        f"[importlib.import_module(name) for name in {modules}]\n"
        "print(sorted(set(sys.modules) & {'torch', 'transformers', 'lightning'}))"
    )
    found = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=PATIENCE, check=False
    )
    assert found.stdout.strip() == "[]", found.stderr


def test_lightning_is_known_in_one_folder() -> None:
    private = "lightning_autotp.private.lightning_private"  # which that folder imports from, and no other
    users = {
        folder(module)
        for module in FILES.keys() - {private}
        if any(name.split(".")[0] == "lightning" for name in imports(module)) or private in imports(module)
    }
    assert users == {"lightning"}


@pytest.mark.parametrize("name", ["export.reversal", "export.safetensors_writer"])
def test_exports_are_planned_and_written_without_processes(name: str) -> None:
    module = f"lightning_autotp.{name}"
    reached = {*imported(module), module}
    assert not {"lightning_autotp.ranks.agreement", "lightning_autotp.checkpoints.state"} & reached
    assert not [other for other in reached if "torch.distributed" in imports(other)]
