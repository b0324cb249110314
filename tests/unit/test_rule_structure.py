"""Operators in a row: what the rules learn of a block's parameters from how they are used."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers.integrations.moe  # noqa: F401 (registers the grouped product)
from rule_truth import Tape
from torch import Tensor, nn
from torch.nn import functional as F

from lightning_autotp import make_plan
from lightning_autotp.layouts.dims import Axis, Concat, Dim, Product, leaves
from lightning_autotp.operators import Relation, record, relate
from lightning_autotp.operators.axes import Axes

TOKENS, CHOSEN, EXPERTS, HIDDEN, INNER = 5, 2, 4, 6, 32


def described(axes: Axes, dim: Dim) -> Any:
    """A dim as nested tuples of sizes: ``("*", ...)`` for a product, ``("+", ...)`` for sections."""
    dim = axes.resolve(dim)
    if isinstance(dim, Axis):
        return dim.size
    if isinstance(dim, Product):
        return ("*", *(described(axes, factor) for factor in dim.factors))
    return ("+", *(described(axes, section) for section in dim.sections))


class Learnt:
    """What the rules know of a tape's tensors in the end."""

    def __init__(self, tape: Tape) -> None:
        self.tape = tape
        self.relations, self.axes = relate(tape.graph)

    def dims(self, tensor: Tensor) -> tuple[Dim, ...]:
        number = self.tape.number(tensor)
        for relation in self.relations:
            for found in (relation.inputs, relation.outputs):
                if number in found:
                    return tuple(map(self.axes.resolve, found[number]))
        raise AssertionError("no operator uses this tensor")

    def text(self, tensor: Tensor) -> list[Any]:
        return [described(self.axes, dim) for dim in self.dims(tensor)]

    def is_free(self, dim: Dim) -> bool:
        """Whether no operator needs the dim whole."""
        mine = {axis.id for axis in leaves(self.axes.resolve(dim))}
        return not any(mine & self._ids(relation.whole) for relation in self.relations)

    def contracting(self, dim: Dim) -> list[str]:
        mine = {axis.id for axis in leaves(self.axes.resolve(dim))}
        return [r.operator.name for r in self.relations if mine & self._ids(r.contracted)]

    def _ids(self, dims: list[Dim]) -> set[int]:
        return {axis.id for dim in dims for axis in leaves(self.axes.resolve(dim))}


def experts(tape: Tape, *, interleaved: bool, transposed: bool) -> dict[str, Tensor]:
    """Rows sorted by their expert, two grouped products with a gate between, rows weighted and put back."""
    call = tape.call
    hidden, router = tape.parameter(TOKENS, HIDDEN), tape.parameter(EXPERTS, HIDDEN)
    gate_up = tape.parameter(EXPERTS, HIDDEN, 2 * INNER) if transposed else tape.parameter(EXPERTS, 2 * INNER, HIDDEN)
    down = tape.parameter(EXPERTS, INNER, HIDDEN) if transposed else tape.parameter(EXPERTS, HIDDEN, INNER)
    gate_up_bias = tape.parameter(EXPERTS, 2 * INNER)

    scores = call("aten.softmax.int", call("aten.linear.default", hidden, router), -1)
    weights, chosen = call("aten.topk.default", scores, CHOSEN, -1)
    ids, order = call("aten.sort.default", call("aten.reshape.default", chosen, [-1]))
    weights = call("aten.index.Tensor", call("aten.reshape.default", weights, [-1]), [order])
    rows = call("aten.index.Tensor", hidden, [call("aten.floor_divide.default", order, CHOSEN)])
    counts = call("aten.histc.default", call("aten.to.dtype", ids, torch.float32), EXPERTS, 0, EXPERTS - 1)
    ends = call("aten.to.dtype", call("aten.cumsum.default", counts, 0), torch.int32)

    def grouped(x: Tensor, matrices: Tensor) -> Tensor:
        matrices = matrices if transposed else call("aten.transpose.int", matrices, -2, -1)
        return call("transformers.grouped_mm_fallback.default", x, matrices, ends)

    fused = call("aten.add.Tensor", grouped(rows, gate_up), call("aten.index.Tensor", gate_up_bias, [ids]))
    if interleaved:
        gate, up = (call("aten.slice.Tensor", fused, -1, start, 2**63 - 1, 2) for start in (0, 1))
    else:
        gate, up = call("aten.chunk.default", fused, 2, -1)
    inner = call("aten.mul.Tensor", call("aten.silu.default", gate), up)
    out = grouped(inner, down)
    weighted = call("aten.mul.Tensor", out, call("aten.unsqueeze.default", weights, -1))
    places = tape.constant(torch.arange(TOKENS * CHOSEN))
    back = call("aten.index_put.default", call("aten.empty_like.default", order), [order], places)
    summed = call("aten.index.Tensor", weighted, [back])
    summed = call("aten.sum.dim_IntList", call("aten.view.default", summed, [TOKENS, CHOSEN, HIDDEN]), [1])
    return {"gate_up": gate_up, "gate_up_bias": gate_up_bias, "down": down, "out": out, "summed": summed}


@pytest.mark.parametrize("transposed", [True, False])
@pytest.mark.parametrize("interleaved", [True, False])
def test_the_inner_dim_of_experts_may_be_cut(interleaved: bool, transposed: bool) -> None:
    """Every expert is cut like an MLP: gate and up along their outputs, in whole pairs, down along its inputs.

    The 32 inner features are 4 units of 8: a grouped product's kernel takes whole rows of 16 bytes.
    """
    tape = Tape()
    block = experts(tape, interleaved=interleaved, transposed=transposed)
    learnt = Learnt(tape)
    fused, inner = (2, 1) if transposed else (1, 2)
    wanted = ("*", 4, 2, 4, 2) if interleaved else ("+", ("*", 4, 8), ("*", 4, 8))
    assert learnt.text(block["gate_up"])[fused] == learnt.text(block["gate_up_bias"])[1] == wanted
    down = learnt.dims(block["down"])[inner]
    assert set(leaves(down)) <= set(leaves(learnt.dims(block["gate_up"])[fused]))
    units, *rest = leaves(down)
    assert units.size == 4
    assert learnt.is_free(units)
    assert not any(learnt.is_free(axis) for axis in rest)
    assert learnt.contracting(down) == ["transformers.grouped_mm_fallback.default"]
    assert not learnt.is_free(learnt.dims(block["down"])[0])


def test_what_follows_the_experts_is_linear() -> None:
    """Their pending sum is weighted, put back in order and added up per token before it is communicated."""
    tape = Tape()
    block = experts(tape, interleaved=False, transposed=False)
    learnt = Learnt(tape)
    pending = {tape.number(block["out"])}
    for relation in learnt.relations:
        if pending & set(relation.inputs):
            assert _passes(relation, pending), relation.operator.name
            pending |= set(relation.outputs)
    assert tape.number(block["summed"]) in pending


def _passes(relation: Relation, pending: set[int]) -> bool:
    return bool(relation.linear) and relation.linear == pending & set(relation.inputs)


@pytest.mark.parametrize("groups", [1, 2, 8])
def test_channels_of_convolutions(groups: int) -> None:
    """Channels pass a convolution where they are groups, and are contracted within one."""
    tape = Tape()
    before, weight = tape.parameter(8, 6), tape.parameter(8, 8 // groups, 3)
    x = tape.call("aten.linear.default", tape.parameter(2, 5, 6), before)
    out = tape.call("aten.conv1d.default", tape.call("aten.transpose.int", x, 1, 2), weight, None, groups=groups)
    learnt = Learnt(tape)
    channels, given = learnt.dims(before)[0], learnt.dims(out)[1]
    shared = set(leaves(channels)) & set(leaves(given))
    assert sum(axis.size for axis in shared) == (groups if groups > 1 else 0)
    assert bool(learnt.contracting(channels)) is (groups < 8)
    assert learnt.is_free(channels)


def test_whole_groups_of_a_normalisation_may_be_sharded() -> None:
    tape = Tape()
    x, weight = tape.parameter(2, 12, 5), tape.parameter(12)
    tape.call("aten.group_norm.default", x, 4, weight, tape.parameter(12))
    learnt = Learnt(tape)
    (channels,) = learnt.dims(weight)
    assert isinstance(channels, Product)
    assert [factor.size for factor in channels.factors] == [4, 3]
    assert [learnt.is_free(factor) for factor in channels.factors] == [True, False]


def test_the_start_of_a_step_is_no_position() -> None:
    """``x[..., 1::2]`` starts at 1 on every rank, ``x[..., 6:8]`` where its part does."""
    tape = Tape()
    x = tape.parameter(8)
    tape.call("aten.slice.Tensor", x, 0, 1, 8, 2)
    tape.call("aten.slice.Tensor", x, 0, 6, 8)
    known = record("aten.slice.Tensor")
    assert known is not None
    positions = [[name for name, _, _ in known.positions(operator)] for operator in tape.graph.operators]
    assert positions == [["end"], ["start", "end"]]


def test_padding_is_a_section_that_everyone_has() -> None:
    tape = Tape()
    x = tape.parameter(4, 6)
    padded = tape.call("aten.constant_pad_nd.default", x, [2, 1])
    learnt = Learnt(tape)
    sections = learnt.dims(padded)[1]
    assert isinstance(sections, Concat)
    assert sections.sections[1] == learnt.dims(x)[1]
    assert [learnt.is_free(section) for section in sections.sections] == [
        False,
        True,
        True,
    ]  # one element needs no axis


def test_a_view_that_cannot_be_divided_keeps_only_its_own_dims_whole() -> None:
    """Relative positions are shifted by viewing [q, k] as [k, q]; batch and heads are left alone."""
    tape = Tape()
    x = tape.parameter(3, 4, 5, 6)
    shifted = tape.call("aten.view.default", x, [3, 4, 6, 5])
    padded = tape.call("aten.constant_pad_nd.default", tape.parameter(4, 5), [0, 1])
    chunks = tape.call("aten.view.default", padded, [4, 2, 3])
    learnt = Learnt(tape)
    assert learnt.dims(shifted)[:2] == learnt.dims(x)[:2]
    assert [learnt.is_free(dim) for dim in learnt.dims(x)] == [True, True, False, False]
    assert [learnt.is_free(dim) for dim in learnt.dims(chunks)] == [True, False, False]


def test_a_write_through_a_slice_cuts_what_is_written_to() -> None:
    """``zeros[..., 4:] = y`` has the sections of what it is joined from."""
    tape = Tape()
    start, part = tape.parameter(3, 10), tape.parameter(3, 6)
    out = tape.call("aten.slice_scatter.default", start, part, 1, 4, 10)
    learnt = Learnt(tape)
    sections = learnt.dims(out)[1]
    assert isinstance(sections, Concat)
    assert sections.sections[1] == learnt.dims(part)[1]
    assert learnt.is_free(sections)


def test_attention_broadcasts_over_the_batch() -> None:
    """A query without a batch of its own meets a mask that has one; the heads are sharded all the same."""

    class Attending(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.project, self.back = nn.Linear(12, 12, bias=False), nn.Linear(12, 12, bias=False)

        def forward(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
            heads = self.project(x).unflatten(-1, (4, 3)).transpose(1, 2)
            attended = F.scaled_dot_product_attention(heads, heads, heads, attn_mask=mask)
            return self.back(attended.transpose(1, 2).flatten(2)).sum()

    plan, _ = make_plan(Attending(), 2, example_inputs=(torch.zeros(1, 5, 12), torch.zeros(7, 1, 5, 5)))
    assert [str(parameter.layout) for parameter in plan.parameters] == ["S(0: 12 -> 6)", "S(1: 12 -> 6)"]
