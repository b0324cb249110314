"""What a parallel model knows of itself follows its parameters' names: objects may be replaced, moved and copied."""

from __future__ import annotations

import copy
import gc
import io
import pickle
import re
import warnings
import weakref
from collections.abc import Callable
from contextlib import redirect_stderr
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from distributed import run_ranks
from local_model import Original, cut, layouts, state_of
from peft import LoraConfig, get_peft_model
from selected import nightly, selected
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module
from torch.nn.utils import parametrize
from training import error_of
from transformers import Qwen3Config, Qwen3ForCausalLM
from wrapped import Around

from lightning_autotp import full_gradients, full_state_dict, grad_norms, load_full_state_dict, meta_model, parallelize
from lightning_autotp.checkpoints.files import open_checkpoint, save_directory
from lightning_autotp.checkpoints.state import (
    full_optimizer_state,
    held_optimizer_state,
    held_state,
    load_full_optimizer_state,
)
from lightning_autotp.gradients.norms import clip_gradients_norm, gradient_norm
from lightning_autotp.gradients.sums import synchronize_gradients
from lightning_autotp.guard.gathered import GatheredForCall
from lightning_autotp.guard.on_parts import check_optimizer
from lightning_autotp.guard.standalone import ForwardDepth, StandaloneCall
from lightning_autotp.guard.user_hooks import UserHooks
from lightning_autotp.layouts.types import Invariant, Replicate
from lightning_autotp.parameters.state import ParallelState, ParameterTable, parallel_state
from lightning_autotp.ranks.group import TPGroup

IDS = torch.randint(0, 67, (2, 9), generator=torch.Generator().manual_seed(1))
LIMIT = 0.1


def model_of_the_original(seed: int = 0) -> Qwen3ForCausalLM:
    """Norms over sharded heads, whose gradients the ranks add up."""
    torch.manual_seed(seed)
    return Qwen3ForCausalLM(
        Qwen3Config(
            vocab_size=67, hidden_size=32, intermediate_size=50, num_hidden_layers=2, num_attention_heads=4,
            num_key_value_heads=2, head_dim=8, tie_word_embeddings=False, bos_token_id=1, eos_token_id=2,
        )
    )  # fmt: skip


def cloned(model: Any) -> Any:
    for module in model.modules():
        for name, parameter in list(module._parameters.items()):
            if parameter is not None:
                setattr(module, name, nn.Parameter(parameter.detach().clone()))
    return model


def converted(flag: Callable[[bool], None]) -> Callable[[Any], Any]:
    def convert(model: Any) -> Any:
        model(input_ids=IDS, labels=IDS).loss.backward()  # the hooks have run once
        model.zero_grad()
        flag(True)
        try:
            return model.to(torch.float64).to(torch.float32)
        finally:
            flag(False)

    return convert


def with_new_data(model: Any) -> Any:
    for parameter in model.parameters():
        parameter.data = parameter.data.clone()
    return model


def wrapped(model: Any) -> Any:
    model.model.layers[0].self_attn.q_norm = Around(model.model.layers[0].self_attn.q_norm)
    model.model.layers[1] = Around(model.model.layers[1])
    return cloned(model)


def compiled(model: Any) -> Any:
    model = copy.deepcopy(model)
    model(input_ids=IDS, use_cache=False)
    for layer in model.model.layers:
        layer.compile(backend="aot_eager", fullgraph=True)
    return model


def adapted_and_back(model: Any) -> Any:
    adapters = get_peft_model(model, LoraConfig(r=2, target_modules=["q_proj", "down_proj"]))
    return adapters.unload().requires_grad_(True)


def written(model: Any, directory: Path) -> dict[str, Tensor]:
    """Each rank's own part, to a directory and into a copy that had other values."""
    save_directory({"state_dict": held_state(model)}, directory, dist.group.WORLD)
    other = cloned(copy.deepcopy(model))
    for parameter in other.parameters():
        parameter.data.zero_()
    load_full_state_dict(other, open_checkpoint(directory, None)["state_dict"])
    return full_state_dict(other)


WAYS: dict[str, Callable[[Any], Any]] = {
    "as it is": lambda model: model,
    "deep copy": copy.deepcopy,
    "deep copy of a copy": lambda model: copy.deepcopy(copy.deepcopy(model)),
    "shallow copy": copy.copy,
    "cloned": cloned,
    "copied, then cloned": lambda model: cloned(copy.deepcopy(model)),
    "pickled": lambda model: pickle.loads(pickle.dumps(model)),
    "new data": with_new_data,
    "swapped": converted(torch.__future__.set_swap_module_params_on_conversion),
    "overwritten": converted(torch.__future__.set_overwrite_module_params_on_conversion),
    "wrapped": wrapped,
    "wrapped, then copied": lambda model: copy.deepcopy(wrapped(model)),
    "compiled": compiled,
    "adapted and back": adapted_and_back,
}
COPYING = ("deep copy", "deep copy of a copy", "copied, then cloned", "pickled", "compiled")
"""Those that leave the model itself as it is, so that one is enough for them."""
OF_A_COPY = ("new data", "swapped", "overwritten", "adapted and back")
"""Those that change a deep copy of it. The others change a model that was just divided."""
REPEATS = ("deep copy of a copy", "shallow copy", "copied, then cloned", "overwritten", "wrapped, then copied")
"""For nightly tests: two of the others one after the other, another way to convert, or less than a deep copy."""


def seen_of(module: Any, model: Any, parallel: bool) -> dict[str, Any]:
    """Gradients of two passes, their norms, what clipping and a step make of them, and the states in the end."""
    for ids in (IDS, IDS.flip(0) % 41):
        loss = model(input_ids=ids, labels=ids, use_cache=False).loss
        loss.backward()
    named = dict(module.named_parameters())
    seen: dict[str, Any] = {"loss": loss.detach()}
    seen["gradients"] = full_gradients(module) if parallel else {n: p.grad.clone() for n, p in named.items()}
    if parallel:
        seen["norm"] = clip_gradients_norm(module, LIMIT)
        assert torch.equal(gradient_norm(module), grad_norms(module)["grad_2.0_norm_total"])
    else:
        seen["norm"] = torch.nn.utils.clip_grad_norm_(named.values(), LIMIT)
    optimizer = torch.optim.SGD(named.values(), lr=1.0, momentum=0.9)
    optimizer.step()
    seen["weights"] = full_state_dict(module) if parallel else {n: v.clone() for n, v in module.state_dict().items()}
    state = full_optimizer_state(optimizer, module) if parallel else optimizer.state_dict()
    seen["moments"] = dict(zip(named, (value["momentum_buffer"] for value in state["state"].values()), strict=True))
    if parallel:
        held = held_optimizer_state(optimizer, module)["state"]
        assert [values["momentum_buffer"].shape for values in held.values()] == [
            tuple(moment.shape) for moment in seen["moments"].values()
        ]
        again = torch.optim.SGD(named.values(), lr=1.0, momentum=0.9)
        load_full_optimizer_state(again, state, module)
        for parameter, values in optimizer.state.items():
            assert torch.equal(values["momentum_buffer"], again.state[parameter]["momentum_buffer"])
        seen["refused"] = error_of(check_optimizer, torch.optim.Adafactor(named.values()), module)
    return seen


class Uses(nn.Module):
    """Its own code uses a parameter of a module that it never calls."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(3)

    def forward(self, x: Tensor) -> Tensor:
        return x * self.norm.weight + self.norm.bias


def used_from_above(group: TPGroup) -> dict[str, Tensor]:
    model = nn.Sequential(Uses())
    model.autotp = state_of(model, group, lambda *_: Replicate())  # type: ignore[assignment]
    synchronize_gradients(model)
    for path, module in model.named_modules():
        if path:
            StandaloneCall(ForwardDepth(model), GatheredForCall(model), UserHooks(model), path, False).attach(
                module, False
            )
    cloned(model)[0](torch.full((3,), float(group.rank + 1))).sum().backward()
    return full_gradients(model)


def late(model: Any, change: Callable[[Any], Any]) -> dict[str, str]:
    """What is said of a model into which something came later."""
    changed = change(copy.deepcopy(model))
    asked: list[Callable[[Any], Any]] = [
        full_state_dict,
        held_state,
        full_gradients,
        grad_norms,
        lambda module: clip_gradients_norm(module, 1.0),
        lambda module: check_optimizer(torch.optim.SGD(module.parameters()), module),
        lambda module: load_full_state_dict(module, {}, strict=False),
    ]
    errors = {error_of(ask, changed) for ask in asked}
    assert len(errors) == 1
    return errors.pop()


def resized(model: Any) -> Any:
    model.lm_head.weight = nn.Parameter(torch.zeros(70, 32))
    return model


def parametrized(model: Any) -> Any:
    parametrize.register_parametrization(model.model.layers[1].mlp.up_proj, "weight", nn.Identity())
    return model


LATE: dict[str, Callable[[Any], Any]] = {
    "adapter": lambda model: get_peft_model(model, LoraConfig(r=2, target_modules=["q_proj", "lm_head"])),
    "saved module": lambda model: get_peft_model(
        model, LoraConfig(r=2, target_modules=["v_proj"], modules_to_save=["lm_head"])
    ),
    "parametrization": parametrized,
    "other shape": resized,
}


def on_every_rank(rank: int, world_size: int, directory: str, ways: list[str]) -> dict[str, Any]:
    seen: dict[str, Any] = {}
    with redirect_stderr(io.StringIO()) as said:
        original = parallelize(model_of_the_original(), dist.group.WORLD)
    seen["said"] = said.getvalue()
    seen["sums"] = sorted(original.autotp.gradient_sums)
    for name in ways:
        if name in COPYING:
            model = original
        elif name in OF_A_COPY:
            model = copy.deepcopy(original)
        else:
            model = parallelize(model_of_the_original(), dist.group.WORLD)
        model = WAYS[name](model)
        holder = nn.ModuleDict({"model": model})
        seen[name] = seen_of(holder, model, parallel=True)
    seen["used from above"] = used_from_above(TPGroup.of(dist.group.WORLD))
    seen["late"] = {name: late(original, change) for name, change in LATE.items()}
    seen["twice"] = error_of(parallelize, original, dist.group.WORLD)
    partner = model_of_the_original()
    partner.lm_head.weight = (model := model_of_the_original()).lm_head.weight
    parallelize(model, dist.group.WORLD)
    divided = parallelize_module(model_of_the_original(), init_device_mesh("cpu", (2,)), {"lm_head": ColwiseParallel()})
    seen["DTensor"] = error_of(parallelize, divided, dist.group.WORLD)
    seen["shared"] = error_of(parallelize, partner, dist.group.WORLD)
    seen["by itself"] = error_of(copy.deepcopy(original).save_pretrained, directory)
    seen["written"] = written(cloned(copy.deepcopy(original)), Path(directory) / "checkpoint")
    seen["independent"] = independent(original)
    seen["part"] = part_in_a_file(original, Path(directory), rank)
    return seen


def part_in_a_file(original: Any, directory: Path, rank: int) -> dict[str, Any]:
    """What is said while this rank's state dict is written, and when each rank's is loaded."""
    seen: dict[str, Any] = {}
    holder = nn.ModuleDict({"model": copy.deepcopy(original)})
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        state = copy.deepcopy(holder.state_dict())
        holder.load_state_dict(state)
        held_state(holder)
        full = full_state_dict(holder)
        torch.save(full, directory / f"full{rank}.pt")
        seen["without a file"] = [str(warning.message) for warning in caught]
        torch.save(state, directory / f"part{rank}.pt")
        seen["with a file"] = [str(warning.message) for warning in caught]
    dist.barrier()
    parts = [torch.load(directory / f"part{other}.pt", weights_only=True) for other in range(2)]
    seen["loaded"] = [error_of(holder.load_state_dict, part) for part in parts]
    seen["as full"] = error_of(load_full_state_dict, holder, parts[rank])
    seen["as it was"] = all(torch.equal(value, full[name]) for name, value in full_state_dict(holder).items())
    otherwise = nn.ModuleDict({"model": parallelize(model_of_the_original(), dist.group.WORLD, keep_whole=["lm_head"])})
    seen["cut otherwise"] = error_of(otherwise.load_state_dict, parts[rank])
    return seen


def independent(original: Any) -> bool:
    """A copy is trained, and the original is not."""
    before = full_state_dict(original)
    made = copy.deepcopy(original)
    made(input_ids=IDS, labels=IDS).loss.backward()
    torch.optim.SGD(made.parameters(), lr=1.0).step()
    after, trained = full_state_dict(original), full_state_dict(made)
    assert not full_gradients(original)
    return all(torch.equal(before[n], after[n]) for n in before) and not torch.equal(
        trained["lm_head.weight"], before["lm_head.weight"]
    )


@pytest.fixture(scope="module")
def two(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return run_ranks(on_every_rank, 2, str(tmp_path_factory.mktemp("state")), selected(request, "way"))


@pytest.fixture(scope="module")
def wanted() -> dict[str, Any]:
    model = model_of_the_original()
    return seen_of(nn.ModuleDict({"model": model}), model, parallel=False)


@pytest.mark.parametrize("way", nightly(WAYS, REPEATS))
def test_it_is_one_process_whatever_became_of_the_objects(
    way: str, two: list[dict[str, Any]], wanted: dict[str, Any]
) -> None:
    assert wanted["norm"] > 5 * LIMIT  # clipping does something
    plain = [name.replace(".inner", "") for name in two[0][way]["weights"]]
    assert plain == list(wanted["weights"])
    for seen in (rank[way] for rank in two):
        torch.testing.assert_close(seen["loss"], wanted["loss"], rtol=1e-5, atol=0)
        torch.testing.assert_close(seen["norm"], wanted["norm"], rtol=1e-5, atol=0)
        assert "the pieces of a random tensor are updated differently from the whole" in seen["refused"]
        for part in ("gradients", "weights", "moments"):
            found = {name.replace(".inner", ""): value for name, value in seen[part].items()}
            assert found.keys() == wanted[part].keys()
            for name, value in wanted[part].items():
                where = f"{part} of {name}: "
                torch.testing.assert_close(
                    found[name], value, rtol=1e-4, atol=1e-6, msg=lambda text, where=where: where + text
                )


def test_there_are_gradients_to_be_summed(two: list[dict[str, Any]]) -> None:
    """Else the tests above prove nothing of sums: alone each rank would have half of such a gradient."""
    summed = {name.split(".", 4)[-1] for name in two[0]["sums"]}
    assert summed == {"q_norm.weight", "k_norm.weight"}


def test_a_module_that_uses_anothers_parameter_sees_to_its_sum(two: list[dict[str, Any]]) -> None:
    for seen in two:
        assert seen["used from above"]["0.norm.weight"].tolist() == [3.0] * 3
        assert seen["used from above"]["0.norm.bias"].tolist() == [2.0] * 3


@pytest.mark.parametrize(
    ("case", "said"),
    [
        ("adapter", "model.layers.1.self_attn.q_proj.lora_B.default.weight, lm_head.lora_A.default.weight and 1 more"),
        ("saved module", "lora_B.default.weight, lm_head.modules_to_save.default.weight"),
        ("parametrization", "model.layers.1.mlp.up_proj.parametrizations.weight.original joined the parallel"),
        ("other shape", "lm_head.weight is (70, 32), this rank's part ("),
    ],
)
def test_what_came_later_is_an_error(case: str, said: str, two: list[dict[str, Any]]) -> None:
    for seen in two:
        assert seen["late"][case].startswith("RuntimeError: ")
        assert said in seen["late"][case], seen["late"][case]


def test_what_was_done_is_said_once(two: list[dict[str, Any]]) -> None:
    first, other = (seen["said"].splitlines() for seen in two)
    assert other == []
    *phases, planned, divided, filled = first
    assert [line.split()[1] for line in phases] == ["tracing", "choosing", "proving"]
    assert re.fullmatch(
        r"lightning_autotp: planned Qwen3ForCausalLM for 2 tensor-parallel ranks, and proved that together they compute"
        r" what the original model does, in \d+\.\d s, traced with a synthetic batch, as on cpu",
        planned,
    )
    assert re.match(
        r"lightning_autotp: Qwen3ForCausalLM on 2 ranks: \d+\.\d% of the FLOPs and \d+\.\d% of the parameters are"
        r" divided",
        divided,
    )
    assert re.fullmatch(
        r"lightning_autotp: each rank's part of Qwen3ForCausalLM's weights was cut from the given model in \d+\.\d s",
        filled,
    )


def test_a_model_is_parallelized_once(two: list[dict[str, Any]]) -> None:
    for seen in two:
        assert "a model that was parallelized already" in seen["twice"]


def test_a_model_that_something_else_has_divided_is_refused(two: list[dict[str, Any]]) -> None:
    for seen in two:
        assert (
            "RuntimeError: lm_head.weight of Qwen3ForCausalLM are DTensors, which parallelize_module" in seen["DTensor"]
        )
        assert "leave that out" in seen["DTensor"]


def test_a_parameter_is_in_one_parallel_model(two: list[dict[str, Any]]) -> None:
    assert all("lm_head.weight of this Qwen3ForCausalLM is also a parameter of" in ranks["shared"] for ranks in two)


def test_a_model_does_not_save_this_ranks_part_by_itself(two: list[dict[str, Any]]) -> None:
    assert all("trainer.strategy.save_pretrained(directory)" in ranks["by itself"] for ranks in two)


def test_a_part_in_a_file_does_not_look_whole(two: list[dict[str, Any]]) -> None:
    for rank, seen in enumerate(ranks["part"] for ranks in two):
        assert seen["without a file"] == []
        [said] = seen["with a file"]
        assert f"only the part of rank {rank} of 2" in said
        assert "lightning_autotp.full_state_dict(model)" in said
        other = 1 - rank
        assert seen["loaded"][rank] == "no error"
        assert f"that rank {other} of 2 had, and this is rank {rank} of 2" in seen["loaded"][other]
        assert "lightning_autotp.full_state_dict(model)" in seen["loaded"][other]
        assert f"rank {rank} of 2 had, cut in another way" in seen["cut otherwise"]
        assert "It has the shapes of one rank's part" in seen["as full"]
        assert seen["as it was"]


def test_a_copy_is_independent(two: list[dict[str, Any]]) -> None:
    assert all(seen["independent"] for seen in two)


def test_parts_are_written_and_read_whatever_became_of_the_objects(two: list[dict[str, Any]]) -> None:
    expected = model_of_the_original().state_dict()
    for seen in two:
        assert seen["written"].keys() == expected.keys()
        assert all(torch.equal(seen["written"][name], value) for name, value in expected.items())


GROUP = TPGroup("", 1, 2)


def part() -> Any:
    """The second of two ranks' part of a model with tied parameters."""
    return cut(Original(), GROUP, layouts(2))


def test_a_copy_has_metas_of_its_own_and_the_same_plan_and_group() -> None:
    model = part()
    made = copy.deepcopy(nn.ModuleDict({"inside": model}))["inside"]
    old, new = parallel_state(model), parallel_state(made)
    assert new is not old
    assert new.plan is old.plan
    assert new.group == old.group
    assert new.metas == old.metas
    assert new.metas["even"] is new.metas["head.weight"]
    assert not {id(meta) for meta in new.metas.values()} & {id(meta) for meta in old.metas.values()}


def test_parameters_are_found_by_what_they_are_now() -> None:
    model = part()
    model.uneven = nn.Parameter(model.uneven.detach().clone())
    holder = nn.ModuleDict({"one": model, "other": part()})
    holder.own = nn.Parameter(torch.ones(7))
    table, metas = ParameterTable(holder), parallel_state(model).metas
    assert table.group == GROUP
    assert table.meta(model.uneven) is metas["uneven"]
    assert table.meta(model.head.weight) is table.meta(model.even) is metas["even"]
    assert table.meta(holder["other"].uneven) is parallel_state(holder["other"]).metas["uneven"]
    assert table.meta(holder.own) is None
    assert table.meta(model.steps) is None
    assert table.meta(model.uneven.detach()) is None


def test_a_model_inside_of_another_keeps_its_own_state() -> None:
    model = part()
    model.teacher = part()
    table = ParameterTable(model)
    assert table.meta(model.teacher.uneven) is parallel_state(model.teacher).metas["uneven"]
    assert {place.module for place in parallel_state(model).places(model)} == {model, model.head}


def test_a_module_is_known_wherever_it_goes_and_what_takes_its_place_by_the_path() -> None:
    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Linear(3, 2), nn.Linear(3, 2)

    def named(model: nn.Module) -> dict[str, str]:
        return {
            place.name: next(name for name, p in model.named_parameters() if p is place.parameter)
            for place in parallel_state(model).places(model)
        }

    model = Two()
    model.autotp = state_of(model, GROUP, lambda *_: Invariant())  # type: ignore[assignment]
    same = {name: name for name in ("first.weight", "first.bias", "second.weight", "second.bias")}
    assert named(model) == same
    model.first, model.second = model.second, model.first
    assert named(model) == {
        "second.weight": "first.weight", "second.bias": "first.bias",
        "first.weight": "second.weight", "first.bias": "second.bias",
    }  # fmt: skip
    assert named(copy.deepcopy(model)) == named(model)
    model.first, model.second = model.second, model.first
    model.first = nn.Linear(3, 2)  # as libraries convert layers
    assert named(model) == same
    model.first = nn.Sequential(model.second)
    model.second = nn.Linear(3, 2)
    with pytest.raises(RuntimeError, match=r"^second\.weight, second\.bias joined the parallel Two after"):
        parallel_state(model).places(model)
    del model.second
    assert named(model) == {"second.weight": "first.0.weight", "second.bias": "first.0.bias"}


def test_a_part_that_is_thrown_away_is_gone() -> None:
    model = part()
    head = weakref.ref(model.head)
    del model.head
    gc.collect()
    assert head() is None
    assert ParameterTable(copy.deepcopy(model)).group == GROUP


def test_every_parameter_that_does_not_fit_is_named() -> None:
    model = part()
    model.uneven = nn.Parameter(torch.zeros(7))
    model.scalar = nn.Parameter(torch.zeros(1))
    with pytest.raises(
        RuntimeError, match=r"was changed after .*\n  uneven is \(7,\).*part \(3,\)\n  scalar is \(1,\).*\(\)\nMake"
    ):
        ParameterTable(model)


def test_recipes_wait_on_the_parameters_until_there_is_a_state() -> None:
    with meta_model():
        model = nn.Sequential(nn.Linear(3, 4), nn.Linear(3, 4))
        model[1].weight = model[0].weight
        outside = nn.Linear(2, 2)
    other = nn.ModuleDict({"moved": model[0], "renamed": nn.Module()})
    other["renamed"].register_parameter("matrix", model[1].weight)
    other.to(torch.bfloat16)
    state = state_of(other, GROUP, lambda *_: Invariant())
    assert state.metas["moved.weight"] is state.metas["renamed.matrix"]
    assert state.metas["moved.weight"].dtype == torch.bfloat16
    assert all(meta.init_fn is not None and meta.need_initialize for meta in state.metas.values())
    assert not any(hasattr(parameter, "autotp_recipe") for parameter in other.parameters())
    assert hasattr(outside.weight, "autotp_recipe")


def test_a_plan_with_two_layouts_for_one_parameter_is_refused() -> None:
    model = Original()
    state = state_of(model, GROUP, lambda name, _: layouts(2)[name])
    even = next(parameter for parameter in state.plan.parameters if parameter.names[0] == "even")
    layout = {"even": even.layout, "head.weight": Invariant()}
    split = [replace(even, names=(name,), layout=layout[name]) for name in even.names]
    others = [parameter for parameter in state.plan.parameters if parameter is not even]
    with pytest.raises(ValueError, match=r"even, head\.weight are tied, and the plan has several layouts"):
        ParallelState.of(model, replace(state.plan, parameters=(*others, *split)), GROUP)
