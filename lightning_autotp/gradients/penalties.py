"""Sums over the elements of parameters, as penalties are."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import Function
from torch.autograd.graph import get_gradient_edge
from torch.distributed.tensor import DTensor

from lightning_autotp.gradients.data_parallel import after_fsdp, beside_fsdp
from lightning_autotp.gradients.linear_maps import linear, nodes_before, same
from lightning_autotp.gradients.sums import keep_hooked
from lightning_autotp.layouts.blocks import Block, index
from lightning_autotp.parallel.collectives import all_reduce
from lightning_autotp.parameters.choosing import parameter_names
from lightning_autotp.parameters.local_blocks import counted_blocks, is_cut, plain, shard_group
from lightning_autotp.parameters.state import ParameterTable
from lightning_autotp.ranks.agreement import raise_along
from lightning_autotp.ranks.group import TPGroup

Terms = Callable[[str, Tensor], Tensor]
"""What a function makes of a parameter, element by element, given its name."""


def penalty(module: nn.Module, function: Terms, *, parameters: Iterable[Tensor | str] | None = None) -> Tensor:
    """The sum of an elementwise function over all elements of the original model's parameters, each counted once.

    ``penalty(self, lambda name, p: p.square())`` is the sum of squares, ``lambda name, p: (p - start[name]).square()``
    the squared distance from where ``start = {name: p.detach().clone() for name, p in self.named_parameters()}`` was
    taken. Loss and gradients, also of second order, are one process's. Collective over the tensor-parallel group, and
    over the data axis where FSDP2 has cut the parameters; nothing but one number travels.

    Args:
        module: a parallel model, or a module that holds one.
        function: called with a parameter's name in ``module`` (of tied ones the first) and what this rank has of it.
            Returns as many elements, each made from the parameter's element in its place and constants. What is to be
            learned besides multiplies the penalty.
        parameters: only these, themselves as they are now or by name, each once; by default all that are trainable.

    Returns:
        A scalar, float32 or wider, the same on every rank, of type Invariant.

    Raises:
        RuntimeError: if no parallel model is found; in the backward pass, for second derivatives where FSDP2 has cut
            the parameters.
        ValueError: for what is not a parameter of ``module``; on the ranks where ``function`` returned another shape,
            or used other tensors that require a gradient.
        PeerError: on the other ranks then, or where ``function`` itself failed on a rank.
    """
    if parameters is None:
        parameters = [parameter for parameter in module.parameters() if parameter.requires_grad]
    names = parameter_names(module, parameters)
    table = ParameterTable(module)
    chosen = {name: module.get_parameter(name) for name in names}
    data = shard_group(*chosen.values())
    whole = torch.zeros((), device=next((parameter.device for parameter in chosen.values()), None))
    cut = whole
    groups = [group for group in (data, table.group.process_group) if group is not None]
    with raise_along(groups, "computing the terms of a penalty"):
        for name, parameter in chosen.items():
            total = _counted_sum(name, parameter, function, table)
            whole, cut = (whole, cut + total) if is_cut(parameter) else (whole + total, cut)
    if data is not None:
        if cut.requires_grad:
            cut.register_hook(beside_fsdp)
        whole = whole + all_reduce(cut, TPGroup.of(data))
    return all_reduce(whole, table.group)


def _counted_sum(name: str, parameter: Tensor, function: Terms, table: ParameterTable) -> Tensor:
    """The sum of the terms of elements that this rank owns; the gradient is that of all that it has."""
    blocks = counted_blocks(parameter, table.meta(parameter), table.group)
    given, gradient_sum = after_fsdp(parameter), table.gradient_sum(parameter)
    if gradient_sum is not None and not is_cut(parameter):  # of what several ranks have, one gives it the gradient
        keep_hooked(parameter, gradient_sum)
        given = linear(parameter, same, functools.partial(_only, blocks))
    terms = function(name, given)
    _check(name, given, terms)
    local = _Local.apply(terms) if isinstance(terms, DTensor) else terms
    dtype = torch.promote_types(local.dtype, torch.float32)

    def counted(values: Tensor) -> Tensor:
        total = values.new_zeros((), dtype=dtype)
        for block in blocks:
            total = total + values[index(block.local)].sum(dtype=dtype)
        return total

    def of_each(gradient: Tensor) -> Tensor:
        return gradient.to(local.dtype).expand(local.shape)

    return linear(local, counted, of_each)


class _Local(Function):
    """What is in this process of a ``DTensor``; ``to_local()`` brings the gradient to the device of the mesh."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor) -> Tensor:
        ctx.like = torch.empty_like(tensor, device="meta")
        local = plain(tensor)
        return local.view_as(local)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        found = torch.empty_like(ctx.like, device=gradient.device)
        plain(found).copy_(gradient)
        return found


def _only(blocks: tuple[Block, ...], values: Tensor) -> Tensor:
    kept = torch.zeros_like(values)
    for block in blocks:
        kept[index(block.local)] = values[index(block.local)]
    return kept


def _check(name: str, given: Tensor, terms: Tensor) -> None:
    is_alike = isinstance(terms, Tensor) and isinstance(terms, DTensor) == isinstance(given, DTensor)
    if not is_alike or plain(terms).shape != plain(given).shape:
        found = f"{type(terms).__name__} of shape {tuple(terms.shape)}" if isinstance(terms, Tensor) else repr(terms)
        raise ValueError(
            f"this rank's part of {name} is a {type(given).__name__} of shape {tuple(given.shape)}, of which the"
            f" penalty's function made a {found}: it must return one term for each element, which are summed over all"
            " ranks here. A penalty that is not a sum over elements (a norm of rows) is computed from"
            " full_tensor(module, name)"
        )
    if terms.requires_grad and _uses_others(terms, given):
        raise ValueError(
            f"the penalty's terms of {name} depend on another tensor that requires a gradient, which would get that of"
            " this rank's part only: multiply the penalty by it, or detach it"
        )


def _uses_others(terms: Tensor, given: Tensor) -> bool:
    """Whether another tensor than ``given`` would get a gradient."""
    own = get_gradient_edge(given).node if given.requires_grad else None
    nodes = nodes_before(get_gradient_edge(terms).node, lambda node: node is own)
    # Where there is nothing before a node, a gradient arrives.
    return any(node is not own and not any(before for before, _ in node.next_functions) for node in nodes)
