"""Calls that go on with what an earlier one has left in an object, such as a cache of keys and values."""

from __future__ import annotations

import copy
from collections.abc import Hashable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from lightning_autotp.capture.capture import ExampleCall, on_meta
from lightning_autotp.capture.nested import map_leaves, map_tensors
from lightning_autotp.private.torch_private import WeakIdKeyDictionary


@dataclass
class Begun:
    """A call that was given an object in which nothing was computed yet.

    Attributes:
        call: the call, with a copy of the object as it was.
        kind: what the call is known by.
        sizes: those of its tensors.
        given: copies of this and all other objects that it was given, by the ids of these.
        tokens: how many there were in this call.
        all_tokens: how many there were in it and in all calls that went on with it.
        way: the way that the last of those went; ``None`` while there was none.
    """

    call: ExampleCall
    kind: Hashable
    sizes: tuple[int, ...] | None
    given: dict[int, Any]
    tokens: int
    all_tokens: int
    way: Any = None

    def with_next(self, call: ExampleCall) -> list[ExampleCall]:
        """This call and one after it: a trace of both computes in the copy what the second one goes on with.

        Where others came in between, this one has their tokens, too: it leaves as much in the objects as all of them.
        """

        def one(_: str, leaf: Any) -> Any:
            return self.given.get(id(leaf), leaf)

        def longer(tensor: Tensor) -> Tensor:
            for dim, size in enumerate(tensor.shape):
                if size == self.tokens and (dim if size > 1 else dim == 1 == tensor.ndim - 1):
                    tensor = tensor.index_select(dim, torch.arange(self.all_tokens, device=tensor.device) % size)
            return tensor

        return [ExampleCall(*map_tensors(longer, tuple(self.call))), ExampleCall(*map_leaves(one, tuple(call)))]


class BegunCalls:
    """The calls with which objects began that are still there."""

    def __init__(self) -> None:
        self._begun = WeakIdKeyDictionary()

    def of(self, objects: Iterable[Any]) -> Begun | None:
        """The one with which the first of these began that is known."""
        return next((self._begun[one] for one in objects if one in self._begun), None)

    def note(
        self, call: ExampleCall, kind: Hashable, sizes: tuple[int, ...] | None, objects: list[Any], tokens: int
    ) -> None:
        """Note a call with objects in which nothing was computed yet; once, if they stay empty and it comes again."""
        known = self.of(objects)
        if known is not None and sizes is not None and (known.kind, known.sizes) == (kind, sizes):
            return
        memo: dict[int, Any] = {}  # an object in another one is copied once
        given = {id(one): copy.deepcopy(one, memo) for one in objects}

        def kept(_: str, leaf: Any) -> Any:
            if isinstance(leaf, Tensor):  # of integers and flags the values may be asked for
                return on_meta(leaf) if leaf.is_floating_point() else leaf.detach().clone()
            return given.get(id(leaf), leaf)

        begun = Begun(ExampleCall(*map_leaves(kept, tuple(call))), kind, sizes, given, tokens, tokens)
        for one in objects:
            self._begun[one] = begun

    def __reduce__(self) -> tuple[Any, ...]:
        """A copy of a model has seen no calls."""
        return BegunCalls, ()
