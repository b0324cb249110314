"""LoRA on quantized bases, of which each rank quantizes or reads its part, against one process."""

from __future__ import annotations

import copy
import json
import shutil
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import adapted as adapted_models
import lightning as L
import pytest
import torch
import torch.distributed as dist
from loading import localize
from peft import LoraConfig, PeftModel, get_peft_model, prepare_model_for_kbit_training
from quantized import whole_weights
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from selected import nightly
from torch import Tensor, nn
from torch.utils.data import DataLoader
from trainer_ranks import run_trainer_ranks
from training import SavesAfter, assert_parity, blocks, error_of, trainer
from transformers import AutoConfig, AutoModelForCausalLM, BitsAndBytesConfig, LlamaConfig, TorchAoConfig

from lightning_autotp import (
    AutoTPStrategy,
    PlanMismatch,
    full_state_dict,
    make_plan,
    meta_model,
    parallelize,
    save_pretrained,
)
from lightning_autotp.building.checkpoint_reading import CheckpointTensor
from lightning_autotp.capture.capture import language_model_inputs
from lightning_autotp.layouts.ownership import Ownership
from lightning_autotp.layouts.types import Invariant, Layout, Shard
from lightning_autotp.loading.parameters import load_parameters
from lightning_autotp.parallel.implementations import IMPLEMENTATIONS
from lightning_autotp.parameters.state import parallel_state
from lightning_autotp.proving.read_plan import read_plan
from lightning_autotp.proving.verify import trace
from lightning_autotp.quantized.formats import QuantizationError
from lightning_autotp.quantized.noted import format_of
from lightning_autotp.quantized.weight import QuantizedWeight

bitsandbytes = pytest.importorskip("bitsandbytes")
torchao = pytest.importorskip("torchao.quantization")
pytestmark = pytest.mark.slow

STEPS = 6  # two epochs of three batches
FORMATS = ["nf4", "double nf4", "fp4 of bfloat16", "int8", "groups", "rows", "four bit rows", "float8"]
STORED = [f"stored {name}" for name in ("double nf4", "int8", "rows")]
"""Of checkpoints that one process has quantized."""

REPEATS = ["nf4", "fp4 of bfloat16", "int8", "groups", "four bit rows", "float8", "stored int8", "stored rows"]
"""Those that differ little from others, for nightly tests."""

CASES = [case for case in (*FORMATS, *STORED) if case not in REPEATS]
THREE_RANKS = ["double nf4", "rows", "stored double nf4", "stored rows"]
TWO_COPIES = ["double nf4", "rows", "stored double nf4"]


def config(case: str) -> Any:
    """Of a case; none for "plain"."""
    if case == "plain":
        return None
    if case == "nf4":
        return BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4")
    if case == "double nf4":
        return BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=True)
    if case == "fp4 of bfloat16":
        return BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="fp4", bnb_4bit_compute_dtype=torch.float32)
    if case == "int8":
        return BitsAndBytesConfig(load_in_8bit=True)
    asked = {
        "groups": torchao.IntxWeightOnlyConfig(torch.int4, torchao.PerGroup(32)),
        "four bit rows": torchao.IntxWeightOnlyConfig(
            torch.int4, torchao.PerAxis(0), mapping_type=torchao.MappingType.ASYMMETRIC
        ),
        "rows": torchao.Int8WeightOnlyConfig(),
        "float8": torchao.Float8WeightOnlyConfig(),
    }
    return TorchAoConfig(asked[case])


def base_model(case: str, folder: Path) -> Any:
    if case in STORED:
        return AutoModelForCausalLM.from_pretrained(folder / case)
    dtype = torch.bfloat16 if "bfloat16" in case else torch.float32
    return AutoModelForCausalLM.from_pretrained(folder / "source", quantization_config=config(case), dtype=dtype)


def adapted(case: str, folder: Path, **options: Any) -> PeftModel:
    base = base_model(case, folder)
    if "bfloat16" in case:
        base = prepare_model_for_kbit_training(base, use_gradient_checkpointing=False)
    # The second factor is not zero: it hides nothing.
    lora = LoraConfig(r=4, lora_alpha=1, target_modules=adapted_models.LINEARS, init_lora_weights=False, **options)
    return get_peft_model(base.train(), lora)


class Tuning(adapted_models.Tuning):
    """Trains the adapters."""

    learning_rate = 0.02

    def build(self) -> Any:
        return adapted(self.case, self.folder)


def tune(case: str, folder: Path, devices: int, **options: Any) -> dict[str, Any]:
    save, ckpt_path, copies = options.pop("save", None), options.pop("ckpt_path", None), options.pop("copies", 1)
    L.seed_everything(3, verbose=False)
    task = Tuning(case, str(folder))
    strategy: Any = AutoTPStrategy(data_parallel_size=copies) if devices > 1 else "auto"
    fitting = trainer(strategy, devices, **{"max_steps": STEPS, **options})
    batches: Any = DataLoader(blocks()[:12], batch_size=4)  # type: ignore[arg-type]
    fitting.fit(task, batches, ckpt_path=ckpt_path)
    seen = task.seen
    if save is not None:
        fitting.save_checkpoint(save)
    if devices > 1:
        seen["weights"] = full_state_dict(task)
        plan = task.model.get_base_model().autotp.plan
        seen["kinds"] = {use.module: use.name for use in plan.implementations}
        seen["bytes"] = {
            name: sum(tensor.nbytes for tensor in weight.layer.state_dict().values() if isinstance(tensor, Tensor))
            for name, weight in task.named_parameters()
            if hasattr(weight, "layer")
        }
        if save is None and ckpt_path is None:
            fitting.strategy.save_pretrained(folder / f"{case} of {devices}")
    else:
        seen["weights"] = whole_weights(task)
    return seen


def ranks(cases: list[str], devices: int, folder: str) -> dict[str, Any]:
    directory = Path(folder)
    half = directory / "half.ckpt"
    saving = {"double nf4": [SavesAfter(STEPS // 2, half)]} if devices == 2 else {}
    seen = {case: tune(case, directory, devices, callbacks=saving.get(case)) for case in cases}
    if devices == 2 and cases == CASES:
        seen["other base"] = error_of(tune, "groups", directory, 2, ckpt_path=half)
        seen["quantized before"] = error_of(trainer("autotp", 2).fit, QuantizedBefore("", folder), [])
        seen["exported"] = error_of(export_base, directory)
    elif devices != 2:
        seen["resumed"] = tune("double nf4", directory, devices, ckpt_path=half)
    return seen


def export_base(folder: Path) -> None:
    with meta_model():
        base = AutoModelForCausalLM.from_pretrained(folder / "source", quantization_config=config("nf4"))
    parallelize(base, dist.group.WORLD)
    save_pretrained(base, folder / "exported")


def copies(cases: list[str], folder: str) -> dict[str, Any]:
    """Two copies of two parts each, which see the same rows between them as one process."""
    return {case: tune(case, Path(folder), 4, copies=2, save=Path(folder) / "unused.ckpt") for case in cases}


class QuantizedBefore(Tuning):
    """By a function of a library, in configure_model()."""

    def build(self) -> Any:
        base = AutoModelForCausalLM.from_pretrained(self.folder / "source")
        torchao.quantize_(base, torchao.Int8WeightOnlyConfig())
        return base


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("quantized")
    torch.manual_seed(11)
    sizes = {"hidden_size": 128, "intermediate_size": 320, "num_attention_heads": 4, "num_key_value_heads": 2}
    llama = LlamaConfig(vocab_size=67, num_hidden_layers=1, tie_word_embeddings=False, **sizes)
    AutoModelForCausalLM.from_config(llama).save_pretrained(directory / "source")
    sizes |= {"intermediate_size": 160}  # rows of two and a half blocks
    odd = LlamaConfig(vocab_size=67, num_hidden_layers=1, tie_word_embeddings=False, **sizes)
    AutoModelForCausalLM.from_config(odd).save_pretrained(directory / "odd")
    for name in FORMATS:
        base_model(name, directory).save_pretrained(directory / f"stored {name}")
    return directory


@pytest.fixture(scope="module")
def wanted(folder: Path) -> Callable[[str], dict[str, Any]]:
    """One process."""
    return cache(lambda case: tune(case, folder, 1))


@pytest.fixture(scope="module")
def two(folder: Path) -> list[dict[str, Any]]:
    return run_trainer_ranks(ranks, 2, CASES, 2, str(folder))


@pytest.fixture(scope="module")
def repeats(folder: Path) -> list[dict[str, Any]]:
    return run_trainer_ranks(ranks, 2, REPEATS, 2, str(folder))


@pytest.mark.nightly
def test_two_copies_of_two_parts_equal_one_process(folder: Path) -> None:
    """FSDP2 leaves quantized weights as they are."""
    four = run_trainer_ranks(copies, 4, TWO_COPIES, str(folder))
    for case in TWO_COPIES:
        L.seed_everything(3, verbose=False)
        task = Tuning(case, str(folder))
        task.configure_model()
        optimizer = task.configure_optimizers()
        losses: list[list[float]] = [[], []]
        for batches in zip(four[0][case]["batches"], four[2][case]["batches"], strict=True):
            both = [task.model(input_ids=batch, labels=batch).loss for batch in batches]
            for number, loss in enumerate(both):
                losses[number].append(loss.item())
            optimizer.zero_grad()
            (sum(both) / 2).backward()
            optimizer.step()
        for rank, seen in enumerate(four):
            found = torch.tensor(seen[case]["losses"])
            torch.testing.assert_close(found, torch.tensor(losses[rank // 2]), rtol=1e-5, atol=0)
            for name, weight in whole_weights(task).items():
                torch.testing.assert_close(seen[case]["weights"][name], weight, rtol=1e-4, atol=1e-4)


@pytest.fixture(scope="module")
def three(folder: Path, two: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return run_trainer_ranks(ranks, 3, THREE_RANKS, 3, str(folder))


@pytest.mark.parametrize("case", CASES)
def test_two_ranks_equal_one_process(
    case: str, two: list[dict[str, Any]], wanted: Callable[[str], dict[str, Any]]
) -> None:
    assert_equal(two, case, wanted(case))


@pytest.mark.nightly
@pytest.mark.parametrize("case", REPEATS)
def test_two_ranks_equal_one_process_in_other_formats(
    case: str, repeats: list[dict[str, Any]], wanted: Callable[[str], dict[str, Any]]
) -> None:
    assert_equal(repeats, case, wanted(case))
    kind = "column" if case == "four bit rows" or "int8" in case else "row"
    for seen in repeats:
        assert seen[case]["kinds"]["model.layers.0.mlp.down_proj.base_layer"] == kind


@pytest.mark.nightly
@pytest.mark.parametrize("case", THREE_RANKS)
def test_three_ranks_equal_one_process(
    case: str, three: list[dict[str, Any]], wanted: Callable[[str], dict[str, Any]]
) -> None:
    """Five blocks of 64 are two, two and one."""
    assert_equal(three, case, wanted(case))


@pytest.mark.nightly
def test_a_run_goes_on_at_another_size(three: list[dict[str, Any]], folder: Path) -> None:
    """And in one process without quantization: the checkpoint has the numbers that are computed with."""
    alone = tune("plain", folder, 1, ckpt_path=folder / "half.ckpt")
    assert len(alone["losses"]) == STEPS // 2
    for seen in three:
        assert_parity(seen["resumed"], alone)


def test_what_cannot_be_done_is_said_on_every_rank(two: list[dict[str, Any]]) -> None:
    for seen in two:
        assert "is quantized, and what is loaded into it is not what it stands for" in seen["other base"]
        assert "are quantized already (Int8Tensor), which cannot be cut" in seen["quantized before"]
        assert "QuantizationError" in seen["exported"]
        assert "save_adapter" in seen["exported"]


def assert_equal(found_by: list[dict[str, Any]], case: str, expected: dict[str, Any]) -> None:
    for seen in (found[case] for found in found_by):
        torch.testing.assert_close(torch.tensor(seen["losses"]), torch.tensor(expected["losses"]), rtol=1e-5, atol=0)
        for first, second in zip(seen["gradients"], expected["gradients"], strict=True):
            assert first.keys() == second.keys()
            for name, gradient in second.items():
                torch.testing.assert_close(first[name], gradient, rtol=1e-4, atol=1e-6)
        assert seen["weights"].keys() >= expected["weights"].keys()
        for name, weight in expected["weights"].items():
            if "lora" in name:
                torch.testing.assert_close(seen["weights"][name], weight, rtol=1e-4, atol=1e-4)
            else:
                assert torch.equal(seen["weights"][name], weight), name


def test_cuts_are_between_blocks(folder: Path, two: list[dict[str, Any]]) -> None:
    """Rows of 320 are five blocks of 64, so one rank has three of them; LLM.int8 needs whole rows."""
    widths = {}
    for case in ("nf4", "groups", "int8"):
        with meta_model():
            model = AutoModelForCausalLM.from_pretrained(folder / "source", quantization_config=config(case))
        plan, _ = make_plan(model, 2)
        layouts = {name: parameter.layout for parameter in plan.parameters for name in parameter.names}
        ((dim, owned),) = layouts["model.layers.0.mlp.down_proj.weight"].dims
        widths[case] = dim, owned.local_sizes
    assert widths == {"nf4": (1, (192, 128)), "groups": (1, (160, 160)), "int8": (0, (64, 64))}
    for seen in two:
        for case in CASES:
            kind = "column" if "int8" in case else "row"
            assert seen[case]["kinds"]["model.layers.0.mlp.down_proj.base_layer"] == kind


def test_only_quantized_numbers_are_in_memory(two: list[dict[str, Any]]) -> None:
    """Half a byte for each element, and four bytes for the scale of each block."""
    name = "model.base_model.model.model.layers.0.mlp.down_proj.base_layer.weight"
    for rank, columns in enumerate((192, 128)):
        for case in ("double nf4", "stored double nf4"):
            found = two[rank][case]["bytes"]
            assert len(found) == 7
            assert 128 * columns * (0.5 + 4 / 64) <= found[name] < 128 * columns * 0.6 + 1000


@pytest.mark.parametrize("case", CASES)
def test_the_saved_adapter_goes_with_the_base_quantized_in_one_process(
    case: str, folder: Path, two: list[dict[str, Any]]
) -> None:
    saved = folder / f"{case} of 2"
    assert json.loads((saved / "adapter_config.json").read_text())["r"] == 4
    loaded = PeftModel.from_pretrained(base_model(case, folder), str(saved))
    weights = {name: weight for name, weight in loaded.state_dict().items() if "lora" in name}
    assert len(weights) == 14
    for name, weight in weights.items():
        assert torch.equal(weight, two[0][case]["weights"][f"model.{name}"])


@pytest.mark.parametrize(
    ("asked", "source", "message"),
    [
        (
            BitsAndBytesConfig(load_in_4bit=True),
            "odd",
            r"down_proj\.weight cannot be quantized part by part: its rows of 160 are not a multiple of 64",
        ),
        (
            TorchAoConfig(torchao.Int8DynamicActivationInt8WeightConfig()),
            "source",
            r"q_proj\.weight cannot be quantized part by part: Int8DynamicActivationInt8WeightConfig with PerRow",
        ),
        (
            TorchAoConfig(torchao.Int8WeightOnlyConfig(granularity=torchao.PerTensor())),
            "source",
            r"q_proj\.weight cannot be quantized part by part: Int8WeightOnlyConfig with PerTensor",
        ),
    ],
)
def test_formats_that_cannot_be_cut_are_refused(folder: Path, asked: Any, source: str, message: str) -> None:
    with pytest.raises(QuantizationError, match=message), meta_model():
        AutoModelForCausalLM.from_pretrained(folder / source, quantization_config=asked)


def test_layers_of_a_library_are_refused_while_a_model_is_built(folder: Path) -> None:
    def build() -> None:
        with meta_model():
            base = AutoModelForCausalLM.from_pretrained(folder / "source")
            bitsandbytes.nn.Params4bit(base.lm_head.weight.data, requires_grad=False)

    with pytest.raises(QuantizationError, match="bitsandbytes cannot quantize weights that have no values"):
        build()


@pytest.mark.parametrize("case", ["nf4", "int8", "rows"])
def test_models_that_are_quantized_already_are_refused(case: str, folder: Path) -> None:
    whole = AutoModelForCausalLM.from_pretrained(folder / "source", quantization_config=config(case))
    with pytest.raises(QuantizationError, match="more of LlamaForCausalLM are quantized already"):
        make_plan(whole, 2)


@pytest.mark.parametrize("case", nightly(FORMATS, REPEATS))
def test_parts_of_quantized_checkpoints_are_read(case: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Bit for bit those of the weights of one process, cut along rows and along columns, at the blocks' ends."""
    whole = AutoModelForCausalLM.from_pretrained(folder / f"stored {case}")
    wanted = whole_weights(whole)
    original, read = CheckpointTensor.read, []

    def noted(tensor: CheckpointTensor, *args: Any) -> Tensor:
        read.append(found := original(tensor, *args))
        return found

    monkeypatch.setattr(CheckpointTensor, "read", noted)
    for dim in (0, 1):
        for rank in range(3):
            read.clear()
            with meta_model():
                ours = AutoModelForCausalLM.from_pretrained(folder / f"stored {case}")
            assert all(tensor.numel() < 200 for tensor in read)  # what describes a weight, while the model is built
            formats = {tuple(weight.shape): format_of(weight) for weight in ours.parameters() if format_of(weight)}

            def between(shape: tuple[int, ...], ranks: int, dim: int = dim, formats: Any = formats) -> Layout:
                found = formats.get(shape)
                if found is None:
                    return Invariant()
                unit = found.units(shape)[dim]
                held = Ownership.even(shape[dim] // unit, ranks).held
                runs = tuple(tuple((low * unit, high * unit) for low, high in each) for each in held)
                return Shard(((dim, Ownership(shape[dim], runs)),)) if shape[dim] >= unit * ranks else Invariant()

            localize(ours, rank, 3, between)
            load_parameters(ours)
            cut = 0
            for name, weight in ours.named_parameters():
                if isinstance(weight, QuantizedWeight):
                    cut += weight.shape != wanted[name].shape
                    for block in ours.autotp.metas[name].mapping:
                        here = weight.values()[tuple(slice(*run) for run in block.local)]
                        assert torch.equal(here, wanted[name][tuple(slice(*run) for run in block.original)]), name
                else:
                    assert torch.equal(weight, wanted[name])
            assert cut == (0 if dim and case in ("int8", "four bit rows") else 1 if dim and "4" in case else 7), cut


@pytest.mark.parametrize(
    ("case", "change", "message"),
    [
        (
            "nf4",
            {"mlp.up_proj.weight.absmax": None},
            r"up_proj\.weight cannot be read .*: there is no weight\.absmax of it",
        ),
        ("nf4", {"mlp.up_proj.weight.quant_map": torch.zeros(16)}, "its numbers stand for others than those of nf4"),
        (
            "rows",
            {"mlp.up_proj._weight_scale": None},
            "it consists of _weight_qdata, _weight_zero_point, for",
        ),
        ("int8", {"mlp.up_proj.SCB": None}, "there is no SCB of it"),
    ],
)
def test_quantized_checkpoints_that_lack_something_are_refused(
    case: str, change: dict[str, Tensor | None], message: str, folder: Path, tmp_path: Path
) -> None:
    shutil.copytree(folder / f"stored {case}", tmp_path, dirs_exist_ok=True)
    file = tmp_path / "model.safetensors"
    with safe_open(file, "pt") as opened:
        metadata = opened.metadata()
    tensors = load_file(file)
    for name, value in change.items():
        tensors.pop(f"model.layers.0.{name}")
        if value is not None:
            tensors[f"model.layers.0.{name}"] = value
    save_file(tensors, file, metadata)
    with pytest.raises(QuantizationError, match=message), meta_model():
        AutoModelForCausalLM.from_pretrained(tmp_path)


def test_a_quantized_weight_is_read_as_the_values_it_stands_for_and_not_written(folder: Path) -> None:
    values = torch.randn(4, 128)
    with meta_model():
        base = AutoModelForCausalLM.from_pretrained(folder / "source", quantization_config=config("nf4"))
    found = format_of(base.model.layers[0].mlp.up_proj.weight)
    assert found is not None
    assert format_of(base.lm_head.weight) is None
    weight = nn.Parameter(QuantizedWeight.of(values, found, torch.float32), requires_grad=False)
    assert isinstance(weight, nn.Parameter)
    assert (weight.shape, weight.dtype) == ((4, 128), torch.float32)
    assert 0 < (weight - values).abs().max() < 1
    before = weight.values()
    with pytest.raises(QuantizationError, match="would write into a weight that is quantized"):
        weight.mul_(2)
    assert torch.equal(weight.values(), before)
    assert torch.equal(torch.cat([weight, values]), torch.cat([before, values]))
    assert type(weight.to("meta")) is Tensor
    moved = nn.Linear(128, 4, bias=False)
    moved.weight = weight
    copied: Any = copy.deepcopy(moved).weight
    assert isinstance(copied, nn.Parameter)
    assert copied.layer is not weight.layer
    assert torch.equal(copied.values(), before)
    assert torch.equal(moved.to("cpu", torch.bfloat16).weight.values(), before.bfloat16())


def test_a_plan_that_cuts_blocks_is_refused(folder: Path) -> None:
    """That of the same model without quantization."""
    with torch.device("meta"):
        plain = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder / "source"))
    plan, _ = make_plan(plain, 2)
    with meta_model():
        model = AutoModelForCausalLM.from_pretrained(folder / "source", quantization_config=config("nf4"))
    graph = trace(model, language_model_inputs(model))
    with pytest.raises(PlanMismatch, match=r"down_proj\.weight .* inside blocks .* multiples of \[1, 64\] only"):
        read_plan(plan, graph, IMPLEMENTATIONS)


@pytest.mark.parametrize("case", ["nf4", "rows"])
def test_weights_are_quantized_as_they_were_loaded(case: str, folder: Path) -> None:
    """Also where the model is cast before a rank reads its part."""
    whole = AutoModelForCausalLM.from_pretrained(folder / "source", quantization_config=config(case))
    with meta_model():
        ours = AutoModelForCausalLM.from_pretrained(folder / "source", quantization_config=config(case))
    nn.ModuleList([ours]).to(torch.bfloat16)
    localize(ours, 0, 1, lambda shape, ranks: Invariant())
    load_parameters(ours)
    wanted = whole_weights(whole)
    found = {name: weight for name, weight in ours.named_parameters() if isinstance(weight, QuantizedWeight)}
    assert len(found) == 7
    for name, weight in found.items():
        assert weight.dtype == torch.bfloat16
        assert torch.equal(weight.format.dequantized(weight.layer), wanted[name])


@pytest.mark.parametrize("case", ["double nf4", "fp4 of bfloat16", "groups", "rows"])
def test_dora_starts_with_the_norms_of_what_quantized_weights_stand_for(case: str, folder: Path) -> None:
    """A weight itself is read as it was loaded, in blocks: each rank quantizes its part."""
    wanted: dict[str, Tensor] = {}
    for base in (case, "plain"):
        torch.manual_seed(0)
        whole = adapted(base, folder, use_dora=True).state_dict()
        wanted |= {f"{base} {name}": value for name, value in whole.items() if "magnitude" in name}
    torch.manual_seed(0)
    with meta_model():
        ours = adapted(case, folder, use_dora=True)
    localize(ours, 0, 1, lambda shape, ranks: Invariant())
    read = [meta.init_fn for meta in parallel_state(ours).metas.values() if meta.format is not None]
    assert len(read) == 7
    assert not any(step.name == "rounding" for recipe in read for step in recipe.steps)
    load_parameters(ours)
    found = {name: value for name, value in ours.state_dict().items() if "magnitude" in name}
    assert 2 * len(found) == len(wanted)
    for name, value in found.items():
        assert torch.equal(value, wanted[f"{case} {name}"]), name
        assert not torch.equal(value, wanted[f"plain {name}"]), name
