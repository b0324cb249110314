"""Parameters as one process has them, for code outside of their layers."""

from __future__ import annotations

import functools

from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Partial

from lightning_autotp.gradients.data_parallel import after_fsdp, beside_fsdp
from lightning_autotp.gradients.linear_maps import linear
from lightning_autotp.gradients.sums import keep_hooked
from lightning_autotp.layouts.blocks import index
from lightning_autotp.layouts.types import Invariant
from lightning_autotp.parameters.choosing import parameter_names
from lightning_autotp.parameters.gathering import gather_parameter
from lightning_autotp.parameters.local_blocks import counted_blocks
from lightning_autotp.parameters.meta import ParameterMeta
from lightning_autotp.parameters.state import Hook, ParameterTable
from lightning_autotp.ranks.group import TPGroup


def full_tensor(module: nn.Module, parameter: Tensor | str) -> Tensor:
    """The whole of a parameter of the original model, for code outside of its layer.

    Whatever is computed from it gives one process's loss and gradients, also of second order, if all ranks of a copy of
    the model compute the same: a head of one's own (``F.linear(hidden, full_tensor(self, "model.lm_head.weight"))``),
    rows of an embedding, norms of rows. Collective over the tensor-parallel group, and over the data axis where FSDP2
    has cut the parameter; the backward pass is collective, too, where it is for the parameter's own layer or FSDP2 has
    cut it. The whole parameter is in every rank's memory for as long as the result, or a graph made of it, lives.

    Args:
        module: a parallel model, or a module that holds one.
        parameter: the parameter itself as it is now, or its name in ``module``.

    Returns:
        A tensor of the original shape, of the parameter's dtype, where the model computes, the same on every rank, of
        type Invariant; it requires a gradient if the parameter does. A parameter that every rank has whole may come
        back as it is: do not write to it.

    Raises:
        RuntimeError: if no parallel model is found; in the backward pass, for second derivatives where FSDP2 has cut
            the parameter.
        ValueError: for what is not a parameter of ``module``.
    """
    (name,) = parameter_names(module, [parameter])
    table = ParameterTable(module)
    found = module.get_parameter(name)
    meta, group, gradient_sum = table.meta(found), table.group, table.gradient_sum(found)
    if isinstance(found, DTensor):
        part = _joined(found, gradient_sum)
    else:
        keep_hooked(found, gradient_sum)
        part = found
    if meta is None or isinstance(meta.layout, Invariant):
        return part
    return linear(
        part,
        functools.partial(gather_parameter, meta=meta, group=group),
        functools.partial(_counted_part, meta=meta, group=group),
    )


def _counted_part(whole: Tensor, meta: ParameterMeta, group: TPGroup) -> Tensor:
    """This rank's part of a whole tensor, with zeros where several ranks hold it and another one owns it."""
    part = whole.new_zeros(meta.local_shape)
    for block in counted_blocks(part, meta, group):
        part[index(block.local)] = whole[index(block.original)]
    return part


def _joined(parameter: DTensor, gradient_sum: Hook | None) -> Tensor:
    """This rank's tensor-parallel part of what FSDP2 has cut. Collective over the data axis, in the backward pass too.

    The gradient goes the way of those that FSDP2 collects: summed over the ranks that share an element, averaged over
    the copies of the model, and each gets its rows.
    """
    here = after_fsdp(parameter).to(parameter.device_mesh.device_type)
    assert isinstance(here, DTensor)
    part = here.full_tensor(grad_placements=[Partial()])
    if part.requires_grad:
        part.register_hook(functools.partial(_mean, gradient_sum=gradient_sum, copies=parameter.device_mesh.size()))
    return part


def _mean(gradient: Tensor, gradient_sum: Hook | None, copies: int) -> Tensor:
    """What a copy of the model adds to the mean of all copies."""
    gradient = beside_fsdp(gradient)
    return (gradient if gradient_sum is None else gradient_sum(gradient)) / copies
