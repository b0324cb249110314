"""How to make one tensor later: the recorded operations its value depends on, as plain immutable data.

A recipe is written by :mod:`~lightning_autotp.building.deferred` (or is just a tensor that is already there, or one in
a file) and used by :mod:`~lightning_autotp.loading.parameters`. Tensors are identified by their storage: an operation
is kept with the geometry of its arguments within their storages, so views and in-place operations need nothing of their
own.

Until there is a parallel model to hold it, a parameter's recipe is an attribute of the parameter (``autotp_recipe``).
Nothing else stays with a parameter then: the user's code ties it, moves it between modules and these between models,
and a table on the side would need weak references, with which torch refuses to swap tensors. Where the object is not
kept, as in a deep copy, the recipe is lost, and loading says so.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from lightning_autotp.private.torch_private import changes, neg_view, tree_leaves, tree_map_only
from lightning_autotp.ranks.generators import default_generator


class Source(Protocol):
    """A tensor that lies somewhere else, for instance in a file."""

    @property
    def shape(self) -> tuple[int, ...]:
        """Its shape."""
        ...

    @property
    def dtype(self) -> torch.dtype:
        """The dtype it is read in."""
        ...

    def read(self, box: Sequence[tuple[int, int]] | None = None) -> Tensor:
        """The tensor, or the half-open range per dim that ``box`` gives: contiguous, on the CPU, the caller's own."""
        ...


@dataclass(frozen=True)
class View:
    """A tensor as a window into a storage; ``storage`` is its number in the recording, ``None`` for no contents."""

    storage: int | None
    dtype: torch.dtype
    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    conj: bool = False
    neg: bool = False

    @property
    def nbytes(self) -> int:
        """Bytes a storage needs to hold the window."""
        if 0 in self.size:
            return 0
        last = self.offset + sum((size - 1) * stride for size, stride in zip(self.size, self.stride, strict=True))
        return (last + 1) * self.dtype.itemsize

    def on(self, storage: torch.UntypedStorage) -> Tensor:
        """The window into a given storage."""
        tensor = torch.empty(0, dtype=self.dtype, device=storage.device)
        tensor.set_(storage, self.offset, self.size, self.stride)
        tensor = tensor.conj() if self.conj else tensor
        return neg_view(tensor) if self.neg else tensor

    def covers(self, nbytes: int) -> bool:
        """Whether the window is all of a storage of ``nbytes`` bytes, each element once."""
        expected = 1
        for stride, size in sorted(pair for pair in zip(self.stride, self.size, strict=True) if pair[1] != 1):
            if stride != expected:
                return False
            expected *= size
        return self.offset == 0 and expected * self.dtype.itemsize >= nbytes


@dataclass(frozen=True)
class RecipeStep:
    """One recorded operation; the tensors in ``args`` and ``kwargs`` are :class:`View` objects.

    Attributes:
        func: the ATen operator, or a function that changes its only argument in place.
        args: its arguments.
        kwargs: its keyword arguments.
        outputs: for each result, its window if the operator made its storage, else ``None``.
        reads: storages whose contents matter.
        writes: storages it changes or makes.
        overwrites: those of ``writes`` whose earlier contents no longer matter afterwards.
        default_dtype: torch's default dtype at the time.
        random: the generator's device and its state just before, for an operator that draws random numbers.
    """

    func: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    outputs: tuple[View | None, ...]
    reads: frozenset[int]
    writes: frozenset[int]
    overwrites: frozenset[int]
    default_dtype: torch.dtype
    random: tuple[torch.device, Tensor] | None

    @property
    def name(self) -> str:
        """The operator's name without its overload."""
        return str(getattr(self.func, "overloadpacket", self.func).__name__)

    def run(self, tensor: Callable[[View], Tensor]) -> list[Any]:
        """Run on real tensors, in the surroundings it was recorded in; global state is put back."""
        args, kwargs = tree_map_only(View, tensor, (self.args, self.kwargs))
        default_dtype = torch.get_default_dtype()
        generator: torch.Generator | None = None
        try:
            torch.set_default_dtype(self.default_dtype)
            if self.random is not None:
                device, state = self.random
                if kwargs.get("generator") is not None:
                    generator = kwargs["generator"] = torch.Generator(device)
                else:
                    generator = default_generator(device)
                restore = generator.get_state()
                generator.set_state(state)
            return tree_leaves(self.func(*args, **kwargs))
        finally:
            torch.set_default_dtype(default_dtype)
            if generator is not None:
                generator.set_state(restore)


@dataclass(frozen=True)
class Leaf:
    """What a storage holds before the first step writes it: a tensor's memory, a :class:`Source`, or anything.

    Attributes:
        nbytes: its size.
        device: where it is.
        value: the tensor or source, ``None`` for uninitialized memory.
        version: the tensor's version when it was noted, -1 where it cannot change.
    """

    nbytes: int
    device: torch.device
    value: Tensor | Source | None = None
    version: int = -1

    def storage(self) -> torch.UntypedStorage:
        """Its memory.

        Raises:
            RuntimeError: if the tensor was changed since.
        """
        if self.value is None:
            return torch.UntypedStorage(self.nbytes, device=self.device)
        if not isinstance(self.value, Tensor):
            return self.value.read().untyped_storage()
        if self.version >= 0 and changes(self.value) != self.version:
            raise RuntimeError(
                f"a tensor of shape {tuple(self.value.shape)} that a parameter is to be initialized from was changed "
                "in place after the model was built; change it before the model is built, or give the model a copy"
            )
        return self.value.untyped_storage()


@dataclass(frozen=True)
class Recipe:
    """How to make one tensor. Calling it gives the whole tensor, bit for bit what ordinary execution gives.

    Immutable: deep copies share it. The result may be the memory of a tensor that others hold: copy before changing it.

    Attributes:
        target: the tensor.
        steps: the operations its value depends on, in their order.
        leaves: every storage that occurs, before the first step.
    """

    target: View
    steps: tuple[RecipeStep, ...]
    leaves: dict[int, Leaf]

    @classmethod
    def given(cls, tensor: Tensor) -> Recipe:
        """The recipe of a tensor that is already there (shared, not copied)."""
        storage = tensor.untyped_storage()
        view = View(0, tensor.dtype, tuple(tensor.shape), tensor.stride(), int(tensor.storage_offset()))
        return cls(view, (), {0: Leaf(storage.nbytes(), tensor.device, tensor.detach())})

    def __deepcopy__(self, memo: dict[int, Any]) -> Recipe:
        return self

    def __call__(self) -> Tensor:
        """Make the tensor. Torch's generators are left as they are."""
        last = {number: at for at, step in enumerate(self.steps) for number in step.reads | step.writes}
        changed = {number for step in self.steps for number in step.writes}
        storages: dict[int, torch.UntypedStorage] = {}

        def tensor(view: View) -> Tensor:
            if view.storage is None:
                return view.on(torch.UntypedStorage(view.nbytes))
            if view.storage not in storages:
                leaf = self.leaves[view.storage]
                shared = isinstance(leaf.value, Tensor) and view.storage in changed
                storages[view.storage] = leaf.storage().clone() if shared else leaf.storage()
            return view.on(storages[view.storage])

        with torch.no_grad():
            for at, step in enumerate(self.steps):
                for view, result in zip(step.outputs, step.run(tensor), strict=True):
                    if view is not None and view.storage is not None:
                        storages[view.storage] = _as_recorded(view, result)
                for number in step.reads | step.writes:
                    if last[number] == at and number != self.target.storage:
                        storages.pop(number, None)
            return tensor(self.target)


def leave_recipe(parameter: Tensor, recipe: Recipe) -> None:
    """Leave a parameter's recipe on it, for :func:`take_recipe`."""
    vars(parameter).update(autotp_recipe=recipe, autotp_changes=changes(parameter))


def take_recipe(parameter: nn.Parameter) -> Recipe | None:
    """The recipe that was left on a parameter, which no longer has it then; ``None`` if there is none.

    Raises:
        RuntimeError: if the parameter was written since: nothing of that is in the recipe.
    """
    recipe: Recipe | None = vars(parameter).pop("autotp_recipe", None)
    if recipe is not None and vars(parameter).pop("autotp_changes") != changes(parameter):
        raise RuntimeError(
            f"a parameter of shape {tuple(parameter.shape)} was written (initialized again, perhaps) after its model"
            " was built without memory, and that would be lost: do it where the model is built, in"
            " configure_model(), within fabric.init_module() or meta_model()"
        )
    return recipe


def _as_recorded(view: View, result: Tensor) -> torch.UntypedStorage:
    """The storage of ``result``, laid out as recorded: a meta kernel may have expected other strides than there are."""
    lies_so = result.stride() == view.stride and result.storage_offset() == view.offset
    if lies_so and (result.is_conj(), result.is_neg()) == (view.conj, view.neg):
        return result.untyped_storage()
    storage = torch.UntypedStorage(view.nbytes, device=result.device)
    view.on(storage).copy_(result)
    return storage
