"""A declaration is tried before it is used: the kernel on random inputs, whole and in parts, forward and backward.

For every dim that may be cut, two calls with half of it each must give the halves of what one call gives (or parts of
the same sum), and gradients likewise. Sizes, dtypes and the values of integers are those of the call that is traced.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from string import ascii_lowercase
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from lightning_autotp.capture.nested import map_leaves
from lightning_autotp.capture.noted_numbers import plain
from lightning_autotp.operators.declared import Declaration
from lightning_autotp.operators.notation import DeclarationError, Tensors, size_of
from lightning_autotp.private.torch_private import schema_of, tree_leaves, with_autograd, without_modes

Part = Mapping[str, list[int]]
"""Of factors of dims that are cut: which of their indices a part has."""

Values = Callable[[Tensor], Tensor | None]
"""The values of a tensor of the trace, on the CPU, if they are known."""

LARGEST = 2**28
"""Bytes of arguments up to which a call is tried: a plan is no benchmark."""

_TRIED: dict[Any, str] = {}
"""What was wrong, by declaration and call: a kernel that gave the right results once is not tried again."""


def try_declaration(
    declaration: Declaration, function: Callable[..., Any], given: Mapping[str, Any], values: Values
) -> None:
    """Try a declaration on a call, unless it was tried on one like it, is large, or the kernel does not run here.

    Args:
        declaration: what is declared.
        function: the kernel, by the arguments' names.
        given: the arguments of the call that is traced.
        values: the values of its tensors.

    Raises:
        DeclarationError: if the kernel computes something else in parts; the message says for which dim.
    """
    if not _can_be_synthetic(given.values()):
        return
    tensors = {name: value for name, value in given.items() if isinstance(value, Tensor)}
    # What is asked of numbers here the model's code does not ask.
    others = map_leaves(lambda _, leaf: plain(leaf), {key: value for key, value in given.items() if key not in tensors})
    if others.get(declaration.draws):
        others[declaration.draws] = 0.0
    like = [(name, tuple(t.shape), t.dtype, str(t.device)) for name, t in tensors.items()]
    key = declaration.name, declaration.text, declaration.whole, declaration.summed, tuple(like), repr(others)
    if key not in _TRIED:
        with _on_its_own():
            _TRIED[key] = _Trial(declaration, function, tensors, others).wrong(values)
    if _TRIED[key]:
        raise DeclarationError(f"{declaration.described}, but {_TRIED[key]}")


@contextmanager
def _on_its_own() -> Iterator[None]:
    """Within it kernels run as if no model were traced: activation checkpointing would run a block again for them."""
    with ExitStack() as stack:
        stack.enter_context(without_modes())
        stack.enter_context(with_autograd())
        stack.enter_context(saved_tensors_hooks(_as_it_is, _as_it_is))
        stack.enter_context(torch.random.fork_rng(devices=[]))
        stack.enter_context(torch.device("cpu"))
        yield


def _as_it_is(tensor: Tensor) -> Tensor:
    return tensor


def _can_be_synthetic(values: Collection[Any]) -> bool:
    """Whether a call's arguments are tensors, not too large, and what can be written down; no objects."""
    size = sum(value.numel() * value.element_size() for value in values if isinstance(value, Tensor))
    return size <= LARGEST and all(map(_is_plain, values))


def _is_plain(value: Any) -> bool:
    if isinstance(value, tuple | list):
        return not any(isinstance(item, Tensor) for item in value) and all(map(_is_plain, value))
    return value is None or isinstance(value, Tensor | bool | int | float | str | torch.dtype)


@dataclass(frozen=True)
class _TrialRun:
    """What one call gave: its results, and the gradients of its floating-point inputs by name."""

    results: list[Tensor]
    gradients: dict[str, Tensor]


class _Trial:
    """Calls of a kernel with whole tensors and with parts of them.

    Args:
        declaration: what is declared of it.
        function: the kernel, by the arguments' names.
        tensors: tensor arguments, of which shapes, dtypes and devices count.
        others: its other arguments.
    """

    def __init__(
        self,
        declaration: Declaration,
        function: Callable[..., Any],
        tensors: Mapping[str, Tensor],
        others: Mapping[str, Any],
    ) -> None:
        self.declaration, self.function, self.tensors, self.others = declaration, function, tensors, dict(others)
        given = {**others, **tensors}
        self.sizes = declaration.sizes({name: tensor.shape for name, tensor in tensors.items()}, given.get)
        ranks = {name: tensor.ndim for name, tensor in tensors.items()}
        self.forms = {form.name: form for form in declaration.notation.given(ranks)}
        self.results = [result for result in declaration.notation.returned(given.get) if result is not None]
        self.cotangents: list[Tensor] = []
        self.is_tried = False
        self._generator = torch.Generator().manual_seed(0)

    def is_right(self, values: Values) -> bool:
        """Whether it runs here, in parts too, and gives the same."""
        return not self.wrong(values) and self.is_tried

    def wrong(self, values: Values) -> str:
        """What is wrong; empty if nothing is, or the kernel does not run here."""
        parts = dict(self._parts())
        if not parts:
            return ""
        try:
            inputs = {name: self._synthetic(tensor, values) for name, tensor in self.tensors.items()}
            whole = self._run(inputs, {}, "")
        except DeclarationError as error:
            return str(error)
        except Exception:  # whatever a kernel raises that needs another device, or other numbers
            return ""
        if not all(tensor.isfinite().all() for tensor in whole.results if tensor.is_floating_point()):
            return ""
        self.is_tried = True
        for dim, halves in parts.items():
            try:
                whole, *runs = (self._run(inputs, part, dim) for part in ({}, *halves))
            except Exception as error:
                return f"with half of {dim} it raises {type(error).__name__}: {error}"
            found = self._difference(whole, runs, halves, dim)
            if found:
                return f"with half of {dim} each, two calls give another {found} than one call: is {dim} needed whole?"
        return ""

    def _parts(self) -> Iterator[tuple[str, list[Part]]]:
        """The dims that may be cut, by name, each with the two halves of its indices."""
        declaration, sizes = self.declaration, {name: int(size) for name, size in self.sizes.items()}
        groups = {name: group for group, name in declaration.notation.groups.items()}
        for name, size in sizes.items():
            if size == 1 or "/" in name or name in declaration.whole or name in declaration.notation.groups:
                continue
            group = groups.get(name, "")
            outer = sizes.get(f"{name}/{group}", size if not group else 1)
            inner = size // outer
            if outer > 1:
                yield (
                    name,
                    [
                        {
                            name: [at * inner + index for at in half for index in range(inner)],
                            **({f"{name}/{group}": half} if group else {}),
                        }
                        for half in _halves(outer)
                    ],
                )
            if inner > 1 and group not in declaration.whole:
                halves = _halves(inner)
                yield group, [{name: [at * inner + i for at in range(outer) for i in half]} for half in halves]

    def _synthetic(self, tensor: Tensor, values: Values) -> Tensor:
        known = values(tensor)
        if known is None:
            if not tensor.is_floating_point():
                raise ValueError("integers that are not known")
            known = torch.randn(tensor.shape, generator=self._generator) * 0.5
        return known.to(dtype=tensor.dtype, device=tensor.device)

    def _run(self, inputs: Mapping[str, Tensor], part: Part, dim: str) -> _TrialRun:
        """Call the kernel with a part of its inputs; an empty one is the whole.

        It gets copies of everything: kernels write into their inputs, their results and the gradients they are given.
        """
        given = {name: self._taken(self.forms.get(name), tensor, part).clone() for name, tensor in inputs.items()}
        floating = [name for name, tensor in given.items() if tensor.is_floating_point()]
        for name in floating:
            given[name].requires_grad_()
        counts = {at: len(part[name]) for at, name in self.declaration.notation.counts if name in part}
        returned = self.function(**{**self.others, **counts, **given})
        results = [leaf for leaf in tree_leaves(returned) if isinstance(leaf, Tensor)]
        if len(results) != len(self.results):
            raise DeclarationError(f"it returns {len(results)} tensors, not {len(self.results)}")
        for result, tensor in zip(self.results, results, strict=True):
            if not part and list(tensor.shape) != [int(n) for n in self.declaration.notation.shape(result, self.sizes)]:
                raise DeclarationError(f"{result} has the shape {list(tensor.shape)}")
        if not self.cotangents:
            self.cotangents = [
                torch.randn(t.shape, generator=self._generator).to(t) if t.is_floating_point() else t for t in results
            ]
        values = [tensor.detach().clone() for tensor in results]
        flowing = [at for at, tensor in enumerate(results) if tensor.requires_grad and self._flows(at, dim)]
        found = torch.autograd.grad(
            [results[at] for at in flowing],
            [given[name] for name in floating],
            [self._taken(self.results[at], self.cotangents[at], part).clone() for at in flowing],
            allow_unused=True,
            materialize_grads=True,
        )
        return _TrialRun(values, dict(zip(floating, found, strict=True)))

    def _flows(self, at: int, dim: str) -> bool:
        """Whether a gradient is sent into a result: not into one without the dim, which both halves give alike."""
        return not dim or dim in self.declaration.summed or self._has(self.results[at], dim)

    def _has(self, form: Tensors | None, dim: str) -> bool:
        """Whether a tensor has a dim, or the dim that it is a group of."""
        named = {dim, self.declaration.notation.groups.get(dim, dim)}
        rank = len(form.terms) if form is not None else 0
        terms = form.spelled_out(rank + len(self.sizes)) if form is not None else ()
        return any(factor.partition("/")[0] in named for term in terms for factor in term.factors)

    def _taken(self, form: Tensors | None, tensor: Tensor, part: Part) -> Tensor:
        """A tensor's elements with the indices that a part has."""
        if form is None or not part:
            return tensor
        for dim, term in enumerate(form.spelled_out(tensor.ndim)):
            if tensor.shape[dim] == 1 or not any(factor in part for factor in term.factors):
                continue
            sizes = [int(size_of(factor, self.sizes)) for factor in term.factors]
            tensor = tensor.unflatten(dim, sizes)
            for at, factor in enumerate(term.factors):
                if factor in part:
                    tensor = tensor.index_select(dim + at, torch.tensor(part[factor], device=tensor.device))
            tensor = tensor.flatten(dim, dim + len(sizes) - 1)
        return tensor

    def _difference(self, whole: _TrialRun, runs: Sequence[_TrialRun], halves: Sequence[Part], dim: str) -> str:
        """What the two halves compute otherwise; empty if nothing."""
        is_summed = dim in self.declaration.summed
        for at, (result, tensor) in enumerate(zip(self.results, whole.results, strict=True)):
            several = [run.results[at] for run in runs]
            if is_summed and not self._has(result, dim):
                several, wanted = [several[0] + several[1]], [tensor]
            else:
                wanted = [self._taken(result, tensor, half) for half in halves]
            if not all(map(_are_close, several, wanted)):
                return str(result)
        for name, tensor in whole.gradients.items():
            form, several = self.forms.get(name), [run.gradients[name] for run in runs]
            wanted = [self._taken(form, tensor, half) for half in halves]
            if several[0].shape == several[1].shape == tensor.shape:
                several, wanted = [several[0] + several[1]], [tensor]
            if not all(map(_are_close, several, wanted)):
                return f"gradient of {name}"
        return ""


def _halves(size: int) -> list[list[int]]:
    return [list(range(size // 2)), list(range(size // 2, size))]


def _are_close(found: Tensor, wanted: Tensor) -> bool:
    """Whether they differ by rounding alone: what is computed from other numbers differs by far more."""
    if found.shape != wanted.shape:
        return False
    if not wanted.is_floating_point():
        return bool((found == wanted).all())
    error, scale = (float(tensor.abs().max()) if tensor.numel() else 0.0 for tensor in (found - wanted, wanted))
    return error <= torch.finfo(wanted.dtype).eps ** 0.5 * scale + 1e-6


def found_declaration(
    name: str, function: Any, given: Mapping[str, Any], results: Any, values: Values
) -> Declaration | None:
    """The declaration of an operator that has none, by trying it; ``None`` if no dim of it may be cut here.

    Dims of one size, in their order in each tensor, count as one dim. Each is cut with all others whole; where that
    gives other results, a shorter dim may be that of its groups (key/value heads).

    Args:
        name: the operator's, as ``torch.library`` has it.
        function: the operator.
        given: the arguments of the call that is traced.
        results: what the call gives.
        values: the values of its tensors.
    """
    tensors = {key: value for key, value in given.items() if isinstance(value, Tensor)}
    made = [leaf for leaf in tree_leaves(results) if isinstance(leaf, Tensor)]
    if not tensors or not made or not _can_be_synthetic(given.values()) or not _is_for_one_rank(function):
        return None
    like = [(key, tuple(t.shape), t.dtype, str(t.device)) for key, t in tensors.items()]
    key = name, tuple(like), repr({key: value for key, value in given.items() if key not in tensors})
    if key not in _FOUND:
        with _on_its_own():
            _FOUND[key] = _found(name, function, tensors, given, made, values)
    return _FOUND[key]


_FOUND: dict[Any, Declaration | None] = {}
"""What was found, by operator and call."""


def _is_for_one_rank(function: Any) -> bool:
    """Whether an operator can be tried on one rank alone: it takes no process group."""
    return not any("group" in argument.name for argument in schema_of(function).arguments)


def _found(
    name: str,
    function: Any,
    tensors: Mapping[str, Tensor],
    given: Mapping[str, Any],
    made: Sequence[Tensor],
    values: Values,
) -> Declaration | None:
    others = {key: value for key, value in given.items() if key not in tensors}
    dims = dict.fromkeys(dim for tensor in (*tensors.values(), *made) for dim in _dims(tensor) if dim[0] != 1)
    letters = dict(zip(dims, ascii_lowercase, strict=False))
    if len(letters) < len(dims):
        return None
    first = next(iter(tensors.values()))

    def text(terms: Mapping[_Dim, str]) -> str:
        def one(name: str, tensor: Tensor) -> str:
            return f"{name}[{' '.join(terms.get(dim, str(dim[0])) for dim in _dims(tensor))}]"

        dtypes = [
            "" if tensor.dtype == first.dtype else f":{str(tensor.dtype).removeprefix('torch.')}" for tensor in made
        ]
        results = [one(f"out{at or ''}", tensor) + dtypes[at] for at, tensor in enumerate(made)]
        return f"{', '.join(one(*item) for item in tensors.items())} -> {', '.join(results)}"

    def may_be_cut(terms: Mapping[_Dim, str], letter: str, is_summed: bool) -> bool:
        whole = frozenset(letters.values()) - {letter}
        named = frozenset(term for term in terms.values() if "/" not in term)
        try:
            declaration = Declaration(name, text(terms), whole & named, frozenset(letter if is_summed else ""))
            return _Trial(declaration, function, tensors, others).is_right(values)
        except DeclarationError:
            return False

    terms, free, summed = dict(letters), list[str](), list[str]()
    in_results = {dim for tensor in made for dim in _dims(tensor)}
    for dim, letter in letters.items():
        is_summed = dim not in in_results
        shorter = [one for one in dims if one[0] < dim[0] and dim[0] % one[0] == 0 and "/" not in terms[one]]
        forms = [terms, *({**terms, one: f"{letter}/{_GROUP}"} for one in shorter)]
        found = next((form for form in forms if "/" not in form[dim] and may_be_cut(form, letter, is_summed)), None)
        if found is not None:
            terms = found
            (summed if is_summed else free).append(letter)
    if not free and not summed:
        return None
    whole = {term for term in terms.values() if term not in (*free, *summed) and "/" not in term}
    return Declaration(name, text(terms), frozenset(whole), frozenset(summed), place="a trial of its kernel")


_GROUP = "group"
_Dim = tuple[int, int]
"""A dim's size, and how many dims of this size its tensor has before it."""


def _dims(tensor: Tensor) -> list[_Dim]:
    shape = tuple(tensor.shape)
    return [(size, shape[:at].count(size)) for at, size in enumerate(shape)]
