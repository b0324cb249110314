"""One rank of eight on one GPU: step time, memory and share of the GPU's rate, beside layers written by hand.

    python benchmarks/gpu.py --page docs/gpu.md                         # on a machine with a GPU, in some minutes
    python benchmarks/gpu.py --page /tmp/gpu.md --device cpu --tiny     # whether it runs

The rank is one of TP=8 in torch's "fake" process group, whose collectives send nothing and take no time: what is
measured is what the rank computes, and the weights are drawn, so losses mean nothing. Where there are two GPUs,
``benchmarks/compare.py`` runs over NCCL besides. What fails is written on the page, and the rest goes on.
"""

from __future__ import annotations

import gc
import statistics
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from jsonargparse import ArgumentParser
from peers.megatron import MegatronLlama
from peers.meter import Meter
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.initialization import no_init_weights

from lightning_autotp import make_plan
from lightning_autotp.applying.replace import apply_plan
from lightning_autotp.gradients.sums import synchronize_gradients
from lightning_autotp.layouts.ownership import Ownership
from lightning_autotp.layouts.plan import Plan
from lightning_autotp.parallel import TPGroup, VocabParallelLogits
from lightning_autotp.parallel.head import VocabParallelHead
from lightning_autotp.planning.estimate import memory, step_time
from lightning_autotp.planning.machines import Machine, known_machines
from lightning_autotp.planning.rehearsal import local_model, rehearse
from lightning_autotp.pretrained.meta_model import meta_model

PAGE = Path(__file__).parent.parent / "docs" / "gpu.md"
RANKS, WARM_UP = 8, 3


@dataclass(frozen=True)
class Setting:
    """What is measured where.

    Attributes:
        device: the type of device.
        tiny: small sizes, and compiled without code being generated.
        rounds: steps that are timed.
    """

    device: str
    tiny: bool
    rounds: int

    @property
    def on_gpu(self) -> bool:
        """Whether the device is a GPU."""
        return self.device == "cuda"

    @property
    def backend(self) -> str:
        """What compiles."""
        return "aot_eager" if self.tiny else "inductor"


@dataclass(frozen=True)
class Shape:
    """A Llama and a batch.

    Attributes:
        sizes: its config.
        rows: sequences.
        length: tokens in each.
    """

    sizes: Mapping[str, Any]
    rows: int = 1
    length: int = 4096

    def meta(self) -> Any:
        """The model, whose parameters take no memory."""
        with meta_model(), no_init_weights():  # a process draws an 8B model's weights for minutes
            config = AutoConfig.for_model("llama", attn_implementation="sdpa", use_cache=False, **self.sizes)
            return AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).train()

    def tokens(self, device: str) -> Tensor:
        """The batch, ``[rows, length]``."""
        generator = torch.Generator().manual_seed(1)
        return torch.randint(3, self.sizes["vocab_size"], (self.rows, self.length), generator=generator).to(device)


SHAPES = {
    "Llama-3.1-8B": Shape(
        {
            "hidden_size": 4096,
            "intermediate_size": 14336,
            "num_hidden_layers": 32,
            "num_attention_heads": 32,
            "num_key_value_heads": 8,
            "vocab_size": 128_256,
            "max_position_embeddings": 8192,
        }
    ),
    "8 layers of Llama-3.1-70B": Shape(
        {
            "hidden_size": 8192,
            "intermediate_size": 28672,
            "num_hidden_layers": 8,
            "num_attention_heads": 64,
            "num_key_value_heads": 8,
            "vocab_size": 128_256,
            "max_position_embeddings": 8192,
        }
    ),
}
TINY = {
    "a tiny Llama": Shape(
        {
            "hidden_size": 128,
            "intermediate_size": 256,
            "num_hidden_layers": 2,
            "num_attention_heads": 16,
            "num_key_value_heads": 8,
            "vocab_size": 512,
        },
        rows=2,
        length=32,
    )
}


@dataclass
class Figures:
    """What was measured of one step.

    Attributes:
        seconds: median of the steps.
        memory: most bytes that were held: on a GPU all that was allocated, else what a step allocates besides weights.
        flops: floating-point operations of the products in it.
    """

    seconds: float
    memory: int
    flops: float = 0.0


def measured(step: Callable[[], Any], setting: Setting) -> Figures:
    """Time a step, forward and backward, and see how much memory it takes."""
    for _ in range(WARM_UP):
        step()
    if setting.on_gpu:
        torch.cuda.reset_peak_memory_stats()
        step()
        held = torch.cuda.max_memory_allocated()
    else:
        meter = Meter(1)
        with meter:
            step()
        held = meter.peak
    seconds = []
    for _ in range(setting.rounds):
        _wait(setting)
        began = time.perf_counter()
        step()
        _wait(setting)
        seconds.append(time.perf_counter() - began)
    return Figures(statistics.median(seconds), held)


def _wait(setting: Setting) -> None:
    if setting.on_gpu:
        torch.cuda.synchronize()


def _forget() -> None:
    torch.compiler.reset()
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def product_rate(setting: Setting, dtype: torch.dtype = torch.bfloat16) -> float:
    """Operations a second of one large product: the most that this device does here."""
    size = 256 if setting.tiny else 8192
    left, right = (torch.randn(size, size, device=setting.device, dtype=dtype) for _ in range(2))
    return 2 * size**3 / measured(lambda: left @ right, setting).seconds


def copy_rate(setting: Setting) -> float:
    """Bytes a second that a copy reads and writes."""
    source = torch.randn(2**20 if setting.tiny else 2**30, device=setting.device, dtype=torch.bfloat16)
    return 2 * source.nbytes / measured(source.clone, setting).seconds


# --- a model's step ---


def filled(model: nn.Module, device: str) -> nn.Module:
    """The model with drawn weights in the places of those on meta; buffers keep their values."""
    buffers = {name: buffer.to(device, copy=True) for name, buffer in model.named_buffers()}
    model.to_empty(device=device)
    with torch.no_grad():
        for name, buffer in model.named_buffers():
            buffer.copy_(buffers[name])
        for parameter in model.parameters():
            parameter.normal_(std=0.02)
    return model


def planned(shape: Shape, sequence_parallel: bool) -> tuple[nn.Module, Plan]:
    """The model on meta, and its plan."""
    model, tokens = shape.meta(), shape.tokens("cpu")
    plan, _ = make_plan(
        model,
        RANKS,
        example_inputs={"input_ids": tokens, "labels": tokens, "use_cache": False},
        tokens_per_step=(shape.rows, shape.length),
        sequence_parallel=sequence_parallel,
    )
    return model, plan


def autotp(shape: Shape, setting: Setting, sequence_parallel: bool = False) -> tuple[nn.Module, Callable[[], Tensor]]:
    """This project: the plan, made local as one rank; the proof, which compares all ranks, is left out."""
    (model, plan), tokens = planned(shape, sequence_parallel), shape.tokens(setting.device)
    group: Any = dist.group.WORLD
    apply_plan(model, plan, TPGroup.of(group))
    filled(model, setting.device)
    synchronize_gradients(model)
    return model, lambda: model(input_ids=tokens, labels=tokens, use_cache=False).loss


def by_hand(shape: Shape, setting: Setting) -> tuple[nn.Module, Callable[[], Tensor]]:
    """Megatron's pattern, written for this model."""
    tokens = shape.tokens(setting.device)
    model = filled(MegatronLlama(shape.meta()), setting.device)
    return model, lambda: model(tokens)


Make = Callable[[Shape, Setting], tuple[nn.Module, Callable[[], Tensor]]]
SYSTEMS: dict[str, Make] = {
    "lightning_autotp": autotp,
    "lightning_autotp, sequence parallel": lambda shape, setting: autotp(shape, setting, sequence_parallel=True),
    "Megatron's pattern by hand": by_hand,
}


def step_of(make: Make, shape: Shape, setting: Setting, compiled: bool) -> Figures:
    """One system's step."""
    model, loss = make(shape, setting)

    def step() -> None:
        for parameter in model.parameters():
            parameter.grad = None
        loss().backward()

    if compiled:
        for layer in getattr(model, "model", getattr(model, "body", None)).layers:  # type: ignore[union-attr]
            layer.compile(backend=setting.backend)
    found = measured(step, setting)
    if not compiled:
        with FlopCounterMode(display=False) as counter:
            step()
        found.flops = counter.get_total_flops()
    return found


def model_lines(name: str, shape: Shape, setting: Setting, rate: float) -> list[str]:
    """The table of one model."""
    lines = [
        f"## {name}, one rank of TP={RANKS}",
        "",
        f"{shape.rows} x {shape.length:,} tokens in bfloat16, {shape.sizes['num_hidden_layers']} layers, forward and "
        "backward, without an optimizer.",
        "",
        "| system | | step | peak | of the product's rate |",
        "| --- | --- | ---: | ---: | ---: |",
    ]
    eager: dict[bool, Figures] = {}
    for system, make in SYSTEMS.items():
        flops = 0.0
        for compiled in (False, True):
            how = f"compiled ({setting.backend})" if compiled else "eager"
            try:
                found = step_of(make, shape, setting, compiled)
            except Exception:
                lines.append(_failed(system, how))
            else:
                flops = found.flops or flops  # compiled code does the same products
                if not compiled and make is not by_hand:
                    eager["parallel" in system] = found
                share = f"{flops / found.seconds / rate:.1%}" if flops else "not counted"
                lines.append(
                    f"| {system} | {how} | {1e3 * found.seconds:,.1f} ms | {found.memory / 2**30:,.3f} GiB | {share} |"
                )
            print(lines[-1], flush=True)
            _forget()
    return lines + predicted_lines(shape, machine_of(setting), eager)


def predicted_lines(shape: Shape, machine: Machine, measured_steps: Mapping[bool, Figures]) -> list[str]:
    """What the planner says of the same steps, beside what was measured: by whether tokens are sharded."""
    lines = [
        "",
        f"What `lightning-autotp recommend` computes from the file of {machine.name} for the same eager steps, without "
        "collectives:",
        "",
        "| | products | other operators | step | measured | peak | measured |",
        "| --- | ---: | ---: | ---: | ---: | ---: | ---: |",
    ]
    for sequence_parallel, found in measured_steps.items():
        model, plan = planned(shape, sequence_parallel)
        batch = {name: torch.zeros(shape.rows, shape.length, dtype=torch.long) for name in ("input_ids", "labels")}
        local = local_model(model, plan)
        rehearsal = rehearse(local, {**batch, "use_cache": False}, precision="bf16-true", optimizer="none")
        time_, bytes_ = step_time(rehearsal, machine, RANKS), memory(rehearsal).total
        computed = time_.products + time_.others
        lines.append(
            f"| {'sequence parallel' if sequence_parallel else 'plain'} | {1e3 * time_.products:,.1f} ms"
            f" | {1e3 * time_.others:,.1f} ms | {1e3 * computed:,.1f} ms"
            f" | {1e3 * found.seconds:,.1f} ms ({found.seconds / computed - 1:+.0%}) | {bytes_ / 2**30:,.3f} GiB"
            f" | {found.memory / 2**30:,.3f} GiB ({found.memory / bytes_ - 1:+.1%}) |"
        )
        print(lines[-1], flush=True)
    return lines


def machine_of(setting: Setting) -> Machine:
    """The machine of the package's files that this GPU is one of; an H100 where it is none."""
    name = torch.cuda.get_device_name().upper() if setting.on_gpu else ""
    return Machine.of(next((known for known in known_machines() if known in name), "H100"))


def _failed(system: str, how: str) -> str:
    print(traceback.format_exc(), file=sys.stderr)
    last = traceback.format_exc().strip().splitlines()[-1].replace("|", "/")
    return f"| {system} | {how} | failed: {last[:200]} | | |"


# --- the head and the loss ---


def loss_lines(setting: Setting) -> list[str]:
    """The fused head and loss beside others, with the whole vocabulary on one rank."""
    tokens, words, hidden = (64, 512, 32) if setting.tiny else (8192, 128_256, 2048)
    device, dtype = setting.device, torch.bfloat16
    x = torch.randn(tokens, hidden, device=device, dtype=dtype, requires_grad=True)
    target = torch.randint(0, words, (tokens,), device=device)
    ownership, group = Ownership.even(words, 1), TPGroup.of(dist.new_group([0]))
    head = VocabParallelHead(hidden, words, ownership, group, bias=False, device=device, dtype=dtype)
    with torch.no_grad():
        head.weight.normal_(std=0.02)

    def ours() -> Tensor:
        logits = head(x)
        assert isinstance(logits, VocabParallelLogits)
        return F.cross_entropy(logits.float(), target)

    def plain() -> Tensor:
        return F.cross_entropy(F.linear(x, head.weight).float(), target)

    def fused_by_torch() -> Tensor:
        return F.linear_cross_entropy(x, head.weight, target)

    lines = [
        "## The head and the loss",
        "",
        f"{tokens:,} tokens x {words:,} words, hidden {hidden:,}, bfloat16, forward and backward, on one rank.",
        "",
        "| | step | peak |",
        "| --- | ---: | ---: |",
    ]
    for name, loss in {
        "lightning_autotp": ours,
        "linear, then cross_entropy in float32": plain,
        "torch's linear_cross_entropy": fused_by_torch,
    }.items():

        def step(loss: Callable[[], Tensor] = loss) -> None:
            x.grad = head.weight.grad = None
            loss().backward()

        try:
            found = measured(step, setting)
        except Exception:
            lines.append(_failed(name, "").replace("| |", "|"))
        else:
            lines.append(f"| {name} | {1e3 * found.seconds:,.1f} ms | {found.memory / 2**30:,.3f} GiB |")
        print(lines[-1], flush=True)
        _forget()
    return lines


# --- the page ---


def compared(page: Path) -> list[str]:
    """``compare.py`` over NCCL on two GPUs: the lines of its page, with its headings one level down."""
    made = page.with_name(f"{page.stem}-compare.md")
    script = Path(__file__).parent / "compare.py"
    command = [sys.executable, str(script), "--ranks", "2", "--rounds", "10", "--case", "[Llama]", "--page", str(made)]
    subprocess.run(command, check=True)
    return [f"#{line}" if line.startswith("#") else line for line in made.read_text().splitlines()]


def main(page: Path = PAGE, device: str = "cuda", tiny: bool = False, rounds: int = 10) -> None:
    """Measure and write the page, again after each part.

    Args:
        page: where to write it.
        device: ``cuda``, or ``cpu`` to see whether it runs.
        tiny: small sizes.
        rounds: steps that are timed.

    Raises:
        RuntimeError: if there is no such device.
    """
    setting = Setting(device, tiny, rounds)
    if setting.on_gpu and not torch.cuda.is_available():
        raise RuntimeError("there is no GPU here: give --device cpu --tiny to see whether this script runs")
    torch.manual_seed(0)
    dist.init_process_group(backend="fake", rank=0, world_size=RANKS)
    try:
        rate, in_fp32, copied = product_rate(setting), product_rate(setting, torch.float32), copy_rate(setting)
        where = torch.cuda.get_device_name() if setting.on_gpu else f"the processor, {torch.get_num_threads()} threads"
        lines = [
            "# One rank on a GPU" if setting.on_gpu else "# One rank on the processor",
            "",
            f"Measured on {where} with torch {torch.__version__}: medians of {rounds} steps. The process group is"
            ' torch\'s "fake" one: collectives take no time, and the weights are drawn. *Peak* is '
            + ("all that was allocated." if setting.on_gpu else "what a step allocates, without weights.")
            + f" One large product in bfloat16 does {rate / 1e12:,.2f} TFLOP/s here; shares are of that rate, with the"
            f" products that were counted in a step. One in float32 does {in_fp32 / 1e12:,.2f} TFLOP/s, and a copy"
            f" moves {copied / 1e12:,.2f} TB/s. Written by `python benchmarks/gpu.py`.",
        ]
        page.write_text("\n".join(lines) + "\n")
        for name, shape in (TINY if tiny else SHAPES).items():
            lines += ["", *model_lines(name, shape, setting, rate)]
            page.write_text("\n".join(lines) + "\n")
        lines += ["", *loss_lines(setting)]
        page.write_text("\n".join(lines) + "\n")
    finally:
        dist.destroy_process_group()
    if setting.on_gpu and torch.cuda.device_count() >= 2:
        lines += ["", *compared(page)]
        page.write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    parser = ArgumentParser()
    parser.add_function_arguments(main, skip={"tiny"})
    parser.add_argument("--tiny", action="store_true", help="small sizes, and compiled without generating code")
    main(**vars(parser.parse_args()))
