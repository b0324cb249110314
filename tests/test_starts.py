"""How a run can be started, what is said where it cannot, and the lines that a start prints."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from distributed import PATIENCE, SCRIPT_ENVIRONMENT
from tiny import tiny_model

from lightning_autotp.lightning.starting import check_start

PROGRAM = """
import os, sys
import lightning as L
import torch
from torch.utils.data import DataLoader
from transformers import AutoModelForCausalLM

import lightning_autotp


class Finetune(L.LightningModule):
    def configure_model(self):
        self.drawn = torch.rand(()).item()
        self.model = AutoModelForCausalLM.from_pretrained(os.environ["TINY"]).train()

    def training_step(self, batch, batch_idx):
        return self.model(**batch).loss

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=1e-4)


def fit(devices, **options):
    L.seed_everything(0)
    ids = torch.randint(0, 131, (4, 12))
    batches = DataLoader([{"input_ids": row, "labels": row} for row in ids], batch_size=2)
    quiet = {f"enable_{part}": False for part in ("checkpointing", "progress_bar", "model_summary")} | {"logger": False}
    trainer = L.Trainer(devices=devices, accelerator="cpu", strategy="autotp", max_steps=1, **quiet, **options)
    task = Finetune()
    trainer.fit(task, batches)
    # In one piece: ranks share a pipe.
    print(f"TRAINED {trainer.global_step} of {trainer.world_size}\\nDREW {task.drawn}\\n", end="")
"""
WITHOUT_A_GUARD = f"{PROGRAM}\n\nfit(2)\n"

WITHOUT_A_FILE = f"""{PROGRAM}

from lightning.pytorch.cli import LightningCLI

for options in {{"devices": 2}}, {{"devices": 1, "num_nodes": 2}}:
    try:
        fit(**options)
    except RuntimeError as error:
        print("REFUSED", error)
fit(1)
fit("auto")
LightningCLI(Finetune, args=["fit", "--trainer.strategy", "autotp", "--trainer.devices", "2", "--print_config"])
"""

LINES = [  # of both ranks, and how often at most
    (r"(\[rank: [01]\] )?Seed set to 0", 2),
    (r"GPU available: \w+, used: \w+", 1),
    (r"TPU available: .*", 1),
    (r"💡 Tip: .*", 2),
    (r"Initializing distributed: GLOBAL_RANK: [01], MEMBER: [12]/2", 2),
    (r"-+", 2),
    (r"distributed_backend=gloo", 1),
    (r"All distributed processes registered\. Starting with 2 processes", 1),
    (r"lightning_autotp: planning LlamaForCausalLM for 2 tensor-parallel ranks", 1),
    (
        r"lightning_autotp: LlamaForCausalLM on 2 ranks: \d+\.\d% of the parameters are divided, 5 of 21 tensors stay"
        r" whole; rank 0 holds [\d,]+ of [\d,]+ bytes; \d+ collectives in a step\. Proved;"
        r" model\.autotp\.plan\.table\(\) has the details",
        1,
    ),
    (r"lightning_autotp: filling each rank's part of LlamaForCausalLM's parameters", 1),
    # transformers imports torchao where it is installed; its kernels are CUDA's, and what it calls in torch is old.
    (r"Failed to load .*/torchao/_C_\w+\..*\.so: Could not load this library: .*\.so", 4),
    (r"W\d+ .*/torch/utils/_pytree.py:\d+\] <enum '\w+'> is an Enum subclass .* Calling register_constant\(\).*", 4),
    # Lightning of its own calls of torch's pytrees, with every strategy.
    (r".*/lightning/pytorch/utilities/_pytree.py:\d+: `isinstance\(treespec, LeafSpec\)` is deprecated.*", 2),
    (r"`Trainer\.fit` stopped: `max_steps=1` reached\.", 1),
    (r"TRAINED 1 of 2", 2),
    (r"DREW 0\.\d+", 2),
]


@pytest.fixture(scope="module")
def environment(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Of a process that nothing has launched, in which libraries say what they like."""
    model = tmp_path_factory.mktemp("model")
    tiny_model("llama").save_pretrained(model)
    launched = ("RANK", "WORLD_SIZE", "MASTER_", "LOCAL_", "GROUP_", "TORCHELASTIC", "SLURM_", "NODE_RANK", "PL_")
    hushed = ("TRANSFORMERS_VERBOSITY", "PYTHONWARNINGS", "PYTEST")
    own = {**os.environ, **SCRIPT_ENVIRONMENT, "TINY": str(model), "COLUMNS": "200"}
    return {name: value for name, value in own.items() if not name.startswith((*launched, *hushed))}


def output(arguments: list[str], environment: dict[str, str], given: str | None = None) -> str:
    """What a process and those that it starts print, on both streams."""
    done = subprocess.run(
        [sys.executable, *arguments],
        env=environment, input=given, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=PATIENCE,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout
    return done.stdout


def check_lines(printed: str) -> None:
    left = [line for line in printed.splitlines() if line.strip()]
    for pattern, times in LINES:
        found = [line for line in left if re.fullmatch(pattern, line)]
        assert len(found) <= times, f"{len(found)} times, not {times}: {found[0]}"
        left = [line for line in left if line not in found]
    assert not left, "\n".join(["a start printed what it should not:", *left])
    said = re.findall(r"lightning_autotp: (planning|LlamaForCausalLM|filling)|(TRAINED)", printed)
    assert [one or other for one, other in said] == ["planning", "LlamaForCausalLM", "filling", "TRAINED", "TRAINED"]
    check_drawn(printed, 2)


def check_drawn(printed: str, ranks: int) -> None:
    """A model is built with the numbers that follow on those of the data, as in a process without a strategy."""
    torch.manual_seed(0)
    torch.randint(0, 131, (4, 12))
    assert re.findall(r"^DREW (.*)$", printed, re.MULTILINE) == ranks * [str(torch.rand(()).item())]


def test_a_script_without_a_guard_and_what_it_prints(environment: dict[str, str], tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(WITHOUT_A_GUARD)
    check_lines(output([str(script)], environment))


@pytest.mark.nightly
def test_torchrun(environment: dict[str, str], tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(WITHOUT_A_GUARD)
    launcher = ["-m", "torch.distributed.run", "--nproc-per-node", "2", "--master-port", "0", "--standalone"]
    check_lines(output([*launcher, str(script)], environment))


def test_without_a_file(environment: dict[str, str]) -> None:
    printed = output(["-c", WITHOUT_A_FILE], environment)
    refused = re.findall(r"^REFUSED (.*)$", printed, re.MULTILINE)
    assert len(refused) == 2
    assert "with 2 processes starts the others by running the program's file again, and there is none" in refused[0]
    assert "`torchrun --nproc-per-node 2 train.py`" in refused[0]
    assert refused[1].startswith("num_nodes=2: NODE_RANK, MASTER_ADDR, MASTER_PORT not set")
    assert "torchrun --nnodes 2 --nproc-per-node 1" in refused[1]
    assert printed.count("TRAINED 1 of 1") == 2
    check_drawn(printed, 2)
    assert re.search(r"^  strategy: autotp$", printed, re.MULTILINE)


@pytest.mark.nightly
def test_an_interpreter(environment: dict[str, str]) -> None:
    printed = output(["-i"], environment, f"exec({PROGRAM!r})\nfit(2)\nfit(1)\n")
    assert (
        'RuntimeError: strategy="autotp" with 2 processes starts the others by running the program\'s file' in printed
    )
    assert printed.count("TRAINED 1 of 1") == 1


def test_a_notebook_is_told_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", [__file__])
    check_start(2, 1)
    monkeypatch.setattr(sys, "ps1", ">>> ", raising=False)
    check_start(1, 1)
    with pytest.raises(RuntimeError, match=r"%%writefile train\.py"):
        check_start(2, 1)


def test_machines_are_found_by_their_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("NODE_RANK", "GROUP_RANK", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("MASTER_PORT", "29500")
    with pytest.raises(RuntimeError, match="NODE_RANK, MASTER_ADDR not set"):
        check_start(1, 3)
    monkeypatch.setenv("MASTER_ADDR", "node0")
    monkeypatch.setenv("GROUP_RANK", "1")
    check_start(1, 3)
