"""Numbers that note what code asks of them, or that it asks what they are, rather than only computes with them.

A comparison is noted as the question that it is, so that it can be asked again of the numbers of another call: all
numbers with the same answers lead the code the same way. What is written in C (``range``, an element of a list, all of
torch) sees an integer's value and says nothing, so integers are told apart by their values, too.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

import torch

from lightning_autotp.operators.questions import OF_TENSOR, SIZE, TOLD, Number, Question

_T = TypeVar("_T")

_COMPUTING = {
    "add": 2, "sub": 2, "mul": 2, "truediv": 2, "floordiv": 2, "mod": 2, "pow": 2, "and_": 2, "or_": 2, "xor": 2,
    "lshift": 2, "rshift": 2, "neg": 1, "pos": 1, "abs": 1, "invert": 1,
}  # fmt: skip
"""Functions of ``operator`` by which numbers are computed, and of how many."""
_ASKING = {"eq": "eq", "ne": "ne", "lt": "lt", "le": "le", "gt": "gt", "ge": "ge", "bool": "truth"}
"""Python's methods that ask something, and what does so in ``operator``."""
_TELLING = (
    "__hash__", "__int__", "__float__", "__round__", "__trunc__", "__floor__", "__ceil__", "__str__", "__repr__",
    "__format__", "is_integer",
)  # fmt: skip
"""Methods of which anything may follow."""
_LARGEST = 64
"""Of so many operands a number may be computed that is still noted."""


@dataclass
class Notes:
    """What code asks of the numbers in a trace.

    Attributes:
        questions: what it compares, in the order in which it was asked first.
        of_sizes: those with sizes of tensors, of the call under way.
        told: the places of numbers of which it asks what they are.
        are_sizes_told: whether it asks what some size is, so that numbers that look constant may follow from it.
    """

    questions: dict[Question, None] = field(default_factory=dict)
    of_sizes: dict[Question, None] = field(default_factory=dict)
    told: set[str] = field(default_factory=set)
    are_sizes_told: bool = False

    def take(self) -> Notes:
        """What was asked until now, which is no longer noted here then."""
        taken = replace(self)
        vars(self).update(vars(Notes()))
        return taken

    def add(self, asked: Notes) -> None:
        """Note what was asked elsewhere, after what was asked here."""
        self.questions |= asked.questions
        self.of_sizes |= asked.of_sizes
        self.told |= asked.told
        self.are_sizes_told |= asked.are_sizes_told

    def given(self, place: str, value: Number) -> Number:
        """A number of the arguments that is noted."""
        return _noted(value, place, 1, self)

    def sized(self, tensor: int, shape: Sequence[int]) -> torch.Size:
        """The shape of a trace's tensor, noted."""
        return torch.Size([_noted(size, Question(OF_TENSOR, (tensor, dim)), 1, self) for dim, size in enumerate(shape)])

    def again(self, value: Number, expression: Question | str, size: int) -> Number:
        """A number that is noted as one was before."""
        return _noted(value, expression, size, self)

    def counting(self, value: Any) -> Any:
        """An object in which code counts its calls, say: its integers are noted like sizes that grow."""
        for name, count in getattr(value, "__dict__", {}).items():
            if type(count) is int:
                setattr(value, name, self.given(f"{SIZE}{count}", count))
        return value

    def ask(self, function: str, given: tuple[Any, ...]) -> None:
        """Code asks for this comparison."""
        question = Question(function, tuple(map(_operand, given)))
        has_size = question.has_size or any(place.startswith(SIZE) for place in question.places())
        (self.of_sizes if has_size else self.questions)[question] = None

    def computed(self, function: str, given: tuple[Any, ...], result: Any) -> Any:
        """What code has computed, noted as well."""
        question = Question(function, tuple(map(_operand, given)))
        size = sum(getattr(number, "size", 1) for number in given)
        if size > _LARGEST:
            self.tell(question)
            return result
        return _noted(result, question, size, self)

    def tell(self, expression: Question | str) -> None:
        """Code asks what this number is."""
        if isinstance(expression, Question) and expression.has_size:
            self.of_sizes[Question(TOLD, (expression,))] = None
            self.are_sizes_told = True
        else:
            self.told.update([expression] if isinstance(expression, str) else expression.places())


class _Noted:
    """What both kinds have.

    Attributes:
        expression: where it is in the arguments, or how it follows from what is there.
        size: of how many operands it was computed.
        notes: who is told of what is asked.
    """

    expression: Question | str
    size: int
    notes: Notes

    def __copy__(self: _T) -> _T:
        return self

    def __deepcopy__(self: _T, _: Any) -> _T:
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        number = plain(self)
        return type(number), (number,)

    def __divmod__(self, other: Any) -> tuple[Any, Any]:
        noted: Any = self
        return noted // other, noted % other


class NotedInt(_Noted, int):
    """An integer, and each that is computed from it, which notes what Python code compares it with.

    To functions written in C, as all of torch's are, it is the integer. Of a size it says so where it can when code
    asks for its value otherwise; other integers are told apart by their values anyway.
    """


class NotedFloat(_Noted, float):
    """A float that notes what Python code compares it with, and says so when code asks for its value otherwise."""


def plain(value: Any) -> Any:
    """A number that is noted as the ordinary one that it is; anything else itself."""
    if type(value) is NotedInt:
        return int.__pos__(value)
    return float.__pos__(value) if type(value) is NotedFloat else value


def _noted(value: Any, expression: Question | str, size: int, notes: Notes) -> Any:
    kind = {int: NotedInt, float: NotedFloat}.get(type(value))
    if kind is None:
        return value
    made: NotedInt | NotedFloat = kind(value)
    made.expression, made.size, made.notes = expression, size, notes
    return made


def _operand(value: Any) -> Any:
    return value.expression if isinstance(value, _Noted) else _ordinary(value)


def _ordinary(value: Any) -> Number:
    """A flag, or a number of a class of its own (an enumeration's member), as a number."""
    number: Number = int.__pos__(value) if isinstance(value, int) else float.__pos__(value)
    return number


def _computing(base: Any, name: str, function: str, is_reflected: bool) -> Callable[..., Any]:
    own, run = getattr(base, name), getattr(operator, function)

    def compute(self: Any, *others: Any) -> Any:
        if len(others) > 1 or not all(type(plain(other)) in (int, float, bool) for other in others):
            return own(self, *others)
        given = (*others, self) if is_reflected else (self, *others)
        return self.notes.computed(function, given, run(*map(plain, given)))

    return compute


def _asking(base: Any, name: str, function: str) -> Callable[..., Any]:
    own, run = getattr(base, name), getattr(operator, function)

    def ask(self: Any, *others: Any) -> Any:
        if not all(isinstance(other, int | float) for other in others):
            return own(self, *others)
        self.notes.ask(function, (self, *others))
        return run(*map(plain, (self, *others)))

    return ask


def _telling(base: Any, name: str) -> Callable[..., Any]:
    own = getattr(base, name)

    def tell(self: Any, *others: Any) -> Any:
        if base is float or (isinstance(self.expression, Question) and self.expression.has_size):
            self.notes.tell(self.expression)
        return own(self, *others)

    return tell


for _kind, _base in ((NotedInt, int), (NotedFloat, float)):
    for _function, _operands in _COMPUTING.items():
        _name = _function.strip("_")
        for _method in (f"__{_name}__", f"__r{_name}__")[:_operands]:
            if hasattr(_base, _method):
                setattr(_kind, _method, _computing(_base, _method, _function, _method == f"__r{_name}__"))
    for _name, _function in _ASKING.items():
        setattr(_kind, f"__{_name}__", _asking(_base, f"__{_name}__", _function))
    for _name in _TELLING:
        if hasattr(_base, _name):
            setattr(_kind, _name, _telling(_base, _name))
