"""What is printed of an error that ends a run: its cause once, and what the user wrote on the way to it.

Every rank ends with an error, most of them because another one has failed, and most lines of a traceback are of
libraries. The exceptions themselves are left as they are, for whoever catches them.
"""

from __future__ import annotations

import os
import sys
import sysconfig
from collections.abc import Callable, Iterator
from itertools import groupby
from pathlib import Path
from traceback import FrameSummary, StackSummary, TracebackException, walk_tb
from types import TracebackType
from typing import Any, ClassVar
from weakref import WeakSet, finalize

from lightning_autotp.ranks.agreement import PeerError, Raised
from lightning_autotp.ranks.peers import PeerWatch

PACKAGE = Path(__file__).parent.parent
LIBRARIES = [Path(sysconfig.get_path(name)) for name in ("purelib", "platlib")]
PYTHON = Path(sysconfig.get_path("stdlib"))
WHOLE = "TORCH_DISTRIBUTED_DEBUG"
"""torch's variable, with which whoever looks for a fault is told more."""

Hook = Callable[[type[BaseException], BaseException, TracebackType | None], None]


class BriefErrors:
    """Prints uncaught errors so while a strategy is there: as ``sys.excepthook``, or called by what has replaced it.

    Those are errors that passed through this package, and any that only another rank's failure is the cause of. A
    strategy's models are used after a run, too (``save_pretrained``). Where a process group is made later, torch puts
    the rank before each line, and calls this.
    """

    _one: ClassVar[BriefErrors | None] = None
    """The one of this process."""

    def __init__(self) -> None:
        self._usual: Hook = sys.excepthook
        self._strategies = WeakSet[Any]()

    @classmethod
    def begin(cls, strategy: object) -> None:
        """Print them so from now on, until this strategy is gone, and all others."""
        if cls._one is None:
            cls._one = sys.excepthook = cls()
        finalize(strategy, cls._one._end)  # called after what a set registers later
        cls._one._strategies.add(strategy)

    def _end(self) -> None:
        if not self._strategies and sys.excepthook is self:
            sys.excepthook, BriefErrors._one = self._usual, None

    def __call__(self, kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        """Print an error, as usual where there is no strategy any more."""
        if self._strategies:
            _print(self._usual, kind, error, trace)
        else:
            self._usual(kind, error, trace)


def _print(usual: Hook, kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    peers = PeerWatch.latest
    if not isinstance(error, Exception) or os.environ.get(WHOLE, "OFF") != "OFF":
        usual(kind, error, trace)
    elif peers is not None and peers.explains(error):
        return
    elif any(PACKAGE in Path(frame.f_code.co_filename).parents for frame, _ in walk_tb(trace)):
        print("".join(_lines(error)), end="", file=sys.stderr)
    else:
        usual(kind, error, trace)
    if peers is not None:
        peers.note_printed()


def _lines(error: Exception) -> Iterator[str]:
    raised = Raised.how(error)
    if isinstance(error, PeerError):
        yield f"{type(error).__name__}: {str(error).splitlines()[0]}\n"
    elif raised is not None and not raised.is_first:
        yield f"{type(error).__name__}, as on rank {raised.first}\n"
    else:
        found: TracebackException | None = TracebackException.from_exception(error)
        caused_by = ""
        while found is not None:
            if not caused_by or any(_library(frame) is None for frame in found.stack):
                yield caused_by
                yield from found.format_exception_only()
                yield from _frames(found)
            caused_by = "caused by "
            found = found.__cause__ or (None if found.__suppress_context__ else found.__context__)
        yield f"(frames of libraries are left out: {WHOLE}=INFO in the environment shows them)\n"


def _frames(error: TracebackException) -> Iterator[str]:
    """As Python prints them; those of libraries only where the error was raised."""
    for is_library, frames in groupby(error.stack[:-1], lambda frame: _library(frame) is not None):
        found = list(frames)
        if is_library:
            yield f"  ... {len(found)} frames in {', '.join(dict.fromkeys(map(str, map(_library, found))))}\n"
        else:
            yield from StackSummary.from_list(found).format()
    yield from StackSummary.from_list(error.stack[-1:]).format()


def _library(frame: FrameSummary) -> str | None:
    """The library that a frame is in; ``None`` for what the user wrote."""
    file = Path(frame.filename)
    if PACKAGE in file.parents:
        return PACKAGE.name
    for folder in LIBRARIES:
        if folder in file.parents:
            return file.relative_to(folder).parts[0]
    return "python" if PYTHON in file.parents or frame.filename.startswith("<frozen") else None
