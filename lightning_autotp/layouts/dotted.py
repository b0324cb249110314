"""Names of parameters in a narrow table."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import Console, ConsoleOptions
    from rich.measure import Measurement

_INDENTED = "    "


@dataclass(frozen=True)
class DottedName:
    """A name for rich to print: where it is too long, it goes on in the next line, after a dot or a space."""

    text: str

    def __rich_measure__(self, console: Console, options: ConsoleOptions) -> Measurement:
        """From the width of its longest part to its own."""
        from rich.measure import Measurement

        first, *others = self._parts()
        least = max(len(first.rstrip()), *(len(_INDENTED + part.rstrip()) for part in others), 0)
        return Measurement(min(least, len(self.text)), len(self.text))

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[str]:
        """Its lines."""
        line = ""
        for part in self._parts():
            if line.strip() and len((line + part).rstrip()) > options.max_width:
                yield line.rstrip()
                line = _INDENTED
            line += part
        yield line.rstrip()

    def _parts(self) -> list[str]:
        """What is not divided, with the indentation before the first part."""
        return re.findall(r"\s*[^\s.]+\.?\s*|\s+|\.", self.text) or [""]
