"""What the ranks of a tensor-parallel group must have in common for the whole run: batches, random numbers, losses.

Ranks that are given different batches compute nonsense without any error. So do ranks whose common stream of random
numbers has diverged: they drop other elements of what each of them holds whole, and the weights that every rank has
drift apart with it. Both is told by two numbers per rank and step, which may go along with any other reduction: a
fingerprint, and its complement. If the largest of the first is the complement of the largest of the second, there is
one fingerprint only. What it is that differs is exchanged when something does. The losses that they compute, and what
else they should have alike (:mod:`~lightning_autotp.ranks.losses`, :mod:`~lightning_autotp.ranks.drift`), are told by
numbers that go along with these.

Nothing here waits for another rank before that. Of a batch on a device the host knows a checksum, whose way to the host
begins when the batch is noted, before the step that works on it: whoever asks for it waits for the steps before.
"""

from __future__ import annotations

import hashlib
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_autotp.ranks.agreement import gather_objects, largest_of_all, raised_by_all
from lightning_autotp.ranks.description import DescribedItem, combined, describe, difference
from lightning_autotp.ranks.drift import Drift
from lightning_autotp.ranks.generators import default_generator
from lightning_autotp.ranks.host_copy import HostCopy
from lightning_autotp.ranks.losses import Losses


class Noted(NamedTuple):
    """A batch that this rank was given.

    Attributes:
        where: which one.
        parts: what is in it.
        checksums: of all its tensors, one for each type of device that has some.
    """

    where: str
    parts: list[DescribedItem]
    checksums: list[HostCopy]


@dataclass(frozen=True)
class Account:
    """What one rank has to say when fingerprints differ.

    Attributes:
        ranks: its tensor-parallel group, by their numbers among all processes.
        places: which batches it was given since the last comparison.
        batches: what is in them: paths and texts.
        streams: the states of its random generators, likewise.
        before: the last batch that was compared before, at which all was well.
    """

    ranks: tuple[int, ...]
    places: tuple[str, ...]
    batches: tuple[tuple[tuple[str, str], ...], ...]
    streams: tuple[tuple[str, str], ...]
    before: str | None


class ReplicaConsistency:
    """Notes what this rank is given and computes, and compares it with what the other ranks of its group have.

    Args:
        group: the tensor-parallel group.
        device: whose random numbers are compared, besides the CPU's.
    """

    def __init__(self, group: dist.ProcessGroup, device: torch.device) -> None:
        self._group, self._device = group, device
        self._losses, self._where = Losses(), "a step"
        self._drifts: Sequence[Drift] = ()
        self._noted: list[Noted] = []
        self._sizes: list[int] = []  # how many of the last numbers are of batches, of losses, and of each drift
        self._streams: tuple[tuple[str, str], ...] = ()
        self._before: str | None = None

    def note(self, batch: Any, where: str) -> None:
        """Remember a batch's fingerprint until the next comparison. Not collective, and no device is waited for.

        Args:
            batch: any nesting of mappings, sequences, dataclasses, tensors, numpy's arrays and plain values; other
                objects are not compared.
            where: which batch this is.
        """
        parts = list(describe(batch, "batch"))
        checksums: dict[torch.device, list[Tensor]] = {}
        for part in parts:
            if part.checksum is not None:
                checksums.setdefault(part.checksum.device, []).append(part.checksum)
        self._noted.append(Noted(where, parts, [HostCopy(combined(found)) for found in checksums.values()]))
        self._where = where

    def note_loss(self, loss: Tensor) -> None:
        """Remember a loss of the last batch for the comparison after the next one. Not collective."""
        self._losses.note(loss, self._where)

    def note_whole(self, drifts: Sequence[Drift]) -> None:
        """Note some more tensors of these as they are now, for the next comparison. Not collective."""
        self._drifts = drifts
        for drift in drifts:
            drift.note()

    def numbers(self) -> list[int]:
        """What is compared by: some numbers of 64 bits.

        Not collective. Of a device only what it was given before the last batch was noted is waited for, or before the
        last comparison.
        """
        parts = [self._fingerprint(), self._losses.bounds(), *(drift.bounds() for drift in self._drifts)]
        self._sizes = [len(part) for part in parts]
        return [number for part in parts for number in part]

    def _fingerprint(self) -> tuple[int, int]:
        """Of the batches since the last comparison and of the generators as they are now."""
        self._streams = _streams(self._device)
        texts = [repr(self._streams)]
        for noted in self._noted:
            texts.append(noted.where)
            for part in noted.parts:
                texts += part.path, part.text, repr(part.items)
            texts += [str(int(checksum.read())) for checksum in noted.checksums]
        digest = hashlib.blake2b("\n".join(texts).encode(errors="surrogatepass"), digest_size=8).digest()
        fingerprint = int.from_bytes(digest, "little", signed=True)
        return fingerprint, ~fingerprint

    def settle(self, largest: Sequence[int], everyone: dist.ProcessGroup | None) -> None:
        """Go on if the ranks have all of it in common. Collective over ``everyone`` if they have not.

        Args:
            largest: the largest of all ranks' :meth:`numbers`, for one or several groups after one another.
            everyone: the ranks that have these numbers; ``None`` is every process.

        Raises:
            RuntimeError: on all of these ranks, if those of any one group differ.
        """
        of_batches, of_losses, *of_drifts = parts = [list[int]() for _ in self._sizes]
        rest = iter(largest)
        for _ in range(len(largest) // sum(self._sizes)):
            for part, size in zip(parts, self._sizes, strict=True):
                part += islice(rest, size)
        self._settle_batches(of_batches, everyone)
        drifts, self._drifts = self._drifts, ()
        for drift, of_all in zip(drifts, of_drifts, strict=True):
            drift.settle(of_all, everyone)  # it says what, where a loss only says that something is
        self._losses.settle(of_losses, everyone)

    def _settle_batches(self, largest: Sequence[int], everyone: dist.ProcessGroup | None) -> None:
        if all(first == ~second for first, second in zip(largest[::2], largest[1::2], strict=True)):
            if self._noted:
                self._before = self._noted[-1].where
            self._noted.clear()
            return
        numbers = range(dist.get_world_size()) if everyone is None else dist.get_process_group_ranks(everyone)
        accounts = dict(zip(numbers, gather_objects(self._account(), everyone), strict=True))
        groups = sorted({account.ranks for account in accounts.values()})
        found = [text for ranks in groups for text in explain({rank: accounts[rank] for rank in ranks})]
        raise raised_by_all(RuntimeError("\n".join(found)), everyone)

    def compare(self) -> None:
        """Compare at once, over this group. Collective.

        Raises:
            RuntimeError: on every rank, if any two ranks differ.
        """
        self.settle(largest_of_all(self.numbers(), self._group), self._group)

    def _account(self) -> Account:
        return Account(
            ranks=tuple(dist.get_process_group_ranks(self._group)),
            places=tuple(noted.where for noted in self._noted),
            batches=tuple(tuple(words for part in noted.parts for words in part.in_words()) for noted in self._noted),
            streams=self._streams,
            before=self._before,
        )


def explain(accounts: Mapping[int, Account]) -> list[str]:
    """What differs between the ranks of one group, and what to do.

    Args:
        accounts: what each of them says, by its number among all processes.
    """
    found = []
    first = next(iter(accounts.values()))
    places = {rank: [("the last one", ", ".join(said.places) or "none")] for rank, said in accounts.items()}
    if (differing := difference(places)) is not None:
        found.append(
            f"the ranks of a tensor-parallel group are not at the same batch: {differing}. These ranks take every step"
            " together. What to do: give them data of the same length, and skip batches on all of them or on none"
        )
    for number, where in enumerate(first.places if differing is None else ()):
        batches = {rank: said.batches[number] for rank, said in accounts.items()}
        if (differing := difference(batches)) is not None:
            found.append(
                f"{where} differs between the ranks of a tensor-parallel group: {differing}. These ranks work on one"
                " batch together and must be given the same one. What to do: give a sampler of your own the same seed"
                " on every rank and, with several data-parallel copies, the strategy's `distributed_sampler_kwargs`"
                " (Lightning does it for ordinary samplers: leave Trainer(use_distributed_sampler=True) as it is); let"
                " an iterable dataset split its data by data-parallel rank, not by global rank (`trainer.global_rank`,"
                " RANK); seed random augmentation equally (`seed_everything(seed, workers=True)`)."
            )
    if (differing := difference({rank: said.streams for rank, said in accounts.items()})) is not None:
        found.append(
            f"the random numbers of the ranks of a tensor-parallel group have diverged{_when(first)}: {differing}."
            " These ranks draw from one common stream, so that what each of them has whole stays the same. One rank has"
            " drawn from torch's global generator differently from another: for a tensor of which each has another part"
            " (`torch.randn_like(p.grad)`), or on some ranks only (`if rank == 0`), or has seeded it by rank. What to"
            " do: draw for the whole tensor on every rank and take this rank's part of it, or draw from a generator of"
            " your own (`generator=torch.Generator()`); call `seed_everything(seed)` with one seed."
        )
    return found


def _when(account: Account) -> str:
    alike = f"; at {account.before} they were still equal" if account.before is not None else ""
    if account.places:
        return f" at {account.places[-1]}{alike}"
    return f" after {account.before}" if account.before is not None else ""


def _streams(device: torch.device) -> tuple[tuple[str, str], ...]:
    """The states of the generators that torch draws from by default. For CUDA that is a seed and an offset."""
    kinds = dict.fromkeys(("cpu", device.type))
    return tuple(
        (f"the state of the {kind.upper()}'s generator", f"{zlib.crc32(_state(device, kind)):08x}") for kind in kinds
    )


def _state(device: torch.device, kind: str) -> Any:
    generator = default_generator(device if kind == device.type else torch.device("cpu"))
    return generator.get_state().numpy()
