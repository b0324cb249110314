"""Ranks agree: an error on one rank reaches all of them, and all of them begin with the same weights.

A rank that raises while its peers wait in a collective is a hang, and ranks that begin with different weights compute
nonsense without any error. Both are found here at once, with a message that says what to do.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, NamedTuple, TypeVar

import torch
import torch.distributed as dist
from torch import nn

from lightning_autotp.private.distributed_private import device_of_objects
from lightning_autotp.ranks.description import DescribedItem, checksum, difference, kind

_LENGTH = 8
_FIRST = 1024
"""Bytes that say how long a pickled object is, and of it those that are sent at once."""

SAMPLED_ELEMENTS = 4096
"""How many elements of a parameter :func:`check_same_weights` looks at."""


_RAISED = "autotp_raised"
_AGREED = "autotp_agreed"
"""Of an error the names of groups all of whose ranks have one."""

Made = TypeVar("Made")
Failure = TypeVar("Failure", bound=Exception)


class PeerError(RuntimeError):
    """Another rank of the group failed; the message has its error.

    Attributes:
        kinds: the names of the classes of these errors.
    """

    kinds: frozenset[str] = frozenset()


class MissingRank(RuntimeError):
    """Another rank has not come to where this one waits for it: their code differs, or it has failed."""


class Raised(NamedTuple):
    """How :func:`raise_together` or :func:`raised_by_all` has raised an error.

    Attributes:
        first: the first rank of the group with an error of the same words.
        is_first: whether that is this one.
        everywhere: whether every process of the job has raised an error.
    """

    first: int
    is_first: bool
    everywhere: bool

    @classmethod
    def how(cls, error: BaseException) -> Raised | None:
        """How an error, or the one of its kind that it was made of, was raised; ``None`` for any other error."""
        if type(error.__cause__) is type(error):
            error = error.__cause__
        return vars(error).get(_RAISED)


@contextmanager
def raise_together(group: dist.ProcessGroup | None, phase: str) -> Iterator[None]:
    """Guard a phase: when it raises on any rank, it raises on every rank.

    Collective over ``group``, at the end of the phase. The phase itself must hold no collective of this group but those
    of :func:`made_together` and :func:`first_makes`: a rank that fails before another one would leave its peers in it.

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
    _agree(error, None, group, phase)


@contextmanager
def raise_along(groups: Iterable[dist.ProcessGroup], phase: str) -> Iterator[None]:
    """:func:`raise_together` over each group, which together are axes of a mesh: an error reaches all of its ranks."""
    with ExitStack() as stack:
        for group in groups:
            stack.enter_context(raise_together(group, phase))
        yield


def made_together(group: dist.ProcessGroup | None, phase: str, make: Callable[[], Made]) -> list[Made]:
    """What every rank makes, in order of rank; where one raises, all do. Collective, after ``make``, which holds none.

    Raises:
        Exception: as :func:`raise_together`.
    """
    error, made = None, None
    try:
        made = make()
    except Exception as caught:
        error = caught
    return _agree(error, made, group, phase)


def first_makes(group: dist.ProcessGroup | None, phase: str, make: Callable[[], Made]) -> Made:
    """What the first rank of a group makes, on all of them; where it raises, all do. Collective.

    Raises:
        Exception: as :func:`raise_together`.
    """
    with raise_together(group, phase):
        made = [make() if dist.get_rank(group) == 0 else None]
    dist.broadcast_object_list(made, group_src=0, group=group)
    (found,) = made
    return found  # type: ignore[return-value]


def _agree(error: Exception | None, made: Any, group: dist.ProcessGroup | None, phase: str) -> list[Any]:
    """What every rank has made, where none has an error."""
    name = "" if group is None else group.group_name
    if error is not None and name in vars(error).get(_AGREED, ()):
        raise error  # inside of this phase: all ranks have one then
    own = in_words(error) if error is not None else None
    answers = gather_objects((own, made), group) if dist.is_initialized() else [(own, made)]
    failures = [failure for failure, _ in answers]
    failed = {rank: failure for rank, failure in enumerate(failures) if failure is not None}
    if error is not None:
        if dist.is_initialized():
            _note_raised(error, failures.index(own), group)
    elif failed:
        error = peer_error(failed, len(failures), phase)
    if error is not None:
        vars(error)[_AGREED] = (*vars(error).get(_AGREED, ()), name)
        raise error
    return [each for _, each in answers]


def raised_by_all(error: Failure, group: dist.ProcessGroup | None) -> Failure:
    """An error that every rank of a group is about to raise, in the same words: none is told. Not collective."""
    _note_raised(error, 0, group)
    return error


def _note_raised(error: Exception, first: int, group: dist.ProcessGroup | None) -> None:
    is_everyone = dist.get_world_size(group) == dist.get_world_size()
    vars(error)[_RAISED] = Raised(first, first == dist.get_rank(group), is_everyone)


def peer_error(failures: Mapping[int, str], ranks: int, phase: str) -> PeerError:
    """The error of a rank that did not fail.

    Args:
        failures: errors :func:`in_words`, by rank.
        ranks: how many there are.
        phase: as for :func:`raise_together`.
    """
    error = PeerError(
        "\n".join(f"rank {rank} of {ranks} failed while {phase}: {text}" for rank, text in failures.items())
    )
    error.kinds = frozenset(text.partition(":")[0] for text in failures.values())
    return error


def in_words(error: BaseException) -> str:
    """An error for other ranks."""
    return f"{type(error).__name__}: {error}"


def check_same_weights(model: nn.Module, group: dist.ProcessGroup | None) -> None:
    """Compare the real parameters of a model that every rank built for itself, by a sample of each one's values.

    Collective over ``group``. Parameters on the meta device have no values and are left out.

    Raises:
        RuntimeError: on every rank, if any two ranks' parameters differ.
    """
    sampled: list[tuple[str, str]] = []
    for name, parameter in model.named_parameters():
        if not parameter.is_meta:
            flat = parameter.detach().reshape(-1)
            some = checksum(flat[:: max(1, flat.numel() // SAMPLED_ELEMENTS)])
            sampled += DescribedItem(name, kind(parameter.dtype, parameter.shape), some).in_words()
    differing = difference(dict(enumerate(gather_objects(sampled, group))))
    if differing is not None:
        raise RuntimeError(
            f"the ranks built different weights: {differing}. Each rank keeps its part of one model, so all of them"
            " must start from the same values. What to do: call `seed_everything(seed)` before the model is built, or"
            " build it in `configure_model()`, where the ranks share one state of the random generators."
        )


def gather_objects(value: Any, group: dist.ProcessGroup | None) -> list[Any]:
    """What every rank of a group has, in order of rank. Collective.

    One collective where what each has is small, as mostly; torch's own function asks first how much it is.
    """
    ranks, device = dist.get_world_size(group), device_of_objects(group)
    own = pickle.dumps(value)

    def gathered(part: bytes, size: int) -> list[bytes]:
        """The bytes of every rank, of which each sends so many."""
        sent = torch.frombuffer(bytearray(part.ljust(size, b"\0")), dtype=torch.uint8).to(device)
        found = sent.new_empty(ranks * size)
        dist.all_gather_single(found, sent, group=group)
        every = found.cpu().numpy().tobytes()
        return [every[rank * size : (rank + 1) * size] for rank in range(ranks)]

    firsts = gathered(len(own).to_bytes(_LENGTH, "big") + own[:_FIRST], _LENGTH + _FIRST)
    lengths = [int.from_bytes(first[:_LENGTH], "big") for first in firsts]
    parts = [first[_LENGTH:] for first in firsts]
    if (most := max(lengths) - _FIRST) > 0:
        parts = [first + rest for first, rest in zip(parts, gathered(own[_FIRST:], most), strict=True)]
    return [pickle.loads(part[:length]) for part, length in zip(parts, lengths, strict=True)]


def largest_of_all(numbers: Sequence[int], group: dist.ProcessGroup | None) -> list[int]:
    """The largest that any rank of a group has of each of some numbers. Collective.

    A device is waited for only if the group takes nothing from the host.
    """
    found = torch.tensor(numbers, dtype=torch.int64, device=device_of_objects(group))
    dist.all_reduce(found, dist.ReduceOp.MAX, group=group)
    return [int(number) for number in found.tolist()]
