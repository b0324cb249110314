"""Products as einsum writes them: ``"...mk,...kn->...mn"``. What they tie together and their FLOPs follow from that."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from math import prod

from lightning_autotp.operators.shapes import Shape


@dataclass(frozen=True)
class Equation:
    """An equation with every dim of every operand under a label of its own.

    Attributes:
        terms: the labels of each operand's dims; those under an ellipsis are named by their place from its end.
        out: the labels of the result's dims; the others are summed over.
    """

    terms: tuple[tuple[str, ...], ...]
    out: tuple[str, ...]

    def flops(self, shapes: Sequence[Shape], path: Sequence[int] = ()) -> float:
        """Two for each multiplication and addition, where the operands are multiplied two by two as PyTorch does.

        A multiplication that sums over nothing is done element by element, and is no product.

        Args:
            shapes: of the operands.
            path: places of the two operands that are multiplied next, again and again; their product comes last among
                those that are left. Without it: from left to right.
        """
        sizes: dict[str, float] = {}
        for labels, shape in zip(self.terms, shapes, strict=True):
            for label, size in zip(labels, shape, strict=True):
                sizes[label] = max(size, sizes.get(label, 0))  # a dim of size 1 is broadcast
        operands = [set(labels) for labels in self.terms]
        pairs = iter(zip(path[::2], path[1::2], strict=True))
        total = 0.0
        while len(operands) > 1:
            first, second = sorted(next(pairs)) if path else (0, 1)
            right, left = operands.pop(second), operands.pop(first)
            kept = (left | right) & set(self.out).union(*operands)  # what only one of them has is summed before
            summed = (left & right) - kept
            total += 2 * prod(sizes[label] for label in kept | summed) if summed else 0
            operands.insert(len(operands) if path else 0, kept)
        return total


@lru_cache(maxsize=1024)
def equation(text: str, *ranks: int) -> Equation:
    """An equation for operands with so many dims; without ``->``, labels that occur once make the result, sorted."""
    left, arrow, right = text.replace(" ", "").partition("->")
    terms = left.split(",")
    spare = [rank - len(term.replace("...", "")) for term, rank in zip(terms, ranks, strict=True)]
    labels = tuple(_labels(term, count) for term, count in zip(terms, spare, strict=True))
    if arrow:
        return Equation(labels, _labels(right, max(spare)))
    letters = [label for names in labels for label in names if len(label) == 1]
    once = sorted(label for label in letters if letters.count(label) == 1)
    return Equation(labels, (*_labels("..." if "..." in left else "", max(spare)), *once))


@lru_cache(maxsize=1024)
def fitting(several: tuple[str, ...], ranks: tuple[int, ...]) -> Equation:
    """The first of several equations that is one of operands with so many dims."""

    def fits(term: str, rank: int) -> bool:
        letters = len(term.replace("...", ""))
        return rank >= letters if "..." in term else rank == letters

    for text in several:
        if all(map(fits, text.partition("->")[0].split(","), ranks)):
            return equation(text, *ranks)
    raise ValueError(f"none of the equations {several} is one of operands with {ranks} dims")


def _labels(term: str, spare: int) -> tuple[str, ...]:
    before, dots, after = term.partition("...")
    return (*before, *(f"...{place}" for place in range(spare, 0, -1) if dots), *after)
