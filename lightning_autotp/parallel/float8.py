"""Products of linear layers in float8, whose scales are those of whole tensors where a rank has a part of one.

A layer rounds what its three products take. By each ``CastConfig`` of torchao, a scale follows from the largest element
of a whole matrix (tensorwise), or of each row or column of it (rowwise):

==========================  ==================  =========================  =========================
product                     operands            a row's scale goes along   is cut in a layer that is
==========================  ==================  =========================  =========================
``y = x W^T``               ``x [tokens, in]``  ``in``                     row-parallel
.                           ``W^T [in, out]``   ``in``                     row-parallel
``dx = dy W``               ``dy``              ``out``                    column-parallel
.                           ``W^T``             ``out``                    column-parallel
``dW = dy^T x``             ``dy``, ``x``       ``tokens``                 whole, its tokens sharded
==========================  ==================  =========================  =========================

The largest elements of what goes along a cut dim are made those of the whole tensor, by one all-reduce in a layer's
forward and one in its backward pass: then each operand is rounded as in one process, and the ranks' products are parts
of its product, or of sums that give it. This takes operands that are no parts of sums themselves, and a gradient of the
result that is none: the solver gives such layers no others.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd import Function
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from lightning_autotp.parallel.collectives import reduce_values
from lightning_autotp.parallel.local_parameters import become
from lightning_autotp.private.torch_private import has_values
from lightning_autotp.private.torchao_private import largest, to_float8
from lightning_autotp.quantized.float8 import Float8, float8_of
from lightning_autotp.ranks.group import TPGroup


class Float8Linear(nn.Linear):
    """A linear layer that is whole on every rank and computes in float8: ``[..., in] -> [..., out]``.

    The tokens of its input may be sharded. Forward and backward are collective.
    """

    group: TPGroup

    @classmethod
    def convert(cls, linear: nn.Linear, group: TPGroup) -> None:
        """Make a layer that is noted to compute in float8 do so, in place. Not collective."""
        become(linear, cls, nn.Linear).group = group

    def forward(self, input: Tensor) -> Tensor:
        """``[..., in] -> [..., out]``. Collective."""
        return local_product(input, self, ("tokens",), self.group, self.bias)


def local_product(
    x: Tensor, layer: nn.Linear, cut: Collection[str], group: TPGroup, bias: Tensor | None = None
) -> Tensor:
    """``F.linear`` with a layer's weight, in float8 if the layer is noted to compute so: collective then.

    Args:
        x: ``[..., in]``, or this rank's part of it.
        layer: whose weight counts, ``[out, in]``, or this rank's part of it.
        cut: which of ``"tokens"``, ``"in"`` and ``"out"`` the ranks have parts of.
        group: the tensor-parallel group.
        bias: added to the product.
    """
    how = float8_of(layer)
    if how is None or not has_values(x):
        return F.linear(x, layer.weight, bias)
    if torch.is_autocast_enabled():  # as torchao has it
        x = x.to(torch.get_autocast_dtype("cuda"))
    output: Tensor = _Product.apply(x, layer.weight, how, frozenset(cut), group)
    return output if bias is None else output + bias.to(output.dtype)


class _Operand(NamedTuple):
    """A matrix that a product takes.

    Attributes:
        values: ``[rows, columns]``.
        dims: what these are.
        role: what torchao calls it.
        cast: its ``CastConfig``.
        along: the dim along which a scale goes that is not the whole matrix's.
    """

    values: Tensor
    dims: tuple[str, str]
    role: str
    cast: Any
    along: int

    def is_rounded(self) -> bool:
        return bool(self.cast.scaling_type.value != "disabled")

    def largest(self) -> Tensor:
        """The largest element of what has one scale, as far as this rank has it."""
        values = self.values
        if not values.numel():  # no token is this rank's: as if there was one, of zeros
            values = values.new_zeros([size or 1 for size in values.shape])
        return largest(values, self.cast, self.along)


class _Product(Function):
    """``x W^T``, all three products of it in float8. Collective."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, how: Float8, cut: frozenset[str], group: TPGroup) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.how, ctx.cut, ctx.group = how, cut, group
        config = how.config
        left, right = _rounded(
            [
                _Operand(x.reshape(-1, x.shape[-1]), ("tokens", "in"), "input", config.cast_config_input, -1),
                _Operand(weight.t(), ("in", "out"), "weight", config.cast_config_weight, 0),
            ],
            ctx,
        )
        return torch.mm(left, right).view(*x.shape[:-1], weight.shape[0])

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None, None, None, None]:
        x, weight = ctx.saved_tensors
        config = ctx.how.config
        rows, of_rows = x.reshape(-1, x.shape[-1]), grad.reshape(-1, grad.shape[-1])
        of_x = of_weight = None
        operands: list[_Operand] = []
        if ctx.needs_input_grad[0]:
            operands += [
                _Operand(of_rows, ("tokens", "out"), "grad_output", config.cast_config_grad_output, -1),
                _Operand(weight.t(), ("in", "out"), "weight", config.cast_config_weight_for_grad_input, -1),
            ]
        if ctx.needs_input_grad[1]:
            cast = config.cast_config_grad_output_for_grad_weight
            operands += [
                _Operand(of_rows, ("tokens", "out"), "grad_output", cast, 0),
                _Operand(rows, ("tokens", "in"), "input", config.cast_config_input_for_grad_weight, 0),
            ]
        rounded = _rounded(operands, ctx)
        if ctx.needs_input_grad[0]:
            of_x = torch.mm(rounded[0], rounded[1].t()).view(x.shape)
        if ctx.needs_input_grad[1]:
            of_weight = torch.mm(rounded[-2].t(), rounded[-1])
        return of_x, of_weight, None, None, None


def _rounded(operands: Sequence[_Operand], ctx: Any) -> list[Tensor]:
    """The operands in float8, but for those that stay as they are. Collective if any goes along a dim that is cut."""
    found = {at: operand.largest() for at, operand in enumerate(operands) if operand.is_rounded()}
    parts = [at for at, scale in found.items() if ctx.cut.intersection(_covered(operands[at], scale))]
    if parts:
        # One exchange for all, in a dtype that has the numbers of any of them.
        values = torch.cat([found[at].flatten().double() for at in parts])
        wholes = reduce_values(values, ctx.group, "max").split([found[at].numel() for at in parts])
        found |= {at: whole.view(found[at].shape) for at, whole in zip(parts, wholes, strict=True)}
    return [
        to_float8(each.values, found[at], each.cast, each.along, each.role, ctx.how.config, ctx.how.products)
        if at in found
        else each.values
        for at, each in enumerate(operands)
    ]


def _covered(operand: _Operand, scale: Tensor) -> Collection[str]:
    """The dims that one scale goes along."""
    return operand.dims if scale.ndim == 0 else (operand.dims[operand.along],)
