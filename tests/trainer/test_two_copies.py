"""What goes with training, on two copies of the model on two ranks each: one process's results on all their data.

Averages of the weights and checkpoints with them, logged norms of gradients, metrics of tokens, generation, exports and
PEFT's adapters.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from adapted import Tuning, adapted, base_model
from copies import FORMATS, OneKeyHead, assert_copies
from lightning.pytorch import callbacks
from lightning.pytorch.utilities import grad_norm
from norms import assert_same_norms
from peft import PeftModel
from selected import nightly, selected
from torch import Tensor, nn
from torch.optim.swa_utils import get_ema_multi_avg_fn
from torch.utils.data import DataLoader
from torchmetrics.classification import MulticlassAccuracy
from torchmetrics.text import Perplexity as TorchPerplexity
from trainer_ranks import run_trainer_ranks
from training import assert_parity, blocks, tiny_config, trainer
from transformers import AutoModelForCausalLM
from writing import Writer, rows

from lightning_autotp import AutoTPStrategy, full_state_dict, grad_norms
from lightning_autotp.lightning.averaging import EMAWeightAveraging, WeightAveraging
from lightning_autotp.metrics import Perplexity, TokenAccuracy

COPIES, PER_COPY = 2, 4
ADAPTERS = ["lora", "saved modules"]
NEW = 5
STEPS = 3
# Each resumes from the previous run's checkpoint, after which it is named, so a selected run needs the earlier ones.
# The second run averages lists of tensors at once, the default on an accelerator.
RUNS = ("begun", "resumed from a directory", "resumed from a file")
FUSED: dict[str, Any] = {"multi_avg_fn": get_ema_multi_avg_fn(0.5), "use_buffers": False}


def this_copy() -> int | None:
    """Of four ranks; ``None`` in one process."""
    return int(os.environ["RANK"]) // 2 if "RANK" in os.environ else None


def loader(data: list[Any], per_copy: int = PER_COPY) -> DataLoader[Any]:
    """All data, or this copy's half of every batch."""
    copy = this_copy()
    mine = [row for number, row in enumerate(data) if copy is None or number // per_copy % COPIES == copy]
    return DataLoader(mine, batch_size=per_copy * (COPIES if copy is None else 1))  # type: ignore[arg-type]


def uneven() -> list[dict[str, Tensor]]:
    """Two batches of rows of which different numbers of tokens count."""
    ids = torch.stack([row["input_ids"] for row in blocks()[: 2 * COPIES * PER_COPY]])
    ignored = (
        torch.rand(ids.shape, generator=torch.Generator().manual_seed(5)) < torch.linspace(0, 0.8, len(ids))[:, None]
    )
    return [{"input_ids": row, "labels": row.masked_fill(out, -100)} for row, out in zip(ids, ignored, strict=True)]


class Watched(OneKeyHead):
    """Logs the norms of its gradients and metrics of tokens, and generates."""

    layers = 1

    def __init__(self) -> None:
        super().__init__("config", 3e-3)
        theirs: dict[str, Any] = {"perplexity": TorchPerplexity(-100)}
        theirs |= {f"top {k}": MulticlassAccuracy(67, k, "micro", ignore_index=-100) for k in (1, 5)}
        ours = {"perplexity": Perplexity(-100), "top 1": TokenAccuracy(1, -100), "top 5": TokenAccuracy(5, -100)}
        self.tokens = nn.ModuleDict(theirs if this_copy() is None else ours)

    def on_before_optimizer_step(self, optimizer: torch.optim.Optimizer) -> None:
        norms = grad_norm(self, 2) if this_copy() is None else grad_norms(self, 2)
        self.log_dict(norms)
        self.seen.setdefault("norms", []).append({name: float(norm) for name, norm in norms.items()})

    def validation_step(self, batch: dict[str, Tensor], batch_idx: int) -> None:
        logits, targets = self.model(**batch).logits[:, :-1], batch["labels"][:, 1:]
        for name, metric in self.tokens.items():
            flat = this_copy() is None and name != "perplexity"
            metric.update(*((logits.flatten(0, 1), targets.flatten()) if flat else (logits, targets)))
            self.log(name, metric, on_epoch=True)  # type: ignore[arg-type]
        written = self.model.generate(batch["input_ids"], max_new_tokens=NEW, min_new_tokens=NEW, do_sample=False)
        self.seen.setdefault("written", []).append(written.clone())


def averaged(strategies: list[Any], ema: Any, fused: Any, folder: Path) -> dict[str, Any]:
    """An epoch in each of the first runs, with averages and a checkpoint at its end."""
    seen: dict[str, Any] = {}
    path = None
    for number, (run, strategy) in enumerate(zip(RUNS, strategies, strict=False)):
        L.seed_everything(3, verbose=False)
        task = Watched()
        averaging = fused(**FUSED) if number == 1 else ema(decay=0.5)
        fitting = trainer(
            strategy, 1 if this_copy() is None else 4, max_steps=-1, max_epochs=number + 1,
            callbacks=[averaging, callbacks.ModelCheckpoint(folder, filename=run)], enable_checkpointing=True,
            use_distributed_sampler=False, num_sanity_val_steps=1,
        )  # fmt: skip
        fitting.fit(task, training(), loader(uneven()), ckpt_path=path, weights_only=False)
        logged = {name: float(value) for name, value in fitting.callback_metrics.items()}
        seen[run] = {**task.seen, "weights": whole(task), "logged": logged}
        path = folder / f"{run}.ckpt"
    if this_copy() is not None:
        fitting.strategy.save_pretrained(folder / "exported")
    return seen


def training() -> DataLoader[Any]:
    return loader(blocks()[: STEPS * COPIES * PER_COPY])


def whole(task: Any) -> dict[str, Tensor]:
    return {k: v.clone() for k, v in task.state_dict().items()} if this_copy() is None else full_state_dict(task)


def tuned(case: str, folder: Path, strategy: Any) -> dict[str, Any]:
    L.seed_everything(3, verbose=False)
    task = Tuning(case, str(folder))
    fitting = trainer(strategy, 1 if this_copy() is None else 4, max_steps=STEPS, use_distributed_sampler=False)
    fitting.fit(task, training())
    if this_copy() is not None:
        fitting.strategy.save_pretrained(folder / case)
    return {**task.seen, "weights": whole(task)}


WRITERS = {"llama": 9, "encoder-decoder": 1}
"""Models, and with how many tokens their texts begin."""


class Unequal(Writer):
    """Whose copies write texts of different lengths, and for different numbers of batches."""

    def validation_step(self, batch: dict[str, Tensor], batch_idx: int) -> None:
        length = NEW - 3 * (this_copy() or 0)
        how = {"max_new_tokens": length, "min_new_tokens": length, "do_sample": False}
        text = self.model.generate(batch["input_ids"], attention_mask=batch["attention_mask"], **how)
        self.seen.setdefault("texts", []).append(text.clone())


def unequal(name: str, strategies: list[Any]) -> dict[str, Any]:
    L.seed_everything(3, verbose=False)
    task, devices = Unequal(name), 1 if this_copy() is None else 4
    data: list[Any] = [*rows(131), *rows(131), rows(131)[0]]
    validating = trainer(strategies[0], devices, use_distributed_sampler=False)
    # A row for each, as in prediction, so that the same calls are proved.
    validating.validate(task, loader(data[:COPIES], per_copy=1), verbose=False)
    predicted = trainer(strategies[1], devices).predict(task, DataLoader(data, batch_size=1))  # type: ignore[arg-type]
    return {"texts": task.seen["texts"], "predicted": predicted}


def four_ranks(directory: str, runs: int, adapters: list[str], writers: list[str]) -> dict[str, Any]:
    folder = Path(directory)
    kinds = ("directory", "file", "directory")[:runs]
    strategies = [AutoTPStrategy(2, 2, **FORMATS[kind], cpu_offload=kind == "directory") for kind in kinds]
    seen = averaged(strategies, EMAWeightAveraging, WeightAveraging, folder)
    seen["unequal"] = {name: unequal(name, [AutoTPStrategy(2, 2) for _ in range(2)]) for name in writers}
    return seen | {case: tuned(case, folder, AutoTPStrategy(2, 2)) for case in adapters}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """With a base model for adapters in ``source``."""
    directory = tmp_path_factory.mktemp("two_copies")
    torch.manual_seed(11)
    AutoModelForCausalLM.from_config(tiny_config()).save_pretrained(directory / "source")
    return directory


@pytest.fixture(scope="module")
def runs(request: pytest.FixtureRequest) -> int:
    """How many of them are made."""
    return max((RUNS.index(run) + 1 for run in selected(request, "run")), default=2)


@pytest.fixture(scope="module")
def four(request: pytest.FixtureRequest, folder: Path, runs: int) -> list[dict[str, Any]]:
    cases, writers = selected(request, "case"), selected(request, "writer")
    return run_trainer_ranks(four_ranks, 4, str(folder), runs, cases, writers)


@pytest.fixture(scope="module")
def wanted(tmp_path_factory: pytest.TempPathFactory, runs: int) -> dict[str, Any]:
    """One process with Lightning's own callbacks."""
    folder = tmp_path_factory.mktemp("alone")
    return averaged(["auto"] * runs, callbacks.EMAWeightAveraging, callbacks.WeightAveraging, folder)


each_run = pytest.mark.parametrize("run", nightly(RUNS, [RUNS[2]]))


@each_run
def test_averages_are_those_of_one_process(four: list[dict[str, Any]], wanted: dict[str, Any], run: str) -> None:
    assert len(wanted[run]["losses"]) == STEPS
    assert_copies([seen[run] for seen in four], wanted[run])


def test_saved_averages_are_those_of_one_process(
    four: list[dict[str, Any]], wanted: dict[str, Any], folder: Path
) -> None:
    saved = torch.load(folder / f"{RUNS[1]}.ckpt", weights_only=False)
    assert_parity({"losses": [], "weights": saved["state_dict"]}, {"losses": [], "weights": wanted[RUNS[1]]["weights"]})
    assert saved["averaging_state"]["n_averaged"] == 2 * STEPS
    name = "model.lm_head.weight"
    assert (saved["state_dict"][name] - saved["current_model_state"][name]).abs().max() > 1e-3
    assert (folder / f"{RUNS[0]}.ckpt").is_dir()


@each_run
def test_logged_norms_and_metrics_are_those_of_one_process(
    four: list[dict[str, Any]], wanted: dict[str, Any], run: str
) -> None:
    """The metrics are torchmetrics' there, of whole logits."""
    logged = wanted[run]["logged"]
    assert {"perplexity", "top 1", "top 5", "grad_2.0_norm_total", "grad_2.0_norm/temperature"} <= set(logged)
    for seen in four:
        assert_same_norms(seen[run]["norms"], wanted[run]["norms"])
        assert seen[run]["logged"] == pytest.approx(logged, rel=1e-4)


@each_run
def test_every_copy_writes_what_one_process_writes(
    four: list[dict[str, Any]], wanted: dict[str, Any], run: str
) -> None:
    for number, seen in enumerate(four):
        assert len(seen[run]["written"]) == len(wanted[run]["written"]) >= 2
        for found, batch in zip(seen[run]["written"], wanted[run]["written"], strict=True):
            assert batch.shape == (COPIES * PER_COPY, 12 + NEW)
            assert torch.equal(found, batch.chunk(COPIES)[number // 2])


def test_the_exported_directory_has_the_averages(four: list[dict[str, Any]], folder: Path, runs: int) -> None:
    found = AutoModelForCausalLM.from_pretrained(folder / "exported").state_dict()
    trained = {f"model.{name}": weight for name, weight in found.items()}
    weights = four[0][RUNS[runs - 1]]["weights"]
    assert trained.keys() == weights.keys() - {"temperature", "shift"}
    assert all(torch.equal(weight, weights[name]) for name, weight in trained.items())


@pytest.mark.parametrize("case", nightly(ADAPTERS, ["lora"]))
def test_adapters_are_trained_and_saved_as_in_one_process(four: list[dict[str, Any]], folder: Path, case: str) -> None:
    expected = tuned(case, folder, "auto")
    L.seed_everything(3, verbose=False)
    before = adapted(case, folder).state_dict()
    changed = {name for name, weight in before.items() if not torch.equal(expected["weights"][f"model.{name}"], weight)}
    assert len(changed) == len(expected["gradients"][0])
    assert_copies([seen[case] for seen in four], expected)
    L.seed_everything(3, verbose=False)
    loaded = PeftModel.from_pretrained(base_model(case, folder), str(folder / case)).state_dict()
    kind = json.loads((folder / case / "adapter_config.json").read_text())["auto_mapping"]
    assert kind is None or kind["base_model_class"] == "LlamaForCausalLM"
    assert loaded.keys() == before.keys()
    for name in changed:
        assert torch.equal(loaded[name], four[0][case]["weights"][f"model.{name}"])


@pytest.mark.parametrize("writer", nightly(WRITERS, ["encoder-decoder"]))
def test_copies_do_unequal_work(four: list[dict[str, Any]], writer: str) -> None:
    wanted = unequal(writer, ["auto"] * 2)
    for number, seen in enumerate(four):
        copy = number // 2
        for found, batch in zip(seen["unequal"][writer]["texts"], wanted["texts"], strict=True):
            assert found.shape == (1, WRITERS[writer] + NEW - 3 * copy)
            assert torch.equal(found, batch.chunk(COPIES)[copy][:, : found.shape[1]])
        predicted = seen["unequal"][writer]["predicted"]
        assert len(predicted) == (3, 2)[copy]
        for found, text in zip(predicted, wanted["predicted"][copy::COPIES], strict=True):
            assert torch.equal(found, text)
