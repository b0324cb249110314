"""Classes that are put in the place of a user's class, whose own code is not told of them."""

from __future__ import annotations

import types
from collections.abc import Mapping
from typing import Any


def subclass(name: str, bases: tuple[type, ...], body: Mapping[str, Any]) -> Any:
    """A class of these bases that does not call their ``__init_subclass__``.

    That is for classes that the user writes: it may take arguments, or enter the class into a registry.
    """
    return types.new_class(name, (_Untold, *bases), {}, lambda namespace: namespace.update(body))


class _Untold:
    def __init_subclass__(cls, **arguments: Any) -> None:
        """Nothing: this is found first."""
