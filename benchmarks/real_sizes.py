"""What one layer of a large model sends at TP=8, planned by the solver and by hand, and the page about it.

    python benchmarks/real_sizes.py                  # docs/real-sizes.md, in some minutes
    python benchmarks/real_sizes.py --page /dev/stdout

No weights and no processes: models are on the meta device, with as many layers as there are kinds of them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatch
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from jsonargparse import auto_cli
from transformers import AutoConfig, AutoModelForCausalLM

from lightning_autotp import Profile, make_plan
from lightning_autotp.layouts.step_size import TokensPerStep
from lightning_autotp.parallel.implementations import IMPLEMENTATIONS
from lightning_autotp.solving.memory_limit import profiles
from lightning_autotp.solving.plan_from_solution import collectives
from lightning_autotp.solving.solution import Solution
from lightning_autotp.solving.solver import solve

RANKS, ROWS, LENGTH, ITEMSIZE = 8, 4, 4096, 2
PAGE = Path(__file__).parent.parent / "docs" / "real-sizes.md"


@dataclass(frozen=True)
class Model:
    """A model and what one writes by hand for it.

    Attributes:
        name: what people call it.
        family: its model type.
        sizes: its config, with fewer layers.
        layers: the number of a layer of each kind, by the kind's name.
        by_hand: of those whose plan by hand is not two all-reduces of hidden states forward and two backward: the
            widths of all that is all-reduced.
        whole_by_hand: groups of modules, by patterns, whose products every rank computes by hand, and the solver
            divides.
    """

    name: str
    family: str
    sizes: Mapping[str, Any]
    layers: Mapping[str, int]
    by_hand: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    whole_by_hand: tuple[tuple[str, ...], ...] = ()

    @property
    def width(self) -> int:
        """Features of a hidden state."""
        return int(self.sizes["hidden_size"])

    def widths(self, layer: str) -> tuple[int, ...]:
        """What is all-reduced of a token in a layer, forward and backward, by hand."""
        return self.by_hand.get(layer, (self.width,) * 4)


LATENTS = (1536, 512 + 64)  # of queries, and of keys and values with the rotary part
MODELS = (
    Model(
        "Llama-3.1-70B",
        "llama",
        {
            "hidden_size": 8192,
            "intermediate_size": 28672,
            "num_hidden_layers": 2,
            "num_attention_heads": 64,
            "num_key_value_heads": 8,
            "vocab_size": 128_256,
        },
        {"every layer": 1},
    ),
    Model(
        "Qwen3-235B-A22B",
        "qwen3_moe",
        {
            "hidden_size": 4096,
            "num_hidden_layers": 2,
            "num_attention_heads": 64,
            "num_key_value_heads": 4,
            "head_dim": 128,
            "moe_intermediate_size": 1536,
            "num_experts": 128,
            "num_experts_per_tok": 8,
            "vocab_size": 151_936,
        },
        {"every layer": 1},
        whole_by_hand=(("*.mlp.gate",),),
    ),
    Model(
        "DeepSeek-V3",
        "deepseek_v3",
        {"hidden_size": 7168, "num_hidden_layers": 5},
        {"dense layer": 1, "mixture": 4},
        dict.fromkeys(("dense layer", "mixture"), (7168, 7168, 7168, *LATENTS)),
        (("*.q_a_proj", "*.kv_a_proj_with_mqa", "*.q_a_layernorm", "*.kv_a_layernorm"),),
    ),
    Model(
        "GPT-OSS-120B",
        "gpt_oss",
        {"hidden_size": 2880, "num_hidden_layers": 2, "num_local_experts": 128, "num_experts_per_tok": 4},
        {"every layer": 1},
        whole_by_hand=(("*.mlp.router",),),
    ),
    Model(
        "Qwen3-Next-80B-A3B",
        "qwen3_next",
        {"hidden_size": 2048, "num_hidden_layers": 4, "num_experts": 512, "num_experts_per_tok": 10},
        {"linear attention": 1, "attention": 3},
        whole_by_hand=(("*.mlp.gate",), ("*.shared_expert_gate",), ("*.k_proj", "*.v_proj")),
    ),
)


INTRODUCTION = f"""# What a layer sends

One layer of large models on {RANKS} ranks, {ROWS} x {LENGTH:,} tokens a step in bfloat16, forward and backward: the
collectives that the solver's plan has, and those of Megatron's pattern, worked out by hand. Megabytes are what a rank
sends where collectives go in rings. Gradients of parameters that ranks share are summed once a step besides. Written
by `python benchmarks/real_sizes.py`.

By hand a region (attention, MLP, mixture) ends with an all-reduce forward and begins with one backward. DeepSeek's
attention begins after the products that make its latents, so its backward reduces the latents.

The solver weighs time and memory, for GPUs that are linked by a switch. It cuts the matrices that make DeepSeek's
latents, and divides the products of routers, which are whole by hand, and sums or gathers what they make. That is for
time, not for memory: where there is room for everything, it does the same."""

DECIDES = """## What decides

With room for everything nothing but time divides these products: by the prices, a step takes longer where every rank
computes all of them, as by hand. For each row whose counts are others than by hand: the modules that make the
difference, how much longer a layer takes that has them whole, and what the last kind of layer of the model sends then.
Llama's rows have Megatron's counts."""

TITLES: dict[str, dict[str, Any]] = {
    "Without sequence parallelism": {},
    "With sequence parallelism": {"sequence_parallel": True},
    "With room for everything": {"memory": 1e15},
}
"""The page's sections, with the options of their plans."""


def planned(model: Model, **options: Any) -> Solution:
    """The solver's layouts of a model."""
    with torch.device("meta"):
        whole = AutoModelForCausalLM.from_config(
            AutoConfig.for_model(model.family, **model.sizes), dtype=torch.bfloat16
        ).train()
        tokens = torch.ones(ROWS, LENGTH, dtype=torch.long)
    _, solution = make_plan(
        whole,
        RANKS,
        example_inputs={"input_ids": tokens, "labels": tokens, "use_cache": False},
        tokens_per_step=(ROWS, LENGTH),
        **options,
    )
    return solution


def sent(solution: Solution, layer: int) -> tuple[Counter[str], float]:
    """The collectives of a layer, and the megabytes that a rank sends in them, in rings."""
    calls: Counter[str] = Counter()
    total = 0.0
    for kind, size, operator in collectives(solution):
        if operator is not None and f"layers.{layer}." in f"{operator.module}.":
            calls[kind] += 1
            total += on_the_ring(kind, size)
    return calls, total


def on_the_ring(kind: str, size: float) -> float:
    """Megabytes that a rank sends where a tensor of so many bytes is reduced, gathered or scattered."""
    return (2 if kind == "all_reduce" else 1) * (RANKS - 1) / RANKS * size / 1e6


def by_hand(model: Model, layer: str, sequence_parallel: bool) -> tuple[Counter[str], float]:
    """The same for Megatron's pattern.

    With sequence parallelism each all-reduce of a hidden state is a reduce-scatter and a gather, and the backward pass
    gathers the inputs of both regions again.
    """
    bytes_of = [ROWS * LENGTH * width * ITEMSIZE for width in model.widths(layer)]
    if not sequence_parallel:
        return Counter(all_reduce=len(bytes_of)), sum(on_the_ring("all_reduce", size) for size in bytes_of)
    hidden = ROWS * LENGTH * model.width * ITEMSIZE
    calls = Counter(all_gather=len(bytes_of) + 2, reduce_scatter=len(bytes_of))
    return calls, sum(2 * on_the_ring("all_gather", size) for size in bytes_of) + 2 * on_the_ring("all_gather", hidden)


def longer(model: Model) -> Iterator[str]:
    """How much longer a layer takes by the prices with each group of products on every rank, and what it sends then."""
    groups = model.whole_by_hand
    if not groups:
        return
    cut = planned(model, memory=1e15)
    for products in (*groups, tuple(chain(*groups))) if len(groups) > 1 else groups:
        paths = {
            operator.module: position
            for position, operator in enumerate(cut.graph.operators)
            if any(fnmatch(operator.module, pattern) for pattern in products)
        }
        here = {at: "as by hand" for at, one in enumerate(cut.graph.operators) if one.module in paths}
        fastest = next(profiles(Profile()))
        other = solve(cut.graph, RANKS, IMPLEMENTATIONS, fastest, here, TokensPerStep.given((ROWS, LENGTH)), {})
        layers = max(sum(fnmatch(path, pattern) for path in paths) for pattern in products)
        names = ", ".join(pattern.removeprefix("*.") for pattern in products)
        calls, megabytes = sent(other, [*model.layers.values()][-1])
        more = 1e3 * (other.cost - cut.cost) / layers
        yield f"| {model.name} | {names} | {more:.2f} | {_spelled(calls)} | {megabytes:,.0f} |"


def _spelled(calls: Counter[str]) -> str:
    names = {"all_reduce": "all-reduces", "all_gather": "gathers", "reduce_scatter": "reduce-scatters"}
    return ", ".join(f"{calls[kind]} {name}" for kind, name in names.items() if calls[kind]) or "nothing"


def main(page: Path = PAGE, only: list[str] | None = None) -> None:
    """Plan the models and write the page.

    Args:
        page: where to write it; ``/dev/stdout`` prints it.
        only: names of models, or parts of them; all by default.
    """
    lines = [INTRODUCTION]
    for title, options in TITLES.items():
        lines += [
            "",
            f"## {title}",
            "",
            "| model | layer | planned | MB | by hand | MB |",
            "| --- | --- | --- | ---: | --- | ---: |",
        ]
        for model in MODELS:
            if only is not None and not any(part in model.name for part in only):
                continue
            solution = planned(model, **options)
            for layer, number in model.layers.items():
                ours, hand = sent(solution, number), by_hand(model, layer, "sequence_parallel" in options)
                cells = (_spelled(ours[0]), f"{ours[1]:,.0f}", _spelled(hand[0]), f"{hand[1]:,.0f}")
                lines.append(f"| {model.name} | {layer} | {' | '.join(cells)} |")
                print(lines[-1], flush=True)
    lines += [
        "",
        DECIDES,
        "",
        "| model | on every rank | ms a layer longer | sent then | MB |",
        "| --- | --- | ---: | --- | ---: |",
    ]
    for model in MODELS:
        if only is None or any(part in model.name for part in only):
            lines += longer(model)
    text = "\n".join(lines) + "\n"
    page.write_text(text)


if __name__ == "__main__":
    auto_cli(main)
