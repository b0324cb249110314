"""The promise: twenty AdamW steps on several ranks equal one process's, for every family, at every number of ranks."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import lightning as L
import pytest
import torch
from tiny import tiny_config, token_batch
from torch import Tensor
from torch.utils.data import DataLoader
from trainer_ranks import run_trainer_ranks
from transformers import AutoModelForCausalLM

from lightning_autotp import full_gradients, full_state_dict

STEPS = 20
# Proportions that 2, 3 and 4 ranks cut differently: units that do not divide, and units that ranks share. Of several
# layers are the plainest family, and one whose layers are of two kinds.
SHAPES: dict[str, dict[str, Any]] = {
    "llama": {"num_attention_heads": 6, "num_key_value_heads": 3, "hidden_size": 96},
    "qwen3": {"num_hidden_layers": 1},
    "gemma2": {"sliding_window": 8},
    "phi3": {"num_hidden_layers": 1},
    "gpt_neox": {"num_attention_heads": 5, "hidden_size": 80, "num_hidden_layers": 1},
}
DAILY = "gpt_neox"
"""Whose heads are the least alike on three ranks: also the parity of ``make test-fast``."""


class Task(L.LightningModule):
    """An ordinary task that keeps what the test compares."""

    def __init__(self, family: str) -> None:
        super().__init__()
        self.family = family
        self.losses: list[float] = []
        self.gradients: dict[str, Tensor] = {}

    def configure_model(self) -> None:
        if not hasattr(self, "model"):
            torch.manual_seed(3)
            self.model = AutoModelForCausalLM.from_config(tiny_config(self.family, **SHAPES[self.family]))

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        loss: Tensor = self.model(**batch).loss
        self.losses.append(loss.item())
        return loss

    def on_after_backward(self) -> None:
        if not self.gradients:
            whole = hasattr(self.model, "autotp")
            named = full_gradients(self.model) if whole else {n: p.grad for n, p in self.model.named_parameters()}
            self.gradients = {name: gradient.clone() for name, gradient in named.items()}

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


def train(family: str, strategy: str, devices: int) -> dict[str, Any]:
    batches = [token_batch(seed) for seed in range(STEPS)]
    task = Task(family)
    trainer = L.Trainer(
        accelerator="cpu", devices=devices, strategy=strategy, max_epochs=1, logger=False, enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip
    trainer.fit(task, DataLoader(batches, batch_size=None))
    whole = hasattr(task.model, "autotp")
    state = full_state_dict(task.model) if whole else task.model.state_dict()
    plan = task.model.autotp.plan if whole else None
    return {"losses": task.losses, "gradients": task.gradients, "state": state, "plan": plan}


def train_all(devices: int, families: tuple[str, ...]) -> dict[str, dict[str, Any]]:
    return {family: train(family, "autotp", devices) for family in families}


@lru_cache
def one_process(family: str) -> dict[str, Any]:
    return train(family, "auto", 1)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("number", "families"),
    [
        pytest.param(3, (DAILY,), id=DAILY),
        *(pytest.param(number, tuple(SHAPES), marks=pytest.mark.nightly) for number in (2, 3, 4)),
    ],
)
def test_twenty_steps_equal_one_process(number: int, families: tuple[str, ...]) -> None:
    results = run_trainer_ranks(train_all, number, number, families)
    for family in families:
        wanted = one_process(family)
        for found in (result[family] for result in results):
            assert found["plan"].sharded_fraction > 0.98, family
            assert len(found["losses"]) == STEPS
            assert wanted["losses"][-1] != wanted["losses"][0]
            torch.testing.assert_close(
                found["losses"],
                wanted["losses"],
                rtol=1e-5,
                atol=0,
                msg=f"{family}: {found['losses']} instead of {wanted['losses']}",
            )
            assert found["gradients"].keys() >= wanted["gradients"].keys()  # tied parameters: under every name
            for name, gradient in wanted["gradients"].items():
                scale = gradient.abs().max()
                assert scale > 0, name
                error = (found["gradients"][name] - gradient).abs().max() / scale
                assert error < 1e-4, f"{family}: gradient of {name} is off by {error:.1e}"
            assert found["state"].keys() == wanted["state"].keys()
            for name, value in wanted["state"].items():
                error = (found["state"][name] - value).abs().max()
                assert error < 1e-4, f"{family}: {name} is off by {error:.1e} after {STEPS} steps"
