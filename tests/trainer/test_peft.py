"""PEFT's adapters at tensor-parallel size > 1 through the Trainer, against one process."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from adapted import CASES, LINEARS, Preference, Prefix, Tuning, adapted, base_model
from peft import LoraConfig, PeftModel, get_peft_model
from torch import nn
from torch.utils.data import DataLoader
from trainer_ranks import run_trainer_ranks
from training import SavesAfter, assert_parity, blocks, error_of, tiny_config, trainer
from transformers import AutoModelForCausalLM, LlamaConfig

from lightning_autotp import AutoTPStrategy, full_state_dict, make_plan, meta_model
from lightning_autotp.export.adapters import find_adapted, save_adapter


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """With a base model in ``source``, and an adapter that was trained elsewhere in ``adapter``."""
    directory = tmp_path_factory.mktemp("peft")
    torch.manual_seed(11)
    base = AutoModelForCausalLM.from_config(tiny_config())
    base.save_pretrained(directory / "source")
    config = LoraConfig(r=4, target_modules=["q_proj", "down_proj"], init_lora_weights=False)
    get_peft_model(base, config).save_pretrained(str(directory / "adapter"))
    return directory


STEPS = 6  # two epochs of three batches
TWO_RANKS = list(CASES)
THREE_RANKS = ["lora", "transposed"]


def tune(case: str, folder: Path, devices: int, ckpt_path: Path | None = None, **options: Any) -> dict[str, Any]:
    L.seed_everything(3, verbose=False)
    task = Tuning(case, str(folder))
    fitting = trainer("autotp" if devices > 1 else "auto", devices, **{"max_steps": STEPS, **options})
    seen = fitted(task, fitting, ckpt_path)
    seen["states"] = len(fitting.optimizers[0].state)
    seen["trainable"] = [name for name, parameter in task.named_parameters() if parameter.requires_grad]
    if devices > 1 and ckpt_path is None:
        fitting.strategy.save_pretrained(folder / f"{case} of {devices}")
        seen["merging"] = error_of(task.model.merge_adapter)
    return seen


def fitted(task: Tuning, fitting: L.Trainer, ckpt_path: Path | None = None) -> dict[str, Any]:
    batches: Any = DataLoader(blocks()[:12], batch_size=4)  # type: ignore[arg-type]
    fitting.fit(task, batches, ckpt_path=ckpt_path)
    parallel = any(hasattr(module, "autotp") for module in task.modules())
    task.seen["weights"] = full_state_dict(task) if parallel else {k: v.clone() for k, v in task.state_dict().items()}
    return task.seen


PREFERENCES: dict[int, dict[str, tuple[bool, bool, dict[str, Any]]]] = {
    # by ranks and reference: whether that is called first, whether transformers recomputes, the strategy's options
    1: dict.fromkeys(("disabled", "adapter"), (False, False, {})),
    2: {
        "disabled": (False, False, {}),
        "adapter": (True, False, {"sequence_parallel": True, "activation_checkpointing": "blocks"}),
    },
    3: {
        "disabled": (True, True, {"sequence_parallel": True}),
        "adapter": (False, False, {"activation_checkpointing": "blocks"}),
    },
}


def prefer(reference: str, folder: Path, devices: int) -> dict[str, Any]:
    L.seed_everything(3, verbose=False)
    is_first, recomputes, options = PREFERENCES[devices][reference]
    task = Preference(reference, is_first, recomputes, str(folder))
    # At this size sums are left to the addition that joins adapter and base.
    strategy = AutoTPStrategy(tokens_per_step=(4, 4096), **options) if devices > 1 else "auto"
    seen = fitted(task, trainer(strategy, devices, max_steps=2))
    if devices > 1:
        uses = task.model.get_base_model().autotp.plan.implementations
        seen["left"] = [use.module for use in uses if use.output == ("P", "P") and use.module.endswith(".base_layer")]
    return seen


def learn_prefix(folder: Path, devices: int, **options: Any) -> dict[str, Any]:
    L.seed_everything(3, verbose=False)
    strategy = AutoTPStrategy(**options) if devices > 1 else "auto"
    return fitted(Prefix(str(folder)), trainer(strategy, devices, max_steps=2))


def ranks(cases: list[str], devices: int, folder: str) -> dict[str, Any]:
    directory = Path(folder)
    half = directory / "half.ckpt"
    saving = {"lora": [SavesAfter(STEPS // 2, half)]} if devices == 2 else {}
    seen = {case: tune(case, directory, devices, callbacks=saving.get(case)) for case in cases}
    seen["preferences"] = {reference: prefer(reference, directory, devices) for reference in PREFERENCES[devices]}
    if devices == 2:
        seen["prefix"] = learn_prefix(directory, 2, keep_whole=["*.self_attn.*"])
        seen["prefix in parts"] = error_of(learn_prefix, directory, 2)
        seen["no adapter"] = error_of(save_adapter, nn.Linear(2, 2), directory / "none")
    return seen


def resumed(folder: str) -> dict[str, Any]:
    return tune("lora", Path(folder), 3, ckpt_path=Path(folder) / "half.ckpt")


@pytest.fixture(scope="module")
def wanted(folder: Path) -> dict[str, dict[str, Any]]:
    """One process."""
    return {case: tune(case, folder, 1) for case in CASES}


@pytest.fixture(scope="module")
def two(folder: Path) -> list[dict[str, Any]]:
    return run_trainer_ranks(ranks, 2, TWO_RANKS, 2, str(folder))


@pytest.fixture(scope="module")
def three(folder: Path) -> list[dict[str, Any]]:
    """For nightly tests."""
    return run_trainer_ranks(ranks, 3, THREE_RANKS, 3, str(folder))


@pytest.mark.parametrize("case", TWO_RANKS)
def test_two_ranks_equal_one_process(case: str, two: list[dict[str, Any]], wanted: dict[str, dict[str, Any]]) -> None:
    for seen in two:
        assert_parity(seen[case], wanted[case])
        assert seen[case]["states"] == wanted[case]["states"] == len(seen[case]["trainable"])
        assert set(seen[case]["gradients"][0]) == set(wanted[case]["trainable"])


@pytest.mark.nightly
@pytest.mark.parametrize("case", THREE_RANKS)
def test_three_ranks_equal_one_process(
    case: str, three: list[dict[str, Any]], wanted: dict[str, dict[str, Any]]
) -> None:
    for seen in three:
        assert_parity(seen[case], wanted[case])


@pytest.mark.parametrize("ranks", ["two", pytest.param("three", marks=pytest.mark.nightly)])
@pytest.mark.parametrize("reference", PREFERENCES[1])
def test_the_model_is_its_own_reference(
    reference: str, ranks: str, folder: Path, request: pytest.FixtureRequest
) -> None:
    """Without its adapter, or with another one: what the plan leaves to an adapter's addition is summed as well."""
    alone = prefer(reference, folder, 1)
    assert alone["losses"][0] != pytest.approx(math.log(2), abs=1e-3)  # the reference is another model
    for seen in request.getfixturevalue(ranks):
        assert_parity(seen["preferences"][reference], alone)
        assert len(seen["preferences"][reference]["left"]) == 2


def test_a_prefix_is_learned_where_attention_is_whole(folder: Path, two: list[dict[str, Any]]) -> None:
    alone = learn_prefix(folder, 1)
    for seen in two:
        assert_parity(seen["prefix"], alone)
        assert re.fullmatch(
            "RuntimeError: Sizes of tensors must match .*[^.]. This call of LlamaForCausalLM was not proved, as nothing"
            " is known about the DynamicCache that it is given. .* learned \\(prefix tuning\\), that is whole, .* or"
            " keep the attention whole \\(keep_whole=\\)",
            seen["prefix in parts"],
        )


@pytest.mark.parametrize("case", TWO_RANKS)
def test_only_the_adapter_changes(case: str, folder: Path, wanted: dict[str, dict[str, Any]]) -> None:
    L.seed_everything(3, verbose=False)
    before = {f"model.{name}": weight for name, weight in adapted(case, folder).state_dict().items()}
    after = wanted[case]["weights"]
    assert before.keys() == after.keys()
    changed = {name for name in before if not torch.equal(before[name], after[name])}
    assert changed == set(wanted[case]["trainable"])
    assert max((before[name] - after[name]).abs().max() for name in changed) > 1e-3


def test_a_run_goes_on_in_one_process(two: list[dict[str, Any]], folder: Path) -> None:
    """From what two ranks saved half-way, to where they come."""
    alone = tune("lora", folder, 1, ckpt_path=folder / "half.ckpt")
    assert len(alone["losses"]) == STEPS // 2
    for seen in two:
        rest = {kind: seen["lora"][kind][STEPS // 2 :] for kind in ("losses", "gradients")}
        assert_parity({**seen["lora"], **rest}, alone)


@pytest.mark.nightly
@pytest.mark.usefixtures("two")
def test_a_run_goes_on_at_another_size(folder: Path) -> None:
    """What two ranks saved, on three ranks and in one process."""
    alone = tune("lora", folder, 1, ckpt_path=folder / "half.ckpt")
    for seen in run_trainer_ranks(resumed, 3, str(folder)):
        assert_parity(seen, alone)


@pytest.mark.parametrize(
    ("case", "devices"),
    [*((case, 2) for case in TWO_RANKS), *(pytest.param(case, 3, marks=pytest.mark.nightly) for case in THREE_RANKS)],
)
def test_the_saved_adapter_is_pefts_own(
    case: str, devices: int, folder: Path, wanted: dict[str, dict[str, Any]], request: pytest.FixtureRequest
) -> None:
    trained = request.getfixturevalue("two" if devices == 2 else "three")
    saved = folder / f"{case} of {devices}"
    assert {path.name for path in saved.iterdir()} == {"adapter_config.json", "adapter_model.safetensors", "README.md"}
    L.seed_everything(3, verbose=False)
    loaded = PeftModel.from_pretrained(base_model(case, folder), str(saved)).eval()
    L.seed_everything(3, verbose=False)
    expected = adapted(case, folder).eval()
    expected.load_state_dict({n.removeprefix("model."): w for n, w in wanted[case]["weights"].items()})
    ids = torch.arange(12)[None] + 5
    with torch.no_grad():
        torch.testing.assert_close(loaded(input_ids=ids).logits, expected(input_ids=ids).logits, rtol=1e-4, atol=1e-4)
    config = json.loads((saved / "adapter_config.json").read_text())
    assert config["r"] == 4
    assert config["inference_mode"]
    got = loaded.state_dict()
    for name, weight in trained[0][case]["weights"].items():
        if name in wanted[case]["trainable"]:
            assert torch.equal(got[name.removeprefix("model.")], weight)


def test_the_base_is_cut_as_without_an_adapter() -> None:
    """The large matrices as ever; of each pair of factors the one at the cut side is cut with them."""

    def kinds(model: Any) -> dict[str, str]:
        plan, _ = make_plan(model, 8, tokens_per_step=(4, 4096))
        uses = [
            use
            for use in plan.implementations
            if use.module.startswith("model.layers.0.") and use.name in ("column", "row")
        ]
        return {use.module.removeprefix("model.layers.0."): use.name for use in uses}

    sizes = {"hidden_size": 4096, "intermediate_size": 14336, "num_attention_heads": 32, "num_key_value_heads": 8}
    with torch.device("meta"):
        base = AutoModelForCausalLM.from_config(LlamaConfig(vocab_size=128_256, num_hidden_layers=2, **sizes))
    without = kinds(base)
    assert len(without) == 7
    found = kinds(get_peft_model(base, LoraConfig(r=16, target_modules="all-linear")).get_base_model())
    assert {name: found[f"{name}.base_layer"] for name in without} == without
    for name, kind in without.items():
        assert found[f"{name}.lora_B.default" if kind == "column" else f"{name}.lora_A.default"] == kind


@pytest.mark.parametrize("case", [*CASES, "decomposed"])
def test_deferred_adapters_have_the_values_of_one_process(case: str, folder: Path) -> None:
    def build() -> PeftModel:
        torch.manual_seed(5)
        if case == "decomposed":  # the factors are computed from the base's weights, which change
            config = LoraConfig(r=4, target_modules=LINEARS, init_lora_weights="pissa")
            return get_peft_model(base_model(case, folder), config)
        return adapted(case, folder)

    with meta_model():
        deferred = build()
    state = torch.get_rng_state()
    real = build()
    assert torch.equal(state, torch.get_rng_state())
    for (name, parameter), (same, expected) in zip(deferred.named_parameters(), real.named_parameters(), strict=True):
        assert name == same
        assert parameter.is_meta
        assert parameter.requires_grad == expected.requires_grad
        assert torch.equal(parameter.autotp_recipe(), expected)


def test_what_cannot_be_done_says_what_to_do_instead(two: list[dict[str, Any]]) -> None:
    for seen in two:
        assert "load it in one process" in seen["lora"]["merging"]
        assert "not of a Linear: pass what get_peft_model() returned" in seen["no adapter"]


def test_an_adapted_model_is_found_anywhere(folder: Path) -> None:
    model = adapted("lora", folder)
    assert find_adapted(nn.ModuleDict({"inside": model})) is model
    assert find_adapted(model.get_base_model()) is None
