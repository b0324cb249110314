"""Every rule against the truth: what it lets the solver do is done with real operators, and compared.

A case draws shapes and arguments for one operator and calls it on the tape; operands are parameters whose dims may be
products, concatenations or sections of other parameters' dims. The cases stand in the ``rule_cases`` modules, what
draws in :mod:`rule_draws`. See :mod:`rule_truth` for what is compared.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from rule_cases import CASES
from rule_draws import prove, rare_at_night
from rule_truth import Tape, Untrue, forced
from torch import Tensor, nn

from lightning_autotp.capture.capture import capture
from lightning_autotp.layouts.types import Shard
from lightning_autotp.operators import known_operators, operator, record, relate
from lightning_autotp.operators.graph import EXPERTS, KEPT, KERNEL_LINEAR_LOSS, KERNEL_LOSS, Graph, Ref

# Registered, but without a case of its own here.
ELSEWHERE = {
    "boundary": "the identity; its conversions are collectives with tests of their own",
    EXPERTS: "a module, not an operator of torch; tests/ranks/test_whole_experts.py tests it",
    KEPT: "makes nothing; tests/ranks/test_buffers.py",
    **dict.fromkeys((KERNEL_LOSS, KERNEL_LINEAR_LOSS), "no operators of torch; tests/ranks/test_hub_kernels.py"),
    "aten.cross_entropy_loss.default": "over sharded classes another loss runs; its relation is tested below",
}
# Every dim stays whole here.
WHOLE = {
    *(f"aten.{name}.default" for name in ("mean", "max", "min", "any", "all", "squeeze", "histc", "bincount")),
    "aten.multinomial.default",
    *(f"aten.{name}.default" for name in ("prod", "median", "nanmedian", "count_nonzero")),
    *("aten.norm.Scalar", "aten.norm.ScalarOpt_dtype"),
    *(f"aten.{name}.default" for name in ("nonzero", "nonzero_numpy", "where")),
    *(f"aten.{name}.default" for name in ("nll_loss", "nll_loss_nd", "nll_loss2d")),
}
# Over a sharded dim these give a Partial.
CONTRACTING = {
    *(f"aten.{name}.default" for name in ("sum", "linear", "matmul", "mm", "bmm", "mv", "dot", "vdot", "einsum")),
    *(
        f"aten.{name}.default"
        for name in ("addmm", "addmv", "baddbmm", "addbmm", "bilinear", "_grouped_mm", "embedding")
    ),
    *("aten.sum.dim_IntList", "aten.mean.dim", "transformers.grouped_mm_fallback.default", "aten.convolution.default"),
    *(f"aten.conv{n}d.{overload}" for n in (1, 2, 3) for overload in ("default", "padding")),
    *("aten.conv_transpose1d.default", "aten.conv_transpose2d.input", "aten.conv_transpose3d.input"),
}


@pytest.mark.parametrize("examples", [4, pytest.param(40, marks=pytest.mark.nightly)])
@pytest.mark.parametrize(
    "name", rare_at_night(name for name in known_operators() if record(name).rule and name not in ELSEWHERE)
)
def test_rule(name: str, examples: int) -> None:
    seen = prove(name, examples)
    while not seen["contracted" if name in CONTRACTING else "sharded"] and name not in WHOLE and examples < 100:
        examples *= 2  # a rare one in its case
        seen = prove(name, examples)
    assert (seen["sharded"] + seen["contracted"] > 0) is (name not in WHOLE), seen
    assert (seen["contracted"] > 0) is (name in CONTRACTING), seen


def test_every_operator_has_a_case() -> None:
    assert set(known_operators()) == CASES.keys() | ELSEWHERE.keys()


NEEDED: list[tuple[str, tuple[Any, ...]]] = [
    *((f"aten.{name}.int", (1,)) for name in ("softmax", "log_softmax", "unbind")),
    *((f"aten.{name}.default", (1,)) for name in ("cumsum", "sort", "argmax")),
    *((f"aten.{name}.default", ([1],)) for name in ("amax", "logsumexp", "flip")),
    *((f"aten.{name}.dim", ([1],)) for name in ("var", "std")),
    ("aten.max.dim", (1,)),
    ("aten.select.int", (1, 0)),
    ("aten.slice.Tensor", (1, 1, 6, 4)),
    ("aten.unfold.default", (1, 3, 1)),
    ("aten.pad.default", ([1, 1], "reflect")),
    ("aten.roll.default", ([1], [1])),
    ("aten.tril.default", ()),
    ("aten.linalg_vector_norm.default", (2, [1])),
    ("aten.constant_pad_nd.default", ([0, 1],)),
    ("aten.layer_norm.default", ([6],)),
    ("aten.rms_norm.default", ([6],)),
]


@pytest.mark.parametrize(("name", "arguments"), NEEDED)
def test_what_is_kept_whole_may_not_be_cut(name: str, arguments: tuple[Any, ...]) -> None:
    """The proof can fail: cutting the dim that such an operator needs is found out."""
    tape = Tape()
    operand = tape.parameter(4, 6)
    tape.call(name, operand, *arguments)
    with pytest.raises(Untrue):
        tape.play(forced(tape, name, operand, 1, 2), 2)


def test_what_ranks_share_is_not_summed() -> None:
    """Four ranks share two heads: they divide each one's features, but a value per head would count twice."""
    tape = Tape()
    features, scales = tape.parameter(6), tape.parameter(2, 1)
    heads = tape.call("aten.view.default", features, [2, 3])
    tape.call("aten.mul.Tensor", heads, scales)
    shared = [c for c in tape.combinations("aten.mul.Tensor", 4) if c.kind == "sharded"]
    assert any(
        layout.dims[0][1].is_shared for c in shared for layout in c.layouts.values() if isinstance(layout, Shard)
    )
    tape.call("aten.sum.default", scales)
    assert tape.prove("aten.sum.default", 4)["contracted"] == 0
    tape.call("aten.sum.dim_IntList", features, [0])
    assert tape.prove("aten.sum.dim_IntList", 4)["contracted"] > 0


@pytest.mark.parametrize("p", [0.0, 0.5])
def test_what_one_random_number_decides_for_is_kept_whole(p: float) -> None:
    """A channel's elements share their number, a score's value features too; a Partial is not dropped from."""
    tape = Tape()
    x = tape.parameter(4, 4, 4)
    tape.call("aten.feature_dropout.default", x, p, True)
    query, key, value = (tape.parameter(2, 4, 3, 5) for _ in range(3))
    tape.call("aten.scaled_dot_product_attention.default", query, key, value, None, p)

    def cut(name: str, tensor: Tensor) -> set[int]:
        layouts = [c.layouts[tape.number(tensor)] for c in tape.combinations(name, 2)]
        return {dim for layout in layouts if isinstance(layout, Shard) for dim, _ in layout.dims}

    assert cut("aten.feature_dropout.default", x) == ({0, 1} if p else {0, 1, 2})
    assert cut("aten.scaled_dot_product_attention.default", value) == ({0, 1} if p else {0, 1, 3})
    kinds = {combination.kind for combination in tape.combinations("aten.feature_dropout.default", 2)}
    assert ("linear" in kinds) is (p == 0.0)
    tape.call("aten.dropout.default", x, p, True)
    if p:
        with pytest.raises(Untrue):
            tape.play(forced(tape, "aten.feature_dropout.default", x, 2, 2), 2)


def test_what_ranks_share_is_not_dropped_from() -> None:
    """Four ranks share two heads: each pair would have to draw the same numbers for its head."""
    tape = Tape()
    features, scales = tape.parameter(6), tape.parameter(2, 1)
    heads = tape.call("aten.view.default", features, [2, 3])
    tape.call("aten.mul.Tensor", heads, scales)
    tape.call("aten.dropout.default", heads, 0.5, True)
    tape.call("aten.alpha_dropout.default", scales, 0.5, True)
    assert tape.prove("aten.dropout.default", 4)["sharded"] > 0  # heads and features: disjoint parts
    assert tape.prove("aten.alpha_dropout.default", 4)["sharded"] == 0


def test_two_draws_in_one_call_stay_whole() -> None:
    tape = Tape()
    x = tape.parameter(4, 4)
    tape.call("aten.dropout.default", x, 0.5, True)
    tape.call("aten.alpha_dropout.default", x, 0.5, True)
    assert tape.prove("aten.dropout.default", 2)["sharded"] > 0
    first, second = tape.graph.operators
    tape.graph.operators[1] = replace(second, call=first.call)
    assert tape.prove("aten.dropout.default", 2)["sharded"] == 0


@pytest.mark.parametrize("reduction", [0, 1, 2])
def test_cross_entropy_may_have_sharded_classes_only(reduction: int) -> None:
    tape = Tape()
    logits, target = tape.parameter(6, 8), tape.constant(torch.tensor([0, 7, 3, 1, 1, 5]))
    tape.call("aten.cross_entropy_loss.default", logits, target, None, reduction)
    tape.call("aten.cross_entropy_loss.default", logits, tape.constant(torch.rand(6, 8).double()), None, reduction)
    (by_index, by_probability), _ = relate(tape.graph)
    tokens, classes = by_index.inputs[tape.number(logits)]
    assert by_index.contracted == [classes]
    assert by_index.needs_implementation
    assert {tokens, *by_index.outputs[by_index.operator.outputs[0]]} <= set(by_index.whole)
    assert classes not in by_index.whole
    assert {tokens, classes} <= set(by_probability.whole)
    assert not by_probability.contracted
    assert not by_probability.needs_implementation


UNUSUAL: list[tuple[str, Callable[[Tape], tuple[Any, ...]]]] = [
    ("aten.sum.dim_IntList", lambda tape: (tape.parameter(), [-1])),
    ("aten.mean.dim", lambda tape: (tape.parameter(), [0])),
    ("aten.amax.default", lambda tape: (tape.parameter(), [0])),
    ("aten.softmax.int", lambda tape: (tape.parameter(), -1)),
    ("aten.cumsum.default", lambda tape: (tape.parameter(), 0)),
    ("aten.squeeze.dim", lambda tape: (tape.parameter(), 0)),
    ("aten.flip.default", lambda tape: (tape.parameter(4), [])),
    ("aten.roll.default", lambda tape: (tape.parameter(4, 4), [3])),
    ("aten.slice.Tensor", lambda tape: (tape.parameter(6), 0, 4, 2)),
    ("aten.view.default", lambda tape: (tape.parameter(0, 4), [2, 0])),
    ("aten.cat.default", lambda tape: ([tape.parameter(0), tape.parameter(4, 4)], 1)),
    ("aten.linear.default", lambda tape: (tape.parameter(4, 4), tape.parameter(4))),
    ("aten.matmul.default", lambda tape: (tape.parameter(4, 4), tape.parameter(4))),
    ("aten.scaled_dot_product_attention.default", lambda tape: tuple(tape.parameter(4, 4) for _ in range(3))),
]


@pytest.mark.parametrize(("name", "arguments"), UNUSUAL)
def test_unusual_arguments(name: str, arguments: Callable[[Tape], tuple[Any, ...]]) -> None:
    tape = Tape()
    tape.call(name, *arguments(tape))
    assert tape.prove(name, 2)["whole"] > 0


@pytest.mark.parametrize("option", ["scale_grad_by_freq", "sparse"])
def test_an_embedding_with_such_gradients_keeps_its_rows(option: str) -> None:
    tape = Tape()
    ids = tape.constant(torch.tensor([0, 3, 1]))
    tape.call("aten.embedding.default", tape.parameter(4, 6), ids, layer="Embedding")
    assert tape.prove("aten.embedding.default", 2)["contracted"] == 1
    tape = Tape()
    tape.call("aten.embedding.default", tape.parameter(4, 6), tape.constant(ids), layer="Embedding", **{option: True})
    assert all(combination.kind != "contracted" for combination in tape.combinations("aten.embedding.default", 2))


class Mixed(nn.Module):
    """Operators with defaults, lists, dtypes and several results."""

    def __init__(self) -> None:
        super().__init__()
        self.x = nn.Parameter(torch.zeros(3, 8))
        self.weight = nn.Parameter(torch.zeros(12, 8))

    def forward(self) -> Tensor:
        y = nn.functional.linear(self.x, self.weight).view(3, 2, 6).transpose(0, 1)
        first, second = y.softmax(-1).chunk(2, dim=2)
        return torch.cat([first, second.to(torch.float64)], 1).sum(dim=(0, 2))


def test_a_tape_is_what_a_capture_gives() -> None:
    tape = Tape()
    x, weight = (tape.parameter(*shape, dtype=torch.float32) for shape in ((3, 8), (12, 8)))
    y = tape.call("aten.linear.default", x, weight)
    y = tape.call("aten.transpose.int", tape.call("aten.view.default", y, [3, 2, 6]), 0, 1)
    first, second = tape.call("aten.chunk.default", tape.call("aten.softmax.int", y, -1), 2, 2)
    second = tape.call("aten.to.dtype", second, torch.float64)
    tape.call("aten.sum.dim_IntList", tape.call("aten.cat.default", [first, second], 1), [0, 2])

    def described(graph: Graph) -> list[Any]:
        def plain(value: Any) -> Any:
            if isinstance(value, tuple):
                return tuple(map(plain, value))
            return graph.tensors[value.tensor] if isinstance(value, Ref) else value

        operators = [operator for operator in graph.operators if operator.boundary is None]
        return [(op.name, [(name, plain(value)) for name, value in op.arguments]) for op in operators]

    assert described(tape.graph) == described(capture(Mixed(), ()))


def test_an_operator_is_declared_once() -> None:
    both = r"aten\.neg\.default is declared twice: at .*pointwise\.py:\d+ and at .*test_rules\.py:\d+"
    with pytest.raises(ValueError, match=both):
        operator("aten.neg.default")(lambda site: ())
