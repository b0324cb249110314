"""How long planning takes: seconds of wall clock and of CPU for capture, solve and verify, and per extra layer.

No weights, no processes, no GPU: the models are on the meta device and everything runs in this process.

    python benchmarks/planner.py                        # every model, about six minutes
    python benchmarks/planner.py --only gpt2 --profile  # one, and what its time is spent on
    python benchmarks/planner.py --page docs/planning-times.md  # write the page, too

* capture, solve, find sizes: what ``make_plan`` does, once, on the first rank. Finding sizes proves the plan, too:
  it captures the local model of one rank of every kind.
* make_plan: all of these together, and building the plan.
* read: what every rank does then: read the plan on its graph of the model (the other ranks capture theirs while the
  first one plans).
* verify: and after that: build its local model (on meta), capture it, compare.
* for gpus: what the first rank does on GPUs in place of make_plan, and the command ``plan``: a plan that fits into
  their memory, for which a step is rehearsed once or a few times.
* a layer more: the same with half of the layers, the difference divided by the number of layers in it.

And how long ``recommend`` takes for a model of 70 billion parameters on 16 GPUs.
"""

from __future__ import annotations

import argparse
import cProfile
import pstats
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM

from lightning_autotp import pipeline, recommend
from lightning_autotp.applying.replace import apply_plan
from lightning_autotp.capture.capture import language_model_inputs, meta_copy
from lightning_autotp.capture.garbage import relaxed_gc
from lightning_autotp.layouts.plan import Plan
from lightning_autotp.parallel.implementations import IMPLEMENTATIONS
from lightning_autotp.planning.asked import batch_of
from lightning_autotp.planning.machines import Machine
from lightning_autotp.planning.overview import plan_for
from lightning_autotp.proving import feasible
from lightning_autotp.proving.read_plan import read_plan
from lightning_autotp.ranks.group import TPGroup
from lightning_autotp.solving.options import PlanOptions

STAGES = ("capture", "solve", "find_sizes", "make_plan", "read", "verify", "for_gpus")


@dataclass(frozen=True)
class Case:
    """One model.

    Attributes:
        family: its model type.
        layers: how many layers it has.
        layers_field: the config's name for that.
        ranks: tensor-parallel size.
        sizes: the other fields of its config.
    """

    family: str
    layers: int
    layers_field: str
    ranks: int
    sizes: dict[str, Any] = field(default_factory=dict)

    def model(self, layers: int) -> nn.Module:
        """The model with so many layers, without weights."""
        config = AutoConfig.for_model(self.family, **(self.sizes | {self.layers_field: layers}))
        with torch.device("meta"):
            return AutoModelForCausalLM.from_config(config)


_LLAMA = {"num_key_value_heads": 8, "vocab_size": 128256, "max_position_embeddings": 131072, "rope_theta": 5e5}
CASES = {
    "gpt2": Case(
        "gpt2", 12, "n_layer", 2, dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0)
    ),
    "llama-8b": Case(
        "llama", 32, "num_hidden_layers", 8,
        _LLAMA | {"hidden_size": 4096, "intermediate_size": 14336, "num_attention_heads": 32},
    ),
    "llama-405b": Case(
        "llama", 126, "num_hidden_layers", 8,
        _LLAMA | {"hidden_size": 16384, "intermediate_size": 53248, "num_attention_heads": 128},
    ),
    "qwen3-235b": Case(
        "qwen3_moe", 94, "num_hidden_layers", 8,
        {
            "hidden_size": 4096, "num_attention_heads": 64, "num_key_value_heads": 4, "head_dim": 128,
            "moe_intermediate_size": 1536, "num_experts": 128, "num_experts_per_tok": 8, "intermediate_size": 12288,
            "vocab_size": 151936,
        },
    ),
    "deepseek-v3": Case("deepseek_v3", 61, "num_hidden_layers", 8),
}  # fmt: skip


@dataclass
class Seconds:
    """Time by the wall clock and of this process's CPUs."""

    wall: float = 0.0
    cpu: float = 0.0

    @contextmanager
    def add(self) -> Iterator[None]:
        """Count what runs inside."""
        wall, cpu = time.perf_counter(), time.process_time()
        try:
            yield
        finally:
            self.wall += time.perf_counter() - wall
            self.cpu += time.process_time() - cpu

    def __str__(self) -> str:
        return f"{self.wall:.2f} ({self.cpu:.2f})"


@contextmanager
def timed(owner: Any, name: str, seconds: Seconds) -> Iterator[None]:
    """Count the time of every call of a module's function."""
    original: Callable[..., Any] = getattr(owner, name)

    def call(*args: Any, **kwargs: Any) -> Any:
        with seconds.add():
            return original(*args, **kwargs)

    setattr(owner, name, call)
    try:
        yield
    finally:
        setattr(owner, name, original)


def measure(case: Case, layers: int) -> dict[str, Seconds]:
    """Plan the model once and verify one rank's part; the seconds by stage."""
    model = case.model(layers)
    inputs = language_model_inputs(model)
    seconds = {stage: Seconds() for stage in STAGES}
    with (
        timed(pipeline, "trace", seconds["capture"]),
        timed(feasible, "solve", seconds["solve"]),
        timed(feasible, "find_sizes", seconds["find_sizes"]),
        seconds["make_plan"].add(),
    ):
        plan, solution = pipeline.make_plan(model, case.ranks, example_inputs=inputs)
    with relaxed_gc(), seconds["read"].add():
        plan, solution = read_plan(Plan.from_json(plan.to_json()), solution.graph, IMPLEMENTATIONS)
    with relaxed_gc(), seconds["verify"].add():
        local = meta_copy(model)
        apply_plan(local, plan, TPGroup("", 0, case.ranks))
        pipeline.verify(local, solution, 0, inputs)
    with seconds["for_gpus"].add():
        plan_for(model, batch_of(None, model), case.ranks, Machine.of(GPU), PlanOptions(), tokens=16384)
    return seconds


def fastest(case: Case, layers: int, rounds: int) -> dict[str, Seconds]:
    """Of several measurements the one that took the least: the others waited for what else the machine does."""
    return min((measure(case, layers) for _ in range(rounds)), key=lambda seconds: total(seconds).cpu)


def total(seconds: dict[str, Seconds]) -> Seconds:
    """Planning, reading the plan back and verifying together."""
    parts = [seconds[stage] for stage in ("make_plan", "read", "verify")]
    return Seconds(sum(part.wall for part in parts), sum(part.cpu for part in parts))


GPU = "H100"
GPUS = f"16x{GPU}"


def recommending(layers: int = 80, gpus: str = GPUS) -> Seconds:
    """What ``recommend`` takes for a model of the shape of Llama-3.1-70B."""
    sizes = _LLAMA | {"hidden_size": 8192, "intermediate_size": 28672, "num_attention_heads": 64}
    model, seconds = Case("llama", layers, "num_hidden_layers", 1, sizes).model(layers), Seconds()
    with seconds.add():
        recommend(model, gpus=gpus, tokens_per_step=16 * 16384, sequence_length=4096)
    return seconds


def to_markdown(columns: Sequence[str], rows: Sequence[Sequence[str]], recommended: Seconds, rounds: int) -> str:
    """The page."""
    lines = [
        "# How long planning takes",
        "",
        "Seconds of one process without a GPU, and of its CPUs in parentheses, with models on the meta device.",
        f"Written by `python benchmarks/planner.py --page docs/planning-times.md` with torch {version('torch')} and",
        f"transformers {version('transformers')}. The machine's speed changes: of {rounds} runs of each model",
        "the fastest is given.",
        "",
        "* *capture*, *solve* and *find sizes* are the longest parts of *make plan*, which one rank does once.",
        "* *read* and *verify* are what every rank does then: it reads the plan on its graph, builds its part on the",
        "  meta device, traces that and compares it.",
        f"* *for gpus*: what the first rank does on GPUs ({GPU} here) in place of *make plan*, and the command `plan`:",
        "  a plan that fits into their memory, for which a step is rehearsed once or a few times.",
        "* *a layer more*: the difference to half of the layers, by layer.",
        "",
        f"| {' | '.join(columns)} |",
        f"|{' --- |' + ' ---: |' * (len(columns) - 1)}",
        *(f"| {' | '.join(row)} |" for row in rows),
        "",
        f"`recommend` takes {recommended} for a model of the shape of Llama-3.1-70B on {GPUS}: all sizes, and all",
        "ways to keep less of the activations.",
    ]
    return "\n".join(lines) + "\n"


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=list(CASES), default=list(CASES), help="measure these models")
    parser.add_argument("--profile", action="store_true", help="print what the time is spent on, too")
    parser.add_argument("--page", type=Path, help="write all of it to this file")
    parser.add_argument("--rounds", type=int, default=3, help="runs of each model, of which the fastest counts")
    options = parser.parse_args()
    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)
    measure(CASES["gpt2"], 1)  # what is imported and compiled once is not counted
    console = Console(width=None if Console().is_terminal else 160)
    table = Table(title="Planning: wall-clock seconds (CPU seconds)", title_justify="left")
    stages = [stage.replace("_", " ") for stage in STAGES]
    columns, rows = ("model", "layers", "TP", *stages, "all", "a layer more"), []
    for column in columns:
        table.add_column(column, justify="left" if column == "model" else "right")
    for name in options.only:
        case = CASES[name]
        with cProfile.Profile() if options.profile else contextmanager(lambda: iter([None]))() as profile:
            found = fastest(case, case.layers, options.rounds)
        half = case.layers // 2
        less, everything = total(fastest(case, half, options.rounds)), total(found)
        extra = Seconds(*((a - b) / (case.layers - half) for a, b in
                          ((everything.wall, less.wall), (everything.cpu, less.cpu))))  # fmt: skip
        cells = [name, case.layers, case.ranks, *(found[stage] for stage in STAGES), everything]
        rows.append([*map(str, cells), f"{extra.wall:.3f} ({extra.cpu:.3f})"])
        table.add_row(*rows[-1])
        if profile is not None:
            pstats.Stats(profile).sort_stats("cumulative").print_stats("lightning_autotp", 40)
    console.print(table)
    if options.page is not None:
        options.page.write_text(to_markdown(columns, rows, recommending(), options.rounds))


if __name__ == "__main__":
    main()
