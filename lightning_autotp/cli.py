"""The command ``lightning-autotp``."""

from __future__ import annotations

import sys
import time
from importlib.metadata import version
from pathlib import Path
from typing import Any, Literal

import torch
from jsonargparse import auto_cli
from rich.console import Console
from transformers import AutoConfig, AutoModelForCausalLM

from lightning_autotp.capture import CaptureError
from lightning_autotp.checkpoint_files import consolidate as consolidate_checkpoint
from lightning_autotp.export_checkpoint import export_checkpoint
from lightning_autotp.load import CheckpointError
from lightning_autotp.pipeline import make_plan
from lightning_autotp.solver import NothingToShard
from lightning_autotp.verify import VerificationError
from lightning_autotp.zoo.models import GROUPS, architectures
from lightning_autotp.zoo.report import summary, to_json, to_markdown, totals_table
from lightning_autotp.zoo.run import run


def plan(model: str, tp: int = 2, json: Path | None = None) -> None:
    """Print how a causal language model would be split: no weights, no GPU and no process group needed.

    Args:
        model: a Hugging Face Hub id, or a directory with a ``config.json``.
        tp: number of tensor-parallel ranks.
        json: file to write the plan to.
    """
    console = Console()
    started = time.perf_counter()
    try:
        config = AutoConfig.from_pretrained(model)
        with torch.device("meta"):
            skeleton = AutoModelForCausalLM.from_config(config)
        result, _ = make_plan(skeleton, tp)
    except (CaptureError, NothingToShard, VerificationError, OSError, ValueError) as error:
        raise SystemExit(f"lightning-autotp plan: {error}") from error
    console.print(result.table())
    console.print(f"plan {result.digest}, made in {time.perf_counter() - started:.1f} s")
    if json is not None:
        json.write_text(result.to_json())


def zoo(
    group: Literal["causal", "seq2seq", "masked", "image", "all"] = "all",
    tp: int = 2,
    only: list[str] | None = None,
    json: Path | None = None,
    page: Path | None = None,
    plan_only: bool = False,
    limit: float = 120.0,
) -> None:
    """Try every architecture of transformers: a tiny model, parallelized, against one process.

    Compares a training batch's loss and every full gradient. A run over whole groups writes ``docs/zoo.md``.

    Args:
        group: which of transformers' mappings.
        tp: number of tensor-parallel ranks (processes on this machine).
        only: these architectures (``model_type``) only; the page is written only where ``page`` says so.
        json: file to write everything found to.
        page: the page to write, instead of ``docs/zoo.md``.
        plan_only: only plan, in one process, and run nothing; writes no page of its own accord either.
        limit: seconds that one architecture may take.
    """
    console = Console()
    groups = tuple(GROUPS) if group == "all" else (group,)
    chosen = [(g, name) for g in groups for name in architectures(g) if only is None or name in only]
    unknown = sorted(set(only or ()) - {name for _, name in chosen})
    if unknown:
        raise SystemExit(
            f"lightning-autotp zoo: {', '.join(unknown)} is in none of the mappings ({', '.join(groups)}); "
            "--only takes names such as llama or gpt2"
        )
    verdicts = []
    for verdict in run(chosen, tp, limit, plan_only):
        verdicts.append(verdict)
        console.print(summary(verdict), markup=False, highlight=False, soft_wrap=True)
    console.print(totals_table(verdicts))
    command = f"lightning-autotp zoo --group {group} --tp {tp}"
    command += f" --only {' '.join(only or ())}" * bool(only) + " --plan-only" * plan_only
    if json is not None:
        json.write_text(to_json(verdicts, command))
    if page is None and only is None and not plan_only:
        page = Path("docs/zoo.md")
    if page is not None:
        page.parent.mkdir(parents=True, exist_ok=True)
        page.write_text(to_markdown(verdicts, command, {name: version(name) for name in ("torch", "transformers")}))


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
        prefix: which attribute of the LightningModule is the model, where there are several.
        tokenizer: a directory with the tokenizer's files, where they are not where the model was loaded from.
        max_shard_size: of a file.
        dtype: in which floating-point tensors are written, such as bfloat16; as they are by default.
        weights_only: false to run code that the checkpoint names; only for one that you trust.
    """
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
        f"{directory}: {exported.nbytes / 1e9:.3f} GB in {len(exported.weights)} file(s),"
        f" {time.perf_counter() - started:.1f} s",
        "tokenizer: " + ", ".join(exported.tokenizer)
        if exported.tokenizer
        else "no tokenizer: the model was not loaded from a local directory that has one; name one with --tokenizer",
    ]
    Console().print("\n".join(lines), markup=False, highlight=False, soft_wrap=True)


def consolidate(checkpoint: Path, file: Path) -> None:
    """Make one file of a checkpoint directory, for ``load_from_checkpoint``; all of it is in memory meanwhile.

    Args:
        checkpoint: the directory that a run with save_distributed_checkpoint=True wrote.
        file: where to.
    """
    try:
        consolidate_checkpoint(checkpoint, file)
    except (CheckpointError, OSError) as error:
        raise SystemExit(f"lightning-autotp consolidate: {error}") from error


def main() -> None:
    """Entry point."""
    commands: dict[str, Any] = {"plan": plan, "zoo": zoo, "export": export, "consolidate": consolidate}
    auto_cli(commands, args=_spelled_out(sys.argv[1:]), prog="lightning-autotp")


def _spelled_out(arguments: list[str]) -> list[str]:
    """``--only NAME NAME``, ``--plan-only`` and dashes in names, in the parser's own spelling."""
    spelled: list[str] = []
    names: list[str] | None = None
    for argument in arguments:
        if argument.startswith("--"):
            names = None
        if argument == "--only":
            names = []
        elif names is not None:
            names.append(argument)
            spelled.append(f"--only+={argument}")
        else:
            name, equals, value = argument.partition("=")
            if name.startswith("--"):
                name = "--" + name[2:].replace("-", "_")
            spelled.append("--plan_only=true" if argument == "--plan-only" else name + equals + value)
    return spelled


if __name__ == "__main__":
    main()
