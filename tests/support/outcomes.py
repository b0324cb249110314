"""What a function that several ranks run ended with."""

from __future__ import annotations

from typing import Any


def outcome(check: Any, *args: Any) -> str | None:
    """What a check says, or ``None`` if it is content."""
    try:
        check(*args)
    except RuntimeError as error:
        return str(error)
    return None
