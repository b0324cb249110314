"""The documentation tells the truth: its code runs or binds, its outputs and messages are real, its links resolve.

A block marked ``python run`` is executed, all of a page in one namespace, and a ``text`` block right after it is what
it prints. A block marked ``python`` needs several processes, or a test run: ``test_guides.py`` runs it. Here it is
compiled, and what it calls by imported names must exist and take those arguments.
"""

from __future__ import annotations

import ast
import builtins
import contextlib
import dataclasses
import doctest
import importlib
import inspect
import io
import json
import math
import pkgutil
import re
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import block_picture
import memory_picture
import pytest
import recipes
import yaml
from flop_counts import prove_flops
from pages import DOCS, OPERATORS_PAGE, PAGES, ROOT, blocks
from PIL import Image
from rule_cases import CASES
from rule_draws import prove

import lightning_autotp
from lightning_autotp import AutoTPStrategy
from lightning_autotp.operators import registry

PACKAGE = ROOT / "lightning_autotp"
TROUBLE = ROOT / "docs" / "troubleshooting.md"
# These never leave the package: they become other errors, or a reason in the plan.
INTERNAL = {
    "Ambiguous",
    "_TooManyRows",
    "NotAlike",
    "NotAgain",
    "_Differ",
    "Contradiction",
    "NotFoundInTime",
    "UnknownSize",
    "Unknown",
    "_Untraceable",
    "_NotTold",
    "_Reason",
    "NotRun",
    "NoSuchPlace",
    "NoAssignment",
    "NoValue",
    "Unlocalizable",
    "_NoLeaf",
}


def named(page: Path) -> str:
    return page.name


def without_trailing(text: str) -> str:
    plain = re.sub(r"\x1b\[[0-9;]*m", "", text)
    return "\n".join(line.rstrip() for line in plain.strip().splitlines())


@pytest.fixture
def operators_of_the_page() -> Iterator[list[str]]:
    """The operators that the page about them declares, which are unknown until it does and afterwards."""
    declared = re.compile(r'^@operator\("([^"]+)"', re.M)
    names = [name for block in blocks(OPERATORS_PAGE, "python run") for name in declared.findall(block)]
    tables: list[dict[str, Any]] = [registry._RECORDS, CASES]
    before = [dict(table) for table in tables]
    for table in tables:
        for name in names:
            table.pop(name, None)
    try:
        yield names
    finally:
        for table, entries in zip(tables, before, strict=True):
            table.clear()
            table.update(entries)


def run(page: Path) -> None:
    """Execute a page's marked blocks; each must print what the page says."""
    namespace: dict[str, Any] = {}
    found = re.findall(
        r"^```python run\n(.*?)^```\n(?:\n```text\n(.*?)^```)?", page.read_text(), re.MULTILINE | re.DOTALL
    )
    for code, expected in found:
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed):
            exec(compile(code, str(page), "exec"), namespace)
        assert without_trailing(printed.getvalue()) == without_trailing(expected), code


@pytest.mark.parametrize("page", [page for page in PAGES if blocks(page, "python run")], ids=named)
def test_runnable_code_prints_what_the_page_says(page: Path, operators_of_the_page: list[str]) -> None:
    run(page)


def test_operators_of_the_page_are_as_it_says(operators_of_the_page: list[str]) -> None:
    run(OPERATORS_PAGE)
    assert len(operators_of_the_page) == 2
    assert not set(operators_of_the_page) & CASES.keys()
    for block in blocks(OPERATORS_PAGE, "python"):
        if "@case" in block:
            exec(compile(block, str(OPERATORS_PAGE), "exec"), {})
    for name in operators_of_the_page:
        seen = prove(name, examples=25)
        assert seen["sharded"] > 0
    products = [name for name in operators_of_the_page if registry.record(name).flops]
    assert len(products) == 1
    for name in products:
        prove_flops(name, examples=25)


def test_the_record_is_told_whole() -> None:
    """The page names every fact that a record may hold."""
    facts = {field.name for field in dataclasses.fields(registry.Record)} - {"name", "place", "rule"}
    assert facts == set(re.findall(r"^\| `(\w+)` \|", OPERATORS_PAGE.read_text(), re.M))


def imported(tree: ast.AST) -> dict[str, Any]:
    """What a block's imports bind, by name."""
    bound: dict[str, Any] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module:
            module = importlib.import_module(node.module)
            for alias in node.names:
                assert hasattr(module, alias.name), f"{node.module} has no {alias.name}"
                bound[alias.asname or alias.name] = getattr(module, alias.name)
        elif isinstance(node, ast.Import):
            for alias in node.names:
                module = importlib.import_module(alias.name)
                top = importlib.import_module(alias.name.partition(".")[0])
                bound[alias.asname or alias.name.partition(".")[0]] = module if alias.asname else top
    return bound


def resolved(node: ast.expr, bound: dict[str, Any]) -> Any:
    """The object that a dotted name means, ``None`` where it does not begin with an imported one."""
    if isinstance(node, ast.Name):
        return bound.get(node.id)
    owner = resolved(node.value, bound) if isinstance(node, ast.Attribute) else None
    if isinstance(node, ast.Attribute) and (inspect.ismodule(owner) or inspect.isclass(owner)):
        assert hasattr(owner, node.attr), f"{owner} has no {node.attr}"
        return getattr(owner, node.attr)
    return None


@pytest.mark.parametrize("page", PAGES, ids=named)
def test_code_compiles_and_its_names_exist(page: Path) -> None:
    for block in [*blocks(page, "python"), *blocks(page, "python run")]:
        tree = ast.parse(block)
        bound = imported(tree)
        for node in ast.walk(tree):
            if isinstance(node, ast.Attribute):
                resolved(node, bound)
            if not isinstance(node, ast.Call) or any(isinstance(arg, ast.Starred) for arg in node.args):
                continue
            called = resolved(node.func, bound)
            if getattr(called, "__module__", "").partition(".")[0] in ("lightning_autotp", "lightning"):
                keywords = {keyword.arg: None for keyword in node.keywords if keyword.arg}
                inspect.signature(called).bind_partial(*node.args, **keywords)


@pytest.mark.parametrize("page", DOCS, ids=named)
def test_every_python_block_says_what_it_is(page: Path) -> None:
    kinds = set(re.findall(r"^```(\S.*)$", page.read_text(), re.MULTILINE))
    assert kinds <= {"python", "python run", "text", "yaml", "mermaid", "diff"}


@pytest.mark.parametrize("page", DOCS, ids=named)
def test_class_paths_exist(page: Path) -> None:
    for path in re.findall(r"class_path: (\S+)", page.read_text()):
        module, _, name = path.rpartition(".")
        assert hasattr(importlib.import_module(module), name)


def headings(page: Path) -> set[str]:
    """The anchors that a page's headings get."""
    lines = re.findall(r"^#+ (.+)$", page.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", line.lower()).replace(" ", "-") for line in lines}


@pytest.mark.parametrize("page", PAGES, ids=named)
def test_links_resolve(page: Path) -> None:
    for target, anchor in re.findall(r"\]\((?!https?:)([^)#]*)(?:#([^)]+))?\)", page.read_text()):
        linked = page.parent / target if target else page
        assert linked.exists(), target
        assert not anchor or anchor in headings(linked), f"{target}#{anchor}"


def test_the_reference_has_every_public_name() -> None:
    named = re.findall(r"^::: lightning_autotp\.(\w+)$", (ROOT / "docs" / "reference.md").read_text(), re.M)
    assert sorted(named) == lightning_autotp.__all__


def test_the_totals_are_the_zoos() -> None:
    """A page repeats the totals of the pages that the zoo wrote, and the README has their sums."""

    def totals(page: Path) -> list[str]:
        return re.findall(r"^\| [A-Za-z][^|]+(?: \| \d+){7} \|$", page.read_text(), re.M)

    def in_parity(page: Path) -> str:
        rows = [[int(number) for number in re.findall(r"\| (\d+) ", line)] for line in totals(page)]
        return f"{sum(row[3] for row in rows)} of {sum(row[1] for row in rows)}"

    pages = [totals(ROOT / "docs" / f"{name}.md") for name in ("zoo", "zoo-sp", "zoo-tp4", "zoo-sp-tp4", "zoo-others")]
    assert all(pages)
    assert totals(ROOT / "docs" / "zoo-totals.md") == [line for page in pages for line in page]
    readme = (ROOT / "README.md").read_text()
    assert f"[{in_parity(ROOT / 'docs' / 'zoo.md')}](docs/zoo-totals.md) of transformers" in readme
    assert f"and {in_parity(ROOT / 'docs' / 'zoo-others.md')} of six other packages" in readme


def test_the_picture_of_memory_has_the_figures_of_its_page(tmp_path: Path) -> None:
    """If not: ``python tools/memory_picture.py`` draws it again."""
    memory_picture.draw(memory_picture.figures(), tmp_path / "now.png")
    for picture in (tmp_path / "now.png", ROOT / "docs" / "memory.png"):
        assert json.loads(Image.open(picture).text[memory_picture.DATA]) == memory_picture.figures()
    one, two, *others = (sum(parts) for parts in memory_picture.figures().values())
    assert one > two > max(others)


def test_the_picture_of_a_block_is_of_its_plan(tmp_path: Path) -> None:
    """If not: ``python tools/block_picture.py`` draws it again."""
    figures = block_picture.drawn(block_picture.llama_plan())
    block_picture.draw(figures, tmp_path / "now.png")
    for picture in (tmp_path / "now.png", ROOT / "docs" / "block.png"):
        assert json.loads(Image.open(picture).text[block_picture.DATA]) == figures
    assert len(figures["weights"]) == sum(len(row) for row in block_picture.ROWS)
    assert len(figures["sent"]) == 4


def test_recipes_are_configurations() -> None:
    """If not: ``python tools/recipes.py`` writes the page again."""
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
    sizes |= {"vocab_size": 1000}
    base = "nf4" if find_spec("bitsandbytes") else None
    tiny = recipes.Recipe("Tiny", "llama", sizes, "2xH100", lora=2, quantize=base, tokens=4096, length=256)
    page = (ROOT / "docs" / "recipes.md").read_text()
    assert re.findall(r"^## (.+)", page, re.MULTILINE) == [recipe.title for recipe in recipes.RECIPES]
    taken = inspect.signature(AutoTPStrategy.__init__).parameters
    for text in (page, recipes.to_markdown([recipes.section(tiny)])):
        found = [yaml.safe_load(lines)["trainer"] for lines in re.findall(r"```yaml\n(.*?)```", text, re.DOTALL)]
        assert len(found) == len(re.findall("^## ", text, re.MULTILINE))
        for trainer in found:
            options = trainer["strategy"]["init_args"] if "strategy" in trainer else {}
            assert options.keys() <= taken.keys()
            copies = options.get("data_parallel_size", 1)
            ranks = options.get("tensor_parallel_size", 1) * (math.prod(copies) if isinstance(copies, list) else copies)
            assert ranks == trainer["devices"] * trainer["num_nodes"]


def test_as_many_rules_as_it_says() -> None:
    claims = [int(n) for page in PAGES for n in re.findall(r"ore than (\d+)\s+operators", page.read_text())]
    assert claims
    assert max(claims) < len(registry.known_operators())


def test_the_support_matrix_names_errors_that_exist() -> None:
    rows = re.findall(r"^\| .*\berror.*$", (ROOT / "docs" / "support.md").read_text(), re.M)
    named = {name for row in rows for name in re.findall(r"`(\w+Error|Un\w+|BypassedLayer)`", row)}
    ours = {name for module in package_modules() for name, value in vars(module).items() if inspect.isclass(value)}
    assert len(named) > 8
    assert not {name for name in named - ours if not hasattr(builtins, name)}


def package_modules() -> list[Any]:
    names = [module.name for module in pkgutil.walk_packages(lightning_autotp.__path__, "lightning_autotp.")]
    return [importlib.import_module(name) for name in names]


def test_every_error_class_has_an_entry() -> None:
    errors = {
        name
        for module in package_modules()
        for name, value in vars(module).items()
        if inspect.isclass(value) and issubclass(value, Exception) and value.__module__.startswith("lightning_autotp")
    }
    assert len(errors) > 8
    text = TROUBLE.read_text()
    assert {name for name in errors - INTERNAL if f"`{name}`" not in text} == set()


def test_quoted_messages_are_real() -> None:
    """Of every quoted message some stretch stands in the package's own strings."""
    strings = {
        " ".join(node.value.split())
        for module in package_modules()
        for node in ast.walk(ast.parse(Path(module.__file__).read_text()))
        if isinstance(node, ast.Constant) and isinstance(node.value, str)
    }
    entries = re.findall(r"\*\*(.+?)\*\*", TROUBLE.read_text(), re.DOTALL)
    quoted = [quote for entry in entries for quote in re.findall(r"`([^`]+)`", entry)]
    parts = [" ".join(part.split()) for quote in quoted for part in quote.split("...")]
    quotes = [part for part in parts if len(part.split()) > 2]
    assert len(quotes) > 25
    for quote in quotes:
        length = min(len(quote), 20)
        pieces = [quote[start : start + length] for start in range(len(quote) - length + 1)]
        assert any(piece in text for piece in pieces for text in strings), quote


@pytest.mark.parametrize(
    "module",
    [
        ".".join(path.relative_to(ROOT).with_suffix("").parts)
        for path in PACKAGE.rglob("*.py")
        if ">>>" in path.read_text()
    ],
)
def test_examples_in_docstrings_print_what_they_say(module: str) -> None:
    result = doctest.testmod(importlib.import_module(module))
    assert result.attempted > 0
    assert result.failed == 0
