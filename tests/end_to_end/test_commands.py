"""``lightning-autotp plan``: the plan of a directory with a config, and why it is that one."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest
from distributed import run_python
from tiny import tiny_config
from transformers import AutoModelForCausalLM

from lightning_autotp import make_plan
from lightning_autotp.cli import measure_machine, plan
from lightning_autotp.layouts.plan import Plan


def test_command_needs_only_the_config_and_says_details_where_it_is_asked(tmp_path: Path) -> None:
    sizes = {"num_hidden_layers": 1, "max_position_embeddings": 2048}
    config = tiny_config("mixtral", architectures=["MixtralForCausalLM"], **sizes)
    config.save_pretrained(tmp_path)
    output = tmp_path / "plan.json"
    result = run_python("-m", "lightning_autotp.cli", "plan", str(tmp_path), "--tp", "2", "--json", str(output))
    assert result.returncode == 0, result.stderr
    assert "all_reduce" in result.stdout
    said = (line.partition("lightning_autotp: ") for line in result.stderr.splitlines())
    phases = [phase for _, ours, phase in said if ours]
    assert phases[0] == "tracing MixtralForCausalLM"
    assert [phase.split()[0] for phase in phases] == ["tracing", "choosing", "rehearsing"]
    stated = " ".join(result.stdout.split())
    assert "made to fit: a training step takes about" in stated
    assert "of 71.7 GiB of a GPU (H100) (predicted" in stated
    assert Plan.from_json(output.read_text()).ranks == 2
    fits, memory, step, most, rest = result.stdout.splitlines()[:5]
    assert fits.endswith("of a GPU (H100), 8 x 2048 tokens a step")
    assert [part.split()[0] for part in memory.split(", ")] == [
        "parameters", "gradients", "optimizer", "activations", "other",
    ]  # fmt: skip
    assert (step.split()[0], most.split(":")[0], rest.split(":")[0]) == ("step:", "most of it", "try")
    assert max(map(len, result.stdout.splitlines())) <= 80
    assert "\x1b" not in result.stdout

    detailed = run_python("-m", "lightning_autotp.cli", "plan", str(tmp_path), "--tp", "2", "--details")
    assert detailed.returncode == 0, detailed.stderr
    full = " ".join(detailed.stdout.split())
    plan, _ = make_plan(AutoModelForCausalLM.from_config(config), 2, memory=70e9)
    details = [" ".join(line.split()) for line in plan.remarks()]
    assert len(details) > 1
    assert all(line in full for line in details)
    assert not any(line in stated for line in details)
    assert "(--details)" in stated


def test_command_compares_with_a_gpu_and_plans_for_a_limit(tmp_path: Path) -> None:
    tiny_config("llama", architectures=["LlamaForCausalLM"]).save_pretrained(tmp_path)
    small = ["--gpus", "RTX4090", "--gpu-memory", "1.6e9", "--memory", "1e9"]
    small += ["--html", str(tmp_path / "plan.html"), "--trace", str(tmp_path / "step.json")]
    result = run_python("-m", "lightning_autotp.cli", "plan", str(tmp_path), *small)
    assert result.returncode == 0, result.stderr
    assert result.stdout.startswith("does not fit: ")
    assert "of a GPU (RTX4090)" in result.stdout
    assert "made to fit: parameters, gradients and optimizer states take" in result.stdout
    assert "does not fit: " in (tmp_path / "plan.html").read_text()
    assert json.loads((tmp_path / "step.json").read_text())["traceEvents"]


def test_command_pins(tmp_path: Path) -> None:
    tiny_config("llama", architectures=["LlamaForCausalLM"]).save_pretrained(tmp_path)
    output = tmp_path / "plan.json"
    pins = ["--keep-whole", "[model.layers.0, model.embed*]", "--cut", "{lm_head.weight: 1}", "--tokens", "300"]
    pins += ["--device", "cuda"]
    result = run_python("-m", "lightning_autotp.cli", "plan", str(tmp_path), *pins, "--json", str(output))
    assert result.returncode == 0, result.stderr
    assert Plan.from_json(output.read_text()).traced in " ".join(result.stdout.split())
    assert Plan.from_json(output.read_text()).device == "cuda"
    layouts = {p.names[0]: p.layout for p in Plan.from_json(output.read_text()).parameters}
    assert layouts["lm_head.weight"].letter == "S"
    assert not [n for n, x in layouts.items() if x.letter == "S" and n.startswith(("model.layers.0.", "model.embed"))]
    assert "1 x 300 tokens" in result.stdout


def test_command_reports_errors_in_a_line(tmp_path: Path) -> None:
    result = run_python("-m", "lightning_autotp.cli", "plan", str(tmp_path / "nothing"), "--tp", "2")
    assert result.returncode == 1
    assert "Traceback" not in result.stderr
    assert f"plan: {tmp_path}/nothing does not exist: as seen from" in result.stderr


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"html": Path("nowhere/page.html")}, "nowhere/page.html cannot be written: nowhere is no directory"),
        ({"json": Path(__file__).parent}, "end_to_end cannot be written: it is a directory"),
        ({"tp": 0}, "0 tensor-parallel ranks: there must be one or more"),
        ({"gpu_memory": -4.0}, "gpu_memory=-4.0: 3e+09 bytes of a GPU are no tensor's"),
    ],
    ids=str,
)
def test_what_cannot_be_planned_is_said_in_a_line(options: dict[str, Any], message: str, tmp_path: Path) -> None:
    tiny_config("llama", architectures=["LlamaForCausalLM"], num_hidden_layers=1).save_pretrained(tmp_path)
    with pytest.raises(SystemExit) as error:
        plan(str(tmp_path), **options)
    assert message in str(error.value)
    assert len(str(error.value).splitlines()) == 1


def test_nothing_is_measured_that_cannot_be_written(tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match=r"nowhere/mine.yaml cannot be written: .*nowhere is no directory"):
        measure_machine(tmp_path / "nowhere" / "mine.yaml")


def test_the_command_tells_reasons_where_it_is_asked(tmp_path: Path) -> None:
    tiny_config("llama", architectures=["LlamaForCausalLM"]).save_pretrained(tmp_path)

    def run(pattern: str) -> subprocess.CompletedProcess[str]:
        return run_python("-m", "lightning_autotp.cli", "plan", str(tmp_path), "--why", pattern)

    found = run("model.layers.1.*")
    assert found.returncode == 0, found.stderr
    assert "model.layers.1.input_layernorm.weight: whole\n  dim 0 (64): aten.mean.dim in model.layers.1" in found.stdout
    assert "model.layers.1.mlp.up_proj.weight: cut along dim 0" in found.stdout
    assert "model.layers.0.input_layernorm.weight: whole" not in found.stdout
    assert "why: no parameter or module is called 'vision'" in run("vision").stderr


def test_the_command_recommends_sizes(tmp_path: Path) -> None:
    tiny_config("llama", architectures=["LlamaForCausalLM"], num_hidden_layers=1).save_pretrained(tmp_path)
    command = ["-m", "lightning_autotp.cli", "recommend", str(tmp_path), "--tokens", "4096", "--sequence-length", "512"]
    found = run_python(*command, "--gpus", "2xH100")
    assert found.returncode == 0, found.stderr
    assert "one GPU is enough" in found.stdout
    assert "trainer = L.Trainer(" in found.stdout
    assert "\ntrainer:\n" in found.stdout
    wrong = run_python(*command, "--gpus", "2xABACUS")
    assert wrong.returncode == 1
    assert "Traceback" not in wrong.stderr
    assert "recommend: gpus='2xABACUS': write how many of which, as 8xH100" in wrong.stderr


def test_the_doctor_finds_that_processes_meet_here(tmp_path: Path) -> None:
    result = run_python("-m", "lightning_autotp.cli", "doctor", "--json", str(tmp_path / "doctor.json"))
    findings = {finding["check"]: finding for finding in json.loads((tmp_path / "doctor.json").read_text())}
    assert findings["handshake"]["text"].startswith("two processes meet over gloo"), result.stdout
    assert all(finding["text"] in result.stdout for finding in findings.values())
    assert result.returncode == any(finding["level"] == "error" for finding in findings.values())
