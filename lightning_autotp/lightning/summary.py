"""Lightning's model summary for a parallel model: sizes of the original model, and what this rank has of them."""

from __future__ import annotations

import math

from torch import nn

from lightning_autotp.checkpoints.stored import original_shape
from lightning_autotp.parameters.local_blocks import plain
from lightning_autotp.parameters.state import ParameterTable
from lightning_autotp.private.lightning_private import NOT_APPLICABLE, ModelSummary, get_human_readable_count


class ParallelSummary(ModelSummary):
    """The summary of a LightningModule that holds a parallel model.

    "Params" and the totals are those of the original model, "Params per Device" is what this rank holds. FLOPs and the
    sizes of inputs and outputs, which Lightning measures where ``example_input_array`` is set, are this rank's.
    """

    @property
    def param_nums(self) -> list[int]:
        """Parameters of every listed module in the original model."""
        table = ParameterTable(self.summarized)
        return [_original(module, table) for module in self.listed]

    @property
    def local_param_nums(self) -> list[int]:
        """Parameters of every listed module on this rank."""
        return [sum(plain(parameter).numel() for parameter in module.parameters()) for module in self.listed]

    @property
    def total_parameters(self) -> int:
        """Parameters of the original model."""
        return _original(self.summarized, ParameterTable(self.summarized))

    @property
    def trainable_parameters(self) -> int:
        """Those of them that are trained."""
        return _original(self.summarized, ParameterTable(self.summarized), trainable=True)

    def columns(self, usual: list[tuple[str, list[str]]]) -> list[tuple[str, list[str]]]:
        """The usual ones, and what this rank holds of each module."""
        columns = list(usual)
        local = [get_human_readable_count(number) for number in self.local_param_nums]
        place = 1 + [name for name, _ in columns].index("Params")
        rows = len(columns[0][1])
        columns.insert(place, ("Params per Device", local + [NOT_APPLICABLE] * (rows - len(local))))
        return columns


def _original(module: nn.Module, table: ParameterTable, trainable: bool = False) -> int:
    return sum(
        math.prod(original_shape(p, table.meta(p))) for p in module.parameters() if p.requires_grad or not trainable
    )
