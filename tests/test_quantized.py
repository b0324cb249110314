"""LoRA on quantized bases at tensor-parallel size > 1, each rank quantizing its part, against one process."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model, prepare_model_for_kbit_training
from test_peft import LINEARS
from test_strategy import Task, blocks, trainer
from torch import Tensor
from torch.utils.data import DataLoader
from trainer_ranks import run_trainer_ranks
from transformers import AutoModelForCausalLM, BitsAndBytesConfig, LlamaConfig, TorchAoConfig

from lightning_autotp import full_gradients, full_state_dict, make_plan, meta_model

bitsandbytes = pytest.importorskip("bitsandbytes")
torchao = pytest.importorskip("torchao.quantization")
pytestmark = pytest.mark.slow

STEPS = 6  # two epochs of three batches
CASES = ["nf4", "fp4 of bfloat16", "int8", "groups", "rows", "float8"]


def config(case: str) -> Any:
    """Five blocks of 64 in each row of the MLP: uneven shares of whole blocks."""
    if case == "nf4":
        return BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4")
    if case == "fp4 of bfloat16":
        return BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="fp4", bnb_4bit_compute_dtype=torch.float32)
    if case == "int8":
        return BitsAndBytesConfig(load_in_8bit=True)
    asked = {
        "groups": torchao.IntxWeightOnlyConfig(torch.int4, torchao.PerGroup(32)),
        "rows": torchao.Int8WeightOnlyConfig(),
        "float8": torchao.Float8WeightOnlyConfig(),
    }
    return TorchAoConfig(asked[case])


def adapted(case: str, folder: Path) -> PeftModel:
    dtype = torch.bfloat16 if "bfloat16" in case else torch.float32
    base = AutoModelForCausalLM.from_pretrained(folder / "source", quantization_config=config(case), dtype=dtype)
    if "bfloat16" in case:
        base = prepare_model_for_kbit_training(base, use_gradient_checkpointing=False)
    # The second factor is not zero: it hides nothing.
    lora = LoraConfig(r=4, lora_alpha=1, target_modules=LINEARS, init_lora_weights=False)
    return get_peft_model(base.train(), lora)


class Tuning(Task):
    """Trains the adapters."""

    def __init__(self, case: str, folder: str) -> None:
        super().__init__("none")
        self.case, self.folder = case, Path(folder)

    def build(self) -> Any:
        return adapted(self.case, self.folder)

    def on_after_backward(self) -> None:
        parallel = any(hasattr(module, "autotp") for module in self.modules())
        grads = {n: p.grad.clone() for n, p in self.named_parameters() if p.grad is not None}
        self.seen["gradients"].append(full_gradients(self) if parallel else grads)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD([p for p in self.parameters() if p.requires_grad], lr=0.02, momentum=0.9)


def tune(case: str, folder: Path, devices: int, **options: Any) -> dict[str, Any]:
    save, ckpt_path = options.pop("save", None), options.pop("ckpt_path", None)
    L.seed_everything(3, verbose=False)
    task = Tuning(case, str(folder))
    fitting = trainer("autotp" if devices > 1 else "auto", devices, **{"max_steps": STEPS, **options})
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


def whole_weights(task: Task) -> dict[str, Tensor]:
    """What the quantized weights of one process stand for, and all others."""
    found = {}
    for path, module in task.named_modules():
        for name, value in module.named_parameters(recurse=False):
            weight = value.detach()
            if isinstance(module, bitsandbytes.nn.Linear4bit) and name == "weight":
                weight = bitsandbytes.functional.dequantize_4bit(value.data, value.quant_state)
            elif isinstance(module, bitsandbytes.nn.Linear8bitLt) and name == "weight":
                weight = bitsandbytes.functional.int8_vectorwise_dequant(module.state.CB, module.state.SCB)
            elif hasattr(weight, "dequantize") and type(weight) is not Tensor:
                weight = weight.dequantize()
            found[f"{path}.{name}"] = weight.clone()
    return found


def ranks(cases: list[str], devices: int, folder: str) -> dict[str, Any]:
    return {case: tune(case, Path(folder), devices) for case in cases}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("quantized")
    torch.manual_seed(11)
    sizes = {"hidden_size": 128, "intermediate_size": 320, "num_attention_heads": 4, "num_key_value_heads": 2}
    llama = LlamaConfig(vocab_size=67, num_hidden_layers=2, tie_word_embeddings=False, **sizes)
    AutoModelForCausalLM.from_config(llama).save_pretrained(directory / "source")
    return directory


@pytest.fixture(scope="module")
def wanted(folder: Path) -> dict[str, dict[str, Any]]:
    """One process."""
    return {case: tune(case, folder, 1) for case in CASES}


@pytest.fixture(scope="module")
def two(folder: Path) -> list[dict[str, Any]]:
    return run_trainer_ranks(ranks, 2, CASES, 2, str(folder))


@pytest.mark.parametrize("case", CASES)
def test_two_ranks_equal_one_process(case: str, two: list[dict[str, Any]], wanted: dict[str, dict[str, Any]]) -> None:
    expected = wanted[case]
    for seen in (found[case] for found in two):
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
        ((dim, owned),) = layouts["model.layers.1.mlp.down_proj.weight"].dims
        widths[case] = dim, owned.local_sizes
    assert widths == {"nf4": (1, (192, 128)), "groups": (1, (160, 160)), "int8": (0, (64, 64))}
    for seen in two:
        for case in CASES:
            kind = "column" if case in ("int8", "rows", "float8") else "row"
            assert seen[case]["kinds"]["model.layers.1.mlp.down_proj.base_layer"] == kind


def test_only_quantized_numbers_are_in_memory(two: list[dict[str, Any]]) -> None:
    """Half a byte for each element, and four bytes for the scale of each block."""
    name = "model.base_model.model.model.layers.0.mlp.down_proj.base_layer.weight"
    for rank, columns in enumerate((192, 128)):
        found = two[rank]["nf4"]["bytes"]
        assert len(found) == 14
        assert 128 * columns * (0.5 + 4 / 64) <= found[name] < 128 * columns * 0.6 + 1000


@pytest.mark.parametrize("case", CASES)
def test_the_saved_adapter_goes_with_the_base_quantized_in_one_process(
    case: str, folder: Path, two: list[dict[str, Any]]
) -> None:
    saved = folder / f"{case} of 2"
    assert json.loads((saved / "adapter_config.json").read_text())["r"] == 4
    dtype = torch.bfloat16 if "bfloat16" in case else torch.float32
    base = AutoModelForCausalLM.from_pretrained(folder / "source", quantization_config=config(case), dtype=dtype)
    loaded = PeftModel.from_pretrained(base, str(saved))
    weights = {name: weight for name, weight in loaded.state_dict().items() if "lora" in name}
    assert len(weights) == 28
    for name, weight in weights.items():
        assert torch.equal(weight, two[0][case]["weights"][f"model.{name}"])
