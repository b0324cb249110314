"""Differentiable collectives, each a forward and a backward side by side, named by the types they convert between.

A tensor's type over the ranks fixes its gradient's type (see :mod:`~lightning_autotp.layouts.types`), and so a
conversion's backward follows from its forward:

====================================  =====  ========================  ==========================
function                              types  forward                   backward
====================================  =====  ========================  ==========================
:func:`copy_to_tensor_parallel` (f)   I → R  identity                  all-reduce
:func:`all_reduce` (g)                P → I  all-reduce                identity
:func:`all_reduce_replicate`          P → R  all-reduce                all-reduce
:func:`all_gather`                    S → I  all-gather                slice
:func:`all_gather_replicate`          S → R  all-gather                reduce-scatter
:func:`scatter`                       I → S  slice                     all-gather
``convert`` alone                     R → S  slice                     zero-padding
:func:`reduce_scatter`                P → S  reduce-scatter            all-gather
:func:`keep_once`                     I → P  zeros but on one rank     identity
``convert`` alone                     R → P  zeros but on one rank     zeros but on one rank
``convert`` alone                     R → I  identity                  zeros but on one rank
====================================  =====  ========================  ==========================

A shard's one sharded dim may be uneven, have several runs a rank, or be shared: where several ranks hold an index they
hold the same value, and their gradients *add up* to the gradient. Going out of such a shard the first owner's value is
taken and so the first owner alone gets the gradient; going into it every owner gets the value and the backward sums
what the owners return.

Where the ranks hold equally long runs in order of rank (``Ownership.is_even``), a gather along the first dim, or one
before which all dims have length 1, is written where it stays, and a reduce-scatter along it reads its operand where it
is. Along a dim further in, the ranks' parts do not lie one after the other in memory, which takes one copy; so do
uneven shards, which travel padded to the longest.

All of these are collective (every rank of the group must call them in the same order) except R → S and those that keep
once, in forward or backward as the table says. Without values each records itself as one node of the
trace (its name is the conversion, ``"partial_to_invariant"`` and so on) and communicates nothing.

Each backward is a linear map whose own backward is the forward again, so derivatives of derivatives (gradient
penalties, Hessian-vector products) go through these as exactly as gradients do.

The idea of pairs is Megatron-LM's (``tensor_parallel/mappings.py``); what goes over the wire are PyTorch's functional
collectives, which ``torch.compile`` can trace.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor
from torch.autograd import Function

from lightning_autotp.capture import recording
from lightning_autotp.layouts.ownership import Ownership, owner_of
from lightning_autotp.layouts.transitions import TRANSITIONS, Pair, transition
from lightning_autotp.layouts.types import Invariant, Layout, Partial, Replicate, Shard
from lightning_autotp.private.distributed_private import collectives, device_of_objects
from lightning_autotp.private.torch_private import has_values, own_shape
from lightning_autotp.ranks.group import TPGroup

_uncached_owners = Ownership.__dict__["owners"].func


# --- over the wire. Nothing travels for a tensor without elements, nor for one without values. ---


def reduce_values(x: Tensor, group: TPGroup, op: str = "sum") -> Tensor:
    """All-reduce outside autograd: ``op`` (``"sum"`` or ``"max"``) over the ranks' ``x``, on every rank. Collective."""
    if not has_values(x) or x.numel() == 0:
        return torch.empty_like(x)
    return collectives.wait_tensor(collectives.all_reduce(x.contiguous(), op, group.name))


def wait(x: Tensor) -> Tensor:
    """A tensor with its values, where a collective that gives them may be under way."""
    return x if not has_values(x) or x.numel() == 0 else collectives.wait_tensor(x)


def gather_values(x: Tensor, group: TPGroup) -> Tensor:
    """Every rank's ``x``, all of one shape, outside autograd: ``[...] -> [ranks, ...]``. Collective."""
    if not has_values(x) or x.numel() == 0:
        return x.new_empty((group.size, *x.shape))
    flat = collectives.wait_tensor(collectives.all_gather_into_tensor(x.contiguous().view(-1), group.size, group.name))
    return flat.view(group.size, *x.shape)


def _begin_reduce_scatter_parts(parts: Tensor, group: TPGroup) -> Tensor:
    """This rank's part, summed over the ranks: ``[ranks, size, ...] -> [size, ...]``; to be waited for."""
    if not has_values(parts) or parts.numel() == 0:
        return parts.new_empty(parts.shape[1:])
    # With its own shape, not as a view of a flat one: the model's code may go on to change it in place.
    return collectives.reduce_scatter_tensor(parts.contiguous().flatten(0, 1), "sum", group.size, group.name)


def _begin_gather_even(x: Tensor, group: TPGroup, dim: int) -> Callable[[], Tensor]:
    """The ranks' ``[..., size, ...]`` of one shape after each other along ``dim``: ``[..., ranks * size, ...]``."""
    shape = [*x.shape[:dim], group.size * x.shape[dim], *x.shape[dim + 1 :]]
    if not has_values(x) or x.numel() == 0:
        empty = x.new_empty(shape)
        return lambda: empty
    # In this form torch's asynchronous products know a gather whose ranks' rows alternate in memory, too.
    outermost = _is_outermost(x, dim)
    parts = collectives.all_gather_into_tensor(
        x.contiguous().flatten(0, dim) if outermost else x.contiguous(), group.size, group.name
    )

    def finish() -> Tensor:
        whole = collectives.wait_tensor(parts)
        # With its own shape, not as a view of another one: the model's code may go on to change it in place.
        return own_shape(whole, shape) if outermost else torch.cat(whole.chunk(group.size), dim)

    return finish


def _begin_reduce_scatter_even(x: Tensor, group: TPGroup, dim: int) -> Tensor:
    """This rank's one of equal parts along ``dim`` of the sum; to be waited for, then shaped as by ``_part_shape``.

    In a compiled graph torch's asynchronous products know a reduce-scatter by the wait that follows it at once.
    """
    if not has_values(x) or x.numel() == 0:
        return x.new_empty(_part_shape(x, group, dim))
    rows = x.contiguous().flatten(0, dim) if _is_outermost(x, dim) else torch.cat(x.chunk(group.size, dim))
    return collectives.reduce_scatter_tensor(rows, "sum", group.size, group.name)


def _part_shape(x: Tensor, group: TPGroup, dim: int) -> list[int]:
    return [*x.shape[:dim], x.shape[dim] // group.size, *x.shape[dim + 1 :]]


def _is_outermost(x: Tensor, dim: int) -> bool:
    """Whether equal parts along a dim lie one after the other in memory."""
    return all(size == 1 for size in x.shape[:dim])


def gather_lengths(length: int, group: TPGroup) -> list[int]:
    """Every rank's length, in order of rank. Collective, of one number a rank."""
    own = torch.tensor([length], device=device_of_objects(group.process_group))
    return [int(each) for each in gather_values(own, group).flatten().tolist()]


# --- index arithmetic on one dim ---


def owner_rows(ownership: Ownership) -> tuple[tuple[int, int, tuple[int, ...]], ...]:
    """``ownership.owners``, in compiled code too."""
    # Until Python 3.12 a cached property takes a lock, which Dynamo cannot trace.
    if torch.compiler.is_compiling():
        return cast(tuple[tuple[int, int, tuple[int, ...]], ...], _uncached_owners(ownership))
    return ownership.owners


def take_owned(x: Tensor, dim: int, ownership: Ownership, rank: int) -> Tensor:
    """``rank``'s part of a whole tensor, as a copy: ``[..., size, ...] -> [..., local size, ...]``. Not collective."""
    runs = ownership.held[rank] or ((0, 0),)
    return torch.cat([x.narrow(dim, start, stop - start) for start, stop in runs], dim)


def keep_first_owned(local: Tensor, dim: int, ownership: Ownership, rank: int) -> Tensor:
    """``local`` with zeros at the indices that a lower rank holds too, so that every index counts once in a sum."""
    pieces = [
        local.narrow(dim, 0, 0)
    ]  # so that zeros alone are a function of ``local``, too: every rank has a gradient
    offset = 0
    shared = False
    for start, stop, ranks in owner_rows(ownership):
        if rank in ranks:
            piece = local.narrow(dim, offset, stop - start)
            pieces.append(piece if owner_of(ranks) == rank else torch.zeros_like(piece))
            offset += stop - start
            shared = shared or owner_of(ranks) != rank
    return torch.cat(pieces, dim) if shared else local


def _pad(x: Tensor, dim: int, size: int) -> Tensor:
    if x.shape[dim] == size:
        return x
    shape = list(x.shape)
    shape[dim] = size - x.shape[dim]
    return torch.cat([x, x.new_zeros(shape)], dim)


def _place(local: Tensor, dim: int, ownership: Ownership, rank: int) -> Tensor:
    """The whole tensor with ``local`` where this rank holds it and zeros elsewhere."""
    pieces: list[Tensor] = []
    offset = 0
    for start, stop, ranks in owner_rows(ownership):
        if rank in ranks:
            pieces.append(local.narrow(dim, offset, stop - start))
            offset += stop - start
        else:
            shape = list(local.shape)
            shape[dim] = stop - start
            pieces.append(local.new_zeros(shape))
    return torch.cat(pieces, dim)


def _gather(local: Tensor, group: TPGroup, dim: int, ownership: Ownership, *, add_owners: bool) -> Tensor:
    """The whole tensor from the ranks' parts; a shared index has its first owner's value, or the sum of its owners'."""
    if ownership.is_even:
        return _begin_gather_even(local, group, dim)()
    largest = max(ownership.local_size(rank) for rank in range(ownership.ranks))
    parts = gather_values(_pad(local, dim, largest), group)
    offsets = [0] * ownership.ranks
    pieces: list[Tensor] = []
    for start, stop, ranks in owner_rows(ownership):
        owner = owner_of(ranks)
        piece = parts[owner].narrow(dim, offsets[owner], stop - start)
        if add_owners:
            for rank in ranks[1:]:
                piece = piece + parts[rank].narrow(dim, offsets[rank], stop - start)
        for rank in ranks:
            offsets[rank] += stop - start
        pieces.append(piece)
    return torch.cat(pieces, dim)


def _reduce_scatter(x: Tensor, group: TPGroup, dim: int, ownership: Ownership) -> Tensor:
    """This rank's part of the sum of the ranks' whole tensors; every owner of a shared index gets its sum."""
    if ownership.is_even:
        return own_shape(wait(_begin_reduce_scatter_even(x, group, dim)), _part_shape(x, group, dim))
    largest = max(ownership.local_size(rank) for rank in range(ownership.ranks))
    parts = [_pad(take_owned(x, dim, ownership, rank), dim, largest) for rank in range(ownership.ranks)]
    part, size = wait(_begin_reduce_scatter_parts(torch.stack(parts), group)), ownership.local_size(group.rank)
    return part if size == largest else part.narrow(dim, 0, size).clone(memory_format=torch.contiguous_format)


# --- what each transition computes, forward and backward side by side ---


class Kernel(NamedTuple):
    """How one transition runs: ``(tensor, group, dim, ownership) -> tensor`` in each direction.

    ``dim`` and ``ownership`` are those of the shard, where one side is one.
    """

    forward: Callable[[Tensor, TPGroup, int, Any], Tensor]
    backward: Callable[[Tensor, TPGroup, int, Any], Tensor]


def _same(x: Tensor, group: TPGroup, dim: int, ownership: Any) -> Tensor:
    return x.view_as(x)


def _sum(x: Tensor, group: TPGroup, dim: int, ownership: Any) -> Tensor:
    return reduce_values(x, group)


def _gather_first(x: Tensor, group: TPGroup, dim: int, ownership: Ownership) -> Tensor:
    return _gather(x, group, dim, ownership, add_owners=False)


def _gather_sum(x: Tensor, group: TPGroup, dim: int, ownership: Ownership) -> Tensor:
    return _gather(x, group, dim, ownership, add_owners=True)


def _take(x: Tensor, group: TPGroup, dim: int, ownership: Ownership) -> Tensor:
    return take_owned(x, dim, ownership, group.rank)


def _take_first(x: Tensor, group: TPGroup, dim: int, ownership: Ownership) -> Tensor:
    return keep_first_owned(_take(x, group, dim, ownership), dim, ownership, group.rank)


def _place_part(x: Tensor, group: TPGroup, dim: int, ownership: Ownership) -> Tensor:
    return _place(x, dim, ownership, group.rank)


def _sum_part(x: Tensor, group: TPGroup, dim: int, ownership: Ownership) -> Tensor:
    return _reduce_scatter(x, group, dim, ownership)


def _sum_part_first(x: Tensor, group: TPGroup, dim: int, ownership: Ownership) -> Tensor:
    return keep_first_owned(_reduce_scatter(x, group, dim, ownership), dim, ownership, group.rank)


def _keep_once(x: Tensor, group: TPGroup, dim: int, ownership: Any) -> Tensor:
    return x.clone() if group.rank == 0 else torch.zeros_like(x)  # no view: code may add to it in place


KERNELS: dict[Pair, Kernel] = {
    ("I", "R"): Kernel(_same, _sum),
    ("P", "I"): Kernel(_sum, _same),
    ("P", "R"): Kernel(_sum, _sum),
    ("S", "I"): Kernel(_gather_first, _take_first),
    ("S", "R"): Kernel(_gather_first, _sum_part_first),
    ("I", "S"): Kernel(_take, _gather_sum),
    ("R", "S"): Kernel(_take, _place_part),
    ("I", "P"): Kernel(_keep_once, _same),
    ("R", "P"): Kernel(_keep_once, _keep_once),
    ("R", "I"): Kernel(_same, _keep_once),
    ("P", "S"): Kernel(_sum_part, _gather_sum),
}
"""For every row of :data:`~lightning_autotp.layouts.transitions.TRANSITIONS`, the two functions that do it."""


class _Transition(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, pair: Pair, group: TPGroup, dim: int, ownership: Ownership | None) -> Tensor:
        ctx.where = pair, group, dim, ownership
        if has_values(x) and not recording.is_under_way():
            return KERNELS[pair].forward(x, group, dim, ownership)
        shape = list(x.shape)
        if ownership is not None:
            shape[dim] = ownership.size if pair[0] == "S" else ownership.local_size(group.rank)
        return recording.record(TRANSITIONS[pair].name, [x], shape, ownership.digest if ownership is not None else "")

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None, None]:
        return transition_backward(grad, *ctx.where), None, None, None, None


class _TransitionBackward(Function):
    """The backward of a transition as a function of the gradient: linear, so that its own backward is the forward."""

    @staticmethod
    def forward(ctx: Any, grad: Tensor, pair: Pair, group: TPGroup, dim: int, ownership: Ownership | None) -> Tensor:
        ctx.where = pair, group, dim, ownership
        return KERNELS[pair].backward(grad, group, dim, ownership)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None, None]:
        return _Transition.apply(grad, *ctx.where), None, None, None, None


def transition_backward(grad: Tensor, pair: Pair, group: TPGroup, dim: int, ownership: Ownership | None) -> Tensor:
    """The gradient before a transition, from the one after it; differentiable where gradients are recorded."""
    if torch.is_grad_enabled():  # under create_graph=True
        return _TransitionBackward.apply(grad, pair, group, dim, ownership)
    return KERNELS[pair].backward(grad, group, dim, ownership)


# --- begun here, waited for elsewhere, where products are computed meanwhile: even shards, outside autograd ---


def begin_gather(x: Tensor, group: TPGroup, dim: int, ownership: Ownership) -> Callable[[], Tensor]:
    """Begin an all-gather, ``[..., size/tp, ...] -> [..., size, ...]``; what this returns waits for it. Collective."""
    if ownership.is_even:
        return _begin_gather_even(x, group, dim)
    whole = _gather(x, group, dim, ownership, add_owners=False)
    return lambda: whole


def begin_backward(grad: Tensor, pair: Pair, group: TPGroup, dim: int, ownership: Ownership | None) -> Tensor:
    """As :func:`transition_backward`; the result is to be given to :func:`wait` before it is read."""
    if pair == ("I", "R") and has_values(grad) and grad.numel():
        return collectives.all_reduce(grad.contiguous(), "sum", group.name)
    if pair == ("S", "R") and ownership is not None and ownership.is_even:
        return own_shape(_begin_reduce_scatter_even(grad, group, dim), _part_shape(grad, group, dim))
    return KERNELS[pair].backward(grad, group, dim, ownership)


# --- what layers call ---


def convert(x: Tensor, source: Layout, target: Layout, group: TPGroup) -> Tensor:
    """``x`` in another layout; ``x`` itself when the layouts are equal. Collective as the table of this module says.

    Raises:
        ValueError: for a pair of layouts between which there is no single conversion, or a tensor that does not fit.
    """
    if source.letter == target.letter and source == target:
        return x
    pair = transition(source, target).pair
    shard = source if isinstance(source, Shard) else target
    if not isinstance(shard, Shard):
        return _Transition.apply(x, pair, group, 0, None)
    dim, ownership = _only_dim(shard, x, group)
    expected = ownership.local_size(group.rank) if shard is source else ownership.size
    if x.shape[dim] != expected:
        raise ValueError(
            f"a tensor of shape {tuple(x.shape)} does not fit {shard}: dim {dim} should have {expected} elements here"
        )
    return _Transition.apply(x, pair, group, dim, ownership)


def copy_to_tensor_parallel(x: Tensor, group: TPGroup) -> Tensor:
    """I → R, Megatron's *f*: the tensor itself (no copy) for ranks that will use it differently.

    Use it once for all the consumers of a tensor: the backward's one all-reduce then sums what they return together.
    """
    return _Transition.apply(x, ("I", "R"), group, 0, None)


def all_reduce(x: Tensor, group: TPGroup) -> Tensor:
    """P → I, Megatron's *g*: the sum over the ranks, the same on every rank."""
    return _Transition.apply(x, ("P", "I"), group, 0, None)


def all_reduce_replicate(x: Tensor, group: TPGroup) -> Tensor:
    """P → R: the sum over the ranks, which they will use differently; the gradient is summed as well."""
    return _Transition.apply(x, ("P", "R"), group, 0, None)


def all_gather(x: Tensor, group: TPGroup, shard: Shard) -> Tensor:
    """S → I: ``[..., local size, ...] -> [..., size, ...]``; the backward takes this rank's slice."""
    return convert(x, shard, Invariant(), group)


def all_gather_replicate(x: Tensor, group: TPGroup, shard: Shard) -> Tensor:
    """S → R: ``[..., local size, ...] -> [..., size, ...]``; the backward is a reduce-scatter."""
    return convert(x, shard, Replicate(), group)


def scatter(x: Tensor, group: TPGroup, shard: Shard) -> Tensor:
    """I → S: ``[..., size, ...] -> [..., local size, ...]``; the backward gathers."""
    return convert(x, Invariant(), shard, group)


def reduce_scatter(x: Tensor, group: TPGroup, shard: Shard) -> Tensor:
    """P → S: this rank's part of the sum, ``[..., size, ...] -> [..., local size, ...]``; backward: all-gather."""
    return convert(x, Partial(), shard, group)


def keep_once(x: Tensor, group: TPGroup) -> Tensor:
    """I → P: an addend that counts once in a sum over the ranks (a bias): the tensor on rank 0, zeros elsewhere."""
    return _Transition.apply(x, ("I", "P"), group, 0, None)


def _only_dim(shard: Shard, x: Tensor, group: TPGroup) -> tuple[int, Ownership]:
    if len(shard.dims) != 1:
        raise ValueError(f"{shard} has {len(shard.dims)} sharded dims, collectives move one: convert one dim at a time")
    dim, ownership = shard.dims[0]
    if ownership.ranks != group.size:
        raise ValueError(f"{shard} is for {ownership.ranks} ranks but the tensor-parallel group has {group.size}")
    if not -x.dim() <= dim < x.dim():
        raise ValueError(f"{shard} shards dim {dim} of a tensor of shape {tuple(x.shape)}")
    return dim % x.dim(), ownership
