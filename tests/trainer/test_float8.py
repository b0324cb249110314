"""Training in float8 by torchao: scales are those of whole tensors, so that products are one process's."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import lightning as L
import pytest
import torch
import torch.distributed as dist
from distributed import run_ranks
from selected import nightly
from tiny import meta_model, tiny_config, tiny_model, token_batch
from torch import Tensor, nn
from torch.utils.data import DataLoader
from trainer_ranks import run_trainer_ranks
from training import error_of
from transformers import AutoModelForCausalLM

from lightning_autotp import (
    AutoTPStrategy,
    VerificationError,
    full_gradients,
    full_state_dict,
    make_plan,
    parallelize,
)
from lightning_autotp.layouts.ownership import Ownership
from lightning_autotp.layouts.types import Invariant, Partial, Replicate, Shard
from lightning_autotp.parallel import float8
from lightning_autotp.parallel.linear import ColumnParallelLinear, RowParallelLinear
from lightning_autotp.proving.verify import verify
from lightning_autotp.quantized.float8 import float8_of, note_float8
from lightning_autotp.quantized.formats import QuantizationError
from lightning_autotp.ranks.group import TPGroup

torchao = pytest.importorskip("torchao.float8")

RECIPES = ["tensorwise", "rowwise", "rowwise_with_gw_hp"]
STEPS = 4
SIZES = {"intermediate_size": 160, "vocab_size": 96, "head_dim": 16}


def config(recipe: str = "tensorwise") -> Any:
    """What is emulated needs no GPU."""
    return dataclasses.replace(torchao.Float8LinearConfig.from_recipe_name(recipe), emulate=True)


def in_float8(model: nn.Module, recipe: str = "tensorwise", keep: str = "") -> Any:
    """A model of which all linear layers but those of a name compute in float8."""
    asked = {"config": config(recipe), "module_filter_fn": lambda _, name: not keep or keep not in name}
    return torchao.convert_to_float8_training(model, **asked)


# --- layers: with the very same input and gradient, each operand is rounded as in one process ---


def products(layer: nn.Module, x: Tensor, gradient: Tensor) -> dict[str, Tensor]:
    layer.weight.grad = None
    x = x.clone().requires_grad_()
    y = layer(x)
    y.backward(gradient)
    return {"y": y.detach(), "dx": x.grad, "dw": layer.weight.grad}  # type: ignore[dict-item]


def layers(
    rank: int, size: int, also_compiled: Sequence[str]
) -> dict[str, tuple[dict[str, Tensor], dict[str, Tensor]]]:
    """Of each kind of layer and recipe, what it computes here, put together, and what a layer of torchao does."""
    group = TPGroup.of(dist.group.WORLD)  # type: ignore[arg-type]
    generator = torch.Generator().manual_seed(3)
    # The second rank has the largest elements, whatever is cut.
    tokens, features, outputs = torch.ones(12, 1), torch.ones(32), torch.ones(48)
    tokens[8:], features[20:], outputs[30:] = 9, 9, 9
    x = torch.randn(12, 32, generator=generator) * tokens * features
    gradient = torch.randn(12, 48, generator=generator) * tokens * outputs
    weight = torch.randn(48, 32, generator=generator) * features * outputs[:, None]
    found = {}
    for recipe in RECIPES:

        def made(recipe: str = recipe) -> nn.Linear:
            linear = nn.Linear(32, 48, bias=False)
            linear.weight = nn.Parameter(weight.clone())
            return in_float8(nn.Sequential(linear), recipe)[0]

        def noted(recipe: str = recipe) -> nn.Linear:
            whole = nn.Sequential(made(recipe))
            note_float8(whole)
            return whole[0]  # type: ignore[return-value]

        wanted = products(made(), x, gradient)
        by_outputs, by_features = Ownership.even(48, size), Ownership.even(32, size)
        ((low, high),) = by_outputs.held[rank]
        ours = products(ColumnParallelLinear.convert(noted(), by_outputs, group), x, gradient[:, low:high])
        column = {"y": gathered(ours["y"], 1), "dx": ours["dx"], "dw": gathered(ours["dw"], 0)}
        ((low, high),) = by_features.held[rank]
        ours = products(RowParallelLinear.convert(noted(), by_features, group), x[:, low:high], gradient)
        row = {"y": ours["y"], "dx": gathered(ours["dx"], 1), "dw": gathered(ours["dw"], 1)}
        ((low, high),) = Ownership.even(12, size).held[rank]
        whole = noted()
        float8.Float8Linear.convert(whole, group)
        ours = products(whole, x[low:high], gradient[low:high])
        dist.all_reduce(ours["dw"])
        sharded = {"y": gathered(ours["y"], 0), "dx": gathered(ours["dx"], 0), "dw": ours["dw"]}
        nothing = products(whole, x[: 12 * rank], gradient[: 12 * rank])  # the first rank has no tokens
        alone = {name: nothing[name] for name in ("y", "dx") if rank}
        part = float8.local_product(x[:, low:high], noted_part(noted(), low, high), (), group).detach()
        dist.all_reduce(part)
        found |= {
            f"{recipe}, column": (column, wanted),
            f"{recipe}, row": (row, wanted),
            f"{recipe}, tokens": (sharded, wanted),
            f"{recipe}, all tokens on one rank": (alone, wanted),
            f"{recipe}, scales of parts": ({"y": part}, wanted),
        }
    return found | {f"{recipe}, compiled": compiled(recipe, x, group) for recipe in also_compiled}


def compiled(recipe: str, x: Tensor, group: TPGroup) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """What two layers compute when they are compiled, and when not."""
    torch.manual_seed(5)
    model = in_float8(nn.Sequential(nn.Linear(32, 48), nn.Linear(48, 32)), recipe)
    note_float8(model)
    ColumnParallelLinear.convert(model[0], Ownership.even(48, group.size), group)
    RowParallelLinear.convert(model[1], Ownership.even(48, group.size), group)
    results = []
    for run in (torch.compile(model, backend="aot_eager", fullgraph=True), model):
        model.zero_grad()
        given = x.clone().requires_grad_()
        y = run(given)
        y.square().sum().backward()
        results.append({"y": y.detach(), "dx": given.grad, "dw": model[0].weight.grad.clone()})
    return results[0], results[1]


def noted_part(layer: nn.Linear, low: int, high: int) -> nn.Linear:
    layer.weight = nn.Parameter(layer.weight.detach()[:, low:high])
    return layer


def gathered(part: Tensor, dim: int) -> Tensor:
    parts: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(parts, part)
    return torch.cat(parts, dim)


@pytest.mark.parametrize(
    "also_compiled", nightly([("tensorwise", "rowwise"), ("rowwise_with_gw_hp",)], [("rowwise_with_gw_hp",)])
)
def test_layers_round_as_in_one_process(also_compiled: Sequence[str]) -> None:
    """A wrong scale would show: with those of parts the numbers are others."""
    for seen in run_ranks(layers, 2, also_compiled):
        for case, (found, wanted) in seen.items():
            if case.endswith("scales of parts"):
                assert (found["y"] - wanted["y"]).abs().max() > 1e-3 * wanted["y"].abs().max(), case
                continue
            for name, value in found.items():
                near = 2e-6 * float(wanted[name].abs().max())
                torch.testing.assert_close(value, wanted[name], rtol=0, atol=near, msg=lambda m, c=case: f"{c}: {m}")


# --- models ---


@contextmanager
def exact_products() -> Iterator[None]:
    """Within it emulated products are summed in float64, in one process and on the ranks.

    In float32 two sums of the same numbers differ in the last bits, by which one element in a million is rounded to the
    neighbouring float8 number, an eighth away from it.
    """
    from torchao.float8.float8_ops import FLOAT8_OPS_TABLE

    product = torch.ops.aten.mm.default
    before = FLOAT8_OPS_TABLE[product]

    def mm(_: Any, args: Any, kwargs: Any = None) -> Tensor:
        left, right = (each._data.double() / each._scale for each in args)
        return torch.mm(left, right).to(args[0].dtype)

    FLOAT8_OPS_TABLE[product] = mm
    try:
        yield
    finally:
        FLOAT8_OPS_TABLE[product] = before


class Task(L.LightningModule):
    """As a user writes it."""

    def __init__(self, recipe: str, keep: str) -> None:
        super().__init__()
        self.recipe, self.keep = recipe, keep
        self.losses: list[float] = []
        self.batches: list[dict[str, Tensor]] = []
        self.gradients: list[dict[str, Tensor]] = []

    def configure_model(self) -> None:
        if not hasattr(self, "model"):
            torch.manual_seed(3)
            model = AutoModelForCausalLM.from_config(tiny_config("llama", **SIZES), dtype=torch.float64)
            self.model = in_float8(model, self.recipe, self.keep)

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        loss: Tensor = self.model(**batch).loss
        self.losses.append(loss.item())
        self.batches.append(batch)
        return loss

    def on_after_backward(self) -> None:
        parallel = hasattr(self.model, "autotp")
        named = self.model.named_parameters()
        found = full_gradients(self.model) if parallel else {n: p.grad for n, p in named}
        self.gradients.append({name: gradient.clone() for name, gradient in found.items() if gradient is not None})

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


CASES = {
    "tensorwise": ("tensorwise", "lm_head", False),
    "tensorwise, the head too": ("tensorwise", "", False),
    "rowwise": ("rowwise", "lm_head", False),
    "rowwise, tokens sharded": ("rowwise_with_gw_hp", "lm_head", True),
    "tensorwise, tokens sharded": ("tensorwise", "k_proj", True),
}


def train(case: str, devices: int, copies: int = 1) -> dict[str, Any]:
    recipe, keep, sharded = CASES[case]
    task = Task(recipe, keep)
    parallel = AutoTPStrategy(data_parallel_size=copies, sequence_parallel=sharded)
    strategy: Any = parallel if devices > 1 else "auto"
    trainer = L.Trainer(
        accelerator="cpu", devices=devices, strategy=strategy, max_epochs=1, logger=False, enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip
    batches = [token_batch(seed, vocabulary=96) for seed in range(STEPS)]
    with exact_products():
        trainer.fit(task, DataLoader(batches, batch_size=None))
    found: dict[str, Any] = {"losses": task.losses, "gradients": task.gradients, "batches": task.batches}
    if devices == 1:
        return found | {"weights": {name: weight.detach() for name, weight in task.model.named_parameters()}}
    kinds = {name: type(layer).__name__ for name, layer in task.model.named_modules() if float8_of(layer) is not None}
    weights = {name: weight for name, weight in full_state_dict(task.model).items() if "rotary" not in name}
    return found | {"weights": weights, "kinds": kinds, "sharded": task.model.autotp.plan.shards_sequence}


def train_all(cases: Sequence[str], devices: int) -> dict[str, Any]:
    return {case: train(case, devices) for case in cases}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("size", "cases"),
    [
        (2, ("tensorwise, the head too", "rowwise", "tensorwise, tokens sharded")),
        pytest.param(2, ("tensorwise", "rowwise, tokens sharded"), marks=pytest.mark.nightly),
        pytest.param(3, tuple(CASES), marks=pytest.mark.nightly),
    ],
)
def test_training_equals_one_process(size: int, cases: tuple[str, ...]) -> None:
    wanted = train_all(cases, 1)
    for seen in run_trainer_ranks(train_all, size, cases, size):
        assert tuple(seen) == cases
        for case, found in seen.items():
            expected = wanted[case]
            assert len(set(found["losses"])) == STEPS
            assert found["sharded"] == CASES[case][2]
            torch.testing.assert_close(found["losses"], expected["losses"], rtol=1e-10, atol=0)
            of_both = [[*each["gradients"], each["weights"]] for each in (found, expected)]
            for ours, theirs in zip(*of_both, strict=True):
                assert ours.keys() == theirs.keys()
                for name, value in theirs.items():
                    near = 1e-8 * float(value.abs().max())
                    torch.testing.assert_close(ours[name], value, rtol=0, atol=near, msg=lambda m, n=name: f"{n}: {m}")
            assert ("lm_head" in found["kinds"]) == (CASES[case][1] != "lm_head")
            layers = {name.rpartition(".")[2]: kind for name, kind in found["kinds"].items() if "layers.1" in name}
            assert layers["down_proj"] == "RowParallelLinear"
            assert layers["up_proj"] == "ColumnParallelLinear"
            assert len(found["kinds"]) == (14 if CASES[case][1] == "lm_head" else 13 if CASES[case][1] else 15)


@pytest.mark.nightly
def test_copies_have_scales_of_their_own_rows() -> None:
    """Two copies of two parts: as one process that rounds the rows of each copy by themselves."""
    four = run_trainer_ranks(train, 4, "tensorwise", 4, 2)
    task = Task("tensorwise", "lm_head")
    task.configure_model()
    optimizer = task.configure_optimizers()
    losses: list[list[float]] = [[], []]
    with exact_products():
        for batches in zip(four[0]["batches"], four[2]["batches"], strict=True):
            both = [task.model(**batch).loss for batch in batches]
            optimizer.zero_grad()
            (sum(both) / 2).backward()
            optimizer.step()
            for number, loss in enumerate(both):
                losses[number].append(loss.item())
    assert len(losses[0]) == STEPS // 2
    assert losses[0] != losses[1]
    for rank, seen in enumerate(four):
        torch.testing.assert_close(seen["losses"], losses[rank // 2], rtol=1e-10, atol=0)
        for name, weight in task.model.named_parameters():
            torch.testing.assert_close(seen["weights"][name], weight.detach(), rtol=0, atol=1e-8)


# --- what the solver may do with such layers, and what is refused ---


@pytest.mark.parametrize("sharded", [False, True])
@pytest.mark.parametrize("ranks", [2, 4])
def test_no_operand_nor_gradient_is_a_part_of_a_sum(ranks: int, sharded: bool) -> None:
    """With two key/value heads on four ranks, those that share one would have parts of its gradient."""
    model = in_float8(meta_model("llama", **SIZES), keep="lm_head")
    plan, solution = make_plan(model, ranks, sequence_parallel=sharded)
    assert plan.sharded_fraction > 0.9
    rounding = [operator for operator in solution.graph.operators if operator.rounding]
    assert len(rounding) == 14
    for operator in rounding:
        assert not any(isinstance(solution.layouts[tensor], Partial) for tensor in operator.inputs)
        (result,) = (solution.layouts[tensor] for tensor in operator.outputs)
        assert isinstance(result, Invariant | Shard | Partial), operator
        assert not isinstance(result, Replicate)
        if isinstance(result, Shard):
            assert not any(owned.is_shared for _, owned in result.dims)
    for name, layout in ((name, each.layout) for each in plan.parameters for name in each.names):
        if isinstance(layout, Shard) and "_proj" in name:
            runs = [end for _, owned in layout.dims for held in owned.held for run in held for end in run]
            assert all(end % 16 == 0 for end in runs), name


def test_a_plan_of_the_model_without_float8_is_refused() -> None:
    """Where that shares key/value heads."""
    plan, _ = make_plan(meta_model("llama", **SIZES), 4)
    assert run_ranks(follow, 4, plan.to_json()) == ["PlanMismatch"] * 4


def follow(rank: int, size: int, plan: str) -> str:
    from lightning_autotp import Plan

    model = in_float8(tiny_model("llama", **SIZES), keep="lm_head")
    return error_of(parallelize, model, dist.group.WORLD, plan=Plan.from_json(plan)).partition(":")[0]


def test_layers_that_would_be_gathered_in_float8_are_refused() -> None:
    asked = dataclasses.replace(config(), enable_fsdp_float8_all_gather=True)
    model = torchao.convert_to_float8_training(nn.Sequential(nn.Linear(32, 64), nn.Linear(64, 32)), config=asked)
    with pytest.raises(QuantizationError, match=r"0, 1 of Sequential are to be gathered in float8 .* Leave that out"):
        make_plan(model, 2, example_inputs=torch.randn(3, 32))


def test_a_local_model_that_does_not_round_is_no_proof() -> None:
    for unproved, later in run_ranks(unrounded, 2):
        assert "it must round to float8 (dyn_ten_e4m3, " in unproved
        assert "up_proj was replaced by another module, a Float8Linear" in later
        assert "Make such changes while it is whole, in configure_model()" in later


def unrounded(rank: int, size: int) -> tuple[str, str]:
    model, batch = tiny_model("llama", **SIZES), token_batch(0, vocabulary=96)
    _, solution = make_plan(in_float8(meta_model("llama", **SIZES), keep="lm_head"), 2, example_inputs=batch)
    parallelize(model, dist.group.WORLD, example_inputs=batch)  # type: ignore[arg-type]
    with pytest.raises(VerificationError) as error:
        verify(model, solution, rank, batch)
    in_float8(model)
    return str(error.value), error_of(lambda: model(**batch))
