"""Memory and time of a step on a machine, by kind: from one rehearsal, for any number of rows and copies.

Parameters, gradients and states are divided by the copies (FSDP2 cuts them), or by those of a replica; quantized
parameters are not. What the forward pass keeps, and what is there for a moment, grows with the rows; the numbers that
quantized parameters stand for do not.

Where FSDP2 shards, what is in no block is gathered from the forward to the end of the backward pass; a large embedding
only while it runs. While a block runs forward, it is there, what it was copied from until the next one is, and what the
next one will be copied from. While a block runs backward, it and the next one are there, its gradients, those of what
is in no block that are known by then, and those of the block before on their way to the other copies, with what comes
of them.
In the end what is in no block and its gradients are there, and those of the first block on their way; the gradients of
a large embedding go last.

With what it shards in host memory (``cpu_offload``) the same is gathered, and nothing is stored on the device.
``docs/memory-measured.md`` compares it.
"""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass, fields

from lightning_autotp.planning.machines import Machine
from lightning_autotp.planning.meter import Label, Ran, Sent
from lightning_autotp.planning.rehearsal import Rehearsal

LAUNCH = 4e-6
"""Seconds that an operator takes at least: a kernel is started."""


@dataclass(frozen=True)
class Memory:
    """Bytes of one GPU when the most is there.

    Attributes:
        parameters: as they are stored.
        gradients: of all parameters that are trained, once all are there.
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
    def temporary_of(self) -> str:
        """What needs the temporary bytes, in words."""
        return {
            "optimizer step": "the optimizer's step",
            "loss": "the loss",
            "loss and backward pass": "the loss and operators",
        }.get(self.moment, "operators")

    @property
    def largest(self) -> str:
        """The kind that takes the most."""
        return max((field.name for field in fields(self)[:-1]), key=lambda name: float(getattr(self, name)))


@dataclass(frozen=True)
class StepTime:
    """Seconds of an optimizer step, by kind.

    Collectives are hidden as far as something is computed before they are waited for: products behind those of tensor
    parallelism, anything behind FSDP2's; within a node not fully, as each slows down the other (``Machine.overlap``).

    Attributes:
        products: matrix products and attention.
        others: all other operators of the forward and backward pass, by the bytes that they move, and what starting
            operators adds.
        tensor_parallel: what of the collectives between the ranks of a copy does not hide behind products.
        copies: what of FSDP2's collectives within a node does not hide behind the rest.
        network: likewise, of those between nodes.
        host: what of the copies to host memory and from there does not hide, and adding to gradients that are there.
        update: the optimizer's step.
    """

    products: float
    others: float
    tensor_parallel: float
    copies: float
    network: float
    host: float
    update: float

    @property
    def total(self) -> float:
        """All of it."""
        return sum(getattr(self, field.name) for field in fields(self))

    @property
    def largest(self) -> str:
        """The kind that takes the longest."""
        return max((field.name for field in fields(self)), key=lambda name: float(getattr(self, name)))


def memory(
    rehearsal: Rehearsal, rows: int = 1, copies: int = 1, accumulates: bool = False, cpu_offload: bool = False
) -> Memory:
    """What one GPU needs.

    Args:
        rehearsal: of one row.
        rows: of a forward pass.
        copies: of the model that it is sharded over.
        accumulates: whether gradients of earlier forward passes are there.
        cpu_offload: whether what is sharded is in host memory.
    """
    shares = (0.0, 0.0, 0.0) if cpu_offload else (rehearsal.divided, rehearsal.gradients, rehearsal.states)
    divided, gradients, states = (size / copies for size in shares)
    of_parameters = rehearsal.quantized + divided
    update = 0.0 if cpu_offload else rehearsal.update / copies
    stepping = Memory(of_parameters, gradients, states, 0.0, update, 0.0, "optimizer step")

    def passing(peak: Counter[Label], of_gradients: float, casts: int, gathered: float, moment: str) -> Memory:
        kept = rows * peak["activations"] + max(0.0, peak["copies"] - casts)
        return Memory(
            of_parameters, of_gradients, states, kept, rows * peak["other"] + peak["dequantized"], gathered, moment
        )

    if copies == 1 and not cpu_offload:
        peak = rehearsal.peak_without_gradients if accumulates else rehearsal.peak
        of_passes = gradients if accumulates else peak["gradients"]
        moments = [passing(peak, of_passes, 0, 0.0, "loss and backward pass")]
    else:
        # FSDP2 gathers in 16 bits what autocast would cast, and has its gradients in them until they are averaged.
        block, casts = rehearsal.block - rehearsal.block_casts, rehearsal.casts
        rest = rehearsal.rest - rehearsal.looked_up
        trained = rehearsal.gradients / max(rehearsal.divided, 1)
        computed, sent = trained * block, rehearsal.averaged / max(rehearsal.divided, 1) * rehearsal.block
        ahead = block if copies > 1 else 0  # a copy of its own is fetched when it is needed
        before = gradients if accumulates else 0.0
        by_then = gradients if accumulates else gradients * (1 - rehearsal.rest / max(rehearsal.divided, 1))
        within = rehearsal.peak_in_blocks
        in_block = rest + within["gradients"] + block + ahead + computed + sent + sent / copies
        in_the_end = max(rest, rehearsal.looked_up) + trained * (rehearsal.rest + ahead) + sent
        moments = [
            passing(within, before, casts, rest + block + 2 * ahead, "forward pass of a block"),
            passing(rehearsal.peak_without_gradients, before, casts, rest + ahead, "loss"),
            passing(within, before, casts, in_block, "backward pass of a block"),
            passing(Counter(), by_then, 0, in_the_end, "end of the backward pass"),
        ]
    return max(*moments, stepping, key=lambda each: each.total)


def host_memory(rehearsal: Rehearsal, rows: int = 1, copies: int = 1, cpu_offload: bool = False) -> float:
    """Bytes of host memory that one GPU needs, with the arguments of :func:`memory`."""
    kept = rehearsal.kept_on_host
    stored = (rehearsal.divided + rehearsal.gradients + rehearsal.states) / copies if cpu_offload else 0.0
    return stored + rows * kept.bytes + (kept.fixed_bytes if copies == 1 and not cpu_offload else 0)


def product_time(machine: Machine, product: Ran, rows: int, in_bf16: bool) -> float:
    """Seconds of one product of so many rows."""
    assert product.flops is not None
    flops, moved = rows * product.flops, product.bytes_of(rows)
    rate = machine.operator_rate(product.name, in_bf16) or machine.product_rate(flops / max(moved, 1), in_bf16)
    return max(flops / rate, moved / machine.memory_bandwidth, LAUNCH)


def moving_time(machine: Machine, name: str, moved: float, in_bf16: bool) -> float:
    """Seconds in which any other operator moves so many bytes."""
    return moved / (machine.operator_rate(name, in_bf16) or machine.memory_bandwidth)


def exposed_time(machine: Machine, sent: Sent, ranks: int, rows: int, in_bf16: bool) -> float:
    """Seconds of a collective between so many tensor-parallel ranks that do not hide behind products."""
    seconds = machine.between(ranks).collective(sent.ran.collective, sent.ran.bytes_of(rows), ranks)
    return machine.exposed(ranks, seconds, sum(product_time(machine, one, rows, in_bf16) for one in sent.beside))


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
    cpu_offload: bool = False,
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
        cpu_offload: whether what FSDP2 shards is in host memory.

    Raises:
        ValueError: if something is in host memory, and it is not known how fast that is.
    """
    work, bandwidth = rehearsal.work, machine.memory_bandwidth
    products = sum(count * product_time(machine, one, rows, in_bf16) for one, count in work.products.items())
    moving = sum(
        moving_time(machine, name, of.fixed_bytes + rows * of.bytes, in_bf16)
        for name, of in work.others_by_name.items()
    )
    others = max(moving, work.others.count * LAUNCH)
    started = len(work.ran) * (machine.operator_overhead or 0.0)
    # A GPU computes while the next operators are started, and waits where these take longer.
    others = others + started if machine.device == "cpu" else max(others, started - products)
    tensor_parallel = sum(
        count * exposed_time(machine, sent, ranks, rows, in_bf16) for sent, count in work.collectives.items()
    )
    shards = copies // replicas
    moved = rehearsal.update_work.others
    update = (moved.bytes + moved.fixed_bytes) / shards / bandwidth
    per_pass = products + others + tensor_parallel
    link, host_bandwidth = _host(machine) if cpu_offload or work.host_copies.count else (math.inf, math.inf)
    # What blocks keep goes and comes in the order of the operators, which wait for it.
    of_casts = 0 if copies > 1 or cpu_offload else work.host_copies.fixed_bytes
    host = passes * (rows * work.host_copies.bytes + of_casts) / link
    exposed = between_nodes = gathers = 0.0
    if copies > 1:
        among, over = machine.between(ranks * shards), machine.between(ranks * copies)
        # Parameters are gathered twice, gradients reduced once; the sums of a replica's shards go to the others.
        gathers = 2 * among.collective("all_gather", rehearsal.divided - rehearsal.casts, shards)
        sums = among.collective("reduce_scatter", rehearsal.averaged, shards)
        of_replicas = over.collective("all_reduce", rehearsal.averaged / shards, replicas)
        is_in_node = ranks * shards <= machine.gpus_per_node
        share = of_replicas / max(gathers + sums + of_replicas, 1e-30) if is_in_node else 1.0
        sums += of_replicas
        # Gradients that go to the host are waited for, so nothing runs behind their sums.
        hidden, seen = (gathers, sums) if cpu_offload else (gathers + sums, 0.0)
        all_seen = passes * (machine.exposed(ranks * shards, hidden, per_pass) + seen)
        exposed, between_nodes = (1 - share) * all_seen, share * all_seen
        # Behind the first gather and the last reduction there is nothing.
        first = among.collective("all_gather", rehearsal.rest + rehearsal.block - rehearsal.block_casts, shards)
        exposed, between_nodes = (exposed + first, between_nodes) if is_in_node else (exposed, between_nodes + first)
    if cpu_offload:
        fetched = (2 * (rehearsal.divided - rehearsal.rest) + rehearsal.rest) / shards / link
        room = max(0.0, per_pass - gathers) if copies > 1 else 0.0  # a copy of its own is fetched when it is needed
        sent = rehearsal.gradients / shards
        beside = min(ranks * copies, machine.gpus_per_node) / host_bandwidth  # seconds of a byte of each GPU
        host += passes * (max(0.0, fetched - room) + sent / link) + (passes - 1) * 3 * sent * beside
        update *= bandwidth * beside
    return StepTime(passes * products, passes * others, passes * tensor_parallel, exposed, between_nodes, host, update)


def _host(machine: Machine) -> tuple[float, float]:
    """Bandwidths of the link to a node's memory, and of that memory."""
    link, memory_of_host = machine.host_link_bandwidth, machine.host_memory_bandwidth
    if link is None or memory_of_host is None:
        raise ValueError(
            f"{machine.name}: its file does not say {' and '.join(machine.unknown_of_host)}, so it is not known how"
            " long it takes to keep something in host memory"
        )
    return link, memory_of_host
