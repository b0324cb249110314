"""The versions that the package declares are those that are tested: the lowest ones, and the known-good set."""

from __future__ import annotations

import re
from importlib import metadata
from pathlib import Path

import pytest
from packaging.requirements import Requirement

ROOT = Path(__file__).parents[2]
TESTED_BESIDES = {"hypothesis", "peft"}
"""What only the tests need, and in which versions matters."""


def requirements() -> list[Requirement]:
    """All that the package needs, and what of its extra for development counts."""
    tomllib = pytest.importorskip("tomllib")
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extra = map(Requirement, project["optional-dependencies"]["dev"])
    return [*map(Requirement, project["dependencies"]), *(need for need in extra if need.name in TESTED_BESIDES)]


def pins(file: str) -> dict[str, str]:
    """The versions in a constraints file that are for this Python, by name."""
    lines = (line.split("#")[0].strip() for line in (ROOT / file).read_text().splitlines())
    pinned = (Requirement(line) for line in lines if line)
    mine = (pin for pin in pinned if pin.marker is None or pin.marker.evaluate())
    return {pin.name: str(pin.specifier).removeprefix("==") for pin in mine}


def test_every_requirement_has_a_lowest_version_and_that_is_tested() -> None:
    declared = {need.name: str(need.specifier) for need in requirements()}
    assert declared.keys() > TESTED_BESIDES
    lowest = pins("constraints-lowest.txt")
    assert declared == {name: f">={lowest[name]}" for name in declared}


def test_the_known_good_versions_are_allowed() -> None:
    good = pins("constraints.txt")
    assert not [need.name for need in requirements() if not need.specifier.contains(good[need.name])]


def test_what_is_installed_is_allowed() -> None:
    assert not [need.name for need in requirements() if not need.specifier.contains(metadata.version(need.name))]


def test_the_page_has_these_versions() -> None:
    page = (ROOT / "docs" / "support.md").read_text()
    rows = re.findall(r"^\| (\w+)(?: \([^)]*\))? \| ([\d.]+) \| ([\d.]+) \|$", page, re.M)
    assert len(rows) > 5
    declared = {need.name: str(need.specifier).removeprefix(">=") for need in requirements()}
    text = (ROOT / "constraints.txt").read_text()
    tested = {name: re.search(rf"^{name}==(\S+)", text, re.M)[1] for name, _, _ in rows}  # type: ignore[index]
    assert rows == [(name, declared[name], tested[name]) for name, _, _ in rows]
