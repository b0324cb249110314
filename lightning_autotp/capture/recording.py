"""One custom operator through which a trace sees what ordinary ATen operators do not show.

Two things must be visible in a captured graph although they compute nothing that ATen has a name for:

* a *parallel primitive* (a collective, a vocabulary-parallel lookup or loss): without values it records itself as one
  node with its name and its output's shape instead of communicating;
* a *module boundary*: :mod:`~lightning_autotp.capture.capture` marks every tensor that enters or leaves a module,
  because a layout may change only there.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar

import torch
from torch import Tensor

RECORD = "lightning_autotp.record.default"
"""Name of the recording operator as a captured graph shows it."""

_under_way: ContextVar[bool] = ContextVar("a trace is under way", default=False)


@contextmanager
def under_way() -> Iterator[None]:
    """Within it a trace is under way, in which constants of the model's code have values all the same."""
    token = _under_way.set(True)
    try:
        yield
    finally:
        _under_way.reset(token)


def is_under_way() -> bool:
    """Whether a trace is under way. Not in compiled code, which no trace runs."""
    return not torch.compiler.is_compiling() and _under_way.get()


_library = torch.library.Library("lightning_autotp", "DEF")
_library.define("record(str name, Tensor[] inputs, SymInt[] shape, str detail='') -> Tensor")


def _record_meta(name: str, inputs: Sequence[Tensor], shape: Sequence[int], detail: str = "") -> Tensor:
    return inputs[0].new_empty(shape)


_library.impl("record", _record_meta, "Meta")


def record(name: str, inputs: Sequence[Tensor], shape: Sequence[int], detail: str = "") -> Tensor:
    """Note the primitive ``name`` in the trace under way.

    Args:
        name: what the node stands for, for instance ``"all_reduce"``.
        inputs: the meta tensors it depends on; the result has the first one's dtype.
        shape: the result's local shape.
        detail: what else a comparison of two traces must see, such as how a dim is cut.

    Returns:
        A meta tensor of the given shape.
    """
    return torch.ops.lightning_autotp.record(name, list(inputs), list(shape), *([detail] if detail else []))
