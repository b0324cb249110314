"""Code that may write into a rank's parts of parameters: it says so while it does."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from contextlib import contextmanager

from torch import Tensor, nn

from lightning_autotp.parameters.state import parallel_models, parallel_state, parts_among


@contextmanager
def known_writes(module: nn.Module, filled: Collection[Tensor] = (), *, is_checked: bool = False) -> Iterator[None]:
    """Within it what writes into parts of the parallel models in a module is known to be right. Not collective.

    Args:
        module: the module.
        filled: parameters that are filled anew within; may be said until the end.
        is_checked: whether it is because code is checked, which may run again later.
    """
    watched = list(parallel_models(module))
    for model, state in watched:
        state.writes.begin_known(parts_before_use(model), is_checked)
    try:
        yield
    finally:
        for model, state in watched:
            state.writes.end_known(parts_before_use(model), filled)


def parts_of(model: nn.Module) -> dict[str, nn.Parameter]:
    """The parameters of a parallel model of which this rank has a part, by name."""
    return parts_among(parallel_state(model).places(model))


def parts_before_use(model: nn.Module) -> dict[str, nn.Parameter]:
    """As :func:`parts_of`, until the model is used for the first time; then none, for only writes are counted."""
    return parts_of(model) if parallel_state(model).writes.is_before_use else {}
