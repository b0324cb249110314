"""Memory and time of a step on a machine, by kind: from one rehearsal, for any number of rows and copies.

Parameters, gradients and states are divided by the copies (FSDP2 cuts them), or by those of a replica; quantized
parameters are not. What the forward pass keeps, and what is there for a moment, grows with the rows; the numbers that
quantized parameters stand for do not. FSDP2 has two blocks and what is in no block gathered at once, the gradients of
one block, and those of the one before on their way to the other copies.
"""

from __future__ import annotations

from dataclasses import dataclass, fields

from lightning_autotp.planning.machines import Machine
from lightning_autotp.planning.rehearsal import Rehearsal

LAUNCH = 4e-6
"""Seconds that an operator takes at least: a kernel is started."""


@dataclass(frozen=True)
class Memory:
    """Bytes of one GPU when the most is there.

    Attributes:
        parameters: as they are stored.
        gradients: likewise.
        states: the optimizer's.
        activations: kept for the backward pass, parameters in another dtype (autocast's) included.
        temporary: what the loss, an operator, a collective or the optimizer's step needs for a moment; the numbers that
            quantized parameters stand for.
        gathered: by FSDP2.
        moment: when that is.
    """

    parameters: float
    gradients: float
    states: float
    activations: float
    temporary: float
    gathered: float
    moment: str

    @property
    def total(self) -> float:
        """All of it."""
        return sum(getattr(self, field.name) for field in fields(self) if field.name != "moment")

    @property
    def largest(self) -> str:
        """The kind that takes the most."""
        return max((field.name for field in fields(self)[:-1]), key=lambda name: float(getattr(self, name)))


@dataclass(frozen=True)
class StepTime:
    """Seconds of an optimizer step, by kind. Nothing is taken to overlap but FSDP2's gathers.

    Attributes:
        products: matrix products and attention.
        others: all other operators of the forward and backward pass, by the bytes that they move.
        tensor_parallel: collectives between the ranks of a copy.
        copies: what of FSDP2's collectives does not hide behind the rest.
        update: the optimizer's step.
    """

    products: float
    others: float
    tensor_parallel: float
    copies: float
    update: float

    @property
    def total(self) -> float:
        """All of it."""
        return sum(getattr(self, field.name) for field in fields(self))

    @property
    def largest(self) -> str:
        """The kind that takes the longest."""
        return max((field.name for field in fields(self)), key=lambda name: float(getattr(self, name)))


def memory(rehearsal: Rehearsal, rows: int = 1, copies: int = 1, accumulates: bool = False) -> Memory:
    """What one GPU needs.

    Args:
        rehearsal: of one row.
        rows: of a forward pass.
        copies: of the model that it is sharded over.
        accumulates: whether gradients of earlier forward passes are there.
    """
    divided, gradients, states = (size / copies for size in (rehearsal.divided, rehearsal.gradients, rehearsal.states))
    of_parameters = rehearsal.quantized + divided
    at_once = copies > 1 or accumulates  # gradients count in full: parts of them, or those of passes before
    peak = rehearsal.peak_without_gradients if at_once else rehearsal.peak
    gathered, in_other_dtype = 0.0, float(peak["copies"])
    if copies > 1:
        # FSDP2 gathers in 16 bits what autocast would cast, and has its gradients in them until they are averaged.
        in_other_dtype = max(0.0, in_other_dtype - rehearsal.casts)
        block, divided = rehearsal.block - rehearsal.block_casts, max(rehearsal.divided, 1)
        computed = rehearsal.gradients / divided * block
        sent = rehearsal.averaged / divided * rehearsal.block
        gathered = 2 * block + computed + sent + rehearsal.rest
    passing = Memory(
        of_parameters,
        gradients if at_once else peak["gradients"],
        states,
        rows * peak["activations"] + in_other_dtype,
        rows * peak["other"] + peak["dequantized"],
        gathered,
        "loss and backward pass",
    )
    stepping = Memory(of_parameters, gradients, states, 0.0, rehearsal.update / copies, 0.0, "optimizer step")
    return max(passing, stepping, key=lambda each: each.total)


def product_time(machine: Machine, flops: float, moved: float, in_bf16: bool) -> float:
    """Seconds of one product of so many floating-point operations that touches so many bytes."""
    return max(flops / (machine.peak(in_bf16) * machine.reached), moved / machine.memory_bandwidth, LAUNCH)


def step_time(
    rehearsal: Rehearsal,
    machine: Machine,
    ranks: int,
    *,
    in_bf16: bool = True,
    rows: int = 1,
    copies: int = 1,
    replicas: int = 1,
    passes: int = 1,
) -> StepTime:
    """How long an optimizer step takes.

    Args:
        rehearsal: of one row, on one of ``ranks``.
        machine: where.
        ranks: tensor-parallel ones.
        in_bf16: whether products are computed in bfloat16.
        rows: of a forward pass.
        copies: of the model, replicas included.
        replicas: each of which is sharded over its copies alone, the next ones to each other.
        passes: forward and backward passes of a step.
    """
    work, bandwidth = rehearsal.work, machine.memory_bandwidth
    products = sum(
        count * product_time(machine, rows * flops, moved, in_bf16) for (flops, moved), count in work.products.items()
    )
    others = max((work.others.fixed_bytes + rows * work.others.bytes) / bandwidth, work.others.count * LAUNCH)
    within = machine.between(ranks)
    tensor_parallel = sum(
        count * within.collective(kind, rows * size, ranks) for (kind, size), count in work.collectives.items()
    )
    shards = copies // replicas
    update = (rehearsal.update_work.others.bytes + rehearsal.update_work.others.fixed_bytes) / shards / bandwidth
    per_pass = products + others + tensor_parallel
    exposed = 0.0
    if copies > 1:
        among, over = machine.between(ranks * shards), machine.between(ranks * copies)
        # Parameters are gathered twice, gradients reduced once; the sums of a replica's shards go to the others.
        whole = 2 * among.collective("all_gather", rehearsal.divided - rehearsal.casts, shards)
        whole += among.collective("reduce_scatter", rehearsal.averaged, shards)
        whole += over.collective("all_reduce", rehearsal.averaged / shards, replicas)
        exposed = passes * max(0.0, whole - per_pass)
        # Behind the first gather and the last reduction there is nothing.
        exposed += among.collective("all_gather", rehearsal.rest + rehearsal.block - rehearsal.block_casts, shards)
    return StepTime(passes * products, passes * others, passes * tensor_parallel, exposed, update)
