"""A rehearsed step of adapters on a quantized base: what is stored, what is there for a moment, what is recommended."""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console
from torch import nn
from transformers import AutoModelForCausalLM, BitsAndBytesConfig, LlamaConfig, TorchAoConfig

from lightning_autotp import cli, meta_model, recommend
from lightning_autotp.capture.capture import language_model_inputs
from lightning_autotp.layouts.plan import Plan
from lightning_autotp.planning.asked import model_of
from lightning_autotp.planning.estimate import memory, step_time
from lightning_autotp.planning.machines import Machine
from lightning_autotp.planning.meter import Work
from lightning_autotp.planning.recommend import Recommendation
from lightning_autotp.planning.rehearsal import Precision, Rehearsal, local_model, one_row, rehearse, with_adapters
from lightning_autotp.planning.report import model_lines, reasons, table
from lightning_autotp.quantized.formats import QuantizationError
from lightning_autotp.quantized.noted import format_of

pytest.importorskip("bitsandbytes")
torchao = pytest.importorskip("torchao.quantization")

SIZES: dict[str, Any] = {
    "hidden_size": 128, "intermediate_size": 320, "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 67,
    "num_hidden_layers": 2, "tie_word_embeddings": False,
}  # fmt: skip
MACHINE = Machine.of("4xH100")
MATRICES = 2 * 7
ELEMENTS = 2 * (128 * (128 + 2 * 64 + 128) + 3 * 128 * 320)
"""Of the matrices that are quantized."""
OUTPUTS = 2 * (128 + 2 * 64 + 128 + 2 * 320 + 128)
"""Rows of these."""


def llama(**changes: Any) -> Any:
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(LlamaConfig(**SIZES | changes))


@lru_cache
def rehearsed(quantize: Any = None, precision: Precision = "bf16-true", length: int = 64, **changes: Any) -> Rehearsal:
    model = llama(**changes)
    row = one_row(model, language_model_inputs(model), length)
    return rehearse(local_model(with_adapters(model, precision, 4, quantize), None), row, precision=precision)


@pytest.mark.parametrize(
    ("quantize", "stored"),
    [
        ("nf4", ELEMENTS // 2 + ELEMENTS // 64 * 4 + MATRICES * 16 * 4),  # 4 bits, scales of 64, what these stand for
        pytest.param("fp4", ELEMENTS // 2 + ELEMENTS // 64 * 4 + MATRICES * 16 * 4, marks=pytest.mark.nightly),
        ("int8", ELEMENTS + OUTPUTS * 4),
    ],
)
def test_what_is_stored_is_what_the_library_makes(quantize: Any, stored: int) -> None:
    plain, found = rehearsed(), rehearsed(quantize)
    assert found.quantized == stored
    assert found.divided == plain.parameters - 2 * ELEMENTS
    assert (found.gradients, found.states) == (plain.gradients, plain.states)
    assert found.rest == plain.rest
    assert found.block == plain.block - ELEMENTS  # half of them, two bytes each


def test_copies_do_not_divide_what_is_quantized() -> None:
    found = rehearsed("nf4")
    assert memory(found, copies=4).parameters == found.quantized + found.divided / 4
    alone = replace(found, work=Work())  # there is nothing that gathering could hide behind
    all_of_it = replace(alone, quantized=0)
    assert step_time(alone, MACHINE, 1, copies=4).copies < step_time(all_of_it, MACHINE, 1, copies=4).copies


def test_the_same_products_are_computed_and_matrices_dequantized_for_them() -> None:
    plain, found = rehearsed(), rehearsed("nf4")
    assert found.work.flops == plain.work.flops
    made = [ran for ran in found.work.ran if ran.name == "bitsandbytes.dequantize_4bit"]
    assert len(made) == 2 * MATRICES - 3  # the first three have no gradient to pass on
    assert all(ran.fixed == ran.bytes for ran in made)
    assert not found.dequantized


def test_a_dequantized_matrix_does_not_grow_with_the_rows() -> None:
    wide = rehearsed("nf4", length=16, hidden_size=512, intermediate_size=4096)
    matrix = 2 * 512 * 4096
    assert wide.peak["dequantized"] == matrix
    assert memory(wide, 3).temporary == 3 * memory(wide, 1).temporary - 2 * matrix


def rehearsed_as_built(model: nn.Module) -> Rehearsal:
    row = one_row(model, language_model_inputs(model), 64)
    return rehearse(local_model(with_adapters(model, "bf16-true", 4), None), row, precision="bf16-true")


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("base")
    AutoModelForCausalLM.from_config(LlamaConfig(**SIZES)).save_pretrained(folder)
    return folder


@pytest.mark.parametrize("precision", ["bf16-true", "bf16-mixed", "32-true"])
@pytest.mark.parametrize("quantize", ["nf4", "int8"])
def test_the_lines_make_the_model_that_was_rehearsed(saved: Path, quantize: Any, precision: Precision) -> None:
    found = Recommendation(
        "LlamaForCausalLM", MACHINE, 512, 64, precision, (), lora=4, quantize=quantize, source=str(saved)
    )
    made: dict[str, Any] = {}
    exec(model_lines(found), made)
    tuning = made["Tuning"]()
    with meta_model():
        tuning.configure_model()
    wanted = with_adapters(llama(), precision, 4, quantize)
    parameters = dict(tuning.model.named_parameters())
    formats = {name: format_of(parameter) for name, parameter in parameters.items()}
    assert formats == {name: format_of(parameter) for name, parameter in wanted.named_parameters()}
    assert sum(format is not None for format in formats.values()) == MATRICES
    dtype = torch.bfloat16 if precision == "bf16-true" else torch.float32
    for name, parameter in wanted.named_parameters():
        assert parameter.dtype == dtype
        assert parameter.requires_grad == parameters[name].requires_grad == ("lora" in name)
        assert parameter.shape == parameters[name].shape


def test_a_model_that_was_built_quantized_is_rehearsed_so(saved: Path) -> None:
    rows = TorchAoConfig(torchao.Int8WeightOnlyConfig())
    four_bits = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=torch.bfloat16)
    found = []
    for config in (rows, four_bits):
        with meta_model():
            found.append(AutoModelForCausalLM.from_pretrained(saved, quantization_config=config, dtype=torch.bfloat16))
    of_rows, of_four_bits = map(rehearsed_as_built, found)
    assert of_rows.quantized == ELEMENTS + OUTPUTS * (4 + 1)  # scales and zero points
    assert of_rows.dequantized > 0  # its products keep the numbers, for the backward pass
    assert of_four_bits == rehearsed("nf4")


def test_a_quantized_checkpoint_s_configuration_is_enough(tmp_path: Path) -> None:
    config = LlamaConfig(**SIZES, architectures=["LlamaForCausalLM"])
    config.quantization_config = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4")
    config.save_pretrained(tmp_path)
    for auto_class in (None, "AutoModelForCausalLM"):
        model = model_of(str(tmp_path), auto_class)
        assert sum(format_of(parameter) is not None for parameter in model.parameters()) == MATRICES
        assert rehearsed_as_built(model).quantized == rehearsed("nf4").quantized
    with pytest.raises(ValueError, match="quantize='nf4': LlamaForCausalLM is quantized already: leave it out"):
        with_adapters(model, "bf16-true", 4, "nf4")


def test_parts_of_a_quantized_base_are_recommended() -> None:
    model = llama(num_hidden_layers=1)
    found = recommend(model, None, "2xH100", 64, 64, precision="bf16-true", lora=4, quantize="nf4")
    said = Console(width=200, record=True)
    said.print(table(found))
    assert "LlamaForCausalLM, LoRA 4 on nf4 on 2 x H100" in said.export_text()
    alone_and_two = [each for each in found.choices if each.data_parallel_size == 1]
    stored = {each.tensor_parallel_size: each.memory.parameters for each in alone_and_two}
    alone = rehearsed("nf4", num_hidden_layers=1)
    assert stored[1] == alone.parameters
    assert alone.parameters / 2 < stored[2] < 0.6 * alone.parameters  # five blocks of 64 are three and two
    heavy = replace(found.choices[0].memory, parameters=1e15)
    none = replace(found, choices=(replace(found.choices[0], fits=False, memory=heavy),))
    assert "tensor-parallel ranks divide a quantized base, and copies do not" in next(reasons(none))


def test_the_command_plans_what_the_run_trains(saved: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    given_to = tmp_path / "plan.json"
    # With no limit of memory, as where a run does not know its device: a GPU would have room for all of it.
    cli.plan(str(saved), lora=4, quantize="nf4", precision="bf16-true", tokens=64, memory=None, json=given_to)
    assert "fits: " in capsys.readouterr().out
    given = Plan.from_json(given_to.read_text())
    owned = {name: parameter.layout for parameter in given.parameters for name in parameter.names}
    ((dim, ownership),) = owned["model.layers.0.mlp.down_proj.base_layer.weight"].dims
    assert (dim, ownership.local_sizes) == (1, (192, 128))
    assert "model.layers.0.mlp.down_proj.lora_A.default.weight" in owned
    with pytest.raises(SystemExit, match="plan: quantize='nf4': known are"):
        cli.plan(str(saved), quantize="nf4")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"quantize": "nf4"}, "known are nf4, fp4, int8, of the frozen base of adapters"),
        ({"quantize": "nf5", "lora": 4}, "quantize='nf5': known are nf4"),
    ],
)
def test_what_is_no_quantized_base_is_said(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        recommend(llama(), **options)


def test_what_cannot_be_quantized_is_said() -> None:
    with pytest.raises(ValueError, match="lora=4: Linear is no model of transformers"):
        with_adapters(nn.Linear(64, 64), "32-true", 4, "nf4")
    with pytest.raises(QuantizationError, match=r"down_proj.weight .*: its rows of 160 are not a multiple of 64"):
        recommend(llama(intermediate_size=160), lora=4, quantize="nf4")
