"""One rank reads, the others receive: batches that the ranks of a tensor-parallel group share.

These ranks work on the same batches, so all but one of them read, decode and augment for nothing. A
:class:`BroadcastLoader` stands for a loader on every rank of a group: the first rank iterates it (and has its workers),
the others never do. What a step of the reading rank gives, a batch, the end of the data or an error, all of them get.

A message has two parts. The batch is pickled with its tensors taken out (``persistent_id``), so that any nesting of
containers, dataclasses and plain values goes through; then the tensors' bytes follow as they lie in memory, the small
ones joined. Every rank, the reading one too, builds its batch from the message: they are alike by construction.

Reading draws random numbers: a shuffling sampler its seed, an augmentation in the main process its angles. In one
process the model's dropout would continue after them, hence what reading changed of the random state goes along.
"""

from __future__ import annotations

import io
import pickle
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.data import DistributedSampler

from lightning_autotp.private.distributed_private import device_of_objects
from lightning_autotp.private.torch_private import LoaderOfLoader
from lightning_autotp.ranks.agreement import in_words, peer_error
from lightning_autotp.ranks.generators import default_generator
from lightning_autotp.ranks.random_numbers import host_random_states, set_host_random_states

LARGE = 1 << 20
"""Bytes from which on a tensor is sent by itself."""


class BroadcastLoader(LoaderOfLoader):
    """A loader that only the first rank of a group reads.

    Making it, ``iter()`` and ``next()`` are collective over the group: its ranks must iterate in step, as a Trainer's
    loops do. ``len()`` is not; it is what the reading rank's loader said when it was last started. Any other attribute
    is the own loader's (``sampler``, ``dataset``), on every rank.

    Args:
        loader: the rank's own loader; any iterable. Only the first rank's is iterated.
        group: the ranks that get each batch. Its tensors are on the host afterwards, or on the device of a group that
            takes nothing from the host.
        device: the rank's device, on which reading may draw random numbers.

    Raises:
        TypeError: from ``len()``, if the reading rank's loader has no length; from ``next()``, if a batch holds
            something that cannot be pickled.
        PeerError: from ``next()``, if the reading rank's loader raised; there, its own error.
    """

    def __init__(self, loader: Any, group: dist.ProcessGroup, device: torch.device) -> None:
        self.loader = loader
        self._group = group
        self._device = device
        self._reads = dist.get_rank(group) == 0
        self._length: int | None = self._once(self._own_length, "asking a dataloader for its length")

    def __len__(self) -> int:
        if self._length is None:
            raise TypeError(f"{type(self.loader).__name__} has no length")
        return self._length

    def __iter__(self) -> Iterator[Any]:
        iterator: Iterator[Any] = iter(())

        def start() -> int | None:
            nonlocal iterator
            try:
                iterator = iter(self.loader)
            except Exception as error:  # told with the first batch: Lightning cannot stop while it starts a loader
                iterator = _raising(error)
            return self._own_length()

        self._length = self._once(start, "starting to read the data")
        return self._batches(iterator)

    def _batches(self, iterator: Iterator[Any]) -> Iterator[Any]:
        # Lightning's sampler for predictions notes the indices it gave out, which prediction writers ask for.
        sampler = getattr(self.loader, "batch_sampler", None)
        seen: list[Any] = []

        def read() -> tuple[bool, Any, list[Any]]:
            try:
                batch = next(iterator)
            except StopIteration:
                return False, None, []
            return True, batch, getattr(sampler, "seen_batch_indices", [])[len(seen) :]

        while True:
            found, batch, indices = self._once(read, "reading the next batch")
            if not found:
                return
            seen += indices
            if seen and not self._reads and sampler is not None:
                sampler.seen_batch_indices = list(seen)
            yield batch

    def _own_length(self) -> int | None:
        try:
            return len(self.loader)
        except (TypeError, NotImplementedError):
            return None

    def _once(self, read: Callable[[], Any], phase: str) -> Any:
        return read_once(read, self._group, self._device, phase)


class StatefulBroadcastLoader(BroadcastLoader):
    """The same for a loader whose position can be saved (``state_dict``, ``load_state_dict``): the reading rank's."""

    def state_dict(self) -> dict[str, Any]:
        """The reading rank's position; empty elsewhere, where asking the loader would start its workers."""
        return dict(self.loader.state_dict()) if self._reads else {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from a saved position."""
        if self._reads:
            self.loader.load_state_dict(state)


def _raising(error: Exception) -> Iterator[Any]:
    raise error
    yield


def broadcast_loader(loader: Any, group: dist.ProcessGroup, device: torch.device) -> BroadcastLoader:
    """The :class:`BroadcastLoader` for a loader. Collective over ``group``.

    Args:
        loader: the rank's own.
        group: the tensor-parallel group.
        device: the rank's device.
    """
    stateful = callable(getattr(loader, "state_dict", None)) and callable(getattr(loader, "load_state_dict", None))
    kind = StatefulBroadcastLoader if stateful else BroadcastLoader
    return kind(loader, group, device)


def check_sampler(loader: Any, replicas: int, rank: int, advice: str) -> None:
    """Refuse a ``DistributedSampler`` that splits the data among all processes instead of the copies of the model.

    Args:
        loader: any loader.
        replicas: number of copies of the model.
        rank: this process's copy.
        advice: what to do instead.

    Raises:
        ValueError: on every rank that has such a sampler.
    """
    batch_sampler = getattr(loader, "batch_sampler", None)
    for sampler in (getattr(loader, "sampler", None), getattr(batch_sampler, "sampler", None), batch_sampler):
        if not isinstance(sampler, DistributedSampler):
            continue
        found, world = (sampler.num_replicas, sampler.rank), (dist.get_world_size(), dist.get_rank())
        if found == world != (replicas, rank) and replicas < world[0]:
            raise ValueError(
                f"the {type(sampler).__name__} of a {type(loader).__name__} splits the data among all {world[0]} ranks,"
                f" but there are {replicas} copies of the model, and the ranks that share one must see the same data."
                f" What to do: {advice}"
            )


def read_once(read: Callable[[], Any], group: dist.ProcessGroup, device: torch.device, phase: str) -> Any:
    """Call ``read`` on the first rank of a group and give every rank what it returns.

    Collective over ``group``. The other ranks' random states (``torch``, ``random``, ``numpy``) become the reading
    rank's where reading changed it.

    Args:
        read: called on the first rank only; must not communicate.
        group: the ranks. The tensors in the result are where it takes what is on the host.
        device: whose random states are shared, besides the CPU's.
        phase: what is being done, as in "failed while <phase>".

    Raises:
        Exception: on the reading rank, the error of ``read``.
        TypeError: there, if the result holds something that cannot be pickled.
        PeerError: on the other ranks, then.
    """
    error: Exception | None = None
    flats: list[Tensor] = []
    header: _Header | None = None
    there = device_of_objects(group)
    reads = dist.get_rank(group) == 0
    if reads:
        before = _random_states(device)
        content, tensors = b"", []
        try:
            content, found = _pack(read())
            tensors = [_describe(tensor) for tensor in found]
            flats = [_flat(tensor).to(there, non_blocking=there.type != "cpu") for tensor in found]
        except Exception as caught:
            error = caught
        changed = {name: state for name, state in _random_states(device).items() if state != before[name]}
        header = _Header(content, tensors, changed, in_words(error) if error is not None else None)
    headers = [header]
    source = dist.get_process_group_ranks(group)[0]
    dist.broadcast_object_list(headers, src=source, group=group)
    header = headers[0]
    assert header is not None
    if not reads:
        _set_random_states(header.random, device)
    if error is not None:
        raise error
    if header.error is not None:
        raise peer_error({0: header.error}, dist.get_world_size(group), phase)
    if not reads:
        flats = [torch.empty(tensor.bytes, dtype=torch.uint8, device=there) for tensor in header.tensors]
    _broadcast_bytes(flats, source, group)
    return _unpack(header, flats)


@dataclass(frozen=True)
class _Described:
    """What a tensor's bytes mean."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    requires_grad: bool

    @property
    def bytes(self) -> int:
        return int(np.prod(self.shape, dtype=np.int64)) * self.dtype.itemsize


@dataclass(frozen=True)
class _Header:
    """A message but for the bytes of its tensors."""

    content: bytes
    tensors: list[_Described]
    random: dict[str, Any]
    error: str | None


class _Pickler(pickle.Pickler):
    """Leaves ordinary tensors out, and keeps them in ``tensors``."""

    def __init__(self, file: io.BytesIO) -> None:
        super().__init__(file, pickle.HIGHEST_PROTOCOL)
        self.tensors: list[Tensor] = []
        self._places: dict[int, int] = {}

    def persistent_id(self, value: Any) -> int | None:
        if type(value) is not Tensor or value.layout != torch.strided or value.is_quantized or value.is_nested:
            return None
        if value.is_meta:
            return None
        if id(value) not in self._places:
            self._places[id(value)] = len(self.tensors)
            self.tensors.append(value)
        return self._places[id(value)]


class _Unpickler(pickle.Unpickler):
    """Puts the tensors back."""

    def __init__(self, file: io.BytesIO, tensors: list[Tensor]) -> None:
        super().__init__(file)
        self._tensors = tensors

    def persistent_load(self, place: int) -> Tensor:
        return self._tensors[place]


def _pack(value: Any) -> tuple[bytes, list[Tensor]]:
    file = io.BytesIO()
    pickler = _Pickler(file)
    try:
        pickler.dump(value)
    except Exception as error:
        raise TypeError(
            f"a batch cannot be sent to the other ranks: {error}. With broadcast_batches=True it may contain anything"
            " that can be pickled, as with DataLoader(num_workers=1)"
        ) from error
    return file.getvalue(), pickler.tensors


def _unpack(header: _Header, flats: list[Tensor]) -> Any:
    tensors = [
        flat.view(tensor.dtype).as_strided(tensor.shape, tensor.stride).requires_grad_(tensor.requires_grad)
        for flat, tensor in zip(flats, header.tensors, strict=True)
    ]
    return _Unpickler(io.BytesIO(header.content), tensors).load()


def _describe(tensor: Tensor) -> _Described:
    return _Described(tuple(tensor.shape), _stride(tensor), tensor.dtype, tensor.requires_grad)


def _stride(tensor: Tensor) -> tuple[int, ...]:
    """The tensor's own strides if its elements lie without gaps and overlaps, else those of a copy."""
    return torch.empty_like(tensor, device="meta").stride()


def _flat(tensor: Tensor) -> Tensor:
    """The bytes of a tensor, of shape ``[bytes]``, in the order of its memory."""
    tensor = tensor.detach().resolve_conj().resolve_neg()
    if tensor.stride() != _stride(tensor):
        tensor = torch.empty_like(tensor).copy_(tensor)
    return tensor.as_strided((tensor.numel(),), (1,)).view(torch.uint8)


def _broadcast_bytes(flats: list[Tensor], source: int, group: dist.ProcessGroup) -> None:
    """Fill the bytes in from the source rank's."""
    small = [flat for flat in flats if 0 < flat.numel() < LARGE]
    if small:
        joined = torch.cat(small)
        dist.broadcast(joined, src=source, group=group)
        if dist.get_rank() != source:
            for flat, part in zip(small, joined.split([flat.numel() for flat in small]), strict=True):
                flat.copy_(part)
    for flat in flats:
        if flat.numel() >= LARGE:
            dist.broadcast(flat, src=source, group=group)


def _random_states(device: torch.device) -> dict[str, Any]:
    """The states of the generators, in a form that compares by value."""
    states = {"torch": torch.get_rng_state().numpy().tobytes(), **host_random_states()}
    if device.type != "cpu":
        states["device"] = default_generator(device).get_state().numpy().tobytes()
    return states


def _set_random_states(states: dict[str, Any], device: torch.device) -> None:
    if "torch" in states:
        torch.set_rng_state(torch.frombuffer(bytearray(states["torch"]), dtype=torch.uint8))
    set_host_random_states(states)
    if "device" in states:
        default_generator(device).set_state(torch.frombuffer(bytearray(states["device"]), dtype=torch.uint8))
