"""What a training step takes on this rank, predicted and measured: memory of the device, and time."""

from __future__ import annotations

import statistics
from dataclasses import dataclass
from time import perf_counter
from typing import Any, cast, get_args
from weakref import ref

import torch
from torch import nn
from torch.optim import Optimizer

from lightning_autotp.guard.guard import Guard
from lightning_autotp.layouts.units import in_units
from lightning_autotp.parameters.state import parallel_state
from lightning_autotp.planning import rehearsal as rehearsals
from lightning_autotp.planning.estimate import memory, step_time
from lightning_autotp.planning.machines import Machine, machine_called
from lightning_autotp.planning.rehearsal import (
    Precision,
    Rehearsal,
    RehearsalError,
    local_model,
    named_arguments,
    rehearse,
)
from lightning_autotp.private.torch_private import without_modes

_FIRST = 2
"""Steps that are not timed: kernels are chosen, memory is asked for."""
_SAID_AFTER = 5
_MOST = 20
"""Steps of which the median is taken: the last ones."""
_FAR = 0.2


@dataclass(frozen=True)
class StepReport:
    """A training step of this rank.

    Attributes:
        memory_predicted: most bytes of tensors at once; ``None`` where it cannot be predicted.
        memory_measured: most bytes that were allocated on the device since the process began; ``None`` on a CPU, of
            which torch does not count them.
        seconds_predicted: of a step; ``None`` where it cannot be predicted.
        seconds_measured: from one optimizer step to the next, the median of the last 20; ``None`` before the fourth.
        machine: what the time is predicted for; empty where the machine is not known.
        unknown: why there is no prediction.
    """

    memory_predicted: float | None
    memory_measured: float | None
    seconds_predicted: float | None
    seconds_measured: float | None
    machine: str = ""
    unknown: str = ""

    def __str__(self) -> str:
        """In one line."""
        stored = _compared("memory", self.memory_predicted, self.memory_measured, lambda size: in_units(round(size)))
        timed = _compared("step", self.seconds_predicted, self.seconds_measured, lambda each: f"{1e3 * each:,.0f} ms")
        return f"{stored}; {timed}" + (f" ({self.unknown})" if self.unknown else "")

    @property
    def warnings(self) -> tuple[str, ...]:
        """What differs by more than a fifth from what was predicted, and what to look at."""
        found = []
        if (off := _off(self.memory_predicted, self.memory_measured)) is not None and abs(off) > _FAR:
            found.append(
                f"a step takes {_more(off)} memory than predicted: look at what else is on the device"
                " (torch.cuda.memory_summary())"
            )
        if (off := _off(self.seconds_predicted, self.seconds_measured)) is not None and abs(off) > _FAR:
            found.append(
                f"a step takes {_more(off)} time than predicted for {self.machine}: if the device waits for the host,"
                " compile the blocks; if for batches, give the dataloader workers; if its links are others,"
                " lightning-autotp measure-machine writes a file of them"
            )
        return tuple(found)


def _off(predicted: float | None, measured: float | None) -> float | None:
    return measured / predicted - 1 if predicted and measured else None


def _more(off: float) -> str:
    return f"{abs(off):.0%} {'more' if off > 0 else 'less'}"


def _compared(what: str, predicted: float | None, measured: float | None, said: Any) -> str:
    off = _off(predicted, measured)
    first = f"{said(predicted)} predicted" if predicted else "not predicted"
    second = f"{said(measured)} measured" if measured else "not measured"
    return f"{what} {first}, {second}" + ("" if off is None else f" ({off:+.0%})")


class StepMeasure:
    """Notes when an optimizer has stepped. Keeps neither it nor the model alive.

    Args:
        model: a parallel model.
        device: what it is on.
        copies: of the model that share its shards.
        precision: as Lightning has it.
        replicas: of these copies.
        cpu_offload: whether what FSDP2 shards is in host memory.

    Attributes:
        passes: backward passes of the last step.
    """

    def __init__(
        self,
        model: nn.Module,
        device: torch.device,
        copies: int,
        precision: str,
        replicas: int = 1,
        cpu_offload: bool = False,
    ) -> None:
        self._model, self.device, self.copies, self.precision = ref(model), device, copies, precision
        self.replicas, self.cpu_offload = replicas, cpu_offload
        self.passes, self._passed = 1, 0
        self._optimizer: ref[Optimizer] | None = None
        self._ends: list[float] = []
        self._steps = 0
        self._rehearsal: Rehearsal | None = None
        self._unknown = ""

    def passed(self) -> None:
        """When a backward pass begins."""
        self._passed += 1

    def stepped(self, optimizer: Optimizer) -> bool:
        """After a step of an optimizer; whether it is time to say what its steps take. Of several, the first counts."""
        self._optimizer = self._optimizer or ref(optimizer)
        if optimizer is not self._optimizer():
            return False
        self._steps += 1
        self.passes, self._passed = max(self._passed, 1), 0
        if self._steps > _FIRST:
            self._ends = [*self._ends[-_MOST:], perf_counter()]
        return self._steps == _SAID_AFTER

    def report(self, machine: str | None = None) -> StepReport:
        """What the last steps took, beside what is predicted. Not collective; the first call takes some seconds.

        Args:
            machine: what the time is predicted for, as ``8xH100`` or a machine's file; what the GPUs are called by
                default.

        Raises:
            ValueError: for a machine that is not known.
            RuntimeError: if the model is gone.
        """
        if (model := self._model()) is None:
            raise RuntimeError("strategy.report() is of a model that is there, and this one is not any more")
        found = Machine.of(machine) if machine is not None else self._machine()
        rehearsal = self._rehearsed(model)
        timed = [later - before for before, later in zip(self._ends, self._ends[1:], strict=False)]
        predicted = seconds = None
        unknown = self._unknown or ("" if found is not None else "the machine is not known")
        if rehearsal is not None:
            predicted = memory(rehearsal, 1, self.copies, self.passes > 1, self.cpu_offload).total
            if found is not None:
                try:
                    seconds = self._seconds(model, rehearsal, found)
                except ValueError as error:  # how fast a host is
                    unknown = str(error)
        return StepReport(
            memory_predicted=predicted,
            memory_measured=self._allocated(),
            seconds_predicted=seconds,
            seconds_measured=statistics.median(timed) if timed else None,
            machine="" if found is None else found.name,
            unknown=unknown,
        )

    def _seconds(self, model: nn.Module, rehearsal: Rehearsal, machine: Machine) -> float:
        in_bf16, ranks = self.precision != "32-true", parallel_state(model).group.size
        return step_time(
            rehearsal,
            machine,
            ranks,
            in_bf16=in_bf16,
            copies=self.copies * self.replicas,
            replicas=self.replicas,
            passes=self.passes,
            cpu_offload=self.cpu_offload,
        ).total

    def _rehearsed(self, model: nn.Module) -> Rehearsal | None:
        """A rehearsal of the forward and backward pass that was compared last, and of a step."""
        state, stepped = parallel_state(model), None if self._optimizer is None else self._optimizer()
        optimizer = _known_optimizer(stepped)
        prover = cast(Guard, state.guard).calls
        call, precision = prover.trained_with, self.precision
        if self._rehearsal is not None:
            return self._rehearsal
        if call is None or stepped is None:
            self._unknown = "the model has not been trained yet"
        elif precision not in get_args(Precision):
            self._unknown = f"precision {precision} is not predicted"
        elif optimizer is None:
            self._unknown = f"the states of {type(stepped).__name__} are not predicted"
        else:
            local = local_model(prover.original, state.plan, state.group.rank)
            try:
                with without_modes():
                    known = cast(Precision, precision)
                    given = named_arguments(prover.original, call)
                    self._rehearsal = rehearse(local, given, precision=known, optimizer=optimizer)
                self._unknown = ""
            except RehearsalError as error:
                self._unknown = str(error)
        return self._rehearsal

    def _machine(self) -> Machine | None:
        name_of = getattr(getattr(torch, self.device.type, None), "get_device_name", None)
        return None if name_of is None else machine_called(name_of(self.device))

    def _allocated(self) -> float | None:
        of_device = getattr(getattr(torch, self.device.type, None), "max_memory_allocated", None)
        return None if of_device is None else float(of_device(self.device))


def _known_optimizer(optimizer: Optimizer | None) -> rehearsals.Optimizer | None:
    if isinstance(optimizer, torch.optim.Adam):  # AdamW is one
        return "adamw"
    if isinstance(optimizer, torch.optim.SGD):
        return "sgd-momentum" if any(group["momentum"] for group in optimizer.param_groups) else "sgd"
    return None
