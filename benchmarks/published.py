"""Step times that others have published, beside what the planner predicts for the same settings, and the page about it.

    python benchmarks/published.py                             # docs/published-times.md, in some minutes
    python benchmarks/published.py --only 22B --page /dev/stdout # a quick look

The rows are data, with their sources. Nothing of the planner or of its machines' files is adapted to them. No weights,
no processes, no GPU: models are on the meta device, and a step of one rank is rehearsed on fake tensors.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch
from jsonargparse import auto_cli
from transformers import AutoConfig, AutoModelForCausalLM

from lightning_autotp import make_plan
from lightning_autotp.building.repeated_blocks import checkpoint_blocks
from lightning_autotp.capture.capture import language_model_inputs
from lightning_autotp.planning.estimate import StepTime, step_time
from lightning_autotp.planning.machines import Machine
from lightning_autotp.planning.rehearsal import Rehearsal, fullest_rank, local_model, one_row, rehearse

PAGE = Path(__file__).parent.parent / "docs" / "published-times.md"

SOURCES = {
    "Megatron-LM, H100": "https://github.com/NVIDIA/Megatron-LM/blob/main/README.md#training-speed-and-scalability",
    "Korthikanti et al.": "https://arxiv.org/abs/2205.05198",
    "NeMo, A100": "https://github.com/NVIDIA/NeMo-Framework-Launcher/tree/3579cdb3f2afdeaf23af3e0da6497555566c3f0c",
    "torchtitan, A100": "https://github.com/pytorch/torchtitan/blob/d4c86e375/docs/performance.md",
    "torchtitan, H100": "https://github.com/pytorch/torchtitan/blob/main/benchmarks/llama3_h100_202412_torchtitan.md",
    "torchtitan, H100, Qwen3": "https://github.com/pytorch/torchtitan/pull/1690",
    "torchtitan, H100, TP": "https://github.com/pytorch/torchtitan/commit/2887250bbd9103d0bc997ea2efb3a525b5e5dbc0",
}
"""Where the figures are from."""


@dataclass(frozen=True)
class Row:
    """A published step.

    Attributes:
        name: of the model.
        source: a name in :data:`SOURCES`.
        family: the model's type in transformers.
        sizes: its config.
        gpus: how many of which.
        ranks: tensor-parallel ones; the rest are copies.
        rows: of a forward pass of one copy.
        length: tokens of a row.
        tokens_per_second: of each GPU, as published or worked out of what is.
        passes: forward and backward passes of a step.
        sequence_parallel: whether tokens are sharded between regions.
        recomputed: what the backward pass computes again: nothing, all of each block, or some of its operators.
        compiled: whether operators are fused, by a compiler or by hand.
    """

    name: str
    source: str
    family: str
    sizes: Mapping[str, Any]
    gpus: str
    ranks: int
    rows: int
    length: int
    tokens_per_second: float
    passes: int = 1
    sequence_parallel: bool = True
    recomputed: Literal["nothing", "blocks", "some operators"] = "nothing"
    compiled: bool = True

    @property
    def copies(self) -> int:
        """Of the model."""
        return Machine.of(self.gpus).gpus // self.ranks

    @property
    def published(self) -> float:
        """Seconds of a step."""
        return self.passes * self.rows * self.length / self.ranks / self.tokens_per_second


def gpt(
    hidden: int, layers: int, heads: int, length: int, words: int, *, fused_attention: bool = True
) -> dict[str, Any]:
    """A GPT; without fused attention also with the dropout that was usual then."""
    dropout = 0.0 if fused_attention else 0.1
    return {
        "n_embd": hidden,
        "num_hidden_layers": layers,
        "n_head": heads,
        "n_positions": length,
        "vocab_size": words,
        "attn_implementation": "sdpa" if fused_attention else "eager",
        **dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), dropout),
    }


def rate(sizes: Mapping[str, Any], teraflops: float) -> float:
    """Tokens per second of a GPU that does so many model TFLOP/s, by the formula of Korthikanti et al."""
    hidden, layers = sizes["n_embd"], sizes["num_hidden_layers"]
    attention, words = sizes["n_positions"] / (6 * hidden), sizes["vocab_size"] / (12 * hidden * layers)
    return 1e12 * teraflops / (72 * layers * hidden**2 * (1 + attention + words))


LLAMA_8B = {
    "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32, "num_attention_heads": 32,
    "num_key_value_heads": 8, "vocab_size": 128_256, "max_position_embeddings": 8192,
}  # fmt: skip
LLAMA_70B = {
    **LLAMA_8B, "hidden_size": 8192, "intermediate_size": 28672, "num_hidden_layers": 80, "num_attention_heads": 64,
}  # fmt: skip
QWEN3_32B = {
    "hidden_size": 5120, "intermediate_size": 25600, "num_hidden_layers": 64, "num_attention_heads": 64,
    "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 151_936, "max_position_embeddings": 4096,
}  # fmt: skip
LLAMA2_13B = {
    "hidden_size": 5120, "intermediate_size": 13824, "num_hidden_layers": 40, "num_attention_heads": 40,
    "vocab_size": 32_000, "max_position_embeddings": 4096,
}  # fmt: skip
LLAMA2_70B = {**LLAMA_70B, "vocab_size": 32_000, "max_position_embeddings": 4096}
GPT_22B = gpt(6144, 48, 64, 2048, 51_200, fused_attention=False)
GPT_5B = gpt(4096, 24, 32, 2048, 50_304, fused_attention=False)


def _megatron(name: str, hidden: int, layers: int, heads: int, ranks: int, teraflops: float) -> Row:
    sizes = gpt(hidden, layers, heads, 4096, 131_072)
    gpus = f"{48 * ranks}xH100"
    return Row(name, "Megatron-LM, H100", "gpt2", sizes, gpus, ranks, 4, 4096, rate(sizes, teraflops))


ROWS = (
    _megatron("GPT 1.7B", 2048, 24, 16, 1, 408.8),
    _megatron("GPT 7.1B", 4096, 30, 32, 2, 465.9),
    _megatron("GPT 16B", 6144, 32, 48, 4, 489.1),
    _megatron("GPT 32B", 7168, 48, 56, 8, 459.6),
    Row(
        "GPT 22B", "Korthikanti et al.", "gpt2", GPT_22B, "8xA100-80", 8, 4, 2048, 4 * 2048 / 8 / 1.42,
        sequence_parallel=False, recomputed="blocks",
    ),
    Row(
        "GPT 22B", "Korthikanti et al.", "gpt2", GPT_22B, "8xA100-80", 8, 4, 2048, 4 * 2048 / 8 / 1.10,
        recomputed="some operators",
    ),
    Row(
        "GPT 5B", "NeMo, A100", "gpt2", GPT_5B, "8xA100-80", 1, 2, 2048, 40_345 / 8,
        passes=2048 // (8 * 2), sequence_parallel=False,
    ),
    Row(
        "GPT 5B", "NeMo, A100", "gpt2", GPT_5B, "128xA100-80", 1, 2, 2048, 659_481 / 128,
        passes=2048 // (128 * 2), sequence_parallel=False,
    ),
    Row("Llama 2 13B", "torchtitan, A100", "llama", LLAMA2_13B, "64xA100-80", 1, 2, 4096, 2162, compiled=False),
    Row(
        "Llama 2 70B", "torchtitan, A100", "llama", LLAMA2_70B, "64xA100-80", 1, 2, 4096, 353,
        recomputed="blocks", compiled=False,
    ),
    Row(
        "Llama 3 8B", "torchtitan, A100", "llama", LLAMA_8B, "64xA100-80", 1, 1, 8192, 2973,
        recomputed="some operators", compiled=False,
    ),
    Row(
        "Llama 3 70B", "torchtitan, A100", "llama", LLAMA_70B, "64xA100-80", 1, 1, 8192, 331,
        recomputed="blocks", compiled=False,
    ),
    Row(
        "Llama 3.1 8B", "torchtitan, H100", "llama", LLAMA_8B, "8xH100", 1, 2, 8192, 5762,
        recomputed="some operators", compiled=False,
    ),
    Row(
        "Llama 3.1 8B", "torchtitan, H100", "llama", LLAMA_8B, "8xH100", 1, 2, 8192, 6667,
        recomputed="some operators",
    ),
    Row(
        "Llama 3.1 8B", "torchtitan, H100", "llama", LLAMA_8B, "128xH100", 1, 2, 8192, 6514,
        recomputed="some operators",
    ),
    Row(
        "Llama 3.1 8B", "torchtitan, H100, TP", "llama", LLAMA_8B, "64xH100", 8, 12, 8192, 4378,
        recomputed="some operators",
    ),
    Row(
        "Llama 3.1 70B", "torchtitan, H100, TP", "llama", LLAMA_70B, "256xH100", 8, 16, 8192, 597.3,
        recomputed="blocks",
    ),
    Row("Qwen3 32B", "torchtitan, H100, Qwen3", "qwen3", QWEN3_32B, "8xH100", 1, 2, 4096, 1874, recomputed="blocks"),
    Row(
        "Qwen3 32B", "torchtitan, H100, Qwen3", "qwen3", QWEN3_32B, "32xH100", 8, 16, 4096, 876,
        recomputed="blocks", compiled=False,
    ),
)  # fmt: skip


@dataclass
class Planner:
    """Predicts rows. Models are planned and rehearsed once, whatever their GPUs."""

    _rehearsed: dict[str, Rehearsal] = field(default_factory=dict)

    def predict(self, row: Row) -> list[StepTime]:
        """A step's time; where some operators are computed again, one with none and one with all of each block."""
        ways = {"nothing": (False,), "blocks": (True,), "some operators": (False, True)}[row.recomputed]
        return [
            step_time(
                self._rehearsal(row, recomputed),
                Machine.of(row.gpus),
                row.ranks,
                rows=row.rows,
                copies=row.copies,
                passes=row.passes,
            )
            for recomputed in ways
        ]

    def _rehearsal(self, row: Row, recomputed: bool) -> Rehearsal:
        planned = row.ranks > 1 and (row.ranks, row.rows, row.sequence_parallel)
        key = repr((row.sizes, row.length, planned, recomputed))
        if key not in self._rehearsed:
            self._rehearsed[key] = _rehearsed(row, recomputed)
        return self._rehearsed[key]


def _rehearsed(row: Row, recomputed: bool) -> Rehearsal:
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(row.family, **row.sizes), dtype=torch.bfloat16)
    batch, plan = language_model_inputs(model), None
    if row.ranks > 1:
        tokens = row.rows, row.length
        plan, _ = make_plan(model, row.ranks, tokens_per_step=tokens, sequence_parallel=row.sequence_parallel)
    local = local_model(model, plan, 0 if plan is None else fullest_rank(plan))
    if recomputed:
        checkpoint_blocks(local)
    return rehearse(local, one_row(model, batch, row.length), precision="bf16-true")


INTRODUCTION = """# Step times, predicted and published

What [`lightning-autotp recommend`](recommend.md) predicts for a step beside what others have published for the same
model, GPUs, sizes and options. Nothing was adapted to these figures: the machines' files are those of the package.
Written by `python benchmarks/published.py`, which has the rows as data.

Only steps are here that this package could take: in bfloat16, with tensor parallelism and copies, without pipelines,
context parallelism and float8, and with all sizes known. Of Megatron-LM's table the rows of a pass are not: all four of
a copy are taken for one pass. Its times are worked out of TFLOP/s and the formula of
[Korthikanti et al.](https://arxiv.org/abs/2205.05198); those of torchtitan and NeMo out of tokens per second.

* All of it is in bfloat16 here (`bf16-true`), as activations are in all sources: under autocast this package keeps
  hidden states in float32, and sends them so.
* *TP x copies*: copies as FSDP2 shards them, whatever the source shards.
* *rows*: of a pass of one copy, times passes of a step, times tokens of a row.
* *again*: what the backward pass computes again. Which operators, the planner cannot say; where it is some of them, it
  says the time with none and with whole blocks, between which the step must be.
* *products*, *others*, *sent*: of the predicted step, the least of two. *Others* are operators that are neither
  products nor attention, as they are in eager code.
"""


def to_markdown(found: list[tuple[Row, list[StepTime]]]) -> str:
    """The page."""
    lines = [
        INTRODUCTION,
        "| | source | GPUs | TP x copies | rows | again | published | predicted | off | products | others | sent |",
        "| --- | --- | --- | --- | --- | --- | ---: | ---: | ---: | ---: | ---: | ---: |",
    ]
    for row, times in found:
        least, seconds = times[0], [time.total for time in times]
        cells = (
            row.name,
            f"[{row.source}]({SOURCES[row.source]})",
            row.gpus,
            f"{row.ranks} x {row.copies}" + (", sequence parallel" if row.sequence_parallel and row.ranks > 1 else ""),
            f"{row.rows} x {row.passes} x {row.length:,}",
            row.recomputed,
            f"{row.published:.2f} s",
            " to ".join(f"{each:.2f}" for each in seconds) + " s",
            " to ".join(f"{each / row.published - 1:+.0%}" for each in seconds),
            f"{least.products / least.total:.0%}",
            f"{(least.others + least.update) / least.total:.0%}",
            f"{(least.tensor_parallel + least.copies + least.network) / least.total:.0%}",
        )
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n\n" + CONCLUSION


CONCLUSION = """\
## How far off, and why

* A100: all rows of torchtitan are 30 to 39 % too slow, products alone more than the whole published step of the 13B
  model. The machine's file assumes that products reach 0.5 of the peak; by what torchtitan has published (61 % of the
  peak for that whole step) they reach at least 0.6. The steps of the GPTs on one machine are 41 and 43 % too slow, too.
* H100: the file says what products reached in a [measurement](gpu.md), 0.6. With copies alone torchtitan's compiled
  steps are between the two predictions, and Megatron-LM's is 10 % shorter than predicted, which has fewer operators.
  torchtitan's eager step is longer than both predictions: the host's time is in none. (Its GPUs have 2.4 TB/s of memory
  and 500 W, less than those of the file.)
* Tensor parallelism on an H100 (torchtitan, TP=8): within 4 % with whole blocks computed again (70B), and between the
  two predictions (8B). A quarter of the predicted step is what is sent and does not hide behind products: all of the
  forward pass's, and half of the backward pass's.
* Qwen3-32B: copies alone are predicted at 1,635 tokens per second and GPU (published: 1,874, compiled), 8 ranks x 4
  copies at 1,243 (876, eager). The order is right, and the step with tensor parallelism is 30 % too short: torchtitan's
  is not compiled there, hides nothing, and the host's time is in no prediction. (Its GPUs have 96 GiB.)
* Many passes on many nodes (GPT 5B, 128 GPUs): FSDP2 gathers parameters and sums gradients in each pass, NeMo's
  distributed optimizer once in a step, and attention there is not fused. So more is seen of the network than there was.
* Megatron-LM's table: 10, 19, 32 and 53 % too slow at TP=1, 2, 4 and 8. Operators are those of eager code, and behind
  GPT-2's layers (transformers' `Conv1D`) this package hides nothing of what is sent; there most of it is behind
  products, and operators are fused. Without both, products alone would be 71 to 84 % of the published steps.
"""


def main(page: Path = PAGE, only: list[str] | None = None) -> None:
    """Predict and write the page.

    Args:
        page: where to write it; ``/dev/stdout`` prints it.
        only: parts of the names of models or sources; all by default.
    """
    planner = Planner()
    found = []
    for row in ROWS:
        if only is None or any(part in f"{row.name} {row.source}" for part in only):
            found.append((row, planner.predict(row)))
            print(row.name, row.source, row.gpus, f"{row.published:.3f}", *found[-1][1], flush=True)
    text = to_markdown(found)
    page.write_text(text)


if __name__ == "__main__":
    auto_cli(main)
