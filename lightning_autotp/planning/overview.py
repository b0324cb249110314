"""What a plan means for a GPU, in five lines: memory by what it is for, time of a step and most of it, what to try."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, fields, replace
from typing import Any

from torch import nn

from lightning_autotp.capture.capture import step_size
from lightning_autotp.capture.garbage import relaxed_gc
from lightning_autotp.capture.nested import tensors_in
from lightning_autotp.layouts.plan import Plan
from lightning_autotp.layouts.units import in_units, unit_of
from lightning_autotp.pipeline import refuse_unfit
from lightning_autotp.planning.asked import Batch
from lightning_autotp.planning.checkpointing import Step, fitting, have_same_layouts
from lightning_autotp.planning.estimate import Memory, StepTime, memory, step_time
from lightning_autotp.planning.machines import Machine
from lightning_autotp.planning.rehearsal import (
    Optimizer,
    Precision,
    Rehearsal,
    RehearsalError,
    as_trained,
    fullest_rank,
    local_model,
    rehearse,
)
from lightning_autotp.planning.report import KINDS
from lightning_autotp.planning.timeline import Span, timeline
from lightning_autotp.progress import phase
from lightning_autotp.proving.feasible import Proofs, feasible_plan
from lightning_autotp.proving.verify import trace
from lightning_autotp.solving.options import PlanOptions

_TIGHT = 0.8
"""Share of a GPU's memory above which there should be less in it."""


@dataclass(frozen=True)
class Overview:
    """What one step of a plan takes.

    Attributes:
        plan: the plan.
        machine: the GPUs.
        rows: of a forward pass.
        length: tokens of a row; 0 for a model without sequences.
        precision: as the Trainer has it.
        optimizer: whose states are counted.
        memory: of the rank that stores the most.
        time: of a step.
        rehearsal: of one row, which they follow from.
    """

    plan: Plan
    machine: Machine
    rows: int
    length: int
    precision: Precision
    optimizer: Optimizer
    memory: Memory
    time: StepTime
    rehearsal: Rehearsal

    @property
    def free(self) -> float:
        """Bytes of a GPU that tensors may take."""
        return self.machine.free

    @property
    def spans(self) -> tuple[Span, ...]:
        """The step in order."""
        in_bf16 = self.precision != "32-true"
        return timeline(self.rehearsal, self.machine, self.plan.ranks, in_bf16=in_bf16, rows=self.rows)

    @property
    def fits(self) -> bool:
        """Whether the step does."""
        return self.memory.total <= self.free

    @property
    def parts(self) -> dict[str, float]:
        """Bytes of the memory by what they are."""
        of = self.memory
        return {
            "parameters": of.parameters,
            "gradients": of.gradients,
            "optimizer": of.states,
            "activations": of.activations,
            "other": of.temporary + of.gathered,
        }

    def lines(self) -> Iterator[str]:
        """For people, the most important first; no line is longer than 80 characters but the last."""
        size = f"{self.rows} x {self.length} tokens" if self.length else f"{self.rows} rows"
        total, free = in_units(int(self.memory.total)), in_units(int(self.free))
        does = "fits" if self.fits else "does not fit"
        yield f"{does}: {total} of {free} of a GPU ({self.machine.name}), {size} a step"
        unit, scale = unit_of(self.memory.total)
        yield ", ".join(f"{name} {_digits(size / scale)}" for name, size in self.parts.items()) + f" {unit}"
        yield f"step: about {in_ms(self.time.total)} (estimated, {self.precision}, {self.optimizer})"
        spent = sorted(((getattr(self.time, one.name), KINDS[one.name]) for one in fields(self.time)), reverse=True)
        yield "most of it: " + ", ".join(f"{what} {in_ms(seconds)}" for seconds, what in spent[:2])
        yield "try: " + "; ".join([*self._better(), "`recommend`, which compares all sizes, also FSDP alone"])

    def _better(self) -> Iterator[str]:
        ranks, of = self.plan.ranks, self.memory
        stored = of.parameters + of.gradients + of.states
        if of.total > _TIGHT * self.free:
            if stored < of.total / 2 and not self.plan.shards_sequence:
                yield "--sequence-parallel true (fewer activations)"
            if 2 * ranks <= self.machine.gpus_per_node:
                yield f"--tp {2 * ranks} (less memory)"
            elif not self.fits and stored >= of.total / 2:
                yield "copies, which divide parameters, gradients and states (data_parallel_size)"
            if not self.fits and of.activations > stored:
                yield "fewer --tokens, activation checkpointing"
        elif ranks % 2 == 0 and 2 * of.total <= self.free:
            fewer = f"--tp {ranks // 2}" if ranks > 2 else "one GPU, or FSDP alone"
            yield f"{fewer} (at most twice the memory, which fits, and less to send)"


def plan_for(
    model: nn.Module,
    batch: Batch,
    ranks: int,
    machine: Machine,
    options: PlanOptions,
    *,
    tokens: int,
    precision: Precision = "bf16-mixed",
    optimizer: Optimizer = "adamw",
) -> tuple[Plan, Overview | RehearsalError]:
    """A plan with what a step of it takes; where the options give no limit of memory, that of a GPU is one.

    Args:
        model: the model; it is only looked at.
        batch: what its training step passes to it.
        ranks: tensor-parallel ones.
        machine: the GPUs.
        options: what the plan is made for.
        tokens: of a forward and backward pass.
        precision: as the Trainer has it.
        optimizer: whose states are counted.

    Returns:
        The plan, and the overview or why there is none.

    Raises:
        CaptureError, NothingToShard, ValueError, VerificationError: as :func:`~lightning_autotp.make_plan`.
    """
    refuse_unfit(model)
    with phase(f"tracing {type(model).__name__}"), relaxed_gc():
        graph = trace(model, batch.inputs, device=options.device)
    seen: list[Overview] = []
    proofs = Proofs()

    def find(room: float | None) -> Plan:
        with (
            phase(f"choosing a plan for {ranks} ranks" + (f" with {in_units(room)} each" if room else "")),
            relaxed_gc(),
        ):
            return feasible_plan(model, graph, batch.inputs, ranks, replace(options, memory=room), proofs)[0]

    def step(plan: Plan) -> Step:
        with phase("rehearsing a training step, without values"):
            seen.append(
                look_over(model, plan, batch.row, machine, tokens=tokens, precision=precision, optimizer=optimizer)
            )
        return Step(seen[-1].memory.total)

    if options.memory == "device":
        plan = fitting(find, step, machine.free, f"a GPU ({machine.name})")
    else:
        plan = find(options.limit)
    try:
        if not seen or not have_same_layouts(seen[-1].plan, plan):
            step(plan)
    except RehearsalError as error:
        return plan, error
    return plan, replace(seen[-1], plan=plan)


def look_over(
    model: nn.Module,
    plan: Plan,
    row: dict[str, Any],
    machine: Machine,
    *,
    tokens: int,
    precision: Precision = "bf16-mixed",
    optimizer: Optimizer = "adamw",
) -> Overview:
    """Rehearse a step of a plan on one GPU of a machine.

    Args:
        model: the plan's model; it is only looked at.
        plan: the plan.
        row: one row of a batch as the training step passes it, by the names of the arguments.
        machine: the GPUs.
        tokens: of a forward and backward pass.
        precision: as the Trainer has it.
        optimizer: whose states are counted.

    Raises:
        RehearsalError: if the model's code asks for values that only a real step has.
    """
    local = local_model(as_trained(model, precision), plan, fullest_rank(plan))
    rehearsal = rehearse(local, row, precision=precision, optimizer=optimizer)
    length = step_size(tensors_in(row)).longest
    rows = max(1, round(tokens / max(length, 1)))
    needed = memory(rehearsal, rows)
    time = step_time(rehearsal, machine, plan.ranks, in_bf16=precision != "32-true", rows=rows)
    return Overview(plan, machine, rows, length, precision, optimizer, needed, time, rehearsal)


def _digits(number: float) -> str:
    return f"{number:.1f}" if number < 99.95 else f"{number:.0f}"


def in_ms(seconds: float) -> str:
    """Seconds as milliseconds, two digits at least."""
    return f"{1e3 * seconds:,.0f} ms" if seconds >= 0.01 else f"{1e3 * seconds:.2g} ms"
