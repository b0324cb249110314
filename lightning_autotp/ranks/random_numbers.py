"""Which random numbers a rank draws: the group's common ones, or its own.

All ranks of a tensor-parallel group share one stream of random numbers: what they hold whole they drop alike. A call
that draws for a sharded tensor must draw other numbers on every rank, and as many as the rank's part needs, without
the common streams diverging. So it runs on a generator seeded for this call and this rank, and afterwards
the common stream goes on as if it had given one seed per rank (Megatron keeps a second stream in a tracker object for
this, which checkpoints of activations must save and restore as well).

The seeds come from the CPU's generator on every device: the one that ``torch.utils.checkpoint`` always restores, so
that a recomputation draws the same mask.
"""

from __future__ import annotations

import pickle
import random
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from lightning_autotp.ranks.generators import default_generator
from lightning_autotp.ranks.group import TPGroup

_SEEDS = 2**63 - 1
_noted: ContextVar[bool] = ContextVar("own numbers are drawn in the trace under way", default=False)


@contextmanager
def own_numbers(group: TPGroup, device: torch.device | None) -> Iterator[None]:
    """What draws on ``device`` inside draws this rank's own numbers, independent of the other ranks' ones.

    Not a collective, but every rank of the group must come here with its generators in the same state, and leaves with
    them in the same state. Where nothing is drawn (dropout in eval mode) that is the state before.

    Args:
        group: the ranks that draw independently of each other.
        device: where the numbers are drawn; ``None`` in a trace, where it is only noted.
    """
    if device is None:
        token = _noted.set(True)
        try:
            yield
        finally:
            _noted.reset(token)
        return
    before = torch.get_rng_state()
    seed = int(own_seed(group))
    with seeded(seed, device):
        generator = default_generator(device)
        fresh = generator.get_state()
        yield
        is_drawn = not torch.equal(generator.get_state(), fresh)
    if not is_drawn:
        torch.set_rng_state(before)


def own_seed(group: TPGroup) -> Tensor:
    """This rank's of one seed for each rank, from the CPU's common stream; compiled code can do that, too."""
    return torch.randint(_SEEDS, (group.size,), device="cpu")[group.rank]


@contextmanager
def seeded(seed: int, device: torch.device) -> Iterator[None]:
    """What draws on ``device`` inside begins with this seed; afterwards all generators are as they were."""
    with torch.random.fork_rng([] if device.type == "cpu" else [device], device_type=_accelerator(device)):
        default_generator(device).manual_seed(seed)
        yield


def share_random_state(group: TPGroup, device: torch.device) -> None:
    """Let all ranks go on with the first one's random state, of the CPU and of a device. Collective over ``group``."""
    devices = [torch.device("cpu"), *([device] if device.type != "cpu" else [])]
    generators = [default_generator(of) for of in devices]
    states = [generator.get_state() for generator in generators]
    dist.broadcast_object_list(states, group_src=0, group=group.process_group)
    for generator, state in zip(generators, states, strict=True):
        generator.set_state(state)


def host_random_states() -> dict[str, Any]:
    """What Python's and numpy's generators give next, in a form that is compared by value, hashed and pickled."""
    return {"random": random.getstate(), "numpy": pickle.dumps(np.random.get_state(legacy=False))}


def set_host_random_states(states: Mapping[str, Any]) -> None:
    """Let those of them go on so that are among these."""
    if "random" in states:
        random.setstate(states["random"])
    if "numpy" in states:
        np.random.set_state(pickle.loads(states["numpy"]))


def are_own_numbers_noted() -> bool:
    """Whether a trace is inside :func:`own_numbers`."""
    return _noted.get()


def _accelerator(device: torch.device) -> str:
    """The type of device whose generators are kept besides the CPU's; any will do where there are none to keep."""
    return "cuda" if device.type == "cpu" else device.type
