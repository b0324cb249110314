"""Lightning's model summary for a parallel model: sizes of the original model, and what this rank has of them."""

from __future__ import annotations

import math
from collections.abc import Iterable
from functools import partial

from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import ModelSummary as ModelSummaryCallback
from lightning.pytorch.utilities.model_summary import ModelSummary
from lightning.pytorch.utilities.model_summary.model_summary import NOT_APPLICABLE, get_human_readable_count
from torch import nn

from lightning_autotp.checkpoints.stored import original_shape
from lightning_autotp.parameters.local_blocks import plain
from lightning_autotp.parameters.state import ParameterTable


class ParallelSummary(ModelSummary):
    """The summary of a LightningModule that holds a parallel model.

    "Params" and the totals are those of the original model, "Params per Device" is what this rank holds. FLOPs and the
    sizes of inputs and outputs, which Lightning measures where ``example_input_array`` is set, are this rank's.
    """

    @property
    def param_nums(self) -> list[int]:
        """Parameters of every listed module in the original model."""
        table = ParameterTable(self._model)
        return [_original(layer._module, table) for layer in self._layer_summary.values()]

    @property
    def local_param_nums(self) -> list[int]:
        """Parameters of every listed module on this rank."""
        return [
            sum(plain(parameter).numel() for parameter in layer._module.parameters())
            for layer in self._layer_summary.values()
        ]

    @property
    def total_parameters(self) -> int:
        """Parameters of the original model."""
        return _original(self._model, ParameterTable(self._model))

    @property
    def trainable_parameters(self) -> int:
        """Those of them that are trained."""
        return _original(self._model, ParameterTable(self._model), trainable=True)

    def _get_summary_data(self) -> list[tuple[str, list[str]]]:
        columns = super()._get_summary_data()
        local = [get_human_readable_count(number) for number in self.local_param_nums]
        place = 1 + [name for name, _ in columns].index("Params")
        rows = len(columns[0][1])
        columns.insert(place, ("Params per Device", local + [NOT_APPLICABLE] * (rows - len(local))))
        return columns


def summarize_whole_model(used: Iterable[Callback]) -> None:
    """Let the ModelSummary callbacks among ``used`` (Lightning adds one by default) show :class:`ParallelSummary`."""
    for callback in used:
        if isinstance(callback, ModelSummaryCallback):
            callback._summary = partial(_summary, callback._max_depth)  # type: ignore[method-assign]


def summarize_as_before(used: Iterable[Callback]) -> None:
    """Undo :func:`summarize_whole_model`."""
    for callback in used:
        if isinstance(callback, ModelSummaryCallback):
            vars(callback).pop("_summary", None)


def _summary(depth: int, trainer: Trainer, module: LightningModule) -> ParallelSummary:
    return ParallelSummary(module, max_depth=depth)


def _original(module: nn.Module, table: ParameterTable, trainable: bool = False) -> int:
    return sum(
        math.prod(original_shape(p, table.meta(p))) for p in module.parameters() if p.requires_grad or not trainable
    )
