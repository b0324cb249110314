"""Whether an optimizer's update of an element needs more of the tensor than a rank has.

A rank's optimizer sees parts of tensors. That is enough for SGD, Adam and whatever else computes each element from its
own history. It is silently wrong for an update that looks at a whole matrix: an orthogonalization (Muon), sums over
rows and columns (Adafactor), a norm of the tensor (LARS, LAMB). No list of classes tells which is which: third parties
write new ones, and one class may do the one or the other by its options, or by parameter group.

So the optimizer is asked. Copies of it, with the options of a group, make some steps on a small random tensor whole,
and on the pieces of that tensor, cut along the dims in which the group's parameters are cut. Where the pieces move as
the whole does, the update is right for shards; otherwise it is refused.

A copy (:class:`_Copier`) shares nothing with the original that a step could change: real parameters are replaced by
the piece wherever the optimizer keeps them, and an optimizer that cannot be taken apart so is not run at all.
"""

from __future__ import annotations

import collections
import contextlib
import copy
import functools
import itertools
import types
import warnings
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.optim import Optimizer

from lightning_autotp.layouts.types import Shard
from lightning_autotp.optimizers.stepping import needs_closure
from lightning_autotp.optimizers.trial import Unknown, difference, first_that_runs, moving, updates
from lightning_autotp.parameters.local_blocks import plain, shard_group
from lightning_autotp.parameters.state import ParameterTable
from lightning_autotp.whole_matrices.optimizer import WholeMatrixOptimizer

STEPS = 32
"""Enough for preconditioners that are recomputed every tenth step, or first used after 25."""
FEW_STEPS = 2
"""Enough for most optimizers that are refused: the others need not be run for long."""
TOLERANCE = {torch.float64: 1e-6, torch.float32: 1e-3}
"""Greatest difference between two updates that are the same, relative to the greatest update."""
ATTEMPTS = (
    (torch.float64, False, False),
    (torch.float64, False, True),
    (torch.float32, False, False),
    (torch.float32, True, True),
)
"""Ways to try: a dtype, whether without the options of implementation, and whether without the parameter's state."""
IMPLEMENTATIONS = ("foreach", "fused", "capturable")
"""Options of ``torch.optim`` that choose how, not what, is computed, and do not work everywhere."""
NO_OPTIONS = ("params", "param_names", "lr", "initial_lr")
"""What of a group a trial of torch's own optimizers does not depend on: they only scale updates by the rate."""
SMALL = 4096
"""Elements up to which a tensor that an optimizer keeps is copied."""

Cut = tuple[int, tuple[int, ...]]
"""How a parameter is cut: its number of dims, and the sharded ones."""


def check_optimizer(optimizer: Optimizer, module: nn.Module) -> None:
    """Refuse an optimizer that would treat this rank's part of a tensor as a whole one.

    Neither the optimizer nor its parameters are touched, nor torch's random state. An optimizer that communicates in
    its step is collective here too.

    Args:
        optimizer: with this rank's local parameters. Groups without a sharded parameter may do as they like.
        module: the parallel model that has the parameters, or a module that holds one.

    Raises:
        ValueError: if in some group the update of an element depends on others that a rank may not have.
        RuntimeError: if no parallel model is found.

    Warns:
        UserWarning: if the optimizer cannot be run on a trial tensor, so that nothing is known about it.
    """
    if isinstance(optimizer, WholeMatrixOptimizer):
        return  # it steps whole tensors, and has tried its optimizer itself
    table = ParameterTable(module)
    name = type(optimizer).__name__
    unknown: str | None = None
    for number, group in enumerate(optimizer.param_groups):
        for (_, dims), parameter in _sharded(group["params"], table).items():
            try:
                apart = _found(optimizer, group, parameter, dims)
            except Unknown as error:
                unknown = unknown or str(error)
                continue
            if apart is not None:
                raise ValueError(
                    f"{name} computes its update from whole tensors, of which a rank has only a part: with the options"
                    f" of parameter group {number}, which has {_name(parameter, table)}"
                    f" (cut along dim {', '.join(map(str, dims))}),"
                    " the pieces of a random tensor are updated differently from the whole, by"
                    f" {apart:.1g} times the greatest update. Step whole tensors:"
                    f" lightning_autotp.WholeMatrixOptimizer(module, parameters, {name}, lr=...) is one process's"
                    f" {name} where the update of a tensor depends on no other tensor. Or use an elementwise optimizer"
                    " such as SGD, Adam or AdamW for this group; parameters that stay whole on every rank (see the"
                    " plan) may have any"
                )
    if unknown is not None:
        warnings.warn(
            f"{name} could not be checked: {unknown}. It is right on sharded parameters only if it computes each"
            " element's update from that element's own gradients",
            stacklevel=2,
        )


_FOUND: dict[Hashable, float | None] = {}
"""What trials of torch's own optimizers found, for the next one with the same options."""


def _found(optimizer: Optimizer, group: Mapping[str, Any], parameter: Tensor, dims: tuple[int, ...]) -> float | None:
    """What :func:`_difference` gives, now or when it was asked the same before."""
    known = _known_by(optimizer, group, parameter, dims)
    if known is not None and known in _FOUND:
        return _FOUND[known]
    apart = _difference(optimizer, parameter, parameter.dim(), dims)
    if known is not None:
        _FOUND[known] = apart
    return apart


def _known_by(
    optimizer: Optimizer, group: Mapping[str, Any], parameter: Tensor, dims: tuple[int, ...]
) -> Hashable | None:
    """What the result of a trial depends on; ``None`` for an optimizer whose code or state may be of any kind."""
    if type(optimizer).__module__.partition(".")[0] != "torch" or optimizer.state.get(parameter):
        return None
    options = tuple(sorted((name, value) for name, value in group.items() if name not in NO_OPTIONS))
    known = (type(optimizer), options, parameter.dim(), dims, parameter.device)
    try:
        hash(known)
    except TypeError:
        return None
    return known


def _sharded(parameters: Iterable[Tensor], table: ParameterTable) -> dict[Cut, Tensor]:
    """One parameter for each way in which some are cut: over the tensor-parallel ranks, by FSDP2, or both."""
    found: dict[Cut, Tensor] = {}
    for parameter in parameters:
        meta = table.meta(parameter)
        dims = {dim for dim, _ in meta.layout.dims} if meta is not None and isinstance(meta.layout, Shard) else set()
        if shard_group(parameter) is not None:
            dims.add(0)
        if dims:
            found.setdefault((parameter.dim(), tuple(sorted(dims))), parameter)
    return found


def _name(parameter: Tensor, table: ParameterTable) -> str:
    meta = table.meta(parameter)
    return "a parameter" if meta is None else meta.name


def _difference(optimizer: Optimizer, parameter: Tensor, ndim: int, dims: tuple[int, ...]) -> float | None:
    """How much the updates of a tensor and of its pieces differ, relative to the greatest one; ``None`` if they do not.

    Raises:
        Unknown: if no way was found to make steps.
    """

    def attempt(dtype: torch.dtype, portable: bool, new: bool, with_closure: bool) -> float | None:
        make = functools.partial(_Copier, optimizer, parameter, portable=portable, new=new)
        for start, gradients in _trials(ndim):
            values = start.to(parameter.device, dtype), gradients.to(parameter.device, dtype)
            with contextlib.suppress(Unknown):  # its first steps may be no update, as in a warm-up
                apart = _compare(make, values[0], values[1][:FEW_STEPS], dims, with_closure)
                if not apart <= TOLERANCE[dtype]:
                    return apart
            apart = _compare(make, *values, dims, with_closure)
            if not apart <= TOLERANCE[dtype]:
                return apart
        return None

    return first_that_runs(
        (
            functools.partial(attempt, *way, with_closure)
            for way, with_closure in itertools.product(ATTEMPTS, (False, True))
            if with_closure >= needs_closure(optimizer)
        ),
        parameter.device,
    )


def _compare(
    make: Callable[[nn.Parameter], _Copier], start: Tensor, gradients: Tensor, dims: tuple[int, ...], with_closure: bool
) -> float:
    """The greatest difference between the updates of a tensor and of its pieces, relative to the greatest update."""

    def update(index: tuple[slice, ...]) -> Tensor:
        piece = nn.Parameter(start[index].clone(memory_format=torch.contiguous_format))
        in_every_step = (slice(None), *index)
        [found] = updates(make(piece).optimizer, [piece], [gradients[in_every_step]], with_closure)
        return found

    whole = update((slice(None),) * start.ndim)
    joined = torch.empty_like(whole)
    for index in _pieces(start.shape, dims):
        joined[index] = update(index)
    return difference(joined, whole)


def _trials(ndim: int) -> Iterator[tuple[Tensor, Tensor]]:
    """A tensor and its gradients ``[steps, ...]``, of very different sizes by row and by column.

    Once the gradients point anywhere and differ by step too; once they point more or less the same way: an optimizer
    that finds its own learning rate by sums over all gradients shows it only then.
    """
    generator = torch.Generator().manual_seed(7)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64)

    shape = {1: (48,), 2: (32, 48)}.get(ndim, (3,) * (ndim - 2) + (16, 24))
    scale = torch.ones(shape, dtype=torch.float64)
    for dim, size in enumerate(shape):
        scale *= normal(size).exp().view([-1 if dim == other else 1 for other in range(ndim)])
    yield normal(*shape) * scale, normal(STEPS, *shape) * scale * 10 ** normal(STEPS, *[1] * ndim)
    yield normal(*shape) * scale, (normal(*shape) + normal(STEPS, *shape) / 2) * scale


def _pieces(shape: tuple[int, ...], dims: tuple[int, ...]) -> list[tuple[slice, ...]]:
    """The pieces of a tensor that is cut unevenly in two along each of some dims."""
    ranges = [
        (slice(0, size // 3), slice(size // 3, size)) if dim in dims else (slice(0, size),)
        for dim, size in enumerate(shape)
    ]
    return list(itertools.product(*ranges))


class _Copier:
    """Copies an optimizer, for one parameter that a piece of a trial tensor stands for.

    Args:
        original: the optimizer; also one that wraps others.
        parameter: of its parameters, the one to keep.
        piece: what stands for it.
        portable: whether to leave out the options of implementation.
        new: whether to leave out the parameter's state, which has its shape after some steps. (It is not empty before
            the first one if the constructor makes it.)

    Attributes:
        optimizer: the copy. Its groups are those that have the parameter, with nothing else in them.
    """

    def __init__(self, original: Any, parameter: Tensor, piece: nn.Parameter, portable: bool, new: bool) -> None:
        self._parameter, self._piece, self._portable, self._new = parameter, piece, portable, new
        self._copies: dict[int, Any] = {id(parameter): piece}
        self.optimizer = self._copy_optimizer(original)

    def _copy_optimizer(self, original: Any) -> Any:
        made = object.__new__(type(original))
        self._copies[id(original)] = made
        groups = original.param_groups
        for group in groups:
            for other in group["params"]:
                if other is not self._parameter:
                    self._copies[id(other)] = nn.Parameter(self._piece.new_zeros(()))
        kept = [group for group in groups if any(other is self._parameter for other in group["params"])]
        copied: list[dict[str, Any]] = []
        self._copies.setdefault(id(groups), copied)
        for group in kept:
            if id(group) not in self._copies:
                self._copies[id(group)] = self._copy_group(group)
            copied.append(self._copies[id(group)])
        state: dict[Any, Any] = collections.defaultdict(dict)
        self._copies.setdefault(id(original.state), state)
        for owner, value in original.state.items():
            if not isinstance(owner, Tensor) or (owner is self._parameter and not self._new):
                state[self._copy(owner)] = self._copy(value)
        # Not the hooks of users, nor a step that a scheduler put there, which calls the original's.
        own = {
            name: self._copy(value)
            for name, value in vars(original).items()
            if name != "step" and not name.startswith("_optimizer_")
        }
        if isinstance(made, Optimizer):
            Optimizer.__setstate__(made, own)
        else:
            vars(made).update(own)
        return made

    def _copy_group(self, group: Mapping[str, Any]) -> dict[str, Any]:
        self._copies[id(group["params"])] = [self._piece]
        made = moving({name: self._copy(value) for name, value in group.items() if name != "param_names"})
        if "param_names" in group:
            places = [place for place, other in enumerate(group["params"]) if other is self._parameter]
            made["param_names"] = [group["param_names"][place] for place in places]
        if self._portable:
            made.update({name: False for name in IMPLEMENTATIONS if name in made})
        return made

    def _copy(self, value: Any) -> Any:
        if id(value) in self._copies:
            return self._copies[id(value)]
        if value is None or isinstance(value, bool | int | float | complex | str | bytes | type | types.FunctionType):
            return value
        made = self._copy_new(value)
        self._copies[id(value)] = made
        return made

    def _copy_new(self, value: Any) -> Any:
        if isinstance(value, Tensor):
            return self._copy_tensor(value)
        if isinstance(value, nn.Module):
            raise Unknown(f"it holds a module, {type(value).__name__}")
        if isinstance(value, dict):
            made = copy.copy(value)
            self._copies[id(value)] = made
            made.clear()
            made.update({self._copy(key): self._copy(item) for key, item in value.items()})
            return made
        if isinstance(value, list):
            self._copies[id(value)] = items = []
            items += [self._copy(item) for item in value]
            return items
        if isinstance(value, tuple | set | frozenset):
            items = [self._copy(item) for item in value]
            return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)
        if isinstance(value, types.MethodType):
            return types.MethodType(value.__func__, self._copy(value.__self__))
        if isinstance(value, torch.Generator):
            return torch.Generator(value.device).set_state(value.get_state())
        if hasattr(value, "param_groups") and hasattr(value, "state"):
            return self._copy_optimizer(value)
        if isinstance(value, torch.dtype | torch.device | dist.ProcessGroup | DeviceMesh):
            return value
        if not hasattr(value, "__dict__"):
            return copy.deepcopy(value, self._copies)
        made = copy.copy(value)
        self._copies[id(value)] = made
        vars(made).update({name: self._copy(item) for name, item in vars(value).items()})
        return made

    def _copy_tensor(self, value: Tensor) -> Tensor:
        if value.shape == self._parameter.shape:
            # State from the constructor, such as Adagrad's sum: it is the same number everywhere.
            local = plain(value).reshape(-1)
            number = local[:1].sum().to(self._piece.dtype if value.is_floating_point() else value.dtype)
            return number.expand(self._piece.shape).clone()
        if value.numel() > SMALL:
            raise Unknown(f"it holds a tensor of {value.numel()} elements")
        return value.detach().clone()
