"""The dispatch mode that writes down how each tensor comes about, while parameters take no memory.

See :mod:`~lightning_autotp.building.deferred`, which switches it on.
"""

from __future__ import annotations

import bisect
import ctypes
import heapq
import sys
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

from lightning_autotp.building.recipe import Leaf, Recipe, RecipeStep, Source, View, leave_recipe
from lightning_autotp.private.torch_private import (
    TO,
    StorageWeakRef,
    TorchDispatchMode,
    base_of,
    changes,
    device_of,
    is_meta,
    schema_of,
    storage_behind,
    storage_key,
    tree_leaves,
    tree_map_only,
)
from lightning_autotp.ranks.generators import default_generator

_EMPTY = {"empty", "empty_strided", "empty_like", "new_empty", "new_empty_strided"}
_GEOMETRY_ONLY = _EMPTY | {"zeros_like", "new_zeros", "ones_like", "new_ones", "full_like", "new_full"}
_GEOMETRY_ONLY |= {"rand_like", "randn_like"}
_FILLS = {"normal_", "uniform_", "random_", "exponential_", "cauchy_", "log_normal_", "geometric_", "zero_", "fill_"}
_DATA_DEPENDENT = {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape}
_META = torch.device("meta")
_LARGE = 2**20


@dataclass
class _Storage:
    """What the recorder knows of one storage.

    Attributes:
        leaf: its contents before the first recorded write.
        writers: numbers of the steps that wrote it, ascending.
        mirror: the meta storage that stands for it once a parameter was made of it.
        real: the real storage beside the mirror.
        stale: whether the real storage lacks writes that went through the mirror.
    """

    leaf: Leaf
    writers: list[int] = field(default_factory=list)
    mirror: torch.UntypedStorage | None = None
    real: StorageWeakRef | None = None
    stale: bool = False


class Recorder(TorchDispatchMode):
    """Records, from its construction's thread. A *deferred* tensor is a meta tensor whose storage is on record."""

    def __init__(self) -> None:
        super().__init__()
        self.thread = threading.get_ident()
        self._paused = 0
        self._steps: list[RecipeStep] = []
        self._storages: list[_Storage] = []
        # A weak reference keeps its storage's address from being given to another one.
        self._numbers: dict[int, tuple[StorageWeakRef, int]] = {}
        self._parameters: list[weakref.ref[Tensor]] = []
        self._results: list[weakref.ref[Tensor]] = []
        self._scratch: torch.UntypedStorage | None = None
        self._lock = threading.Lock()

    # ---- what is on record about a tensor

    def number(self, tensor: Tensor) -> int | None:
        """The number of the tensor's storage, if it is on record."""
        known = self._numbers.get(storage_key(tensor)) if is_plain(tensor) else None
        return None if known is None else known[1]

    def is_deferred(self, tensor: Tensor) -> bool:
        """Whether the tensor is on meta and its values are on record."""
        return is_meta(tensor) and self.number(tensor) is not None

    def disguised(self, tensor: Tensor) -> bool:
        """Whether the tensor is deferred and model code is looking at it (not what this mode runs)."""
        return not self._paused and self.is_deferred(tensor)

    def ordinary_device(self, tensor: Tensor) -> torch.device:
        """The device where the tensor would be in ordinary execution."""
        number = self.number(tensor)
        return device_of(tensor) if number is None else self._storages[number].leaf.device

    def values(self, tensor: Tensor) -> Tensor:
        """The tensor itself, or the real values of a deferred one."""
        if not self.is_deferred(tensor):
            return tensor
        with self.paused():
            return self.recipe_of(tensor)()

    def _register(self, storage: torch.UntypedStorage, leaf: Leaf) -> int:
        with self._lock:
            self._storages.append(_Storage(leaf))
            self._numbers[storage_key(storage)] = (StorageWeakRef(storage), len(self._storages) - 1)
            return len(self._storages) - 1

    def _view(self, tensor: Tensor) -> View:
        """The tensor as a window; real memory that is not on record yet becomes a leaf."""
        number = self.number(tensor)
        if number is None and not is_meta(tensor):
            storage = tensor.untyped_storage()
            number = self._register(storage, Leaf(storage.nbytes(), device_of(tensor), tensor, changes(tensor)))
        size, stride, offset = tuple(tensor.shape), tensor.stride(), int(tensor.storage_offset())
        return View(number, tensor.dtype, size, stride, offset, tensor.is_conj(), tensor.is_neg())

    def recipe(self, target: View) -> Recipe:
        """The recipe of a window's present contents: the steps they depend on, found from the last one backwards."""
        if target.storage is None:
            raise ValueError("only a tensor whose storage is on record has a recipe")
        numbers = {target.storage}
        steps: set[int] = set()
        pending = self._writer_before(target.storage, len(self._steps))
        seen = set(pending)
        while pending:
            negative, number = heapq.heappop(pending)
            step = self._steps[-negative]
            steps.add(-negative)
            numbers |= step.reads | step.writes
            for other in step.reads | ({number} - step.overwrites):
                for entry in self._writer_before(other, -negative):
                    if entry not in seen:
                        seen.add(entry)
                        heapq.heappush(pending, entry)
        leaves = {number: self._storages[number].leaf for number in numbers}
        return Recipe(target, tuple(self._steps[at] for at in sorted(steps)), leaves)

    def recipe_of(self, tensor: Tensor) -> Recipe:
        """The recipe of a deferred tensor's present values."""
        return self.recipe(self._view(tensor))

    def _writer_before(self, number: int, at: int) -> list[tuple[int, int]]:
        """The last step before ``at`` that wrote the storage, as an entry of a heap that gives the latest first."""
        writers = self._storages[number].writers
        place = bisect.bisect_left(writers, at)
        return [(-writers[place - 1], number)] if place else []

    # ---- tensors that become deferred from outside

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Within it nothing is recorded or deferred."""
        self._paused += 1
        try:
            yield
        finally:
            self._paused -= 1

    def defer(self, tensor: Tensor) -> Tensor:
        """A meta tensor that stands for ``tensor``: they are one storage to the recorder."""
        if is_meta(tensor) or not is_plain(tensor):
            return tensor
        view = self._view(tensor)
        storage = tensor.untyped_storage()
        known = self._storages[self._numbers[storage_key(storage)][1]]
        with self.paused():
            if known.mirror is None:
                known.mirror = torch.empty(storage.nbytes(), dtype=torch.uint8, device=_META).untyped_storage()
                known.real = StorageWeakRef(storage)
                number = self._numbers[storage_key(storage)][1]
                self._numbers[storage_key(known.mirror)] = (StorageWeakRef(known.mirror), number)
            return view.on(known.mirror)

    def source(self, source: Source) -> Tensor:
        """A deferred tensor whose values ``source`` has. Any thread may call it."""
        tensor = torch.empty(source.shape, dtype=source.dtype, device=_META)
        storage = tensor.untyped_storage()
        self._register(storage, Leaf(storage.nbytes(), torch.device("cpu"), source))
        self._results.append(weakref.ref(tensor))
        return tensor

    def changed_by(self, func: Callable[[Tensor], Tensor], tensor: Tensor) -> None:
        """Record that a function, which is no operator, has changed a deferred tensor in place and returned it."""
        view = self._view(tensor)
        assert view.storage is not None
        storages = frozenset({view.storage})
        step = RecipeStep(func, (view,), {}, (None,), storages, storages, frozenset(), torch.get_default_dtype(), None)
        self._append(step)

    def new_parameter(self, original: Any, cls: Any, data: Tensor | None, requires_grad: bool) -> Tensor:
        """What ``nn.Parameter(data, requires_grad)`` makes while recording; ``original`` is its own ``__new__``."""
        if self._paused or threading.get_ident() != self.thread:
            return original(cls, data, requires_grad)
        data = torch.empty(0) if data is None else data
        if data.nbytes >= _LARGE and not is_meta(data):
            _trim()
        parameter = original(cls, self.defer(data), requires_grad)
        self._parameters.append(weakref.ref(parameter))
        return parameter

    # ---- recording

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        if self._paused or torch.Tag.inplace_view in func.tags or not all(is_plain(tensor) for tensor in tensors):
            return func(*args, **kwargs)
        with self.paused():
            return self._dispatch(func, args, kwargs, tensors)

    def _dispatch(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], tensors: list[Tensor]) -> Any:
        """Decide whether the operator can run for real, and run it."""
        for tensor in tensors:
            number = self.number(tensor)
            if number is not None and not is_meta(tensor):
                self._refresh(number)
        written = _written(func, args, kwargs)
        deferred = any(self.is_deferred(tensor) for tensor in tensors)
        device = kwargs.get("device")
        if func.overloadpacket.__name__ in _GEOMETRY_ONLY:
            lazy = deferred and device is None
            if device is None and is_meta(tensors[0]) and not deferred:
                return func(*args, **kwargs)
        elif any(is_meta(tensor) and not self.is_deferred(tensor) for tensor in tensors):
            if deferred and written:
                raise RuntimeError(
                    f"{func} would fill a parameter from a meta tensor that has no values; do not build parts of a "
                    "model in torch.device('meta') yourself: inside this context nothing takes memory anyway"
                )
            return func(*args, **kwargs)
        else:
            lazy = deferred
        if device == _META:
            if func.overloadpacket.__name__ not in (TO, "scalar_tensor"):
                return func(*args, **kwargs)
            # Assigning to items of a deferred tensor brings indices and values to its device; they must not be lost.
            lazy = True
        if _DATA_DEPENDENT & set(func.tags) or any(not is_meta(tensor) for tensor in written):
            lazy = False
        return self._execute(func, args, kwargs, tensors, written, lazy)

    def _execute(
        self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], tensors: list[Tensor], written: list[Tensor],
        lazy: bool,
    ) -> Any:  # fmt: skip
        """Run the operator, for shapes only if ``lazy``, and record it if it makes or changes memory."""
        for tensor in written:
            self._keep_contents(tensor)
        name = func.overloadpacket.__name__
        before = tree_map_only(Tensor, self._view, (args, kwargs)) if written else None
        device = self._device(kwargs, tensors)
        generator = kwargs.get("generator")
        random = None
        if torch.Tag.nondeterministic_seeded in func.tags:
            drawn_with = default_generator(device) if generator is None else generator
            random = (drawn_with.device, drawn_with.get_state())
        out: Any = None
        if lazy:
            try:
                out = args[0] if name in _FILLS else _on_meta(func, args, kwargs)
            except NotImplementedError:  # the operator has no shape function
                lazy = False
        if not lazy or random is not None:
            blank = lazy and name in _FILLS and len(tensors) == 1
            stand_in = self._blank if blank else self.values
            if name in _GEOMETRY_ONLY:
                on_device = {**kwargs, "device": device} if lazy else kwargs
                result = func(*args, **on_device)
            else:
                result = func(*tree_map_only(Tensor, stand_in, args), **tree_map_only(Tensor, stand_in, kwargs))
            if not lazy:
                out = result if not (written and is_meta(written[0])) else written[0]
            del result
        self._note(func, args, kwargs, out, tensors, written, before, device, random)
        return out

    def _note(
        self, func: Any, args: Any, kwargs: Any, out: Any, tensors: list[Tensor], written: list[Tensor], before: Any,
        device: torch.device, random: tuple[torch.device, Tensor] | None,
    ) -> None:  # fmt: skip
        """Record an operator that was run."""
        outputs: list[View | None] = []
        known = {storage_key(tensor) for tensor in tensors}
        for result in tree_leaves(out):
            is_tensor = isinstance(result, Tensor) and is_plain(result)
            if is_tensor and is_meta(result) and not any(result is tensor for tensor in tensors):
                self._results.append(weakref.ref(result))
            if not is_tensor or storage_key(result) in known:
                outputs.append(None)
                continue
            storage = result.untyped_storage()
            self._register(storage, Leaf(storage.nbytes(), device if is_meta(result) else device_of(result)))
            outputs.append(self._view(result))
        made = [view for view in outputs if view is not None]
        name = func.overloadpacket.__name__
        if name in _EMPTY or not (made or written):
            return
        args, kwargs = before or tree_map_only(Tensor, self._view, (args, kwargs))
        if name in _GEOMETRY_ONLY:
            args = tree_map_only(View, lambda view: replace(view, storage=None), args)
        if name in _GEOMETRY_ONLY or kwargs.get("device") == _META:
            kwargs = {**kwargs, "device": device}
        if kwargs.get("generator") is not None:
            kwargs = {**kwargs, "generator": True}
        changed = {number for tensor in written if (number := self.number(tensor)) is not None}
        reads = [view.storage for view in tree_leaves((args, kwargs)) if isinstance(view, View)]
        overwrites = {view.storage for view in made if view.storage is not None}
        if (
            name in _FILLS | {"copy_"}
            and args[0].covers(self._storages[args[0].storage].leaf.nbytes)
            and args[0].storage not in reads[1:]
        ):
            overwrites.add(args[0].storage)
            reads = reads[1:]
        step = RecipeStep(
            func, args, kwargs, tuple(outputs), frozenset(number for number in reads if number is not None),
            frozenset(overwrites | changed), frozenset(overwrites), torch.get_default_dtype(), random,
        )  # fmt: skip
        self._append(step)
        for tensor in written:
            here = self._storages[self._numbers[storage_key(tensor)][1]]
            here.stale = is_meta(tensor) and here.real is not None and not here.real.expired()

    def _append(self, step: RecipeStep) -> None:
        for number in step.writes:
            self._storages[number].writers.append(len(self._steps))
        self._steps.append(step)

    def _device(self, kwargs: dict[str, Any], tensors: list[Tensor]) -> torch.device:
        """Where the operator would run in ordinary execution."""
        device: torch.device | None = kwargs.get("device")
        if device is not None and device != _META:
            return device
        devices = [self.ordinary_device(tensor) for tensor in tensors]
        return next((device for device in devices if device != _META), torch.device("cpu"))

    # ---- values

    def _blank(self, tensor: Tensor) -> Tensor:
        """Memory of a deferred tensor's geometry: one piece for all, since freed ones would leave the heap in holes."""
        view, device = self._view(tensor), self.ordinary_device(tensor)
        if self._scratch is None or self._scratch.device != device or self._scratch.nbytes() < view.nbytes:
            self._scratch = None
            self._scratch = torch.UntypedStorage(view.nbytes, device=device)
        return view.on(self._scratch)

    def _keep_contents(self, tensor: Tensor) -> None:
        """Before memory from outside the recording is written for the first time, copy it."""
        if is_meta(tensor):
            return
        known = self._storages[self._view(tensor).storage]  # type: ignore[index]
        if isinstance(known.leaf.value, Tensor) and not known.writers:
            storage = tensor.untyped_storage().clone()
            copy = torch.empty(0, dtype=torch.uint8, device=storage.device)
            copy.set_(storage)
            known.leaf = Leaf(storage.nbytes(), storage.device, copy)

    def _refresh(self, number: int) -> None:
        """Bring a real storage that lives on beside its mirror up to date."""
        known = self._storages[number]
        if not known.stale or known.real is None or known.real.expired():
            return
        storage = storage_behind(known.real)
        everything = View(number, torch.uint8, (storage.nbytes(),), (1,), 0)
        everything.on(storage).copy_(self.recipe(everything)())
        known.stale = False

    def finish(self) -> None:
        """Give every parameter its recipe, and make what else is still deferred real."""
        parameters = [parameter for reference in self._parameters if (parameter := reference()) is not None]
        results = {id(t): t for reference in self._results if (t := reference()) is not None}
        self._scratch = None
        self._parameters.clear()
        self._results.clear()  # swapping refuses a tensor with weak references
        for parameter in parameters:
            if self.is_deferred(parameter):
                leave_recipe(parameter, self.recipe_of(parameter))
        for result in results.values():
            if result.grad_fn is not None and base_of(result) is None:
                result.detach_()  # its graph holds others; a module makes such a tensor anew in each call
        # Views first: while there are any, others hold what they are views of.
        for result in sorted(results.values(), key=lambda result: base_of(result) is None):
            if not isinstance(result, nn.Parameter) and self.is_deferred(result):
                torch.utils.swap_tensors(result, self.recipe_of(result)())
        for number in range(len(self._storages)):
            self._refresh(number)


def _trim() -> None:
    """Give freed memory back to the system, where the C library can.

    Recording leaves small things on the heap where large temporaries were freed; the next temporary no longer fits
    there and takes new memory, until the holes add up to the whole model.
    """
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None) if sys.platform.startswith("linux") else None
    if trim is not None:
        trim(0)


def is_plain(tensor: Tensor) -> bool:
    """Whether the tensor is strided memory and no subclass with its own ways."""
    return tensor.layout is torch.strided and type(tensor) in (Tensor, nn.Parameter)


def _written(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Tensor]:
    """The tensors among the arguments that the operator's schema says it changes."""
    values = [
        args[at] if at < len(args) else kwargs.get(argument.name)
        for at, argument in enumerate(schema_of(func).arguments)
        if argument.alias_info is not None and argument.alias_info.is_write
    ]
    return [leaf for leaf in tree_leaves(values) if isinstance(leaf, Tensor)]


def _on_meta(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run the operator for its shapes."""

    def shape_of(tensor: Tensor) -> Tensor:
        if is_meta(tensor):
            return tensor
        return torch.empty_strided(tensor.size(), tensor.stride(), dtype=tensor.dtype, device=_META)

    args, kwargs = tree_map_only(Tensor, shape_of, (args, kwargs))
    if kwargs.get("device") is not None:
        kwargs = {**kwargs, "device": _META}
    return func(*args, **{name: value for name, value in kwargs.items() if name not in ("generator", "pin_memory")})
