"""Ranks agree: an error on one rank reaches all of them, and all of them work on the same inputs and weights.

A rank that raises while its peers wait in a collective is a hang, and ranks of one tensor-parallel group that see
different batches compute nonsense without any error. Both are found here at once, with a message that says what to do.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import fields, is_dataclass
from itertools import chain
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

SAMPLED_ELEMENTS = 4096
"""How many elements of a parameter :func:`check_same_weights` looks at."""


class PeerError(RuntimeError):
    """Another rank of the group failed; the message has its error."""


@contextmanager
def raise_together(group: dist.ProcessGroup | None, phase: str) -> Iterator[None]:
    """Guard a phase: when it raises on any rank, it raises on every rank.

    Collective over ``group``, at the end of the phase. The phase itself must hold no collective of this group: a rank
    that fails before one would leave its peers inside it.

    Args:
        group: the ranks that go through the phase; ``None`` is every process.
        phase: what is being done, as in "failed while <phase>".

    Raises:
        Exception: on the rank that failed, its own error.
        PeerError: on the ranks that did not fail, naming the ones that did and their errors.
    """
    error: Exception | None = None
    try:
        yield
    except Exception as caught:
        error = caught
    if dist.is_initialized():
        failures = _gather_objects(f"{type(error).__name__}: {error}" if error is not None else None, group)
    else:
        failures = []
    if error is not None:
        raise error
    failed = {rank: failure for rank, failure in enumerate(failures) if failure is not None}
    if failed:
        raise PeerError(
            "\n".join(f"rank {rank} of {len(failures)} failed while {phase}: {text}" for rank, text in failed.items())
        )


def check_same_batch(batch: Any, group: dist.ProcessGroup, where: str = "a batch") -> None:
    """Compare a batch over the ranks of a tensor-parallel group: structure, shapes, dtypes and contents.

    Collective over ``group``.

    Args:
        batch: any nesting of mappings, sequences, dataclasses, tensors and plain values; other objects are not
            compared.
        group: the tensor-parallel group.
        where: which batch this is, for the message.

    Raises:
        RuntimeError: on every rank, if any two ranks' batches differ.
    """
    difference = _difference(list(_describe(batch, "batch")), group)
    if difference is not None:
        raise RuntimeError(
            f"{where} differs between the ranks of a tensor-parallel group: {difference}. These ranks work on one"
            " batch together and must be given the same one. What to do: give a sampler of your own the same seed on"
            " every rank and, with several data-parallel copies, the strategy's `distributed_sampler_kwargs` (Lightning"
            " does it for ordinary samplers: leave Trainer(use_distributed_sampler=True) as it is); let an iterable"
            " dataset split its data by data-parallel rank, not by global rank (`trainer.global_rank`, RANK); seed"
            " random augmentation equally (`seed_everything(seed, workers=True)`)."
        )


def check_same_weights(model: nn.Module, group: dist.ProcessGroup | None) -> None:
    """Compare the real parameters of a model that every rank built for itself, by a sample of each one's values.

    Collective over ``group``. Parameters on the meta device have no values and are left out.

    Raises:
        RuntimeError: on every rank, if any two ranks' parameters differ.
    """
    sampled = []
    for name, parameter in model.named_parameters():
        if not parameter.is_meta:
            flat = parameter.detach().reshape(-1)
            sampled.append((name, _describe_tensor(flat[:: max(1, flat.numel() // SAMPLED_ELEMENTS)], parameter.shape)))
    difference = _difference(sampled, group)
    if difference is not None:
        raise RuntimeError(
            f"the ranks built different weights: {difference}. Each rank keeps its part of one model, so all of them"
            " must start from the same values. What to do: call `seed_everything(seed)` before the model is built, or"
            " build it in `configure_model()`, where the ranks share one state of the random generators."
        )


def _gather_objects(value: Any, group: dist.ProcessGroup | None) -> list[Any]:
    values: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(values, value, group=group)
    return values


def _difference(mine: Sequence[tuple[str, str]], group: dist.ProcessGroup | None) -> str | None:
    """The first entry in which a rank differs from rank 0; the same answer on every rank."""
    everyone = _gather_objects(list(mine), group)
    for rank, theirs in enumerate(everyone[1:], start=1):
        ours, other = dict(everyone[0]), dict(theirs)
        for path in chain(ours, other):
            if ours.get(path) != other.get(path):
                return f"{path} is {ours.get(path, 'absent')} on rank 0 and {other.get(path, 'absent')} on rank {rank}"
    return None


def _describe(value: Any, path: str) -> Iterator[tuple[str, str]]:
    if isinstance(value, Tensor):
        yield path, _describe_tensor(value, value.shape)
    elif isinstance(value, Mapping):
        for key in value:
            yield from _describe(value[key], f"{path}[{key!r}]")
    elif isinstance(value, list | tuple):
        yield path, f"{type(value).__name__} of {len(value)}"
        for index, item in enumerate(value):
            yield from _describe(item, f"{path}[{index}]")
    elif value is None or isinstance(value, str | bytes | int | float | bool):
        yield path, repr(value)
    elif is_dataclass(value):
        for field in fields(value):
            yield from _describe(getattr(value, field.name), f"{path}.{field.name}")


def _describe_tensor(tensor: Tensor, shape: torch.Size) -> str:
    dense = tensor.detach().to_dense() if tensor.layout != torch.strided else tensor.detach()
    values = memoryview(dense.cpu().contiguous().reshape(-1).view(torch.uint8).numpy())  # type: ignore[arg-type]
    return f"{str(tensor.dtype).removeprefix('torch.')}{list(shape)} (checksum {zlib.crc32(values):08x})"
