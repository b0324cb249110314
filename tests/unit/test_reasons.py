"""Why a parameter is whole, dim by dim: the operator, module and line that refuse, or the price."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tiny import meta_model
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import AutoConfig, AutoModel

from lightning_autotp.layouts.plan import ParameterPlan, Plan, Reason
from lightning_autotp.layouts.step_size import TokensPerStep
from lightning_autotp.layouts.types import Shard
from lightning_autotp.parallel.implementations import IMPLEMENTATIONS
from lightning_autotp.pipeline import make_plan
from lightning_autotp.proving.read_plan import read_plan
from lightning_autotp.proving.verify import trace
from lightning_autotp.solving.cost import Profile
from lightning_autotp.solving.implementations import Implementations
from lightning_autotp.solving.reasons import Reasons
from lightning_autotp.solving.solver import solve

WIDTH, HEADS = 48, 4


def planned(model: nn.Module, example: Any, ranks: int = 2, **options: Any) -> Plan:
    """A plan that leaves whole what it can: held memory is free, and the few tokens are not worth a message."""
    free = {"profile": Profile(matrix_price=0.0), "tokens_per_step": 2} | options
    return make_plan(model, ranks, example_inputs=example, **free)[0]


def parameter(plan: Plan, name: str) -> ParameterPlan:
    return next(parameter for parameter in plan.parameters if name in parameter.names)


def along(plan: Plan, name: str, dim: int) -> Reason:
    """The one reason that a parameter has for a dim."""
    found = parameter(plan, name)
    assert not isinstance(found.layout, Shard)
    assert sorted(reason.dim for reason in found.reasons) == list(range(len(found.shape)))
    assert all(reason.length == found.shape[reason.dim] for reason in found.reasons)
    return next(reason for reason in found.reasons if reason.dim == dim)


def wide() -> Tensor:
    return torch.zeros(3, 7, WIDTH)


class Attention(nn.Module):
    """Heads that look at each other, the way libraries with einsum and rearrange write it."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.to_q, self.to_k, self.to_v, self.to_out = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        normed = self.norm(x)
        q, k, v = (self.heads(project(normed)) for project in (self.to_q, self.to_k, self.to_v))
        scores = self.mixed(torch.einsum("bhid,bhjd->bhij", q, k))
        out = torch.einsum("bhij,bhjd->bhid", scores.softmax(-1), v)
        return x + self.to_out(out.permute(0, 2, 1, 3).flatten(2))

    def heads(self, x: Tensor) -> Tensor:
        return x.reshape(*x.shape[:2], HEADS, -1).permute(0, 2, 1, 3)

    def mixed(self, scores: Tensor) -> Tensor:
        return scores.softmax(dim=1)  # over heads


class Tower(nn.Module):
    def __init__(self, attention: nn.Module) -> None:
        super().__init__()
        self.attention = attention
        self.mlp = nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 80), nn.GELU(), nn.Linear(80, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        x = self.attention(x)
        return x + self.mlp(x)


# -- the first operator that refuses -----------------------------------------------------------------------------------


def test_the_heads_of_a_projection_are_refused_by_what_mixes_them_not_by_the_norm() -> None:
    plan = planned(Tower(Attention()), wide())
    for name in ("attention.to_q.weight", "attention.to_k.weight"):
        rows, columns = along(plan, name, 0), along(plan, name, 1)
        assert (rows.operator, rows.module) == ("aten.softmax.int", "attention")
        assert "scores.softmax(dim=1)  # over heads" in rows.source
        assert rows.why.startswith("it needs the whole dim")
        assert (columns.operator, columns.module) == ("aten.layer_norm.default", "attention.norm")
        assert "normed = self.norm(x)" in columns.source
        assert parameter(plan, name).reason == str(rows)


def test_values_are_refused_where_they_meet_the_heads_of_another() -> None:
    """Nothing on the values' own path refuses: the scores they are multiplied with cannot have their heads cut."""
    rows = along(planned(Tower(Attention()), wide()), "attention.to_v.weight", 0)
    assert (rows.operator, rows.module) == ("aten.softmax.int", "attention")
    assert "# over heads" in rows.source


def test_an_operator_without_a_rule_is_named() -> None:
    class PerHead(Attention):
        def mixed(self, scores: Tensor) -> Tensor:
            return torch.linalg.matrix_exp(scores)

    rows = along(planned(Tower(PerHead()), wide()), "attention.to_q.weight", 0)
    assert rows.operator == "aten.linalg_matrix_exp.default"
    assert "torch.linalg.matrix_exp(scores)" in rows.source
    assert "has no rule" in rows.why


def test_parts_of_a_sum_are_refused_by_what_is_not_linear() -> None:
    """One head: its features are summed over in the scores, and a softmax is not linear."""

    class One(Attention):
        def heads(self, x: Tensor) -> Tensor:
            return x[:, None]

        def mixed(self, scores: Tensor) -> Tensor:
            return scores.tanh()

    rows = along(planned(Tower(One()), wide()), "attention.to_q.weight", 0)
    assert rows.operator == "aten.tanh.default"
    assert "scores.tanh()" in rows.source
    assert "parts of a sum" in rows.why


class Two(nn.Module):
    """Two projections that meet."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(16, WIDTH), nn.Linear(16, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.joined(self.first(x), self.second(x)).sum(-1)

    def joined(self, first: Tensor, second: Tensor) -> Tensor:
        raise NotImplementedError


def narrow() -> Tensor:
    return torch.zeros(3, 7, 16)


def test_a_partner_that_refuses_is_named() -> None:
    class Sorted(Two):
        def joined(self, first: Tensor, second: Tensor) -> Tensor:
            return first * second.sort(-1).values

    rows = along(planned(Sorted(), narrow()), "first.weight", 0)
    assert rows.operator == "aten.sort.default"
    assert "second.sort(-1)" in rows.source


def test_dims_that_are_divided_differently_name_what_divided_them() -> None:
    class Divided(Two):
        def joined(self, first: Tensor, second: Tensor) -> Tensor:
            three, four = first.unflatten(-1, (3, 16)).cos(), second.unflatten(-1, (4, 12)).cos()
            return three.flatten(-2) * four.flatten(-2)

    rows = along(planned(Divided(), narrow()), "first.weight", 0)
    assert rows.operator == "aten.mul.Tensor"
    assert "three.flatten(-2) * four.flatten(-2)" in rows.source
    assert "3 x 16 by aten.unflatten.int" in rows.why
    assert "4 x 12 by aten.unflatten.int" in rows.why


def test_of_several_that_refuse_the_nearest_is_named() -> None:
    class Branching(Two):
        def joined(self, first: Tensor, second: Tensor) -> Tensor:
            near = first.softmax(-1)
            return near + first.cos().sin().tanh().sort(-1).values * second

    rows = along(planned(Branching(), narrow()), "first.weight", 0)
    assert rows.operator == "aten.softmax.int"
    assert "near = first.softmax(-1)" in rows.source


def test_a_static_operand_that_cannot_be_cut_is_named() -> None:
    class Masked(Two):
        def joined(self, first: Tensor, second: Tensor) -> Tensor:
            mask = torch.arange(WIDTH).cos()
            return torch.addcmul(first, mask, mask) * second  # twice: no single argument that could be cut

    rows = along(planned(Masked(), narrow()), "first.weight", 0)
    assert rows.operator == "aten.addcmul.default"
    assert "torch.addcmul(first, mask, mask)" in rows.source
    assert "of shape [48] that no parameter went into" in rows.why


class Losing(nn.Module):
    """The classes never leave a module: no parallel loss is told of them."""

    def __init__(self) -> None:
        super().__init__()
        self.classes = nn.Parameter(torch.zeros(16, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return F.cross_entropy((x @ self.classes).cos().flatten(0, 1), torch.zeros(21, dtype=torch.long))


def test_an_operator_that_only_a_parallel_implementation_could_run() -> None:
    reason = along(planned(Losing(), narrow()), "classes", 1)
    assert reason.operator == "aten.cross_entropy_loss.default"
    assert "F.cross_entropy(" in reason.source
    assert "none of those declared (vocab cross-entropy) fits here" in reason.why
    graph = trace(Losing(), narrow())
    solution = solve(graph, 2, Implementations(), Profile(matrix_price=0.0))
    assert solution.reasons is not None
    (reasons,) = solution.reasons.of_whole(solution.layouts).values()
    assert "only a parallel implementation can run it on parts of the dim, and none is declared" in reasons[0].why


def test_a_size_that_stays_in_the_code() -> None:
    class Checking(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(WIDTH, 1)

        def forward(self, x: Tensor) -> Tensor:
            if x.shape[-1] != 48:
                raise ValueError("another width")
            return self.linear(x.cos())

    model = nn.Sequential(nn.Linear(16, WIDTH), nn.ReLU(), Checking())
    plan = planned(model, narrow(), cut={"0.weight": 0})
    assert along(plan, "2.linear.weight", 0).why == "a dim of length 1"
    reason = along(plan, "2.linear.weight", 1)
    assert reason.module == "2"
    assert "x.cos()" in reason.source
    assert "a size in the Python code could not be made local" in reason.why
    assert "another width" in reason.why
    assert parameter(plan, "2.linear.weight").reason == str(reason)


class Counting(nn.Module):
    """Its code depends on values."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(16, 16))

    def forward(self, x: Tensor) -> Tensor:
        y = x @ self.weight
        return y if y.sum().item() > 0 else -y


def test_an_opaque_module() -> None:
    plan = planned(nn.Sequential(Counting(), nn.Linear(16, 8)), narrow())
    for dim in (0, 1):
        reason = along(plan, "0.weight", dim)
        assert (reason.operator, reason.module) == ("opaque module", "0")
        assert reason.why == "its code depends on values"


class Around(nn.Module):
    """Its own code has a size of the channels beside a module that is run for its shapes."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down, self.inner = nn.Linear(16, WIDTH), nn.Linear(WIDTH, 16), Counting()

    def forward(self, x: Tensor) -> Tensor:
        parts = self.up(x).view(*x.shape[:-1], 4, WIDTH // 4).tanh()
        return self.inner(x * torch.tensor(0.5)) + self.down(parts.flatten(-2))


def test_a_module_is_run_for_its_shapes_without_what_refers_to_it() -> None:
    """In the trace of a rank, the outer module has hooks on it, and a number made there has real memory."""
    plan = planned(Around(), narrow(), cut={"up.weight": 0, "down.weight": 1})
    assert [changed.module for changed in plan.sizes] == [""]
    assert along(plan, "inner.weight", 0).why == "its code depends on values"


def test_a_boundary_only_passes_on_what_others_refuse() -> None:
    """Convolution kernels per head: what keeps them whole is the layer after the heads are joined."""
    with torch.device("meta"):
        sizes = {"hidden_size": 64, "embedding_size": 64, "intermediate_size": 112, "num_hidden_layers": 1}
        model = AutoModel.from_config(AutoConfig.for_model("convbert", num_attention_heads=4, vocab_size=131, **sizes))
    plan = planned(model, {"input_ids": torch.zeros(3, 17, dtype=torch.long)})
    reason = along(plan, "encoder.layer.0.attention.self.conv_kernel_layer.weight", 0)
    assert (reason.operator, reason.module) == ("aten.linear.default", "encoder.layer.0.attention.output.dense")
    assert [p.names[0] for p in plan.parameters for r in p.reasons if r.operator.startswith("boundary")] == []


def test_a_kernel_tells_less_than_channels() -> None:
    class Depthwise(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.before, self.conv = nn.Linear(16, 4), nn.Conv1d(4, 4, 7, groups=4, padding=3)

        def forward(self, x: Tensor) -> Tensor:
            return self.conv(self.before(x).mT).sort(1).values

    plan = planned(Depthwise(), narrow())
    assert [reason.dim for reason in parameter(plan, "conv.weight").reasons] == [0, 2, 1]
    assert along(plan, "conv.weight", 0).operator == "aten.sort.default"
    assert along(plan, "conv.weight", 2).operator == "aten.conv1d.default"


# -- no operator refuses ----------------------------------------------------------------------------------------------


def test_too_few_units_name_the_operator_that_made_them() -> None:
    class Few(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.few, self.out = nn.Linear(16, 6, bias=False), nn.Linear(2, 16)

        def forward(self, x: Tensor) -> Tensor:
            return self.out(self.few(x).unflatten(-1, (3, 2)))

    plan = planned(Few(), narrow(), 8)
    rows = along(plan, "few.weight", 0)
    assert rows.why == "no unit of it (3 x 2) divides among 8 ranks"
    assert rows.operator == "aten.unflatten.int"
    assert "unflatten(-1, (3, 2))" in rows.source
    columns = along(plan, "out.weight", 1)
    assert columns.why == "no unit of it (2) divides among 8 ranks"
    assert columns.operator == ""


def test_an_axis_that_a_matrix_has_twice() -> None:
    class Symmetric(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight, self.wide = nn.Parameter(torch.zeros(16, 16)), nn.Linear(16, 40)

        def forward(self, x: Tensor) -> Tensor:
            return self.wide(x @ (self.weight + self.weight.T))

    plan = planned(Symmetric(), narrow())
    assert along(plan, "weight", 0).why == "dim 1 has the same axis, and both would be cut"
    assert along(plan, "weight", 1).why == "dim 0 has the same axis, and both would be cut"


def test_what_costs_more_says_how_much() -> None:
    model = nn.Sequential(nn.Linear(16, WIDTH), nn.ReLU(), nn.Linear(WIDTH, 16))
    example = narrow()
    plan, solution = make_plan(model, 2, example_inputs=example, profile=Profile(matrix_price=0.0), tokens_per_step=2)
    reason = along(plan, "0.weight", 0)
    assert reason.operator == ""
    assert reason.why.startswith("could be cut, but that costs more (")
    cut = make_plan(
        model, 2, example_inputs=example, profile=Profile(matrix_price=0.0), tokens_per_step=2, cut={"0.weight": 0}
    )[1]
    dearer, least = reason.why.partition("(")[2].split(" us instead of ")
    assert float(dearer) == pytest.approx(cut.cost * 1e6, abs=1)
    assert float(least.removesuffix(" us a step)")) == pytest.approx(solution.cost * 1e6, abs=1)
    assert float(dearer) > float(least.removesuffix(" us a step)"))


def test_what_has_no_part_in_the_forward() -> None:
    class Half(Two):
        def forward(self, x: Tensor) -> Tensor:
            return self.first(x)

    plan = planned(Half(), narrow())
    assert along(plan, "second.weight", 1).why == "not used in the traced forward"
    assert parameter(plan, "second.weight").reason == "not used in the traced forward"


def test_what_is_pinned_says_so_and_so_do_its_partners() -> None:
    class Product(Two):
        def joined(self, first: Tensor, second: Tensor) -> Tensor:
            return first * second

    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear, self.scale = nn.Linear(16, WIDTH), nn.Parameter(torch.zeros(WIDTH))

        def forward(self, x: Tensor) -> Tensor:
            return (self.linear(x) * self.scale).sum(-1)

    plan = planned(Product(), narrow(), keep_whole=["second"])
    assert along(plan, "second.weight", 0).why == "keep_whole= says that it stays whole"
    rows = along(planned(Scaled(), narrow(), keep_whole=["scale"]), "linear.weight", 0)
    assert rows.operator == "aten.mul.Tensor"
    assert rows.why.startswith("its operand scale is whole, as keep_whole= says")


# -- where reasons are read -------------------------------------------------------------------------------------------


def test_a_vector_has_reasons_but_no_line_of_its_own() -> None:
    plan = planned(Tower(Attention()), wide())
    assert along(plan, "attention.norm.weight", 0).operator == "aten.layer_norm.default"
    assert parameter(plan, "attention.norm.weight").reason == ""
    assert not parameter(plan, "attention.norm.weight").reasons[0].why.endswith("costs more than leaving it whole")


class Compressed(nn.Module):
    """Features that are few for a while, and normed by their mean square, as keys and values are in some models."""

    def __init__(self) -> None:
        super().__init__()
        self.down, self.up = nn.Linear(WIDTH, 8, bias=False), nn.Linear(8, WIDTH, bias=False)
        self.scale = nn.Parameter(torch.ones(8))

    def forward(self, x: Tensor) -> Tensor:
        few = self.down(x)
        return x + self.up(few * torch.rsqrt(few.pow(2).mean(-1, keepdim=True) + 1e-6) * self.scale)


def test_what_nothing_refuses_need_not_be_followed_through_what_is_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    model = Tower(nn.Sequential(Compressed(), Attention()))
    free, priced = Profile(matrix_price=0.0), TokensPerStep(2)
    solution = solve(trace(model, wide()), 2, IMPLEMENTATIONS, free, tokens=priced)
    assert solution.reasons is not None
    look, seen = Reasons._is_whole_around, dict[tuple[str, int], bool]()

    def is_whole_around(self: Reasons, tensor: int, number: int) -> bool:
        seen[solution.graph.parameters[tensor], number] = look(self, tensor, number)
        return seen[solution.graph.parameters[tensor], number]

    monkeypatch.setattr(Reasons, "_is_whole_around", is_whole_around)
    found = solution.reasons.of_whole(solution.layouts)
    assert {*seen.values()} == {True, False}
    monkeypatch.setattr(Reasons, "_is_whole_around", lambda *_: False)
    assert solution.reasons.of_whole(solution.layouts) == found


def test_what_is_cut_has_no_reasons() -> None:
    plan, _ = make_plan(meta_model("llama"), 2)
    assert [p.names[0] for p in plan.parameters if isinstance(p.layout, Shard) and p.reasons] == []
    assert [p.names[0] for p in plan.parameters if not isinstance(p.layout, Shard) and not p.reasons] == []


def test_reasons_travel_with_the_plan() -> None:
    model = Tower(Attention())
    plan = planned(model, wide())
    again = Plan.from_json(plan.to_json())
    assert again == plan
    assert any(len(p.reasons) == 2 for p in again.parameters)
    assert [p.reasons for p in again.parameters] == [p.reasons for p in plan.parameters]
    read, _ = read_plan(again, trace(model, wide()), IMPLEMENTATIONS)
    assert [p.reasons for p in read.parameters] == [p.reasons for p in plan.parameters]


class Counted(nn.Module):
    """A table whose rows the code needs all of, but not its features."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.out = nn.Embedding(16, WIDTH, scale_grad_by_freq=True), nn.Linear(WIDTH, 16)

    def forward(self, ids: Tensor) -> Tensor:
        return self.out(self.table(ids))


def test_an_impossible_cut_gives_the_reason_of_that_dim() -> None:
    ids = torch.zeros(3, 7, dtype=torch.long)
    make_plan(Counted(), 2, example_inputs=ids, cut={"table.weight": 1})
    with pytest.raises(
        ValueError, match=r"table\.weight cannot be cut along dim 0: aten\.embedding\.default in table .*"
    ):
        make_plan(Counted(), 2, example_inputs=ids, cut={"table.weight": 0})
    with pytest.raises(ValueError, match=r"table\.weight cannot be cut along dim 2: it has the shape \[16, 48\]"):
        make_plan(Counted(), 2, example_inputs=ids, cut={"table.weight": 2})
    with pytest.raises(
        ValueError, match=r"norm\.weight cannot be cut along dim 0: aten\.layer_norm\.default in attention"
    ):
        make_plan(Tower(Attention()), 2, example_inputs=wide(), cut={"attention.norm.weight": 0})


def test_of_several_cuts_the_impossible_one_is_named() -> None:
    with pytest.raises(ValueError, match=r"norm\.bias cannot be cut along dim 0: aten\.layer_norm"):
        make_plan(Tower(Attention()), 2, example_inputs=wide(), cut={"mlp.1.weight": 0, "attention.norm.bias": 0})


def test_cuts_that_exclude_each_other_name_the_operand() -> None:
    model = nn.Sequential(nn.Linear(16, 16), nn.Linear(16, WIDTH), nn.Linear(WIDTH, 16))
    for one in ({"1.weight": 1}, {"1.bias": 0}):
        make_plan(model, 2, example_inputs=narrow(), cut=one)
    expected = (
        r"1\.weight cannot be cut along dim 1: aten\.linear\.default in 1 .*its operand 1\.bias is cut along dim 0"
    )
    with pytest.raises(ValueError, match=expected):
        make_plan(model, 2, example_inputs=narrow(), cut={"1.weight": 1, "1.bias": 0})
