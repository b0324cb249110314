from __future__ import annotations

import gc
import io

import pytest
import torch
from rich.console import Console
from tiny import AttentionBesideMLP, meta_model
from torch import Tensor, nn

from lightning_autotp.capture.capture import CaptureError
from lightning_autotp.layouts.plan import Plan
from lightning_autotp.layouts.types import Shard
from lightning_autotp.layouts.units import in_units
from lightning_autotp.pipeline import make_plan
from lightning_autotp.solving.cost import Profile


@pytest.fixture(scope="module")
def plan() -> Plan:
    return make_plan(meta_model("phi3", num_key_value_heads=2), 3)[0]


def test_json_round_trip(plan: Plan) -> None:
    again = Plan.from_json(plan.to_json())
    assert again == plan
    assert again.digest == plan.digest


def test_planning_leaves_the_garbage_collector_as_it_was() -> None:
    """It looks for dead objects less often while it plans."""
    before, during = gc.get_threshold(), []

    class Noting(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            during.append(gc.get_threshold())
            raise KeyError

    with pytest.raises(CaptureError):
        make_plan(Noting(), 2, example_inputs=torch.zeros(2, 4))
    assert during[0][0] > before[0]
    assert gc.get_threshold() == before


def test_foreign_json_is_refused() -> None:
    with pytest.raises(ValueError, match="not a plan"):
        Plan.from_json('{"model": "x"}')


def printed(plan: Plan, rank: int = 0, width: int = 80) -> list[str]:
    console = Console(width=width, record=True, file=io.StringIO())
    console.print(plan.table(rank))
    return [line.rstrip() for line in console.export_text().splitlines()]


def test_table_shows_what_matters(plan: Plan) -> None:
    lines = printed(plan, rank=2)
    assert "model.layers.0-1 (2x)" in lines
    (fused,) = (line.split() for line in lines if line.startswith("  self_attn.qkv_proj.weight"))
    local = plan.parameters[[p.names[0] for p in plan.parameters].index("model.layers.0.self_attn.qkv_proj.weight")]
    assert fused[1:5] == ["column", f"{local.bytes(2) // 4 // 64}/128", "x", "64"]
    assert "(3 sections, shared" in "\n".join(printed(plan, rank=2, width=200))
    assert "model.layers.*.self_attn: num_key_value_heads: 2 -> [1, 1, 1] (2x)" in "\n".join(lines)
    (sent,) = (one for one in plan.communication if one.kind == "all_reduce")
    assert "traced batch" not in "\n".join(lines)
    assert f"such a step sends {sent.calls} x all_reduce ({in_units(sent.priced_bytes)})" in " ".join(lines)
    assert sent.priced_bytes > 10 * sent.bytes, "the priced step is larger than the traced batch"
    again, _ = make_plan(meta_model("phi3", num_key_value_heads=2), 3, tokens_per_step=(3, 61))
    assert all(one.priced_bytes == one.bytes for one in again.communication), "they are one step"
    (stored,) = (line for line in lines if line.startswith("parameters: "))
    assert stored.endswith(f"{in_units(plan.bytes(2))} on rank 2, of {in_units(plan.whole_bytes)}")
    assert max(map(len, lines)) <= 80


def test_what_repeats_in_a_table_is_one_line() -> None:
    """Reasons and sizes of layers that are alike, and layers that are not in a row."""
    plan, _ = make_plan(meta_model("mixtral", num_hidden_layers=4), 2, keep_whole=["model.layers.2.mlp*"])
    lines = printed(plan, width=1000)
    assert "model.layers.0-3 (4x)" in lines
    assert "model.layers.0-1,3 (3x)" in lines
    assert len(lines) == len(set(lines))
    told = [line for line in lines if line.startswith("whole on every rank: ")]
    assert any(
        "model.layers.*.mlp.gate.weight (2x): aten.softmax.int in model.layers.*.mlp.gate" in line for line in told
    )
    assert len(told) < sum(bool(parameter.reason) for parameter in plan.parameters)


@pytest.mark.parametrize(
    ("size", "text"),
    [(0, "0 bytes"), (999, "999 bytes"), (1000, "0.977 KiB"), (2**20, "1.00 MiB"), (3 << 37, "384 GiB")],
)
def test_sizes_in_units(size: int, text: str) -> None:
    assert in_units(size) == text


def test_bytes_add_up(plan: Plan) -> None:
    model = meta_model("phi3", num_key_value_heads=2)
    assert plan.whole_bytes == sum(parameter.numel() * 4 for parameter in model.parameters())
    assert all(plan.whole_bytes / 3 < plan.bytes(rank) < plan.whole_bytes / 2 for rank in range(3))


def test_what_every_rank_holds_does_not_count_as_divided() -> None:
    plan, _ = make_plan(AttentionBesideMLP(), 2, example_inputs=torch.zeros(3, 7, 64))
    (fused,) = (parameter for parameter in plan.parameters if parameter.names[0] == "fused.weight")
    assert isinstance(fused.layout, Shard)
    ((_, owned),) = fused.layout.dims
    everywhere = set(owned.indices(0)) & set(owned.indices(1))
    assert everywhere == set(
        range(64, 64 + 2 * 16)
    )  # the one key head; queries and the MLP are cut, each along its axis
    assert fused.in_common == 64 * len(everywhere)
    total = sum(parameter.numel() for parameter in AttentionBesideMLP().parameters())
    assert plan.sharded_fraction == pytest.approx(1 - fused.in_common / total)
    assert "32 of 352 on every rank" in fused.described()


@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_sections_of_one_matrix_are_cut_along_axes_of_their_own(ranks: int) -> None:
    plan, _ = make_plan(AttentionBesideMLP(keys=4), ranks, example_inputs=torch.zeros(3, 7, 64))
    assert plan.sharded_fraction == 1
    assert [(each.kind, each.calls) for each in plan.communication] == [("all_reduce", 1)]  # of both sums together


@pytest.mark.parametrize(("heads", "why"), [(6, "to cut it would cost more"), (1, "attention needs whole sequences")])
def test_the_reason_for_whole_work_is_the_price_where_it_could_be_divided(heads: int, why: str) -> None:
    class Attention(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.qkv, self.out = nn.Linear(36, 3 * 36), nn.Linear(36, 36)

        def forward(self, x: Tensor) -> Tensor:
            q, k, v = (part.unflatten(-1, (heads, -1)).transpose(1, 2) for part in self.qkv(x).chunk(3, -1))
            found: Tensor = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
            return self.out(found.transpose(1, 2).flatten(2))

    inputs = torch.zeros(3, 7, 36)
    plan, _ = make_plan(Attention(), 2, example_inputs=inputs, tokens_per_step=(3, 7), keep_whole=["qkv.*"])
    (attention,) = [work for work in plan.whole_work if "attention" in work.operator]
    assert attention.why.startswith(why)


def test_the_plan_says_what_every_rank_computes_whole() -> None:
    """A kernel that nobody declared is a warning; so is a product of more than 5 % of the FLOPs."""
    kernel = torch.library.custom_op("autotp_tests::whole_work", mutates_args=())(doubled)
    kernel.register_fake(torch.empty_like)

    class Layer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up, self.down = nn.Linear(32, 64), nn.Linear(64, 32)

        def forward(self, x: Tensor) -> Tensor:
            return x + self.down(torch.ops.autotp_tests.whole_work(self.up(x)))

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.layers = nn.Linear(32, 32), nn.Sequential(*(Layer() for _ in range(3)))

        def forward(self, x: Tensor) -> Tensor:
            out: Tensor = self.layers(self.first(x))
            return out

    inputs = torch.zeros(3, 7, 32)
    plan, _ = make_plan(Net(), 2, example_inputs=inputs)
    assert "100.0% of the FLOPs and" in plan.summary
    assert "computes all of 3 operators, about" in plan.summary
    assert "computes all" not in make_plan(nn.Linear(32, 64), 2, example_inputs=inputs)[0].summary
    (warning,) = plan.warnings
    assert warning.startswith("3 x autotp_tests.whole_work.default in layers.*: autotp_tests.whole_work.default has no")
    assert "lightning_autotp.declare" in warning
    plan, _ = make_plan(Net(), 2, example_inputs=inputs, keep_whole=["first", "layers.0.*", "layers.1.*"])
    assert [(work.operator, work.module, work.calls) for work in plan.whole_work] == [
        ("autotp_tests.whole_work.default", "layers.*", 3),
        ("aten.linear.default", "layers.*.up", 2),
        ("aten.linear.default", "layers.*.down", 2),
        ("aten.linear.default", "first", 1),
    ]
    assert [round(work.share, 3) for work in plan.whole_work] == [0, 0.308, 0.308, 0.077]
    assert plan.divided_work == pytest.approx(4 / 13)
    profile, tokens = Profile(), 16_384
    up = next(work for work in plan.whole_work if work.module == "layers.*.up")
    touched = 2 * (tokens * (32 + 64) + 32 * 64 + 64) * 4
    assert up.seconds == pytest.approx(profile.compute(2 * tokens * 2 * 32 * 64, touched, 1.0), rel=1e-2)
    spent = 1e3 * sum(work.seconds for work in plan.whole_work)
    assert f" are divided (every rank computes all of 8 operators, about {spent:.2g} ms of a step), " in plan.summary
    assert f"30.8% of the FLOPs, about {1e3 * up.seconds:.2g} ms of a step: " in str(up)
    assert len(plan.warnings) == 4
    assert Plan.from_json(plan.to_json()) == plan


def doubled(x: Tensor) -> Tensor:
    return x * 2
