"""Random numbers that code draws in Python while it is traced, and what they decide.

Code that skips a layer at random (``if self.training and torch.rand(1).item() < p: continue``) goes another way in each
call. So that traces of one call are alike, the numbers that it gets are synthetic: the highest ones that its generators
give, with which most code runs all of its layers, the lowest ones, or those of a seed. Modules whose code does
something else with the highest numbers than with the lowest ones go where random numbers say: then one trace runs the
model with both. The user's own random state is left as it was.
"""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager

import numpy as np
import torch
from torch import Tensor

from lightning_autotp.operators import record
from lightning_autotp.operators.graph import Graph
from lightning_autotp.ranks.random_numbers import host_random_states, seeded, set_host_random_states

HIGH, LOW = -1, -2
"""The highest, or the lowest, numbers that generators give; other numbers are seeds."""
_CPU = torch.device("cpu")
_WORDS = {HIGH: 0x12DD9BB3, LOW: 0}
"""Words of a Mersenne twister's state for which it gives 32 ones, and 32 zeros."""
_MANY = 512
"""So many words of a state give such numbers: not all, as code may draw again until a number is another one."""
_DRAWN, _LARGE = 256, 1024
"""So often a tensor is drawn for its highest or lowest values, unless it is larger than this."""


@contextmanager
def synthetic_draws(draws: int) -> Iterator[None]:
    """What code draws inside, on the CPU, follows from this number alone; afterwards all generators are as before.

    Of torch's generator that is a seed in any case: see :func:`extreme`.
    """
    before = host_random_states()
    try:
        with seeded(max(draws, 0), _CPU):
            random.seed(max(draws, 0))
            version, words, _ = random.getstate()
            if draws in _WORDS:
                words = (*[_WORDS[draws]] * _MANY, *words[_MANY:-1], 0)
                random.setstate((version, words, None))
            np.random.set_state(("MT19937", np.array(words[:-1], np.uint32), words[-1], 0, 0.0))
            yield
    finally:
        set_host_random_states(before)


def states() -> Hashable:
    """What Python's and numpy's generators give next."""
    return tuple(host_random_states().values())


def extreme(draws: int, draw: Callable[[], list[Tensor]]) -> list[Tensor]:
    """What an operator draws; of the highest and the lowest numbers these, by drawing often.

    That is done for single numbers, and for floating-point ones: others have values that belong together (a
    permutation).

    Args:
        draws: :data:`HIGH`, :data:`LOW`, or a seed.
        draw: runs the operator.
    """
    found = draw()
    if draws >= 0 or any(made.numel() > (_LARGE if made.is_floating_point() else 1) for made in found):
        return found
    choose = torch.maximum if draws == HIGH else torch.minimum
    for _ in range(_DRAWN):
        found = [choose(one, other) for one, other in zip(found, draw(), strict=True)]
    return found


def led_by_draws(one: Graph, other: Graph) -> tuple[set[str], set[str]]:
    """What differs between two traces of a call with synthetic numbers.

    Returns:
        The modules whose own code goes another way: other lines, or other modules. And those in whose code integers are
        others.
    """
    led, varying = (
        {path for path in here.keys() & there.keys() if here[path] != there[path]}
        for here, there in zip(_steps(one), _steps(other), strict=True)
    )
    return led, varying


def _steps(graph: Graph) -> tuple[dict[str, list[object]], dict[str, list[object]]]:
    """By module, which modules and lines its own code calls, and the integers in its operators but for sizes."""
    steps, numbers = defaultdict[str, list[object]](list), defaultdict[str, list[object]](list)
    for run in graph.runs:
        steps[run.caller].append(run.module)
    for call in graph.calls:
        steps[call.module].append((call.site.file, call.site.line, call.site.function))
    for operator in graph.operators:
        known = record(operator.name)
        if known is not None and not all(graph.tensors[made].is_static for made in operator.outputs):
            given = [value for name, value in operator.arguments if name not in known.sizes]
            numbers[operator.module].append((operator.name, *(value for value in given if type(value) is int)))
    return steps, numbers
