"""Who may know whom: a room imports only rooms before it, and analysis knows no processes."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parent.parent / "lightning_autotp"
PLAIN = [
    "layout",
    "axes",
    "graph",
    "cost",
    "elimination",
    "shardings",
    "points",
    "repeats",
    "solver",
    "plan",
    "annotate",
    "verify",
]
MODULES = sorted(path for path in PACKAGE.rglob("*.py"))


def imports(path: Path, *, only_now: bool = False) -> set[str]:
    tree = ast.parse(path.read_text())
    names: set[str] = set()
    for node in tree.body if only_now else ast.walk(tree):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            names |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
    return names


@pytest.mark.parametrize("room", [*PLAIN, "rules"])
def test_analysis_knows_no_torch(room: str) -> None:
    paths = [PACKAGE / f"{room}.py"] if room != "rules" else sorted((PACKAGE / "rules").glob("*.py"))
    assert paths
    for path in paths:
        foreign = {name for name in imports(path) if name.split(".")[0] in ("torch", "transformers", "lightning")}
        if room == "verify":  # ParameterMeta is its one view of the model
            assert not foreign
        assert not foreign, f"{path.name} imports {foreign}"


def test_lightning_only_in_the_strategy_and_for_its_callbacks() -> None:
    users = {path.name for path in MODULES if any(name.split(".")[0] == "lightning" for name in imports(path))}
    assert users == {"strategy.py", "summary.py", "averaging.py"}


@pytest.mark.parametrize(
    ("room", "known"),
    [("batches", {"agreement"}), ("optimizers", {"checkpoint", "held", "layout", "meta"})],
)
def test_data_and_optimizers_know_little(room: str, known: set[str]) -> None:
    used = {name.split(".")[1] for name in imports(PACKAGE / f"{room}.py") if name.startswith("lightning_autotp.")}
    assert used == known


def test_no_circles() -> None:
    def name(path: Path) -> str:
        parts = path.relative_to(PACKAGE.parent).with_suffix("").parts
        return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)

    edges = {name(path): imports(path, only_now=True) for path in MODULES if path != PACKAGE / "__init__.py"}
    edges = {module: {other for other in used if other in edges and other != module} for module, used in edges.items()}
    done: set[str] = set()

    def visit(module: str, trail: tuple[str, ...]) -> None:
        assert module not in trail, f"circle: {' -> '.join((*trail, module))}"
        if module not in done:
            for other in edges[module]:
                visit(other, (*trail, module))
            done.add(module)

    for module in edges:
        visit(module, ())
    assert len(done) > 20


@pytest.mark.parametrize("room", ["reversal", "safetensors_writer"])
def test_exports_are_planned_and_written_without_processes(room: str) -> None:
    used = imports(PACKAGE / f"{room}.py")
    assert not {"torch.distributed", "lightning_autotp.agreement", "lightning_autotp.checkpoint"} & used
    if room == "safetensors_writer":
        assert not {name for name in used if name.split(".")[0] in ("transformers", "lightning_autotp")}


def test_rooms_are_small() -> None:
    long = {path.name: length for path in MODULES if (length := len(path.read_text().splitlines())) > 500}
    assert not long
