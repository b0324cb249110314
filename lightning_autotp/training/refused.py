"""A model's own methods that know nothing of other ranks: on a parallel model they are errors that say what to do.

``model.save_pretrained()`` would write this rank's part, and ``model.init_weights()`` draw as many random numbers as it
has elements. An attribute of the model stands for each.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Mapping
from contextlib import nullcontext
from functools import partial
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_autotp.parallel.embedding import VocabParallelEmbedding
from lightning_autotp.parallel.linear import ColumnParallelLinear, RowParallelLinear
from lightning_autotp.parameters.first_use import known_writes
from lightning_autotp.parameters.state import ParameterTable, parallel_state
from lightning_autotp.private.transformers_private import INITIALIZES

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


class Refused:
    """Stands for a method of a module.

    Args:
        module: the module.
        name: of the method.
        reason: why a parallel model has it not, and what to do instead.
    """

    def __init__(self, module: nn.Module, name: str, reason: str) -> None:
        self._module, self._name, self._reason = module, name, reason

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Do nothing.

        Raises:
            RuntimeError: always.
        """
        raise RuntimeError(f"{type(self._module).__name__}.{self._name} {self._reason}")


class SavesWholeOnly(Refused):
    """Stands for ``save_pretrained``, and does save a state dict of whole tensors."""

    def __call__(self, *args: Any, state_dict: Any = None, **kwargs: Any) -> Any:
        """Save a state dict of whole tensors.

        Raises:
            RuntimeError: without one.
        """
        if state_dict is None:
            super().__call__()
        kind: Any = type(self._module)
        return kind.save_pretrained(self._module, *args, state_dict=state_dict, **kwargs)


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


def refuse_methods(model: nn.Module) -> None:
    """Make errors of the methods of a parallel model, and of the modules in it, that know only whole tensors."""
    for module in model.modules():
        if _has(module, "save_pretrained"):
            vars(module)["save_pretrained"] = SavesWholeOnly(
                module,
                "save_pretrained",
                "would write this rank's part of the model. Call trainer.strategy.save_pretrained(directory) or"
                " lightning_autotp.save_pretrained(model, directory) instead (lightning_autotp.save_adapter for a"
                " PeftModel), on every rank",
            )
        for name in ON_WHOLE_TENSORS:
            if _has(module, name):
                _refuse_on_parts(module, name)
    for place in parallel_state(model).places(model):
        resets = getattr(type(place.module), "reset_parameters", None)
        if place.meta.is_parallel and callable(resets):
            if resets in DRAWS_WHOLE:
                vars(place.module)["reset_parameters"] = _Known(model, place.module, "reset_parameters")
            else:
                _refuse_on_parts(place.module, "reset_parameters")
    if (tuners := sys.modules.get("peft.tuners.tuners_utils")) is None:
        return  # nobody imported PEFT, so nobody made an adapter with it
    for module in model.modules():
        if isinstance(module, tuners.BaseTunerLayer):
            vars(module)["merge"] = Refused(
                module,
                "merge",
                "would add this rank's part of an adapter: adapters cannot be merged on the ranks of a tensor-parallel"
                " model. Save the adapter (trainer.strategy.save_pretrained(directory)), load it in one process with"
                " PeftModel.from_pretrained(base, directory), and call merge_and_unload() there",
            )


def _has(module: nn.Module, name: str) -> bool:
    """Whether it is a method of the module, which a static one, of its arguments alone, is not."""
    found = inspect.getattr_static(type(module), name, None)
    return callable(getattr(type(module), name, None)) and not isinstance(found, staticmethod)


def _refuse_on_parts(module: nn.Module, name: str) -> None:
    vars(module)[name] = Refused(
        module,
        name,
        "would treat this rank's part of the model as the whole. Call it while the model is whole, in configure_model()"
        " or before parallelize()",
    )


def refuse_whole_states(model: nn.Module) -> None:
    """Make an error of ``model.load_state_dict`` with whole tensors, before any is loaded, that says what to do."""
    model.register_load_state_dict_pre_hook(_refuse_whole_tensors)


def refuse_whole_optimizer_states(optimizer: Optimizer, module: nn.Module) -> None:
    """Likewise of ``optimizer.load_state_dict``, for an optimizer of the local parameters of a module."""
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


def _refuse_whole_tensors(model: nn.Module, state: Mapping[str, Any], prefix: str, *_: Any) -> None:
    for name, meta in parallel_state(model).metas.items():
        given = state.get(prefix + name)
        if isinstance(given, Tensor) and tuple(given.shape) == meta.shape != meta.local_shape:
            raise RuntimeError(
                f"{prefix}{name} is whole in this state dict, {meta.shape}, and load_state_dict of a parallel"
                f" {type(model).__name__} takes this rank's part, {meta.local_shape}: call"
                " lightning_autotp.load_full_state_dict(model, state) instead"
            )
