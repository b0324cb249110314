"""The most memory of a process while the head and the loss run in parts: with copies of the model, and without.

    python benchmarks/loss_memory.py                  # 8,192 tokens x 128,256 words, four processes, some minutes
    python benchmarks/loss_memory.py --hidden 512

FSDP2 gathers the head of each copy for the forward and the backward pass, and the embedding while it runs. The loss, a
sum or a mean, has its gradients made in the forward pass, so the parts are there then; in the backward pass FSDP2 sums
the gradients over the copies.
Counted is what the system says of the whole process (resident memory at most, in each pass), less what it had before
there was a model. It needs Linux, and no GPU.
"""

from __future__ import annotations

import gc
import os
import tempfile
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from jsonargparse import auto_cli
from torch.distributed.device_mesh import init_device_mesh
from transformers import AutoConfig, AutoModelForCausalLM

from lightning_autotp import parallelize

RANKS, ROWS = 2, 4


def measure(copies: int, tokens: int, words: int, hidden: int) -> tuple[int, int]:
    """Bytes at most of this process in the forward and in the backward pass. Collective."""
    before = _status("VmRSS")
    mesh = init_device_mesh("cpu", (copies, RANKS), mesh_dim_names=("data", "tensor"))
    config = AutoConfig.for_model(
        "llama", hidden_size=hidden, intermediate_size=2 * hidden, num_hidden_layers=2, num_attention_heads=8,
        num_key_value_heads=8, vocab_size=words, max_position_embeddings=tokens,
    )  # fmt: skip
    torch.manual_seed(0)
    model: Any = AutoModelForCausalLM.from_config(config).train()
    batch = torch.randint(words, (ROWS, tokens // ROWS))
    parallelize(
        model,
        mesh["tensor"].get_group(),
        example_inputs={"input_ids": batch, "labels": batch, "use_cache": False},
        plan_cache=False,
        data_mesh=mesh["data"] if copies > 1 else None,
    )
    short = batch[:, :8]
    model(input_ids=short, labels=short, use_cache=False).loss.backward()  # what is made once, is
    model.zero_grad()
    gc.collect()
    clear = Path("/proc/self/clear_refs")
    clear.write_text("5")  # the most is counted from here
    loss = model(input_ids=batch, labels=batch, use_cache=False).loss
    forward = _status("VmHWM") - before
    clear.write_text("5")
    loss.backward()
    return forward, _status("VmHWM") - before


def _status(name: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(name)) * 1024


def _rank(rank: int, copies: int, sizes: tuple[int, int, int], directory: str, results: Any) -> None:
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(copies * RANKS)}
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo",
        init_method=f"file://{directory}/store",
        rank=rank,
        world_size=copies * RANKS,
        timeout=timedelta(hours=1),
    )
    try:
        results.put(measure(copies, *sizes))
    finally:
        dist.destroy_process_group()


def main(tokens: int = 8192, words: int = 128_256, hidden: int = 256) -> None:
    """Measure one copy and two, and print the most of a rank.

    Args:
        tokens: of a batch of one copy.
        words: of the vocabulary, which two ranks divide.
        hidden: width of the model, which has two layers.
    """
    os.environ["MALLOC_MMAP_THRESHOLD_"] = str(2**20)  # memory that is freed is given back
    found: list[tuple[int, ...]] = []
    for copies in (1, 2):
        with tempfile.TemporaryDirectory() as directory:
            results = mp.get_context("spawn").SimpleQueue()
            mp.spawn(_rank, (copies, (tokens, words, hidden), directory, results), nprocs=copies * RANKS)
            of_ranks = [results.get() for _ in range(copies * RANKS)]
        found.append(tuple(max(passes) for passes in zip(*of_ranks, strict=True)))
        forward, backward = (size / 2**20 for size in found[-1])
        print(f"{copies} x {RANKS} ranks: forward {forward:,.0f} MiB, backward {backward:,.0f} MiB", flush=True)
    forward, backward = (several / one for one, several in zip(*found, strict=True))
    logits = 4 * tokens * words / RANKS / 2**20
    print(f"with copies {forward:.2f} and {backward:.2f} times as much; a rank's logits would be {logits:,.0f} MiB")


if __name__ == "__main__":
    auto_cli(main)
