"""Calls that go on with what an earlier one has left in an object, such as a cache of keys and values."""

from __future__ import annotations

import copy
from collections.abc import Hashable, Iterable
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from lightning_autotp.capture.capture import ExampleCall, on_meta
from lightning_autotp.capture.nested import map_leaves
from lightning_autotp.private.torch_private import WeakIdKeyDictionary


@dataclass
class Begun:
    """A call that was given an object in which nothing was computed yet.

    Attributes:
        call: the call, with a copy of the object as it was.
        kind: what the call is known by.
        given: copies of this and all other objects that it was given, by the ids of these.
        is_last: whether no other call was given the object since.
    """

    call: ExampleCall
    kind: Hashable
    given: dict[int, Any]
    is_last: bool = True

    def with_next(self, call: ExampleCall) -> list[ExampleCall]:
        """This call and one after it: a trace of both computes in the copy what the second one goes on with."""

        def one(_: str, leaf: Any) -> Any:
            return self.given.get(id(leaf), leaf)

        return [self.call, ExampleCall(*map_leaves(one, tuple(call)))]


class BegunCalls:
    """The calls with which objects began that are still there."""

    def __init__(self) -> None:
        self._begun = WeakIdKeyDictionary()

    def of(self, objects: Iterable[Any]) -> Begun | None:
        """The one with which the first of these began that is known."""
        return next((self._begun[one] for one in objects if one in self._begun), None)

    def note(self, call: ExampleCall, kind: Hashable, objects: list[Any]) -> None:
        """Note a call with objects in which nothing was computed yet."""
        memo: dict[int, Any] = {}  # an object in another one is copied once
        given = {id(one): copy.deepcopy(one, memo) for one in objects}

        def kept(_: str, leaf: Any) -> Any:
            if isinstance(leaf, Tensor):  # of integers and flags the values may be asked for
                return on_meta(leaf) if leaf.is_floating_point() else leaf.detach().clone()
            return given.get(id(leaf), leaf)

        begun = Begun(ExampleCall(*map_leaves(kept, tuple(call))), kind, given)
        for one in objects:
            self._begun[one] = begun

    def __reduce__(self) -> tuple[Any, ...]:
        """A copy of a model has seen no calls."""
        return BegunCalls, ()
