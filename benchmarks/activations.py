"""What a decoder block keeps for the backward pass: measured on two ranks, beside the formula of Korthikanti et al.

    python benchmarks/activations.py                  # docs/activation-memory.md, in about a minute
    python benchmarks/activations.py --page /dev/stdout

Counted are the storages that are made in a forward and that are alive after it, when only the loss is held: that is
what autograd keeps, whichever way. (Hooks on saved tensors would not see what functions keep themselves, nor the part
that is kept where tokens were gathered.) Parameters are there before, so they do not count. No GPU is needed.
"""

from __future__ import annotations

import gc
import os
import tempfile
import weakref
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from jsonargparse import auto_cli
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import AutoConfig, AutoModelForCausalLM

from lightning_autotp import Profile, parallelize

PAGE = Path(__file__).parent.parent / "docs" / "activation-memory.md"
RANKS = 2
ATTENTION, MLP, OUTSIDE = "inside attention", "inside MLP or experts", "outside both"
REGIONS = {"self_attn": ATTENTION, "linear_attn": ATTENTION, "mlp": MLP}
SYSTEMS = ("one process", "TP=2", "TP=2, sequence parallel")


@dataclass(frozen=True)
class Shapes:
    """A small model with the proportions of a large one.

    Attributes:
        family: its model type.
        sizes: its config.
        blocks: the number of a block of each kind, by the kind's name.
        rows: sequences in a batch.
        length: tokens in each.
    """

    family: str
    sizes: Mapping[str, Any]
    blocks: Mapping[str, int]
    rows: int = 2
    length: int = 128

    @property
    def unit(self) -> int:
        """``s b h``: tokens of a batch, times the width of a hidden state."""
        return self.rows * self.length * int(self.sizes["hidden_size"])


WIDTH = {"hidden_size": 256, "vocab_size": 512, "intermediate_size": 896, "num_hidden_layers": 2}
HEADS = {"num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 32}
CASES = {
    "Llama": Shapes("llama", {**WIDTH, **HEADS}, {"": 1}),
    "Mixtral": Shapes("mixtral", {**WIDTH, **HEADS, "num_local_experts": 8, "num_experts_per_tok": 2}, {"": 1}),
    "Qwen3-Next": Shapes(
        "qwen3_next",
        {
            **WIDTH,
            "num_hidden_layers": 4,
            "num_attention_heads": 16,
            "num_key_value_heads": 2,
            "head_dim": 32,
            "linear_num_key_heads": 2,
            "linear_num_value_heads": 4,
            "linear_key_head_dim": 128,
            "linear_value_head_dim": 128,
            "num_experts": 32,
            "num_experts_per_tok": 10,
            "moe_intermediate_size": 64,
            "shared_expert_intermediate_size": 64,
        },
        {"linear attention": 2, "attention": 3},
    ),
}
Kept = dict[tuple[int, str], int]
"""Bytes, by the number of a block and the region in it."""


class Alive(TorchDispatchMode):
    """Knows the storages that were made while it was on and are still alive, and where they were made.

    Args:
        model: whose blocks and regions are told apart: ``model.layers``, and their children of :data:`REGIONS`.
    """

    def __init__(self, model: Any) -> None:
        super().__init__()
        self._alive: dict[int, tuple[tuple[int, str], int]] = {}
        self._now: list[tuple[int, str]] = []
        self._where: dict[nn.Module, tuple[int, str]] = {}
        for number, block in enumerate(model.model.layers):
            self._where[block] = number, OUTSIDE
            for name, child in block.named_children():
                if name in REGIONS:
                    self._where[child] = number, REGIONS[name]

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Within it the mode is on. What is done where a tensor enters or leaves a module belongs to the module."""
        call = nn.Module.__call__

        def called(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
            where = self._where.get(module)
            if where is None:
                return call(module, *args, **kwargs)
            self._now.append(where)
            try:
                return call(module, *args, **kwargs)
            finally:
                self._now.pop()

        with mock.patch.object(nn.Module, "__call__", called), self:
            yield

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(kind not in (Tensor, nn.Parameter) for kind in types):
            return NotImplemented  # a subclass takes it apart, and the parts come here
        known = {_key(leaf) for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)}
        result = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            if isinstance(leaf, Tensor) and self._now and (key := _key(leaf)) not in known | self._alive.keys():
                storage = leaf.untyped_storage()
                self._alive[key] = self._now[-1], storage.nbytes()
                weakref.finalize(storage, self._alive.pop, key, None)
        return result

    def kept(self) -> Kept:
        """What is alive now."""
        gc.collect()
        found: Counter[tuple[int, str]] = Counter()
        for where, size in self._alive.values():
            found[where] += size
        return dict(found)


def _key(tensor: Tensor) -> int:
    return tensor.untyped_storage()._cdata


def kept_after_forward(model: nn.Module, tokens: Tensor) -> Kept:
    """Bytes that each region of each block keeps for the backward pass. Collective for a parallel model."""
    batch = {"input_ids": tokens, "labels": tokens, "use_cache": False}
    model(**batch).loss.backward()  # what is made once, is
    alive = Alive(model)
    with alive.watching():
        loss = model(**batch).loss
    found = alive.kept()
    loss.backward()
    return found


def measure(shapes: Shapes, dtype: torch.dtype) -> dict[str, Kept]:
    """The three systems on one model, by name. Collective: the group is the default one."""
    torch.manual_seed(0)
    config = AutoConfig.for_model(shapes.family, attn_implementation="sdpa", **shapes.sizes)
    tokens = torch.randint(3, shapes.sizes["vocab_size"], (shapes.rows, shapes.length))
    found = {}
    for system in SYSTEMS:
        torch.manual_seed(0)
        model: Any = AutoModelForCausalLM.from_config(config, dtype=dtype).train()
        if system != SYSTEMS[0]:
            model = parallelize(
                model,
                dist.group.WORLD,  # type: ignore[arg-type]
                example_inputs={"input_ids": tokens, "labels": tokens, "use_cache": False},
                profile=Profile(flops=Profile().flops * int(shapes.sizes["hidden_size"]) / 4096),
                sequence_parallel=system == SYSTEMS[2],
                plan_cache=False,
            )
        found[system] = kept_after_forward(model, tokens)
        if dist.get_rank() == 0:
            print(shapes.family, system, found[system], flush=True)
    return found


def _rank(rank: int, directory: str, results: Any) -> None:
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(RANKS)}
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{directory}/store", rank=rank, world_size=RANKS, timeout=timedelta(minutes=10)
    )
    try:
        found = {name: measure(shapes, torch.bfloat16) for name, shapes in CASES.items()}
    finally:
        dist.destroy_process_group()
    if rank == 0:
        results.put(found)


INTRODUCTION = f"""# What a block keeps for the backward pass

[Korthikanti et al. (2022)](https://arxiv.org/abs/2205.05198) count what one block of a GPT keeps, with `s` tokens in a
row, `b` rows, width `h`, `a` heads and `t` ranks, in bytes at 16 bit, with dropout:

| | bytes | at t = {RANKS}, in units of `sbh`, with fused attention |
| --- | --- | --- |
| one process | `sbh (34 + 5as/h)` | 34 |
| tensor parallelism | `sbh (10 + 24/t + 5as/(ht))` | 10 + 12 |
| and sequence parallelism | `sbh/t (34 + 5as/h)` | 5 + 12 |

The 10 are what tensor parallelism leaves whole: inputs of two norms (4), inputs of attention and MLP (4), and two masks
of dropout (2). `5as/h` is the softmax of attention and what belongs to it, which fused attention does not keep.

Below are measured bytes on rank 0, in units of `sbh` bytes, for models with the proportions of large ones, in bfloat16
with torch's fused attention and without dropout: storages that a block makes in its forward and that are alive after
it. Each belongs to the region whose code makes it, so the output of a norm, which attention or an MLP keeps as its
input, is *outside both*, as in the 10. What a rank gathers, or sums over the ranks, where tensors enter or leave
attention or MLP counts there. Written by `python benchmarks/activations.py`, on two processes with gloo."""


def to_markdown(found: Mapping[str, Mapping[str, Kept]]) -> str:
    """The page."""
    lines = [INTRODUCTION]
    for name, systems in found.items():
        shapes = CASES[name]
        for kind, block in shapes.blocks.items():
            lines += [
                "",
                f"## {name}{f', {kind}' if kind else ''}",
                "",
                f"{shapes.rows} x {shapes.length} tokens, width {shapes.sizes['hidden_size']}.",
                "",
                f"| | {' | '.join(systems)} |",
                f"| --- |{' ---: |' * len(systems)}",
            ]
            for region in (OUTSIDE, ATTENTION, MLP):
                cells = [f"{kept.get((block, region), 0) / shapes.unit:.2f}" for kept in systems.values()]
                lines.append(f"| {region} | {' | '.join(cells)} |")
            totals = [
                sum(size for (number, _), size in kept.items() if number == block) / shapes.unit
                for kept in systems.values()
            ]
            lines.append(f"| all | {' | '.join(f'{total:.2f}' for total in totals)} |")
    return "\n".join(lines) + "\n\n" + CONCLUSION


CONCLUSION = """\
## What does not fall to 1/t

- Without sequence parallelism everything *outside both* stays whole on each rank: the 10 above.
- With it a rank of Llama keeps exactly half of what one process keeps, outside and inside.
- A mixture keeps whole, *inside*, what was gathered for it: its router needs all tokens and all features for its
  backward pass. Where column-parallel layers take that tensor, too (a shared expert), its part is kept besides.
- Experts in a mixture: each rank has a part of each expert's features, so what an expert keeps of its input and its
  result is whole on every rank, and only what is between falls to 1/t. With small experts that is most of it.
"""


def main(page: Path = PAGE) -> None:
    """Measure and write the page.

    Args:
        page: where to write it; ``/dev/stdout`` prints it.
    """
    with tempfile.TemporaryDirectory() as directory:
        results = mp.get_context("spawn").SimpleQueue()
        mp.spawn(_rank, (directory, results), nprocs=RANKS)
        text = to_markdown(results.get())
    page.write_text(text)


if __name__ == "__main__":
    auto_cli(main)
