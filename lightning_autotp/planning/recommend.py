"""Which sizes fit which GPUs, and which of them are the fastest: all combinations, from one trace of the model.

For each tensor-parallel size there is a plan (two, with sequence parallelism), and a rehearsal of it with and without
checkpointed blocks. Copies of the model and rows of a forward pass are worked out from these.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from lightning_autotp.building.repeated_blocks import checkpoint_blocks
from lightning_autotp.capture.capture import language_model_inputs
from lightning_autotp.capture.garbage import relaxed_gc
from lightning_autotp.layouts.plan import Plan
from lightning_autotp.pipeline import refuse_unfit
from lightning_autotp.planning.estimate import Memory, StepTime, memory, step_time
from lightning_autotp.planning.machines import Machine
from lightning_autotp.planning.rehearsal import (
    OPTIMIZERS,
    Optimizer,
    Precision,
    Quantization,
    Rehearsal,
    as_trained,
    check_adapters,
    fullest_rank,
    local_model,
    one_row,
    rehearse,
    with_adapters,
)
from lightning_autotp.proving.compare import VerificationError
from lightning_autotp.proving.feasible import feasible_plans
from lightning_autotp.proving.verify import trace
from lightning_autotp.solving.options import PlanOptions
from lightning_autotp.solving.solver import NothingToShard

_MOST_ROWS = 16


@dataclass(frozen=True)
class Choice:
    """One way to train.

    Attributes:
        tensor_parallel_size: ranks of a copy.
        data_parallel_size: copies, replicas included.
        replicas: how many there are, each sharded over its copies alone; 1 without hybrid sharding.
        sequence_parallel: whether tokens are sharded between regions.
        checkpointing: whether the repeated blocks are computed again in the backward pass.
        rows: of a forward pass of one copy.
        passes: forward and backward passes of an optimizer step.
        memory: of the GPU that needs the most.
        time: of an optimizer step.
        tokens: of an optimizer step.
        mfu: the share of all GPUs' peak that the model's own products take, those computed again left out.
        fits: whether the memory does.
    """

    tensor_parallel_size: int
    data_parallel_size: int
    replicas: int
    sequence_parallel: bool
    checkpointing: bool
    rows: int
    passes: int
    memory: Memory
    time: StepTime
    tokens: int
    mfu: float
    fits: bool

    @property
    def gpus(self) -> int:
        """How many it needs."""
        return self.tensor_parallel_size * self.data_parallel_size

    @property
    def shards(self) -> int:
        """Copies over which a replica is sharded."""
        return self.data_parallel_size // self.replicas

    @property
    def tokens_per_second(self) -> float:
        """Of all copies together."""
        return self.tokens / self.time.total

    @property
    def limit(self) -> str:
        """What it would be faster, or smaller, without."""
        return self.time.largest if self.fits else f"memory: {self.memory.largest}"


@dataclass(frozen=True)
class Recommendation:
    """What was found.

    Attributes:
        model: the model's class name.
        machine: the GPUs.
        length: tokens of a row.
        precision: as the Trainer has it.
        choices: every way, those that fit first, the fastest first; then those that need the least memory.
        left_out: sizes of which nothing can be said, and why.
        lora: rank of adapters on all linear layers; 0 trains everything.
        quantize: how the adapters' base is quantized.
        source: Hub id or directory of the model; empty if it is not known.
    """

    model: str
    machine: Machine
    length: int
    precision: Precision
    choices: tuple[Choice, ...]
    left_out: tuple[str, ...] = ()
    lora: int = 0
    quantize: Quantization | None = None
    source: str = ""

    @property
    def best(self) -> Choice | None:
        """The fastest that fits; of those within 2 % of it, the simplest."""
        fitting = [choice for choice in self.choices if choice.fits]
        if not fitting:
            return None
        fast = [choice for choice in fitting if choice.time.total <= 1.02 * fitting[0].time.total]

        def effort(choice: Choice) -> tuple[int, int, int, bool]:
            return choice.gpus, choice.replicas, choice.tensor_parallel_size, choice.sequence_parallel

        return min(fast, key=effort)

    @property
    def on_one(self) -> Choice | None:
        """The fastest way on a single GPU, if there is one."""
        return next((choice for choice in self.choices if choice.fits and choice.gpus == 1), None)


def recommend(
    model: nn.Module,
    example_inputs: dict[str, Any] | None = None,
    gpus: str | Machine = "8xH100",
    tokens_per_step: int = 16_384,
    sequence_length: int = 4_096,
    optimizer: Optimizer = "adamw",
    precision: Precision = "bf16-mixed",
    lora: int = 0,
    quantize: Quantization | None = None,
) -> Recommendation:
    """Find what fits on these GPUs, and what is fast: no weights, no GPU and no process group needed.

    Args:
        model: any model whose output has a ``loss``, best on meta; it is only looked at. It may be one that
            ``from_pretrained(..., quantization_config=...)`` has built inside ``meta_model()``.
        example_inputs: one row as the training step passes it, by the names of the arguments; made up for a language
            model.
        gpus: how many of which: ``"16xH100"``, or ``"4xmy_machine.yaml"``, or what was read of such a file.
        tokens_per_step: tokens of an optimizer step, of all copies and accumulated passes together.
        sequence_length: tokens of a row, where ``example_inputs`` do not say it.
        optimizer: ``"adamw"``, ``"sgd"`` or ``"sgd-momentum"``, whose states are counted.
        precision: ``"32-true"``, ``"bf16-mixed"`` or ``"bf16-true"``.
        lora: rank of adapters on all linear layers; 0 trains everything.
        quantize: how bitsandbytes quantizes the linear layers that they are on: ``"nf4"``, ``"fp4"`` or ``"int8"``.

    Raises:
        ValueError: for a machine, optimizer, precision, format or number that is none.
        QuantizationError: if the model's weights cannot be quantized part by part, or bitsandbytes is missing.
        CaptureError: if the model cannot be traced.
        RehearsalError: if its code asks for values that only a real step has.
    """
    machine = gpus if isinstance(gpus, Machine) else Machine.of(gpus)
    if optimizer not in OPTIMIZERS:
        raise ValueError(f"optimizer={optimizer!r}: known are {', '.join(OPTIMIZERS)}")
    if precision not in ("32-true", "bf16-mixed", "bf16-true"):
        raise ValueError(f"precision={precision!r}: it must be 32-true, bf16-mixed or bf16-true")
    if tokens_per_step < 1 or sequence_length < 1:
        raise ValueError("tokens_per_step and sequence_length must be positive")
    check_adapters(lora, quantize)
    refuse_unfit(model)
    inputs = language_model_inputs(model) if example_inputs is None else example_inputs
    row = one_row(model, inputs, sequence_length) if example_inputs is None else example_inputs
    name, source = type(model).__name__, str(getattr(model, "name_or_path", ""))
    model = with_adapters(model, precision, lora, quantize) if lora else as_trained(model, precision)
    length = next((x.shape[1] for x in row.values() if isinstance(x, Tensor) and x.dim() == 2), 1)
    rows = max(1, round(tokens_per_step / length))
    choices: list[Choice] = []
    left_out: list[str] = []
    with relaxed_gc():
        graph = None
        for size in _sizes(machine):
            plans: list[Plan | None] = [None]
            if size > 1:
                graph = graph or trace(model, inputs)
                try:
                    options = PlanOptions(
                        tokens_per_step=(1, length), profile=machine.between(size), sequence_parallel=True
                    )
                    plans = [plan for plan, _ in feasible_plans(model, graph, inputs, size, options)]
                except (NothingToShard, VerificationError, ValueError) as error:
                    left_out.append(f"tensor_parallel_size={size}: {error}")
                    continue
            for number, plan in enumerate(plans):
                if number and plan is not None and not plan.shards_sequence:
                    continue
                for found in _rehearsals(model, plan, row, precision, optimizer):
                    choices += _choices(*found, machine, size, bool(number), rows, length, precision)
    choices.sort(key=lambda choice: (not choice.fits, choice.time.total if choice.fits else choice.memory.total))
    return Recommendation(name, machine, length, precision, tuple(choices), tuple(left_out), lora, quantize, source)


def _sizes(machine: Machine) -> Iterator[int]:
    """Tensor-parallel sizes: powers of two within a node."""
    size = 1
    while size <= min(machine.gpus, machine.gpus_per_node):
        yield size
        size *= 2


Found = tuple[Rehearsal, bool, float]


def _rehearsals(
    model: nn.Module, plan: Plan | None, row: dict[str, Any], precision: Precision, optimizer: Optimizer
) -> Iterator[Found]:
    """With and without checkpointing, and the FLOPs of a step in which nothing is redone."""
    local = local_model(model, plan, fullest_rank(plan) if plan is not None else 0)
    flops = 0.0
    for checkpointing in (False, True):
        if checkpointing:
            try:
                checkpoint_blocks(local)
            except ValueError:  # it has none
                return
        rehearsal = rehearse(local, row, precision=precision, optimizer=optimizer)
        flops = flops or rehearsal.work.flops
        yield rehearsal, checkpointing, flops


def _choices(
    rehearsal: Rehearsal,
    checkpointing: bool,
    flops: float,
    machine: Machine,
    size: int,
    sequence_parallel: bool,
    rows: int,
    length: int,
    precision: Precision,
) -> Iterator[Choice]:
    """For each number of copies and replicas, the most rows at once that fit; one row, where that does not."""
    in_bf16 = precision != "32-true"
    for copies, replicas in _copies(machine, size, rows):
        of_copy = math.ceil(rows / copies)
        best = None
        micro = 1
        while micro <= min(of_copy, _MOST_ROWS):
            passes = math.ceil(of_copy / micro)
            needed = memory(rehearsal, micro, copies // replicas, passes > 1)
            fits = needed.total + machine.reserved <= machine.memory
            if best is None or fits:
                time = step_time(
                    rehearsal, machine, size,
                    in_bf16=in_bf16, rows=micro, copies=copies, replicas=replicas, passes=passes,
                )  # fmt: skip
                done = passes * micro * copies
                mfu = done * flops / copies / machine.peak(in_bf16) / time.total
                best = Choice(
                    size,
                    copies,
                    replicas,
                    sequence_parallel,
                    checkpointing,
                    micro,
                    passes,
                    needed,
                    time,
                    done * length,
                    mfu,
                    fits,
                )
            micro *= 2
        if best is not None:
            yield best


def _copies(machine: Machine, size: int, rows: int) -> Iterator[tuple[int, int]]:
    """Numbers of copies, and of replicas: one, or where the copies are on several nodes one for each node."""
    of_node = machine.gpus_per_node // size
    copies = 1
    while size * copies <= machine.gpus and copies <= rows:
        yield copies, 1
        if copies > of_node > 1:
            yield copies, copies // of_node
        copies *= 2
