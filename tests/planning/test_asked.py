"""A command finds the model that a configuration names, or another class of it, and the batch in a file."""

from __future__ import annotations

import json
from argparse import Namespace
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny import tiny_config
from torch import Tensor, nn
from transformers import AutoConfig, LlamaConfig

from lightning_autotp import make_plan
from lightning_autotp.capture.capture import CaptureError
from lightning_autotp.planning.asked import batch_of, model_of, weight_warnings
from lightning_autotp.planning.machines import Machine
from lightning_autotp.planning.overview import look_over

SIZES = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 1, "num_attention_heads": 4}
PICTURES = {**SIZES, "image_size": 32, "patch_size": 8, "num_labels": 5}


def directory(folder: Path, family: str, **sizes: Any) -> str:
    AutoConfig.for_model(family, **sizes).save_pretrained(folder)
    return str(folder)


@pytest.fixture
def bert(tmp_path: Path) -> str:
    return directory(tmp_path, "bert", **SIZES, vocab_size=131, architectures=["BertForMaskedLM"])


@pytest.fixture
def vit(tmp_path: Path) -> str:
    return directory(tmp_path, "vit", **PICTURES, architectures=["ViTForImageClassification"])


@pytest.mark.parametrize(
    ("auto_class", "found"),
    [
        (None, "BertForMaskedLM"),
        ("AutoModelForSequenceClassification", "BertForSequenceClassification"),
        ("BertForTokenClassification", "BertForTokenClassification"),
    ],
)
def test_the_class_is_the_configuration_s_or_the_one_that_is_named(
    bert: str, auto_class: str | None, found: str
) -> None:
    for name in (bert, f"{bert}/config.json"):
        model = model_of(name, auto_class)
        assert type(model).__name__ == found
        assert all(parameter.is_meta for parameter in model.parameters())


def test_it_has_the_dtype_of_the_configuration(tmp_path: Path) -> None:
    tiny_config("llama", architectures=["LlamaForCausalLM"], dtype="bfloat16").save_pretrained(tmp_path)
    for auto_class in (None, "AutoModelForCausalLM"):
        assert {parameter.dtype for parameter in model_of(str(tmp_path), auto_class).parameters()} == {torch.bfloat16}


@pytest.mark.parametrize(
    ("auto_class", "message"),
    [
        ("AutoModelForSomething", "transformers .* has no model class of that name"),
        ("AutoConfig", "no model class of that name"),
        ("AutoModelForCausalLM", "AutoModelForCausalLM has no model for .*, which is of the type vit: name another"),
    ],
)
def test_a_class_that_cannot_build_it_is_named(vit: str, auto_class: str, message: str) -> None:
    with pytest.raises(ValueError, match=message) as raised:
        model_of(vit, auto_class)
    assert len(str(raised.value).splitlines()) == 1


def test_code_of_a_repository_is_not_run(tmp_path: Path) -> None:
    (tmp_path / "theirs.py").write_text("raise SystemExit('their code ran')")
    config = {
        "model_type": "theirs",
        "auto_map": {"AutoConfig": "theirs.Config", "AutoModelForCausalLM": "theirs.Model"},
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match="trust_remote_code"):
        model_of(str(tmp_path))


def written(file: Path, batch: Any) -> Path:
    if file.suffix == ".json":
        as_lists = {name: x.tolist() if isinstance(x, Tensor) else x for name, x in batch.items()}
        file.write_text(json.dumps(as_lists))
    else:
        torch.save(batch, file)
    return file


@pytest.mark.parametrize("name", ["batch.pt", "batch.json"])
def test_a_batch_is_read_and_a_row_of_it_taken(bert: str, name: str, tmp_path: Path) -> None:
    model = model_of(bert, "AutoModelForSequenceClassification")
    ids = torch.arange(12).view(3, 4)
    given = {"input_ids": ids, "labels": torch.tensor([0, 1, 0]), "return_dict": True}
    batch = batch_of(written(tmp_path / name, given), model, 64)
    assert torch.equal(batch.inputs["input_ids"], ids)
    assert batch.inputs["return_dict"] is True
    assert (batch.rows, batch.has_sequences) == (3, True)
    assert (batch.row["input_ids"].tolist(), batch.row["labels"].tolist()) == ([[0, 1, 2, 3]], [0])


def test_positional_arguments_get_their_names(tmp_path: Path) -> None:
    batch = batch_of(written(tmp_path / "batch.pt", (torch.zeros(5, 6), torch.zeros(5, 6))), nn.Bilinear(6, 6, 2), 64)
    assert [(name, tuple(x.shape)) for name, x in batch.row.items()] == [("input1", (1, 6)), ("input2", (1, 6))]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ({"pixels": torch.zeros(2, 3)}, "is no batch for Bilinear.forward .*, which takes input1, input2"),
        ((torch.zeros(2, 6),) * 3, "is no batch for Bilinear.forward .*, which takes input1, input2"),
        ({"input1": True}, "has no tensor with rows"),
        (Machine.of("H100"), "has not written it, or has written more than tensors.: write the batch with torch.save"),
    ],
)
def test_what_is_no_batch_of_the_model_is_an_error(content: Any, message: str, tmp_path: Path) -> None:
    file = written(tmp_path / "batch.pt", content)
    with pytest.raises(ValueError, match=message) as raised:
        batch_of(file, nn.Bilinear(6, 6, 2), 64)
    assert len(str(raised.value).splitlines()) == 1


def test_a_file_that_is_none_is_an_error(bert: str, tmp_path: Path) -> None:
    for name, content in (("a.json", "[1, 2"), ("b.pt", "no tensors"), ("c.json", "[1]"), ("d.pt", "an example")):
        (tmp_path / name).write_text(content)
        with pytest.raises(ValueError, match="cannot be read"):
            batch_of(tmp_path / name, model_of(bert), 64)
    with pytest.raises(ValueError, match=r"none\.pt' cannot be read"):
        batch_of(tmp_path / "none.pt", model_of(bert), 64)


def test_what_needs_an_example_says_so(vit: str) -> None:
    with pytest.raises(CaptureError, match=r"forward takes pixel_values, .*: --example batch\.pt"):
        batch_of(None, model_of(vit), 64)


def test_models_that_drop_are_rehearsed(vit: str, tmp_path: Path) -> None:
    """Each rank draws its own numbers for its part: a rehearsal draws none."""
    AutoConfig.for_model(
        "vit", **PICTURES, hidden_dropout_prob=0.1, attention_probs_dropout_prob=0.1,
        architectures=["ViTForImageClassification"],
    ).save_pretrained(vit)  # fmt: skip
    model = model_of(vit)
    given = {"pixel_values": torch.zeros(6, 3, 32, 32), "labels": torch.zeros(6, dtype=torch.long)}
    batch = batch_of(written(tmp_path / "batch.pt", given), model, 64)
    assert not batch.has_sequences
    plan, _ = make_plan(model, 2, example_inputs=batch.inputs)
    assert plan.draws
    state = torch.get_rng_state()
    seen = look_over(model, plan, batch.row, Machine.of("H100"), tokens=batch.rows)
    assert (seen.rows, seen.fits) == (6, True)
    assert seen.time.tensor_parallel > 0
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize(("method", "said"), [("gptq", 1), ("torchao", 0), (None, 0)])
def test_weights_that_are_dequantized_are_said(method: str | None, said: int) -> None:
    model = nn.Linear(2, 2)
    model.config = Namespace(quantization_config=None if method is None else {"quant_method": method})  # type: ignore[assignment]
    assert len(["(gptq)" in each for each in weight_warnings(model)]) == said


def test_a_configuration_that_makes_no_model_is_one_error(tmp_path: Path) -> None:
    config = LlamaConfig(hidden_size=96, num_attention_heads=6).to_dict() | {"hidden_size": 97}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match=r"(?s)transformers cannot build .* from its configuration .*97"):
        model_of(str(tmp_path))
