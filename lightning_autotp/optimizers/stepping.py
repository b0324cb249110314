"""What an optimizer steps, and how to call its step from within another one's, or on trial."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from lightning_autotp.parameters.local_blocks import is_cut


def stepped_by(optimizer: Optimizer) -> Iterator[Tensor]:
    """The parameters that an optimizer has, of all its groups."""
    for group in optimizer.param_groups:
        yield from group["params"]


def steps_some_of(optimizer: Optimizer, parameters: Iterable[Tensor]) -> bool:
    """Whether an optimizer has some of these parameters."""
    ids = set(map(id, parameters))
    return any(id(parameter) in ids for parameter in stepped_by(optimizer))


def plain_step(optimizer: Any) -> Callable[..., Any]:
    """The step of an optimizer's class, which takes the optimizer, without the hooks that users register for all."""
    step: Callable[..., Any] = type(optimizer).step
    if hasattr(step, "hooked"):
        step = step.__wrapped__  # type: ignore[attr-defined]
    return step


def needs_closure(optimizer: Any) -> bool:
    """Whether a step cannot be made without a closure."""
    closure = inspect.signature(type(optimizer).step).parameters.get("closure")
    return closure is not None and closure.default is closure.empty


def step_one_by_one(optimizer: Optimizer) -> list[dict[str, Any]]:
    """Let an optimizer take its parameters one by one where FSDP2 has cut some of them: lists of both are an error.

    On accelerators torch takes lists by default.

    Returns:
        The groups that :func:`step_as_before` is to be given after the step.

    Raises:
        ValueError: for a group with both that is to be stepped at once.
    """
    changed = []
    for group in optimizer.param_groups:
        lists: dict[tuple[Any, Any], set[bool]] = {}  # torch makes one for each device and dtype
        for parameter in group["params"]:
            if parameter.requires_grad and parameter.dim():  # scalars may be among either
                lists.setdefault((parameter.device, parameter.dtype), set()).add(is_cut(parameter))
        if all(len(sorts) == 1 for sorts in lists.values()):
            continue
        if group.get("fused") or group.get("foreach"):
            option = "fused" if group.get("fused") else "foreach"
            raise ValueError(
                f"{type(optimizer).__name__}(..., {option}=True) steps parameters at once of which FSDP2 has sharded"
                " some and others not (those outside of the model, and those beside modules in a block that is"
                f" gathered in 16 bits): leave {option} out, or give these others a group of their own"
            )
        if group.get("foreach", False) is None:
            group["foreach"] = False
            changed.append(group)
    return changed


def step_as_before(groups: list[dict[str, Any]]) -> None:
    """Let torch decide again how these groups are stepped."""
    for group in groups:
        group["foreach"] = None
