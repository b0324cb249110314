"""A rehearsed step in order: when each operator runs on a machine, and how long it takes."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from operator import attrgetter
from typing import Any, Literal

from lightning_autotp.planning.estimate import exposed_time, moving_time, product_time, step_time
from lightning_autotp.planning.machines import Machine
from lightning_autotp.planning.meter import Ran
from lightning_autotp.planning.rehearsal import Rehearsal

Phase = Literal["forward", "backward", "update"]
WorkKind = Literal["products", "others", "tensor_parallel", "update"]
"""As :class:`~lightning_autotp.planning.estimate.StepTime` has them."""


@dataclass(frozen=True)
class Span:
    """Some time of a step.

    Attributes:
        name: of what runs then: an operator, or several of them.
        place: path of the repeated block that it is of; empty outside of them.
        phase: which pass.
        kind: what the time counts as.
        start: seconds from the beginning of the step.
        seconds: how long it takes.
    """

    name: str
    place: str
    phase: Phase
    kind: WorkKind
    start: float
    seconds: float


def timeline(
    rehearsal: Rehearsal, machine: Machine, ranks: int, *, in_bf16: bool = True, rows: int = 1
) -> tuple[Span, ...]:
    """Every operator of one step of one copy, after each other.

    A collective is as long as what of it does not hide behind products. The spans of each kind together are as long as
    :func:`~lightning_autotp.planning.estimate.step_time` says: operators that only move memory share their time by what
    each takes to move its bytes.

    Args:
        rehearsal: of one row, on one of ``ranks``.
        machine: where.
        ranks: tensor-parallel ones.
        in_bf16: whether products are computed in bfloat16.
        rows: of a forward pass.
    """
    total = step_time(rehearsal, machine, ranks, in_bf16=in_bf16, rows=rows)
    work = rehearsal.work

    def moving(ran: Ran) -> float:
        """What an operator takes to move its bytes, if it does nothing else."""
        return moving_time(machine, ran.name, ran.bytes_of(rows), in_bf16) if ran.is_other else 0.0

    moving_in_all = sum(map(moving, work.ran))

    def seconds(number: int, ran: Ran) -> float:
        if ran.flops is not None:
            return product_time(machine, ran, rows, in_bf16)
        if ran.collective:
            return exposed_time(machine, work.sent(number), ranks, rows, in_bf16)
        return total.others * moving(ran) / max(moving_in_all, 1e-30)

    spans: list[Span] = []
    now = 0.0
    for number, ran in enumerate(work.ran):
        phase: Phase = "forward" if number < rehearsal.forward else "backward"
        kind: WorkKind = "products" if ran.flops is not None else "tensor_parallel" if ran.collective else "others"
        spans.append(Span(ran.name, ran.place, phase, kind, now, seconds(number, ran)))
        now += spans[-1].seconds
    return (*spans, Span("optimizer step", "", "update", "update", now, total.update))


def merged(spans: Iterable[Span], key: Sequence[str] = ("phase", "place", "kind")) -> Iterator[Span]:
    """Spans that follow each other and are alike in these attributes, as one."""
    for _, alike in groupby(spans, key=attrgetter(*key)):
        several = list(alike)
        length = several[-1].start + several[-1].seconds - several[0].start
        name = several[0].name if len(several) == 1 else f"{len(several)} operators"
        yield replace(several[0], name=name, seconds=length)


def chrome_trace(spans: Sequence[Span]) -> dict[str, Any]:
    """The step as Chrome's tracing and Perfetto read it: a row of blocks, and a row of operators."""
    events: list[dict[str, Any]] = [
        {"name": "thread_name", "ph": "M", "pid": 0, "tid": row, "args": {"name": name}}
        for row, name in enumerate(("blocks", "operators"))
    ]
    for row, several in enumerate((merged(spans, ("phase", "place")), spans)):
        for of in several:
            name = of.name if row else f"{of.phase} {of.place}"
            when = {"ts": 1e6 * of.start, "dur": 1e6 * of.seconds}
            said = {"pass": of.phase, "block": of.place}
            events.append({"name": name, "cat": of.kind, "ph": "X", **when, "pid": 0, "tid": row, "args": said})
    return {"traceEvents": events, "displayTimeUnit": "ms"}
