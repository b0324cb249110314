"""What a start says, once in a job: its phases, what was planned, what is divided, and where the weights came from."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from time import perf_counter

import torch.distributed as dist
from torch import nn

from lightning_autotp.layouts.names import join_names
from lightning_autotp.parameters.state import ParallelState, parallel_state
from lightning_autotp.progress import bar, phase


@contextmanager
def says_plan(model: nn.Module) -> Iterator[None]:
    """Around planning and proving, after which the model is this rank's local one."""
    began, name = perf_counter(), type(model).__name__
    yield
    plan = parallel_state(model).plan
    if plan.ranks == 1:
        _say(f"{name} is not divided: there is one tensor-parallel rank (devices=1, or as many copies as devices)")
        return
    took = f"{perf_counter() - began:.1f} s"
    _say(
        f"planned {name} for {plan.ranks} tensor-parallel ranks, and proved that together they compute what the"
        f" original model does, in {took}, {plan.traced}"
    )
    _say(f"{plan.summary}; model.autotp.plan.table() has the details")
    if plan.memory_limit:
        _say(plan.of_memory)
    for warning in plan.warnings:
        _say(f"warning: every rank computes all of {warning}")


def says_phase(what: str) -> AbstractContextManager[object]:
    """Around a part of that."""
    return phase(what, shown=dist.get_rank() == 0)


@contextmanager
def says_weights(model: nn.Module) -> Iterator[Callable[[int], None]]:
    """Around filling in the parameters of a local model; yields what is told of each how many bytes it has."""
    began, how, name = perf_counter(), _how(parallel_state(model)), type(model).__name__
    size = sum(parameter.nbytes for parameter in model.parameters())
    with bar(f"loading {name}'s weights", size, shown=dist.get_rank() == 0) as told:
        yield told
    _say(f"each rank's part of {name}'s weights was {how} in {perf_counter() - began:.1f} s")


def say_kept(model: str, kept: str, warnings: Iterable[str]) -> None:
    """Before planning: what a model's blocks keep for the backward pass, where that was chosen."""
    _say(f"{model}'s {kept} (predicted, with AdamW)")
    for warning in warnings:
        _say(f"warning: {warning}")


def say_step(report: object, warnings: Iterable[str]) -> None:
    """After the first steps: what one takes."""
    _say(str(report))
    for warning in warnings:
        _say(f"warning: {warning}")


def _how(state: ParallelState) -> str:
    """How the weights come to be there."""
    if not any(meta.need_initialize for meta in state.metas.values()):
        return "cut from the given model"
    origins = dict.fromkeys(source.origin for source in state.sources.values())
    return f"read from {join_names(list(origins))}" if origins else "initialized"


def _say(text: str) -> None:
    if dist.get_rank() == 0:
        print(f"lightning_autotp: {text}", file=sys.stderr, flush=True)
