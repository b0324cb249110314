"""Writes docs/recipes.md: for known models and GPUs, the sizes that `recommend` finds, their memory and their YAML.

    python tools/recipes.py                                 # the page; half an hour on two cores, as many as --jobs
    python tools/recipes.py --only Llama-3.1-8B --page /dev/stdout

Models are built from their sizes, without weights; no GPU is needed, and none is measured.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch
from jsonargparse import auto_cli
from transformers import AutoConfig, AutoModelForCausalLM

from lightning_autotp import recommend
from lightning_autotp.layouts.units import GIB
from lightning_autotp.planning.machines import Machine
from lightning_autotp.planning.recommend import Recommendation
from lightning_autotp.planning.rehearsal import Quantization
from lightning_autotp.planning.report import in_short, model_lines, reasons, yaml_lines

PAGE = Path(__file__).parent.parent / "docs" / "recipes.md"


@dataclass(frozen=True)
class Recipe:
    """A model and how it is trained.

    Attributes:
        name: what people call it.
        family: its model type.
        sizes: its config.
        gpus: as ``recommend`` takes them.
        lora: rank of adapters on all linear layers; 0 trains everything.
        quantize: how their base is quantized.
        tokens: of an optimizer step.
        length: tokens of a row.
    """

    name: str
    family: str
    sizes: Mapping[str, Any]
    gpus: str
    lora: int = 0
    quantize: Quantization | None = None
    tokens: int = 131_072
    length: int = 4096

    @property
    def title(self) -> str:
        """What is trained on what."""
        trained = f"{'QLoRA' if self.quantize else 'LoRA'} {self.lora}" if self.lora else "all parameters"
        return f"{self.name}, {trained}, {self.gpus}"

    def found(self) -> Recommendation:
        """What is recommended for it."""
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(AutoConfig.for_model(self.family, **self.sizes))
        return recommend(
            model,
            gpus=self.gpus,
            tokens_per_step=self.tokens,
            sequence_length=self.length,
            precision="bf16-true" if self.lora else "bf16-mixed",
            lora=self.lora,
            quantize=self.quantize,
        )


LLAMA = {"vocab_size": 128_256, "max_position_embeddings": 131_072, "num_key_value_heads": 8}
LLAMA_8B = {
    **LLAMA, "hidden_size": 4096, "intermediate_size": 14_336, "num_hidden_layers": 32, "num_attention_heads": 32,
}  # fmt: skip
LLAMA_70B = {
    **LLAMA, "hidden_size": 8192, "intermediate_size": 28_672, "num_hidden_layers": 80, "num_attention_heads": 64,
}  # fmt: skip
QWEN = {"vocab_size": 151_936, "max_position_embeddings": 40_960, "head_dim": 128}
QWEN3_32B = {
    **QWEN, "hidden_size": 5120, "intermediate_size": 25_600, "num_hidden_layers": 64, "num_attention_heads": 64,
    "num_key_value_heads": 8,
}  # fmt: skip
QWEN3_30B = {
    **QWEN, "hidden_size": 2048, "moe_intermediate_size": 768, "num_hidden_layers": 48, "num_attention_heads": 32,
    "num_key_value_heads": 4, "num_experts": 128, "num_experts_per_tok": 8, "experts_implementation": "grouped_mm",
}  # fmt: skip
SMALL: Mapping[str, Any] = {"tokens": 16_384, "length": 2048}
RECIPES = (
    Recipe("Llama-3.1-8B", "llama", LLAMA_8B, "8xH100"),
    Recipe("Llama-3.1-8B", "llama", LLAMA_8B, "8xA100-40"),
    Recipe("Llama-3.1-8B", "llama", LLAMA_8B, "2xRTX4090", lora=16, **SMALL),
    Recipe("Llama-3.1-8B", "llama", LLAMA_8B, "2xRTX4090", lora=16, quantize="nf4", **SMALL),
    Recipe("Qwen3-32B", "qwen3", QWEN3_32B, "16xH100"),
    Recipe("Qwen3-32B", "qwen3", QWEN3_32B, "4xH100", lora=16),
    Recipe("Qwen3-32B", "qwen3", QWEN3_32B, "4xRTX4090", lora=16, quantize="nf4", **SMALL),
    Recipe("Qwen3-30B-A3B", "qwen3_moe", QWEN3_30B, "16xH100"),
    Recipe("Llama-3.3-70B", "llama", LLAMA_70B, "32xH100"),
    Recipe("Llama-3.3-70B", "llama", LLAMA_70B, "8xH100", lora=16),
    Recipe("Llama-3.3-70B", "llama", LLAMA_70B, "2xA100-40", lora=16, quantize="nf4", **SMALL),
)

ADAPTED = Recommendation(
    "LlamaForCausalLM",
    Machine.of("2xRTX4090"),
    tokens=16_384,
    length=2048,
    precision="bf16-true",
    choices=(),
    lora=16,
    quantize="nf4",
    source="meta-llama/Llama-3.1-8B",
)
"""Whose model is shown."""

INTRODUCTION = """# Recipes

For known models: the sizes that [`lightning-autotp recommend`](recommend.md) finds, the memory that one GPU needs at
most, and the lines of a LightningCLI's configuration. All is estimated from the models' sizes, for steps of AdamW;
nothing here was run on these GPUs. Written by `python tools/recipes.py`. For another model, other GPUs or another
number of tokens, ask the command."""

EXPLAINED = """The memory is that of parameters, gradients, optimizer states, activations and the rest, beside what a
GPU has. `sp` is sequence parallelism, `ck` activation checkpointing; `ao` and `po` are activations and parameters in
host memory. Three numbers are TP, replicas and the copies of
each ([hybrid sharding](scaling-out.md#tensor-parallelism-times-fsdp2)).

Where adapters are trained, the model is the one below; LoRA without `quantization_config`, QLoRA with it. Copies divide
a model's parameters, but not those that are [quantized](lora.md#quantized-bases): these are divided by tensor
parallelism alone. Of Qwen3-30B-A3B nearly all parameters are experts, which are no linear layers: neither adapters
nor bitsandbytes reach them."""

HEAD = """| | TP x copies | rows x passes | GiB of a GPU | of | tokens/s |
| --- | --- | --- | --- | ---: | ---: |"""


def section(recipe: Recipe) -> tuple[str, str]:
    """The row of the table, and the lines below it."""
    found = recipe.found()
    best = found.best
    said = "\n".join(f"* {reason}" for reason in reasons(found))
    anchor = "".join(letter for letter in recipe.title.lower().replace(" ", "-") if letter.isalnum() or letter in "-_")
    if best is None:
        return f"| [{recipe.title}](#{anchor}) | nothing fits | | | | |", f"## {recipe.title}\n\n{said}"
    kept = best.memory
    kinds = (kept.parameters, kept.gradients, kept.states, kept.activations, kept.temporary + kept.gathered)
    sizes = " + ".join(f"{kind / GIB:.1f}" for kind in kinds) + f" = {kept.total / GIB:.0f}"
    cells = (
        f"[{recipe.title}](#{anchor})",
        in_short(best).replace("x", " x "),
        f"{best.rows} x {best.passes}",
        sizes,
        f"{found.room / GIB:.0f}",
        f"{best.tokens_per_second:,.0f}",
    )
    lines = yaml_lines(found, best).rstrip("\n")
    return f"| {' | '.join(cells)} |", f"## {recipe.title}\n\n{said}\n\n```yaml\n{lines}\n```"


def to_markdown(sections: Sequence[tuple[str, str]]) -> str:
    """The page."""
    rows, texts = zip(*sections, strict=True)
    adapted = f"```python\n{model_lines(ADAPTED)}\n```"
    return "\n\n".join((INTRODUCTION, "\n".join((HEAD, *rows)), EXPLAINED, adapted, *texts)) + "\n"


def main(only: list[str] | None = None, page: Path = PAGE, jobs: int = 2) -> None:
    """Find the sizes and write the page.

    Args:
        only: parts of the titles of recipes.
        page: where to write it; ``/dev/stdout`` prints it.
        jobs: processes that look for sizes.
    """
    chosen = [recipe for recipe in RECIPES if only is None or any(part in recipe.title for part in only)]
    limit = partial(torch.set_num_threads, 1)
    with ProcessPoolExecutor(jobs, mp_context=get_context("spawn"), initializer=limit) as pool:
        text = to_markdown(list(pool.map(section, chosen)))
    page.write_text(text)


if __name__ == "__main__":
    auto_cli(main)
