"""The types of tensors in code that no trace shows: what it makes of them follows from the function that it calls.

Such code is a line of a module that the trace did not run, and whatever stands around a model: a penalty in the
training step, a callback, a loop. It may do what it likes with tensors of which every rank has all. Of a part it may
take single elements, each with the same of others: not with its position, or with a random number, which the whole
would have another one of there. Whatever else it does, operators' records say whether it makes a part again (norms of
rows, of a part that is cut by rows) or takes the part for the whole (its norm, its first rows).
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from lightning_autotp.applying.read_by_records import cut_dim
from lightning_autotp.capture.call_sites import call_leaves
from lightning_autotp.private.torch_private import LIST_UPDATES, storage_key, without_functions
from lightning_autotp.solving.paths import ANY, STATIC, ZEROS, ShardType, Type, is_part
from lightning_autotp.torch_functions import BY_PLACE, ELEMENTWISE, LISTED, UNIFORM, functions, setters, writes

OWN, UNIFORM_TYPE = "own", "uniform"
"""Types of tensors that such code makes of numbers alone: any, and such of which all elements are equal.

Anywhere else they are static.
"""
MADE = frozenset((STATIC, OWN, UNIFORM_TYPE))
NEUTRAL = (STATIC, ZEROS, OWN, UNIFORM_TYPE)
_AS_ANOTHER = Tensor.to, Tensor.type_as, Tensor.__deepcopy__
"""Functions that take no elements of their second argument."""
_VIEWING = (Tensor.__getitem__, Tensor.expand, Tensor.reshape, Tensor.unsqueeze, Tensor.view, torch.reshape)
_INDEXING = (Tensor.__getitem__, Tensor.__setitem__)
_PLACES = (Tensor.where, torch.where)
"""Functions that give, of a condition alone, the places where it holds."""
_ROOM = 1_000
"""Tensors of which types are noted before those that are gone are looked for."""
_ELEMENTWISE = ELEMENTWISE.union(LIST_UPDATES, setters("data grad"), functions("__deepcopy__ alias pin_memory type"))


@dataclass(slots=True, eq=False)
class Call:
    """One call of a torch function.

    Attributes:
        func: the function.
        name: its name.
        args: its arguments.
        kwargs: those by name.
        groups: the leaves of each of them.
    """

    func: Any
    name: str
    args: Sequence[Any]
    kwargs: Mapping[str, Any]
    groups: list[list[Any]]

    @classmethod
    def of(cls, func: Any, name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Call:
        """One with these arguments."""
        return cls(func, name, args, kwargs, [call_leaves(value) for value in (*args, *kwargs.values())])

    @property
    def leaves(self) -> list[Any]:
        """The leaves of its arguments."""
        return [leaf for group in self.groups for leaf in group]

    @property
    def tensors(self) -> list[Tensor]:
        """The tensors among its arguments."""
        return [leaf for leaf in self.leaves if isinstance(leaf, Tensor)]

    @property
    def written(self) -> Tensor | None:
        """The tensor that it writes in place, if it does."""
        leaves = self.leaves
        return leaves[0] if writes(self.name) and leaves and isinstance(leaves[0], Tensor) else None

    @property
    def is_writing(self) -> bool:
        """Whether it writes a tensor that it is given."""
        return self.written is not None or "out" in self.kwargs

    @property
    def is_elementwise(self) -> bool:
        """Whether its result at an index depends on its arguments there."""
        if self.func is Tensor.__setitem__:
            return not self.is_indexed
        return self.func in _ELEMENTWISE and not (self.func in _PLACES and len(self.groups) == 1)

    @property
    def is_indexed(self) -> bool:
        """Whether it takes some elements only: its index is more than whole dims and new ones."""
        return self.func in _INDEXING and not all(leaf is None or leaf is Ellipsis for leaf in self.groups[1])

    def of_each(self) -> list[Call]:
        """Of a function of lists of tensors, the calls for their elements."""
        count = len(self.groups[0])
        each = [group if len(group) == count else count * [group] for group in self.groups]
        return [Call.of(self.func, self.name, given, {}) for given in zip(*each, strict=True)]

    def of_elements(self) -> Call:
        """The same, without arguments of which it takes no elements."""
        return Call.of(self.func, self.name, self.args[:1], {}) if self.func in _AS_ANOTHER else self


class TensorTypes:
    """The types of the tensors that running code has.

    Args:
        unknown: the type of a tensor that nothing was noted of.
        beside: types that a tensor beside a part may have.
        of_nothing: the type of what a function makes of no tensor.
    """

    def __init__(
        self,
        unknown: Callable[[Tensor], Type],
        beside: Collection[Type] = (ZEROS,),
        of_nothing: Type = OWN,
    ) -> None:
        self._unknown, self._beside, self._of_nothing = unknown, frozenset(beside), of_nothing
        self._noted: dict[int, tuple[weakref.ref[Tensor], Type]] = {}
        self._room = _ROOM

    def of(self, tensor: Tensor) -> Type:
        """A tensor's type."""
        found = self._noted.get(id(tensor))
        return found[1] if found is not None and found[0]() is tensor else self._unknown(tensor)

    def put(self, tensor: Tensor, kind: Type) -> None:
        """Note a tensor's type."""
        if len(self._noted) > self._room:  # what is gone is forgotten here: a weak reference that does so is a cycle
            self._noted = {number: found for number, found in self._noted.items() if found[0]() is not None}
            self._room = 2 * len(self._noted) + _ROOM
        self._noted[id(tensor)] = weakref.ref(tensor), kind

    def write(self, tensor: Tensor, kind: Type) -> None:
        """Note that a tensor was written in place, and what it is now: all that share its memory, too."""
        known = [(one, found) for reference, found in list(self._noted.values()) if (one := reference()) is not None]
        of_others = [
            one for one, found in known if found in (NEUTRAL if kind not in NEUTRAL else (ZEROS, UNIFORM_TYPE))
        ]
        if of_others:
            with without_functions():
                memory = storage_key(tensor)
                sharing = [one for one in of_others if storage_key(one) == memory]
            for one in sharing:
                self.put(one, OWN if kind in NEUTRAL else kind)
        self.put(tensor, kind)

    def made_by(self, call: Call) -> Type | None:
        """What a call makes that no trace shows; ``None`` if it may matter that none does."""
        call = call.of_elements()
        kinds = frozenset(map(self.of, call.tensors))
        parts = frozenset(filter(is_part, kinds))
        if not parts:
            return self._of_wholes(call, kinds)
        if not all(isinstance(part, ShardType) for part in parts):
            return None
        is_known = call.is_elementwise and kinds <= parts | self._beside | MADE
        if is_known and not self.is_by_place(call, STATIC, OWN):
            aligned = self._aligned(call)
            return aligned.pop() if len(aligned) == 1 else None
        return self._by_records(call)

    def _aligned(self, call: Call) -> set[ShardType]:
        """The types of the parts among a call's tensors, where these are broadcast to each other."""
        with without_functions():
            longest = max(tensor.dim() for tensor in call.tensors)
            found = [(self.of(tensor), longest - tensor.dim()) for tensor in call.tensors]
        return {kind.behind(more) for kind, more in found if isinstance(kind, ShardType)}

    def _by_records(self, call: Call) -> ShardType | None:
        """The type of what a call makes of parts where operators' records tell it.

        A tensor beside a part must have no gradient, or one that is summed over the ranks: with a part, each rank
        computes its share of it.
        """
        types = {id(tensor): (tensor, self.of(tensor)) for tensor in call.tensors}
        cut = {one: kind for one, (_, kind) in types.items() if isinstance(kind, ShardType)}
        beside = [(tensor, kind) for tensor, kind in types.values() if id(tensor) not in cut]
        part = next(iter(cut.values()))
        how = part.dims[0][1:]
        is_one_way = all(len(kind.dims) == 1 and kind.dims[0][1:] == how for kind in cut.values())
        if call.is_writing or not is_one_way or not self._may_stand_beside(beside):
            return None
        free = {id(tensor) for tensor, kind in beside if kind in self._beside or kind in (ZEROS, UNIFORM_TYPE)}
        dim = cut_dim(call.func, call.args, call.kwargs, {one: kind.dims[0][0] for one, kind in cut.items()}, free)
        return None if dim is None else replace(part, dims=((dim, *how),))

    def _may_stand_beside(self, tensors: Sequence[tuple[Tensor, Type]]) -> bool:
        has_gradient = torch.is_grad_enabled()
        return all(
            kind == "R" or (kind != ANY and not (has_gradient and tensor.requires_grad)) for tensor, kind in tensors
        )

    def is_by_place(self, call: Call, *kinds: Type, parts: Iterable[tuple[Tensor, ShardType]] = ()) -> bool:
        """Whether an elementwise call takes, beside a part, a tensor of these types that is as long where that is cut.

        A single one counts where it was made of numbers alone, as that many by a rank that has one.

        Args:
            call: the call.
            kinds: the types.
            parts: among its tensors, parts that have no such type.
        """
        if not call.is_elementwise:
            return False
        types = [(tensor, self.of(tensor)) for tensor in call.tensors]
        others = [(tensor, kind) for tensor, kind in types if kind in kinds]
        if not others:
            return False
        cut = [
            (tensor, dim) for tensor, kind in (*types, *parts) if isinstance(kind, ShardType) for dim, *_ in kind.dims
        ]
        with without_functions():
            return any(
                _is_as_long(other, part, dim) and (kind == OWN or part.shape[dim] > 1)
                for part, dim in cut
                for other, kind in others
            )

    def _of_wholes(self, call: Call, kinds: frozenset[Type]) -> Type:
        """What a call makes of tensors of which every rank has all."""
        if call.func in BY_PLACE and not (call.func in LISTED and kinds) and kinds <= MADE | self._beside:
            return OWN
        if (known := next((kind for kind in (ANY, "R", "I") if kind in kinds), None)) is not None:
            return known
        is_alike = bool(kinds) and kinds <= {ZEROS, UNIFORM_TYPE} and (call.is_elementwise or call.func in _VIEWING)
        if call.func in UNIFORM or is_alike:
            return UNIFORM_TYPE
        if not kinds:
            return self._of_nothing
        is_placed = call.written is not None and not call.is_elementwise
        return OWN if is_placed or OWN in kinds else STATIC


def _is_as_long(tensor: Tensor, part: Tensor, dim: int) -> bool:
    """Whether a tensor has an element for each of a part along its cut dim, where both are broadcast."""
    at = dim - part.dim()
    return (
        -tensor.dim() <= at < 0
        and tensor.shape[at] == part.shape[dim]
        and not (tensor.layout == torch.strided and tensor.stride(at) == 0)  # the same one, repeated
    )
