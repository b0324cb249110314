"""How a layer is called in a trace, and what it returns: told so that calls can be compared, and results made again."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, MutableMapping, Sequence, Set
from dataclasses import replace
from math import prod
from typing import Any

import torch
from torch import Tensor

from lightning_autotp.capture.attribute_reads import PLAIN
from lightning_autotp.capture.cache_slots import own_tables
from lightning_autotp.capture.noted_numbers import NotedFloat, NotedInt, Notes, plain
from lightning_autotp.capture.static_values import NoValue
from lightning_autotp.capture.stretches import Container, Counted, Given, Made, Marked, NotAgain, Plain, Seen
from lightning_autotp.capture.tracer import Storage, Tracer, Tracked
from lightning_autotp.private.torch_private import (
    FakeTensor,
    base_of,
    function_modes,
    storage_key,
    unset_fake_temporarily,
)
from lightning_autotp.ranks.random_numbers import are_own_numbers_noted

_VALUES = PLAIN.union((torch.dtype, torch.device, torch.layout, torch.memory_format))
"""Classes of values that never change."""


class Call:
    """A call of a layer that is about to run.

    Args:
        tracer: what the layer runs under.
        notes: what code asks of numbers there.
        of_tensors: names of the attributes that every tensor of the trace has.
        args: its arguments.
        kwargs: those that are given by name.

    Attributes:
        tokens: equal for two calls that are alike.
        leaves: all that is in its arguments, with the containers.
        tensors: the tensors in these, each once.
        numbers: their numbers in the graph.
        tables: what caches keep for the layer, and what was in there before.

    Raises:
        NotAgain: if more may matter than can be told.
    """

    def __init__(
        self, tracer: Tracer, notes: Notes, of_tensors: Set[str], args: Any, kwargs: Any, place: int | None
    ) -> None:
        self.tracer, self.notes, self.of_tensors, self.place = tracer, notes, of_tensors, place
        self.tables: list[tuple[MutableMapping[Any, Any], dict[Any, Any]]] = []
        self.leaves: list[Any] = []
        self.tensors: list[Tensor] = []
        self.numbers: list[int] = []
        self.tokens: list[Any] = [
            *(
                (torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind))
                for kind in ("cpu", tracer.device.type)
            ),
            torch.is_autocast_cache_enabled(),
            torch.is_grad_enabled(),
            torch.is_inference_mode_enabled(),
            torch.get_default_dtype(),
            torch.get_default_device(),
            function_modes(),
            are_own_numbers_noted(),
            dict(tracer.calls.counts[-1]),
        ]
        for value in (*args, *kwargs.values()):
            self._describe(value)
        self.tokens += [len(args), list(kwargs)]

    def _describe(self, value: Any) -> None:
        kind = type(value)
        if isinstance(value, Tensor):
            self._describe_tensor(value)
        elif kind is tuple or kind is list or kind is dict:
            self.tokens.append((kind, _keys(value) if kind is dict else len(value)))
            for item in value.values() if kind is dict else value:
                self._describe(item)
        elif kind in _VALUES:
            self.tokens.append((kind, value))
        elif kind is NotedInt or kind is NotedFloat:
            self.tokens.append((kind, plain(value), value.expression))
        elif (tables := own_tables(value, self.place)) is not None:
            self.tokens.append(value)
            for is_of, table in tables:
                self.tokens.append(is_of)
                self._describe_table(table)
        else:
            raise NotAgain
        self.leaves.append(value)

    def _describe_table(self, table: MutableMapping[Any, Any]) -> None:
        self.tokens.append(_keys(table))
        for value in table.values():
            if isinstance(value, Tensor):
                self._describe_tensor(value, is_in_slot=True)
            elif type(value) in _VALUES or type(value) is dict:
                self.tokens.append((type(value), value if type(value) in _VALUES else None))
            else:
                raise NotAgain
        self.tables.append((table, dict(table)))

    def _describe_tensor(self, tensor: Tensor, is_in_slot: bool = False) -> None:
        again = next((at for at, other in enumerate(self.tensors) if other is tensor), None)
        if again is not None:
            self.tokens.append(("again", again))
            return
        tracked = self.tracer.tracked(tensor)
        if tracked is None or not is_up_to_date(tracked) or not _is_bare(tensor, self.of_tensors):
            raise NotAgain
        number, begun = tracked.value.tensor, self.tracer.begun[-1]
        info = self.tracer.graph.tensors[number]
        if is_in_slot:  # then each layer has one of its own
            self.tokens.append(self._single_value(number))
        elif number < begun:  # then it is the same one
            self.tokens.append(number)
        else:  # it was made for this call: where it is marked, say
            self.tokens.append(("new", number - begun, _memory_of(tracked) if info.is_static else None))
        memory = storage_key(tensor)
        sharing = next((at for at, other in enumerate(self.tensors) if storage_key(other) == memory), None)
        self.tokens += [type(tensor), *_metadata(tensor), info, sharing]
        self.tensors.append(tensor)
        self.numbers.append(number)

    def _single_value(self, tensor: int) -> Any:
        """The value of a static tensor of one element.

        Raises:
            NotAgain: if it is none, or its value is not known.
        """
        info = self.tracer.graph.tensors[tensor]
        if not info.is_static or prod(info.shape) != 1:
            raise NotAgain
        try:
            with self.tracer.pause(), unset_fake_temporarily():
                return self.tracer.evaluator.value(tensor).item()
        except NoValue:
            raise NotAgain from None

    def is_given(self, args: Any, kwargs: Any) -> bool:
        """Whether its arguments hold what they held before it."""
        now = [leaf for value in (*args, *kwargs.values()) for leaf in _all_in(value)]
        return len(now) == len(self.leaves) and all(one is other for one, other in zip(now, self.leaves, strict=True))

    def described(self, result: Any, made: Collection[int]) -> tuple[list[tuple[int, Any, Any]], Any]:
        """How to do again, in another call that is like it, what is seen of it outside.

        Args:
            result: what it returned.
            made: the tensors that operators in it have made.

        Returns:
            What it has put into its slots of caches (into which table, as which entry, and what), and what it returned.

        Raises:
            NotAgain: if that is not known.
        """
        taken = {storage_key(tensor) for tensor in self.tensors}
        if any(before.keys() - table.keys() for table, before in self.tables):
            raise NotAgain
        put = [
            (at, name, self._result(value, made, taken))
            for at, (table, before) in enumerate(self.tables)
            for name, value in table.items()
            if name not in before or before[name] is not value
        ]
        return put, self._result(result, made, taken)

    def put_again(self, put: Sequence[tuple[int, Any, Any]]) -> None:
        """Put into its slots what another call has put into its own."""
        for at, name, value in put:
            self.tables[at][0][name] = self.made(value)

    def _result(self, value: Any, made: Collection[int], taken: set[int]) -> Any:
        kind = type(value)
        if kind is tuple or kind is list or kind is dict:
            items = tuple(self._result(item, made, taken) for item in (value.values() if kind is dict else value))
            return Container(kind, tuple(key for _, key in _keys(value)) if kind is dict else (), items)
        if kind is NotedInt or kind is NotedFloat:
            return Counted(plain(value), value.expression, value.size)
        if not isinstance(value, Tensor):
            if kind not in _VALUES:
                raise NotAgain
            return Plain(kind, value)
        tracked = self.tracer.tracked(value)
        for at, tensor in enumerate(self.tensors):
            if tensor is value:
                return Given(at)
            given = self.tracer.tracked(tensor)
            if tracked is not None and given is not None and _is_marked(tensor, given, value, tracked):
                return Marked(at, tracked.value, tracked.crossed[len(given.crossed) :])
        memory = storage_key(value)
        if tracked is None or memory in taken or not _is_its_own(tracked, made) or not self._is_plain(value):
            raise NotAgain
        taken.add(memory)
        storage = None if tracked.storage is None else replace(tracked.storage, pending=[])
        kept = replace(tracked, storage=storage)
        seen = None if base_of(value) is None else Seen(_elements(value), int(value.storage_offset()))
        said = tuple((name, one) for name, one in vars(value).items() if name not in self.of_tensors)
        return Made(tuple(value.shape), value.stride(), value.dtype, value.requires_grad, seen, said, kept)

    def _is_plain(self, value: Tensor) -> bool:
        """Whether a tensor is all of its memory or a view of it, and plain values are all that is said of it."""
        return (
            isinstance(value, FakeTensor)
            and value.constant is None
            and all(name in self.of_tensors or type(said) in _VALUES for name, said in vars(value).items())
            and (base_of(value) is not None or (value.storage_offset() == 0 and _elements(value) == value.numel()))
            and not (value.is_conj() or value.is_neg())
            and not (value.requires_grad and (value.is_leaf or not torch.is_grad_enabled()))
        )

    def made(self, result: Any) -> Any:
        """What this call returns, from how it is made."""
        if isinstance(result, Container):
            items = [self.made(item) for item in result.items]
            return dict(zip(result.keys, items, strict=True)) if result.kind is dict else result.kind(items)
        if isinstance(result, Plain):
            return result.value
        if isinstance(result, Counted):
            return self.notes.again(*result)
        if isinstance(result, Given):
            return self.tensors[result.at]
        return self._marked(result) if isinstance(result, Marked) else self._new(result)

    def _marked(self, result: Marked) -> Tensor:
        given = self.tensors[result.at]
        tracked = self.tracer.tracked(given)
        assert tracked is not None
        if tracked.storage is None:
            tracked.storage = Storage(tracked.value)
        with self.tracer.pause():
            made = given.view(given.shape)
        crossed = (*tracked.crossed, *result.crossed)
        self.tracer.keep_as(made, Tracked(result.value, tracked.storage, tracked.path, tracked.version, crossed))
        return made

    def _new(self, result: Made) -> Tensor:
        with self.tracer.pause():
            if result.seen is None:
                made = torch.empty_strided(result.shape, result.stride, dtype=result.dtype, device=self.tracer.device)
            else:
                made = torch.empty(result.seen.elements, dtype=result.dtype, device=self.tracer.device)
            if result.requires_grad:
                made = made.requires_grad_().clone()
            if result.seen is not None:
                made = made.as_strided(result.shape, result.stride, result.seen.offset)
            vars(made).update(result.said)
        self.tracer.keep_as(made, result.tracked)
        return made


def _keys(value: Mapping[Any, Any]) -> list[tuple[type, Any]]:
    """The keys of a mapping, told apart as plain values are.

    Raises:
        NotAgain: if they are something else.
    """
    if not PLAIN.issuperset(map(type, value)):
        raise NotAgain
    return [(type(key), key) for key in value]


def _all_in(value: Any) -> Iterator[Any]:
    """What is in a value, and then the value; in the order of a call's leaves."""
    if type(value) in (tuple, list, dict):
        for item in value.values() if type(value) is dict else value:
            yield from _all_in(item)
    yield value


def _elements(tensor: Tensor) -> int:
    """Of all its memory."""
    return tensor.untyped_storage().nbytes() // tensor.element_size()


def _is_bare(tensor: Tensor, of_tensors: Set[str]) -> bool:
    """Whether a tensor of the trace has nothing but what every one has, and no value."""
    return isinstance(tensor, FakeTensor) and tensor.constant is None and vars(tensor).keys() <= of_tensors


def _memory_of(tracked: Tracked) -> tuple[Any, ...]:
    """What tells a static tensor's values, whichever boundaries it has crossed: its memory, and what is seen of it.

    Raises:
        NotAgain: if it shares its memory with no other: then it was made for this call.
    """
    storage = tracked.storage
    if storage is None:
        raise NotAgain
    return storage.root, storage.version, tracked.path


def is_up_to_date(tracked: Tracked) -> bool:
    """Whether a tensor object holds what was written last into its memory."""
    return tracked.storage is None or tracked.storage.version == tracked.version


def _is_its_own(tracked: Tracked, made: Collection[int]) -> bool:
    """Whether a tensor is in memory that operators have made, and that holds it."""
    storage = tracked.storage
    return (
        tracked.value.tensor in made
        and is_up_to_date(tracked)
        and (storage is None or (not storage.pending and storage.root.tensor in made))
    )


def _is_marked(given: Tensor, before: Tracked, value: Tensor, after: Tracked) -> bool:
    """Whether a tensor is a given one, but for the boundaries that it has crossed since."""
    return (
        after.storage is not None
        and after.storage is before.storage
        and after.path == before.path
        and is_up_to_date(after)
        and after.crossed[: len(before.crossed)] == before.crossed
        and type(value) is FakeTensor
        and (value.shape, value.stride(), value.storage_offset())
        == (given.shape, given.stride(), given.storage_offset())
        and (value.dtype, value.requires_grad) == (given.dtype, given.requires_grad)
    )


def _metadata(tensor: Tensor) -> tuple[Any, ...]:
    return (
        tensor.shape,
        tensor.stride(),
        tensor.storage_offset(),
        tensor.untyped_storage().nbytes(),
        tensor.dtype,
        tensor.device,
        tensor.layout,
        tensor.requires_grad,
        tensor.is_leaf,
        tensor.grad_fn is None,
        tensor.is_conj(),
        tensor.is_neg(),
        tensor.is_inference(),
        base_of(tensor) is not None,
    )
