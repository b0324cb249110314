"""A recommendation for people: the ranking as a table, the reason, and the lines to paste."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from lightning_autotp.layouts.units import GIB, in_units
from lightning_autotp.planning.estimate import Memory
from lightning_autotp.planning.recommend import Choice, Recommendation
from lightning_autotp.planning.rehearsal import bitsandbytes_options, dtype_of

if TYPE_CHECKING:
    from rich.table import Table

SHOWN = 12
_SHORT = {
    "products": "prod",
    "others": "oth",
    "tensor_parallel": "tp",
    "copies": "fsdp",
    "network": "net",
    "host": "host",
    "update": "step",
}
"""What a step takes the longest for, as the table has it."""
_REMEDIES = {
    "parameters": "more GPUs (copies and tensor-parallel ranks both divide the parameters), or precision bf16-true",
    "gradients": "more GPUs, or LoRA",
    "states": "more GPUs, LoRA, or an optimizer with fewer states (sgd)",
    "activations": "checkpointing, sequence parallelism, or shorter rows",
    "temporary": "a larger tensor-parallel size, which divides the logits and the optimizer's step",
    "gathered": "a larger tensor-parallel size, which divides what FSDP2 gathers",
}
_OF_QUANTIZED = "more GPUs of a machine: tensor-parallel ranks divide a quantized base, and copies do not"
KINDS = {
    "products": "matrix products",
    "others": "operators that move memory",
    "tensor_parallel": "communication between tensor-parallel ranks",
    "copies": "FSDP2's communication in a node",
    "network": "FSDP2's communication between nodes",
    "host": "copies to host memory and from there",
    "update": "the optimizer's step",
}


def table(found: Recommendation) -> Table:
    """The ranking: GiB of a GPU by kind, time of an optimizer step by kind. Fits 80 columns."""
    from rich.table import Table

    title = (
        f"{found.model}{trained(found.lora, found.quantize)} on {found.machine.gpus} x {found.machine.name},"
        f" rows{_of_tokens(found)}, {found.precision}"
    )
    made = Table(title=title, title_justify="left", box=None, padding=(0, 1, 0, 0))
    made.add_column("TPxcopies", no_wrap=True)
    unit, seconds_of_it = _time_unit(found)
    for name in ("rows", "par", "grad", "opt", "act", "tmp", "blk", "GiB", "prod", "oth", "comm", "tok/s", "MFU"):
        made.add_column(name, justify="right", no_wrap=True)
    made.add_column("limit", no_wrap=True)
    for choice in found.choices[:SHOWN]:
        kept, time = choice.memory, choice.time
        sizes = (kept.parameters, kept.gradients, kept.states, kept.activations, kept.temporary, kept.gathered)
        sent = time.tensor_parallel + time.copies + time.network + time.host
        seconds = (time.products, time.others + time.update, sent)
        made.add_row(
            in_short(choice),
            f"{choice.rows}x{choice.passes}",
            *(_digits(size / GIB) for size in (*sizes, kept.total)),
            *(_digits(each / seconds_of_it) if unit == "s" else f"{1e3 * each:.0f}" for each in seconds),
            _counted(choice.tokens_per_second) if choice.fits else "-",
            f"{choice.mfu:.0%}" if choice.fits else "-",
            _SHORT[time.largest] if choice.fits else "mem",
        )
    return made


def legend(found: Recommendation) -> str:
    """What the table's columns are."""
    unit, _ = _time_unit(found)
    return (
        "GiB of a GPU when the most is there: parameters, gradients, optimizer states, activations, what the loss,"
        " operators and the optimizer's step need for a moment (tmp), what FSDP2 gathers (blk), all of it; beside it"
        f" {in_units(found.machine.reserved)} are reserved. {unit} of an optimizer step: products, other operators"
        " and the optimizer (oth), communication that nothing hides. rows: of a pass, times passes"
    )


def _of_tokens(found: Recommendation) -> str:
    """How long rows are; nothing, where they have no tokens."""
    return f" of {found.length} tokens" if found.length > 1 else ""


def _time_unit(found: Recommendation) -> tuple[str, float]:
    """Seconds where steps are so long that milliseconds would take five digits."""
    longest = max((choice.time.total for choice in found.choices[:SHOWN]), default=0.0)
    return ("s", 1.0) if longest >= 10 else ("ms", 1e-3)


def _counted(number: float) -> str:
    """A number of tokens, five digits at most."""
    return f"{number:.0f}" if number < 99_999.5 else f"{number / 1000:.0f}k"


def in_short(choice: Choice) -> str:
    """Its sizes and marks, as the table has them."""
    return (
        f"{choice.tensor_parallel_size}x"
        + f"{choice.replicas}x" * (choice.replicas > 1)
        + f"{choice.shards}"
        + " sp" * choice.sequence_parallel
        + {None: "", "blocks": " ck", "offload": " ao"}[choice.activation_checkpointing]
        + " po" * choice.cpu_offload
    )


def reasons(found: Recommendation) -> Iterator[str]:
    """What to do and why, one sentence or two a line."""
    best = found.best
    if best is None:
        least = found.choices[0] if found.choices else None
        if least is None:
            yield "nothing can be said of any size"
        else:
            most = least.memory.largest
            remedy = _OF_QUANTIZED if found.quantize and most == "parameters" else _REMEDIES[most]
            why = f"most of it {most}: {remedy}"
            if least.memory.total <= found.room:
                why = "but more host memory than a node has: more nodes, LoRA, or an optimizer with fewer states (sgd)"
            yield (
                f"nothing fits{_tried(found)}: {named(least)} needs the least, {in_units(least.memory.total)} of"
                f" {in_units(found.room)} of a GPU, {why}"
            )
            yield from _of_host(found, least)
    else:
        yield (
            f"recommended: {named(best)}, {best.tokens_per_second:.0f} tokens/s,"
            f" {in_units(best.memory.total)} of {in_units(found.room)} of a GPU"
        )
        if best.uses_host:
            least = min(
                (choice for choice in found.choices if not choice.uses_host), key=lambda each: each.memory.total
            )
            yield (
                f"nothing fits without host memory: {named(least)} needs {in_units(least.memory.total)} of a GPU,"
                f" most of it {least.memory.largest}"
            )
            yield from _of_host(found, best)
        yield from _compared(found, best)
        yield (
            f"limited by {KINDS[best.time.largest]}; the most memory is there in the {best.memory.moment},"
            f" most of it {best.memory.largest}"
        )
        yield _of_memory(found, best.memory)
        yield _of_time(found, best)
        yield from _other_than_asked(found, best)
    yield from (f"left out: {said}" for said in found.left_out)


def _of_memory(found: Recommendation, of: Memory) -> str:
    """All kinds of memory of the recommended way."""
    kinds = {
        "parameters": of.parameters,
        "gradients": of.gradients,
        "optimizer states": of.states,
        "activations": of.activations,
        of.temporary_of: of.temporary,
        "gathered by FSDP2": of.gathered,
        "reserved (contexts, buffers, workspaces)": found.machine.reserved,
    }
    sizes = ", ".join(f"{what} {size / GIB:.2f}" for what, size in kinds.items())
    return f"memory in GiB: {sizes}, of {found.machine.memory / GIB:.1f}"


def _of_time(found: Recommendation, best: Choice) -> str:
    """All kinds of time of the recommended way; of communication that which nothing hides, by purpose and link."""
    of, nodes = best.time, "between nodes"
    inside = best.tensor_parallel_size <= found.machine.gpus_per_node
    kinds = {
        "matrix products": of.products,
        "other operators": of.others,
        "the optimizer's step": of.update,
        f"tensor parallelism ({'in a node' if inside else nodes})": of.tensor_parallel,
        "FSDP2 (in a node)": of.copies,
        f"FSDP2 ({nodes})": of.network,
        "host memory (its link)": of.host,
    }
    unit, seconds_of_it = _time_unit(found)
    shown = {what: _digits(seconds / seconds_of_it) for what, seconds in kinds.items()}
    seen = ", ".join(f"{what} {digits}" for what, digits in shown.items() if digits != _digits(0))
    return f"time in {unit}: {seen}, of {_digits(of.total / seconds_of_it)}"


def _other_than_asked(found: Recommendation, best: Choice) -> Iterator[str]:
    """What a step, or the GPUs, are otherwise than was asked for."""
    if best.tokens != found.tokens:
        yield (
            f"a step has {best.tokens:,} tokens instead of {found.tokens:,}: rows of {found.length:,}, as many of them"
            " on each copy"
        )
    if 1 < best.gpus < found.machine.gpus:
        yield f"{best.gpus} of {found.machine.gpus} GPUs are used: with more, no step of so many tokens is faster"


def _tried(found: Recommendation) -> str:
    """Beside sizes."""
    tried = {
        "checkpointed blocks": any(choice.activation_checkpointing == "blocks" for choice in found.choices),
        "activations in host memory": any(choice.activation_checkpointing == "offload" for choice in found.choices),
        "parameters in host memory": any(choice.cpu_offload for choice in found.choices),
    }
    said = [what for what, is_so in tried.items() if is_so]
    return f", not even with {', '.join(said)}" * bool(said)


def _of_host(found: Recommendation, choice: Choice) -> Iterator[str]:
    """The memory of a node, where a way to train uses it."""
    if choice.uses_host:
        there, needed = found.machine.host_memory, in_units(choice.host_memory)
        if there is None:
            yield f"host memory: {needed} of a node; how much it has is not known"
        else:
            yield f"host memory: {needed} of {in_units(there)} of a node"


def _compared(found: Recommendation, best: Choice) -> Iterator[str]:
    alone = found.on_one
    if alone is not None and alone is not best:
        faster = _digits(best.tokens_per_second / alone.tokens_per_second)
        yield f"one GPU is enough{_with_host(alone)}: {best.gpus} are {faster} times as fast"
    elif alone is best:
        yield f"one GPU is enough{_with_host(alone)}: more would not be faster"
    divided = [each for each in found.choices if (each.tensor_parallel_size > 1) != (best.tensor_parallel_size > 1)]
    other = next((each for each in divided if each.fits), None)
    if best.tensor_parallel_size == 1 and best.gpus > 1 and other is not None:
        yield f"FSDP without tensor parallelism is {_faster(best, other)}"
    if best.tensor_parallel_size > 1:
        if other is not None:
            yield f"tensor parallelism is {_faster(best, other)}"
        elif divided:
            least = min(divided, key=lambda each: each.memory.total)
            yield (
                f"without tensor parallelism it does not fit: {named(least)} needs {in_units(least.memory.total)}"
                f" of {in_units(found.room)}"
            )


def _with_host(choice: Choice) -> str:
    """What one GPU keeps in host memory, which makes it slow."""
    return f" with {_ways(choice)}" if choice.uses_host else ""


def _faster(best: Choice, other: Choice) -> str:
    """How the best way compares with another one, which may be a little faster if the best is simpler."""
    share = best.tokens_per_second / other.tokens_per_second - 1
    if share < 0.005:
        return f"about as fast as {named(other)}, and simpler"
    return f"faster: by {share:.0%} than {named(other)}"


def trained(lora: int, quantize: str | None) -> str:
    """What is trained, after the model's name; nothing for all of it."""
    return (f", LoRA {lora}" if lora else "") + (f" on {quantize}" if quantize else "")


def model_lines(found: Recommendation) -> str:
    """The model with its adapters, as it was rehearsed."""
    auto = "AutoModelForCausalLM" if found.model.endswith("ForCausalLM") else found.model
    given = [f'"{found.source or "MODEL"}"', f"dtype={dtype_of(found.precision)}"]
    if found.quantize is not None:
        options = ", ".join(_keywords(bitsandbytes_options(found.quantize, found.precision)))
        given.append(f"quantization_config=BitsAndBytesConfig(\n{20 * ' '}{options}\n{16 * ' '})")
    return "\n".join(
        [
            "import lightning as L",
            "import torch",
            "from peft import LoraConfig, get_peft_model",
            f"from transformers import {', '.join([auto, *(['BitsAndBytesConfig'] if found.quantize else [])])}",
            "",
            "",
            "class Tuning(L.LightningModule):",
            "    def configure_model(self):",
            '        if not hasattr(self, "model"):',
            f"            base = {auto}.from_pretrained(",
            *(f"                {each}," for each in given),
            "            )",
            f'            lora = LoraConfig(r={found.lora}, target_modules="all-linear")',
            "            self.model = get_peft_model(base.train(), lora)",
        ]
    )


def python_lines(found: Recommendation, best: Choice) -> str:
    """The lines of a program that train so."""
    lines, strategy = [] if found.lora else ["import lightning as L"], ""
    if _needs_strategy(best):
        lines.append("from lightning_autotp import AutoTPStrategy")
        options = "".join(f"        {each},\n" for each in _keywords(strategy_options(found, best)))
        strategy = f"    strategy=AutoTPStrategy(\n{options}    ),\n"
    lines += [
        "",
        "trainer = L.Trainer(",
        f"    devices={best.gpus // best.nodes}, num_nodes={best.nodes},",
        f'    precision="{found.precision}", accumulate_grad_batches={best.passes},',
        f"{strategy})",
        f"# batches of {best.rows} rows{_of_tokens(found)} for each copy",
    ]
    return "\n".join(lines)


def yaml_lines(found: Recommendation, best: Choice) -> str:
    """The same for a LightningCLI."""
    import yaml

    options = {
        name: list(value) if isinstance(value, tuple) else value
        for name, value in strategy_options(found, best).items()
    }
    trainer = {
        "devices": best.gpus // best.nodes,
        "num_nodes": best.nodes,
        "precision": found.precision,
        "accumulate_grad_batches": best.passes,
        **(
            {"strategy": {"class_path": "lightning_autotp.AutoTPStrategy", "init_args": options}}
            if _needs_strategy(best)
            else {}
        ),
    }
    return str(yaml.safe_dump({"trainer": trainer}, sort_keys=False))


def strategy_options(found: Recommendation, choice: Choice) -> dict[str, Any]:
    """What ``AutoTPStrategy`` is given, to train as it was rated."""
    copies = choice.shards if choice.replicas == 1 else (choice.replicas, choice.shards)
    more: dict[str, Any] = {
        "memory": found.limit,
        "sequence_parallel": choice.sequence_parallel,
        "activation_checkpointing": choice.activation_checkpointing,
        "cpu_offload": choice.cpu_offload,
    }
    return {
        "tensor_parallel_size": choice.tensor_parallel_size,
        "data_parallel_size": copies,
        "tokens_per_step": (choice.rows, found.length),
        **{name: value for name, value in more.items() if value},
    }


def _needs_strategy(choice: Choice) -> bool:
    return choice.gpus > 1 or choice.uses_host or choice.activation_checkpointing is not None


def _keywords(options: Mapping[str, Any]) -> list[str]:
    """Arguments as they are written in a program."""
    return [f'{name}="{value}"' if isinstance(value, str) else f"{name}={value}" for name, value in options.items()]


def named(choice: Choice) -> str:
    """A way to train in words."""
    said = [f"{choice.tensor_parallel_size} tensor-parallel ranks" if choice.tensor_parallel_size > 1 else ""]
    replicas = f"{choice.replicas} replicas of " if choice.replicas > 1 else ""
    said += [f"{replicas}{choice.shards} copies (FSDP2)" if choice.data_parallel_size > 1 else ""]
    said += ["sequence parallelism" if choice.sequence_parallel else "", _ways(choice)]
    return ", ".join(part for part in said if part) or "one GPU"


def _ways(choice: Choice) -> str:
    """What is not kept in a GPU's memory, in words."""
    kept = {None: "", "blocks": "checkpointed blocks", "offload": "activations in host memory"}
    said = kept[choice.activation_checkpointing], "parameters in host memory" if choice.cpu_offload else ""
    return ", ".join(part for part in said if part)


def _digits(number: float) -> str:
    """Two or three digits."""
    return f"{number:.1f}" if number < 9.95 else f"{number:.0f}"
