"""Code that asks whether it is compiled.

The answer (``torch.compiler.is_compiling()``) is no in a trace, which runs everything as it is written. In the run of a
module that ``torch.compile`` has compiled it is yes, but for what the compiler leaves as it is written: after a break
of the graph, say, or when it has compiled too often. So which way such code goes is not known before it runs. A trace
notes who asks, and in another one the answer is yes.
"""

from __future__ import annotations

import sys
from collections.abc import Collection, Iterator
from contextlib import ExitStack, contextmanager
from contextvars import ContextVar
from types import FunctionType
from typing import Any

import torch

from lightning_autotp.capture.call_sites import is_user_code
from lightning_autotp.capture.seen_functions import code_calling
from lightning_autotp.capture.tracer import Tracer

_compiled: ContextVar[Collection[str]] = ContextVar("modules that are told in traces to be compiled", default=())


@contextmanager
def as_compiled(modules: Collection[str]) -> Iterator[None]:
    """Within it the code of these modules, and what it calls, is told in traces that it is compiled.

    Args:
        modules: where they are.
    """
    token = _compiled.set(modules)
    try:
        yield
    finally:
        _compiled.reset(token)


def is_told_compiled(module: str) -> bool:
    """Whether the code of a module is told in traces that it is compiled, whatever it is in."""
    return module in _compiled.get()


@contextmanager
def noting_questions(tracer: Tracer) -> Iterator[None]:
    """Note in the graph that is traced which modules' code asks, and answer it.

    Code of torch and of this package gets the answer that is true.
    """
    with ExitStack() as stack:
        for question in (torch.compiler.is_compiling, torch.compiler.is_dynamo_compiling):
            code = question.__code__
            stack.callback(setattr, question, "__code__", code)
            question.__code__ = code_calling(_Question(question, tracer), code)
        yield


class _Question:
    """Answers one of these functions.

    Args:
        question: the function.
        tracer: what runs meanwhile.
    """

    def __init__(self, question: Any, tracer: Tracer) -> None:
        self.original = FunctionType(question.__code__, question.__globals__)
        self.tracer = tracer

    def __call__(self) -> bool:
        """Whether the code that asks is compiled."""
        frame = sys._getframe(2)
        while frame.f_back is not None and frame.f_code.co_name == self.original.__name__:  # torch's older ones
            frame = frame.f_back
        if self.tracer.paused or not is_user_code(frame.f_code.co_filename):
            return bool(self.original())
        self.tracer.graph.compiling.add(self.tracer.modules[-1])
        return any(map(is_told_compiled, self.tracer.modules))
