"""How a function's dims belong together, as text: ``"q[b s h d], k[b t h/g d], v[b t h/g e] -> o[b s h e]"``.

Like an einsum equation, with spaces between the dims and names for the arguments (einops writes dims likewise):

* ``h`` a dim; dims of one name are indexed alike, or have size 1 and are broadcast;
* ``h/g`` a dim each of whose indices belongs to ``g`` consecutive ones of ``h``: key/value heads;
* ``(h d)`` several dims in one, the last running fastest;
* ``3`` a dim of this size, which stays whole;
* ``...`` any number of leading dims.

Beside tensors, an argument may be ``heads=h``, a number that is a dim's size, or ``score_mod(- b h s t)``, a function
that is called with indices of these dims, or an object with such a function, ``block_mask.mask_mod(b h s t)``, whose
tensors have these dims first, or size 1 in their place. An argument that comes in several forms has several entries, of
which the first with as many dims holds. A result may have a dtype (``lse[b h s]:float32``) and a condition: there is a
``lse[b h s] if return_lse`` if that argument is given and not false; ``if not NAME``, ``if NAME=VALUE`` and
``if NAME or OTHER`` are understood, too. ``... else None`` says that there is a ``None`` in its place otherwise.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from math import prod
from typing import Any

from lightning_autotp.operators.shapes import Shape

ELLIPSIS = "..."

NO_INDEX = "-"
"""Stands for what a function is called with that is no index."""


class DeclarationError(ValueError):
    """A declaration is not understood, or a call does not fit it."""


@dataclass(frozen=True)
class Term:
    """One dim of a tensor: the product of its factors, of which there is one where it is written without parentheses.

    A factor is a name (``h``), a name with a group (``h/g``), a number, or an ellipsis.
    """

    factors: tuple[str, ...]

    def __str__(self) -> str:
        return self.factors[0] if len(self.factors) == 1 else f"({' '.join(self.factors)})"


@dataclass(frozen=True)
class Tensors:
    """A tensor argument or a result.

    Attributes:
        name: of the argument, or what a result is called.
        terms: its dims.
        dtype: of a result; empty for that of the first tensor argument.
        condition: when there is this result, as text; empty for always.
        or_none: whether there is ``None`` in its place otherwise.
    """

    name: str
    terms: tuple[Term, ...]
    dtype: str = ""
    condition: str = ""
    or_none: bool = False

    def fits(self, rank: int) -> bool:
        """Whether a tensor with so many dims can be this one."""
        return len(self.spelled_out(rank)) == rank

    def spelled_out(self, rank: int) -> tuple[Term, ...]:
        """Its dims for a tensor with so many of them; the leading ones are named by their place from the end."""
        if not self.terms or self.terms[0].factors != (ELLIPSIS,):
            return self.terms
        leading = max(rank - len(self.terms) + 1, 0)
        return (*(Term((f"{ELLIPSIS}{place}",)) for place in range(leading, 0, -1)), *self.terms[1:])

    def __str__(self) -> str:
        return f"{self.name}[{' '.join(map(str, self.terms))}]"


@dataclass(frozen=True)
class Notation:
    """What such a text says.

    Attributes:
        inputs: the tensor arguments.
        counts: arguments that are the size of a dim, by its name.
        functions: arguments that are functions, with the dims whose indices they are called with; ``-`` for others.
        results: what is returned.
    """

    inputs: tuple[Tensors, ...]
    counts: tuple[tuple[str, str], ...]
    functions: tuple[tuple[str, tuple[str, ...]], ...]
    results: tuple[Tensors, ...]

    @property
    def dims(self) -> frozenset[str]:
        """The names of all dims of the tensor arguments."""
        return _names(self.inputs)

    @property
    def groups(self) -> dict[str, str]:
        """The names of groups (``g`` of ``h/g``), each with the dim that is grouped."""
        factors = {factor for tensors in self.inputs for term in tensors.terms for factor in term.factors}
        return {group: name for name, slash, group in (factor.partition("/") for factor in sorted(factors)) if slash}

    @property
    def missing(self) -> frozenset[str]:
        """Dims that no result has, but for groups."""
        return self.dims - _names(self.results) - self.groups.keys()

    def sizes(self, shapes: Mapping[str, Shape], counts: Mapping[str, Any]) -> dict[str, float]:
        """The size of every dim in one call.

        Args:
            shapes: of the tensors that are given.
            counts: the numbers that are given.

        Raises:
            DeclarationError: if they do not fit.
        """
        sizes: dict[str, float] = {name: counts[at] for at, name in self.counts if isinstance(counts.get(at), int)}
        pending = [
            (tensors, term, size)
            for tensors in self.given({name: len(shape) for name, shape in shapes.items()})
            for term, size in zip(tensors.spelled_out(len(shapes[tensors.name])), shapes[tensors.name], strict=True)
        ]
        for _ in range(2):  # what a product leaves open, others may say
            pending = [item for item in pending if not _fit(*item, sizes)]
        if pending:
            tensors, term, size = pending[0]
            raise DeclarationError(f"the sizes of {term} in {tensors}, {size:g} together, are not known")
        return sizes

    def given(self, ranks: Mapping[str, int]) -> list[Tensors]:
        """The tensor arguments of one call, each in the form that it has there.

        Args:
            ranks: the numbers of dims of the tensors that are given, by name.

        Raises:
            DeclarationError: if one has another number of dims.
        """
        forms: dict[str, list[Tensors]] = {}
        for tensors in self.inputs:
            if tensors.name in ranks:
                forms.setdefault(tensors.name, []).append(tensors)
        for name, several in forms.items():
            forms[name] = [form for form in several if form.fits(ranks[name])][:1]
            if not forms[name]:
                declared = " or ".join(map(str, several))
                raise DeclarationError(f"{name} has {ranks[name]} dims where {declared} is declared")
        return [form for several in forms.values() for form in several]

    def returned(self, value_of: Callable[[str], Any]) -> list[Tensors | None]:
        """The results of a call with such arguments, in their order."""
        asked = [(result, _holds(result.condition, value_of)) for result in self.results]
        return [result if holds else None for result, holds in asked if holds or result.or_none]

    def shape(self, result: Tensors, sizes: Mapping[str, float]) -> tuple[float, ...]:
        """The shape of a result."""
        leading = [int(name.removeprefix(ELLIPSIS)) for name in sizes if name.startswith(ELLIPSIS)]
        terms = result.spelled_out(max(leading, default=0) + len(result.terms) - 1)
        unknown = [factor for term in terms for factor in term.factors if not (factor.isdigit() or factor in sizes)]
        if unknown:
            raise DeclarationError(f"the size of {unknown[0]} in {result} is not known")
        return tuple(prod(size_of(factor, sizes) for factor in term.factors) for term in terms)


def size_of(factor: str, sizes: Mapping[str, float]) -> float:
    """The size of a factor."""
    return int(factor) if factor.isdigit() else sizes[factor]


def _names(several: Sequence[Tensors]) -> frozenset[str]:
    factors = {factor for tensors in several for term in tensors.terms for factor in term.factors}
    return frozenset(
        name for factor in factors if factor != ELLIPSIS and not factor.isdigit() for name in factor.split("/")
    )


def _fit(tensors: Tensors, term: Term, size: float, sizes: dict[str, float]) -> bool:
    """Learn the sizes of a term's factors from their product; whether they are known then."""
    unknown = [factor for factor in term.factors if not factor.isdigit() and factor not in sizes]
    known = prod(size_of(factor, sizes) for factor in term.factors if factor not in unknown)
    if len(unknown) == 1 and known:
        sizes[unknown[0]] = size / known
        whole, _, group = unknown[0].partition("/")
        if group and whole in sizes:
            sizes[group] = sizes[whole] / sizes[unknown[0]]
    elif unknown:
        return False
    elif len(term.factors) == 1 and not term.factors[0].isdigit() and 1 in (size, known):  # one is broadcast
        sizes[term.factors[0]] = max(size, known)
    elif size != known:
        raise DeclarationError(f"{term} is {known:g} in one tensor and {size:g} in {tensors}")
    return True


def _holds(condition: str, value_of: Callable[[str], Any]) -> bool:
    return not condition or any(_is_true(part.strip(), value_of) for part in condition.split(" or "))


def _is_true(condition: str, value_of: Callable[[str], Any]) -> bool:
    if condition.startswith("not "):
        return not _is_true(condition.removeprefix("not ").strip(), value_of)
    path, equals, wanted = condition.partition("=")
    name, *attributes = path.strip().split(".")
    value = value_of(name)
    for attribute in attributes:
        value = getattr(value, attribute, None)
    if equals:
        return str(value) == wanted.strip()
    return value is not None and (hasattr(value, "shape") or bool(value))  # a tensor's value is not asked for


@lru_cache(maxsize=1024)
def notation(text: str) -> Notation:
    """What a text says.

    Raises:
        DeclarationError: if it is not understood.
    """
    left, arrow, right = text.partition("->") if "->" in text else (text, "", "")
    if not arrow:
        raise DeclarationError(f"{text!r}: there is no '->' before the results")
    inputs, counts, functions = [], [], []
    for part in _parts(left):
        if found := re.fullmatch(r"([\w.]+)\s*=\s*(\w+)", part):
            counts.append((found[1], found[2]))
        elif found := re.fullmatch(r"(\w+(?:\.\w+)?)\(([^)]*)\)", part):
            functions.append((found[1], tuple(found[2].split())))
        else:
            inputs.append(_tensors(part, text))
    results = tuple(_tensors(part, text) for part in _parts(right))
    if not inputs or not results:
        raise DeclarationError(f"{text!r}: there must be tensors on both sides of '->'")
    made = Notation(tuple(inputs), tuple(counts), tuple(functions), results)
    new = _names(results) - made.dims - {name for _, name in counts}
    if new:
        raise DeclarationError(f"{text!r}: {', '.join(sorted(new))} is no dim of an argument")
    alone = {factor for tensors in inputs for term in tensors.terms for factor in term.factors}
    if single := [f"{name}/{group}" for group, name in made.groups.items() if name not in alone]:
        raise DeclarationError(f"{text!r}: {single[0]} needs an argument with the dim that it groups")
    return made


def _parts(side: str) -> list[str]:
    """What commas separate, outside of brackets."""
    return [part.strip() for part in re.split(r",(?![^\[(]*[\])])", side) if part.strip()]


_TENSOR = re.compile(
    r"(?P<name>[\w.]+)\s*\[(?P<dims>[^]]*)\](?::(?P<dtype>\w+))?"
    r"(?:\s+if\s+(?P<condition>.+?)(?P<none>\s+else\s+None)?)?"
)
_FACTOR = r"[A-Za-z_]\w*(?:/[A-Za-z_]\w*)?|\d+"


def _tensors(part: str, text: str) -> Tensors:
    found = _TENSOR.fullmatch(part)
    if found is None:
        raise DeclarationError(f"{text!r}: {part!r} is not like q[b s h d]")
    terms: list[Term] = []
    for token in re.findall(r"\([^()]*\)|\S+", found["dims"]):
        factors = tuple(token.strip("()").split())
        is_known = token == ELLIPSIS and not terms
        if not factors or not (is_known or all(re.fullmatch(_FACTOR, factor) for factor in factors)):
            raise DeclarationError(f"{text!r}: {token!r} in {part!r} is no dim")
        terms.append(Term(factors))
    return Tensors(
        found["name"], tuple(terms), found["dtype"] or "", (found["condition"] or "").strip(), bool(found["none"])
    )


def formula(text: str, names: frozenset[str]) -> Callable[[Mapping[str, float]], float]:
    """A function of sizes, written as in ``"2 b h s t (d + e)"``: what stands side by side is multiplied.

    Args:
        text: the formula.
        names: the dims that there are.

    Raises:
        DeclarationError: if it is not understood.
    """
    tokens = re.findall(r"\d+\.?\d*|[A-Za-z_]\w*|[-+*/()]", text)
    unknown = {token for token in tokens if token.isidentifier()} - names
    if unknown or "".join(tokens) != text.replace(" ", ""):
        said = "".join(f", {name} is no dim" for name in sorted(unknown))
        raise DeclarationError(f"flops {text!r}: not understood{said}")
    spelled: list[str] = []
    for token in tokens:
        if spelled and spelled[-1] not in "+-*/(" and token not in "+-*/)":
            spelled.append("*")
        spelled.append(token)
    try:
        code = compile(ast.parse(" ".join(spelled), mode="eval"), "<flops>", "eval")
    except SyntaxError as error:
        raise DeclarationError(f"flops {text!r}: {error.msg}") from error
    return lambda sizes: float(eval(code, {"__builtins__": {}}, dict(sizes)))  # of numbers, names and signs alone
