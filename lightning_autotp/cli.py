"""The command ``lightning-autotp``.

Each of its parts imports what it needs when it runs, so that help and a mistyped option are answered at once.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Literal

from jsonargparse import auto_cli

from lightning_autotp.progress import phase
from lightning_autotp.solving.options import PlanOptions, documented_by


@documented_by(PlanOptions)
def plan(  # noqa: D417 (the other options are PlanOptions')
    model: str,
    tp: int = 2,
    tokens: int | None = None,
    keep_whole: Iterable[str] = (),
    cut: Mapping[str, int] | None = None,
    memory: float | Literal["device"] | None = "device",
    why: str | None = None,
    sequence_parallel: bool | Literal["auto"] = False,
    gpus: str = "H100",
    gpu_memory: float | None = None,
    optimizer: Literal["adamw", "sgd", "sgd-momentum"] = "adamw",
    precision: Literal["32-true", "bf16-mixed", "bf16-true"] = "bf16-mixed",
    lora: int = 0,
    quantize: Literal["nf4", "fp4", "int8"] | None = None,
    auto_class: str | None = None,
    example: Path | None = None,
    device: Literal["cpu", "cuda"] = "cpu",
    details: bool = False,
    json: Path | None = None,
    html: Path | None = None,
    trace: Path | None = None,
) -> None:
    """Print how a model would be split, and what that takes: no weights, no GPU and no process group.

    Lists and mappings are written as in YAML, such as '[lm_head, model.vision*]' and '{lm_head.weight: 0}'.

    Args:
        model: a Hugging Face Hub id, a directory with a ``config.json``, or such a file.
        tp: number of tensor-parallel ranks.
        tokens: tokens of one forward and backward pass, which the plan is to be the cheapest for; 16,384 by default.
            Of an example without sequences, its rows.
        why: name or pattern of parameters or modules of which to say, for each dim that is not cut, why not.
        gpus: which GPUs to estimate memory and time for, as of recommend; with ``memory`` left at ``device``, the plan
            is for as much as lets a step fit into one of them.
        gpu_memory: bytes of a GPU to compare with, where they are not those of ``gpus``.
        optimizer: whose states are counted.
        precision: as the Trainer has it.
        lora: rank of adapters on all linear layers; 0 trains everything.
        quantize: how bitsandbytes quantizes the linear layers that the adapters are on (QLoRA).
        auto_class: class of transformers that builds the model; the one that its configuration names by default.
        example: a batch as the training step passes it, as a .pt or .json file; a synthetic one for language models.
        device: where the model will run, for code that asks; no GPU is needed, but torch for CUDA.
        details: also say what changes in calls, and why each tensor that stays whole does.
        json: file to write the plan to, for AutoTPStrategy(plan=...).
        html: file to write a page to: the model, a block, memory, a step in time, other sizes.
        trace: file to write the estimated step to, operator by operator, for chrome://tracing or ui.perfetto.dev.
    """
    import json as format_of
    from dataclasses import replace

    from rich.console import Console

    from lightning_autotp.building.checkpoint_reading import CheckpointError
    from lightning_autotp.capture.capture import CaptureError
    from lightning_autotp.layouts.step_size import TokensPerStep
    from lightning_autotp.planning.asked import batch_of, model_of, weight_warnings
    from lightning_autotp.planning.machines import Machine
    from lightning_autotp.planning.overview import plan_for
    from lightning_autotp.planning.rehearsal import RehearsalError, check_adapters, with_adapters
    from lightning_autotp.planning.timeline import chrome_trace
    from lightning_autotp.proving.compare import VerificationError
    from lightning_autotp.solving.pins import meant
    from lightning_autotp.solving.pricing import NOMINAL_LENGTH
    from lightning_autotp.solving.solver import NothingToShard

    console = Console()
    started = time.perf_counter()
    _refuse_unwritable("plan", json, html, trace)
    try:
        check_adapters(lora, quantize)
        machine = Machine.of(gpus)
        if gpu_memory is not None:
            if not gpu_memory > machine.reserved:
                raise ValueError(f"gpu_memory={gpu_memory!r}: {machine.reserved:.4g} bytes of a GPU are no tensor's")
            machine = replace(machine, memory=gpu_memory)
        size = TokensPerStep.given(tokens).number
        skeleton = model_of(model, auto_class)
        batch = batch_of(example, skeleton, min(size, NOMINAL_LENGTH))
        if tokens is None and not batch.has_sequences:
            size = batch.rows
        if lora:
            skeleton = with_adapters(skeleton, precision, lora, quantize).get_base_model()
        options = PlanOptions(
            tokens_per_step=tokens,
            keep_whole=keep_whole,
            cut=cut,
            memory=memory,
            sequence_parallel=sequence_parallel,
            traced_with=batch.source,
            device=device,
        )
        result, seen = plan_for(
            skeleton, batch, tp, machine, options, tokens=size, precision=precision, optimizer=optimizer
        )
        asked = meant(why, [parameter.names for parameter in result.parameters], "why") if why is not None else ()
    except (
        CaptureError,
        CheckpointError,
        NothingToShard,
        VerificationError,
        ImportError,
        OSError,
        ValueError,
    ) as error:
        raise SystemExit(f"lightning-autotp plan: {error}") from error
    made = time.perf_counter()
    if isinstance(seen, RehearsalError):
        console.print(f"memory and time are not known: {seen}", markup=False, highlight=False)
    else:
        for line in seen.lines():
            console.print(line, markup=False, highlight=False)
        if trace is not None:
            trace.write_text(format_of.dumps(chrome_trace(seen.spans)))
        if html is not None:
            from lightning_autotp.planning.page import page
            from lightning_autotp.planning.recommend import recommend

            around = replace(machine, gpus=max(tp, min(2 * tp, machine.gpus_per_node)))
            with phase("comparing other sizes"):
                sizes = recommend(
                    skeleton, batch.row, around, tokens_per_step=size, optimizer=optimizer, precision=precision
                )
            html.write_text(page(seen, sizes), encoding="utf-8")
    console.print()
    console.print(result.summary, markup=False, highlight=False)
    whole = (f"every rank computes all of {warning}" for warning in result.warnings)
    for warning in (*weight_warnings(skeleton), *whole):
        console.print(f"warning: {warning}", markup=False, highlight=False)
    console.print(result.table(details=details))
    for parameter in result.parameters:
        if parameter.names[0] in asked:
            console.print(parameter.described(), markup=False, highlight=False, soft_wrap=True)
    console.print(f"plan {result.digest}, made and rehearsed in {made - started:.1f} s", highlight=False)
    if json is not None:
        json.write_text(result.to_json())


def recommended(
    model: str,
    gpus: str = "8xH100",
    tokens: int = 16_384,
    sequence_length: int | None = None,
    optimizer: Literal["adamw", "sgd", "sgd-momentum"] = "adamw",
    precision: Literal["32-true", "bf16-mixed", "bf16-true"] = "bf16-mixed",
    lora: int = 0,
    quantize: Literal["nf4", "fp4", "int8"] | None = None,
    memory: float | None = None,
    auto_class: str | None = None,
    example: Path | None = None,
) -> None:
    """Rank the ways to train a model on GPUs: what fits, how fast; no weights and no GPU needed.

    Args:
        model: a Hugging Face Hub id, a directory with a ``config.json``, or such a file.
        gpus: how many of which, such as 16xH100; or 4xmy_machine.yaml.
        tokens: of an optimizer step, of all copies and accumulated passes together; of an example without sequences the
            rows.
        sequence_length: tokens of a row, where it is no example's; 4,096 by default, or as many as the model has
            positions for.
        optimizer: whose states are counted.
        precision: as the Trainer has it.
        lora: rank of adapters on all linear layers; 0 trains everything.
        quantize: how bitsandbytes quantizes the linear layers that the adapters are on (QLoRA).
        memory: bytes of a GPU that a step may take, which the lines to paste plan for; what is free of it by default.
        auto_class: class of transformers that builds the model; the one that its configuration names by default.
        example: a batch as the training step passes it, as a .pt or .json file; a synthetic one for language models.
    """
    from rich.console import Console

    from lightning_autotp.building.checkpoint_reading import CheckpointError
    from lightning_autotp.capture.capture import CaptureError
    from lightning_autotp.planning.asked import batch_of, model_of, weight_warnings
    from lightning_autotp.planning.recommend import recommend as find
    from lightning_autotp.planning.rehearsal import RehearsalError
    from lightning_autotp.planning.report import legend, model_lines, python_lines, reasons, table, yaml_lines

    console = Console()
    started = time.perf_counter()
    try:
        skeleton = model_of(model, auto_class)
        row = None if example is None else batch_of(example, skeleton).row
        with phase("planning and rehearsing a training step for each size, without values"):
            found = find(
                skeleton,
                row,
                gpus=gpus,
                tokens_per_step=tokens,
                sequence_length=sequence_length,
                optimizer=optimizer,
                precision=precision,
                lora=lora,
                quantize=quantize,
                memory=memory,
            )
    except (CaptureError, CheckpointError, RehearsalError, ImportError, OSError, ValueError) as error:
        raise SystemExit(f"lightning-autotp recommend: {error}") from error
    console.print(table(found))
    console.print(legend(found), markup=False, highlight=False)
    of_checkpoint = (f"warning: {warning}" for warning in weight_warnings(skeleton))
    for line in (*reasons(found), *of_checkpoint):
        console.print(line, markup=False, highlight=False)
    if found.best is not None:
        of_model = [model_lines(found)] if found.lora else []
        for lines in (*of_model, python_lines(found, found.best), yaml_lines(found, found.best)):
            console.print(f"\n{lines}", markup=False, highlight=False, soft_wrap=True)
    console.print(f"estimated in {time.perf_counter() - started:.1f} s", highlight=False)


def measure_machine(file: Path, processes: int = 2, device: Literal["auto", "cpu", "cuda"] = "auto") -> None:
    """Time products, memory and collectives on this machine, and write them as a file for recommend --gpus.

    Args:
        file: the YAML file to write; ``recommend --gpus 4xFILE`` reads it.
        processes: how many take part: one for each GPU.
        device: what is measured; GPUs, where there are any.
    """
    from lightning_autotp.planning.measure import measure

    if file.suffix not in (".yaml", ".yml"):
        raise SystemExit(f"lightning-autotp measure-machine: {file} must end in .yaml")
    _refuse_unwritable("measure-machine", file)
    try:
        machine = measure(processes, device)
    except (RuntimeError, ValueError) as error:
        raise SystemExit(f"lightning-autotp measure-machine: {error}") from error
    machine.write(file)
    print(file.read_text(), end="")


def zoo() -> None:
    """Say how to try every architecture of transformers, which the project's repository can and the package cannot."""
    print(
        "The zoo tries every architecture of transformers against one process. It is a tool of the project's "
        "repository:\nclone that and run `make zoo ARGS='--only llama gpt2 --tp 2'`; docs/zoo.md has what was found."
    )


def export(
    checkpoint: Path,
    directory: Path,
    model: str | None = None,
    prefix: str | None = None,
    tokenizer: Path | None = None,
    max_shard_size: str = "5GB",
    dtype: str | None = None,
    weights_only: bool = True,
) -> None:
    """Make a Hugging Face directory of a Lightning checkpoint: one process, no GPU, one tensor in memory at a time.

    Args:
        checkpoint: the checkpoint's file or directory.
        directory: where to; it must be empty or not exist.
        model: a directory or Hub id with the model's configuration, for a checkpoint that does not say what it is of.
        prefix: which attribute of the LightningModule, or key in fabric.save, is the model, where there are several.
        tokenizer: a directory with the tokenizer's files, where they are not where the model was loaded from.
        max_shard_size: of a file.
        dtype: in which floating-point tensors are written, such as bfloat16; as they are by default.
        weights_only: false to run code that the checkpoint names; only for one that you trust.
    """
    import torch
    from rich.console import Console

    from lightning_autotp.building.checkpoint_reading import CheckpointError
    from lightning_autotp.export.from_checkpoint import export_checkpoint
    from lightning_autotp.layouts.units import in_units

    started = time.perf_counter()
    wanted = getattr(torch, dtype, None) if dtype is not None else None
    try:
        if dtype is not None and not (isinstance(wanted, torch.dtype) and wanted.is_floating_point):
            raise ValueError(f"--dtype {dtype} is no floating-point dtype of torch: use bfloat16, float16 or float32")
        exported = export_checkpoint(
            checkpoint,
            directory,
            model=model,
            prefix=prefix,
            tokenizer=tokenizer,
            max_shard_size=max_shard_size,
            dtype=wanted,
            weights_only=weights_only,
        )
    except (CheckpointError, OSError, ValueError) as error:
        raise SystemExit(f"lightning-autotp export: {error}") from error
    lines = [
        f"{directory}: {in_units(exported.nbytes)} in {len(exported.weights)} file(s),"
        f" {time.perf_counter() - started:.1f} s",
        "tokenizer: " + ", ".join(exported.tokenizer)
        if exported.tokenizer
        else "no tokenizer: the model was not loaded from a local directory that has one; name one with --tokenizer",
    ]
    Console().print("\n".join(lines), markup=False, highlight=False, soft_wrap=True)


def consolidate(checkpoint: Path, file: Path, weights_only: bool = True) -> None:
    """Make one file of a checkpoint directory, for ``load_from_checkpoint``; all of it is in memory meanwhile.

    Args:
        checkpoint: the directory that a run with save_distributed_checkpoint=True wrote.
        file: where to.
        weights_only: false to run code that the checkpoint names; only for one that you trust.
    """
    from lightning_autotp.building.checkpoint_reading import CheckpointError
    from lightning_autotp.checkpoints import files

    _refuse_unwritable("consolidate", file)
    try:
        files.consolidate(checkpoint, file, weights_only)
    except (CheckpointError, OSError) as error:
        raise SystemExit(f"lightning-autotp consolidate: {error}") from error


def check(path: Path, weights_only: bool = True) -> None:
    """Compare a checkpoint, or an exported directory, with the checksums that were written with it.

    Args:
        path: a checkpoint's file or directory, or a directory that was exported.
        weights_only: false to run code that a checkpoint names; only for one that you trust.
    """
    from rich.console import Console

    from lightning_autotp.building.checkpoint_reading import CheckpointError
    from lightning_autotp.checkpoints.checksums import CHECKSUMS, check_files
    from lightning_autotp.checkpoints.files import check_checkpoint

    try:
        if (path / CHECKSUMS).is_file():
            what = f"{check_files(path)} files"
        else:
            tensors = check_checkpoint(path, weights_only)
            what = f"{tensors} tensors" if tensors else "the file"
    except (CheckpointError, OSError) as error:
        raise SystemExit(f"lightning-autotp check: {error}") from error
    Console().print(f"{path}: as written ({what})", markup=False, highlight=False, soft_wrap=True)


def doctor(json: Path | None = None) -> None:
    """Say whether this machine can train: versions, GPUs and their links, processes that meet, memory, disks, limits.

    It takes a few seconds, and ends with exit code 1 if anything is an error.

    Args:
        json: file to write the same to, as a list.
    """
    import json as format_of
    from dataclasses import asdict

    from rich.console import Console

    from lightning_autotp.doctor import CHECKS, gather

    _refuse_unwritable("doctor", json)
    try:
        facts = gather()
    except ImportError as error:
        raise SystemExit(f"lightning-autotp doctor: {error}. Install this package again, with what it needs") from error
    findings = [check(facts) for check in CHECKS]
    for finding in findings:
        Console().print(str(finding), markup=False, highlight=False, soft_wrap=True)
    if json is not None:
        json.write_text(format_of.dumps([asdict(finding) for finding in findings], indent=2))
    if any(finding.level == "error" for finding in findings):
        raise SystemExit(1)


def _refuse_unwritable(command: str, *files: Path | None) -> None:
    """End a command before it works for long, where one of the files that it is to write cannot be."""
    for file in files:
        if file is not None and (file.is_dir() or not os.access(file if file.exists() else file.parent, os.W_OK)):
            why = "it is a directory" if file.is_dir() else f"{file.parent} is no directory that can be written"
            raise SystemExit(f"lightning-autotp {command}: {file} cannot be written: {why}")


def main() -> None:
    """Entry point."""
    commands: dict[str, Any] = {
        "plan": plan,
        "recommend": recommended,  # by another name than the package's function, whose module is looked up by it
        "measure-machine": measure_machine,
        "zoo": zoo,
        "export": export,
        "consolidate": consolidate,
        "check": check,
        "doctor": doctor,
    }
    auto_cli(commands, args=[_spelled_out(argument) for argument in sys.argv[1:]], prog="lightning-autotp")


def _spelled_out(argument: str) -> str:
    """An option's name with underscores, as the parser has it; a switch with the value that the parser wants."""
    if argument == "--details":
        return "--details=true"
    name, equals, value = argument.partition("=")
    return (name.replace("-", "_").replace("__", "--", 1) if name.startswith("--") else name) + equals + value


if __name__ == "__main__":
    main()
