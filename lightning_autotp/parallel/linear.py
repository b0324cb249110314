"""Linear layers whose weight is cut over the ranks, column-wise (outputs) or row-wise (inputs).

Over ``tp`` ranks, with a weight ``W [out, in]`` as ``nn.Linear`` keeps it, of which rank ``r`` has ``W_r``:

======================  ===================================  ======================================
..                      column: ``W_r [out/tp, in]``         row: ``W_r [out, in/tp]``
======================  ===================================  ======================================
forward                 ``y_r = x W_r^T (+ b_r)``            ``y = sum_r x_r W_r^T (+ b)``
input gradient          ``dx = sum_r dy_r W_r``              ``dx_r = dy W_r``
weight gradient         ``dW_r = dy_r^T x``                  ``dW_r = dy^T x_r``
bias gradient           ``db_r = sum over tokens of dy_r``   ``db = sum over tokens of dy``
what is communicated    ``dx`` (all-reduce, backward: *f*)   ``y`` (all-reduce, forward: *g*)
======================  ===================================  ======================================

So a column layer followed by a row layer, with anything elementwise between them, costs one all-reduce forward and one
backward (Megatron-LM, https://arxiv.org/abs/1909.08053). ``/tp`` is short for "what this rank owns": the shares come
from an :class:`~lightning_autotp.layouts.ownership.Ownership` and may be uneven, or consist of several sections.

The parameters are plain local ``nn.Parameter``s, left empty by the constructors, which communicate nothing. The layers
are ``nn.Linear``s (libraries look for that) whose ``in_features`` and ``out_features`` are the whole model's.
"""

from __future__ import annotations

from typing import ClassVar, TypeVar

import torch
from torch import Tensor, nn

from lightning_autotp.layouts.ownership import Ownership
from lightning_autotp.layouts.plan import ImplementationPlan
from lightning_autotp.layouts.types import Shard
from lightning_autotp.parallel.collectives import (
    all_gather,
    all_reduce,
    keep_once,
    scatter,
)
from lightning_autotp.parallel.float8 import local_product
from lightning_autotp.parallel.layer_runs import NotesRuns
from lightning_autotp.parallel.local_parameters import LocalParameters, become, localize_parameter, take_parts
from lightning_autotp.parallel.overlap import product, replicate
from lightning_autotp.quantized.float8 import float8_of
from lightning_autotp.ranks.group import TPGroup
from lightning_autotp.solving.implementations import DEFERRED_SUM, Implementation

_Column = TypeVar("_Column", bound="ColumnParallelLinear")
_Row = TypeVar("_Row", bound="RowParallelLinear")


class _CutLinear(nn.Linear, NotesRuns):
    """A linear layer of whose weight every rank has some along :attr:`cut_dim`, by an ownership map."""

    cut_dim: ClassVar[int]
    ownership: Ownership
    group: TPGroup

    def reset_parameters(self) -> None:
        """Fill in this rank's part of what ``nn.Linear`` would draw with the same seed, by drawing all of it."""
        like = self.weight
        if not like.is_meta:
            whole = nn.Linear(self.in_features, self.out_features, self.bias is not None, like.device, like.dtype)
            take_parts(self, whole, self.cut_dim, self.ownership, self.group)


class ColumnParallelLinear(_CutLinear):
    """A linear layer of which every rank computes some output features.

    ================  ======================================================  ===========================
    tensor            shape on a rank                                         type
    ================  ======================================================  ===========================
    input             ``[batch, ..., in]``                                    Invariant
    .                 ``[batch, ..., in]`` (``input_is_replicated``)          Replicate
    weight            ``[out/tp, in]``                                        Shard(0)
    bias              ``[out/tp]``                                            Shard(0)
    output            ``[batch, ..., out/tp]``                                Shard(-1)
    .                 ``[batch, ..., out]`` (``gather_output``)               Invariant
    ================  ======================================================  ===========================

    Forward and backward are collective, as the flags say: the input gradient is all-reduced, unless
    ``input_is_replicated``: then that is the caller's, who does it once for all the layers with this input. Where the
    caller has gathered the input (sequence parallelism), the backward gathers it again.

    Args:
        in_features: input features.
        out_features: output features of the whole layer.
        ownership: which output features each rank has.
        group: the tensor-parallel group.
        bias: whether there is a bias.
        gather_output: make the output whole on every rank.
        input_is_replicated: the input has gone through ``copy_to_tensor_parallel`` already.
        device: where to make the (empty) parameters.
        dtype: their dtype.

    Example:
        >>> group = TPGroup(name="", rank=0, size=2)  # without a process group: layers on meta only
        >>> ownership = Ownership.even(112, group.size)
        >>> layer = ColumnParallelLinear(64, 112, ownership, group, bias=False, device="meta")
        >>> layer
        ColumnParallelLinear(in_features=64, out_features=112 -> 56, bias=False, gather_output=False)
        >>> layer(torch.empty(2, 5, 64, device="meta")).shape
        torch.Size([2, 5, 56])
    """

    cut_dim = 0

    def __init__(
        self,
        in_features: int,
        out_features: int,
        ownership: Ownership,
        group: TPGroup,
        bias: bool = True,
        *,
        gather_output: bool = False,
        input_is_replicated: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(in_features, out_features, bias, device="meta", dtype=dtype)
        self._divide(ownership, group, gather_output, input_is_replicated)
        self.to_empty(device=device or torch.get_default_device())

    @classmethod
    def convert(
        cls: type[_Column],
        linear: nn.Linear,
        ownership: Ownership,
        group: TPGroup,
        *,
        gather_output: bool = False,
        input_is_replicated: bool = False,
        local: LocalParameters | None = None,
    ) -> _Column:
        """Make an existing layer (on meta or with values) column-parallel, in place. Not collective.

        Args:
            linear: the layer; its hooks stay, and a subclass keeps its forward if that calls ``super().forward``.
            ownership: which output features each rank has.
            group: the tensor-parallel group.
            gather_output: see the class.
            input_is_replicated: see the class.
            local: see :func:`~lightning_autotp.parallel.local_parameters.localize_parameter`.

        Returns:
            ``linear`` itself.

        Raises:
            TypeError: if ``linear`` is not a convertible ``nn.Linear``.
            ValueError: if the ownership map does not fit it.
        """
        layer = become(linear, cls, nn.Linear)
        layer._divide(ownership, group, gather_output, input_is_replicated, local)
        return layer

    def _divide(
        self,
        ownership: Ownership,
        group: TPGroup,
        gather_output: bool,
        input_is_replicated: bool,
        local: LocalParameters | None = None,
    ) -> None:
        for name in ("weight",) if self.bias is None else ("weight", "bias"):
            localize_parameter(self, name, 0, ownership, group, local)
        self.ownership, self.group = ownership, group
        self.gather_output, self.input_is_replicated = gather_output, input_is_replicated

    def forward(self, input: Tensor) -> Tensor:
        """``[batch, ..., in] -> [batch, ..., out/tp]``; see the class for the flags. Collective."""
        self.note_run()
        if not self.input_is_replicated:
            input = replicate(input, self.group, (self,) if float8_of(self) is None else ())
        output = product(input, self, self.group)
        if self.gather_output:
            output = all_gather(output, self.group, Shard(((output.dim() - 1, self.ownership),)))
        return output

    def extra_repr(self) -> str:
        """What ``repr`` shows: whole and local sizes, and the flags."""
        text = (
            f"in_features={self.in_features}, out_features={_sizes(self.ownership, self.group)}, "
            f"bias={self.bias is not None}, gather_output={self.gather_output}"
        )
        if self.input_is_replicated:
            text += ", input_is_replicated=True"
        return text + _in_float8(self)


class RowParallelLinear(_CutLinear):
    """A linear layer of which every rank has some input features; the ranks' products add up.

    ================  ======================================================  ===========================
    tensor            shape on a rank                                         type
    ================  ======================================================  ===========================
    input             ``[batch, ..., in/tp]``                                 Shard(-1)
    .                 ``[batch, ..., in]`` (not ``input_is_parallel``)        Invariant
    weight            ``[out, in/tp]``                                        Shard(1)
    bias              ``[out]``                                               Invariant
    output            ``[batch, ..., out]``                                   Invariant
    .                 ``[batch, ..., out]`` (not ``reduce_output``)           Partial
    ================  ======================================================  ===========================

    The forward is collective unless ``reduce_output=False``; the backward is when the input is not parallel. The bias
    is added once, after the reduction, so it is the same on every rank; in a sum that is left to the caller it counts
    once.

    Args:
        in_features: input features of the whole layer.
        out_features: output features.
        ownership: which input features each rank has; a feature must have one owner, else it would count twice.
        group: the tensor-parallel group.
        bias: whether there is a bias.
        input_is_parallel: the input is this rank's features already; otherwise the layer takes them from a whole input.
        reduce_output: ``False`` leaves the sum to the caller, who may add other such sums to it first.
        device: where to make the (empty) parameters.
        dtype: their dtype.

    Example:
        >>> group = TPGroup(name="", rank=1, size=2)  # without a process group: layers on meta only
        >>> layer = RowParallelLinear(7, 64, Ownership.even(7, group.size), group, device="meta")
        >>> layer
        RowParallelLinear(in_features=7 -> 3, out_features=64, bias=True, input_is_parallel=True)
        >>> layer(torch.empty(2, 5, 3, device="meta")).shape
        torch.Size([2, 5, 64])
    """

    cut_dim = 1

    def __init__(
        self,
        in_features: int,
        out_features: int,
        ownership: Ownership,
        group: TPGroup,
        bias: bool = True,
        *,
        input_is_parallel: bool = True,
        reduce_output: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(in_features, out_features, bias, device="meta", dtype=dtype)
        self._divide(ownership, group, input_is_parallel, reduce_output)
        self.to_empty(device=device or torch.get_default_device())

    @classmethod
    def convert(
        cls: type[_Row],
        linear: nn.Linear,
        ownership: Ownership,
        group: TPGroup,
        *,
        input_is_parallel: bool = True,
        reduce_output: bool = True,
        local: LocalParameters | None = None,
    ) -> _Row:
        """Make an existing layer (on meta or with values) row-parallel, in place; the bias stays. Not collective.

        Arguments, result and errors are :meth:`ColumnParallelLinear.convert`'s, with this class's flags.
        """
        layer = become(linear, cls, nn.Linear)
        layer._divide(ownership, group, input_is_parallel, reduce_output, local)
        return layer

    def _divide(
        self,
        ownership: Ownership,
        group: TPGroup,
        input_is_parallel: bool,
        reduce_output: bool,
        local: LocalParameters | None = None,
    ) -> None:
        if ownership.is_shared:
            raise ValueError(
                f"a row-parallel layer needs one owner for every input feature, but the map {ownership} shares some: "
                "their products would be added more than once"
            )
        localize_parameter(self, "weight", 1, ownership, group, local)
        self.ownership, self.group = ownership, group
        self.input_is_parallel, self.reduce_output = input_is_parallel, reduce_output

    def forward(self, input: Tensor) -> Tensor:
        """``[batch, ..., in/tp] -> [batch, ..., out]``; see the class for the flags. Collective."""
        self.note_run()
        if not self.input_is_parallel:
            input = scatter(input, self.group, Shard(((input.dim() - 1, self.ownership),)))
        output = local_product(input, self, ("in",), self.group)
        bias: Tensor | None = self.bias
        if self.reduce_output:
            output = all_reduce(output, self.group)
        elif bias is not None:
            bias = keep_once(bias, self.group)
        if bias is not None and bias.dtype != output.dtype:  # under autocast
            bias = bias.to(output.dtype)
        return output if bias is None else output + bias

    def extra_repr(self) -> str:
        """What ``repr`` shows: whole and local sizes, and the flags."""
        text = (
            f"in_features={_sizes(self.ownership, self.group)}, out_features={self.out_features}, "
            f"bias={self.bias is not None}, input_is_parallel={self.input_is_parallel}"
        )
        return text + ("" if self.reduce_output else ", reduce_output=False") + _in_float8(self)


def _in_float8(layer: nn.Linear) -> str:
    return "" if float8_of(layer) is None else ", in_float8=True"


def _sizes(ownership: Ownership, group: TPGroup) -> str:
    return f"{ownership.size} -> {ownership.local_size(group.rank)}"


def _build_column(
    module: nn.Linear,
    use: ImplementationPlan,
    layout: Shard,
    group: TPGroup,
    local: LocalParameters,
) -> None:
    (_, ownership), *_ = layout.dims
    ColumnParallelLinear.convert(
        module,
        ownership,
        group,
        local=local,
        input_is_replicated=use.input is None,
        gather_output=use.output is not None,
    )


def _build_row(
    module: nn.Linear,
    use: ImplementationPlan,
    layout: Shard,
    group: TPGroup,
    local: LocalParameters,
) -> None:
    (_, ownership), *_ = layout.dims
    RowParallelLinear.convert(
        module,
        ownership,
        group,
        local=local,
        input_is_parallel=use.input is None,
        reduce_output=use.output != DEFERRED_SUM,
    )


COLUMN = Implementation(
    name="column",
    operator="aten.linear.default",
    layer="Linear",
    operand="weight",
    dims=(0,),
    inputs=(("I", "R"),),
    outputs=(("S", "I"),),
    resaves_shard="input",
    build=_build_column,
)

ROW = Implementation(
    name="row",
    operator="aten.linear.default",
    layer="Linear",
    operand="weight",
    dims=(1,),
    inputs=(("I", "S"),),
    outputs=(("P", "I"), DEFERRED_SUM),
    bias_operand="bias",
    build=_build_row,
)
