"""Canaries: what symbols of other libraries are relied on for, by the symbols' names.

They import nothing of the package: where a library has moved a symbol, its canary says so by name while nothing else
can be imported.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from importlib.util import find_spec
from types import ModuleType
from typing import Any

import pytest

CANARIES: dict[str, Callable[[Any], None]] = {}
"""By the dotted name of a symbol, how to see that it does what is relied on."""


def canary(*names: str) -> Callable[[Callable[[Any], None]], Callable[[Any], None]]:
    """A check of symbols. It is given the symbol, or for an attribute that only instances have, their class."""

    def register(check: Callable[[Any], None]) -> Callable[[Any], None]:
        assert not CANARIES.keys() & set(names)
        CANARIES.update(dict.fromkeys(names, check))
        return check

    return register


def look_for(name: str) -> Any:
    """What a dotted name of modules and attributes stands for; of an attribute that only instances have, its class.

    Raises:
        ImportError: if there is no such module.
        AttributeError: if something else on the way is missing.
    """
    parts = name.split(".")
    found: Any = import_module(parts[0])
    for number, part in enumerate(parts[1:], start=2):
        if isinstance(found, ModuleType) and not hasattr(found, part):
            found = import_module(".".join(parts[:number]))
        elif number == len(parts) and isinstance(found, type) and not hasattr(found, part):
            return found
        else:
            found = getattr(found, part)
    return found


def sing(name: str, check: Callable[[Any], None]) -> None:
    library = name.partition(".")[0]
    if find_spec(library) is None:
        pytest.skip(f"{library} is not installed, which the package does not need")
    try:
        check(look_for(name))
    except Exception as error:
        version = import_module(library).__version__
        what = "is gone from" if isinstance(error, ImportError | AttributeError) else "is not what it was in"
        pytest.fail(
            f"{name} {what} {library} {version}: {type(error).__name__}: {error}\n"
            "lightning_autotp/private says what it is used for"
        )
