"""Plans that are given, edited, pinned or kept: followed exactly, or refused with the first difference."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import lru_cache
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from distributed import run_ranks
from edited_plans import without_an_mlp
from tiny import meta_model, tiny_config
from torch import Tensor, nn
from transformers import AutoModelForCausalLM

from lightning_autotp import pipeline
from lightning_autotp.gradients.norms import full_gradients
from lightning_autotp.layouts.plan import Plan
from lightning_autotp.layouts.types import Shard
from lightning_autotp.parallel.implementations import IMPLEMENTATIONS
from lightning_autotp.pipeline import make_plan, parallelize
from lightning_autotp.proving.read_plan import read_for_call, read_plan
from lightning_autotp.proving.verify import trace
from lightning_autotp.solving.options import PlanOptions, read
from lightning_autotp.solving.plan_cache import PlanCache
from lightning_autotp.solving.planned import PlanMismatch

FAMILIES = ("llama", "gpt2", "mixtral")


@lru_cache
def plan_of(family: str) -> Plan:
    """For two ranks."""
    return make_plan(meta_model(family), 2)[0]


def ids(rows: int, length: int) -> dict[str, Tensor]:
    found = torch.randint(3, 60, (rows, length), generator=torch.Generator().manual_seed(rows * length))
    return {"input_ids": found, "labels": found}


def built(family: str) -> nn.Module:
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(tiny_config(family)).eval()


def reads(plan: Plan, family: str, **batch: Any) -> Plan:
    model = meta_model(family)
    graph = trace(model, batch or {**ids(5, 61), "use_cache": False})
    return read_plan(plan, graph, IMPLEMENTATIONS)[0]


# -- given -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", [*FAMILIES, "bloom", "phi3"])
@pytest.mark.parametrize("ranks", [pytest.param(2, marks=pytest.mark.nightly), 3])
def test_a_plan_read_back_is_what_the_solver_meant(family: str, ranks: int) -> None:
    plan, solution = make_plan(meta_model(family), ranks)
    again, found = read_plan(Plan.from_json(plan.to_json()), solution.graph, IMPLEMENTATIONS)
    assert again == plan
    assert {t: found.layouts[t] for t in solution.layouts} == solution.layouts
    assert found.slices == solution.slices
    assert found.drawing == solution.drawing
    assert found.uses == solution.uses


def test_a_plan_holds_for_batches_of_other_sizes() -> None:
    plan = plan_of("gpt2")
    other = reads(plan, "gpt2", **ids(2, 17), use_cache=False)
    assert other.parameters == plan.parameters
    assert [c.shape for c in other.conversions] != [c.shape for c in plan.conversions]


def test_a_plan_of_many_layers_is_read_in_another_call() -> None:
    """Its axes have other numbers there, which are also numbers of other axes of the same sizes."""
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(tiny_config("llama", num_hidden_layers=20))
    plan, _ = make_plan(model, 2)
    changes, solution = read_for_call(plan, trace(model, ids(3, 11)), IMPLEMENTATIONS)
    assert not changes
    layouts = {name: solution.layouts[tensor] for tensor, name in solution.graph.parameters.items()}
    assert layouts == {name: parameter.layout for parameter in plan.parameters for name in parameter.names}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_a_plan_holds_for_another_dtype(dtype: torch.dtype) -> None:
    plan = plan_of("llama")
    graph = trace(meta_model("llama").to(dtype), {**ids(5, 61), "use_cache": False})
    read_plan(plan, graph, IMPLEMENTATIONS)


def train(rank: int, ranks: int, family: str, file: Path) -> list[dict[str, Tensor]]:
    model = built(family)
    given = file if rank == 0 else file / "not on this machine"
    parallelize(model, dist.group.WORLD, plan=given, example_inputs={**ids(2, 17), "use_cache": False})  # type: ignore[arg-type]
    found = []
    for rows, length in ((5, 61), (1, 9)):
        model.zero_grad()
        loss = model(**ids(rows, length)).loss
        loss.backward()
        found.append({"loss": loss.detach(), **full_gradients(model)})
    return found


def check_training(family: str, plan: Plan, tmp_path: Path) -> None:
    """Loss and every gradient of ranks that follow the plan are one process's, at two sizes of batch."""
    file = tmp_path / "plan.json"
    file.write_text(plan.to_json())
    model = built(family)
    wanted = []
    for rows, length in ((5, 61), (1, 9)):
        model.zero_grad()
        loss = model(**ids(rows, length)).loss
        loss.backward()
        gradients = {n: p.grad for n, p in model.named_parameters(remove_duplicate=False) if p.grad is not None}
        wanted.append({"loss": loss.detach(), **gradients})
    for results in run_ranks(train, plan.ranks, family, file):
        for found, expected in zip(results, wanted, strict=True):
            assert found.keys() == expected.keys()
            for name, value in found.items():
                torch.testing.assert_close(value, expected[name], rtol=1e-4, atol=2e-6, msg=name)


@pytest.mark.parametrize(
    "family", [pytest.param(family, marks=[] if family == "mixtral" else pytest.mark.nightly) for family in FAMILIES]
)
def test_a_given_plan_trains_like_one_process(family: str, tmp_path: Path) -> None:
    check_training(family, plan_of(family), tmp_path)


@pytest.mark.parametrize(("family", "tokens"), [("gpt2", 16_384), pytest.param("llama", 64, marks=pytest.mark.nightly)])
def test_a_plan_with_room_for_everything_trains_like_one_process(family: str, tokens: int, tmp_path: Path) -> None:
    plan, _ = make_plan(meta_model(family), 2, tokens_per_step=tokens, memory=1e12)
    assert plan.sharded_fraction < 0.6
    check_training(family, plan, tmp_path)


def test_an_edited_plan_with_pins_trains_like_one_process(tmp_path: Path) -> None:
    pinned, _ = make_plan(meta_model("llama"), 2, cut={"lm_head.weight": 1}, keep_whole=["model.layers.1.self_attn"])
    plan = without_an_mlp(pinned)
    divided = {p.names[0] for p in plan.parameters if isinstance(p.layout, Shard)}
    assert not {"model.layers.0.mlp.up_proj.weight", "model.layers.1.self_attn.q_proj.weight"} & divided
    assert {"model.layers.1.mlp.up_proj.weight", "model.layers.0.self_attn.q_proj.weight", "lm_head.weight"} <= divided
    check_training("llama", plan, tmp_path)


# -- refused ---------------------------------------------------------------------------------------------------------


def edited(change: Callable[[dict[str, Any]], None], family: str = "llama") -> Plan:
    data = json.loads(plan_of(family).to_json())
    change(data)
    return Plan.from_json(json.dumps(data))


def test_a_plan_that_forgets_a_change_of_layout_is_refused() -> None:
    def forget(data: dict[str, Any]) -> None:
        data["conversions"] = [c for c in data["conversions"] if c["module"] != "model.layers.1.mlp"]

    with pytest.raises(PlanMismatch, match=r"do not go together[\s\S]*layers\.1\.mlp"):
        reads(edited(forget), "llama")


def test_a_plan_that_leaves_one_matrix_whole_and_nothing_else_is_refused() -> None:
    def whole(data: dict[str, Any]) -> None:
        for parameter in data["parameters"]:
            if parameter["names"][0] == "model.layers.0.mlp.down_proj.weight":
                parameter["layout"] = "I"

    with pytest.raises(PlanMismatch, match=r"do not go together[\s\S]*layers\.0\.mlp"):
        reads(edited(whole), "llama")


def test_a_cut_that_the_code_does_not_allow_is_refused() -> None:
    def rotate(data: dict[str, Any]) -> None:
        for parameter in data["parameters"]:
            if parameter["names"][0] == "model.layers.0.self_attn.k_proj.weight":
                size = parameter["shape"][0]
                parameter["layout"] = {"shard": [{"dim": 0, "size": size, "held": [[[1, size]], [[0, 1]]]}]}

    with pytest.raises(PlanMismatch, match=r"k_proj\.weight is planned as .* allows no such cut"):
        reads(edited(rotate), "llama")


def test_an_unknown_implementation_is_refused() -> None:
    def rename(data: dict[str, Any]) -> None:
        data["implementations"][0]["name"] = "diagonal"

    with pytest.raises(PlanMismatch, match=r"'diagonal': there are column, row"):
        reads(edited(rename), "llama")


def test_another_model_is_refused_by_its_first_difference() -> None:
    plan = plan_of("llama")
    with pytest.raises(PlanMismatch, match=r"another model: model\.layers\.0\.mlp\..* is used .* Give plan="):
        reads(plan, "mixtral")
    model = meta_model("llama")
    model.get_submodule("model.layers.1.mlp").act_fn = nn.GELU()
    graph = trace(model, {**ids(5, 61), "use_cache": False})
    with pytest.raises(PlanMismatch, match=r"model\.layers\.1\.mlp\.act_fn"):
        read_plan(plan, graph, IMPLEMENTATIONS)


@pytest.mark.parametrize(
    ("sizes", "said"),
    [
        (
            {"num_hidden_layers": 3, "hidden_size": 48},
            r"model\.layers is of length 3 in the plan and 2 here; model\.embed_tokens\.weight is \[131, 48\] in the"
            r" plan and \[131, 64\] here \(and \d+ more parameters\)\. Give plan=",
        ),
        ({"num_hidden_layers": 1}, r"model\.layers is of length 1 in the plan and 2 here\. Give"),
        ({"vocab_size": 66}, r"model: model\.embed_tokens\.weight is \[66, 64\] in the plan and \[131, 64\] here"),
    ],
)
def test_a_model_of_other_sizes_is_refused_by_them(sizes: dict[str, int], said: str) -> None:
    config = tiny_config("llama")
    for name, size in sizes.items():
        setattr(config, name, size)
    with torch.device("meta"):
        plan, _ = make_plan(AutoModelForCausalLM.from_config(config), 2)
    with pytest.raises(PlanMismatch, match=said):
        reads(plan, "llama")


def test_a_file_without_a_plan(tmp_path: Path) -> None:
    (tmp_path / "other.json").write_text("{}")
    with pytest.raises(ValueError, match=r"other\.json': this is not a plan"):
        read(tmp_path / "other.json")
    with pytest.raises(ValueError, match="followed as it is"):
        PlanOptions(plan=plan_of("llama"), keep_whole=["lm_head"])


# -- pinned ----------------------------------------------------------------------------------------------------------


def layouts(plan: Plan) -> dict[str, Any]:
    return {name: parameter.layout for parameter in plan.parameters for name in parameter.names}


def test_what_is_pinned_whole_stays_whole_and_the_rest_is_divided() -> None:
    free = layouts(plan_of("llama"))
    found = layouts(make_plan(meta_model("llama"), 2, keep_whole=["model.layers.*.mlp", "lm_head"])[0])
    for name, layout in found.items():
        pinned = ".mlp." in name or name.startswith("lm_head")
        assert not (pinned and isinstance(layout, Shard)), name
        if not pinned:
            assert layout == free[name], name


@pytest.mark.parametrize("dim", [0, 1])
def test_what_is_pinned_is_cut_along_that_dim(dim: int) -> None:
    plan, _ = make_plan(meta_model("llama"), 2, cut={"lm_head.weight": dim})
    layout = layouts(plan)["lm_head.weight"]
    assert isinstance(layout, Shard)
    assert [at for at, _ in layout.dims] == [dim]


def test_a_pattern_that_matches_nothing_is_an_error() -> None:
    with pytest.raises(ValueError, match=r"'lm_heat.weight'; did you mean lm_head.weight"):
        make_plan(meta_model("llama"), 2, cut={"lm_heat.weight": 0})
    with pytest.raises(ValueError, match=r"keep_whole: no parameter or module is called 'vision\.\*'"):
        make_plan(meta_model("llama"), 2, keep_whole=["vision.*"])


def test_pins_that_contradict_each_other_are_an_error() -> None:
    with pytest.raises(ValueError, match=r"contradicts keep_whole='lm_head' about lm_head.weight"):
        make_plan(meta_model("llama"), 2, keep_whole=["lm_head"], cut={"lm_head.weight": 0})


def test_an_impossible_cut_is_an_error_that_says_why() -> None:
    with pytest.raises(ValueError, match=r"transformer\.ln_f\.weight"):
        make_plan(meta_model("gpt2"), 2, cut={"transformer.ln_f.weight": 0})


# -- kept ------------------------------------------------------------------------------------------------------------


def planned(model: nn.Module, directory: Path, ranks: int = 2, **options: Any) -> Plan:
    batch = {**ids(5, 61), "use_cache": False}
    given = PlanOptions(plan_cache=directory, **options)
    return pipeline.find_plan(model, trace(model, batch), batch, ranks, given)


def test_the_second_start_finds_the_plan(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = planned(meta_model("llama"), tmp_path)
    (file,) = tmp_path.iterdir()
    assert Plan.from_json(file.read_text()) == first

    def solved(*_: Any) -> Any:
        raise AssertionError("planned again")

    monkeypatch.setattr(pipeline, "feasible_plan", solved)
    assert planned(meta_model("llama"), tmp_path) == first
    for other in (
        {"ranks": 3},
        {"tokens_per_step": 300},
        {"keep_whole": ["lm_head"]},
        {"cut": {"lm_head.weight": 0}},
        {"sequence_parallel": True},
    ):
        with pytest.raises(AssertionError, match="planned again"):
            planned(meta_model("llama"), tmp_path, **other)
    with pytest.raises(AssertionError, match="planned again"):
        planned(meta_model("llama", intermediate_size=136), tmp_path)


def test_a_kept_plan_of_other_code_is_not_followed(tmp_path: Path) -> None:
    first = planned(meta_model("llama"), tmp_path)
    (file,) = tmp_path.iterdir()
    data = json.loads(file.read_text())
    data["modules"][0][1] = "00000000"
    file.write_text(json.dumps(data))
    assert planned(meta_model("llama"), tmp_path) == first
    file.write_text("{")
    assert planned(meta_model("llama"), tmp_path) == first


def test_where_plans_are_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("LIGHTNING_AUTOTP_PLANS", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert PlanCache.of(True).directory == tmp_path / "lightning_autotp" / "plans"
    monkeypatch.setenv("LIGHTNING_AUTOTP_PLANS", str(tmp_path / "named"))
    assert PlanCache.of(True).directory == tmp_path / "named"
    monkeypatch.setenv("LIGHTNING_AUTOTP_PLANS", "")
    assert PlanCache.of(True).directory is None
    assert PlanCache.of(False).directory is None
    assert PlanCache.of(tmp_path).directory == tmp_path


def test_machines_that_keep_a_plan_in_one_directory_write_files_of_their_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Processes of two machines may have the same id."""
    cache, plan = PlanCache(tmp_path), plan_of("llama")
    unfinished, write = [], Path.write_text

    def meanwhile(self: Path, text: str) -> None:
        unfinished.append(self)
        if len(unfinished) == 1:
            write(self, text[:100])
            cache.keep("key", plan)
            assert self.read_text() == text[:100]
        write(self, text)

    monkeypatch.setattr(Path, "write_text", meanwhile)
    cache.keep("key", plan)
    assert len(set(unfinished)) == 2
    assert cache.find("key") == plan
    assert len(list(tmp_path.iterdir())) == 1


def test_a_directory_that_cannot_be_written_to_is_said(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.warns(UserWarning, match="not kept for the next start"):
        planned(meta_model("llama"), tmp_path / "file")
