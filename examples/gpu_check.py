"""Whether a model runs on a GPU as on the CPU: each rank of a tensor-parallel group in turn, without the others.

    python examples/gpu_check.py --model Qwen/Qwen3-0.6B --ranks 8        # on a machine with a GPU
    python examples/gpu_check.py --device cpu                             # a tiny model, to see that this runs

The process group is torch's "fake" one, whose collectives send nothing. The model is traced as it is on the device, and
planned; each rank's part of it is proved, and run there and on the CPU. Its loss and gradients mean nothing without the
other ranks, but must be alike. Then some steps under autocast are timed, and what the host waits for in them is told.
"""

from __future__ import annotations

import copy
import time
import warnings
from typing import Any

import torch
import torch.distributed as dist
from jsonargparse import auto_cli
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM

from lightning_autotp import clip_gradients_norm, make_plan
from lightning_autotp.applying.replace import apply_plan
from lightning_autotp.gradients.sums import synchronize_gradients
from lightning_autotp.parallel import TPGroup
from lightning_autotp.proving.verify import verify

TINY = {"hidden_size": 64, "intermediate_size": 112, "num_attention_heads": 4, "num_key_value_heads": 2}
WARM_UP, STEPS = 2, 5


def on(device: torch.device, batch: dict[str, Tensor]) -> dict[str, Any]:
    """A batch there, as the model is called with it."""
    return {**{name: tensor.to(device) for name, tensor in batch.items()}, "use_cache": False}


def loss_and_gradients(model: nn.Module, batch: dict[str, Any]) -> list[Tensor]:
    """Of a rank's part, on the CPU."""
    loss = model(**batch).loss
    loss.backward()
    found = [loss, *(parameter.grad for parameter in model.parameters())]
    model.zero_grad()
    return [tensor.detach().as_subclass(Tensor).cpu() for tensor in found if tensor is not None]


def difference(here: list[Tensor], there: list[Tensor]) -> float:
    """The largest relative difference of a tensor."""
    pairs = zip(here, there, strict=True)
    return max(((one - other).norm() / other.norm().clamp(min=1e-12)).item() for one, other in pairs)


def timed(model: nn.Module, batch: dict[str, Any], device: torch.device) -> str:
    """How long a step under autocast takes, and where in it the host waits for the device."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)

    def steps(number: int) -> None:
        for _ in range(number):
            with torch.autocast(device.type, torch.bfloat16):
                loss = model(**batch).loss
            loss.backward()
            clip_gradients_norm(model, 1.0)
            optimizer.step()
            optimizer.zero_grad()
        if device.type == "cuda":
            torch.cuda.set_sync_debug_mode("default")
            torch.cuda.synchronize()

    steps(WARM_UP)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        if device.type == "cuda":
            torch.cuda.set_sync_debug_mode("warn")
        began = time.perf_counter()
        steps(STEPS)
        took = (time.perf_counter() - began) / STEPS
    places = sorted({f"{each.filename}:{each.lineno}" for each in caught if "synchroniz" in str(each.message)})
    return f"{1000 * took:.1f} ms a step, which waits for the device at {len(places)} places {' '.join(places)}"


def main(model: str = "", ranks: int = 2, tokens: int = 64, device: str = "cuda", tolerance: float = 1e-3) -> None:
    """Check a model on one device.

    Args:
        model: a Hub id or a directory with a ``config.json``; by default a tiny Llama. Its weights are drawn.
        ranks: how many would share the model.
        tokens: of each of two rows.
        device: where it is run and compared with the CPU.
        tolerance: the largest relative difference of the loss or a gradient.

    Raises:
        RuntimeError: if a difference is larger.
    """
    cpu, there = torch.device("cpu"), torch.device(device)
    sizes: Any = {"vocab_size": 131, "num_hidden_layers": 2, **TINY}
    config = AutoConfig.from_pretrained(model) if model else AutoConfig.for_model("llama", **sizes)
    torch.manual_seed(0)
    whole = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    ids = torch.randint(3, config.vocab_size, (2, tokens))
    batch = {"input_ids": ids, "labels": ids}
    example = on(cpu, batch)
    plan, solution = make_plan(copy.deepcopy(whole).to(there), ranks, example_inputs=example)
    for rank in range(ranks):
        backend = ",".join(f"{kind}:fake" for kind in sorted({"cpu", there.type}))
        dist.init_process_group(backend, store=dist.HashStore(), rank=rank, world_size=ranks)
        try:
            part = copy.deepcopy(whole)
            apply_plan(part, plan, TPGroup.of(dist.group.WORLD))  # type: ignore[arg-type]  # it is there
            verify(part, solution, rank, example)
            synchronize_gradients(part)
            expected = loss_and_gradients(part, example)
            part.to(there)
            found = difference(loss_and_gradients(part, on(there, batch)), expected)
            if not found <= tolerance:
                raise RuntimeError(f"rank {rank} computes something else on {there} than on the CPU: {found:.1e} off")
            print(f"rank {rank} of {ranks}: proved, {found:.1e} off the CPU;", timed(part, on(there, batch), there))
        finally:
            dist.destroy_process_group()


if __name__ == "__main__":
    auto_cli(main)
