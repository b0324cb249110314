"""Private names of other libraries, found in source code."""

from __future__ import annotations

import ast
import inspect
import re
import textwrap
from collections.abc import Iterator, Set
from functools import cache
from pathlib import Path
from types import ModuleType

import torch
from torch import nn

LIBRARIES = ("torch", "torchao", "transformers", "lightning", "torchmetrics")
PYTHONS_OWN = {"sys._getframe", "os._exit", "_fields", "_replace"}
"""Private by their looks alone."""


def is_private(name: str) -> bool:
    return any(re.fullmatch(r"_(?!_).*\w", part) and not part.endswith("__") for part in name.split("."))


def of_library(name: str) -> bool:
    return name.split(".")[0] in LIBRARIES


@cache
def attributes_of_libraries() -> frozenset[str]:
    """Private names by which an attribute of theirs may be asked for in a string."""
    objects = [torch.Tensor, torch.UntypedStorage, nn.Module(), torch.optim.SGD([nn.Parameter(torch.ones(1))])]
    names = {name for one in objects for name in dir(one) if is_private(name)}
    return frozenset(names)


def defined(tree: ast.AST) -> set[str]:
    """Names that a file itself gives to functions, classes, variables and attributes of ``self``."""
    names = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            names.add(node.name)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            names.add(node.id)
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            names |= {node.attr} if isinstance(node.value, ast.Name) and node.value.id == "self" else set()
    return names


def imported_names(node: ast.AST) -> Iterator[str]:
    if isinstance(node, ast.Import):
        yield from (alias.name for alias in node.names)
    elif isinstance(node, ast.ImportFrom) and node.module:
        yield from (f"{node.module}.{alias.name}" for alias in node.names)


def private_uses(source: str, known: Set[str]) -> Iterator[tuple[int, str]]:
    """Lines that use a library's private name, by what is written there.

    Args:
        source: a file's contents.
        known: full names of symbols that are private, whatever they look like.
    """
    tree = ast.parse(source)
    own = defined(tree)
    last_parts = {name.split(".")[-1] for name in known}
    attributes = attributes_of_libraries() | set(filter(is_private, last_parts))
    documentation = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    for node in ast.walk(tree):
        for name in imported_names(node):
            if of_library(name) and (is_private(name) or name in known):
                yield node.lineno, name
        if isinstance(node, ast.Attribute) and (is_private(node.attr) or node.attr in last_parts):
            text = ast.unparse(node)
            on_self = ast.unparse(node.value) in ("self", "cls", "super()")
            ours = node.attr in own and (on_self or node.attr not in attributes)
            if text in known or (is_private(node.attr) and not ours and not {text, node.attr} & PYTHONS_OWN):
                yield node.lineno, text
        elif isinstance(node, ast.keyword) and node.arg and is_private(node.arg) and node.arg not in own:
            yield node.value.lineno, f"{node.arg}="
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in documentation:
            dotted = re.fullmatch(r"\w+(\.\w+)+", node.value) and of_library(node.value) and is_private(node.value)
            if node.value in attributes or dotted:
                yield node.lineno, repr(node.value)


@cache
def names_of(base: type) -> frozenset[str]:
    """The private names that a library's class has for itself."""
    try:
        text = inspect.getsource(base)
    except (OSError, TypeError):  # written in C
        text = ""
    return frozenset(re.findall(r"(?:self\.|def )(_\w+)", text)) | vars(base).keys()


def shadowed(module: ModuleType) -> Iterator[str]:
    """Private names that a class takes although a library's class, from which it is derived, has them for itself."""
    for kind in list(vars(module).values()):
        if not isinstance(kind, type) or kind.__module__ != module.__name__:
            continue
        bases = [base for base in kind.__mro__ if of_library(base.__module__)]
        if not bases:
            continue
        tree = ast.parse(textwrap.dedent(inspect.getsource(kind)))
        own = {name for name in defined(tree) if is_private(name)}
        for base in bases:
            yield from (f"{kind.__name__}.{name} is {base.__name__}'s" for name in sorted(own & names_of(base)))


def passed_on(tree: ast.Module) -> list[str]:
    """What a module imports for others."""
    assignments = [node for node in tree.body if isinstance(node, ast.Assign)]
    lists = [ast.literal_eval(node.value) for node in assignments if ast.unparse(node.targets[0]) == "__all__"]
    return [name for names in lists for name in names]


def offered(file: Path) -> set[str]:
    """The public names that a module has for others: what it passes on, and what it defines."""
    tree = ast.parse(file.read_text())
    targets = [ast.unparse(node.targets[0]) for node in tree.body if isinstance(node, ast.Assign)]
    targets += [ast.unparse(node.target) for node in tree.body if isinstance(node, ast.AnnAssign)]
    targets += [node.name for node in tree.body if isinstance(node, ast.FunctionDef | ast.ClassDef)]
    return {name for name in (*passed_on(tree), *targets) if not name.startswith("_")}


def symbols(file: Path) -> set[str]:
    """What a module of the folder takes from its library: imports by their full names, other private names alone."""
    tree = ast.parse(file.read_text())
    exported = passed_on(tree)
    own = {node.name for node in tree.body if isinstance(node, ast.FunctionDef | ast.ClassDef)}
    names = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and of_library(node.module or ""):
            taken = {alias.name for alias in node.names if is_private(f"{node.module}.{alias.name}")}
            taken |= {alias.name for alias in node.names if (alias.asname or alias.name) in exported}
            # What a function imports, the module passes on by what it does with it.
            taken |= {alias.name for alias in node.names if node not in tree.body}
            names |= {f"{node.module}.{name}" for name in taken}
        elif isinstance(node, ast.Attribute) and is_private(node.attr):
            names.add(node.attr)
        elif isinstance(node, ast.keyword) and node.arg and is_private(node.arg):
            names.add(node.arg)
        elif isinstance(node, ast.FunctionDef) and is_private(node.name) and node.name not in own:
            names.add(node.name)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and is_private(node.value):
            names |= {node.value} if re.fullmatch(r"[\w.]+", node.value) else set()
    return names
