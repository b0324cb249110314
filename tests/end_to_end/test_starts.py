"""How a run can be started, what is said where it cannot, and the lines that a start prints."""

from __future__ import annotations

import ast
import importlib
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from distributed import PATIENCE, SCRIPT_ENVIRONMENT
from tiny import tiny_model
from torch import nn

import lightning_autotp
from lightning_autotp.capture.nested import map_tensors
from lightning_autotp.lightning.starting import check_start
from lightning_autotp.lightning.tracebacks import BriefErrors
from lightning_autotp.ranks.agreement import PeerError, Raised
from lightning_autotp.ranks.peers import PeerWatch

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
    (r"lightning_autotp: tracing LlamaForCausalLM", 1),
    (r"lightning_autotp: choosing a plan for LlamaForCausalLM", 1),
    (r"lightning_autotp: proving that the ranks compute what LlamaForCausalLM does", 1),
    (
        r"lightning_autotp: planned LlamaForCausalLM for 2 tensor-parallel ranks, and proved that together they compute"
        r" what the original model does, in \d+\.\d s, traced with"
        r" the call of the first training step, its batch cut to a few short sentences, as on cpu",
        1,
    ),
    (
        r"lightning_autotp: LlamaForCausalLM on 2 ranks: \d+\.\d% of the FLOPs and \d+\.\d% of the parameters are"
        r" divided, 3 of 12 tensors stay whole; rank 0 stores [\d.]+ KiB of [\d.]+ KiB in 32 bits; \d+ collectives in a"
        r" step;"
        r" model\.autotp\.plan\.table\(\) has"
        r" the details",
        1,
    ),
    (r"lightning_autotp: each rank's part of LlamaForCausalLM's weights was read from /.*model\d in \d+\.\d s", 1),
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
    tiny_model("llama", num_hidden_layers=1).save_pretrained(model)
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
    said = re.findall(r"lightning_autotp: (planned|LlamaForCausalLM|each rank)|(TRAINED)", printed)
    assert [one or other for one, other in said] == ["planned", "LlamaForCausalLM", "each rank", "TRAINED", "TRAINED"]
    check_drawn(printed, 2)


def check_drawn(printed: str, ranks: int) -> None:
    """A model is built with the numbers that follow on those of the data, as in a process without a strategy."""
    torch.manual_seed(0)
    torch.randint(0, 131, (4, 12))
    assert re.findall(r"^DREW (.*)$", printed, re.MULTILINE) == ranks * [str(torch.rand(()).item())]


HEAVY = {"torch", "lightning", "transformers", "torchmetrics", "torchao", "accelerate", "scipy", "numpy", "rich"}
IMPORTED = f"""
print("IMPORTED", *sorted(set(sys.modules) & {HEAVY}))
"""


def imported(program: str, environment: dict[str, str]) -> list[str]:
    """Which heavy libraries a program has imported at its end. Nothing warns meanwhile."""
    return imported_in(output(["-c", f"import sys\n{program}\n{IMPORTED}"], environment))


def imported_in(printed: str) -> list[str]:
    """As a program says that ends with ``IMPORTED``."""
    said, found = printed.split("IMPORTED")
    assert not re.search("torchao|Warning", said), said
    return found.split()


@pytest.mark.parametrize("words", [["--help"], ["plan", "--help"], ["plan", "model", "--tp", "two"]], ids=" ".join)
def test_the_command_answers_before_it_imports(environment: dict[str, str], words: list[str]) -> None:
    program = f"""
from lightning_autotp.cli import main
sys.argv = ["lightning-autotp", *{words}]
try:
    main()
except SystemExit:
    pass
"""
    assert imported(program, environment) == []


REGISTERED = """
import lightning, lightning_autotp, sys
import lightning.pytorch.strategies as strategies
for kind in lightning.Trainer, lightning.Fabric:
    made = kind(strategy="autotp", accelerator="cpu", devices=1)
    print("MADE", type(made.strategy).__name__)
print("LOADER", type(strategies.__loader__).__name__, any("WhenImported" in repr(one) for one in sys.meta_path))
"""


def check_registered(printed: str) -> None:
    assert re.findall(r"^MADE (\w+)$", printed, re.MULTILINE) == ["AutoTPStrategy", "AutoTPFabricStrategy"]
    assert "LOADER SourceFileLoader False" in printed
    assert "torchao" not in printed


def test_what_is_imported_is_what_is_used_and_the_name_is_registered(environment: dict[str, str]) -> None:
    program = f"""
import sys
import lightning_autotp
{IMPORTED}
print("THEN")
from lightning_autotp import parallelize
{IMPORTED}
print("THEN")
import lightning_autotp.planning.asked, lightning_autotp.planning.measure
{IMPORTED}
print("THEN")
{REGISTERED}
"""
    alone, used, planning, registered = output(["-c", program], environment).split("THEN")
    imported_in(planning)
    assert imported_in(alone) == []
    found = imported_in(used)
    assert "torch" in found
    assert not {"lightning", "torchmetrics"} & set(found)
    check_registered(registered)


@pytest.mark.nightly
@pytest.mark.parametrize("first", ["lightning_autotp", "lightning"])
def test_the_name_is_registered_whatever_is_imported_first(environment: dict[str, str], first: str) -> None:
    check_registered(output(["-c", f"import {first}\n{REGISTERED}"], environment))


def test_type_checkers_see_the_names_that_there_are() -> None:
    source = ast.parse(Path(lightning_autotp.__file__).read_text())
    [seen] = [node for node in source.body if isinstance(node, ast.If)]
    imports = [node for node in seen.body if isinstance(node, ast.ImportFrom)]
    names = {alias.name: node.module for node in imports for alias in node.names}
    assert sorted(names) == lightning_autotp.__all__
    for name, module in names.items():
        assert module is not None
        assert getattr(lightning_autotp, name) is getattr(importlib.import_module(module), name)
    with pytest.raises(AttributeError, match="module 'lightning_autotp' has no attribute 'paralelize'"):
        lightning_autotp.paralelize  # noqa: B018


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


def test_an_error_is_printed_once_without_the_frames_of_libraries(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    usual: list[Any] = []
    watch = mock.Mock(**{"explains.return_value": False})
    monkeypatch.setattr(PeerWatch, "latest", watch)
    monkeypatch.setattr(sys, "excepthook", lambda *given: usual.append(given))
    monkeypatch.setattr(BriefErrors, "_one", None)
    hook, strategy = sys.excepthook, nn.Identity()
    BriefErrors.begin(strategy)

    def printed(error: BaseException, how: Raised | None = None) -> list[str]:
        def fail(_: Any) -> Any:
            try:
                json.loads("no json")
            except ValueError as cause:
                raise error from cause

        try:
            map_tensors(fail, torch.zeros(1))  # which is of this package
        except BaseException as raised:
            vars(raised)["autotp_raised"] = how
            sys.excepthook(type(raised), raised, raised.__traceback__)
        return capsys.readouterr().err.splitlines()

    said = printed(ValueError("first line\nsecond line"))
    assert said[:2] == ["ValueError: first line", "second line"]
    assert sum("test_starts.py" in line for line in said) == 3  # printed() and twice fail(), for its cause
    assert [re.sub(r"\d+", "N", line) for line in said if "frames in" in line] == [
        "  ... N frames in lightning_autotp",
        "  ... N frames in python",
    ]
    assert any(line.startswith("caused by json.decoder.JSONDecodeError: ") for line in said)
    assert "TORCH_DISTRIBUTED_DEBUG=INFO" in said[-1]
    assert printed(PeerError("rank 1 of 2 failed while x: ValueError: y\nmore")) == [
        "PeerError: rank 1 of 2 failed while x: ValueError: y"
    ]
    assert printed(ValueError("y"), Raised(1, False, True)) == ["ValueError, as on rank 1"]
    assert len(printed(ValueError("y"), Raised(1, True, True))) > 5
    assert usual == []
    assert printed(KeyboardInterrupt()) == []
    monkeypatch.setenv("TORCH_DISTRIBUTED_DEBUG", "INFO")
    assert printed(ValueError("y")) == []
    monkeypatch.delenv("TORCH_DISTRIBUTED_DEBUG")
    sys.excepthook(ValueError, ValueError("of the user's own code"), None)
    assert len(usual) == 3
    assert len(watch.explains.call_args_list) == 5  # of all but what is printed as usual whatever the cause is
    assert len(watch.note_printed.call_args_list) == 7
    watch.explains.return_value = True
    assert printed(ValueError("another rank failed")) == []
    assert (len(usual), len(watch.note_printed.call_args_list)) == (3, 7)
    del strategy
    assert sys.excepthook is hook
    BriefErrors.begin(strategy := nn.Identity())
    ours = sys.excepthook
    monkeypatch.setattr(sys, "excepthook", lambda *given: ours(*given))  # as torch's calls the one that was there
    del strategy
    watch.explains.return_value = False
    assert printed(ValueError("without a strategy")) == []
    assert len(usual) == 4


@pytest.mark.nightly
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
    assert printed.count("lightning_autotp: LlamaForCausalLM is not divided: there is one tensor-parallel rank") == 2
    assert "for 1 tensor-parallel ranks" not in printed
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
