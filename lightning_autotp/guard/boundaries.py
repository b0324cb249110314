"""What a module of a parallel model takes and gives, made whole for code around it, and divided again."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from torch import Tensor, nn

from lightning_autotp.applying.replace import BoundaryConversion
from lightning_autotp.layouts.plan import ConversionPlan
from lightning_autotp.parallel.logits import VocabParallelLogits
from lightning_autotp.parameters.state import parallel_state
from lightning_autotp.private.torch_private import ModuleHooks
from lightning_autotp.ranks.group import TPGroup


def parts_at(model: nn.Module, path: str, side: str) -> list[ConversionPlan]:
    """What is not Invariant at one side of a module, in the kind of call that is under way."""
    return [part for part in parallel_state(model).parts if (part.module, part.side) == (path, side)]


def to_whole(value: Any, parts: Sequence[ConversionPlan], group: TPGroup) -> tuple[Any, list[ConversionPlan]]:
    """The values with these parts whole, and those that were not shown as whole already."""
    changed: list[ConversionPlan] = []
    for part in parts:
        conversion = BoundaryConversion(part, group)

        def change(tensor: Any, part: ConversionPlan = part, convert: Any = conversion.convert) -> Any:
            if isinstance(tensor, VocabParallelLogits) or not isinstance(tensor, Tensor):
                return tensor
            changed.append(part)
            return convert(tensor)

        value = conversion.replaced(value, change)
    return value, changed


def to_parts(value: Any, parts: Sequence[ConversionPlan], group: TPGroup) -> Any:
    """The values with these parts as they are in the model."""
    for part in parts:
        conversion = BoundaryConversion(replace(part, source=part.target, target=part.source), group)
        value = conversion.replaced(value, conversion.convert)
    return value


def planned_changes(module: nn.Module) -> list[BoundaryConversion]:
    """The plan's changes of layout where tensors enter a module; not those for some kinds of calls only."""
    owners = [getattr(hook, "__self__", None) for hook in ModuleHooks(module).before.values()]
    return [owner for owner in owners if type(owner) is BoundaryConversion]
