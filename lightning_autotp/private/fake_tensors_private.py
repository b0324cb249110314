"""Fake tensors whose mode remembers what operators give: what is used of torch's for that.

A trace runs thousands of operators, of which few are different. ``FakeTensorMode`` has a cache of what each gives by
its operands' metadata, but asking it, and making a tensor of what it has, is half the time of a trace. So this mode has
its own in place of that one, of which it uses the rules that say what may be kept.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode, _BypassDispatchCache, extract_tensor_metadata

_DEVICE = torch.ops.prim.device.default
_SHARING = torch.ops.aten._unsafe_view.default
"""Gives its operand's memory, of which its schema says nothing: torch's rules leave it out for that."""
_CONSTANTS = frozenset(
    [int, float, bool, str, type(None), torch.dtype, torch.device, torch.layout, torch.memory_format]
)  # fmt: skip


class _NotTold(Exception):
    """An operand is more than its metadata, or of an unknown kind."""


class _Made(NamedTuple):
    """A tensor that an operator makes.

    Attributes:
        shape: its shape.
        stride: its strides.
        offset: where in its storage it begins.
        dtype: its dtype.
        device: where it seems to be.
        shared: which argument's storage it looks at; ``None`` if it has its own.
        attributes: those of the object, but for its mode.
    """

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    dtype: torch.dtype
    device: torch.device
    shared: int | None
    attributes: dict[str, Any]


class _Given(NamedTuple):
    """An argument that an operator gives back."""

    place: int


class _Results(NamedTuple):
    """What an operator gives: one tensor, or a tuple of several."""

    is_tuple: bool
    results: list[_Made | _Given]


class RememberingFakeTensorMode(FakeTensorMode):
    """A mode that lets an operator run once for all operands with the same metadata.

    It remembers what torch's own cache would, and what the ``functional`` operators give; anything else runs each time.
    As that cache, it remembers for the whole process: a model is traced several times, and many at the same sizes.

    Args:
        functional: names of operators of other libraries that make one new tensor, which follows from their operands'
            metadata.

    Attributes:
        asked: if it is a list, operators and their operands' metadata are put into it.
    """

    remembered: ClassVar[dict[Any, _Results]] = {}

    def __init__(self, functional: Collection[str] = ()) -> None:
        super().__init__(allow_non_fake_inputs=True)
        self.cache_enabled = False  # torch's
        self.functional = frozenset(functional)
        self.asked: list[Any] | None = None

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """As of a ``PreDispatchMode``."""
        return False

    def __torch_dispatch__(self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None) -> Any:
        """What the operator gives."""
        if func is _DEVICE:
            return args[0].device
        kwargs = kwargs or {}
        try:
            operands = self.told(args), tuple((name, self.told(value)) for name, value in kwargs.items())
        except _NotTold:
            if self.asked is not None:
                self.asked.append(func)
            return super().__torch_dispatch__(func, types, args, kwargs)
        surroundings = torch.get_default_dtype(), torch._C._get_default_device(), torch.is_inference_mode_enabled()
        key = func, operands, surroundings
        if self.asked is not None:
            self.asked.append(key)
        if (known := self.remembered.get(key)) is not None:
            again = [self.again(result, args) for result in known.results]
            return tuple(again) if known.is_tuple else again[0]
        given: Any = super().__torch_dispatch__(func, types, args, kwargs)
        is_tuple = isinstance(given, tuple)
        values = given if is_tuple else (given,)
        made = [_made(*pair) for pair in zip(values, self.sources(func, args, kwargs, values), strict=False)]
        results = [result for result in made if result is not None]
        if len(results) == len(values) and all(
            _alike(self.again(result, args), value) for result, value in zip(results, values, strict=True)
        ):
            self.remembered[key] = _Results(is_tuple, results)
        return given

    def told(self, operand: Any) -> Any:
        """What results may depend on of an operand.

        Raises:
            _NotTold: if that is not known.
        """
        kind = type(operand)
        if kind in _CONSTANTS:
            return kind, operand
        if kind is tuple or kind is list:
            return kind, tuple(map(self.told, operand))
        if (
            kind is not FakeTensor
            or operand.fake_mode is not self
            or operand.constant is not None
            or operand.layout is not torch.strided
            or operand.is_quantized
        ):
            raise _NotTold
        return (
            operand.shape,
            operand.stride(),
            operand.storage_offset(),
            operand.untyped_storage().nbytes(),
            operand.dtype,
            operand.device,
            operand.requires_grad,
            operand.is_conj(),
            operand.is_neg(),
            operand.is_inference(),
        )

    def sources(
        self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], values: Sequence[Any]
    ) -> list[_Given | int | None]:
        """Where the memory of each result is from, of an operator that ran; empty where nothing may be remembered.

        That is the argument that it is, the number of the one that it looks at, or ``None`` if it is new.
        """
        if func is _SHARING:
            return [0]
        if str(func) in self.functional:
            return [None]
        try:
            self._validate_cache_key(func, args, kwargs)
        except _BypassDispatchCache:
            return []
        tensors = [place for place, value in enumerate(args) if isinstance(value, Tensor)]
        named = [value for value in kwargs.values() if isinstance(value, Tensor)]
        if (func.is_view and len(tensors) != 1) or any(value is one for value in values for one in named):
            return []
        shared = tensors[0] if func.is_view else None
        return [next((_Given(place) for place in tensors if args[place] is value), shared) for value in values]

    def again(self, result: _Made | _Given, args: Sequence[Any]) -> Tensor:
        """A result of an operator with these arguments."""
        if isinstance(result, _Given):
            given: Tensor = args[result.place]
            return given
        with torch._C._DisableTorchDispatch():
            if result.shared is None:
                memory = torch.empty_strided(result.shape, result.stride, dtype=result.dtype, device="meta")
            else:
                memory = torch.empty(0, dtype=result.dtype, device="meta")
                memory.set_(args[result.shared].untyped_storage(), result.offset, result.shape, result.stride)
        # As FakeTensor.__new__ does it.
        made: Tensor = Tensor._make_subclass(
            FakeTensor, memory, False, dispatch_device=True, device_for_backend_keys=result.device
        )
        torch._C._set_throw_on_mutable_data_ptr(made)
        vars(made).update(result.attributes, fake_mode=self)
        return made


def _made(value: Any, source: _Given | int | None) -> _Made | _Given | None:
    """How to make a result again; ``None`` where that is not known."""
    if isinstance(source, _Given):
        return source
    if type(value) is not FakeTensor or value.layout is not torch.strided or value.constant is not None:
        return None
    return _Made(
        tuple(value.shape),
        value.stride(),
        int(value.storage_offset()),
        value.dtype,
        value.device,
        source,
        {name: kept for name, kept in vars(value).items() if name != "fake_mode"},
    )


def _alike(one: Tensor, other: Tensor) -> bool:
    """Whether there is no difference between two fake tensors but which memory is theirs."""
    return one is other or (
        extract_tensor_metadata(one) == extract_tensor_metadata(other)
        and torch._C._dispatch_key_set(one) == torch._C._dispatch_key_set(other)
        and vars(one) == vars(other)
    )
