"""What of the package torch and Lightning call in a step, and in which order: hooks, stand-ins and strategy methods.

Each list is of a step that is like the one before it, in the order in which code outside of the package first calls its
functions. What layers, collectives and logits compute is left out.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
import torch.distributed as dist
from lightning import Fabric
from tiny import tiny_model, token_batch
from torch import Tensor, nn
from torch.utils.data import DataLoader
from trainer_ranks import run_trainer_ranks

import lightning_autotp
from lightning_autotp import parallelize
from lightning_autotp.applying.replace import BoundaryConversion

PACKAGE = Path(lightning_autotp.__file__).parent
PAGE = PACKAGE.parent / "docs" / "what-happens-in-a-step.md"
HEADINGS = {"loop": "A plain loop", "Trainer": "Under the Trainer", "Fabric": "Under Fabric"}
"""Of the page's tables."""
COMPUTING = ("parallel/", "layouts/", "parameters/part.py")

BEFORE_A_FORWARD = [
    "guard/guard.py: Guard._before",
]
IN_A_BACKWARD = [
    "gradients/parts.py: Mark.contribution",
    "gradients/parts.py: Mark.accumulated",
]
BEFORE_AN_OPTIMIZER = [
    "guard/guard.py: _before_step",
]
AFTER_AN_OPTIMIZER = ["guard/guard.py: _after_step"]
IN_A_FORWARD = [
    "guard/standalone.py: StandaloneCall.before",
    "guard/standalone.py: StandaloneCall.after",
    "guard/standalone.py: StandaloneCall.end",
    "applying/replace.py: BoundaryConversion.before",
    "applying/replace.py: BoundaryConversion.after",
    "guard/guard.py: Guard._returned",
    "guard/guard.py: Guard._after",
]
FORWARD = """
Guard._before
StandaloneCall.before model
StandaloneCall.before model.embed_tokens
StandaloneCall.after model.embed_tokens
StandaloneCall.end model.embed_tokens
StandaloneCall.before model.rotary_emb
StandaloneCall.before model.layers.0.self_attn
BoundaryConversion.before model.layers.0.self_attn
StandaloneCall.before model.layers.0.self_attn.q_proj
StandaloneCall.before model.layers.0.self_attn.k_proj
StandaloneCall.before model.layers.0.self_attn.v_proj
StandaloneCall.before model.layers.0.self_attn.o_proj
StandaloneCall.before model.layers.0.mlp
BoundaryConversion.before model.layers.0.mlp
StandaloneCall.before model.layers.0.mlp.gate_proj
StandaloneCall.before model.layers.0.mlp.up_proj
StandaloneCall.before model.layers.0.mlp.down_proj
StandaloneCall.before model.norm
""".strip().splitlines()
"""Every hook in a forward of the model of these tests, with its module; of the model itself without one."""
AT_THE_HEAD = """
StandaloneCall.after model
StandaloneCall.end model
StandaloneCall.before lm_head
BoundaryConversion.after lm_head
StandaloneCall.after lm_head
StandaloneCall.end lm_head
Guard._returned
Guard._after
""".strip().splitlines()
"""The last of them."""
BEFORE_THE_HEAD = """
BoundaryConversion.after model
StandaloneCall.after model
StandaloneCall.end model
StandaloneCall.before lm_head
BoundaryConversion.before lm_head
StandaloneCall.after lm_head
StandaloneCall.end lm_head
Guard._returned
Guard._after
""".strip().splitlines()
"""The last of them, by the plan for the Trainer's batches."""
STEPS = {
    "loop": [
        *BEFORE_A_FORWARD,
        *IN_A_FORWARD,
        *IN_A_BACKWARD,
        "gradients/whole_quantities.py: PartOfGradient.__torch_function__",
        "private/torch_private.py: BeforeClipping.group",
        *BEFORE_AN_OPTIMIZER,
        *AFTER_AN_OPTIMIZER,
    ],
    "Trainer": [
        "private/lightning_private.py: DeferredSignals.between_batches",
        "lightning/strategy.py: AutoTPStrategy.batch_to_device",
        "lightning/strategy.py: AutoTPStrategy.optimizer_step",
        *BEFORE_AN_OPTIMIZER,
        "lightning/optimizers.py: then_compute.<locals>.compute",
        "lightning/strategy.py: AutoTPStrategy.training_step",
        *BEFORE_A_FORWARD,
        *IN_A_FORWARD,
        "lightning/strategy.py: AutoTPStrategy.pre_backward",
        *IN_A_BACKWARD,
        "lightning/strategy.py: AutoTPStrategy._clip_by_norm",
        "gradients/whole_quantities.py: PartOfGradient.__torch_function__",
        *AFTER_AN_OPTIMIZER,
    ],
    "Fabric": [
        "lightning/loaders.py: NotedLoader.__iter__",
        *BEFORE_A_FORWARD,
        *IN_A_FORWARD,
        "lightning/fabric.py: AutoTPFabricStrategy.backward",
        *IN_A_BACKWARD,
        "lightning/fabric.py: AutoTPFabricStrategy.clip_gradients_norm",
        "lightning/fabric.py: AutoTPFabricStrategy.optimizer_step",
        *BEFORE_AN_OPTIMIZER,
        "gradients/whole_quantities.py: PartOfGradient.__torch_function__",
        *AFTER_AN_OPTIMIZER,
    ],
}


class Entered:
    """While it is on: which of the package's functions are called by code outside of it."""

    def __init__(self) -> None:
        self.functions: dict[str, None] = {}
        self.forward: list[str] = []  # every hook of modules, with the module's path

    def on(self) -> None:
        sys.setprofile(self._seen)

    def off(self) -> None:
        sys.setprofile(None)

    def _seen(self, frame: Any, event: str, argument: Any) -> None:
        file = Path(frame.f_code.co_filename)
        if event != "call" or not file.is_relative_to(PACKAGE):
            return
        if frame.f_back is not None and Path(frame.f_back.f_code.co_filename).is_relative_to(PACKAGE):
            return
        name = f"{file.relative_to(PACKAGE).as_posix()}: {frame.f_code.co_qualname}"
        if not name.startswith(COMPUTING):
            self.functions.setdefault(name)
        if name in (*BEFORE_A_FORWARD, *IN_A_FORWARD):
            of = frame.f_locals["self"]
            path = of.plan.module if isinstance(of, BoundaryConversion) else getattr(of, "path", "")
            self.forward.append(f"{frame.f_code.co_qualname} {path}".rstrip())


class Task(L.LightningModule):
    def configure_model(self) -> None:
        self.model = tiny_model("llama", num_hidden_layers=1)

    def training_step(self, batch: dict[str, Tensor], _: int) -> Tensor:
        return self.model(**batch, use_cache=False).loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters())


class FromBatchToBatch(L.Callback):
    """Looks from the end of the second batch to the end of the third."""

    def __init__(self) -> None:
        self.entered = Entered()

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx == 1:
            self.entered.on()
        elif batch_idx == 2:
            self.entered.off()


def rows() -> DataLoader[Any]:
    return DataLoader([{key: value[0] for key, value in token_batch(seed).items()} for seed in range(8)], batch_size=2)


def third(step: Callable[[], None]) -> Entered:
    step()
    step()
    entered = Entered()
    entered.on()
    step()
    entered.off()
    return entered


def in_a_loop() -> Entered:
    batches = iter(rows())
    model = tiny_model("llama", num_hidden_layers=1)
    parallelize(model, dist.group.WORLD, example_inputs={**token_batch(1), "use_cache": False})
    optimizer = torch.optim.AdamW(model.parameters())

    def step() -> None:
        model(**next(batches), use_cache=False).loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()

    return third(step)


def in_the_trainer() -> Entered:
    look = FromBatchToBatch()
    quiet = {
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
    }
    trainer = L.Trainer(
        accelerator="cpu", devices=2, strategy="autotp", max_epochs=1, gradient_clip_val=1.0, callbacks=[look], **quiet
    )
    trainer.fit(Task(), rows())
    return look.entered


def in_fabric() -> Entered:
    fabric = Fabric(accelerator="cpu", devices=2, strategy="autotp")
    fabric.launch()
    with fabric.init_module():
        made = tiny_model("llama", num_hidden_layers=1)
    model = fabric.setup_module(made)
    optimizer = fabric.setup_optimizers(torch.optim.AdamW(model.parameters()))
    batches = iter(fabric.setup_dataloaders(rows()))

    def step() -> None:
        fabric.backward(model(**next(batches), use_cache=False).loss)
        fabric.clip_gradients(model, optimizer, max_norm=1.0)
        optimizer.step()
        optimizer.zero_grad()

    return third(step)


def steps() -> dict[str, tuple[list[str], list[str]]]:
    ways = {"loop": in_a_loop, "Trainer": in_the_trainer, "Fabric": in_fabric}
    return {name: (list(seen.functions), seen.forward) for name, seen in ((name, run()) for name, run in ways.items())}


@pytest.fixture(scope="module")
def found() -> list[dict[str, tuple[list[str], list[str]]]]:
    return run_trainer_ranks(steps, 2)


@pytest.mark.parametrize("way", STEPS)
def test_a_step_calls_in_this_order(way: str, found: Any) -> None:
    for seen in found:
        functions, forward = seen[way]
        assert functions == STEPS[way]
        assert forward == FORWARD + (BEFORE_THE_HEAD if way == "Trainer" else AT_THE_HEAD)


@pytest.mark.parametrize("way", STEPS)
def test_the_page_has_this_order(way: str) -> None:
    section = re.split(r"^## ", PAGE.read_text(), flags=re.MULTILINE)
    [table] = [text for text in section if text.startswith(HEADINGS[way])]
    rows = re.findall(r"^\| (\d+) \| `(\S+)` in `(\S+)` \| \S.*\|$", table, re.MULTILINE)
    assert [f"{file}: {function}" for _, function, file in rows] == STEPS[way]
    assert [int(number) for number, *_ in rows] == list(range(1, len(STEPS[way]) + 1))
