"""Runs with several copies of a model, and what they are compared with."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import lightning as L
import torch
from distributed import time_limits
from lightning.pytorch.plugins import MixedPrecision
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.utils.data import DataLoader
from training import SavesAfter, Task, assert_parity, blocks, fit

from lightning_autotp import AutoTPStrategy

STEPS = 4  # two epochs of a copy of two


class OneKeyHead(Task):
    """One key/value head, so that the ranks of a group share it; tied embeddings; a scalar and a layer outside."""

    has_biases = False
    layers = 2

    def build(self) -> Any:
        from transformers import AutoModelForCausalLM, LlamaConfig

        config = LlamaConfig(
            vocab_size=67, hidden_size=32, intermediate_size=50, num_hidden_layers=self.layers, num_attention_heads=4,
            num_key_value_heads=1, tie_word_embeddings=True, attention_bias=self.has_biases, mlp_bias=self.has_biases,
        )  # fmt: skip
        self.temperature = nn.Parameter(torch.tensor(1.5))
        self.shift = nn.Parameter(torch.tensor([0.5, 0.25, 0.125]))
        return AutoModelForCausalLM.from_config(config)

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        return super().training_step(batch, batch_idx) * self.temperature * self.shift.sum()

    def on_fit_end(self) -> None:
        self.seen["parameters"] = {
            name: (isinstance(parameter, DTensor), tuple(parameter.shape), _elements(parameter))
            for name, parameter in self.named_parameters()
        }
        self.seen["managed"] = [name for name, module in self.named_modules() if isinstance(module, FSDPModule)]


def _elements(parameter: Tensor) -> int:
    return (parameter.to_local() if isinstance(parameter, DTensor) else parameter).numel()


class Biased(OneKeyHead):
    """With biases in all layers."""

    has_biases = True


def trained(strategy: Any, devices: int, kind: type[Task] = OneKeyHead, data: Any = None, **options: Any) -> Any:
    task = kind("config", options.pop("learning_rate", 1e-3), options.pop("optimizer", "AdamW"))
    return trained_on(task, strategy, devices, data, **options)


def trained_on(task: Task, strategy: Any, devices: int, data: Any = None, **options: Any) -> Any:
    """Train a task, which may have been trained before."""
    L.seed_everything(3, verbose=False)
    task.begin()
    data = DataLoader(blocks(), batch_size=10) if data is None else data  # type: ignore[arg-type]
    return fit(strategy, devices, task, data=data, **{"max_steps": STEPS, **options})


class InTurn:
    """A loader of one epoch that goes on where it stopped, whatever the Trainer takes for the beginning of an epoch."""

    def __init__(self, batches: list[Any]) -> None:
        self.batches, self.rest = batches, iter(batches)

    def __iter__(self) -> Iterator[Any]:
        return self.rest

    def __len__(self) -> int:
        return len(self.batches)


def alone(four: list[dict[str, Any]], case: str, strategy: Any = "auto", devices: int = 1, **options: Any) -> Any:
    """One process's run on the batches that the copies saw, put together."""
    copies = four if case == "hybrid" else four[::2]
    seen = zip(*(copy[case]["batches"] for copy in copies), strict=True)
    batches = [{"input_ids": torch.cat(each), "labels": torch.cat(each)} for each in seen]
    return trained(strategy, devices, data=InTurn(batches), **options)


CLIPPED = {
    "optimizer": "SGD", "learning_rate": 0.3, "gradient_clip_val": 0.2, "accumulate_grad_batches": 2, "max_steps": 4,
}  # fmt: skip

BY_VALUE = {**CLIPPED, "gradient_clip_val": 1e-3, "gradient_clip_algorithm": "value", "accumulate_grad_batches": 1}

CLIPPING: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    # the strategy's options, and the Trainer's
    "clipped": ({}, CLIPPED),
    "by value": ({"cpu_offload": True}, BY_VALUE),
}


def scaling() -> MixedPrecision:
    return MixedPrecision("16-mixed", "cpu", torch.amp.GradScaler("cpu", init_scale=2.0**8, growth_interval=3))


SCALED = 6
"""Steps after which the scale has gone down and up again."""


class Overflow(OneKeyHead):
    """In the third step a gradient overflows, on the last rank only."""

    def on_after_backward(self) -> None:
        rank = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
        gradient = self.model.model.layers[1].mlp.up_proj.weight.grad
        if self.trainer.global_step == 2 and not self.seen.get("planted") and rank[0] == rank[1] - 1:
            (gradient.to_local() if isinstance(gradient, DTensor) else gradient)[0, 0] = torch.inf
        self.seen["planted"] = self.trainer.global_step >= 2
        if rank[1] > 1:
            self.seen["gathers"] = self.model.autotp.gathers.dtype, self.model.autotp.gathers.names

    def on_train_batch_end(self, *_: Any) -> None:
        scale = self.trainer.precision_plugin.scaler.get_scale()
        steps = {int(state["step"]) for state in self.trainer.optimizers[0].state.values()}
        self.seen.setdefault("scales", []).append((scale, steps))


FORMATS: dict[str, dict[str, Any]] = {"file": {}, "directory": {"save_distributed_checkpoint": True}}

HALF = STEPS // 2

HYBRID = "1x(2, 2) directory.ckpt"

NORM = {"gradient_clip_val": 0.1}


def four_ranks(directory: str, names: list[str]) -> dict[str, Any]:
    """What is always run, and what else is among these names."""
    folder, seen = Path(directory), {}
    paths = {name: folder / f"2x2 {name}.ckpt" for name in FORMATS}
    task = OneKeyHead("config")
    seen["parity"] = trained_on(task, AutoTPStrategy(2, 2), 4, callbacks=[SavesAfter(HALF, paths["file"])])
    strategy = AutoTPStrategy(2, 2, sequence_parallel=True, **FORMATS["directory"])
    seen["sequence parallel"] = trained(strategy, 4, callbacks=[SavesAfter(HALF, paths["directory"])])
    seen["biases"] = trained(
        AutoTPStrategy(2, 2, sequence_parallel=True), 4, Biased, precision="bf16-mixed", max_steps=HALF
    )
    for case, (options, clipping) in CLIPPING.items():
        if case in names:
            seen[case] = trained(AutoTPStrategy(2, 2, **options), 4, **clipping)
    for name, path in paths.items():
        if name in names:
            seen[f"resumed {name}"] = trained_on(task, AutoTPStrategy(2, 2), 4, ckpt_path=path)
    # Two replicas, each sharded over two ranks; and two of a single rank of each of two tensor-parallel ones.
    loaded = AutoTPStrategy(1, (2, 2), **FORMATS["directory"])
    trained(loaded, 4, max_steps=HALF, ckpt_path=paths["file"], save=folder / HYBRID)
    seen["hybrid"] = trained(AutoTPStrategy(1, (2, 2)), 4, ckpt_path=folder / HYBRID, **NORM)
    seen["replicas"] = trained(AutoTPStrategy(2, (2, 1)), 4, **CLIPPED)
    scaled = scaling()
    seen["scaled"] = trained(AutoTPStrategy(2, 2), 4, Overflow, plugins=[scaled], max_steps=SCALED)
    seen["scaler afterwards"] = type(scaled.scaler), scaled.scaler.get_scale()  # type: ignore[union-attr]
    seen["time limits"] = time_limits()
    return seen


def assert_copies(found: list[dict[str, Any]], wanted: dict[str, Any]) -> None:
    """The copies' losses average to those of one process; gradients and weights are its."""
    losses = torch.tensor([seen["losses"] for seen in found])
    assert torch.equal(losses[0], losses[1])
    assert torch.equal(losses[2], losses[3])
    assert not torch.equal(losses[0], losses[2])
    for seen in found:
        assert_parity({**seen, "losses": losses.mean(0).tolist()}, wanted)
