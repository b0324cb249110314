"""Declarations of kernels: what the notation says, how calls are seen in a trace, and that they are tried."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from kernel_stand_ins import flash_attn_func, module
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

from lightning_autotp import DeclarationError, Plan, declare, make_plan
from lightning_autotp.capture import trials
from lightning_autotp.capture.capture import CaptureError
from lightning_autotp.capture.whole_indices import part_of_object, with_whole_indices
from lightning_autotp.operators.declared import Declaration, declaration_of
from lightning_autotp.operators.notation import formula, notation
from lightning_autotp.parallel.implementations import IMPLEMENTATIONS
from lightning_autotp.proving.read_plan import read_plan
from lightning_autotp.solving.planned import PlanMismatch

ATTENTION = "q[b s h d], k[b t h/g d], v[b t h/g e] -> o[b s h e]"
WHOLE = "s t d e"


# -- the notation ----------------------------------------------------------------------------------------------------


def shapes(text: str, given: dict[str, tuple[int, ...]], **arguments: Any) -> list[Any]:
    made = notation(text)
    sizes = made.sizes(given, arguments)
    return [result and made.shape(result, sizes) for result in made.returned(arguments.get)]


def test_shapes_of_results() -> None:
    heads = {"q": (3, 61, 8, 16), "k": (3, 67, 2, 16), "v": (3, 67, 2, 5)}
    assert shapes(ATTENTION, heads) == [(3, 61, 8, 5)]
    assert notation(ATTENTION).sizes(heads, {})["g"] == 4
    assert shapes("x[... (h d)], heads=h -> y[... h d]", {"x": (3, 4, 24)}, heads=4) == [(3, 4, 4, 6)]
    assert shapes("x[b 3 h], x[b h] -> y[h b]", {"x": (5, 7)}) == [(7, 5)]
    assert shapes("x[b 3 h], x[b h] -> y[h b]", {"x": (5, 3, 7)}) == [(7, 5)]
    assert shapes("x[b s], mask[b s] -> y[s b]", {"x": (5, 7), "mask": (1, 7)}) == [(7, 5)]


@pytest.mark.parametrize(
    ("condition", "arguments", "results"),
    [
        ("if lse", {"lse": True}, 2),
        ("if lse", {"lse": False}, 1),
        ("if lse", {}, 1),
        ("if lse else None", {}, 2),
        ("if not lse", {}, 2),
        ("if kind=full", {"kind": "full"}, 2),
        ("if kind=full", {"kind": "none"}, 1),
        ("if lse or both", {"both": 1}, 2),
        ("if seqlens", {"seqlens": torch.zeros(3)}, 2),
    ],
)
def test_results_that_flags_add(condition: str, arguments: dict[str, Any], results: int) -> None:
    assert len(shapes(f"x[a] -> y[a], z[a] {condition}", {"x": (4,)}, **arguments)) == results


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("q[a]", "no '->'"),
        ("q[a b!] -> o[a]", "'b!'"),
        ("q a -> o[a]", "'q a' is not like"),
        ("q[a] -> o[c]", "c is no dim of an argument"),
        ("k[b h/g] -> o[b h/g]", "h/g needs an argument with the dim that it groups"),
    ],
)
def test_a_text_that_is_not_understood(text: str, said: str) -> None:
    with pytest.raises(DeclarationError, match=said.replace("(", r"\(")):
        notation(text)


def test_flops_are_a_formula_of_the_dims() -> None:
    sizes = dict(zip("bhstde", (3, 8, 61, 67, 16, 5), strict=True))
    assert formula("2 b h s t (d + e)", frozenset(sizes))(sizes) == 2 * 3 * 8 * 61 * 67 * 21
    for wrong in ("2 b z", "2 b (", "__import__('os')", "b ; h"):
        with pytest.raises(DeclarationError, match="flops"):
            formula(wrong, frozenset(sizes))


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"whole": frozenset("td")}, "no result has s"),
        ({"whole": frozenset("stdx")}, "whole='x' is not in"),
        ({"whole": frozenset("std"), "summed": frozenset("t")}, "t is both whole and summed"),
        ({"whole": frozenset("std"), "linear": ("w",)}, "linear='w' is not in"),
    ],
)
def test_a_declaration_that_contradicts_its_text(options: dict[str, Any], said: str) -> None:
    with pytest.raises(DeclarationError, match=said):
        Declaration("a.b", "q[b s d], k[b t d] -> o[b]", **options)


# -- calls in a trace ------------------------------------------------------------------------------------------------


def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    if type(q) is not Tensor:
        raise RuntimeError("the kernel ran without values")
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    return F.scaled_dot_product_attention(q, k, v, enable_gqa=True).transpose(1, 2)


class Attention(nn.Module):
    """8 query heads and 4 key/value heads of 16."""

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(32, size, bias=False) for size in (128, 64, 64))
        self.o = nn.Linear(128, 32, bias=False)
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (layer(x).unflatten(-1, (-1, 16)) for layer in (self.q, self.k, self.v))
        out: Tensor = self.o(self.function(q, k, v).flatten(2))
        return out


class Gated(nn.Module):
    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self.gate, self.up, self.down = nn.Linear(32, 64), nn.Linear(32, 64), nn.Linear(64, 32)
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.down(self.function(self.gate(x), self.up(x)))
        return out


def cuts(model: nn.Module) -> dict[str, str]:
    plan, _ = make_plan(model, 2, example_inputs=torch.zeros(3, 7, 32))
    return {parameter.names[0]: str(parameter.layout) for parameter in plan.parameters}


BY_HEADS = {
    "q.weight": "S(0: 128 -> 64)",
    "k.weight": "S(0: 64 -> 32)",
    "v.weight": "S(0: 64 -> 32)",
    "o.weight": "S(1: 128 -> 64)",
}


def copied(function: Callable[..., Any], name: str) -> Any:
    """The same function, for another declaration."""
    namespace: dict[str, Any] = {"F": F, "Tensor": Tensor, "attention": function}
    exec(f"def {name}(q, k, v):\n    return attention(q, k, v)", namespace)
    namespace[name].__module__ = __name__
    return namespace[name]


def test_a_declared_function_is_taken_by_identity() -> None:
    """Whatever name code has for it, and as the function that it was afterwards."""
    one = copied(attention, "one")
    declare(one, ATTENTION, whole=WHOLE, flops="2 b h s t (d + e)")
    code, signature = one.__code__, dict(vars(one))

    def wrapper(*args: Tensor) -> Tensor:
        return one(*args)

    for held in (one, functools.partial(one), wrapper, {"attention": one}["attention"]):
        assert cuts(Attention(held)) == BY_HEADS
    assert one.__code__ is code
    assert dict(vars(one)) == signature
    x = torch.randn(2, 5, 4, 16)
    torch.testing.assert_close(one(x, x, x), attention(x, x, x))


def test_code_may_look_at_the_frame_of_a_declared_closure(monkeypatch: pytest.MonkeyPatch) -> None:
    """Python reads the variables of a closure from its frame, which is another function's while a model is traced."""
    args, factor, frames = [1.0], 2.0, list[set[str]]()

    def scaled(a: Tensor, b: Tensor) -> Tensor:
        return a * b * factor * args[0]

    def results(*given: Any) -> Any:
        frame: Any = sys._getframe()
        while frame.f_code.co_freevars != ("args", "factor"):
            frame = frame.f_back
        frames.append(set(frame.f_locals))
        return looked_at(*given)

    code, looked_at = scaled.__code__, Declaration.results
    monkeypatch.setattr(Declaration, "results", results)
    declare(scaled, "a[... f], b[... f] -> c[... f]")
    assert cuts(Gated(scaled))["down.weight"] == "S(1: 64 -> 32)"
    assert frames
    assert all({"args", "factor"} <= names for names in frames)
    assert scaled.__code__ is code


class Overwriting(torch.autograd.Function):
    """Writes the gradients of its inputs into those of its result, and into its inputs, as fused kernels do."""

    @staticmethod
    def forward(ctx: Any, a: Tensor, b: Tensor) -> Tensor:
        ctx.save_for_backward(a, b)
        return a * b

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        a, b = (saved.data for saved in ctx.saved_tensors)
        of_b = gradient * a
        return gradient.mul_(b), a.copy_(of_b)


def test_a_kernel_that_writes_gradients_in_place_is_tried_with_the_same_numbers_each_time() -> None:
    declare(Overwriting, "a[... f], b[... f] -> c[... f]")
    assert cuts(Gated(Overwriting.apply))["down.weight"] == "S(1: 64 -> 32)"


def test_a_function_of_a_package_and_one_that_is_not_written_in_python() -> None:
    class Kernel:
        """Stands for a binding: it has no code."""

        def __call__(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            return attention(q, k, v)

    kernel = Kernel()
    package = module("package_of_kernels", attend=kernel)
    declare("package_of_kernels.attend", ATTENTION, whole=WHOLE)
    try:
        assert cuts(Attention(lambda *args: package.attend(*args))) == BY_HEADS
        assert package.attend is kernel
    finally:
        del sys.modules["package_of_kernels"]


class Product(torch.autograd.Function):
    """With the context in its forward."""

    @staticmethod
    def forward(ctx: Any, a: Tensor, b: Tensor) -> Tensor:
        if type(a) is not Tensor:
            raise RuntimeError("the kernel ran without values")
        ctx.save_for_backward(a, b)
        return a * b

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        a, b = ctx.saved_tensors
        return gradient * b, gradient * a


class ProductInTwo(torch.autograd.Function):
    """With a context that is set up after its forward."""

    @staticmethod
    def forward(a: Tensor, b: Tensor) -> Tensor:
        if type(a) is not Tensor:
            raise RuntimeError("the kernel ran without values")
        return a * b

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, Tensor], output: Tensor) -> None:
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        a, b = ctx.saved_tensors
        return gradient * b, gradient * a


@pytest.mark.parametrize("kind", [Product, ProductInTwo])
def test_an_autograd_function(kind: type[torch.autograd.Function]) -> None:
    apply = kind.apply  # code may have it under a name of its own
    before = dict(vars(kind))
    declare(kind, "a[... f], b[... f] -> c[... f]")
    layouts = cuts(Gated(apply))
    assert layouts["gate.weight"] == layouts["up.weight"] == "S(0: 64 -> 32)"
    assert layouts["down.weight"] == "S(1: 64 -> 32)"
    assert dict(vars(kind)) == before
    a, b = torch.randn(3, requires_grad=True), torch.randn(3)
    apply(a, b).sum().backward()
    torch.testing.assert_close(a.grad, b)


def with_gradient(name: str) -> Any:
    """A custom operator of attention whose kernel runs on the CPU."""
    kernel = torch.library.custom_op(name, mutates_args=())(custom_attention)
    kernel.register_fake(lambda q, k, v: torch.empty_like(q))

    def backward(ctx: Any, gradient: Tensor) -> Any:
        with torch.enable_grad():
            inputs = [saved.detach().requires_grad_() for saved in ctx.saved_tensors]
            return torch.autograd.grad(attention(*inputs), inputs, gradient)

    kernel.register_autograd(backward, setup_context=lambda ctx, inputs, output: ctx.save_for_backward(*inputs))
    return lambda *args: kernel(*args)  # what a module holds is copied with it, which such an object cannot be


def custom_attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return attention(q, k, v).contiguous()


def test_an_operator_of_torch_library() -> None:
    for name in ("declared", "overload"):
        kernel = with_gradient(f"autotp_tests::{name}")
        by_name = f"autotp_tests::{name}" if name == "declared" else torch.ops.autotp_tests.overload.default
        declare(by_name, ATTENTION, whole=WHOLE)
        assert cuts(Attention(kernel)) == BY_HEADS


@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize("kind", ["flash", "efficient", "cudnn"])
def test_what_torch_s_attention_runs_may_be_called_by_its_own_name(kind: str, device: str) -> None:
    run = getattr(torch.ops.aten, f"_scaled_dot_product_{kind}_attention")
    options: Any = (0.0, True) if kind == "flash" else (None, True, 0.0, True)

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q, k, v = (x.transpose(1, 2) for x in (q, k.repeat_interleave(2, 2), v.repeat_interleave(2, 2)))
        out: Tensor = run(q, k, v, *options, scale=0.5)[0]
        return out.transpose(1, 2)

    plan, _ = make_plan(Attention(attend), 2, example_inputs=torch.zeros(3, 7, 32), device=device)
    assert {p.names[0]: str(p.layout) for p in plan.parameters} == BY_HEADS
    assert [(sent.kind, sent.calls) for sent in plan.communication] == [("all_reduce", 1)]


FLEX = torch.ops.higher_order.flex_attention


def unmodified(score: Tensor, *_: Tensor) -> Tensor:
    return score


def through_flex(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    heads = (x.transpose(1, 2) for x in (q, k, v))
    mask = create_block_mask(lambda b, h, q, k: q >= k, None, None, q.shape[1], k.shape[1], device="cpu")
    out: Tensor = FLEX(*heads, unmodified, mask.as_tuple(), 0.25, {}, (), ())[0]
    return out.transpose(1, 2)


def test_a_higher_order_operator() -> None:
    """It is one operator in the trace; one that is not declared cannot be traced, and is named."""
    with pytest.raises(
        CaptureError, match=r'(?s)lightning_autotp.declare\("torch.ops.higher_order.flex_attention", ...\)'
    ):
        cuts(Attention(through_flex))
    text = "query[b h s d], key[b h/g t d], value[b h/g t e]"
    declare(FLEX, f"{text} -> out[b h s e], lse[b h s]:float32, largest[b h s]:float32", whole="s t d e")
    assert cuts(Attention(through_flex)) == BY_HEADS
    declared = declaration_of("torch.ops.higher_order.flex_attention")
    assert declared is not None
    assert declared.text.startswith(text)


def test_an_operator_that_is_not_declared_is_tried() -> None:
    """The plan says what its kernel was found to be; it is used when the user says so."""
    kernel = with_gradient("autotp_tests::unknown")
    model = Attention(kernel)
    _, solution = make_plan(model, 2, example_inputs=torch.zeros(3, 7, 32))
    (code,) = solution.graph.found.values()
    assert code == (
        'lightning_autotp.declare("autotp_tests::unknown",'
        ' "q[a b c d], k[a b c/group d], v[a b c/group d] -> out[a b c d]", whole="b d")'
    )
    assert cuts(model) != BY_HEADS
    declare("autotp_tests::unknown", "found")
    assert cuts(model) == BY_HEADS
    assert declaration_of("autotp_tests.unknown.default") is not None
    with pytest.raises(DeclarationError, match=r"only an operator of torch\.library"):
        declare(attention, "found")


def test_flex_attention_whose_scores_depend_on_the_head() -> None:
    """The whole model's index of a head is not a rank's: the function is given the former. Positions may be read."""
    slopes = torch.arange(1.0, 9.0)

    def positions(score: Tensor, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return score - (q - k)

    def by_head(score: Tensor, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return score - slopes[h] * (q - k)

    def model(modification: Any) -> nn.Module:
        def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            heads = (x.transpose(1, 2) for x in (q, k, v))
            return flex_attention(*heads, score_mod=modification, enable_gqa=True).transpose(1, 2)

        return Attention(attend)

    for modification in (None, positions):
        assert cuts(model(modification)) == BY_HEADS
    plan, solution = make_plan(model(by_head), 2, example_inputs=torch.zeros(3, 7, 32))
    assert {p.names[0]: str(p.layout) for p in plan.parameters} == BY_HEADS
    (read,) = plan.indices
    assert (read.leaf, read.attribute, read.place, read.held) == (3, "", 2, (((0, 4),), ((4, 8),)))
    assert Plan.from_json(plan.to_json()) == plan
    with pytest.raises(PlanMismatch, match="where the plan gives a function the whole model's indices"):
        read_plan(replace(plan, indices=()), solution.graph, IMPLEMENTATIONS)


def test_a_function_of_flex_attention_that_cannot_be_seen_through() -> None:
    """A rank's number of heads in the place of the model's keeps heads whole; what has no values, reads all indices."""

    def of_number(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        heads = q.shape[2]
        return through(lambda score, b, h, i, j: score - (h + 1) / heads, q, k, v)

    def by_value(score: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        raise RuntimeError("not without values")

    def through(modification: Any, *heads: Tensor) -> Tensor:
        return flex_attention(*(x.transpose(1, 2) for x in heads), score_mod=modification, enable_gqa=True).transpose(
            1, 2
        )

    assert any(sent.kind == "all_gather" for sent in planned(of_number).communication)
    plan = planned(functools.partial(through, by_value))
    assert {p.names[0]: str(p.layout) for p in plan.parameters} == BY_HEADS
    assert [(read.attribute, read.place) for read in plan.indices] == [("", 2)]


class RepeatedHeads:
    """Attention that repeats key/value heads for its kernel, where there are so many query heads, and else groups them.

    Args:
        heads: with how many it repeats them.
        dim: before which dim it repeats: 2 for each head several times in a row, 1 for all of them several times.
        flag: whether it says so where heads are grouped.
    """

    def __init__(self, heads: int, dim: int = 2, flag: bool = True) -> None:
        self.heads, self.dim, self.flag = heads, dim, flag

    def __call__(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        is_grouped = q.shape[1] != self.heads
        if not is_grouped:
            k, v = (self.repeated(x, q.shape[1] // x.shape[1]) for x in (k, v))
        return flex_attention(q, k, v, enable_gqa=is_grouped and self.flag).transpose(1, 2)

    def repeated(self, x: Tensor, times: int) -> Tensor:
        several = x.unsqueeze(self.dim)
        shape = [*several.shape]
        shape[self.dim] = times
        return several.expand(shape).reshape(x.shape[0], -1, *x.shape[2:])


@pytest.mark.parametrize("heads", [8, 4])
def test_key_value_heads_that_only_the_model_or_only_a_rank_repeats(heads: int) -> None:
    """8 query heads are 4 on a rank. To repeat all key/value heads in order is another computation."""
    by_heads, in_order = (planned(RepeatedHeads(heads, dim)) for dim in (2, 1))
    assert [(sent.kind, sent.calls) for sent in by_heads.communication] == [("all_reduce", 1)]
    assert any(sent.kind == "all_gather" for sent in in_order.communication)


def test_grouped_heads_need_the_flag() -> None:
    assert any(sent.kind == "all_gather" for sent in planned(RepeatedHeads(8, flag=False)).communication)


def planned(attend: Any) -> Plan:
    plan, _ = make_plan(Attention(attend), 2, example_inputs=torch.zeros(3, 7, 32))
    return plan


@pytest.mark.parametrize("runs", [((3, 7),), ((0, 2), (5, 6), (8, 11))])
def test_indices_of_the_whole_model(runs: tuple[tuple[int, int], ...]) -> None:
    """Of a rank's first index, its second, ..., as integers and as tensors."""
    whole = [index for start, stop in runs for index in range(start, stop)]
    read = with_whole_indices(1, runs, lambda score, head, position: (score, int(head), position))
    assert [read(-1, index, 5) for index in range(len(whole))] == [(-1, index, 5) for index in whole]
    assert [read(-1, torch.tensor(index), 5)[1] for index in range(len(whole))] == whole
    both = with_whole_indices(2, ((4, 9),), read)
    assert both(-1, 0, 1) == (-1, whole[0], 5)


def test_a_part_of_a_block_mask() -> None:
    """A rank's heads of one: its tensors have the blocks of those, and its function is given the whole indices."""

    def mask(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return (q >= k) & (q - k < 4 * h + b)

    whole = create_block_mask(mask, 3, 8, 32, 32, device="cpu", BLOCK_SIZE=8)
    part = part_of_object(1, ((0, 2), (5, 8)), "mask_mod", whole)
    assert torch.equal(part.to_dense(), whole.to_dense()[:, [0, 1, 5, 6, 7]])
    assert part.shape == (3, 5, 32, 32)
    assert whole.shape == (3, 8, 32, 32)
    both = part_of_object(0, ((1, 3),), "mask_mod", part)
    assert torch.equal(both.to_dense(), part.to_dense()[1:3])
    rows, columns = torch.arange(32)[:, None], torch.arange(32)
    for b, h in ((0, 1), (1, 2), (1, 4)):
        seen = both.mask_mod(torch.tensor(b), torch.tensor(h), rows, columns)
        assert torch.equal(seen, mask(torch.tensor(1 + b), torch.tensor([0, 1, 5, 6, 7][h]), rows, columns))
    shared = create_block_mask(mask, None, None, 32, 32, device="cpu", BLOCK_SIZE=8)
    assert part_of_object(1, ((4, 8),), "mask_mod", shared).shape == (1, 1, 32, 32)


def test_a_number_of_heads_becomes_a_ranks_own() -> None:
    """An argument that is the size of a dim: an attribute of the model is made local with it."""

    def rotated(x: Tensor, heads: int) -> Tensor:
        if type(x) is not Tensor:
            raise RuntimeError("the kernel ran without values")
        return x.unflatten(-1, (heads, -1)).roll(1, -1)

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.heads, self.up, self.down = 8, nn.Linear(32, 128, bias=False), nn.Linear(128, 32, bias=False)

        def forward(self, x: Tensor) -> Tensor:
            out: Tensor = self.down(rotated(self.up(x), self.heads).flatten(2))
            return out

    declare(rotated, "x[... (h d)], heads=h -> y[... h d]", whole="d", linear="x")
    plan, _ = make_plan(Net(), 2, example_inputs=torch.zeros(3, 7, 32))
    assert [str(parameter.layout) for parameter in plan.parameters] == ["S(0: 128 -> 64)", "S(1: 128 -> 64)"]
    assert [(size.module, size.attribute, size.whole) for size in plan.sizes] == [("", "heads", 8)]


def test_what_differs_between_ranks_in_a_call() -> None:
    """Random numbers of the kernel's own, and a table of the heads that the model keeps as a constant."""
    module("flash_attn", flash_attn_func=flash_attn_func)
    try:
        for options, changes in (
            ({}, (0, 0)),
            ({"dropout_p": 0.1}, (1, 0)),
            ({"alibi_slopes": torch.arange(1.0, 9.0)}, (0, 1)),
            ({"dropout_p": 0.1, "alibi_slopes": torch.ones(3, 8)}, (1, 1)),
        ):
            model = Attention(functools.partial(flash_attn_func, **options))
            plan, _ = make_plan(model, 2, example_inputs=torch.zeros(3, 7, 32))
            assert {p.names[0]: str(p.layout) for p in plan.parameters} == BY_HEADS, options
            assert (len(plan.draws), sum(one.call is not None for one in plan.conversions)) == changes, options
    finally:
        del sys.modules["flash_attn"]


# -- it is tried -----------------------------------------------------------------------------------------------------


def scaled_by_head(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return attention(q, k, v) * torch.arange(1.0, q.shape[2] + 1)[:, None]


def normalized(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return F.normalize(attention(q, k, v), dim=2)


def whole_in_the_backward(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    out = attention(q, k, v)
    out.register_hook(lambda gradient: gradient - gradient.mean(2, keepdim=True))
    return out


def odd_heads_alone(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    if q.shape[2] != 8:
        raise ValueError("8 heads or nothing")
    return attention(q, k, v)


def two_results(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    return attention(q, k, v), q


@pytest.mark.parametrize(
    ("function", "said"),
    [
        (scaled_by_head, r"with half of h each, two calls give another o\[b s h e\] than one call"),
        (normalized, r"with half of h each, two calls give another o\[b s h e\]"),
        (whole_in_the_backward, "with half of h each, two calls give another gradient of [qkv]"),
        (odd_heads_alone, "with half of h it raises ValueError: 8 heads or nothing"),
        (two_results, "it returns 2 tensors, not 1"),
    ],
)
def test_a_wrong_declaration_is_an_error(function: Callable[..., Any], said: str) -> None:
    declare(function, ATTENTION, whole=WHOLE)
    with pytest.raises(DeclarationError, match=said) as error:
        cuts(Attention(function))
    assert f"{__name__}.{function.__name__} is declared as {ATTENTION!r} at " in str(error.value)
    assert "test_declared.py" in str(error.value).splitlines()[-1]


def test_a_large_call_is_not_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    function = copied(scaled_by_head, "large")
    declare(function, ATTENTION, whole=WHOLE)
    with monkeypatch.context() as patch:
        patch.setattr(trials, "LARGEST", 1)
        assert cuts(Attention(function)) == BY_HEADS
    with pytest.raises(DeclarationError, match="with half of h each"):
        cuts(Attention(function))


def test_a_call_that_does_not_fit_is_an_error() -> None:
    function = copied(attention, "misfit")
    declare(function, "q[s h d], k[t h/g d], v[t h/g e] -> o[s h e]", whole=WHOLE)
    with pytest.raises(DeclarationError, match=r"q has 4 dims where q\[s h d\] is declared"):
        cuts(Attention(function))


def test_declared_twice() -> None:
    """In the same way it is one declaration; a user's takes the place of a shipped one."""
    function = copied(attention, "twice")
    for _ in range(2):
        declare(function, ATTENTION, whole=WHOLE)
    with pytest.raises(DeclarationError, match=r"is declared at .* and otherwise at"):
        declare(function, ATTENTION, whole=f"{WHOLE} h")
    with pytest.raises(DeclarationError, match="has a record already"):
        declare("aten::linear", "input[n k], weight[m k] -> out[n m]", sum="k")


def test_a_dim_that_is_summed_over() -> None:
    """The ranks' results are parts of a sum: the first layer is column-parallel, what follows sums."""

    def contract(x: Tensor, weight: Tensor) -> Tensor:
        if type(x) is not Tensor:
            raise RuntimeError("the kernel ran without values")
        return x @ weight.T

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up, self.matrix = nn.Linear(32, 64, bias=False), nn.Parameter(torch.zeros(32, 64))

        def forward(self, x: Tensor) -> Tensor:
            return contract(self.up(x).relu(), self.matrix)

    declare(contract, "x[... k], weight[n k] -> y[... n]", sum="k", linear="x")
    assert cuts(Net()) == {"up.weight": "S(0: 64 -> 32)", "matrix": "S(1: 64 -> 32)"}
