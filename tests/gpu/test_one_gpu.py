"""Training on one GPU that two ranks share, against one process on the same GPU: real kernels, streams and autocast.

What they send goes through the host (``zoo.through_the_host``). Skipped where there is no GPU. These tests have not yet
run to their end on one; ``docs/gpu.md`` says what has.
"""

from __future__ import annotations

import traceback
import warnings
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.accelerators import CUDAAccelerator
from lightning.pytorch.plugins import MixedPrecision
from mixture_configs import MIXTURES
from tiny import tiny_config, token_batch
from torch import Tensor
from torch.utils.data import DataLoader
from trainer_ranks import run_launched
from transformers import AutoModelForCausalLM
from zoo.through_the_host import BACKEND, begin

import lightning_autotp
from lightning_autotp import AutoTPStrategy, full_gradients, full_state_dict

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
PACKAGE = str(Path(lightning_autotp.__file__).parent)
STEPS, QUIET = 12, 4


@dataclass(frozen=True)
class Run:
    """A model and how it is trained.

    Attributes:
        family: its model type.
        sizes: changes of its tiny config.
        precision: the Trainer's.
        tolerance: relative, of losses and gradients; in bfloat16 parts are summed in another order.
        options: of the strategy.
        attention: its implementation.
        checkpointing: whether blocks are computed again in the backward pass.
        compiled: whether blocks are compiled.
        clip: largest norm of the gradients.
        own_stream: whether it runs on another stream than the device's first, and memory that is free there is written
            over with NaN whenever a gradient is there, while others are summed.
    """

    family: str = "llama"
    sizes: Mapping[str, Any] = field(default_factory=dict)
    precision: Any = "32-true"
    tolerance: float = 1e-4
    options: Mapping[str, Any] = field(default_factory=dict)
    attention: str = "sdpa"
    checkpointing: bool = False
    compiled: bool = False
    clip: float | None = None
    own_stream: bool = False


WIDE = {"hidden_size": 128, "intermediate_size": 192, "num_attention_heads": 8, "num_key_value_heads": 4}
HALF = 3e-2
"""Of bfloat16 and float16: some of their steps (2^-8)."""
RUNS = {
    "llama": Run(sizes={"num_attention_heads": 6, "num_key_value_heads": 3, "hidden_size": 96}),
    "gemma2": Run("gemma2", {"sliding_window": 8}, attention="eager"),
    "phi3": Run("phi3"),
    "gpt_neox": Run("gpt_neox"),
    "mixture": Run("qwen3_moe", {**MIXTURES["qwen3_moe"], "experts_implementation": "batched_mm"}),
    "mixture, grouped products": Run(
        "qwen3_moe",
        {**MIXTURES["qwen3_moe"], "experts_implementation": "grouped_mm"},
        precision="bf16-true",
        tolerance=HALF,
    ),
    "bf16-mixed": Run(sizes=WIDE, precision="bf16-mixed", tolerance=HALF),
    "bf16-true": Run(sizes=WIDE, precision="bf16-true", tolerance=HALF),
    "16-mixed": Run(sizes=WIDE, precision="16-mixed", tolerance=HALF),
    "sequence parallel": Run(options={"sequence_parallel": True}),
    "clipping": Run(clip=0.1),
    "own stream": Run(own_stream=True),
    "checkpointing": Run(checkpointing=True),
    "checkpointing, sequence parallel": Run(checkpointing=True, options={"sequence_parallel": True}),
    "compiled blocks": Run(compiled=True),
    "flex attention": Run(sizes=WIDE, attention="flex_attention"),
    "compiled blocks, bf16-mixed": Run(sizes=WIDE, precision="bf16-mixed", tolerance=HALF, compiled=True),
}


class SharedGPU(CUDAAccelerator):
    """Lightning's accelerator for ranks that all have the first GPU."""

    @staticmethod
    def get_parallel_devices(devices: Any) -> list[torch.device]:
        return [torch.device("cuda", 0)] * (devices if isinstance(devices, int) else len(devices))

    @staticmethod
    def parse_devices(devices: Any) -> Any:
        return devices


def write_over(parameter: Tensor) -> None:
    """Take memory that is free, write NaN, and give it back."""
    for size in (parameter.numel(), 2**22):
        torch.full((size,), torch.nan, device=parameter.device)


class Task(L.LightningModule):
    """An ordinary task that keeps what is compared."""

    def __init__(self, run: Run) -> None:
        super().__init__()
        self.run = run
        self.losses: list[Tensor] = []
        self.gradients: dict[str, Tensor] = {}

    def configure_model(self) -> None:
        if hasattr(self, "model"):
            return
        torch.manual_seed(3)
        config = tiny_config(self.run.family, **self.run.sizes)
        self.model = AutoModelForCausalLM.from_config(config, attn_implementation=self.run.attention)
        if self.run.checkpointing:
            self.model.gradient_checkpointing_enable({"use_reentrant": False})
        if self.run.compiled:
            for layer in self.model.model.layers:
                layer.compile()

    def on_fit_start(self) -> None:
        for parameter in self.model.parameters() if self.run.own_stream else ():
            parameter.register_post_accumulate_grad_hook(write_over)

    def training_step(self, batch: dict[str, Tensor], _: int) -> Tensor:
        loss: Tensor = self.model(**batch, use_cache=False).loss
        self.losses.append(loss.detach().clone())
        return loss

    def on_after_backward(self) -> None:
        if not self.gradients:
            whole = hasattr(self.model, "autotp")
            named = full_gradients(self.model) if whole else {n: p.grad for n, p in self.model.named_parameters()}
            scale = self.trainer.precision_plugin.scaler.get_scale() if self.run.precision == "16-mixed" else 1.0
            self.gradients = {name: gradient.cpu().float() / scale for name, gradient in named.items()}

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


class Waits(L.Callback):
    """Notes where the host waits for the GPU in steps that nothing else happens in."""

    def __init__(self) -> None:
        self.places: set[str] = set()

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx == QUIET:
            torch.cuda.set_sync_debug_mode("warn")
        elif batch_idx == QUIET + 2:
            torch.cuda.set_sync_debug_mode("default")


def train(run: Run, devices: int) -> dict[str, Any]:
    task, strategy = Task(run), AutoTPStrategy(process_group_backend=BACKEND, **run.options)
    scaled = run.precision == "16-mixed"  # Lightning refuses it by name for strategies of this type
    precision: Any = {"plugins": [MixedPrecision("16-mixed", "cuda")]} if scaled else {"precision": run.precision}
    trainer = L.Trainer(
        accelerator=SharedGPU(), devices=devices, strategy=strategy if devices > 1 else "auto", max_epochs=1,
        logger=False, enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
        gradient_clip_val=run.clip, callbacks=[Waits()], **precision,
    )  # fmt: skip
    stream = torch.cuda.stream(torch.cuda.Stream()) if run.own_stream else nullcontext()
    with warnings.catch_warnings(record=True) as caught, stream:
        warnings.simplefilter("always")
        trainer.fit(task, DataLoader([token_batch(seed) for seed in range(STEPS)], batch_size=None))
    parallel = hasattr(task.model, "autotp")
    state = full_state_dict(task.model) if parallel else task.model.state_dict()
    waits = {f"{w.filename}:{w.lineno}" for w in caught if "synchroniz" in str(w.message)}
    return {
        "losses": [loss.item() for loss in task.losses],
        "gradients": task.gradients,
        "state": {name: value.cpu().float() for name, value in state.items()},
        "device": str(next(task.model.parameters()).device),
        "divided": task.model.autotp.plan.sharded_fraction if parallel else 0.0,
        "waits": sorted(place for place in waits if place.startswith(PACKAGE)),
    }


def every(devices: int) -> dict[str, Any]:
    """What each run gave, or the error that ended it; a rank that fails alone ends all."""
    begin()
    found: dict[str, Any] = {}
    for name, run in RUNS.items():
        try:
            found[name] = train(run, devices)
        except Exception:
            found[name] = traceback.format_exc()
        torch.cuda.empty_cache()
    return found


@lru_cache
def found_on(devices: int) -> list[dict[str, Any]]:
    call: Callable[..., Any] = every
    return run_launched(call, devices, devices)


@pytest.mark.parametrize("name", RUNS)
def test_training_equals_one_process(name: str) -> None:
    wanted, tolerance = found_on(1)[0][name], RUNS[name].tolerance
    assert isinstance(wanted, dict), wanted
    for rank in found_on(2):
        found = rank[name]
        assert isinstance(found, dict), found
        assert found["device"] == "cuda:0"
        assert found["divided"] > 0.5
        assert wanted["losses"][-1] != wanted["losses"][0]
        torch.testing.assert_close(found["losses"], wanted["losses"], rtol=tolerance, atol=0)
        for key, gradient in wanted["gradients"].items():
            error = (found["gradients"][key] - gradient).norm() / gradient.norm().clamp(min=1e-6)
            assert error < tolerance * 3, f"the gradient of {key} is off by {error:.1e}"


@pytest.mark.parametrize("name", [name for name in RUNS if name != "mixture"])
def test_no_step_waits_for_the_gpu(name: str) -> None:
    for rank in found_on(2):
        assert isinstance(rank[name], dict), rank[name]
        assert not rank[name]["waits"]
