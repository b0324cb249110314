"""A state dict of a parallel model says that it is one rank's part, which its names and tensors do not show.

It stays local, as optimizers, copies and FSDP2 need it. But its metadata, which ``torch.save`` writes and
``load_state_dict`` hands on, say of whose part it is: who writes it to a file is warned, and another rank refuses it.
"""

from __future__ import annotations

import hashlib
import warnings
from collections import OrderedDict
from collections.abc import Mapping
from typing import Any

from torch import nn

from lightning_autotp.parameters.state import parallel_state

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


def mark_states(model: nn.Module) -> None:
    """Let the state dicts of a parallel model say whose part they are, and refuse those of other ranks."""
    if parallel_state(model).group.size > 1:
        model.register_state_dict_post_hook(_mark)
        model.register_load_state_dict_pre_hook(_refuse_others)


def _mark(model: nn.Module, state: Any, prefix: str, local_metadata: dict[str, Any]) -> None:
    local_metadata[KEY] = _mark_of(model)


def _refuse_others(
    model: nn.Module, state: Mapping[str, Any], prefix: str, local_metadata: Mapping[str, Any], *_: Any
) -> None:
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
