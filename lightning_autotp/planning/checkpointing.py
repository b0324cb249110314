"""What fits into a GPU: the fastest plan, and whether the repeated blocks have to be computed again."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import nn

from lightning_autotp.building.repeated_blocks import checkpoint_blocks
from lightning_autotp.capture.capture import as_call, step_size
from lightning_autotp.capture.nested import tensors_in
from lightning_autotp.layouts.plan import Plan
from lightning_autotp.layouts.units import in_units
from lightning_autotp.operators.graph import Graph
from lightning_autotp.pipeline import find_plan
from lightning_autotp.planning.estimate import memory, step_time
from lightning_autotp.planning.machines import Machine, machine_called
from lightning_autotp.planning.rehearsal import (
    Precision,
    RehearsalError,
    fullest_rank,
    local_model,
    named_arguments,
    rehearse,
)
from lightning_autotp.proving.feasible import Proofs
from lightning_autotp.ranks.agreement import largest_of_all
from lightning_autotp.solving.options import PlanOptions

_SHARE = 0.92
"""Of the memory of a GPU of which nothing is known: the rest is no tensor's."""


@dataclass(frozen=True)
class KeptActivations:
    """What blocks keep for the backward pass.

    Attributes:
        are_recomputed: whether they keep their inputs alone.
        limit: bytes of a GPU that tensors may take.
        needed: bytes that a training step takes.
        otherwise: bytes that it would take if the blocks kept all.
    """

    are_recomputed: bool
    limit: float
    needed: float
    otherwise: float

    def __str__(self) -> str:
        needed, limit, otherwise = (in_units(int(size)) for size in (self.needed, self.limit, self.otherwise))
        if not self.are_recomputed:
            return f"blocks keep what they compute: a step takes about {needed} of {limit}"
        return f"blocks are computed again: a step takes about {needed} of {limit}, and {otherwise} if they kept all"

    @property
    def warnings(self) -> list[str]:
        """What to say where a step does not fit at all."""
        if self.needed <= self.limit:
            return []
        return [
            f"a training step is predicted to take {in_units(int(self.needed))} of {in_units(int(self.limit))} even if"
            " blocks are computed again: use smaller batches, more ranks or copies, or"
            ' activation_checkpointing="offload"'
        ]


def machine_of(device: torch.device) -> Machine | None:
    """One node of GPUs like this one, if they are known."""
    return machine_called(torch.cuda.get_device_name(device)) if device.type == "cuda" else None


def memory_of(device: torch.device) -> float | None:
    """Bytes of a device that tensors may take; ``None`` where that is not known."""
    if device.type != "cuda":
        return None
    known = machine_of(device)
    total = float(torch.cuda.get_device_properties(device).total_memory)
    return total - known.reserved if known is not None else _SHARE * total


def smallest_memory(device: torch.device) -> float | None:
    """Bytes that tensors may take on the rank that has the least; ``None`` where that is not known.

    Collective over all processes.
    """
    free = memory_of(device)
    return None if free is None else -largest_of_all([-int(free)], None)[0]


def choose(
    model: nn.Module,
    plan: Plan | None,
    example: Any,
    limit: float,
    *,
    precision: Precision,
    copies: int = 1,
    accumulates: bool = False,
    cpu_offload: bool = False,
) -> KeptActivations:
    """Rehearse a training step with AdamW, with blocks that keep all they compute and with such that do not.

    Args:
        model: the model; it is only looked at.
        plan: how it is divided.
        example: its arguments in a training step, of the step's own size.
        limit: bytes that a step may take.
        precision: as the Trainer has it.
        copies: over which FSDP2 shards it.
        accumulates: whether gradients of earlier forward passes are there.
        cpu_offload: whether what FSDP2 shards is in host memory.

    Raises:
        RehearsalError: if its code asks for values, or what it returns has no loss.
        ValueError: if it has no repeated blocks, and does not fit.
    """
    given = named_arguments(model, as_call(example))
    local = _local(model, plan, precision)

    def needed() -> float:
        return memory(rehearse(local, given, precision=precision), 1, copies, accumulates, cpu_offload).total

    otherwise = needed()
    if otherwise <= limit:
        return KeptActivations(False, limit, otherwise, otherwise)
    checkpoint_blocks(local)
    return KeptActivations(True, limit, needed(), otherwise)


class Step(NamedTuple):
    """A training step: bytes of a device, and seconds, where these are to be compared."""

    needed: float
    seconds: float = 0.0


def fitting(
    find: Callable[[float | None], Plan],
    step: Callable[[Plan], Step],
    limit: float,
    limit_of: str,
    copies: int = 1,
) -> Plan:
    """The fastest plan with which a training step fits into a device; the usual one where none does.

    With several copies, what is stored whole is sent between them, which a plan does not price: there the usual plan
    is taken, too, if a step takes no longer with it. It is also taken where a step cannot be rehearsed.

    Args:
        find: the plan for so many bytes of parameters, gradients and states of a tensor-parallel rank; for ``None`` the
            usual one.
        step: a step of a plan, rehearsed; it may raise :class:`~lightning_autotp.planning.rehearsal.RehearsalError`.
        limit: bytes of the device that a step may take.
        limit_of: whose memory that is.
        copies: over which FSDP2 shards what a rank stores.
    """
    usual: Plan | None = None

    def made_for(plan: Plan, needed: float) -> Plan:
        return replace(plan, memory_limit=int(limit), memory_needed=int(needed), limit_of=limit_of)

    room = limit
    try:
        while room > 0:
            plan = find(copies * room)
            stored = plan.memory_needed / copies
            if stored > room:
                break
            needed, seconds = step(plan)
            if needed <= limit:
                usual = (usual or find(None)) if copies > 1 else plan
                if not have_same_layouts(plan, usual):
                    usually = step(usual)
                    if usually.needed <= limit and usually.seconds <= seconds:
                        return made_for(usual, usually.needed)
                return made_for(plan, needed)
            usual = usual or find(None)
            if have_same_layouts(plan, usual):
                return made_for(usual, needed)
            room = stored - (needed - limit)
        usual = usual or find(None)
        return made_for(usual, step(usual).needed)
    except RehearsalError:
        return usual or find(None)


def have_same_layouts(plan: Plan, other: Plan) -> bool:
    """Whether two plans of a model divide its parameters in the same way, so that a step takes as much with both."""
    return [one.layout for one in plan.parameters] == [one.layout for one in other.parameters]


def fitting_plan(
    model: nn.Module,
    graph: Graph,
    inputs: Any,
    ranks: int,
    options: PlanOptions,
    *,
    example: Any,
    limit: float,
    precision: Precision,
    accumulates: bool = False,
    copies: int = 1,
    replicas: int = 1,
    machine: Machine | None = None,
) -> Plan:
    """What :func:`fitting` gives for a training step with AdamW, of a plan that is looked for as for any run.

    It is the usual plan, too, where it is not known what a step takes: the example is less than the plan is priced for.

    Args:
        model: the model, whole yet.
        graph: of it.
        inputs: the batch that was traced.
        ranks: size of the tensor-parallel group.
        options: what the plan is made for; where they give a plan, a limit or that there is none, that counts.
        example: its arguments in a training step, of the step's own size.
        limit: bytes of the device that a step may take.
        precision: as the Trainer has it.
        accumulates: whether gradients of earlier forward passes are there.
        copies: of a replica, over which FSDP2 shards it.
        replicas: how many there are.
        machine: the devices, whose times are compared where there are several copies; without it no limit counts there.
    """
    call, priced = as_call(example), options.tokens
    given = step_size(tensors_in(tuple(call)))
    tokens = priced.number if priced.size is None else priced.size.rows * max(priced.size.longest, 1)
    is_small = given.rows * max(given.longest, 1) < tokens
    if options.plan is not None or options.memory != "device" or is_small or (copies * replicas > 1 and not machine):
        return find_plan(model, graph, inputs, ranks, options)

    def step(plan: Plan) -> Step:
        rehearsal = rehearse(_local(model, plan, precision), named_arguments(model, call), precision=precision)
        needed = memory(rehearsal, copies=copies, accumulates=accumulates).total
        if machine is None:
            return Step(needed)
        in_bf16, of_all = precision != "32-true", copies * replicas
        time = step_time(rehearsal, machine, ranks, in_bf16=in_bf16, copies=of_all, replicas=replicas)
        return Step(needed, time.total)

    proofs = Proofs()

    def find(room: float | None) -> Plan:
        return find_plan(model, graph, inputs, ranks, replace(options, memory=room), proofs)

    return fitting(find, step, limit, "the device", copies)


def _local(model: nn.Module, plan: Plan | None, precision: Precision) -> nn.Module:
    """The part of the rank that has the most, as it is trained."""
    local = local_model(model, plan, 0 if plan is None else fullest_rank(plan))
    return local.to(torch.bfloat16) if precision == "bf16-true" else local
