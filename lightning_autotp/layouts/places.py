"""Places in a model where a tensor's layout may change: module boundaries, and calls inside a module. Plain data."""

from __future__ import annotations

from dataclasses import dataclass


def said_of(operator: str, module: str, source: str) -> str:
    """An operator, the module that runs it and the line of code, as reasons and errors say it."""
    return f"{operator} in {module or 'the model'} ({source})"


def member(module: str, name: str) -> str:
    """The name of a module's own parameter or attribute in the whole model."""
    return f"{module}.{name}" if module else name


@dataclass(frozen=True)
class Boundary:
    """A place where a tensor enters or leaves a module: there a layout may change.

    Attributes:
        module: the module's path; empty for the root.
        side: ``"in"`` or ``"out"``.
        key: which of the module's inputs or outputs it is (a pytree path such as ``[0][0]`` or
            ``[1]['hidden_states']``).
    """

    module: str
    side: str
    key: str

    def __str__(self) -> str:
        return f"{self.module or '(root)'}.{self.side}{self.key}"


EVERY = -1
"""In a :class:`CallSite`: all such calls from its line, in code that makes as many of them as values say."""


@dataclass(frozen=True)
class CallSite:
    """Where a module's code calls a torch function: the same in every run and every process.

    Attributes:
        file: name of the Python module that the code belongs to.
        line: its line number.
        function: the function's name.
        occurrence: how many such calls from this line came before it in the same run of the module; or
            :data:`EVERY`.
    """

    file: str
    line: int
    function: str
    occurrence: int

    def __str__(self) -> str:
        return f"{self.file}:{self.line} {self.function}" + (f" #{self.occurrence + 1}" if self.occurrence > 0 else "")


@dataclass(frozen=True)
class CallPoint:
    """An argument or a result of a call inside a module: where boundaries are too few, a layout may change there.

    Attributes:
        module: the path of the module whose ``forward`` makes the call.
        call: the call.
        side: ``"argument"`` or ``"result"``.
        leaf: which leaf of the arguments, or of the result, it is.
    """

    module: str
    call: CallSite
    side: str
    leaf: int

    def __str__(self) -> str:
        return f"{self.module or '(root)'}: {self.side} {self.leaf} of {self.call}"
