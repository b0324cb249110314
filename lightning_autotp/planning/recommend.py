"""Which sizes fit which GPUs, and which of them are the fastest: all combinations, from one trace of the model.

For each tensor-parallel size there is a plan (two, with sequence parallelism), and a rehearsal of it with and without
checkpointed blocks. Copies of the model and rows of a forward pass are worked out from these. Only where nothing fits,
activations and what FSDP2 shards are kept in host memory, too. The plans are those that the strategy makes with the
options that are recommended: for the memory of a GPU, where no limit is given.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, Literal

from torch import nn

from lightning_autotp.building.repeated_blocks import checkpoint_blocks, offload_blocks
from lightning_autotp.capture.capture import language_model_inputs, meta_copy, step_size
from lightning_autotp.capture.garbage import relaxed_gc
from lightning_autotp.capture.nested import tensors_in
from lightning_autotp.layouts.plan import Plan
from lightning_autotp.operators.graph import Graph
from lightning_autotp.pipeline import refuse_unfit
from lightning_autotp.planning.checkpointing import Step, fitting
from lightning_autotp.planning.estimate import Memory, StepTime, host_memory, memory, step_time
from lightning_autotp.planning.machines import Machine
from lightning_autotp.planning.rehearsal import (
    OPTIMIZERS,
    Loss,
    Optimizer,
    Precision,
    Quantization,
    Rehearsal,
    RehearsalError,
    as_trained,
    check_adapters,
    first_row,
    fullest_rank,
    local_model,
    one_row,
    positions,
    rehearse,
    with_adapters,
)
from lightning_autotp.proving.compare import VerificationError
from lightning_autotp.proving.feasible import Proofs, feasible_plan, feasible_plans
from lightning_autotp.proving.verify import trace
from lightning_autotp.solving.options import PlanOptions
from lightning_autotp.solving.pricing import NOMINAL_LENGTH
from lightning_autotp.solving.solver import NothingToShard

_MOST_ROWS = 16
_TOO_MANY = 1.05
"""A step may have so many times the tokens asked for: as many as the copies divide."""

Kept = Literal["blocks", "offload"] | None
"""As the strategy's ``activation_checkpointing``."""

_ON_THE_DEVICE: tuple[tuple[Kept, bool], ...] = ((None, False), ("blocks", False))
"""What blocks keep, and whether what FSDP2 shards is in host memory."""
_IN_HOST_MEMORY: tuple[tuple[Kept, bool], ...] = (("offload", False), (None, True), ("blocks", True), ("offload", True))


@dataclass(frozen=True)
class Choice:
    """One way to train.

    Attributes:
        tensor_parallel_size: ranks of a copy.
        data_parallel_size: copies, replicas included.
        replicas: how many there are, each sharded over its copies alone; 1 without hybrid sharding.
        sequence_parallel: whether tokens are sharded between regions.
        activation_checkpointing: what the repeated blocks keep for the backward pass, as the strategy takes it.
        cpu_offload: whether parameters, gradients and optimizer states are in host memory.
        rows: of a forward pass of one copy.
        passes: forward and backward passes of an optimizer step.
        memory: of the GPU that needs the most.
        nodes: how many it needs, with as many GPUs of each.
        host_memory: bytes that a node needs of its own memory for what GPUs keep there.
        time: of an optimizer step.
        tokens: of an optimizer step.
        mfu: the share of all GPUs' peak that the model's own products take, those computed again left out.
        fits: whether the memory does; of a node, where it is known.
    """

    tensor_parallel_size: int
    data_parallel_size: int
    replicas: int
    sequence_parallel: bool
    activation_checkpointing: Kept
    cpu_offload: bool
    rows: int
    passes: int
    memory: Memory
    nodes: int
    host_memory: float
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
    def uses_host(self) -> bool:
        """Whether something is kept in host memory."""
        return self.cpu_offload or self.activation_checkpointing == "offload"


@dataclass(frozen=True)
class Recommendation:
    """What was found.

    Attributes:
        model: the model's class name.
        machine: the GPUs.
        tokens: those asked for, of an optimizer step.
        length: tokens of a row.
        precision: as the Trainer has it.
        choices: every way, those that fit first, the fastest first; then those that need the least memory.
        left_out: sizes of which nothing can be said, and why.
        lora: rank of adapters on all linear layers; 0 trains everything.
        quantize: how the adapters' base is quantized.
        source: Hub id or directory of the model; empty if it is not known.
        limit: bytes of a GPU that a step may take, where that is not all that is free of it.
    """

    model: str
    machine: Machine
    tokens: int
    length: int
    precision: Precision
    choices: tuple[Choice, ...]
    left_out: tuple[str, ...] = ()
    lora: int = 0
    quantize: Quantization | None = None
    source: str = ""
    limit: float | None = None

    @property
    def room(self) -> float:
        """Bytes of a GPU that a step may take."""
        return self.machine.free if self.limit is None else self.limit

    @property
    def best(self) -> Choice | None:
        """The fastest that fits; of those within 2 % of it, the simplest."""
        fitting = [choice for choice in self.choices if choice.fits]
        if not fitting:
            return None

        def effort(choice: Choice) -> tuple[int, int, int, bool]:
            return choice.gpus, choice.replicas, choice.tensor_parallel_size, choice.sequence_parallel

        return min(_as_fast(fitting), key=effort)

    @property
    def on_one(self) -> Choice | None:
        """The fastest way on a single GPU, if there is one."""
        return next((choice for choice in self.choices if choice.fits and choice.gpus == 1), None)


def recommend(
    model: nn.Module,
    example_inputs: dict[str, Any] | None = None,
    gpus: str | Machine = "8xH100",
    tokens_per_step: int = 16_384,
    sequence_length: int | None = None,
    optimizer: Optimizer = "adamw",
    precision: Precision = "bf16-mixed",
    lora: int = 0,
    quantize: Quantization | None = None,
    memory: float | None = None,
    loss: Loss | None = None,
) -> Recommendation:
    """Find what fits on these GPUs, and what is fast: no weights, no GPU and no process group needed.

    Args:
        model: any module, best on meta; it is only looked at. It may be one that
            ``from_pretrained(..., quantization_config=...)`` has built inside ``meta_model()``.
        example_inputs: a batch as the training step passes it, by the names of the arguments, of which one row is
            looked at; synthetic for a language model.
        gpus: how many of which: ``"16xH100"``, or ``"4xmy_machine.yaml"``, or what was read of such a file.
        tokens_per_step: tokens of an optimizer step, of all copies and accumulated passes together.
        sequence_length: tokens of a row, where ``example_inputs`` do not say it; 4,096 by default, or as many as the
            model has positions for.
        optimizer: ``"adamw"``, ``"sgd"`` or ``"sgd-momentum"``, whose states are counted.
        precision: ``"32-true"``, ``"bf16-mixed"`` or ``"bf16-true"``.
        lora: rank of adapters on all linear layers; 0 trains everything.
        quantize: how bitsandbytes quantizes the linear layers that they are on: ``"nf4"``, ``"fp4"`` or ``"int8"``.
        memory: bytes of a GPU that a step may take, as ``AutoTPStrategy(memory=...)``, which plans for it; what is free
            of a GPU by default.
        loss: what the training step makes of what the model returns, and of the row, both without values:
            ``lambda output, row: F.cross_entropy(output.flatten(0, 1), row["input_ids"].flatten())``. By default what
            the model returns as ``loss``, or all or the first that it returns, where that is one number.

    Raises:
        ValueError: for a machine, optimizer, precision, format or number that is none.
        QuantizationError: if the model's weights cannot be quantized part by part, or bitsandbytes is missing.
        CaptureError: if the model cannot be traced.
        RehearsalError: if its code asks for values that only a real step has, or it is not known what the loss is.
    """
    machine = gpus if isinstance(gpus, Machine) else Machine.of(gpus)
    if optimizer not in OPTIMIZERS:
        raise ValueError(f"optimizer={optimizer!r}: known are {', '.join(OPTIMIZERS)}")
    if precision not in ("32-true", "bf16-mixed", "bf16-true"):
        raise ValueError(f"precision={precision!r}: it must be 32-true, bf16-mixed or bf16-true")
    if tokens_per_step < 1 or (sequence_length is not None and sequence_length < 1):
        raise ValueError("tokens_per_step and sequence_length must be positive")
    longest = positions(model)
    if longest is not None and sequence_length is not None and sequence_length > longest:
        raise ValueError(
            f"sequence_length={sequence_length}: the model has {longest} positions (max_position_embeddings in its"
            " config): give a shorter one, or change the config"
        )
    if memory is not None and not 0 < memory <= machine.free:
        raise ValueError(
            f"memory={memory!r}: it must be a positive number of bytes, and tensors may take {machine.free:.4g} of a"
            f" GPU ({machine.name})"
        )
    check_adapters(lora, quantize)
    refuse_unfit(model)
    inputs = language_model_inputs(model) if example_inputs is None else example_inputs
    row = first_row(inputs) if example_inputs is not None else one_row(model, inputs, sequence_length or NOMINAL_LENGTH)
    name, source = type(model).__name__, str(getattr(model, "name_or_path", ""))
    model = with_adapters(model, precision, lora, quantize) if lora else as_trained(model, precision)
    length = max(1, step_size(tensors_in(row)).longest)
    rows = max(1, round(tokens_per_step / length))
    search = _Search(model, inputs, row, machine, rows, length, precision, optimizer, memory, loss)
    found = Recommendation(name, machine, tokens_per_step, length, precision, (), (), lora, quantize, source, memory)
    with relaxed_gc():
        found = replace(found, choices=_ranked(search.choices(_ON_THE_DEVICE)))
        if found.best is None and not machine.unknown_of_host:
            found = replace(found, choices=_ranked((*found.choices, *search.choices(_IN_HOST_MEMORY))))
        elif found.best is None:
            unknown = " and ".join(machine.unknown_of_host)
            search.left_out["in host memory"] = f"the file of {machine.name} does not say {unknown}"
        # Plans were made for one row: that of the recommended way is made again, as the strategy will make it.
        settled: set[Choice] = set()
        while (best := found.best) is not None and best not in settled:
            others = [choice for choice in found.choices if choice is not best]
            after = search.settled(best)
            settled.update(after)
            found = replace(found, choices=_ranked((*after, *others)))
    return replace(found, left_out=tuple(f"{what}: {why}" for what, why in search.left_out.items()))


def _ranked(choices: Iterable[Choice]) -> tuple[Choice, ...]:
    """Those that fit first, the fastest first; then those that need the least memory."""

    def rank(choice: Choice) -> tuple[bool, float]:
        return not choice.fits, -choice.tokens_per_second if choice.fits else choice.memory.total

    return tuple(sorted(choices, key=rank))


def _nearest(choices: Sequence[Choice]) -> Choice:
    """Of choices of rows at once, one of the fastest that fit, with the fewest tokens too many; one row, if none do."""
    fitting = _ranked(choice for choice in choices if choice.fits)
    return min(_as_fast(fitting), key=lambda choice: choice.tokens) if fitting else choices[0]


def _as_fast(ranked: Sequence[Choice]) -> list[Choice]:
    """Those within 2 % of the first, which is the fastest."""
    return [choice for choice in ranked if 1.02 * choice.tokens_per_second >= ranked[0].tokens_per_second]


@dataclass(eq=False)
class _Rehearsed:
    """The fullest rank of a plan, and its rehearsals, which are made once.

    Attributes:
        plan: of the model; ``None`` where it is not divided.
        model: the model that is planned for.
        steps: the rehearsals so far; ``None`` of one in which nothing less can be kept.
    """

    plan: Plan | None
    model: nn.Module
    steps: dict[Kept, Rehearsal | None] = field(default_factory=dict)

    @cached_property
    def local(self) -> nn.Module:
        """That rank's part, whose blocks keep all that they compute."""
        return local_model(self.model, self.plan, 0 if self.plan is None else fullest_rank(self.plan))

    @cached_property
    def as_run(self) -> Plan | None:
        """What the plan does, without what it says of prices and reasons."""
        if self.plan is None:
            return None
        parameters = tuple(replace(parameter, reasons=()) for parameter in self.plan.parameters)
        said: dict[str, Any] = {"priced_for": "", "gap": 0.0, "communication": (), "whole_tokens": (), "whole_work": ()}
        of_limit: dict[str, Any] = {"divided_work": 0.0, "memory_limit": 0, "memory_needed": 0, "limit_of": ""}
        return replace(self.plan, parameters=parameters, **said, **of_limit)


@dataclass
class _Search:
    """Rates ways to train one model; plans and rehearsals are made once.

    Attributes:
        model: as it is trained.
        inputs: the batch that is traced.
        row: one row of a step.
        machine: the GPUs.
        rows: of an optimizer step.
        length: tokens of a row.
        precision: as the Trainer has it.
        optimizer: whose states are counted.
        memory: bytes of a GPU, where they are to be less than what is free.
        loss: what a step makes of what the model returns.
        left_out: what nothing can be said of, and why.
    """

    model: nn.Module
    inputs: dict[str, Any]
    row: dict[str, Any]
    machine: Machine
    rows: int
    length: int
    precision: Precision
    optimizer: Optimizer
    memory: float | None
    loss: Loss | None
    left_out: dict[str, str] = field(default_factory=dict)
    _plans: dict[tuple[int, int], list[_Rehearsed]] = field(default_factory=dict)
    _rehearsed: list[_Rehearsed] = field(default_factory=list)
    _proofs: Proofs = field(default_factory=Proofs)

    def choices(self, ways: Iterable[tuple[Kept, bool]]) -> Iterator[Choice]:
        """For each plan and number of copies and replicas, the rows at once that are the fastest."""
        for size in _sizes(self.machine):
            for copies, replicas in _copies(self.machine, size, self.rows):
                for way in self._plans_for(size, copies // replicas):
                    for kept, cpu_offload in ways:
                        rated = (
                            self._rated(way, size, copies, replicas, kept, cpu_offload, rows)
                            for rows in self._rows_at_once(copies)
                        )
                        if found := [choice for choice in rated if choice is not None]:
                            yield _nearest(found)

    def settled(self, choice: Choice) -> list[Choice]:
        """The same with the plan that the strategy makes for it; nothing where there is none."""
        size, rows, shards = choice.tensor_parallel_size, choice.rows, choice.shards
        limit = None if self.memory is None else shards * self.memory
        options = self._options(rows, limit, choice.sequence_parallel)

        def find(room: float | None) -> Plan:
            limited = replace(options, memory=room)
            return feasible_plan(self.model, self._graph, self.inputs, size, limited, self._proofs)[0]

        def rated(plan: Plan | None) -> Choice | None:
            kept, cpu_offload = choice.activation_checkpointing, choice.cpu_offload
            way = self._known(plan)
            return self._rated(way, size, choice.data_parallel_size, choice.replicas, kept, cpu_offload, rows)

        def step(plan: Plan) -> Step:
            found = rated(plan)
            if found is None:
                raise RehearsalError("its blocks keep all that they compute")
            return Step(found.memory.total, found.time.total)

        plan = None
        if size > 1:
            try:
                if self.memory is not None or choice.cpu_offload:
                    plan = find(limit)
                else:
                    plan = fitting(find, step, self.machine.free, f"a GPU ({self.machine.name})", shards)
            except (NothingToShard, VerificationError, ValueError) as error:
                self.left_out[f"tensor_parallel_size={size} for {rows} rows"] = str(error)
                return []
        found = rated(plan)
        return [] if found is None else [found]

    @cached_property
    def _graph(self) -> Graph:
        return trace(self.model, self.inputs)

    def _options(self, rows: int, memory: float | None, sequence_parallel: bool) -> PlanOptions:
        """As the strategy has them."""
        return PlanOptions((rows, self.length), memory=memory, sequence_parallel=sequence_parallel)

    def _plans_for(self, size: int, shards: int) -> Sequence[_Rehearsed]:
        """With whole tokens, and if that is possible with sharded ones."""
        key = size, 1 if self.memory is None or size == 1 else shards
        if key not in self._plans:
            limit = None if self.memory is None else shards * self.memory  # FSDP2 divides what a rank of a copy stores
            options = self._options(1, limit, True)
            found: list[Plan | None] = [None]
            try:
                if size > 1:
                    whole, *sharded = feasible_plans(self.model, self._graph, self.inputs, size, options, self._proofs)
                    found = [whole[0], *(plan for plan, _ in sharded if plan.shards_sequence)]
            except (NothingToShard, VerificationError, ValueError) as error:
                found = []
                self.left_out[f"tensor_parallel_size={size}"] = str(error)
            self._plans[key] = list(map(self._known, found))
        return self._plans[key]

    def _known(self, plan: Plan | None) -> _Rehearsed:
        """What is known of all plans that do the same as this one."""
        this = _Rehearsed(plan, self.model)
        known = next((other for other in self._rehearsed if other.as_run == this.as_run), None)
        if known is None:
            self._rehearsed.append(this)
        return known or this

    def _rehearsal(self, way: _Rehearsed, kept: Kept) -> Rehearsal | None:
        """A step of the fullest rank; ``None`` for a model that has no blocks to keep less of."""
        if kept not in way.steps:
            way.steps[kept] = self._rehearse(way, kept)
        return way.steps[kept]

    def _rehearse(self, way: _Rehearsed, kept: Kept) -> Rehearsal | None:
        local, are_alike = way.local, False
        if kept is not None:
            local = meta_copy(local)
            try:
                {"blocks": checkpoint_blocks, "offload": offload_blocks}[kept](local)
            except ValueError:
                return None
            plain = self._rehearsal(way, None)
            are_alike = plain is not None and plain.left_out > 0
        return rehearse(
            local,
            self.row,
            precision=self.precision,
            optimizer=self.optimizer,
            are_alike=are_alike,
            loss=self.loss,
        )

    def _rows_at_once(self, copies: int) -> Iterator[int]:
        """Numbers of rows of a forward pass with which a step has hardly more than it is to have."""
        for rows in range(1, min(math.ceil(self.rows / copies), _MOST_ROWS) + 1):
            if self._passes(copies, rows) * rows * copies <= _TOO_MANY * self.rows:
                yield rows

    def _passes(self, copies: int, rows: int) -> int:
        """Forward and backward passes of a step."""
        return math.ceil(math.ceil(self.rows / copies) / rows)

    def _rated(
        self,
        way: _Rehearsed,
        size: int,
        copies: int,
        replicas: int,
        kept: Kept,
        cpu_offload: bool,
        rows: int,
    ) -> Choice | None:
        rehearsal, plain = self._rehearsal(way, kept), self._rehearsal(way, None)
        if rehearsal is None or plain is None:
            return None
        machine, in_bf16 = self.machine, self.precision != "32-true"
        passes, shards = self._passes(copies, rows), copies // replicas
        needed = memory(rehearsal, rows, shards, passes > 1, cpu_offload)
        nodes = _nodes(machine, size * copies)
        on_host = size * copies // nodes * host_memory(rehearsal, rows, shards, cpu_offload)
        time = step_time(
            rehearsal, machine, size,
            in_bf16=in_bf16, rows=rows, copies=copies, replicas=replicas, passes=passes, cpu_offload=cpu_offload,
        )  # fmt: skip
        done = passes * rows * copies
        return Choice(
            tensor_parallel_size=size,
            data_parallel_size=copies,
            replicas=replicas,
            sequence_parallel=way.plan is not None and way.plan.shards_sequence,
            activation_checkpointing=kept,
            cpu_offload=cpu_offload,
            rows=rows,
            passes=passes,
            memory=needed,
            nodes=nodes,
            host_memory=on_host,
            time=time,
            tokens=done * self.length,
            mfu=done * plain.work.flops / copies / machine.peak(in_bf16) / time.total,
            fits=needed.total <= (self.memory or machine.free) and on_host <= (machine.host_memory or math.inf),
        )


def _sizes(machine: Machine) -> list[int]:
    """Tensor-parallel sizes within a node: those that divide its GPUs, and powers of two."""
    most = min(machine.gpus, machine.gpus_per_node)
    return sorted({*_powers_of_two(most), *(size for size in range(1, most + 1) if most % size == 0)})


def _copies(machine: Machine, size: int, rows: int) -> Iterator[tuple[int, int]]:
    """Numbers of copies, and of replicas: one, or where the copies are on several nodes one for each node.

    Powers of two, as many as there are GPUs for, and as many as divide the rows. No copy is on two nodes, and all nodes
    have as many GPUs.
    """
    most = min(machine.gpus // size, rows)
    divide = next(copies for copies in range(most, 0, -1) if rows % copies == 0)
    for copies in sorted({*_powers_of_two(most), most, divide}):
        nodes = _nodes(machine, size * copies)
        if copies % nodes == 0:
            yield copies, 1
            if copies > nodes > 1:
                yield copies, nodes


def _powers_of_two(most: int) -> list[int]:
    return [1 << exponent for exponent in range(most.bit_length())]


def _nodes(machine: Machine, gpus: int) -> int:
    """How many nodes have so many GPUs."""
    return math.ceil(gpus / machine.gpus_per_node)
