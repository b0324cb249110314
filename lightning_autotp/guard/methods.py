"""A model's own methods that know nothing of other ranks: what stands for them on a parallel model.

``model.save_pretrained()`` would write this rank's part, and ``model.init_weights()`` draw as many random numbers as it
has elements: these are errors that say what to do. Others do what they do in one process.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Iterator
from contextlib import nullcontext
from functools import partial
from types import MethodType
from typing import Any, NoReturn

from torch import nn

from lightning_autotp.gradients.data_parallel import generate_gathered
from lightning_autotp.guard.resized_copies import METHOD as RESIZES
from lightning_autotp.guard.resizing import resize_together
from lightning_autotp.parallel.embedding import VocabParallelEmbedding
from lightning_autotp.parallel.linear import ColumnParallelLinear, RowParallelLinear
from lightning_autotp.parameters.known_writes import known_writes
from lightning_autotp.parameters.local_blocks import fsdp_modules
from lightning_autotp.parameters.state import parallel_state
from lightning_autotp.private.transformers_private import INITIALIZES, WAITS_FOR_COPIES
from lightning_autotp.proving.new_calls import CallProver

ON_WHOLE_TENSORS = (
    "resize_decoder_token_embeddings",
    "resize_position_embeddings",
    "resize_positional_embeddings",
    "resize_num_qa_labels",
    "init_weights",
    "initialize_weights",
    *INITIALIZES,
)
DRAWS_WHOLE = {layer.reset_parameters for layer in (ColumnParallelLinear, RowParallelLinear, VocabParallelEmbedding)}
"""What fills in this rank's part of what one process would draw."""


def _refuse(module: nn.Module, name: str, reason: str, /, *args: Any, **kwargs: Any) -> NoReturn:
    """Stands for a method that is not there on a parallel model; the reason says what to do instead."""
    raise RuntimeError(f"{type(module).__name__}.{name} {reason}")


def _save_whole_only(module: nn.Module, /, *args: Any, state_dict: Any = None, **kwargs: Any) -> Any:
    """Stands for ``save_pretrained``: saves a state dict of whole tensors, and nothing without one."""
    if state_dict is None:
        _refuse(module, "save_pretrained", _SAVES_PARTS)
    kind: Any = type(module)
    return kind.save_pretrained(module, *args, state_dict=state_dict, **kwargs)


class _Known:
    """Stands for a method of a module in a parallel model that writes into parts what is theirs.

    A copy of the module does not bring the model with it: writes into copies are not watched.
    """

    def __init__(self, model: nn.Module | None, module: nn.Module, name: str) -> None:
        self._model, self._module, self._name = model, module, name

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call it."""
        kind: Any = type(self._module)
        with nullcontext() if self._model is None else known_writes(self._model):
            return getattr(kind, self._name)(self._module, *args, **kwargs)

    def __reduce__(self) -> tuple[Any, ...]:
        return _Known, (None, self._module, self._name)


class StandIns:
    """Attributes of the modules of a parallel model, each in the place of a method.

    Args:
        model: the model, which gets them.
        calls: proves its new kinds of calls.
    """

    def __init__(self, model: nn.Module, calls: CallProver) -> None:
        self._put: list[tuple[nn.Module, str, Any]] = []  # with what was there
        for module, name, stand_in in _methods(model, calls):
            self._put.append((module, name, vars(module).get(name)))
            vars(module)[name] = stand_in

    def remove(self) -> None:
        """Give the methods back."""
        while self._put:
            module, name, before = self._put.pop()
            if before is None:
                del vars(module)[name]
            else:
                vars(module)[name] = before


def _methods(model: nn.Module, calls: CallProver) -> Iterator[tuple[nn.Module, str, Any]]:
    """Every method that something is to stand for, and what ``generate`` asks for: the module, its name, and what."""
    for module in model.modules():
        if _has(module, "save_pretrained"):
            yield module, "save_pretrained", partial(_save_whole_only, module)
        for name in filter(partial(_has, module), ON_WHOLE_TENSORS):
            yield module, name, partial(_refuse, module, name, _TAKES_FOR_WHOLE)
        if _has(module, RESIZES):
            yield module, RESIZES, partial(resize_together, model, module, calls)
    for place in parallel_state(model).places(model):
        resets = getattr(type(place.module), "reset_parameters", None)
        if place.meta.is_parallel and callable(resets):
            name = "reset_parameters"
            if resets in DRAWS_WHOLE:
                yield place.module, name, _Known(model, place.module, name)
            else:
                yield place.module, name, partial(_refuse, place.module, name, _TAKES_FOR_WHOLE)
    # Methods, as Fabric asks for that are marked: fabric_model.mark_forward_method("generate").
    if parallel_state(model).plan.shards_sequence and _has(model, "generate"):
        yield model, "generate", MethodType(partial(_refuse, model, "generate", _NEEDS_ALL_TOKENS), model)
    elif fsdp_modules(model) and hasattr(model, "generate"):
        yield model, "generate", MethodType(generate_gathered, model)
        # As many steps in every copy as in the one whose texts are the longest: FSDP2 lets them wait at every block.
        yield model, WAITS_FOR_COPIES, True
    if (tuners := sys.modules.get("peft.tuners.tuners_utils")) is not None:  # else there are no adapters
        for module in model.modules():
            if isinstance(module, tuners.BaseTunerLayer):
                yield module, "merge", partial(_refuse, module, "merge", _MERGES_PARTS)


_SAVES_PARTS = (
    "would write this rank's part of the model. Call trainer.strategy.save_pretrained(directory) or"
    " lightning_autotp.save_pretrained(model, directory) instead (lightning_autotp.save_adapter for a PeftModel), on"
    " every rank"
)
_TAKES_FOR_WHOLE = (
    "would treat this rank's part of the model as the whole. Call it while the model is whole, in configure_model() or"
    " before parallelize()"
)
_NEEDS_ALL_TOKENS = (
    "needs all tokens on every rank, and this model was divided with sequence_parallel: a single new token cannot be"
    " sharded. Leave sequence_parallel out, or generate afterwards with a model of the saved weights"
)
_MERGES_PARTS = (
    "would add this rank's part of an adapter: adapters cannot be merged on the ranks of a tensor-parallel model. Save"
    " the adapter (trainer.strategy.save_pretrained(directory)), load it in one process with"
    " PeftModel.from_pretrained(base, directory), and call merge_and_unload() there"
)


def _has(module: nn.Module, name: str) -> bool:
    """Whether it is a method of the module, which a static one, of its arguments alone, is not."""
    found = inspect.getattr_static(type(module), name, None)
    return callable(getattr(type(module), name, None)) and not isinstance(found, staticmethod)
