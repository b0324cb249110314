"""State dicts of a parallel model, of one rank's part: they say so, and whole ones are refused.

Its names and tensors do not show that it is a part. It stays local, as optimizers, copies and FSDP2 need it. But its
metadata, which ``torch.save`` writes and ``load_state_dict`` hands on, say of whose part it is: who writes it to a file
is warned, and another rank refuses it.
"""

from __future__ import annotations

import hashlib
import warnings
from collections import OrderedDict
from collections.abc import Mapping
from functools import partial
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_autotp.parameters.state import ParameterTable, parallel_state
from lightning_autotp.whole_matrices.optimizer import WholeMatrixOptimizer

KEY = "autotp"
"""Of the mark, in the metadata of the parallel model's own entry."""


class Mark(OrderedDict[str, Any]):
    """What part of a model a state dict has. In a file it is a plain mapping, which loads without this package."""

    def __reduce__(self) -> tuple[Any, ...]:
        warnings.warn(
            f"a state dict of {self['model']} is written that has only the part of rank {self['rank']} of"
            f" {self['ranks']}: neither the whole model nor another rank can load it. To write the whole model, call"
            " lightning_autotp.full_state_dict(model) on every rank, and write what it returns",
            stacklevel=2,
        )
        return OrderedDict, (list(self.items()),)

    def __deepcopy__(self, memo: dict[int, Any]) -> Mark:
        return Mark(self)


def mark_as_part(model: nn.Module, state: Any, prefix: str, local_metadata: dict[str, Any]) -> None:
    """Let a state dict of a parallel model say whose part it is; one of a single rank is whole."""
    if parallel_state(model).group.size > 1:
        local_metadata[KEY] = _mark_of(model)


def refuse_other_parts(model: nn.Module, state: Any, prefix: str, local_metadata: Mapping[str, Any]) -> None:
    """Refuse a state dict of another part.

    Raises:
        RuntimeError: if it says that it is one.
    """
    found, own = local_metadata.get(KEY), _mark_of(model)
    if found is None or all(found[key] == own[key] for key in ("rank", "ranks", "cuts")):
        return
    cut = "" if found["cuts"] == own["cuts"] else ", cut in another way"
    raise RuntimeError(
        f"this state dict is the part of {found['model']} that rank {found['rank']} of {found['ranks']} had{cut}, and"
        f" this is rank {own['rank']} of {own['ranks']}: it cannot be loaded here. Write"
        " lightning_autotp.full_state_dict(model) to files, which every rank has to call, and load it with"
        " lightning_autotp.load_full_state_dict(model, state)"
    )


def _mark_of(model: nn.Module) -> Mark:
    state = parallel_state(model)
    cuts = repr([(meta.names, meta.shape, meta.layout) for meta in state.metas.values()])
    return Mark(
        model=type(model).__name__,
        rank=state.group.rank,
        ranks=state.group.size,
        cuts=hashlib.sha256(cuts.encode()).hexdigest()[:12],
    )


def refuse_whole_optimizer_states(optimizer: Optimizer, module: nn.Module) -> None:
    """Make an error of ``load_state_dict`` with whole tensors, for an optimizer of the local parameters of a module.

    The states of a ``WholeMatrixOptimizer`` are whole.
    """
    if isinstance(optimizer, WholeMatrixOptimizer):
        return
    optimizer.register_load_state_dict_pre_hook(partial(_refuse_whole_moments, module))


def _refuse_whole_moments(module: nn.Module, optimizer: Optimizer, state: Mapping[str, Any]) -> None:
    table = ParameterTable(module)
    for group, saved in zip(optimizer.param_groups, state["param_groups"], strict=False):
        for parameter, number in zip(group["params"], saved["params"], strict=False):
            meta = table.meta(parameter)
            for key, value in state["state"].get(number, {}).items():
                if isinstance(value, Tensor) and meta and tuple(value.shape) == meta.shape != meta.local_shape:
                    raise RuntimeError(
                        f"the state {key!r} of {meta.name} is whole, {meta.shape}, and load_state_dict of an optimizer"
                        f" of local parameters takes this rank's part, {meta.local_shape}: load the checkpoint with"
                        " fabric.load(path, {name: optimizer}), or fabric.load_raw(path, optimizer)"
                    )


def refuse_whole_tensors(model: nn.Module, state: Mapping[str, Any], prefix: str, local_metadata: Any) -> None:
    """Refuse a state dict of the whole model, before any of it is loaded.

    Raises:
        RuntimeError: saying what to call instead.
    """
    for name, meta in parallel_state(model).metas.items():
        given = state.get(prefix + name)
        if isinstance(given, Tensor) and tuple(given.shape) == meta.shape != meta.local_shape:
            raise RuntimeError(
                f"{prefix}{name} is whole in this state dict, {meta.shape}, and load_state_dict of a parallel"
                f" {type(model).__name__} takes this rank's part, {meta.local_shape}: call"
                " lightning_autotp.load_full_state_dict(model, state) instead"
            )
