"""The other examples as torchrun runs them, at small size, each against one process."""

from __future__ import annotations

import csv
import html
import json
import math
import re
from pathlib import Path

import gpu_check
import pytest
import second_device
import torch
from distributed import run_processes, run_python
from dpo import Pairs
from example_runs import ROOT, run, tiny
from instruct import IGNORED, Instructions
from peft import PeftModel
from trainer_ranks import run_script
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, PreTrainedTokenizerFast

__all__ = ["tiny"]  # a fixture
EXAMPLES = ROOT / "examples"
SHORT = ("--max_steps", "4", "--sequence_length", "32")


def last_loss(output: str) -> float:
    return float(re.findall(r"loss[ =:]+(?:after \d+ steps: )?([0-9.]+)", output)[-1])


def losses_of(*script: str, cwd: Path) -> list[float]:
    """The last losses of one process, which writes to out1, and of two, which write to out2."""
    return [
        last_loss(run_script(*script, "--devices", str(n), "--output_dir", f"out{n}", ranks=n, cwd=cwd)) for n in (1, 2)
    ]


@pytest.mark.nightly
def test_lora(tiny: Path, tmp_path: Path) -> None:
    for devices in ("1", "2"):
        run_script(
            *(str(EXAMPLES / "lora.py"), "--model", str(tiny), "--text", str(tiny / "text.txt"), *SHORT),
            *("--devices", devices, "--output_dir", f"adapter{devices}"),
            ranks=int(devices),
            cwd=tmp_path,
        )
    base = AutoModelForCausalLM.from_pretrained(tiny)
    ids = torch.arange(20)[None]
    before = base(ids).logits
    logits = []
    for devices in ("1", "2"):
        adapted = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(tiny), tmp_path / f"adapter{devices}")
        logits.append(adapted.eval()(ids).logits)
    assert (logits[0] - before).abs().max() > 1e-3
    torch.testing.assert_close(logits[1], logits[0], rtol=1e-4, atol=1e-5)


@pytest.mark.nightly
def test_pretraining(tmp_path: Path) -> None:
    (tmp_path / "text.txt").write_text("the quick brown fox jumps over the lazy dog. " * 200)
    common = (str(EXAMPLES / "pretrain.py"), "--text", "text.txt", "--hidden_size", "64", "--layers", "2")
    sizes = ("--sequence_length", "32", "--batch_size", "4", "--max_steps", "8")
    seen = {}
    for devices in ("1", "2"):
        trained = ("--devices", devices, "--output_dir", f"out{devices}")
        run_script(*common, *sizes, *trained, ranks=int(devices), cwd=tmp_path)
        with open(tmp_path / f"out{devices}" / "metrics.csv", newline="") as file:
            rows = list(csv.DictReader(file))
        seen[devices] = [float(row["loss"]) for row in rows if row.get("loss")] + [
            float(row["perplexity"]) for row in rows if row.get("perplexity")
        ]
    assert len(seen["2"]) == 8 + 4
    assert seen["2"] == pytest.approx(seen["1"], rel=1e-5)
    assert seen["2"][7] < seen["2"][0] - 0.3
    models = [AutoModelForCausalLM.from_pretrained(tmp_path / f"out{devices}" / "model") for devices in ("1", "2")]
    for one, other in zip(models[0].parameters(), models[1].parameters(), strict=True):
        torch.testing.assert_close(other, one, rtol=1e-4, atol=1e-5)
    assert (tmp_path / "out2" / "last.ckpt").is_file()


def test_instruction_tuning(tiny: Path, tmp_path: Path) -> None:
    lines = [
        {"question": f"What is the double of {number}?", "answer": f"its double is {2 * number}." * (1 + number % 3)}
        for number in range(24)
    ]
    path = tmp_path / "pairs.jsonl"
    path.write_text("\n".join(json.dumps(line) for line in lines))
    data = Instructions(str(tiny), str(path), max_length=64, batch_size=4)
    data.setup("fit")
    tokenizer = PreTrainedTokenizerFast.from_pretrained(tiny)
    example = data.examples[3]
    counted = [token for token in example["labels"] if token != IGNORED]
    assert tokenizer.decode(counted).strip() == "its double is 6."
    assert example["labels"][: -len(counted)] == [IGNORED] * (len(example["labels"]) - len(counted))
    batch = data.collate(data.examples[:3])
    assert batch["input_ids"].shape == batch["labels"].shape == batch["attention_mask"].shape
    assert (batch["labels"][batch["attention_mask"] == 0] == IGNORED).all()

    for devices in ("1", "2"):
        run_script(
            *(str(EXAMPLES / "instruct.py"), "--model", str(tiny), "--path", str(path), "--max_steps", "4"),
            *("--max_length", "64", "--learning_rate", "1e-3", "--devices", devices, "--output_dir", f"out{devices}"),
            ranks=int(devices),
            cwd=tmp_path,
        )
    models = [AutoModelForCausalLM.from_pretrained(tmp_path / f"out{devices}") for devices in ("1", "2")]
    untrained = AutoModelForCausalLM.from_pretrained(tiny)
    assert not torch.equal(models[1].lm_head.weight, untrained.lm_head.weight)
    for one, other in zip(models[0].parameters(), models[1].parameters(), strict=True):
        torch.testing.assert_close(other, one, rtol=1e-4, atol=1e-4)


def pairs(path: Path) -> Path:
    lines = [{"question": f"What is the double of {n}?", "answer": f"its double is {2 * n}."} for n in range(24)]
    path.write_text("\n".join(json.dumps(line) for line in lines))
    return path


@pytest.mark.nightly  # test_peft.py trains with this loss daily
def test_preferences(tiny: Path, tmp_path: Path) -> None:
    path = pairs(tmp_path / "pairs.jsonl")
    data = Pairs(str(tiny), str(path), max_length=64, batch_size=4)
    data.setup("fit")
    tokenizer = PreTrainedTokenizerFast.from_pretrained(tiny)
    batch = next(iter(data.train_dataloader()))
    said = [tokenizer.decode(row[row != IGNORED]).strip() for row in batch["labels"]]
    assert said == [f"its double is {2 * n}." for n in (0, 1, 2, 3, 1, 2, 3, 4)]
    for own, other, labels in zip(*batch["input_ids"].chunk(2), batch["labels"], strict=False):
        asked = int((labels != IGNORED).int().argmax())
        assert torch.equal(own[:asked], other[:asked])  # the same question

    common = ("--model", str(tiny), "--path", str(path), "--max_steps", "4", "--max_length", "64")
    script = (str(EXAMPLES / "dpo.py"), *common, "--learning_rate", "1e-4", "--batch_size", "4")
    losses = losses_of(*script, cwd=tmp_path)
    assert losses[1] == pytest.approx(losses[0], rel=1e-5)
    assert abs(losses[1] - math.log(2)) > 1e-4  # what it is where the policy is the reference
    one, two = (AutoModelForCausalLM.from_pretrained(tmp_path / f"out{devices}") for devices in ("1", "2"))
    for ours, theirs in zip(one.parameters(), two.parameters(), strict=True):
        torch.testing.assert_close(theirs, ours, rtol=1e-4, atol=1e-5)


@pytest.mark.nightly
def test_a_reward_model(tiny: Path, tmp_path: Path) -> None:
    path = pairs(tmp_path / "pairs.jsonl")
    common = ("--model", str(tiny), "--path", str(path), "--max_steps", "4", "--max_length", "64", "--batch_size", "4")
    script = (str(EXAMPLES / "reward_model.py"), *common, "--learning_rate", "1e-4")
    losses = losses_of(*script, cwd=tmp_path)
    assert losses[1] == pytest.approx(losses[0], rel=1e-5)
    one, two = (
        AutoModelForSequenceClassification.from_pretrained(tmp_path / f"out{devices}") for devices in ("1", "2")
    )
    assert one.config.num_labels == 1
    untrained = AutoModelForCausalLM.from_pretrained(tiny)
    assert not torch.equal(one.model.norm.weight, untrained.model.norm.weight)
    for ours, theirs in zip(one.parameters(), two.parameters(), strict=True):
        torch.testing.assert_close(theirs, ours, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    "name",
    [
        "distillation.py",
        pytest.param("trl_losses.py", marks=pytest.mark.nightly),
        pytest.param("distillation.py --top_k 20", marks=pytest.mark.nightly),
        pytest.param("trl_losses.py --beta 1", marks=pytest.mark.nightly),
    ],
)
def test_distillation(tiny: Path, tmp_path: Path, name: str) -> None:
    if name.startswith("trl"):
        pytest.importorskip("trl", reason="TRL needs Python 3.11")
    file, *options = name.split()
    script = (str(EXAMPLES / file), "--model", str(tiny), "--text", str(tiny / "text.txt"), *SHORT, *options)
    losses = losses_of(*script, cwd=tmp_path)
    assert losses[1] == pytest.approx(losses[0], rel=1e-5)
    one, two = (AutoModelForCausalLM.from_pretrained(tmp_path / f"out{devices}") for devices in ("1", "2"))
    assert one.config.num_hidden_layers == 1
    for ours, theirs in zip(one.parameters(), two.parameters(), strict=True):
        torch.testing.assert_close(theirs, ours, rtol=1e-4, atol=1e-5)


@pytest.mark.nightly
def test_a_plain_loop(tiny: Path, tmp_path: Path) -> None:
    outputs = {}
    for ranks in ("1", "2"):
        outputs[ranks] = run(
            *(
                "-m",
                "torch.distributed.run",
                "--standalone",
                "--nproc-per-node",
                ranks,
                str(EXAMPLES / "plain_loop.py"),
            ),
            *("--model", str(tiny), "--text", str(tiny / "text.txt"), *SHORT, "--output", f"out/{ranks}.pt"),
            cwd=tmp_path,
        )
    numbers = {
        ranks: [float(number) for number in re.findall(r"(?:loss|norm) ([0-9.]+)", output)]
        for ranks, output in outputs.items()
    }
    assert len(numbers["2"]) == 8
    assert numbers["2"] == pytest.approx(numbers["1"], rel=1e-4)
    one, two = (torch.load(tmp_path / "out" / f"{ranks}.pt", weights_only=True) for ranks in ("1", "2"))
    assert one.keys() == two.keys() == AutoModelForCausalLM.from_pretrained(tiny).state_dict().keys()
    for name in one:
        torch.testing.assert_close(two[name], one[name], rtol=1e-4, atol=1e-5)


@pytest.mark.nightly
def test_the_picture_of_a_start(tiny: Path, tmp_path: Path) -> None:
    """docs/start.svg has the lines of a run, in their order, up to the first step."""
    script = (str(EXAMPLES / "finetune.py"), "--model", str(tiny), "--text", str(tiny / "text.txt"))
    small = ("--max-steps", "2", "--sequence-length", "32", "--no-save")
    run(str(ROOT / "tools" / "start_picture.py"), str(tmp_path / "start.svg"), *script, *small, cwd=tmp_path)
    for picture in (tmp_path / "start.svg", ROOT / "docs" / "start.svg"):
        drawn = html.unescape("".join(re.findall(r"<text[^>]*>([^<]*)</text>", picture.read_text())))
        shown = drawn.replace("\N{NO-BREAK SPACE}", " ")
        places = [shown.find(text) for text in ("and proved that", "collectives in a step", "k_proj", "priced for")]
        assert -1 < places[0] < places[1] < places[2] < places[3]
        assert "Warning" not in shown
        assert "Epoch" not in shown


@pytest.mark.nightly
def test_a_trainer_of_transformers(tiny: Path, tmp_path: Path) -> None:
    numbers = {}
    for ranks in ("1", "2"):
        command = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", ranks)
        output = run(
            *(
                *command,
                str(EXAMPLES / "hf_trainer.py"),
                "--model",
                str(tiny),
                "--text",
                str(tiny / "text.txt"),
                *SHORT,
            ),
            *("--output_dir", f"out{ranks}"),
            cwd=tmp_path,
        )
        numbers[ranks] = [float(number) for number in re.findall(r"'(?:loss|grad_norm)': '?([0-9.]+)", output)]
    assert len(numbers["2"]) == 8
    assert numbers["2"] == pytest.approx(numbers["1"], rel=1e-3)  # they are printed with four digits
    one, two = (AutoModelForCausalLM.from_pretrained(tmp_path / f"out{ranks}" / "checkpoint-4") for ranks in ("1", "2"))
    for ours, theirs in zip(one.parameters(), two.parameters(), strict=True):
        torch.testing.assert_close(theirs, ours, rtol=1e-4, atol=1e-5)


def test_a_module_without_hugging_face(tmp_path: Path) -> None:
    script = (str(EXAMPLES / "own_module.py"), "--max_steps", "12")
    losses = [
        last_loss(run_script(*script, "--devices", str(devices), ranks=devices, cwd=tmp_path)) for devices in (1, 2)
    ]
    assert losses[1] == pytest.approx(losses[0], rel=1e-5)
    assert losses[1] < 0.8


def checked_on_the_second_device(rank: int, size: int) -> None:
    second_device.begin()
    gpu_check.main(device=second_device.NAME)
    with pytest.raises(RuntimeError, match="rank 0 computes something else on privateuseone than on the CPU"):
        gpu_check.main(device=second_device.NAME, tolerance=-1.0)


def test_gpu_check(tmp_path: Path) -> None:
    """On the CPU, and on a device that stands in for a GPU."""
    done = run_python(str(EXAMPLES / "gpu_check.py"), "--device", "cpu", cwd=tmp_path)
    assert done.stdout.count("proved, 0.0e+00 off the CPU") == 2, done.stdout + done.stderr
    if second_device.HAS_COMPILER:
        run_processes(checked_on_the_second_device, 1)
