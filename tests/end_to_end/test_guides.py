"""Every code block of the guides runs, on two ranks, and what it defines is used.

The blocks are those of the pages themselves: a page's run one after another in one namespace, as a reader would paste
them. Only sizes and names are changed (``CHANGES``), and a ``Trainer`` has a CPU and two steps. What a block takes as
given is prepared (``OWN``, ``FILES``); what it defines and does not use is used: a LightningModule is trained, for
instance, with what it leaves out taken from ``Complete``. A new block that needs something else fails and says what.

Blocks marked ``python run``, and those of the page about rules, are run by ``test_docs.py``.
"""

from __future__ import annotations

import ast
import builtins
import inspect
import multiprocessing
import os
import re
import symtable
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import lightning as L
import pytest
import torch
import torch.distributed as dist
from example_runs import tiny
from lightning.fabric import Fabric
from lightning.pytorch.callbacks import BasePredictionWriter
from pages import OPERATORS_PAGE, PAGES, blocks
from torch import Tensor, nn
from torch.utils.data import ConcatDataset, DataLoader
from trainer_ranks import run_trainer_ranks
from transformers import AutoModelForCausalLM, AutoTokenizer

from lightning_autotp import AutoTPStrategy, grad_norms, parallelize
from lightning_autotp.lightning.throughput import ThroughputMonitor
from lightning_autotp.quantized.float8 import float8_of
from lightning_autotp.quantized.weight import QuantizedWeight

__all__ = ["tiny"]  # a fixture
VOCABULARY = 151
ROWS = torch.randint(0, VOCABULARY, (4, 12), generator=torch.Generator().manual_seed(0))
SMALL = f"vocab_size={VOCABULARY}, hidden_size=64, intermediate_size=112, num_attention_heads=4, num_key_value_heads=2"
CHANGES = {
    r'from_pretrained\(\s*"[\w.-]+/[\w.-]+"': "from_pretrained(TINY",
    r'for_model\("llama", ([^()]*)\)': rf'for_model("llama", **(dict({SMALL}) | dict(\1)))',
    r"randint\(0, \d{3,}": f"randint(0, {VOCABULARY}",
    r"\b(devices|tensor_parallel_size|max_steps)=\d+": r"\1=2",
    r"\b(num_nodes|data_parallel_size|every_n_train_steps|num_hidden_layers)=\d+": r"\1=1",
    r"get_world_size\(\) // \d+, \d+": "get_world_size() // 2, 2",
    r'"cuda"': '"cpu"',
    r"emulate=False": "emulate=True",
    r"async_tensor_parallel=True": "async_tensor_parallel=False",  # which is of GPUs that share memory
    r"fullgraph=True": 'fullgraph=True, backend="aot_eager"',
    r'load_in_4bit=True, bnb_4bit_quant_type="nf4"': "load_in_8bit=True",  # 72 features are no blocks of 64
    r"dist\.(init|destroy)_process_group\(\)": "dist.barrier()",  # the test's own group
}
IN_ONE_PROCESS = "export_checkpoint("
NEEDS = {"BitsAndBytesConfig": "bitsandbytes", "torchao.float8": "torchao"}
"""What a block's code needs that not every machine has."""


class Complete(L.LightningModule):
    """What a LightningModule of a guide leaves out."""

    source = ""

    def configure_model(self) -> None:
        if not hasattr(self, "model"):
            self.model = AutoModelForCausalLM.from_pretrained(self.source).train()

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        if not isinstance(batch, dict):  # lines
            ids = torch.tensor([[ord(letter) % VOCABULARY for letter in line[:12]] for line in batch])
            batch = {"input_ids": ids, "labels": ids}
        return self.model(**batch).loss

    def predict_step(self, batch: dict[str, Tensor], batch_idx: int) -> Any:
        return self.model(**batch).logits[:, -1].clone()

    def texts(self, ids: Tensor) -> Tensor:
        features: Tensor = self.model(ids, output_hidden_states=True).hidden_states[-1].mean(1)
        return features

    images = texts

    def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        pairs = {"text", "image"} & set(type(self).training_step.__code__.co_consts)
        return dict.fromkeys(pairs, batch["input_ids"]) if pairs else batch

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-4)


class Fit(NamedTuple):
    loss: float
    norm: float
    metrics: dict[str, float]


class FirstStep(L.Callback):
    fit: Fit | None = None  # not of other rows, of manual optimization, or in fewer bits

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        ids = batch.get("input_ids") if isinstance(batch, dict) else None
        rounded = any(isinstance(weight, QuantizedWeight) for weight in module.parameters())
        rounded = rounded or any(float8_of(layer) is not None for layer in module.modules())
        comparable = trainer.global_step == 1 and trainer.precision == "32-true" and outputs and not rounded
        if comparable and ids is not None and torch.equal(ids, ROWS[:2]):
            self.fit = Fit(
                float(outputs["loss"]),
                float(grad_norms(module, norm_type=2)["grad_2.0_norm_total"]),
                {name: float(value) for name, value in trainer.callback_metrics.items()},
            )


class Reader(L.Trainer):
    """The Trainer that a guide's code makes: on CPUs, quiet and short. ``fits`` tells what was trained."""

    fits: list[Fit | None] = []  # noqa: RUF012

    def __init__(self, **options: Any) -> None:
        self.first = FirstStep()
        options["callbacks"] = [*options.get("callbacks", ()), self.first]
        quiet = {"accelerator": "cpu", "logger": False, "enable_progress_bar": False, "log_every_n_steps": 1}
        super().__init__(**{**quiet, "max_steps": 2, "default_root_dir": os.getcwd(), **options})

    def fit(self, *args: Any, **options: Any) -> None:
        super().fit(*args, **options)
        assert self.global_step > 0, "nothing was trained"
        self.fits.append(self.first.fit)


def loader() -> DataLoader[Any]:
    return DataLoader([{"input_ids": row, "labels": row} for row in ROWS], batch_size=2)  # type: ignore[arg-type]


def trainer(**options: Any) -> Reader:
    return Reader(**{"devices": 2, "strategy": "autotp", **options})


def checkpoint(path: Path) -> None:
    (short := trainer(max_steps=1)).fit(Complete(), loader())
    short.save_checkpoint(path)


# What guides take as given, and arguments of what they define, by name; then files that they read, and that they leave.
OWN: dict[str, Callable[[], Any]] = {
    "dataloader": loader,
    "loader": loader,
    "batches": loader,
    "datamodule": lambda: L.LightningDataModule.from_datasets(ConcatDataset([loader().dataset]), batch_size=2),
    "task": Complete,
    "model": Complete,
    "trainer": trainer,
    "directory": lambda: ".",
    "seed": lambda: 3,
    "layers": lambda: nn.ModuleList(nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 6)) for _ in range(2)),
}
FILES: dict[str, Callable[[Path], Any]] = {
    "last.ckpt": checkpoint,
    "text.txt": lambda path: path.write_text("This is a line.\n" * 40),
}
LEFT = "evaluation.md/predictions-0.pt", "faults.md/runs/kept/last.ckpt", "lora.md/my-adapter/adapter_model.safetensors"


def own(name: str) -> Any:
    if name not in OWN:
        raise LookupError(f"this block takes `{name}` as given: prepare it in OWN of tests/end_to_end/test_guides.py")
    return OWN[name]()


def names(code: str) -> tuple[list[str], set[str]]:
    """What a block defines, and what it takes as given."""
    top = symtable.symtable(code, "block", "exec")
    tables = [top]
    for table in tables:
        tables += table.get_children()
    defined = [symbol.get_name() for symbol in top.get_symbols() if symbol.is_assigned()]
    imported = {symbol.get_name() for symbol in top.get_symbols() if symbol.is_imported()}
    symbols = [symbol for table in tables for symbol in table.get_symbols() if table is top or symbol.is_global()]
    wanted = {symbol.get_name() for symbol in symbols if symbol.is_referenced()}
    return defined, wanted - imported - set(defined) - set(dir(builtins))


def unused(code: str) -> list[str]:
    """What a block defines and does not mention again."""
    mentioned = set()
    for statement in ast.parse(code).body:
        itself = statement.name if isinstance(statement, ast.ClassDef | ast.FunctionDef) else None
        loads = (node for node in ast.walk(statement) if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load))
        mentioned |= {node.id for node in loads} - {itself}
    return [name for name in names(code)[0] if name not in mentioned]


def loss_of(model: nn.Module) -> Tensor:
    loss: Tensor = model(input_ids=ROWS, labels=ROWS).loss
    if loss.requires_grad:
        loss.backward()
    return loss


def call(function: Any) -> Any:
    arguments = inspect.signature(function).parameters.values()
    given = [one for one in arguments if one.default is one.empty and one.kind == one.POSITIONAL_OR_KEYWORD]
    return function(**{one.name: own(one.name) for one in given})


def use(value: Any, made: dict[str, Any]) -> None:
    """What a reader would do with what a block has defined; ``made`` is all of that."""
    if inspect.isclass(value) and issubclass(value, L.LightningModule):
        task = type(value.__name__, (value, Complete), {})()
        fitting = next((one for one in made.values() if isinstance(one, Reader)), None) or trainer()
        fitting.fit(task, loader(), loader() if "validation_step" in vars(value) else None)
        if "predict_step" in vars(value):
            fitting.predict(task, loader())
    elif inspect.isclass(value) and issubclass(value, L.LightningDataModule):
        trainer().fit(Complete(), datamodule=call(value))
    elif inspect.isclass(value) and issubclass(value, L.Callback):
        fitting = trainer(callbacks=[call(value)])
        fitting.fit(Complete(), loader())
        if issubclass(value, BasePredictionWriter):
            fitting.predict(Complete(), loader())
    elif inspect.isclass(value) and issubclass(value, nn.Module):
        model = parallelize(call(value), dist.group.WORLD, example_inputs=(torch.ones(2, 6),))
        assert model(torch.ones(2, 6)).isfinite().all()
    elif isinstance(value, Reader):
        if value.global_step == 0:
            value.fit(Complete(), loader())
    elif isinstance(value, Fabric):
        value.launch()
    elif isinstance(value, ThroughputMonitor):
        for batches in range(1, 100):  # more than its window
            value.update(time=float(batches), batches=batches, samples=4 * batches)
        if dist.get_rank() == 0:
            assert value.compute()["samples_per_sec"] == 4
    elif isinstance(value, AutoTPStrategy):
        trainer(strategy=value).fit(Complete(), loader())
    elif isinstance(value, nn.Module):
        assert loss_of(value).isfinite()
    elif isinstance(value, torch.optim.Optimizer):
        before = loss_of(made["model"])
        value.step()
        assert loss_of(made["model"]) < before
    elif inspect.isfunction(value):
        call(value)
    else:
        raise TypeError(f"this block does not use {value!r}: tell in use() of {__file__} how a reader would")


def run(code: str, namespace: dict[str, Any]) -> None:
    """One block, in the namespace of its page. Collective."""
    if any(word in code and not find_spec(package) for word, package in NEEDS.items()):
        return
    for pattern, changed in CHANGES.items():
        code = re.sub(pattern, changed, code)
    defined, wanted = names(code)
    namespace.update({name: own(name) for name in sorted(wanted - set(namespace))})
    paths = [Path(path) for path in re.findall(r'"([\w/-]+\.\w+)"', code)]
    missing = [path for path in paths if path.name in FILES and not path.exists()]
    dist.barrier()
    for path in missing:
        FILES[path.name](path)
    dist.barrier()
    if dist.get_rank() == 0 or IN_ONE_PROCESS not in code:
        exec(compile(code, "block", "exec"), namespace)
        made = {name: namespace[name] for name in defined}
        idle = [made[name] for name in defined if name in unused(code) or isinstance(made[name], nn.Module)]
        for value in sorted(idle, key=inspect.isclass, reverse=True):  # a trainer may be for a class
            use(value, made)
    dist.barrier()


def ranks(pages: dict[str, list[str]], source: str, folder: str) -> dict[str, tuple[int, list[Fit | None]]]:
    """Run every page in a directory of its own; what was trained there."""
    multiprocessing.set_start_method("fork", force=True)  # a guide's classes cannot be imported by a loader's workers
    Complete.source = source
    found: dict[str, tuple[int, list[Fit | None]]] = {}
    with mock.patch.object(L, "Trainer", Reader):
        for page, codes in pages.items():
            (here := Path(folder, page)).mkdir(exist_ok=True)
            os.chdir(here)
            Reader.fits.clear()
            namespace: dict[str, Any] = {"__name__": "__main__", "TINY": source}
            for number, code in enumerate(codes, 1):
                try:
                    run(code, namespace)
                except BaseException as error:
                    raise RuntimeError(f"{page}: python block {number} of {len(codes)} fails:\n{code}") from error
            found[page] = number, list(Reader.fits)
    return found


@pytest.mark.nightly
def test_every_block_runs(tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    pages = {page.name: found for page in PAGES if page != OPERATORS_PAGE and (found := blocks(page, "python"))}
    source = tmp_path / "source"  # one layer is enough, and half the time
    AutoModelForCausalLM.from_pretrained(tiny, num_hidden_layers=1).save_pretrained(source)
    AutoTokenizer.from_pretrained(tiny).save_pretrained(source)
    results = run_trainer_ranks(ranks, 2, pages, str(source), str(tmp_path))
    found = results[0]
    assert results[1] == found
    for page in PAGES:
        number = 0 if page == OPERATORS_PAGE else page.read_text().split("\n").count("```python")
        assert found.get(page.name, (0, []))[0] == number, page

    model = AutoModelForCausalLM.from_pretrained(source).train()
    loss = model(input_ids=ROWS[:2], labels=ROWS[:2]).loss  # what every first step on these rows must give
    loss.backward()
    norm = float(torch.nn.utils.get_total_norm([parameter.grad for parameter in model.parameters()]))
    (redrawn,) = found["what-is-checked.md"][1]  # its block draws another head; the others train the same weights
    assert redrawn
    assert redrawn.loss > 2 * loss.item()
    losses = [fit.loss for _, fits in found.values() for fit in fits if fit and fit is not redrawn]
    assert len(losses) >= 20
    assert losses == pytest.approx([loss.item()] * len(losses), rel=1e-5)
    _, clipped, logged, _ = found["optimization.md"][1]
    assert clipped.norm == pytest.approx(1.0, rel=1e-4)
    assert logged.norm == logged.metrics["grad_2.0_norm_total"] == pytest.approx(norm, rel=1e-4)

    assert [left for left in LEFT if not (tmp_path / left).exists()] == []
    assert torch.load(tmp_path / "quickstart.md/model.pt")["lm_head.weight"].shape == (VOCABULARY, 256)
    for name in ("finetuned", "exported"):
        exported = AutoModelForCausalLM.from_pretrained(tmp_path / "export.md" / name)
        assert not torch.equal(exported.lm_head.weight, model.lm_head.weight)
    written = (tmp_path / "checkpoints.md/checkpoints").glob("epoch=0*.ckpt")
    assert sorted(path.is_dir() for path in written) == [False, True, True]


def test_what_a_block_needs_is_told() -> None:
    code = "import lightning as L\n\n\ndef train(task):\n    L.Trainer().fit(task, nobodys)\n"
    assert names(code) == (["train"], {"nobodys"})
    assert unused(code) == ["train"]
    with pytest.raises(LookupError, match="takes `nobodys` as given: prepare it in OWN"):
        own("nobodys")
