"""The command ``lightning-autotp``."""

from __future__ import annotations

import time
from pathlib import Path

import torch
from jsonargparse import auto_cli
from rich.console import Console
from transformers import AutoConfig, AutoModelForCausalLM

from lightning_autotp.capture import CaptureError
from lightning_autotp.pipeline import make_plan
from lightning_autotp.solver import NothingToShard
from lightning_autotp.verify import VerificationError


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


def main() -> None:
    """Entry point."""
    auto_cli({"plan": plan}, prog="lightning-autotp")


if __name__ == "__main__":
    main()
